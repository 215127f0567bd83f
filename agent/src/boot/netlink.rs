//! Builds the few rtnetlink messages that configure a guest's network (rtnetlink(7)), sends them, and parses the answers. Sends the messages
//! of other netlink protocols.

use ipnet::IpNet;
use nacelle_base::retry::retry_interrupted;
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, send, socket};
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

/// The length of the header of a message in bytes.
pub(super) const HEADER: usize = 16;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const RTM_NEWLINK: u16 = 16;
const RTM_GETLINK: u16 = 18;
const RTM_NEWADDR: u16 = 20;
const RTM_DELADDR: u16 = 21;
const RTM_GETADDR: u16 = 22;
const RTM_NEWROUTE: u16 = 24;
const RTM_NEWNEIGH: u16 = 28;
pub(super) const REQUEST_ACK: u16 = 1 | 4;
const CREATE_REPLACE: u16 = 0x400 | 0x100;
/// A request for all objects.
pub(super) const REQUEST_DUMP: u16 = 1 | 0x300;
const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;
const IFLA_ADDRESS: u16 = 1;
const IFLA_IFNAME: u16 = 3;
const IFLA_MTU: u16 = 4;
const IFLA_NET_NS_FD: u16 = 28;
const IFLA_PARENT_DEV_BUS_NAME: u16 = 57;

/// A link of the guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetworkLink {
    /// The interface index.
    pub index: u32,
    /// The interface name.
    pub name: String,
    /// The hardware address.
    pub mac: Vec<u8>,
    /// Whether it is a virtio device of the VM, and not a virtual one of the kernel.
    pub virtio: bool,
}

/// An address of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkAddress {
    /// The index of the link.
    pub link: u32,
    /// The address, with the length of its prefix.
    pub net: IpNet,
}

/// Changes of a link.
#[derive(Debug, Default)]
pub struct LinkChange<'a> {
    /// A new name; the link must be down.
    pub name: Option<&'a str>,
    /// A new hardware address.
    pub mac: Option<&'a [u8]>,
    /// A new MTU.
    pub mtu: Option<u32>,
    /// Another network namespace, to which the link is moved.
    pub netns: Option<BorrowedFd<'a>>,
    /// Set the link up.
    pub up: bool,
    /// Set the link down. It loses its routes, its neighbours and the addresses of IPv6.
    pub down: bool,
}

/// A message that is being built.
pub(super) struct NetlinkMessage(Vec<u8>);

impl NetlinkMessage {
    pub(super) fn new(kind: u16, flags: u16, header: &[u8]) -> NetlinkMessage {
        let mut bytes = vec![0; 4];
        bytes.extend_from_slice(&kind.to_ne_bytes());
        bytes.extend_from_slice(&flags.to_ne_bytes());
        bytes.extend_from_slice(&[0; 8]);
        bytes.extend_from_slice(header);
        NetlinkMessage(bytes)
    }

    fn attribute(mut self, kind: u16, value: &[u8]) -> NetlinkMessage {
        let length = u16::try_from(value.len() + 4).unwrap_or(u16::MAX);
        self.0.extend_from_slice(&length.to_ne_bytes());
        self.0.extend_from_slice(&kind.to_ne_bytes());
        self.0.extend_from_slice(value);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
        self
    }

    pub(super) fn finish(mut self) -> Vec<u8> {
        let length = u32::try_from(self.0.len()).unwrap_or(u32::MAX).to_ne_bytes();
        for (to, from) in self.0.iter_mut().zip(length) {
            *to = from;
        }
        self.0
    }
}

/// `change` has the flags that are changed to their values in `flags`.
fn link_header(index: u32, flags: u32, change: u32) -> Vec<u8> {
    [&[0; 4], &index.to_ne_bytes()[..], &flags.to_ne_bytes(), &change.to_ne_bytes()].concat()
}

fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}

fn family(address: IpAddr) -> u8 {
    if address.is_ipv4() { 2 } else { 10 }
}

