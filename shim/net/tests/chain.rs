//! Tests the whole life of pod networks with Debian's plugins: the configuration for the guest, and that nothing is leaked.

mod common;

use common::{LIMIT, eventually, in_a_world, ip_in, links, pod};
use nacelle_base::net::{Interface, Neighbour, Route};
use nacelle_base::{Classify, FailureKind};
use nacelle_net::{Attachment, InterfaceUsage, NetError, NetNs, PodRef, inspect, netns, run_in, tap};
use std::net::IpAddr;

const BRIDGE: &str = r#"{ "cniVersion": "1.0.0", "name": "bridged", "plugins": [
    { "type": "bridge", "bridge": "nb0", "isGateway": true, "ipMasq": true,
      "dns": { "nameservers": ["10.77.0.1"], "domain": "node.test", "search": ["pods.test"], "options": ["ndots:2"] },
      "ipam": { "type": "host-local", "dataDir": "DIR/leases",
                "ranges": [[{ "subnet": "fd77::/64" }], [{ "subnet": "10.77.0.0/24" }]],
                "routes": [{ "dst": "::/0" }, { "dst": "0.0.0.0/0" }, { "dst": "192.168.9.0/24", "gw": "10.77.0.9" }] } },
    { "type": "loopback" },
    { "type": "portmap", "capabilities": { "portMappings": true } } ] }"#;

fn route(destination: &str, gateway: Option<&str>, metric: Option<u32>) -> Route {
    Route {
        destination: destination.parse().unwrap(),
        gateway: gateway.map(|gateway| gateway.parse().unwrap()),
        interface: "eth0".to_owned(),
        metric,
        source: None,
        mtu: None,
    }
}

fn addresses(interface: &Interface) -> Vec<String> {
    interface.addresses.iter().map(ToString::to_string).collect()
}

/// Returns the leases of host-local: files named like addresses.
fn leases(files: Vec<String>) -> Vec<String> {
    files.into_iter().filter(|name| name.parse::<IpAddr>().is_ok()).collect()
}

#[test]
fn a_bridged_pod_gets_everything_and_leaves_nothing() {
    in_a_world(&["bridge", "host-local", "portmap", "loopback"], |world| async move {
        world.conf("20-ignored.conf", "{");
        world.conf("10-bridged.conflist", BRIDGE);
        world.network.status().await.unwrap();
        let (pod, attachment) = world.pod(1).await;
        let eth0 = &attachment.network.interfaces[0];
        assert_eq!((eth0.name.as_str(), eth0.mtu), ("eth0", 1500));
        // The order is that of the plugins, not of the kernel.
        assert_eq!(addresses(eth0), ["fd77::2/64", "10.77.0.2/24"]);
        assert_eq!(attachment.ips, ["fd77::2".parse::<IpAddr>().unwrap(), "10.77.0.2".parse().unwrap()]);
        let mac = ip_in(&world.network.netns_path(&pod.id), &["-o", "link", "show", "eth0"]);
        let text = eth0.mac.map(|byte| format!("{byte:02x}")).join(":");
        assert!(mac.contains(&text), "{mac} {text}");
        let mut routes = attachment.network.routes.clone();
        routes.sort_by_key(|route| route.destination);
        let expected = [
            route("0.0.0.0/0", Some("10.77.0.1"), None),
            route("192.168.9.0/24", Some("10.77.0.9"), None),
            route("::/0", Some("fd77::1"), Some(1024)),
        ];
        assert_eq!(routes, expected);
        assert_eq!(attachment.dns.servers, ["10.77.0.1"]);
        assert_eq!(attachment.dns.searches, ["node.test", "pods.test"]);
        assert_eq!(attachment.dns.options, ["ndots:2"]);

        world.network.check(&pod.id).await.unwrap();
        let (second, _) = world.pod(2).await;
        assert_eq!(world.network.pods().await.unwrap(), [pod.id.clone(), second.id.clone()].into());
        assert_eq!(leases(world.files("leases")), ["10.77.0.2", "10.77.0.3", "fd77::2", "fd77::3"]);

        // A new daemon with another configuration: CHECK and DEL still use the input of ADD.
        world.conf("10-bridged.conflist", &BRIDGE.replace("10.77", "10.79").replace("bridged", "renamed"));
        let network = world.again(LIMIT);
        network.check(&pod.id).await.unwrap();
        network.teardown(&pod.id).await.unwrap();
        assert_eq!(leases(world.files("leases")), ["10.77.0.3", "fd77::3"]);
        network.gc(&|| [second.id.clone()].into(), LIMIT).await.unwrap();
        network.check(&second.id).await.unwrap();

        // An address was removed without CNI.
        ip_in(&network.netns_path(&second.id), &["addr", "del", "10.77.0.3/24", "dev", "eth0"]);
        let error = network.check(&second.id).await.unwrap_err();
        assert!(matches!(error, NetError::Cni(_)), "{error}");
        // The plugin needs the address for its cleanup.
        ip_in(&network.netns_path(&second.id), &["addr", "add", "10.77.0.3/24", "dev", "eth0"]);

        network.gc(&|| [].into(), LIMIT).await.unwrap();
        network.teardown(&second.id).await.unwrap();
        assert_eq!(network.check(&second.id).await.unwrap_err().kind(), FailureKind::NotFound);
        assert!(leases(world.files("leases")).is_empty());
        assert!(world.files("netns").is_empty() && world.files("cache").is_empty());
        assert_eq!(links(), ["lo", "nb0"]);
        let rules = common::run("iptables", &["-t", "nat", "-S"]);
        assert!(!rules.contains("10.77.0."), "{rules}");
    });
}

