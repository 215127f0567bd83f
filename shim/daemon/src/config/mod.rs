//! Owns: the configuration file: its keys, their defaults, and the rules they must keep.
//! May use: `nacelle-base`, the option types of `nacelle-image`, `nacelle-net` and `nacelle-stream`. Starts nothing.

mod check;
pub use check::Rule;

use nacelle_base::files::{FileError, at};
use nacelle_base::machine::{ConsoleKind, EngineKind, MemoryPages};
use nacelle_base::{Classify, Kind};
use nacelle_machines::MachineSettings;
use nacelle_pod::spec::Seccomp;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Where the configuration is looked for if no other file is named.
pub const DEFAULT_PATH: &str = "/etc/nacelle/config.toml";

/// The configuration of the daemon. An empty file is a complete one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// The handler of pods that name none.
    pub default_handler: String,
    /// Where things are kept.
    pub paths: Paths,
    /// Limits of pods and their defaults.
    pub sandbox: Sandbox,
    /// What pod processes may not do.
    pub jail: Jail,
    /// CNI.
    pub network: Network,
    /// Machines of machine pods.
    pub machines: MachineSettings,
    /// Where exec, attach and port-forward are served.
    pub streaming: Streaming,
    /// Registries and layers.
    pub images: Images,
    /// What a RuntimeClass can name. Without any there is one, named as `default_handler`.
    pub handlers: BTreeMap<String, Handler>,
}

/// Where things are kept.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Paths {
    /// What must survive a reboot: images, the state store.
    pub root: PathBuf,
    /// What need not: the folders of pods.
    pub run: PathBuf,
    /// Where CRI is served.
    pub socket: PathBuf,
}

/// Limits of pods and their defaults.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Sandbox {
    /// Who makes the cgroups that kubelet hands over: "cgroupfs" or "systemd".
    pub cgroup_driver: CgroupDriver,
    /// Seconds from the start of a machine until its agent must be ready.
    pub boot_seconds: u64,
    /// Seconds that a pod process may take for an answer, beside what the request itself allows.
    pub answer_seconds: u64,
    /// Seconds that one step of taking a pod down may last.
    pub undo_seconds: u64,
    /// Pods that ask for the node's network, PID or IPC namespace: "refuse" or "run-on-host".
    pub host_namespaces: HostNamespaces,
    /// Privileged pods: "machine" or "run-on-host".
    pub privileged: PrivilegedPods,
    /// Seconds for which a machine may believe what it was told of names and attributes on volumes of the node.
    pub volume_cache_seconds: u64,
    /// Folders with specifications of the Container Device Interface; later ones go before.
    pub cdi_dirs: Vec<PathBuf>,
}

/// What becomes of pods that ask for namespaces of the node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HostNamespaces {
    /// They are refused.
    #[default]
    Refuse,
    /// They have no guest: engine host runs them, whatever their handler's engine is.
    RunOnHost,
}

/// What becomes of privileged pods.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PrivilegedPods {
    /// Their handler's engine runs them, as all others.
    #[default]
    Machine,
    /// They have no guest: engine host runs them, whatever their handler's engine is.
    RunOnHost,
}

/// Who makes cgroups.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CgroupDriver {
    /// Folders, made directly.
    Cgroupfs,
    /// systemd's slices.
    Systemd,
}

/// What pod processes may not do.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Jail {
    /// What happens at a system call that is not on a thread's list: "kill", "log" or "off".
    pub seccomp: Seccomp,
}

/// CNI.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Network {
    /// Folder of CNI configurations; the first file in lexical order counts.
    pub cni_conf_dir: PathBuf,
    /// Folders of CNI plugins.
    pub cni_bin_dirs: Vec<PathBuf>,
    /// Folder in which network namespaces are named.
    pub netns_dir: PathBuf,
    /// Seconds that one plugin may take for one command.
    pub plugin_seconds: u64,
}

