//! Implements the host's side of a tap in a network namespace of its own, with access to all frames that pass through it.
#![allow(unsafe_code, reason = "ioctls of taps and packet sockets have no safe wrapper")]

use crate::guest::LIMIT;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

/// A tap and a packet socket on it. Frames at the socket are preceded by a virtio-net header of 10 bytes.
pub struct Host {
    pub taps: Vec<OwnedFd>,
    socket: OwnedFd,
    namespace: File,
    index: i32,
}

/// The size of the header before each frame at the packet socket.
pub const HEADER: usize = 10;

fn checked(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

fn request(flags: i32) -> libc::ifreq {
    // SAFETY: ifreq is plain data, for which all zeros is a value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    request.ifr_name[0] = b't' as libc::c_char;
    request.ifr_ifru.ifru_flags = flags as libc::c_short;
    request
}

/// Opens one queue of the tap `t` in this thread's namespace.
pub fn open_tap(flags: i32) -> io::Result<OwnedFd> {
    let tun = OpenOptions::new().read(true).write(true).open("/dev/net/tun")?;
    // SAFETY: the descriptor is open, and the kernel reads one ifreq.
    checked(unsafe { libc::ioctl(tun.as_raw_fd(), libc::TUNSETIFF, &request(flags)) })?;
    Ok(tun.into())
}

impl Host {
    /// Creates a tap with this many queues and sets it up. Fails if that is not permitted or supported here.
    pub fn new(queues: usize) -> io::Result<Host> {
        let several = if queues > 1 { libc::IFF_MULTI_QUEUE } else { 0 };
        Host::with_flags(queues, libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR | several)
    }

    pub fn with_flags(queues: usize, flags: i32) -> io::Result<Host> {
        // A thread of its own, whose namespace ends with it, except for holders of its descriptors.
        std::thread::spawn(move || Host::here(queues, flags)).join().expect("the thread of a namespace")
    }

    fn here(queues: usize, flags: i32) -> io::Result<Host> {
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET)?;
        let namespace = File::open("/proc/thread-self/ns/net")?;
        let taps = (0..queues).map(|_| open_tap(flags)).collect::<io::Result<Vec<_>>>()?;
        // Fails on a kernel without IPv6, which has no such file.
        let _ = std::fs::write("/proc/sys/net/ipv6/conf/t/disable_ipv6", "1");
        let all = i32::from((libc::ETH_P_ALL as u16).to_be());
        // SAFETY: no memory is involved.
        let socket = checked(unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC, all) })?;
        // SAFETY: the kernel has just made the descriptor; nothing else owns it.
        let socket = unsafe { OwnedFd::from_raw_fd(socket) };
        let mut up = request(libc::IFF_UP | libc::IFF_RUNNING);
        // SAFETY: the descriptor is open, and the kernel reads one ifreq.
        checked(unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &up) })?;
        // SAFETY: the descriptor is open, and the kernel writes one ifreq.
        checked(unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFINDEX, &mut up) })?;
        // SAFETY: SIOCGIFINDEX fills in the index.
        let index = unsafe { up.ifr_ifru.ifru_ifindex };
        let on: libc::c_int = 1;
        let size = size_of::<libc::c_int>() as libc::socklen_t;
        // SAFETY: the descriptor is open, and the kernel reads one int.
        checked(unsafe {
            let value = (&raw const on).cast();
            libc::setsockopt(socket.as_raw_fd(), libc::SOL_PACKET, libc::PACKET_VNET_HDR, value, size)
        })?;
        // SAFETY: sockaddr_ll is plain data, for which all zeros is a value.
        let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
        address.sll_family = libc::AF_PACKET as u16;
        address.sll_protocol = (libc::ETH_P_ALL as u16).to_be();
        address.sll_ifindex = index;
        let length = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
        // SAFETY: the descriptor is open, and the kernel reads one address.
        checked(unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), length) })?;
        Ok(Host { taps, socket, namespace, index })
    }

    /// Sends one frame to the guest, unless its tap is full.
    pub fn send(&self, header: [u8; HEADER], frame: &[u8]) {
        let bytes = [&header, frame].concat();
        match nix::unistd::write(&self.socket, &bytes) {
            Err(nix::errno::Errno::ENOBUFS) => {} // a tap that is not read becomes full, and drops
            sent => assert_eq!(sent.expect("a frame to the tap"), bytes.len()),
        }
    }

    /// Receives the next frame of the guest with this EtherType, header included.
    pub fn receive(&self, kind: [u8; 2]) -> Vec<u8> {
        loop {
            let event = nix::poll::PollFd::new(self.socket.as_fd(), nix::poll::PollFlags::POLLIN);
            let limit = nix::poll::PollTimeout::try_from(LIMIT).expect("a limit");
            assert_ne!(nix::poll::poll(&mut [event], limit).expect("poll"), 0, "no frame for {LIMIT:?}");
            let mut bytes = vec![0; 70000];
            // SAFETY: sockaddr_ll is plain data, for which all zeros is a value.
            let mut from: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
            let mut length = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
            // SAFETY: the kernel writes at most so many bytes, and one address.
            let got = unsafe {
                let (to, size) = (bytes.as_mut_ptr().cast(), bytes.len());
                libc::recvfrom(self.socket.as_raw_fd(), to, size, 0, (&raw mut from).cast(), &mut length)
            };
            bytes.truncate(usize::try_from(got).expect("a frame"));
            if from.sll_pkttype != libc::PACKET_OUTGOING && bytes.get(HEADER + 12..HEADER + 14) == Some(&kind) {
                return bytes;
            }
        }
    }

    /// Removes the interface, as the end of a namespace would.
    pub fn remove(&self) {
        let namespace = self.namespace.try_clone().expect("a namespace");
        let index = self.index;
        let remove = move || {
            nix::sched::setns(namespace, nix::sched::CloneFlags::CLONE_NEWNET).expect("the namespace");
            // SAFETY: no memory is involved.
            let socket = checked(unsafe { libc::socket(libc::AF_NETLINK, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) });
            // SAFETY: the kernel has just made the descriptor; nothing else owns it.
            let socket = unsafe { OwnedFd::from_raw_fd(socket.expect("a netlink socket")) };
            // nlmsghdr: length, RTM_DELLINK, NLM_F_REQUEST, sequence number, port; ifinfomsg with the index.
            let mut message = [0u8; 32];
            message[0..4].copy_from_slice(&32u32.to_ne_bytes());
            message[4..6].copy_from_slice(&17u16.to_ne_bytes());
            message[6..8].copy_from_slice(&1u16.to_ne_bytes());
            message[20..24].copy_from_slice(&index.to_ne_bytes());
            assert_eq!(nix::unistd::write(&socket, &message).expect("a message"), message.len());
        };
        std::thread::spawn(remove).join().expect("the thread of a namespace");
    }
}
