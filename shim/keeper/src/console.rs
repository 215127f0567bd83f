//! Connects the serial console: it copies the guest's output to the container's log and to the pod's flight recorder, and input
//! to the guest. One task reads the output; the guest blocks while its output is not read.

use std::sync::{Mutex, PoisonError};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

/// The maximum number of pieces that wait for the reader.
const MAX_QUEUED_CHUNKS: usize = 16;
/// The maximum size of a piece in bytes.
const CHUNK_SIZE: usize = 4096;

/// The console of one VM.
pub struct SerialConsole {
    input: tokio::sync::Mutex<Option<OwnedWriteHalf>>,
    reader_task: Mutex<Option<JoinHandle<()>>>,
    output: Mutex<Option<mpsc::Receiver<Vec<u8>>>>,
    output_sender: mpsc::Sender<Vec<u8>>,
}

impl SerialConsole {
    /// Returns the console of a VM that has not started.
    pub fn new() -> SerialConsole {
        let (output_sender, output) = mpsc::channel(MAX_QUEUED_CHUNKS);
        SerialConsole {
            input: tokio::sync::Mutex::new(None),
            reader_task: Mutex::new(None),
            output: Mutex::new(Some(output)),
            output_sender,
        }
    }

    /// Connects the console of a new run of the VM. Its output also goes to `recorder`.
    pub async fn connect(&self, stream: UnixStream, recorder: impl FnMut(&[u8]) + Send + 'static) {
        let (reader, writer) = stream.into_split();
        *self.input.lock().await = Some(writer);
        let reader_task = tokio::spawn(read_output(reader, self.output_sender.clone(), recorder));
        *self.reader_task.lock().unwrap_or_else(PoisonError::into_inner) = Some(reader_task);
    }

    /// Writes all of the guest's output, over all runs. Only the first caller gets the output; a later one gets none.
    pub async fn copy_output(&self, to: &mut (impl AsyncWriteExt + Unpin)) -> std::io::Result<()> {
        let output = self.output.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(mut output) = output else { return Ok(()) };
        while let Some(chunk) = output.recv().await {
            if chunk.is_empty() {
                break;
            }
            to.write_all(&chunk).await?;
        }
        to.shutdown().await
    }

    /// Copies input to the guest, until it ends.
    pub async fn copy_input(&self, from: &mut (impl AsyncReadExt + Unpin)) -> std::io::Result<()> {
        let mut chunk = vec![0; CHUNK_SIZE];
        loop {
            let count = from.read(&mut chunk).await?;
            let Some(chunk) = chunk.get(..count).filter(|chunk| !chunk.is_empty()) else { return Ok(()) };
            if let Some(input) = self.input.lock().await.as_mut() {
                input.write_all(chunk).await?;
            }
        }
    }

    /// Ends the output: the VM will not run again, so readers must not wait for more.
    pub fn end(&self) {
        let reader_task = self.reader_task.lock().unwrap_or_else(PoisonError::into_inner).take();
        let output_sender = self.output_sender.clone();
        tokio::spawn(async move {
            if let Some(reader_task) = reader_task {
                // The last output is read first. A task that panicked has read what it could.
                let _ = reader_task.await;
            }
            let _ = output_sender.send(Vec::new()).await;
        });
    }
}

/// Reads until QEMU closes its end.
async fn read_output(mut from: OwnedReadHalf, output_sender: mpsc::Sender<Vec<u8>>, mut recorder: impl FnMut(&[u8])) {
    let mut buffer = vec![0; CHUNK_SIZE];
    while let Ok(count @ 1..) = from.read(&mut buffer).await {
        let chunk = buffer.get(..count).unwrap_or_default();
        recorder(chunk);
        // Without a reader, output goes to the recorder alone.
        let _ = output_sender.send(chunk.to_vec()).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn console_output_and_input_are_copied() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let console = Arc::new(SerialConsole::new());
            let (ours, mut guest) = UnixStream::pair().unwrap();
            let recorded = Arc::new(Mutex::new(Vec::new()));
            let record = Arc::clone(&recorded);
            console.connect(ours, move |chunk| record.lock().unwrap().extend_from_slice(chunk)).await;
            console.copy_input(&mut &b"root\n"[..]).await.unwrap();
            let mut input = [0; 5];
            guest.read_exact(&mut input).await.unwrap();
            assert_eq!(&input, b"root\n");
            guest.write_all(b"login: ").await.unwrap();
            drop(guest);
            let (ours, mut guest) = UnixStream::pair().unwrap();
            let record = Arc::clone(&recorded);
            console.connect(ours, move |chunk| record.lock().unwrap().extend_from_slice(chunk)).await;
            guest.write_all(b"again").await.unwrap();
            drop(guest);
            console.end();
            let mut output = std::io::Cursor::new(Vec::new());
            console.copy_output(&mut output).await.unwrap();
            assert_eq!(output.into_inner(), b"login: again");
            assert_eq!(*recorded.lock().unwrap(), b"login: again");
            let mut second = std::io::Cursor::new(Vec::new());
            console.copy_output(&mut second).await.unwrap();
            assert!(second.into_inner().is_empty());
        });
    }

    #[test]
    fn the_console_of_a_vm_that_never_ran_ends() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let console = SerialConsole::new();
            console.end();
            console.copy_output(&mut std::io::Cursor::new(Vec::new())).await.unwrap();
        });
    }
}
