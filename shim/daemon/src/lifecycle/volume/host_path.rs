//! Resolves the paths of volumes on the node.

use nacelle_base::files::{self, FileError};
use std::io::ErrorKind;
use std::path::Path;

/// An absolute path on the node without symbolic links. Links would lead elsewhere in the namespace of the process that mounts the
/// volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HostPath(String);

impl HostPath {
    /// Resolves the path of a request. Creates a directory if nothing exists there, as kubelet expects. Blocks.
    pub(crate) fn resolve(path: &str) -> Result<HostPath, FileError> {
        let path = Path::new(path);
        if !path.exists() {
            std::fs::create_dir_all(path).map_err(files::at("create", path))?;
        }
        let found = path.canonicalize().map_err(files::at("find", path))?.into_os_string().into_string();
        Ok(HostPath(found.map_err(|_bytes| files::at("name", path)(ErrorKind::InvalidFilename.into()))?))
    }

    /// Returns the path.
    pub(crate) fn as_path(&self) -> &Path {
        Path::new(&self.0)
    }

    /// Returns the path as text.
    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }

    /// Takes a path that contains no symbolic links.
    #[cfg(test)]
    pub(super) fn of(path: &Path) -> HostPath {
        HostPath(path.to_str().unwrap().to_owned())
    }
}
