//! Makes the volumes that an image declares (`VOLUME`): directories of the container's own on the scratch disk, with the image's
//! content at that path.
//!
//! They are beside the container's writable layer, count as part of it, and are removed with it. The daemon chooses the paths; here
//! they are resolved in the container's root, in which no process runs yet.

use libcontainer::oci_spec::runtime::{Mount, MountBuilder};
use nacelle_base::mounts;
use nacelle_base::{Classify, FailureKind};
use nix::fcntl::OFlag;
use std::fs;
use std::path::{Path, PathBuf};

use super::mapped_mounts;
use crate::paths;
use crate::rootfs::{
    CopyBudget, CopyError, EntryKind, MountPoints, Owner, RootDir, RootError, RootPathError, copy_tree, root_error,
};

/// Directories with file systems of the container's own. A volume in them would hide a part of these.
const RESERVED_TARGETS: [&str; 3] = ["/dev", "/proc", "/sys"];

/// Reasons a volume of the image cannot be made.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the fields are what the message prints")]
pub enum AnonymousVolumeError {
    #[error("the image declares the volume {}, and no directory can be there", at.display())]
    Place { at: PathBuf, source: RootPathError },
    #[error("cannot copy the image's content to the volume {} that the image declares", at.display())]
    Copy { at: PathBuf, source: CopyError },
    #[error("cannot make the volume {} that the image declares", at.display())]
    Make { at: PathBuf, source: RootError },
}

impl Classify for AnonymousVolumeError {
    fn kind(&self) -> FailureKind {
        match self {
            AnonymousVolumeError::Place { source, .. } => source.kind(),
            AnonymousVolumeError::Copy { source, .. } => source.kind(),
            AnonymousVolumeError::Make { source, .. } => match FailureKind::from(source.source.kind()) {
                FailureKind::Exhausted => FailureKind::Exhausted,
                _ => FailureKind::Internal,
            },
        }
    }
}

/// Makes the volumes at these paths of the container whose root is `root`, and returns their mounts. A missing path is made, owned by
/// `owner`. A path that links lead to the root itself or into a file system of the container's own gets no volume.
pub fn prepare_volumes(
    id: &str,
    root: &Path,
    declared: &[String],
    owner: Owner,
) -> Result<Vec<Mount>, AnonymousVolumeError> {
    let mut mounts = Vec::with_capacity(declared.len());
    let mut budget = CopyBudget::default();
    for (number, at) in declared.iter().map(PathBuf::from).enumerate() {
        let made = |source| AnonymousVolumeError::Make { at: at.clone(), source };
        let place = |source| AnonymousVolumeError::Place { at: at.clone(), source };
        let points = MountPoints::open(root, owner).map_err(place)?;
        let to = points.prepare_path("image volume", &at, EntryKind::Directory).map_err(place)?;
        if to == Path::new("/") || RESERVED_TARGETS.iter().any(|reserved| to.starts_with(reserved)) {
            tracing::warn!(id, at = %at.display(), to = %to.display(), "the image's volume leads to a file system of the container's own: it has no effect");
            continue;
        }
        let opened = RootDir::open(root)
            .and_then(|root| root.open_beneath(&to, OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW));
        let source = opened.map_err(root_error("open", &to)).map_err(made)?;
        let directory = paths::anonymous_volumes(id);
        fs::create_dir_all(&directory).map_err(root_error("create", &directory)).map_err(made)?;
        let volume = directory.join(number.to_string());
        copy_tree(&source, &volume, &mut budget)
            .map_err(|source| AnonymousVolumeError::Copy { at: at.clone(), source })?;
        // The container's processes may not be able to reach the scratch disk by its path.
        let mount = mounts::clone_tree(&volume, false).map_err(root_error("mount", &volume)).map_err(made)?;
        let source = mapped_mounts::attach_mount(id, mount, &format!("volume{number}")).map_err(made)?;
        let options = ["bind", "rw"].map(str::to_owned).to_vec();
        let mount = MountBuilder::default().source(source).destination(&to).typ("bind").options(options).build();
        // The builder fails only if a part is missing, and none is.
        mounts.extend(mount);
    }
    Ok(mounts)
}
