//! Names the capabilities of Linux (capabilities(7)).

/// All capabilities of Linux 6.12 in the kernel's order, without "CAP_".
pub const ALL: [&str; 41] = [
    "CHOWN",
    "DAC_OVERRIDE",
    "DAC_READ_SEARCH",
    "FOWNER",
    "FSETID",
    "KILL",
    "SETGID",
    "SETUID",
    "SETPCAP",
    "LINUX_IMMUTABLE",
    "NET_BIND_SERVICE",
    "NET_BROADCAST",
    "NET_ADMIN",
    "NET_RAW",
    "IPC_LOCK",
    "IPC_OWNER",
    "SYS_MODULE",
    "SYS_RAWIO",
    "SYS_CHROOT",
    "SYS_PTRACE",
    "SYS_PACCT",
    "SYS_ADMIN",
    "SYS_BOOT",
    "SYS_NICE",
    "SYS_RESOURCE",
    "SYS_TIME",
    "SYS_TTY_CONFIG",
    "MKNOD",
    "LEASE",
    "AUDIT_WRITE",
    "AUDIT_CONTROL",
    "SETFCAP",
    "MAC_OVERRIDE",
    "MAC_ADMIN",
    "SYSLOG",
    "WAKE_ALARM",
    "BLOCK_SUSPEND",
    "AUDIT_READ",
    "PERFMON",
    "BPF",
    "CHECKPOINT_RESTORE",
];

/// Returns the name as the kernel writes it, in upper case and without "CAP_".
pub fn normalize(name: &str) -> String {
    let name = name.to_ascii_uppercase();
    name.strip_prefix("CAP_").map(str::to_owned).unwrap_or(name)
}

/// Returns whether Linux has this capability, or the name is "ALL". The name must be normalized.
pub fn is_known(name: &str) -> bool {
    name == "ALL" || ALL.contains(&name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_in_every_spelling() {
        for name in ["net_admin", "CAP_NET_ADMIN", "cap_net_admin"] {
            assert_eq!(normalize(name), "NET_ADMIN");
        }
        assert!(is_known("ALL") && is_known("BPF") && !is_known("FLY") && !is_known("CAP_BPF"));
    }
}
