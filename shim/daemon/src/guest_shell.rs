//! Runs a command in the guest of a pod, outside of its containers, for an operator: finds the pod and the container whose image has the
//! programs, and copies between the command and its client.
//!
//! Only the service of the node's own commands uses this. CRI has no such request, so kubelet and its users cannot reach it.

use crate::cri::status::{refuse, status};
use crate::lifecycle::{LifecycleError, Node, View};
use crate::streaming::NodeStreams;
use nacelle_base::{Chain, Classify, ContainerId, FailureKind};
use nacelle_model::record::ContainerRecord;
use nacelle_model::state::ContainerState;
use nacelle_pod::client::PodClient;
use nacelle_proto::node::guest_shell_event::Event;
use nacelle_proto::node::guest_shell_request::Request;
use nacelle_proto::node::{GuestShellEvent, GuestShellRequest, GuestShellSize, GuestShellStart};
use nacelle_proto::{common, pod};
use nacelle_stream::ProcessStreams;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::mpsc;
use tokio_stream::{Stream, StreamExt};
use tonic::Status;

/// The time limit for the first request.
const FIRST_REQUEST_TIMEOUT: Duration = Duration::from_secs(30);
/// The time from the end of the command, which ends its children, to the end of its output.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(30);
/// The most output in one event, in bytes.
const MAX_OUTPUT: usize = 32 << 10;
/// The most events that wait for the client.
const MAX_QUEUED: usize = 4;

/// What the client receives: an event, or why the session ended without one.
pub(crate) type ShellEvents = Result<GuestShellEvent, Status>;

/// Why no command can run in the guest.
#[derive(Debug, thiserror::Error)]
enum GuestShellError {
    /// The pod is not ready, or its process failed.
    #[error(transparent)]
    Lifecycle(#[from] LifecycleError),
    /// The guest of a machine pod has no agent that could start a command.
    #[error(
        "cannot run a command in the guest of pod {id}: it is a machine pod, whose guest has its own console; use nacelle vm console, \
         or exec"
    )]
    MachinePod {
        /// The pod's id.
        id: String,
    },
    /// The programs of the command come from the image of a container, and there is none.
    #[error("cannot run a command in the guest of pod {id}: it has no container, whose image would have the programs")]
    NoContainers {
        /// The pod's id.
        id: String,
    },
    /// The pod has no container of this name.
    #[error("pod {id} has no container {name:?}; it has {known}")]
    NoContainer {
        /// The pod's id.
        id: String,
        /// The name in the request.
        name: String,
        /// The names of its containers.
        known: String,
    },
    /// The container was removed after it had been chosen.
    #[error(
        "cannot run a command in the guest: container {container}, whose image has the programs, was removed; repeat the command"
    )]
    ContainerRemoved {
        /// The name of the container.
        container: String,
        /// What the agent reports.
        source: Box<LifecycleError>,
    },
    /// The image of the container lacks the program.
    #[error(
        "the guest has no programs of its own, and the image of container {container} has no {program:?}: choose a container whose \
         image has it with --container, or add a debug container to the pod (kubectl debug)"
    )]
    NoProgram {
        /// The name of the container.
        container: String,
        /// The program.
        program: String,
        /// What the agent reports.
        source: Box<LifecycleError>,
    },
}

impl Classify for GuestShellError {
    fn kind(&self) -> FailureKind {
        match self {
            GuestShellError::Lifecycle(error) => error.kind(),
            GuestShellError::MachinePod { .. } | GuestShellError::NoContainers { .. } => FailureKind::Conflict,
            GuestShellError::NoContainer { .. }
            | GuestShellError::ContainerRemoved { .. }
            | GuestShellError::NoProgram { .. } => FailureKind::NotFound,
        }
    }
}

/// Starts the command that the first request names. The command is killed when the receiver is dropped.
pub(crate) async fn open(
    node: &Node,
    mut requests: impl Stream<Item = Result<GuestShellRequest, Status>> + Send + Unpin + 'static,
) -> Result<mpsc::Receiver<ShellEvents>, Status> {
    let start = first_request(&mut requests).await?;
    if start.args.first().is_none_or(String::is_empty) {
        return Err(refuse(FailureKind::Invalid, "args is missing in the first request"));
    }
    let session = ShellSession::start(node, start).await.map_err(status)?;
    let (sender, events) = mpsc::channel(MAX_QUEUED);
    let shutdown = node.services().events.closed();
    let ShellSession { process, terminal } = session;
    tokio::spawn(async move { copy_streams(process, Some(&terminal), requests, &sender, shutdown).await });
    Ok(events)
}

