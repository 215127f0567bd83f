//! Copies between the agent's ends of a process's stdin, stdout and stderr and the host's connections.
//!
//! A stream has one connection at a time; a newer one replaces the older. What a connection did not take stays, up to a limit, for the
//! next one.

use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::{Mutex, watch};

/// The most that is buffered between a process and a slow connection, in bytes.
const BUFFER: usize = 64 << 10;
/// The character that ends the input of a terminal (VEOF in termios(3)), unless a program has changed it.
const END_OF_INPUT: u8 = 4;

#[derive(Debug)]
struct Inner {
    end: Option<Arc<AsyncFd<File>>>,
    pending: Vec<u8>,
}

/// The agent's end of one stream of a process.
#[derive(Debug)]
pub struct StdioChannel {
    inner: Mutex<Inner>,
    newest: watch::Sender<u64>,
    /// The same descriptor as in `inner`, which a connection locks for as long as it lasts.
    end: Weak<AsyncFd<File>>,
    /// The length of `pending` of an output.
    unsent: AtomicUsize,
}

impl StdioChannel {
    /// Takes a descriptor over and makes it non-blocking. Must be called inside a runtime.
    pub fn new(fd: OwnedFd) -> io::Result<StdioChannel> {
        let flags = nix::fcntl::OFlag::O_NONBLOCK;
        nix::fcntl::fcntl(&fd, nix::fcntl::FcntlArg::F_SETFL(flags))?;
        let open = Arc::new(crate::sys::register(File::from(fd))?);
        let end = Arc::downgrade(&open);
        let inner = Mutex::new(Inner { end: Some(open), pending: Vec::new() });
        Ok(StdioChannel { inner, newest: watch::Sender::new(0), end, unsent: AtomicUsize::new(0) })
    }

    /// Returns how many bytes of an output have not been passed to a connection: those in the pipe or terminal and those in the
    /// agent's buffer.
    pub fn count_unread(&self) -> usize {
        let in_pipe = self.end.upgrade().and_then(|end| rustix::io::ioctl_fionread(end.get_ref()).ok());
        let in_pipe = usize::try_from(in_pipe.unwrap_or(0)).unwrap_or(usize::MAX);
        self.unsent.load(Ordering::Acquire).saturating_add(in_pipe)
    }

    /// Announces a connection, which ends the one before. The receiver changes when a newer one is announced.
    fn announce(&self) -> watch::Receiver<u64> {
        self.newest.send_modify(|count| *count += 1);
        let mut receiver = self.newest.subscribe();
        receiver.mark_unchanged();
        receiver
    }

    /// Copies what the process writes to a connection until the end of file, then half-closes the connection. Ends
    /// early, and keeps what was not sent, when a newer connection comes or this one breaks.
    pub async fn send_output(&self, mut connection: impl AsyncWrite + Unpin) -> io::Result<()> {
        let mut newer = self.announce();
        let mut inner = self.inner.lock().await;
        tokio::select! {
            biased;
            _ = newer.changed() => Ok(()),
            result = copy_output(&mut inner, &self.unsent, &mut connection) => result,
        }
    }

    /// Copies a connection to the process's input. With `close`, the connection's end closes the input.
    pub async fn copy_input(&self, mut connection: impl AsyncRead + Unpin, close: bool) -> io::Result<()> {
        let mut newer = self.announce();
        let mut inner = self.inner.lock().await;
        tokio::select! {
            biased;
            _ = newer.changed() => Ok(()),
            result = copy_input(&mut inner, &mut connection, close) => result,
        }
    }
}

async fn drop_output(channel: Option<&StdioChannel>) -> io::Result<()> {
    match channel {
        Some(channel) => channel.send_output(tokio::io::sink()).await,
        None => Ok(()),
    }
}

