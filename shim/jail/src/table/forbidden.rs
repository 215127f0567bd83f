//! Lists the system calls that are forbidden to processes that start other programs, to those programs, and to the file server.

use super::{
    ArgumentRule, SIGNAL_RECEIVER, SOCKET_SIGNAL_RECEIVER, SyscallRule, any_arguments, clone_flag, fcntl,
    mode_with_bit, other_process,
};
use crate::SocketUse;
use libc as c;

/// Returns the calls that are forbidden to a process that starts other programs, and to these programs: none of them is
/// needed to run a VM.
pub fn forbidden_calls() -> &'static [SyscallRule] {
    const {
        &[
            any_arguments(c::SYS_mount, "changes of the mount namespace"),
            any_arguments(c::SYS_umount2, "changes of the mount namespace"),
            any_arguments(c::SYS_pivot_root, "changes of the mount namespace"),
            any_arguments(c::SYS_chroot, "changes of the mount namespace"),
            any_arguments(c::SYS_unshare, "new namespaces bring new rights"),
            clone_flag(c::CLONE_NEWUSER, "new namespaces bring new rights"),
            clone_flag(c::CLONE_NEWNS, "new namespaces bring new rights"),
            clone_flag(c::CLONE_NEWPID, "new namespaces bring new rights"),
            clone_flag(c::CLONE_NEWNET, "new namespaces bring new rights"),
            clone_flag(c::CLONE_NEWIPC, "new namespaces bring new rights"),
            clone_flag(c::CLONE_NEWUTS, "new namespaces bring new rights"),
            clone_flag(c::CLONE_NEWCGROUP, "new namespaces bring new rights"),
            any_arguments(c::SYS_setns, "other namespaces"),
            any_arguments(c::SYS_open_tree, "changes of the mount namespace"),
            any_arguments(c::SYS_move_mount, "changes of the mount namespace"),
            any_arguments(c::SYS_fsopen, "changes of the mount namespace"),
            any_arguments(c::SYS_fsconfig, "changes of the mount namespace"),
            any_arguments(c::SYS_fsmount, "changes of the mount namespace"),
            any_arguments(c::SYS_fspick, "changes of the mount namespace"),
            any_arguments(c::SYS_mount_setattr, "changes of the mount namespace"),
            any_arguments(c::SYS_open_by_handle_at, "files outside the mount namespace"),
            any_arguments(c::SYS_ptrace, "other processes"),
            any_arguments(c::SYS_process_vm_readv, "other processes"),
            any_arguments(c::SYS_process_vm_writev, "other processes"),
            any_arguments(c::SYS_pidfd_getfd, "other processes"),
            any_arguments(c::SYS_tkill, "other processes"),
            any_arguments(c::SYS_pidfd_send_signal, "other processes"),
            any_arguments(c::SYS_process_madvise, "memory of other processes"),
            any_arguments(c::SYS_process_mrelease, "memory of other processes"),
            any_arguments(c::SYS_migrate_pages, "memory of other processes"),
            any_arguments(c::SYS_move_pages, "memory of other processes"),
            any_arguments(c::SYS_setpriority, "priorities of other processes"),
            any_arguments(c::SYS_ioprio_set, "priorities of other processes"),
            any_arguments(c::SYS_sched_setparam, "priorities of other processes"),
            other_process(c::SYS_sched_setscheduler, "priorities of other processes"),
            other_process(c::SYS_sched_setattr, "priorities of other processes"),
            any_arguments(c::SYS_rt_sigqueueinfo, "signals with any contents to other processes"),
            any_arguments(c::SYS_rt_tgsigqueueinfo, "signals with any contents to other processes"),
            fcntl(SIGNAL_RECEIVER, "signals to other processes"),
            SyscallRule {
                syscall: c::SYS_ioctl,
                arguments: ArgumentRule::OneOf(1, SOCKET_SIGNAL_RECEIVER),
                reason: "signals to other processes",
            },
            other_process(c::SYS_prlimit64, "limits of other processes"),
            SyscallRule {
                syscall: c::SYS_socket,
                arguments: ArgumentRule::OneOf(0, &[c::AF_VSOCK as u64, c::AF_ALG as u64]),
                reason: "the hypervisor and other guests of the node; the kernel's ciphers",
            },
            any_arguments(c::SYS_kcmp, "other processes"),
            any_arguments(c::SYS_bpf, "programs in the kernel"),
            any_arguments(c::SYS_perf_event_open, "a large part of the kernel that no VM needs"),
            any_arguments(c::SYS_userfaultfd, "helps to win races in the kernel"),
            any_arguments(c::SYS_keyctl, "the kernel's keys"),
            any_arguments(c::SYS_add_key, "the kernel's keys"),
            any_arguments(c::SYS_request_key, "the kernel's keys"),
            any_arguments(c::SYS_init_module, "programs in the kernel"),
            any_arguments(c::SYS_finit_module, "programs in the kernel"),
            any_arguments(c::SYS_delete_module, "programs in the kernel"),
            any_arguments(c::SYS_kexec_load, "another kernel"),
            any_arguments(c::SYS_kexec_file_load, "another kernel"),
            any_arguments(c::SYS_reboot, "the node"),
            any_arguments(c::SYS_swapon, "the node"),
            any_arguments(c::SYS_swapoff, "the node"),
            any_arguments(c::SYS_acct, "the node"),
            any_arguments(c::SYS_quotactl, "the node"),
            any_arguments(c::SYS_syslog, "the node's log"),
            any_arguments(c::SYS_settimeofday, "the node's clock"),
            any_arguments(c::SYS_clock_settime, "the node's clock"),
            any_arguments(c::SYS_adjtimex, "the node's clock"),
            any_arguments(c::SYS_clock_adjtime, "the node's clock"),
            any_arguments(c::SYS_sethostname, "the node's name"),
            any_arguments(c::SYS_setdomainname, "the node's name"),
            any_arguments(c::SYS_mknod, "devices"),
            any_arguments(c::SYS_iopl, "the node's ports"),
            any_arguments(c::SYS_ioperm, "the node's ports"),
            any_arguments(c::SYS_personality, "obsolete execution domains"),
            any_arguments(c::SYS_vhangup, "terminals"),
            any_arguments(c::SYS_lookup_dcookie, "never needed"),
            any_arguments(c::SYS_nfsservctl, "never needed"),
        ]
    }
}

