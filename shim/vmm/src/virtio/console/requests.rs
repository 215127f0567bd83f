//! Serves the requests of the console's queues.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use super::handle::ConsoleInner;
use crate::virtio::Memory;
use crate::virtio::buffers::{ChainError, MemoryRanges};
use crate::virtio::ring::Request;
use nacelle_base::guest_warn;
use std::sync::atomic::Ordering::Relaxed;

/// The queues of the first port, by number.
pub(crate) const INPUT: u16 = 0;
pub(crate) const OUTPUT: u16 = 1;

/// The maximum number of bytes processed of one request; Linux sends at most a page.
pub const MAX_BYTES: usize = 64 << 10;

/// Serves a request of queue `index`. Returns `None` if there is no input for it yet.
pub(crate) fn serve(inner: &ConsoleInner, index: u16, memory: &Memory, request: Request) -> Option<u32> {
    match index {
        INPUT => input(inner, memory, &request.buffers.writable),
        OUTPUT => {
            if let Err(error) = output(inner, memory, request.buffers.readable) {
                guest_warn!("the guest sent console output in {error}");
            }
            Some(0)
        }
        _ => Some(0),
    }
}

fn input(inner: &ConsoleInner, memory: &Memory, buffers: &MemoryRanges) -> Option<u32> {
    let bytes = inner.next_input(buffers.len())?;
    match buffers.write(memory, &bytes) {
        Ok(written) => {
            inner.metrics.input_bytes.fetch_add(written as u64, Relaxed);
            Some(u32::try_from(written).unwrap_or(0))
        }
        Err(error) => {
            guest_warn!("the guest provided an input buffer in {error}");
            Some(0)
        }
    }
}

fn output(inner: &ConsoleInner, memory: &Memory, mut bytes: MemoryRanges) -> Result<(), ChainError> {
    let mut buffer = [0; 4096];
    let mut left = MAX_BYTES;
    while let Some(piece) = bytes.split_front(bytes.len().min(buffer.len()).min(left)).filter(|piece| !piece.is_empty())
    {
        let read = piece.read(memory, &mut buffer)?;
        left -= read;
        inner.print(buffer.get(..read).unwrap_or_default());
    }
    inner.metrics.dropped_bytes.fetch_add(bytes.len() as u64, Relaxed);
    Ok(())
}
