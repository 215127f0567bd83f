//! Checks the configuration: the range of each value, and the rules between values.

use super::Config;
use nacelle_engine::MAX_VCPUS;
use nacelle_model::empty_dir::{MAX_QUOTA, MIN_QUOTA};
use std::path::Path;

/// The memory of the smallest VM that boots the guest.
const MIN_MEMORY_MIB: u64 = 64;
/// The largest memory of a VM, far above any node's, which rejects mistyped values.
const MAX_MEMORY_MIB: u64 = 16 << 20;
/// The smallest scratch disk: it must hold an ext4 with a journal.
const MIN_SCRATCH_MIB: u64 = 64;

/// The longest path in bytes of the sockets' directory in a pod's run directory.
const POD_DIR: usize = 87;

/// A value that breaks a rule.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{key} = {value}: {rule}")]
pub struct Rule {
    /// The key, with its sections.
    pub key: String,
    /// The value.
    pub value: String,
    /// The rule.
    pub rule: &'static str,
}

fn broken(key: impl Into<String>, value: impl std::fmt::Debug, rule: &'static str) -> Rule {
    Rule { key: key.into(), value: format!("{value:?}"), rule }
}

fn in_range<T: PartialOrd + std::fmt::Debug>(
    key: impl Into<String>,
    value: T,
    range: std::ops::RangeInclusive<T>,
    rule: &'static str,
) -> Result<(), Rule> {
    if range.contains(&value) { Ok(()) } else { Err(broken(key, value, rule)) }
}

fn absolute(key: impl Into<String>, path: &Path) -> Result<(), Rule> {
    if path.is_absolute() { Ok(()) } else { Err(broken(key, path, "an absolute path is needed")) }
}

/// Returns whether a RuntimeClass can name this handler: the name must be a DNS label.
fn is_handler_name(name: &str) -> bool {
    let ok = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    (1..=63).contains(&name.len()) && name.bytes().all(ok) && !name.starts_with('-') && !name.ends_with('-')
}

