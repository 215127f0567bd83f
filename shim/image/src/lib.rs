//! Turns images from a registry or an archive into root file systems that a guest can mount: references, registry client, layers,
//! merged tree, EROFS, the store and its garbage collection. It also stores artifacts, which use the same registries. The crate
//! knows neither CRI nor pods nor guests.
//!
//! `ImageStore` is a handle that can be cloned. Downloads run on the caller's tokio runtime; everything that hashes or accesses the
//! disk runs on blocking threads, and everything that decodes layers in jailed processes (`run_worker_program`).
//!
//! ```no_run
//! # async fn f() -> Result<(), nacelle_image::ImageError> {
//! use nacelle_image::{ImageStore, ImageStoreConfig, Reference};
//! let store = ImageStore::open("/var/lib/nacelle/images".as_ref(), ImageStoreConfig::default())?;
//! let id = store.pull(&Reference::parse("busybox")?, None).await?;
//! let rootfs = store.rootfs(&id).await?; // rootfs.disk goes to the pod process
//! # Ok(()) }
//! ```

mod artifact;
mod budget;
mod catalogue;
mod config;
mod damage;
mod directory;
mod erofs;
mod error;
mod files;
#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;
mod health;
mod idle;
mod install;
mod layer;
mod load;
mod manifest;
mod merge;
mod origins;
mod plan;
mod progress;
mod pull;
mod reference;
mod registry;
mod small;
mod store;
mod store_verity;
mod sums;
mod tree;
mod verify;
mod verity_ioctl;
mod wire;
mod worker;

pub use artifact::{
    Artifact, ArtifactKind, Artifacts, CompressedFile, Descriptor, FileContent, TransferProgress, VM_ARTIFACT_TYPE,
    compress_file,
};
pub use config::{
    Auth, ClientCertificate, DEFAULT_REGISTRY, ImageStoreConfig, ImageWorkerConfig, ProxyConfig, RegistryConfig,
};
pub use damage::{DamagedFile, FileDamage, ImageDamage, ImageVerification};
pub use directory::LAYERS;
pub use error::ImageError;
pub use files::{CopyOutcome, ImageFile};
pub use progress::Installation;
pub use reference::{Reference, is_registry_host};
pub use registry::auth_file::read_auth_file;
pub use registry::http::{check_authorities, check_client_certificate};
pub use small::{SmallImageError, write_small_image};
pub use store::{FsInfo, ImageConfig, ImageCounts, ImageRecord, ImageStore, ImageUser, LoadedImage, RootFs};
pub use worker::{WorkerError, run_worker_program};
