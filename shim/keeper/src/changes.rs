//! Reports to a client that the VM's status has changed: one line break when it connects and after each change, until it disconnects or
//! the VM ends. The client requests the status itself, so changes in quick succession may share a line break.

use crate::client::{OPEN_TIMEOUT, wait_for_client};
use crate::error::KeeperError;
use crate::vm::{PodVm, PodVmState};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::{oneshot, watch};

/// Reports changes to the stream from `reader`.
pub async fn report(vm: &PodVm, reader: oneshot::Receiver<UnixStream>) -> Result<(), KeeperError> {
    let (state, qemu) = vm.changes();
    let Some(client) = wait_for_client(reader).await else {
        let command = "the opening of the output".to_owned();
        return Err(KeeperError::Timeout { peer: "the client", command, limit: OPEN_TIMEOUT });
    };
    send_changes(state, qemu, client).await;
    Ok(())
}

async fn send_changes(mut state: watch::Receiver<PodVmState>, mut qemu: watch::Receiver<()>, mut client: UnixStream) {
    let mut nothing = [0];
    loop {
        // The last line break follows the end of the VM.
        let has_ended = matches!(*state.borrow_and_update(), PodVmState::Ended(_));
        qemu.mark_unchanged();
        if client.write_all(b"\n").await.is_err() || has_ended {
            return;
        }
        let changed = tokio::select! {
            changed = state.changed() => changed.is_ok(),
            changed = qemu.changed() => changed.is_ok(),
            // The client sends nothing. The read ends with the connection, or with an error that means the same.
            _ = client.read(&mut nothing) => false,
        };
        if !changed {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacelle_proto::agent::Exit;

    #[tokio::test]
    async fn each_change_is_reported_until_the_vm_ends() {
        let (state, qemu) = (watch::Sender::new(PodVmState::Created), watch::Sender::new(()));
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let reporting = tokio::spawn(send_changes(state.subscribe(), qemu.subscribe(), ours));
        let mut line = async || theirs.read_u8().await.map_err(|error| error.kind());
        assert_eq!(line().await, Ok(b'\n'), "the client has connected");
        state.send_replace(PodVmState::Running);
        assert_eq!(line().await, Ok(b'\n'));
        qemu.send_replace(());
        assert_eq!(line().await, Ok(b'\n'));
        state.send_replace(PodVmState::Ended(Exit::default()));
        assert_eq!(line().await, Ok(b'\n'));
        assert_eq!(line().await, Err(std::io::ErrorKind::UnexpectedEof));
        reporting.await.unwrap();
    }

    #[tokio::test]
    async fn reports_end_with_the_client() {
        let (state, qemu) = (watch::Sender::new(PodVmState::Running), watch::Sender::new(()));
        let (ours, theirs) = UnixStream::pair().unwrap();
        drop(theirs);
        send_changes(state.subscribe(), qemu.subscribe(), ours).await;
    }
}