pub(super) fn check(config: &Config) -> Result<(), Rule> {
    if !config.handlers.contains_key(&config.default_handler) {
        return Err(broken("default_handler", &config.default_handler, "there is no [handlers.…] of this name"));
    }
    let paths = &config.paths;
    for (key, path) in [("paths.root", &paths.root), ("paths.run", &paths.run), ("paths.socket", &paths.socket)] {
        absolute(key, path)?;
    }
    if paths.socket.as_os_str().len() > 107 {
        return Err(broken("paths.socket", &paths.socket, "the kernel takes at most 107 bytes for a socket's path"));
    }
    // The name of a pod's directory has 13 characters; docs/contributor/pod-process.md explains the limit of its path.
    if paths.pods().as_os_str().len() + "/0123456789abc/jail".len() > POD_DIR {
        return Err(broken(
            "paths.run",
            &paths.run,
            "too long: it may have 63 bytes, so that sockets of pods below it have names",
        ));
    }
    absolute("network.cni_conf_dir", &config.network.cni_conf_dir)?;
    absolute("network.netns_dir", &config.network.netns_dir)?;
    for dir in &config.network.cni_bin_dirs {
        absolute("network.cni_bin_dirs", dir)?;
    }
    for dir in &config.sandbox.cdi_dirs {
        absolute("sandbox.cdi_dirs", dir)?;
    }
    let seconds = "1 to 3600 seconds are allowed";
    let sandbox = &config.sandbox;
    for (key, value) in [
        ("network.plugin_seconds", config.network.plugin_seconds),
        ("images.progress_seconds", config.images.progress_seconds),
        ("sandbox.boot_seconds", sandbox.boot_seconds),
        ("sandbox.answer_seconds", sandbox.answer_seconds),
        ("sandbox.undo_seconds", sandbox.undo_seconds),
    ] {
        in_range(key, value, 1..=3600, seconds)?;
    }
    let cached = "0 to 3600 seconds are allowed";
    in_range("sandbox.volume_cache_seconds", sandbox.volume_cache_seconds, 0..=3600, cached)?;
    in_range("streaming.idle_seconds", config.streaming.idle_seconds, 1..=604_800, "1 second to 7 days are allowed")?;
    let (cert, key) = (&config.streaming.tls_cert_file, &config.streaming.tls_key_file);
    for (name, file, other) in [("tls_cert_file", cert, key), ("tls_key_file", key, cert)] {
        match file {
            Some(file) => absolute(format!("streaming.{name}"), file)?,
            None if other.is_some() => {
                return Err(broken(format!("streaming.{name}"), "", "certificate and key are needed, or neither"));
            }
            None => {}
        }
    }
    absolute("machines.efi_code".to_owned(), &config.machines.efi_code)?;
    absolute("machines.efi_variables".to_owned(), &config.machines.efi_variables)?;
    absolute("machines.efi_secure_code".to_owned(), &config.machines.efi_secure_code)?;
    absolute("machines.efi_secure_variables".to_owned(), &config.machines.efi_secure_variables)?;
    in_range("images.parallel_layers", config.images.parallel_layers, 1..=64, "1 to 64 are allowed")?;
    let memory = config.images.max_unpack_memory;
    in_range("images.max_unpack_memory", memory, 384 << 20..=u64::MAX, "402653184 bytes (384 MiB) or more are needed")?;
    for (host, registry) in &config.images.registries {
        if let Some(mirror) = registry.mirrors.iter().find(|m| !m.starts_with("http://") && !m.starts_with("https://"))
        {
            return Err(broken(format!("images.registries.{host}.mirrors"), mirror, "a URL (https://… or http://…)"));
        }
    }
    for (name, handler) in &config.handlers {
        let key = |key: &str| format!("handlers.{name}.{key}");
        if !is_handler_name(name) {
            return Err(broken("handlers", name, "a handler's name has 1 to 63 characters from a-z0-9-"));
        }
        absolute(key("kernel"), &handler.kernel)?;
        absolute(key("initrd"), &handler.initrd)?;
        in_range(key("vcpus"), handler.vcpus, 1..=MAX_VCPUS.into(), "1 to 64 are allowed")?;
        if let Some(max) = handler.max_vcpus {
            let range = handler.vcpus..=u32::from(MAX_VCPUS);
            in_range(key("max_vcpus"), max, range, "as many as vcpus, to 64, are allowed")?;
        }
        in_range(
            key("memory_mib"),
            handler.memory_mib,
            MIN_MEMORY_MIB..=MAX_MEMORY_MIB,
            "64 MiB to 16 TiB are allowed",
        )?;
        if let Some(max) = handler.max_memory_mib {
            let range = handler.memory_mib..=MAX_MEMORY_MIB;
            in_range(key("max_memory_mib"), max, range, "as much as memory_mib, to 16 TiB, is allowed")?;
        }
        let scratch = MIN_SCRATCH_MIB..=MAX_MEMORY_MIB;
        in_range(key("scratch_mib"), handler.scratch_mib, scratch, "64 MiB to 16 TiB are allowed")?;
        if let Some(mib) = handler.empty_dir_mib {
            let range = MIN_QUOTA >> 20..=MAX_QUOTA >> 20;
            in_range(key("empty_dir_mib"), mib, range, "16 MiB to 4 TiB are allowed")?;
        }
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
            ("[sandbox]\nboot_seconds = 0", "sandbox.boot_seconds"),
            ("[streaming]\nidle_seconds = 0", "streaming.idle_seconds"),
            ("[streaming]\ntls_cert_file = \"c\"\ntls_key_file = \"/k\"", "streaming.tls_cert_file"),
            ("[streaming]\ntls_cert_file = \"/c\"", "streaming.tls_key_file"),
            ("[images]\nparallel_layers = 0", "images.parallel_layers"),
            ("[images]\nmax_unpack_memory = 1000000", "images.max_unpack_memory"),
            ("[images.registries.r]\nmirrors = [\"m:5000\"]", "images.registries.r.mirrors"),
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
        ] {
            match Config::parse(text, Path::new("c.toml")) {
                Err(super::super::ConfigError::Rule { source, .. }) => assert_eq!(source.key, key, "{text}"),
                other => panic!("{text}: {other:?}"),
            }
        }
    }
}
