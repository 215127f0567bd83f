//! Determines the checkpoint from which a pod continues by its annotation.

use super::{FieldError, bad};
use nacelle_model::pod::PodConfig;
use nacelle_vmi::annotations::checkpoint as annotation;

/// The annotation with the name of the checkpoint.
pub const FROM_CHECKPOINT: &str = "vm.nacelle.dev/from-checkpoint";

/// Returns the name of the checkpoint. It and the namespace of the pod, in whose directory the checkpoint is, are names of directories.
pub fn checkpoint(pod: &PodConfig) -> Result<Option<String>, FieldError> {
    let Some(name) = pod.annotations.get(FROM_CHECKPOINT) else { return Ok(None) };
    let namespace = &pod.name.namespace;
    if !annotation::is_name(namespace) {
        return bad(
            "config.metadata.namespace",
            namespace,
            "a pod with the annotation vm.nacelle.dev/from-checkpoint is in a namespace whose name is a DNS label",
        );
    }
    match annotation::is_name(name) {
        true => Ok(Some(name.clone())),
        false => bad("config.annotations[\"vm.nacelle.dev/from-checkpoint\"]", name, annotation::RULE),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacelle_base::{Classify, FailureKind};

    #[test]
    fn a_checkpoint_has_a_name_in_a_namespace() {
        let found = |namespace: &str, text: Option<&str>| {
            let mut pod = (*nacelle_model::testing::pod(1).config).clone();
            pod.name.namespace = namespace.to_owned();
            pod.annotations.extend(text.map(|text| (FROM_CHECKPOINT.to_owned(), text.to_owned())));
            checkpoint(&pod)
        };
        assert_eq!(found("..", None).unwrap(), None);
        assert_eq!(found("default", Some("web-1")).unwrap().as_deref(), Some("web-1"));
        for (namespace, name, field) in [
            ("..", "web", "namespace"),
            ("a/b", "web", "namespace"),
            ("a", "../web", FROM_CHECKPOINT),
            ("a", "", FROM_CHECKPOINT),
        ] {
            let error = found(namespace, Some(name)).unwrap_err();
            assert_eq!(error.kind(), FailureKind::Invalid);
            assert!(error.to_string().contains(field), "{error}");
        }
    }
}
