//! Defines the requests that the agent sends to a child of the zygote, and the answers.
//!
//! Messages are JSON: agent, zygote and child are the same program, so they need no versions.

use libcontainer::oci_spec::runtime::{LinuxSeccomp, Mount, Process};
use nacelle_base::Chain;
use serde::{Deserialize, Serialize};
use std::io;
use std::path::PathBuf;

/// A request to a child of the zygote.
#[derive(Debug, Serialize, Deserialize)]
pub enum ZygoteRequest {
    /// Create the container of a bundle. Descriptors: stdin, stdout, stderr (none with a terminal).
    Create(CreateCommand),
    /// Start a process in a container or in the guest. Descriptors: for a container a pidfd of its first process, then stdin, stdout
    /// and stderr (none with a terminal).
    Exec(Box<ExecCommand>),
    /// Start the holder of the pod's PID namespace.
    Pause {
        /// Whether the PID namespace belongs to the pod's user namespace.
        user_namespace: bool,
    },
}

/// A container to create.
#[derive(Debug, Serialize, Deserialize)]
pub struct CreateCommand {
    /// The container's id, which names its bundle.
    pub id: String,
    /// Whether the container has a terminal.
    pub tty: bool,
    /// The only paths at and below the container's /proc where something may be mounted.
    pub in_proc: Vec<PathBuf>,
    /// The mounts at and below the container's /dev that are made when libcontainer is done.
    pub late: Vec<Mount>,
}

/// Where the process of an exec runs.
#[derive(Debug, Serialize, Deserialize)]
pub enum ExecTarget {
    /// In the namespaces of a container.
    Container {
        /// Whether the container is in the pod's user namespace.
        user_namespace: bool,
        /// Whether the container has a cgroup namespace of its own.
        cgroup_namespace: bool,
    },
    /// In the agent's namespaces, but with a root directory in memory.
    Guest {
        /// The mount point of the image with the programs.
        image: PathBuf,
    },
}

/// A process to start in a container or in the guest.
#[derive(Debug, Serialize, Deserialize)]
pub struct ExecCommand {
    /// The program, its user and rights, and whether it has a terminal.
    pub process: Process,
    /// The container's seccomp filter.
    pub seccomp: Option<LinuxSeccomp>,
    /// Whether a container that sees the process may trace it: then it must never have a right that its container has not.
    pub may_be_traced: bool,
    /// Where it runs.
    pub target: ExecTarget,
    /// The cgroup of the container, or of the process in the guest, a path in the file system.
    pub cgroup: String,
    /// The cgroup below `cgroup` with the container's first process, if the container has made cgroups of its own: then
    /// `cgroup` may hold no process.
    pub init_cgroup: Option<String>,
    /// The terminal's columns and rows; 0: unknown.
    pub size: (u16, u16),
}

/// The answer of a child.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum ZygoteReply {
    /// The process was created. Descriptors: its pidfd, unless it has ended already; the terminal's master.
    Created {
        /// The PID in the agent's PID namespace.
        pid: i32,
        /// Whether the first descriptor is the pidfd.
        pidfd: bool,
    },
    /// The process could not be created.
    Refused(Refusal),
}

/// The reason why a child created no process.
#[derive(Clone, Debug, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct Refusal {
    /// The failed step and all causes of the failure.
    pub message: String,
    /// The meaning of the failure for the caller.
    pub kind: RefusalKind,
}

/// The kinds of refusal. The first process of a container reports one as a byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RefusalKind {
    /// The program does not exist.
    NoSuchProgram,
    /// The program or the configuration is not usable.
    Unusable,
    /// Anything else.
    Internal,
    /// A limit on processes is reached.
    Exhausted,
}

/// The largest report of a refusal in bytes, below what a pipe takes at once.
pub(super) const MAX_REPORT: usize = 1024;

impl Refusal {
    /// Returns the bytes with which a container's first process reports this refusal: the kind, and the message.
    pub(super) fn to_report(&self) -> Vec<u8> {
        let text = self.message.as_bytes();
        [&[self.kind as u8], text.get(..MAX_REPORT - 1).unwrap_or(text)].concat()
    }

    /// Reads a report; `None` if it is not one.
    pub(super) fn from_report(report: &[u8]) -> Option<Refusal> {
        let (code, text) = report.split_first()?;
        let kinds = [RefusalKind::NoSuchProgram, RefusalKind::Unusable, RefusalKind::Internal, RefusalKind::Exhausted];
        let kind = kinds.into_iter().find(|kind| *kind as u8 == *code)?;
        (!text.is_empty()).then(|| Refusal { message: String::from_utf8_lossy(text).into_owned(), kind })
    }

    /// A step failed that is not expected to fail.
    pub(super) fn internal(what: &str, error: &dyn std::error::Error) -> Refusal {
        Refusal { message: format!("cannot {what}: {}", Chain(error)), kind: RefusalKind::Internal }
    }

    /// A fork failed. EAGAIN means that a limit on processes is reached, which no repetition changes.
    pub(super) fn fork_failed(what: &str, error: &io::Error) -> Refusal {
        let mut refusal = Refusal::internal(what, error);
        if error.raw_os_error() == Some(libc::EAGAIN) {
            refusal.kind = RefusalKind::Exhausted;
            refusal.message +=
                "; a limit on processes is reached: pids.max of the container, the pod or the node, or RLIMIT_NPROC";
        }
        refusal
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_has_kind_and_reason() {
        for kind in [RefusalKind::NoSuchProgram, RefusalKind::Unusable, RefusalKind::Internal, RefusalKind::Exhausted] {
            let refusal = Refusal { message: "cannot run \"/x\"".into(), kind };
            let read = Refusal::from_report(&refusal.to_report()).unwrap();
            assert_eq!((read.kind, read.message), (kind, refusal.message));
        }
        let long = Refusal { message: "x".repeat(5000), kind: RefusalKind::Internal };
        assert_eq!(long.to_report().len(), MAX_REPORT);
        for report in [&[][..], &[0], &[200, b'x']] {
            assert!(Refusal::from_report(report).is_none());
        }
    }
}
