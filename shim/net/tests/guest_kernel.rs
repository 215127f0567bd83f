//! Tests that a real network stack, configured only by an attachment, reaches the node and other pods over TCP, with checksum and
//! segmentation offload.

mod common;
#[path = "common/kernel.rs"]
mod kernel;

use common::{LIMIT, World, eventually, in_a_world, pod};
use kernel::Kernel;
use nacelle_net::{NetNs, run_in, tap};
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};

const BRIDGE: &str = r#"{ "cniVersion": "1.0.0", "name": "kernels", "plugins": [
    { "type": "bridge", "bridge": "nb0", "isGateway": true, "mtu": 1400,
      "ipam": { "type": "host-local", "dataDir": "DIR/leases",
                "ranges": [[{ "subnet": "10.77.0.0/24" }], [{ "subnet": "fd77::/64" }]],
                "routes": [{ "dst": "0.0.0.0/0" }, { "dst": "::/0" }] } } ] }"#;
const PTP: &str = r#"{ "cniVersion": "1.0.0", "name": "kernels", "plugins": [
    { "type": "ptp", "ipam": { "type": "host-local", "dataDir": "DIR/leases",
                "ranges": [[{ "subnet": "10.77.0.0/24" }], [{ "subnet": "fd77::/64" }]],
                "routes": [{ "dst": "0.0.0.0/0" }, { "dst": "::/0" }] } } ] }"#;

async fn start(world: &World, number: u8) -> (Kernel, Vec<IpAddr>) {
    let pod = pod(number);
    let netns = world.network.create_netns(&pod.id).await.unwrap();
    let machine = tap::create(&netns, "tap0").unwrap();
    let attachment = world.network.setup(&pod).await.unwrap();
    tap::connect(&netns, "tap0", "eth0").unwrap();
    let path = world.dir("guests").join(number.to_string());
    (Kernel::start(&path, machine, &attachment), attachment.ips)
}

/// Connects from the guest to `listener` and sends a megabyte in each direction.
fn talk(guest: &NetNs, listener: &TcpListener) {
    let to: SocketAddr = listener.local_addr().unwrap();
    let mut client = run_in(guest, || TcpStream::connect_timeout(&to, LIMIT)).unwrap().unwrap();
    let mut server = listener.accept().unwrap().0;
    for socket in [&client, &server] {
        socket.set_read_timeout(Some(LIMIT)).unwrap();
        socket.set_write_timeout(Some(LIMIT)).unwrap();
    }
    let sent: Vec<u8> = (0..1u32 << 18).flat_map(|number| number.wrapping_mul(2_654_435_761).to_le_bytes()).collect();
    let one_way = |from: &mut TcpStream, to: &mut TcpStream| {
        std::thread::scope(|scope| {
            scope.spawn(|| from.write_all(&sent).unwrap());
            let mut received = vec![0; sent.len()];
            to.read_exact(&mut received).unwrap();
            assert!(received == sent, "{to:?}");
        });
    };
    one_way(&mut client, &mut server);
    one_way(&mut server, &mut client);
}

fn guests_talk(needs: &[&str], conf: &'static str) {
    in_a_world(needs, |world| async move {
        world.conf("10-kernels.conflist", conf);
        let (a, _) = start(&world, 1).await;
        let (b, b_ips) = start(&world, 2).await;
        assert_eq!(b_ips.len(), 2);
        for ip in b_ips {
            let listener = run_in(&b.netns, || TcpListener::bind((ip, 0))).unwrap().unwrap();
            talk(&a.netns, &listener);
        }
        for gateway in ["10.77.0.1", "fd77::1"] {
            let bind = || TcpListener::bind((gateway.parse::<IpAddr>().unwrap(), 0));
            // A new bridge runs duplicate address detection for its IPv6 address for a while.
            eventually("the node has its address", || bind().is_ok()).await;
            talk(&a.netns, &bind().unwrap());
        }
    });
}

#[test]
fn guests_talk_over_a_bridge() {
    guests_talk(&["bridge", "host-local"], BRIDGE);
}

#[test]
fn guests_talk_point_to_point() {
    guests_talk(&["ptp", "host-local"], PTP);
}
