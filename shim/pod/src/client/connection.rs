//! Holds the gRPC connection to a pod process and its version. No request leaves without [`PodConnection::gate`], which
//! checks that the process understands all of it.

use crate::protocol::{GatedRequest, PodFeatureSet, PodPeer, PodProtocolError, PodRpc};
use nacelle_proto::pod::pod_client::PodClient as PodRpcClient;
use nacelle_proto::{common, wire};
use std::sync::Arc;
use tonic::transport::Channel;
use tonic::{Code, Status};

/// The generated client.
pub(super) type Rpc = PodRpcClient<Channel>;

/// The maximum length of a Hello reply in bytes.
const MAX_HELLO: usize = 8 << 10;

/// A connection to a pod process whose version is known.
#[derive(Clone, Debug)]
pub(super) struct PodConnection {
    rpc: Rpc,
    peer: Arc<PodPeer>,
}

impl PodConnection {
    /// Asks the process for its version.
    pub(super) async fn open(channel: Channel) -> Result<PodConnection, Status> {
        let mut first = Rpc::new(channel.clone()).max_decoding_message_size(MAX_HELLO);
        let peer = match first.hello(common::Empty {}).await {
            Ok(hello) => PodPeer::from_hello(hello.get_ref()),
            Err(status) if status.code() == Code::Unimplemented => PodPeer::before_hello(PodFeatureSet::BASE),
            Err(status) => return Err(status),
        };
        let rpc = Rpc::new(channel)
            .max_decoding_message_size(wire::MAX_MESSAGE)
            .max_encoding_message_size(wire::MAX_LARGE_MESSAGE);
        Ok(PodConnection { rpc, peer: Arc::new(peer) })
    }

    pub(super) fn peer(&self) -> &PodPeer {
        &self.peer
    }

    /// Adds features of a process from before Hello that the daemon has recorded.
    pub(super) fn add_recorded_features(&mut self, recorded: PodFeatureSet) {
        Arc::make_mut(&mut self.peer).add_recorded_features(recorded);
    }

    /// Returns what `send` returns for the request, if the process has the features for the RPC and for every field of the request.
    pub(super) fn gate<R: GatedRequest, T>(
        &self,
        rpc: PodRpc,
        request: R,
        send: impl FnOnce(Rpc, R) -> T,
    ) -> Result<T, PodProtocolError> {
        self.peer.require(rpc.needed().union(request.needed()))?;
        Ok(send(self.rpc.clone(), request))
    }
}
