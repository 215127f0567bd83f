//! Implements the HTTP server behind the URLs that CRI returns: it checks the token, upgrades to SPDY or WebSocket, and runs one
//! task per client. A [`StreamingServer`] is cheap to clone.

use crate::backend::{Attach, Exec, StreamBackend};
use crate::command::{self, CommandSession, ProtocolVersion};
use crate::forward;
use crate::pending::{PendingConnection, PendingConnections};
use crate::sessions::{SessionCount, SessionCounters, SessionKind};
use crate::spdy::Connection;
use crate::tls::{Tls, TlsError};
use crate::token::{Tokens, TooManyTokens};
use crate::websocket::{self, Coding, Socket};
use bytes::Bytes;
use http::header::{
    CONNECTION, HeaderName, HeaderValue, SEC_WEBSOCKET_ACCEPT, SEC_WEBSOCKET_KEY, SEC_WEBSOCKET_PROTOCOL, UPGRADE,
};
use http::{HeaderMap, Method, Request, Response, StatusCode};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use nacelle_base::{Chain, Classify, FailureKind};
use nix::sys::socket::{setsockopt, sockopt};
use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_rustls::TlsAcceptor;
use tokio_tungstenite::tungstenite::handshake::derive_accept_key;

/// The maximum number of sessions: connections whose token was accepted.
const MAX_SESSIONS: usize = 1024;
/// The maximum number of connections that have not sent their request.
const MAX_PENDING: usize = 256;
/// The time that a client has to send its request, and before that for the TLS handshake.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// The seconds without a byte after which TCP probes the client.
const KEEPALIVE_SECONDS: u32 = 30;
/// The protocol of an upgrade to SPDY.
const SPDY: &str = "SPDY/3.1";
/// The header with the protocol versions of the client, and with the chosen one in the answer.
const PROTOCOL: &str = "x-stream-protocol-version";
/// The answer to a request without a valid token.
const NO_SUCH_STREAM: &str = "no such stream: each URL is valid once, for a minute";
/// The header of a failed negotiation with the protocols that are accepted.
const ACCEPTED_PROTOCOLS: &str = "x-accepted-stream-protocol-versions";

/// The address and the timeouts of the server.
#[derive(Clone, Debug)]
pub struct StreamingConfig {
    /// The address to listen on; port 0 selects a free one.
    pub address: SocketAddr,
    /// Streams without a byte for this time are closed.
    pub idle: Duration,
    /// The certificate for TLS; `None` for plain HTTP.
    pub tls: Option<Tls>,
}

/// Reasons that the server cannot start.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The certificate or key is unusable.
    #[error("cannot set up TLS for streaming clients")]
    Tls(#[from] TlsError),
    /// The server cannot listen on the address.
    #[error("cannot listen for streaming clients on {address}")]
    Listen {
        /// The configured address.
        address: SocketAddr,
        /// The reason.
        source: io::Error,
    },
}

impl Classify for ServerError {
    fn kind(&self) -> FailureKind {
        match self {
            ServerError::Tls(error) => error.kind(),
            ServerError::Listen { source, .. } => FailureKind::from(source.kind()),
        }
    }
}

/// The request that a token stands for.
enum StreamRequest {
    CommandSession(CommandSession),
    /// Ports of this pod: those that the request names.
    Forward(String, Vec<u16>),
}

impl StreamRequest {
    /// Returns the first path segment of the URL.
    fn directory(&self) -> &'static str {
        match self {
            StreamRequest::CommandSession(CommandSession::Exec(_)) => "exec",
            StreamRequest::CommandSession(CommandSession::Attach(_)) => "attach",
            StreamRequest::Forward(..) => "portforward",
        }
    }
}

struct Shared {
    tokens: Tokens<StreamRequest>,
    base: String,
    idle: Duration,
    slots: Arc<Semaphore>,
    sessions: SessionCounters,
}

/// The handle of the streaming server for callers that create URLs.
#[derive(Clone)]
pub struct StreamingServer(Arc<Shared>);

