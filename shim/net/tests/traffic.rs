//! Tests that frames pass between guest and network, and that only the guest answers for the pod.

mod common;
#[path = "common/guest.rs"]
mod guest;

use common::{World, in_a_world, ip_in, pod};
use guest::{Guest, Seen};
use nacelle_model::network::{PortMapping, Protocol};
use nacelle_net::{NetNs, tap};
use std::fs::File;
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, UdpSocket};

const BRIDGE: &str = r#"{ "cniVersion": "1.0.0", "name": "traffic", "plugins": [
    { "type": "bridge", "bridge": "nb0", "isGateway": true, "mtu": 1400,
      "ipam": { "type": "host-local", "dataDir": "DIR/leases",
                "ranges": [[{ "subnet": "10.77.0.0/24" }], [{ "subnet": "fd77::/64" }]],
                "routes": [{ "dst": "0.0.0.0/0" }, { "dst": "::/0" }] } },
    { "type": "portmap", "capabilities": { "portMappings": true }, "snat": true } ] }"#;
const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 1);

/// Creates a pod with a tap that is not joined yet, and the guest behind it.
async fn start(world: &World, number: u8) -> (NetNs, Guest) {
    let pod = pod(number);
    let netns = world.network.create_netns(&pod.id).await.unwrap();
    let tap = tap::create(&netns, "tap0").unwrap();
    let attachment = world.network.setup(&pod).await.unwrap();
    let eth0 = &attachment.network.interfaces[0];
    (netns, Guest::new(tap, eth0.mac, &attachment.ips))
}

fn echo_is_answered(from: &Guest, to: &Guest, number: u16) {
    from.ask_arp(to.v4);
    to.until(|seen| *seen == Seen::ArpRequest { from: from.mac, who: to.v4, tell: from.v4 });
    to.answer_arp(from.mac, from.v4);
    from.until(|seen| *seen == Seen::ArpReply { who: to.v4, is: to.mac });
    from.ping(to.mac, to.v4, number);
    to.until(|seen| *seen == Seen::EchoRequest { from: from.mac, source: from.v4, number });
    to.pong(from.mac, from.v4, number);
    from.until(|seen| *seen == Seen::EchoReply { source: to.v4, number });
}

#[test]
fn two_guests_and_the_node_reach_each_other() {
    in_a_world(&["bridge", "host-local", "portmap"], |world| async move {
        world.conf("10-traffic.conflist", BRIDGE);
        let (netns_a, a) = start(&world, 1).await;
        let (netns_b, b) = start(&world, 2).await;
        // One is joined twice, because a join may be repeated.
        for netns in [&netns_a, &netns_b, &netns_a] {
            tap::connect(netns, "tap0", "eth0").unwrap();
        }
        assert!(ip_in(netns_a.path(), &["link", "show", "tap0"]).contains("mtu 1400"));
        assert_eq!(ip_in(netns_a.path(), &["-6", "addr", "show", "dev", "tap0"]), "");
        echo_is_answered(&a, &b, 7);
        echo_is_answered(&b, &a, 8);

        // The node answers the guest's ARP and echo.
        a.ask_arp(GATEWAY);
        let replies = a.until(|seen| matches!(seen, Seen::ArpReply { who: GATEWAY, .. }));
        let Some(Seen::ArpReply { is: node, .. }) = replies.last() else { unreachable!() };
        a.ping(*node, GATEWAY, 9);
        a.until(|seen| *seen == Seen::EchoReply { source: GATEWAY, number: 9 });

        // The node reaches the guest.
        let socket = UdpSocket::bind((GATEWAY, 0)).unwrap();
        socket.send_to(b"hello", (a.v4, 4000)).unwrap();
        let fits = |seen: &Seen| matches!(seen, Seen::Udp { port: 4000, payload } if payload == b"hello");
        loop {
            match a.next() {
                Seen::ArpRequest { from, tell, who } if who == a.v4 => a.answer_arp(from, tell),
                seen if fits(&seen) => break,
                _ => (),
            }
        }
    });
}

#[test]
fn what_a_guest_asks_of_dhcp_is_heard_before_it_is_redirected() {
    in_a_world(&["bridge", "host-local", "portmap"], |world| async move {
        world.conf("10-traffic.conflist", BRIDGE);
        let (netns_a, a) = start(&world, 1).await;
        let (netns_b, b) = start(&world, 2).await;
        let questions: File = tap::open_dhcp_socket(&netns_a, "tap0").unwrap().into();
        assert!(tap::open_dhcp_socket(&netns_a, "tap9").is_err());
        for netns in [&netns_a, &netns_b] {
            tap::connect(netns, "tap0", "eth0").unwrap();
        }
        let all = Ipv4Addr::BROADCAST;
        a.ask_arp(GATEWAY);
        a.udp([0xff; 6], all, 68, b"another port", [0, 0]);
        a.udp([0xff; 6], all, 67, b"a piece", [0, 7]);
        a.udp([0xff; 6], all, 67, b"one", [0x40, 0]);
        // Frames from other senders are not the guest's requests.
        b.udp([0xff; 6], all, 67, b"not mine", [0, 0]);
        a.until(|seen| matches!(seen, Seen::Udp { payload, .. } if payload == b"not mine"));
        a.udp(b.mac, b.v4, 67, b"two", [0, 0]);
        b.until(|seen| matches!(seen, Seen::Udp { payload, .. } if payload == b"two"));
        let heard = || {
            let mut frame = [0; 4096];
            // The tap was down when the socket was bound: the kernel reports that once.
            let length = loop {
                match (&questions).read(&mut frame) {
                    Ok(length) => break length,
                    Err(error) if error.raw_os_error() == Some(libc::ENETDOWN) => {}
                    Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return None,
                    Err(error) => panic!("{error}"),
                }
            };
            Some(frame[42..length].to_vec())
        };
        assert_eq!((heard(), heard(), heard()), (Some(b"one".to_vec()), Some(b"two".to_vec()), None));
        // An answer reaches the guest.
        let mut answer = [&a.mac[..], &[2, 0, 0, 0, 0, 9], &[0x88, 0xb5]].concat();
        answer.resize(60, 0);
        (&questions).write_all(&answer).unwrap();
        a.until(|seen| *seen == Seen::Mark);
    });
}

