//! Owns: a machine that stands still while somebody copies the files of its disks: a snapshot is taken, all is written, and a byte now and then
//! says that they stay as they are. The machine goes on when whoever asked is gone, and the snapshot with it.

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

/// For whoever asked to open the stream that the word goes to.
const OPENED: Duration = Duration::from_secs(30);
/// Between two bytes.
const BEAT: Duration = Duration::from_millis(250);
/// How often it is tried to have it go on.
const TRIES: u32 = 240;

/// Holds it. To its end even if the future is dropped: nothing else would have the machine go on.
pub async fn hold(
    machine: &Arc<Machine>,
    name: &str,
    reader: oneshot::Receiver<UnixStream>,
) -> Result<(), KeeperError> {
    // One that is off says so at once.
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
    // Nobody changes snapshots from here on, or adds disks.
    let _ours = machine.snapshots_alone()?;
    let _disks = machine.added.lock().await;
    let before = machine.resumed()?;
    // Said to one that stands still, it has QEMU write what it still has of the files' own tables.
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

/// Says that it is held, and waits; false: whoever reads is gone.
async fn beat(stream: &mut UnixStream) -> bool {
    if stream.write_all(b".").await.is_err() {
        return false;
    }
    // Nothing comes; the end does, or an error that means the same.
    tokio::time::timeout(BEAT, stream.read(&mut [0])).await.is_err()
}

/// Until it does: a snapshot that is still being written has it stand still a moment longer.
async fn go_on(machine: &Machine) {
    for _ in 0..TRIES {
        match machine.ask("cont", Value::Null).await {
            Ok(_) => match runs(machine).await {
                Ok(false) => {}
                Ok(true) | Err(_) => return,
            },
            // It is off.
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
