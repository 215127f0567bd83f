//! Owns: the errors of this crate and what they mean to a caller.

use crate::budget::BudgetError;
use crate::erofs::ErofsError;
use crate::layer::index::IndexError;
use crate::layer::ingest::LayerError;
use crate::layer::tar::TarError;
use crate::manifest::ManifestError;
use crate::tree::TreeError;
use nacelle_base::files::FileError;
use nacelle_base::task::TaskError;
use nacelle_base::{Classify, Kind};
use nacelle_model::digest::Digest;
use std::path::PathBuf;
use std::sync::Arc;

/// Why something with an image failed.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// A text is no image reference.
    #[error("{text:?} is not an image reference: {why}")]
    BadReference {
        /// The text, cut after 300 characters.
        text: String,
        /// The rule it breaks.
        why: &'static str,
    },
    /// No such image here.
    #[error("image {name:?} is not in the store")]
    NotFound {
        /// What was asked for.
        name: String,
    },
    /// A short id fits several images.
    #[error("{name:?} is the beginning of the ids of several images; give more digits")]
    Ambiguous {
        /// What was asked for.
        name: String,
    },
    /// A file operation failed.
    #[error(transparent)]
    File(#[from] FileError),
    /// A pull failed for all who waited for it.
    #[error(transparent)]
    Shared(Arc<ImageError>),
    /// A pull ended without a result, because the process is ending or a part of it panicked.
    #[error("cannot pull {name}: its task was cancelled or panicked")]
    Aborted {
        /// The image.
        name: String,
    },
    /// The list of images is of a format that this version does not know.
    #[error("{path} has format {version}; this version of Nacelle knows format {known} only", path = path.display())]
    Version {
        /// The file.
        path: PathBuf,
        /// The version it has.
        version: u64,
        /// The version we know.
        known: u64,
    },
    /// The list of images cannot be read.
    #[error("{path} is damaged", path = path.display())]
    Catalogue {
        /// The file.
        path: PathBuf,
        /// Where and why.
        source: serde_json::Error,
    },
    /// Another process has the store open.
    #[error("{path} is in use by another process", path = path.display())]
    Locked {
        /// The folder of the store.
        path: PathBuf,
    },
    /// A URL of the configuration or of a registry is none that we can ask.
    #[error("{text:?} is not an http or https URL")]
    Url {
        /// The text.
        text: String,
    },
    /// Certificates cannot be read or used.
    #[error("cannot use the certificates in {path}", path = path.display())]
    Certificates {
        /// The file.
        path: PathBuf,
        /// Why.
        source: rustls::pki_types::pem::Error,
    },
    /// TLS cannot be set up.
    #[error("cannot set up TLS")]
    Tls(#[from] rustls::Error),
    /// No connection, or it broke before an answer.
    #[error("cannot ask {url}")]
    Request {
        /// The URL without its query.
        url: String,
        /// Why.
        source: hyper_util::client::legacy::Error,
    },
    /// The connection broke in the middle of the answer.
    #[error("the answer of {url} broke off")]
    Body {
        /// The URL without its query.
        url: String,
        /// Why.
        source: hyper::Error,
    },
    /// The answer was shorter than announced.
    #[error("the answer of {url} ended after {got} of {want} bytes")]
    Short {
        /// The URL without its query.
        url: String,
        /// Bytes that came.
        got: u64,
        /// Bytes that the manifest promises.
        want: u64,
    },
    /// Nothing came for too long.
    #[error("{url} sent nothing for {seconds} seconds")]
    Timeout {
        /// The URL without its query.
        url: String,
        /// The limit of the configuration.
        seconds: u64,
    },
    /// The registry refused.
    #[error("{url} answered {status}{message}")]
    Status {
        /// The URL without its query.
        url: String,
        /// The HTTP status.
        status: u16,
        /// ": " and the registry's own words, or nothing.
        message: String,
    },
    /// The registry broke a rule of HTTP or of its own protocol.
    #[error("the answer of {url} cannot be used: {why}")]
    Protocol {
        /// The URL without its query.
        url: String,
        /// The rule.
        why: &'static str,
    },
    /// Something is larger than it may be.
    #[error("{what} is larger than {limit} bytes")]
    TooLarge {
        /// What.
        what: String,
        /// How large it may be.
        limit: u64,
    },
    /// Content is not what its digest says. Nothing of it is kept.
    #[error("{what} is damaged: its digest is {got}")]
    Digest {
        /// What, with the digest it should have.
        what: String,
        /// The digest it has.
        got: Digest,
    },
    /// A manifest or configuration cannot be used.
    #[error("cannot use {what}")]
    Manifest {
        /// What.
        what: String,
        /// Why.
        source: ManifestError,
    },
    /// Something of another kind lies under the name.
    #[error("{name} is {found:?}, and what is wanted is {wanted}")]
    OtherArtifact {
        /// What was asked for.
        name: String,
        /// What it says it is.
        found: String,
        /// What it should be.
        wanted: &'static str,
    },
    /// Content ends before its announced end.
    #[error("{what} ends after {got} of {want} bytes")]
    Cut {
        /// What.
        what: String,
        /// Bytes that came.
        got: u64,
        /// Bytes that were announced.
        want: u64,
    },
    /// A layer cannot be used.
    #[error("cannot unpack layer {digest}")]
    Layer {
        /// Its digest: of the compressed form, or of the plain form for archives.
        digest: Digest,
        /// Why.
        source: LayerError,
    },
    /// The layers do not fit each other.
    #[error("cannot merge the layers of the image")]
    Tree(#[from] TreeError),
    /// The file system cannot be written.
    #[error("cannot describe the image's file system")]
    Erofs(#[from] ErofsError),
    /// A layer's index on disk is damaged.
    #[error("{path} is damaged", path = path.display())]
    Index {
        /// The file.
        path: PathBuf,
        /// Why.
        source: IndexError,
    },
    /// There is less disk than the layers need even in their compressed form.
    #[error("the image needs {needed} bytes and the disk of {path} has {free}", path = path.display())]
    NoSpace {
        /// The folder of the store.
        path: PathBuf,
        /// Bytes that the manifest promises.
        needed: u64,
        /// Bytes that are free.
        free: u64,
    },
    /// The configuration gives too little memory for unpacking.
    #[error("max_unpack_memory in [images] is {bytes}; at least {least} bytes are expected")]
    UnpackMemory {
        /// What it says.
        bytes: u64,
        /// The least.
        least: u64,
    },
    /// Reading an archive of images costs more than it may.
    #[error("cannot read the archive {path}", path = path.display())]
    ArchiveBudget {
        /// The file or folder.
        path: PathBuf,
        /// Why.
        source: BudgetError,
    },
    /// A file is no archive of images.
    #[error("{path} cannot be loaded: {why}", path = path.display())]
    Archive {
        /// The file or folder.
        path: PathBuf,
        /// The rule it breaks.
        why: &'static str,
    },
    /// An archive of images cannot be read.
    #[error("cannot read the archive {path}", path = path.display())]
    ArchiveRead {
        /// The file.
        path: PathBuf,
        /// Why.
        source: TarError,
    },
    /// A task of the runtime did not finish.
    #[error(transparent)]
    Task(#[from] TaskError),
}

impl Classify for ImageError {
    fn kind(&self) -> Kind {
        use ImageError as E;
        match self {
            E::BadReference { .. } | E::Ambiguous { .. } | E::Url { .. } | E::TooLarge { .. } => Kind::Invalid,
            E::OtherArtifact { .. } | E::Cut { .. } => Kind::Invalid,
            E::Tree(TreeError::Budget(source)) | E::Erofs(ErofsError::Budget(source)) => source.kind(),
            E::ArchiveBudget { source, .. } => source.kind(),
            E::Archive { .. } | E::ArchiveRead { .. } | E::Tree(_) | E::Erofs(_) => Kind::Invalid,
            E::UnpackMemory { .. } => Kind::Invalid,
            E::NotFound { .. } => Kind::NotFound,
            E::File(error) => error.kind(),
            E::Shared(error) => error.kind(),
            E::Version { .. } | E::Locked { .. } => Kind::Conflict,
            E::Certificates { .. } | E::Tls(_) | E::Catalogue { .. } | E::Index { .. } => Kind::Internal,
            E::Task(source) => source.kind(),
            E::Aborted { .. } => Kind::Unavailable,
            E::Request { .. } | E::Body { .. } | E::Short { .. } | E::Protocol { .. } | E::Digest { .. } => {
                Kind::Unavailable
            }
            E::Timeout { .. } => Kind::Timeout,
            E::Status { status, .. } => match status {
                401 | 403 => Kind::Denied,
                404 => Kind::NotFound,
                408 | 429 | 500.. => Kind::Unavailable,
                _ => Kind::Invalid,
            },
            E::Manifest { source: ManifestError::Kind { .. } | ManifestError::Platform { .. }, .. } => {
                Kind::Unsupported
            }
            E::Manifest { .. } => Kind::Invalid,
            E::Layer { source, .. } => layer_kind(source),
            E::NoSpace { .. } => Kind::Exhausted,
        }
    }
}

impl ImageError {
    /// Whether it is about what the work may cost, and not about the disk.
    pub(crate) fn is_over_budget(&self) -> bool {
        use ImageError as E;
        match self {
            E::Layer { source: LayerError::Budget(_), .. } | E::ArchiveBudget { .. } => true,
            E::Tree(TreeError::Budget(_)) | E::Erofs(ErofsError::Budget(_)) => true,
            E::Shared(error) => error.is_over_budget(),
            _ => false,
        }
    }
}

fn layer_kind(error: &LayerError) -> Kind {
    match error {
        LayerError::Source(error) | LayerError::Write(error) => Kind::from(error.kind()),
        LayerError::Decompress(_) | LayerError::Tar(_) | LayerError::Entry { .. } => Kind::Invalid,
        LayerError::TooLarge { .. } => Kind::Exhausted,
        LayerError::Budget(error) => error.kind(),
    }
}
