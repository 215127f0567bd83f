//! Builds the gRPC server that the daemon, the pod process, the keeper and the agent use. `cargo xtask rules` forbids any other.

use tonic::transport::Server;

/// The maximum number of cancelled calls on one connection that the server has not handled yet. Beyond it, h2 takes the client
/// for an attacker and closes the connection, and with it all other calls; its default is 20. Clients cancel calls at any time:
/// kubelet does with the deadline of each probe, and a dropped request of the daemon is passed on to the pod process and to the
/// agent. The clients of all four servers are root on the node or Nacelle's own processes, and each such call takes less than 1
/// KiB.
const MAX_PENDING_RESETS: usize = 16 << 10;

/// Returns a server that survives clients that cancel many calls.
pub fn builder() -> Server {
    Server::builder().http2_max_pending_accept_reset_streams(Some(MAX_PENDING_RESETS))
}