/// Builds a request for all links.
pub fn get_links() -> Vec<u8> {
    NetlinkMessage::new(RTM_GETLINK, REQUEST_DUMP, &link_header(0, 0, 0)).finish()
}

/// Builds a request that changes a link.
pub fn set_link(index: u32, change: &LinkChange) -> Vec<u8> {
    let header = link_header(index, u32::from(change.up), u32::from(change.up || change.down));
    let mut message = NetlinkMessage::new(RTM_NEWLINK, REQUEST_ACK, &header);
    if let Some(name) = change.name {
        message = message.attribute(IFLA_IFNAME, &[name.as_bytes(), b"\0"].concat());
    }
    if let Some(mac) = change.mac {
        message = message.attribute(IFLA_ADDRESS, mac);
    }
    if let Some(mtu) = change.mtu {
        message = message.attribute(IFLA_MTU, &mtu.to_ne_bytes());
    }
    if let Some(netns) = change.netns {
        message = message.attribute(IFLA_NET_NS_FD, &netns.as_raw_fd().to_ne_bytes());
    }
    message.finish()
}

/// Builds a request that adds an address. IPv6 addresses skip duplicate address detection, so that they work at once.
pub fn add_address(index: u32, net: IpNet) -> Vec<u8> {
    const NODAD: u8 = 2;
    let flags = if net.addr().is_ipv6() { NODAD } else { 0 };
    let header = [&[family(net.addr()), net.prefix_len(), flags, 0][..], &index.to_ne_bytes()].concat();
    let address = octets(net.addr());
    let mut message = NetlinkMessage::new(RTM_NEWADDR, REQUEST_ACK | CREATE_REPLACE, &header);
    message = message.attribute(IFA_LOCAL, &address).attribute(IFA_ADDRESS, &address);
    if let IpNet::V4(net) = net
        && net.prefix_len() < 31
    {
        message = message.attribute(4, &net.broadcast().octets());
    }
    message.finish()
}

/// Builds a request for all addresses of all links.
pub fn get_addresses() -> Vec<u8> {
    NetlinkMessage::new(RTM_GETADDR, REQUEST_DUMP, &[0; 8]).finish()
}

/// Builds a request that removes an address.
pub fn remove_address(address: LinkAddress) -> Vec<u8> {
    let LinkAddress { link, net } = address;
    let header = [&[family(net.addr()), net.prefix_len(), 0, 0][..], &link.to_ne_bytes()].concat();
    NetlinkMessage::new(RTM_DELADDR, REQUEST_ACK, &header).attribute(IFA_LOCAL, &octets(net.addr())).finish()
}

/// Builds a request that adds a permanent entry to a link's neighbour table.
pub fn add_neighbour(index: u32, address: IpAddr, mac: &[u8]) -> Vec<u8> {
    const PERMANENT: u16 = 0x80;
    const UNICAST: u8 = 1;
    let head = [&[family(address), 0, 0, 0][..], &index.to_ne_bytes(), &PERMANENT.to_ne_bytes(), &[0, UNICAST]];
    let message = NetlinkMessage::new(RTM_NEWNEIGH, REQUEST_ACK | CREATE_REPLACE, &head.concat());
    message.attribute(1, &octets(address)).attribute(2, mac).finish()
}

/// A route to add.
#[derive(Clone, Copy, Debug)]
pub struct NewRoute {
    /// The destination network.
    pub destination: IpNet,
    /// The gateway, which counts as reachable on the link even if no address covers it.
    pub gateway: Option<IpAddr>,
    /// The metric (priority).
    pub metric: Option<u32>,
    /// The preferred source address.
    pub source: Option<IpAddr>,
    /// The MTU of packets on this route.
    pub mtu: Option<u32>,
}

