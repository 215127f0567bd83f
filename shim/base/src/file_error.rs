//! Defines the error of a file operation, which names the operation and the path, and what to do about a broken or read-only disk.

use rustix::io::Errno;
use std::io;
use std::path::{Path, PathBuf};

/// A file operation that failed.
#[derive(Debug, thiserror::Error)]
#[error("cannot {what} {path}{advice}", path = path.display(), advice = disk_advice(source))]
pub struct FileError {
    /// The operation: "write", "read", "create".
    pub what: &'static str,
    /// The path of the file or directory.
    pub path: PathBuf,
    /// The I/O error.
    pub source: io::Error,
}

/// Returns the advice for an error that the disk or its file system causes, in the form `; ADVICE`; otherwise the empty text.
pub fn disk_advice(error: &io::Error) -> &'static str {
    match error.raw_os_error().map(Errno::from_raw_os_error) {
        Some(Errno::IO | Errno::UCLEAN | Errno::BADMSG) => "; see dmesg for the errors of its disk",
        Some(Errno::ROFS) => "; its file system is read-only: see dmesg for errors of the disk, and mount it writable",
        _ => "",
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Chain, Classify, FailureKind};

    #[test]
    fn errors_of_the_disk_have_advice() {
        let of = |errno: Errno| at("write", Path::new("/x"))(io::Error::from_raw_os_error(errno.raw_os_error()));
        assert_eq!(
            Chain(&of(Errno::IO)).to_string(),
            "cannot write /x; see dmesg for the errors of its disk: Input/output error (os error 5)"
        );
        assert!(of(Errno::ROFS).to_string().ends_with("and mount it writable"));
        assert_eq!(of(Errno::NOENT).to_string(), "cannot write /x");
        for (errno, kind) in [
            (Errno::IO, FailureKind::Internal),
            (Errno::ROFS, FailureKind::Conflict),
            (Errno::ACCESS, FailureKind::Conflict),
            (Errno::NOTDIR, FailureKind::Conflict),
            (Errno::NOSPC, FailureKind::Exhausted),
            (Errno::NOENT, FailureKind::Internal),
        ] {
            assert_eq!(of(errno).kind(), kind, "{errno}");
        }
    }
}
