//! Sends requests to the kernel's rtnetlink, one at a time, and decodes the few objects that this crate needs. A socket belongs
//! to the namespace of the thread that opened it and may then be used from any thread.

use crate::NetError;
use ipnet::IpNet;
use nacelle_base::net::{Mac, Neighbour};
use nacelle_base::retry::{Timed, retry_interrupted};
use netlink_packet_core::{
    NLM_F_ACK, NLM_F_CREATE, NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_EXCL, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage,
    NetlinkPayload,
};
use netlink_packet_route::RouteNetlinkMessage as Message;
use netlink_packet_route::address::{AddressAttribute, AddressFlags, AddressMessage, AddressScope};
use netlink_packet_route::link::{LinkAttribute, LinkFlags, LinkMessage};
use netlink_packet_route::neighbour::{NeighbourAddress, NeighbourAttribute, NeighbourMessage, NeighbourState};
use netlink_packet_route::route::RouteMessage;
use netlink_packet_route::rule::{RuleAttribute, RuleMessage};
use netlink_packet_route::tc::{
    TcAction, TcActionAttribute, TcActionMirror, TcActionMirrorOption, TcActionOption, TcActionType, TcAttribute,
    TcFilterU32, TcFilterU32Option, TcHandle, TcMessage, TcMirror, TcMirrorActionType, TcOption, TcU32Key,
    TcU32Selector, TcU32SelectorFlags,
};
use nix::errno::Errno;
use nix::poll::PollFlags;
use nix::sys::socket::{AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, recv, sendto, socket};
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Duration;

pub(crate) use netlink_packet_route::AddressFamily as Family;

/// How long to wait for an answer. The kernel answers at once; a longer wait means that the answer was lost.
const LIMIT: Duration = Duration::from_secs(30);
/// The size in bytes of the receive buffer; larger than a datagram of a dump (32 KiB).
const BUFFER: usize = 64 * 1024;
/// How often a dump is repeated that changed while it was read.
const DUMP_ATTEMPTS: u32 = 16;
/// The priorities of the policy rules that each namespace has from its creation.
const KERNEL_RULES: [u32; 3] = [0, 32766, 32767];
/// The priority of our redirect: before any other filter.
const REDIRECT_PRIORITY: u32 = 1;

/// An rtnetlink socket.
pub(crate) struct Netlink {
    socket: OwnedFd,
    sequence: u32,
}

/// An interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Link {
    pub name: String,
    pub index: u32,
    pub mac: Option<Mac>,
    pub mtu: u32,
    /// The length of the interface's transmit queue, in packets.
    pub queue_length: Option<u32>,
    /// The largest segments that the interface sends and receives as one, in bytes.
    pub gso_max_size: Option<u32>,
    pub gro_max_size: Option<u32>,
}

/// An address that was configured (not one that the kernel derived).
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Address {
    pub index: u32,
    pub net: IpNet,
    /// The address has global scope. Addresses of other scopes are for the link only.
    pub global: bool,
}

impl Netlink {
    /// Opens a socket in the namespace of this thread.
    pub fn open() -> Result<Netlink, NetError> {
        let open = || {
            let socket =
                socket(AddressFamily::Netlink, SockType::Raw, SockFlag::SOCK_CLOEXEC, SockProtocol::NetlinkRoute)?;
            Ok(Netlink { socket, sequence: 0 })
        };
        open().map_err(|errno: Errno| failed("open", "a socket")(errno.into()))
    }

