//! Sets an IPv4 address of a network interface and sets it up, with two rtnetlink messages (rtnetlink(7)): the guest has no `ip`,
//! and the host may have none either.

use nix::errno::Errno;
use nix::net::if_::if_nametoindex;
use nix::sys::socket::{AddressFamily, SockFlag, SockProtocol, SockType, socket};
use std::io;
use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;

/// RTM_NEWLINK, which changes an existing interface.
const NEW_LINK: u16 = 16;
/// RTM_NEWADDR.
const NEW_ADDRESS: u16 = 20;
/// NLM_F_REQUEST and NLM_F_ACK.
const REQUEST_FLAGS: u16 = 1 | 4;
/// NLM_F_REPLACE and NLM_F_CREATE.
const REPLACE_FLAGS: u16 = 0x100 | 0x400;
/// NLMSG_ERROR: the kernel's acknowledgement, whose first word is zero or a negative error number.
const ERROR: u16 = 2;
const IFF_UP: u32 = 1;

/// Sets an interface of this network namespace up, with this address.
pub fn set_up(name: &str, address: Ipv4Addr, prefix: u8) -> io::Result<()> {
    let index = if_nametoindex(name)?;
    let flags = SockFlag::SOCK_CLOEXEC;
    let socket = socket(AddressFamily::Netlink, SockType::Raw, flags, SockProtocol::NetlinkRoute)?;
    send_request(&socket, NEW_ADDRESS, REQUEST_FLAGS | REPLACE_FLAGS, &address_body(index, address, prefix))?;
    send_request(&socket, NEW_LINK, REQUEST_FLAGS, &link_body(index))
}

/// struct ifaddrmsg and the attributes IFA_LOCAL and IFA_ADDRESS.
fn address_body(index: u32, address: Ipv4Addr, prefix: u8) -> Vec<u8> {
    let mut body = vec![libc::AF_INET as u8, prefix, 0, 0];
    body.extend(index.to_ne_bytes());
    for attribute in [2u16, 1] {
        body.extend(8u16.to_ne_bytes());
        body.extend(attribute.to_ne_bytes());
        body.extend(address.octets());
    }
    body
}

/// struct ifinfomsg: family, type, index, flags, and which of the flags change.
fn link_body(index: u32) -> Vec<u8> {
    let mut body = vec![0; 4];
    body.extend(index.to_ne_bytes());
    body.extend(IFF_UP.to_ne_bytes());
    body.extend(IFF_UP.to_ne_bytes());
    body
}

fn send_request(socket: &OwnedFd, kind: u16, flags: u16, body: &[u8]) -> io::Result<()> {
    let length = u32::try_from(16 + body.len()).map_err(io::Error::other)?;
    let mut message = length.to_ne_bytes().to_vec();
    message.extend(kind.to_ne_bytes());
    message.extend(flags.to_ne_bytes());
    message.extend([0; 8]); // sequence and port: one request at a time
    message.extend(body);
    nix::unistd::write(socket, &message)?;
    let mut answer = [0; 1024];
    let count = nix::unistd::read(socket, &mut answer)?;
    parse_acknowledgement(&answer[..count])
}

/// Returns the result in an acknowledgement.
fn parse_acknowledgement(answer: &[u8]) -> io::Result<()> {
    let unexpected = || io::Error::other("the answer of rtnetlink is not an acknowledgement");
    let kind = answer.get(4..6).and_then(|bytes| bytes.try_into().ok()).map(u16::from_ne_bytes);
    let code = answer.get(16..20).and_then(|bytes| bytes.try_into().ok()).map(i32::from_ne_bytes);
    match (kind, code) {
        (Some(ERROR), Some(0)) => Ok(()),
        (Some(ERROR), Some(code)) => Err(Errno::from_raw(code.saturating_neg()).into()),
        _ => Err(unexpected()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_acknowledgement_is_success_or_an_error_number() {
        let answer = |kind: u16, code: i32| {
            let mut bytes = vec![36, 0, 0, 0];
            bytes.extend(kind.to_ne_bytes());
            bytes.extend([0; 10]);
            bytes.extend(code.to_ne_bytes());
            parse_acknowledgement(&bytes)
        };
        assert!(answer(2, 0).is_ok());
        assert_eq!(answer(2, -libc::ENODEV).unwrap_err().raw_os_error(), Some(libc::ENODEV));
        assert!(answer(3, 0).is_err());
        assert!(parse_acknowledgement(&[0; 10]).is_err());
    }

    #[test]
    fn messages_have_the_lengths_that_linux_expects() {
        assert_eq!(address_body(7, Ipv4Addr::new(10, 99, 0, 1), 24).len(), 8 + 2 * 8);
        assert_eq!(link_body(7).len(), 16);
    }
}
