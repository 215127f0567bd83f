//! Applies a `BootConfig`: clock, random pool, memory, devices, user namespace, host name, network, sysctls, and the pod's files in /etc.

use ipnet::IpNet;
use nacelle_proto::agent::{BootConfig, UserNamespace};
use nacelle_proto::common::{Dns, Interface, Neighbour, Route};
use nix::sched::{CloneFlags, setns};
use std::fs;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};

use super::added_memory::add_memory;
use super::error::BootError;
use super::hardware::adopt_devices;
use super::mounts::unmount_sysfs;
use super::netlink::{
    LinkChange, NetlinkSocket, NetworkLink, NewRoute, add_address, add_neighbour, add_route, get_links, set_link,
};
use crate::userns::UserNs;

/// The sysctl of the UTS namespace, which only the first root of the kernel may write.
const DOMAIN_NAME: &str = "kernel.domainname";

/// Applies everything in a VM that the pod needs to be ready. Later steps depend on earlier ones.
pub fn apply(config: &BootConfig) -> Result<Option<UserNs>, BootError> {
    set_clock(config.time_unix_nanos)?;
    add_entropy(&config.entropy)?;
    add_memory(&config.added_memory)?;
    adopt_devices()?;
    unmount_sysfs()?;
    apply_to_pod(config, Some((&config.interfaces, &config.routes)), CloneFlags::CLONE_NEWNET)
}

/// Applies what concerns the pod alone: user namespace, host name, network, sysctls. `with` are the kinds of further namespaces
/// that the user namespace owns, besides IPC and UTS. `own` is the network; `None`: it is the node's.
pub fn apply_to_pod(
    config: &BootConfig,
    own: Option<(&[Interface], &[Route])>,
    with: CloneFlags,
) -> Result<Option<UserNs>, BootError> {
    let with = with | CloneFlags::CLONE_NEWIPC | CloneFlags::CLONE_NEWUTS;
    let users = config.user_namespace.as_ref().map(|asked| create_user_namespace(asked, with)).transpose()?;
    set_host_name(&config.hostname)?;
    if let Some((interfaces, routes)) = own {
        configure_network(interfaces, routes)?;
    }
    for (name, value) in &config.sysctls {
        let path = sysctl_path(name).ok_or_else(|| BootError::SysctlName { name: name.clone() })?;
        let write = || fs::write(&path, value);
        let written = match &users {
            // The values of user.* are those of the writer's user namespace.
            Some(users) if path.starts_with("/proc/sys/user") => users.run_inside(write),
            // Only the root of the user namespace that owns an IPC namespace may write its sysctls.
            Some(users) if !path.starts_with("/proc/sys/net") && name != DOMAIN_NAME => users.run_as_root(write),
            _ => write(),
        };
        written.map_err(|source| BootError::Sysctl { name: name.clone(), value: value.clone(), source })?;
    }
    Ok(users)
}

/// Sets the host name.
pub(super) fn set_host_name(name: &str) -> Result<(), BootError> {
    nix::unistd::sethostname(name).map_err(|source| BootError::Hostname { name: name.to_owned(), source })
}

/// Makes the pod's user namespace and enters the other namespaces that it owns. Moves the network devices there.
fn create_user_namespace(asked: &UserNamespace, with: CloneFlags) -> Result<UserNs, BootError> {
    let failed = |what| move |source| BootError::UserNamespace { what, source };
    let (users, others) = UserNs::create(asked, with).map_err(failed("create"))?;
    for other in others {
        if other.kind == CloneFlags::CLONE_NEWNET {
            move_nics(other.file.as_fd()).map_err(failed("move the network devices to"))?;
        }
        setns(&other.file, other.kind).map_err(|error| failed("enter what belongs to")(error.into()))?;
    }
    Ok(users)
}

/// Publishes the user namespace, if there is one, to the zygote, and makes its root the owner of the pod's files.
pub fn publish_user_namespace(users: Option<&UserNs>) -> Result<(), BootError> {
    let published = users.map_or(Ok(()), UserNs::publish);
    published.map_err(|source| BootError::UserNamespace { what: "name", source })
}

fn move_nics(netns: BorrowedFd<'_>) -> std::io::Result<()> {
    let netlink = NetlinkSocket::open()?;
    let mut links = netlink.send_request(&get_links())?.links;
    // Moved in this order, so that the first links have the lower numbers there, too.
    links.sort_by_key(|link| link.index);
    for nic in links.iter().filter(|link| link.virtio) {
        netlink.send_request(&set_link(nic.index, &LinkChange { netns: Some(netns), ..LinkChange::default() }))?;
    }
    Ok(())
}

