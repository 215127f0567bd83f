//! Wraps the ioctls of tap and vhost-net that no crate wraps.
#![allow(unsafe_code, reason = "the ioctls of taps and VHOST_NET_SET_BACKEND have no safe wrapper")]

use libc::{c_int, c_uint};
use nacelle_base::retry::retry_interrupted;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd};
use vhost::vhost_kern::vhost_binding::{VHOST_NET_SET_BACKEND, vhost_vring_file};
use vmm_sys_util::eventfd::EventFd;

fn checked(result: c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Returns the `IFF_*` flags of a tap.
pub(super) fn tap_flags(tap: BorrowedFd<'_>) -> io::Result<u32> {
    // SAFETY: ifreq is plain data, for which all zeros is a value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    // SAFETY: the descriptor is open, and the kernel writes one ifreq.
    retry_interrupted(|| checked(unsafe { libc::ioctl(tap.as_raw_fd(), libc::TUNGETIFF, &mut request) }))?;
    // SAFETY: TUNGETIFF fills in the flags.
    let flags = unsafe { request.ifr_ifru.ifru_flags };
    Ok(u32::from(u16::from_ne_bytes(flags.to_ne_bytes())))
}

/// Sets the size in bytes of the header before each frame.
pub(super) fn set_header_size(tap: BorrowedFd<'_>, bytes: usize) -> io::Result<()> {
    let size = c_int::try_from(bytes).map_err(|_large| io::Error::from(io::ErrorKind::InvalidInput))?;
    // SAFETY: the descriptor is open, and the kernel reads one int.
    retry_interrupted(|| checked(unsafe { libc::ioctl(tap.as_raw_fd(), libc::TUNSETVNETHDRSZ, &size) }))
}

/// Sets the offloads (`TUN_F_*`) of frames that are read, for all queues of the interface.
pub(super) fn set_offload(tap: BorrowedFd<'_>, bits: c_uint) -> io::Result<()> {
    retry_interrupted(|| {
        // SAFETY: the descriptor is open, and the argument is a number.
        checked(unsafe { libc::ioctl(tap.as_raw_fd(), libc::TUNSETOFFLOAD, libc::c_ulong::from(bits)) })
    })
}

/// Sets which frames the kernel drops instead of letting them be read, for all queues of the interface. `filter` is a
/// `struct tun_filter`: flags and number of addresses, two bytes each, and the addresses.
pub(super) fn set_filter(tap: BorrowedFd<'_>, filter: &[u8]) -> io::Result<()> {
    let length = match filter {
        [_, _, low, high, ..] => 4 + 6 * usize::from(u16::from_ne_bytes([*low, *high])),
        _ => usize::MAX,
    };
    if filter.len() != length {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    retry_interrupted(|| {
        // SAFETY: the descriptor is open, and the kernel reads the four bytes and as many addresses as they say, which are there.
        checked(unsafe { libc::ioctl(tap.as_raw_fd(), libc::TUNSETTXFILTER, filter.as_ptr()) })
    })
}

/// Attaches or detaches a queue of a multi-queue tap.
pub(super) fn set_queue(tap: BorrowedFd<'_>, on: bool) -> io::Result<()> {
    // SAFETY: ifreq is plain data, for which all zeros is a value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    let flag = if on { libc::IFF_ATTACH_QUEUE } else { libc::IFF_DETACH_QUEUE };
    request.ifr_ifru.ifru_flags = flag as libc::c_short; // 0x200 or 0x400
    // SAFETY: the descriptor is open, and the kernel reads one ifreq.
    retry_interrupted(|| checked(unsafe { libc::ioctl(tap.as_raw_fd(), libc::TUNSETQUEUE, &request) }))
}

/// Sets or removes the tap of a vhost-net queue. After the removal the kernel no longer accesses the queue.
pub(super) fn set_backend(vhost: BorrowedFd<'_>, queue: u32, tap: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let file = vhost_vring_file { index: queue, fd: tap.map_or(-1, |tap| tap.as_raw_fd()) };
    // SAFETY: the descriptor is open, and the kernel reads one struct.
    retry_interrupted(|| checked(unsafe { libc::ioctl(vhost.as_raw_fd(), VHOST_NET_SET_BACKEND(), &file) }))
}

/// Converts an eventfd to the type that the crate `vhost` expects.
pub(super) fn event(fd: OwnedFd) -> EventFd {
    // SAFETY: the descriptor is open and owned, and nothing else has it any more.
    unsafe { EventFd::from_raw_fd(fd.into_raw_fd()) }
}
