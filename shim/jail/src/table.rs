//! Lists the system calls of each kind of thread as data: the call, the arguments, and the reason. A kind's table is
//! composed of the sets below; the first thread's table contains all of them, because filters are inherited.

use crate::ThreadKind;
use libc as c;

/// One entry: a call that is allowed (or, in [`forbidden`], one that is not).
#[derive(Clone, Copy, Debug)]
pub struct Allow {
    /// The number of the call on x86-64.
    pub syscall: i64,
    /// The allowed arguments.
    pub only: Only,
    /// What needs the call.
    pub why: &'static str,
}

/// The arguments with which a call is allowed. Only their lower 32 bits are compared, because the kernel uses only those.
#[derive(Clone, Copy, Debug)]
pub enum Only {
    /// All arguments are allowed.
    Always,
    /// The argument with this index is one of these values.
    Arg(u8, &'static [u64]),
    /// The argument with this index is the pid of this process.
    Own(u8),
    /// The argument with this index, masked with the second number, equals the third.
    Masked(u8, u64, u64),
}

impl Only {
    /// Returns the index of the argument that is compared.
    pub(crate) fn argument(self) -> u8 {
        match self {
            Only::Always => 0,
            Only::Arg(argument, _) | Only::Own(argument) | Only::Masked(argument, _, _) => argument,
        }
    }
}

const fn always(syscall: i64, why: &'static str) -> Allow {
    Allow { syscall, only: Only::Always, why }
}

/// One ioctl, by type and number: the lower half of the request.
const fn ioctl(number: u64, why: &'static str) -> Allow {
    Allow { syscall: c::SYS_ioctl, only: Only::Masked(1, 0xffff, number), why }
}

/// All ioctls of a type.
const fn ioctls(letter: u8, why: &'static str) -> Allow {
    Allow { syscall: c::SYS_ioctl, only: Only::Masked(1, 0xff00, (letter as u64) << 8), why }
}

const KVM: u8 = 0xae;
const VHOST: u8 = 0xaf;
const EXEC: u64 = c::PROT_EXEC as u64;
/// `PR_SET_VMA`, with which allocators name their mappings.
const PR_SET_VMA: u64 = 0x5356_4d41;

/// The calls of every Rust thread.
const LIFE: &[Allow] = &[
    always(c::SYS_futex, "locks, channels, joins"),
    always(c::SYS_sched_yield, "a lock that is held for moments"),
    always(c::SYS_clock_gettime, "where the vDSO has no clock"),
    always(c::SYS_clock_nanosleep, "short waits"),
    always(c::SYS_nanosleep, "short waits"),
    always(c::SYS_restart_syscall, "a wait goes on after a stop"),
    always(c::SYS_rt_sigreturn, "the end of a signal's handler"),
    always(c::SYS_rt_sigaction, "abort takes back its handler"),
    always(c::SYS_rt_sigprocmask, "signals of a thread at its start and end"),
    always(c::SYS_sigaltstack, "the stack on which a stack overflow is told"),
    always(c::SYS_rseq, "the C library, at the start of a thread"),
    always(c::SYS_set_robust_list, "the C library, at the start of a thread"),
    always(c::SYS_set_tid_address, "the C library, at the start of a thread"),
    always(c::SYS_sched_getaffinity, "the C library, to find a thread's stack"),
    Allow {
        syscall: c::SYS_prctl,
        only: Only::Arg(0, &[c::PR_SET_NAME as u64, c::PR_SET_NO_NEW_PRIVS as u64, PR_SET_VMA]),
        why: "the thread's name; filters; names of mappings",
    },
    always(c::SYS_seccomp, "a thread's own filter: it can only forbid more"),
    Allow { syscall: c::SYS_mmap, only: Only::Masked(2, EXEC, 0), why: "memory, but no new code" },
    Allow { syscall: c::SYS_mprotect, only: Only::Masked(2, EXEC, 0), why: "heaps grow, but no new code" },
    always(c::SYS_munmap, "memory is given back"),
    always(c::SYS_mremap, "large buffers grow"),
    always(c::SYS_madvise, "memory is given back"),
    always(c::SYS_brk, "the heap"),
    always(c::SYS_getrandom, "seeds of hash tables, random bytes"),
    always(c::SYS_gettid, "the thread's number, for abort and logs"),
    always(c::SYS_getpid, "the process's number, for abort and signals"),
    Allow { syscall: c::SYS_tgkill, only: Only::Own(0), why: "abort; waking a processor's thread" },
    always(c::SYS_write, "log lines; eventfds"),
    always(c::SYS_read, "eventfds"),
    always(c::SYS_close, "descriptors are given back"),
    Allow {
        syscall: c::SYS_fcntl,
        only: Only::Arg(1, &[c::F_GETFD as u64]),
        why: "std, built for debugging: whether a descriptor is open that is to be closed",
    },
    always(c::SYS_exit, "the end of a thread"),
    always(c::SYS_exit_group, "the end of the process"),
];

/// Waiting for descriptors.
const WAIT: &[Allow] = &[
    always(c::SYS_poll, "waiting for kicks and streams"),
    always(c::SYS_ppoll, "waiting for kicks and streams"),
    always(c::SYS_epoll_wait, "waiting for many descriptors"),
    always(c::SYS_epoll_pwait, "waiting for many descriptors"),
    always(c::SYS_epoll_ctl, "what is waited for"),
];

/// Starting threads. The flags of clone3 lie in memory, where a filter cannot check them; but a process that it creates
/// could execute nothing.
const SPAWN: &[Allow] = &[
    always(c::SYS_clone3, "a thread starts"),
    Allow {
        syscall: c::SYS_clone,
        only: Only::Masked(0, c::CLONE_THREAD as u64, c::CLONE_THREAD as u64),
        why: "a thread starts, where the C library does not use clone3",
    },
    always(c::SYS_prlimit64, "the size of a thread's stack"),
    always(c::SYS_eventfd2, "a thread is told to stop"),
    always(c::SYS_epoll_create1, "a thread waits for many descriptors"),
    always(c::SYS_fcntl, "copies of descriptors, close-on-exec"),
];

/// Reading and writing open files: disks, taps, the console.
const DATA: &[Allow] = &[
    always(c::SYS_readv, "frames from a tap, blocks"),
    always(c::SYS_writev, "frames to a tap, blocks"),
    always(c::SYS_pread64, "blocks of a disk"),
    always(c::SYS_pwrite64, "blocks of a disk"),
    always(c::SYS_preadv, "blocks of a disk"),
    always(c::SYS_pwritev, "blocks of a disk"),
    always(c::SYS_preadv2, "blocks of a disk"),
    always(c::SYS_pwritev2, "blocks of a disk"),
    always(c::SYS_fdatasync, "a disk's flush"),
    always(c::SYS_fsync, "a disk's flush"),
    always(c::SYS_fallocate, "discard and write-zeroes"),
    ioctls(0x12, "discard and write-zeroes of a block device"),
];

/// Streams over open Unix sockets.
const STREAM: &[Allow] = &[
    always(c::SYS_recvfrom, "bytes of a stream"),
    always(c::SYS_sendto, "bytes of a stream"),
    always(c::SYS_recvmsg, "bytes of a stream, descriptors of a front end"),
    always(c::SYS_sendmsg, "bytes of a stream"),
    always(c::SYS_readv, "bytes of a stream"),
    always(c::SYS_writev, "bytes of a stream"),
    always(c::SYS_shutdown, "one end of a stream ends"),
    always(c::SYS_getsockopt, "the error of a stream"),
    always(c::SYS_setsockopt, "buffers and time limits of a stream"),
    always(c::SYS_fcntl, "streams that do not block"),
    ioctl(c::FIONBIO, "streams that do not block"),
    ioctl(c::FIONREAD, "how much can be read"),
];

/// Creating Unix sockets.
const SOCKET: &[Allow] = &[
    Allow { syscall: c::SYS_socket, only: Only::Arg(0, &[c::AF_UNIX as u64]), why: "unix sockets" },
    Allow { syscall: c::SYS_socketpair, only: Only::Arg(0, &[c::AF_UNIX as u64]), why: "a connection of the guest" },
    always(c::SYS_bind, "the pod's socket"),
    always(c::SYS_listen, "the pod's socket"),
    always(c::SYS_connect, "unix sockets"),
    always(c::SYS_accept4, "a connection of the daemon or of a front end"),
    always(c::SYS_getsockname, "the address of a socket"),
    always(c::SYS_getpeername, "the address of a socket"),
];

/// Opening files by name, of which the jail leaves few.
const FILES: &[Allow] = &[
    always(c::SYS_open, "files of the pod, its logs, images"),
    always(c::SYS_openat, "files of the pod, its logs, images"),
    always(c::SYS_openat2, "files of the pod, its logs, images"),
    always(c::SYS_stat, "what a file is"),
    always(c::SYS_fstat, "what a file is"),
    always(c::SYS_lstat, "what a file is"),
    always(c::SYS_newfstatat, "what a file is"),
    always(c::SYS_statx, "what a file is"),
    always(c::SYS_fstatfs, "what a file system is"),
    always(c::SYS_access, "whether a file is there"),
    always(c::SYS_faccessat, "whether a file is there"),
    always(c::SYS_faccessat2, "whether a file is there"),
    always(c::SYS_readlink, "where a link leads"),
    always(c::SYS_readlinkat, "where a link leads"),
    always(c::SYS_getdents64, "what a directory has"),
    always(c::SYS_lseek, "lengths and holes"),
    always(c::SYS_mkdir, "directories of logs"),
    always(c::SYS_mkdirat, "directories of logs"),
    always(c::SYS_rename, "the record is written whole"),
    always(c::SYS_renameat, "the record is written whole"),
    always(c::SYS_renameat2, "the record is written whole"),
    always(c::SYS_unlink, "sockets, disks and drafts are removed"),
    always(c::SYS_unlinkat, "sockets, disks and drafts are removed"),
    always(c::SYS_rmdir, "a directory is removed"),
    always(c::SYS_chmod, "the socket is its owner's"),
    always(c::SYS_fchmod, "the socket is its owner's"),
    always(c::SYS_fchmodat, "the socket is its owner's"),
    always(c::SYS_ftruncate, "a disk gets its size"),
    always(c::SYS_flock, "a file that is one process's"),
    always(c::SYS_copy_file_range, "a copy of a file"),
    always(c::SYS_umask, "modes of new files"),
    always(c::SYS_getcwd, "where relative names begin"),
];

/// Writing the guest's console to a file of bounded size.
const CONSOLE: &[Allow] = &[
    always(c::SYS_lseek, "the console's log keeps its newest half"),
    always(c::SYS_ftruncate, "the console's log keeps its newest half"),
    always(c::SYS_statx, "the length of that half"),
];

/// Sharing a virtqueue with another process.
const LENDING: &[Allow] = &[
    always(c::SYS_sendmsg, "its descriptors are sent"),
    Allow {
        syscall: c::SYS_fcntl,
        only: Only::Arg(1, &[c::F_DUPFD_CLOEXEC as u64]),
        why: "a copy of its interrupt for the other process",
    },
];

/// Using the guest memory of another program by a descriptor.
const MEMORY: &[Allow] = &[
    always(c::SYS_fstat, "how large it is"),
    always(c::SYS_statx, "how large it is"),
    always(c::SYS_fcntl, "whether it is sealed"),
];

/// Reconfiguring a network interface while it runs.
const NETWORK: &[Allow] = &[
    ioctls(VHOST, "a network queue that the kernel serves"),
    ioctl(0x54d0, "TUNSETOFFLOAD: what the guest's network driver can do"),
    ioctl(0x54d9, "TUNSETQUEUE: a queue of a tap is used or not"),
];

/// Creating a VM in this process: memory, KVM, taps.
const MACHINE: &[Allow] = &[
    ioctls(KVM, "the machine is made, saved and restored"),
    ioctl(0x54d2, "TUNGETIFF: what sort of tap it is"),
    ioctl(0x54d8, "TUNSETVNETHDRSZ: the header before each frame"),
    always(c::SYS_memfd_create, "guest memory that is shared"),
    always(c::SYS_fallocate, "guest memory that is given back"),
    always(c::SYS_mbind, "where guest memory lies"),
    always(c::SYS_sched_setaffinity, "where a processor runs"),
];

/// Running one vCPU.
const VCPU: &[Allow] = &[
    ioctl(0xae80, "KVM_RUN: the processor's loop"),
    ioctl(0xaead, "KVM_KVMCLOCK_CTRL: the guest was paused"),
    ioctl(0xae61, "KVM_IRQ_LINE: an interrupt of the bus"),
    ioctl(0xae81, "KVM_GET_REGS: the processor is saved"),
    ioctl(0xae82, "KVM_SET_REGS: the processor is made or restored"),
    ioctl(0xae83, "KVM_GET_SREGS: the processor is saved"),
    ioctl(0xae84, "KVM_SET_SREGS: the processor is made or restored"),
    ioctl(0xae88, "KVM_GET_MSRS: the processor is saved"),
    ioctl(0xae89, "KVM_SET_MSRS: the processor is made or restored"),
    ioctl(0xae8c, "KVM_GET_FPU: the processor is saved"),
    ioctl(0xae8d, "KVM_SET_FPU: the processor is made or restored"),
    ioctl(0xae8e, "KVM_GET_LAPIC: the processor is saved"),
    ioctl(0xae8f, "KVM_SET_LAPIC: the processor is made or restored"),
    ioctl(0xae90, "KVM_SET_CPUID2: the processor is made or restored"),
    ioctl(0xae91, "KVM_GET_CPUID2: the processor is saved"),
    ioctl(0xae98, "KVM_GET_MP_STATE: the processor is saved"),
    ioctl(0xae99, "KVM_SET_MP_STATE: the processor is restored"),
    ioctl(0xae9f, "KVM_GET_VCPU_EVENTS: the processor is saved"),
    ioctl(0xaea0, "KVM_SET_VCPU_EVENTS: the processor is restored"),
    ioctl(0xaea1, "KVM_GET_DEBUGREGS: the processor is saved"),
    ioctl(0xaea2, "KVM_SET_DEBUGREGS, KVM_SET_TSC_KHZ: the processor is restored"),
    ioctl(0xaea3, "KVM_GET_TSC_KHZ: the processor is saved"),
    ioctl(0xaea4, "KVM_GET_XSAVE: the processor is saved"),
    ioctl(0xaea5, "KVM_SET_XSAVE: the processor is restored"),
    ioctl(0xaea6, "KVM_GET_XCRS: the processor is saved"),
    ioctl(0xaea7, "KVM_SET_XCRS: the processor is restored"),
    ioctl(0xaecf, "KVM_GET_XSAVE2: the processor is saved"),
    always(c::SYS_sched_setaffinity, "where a processor runs"),
];

/// Starting a virtqueue, which happens on the vCPU thread when the guest writes to a register.
const QUEUES: &[Allow] = &[
    Allow {
        syscall: c::SYS_fcntl,
        only: Only::Arg(1, &[c::F_DUPFD_CLOEXEC as u64, c::F_GETFL as u64, c::F_SETFL as u64]),
        why: "a queue has its own copy of its eventfds, and does not block on them",
    },
    always(c::SYS_eventfd2, "a queue's thread is told to stop"),
];

/// The calls of the first thread only.
const MAIN: &[Allow] = &[
    always(c::SYS_uname, "the kernel's version"),
    always(c::SYS_sysinfo, "the C library, before it sorts"),
    always(c::SYS_getuid, "who runs this"),
    always(c::SYS_geteuid, "who runs this"),
    always(c::SYS_getgid, "who runs this"),
    always(c::SYS_getegid, "who runs this"),
    always(c::SYS_getppid, "whose child this is"),
    always(c::SYS_getrlimit, "the limits of the process"),
    always(c::SYS_getrusage, "what the process has used"),
    always(c::SYS_clock_getres, "how fine a clock is"),
    always(c::SYS_gettimeofday, "where the vDSO has no clock"),
    always(c::SYS_dup, "copies of descriptors"),
    always(c::SYS_dup2, "copies of descriptors"),
    always(c::SYS_dup3, "copies of descriptors"),
    always(c::SYS_pipe2, "signals reach the runtime"),
    always(c::SYS_timerfd_create, "timers"),
    always(c::SYS_timerfd_settime, "timers"),
    always(c::SYS_membarrier, "locks that are cheap for readers"),
];

/// Returns the allowed system calls of a kind.
pub fn table(kind: ThreadKind) -> impl Iterator<Item = &'static Allow> {
    let sets: &[&[Allow]] = match kind {
        ThreadKind::Main => &[LIFE, WAIT, SPAWN, DATA, STREAM, SOCKET, FILES, NETWORK, MACHINE, VCPU, MAIN],
        ThreadKind::Blocking => &[LIFE, WAIT, SPAWN, DATA, STREAM, SOCKET, FILES, NETWORK, MACHINE],
        ThreadKind::Machine => &[LIFE, WAIT, SPAWN, DATA, STREAM, SOCKET, FILES, NETWORK, MACHINE, VCPU],
        ThreadKind::Vcpu => &[LIFE, VCPU, QUEUES, NETWORK, CONSOLE],
        ThreadKind::Queue => &[LIFE, WAIT, DATA, CONSOLE],
        ThreadKind::Share => &[LIFE, WAIT, DATA, LENDING],
        ThreadKind::NetControl => &[LIFE, WAIT, NETWORK],
        ThreadKind::Vsock => &[LIFE, WAIT, STREAM, SOCKET],
        ThreadKind::VhostUser => &[LIFE, WAIT, SPAWN, DATA, STREAM, SOCKET, MEMORY],
        // The devices of the VM may be dropped on this thread.
        ThreadKind::Warden => &[LIFE, WAIT, SPAWN, DATA, STREAM, SOCKET, FILES, NETWORK, MACHINE],
        ThreadKind::Log => &[LIFE, WAIT, STREAM],
    };
    sets.iter().copied().flatten()
}

