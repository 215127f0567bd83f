//! Converts ContainerConfig.mounts into image volumes and volumes of the node; other kinds of mounts are rejected by name.

use super::{FieldError, bad, name_of_image, not_yet, users};
use crate::config::{Config, EngineSetting};
use nacelle_base::mounts;
use nacelle_model::container::ContainerConfig;
use nacelle_model::mount::{ImageVolume, MountOption, MountRequest, NodeVolume, Propagation};
use nacelle_model::namespace::UserNamespace;
use nacelle_proto::cri;
use std::collections::BTreeSet;
use std::path::{Component, Path, PathBuf};

/// The longest path in bytes that Linux accepts in a call.
const PATH_MAX: usize = 4095;
/// The mount option that duplicates the field `readonly`.
const READ_ONLY: &str = "ro";
/// The directory of a container's devices.
const DEV: &str = "/dev";

/// Checks and converts mounts, and sorts them into mount order, so that a volume inside another one covers it.
pub fn volumes(
    mounts: &[cri::Mount],
    users: Option<UserNamespace>,
) -> Result<(Vec<ImageVolume>, Vec<NodeVolume>), FieldError> {
    let (mut of_images, mut of_node) = (Vec::new(), Vec::new());
    let mut taken = BTreeSet::new();
    for mount in mounts {
        let path = container_path(&mount.container_path)?;
        if !taken.insert(Path::new(&path).components().collect::<PathBuf>()) {
            return bad("config.mounts.container_path", &path, "it may be given once only");
        }
        let id_mapped = users::check_mount(mount, users)?;
        let options = options(mount, users)?;
        match &mount.image {
            Some(image) => of_images.push(image_volume(mount, image, path, options)?),
            None => of_node.push(node_volume(mount, path, id_mapped, options, users)?),
        }
    }
    let depth = |path: &str| Path::new(path).components().count();
    of_images.sort_by_key(|volume| depth(&volume.container_path));
    of_node.sort_by_key(|volume: &NodeVolume| depth(&volume.container_path));
    Ok((of_images, of_node))
}

/// Returns what only the status of the container repeats of its mounts.
pub fn mount_requests(mounts: &[cri::Mount]) -> Vec<MountRequest> {
    let request = |mount: &cri::Mount| MountRequest {
        container_path: mount.container_path.clone(),
        selinux_relabel: mount.selinux_relabel,
    };
    mounts.iter().map(request).collect()
}

/// Rejects what a VM cannot have: mounts that propagate to the node, and the node's `/dev` in place of that of the guest's
/// kernel. Devices that a VM cannot have are rejected later, when they are opened.
pub fn check_guest_volumes(config: &ContainerConfig, node: &Config) -> Result<(), FieldError> {
    let both_ways = |volume: &NodeVolume| volume.propagation == Propagation::BothWays;
    let over_dev = |volume: &NodeVolume| Path::new(&volume.container_path) == Path::new(DEV);
    let (field, value) = if config.node_volumes.iter().any(both_ways) {
        ("config.mounts.propagation", cri::MountPropagation::PropagationBidirectional.as_str_name())
    } else if config.node_volumes.iter().any(over_dev) {
        ("config.mounts.container_path", DEV)
    } else {
        return Ok(());
    };
    let hosts = node.handlers.iter().filter(|(_, handler)| handler.engine == EngineSetting::Host);
    let names: Vec<&str> = hosts.map(|(name, _)| name.as_str()).collect();
    let handlers = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
    Err(FieldError::NeedsHost { field, value, handlers })
}

/// Returns the restrictive options of a mount, without "ro", which is `readonly`.
fn options(mount: &cri::Mount, users: Option<UserNamespace>) -> Result<BTreeSet<MountOption>, FieldError> {
    let field = "config.mounts.mount_options";
    let mut options = BTreeSet::new();
    for word in mount.mount_options.iter().filter(|word| *word != READ_ONLY) {
        let Some(option) = MountOption::ALL.into_iter().find(|option| option.word() == word) else {
            return bad(field, word, "ro, nosuid, nodev, noexec and noatime are known");
        };
        if option == MountOption::Noatime && users.is_some() {
            return not_yet(field, word, "a user namespace may not change how times are kept; leave it out");
        }
        options.insert(option);
    }
    Ok(options)
}

