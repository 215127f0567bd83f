//! Implements `nacelle check`: determines what this node supports, and what follows from it.

use super::ExitStatus;
use super::finding::{CheckReport, Finding, Severity, finding};
use super::hardening::check_hardening;
use super::output::OutputArgument;
use super::owed_deletes::OwedDeleteView;
use super::units::format_bytes;
use crate::apparmor::Apparmor;
use crate::config::{CgroupDriver, Config, EngineSetting, Handler, JailSettings, PathSettings};
use crate::hugepages;
use crate::user_range::check_user_range;
use nacelle_base::Chain;
use nacelle_base::machine::{EngineKind, MemoryPages};
use nacelle_engine::probe::{self, KvmVerdict};
use nacelle_engine::{check_initrd, check_kernel as check_kernel_file};
use nacelle_machines::MachineSettings;
use nacelle_pod::check_idmapped_mounts;
use std::fs::File;
use std::ops::RangeInclusive;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Free disk space in bytes that the first images need.
const MIN_FREE_DISK: u64 = 2 << 30;
/// The oldest kernel for engine host.
const ENGINE_HOST: (u32, u32) = (6, 1);
/// The first kernel that mounts EROFS from files.
const MOUNTS_FILES: (u32, u32) = (6, 12);
/// The kernel's vhost device for guests' network packets.
const VHOST_NET: &str = "/dev/vhost-net";

pub(super) fn check(config: Config, output: OutputArgument) -> anyhow::Result<ExitStatus> {
    find_problems(&config)?.print(output)
}

/// Runs all checks.
pub(super) fn find_problems(config: &Config) -> anyhow::Result<CheckReport> {
    let (engine, verdict) = super::serve::probe_engine();
    let handlers: Vec<_> = config.handlers.iter().map(|(name, handler)| (name.as_str(), handler.engine)).collect();
    let mut findings = vec![
        check_user(),
        check_kernel(),
        check_pod_program(),
        check_pod_users(&config.jail),
        check_unpack_program(),
        check_kvm(&verdict, &handlers),
        check_vhost_net(Path::new(VHOST_NET), &verdict),
    ];
    findings.extend(check_owner_maps(&config.paths, &config.jail));
    findings.extend(check_firmware(&config.machines, &config.jail));
    findings.push(check_qemu(
        &engine.qemu,
        handlers.iter().any(|(_, setting)| setting.or(engine.fitting) == EngineKind::Qemu),
    ));
    if config.may_run_on_host() {
        findings.extend(check_engine_host(&engine.agent));
    }
    for (name, handler) in config.handlers.iter().filter(|(_, handler)| handler.engine != EngineSetting::Host) {
        let (engine, memory) =
            (handler.engine.or(engine.fitting), u32::try_from(handler.memory_mib).unwrap_or(u32::MAX));
        let for_all = config.jail.user_count > 0;
        findings.push(check_guest_file(name, "kernel", &handler.kernel, for_all, |file| {
            check_kernel_file(file, memory, engine).map_err(|error| Chain(&error).to_string())
        }));
        findings.push(check_guest_file(name, "initrd", &handler.initrd, for_all, |file| {
            check_initrd(file).map_err(|error| Chain(&error).to_string())
        }));
        findings.extend(check_huge_pages(name, handler));
    }
    findings.push(check_tap());
    findings.push(check_cni(config)?);
    findings.extend(report_owed_deletes(config)?);
    findings.push(check_cgroups());
    findings.extend(check_systemd(config.sandbox.cgroup_driver));
    findings.push(check_disk(&config.paths.root));
    if config.handlers.values().any(|handler| handler.disk_limits.is_some()) {
        findings.push(check_disk_limits(&config.paths.root));
    }
    findings.extend(check_hardening(Path::new("/")));
    Ok(CheckReport::new(findings, "this node can run pods", "this node cannot run pods"))
}

fn check_user() -> Finding {
    match nix::unistd::geteuid().is_root() {
        true => finding(Severity::Ok, "user", "root"),
        false => finding(Severity::Fail, "user", "not root: network namespaces and taps need it; use sudo"),
    }
}

