//! Owns: the one kernel call of this crate that no safe wrapper has: giving an open tun file its interface.
#![allow(unsafe_code, reason = "TUNSETIFF has no safe wrapper")]

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

nix::ioctl_write_ptr_bad!(
    /// Makes or takes the interface named in the request for this file.
    tunsetiff,
    libc::TUNSETIFF,
    libc::ifreq
);

/// Makes the interface `name` with these flags and ties it to `tun`, an open `/dev/net/tun`.
pub(crate) fn make_tap(tun: &File, name: &str, flags: i32) -> io::Result<()> {
    // SAFETY: ifreq is plain data, for which all zeros is a value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    // One byte less than there is: the name ends with a zero.
    let space = request.ifr_name.len() - 1;
    if name.len() > space {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = libc::c_char::from_ne_bytes([from]);
    }
    // The kernel takes the field for an unsigned one: the highest flag has the bit of the sign.
    let flags = u16::try_from(flags).map_err(|_too_large| io::Error::from(io::ErrorKind::InvalidInput))?;
    request.ifr_ifru.ifru_flags = libc::c_short::from_ne_bytes(flags.to_ne_bytes());
    // SAFETY: the descriptor is open, and the kernel reads one ifreq, which lives until the call returns.
    unsafe { tunsetiff(tun.as_raw_fd(), &request) }?;
    Ok(())
}
