//! Runs exports and imports for a client, and streams their progress and their result.

use super::{VmService, check_name, of_record};
use crate::cri::status::{refuse, status};
use crate::lifecycle::Node;
use crate::transfer::{self, Import, Place, Progress, TransferError};
use nacelle_base::Kind;
use nacelle_image::Auth;
use nacelle_machines::vms;
use nacelle_proto::vm;
use std::pin::{Pin, pin};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

/// Pause between two progress messages.
const PAUSE: Duration = Duration::from_millis(500);

pub(super) type Told = Pin<Box<dyn Stream<Item = Result<vm::Transfer, Status>> + Send>>;

/// Starts an export. It is cancelled when the client is gone.
pub(super) fn export(service: &VmService, request: vm::ExportRequest) -> Result<Told, Status> {
    let vm::ExportRequest { machine, to } = request;
    let machine = machine.ok_or_else(|| refuse(Kind::Invalid, "machine is missing"))?;
    let (place, node) = (place("to", to)?, service.node.clone());
    let id = vms::id(&machine.namespace, &machine.name);
    // A VM without a pod, or that does not exist, is handled by the export.
    let container = match node.holder(&id) {
        Some(_) => Some(service.find_running(&machine)?.id.to_string()),
        None => None,
    };
    Ok(tell(move |progress| async move {
        let done = transfer::export(&node, &id, container, place, &progress).await?;
        let snapshots = done.snapshot.into_iter().collect();
        Ok(vm::Transfer { digest: done.digest.to_string(), snapshots, ..vm::Transfer::default() })
    }))
}

/// Starts an import. It is cancelled when the client is gone.
pub(super) fn import(node: &Node, request: vm::ImportRequest) -> Result<Told, Status> {
    let vm::ImportRequest { from, to, new_identity } = request;
    let to = to.ok_or_else(|| refuse(Kind::Invalid, "to is missing"))?;
    check_name(&to)?;
    let (place, node) = (place("from", from)?, node.clone());
    let asked = Import { namespace: to.namespace, name: to.name, new_identity };
    Ok(tell(move |progress| async move {
        let done = transfer::import(&node, &asked, place, &progress).await?;
        Ok(vm::Transfer {
            digest: done.digest.to_string(),
            machine: Some(of_record(done.record)),
            snapshots: done.snapshots,
            ..vm::Transfer::default()
        })
    }))
}

fn place(field: &str, artifact: Option<vm::Artifact>) -> Result<Place, Status> {
    let vm::Artifact { name, credentials, plain_http } =
        artifact.ok_or_else(|| refuse(Kind::Invalid, &format!("{field} is missing")))?;
    let auth = credentials.map(|given| Auth {
        username: given.username,
        password: given.password,
        auth: given.auth,
        server_address: String::new(),
        identity_token: given.identity_token,
        registry_token: given.registry_token,
    });
    Ok(Place { name, auth, plain_http })
}

fn tell<F>(work: impl FnOnce(Progress) -> F) -> Told
where
    F: Future<Output = Result<vm::Transfer, TransferError>> + Send + 'static,
{
    tell_every(PAUSE, work)
}

fn tell_every<F>(pause: Duration, work: impl FnOnce(Progress) -> F) -> Told
where
    F: Future<Output = Result<vm::Transfer, TransferError>> + Send + 'static,
{
    let (tell, told) = mpsc::channel(4);
    let progress = Progress::default();
    let work = work(progress.clone());
    tokio::spawn(async move {
        let mut work = pin!(work);
        let mut before = None;
        let ended = loop {
            tokio::select! {
                ended = &mut work => break ended,
                () = tell.closed() => {
                    // Stops the work on blocking threads; the rest ends with the future.
                    progress.moved.give_up();
                    return;
                }
                () = tokio::time::sleep(pause) => {}
            }
            let now = progress.now();
            if before.as_ref() != Some(&now) {
                let (step, bytes, total) = now.clone();
                // A slow client must not delay the transfer: progress messages are dropped.
                let _ = tell.try_send(Ok(vm::Transfer { step, bytes, total, ..vm::Transfer::default() }));
                before = Some(now);
            }
        };
        // The client may have gone meanwhile.
        let _ = tell.send(ended.map_err(status)).await;
    });
    Box::pin(ReceiverStream::new(told))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio_stream::StreamExt;

    #[tokio::test]
    async fn whoever_waits_is_told_how_far_it_is_and_how_it_ends() {
        let (go_on, wait) = tokio::sync::oneshot::channel::<()>();
        let mut told = tell_every(Duration::from_millis(5), move |progress| async move {
            progress.moved.set(5);
            wait.await.unwrap();
            Ok(vm::Transfer { digest: "d".into(), ..vm::Transfer::default() })
        });
        assert_eq!(told.next().await.unwrap().unwrap(), vm::Transfer { bytes: 5, ..vm::Transfer::default() });
        // Unchanged progress is not sent again.
        assert!(tokio::time::timeout(Duration::from_millis(50), told.next()).await.is_err());
        go_on.send(()).unwrap();
        assert_eq!(told.next().await.unwrap().unwrap().digest, "d");
        assert!(told.next().await.is_none());
        let mut told = tell(|_| async { Err(nacelle_machines::vms::VmError::NotFound { id: "a/b".into() }.into()) });
        assert_eq!(told.next().await.unwrap().unwrap_err().code(), tonic::Code::NotFound);
        assert!(told.next().await.is_none());
    }

    #[tokio::test]
    async fn when_nobody_listens_it_is_given_up() {
        let (alive, gone) = tokio::sync::oneshot::channel::<()>();
        let told = tell(|_| async move {
            let _alive = alive;
            std::future::pending().await
        });
        drop(told);
        assert!(gone.await.is_err());
    }
}
