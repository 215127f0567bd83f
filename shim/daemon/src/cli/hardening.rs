//! Checks the settings of the node that matter when its pods belong to tenants who attack each other: docs/operator/hardening.md. None
//! of them prevents pods from running, except namespaces that the kernel does not allow.

use super::finding::{Finding, Severity, finding};
use std::path::Path;

/// The namespaces that each pod process creates, by the names of their limits in /proc/sys/user.
const NAMESPACES: [&str; 6] = ["cgroup", "ipc", "mnt", "net", "pid", "uts"];

/// Settings of /proc/sys, the least value that protects, and what a lower value allows.
const SYSCTLS: [(&str, u32, &str); 4] = [
    ("kernel.unprivileged_bpf_disabled", 1, "programs without root load BPF"),
    ("kernel.perf_event_paranoid", 2, "programs without root measure the kernel"),
    ("kernel.kptr_restrict", 1, "programs without root read kernel addresses"),
    ("kernel.dmesg_restrict", 1, "programs without root read the kernel's log"),
];

/// Checks the node whose file systems are below `root`.
pub(super) fn check_hardening(root: &Path) -> Vec<Finding> {
    let read = |path: &str| std::fs::read_to_string(root.join(path)).ok().map(|text| text.trim().to_owned());
    vec![
        check_namespaces(&read),
        check_landlock(&read),
        check_cpu_bugs(root),
        check_smt(&read),
        check_page_merging(&read),
        check_nested(&read),
        check_sysctls(&read),
    ]
}

fn check_namespaces(read: &impl Fn(&str) -> Option<String>) -> Finding {
    let is_zero = |name: &str| read(&format!("proc/sys/user/max_{name}_namespaces")).is_some_and(|text| text == "0");
    match NAMESPACES.iter().find(|name| is_zero(name)) {
        None => finding(Severity::Ok, "spaces", "the kernel allows the namespaces of pod processes"),
        Some(name) => {
            let key = format!("user.max_{name}_namespaces");
            finding(Severity::Fail, "spaces", format!("{key} is 0, and each pod process needs one; raise it by sysctl"))
        }
    }
}

fn check_landlock(read: &impl Fn(&str) -> Option<String>) -> Finding {
    let release = read("proc/sys/kernel/osrelease").unwrap_or_default();
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|number| number.parse::<u32>().unwrap_or(0));
    let is_new = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) >= (6, 12);
    // Without securityfs the list is unknown.
    let modules = read("sys/kernel/security/lsm");
    match (is_new, modules.is_none_or(|list| list.split(',').any(|module| module == "landlock"))) {
        (true, true) => finding(Severity::Ok, "landlock", "limits signals and abstract sockets of pod processes"),
        (false, _) => {
            let why = "before Linux 6.12 Landlock does not limit signals and abstract sockets of pod processes";
            finding(Severity::Note, "landlock", format!("{release}: {why}"))
        }
        (true, false) => {
            let advice = "add landlock to the kernel parameter lsm=";
            finding(Severity::Note, "landlock", format!("not enabled, so it does not limit pod processes; {advice}"))
        }
    }
}

/// Returns whether the kernel reports that a vulnerability has no mitigation, as a whole or in a part:
/// "Vulnerable", "KVM: Vulnerable", "Mitigation: PTE Inversion; VMX: vulnerable" (Documentation/admin-guide/hw-vuln). A remark about SMT is
/// the subject of another finding.
fn is_vulnerable(text: &str) -> bool {
    text.contains("Vulnerable") || text.contains("VMX: vulnerable")
}

fn check_cpu_bugs(root: &Path) -> Finding {
    let directory = root.join("sys/devices/system/cpu/vulnerabilities");
    let mut open: Vec<String> = std::fs::read_dir(directory)
        .into_iter()
        .flatten()
        .flatten()
        .filter(|entry| std::fs::read_to_string(entry.path()).is_ok_and(|text| is_vulnerable(&text)))
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    open.sort();
    if open.is_empty() {
        return finding(Severity::Ok, "cpu", "the kernel reports no CPU vulnerability without a mitigation");
    }
    let advice = "update microcode and kernel, and boot without mitigations=off";
    finding(
        Severity::Note,
        "cpu",
        format!("vulnerable: {}; a guest may read foreign memory: {advice}", open.join(", ")),
    )
}

fn check_smt(read: &impl Fn(&str) -> Option<String>) -> Finding {
    match read("sys/devices/system/cpu/smt/active").as_deref() {
        Some("1") => {
            let advice =
                "for hostile tenants boot with nosmt, or give each pod whole cores (vm.nacelle.dev/cpu-pinning)";
            finding(Severity::Note, "smt", format!("vCPUs of two pods may share a core; {advice}"))
        }
        _ => finding(Severity::Ok, "smt", "no core has two threads"),
    }
}

fn check_page_merging(read: &impl Fn(&str) -> Option<String>) -> Finding {
    match read("sys/kernel/mm/ksm/run").as_deref() {
        Some("1") => {
            let message = "KSM merges equal pages of VMs, by which one finds out what another contains; write 2 to /sys/kernel/mm/ksm/run";
            finding(Severity::Note, "ksm", message)
        }
        _ => finding(Severity::Ok, "ksm", "pages of VMs are not merged"),
    }
}