#[test]
fn only_the_guest_answers_once_it_is_joined() {
    in_a_world(&["bridge", "host-local", "portmap"], |world| async move {
        world.conf("10-traffic.conflist", BRIDGE);
        let (netns_a, a) = start(&world, 1).await;
        let (netns_b, b) = start(&world, 2).await;
        tap::connect(&netns_b, "tap0", "eth0").unwrap();
        let a6 = a.v6.unwrap();

        // Before the join the namespace's own stack answers, so the request is correct.
        b.ask_arp(a.v4);
        b.until(|seen| *seen == Seen::ArpReply { who: a.v4, is: a.mac });
        b.ask_v6(a6);
        b.until(|seen| *seen == Seen::Advertisement { who: a6 });

        // After the join only the request arrives. An answer of the stack would come before the mark.
        tap::connect(&netns_a, "tap0", "eth0").unwrap();
        b.ask_arp(a.v4);
        a.until(|seen| *seen == Seen::ArpRequest { from: b.mac, who: a.v4, tell: b.v4 });
        b.ask_v6(a6);
        a.until(|seen| *seen == Seen::Solicitation { who: a6 });
        b.ping(a.mac, a.v4, 1);
        a.until(|seen| *seen == Seen::EchoRequest { from: b.mac, source: b.v4, number: 1 });
        a.mark(b.mac);
        let seen = b.until(|seen| *seen == Seen::Mark);
        let from_a = |seen: &Seen| match seen {
            Seen::ArpReply { who, .. } | Seen::EchoReply { source: who, .. } => *who == a.v4,
            Seen::Advertisement { who } => *who == a6,
            _ => false,
        };
        assert!(!seen.iter().any(from_a), "{seen:?}");
        // CHECK still finds what the plugins made.
        world.network.check(&pod(1).id).await.unwrap();
    });
}

#[test]
fn a_host_port_leads_to_the_guest() {
    in_a_world(&["bridge", "host-local", "portmap"], |world| async move {
        world.conf("10-traffic.conflist", BRIDGE);
        let mut pod = pod(1);
        let port = |host_port| PortMapping { host_port, container_port: 80, protocol: Protocol::Udp, host_ip: None };
        pod.port_mappings = vec![port(8080), port(0)];
        let netns = world.network.create_netns(&pod.id).await.unwrap();
        let tap = tap::create(&netns, "tap0").unwrap();
        let attachment = world.network.setup(&pod).await.unwrap();
        let guest = Guest::new(tap, attachment.network.interfaces[0].mac, &attachment.ips);
        tap::connect(&netns, "tap0", "eth0").unwrap();
        let socket = UdpSocket::bind((GATEWAY, 0)).unwrap();
        socket.send_to(b"port", (GATEWAY, 8080)).unwrap();
        loop {
            match guest.next() {
                Seen::ArpRequest { from, tell, who } if who == guest.v4 => guest.answer_arp(from, tell),
                Seen::Udp { port, payload } if payload == b"port" => break assert_eq!(port, 80),
                _ => (),
            }
        }
        let rules = || common::run("iptables", &["-t", "nat", "-S"]);
        assert!(rules().contains("--dport 8080"), "{}", rules());
        world.network.teardown(&pod.id).await.unwrap();
        assert!(!rules().contains("--dport 8080"), "{}", rules());
    });
}

#[test]
fn a_point_to_point_guest_reaches_the_node() {
    in_a_world(&["ptp", "host-local"], |world| async move {
        world.conf(
            "10-ptp.conf",
            r#"{ "cniVersion": "0.4.0", "name": "ptp", "type": "ptp",
                 "ipam": { "type": "host-local", "dataDir": "DIR/leases", "subnet": "10.78.0.0/24",
                           "routes": [{ "dst": "0.0.0.0/0" }] } }"#,
        );
        let (netns, guest) = start(&world, 1).await;
        tap::connect(&netns, "tap0", "eth0").unwrap();
        let gateway = Ipv4Addr::new(10, 78, 0, 1);
        guest.ask_arp(gateway);
        let replies = guest.until(|seen| matches!(seen, Seen::ArpReply { who, .. } if *who == gateway));
        let Some(Seen::ArpReply { is: node, .. }) = replies.last() else { unreachable!() };
        guest.ping(*node, gateway, 3);
        guest.until(|seen| *seen == Seen::EchoReply { source: gateway, number: 3 });
        assert_eq!(IpAddr::V4(guest.v4), "10.78.0.2".parse::<IpAddr>().unwrap());
    });
}
