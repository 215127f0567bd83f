//! Checks the configuration: the range of each value, and the rules between values.

use super::{
    Config, Handler, ImageSettings, JailSettings, NetworkSettings, PathSettings, RegistrySettings, SandboxSettings,
    StreamingSettings, duration,
};
use crate::metrics::address::MetricsAddress;
use nacelle_engine::MAX_VCPUS;
use nacelle_model::empty_dir::{MAX_QUOTA, MIN_QUOTA};
use std::ops::RangeInclusive;
use std::path::Path;
use std::time::Duration;

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

/// The maximum length in bytes of the path of a pod's directory `jail`, which contains its sockets.
const MAX_JAIL_PATH: usize = 87;

/// A value that breaks a rule.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{key} = {value}: {rule}")]
pub struct BrokenRule {
    /// The key, with its sections.
    pub key: String,
    /// The value.
    pub value: String,
    /// The rule.
    pub rule: &'static str,
}

fn broken(key: impl Into<String>, value: impl std::fmt::Debug, rule: &'static str) -> BrokenRule {
    BrokenRule { key: key.into(), value: format!("{value:?}"), rule }
}

fn in_range<T: PartialOrd + std::fmt::Debug>(
    key: impl Into<String>,
    value: T,
    range: RangeInclusive<T>,
    rule: &'static str,
) -> Result<(), BrokenRule> {
    if range.contains(&value) { Ok(()) } else { Err(broken(key, value, rule)) }
}

fn absolute(key: impl Into<String>, path: &Path) -> Result<(), BrokenRule> {
    if path.is_absolute() { Ok(()) } else { Err(broken(key, path, "the path must be absolute")) }
}

/// Checks a duration in seconds; `rule` names the range with units.
fn duration_in_range(
    key: &str,
    value: Duration,
    seconds: RangeInclusive<u64>,
    rule: &'static str,
) -> Result<(), BrokenRule> {
    let range = Duration::from_secs(*seconds.start())..=Duration::from_secs(*seconds.end());
    if range.contains(&value) { Ok(()) } else { Err(broken(key, duration::format(value), rule)) }
}

/// Returns whether a RuntimeClass can name this handler: the name must be a DNS label.
fn is_handler_name(name: &str) -> bool {
    let ok = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    (1..=63).contains(&name.len()) && name.bytes().all(ok) && !name.starts_with('-') && !name.ends_with('-')
}

/// Checks the range of every value and the rules between values, and returns the first rule that is broken.
pub(super) fn check(config: &Config) -> Result<(), BrokenRule> {
    if !config.handlers.contains_key(&config.default_handler) {
        return Err(broken("default_handler", &config.default_handler, "there is no [handlers.…] of this name"));
    }
    check_paths(&config.paths)?;
    check_network(&config.network)?;
    check_sandbox(&config.sandbox)?;
    check_jail(&config.jail)?;
    check_streaming(&config.streaming)?;
    if let Some(MetricsAddress::Unix(path)) = &config.metrics.address {
        check_socket("metrics.address", path)?;
    }
    absolute("machines.efi_code", &config.machines.efi_code)?;
    absolute("machines.efi_variables", &config.machines.efi_variables)?;
    absolute("machines.efi_secure_code", &config.machines.efi_secure_code)?;
    absolute("machines.efi_secure_variables", &config.machines.efi_secure_variables)?;
    check_images(&config.images)?;
    config.handlers.iter().try_for_each(|(name, handler)| check_handler(name, handler))
}

fn check_socket(key: &str, path: &Path) -> Result<(), BrokenRule> {
    absolute(key, path)?;
    let rule = "the path of a Unix socket has at most 107 bytes";
    if path.as_os_str().len() > 107 { Err(broken(key, path, rule)) } else { Ok(()) }
}

fn check_paths(paths: &PathSettings) -> Result<(), BrokenRule> {
    for (key, path) in [("paths.root", &paths.root), ("paths.run", &paths.run), ("paths.socket", &paths.socket)] {
        absolute(key, path)?;
    }
    check_socket("paths.socket", &paths.socket)?;
    // The name of a pod's directory has 13 characters; docs/contributor/pod-process.md explains the limit of its path.
    if paths.pods().as_os_str().len() + "/0123456789abc/jail".len() > MAX_JAIL_PATH {
        let rule = "the path has at most 63 bytes, because the paths of pods' Unix sockets begin with it";
        return Err(broken("paths.run", &paths.run, rule));
    }
    Ok(())
}

fn check_network(network: &NetworkSettings) -> Result<(), BrokenRule> {
    absolute("network.cni_conf_dir", &network.cni_conf_dir)?;
    absolute("network.netns_dir", &network.netns_dir)?;
    for dir in &network.cni_bin_dirs {
        absolute("network.cni_bin_dirs", dir)?;
    }
    duration_in_range("network.plugin_timeout", network.plugin_timeout, 1..=3600, "1s to 1h are allowed")?;
    if network.gc_interval.is_zero() {
        return Ok(());
    }
    let rule = "1m to 24h are allowed, and 0s for only at the daemon's start";
    duration_in_range("network.gc_interval", network.gc_interval, 60..=86_400, rule)
}

