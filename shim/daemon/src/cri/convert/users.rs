//! Converts NamespaceOption.userns_options and the id mappings of mounts into the pod's user namespace, the same for all its
//! containers.

use super::{FieldError, bad};
use nacelle_model::namespace::{IdRange, UserNamespace};
use nacelle_proto::cri;

/// The field in which pods and containers request a user namespace.
const FIELD: &str = "config.linux.security_context.namespace_options.userns_options";
/// The smallest number of ids: images use `nobody`, 65534.
const MIN_IDS: u32 = 65_536;

/// Returns a pod's user namespace: mode POD with one range each of users and groups, or none.
pub fn pod_namespace(options: &cri::NamespaceOption) -> Result<Option<UserNamespace>, FieldError> {
    let Some(requested) = &options.userns_options else { return Ok(None) };
    match requested.mode() {
        cri::NamespaceMode::Node if requested.uids.is_empty() && requested.gids.is_empty() => Ok(None),
        cri::NamespaceMode::Node => bad(FIELD, "NODE with mappings", "mappings go with POD"),
        cri::NamespaceMode::Pod => {
            let users = range("config.linux.security_context.namespace_options.userns_options.uids", &requested.uids)?;
            let groups = range("config.linux.security_context.namespace_options.userns_options.gids", &requested.gids)?;
            // The node's network alone may be combined with it (`user_namespaces_host_network`).
            let modes = [options.pid(), options.ipc()];
            if modes.contains(&cri::NamespaceMode::Node) {
                return bad(FIELD, "POD", "a pod that shares pid or ipc with the node has the node's users, too");
            }
            Ok(Some(UserNamespace { users, groups }))
        }
        mode => bad(FIELD, mode.as_str_name(), "POD, or NODE without mappings, are allowed"),
    }
}

/// Checks that a container requests the user namespace of its pod.
pub fn check_container(options: Option<&cri::NamespaceOption>, pod: Option<UserNamespace>) -> Result<(), FieldError> {
    let requested = options.and_then(|options| options.userns_options.as_ref());
    // The pod's check covers the combination with other namespaces.
    let alone = cri::NamespaceOption { userns_options: requested.cloned(), ..Default::default() };
    let got = pod_namespace(&alone)?;
    if got == pod {
        return Ok(());
    }
    bad(FIELD, describe(got), format!("a container has its pod's user namespace: {}", describe(pod)))
}

/// Returns whether a mount maps owner ids through the pod's user namespace: it has the pod's mappings, or none. Other mappings
/// are rejected.
pub fn check_mount(mount: &cri::Mount, pod: Option<UserNamespace>) -> Result<bool, FieldError> {
    let field = "config.mounts.uidMappings, gidMappings";
    if mount.uid_mappings.is_empty() && mount.gid_mappings.is_empty() {
        return Ok(false);
    }
    let requested =
        UserNamespace { users: range(field, &mount.uid_mappings)?, groups: range(field, &mount.gid_mappings)? };
    if Some(requested) == pod {
        return Ok(true);
    }
    bad(field, describe(Some(requested)), format!("none, or those of the pod are allowed: {}", describe(pod)))
}

/// Returns the user namespace in CRI's form.
pub fn report(namespace: UserNamespace) -> cri::UserNamespace {
    let mapping = |range: IdRange| vec![cri::IdMapping { host_id: range.first, container_id: 0, length: range.count }];
    cri::UserNamespace {
        mode: cri::NamespaceMode::Pod.into(),
        uids: mapping(namespace.users),
        gids: mapping(namespace.groups),
    }
}

fn describe(namespace: Option<UserNamespace>) -> String {
    let range = |range: IdRange| format!("0 is {}, of {}", range.first, range.count);
    match namespace {
        Some(namespace) => format!("POD, users: {}; groups: {}", range(namespace.users), range(namespace.groups)),
        None => "NODE".to_owned(),
    }
}

fn range(field: &'static str, mappings: &[cri::IdMapping]) -> Result<IdRange, FieldError> {
    let [mapping] = mappings else {
        return bad(field, format!("{} mappings", mappings.len()), "one mapping is needed");
    };
    let cri::IdMapping { host_id, container_id, length } = *mapping;
    if container_id != 0 {
        return bad(
            field,
            format!("container_id {container_id}"),
            "0 is needed: the container's root user must have an id on the node",
        );
    }
    if length < MIN_IDS {
        return bad(field, format!("length {length}"), format!("at least {MIN_IDS} is needed: images have so many"));
    }
    // The largest id is reserved.
    if host_id.checked_add(length).is_none() {
        return bad(field, format!("host_id {host_id} with length {length}"), "it must end at 4294967294 or before");
    }
    Ok(IdRange { first: host_id, count: length })
}

#[cfg(test)]
mod tests {
    use super::*;
    use cri::NamespaceMode::{Container, Node, Pod, Target};
    use nacelle_base::{Classify, FailureKind};
    use proptest::prelude::*;

    fn mapping(container_id: u32, host_id: u32, length: u32) -> cri::IdMapping {
        cri::IdMapping { host_id, container_id, length }
    }

