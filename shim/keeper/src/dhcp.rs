//! Answers the DHCP requests of a guest (RFC 2131; options of RFC 2132, RFC 3442 for routes, RFC 3397 for the search list) with
//! the address that CNI gave the pod, on the card whose frames are read here. All functions except [`serve`] are pure. All bytes
//! come from the guest: each is validated, and frames that are not requests of this card are ignored.

use crate::sys;
use nacelle_base::retry::retry_interrupted;
use nacelle_proto::agent::BootConfig;
use nacelle_proto::common::Route;
use nix::sys::socket::{MsgFlags, recv, send};
use std::io;
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, OwnedFd};

/// The largest frame that is read, in bytes: requests are small, whatever the network's MTU is.
const MAX_FRAME: usize = 2048;
/// The lease time in seconds. It is short because a VM that is resumed in another pod must ask again soon.
const LEASE_SECONDS: u32 = 3600;
/// The server's address if the network has no gateway.
const FALLBACK_SERVER: Ipv4Addr = Ipv4Addr::new(169, 254, 1, 1);
/// The hardware address of answers; a locally administered one.
const SERVER_MAC: [u8; 6] = [2, b'd', b'h', b'c', b'p', 1];
/// The size in bytes that every client must accept: 576 bytes minus the IP and UDP headers (RFC 2131, section 2).
const MIN_MESSAGE: usize = 548;
/// The maximum size of an answer in bytes, whatever the client accepts.
pub(crate) const MAX_MESSAGE: usize = 1400;
/// The offset of the options in a message.
const HEADER_LENGTH: usize = 240;
const MAGIC_COOKIE: [u8; 4] = [99, 130, 83, 99];
const BROADCAST_FLAG: u16 = 0x8000;

/// The configuration that the answers contain, for one card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lease {
    mac: [u8; 6],
    address: Ipv4Addr,
    prefix: u8,
    /// The routes: destination, prefix length, gateway (0.0.0.0 for on the link), in an order in which they can be added.
    routes: Vec<(Ipv4Addr, u8, Ipv4Addr)>,
    dns: Vec<Ipv4Addr>,
    searches: Vec<String>,
    mtu: u16,
    hostname: String,
}

impl Lease {
    /// Returns the lease of the n-th interface of the pod for the card with this address; `None` if CNI gave the interface no
    /// IPv4 address.
    pub fn new(network: &BootConfig, n: usize, mac: [u8; 6]) -> Option<Lease> {
        let interface = network.interfaces.get(n)?;
        let (address, prefix) = interface.addresses.iter().find_map(|address| parse_prefix(address))?;
        let routes_of_interface = network.routes.iter().filter(|route| route.interface == interface.name);
        let mut routes: Vec<_> = routes_of_interface.filter_map(|route: &Route| parse_route(route)).collect();
        // A gateway that is on no link needs a route of its own first.
        let is_on_link = |gateway: Ipv4Addr, routes: &[(Ipv4Addr, u8, Ipv4Addr)]| {
            is_in_network(gateway, address, prefix)
                || routes.iter().any(|(to, bits, via)| via.is_unspecified() && is_in_network(gateway, *to, *bits))
        };
        let mut unreachable: Vec<Ipv4Addr> = routes.iter().map(|(_, _, via)| *via).collect();
        unreachable.retain(|via| !via.is_unspecified() && !is_on_link(*via, &routes));
        unreachable.sort_unstable();
        unreachable.dedup();
        routes.splice(0..0, unreachable.into_iter().map(|gateway| (gateway, 32, Ipv4Addr::UNSPECIFIED)));
        let dns = network.dns.clone().unwrap_or_default();
        Some(Lease {
            mac,
            address,
            prefix,
            routes,
            dns: dns.servers.iter().filter_map(|server| server.parse().ok()).collect(),
            searches: dns.searches,
            mtu: u16::try_from(interface.mtu).unwrap_or(0),
            hostname: network.hostname.clone(),
        })
    }

    fn default_gateway(&self) -> Option<Ipv4Addr> {
        self.routes.iter().find(|(_, bits, via)| *bits == 0 && !via.is_unspecified()).map(|(_, _, via)| *via)
    }