fn check_nested(read: &impl Fn(&str) -> Option<String>) -> Finding {
    let module = ["kvm_intel", "kvm_amd"].into_iter().find(|module| {
        read(&format!("sys/module/{module}/parameters/nested")).is_some_and(|value| value == "Y" || value == "1")
    });
    match module {
        None => finding(Severity::Ok, "nested", "KVM offers guests no nested virtualization"),
        Some(module) => {
            let message =
                format!("guests may use nested virtualization; unless they need it, load {module} with nested=0");
            finding(Severity::Note, "nested", message)
        }
    }
}

fn check_sysctls(read: &impl Fn(&str) -> Option<String>) -> Finding {
    let is_low = |(name, least, _): &&(&str, u32, &str)| {
        let value = read(&format!("proc/sys/{}", name.replace('.', "/"))).and_then(|text| text.parse::<i64>().ok());
        value.is_some_and(|value| value < i64::from(*least))
    };
    let low: Vec<_> = SYSCTLS.iter().filter(is_low).collect();
    if low.is_empty() {
        return finding(Severity::Ok, "sysctl", "the kernel protects itself from programs without root");
    }
    let words: Vec<_> = low.iter().map(|(name, least, why)| format!("{why}: set {name} = {least}")).collect();
    finding(Severity::Note, "sysctl", words.join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// A node whose files have these contents.
    fn node(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, content) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, format!("{content}\n")).unwrap();
        }
        root
    }

    fn findings(files: &[(&str, &str)]) -> Vec<Finding> {
        check_hardening(node(files).path())
    }

    fn named(files: &[(&str, &str)], subject: &str) -> (bool, String) {
        let found = findings(files).into_iter().find(|found| found.subject == subject).unwrap();
        (found.severity == Severity::Ok, found.message)
    }

    #[test]
    fn a_hardened_node_has_no_notes() {
        let hardened = [
            ("proc/sys/kernel/osrelease", "6.12.43+deb13"),
            ("sys/kernel/security/lsm", "capability,landlock,apparmor"),
            ("sys/devices/system/cpu/vulnerabilities/meltdown", "Not affected"),
            ("sys/devices/system/cpu/vulnerabilities/spectre_v2", "Mitigation: Enhanced IBRS"),
            ("sys/devices/system/cpu/vulnerabilities/mds", "Mitigation: Clear CPU buffers; SMT vulnerable"),
            ("sys/devices/system/cpu/smt/active", "0"),
            ("sys/kernel/mm/ksm/run", "0"),
            ("sys/module/kvm_intel/parameters/nested", "N"),
            ("proc/sys/kernel/unprivileged_bpf_disabled", "2"),
            ("proc/sys/kernel/perf_event_paranoid", "3"),
            ("proc/sys/kernel/kptr_restrict", "1"),
            ("proc/sys/kernel/dmesg_restrict", "1"),
            ("proc/sys/user/max_pid_namespaces", "31000"),
        ];
        assert!(findings(&hardened).iter().all(|found| found.severity == Severity::Ok));
    }

    #[test]
    fn each_weakness_is_named_with_its_remedy() {
        for (file, content, subject, words) in [
            ("sys/kernel/security/lsm", "capability,apparmor", "landlock", "lsm="),
            ("sys/devices/system/cpu/vulnerabilities/mds", "Vulnerable; SMT vulnerable", "cpu", "mds"),
            ("sys/devices/system/cpu/vulnerabilities/itlb_multihit", "KVM: Vulnerable", "cpu", "itlb_multihit"),
            (
                "sys/devices/system/cpu/vulnerabilities/spectre_v2",
                "Mitigation: IBRS; BHI: Vulnerable",
                "cpu",
                "spectre_v2",
            ),
            (
                "sys/devices/system/cpu/vulnerabilities/l1tf",
                "Mitigation: PTE Inversion; VMX: vulnerable",
                "cpu",
                "l1tf",
            ),
            ("sys/devices/system/cpu/smt/active", "1", "smt", "nosmt"),
            ("sys/kernel/mm/ksm/run", "1", "ksm", "/sys/kernel/mm/ksm/run"),
            ("sys/module/kvm_amd/parameters/nested", "1", "nested", "kvm_amd with nested=0"),
            ("proc/sys/kernel/perf_event_paranoid", "-1", "sysctl", "kernel.perf_event_paranoid = 2"),
        ] {
            let (is_ok, message) = named(&[("proc/sys/kernel/osrelease", "6.12.1"), (file, content)], subject);
            assert!(!is_ok && message.contains(words), "{subject}: {message}");
        }
        let (is_ok, message) = named(&[("proc/sys/kernel/osrelease", "6.1.0-30-amd64")], "landlock");
        assert!(!is_ok && message.starts_with("6.1.0-30-amd64: before Linux 6.12"), "{message}");
    }

    #[test]
    fn no_pod_runs_without_namespaces() {
        let found = findings(&[("proc/sys/user/max_pid_namespaces", "0")]);
        let fails: Vec<_> = found.iter().filter(|found| found.severity == Severity::Fail).collect();
        assert_eq!(fails.len(), 1);
        assert!(fails[0].message.contains("user.max_pid_namespaces is 0"), "{}", fails[0]);
    }
}
