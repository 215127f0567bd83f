//! Broadcasts the output of a container to attached clients, besides its log.
//!
//! The output's pump thread calls `tell`; any thread may add a client. The lock is never held during a write to a client.

use nacelle_base::retry::retry_interrupted;
use std::io::Write;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The maximum number of clients of one output.
const MOST: usize = 64;
/// The time for which a client may read nothing before it is disconnected. Until then it blocks the container's output.
const PATIENCE: Duration = Duration::from_secs(10);

#[derive(Debug, Default)]
struct Listeners {
    /// The output has ended.
    over: bool,
    all: Vec<UnixStream>,
}

/// The attached clients of one output.
#[derive(Debug, Default)]
pub struct Fan(Mutex<Listeners>);

impl Fan {
    fn listeners(&self) -> MutexGuard<'_, Listeners> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a client, which receives the output from now on, or the end of an output that has ended. Returns false if the
    /// output has too many clients.
    pub fn add(&self, listener: UnixStream) -> std::io::Result<bool> {
        listener.set_nonblocking(false)?;
        listener.set_write_timeout(Some(PATIENCE))?;
        let mut listeners = self.listeners();
        if listeners.over {
            listener.shutdown(Shutdown::Write)?;
            return Ok(true);
        }
        if listeners.all.len() >= MOST {
            listeners.all.retain(listens);
        }
        let room = listeners.all.len() < MOST;
        if room {
            listeners.all.push(listener);
        }
        Ok(room)
    }

    /// Writes the bytes to all clients and removes those that fail.
    pub fn tell(&self, bytes: &[u8]) {
        let mut all = std::mem::take(&mut self.listeners().all);
        if all.is_empty() {
            return;
        }
        all.retain_mut(|listener| match listener.write_all(bytes) {
            Ok(()) => true,
            Err(error) => {
                tracing::debug!(%error, "somebody who listened to a container is let go");
                false
            }
        });
        let mut listeners = self.listeners();
        // Clients that were added during the writes receive the next bytes.
        all.append(&mut listeners.all);
        listeners.all = all;
    }

    /// Ends the output, which disconnects all clients.
    pub fn end(&self) {
        let mut listeners = self.listeners();
        listeners.over = true;
        listeners.all.clear();
    }
}

/// Returns whether the other end of the connection is open.
fn listens(listener: &UnixStream) -> bool {
    use nix::sys::socket::{MsgFlags, recv};
    use std::os::fd::AsRawFd;
    let peek = MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT;
    !matches!(retry_interrupted(|| recv(listener.as_raw_fd(), &mut [0], peek)), Ok(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    fn pair() -> (UnixStream, UnixStream) {
        UnixStream::pair().unwrap()
    }

    #[test]
    fn each_hears_what_comes_after_it_and_the_end() {
        let fan = Fan::default();
        fan.tell(b"early");
        let ((first, mut heard_first), (second, mut heard_second)) = (pair(), pair());
        assert!(fan.add(first).unwrap());
        fan.tell(b"one ");
        assert!(fan.add(second).unwrap());
        fan.tell(b"two");
        fan.end();
        let (late, mut heard_late) = pair();
        assert!(fan.add(late).unwrap());
        let all = |stream: &mut UnixStream| {
            let mut text = String::new();
            stream.read_to_string(&mut text).unwrap();
            text
        };
        let heard = [all(&mut heard_first), all(&mut heard_second), all(&mut heard_late)];
        assert_eq!(heard, ["one two", "two", ""]);
    }

    #[test]
    fn who_goes_makes_room() {
        let fan = Fan::default();
        let mut here: Vec<UnixStream> = Vec::new();
        for _ in 0..MOST {
            let (near, far) = pair();
            assert!(fan.add(near).unwrap());
            here.push(far);
        }
        assert!(!fan.add(pair().0).unwrap());
        here.truncate(1);
        let (near, mut far) = pair();
        assert!(fan.add(near).unwrap());
        fan.tell(b"x");
        assert_eq!(far.read(&mut [0; 8]).unwrap(), 1);
        assert_eq!(fan.listeners().all.len(), 2);
    }
}
