//! Defines the interface between the streaming server and the node.

use std::error::Error;
use std::pin::Pin;
use tokio::net::UnixStream;

/// A command to run in a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exec {
    /// The container's id.
    pub container: String,
    /// The program and its arguments.
    pub args: Vec<String>,
    /// Whether the command gets a terminal.
    pub tty: bool,
    /// Whether the client will send input.
    pub stdin: bool,
    /// Whether the client wants standard output.
    pub stdout: bool,
    /// Whether the client wants standard error. False with a terminal.
    pub stderr: bool,
}

/// A container whose streams a client attaches to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attach {
    /// The container's id.
    pub container: String,
    /// Whether the container has a terminal.
    pub tty: bool,
    /// Whether the client will send input.
    pub stdin: bool,
    /// Whether the client wants standard output.
    pub stdout: bool,
    /// Whether the client wants standard error. False with a terminal.
    pub stderr: bool,
}

/// The size of a terminal, as clients send it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize)]
pub struct TerminalSize {
    /// The number of columns.
    #[serde(rename = "Width")]
    pub columns: u16,
    /// The number of rows.
    #[serde(rename = "Height")]
    pub rows: u16,
}

/// The exit code of a process.
pub type ExitStatus<E> = Pin<Box<dyn Future<Output = Result<i32, E>> + Send>>;

/// A process with open streams. Dropping it disconnects from the process, which continues: the input of a command ends and its output is
/// dropped; that of a container's first process stays as it is.
pub struct ProcessStreams<E> {
    /// The process's name in its container; empty for the container's first process.
    pub exec_id: String,
    /// Whether the session ends with the client's input. The process continues without it.
    pub detaches: bool,
    /// Standard input. Shutting it down for writing ends the input.
    pub stdin: Option<UnixStream>,
    /// Standard output; with a terminal, all output.
    pub stdout: Option<UnixStream>,
    /// Standard error.
    pub stderr: Option<UnixStream>,
    /// Completes when the process ends.
    pub end: ExitStatus<E>,
}

/// The node as the streaming server sees it.
pub trait StreamBackend: Send + Sync + 'static {
    /// The error of a request. Its text and causes are sent to the client.
    type Error: Error + Send + Sync + 'static;

    /// Starts a command and opens its streams.
    fn exec(&self, exec: &Exec) -> impl Future<Output = Result<ProcessStreams<Self::Error>, Self::Error>> + Send;

    /// Opens the streams of a running container.
    fn attach(&self, attach: &Attach) -> impl Future<Output = Result<ProcessStreams<Self::Error>, Self::Error>> + Send;

    /// Connects to a TCP port of a pod, from inside the pod.
    fn connect_to_port(&self, pod: &str, port: u16) -> impl Future<Output = Result<UnixStream, Self::Error>> + Send;

    /// Changes the size of a process's terminal.
    fn resize(
        &self,
        container: &str,
        exec_id: &str,
        size: TerminalSize,
    ) -> impl Future<Output = Result<(), Self::Error>> + Send;
}
