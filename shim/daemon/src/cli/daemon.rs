//! Connects commands to the daemon of the node.

use super::exit::CommandError;
use hyper_util::rt::TokioIo;
use nacelle_pod::client::connect_unix;
use std::error::Error;
use std::io;
use std::path::Path;
use tonic::transport::{Channel, Endpoint, Uri};

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
    let path = socket.to_owned();
    let connector = tower::service_fn(move |_: Uri| {
        let path = path.clone();
        async move { Ok::<_, io::Error>(TokioIo::new(connect_unix(&path).await?)) }
    });
    // The connector ignores this address: it knows the path of the socket.
    let endpoint = Endpoint::from_static("http://nacelle");
    endpoint.connect_with_connector(connector).await.map_err(|error| {
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
}