/// Where exec, attach and port-forward are served.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Streaming {
    /// The address that kubelet connects to; port 0: any free one.
    pub address: SocketAddr,
    /// Seconds without a byte after which a stream is ended.
    pub idle_seconds: u64,
    /// A PEM file with the server's certificate, for https.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls_cert_file: Option<PathBuf>,
    /// A PEM file with its key.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls_key_file: Option<PathBuf>,
}

/// Registries and layers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Images {
    /// Layers that are downloaded at the same time.
    pub parallel_layers: usize,
    /// Seconds without a byte after which a download counts as dead.
    pub progress_seconds: u64,
    /// Bytes that one layer may have when it is unpacked.
    pub max_layer_bytes: u64,
    /// Files and folders that one layer may have.
    pub max_layer_entries: u64,
    /// Bytes of memory that all pulls and loads together may take for unpacking.
    pub max_unpack_memory: u64,
    /// Images that kubelet must not collect.
    pub pinned: Vec<String>,
    /// What is special about a registry, by its host and port.
    pub registries: BTreeMap<String, Registry>,
}

/// What is special about one registry.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Registry {
    /// Plain http.
    pub http: bool,
    /// Do not check its certificate.
    pub skip_tls_verify: bool,
    /// A PEM file of further trusted certificates.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ca_file: Option<PathBuf>,
    /// URLs that are asked before the registry, in this order.
    pub mirrors: Vec<String>,
}

/// The engine of a handler.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EngineSetting {
    /// What fits this node, as the probe of KVM says.
    #[default]
    Auto,
    /// Nacelle's own VMM.
    Kvm,
    /// QEMU.
    Qemu,
    /// No guest: namespaces of the node. Never chosen by itself.
    Host,
}

impl EngineSetting {
    /// The engine that it means where `fitting` fits the node.
    pub fn or(self, fitting: EngineKind) -> EngineKind {
        match self {
            EngineSetting::Auto => fitting,
            EngineSetting::Kvm => EngineKind::Kvm,
            EngineSetting::Qemu => EngineKind::Qemu,
            EngineSetting::Host => EngineKind::Host,
        }
    }
}

/// What emptyDirs are in a machine that kubelet has on its disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EmptyDir {
    /// Shares of the node's folders.
    #[default]
    Shared,
    /// Disks of the machine's own, in files in those folders.
    Disk,
}

/// What a RuntimeClass can name: how its machines are made.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Handler {
    /// What gives a pod its kernel.
    pub engine: EngineSetting,
    /// The guest's kernel, an uncompressed vmlinux.
    pub kernel: PathBuf,
    /// The initramfs with the agent.
    pub initrd: PathBuf,
    /// Words that are added to the kernel's command line.
    pub kernel_args: Vec<String>,
    /// Virtual CPUs of a machine.
    pub vcpus: u32,
    /// Up to how many it may get while it runs; none: it keeps those that it starts with.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_vcpus: Option<u32>,
    /// Memory of a machine in MiB, beside what the pod's limits ask for.
    pub memory_mib: u64,
    /// Up to how much of it a machine may get while it runs, in MiB and all together; none: it keeps what it starts with.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_memory_mib: Option<u64>,
    /// What lies under that memory on the node: "transparent" or "hugetlb".
    pub memory_pages: MemoryPages,
    /// What the guest's kernel prints on: "serial" or "virtio".
    pub console: ConsoleKind,
    /// Size of the sparse disk for what containers write, in MiB.
    pub scratch_mib: u64,
    /// What emptyDirs are that kubelet has on its disk: "shared" or "disk".
    pub empty_dir: EmptyDir,
    /// How large they may become as disks, in MiB, where a pod does not say it; none: what is free on the node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub empty_dir_mib: Option<u64>,
    /// Annotations (`vm.nacelle.dev/...`) that a pod of this handler may carry.
    pub allowed_annotations: Vec<String>,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            default_handler: "nacelle".into(),
            paths: Paths::default(),
            sandbox: Sandbox::default(),
            jail: Jail::default(),
            network: Network::default(),
            machines: MachineSettings::default(),
            streaming: Streaming::default(),
            images: Images::default(),
            handlers: BTreeMap::new(),
        }
    }
}