/// Builds a request that adds a route.
pub fn add_route(index: u32, route: NewRoute) -> Vec<u8> {
    let NewRoute { destination, gateway, metric, source, mtu } = route;
    const TABLE_MAIN: u8 = 254;
    const PROTOCOL_STATIC: u8 = 4;
    const SCOPE_LINK: u8 = 253;
    const UNICAST: u8 = 1;
    const ONLINK: u32 = 4;
    let (scope, flags) = match gateway {
        None if destination.addr().is_ipv4() => (SCOPE_LINK, 0),
        None => (0, 0),
        Some(_) => (0, ONLINK),
    };
    let prefix = destination.prefix_len();
    let head = [family(destination.addr()), prefix, 0, 0, TABLE_MAIN, PROTOCOL_STATIC, scope, UNICAST];
    let header = [&head[..], &flags.to_ne_bytes()].concat();
    let mut message = NetlinkMessage::new(RTM_NEWROUTE, REQUEST_ACK | CREATE_REPLACE, &header);
    if prefix > 0 {
        message = message.attribute(1, &octets(destination.network()));
    }
    if let Some(gateway) = gateway {
        message = message.attribute(5, &octets(gateway));
    }
    if let Some(metric) = metric {
        message = message.attribute(6, &metric.to_ne_bytes());
    }
    if let Some(source) = source {
        message = message.attribute(7, &octets(source));
    }
    if let Some(mtu) = mtu {
        // RTA_METRICS with RTAX_MTU in it.
        message = message.attribute(8, &[&8_u16.to_ne_bytes()[..], &2_u16.to_ne_bytes(), &mtu.to_ne_bytes()].concat());
    }
    message.attribute(4, &index.to_ne_bytes()).finish()
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(at..at.checked_add(2)?)?.try_into().ok()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at.checked_add(4)?)?.try_into().ok()?))
}

/// Splits a buffer into pieces that begin with their length, a number of `width` bytes. Stops at an invalid length.
fn parse_attributes(mut bytes: &[u8], width: usize, least: usize) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        let length = if width == 4 { u32_at(bytes, 0)?.try_into().ok()? } else { usize::from(u16_at(bytes, 0)?) };
        let piece = bytes.get(..length).filter(|piece| piece.len() >= least)?;
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some(piece)
    })
}

/// What rtnetlink has listed.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Answers {
    /// The links.
    pub links: Vec<NetworkLink>,
    /// The addresses.
    pub addresses: Vec<LinkAddress>,
}

impl Answers {
    fn add(&mut self, message: &[u8]) {
        match u16_at(message, 4) {
            Some(RTM_NEWLINK) => self.links.extend(read_link(message)),
            Some(RTM_NEWADDR) => self.addresses.extend(read_address(message)),
            _ => {}
        }
    }
}

/// Passes each message of one datagram to `each`. If the request is over with it, returns 0 for success, or an error number.
pub(super) fn read_datagram(datagram: &[u8], mut each: impl FnMut(&[u8])) -> Option<i32> {
    let mut end = None;
    for message in parse_attributes(datagram, 4, HEADER) {
        match u16_at(message, 4) {
            Some(NLMSG_ERROR) => {
                let code = u32_at(message, HEADER).unwrap_or_default().cast_signed();
                end = Some(code.checked_neg().unwrap_or(libc::EPROTO));
            }
            Some(NLMSG_DONE) => end = Some(0),
            _ => each(message),
        }
    }
    end
}

fn read_link(message: &[u8]) -> Option<NetworkLink> {
    let mut link = NetworkLink { index: u32_at(message, 20)?, name: String::new(), mac: Vec::new(), virtio: false };
    for attribute in parse_attributes(message.get(32..)?, 2, 4) {
        let value = attribute.get(4..)?;
        match u16_at(attribute, 2)? {
            IFLA_IFNAME => link.name = String::from_utf8_lossy(value).trim_end_matches('\0').to_owned(),
            IFLA_ADDRESS => link.mac = value.to_vec(),
            IFLA_PARENT_DEV_BUS_NAME => link.virtio = value == b"virtio\0",
            _ => {}
        }
    }
    Some(link)
}