/// The streaming server before it serves.
pub struct Listener {
    listener: TcpListener,
    tls: Option<TlsAcceptor>,
    server: StreamingServer,
}

impl StreamingServer {
    /// Binds the address.
    pub async fn bind(config: &StreamingConfig) -> Result<(StreamingServer, Listener), ServerError> {
        let failed = |source| ServerError::Listen { address: config.address, source };
        let listener = TcpListener::bind(config.address).await.map_err(failed)?;
        let tls = config.tls.as_ref().map(|tls| tls.read()?.acceptor()).transpose()?;
        let scheme = if tls.is_some() { "https" } else { "http" };
        let base = format!("{scheme}://{}", listener.local_addr().map_err(failed)?);
        let slots = Arc::new(Semaphore::new(MAX_SESSIONS));
        let (tokens, sessions) = (Tokens::new(), SessionCounters::default());
        let server = StreamingServer(Arc::new(Shared { tokens, base, idle: config.idle, slots, sessions }));
        Ok((server.clone(), Listener { listener, tls, server }))
    }

    /// Returns the number of sessions of each kind. Does not block.
    pub fn session_counts(&self) -> [(SessionKind, SessionCount); 3] {
        SessionKind::ALL.map(|kind| (kind, self.0.sessions.count(kind)))
    }

    /// Returns a URL that runs this command, once, within the life of a token.
    pub fn exec(&self, exec: Exec) -> Result<String, TooManyTokens> {
        self.issue_url(StreamRequest::CommandSession(CommandSession::Exec(exec)))
    }

    /// Returns a URL that attaches to this container, once, within the life of a token.
    pub fn attach(&self, attach: Attach) -> Result<String, TooManyTokens> {
        self.issue_url(StreamRequest::CommandSession(CommandSession::Attach(attach)))
    }

    /// Returns a URL that forwards ports of this pod, for one client, within the life of a token. `ports` are for clients that do
    /// not name the port of each stream.
    pub fn forward(&self, pod: String, ports: Vec<u16>) -> Result<String, TooManyTokens> {
        self.issue_url(StreamRequest::Forward(pod, ports))
    }

    fn issue_url(&self, request: StreamRequest) -> Result<String, TooManyTokens> {
        let directory = request.directory();
        Ok(format!("{}/{directory}/{}", self.0.base, self.0.tokens.issue(request, Instant::now())?))
    }
}

