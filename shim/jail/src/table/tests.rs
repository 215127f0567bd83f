//! Tests the tables against each other, and the counts in docs/contributor/jail.md.

use super::*;
use crate::SocketUse;

#[test]
fn each_syscall_rule_has_its_reason() {
    for entry in ThreadKind::ALL
        .into_iter()
        .flat_map(allowed_calls)
        .chain(forbidden_calls())
        .chain(forbidden_to_programs())
        .chain(forbidden_when_single_threaded(SocketUse::Open))
        .chain(worker_calls())
    {
        assert!(!entry.reason.is_empty(), "{}", entry.syscall);
    }
}

/// Returns the row of the page about a filter: its system calls, its entries, and those of them that check arguments.
fn count(name: &str, entries: impl Iterator<Item = &'static SyscallRule>) -> String {
    let entries: Vec<_> = entries.collect();
    let calls: std::collections::BTreeSet<_> = entries.iter().map(|entry| entry.syscall).collect();
    let checked = entries.iter().filter(|entry| !matches!(entry.arguments, ArgumentRule::Any)).count();
    format!("| {name} | {} | {} | {checked} |", calls.len(), entries.len())
}

#[test]
fn the_page_counts_the_entries_of_each_filter() {
    let page = include_str!("../../../../docs/contributor/jail.md");
    let mut table: Vec<_> =
        ThreadKind::ALL.into_iter().map(|kind| count(&format!("`{kind:?}`"), allowed_calls(kind))).collect();
    table.push(count("image worker", worker_calls().iter()));
    let table = table.join("\n");
    assert!(page.contains(&table), "the page must have these lines:\n{table}");
}

#[test]
fn the_process_allows_what_each_of_its_threads_is_allowed() {
    let calls = |kind| allowed_calls(kind).map(|entry| entry.syscall).collect::<std::collections::BTreeSet<_>>();
    for kind in ThreadKind::ALL {
        let extra: Vec<_> = calls(kind).difference(&calls(ThreadKind::Main)).copied().collect();
        assert_eq!(extra, Vec::<i64>::new(), "{kind:?}");
    }
}

#[test]
fn no_thread_is_allowed_what_is_forbidden_to_all() {
    // A call that is forbidden with some arguments is allowed with others.
    let forbidden = forbidden_calls().iter().chain(forbidden_to_programs());
    for entry in forbidden.filter(|entry| matches!(entry.arguments, ArgumentRule::Any)) {
        assert!(!allowed_calls(ThreadKind::Main).any(|allowed| allowed.syscall == entry.syscall), "{}", entry.reason);
    }
}

#[test]
fn a_vm_in_this_process_executes_nothing() {
    for call in [c::SYS_execve, c::SYS_execveat, c::SYS_fork, c::SYS_vfork] {
        assert!(!allowed_calls(ThreadKind::Main).any(|allowed| allowed.syscall == call));
    }
}

#[test]
fn a_worker_is_allowed_nothing_that_is_forbidden_to_others() {
    let single_threaded = forbidden_when_single_threaded(SocketUse::Open);
    let others = forbidden_calls().iter().chain(forbidden_to_programs()).chain(single_threaded);
    for entry in others {
        // A worker may send a signal to itself only.
        let allowed = worker_calls().iter().find(|allowed| allowed.syscall == entry.syscall);
        assert!(
            allowed.is_none_or(|allowed| matches!(
                allowed.arguments,
                ArgumentRule::OwnPid(0) | ArgumentRule::OneOf(1, &[1])
            )),
            "{}",
            entry.reason
        );
    }
    // The last four put pages into a pipe that the worker could change after the daemon has hashed them.
    for call in [
        c::SYS_open,
        c::SYS_openat,
        c::SYS_openat2,
        c::SYS_ioctl,
        c::SYS_prctl,
        c::SYS_prlimit64,
        c::SYS_vmsplice,
        c::SYS_splice,
        c::SYS_tee,
        c::SYS_sendfile,
    ] {
        assert!(!worker_calls().iter().any(|allowed| allowed.syscall == call), "{call}");
    }
}

#[test]
fn a_file_server_that_connects_sockets_may_do_nothing_else_in_addition() {
    let calls = |sockets| forbidden_when_single_threaded(sockets).map(|entry| entry.syscall).collect::<Vec<_>>();
    let (open, connect) = (calls(SocketUse::Open), calls(SocketUse::Connect));
    assert_eq!(open, [connect.as_slice(), &[c::SYS_connect]].concat());
    assert!(connect.contains(&c::SYS_socket) && connect.contains(&c::SYS_bind));
}

#[test]
fn no_thread_names_the_receiver_of_a_signal() {
    for entry in ThreadKind::ALL.into_iter().flat_map(allowed_calls).filter(|entry| entry.syscall == c::SYS_fcntl) {
        match entry.arguments {
            ArgumentRule::OneOf(1, commands) => {
                assert!(SIGNAL_RECEIVER.iter().all(|command| !commands.contains(command)), "{}", entry.reason);
            }
            other => panic!("{other:?}: fcntl is allowed by its command: {}", entry.reason),
        }
    }
}

#[test]
fn a_vcpu_thread_opens_and_starts_nothing() {
    for call in [c::SYS_openat, c::SYS_clone3, c::SYS_clone, c::SYS_socket, c::SYS_sendmsg, c::SYS_unlink] {
        assert!(!allowed_calls(ThreadKind::Vcpu).any(|allowed| allowed.syscall == call), "{call}");
    }
}
