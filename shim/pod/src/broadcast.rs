//! Broadcasts the output of a container to attached clients, besides its log.
//!
//! The output's pump thread calls `send`; any thread may add a client. The lock is never held during a write to a client.

use nacelle_base::retry::retry_interrupted;
use std::io::Write;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The maximum number of clients of one output.
const MAX_CLIENTS: usize = 64;
/// The time for which a client may read nothing before it is disconnected. Until then it blocks the container's output.
const WRITE_LIMIT: Duration = Duration::from_secs(10);

#[derive(Debug, Default)]
struct Clients {
    /// The output has ended.
    ended: bool,
    all: Vec<UnixStream>,
}

/// The attached clients of one output.
#[derive(Debug, Default)]
pub struct OutputBroadcast(Mutex<Clients>);

impl OutputBroadcast {
    fn clients(&self) -> MutexGuard<'_, Clients> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a client, which receives the output from now on, or the end of an output that has ended. Returns false if the
    /// output has too many clients.
    pub fn add_client(&self, client: UnixStream) -> std::io::Result<bool> {
        client.set_nonblocking(false)?;
        client.set_write_timeout(Some(WRITE_LIMIT))?;
        let mut clients = self.clients();
        if clients.ended {
            client.shutdown(Shutdown::Write)?;
            return Ok(true);
        }
        if clients.all.len() >= MAX_CLIENTS {
            clients.all.retain(is_connected);
        }
        let accepted = clients.all.len() < MAX_CLIENTS;
        if accepted {
            clients.all.push(client);
        }
        Ok(accepted)
    }

    /// Writes the bytes to all clients and removes those that fail.
    pub fn send(&self, bytes: &[u8]) {
        let mut all = std::mem::take(&mut self.clients().all);
        if all.is_empty() {
            return;
        }
        all.retain_mut(|client| match client.write_all(bytes) {
            Ok(()) => true,
            Err(error) => {
                tracing::debug!(%error, "a client of a container's output was disconnected");
                false
            }
        });
        let mut clients = self.clients();
        // Clients that were added during the writes receive the next bytes.
        all.append(&mut clients.all);
        clients.all = all;
    }

    /// Ends the output, which disconnects all clients.
    pub fn end(&self) {
        let mut clients = self.clients();
        clients.ended = true;
        clients.all.clear();
    }
}

/// Returns whether the other end of the connection is open.
fn is_connected(client: &UnixStream) -> bool {
    use nix::sys::socket::{MsgFlags, recv};
    use std::os::fd::AsRawFd;
    let peek = MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT;
    !matches!(retry_interrupted(|| recv(client.as_raw_fd(), &mut [0], peek)), Ok(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    fn pair() -> (UnixStream, UnixStream) {
        UnixStream::pair().unwrap()
    }

    #[test]
    fn each_client_receives_later_output_and_the_end() {
        let broadcast = OutputBroadcast::default();
        broadcast.send(b"early");
        let ((first, mut received_first), (second, mut received_second)) = (pair(), pair());
        assert!(broadcast.add_client(first).unwrap());
        broadcast.send(b"one ");
        assert!(broadcast.add_client(second).unwrap());
        broadcast.send(b"two");
        broadcast.end();
        let (late, mut received_late) = pair();
        assert!(broadcast.add_client(late).unwrap());
        let all = |stream: &mut UnixStream| {
            let mut text = String::new();
            stream.read_to_string(&mut text).unwrap();
            text
        };
        let received = [all(&mut received_first), all(&mut received_second), all(&mut received_late)];
        assert_eq!(received, ["one two", "two", ""]);
    }

    #[test]
    fn a_disconnected_client_frees_its_slot() {
        let broadcast = OutputBroadcast::default();
        let mut connected: Vec<UnixStream> = Vec::new();
        for _ in 0..MAX_CLIENTS {
            let (near, far) = pair();
            assert!(broadcast.add_client(near).unwrap());
            connected.push(far);
        }
        assert!(!broadcast.add_client(pair().0).unwrap());
        connected.truncate(1);
        let (near, mut far) = pair();
        assert!(broadcast.add_client(near).unwrap());
        broadcast.send(b"x");
        assert_eq!(far.read(&mut [0; 8]).unwrap(), 1);
        assert_eq!(broadcast.clients().all.len(), 2);
    }
}
