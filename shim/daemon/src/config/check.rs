//! Checks the configuration: the range of each value, and the rules between values.

use super::key::KeyPath;
use super::problem::ConfigProblem;
use super::syntax::TextPosition;
use super::{
    Config, Handler, ImageSettings, JailSettings, NetworkSettings, PathSettings, RegistrySettings, SandboxSettings,
    StreamingSettings, duration,
};
use crate::metrics::address::MetricsAddress;
use nacelle_engine::MAX_VCPUS;
use nacelle_model::empty_dir::{MAX_QUOTA, MIN_QUOTA};
use nacelle_vmi::annotations;
use std::borrow::Cow;
use std::fmt::Debug;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The longest path of a Unix socket in bytes: 107 (unix(7)) without what its name has until the daemon accepts connections.
const MAX_SOCKET_PATH: usize = 104;

/// The memory of the smallest VM that boots the guest.
const MIN_MEMORY_MIB: u64 = 64;
/// The largest memory of a VM, far above any node's, which rejects mistyped values.
const MAX_MEMORY_MIB: u64 = 16 << 20;
/// The smallest scratch disk: it must hold an ext4 with a journal.
const MIN_SCRATCH_MIB: u64 = 64;

/// The largest rate of a disk, far above any disk's, which the kernel's numbers hold.
const MAX_DISK_RATE: u64 = 1_000_000_000_000_000;

/// The lowest id of a pod process: above all ids of users and system services.
const FIRST_USER: u32 = 1 << 16;
/// The highest user id: the number above it means "unchanged" (setresuid(2)).
const LAST_USER: u32 = u32::MAX - 1;

/// The scale of a sampling rate.
const MILLION: u32 = 1_000_000;

/// The maximum length in bytes of the path of a pod's directory `jail`, which contains its sockets.
const MAX_JAIL_PATH: usize = 87;

/// A value that breaks a rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct BrokenRule {
    /// The key.
    pub(super) key: KeyPath,
    /// The value; `None` if there is none, or if it may be secret.
    value: Option<String>,
    rule: Cow<'static, str>,
}

impl BrokenRule {
    pub(super) fn new(key: impl Into<KeyPath>, value: impl Debug, rule: impl Into<Cow<'static, str>>) -> BrokenRule {
        BrokenRule { key: key.into(), value: Some(format!("{value:?}")), rule: rule.into() }
    }

    /// Describes a rule about a key that has no value, or one that must not be shown.
    fn without_value(key: impl Into<KeyPath>, rule: impl Into<Cow<'static, str>>) -> BrokenRule {
        BrokenRule { key: key.into(), value: None, rule: rule.into() }
    }

    pub(super) fn into_problem(self, position: Option<TextPosition>) -> ConfigProblem {
        let problem = ConfigProblem::new(position, Some(&self.key), self.rule.into_owned());
        ConfigProblem { value: self.value, ..problem }
    }
}

/// The rules that are broken so far.
#[derive(Default)]
struct Checker(Vec<BrokenRule>);

impl Checker {
    fn reject(&mut self, key: impl Into<KeyPath>, value: impl Debug, rule: &'static str) {
        self.0.push(BrokenRule::new(key, value, rule));
    }

    fn reject_without_value(&mut self, key: impl Into<KeyPath>, rule: &'static str) {
        self.0.push(BrokenRule::without_value(key, rule));
    }

    fn in_range<T: PartialOrd + Debug>(
        &mut self,
        key: impl Into<KeyPath>,
        value: T,
        range: RangeInclusive<T>,
        rule: &'static str,
    ) {
        if !range.contains(&value) {
            self.reject(key, value, rule);
        }
    }

    fn absolute(&mut self, key: impl Into<KeyPath>, path: &Path) {
        if !path.is_absolute() {
            self.reject(key, path, "the path must be absolute");
        }
    }

    /// Checks a duration in seconds; `rule` names the range with units.
    fn duration(&mut self, key: &str, value: Duration, seconds: RangeInclusive<u64>, rule: &'static str) {
        let range = Duration::from_secs(*seconds.start())..=Duration::from_secs(*seconds.end());
        if !range.contains(&value) {
            self.reject(key, duration::format(value), rule);
        }
    }
}

