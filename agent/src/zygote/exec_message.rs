//! Defines what the processes that start a command in a container report to the child of the zygote (`exec`): how far they are, and the
//! task that failed. The program's process has the container's rights, so its messages are checked.

use nix::errno::Errno;

/// The tasks of the step and the program's process, in order. Messages contain their numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ExecStage {
    Profile,
    Namespaces,
    GuestRoot,
    Terminal,
    Stdio,
    Limits,
    Directory,
    User,
    NoNewPrivileges,
    Filter,
    Capabilities,
    Cgroup,
    Fork,
    Session,
    Find,
    Run,
}

impl ExecStage {
    pub(super) const ALL: [ExecStage; 16] = [
        ExecStage::Profile,
        ExecStage::Namespaces,
        ExecStage::GuestRoot,
        ExecStage::Terminal,
        ExecStage::Stdio,
        ExecStage::Limits,
        ExecStage::Directory,
        ExecStage::User,
        ExecStage::NoNewPrivileges,
        ExecStage::Filter,
        ExecStage::Capabilities,
        ExecStage::Cgroup,
        ExecStage::Fork,
        ExecStage::Session,
        ExecStage::Find,
        ExecStage::Run,
    ];

    /// Returns the task as the middle of the sentence "cannot … NAME".
    pub(super) fn description(self) -> &'static str {
        match self {
            ExecStage::Profile => "set the AppArmor profile",
            ExecStage::Cgroup => "enter the container's cgroup to run",
            ExecStage::Namespaces => "enter the container's namespaces to run",
            ExecStage::GuestRoot => "prepare a root directory in the guest for",
            ExecStage::Terminal => "open a terminal for",
            ExecStage::Stdio => "connect the streams of",
            ExecStage::Limits => "set the resource limits of",
            ExecStage::Directory => "enter the working directory",
            ExecStage::User => "set the groups and the user of",
            ExecStage::NoNewPrivileges => "set no_new_privs for",
            ExecStage::Filter => "load the seccomp filter of",
            ExecStage::Capabilities => "set the capabilities of",
            ExecStage::Fork => "fork the process of",
            ExecStage::Session => "create a session for",
            ExecStage::Find => "find the program",
            ExecStage::Run => "run the program",
        }
    }
}

/// The task that failed, and its error.
pub(super) type FailedTask = (ExecStage, Errno);

/// A message of four bytes, so that one write is one message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ExecMessage {
    /// The master of the terminal is attached.
    Terminal,
    /// The program's process has this PID in the agent's PID namespace.
    Process(i32),
    /// The program's process has its session and its terminal.
    Session,
    /// A task failed.
    Failed(ExecStage, Errno),
}

impl ExecMessage {
    /// Encodes the message.
    pub(super) fn bytes(self) -> [u8; 4] {
        let (kind, number) = match self {
            ExecMessage::Terminal => (0, 0),
            // The kernel's largest PID has 22 bits.
            ExecMessage::Process(pid) => (1, pid),
            ExecMessage::Session => (2, 0),
            ExecMessage::Failed(task, error) => (3 + task as u8, error as i32),
        };
        let [a, b, c, _] = number.to_le_bytes();
        [kind, a, b, c]
    }

    /// Decodes a message; returns `None` if it is invalid.
    pub(super) fn parse(bytes: &[u8]) -> Option<ExecMessage> {
        let [kind, a, b, c]: [u8; 4] = bytes.try_into().ok()?;
        let number = i32::from_le_bytes([a, b, c, 0]);
        match kind {
            0 => Some(ExecMessage::Terminal),
            1 => Some(ExecMessage::Process(number)),
            2 => Some(ExecMessage::Session),
            kind => {
                let task = ExecStage::ALL.get(usize::from(kind.checked_sub(3)?)).copied()?;
                Some(ExecMessage::Failed(task, Errno::from_raw(number)))
            }
        }
    }
}
