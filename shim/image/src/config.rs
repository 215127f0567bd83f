//! Owns: what an administrator can set about images and registries, and the credentials of one pull.

use crate::ImageError;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

/// How images are pulled and kept. Every field has a default.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// What is special about a registry, by the host (and port) that references name: "docker.io",
    /// "registry.local:5000".
    pub registries: BTreeMap<String, RegistryConfig>,
    /// Layers that are downloaded at the same time, over all pulls.
    pub parallel_layers: usize,
    /// Seconds without one byte of progress after which a connection counts as dead.
    pub progress_timeout_seconds: u64,
    /// Bytes that one layer may have when it is unpacked.
    pub max_layer_bytes: u64,
    /// Files and folders that one layer may have.
    pub max_layer_entries: u64,
    /// Bytes of memory that all pulls and loads together may take for unpacking; one layer may take a quarter of it, the tree of an
    /// image seven eighths.
    pub max_unpack_memory: u64,
    /// References of images that must not be collected (`ImageRecord::pinned`), for example a pause image.
    pub pinned: Vec<String>,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            registries: BTreeMap::new(),
            parallel_layers: 4,
            progress_timeout_seconds: 60,
            max_layer_bytes: 64 << 30,
            max_layer_entries: 1_000_000,
            max_unpack_memory: 1 << 30,
            pinned: Vec::new(),
        }
    }
}

/// The least memory for unpacking. A layer may take a quarter of it: [`LAYER_MEMORY`], and half as much for its index.
pub const MIN_UNPACK_MEMORY: u64 = 6 * LAYER_MEMORY;
/// What a layer takes at least, in zstd: its fixed buffers and its window.
const LAYER_MEMORY: u64 = 64 << 20;

impl Config {
    /// The memory for unpacking, if it is enough.
    pub(crate) fn unpack_memory(&self) -> Result<u64, ImageError> {
        match self.max_unpack_memory {
            bytes if bytes >= MIN_UNPACK_MEMORY => Ok(bytes),
            bytes => Err(ImageError::UnpackMemory { bytes, least: MIN_UNPACK_MEMORY }),
        }
    }

    /// Layers at a time: as configured, and no more than fit into half of the memory for unpacking.
    pub(crate) fn layers_at_a_time(&self) -> usize {
        let fitting = usize::try_from(self.max_unpack_memory / 2 / LAYER_MEMORY).unwrap_or(usize::MAX);
        self.parallel_layers.min(fitting).clamp(1, 64)
    }
}

/// What is special about one registry.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RegistryConfig {
    /// Plain http instead of https.
    pub http: bool,
    /// Do not check the certificate.
    pub skip_tls_verify: bool,
    /// A PEM file with certificates that are trusted beside the system's.
    pub ca_file: Option<PathBuf>,
    /// URLs ("https://mirror.local:5000") that are asked before the registry itself, in this order. What is
    /// special about a mirror stands under the mirror's own host.
    pub mirrors: Vec<String>,
}

/// The credentials of one pull, as CRI's AuthConfig gives them. Empty strings count as absent.
#[derive(Clone, Default, PartialEq, Eq, Hash)]
pub struct Auth {
    /// The user.
    pub username: String,
    /// The password.
    pub password: String,
    /// `base64(user:password)`, used when `username` is empty.
    pub auth: String,
    /// The registry that the credentials are for; if it is another one they are not sent.
    pub server_address: String,
    /// A refresh token that is exchanged for an access token.
    pub identity_token: String,
    /// A bearer token that is sent as it is.
    pub registry_token: String,
}

impl fmt::Debug for Auth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Auth").field("username", &self.username).finish_non_exhaustive()
    }
}
