//! Determines the socket volumes of a pod from its annotation.

use super::{FieldError, bad, cut};
use nacelle_model::pod::PodConfig;
use nacelle_vmi::annotations::sockets as annotation;

/// The annotation with the container paths of socket volumes.
pub const SOCKETS: &str = "vm.nacelle.dev/sockets";
/// The annotation's field in errors.
const FIELD: &str = "config.annotations[\"vm.nacelle.dev/sockets\"]";

/// Returns the container paths of the pod's socket volumes. Rejects the annotation in a pod without a VM or with a user namespace: a
/// guest that was taken over could claim to be root of the node. Admission has rejected it in a machine pod.
pub fn socket_mounts(pod: &PodConfig) -> Result<Vec<String>, FieldError> {
    let Some(text) = pod.annotations.get(SOCKETS) else { return Ok(Vec::new()) };
    if !pod.kind.has_guest() {
        let why =
            "the pod has no VM, so its containers connect to sockets of the node without it; remove the annotation";
        return Err(FieldError::NotHere { field: FIELD, value: cut(text), why });
    }
    if pod.user_namespace.is_some() {
        let why = "the node does not check which users of the pod's user namespace connect; leave out the annotation or hostUsers: false";
        return Err(FieldError::NotHere { field: FIELD, value: cut(text), why });
    }
    annotation::paths(text).map_or_else(|| bad(FIELD, text, annotation::RULE), Ok)
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacelle_base::{Classify, FailureKind};
    use nacelle_model::namespace::NodeNamespaces;
    use nacelle_model::pod::PodKind;

    fn pod(annotation: Option<&str>) -> PodConfig {
        let mut pod = (*nacelle_model::testing::pod(1).config).clone();
        pod.annotations.extend(annotation.map(|text| (SOCKETS.to_owned(), text.to_owned())));
        pod
    }

    #[test]
    fn paths_come_from_the_annotation() {
        assert_eq!(socket_mounts(&pod(None)).unwrap(), [""; 0]);
        assert_eq!(
            socket_mounts(&pod(Some("/run/spire/,/var/run/docker.sock"))).unwrap(),
            ["/run/spire", "/var/run/docker.sock"]
        );
        let error = socket_mounts(&pod(Some("/run/../etc"))).unwrap_err();
        assert_eq!(error.kind(), FailureKind::Invalid);
        assert!(error.to_string().contains(SOCKETS), "{error}");
    }

    #[test]
    fn a_pod_with_a_user_namespace_is_refused_by_name() {
        let range = nacelle_model::namespace::IdRange { first: 65_536, count: 65_536 };
        let user_namespace = Some(nacelle_model::namespace::UserNamespace { users: range, groups: range });
        let error = socket_mounts(&PodConfig { user_namespace, ..pod(Some("/run/spire")) }).unwrap_err();
        assert!(error.kind() == FailureKind::Conflict && error.to_string().contains("hostUsers"), "{error}");
    }

    #[test]
    fn a_pod_without_a_vm_is_refused_by_name() {
        let pod =
            PodConfig { kind: PodKind::Host { namespaces: NodeNamespaces::default() }, ..pod(Some("/run/spire")) };
        let error = socket_mounts(&pod).unwrap_err();
        assert_eq!(error.kind(), FailureKind::Conflict);
        assert!(error.to_string().contains(SOCKETS) && error.to_string().contains("has no VM"), "{error}");
    }
}
