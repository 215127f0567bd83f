//! The HTTPS server: accepts connections, bounds requests, and shuts down. `verdict` decides the responses. Each client has a
//! task; reviews are parsed and evaluated on the blocking pool.

use super::certificate::Certificate;
use super::peers::PeerConnections;
use super::review::{AdmissionResponse, Review, ReviewError};
use super::verdict::Policy;
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::{Body, Incoming};
use hyper::header::{ALLOW, CONTENT_TYPE, HeaderValue};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use nacelle_base::task::{TaskError, run_blocking};
use nacelle_base::{Chain, Classify, FailureKind};
use nacelle_stream::{Tls, TlsError};
use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, SemaphorePermit, watch};
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

/// The largest number of open connections. An API server keeps a few.
const MAX_CONNECTIONS: usize = 128;
/// The largest number of open connections of one address, so that one client leaves room for others.
const MAX_PEER_CONNECTIONS: usize = 32;
/// The largest number of reviews that are evaluated at the same time.
const MAX_REVIEWS: usize = 16;
/// The number of bytes of a body that every connection may have in memory: most reviews are smaller.
const SMALL_BODY: usize = 256 << 10;
/// The largest number of bodies in memory that are larger.
const MAX_LARGE_BODIES: usize = 16;
/// The largest body in bytes, the same limit as the API server's own.
const MAX_BODY: usize = 3 << 20;
/// The number of bytes that are read of a larger body; then the connection is closed.
const MAX_READ: usize = 2 * MAX_BODY;
/// The largest size of all headers of a request in bytes.
const MAX_HEADERS: usize = 64 << 10;
/// Time limit for the TLS handshake.
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(10);
/// Time limit for the headers of the next request, after which an idle connection is closed.
const HEADERS_LIMIT: Duration = Duration::from_secs(60);
/// Time limit for the body. API servers wait for a response for at most 30 seconds.
const BODY_LIMIT: Duration = Duration::from_secs(10);
/// Time for reviews in progress at the shutdown.
const SHUTDOWN_LIMIT: Duration = Duration::from_secs(10);
/// The response to a client that does not use TLS.
const PLAIN_HTTP_RESPONSE: &[u8] =
    b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nContent-Length: 26\r\nConnection: close\r\n\r\n\
                       this server speaks https.\n";

/// The options of the server.
#[derive(Clone, Debug)]
pub struct AdmissionOptions {
    /// The address to listen on; port 0 selects any free port.
    pub listen: SocketAddr,
    /// Certificate, key, and the authority of clients' certificates.
    pub tls: Tls,
    /// The checks of objects.
    pub policy: Policy,
}

/// Why the server cannot run.
#[derive(Debug, thiserror::Error)]
pub enum AdmissionError {
    /// Certificate or key cannot be used.
    #[error("cannot serve TLS to the API server")]
    Tls(#[from] TlsError),
    /// The address is not available.
    #[error("cannot listen for reviews on {address}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The cause.
        source: io::Error,
    },
    /// A blocking task panicked or was cancelled.
    #[error(transparent)]
    Task(#[from] TaskError),
}

impl Classify for AdmissionError {
    fn kind(&self) -> FailureKind {
        match self {
            AdmissionError::Tls(error) => error.kind(),
            AdmissionError::Listen { source, .. } => FailureKind::from(source.kind()),
            AdmissionError::Task(error) => error.kind(),
        }
    }
}

/// A server that listens and does not serve yet.
pub struct AdmissionServer {
    listener: TcpListener,
    address: SocketAddr,
    certificate: Certificate,
    shared: Arc<ServerState>,
    policy: watch::Sender<Arc<Policy>>,
}

/// Replaces the policy of a server.
#[derive(Clone)]
pub struct PolicyControl(watch::Sender<Arc<Policy>>);

impl PolicyControl {
    /// Applies this policy to the reviews that are evaluated from now on.
    pub fn replace(&self, policy: Policy) {
        self.0.send_replace(Arc::new(policy));
    }
}

/// The state that all clients share.
struct ServerState {
    policy: watch::Receiver<Arc<Policy>>,
    /// Only clients with a certificate may send reviews. Probes of kubelet have none.
    needs_certificate: bool,
    reviews: Arc<Semaphore>,
    large_bodies: Semaphore,
    ending: CancellationToken,
}

impl AdmissionServer {
    /// Reads the certificate and listens.
    pub async fn bind(options: AdmissionOptions) -> Result<AdmissionServer, AdmissionError> {
        let AdmissionOptions { listen: address, tls, policy } = options;
        let needs_certificate = tls.client_authority.is_some();
        let certificate = Certificate::load(tls).await?;
        let failed = |source| AdmissionError::Listen { address, source };
        let listener = TcpListener::bind(address).await.map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let (policy, newest) = watch::channel(Arc::new(policy));
        let shared = ServerState {
            policy: newest,
            needs_certificate,
            reviews: Arc::new(Semaphore::new(MAX_REVIEWS)),
            large_bodies: Semaphore::new(MAX_LARGE_BODIES),
            ending: CancellationToken::new(),
        };
        Ok(AdmissionServer { listener, address, certificate, shared: Arc::new(shared), policy })
    }

