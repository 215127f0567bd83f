//! Defines the configuration file: its keys, their defaults, and the rules between them. It uses `nacelle-base` and the option
//! types of `nacelle-image`, `nacelle-net` and `nacelle-stream`, and starts nothing.

mod check;
mod duration;
mod files;
mod hosts;
mod key;
mod load;
mod options;
mod problem;
mod renamed;
mod size;
mod syntax;

#[cfg(test)]
pub(crate) mod tests;

pub(crate) use duration::parse as parse_duration;
pub use key::KeyPath;
pub use load::ConfigError;
pub use problem::{ConfigProblem, ConfigProblems};
#[cfg(test)]
pub(crate) use renamed::old_keys;
pub use syntax::SyntaxError;

use crate::log::LogFilter;
use crate::metrics::address::MetricsAddress;
use crate::traces::endpoint::TraceEndpoint;
use nacelle_base::disk_limits::DiskLimits;
use nacelle_base::machine::{ConsoleKind, MemoryPages};
use nacelle_machines::MachineSettings;
use nacelle_pod::spec::Seccomp;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

/// The configuration file if the command line names none.
pub const DEFAULT_PATH: &str = "/etc/nacelle/config.toml";

/// The configuration of the daemon. An empty file is valid.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// The handler of pods that name none.
    pub default_handler: String,
    /// Paths of files and directories.
    pub paths: PathSettings,
    /// Limits and defaults of pods.
    pub sandbox: SandboxSettings,
    /// Restrictions of pod processes and image workers.
    pub jail: JailSettings,
    /// CNI.
    pub network: NetworkSettings,
    /// Machines of machine pods.
    pub machines: MachineSettings,
    /// The server of exec, attach and port-forward.
    pub streaming: StreamingSettings,
    /// Registries and layers.
    pub images: ImageSettings,
    /// The daemon's log.
    pub log: LogSettings,
    /// The metrics of the daemon.
    pub metrics: MetricsSettings,
    /// Traces of CRI requests.
    pub tracing: TracingSettings,
    /// The handlers that RuntimeClasses can name. If the file defines none, there is one with the name `default_handler`.
    pub handlers: BTreeMap<String, Handler>,
}

/// The daemon's log.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LogSettings {
    /// The events that are logged, unless NACELLE_LOG says so.
    pub filter: LogFilter,
}

/// The metrics of the daemon.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MetricsSettings {
    /// The address on which metrics are served; `None`: they are not served.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub address: Option<MetricsAddress>,
}

/// Traces of CRI requests, named as in kubelet's TracingConfiguration.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TracingSettings {
    /// The collector that receives spans; `None`: nothing is recorded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<TraceEndpoint>,
    /// Of a million requests whose client sends no trace, how many are recorded.
    pub sampling_rate_per_million: u32,
}

/// Paths of files and directories.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PathSettings {
    /// The directory of data that must survive a reboot: images and the state store.
    pub root: PathBuf,
    /// The directory of data that need not survive a reboot: the run directories of pods.
    pub run: PathBuf,
    /// The socket of the CRI server.
    pub socket: PathBuf,
}

/// Limits and defaults of pods.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SandboxSettings {
    /// The cgroup driver, the same as kubelet's: "cgroupfs" or "systemd".
    pub cgroup_driver: CgroupDriver,
    /// Time limit from the start of a VM until its agent is ready.
    #[serde(with = "duration")]
    pub boot_timeout: Duration,
    /// Time limit for a response of a pod process, in addition to what the request itself allows.
    #[serde(with = "duration")]
    pub pod_request_timeout: Duration,
    /// Time limit for one step of a pod's teardown.
    #[serde(with = "duration")]
    pub teardown_timeout: Duration,
    /// Pods that request the node's network, PID or IPC namespace: "refuse" or "run-on-host".
    pub host_namespaces: HostNamespaces,
    /// Privileged pods: "machine" or "run-on-host".
    pub privileged: PrivilegedPods,
    /// How long a guest may cache names and attributes on volumes of the node, in whole seconds.
    #[serde(with = "duration")]
    pub volume_cache_ttl: Duration,
    /// Directories with specifications of the Container Device Interface; later ones take precedence.
    pub cdi_dirs: Vec<PathBuf>,
    /// Which pods may start from the same template, and so share memory that none of them has written: "node", "namespace" or "off".
    pub templates: TemplateScope,
    /// The memory in MiB that all templates together may take; the one that was used last may exceed it alone.
    #[serde(deserialize_with = "size::mib")]
    pub templates_max_mib: u64,
}

