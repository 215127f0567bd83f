//! Runs exports and imports for a client, and streams their progress and their result.

use super::describe::describe_record;
use super::{VmService, check_name, missing};
use crate::status::error_status;
use crate::transfer::{self, ArtifactLocation, ImportTarget, Progress, TransferError};
use crate::vms;
use nacelle_image::Auth;
use nacelle_proto::vm;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

/// Pause between two progress messages.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(500);

/// Progress messages, and the result as the last message.
pub(super) type ProgressStream = Pin<Box<dyn Stream<Item = Result<vm::Transfer, Status>> + Send>>;

/// Starts an export. It is cancelled when the client is gone.
pub(super) fn export(service: &VmService, request: vm::ExportRequest) -> Result<ProgressStream, Status> {
    let vm::ExportRequest { machine, to } = request;
    let machine = machine.ok_or_else(|| missing("machine"))?;
    let (location, runtime) = (location("to", to)?, Arc::clone(&service.runtime));
    let id = vms::id(&machine.namespace, &machine.name);
    // A VM without a pod, or that does not exist, is handled by the export.
    let container = match service.holder(&id) {
        Some(_) => Some(service.find_running(&machine)?.id),
        None => None,
    };
    Ok(start(move |progress| async move {
        let exported = transfer::export(&*runtime, &id, container, location, &progress).await?;
        let snapshots = exported.snapshot.into_iter().collect();
        Ok(vm::Transfer { digest: exported.digest.to_string(), snapshots, ..vm::Transfer::default() })
    }))
}

/// Starts an import. It is cancelled when the client is gone.
pub(super) fn import(service: &VmService, request: vm::ImportRequest) -> Result<ProgressStream, Status> {
    let vm::ImportRequest { from, to, new_identity } = request;
    let to = to.ok_or_else(|| missing("to"))?;
    check_name(&to)?;
    let (location, runtime) = (location("from", from)?, Arc::clone(&service.runtime));
    let target = ImportTarget { namespace: to.namespace, name: to.name, new_identity };
    Ok(start(move |progress| async move {
        let imported = transfer::import(&runtime, &target, location, &progress).await?;
        Ok(vm::Transfer {
            digest: imported.digest.to_string(),
            machine: Some(describe_record(imported.record)),
            snapshots: imported.snapshots,
            ..vm::Transfer::default()
        })
    }))
}

fn location(field: &str, artifact: Option<vm::Artifact>) -> Result<ArtifactLocation, Status> {
    let vm::Artifact { name, credentials, plain_http } = artifact.ok_or_else(|| missing(field))?;
    let auth = credentials.map(|given| Auth {
        username: given.username,
        password: given.password,
        auth: given.auth,
        server_address: String::new(),
        identity_token: given.identity_token,
        registry_token: given.registry_token,
    });
    Ok(ArtifactLocation { name, auth, plain_http })
}

/// Runs a transfer in a task of its own, until its end or until the client is gone.
fn start<F>(transfer: impl FnOnce(Progress) -> F) -> ProgressStream
where
    F: Future<Output = Result<vm::Transfer, TransferError>> + Send + 'static,
{
    start_with_interval(PROGRESS_INTERVAL, transfer)
}

fn start_with_interval<F>(interval: Duration, transfer: impl FnOnce(Progress) -> F) -> ProgressStream
where
    F: Future<Output = Result<vm::Transfer, TransferError>> + Send + 'static,
{
    let (sender, messages) = mpsc::channel(4);
    let progress = Progress::default();
    let transfer = transfer(progress.clone());
    tokio::spawn(async move {
        let mut transfer = pin!(transfer);
        let mut reported = None;
        let result = loop {
            tokio::select! {
                result = &mut transfer => break result,
                () = sender.closed() => {
                    // Stops the work on blocking threads; the rest ends with the future.
                    progress.moved.cancel();
                    return;
                }
                () = tokio::time::sleep(interval) => {}
            }
            let current = progress.current();
            if reported.as_ref() != Some(&current) {
                let (step, bytes, total) = current.clone();
                // A slow client must not delay the transfer: progress messages are dropped.
                let _ = sender.try_send(Ok(vm::Transfer { step, bytes, total, ..vm::Transfer::default() }));
                reported = Some(current);
            }
        };
        // The client may have gone meanwhile.
        let _ = sender.send(result.map_err(error_status)).await;
    });
    Box::pin(ReceiverStream::new(messages))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio_stream::StreamExt;

    #[tokio::test]
    async fn a_client_receives_the_progress_and_the_result() {
        let (finish, wait) = tokio::sync::oneshot::channel::<()>();
        let mut messages = start_with_interval(Duration::from_millis(5), move |progress| async move {
            progress.moved.set(5);
            wait.await.unwrap();
            Ok(vm::Transfer { digest: "d".into(), ..vm::Transfer::default() })
        });
        assert_eq!(messages.next().await.unwrap().unwrap(), vm::Transfer { bytes: 5, ..vm::Transfer::default() });
        // Unchanged progress is not sent again.
        assert!(tokio::time::timeout(Duration::from_millis(50), messages.next()).await.is_err());
        finish.send(()).unwrap();
        assert_eq!(messages.next().await.unwrap().unwrap().digest, "d");
        assert!(messages.next().await.is_none());
        let mut messages = start(|_| async { Err(vms::VmError::NotFound { id: "a/b".into() }.into()) });
        assert_eq!(messages.next().await.unwrap().unwrap_err().code(), tonic::Code::NotFound);
        assert!(messages.next().await.is_none());
    }

    #[tokio::test]
    async fn a_transfer_is_cancelled_when_the_client_disconnects() {
        let (alive, gone) = tokio::sync::oneshot::channel::<()>();
        let messages = start(|_| async move {
            let _alive = alive;
            std::future::pending().await
        });
        drop(messages);
        assert!(gone.await.is_err());
    }
}