fn check_kernel() -> Finding {
    match nix::sys::utsname::uname() {
        Ok(name) => finding(Severity::Ok, "host", format!("Linux {}", name.release().to_string_lossy())),
        Err(error) => finding(Severity::Note, "host", format!("uname: {error}")),
    }
}

/// Checks the binary of pod processes.
fn check_pod_program() -> Finding {
    let missing =
        |problem: String| finding(Severity::Fail, "pods", format!("{problem}; install nacelle-pod beside nacelle"));
    match crate::program::pod_program() {
        Ok(path) if path.is_file() => finding(Severity::Ok, "pods", path.display().to_string()),
        Ok(path) => missing(format!("{} does not exist", path.display())),
        Err(error) => missing(format!("cannot find the path of this program: {error}")),
    }
}

/// Checks the users of image workers and pod processes, and whether users of the node have the same ids.
fn check_pod_users(jail: &JailSettings) -> Finding {
    if jail.user_count == 0 {
        let message = "pod processes and image workers are root, without capabilities: jail.user_count is 0";
        return finding(Severity::Note, "users", message);
    }
    if let Err(error) = check_user_range(jail) {
        return finding(Severity::Fail, "users", Chain(&error).to_string());
    }
    let range = jail.first_user..=jail.first_user.saturating_add(jail.user_count - 1);
    for (file, is_range) in [("passwd", false), ("group", false), ("subuid", true), ("subgid", true)] {
        let path = Path::new("/etc").join(file);
        // The files may be missing.
        let text = std::fs::read_to_string(&path).unwrap_or_default();
        if let Some(line) = find_overlap(&text, is_range, &range) {
            let advice = "choose another jail.first_user";
            let message = format!("{}: \"{line}\" has ids of pod processes: {advice}", path.display());
            return finding(Severity::Note, "users", message);
        }
    }
    let (first, last) = range.into_inner();
    finding(
        Severity::Ok,
        "users",
        format!("image workers and pod processes of VMs have the user ids {first} to {last}"),
    )
}

/// Checks whether the processes of machine pods can have users of their own: their files stay root's, which needs idmapped mounts.
/// Returns `None` if no process has such a user, or if this process is not root, as the daemon is.
fn check_owner_maps(paths: &PathSettings, jail: &JailSettings) -> Option<Finding> {
    let (user, count) = jail.pod_users();
    if count == 0 || !nix::unistd::geteuid().is_root() {
        return None;
    }
    let directories = [paths.scratch(), paths.images(), paths.machines()].map(|path| existing_ancestor(&path));
    Some(match check_idmapped_mounts(directories.iter().map(PathBuf::as_path), user) {
        Ok(()) => finding(Severity::Ok, "owners", "idmapped mounts give processes of machine pods users of their own"),
        Err(error) => {
            let needs = "they need Linux 5.12, a file system with idmapped mounts (ext4, XFS, Btrfs; tmpfs with Linux 6.3) \
                         and user.max_user_namespaces above 0";
            let message =
                format!("{}: processes of machine pods are root, without capabilities; {needs}", Chain(&error));
            finding(Severity::Note, "owners", message)
        }
    })
}

/// Returns the path, or the nearest directory above it that exists.
fn existing_ancestor(path: &Path) -> PathBuf {
    path.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/")).to_owned()
}

/// Finds firmware of machine pods that only root may read, while their QEMU has another user. Missing files are not needed.
fn check_firmware(machines: &MachineSettings, jail: &JailSettings) -> Vec<Finding> {
    let MachineSettings { efi_code, efi_variables, efi_secure_code, efi_secure_variables } = machines;
    let is_closed = |path: &&PathBuf| std::fs::metadata(path).is_ok_and(|data| data.mode() & 0o004 == 0);
    let files = [efi_code, efi_variables, efi_secure_code, efi_secure_variables].into_iter();
    let closed = files.filter(|_| jail.user_count > 0).filter(is_closed);
    let note = |path: &PathBuf| {
        let path = path.display();
        let message = format!(
            "{path}: machine pods with UEFI, which have user ids of their own, cannot read it; run chmod o+r {path}"
        );
        finding(Severity::Note, "firmware", message)
    };
    closed.map(note).collect()
}

