//! Converts CRI's PodSandboxConfig into `PodConfig`.

use super::resources::{fields, pod_resources};
use super::{FieldError, apparmor, bad, id_number, name, pairs, users};
use crate::config::{EngineSetting, HostNamespaces, PrivilegedPods, SandboxSettings};
use nacelle_model::namespace::NodeNamespaces;
use nacelle_model::network::{Bandwidth, DnsConfig, PortMapping, Protocol};
use nacelle_model::pod::{PodConfig, PodKind, PodName};
use nacelle_model::resources::cpu_milli;
use nacelle_proto::cri;
use nacelle_vmi::Quantity;
use std::net::{IpAddr, Ipv6Addr};
use std::ops::RangeInclusive;
use std::path::PathBuf;

/// The bits per second to which a pod's traffic may be limited.
const BANDWIDTHS: RangeInclusive<u64> = 1_000..=1_000_000_000_000_000;
/// The longest name of a network interface in bytes.
const MAX_INTERFACE_NAME: usize = 15;
/// The longest host name in bytes that Linux accepts.
const HOSTNAME: usize = 64;

/// Checks and converts a pod's configuration. `handler` is the request's runtime_handler, whose existence the caller checks, and
/// `engine` that handler's setting; `policy` determines the handling of pods with namespaces of the node, and of privileged ones.
/// The parts that depend on the handler's other settings are left out.
pub fn pod_config(
    config: Option<&cri::PodSandboxConfig>,
    handler: &str,
    engine: EngineSetting,
    policy: &SandboxSettings,
) -> Result<PodConfig, FieldError> {
    let config = config.ok_or(FieldError::Missing { field: "config" })?;
    let metadata = config.metadata.as_ref().ok_or(FieldError::Missing { field: "config.metadata" })?;
    let name = PodName {
        name: name("config.metadata.name", &metadata.name)?,
        namespace: name("config.metadata.namespace", &metadata.namespace)?,
        uid: name("config.metadata.uid", &metadata.uid)?,
        attempt: metadata.attempt,
    };
    let linux = config.linux.clone().unwrap_or_default();
    let security = linux.security_context.clone().unwrap_or_default();
    let namespaces = security.namespace_options.clone().unwrap_or_default();
    let shares = node_namespaces(&namespaces, policy.host_namespaces)?;
    check_security(&security)?;
    let resources = pod_resources(
        (linux.resources.as_ref(), fields!("config.linux.resources")),
        (linux.overhead.as_ref(), fields!("config.linux.overhead")),
    )?;
    let user_namespace = users::pod_namespace(&namespaces)?;
    // In a user namespace a privileged pod has no rights on the node that it could need.
    let on_host = security.privileged && user_namespace.is_none() && policy.privileged == PrivilegedPods::RunOnHost;
    let kind = match on_host || !shares.none() || engine == EngineSetting::Host {
        true => PodKind::Host { namespaces: shares },
        false => PodKind::default(),
    };
    Ok(PodConfig {
        hostname: hostname(&config.hostname, &name.name, shares)?,
        name,
        handler: handler.to_owned(),
        log_directory: log_directory(&config.log_directory)?,
        dns: dns(config.dns_config.as_ref())?,
        ports: config.port_mappings.iter().filter_map(port).collect::<Result<_, _>>()?,
        bandwidth: Bandwidth {
            ingress_bps: bandwidth(config, "kubernetes.io/ingress-bandwidth")?,
            egress_bps: bandwidth(config, "kubernetes.io/egress-bandwidth")?,
        },
        labels: pairs(&config.labels),
        annotations: pairs(&config.annotations),
        sysctls: {
            let own_users = user_namespace.is_some() || kind.has_guest();
            let sysctl = |(key, value): (&String, &String)| sysctl(key, value, shares, own_users);
            linux.sysctls.iter().map(sysctl).collect::<Result<_, _>>()?
        },
        shared_pid: namespaces.pid() == cri::NamespaceMode::Pod,
        kind,
        user_namespace,
        empty_dirs: None,
        checkpoint: None,
        socket_mounts: Vec::new(),
        privileged: security.privileged,
        memory_limit: positive(resources.containers.memory_limit),
        overhead_memory: positive(resources.overhead.memory_limit),
        overhead_cpu_milli: cpu_milli(resources.overhead.cpu_period, resources.overhead.cpu_quota),
        cpu_limit_milli: cpu_milli(resources.containers.cpu_period, resources.containers.cpu_quota),
        cgroup_parent: cgroup_parent(&linux.cgroup_parent)?,
    })
}

