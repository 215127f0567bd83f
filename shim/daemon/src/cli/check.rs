//! Implements `nacelle check`: determines what this node supports, and what follows from it.

use crate::config::{CgroupDriver, Config, EngineSetting, Handler};
use crate::hugepages;
use nacelle_base::Chain;
use nacelle_base::machine::{EngineKind, MemoryPages};
use nacelle_engine::probe::{self, KvmVerdict};
use std::fmt;
use std::path::Path;
use std::process::{Command, ExitCode};

/// Free disk space in bytes that the first images need.
const ENOUGH_DISK: u64 = 2 << 30;
/// The kernel's vhost device for guests' network packets.
const VHOST_NET: &str = "/dev/vhost-net";

#[derive(Clone, Copy, PartialEq, Eq)]
enum Level {
    Good,
    Worse,
    /// No pod can run.
    Bad,
}

struct Finding {
    level: Level,
    what: &'static str,
    says: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = match self.level {
            Level::Good => "ok",
            Level::Worse => "note",
            Level::Bad => "FAIL",
        };
        write!(f, "{word:<5}{:<9}{}", self.what, self.says)
    }
}

fn finding(level: Level, what: &'static str, says: impl Into<String>) -> Finding {
    Finding { level, what, says: says.into() }
}

pub(super) fn check(config: Config) -> anyhow::Result<ExitCode> {
    let (engine, verdict) = super::serve::engine();
    let handlers: Vec<_> = config.handlers.iter().map(|(name, handler)| (name.as_str(), handler.engine)).collect();
    let mut findings = vec![user(), kernel(), pods(), kvm(&verdict, &handlers), vhost(Path::new(VHOST_NET), &verdict)];
    findings
        .push(qemu(&engine.qemu, handlers.iter().any(|(_, setting)| setting.or(engine.fitting) == EngineKind::Qemu)));
    if config.handlers.values().any(|handler| handler.engine == EngineSetting::Host) {
        findings.extend(host(&engine.agent));
    }
    for (name, handler) in config.handlers.iter().filter(|(_, handler)| handler.engine != EngineSetting::Host) {
        findings.push(file(name, "kernel", &handler.kernel));
        findings.push(file(name, "initrd", &handler.initrd));
        findings.extend(pages(name, handler));
    }
    findings.push(tap());
    findings.push(network(&config)?);
    findings.extend(owed(&config)?);
    findings.push(cgroups());
    findings.extend(systemd(config.sandbox.cgroup_driver));
    findings.push(disk(&config.paths.root));
    for finding in &findings {
        println!("{finding}");
    }
    let bad = findings.iter().filter(|finding| finding.level == Level::Bad).count();
    Ok(match bad {
        0 => {
            println!("check: this node can run pods");
            ExitCode::SUCCESS
        }
        1 => {
            println!("check: this node cannot run pods: 1 problem");
            ExitCode::FAILURE
        }
        bad => {
            println!("check: this node cannot run pods: {bad} problems");
            ExitCode::FAILURE
        }
    })
}

fn user() -> Finding {
    match nix::unistd::geteuid().is_root() {
        true => finding(Level::Good, "user", "root"),
        false => finding(Level::Bad, "user", "not root: network namespaces and taps need it; use sudo"),
    }
}

fn kernel() -> Finding {
    match nix::sys::utsname::uname() {
        Ok(name) => finding(Level::Good, "host", format!("Linux {}", name.release().to_string_lossy())),
        Err(error) => finding(Level::Worse, "host", format!("uname: {error}")),
    }
}

/// Checks the binary of pod processes.
fn pods() -> Finding {
    let missing = |says: String| finding(Level::Bad, "pods", format!("{says}; install nacelle-pod beside nacelle"));
    match crate::program::pod_program() {
        Ok(path) if path.is_file() => finding(Level::Good, "pods", path.display().to_string()),
        Ok(path) => missing(format!("{} is not there", path.display())),
        Err(error) => missing(format!("the path of this program: {error}")),
    }
}

