//! Streams a dump of a machine's memory from the machine's keeper to the client, at the client's speed.

use crate::cri::status::{refuse, status};
use crate::lifecycle::{LifecycleError, Node};
use crate::streaming::Guests;
use nacelle_base::Kind;
use nacelle_proto::vm;
use nacelle_stream::{Exec, Guests as _, Process};
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::sync::mpsc;
use tonic::Status;

/// The largest message in bytes.
const PIECE: usize = 128 << 10;
/// The largest number of queued messages.
const PIECES: usize = 4;
/// The longest error text in bytes.
const WORDS: u64 = 2000;

pub(super) type Pieces = mpsc::Receiver<Result<vm::Piece, Status>>;

/// Starts the memory dump of the machine in this container. When the receiver is dropped, the dump is cancelled and the machine
/// resumed.
pub(super) async fn begin(node: &Node, container: String, format: String) -> Result<Pieces, Status> {
    let args = ["@vm", "memory-dump"].into_iter().map(str::to_owned);
    let args = args.chain(Some(format).filter(|format| !format.is_empty())).collect();
    let exec = Exec { container, args, tty: false, stdin: false, stdout: true, stderr: true };
    let process = Guests::new(node.clone()).exec(&exec).await.map_err(status)?;
    let (tell, told) = mpsc::channel(PIECES);
    tokio::spawn(async move {
        tokio::select! {
            passed = pass_on(process, &tell) => {
                if let Err(error) = passed {
                    // The client may have gone meanwhile.
                    let _ = tell.send(Err(error)).await;
                }
            }
            () = tell.closed() => {}
        }
    });
    Ok(told)
}

async fn pass_on(
    process: Process<LifecycleError>,
    tell: &mpsc::Sender<Result<vm::Piece, Status>>,
) -> Result<(), Status> {
    let Process { stdout, stderr, end, .. } = process;
    let broken = |error: std::io::Error| refuse(Kind::Unavailable, &format!("the memory dump broke off: {error}"));
    let (Some(mut stdout), Some(stderr)) = (stdout, stderr) else {
        return Err(refuse(Kind::Internal, "the command has no output"));
    };
    loop {
        let mut data = vec![0; PIECE];
        let count = stdout.read(&mut data).await.map_err(broken)?;
        if count == 0 {
            break;
        }
        data.truncate(count);
        if tell.send(Ok(vm::Piece { data })).await.is_err() {
            return Ok(());
        }
    }
    let words = words(stderr).await.map_err(broken)?;
    match end.await.map_err(status)? {
        0 => Ok(()),
        _ => Err(refuse(Kind::Conflict, words.trim())),
    }
}

async fn words(from: impl AsyncRead + Unpin) -> std::io::Result<String> {
    let mut words = Vec::new();
    from.take(WORDS).read_to_end(&mut words).await?;
    Ok(String::from_utf8_lossy(&words).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::AsyncWriteExt;
    use tokio::net::UnixStream;

    async fn passed(output: &[u8], words: &[u8], code: i32) -> (Vec<u8>, Option<Status>) {
        let ((out, mut guest_out), (err, mut guest_err)) = (UnixStream::pair().unwrap(), UnixStream::pair().unwrap());
        let (output, words) = (output.to_vec(), words.to_vec());
        tokio::spawn(async move {
            guest_out.write_all(&output).await.unwrap();
            drop(guest_out);
            guest_err.write_all(&words).await.unwrap();
        });
        let end = Box::pin(async move { Ok(code) });
        let process =
            Process { exec_id: String::new(), detaches: false, stdin: None, stdout: Some(out), stderr: Some(err), end };
        let (tell, mut told) = mpsc::channel(PIECES);
        let passing = tokio::spawn(async move { pass_on(process, &tell).await });
        let mut all = Vec::new();
        while let Some(piece) = told.recv().await {
            all.extend(piece.unwrap().data);
        }
        (all, passing.await.unwrap().err())
    }

    #[tokio::test]
    async fn a_dump_is_whole_or_has_an_error_at_its_end() {
        let output: Vec<u8> = (0..PIECE * 9 + 5).map(|n| (n % 253) as u8).collect();
        let (all, error) = passed(&output, b"", 0).await;
        assert!(all == output && error.is_none(), "{error:?}");
        let (all, error) = passed(b"half", b"the reader\nhas gone\n", 126).await;
        let error = error.unwrap();
        assert_eq!((all.as_slice(), error.code()), (&b"half"[..], tonic::Code::FailedPrecondition));
        assert_eq!(error.message(), "the reader has gone");
    }
}
