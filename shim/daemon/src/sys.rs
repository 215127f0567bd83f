//! Owns: the call to the C library that neither nix nor std has.
#![allow(unsafe_code)] // reason: mallopt has no safe wrapper in nix or std.

/// Bytes: what is at least as large has memory of its own, which goes back when it is freed; and so does what is free
/// at the end of a heap.
const LARGE: i32 = 128 << 10;

/// Has the C library give memory back when it is freed. By itself it learns from the buffers of a pull that such sizes
/// are usual, and keeps tens of MiB for the next one.
pub(crate) fn give_memory_back() {
    for parameter in [libc::M_MMAP_THRESHOLD, libc::M_TRIM_THRESHOLD] {
        // SAFETY: mallopt only sets a number that later calls of malloc and free read; it cannot fail for these.
        unsafe { libc::mallopt(parameter, LARGE) };
    }
}
