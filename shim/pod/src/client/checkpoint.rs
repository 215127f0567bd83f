//! Saves a running pod, for the daemon. The pod process receives descriptors of the files only, so that it reaches no directory of the node.

use super::{ClientError, PodClient};
use crate::protocol::PodRpc;
use nacelle_proto::{common, pod as proto};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::time::Duration;
use tokio::time::timeout;

/// The limit from the end of the offer to the reply: the pod process must resume the VM and release the containers within it.
const STOP_LIMIT: Duration = Duration::from_secs(10);
/// The maximum length of a reply in bytes: 255 images, and the ids of containers.
const MAX_REPLY: usize = 256 << 10;

/// The files of a checkpoint, empty and open for writing.
#[derive(Debug)]
pub struct CheckpointWriters {
    /// The file for the state of the vCPUs and devices.
    pub state: File,
    /// The file for the memory.
    pub memory: File,
    /// The file for the scratch disk.
    pub scratch: File,
}

impl PodClient {
    /// Saves the pod with these running containers to the files. All containers run when this returns, and no descriptor of the files is
    /// open in this process. If `stop` completes first, the pod process is asked to stop, and its reply is awaited for 10 seconds.
    ///
    /// # Errors
    /// [`ClientError::Stopped`] if `stop` completed before the request was sent; otherwise the failure that the pod process reports, which
    /// after `stop` is usually that it was stopped. The reply may still be a success.
    pub async fn checkpoint(
        &self,
        name: &str,
        container_ids: Vec<String>,
        files: CheckpointWriters,
        stop: impl Future<Output = ()>,
    ) -> Result<proto::CheckpointResponse, ClientError> {
        tokio::pin!(stop);
        let offered = tokio::select! {
            biased;
            () = &mut stop => return Err(ClientError::Stopped),
            offered = self.offer_checkpoint(name, files) => offered?,
        };
        let request = proto::CheckpointRequest { name: name.to_owned(), container_ids };
        let reply = self.call(PodRpc::Checkpoint, request, |rpc, request| async move {
            rpc.max_decoding_message_size(MAX_REPLY).checkpoint(request).await
        });
        tokio::pin!(reply);
        tokio::select! {
            reply = &mut reply => return reply,
            () = stop => {}
        }
        // The pod process stops when this connection ends.
        drop(offered);
        timeout(STOP_LIMIT, reply)
            .await
            .map_err(|_elapsed| ClientError::Timeout { what: "stop a checkpoint", limit: STOP_LIMIT })?
    }

    /// Hands the files over to the pod process; returns the connection, whose end withdraws them.
    async fn offer_checkpoint(
        &self,
        name: &str,
        files: CheckpointWriters,
    ) -> Result<tokio::net::UnixStream, ClientError> {
        let CheckpointWriters { state, memory, scratch } = files;
        let descriptors: [OwnedFd; 3] = [state.into(), memory.into(), scratch.into()];
        let open = proto::StreamOpen {
            stream: common::Stream::Checkpoint.into(),
            name: name.to_owned(),
            descriptors: u32::try_from(descriptors.len()).unwrap_or(u32::MAX),
            ..Default::default()
        };
        self.open_with_descriptors(open, &descriptors).await
    }
}