    fn server(&self) -> Ipv4Addr {
        self.default_gateway().unwrap_or(FALLBACK_SERVER)
    }

    /// Returns the frame that answers this one, if it is a request.
    pub fn reply_to(&self, frame: &[u8]) -> Option<Vec<u8>> {
        let request = DhcpRequest::parse(udp_to_server(frame)?)?;
        if request.mac != self.mac {
            return None;
        }
        let server = self.server();
        let kind = match request.kind {
            MessageType::Discover => MessageType::PendingDisk,
            MessageType::Inform => MessageType::Ack,
            // The client has chosen another server.
            MessageType::Request if request.server.is_some_and(|chosen| chosen != server) => return None,
            MessageType::Request => match request.requested_address.or(request.client_address) {
                Some(requested_address) if requested_address == self.address => MessageType::Ack,
                _ => MessageType::Nak,
            },
            MessageType::PendingDisk | MessageType::Ack | MessageType::Nak => return None,
        };
        let message = self.message(&request, kind);
        let (to_ip, to_mac) = match request.client_address {
            Some(client_address) if kind != MessageType::Nak => (client_address, self.mac),
            _ if kind == MessageType::Nak || request.flags & BROADCAST_FLAG != 0 => (Ipv4Addr::BROADCAST, [0xff; 6]),
            _ => (self.address, self.mac),
        };
        Some(build_frame(&message, server, to_ip, to_mac))
    }

    fn message(&self, request: &DhcpRequest, kind: MessageType) -> Vec<u8> {
        let mut message = vec![2, 1, 6, 0];
        message.extend(request.transaction);
        message.extend([0, 0]);
        message.extend(request.flags.to_be_bytes());
        let routes_of_interface = if matches!((request.kind, kind), (MessageType::Inform, _) | (_, MessageType::Nak)) {
            Ipv4Addr::UNSPECIFIED
        } else {
            self.address
        };
        let client_address = if kind == MessageType::Nak { None } else { request.client_address };
        message.extend(client_address.unwrap_or(Ipv4Addr::UNSPECIFIED).octets());
        message.extend(routes_of_interface.octets());
        // The boot server and the relay: none.
        message.extend([0; 8]);
        message.extend(request.mac);
        message.resize(HEADER_LENGTH - MAGIC_COOKIE.len(), 0);
        message.extend(MAGIC_COOKIE);
        let mut options = DhcpOptions { message, limit: request.limit };
        options.add(53, &[kind as u8]);
        options.add(54, &self.server().octets());
        if kind != MessageType::Nak {
            if request.kind != MessageType::Inform {
                options.add(51, &LEASE_SECONDS.to_be_bytes());
            }
            options.add(1, &netmask(self.prefix).octets());
            if let Some(gateway) = self.default_gateway() {
                options.add(3, &gateway.octets());
            }
            let dns: Vec<u8> = self.dns.iter().flat_map(Ipv4Addr::octets).collect();
            options.add(6, &dns);
            if self.mtu >= 68 {
                options.add(26, &self.mtu.to_be_bytes());
            }
            // Clients that support this option ignore the gateway option.
            let routes: Vec<u8> = self.routes.iter().flat_map(encode_route).collect();
            options.add(121, &routes);
            options.add(12, self.hostname.as_bytes());
            let searches: Vec<u8> = self.searches.iter().filter_map(|name| encode_labels(name)).flatten().collect();
            options.add(119, &searches);
        }
        options.finish()
    }
}

/// The options of a message that is being built.
struct DhcpOptions {
    message: Vec<u8>,
    limit: usize,
}

impl DhcpOptions {
    /// Adds an option. Leaves out an empty one and one that does not fit: the most important ones come first. Options are never
    /// truncated, because a truncated list of routes is a wrong list.
    fn add(&mut self, code: u8, value: &[u8]) {
        let Ok(length) = u8::try_from(value.len()) else { return };
        if length > 0 && self.message.len() + 3 + value.len() <= self.limit {
            self.message.extend([code, length]);
            self.message.extend(value);
        }
    }

