//! Owns: the zygote: a process forked before the agent has threads, which forks one child per request; only such a
//! child makes processes, for fork and libcontainer must not run in a threaded process.
//! May use: `frame`, `sys`. This file is the agent's side and the wire; `child` is the other side.
//! Threads: `Zygote::call` blocks and is for blocking threads; any number may run at once.

mod child;
mod create;
mod exec;
mod executor;
mod late;
#[cfg(test)]
mod tests;

use libcontainer::oci_spec::runtime::{LinuxSeccomp, Mount, Process};
use nacelle_base::retry::{Timed, retry_interrupted};
use nacelle_base::{Classify, Kind};
use nix::poll::PollFlags;
use nix::sys::socket::{
    AddressFamily, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType, UnixAddr, recvmsg, sendmsg,
    socketpair,
};
use serde::{Deserialize, Serialize};
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use crate::frame;

/// The longest time from a request to its answer.
const PATIENCE: Duration = Duration::from_secs(60);
/// The agent's word that it has the answer, and with it the process. A child that does not get it ends the process.
const TAKEN: [u8; 1] = *b"!";

/// What a child of the zygote can be asked to do.
#[derive(Debug, Serialize, Deserialize)]
pub enum Request {
    /// Makes the container of a bundle. Descriptors: stdin, stdout, stderr (none with a terminal).
    Create(Create),
    /// Starts a process in a container. Descriptors: a pidfd of the container's first process, then stdin, stdout,
    /// stderr (none with a terminal).
    Exec(Box<Exec>),
    /// Starts the holder of the pod's PID namespace.
    Pause {
        /// It belongs to the pod's user namespace.
        user_namespace: bool,
    },
}

/// A container to make.
#[derive(Debug, Serialize, Deserialize)]
pub struct Create {
    /// Its id.
    pub id: String,
    /// It has a terminal.
    pub tty: bool,
    /// The only places at and below its `/proc` where something may be mounted.
    pub in_proc: Vec<PathBuf>,
    /// What is mounted at and below its `/dev` when libcontainer is done.
    pub late: Vec<Mount>,
}

/// A process to start.
#[derive(Debug, Serialize, Deserialize)]
pub struct Exec {
    /// What to run, as whom; `terminal` says whether it gets a terminal.
    pub process: Process,
    /// The container's seccomp filter.
    pub seccomp: Option<LinuxSeccomp>,
    /// A container that sees the process may trace it: it must never have a right that its container has not.
    pub may_be_traced: bool,
    /// The container is in the pod's user namespace.
    pub user_namespace: bool,
    /// The container has a cgroup namespace of its own.
    pub cgroup_namespace: bool,
    /// The container's cgroup, a path in the file system.
    pub cgroup: String,
    /// The one below it where the container's first process is, for a container that has made cgroups of its own: then
    /// the container's may hold no process.
    pub init_cgroup: Option<String>,
    /// The terminal's columns and rows; 0: unknown.
    pub size: (u16, u16),
}

/// What a child answers.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Answer {
    /// The process. Descriptors: its pidfd, unless it has ended already; the terminal's master.
    Made {
        /// Its number in the agent's PID namespace.
        pid: i32,
        /// The first descriptor is its pidfd.
        pidfd: bool,
    },
    /// It could not be made.
    Refused(Refusal),
}

/// Why no process was made, as the child tells it.
#[derive(Clone, Debug, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct Refusal {
    /// What was attempted and why it failed, with all causes.
    pub message: String,
    /// What it means.
    pub why: Why,
}

/// The kinds of refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Why {
    /// The program does not exist.
    NoSuchProgram,
    /// The program, or the configuration, cannot be used.
    Unusable,
    /// Anything else.
    Defect,
    /// There may be no more processes.
    Exhausted,
}

/// Why the zygote made no process.
#[derive(Debug, thiserror::Error)]
pub enum ZygoteError {
    /// The zygote or its child could not be spoken with.
    #[error("cannot speak with the zygote")]
    Talk {
        /// Why.
        source: io::Error,
    },
    /// A frame from it was wrong, or too late.
    #[error("cannot get the zygote's answer")]
    Frame {
        /// Why.
        #[from]
        source: frame::FrameError,
    },
    /// A message is no JSON that we know.
    #[error("cannot write or read a message of the zygote")]
    Json {
        /// Why.
        #[from]
        source: serde_json::Error,
    },
    /// The child says no.
    #[error("cannot make the process")]
    Refused {
        /// Why.
        #[from]
        source: Refusal,
    },
}

