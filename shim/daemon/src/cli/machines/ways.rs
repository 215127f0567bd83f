//! Implements `nacelle vm console` and `nacelle vm vnc`: connects a terminal or a port of this node with a machine.

use super::{Client, told};
use anyhow::Context;
use nacelle_base::retry::retry_interrupted;
use nacelle_proto::vm;
use nix::sys::termios::{SetArg, Termios, cfmakeraw, tcgetattr, tcsetattr};
use std::io::{IsTerminal, Read};
use std::net::SocketAddr;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

/// Ctrl-], as in telnet and virsh.
const LEAVE: u8 = 0x1d;
/// The largest amount of data in a message, in bytes.
const PIECE: usize = 4096;
/// The largest number of queued messages.
const PIECES: usize = 4;

/// Restores the terminal's attributes on drop.
struct Raw(Termios);

impl Raw {
    fn of_stdin() -> anyhow::Result<Raw> {
        let before = tcgetattr(std::io::stdin()).context("cannot ask the terminal")?;
        let mut raw = before.clone();
        cfmakeraw(&mut raw);
        tcsetattr(std::io::stdin(), SetArg::TCSANOW, &raw).context("cannot set the terminal")?;
        Ok(Raw(before))
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        // Errors are ignored: a terminal that is gone needs no reset.
        let _ = tcsetattr(std::io::stdin(), SetArg::TCSANOW, &self.0);
    }
}

/// Connects this terminal, or standard input and output, with a machine's console, until the machine's process ends or the user
/// leaves.
pub(super) async fn console(mut client: Client, machine: vm::MachineRef) -> anyhow::Result<()> {
    let (speak, said) = mpsc::channel(PIECES);
    speak.send(vm::WayRequest { machine: Some(machine), data: Vec::new() }).await?;
    let mut pieces = client.console(ReceiverStream::new(said)).await.map_err(told)?.into_inner();
    let terminal = std::io::stdin().is_terminal();
    let raw = terminal.then(Raw::of_stdin).transpose()?;
    if terminal {
        eprint!("the console of the machine; Ctrl-] leaves it\r\n");
    }
    let (leave, mut left) = mpsc::channel::<()>(1);
    // A thread of its own: a read of standard input cannot be cancelled, and ends with the program.
    std::thread::spawn(move || read_stdin(&speak, &leave, terminal));
    let mut stdout = tokio::io::stdout();
    let shown = tokio::select! {
        shown = show(&mut pieces, &mut stdout) => shown,
        Some(()) = left.recv() => Ok(()),
        interrupted = tokio::signal::ctrl_c() => interrupted.context("cannot wait for a signal"),
    };
    drop(raw);
    shown
}

/// Forwards standard input until its end or Ctrl-].
fn read_stdin(speak: &mpsc::Sender<vm::WayRequest>, leave: &mpsc::Sender<()>, terminal: bool) {
    let mut buffer = [0; PIECE];
    while let Ok(count @ 1..) = retry_interrupted(|| std::io::stdin().read(&mut buffer)) {
        let typed = buffer.get(..count).unwrap_or_default();
        let end = typed.iter().position(|byte| terminal && *byte == LEAVE);
        let data = typed.get(..end.unwrap_or(count)).unwrap_or_default().to_vec();
        if speak.blocking_send(vm::WayRequest { machine: None, data }).is_err() {
            return;
        }
        if end.is_some() {
            // A failure means that the receiver is gone, and the session has ended.
            let _ = leave.blocking_send(());
            return;
        }
    }
}

async fn show(pieces: &mut Streaming<vm::Piece>, to: &mut (impl AsyncWrite + Unpin)) -> anyhow::Result<()> {
    while let Some(vm::Piece { data }) = pieces.message().await.map_err(told)? {
        to.write_all(&data).await?;
        to.flush().await?;
    }
    Ok(())
}

/// Listens for VNC clients and connects each with the machine's screen, until it is interrupted.
pub(super) async fn vnc(client: Client, machine: vm::MachineRef, listen: SocketAddr) -> anyhow::Result<()> {
    // Fails now, and not at the first client, if the machine has no screen.
    drop(screen(client.clone(), machine.clone()).await?);
    let listener = TcpListener::bind(listen).await.with_context(|| format!("cannot listen on {listen}"))?;
    println!("vnc://{}", listener.local_addr()?);
    loop {
        let (viewer, _) = tokio::select! {
            accepted = listener.accept() => accepted?,
            interrupted = tokio::signal::ctrl_c() => return interrupted.context("cannot wait for a signal"),
        };
        let (client, machine) = (client.clone(), machine.clone());
        tokio::spawn(async move {
            let (reader, mut writer) = viewer.into_split();
            let passed = async {
                let (speak, mut pieces) = screen(client, machine).await?;
                tokio::select! {
                    shown = show(&mut pieces, &mut writer) => shown,
                    () = hear(reader, speak) => Ok(()),
                }
            };
            if let Err(error) = passed.await {
                eprintln!("a viewer: {error:#}");
            }
        });
    }
}

async fn screen(
    mut client: Client,
    machine: vm::MachineRef,
) -> anyhow::Result<(mpsc::Sender<vm::WayRequest>, Streaming<vm::Piece>)> {
    let (speak, said) = mpsc::channel(PIECES);
    speak.send(vm::WayRequest { machine: Some(machine), data: Vec::new() }).await?;
    let pieces = client.screen(ReceiverStream::new(said)).await.map_err(told)?.into_inner();
    Ok((speak, pieces))
}

/// Forwards the viewer's data until its end.
async fn hear(mut from: impl AsyncRead + Unpin, speak: mpsc::Sender<vm::WayRequest>) {
    let mut buffer = vec![0; PIECE];
    while let Ok(count @ 1..) = from.read(&mut buffer).await {
        let data = buffer.get(..count).unwrap_or_default().to_vec();
        if speak.send(vm::WayRequest { machine: None, data }).await.is_err() {
            return;
        }
    }
}