/// Returns a line of a file like passwd(5) (the third field is an id) or subuid(5) (the second field is an id, the third a number of
/// ids) that has an id of the range.
fn find_overlap<'a>(text: &'a str, is_range: bool, range: &RangeInclusive<u32>) -> Option<&'a str> {
    text.lines().find(|line| {
        let number = |field: usize| line.split(':').nth(field).and_then(|text| text.parse::<u64>().ok());
        let ids = match is_range {
            true => number(1).zip(number(2)),
            false => number(2).map(|id| (id, 1)),
        };
        ids.is_some_and(|(first, count)| {
            first <= u64::from(*range.end()) && first.saturating_add(count) > u64::from(*range.start())
        })
    })
}

/// Checks the binary that decodes layers of images.
fn check_unpack_program() -> Finding {
    let missing = |problem: String| {
        finding(Severity::Fail, "images", format!("{problem}; install nacelle-unpack beside nacelle"))
    };
    match crate::program::unpack_program() {
        Ok(path) if path.is_file() => finding(Severity::Ok, "images", path.display().to_string()),
        Ok(path) => missing(format!("{} does not exist", path.display())),
        Err(error) => missing(format!("cannot find the path of this program: {error}")),
    }
}

/// Checks KVM, and whether a handler needs more of it than it provides.
fn check_kvm(verdict: &KvmVerdict, handlers: &[(&str, EngineSetting)]) -> Finding {
    if probe::default_engine(verdict) == EngineKind::Kvm {
        return finding(Severity::Ok, "kvm", verdict.to_string());
    }
    match handlers.iter().find(|(_, setting)| *setting == EngineSetting::Kvm) {
        None => finding(Severity::Note, "kvm", verdict.to_string()),
        Some((name, _)) => {
            let advice = format!("handler {name} has engine = \"kvm\", which does not work here: set it to \"auto\"");
            finding(Severity::Fail, "kvm", format!("{verdict}; {advice}"))
        }
    }
}

/// Checks vhost-net, which only Nacelle's own VMM uses.
fn check_vhost_net(path: &Path, verdict: &KvmVerdict) -> Finding {
    let opened = std::fs::File::options().read(true).write(true).open(path);
    match (opened, probe::default_engine(verdict)) {
        (_, EngineKind::Qemu | EngineKind::Host) => finding(Severity::Ok, "vhost", "not needed: pods run in QEMU here"),
        (Ok(_), EngineKind::Kvm) => finding(Severity::Ok, "vhost", "the node's kernel processes the packets of guests"),
        (Err(error), EngineKind::Kvm) => {
            let path = path.display();
            let message = format!(
                "{path}: {error}: each pod process processes its packets itself, which is slower; load the module vhost_net"
            );
            finding(Severity::Note, "vhost", message)
        }
    }
}

/// Checks what pods without a guest need: the agent, mounts of EROFS images, and a cgroup hierarchy with limits.
fn check_engine_host(agent: &Path) -> Vec<Finding> {
    let program = match std::fs::metadata(agent) {
        Ok(data) if data.is_file() => finding(Severity::Ok, "agent", format!("{} (engine host)", agent.display())),
        Ok(_) => finding(Severity::Fail, "agent", format!("{} is not a regular file (engine host)", agent.display())),
        Err(error) => finding(
            Severity::Fail,
            "agent",
            format!("{}: {error}; engine host needs it: install nacelle-agent beside nacelle", agent.display()),
        ),
    };
    let systems = std::fs::read_to_string("/proc/filesystems").unwrap_or_default();
    let has = |name: &str| systems.lines().any(|line| line.split_whitespace().last() == Some(name));
    let missing: Vec<_> = ["erofs", "overlay"].into_iter().filter(|name| !has(name)).collect();
    let images = check_image_mounts(&missing, kernel_version(), Path::new("/dev/loop-control").exists());
    let controllers = std::fs::read_to_string("/sys/fs/cgroup/cgroup.controllers").unwrap_or_default();
    let limits = match ["cpu", "memory", "pids"].iter().all(|name| controllers.split_whitespace().any(|c| c == *name)) {
        true => finding(Severity::Ok, "limits", "cgroup v2 limits containers of engine host"),
        false => finding(
            Severity::Note,
            "limits",
            "no cgroup v2 with cpu, memory and pids: containers of engine host run without their resource limits",
        ),
    };
    vec![program, images, limits, check_apparmor(&Apparmor::default())]
}