fn image_volume(
    mount: &cri::Mount,
    image: &cri::ImageSpec,
    container_path: String,
    options: BTreeSet<MountOption>,
) -> Result<ImageVolume, FieldError> {
    let path = Path::new(&container_path);
    if path == Path::new(DEV) || path.starts_with("/proc") || path.starts_with("/sys") {
        let rule = "/dev, /proc and /sys are the container's own file systems, which no image takes the place of";
        return bad("config.mounts.container_path", container_path, rule);
    }
    if !mount.host_path.is_empty() {
        return bad("config.mounts.host_path", &mount.host_path, "a mount with an image has none");
    }
    if !mount.readonly {
        return bad("config.mounts.readonly", "false", "an image volume is read-only: true is needed");
    }
    if mount.propagation() == cri::MountPropagation::PropagationBidirectional {
        return bad(
            "config.mounts.propagation",
            mount.propagation().as_str_name(),
            "an image volume cannot propagate mounts",
        );
    }
    Ok(ImageVolume {
        image: name_of_image("config.mounts.image.image", image)?,
        user_image: if image.user_specified_image.is_empty() { &image.image } else { &image.user_specified_image }
            .clone(),
        sub_path: sub_path(&mount.image_sub_path)?,
        container_path,
        recursive_read_only: mount.recursive_read_only,
        options,
    })
}

fn node_volume(
    mount: &cri::Mount,
    container_path: String,
    id_mapped: bool,
    options: BTreeSet<MountOption>,
    users: Option<UserNamespace>,
) -> Result<NodeVolume, FieldError> {
    let path = Path::new(&mount.host_path);
    let plain = path.components().all(|part| part != Component::ParentDir);
    if !path.is_absolute() || !plain || mount.host_path.contains('\0') || mount.host_path.len() > PATH_MAX {
        return bad("config.mounts.host_path", &mount.host_path, "an absolute path without .. is needed");
    }
    if !mount.image_sub_path.is_empty() {
        return bad("config.mounts.image_sub_path", &mount.image_sub_path, "there is no image that it could lie in");
    }
    let propagation = match mount.propagation() {
        cri::MountPropagation::PropagationPrivate => Propagation::Private,
        cri::MountPropagation::PropagationHostToContainer => Propagation::FromNode,
        cri::MountPropagation::PropagationBidirectional if users.is_some() => {
            let rule = "the node sees no mounts of a pod with a user namespace of its own";
            return bad("config.mounts.propagation", mount.propagation().as_str_name(), rule);
        }
        cri::MountPropagation::PropagationBidirectional => Propagation::BothWays,
    };
    let readonly = mount.readonly || mount.mount_options.iter().any(|word| word == READ_ONLY);
    if mount.recursive_read_only && !(readonly && propagation == Propagation::Private) {
        let rule = "it needs readonly, and propagation PRIVATE";
        return bad("config.mounts.recursive_read_only", "true", rule);
    }
    Ok(NodeVolume {
        host_path: mount.host_path.clone(),
        container_path,
        readonly,
        recursive_read_only: mount.recursive_read_only,
        propagation,
        id_mapped,
        options,
    })
}

fn sub_path(text: &str) -> Result<String, FieldError> {
    let inside = Path::new(text).components().all(|part| matches!(part, Component::Normal(_) | Component::CurDir));
    if inside && !text.contains('\0') && text.len() <= PATH_MAX {
        Ok(text.to_owned())
    } else {
        bad("config.mounts.image_sub_path", text, "a path relative to the image's root, without .., is needed")
    }
}

