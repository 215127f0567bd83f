//! Converts CRI's devices into `DeviceRequest`, and adds the edits of CDI devices to a request.

use super::{FieldError, bad, not_yet};
use crate::cdi::{CdiEdits, MAX_NAMES};
use nacelle_model::device::DeviceRequest;
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
/// File systems below /dev that each container has for itself.
const CONTAINER_OWNED: [&str; 3] = ["/dev/pts", "/dev/shm", "/dev/mqueue"];

/// Checks and converts the devices of a container.
pub fn devices(requested: &[cri::Device], users: Option<UserNamespace>) -> Result<Vec<DeviceRequest>, FieldError> {
    if requested.len() > MAX_DEVICES {
        return bad("config.devices", requested.len(), format!("at most {MAX_DEVICES} are allowed"));
    }
    if let (Some(device), Some(_)) = (requested.first(), users) {
        let instead = "a user namespace cannot create devices; leave it out, or run the pod without one";
        return not_yet("config.devices.host_path", &device.host_path, instead);
    }
    let mut taken = BTreeSet::new();
    let mut devices = Vec::with_capacity(requested.len());
    for device in requested {
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
        if letters.is_empty() || !known || letters.len() != device.permissions.len() {
            return bad("config.devices.permissions", &device.permissions, "letters of rwm are needed, each once");
        }
        devices.push(DeviceRequest {
            container_path: device.container_path.clone(),
            host_path: device.host_path.clone(),
            permissions: device.permissions.clone(),
        });
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

/// Adds the edits of a container's CDI devices to its request, so that they are checked like the rest of it.
pub fn apply_cdi_edits(config: &mut cri::ContainerConfig, edits: CdiEdits) {
    let env = |(key, value): (String, String)| cri::KeyValue { key, value: value.into_bytes() };
    config.envs.extend(edits.env.into_iter().map(env));
    let device = |(host_path, container_path, permissions)| cri::Device { container_path, host_path, permissions };
    config.devices.extend(edits.devices.into_iter().map(device));
    config.mounts.extend(edits.mounts.into_iter().map(|mount| cri::Mount {
        container_path: mount.container_path,
        host_path: mount.host_path,
        mount_options: mount.options,
        ..Default::default()
    }));
    if !edits.groups.is_empty() {
        let linux = config.linux.get_or_insert_default();
        let security = linux.security_context.get_or_insert_default();
        security.supplemental_groups.extend(edits.groups.into_iter().map(i64::from));
    }
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
        apply_cdi_edits(&mut config, CdiEdits::default());
        assert_eq!(config, cri::ContainerConfig::default());
        let edits = CdiEdits {
            env: vec![("A".into(), "b".into())],
            devices: vec![("/dev/zero".into(), "/dev/x".into(), "r".into())],
            mounts: vec![crate::cdi::CdiMount {
                host_path: "/lib".into(),
                container_path: "/l".into(),
                options: vec!["ro".into()],
            }],
            groups: vec![44],
        };
        apply_cdi_edits(&mut config, edits);
        assert_eq!(config.envs[0], cri::KeyValue { key: "A".into(), value: b"b".to_vec() });
        assert_eq!(config.devices, [device("/dev/zero", "/dev/x", "r")]);
        assert_eq!(
            (config.mounts[0].host_path.as_str(), config.mounts[0].mount_options.as_slice()),
            ("/lib", &["ro".to_owned()][..])
        );
        assert_eq!(config.linux.unwrap().security_context.unwrap().supplemental_groups, [44]);
    }

    #[test]
    fn devices_are_taken_over_or_refused_by_name() {
        let both = [device("/dev/kvm", "/dev/a/kvm", "rw"), device("/srv/x", "/dev/b", "mrw")];
        let taken = devices(&both, None).unwrap();
        assert_eq!((taken[0].container_path.as_str(), taken[1].permissions.as_str()), ("/dev/a/kvm", "mrw"));
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
            let error = devices(&[requested], None).unwrap_err();
            assert!(error.kind() == FailureKind::Invalid && error.to_string().contains(field), "{error}");
        }
        let one = || device("/dev/kvm", "/dev/kvm", "r");
        assert!(devices(&[one(), one()], None).unwrap_err().to_string().contains("once"));
        assert!(devices(&vec![one(); MAX_DEVICES + 1], None).unwrap_err().to_string().contains("256"));
        let range = nacelle_model::namespace::IdRange { first: 1 << 16, count: 1 << 16 };
        let users = Some(UserNamespace { users: range, groups: range });
        assert_eq!(devices(&[one()], users).unwrap_err().kind(), FailureKind::Unsupported);
        assert_eq!(devices(&[], users), Ok(vec![]));
    }
}
