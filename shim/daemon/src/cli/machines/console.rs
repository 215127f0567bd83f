//! Implements `nacelle vm console` and `nacelle vm vnc`: connects a terminal or a port of this node to a VM.

use super::{VmClient, output_error, print, status_error};
use crate::cli::output::warn;
use crate::cli::terminal::RawTerminal;
use anyhow::Context;
use nacelle_base::retry::retry_interrupted;
use nacelle_proto::vm;
use std::io::{self, IsTerminal, Read};
use std::net::SocketAddr;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

/// The key that ends a console session: Ctrl-], as in telnet and virsh.
const ESCAPE: u8 = 0x1d;
/// The largest amount of data in a message, in bytes.
const CHUNK: usize = 4096;
/// The largest number of queued messages.
const QUEUE: usize = 4;

/// Connects this terminal, or standard input and output, to a VM's console, until the VM's process ends or the user leaves.
pub(super) async fn attach_terminal(mut client: VmClient, machine: vm::MachineRef) -> anyhow::Result<()> {
    let (input, requests) = mpsc::channel(QUEUE);
    input.send(vm::WayRequest { machine: Some(machine), data: Vec::new() }).await?;
    let mut output = client.console(ReceiverStream::new(requests)).await.map_err(status_error)?.into_inner();
    let terminal = std::io::stdin().is_terminal();
    let raw_terminal = terminal.then(RawTerminal::enter).transpose()?;
    if terminal {
        warn("connected to the serial console; press Ctrl-] to leave it\r");
    }
    let (leave, mut left) = mpsc::channel::<()>(1);
    // A thread of its own: a read of standard input cannot be cancelled, and ends with the program.
    std::thread::spawn(move || read_stdin(&input, &leave, terminal));
    let mut stdout = tokio::io::stdout();
    let result = tokio::select! {
        copied = copy_output(&mut output, &mut stdout, output_error) => copied,
        Some(()) = left.recv() => Ok(()),
        interrupted = tokio::signal::ctrl_c() => interrupted.context("cannot wait for a signal"),
    };
    drop(raw_terminal);
    result
}

/// Forwards standard input until its end or Ctrl-].
fn read_stdin(input: &mpsc::Sender<vm::WayRequest>, leave: &mpsc::Sender<()>, terminal: bool) {
    let mut buffer = [0; CHUNK];
    while let Ok(count @ 1..) = retry_interrupted(|| std::io::stdin().read(&mut buffer)) {
        let typed = buffer.get(..count).unwrap_or_default();
        let end = typed.iter().position(|byte| terminal && *byte == ESCAPE);
        let data = typed.get(..end.unwrap_or(count)).unwrap_or_default().to_vec();
        if input.blocking_send(vm::WayRequest { machine: None, data }).is_err() {
            return;
        }
        if end.is_some() {
            // A failure means that the receiver is gone, and the session has ended.
            let _ = leave.blocking_send(());
            return;
        }
    }
}

/// Copies what the VM sends until its end. `failed` converts errors of `to`.
async fn copy_output(
    output: &mut Streaming<vm::Piece>,
    to: &mut (impl AsyncWrite + Unpin),
    failed: fn(io::Error) -> anyhow::Error,
) -> anyhow::Result<()> {
    while let Some(vm::Piece { data }) = output.message().await.map_err(status_error)? {
        to.write_all(&data).await.map_err(failed)?;
        to.flush().await.map_err(failed)?;
    }
    Ok(())
}

/// Listens for VNC clients and connects each to the VM's screen, until it is interrupted.
pub(super) async fn serve_vnc(client: VmClient, machine: vm::MachineRef, listen: SocketAddr) -> anyhow::Result<()> {
    // Fails here, and not for the first client, if the VM has no screen.
    drop(open_screen(client.clone(), machine.clone()).await?);
    let listener = TcpListener::bind(listen).await.with_context(|| format!("cannot listen on {listen}"))?;
    print(&format!("vnc://{}\n", listener.local_addr()?))?;
    loop {
        let (viewer, _) = tokio::select! {
            accepted = listener.accept() => accepted?,
            interrupted = tokio::signal::ctrl_c() => return interrupted.context("cannot wait for a signal"),
        };
        let (client, machine) = (client.clone(), machine.clone());
        tokio::spawn(async move {
            let (reader, mut writer) = viewer.into_split();
            let session = async {
                let (input, mut output) = open_screen(client, machine).await?;
                tokio::select! {
                    copied = copy_output(&mut output, &mut writer, anyhow::Error::from) => copied,
                    () = send_input(reader, input) => Ok(()),
                }
            };
            if let Err(error) = session.await {
                warn(&format!("VNC client: {error:#}"));
            }
        });
    }
}

async fn open_screen(
    mut client: VmClient,
    machine: vm::MachineRef,
) -> anyhow::Result<(mpsc::Sender<vm::WayRequest>, Streaming<vm::Piece>)> {
    let (input, requests) = mpsc::channel(QUEUE);
    input.send(vm::WayRequest { machine: Some(machine), data: Vec::new() }).await?;
    let output = client.screen(ReceiverStream::new(requests)).await.map_err(status_error)?.into_inner();
    Ok((input, output))
}

/// Forwards a VNC client's data until its end.
async fn send_input(mut from: impl AsyncRead + Unpin, input: mpsc::Sender<vm::WayRequest>) {
    let mut buffer = vec![0; CHUNK];
    while let Ok(count @ 1..) = from.read(&mut buffer).await {
        let data = buffer.get(..count).unwrap_or_default().to_vec();
        if input.send(vm::WayRequest { machine: None, data }).await.is_err() {
            return;
        }
    }
}