/// Sets the clock to nanoseconds since 1970; 0 and less leave it unchanged.
pub fn set_clock(nanos: i64) -> Result<(), BootError> {
    if nanos <= 0 {
        return Ok(());
    }
    crate::clock::set(nanos).map_err(|source| BootError::Clock { source })
}

/// Adds bytes to the random pool, so that no other VM has the same; an empty slice leaves it unchanged.
pub fn add_entropy(bytes: &[u8]) -> Result<(), BootError> {
    if bytes.is_empty() {
        return Ok(());
    }
    fs::OpenOptions::new()
        .write(true)
        .open("/dev/random")
        .and_then(|random| crate::sys::add_entropy(random, bytes))
        .map_err(|source| BootError::Entropy { source })
}

/// Returns the file of a sysctl that belongs to the pod and not to the VM, that is a namespaced one; `None` for all others.
/// `net.ipv4.conf.eth0/1` means `net/ipv4/conf/eth0.1`, as in sysctl(8).
fn sysctl_path(name: &str) -> Option<PathBuf> {
    let relative: String = name
        .chars()
        .map(|c| match c {
            '.' => '/',
            '/' => '.',
            other => other,
        })
        .collect();
    let starts = ["net/", "fs/mqueue/", "kernel/shm", "kernel/msg", "user/"];
    let allowed = starts.iter().any(|start| relative.starts_with(start)) || ["kernel.sem", DOMAIN_NAME].contains(&name);
    let clean = relative.split('/').all(|part| !part.is_empty() && part != "." && part != "..");
    (allowed && clean).then(|| Path::new("/proc/sys").join(relative))
}

fn parse<T: std::str::FromStr>(what: &'static str, text: &str) -> Result<T, BootError> {
    text.parse().ok().ok_or_else(|| BootError::Address { what, text: text.to_owned() })
}

/// Sets names and addresses of the network cards, in the order of their indices, and adds the routes. The cards must be down.
pub(super) fn configure_network(interfaces: &[Interface], routes: &[Route]) -> Result<(), BootError> {
    let failed = |what: String| move |source| BootError::Network { what, source };
    let netlink = NetlinkSocket::open().map_err(failed("open rtnetlink".to_owned()))?;
    let mut links = netlink.send_request(&get_links()).map_err(failed("list the links".to_owned()))?.links;
    links.sort_by_key(|link| link.index);
    if let Some(lo) = links.iter().find(|link| link.name == "lo") {
        let up = LinkChange { up: true, ..LinkChange::default() };
        netlink.send_request(&set_link(lo.index, &up)).map_err(failed("set lo up".to_owned()))?;
    }
    let nics: Vec<NetworkLink> = links.into_iter().filter(|link| link.virtio).collect();
    // Names may be permuted, so links that change their names first get one that no link has.
    for (at, (nic, interface)) in nics.iter().zip(interfaces).enumerate() {
        if nic.name != interface.name && nics.iter().any(|other| other.name == interface.name) {
            let change = LinkChange { name: Some(&format!("nacelle{at}")), ..LinkChange::default() };
            netlink.send_request(&set_link(nic.index, &change)).map_err(failed(format!("rename {}", nic.name)))?;
        }
    }
    for (at, interface) in interfaces.iter().enumerate() {
        let nic = nics.get(at).ok_or_else(|| BootError::NoNic { name: interface.name.clone(), have: nics.len() })?;
        configure_interface(&netlink, nic, interface)?;
    }
    for route in routes {
        let position = interfaces.iter().position(|interface| interface.name == route.interface);
        let nic = position.and_then(|at| nics.get(at));
        let nic = nic.ok_or_else(|| BootError::NoNic { name: route.interface.clone(), have: nics.len() })?;
        let destination = parse("route", &route.destination)?;
        let gateway: Option<IpAddr> =
            if route.gateway.is_empty() { None } else { Some(parse("gateway", &route.gateway)?) };
        let source = if route.source.is_empty() { None } else { Some(parse("source", &route.source)?) };
        let mtu = Some(route.mtu).filter(|mtu| *mtu != 0);
        netlink
            .send_request(&add_route(nic.index, NewRoute { destination, gateway, metric: route.metric, source, mtu }))
            .map_err(failed(format!("add the route to {} by {}", route.destination, route.gateway)))?;
    }
    Ok(())
}

