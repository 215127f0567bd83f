//! Closes connections with the kernel's sock_diag(7), which needs CONFIG_INET_DIAG_DESTROY.

use std::io;
use std::net::{IpAddr, Ipv6Addr};

use super::netlink::{HEADER, NetlinkMessage, NetlinkSocket, REQUEST_ACK, REQUEST_DUMP};

const SOCK_DIAG_BY_FAMILY: u16 = 20;
const SOCK_DESTROY: u16 = 21;
/// The length of struct inet_diag_sockid in bytes.
const SOCKET_ID: usize = 48;
/// All states of TCP (net/tcp_states.h) but CLOSE and LISTEN.
const CONNECTION_STATES: u32 = 0x1ffe & !(1 << 7) & !(1 << 10);
/// The state of a UDP socket that is connected.
const CONNECTED: u32 = 1 << 1;

/// The number of connections that are closed before the next ones are listed: a container may have any number.
const BATCH: usize = 4096;

/// A kind of socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct SocketKind {
    family: u8,
    protocol: u8,
    /// A bit for each state.
    states: u32,
}

const IPV4: u8 = 2;
const IPV6: u8 = 10;
const TCP: u8 = 6;
const UDP: u8 = 17;

const KINDS: [SocketKind; 4] = [
    SocketKind { family: IPV4, protocol: TCP, states: CONNECTION_STATES },
    SocketKind { family: IPV6, protocol: TCP, states: CONNECTION_STATES },
    SocketKind { family: IPV4, protocol: UDP, states: CONNECTED },
    SocketKind { family: IPV6, protocol: UDP, states: CONNECTED },
];

/// A socket that the kernel has listed.
#[derive(Debug, PartialEq, Eq)]
struct Connection {
    /// struct inet_diag_sockid.
    id: [u8; SOCKET_ID],
    local: IpAddr,
    peer: IpAddr,
}

impl Connection {
    /// Whether both ends are in this network namespace.
    fn is_internal(&self) -> bool {
        self.local.is_loopback() && self.peer.is_loopback()
    }
}

/// Closes all TCP connections and connected UDP sockets of the network namespace, but those between loopback addresses. Their owners get
/// ECONNABORTED. Returns the number of closed sockets. Sockets that listen stay.
pub fn close_connections() -> io::Result<usize> {
    let netlink = NetlinkSocket::open_sock_diag()?;
    let mut closed = 0;
    for kind in KINDS {
        loop {
            let found = list_external(&netlink, kind)?;
            let mut closed_now = 0;
            for connection in &found {
                match netlink.exchange(&destroy(kind, &connection.id), |_| ()) {
                    Ok(()) => closed_now += 1,
                    // It has ended meanwhile.
                    Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {}
                    Err(error) => return Err(error),
                }
            }
            closed += closed_now;
            match found.len() < BATCH {
                true => break,
                false if closed_now > 0 => {}
                false => return Err(io::Error::other("connections do not close")),
            }
        }
    }
    Ok(closed)
}

/// Returns the first [`BATCH`] sockets that are connected to elsewhere.
fn list_external(netlink: &NetlinkSocket, kind: SocketKind) -> io::Result<Vec<Connection>> {
    let mut found = Vec::new();
    netlink.exchange(&list(kind), |message| {
        let connection = read_connection(kind, message).filter(|connection| !connection.is_internal());
        found.extend(connection.filter(|_| found.len() < BATCH));
    })?;
    Ok(found)
}

/// Returns struct inet_diag_req_v2.
fn request(kind: SocketKind, id: &[u8; SOCKET_ID]) -> Vec<u8> {
    let SocketKind { family, protocol, states } = kind;
    [&[family, protocol, 0, 0][..], &states.to_ne_bytes(), id].concat()
}

fn list(kind: SocketKind) -> Vec<u8> {
    NetlinkMessage::new(SOCK_DIAG_BY_FAMILY, REQUEST_DUMP, &request(kind, &[0; SOCKET_ID])).finish()
}

