//! Defines the exit codes of `nacelle`, and chooses one for an error.

use super::daemon::is_without_answer;
use nacelle_base::FailureKind;
use std::error::Error;
use std::io;
use std::path::PathBuf;
use std::process::ExitCode;

/// The exit codes. They are part of the interface: docs/reference/cli.md lists them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ExitStatus {
    /// The command did what it was asked for, and found no problem.
    Success,
    /// The command failed, or found a problem.
    Failure,
    /// The command line is invalid. clap has the same code.
    Usage,
    /// The named object does not exist.
    NotFound,
    /// The caller has no permission.
    Denied,
    /// The daemon, or a service that it needs, does not respond. A retry may help.
    Unreachable,
    /// The reader of standard output is gone: the code that a shell reports for a program that SIGPIPE has ended.
    OutputClosed,
    /// A command in a guest has ended with this code.
    Command(u8),
}

impl ExitStatus {
    /// All codes of `nacelle` itself with their meanings, for the help and the documentation.
    pub(super) const ALL: [(ExitStatus, &'static str); 7] = [
        (ExitStatus::Success, "success"),
        (ExitStatus::Failure, "the command failed, or found a problem"),
        (ExitStatus::Usage, "the command line is invalid"),
        (ExitStatus::NotFound, "the named object does not exist"),
        (ExitStatus::Denied, "permission denied"),
        (ExitStatus::Unreachable, "the daemon, or a service that it needs, does not respond"),
        (ExitStatus::OutputClosed, "standard output was closed by its reader"),
    ];

    /// Returns the number.
    pub(super) fn code(self) -> u8 {
        match self {
            ExitStatus::Success => 0,
            ExitStatus::Failure => 1,
            ExitStatus::Usage => 2,
            ExitStatus::NotFound => 3,
            ExitStatus::Denied => 4,
            ExitStatus::Unreachable => 5,
            ExitStatus::OutputClosed => 141,
            ExitStatus::Command(code) => code,
        }
    }

    /// Returns success if nothing is wrong, otherwise failure.
    pub(super) fn of(is_good: bool) -> ExitStatus {
        if is_good { ExitStatus::Success } else { ExitStatus::Failure }
    }

    /// Returns the status for an error: the first of its causes that has a status of its own decides.
    pub(super) fn of_error(error: &anyhow::Error) -> ExitStatus {
        error.chain().find_map(status_of_cause).unwrap_or(ExitStatus::Failure)
    }
}

impl From<ExitStatus> for ExitCode {
    fn from(status: ExitStatus) -> ExitCode {
        ExitCode::from(status.code())
    }
}

/// Why a command failed, where the reason has an exit code.
#[derive(Debug, thiserror::Error)]
pub(super) enum CommandError {
    /// The daemon rejected the request, or failed to do what it asks for.
    #[error("{code:?}: {message}")]
    Daemon {
        /// The code of the response.
        code: tonic::Code,
        /// The daemon's explanation.
        message: String,
    },
    /// No process listens on the daemon's socket.
    #[error("cannot connect to the daemon on {socket}: is it running?", socket = socket.display())]
    NoDaemon {
        /// The path of the socket.
        socket: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// The daemon accepts no connection, or answers no ping.
    #[error(
        "the daemon does not respond: it is stopped, overloaded or still starting; see systemctl status nacelle and journalctl -u nacelle"
    )]
    NoAnswer,
    /// The daemon ended while the command waited for it.
    #[error(
        "the connection to the daemon is lost: it has stopped or is restarting; see systemctl status nacelle and journalctl -u nacelle"
    )]
    ConnectionLost,
    /// The user may not use the daemon's socket.
    #[error("cannot connect to the daemon on {socket}: permission denied; only root may use it", socket = socket.display())]
    SocketDenied {
        /// The path of the socket.
        socket: PathBuf,
    },
    /// The object that the command line names does not exist.
    #[error("{kind} {name} does not exist")]
    NotFound {
        /// What it would be.
        kind: &'static str,
        /// Its name on the command line.
        name: String,
    },
    /// The reader of standard output has ended.
    #[error("standard output is closed")]
    OutputClosed,
}

