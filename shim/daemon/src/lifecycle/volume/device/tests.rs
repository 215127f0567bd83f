//! Tests which devices a container gets, with those that every Linux has.

use super::*;
use nacelle_base::{Classify, FailureKind};
use nacelle_model::container::ContainerConfig;

fn config(devices: &[(&str, &str)]) -> ContainerConfig {
    let mut config = (*nacelle_model::testing::container(1, 1).config).clone();
    let device = |(host_path, container_path): &(&str, &str)| DeviceRequest {
        host_path: (*host_path).into(),
        container_path: (*container_path).into(),
        permissions: "rw".into(),
        ..DeviceRequest::default()
    };
    config.devices = devices.iter().map(device).collect();
    config
}

#[test]
fn devices_of_the_node_are_found_with_numbers_and_modes() {
    let [zero] = of_node(&config(&[("/dev/zero", "/dev/nothing")]), None).unwrap().try_into().unwrap();
    assert_eq!(
        (zero.path.as_str(), zero.kind, zero.major, zero.minor),
        ("/dev/nothing", DeviceFileKind::Character, 1, 5)
    );
    assert_eq!((zero.mode & 0o600, zero.access.as_str()), (0o600, "rw"));
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    std::os::unix::fs::symlink("/dev/full", directory.path().join("link")).unwrap();
    fs::write(directory.path().join("file"), "").unwrap();
    let [full] = of_node(&config(&[(&path("link"), "/dev/x/y")]), None).unwrap().try_into().unwrap();
    assert_eq!((full.path.as_str(), full.minor), ("/dev/x/y", 7));
    for none in [path("none"), path("file"), path("")] {
        let error = of_node(&config(&[(&none, "/dev/x")]), None).unwrap_err();
        assert_eq!(error.kind(), FailureKind::Invalid);
        assert!(error.to_string().contains(&none), "{error}");
    }
    // A privileged container gets no links, files or paths of its own; a requested device takes precedence.
    assert_eq!(of_node(&config(&[]), Some(directory.path())).unwrap(), []);
    let all = of_node(&config(&[("/dev/zero", "/dev/null")]), Some("/dev".as_ref())).unwrap();
    let null = all.iter().find(|node| node.path == "/dev/null").unwrap();
    assert_eq!((null.minor, null.access.as_str()), (5, "rw"));
    assert!(all.iter().any(|node| node.path == "/dev/full" && node.access == "rwm"));
    assert!(all.iter().all(|node| !node.path.starts_with("/dev/pts") && node.path != "/dev/ptmx"));
}

/// Requests one device with these attributes at /dev/x.
fn with(host: &str, attributes: DeviceAttributes) -> ContainerConfig {
    let mut config = config(&[(host, "/dev/x")]);
    config.devices[0].attributes = attributes;
    config
}

/// Returns kind and number as attributes.
fn numbered(kind: DeviceFileKind, number: Option<(u64, u64)>) -> DeviceAttributes {
    DeviceAttributes { kind: Some(kind), number, ..DeviceAttributes::default() }
}

#[test]
fn a_specification_sets_what_the_node_does_not() {
    let found = |host: &str, attributes| -> DeviceNode {
        let [node] = of_node(&with(host, attributes), None).unwrap().try_into().unwrap();
        node
    };
    let owned = DeviceAttributes { mode: Some(0o640), uid: Some(7), gid: Some(8), ..DeviceAttributes::default() };
    let zero = found("/dev/zero", owned);
    assert_eq!((zero.kind, zero.major, zero.minor), (DeviceFileKind::Character, 1, 5));
    assert_eq!((zero.mode, zero.uid, zero.gid), (0o640, 7, 8));
    // Kind and number need no device of the node; the number alone replaces that of the node's device.
    let absent = found("/dev/no/such", numbered(DeviceFileKind::Block, Some((8, 3))));
    assert_eq!((absent.kind, absent.major, absent.minor, absent.mode), (DeviceFileKind::Block, 8, 3, 0o666));
    let full = DeviceAttributes { number: Some((1, 7)), ..DeviceAttributes::default() };
    assert_eq!(found("/dev/zero", full).minor, 7);
    let pipe = found("/dev/no/such", numbered(DeviceFileKind::Fifo, None));
    assert_eq!((pipe.kind, pipe.major, pipe.minor), (DeviceFileKind::Fifo, 0, 0));
    let refused = |host: &str, attributes| of_node(&with(host, attributes), None).unwrap_err();
    let error = refused("/dev/zero", numbered(DeviceFileKind::Block, None));
    assert_eq!(error.kind(), FailureKind::Invalid);
    assert!(error.to_string().contains("a block device") && error.to_string().contains("/dev/zero"), "{error}");
    for host in ["/dev/no/such", "/dev"] {
        assert!(matches!(refused(host, owned), LifecycleError::NoDevice { .. }), "{host}");
    }
}

