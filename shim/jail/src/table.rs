//! Lists the system calls of each kind of thread as data: the call, the arguments, and the reason. A kind's table is
//! composed of the sets below; the first thread's table contains all of them, because filters are inherited. [`forbidden`] lists the
//! calls of programs that cannot be listed, and [`worker`] those of workers.

mod forbidden;
#[cfg(test)]
mod tests;
mod worker;

use crate::ThreadKind;
pub use forbidden::{forbidden_calls, forbidden_to_programs, forbidden_when_single_threaded};
use libc as c;
pub use worker::worker_calls;

/// One entry: a call that is allowed (or, in [`forbidden_calls`], one that is not).
#[derive(Clone, Copy, Debug)]
pub struct SyscallRule {
    /// The number of the call on x86-64.
    pub syscall: i64,
    /// The allowed arguments.
    pub arguments: ArgumentRule,
    /// What needs the call.
    pub reason: &'static str,
}

/// The arguments with which a call is allowed. Only their lower 32 bits are compared, because the kernel uses only those.
#[derive(Clone, Copy, Debug)]
pub enum ArgumentRule {
    /// All arguments are allowed.
    Any,
    /// The argument with this index is one of these values.
    OneOf(u8, &'static [u64]),
    /// The argument with this index is the pid of this process.
    OwnPid(u8),
    /// The argument with this index is not the pid of this process.
    OtherPid(u8),
    /// The argument with this index is neither 0, which stands for this process, nor its pid.
    OtherProcess(u8),
    /// The argument with this index, masked with the second number, equals the third.
    Masked(u8, u64, u64),
}

impl ArgumentRule {
    /// Returns the index of the argument that is compared.
    pub(crate) fn argument_index(self) -> u8 {
        match self {
            ArgumentRule::Any => 0,
            ArgumentRule::OneOf(argument, _)
            | ArgumentRule::OwnPid(argument)
            | ArgumentRule::OtherPid(argument)
            | ArgumentRule::OtherProcess(argument)
            | ArgumentRule::Masked(argument, _, _) => argument,
        }
    }
}

const fn any_arguments(syscall: i64, reason: &'static str) -> SyscallRule {
    SyscallRule { syscall, arguments: ArgumentRule::Any, reason }
}

/// One ioctl, by type and number: the lower half of the request.
const fn ioctl_number(number: u64, reason: &'static str) -> SyscallRule {
    SyscallRule { syscall: c::SYS_ioctl, arguments: ArgumentRule::Masked(1, 0xffff, number), reason }
}

/// All ioctls of a type.
const fn ioctl_type(letter: u8, reason: &'static str) -> SyscallRule {
    SyscallRule { syscall: c::SYS_ioctl, arguments: ArgumentRule::Masked(1, 0xff00, (letter as u64) << 8), reason }
}

/// fcntl with these commands.
const fn fcntl(commands: &'static [u64], reason: &'static str) -> SyscallRule {
    SyscallRule { syscall: c::SYS_fcntl, arguments: ArgumentRule::OneOf(1, commands), reason }
}

/// A call whose first argument is the pid of another process.
const fn other_process(syscall: i64, reason: &'static str) -> SyscallRule {
    SyscallRule { syscall, arguments: ArgumentRule::OtherProcess(0), reason }
}

/// clone with this flag.
const fn clone_flag(flag: c::c_int, reason: &'static str) -> SyscallRule {
    SyscallRule { syscall: c::SYS_clone, arguments: ArgumentRule::Masked(0, flag as u64, flag as u64), reason }
}

/// A call on standard error, the process's log.
const fn on_log(syscall: i64) -> SyscallRule {
    let arguments = ArgumentRule::OneOf(0, &[c::STDERR_FILENO as u64]);
    SyscallRule { syscall, arguments, reason: "the process's log keeps its newest half" }
}

/// The bits of a mode by which a program runs as its file's owner or group.
const SET_ID_BITS: u64 = (c::S_ISUID | c::S_ISGID) as u64;

/// A call whose argument with this index is a mode without these bits.
const fn mode_without_set_id(syscall: i64, argument: u8, reason: &'static str) -> SyscallRule {
    SyscallRule { syscall, arguments: ArgumentRule::Masked(argument, SET_ID_BITS, 0), reason }
}

/// A call whose argument with this index is a mode with this bit.
const fn mode_with_bit(syscall: i64, argument: u8, bit: c::mode_t) -> SyscallRule {
    let arguments = ArgumentRule::Masked(argument, bit as u64, bit as u64);
    SyscallRule { syscall, arguments, reason: "programs that run with the rights of their file's owner or group" }
}

/// The commands of fcntl that copy descriptors and change their flags. Those that name the receiver of a signal are not among them.
const DESCRIPTOR_FLAGS: &[u64] = &[
    c::F_DUPFD as u64,
    c::F_DUPFD_CLOEXEC as u64,
    c::F_GETFD as u64,
    c::F_SETFD as u64,
    c::F_GETFL as u64,
    c::F_SETFL as u64,
];
/// `F_SETOWN`, `F_SETSIG` and `F_SETOWN_EX` (include/uapi/asm-generic/fcntl.h): the kernel sends the receiver a signal. `F_SETLEASE`
/// (include/uapi/linux/fcntl.h): it also holds up other processes that open the file.
const SIGNAL_RECEIVER: &[u64] = &[8, 10, 15, 1024];
/// `FIOSETOWN` and `SIOCSPGRP` (include/uapi/asm-generic/sockios.h), which do the same.
const SOCKET_SIGNAL_RECEIVER: &[u64] = &[0x8901, 0x8902];

const KVM: u8 = 0xae;
const VHOST: u8 = 0xaf;
const EXEC: u64 = c::PROT_EXEC as u64;
/// `PR_SET_VMA`, with which allocators name their mappings.
const PR_SET_VMA: u64 = 0x5356_4d41;

/// The calls of every Rust thread.
const EVERY_THREAD: &[SyscallRule] = &[
    any_arguments(c::SYS_futex, "locks, channels, joins"),
    any_arguments(c::SYS_sched_yield, "a lock that is held for moments"),
    any_arguments(c::SYS_clock_gettime, "where the vDSO has no clock"),
    any_arguments(c::SYS_clock_nanosleep, "short waits"),
    any_arguments(c::SYS_nanosleep, "short waits"),
    any_arguments(c::SYS_restart_syscall, "a wait is resumed after SIGSTOP"),
    any_arguments(c::SYS_rt_sigreturn, "the end of a signal's handler"),
    any_arguments(c::SYS_rt_sigaction, "abort resets its signal handler"),
    any_arguments(c::SYS_rt_sigprocmask, "signals of a thread at its start and end"),
    any_arguments(c::SYS_sigaltstack, "the stack for the handler of stack overflows"),
    any_arguments(c::SYS_rseq, "the C library, at the start of a thread"),
    any_arguments(c::SYS_set_robust_list, "the C library, at the start of a thread"),
    any_arguments(c::SYS_set_tid_address, "the C library, at the start of a thread"),
    any_arguments(c::SYS_sched_getaffinity, "the C library, to find a thread's stack"),
    SyscallRule {
        syscall: c::SYS_prctl,
        arguments: ArgumentRule::OneOf(0, &[c::PR_SET_NAME as u64, c::PR_SET_NO_NEW_PRIVS as u64, PR_SET_VMA]),
        reason: "the thread's name; filters; names of mappings",
    },
    any_arguments(c::SYS_seccomp, "a thread's own filter: it can only forbid more"),
    on_log(c::SYS_pread64),
    on_log(c::SYS_ftruncate),
    SyscallRule {
        syscall: c::SYS_mmap,
        arguments: ArgumentRule::Masked(2, EXEC, 0),
        reason: "memory, but no new code",
    },
    SyscallRule {
        syscall: c::SYS_mprotect,
        arguments: ArgumentRule::Masked(2, EXEC, 0),
        reason: "heaps grow, but no new code",
    },
    any_arguments(c::SYS_munmap, "release memory"),
    any_arguments(c::SYS_mremap, "large buffers grow"),
    any_arguments(c::SYS_madvise, "release memory"),
    any_arguments(c::SYS_brk, "the heap"),
    any_arguments(c::SYS_getrandom, "seeds of hash tables, random bytes"),
    any_arguments(c::SYS_gettid, "the thread's number, for abort and logs"),
    any_arguments(c::SYS_getpid, "the process's number, for abort and signals"),
    SyscallRule { syscall: c::SYS_tgkill, arguments: ArgumentRule::OwnPid(0), reason: "abort; wake up a vCPU thread" },
    any_arguments(c::SYS_write, "log lines; eventfds"),
    any_arguments(c::SYS_read, "eventfds"),
    any_arguments(c::SYS_close, "close descriptors"),
    SyscallRule {
        syscall: c::SYS_fcntl,
        arguments: ArgumentRule::OneOf(1, &[c::F_GETFD as u64]),
        reason: "std, built for debugging: whether a descriptor is open that is to be closed",
    },
    any_arguments(c::SYS_exit, "the end of a thread"),
    any_arguments(c::SYS_exit_group, "the end of the process"),
];

/// Waiting for descriptors.
const WAIT_FOR_DESCRIPTORS: &[SyscallRule] = &[
    any_arguments(c::SYS_poll, "waiting for kicks and streams"),
    any_arguments(c::SYS_ppoll, "waiting for kicks and streams"),
    any_arguments(c::SYS_epoll_wait, "waiting for many descriptors"),
    any_arguments(c::SYS_epoll_pwait, "waiting for many descriptors"),
    any_arguments(c::SYS_epoll_ctl, "register descriptors to wait for"),
];

/// Starting threads. The flags of clone3 lie in memory, where a filter cannot check them, so the call returns ENOSYS in every process
/// (`seccomp::guard_filter`), and the C library uses clone.
const START_THREAD: &[SyscallRule] = &[
    any_arguments(c::SYS_clone3, "a thread starts; returns ENOSYS"),
    clone_flag(c::CLONE_THREAD, "a thread starts"),
    SyscallRule {
        syscall: c::SYS_prlimit64,
        arguments: ArgumentRule::OneOf(0, &[0]),
        reason: "the size of a thread's stack",
    },
    any_arguments(c::SYS_eventfd2, "stop a thread"),
    any_arguments(c::SYS_epoll_create1, "a thread waits for many descriptors"),
    fcntl(DESCRIPTOR_FLAGS, "copies of descriptors, close-on-exec"),
];

/// Reading and writing open files: disks, taps, the console.
const READ_WRITE: &[SyscallRule] = &[
    any_arguments(c::SYS_readv, "frames from a tap, blocks"),
    any_arguments(c::SYS_writev, "frames to a tap, blocks"),
    any_arguments(c::SYS_pread64, "blocks of a disk"),
    any_arguments(c::SYS_pwrite64, "blocks of a disk"),
    any_arguments(c::SYS_preadv, "blocks of a disk"),
    any_arguments(c::SYS_pwritev, "blocks of a disk"),
    any_arguments(c::SYS_preadv2, "blocks of a disk"),
    any_arguments(c::SYS_pwritev2, "blocks of a disk"),
    any_arguments(c::SYS_fdatasync, "a disk's flush"),
    any_arguments(c::SYS_fsync, "a disk's flush"),
    any_arguments(c::SYS_fallocate, "discard and write-zeroes"),
    ioctl_type(0x12, "discard and write-zeroes of a block device"),
];

/// Streams over open Unix sockets.
const STREAM: &[SyscallRule] = &[
    any_arguments(c::SYS_recvfrom, "bytes of a stream"),
    any_arguments(c::SYS_sendto, "bytes of a stream"),
    any_arguments(c::SYS_recvmsg, "bytes of a stream, descriptors of a front end"),
    any_arguments(c::SYS_sendmsg, "bytes of a stream"),
    any_arguments(c::SYS_readv, "bytes of a stream"),
    any_arguments(c::SYS_writev, "bytes of a stream"),
    any_arguments(c::SYS_shutdown, "one end of a stream ends"),
    any_arguments(c::SYS_getsockopt, "the error of a stream"),
    any_arguments(c::SYS_setsockopt, "buffers and time limits of a stream"),
    fcntl(DESCRIPTOR_FLAGS, "non-blocking streams"),
    ioctl_number(c::FIONBIO, "non-blocking streams"),
    ioctl_number(c::FIONREAD, "the number of readable bytes"),
];

/// Creating Unix sockets.
const SOCKET: &[SyscallRule] = &[
    SyscallRule {
        syscall: c::SYS_socket,
        arguments: ArgumentRule::OneOf(0, &[c::AF_UNIX as u64]),
        reason: "unix sockets",
    },
    SyscallRule {
        syscall: c::SYS_socketpair,
        arguments: ArgumentRule::OneOf(0, &[c::AF_UNIX as u64]),
        reason: "a connection of the guest",
    },
    any_arguments(c::SYS_bind, "the pod's socket"),
    any_arguments(c::SYS_listen, "the pod's socket"),
    any_arguments(c::SYS_connect, "unix sockets"),
    any_arguments(c::SYS_accept4, "a connection of the daemon or of a front end"),
    any_arguments(c::SYS_getsockname, "the address of a socket"),
    any_arguments(c::SYS_getpeername, "the address of a socket"),
];

/// Opening files by name, of which the jail leaves few.
const FILES: &[SyscallRule] = &[
    any_arguments(c::SYS_open, "the pod's record, kernel and initramfs, devices"),
    any_arguments(c::SYS_openat, "the pod's record, kernel and initramfs, devices"),
    any_arguments(c::SYS_openat2, "the pod's record, kernel and initramfs, devices"),
    any_arguments(c::SYS_stat, "file metadata"),
    any_arguments(c::SYS_fstat, "file metadata"),
    any_arguments(c::SYS_lstat, "file metadata"),
    any_arguments(c::SYS_newfstatat, "file metadata"),
    any_arguments(c::SYS_statx, "file metadata"),
    any_arguments(c::SYS_fstatfs, "the type of a file system"),
    any_arguments(c::SYS_access, "whether a file exists"),
    any_arguments(c::SYS_faccessat, "whether a file exists"),
    any_arguments(c::SYS_faccessat2, "whether a file exists"),
    any_arguments(c::SYS_readlink, "the target of a link"),
    any_arguments(c::SYS_readlinkat, "the target of a link"),
    any_arguments(c::SYS_getdents64, "list a directory"),
    any_arguments(c::SYS_lseek, "lengths and holes"),
    any_arguments(c::SYS_rename, "replace the record atomically"),
    any_arguments(c::SYS_renameat, "replace the record atomically"),
    any_arguments(c::SYS_renameat2, "replace the record atomically"),
    any_arguments(c::SYS_unlink, "sockets, disks and drafts are removed"),
    any_arguments(c::SYS_unlinkat, "sockets, disks and drafts are removed"),
    any_arguments(c::SYS_rmdir, "a directory is removed"),
    mode_without_set_id(c::SYS_chmod, 1, "restrict a socket to its owner"),
    mode_without_set_id(c::SYS_fchmod, 1, "restrict a socket to its owner"),
    mode_without_set_id(c::SYS_fchmodat, 2, "restrict a socket to its owner"),
    any_arguments(c::SYS_ftruncate, "a disk gets its size"),
    any_arguments(c::SYS_flock, "lock a file"),
    any_arguments(c::SYS_copy_file_range, "a copy of a file"),
    ioctl_number(0x9409, "FICLONE: the copy of a file shares its blocks"),
    any_arguments(c::SYS_umask, "modes of new files"),
    any_arguments(c::SYS_getcwd, "resolve relative paths"),
];

/// Writing the guest's console to a file of bounded size.
const CONSOLE: &[SyscallRule] = &[
    any_arguments(c::SYS_lseek, "the console's log keeps its newest half; holes of a disk that is copied"),
    any_arguments(c::SYS_ftruncate, "the console's log keeps its newest half"),
    any_arguments(c::SYS_statx, "the length of that half"),
];

/// Sharing a virtqueue with another process.
const SHARED_VIRTQUEUE: &[SyscallRule] = &[
    any_arguments(c::SYS_sendmsg, "its descriptors are sent"),
    SyscallRule {
        syscall: c::SYS_fcntl,
        arguments: ArgumentRule::OneOf(1, &[c::F_DUPFD_CLOEXEC as u64]),
        reason: "a copy of its interrupt for the other process",
    },
];

/// Using the guest memory of another program by a descriptor.
const GUEST_MEMORY: &[SyscallRule] = &[
    any_arguments(c::SYS_fstat, "its size"),
    any_arguments(c::SYS_statx, "its size"),
    fcntl(&[c::F_GET_SEALS as u64], "whether it is sealed"),
    fcntl(DESCRIPTOR_FLAGS, "copies of its descriptor"),
];

/// Reconfiguring a network interface while it runs.
const NETWORK_INTERFACE: &[SyscallRule] = &[
    ioctl_type(VHOST, "a network queue that the kernel serves"),
    ioctl_number(0x54d0, "TUNSETOFFLOAD: what the guest's network driver can do"),
    ioctl_number(0x54d1, "TUNSETTXFILTER: which frames reach the guest"),
    ioctl_number(0x54d9, "TUNSETQUEUE: a queue of a tap is used or not"),
];

/// Creating a VM in this process: memory, KVM, taps.
const CREATE_VM: &[SyscallRule] = &[
    ioctl_type(KVM, "create, save and restore the VM"),
    ioctl_number(0x54d2, "TUNGETIFF: the type of the tap"),
    ioctl_number(0x54d8, "TUNSETVNETHDRSZ: the header before each frame"),
    any_arguments(c::SYS_memfd_create, "guest memory that is shared"),
    fcntl(&[c::F_ADD_SEALS as u64, c::F_GET_SEALS as u64], "guest memory does not shrink"),
    any_arguments(c::SYS_fallocate, "release guest memory"),
];

/// Running one vCPU.
const VCPU: &[SyscallRule] = &[
    ioctl_number(0xae80, "KVM_RUN: the loop of the vCPU"),
    ioctl_number(0xaead, "KVM_KVMCLOCK_CTRL: the guest was paused"),
    ioctl_number(0xae61, "KVM_IRQ_LINE: an interrupt of the bus"),
    ioctl_number(0xae81, "KVM_GET_REGS: save the vCPU"),
    ioctl_number(0xae82, "KVM_SET_REGS: create or restore the vCPU"),
    ioctl_number(0xae83, "KVM_GET_SREGS: save the vCPU"),
    ioctl_number(0xae84, "KVM_SET_SREGS: create or restore the vCPU"),
    ioctl_number(0xae88, "KVM_GET_MSRS: save the vCPU"),
    ioctl_number(0xae89, "KVM_SET_MSRS: create or restore the vCPU"),
    ioctl_number(0xae8c, "KVM_GET_FPU: save the vCPU"),
    ioctl_number(0xae8d, "KVM_SET_FPU: create or restore the vCPU"),
    ioctl_number(0xae8e, "KVM_GET_LAPIC: save the vCPU"),
    ioctl_number(0xae8f, "KVM_SET_LAPIC: create or restore the vCPU"),
    ioctl_number(0xae90, "KVM_SET_CPUID2: create or restore the vCPU"),
    ioctl_number(0xae91, "KVM_GET_CPUID2: save the vCPU"),
    ioctl_number(0xae98, "KVM_GET_MP_STATE: save the vCPU"),
    ioctl_number(0xae99, "KVM_SET_MP_STATE: restore the vCPU"),
    ioctl_number(0xae9f, "KVM_GET_VCPU_EVENTS: save the vCPU"),
    ioctl_number(0xaea0, "KVM_SET_VCPU_EVENTS: restore the vCPU"),
    ioctl_number(0xaea1, "KVM_GET_DEBUGREGS: save the vCPU"),
    ioctl_number(0xaea2, "KVM_SET_DEBUGREGS, KVM_SET_TSC_KHZ: restore the vCPU"),
    ioctl_number(0xaea3, "KVM_GET_TSC_KHZ: save the vCPU"),
    ioctl_number(0xaea4, "KVM_GET_XSAVE: save the vCPU"),
    ioctl_number(0xaea5, "KVM_SET_XSAVE: restore the vCPU"),
    ioctl_number(0xaea6, "KVM_GET_XCRS: save the vCPU"),
    ioctl_number(0xaea7, "KVM_SET_XCRS: restore the vCPU"),
    ioctl_number(0xaecf, "KVM_GET_XSAVE2: save the vCPU"),
];

/// Starting a virtqueue, which happens on the vCPU thread when the guest writes to a register.
const START_VIRTQUEUE: &[SyscallRule] = &[
    SyscallRule {
        syscall: c::SYS_fcntl,
        arguments: ArgumentRule::OneOf(1, &[c::F_DUPFD_CLOEXEC as u64, c::F_GETFL as u64, c::F_SETFL as u64]),
        reason: "a queue has its own copy of its eventfds, and does not block on them",
    },
    any_arguments(c::SYS_eventfd2, "stop the thread of a queue"),
];

/// The calls of the first thread only.
const FIRST_THREAD: &[SyscallRule] = &[
    any_arguments(c::SYS_uname, "the kernel's version"),
    any_arguments(c::SYS_sysinfo, "the C library, before it sorts"),
    any_arguments(c::SYS_getuid, "the user and group of the process"),
    any_arguments(c::SYS_geteuid, "the user and group of the process"),
    any_arguments(c::SYS_getgid, "the user and group of the process"),
    any_arguments(c::SYS_getegid, "the user and group of the process"),
    any_arguments(c::SYS_getppid, "the parent process"),
    any_arguments(c::SYS_getrlimit, "the limits of the process"),
    any_arguments(c::SYS_getrusage, "what the process has used"),
    any_arguments(c::SYS_clock_getres, "how fine a clock is"),
    any_arguments(c::SYS_gettimeofday, "where the vDSO has no clock"),
    any_arguments(c::SYS_dup, "copies of descriptors"),
    any_arguments(c::SYS_dup2, "copies of descriptors"),
    any_arguments(c::SYS_dup3, "copies of descriptors"),
    any_arguments(c::SYS_pipe2, "signals reach the runtime"),
    any_arguments(c::SYS_timerfd_create, "timers"),
    any_arguments(c::SYS_timerfd_settime, "timers"),
    any_arguments(c::SYS_membarrier, "locks that are cheap for readers"),
];

/// Returns the allowed system calls of a kind.
pub fn allowed_calls(kind: ThreadKind) -> impl Iterator<Item = &'static SyscallRule> {
    let sets: &[&[SyscallRule]] = match kind {
        ThreadKind::Main => &[
            EVERY_THREAD,
            WAIT_FOR_DESCRIPTORS,
            START_THREAD,
            READ_WRITE,
            STREAM,
            SOCKET,
            FILES,
            NETWORK_INTERFACE,
            CREATE_VM,
            VCPU,
            FIRST_THREAD,
        ],
        ThreadKind::Blocking => &[
            EVERY_THREAD,
            WAIT_FOR_DESCRIPTORS,
            START_THREAD,
            READ_WRITE,
            STREAM,
            SOCKET,
            FILES,
            NETWORK_INTERFACE,
            CREATE_VM,
        ],
        ThreadKind::Machine => &[
            EVERY_THREAD,
            WAIT_FOR_DESCRIPTORS,
            START_THREAD,
            READ_WRITE,
            STREAM,
            SOCKET,
            FILES,
            NETWORK_INTERFACE,
            CREATE_VM,
            VCPU,
        ],
        ThreadKind::Vcpu => &[EVERY_THREAD, VCPU, START_VIRTQUEUE, NETWORK_INTERFACE, CONSOLE],
        ThreadKind::Queue => &[EVERY_THREAD, WAIT_FOR_DESCRIPTORS, READ_WRITE, CONSOLE],
        ThreadKind::Share => &[EVERY_THREAD, WAIT_FOR_DESCRIPTORS, READ_WRITE, SHARED_VIRTQUEUE],
        ThreadKind::NetControl => &[EVERY_THREAD, WAIT_FOR_DESCRIPTORS, NETWORK_INTERFACE],
        ThreadKind::Vsock => &[EVERY_THREAD, WAIT_FOR_DESCRIPTORS, STREAM, SOCKET],
        ThreadKind::VhostUser => {
            &[EVERY_THREAD, WAIT_FOR_DESCRIPTORS, START_THREAD, READ_WRITE, STREAM, SOCKET, GUEST_MEMORY]
        }
        // The devices of the VM may be dropped on this thread.
        ThreadKind::Warden => &[
            EVERY_THREAD,
            WAIT_FOR_DESCRIPTORS,
            START_THREAD,
            READ_WRITE,
            STREAM,
            SOCKET,
            FILES,
            NETWORK_INTERFACE,
            CREATE_VM,
        ],
        ThreadKind::Log => &[EVERY_THREAD, WAIT_FOR_DESCRIPTORS, STREAM],
    };
    sets.iter().copied().flatten()
}
