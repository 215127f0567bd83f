//! Converts CRI's devices into `DeviceRequest`, and adds the edits of CDI devices to a request.

use super::{FieldError, bad, not_yet};
use crate::cdi::{CdiEdits, CdiMount, MAX_NAMES};
use nacelle_model::device::{DeviceAttributes, DeviceRequest};
use nacelle_model::mount::Propagation;
use nacelle_model::namespace::UserNamespace;
use nacelle_proto::cri;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path};

/// The largest number of devices that one container may request.
const MAX_DEVICES: usize = 256;
/// The prefix of the annotations that request CDI devices.
const CDI_ANNOTATIONS: &str = "cdi.k8s.io/";
/// The longest path in bytes that Linux accepts in a call.
const PATH_MAX: usize = 4095;
/// The rule for permissions.
const LETTERS: &str = "letters of rwm are needed, each once";
/// File systems below /dev that each container has for itself.
const CONTAINER_OWNED: [&str; 3] = ["/dev/pts", "/dev/shm", "/dev/mqueue"];

/// Checks and converts the devices of a container. `of_cdi` are those of its CDI devices.
pub fn devices(
    requested: &[cri::Device],
    of_cdi: &[DeviceRequest],
    users: Option<UserNamespace>,
) -> Result<Vec<DeviceRequest>, FieldError> {
    let count = requested.len() + of_cdi.len();
    if count > MAX_DEVICES {
        return bad("config.devices", count, format!("at most {MAX_DEVICES} are allowed"));
    }
    let converted = requested.iter().map(|device| DeviceRequest {
        container_path: device.container_path.clone(),
        host_path: device.host_path.clone(),
        permissions: device.permissions.clone(),
        attributes: DeviceAttributes::default(),
    });
    let devices: Vec<DeviceRequest> = converted.chain(of_cdi.iter().cloned()).collect();
    if let (Some(device), Some(_)) = (devices.first(), users) {
        let instead = "a user namespace cannot create devices; leave it out, or run the pod without one";
        return not_yet("config.devices.host_path", &device.host_path, instead);
    }
    let mut taken = BTreeSet::new();
    for (number, device) in devices.iter().enumerate() {
        if !is_absolute_without_parent(&device.host_path) {
            return bad("config.devices.host_path", &device.host_path, "an absolute path without .. is needed");
        }
        let at = Path::new(&device.container_path);
        let below =
            at.starts_with("/dev") && at != Path::new("/dev") && !CONTAINER_OWNED.iter().any(|own| at.starts_with(own));
        if !below || !is_absolute_without_parent(&device.container_path) {
            let rule = "a path below /dev, without .. and not in /dev/pts, /dev/shm or /dev/mqueue, is needed";
            return bad("config.devices.container_path", &device.container_path, rule);
        }
        if !taken.insert(at) {
            return bad("config.devices.container_path", &device.container_path, "it may be given once only");
        }
        let letters: BTreeSet<char> = device.permissions.chars().collect();
        let known = letters.iter().all(|letter| "rwm".contains(*letter));
        // Only a CDI specification can leave a device without permissions.
        let missing = letters.is_empty() && number < requested.len();
        if missing || !known || letters.len() != device.permissions.len() {
            return bad("config.devices.permissions", &device.permissions, LETTERS);
        }
    }
    Ok(devices)
}

/// Returns the names of the CDI devices that a container requests: in the field for them and, as device plugins do, in annotations
/// `cdi.k8s.io/…` with names separated by commas (Container Device Interface, "Kubernetes"). A name that is requested twice is one device.
pub fn cdi_names(config: &cri::ContainerConfig) -> Vec<String> {
    let in_field = config.cdi_devices.iter().map(|device| device.name.as_str());
    // The map of the request has no order.
    let annotations: BTreeMap<_, _> =
        config.annotations.iter().filter(|(key, _)| key.starts_with(CDI_ANNOTATIONS)).collect();
    let in_annotations = annotations.values().flat_map(|names| names.split(','));
    // One more than a container may have is refused with the names.
    let mut names: Vec<String> = Vec::new();
    for name in in_field.chain(in_annotations) {
        if names.len() <= MAX_NAMES && !names.iter().any(|known| known == name) {
            names.push(name.to_owned());
        }
    }
    names
}