    fn finish(mut self) -> Vec<u8> {
        self.message.push(255);
        // Some clients require the minimum size of BOOTP.
        if self.message.len() < 300 {
            self.message.resize(300, 0);
        }
        self.message
    }
}

/// The message type (option 53).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MessageType {
    Discover = 1,
    PendingDisk = 2,
    Request = 3,
    Ack = 5,
    Nak = 6,
    Inform = 8,
}

/// A client's request.
#[derive(Debug, PartialEq, Eq)]
struct DhcpRequest {
    kind: MessageType,
    transaction: [u8; 4],
    flags: u16,
    /// The address that the client has already.
    client_address: Option<Ipv4Addr>,
    mac: [u8; 6],
    requested_address: Option<Ipv4Addr>,
    server: Option<Ipv4Addr>,
    /// The maximum message size that the client accepts.
    limit: usize,
}

impl DhcpRequest {
    /// Parses a message. Returns `None` if it is not a request that is answered.
    fn parse(message: &[u8]) -> Option<DhcpRequest> {
        let (head, mut options) = message.split_at_checked(HEADER_LENGTH)?;
        // BOOTREQUEST over Ethernet.
        if head.get(..3)? != [1, 1, 6] || head.get(HEADER_LENGTH - 4..)? != MAGIC_COOKIE {
            return None;
        }
        let (mut kind, mut requested_address, mut server, mut limit) = (None, None, None, MIN_MESSAGE);
        while let [code, rest @ ..] = options {
            match code {
                0 => {
                    options = rest;
                    continue;
                }
                255 => break,
                _ => {}
            }
            let [length, rest @ ..] = rest else { return None };
            let (value, rest) = rest.split_at_checked(usize::from(*length))?;
            options = rest;
            match (code, value) {
                (53, [1]) => kind = Some(MessageType::Discover),
                (53, [3]) => kind = Some(MessageType::Request),
                (53, [8]) => kind = Some(MessageType::Inform),
                (53, _) => return None,
                (50, _) => requested_address = Some(parse_address(value)?),
                (54, _) => server = Some(parse_address(value)?),
                // The value includes the IP and UDP headers.
                (57, [high, low]) => {
                    limit = usize::from(u16::from_be_bytes([*high, *low]))
                        .saturating_sub(28)
                        .clamp(MIN_MESSAGE, MAX_MESSAGE);
                }
                _ => {}
            }
        }
        let client_address = parse_address(head.get(12..16)?).filter(|address| !address.is_unspecified());
        Some(DhcpRequest {
            kind: kind?,
            transaction: head.get(4..8)?.try_into().ok()?,
            flags: u16::from_be_bytes(head.get(10..12)?.try_into().ok()?),
            client_address,
            mac: head.get(28..34)?.try_into().ok()?,
            requested_address,
            server,
            limit,
        })
    }
}

fn parse_address(bytes: &[u8]) -> Option<Ipv4Addr> {
    <[u8; 4]>::try_from(bytes).ok().map(Ipv4Addr::from)
}

/// Returns the UDP payload of a frame to the server port. The checksum is not verified, because a card may have been expected to
/// complete it.
fn udp_to_server(frame: &[u8]) -> Option<&[u8]> {
    let packet = frame.get(14..).filter(|_| frame.get(12..14) == Some(&[8, 0]))?;
    let [first, _, high, low, ..] = packet else { return None };
    let header_length = usize::from(first & 0xf) * 4;
    if first >> 4 != 4 || header_length < 20 {
        return None;
    }
    let packet = packet.get(..usize::from(u16::from_be_bytes([*high, *low])))?;
    // A fragment has an offset other than 0, or the flag for more fragments.
    let fragment = u16::from_be_bytes(packet.get(6..8)?.try_into().ok()?) & 0x3fff;
    if fragment != 0 || packet.get(9) != Some(&17) {
        return None;
    }
    let datagram = packet.get(header_length..)?;
    let length = usize::from(u16::from_be_bytes(datagram.get(4..6)?.try_into().ok()?));
    datagram.get(8..length).filter(|_| datagram.get(2..4) == Some(&[0, 67]))
}

