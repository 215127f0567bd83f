//! Manages the daemon's socket: the right to its path, listening on it, and its removal. Only the stale socket of a process that
//! has ended is ever replaced or removed.
//!
//! A lock file beside the socket keeps daemons of Nacelle apart: only the holder of the lock examines the path, listens on it and
//! removes the socket. Other programs do not know the lock. A socket therefore gets its name by a hard link, which fails if the
//! name exists, and is removed only if the name still leads to the same inode.

use nacelle_base::files::{FileError, at, remove_if_there};
use nacelle_base::lock::{LockError, PathLock};
use nacelle_base::retry::retry_interrupted;
use nacelle_base::{Classify, FailureKind};
use nix::errno::Errno;
use nix::sys::socket::{AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, connect, listen, socket};
use nix::sys::stat::{Mode, fchmod};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::net::UnixListener;

/// The backlog of the listener: the largest number of clients that wait to be accepted.
const BACKLOG: i32 = 1024;

/// Why the daemon cannot serve on its socket's path.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// A file operation failed.
    #[error(transparent)]
    File(#[from] FileError),
    /// Another daemon of Nacelle serves on this path, or is about to.
    #[error("cannot serve on {path}: another daemon uses it; stop that one, or set {setting} to another path", path = path.display())]
    InUse {
        /// The socket's path.
        path: PathBuf,
        /// The setting of the path.
        setting: &'static str,
        /// The other daemon.
        source: LockError,
    },
    /// Another program listens on this path.
    #[error(
        "cannot serve on {path}: another program listens there; stop that one, or set {setting} to another path",
        path = path.display()
    )]
    Listening {
        /// The socket's path.
        path: PathBuf,
        /// The setting of the path.
        setting: &'static str,
    },
    /// The path exists and is not a stale socket.
    #[error(
        "cannot serve on {path}: a {kind} has that name; move it away, or set {setting} to another path",
        path = path.display()
    )]
    NotASocket {
        /// The path.
        path: PathBuf,
        /// The setting of the path.
        setting: &'static str,
        /// The kind of file: "regular file".
        kind: &'static str,
    },
}

impl Classify for SocketError {
    fn kind(&self) -> FailureKind {
        match self {
            SocketError::File(error) => error.kind(),
            SocketError::InUse { .. } | SocketError::Listening { .. } | SocketError::NotASocket { .. } => {
                FailureKind::Conflict
            }
        }
    }
}

/// The right to serve on a path.
#[derive(Debug)]
pub struct SocketClaim {
    setting: &'static str,
    path: PathBuf,
    lock: PathLock,
}

/// A listening socket that this process may remove.
#[derive(Debug)]
pub struct OwnedSocket {
    path: PathBuf,
    /// Keeps the inode open, so that its number is not given to another file.
    inode: File,
    _lock: PathLock,
}

/// The file at the socket's path.
enum SocketState {
    Absent,
    /// A socket on which no process listens any more: its device and inode.
    Stale(u64, u64),
}

impl SocketClaim {
    /// Takes the lock and examines the path, and changes nothing else. Waits for at most `timeout` for a daemon that is
    /// stopping. `setting` is the key of the configuration that has the path, for errors. Blocks.
    pub fn acquire(setting: &'static str, path: &Path, timeout: Duration) -> Result<SocketClaim, SocketError> {
        let directory = path.parent().unwrap_or(Path::new("/"));
        fs::DirBuilder::new().recursive(true).mode(0o755).create(directory).map_err(at("create", directory))?;
        let lock = PathLock::acquire(&PathLock::path_beside(path), timeout).map_err(|source| SocketError::InUse {
            path: path.to_owned(),
            setting,
            source,
        })?;
        examine(setting, path)?;
        Ok(SocketClaim { setting, path: path.to_owned(), lock })
    }

    /// Listens. Only root may connect, from the socket's first moment on. Blocks for a few file operations.
    pub fn listen(self) -> Result<(UnixListener, OwnedSocket), SocketError> {
        let SocketClaim { setting, path, lock } = self;
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let new = path.with_file_name(format!(".{name}.n"));
        // Left over from a daemon that was killed between the next lines.
        if let SocketState::Stale(..) = examine(setting, &new)? {
            remove_if_there(&new)?;
        }
        let listener = listen_privately(&new).map_err(at("listen on", &new))?;
        let named = publish(setting, &new, &path);
        let removed = remove_if_there(&new);
        let inode = named?;
        removed?;
        Ok((listener, OwnedSocket { path, inode, _lock: lock }))
    }
}

/// Creates a listening socket whose file has mode 0600 as soon as it exists: the file gets the mode of the socket itself
/// (unix(7)). A chmod afterwards could not revoke a connection that was made before it.
fn listen_privately(path: &Path) -> io::Result<UnixListener> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let server = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
    fchmod(&server, Mode::S_IRUSR | Mode::S_IWUSR)?;
    bind(server.as_raw_fd(), &UnixAddr::new(path)?)?;
    listen(&server, Backlog::new(BACKLOG)?)?;
    UnixListener::from_std(server.into())
}

/// Links the socket `new` to its final path and opens it, so that it can be identified later.
fn publish(setting: &'static str, new: &Path, path: &Path) -> Result<File, SocketError> {
    let inode = OpenOptions::new().read(true).custom_flags(libc::O_PATH | libc::O_NOFOLLOW).open(new);
    let inode = inode.map_err(at("open", new))?;
    if let SocketState::Stale(device, number) = examine(setting, path)? {
        // Checked again right before the link: a program that does not know the lock may have taken the path meanwhile.
        let now = fs::symlink_metadata(path).map_err(at("look at", path))?;
        if (now.dev(), now.ino()) == (device, number) {
            remove_if_there(path)?;
        }
    }
    match fs::hard_link(new, path) {
        Ok(()) => Ok(inode),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            examine(setting, path)?;
            Err(SocketError::Listening { path: path.to_owned(), setting })
        }
        Err(error) => Err(at("name", path)(error).into()),
    }
}