#[test]
fn a_guest_has_devices_of_its_own() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    for (name, number) in [("null", 3), ("zero", 5), ("full", 7), ("random", 8), ("urandom", 9)] {
        std::os::unix::fs::symlink(format!("/dev/{name}"), path(name)).unwrap();
        let found = of_guest(&config(&[(&path(name), "/dev/x")])).unwrap();
        let [node] = found.nodes.try_into().unwrap();
        assert_eq!(
            (node.path.as_str(), node.kind, node.major, node.minor),
            ("/dev/x", DeviceFileKind::Character, 1, number)
        );
        let of_node = fs::metadata(format!("/dev/{name}")).unwrap();
        assert_eq!((node.mode, node.uid, node.gid), (of_node.mode() & 0o777, of_node.uid(), of_node.gid()));
        assert!(found.blocks.is_empty());
    }
    // The number decides, and not the path; a specification may set all of it.
    let fuse =
        DeviceAttributes { mode: Some(0o600), gid: Some(5), ..numbered(DeviceFileKind::Character, Some((10, 229))) };
    let [node] = of_guest(&with(&path("none"), fuse)).unwrap().nodes.try_into().unwrap();
    assert_eq!((node.minor, node.mode, node.uid, node.gid), (229, 0o600, 0, 5));
    let pipe = of_guest(&with(&path("none"), numbered(DeviceFileKind::Fifo, None))).unwrap();
    assert_eq!(pipe.nodes[0].kind, DeviceFileKind::Fifo);
}

#[test]
fn a_guest_has_well_known_devices_that_the_node_lacks() {
    for (path, number) in [("/dev/net/tun", (10, 200)), ("/dev/fuse", (10, 229))] {
        let found = of_guest(&config(&[(path, "/dev/x")])).unwrap();
        let [node] = found.nodes.try_into().unwrap();
        assert_eq!((node.path.as_str(), (node.major, node.minor)), ("/dev/x", number));
        let expected = fs::metadata(path).map_or(0o666, |file| file.mode() & 0o777);
        assert_eq!((node.mode, node.access.as_str()), (expected, "rw"));
    }
}

#[test]
fn a_guest_has_no_nested_virtualization() {
    let by_number = with("/dev/no/such", numbered(DeviceFileKind::Character, Some((10, 232))));
    for config in [by_number, config(&[("/dev/kvm", "/dev/kvm")])] {
        let error = of_guest(&config).unwrap_err();
        assert_eq!(error.kind(), FailureKind::Unsupported);
        assert!(error.to_string().contains(&config.devices[0].host_path), "{error}");
        assert!(error.to_string().contains("nested virtualization"), "{error}");
    }
}

#[test]
fn other_devices_of_the_node_do_not_reach_a_guest() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    fs::write(path("file"), "").unwrap();
    std::os::unix::fs::symlink("/dev/kmsg", path("link")).unwrap();
    for (host, kind) in [
        ("/dev/kmsg".to_owned(), FailureKind::Unsupported),
        (path("link"), FailureKind::Unsupported),
        (path(""), FailureKind::Unsupported),
        (path("file"), FailureKind::Invalid),
        (path("none"), FailureKind::Invalid),
    ] {
        let error = of_guest(&config(&[(&host, "/dev/x")])).unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
        assert!(error.to_string().contains(&host), "{error}");
    }
}
