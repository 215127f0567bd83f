//! Connects the serial console: it copies the guest's output to the container's log and to the pod's flight recorder, and input
//! to the guest. One task reads the output; the guest blocks while its output is not read.

use std::sync::{Mutex, PoisonError};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

/// The maximum number of pieces that wait for the reader.
const PIECES: usize = 16;
/// The maximum size of a piece in bytes.
const PIECE: usize = 4096;

/// The console of one VM.
pub struct Console {
    typed: tokio::sync::Mutex<Option<OwnedWriteHalf>>,
    reading: Mutex<Option<JoinHandle<()>>>,
    output: Mutex<Option<mpsc::Receiver<Vec<u8>>>>,
    printed: mpsc::Sender<Vec<u8>>,
}

impl Console {
    /// Returns the console of a VM that has not started.
    pub fn new() -> Console {
        let (printed, output) = mpsc::channel(PIECES);
        Console {
            typed: tokio::sync::Mutex::new(None),
            reading: Mutex::new(None),
            output: Mutex::new(Some(output)),
            printed,
        }
    }

    /// Connects the console of a new run of the VM. Its output also goes to `recorder`.
    pub async fn connect(&self, stream: UnixStream, recorder: impl FnMut(&[u8]) + Send + 'static) {
        let (reader, writer) = stream.into_split();
        *self.typed.lock().await = Some(writer);
        let reading = tokio::spawn(read(reader, self.printed.clone(), recorder));
        *self.reading.lock().unwrap_or_else(PoisonError::into_inner) = Some(reading);
    }

    /// Writes all of the guest's output, over all runs. Only the first caller gets the output; a later one gets none.
    pub async fn send_output(&self, to: &mut (impl AsyncWriteExt + Unpin)) -> std::io::Result<()> {
        let output = self.output.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(mut output) = output else { return Ok(()) };
        while let Some(piece) = output.recv().await {
            if piece.is_empty() {
                break;
            }
            to.write_all(&piece).await?;
        }
        to.shutdown().await
    }

    /// Copies input to the guest, until it ends.
    pub async fn take_input(&self, from: &mut (impl AsyncReadExt + Unpin)) -> std::io::Result<()> {
        let mut piece = vec![0; PIECE];
        loop {
            let count = from.read(&mut piece).await?;
            let Some(piece) = piece.get(..count).filter(|piece| !piece.is_empty()) else { return Ok(()) };
            if let Some(typed) = self.typed.lock().await.as_mut() {
                typed.write_all(piece).await?;
            }
        }
    }

    /// Ends the output: the VM will not run again, so readers must not wait for more.
    pub fn end(&self) {
        let reading = self.reading.lock().unwrap_or_else(PoisonError::into_inner).take();
        let printed = self.printed.clone();
        tokio::spawn(async move {
            if let Some(reading) = reading {
                // The last output is read first. A task that panicked has read what it could.
                let _ = reading.await;
            }
            let _ = printed.send(Vec::new()).await;
        });
    }
}

/// Reads until QEMU closes its end.
async fn read(mut from: OwnedReadHalf, printed: mpsc::Sender<Vec<u8>>, mut recorder: impl FnMut(&[u8])) {
    let mut buffer = vec![0; PIECE];
    while let Ok(count @ 1..) = from.read(&mut buffer).await {
        let piece = buffer.get(..count).unwrap_or_default();
        recorder(piece);
        // Without a reader, output goes to the recorder alone.
        let _ = printed.send(piece.to_vec()).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn what_is_printed_is_read_and_what_is_typed_arrives() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let console = Arc::new(Console::new());
            let (near, mut guest) = UnixStream::pair().unwrap();
            let recorded = Arc::new(Mutex::new(Vec::new()));
            let record = Arc::clone(&recorded);
            console.connect(near, move |piece| record.lock().unwrap().extend_from_slice(piece)).await;
            console.take_input(&mut &b"root\n"[..]).await.unwrap();
            let mut typed = [0; 5];
            guest.read_exact(&mut typed).await.unwrap();
            assert_eq!(&typed, b"root\n");
            guest.write_all(b"login: ").await.unwrap();
            drop(guest);
            let (near, mut guest) = UnixStream::pair().unwrap();
            let record = Arc::clone(&recorded);
            console.connect(near, move |piece| record.lock().unwrap().extend_from_slice(piece)).await;
            guest.write_all(b"again").await.unwrap();
            drop(guest);
            console.end();
            let mut output = std::io::Cursor::new(Vec::new());
            console.send_output(&mut output).await.unwrap();
            assert_eq!(output.into_inner(), b"login: again");
            assert_eq!(*recorded.lock().unwrap(), b"login: again");
            let mut second = std::io::Cursor::new(Vec::new());
            console.send_output(&mut second).await.unwrap();
            assert!(second.into_inner().is_empty());
        });
    }

    #[test]
    fn a_machine_that_never_ran_has_an_end_too() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let console = Console::new();
            console.end();
            console.send_output(&mut std::io::Cursor::new(Vec::new())).await.unwrap();
        });
    }
}
