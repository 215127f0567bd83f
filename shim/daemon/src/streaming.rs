//! Connects the streaming server with the node: finds the container or pod, calls its process, and opens the streams.

use crate::guest_port::GuestPorts;
use crate::lifecycle::{LifecycleError, Node, Running, ask, at};
use common::Stream;
use nacelle_model::machine::SCREEN_PORT;
use nacelle_pod::client::{PodClient, RunningExec};
use nacelle_proto::{common, pod as proto};
use nacelle_stream::{Attach, Exec, ProcessStreams, TerminalSize};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::UnixStream;

/// The node as the streaming server uses it.
pub struct NodeStreams {
    node: Node,
    guest_ports: GuestPorts,
}

/// The streams of one process.
struct Streams<'a> {
    client: &'a PodClient,
    id: &'a str,
    exec_id: &'a str,
    limit: Duration,
}

impl Streams<'_> {
    async fn open(&self, stream: Stream, wanted: bool) -> Result<Option<UnixStream>, LifecycleError> {
        if !wanted {
            return Ok(None);
        }
        let (id, exec_id) = (self.id.to_owned(), self.exec_id.to_owned());
        let open = proto::StreamOpen { id, exec_id, stream: stream.into(), ..Default::default() };
        ask("open a stream", self.limit, self.client.open_stream(open)).await.map(Some)
    }

    /// Opens those of stdin, stdout and stderr that are requested.
    async fn open_all(&self, [stdin, stdout, stderr]: [bool; 3]) -> Result<[Option<UnixStream>; 3], LifecycleError> {
        let all = tokio::try_join!(
            self.open(Stream::Stdin, stdin),
            self.open(Stream::Stdout, stdout),
            self.open(Stream::Stderr, stderr),
        );
        all.map(Into::into)
    }
}

impl NodeStreams {
    /// Creates the adapter for this node.
    pub fn new(node: Node) -> NodeStreams {
        NodeStreams { node, guest_ports: GuestPorts::default() }
    }

    /// Opens the console of the machine in a container, as input and output. The container's own setting of standard input does
    /// not matter: a machine's console always has a keyboard.
    pub(crate) async fn console(&self, container: &str) -> Result<(UnixStream, UnixStream), LifecycleError> {
        let running = self.node.running(container)?;
        let streams = Streams { client: &running.client, id: running.id.as_str(), exec_id: "", limit: self.limit() };
        match streams.open_all([true, true, false]).await? {
            [Some(input), Some(output), _] => Ok((input, output)),
            // Unreachable: a requested stream is open, or its error was returned.
            _ => Err(LifecycleError::NotRunning { id: running.id.to_string(), why: String::new() }),
        }
    }

    /// Runs a command in the guest of a pod, with the programs of the image of a container.
    pub(crate) async fn start_guest_shell(
        &self,
        client: &PodClient,
        request: proto::ExecRequest,
    ) -> Result<ProcessStreams<LifecycleError>, LifecycleError> {
        let (id, tty, stdin) = (request.id.clone(), request.tty, request.stdin);
        let step = "run the command in the guest";
        let running = ask(step, self.limit(), client.start_guest_shell(request)).await?;
        self.connect(client, &id, running, step, [stdin, true, !tty]).await
    }

    /// Changes the size of the terminal of a process.
    pub(crate) async fn resize_terminal(
        &self,
        client: &PodClient,
        request: common::ResizeRequest,
    ) -> Result<(), LifecycleError> {
        ask("resize the terminal", self.limit(), client.resize(request)).await
    }

    /// Opens those of stdin, stdout and stderr of a command that are requested.
    async fn connect(
        &self,
        client: &PodClient,
        id: &str,
        running: RunningExec,
        step: &'static str,
        wanted: [bool; 3],
    ) -> Result<ProcessStreams<LifecycleError>, LifecycleError> {
        let exec_id = running.exec_id.clone();
        let streams = Streams { client, id, exec_id: &exec_id, limit: self.limit() };
        let [stdin, stdout, stderr] = streams.open_all(wanted).await?;
        let end = Box::pin(async move {
            let code = running.wait_for_exit().await.map_err(at(step))?;
            Ok(i32::try_from(code).unwrap_or(i32::MAX))
        });
        Ok(ProcessStreams { exec_id, detaches: false, stdin, stdout, stderr, end })
    }

    fn limit(&self) -> Duration {
        self.node.services().request_timeout()
    }
}

impl nacelle_stream::StreamBackend for NodeStreams {
    type Error = LifecycleError;

    async fn exec(&self, exec: &Exec) -> Result<ProcessStreams<LifecycleError>, LifecycleError> {
        let Running { id, client, .. } = self.node.running(&exec.container)?;
        let (id, step) = (id.as_str(), "run the command");
        let request =
            proto::ExecRequest { id: id.to_owned(), args: exec.args.clone(), tty: exec.tty, stdin: exec.stdin };
        let running = ask(step, self.limit(), client.exec(request)).await?;
        // Output that the client does not request is read all the same, so that the command does not block on a full pipe.
        self.connect(&client, id, running, step, [exec.stdin, true, !exec.tty]).await
    }

    async fn attach(&self, attach: &Attach) -> Result<ProcessStreams<LifecycleError>, LifecycleError> {
        let running = self.node.running(&attach.container)?;
        let streams = Streams { client: &running.client, id: running.id.as_str(), exec_id: "", limit: self.limit() };
        let wanted = [attach.stdin && running.stdin, attach.stdout, attach.stderr];
        let [stdin, stdout, stderr] = streams.open_all(wanted).await?;
        let detaches = running.tty || !running.stdin_once;
        let end = Box::pin(async move {
            running.ended().await;
            Ok(0)
        });
        Ok(ProcessStreams { exec_id: String::new(), detaches, stdin, stdout, stderr, end })
    }

    async fn connect_to_port(&self, pod: &str, port: u16) -> Result<UnixStream, LifecycleError> {
        let (view, client) = self.node.ready(pod)?;
        // The guest of a machine pod has no agent that connects to its ports. The pod process serves only the screen.
        let machine = view.pod.config.kind.machine();
        if machine.is_some_and(|machine| !machine.screen || port != SCREEN_PORT) {
            let refused =
                |source| LifecycleError::NoPort { id: view.pod.id.to_string(), port, source: Arc::new(source) };
            let pod_ended = self.node.not_ready(&view.pod.id);
            return self.guest_ports.connect(&view.pod.ips, port, pod_ended).await.map_err(refused);
        }
        let open = proto::StreamOpen { stream: Stream::Port.into(), port: port.into(), ..Default::default() };
        ask("connect to the port", self.limit(), client.open_stream(open)).await
    }

    async fn resize(&self, container: &str, exec_id: &str, size: TerminalSize) -> Result<(), LifecycleError> {
        let Running { id, client, .. } = self.node.running(container)?;
        let request = common::ResizeRequest {
            id: id.to_string(),
            exec_id: exec_id.to_owned(),
            columns: size.columns.into(),
            rows: size.rows.into(),
        };
        self.resize_terminal(&client, request).await
    }
}