fn check_sandbox(sandbox: &SandboxSettings) -> Result<(), BrokenRule> {
    for dir in &sandbox.cdi_dirs {
        absolute("sandbox.cdi_dirs", dir)?;
    }
    for (key, value) in [
        ("sandbox.boot_timeout", sandbox.boot_timeout),
        ("sandbox.pod_request_timeout", sandbox.pod_request_timeout),
        ("sandbox.teardown_timeout", sandbox.teardown_timeout),
    ] {
        duration_in_range(key, value, 1..=3600, "1s to 1h are allowed")?;
    }
    let (key, ttl) = ("sandbox.volume_cache_ttl", sandbox.volume_cache_ttl);
    duration_in_range(key, ttl, 0..=3600, "0s to 1h are allowed")?;
    // The guest's file system receives it in seconds.
    if ttl.subsec_nanos() == 0 { Ok(()) } else { Err(broken(key, duration::format(ttl), "whole seconds are needed")) }
}

fn check_jail(jail: &JailSettings) -> Result<(), BrokenRule> {
    let rule = "65536 to 4294967294 are allowed: lower ids belong to users of the node, and higher ones do not exist";
    if jail.user_count > 0 {
        in_range("jail.first_user", jail.first_user, FIRST_USER..=LAST_USER, rule)?;
    }
    if jail.user_count == 1 {
        let rule =
            "0 or at least 2 are allowed: image workers have the first id, and each pod process one of the others";
        return Err(broken("jail.user_count", jail.user_count, rule));
    }
    let rule = "the last id of the range is above 4294967294; choose a lower first_user or a smaller user_count";
    match jail.user_count <= LAST_USER - jail.first_user.min(LAST_USER) + 1 {
        true => Ok(()),
        false => Err(broken("jail.user_count", jail.user_count, rule)),
    }
}

fn check_streaming(streaming: &StreamingSettings) -> Result<(), BrokenRule> {
    let rule = "1s to 168h (7 days) are allowed";
    duration_in_range("streaming.idle_timeout", streaming.idle_timeout, 1..=604_800, rule)?;
    let (cert, key) = (&streaming.tls_cert_file, &streaming.tls_key_file);
    for (name, file, other) in [("tls_cert_file", cert, key), ("tls_key_file", key, cert)] {
        match file {
            Some(file) => absolute(format!("streaming.{name}"), file)?,
            None if other.is_some() => {
                return Err(broken(format!("streaming.{name}"), "", "set the certificate and the key, or neither"));
            }
            None => {}
        }
    }
    Ok(())
}

fn check_images(images: &ImageSettings) -> Result<(), BrokenRule> {
    in_range("images.parallel_layers", images.parallel_layers, 1..=64, "1 to 64 are allowed")?;
    duration_in_range("images.progress_timeout", images.progress_timeout, 1..=3600, "1s to 1h are allowed")?;
    if !images.verify_interval.is_zero() {
        let rule = "1h to 8760h are allowed, and 0s for never";
        duration_in_range("images.verify_interval", images.verify_interval, 3600..=31_536_000, rule)?;
    }
    let rule = "402653184 bytes (384 MiB) or more are needed";
    in_range("images.max_unpack_memory", images.max_unpack_memory, 384 << 20..=u64::MAX, rule)?;
    images.hosts_dir.as_deref().map_or(Ok(()), |directory| absolute("images.hosts_dir", directory))?;
    // The value may contain a password and is left out of the message.
    images.proxy(|_| None).check().map_err(|(scheme, rule)| broken(format!("images.{scheme}_proxy"), "…", rule))?;
    for (host, registry) in &images.registries {
        let key = |key: &str| format!("images.registries.{host}.{key}");
        let files = [("client_cert_file", &registry.client_cert_file), ("client_key_file", &registry.client_key_file)];
        for (name, file) in
            files.into_iter().chain([("ca_file", &registry.ca_file), ("auth_file", &registry.auth_file)])
        {
            file.as_deref().map_or(Ok(()), |file| absolute(key(name), file))?;
        }
        if let [(name, None), (_, Some(_))] | [(_, Some(_)), (name, None)] = files {
            return Err(broken(key(name), "", "set the client certificate and its key, or neither"));
        }
        if registry.http && registry.client_cert_file.is_some() {
            return Err(broken(key("client_cert_file"), host, "a client certificate needs https; remove http = true"));
        }
        let only_mirrors = RegistrySettings { mirrors: registry.mirrors.clone(), ..RegistrySettings::default() };
        if host == nacelle_image::DEFAULT_REGISTRY && *registry != only_mirrors {
            let rule = "the default entry has only mirrors; write other settings under the host that they are for";
            return Err(broken("images.registries", host, rule));
        }
        let is_url = |mirror: &str| mirror.starts_with("http://") || mirror.starts_with("https://");
        if registry.mirrors.iter().any(|mirror| mirror.contains('@')) {
            let rule = "the URL of a mirror has no credentials; write them into auth_file of the mirror's own entry";
            return Err(broken(key("mirrors"), "…", rule));
        }
        if let Some(mirror) = registry.mirrors.iter().find(|mirror| !is_url(mirror)) {
            return Err(broken(key("mirrors"), mirror, "a mirror is a URL (https://… or http://…)"));
        }
    }
    Ok(())
}

