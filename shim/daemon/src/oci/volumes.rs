//! Chooses which of the volumes that an image declares (`VOLUME`) a container gets. Pure: what the paths are in the image is the
//! agent's concern.

use super::OciError;
use nacelle_image::ImageConfig;
use nacelle_model::container::ContainerConfig;
use std::path::{Component, Path, PathBuf};

/// The most volumes that an image may declare for its containers.
const MAX_VOLUMES: usize = 128;
/// The longest path of a volume in bytes, as in the kernel (`PATH_MAX` less its end).
const MAX_PATH: usize = 4095;
/// Directories with file systems of the container's own. Images of systemd declare `/sys/fs/cgroup`.
const RESERVED: [&str; 3] = ["/dev", "/proc", "/sys"];

/// Returns the absolute paths, without `..`, of the volumes that the container gets from its image, each before those below it.
///
/// Left out are the root, paths in `RESERVED`, and paths at and below a mount of the request or another of these volumes: such a
/// path is writable or not as that mount is.
pub fn anonymous_volumes(container: &ContainerConfig, image: &ImageConfig) -> Result<Vec<String>, OciError> {
    let refused = |why: String| OciError::Volume { image: container.image.clone(), why };
    if image.volumes.len() > MAX_VOLUMES {
        return Err(refused(format!("{} volumes; at most {MAX_VOLUMES} are allowed", image.volumes.len())));
    }
    let of_request = container.node_volumes.iter().map(|volume| &volume.container_path);
    let mounts: Vec<PathBuf> = of_request
        .chain(container.volumes.iter().map(|volume| &volume.container_path))
        .map(|path| clean(path))
        .chain(RESERVED.map(PathBuf::from))
        .collect();
    let mut volumes: Vec<PathBuf> = Vec::new();
    let mut declared: Vec<PathBuf> = image.volumes.iter().map(|path| clean(path)).collect();
    declared.sort();
    for path in declared {
        let text = path.to_string_lossy();
        if text.contains('\0') || text.len() > MAX_PATH {
            let start: String = text.chars().take(100).collect();
            return Err(refused(format!("the volume {start:?}, which is not a path of at most {MAX_PATH} bytes")));
        }
        let is_root = path == Path::new("/");
        if !is_root && !mounts.iter().chain(&volumes).any(|mount| path.starts_with(mount)) {
            volumes.push(path);
        }
    }
    Ok(volumes.into_iter().map(|path| path.to_string_lossy().into_owned()).collect())
}

/// Returns the absolute path that a path means from the root, without `.` and `..`.
fn clean(path: &str) -> PathBuf {
    let mut clean = PathBuf::from("/");
    for part in Path::new(path).components() {
        match part {
            Component::ParentDir => drop(clean.pop()),
            Component::Normal(name) => clean.push(name),
            _ => {}
        }
    }
    clean
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacelle_base::{Classify, FailureKind};
    use nacelle_model::mount::{ImageVolume, NodeVolume, Propagation};
    use nacelle_model::testing::container;
    use std::collections::BTreeSet;

    fn chosen(declared: &[&str], mounted: &[&str]) -> Result<Vec<String>, OciError> {
        let mut config = (*container(1, 1).config).clone();
        let (of_images, of_node): (Vec<&&str>, Vec<&&str>) = mounted.iter().partition(|at| at.starts_with("/image"));
        config.node_volumes = (of_node.into_iter())
            .map(|at| NodeVolume {
                host_path: "/srv".into(),
                container_path: (*at).into(),
                readonly: true,
                recursive_read_only: false,
                propagation: Propagation::Private,
                id_mapped: false,
                options: BTreeSet::new(),
            })
            .collect();
        config.volumes = (of_images.into_iter())
            .map(|at| ImageVolume {
                image: "i".into(),
                user_image: "i".into(),
                sub_path: String::new(),
                container_path: (*at).into(),
                recursive_read_only: false,
                options: BTreeSet::new(),
            })
            .collect();
        let image =
            ImageConfig { volumes: declared.iter().map(|at| (*at).to_owned()).collect(), ..ImageConfig::default() };
        anonymous_volumes(&config, &image)
    }

    #[test]
    fn volumes_that_the_request_does_not_mount_over_are_chosen() {
        let chosen = |declared: &[&str], mounted: &[&str]| chosen(declared, mounted).unwrap();
        assert_eq!(chosen(&["/data", "/cache"], &[]), ["/cache", "/data"]);
        assert_eq!(chosen(&["/data", "/cache", "/image"], &["/data", "/image"]), ["/cache"]);
        assert_eq!(chosen(&["/data/"], &["/data/below", "/database"]), ["/data"]);
        // What is below a mount belongs to it.
        assert_eq!(chosen(&["/data/below", "/image/x"], &["/data/", "/image"]), [""; 0]);
        assert_eq!(chosen(&["/data/below", "/data", "/data-too"], &[]), ["/data", "/data-too"]);
        assert_eq!(
            chosen(&["relative", "./a/../b//c/.", "../../up", "/a/../../etc"], &[]),
            ["/b/c", "/etc", "/relative", "/up"]
        );
        let own = ["/", ".", "/..", "", "/proc", "/proc/sys", "/sys/fs/cgroup", "/dev/shm", "/x/../dev"];
        assert_eq!(chosen(&own, &[]), [""; 0]);
        assert_eq!(chosen(&["/process", "/devices"], &[]), ["/devices", "/process"]);
    }

    #[test]
    fn volumes_of_hostile_images_are_refused() {
        let names: Vec<String> = (0..=MAX_VOLUMES).map(|number| format!("/v{number}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        assert_eq!(chosen(&names[1..], &[]).unwrap().len(), MAX_VOLUMES);
        for (declared, part) in [
            (names.as_slice(), "129 volumes; at most 128"),
            (&["/a\0b"], "\"/a\\0b\""),
            (&[format!("/{}", "n/".repeat(2100)).as_str()], "at most 4095 bytes"),
        ] {
            let error = chosen(declared, &[]).unwrap_err();
            assert_eq!(error.kind(), FailureKind::Invalid);
            assert!(error.to_string().contains(part) && error.to_string().contains("busybox"), "{error}");
        }
    }
}