/// Checks KVM, and whether a handler needs more of it than it provides.
fn kvm(verdict: &KvmVerdict, handlers: &[(&str, EngineSetting)]) -> Finding {
    if probe::default_engine(verdict) == EngineKind::Kvm {
        return finding(Level::Good, "kvm", verdict.to_string());
    }
    match handlers.iter().find(|(_, setting)| *setting == EngineSetting::Kvm) {
        None => finding(Level::Worse, "kvm", verdict.to_string()),
        Some((name, _)) => {
            let advice = format!("handler {name} has engine = \"kvm\", which does not work here: set it to \"auto\"");
            finding(Level::Bad, "kvm", format!("{verdict}; {advice}"))
        }
    }
}

/// Checks vhost-net, which only Nacelle's own VMM uses.
fn vhost(path: &Path, verdict: &KvmVerdict) -> Finding {
    let there = std::fs::File::options().read(true).write(true).open(path);
    match (there, probe::default_engine(verdict)) {
        (_, EngineKind::Qemu | EngineKind::Host) => finding(Level::Good, "vhost", "not needed: pods run in QEMU here"),
        (Ok(_), EngineKind::Kvm) => finding(Level::Good, "vhost", "the node's kernel moves the packets of guests"),
        (Err(error), EngineKind::Kvm) => {
            let path = path.display();
            let says = format!("{path}: {error}: each pod process moves its packets itself; load the module vhost_net");
            finding(Level::Worse, "vhost", says)
        }
    }
}

/// Checks what pods without a guest need: the agent, EROFS images mounted from files, and a cgroup hierarchy with limits.
fn host(agent: &Path) -> Vec<Finding> {
    let program = match std::fs::metadata(agent) {
        Ok(data) if data.is_file() => finding(Level::Good, "agent", format!("{} (engine host)", agent.display())),
        Ok(_) => finding(Level::Bad, "agent", format!("{} is no file (engine host)", agent.display())),
        Err(error) => finding(
            Level::Bad,
            "agent",
            format!("{}: {error}; engine host needs it: install nacelle-agent beside nacelle", agent.display()),
        ),
    };
    let systems = std::fs::read_to_string("/proc/filesystems").unwrap_or_default();
    let has = |name: &str| systems.lines().any(|line| line.split_whitespace().last() == Some(name));
    let missing: Vec<_> = ["erofs", "overlay"].into_iter().filter(|name| !has(name)).collect();
    let images = match (missing.as_slice(), newer_than_6_11()) {
        ([], true) => finding(Level::Good, "erofs", "the node's kernel mounts images from files (engine host)"),
        (_, false) => {
            finding(Level::Bad, "erofs", "engine host needs Linux 6.12 or newer, which mounts images from files")
        }
        (missing, true) => {
            let missing = missing.join(" and ");
            let says =
                format!("engine host: no {missing} yet; the kernel loads it with the first pod, if it is a module");
            finding(Level::Worse, "erofs", says)
        }
    };
    let controllers = std::fs::read_to_string("/sys/fs/cgroup/cgroup.controllers").unwrap_or_default();
    let limits = match ["cpu", "memory", "pids"].iter().all(|name| controllers.split_whitespace().any(|c| c == *name)) {
        true => finding(Level::Good, "limits", "cgroup v2 limits containers of engine host"),
        false => finding(
            Level::Worse,
            "limits",
            "no cgroup v2 with cpu, memory and pids: containers of engine host run without the limits they ask for",
        ),
    };
    vec![program, images, limits]
}

/// Returns whether the kernel is 6.12 or newer, which can mount EROFS from a file.
fn newer_than_6_11() -> bool {
    let Ok(name) = nix::sys::utsname::uname() else { return false };
    let release = name.release().to_string_lossy();
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|number| number.parse::<u32>().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) >= (6, 12)
}