/// Returns the calls that are forbidden in addition to a process that starts other programs, and to these programs. The file server
/// makes such files for guests, in their volumes.
pub fn forbidden_to_programs() -> &'static [SyscallRule] {
    const {
        &[
            any_arguments(c::SYS_mknodat, "devices and FIFOs"),
            mode_with_bit(c::SYS_chmod, 1, c::S_ISUID),
            mode_with_bit(c::SYS_chmod, 1, c::S_ISGID),
            mode_with_bit(c::SYS_fchmod, 1, c::S_ISUID),
            mode_with_bit(c::SYS_fchmod, 1, c::S_ISGID),
            mode_with_bit(c::SYS_fchmodat, 2, c::S_ISUID),
            mode_with_bit(c::SYS_fchmodat, 2, c::S_ISGID),
            mode_with_bit(c::SYS_fchmodat2, 2, c::S_ISUID),
            mode_with_bit(c::SYS_fchmodat2, 2, c::S_ISGID),
        ]
    }
}

/// The call that is forbidden, too, to a process that connects no sockets.
const CONNECT: &[SyscallRule] = &[any_arguments(c::SYS_connect, "networks, and sockets that lie on a volume")];

/// Returns the calls that are forbidden in addition to a process that only serves files.
pub fn forbidden_when_single_threaded(sockets: SocketUse) -> impl Iterator<Item = &'static SyscallRule> {
    let always: &[SyscallRule] = const {
        &[
            any_arguments(c::SYS_execve, "programs"),
            any_arguments(c::SYS_execveat, "programs"),
            any_arguments(c::SYS_fork, "processes"),
            any_arguments(c::SYS_vfork, "processes"),
            any_arguments(c::SYS_clone, "processes and threads"),
            any_arguments(c::SYS_clone3, "processes and threads"),
            any_arguments(c::SYS_kill, "other processes"),
            any_arguments(c::SYS_sched_setaffinity, "CPUs of other processes"),
            SyscallRule { syscall: c::SYS_tgkill, arguments: ArgumentRule::OtherPid(0), reason: "other processes" },
            any_arguments(c::SYS_pidfd_open, "other processes"),
            any_arguments(c::SYS_socket, "networks"),
            any_arguments(c::SYS_socketpair, "networks"),
            any_arguments(c::SYS_bind, "networks, and sockets that lie on a volume"),
            any_arguments(c::SYS_io_uring_setup, "system calls that bypass filters"),
            any_arguments(c::SYS_memfd_create, "code"),
        ]
    };
    let connect = if sockets == SocketUse::Connect { &[] } else { CONNECT };
    always.iter().chain(connect)
}