async fn first_request(
    requests: &mut (impl Stream<Item = Result<GuestShellRequest, Status>> + Unpin),
) -> Result<GuestShellStart, Status> {
    let missing = || refuse(FailureKind::Invalid, "start is missing in the first request");
    let first = tokio::time::timeout(FIRST_REQUEST_TIMEOUT, requests.next()).await.map_err(|_elapsed| missing())?;
    match first.ok_or_else(missing)??.request {
        Some(Request::Start(start)) => Ok(start),
        _ => Err(missing()),
    }
}

/// Returns the container whose image has the programs: the newest one of this name, or without a name the oldest one that runs, or the
/// newest one if none does.
fn choose_container<'v>(view: &'v View, name: &str) -> Result<&'v ContainerRecord, GuestShellError> {
    let id = || view.pod.id.to_string();
    // The guest may not know others.
    let exists =
        |container: &&ContainerRecord| !matches!(container.state, ContainerState::Creating | ContainerState::Removing);
    let mut containers: Vec<_> = view.containers.values().filter(exists).collect();
    containers.sort_by_key(|container| container.created_at);
    let Some(newest) = containers.last().copied() else { return Err(GuestShellError::NoContainers { id: id() }) };
    if name.is_empty() {
        let running = containers.iter().find(|container| container.state == ContainerState::Running);
        return Ok(running.copied().unwrap_or(newest));
    }
    let named = containers.iter().rfind(|container| container.config.name == name).copied();
    named.ok_or_else(|| {
        let mut known: Vec<&str> = Vec::new();
        for container in &containers {
            if !known.contains(&container.config.name.as_str()) {
                known.push(&container.config.name);
            }
        }
        GuestShellError::NoContainer { id: id(), name: name.to_owned(), known: known.join(", ") }
    })
}

/// Explains that the agent did not find what the command needs: the container, which may be on its removal, or the program.
fn not_found(view: &View, container: &ContainerId, names: (String, String), source: LifecycleError) -> GuestShellError {
    let ((container_name, program), source) = (names, Box::new(source));
    match view.containers.get(container) {
        Some(record) if record.state != ContainerState::Removing => {
            GuestShellError::NoProgram { container: container_name, program, source }
        }
        _ => GuestShellError::ContainerRemoved { container: container_name, source },
    }
}

/// A command in a guest.
struct ShellSession {
    process: ProcessStreams<LifecycleError>,
    terminal: ShellTerminal,
}

impl ShellSession {
    async fn start(node: &Node, start: GuestShellStart) -> Result<ShellSession, GuestShellError> {
        let GuestShellStart { pod: asked, container: name, args, tty, stdin } = start;
        let (view, client) = node.ready(&asked)?;
        let pod = &view.pod;
        if pod.config.kind.machine().is_some() {
            return Err(GuestShellError::MachinePod { id: pod.id.to_string() });
        }
        let container = choose_container(&view, &name)?;
        let (container_name, program) = (container.config.name.clone(), args.first().cloned().unwrap_or_default());
        let PodNames { namespace, name, uid } = pod_names(&view);
        // An operator looks behind the isolation of the containers: the log keeps who was looked at.
        tracing::info!(
            pod = %pod.id, namespace, name, uid, container = container_name, program, tty, "an operator runs a command in the guest"
        );
        let id = container.id.clone();
        let request = pod::ExecRequest { id: id.to_string(), args, tty, stdin };
        let streams = NodeStreams::new(node.clone());
        match streams.start_guest_shell(&client, request).await {
            Ok(process) => {
                let (container, exec_id) = (id.to_string(), process.exec_id.clone());
                Ok(ShellSession { process, terminal: ShellTerminal { streams, client, container, exec_id } })
            }
            Err(source) if source.kind() == FailureKind::NotFound => {
                Err(not_found(&node.ready(&asked)?.0, &id, (container_name, program), source))
            }
            Err(error) => Err(error.into()),
        }
    }
}

/// Copies until the command and its output have ended, the client is gone, or the daemon shuts down, which ends `shutdown`. Dropping the
/// process then kills it.
async fn copy_streams(
    process: ProcessStreams<LifecycleError>,
    terminal: Option<&ShellTerminal>,
    requests: impl Stream<Item = Result<GuestShellRequest, Status>> + Send + Unpin,
    sender: &mpsc::Sender<ShellEvents>,
    shutdown: impl Future<Output = ()>,
) {
    let ProcessStreams { exec_id, stdin, stdout, stderr, mut end, .. } = process;
    let outputs = async {
        tokio::join!(copy_output(stdout, Event::Stdout, sender), copy_output(stderr, Event::Stderr, sender));
    };
    let inputs = copy_input(requests, stdin, terminal);
    let session = async {
        tokio::pin!(outputs, inputs);
        let mut is_drained = false;
        let ended = loop {
            tokio::select! {
                ended = &mut end => break ended,
                () = &mut outputs, if !is_drained => is_drained = true,
                () = &mut inputs => return,
            }
        };
        if !is_drained && tokio::time::timeout(DRAIN_TIMEOUT, &mut outputs).await.is_err() {
            tracing::info!(exec_id, "a command in a guest has ended, but its output has not");
        }
        let last = ended
            .map(|code| GuestShellEvent { event: Some(Event::Exited(u32::try_from(code).unwrap_or(u32::MAX))) })
            .map_err(status);
        // The client may have disconnected.
        let _ = sender.send(last).await;
    };
    tokio::select! {
        () = session => {}
        () = sender.closed() => {}
        () = shutdown => {
            // A client that does not read learns of the end when the connection closes.
            let _ = sender.try_send(Err(refuse(FailureKind::Unavailable, "the daemon is shutting down")));
        }
    }
}

