//! Implements the protocol between the daemon and the service manager that started it (systemd or a compatible one): takes the
//! passed socket, and reports that the daemon is ready, works, and stops. As a health check it is a client of the daemon's own
//! socket. Without a service manager it does nothing.

use crate::lifecycle::Node;
use crate::sys;
use hyper_util::rt::TokioIo;
use nacelle_base::{Chain, Classify, FailureKind};
use nacelle_pod::client::connect_unix;
use nacelle_proto::cri::VersionRequest;
use nacelle_proto::cri::runtime_service_client::RuntimeServiceClient;
use nix::sys::socket::{getsockopt, sockopt};
use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixListener};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::time::{sleep, timeout};
use tonic::transport::{Endpoint, Uri};

/// The variable with the manager's notification socket.
const NOTIFY_VARIABLE: &str = "NOTIFY_SOCKET";
/// The variables with the watchdog interval in microseconds, and the process to which it applies.
const WATCHDOG_VARIABLES: [&str; 2] = ["WATCHDOG_USEC", "WATCHDOG_PID"];
/// The variables with the number of passed descriptors and the process that they are for. Their names do not matter, because the
/// daemon takes a single socket.
const LISTEN_VARIABLES: [&str; 3] = ["LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES"];
/// The first passed descriptor.
const FIRST_PASSED: i32 = 3;

/// Pause between two health checks if the manager has no watchdog: the status text must not become stale.
const CHECK_PAUSE: Duration = Duration::from_secs(30);
/// Pause after a failed health check.
const RETRY_PAUSE: Duration = Duration::from_millis(500);

/// Why the settings of the service manager cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SupervisionError {
    /// A variable of the environment is invalid.
    #[error("{name} is {value:?}: {rule}")]
    Variable {
        /// The variable's name.
        name: &'static str,
        /// The value.
        value: OsString,
        /// The rule.
        rule: &'static str,
    },
    /// The socket of the manager cannot be used.
    #[error("cannot {what}")]
    Io {
        /// The failed operation.
        what: &'static str,
        /// The cause.
        source: io::Error,
    },
    /// The passed descriptor is not a listening unix socket.
    #[error("descriptor {FIRST_PASSED}, which the service manager passes, is not a listening Unix socket")]
    NoListener,
    /// The passed socket has another path than the configured one.
    #[error(
        "the service manager passes the socket {}, but paths.socket is {}: make them the same",
        passed.display(), configured.display()
    )]
    OtherSocket {
        /// The path of the passed socket.
        passed: PathBuf,
        /// The path in the configuration.
        configured: PathBuf,
    },
}

impl Classify for SupervisionError {
    fn kind(&self) -> FailureKind {
        match self {
            SupervisionError::Io { source, .. } => source.kind().into(),
            _ => FailureKind::Invalid,
        }
    }
}

fn io_error(what: &'static str) -> impl FnOnce(io::Error) -> SupervisionError {
    move |source| SupervisionError::Io { what, source }
}

/// The service manager of this daemon; without one, all notifications are dropped.
#[derive(Default)]
pub struct Supervisor {
    notify: Option<(UnixDatagram, SocketAddr)>,
    watchdog: Option<Duration>,
    passed_listener: Option<UnixListener>,
}

/// The manager's settings in the environment.
#[derive(Debug, Default)]
struct ManagerSettings {
    notify: Option<SocketAddr>,
    watchdog: Option<Duration>,
    has_socket: bool,
}

impl ManagerSettings {
    fn read(variable: impl Fn(&str) -> Option<OsString>, pid: u32) -> Result<ManagerSettings, SupervisionError> {
        let bad = |name, value, rule| SupervisionError::Variable { name, value, rule };
        let number = |name: &'static str| -> Result<Option<u64>, SupervisionError> {
            let Some(value) = variable(name) else { return Ok(None) };
            match value.to_str().and_then(|text| text.parse().ok()) {
                Some(number) => Ok(Some(number)),
                None => Err(bad(name, value, "a number is needed")),
            }
        };
        let ours = |name| Ok(number(name)?.is_none_or(|of| of == u64::from(pid)));
        let mut settings = ManagerSettings::default();
        if let Some(value) = variable(NOTIFY_VARIABLE).filter(|value| !value.is_empty()) {
            let address = match value.as_bytes() {
                [b'/', ..] => SocketAddr::from_pathname(&value),
                [b'@', name @ ..] => SocketAddr::from_abstract_name(name),
                _ => return Err(bad(NOTIFY_VARIABLE, value, "an absolute path, or @ and a name, is needed")),
            };
            settings.notify = Some(address.map_err(io_error("use NOTIFY_SOCKET"))?);
        }
        if let Some(micros) = number(WATCHDOG_VARIABLES[0])? {
            if micros == 0 {
                return Err(bad(WATCHDOG_VARIABLES[0], "0".into(), "a positive number of microseconds is needed"));
            }
            settings.watchdog = ours(WATCHDOG_VARIABLES[1])?.then_some(Duration::from_micros(micros));
        }
        // Without a pid the variables were meant for another process, which did not remove them from the environment.
        if variable(LISTEN_VARIABLES[1]).is_some() && ours(LISTEN_VARIABLES[1])? {
            settings.has_socket = match number(LISTEN_VARIABLES[0])? {
                None | Some(0) => false,
                Some(1) => true,
                Some(more) => {
                    return Err(bad(
                        LISTEN_VARIABLES[0],
                        more.to_string().into(),
                        "only one socket can be passed: paths.socket",
                    ));
                }
            };
        }
        Ok(settings)
    }
}