/// Which pods of engine `kvm` may start from the same template.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TemplateScope {
    /// All pods of the node.
    #[default]
    Node,
    /// Those of one Kubernetes namespace.
    Namespace,
    /// None: each VM boots.
    Off,
}

/// The handling of pods that request namespaces of the node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HostNamespaces {
    /// Such pods are rejected.
    #[default]
    Refuse,
    /// A pod with a namespace of the node runs without a guest, on engine host, whatever the engine of its handler is.
    RunOnHost,
}

/// The handling of privileged pods.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PrivilegedPods {
    /// Their handler's engine runs them, as all others.
    #[default]
    Machine,
    /// A privileged pod without a user namespace runs without a guest, on engine host, whatever the engine of its handler is.
    RunOnHost,
}

/// The cgroup driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CgroupDriver {
    /// cgroups are created as directories.
    Cgroupfs,
    /// cgroups are created as systemd scopes.
    Systemd,
}

/// Restrictions of pod processes and image workers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct JailSettings {
    /// The action for a system call outside of a thread's or worker's list: "kill", "log" or "off".
    pub seccomp: Seccomp,
    /// The first user id, and group id, of a range: that of image workers. Each pod process of a VM gets one of the others for itself.
    pub first_user: u32,
    /// The number of ids in the range; 0: these processes are root, without capabilities.
    pub user_count: u32,
}

/// CNI.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct NetworkSettings {
    /// The directory of CNI configurations; the first file in lexical order counts.
    pub cni_conf_dir: PathBuf,
    /// Directories of CNI plugins.
    pub cni_bin_dirs: Vec<PathBuf>,
    /// The directory of network namespace files.
    pub netns_dir: PathBuf,
    /// Time limit for one command of one plugin.
    #[serde(with = "duration")]
    pub plugin_timeout: Duration,
    /// The interval at which networks without a pod are released and plugins receive CNI GC; 0: only when the daemon starts.
    #[serde(with = "duration")]
    pub gc_interval: Duration,
}

/// The server of exec, attach and port-forward.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct StreamingSettings {
    /// The address that kubelet connects to; port 0 selects any free port.
    pub address: SocketAddr,
    /// How long a stream may be without data before it is closed.
    #[serde(with = "duration")]
    pub idle_timeout: Duration,
    /// A PEM file with the server's certificate, for https.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls_cert_file: Option<PathBuf>,
    /// A PEM file with the certificate's private key.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls_key_file: Option<PathBuf>,
}