impl Default for Paths {
    fn default() -> Self {
        Paths {
            root: "/var/lib/nacelle".into(),
            run: "/run/nacelle".into(),
            socket: "/run/nacelle/nacelle.sock".into(),
        }
    }
}

impl Default for Sandbox {
    fn default() -> Self {
        Sandbox {
            cgroup_driver: CgroupDriver::Cgroupfs,
            boot_seconds: 180,
            answer_seconds: 60,
            undo_seconds: 60,
            host_namespaces: HostNamespaces::Refuse,
            privileged: PrivilegedPods::Machine,
            volume_cache_seconds: 1,
            cdi_dirs: vec!["/etc/cdi".into(), "/var/run/cdi".into()],
        }
    }
}

impl Default for Network {
    fn default() -> Self {
        let net = nacelle_net::NetConfig::default();
        Network {
            cni_conf_dir: net.conf_dir,
            cni_bin_dirs: net.bin_dirs,
            netns_dir: net.netns_dir,
            plugin_seconds: net.plugin_deadline.as_secs(),
        }
    }
}

impl Default for Streaming {
    fn default() -> Self {
        Streaming {
            address: SocketAddr::from(([127, 0, 0, 1], 0)),
            idle_seconds: 14_400,
            tls_cert_file: None,
            tls_key_file: None,
        }
    }
}

impl Default for Images {
    fn default() -> Self {
        let images = nacelle_image::Config::default();
        Images {
            parallel_layers: images.parallel_layers,
            progress_seconds: images.progress_timeout_seconds,
            max_layer_bytes: images.max_layer_bytes,
            max_layer_entries: images.max_layer_entries,
            max_unpack_memory: images.max_unpack_memory,
            pinned: Vec::new(),
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
            empty_dir: EmptyDir::Shared,
            empty_dir_mib: None,
            allowed_annotations: Vec::new(),
        }
    }
}

/// Why there is no configuration.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error(transparent)]
    File(#[from] FileError),
    /// The file is no TOML, or a key or value is not one of ours. The cause names line and column.
    #[error("{path} is not a configuration of Nacelle", path = path.display())]
    Syntax {
        /// The file.
        path: PathBuf,
        /// Line, column and reason.
        source: toml::de::Error,
    },
    /// A value breaks a rule.
    #[error("{path} cannot be used", path = path.display())]
    Rule {
        /// The file.
        path: PathBuf,
        /// The key, its value and the rule.
        source: Rule,
    },
}

impl Classify for ConfigError {
    fn kind(&self) -> Kind {
        match self {
            ConfigError::File(error) => error.kind(),
            ConfigError::Syntax { .. } | ConfigError::Rule { .. } => Kind::Invalid,
        }
    }
}

impl Config {
    /// Reads and checks a file. The default file may be absent: then everything has its default.
    pub fn load(path: Option<&Path>) -> Result<Config, ConfigError> {
        let (path, needed) = match path {
            Some(path) => (path, true),
            None => (Path::new(DEFAULT_PATH), false),
        };
        let text = match std::fs::read_to_string(path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound && !needed => String::new(),
            other => other.map_err(at("read", path))?,
        };
        Config::parse(&text, path)
    }

    /// Reads and checks the text of a file; `path` is for messages.
    pub fn parse(text: &str, path: &Path) -> Result<Config, ConfigError> {
        let mut config: Config =
            toml::from_str(text).map_err(|source| ConfigError::Syntax { path: path.to_owned(), source })?;
        if config.handlers.is_empty() {
            config.handlers.insert(config.default_handler.clone(), Handler::default());
        }
        check::check(&config).map_err(|source| ConfigError::Rule { path: path.to_owned(), source })?;
        Ok(config)
    }

