//! Pauses a VM while a client copies the files of its disks: a snapshot is saved, everything is written to the files, and the
//! client receives a byte now and then as long as the files stay unchanged. When the client disconnects, the VM is resumed and
//! the snapshot deleted.

use crate::client::wait_for_client;
use crate::error::KeeperError;
use crate::snapshots;
use crate::vm::PodVm;
use nacelle_base::Chain;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::oneshot;

/// The interval between two bytes.
const BEAT_INTERVAL: Duration = Duration::from_millis(250);
/// The maximum number of attempts to resume the VM.
const MAX_RESUME_ATTEMPTS: u32 = 240;

/// Pauses the VM. Continues even if the future is dropped: nothing else would resume the VM.
pub async fn quiesce(vm: &Arc<PodVm>, name: &str, reader: oneshot::Receiver<UnixStream>) -> Result<(), KeeperError> {
    // A VM that is stopped fails here at once.
    let was_running = is_running(vm).await?;
    let not_opened = KeeperError::Quiesce { reason: "no client opened the output within 30 seconds" };
    let client = wait_for_client(reader).await.ok_or(not_opened)?;
    let (vm_of_task, name) = (Arc::clone(vm), name.to_owned());
    let task = tokio::spawn(async move {
        let saved = save(&vm_of_task, &name).await;
        let copied = match &saved {
            Ok(()) => wait_for_disconnect(&vm_of_task, client).await,
            Err(_) => Ok(()),
        };
        if was_running {
            resume(&vm_of_task).await;
        }
        saved?;
        let deleted = snapshots::delete(&vm_of_task, &name).await;
        copied.and(deleted)
    });
    task.await.map_err(|error| KeeperError::Resource { what: "finish a task", source: std::io::Error::other(error) })?
}

async fn is_running(vm: &PodVm) -> Result<bool, KeeperError> {
    Ok(vm.execute("query-status", Value::Null).await?.get("running") == Some(&json!(true)))
}

async fn save(vm: &PodVm, name: &str) -> Result<(), KeeperError> {
    vm.execute("stop", Value::Null).await?;
    snapshots::save(vm, name).await
}

async fn wait_for_disconnect(vm: &PodVm, mut client: UnixStream) -> Result<(), KeeperError> {
    // Snapshots cannot change and disks cannot be added from here on.
    let _ours = vm.lock_snapshots()?;
    let _hotplug = vm.hotplug.lock().await;
    let before = vm.resume_count()?;
    // For a paused VM, this makes QEMU write the tables of the files that it still has in memory.
    vm.execute("stop", Value::Null).await?;
    loop {
        if vm.resume_count()? != before || is_running(vm).await? {
            return Err(KeeperError::Quiesce { reason: "another client resumed the VM meanwhile" });
        }
        if !send_beat(&mut client).await {
            return Ok(());
        }
    }
}

/// Sends a byte and waits. Returns false if the client has disconnected.
async fn send_beat(stream: &mut UnixStream) -> bool {
    if stream.write_all(b".").await.is_err() {
        return false;
    }
    // The client sends nothing. The read ends with the connection, or with an error that means the same.
    tokio::time::timeout(BEAT_INTERVAL, stream.read(&mut [0])).await.is_err()
}

/// Resumes the VM, with retries: a snapshot that is still being written keeps it paused a moment longer.
async fn resume(vm: &PodVm) {
    for _ in 0..MAX_RESUME_ATTEMPTS {
        match vm.execute("cont", Value::Null).await {
            Ok(_) => match is_running(vm).await {
                Ok(false) => {}
                Ok(true) | Err(_) => return,
            },
            // The VM is stopped.
            Err(KeeperError::WrongState { .. } | KeeperError::Disconnected { .. }) => return,
            Err(error) => tracing::info!("cannot resume the VM yet: {}", Chain(&error)),
        }
        tokio::time::sleep(BEAT_INTERVAL).await;
    }
    tracing::error!("cannot resume the VM: it stays paused");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run<T>(work: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(work)
    }

    #[test]
    fn a_beat_is_sent_until_the_client_disconnects() {
        run(async {
            let (mut ours, mut theirs) = UnixStream::pair().unwrap();
            assert!(send_beat(&mut ours).await && send_beat(&mut ours).await);
            let mut beats = [0; 2];
            theirs.read_exact(&mut beats).await.unwrap();
            assert_eq!(beats, *b"..");
            let reader = tokio::spawn(async move { theirs.read_exact(&mut [0]).await.map(drop) });
            assert!(!send_beat(&mut ours).await);
            reader.await.unwrap().unwrap();
            assert!(!send_beat(&mut ours).await);
        });
    }
}