/// Reads an address. The peer of a point-to-point link counts as no address.
fn read_address(message: &[u8]) -> Option<LinkAddress> {
    let (prefix, link) = (*message.get(17)?, u32_at(message, 20)?);
    let (mut local, mut peer) = (None, None);
    for attribute in parse_attributes(message.get(24..)?, 2, 4) {
        match u16_at(attribute, 2)? {
            IFA_LOCAL => local = read_ip(attribute.get(4..)?),
            IFA_ADDRESS => peer = read_ip(attribute.get(4..)?),
            _ => {}
        }
    }
    // The kernel names an address of IPv6 only once.
    Some(LinkAddress { link, net: IpNet::new(local.or(peer)?, prefix).ok()? })
}

/// Reads an address of 4 or 16 bytes.
fn read_ip(bytes: &[u8]) -> Option<IpAddr> {
    match bytes.len() {
        4 => Some(IpAddr::from(<[u8; 4]>::try_from(bytes).ok()?)),
        16 => Some(IpAddr::from(<[u8; 16]>::try_from(bytes).ok()?)),
        _ => None,
    }
}

/// A netlink socket; each call waits for the kernel's answer.
pub struct NetlinkSocket(OwnedFd);

impl NetlinkSocket {
    /// Opens a socket of rtnetlink.
    pub fn open() -> io::Result<NetlinkSocket> {
        NetlinkSocket::open_protocol(SockProtocol::NetlinkRoute)
    }

    /// Opens a socket of sock_diag(7).
    pub fn open_sock_diag() -> io::Result<NetlinkSocket> {
        NetlinkSocket::open_protocol(SockProtocol::NetlinkSockDiag)
    }

    fn open_protocol(protocol: SockProtocol) -> io::Result<NetlinkSocket> {
        Ok(NetlinkSocket(socket(AddressFamily::Netlink, SockType::Raw, SockFlag::SOCK_CLOEXEC, protocol)?))
    }

    /// Sends a request of rtnetlink and returns what was listed.
    pub fn send_request(&self, request: &[u8]) -> io::Result<Answers> {
        let mut answers = Answers::default();
        self.exchange(request, |message| answers.add(message))?;
        Ok(answers)
    }

