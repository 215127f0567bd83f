//! Serves `GET /metrics` over HTTP/1.1, without TLS and without authentication: the metrics name no pod, container or image.
//!
//! Clients are not trusted: connections, the size of a request's head and the time to send it are bounded.

use super::exporter::Exporter;
use crate::metrics::address::MetricsAddress;
use crate::socket::{OwnedSocket, SocketClaim, SocketError};
use bytes::Bytes;
use http::header::{ALLOW, CONTENT_TYPE, HeaderValue};
use http::{Method, Request, Response, StatusCode};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use nacelle_base::Chain;
use nacelle_base::task::{TaskError, run_blocking};
use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::task::JoinHandle;

/// The only path.
const PATH: &str = "/metrics";
/// The media type of OpenMetrics' text format.
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// The largest number of connections; further ones wait in the listener's queue.
const MAX_CONNECTIONS: usize = 16;
/// The largest head of a request in bytes.
const MAX_HEAD: usize = 8 << 10;
/// The largest number of headers of a request.
const MAX_HEADERS: usize = 64;
/// The time that a client has to send its request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// The time of a connection, which has one request: it ends a client that does not read the response.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(30);
/// The pause after a failed accept, for example without free file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Time to wait for the lock of a daemon that is about to end.
const LOCK_LIMIT: Duration = Duration::from_secs(1);
/// The pause after an address could not be used.
const BIND_PAUSE: Duration = Duration::from_secs(2);

/// Why metrics cannot be served.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MetricsServerError {
    /// The address cannot be listened on.
    #[error(
        "cannot serve metrics on {address}; set metrics.address to an address of this node and a port that no other program uses"
    )]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The cause.
        source: io::Error,
    },
    /// The Unix socket is not available.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// A blocking task panicked or was cancelled.
    #[error(transparent)]
    Task(#[from] TaskError),
}

/// Serves metrics for as long as `end` is not dropped, and removes the path of a Unix socket then. While the address cannot be used,
/// which any program of the node can cause, the daemon works without metrics and tries again. Returns when the first attempt has ended.
pub(crate) async fn serve_metrics(
    address: MetricsAddress,
    exporter: Arc<Exporter>,
    end: oneshot::Receiver<()>,
) -> JoinHandle<()> {
    let mut reported = String::new();
    let mut listener = try_bind(&address, &mut reported).await;
    tokio::spawn(async move {
        let serve = async {
            while listener.is_none() {
                tokio::time::sleep(BIND_PAUSE).await;
                listener = try_bind(&address, &mut reported).await;
            }
            if let Some(listener) = &listener {
                listener.serve(exporter).await;
            }
        };
        tokio::select! {
            () = serve => {}
            _ = end => {}
        }
        if let Some(listener) = listener {
            listener.close();
        }
    })
}

/// Listens on the address, and logs an error that is another one than `reported`.
async fn try_bind(address: &MetricsAddress, reported: &mut String) -> Option<MetricsListener> {
    let error = match MetricsListener::bind(address).await {
        Ok(listener) => return Some(listener),
        Err(error) => Chain(&error).to_string(),
    };
    if *reported != error {
        tracing::error!(error, "metrics are not served; this is tried again");
        *reported = error;
    }
    None
}

/// A listening socket for metrics.
#[derive(Debug)]
pub(crate) enum MetricsListener {
    /// On an IP address.
    Tcp(TcpListener),
    /// On a path, which is removed at the end.
    Unix(UnixListener, OwnedSocket),
}

impl MetricsListener {
    /// Listens on the address.
    async fn bind(address: &MetricsAddress) -> Result<MetricsListener, MetricsServerError> {
        match address {
            MetricsAddress::Tcp(address) => {
                let failed = |source| MetricsServerError::Listen { address: *address, source };
                let listener = TcpListener::bind(address).await.map_err(failed)?;
                let address = listener.local_addr().map_err(failed)?;
                tracing::info!(%address, "serving metrics");
                Ok(MetricsListener::Tcp(listener))
            }
            MetricsAddress::Unix(path) => {
                let claimed = path.clone();
                let claim = move || SocketClaim::acquire("metrics.address", &claimed, LOCK_LIMIT);
                let (listener, owned) = run_blocking("claim the socket for metrics", claim).await??.listen()?;
                tracing::info!(socket = %path.display(), "serving metrics");
                Ok(MetricsListener::Unix(listener, owned))
            }
        }
    }

