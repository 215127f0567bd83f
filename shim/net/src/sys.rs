//! Wraps the kernel calls of this crate that have no safe wrapper: attaching an open tun file to its interface, and opening a packet
//! socket for the DHCP requests of the guest.
#![allow(unsafe_code, reason = "TUNSETIFF, SO_ATTACH_FILTER and addresses of packet sockets have no safe wrappers")]

use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

nix::ioctl_write_ptr_bad!(
    /// Creates the interface named in the request, or attaches to it.
    tunsetiff,
    libc::TUNSETIFF,
    libc::ifreq
);

/// Creates the interface `name` with these flags and attaches `tun`, an open `/dev/net/tun`, to it.
pub(crate) fn attach_tap(tun: &File, name: &str, flags: i32) -> io::Result<()> {
    // SAFETY: ifreq is plain data, for which all zeros is a valid value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    // One byte less than the field has: the name ends with a NUL.
    let space = request.ifr_name.len() - 1;
    if name.len() > space {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = libc::c_char::from_ne_bytes([from]);
    }
    // The kernel reads the field as unsigned; the highest flag uses the sign bit.
    let flags = u16::try_from(flags).map_err(|_too_large| io::Error::from(io::ErrorKind::InvalidInput))?;
    request.ifr_ifru.ifru_flags = libc::c_short::from_ne_bytes(flags.to_ne_bytes());
    // SAFETY: the descriptor is open, and the kernel reads one ifreq, which lives until the call returns.
    unsafe { tunsetiff(tun.as_raw_fd(), &request) }?;
    Ok(())
}

/// Matches the DHCP requests of a guest over IPv4: incoming, unfragmented IPv4 frames with UDP for port 67. The fields are those
/// of Documentation/networking/filter.rst of the kernel: code, jumps if true and if false, operand.
const DHCP_REQUESTS: [(u32, u8, u8, u32); 13] = [
    // The packet type: not outgoing, which here means sent to the guest.
    (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, PACKET_TYPE),
    (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 10, 0, libc::PACKET_OUTGOING as u32),
    (libc::BPF_LD | libc::BPF_H | libc::BPF_ABS, 0, 0, 12),
    (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 8, 0x0800),
    (libc::BPF_LD | libc::BPF_B | libc::BPF_ABS, 0, 0, 23),
    (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 6, 17),
    (libc::BPF_LD | libc::BPF_H | libc::BPF_ABS, 0, 0, 20),
    (libc::BPF_JMP | libc::BPF_JSET | libc::BPF_K, 4, 0, 0x1fff),
    (libc::BPF_LDX | libc::BPF_B | libc::BPF_MSH, 0, 0, 14),
    (libc::BPF_LD | libc::BPF_H | libc::BPF_IND, 0, 0, 16),
    (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1, 67),
    (libc::BPF_RET | libc::BPF_K, 0, 0, 2048),
    (libc::BPF_RET | libc::BPF_K, 0, 0, 0),
];
/// `SKF_AD_OFF + SKF_AD_PKTTYPE`.
const PACKET_TYPE: u32 = (libc::SKF_AD_OFF + libc::SKF_AD_PKTTYPE).cast_unsigned();

/// Opens a packet socket on the interface `name` of this thread's network namespace that receives only the frames of `DHCP_REQUESTS`.
pub(crate) fn open_dhcp_socket(name: &str) -> io::Result<OwnedFd> {
    let part = |number: libc::c_int| u16::try_from(number).map_err(io::Error::other);
    // Without a protocol the socket receives nothing until it is bound.
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let packets = socket(AddressFamily::Packet, SockType::Raw, flags, None)?;
    let mut filter = Vec::with_capacity(DHCP_REQUESTS.len());
    for (code, jt, jf, k) in DHCP_REQUESTS {
        filter.push(libc::sock_filter { code: u16::try_from(code).map_err(io::Error::other)?, jt, jf, k });
    }
    let length = u16::try_from(filter.len()).map_err(io::Error::other)?;
    let program = libc::sock_fprog { len: length, filter: filter.as_mut_ptr() };
    // SAFETY: the descriptor is open; the kernel copies one sock_fprog of the given size, and the `len` instructions that it
    // points to; both live until the call returns.
    let set = unsafe {
        libc::setsockopt(
            packets.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_ATTACH_FILTER,
            std::ptr::from_ref(&program).cast(),
            size_of_val(&program) as libc::socklen_t,
        )
    };
    nix::errno::Errno::result(set)?;
    // SAFETY: sockaddr_ll is plain data, for which all zeros is a valid value.
    let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    address.sll_family = part(libc::AF_PACKET)?;
    // All protocols: sockets for a single protocol come after the redirect, which takes the frames away.
    address.sll_protocol = part(libc::ETH_P_ALL)?.to_be();
    address.sll_ifindex = libc::c_int::try_from(nix::net::if_::if_nametoindex(name)?).map_err(io::Error::other)?;
    // SAFETY: the descriptor is open, and the kernel reads one sockaddr_ll of the given size, which lives until the call returns.
    let bound = unsafe {
        libc::bind(packets.as_raw_fd(), std::ptr::from_ref(&address).cast(), size_of_val(&address) as libc::socklen_t)
    };
    nix::errno::Errno::result(bound)?;
    Ok(packets)
}
