//! Defines the errors of the state store, and decides which failures of redb mean a damaged file.

use nacelle_base::files::FileError;
use nacelle_base::{Classify, FailureKind};
use nacelle_model::record::RecordError;
use std::path::{Path, PathBuf};

/// The reason why the store cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The file cannot be opened or created.
    #[error("cannot open the state store {path}", path = path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: Box<redb::Error>,
    },
    /// Another process has the file open.
    #[error("the state store {path} is in use: another nacelle serve runs with this root", path = path.display())]
    InUse {
        /// The file.
        path: PathBuf,
    },
    /// The file and its copy are damaged or missing, and beginning empty would end all pods.
    #[error(
        "the state store {path} is unusable ({why}) and cannot be restored: {copy}; restore {path} from a backup, or move it and {snapshot} away to begin with an empty store, which ends all pods", path = path.display(), snapshot = path.with_extension("copy").display()
    )]
    Lost {
        /// The file.
        path: PathBuf,
        /// The damage of the file.
        why: String,
        /// The damage of the copy.
        copy: String,
    },
    /// A newer version of Nacelle wrote the file.
    #[error(
        "the state store {path} has schema {found}, which a newer version of Nacelle wrote; this version has schema {supported}: start the newer version, or go back to this one with a drained node and {}", describe_backup(path, backup.as_deref()), path = path.display()
    )]
    Newer {
        /// The file.
        path: PathBuf,
        /// The schema of the file.
        found: u32,
        /// The schema of this program.
        supported: u32,
        /// The file as it was before it was migrated from the schema of this program.
        backup: Option<PathBuf>,
    },
    /// The file cannot be read or written: the disk is full, for example.
    #[error("cannot {what} the state store (state.redb in paths.root)")]
    Access {
        /// The operation: "read", "write".
        what: &'static str,
        /// The cause.
        source: Box<redb::Error>,
    },
    /// A file beside the store cannot be read or written.
    #[error(transparent)]
    File(#[from] FileError),
    /// A record in the file is invalid.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// There is nothing to export.
    #[error(
        "cannot export the state store {path}: {why}", path = path.display()
    )]
    NotExportable {
        /// The database.
        path: PathBuf,
        /// The reason.
        why: String,
    },
    /// The file is not a complete export.
    #[error("cannot import {path}: {why}; use a file that `nacelle store export` has written", path = path.display())]
    InvalidExport {
        /// The file.
        path: PathBuf,
        /// The reason.
        why: String,
    },
    /// A newer version of Nacelle wrote the export.
    #[error(
        "cannot import {path}: it has schema {found}, and this version has schema {supported}; import it with the version that wrote it", path = path.display()
    )]
    NewerExport {
        /// The file.
        path: PathBuf,
        /// The schema of the file.
        found: u32,
        /// The schema of this program.
        supported: u32,
    },
    /// An import would replace a store.
    #[error(
        "cannot import into {path}: it exists; use --replace to set it aside", path = path.display()
    )]
    Exists {
        /// The database.
        path: PathBuf,
    },
    /// The writer has ended.
    #[error("the state store is closed")]
    Closed,
}

fn describe_backup(path: &Path, backup: Option<&Path>) -> String {
    let (copy, name) = (path.with_extension("copy"), path.display());
    match backup {
        Some(backup) => {
            format!(
                "its store of before the update: remove {}, and rename {} to {name}",
                copy.display(),
                backup.display()
            )
        }
        None => format!("an empty store (there is no backup with this schema): remove {} and {name}", copy.display()),
    }
}

impl Classify for StoreError {
    fn kind(&self) -> FailureKind {
        match self {
            StoreError::InUse { .. }
            | StoreError::Newer { .. }
            | StoreError::NewerExport { .. }
            | StoreError::Exists { .. } => FailureKind::Conflict,
            StoreError::InvalidExport { .. } => FailureKind::Invalid,
            StoreError::Access { source, .. } | StoreError::Open { source, .. } => match source.as_ref() {
                redb::Error::Io(error) => FailureKind::from(error.kind()),
                _ => FailureKind::Internal,
            },
            StoreError::File(error) => error.kind(),
            StoreError::Record(_) | StoreError::Closed | StoreError::Lost { .. } | StoreError::NotExportable { .. } => {
                FailureKind::Internal
            }
        }
    }
}

impl From<redb::Error> for StoreError {
    /// Returns the failure of a read.
    fn from(error: redb::Error) -> StoreError {
        StoreError::Access { what: "read", source: Box::new(error) }
    }
}

/// Returns a function that adds the operation to an error of redb.
pub(crate) fn access<E: Into<redb::Error>>(what: &'static str) -> impl Fn(E) -> StoreError {
    move |error| StoreError::Access { what, source: Box::new(error.into()) }
}

/// The reason why a database cannot be read.
#[derive(Debug)]
pub(crate) enum OpenFailure {
    /// The content of the file is invalid; the text is the reason. Another copy of the state has to be used.
    Damaged(String),
    /// The file may be intact: another process uses it, the node lacks something, or another version wrote it.
    Unusable(StoreError),
}

impl From<StoreError> for OpenFailure {
    fn from(error: StoreError) -> OpenFailure {
        OpenFailure::Unusable(error)
    }
}

/// Decides whether this failure to open or read the database `path` is damage of the file.
pub(crate) fn open_failure(path: &Path, error: redb::Error) -> OpenFailure {
    use std::io::ErrorKind as Io;
    match error {
        redb::Error::DatabaseAlreadyOpen => StoreError::InUse { path: path.to_owned() }.into(),
        // redb reads beyond the end of a file that was cut.
        redb::Error::Io(error) if matches!(error.kind(), Io::UnexpectedEof | Io::InvalidData | Io::InvalidInput) => {
            OpenFailure::Damaged(error.to_string())
        }
        error @ (redb::Error::Io(_)
        | redb::Error::PreviousIo
        | redb::Error::UpgradeRequired(_)
        | redb::Error::LockProtocolMismatch) => {
            StoreError::Open { path: path.to_owned(), source: Box::new(error) }.into()
        }
        error => OpenFailure::Damaged(error.to_string()),
    }
}
