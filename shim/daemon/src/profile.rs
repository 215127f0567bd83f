//! Reads seccomp profiles (`Localhost`) from files of the node, with a bound on their size. `read` blocks, and another process chooses
//! what the file is: a pipe or a device must not hold up the daemon.

use nacelle_base::{Classify, FailureKind};
use nacelle_model::seccomp::{SeccompProfile, SeccompProfileError};
use nix::fcntl::OFlag;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// The largest profile in bytes. Real ones have a few tens of KiB, and the record of each container keeps its own copy.
const MAX_FILE: u64 = 256 << 10;

/// Why a seccomp profile of the node cannot be used.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the fields are what the message prints")]
pub enum ProfileFileError {
    #[error("cannot read seccomp profile {}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("seccomp profile {} is not a regular file", path.display())]
    NotAFile { path: PathBuf },
    #[error("seccomp profile {} is too large (maximum {MAX_FILE} bytes)", path.display())]
    TooLarge { path: PathBuf },
    #[error("invalid seccomp profile {}", path.display())]
    Profile { path: PathBuf, source: SeccompProfileError },
}

impl Classify for ProfileFileError {
    fn kind(&self) -> FailureKind {
        match self {
            ProfileFileError::Profile { source, .. } => source.kind(),
            _ => FailureKind::Invalid,
        }
    }
}

/// Reads and checks the profile in this file.
pub fn read(path: &Path) -> Result<SeccompProfile, ProfileFileError> {
    let failed = |source| ProfileFileError::Read { path: path.to_owned(), source };
    let file = File::options().read(true).custom_flags((OFlag::O_NONBLOCK | OFlag::O_NOCTTY).bits()).open(path);
    let file = file.map_err(failed)?;
    if !file.metadata().map_err(failed)?.is_file() {
        return Err(ProfileFileError::NotAFile { path: path.to_owned() });
    }
    let mut bytes = Vec::new();
    file.take(MAX_FILE + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > MAX_FILE {
        return Err(ProfileFileError::TooLarge { path: path.to_owned() });
    }
    SeccompProfile::parse(&bytes).map_err(|source| ProfileFileError::Profile { path: path.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_read_with_bounds() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        std::fs::write(path("good"), r#"{"defaultAction": "SCMP_ACT_LOG"}"#).unwrap();
        std::os::unix::fs::symlink("good", path("link")).unwrap();
        std::fs::write(path("long"), vec![b' '; 256 * 1024 + 1]).unwrap();
        nix::unistd::mkfifo(&path("pipe"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert_eq!(read(&path("good")).unwrap(), read(&path("link")).unwrap());
        assert!(matches!(read(&path("none")), Err(ProfileFileError::Read { .. })));
        assert!(matches!(read(&path("long")), Err(ProfileFileError::TooLarge { .. })));
        for name in [path("pipe"), directory.path().to_owned(), "/dev/zero".into()] {
            assert!(matches!(read(&name), Err(ProfileFileError::NotAFile { .. })), "{}", name.display());
        }
    }

    #[test]
    fn an_unusable_profile_is_reported_with_its_file_and_its_cause() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("p.json");
        for (text, kind, cause) in [
            ("{}", FailureKind::Invalid, "it is no profile"),
            (r#"{"defaultAction": "SCMP_ACT_NOTIFY"}"#, FailureKind::Unsupported, "SCMP_ACT_NOTIFY"),
        ] {
            std::fs::write(&path, text).unwrap();
            let error = read(&path).unwrap_err();
            let chain = nacelle_base::Chain(&error).to_string();
            assert_eq!(error.kind(), kind);
            assert!(chain.contains("p.json") && chain.contains(cause), "{chain}");
        }
    }
}