/// `unsent` follows the length of `pending`, without an `await` between the two.
async fn copy_output(
    inner: &mut Inner,
    unsent: &AtomicUsize,
    connection: &mut (impl AsyncWrite + Unpin),
) -> io::Result<()> {
    loop {
        while !inner.pending.is_empty() {
            let sent = connection.write(&inner.pending).await?;
            if sent == 0 {
                return Err(ErrorKind::WriteZero.into());
            }
            inner.pending.drain(..sent);
            unsent.store(inner.pending.len(), Ordering::Release);
        }
        // An idle stream holds no buffer.
        inner.pending = Vec::new();
        let Some(end) = inner.end.as_ref() else { return connection.shutdown().await };
        let mut ready = end.readable().await?;
        let mut buffer = vec![0; BUFFER];
        let read = match ready.try_io(|end| end.get_ref().read(&mut buffer)) {
            Ok(Ok(read)) => read,
            // The last process has closed the terminal.
            Ok(Err(error)) if error.raw_os_error() == Some(libc::EIO) => 0,
            Ok(Err(error)) if error.kind() == ErrorKind::Interrupted => continue,
            Ok(Err(error)) => return Err(error),
            Err(_not_ready) => continue,
        };
        if read == 0 {
            inner.end = None;
        }
        buffer.truncate(read);
        unsent.store(read, Ordering::Release);
        inner.pending = buffer;
    }
}

async fn copy_input(inner: &mut Inner, connection: &mut (impl AsyncRead + Unpin), close: bool) -> io::Result<()> {
    loop {
        while !inner.pending.is_empty() {
            let Some(end) = inner.end.as_ref() else { return Ok(()) };
            let mut ready = end.writable().await?;
            match ready.try_io(|end| end.get_ref().write(&inner.pending)) {
                Ok(Ok(written)) => drop(inner.pending.drain(..written)),
                Ok(Err(error)) if error.kind() == ErrorKind::Interrupted => {}
                Ok(Err(error)) => {
                    // No process reads the stream any more.
                    inner.pending.clear();
                    inner.end = None;
                    return Err(error);
                }
                Err(_not_ready) => {}
            }
        }
        let mut buffer = vec![0; BUFFER];
        match connection.read(&mut buffer).await {
            Ok(read) if read > 0 => {
                buffer.truncate(read);
                inner.pending = buffer;
            }
            // Also if it breaks, as all connections do when the VM is restored.
            ended => {
                if close {
                    inner.end = None;
                }
                return ended.map(drop);
            }
        }
    }
}

/// The streams of a process.
#[derive(Debug, Default)]
pub struct Stdio {
    /// The input, if it was requested.
    pub stdin: Option<StdioChannel>,
    /// The output; with a terminal, also the errors.
    pub stdout: Option<StdioChannel>,
    /// The errors; `None` with a terminal.
    pub stderr: Option<StdioChannel>,
    /// The master of the terminal.
    pub terminal: Option<OwnedFd>,
}

impl Stdio {
    /// The streams of a process with a terminal, whose master is given.
    pub fn of_terminal(master: OwnedFd, stdin: bool) -> io::Result<Stdio> {
        Ok(Stdio {
            stdin: if stdin { Some(StdioChannel::new(master.try_clone()?)?) } else { None },
            stdout: Some(StdioChannel::new(master.try_clone()?)?),
            stderr: None,
            terminal: Some(master),
        })
    }

    /// Returns whether each stream has had a connection.
    pub fn was_connected(&self) -> bool {
        let channels = [&self.stdin, &self.stdout, &self.stderr];
        channels.into_iter().flatten().all(|channel| *channel.newest.borrow() > 0)
    }

    /// Returns how many bytes of stdout and stderr have not been passed to a connection.
    pub fn count_unread_output(&self) -> usize {
        let outputs = [&self.stdout, &self.stderr].into_iter().flatten();
        outputs.fold(0, |sum, channel| sum.saturating_add(channel.count_unread()))
    }

    /// Ends the input, and reads and drops the output until the process and its children have closed it.
    pub async fn discard(&self) {
        let (input, stdout, stderr) =
            tokio::join!(self.end_input(), drop_output(self.stdout.as_ref()), drop_output(self.stderr.as_ref()));
        for error in [input, stdout, stderr].into_iter().filter_map(Result::err) {
            // A process that does not read its input any more may run on all the same.
            tracing::debug!(%error, "a stream of a process without a client failed");
        }
    }

    /// Ends the input after what was read from its last connection. A program with a terminal, which cannot be closed, gets the
    /// character that a user would type.
    pub async fn end_input(&self) -> io::Result<()> {
        match (&self.stdin, &self.terminal) {
            (None, _) => Ok(()),
            (Some(channel), None) => channel.copy_input(tokio::io::empty(), true).await,
            (Some(channel), Some(_)) => channel.copy_input(&[END_OF_INPUT][..], false).await,
        }
    }