    /// Returns what replaces the policy while the server runs.
    pub fn policy_control(&self) -> PolicyControl {
        PolicyControl(self.policy.clone())
    }

    /// Returns the address of the listener.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves until `end`; reviews in progress are completed.
    pub async fn serve(self, end: impl Future<Output = ()>) {
        let AdmissionServer { listener, certificate, shared, .. } = self;
        let permits = Arc::new(Semaphore::new(MAX_CONNECTIONS));
        let peers = PeerConnections::default();
        let mut clients = JoinSet::new();
        tokio::pin!(end);
        loop {
            while clients.try_join_next().is_some() {}
            let accept = async {
                let permit = Arc::clone(&permits).acquire_owned().await;
                (permit, listener.accept().await)
            };
            let (permit, accepted) = tokio::select! {
                () = &mut end => break,
                accepted = accept => accepted,
            };
            match accepted {
                Ok((connection, peer)) => {
                    let Some(counted) = peers.open(peer.ip(), MAX_PEER_CONNECTIONS) else {
                        tracing::debug!(%peer, "closing a connection: its address has {MAX_PEER_CONNECTIONS} others");
                        continue;
                    };
                    let (tls, shared) = (certificate.acceptor(), Arc::clone(&shared));
                    clients.spawn(async move {
                        shared.serve_client(connection, tls).await;
                        drop((permit, counted));
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a client");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }
        }
        // New clients are refused, and connected ones are notified.
        drop(listener);
        shared.ending.cancel();
        let all = async { while clients.join_next().await.is_some() {} };
        if tokio::time::timeout(SHUTDOWN_LIMIT, all).await.is_err() {
            tracing::warn!(
                "clients are still connected {SHUTDOWN_LIMIT:?} after the shutdown began; closing their connections"
            );
        }
    }
}

impl ServerState {
    async fn serve_client(self: Arc<Self>, connection: TcpStream, tls: TlsAcceptor) {
        let handshake = async {
            let mut first = [0];
            let read = connection.peek(&mut first).await?;
            // A TLS handshake begins with byte 22, an HTTP request with a letter.
            if read == 1 && first[0].is_ascii_uppercase() {
                reject_plain_http(connection).await?;
                return Ok(None);
            }
            tls.accept(connection).await.map(Some)
        };
        let handshake_result = tokio::select! {
            handshake_result = tokio::time::timeout(HANDSHAKE_LIMIT, handshake) => handshake_result,
            () = self.ending.cancelled() => return,
        };
        let connection = match handshake_result {
            Ok(Ok(Some(connection))) => connection,
            Ok(Ok(None)) => return tracing::debug!("a client uses HTTP instead of HTTPS"),
            Ok(Err(error)) => return tracing::debug!(%error, "the TLS handshake with a client failed"),
            Err(_elapsed) => return tracing::debug!("a client did not complete the TLS handshake in time"),
        };
        // The handshake has verified a certificate if there is one.
        let may_review = !self.needs_certificate || connection.get_ref().1.peer_certificates().is_some();
        let answer = service_fn(|request| {
            let shared = Arc::clone(&self);
            async move { Ok::<_, Infallible>(shared.respond(request, may_review).await) }
        });
        let served = hyper::server::conn::http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(HEADERS_LIMIT)
            .max_buf_size(MAX_HEADERS)
            .serve_connection(TokioIo::new(connection), answer);
        tokio::pin!(served);
        let served = tokio::select! {
            served = served.as_mut() => served,
            () = self.ending.cancelled() => {
                served.as_mut().graceful_shutdown();
                served.await
            }
        };
        if let Err(error) = served {
            tracing::debug!("a connection failed: {}", Chain(&error));
        }
    }

    async fn respond(&self, request: Request<Incoming>, may_review: bool) -> Response<Full<Bytes>> {
        let path = request.uri().path().to_owned();
        let (method, evaluate): (_, fn(&Policy, &Review) -> AdmissionResponse) = match path.as_str() {
            "/validate" => (Method::POST, Policy::validate),
            "/mutate" => (Method::POST, Policy::mutate),
            "/healthz" | "/readyz" => {
                if request.method() != Method::GET && request.method() != Method::HEAD {
                    return method_not_allowed("GET");
                }
                let ending = path == "/readyz" && self.ending.is_cancelled();
                return if ending {
                    text_response(StatusCode::SERVICE_UNAVAILABLE, "ending")
                } else {
                    text_response(StatusCode::OK, "ok")
                };
            }
            _ => {
                return text_response(
                    StatusCode::NOT_FOUND,
                    "no such path; the server has /validate, /mutate, /healthz and /readyz",
                );
            }
        };
        if request.method() != method {
            return method_not_allowed("POST");
        }
        if !may_review {
            tracing::info!(path, "a client without a certificate has sent a review");
            return text_response(StatusCode::FORBIDDEN, "reviews need a client certificate (--client-ca)");
        }
        let error = match self.evaluate_request(request, evaluate, &path).await {
            Ok(answer) => return answer,
            Err(error) => error,
        };
        tracing::info!(path, status = error.status().as_u16(), "{}", Chain(&error));
        text_response(error.status(), Chain(&error).to_string())
    }

    async fn evaluate_request(
        &self,
        request: Request<Incoming>,
        evaluate: fn(&Policy, &Review) -> AdmissionResponse,
        path: &str,
    ) -> Result<Response<Full<Bytes>>, RequestError> {
        let kind = request.headers().get(CONTENT_TYPE).map_or(&b""[..], HeaderValue::as_bytes);
        let kind = kind.split(|b| *b == b';').next().unwrap_or_default().trim_ascii();
        if !kind.eq_ignore_ascii_case(b"application/json") {
            return Err(RequestError::Type { kind: String::from_utf8_lossy(kind).chars().take(100).collect() });
        }
        if request.body().size_hint().lower() > MAX_READ as u64 {
            return Err(RequestError::TooLarge);
        }
        let begun = Instant::now();
        // The body first: a client that sends it slowly must not hold what others need.
        let (body, large) = tokio::time::timeout(BODY_LIMIT, self.read_body(request.into_body()))
            .await
            .unwrap_or(Err(RequestError::BodyTimeout))?;
        // The wait for a permit is limited like the wait for a body.
        let permit = tokio::time::timeout(BODY_LIMIT, Arc::clone(&self.reviews).acquire_owned()).await;
        let Ok(Ok(permit)) = permit else { return Err(RequestError::Busy) };
        let (policy, path) = (Arc::clone(&self.policy.borrow()), path.to_owned());
        let evaluate_request = run_blocking("evaluate an admission review", move || {
            let review = Review::read(&body)?;
            drop(body);
            let answer = evaluate(&policy, &review);
            log(&path, &review, &answer, begun.elapsed());
            drop(permit);
            Ok(review.encode_response(&answer))
        });
        let text = evaluate_request.await?;
        drop(large);
        let mut response = Response::new(Full::new(Bytes::from(text.map_err(RequestError::Review)?)));
        response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        Ok(response)
    }

    /// Reads a request's body; beyond [`SMALL_BODY`] with a permit, which is returned with it. The rest of a body that is too large is
    /// read up to [`MAX_READ`] and discarded: with unread bytes in the socket the response may be lost.
    async fn read_body(&self, mut body: Incoming) -> Result<(Vec<u8>, Option<SemaphorePermit<'_>>), RequestError> {
        let (mut read, mut length, mut large) = (Vec::new(), 0, None);
        while length <= MAX_READ
            && let Some(frame) = body.frame().await
        {
            let Ok(data) = frame.map_err(|source| RequestError::BodyBroken { source })?.into_data() else { continue };
            length += data.len();
            if length > MAX_BODY {
                (read, large) = (Vec::new(), None);
                continue;
            }
            if length > SMALL_BODY && large.is_none() {
                large = self.large_bodies.acquire().await.ok();
            }
            read.extend_from_slice(&data);
        }
        if length > MAX_BODY { Err(RequestError::TooLarge) } else { Ok((read, large)) }
    }
}

/// Logs one line for each review. Untrusted texts are quoted.
fn log(path: &str, review: &Review, answer: &AdmissionResponse, took: Duration) {
    let (verdict, details) = match answer {
        AdmissionResponse::Allowed { warnings } => ("allowed", warnings.join("; ")),
        AdmissionResponse::Patched(_) => ("patched", String::new()),
        AdmissionResponse::Denied(causes) => ("denied", causes.brief(1000)),
    };
    tracing::info!(
        path,
        uid = ?review.uid,
        operation = ?review.operation,
        kind = ?review.kind,
        namespace = ?review.namespace,
        name = ?review.object_name(),
        verdict,
        details = ?details,
        microseconds = took.as_micros(),
        "review"
    );
}

/// Why a request gets no review as its response.
#[derive(Debug, thiserror::Error)]
enum RequestError {
    #[error("the content type is {kind:?}; application/json is expected")]
    Type { kind: String },
    #[error("the body has more than {MAX_BODY} bytes")]
    TooLarge,
    #[error("the body did not arrive within {BODY_LIMIT:?}")]
    BodyTimeout,
    #[error("the connection ended within the body")]
    BodyBroken { source: hyper::Error },
    #[error(transparent)]
    Review(ReviewError),
    #[error("too many reviews at once; try again")]
    Busy,
    #[error(transparent)]
    Task(#[from] TaskError),
}

impl RequestError {
    fn status(&self) -> StatusCode {
        match self {
            RequestError::Type { .. } => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            RequestError::TooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            RequestError::BodyTimeout => StatusCode::REQUEST_TIMEOUT,
            RequestError::BodyBroken { .. } | RequestError::Review(_) => StatusCode::BAD_REQUEST,
            RequestError::Busy => StatusCode::SERVICE_UNAVAILABLE,
            RequestError::Task(_) => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }
}

fn text_response(status: StatusCode, text: impl Into<String>) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(text.into() + "\n")));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    response
}

fn method_not_allowed(method: &'static str) -> Response<Full<Bytes>> {
    let mut response = text_response(StatusCode::METHOD_NOT_ALLOWED, format!("{method} is expected"));
    response.headers_mut().insert(ALLOW, HeaderValue::from_static(method));
    response
}

/// Sends [`PLAIN_HTTP_RESPONSE`] to a client that does not use TLS, and reads the rest of its request: with unread bytes in the socket the
/// response may be lost.
async fn reject_plain_http(mut connection: TcpStream) -> io::Result<()> {
    const MAX_READ: u64 = 64 << 10;
    connection.write_all(PLAIN_HTTP_RESPONSE).await?;
    connection.shutdown().await?;
    tokio::io::copy(&mut connection.take(MAX_READ), &mut tokio::io::sink()).await?;
    Ok(())
}