/// Registries and layers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ImageSettings {
    /// The number of layers that are downloaded at the same time.
    pub parallel_layers: usize,
    /// How long a download may be without data before it fails.
    #[serde(with = "duration")]
    pub progress_timeout: Duration,
    /// The largest unpacked size of one layer in bytes.
    #[serde(deserialize_with = "size::bytes")]
    pub max_layer_bytes: u64,
    /// The largest number of files and directories in one layer.
    pub max_layer_entries: u64,
    /// Memory in bytes for unpacking, in all concurrent pulls and loads together.
    #[serde(deserialize_with = "size::bytes")]
    pub max_unpack_memory: u64,
    /// Images that kubelet must not collect.
    pub pinned: Vec<String>,
    /// The interval at which the daemon verifies the digests of all images in the background; zero: never.
    #[serde(with = "duration")]
    pub verify_interval: Duration,
    /// The proxy of http requests to registries; absent: that of the environment; empty: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub http_proxy: Option<String>,
    /// The proxy of https requests to registries, as `http_proxy`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub https_proxy: Option<String>,
    /// The hosts that no proxy is used for, as `http_proxy`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub no_proxy: Option<String>,
    /// A directory with further settings of registries, in containerd's format (`HOST/hosts.toml`). Read when the daemon starts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hosts_dir: Option<PathBuf>,
    /// Settings of registries, by host and port; the mirrors of `_default` serve registries without an entry.
    pub registries: BTreeMap<String, RegistrySettings>,
}

/// Settings of one registry.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RegistrySettings {
    /// The registry is accessed by plain http.
    pub http: bool,
    /// The registry's certificate is not verified.
    pub skip_tls_verify: bool,
    /// A PEM file of further trusted certificates.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ca_file: Option<PathBuf>,
    /// A PEM file with the certificate that the registry receives from this node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub client_cert_file: Option<PathBuf>,
    /// A PEM file with the private key of that certificate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub client_key_file: Option<PathBuf>,
    /// URLs of mirrors, which are tried before the registry, in this order.
    pub mirrors: Vec<String>,
    /// A file with credentials for this host where it is a mirror, in the format of docker's config.json.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub auth_file: Option<PathBuf>,
}

/// The engine of a handler.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EngineSetting {
    /// The engine that suits this node, according to the probe of KVM.
    #[default]
    Auto,
    /// Nacelle's own VMM.
    Kvm,
    /// QEMU.
    Qemu,
    /// No guest: the containers run in namespaces of the node. Never chosen automatically.
    Host,
}

/// The form in which a VM gets the emptyDirs that kubelet keeps on its disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EmptyDir {
    /// Shares of the node's directories.
    #[default]
    Shared,
    /// Disks of the VM, in files in those directories.
    Disk,
}

/// A handler that a RuntimeClass can name: the settings of its VMs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Handler {
    /// The engine.
    pub engine: EngineSetting,
    /// The guest's kernel, an uncompressed vmlinux.
    pub kernel: PathBuf,
    /// The initramfs with the agent.
    pub initrd: PathBuf,
    /// Additional kernel command-line parameters.
    pub kernel_args: Vec<String>,
    /// The number of vCPUs at boot.
    pub vcpus: u32,
    /// The largest number of vCPUs that a running VM may get; `None`: the number at boot.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_vcpus: Option<u32>,
    /// Memory of a VM in MiB, in addition to the pod's limits.
    #[serde(deserialize_with = "size::mib")]
    pub memory_mib: u64,
    /// The largest total memory that a running VM may get, in MiB; `None`: the memory at boot.
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "size::optional_mib")]
    pub max_memory_mib: Option<u64>,
    /// The pages that back the VM's memory on the node: "transparent" or "hugetlb".
    pub memory_pages: MemoryPages,
    /// The console device of the guest's kernel: "serial" or "virtio".
    pub console: ConsoleKind,
    /// The size in MiB of the sparse disk for the writable layers of containers.
    #[serde(deserialize_with = "size::mib")]
    pub scratch_mib: u64,
    /// The limits of each pod on the disk of `paths.root`; `None` for none.
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "size::disk_limits")]
    pub disk_limits: Option<DiskLimits>,
    /// The form of emptyDirs that kubelet keeps on its disk: "shared" or "disk".
    pub empty_dir: EmptyDir,
    /// The size in MiB of emptyDirs that are disks, where the pod sets no limit; `None`: the free space of the node.
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "size::optional_mib")]
    pub empty_dir_mib: Option<u64>,
    /// Annotations (`vm.nacelle.dev/...`) that a pod of this handler may have.
    pub allowed_annotations: Vec<String>,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            default_handler: "nacelle".into(),
            paths: PathSettings::default(),
            sandbox: SandboxSettings::default(),
            jail: JailSettings::default(),
            network: NetworkSettings::default(),
            machines: MachineSettings::default(),
            streaming: StreamingSettings::default(),
            images: ImageSettings::default(),
            log: LogSettings::default(),
            metrics: MetricsSettings::default(),
            tracing: TracingSettings::default(),
            handlers: BTreeMap::new(),
        }
    }
}

