//! Creates a tap in a network namespace that only the calling thread has entered.
#![allow(unsafe_code)] // reason: TUNSETIFF has no safe wrapper.

use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::process::Command;

nix::ioctl_write_int!(tunsetiff, b'T', 202);

/// Moves this thread into a new network namespace and creates a tap with so many queues there that is up.
pub fn tap_in_new_namespace(name: &str, queues: usize) -> Result<Vec<OwnedFd>, String> {
    nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).map_err(|error| format!("unshare: {error}"))?;
    let several = if queues > 1 { libc::IFF_MULTI_QUEUE } else { 0 };
    let taps = (0..queues).map(|_| queue(name, libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR | several));
    let taps = taps.collect::<Result<Vec<_>, _>>()?;
    let up = Command::new("ip").args(["link", "set", name, "up"]).status();
    match up.and_then(|status| if status.success() { Ok(()) } else { Err(io::Error::other("it failed")) }) {
        Ok(()) => Ok(taps),
        Err(error) => Err(format!("ip link set: {error}")),
    }
}

fn queue(name: &str, flags: libc::c_int) -> Result<OwnedFd, String> {
    let tun = OpenOptions::new().read(true).write(true).open("/dev/net/tun");
    let tun = tun.map_err(|error| format!("/dev/net/tun: {error}"))?;
    // SAFETY: all zeros are a valid ifreq.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from.cast_signed();
    }
    request.ifr_ifru.ifru_flags = flags as libc::c_short;
    let address = std::ptr::from_mut(&mut request).addr() as libc::c_ulong;
    // SAFETY: the descriptor is open, and the request outlives the call.
    unsafe { tunsetiff(tun.as_raw_fd(), address) }.map_err(|error| format!("TUNSETIFF: {error}"))?;
    Ok(tun.into())
}

/// Returns how many frames the tap has delivered on the node's side, in this thread's namespace.
pub fn frames_received(name: &str) -> u64 {
    let table = std::fs::read_to_string("/proc/thread-self/net/dev").unwrap();
    let line = table.lines().find_map(|line| line.trim_start().strip_prefix(&format!("{name}:")).map(str::to_owned));
    line.unwrap().split_whitespace().nth(1).unwrap().parse().unwrap()
}
