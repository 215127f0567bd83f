//! Defines the error of a file operation, which names the operation and the path.

use std::io;
use std::path::{Path, PathBuf};

/// A file operation that failed.
#[derive(Debug, thiserror::Error)]
#[error("cannot {what} {path}", path = path.display())]
pub struct FileError {
    /// The operation: "write", "read", "create".
    pub what: &'static str,
    /// The path of the file or directory.
    pub path: PathBuf,
    /// The I/O error.
    pub source: io::Error,
}

impl crate::Classify for FileError {
    fn kind(&self) -> crate::FailureKind {
        match self.source.kind().into() {
            crate::FailureKind::NotFound | crate::FailureKind::AlreadyExists => crate::FailureKind::Internal,
            kind => kind,
        }
    }
}

/// Returns a function that adds the operation and the path to an I/O error: `.map_err(at("read", path))`.
pub fn at(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> FileError {
    let path = path.to_owned();
    move |source| FileError { what, path, source }
}
