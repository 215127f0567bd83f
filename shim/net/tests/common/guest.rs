//! Simulates a guest from the network's point of view: reads and writes frames on a tap.
#![allow(dead_code, reason = "each test binary uses a part")]

use crate::common::LIMIT;
use nacelle_base::net::Mac;
use nacelle_net::Tap;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::fs::File;
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::AsFd;
use std::time::Instant;

/// The length of the virtio-net header before each frame of a new tap.
const HEADER: usize = 10;
const BROADCAST: Mac = [0xff; 6];
/// An EtherType for experiments. A frame of it ends the wait of a test.
const MARK: [u8; 2] = [0x88, 0xb5];

pub struct Guest {
    tap: File,
    pub mac: Mac,
    pub v4: Ipv4Addr,
    pub v6: Option<Ipv6Addr>,
}

/// A frame that a guest received.
#[derive(Debug, PartialEq, Eq)]
pub enum Seen {
    ArpRequest { from: Mac, who: Ipv4Addr, tell: Ipv4Addr },
    ArpReply { who: Ipv4Addr, is: Mac },
    EchoRequest { from: Mac, source: Ipv4Addr, number: u16 },
    EchoReply { source: Ipv4Addr, number: u16 },
    Solicitation { who: Ipv6Addr },
    Advertisement { who: Ipv6Addr },
    Udp { port: u16, payload: Vec<u8> },
    Mark,
    Other,
}

impl Guest {
    pub fn new(tap: Tap, mac: Mac, ips: &[IpAddr]) -> Guest {
        let v4 = ips.iter().find_map(|ip| if let IpAddr::V4(v4) = ip { Some(*v4) } else { None }).unwrap();
        let v6 = ips.iter().find_map(|ip| if let IpAddr::V6(v6) = ip { Some(*v6) } else { None });
        Guest { tap: tap.fd.into(), mac, v4, v6 }
    }

    fn send(&self, to: Mac, ether_type: [u8; 2], payload: &[u8]) {
        let mut frame = vec![0; HEADER];
        frame.extend(to);
        frame.extend(self.mac);
        frame.extend(ether_type);
        frame.extend(payload);
        (&self.tap).write_all(&frame).unwrap();
    }

    pub fn mark(&self, to: Mac) {
        self.send(to, MARK, &[0; 46]);
    }

    fn arp(&self, to: Mac, operation: u8, their_mac: Mac, their_ip: Ipv4Addr) {
        let mut arp = vec![0, 1, 8, 0, 6, 4, 0, operation];
        arp.extend(self.mac);
        arp.extend(self.v4.octets());
        arp.extend(their_mac);
        arp.extend(their_ip.octets());
        self.send(to, [8, 6], &arp);
    }

    pub fn ask_arp(&self, who: Ipv4Addr) {
        self.arp(BROADCAST, 1, [0; 6], who);
    }

    pub fn answer_arp(&self, to: Mac, tell: Ipv4Addr) {
        self.arp(to, 2, to, tell);
    }

    fn icmp(&self, to: Mac, destination: Ipv4Addr, kind: u8, number: u16) {
        let mut icmp = vec![kind, 0, 0, 0, 0x4e, 0x61];
        icmp.extend(number.to_be_bytes());
        icmp.extend(*b"nacelle");
        let sum = checksum(&icmp);
        icmp[2..4].copy_from_slice(&sum);
        let length = u16::try_from(20 + icmp.len()).unwrap().to_be_bytes();
        let mut packet = vec![0x45, 0, length[0], length[1], 0, 0, 0, 0, 64, 1, 0, 0];
        packet.extend(self.v4.octets());
        packet.extend(destination.octets());
        let sum = checksum(&packet);
        packet[10..12].copy_from_slice(&sum);
        packet.extend(icmp);
        self.send(to, [8, 0], &packet);
    }

    /// Sends a datagram without a checksum; `piece` is the fragment field of the IP header.
    pub fn udp(&self, to: Mac, destination: Ipv4Addr, port: u16, payload: &[u8], piece: [u8; 2]) {
        let udp = u16::try_from(8 + payload.len()).unwrap();
        let length = (20 + udp).to_be_bytes();
        let mut packet = vec![0x45, 0, length[0], length[1], 0, 0, piece[0], piece[1], 64, 17, 0, 0];
        packet.extend(self.v4.octets());
        packet.extend(destination.octets());
        let sum = checksum(&packet);
        packet[10..12].copy_from_slice(&sum);
        packet.extend([0, 68]);
        packet.extend(port.to_be_bytes());
        packet.extend(udp.to_be_bytes());
        packet.extend([0, 0]);
        packet.extend(payload);
        self.send(to, [8, 0], &packet);
    }