/// The terminal of a command in a guest.
struct ShellTerminal {
    streams: NodeStreams,
    client: PodClient,
    container: String,
    exec_id: String,
}

impl ShellTerminal {
    async fn resize(&self, GuestShellSize { columns, rows }: GuestShellSize) {
        let request =
            common::ResizeRequest { id: self.container.clone(), exec_id: self.exec_id.clone(), columns, rows };
        if let Err(error) = self.streams.resize_terminal(&self.client, request).await {
            tracing::debug!(error = %Chain(&error), "cannot resize the terminal of a command in a guest");
        }
    }
}

/// Copies a stream of the command to the client.
async fn copy_output(from: Option<UnixStream>, event: fn(Vec<u8>) -> Event, to: &mpsc::Sender<ShellEvents>) {
    let Some(mut from) = from else { return };
    loop {
        let mut data = Vec::with_capacity(MAX_OUTPUT);
        // A broken stream ends like any other; the exit code shows the failure.
        match (&mut from).take(MAX_OUTPUT as u64).read_buf(&mut data).await {
            Ok(1..) => {}
            Ok(0) | Err(_) => return,
        }
        if to.send(Ok(GuestShellEvent { event: Some(event(data)) })).await.is_err() {
            return;
        }
    }
}

/// Copies the client's input to the command, and applies its sizes. The end of the requests ends the input. Returns only when the client
/// is gone.
async fn copy_input(
    mut requests: impl Stream<Item = Result<GuestShellRequest, Status>> + Unpin,
    mut to: Option<UnixStream>,
    terminal: Option<&ShellTerminal>,
) {
    loop {
        match requests.next().await {
            Some(Ok(GuestShellRequest { request: Some(Request::Stdin(data)) })) => {
                if let Some(stream) = &mut to
                    && stream.write_all(&data).await.is_err()
                {
                    // The command does not read any more. What follows is dropped.
                    to = None;
                }
            }
            Some(Ok(GuestShellRequest { request: Some(Request::Size(size)) })) => {
                if let Some(terminal) = terminal {
                    terminal.resize(size).await;
                }
            }
            // A second start has no meaning.
            Some(Ok(_)) => {}
            Some(Err(_gone)) => return,
            None => break,
        }
    }
    if let Some(mut stream) = to.take() {
        // A command that has ended needs no end of its input.
        let _ = stream.shutdown().await;
    }
    std::future::pending::<()>().await;
}

/// The names of a pod in Kubernetes.
struct PodNames<'v> {
    namespace: &'v str,
    name: &'v str,
    uid: &'v str,
}

