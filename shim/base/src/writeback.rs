//! Starts the write-back of a file's data. A later sync has less to wait for.
#![allow(unsafe_code)] // reason: sync_file_range has no safe wrapper.

use crate::retry::retry_interrupted;
use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// Starts writing the dirty pages of a file to its disk and does not wait for them. It makes nothing durable: that needs a sync
/// (sync_file_range(2)).
pub fn start_writeback(file: impl AsFd) -> io::Result<()> {
    // A length of 0 means to the end of the file.
    let (file, offset, length) = (file.as_fd(), 0, 0);
    retry_interrupted(|| {
        // SAFETY: the descriptor is open until the call returns, and the other arguments are numbers.
        match unsafe { libc::sync_file_range(file.as_raw_fd(), offset, length, libc::SYNC_FILE_RANGE_WRITE) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_written_back_and_pipes_are_refused() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(1 << 20).unwrap();
        start_writeback(&file).unwrap();
        let (reader, _writer) = io::pipe().unwrap();
        assert_eq!(start_writeback(&reader).unwrap_err().raw_os_error(), Some(libc::ESPIPE));
    }
}