/// Adds the edits of a container's CDI devices to its request, so that they are checked like the rest of it. Returns the devices,
/// which have properties that CRI's devices lack. A device or mount replaces an earlier one at the same path in the container, as
/// with other runtimes: several devices of a vendor may share one, and a device plugin may request by CDI and by path.
pub fn apply_cdi_edits(config: &mut cri::ContainerConfig, edits: CdiEdits) -> Vec<DeviceRequest> {
    let env = |(key, value): (String, String)| cri::KeyValue { key, value: value.into_bytes() };
    config.envs.extend(edits.env.into_iter().map(env));
    for mount in edits.mounts {
        config.mounts.retain(|other| !is_same_path(&other.container_path, &mount.container_path));
        config.mounts.push(cri_mount(mount));
    }
    let mut devices: Vec<DeviceRequest> = Vec::with_capacity(edits.devices.len());
    for device in edits.devices {
        config.devices.retain(|other| !is_same_path(&other.container_path, &device.container_path));
        devices.retain(|other| !is_same_path(&other.container_path, &device.container_path));
        devices.push(device);
    }
    if !edits.groups.is_empty() {
        let linux = config.linux.get_or_insert_default();
        let security = linux.security_context.get_or_insert_default();
        security.supplemental_groups.extend(edits.groups.into_iter().map(i64::from));
    }
    devices
}

fn cri_mount(mount: CdiMount) -> cri::Mount {
    let propagation = match mount.propagation {
        Propagation::Private => cri::MountPropagation::PropagationPrivate,
        Propagation::FromNode => cri::MountPropagation::PropagationHostToContainer,
        Propagation::BothWays => cri::MountPropagation::PropagationBidirectional,
    };
    cri::Mount {
        container_path: mount.container_path,
        host_path: mount.host_path,
        mount_options: mount.options,
        propagation: propagation.into(),
        ..Default::default()
    }
}

fn is_same_path(one: &str, other: &str) -> bool {
    Path::new(one).components().eq(Path::new(other).components())
}