/// Checks whether containers of engine host get an AppArmor profile.
fn check_apparmor(node: &Apparmor) -> Finding {
    match (node.is_enabled(), node.parser()) {
        (false, _) => {
            finding(Severity::Note, "apparmor", "the node has none: containers of engine host have no profile")
        }
        (true, Some(_)) => finding(Severity::Ok, "apparmor", "containers of engine host have a profile"),
        (true, None) => finding(
            Severity::Note,
            "apparmor",
            "no apparmor_parser: containers of engine host that request no profile have none; install the package apparmor",
        ),
    }
}

/// Checks how the node mounts images for engine host. `missing` are file systems that the kernel does not have yet.
fn check_image_mounts(missing: &[&str], kernel: (u32, u32), has_loop_devices: bool) -> Finding {
    let (severity, message) = match (missing, kernel >= MOUNTS_FILES) {
        _ if kernel < ENGINE_HOST => (Severity::Fail, "engine host needs Linux 6.1 or newer".to_owned()),
        (_, false) if !has_loop_devices => {
            let message = "engine host needs /dev/loop-control to mount images before Linux 6.12: load the module loop";
            (Severity::Fail, message.to_owned())
        }
        ([], true) => (Severity::Ok, "the node's kernel mounts images from files (engine host)".to_owned()),
        ([], false) => (Severity::Ok, "the node mounts images by loop devices (engine host)".to_owned()),
        (missing, _) => {
            let missing = missing.join(" and ");
            let message = "yet; the kernel loads it with the first pod, if it is a module";
            (Severity::Note, format!("engine host: no {missing} {message}"))
        }
    };
    finding(severity, "erofs", message)
}