impl Default for PathSettings {
    fn default() -> Self {
        PathSettings {
            root: "/var/lib/nacelle".into(),
            run: "/run/nacelle".into(),
            socket: "/run/nacelle/nacelle.sock".into(),
        }
    }
}

impl Default for SandboxSettings {
    fn default() -> Self {
        SandboxSettings {
            cgroup_driver: CgroupDriver::Cgroupfs,
            boot_timeout: Duration::from_secs(180),
            pod_request_timeout: Duration::from_secs(60),
            teardown_timeout: Duration::from_secs(60),
            host_namespaces: HostNamespaces::Refuse,
            privileged: PrivilegedPods::Machine,
            volume_cache_ttl: Duration::from_secs(1),
            cdi_dirs: vec!["/etc/cdi".into(), "/var/run/cdi".into()],
            templates: TemplateScope::default(),
            templates_max_mib: 512,
        }
    }
}

impl Default for JailSettings {
    fn default() -> Self {
        // Above the ids that systemd gives to containers and below its later ranges (https://systemd.io/UIDS-GIDS).
        JailSettings { seccomp: Seccomp::default(), first_user: 0x7000_0000, user_count: 0x1_0000 }
    }
}

impl Default for NetworkSettings {
    fn default() -> Self {
        let net = nacelle_net::NetConfig::default();
        NetworkSettings {
            cni_conf_dir: net.conf_dir,
            cni_bin_dirs: net.bin_dirs,
            netns_dir: net.netns_dir,
            plugin_timeout: net.plugin_deadline,
            // What leaks is an address or a rule, while each round holds up the starts of pods for as long as the plugins run.
            gc_interval: Duration::from_secs(600),
        }
    }
}

impl Default for StreamingSettings {
    fn default() -> Self {
        StreamingSettings {
            address: SocketAddr::from(([127, 0, 0, 1], 0)),
            idle_timeout: Duration::from_secs(4 * 60 * 60),
            tls_cert_file: None,
            tls_key_file: None,
        }
    }
}

impl Default for ImageSettings {
    fn default() -> Self {
        let images = nacelle_image::ImageStoreConfig::default();
        ImageSettings {
            parallel_layers: images.parallel_layers,
            progress_timeout: images.progress_timeout,
            max_layer_bytes: images.max_layer_bytes,
            max_layer_entries: images.max_layer_entries,
            max_unpack_memory: images.max_unpack_memory,
            pinned: Vec::new(),
            verify_interval: Duration::from_secs(7 * 24 * 60 * 60),
            http_proxy: None,
            https_proxy: None,
            no_proxy: None,
            hosts_dir: None,
            registries: BTreeMap::new(),
        }
    }
}

impl Default for Handler {
    fn default() -> Self {
        Handler {
            engine: EngineSetting::Auto,
            kernel: "/usr/lib/nacelle/vmlinux".into(),
            initrd: "/usr/lib/nacelle/initrd".into(),
            kernel_args: Vec::new(),
            vcpus: 1,
            max_vcpus: None,
            memory_mib: 256,
            max_memory_mib: None,
            memory_pages: MemoryPages::Transparent,
            console: ConsoleKind::Serial,
            scratch_mib: 10240,
            disk_limits: None,
            empty_dir: EmptyDir::Shared,
            empty_dir_mib: None,
            allowed_annotations: Vec::new(),
        }
    }
}
