//! Tests the agent's side of the zygote, with a thread in place of the zygote and its children, and `nacelle_base::retry` under real
//! signals.

use nacelle_base::retry::{self, Timed, retry_interrupted};
use nacelle_base::{Classify, FailureKind};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout};
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, socketpair};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::os::unix::thread::JoinHandleExt;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread::{JoinHandle, sleep, spawn};
use std::time::{Duration, Instant};

use super::child;
use super::client::Zygote;
use super::error::ZygoteError;
use super::message::{CreateCommand, Refusal, RefusalKind, ZygoteReply, ZygoteRequest};
use super::process::CreatedProcess;
use super::wire::{hand_over_process, receive_with_descriptors, send_reply};
use crate::frame;

const SIGNAL: i32 = libc::SIGUSR2;
/// The time in which a condition must become true, also on a busy node.
const LIMIT: Duration = Duration::from_secs(20);

/// Waits until a condition holds.
fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + LIMIT;
    while !holds() {
        assert!(Instant::now() < deadline, "not within {LIMIT:?}: {what}");
        sleep(Duration::from_millis(1));
    }
}

/// Sends signals to a thread until it has ended, and counts them in `sent`. The signal's handler does nothing, and interrupted
/// calls are not restarted.
fn join_signalled_counting<T>(thread: JoinHandle<T>, sent: &AtomicUsize) -> T {
    while !thread.is_finished() {
        crate::sys::signal_thread(thread.as_pthread_t(), SIGNAL).unwrap();
        sent.fetch_add(1, Ordering::SeqCst);
        // Without a pause between two signals the thread would do nothing but handle signals.
        sleep(Duration::from_millis(1));
    }
    thread.join().unwrap()
}

fn join_signalled<T>(thread: JoinHandle<T>) -> T {
    join_signalled_counting(thread, &AtomicUsize::new(0))
}

/// The agent's end, and the socket where the zygote would be.
fn pair() -> (Zygote, OwnedFd) {
    crate::sys::let_signal_interrupt(SIGNAL).unwrap();
    let (control, theirs) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC).unwrap();
    (Zygote { control }, theirs)
}

/// Takes a request, as a child of the zygote does.
fn take(control: &OwnedFd) -> UnixStream {
    let (_, fds) = receive_with_descriptors(control, MsgFlags::empty()).unwrap();
    let mut peer = UnixStream::from(fds.into_iter().next().unwrap());
    frame::read_bytes(&mut peer, frame::MAX_ZYGOTE).unwrap();
    peer
}

fn pause() -> ZygoteRequest {
    ZygoteRequest::Pause { user_namespace: false }
}

/// A process as a child makes it. It echoes its stdin until it is killed.
fn program() -> (Child, CreatedProcess) {
    let child = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let pid = i32::try_from(child.id()).unwrap();
    (child, CreatedProcess { pid, pidfd: crate::sys::pidfd_open(pid).ok(), terminal: None })
}

/// Waits until a process has ended, and returns whether SIGKILL ended it. Kills it after `LIMIT`.
fn was_killed(mut child: Child) -> bool {
    let pidfd = crate::sys::pidfd_open(i32::try_from(child.id()).unwrap()).unwrap();
    // The pidfd is readable when the process has ended (pidfd_open(2)).
    let mut fds = [PollFd::new(pidfd.as_fd(), PollFlags::POLLIN)];
    if retry::poll(&mut fds, Some(Instant::now() + LIMIT)).unwrap() == 0 {
        child.kill().unwrap();
        child.wait().unwrap();
        return false;
    }
    child.wait().unwrap().signal() == Some(libc::SIGKILL)
}

/// Asserts that a process of [`program`] runs. One to which SIGKILL was sent before does not answer.
fn assert_runs(child: &mut Child) {
    child.stdin.as_mut().unwrap().write_all(b"alive").unwrap();
    let mut echo = [0; 5];
    child.stdout.as_mut().unwrap().read_exact(&mut echo).unwrap();
    assert_eq!(&echo, b"alive");
}

#[test]
fn signals_do_not_interrupt_retried_calls() {
    crate::sys::let_signal_interrupt(SIGNAL).unwrap();
    // Without the helper each of them fails: the signals do reach the thread while it waits.
    let (near, _far) = UnixStream::pair().unwrap();
    near.set_read_timeout(Some(LIMIT)).unwrap();
    let raw = join_signalled(spawn(move || nix::sys::socket::recv(near.as_raw_fd(), &mut [0], MsgFlags::empty())));
    assert_eq!(raw, Err(Errno::EINTR));
    let (reader, writer) = nix::unistd::pipe().unwrap();
    let raw = join_signalled(spawn(move || {
        let mut fds = [PollFd::new(reader.as_fd(), PollFlags::POLLIN)];
        let polled = nix::poll::poll(&mut fds, PollTimeout::NONE);
        (polled, nix::unistd::read(&reader, &mut [0]))
    }));
    assert_eq!(raw, (Err(Errno::EINTR), Err(Errno::EINTR)));
    drop(writer);

    let limit = Duration::from_millis(300);
    let (near, _far) = UnixStream::pair().unwrap();
    let start = Instant::now();
    let late = join_signalled(spawn(move || Timed::new(&near, limit).read(&mut [0])));
    assert_eq!(late.unwrap_err().kind(), io::ErrorKind::TimedOut);
    // Signals do not lengthen the time either.
    assert!((limit..Duration::from_secs(10)).contains(&start.elapsed()), "{:?}", start.elapsed());
    let (reader, writer) = nix::unistd::pipe().unwrap();
    let attempts = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&attempts);
    let thread = spawn(move || {
        let mut fds = [PollFd::new(reader.as_fd(), PollFlags::POLLIN)];
        let polled = retry::poll(&mut fds, Some(Instant::now() + limit)).unwrap();
        let read = retry_interrupted(|| {
            counted.fetch_add(1, Ordering::SeqCst);
            nix::unistd::read(&reader, &mut [0])
        });
        (polled, read)
    });
    let writing = spawn(move || {
        eventually("the read was interrupted and repeated", || attempts.load(Ordering::SeqCst) > 1);
        nix::unistd::write(&writer, b"x")
    });
    assert_eq!(join_signalled(thread), (0, Ok(1)));
    writing.join().unwrap().unwrap();
}