fn container_path(text: &str) -> Result<String, FieldError> {
    let path = Path::new(text);
    let mut parts = path.components();
    let absolute = parts.next() == Some(Component::RootDir);
    let names: Vec<_> = parts.collect();
    let plain = names.iter().all(|part| matches!(part, Component::Normal(_)));
    if !absolute || !plain || names.is_empty() || text.contains('\0') || text.len() > PATH_MAX {
        return bad("config.mounts.container_path", text, "an absolute path below /, without .., is needed");
    }
    if path.starts_with("/proc") && !mounts::is_allowed_proc_target(path) {
        let rule = "/proc is the container's own file system: only a few of its files can be mounted over, such as /proc/meminfo";
        return bad("config.mounts.container_path", text, rule);
    }
    Ok(text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacelle_base::{Classify, FailureKind};
    use proptest::prelude::*;

    fn mount(at: &str) -> cri::Mount {
        cri::Mount {
            container_path: at.into(),
            readonly: true,
            image: Some(cri::ImageSpec { image: "sha256:aa".into(), ..Default::default() }),
            ..Default::default()
        }
    }

    #[test]
    fn image_volumes_are_taken_over_in_the_order_of_their_depth() {
        let mut inner = mount("/data/inner");
        inner.image_sub_path = "etc/deep/".into();
        inner.image.as_mut().unwrap().user_specified_image = "data:1".into();
        inner.recursive_read_only = true;
        inner.selinux_relabel = true;
        inner.propagation = cri::MountPropagation::PropagationHostToContainer.into();
        let (taken, _) = volumes(&[inner, mount("/data")], None).unwrap();
        let paths: Vec<_> = taken.iter().map(|volume| volume.container_path.as_str()).collect();
        assert_eq!(paths, ["/data", "/data/inner"]);
        assert_eq!((taken[0].user_image.as_str(), taken[0].recursive_read_only), ("sha256:aa", false));
        assert_eq!((taken[1].user_image.as_str(), taken[1].sub_path.as_str()), ("data:1", "etc/deep/"));
        assert!(taken[1].recursive_read_only && volumes(&[], None).unwrap().0.is_empty());
    }

    #[test]
    fn volumes_of_the_node_are_taken_over_in_the_order_of_their_depth() {
        let plain =
            |at: &str| cri::Mount { container_path: at.into(), host_path: "/srv/data".into(), ..Default::default() };
        let mut inner = plain("/data/inner");
        (inner.readonly, inner.recursive_read_only) = (true, true);
        let mut late = plain("/late");
        late.propagation = cri::MountPropagation::PropagationHostToContainer.into();
        let (none, taken) = volumes(&[inner, plain("/data"), late], None).unwrap();
        assert!(none.is_empty());
        let shown: Vec<_> = taken
            .iter()
            .map(|v| (v.container_path.as_str(), v.readonly, v.recursive_read_only, v.propagation))
            .collect();
        let expected = [
            ("/data", false, false, Propagation::Private),
            ("/late", false, false, Propagation::FromNode),
            ("/data/inner", true, true, Propagation::Private),
        ];
        assert_eq!(shown, expected);
        let mut config = (*nacelle_model::testing::container(1, 1).config).clone();
        config.node_volumes = taken;
        let mut node = Config::default();
        check_guest_volumes(&config, &node).unwrap();
        config.node_volumes[1].propagation = Propagation::BothWays;
        assert!(check_guest_volumes(&config, &node).unwrap_err().to_string().contains("(this node has: none)"));
        config.node_volumes[1].propagation = Propagation::Private;
        config.node_volumes[1].container_path = "/dev/".into();
        let error = check_guest_volumes(&config, &node).unwrap_err();
        assert!(error.to_string().contains("container_path is \"/dev\""), "{error}");
        config.node_volumes[1].container_path = "/dev/net".into();
        check_guest_volumes(&config, &node).unwrap();
        config.node_volumes[1].propagation = Propagation::BothWays;
        let handler = crate::config::Handler { engine: EngineSetting::Host, ..Default::default() };
        node.handlers.insert("on-host".into(), handler);
        let error = check_guest_volumes(&config, &node).unwrap_err();
        assert_eq!(error.kind(), FailureKind::Conflict);
        assert!(error.to_string().contains("(this node has: on-host)"), "{error}");
    }

    #[test]
    fn mounts_that_the_node_sees_are_for_pods_with_its_users() {
        let both = cri::Mount {
            container_path: "/mnt".into(),
            host_path: "/srv".into(),
            propagation: cri::MountPropagation::PropagationBidirectional.into(),
            ..Default::default()
        };
        let (_, taken) = volumes(std::slice::from_ref(&both), None).unwrap();
        assert_eq!(taken[0].propagation, Propagation::BothWays);
        let range = nacelle_model::namespace::IdRange { first: 65_536, count: 65_536 };
        let error = volumes(&[both], Some(UserNamespace { users: range, groups: range })).unwrap_err();
        assert_eq!(error.kind(), FailureKind::Invalid);
        assert!(error.to_string().contains("PROPAGATION_BIDIRECTIONAL"), "{error}");
    }

    #[test]
    fn options_take_away_and_are_told_once() {
        let requested = |words: &[&str], image: bool, users| {
            let mut requested = mount("/mnt");
            requested.mount_options = words.iter().map(|word| (*word).to_owned()).collect();
            if !image {
                (requested.image, requested.host_path, requested.readonly) = (None, "/srv".into(), false);
            }
            volumes(&[requested], users)
        };
        let (_, plain) = requested(&[], false, None).unwrap();
        assert!(plain[0].options.is_empty() && !plain[0].readonly);
        let (_, all) = requested(&["noexec", "ro", "nosuid", "nodev", "noatime", "noexec"], false, None).unwrap();
        assert!(all[0].options.iter().eq(&MountOption::ALL) && all[0].readonly);
        let (of_image, _) = requested(&["noexec", "ro"], true, None).unwrap();
        assert!(of_image[0].options.iter().eq(&[MountOption::Noexec]));
        for word in ["exec", "suid", "rw", "bind", "rnoexec", "uid=0", "NOEXEC", "", "noexec,nodev"] {
            let error = requested(&[word], false, None).unwrap_err();
            assert_eq!(error.kind(), FailureKind::Invalid, "{error}");
            assert!(error.to_string().contains(&format!("mount_options is {word:?}")), "{error}");
        }
        let range = nacelle_model::namespace::IdRange { first: 1 << 16, count: 1 << 16 };
        let users = Some(UserNamespace { users: range, groups: range });
        requested(&["noexec"], false, users).unwrap();
        assert_eq!(requested(&["noatime"], false, users).unwrap_err().kind(), FailureKind::Unsupported);
    }

    #[test]
    fn volumes_of_the_node_keep_their_rules() {
        type Change = fn(&mut cri::Mount);
        let rows: [(Change, FailureKind, &str); 7] = [
            (|m| m.host_path.clear(), FailureKind::Invalid, "host_path"),
            (|m| m.host_path = "srv".into(), FailureKind::Invalid, "host_path"),
            (|m| m.host_path = "/srv/../etc".into(), FailureKind::Invalid, "host_path"),
            (|m| m.image_sub_path = "a".into(), FailureKind::Invalid, "image_sub_path"),
            (
                |m| (m.recursive_read_only, m.readonly, m.propagation) = (true, true, 2),
                FailureKind::Invalid,
                "recursive_read_only",
            ),
            (|m| m.recursive_read_only = true, FailureKind::Invalid, "recursive_read_only"),
            (
                |m| (m.recursive_read_only, m.readonly, m.propagation) = (true, true, 1),
                FailureKind::Invalid,
                "recursive_read_only",
            ),
        ];
        for (change, kind, words) in rows {
            let mut changed =
                cri::Mount { container_path: "/mnt".into(), host_path: "/srv".into(), ..Default::default() };
            change(&mut changed);
            let error = volumes(&[changed], None).unwrap_err();
            assert_eq!(error.kind(), kind, "{error}");
            assert!(error.to_string().contains(words), "{error}");
        }
    }

    #[test]
    fn volumes_of_the_node_may_lie_in_the_containers_own_file_systems() {
        let at = |container_path: &str| {
            let mount =
                cri::Mount { container_path: container_path.into(), host_path: "/srv".into(), ..Default::default() };
            volumes(&[mount], None)
        };
        for path in ["/dev", "/dev/", "/dev/net", "/sys", "/sys/fs", "/sys/fs/bpf", "/proc/cpuinfo", "/processes"] {
            assert_eq!(at(path).unwrap().1[0].container_path, path);
        }
        for path in ["/proc", "/proc/", "/proc/1", "/proc/sys", "/proc/sys/kernel/core_pattern", "/proc/cpuinfo/x"] {
            let error = at(path).unwrap_err();
            assert!(error.kind() == FailureKind::Invalid && error.to_string().contains("/proc/meminfo"), "{error}");
        }
    }

    #[test]
    fn every_refusal_names_field_and_rule() {
        type Change = fn(&mut cri::Mount);
        let rows: [(Change, FailureKind, &str); 16] = [
            (|m| m.host_path = "/etc".into(), FailureKind::Invalid, "host_path"),
            (|m| m.readonly = false, FailureKind::Invalid, "readonly"),
            (|m| m.propagation = 2, FailureKind::Invalid, "propagation"),
            (|m| m.uid_mappings = vec![cri::IdMapping::default()], FailureKind::Invalid, "uidMappings"),
            (
                |m| m.mount_options = vec!["noexec".into(), "exec".into()],
                FailureKind::Invalid,
                "mount_options is \"exec\"",
            ),
            (|m| m.image.as_mut().unwrap().image.clear(), FailureKind::Invalid, "config.mounts.image.image is missing"),
            (|m| m.image_sub_path = "/etc".into(), FailureKind::Invalid, "image_sub_path"),
            (|m| m.image_sub_path = "a/../b".into(), FailureKind::Invalid, "image_sub_path"),
            (|m| m.image_sub_path = "a\0".into(), FailureKind::Invalid, "image_sub_path"),
            (|m| m.container_path.clear(), FailureKind::Invalid, "container_path"),
            (|m| m.container_path = "mnt".into(), FailureKind::Invalid, "container_path"),
            (|m| m.container_path = "//".into(), FailureKind::Invalid, "container_path"),
            (|m| m.container_path = "/mnt/../x".into(), FailureKind::Invalid, "container_path"),
            (|m| m.container_path = "/proc/1".into(), FailureKind::Invalid, "own file system"),
            (|m| m.container_path = "/sys".into(), FailureKind::Invalid, "own file systems"),
            (|m| m.container_path = "/dev/".into(), FailureKind::Invalid, "own file systems"),
        ];
        for (change, kind, words) in rows {
            let mut changed = mount("/mnt");
            change(&mut changed);
            let error = volumes(&[changed], None).unwrap_err();
            assert_eq!(error.kind(), kind, "{error}");
            assert!(error.to_string().contains(words), "{error}");
        }
        let error = volumes(&[mount("/mnt"), mount("/mnt/")], None).unwrap_err();
        assert!(error.to_string().contains("once"), "{error}");
    }

    proptest! {
        #[test]
        fn a_sub_path_never_leaves_its_image(text in "[a./]{0,12}") {
            if let Ok(path) = sub_path(&text) {
                let whole = Path::new("/image").join(path);
                prop_assert!(whole.components().all(|part| part != Component::ParentDir));
                prop_assert!(whole.starts_with("/image"));
            }
        }
    }
}
