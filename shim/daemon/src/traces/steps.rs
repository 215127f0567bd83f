//! Names the spans of steps. The names are few, whatever a pod process reports, and each kind of work has its own: a step that a pod
//! process has measured passes for no other work.

use crate::metrics::labels::phase_label;

/// The kind of work whose steps are spans below a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TracedWork {
    /// The start of a pod.
    PodStart,
    /// The end of a pod.
    PodEnd,
    /// The creation and the start of a container.
    Container,
    /// The pull of an image.
    Pull,
}

impl TracedWork {
    /// Returns the name of a step's span.
    pub(super) fn step_name(self, step: &str) -> &'static str {
        match (self, step) {
            (TracedWork::PodStart, step) => phase_label(step),
            (TracedWork::PodEnd, "end of the pod process") => "end_pod_process",
            (TracedWork::PodEnd, "end of the network") => "end_network",
            (TracedWork::Container, "prepared") => "prepare_container",
            (TracedWork::Container, "made") => "create_in_guest",
            (TracedWork::Container, "started") => "start_in_guest",
            (TracedWork::Pull, "manifest") => "fetch_manifest",
            (TracedWork::Pull, "configuration") => "fetch_configuration",
            (TracedWork::Pull, "layer") => "fetch_layer",
            (TracedWork::Pull, "tree") => "build_tree",
            _ => "other",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_of_other_work_has_no_name() {
        assert_eq!(TracedWork::Container.step_name("started"), "start_in_guest");
        assert_eq!(TracedWork::PodStart.step_name("CNI"), "cni_add");
        for step in ["started", "layer", "end of the network", "anything"] {
            assert_eq!(TracedWork::PodStart.step_name(step), "other");
        }
    }
}
