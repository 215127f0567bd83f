//! Owns: the serial console: what the guest prints, for its log and for the pod's flight recorder, and what is typed.
//! Threads: a task that reads; the guest waits while nobody takes what it prints.

use std::sync::{Mutex, PoisonError};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

/// Pieces that wait for whoever reads.
const PIECES: usize = 16;
/// The longest piece, in bytes.
const PIECE: usize = 4096;

/// The console of one machine.
pub struct Console {
    typed: tokio::sync::Mutex<Option<OwnedWriteHalf>>,
    reading: Mutex<Option<JoinHandle<()>>>,
    output: Mutex<Option<mpsc::Receiver<Vec<u8>>>>,
    printed: mpsc::Sender<Vec<u8>>,
}

impl Console {
    /// Of a machine that has not started.
    pub fn new() -> Console {
        let (printed, output) = mpsc::channel(PIECES);
        Console {
            typed: tokio::sync::Mutex::new(None),
            reading: Mutex::new(None),
            output: Mutex::new(Some(output)),
            printed,
        }
    }

    /// The machine's end of it is here now, until it runs again. What is printed goes to `recorder`, too.
    pub async fn connect(&self, stream: UnixStream, recorder: impl FnMut(&[u8]) + Send + 'static) {
        let (reader, writer) = stream.into_split();
        *self.typed.lock().await = Some(writer);
        let reading = tokio::spawn(read(reader, self.printed.clone(), recorder));
        *self.reading.lock().unwrap_or_else(PoisonError::into_inner) = Some(reading);
    }

    /// Writes what the guest prints, from its first word to its last. For one caller; a second one hears nothing.
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

    /// Types what comes, until it ends.
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

    /// The machine will not run again: whoever waits for its output shall not.
    pub fn end(&self) {
        let reading = self.reading.lock().unwrap_or_else(PoisonError::into_inner).take();
        let printed = self.printed.clone();
        tokio::spawn(async move {
            if let Some(reading) = reading {
                // Its last words come first; a task that broke down has said them.
                let _ = reading.await;
            }
            let _ = printed.send(Vec::new()).await;
        });
    }
}

/// Reads until the machine's end closes.
async fn read(mut from: OwnedReadHalf, printed: mpsc::Sender<Vec<u8>>, mut recorder: impl FnMut(&[u8])) {
    let mut buffer = vec![0; PIECE];
    while let Ok(count @ 1..) = from.read(&mut buffer).await {
        let piece = buffer.get(..count).unwrap_or_default();
        recorder(piece);
        // Without a reader it goes to the recorder alone.
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
