//! Gives a restored VM the identity of another pod: host name, network, and the pod's files in /etc.

use nacelle_proto::common::{Dns, Interface, Route};
use std::io;

use super::apply::{configure_network, set_host_name, write_files};
use super::error::BootError;
use super::netlink::{LinkChange, NetlinkSocket, NetworkLink, get_addresses, get_links, remove_address, set_link};
use super::sock_diag::close_connections;

/// The identity of a pod.
#[derive(Clone, Copy, Debug)]
pub struct PodIdentity<'a> {
    /// The host name.
    pub hostname: &'a str,
    /// One interface for each network card of the VM, in their order.
    pub interfaces: &'a [Interface],
    /// The routes.
    pub routes: &'a [Route],
    /// The DNS configuration.
    pub dns: Option<&'a Dns>,
}

/// Replaces the identity of the saved pod. No container may run meanwhile.
///
/// Nothing leaves the VM with an address of the saved pod, which still runs elsewhere: the cards are down while connections are closed.
pub fn adopt_identity(identity: PodIdentity<'_>) -> Result<(), BootError> {
    let PodIdentity { hostname, interfaces, routes, dns } = identity;
    let failed = |what: &str| {
        let what = what.to_owned();
        move |source: io::Error| BootError::Network { what, source }
    };
    let netlink = NetlinkSocket::open().map_err(failed("open rtnetlink"))?;
    let nics = list_nics(&netlink).map_err(failed("list the links"))?;
    if let Some(missing) = interfaces.get(nics.len()) {
        return Err(BootError::NoNic { name: missing.name.clone(), have: nics.len() });
    }
    for nic in &nics {
        let down = LinkChange { down: true, ..LinkChange::default() };
        let what = format!("set {} down", nic.name);
        netlink.send_request(&set_link(nic.index, &down)).map_err(failed(&what))?;
    }
    let closed = close_connections().map_err(failed("close the connections of the saved pod"))?;
    remove_addresses(&netlink, &nics).map_err(failed("remove the addresses of the saved pod"))?;
    set_host_name(hostname)?;
    configure_network(interfaces, routes)?;
    tracing::info!(hostname, closed, "the VM has the identity of another pod");
    write_files(hostname, interfaces, dns)
}

/// Returns the network cards of the VM in the order of their indices.
fn list_nics(netlink: &NetlinkSocket) -> io::Result<Vec<NetworkLink>> {
    let mut links = netlink.send_request(&get_links())?.links;
    links.retain(|link| link.virtio);
    links.sort_by_key(|link| link.index);
    Ok(links)
}

fn remove_addresses(netlink: &NetlinkSocket, nics: &[NetworkLink]) -> io::Result<()> {
    let addresses = netlink.send_request(&get_addresses())?.addresses;
    for address in addresses.into_iter().filter(|address| nics.iter().any(|nic| nic.index == address.link)) {
        match netlink.send_request(&remove_address(address)) {
            // Another address of the same network was removed, and the kernel has removed this one with it.
            Err(error) if error.kind() == io::ErrorKind::AddrNotAvailable => {}
            other => drop(other?),
        }
    }
    Ok(())
}