/// Returns whether a RuntimeClass can name this handler: the name must be a DNS label.
fn is_handler_name(name: &str) -> bool {
    let ok = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    (1..=63).contains(&name.len()) && name.bytes().all(ok) && !name.starts_with('-') && !name.ends_with('-')
}

/// Returns whether pods can have this annotation.
fn is_annotation(name: &str) -> bool {
    let short = name.strip_prefix(annotations::PREFIX);
    short.is_some_and(|short| annotations::ALL.iter().any(|(known, _)| *known == short))
}

/// Checks the range of every value and the rules between values, and returns the rules that are broken.
pub(super) fn check(config: &Config) -> Vec<BrokenRule> {
    let mut checker = Checker::default();
    if !config.handlers.contains_key(&config.default_handler) {
        checker.reject("default_handler", &config.default_handler, "there is no [handlers.…] of this name");
    }
    checker.check_paths(&config.paths);
    checker.check_network(&config.network);
    checker.check_sandbox(&config.sandbox);
    checker.check_jail(&config.jail);
    checker.check_streaming(&config.streaming);
    if let Some(MetricsAddress::Unix(path)) = &config.metrics.address {
        checker.check_socket("metrics.address", path);
        if *path == config.paths.socket {
            checker.reject("metrics.address", path, "paths.socket has this path; use another one");
        }
    }
    if config.tracing.sampling_rate_per_million > MILLION {
        let rate = config.tracing.sampling_rate_per_million;
        checker.reject("tracing.sampling_rate_per_million", rate, "0 to 1000000 is allowed");
    }
    checker.absolute("machines.efi_code", &config.machines.efi_code);
    checker.absolute("machines.efi_variables", &config.machines.efi_variables);
    checker.absolute("machines.efi_secure_code", &config.machines.efi_secure_code);
    checker.absolute("machines.efi_secure_variables", &config.machines.efi_secure_variables);
    checker.check_images(&config.images);
    for (host, registry) in &config.images.registries {
        checker.check_registry(host, registry);
    }
    for (name, handler) in &config.handlers {
        checker.check_handler(name, handler);
    }
    checker.0
}

impl Checker {
    fn check_socket(&mut self, key: &str, path: &Path) {
        self.absolute(key, path);
        if path.as_os_str().len() > MAX_SOCKET_PATH {
            self.reject(key, path, "the path of a Unix socket has at most 104 bytes");
        }
    }

    fn check_paths(&mut self, paths: &PathSettings) {
        for (key, path) in [("paths.root", &paths.root), ("paths.run", &paths.run)] {
            self.absolute(key, path);
        }
        self.check_socket("paths.socket", &paths.socket);
        // The name of a pod's directory has 13 characters; docs/contributor/pod-process.md explains the limit of its path.
        if paths.pods().as_os_str().len() + "/0123456789abc/jail".len() > MAX_JAIL_PATH {
            let rule = "the path has at most 63 bytes, because the paths of pods' Unix sockets begin with it";
            self.reject("paths.run", &paths.run, rule);
        }
    }

    fn check_network(&mut self, network: &NetworkSettings) {
        self.absolute("network.cni_conf_dir", &network.cni_conf_dir);
        self.absolute("network.netns_dir", &network.netns_dir);
        for dir in &network.cni_bin_dirs {
            self.absolute("network.cni_bin_dirs", dir);
        }
        self.duration("network.plugin_timeout", network.plugin_timeout, 1..=3600, "1s to 1h are allowed");
        if !network.gc_interval.is_zero() {
            let rule = "1m to 24h are allowed, and 0s for only at the daemon's start";
            self.duration("network.gc_interval", network.gc_interval, 60..=86_400, rule);
        }
    }

    fn check_sandbox(&mut self, sandbox: &SandboxSettings) {
        for dir in &sandbox.cdi_dirs {
            self.absolute("sandbox.cdi_dirs", dir);
        }
        for (key, value) in [
            ("sandbox.boot_timeout", sandbox.boot_timeout),
            ("sandbox.pod_request_timeout", sandbox.pod_request_timeout),
            ("sandbox.teardown_timeout", sandbox.teardown_timeout),
        ] {
            self.duration(key, value, 1..=3600, "1s to 1h are allowed");
        }
        let (key, ttl) = ("sandbox.volume_cache_ttl", sandbox.volume_cache_ttl);
        // The guest's file system receives it in seconds.
        match ttl.subsec_nanos() {
            0 => self.duration(key, ttl, 0..=3600, "0s to 1h are allowed"),
            _ => self.reject(key, duration::format(ttl), "whole seconds are needed, 0s to 1h"),
        }
    }

