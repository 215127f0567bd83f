//! Connects commands to the daemon of the node. A daemon that does not even answer the pings of HTTP/2 is reported after
//! [`PING_INTERVAL`] and [`PING_TIMEOUT`]: it is stopped, overloaded or still starting. An operation that takes long is not cut, because the daemon
//! answers pings meanwhile.

use super::exit::CommandError;
use hyper_util::rt::TokioIo;
use nacelle_pod::client::connect_unix;
use std::error::Error;
use std::io;
use std::path::Path;
use std::time::Duration;
use tonic::transport::{Channel, Endpoint, Uri};

/// The interval of the pings while a request is in progress.
const PING_INTERVAL: Duration = Duration::from_secs(10);
/// The time that the daemon has to accept a connection, and to answer a ping.
const PING_TIMEOUT: Duration = Duration::from_secs(20);

/// Connects to the daemon; `None` if no process listens on the socket. A socket that this user may not use is an error: a
/// daemon may run behind it.
pub(super) async fn try_connect(socket: &Path) -> Result<Option<Channel>, CommandError> {
    match connect(socket).await {
        Ok(channel) => Ok(Some(channel)),
        Err(CommandError::NoDaemon { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Connects to the daemon.
pub(super) async fn connect(socket: &Path) -> Result<Channel, CommandError> {
    connect_with_pings(socket, PING_INTERVAL, PING_TIMEOUT).await
}

async fn connect_with_pings(socket: &Path, interval: Duration, limit: Duration) -> Result<Channel, CommandError> {
    let path = socket.to_owned();
    let connector = tower::service_fn(move |_: Uri| {
        let path = path.clone();
        async move { Ok::<_, io::Error>(TokioIo::new(connect_unix(&path).await?)) }
    });
    // The connector ignores this address: it knows the path of the socket.
    let endpoint =
        Endpoint::from_static("http://nacelle").http2_keep_alive_interval(interval).keep_alive_timeout(limit);
    // The connector waits while the daemon's queue of connections is full.
    let connected = tokio::time::timeout(limit, endpoint.connect_with_connector(connector));
    connected.await.map_err(|_elapsed| CommandError::NoAnswer)?.map_err(|error| {
        let socket = socket.to_owned();
        let source = io_error(&error);
        match source.kind() {
            io::ErrorKind::PermissionDenied => CommandError::SocketDenied { socket },
            _ => CommandError::NoDaemon { socket, source },
        }
    })
}

/// Returns a copy of the first I/O error among the causes. The transport's own words add nothing to it.
fn io_error(error: &(dyn Error + 'static)) -> io::Error {
    let mut cause = Some(error);
    while let Some(error) = cause {
        if let Some(error) = error.downcast_ref::<io::Error>() {
            return error.raw_os_error().map_or_else(|| error.kind().into(), io::Error::from_raw_os_error);
        }
        cause = error.source();
    }
    io::ErrorKind::Other.into()
}

/// Returns whether a request failed because the daemon answered no ping.
pub(super) fn is_without_answer(status: &tonic::Status) -> bool {
    let mut cause = status.source();
    while let Some(error) = cause {
        if error.downcast_ref::<hyper::Error>().is_some_and(hyper::Error::is_timeout) {
            return true;
        }
        cause = error.source();
    }
    false
}

/// Converts the status of a failed request into an error with its code and message.
pub(super) fn status_error(status: tonic::Status) -> anyhow::Error {
    CommandError::from_status(&status).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_socket_without_a_daemon_is_reported_with_the_reason() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("s");
        let error = connect(&socket).await.unwrap_err();
        let reason = |error: &CommandError| match error {
            CommandError::NoDaemon { source, .. } => Some(source.kind()),
            _ => None,
        };
        assert_eq!(reason(&error), Some(io::ErrorKind::NotFound));
        drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
        let error = connect(&socket).await.unwrap_err();
        assert_eq!(reason(&error), Some(io::ErrorKind::ConnectionRefused));
        assert!(try_connect(&socket).await.unwrap().is_none());
    }

    #[tokio::test]
    async fn a_daemon_that_is_stopped_is_reported() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("s");
        // It accepts no connection, as a process that is stopped.
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        // The limit is that of the connection, too, which is made at once.
        let channel = connect_with_pings(&socket, Duration::from_millis(50), Duration::from_secs(1)).await.unwrap();
        let mut client = nacelle_proto::node::node_client::NodeClient::new(channel);
        let request = nacelle_proto::node::ListInstallationsRequest {};
        let status = tokio::time::timeout(Duration::from_secs(60), client.list_installations(request)).await;
        let error = status_error(status.expect("the request ends").unwrap_err());
        assert!(matches!(error.downcast_ref(), Some(CommandError::NoAnswer)), "{error:?}");
    }
}
