//! Pauses a VM while a client copies the files of its disks: a snapshot is saved, everything is written to the files, and the
//! client receives a byte now and then as long as the files stay unchanged. When the client disconnects, the VM is resumed and
//! the snapshot deleted.

use crate::error::KeeperError;
use crate::machine::Machine;
use crate::snapshots;
use nacelle_base::Chain;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::oneshot;

/// The time that the client has to open the stream.
const OPENED: Duration = Duration::from_secs(30);
/// The interval between two bytes.
const BEAT: Duration = Duration::from_millis(250);
/// The maximum number of attempts to resume the VM.
const TRIES: u32 = 240;

/// Pauses the VM. Continues even if the future is dropped: nothing else would resume the VM.
pub async fn hold(
    machine: &Arc<Machine>,
    name: &str,
    reader: oneshot::Receiver<UnixStream>,
) -> Result<(), KeeperError> {
    // A VM that is stopped fails here at once.
    let runs = runs(machine).await?;
    let to = match tokio::time::timeout(OPENED, reader).await {
        Ok(Ok(stream)) => stream,
        Ok(Err(_)) | Err(_) => return Err(KeeperError::Hold { why: "nobody reads its output" }),
    };
    let (held, name) = (Arc::clone(machine), name.to_owned());
    let holding = tokio::spawn(async move {
        let saved = save(&held, &name).await;
        let copied = match &saved {
            Ok(()) => until_gone(&held, to).await,
            Err(_) => Ok(()),
        };
        if runs {
            go_on(&held).await;
        }
        saved?;
        let deleted = snapshots::delete(&held, &name).await;
        copied.and(deleted)
    });
    holding.await.map_err(|error| KeeperError::Resources { what: "a task", source: std::io::Error::other(error) })?
}

async fn runs(machine: &Machine) -> Result<bool, KeeperError> {
    Ok(machine.ask("query-status", Value::Null).await?.get("running") == Some(&json!(true)))
}

async fn save(machine: &Machine, name: &str) -> Result<(), KeeperError> {
    machine.ask("stop", Value::Null).await?;
    snapshots::save(machine, name).await
}

async fn until_gone(machine: &Machine, mut to: UnixStream) -> Result<(), KeeperError> {
    // Snapshots cannot change and disks cannot be added from here on.
    let _ours = machine.snapshots_alone()?;
    let _disks = machine.added.lock().await;
    let before = machine.resumed()?;
    // For a paused VM, this makes QEMU write the tables of the files that it still has in memory.
    machine.ask("stop", Value::Null).await?;
    loop {
        if machine.resumed()? != before || runs(machine).await? {
            return Err(KeeperError::Hold { why: "somebody had the machine go on meanwhile" });
        }
        if !beat(&mut to).await {
            return Ok(());
        }
    }
}

/// Sends a byte and waits. Returns false if the client has disconnected.
async fn beat(stream: &mut UnixStream) -> bool {
    if stream.write_all(b".").await.is_err() {
        return false;
    }
    // The client sends nothing. The read ends with the connection, or with an error that means the same.
    tokio::time::timeout(BEAT, stream.read(&mut [0])).await.is_err()
}

/// Resumes the VM, with retries: a snapshot that is still being written keeps it paused a moment longer.
async fn go_on(machine: &Machine) {
    for _ in 0..TRIES {
        match machine.ask("cont", Value::Null).await {
            Ok(_) => match runs(machine).await {
                Ok(false) => {}
                Ok(true) | Err(_) => return,
            },
            // The VM is stopped.
            Err(KeeperError::State { .. } | KeeperError::Gone { .. }) => return,
            Err(error) => tracing::info!("the machine does not go on yet: {}", Chain(&error)),
        }
        tokio::time::sleep(BEAT).await;
    }
    tracing::error!("the machine stands still, and does not go on");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run<T>(work: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(work)
    }

    #[test]
    fn whoever_reads_is_told_until_he_is_gone() {
        run(async {
            let (mut ours, mut theirs) = UnixStream::pair().unwrap();
            assert!(beat(&mut ours).await && beat(&mut ours).await);
            let mut beats = [0; 2];
            theirs.read_exact(&mut beats).await.unwrap();
            assert_eq!(beats, *b"..");
            let reader = tokio::spawn(async move { theirs.read_exact(&mut [0]).await.map(drop) });
            assert!(!beat(&mut ours).await);
            reader.await.unwrap().unwrap();
            assert!(!beat(&mut ours).await);
        });
    }
}
