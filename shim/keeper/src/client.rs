//! Waits for the client of a verb whose output is a stream.

use std::time::Duration;
use tokio::net::UnixStream;
use tokio::sync::oneshot;

/// The time that the client has to open the stream.
pub const OPEN_TIMEOUT: Duration = Duration::from_secs(30);

/// Returns the client's stream; `None` if the client has not opened it within [`OPEN_TIMEOUT`] or is gone.
pub async fn wait_for_client(reader: oneshot::Receiver<UnixStream>) -> Option<UnixStream> {
    tokio::time::timeout(OPEN_TIMEOUT, reader).await.ok()?.ok()
}
