//! Owns: the zygote: a process forked before the agent has threads, which forks one child per request; only such a
//! child makes processes, for fork and libcontainer must not run in a threaded process.
//! May use: `frame`, `sys`. This file is the agent's side and the wire; `child` is the other side.
//! Threads: `Zygote::call` blocks and is for blocking threads; any number may run at once.

mod child;
mod create;
mod exec;
mod executor;

use libcontainer::oci_spec::runtime::{LinuxSeccomp, Process};
use nacelle_base::{Classify, Kind};
use nix::sys::socket::{
    AddressFamily, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType, UnixAddr, recvmsg, sendmsg,
    socketpair,
};
use serde::{Deserialize, Serialize};
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use crate::frame;

/// How long a child may take for one request.
const PATIENCE: Duration = Duration::from_secs(60);

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
}

/// A process to start.
#[derive(Debug, Serialize, Deserialize)]
pub struct Exec {
    /// What to run, as whom; `terminal` says whether it gets a terminal.
    pub process: Process,
    /// The container's seccomp filter.
    pub seccomp: Option<LinuxSeccomp>,
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
    /// The process, in the agent's PID namespace.
    Made(i32),
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
            ZygoteError::Talk { .. } => Kind::Unavailable,
            ZygoteError::Frame { .. } => Kind::Timeout,
            ZygoteError::Json { .. } => Kind::Internal,
            ZygoteError::Refused { source } => match source.why {
                Why::NoSuchProgram => Kind::NotFound,
                Why::Unusable => Kind::Invalid,
                Why::Defect => Kind::Internal,
            },
        }
    }
}

/// A process that was made.
#[derive(Debug)]
pub struct Made {
    /// Its number in the agent's PID namespace.
    pub pid: i32,
    /// The master of its terminal.
    pub terminal: Option<OwnedFd>,
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
    pub fn call(&self, request: &Request, fds: &[&OwnedFd]) -> Result<Made, ZygoteError> {
        let talk = |source| ZygoteError::Talk { source };
        let (mut ours, theirs) = UnixStream::pair().map_err(talk)?;
        ours.set_read_timeout(Some(PATIENCE)).map_err(talk)?;
        ours.set_write_timeout(Some(PATIENCE)).map_err(talk)?;
        let mut all = vec![theirs.as_raw_fd()];
        all.extend(fds.iter().map(|fd| fd.as_raw_fd()));
        send_with(&self.control, b"!", &all).map_err(talk)?;
        drop(theirs);
        frame::write_bytes(&mut ours, &serde_json::to_vec(request)?)?;
        let (first, received) = receive_with(&ours).map_err(talk)?;
        let mut answer = io::Cursor::new(first).chain(&mut ours);
        match serde_json::from_slice(&frame::read_bytes(&mut answer)?)? {
            Answer::Made(pid) => Ok(Made { pid, terminal: received.into_iter().next() }),
            Answer::Refused(refusal) => Err(refusal.into()),
        }
    }
}

/// Sends bytes with descriptors.
fn send_with(to: impl AsFd, bytes: &[u8], fds: &[i32]) -> io::Result<()> {
    let rights = [ControlMessage::ScmRights(fds)];
    let rights = if fds.is_empty() { &[][..] } else { &rights[..] };
    sendmsg::<()>(to.as_fd().as_raw_fd(), &[IoSlice::new(bytes)], rights, MsgFlags::MSG_NOSIGNAL, None)?;
    Ok(())
}

/// Receives at most 4 bytes and the descriptors that came with them.
fn receive_with(from: impl AsFd) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
    let mut bytes = [0; 4];
    let mut space = nix::cmsg_space!([i32; 8]);
    let mut iov = [IoSliceMut::new(&mut bytes)];
    let flags = MsgFlags::MSG_CMSG_CLOEXEC;
    let message = recvmsg::<UnixAddr>(from.as_fd().as_raw_fd(), &mut iov, Some(&mut space), flags)?;
    let length = message.bytes;
    let mut fds = Vec::new();
    for control in message.cmsgs()? {
        if let ControlMessageOwned::ScmRights(received) = control {
            fds.extend(crate::sys::adopt(received));
        }
    }
    if length == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok((bytes.get(..length).unwrap_or_default().to_vec(), fds))
}

/// Sends a child's answer, and the terminal's master with it.
fn answer(to: &mut UnixStream, answer: &Answer, terminal: Option<&OwnedFd>) -> Result<(), ZygoteError> {
    let bytes = frame::frame(&serde_json::to_vec(answer)?)?;
    let (first, rest) = bytes.split_at_checked(4).unwrap_or((&bytes, &[]));
    let fds: Vec<i32> = terminal.iter().map(|fd| fd.as_raw_fd()).collect();
    send_with(&*to, first, &fds).map_err(|source| ZygoteError::Talk { source })?;
    to.write_all(rest).map_err(|source| ZygoteError::Talk { source })
}
