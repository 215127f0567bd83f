//! Prints what a kernel's secrets of TCP determine, one line for each of four connections of the container with itself, whose addresses and
//! ports are always the same: `isn NUMBER cookie NUMBER`. Two kernels with the same secrets print the same numbers within a
//! minute (the first one within the time that passes between clock and packet). Needs CAP_NET_RAW, and net.ipv4.tcp_syncookies = 2.
//!
//! - `isn`: the initial sequence number (RFC 6528) without its clock, which counts 64 ns (`secure_tcp_seq`, Linux).
//! - `cookie`: the low 24 bits of the SYN cookie less the initial sequence number.

use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, socket};
use std::error::Error;
use std::net::{Ipv4Addr, SocketAddrV4, TcpListener};
use std::os::fd::{AsFd, AsRawFd};
use std::time::{SystemTime, UNIX_EPOCH};

/// The ports of the listeners; those of the clients are this much higher.
const PORTS: [u16; 4] = [41_001, 41_002, 41_003, 41_004];
const DISTANCE: u16 = 1_000;
/// The lengths of the header of the loopback interface, and of an IPv4 header without options.
const LINK_HEADER: usize = 14;
const IP_HEADER: usize = 20;
/// TCP's flags SYN and ACK.
const SYN: u8 = 0x02;
const SYN_ACK: u8 = 0x12;

/// The clock of initial sequence numbers.
fn ticks() -> Result<u32, Box<dyn Error>> {
    Ok((SystemTime::now().duration_since(UNIX_EPOCH)?.as_nanos() >> 6) as u32)
}

/// Waits for a packet between two ports with these flags, and returns its sequence number.
fn next_sequence(packets: &impl AsFd, from: u16, to: u16, flags: u8) -> Result<u32, Box<dyn Error>> {
    let mut bytes = [0; 2048];
    loop {
        let length = recv(packets.as_fd().as_raw_fd(), &mut bytes, MsgFlags::empty())?;
        let Some((ip, tcp)) = bytes[..length].get(LINK_HEADER..).and_then(|packet| packet.split_at_checked(IP_HEADER))
        else {
            continue;
        };
        let ports = [from.to_be_bytes(), to.to_be_bytes()].concat();
        if ip[9] == 6 && tcp.len() >= 20 && tcp[..4] == ports && tcp[13] & 0x3f == flags {
            return Ok(u32::from_be_bytes(tcp[4..8].try_into()?));
        }
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let packets = socket(AddressFamily::Packet, SockType::Raw, SockFlag::SOCK_CLOEXEC, SockProtocol::EthAll)?;
    for port in PORTS {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port))?;
        let client = rustix::net::socket(rustix::net::AddressFamily::INET, rustix::net::SocketType::STREAM, None)?;
        rustix::net::sockopt::set_socket_reuseaddr(&client, true)?;
        rustix::net::bind(&client, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, port + DISTANCE))?;
        let clock = ticks()?;
        rustix::net::connect(&client, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, port))?;
        let isn = next_sequence(&packets, port + DISTANCE, port, SYN)?;
        let cookie = next_sequence(&packets, port, port + DISTANCE, SYN_ACK)?;
        // A reset, so that the same ports can be used again at once.
        rustix::net::sockopt::set_socket_linger(&client, Some(std::time::Duration::ZERO))?;
        drop((client, listener));
        println!("isn {} cookie {}", isn.wrapping_sub(clock), cookie.wrapping_sub(isn) & 0x00ff_ffff);
    }
    Ok(())
}
