//! Checks the SELinux labels that pods and containers request. No container of Nacelle gets a label.
//!
//! In a VM, and on a node without SELinux, a label has no meaning and is ignored, as other runtimes do. For containers of engine
//! `host` on a node with SELinux a label is rejected by name, because they would run without the requested confinement.

use super::{FieldError, not_yet};
use nacelle_proto::cri;
use std::path::Path;

/// Returns whether this node enforces labels: SELinux is in the kernel, and its file system is mounted.
pub fn node_has_selinux() -> bool {
    Path::new("/sys/fs/selinux/enforce").exists()
}

/// Checks the label of a pod. `enforced` means that the kernel of its containers enforces labels.
pub fn pod_label(config: Option<&cri::PodSandboxConfig>, enforced: bool) -> Result<(), FieldError> {
    let security = config.and_then(|config| config.linux.as_ref()?.security_context.as_ref());
    label(
        "config.linux.security_context.selinux_options",
        security.and_then(|security| security.selinux_options.as_ref()),
        enforced,
    )
}

/// Checks the label of a container, like [`pod_label`].
pub fn container_label(config: Option<&cri::ContainerConfig>, enforced: bool) -> Result<(), FieldError> {
    let security = config.and_then(|config| config.linux.as_ref()?.security_context.as_ref());
    label(
        "config.linux.security_context.selinux_options",
        security.and_then(|security| security.selinux_options.as_ref()),
        enforced,
    )
}

fn label(field: &'static str, options: Option<&cri::SeLinuxOption>, enforced: bool) -> Result<(), FieldError> {
    let Some(options) = options.filter(|options| **options != cri::SeLinuxOption::default()) else { return Ok(()) };
    let cri::SeLinuxOption { user, role, r#type, level } = options;
    let label = format!("{user}:{role}:{type}:{level}");
    if enforced {
        let instead =
            "this node has SELinux, and containers of engine host get no label; leave it out, or run the pod in a VM";
        return not_yet(field, label, instead);
    }
    let label: String = label.chars().take(200).collect();
    tracing::info!(field, label, "the SELinux label is ignored: the kernel of the containers has no SELinux");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacelle_base::{Classify, FailureKind};

    #[test]
    fn a_label_is_refused_only_where_it_would_be_enforced() {
        let mut pod = cri::PodSandboxConfig::default();
        let mut container = cri::ContainerConfig::default();
        for enforced in [false, true] {
            assert_eq!((pod_label(None, enforced), container_label(None, enforced)), (Ok(()), Ok(())));
            let empty = Some(cri::SeLinuxOption::default());
            pod.linux.get_or_insert_default().security_context.get_or_insert_default().selinux_options = empty.clone();
            container.linux.get_or_insert_default().security_context.get_or_insert_default().selinux_options = empty;
            assert_eq!(
                (pod_label(Some(&pod), enforced), container_label(Some(&container), enforced)),
                (Ok(()), Ok(()))
            );
            let level = Some(cri::SeLinuxOption { level: "s0".into(), r#type: "spc_t".into(), ..Default::default() });
            pod.linux.as_mut().unwrap().security_context.as_mut().unwrap().selinux_options = level.clone();
            container.linux.as_mut().unwrap().security_context.as_mut().unwrap().selinux_options = level;
            for checked in [pod_label(Some(&pod), enforced), container_label(Some(&container), enforced)] {
                assert_eq!(checked.is_err(), enforced);
                if let Err(error) = checked {
                    assert_eq!(error.kind(), FailureKind::Unsupported);
                    assert!(error.to_string().contains("selinux_options is \"::spc_t:s0\""), "{error}");
                }
            }
        }
    }
}