fn configure_interface(netlink: &NetlinkSocket, nic: &NetworkLink, interface: &Interface) -> Result<(), BootError> {
    let failed = |what: String| move |source| BootError::Network { what, source };
    let change = LinkChange {
        name: Some(interface.name.as_str()).filter(|name| *name != nic.name),
        mac: Some(interface.mac.as_slice()).filter(|mac| mac.len() == 6 && *mac != nic.mac),
        mtu: Some(interface.mtu).filter(|mtu| *mtu != 0),
        ..LinkChange::default()
    };
    netlink.send_request(&set_link(nic.index, &change)).map_err(failed(format!("set up {}", interface.name)))?;
    let up = LinkChange { up: true, ..LinkChange::default() };
    netlink.send_request(&set_link(nic.index, &up)).map_err(failed(format!("set {} up", interface.name)))?;
    for address in &interface.addresses {
        let net: IpNet = parse("address", address)?;
        let request = add_address(nic.index, net);
        netlink.send_request(&request).map_err(failed(format!("add {address} to {}", interface.name)))?;
    }
    for Neighbour { address, mac } in &interface.neighbours {
        let request = add_neighbour(nic.index, parse("neighbour", address)?, mac);
        netlink.send_request(&request).map_err(failed(format!("add the neighbour {address} to {}", interface.name)))?;
    }
    Ok(())
}

/// Writes the pod's hosts, hostname and resolv.conf. Containers have them in /etc unless their specification mounts others.
pub fn write_files(hostname: &str, interfaces: &[Interface], dns: Option<&Dns>) -> Result<(), BootError> {
    let write = |name: &str, text: String| {
        let path = Path::new(crate::paths::FILES).join(name);
        fs::write(&path, text).map_err(|source| BootError::File { path, source })
    };
    write("hostname", format!("{hostname}\n"))?;
    write("hosts", hosts(hostname, interfaces))?;
    write("resolv.conf", resolv_conf(dns.unwrap_or(&Dns::default())))
}

fn hosts(hostname: &str, interfaces: &[Interface]) -> String {
    let mut text = "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n".to_owned();
    for address in interfaces.iter().flat_map(|interface| &interface.addresses) {
        let address = address.split('/').next().unwrap_or(address);
        text.push_str(&format!("{address}\t{hostname}\n"));
    }
    text
}

fn resolv_conf(dns: &Dns) -> String {
    let mut text = String::new();
    for server in &dns.servers {
        text.push_str(&format!("nameserver {server}\n"));
    }
    if !dns.searches.is_empty() {
        text.push_str(&format!("search {}\n", dns.searches.join(" ")));
    }
    if !dns.options.is_empty() {
        text.push_str(&format!("options {}\n", dns.options.join(" ")));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn only_the_pods_own_sysctls_have_a_path() {
        assert_eq!(sysctl_path("net.ipv4.ip_forward"), Some("/proc/sys/net/ipv4/ip_forward".into()));
        assert_eq!(
            sysctl_path("net.ipv4.conf.eth0/1.rp_filter"),
            Some("/proc/sys/net/ipv4/conf/eth0.1/rp_filter".into())
        );
        assert!(sysctl_path("kernel.shm_rmid_forced").is_some());
        assert!(sysctl_path("kernel.sem").is_some());
        assert_eq!(sysctl_path("user.max_user_namespaces"), Some("/proc/sys/user/max_user_namespaces".into()));
        assert_eq!(sysctl_path("kernel.domainname"), Some("/proc/sys/kernel/domainname".into()));
        for name in [
            "kernel.panic",
            "kernel.domainnames",
            "kernel.hostname",
            "vm.overcommit_memory",
            "net.//.x",
            "net",
            "",
            "net..x",
            "kernel.semx",
            "user",
            "user..x",
        ] {
            assert_eq!(sysctl_path(name), None, "{name}");
        }
    }

    #[test]
    fn files_have_the_configured_names() {
        let dns = Dns { servers: vec!["10.96.0.10".into()], searches: vec!["a".into(), "b".into()], options: vec![] };
        assert_eq!(resolv_conf(&dns), "nameserver 10.96.0.10\nsearch a b\n");
        let interface = Interface { addresses: vec!["10.0.0.2/24".into()], ..Interface::default() };
        assert!(hosts("web", &[interface]).ends_with("10.0.0.2\tweb\n"));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]
        #[test]
        fn a_sysctl_never_leaves_its_directory(name in "[a-z./]{0,20}") {
            if let Some(path) = sysctl_path(&format!("net.{name}")) {
                prop_assert!(path.starts_with("/proc/sys/net"));
                prop_assert!(path.components().all(|part| !matches!(part, std::path::Component::ParentDir)));
            }
        }
    }
}