#[test]
fn a_point_to_point_pod_has_no_neighbours_on_the_link() {
    in_a_world(&["ptp", "host-local"], |world| async move {
        world.conf(
            "10-ptp.json",
            r#"{ "cniVersion": "0.4.0", "name": "ptp", "type": "ptp",
                 "ipam": { "type": "host-local", "dataDir": "DIR/leases",
                           "ranges": [[{ "subnet": "10.78.0.0/24" }], [{ "subnet": "fd78::/64" }]],
                           "routes": [{ "dst": "0.0.0.0/0" }, { "dst": "::/0" }] } }"#,
        );
        let (pod, attachment) = world.pod(1).await;
        assert_eq!(addresses(&attachment.network.interfaces[0]), ["10.78.0.2/32", "fd78::2/128"]);
        let routes = &attachment.network.routes;
        let gateways: Vec<bool> = routes.iter().map(|route| route.gateway.is_some()).collect();
        assert!(gateways.is_sorted(), "on the link first: {routes:?}");
        for expected in [
            route("10.78.0.1/32", None, None),
            route("10.78.0.0/24", Some("10.78.0.1"), None),
            route("0.0.0.0/0", Some("10.78.0.1"), None),
        ] {
            // The plugin sets the pod's address as the source of some routes.
            let same = |other: &&Route| Route { source: None, ..(*other).clone() } == expected;
            assert!(routes.iter().any(|other| same(&other)), "{expected:?} in {routes:?}");
        }
        for (destination, gateway) in [("fd78::1/128", None), ("fd78::/64", Some("fd78::1")), ("::/0", Some("fd78::1"))]
        {
            let same = |other: &&Route| {
                Route { metric: None, source: None, ..(*other).clone() } == route(destination, gateway, None)
            };
            assert!(routes.iter().any(|other| same(&other)), "{destination} in {routes:?}");
        }
        world.network.check(&pod.id).await.unwrap();
        world.network.teardown(&pod.id).await.unwrap();
        assert!(leases(world.files("leases")).is_empty());
        assert_eq!(links(), ["lo"]);
    });
}

