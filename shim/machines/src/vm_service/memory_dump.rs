//! Streams a dump of a VM's memory from the VM's keeper to the client, at the client's speed.

use crate::runtime::{ExecStreams, PodRuntime};
use crate::status::{error_status, rejection};
use nacelle_base::{ContainerId, FailureKind};
use nacelle_proto::vm;
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::sync::mpsc;
use tonic::Status;

/// The largest message in bytes.
const MAX_MESSAGE: usize = 128 << 10;
/// The largest number of queued messages.
const MAX_QUEUED: usize = 4;
/// The longest error text in bytes.
const MAX_ERROR_TEXT: u64 = 2000;

/// Starts the memory dump of the VM in this container. When the receiver is dropped, the dump is cancelled and the VM resumed.
pub(super) async fn start(
    runtime: &dyn PodRuntime,
    container: &ContainerId,
    format: String,
) -> Result<mpsc::Receiver<Result<vm::Piece, Status>>, Status> {
    let args = ["@vm", "memory-dump"].into_iter().map(str::to_owned);
    let args = args.chain(Some(format).filter(|format| !format.is_empty())).collect();
    let dump = runtime.start_exec(container, args).await.map_err(error_status)?;
    let (sender, messages) = mpsc::channel(MAX_QUEUED);
    tokio::spawn(async move {
        tokio::select! {
            sent = send_dump(dump, &sender) => {
                if let Err(error) = sent {
                    // The client may have gone meanwhile.
                    let _ = sender.send(Err(error)).await;
                }
            }
            () = sender.closed() => {}
        }
    });
    Ok(messages)
}

/// Sends the output of the command. Fails if the command does: the dump is then incomplete.
async fn send_dump(dump: ExecStreams, sender: &mpsc::Sender<Result<vm::Piece, Status>>) -> Result<(), Status> {
    let ExecStreams { mut stdout, stderr, exit_code } = dump;
    let failed = |error: std::io::Error| {
        rejection(FailureKind::Unavailable, &format!("cannot read the memory dump of the VM to its end: {error}"))
    };
    loop {
        let mut data = vec![0; MAX_MESSAGE];
        let count = stdout.read(&mut data).await.map_err(failed)?;
        if count == 0 {
            break;
        }
        data.truncate(count);
        if sender.send(Ok(vm::Piece { data })).await.is_err() {
            return Ok(());
        }
    }
    let message = read_text(stderr).await.map_err(failed)?;
    match exit_code.await.map_err(error_status)? {
        0 => Ok(()),
        _ => Err(rejection(FailureKind::Conflict, message.trim())),
    }
}

async fn read_text(stream: impl AsyncRead + Unpin) -> std::io::Result<String> {
    let mut text = Vec::new();
    stream.take(MAX_ERROR_TEXT).read_to_end(&mut text).await?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::AsyncWriteExt;
    use tokio::net::UnixStream;

    async fn sent(output: &[u8], error: &[u8], code: i32) -> (Vec<u8>, Option<Status>) {
        let ((out, mut guest_out), (err, mut guest_err)) = (UnixStream::pair().unwrap(), UnixStream::pair().unwrap());
        let (output, error) = (output.to_vec(), error.to_vec());
        tokio::spawn(async move {
            guest_out.write_all(&output).await.unwrap();
            drop(guest_out);
            guest_err.write_all(&error).await.unwrap();
        });
        let dump = ExecStreams { stdout: out, stderr: err, exit_code: Box::pin(async move { Ok(code) }) };
        let (sender, mut messages) = mpsc::channel(MAX_QUEUED);
        let sending = tokio::spawn(async move { send_dump(dump, &sender).await });
        let mut all = Vec::new();
        while let Some(message) = messages.recv().await {
            all.extend(message.unwrap().data);
        }
        (all, sending.await.unwrap().err())
    }

    #[tokio::test]
    async fn a_dump_is_complete_or_ends_with_an_error() {
        let output: Vec<u8> = (0..MAX_MESSAGE * 9 + 5).map(|n| (n % 253) as u8).collect();
        let (all, error) = sent(&output, b"", 0).await;
        assert!(all == output && error.is_none(), "{error:?}");
        let (all, error) = sent(b"half", b"the reader\nhas gone\n", 126).await;
        let error = error.unwrap();
        assert_eq!((all.as_slice(), error.code()), (&b"half"[..], tonic::Code::FailedPrecondition));
        assert_eq!(error.message(), "the reader has gone");
    }
}