impl Classify for ZygoteError {
    fn kind(&self) -> Kind {
        match self {
            ZygoteError::Talk { source } if source.kind() == io::ErrorKind::TimedOut => Kind::Timeout,
            ZygoteError::Talk { .. } => Kind::Unavailable,
            ZygoteError::Frame { source } if source.is_hung_up() => Kind::Unavailable,
            ZygoteError::Frame { source: frame::FrameError::TooLong { .. } } => Kind::Invalid,
            ZygoteError::Frame { .. } => Kind::Timeout,
            ZygoteError::Json { .. } => Kind::Internal,
            ZygoteError::Refused { source } => match source.why {
                Why::NoSuchProgram => Kind::NotFound,
                Why::Unusable => Kind::Invalid,
                Why::Defect => Kind::Internal,
                Why::Exhausted => Kind::Exhausted,
            },
        }
    }
}

/// A process that a child has made.
#[derive(Debug)]
pub(crate) struct Made {
    /// Its number in the agent's PID namespace.
    pub pid: i32,
    /// Refers to it; `None` if it has ended already.
    pub pidfd: Option<OwnedFd>,
    /// The master of its terminal.
    pub terminal: Option<OwnedFd>,
}

/// A process that was made and belongs to nothing yet. Dropping it kills the process, so that no failure between here and
/// the table of processes leaves a program running that no host knows.
#[derive(Debug)]
pub struct NewProcess {
    /// Its number in the agent's PID namespace.
    pub pid: i32,
    /// Refers to it; `None` if it has ended already.
    pidfd: Option<OwnedFd>,
    /// The master of its terminal.
    pub terminal: Option<OwnedFd>,
}

impl NewProcess {
    /// Takes the process over: its number, and its pidfd unless it has ended already. It is no longer killed.
    pub fn keep(mut self) -> (i32, Option<OwnedFd>) {
        (self.pid, self.pidfd.take())
    }
}

impl Drop for NewProcess {
    fn drop(&mut self) {
        if let Some(pidfd) = self.pidfd.take() {
            kill(self.pid, &pidfd);
        }
    }
}

/// Kills a process whose request has failed. Its parent reaps it.
fn kill(pid: i32, pidfd: &OwnedFd) {
    match crate::sys::pidfd_signal(pidfd, libc::SIGKILL) {
        Err(error) if error.raw_os_error() != Some(libc::ESRCH) => {
            tracing::error!(%error, pid, "cannot kill a process whose request has failed");
        }
        _ => {}
    }
}

/// The agent's end of the zygote.
#[derive(Debug)]
pub struct Zygote {
    control: OwnedFd,
}

impl Zygote {
    /// Forks the zygote, which does not keep these descriptors. The caller must have one thread.
    pub fn fork(mine: &[&OwnedFd]) -> io::Result<Zygote> {
        let (ours, theirs) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)?;
        match crate::sys::fork()? {
            None => {
                drop(ours);
                for fd in mine {
                    // Nobody in this process uses or drops them again: `run` does not return.
                    let _ = nix::unistd::close(fd.as_raw_fd());
                }
                child::run(theirs)
            }
            Some(_) => Ok(Zygote { control: ours }),
        }
    }

    /// Has a child of the zygote do this, and waits for the answer.
    pub fn call(&self, request: &Request, fds: &[&OwnedFd]) -> Result<NewProcess, ZygoteError> {
        self.call_within(PATIENCE, request, fds)
    }

    fn call_within(&self, limit: Duration, request: &Request, fds: &[&OwnedFd]) -> Result<NewProcess, ZygoteError> {
        let talk = |source| ZygoteError::Talk { source };
        let (ours, theirs) = UnixStream::pair().map_err(talk)?;
        let mut child = Timed::new(&ours, limit);
        let mut all = vec![theirs.as_raw_fd()];
        all.extend(fds.iter().map(|fd| fd.as_raw_fd()));
        let send = || send_with(&self.control, b"!", &all, MsgFlags::MSG_DONTWAIT);
        Timed::new(&self.control, limit).when_ready(PollFlags::POLLOUT, send).map_err(talk)?;
        drop(theirs);
        frame::write_bytes(&mut child, &serde_json::to_vec(request)?, frame::MAX_ZYGOTE)?;
        let receive = || receive_with(&ours, MsgFlags::MSG_DONTWAIT);
        let (first, received) = child.when_ready(PollFlags::POLLIN, receive).map_err(talk)?;
        let answer = frame::read_bytes(&mut io::Cursor::new(first).chain(&mut child), frame::MAX_ZYGOTE)?;
        let answer = serde_json::from_slice(&answer)?;
        let (pid, pidfd) = match answer {
            Answer::Made { pid, pidfd } => (pid, pidfd),
            Answer::Refused(refusal) => return Err(refusal.into()),
        };
        let mut received = received.into_iter();
        let pidfd = if pidfd { received.next() } else { None };
        let made = NewProcess { pid, pidfd, terminal: received.next() };
        child.write_all(&TAKEN).map_err(talk)?;
        Ok(made)
    }
}