    /// Returns the interface of this name.
    pub fn link(&mut self, name: &str) -> Result<Link, NetError> {
        let mut query = LinkMessage::default();
        query.attributes.push(LinkAttribute::IfName(name.to_owned()));
        let answers = match self.request(Message::GetLink(query), 0) {
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => Vec::new(),
            other => other.map_err(failed("find", name))?,
        };
        let found = answers.into_iter().find_map(|answer| match answer {
            Message::NewLink(link) => Some(link),
            _ => None,
        });
        let link = found.ok_or_else(|| NetError::NoInterface { name: name.to_owned() })?;
        let mut result = Link {
            name: name.to_owned(),
            index: link.header.index,
            mac: None,
            mtu: 0,
            queue_length: None,
            gso_max_size: None,
            gro_max_size: None,
        };
        for attribute in link.attributes {
            match attribute {
                LinkAttribute::Address(bytes) => result.mac = Mac::try_from(bytes).ok(),
                LinkAttribute::Mtu(mtu) => result.mtu = mtu,
                LinkAttribute::TxQueueLen(length) => result.queue_length = Some(length),
                LinkAttribute::GsoMaxSize(size) => result.gso_max_size = Some(size),
                LinkAttribute::GroMaxSize(size) => result.gro_max_size = Some(size),
                _ => (),
            }
        }
        Ok(result)
    }

    /// Sets an interface up.
    pub fn set_up(&mut self, name: &str) -> Result<(), NetError> {
        let link = self.link(name)?;
        let mut set = LinkMessage::default();
        set.header.index = link.index;
        set.header.flags = LinkFlags::Up;
        set.header.change_mask = LinkFlags::Up;
        self.request(Message::SetLink(set), 0).map(drop).map_err(failed("set up", name))
    }

    /// Sets an interface's MTU.
    pub fn set_mtu(&mut self, link: &Link, mtu: u32) -> Result<(), NetError> {
        let mut set = LinkMessage::default();
        set.header.index = link.index;
        set.attributes.push(LinkAttribute::Mtu(mtu));
        self.request(Message::SetLink(set), 0).map(drop).map_err(failed("set the MTU of", &link.name))
    }

    /// Returns all permanent addresses except those that the kernel creates itself (link-local ones of IPv6).
    pub fn addresses(&mut self) -> Result<Vec<Address>, NetError> {
        let dump = self.dump(Message::GetAddress(AddressMessage::default()));
        let messages = dump.map_err(failed("read the addresses of", "the namespace"))?;
        Ok(messages.into_iter().filter_map(|message| parse_address(address_message(message)?)).collect())
    }

    /// Returns all routes of one address family as the kernel reports them.
    pub fn routes(&mut self, family: Family) -> Result<Vec<RouteMessage>, NetError> {
        let mut query = RouteMessage::default();
        query.header.address_family = family;
        let messages = self.dump(Message::GetRoute(query)).map_err(failed("read the routes of", "the namespace"))?;
        let routes = messages.into_iter().filter_map(|message| match message {
            Message::NewRoute(route) if route.header.address_family == family => Some(route),
            _ => None,
        });
        Ok(routes.collect())
    }

    /// Returns all permanent entries of the neighbour tables of this family, with the index of their interface.
    pub fn neighbours(&mut self, family: Family) -> Result<Vec<(u32, Neighbour)>, NetError> {
        let mut query = NeighbourMessage::default();
        query.header.family = family;
        let messages = self.dump(Message::GetNeighbour(query));
        let messages = messages.map_err(failed("read the neighbours of", "the namespace"))?;
        Ok(messages.into_iter().filter_map(parse_neighbour).collect())
    }