    fn check_jail(&mut self, jail: &JailSettings) {
        let rule =
            "65536 to 4294967294 are allowed: lower ids belong to users of the node, and higher ones do not exist";
        if jail.user_count > 0 && !(FIRST_USER..=LAST_USER).contains(&jail.first_user) {
            return self.reject("jail.first_user", jail.first_user, rule);
        }
        if jail.user_count == 1 {
            let rule =
                "0 or at least 2 are allowed: image workers have the first id, and each pod process one of the others";
            self.reject("jail.user_count", jail.user_count, rule);
        }
        if jail.user_count > LAST_USER - jail.first_user.min(LAST_USER) + 1 {
            let rule =
                "the last id of the range is above 4294967294; choose a lower first_user or a smaller user_count";
            self.reject("jail.user_count", jail.user_count, rule);
        }
    }

    fn check_streaming(&mut self, streaming: &StreamingSettings) {
        let rule = "1s to 168h (7 days) are allowed";
        self.duration("streaming.idle_timeout", streaming.idle_timeout, 1..=604_800, rule);
        let files = [("tls_cert_file", &streaming.tls_cert_file), ("tls_key_file", &streaming.tls_key_file)];
        self.check_pair(&KeyPath::from("streaming"), files, "set the certificate and the key, or neither");
    }

    /// Checks two files that need each other.
    fn check_pair(&mut self, section: &KeyPath, files: [(&str, &Option<PathBuf>); 2], rule: &'static str) {
        for (name, file) in files {
            if let Some(file) = file {
                self.absolute(section.child(name), file);
            }
        }
        if let [(name, None), (_, Some(_))] | [(_, Some(_)), (name, None)] = files {
            self.reject_without_value(section.child(name), rule);
        }
    }

    fn check_images(&mut self, images: &ImageSettings) {
        self.in_range("images.parallel_layers", images.parallel_layers, 1..=64, "1 to 64 are allowed");
        self.duration("images.progress_timeout", images.progress_timeout, 1..=3600, "1s to 1h are allowed");
        if !images.verify_interval.is_zero() {
            let rule = "1h to 8760h are allowed, and 0s for never";
            self.duration("images.verify_interval", images.verify_interval, 3600..=31_536_000, rule);
        }
        let rule = "402653184 bytes (384 MiB) or more are needed";
        self.in_range("images.max_unpack_memory", images.max_unpack_memory, 384 << 20..=u64::MAX, rule);
        if let Some(directory) = &images.hosts_dir {
            self.absolute("images.hosts_dir", directory);
        }
        // The value may contain a password.
        if let Err((scheme, rule)) = images.proxy(|_| None).check() {
            self.reject_without_value(format!("images.{scheme}_proxy").as_str(), rule);
        }
    }

    fn check_registry(&mut self, host: &str, registry: &RegistrySettings) {
        let section = KeyPath::from("images.registries").child(host);
        if host == nacelle_image::DEFAULT_REGISTRY {
            let only_mirrors = RegistrySettings { mirrors: registry.mirrors.clone(), ..RegistrySettings::default() };
            if *registry != only_mirrors {
                let rule = "the default entry has only mirrors; write other settings under the host that they are for";
                return self.reject_without_value(section, rule);
            }
        } else if !nacelle_image::is_registry_host(host) {
            let rule = "the key is a host with an optional port, such as \"docker.io\" or \"registry.local:5000\"";
            return self.reject_without_value(section, rule);
        }
        for (name, file) in [("ca_file", &registry.ca_file), ("auth_file", &registry.auth_file)] {
            if let Some(file) = file {
                self.absolute(section.child(name), file);
            }
        }
        let files = [("client_cert_file", &registry.client_cert_file), ("client_key_file", &registry.client_key_file)];
        self.check_pair(&section, files, "set the client certificate and its key, or neither");
        if registry.http && registry.client_cert_file.is_some() {
            let rule = "a client certificate needs https; remove http = true";
            self.reject_without_value(section.child("client_cert_file"), rule);
        }
        let is_url = |mirror: &str| mirror.starts_with("http://") || mirror.starts_with("https://");
        if registry.mirrors.iter().any(|mirror| mirror.contains('@')) {
            let rule = "the URL of a mirror has no credentials; write them into auth_file of the mirror's own entry";
            self.reject_without_value(section.child("mirrors"), rule);
        } else if let Some(mirror) = registry.mirrors.iter().find(|mirror| !is_url(mirror)) {
            self.reject(section.child("mirrors"), mirror, "a mirror is a URL (https://… or http://…)");
        }
    }