    /// Makes pipes that belong to the process's user, so that it may open /dev/stdout. Returns also the process's ends.
    pub fn pipes(stdin: bool, uid: u32, gid: u32) -> io::Result<(Stdio, Vec<OwnedFd>)> {
        let owned = |fd: &OwnedFd| {
            let (uid, gid) = (nix::unistd::Uid::from_raw(uid), nix::unistd::Gid::from_raw(gid));
            nix::unistd::fchown(fd, Some(uid), Some(gid)).map_err(io::Error::from)
        };
        let mut stdio = Stdio::default();
        let input = if stdin {
            let (theirs, ours) = nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC)?;
            owned(&theirs)?;
            stdio.stdin = Some(StdioChannel::new(ours)?);
            theirs
        } else {
            File::open("/dev/null")?.into()
        };
        let mut theirs = vec![input];
        for channel in [&mut stdio.stdout, &mut stdio.stderr] {
            let (ours, end) = nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC)?;
            owned(&end)?;
            theirs.push(end);
            *channel = Some(StdioChannel::new(ours)?);
        }
        Ok((stdio, theirs))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::duplex;

    fn runtime() -> tokio::runtime::Runtime {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
    }

    async fn read_exactly(from: &mut (impl AsyncRead + Unpin), count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count];
        let read = tokio::time::timeout(std::time::Duration::from_secs(60), from.read_exact(&mut bytes));
        read.await.expect("within a minute").unwrap();
        bytes
    }

    #[test]
    fn output_waits_for_a_reader_and_ends() {
        runtime().block_on(async {
            let (ours, theirs) = nix::unistd::pipe().unwrap();
            let channel = StdioChannel::new(ours).unwrap();
            File::from(theirs).write_all(b"early").unwrap();
            let (near, mut far) = duplex(1024);
            channel.send_output(near).await.unwrap();
            let mut all = Vec::new();
            far.read_to_end(&mut all).await.unwrap();
            assert_eq!(all, b"early");
            let (near, mut far) = duplex(16);
            channel.send_output(near).await.unwrap();
            assert_eq!(far.read_to_end(&mut all).await.unwrap(), 0);
        });
    }

    /// A connection that breaks.
    struct Broken;

    impl AsyncRead for Broken {
        fn poll_read(
            self: std::pin::Pin<&mut Self>,
            _: &mut std::task::Context<'_>,
            _: &mut tokio::io::ReadBuf<'_>,
        ) -> std::task::Poll<io::Result<()>> {
            std::task::Poll::Ready(Err(ErrorKind::ConnectionReset.into()))
        }
    }

    #[test]
    fn input_ends_with_a_connection_that_breaks_unless_it_is_kept_open() {
        runtime().block_on(async {
            let (theirs, ours) = nix::unistd::pipe().unwrap();
            nix::fcntl::fcntl(&theirs, nix::fcntl::FcntlArg::F_SETFL(nix::fcntl::OFlag::O_NONBLOCK)).unwrap();
            let channel = StdioChannel::new(ours).unwrap();
            let mut process = File::from(theirs);
            assert!(channel.copy_input(Broken, false).await.is_err());
            assert_eq!(process.read(&mut [0]).unwrap_err().kind(), ErrorKind::WouldBlock);
            assert!(channel.copy_input(Broken, true).await.is_err());
            assert_eq!(process.read(&mut [0]).unwrap(), 0);
        });
    }

    #[test]
    fn unread_output_is_counted_in_the_pipe_and_in_the_buffer() {
        runtime().block_on(async {
            let (ours, theirs) = nix::unistd::pipe().unwrap();
            let channel = Arc::new(StdioChannel::new(ours).unwrap());
            let mut process = File::from(theirs);
            assert_eq!(channel.count_unread(), 0);
            process.write_all(b"0123456789").unwrap();
            assert_eq!(channel.count_unread(), 10);
            // The connection takes four bytes, and the rest waits in the buffer while the connection has the channel locked.
            let (near, mut far) = duplex(4);
            let sent = tokio::spawn({
                let channel = Arc::clone(&channel);
                async move { channel.send_output(near).await }
            });
            while channel.count_unread() != 6 {
                tokio::task::yield_now().await;
            }
            process.write_all(b"ab").unwrap();
            assert_eq!(channel.count_unread(), 8);
            assert_eq!(read_exactly(&mut far, 12).await, b"0123456789ab");
            assert_eq!(channel.count_unread(), 0);
            drop(process);
            sent.await.unwrap().unwrap();
            assert_eq!(channel.count_unread(), 0);
        });
    }

    #[test]
    fn a_newer_reader_continues_where_the_older_stopped() {
        runtime().block_on(async {
            let (ours, theirs) = nix::unistd::pipe().unwrap();
            let channel = Arc::new(StdioChannel::new(ours).unwrap());
            let mut process = File::from(theirs);
            process.write_all(b"0123456789").unwrap();
            let (near, mut first) = duplex(4);
            let older = tokio::spawn({
                let channel = Arc::clone(&channel);
                async move { channel.send_output(near).await }
            });
            assert_eq!(read_exactly(&mut first, 1).await, b"0");
            let (near, mut second) = duplex(64);
            let newer = tokio::spawn({
                let channel = Arc::clone(&channel);
                async move { channel.send_output(near).await }
            });
            older.await.unwrap().unwrap();
            let mut taken = Vec::from(*b"0");
            first.read_to_end(&mut taken).await.unwrap();
            drop(process);
            second.read_to_end(&mut taken).await.unwrap();
            newer.await.unwrap().unwrap();
            assert_eq!(taken, b"0123456789");
        });
    }

    #[test]
    fn input_is_closed_by_its_end() {
        runtime().block_on(async {
            let (theirs, ours) = nix::unistd::pipe().unwrap();
            let channel = StdioChannel::new(ours).unwrap();
            channel.copy_input(&b"to "[..], false).await.unwrap();
            channel.copy_input(&b"you"[..], true).await.unwrap();
            let mut all = String::new();
            File::from(theirs).read_to_string(&mut all).unwrap();
            assert_eq!(all, "to you");
        });
    }

    #[test]
    fn the_end_of_input_replaces_a_connection_that_is_still_open() {
        runtime().block_on(async {
            let (theirs, ours) = nix::unistd::pipe().unwrap();
            let stdio = Stdio { stdin: Some(StdioChannel::new(ours).unwrap()), ..Stdio::default() };
            assert!(!stdio.was_connected());
            let (mut near, far) = duplex(64);
            near.write_all(b"typed").await.unwrap();
            let channel = stdio.stdin.as_ref().unwrap();
            let ended = async {
                // The connection is first.
                tokio::task::yield_now().await;
                assert!(stdio.was_connected());
                stdio.end_input().await
            };
            let (older, ended) = tokio::join!(channel.copy_input(far, true), ended);
            older.unwrap();
            ended.unwrap();
            let mut all = String::new();
            File::from(theirs).read_to_string(&mut all).unwrap();
            assert_eq!(all, "typed");
        });
    }

    #[test]
    fn output_without_a_client_is_dropped_to_its_end() {
        runtime().block_on(async {
            let (uid, gid) = (nix::unistd::getuid().as_raw(), nix::unistd::getgid().as_raw());
            let (stdio, theirs) = Stdio::pipes(true, uid, gid).unwrap();
            let writer = tokio::task::spawn_blocking(move || {
                let mut files: Vec<File> = theirs.into_iter().map(File::from).collect();
                let mut input = String::new();
                files[0].read_to_string(&mut input).unwrap();
                // More than a pipe holds.
                files[1].write_all(&[1; 1 << 20]).unwrap();
                files[2].write_all(&[2; 1 << 20]).unwrap();
                input
            });
            stdio.discard().await;
            assert_eq!(writer.await.unwrap(), "");
        });
    }

    #[test]
    fn a_terminal_without_a_client_reads_the_end_of_its_input() {
        runtime().block_on(async {
            let terminal = nix::pty::openpty(None, None).unwrap();
            let stdio = Stdio::of_terminal(terminal.master, true).unwrap();
            stdio.end_input().await.unwrap();
            let mut all = String::new();
            assert_eq!(File::from(terminal.slave).read_to_string(&mut all).unwrap(), 0);
        });
    }

    #[test]
    fn input_for_a_process_that_has_ended_fails() {
        runtime().block_on(async {
            let (theirs, ours) = nix::unistd::pipe().unwrap();
            let channel = StdioChannel::new(ours).unwrap();
            drop(theirs);
            assert!(channel.copy_input(&b"x"[..], true).await.is_err());
        });
    }
}
