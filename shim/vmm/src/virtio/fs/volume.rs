//! Selects the part of the volumes that a share contains, before the first file request. See docs/contributor/devices/fs.md.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use nacelle_base::retry;
use nacelle_base::share::{MAX_VOLUME_NAME, REPLY_HEADER, SELECT_VOLUME};
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// The timeout for the answer of the other process. The node's file system may hang.
const TIMEOUT: Duration = Duration::from_secs(20);

/// Sends the selection on the share's first stream and waits for the confirmation. No request may be in flight.
pub(super) fn select_volume(mut stream: &UnixStream, volume: &str) -> io::Result<()> {
    if volume.len() > MAX_VOLUME_NAME {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    let length = u32::try_from(volume.len()).unwrap_or(0); // at most MAX_VOLUME_NAME
    let head = [SELECT_VOLUME, length].map(u32::to_le_bytes).concat();
    stream.write_all(&[head.as_slice(), volume.as_bytes()].concat())?;
    let mut reply = [0; REPLY_HEADER];
    stream.read_exact(&mut reply).map_err(retry::timed_out)?;
    stream.set_read_timeout(None)?;
    match i32::from_le_bytes(reply) {
        0 => Ok(()),
        errno => Err(io::Error::from_raw_os_error(errno)),
    }
}
