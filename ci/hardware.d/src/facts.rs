//! Collects the facts about the host that are needed to interpret the figures.

use crate::report::{FigureLine, object};
use nacelle_engine::KvmVerdict;
use nix::sys::statfs::statfs;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::process::Command;

/// Returns the first line of a report.
pub fn describe_host(version: &str, verdict: &KvmVerdict, disk: &Path) -> FigureLine {
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let cpu_field = |name: &str| cpuinfo.lines().find_map(|line| line.strip_prefix(name)?.split_once(':'));
    let model = cpu_field("model name").map_or_else(String::new, |(_, model)| model.trim().to_owned());
    let flags = cpu_field("flags").map_or("", |(_, flags)| flags);
    let module = ["kvm_intel", "kvm_amd"].into_iter().find(|name| Path::new("/sys/module").join(name).exists());
    let parameter = |name: &str| read_text(&format!("/sys/module/{}/parameters/{name}", module.unwrap_or_default()));
    let thp = "/sys/kernel/mm/transparent_hugepage";
    let facts = json!({
        "nacelle": version,
        "cpu": model,
        "cpus": std::thread::available_parallelism().map_or(0, usize::from),
        "virtual": flags.split_whitespace().any(|flag| flag == "hypervisor"),
        "kernel": read_text("/proc/sys/kernel/osrelease"),
        "kvm": module.unwrap_or("built in"),
        "ept": parameter("ept"),
        "npt": parameter("npt"),
        "probe_us": if let KvmVerdict::Hardware { took } = verdict { json!(took.as_secs_f64() * 1e6) } else { Value::Null },
        "vhost_net": Path::new("/dev/vhost-net").exists(),
        "memory_mib": meminfo("MemTotal") / 1024,
        "thp": selected_setting(&read_text(&format!("{thp}/enabled"))),
        "thp_shmem": selected_setting(&read_text(&format!("{thp}/shmem_enabled"))),
        "load": read_text("/proc/loadavg"),
        "disk": statfs(disk).map_or_else(|_unknown| String::new(), |system| file_system_name(system.filesystem_type().0)),
        "qemu": peer_version("qemu-system-x86_64"),
        "firecracker": peer_version("firecracker"),
    });
    FigureLine { name: "host".to_owned(), facts: object(facts), ..FigureLine::default() }
}

/// Returns the content of a small file, or an empty string.
fn read_text(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default().trim().to_owned()
}

/// Returns the selected setting of a file like `always [madvise] never`; empty if there is none.
pub fn selected_setting(setting: &str) -> String {
    let word = setting.split_whitespace().find_map(|word| word.strip_prefix('[')?.strip_suffix(']'));
    word.unwrap_or_default().to_owned()
}

/// Returns a value of /proc/meminfo in KiB; 0 if it is missing.
pub fn meminfo(name: &str) -> u64 {
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = meminfo.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    line.and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap_or(0)
}

/// Returns the names of usual file systems by their numbers (statfs(2)); the number of others.
fn file_system_name(kind: libc::c_long) -> String {
    match kind {
        0xef53 => "ext4".to_owned(),
        0x5846_5342 => "xfs".to_owned(),
        0x9123_683e => "btrfs".to_owned(),
        0x0102_1994 => "tmpfs".to_owned(),
        0x794c_7630 => "overlayfs".to_owned(),
        other => format!("{other:#x}"),
    }
}

/// Returns the version of a peer, if it is installed.
fn peer_version(program: &str) -> Value {
    let output = Command::new(program).arg("--version").output();
    output
        .map_or(Value::Null, |output| json!(String::from_utf8_lossy(&output.stdout).lines().next().unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn the_setting_in_brackets_is_the_one_in_use() {
        assert_eq!(selected_setting("always [madvise] never"), "madvise");
        assert_eq!(selected_setting(""), "");
    }

    #[test]
    fn the_host_is_described() {
        let line = describe_host("v1", &KvmVerdict::Hardware { took: Duration::from_micros(50) }, Path::new("/proc"));
        assert_eq!((line.name.as_str(), &line.facts["nacelle"]), ("host", &json!("v1")));
        assert_eq!(line.facts["probe_us"], json!(50.0));
        assert!(line.facts["memory_mib"].as_u64().unwrap() > 0 && line.facts["cpus"].as_u64().unwrap() > 0);
    }
}