fn destroy(kind: SocketKind, id: &[u8; SOCKET_ID]) -> Vec<u8> {
    NetlinkMessage::new(SOCK_DESTROY, REQUEST_ACK, &request(kind, id)).finish()
}

/// Reads struct inet_diag_msg.
fn read_connection(kind: SocketKind, message: &[u8]) -> Option<Connection> {
    let id: [u8; SOCKET_ID] = message.get(HEADER + 4..)?.get(..SOCKET_ID)?.try_into().ok()?;
    let address = |at: usize| -> Option<IpAddr> {
        let bytes: [u8; 16] = id.get(at..at + 16)?.try_into().ok()?;
        match kind.family {
            IPV4 => Some(IpAddr::from(<[u8; 4]>::try_from(bytes.get(..4)?).ok()?)),
            // An IPv4 address in the form of IPv6 becomes one of IPv4.
            _ => Some(Ipv6Addr::from(bytes).to_canonical()),
        }
    };
    Some(Connection { id, local: address(4)?, peer: address(20)? })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn requests_have_the_kernels_layout() {
        let bytes = list(KINDS[0]);
        assert_eq!(bytes.len(), 16 + 56);
        assert_eq!(bytes[..8], [72, 0, 0, 0, 20, 0, 1, 3]);
        assert_eq!(bytes[16..24], [2, 6, 0, 0, 0x7e, 0x1b, 0, 0]);
        let bytes = destroy(KINDS[3], &[9; SOCKET_ID]);
        assert_eq!((&bytes[4..8], &bytes[16..24]), (&[21, 0, 5, 0][..], &[10, 17, 0, 0, 2, 0, 0, 0][..]));
        assert_eq!(bytes[24..], [9; SOCKET_ID]);
    }

    #[test]
    fn only_connections_inside_the_namespace_stay() {
        let of = |local: &str, peer: &str| {
            let (local, peer): (IpAddr, IpAddr) = (local.parse().unwrap(), peer.parse().unwrap());
            let octets = |address: IpAddr| match address {
                IpAddr::V4(address) => [&address.octets()[..], &[0; 12]].concat(),
                IpAddr::V6(address) => address.octets().to_vec(),
            };
            let kind = if local.is_ipv4() { KINDS[0] } else { KINDS[1] };
            let message = [vec![0; HEADER + 4 + 4], octets(local), octets(peer), vec![0; 12 + 20]].concat();
            read_connection(kind, &message).unwrap().is_internal()
        };
        assert!(of("127.0.0.1", "127.0.0.2") && of("::1", "::1") && of("::ffff:127.0.0.1", "::ffff:127.0.0.1"));
        assert!(!of("10.0.0.2", "10.0.0.3") && !of("10.0.0.2", "127.0.0.1") && !of("fd00::2", "fd00::2"));
        assert!(!of("::ffff:10.0.0.2", "::ffff:127.0.0.1"));
        assert_eq!(read_connection(KINDS[0], &[0; HEADER + 4 + SOCKET_ID - 1]), None);
    }

    #[test]
    fn the_kernel_lists_a_connection() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let port = stream.local_addr().unwrap().port().to_be_bytes();
        let mut found = Vec::new();
        let listed = NetlinkSocket::open_sock_diag().and_then(|netlink| {
            netlink.exchange(&list(KINDS[0]), |message| found.extend(read_connection(KINDS[0], message)))
        });
        if let Err(error) = listed {
            return println!("skipped: no sock_diag here: {error}");
        }
        assert!(found.iter().any(|connection| connection.id[..2] == port && connection.is_internal()), "{found:?}");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(128))]
        #[test]
        fn any_answer_is_read_without_panic(bytes in proptest::collection::vec(any::<u8>(), 0..128)) {
            for kind in KINDS {
                let _ = read_connection(kind, &bytes);
            }
        }
    }
}
