//! Owns: what the streaming server asks of the node.

use std::error::Error;
use std::pin::Pin;
use tokio::net::UnixStream;

/// A command that is to be run in a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exec {
    /// The container's id.
    pub container: String,
    /// Program and arguments.
    pub args: Vec<String>,
    /// It gets a terminal.
    pub tty: bool,
    /// The client will send its input.
    pub stdin: bool,
    /// The client wants its output.
    pub stdout: bool,
    /// The client wants its errors; not with a terminal.
    pub stderr: bool,
}

/// A container that a client wants to listen to and talk to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attach {
    /// The container's id.
    pub container: String,
    /// It has a terminal.
    pub tty: bool,
    /// The client will send input.
    pub stdin: bool,
    /// The client wants its output.
    pub stdout: bool,
    /// The client wants its errors; not with a terminal.
    pub stderr: bool,
}

/// The size of a terminal, as clients send it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize)]
pub struct Size {
    /// Columns.
    #[serde(rename = "Width")]
    pub columns: u16,
    /// Rows.
    #[serde(rename = "Height")]
    pub rows: u16,
}

/// The end of a process: its exit code.
pub type End<E> = Pin<Box<dyn Future<Output = Result<i32, E>> + Send>>;

/// A process whose streams are open. Whoever drops `end` gives the process up: a command is killed.
pub struct Process<E> {
    /// Its name in its container; empty: the container's first process.
    pub exec_id: String,
    /// The end of the client's input is the end of the session: the process goes on without it.
    pub detaches: bool,
    /// Takes its input; shutting it down for writing ends that.
    pub stdin: Option<UnixStream>,
    /// Gives its output; with a terminal, all of it.
    pub stdout: Option<UnixStream>,
    /// Gives its errors.
    pub stderr: Option<UnixStream>,
    /// Ends with the process.
    pub end: End<E>,
}

/// The node, as the streaming server sees it.
pub trait Guests: Send + Sync + 'static {
    /// Why something was not possible; its text, with its causes, is shown to the client.
    type Error: Error + Send + Sync + 'static;

    /// Starts a command and opens its streams.
    fn exec(&self, exec: &Exec) -> impl Future<Output = Result<Process<Self::Error>, Self::Error>> + Send;

    /// Opens the streams of a container that runs.
    fn attach(&self, attach: &Attach) -> impl Future<Output = Result<Process<Self::Error>, Self::Error>> + Send;

    /// Connects to a TCP port of a pod, from inside.
    fn dial(&self, pod: &str, port: u16) -> impl Future<Output = Result<UnixStream, Self::Error>> + Send;

    /// Changes the size of a process's terminal.
    fn resize(
        &self,
        container: &str,
        exec_id: &str,
        size: Size,
    ) -> impl Future<Output = Result<(), Self::Error>> + Send;
}