/// Returns a frame with a message to the client port.
fn build_frame(message: &[u8], from: Ipv4Addr, to: Ipv4Addr, mac: [u8; 6]) -> Vec<u8> {
    let udp = u16::try_from(message.len() + 8).unwrap_or(u16::MAX);
    let mut head = vec![0x45, 0];
    head.extend((udp.saturating_add(20)).to_be_bytes());
    // Unfragmented; TTL 64; UDP; the checksum follows below.
    head.extend([0, 0, 0x40, 0, 64, 17, 0, 0]);
    head.extend(from.octets());
    head.extend(to.octets());
    let sum = checksum(&head);
    head.splice(10..12, sum.to_be_bytes());
    let mut frame = Vec::with_capacity(14 + 20 + 8 + message.len());
    frame.extend(mac);
    frame.extend(SERVER_MAC);
    frame.extend([8, 0]);
    frame.extend(head);
    frame.extend([0, 67, 0, 68]);
    frame.extend(udp.to_be_bytes());
    // IPv4 permits UDP without a checksum.
    frame.extend([0, 0]);
    frame.extend(message);
    frame
}

/// Returns the checksum of an IP header (RFC 1071).
fn checksum(head: &[u8]) -> u16 {
    let words = head.chunks_exact(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]])));
    let sum = words.sum::<u32>();
    let folded = (sum & 0xffff) + (sum >> 16);
    !u16::try_from((folded & 0xffff) + (folded >> 16)).unwrap_or(u16::MAX)
}

fn netmask(prefix: u8) -> Ipv4Addr {
    Ipv4Addr::from(u32::MAX.checked_shl(32 - u32::from(prefix.min(32))).unwrap_or(0))
}

fn is_in_network(address: Ipv4Addr, network: Ipv4Addr, prefix: u8) -> bool {
    let mask = u32::from(netmask(prefix));
    u32::from(address) & mask == u32::from(network) & mask
}

/// Parses an address with prefix length, "10.1.0.5/24".
fn parse_prefix(text: &str) -> Option<(Ipv4Addr, u8)> {
    let (address, bits) = text.split_once('/')?;
    Some((address.parse().ok()?, bits.parse().ok().filter(|bits| *bits <= 32)?))
}

fn parse_route(route: &Route) -> Option<(Ipv4Addr, u8, Ipv4Addr)> {
    let (to, bits) = parse_prefix(&route.destination)?;
    let via = if route.gateway.is_empty() { Ipv4Addr::UNSPECIFIED } else { route.gateway.parse().ok()? };
    Some((to, bits, via))
}

/// Encodes a route with only the significant bytes of the destination (RFC 3442).
fn encode_route((to, bits, via): &(Ipv4Addr, u8, Ipv4Addr)) -> Vec<u8> {
    let kept = to.octets().into_iter().take(usize::from(bits.div_ceil(8)));
    [*bits].into_iter().chain(kept).chain(via.octets()).collect()
}

/// Encodes a domain name as DNS labels.
fn encode_labels(name: &str) -> Option<Vec<u8>> {
    let mut written = Vec::new();
    for label in name.trim_end_matches('.').split('.') {
        let length = u8::try_from(label.len()).ok().filter(|length| (1..=63).contains(length))?;
        written.push(length);
        written.extend(label.bytes());
    }
    written.push(0);
    Some(written)
}