    fn check_handler(&mut self, name: &str, handler: &Handler) {
        let section = KeyPath::from("handlers").child(name);
        if !is_handler_name(name) {
            return self.reject_without_value(section, "a handler's name has 1 to 63 characters from a-z0-9-");
        }
        let key = |key: &str| section.child(key);
        self.absolute(key("kernel"), &handler.kernel);
        self.absolute(key("initrd"), &handler.initrd);
        self.in_range(key("vcpus"), handler.vcpus, 1..=MAX_VCPUS.into(), "1 to 64 are allowed");
        if let Some(max) = handler.max_vcpus {
            let range = handler.vcpus..=u32::from(MAX_VCPUS);
            self.in_range(key("max_vcpus"), max, range, "the value of vcpus to 64 is allowed");
        }
        let memory = MIN_MEMORY_MIB..=MAX_MEMORY_MIB;
        self.in_range(key("memory_mib"), handler.memory_mib, memory, "64 MiB to 16 TiB are allowed");
        if let Some(max) = handler.max_memory_mib {
            let range = handler.memory_mib..=MAX_MEMORY_MIB;
            self.in_range(key("max_memory_mib"), max, range, "the value of memory_mib to 16 TiB is allowed");
        }
        let scratch = MIN_SCRATCH_MIB..=MAX_MEMORY_MIB;
        self.in_range(key("scratch_mib"), handler.scratch_mib, scratch, "64 MiB to 16 TiB are allowed");
        if let Some(limits) = &handler.disk_limits {
            for (limit, value) in [
                ("read_bytes_per_second", limits.read_bytes_per_second),
                ("write_bytes_per_second", limits.write_bytes_per_second),
                ("reads_per_second", limits.reads_per_second),
                ("writes_per_second", limits.writes_per_second),
            ] {
                let range = 1..=MAX_DISK_RATE;
                if let Some(value) = value {
                    self.in_range(key("disk_limits").child(limit), value, range, "1 to 10^15 are allowed");
                }
            }
        }
        if let Some(mib) = handler.empty_dir_mib {
            let range = MIN_QUOTA >> 20..=MAX_QUOTA >> 20;
            self.in_range(key("empty_dir_mib"), mib, range, "16 MiB to 4 TiB are allowed");
        }
        for annotation in handler.allowed_annotations.iter().filter(|name| !is_annotation(name)) {
            let rule = "there is no such annotation; docs/reference/vm-annotations.md lists them";
            self.reject(key("allowed_annotations"), annotation, rule);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rule_names_key_value_and_what_is_allowed() {
        for (text, key) in [
            ("default_handler = \"x\"\n[handlers.y]", "default_handler"),
            ("[paths]\nroot = \"r\"", "paths.root"),
            (&format!("[paths]\nsocket = \"/{}\"", "s".repeat(107)), "paths.socket"),
            (&format!("[paths]\nrun = \"/{}\"", "s".repeat(90)), "paths.run"),
            ("[network]\ncni_conf_dir = \"x\"", "network.cni_conf_dir"),
            ("[network]\ncni_bin_dirs = [\"/x\", \"y\"]", "network.cni_bin_dirs"),
            ("[sandbox]\nboot_timeout = \"0s\"", "sandbox.boot_timeout"),
            ("[sandbox]\npod_request_timeout = \"999ms\"", "sandbox.pod_request_timeout"),
            ("[sandbox]\nteardown_timeout = \"1h1ms\"", "sandbox.teardown_timeout"),
            ("[sandbox]\nvolume_cache_ttl = \"1500ms\"", "sandbox.volume_cache_ttl"),
            ("[sandbox]\nvolume_cache_ttl = \"3601s\"", "sandbox.volume_cache_ttl"),
            ("[network]\nplugin_timeout = \"2h\"", "network.plugin_timeout"),
            ("[network]\ngc_interval = \"59s\"", "network.gc_interval"),
            ("[images]\nprogress_timeout = \"0s\"", "images.progress_timeout"),
            ("[images]\nverify_interval = \"59m\"", "images.verify_interval"),
            ("[images]\nverify_interval = \"8761h\"", "images.verify_interval"),
            ("[streaming]\nidle_timeout = \"0s\"", "streaming.idle_timeout"),
            ("[streaming]\nidle_timeout = \"169h\"", "streaming.idle_timeout"),
            ("[streaming]\ntls_cert_file = \"c\"\ntls_key_file = \"/k\"", "streaming.tls_cert_file"),
            ("[streaming]\ntls_cert_file = \"/c\"", "streaming.tls_key_file"),
            ("[images]\nparallel_layers = 0", "images.parallel_layers"),
            ("[images]\nmax_unpack_memory = 1000000", "images.max_unpack_memory"),
            ("[images.registries.r]\nmirrors = [\"m:5000\"]", "images.registries.r.mirrors"),
            ("[images]\nhttps_proxy = \"socks5://h:1\"", "images.https_proxy"),
            ("[images]\nhosts_dir = \"certs.d\"", "images.hosts_dir"),
            ("[images.registries._default]\nhttp = true", "images.registries._default"),
            ("[images.registries.\"https://docker.io/\"]\nhttp = true", "images.registries.\"https://docker.io/\""),
            ("[images.registries.r]\nmirrors = [\"https://u:p@m\"]", "images.registries.r.mirrors"),
            (
                "[images.registries.r]\nhttp = true\nclient_cert_file = \"/c\"\nclient_key_file = \"/k\"",
                "images.registries.r.client_cert_file",
            ),
            ("[images.registries.r]\nauth_file = \"c\"", "images.registries.r.auth_file"),
            ("[images.registries.r]\nca_file = \"c\"", "images.registries.r.ca_file"),
            ("[images.registries.r]\nclient_cert_file = \"/c\"", "images.registries.r.client_key_file"),
            ("[images.registries.r]\nclient_key_file = \"/k\"", "images.registries.r.client_cert_file"),
            ("default_handler = \"A\"\n[handlers.A]", "handlers.A"),
            (
                "[handlers.nacelle]\nallowed_annotations = [\"vm.nacelle.dev/spek\"]",
                "handlers.nacelle.allowed_annotations",
            ),
            ("[handlers.nacelle]\nkernel = \"vmlinux\"", "handlers.nacelle.kernel"),
            ("[handlers.nacelle]\nvcpus = 0", "handlers.nacelle.vcpus"),
            ("[handlers.nacelle]\nmax_vcpus = 65", "handlers.nacelle.max_vcpus"),
            ("[handlers.nacelle]\nvcpus = 3\nmax_vcpus = 2", "handlers.nacelle.max_vcpus"),
            ("[handlers.nacelle]\nmemory_mib = 63", "handlers.nacelle.memory_mib"),
            ("[handlers.nacelle]\nmax_memory_mib = 255", "handlers.nacelle.max_memory_mib"),
            ("[handlers.nacelle]\nmax_memory_mib = 16777217", "handlers.nacelle.max_memory_mib"),
            ("[handlers.nacelle]\nscratch_mib = 1", "handlers.nacelle.scratch_mib"),
            ("[handlers.nacelle]\nempty_dir_mib = 15", "handlers.nacelle.empty_dir_mib"),
            ("[handlers.nacelle.disk_limits]\nreads_per_second = 0", "handlers.nacelle.disk_limits.reads_per_second"),
        ] {
            match Config::parse(text, Path::new("c.toml")) {
                Err(super::super::ConfigError::Invalid { source, .. }) => {
                    let keys: Vec<_> = source.list().iter().filter_map(|problem| problem.key.as_deref()).collect();
                    assert_eq!(keys, [key], "{text}: {source}");
                }
                other => panic!("{text}: {other:?}"),
            }
        }
    }
}
