//! Simulates a service manager like systemd for one daemon: it holds the daemon's socket and receives its notifications.

use std::ffi::OsString;
use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Executes the program with the standard input as descriptor 3 and the variables of socket activation.
const SOCKET_ACTIVATION: &str =
    r#"exec 3<&0 0</dev/null; export LISTEN_PID=$$ LISTEN_FDS=1 WATCHDOG_PID=$$; exec "$@""#;

/// Holds the socket, and the receiving end of NOTIFY_SOCKET.
pub struct ServiceManager {
    socket: UnixListener,
    notify: UnixDatagram,
    path: PathBuf,
    watchdog: Duration,
}

impl ServiceManager {
    /// Listens in this directory of a node. Requires a notification from the daemon within `watchdog`.
    ///
    /// # Panics
    /// If the directory is not writable.
    pub fn new(directory: &Path, watchdog: Duration) -> Self {
        let (socket, path) = (directory.join("nacelle.sock"), directory.join("notify.sock"));
        // Like a manager that was restarted.
        let _ = fs::remove_file(&socket);
        let socket = UnixListener::bind(socket).expect("the node's directory is writable");
        let notify = UnixDatagram::bind(&path).expect("the node's directory is writable");
        Self { socket, notify, path, watchdog }
    }

    /// Returns the program and its arguments as the manager starts them, without nsenter.
    pub fn command_with_socket(&self, netns: impl FnOnce(&str) -> Command, words: &[OsString]) -> Command {
        let mut command = netns("sh");
        command.args(["-c", SOCKET_ACTIVATION, "sh"]).args(words);
        let handed: OwnedFd = self.socket.try_clone().expect("a socket can be duplicated").into();
        command.stdin(Stdio::from(handed));
        command.env("NOTIFY_SOCKET", &self.path).env("WATCHDOG_USEC", self.watchdog.as_micros().to_string());
        command
    }

    /// Returns the next notification of the daemon, or `None` after `within`.
    ///
    /// # Panics
    /// If the socket fails.
    pub fn receive_notification(&self, within: Duration) -> Option<String> {
        self.notify.set_read_timeout(Some(within)).expect("a time-out of more than nothing");
        let mut text = [0; 4096];
        let length = self.notify.recv(&mut text).ok()?;
        Some(String::from_utf8_lossy(&text[..length]).into_owned())
    }

    /// Waits until the daemon sends this notification.
    ///
    /// # Panics
    /// If it does not.
    #[track_caller]
    pub fn wait_for_notification(&self, wanted: &str) -> String {
        let (mut all, end) = (Vec::new(), crate::run::wait_end());
        while Instant::now() < end {
            if let Some(output) = self.receive_notification(Duration::from_millis(200)) {
                if output.lines().any(|line| line == wanted) {
                    return output;
                }
                all.push(output);
            }
        }
        panic!("the daemon did not say {wanted}, but {all:?}");
    }

    /// Discards the notifications so far.
    pub fn discard_notifications(&self) {
        while self.receive_notification(Duration::from_millis(1)).is_some() {}
    }
}
