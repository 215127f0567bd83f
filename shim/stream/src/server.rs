//! Implements the HTTP server behind the URLs that CRI returns: it checks the token, upgrades to SPDY or WebSocket, and runs one
//! task per client. A [`Server`] is cheap to clone.

use crate::command::{self, Dialect, Session};
use crate::forward;
use crate::guests::{Attach, Exec, Guests};
use crate::spdy::Connection;
use crate::tls::{Tls, TlsError};
use crate::token::{Tokens, TooMany};
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
use nacelle_base::{Chain, Classify, Kind};
use nix::sys::socket::{setsockopt, sockopt};
use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_rustls::TlsAcceptor;
use tokio_tungstenite::tungstenite::handshake::derive_accept_key;

/// The maximum number of connections.
const CONNECTIONS: usize = 1024;
/// The time that a client has to send its request.
const REQUEST: Duration = Duration::from_secs(30);
/// The seconds without a byte after which TCP probes the client.
const KEEPALIVE: u32 = 30;
/// The protocol of an upgrade to SPDY.
const SPDY: &str = "SPDY/3.1";
/// The header with the protocol versions of the client, and with the chosen one in the answer.
const PROTOCOL: &str = "x-stream-protocol-version";

/// The address and the timeouts of the server.
#[derive(Clone, Debug)]
pub struct Config {
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
    #[error("cannot speak TLS to streaming clients")]
    Tls(#[from] TlsError),
    /// The server cannot listen on the address.
    #[error("cannot listen for streams on {address}")]
    Listen {
        /// The configured address.
        address: SocketAddr,
        /// The reason.
        source: io::Error,
    },
}

impl Classify for ServerError {
    fn kind(&self) -> Kind {
        match self {
            ServerError::Tls(error) => error.kind(),
            ServerError::Listen { source, .. } => Kind::from(source.kind()),
        }
    }
}

/// The request that a token stands for.
enum Ask {
    Session(Session),
    /// Ports of this pod: those that the request names.
    Forward(String, Vec<u16>),
}

impl Ask {
    /// Returns the first path segment of the URL.
    fn directory(&self) -> &'static str {
        match self {
            Ask::Session(Session::Exec(_)) => "exec",
            Ask::Session(Session::Attach(_)) => "attach",
            Ask::Forward(..) => "portforward",
        }
    }
}

struct Shared {
    tokens: Tokens<Ask>,
    base: String,
    idle: Duration,
}

/// The handle of the streaming server for callers that create URLs.
#[derive(Clone)]
pub struct Server(Arc<Shared>);

/// The streaming server before it serves.
pub struct Listener {
    listener: TcpListener,
    tls: Option<TlsAcceptor>,
    server: Server,
}

impl Server {
    /// Binds the address.
    pub async fn bind(config: &Config) -> Result<(Server, Listener), ServerError> {
        let failed = |source| ServerError::Listen { address: config.address, source };
        let listener = TcpListener::bind(config.address).await.map_err(failed)?;
        let tls = config.tls.as_ref().map(|tls| tls.read()?.acceptor()).transpose()?;
        let scheme = if tls.is_some() { "https" } else { "http" };
        let base = format!("{scheme}://{}", listener.local_addr().map_err(failed)?);
        let server = Server(Arc::new(Shared { tokens: Tokens::new(), base, idle: config.idle }));
        Ok((server.clone(), Listener { listener, tls, server }))
    }

    /// Returns a URL that runs this command, once, within the life of a token.
    pub fn exec(&self, exec: Exec) -> Result<String, TooMany> {
        self.url(Ask::Session(Session::Exec(exec)))
    }

    /// Returns a URL that attaches to this container, once, within the life of a token.
    pub fn attach(&self, attach: Attach) -> Result<String, TooMany> {
        self.url(Ask::Session(Session::Attach(attach)))
    }

    /// Returns a URL that forwards ports of this pod, for one client, within the life of a token. `ports` are for clients that do
    /// not name the port of each stream.
    pub fn forward(&self, pod: String, ports: Vec<u16>) -> Result<String, TooMany> {
        self.url(Ask::Forward(pod, ports))
    }

    fn url(&self, ask: Ask) -> Result<String, TooMany> {
        let directory = ask.directory();
        Ok(format!("{}/{directory}/{}", self.0.base, self.0.tokens.give(ask, Instant::now())?))
    }
}

