//! Defines the settings of an administrator for images and registries, and the credentials of one pull.

use crate::ImageError;
use nacelle_jail::Mode;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

/// The settings for pulls and the store. Every field has a default.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ImageStoreConfig {
    /// The settings of single registries, by the host (and port) that references name: "docker.io", "registry.local:5000".
    pub registries: BTreeMap<String, RegistryConfig>,
    /// The proxies of all requests to registries.
    pub proxy: ProxyConfig,
    /// The maximum number of layers that are downloaded at the same time, over all pulls.
    pub parallel_layers: usize,
    /// How long a connection may be without a byte of progress before the download fails.
    pub progress_timeout: Duration,
    /// The maximum size of one unpacked layer in bytes.
    pub max_layer_bytes: u64,
    /// The maximum number of files and directories of one layer.
    pub max_layer_entries: u64,
    /// The maximum memory in bytes that all pulls and loads together use for unpacking. One layer may use a quarter of it, the
    /// tree of an image seven eighths.
    pub max_unpack_memory: u64,
    /// References of images that must not be garbage-collected (`ImageRecord::pinned`), for example a pause image.
    pub pinned: Vec<String>,
    /// The processes that decode layers.
    pub worker: ImageWorkerConfig,
}

/// The settings of the jailed processes that decode layers. There is no store without them.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ImageWorkerConfig {
    /// The program. By default `nacelle-unpack`, in the directory of this program.
    pub program: PathBuf,
    /// The user and group of the processes; `None` keeps those of this process.
    pub user: Option<u32>,
    /// The reaction to a system call that is not allowed.
    pub seccomp: Mode,
    /// How long a process may neither read nor write nor use CPU time, while its input is not waited for.
    pub stall_timeout: Duration,
}

impl Default for ImageWorkerConfig {
    fn default() -> Self {
        let program = std::env::current_exe().unwrap_or_else(|_| "/".into()).with_file_name(WORKER_PROGRAM);
        ImageWorkerConfig { program, user: None, seccomp: Mode::Kill, stall_timeout: Duration::from_secs(300) }
    }
}

/// The name of the program.
const WORKER_PROGRAM: &str = "nacelle-unpack";

impl Default for ImageStoreConfig {
    fn default() -> Self {
        ImageStoreConfig {
            registries: BTreeMap::new(),
            proxy: ProxyConfig::default(),
            parallel_layers: 4,
            progress_timeout: Duration::from_secs(60),
            max_layer_bytes: 64 << 30,
            max_layer_entries: 1_000_000,
            max_unpack_memory: 1 << 30,
            pinned: Vec::new(),
            worker: ImageWorkerConfig::default(),
        }
    }
}

/// The minimum of `max_unpack_memory`. A quarter of it is enough for a layer: [`LAYER_MEMORY`], and half as much for its index.
pub const MIN_UNPACK_MEMORY: u64 = 6 * LAYER_MEMORY;
/// The least memory that a zstd layer takes: its fixed buffers and its window.
const LAYER_MEMORY: u64 = 64 << 20;

impl ImageStoreConfig {
    /// Returns the memory for unpacking, or an error if it is below the minimum.
    pub(crate) fn unpack_memory(&self) -> Result<u64, ImageError> {
        match self.max_unpack_memory {
            bytes if bytes >= MIN_UNPACK_MEMORY => Ok(bytes),
            bytes => Err(ImageError::UnpackMemory { bytes, least: MIN_UNPACK_MEMORY }),
        }
    }

    /// Returns the number of layers at a time: as configured, but no more than fit into half of the memory for unpacking.
    pub(crate) fn layers_at_a_time(&self) -> usize {
        let fitting = usize::try_from(self.max_unpack_memory / 2 / LAYER_MEMORY).unwrap_or(usize::MAX);
        self.parallel_layers.min(fitting).clamp(1, 64)
    }
}

/// The settings of one registry.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RegistryConfig {
    /// Use plain HTTP instead of HTTPS.
    pub http: bool,
    /// Do not verify the certificate.
    pub skip_tls_verify: bool,
    /// A PEM file with certificates that are trusted in addition to the system's.
    pub ca_file: Option<PathBuf>,
    /// The certificate by which the registry authenticates this node.
    pub client_certificate: Option<ClientCertificate>,
    /// URLs ("https://mirror.local:5000") of mirrors, tried in this order before the registry itself. The settings of a mirror
    /// are under the mirror's own host.
    pub mirrors: Vec<String>,
    /// A file of credentials (docker's config.json) for this host where it is a mirror, unless the pull brings some for it.
    pub auth_file: Option<PathBuf>,
}

/// The key of `registries` whose mirrors serve every registry that has no entry.
pub const DEFAULT_REGISTRY: &str = "_default";

/// The http proxies of requests to registries. Empty strings mean that there is none. The URLs may contain credentials.
#[derive(Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ProxyConfig {
    /// The proxy's URL for http requests.
    pub http_proxy: String,
    /// The proxy's URL for https requests.
    pub https_proxy: String,
    /// The hosts that are connected to directly, separated by commas: host, `.suffix`, address, CIDR block, `*`.
    pub no_proxy: String,
}

impl ProxyConfig {
    /// Returns the proxies that the environment names: HTTP_PROXY, HTTPS_PROXY and NO_PROXY, or the same in lower case where one is
    /// absent or empty. `variable` returns a variable's value.
    pub fn from_environment(variable: impl Fn(&str) -> Option<String>) -> ProxyConfig {
        let read = |name: &str| {
            let values = [name.to_owned(), name.to_ascii_lowercase()].into_iter().filter_map(|name| variable(&name));
            values.map(|value| value.trim().to_owned()).find(|value| !value.is_empty()).unwrap_or_default()
        };
        ProxyConfig { http_proxy: read("HTTP_PROXY"), https_proxy: read("HTTPS_PROXY"), no_proxy: read("NO_PROXY") }
    }
}

impl fmt::Debug for ProxyConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProxyConfig").field("no_proxy", &self.no_proxy).finish_non_exhaustive()
    }
}

/// A client certificate and its private key, in PEM files.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClientCertificate {
    /// The file with the certificate and its intermediate certificates.
    pub certificate: PathBuf,
    /// The file with the private key.
    pub key: PathBuf,
}

/// The credentials of one pull, as in CRI's AuthConfig. Empty strings count as absent.
#[derive(Clone, Default, PartialEq, Eq, Hash)]
pub struct Auth {
    /// The user name.
    pub username: String,
    /// The password.
    pub password: String,
    /// `base64(user:password)`, used if `username` is empty.
    pub auth: String,
    /// The registry that the credentials are for. They are not sent to another one.
    pub server_address: String,
    /// A refresh token that is exchanged for an access token.
    pub identity_token: String,
    /// A bearer token that is sent unchanged.
    pub registry_token: String,
}

impl fmt::Debug for Auth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Auth").field("username", &self.username).finish_non_exhaustive()
    }
}