#[test]
fn a_node_that_lost_the_namespace_still_gives_the_lease_back() {
    in_a_world(&["bridge", "host-local", "portmap", "loopback"], |world| async move {
        world.conf("10-bridged.conflist", BRIDGE);
        let (pod, _) = world.pod(1).await;
        netns::remove(&world.network.netns_path(&pod.id)).unwrap();
        world.network.teardown(&pod.id).await.unwrap();
        assert!(leases(world.files("leases")).is_empty());
        assert!(world.files("cache").is_empty());
        // The file that named the namespace is left.
        let (pod, _) = world.pod(2).await;
        nix::mount::umount2(&world.network.netns_path(&pod.id), nix::mount::MntFlags::MNT_DETACH).unwrap();
        world.network.teardown(&pod.id).await.unwrap();
        assert!(leases(world.files("leases")).is_empty() && world.files("netns").is_empty());
    });
}

#[test]
fn when_a_real_plugin_refuses_the_others_are_taken_back() {
    in_a_world(&["bridge", "host-local"], |world| async move {
        let refusing = r#"{ "type": "nacelle-fake", "dir": "DIR", "tag": "last", "mode": "json" }"#;
        world.conf("10-bridged.conflist", &BRIDGE.replace(r#"{ "type": "loopback" }"#, refusing));
        world.network.create_netns(&pod(1).id).await.unwrap();
        world.network.setup(&pod(1)).await.unwrap_err();
        assert!(leases(world.files("leases")).is_empty());
        assert_eq!(links(), ["lo", "nb0"]);
        assert!(world.files("cache").is_empty());
    });
}

#[test]
fn a_route_over_several_gateways_is_refused_and_others_are_read() {
    in_a_world(&[], |world| async move {
        let path = world.dir("netns").join("plain");
        let netns = netns::create(&path).unwrap();
        for args in [
            "link add eth0 type veth peer name peer0",
            "addr add 10.9.0.2/24 dev eth0",
            "link set eth0 up mtu 1280",
            "route add 10.10.0.0/16 via 192.0.2.1 dev eth0 onlink metric 7",
            "route add 10.11.0.0/16 via 10.9.0.1 table 77",
            "route add blackhole 10.12.0.0/16",
        ] {
            ip_in(&path, &args.split(' ').collect::<Vec<_>>());
        }
        let found = inspect(&netns, &["eth0".to_owned()]).unwrap();
        assert_eq!(found.interfaces[0].mtu, 1280);
        let expected = [route("192.0.2.1/32", None, Some(7)), route("10.10.0.0/16", Some("192.0.2.1"), Some(7))];
        assert_eq!(found.routes, expected);
        ip_in(
            &path,
            &"route add 10.13.0.0/16 nexthop via 10.9.0.3 nexthop via 10.9.0.4".split(' ').collect::<Vec<_>>(),
        );
        let error = inspect(&netns, &["eth0".to_owned()]).unwrap_err();
        assert!(matches!(error, NetError::Route { .. }), "{error}");
        assert!(matches!(inspect(&netns, &["eth7".to_owned()]), Err(NetError::NoInterface { .. })));
        // The loopback's Ethernet address is all zeros.
        assert!(matches!(inspect(&netns, &["lo".to_owned()]), Err(NetError::BadMac { .. })));
    });
}

#[test]
fn what_plugins_set_on_an_interface_is_carried_over() {
    in_a_world(&[], |world| async move {
        let path = world.dir("netns").join("routed");
        let netns = netns::create(&path).unwrap();
        for args in [
            "link add eth0 type veth peer name peer0",
            "link set peer0 up mtu 65535",
            "link set eth0 up mtu 65535",
            "addr add 10.80.7.5/32 dev eth0",
            "addr add 10.80.8.5 peer 10.80.8.1/32 dev eth0",
            "-6 addr add fd80::5/128 dev eth0 nodad",
            "route add 169.254.1.1 dev eth0 scope link",
            "route add default via 169.254.1.1 dev eth0",
            "route add 10.81.0.0/16 via 169.254.1.1 dev eth0 src 10.80.7.5 mtu 1300 metric 7",
            "-6 route add fe80::1 dev eth0",
            "-6 route add default via fe80::1 dev eth0",
            "neigh add 169.254.1.1 lladdr 02:00:00:00:00:01 dev eth0 nud permanent",
            "neigh add fe80::1 lladdr 02:00:00:00:00:01 dev eth0 nud permanent",
            "neigh add 10.80.8.1 lladdr 02:00:00:00:00:02 dev eth0 nud stale",
            // The warning names these.
            "rule add from 10.80.7.5 table 77",
            "link set eth0 txqueuelen 33",
        ] {
            ip_in(&path, &args.split(' ').collect::<Vec<_>>());
        }
        let found = inspect(&netns, &["eth0".to_owned()]).unwrap();
        let eth0 = &found.interfaces[0];
        // The largest MTU of a tap.
        assert_eq!(eth0.mtu, 65521);
        assert_eq!(addresses(eth0), ["10.80.7.5/32", "10.80.8.5/32", "fd80::5/128"]);
        let neighbour = |ip: &str| Neighbour { ip: ip.parse().unwrap(), mac: [2, 0, 0, 0, 0, 1] };
        assert_eq!(eth0.neighbours, [neighbour("169.254.1.1"), neighbour("fe80::1")]);
        let of = |destination: &str| {
            let found = found.routes.iter().filter(|route| route.destination == destination.parse().unwrap());
            found
                .map(|found| (found.gateway.map(|gateway| gateway.to_string()), found.metric, found.source, found.mtu))
                .collect::<Vec<_>>()
        };
        assert_eq!(of("169.254.1.1/32"), [(None, None, None, None)]);
        assert_eq!(of("0.0.0.0/0"), [(Some("169.254.1.1".to_owned()), None, None, None)]);
        let source = Some("10.80.7.5".parse().unwrap());
        assert_eq!(of("10.81.0.0/16"), [(Some("169.254.1.1".to_owned()), Some(7), source, Some(1300))]);
        // The kernel derived the route from an address whose peer the guest does not know.
        assert_eq!(of("10.80.8.1/32"), [(None, None, None, None)]);
        assert_eq!(of("fe80::1/128").len(), 1);
        assert_eq!(of("::/0")[0].0.as_deref(), Some("fe80::1"));
        assert_eq!(found.routes.len(), 6, "{:?}", found.routes);

        let tap = tap::create(&netns, "tap0").unwrap();
        tap::connect(&netns, "tap0", "eth0").unwrap();
        assert!(ip_in(&path, &["link", "show", "tap0"]).contains("mtu 65521"));
        drop(tap);
        // With such an MTU the kernel itself disables IPv6.
        ip_in(&path, &["link", "set", "eth0", "mtu", "1000"]);
        let found = inspect(&netns, &["eth0".to_owned()]).unwrap();
        assert_eq!((found.interfaces[0].mtu, addresses(&found.interfaces[0]).len()), (1000, 2));
    });
}

#[test]
fn namespaces_and_taps_come_and_go() {
    in_a_world(&[], |world| async move {
        let path = world.dir("netns").join("one");
        let one = netns::create(&path).unwrap();
        assert_eq!(netns::create(&path).unwrap_err().kind(), FailureKind::AlreadyExists);
        assert!(ip_in(&path, &["-o", "link", "show", "lo"]).contains("UP"));
        assert_eq!(links(), ["lo"]);
        let tap = tap::create(&one, "tap0").unwrap();
        assert!(matches!(tap::create(&one, "tap0"), Err(NetError::Tap { .. })));
        assert_eq!(tap::create_multi_queue(&one, "tap1", 3).unwrap().more_queues.len(), 2);
        assert!(matches!(tap::create_multi_queue(&one, "tap0", 2), Err(NetError::Tap { .. })));
        assert!(matches!(tap::create(&one, "../../x"), Err(NetError::BadName { .. })));
        assert!(matches!(tap::connect(&one, "tap0", "eth0"), Err(NetError::NoInterface { .. })));
        assert_eq!(run_in(&one, links).unwrap(), ["lo", "tap0"]);
        drop(tap);
        // A child that another test is starting may hold a copy of the descriptor until it executes.
        eventually("the tap is gone", || run_in(&one, links).unwrap() == ["lo"]).await;
        netns::remove(&path).unwrap();
        netns::remove(&path).unwrap();
        assert!(!path.exists());
        assert_eq!(NetNs::open(&path).unwrap_err().kind(), FailureKind::NotFound);
        std::fs::write(&path, "").unwrap();
        assert!(matches!(NetNs::open(&path), Err(NetError::NotNetns { .. })));
        netns::remove(&path).unwrap();
        assert!(!path.exists());
    });
}

#[test]
fn the_namespace_does_not_ask_for_routers_in_place_of_its_guest() {
    in_a_world(&["bridge", "host-local", "portmap", "loopback"], |world| async move {
        world.conf("10-bridged.conflist", BRIDGE);
        for (number, usage, expected) in [(1, InterfaceUsage::Guest, "0"), (2, InterfaceUsage::Namespace, "-1")] {
            let pod = PodRef { usage, ..pod(number) };
            let netns = world.network.create_netns(&pod.id).await.unwrap();
            world.network.setup(&pod).await.unwrap();
            let option = "/proc/sys/net/ipv6/conf/eth0/router_solicitations";
            let found = run_in(&netns, || std::fs::read_to_string(option)).unwrap().unwrap();
            assert_eq!(found.trim(), expected, "{usage:?}");
            world.network.teardown(&pod.id).await.unwrap();
        }
    });
}

const SEVERAL: &str = r#"{ "cniVersion": "1.0.0", "name": "several", "type": "nacelle-several", "further": "net1 lan", "bridge": "ns0",
    "isGateway": true, "ipam": { "type": "host-local", "dataDir": "DIR/leases", "ranges": [[{ "subnet": "10.79.0.0/24" }]],
    "routes": [{ "dst": "0.0.0.0/0" }] } }"#;

#[test]
fn a_pod_has_the_interfaces_that_it_needs_and_its_address_is_the_first_ones() {
    in_a_world(&["bridge", "host-local"], |world| async move {
        world.conf("10-several.conf", SEVERAL);
        let with = |number: u8, further: &[&str], usage| PodRef {
            additional_interfaces: further.iter().map(|name| (*name).to_owned()).collect(),
            usage,
            ..pod(number)
        };
        let setup = async |pod: &PodRef| {
            world.network.create_netns(&pod.id).await.unwrap();
            world.network.setup(pod).await
        };
        let both = with(1, &["lan", "net1"], InterfaceUsage::GuestNeedsAll);
        let attachment = setup(&both).await.unwrap();
        let passed_networks = |attachment: &Attachment| -> Vec<(String, Vec<String>)> {
            attachment.network.interfaces.iter().map(|one| (one.name.clone(), addresses(one))).collect()
        };
        let one = |name: &str, address: &str| (name.to_owned(), vec![address.to_owned()]);
        let expected = [one("eth0", "10.79.0.2/24"), one("lan", "10.79.2.2/24"), one("net1", "10.79.1.2/24")];
        assert_eq!(passed_networks(&attachment), expected);
        assert_eq!(attachment.ips, ["10.79.0.2".parse::<IpAddr>().unwrap()]);

        // A missing interface is an error or is left out, according to the usage. Interfaces that were not requested stay in the
        // namespace.
        let lost = with(2, &["net1", "net2"], InterfaceUsage::GuestNeedsAll);
        let error = setup(&lost).await.unwrap_err();
        assert!(matches!(&error, NetError::MissingInterface { name } if name == "net2"), "{error}");
        assert_eq!(error.kind(), FailureKind::Conflict);
        assert_eq!(leases(world.files("leases")).len(), 3, "the second pod's lease is released");
        let some = with(3, &["net7", "net1"], InterfaceUsage::Guest);
        let attachment = setup(&some).await.unwrap();
        assert_eq!(
            passed_networks(&attachment).iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(),
            ["eth0", "net1"]
        );
        for pod in [both, lost, some] {
            world.network.teardown(&pod.id).await.unwrap();
        }
        assert_eq!(leases(world.files("leases")), Vec::<String>::new());
    });
}