fn is_absolute_without_parent(path: &str) -> bool {
    let inside = Path::new(path).components().all(|part| part != Component::ParentDir);
    path.starts_with('/') && inside && !path.contains('\0') && path.len() <= PATH_MAX
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacelle_base::{Classify, FailureKind};

    fn device(host: &str, at: &str, permissions: &str) -> cri::Device {
        cri::Device { container_path: at.into(), host_path: host.into(), permissions: permissions.into() }
    }

    fn of_cdi(host: &str, at: &str, permissions: &str) -> DeviceRequest {
        DeviceRequest {
            container_path: at.into(),
            host_path: host.into(),
            permissions: permissions.into(),
            attributes: DeviceAttributes { mode: Some(0o600), ..DeviceAttributes::default() },
        }
    }

    #[test]
    fn cdi_devices_are_requested_by_field_and_annotation() {
        let mut config = cri::ContainerConfig::default();
        assert_eq!(cdi_names(&config), Vec::<String>::new());
        config.cdi_devices = vec![cri::CdiDevice { name: "a.b/c=d".into() }];
        for (key, value) in [("cdi.k8s.io/z", "a.b/c=d,a.b/c=f"), ("cdi.k8s.io/a", "a.b/c=e"), ("other/x", "a.b/c=g")] {
            config.annotations.insert(key.into(), value.into());
        }
        assert_eq!(cdi_names(&config), ["a.b/c=d", "a.b/c=e", "a.b/c=f"]);
        // A name that is none is refused where all names are checked.
        config.annotations.insert("cdi.k8s.io/empty".into(), String::new());
        assert!(cdi_names(&config).contains(&String::new()));
    }

    #[test]
    fn edits_are_asked_for_like_the_rest() {
        let mut config = cri::ContainerConfig::default();
        assert_eq!(apply_cdi_edits(&mut config, CdiEdits::default()), []);
        assert_eq!(config, cri::ContainerConfig::default());
        let mount = |at: &str, option: &str, propagation| CdiMount {
            host_path: "/lib".into(),
            container_path: at.into(),
            options: vec![option.into()],
            propagation,
        };
        let edits = CdiEdits {
            env: vec![("A".into(), "b".into())],
            devices: vec![
                of_cdi("/dev/zero", "/dev/x", "r"),
                of_cdi("/dev/null", "/dev/a/", "w"),
                of_cdi("/dev/full", "/dev/x", ""),
            ],
            mounts: vec![
                mount("/l", "ro", Propagation::Private),
                mount("/m", "ro", Propagation::FromNode),
                mount("/l/", "nosuid", Propagation::BothWays),
            ],
            groups: vec![44],
        };
        config.devices = vec![device("/dev/kvm", "/dev//a", "r"), device("/dev/kvm", "/dev/kvm", "r")];
        config.mounts = vec![cri::Mount { container_path: "/m".into(), ..Default::default() }];
        let devices = apply_cdi_edits(&mut config, edits);
        assert_eq!(config.envs[0], cri::KeyValue { key: "A".into(), value: b"b".to_vec() });
        // The last one of each path is left.
        assert_eq!(devices, [of_cdi("/dev/null", "/dev/a/", "w"), of_cdi("/dev/full", "/dev/x", "")]);
        assert_eq!(config.devices, [device("/dev/kvm", "/dev/kvm", "r")]);
        let mounts: Vec<_> = (config.mounts.iter())
            .map(|mount| (mount.container_path.as_str(), mount.mount_options[0].as_str(), mount.propagation()))
            .collect();
        let (from_node, both) =
            (cri::MountPropagation::PropagationHostToContainer, cri::MountPropagation::PropagationBidirectional);
        assert_eq!(mounts, [("/m", "ro", from_node), ("/l/", "nosuid", both)]);
        assert_eq!(config.linux.unwrap().security_context.unwrap().supplemental_groups, [44]);
    }

    #[test]
    fn devices_are_taken_over_or_refused_by_name() {
        let both = [device("/dev/kvm", "/dev/a/kvm", "rw"), device("/srv/x", "/dev/b", "mrw")];
        let taken = devices(&both, &[of_cdi("/dev/x", "/dev/c", "")], None).unwrap();
        assert_eq!((taken[2].permissions.as_str(), taken[2].attributes.mode), ("", Some(0o600)));
        assert_eq!((taken[0].container_path.as_str(), taken[1].permissions.as_str()), ("/dev/a/kvm", "mrw"));
        for (path, permissions) in [("/kvm", "r"), ("/dev/c", "x"), ("/dev/b", "r")] {
            let error = devices(&both, &[of_cdi("/dev/x", path, permissions)], None).unwrap_err();
            assert_eq!(error.kind(), FailureKind::Invalid, "{error}");
        }
        for (requested, field) in [
            (device("dev/kvm", "/dev/kvm", "r"), "host_path"),
            (device("/dev/../kvm", "/dev/kvm", "r"), "host_path"),
            (device("", "/dev/kvm", "r"), "host_path"),
            (device("/dev/kvm", "/kvm", "r"), "container_path"),
            (device("/dev/kvm", "/dev/", "r"), "container_path"),
            (device("/dev/kvm", "/dev/../etc/kvm", "r"), "container_path"),
            (device("/dev/kvm", "/dev/shm/kvm", "r"), "container_path"),
            (device("/dev/kvm", "/dev/k\0", "r"), "container_path"),
            (device("/dev/kvm", "/dev/kvm", ""), "permissions"),
            (device("/dev/kvm", "/dev/kvm", "rx"), "permissions"),
            (device("/dev/kvm", "/dev/kvm", "rr"), "permissions"),
        ] {
            let error = devices(&[requested], &[], None).unwrap_err();
            assert!(error.kind() == FailureKind::Invalid && error.to_string().contains(field), "{error}");
        }
        let one = || device("/dev/kvm", "/dev/kvm", "r");
        assert!(devices(&[one(), one()], &[], None).unwrap_err().to_string().contains("once"));
        assert!(
            devices(&vec![one(); MAX_DEVICES], &[of_cdi("/dev/x", "/dev/c", "r")], None)
                .unwrap_err()
                .to_string()
                .contains("256")
        );
        let range = nacelle_model::namespace::IdRange { first: 1 << 16, count: 1 << 16 };
        let users = Some(UserNamespace { users: range, groups: range });
        assert_eq!(
            devices(&[], &[of_cdi("/dev/x", "/dev/c", "r")], users).unwrap_err().kind(),
            FailureKind::Unsupported
        );
        assert_eq!(devices(&[], &[], users), Ok(vec![]));
    }
}