    /// Sends a request, and passes each message of the answer with its header to `each`, until the kernel reports the end or an error.
    pub fn exchange(&self, request: &[u8], mut each: impl FnMut(&[u8])) -> io::Result<()> {
        retry_interrupted(|| send(self.0.as_raw_fd(), request, MsgFlags::empty()))?;
        let mut datagram = vec![0; 32 << 10];
        loop {
            let length = retry_interrupted(|| recv(self.0.as_raw_fd(), &mut datagram, MsgFlags::empty()))?;
            match read_datagram(datagram.get(..length).unwrap_or_default(), &mut each) {
                None => {}
                Some(0) => return Ok(()),
                Some(code) => return Err(io::Error::from_raw_os_error(code)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn an_address_request_has_the_kernels_layout() {
        let bytes = add_address(7, "10.0.0.2/24".parse().unwrap());
        assert_eq!(u32_at(&bytes, 0), Some(u32::try_from(bytes.len()).unwrap()));
        assert_eq!(u16_at(&bytes, 4), Some(RTM_NEWADDR));
        assert_eq!(bytes[16..24], [2, 24, 0, 0, 7, 0, 0, 0]);
        assert_eq!(bytes[24..32], [8, 0, 2, 0, 10, 0, 0, 2]);
        assert_eq!(bytes[40..48], [8, 0, 4, 0, 10, 0, 0, 255]);
        assert_eq!(add_address(7, "fd00::2/64".parse().unwrap())[16..20], [10, 64, 2, 0]);
    }

    #[test]
    fn a_default_route_has_no_destination() {
        let gateway = Some("10.0.0.1".parse().unwrap());
        let destination = "0.0.0.0/0".parse().unwrap();
        let route = NewRoute { destination, gateway, metric: Some(5), source: None, mtu: None };
        let kinds = |bytes: &[u8]| -> Vec<u16> {
            parse_attributes(&bytes[28..], 2, 4).filter_map(|piece| u16_at(piece, 2)).collect()
        };
        let bytes = add_route(3, route);
        assert_eq!(bytes[16..28], [2, 0, 0, 0, 254, 4, 0, 1, 4, 0, 0, 0]);
        assert_eq!(kinds(&bytes), [5, 6, 4]);
        let bytes = add_route(3, NewRoute { source: Some("10.0.0.2".parse().unwrap()), mtu: Some(1400), ..route });
        assert_eq!(kinds(&bytes), [5, 6, 7, 8, 4]);
    }

    #[test]
    fn a_neighbour_is_permanent() {
        let bytes = add_neighbour(3, "169.254.1.1".parse().unwrap(), &[2, 0, 0, 0, 0, 1]);
        assert_eq!(bytes[16..28], [2, 0, 0, 0, 3, 0, 0, 0, 0x80, 0, 0, 1]);
        assert_eq!(bytes[28..46], [8, 0, 1, 0, 169, 254, 1, 1, 10, 0, 2, 0, 2, 0, 0, 0, 0, 1]);
        assert_eq!(bytes.len(), 48);
    }

    #[test]
    fn an_address_is_read_back() {
        for text in ["10.0.0.2/24", "fd00::2/64"] {
            let address = LinkAddress { link: 7, net: text.parse().unwrap() };
            let mut answers = Answers::default();
            read_datagram(&add_address(7, address.net), |message| answers.add(message));
            assert_eq!(answers.addresses, [address]);
            let bytes = remove_address(address);
            assert_eq!((u16_at(&bytes, 4), u32_at(&bytes, 20)), (Some(RTM_DELADDR), Some(7)));
        }
    }

    #[test]
    fn a_link_is_set_up_or_down_or_stays() {
        let flags = |change| set_link(1, &change)[24..32].to_vec();
        assert_eq!(flags(LinkChange { up: true, ..LinkChange::default() }), [1, 0, 0, 0, 1, 0, 0, 0]);
        assert_eq!(flags(LinkChange { down: true, ..LinkChange::default() }), [0, 0, 0, 0, 1, 0, 0, 0]);
        assert_eq!(flags(LinkChange::default()), [0; 8]);
    }

    #[test]
    fn names_are_padded() {
        let bytes = set_link(1, &LinkChange { name: Some("eth0"), up: true, ..LinkChange::default() });
        assert_eq!(bytes.len() % 4, 0);
        assert_eq!(bytes[32..44], [9, 0, 3, 0, b'e', b't', b'h', b'0', 0, 0, 0, 0]);
    }

    #[test]
    fn the_kernel_lists_the_loopback() {
        let answers = |request: Vec<u8>| NetlinkSocket::open().and_then(|netlink| netlink.send_request(&request));
        let links = match answers(get_links()) {
            Ok(answers) => answers.links,
            Err(error) => return println!("skipped: no rtnetlink here: {error}"),
        };
        let addresses = answers(get_addresses()).unwrap().addresses;
        assert!(
            addresses.is_empty() || addresses.iter().all(|address| links.iter().any(|link| link.index == address.link))
        );
        assert!(links.iter().any(|link| link.name == "lo" && !link.virtio), "{links:?}");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(128))]
        #[test]
        fn any_answer_is_read_without_panic(bytes in proptest::collection::vec(any::<u8>(), 0..256)) {
            read_datagram(&bytes, |message| Answers::default().add(message));
        }

        #[test]
        fn what_set_link_writes_is_read_back(index in 1u32.., name in "[a-z]{1,15}") {
            let bytes = set_link(index, &LinkChange { name: Some(&name), ..LinkChange::default() });
            let mut answers = Answers::default();
            prop_assert_eq!(read_datagram(&bytes, |message| answers.add(message)), None);
            prop_assert_eq!(answers.links.len(), 1);
            prop_assert_eq!(&answers.links[0].name, &name);
            prop_assert_eq!(answers.links[0].index, index);
        }
    }
}