/// Sends bytes with descriptors.
fn send_with(to: impl AsFd, bytes: &[u8], fds: &[i32], flags: MsgFlags) -> nix::Result<()> {
    let rights = [ControlMessage::ScmRights(fds)];
    let rights = if fds.is_empty() { &[][..] } else { &rights[..] };
    let (to, flags) = (to.as_fd().as_raw_fd(), flags | MsgFlags::MSG_NOSIGNAL);
    retry_interrupted(|| sendmsg::<()>(to, &[IoSlice::new(bytes)], rights, flags, None)).map(drop)
}

/// Receives at most 4 bytes, none at the end of the stream, and the descriptors that came with them.
fn receive_with(from: impl AsFd, flags: MsgFlags) -> nix::Result<(Vec<u8>, Vec<OwnedFd>)> {
    let (from, flags) = (from.as_fd().as_raw_fd(), flags | MsgFlags::MSG_CMSG_CLOEXEC);
    retry_interrupted(|| {
        let mut bytes = [0; 4];
        let mut space = nix::cmsg_space!([i32; 8]);
        let mut iov = [IoSliceMut::new(&mut bytes)];
        let message = recvmsg::<UnixAddr>(from, &mut iov, Some(&mut space), flags)?;
        let length = message.bytes;
        let mut fds = Vec::new();
        for control in message.cmsgs()? {
            if let ControlMessageOwned::ScmRights(received) = control {
                fds.extend(crate::sys::adopt(received));
            }
        }
        Ok((bytes.get(..length).unwrap_or_default().to_vec(), fds))
    })
}

/// Sends a child's answer, with the process's pidfd and its terminal's master.
fn answer(to: &mut UnixStream, answer: &Answer, fds: &[&OwnedFd]) -> Result<(), ZygoteError> {
    let talk = |source| ZygoteError::Talk { source };
    let bytes = frame::frame(&serde_json::to_vec(answer)?, frame::MAX_ZYGOTE)?;
    let (first, rest) = bytes.split_at_checked(4).unwrap_or((&bytes, &[]));
    let fds: Vec<i32> = fds.iter().map(|fd| fd.as_raw_fd()).collect();
    send_with(&*to, first, &fds, MsgFlags::empty()).map_err(|error| talk(error.into()))?;
    to.write_all(rest).map_err(talk)
}

/// Answers with a process that was made, and waits until the agent has it. If the agent does not take it, because it has
/// given up or is gone, the process is killed.
fn hand_over(to: &mut UnixStream, made: &Made) -> Result<(), ZygoteError> {
    let fds: Vec<&OwnedFd> = made.pidfd.iter().chain(&made.terminal).collect();
    let taken = answer(to, &Answer::Made { pid: made.pid, pidfd: made.pidfd.is_some() }, &fds)
        .and_then(|()| to.read_exact(&mut [0; TAKEN.len()]).map_err(|source| ZygoteError::Talk { source }));
    if taken.is_err()
        && let Some(pidfd) = &made.pidfd
    {
        kill(made.pid, pidfd);
    }
    taken
}