fn check_handler(name: &str, handler: &Handler) -> Result<(), BrokenRule> {
    let key = |key: &str| format!("handlers.{name}.{key}");
    if !is_handler_name(name) {
        return Err(broken("handlers", name, "a handler's name has 1 to 63 characters from a-z0-9-"));
    }
    absolute(key("kernel"), &handler.kernel)?;
    absolute(key("initrd"), &handler.initrd)?;
    in_range(key("vcpus"), handler.vcpus, 1..=MAX_VCPUS.into(), "1 to 64 are allowed")?;
    if let Some(max) = handler.max_vcpus {
        let range = handler.vcpus..=u32::from(MAX_VCPUS);
        in_range(key("max_vcpus"), max, range, "the value of vcpus to 64 is allowed")?;
    }
    let memory = MIN_MEMORY_MIB..=MAX_MEMORY_MIB;
    in_range(key("memory_mib"), handler.memory_mib, memory, "64 MiB to 16 TiB are allowed")?;
    if let Some(max) = handler.max_memory_mib {
        let range = handler.memory_mib..=MAX_MEMORY_MIB;
        in_range(key("max_memory_mib"), max, range, "the value of memory_mib to 16 TiB is allowed")?;
    }
    let scratch = MIN_SCRATCH_MIB..=MAX_MEMORY_MIB;
    in_range(key("scratch_mib"), handler.scratch_mib, scratch, "64 MiB to 16 TiB are allowed")?;
    if let Some(limits) = &handler.disk_limits {
        for (limit, value) in [
            ("read_bytes_per_second", limits.read_bytes_per_second),
            ("write_bytes_per_second", limits.write_bytes_per_second),
            ("reads_per_second", limits.reads_per_second),
            ("writes_per_second", limits.writes_per_second),
        ] {
            if let Some(value) = value {
                let range = 1..=MAX_DISK_RATE;
                in_range(key(&format!("disk_limits.{limit}")), value, range, "1 to 10^15 are allowed")?;
            }
        }
    }
    if let Some(mib) = handler.empty_dir_mib {
        let range = MIN_QUOTA >> 20..=MAX_QUOTA >> 20;
        in_range(key("empty_dir_mib"), mib, range, "16 MiB to 4 TiB are allowed")?;
    }
    Ok(())
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
            ("[metrics]\naddress = \"unix:metrics.sock\"", "metrics.address"),
            (&format!("[metrics]\naddress = \"unix:/{}\"", "s".repeat(107)), "metrics.address"),
            ("[streaming]\nidle_timeout = \"0s\"", "streaming.idle_timeout"),
            ("[streaming]\nidle_timeout = \"169h\"", "streaming.idle_timeout"),
            ("[streaming]\ntls_cert_file = \"c\"\ntls_key_file = \"/k\"", "streaming.tls_cert_file"),
            ("[streaming]\ntls_cert_file = \"/c\"", "streaming.tls_key_file"),
            ("[images]\nparallel_layers = 0", "images.parallel_layers"),
            ("[images]\nmax_unpack_memory = 1000000", "images.max_unpack_memory"),
            ("[images.registries.r]\nmirrors = [\"m:5000\"]", "images.registries.r.mirrors"),
            ("[images]\nhttps_proxy = \"socks5://h:1\"", "images.https_proxy"),
            ("[images]\nhosts_dir = \"certs.d\"", "images.hosts_dir"),
            ("[images.registries._default]\nhttp = true", "images.registries"),
            ("[images.registries.r]\nmirrors = [\"https://u:p@m\"]", "images.registries.r.mirrors"),
            (
                "[images.registries.r]\nhttp = true\nclient_cert_file = \"/c\"\nclient_key_file = \"/k\"",
                "images.registries.r.client_cert_file",
            ),
            ("[images.registries.r]\nauth_file = \"c\"", "images.registries.r.auth_file"),
            ("[images.registries.r]\nca_file = \"c\"", "images.registries.r.ca_file"),
            ("[images.registries.r]\nclient_cert_file = \"/c\"", "images.registries.r.client_key_file"),
            ("[images.registries.r]\nclient_key_file = \"/k\"", "images.registries.r.client_cert_file"),
            ("default_handler = \"A\"\n[handlers.A]", "handlers"),
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
                Err(super::super::ConfigError::Rule { source, .. }) => assert_eq!(source.key, key, "{text}"),
                other => panic!("{text}: {other:?}"),
            }
        }
    }
}