    /// Returns the priorities of the policy rules of this family that were configured.
    pub fn rules(&mut self, family: Family) -> Result<Vec<u32>, NetError> {
        let mut query = RuleMessage::default();
        query.header.family = family;
        let messages = match self.dump(Message::GetRule(query)) {
            // A kernel without policy routing has no rules: without any support, or without this family (`ipv6.disable=1`).
            Err(error) if matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EAFNOSUPPORT)) => Vec::new(),
            other => other.map_err(failed("read the policy rules of", "the namespace"))?,
        };
        let priority = |rule: &RuleMessage| {
            let of = rule.attributes.iter().find_map(|attribute| match attribute {
                RuleAttribute::Priority(priority) => Some(*priority),
                _ => None,
            });
            of.unwrap_or(0)
        };
        let rules = messages.iter().filter_map(|message| match message {
            Message::NewRule(rule) => Some(priority(rule)),
            _ => None,
        });
        Ok(rules.filter(|priority| !KERNEL_RULES.contains(priority)).collect())
    }

    /// Redirects every frame that arrives at `from` to the egress of `to`, before the namespace's stack sees it. Replaces the
    /// redirect of an earlier call for `from`.
    pub fn redirect(&mut self, from: &Link, to: &Link) -> Result<(), NetError> {
        let failed = || failed("redirect", &from.name);
        let index = i32::try_from(from.index).map_err(|_too_large| failed()(io::ErrorKind::InvalidData.into()))?;
        let mut qdisc = TcMessage::with_index(index);
        qdisc.header.parent = TcHandle::INGRESS;
        qdisc.header.handle = TcHandle { major: u16::MAX, minor: 0 };
        qdisc.attributes.push(TcAttribute::Kind("ingress".to_owned()));
        match self.request(Message::NewQueueDiscipline(qdisc), NLM_F_CREATE | NLM_F_EXCL) {
            Err(error) if error.raw_os_error() == Some(libc::EEXIST) => (),
            other => drop(other.map_err(failed())?),
        }
        let mut filter = TcMessage::with_index(index);
        // This parent matches both qdiscs with an ingress side: ingress and clsact.
        filter.header.parent = TcHandle { major: u16::MAX, minor: TcHandle::MIN_INGRESS };
        filter.header.info = REDIRECT_PRIORITY << 16 | u32::from((libc::ETH_P_ALL as u16).to_be());
        match self.request(Message::DelTrafficFilter(filter.clone()), 0) {
            // ENOENT: there is none; EINVAL: the kernel's answer for a block without any filter.
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::EINVAL)) => (),
            other => drop(other.map_err(failed())?),
        }
        filter.attributes.push(TcAttribute::Kind(TcFilterU32::KIND.to_owned()));
        let options =
            [TcFilterU32Option::Selector(match_all_selector()), TcFilterU32Option::Action(vec![redirect_action(to)])];
        filter.attributes.push(TcAttribute::Options(options.into_iter().map(TcOption::U32).collect()));
        self.request(Message::NewTrafficFilter(filter), NLM_F_CREATE | NLM_F_EXCL).map(drop).map_err(failed())
    }

    fn dump(&mut self, message: Message) -> io::Result<Vec<Message>> {
        for _ in 0..DUMP_ATTEMPTS {
            match self.request(message.clone(), NLM_F_DUMP) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => (),
                other => return other,
            }
        }
        Err(io::ErrorKind::ResourceBusy.into())
    }

    /// Sends one request and returns the kernel's answers before its acknowledgement.
    fn request(&mut self, message: Message, flags: u16) -> io::Result<Vec<Message>> {
        self.sequence = self.sequence.wrapping_add(1);
        let mut header = NetlinkHeader::default();
        header.flags = NLM_F_REQUEST | flags | if flags & NLM_F_DUMP == NLM_F_DUMP { 0 } else { NLM_F_ACK };
        header.sequence_number = self.sequence;
        let mut packet = NetlinkMessage::new(header, NetlinkPayload::from(message));
        packet.finalize();
        let mut bytes = vec![0; packet.buffer_len()];
        packet.serialize(&mut bytes);
        let kernel = NetlinkAddr::new(0, 0);
        retry_interrupted(|| sendto(self.socket.as_raw_fd(), &bytes, &kernel, MsgFlags::empty()))?;
        let limit = Timed::new(&self.socket, LIMIT);
        let (mut answers, mut interrupted) = (Vec::new(), false);
        let mut buffer = vec![0; BUFFER];
        loop {
            let socket = self.socket.as_raw_fd();
            let length = limit.when_ready(PollFlags::POLLIN, || recv(socket, &mut buffer, MsgFlags::MSG_DONTWAIT))?;
            let mut rest = buffer.get(..length).unwrap_or_default();
            while !rest.is_empty() {
                let answer = NetlinkMessage::<Message>::deserialize(rest)
                    .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
                // Messages are aligned to four bytes; the last one may lack its padding.
                let taken = (answer.header.length as usize).next_multiple_of(4).max(4).min(rest.len());
                rest = rest.get(taken..).unwrap_or_default();
                if answer.header.sequence_number != self.sequence {
                    continue;
                }
                // Read the dump to its end: until then the kernel starts no other dump for this socket.
                interrupted |= answer.header.flags & NLM_F_DUMP_INTR != 0;
                match answer.payload {
                    NetlinkPayload::InnerMessage(message) => answers.push(message),
                    NetlinkPayload::Error(error) if error.code.is_some() => return Err(error.to_io()),
                    NetlinkPayload::Done(done) if done.code < 0 => {
                        return Err(io::Error::from_raw_os_error(done.code.saturating_neg()));
                    }
                    NetlinkPayload::Error(_) | NetlinkPayload::Done(_) if interrupted => {
                        return Err(io::ErrorKind::Interrupted.into());
                    }
                    NetlinkPayload::Error(_) | NetlinkPayload::Done(_) => return Ok(answers),
                    _ => (),
                }
            }
        }
    }
}