    /// Serves forever. Dropping the future ends all connections.
    async fn serve(&self, exporter: Arc<Exporter>) {
        let connections = Arc::new(Semaphore::new(MAX_CONNECTIONS));
        let mut clients = tokio::task::JoinSet::new();
        loop {
            while clients.try_join_next().is_some() {}
            // The semaphore is never closed.
            let Ok(permit) = Arc::clone(&connections).acquire_owned().await else { return };
            let exporter = Arc::clone(&exporter);
            let accepted = match self {
                MetricsListener::Tcp(listener) => listener
                    .accept()
                    .await
                    .map(|(connection, _)| clients.spawn(serve_connection(connection, exporter, permit))),
                MetricsListener::Unix(listener, _) => listener
                    .accept()
                    .await
                    .map(|(connection, _)| clients.spawn(serve_connection(connection, exporter, permit))),
            };
            if let Err(error) = accepted {
                tracing::warn!(%error, "cannot accept a client of metrics");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }

    /// Stops listening, and removes the socket's path. Blocks for a few file operations.
    fn close(self) {
        let MetricsListener::Unix(listener, owned) = self else { return };
        drop(listener);
        if let Err(error) = owned.remove() {
            tracing::warn!("cannot remove the socket for metrics: {}", Chain(&error));
        }
    }
}

async fn serve_connection(
    connection: impl AsyncRead + AsyncWrite + Unpin,
    exporter: Arc<Exporter>,
    _permit: OwnedSemaphorePermit,
) {
    let answer = service_fn(|request: Request<Incoming>| answer(request, &exporter));
    let served = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(REQUEST_TIMEOUT)
        .max_buf_size(MAX_HEAD)
        .max_headers(MAX_HEADERS)
        .keep_alive(false)
        .serve_connection(TokioIo::new(connection), answer);
    match tokio::time::timeout(CONNECTION_TIMEOUT, served).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::debug!("a connection of a client of metrics failed: {}", Chain(&error)),
        Err(_elapsed) => tracing::debug!("a connection of a client of metrics was open for too long"),
    }
}

async fn answer(request: Request<Incoming>, exporter: &Arc<Exporter>) -> Result<Response<Full<Bytes>>, Infallible> {
    Ok(match (request.uri().path(), request.method()) {
        (PATH, &Method::GET) => response(StatusCode::OK, OPEN_METRICS, exporter.render().await),
        (PATH, _) => {
            let mut refused = response(StatusCode::METHOD_NOT_ALLOWED, "text/plain", "GET is expected\n".into());
            refused.headers_mut().insert(ALLOW, HeaderValue::from_static("GET"));
            refused
        }
        _ => response(StatusCode::NOT_FOUND, "text/plain", "metrics are at /metrics\n".into()),
    })
}

fn response(status: StatusCode, content_type: &'static str, body: Bytes) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(body));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_address_that_is_in_use_is_named() {
        let any = MetricsAddress::Tcp(SocketAddr::from(([127, 0, 0, 1], 0)));
        let MetricsListener::Tcp(first) = MetricsListener::bind(&any).await.unwrap() else { panic!("it is TCP") };
        let address = first.local_addr().unwrap();
        let error = MetricsListener::bind(&MetricsAddress::Tcp(address)).await.unwrap_err();
        let text = Chain(&error).to_string();
        assert!(text.contains(&address.to_string()) && text.contains("metrics.address"), "{text}");

        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("m.sock");
        std::fs::write(&path, "").unwrap();
        let unix = MetricsAddress::Unix(path.clone());
        let error = MetricsListener::bind(&unix).await.unwrap_err().to_string();
        assert!(error.contains("regular file") && error.contains("set metrics.address"), "{error}");
        std::fs::remove_file(&path).unwrap();
        let listener = MetricsListener::bind(&unix).await.unwrap();
        assert!(path.exists());
        listener.close();
        assert!(!path.exists());
    }
}