impl CommandError {
    /// Converts the status of a failed request.
    pub(super) fn from_status(status: &tonic::Status) -> CommandError {
        match status.source() {
            _ if is_without_answer(status) => CommandError::NoAnswer,
            // A status of the daemon has no cause here: the causes do not travel.
            Some(_) => CommandError::ConnectionLost,
            None => CommandError::Daemon { code: status.code(), message: status.message().to_owned() },
        }
    }

    fn status(&self) -> ExitStatus {
        match self {
            CommandError::Daemon { code, .. } => status_of_kind(FailureKind::from_grpc_code(*code as i32)),
            CommandError::NoDaemon { .. } | CommandError::NoAnswer | CommandError::ConnectionLost => {
                ExitStatus::Unreachable
            }
            CommandError::SocketDenied { .. } => ExitStatus::Denied,
            CommandError::NotFound { .. } => ExitStatus::NotFound,
            CommandError::OutputClosed => ExitStatus::OutputClosed,
        }
    }
}

/// Returns the status for a kind of failure that the daemon reports.
fn status_of_kind(kind: FailureKind) -> ExitStatus {
    match kind {
        FailureKind::NotFound => ExitStatus::NotFound,
        FailureKind::Denied => ExitStatus::Denied,
        FailureKind::Unavailable => ExitStatus::Unreachable,
        FailureKind::Invalid
        | FailureKind::AlreadyExists
        | FailureKind::Conflict
        | FailureKind::Exhausted
        | FailureKind::Timeout
        | FailureKind::Unsupported
        | FailureKind::Internal => ExitStatus::Failure,
    }
}

fn status_of_cause(cause: &(dyn Error + 'static)) -> Option<ExitStatus> {
    if let Some(error) = cause.downcast_ref::<CommandError>() {
        return Some(error.status());
    }
    let error = cause.downcast_ref::<io::Error>()?;
    (error.kind() == io::ErrorKind::PermissionDenied).then_some(ExitStatus::Denied)
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Context;

    #[test]
    fn the_first_cause_with_a_code_decides() {
        let daemon = |code| CommandError::from_status(&tonic::Status::new(code, "x"));
        let socket = || PathBuf::from("/s");
        for (error, status) in [
            (daemon(tonic::Code::NotFound), ExitStatus::NotFound),
            (daemon(tonic::Code::PermissionDenied), ExitStatus::Denied),
            (daemon(tonic::Code::Unavailable), ExitStatus::Unreachable),
            (daemon(tonic::Code::InvalidArgument), ExitStatus::Failure),
            (daemon(tonic::Code::DataLoss), ExitStatus::Failure),
            (CommandError::NoDaemon { socket: socket(), source: io::Error::other("x") }, ExitStatus::Unreachable),
            (CommandError::NoAnswer, ExitStatus::Unreachable),
            (CommandError::ConnectionLost, ExitStatus::Unreachable),
            (CommandError::SocketDenied { socket: socket() }, ExitStatus::Denied),
            (CommandError::NotFound { kind: "image", name: "a".into() }, ExitStatus::NotFound),
            (CommandError::OutputClosed, ExitStatus::OutputClosed),
        ] {
            let error = Err::<(), _>(error).context("outer").unwrap_err();
            assert_eq!(ExitStatus::of_error(&error), status, "{error:#}");
        }
        let denied = io::Error::from(io::ErrorKind::PermissionDenied);
        assert_eq!(ExitStatus::of_error(&anyhow::Error::from(denied).context("outer")), ExitStatus::Denied);
        assert_eq!(ExitStatus::of_error(&anyhow::anyhow!("x")), ExitStatus::Failure);
    }

    #[test]
    fn the_documentation_lists_every_exit_code() {
        let page = include_str!("../../../../docs/reference/cli.md");
        for (status, meaning) in ExitStatus::ALL {
            let row = format!("| {} | {meaning}", status.code());
            assert!(page.contains(&row), "docs/reference/cli.md lacks: {row}");
        }
    }
}