#[test]
fn signals_do_not_end_a_request() {
    let (zygote, control) = pair();
    let sent = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&sent);
    let child = spawn(move || {
        let mut peer = take(&control);
        // The caller has sent its request, so these signals reach it while it waits for the answer.
        let before = counted.load(Ordering::SeqCst);
        eventually("signals were sent while the caller waits", || counted.load(Ordering::SeqCst) > before + 20);
        let refusal = Refusal { message: "no".to_owned(), kind: RefusalKind::Internal };
        send_reply(&mut peer, &ZygoteReply::Refused(refusal), &[]).unwrap();
    });
    let caller = spawn(move || zygote.call(&pause(), &[]));
    let refused = join_signalled_counting(caller, &sent).unwrap_err();
    assert!(matches!(refused, ZygoteError::Refused { .. }), "{refused:?}");
    child.join().unwrap();
}

#[test]
fn a_rejection_reaches_an_agent_that_still_writes() {
    let (zygote, control) = pair();
    let child = spawn(move || {
        let (_, fds) = receive_with_descriptors(&control, MsgFlags::empty()).unwrap();
        child::refusal_for(fds, &io::Error::from_raw_os_error(libc::EAGAIN));
    });
    // More than a socket holds.
    let allowed = vec![std::path::PathBuf::from("/".repeat(4000)); 200];
    let request = CreateCommand { id: "a".to_owned(), tty: false, in_proc: allowed, late: Vec::new() };
    let error = zygote.call(&ZygoteRequest::Create(request), &[]).unwrap_err();
    assert_eq!(error.kind(), FailureKind::Exhausted, "{error:?}");
    child.join().unwrap();
}

#[test]
fn a_request_without_a_reply_times_out() {
    let (zygote, control) = pair();
    let child = spawn(move || take(&control));
    let error = zygote.call_within(Duration::from_millis(50), &pause(), &[]).unwrap_err();
    assert_eq!(error.kind(), FailureKind::Timeout, "{error:?}");
    drop(child.join().unwrap());
    // A child that ends without an answer.
    let (zygote, control) = pair();
    let child = spawn(move || drop(take(&control)));
    let error = zygote.call(&pause(), &[]).unwrap_err();
    assert_eq!(error.kind(), FailureKind::Unavailable, "{error:?}");
    child.join().unwrap();
}

#[test]
fn a_process_that_the_agent_does_not_accept_is_killed() {
    // The agent gives up before the answer comes.
    let (zygote, control) = pair();
    let (gave_up, agent_gave_up) = mpsc::channel();
    let child = spawn(move || {
        let mut peer = take(&control);
        agent_gave_up.recv_timeout(LIMIT).unwrap();
        let (child, made) = program();
        (hand_over_process(&mut peer, &made).is_err(), child)
    });
    zygote.call_within(Duration::from_millis(50), &pause(), &[]).unwrap_err();
    gave_up.send(()).unwrap();
    let (failed, process) = child.join().unwrap();
    assert!(failed && was_killed(process));

    // The answer is in the socket, and the agent does not read it.
    let (near, mut far) = UnixStream::pair().unwrap();
    let child = spawn(move || {
        let (child, made) = program();
        (hand_over_process(&mut far, &made).is_err(), child)
    });
    retry::poll(&mut [PollFd::new(near.as_fd(), PollFlags::POLLIN)], None).unwrap();
    drop(near);
    let (failed, process) = child.join().unwrap();
    assert!(failed && was_killed(process));

    // The agent has it, and then cannot use it; or keeps it.
    for keep in [false, true] {
        let (zygote, control) = pair();
        let child = spawn(move || {
            let mut peer = take(&control);
            let (child, made) = program();
            hand_over_process(&mut peer, &made).unwrap();
            child
        });
        let made = zygote.call(&pause(), &[]).unwrap();
        let mut process = child.join().unwrap();
        if keep {
            let (pid, pidfd) = made.release();
            assert_eq!((pid, pidfd.is_some()), (i32::try_from(process.id()).unwrap(), true));
            assert_runs(&mut process);
            process.kill().unwrap();
            process.wait().unwrap();
        } else {
            drop(made);
            assert!(was_killed(process));
        }
    }
}

#[test]
fn a_zygote_that_is_replaced_ends() {
    // The end of the pipe belongs to the first zygote alone.
    let (read, write) = nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC).unwrap();
    let first = Zygote::fork(&[]).unwrap();
    drop(write);
    let second = first.replace(&[&read]).unwrap();
    let mut ended = [PollFd::new(read.as_fd(), PollFlags::POLLIN)];
    let count = retry_interrupted(|| nix::poll::poll(&mut ended, PollTimeout::from(20_000_u16)));
    assert_eq!(count, Ok(1), "the first zygote still runs");
    drop(second);
}