impl Listener {
    /// Serves forever. Dropping the future ends all streams that it serves.
    pub async fn serve(self, backend: Arc<impl StreamBackend>) {
        let pending_connections = PendingConnections::new(MAX_PENDING);
        let mut clients = tokio::task::JoinSet::new();
        loop {
            while clients.try_join_next().is_some() {}
            match self.listener.accept().await {
                Ok((connection, _)) => {
                    let (server, backend, tls) = (self.server.clone(), Arc::clone(&backend), self.tls.clone());
                    let (pending, eviction) = pending_connections.add();
                    clients.spawn(async move {
                        let accepted = tokio::select! {
                            accepted = server.accept_request(connection, tls, &pending) => accepted,
                            () = eviction.wait() => {
                                tracing::debug!("closed a connection without a request: there are too many");
                                None
                            }
                        };
                        if let Some(accepted) = accepted {
                            server.serve_stream(accepted, backend).await;
                        }
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a streaming client");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }
        }
    }
}

impl StreamingServer {
    /// Reads the only request of a connection and answers it. Returns it if a stream follows.
    async fn accept_request(
        &self,
        connection: TcpStream,
        tls: Option<TlsAcceptor>,
        pending: &PendingConnection,
    ) -> Option<Accepted> {
        if let Err(error) = set_socket_options(&connection) {
            tracing::debug!(%error, "cannot set the socket options of a streaming client");
        }
        let Some(tls) = tls else { return self.accept_http_request(connection, pending).await };
        match tokio::time::timeout(REQUEST_TIMEOUT, tls.accept(connection)).await {
            Ok(Ok(connection)) => return self.accept_http_request(connection, pending).await,
            Ok(Err(error)) => tracing::debug!(%error, "the TLS handshake with a streaming client failed"),
            Err(_late) => tracing::debug!("a streaming client did not complete the TLS handshake in time"),
        }
        None
    }

    async fn accept_http_request(
        &self,
        connection: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        pending: &PendingConnection,
    ) -> Option<Accepted> {
        let (begin, accepted) = tokio::sync::oneshot::channel();
        let begin = std::sync::Mutex::new(Some(begin));
        let answer = service_fn(|request| {
            let (answer, accepted) = self.handle_request(request, pending);
            if let Some(accepted) = accepted
                && let Some(begin) = begin.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take()
            {
                // The receiver lives as long as this function.
                let _ = begin.send(accepted);
            }
            std::future::ready(Ok::<_, Infallible>(answer))
        });
        let served = hyper::server::conn::http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(REQUEST_TIMEOUT)
            .serve_connection(TokioIo::new(connection), answer)
            .with_upgrades()
            .await;
        if let Err(error) = served {
            tracing::debug!("an HTTP connection of a streaming client failed: {}", Chain(&error));
        }
        drop(begin);
        accepted.await.ok()
    }

    async fn serve_stream(&self, accepted: Accepted, backend: Arc<impl StreamBackend>) {
        let Accepted { job, upgrade, slot: _slot } = accepted;
        let _open = self.0.sessions.begin(job.kind());
        let upgraded = match upgrade.await {
            Ok(upgraded) => upgraded,
            Err(error) => return tracing::debug!("the upgrade of a streaming client failed: {}", Chain(&error)),
        };
        let io = TokioIo::new(upgraded);
        match job {
            StreamHandler::Spdy(session, dialect) => {
                let mut connection = Connection::serve(io);
                connection.life.close_when_idle(self.0.idle);
                let Some(channels) = command::accept_streams(&mut connection, &session, dialect).await else {
                    return tracing::info!(?session, "a streaming client did not open its streams in time");
                };
                command::serve_session(&*backend, &session, channels, &connection.life, dialect).await;
                connection.end().await;
            }
            StreamHandler::WebSocket(session, dialect, coding) => {
                let (socket, ends) = Socket::serve(io, coding).await;
                socket.life.close_when_idle(self.0.idle);
                let channels = command::select_channels(ends, &session);
                command::serve_session(&*backend, &session, channels, &socket.life, dialect).await;
                socket.end().await;
            }
            StreamHandler::WebSocketPorts(pod, ports, coding) => {
                let (socket, ends) = Socket::serve_ports(io, coding, &ports).await;
                socket.life.close_when_idle(self.0.idle);
                forward::serve_ports_over_channels(backend, &pod, ends, &socket.life).await;
            }
            StreamHandler::Forward(pod) => self.forward_ports(backend, &pod, Connection::serve(io)).await,
            StreamHandler::TunneledForward(pod) => {
                let connection = Connection::serve(websocket::tunnel(io).await);
                self.forward_ports(backend, &pod, connection).await;
            }
        }
    }

    async fn forward_ports(&self, backend: Arc<impl StreamBackend>, pod: &str, mut connection: Connection) {
        connection.life.close_when_idle(self.0.idle);
        forward::serve_spdy(backend, pod, &mut connection).await;
    }

    fn handle_request(
        &self,
        mut request: Request<Incoming>,
        pending: &PendingConnection,
    ) -> (Response<Full<Bytes>>, Option<Accepted>) {
        if !pending.leave() {
            return (text_response(StatusCode::SERVICE_UNAVAILABLE, "too many connections"), None);
        }
        let Ok(slot) = Arc::clone(&self.0.slots).try_acquire_owned() else {
            // The token stays valid for another try.
            return (text_response(StatusCode::SERVICE_UNAVAILABLE, "too many sessions are open"), None);
        };
        let (directory, token) = request.uri().path().trim_start_matches('/').split_once('/').unwrap_or_default();
        let now = Instant::now();
        if !self.0.tokens.is_valid(token, now) {
            return (text_response(StatusCode::NOT_FOUND, NO_SUCH_STREAM), None);
        }
        // What is no upgrade leaves the token valid.
        if request.method() != Method::POST && request.method() != Method::GET {
            return (text_response(StatusCode::METHOD_NOT_ALLOWED, "GET or POST is expected"), None);
        }
        let upgrade = request.headers().get(UPGRADE).map_or(&b""[..], |value| value.as_bytes());
        let spdy = upgrade.eq_ignore_ascii_case(SPDY.as_bytes());
        let key = request.headers().get(SEC_WEBSOCKET_KEY).map(|key| derive_accept_key(key.as_bytes()));
        let accept = key.filter(|_| upgrade.eq_ignore_ascii_case(b"websocket"));
        if !spdy && accept.is_none() {
            return (text_response(StatusCode::BAD_REQUEST, "an upgrade to SPDY/3.1 or WebSocket is expected"), None);
        }
        let asked = self.0.tokens.take(token, now).filter(|ask| ask.directory() == directory);
        let Some(ask) = asked else {
            return (text_response(StatusCode::NOT_FOUND, NO_SUCH_STREAM), None);
        };
        let names = if spdy { HeaderName::from_static(PROTOCOL) } else { SEC_WEBSOCKET_PROTOCOL };
        let offered: Vec<&str> = list_protocols(request.headers(), &names).collect();
        let chosen = if spdy { choose_spdy_handler(ask, &offered) } else { choose_websocket_handler(ask, &offered) };
        let (job, protocol) = match chosen {
            Ok(chosen) => chosen,
            Err(accepted) => return (refuse_protocols(&offered, &accepted), None),
        };
        let mut answer = text_response(StatusCode::SWITCHING_PROTOCOLS, "");
        let headers = answer.headers_mut();
        headers.insert(CONNECTION, HeaderValue::from_static("Upgrade"));
        headers.insert(UPGRADE, HeaderValue::from_static(if spdy { SPDY } else { "websocket" }));
        if let Some(accept) = accept.filter(|_| !spdy).and_then(|accept| HeaderValue::try_from(accept).ok()) {
            headers.insert(SEC_WEBSOCKET_ACCEPT, accept);
        }
        if !offered.is_empty() {
            headers.insert(names, HeaderValue::from_static(protocol));
        }
        let upgrade = hyper::upgrade::on(&mut request);
        (answer, Some(Accepted { job, upgrade, slot }))
    }
}

/// An accepted request, and the upgrade of its connection.
struct Accepted {
    job: StreamHandler,
    upgrade: hyper::upgrade::OnUpgrade,
    /// The permit that counts this session.
    slot: OwnedSemaphorePermit,
}

/// The protocol of a connection after its upgrade, with its request.
enum StreamHandler {
    Spdy(CommandSession, ProtocolVersion),
    /// Exec or attach over a WebSocket.
    WebSocket(CommandSession, ProtocolVersion, Coding),
    Forward(String),
    /// Port forwarding by SPDY inside a WebSocket, for the pod with this id.
    TunneledForward(String),
    /// Ports as channels of a WebSocket.
    WebSocketPorts(String, Vec<u16>, Coding),
}

impl StreamHandler {
    fn kind(&self) -> SessionKind {
        match self {
            StreamHandler::Spdy(session, _) | StreamHandler::WebSocket(session, ..) => match session {
                CommandSession::Exec(_) => SessionKind::Exec,
                CommandSession::Attach(_) => SessionKind::Attach,
            },
            StreamHandler::Forward(_) | StreamHandler::TunneledForward(_) | StreamHandler::WebSocketPorts(..) => {
                SessionKind::PortForward
            }
        }
    }
}

/// Returns the handler, and the name of the chosen protocol; or, if the client offers none of them, the accepted protocols.
fn choose_spdy_handler(
    request: StreamRequest,
    offered: &[&str],
) -> Result<(StreamHandler, &'static str), Vec<&'static str>> {
    match request {
        StreamRequest::CommandSession(session) => {
            let chosen = match offered {
                [] => Some(ProtocolVersion::oldest()),
                offered => ProtocolVersion::choose(offered.iter().copied()),
            };
            let dialect = chosen.ok_or_else(|| ProtocolVersion::spdy_names().collect::<Vec<_>>())?;
            Ok((StreamHandler::Spdy(session, dialect), dialect.name))
        }
        StreamRequest::Forward(..) if !offered.is_empty() && !offered.contains(&forward::PROTOCOL) => {
            Err(vec![forward::PROTOCOL])
        }
        StreamRequest::Forward(pod, _) => Ok((StreamHandler::Forward(pod), forward::PROTOCOL)),
    }
}

/// Like `choose_spdy_handler`, over a WebSocket.
fn choose_websocket_handler(
    request: StreamRequest,
    offered: &[&str],
) -> Result<(StreamHandler, &'static str), Vec<&'static str>> {
    match request {
        StreamRequest::CommandSession(session) => {
            let chosen = ProtocolVersion::choose_websocket(offered);
            let (dialect, coding) = chosen.ok_or_else(|| ProtocolVersion::websocket_names().collect::<Vec<_>>())?;
            Ok((StreamHandler::WebSocket(session, dialect, coding), dialect.name))
        }
        StreamRequest::Forward(pod, _) if offered.contains(&forward::TUNNEL_PROTOCOL) => {
            Ok((StreamHandler::TunneledForward(pod), forward::TUNNEL_PROTOCOL))
        }
        StreamRequest::Forward(pod, ports) => {
            let chosen = forward::choose_channels(offered, &ports);
            let (name, coding) = chosen.ok_or_else(|| forward::websocket_names(&ports).collect::<Vec<_>>())?;
            Ok((StreamHandler::WebSocketPorts(pod, ports, coding), name))
        }
    }
}

/// Names the protocols of both sides, in the words of Kubernetes' servers (k8s.io/apimachinery/pkg/util/httpstream, `Handshake`).
fn refuse_protocols(offered: &[&str], accepted: &[&'static str]) -> Response<Full<Bytes>> {
    let (client, server) = (offered.join(" "), accepted.join(" "));
    let why = "unable to upgrade: unable to negotiate protocol";
    let mut answer =
        text_response(StatusCode::FORBIDDEN, format!("{why}: client supports [{client}], server accepts [{server}]"));
    for name in accepted {
        answer.headers_mut().append(ACCEPTED_PROTOCOLS, HeaderValue::from_static(name));
    }
    answer
}

fn list_protocols<'a>(headers: &'a HeaderMap, name: &HeaderName) -> impl Iterator<Item = &'a str> {
    let texts = headers.get_all(name).into_iter().filter_map(|value| value.to_str().ok());
    texts.flat_map(|text| text.split(',')).map(str::trim).filter(|name| !name.is_empty())
}

fn text_response(status: StatusCode, why: impl Into<Bytes>) -> Response<Full<Bytes>> {
    let mut answer = Response::new(Full::new(why.into()));
    *answer.status_mut() = status;
    // A connection has one request. `keep_alive(false)` of hyper's builder would add this to an upgrade as well.
    answer.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    answer
}

/// Sends small pieces at once (TCP_NODELAY), and detects a client that has vanished (keepalive).
fn set_socket_options(connection: &TcpStream) -> io::Result<()> {
    connection.set_nodelay(true)?;
    setsockopt(connection, sockopt::KeepAlive, &true)?;
    setsockopt(connection, sockopt::TcpKeepIdle, &KEEPALIVE_SECONDS)?;
    setsockopt(connection, sockopt::TcpKeepInterval, &KEEPALIVE_SECONDS)?;
    Ok(())
}
