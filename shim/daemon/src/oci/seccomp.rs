//! Builds the default seccomp profile, the meaning of RuntimeDefault. The list is data (`seccomp.json`); each of its groups has
//! the reason for its inclusion.

use serde::Deserialize;
use serde_json::{Value, json};

/// CLONE_NEWNS | NEWCGROUP | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET: flags that create a namespace.
const CLONE_NAMESPACES: u64 = 0x7e02_0000;
/// The socket families of kernel crypto, and of the VM's channel to its host (vsock).
const AF_ALG: u64 = 38;
const AF_VSOCK: u64 = 40;
const ENOSYS: u32 = 38;
const EPERM: u32 = 1;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SyscallGroup {
    why: String,
    /// Capabilities of which the container must have at least one; `None`: no condition.
    #[serde(default)]
    with: Vec<String>,
    names: Vec<String>,
}

fn read_groups() -> Vec<SyscallGroup> {
    serde_json::from_str(include_str!("seccomp.json")).unwrap_or_default()
}

/// Returns the profile for a container with these capabilities ("CAP_...").
pub fn default_profile(capabilities: &[String]) -> Value {
    let allow = |names: Value, args: Value| json!({ "names": names, "action": "SCMP_ACT_ALLOW", "args": args });
    let has = |name: &str| capabilities.iter().any(|each| each.strip_prefix("CAP_") == Some(name));
    let mut calls: Vec<Value> = read_groups()
        .into_iter()
        // A call without a reason is not allowed.
        .filter(|group| !group.why.is_empty())
        .filter(|group| group.with.is_empty() || group.with.iter().any(|name| has(name)))
        .map(|group| allow(json!(group.names), json!([])))
        .collect();
    let argument = |value: u64, op: &str| json!([{ "index": 0, "value": value, "op": op }]);
    // The socket families below, between and above the two that are rejected.
    calls.push(allow(json!(["socket"]), argument(AF_ALG, "SCMP_CMP_LT")));
    calls.push(allow(json!(["socket"]), argument(AF_ALG + 1, "SCMP_CMP_EQ")));
    calls.push(allow(json!(["socket"]), argument(AF_VSOCK, "SCMP_CMP_GT")));
    for persona in [0, 0x8, 0x2_0000, 0x2_0008, 0xffff_ffff] {
        calls.push(allow(json!(["personality"]), argument(persona, "SCMP_CMP_EQ")));
    }
    if has("SYS_ADMIN") {
        calls.push(allow(json!(["clone", "clone3"]), json!([])));
    } else {
        let masked = json!([{ "index": 0, "value": CLONE_NAMESPACES, "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ" }]);
        calls.push(allow(json!(["clone"]), masked));
        // The flags of clone3 lie in memory, which a filter cannot read; ENOSYS makes libraries fall back to clone.
        calls.push(json!({ "names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": ENOSYS }));
    }
    json!({
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": EPERM,
        "architectures": ["SCMP_ARCH_X86_64", "SCMP_ARCH_X86", "SCMP_ARCH_X32"],
        "syscalls": calls,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn names(profile: &Value) -> BTreeSet<String> {
        let calls = profile["syscalls"].as_array().unwrap();
        let allowed = calls.iter().filter(|call| call["action"] == "SCMP_ACT_ALLOW");
        allowed.flat_map(|call| call["names"].as_array().unwrap()).map(|n| n.as_str().unwrap().to_owned()).collect()
    }

    #[test]
    fn every_group_has_a_reason_and_no_call_stands_twice() {
        let groups = read_groups();
        assert!(!groups.is_empty());
        let mut seen = BTreeSet::new();
        for group in &groups {
            assert!(!group.why.is_empty() && !group.names.is_empty());
            for name in group.with.iter() {
                assert!(nacelle_model::capability::is_known(name), "{name}");
            }
            if group.with.is_empty() {
                group.names.iter().for_each(|name| assert!(seen.insert(name.clone()), "{name} twice"));
            }
        }
    }

    #[test]
    fn what_every_program_needs_is_there_and_what_none_may_is_not() {
        let plain = names(&default_profile(&[]));
        for name in
            ["read", "execve", "openat2", "futex", "rseq", "statx", "epoll_pwait2", "landlock_add_rule", "clone"]
        {
            assert!(plain.contains(name), "{name}");
        }
        for name in [
            "mount",
            "reboot",
            "init_module",
            "bpf",
            "ptrace_me",
            "kexec_load",
            "unshare",
            "setns",
            "clone3",
            "add_key",
            "keyctl",
            "userfaultfd",
            "open_by_handle_at",
            "swapon",
            "settimeofday",
            "clock_settime",
        ] {
            assert!(!plain.contains(name), "{name}");
        }
        for name in ["adjtimex", "clock_adjtime", "chown32", "fchown32", "lchown32"] {
            assert!(plain.contains(name), "{name}");
        }
        let admin = names(&default_profile(&["CAP_SYS_ADMIN".into()]));
        assert!(admin.contains("mount") && admin.contains("clone3") && !admin.contains("reboot"));
    }

    /// System calls of i386 with wider ids, offsets or times, and those that x86-64 has for the same.
    const I386_TWINS: &str = "chown32 clock_adjtime64 clock_getres_time64 clock_gettime64 clock_nanosleep_time64 \
        clock_settime64 fadvise64_64 fchown32 fcntl64 fstat64 fstatfs64 ftruncate64 futex_time64 getegid32 geteuid32 getgid32 \
        getgroups32 getresgid32 getresuid32 getuid32 io_pgetevents_time64 lchown32 lstat64 mq_timedreceive_time64 \
        mq_timedsend_time64 ppoll_time64 pselect6_time64 recvmmsg_time64 rt_sigtimedwait_time64 sched_rr_get_interval_time64 \
        semtimedop_time64 sendfile64 setfsgid32 setfsuid32 setgid32 setgroups32 setregid32 setresgid32 setresuid32 setreuid32 \
        setuid32 stat64 statfs64 timer_gettime64 timer_settime64 timerfd_gettime64 timerfd_settime64 truncate64 \
        utimensat_time64";

    #[test]
    fn programs_of_32_bits_may_make_the_same_calls() {
        for capabilities in [&[][..], &["CAP_SYS_TIME".to_owned()]] {
            let allowed = names(&default_profile(capabilities));
            for twin in I386_TWINS.split_whitespace() {
                let suffix = ["_time64", "_64", "64", "32"].into_iter().find_map(|suffix| twin.strip_suffix(suffix));
                assert_eq!(allowed.contains(suffix.unwrap()), allowed.contains(twin), "{twin}");
            }
        }
    }

    #[test]
    fn it_is_an_oci_profile() {
        let profile: oci_spec::runtime::LinuxSeccomp = serde_json::from_value(default_profile(&[])).unwrap();
        assert_eq!(profile.default_errno_ret(), Some(1));
    }
}