/// Returns the first two numbers of the kernel's version; 0 for what cannot be read.
fn kernel_version() -> (u32, u32) {
    let Ok(name) = nix::sys::utsname::uname() else { return (0, 0) };
    let release = name.release().to_string_lossy();
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|number| number.parse::<u32>().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

/// Checks QEMU. `needs` (a handler needs it) determines the severity if it is missing.
fn check_qemu(program: &Path, needs: bool) -> Finding {
    if !needs {
        return finding(Severity::Ok, "qemu", "not needed: no handler uses it");
    }
    match Command::new(program).arg("--version").output() {
        Ok(output) if output.status.success() => {
            let text = String::from_utf8_lossy(&output.stdout);
            finding(Severity::Ok, "qemu", text.lines().next().unwrap_or_default())
        }
        Ok(output) => finding(Severity::Fail, "qemu", format!("{} ended with {}", program.display(), output.status)),
        Err(error) => {
            finding(Severity::Fail, "qemu", format!("{}: {error}; install qemu-system-x86", program.display()))
        }
    }
}

/// Checks the kernel or the initramfs of a handler, its headers by `verify`. With `for_all`, users other than root must be able to
/// read it.
fn check_guest_file(
    handler: &str,
    what: &'static str,
    path: &Path,
    for_all: bool,
    verify: impl FnOnce(&File) -> Result<(), String>,
) -> Finding {
    match std::fs::metadata(path) {
        Ok(data) if data.is_file() && for_all && data.mode() & 0o004 == 0 => {
            let path = path.display();
            let why = "pod processes, which have user ids of their own, cannot read it";
            finding(Severity::Fail, what, format!("handler {handler}: {path}: {why}; run chmod o+r {path}"))
        }
        Ok(data) if data.is_file() => {
            let verified = File::open(path).map_err(|error| error.to_string()).and_then(|file| verify(&file));
            match verified {
                Ok(()) => {
                    let size = format!("{} ({}, handler {handler})", path.display(), format_bytes(data.len()));
                    finding(Severity::Ok, what, size)
                }
                Err(why) => {
                    let path = path.display();
                    let advice = format!("install it again, or correct handlers.{handler}.{what}");
                    finding(Severity::Fail, what, format!("handler {handler}: {path}: {why}; {advice}"))
                }
            }
        }
        Ok(_) => finding(Severity::Fail, what, format!("handler {handler}: {} is not a regular file", path.display())),
        Err(error) => finding(
            Severity::Fail,
            what,
            format!(
                "handler {handler}: {}: {error}; build it with guest/build or set handlers.{handler}.{what}",
                path.display()
            ),
        ),
    }
}

/// Checks that the node has enough huge pages for a VM of a handler with "hugetlb" memory; `None` for other handlers.
fn check_huge_pages(name: &str, handler: &Handler) -> Option<Finding> {
    (handler.memory_pages == MemoryPages::Hugetlb).then(|| {
        match hugepages::check(handler.memory_mib, hugepages::PAGE_MIB) {
            Ok(()) => {
                finding(Severity::Ok, "pages", format!("the node has enough huge pages for a VM of handler {name}"))
            }
            Err(error) => finding(Severity::Note, "pages", format!("handler {name}: {error}")),
        }
    })
}

fn check_tap() -> Finding {
    match std::fs::File::options().read(true).write(true).open("/dev/net/tun") {
        Ok(_) => finding(Severity::Ok, "tap", "/dev/net/tun can be opened"),
        Err(error) => finding(Severity::Fail, "tap", format!("/dev/net/tun: {error}; load the module tun")),
    }
}

fn check_cni(config: &Config) -> anyhow::Result<Finding> {
    let network = nacelle_net::NodeNetworks::new(config.network_options());
    Ok(match super::runtime()?.block_on(network.status()) {
        Ok(()) => {
            let dir = config.network.cni_conf_dir.display();
            finding(Severity::Ok, "cni", format!("the configuration in {dir} and its plugins are ready"))
        }
        Err(error) => finding(Severity::Fail, "cni", Chain(&error).to_string()),
    })
}

/// Reports owed CNI DELs of removed pods: the networks have not released the resources of these pods.
fn report_owed_deletes(config: &Config) -> anyhow::Result<Vec<Finding>> {
    let network = nacelle_net::NodeNetworks::new(config.network_options());
    Ok(match super::runtime()?.block_on(network.owed_deletes()) {
        Ok(owed) => {
            owed.iter().map(|delete| finding(Severity::Note, "cni", OwedDeleteView::new(delete).line())).collect()
        }
        Err(error) => vec![finding(Severity::Note, "cni", Chain(&error).to_string())],
    })
}

/// Checks systemd's bus if the configuration uses systemd's cgroup driver.
fn check_systemd(driver: CgroupDriver) -> Option<Finding> {
    let fail = |message| Some(finding(Severity::Fail, "systemd", message));
    match driver {
        CgroupDriver::Cgroupfs => None,
        CgroupDriver::Systemd if !crate::systemd::is_running() => {
            fail("systemd is not the node's first process: set sandbox.cgroup_driver to \"cgroupfs\"")
        }
        CgroupDriver::Systemd if !crate::systemd::has_bus() => {
            fail("the system bus of D-Bus does not accept connections: install dbus")
        }
        CgroupDriver::Systemd => Some(finding(Severity::Ok, "systemd", "creates the cgroups of pods")),
    }
}

fn check_cgroups() -> Finding {
    match std::fs::read_to_string("/sys/fs/cgroup/cgroup.controllers") {
        Ok(controllers) => finding(Severity::Ok, "cgroups", format!("v2: {}", controllers.trim())),
        Err(_v1) => {
            finding(Severity::Ok, "cgroups", "this node has no cgroup v2 hierarchy; the guests limit their containers")
        }
    }
}

fn check_disk(root: &Path) -> Finding {
    let existing = existing_ancestor(root);
    match nix::sys::statvfs::statvfs(&existing) {
        Ok(stat) => {
            let free = stat.blocks_available().saturating_mul(stat.fragment_size());
            let message = format!("{} free for {}", format_bytes(free), root.display());
            match free >= MIN_FREE_DISK {
                true => finding(Severity::Ok, "disk", message),
                false => finding(
                    Severity::Note,
                    "disk",
                    format!("{message}: images need at least 2 GiB; set paths.root to a larger disk"),
                ),
            }
        }
        Err(error) => finding(Severity::Note, "disk", format!("{}: {error}", existing.display())),
    }
}

/// Checks whether the disk of `root` can be limited.
fn check_disk_limits(root: &Path) -> Finding {
    match nacelle_pod::check_disk_limits(&existing_ancestor(root)) {
        Ok(disk) => finding(Severity::Ok, "disk limits", format!("apply to block device {disk}")),
        Err(error) => finding(Severity::Fail, "disk limits", Chain(&error).to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;
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
    fn engine_host_mounts_images_by_loop_devices_before_linux_6_12() {
        for (missing, kernel, has_loop, severity, words) in [
            (&[][..], (6, 12), false, Severity::Ok, "from files"),
            (&[], (7, 0), false, Severity::Ok, "from files"),
            (&["erofs", "overlay"], (6, 12), false, Severity::Note, "no erofs and overlay yet"),
            (&[], (6, 1), true, Severity::Ok, "by loop devices"),
            (&["erofs"], (6, 11), true, Severity::Note, "no erofs yet"),
            (&[], (6, 1), false, Severity::Fail, "load the module loop"),
            (&[], (5, 15), true, Severity::Fail, "needs Linux 6.1"),
            (&["erofs"], (0, 0), true, Severity::Fail, "needs Linux 6.1"),
        ] {
            let found = check_image_mounts(missing, kernel, has_loop);
            assert!(found.severity == severity && found.message.contains(words), "{kernel:?}: {found}");
        }
    }

    #[test]
    fn each_kvm_verdict_has_its_message_and_severity() {
        for (verdict, words) in verdicts() {
            let hardware = matches!(verdict, KvmVerdict::Hardware { .. });
            let found = check_kvm(&verdict, AUTO);
            assert!(found.message.contains(words), "{found}");
            assert!(found.message.contains(if hardware { "engine kvm" } else { "pods run in QEMU" }), "{found}");
            assert!(found.severity == if hardware { Severity::Ok } else { Severity::Note }, "{found}");
            let found = check_kvm(&verdict, KVM);
            assert!(found.severity == if hardware { Severity::Ok } else { Severity::Fail }, "{found}");
            assert_eq!(found.message.contains("handler k has engine"), !hardware, "{found}");
        }
    }

    #[test]
    fn vhost_net_is_checked_for_engine_kvm_only() {
        let directory = tempfile::tempdir().unwrap();
        let (there, missing) = (directory.path().join("there"), directory.path().join("missing"));
        std::fs::write(&there, "").unwrap();
        for (verdict, _) in verdicts() {
            let hardware = matches!(verdict, KvmVerdict::Hardware { .. });
            assert!(check_vhost_net(&there, &verdict).severity == Severity::Ok);
            let found = check_vhost_net(&missing, &verdict);
            assert!(found.severity == if hardware { Severity::Note } else { Severity::Ok }, "{found}");
            assert_eq!(found.message.contains("load the module vhost_net"), hardware, "{found}");
        }
    }

    #[test]
    fn huge_pages_are_checked_for_hugetlb_handlers_only() {
        let usual = Handler { memory_mib: 16 << 20, ..Handler::default() };
        assert!(check_huge_pages("a", &usual).is_none());
        let found = check_huge_pages("h", &Handler { memory_pages: MemoryPages::Hugetlb, ..usual }).unwrap();
        assert!(
            found.severity == Severity::Note && found.message.contains("handler h: a VM with 16777216 MiB"),
            "{found}"
        );
    }

    #[test]
    fn engine_host_needs_the_agent() {
        let directory = tempfile::tempdir().unwrap();
        let agent = directory.path().join("nacelle-agent");
        let found = check_engine_host(&agent);
        assert!(
            found[0].severity == Severity::Fail && found[0].message.contains("install nacelle-agent"),
            "{}",
            found[0]
        );
        std::fs::write(&agent, "").unwrap();
        assert!(check_engine_host(&agent)[0].severity == Severity::Ok);
    }

    #[test]
    fn an_id_of_the_node_in_the_range_is_found() {
        let range = 70_000..=70_009;
        let passwd = "root:x:0:0:root:/root:/bin/sh\nme:x:70009:100::/:/bin/sh\nbad line\nx:x:-1:\n";
        assert_eq!(find_overlap(passwd, false, &range), Some("me:x:70009:100::/:/bin/sh"));
        assert_eq!(find_overlap(passwd, false, &(70_010..=80_000)), None);
        let subuid = "a:1000:100\nb:69000:1001\nc:1:18446744073709551615\n";
        assert_eq!(find_overlap(subuid, true, &range), Some("b:69000:1001"));
        assert_eq!(find_overlap("b:69000:1000\n", true, &range), None);
        assert_eq!(find_overlap("c:1:18446744073709551615\n", true, &range), Some("c:1:18446744073709551615"));
    }

    #[test]
    fn pod_processes_need_a_readable_kernel() {
        let kernel = tempfile::NamedTempFile::new().unwrap();
        let check = |for_all| check_guest_file("h", "kernel", kernel.path(), for_all, |_| Ok(()));
        let found = check(true);
        assert!(found.severity == Severity::Fail && found.message.contains("chmod o+r"), "{found}");
        assert!(check(false).severity == Severity::Ok);
        std::fs::set_permissions(kernel.path(), std::fs::Permissions::from_mode(0o644)).unwrap();
        assert!(check(true).severity == Severity::Ok);
        let found = check_guest_file("h", "initrd", kernel.path(), true, |file| {
            check_initrd(file).map_err(|error| Chain(&error).to_string())
        });
        let words = "neither a cpio archive nor compressed; install it again, or correct handlers.h.initrd";
        assert!(found.severity == Severity::Fail && found.message.contains(words), "{found}");
    }

    #[test]
    fn machine_pods_need_readable_firmware() {
        let code = tempfile::NamedTempFile::new().unwrap();
        let machines = MachineSettings {
            efi_code: code.path().to_owned(),
            efi_variables: "/nowhere/a".into(),
            efi_secure_code: "/nowhere/b".into(),
            efi_secure_variables: "/nowhere/c".into(),
        };
        let check = |user_count| check_firmware(&machines, &JailSettings { user_count, ..JailSettings::default() });
        let found = check(10);
        assert!(found.len() == 1 && found[0].message.contains("chmod o+r"), "{}", found.len());
        assert!(check(0).is_empty());
        std::fs::set_permissions(code.path(), std::fs::Permissions::from_mode(0o644)).unwrap();
        assert!(check(10).is_empty());
    }

    #[test]
    fn machine_pods_need_idmapped_mounts() {
        if !nix::unistd::geteuid().is_root() {
            return println!("skipped: not root");
        }
        let check = |root: &Path, user_count| {
            let paths = PathSettings { root: root.to_owned(), ..PathSettings::default() };
            check_owner_maps(&paths, &JailSettings { user_count, ..JailSettings::default() })
        };
        let found = check(Path::new("/sys/kernel/nowhere"), 10).unwrap();
        assert!(found.severity == Severity::Note && found.message.contains("ext4"), "{found}");
        assert!(found.message.contains("map the owners of files in /sys/kernel"), "{found}");
        assert!(check(Path::new("/sys"), 0).is_none());
    }

    #[test]
    fn qemu_is_checked_only_if_a_handler_uses_it() {
        let missing = Path::new("/nowhere/qemu");
        assert!(check_qemu(missing, false).severity == Severity::Ok);
        let found = check_qemu(missing, true);
        assert!(found.severity == Severity::Fail && found.message.contains("install qemu-system-x86"), "{found}");
    }
}
