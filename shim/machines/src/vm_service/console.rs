//! Connects clients with a VM's serial console and screen, with data in both directions.

use crate::runtime::PodRuntime;
use crate::status::{error_status, rejection};
use nacelle_base::FailureKind;
use nacelle_model::machine::SCREEN_PORT;
use nacelle_model::record::ContainerRecord;
use nacelle_proto::vm;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::mpsc;
use tokio_stream::{Stream, StreamExt};
use tonic::Status;

/// Time limit for the first message.
const FIRST_REQUEST_TIMEOUT: Duration = Duration::from_secs(30);
/// The largest message in bytes.
const MAX_MESSAGE: usize = 32 << 10;
/// The largest number of queued messages.
const MAX_QUEUED: usize = 4;

/// The output of a console, for the client.
pub(super) type ConsoleOutput = mpsc::Receiver<Result<vm::Piece, Status>>;

/// The consoles of a VM.
#[derive(Clone, Copy)]
pub(super) enum VmConsole {
    /// The serial console.
    Serial,
    /// The screen, by VNC.
    Screen,
}

/// Returns the VM that the first message names, and the data in that message.
pub(super) async fn first_request(
    requests: &mut (impl Stream<Item = Result<vm::WayRequest, Status>> + Unpin),
) -> Result<(vm::MachineRef, Vec<u8>), Status> {
    let missing = || rejection(FailureKind::Invalid, "machine is missing in the first message");
    let first = tokio::time::timeout(FIRST_REQUEST_TIMEOUT, requests.next()).await.map_err(|_elapsed| missing())?;
    let vm::WayRequest { machine, data } = first.ok_or_else(missing)??;
    Ok((machine.ok_or_else(missing)?, data))
}

/// Opens a console of the VM in this container, writes `first_data` to it, and copies data until one side ends.
pub(super) async fn open(
    runtime: &dyn PodRuntime,
    container: &ContainerRecord,
    kind: VmConsole,
    first_data: Vec<u8>,
    requests: impl Stream<Item = Result<vm::WayRequest, Status>> + Send + Unpin + 'static,
) -> Result<ConsoleOutput, Status> {
    let (sender, output) = mpsc::channel(MAX_QUEUED);
    let mut changes = runtime.changes();
    let shutdown = async move { while changes.changed().await.is_ok() {} };
    match kind {
        VmConsole::Serial => {
            let (to_vm, from_vm) = runtime.open_console(&container.id).await.map_err(error_status)?;
            tokio::spawn(copy(from_vm, to_vm, first_data, requests, sender, shutdown));
        }
        VmConsole::Screen => {
            let screen = runtime.connect_tcp(&container.pod, SCREEN_PORT).await.map_err(error_status)?;
            let (from_vm, to_vm) = screen.into_split();
            tokio::spawn(copy(from_vm, to_vm, first_data, requests, sender, shutdown));
        }
    }
    Ok(output)
}

/// Copies data until the VM's output ends, the client is gone, or the daemon shuts down, which ends `shutdown`. The output continues after the end of the client's input.
async fn copy(
    mut from_vm: impl AsyncRead + Send + Unpin,
    mut to_vm: impl AsyncWrite + Send + Unpin,
    first_data: Vec<u8>,
    mut requests: impl Stream<Item = Result<vm::WayRequest, Status>> + Send + Unpin,
    sender: mpsc::Sender<Result<vm::Piece, Status>>,
    shutdown: impl Future<Output = ()> + Send,
) {
    let copy_input = async {
        let mut data = first_data;
        loop {
            if to_vm.write_all(&data).await.is_err() {
                break;
            }
            match requests.next().await {
                Some(Ok(request)) => data = request.data,
                // An error means that the client is gone, and `sender` is closed.
                Some(Err(_)) | None => break,
            }
        }
        // The end of the input does not end the session.
        let _ = to_vm.shutdown().await;
        std::future::pending::<()>().await;
    };
    let copy_output = async {
        loop {
            let mut data = vec![0; MAX_MESSAGE];
            let message = match from_vm.read(&mut data).await {
                Ok(0) => break,
                Ok(count) => {
                    data.truncate(count);
                    Ok(vm::Piece { data })
                }
                Err(error) => Err(rejection(
                    FailureKind::Unavailable,
                    &format!("cannot read the output of the VM's console: {error}"),
                )),
            };
            let is_last = message.is_err();
            if sender.send(message).await.is_err() || is_last {
                break;
            }
        }
    };
    tokio::select! {
        () = copy_output => {}
        () = copy_input => {}
        () = sender.closed() => {}
        () = shutdown => {
            // A client that does not read learns of the end when the connection closes.
            let _ = sender.try_send(Err(rejection(FailureKind::Unavailable, "the daemon is shutting down")));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::net::UnixStream;

    #[tokio::test]
    async fn input_and_output_are_copied() {
        let (near, mut vm_end) = UnixStream::pair().unwrap();
        let (from_vm, to_vm) = near.into_split();
        let (sender, mut output) = mpsc::channel(MAX_QUEUED);
        let (client, requests) = mpsc::channel(1);
        let requests = tokio_stream::wrappers::ReceiverStream::new(requests);
        let copying = tokio::spawn(copy(from_vm, to_vm, b"lo".to_vec(), requests, sender, std::future::pending()));
        client.send(Ok(vm::WayRequest { machine: None, data: b"gin".to_vec() })).await.unwrap();
        let mut input = [0; 5];
        vm_end.read_exact(&mut input).await.unwrap();
        assert_eq!(&input, b"login");
        // The session stays open after the end of the input.
        drop(client);
        let mut rest = Vec::new();
        vm_end.read_to_end(&mut rest).await.unwrap();
        assert!(rest.is_empty());
        vm_end.write_all(b"welcome").await.unwrap();
        assert_eq!(output.recv().await.unwrap().unwrap().data, b"welcome");
        drop(vm_end);
        assert!(output.recv().await.is_none());
        copying.await.unwrap();
    }

    #[tokio::test]
    async fn the_first_message_must_name_the_vm() {
        let machine = vm::MachineRef { namespace: "a".into(), name: "b".into() };
        let message = |machine| Ok(vm::WayRequest { machine, data: b"x".to_vec() });
        let mut requests = tokio_stream::iter([message(Some(machine.clone()))]);
        assert_eq!(first_request(&mut requests).await.unwrap(), (machine, b"x".to_vec()));
        for wrong in [vec![message(None)], vec![]] {
            let error = first_request(&mut tokio_stream::iter(wrong)).await.unwrap_err();
            assert_eq!(error.code(), tonic::Code::InvalidArgument);
        }
    }
}