/// Checks QEMU. `needs` (a handler needs it) determines the severity if it is missing.
fn qemu(program: &Path, needs: bool) -> Finding {
    if !needs {
        return finding(Level::Good, "qemu", "not needed: no handler uses it");
    }
    match Command::new(program).arg("--version").output() {
        Ok(output) if output.status.success() => {
            let text = String::from_utf8_lossy(&output.stdout);
            finding(Level::Good, "qemu", text.lines().next().unwrap_or_default())
        }
        Ok(output) => finding(Level::Bad, "qemu", format!("{} ended with {}", program.display(), output.status)),
        Err(error) => finding(Level::Bad, "qemu", format!("{}: {error}; install qemu-system-x86", program.display())),
    }
}

fn file(handler: &str, what: &'static str, path: &Path) -> Finding {
    match std::fs::metadata(path) {
        Ok(data) if data.is_file() => {
            let size = format!("{} ({} KiB, handler {handler})", path.display(), data.len() >> 10);
            finding(Level::Good, what, size)
        }
        Ok(_) => finding(Level::Bad, what, format!("handler {handler}: {} is no file", path.display())),
        Err(error) => finding(
            Level::Bad,
            what,
            format!(
                "handler {handler}: {}: {error}; build it with guest/build or set handlers.{handler}.{what}",
                path.display()
            ),
        ),
    }
}

/// Checks that the node has enough huge pages for a VM of a handler with "hugetlb" memory; `None` for other handlers.
fn pages(name: &str, handler: &Handler) -> Option<Finding> {
    (handler.memory_pages == MemoryPages::Hugetlb).then(|| {
        match hugepages::check(handler.memory_mib, hugepages::PAGE_MIB) {
            Ok(()) => finding(Level::Good, "pages", format!("huge pages for a machine of handler {name}")),
            Err(error) => finding(Level::Worse, "pages", format!("handler {name}: {error}")),
        }
    })
}

fn tap() -> Finding {
    match std::fs::File::options().read(true).write(true).open("/dev/net/tun") {
        Ok(_) => finding(Level::Good, "tap", "/dev/net/tun can be opened"),
        Err(error) => finding(Level::Bad, "tap", format!("/dev/net/tun: {error}; load the module tun")),
    }
}

fn network(config: &Config) -> anyhow::Result<Finding> {
    let network = nacelle_net::Network::new(config.network_options());
    Ok(match super::runtime()?.block_on(network.status()) {
        Ok(()) => {
            let dir = config.network.cni_conf_dir.display();
            finding(Level::Good, "cni", format!("the configuration in {dir} and its plugins are ready"))
        }
        Err(error) => finding(Level::Bad, "cni", Chain(&error).to_string()),
    })
}

/// Reports owed CNI DELs of removed pods: the networks have not released the resources of these pods.
fn owed(config: &Config) -> anyhow::Result<Vec<Finding>> {
    let network = nacelle_net::Network::new(config.network_options());
    Ok(match super::runtime()?.block_on(network.owed()) {
        Ok(owed) => owed.iter().map(|one| finding(Level::Worse, "cni", super::owed_line(one))).collect(),
        Err(error) => vec![finding(Level::Worse, "cni", Chain(&error).to_string())],
    })
}

/// Checks systemd's bus if the configuration uses systemd's cgroup driver.
fn systemd(driver: CgroupDriver) -> Option<Finding> {
    let bad = |says| Some(finding(Level::Bad, "systemd", says));
    match driver {
        CgroupDriver::Cgroupfs => None,
        CgroupDriver::Systemd if !crate::systemd::runs() => {
            bad("the node's first process is another: set sandbox.cgroup_driver to \"cgroupfs\"")
        }
        CgroupDriver::Systemd if !crate::systemd::has_bus() => bad("no system bus to ask it over: install dbus"),
        CgroupDriver::Systemd => Some(finding(Level::Good, "systemd", "makes the control groups of pods")),
    }
}

fn cgroups() -> Finding {
    match std::fs::read_to_string("/sys/fs/cgroup/cgroup.controllers") {
        Ok(controllers) => finding(Level::Good, "cgroups", format!("v2: {}", controllers.trim())),
        Err(_v1) => finding(Level::Good, "cgroups", "no unified v2 here; containers are limited by the guest's own"),
    }
}