/// Returns the bits per second that an annotation of the pod allows, if it has it. Kubernetes has the same range.
fn bandwidth(config: &cri::PodSandboxConfig, annotation: &'static str) -> Result<Option<u64>, FieldError> {
    let Some(text) = config.annotations.get(annotation) else { return Ok(None) };
    let bits = Quantity::parse(text).ok().and_then(|quantity| quantity.bytes());
    match bits.filter(|bits| BANDWIDTHS.contains(bits)) {
        Some(bits) => Ok(Some(bits)),
        None => bad(
            "config.annotations",
            format!("{annotation}={text}"),
            "bits per second from 1k to 1P are allowed, for example 10M",
        ),
    }
}

/// Returns a limit, or `None` if the value is not positive.
fn positive(bytes: i64) -> Option<u64> {
    u64::try_from(bytes).ok().filter(|bytes| *bytes > 0)
}

/// Returns the requested namespaces of the node, if the policy allows them.
fn node_namespaces(namespaces: &cri::NamespaceOption, policy: HostNamespaces) -> Result<NodeNamespaces, FieldError> {
    use cri::NamespaceMode::{Container, Node, Pod};
    for (field, mode, allowed) in [
        ("config.linux.security_context.namespace_options.network", namespaces.network(), &[Pod][..]),
        ("config.linux.security_context.namespace_options.ipc", namespaces.ipc(), &[Pod][..]),
        ("config.linux.security_context.namespace_options.pid", namespaces.pid(), &[Pod, Container][..]),
    ] {
        if mode == Node && policy == HostNamespaces::Refuse {
            return Err(FieldError::HostNamespace { field });
        }
        if mode != Node && !allowed.contains(&mode) {
            return bad(field, mode.as_str_name(), "a pod has one of its own (POD); pid can be CONTAINER too");
        }
    }
    Ok(NodeNamespaces {
        network: namespaces.network() == Node,
        pid: namespaces.pid() == Node,
        ipc: namespaces.ipc() == Node,
    })
}

fn check_security(security: &cri::LinuxSandboxSecurityContext) -> Result<(), FieldError> {
    if let Some(group) = &security.run_as_group {
        let field = "config.linux.security_context.run_as_group";
        if security.run_as_user.is_none() {
            return bad(field, group.value, "it is allowed together with run_as_user only");
        }
        id_number(field, group.value)?;
    }
    if let Some(user) = &security.run_as_user {
        id_number("config.linux.security_context.run_as_user", user.value)?;
    }
    apparmor::check_pod(security)
}

/// Returns the pod's host name. For a pod with the node's network kubelet sends none, and the name is the node's.
fn hostname(hostname: &str, pod: &str, node: NodeNamespaces) -> Result<String, FieldError> {
    if hostname.is_empty() {
        if let Some(name) = nix::unistd::gethostname().ok().filter(|name| node.network && !name.is_empty()) {
            return Ok(name.to_string_lossy().into_owned());
        }
        // A host name may contain only these characters, and in Kubernetes a pod's name contains no others.
        let usable = |c: &char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.');
        let name: String = pod.chars().filter(usable).take(HOSTNAME - 1).collect();
        return Ok(if name.is_empty() { "pod".to_owned() } else { name });
    }
    let ok = |b: u8| b.is_ascii_alphanumeric() || b"-._".contains(&b);
    if hostname.len() > HOSTNAME || !hostname.bytes().all(ok) {
        return bad("config.hostname", hostname, "1 to 64 characters from A-Za-z0-9-._ are allowed");
    }
    Ok(hostname.to_owned())
}

