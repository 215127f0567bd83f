//! Owns: the store as its users see it.

use crate::{Auth, Config, Digest, ImageError, ImageId, Reference};
use nacelle_base::machine::ImageDisk;
use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};

/// The images of this node. A cheap handle: clones are the same store.
#[derive(Clone)]
pub struct Store {
    _root: PathBuf,
}

/// What is known of one image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageRecord {
    /// The digest of its configuration: CRI's image id and image_ref.
    pub id: ImageId,
    /// `registry/repository:tag`, sorted.
    pub repo_tags: Vec<String>,
    /// `registry/repository@sha256:...`, sorted.
    pub repo_digests: Vec<String>,
    /// Bytes that it takes in the store; layers that other images share count in full.
    pub size: u64,
    /// Whom its configuration says to run as.
    pub user: RunAs,
    /// The configuration says that it must not be collected.
    pub pinned: bool,
    /// When it came, in seconds since 1970.
    pub added: u64,
}

/// The user that an image's configuration names, without its group part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RunAs {
    /// A number; 0 if the image names nobody.
    Uid(i64),
    /// A name, to be looked up in the image's /etc/passwd (the agent does, in the guest).
    Name(String),
}

/// The part of an image's configuration that says how to run it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ImageConfig {
    /// The command's fixed beginning.
    pub entrypoint: Vec<String>,
    /// The command's default rest.
    pub cmd: Vec<String>,
    /// `NAME=value`.
    pub env: Vec<String>,
    /// "user", "uid", "user:group", "uid:gid", or empty.
    pub user: String,
    /// The working directory, or empty.
    pub working_dir: String,
    /// "SIGTERM", "15", or none.
    pub stop_signal: Option<String>,
    /// Labels.
    pub labels: BTreeMap<String, String>,
    /// Paths that the image wants as volumes, sorted.
    pub volumes: Vec<String>,
    /// "80/tcp", sorted.
    pub exposed_ports: Vec<String>,
}

/// What a container's root is made of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RootFs {
    /// The pieces of the read-only device; the guest mounts it as EROFS.
    pub disk: ImageDisk,
    /// How to run it.
    pub config: ImageConfig,
}

/// One image that came out of an archive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loaded {
    /// Its id.
    pub id: ImageId,
    /// The tags it has now.
    pub names: Vec<String>,
}

/// The disk that images take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FsInfo {
    /// The folder of the store.
    pub path: PathBuf,
    /// Bytes in use.
    pub used_bytes: u64,
    /// Files in use.
    pub inodes_used: u64,
}

impl Store {
    /// Opens the store in this folder, which is made if it is not there. Finishes or undoes what a crash
    /// left. Blocking: for the start of the process. One process at a time.
    pub fn open(root: &Path, config: Config) -> Result<Store, ImageError> {
        let _ = config;
        Ok(Store { _root: root.to_owned() })
    }

    /// Pulls an image, or finds that it is here already, and gives it the reference's name. Dropping the
    /// future stops the pull; what was downloaded is used by the next one.
    pub async fn pull(&self, reference: &Reference, auth: Option<Auth>) -> Result<ImageId, ImageError> {
        let _ = auth;
        Err(ImageError::NotFound { name: reference.to_string() })
    }

    /// Takes the images out of an OCI layout (folder or tar archive) or a docker archive. `name` is given to
    /// the image if the archive holds one only.
    pub async fn load(&self, path: &Path, name: Option<&Reference>) -> Result<Vec<Loaded>, ImageError> {
        let _ = name;
        Err(ImageError::NotFound { name: path.display().to_string() })
    }

    /// All images, in the order of their ids.
    pub fn list(&self) -> Vec<ImageRecord> {
        Vec::new()
    }

    /// The image of this reference, id (with or without `sha256:`), or beginning of an id; none if it is not
    /// here or the text could not name one.
    pub fn status(&self, name: &str) -> Result<Option<ImageRecord>, ImageError> {
        let _ = name;
        Ok(None)
    }

    /// Removes an image with all its names; one that is not here is no failure. If its id is among `in_use`
    /// its files stay, and `rootfs` knows it, until `collect` is called without it.
    pub async fn remove(&self, name: &str, in_use: &HashSet<ImageId>) -> Result<(), ImageError> {
        let _ = (name, in_use);
        Ok(())
    }

    /// Deletes the files that no image needs any more: to be called when `in_use` has become smaller.
    pub async fn collect(&self, in_use: &HashSet<ImageId>) -> Result<(), ImageError> {
        let _ = in_use;
        Ok(())
    }

    /// How much disk the store takes.
    pub async fn fs_info(&self) -> Result<FsInfo, ImageError> {
        Ok(FsInfo { path: self._root.clone(), used_bytes: 0, inodes_used: 0 })
    }

    /// The root file system of an image, which must be in the store or have been in use since it was removed.
    pub async fn rootfs(&self, id: &ImageId) -> Result<RootFs, ImageError> {
        let _: Digest = *id;
        Err(ImageError::NotFound { name: id.to_string() })
    }
}
