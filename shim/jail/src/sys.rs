//! Wraps the calls of this crate that have no safe wrapper: capabilities, inherited descriptors, malloc options.
#![allow(unsafe_code)] // reason: PR_CAPBSET_DROP, PR_CAP_AMBIENT, close_range and mallopt have no safe wrapper in nix or std.

use rustix::thread::{CapabilitySet, CapabilitySets};
use std::io;

/// Clears the ambient set of the calling thread, and keeps in the bounding set only the capabilities in `keep`, one bit each.
/// Needs CAP_SETPCAP.
pub(crate) fn restrict_bounding_set(keep: u64) -> io::Result<()> {
    let bit = |number: libc::c_ulong, option: libc::c_int| {
        // SAFETY: prctl with these options takes integers and touches no memory.
        unsafe { libc::prctl(option, number, 0, 0, 0) }
    };
    // The kernel reports the end of its list.
    for capability in (0..64).filter(|capability| keep & 1 << capability == 0) {
        if bit(capability, libc::PR_CAPBSET_DROP) == -1 {
            let error = io::Error::last_os_error();
            if error.raw_os_error() == Some(libc::EINVAL) && capability > 0 {
                break;
            }
            return Err(error);
        }
    }
    match bit(libc::PR_CAP_AMBIENT_CLEAR_ALL as libc::c_ulong, libc::PR_CAP_AMBIENT) {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// Clears the inheritable set of the calling thread, and keeps in the effective and permitted sets only the capabilities in `keep`,
/// one bit each.
pub(crate) fn set_capabilities(keep: u64) -> io::Result<()> {
    let kept = CapabilitySet::from_bits_retain(keep);
    let sets = CapabilitySets { effective: kept, permitted: kept, inheritable: CapabilitySet::empty() };
    Ok(rustix::thread::set_capabilities(None, sets)?)
}

/// Closes every descriptor except the standard streams. Must be called before this process opens anything.
pub(crate) fn close_inherited() -> io::Result<()> {
    // SAFETY: close_range touches no memory. Nothing in this process owns a descriptor yet, as the caller promises; an
    // inherited one has no owner here.
    match unsafe { libc::syscall(libc::SYS_close_range, 3u32, u32::MAX, 0u32) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Configures malloc so that it opens no files. By default it would open one to count the CPUs when it has created some
/// arenas, and one to read the overcommit mode before it releases a part of an arena, on any thread.
pub(crate) fn limit_malloc_arenas(heaps: i32) {
    for (parameter, value) in [(libc::M_ARENA_MAX, heaps), (libc::M_TRIM_THRESHOLD, i32::MAX)] {
        // SAFETY: mallopt only sets a number that later calls of malloc and free read; it cannot fail for these.
        unsafe { libc::mallopt(parameter, value) };
    }
}
