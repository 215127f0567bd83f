//! Determines the emptyDir rules of a pod, `EmptyDirs`, from its handler and its annotation.

use super::{FieldError, bad, cut};
use crate::config::{EmptyDir, Handler};
use nacelle_model::empty_dir::EmptyDirs;
use nacelle_model::pod::PodConfig;
use nacelle_vmi::annotations::empty_dirs as annotation;
use std::collections::BTreeMap;

/// The annotation with the sizes of emptyDirs, which CRI does not transmit.
pub const LIMITS: &str = "vm.nacelle.dev/empty-dir-limits";
/// The annotation's field in errors.
const FIELD: &str = "config.annotations[\"vm.nacelle.dev/empty-dir-limits\"]";

/// Returns `None` if the pod has no guest, or the node maps its owner ids. A size limit cannot be enforced then, and is rejected.
pub fn empty_dirs(pod: &PodConfig, handler: &Handler) -> Result<Option<EmptyDirs>, FieldError> {
    let requested = pod.annotations.get(LIMITS);
    let limits = requested.map_or_else(|| Ok(BTreeMap::new()), |text| limits(text))?;
    let cannot = if !pod.kind.has_guest() {
        "the pod has no VM, and its emptyDirs are directories of the node, whose sizeLimit kubelet enforces"
    } else if pod.user_namespace.is_some() {
        "the emptyDirs of a pod with a user namespace are directories of the node, whose sizeLimit kubelet enforces"
    } else if handler.empty_dir == EmptyDir::Shared {
        "this handler's emptyDirs are directories of the node (empty_dir = \"shared\"), whose sizeLimit kubelet enforces; \
         empty_dir = \"disk\" has them keep a size"
    } else {
        ""
    };
    if let Some(text) = requested.filter(|_| !cannot.is_empty()) {
        return Err(FieldError::NotHere { field: FIELD, value: cut(text), why: cannot });
    }
    let own = pod.kind.has_guest() && pod.user_namespace.is_none();
    Ok(own.then(|| EmptyDirs {
        disks: handler.empty_dir == EmptyDir::Disk,
        limits,
        limit: handler.empty_dir_mib.map(|mib| mib << 20),
    }))
}

fn limits(text: &str) -> Result<BTreeMap<String, u64>, FieldError> {
    annotation::limits(text).map_or_else(|| bad(FIELD, text, annotation::RULE), Ok)
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacelle_base::{Classify, FailureKind};
    use nacelle_model::empty_dir::{MAX_QUOTA, MIN_QUOTA};
    use nacelle_model::namespace::{IdRange, NodeNamespaces, UserNamespace};
    use nacelle_model::pod::PodKind;
    use proptest::prelude::*;

    fn pod(annotation: Option<&str>) -> PodConfig {
        let mut pod = (*nacelle_model::testing::pod(1).config).clone();
        pod.annotations.extend(annotation.map(|text| (LIMITS.to_owned(), text.to_owned())));
        pod
    }

    fn disks() -> Handler {
        Handler { empty_dir: EmptyDir::Disk, ..Handler::default() }
    }

    #[test]
    fn sizes_are_those_of_the_annotation_else_of_the_handler() {
        let handler = Handler { empty_dir_mib: Some(100), ..disks() };
        let found = empty_dirs(&pod(Some("scratch=64Mi,cache-2=20M,big=1.5Gi")), &handler).unwrap().unwrap();
        assert_eq!((found.disks, found.limit), (true, Some(100 << 20)));
        assert_eq!(
            found.limits,
            [("scratch".into(), 64 << 20), ("cache-2".into(), 20_000_000), ("big".into(), 3 << 29)].into()
        );
        let found = empty_dirs(&pod(None), &Handler::default()).unwrap().unwrap();
        assert_eq!(found, EmptyDirs { disks: false, limits: BTreeMap::new(), limit: None });
    }

    #[test]
    fn what_is_no_list_of_sizes_is_refused_by_name() {
        let many: Vec<String> = (0..65).map(|n| format!("v{n}=16Mi")).collect();
        let many = many.join(",");
        for text in [
            "",
            "a",
            "a=",
            "=16Mi",
            "a=16Mi,",
            "a=16Mi,a=16Mi",
            "a=16Mi, b=16Mi",
            "A=16Mi",
            "a/b=16Mi",
            "-a=16Mi",
            "a=15Mi",
            "a=5Ti",
            "a=16777216.5",
            "a=-16Mi",
            "a=16MiB",
            "a=16 Mi",
            "a=99999999999999999999",
            "a=18446744073709551615Ki",
            many.as_str(),
        ] {
            let error = empty_dirs(&pod(Some(text)), &disks()).unwrap_err();
            assert_eq!(error.kind(), FailureKind::Invalid, "{text}: {error}");
            assert!(error.to_string().contains(LIMITS), "{error}");
        }
    }

    #[test]
    fn a_size_that_nobody_keeps_is_refused() {
        let requested = || pod(Some("a=16Mi"));
        let range = IdRange { first: 65536, count: 65536 };
        let users = PodConfig { user_namespace: Some(UserNamespace { users: range, groups: range }), ..requested() };
        let on_host = PodConfig { kind: PodKind::Host { namespaces: NodeNamespaces::default() }, ..requested() };
        for (pod, handler) in [(&requested(), &Handler::default()), (&users, &disks()), (&on_host, &disks())] {
            let error = empty_dirs(pod, handler).unwrap_err();
            assert!(error.kind() == FailureKind::Conflict && error.to_string().contains("sizeLimit"), "{error}");
        }
        for pod in [users, on_host] {
            let plain = PodConfig { annotations: BTreeMap::new(), ..pod };
            assert_eq!(empty_dirs(&plain, &disks()).unwrap(), None);
        }
    }

    proptest! {
        #[test]
        fn whatever_a_pod_writes_sizes_are_in_bounds(text in "\\PC{0,64}|([a-c-]{1,3}=[0-9]{1,20}(Ki|Mi|Gi|Ti|k|M|G|T)?,?){1,5}") {
            if let Ok(found) = limits(&text) {
                prop_assert!(!found.is_empty() && found.len() <= annotation::MANY);
                prop_assert!(found.values().all(|size| (MIN_QUOTA..=MAX_QUOTA).contains(size)));
            }
        }
    }
}
