//! Defines the errors of this crate and their classification for callers.

use crate::artifact::VM_ARTIFACT_TYPE;
use crate::budget::BudgetError;
use crate::damage::DamagedFile;
use crate::erofs::ErofsError;
use crate::layer::index::IndexError;
use crate::layer::ingest::LayerError;
use crate::layer::tar::TarError;
use crate::manifest::ManifestError;
use crate::tree::TreeError;
use crate::worker::{UnpackError, WorkerError};
use nacelle_base::files::FileError;
use nacelle_base::task::TaskError;
use nacelle_base::{Classify, FailureKind};
use nacelle_model::digest::Digest;
use std::path::PathBuf;
use std::sync::Arc;

/// Reasons that an operation on an image fails.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// The text is not an image reference.
    #[error("{text:?} is not an image reference: {why}")]
    BadReference {
        /// The text, truncated to 300 characters.
        text: String,
        /// The rule that the text violates.
        why: &'static str,
    },
    /// The store has no such image.
    #[error("image {name:?} is not in the store")]
    NotFound {
        /// The name that was requested.
        name: String,
    },
    /// A file of the image is damaged or missing. The next pull repairs it.
    #[error("image {image} is damaged: {file}; pull the image again, or load it again from its archive")]
    Damaged {
        /// The name or id of the image.
        image: String,
        /// The file and its damage.
        file: Box<DamagedFile>,
    },
    /// The short id matches several images.
    #[error("{name:?} is the beginning of the ids of several images; give more digits")]
    Ambiguous {
        /// The name that was requested.
        name: String,
    },
    /// A file operation failed.
    #[error(transparent)]
    File(#[from] FileError),
    /// A pull failed for all of its callers.
    #[error(transparent)]
    SharedPull(Arc<ImageError>),
    /// A pull ended without a result, because the process is ending or a part of it panicked.
    #[error("cannot pull {name}: its task was cancelled or panicked")]
    Aborted {
        /// The image.
        name: String,
    },
    /// The list of images has a format that this version does not know.
    #[error("{path} has format {version}; this version of Nacelle knows format {known} only", path = path.display())]
    Version {
        /// The file.
        path: PathBuf,
        /// The version of the file.
        version: u64,
        /// The newest version that is supported.
        known: u64,
    },
    /// The list of images cannot be read.
    #[error(
        "the list of images {path} is damaged; restore it, or move it away and pull the images again: the files of all images are then \
         removed after an hour",
        path = path.display()
    )]
    Catalogue {
        /// The file.
        path: PathBuf,
        /// The position and the reason.
        source: serde_json::Error,
    },
    /// Another process has the store open.
    #[error("{path} is in use by another process", path = path.display())]
    Locked {
        /// The directory of the store.
        path: PathBuf,
    },
    /// A URL of the configuration or of a registry is not supported.
    #[error("{url:?} is not an http or https URL")]
    Url {
        /// The configured URL.
        url: String,
    },
    /// Certificates cannot be read or used.
    #[error("cannot use the certificates in {path}", path = path.display())]
    Certificates {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: rustls::pki_types::pem::Error,
    },
    /// The private key of a client certificate cannot be read.
    #[error("cannot use the private key in {path}", path = path.display())]
    PrivateKey {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: rustls::pki_types::pem::Error,
    },
    /// A client certificate cannot be used with its key.
    #[error(
        "cannot use the client certificate {certificate} with the key {key}",
        certificate = certificate.display(),
        key = key.display()
    )]
    ClientCertificate {
        /// The file of the certificate.
        certificate: PathBuf,
        /// The file of the key.
        key: PathBuf,
        /// The reason.
        source: Box<rustls::Error>,
    },
    /// The configured proxy cannot be used. The URL is left out, because it may contain a password.
    #[error(
        "cannot use the proxy of {scheme} requests: {why}; correct images.{scheme}_proxy or the daemon's environment"
    )]
    Proxy {
        /// The scheme of the request.
        scheme: &'static str,
        /// The reason.
        why: &'static str,
    },
    /// A file of credentials cannot be parsed. The parser's message is left out, because it may quote a password.
    #[error("{path}, line {line}, column {column}: this is not a JSON file of registry credentials", path = path.display())]
    AuthFile {
        /// The file.
        path: PathBuf,
        /// The line of the fault, from 1.
        line: usize,
        /// The column of the fault.
        column: usize,
    },
    /// A file of credentials has none for a host.
    #[error("{path} has no credentials for {host}; add an entry under auths (credential helpers are not run)", path = path.display())]
    NoCredentials {
        /// The file.
        path: PathBuf,
        /// The host, with its port.
        host: String,
    },
    /// TLS cannot be set up.
    #[error("cannot set up TLS")]
    Tls(#[from] rustls::Error),
    /// The connection could not be made, or broke before a response.
    #[error("cannot send a request to {url}")]
    Request {
        /// The URL without its query.
        url: String,
        /// The reason.
        source: hyper_util::client::legacy::Error,
    },
    /// The connection broke in the middle of the response.
    #[error("the connection broke during the response of {url}")]
    BrokenBody {
        /// The URL without its query.
        url: String,
        /// The reason.
        source: hyper::Error,
    },
    /// The response was shorter than announced.
    #[error("the response of {url} ended after {got} of {want} bytes")]
    ShortBody {
        /// The URL without its query.
        url: String,
        /// The bytes that were received.
        got: u64,
        /// The size in the manifest.
        want: u64,
    },
    /// No byte was received within the time limit.
    #[error("{url} sent nothing for {seconds} s; check the network to it, or raise images.progress_timeout")]
    Timeout {
        /// The URL without its query.
        url: String,
        /// The limit of the configuration in seconds.
        seconds: u64,
    },
    /// The registry answered with an error status.
    #[error("{url} answered {status}{message}{}", advice(*status))]
    Status {
        /// The URL without its query.
        url: String,
        /// The HTTP status.
        status: u16,
        /// ": " and the registry's own message, or empty.
        message: String,
    },
    /// The registry violated HTTP or the registry protocol.
    #[error("the response of {url} is invalid: {why}")]
    Protocol {
        /// The URL without its query.
        url: String,
        /// The rule that was violated.
        why: &'static str,
    },
    /// Something exceeds its size limit.
    #[error("{what} is larger than {limit} bytes")]
    TooLarge {
        /// The name of the thing.
        what: String,
        /// The limit in bytes.
        limit: u64,
    },
    /// A directory that is to be listed has too many files.
    #[error("directory {directory} of the image has more than {limit} files")]
    TooManyFiles {
        /// The path of the directory.
        directory: String,
        /// The limit.
        limit: usize,
    },
    /// The content does not match its digest. None of it is kept.
    #[error(
        "{what} is damaged: its digest is {got}; check where it comes from: the registry, a mirror, a proxy or the archive"
    )]
    Digest {
        /// The name of the content, with the expected digest.
        what: String,
        /// The actual digest.
        got: Digest,
    },
    /// A manifest or configuration cannot be used.
    #[error("cannot use {what}")]
    Manifest {
        /// The name of the document.
        what: String,
        /// The reason.
        source: ManifestError,
    },
    /// The name belongs to an artifact of another kind.
    #[error("{name} has the type {found:?}, but {wanted} is expected")]
    OtherArtifact {
        /// The name that was requested.
        name: String,
        /// The type in the manifest.
        found: String,
        /// The expected type.
        wanted: &'static str,
    },
    /// The artifact is a persistent VM, which is no image and no volume.
    #[error(
        "{name} is a persistent VM ({VM_ARTIFACT_TYPE}), not an image or a volume; import it with nacelle vm import"
    )]
    VmArtifact {
        /// The name of the artifact, or its digest.
        name: String,
    },
    /// The content ends before its announced end.
    #[error("{what} ends after {got} of {want} bytes")]
    Truncated {
        /// The name of the content.
        what: String,
        /// The bytes that were received.
        got: u64,
        /// The bytes that were announced.
        want: u64,
    },
    /// A layer cannot be used.
    #[error("cannot unpack layer {digest}")]
    Layer {
        /// The layer's digest: of the compressed form, or of the plain form for archives.
        digest: Digest,
        /// The reason.
        source: UnpackError,
    },
    /// The layers are inconsistent with each other.
    #[error("cannot merge the layers of the image")]
    Tree(#[from] TreeError),
    /// The file system cannot be written.
    #[error("cannot write the EROFS metadata of the image")]
    Erofs(#[from] ErofsError),
    /// The worker got incomplete indexes, or cannot write.
    #[error("the image worker cannot read the indexes of the layers or write the metadata of the image")]
    MergeStream(#[source] std::io::Error),
    /// A worker did not do its job.
    #[error(transparent)]
    Worker(#[from] WorkerError),
    /// A layer's index on disk is damaged.
    #[error("{path} is damaged; pull the image again", path = path.display())]
    Index {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: IndexError,
    },
    /// The disk has less free space than the compressed layers need.
    #[error("the image needs {needed} bytes and the disk of {path} has {free}", path = path.display())]
    NoSpace {
        /// The directory of the store.
        path: PathBuf,
        /// The size in the manifest, in bytes.
        needed: u64,
        /// The free bytes.
        free: u64,
    },
    /// The configured memory for unpacking is too small.
    #[error("max_unpack_memory in [images] is {bytes}; at least {least} bytes are expected")]
    UnpackMemory {
        /// The configured value in bytes.
        bytes: u64,
        /// The minimum in bytes.
        least: u64,
    },
    /// Reading an archive of images exceeds the budget.
    #[error("cannot read the archive {path}", path = path.display())]
    ArchiveBudget {
        /// The file or directory.
        path: PathBuf,
        /// The reason.
        source: BudgetError,
    },
    /// The file is not an archive of images.
    #[error("{path} cannot be loaded: {why}", path = path.display())]
    Archive {
        /// The file or directory.
        path: PathBuf,
        /// The rule that the file violates.
        why: &'static str,
    },
    /// An archive of images cannot be read.
    #[error("cannot read the archive {path}", path = path.display())]
    ArchiveRead {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: TarError,
    },
    /// A blocking task panicked or was cancelled.
    #[error(transparent)]
    Task(#[from] TaskError),
}

/// Returns the remedy for an HTTP status of a registry.
fn advice(status: u16) -> &'static str {
    match status {
        401 | 403 => "; the pod needs other imagePullSecrets, or the registry other credentials",
        404 => "; check the name and the tag of the image",
        429 => "; the registry limits pulls: use credentials or a mirror (images.registries)",
        500.. => "; the registry has failed: see its log",
        _ => "",
    }
}

impl Classify for ImageError {
    fn kind(&self) -> FailureKind {
        use ImageError as E;
        match self {
            E::BadReference { .. }
            | E::Ambiguous { .. }
            | E::Url { .. }
            | E::TooLarge { .. }
            | E::TooManyFiles { .. } => FailureKind::Invalid,
            E::OtherArtifact { .. } | E::VmArtifact { .. } | E::Truncated { .. } => FailureKind::Invalid,
            E::Tree(TreeError::Budget(source)) | E::Erofs(ErofsError::Budget(source)) => source.kind(),
            E::ArchiveBudget { source, .. } => source.kind(),
            E::Archive { .. } | E::ArchiveRead { .. } | E::Tree(_) | E::Erofs(_) => FailureKind::Invalid,
            E::UnpackMemory { .. } => FailureKind::Invalid,
            E::MergeStream(source) => FailureKind::from(source.kind()),
            E::Worker(source) => source.kind(),
            E::NotFound { .. } => FailureKind::NotFound,
            E::File(error) => error.kind(),
            E::SharedPull(error) => error.kind(),
            E::Version { .. } | E::Locked { .. } | E::Damaged { .. } => FailureKind::Conflict,
            E::Certificates { .. }
            | E::PrivateKey { .. }
            | E::ClientCertificate { .. }
            | E::AuthFile { .. }
            | E::NoCredentials { .. }
            | E::Proxy { .. }
            | E::Tls(_)
            | E::Catalogue { .. }
            | E::Index { .. } => FailureKind::Internal,
            E::Task(source) => source.kind(),
            E::Aborted { .. } => FailureKind::Unavailable,
            E::Request { .. } | E::BrokenBody { .. } | E::ShortBody { .. } | E::Protocol { .. } | E::Digest { .. } => {
                FailureKind::Unavailable
            }
            E::Timeout { .. } => FailureKind::Timeout,
            E::Status { status, .. } => match status {
                401 | 403 => FailureKind::Denied,
                404 => FailureKind::NotFound,
                408 | 429 | 500.. => FailureKind::Unavailable,
                _ => FailureKind::Invalid,
            },
            E::Manifest { source: ManifestError::UnsupportedType { .. } | ManifestError::Platform { .. }, .. } => {
                FailureKind::Unsupported
            }
            E::Manifest { .. } => FailureKind::Invalid,
            E::Layer { source, .. } => source.kind(),
            E::NoSpace { .. } => FailureKind::Exhausted,
        }
    }
}

impl ImageError {
    /// Returns whether the work exceeds its budget or a worker was killed, in contrast to a full disk.
    pub(crate) fn is_over_budget(&self) -> bool {
        use ImageError as E;
        match self {
            E::Layer { source, .. } => {
                matches!(source, UnpackError::Layer(LayerError::Budget(_)) | UnpackError::Worker(_))
            }
            E::ArchiveBudget { .. } => true,
            E::Worker(_) => true,
            E::Tree(TreeError::Budget(_)) | E::Erofs(ErofsError::Budget(_)) => true,
            E::SharedPull(error) => error.is_over_budget(),
            _ => false,
        }
    }
}
