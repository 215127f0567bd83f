//! Owns: ContainerConfig.mounts → image volumes; every other kind of mount is refused by its name.

use super::{FieldError, bad, name_of_image, not_yet};
use crate::nouns::ImageVolume;
use nacelle_proto::cri;
use std::collections::BTreeSet;
use std::path::{Component, Path, PathBuf};

/// Longer paths Linux takes in no call.
const PATH_MAX: usize = 4095;

/// Checks and converts; in the order in which they are mounted, so that a volume inside another lies on top of it.
pub fn volumes(mounts: &[cri::Mount]) -> Result<Vec<ImageVolume>, FieldError> {
    let mut volumes = mounts.iter().map(volume).collect::<Result<Vec<_>, _>>()?;
    let depth = |path: &str| Path::new(path).components().count();
    volumes.sort_by_key(|volume| depth(&volume.container_path));
    let mut taken = BTreeSet::new();
    for volume in &volumes {
        if !taken.insert(Path::new(&volume.container_path).components().collect::<PathBuf>()) {
            return bad("config.mounts.container_path", &volume.container_path, "it may be given once only");
        }
    }
    Ok(volumes)
}

fn volume(mount: &cri::Mount) -> Result<ImageVolume, FieldError> {
    let Some(image) = &mount.image else {
        let instead = "volumes of the node are to come; put the files into the image";
        return not_yet("config.mounts.host_path", &mount.host_path, instead);
    };
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
            "an image volume has no mounts to give",
        );
    }
    if !mount.uid_mappings.is_empty() || !mount.gid_mappings.is_empty() {
        let mappings = format!("{:?} {:?}", mount.uid_mappings, mount.gid_mappings);
        return not_yet(
            "config.mounts.uidMappings, gidMappings",
            mappings,
            "there are no user namespaces; leave them out",
        );
    }
    if let Some(option) = mount.mount_options.first() {
        return not_yet("config.mounts.mount_options", option, "leave them out");
    }
    Ok(ImageVolume {
        image: name_of_image("config.mounts.image.image", image)?,
        user_image: if image.user_specified_image.is_empty() { &image.image } else { &image.user_specified_image }
            .clone(),
        sub_path: sub_path(&mount.image_sub_path)?,
        container_path: container_path(&mount.container_path)?,
        recursive_read_only: mount.recursive_read_only,
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
    if path == Path::new("/dev") || path.starts_with("/proc") || path.starts_with("/sys") {
        return bad("config.mounts.container_path", text, "/dev, /proc and /sys are the container's own file systems");
    }
    Ok(text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacelle_base::{Classify, Kind};
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
        let taken = volumes(&[inner, mount("/data")]).unwrap();
        let paths: Vec<_> = taken.iter().map(|volume| volume.container_path.as_str()).collect();
        assert_eq!(paths, ["/data", "/data/inner"]);
        assert_eq!((taken[0].user_image.as_str(), taken[0].recursive_read_only), ("sha256:aa", false));
        assert_eq!((taken[1].user_image.as_str(), taken[1].sub_path.as_str()), ("data:1", "etc/deep/"));
        assert!(taken[1].recursive_read_only && volumes(&[]).unwrap().is_empty());
    }

    #[test]
    fn every_refusal_names_field_and_rule() {
        type Change = fn(&mut cri::Mount);
        let rows: [(Change, Kind, &str); 17] = [
            (|m| (m.image, m.host_path) = (None, "/etc".into()), Kind::Unsupported, "host_path is \"/etc\""),
            (|m| m.host_path = "/etc".into(), Kind::Invalid, "host_path"),
            (|m| m.readonly = false, Kind::Invalid, "readonly"),
            (|m| m.propagation = 2, Kind::Invalid, "propagation"),
            (|m| m.uid_mappings = vec![cri::IdMapping::default()], Kind::Unsupported, "uidMappings"),
            (|m| m.mount_options = vec!["noexec".into()], Kind::Unsupported, "noexec"),
            (|m| m.image.as_mut().unwrap().image.clear(), Kind::Invalid, "config.mounts.image.image is missing"),
            (|m| m.image_sub_path = "/etc".into(), Kind::Invalid, "image_sub_path"),
            (|m| m.image_sub_path = "a/../b".into(), Kind::Invalid, "image_sub_path"),
            (|m| m.image_sub_path = "a\0".into(), Kind::Invalid, "image_sub_path"),
            (|m| m.container_path.clear(), Kind::Invalid, "container_path"),
            (|m| m.container_path = "mnt".into(), Kind::Invalid, "container_path"),
            (|m| m.container_path = "//".into(), Kind::Invalid, "container_path"),
            (|m| m.container_path = "/mnt/../x".into(), Kind::Invalid, "container_path"),
            (|m| m.container_path = "/proc/1".into(), Kind::Invalid, "own file systems"),
            (|m| m.container_path = "/sys".into(), Kind::Invalid, "own file systems"),
            (|m| m.container_path = "/dev/".into(), Kind::Invalid, "own file systems"),
        ];
        for (change, kind, words) in rows {
            let mut changed = mount("/mnt");
            change(&mut changed);
            let error = volumes(&[changed]).unwrap_err();
            assert_eq!(error.kind(), kind, "{error}");
            assert!(error.to_string().contains(words), "{error}");
        }
        let error = volumes(&[mount("/mnt"), mount("/mnt/")]).unwrap_err();
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