impl Listener {
    /// Serves forever. Dropping the future ends all streams that it serves.
    pub async fn serve(self, guests: Arc<impl Guests>) {
        let places = Arc::new(Semaphore::new(CONNECTIONS));
        let mut clients = tokio::task::JoinSet::new();
        loop {
            while clients.try_join_next().is_some() {}
            let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
            match self.listener.accept().await {
                Ok((connection, _)) => {
                    let (server, guests, tls) = (self.server.clone(), Arc::clone(&guests), self.tls.clone());
                    clients.spawn(async move {
                        server.connected(connection, tls, guests).await;
                        drop(place);
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

impl Server {
    async fn connected(self, connection: TcpStream, tls: Option<TlsAcceptor>, guests: Arc<impl Guests>) {
        if let Err(error) = prepare(&connection) {
            tracing::debug!(%error, "a streaming client's connection stays as it is");
        }
        let Some(tls) = tls else { return self.client(connection, guests).await };
        match tokio::time::timeout(REQUEST, tls.accept(connection)).await {
            Ok(Ok(connection)) => self.client(connection, guests).await,
            Ok(Err(error)) => tracing::debug!(%error, "a streaming client that speaks no TLS"),
            Err(_late) => tracing::debug!("a streaming client that says nothing"),
        }
    }

    async fn client(self, connection: impl AsyncRead + AsyncWrite + Unpin + Send + 'static, guests: Arc<impl Guests>) {
        // The work after the upgrade is done here, so that it ends with this task.
        let (begin, accepted) = tokio::sync::oneshot::channel();
        let begin = std::sync::Mutex::new(Some(begin));
        let answer = service_fn(|request| {
            let (answer, accepted) = self.answer(request);
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
            .header_read_timeout(REQUEST)
            .serve_connection(TokioIo::new(connection), answer)
            .with_upgrades()
            .await;
        if let Err(error) = served {
            tracing::debug!("a streaming client: {}", Chain(&error));
        }
        drop(begin);
        let Ok(Accepted { job, upgrade }) = accepted.await else { return };
        let upgraded = match upgrade.await {
            Ok(upgraded) => upgraded,
            Err(error) => return tracing::debug!("a streaming client: {}", Chain(&error)),
        };
        let io = TokioIo::new(upgraded);
        match job {
            Job::Spdy(session, dialect) => {
                let mut connection = Connection::serve(io);
                connection.life.watch(self.0.idle);
                let Some(channels) = command::gather(&mut connection, &session, dialect).await else {
                    return tracing::info!(?session, "a client did not open its streams");
                };
                command::run(&*guests, &session, channels, &connection.life, dialect).await;
                connection.end().await;
            }
            Job::Web(session, dialect, coding) => {
                let (socket, ends) = Socket::serve(io, coding).await;
                socket.life.watch(self.0.idle);
                let channels = command::channels(ends, &session);
                command::run(&*guests, &session, channels, &socket.life, dialect).await;
                socket.end().await;
            }
            Job::WebPorts(pod, ports, coding) => {
                let (socket, ends) = Socket::serve_ports(io, coding, &ports).await;
                socket.life.watch(self.0.idle);
                forward::run_ports(guests, &pod, ends, &socket.life).await;
            }
            Job::Forward(pod) => self.forward_ports(guests, &pod, Connection::serve(io)).await,
            Job::WebForward(pod) => {
                let connection = Connection::serve(websocket::tunnel(io).await);
                self.forward_ports(guests, &pod, connection).await;
            }
        }
    }

    async fn forward_ports(&self, guests: Arc<impl Guests>, pod: &str, mut connection: Connection) {
        connection.life.watch(self.0.idle);
        forward::run(guests, pod, &mut connection).await;
    }

    fn answer(&self, mut request: Request<Incoming>) -> (Response<Full<Bytes>>, Option<Accepted>) {
        let (directory, token) = request.uri().path().trim_start_matches('/').split_once('/').unwrap_or_default();
        let asked = self.0.tokens.take(token, Instant::now()).filter(|ask| ask.directory() == directory);
        let Some(ask) = asked else {
            return (say(StatusCode::NOT_FOUND, "no such stream: each URL is good once, for a minute"), None);
        };
        if request.method() != Method::POST && request.method() != Method::GET {
            return (say(StatusCode::METHOD_NOT_ALLOWED, "GET or POST is expected"), None);
        }
        let upgrade = request.headers().get(UPGRADE).map_or(&b""[..], |value| value.as_bytes());
        let spdy = upgrade.eq_ignore_ascii_case(SPDY.as_bytes());
        let key = request.headers().get(SEC_WEBSOCKET_KEY).map(|key| derive_accept_key(key.as_bytes()));
        let accept = key.filter(|_| upgrade.eq_ignore_ascii_case(b"websocket"));
        if !spdy && accept.is_none() {
            return (say(StatusCode::BAD_REQUEST, "an upgrade to SPDY/3.1 or WebSocket is expected"), None);
        }
        let names = if spdy { HeaderName::from_static(PROTOCOL) } else { SEC_WEBSOCKET_PROTOCOL };
        let offered: Vec<&str> = protocols(request.headers(), &names).collect();
        let Some((job, protocol)) = (if spdy { job(ask, &offered) } else { web_job(ask, &offered) }) else {
            return (say(StatusCode::FORBIDDEN, "none of the client's protocols is spoken here"), None);
        };
        let mut answer = say(StatusCode::SWITCHING_PROTOCOLS, "");
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
        (answer, Some(Accepted { job, upgrade }))
    }
}

/// The work after an accepted request.
struct Accepted {
    job: Job,
    upgrade: hyper::upgrade::OnUpgrade,
}

enum Job {
    Spdy(Session, Dialect),
    /// Exec or attach over a WebSocket.
    Web(Session, Dialect, Coding),
    Forward(String),
    WebForward(String),
    /// Ports as channels of a WebSocket.
    WebPorts(String, Vec<u16>, Coding),
}

/// Returns the work, and the name of the chosen protocol; `None` if the client offers no supported one.
fn job(ask: Ask, offered: &[&str]) -> Option<(Job, &'static str)> {
    match ask {
        Ask::Session(session) => {
            let chosen = Dialect::choose(offered.iter().copied());
            let dialect = if offered.is_empty() { Dialect::oldest() } else { chosen? };
            Some((Job::Spdy(session, dialect), dialect.name))
        }
        Ask::Forward(..) if !offered.is_empty() && !offered.contains(&forward::PROTOCOL) => None,
        Ask::Forward(pod, _) => Some((Job::Forward(pod), forward::PROTOCOL)),
    }
}

/// Like `job`, over a WebSocket.
fn web_job(ask: Ask, offered: &[&str]) -> Option<(Job, &'static str)> {
    match ask {
        Ask::Session(session) => {
            let (dialect, coding) = Dialect::choose_web(offered)?;
            Some((Job::Web(session, dialect, coding), dialect.name))
        }
        Ask::Forward(pod, _) if offered.contains(&forward::TUNNELLED) => {
            Some((Job::WebForward(pod), forward::TUNNELLED))
        }
        Ask::Forward(pod, ports) => {
            let (name, coding) = forward::choose_channels(offered, &ports)?;
            Some((Job::WebPorts(pod, ports, coding), name))
        }
    }
}

fn protocols<'a>(headers: &'a HeaderMap, name: &HeaderName) -> impl Iterator<Item = &'a str> {
    let texts = headers.get_all(name).into_iter().filter_map(|value| value.to_str().ok());
    texts.flat_map(|text| text.split(',')).map(str::trim).filter(|name| !name.is_empty())
}

fn say(status: StatusCode, why: &'static str) -> Response<Full<Bytes>> {
    let mut answer = Response::new(Full::new(Bytes::from_static(why.as_bytes())));
    *answer.status_mut() = status;
    answer
}

/// Sends small pieces at once (TCP_NODELAY), and detects a client that has vanished (keepalive).
fn prepare(connection: &TcpStream) -> io::Result<()> {
    connection.set_nodelay(true)?;
    setsockopt(connection, sockopt::KeepAlive, &true)?;
    setsockopt(connection, sockopt::TcpKeepIdle, &KEEPALIVE)?;
    setsockopt(connection, sockopt::TcpKeepInterval, &KEEPALIVE)?;
    Ok(())
}
