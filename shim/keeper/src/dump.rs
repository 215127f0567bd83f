//! Dumps the guest's memory for debuggers. QEMU writes the dump into a pipe, and this module copies it piece by piece to the
//! client's stream; it is never in a file, and never in memory as a whole. The VM is paused while the dump is written, so a
//! client that stops reading ends it. The commands are those of QEMU's QMP reference (getfd, dump-guest-memory and query-dump).

use crate::client::wait_for_client;
use crate::error::KeeperError;
use crate::json_lines::printable;
use crate::vm::PodVm;
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

/// How long the client may read nothing.
const READ_TIMEOUT: Duration = Duration::from_secs(60);
/// The size of the copy buffer in bytes.
const COPY_BUFFER: usize = 256 << 10;
/// The interval of status queries after QEMU has written everything; they take only moments.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Returns QEMU's name of a file format.
fn dump_format(format_name: &str) -> Result<&'static str, KeeperError> {
    match format_name {
        "" | "elf" => Ok("elf"),
        "kdump-zlib" => Ok("kdump-zlib"),
        other => {
            let rule = "elf or kdump-zlib is expected";
            Err(KeeperError::InvalidField { field: "format", value: printable(other), rule })
        }
    }
}

/// Dumps the memory to the stream from `reader`. If the future is dropped, QEMU's pipe is closed, the dump ends, and the VM is
/// resumed.
pub async fn dump_memory(
    vm: &Arc<PodVm>,
    format_name: &str,
    reader: oneshot::Receiver<UnixStream>,
) -> Result<(), KeeperError> {
    let format = dump_format(format_name)?;
    // A VM that is stopped fails here at once.
    vm.execute("query-dump", Value::Null).await?;
    let not_opened = || aborted("no client opened its stream within 30 seconds");
    let mut client = wait_for_client(reader).await.ok_or_else(not_opened)?;
    let failed = |source| KeeperError::Resource { what: "create a pipe for the memory dump", source };
    let (write_end, mut read_end) = pipe::pipe().map_err(failed)?;
    let write_end = write_end.into_blocking_fd().map_err(failed)?;
    let vm_of_task = Arc::clone(vm);
    // In a task, so that it completes even if the caller is gone: otherwise QEMU might keep the pipe.
    let started = tokio::spawn(async move { start_dump(&vm_of_task, format, write_end).await });
    started.await.map_err(|error| failed(std::io::Error::other(error)))??;
    copy_to_client(&mut read_end, &mut client, READ_TIMEOUT).await?;
    if wait_while(vm, "query-dump", "active").await? != "completed" {
        return Err(aborted("QEMU did not complete it"));
    }
    // The dump ends with the pipe, but the VM is resumed a moment later. The next request must not find it paused.
    wait_while(vm, "query-status", "save-vm").await?;
    client.shutdown().await.map_err(|_broken| aborted("the client has disconnected"))
}

/// Polls until QEMU's status differs from `status`, and returns it.
async fn wait_while(vm: &PodVm, command: &str, status: &str) -> Result<String, KeeperError> {
    loop {
        let reply = vm.execute(command, Value::Null).await?;
        match reply.get("status").and_then(Value::as_str) {
            Some(current) if current == status => tokio::time::sleep(POLL_INTERVAL).await,
            current => return Ok(current.unwrap_or_default().to_owned()),
        }
    }
}

/// Starts the dump in a thread of QEMU.
async fn start_dump(vm: &PodVm, format: &str, pipe: OwnedFd) -> Result<(), KeeperError> {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let name = format!("memory-dump-{}", NEXT.fetch_add(1, Ordering::Relaxed));
    vm.execute_with_descriptor("getfd", json!({ "fdname": name }), pipe).await?;
    let arguments = json!({ "paging": false, "protocol": format!("fd:{name}"), "detach": true, "format": format });
    let started = vm.execute("dump-guest-memory", arguments).await;
    if started.is_err() {
        // QEMU may have taken the pipe before the error; then it has closed it.
        if let Err(error) = vm.execute("closefd", json!({ "fdname": name })).await {
            tracing::debug!("a pipe of a dump: {}", Chain(&error));
        }
    }
    started.map(drop)
}

async fn copy_to_client(
    read_end: &mut pipe::Receiver,
    client: &mut UnixStream,
    timeout: Duration,
) -> Result<(), KeeperError> {
    let mut buffer = vec![0; COPY_BUFFER];
    loop {
        let count = read_end.read(&mut buffer).await;
        let count = count.map_err(|source| KeeperError::Resource { what: "read the memory dump from QEMU", source })?;
        let Some(chunk) = buffer.get(..count).filter(|chunk| !chunk.is_empty()) else { return Ok(()) };
        match tokio::time::timeout(timeout, client.write_all(chunk)).await {
            Ok(Ok(())) => {}
            Ok(Err(_broken)) => return Err(aborted("the client has disconnected")),
            Err(_elapsed) => return Err(aborted("the client has read nothing for 60 seconds")),
        }
    }
}

fn aborted(reason: &'static str) -> KeeperError {
    KeeperError::Dump { reason }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run<T>(work: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(work)
    }

    #[test]
    fn dump_formats_are_those_that_need_no_seek() {
        assert_eq!((dump_format("").unwrap(), dump_format("elf").unwrap()), ("elf", "elf"));
        assert_eq!(dump_format("kdump-zlib").unwrap(), "kdump-zlib");
        let error = dump_format("win-dmp\u{7}").unwrap_err().to_string();
        assert!(error.contains("format is win-dmp:"), "{error}");
    }

    #[test]
    fn a_dump_arrives_complete_and_in_order() {
        run(async {
            let (mut write, mut read_end) = pipe::pipe().unwrap();
            let (mut client, mut reader) = UnixStream::pair().unwrap();
            let all: Vec<u8> = (0..3_000_000_u32).map(|n| (n % 251) as u8).collect();
            let written = all.clone();
            let writer = tokio::spawn(async move { write.write_all(&written).await });
            let read = tokio::spawn(async move {
                let mut read = Vec::new();
                reader.read_to_end(&mut read).await.map(|_| read)
            });
            copy_to_client(&mut read_end, &mut client, READ_TIMEOUT).await.unwrap();
            drop(client);
            writer.await.unwrap().unwrap();
            assert!(read.await.unwrap().unwrap() == all);
        });
    }

    #[test]
    fn a_client_that_disconnects_or_stalls_ends_the_dump() {
        run(async {
            for stays in [false, true] {
                let (mut write, mut read_end) = pipe::pipe().unwrap();
                let (mut client, reader) = UnixStream::pair().unwrap();
                let reader = stays.then_some(reader);
                let writer = tokio::spawn(async move { while write.write_all(&[1; 4096]).await.is_ok() {} });
                let error = copy_to_client(&mut read_end, &mut client, Duration::from_millis(50))
                    .await
                    .unwrap_err()
                    .to_string();
                assert!(error.contains(if stays { "read nothing" } else { "disconnected" }), "{error}");
                drop(read_end);
                // Like QEMU, the writer finds its pipe closed.
                writer.await.unwrap();
                drop(reader);
            }
        });
    }
}
