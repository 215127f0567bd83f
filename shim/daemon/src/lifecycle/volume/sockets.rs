//! Determines which volumes of the node are socket volumes: those at the paths that the pod's annotation names.
//! docs/contributor/volumes.md has the rules. Reads the node's directories, and changes nothing.

use super::host_path::HostPath;
use super::{copied_in, empty_dir};
use crate::lifecycle::context::error::LifecycleError;
use nacelle_base::ContainerId;
use nacelle_base::sockets::{DIRECTORY, SINGLE};
use nacelle_model::mount::{ImageVolume, NodeVolume};
use nacelle_proto::pod as proto;
use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

/// A socket volume.
#[derive(Debug)]
pub(crate) struct SocketPlan {
    /// The request to the pod process.
    pub volume: proto::SocketVolume,
    /// The path of the directory, or of the socket, in the guest.
    pub guest: String,
}

fn is_named(paths: &[String], container_path: &str) -> bool {
    // The comparison ignores needless slashes.
    paths.iter().any(|path| Path::new(path) == Path::new(container_path))
}

/// Rejects image volumes at paths of socket volumes.
pub(super) fn check_image_volumes(paths: &[String], volumes: &[ImageVolume]) -> Result<(), LifecycleError> {
    match volumes.iter().find(|volume| is_named(paths, &volume.container_path)) {
        None => Ok(()),
        Some(volume) => Err(LifecycleError::NoSocketVolume {
            container_path: volume.container_path.clone(),
            source_path: volume.user_image.clone(),
            why: "an image has no sockets",
        }),
    }
}

/// Returns the socket volume that a volume of the node becomes, the `number`th that `nacelle-fs` opens for the container; `None` if the
/// pod's annotation does not name its path.
pub(super) fn plan(
    paths: &[String],
    id: &ContainerId,
    number: usize,
    volume: &NodeVolume,
    host: &HostPath,
) -> Result<Option<SocketPlan>, LifecycleError> {
    if !is_named(paths, &volume.container_path) {
        return Ok(None);
    }
    let refused = |why| LifecycleError::NoSocketVolume {
        container_path: volume.container_path.clone(),
        source_path: host.as_str().to_owned(),
        why,
    };
    if empty_dir::named(host.as_path()).is_some_and(|(_, root)| root.is_dir()) {
        return Err(refused(
            "the sockets of an emptyDir are the containers' own, and connect them without the annotation",
        ));
    }
    if copied_in::plan(id, number, volume, host, true).is_some() {
        return Err(refused("kubelet writes this volume, and it has no sockets"));
    }
    let kind = fs::symlink_metadata(host.as_path()).map(|found| found.file_type());
    let name = format!("{id}.{number}");
    let guest = match kind {
        Ok(kind) if kind.is_dir() => format!("{DIRECTORY}/{name}"),
        Ok(kind) if kind.is_socket() => format!("{DIRECTORY}/{name}/{SINGLE}"),
        _ => return Err(refused("it is neither a directory nor a UNIX socket")),
    };
    let (server_path, path) = (format!("{id}/{number}"), host.as_str().to_owned());
    Ok(Some(SocketPlan { volume: proto::SocketVolume { name, server_path, path }, guest }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacelle_base::{Classify, FailureKind};
    use nacelle_model::mount::Propagation;
    use std::collections::BTreeSet;
    use std::os::unix::net::UnixListener;

    fn planned(path: &Path, container_path: &str) -> Result<Option<SocketPlan>, LifecycleError> {
        let volume = NodeVolume {
            host_path: path.to_str().unwrap().into(),
            container_path: container_path.into(),
            readonly: true,
            recursive_read_only: false,
            propagation: Propagation::Private,
            id_mapped: false,
            options: BTreeSet::new(),
        };
        plan(&["/run/spire".into(), "/b".into()], &ContainerId::from_bytes([1; 32]), 3, &volume, &HostPath::of(path))
    }

    #[test]
    fn directories_and_sockets_at_the_named_paths_are_socket_volumes() {
        let node = tempfile::tempdir().unwrap();
        let socket = node.path().join("server.sock");
        let _listener = UnixListener::bind(&socket).unwrap();
        let id = ContainerId::from_bytes([1; 32]);
        let directory = planned(node.path(), "/run//spire/").unwrap().unwrap();
        assert_eq!(directory.guest, format!("/run/nacelle/sockets/{id}.3"));
        assert_eq!(directory.volume.server_path, format!("{id}/3"));
        let single = planned(&socket, "/b").unwrap().unwrap();
        assert_eq!(single.guest, format!("/run/nacelle/sockets/{id}.3/socket"));
        for other in ["/run", "/run/spire/below", "/c"] {
            assert!(planned(node.path(), other).unwrap().is_none(), "{other}");
        }
    }

    #[test]
    fn volumes_without_sockets_of_the_node_are_refused_by_name() {
        let node = tempfile::tempdir().unwrap();
        let pod = node.path().join("pods/uid");
        let file = node.path().join("file");
        fs::write(&file, "").unwrap();
        let empty = pod.join("volumes").join(empty_dir::PLUGIN).join("scratch");
        fs::create_dir_all(&empty).unwrap();
        let written = pod.join("volumes/kubernetes.io~configmap/conf");
        fs::create_dir_all(written.join("..2026")).unwrap();
        std::os::unix::fs::symlink("..2026", written.join("..data")).unwrap();
        for path in [&file, &empty, &written, &pod.join("volume-subpaths/scratch/c/0"), Path::new("/dev/null")] {
            let error = planned(path, "/b").unwrap_err();
            assert_eq!(error.kind(), FailureKind::Conflict, "{error}");
            let text = error.to_string();
            assert!(text.contains("vm.nacelle.dev/sockets") && text.contains(path.to_str().unwrap()), "{error}");
        }
        // A subPath of another volume.
        let other = pod.join("volume-subpaths/claim/c/0");
        fs::create_dir_all(&other).unwrap();
        assert!(planned(&other, "/b").unwrap().is_some());
        let image = ImageVolume {
            image: "i".into(),
            user_image: "i".into(),
            sub_path: String::new(),
            container_path: "/b/".into(),
            recursive_read_only: false,
            options: BTreeSet::new(),
        };
        check_image_volumes(&["/a".into()], std::slice::from_ref(&image)).unwrap();
        assert_eq!(check_image_volumes(&["/b".into()], &[image]).unwrap_err().kind(), FailureKind::Conflict);
    }
}
