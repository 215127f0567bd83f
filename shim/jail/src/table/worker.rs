//! Lists the system calls of a worker, which only transforms bytes.

use super::{ArgumentRule, EXEC, SyscallRule, any_arguments};
use libc as c;

/// Returns the calls that a worker may make. It has one thread and all of its descriptors, so it opens, creates, connects and starts
/// nothing.
pub fn worker_calls() -> &'static [SyscallRule] {
    const {
        &[
            any_arguments(c::SYS_read, "the stream that it transforms"),
            any_arguments(c::SYS_write, "the result, into a pipe or a file"),
            any_arguments(c::SYS_pwrite64, "the result, at an offset of a file"),
            any_arguments(c::SYS_ftruncate, "the end of a file, behind a hole"),
            any_arguments(c::SYS_recvmsg, "the job, with a descriptor"),
            any_arguments(c::SYS_recvfrom, "the answer to a request for memory"),
            any_arguments(c::SYS_sendto, "a request for memory; the report"),
            any_arguments(c::SYS_close, "close descriptors"),
            SyscallRule {
                syscall: c::SYS_fcntl,
                arguments: ArgumentRule::OneOf(1, &[c::F_GETFD as u64]),
                reason: "std, built for debugging: whether a descriptor is open that is to be closed",
            },
            SyscallRule {
                syscall: c::SYS_mmap,
                arguments: ArgumentRule::Masked(2, EXEC, 0),
                reason: "memory, but no new code",
            },
            SyscallRule {
                syscall: c::SYS_mprotect,
                arguments: ArgumentRule::Masked(2, EXEC, 0),
                reason: "memory, but no new code",
            },
            any_arguments(c::SYS_munmap, "release memory"),
            any_arguments(c::SYS_mremap, "large buffers grow"),
            any_arguments(c::SYS_madvise, "release memory"),
            any_arguments(c::SYS_brk, "the heap"),
            any_arguments(c::SYS_futex, "locks of the standard library"),
            any_arguments(c::SYS_getrandom, "seeds of hash tables"),
            any_arguments(c::SYS_restart_syscall, "a read is resumed after SIGSTOP"),
            any_arguments(c::SYS_rt_sigreturn, "the end of a signal's handler"),
            any_arguments(c::SYS_rt_sigaction, "abort resets its signal handler"),
            any_arguments(c::SYS_rt_sigprocmask, "abort blocks signals"),
            any_arguments(c::SYS_sigaltstack, "the stack for the handler of stack overflows"),
            any_arguments(c::SYS_gettid, "the thread's number, for abort"),
            any_arguments(c::SYS_getpid, "the process's number, for abort"),
            SyscallRule { syscall: c::SYS_tgkill, arguments: ArgumentRule::OwnPid(0), reason: "abort" },
            any_arguments(c::SYS_exit, "the end of the process"),
            any_arguments(c::SYS_exit_group, "the end of the process"),
        ]
    }
}