impl OwnedSocket {
    /// Removes the socket, unless its path leads to another file by now. Blocks for a few file operations.
    pub fn remove(self) -> Result<(), FileError> {
        let own = self.inode.metadata().map_err(at("look at", &self.path))?;
        match fs::symlink_metadata(&self.path) {
            Ok(now) if (now.dev(), now.ino()) == (own.dev(), own.ino()) => remove_if_there(&self.path),
            Ok(_) => {
                let path = self.path.display();
                tracing::warn!(%path, "not removing the socket: another program has replaced the file at its path");
                Ok(())
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(at("look at", &self.path)(error)),
        }
    }
}

/// Returns what exists at the path, or an error if it may not be replaced.
fn examine(setting: &'static str, path: &Path) -> Result<SocketState, SocketError> {
    let found = match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(SocketState::Absent),
        other => other.map_err(at("look at", path))?,
    };
    let kind = found.file_type();
    if !kind.is_socket() {
        let kind = match kind {
            kind if kind.is_file() => "regular file",
            kind if kind.is_dir() => "directory",
            kind if kind.is_symlink() => "symbolic link",
            _ => "special file",
        };
        return Err(SocketError::NotASocket { path: path.to_owned(), setting, kind });
    }
    match try_connect(path) {
        Err(Errno::ECONNREFUSED) => Ok(SocketState::Stale(found.dev(), found.ino())),
        Err(Errno::ENOENT) => Ok(SocketState::Absent),
        // EAGAIN: the listener's queue is full. EPROTOTYPE: a process has a socket of another type open.
        Ok(()) | Err(Errno::EAGAIN | Errno::EPROTOTYPE) => {
            Err(SocketError::Listening { path: path.to_owned(), setting })
        }
        Err(errno) => Err(at("connect to", path)(errno.into()).into()),
    }
}

/// Connects without waiting for a free place in the listener's queue.
fn try_connect(path: &Path) -> Result<(), Errno> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let client = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
    let address = UnixAddr::new(path)?;
    retry_interrupted(|| connect(client.as_raw_fd(), &address))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::{UnixDatagram, UnixListener as StdListener, UnixStream};

    fn claim(path: &Path) -> Result<SocketClaim, SocketError> {
        SocketClaim::acquire("paths.socket", path, Duration::ZERO)
    }

    fn inode(path: &Path) -> u64 {
        fs::symlink_metadata(path).unwrap().ino()
    }

    #[tokio::test]
    async fn a_socket_is_private_and_is_removed_with_its_daemon() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("run/n.sock");
        let (listener, own) = claim(&path).unwrap().listen().unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        UnixStream::connect(&path).unwrap();
        // The claim of a second daemon.
        let error = claim(&path).unwrap_err();
        assert!(matches!(error, SocketError::InUse { .. }), "{error}");
        drop(listener);
        own.remove().unwrap();
        let left = fs::read_dir(path.parent().unwrap()).unwrap().map(|entry| entry.unwrap().file_name());
        assert_eq!(left.collect::<Vec<_>>(), [".n.sock.nacelle-lock"]);
    }

    #[tokio::test]
    async fn a_socket_is_private_from_its_first_moment_on() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("n.sock");
        let _listener = listen_privately(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        UnixStream::connect(&path).unwrap();
    }

    #[tokio::test]
    async fn only_a_stale_socket_is_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("n.sock");
        drop(StdListener::bind(&path).unwrap());
        drop(StdListener::bind(directory.path().join(".n.sock.n")).unwrap());
        let (_listener, own) = claim(&path).unwrap().listen().unwrap();
        UnixStream::connect(&path).unwrap();
        own.remove().unwrap();
        assert!(!path.exists() && !directory.path().join(".n.sock.n").exists());

        fs::write(&path, "precious").unwrap();
        let error = claim(&path).unwrap_err();
        let expected = "a regular file has that name; move it away, or set paths.socket to another path";
        assert!(error.to_string().ends_with(expected), "{error}");
        assert_eq!(fs::read(&path).unwrap(), b"precious");
        fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink("/nowhere", &path).unwrap();
        assert!(matches!(claim(&path), Err(SocketError::NotASocket { kind: "symbolic link", .. })));
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        assert!(matches!(claim(&path), Err(SocketError::NotASocket { kind: "directory", .. })));
        fs::remove_dir(&path).unwrap();

        let foreign = StdListener::bind(&path).unwrap();
        let before = inode(&path);
        assert!(matches!(claim(&path), Err(SocketError::Listening { .. })));
        assert_eq!(inode(&path), before);
        drop(foreign);
        fs::remove_file(&path).unwrap();
        let _datagrams = UnixDatagram::bind(&path).unwrap();
        let before = inode(&path);
        assert!(matches!(claim(&path), Err(SocketError::Listening { .. })));
        assert_eq!(inode(&path), before);
    }

    #[tokio::test]
    async fn a_file_that_appears_later_is_neither_replaced_nor_removed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("n.sock");
        let claimed = claim(&path).unwrap();
        let foreign = StdListener::bind(&path).unwrap();
        let before = inode(&path);
        assert!(matches!(claimed.listen(), Err(SocketError::Listening { .. })));
        assert_eq!(inode(&path), before);
        drop(foreign);

        let (_listener, own) = claim(&path).unwrap().listen().unwrap();
        fs::remove_file(&path).unwrap();
        let _foreign = StdListener::bind(&path).unwrap();
        own.remove().unwrap();
        UnixStream::connect(&path).unwrap();
    }
}