    /// The handler of that name, the default one for an empty name, with the name under which it stands.
    pub fn handler(&self, name: &str) -> Option<(&str, &Handler)> {
        let name = if name.is_empty() { &self.default_handler } else { name };
        self.handlers.get_key_value(name).map(|(name, handler)| (name.as_str(), handler))
    }

    /// The options of the image store.
    pub fn image_options(&self) -> nacelle_image::Config {
        let images = &self.images;
        let registry = |registry: &Registry| nacelle_image::RegistryConfig {
            http: registry.http,
            skip_tls_verify: registry.skip_tls_verify,
            ca_file: registry.ca_file.clone(),
            mirrors: registry.mirrors.clone(),
        };
        nacelle_image::Config {
            registries: images.registries.iter().map(|(host, with)| (host.clone(), registry(with))).collect(),
            parallel_layers: images.parallel_layers,
            progress_timeout_seconds: images.progress_seconds,
            max_layer_bytes: images.max_layer_bytes,
            max_layer_entries: images.max_layer_entries,
            max_unpack_memory: images.max_unpack_memory,
            pinned: images.pinned.clone(),
        }
    }

    /// The options of the streaming server.
    pub fn streaming_options(&self) -> nacelle_stream::Config {
        let streaming = &self.streaming;
        let files = streaming.tls_cert_file.clone().zip(streaming.tls_key_file.clone());
        nacelle_stream::Config {
            address: streaming.address,
            idle: Duration::from_secs(streaming.idle_seconds),
            tls: files.map(|(certificate, key)| nacelle_stream::Tls { certificate, key }),
        }
    }

    /// The options of the pod network.
    pub fn network_options(&self) -> nacelle_net::NetConfig {
        nacelle_net::NetConfig {
            conf_dir: self.network.cni_conf_dir.clone(),
            bin_dirs: self.network.cni_bin_dirs.clone(),
            cache_dir: self.paths.root.join("cni"),
            netns_dir: self.network.netns_dir.clone(),
            plugin_deadline: Duration::from_secs(self.network.plugin_seconds),
        }
    }
}

impl Paths {
    /// The folder of the image store.
    pub fn images(&self) -> PathBuf {
        self.root.join("images")
    }

    /// The state store.
    pub fn store(&self) -> PathBuf {
        self.root.join("state.redb")
    }

    /// The folder of all pods' folders: sockets, records and scratch disks.
    pub fn pods(&self) -> PathBuf {
        self.run.join("pods")
    }

    /// The folder of what machines keep that outlive their pods.
    pub fn machines(&self) -> PathBuf {
        self.root.join("machines")
    }