fn parse_neighbour(message: Message) -> Option<(u32, Neighbour)> {
    let Message::NewNeighbour(message) = message else { return None };
    let (mut ip, mut mac) = (None, None);
    for attribute in &message.attributes {
        match attribute {
            NeighbourAttribute::Destination(NeighbourAddress::Inet(v4)) => ip = Some(IpAddr::V4(*v4)),
            NeighbourAttribute::Destination(NeighbourAddress::Inet6(v6)) => ip = Some(IpAddr::V6(*v6)),
            NeighbourAttribute::LinkLayerAddress(bytes) => mac = Mac::try_from(bytes.as_slice()).ok(),
            _ => (),
        }
    }
    let permanent = message.header.state == NeighbourState::Permanent;
    Some((message.header.ifindex, Neighbour { ip: ip?, mac: mac? })).filter(|_| permanent)
}

fn address_message(message: Message) -> Option<AddressMessage> {
    match message {
        Message::NewAddress(address) => Some(address),
        _ => None,
    }
}

fn parse_address(message: AddressMessage) -> Option<Address> {
    let (mut own, mut peer, mut permanent) = (None, None, false);
    for attribute in &message.attributes {
        match attribute {
            AddressAttribute::Local(ip) => own = Some(*ip),
            AddressAttribute::Address(ip) => peer = Some(*ip),
            AddressAttribute::Flags(flags) => permanent = flags.contains(AddressFlags::Permanent),
            _ => (),
        }
    }
    let global = message.header.scope == AddressScope::Universe;
    let net = IpNet::new(own.or(peer)?, message.header.prefix_len).ok()?;
    let own_of_kernel = matches!(net, IpNet::V6(net) if net.addr().is_unicast_link_local());
    (permanent && !own_of_kernel).then_some(Address { index: message.header.index, net, global })
}

/// Returns the selector that matches any frame: it compares no bit of the first word.
fn match_all_selector() -> TcU32Selector {
    let mut selector = TcU32Selector::default();
    selector.flags = TcU32SelectorFlags::Terminal;
    selector.nkeys = 1;
    selector.keys = vec![TcU32Key::default()];
    selector
}

fn redirect_action(link: &Link) -> TcAction {
    let mut mirror = TcMirror::default();
    mirror.generic.action = TcActionType::Stolen;
    mirror.eaction = TcMirrorActionType::EgressRedir;
    mirror.ifindex = link.index;
    let mut action = TcAction::default();
    action.attributes = vec![
        TcActionAttribute::Kind(TcActionMirror::KIND.to_owned()),
        TcActionAttribute::Options(vec![TcActionOption::Mirror(TcActionMirrorOption::Parms(mirror))]),
    ];
    action
}

fn failed(what: &'static str, object: &str) -> impl FnOnce(io::Error) -> NetError + use<> {
    let object = object.to_owned();
    move |source| NetError::Netlink { what, object, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_family_without_policy_routing_has_no_rules() {
        let mut netlink = Netlink::open().unwrap();
        // AF_INET6 answers like this with `ipv6.disable=1`.
        assert_eq!(netlink.rules(Family::Bridge).unwrap(), Vec::<u32>::new());
    }
}