fn disk(root: &Path) -> Finding {
    let there = root.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"));
    match nix::sys::statvfs::statvfs(there) {
        Ok(stat) => {
            let free = stat.blocks_available().saturating_mul(stat.fragment_size());
            let says = format!("{} MiB free for {}", free >> 20, root.display());
            match free >= ENOUGH_DISK {
                true => finding(Level::Good, "disk", says),
                false => finding(Level::Worse, "disk", format!("{says}: images need more; set paths.root")),
            }
        }
        Err(error) => finding(Level::Worse, "disk", format!("{}: {error}", there.display())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    const AUTO: &[(&str, EngineSetting)] = &[("a", EngineSetting::Auto), ("q", EngineSetting::Qemu)];
    const KVM: &[(&str, EngineSetting)] = &[("a", EngineSetting::Auto), ("k", EngineSetting::Kvm)];

    fn verdicts() -> [(KvmVerdict, &'static str); 5] {
        let took = Duration::from_millis(45);
        [
            (KvmVerdict::Absent, "no /dev/kvm"),
            (KvmVerdict::NoPermission, "give this process access to /dev/kvm"),
            (KvmVerdict::Hardware { took: Duration::from_micros(50) }, "Nacelle's own VMM (engine kvm)"),
            (KvmVerdict::Interpreted { took }, "interprets guest kernels (probe: 45ms)"),
            (KvmVerdict::Broken { why: "out of luck".into() }, "(out of luck)"),
        ]
    }

    #[test]
    fn each_verdict_says_what_it_is_and_what_follows() {
        for (verdict, words) in verdicts() {
            let hardware = matches!(verdict, KvmVerdict::Hardware { .. });
            let found = kvm(&verdict, AUTO);
            assert!(found.says.contains(words), "{found}");
            assert!(found.says.contains(if hardware { "engine kvm" } else { "pods run in QEMU" }), "{found}");
            assert!(found.level == if hardware { Level::Good } else { Level::Worse }, "{found}");
            let found = kvm(&verdict, KVM);
            assert!(found.level == if hardware { Level::Good } else { Level::Bad }, "{found}");
            assert_eq!(found.says.contains("handler k has engine"), !hardware, "{found}");
        }
    }

    #[test]
    fn vhost_is_for_our_own_vmm() {
        let directory = tempfile::tempdir().unwrap();
        let (there, missing) = (directory.path().join("there"), directory.path().join("missing"));
        std::fs::write(&there, "").unwrap();
        for (verdict, _) in verdicts() {
            let hardware = matches!(verdict, KvmVerdict::Hardware { .. });
            assert!(vhost(&there, &verdict).level == Level::Good);
            let found = vhost(&missing, &verdict);
            assert!(found.level == if hardware { Level::Worse } else { Level::Good }, "{found}");
            assert_eq!(found.says.contains("load the module vhost_net"), hardware, "{found}");
        }
    }

    #[test]
    fn huge_pages_are_looked_for_only_where_they_are_wanted() {
        let usual = Handler { memory_mib: 16 << 20, ..Handler::default() };
        assert!(pages("a", &usual).is_none());
        let found = pages("h", &Handler { memory_pages: MemoryPages::Hugetlb, ..usual }).unwrap();
        assert!(found.level == Level::Worse && found.says.contains("handler h: a machine of 16777216 MiB"), "{found}");
    }

    #[test]
    fn pods_without_a_guest_need_the_agent() {
        let directory = tempfile::tempdir().unwrap();
        let agent = directory.path().join("nacelle-agent");
        let found = host(&agent);
        assert!(found[0].level == Level::Bad && found[0].says.contains("install nacelle-agent"), "{}", found[0]);
        std::fs::write(&agent, "").unwrap();
        assert!(host(&agent)[0].level == Level::Good);
    }

    #[test]
    fn qemu_is_asked_for_only_where_it_is_used() {
        let missing = Path::new("/nowhere/qemu");
        assert!(qemu(missing, false).level == Level::Good);
        let found = qemu(missing, true);
        assert!(found.level == Level::Bad && found.says.contains("install qemu-system-x86"), "{found}");
    }
}
