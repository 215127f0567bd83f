//! Creates the tap of a VM in the pod's namespace, and connects it to the interface that CNI created.
//!
//! The connection is a redirect at the ingress of both interfaces, before the namespace's own stack. The CNI interface therefore keeps
//! its addresses (plugins look for them at CHECK), yet only the guest answers for them and nothing in the namespace does. The tap
//! itself gets no address and no IPv6, or the namespace's stack would answer the guest.

use crate::inspect::MAX_MTU;
use crate::netlink::Netlink;
use crate::netns::set_ipv6_option;
use crate::{NetError, NetNs, run_in, sys};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::OwnedFd;

/// A tap. The interface lives until the last copy of `fd` is closed.
#[derive(Debug)]
pub struct Tap {
    /// The queue: reads and writes Ethernet frames, each after a virtio-net header. The descriptor is close-on-exec and blocking.
    pub fd: OwnedFd,
    /// Further queues, of the same kind as `fd`.
    pub more_queues: Vec<OwnedFd>,
    /// The name of the interface in the namespace.
    pub name: String,
}

/// Creates a tap `name` in the namespace, down, with one queue and virtio-net headers (`IFF_TAP | IFF_NO_PI | IFF_VNET_HDR`).
/// Fails if the name is in use.
pub fn create(netns: &NetNs, name: &str) -> Result<Tap, NetError> {
    create_multi_queue(netns, name, 1)
}

/// Like [`create`], with this number of queues, at least one. Several queues have `IFF_MULTI_QUEUE`, and the kernel distributes
/// the flows over them at once.
pub fn create_multi_queue(netns: &NetNs, name: &str, queues: usize) -> Result<Tap, NetError> {
    check_name(name)?;
    let several = if queues > 1 { libc::IFF_MULTI_QUEUE } else { 0 };
    let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR | several;
    let queue = |flags| {
        let tun = open_tun().map_err(failed("open", name))?;
        sys::attach_tap(&tun, name, flags).map_err(failed("create", name))?;
        Ok::<_, NetError>(OwnedFd::from(tun))
    };
    let (fd, more_queues) = run_in(netns, || {
        let first = queue(flags | libc::IFF_TUN_EXCL)?;
        set_ipv6_option(name, "disable_ipv6", "1").map_err(failed("disable IPv6 of", name))?;
        let more = (1..queues).map(|_| queue(flags)).collect::<Result<Vec<_>, _>>()?;
        Ok::<_, NetError>((first, more))
    })??;
    Ok(Tap { fd, more_queues, name: name.to_owned() })
}

/// Opens a packet socket (`AF_PACKET`, raw, non-blocking, close-on-exec) on the tap `name`. It receives only the DHCP requests of
/// the guest over IPv4, and frames sent to it reach the guest.
pub fn open_dhcp_socket(netns: &NetNs, name: &str) -> Result<OwnedFd, NetError> {
    check_name(name)?;
    run_in(netns, || sys::open_dhcp_socket(name))?.map_err(failed("listen on", name))
}

/// Connects tap and CNI interface: frames of the guest leave through `cni_interface`, frames that arrive there go to the guest, and
/// the namespace's own stack sees neither. Sets both up, and sets the MTU of the tap to that of the CNI interface, or to the
/// largest that taps have. May be repeated.
pub fn connect(netns: &NetNs, tap: &str, cni_interface: &str) -> Result<(), NetError> {
    let mut netlink = run_in(netns, Netlink::open)??;
    let inside = netlink.link(tap)?;
    let outside = netlink.link(cni_interface)?;
    netlink.set_mtu(&inside, outside.mtu.min(MAX_MTU))?;
    // The redirects come first, so that the stack never sees a frame of the guest.
    netlink.redirect(&inside, &outside)?;
    netlink.set_up(tap)?;
    netlink.redirect(&outside, &inside)?;
    netlink.set_up(cni_interface)
}

fn open_tun() -> io::Result<File> {
    OpenOptions::new().read(true).write(true).open("/dev/net/tun")
}

/// Accepts 1 to 15 letters, digits, '.', '_' or '-', but not "." or "..": also a safe name for a file under /proc.
pub(crate) fn check_name(name: &str) -> Result<(), NetError> {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
    let good = (1..=15).contains(&name.len()) && name.bytes().all(allowed) && !matches!(name, "." | "..");
    if good { Ok(()) } else { Err(NetError::BadName { name: name.chars().take(80).collect() }) }
}

fn failed(what: &'static str, name: &str) -> impl FnOnce(io::Error) -> NetError + use<> {
    let name = name.to_owned();
    move |source| NetError::Tap { what, name, source }
}