fn cgroup_parent(text: &str) -> Result<Option<String>, FieldError> {
    if text.split('/').any(|part| part == "..") || text.chars().any(char::is_control) {
        return bad("config.linux.cgroup_parent", text, "a path without .. is needed");
    }
    Ok((!text.trim_matches('/').is_empty()).then(|| text.to_owned()))
}

fn log_directory(text: &str) -> Result<Option<PathBuf>, FieldError> {
    let path = PathBuf::from(text);
    let plain = |part| !matches!(part, std::path::Component::ParentDir);
    if text.is_empty() {
        Ok(None)
    } else if path.is_absolute() && path.components().all(plain) && !text.contains('\0') {
        Ok(Some(path))
    } else {
        bad("config.log_directory", text, "an absolute path without .. is needed")
    }
}

fn dns(dns: Option<&cri::DnsConfig>) -> Result<Option<DnsConfig>, FieldError> {
    let Some(dns) = dns.filter(|dns| **dns != cri::DnsConfig::default()) else { return Ok(None) };
    for (field, words) in [
        ("config.dns_config.servers", &dns.servers),
        ("config.dns_config.searches", &dns.searches),
        ("config.dns_config.options", &dns.options),
    ] {
        if let Some(word) =
            words.iter().find(|w| w.is_empty() || w.chars().any(|c| c.is_whitespace() || c.is_control()))
        {
            return bad(field, word, "one word without spaces is needed");
        }
    }
    if let Some(server) = dns.servers.iter().find(|server| !is_name_server(server)) {
        return bad("config.dns_config.servers", server, "an IP address is needed");
    }
    Ok(Some(DnsConfig { servers: dns.servers.clone(), searches: dns.searches.clone(), options: dns.options.clone() }))
}

/// Returns whether a resolver can send requests to this server: an IP address; an IPv6 address may have a zone (RFC 4007, section 11), an
/// interface of the pod.
fn is_name_server(server: &str) -> bool {
    let Some((address, zone)) = server.split_once('%') else { return server.parse::<IpAddr>().is_ok() };
    let is_zone = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    address.parse::<Ipv6Addr>().is_ok() && (1..=MAX_INTERFACE_NAME).contains(&zone.len()) && zone.chars().all(is_zone)
}

/// Returns `None` for a port without a port of the node.
fn port(port: &cri::PortMapping) -> Option<Result<PortMapping, FieldError>> {
    (port.host_port != 0).then(|| {
        let number = |field, value: i32| match u16::try_from(value) {
            Ok(number) if number > 0 => Ok(number),
            _ => bad(field, value, "1 to 65535 are allowed"),
        };
        let host_ip = match port.host_ip.as_str() {
            "" => None,
            text => match text.parse::<std::net::IpAddr>() {
                Ok(ip) => Some(ip),
                Err(_no_address) => return bad("config.port_mappings.host_ip", text, "an IP address is needed"),
            },
        };
        let protocol = match cri::Protocol::try_from(port.protocol) {
            Ok(cri::Protocol::Tcp) => Protocol::Tcp,
            Ok(cri::Protocol::Udp) => Protocol::Udp,
            Ok(cri::Protocol::Sctp) => Protocol::Sctp,
            Err(_unknown) => {
                return bad("config.port_mappings.protocol", port.protocol, "TCP, UDP and SCTP are allowed");
            }
        };
        Ok(PortMapping {
            host_port: number("config.port_mappings.host_port", port.host_port)?,
            container_port: number("config.port_mappings.container_port", port.container_port)?,
            protocol,
            host_ip,
        })
    })
}

/// Returns a sysctl's name with dots as separators. Both spellings are in use, and as in sysctl(8) the first separator decides:
/// net/ipv4/conf/eth0.1/forwarding is net.ipv4.conf.eth0/1.forwarding.
fn dotted(key: &str) -> String {
    let swap = |c| match c {
        '/' => '.',
        '.' => '/',
        other => other,
    };
    match key.find(['.', '/']) {
        Some(first) if key[first..].starts_with('/') => key.chars().map(swap).collect(),
        _ => key.to_owned(),
    }
}

