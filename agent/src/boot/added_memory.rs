//! Brings memory into use that the VM did not have when its kernel booted, as a clone of a template may have, and raises the limits that
//! the kernel derived from the memory that it had then.

use nacelle_proto::agent::MemoryRange;
use nix::sys::resource::{Resource, getrlimit, rlim_t, setrlimit};
use std::fs;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use super::error::BootError;
use crate::memory::{HotplugMemory, MEMINFO, read_meminfo};

/// The sysctls whose values the kernel derives from its memory at boot: threads and what is bounded by their number, open files, and
/// memory for watches and sockets (kernel/fork.c, fs/file_table.c, fs/notify/inotify, fs/eventpoll.c, net/ipv4).
const SYSCTLS: [&str; 16] = [
    "kernel/threads-max",
    "user/max_user_namespaces",
    "user/max_pid_namespaces",
    "user/max_uts_namespaces",
    "user/max_ipc_namespaces",
    "user/max_net_namespaces",
    "user/max_mnt_namespaces",
    "user/max_cgroup_namespaces",
    "user/max_time_namespaces",
    "fs/file-max",
    "fs/inotify/max_user_watches",
    "fs/epoll/max_user_watches",
    "net/ipv4/tcp_mem",
    "net/ipv4/udp_mem",
    "net/ipv4/tcp_max_orphans",
    "net/ipv4/tcp_max_tw_buckets",
];
/// The sysctls of whose three numbers the kernel derives the last one from its memory, up to a bound in bytes (net/ipv4/tcp.c).
const SOCKET_BUFFERS: [(&str, u64); 2] = [("net/ipv4/tcp_rmem", 6 << 20), ("net/ipv4/tcp_wmem", 4 << 20)];
/// The limits of every process that the kernel derives from the number of threads.
const LIMITS: [Resource; 2] = [Resource::RLIMIT_NPROC, Resource::RLIMIT_SIGPENDING];

/// Brings the memory into use and raises the limits in the same proportion.
pub(super) fn add_memory(ranges: &[MemoryRange]) -> Result<(), BootError> {
    if ranges.is_empty() {
        return Ok(());
    }
    let total = || {
        let path = Path::new(MEMINFO);
        read_meminfo(path, "MemTotal").map_err(|source| BootError::File { path: path.to_owned(), source })
    };
    let range = |range: &MemoryRange| range.address..range.address.saturating_add(range.bytes);
    let ranges: Vec<Range<u64>> = ranges.iter().map(range).collect();
    let before = total()?;
    HotplugMemory::of_guest().add(&ranges).map_err(|source| BootError::Memory { source })?;
    let factor = Factor { before, after: total()? };
    raise_sysctls(Path::new("/proc/sys"), factor)?;
    for limit in LIMITS {
        let raise = || getrlimit(limit).and_then(|(soft, hard)| setrlimit(limit, factor.of(soft), factor.of(hard)));
        raise().map_err(|error| BootError::Limit { source: error.into() })?;
    }
    Ok(())
}

/// The proportion of the memory now to that at boot.
#[derive(Clone, Copy, Debug)]
struct Factor {
    before: u64,
    after: u64,
}

impl Factor {
    /// Returns the value in proportion; no limit stays none.
    fn of(self, value: rlim_t) -> rlim_t {
        let raised = u128::from(value) * u128::from(self.after) / u128::from(self.before.max(1));
        u64::try_from(raised).unwrap_or(u64::MAX).max(value)
    }
}

/// Raises the numbers of each sysctl. A kernel without one of them has nothing to raise.
fn raise_sysctls(root: &Path, factor: Factor) -> Result<(), BootError> {
    for name in SYSCTLS {
        change_sysctl(root.join(name), |_, number| factor.of(number))?;
    }
    for (name, bound) in SOCKET_BUFFERS {
        let raise = |position, number| if position == 2 { factor.of(number).min(bound).max(number) } else { number };
        change_sysctl(root.join(name), raise)?;
    }
    Ok(())
}

/// Changes each number of a sysctl, given its position.
fn change_sysctl(path: PathBuf, change: impl Fn(usize, u64) -> u64) -> Result<(), BootError> {
    let changed = || {
        let text = fs::read_to_string(&path)?;
        let numbers = text.split_whitespace().enumerate().map(|(position, word)| match word.parse() {
            Ok(number) => change(position, number).to_string(),
            Err(_) => word.to_owned(),
        });
        fs::write(&path, numbers.collect::<Vec<_>>().join(" "))
    };
    match changed() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        changed => changed.map_err(|source| BootError::File { path: path.clone(), source }),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn limits_grow_with_the_memory() {
        let root = tempfile::tempdir().unwrap();
        for name in ["kernel", "net/ipv4"] {
            fs::create_dir_all(root.path().join(name)).unwrap();
        }
        fs::write(root.path().join("kernel/threads-max"), "1000\n").unwrap();
        fs::write(root.path().join("net/ipv4/tcp_mem"), "10\t20\t30\n").unwrap();
        fs::write(root.path().join("net/ipv4/tcp_rmem"), "4096\t131072\t2097152\n").unwrap();
        fs::write(root.path().join("net/ipv4/tcp_wmem"), "4096\t131072\t2097152\n").unwrap();
        raise_sysctls(root.path(), Factor { before: 200, after: 500 }).unwrap();
        assert_eq!(fs::read_to_string(root.path().join("kernel/threads-max")).unwrap(), "2500");
        assert_eq!(fs::read_to_string(root.path().join("net/ipv4/tcp_mem")).unwrap(), "25 50 75");
        assert_eq!(fs::read_to_string(root.path().join("net/ipv4/tcp_rmem")).unwrap(), "4096 131072 5242880");
        assert_eq!(fs::read_to_string(root.path().join("net/ipv4/tcp_wmem")).unwrap(), "4096 131072 4194304");
        let factor = Factor { before: 1, after: 8 };
        assert_eq!((factor.of(u64::MAX), factor.of(u64::MAX / 4), factor.of(3)), (u64::MAX, u64::MAX, 24));
    }
}
