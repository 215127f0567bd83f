//! Serves the streams that the pod process opens: console, output of commands, the screen, and disks that it
//! hands over.

use crate::vm_manager::VmManager;
use nacelle_base::descriptors::receive_descriptor;
use nacelle_model::machine::SCREEN_PORT;
use nacelle_proto::agent::{StreamOpen, StreamOpened};
use nacelle_proto::common::Stream;
use nacelle_proto::wire;
use prost::Message;
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt, Interest};
use tokio::net::{UnixListener, UnixStream};

/// The maximum length of a frame in bytes.
const MAX_FRAME: u32 = 1 << 20;
/// The time that a connection has to send its first frame.
const PREAMBLE_TIMEOUT: Duration = Duration::from_secs(30);
/// The time limit of a connection to the screen.
const DIAL_TIMEOUT: Duration = Duration::from_secs(20);
/// The pause between two attempts to connect to a listener whose queue is full.
const CONNECT_PAUSE: Duration = Duration::from_millis(5);
/// No time limit: a command runs as long as a client waits for it.
const NO_LIMIT: Duration = Duration::from_secs(1 << 30);
/// The size of copy buffers in bytes.
const COPY_BUFFER: usize = 32 << 10;

/// Accepts connections forever.
pub async fn serve(listener: UnixListener, manager: Arc<VmManager>) {
    loop {
        match listener.accept().await {
            Ok((connection, _)) => {
                let manager = Arc::clone(&manager);
                tokio::spawn(async move {
                    if let Err(error) = serve_stream(connection, &manager).await {
                        tracing::debug!(%error, "a stream failed");
                    }
                });
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept a stream");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

async fn serve_stream(mut connection: UnixStream, manager: &VmManager) -> io::Result<()> {
    let open = tokio::time::timeout(PREAMBLE_TIMEOUT, read_open(&mut connection)).await;
    let open = open.unwrap_or_else(|_elapsed| Err(io::ErrorKind::TimedOut.into()))?;
    let unknown = |error| io::Error::other(nacelle_base::Chain(&error).to_string());
    match open.stream() {
        Stream::Port => return forward(connection, manager, open.port).await,
        Stream::Device => return receive_disk(connection, manager, open).await,
        Stream::Stdin if open.exec_id.is_empty() => {
            return manager.find_vm(&open.id).map_err(unknown)?.console.copy_input(&mut connection).await;
        }
        Stream::Stdout if open.exec_id.is_empty() => {
            return manager.find_vm(&open.id).map_err(unknown)?.console.copy_output(&mut connection).await;
        }
        // A VM has a single output.
        Stream::Stdin | Stream::Stderr | Stream::Unspecified if open.exec_id.is_empty() => return Ok(()),
        Stream::Stdin | Stream::Log | Stream::Image | Stream::Checkpoint | Stream::Unspecified => return Ok(()),
        Stream::Stdout | Stream::Stderr => {}
    }
    let command = manager.find_command(&open.id, &open.exec_id).map_err(unknown)?;
    if open.stream() == Stream::Stdout {
        match command.attach_reader(connection) {
            Ok(()) => return Ok(()),
            Err(returned) => connection = returned,
        }
    }
    let Some(done) = command.wait_for_end(NO_LIMIT).await else { return Ok(()) };
    let output = if open.stream() == Stream::Stdout { &done.0.stdout } else { &done.0.stderr };
    connection.write_all(output).await?;
    connection.shutdown().await
}

async fn read_open(connection: &mut UnixStream) -> io::Result<StreamOpen> {
    let length = connection.read_u32_le().await?;
    if length > MAX_FRAME {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut payload = vec![0; usize::try_from(length).unwrap_or_default()];
    connection.read_exact(&mut payload).await?;
    wire::decode(&payload).map_err(io::Error::other)
}

async fn forward(mut connection: UnixStream, manager: &VmManager, port: u32) -> io::Result<()> {
    let dialled = tokio::time::timeout(DIAL_TIMEOUT, connect_to_screen(manager, port)).await;
    let dialled = dialled.unwrap_or_else(|_elapsed| Err(io::ErrorKind::TimedOut.into()));
    let error = dialled.as_ref().err().map_or_else(String::new, ToString::to_string);
    send_reply(&mut connection, error).await?;
    let mut port = dialled?;
    tokio::io::copy_bidirectional_with_sizes(&mut connection, &mut port, COPY_BUFFER, COPY_BUFFER).await.map(drop)
}

async fn send_reply(connection: &mut UnixStream, error: String) -> io::Result<()> {
    let reply = StreamOpened { error }.encode_to_vec();
    connection.write_u32_le(u32::try_from(reply.len()).map_err(io::Error::other)?).await?;
    connection.write_all(&reply).await
}

/// Takes a disk for a VM that will be created, and releases it when the connection ends, unless a VM has taken it by then.
async fn receive_disk(mut connection: UnixStream, manager: &VmManager, open: StreamOpen) -> io::Result<()> {
    let received = connection.async_io(Interest::READABLE, || receive_descriptor(&connection));
    let received = tokio::time::timeout(PREAMBLE_TIMEOUT, received).await;
    let file = File::from(received.unwrap_or_else(|_elapsed| Err(io::ErrorKind::TimedOut.into()))?);
    let number = match manager.add_pending_disk(open.id, open.device, file) {
        Ok(number) => number,
        Err(error) => {
            let message = nacelle_base::Chain(&error).to_string();
            return send_reply(&mut connection, message).await;
        }
    };
    let answered = send_reply(&mut connection, String::new()).await;
    if answered.is_ok() {
        // The peer sends nothing. The read ends with the connection, or with an error that means the same.
        let _ = connection.read(&mut [0]).await;
    }
    manager.release_pending_disk(number);
    answered
}

/// Connects to a socket of QEMU. While the queue of its listener is full, a non-blocking socket fails with EAGAIN; this function
/// retries until the caller drops it.
async fn connect_unix(path: &Path) -> io::Result<UnixStream> {
    loop {
        match UnixStream::connect(path).await {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => tokio::time::sleep(CONNECT_PAUSE).await,
            result => return result,
        }
    }
}

/// Connects to the screen. The daemon itself connects to ports of the guest: this process has no network of the node.
async fn connect_to_screen(manager: &VmManager, port: u32) -> io::Result<UnixStream> {
    let screen = manager.newest().and_then(|vm| vm.screen()).filter(|_| port == u32::from(SCREEN_PORT));
    let Some(socket) = screen else {
        return Err(io::Error::new(
            io::ErrorKind::AddrNotAvailable,
            format!("the VM has no screen (VNC) at port {port}"),
        ));
    };
    connect_unix(&socket).await
}
