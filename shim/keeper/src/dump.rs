//! Dumps the guest's memory for debuggers. QEMU writes the dump into a pipe, and this module copies it piece by piece to the
//! client's stream; it is never in a file, and never in memory as a whole. The VM is paused while the dump is written, so a
//! client that stops reading ends it. The commands are those of QEMU's QMP reference (getfd, dump-guest-memory and query-dump).

use crate::error::KeeperError;
use crate::lines::printable;
use crate::machine::Machine;
use nacelle_base::Chain;
use serde_json::{Value, json};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::net::unix::pipe;
use tokio::sync::oneshot;

/// The time that the client has to open the stream of the dump.
const OPENED: Duration = Duration::from_secs(30);
/// How long the client may read nothing.
const PATIENCE: Duration = Duration::from_secs(60);
/// The size of the copy buffer in bytes.
const BUFFER: usize = 256 << 10;
/// The interval of status queries after QEMU has written everything; they take only moments.
const LOOK: Duration = Duration::from_millis(20);

/// Returns QEMU's name of a file format.
fn format(word: &str) -> Result<&'static str, KeeperError> {
    match word {
        "" | "elf" => Ok("elf"),
        "kdump-zlib" => Ok("kdump-zlib"),
        other => {
            let rule = "elf or kdump-zlib is expected";
            Err(KeeperError::Field { field: "format", value: printable(other), rule })
        }
    }
}

/// Dumps the memory to the stream from `reader`. If the future is dropped, QEMU's pipe is closed, the dump ends, and the VM is
/// resumed.
pub async fn dump(
    machine: &Arc<Machine>,
    word: &str,
    reader: oneshot::Receiver<UnixStream>,
) -> Result<(), KeeperError> {
    let format = format(word)?;
    // A VM that is stopped fails here at once.
    machine.ask("query-dump", Value::Null).await?;
    let mut to = match tokio::time::timeout(OPENED, reader).await {
        Ok(Ok(stream)) => stream,
        Ok(Err(_)) | Err(_) => return Err(given_up("nobody reads it")),
    };
    let failed = |source| KeeperError::Resources { what: "a pipe for the memory dump", source };
    let (theirs, mut from) = pipe::pipe().map_err(failed)?;
    let theirs = theirs.into_blocking_fd().map_err(failed)?;
    let beginning = Arc::clone(machine);
    // In a task, so that it completes even if the caller is gone: otherwise QEMU might keep the pipe.
    let begun = tokio::spawn(async move { begin(&beginning, format, theirs).await });
    begun.await.map_err(|error| failed(std::io::Error::other(error)))??;
    pass_on(&mut from, &mut to, PATIENCE).await?;
    if status(machine, "query-dump", "active").await? != "completed" {
        return Err(given_up("QEMU could not write it to its end"));
    }
    // The dump ends with the pipe, but the VM is resumed a moment later. The next request must not find it paused.
    status(machine, "query-status", "save-vm").await?;
    to.shutdown().await.map_err(|_broken| given_up("whoever reads it is gone"))
}

/// Polls until QEMU's status differs from `passing`, and returns it.
async fn status(machine: &Machine, command: &str, passing: &str) -> Result<String, KeeperError> {
    loop {
        let told = machine.ask(command, Value::Null).await?;
        match told.get("status").and_then(Value::as_str) {
            Some(word) if word == passing => tokio::time::sleep(LOOK).await,
            word => return Ok(word.unwrap_or_default().to_owned()),
        }
    }
}

/// Starts the dump in a thread of QEMU.
async fn begin(machine: &Machine, format: &str, pipe: OwnedFd) -> Result<(), KeeperError> {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let name = format!("memory-dump-{}", NEXT.fetch_add(1, Ordering::Relaxed));
    machine.hand("getfd", json!({ "fdname": name }), pipe).await?;
    let arguments = json!({ "paging": false, "protocol": format!("fd:{name}"), "detach": true, "format": format });
    let begun = machine.ask("dump-guest-memory", arguments).await;
    if begun.is_err() {
        // QEMU may have taken the pipe before the error; then it has closed it.
        if let Err(error) = machine.ask("closefd", json!({ "fdname": name })).await {
            tracing::debug!("a pipe of a dump: {}", Chain(&error));
        }
    }
    begun.map(drop)
}

async fn pass_on(from: &mut pipe::Receiver, to: &mut UnixStream, patience: Duration) -> Result<(), KeeperError> {
    let mut buffer = vec![0; BUFFER];
    loop {
        let count = from.read(&mut buffer).await;
        let count = count.map_err(|source| KeeperError::Resources { what: "the memory dump", source })?;
        let Some(piece) = buffer.get(..count).filter(|piece| !piece.is_empty()) else { return Ok(()) };
        match tokio::time::timeout(patience, to.write_all(piece)).await {
            Ok(Ok(())) => {}
            Ok(Err(_broken)) => return Err(given_up("whoever reads it is gone")),
            Err(_elapsed) => return Err(given_up("whoever reads it has taken nothing for too long")),
        }
    }
}

fn given_up(why: &'static str) -> KeeperError {
    KeeperError::Dump { why }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run<T>(work: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(work)
    }

    #[test]
    fn formats_are_those_that_fit_through_a_pipe() {
        assert_eq!((format("").unwrap(), format("elf").unwrap()), ("elf", "elf"));
        assert_eq!(format("kdump-zlib").unwrap(), "kdump-zlib");
        let error = format("win-dmp\u{7}").unwrap_err().to_string();
        assert!(error.contains("format is win-dmp:"), "{error}");
    }

    #[test]
    fn what_is_written_arrives_whole_and_in_order() {
        run(async {
            let (mut write, mut from) = pipe::pipe().unwrap();
            let (mut to, mut reader) = UnixStream::pair().unwrap();
            let all: Vec<u8> = (0..3_000_000_u32).map(|n| (n % 251) as u8).collect();
            let written = all.clone();
            let writer = tokio::spawn(async move { write.write_all(&written).await });
            let read = tokio::spawn(async move {
                let mut read = Vec::new();
                reader.read_to_end(&mut read).await.map(|_| read)
            });
            pass_on(&mut from, &mut to, PATIENCE).await.unwrap();
            drop(to);
            writer.await.unwrap().unwrap();
            assert!(read.await.unwrap().unwrap() == all);
        });
    }

    #[test]
    fn a_reader_who_goes_or_stalls_ends_it() {
        run(async {
            for stays in [false, true] {
                let (mut write, mut from) = pipe::pipe().unwrap();
                let (mut to, reader) = UnixStream::pair().unwrap();
                let reader = stays.then_some(reader);
                let writer = tokio::spawn(async move { while write.write_all(&[1; 4096]).await.is_ok() {} });
                let error = pass_on(&mut from, &mut to, Duration::from_millis(50)).await.unwrap_err().to_string();
                assert!(error.contains(if stays { "nothing for too long" } else { "is gone" }), "{error}");
                drop(from);
                // Like QEMU, the writer finds its pipe closed.
                writer.await.unwrap();
                drop(reader);
            }
        });
    }
}