fn pod_names(view: &View) -> PodNames<'_> {
    let name = &view.pod.config.name;
    PodNames { namespace: &name.namespace, name: &name.name, uid: &name.uid }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacelle_model::testing as records;
    use std::sync::Arc;

    #[test]
    fn the_image_is_that_of_the_named_or_of_a_running_container() {
        let container = |number: u8, name: &str, state| {
            let mut record = records::container(number, 1);
            let mut config = (*record.config).clone();
            config.name = name.to_owned();
            // The ids have another order than the times.
            (record.config, record.state, record.created_at) = (Arc::new(config), state, -i64::from(number));
            record
        };
        let view = |containers: &[ContainerRecord]| View::new(&records::pod(1), containers.iter(), None);
        let (exited, running) = (ContainerState::Exited, ContainerState::Running);
        let all = [
            container(9, "init", exited),
            container(8, "app", exited),
            container(7, "web", running),
            container(6, "side", running),
            container(5, "app", exited),
            container(4, "web", ContainerState::Creating),
        ];
        for (containers, name, chosen) in [
            (&all[..], "", Some(7)),
            (&all[..2], "", Some(8)),
            (&all, "app", Some(5)),
            (&all, "web", Some(7)),
            (&all, "ap", None),
            (&all[5..], "", None),
            (&[], "app", None),
        ] {
            let view = view(containers);
            let found = choose_container(&view, name).ok().map(|container| -container.created_at);
            assert_eq!(found, chosen, "{name:?}");
        }
        let refused = choose_container(&view(&all), "db").unwrap_err();
        assert_eq!(refused.kind(), FailureKind::NotFound);
        assert!(refused.to_string().ends_with("it has init, app, web, side"), "{refused}");
        let refused = choose_container(&view(&[]), "").unwrap_err();
        assert_eq!(refused.kind(), FailureKind::Conflict, "{refused}");
    }

    #[test]
    fn a_container_that_was_removed_meanwhile_is_no_missing_program() {
        let source = || LifecycleError::NotFound { what: "container", id: "c".into() };
        let mut record = records::container(1, 1);
        let id = record.id.clone();
        for (state, gone) in
            [(ContainerState::Running, false), (ContainerState::Exited, false), (ContainerState::Removing, true)]
        {
            record.state = state;
            let view = View::new(&records::pod(1), [&record].into_iter(), None);
            let error = not_found(&view, &id, ("web".into(), "sh".into()), source());
            assert_eq!(matches!(error, GuestShellError::ContainerRemoved { .. }), gone, "{error}");
        }
        let without = View::new(&records::pod(1), [].into_iter(), None);
        let error = not_found(&without, &id, ("web".into(), "sh".into()), source());
        assert!(error.to_string().contains("container web") && error.kind() == FailureKind::NotFound, "{error}");
    }

    #[tokio::test]
    async fn a_session_ends_when_the_daemon_shuts_down() {
        let (near, mut command) = UnixStream::pair().unwrap();
        let process = ProcessStreams {
            exec_id: "exec-1".into(),
            detaches: false,
            stdin: Some(near),
            stdout: None,
            stderr: None,
            end: Box::pin(std::future::pending()),
        };
        let (sender, mut events) = mpsc::channel(1);
        let (shutdown, closed) = tokio::sync::oneshot::channel::<()>();
        let copying = tokio::spawn(async move {
            let closed = async { drop(closed.await) };
            copy_streams(process, None, tokio_stream::pending(), &sender, closed).await;
        });
        drop(shutdown);
        assert_eq!(events.recv().await.unwrap().unwrap_err().code(), tonic::Code::Unavailable);
        copying.await.unwrap();
        assert_eq!(command.read(&mut [0]).await.unwrap(), 0, "its streams are closed");
    }

    fn message(request: Request) -> Result<GuestShellRequest, Status> {
        Ok(GuestShellRequest { request: Some(request) })
    }

    #[tokio::test]
    async fn the_first_request_must_name_the_pod() {
        let start = GuestShellStart { pod: "abc".into(), args: vec!["sh".into()], ..Default::default() };
        let mut requests = tokio_stream::iter([message(Request::Start(start.clone()))]);
        assert_eq!(first_request(&mut requests).await.unwrap(), start);
        for wrong in [vec![message(Request::Stdin(b"x".to_vec()))], vec![Ok(GuestShellRequest::default())], vec![]] {
            let error = first_request(&mut tokio_stream::iter(wrong)).await.unwrap_err();
            assert_eq!(error.code(), tonic::Code::InvalidArgument);
        }
    }

    #[tokio::test]
    async fn the_end_of_the_requests_ends_the_input_and_an_error_the_session() {
        let (near, mut command) = UnixStream::pair().unwrap();
        let requests = tokio_stream::iter(["ty", "ped"].map(|text| message(Request::Stdin(text.into()))));
        let copying = tokio::spawn(copy_input(requests, Some(near), None));
        let mut input = String::new();
        command.read_to_string(&mut input).await.unwrap();
        assert_eq!(input, "typed");
        assert!(!copying.is_finished(), "the output of the command goes on");
        copying.abort();
        let gone = tokio_stream::iter([message(Request::Stdin(vec![])), Err(Status::cancelled("gone"))]);
        copy_input(gone, None, None).await;
    }

    #[tokio::test]
    async fn output_waits_for_a_client_that_does_not_read() {
        let (near, mut command) = UnixStream::pair().unwrap();
        let (sender, mut events) = mpsc::channel(1);
        let copying = tokio::spawn(async move { copy_output(Some(near), Event::Stderr, &sender).await });
        let sent = vec![b'x'; 3 * MAX_OUTPUT];
        let writing = tokio::spawn({
            let sent = sent.clone();
            async move { command.write_all(&sent).await }
        });
        let mut received = Vec::new();
        while let Some(event) = events.recv().await {
            let Some(Event::Stderr(data)) = event.unwrap().event else { panic!("another stream") };
            assert!(data.len() <= MAX_OUTPUT);
            received.extend(data);
        }
        assert!(received == sent);
        writing.await.unwrap().unwrap();
        copying.await.unwrap();
    }
}