    /// The folder of the templates of scratch disks.
    pub fn scratch(&self) -> PathBuf {
        self.root.join("scratch")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use std::error::Error;

    fn parse(text: &str) -> Result<Config, ConfigError> {
        Config::parse(text, Path::new("c.toml"))
    }

    #[test]
    fn an_empty_file_is_complete() {
        let config = parse("").unwrap();
        assert_eq!(config.handler("").unwrap().0, "nacelle");
        assert_eq!(config.handler("nacelle").unwrap().1, &Handler::default());
        assert!(config.handler("other").is_none());
        assert_eq!(config.paths.socket, Path::new("/run/nacelle/nacelle.sock"));
    }

    #[test]
    fn an_engine_is_named_or_found() {
        let config = parse(
            "default_handler = \"a\"\n[handlers.a]\n[handlers.k]\nengine = \"kvm\"\n\
                            [handlers.q]\nengine = \"qemu\"\n[handlers.b]\nengine = \"auto\"\n",
        );
        let config = config.unwrap();
        let engine = |name, fitting| config.handler(name).unwrap().1.engine.or(fitting);
        for fitting in [EngineKind::Kvm, EngineKind::Qemu] {
            assert_eq!([engine("a", fitting), engine("b", fitting)], [fitting, fitting]);
            assert_eq!([engine("k", fitting), engine("q", fitting)], [EngineKind::Kvm, EngineKind::Qemu]);
        }
    }

    #[test]
    fn an_unknown_key_is_named_with_line_and_column() {
        for (text, place) in [
            ("default_handler = \"nacelle\"\nfoo = 1\n", "line 2, column 1"),
            ("[paths]\nroot = \"/r\"\n\n  rooot = \"/r\"\n", "line 4, column 3"),
            ("[handlers.a]\nvcpu = 1\n", "line 2, column 1"),
            ("[handlers.a]\nengine = \"bochs\"\n", "line 2, column 10"),
            ("[handlers.a]\nmemory_pages = \"2M\"\n", "line 2, column 16"),
            ("[images.registries.\"r:5000\"]\nhttps = true\n", "line 2, column 1"),
        ] {
            let error = parse(text).unwrap_err();
            assert_eq!(error.kind(), Kind::Invalid);
            let cause = error.source().unwrap().to_string();
            assert!(cause.contains(place), "{cause}");
        }
    }

    fn keys(value: &toml::Value, path: &str, into: &mut BTreeSet<String>) {
        match value {
            toml::Value::Table(table) if !table.is_empty() => {
                for (key, value) in table {
                    let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                    keys(value, &path, into);
                }
            }
            _ => {
                into.insert(path.to_owned());
            }
        }
    }

    #[test]
    fn the_documentation_names_every_key_and_no_other() {
        let mut example = Config::default();
        example.handlers.insert(
            "NAME".into(),
            Handler { max_vcpus: Some(2), max_memory_mib: Some(512), empty_dir_mib: Some(64), ..Handler::default() },
        );
        let registry = Registry { ca_file: Some("/ca.pem".into()), ..Registry::default() };
        example.images.registries.insert("HOST".into(), registry);
        example.streaming.tls_cert_file = Some("/cert.pem".into());
        example.streaming.tls_key_file = Some("/key.pem".into());
        let mut ours = BTreeSet::new();
        keys(&toml::Value::try_from(&example).unwrap(), "", &mut ours);

        let page = include_str!("../../../../docs/reference/configuration.md");
        let documented: BTreeSet<String> = page
            .lines()
            .filter_map(|line| line.strip_prefix("| `")?.split_once('`'))
            .map(|(key, _)| key.to_owned())
            .collect();
        assert_eq!(ours, documented);
    }

    #[test]
    fn the_packages_file_says_every_default_and_changes_none() {
        let page = include_str!("../../../../ci/package.d/config.toml");
        let none = parse("").unwrap();
        assert_eq!(parse(page).unwrap(), none);
        let key = |line: &str| {
            line.strip_prefix('#').filter(|rest| rest.starts_with(|c: char| c.is_ascii_lowercase())).map(str::to_owned)
        };
        let said: String = page.lines().map(|line| key(line).unwrap_or_else(|| line.to_owned()) + "\n").collect();
        assert_eq!(parse(&said).unwrap(), none);
        let of = |value: &toml::Value| {
            let mut into = BTreeSet::new();
            keys(value, "", &mut into);
            into
        };
        let all = of(&toml::Value::try_from(&none).unwrap());
        let missing: Vec<_> = all.difference(&of(&toml::from_str(&said).unwrap())).cloned().collect();
        // It has none, and the file an example.
        assert_eq!(missing, ["images.registries"]);
    }

    #[test]
    fn the_examples_in_the_documentation_are_valid() {
        let page = include_str!("../../../../docs/reference/configuration.md");
        let mut count = 0;
        for block in page.split("```toml\n").skip(1) {
            parse(block.split("```").next().unwrap()).unwrap();
            count += 1;
        }
        assert!(count > 0);
    }
}