/// Answers requests on a packet socket of the card's tap, until the tap is gone.
pub async fn serve(socket: OwnedFd, lease: Lease) -> io::Result<()> {
    let socket = sys::register(socket)?;
    let mut frame = [0; MAX_FRAME];
    loop {
        let mut ready = socket.readable().await?;
        let received = ready
            .try_io(|socket| Ok(retry_interrupted(|| recv(socket.as_raw_fd(), &mut frame, MsgFlags::MSG_DONTWAIT))?));
        let length = match received {
            // The frame is gone: wait for the next one.
            Err(_would_block) => continue,
            Ok(Ok(length)) => length,
            // The tap is not up yet, or not any more: the kernel reports that once.
            Ok(Err(error)) if error.raw_os_error() == Some(nix::libc::ENETDOWN) => continue,
            Ok(Err(error)) => return Err(error),
        };
        if let Some(answer) = frame.get(..length).and_then(|frame| lease.reply_to(frame)) {
            // A guest that misses the answer asks again.
            let _ = retry_interrupted(|| send(socket.as_raw_fd(), &answer, MsgFlags::MSG_DONTWAIT));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacelle_proto::common::{Dns, Interface};
    use proptest::prelude::*;

    const GUEST: [u8; 6] = [2, 0, 0, 0, 0, 0xab];

    fn lease() -> Lease {
        let route = |destination: &str, gateway: &str| Route {
            destination: destination.into(),
            gateway: gateway.into(),
            interface: "eth0".into(),
            ..Route::default()
        };
        let network = BootConfig {
            hostname: "db".into(),
            interfaces: vec![Interface {
                name: "eth0".into(),
                mac: vec![],
                mtu: 1450,
                addresses: vec!["fd00::5/64".into(), "10.1.0.5/24".into()],
                ..Interface::default()
            }],
            routes: vec![route("0.0.0.0/0", "10.1.0.1"), route("10.9.128.0/17", "10.7.0.1"), route("::/0", "fd00::1")],
            dns: Some(Dns {
                servers: vec!["10.96.0.10".into(), "fd00::a".into()],
                searches: vec!["a.svc".into(), "svc".into()],
                options: vec![],
            }),
            ..Default::default()
        };
        Lease::new(&network, 0, GUEST).unwrap()
    }

    /// Returns a frame with a request.
    fn build_request(kind: u8, client_address: [u8; 4], options: &[u8]) -> Vec<u8> {
        let mut message = vec![1, 1, 6, 0, 0xde, 0xad, 0xbe, 0xef, 0, 0, 0, 0];
        message.extend(client_address);
        message.extend([0; 12]);
        message.extend(GUEST);
        message.resize(HEADER_LENGTH - 4, 0);
        message.extend(MAGIC_COOKIE);
        message.extend([53, 1, kind, 0]);
        message.extend(options);
        message.push(255);
        let mut frame = build_frame(&message, Ipv4Addr::UNSPECIFIED, Ipv4Addr::BROADCAST, [0xff; 6]);
        frame.splice(34..38, [0, 68, 0, 67]);
        frame
    }

    /// Returns the type, the offered address and the options of an answer.
    fn parse_reply(frame: &[u8]) -> (u8, Ipv4Addr, Vec<(u8, Vec<u8>)>) {
        let message = &frame[42..];
        assert_eq!(
            (&message[..8], frame[34..38].to_vec()),
            (&[2, 1, 6, 0, 0xde, 0xad, 0xbe, 0xef][..], vec![0, 67, 0, 68])
        );
        assert_eq!(checksum(&frame[14..34]), 0);
        let mut options = Vec::new();
        let mut rest = &message[HEADER_LENGTH..];
        while rest[0] != 255 {
            let length = usize::from(rest[1]);
            options.push((rest[0], rest[2..2 + length].to_vec()));
            rest = &rest[2 + length..];
        }
        (options[0].1[0], parse_address(&message[16..20]).unwrap(), options)
    }

    fn option(options: &[(u8, Vec<u8>)], code: u8) -> &[u8] {
        &options.iter().find(|(known, _)| *known == code).unwrap().1
    }

    #[test]
    fn a_dhcp_reply_contains_the_pods_address_and_options() {
        let lease = lease();
        let offer = lease.reply_to(&build_request(1, [0; 4], &[57, 2, 5, 220])).unwrap();
        let (kind, address, options) = parse_reply(&offer);
        assert_eq!((kind, address.to_string()), (2, "10.1.0.5".to_owned()));
        assert_eq!(&offer[..6], GUEST);
        for (code, value) in [
            (54, &[10, 1, 0, 1][..]),
            (51, &[0, 0, 14, 16]),
            (1, &[255, 255, 255, 0]),
            (3, &[10, 1, 0, 1]),
            (6, &[10, 96, 0, 10]),
            (26, &[5, 170]),
            // The gateway that is on no link, the default route, the network behind the first gateway.
            (121, &[32, 10, 7, 0, 1, 0, 0, 0, 0, 0, 10, 1, 0, 1, 17, 10, 9, 128, 10, 7, 0, 1]),
            (12, b"db"),
            (119, b"\x01a\x03svc\0\x03svc\0"),
        ] {
            assert_eq!(option(&options, code), value, "option {code}");
        }
        let wants = |requested_address: [u8; 4], server: [u8; 4]| {
            let options = [&[50, 4][..], &requested_address, &[54, 4], &server].concat();
            lease.reply_to(&build_request(3, [0; 4], &options)).map(|frame| parse_reply(&frame).0)
        };
        assert_eq!(wants([10, 1, 0, 5], [10, 1, 0, 1]), Some(5));
        assert_eq!(wants([10, 1, 0, 6], [10, 1, 0, 1]), Some(6));
        assert_eq!(wants([10, 1, 0, 5], [10, 1, 0, 2]), None, "another server was chosen");
        // A renewal, and a DHCPINFORM.
        let more = lease.reply_to(&build_request(3, [10, 1, 0, 5], &[])).unwrap();
        assert_eq!((parse_reply(&more).0, &more[30..34]), (5, &[10, 1, 0, 5][..]));
        let (kind, address, options) = parse_reply(&lease.reply_to(&build_request(8, [10, 1, 0, 5], &[])).unwrap());
        assert_eq!((kind, address, options.iter().any(|(code, _)| *code == 51)), (5, Ipv4Addr::UNSPECIFIED, false));
    }

    #[test]
    fn frames_that_are_no_dhcp_request_of_this_card_are_ignored() {
        let lease = lease();
        let good = build_request(1, [0; 4], &[]);
        assert!(lease.reply_to(&good).is_some());
        // Other protocols, versions, fragments, ports, answers, cards, cookies.
        for at in [12, 14, 20, 23, 37, 42, 43, 44, 70, 278] {
            let mut bad = good.clone();
            bad[at] ^= 0x11;
            assert_eq!(lease.reply_to(&bad), None, "byte {at}");
        }
        for kind in [2, 4, 5, 7, 9, 255] {
            assert_eq!(lease.reply_to(&build_request(kind, [0; 4], &[])), None);
        }
        for end in 0..good.len() - 2 {
            assert_eq!(lease.reply_to(&good[..end]), None, "{end}");
        }
    }

    #[test]
    fn a_dhcp_reply_does_not_exceed_the_clients_maximum() {
        let mut lease = lease();
        lease.searches = vec!["a".repeat(60); 3];
        lease.hostname = "h".repeat(63);
        lease.routes.extend((0..20).map(|n| (Ipv4Addr::new(10, n, 0, 0), 16, Ipv4Addr::new(10, 1, 0, 1))));
        let least = lease.reply_to(&build_request(1, [0; 4], &[57, 2, 0, 0])).unwrap();
        assert!(least.len() <= 42 + MIN_MESSAGE);
        let (_, _, options) = parse_reply(&least);
        assert!(options.iter().any(|(code, _)| *code == 121) && !options.iter().any(|(code, _)| *code == 119));
    }

    #[test]
    fn an_interface_without_ipv4_has_nothing_to_give() {
        let interface = Interface { addresses: vec!["fd00::5/64".into()], ..Default::default() };
        let network = BootConfig { interfaces: vec![interface], ..Default::default() };
        assert_eq!(Lease::new(&network, 0, GUEST), None);
        assert_eq!(Lease::new(&network, 1, GUEST), None);
    }

    proptest! {
        #[test]
        fn whatever_a_guest_sends_is_answered_in_bounds(
            frame in proptest::collection::vec(any::<u8>(), 0..700),
            options in proptest::collection::vec(any::<u8>(), 0..300),
            kind in any::<u8>(),
        ) {
            let lease = lease();
            for frame in [frame, build_request(kind, [0; 4], &options)] {
                if let Some(answer) = lease.reply_to(&frame) {
                    prop_assert!(answer.len() <= 42 + MAX_MESSAGE);
                    prop_assert!(matches!(told_kind(&answer), 2 | 5 | 6));
                }
            }
        }
    }

    fn told_kind(frame: &[u8]) -> u8 {
        frame[42 + HEADER_LENGTH + 2]
    }
}