    fn options(mode: cri::NamespaceMode, uids: &[cri::IdMapping], gids: &[cri::IdMapping]) -> cri::NamespaceOption {
        let users = cri::UserNamespace { mode: mode.into(), uids: uids.to_vec(), gids: gids.to_vec() };
        cri::NamespaceOption { userns_options: Some(users), ..Default::default() }
    }

    #[test]
    fn what_kubelet_and_critest_ask_for_is_taken() {
        let (one, other) = (mapping(0, 1000, 100_000), mapping(0, 65_536, 65_536));
        let taken = pod_namespace(&options(Pod, &[one], &[other])).unwrap().unwrap();
        assert_eq!((taken.users.first, taken.users.count, taken.groups.first), (1000, 100_000, 65_536));
        assert_eq!(pod_namespace(&options(Pod, &report(taken).uids, &report(taken).gids)).unwrap(), Some(taken));
        let on_node = cri::NamespaceOption { network: Node.into(), ..options(Pod, &[one], &[other]) };
        assert_eq!(pod_namespace(&on_node).unwrap(), Some(taken));
        assert_eq!(pod_namespace(&options(Node, &[], &[])).unwrap(), None);
        assert_eq!(pod_namespace(&cri::NamespaceOption::default()).unwrap(), None);
    }

    #[test]
    fn other_user_namespaces_are_rejected() {
        let good = [mapping(0, 65_536, 65_536)];
        let rows = [
            (options(Pod, &[], &[]), "uids is \"0 mappings\""),
            (options(Pod, &good, &[]), "gids is \"0 mappings\""),
            (options(Pod, &[good[0], good[0]], &good), "uids is \"2 mappings\""),
            (options(Pod, &[mapping(1, 1000, 100_000)], &good), "container_id 1"),
            (options(Pod, &good, &[mapping(0, 1000, 0)]), "length 0"),
            (options(Pod, &good, &[mapping(0, 1000, 65_535)]), "length 65535"),
            (options(Pod, &[mapping(0, u32::MAX - 65_535, 65_536)], &good), "4294967294"),
            (options(Node, &good, &good), "NODE with mappings"),
            (options(Container, &good, &good), "CONTAINER"),
            (options(Target, &[], &[]), "TARGET"),
            (cri::NamespaceOption { ipc: Node.into(), ..options(Pod, &good, &good) }, "the node's users"),
            (cri::NamespaceOption { pid: Node.into(), ..options(Pod, &good, &good) }, "the node's users"),
        ];
        for (requested, words) in rows {
            let error = pod_namespace(&requested).unwrap_err();
            assert_eq!(error.kind(), FailureKind::Invalid, "{error}");
            assert!(error.to_string().contains(words), "{words}: {error}");
        }
    }

    #[test]
    fn containers_and_mounts_have_their_pods() {
        let (one, other) = ([mapping(0, 65_536, 65_536)], [mapping(0, 131_072, 65_536)]);
        let pod = pod_namespace(&options(Pod, &one, &one)).unwrap();
        check_container(Some(&options(Pod, &one, &one)), pod).unwrap();
        check_container(Some(&options(Node, &[], &[])), None).unwrap();
        check_container(None, None).unwrap();
        for (requested, has) in [
            (None, pod),
            (Some(options(Node, &[], &[])), pod),
            (Some(options(Pod, &one, &other)), pod),
            (Some(options(Pod, &one, &one)), None),
        ] {
            let error = check_container(requested.as_ref(), has).unwrap_err();
            assert!(error.kind() == FailureKind::Invalid && error.to_string().contains("its pod's"), "{error}");
        }
        let mount = |uids: &[cri::IdMapping], gids: &[cri::IdMapping]| cri::Mount {
            uid_mappings: uids.to_vec(),
            gid_mappings: gids.to_vec(),
            ..Default::default()
        };
        assert_eq!(check_mount(&mount(&[], &[]), pod), Ok(false));
        assert_eq!(check_mount(&mount(&one, &one), pod), Ok(true));
        for (requested, has) in [(mount(&one, &other), pod), (mount(&one, &[]), pod), (mount(&one, &one), None)] {
            assert_eq!(check_mount(&requested, has).unwrap_err().kind(), FailureKind::Invalid);
        }
    }

    proptest! {
        #[test]
        fn an_accepted_range_contains_root_and_ends_before_the_reserved_id(
            container_id in prop_oneof![4 => Just(0), 1 => any::<u32>()], host_id: u32, length: u32,
        ) {
            let requested = options(Pod, &[mapping(container_id, host_id, length)], &[mapping(0, 0, 65_536)]);
            match pod_namespace(&requested) {
                Ok(taken) => {
                    let range = taken.unwrap().users;
                    prop_assert_eq!((container_id, range.first, range.count), (0, host_id, length));
                    prop_assert!(length >= MIN_IDS && u64::from(host_id) + u64::from(length) <= u64::from(u32::MAX));
                }
                Err(error) => {
                    prop_assert_eq!(error.kind(), FailureKind::Invalid);
                    let end = u64::from(host_id) + u64::from(length);
                    prop_assert!(container_id != 0 || length < MIN_IDS || end > u64::from(u32::MAX));
                }
            }
        }
    }
}