    pub fn ping(&self, to: Mac, destination: Ipv4Addr, number: u16) {
        self.icmp(to, destination, 8, number);
    }

    pub fn pong(&self, to: Mac, destination: Ipv4Addr, number: u16) {
        self.icmp(to, destination, 0, number);
    }

    /// Sends a neighbour solicitation for an IPv6 address.
    pub fn ask_v6(&self, who: Ipv6Addr) {
        let tail = &who.octets()[13..];
        let group = [&[0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0xff], tail].concat();
        let mut icmp = vec![135, 0, 0, 0, 0, 0, 0, 0];
        icmp.extend(who.octets());
        icmp.extend([1, 1]);
        icmp.extend(self.mac);
        let source = self.v6.unwrap().octets();
        let pseudo = [&source, group.as_slice(), &[0, 0, 0, 32, 0, 0, 0, 58], &icmp].concat();
        icmp[2..4].copy_from_slice(&checksum(&pseudo));
        let mut packet = vec![0x60, 0, 0, 0, 0, 32, 58, 255];
        packet.extend(source);
        packet.extend(group);
        packet.extend(icmp);
        self.send([0x33, 0x33, 0xff, tail[0], tail[1], tail[2]], [0x86, 0xdd], &packet);
    }

    /// Returns the next frame.
    pub fn next(&self) -> Seen {
        let end = Instant::now() + LIMIT;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "no frame in time");
            let mut fds = [PollFd::new(self.tap.as_fd(), PollFlags::POLLIN)];
            if poll(&mut fds, PollTimeout::try_from(left).unwrap()).unwrap_or(0) > 0 {
                break;
            }
        }
        let mut buffer = [0; 4096];
        let length = (&self.tap).read(&mut buffer).unwrap();
        read(&buffer[HEADER..length]).unwrap_or(Seen::Other)
    }

    /// Returns all frames up to and including the first one that matches.
    pub fn until(&self, fits: impl Fn(&Seen) -> bool) -> Vec<Seen> {
        let mut all = Vec::new();
        loop {
            all.push(self.next());
            if fits(&all[all.len() - 1]) {
                return all;
            }
        }
    }
}

fn read(frame: &[u8]) -> Option<Seen> {
    let from = Mac::try_from(frame.get(6..12)?).ok()?;
    let body = frame.get(14..)?;
    let v4 = |at: usize| Some(Ipv4Addr::from(<[u8; 4]>::try_from(body.get(at..at + 4)?).ok()?));
    let number = |at: usize| Some(u16::from_be_bytes(<[u8; 2]>::try_from(body.get(at..at + 2)?).ok()?));
    Some(match (<[u8; 2]>::try_from(frame.get(12..14)?).ok()?, body) {
        (MARK, _) => Seen::Mark,
        ([8, 6], [_, _, _, _, _, _, _, 1, ..]) => Seen::ArpRequest { from, who: v4(24)?, tell: v4(14)? },
        ([8, 6], [_, _, _, _, _, _, _, 2, ..]) => {
            Seen::ArpReply { who: v4(14)?, is: body.get(8..14)?.try_into().ok()? }
        }
        ([8, 0], [0x45, _, _, _, _, _, _, _, _, 1, ..]) => match body.get(20)? {
            8 => Seen::EchoRequest { from, source: v4(12)?, number: number(26)? },
            0 => Seen::EchoReply { source: v4(12)?, number: number(26)? },
            _ => Seen::Other,
        },
        ([8, 0], [0x45, _, _, _, _, _, _, _, _, 17, ..]) => {
            let end = usize::from(number(2)?);
            Seen::Udp { port: number(22)?, payload: body.get(28..end)?.to_vec() }
        }
        ([0x86, 0xdd], [_, _, _, _, _, _, 58, ..]) => {
            let who = || Some(Ipv6Addr::from(<[u8; 16]>::try_from(body.get(48..64)?).ok()?));
            match body.get(40)? {
                135 => Seen::Solicitation { who: who()? },
                136 => Seen::Advertisement { who: who()? },
                _ => Seen::Other,
            }
        }
        _ => Seen::Other,
    })
}

fn checksum(bytes: &[u8]) -> [u8; 2] {
    let words = bytes.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0)));
    let mut sum: u32 = words.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    (!u16::try_from(sum).unwrap()).to_be_bytes()
}