/// Returns the calls that are forbidden to a process that starts other programs, and to these programs: none of them is
/// needed to run a VM.
pub fn forbidden() -> &'static [Allow] {
    const {
        &[
            always(c::SYS_mount, "the jail's walls"),
            always(c::SYS_umount2, "the jail's walls"),
            always(c::SYS_pivot_root, "the jail's walls"),
            always(c::SYS_chroot, "the jail's walls"),
            always(c::SYS_unshare, "new namespaces bring new rights"),
            always(c::SYS_setns, "other namespaces"),
            always(c::SYS_open_tree, "the jail's walls"),
            always(c::SYS_move_mount, "the jail's walls"),
            always(c::SYS_fsopen, "the jail's walls"),
            always(c::SYS_fsconfig, "the jail's walls"),
            always(c::SYS_fsmount, "the jail's walls"),
            always(c::SYS_fspick, "the jail's walls"),
            always(c::SYS_mount_setattr, "the jail's walls"),
            always(c::SYS_open_by_handle_at, "files beyond the walls"),
            always(c::SYS_ptrace, "other processes"),
            always(c::SYS_process_vm_readv, "other processes"),
            always(c::SYS_process_vm_writev, "other processes"),
            always(c::SYS_pidfd_getfd, "other processes"),
            always(c::SYS_kcmp, "other processes"),
            always(c::SYS_bpf, "programs in the kernel"),
            always(c::SYS_perf_event_open, "a large part of the kernel that no machine needs"),
            always(c::SYS_userfaultfd, "helps to win races in the kernel"),
            always(c::SYS_keyctl, "the kernel's keys"),
            always(c::SYS_add_key, "the kernel's keys"),
            always(c::SYS_request_key, "the kernel's keys"),
            always(c::SYS_init_module, "programs in the kernel"),
            always(c::SYS_finit_module, "programs in the kernel"),
            always(c::SYS_delete_module, "programs in the kernel"),
            always(c::SYS_kexec_load, "another kernel"),
            always(c::SYS_kexec_file_load, "another kernel"),
            always(c::SYS_reboot, "the node"),
            always(c::SYS_swapon, "the node"),
            always(c::SYS_swapoff, "the node"),
            always(c::SYS_acct, "the node"),
            always(c::SYS_quotactl, "the node"),
            always(c::SYS_syslog, "the node's log"),
            always(c::SYS_settimeofday, "the node's clock"),
            always(c::SYS_clock_settime, "the node's clock"),
            always(c::SYS_adjtimex, "the node's clock"),
            always(c::SYS_clock_adjtime, "the node's clock"),
            always(c::SYS_sethostname, "the node's name"),
            always(c::SYS_setdomainname, "the node's name"),
            always(c::SYS_mknod, "devices"),
            always(c::SYS_iopl, "the node's ports"),
            always(c::SYS_ioperm, "the node's ports"),
            always(c::SYS_personality, "old ways of the kernel"),
            always(c::SYS_vhangup, "terminals"),
            always(c::SYS_lookup_dcookie, "never needed"),
            always(c::SYS_nfsservctl, "never needed"),
        ]
    }
}