/// The kind of namespace that has values of its own of a sysctl.
#[derive(Clone, Copy, PartialEq, Eq)]
enum SysctlNamespace {
    Network,
    Ipc,
    Uts,
    User,
}

/// Returns the kind of namespace that a sysctl belongs to, or `None` if it is one of the whole kernel. The agent has the same list.
fn sysctl_namespace(dotted: &str) -> Option<SysctlNamespace> {
    let begins = |starts: &[&str]| starts.iter().any(|start| dotted.starts_with(start));
    match dotted {
        "kernel.sem" => Some(SysctlNamespace::Ipc),
        "kernel.domainname" => Some(SysctlNamespace::Uts),
        _ if begins(&["net."]) => Some(SysctlNamespace::Network),
        _ if begins(&["kernel.shm", "kernel.msg", "fs.mqueue."]) => Some(SysctlNamespace::Ipc),
        _ if begins(&["user."]) => Some(SysctlNamespace::User),
        _ => None,
    }
}

/// Checks a sysctl. `own_users`: the pod has a user namespace or a kernel of its own.
fn sysctl(key: &str, value: &str, node: NodeNamespaces, own_users: bool) -> Result<(String, String), FieldError> {
    let field = "config.linux.sysctls";
    let dotted = dotted(key);
    let clean = dotted.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-/".contains(&b))
        && dotted.split('.').all(|part| !part.is_empty() && part.bytes().any(|b| b != b'/'));
    let rule = "a pod may set net.*, kernel.shm*, kernel.msg*, kernel.sem, kernel.domainname, fs.mqueue.* and user.*";
    let Some(namespace) = sysctl_namespace(&dotted).filter(|_| clean) else { return bad(field, key, rule) };
    let shared = match namespace {
        SysctlNamespace::Network => node.network,
        SysctlNamespace::Ipc => node.ipc,
        SysctlNamespace::Uts => false,
        SysctlNamespace::User => !own_users,
    };
    if shared {
        return bad(field, key, "it is of a namespace that this pod shares with the node");
    }
    if namespace == SysctlNamespace::Uts && value.len() > HOSTNAME {
        return bad(field, value, "Linux accepts a domain name of at most 64 bytes");
    }
    if value.chars().any(char::is_control) || value.len() > 4096 {
        return bad(field, value, "a value has one line of at most 4096 bytes");
    }
    Ok((dotted, value.to_owned()))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use nacelle_base::{Classify, FailureKind};

    pub(crate) fn sample() -> cri::PodSandboxConfig {
        cri::PodSandboxConfig {
            metadata: Some(cri::PodSandboxMetadata {
                name: "web".into(),
                uid: "u1".into(),
                namespace: "default".into(),
                attempt: 2,
            }),
            hostname: "web-0".into(),
            log_directory: "/var/log/pods/web".into(),
            linux: Some(cri::LinuxPodSandboxConfig::default()),
            ..Default::default()
        }
    }

    fn converted(change: impl FnOnce(&mut cri::PodSandboxConfig)) -> Result<PodConfig, FieldError> {
        let mut config = sample();
        change(&mut config);
        pod_config(Some(&config), "h", EngineSetting::Auto, &SandboxSettings::default())
    }

    fn security(config: &mut cri::PodSandboxConfig) -> &mut cri::LinuxSandboxSecurityContext {
        config.linux.get_or_insert_default().security_context.get_or_insert_default()
    }

    fn namespaces(config: &mut cri::PodSandboxConfig) -> &mut cri::NamespaceOption {
        security(config).namespace_options.get_or_insert_default()
    }

    #[test]
    fn a_name_server_may_have_a_zone() {
        for (server, allowed) in [
            ("10.96.0.10", true),
            ("fd00::a", true),
            ("fe80::1%eth0", true),
            ("fe80::1%", false),
            ("fe80::1%eth0%1", false),
            ("fe80::1%a-name-of-16-byt", false),
            ("10.96.0.10%eth0", false),
            ("dns.example", false),
        ] {
            let with_server = |config: &mut cri::PodSandboxConfig| {
                config.dns_config = Some(cri::DnsConfig { servers: vec![server.into()], ..Default::default() });
            };
            assert_eq!(converted(with_server).is_ok(), allowed, "{server}");
        }
    }

    #[test]
    fn traffic_is_limited_by_the_annotations_of_kubernetes() {
        let limited = |text: &str| {
            let annotate = |config: &mut cri::PodSandboxConfig| {
                config.annotations.insert("kubernetes.io/egress-bandwidth".into(), text.into());
            };
            converted(annotate).map(|pod| pod.bandwidth)
        };
        assert!(converted(|_| {}).unwrap().bandwidth.is_unlimited());
        for (text, bits) in [("10M", 10_000_000), ("1k", 1_000), ("1P", 1_000_000_000_000_000), ("2Ki", 2048)] {
            assert_eq!(limited(text).unwrap(), Bandwidth { ingress_bps: None, egress_bps: Some(bits) }, "{text}");
        }
        for text in ["", "fast", "0", "999", "-1M", "2P"] {
            let error = limited(text).unwrap_err().to_string();
            assert!(error.contains(&format!("kubernetes.io/egress-bandwidth={text}")), "{error}");
        }
    }

    #[test]
    fn what_kubelet_sends_is_taken_over() {
        let pod = converted(|config| {
            config.dns_config = Some(cri::DnsConfig {
                servers: vec!["10.96.0.10".into()],
                searches: vec!["cluster.local".into()],
                options: vec!["ndots:5".into()],
            });
            config.labels.insert("app".into(), "web".into());
            config.annotations.insert("a".into(), "b\nc".into());
            config.port_mappings = vec![
                cri::PortMapping { protocol: 1, container_port: 53, host_port: 5353, host_ip: "::1".into() },
                cri::PortMapping { protocol: 0, container_port: 80, host_port: 0, host_ip: String::new() },
            ];
            let linux = config.linux.get_or_insert_default();
            linux.sysctls.insert("net/ipv4/ip_forward".into(), "1".into());
            linux.resources = Some(cri::LinuxContainerResources {
                cpu_period: 100_000,
                cpu_quota: 150_000,
                memory_limit_in_bytes: 1 << 28,
                ..Default::default()
            });
            linux.overhead = Some(cri::LinuxContainerResources {
                memory_limit_in_bytes: 1 << 20,
                cpu_period: 100_000,
                cpu_quota: 25_000,
                ..Default::default()
            });
        })
        .unwrap();
        assert_eq!((pod.name.attempt, pod.handler.as_str(), pod.hostname.as_str()), (2, "h", "web-0"));
        assert_eq!(pod.dns.unwrap().options, ["ndots:5"]);
        assert_eq!(pod.ports.len(), 1);
        assert_eq!((pod.ports[0].protocol, pod.ports[0].container_port), (Protocol::Udp, 53));
        assert_eq!(pod.sysctls["net.ipv4.ip_forward"], "1");
        assert_eq!((pod.memory_limit, pod.cpu_limit_milli), (Some(1 << 28), Some(1500)));
        assert_eq!((pod.overhead_memory, pod.overhead_cpu_milli), (Some(1 << 20), Some(250)));
        assert_eq!(pod.cgroup_parent, None);
        assert!(pod.shared_pid);
        assert_eq!(pod.annotations["a"], "b\nc");
    }

    #[test]
    fn every_refusal_names_field_and_rule() {
        type Change = fn(&mut cri::PodSandboxConfig);
        let rows: [(Change, FailureKind, &str); 17] = [
            (|c| c.metadata = None, FailureKind::Invalid, "config.metadata is missing"),
            (|c| c.metadata.as_mut().unwrap().name.clear(), FailureKind::Invalid, "config.metadata.name is missing"),
            (|c| c.metadata.as_mut().unwrap().namespace.clear(), FailureKind::Invalid, "namespace"),
            (|c| c.metadata.as_mut().unwrap().uid = "a\n".into(), FailureKind::Invalid, "uid"),
            (|c| c.hostname = "a b".into(), FailureKind::Invalid, "config.hostname"),
            (|c| c.log_directory = "logs".into(), FailureKind::Invalid, "config.log_directory"),
            (|c| c.log_directory = "/a/../b".into(), FailureKind::Invalid, "config.log_directory"),
            (|c| namespaces(c).network = 2, FailureKind::Conflict, "network is NODE"),
            (|c| namespaces(c).pid = 2, FailureKind::Conflict, "pid is NODE"),
            (|c| namespaces(c).ipc = 2, FailureKind::Conflict, "ipc is NODE"),
            (|c| namespaces(c).network = 1, FailureKind::Invalid, "network"),
            (|c| namespaces(c).userns_options = Some(Default::default()), FailureKind::Invalid, "userns_options"),
            (|c| security(c).run_as_group = Some(cri::Int64Value { value: 5 }), FailureKind::Invalid, "run_as_user"),
            (
                |c| c.linux.as_mut().unwrap().sysctls.extend([("kernel.core_pattern".into(), "x".into())]),
                FailureKind::Invalid,
                "kernel.core_pattern",
            ),
            (
                |c| c.linux.as_mut().unwrap().sysctls.extend([("kernel.shmmax".into(), "1\n2".into())]),
                FailureKind::Invalid,
                "one line",
            ),
            (
                |c| c.dns_config = Some(cri::DnsConfig { servers: vec!["dns".into()], ..Default::default() }),
                FailureKind::Invalid,
                "servers",
            ),
            (
                |c| {
                    c.port_mappings =
                        vec![cri::PortMapping { host_port: 70000, container_port: 1, ..Default::default() }]
                },
                FailureKind::Invalid,
                "host_port",
            ),
        ];
        for (change, kind, words) in rows {
            let error = converted(change).unwrap_err();
            assert_eq!(error.kind(), kind, "{error}");
            assert!(error.to_string().contains(words), "{error}");
        }
        assert_eq!(
            pod_config(None, "", EngineSetting::Auto, &SandboxSettings::default()).unwrap_err(),
            FieldError::Missing { field: "config" }
        );
    }

    #[test]
    fn namespaces_of_the_node_are_given_where_the_configuration_says_so() {
        let mut config = sample();
        let options = cri::NamespaceOption { network: 2, pid: 2, ..Default::default() };
        security(&mut config).namespace_options = Some(options);
        let mut converted = |sysctl: Option<&str>| {
            let linux = config.linux.get_or_insert_default();
            linux.sysctls = sysctl.map(|key| (key.to_owned(), "1".to_owned())).into_iter().collect();
            let policy = SandboxSettings { host_namespaces: HostNamespaces::RunOnHost, ..SandboxSettings::default() };
            pod_config(Some(&config), "h", EngineSetting::Auto, &policy)
        };
        let pod = converted(Some("kernel.shmmax")).unwrap();
        let namespaces = NodeNamespaces { network: true, pid: true, ipc: false };
        assert_eq!(pod.kind, PodKind::Host { namespaces });
        assert_eq!(pod.hostname, "web-0");
        assert!(!pod.shared_pid);
        let error = converted(Some("net.ipv4.ip_forward")).unwrap_err();
        assert!(error.to_string().contains("shares with the node"), "{error}");
    }

    #[test]
    fn privileged_pods_are_machines_unless_the_configuration_says_otherwise() {
        for (privileged, policy, on_host) in [
            (true, PrivilegedPods::Machine, false),
            (true, PrivilegedPods::RunOnHost, true),
            (false, PrivilegedPods::RunOnHost, false),
        ] {
            let mut config = sample();
            security(&mut config).privileged = privileged;
            let policy = SandboxSettings { privileged: policy, ..SandboxSettings::default() };
            assert_eq!(
                pod_config(Some(&config), "h", EngineSetting::Auto, &policy).unwrap().kind.has_guest(),
                !on_host
            );
            let range = vec![cri::IdMapping { container_id: 0, host_id: 65_536, length: 65_536 }];
            let users = cri::UserNamespace { uids: range.clone(), gids: range, ..Default::default() };
            namespaces(&mut config).userns_options = Some(users);
            assert!(
                pod_config(Some(&config), "h", EngineSetting::Auto, &policy).unwrap().kind.has_guest(),
                "it has no rights on the node"
            );
        }
    }

    #[test]
    fn a_pod_without_a_host_name_is_called_by_its_own_or_as_the_node_whose_network_it_has() {
        assert_eq!(converted(|c| c.hostname.clear()).unwrap().hostname, "web");
        let mut config = sample();
        config.hostname.clear();
        let policy = SandboxSettings { host_namespaces: HostNamespaces::RunOnHost, ..SandboxSettings::default() };
        let node = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
        for (network, pid, expected) in [(2, 0, node.trim()), (0, 2, "web")] {
            let options = cri::NamespaceOption { network, pid, ..Default::default() };
            security(&mut config).namespace_options = Some(options);
            assert_eq!(pod_config(Some(&config), "h", EngineSetting::Auto, &policy).unwrap().hostname, expected);
        }
    }

    #[test]
    fn sysctls_are_taken_whose_namespace_the_pod_has_to_itself() {
        let (own, network) = (NodeNamespaces::default(), NodeNamespaces { network: true, pid: false, ipc: false });
        let ipc = NodeNamespaces { network: false, pid: false, ipc: true };
        for (key, node, own_users, words) in [
            ("user.max_user_namespaces", own, true, None),
            ("user/max_user_namespaces", own, true, None),
            ("user.max_user_namespaces", own, false, Some("shares with the node")),
            ("kernel.domainname", network, false, None),
            ("kernel.domainname", ipc, false, None),
            ("kernel.sem", ipc, true, Some("shares with the node")),
            ("fs.mqueue.msg_max", ipc, true, Some("shares with the node")),
            ("net.ipv4.ip_forward", network, true, Some("shares with the node")),
            ("kernel.domainnames", own, true, Some("a pod may set")),
            ("kernel.semantics", own, true, Some("a pod may set")),
            ("kernel.hostname", own, true, Some("a pod may set")),
            ("user", own, true, Some("a pod may set")),
        ] {
            let error = sysctl(key, "1", node, own_users).err().map(|error| error.to_string());
            assert_eq!(error.is_some(), words.is_some(), "{key}: {error:?}");
            assert!(error.as_deref().unwrap_or_default().contains(words.unwrap_or_default()), "{key}: {error:?}");
        }
        assert!(sysctl("kernel.domainname", &"x".repeat(65), own, true).is_err());
    }

    #[test]
    fn names_of_sysctls_keep_the_names_of_their_interfaces() {
        for (key, taken) in [
            ("net.ipv4.ip_forward", "net.ipv4.ip_forward"),
            ("net/ipv4/ip_forward", "net.ipv4.ip_forward"),
            ("net.ipv4.conf.eth0/1.forwarding", "net.ipv4.conf.eth0/1.forwarding"),
            ("net/ipv4/conf/eth0.1/forwarding", "net.ipv4.conf.eth0/1.forwarding"),
        ] {
            assert_eq!(sysctl(key, "1", NodeNamespaces::default(), true).unwrap().0, taken);
        }
        for key in ["net/ipv4/../x", "net.ipv4.//.x", "net..x", "net.", "/net/ipv4/x", "net.ipv4.ip forward"] {
            assert_eq!(
                sysctl(key, "1", NodeNamespaces::default(), true).unwrap_err().kind(),
                FailureKind::Invalid,
                "{key}"
            );
        }
    }

    #[test]
    fn a_pid_namespace_per_container() {
        assert!(!converted(|c| namespaces(c).pid = 1).unwrap().shared_pid);
    }
}
