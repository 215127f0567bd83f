//! Serves one request for entropy.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use super::RngMetrics;
use crate::virtio::Memory;
use crate::virtio::ring::Request;
use nacelle_base::guest_warn;
use std::sync::atomic::Ordering;

/// The maximum number of bytes per request; a driver that needs more asks again. Linux asks for 64 at a time.
pub const MAX_BYTES: usize = 4096;

/// Fills the writable buffers of a request. Returns the number of bytes written.
pub(crate) fn fill(metrics: &RngMetrics, memory: &Memory, request: Request) -> u32 {
    let mut bytes = [0; MAX_BYTES];
    let wanted = request.buffers.writable.len().min(MAX_BYTES);
    let Some(bytes) = bytes.get_mut(..wanted) else { return 0 };
    if let Err(error) = nacelle_base::random::fill(bytes) {
        guest_warn!("cannot read random bytes for the guest: {error}");
        return 0;
    }
    match request.buffers.writable.write(memory, bytes) {
        Ok(written) => {
            metrics.requests.fetch_add(1, Ordering::Relaxed);
            metrics.bytes.fetch_add(written as u64, Ordering::Relaxed);
            u32::try_from(written).unwrap_or(0)
        }
        Err(error) => {
            guest_warn!("the guest provided an entropy buffer in {error}");
            0
        }
    }
}