impl Supervisor {
    /// Reads and removes the variables of the environment, and takes the passed descriptor, so that programs started from now on
    /// inherit neither. Must be called once, while the process has a single thread and has opened nothing else.
    pub(crate) fn from_environment() -> Result<Supervisor, SupervisionError> {
        let settings = ManagerSettings::read(|name| std::env::var_os(name), std::process::id())?;
        sys::remove_variables(&[&[NOTIFY_VARIABLE], &WATCHDOG_VARIABLES[..], &LISTEN_VARIABLES[..]].concat());
        let notify = match settings.notify {
            Some(address) => {
                Some((notification_socket().map_err(io_error("open a socket for NOTIFY_SOCKET"))?, address))
            }
            None => None,
        };
        let passed_listener = match settings.has_socket {
            true => Some(as_listener(
                sys::take_inherited(FIRST_PASSED).map_err(io_error("take descriptor 3, named by LISTEN_FDS"))?,
            )?),
            false => None,
        };
        Ok(Supervisor { notify, watchdog: settings.watchdog, passed_listener })
    }

    /// Returns the manager's listening socket, if there is one. It must be the one in the configuration.
    pub(crate) fn take_listener(&mut self, configured: &Path) -> Result<Option<UnixListener>, SupervisionError> {
        let Some(listener) = self.passed_listener.take() else { return Ok(None) };
        let name = listener.local_addr().map_err(io_error("read the path of the passed socket"))?;
        let passed = name.as_pathname().unwrap_or(Path::new("")).to_owned();
        let real = |path: &Path| path.canonicalize().ok();
        if passed != configured && (real(&passed).is_none() || real(&passed) != real(configured)) {
            return Err(SupervisionError::OtherSocket { passed, configured: configured.to_owned() });
        }
        Ok(Some(listener))
    }

    /// Reports what the starting daemon does.
    pub(crate) fn status(&self, text: &str) {
        self.notify(&format!("STATUS={text}"));
    }

    /// Reports that the daemon is stopping.
    pub(crate) fn stopping(&self) {
        self.notify("STOPPING=1\nSTATUS=stopping; pods continue to run");
    }

    /// Returns whether the notification was sent. Never waits: a manager that does not read must not block the daemon.
    fn notify(&self, text: &str) -> bool {
        let Some((socket, address)) = &self.notify else { return true };
        match socket.send_to_addr(text.as_bytes(), address) {
            Ok(_) => true,
            Err(error) => {
                tracing::warn!(%error, "cannot notify the service manager of {:?}", text.lines().next().unwrap_or_default());
                false
            }
        }
    }

    /// Reports that the daemon is ready as soon as it responds on its own socket, and repeats this while it does. Runs until it
    /// is dropped.
    pub(crate) async fn watch(&self, socket: &Path, node: &Node) {
        if self.notify.is_none() {
            return;
        }
        let pause = self.watchdog.map_or(CHECK_PAUSE, |limit| limit / 2);
        let mut first = "READY=1";
        loop {
            // A response may take half of a pause, so that even a late one reaches the manager in time.
            let notified = match timeout(pause / 2, check_health(socket)).await {
                Ok(Ok(())) => self.notify(&format!("{first}\nSTATUS=serving CRI; pods: {}", node.views().len())),
                Ok(Err(status)) => {
                    tracing::warn!(%status, "health check failed");
                    false
                }
                Err(_elapsed) => {
                    tracing::warn!(limit = ?pause / 2, "health check timed out");
                    false
                }
            };
            if notified {
                first = "WATCHDOG=1";
                sleep(pause).await;
            } else {
                sleep(RETRY_PAUSE.min(pause / 4)).await;
            }
        }
    }
}

/// Sends a request like any client, through the socket, a connection and the server's threads.
async fn check_health(socket: &Path) -> Result<(), tonic::Status> {
    let path = socket.to_owned();
    let connector = tower::service_fn(move |_: Uri| {
        let path = path.clone();
        async move { Ok::<_, io::Error>(TokioIo::new(connect_unix(&path).await?)) }
    });
    // The connector ignores this address: it knows the path of the socket.
    let channel = Endpoint::from_static("http://nacelle").connect_with_connector_lazy(connector);
    RuntimeServiceClient::new(channel).version(VersionRequest::default()).await.map(drop)
}

fn notification_socket() -> io::Result<UnixDatagram> {
    let socket = UnixDatagram::unbound()?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}