/// Returns the calls that are forbidden in addition to a process that only serves files.
pub fn alone() -> &'static [Allow] {
    const {
        &[
            always(c::SYS_execve, "programs"),
            always(c::SYS_execveat, "programs"),
            always(c::SYS_fork, "processes"),
            always(c::SYS_vfork, "processes"),
            always(c::SYS_clone, "processes and threads"),
            always(c::SYS_clone3, "processes and threads"),
            always(c::SYS_kill, "other processes"),
            always(c::SYS_tkill, "other processes"),
            always(c::SYS_pidfd_open, "other processes"),
            always(c::SYS_pidfd_send_signal, "other processes"),
            always(c::SYS_socket, "networks"),
            always(c::SYS_socketpair, "networks"),
            always(c::SYS_connect, "networks, and sockets that lie on a volume"),
            always(c::SYS_bind, "networks, and sockets that lie on a volume"),
            always(c::SYS_io_uring_setup, "calls that no filter sees"),
            always(c::SYS_memfd_create, "code"),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_entry_has_its_reason() {
        for entry in ThreadKind::ALL.into_iter().flat_map(table).chain(forbidden()).chain(alone()) {
            assert!(!entry.why.is_empty(), "{}", entry.syscall);
        }
    }

    #[test]
    fn the_process_allows_what_each_of_its_threads_is_allowed() {
        let calls = |kind| table(kind).map(|entry| entry.syscall).collect::<std::collections::BTreeSet<_>>();
        for kind in ThreadKind::ALL {
            let extra: Vec<_> = calls(kind).difference(&calls(ThreadKind::Main)).copied().collect();
            assert_eq!(extra, Vec::<i64>::new(), "{kind:?}");
        }
    }

    #[test]
    fn nobody_in_the_process_may_do_what_is_forbidden_to_all() {
        for entry in forbidden() {
            assert!(!table(ThreadKind::Main).any(|allowed| allowed.syscall == entry.syscall), "{}", entry.why);
        }
    }

    #[test]
    fn a_machine_in_this_process_executes_nothing() {
        for call in [c::SYS_execve, c::SYS_execveat, c::SYS_fork, c::SYS_vfork] {
            assert!(!table(ThreadKind::Main).any(|allowed| allowed.syscall == call));
        }
    }

    #[test]
    fn a_processor_opens_nothing_and_starts_nothing() {
        for call in [c::SYS_openat, c::SYS_clone3, c::SYS_clone, c::SYS_socket, c::SYS_sendmsg, c::SYS_unlink] {
            assert!(!table(ThreadKind::Vcpu).any(|allowed| allowed.syscall == call), "{call}");
        }
    }
}