/// Returns the descriptor as a listener, if it is one.
fn as_listener(descriptor: OwnedFd) -> Result<UnixListener, SupervisionError> {
    if getsockopt(&descriptor, sockopt::AcceptConn) != Ok(true) {
        return Err(SupervisionError::NoListener);
    }
    let listener = UnixListener::from(descriptor);
    // A socket of another family has no such address.
    listener.local_addr().map_err(|source| {
        tracing::debug!(error = %Chain(&source), "the passed socket has no Unix address");
        SupervisionError::NoListener
    })?;
    listener.set_nonblocking(true).map_err(io_error("prepare the passed socket"))?;
    Ok(listener)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PID: u32 = 77;

    fn read(variables: &[(&str, &str)]) -> Result<ManagerSettings, SupervisionError> {
        let find = |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into());
        ManagerSettings::read(find, PID)
    }

    #[test]
    fn without_a_manager_all_settings_are_empty() {
        let settings = read(&[]).unwrap();
        assert!(settings.notify.is_none() && settings.watchdog.is_none() && !settings.has_socket);
        assert!(Supervisor::default().notify("READY=1"));
    }

    #[test]
    fn variables_for_another_process_are_ignored() {
        let of = |pid| {
            read(&[("WATCHDOG_USEC", "5000000"), ("WATCHDOG_PID", pid), ("LISTEN_FDS", "1"), ("LISTEN_PID", pid)])
        };
        let ours = of("77").unwrap();
        assert_eq!((ours.watchdog, ours.has_socket), (Some(Duration::from_secs(5)), true));
        let others = of("78").unwrap();
        assert_eq!((others.watchdog, others.has_socket), (None, false));
        assert!(!read(&[("LISTEN_FDS", "1")]).unwrap().has_socket);
        assert!(!read(&[("LISTEN_FDS", "0"), ("LISTEN_PID", "77")]).unwrap().has_socket);
        assert_eq!(read(&[("WATCHDOG_USEC", "7")]).unwrap().watchdog, Some(Duration::from_micros(7)));
    }

    #[test]
    fn the_notification_socket_is_a_path_or_an_abstract_name() {
        let address = |value| read(&[("NOTIFY_SOCKET", value)]).unwrap().notify;
        assert_eq!(address("/run/n").unwrap().as_pathname(), Some(Path::new("/run/n")));
        assert_eq!(address("@n").unwrap().as_abstract_name(), Some(&b"n"[..]));
        assert!(address("").is_none());
    }

    #[test]
    fn an_invalid_variable_is_named() {
        for (name, value) in [
            ("NOTIFY_SOCKET", "vsock:2:1"),
            ("WATCHDOG_USEC", "soon"),
            ("WATCHDOG_USEC", "0"),
            ("LISTEN_FDS", "2"),
            ("LISTEN_FDS", "-1"),
        ] {
            let error = read(&[(name, value), ("LISTEN_PID", "77")]).unwrap_err();
            assert_eq!(error.kind(), FailureKind::Invalid);
            assert!(error.to_string().starts_with(&format!("{name} is {value:?}: ")), "{error}");
        }
        assert!(read(&[("NOTIFY_SOCKET", &format!("/{}", "n".repeat(200)))]).is_err());
    }

    #[test]
    fn only_the_configured_socket_is_accepted() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        let supervisor = || {
            let _ = std::fs::remove_file(&path);
            let listener = as_listener(UnixListener::bind(&path).unwrap().into()).unwrap();
            Supervisor { passed_listener: Some(listener), ..Supervisor::default() }
        };
        assert!(supervisor().take_listener(&path).unwrap().is_some());
        assert!(supervisor().take_listener(&directory.path().join("./s")).unwrap().is_some());
        let other = supervisor().take_listener(Path::new("/run/other.sock")).unwrap_err();
        assert!(other.to_string().ends_with("but paths.socket is /run/other.sock: make them the same"), "{other}");
        assert!(Supervisor::default().take_listener(&path).unwrap().is_none());
    }

    #[test]
    fn descriptors_that_do_not_listen_are_rejected() {
        let (end, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let file = tempfile::tempfile().unwrap();
        let inet = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        for descriptor in [OwnedFd::from(end), file.into(), inet.into()] {
            assert!(matches!(as_listener(descriptor), Err(SupervisionError::NoListener)));
        }
    }

    #[test]
    fn a_manager_that_does_not_read_does_not_block_the_daemon() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("notify");
        let manager = UnixDatagram::bind(&path).unwrap();
        let address = SocketAddr::from_pathname(&path).unwrap();
        let supervisor =
            Supervisor { notify: Some((notification_socket().unwrap(), address)), ..Supervisor::default() };
        supervisor.stopping();
        let mut text = [0; 100];
        let length = manager.recv(&mut text).unwrap();
        assert_eq!(&text[..length], b"STOPPING=1\nSTATUS=stopping; pods continue to run");
        assert!((0..100_000).any(|_| !supervisor.notify("STATUS=x")));
        drop(manager);
        assert!(!supervisor.notify("STATUS=x"));
    }
}
