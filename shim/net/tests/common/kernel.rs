//! Simulates a guest with a real network stack: a namespace whose only interface is a tap, and a relay that copies frames and
//! their virtio-net headers between it and the VM's tap, as an engine does.
#![allow(unsafe_code, reason = "TUNSETOFFLOAD has no safe wrapper")]

use crate::common::ip;
use nacelle_net::{Attachment, NetNs, Tap, netns, run_in, tap};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

nix::ioctl_write_int_bad!(
    /// Sets which offloads the reader of the tap supports.
    tunsetoffload,
    libc::TUNSETOFFLOAD
);

/// Larger than the largest segment that the kernel leaves unsegmented.
const FRAME: usize = 80 * 1024;

pub struct Kernel {
    pub netns: NetNs,
    stop: Arc<AtomicBool>,
    relays: Vec<JoinHandle<()>>,
}

impl Kernel {
    /// Starts the guest behind `machine` and configures it as an agent would, in the order of the attachment.
    pub fn start(path: &Path, machine: Tap, attachment: &Attachment) -> Kernel {
        let netns = netns::create(path).unwrap();
        let nic = tap::create(&netns, "eth0").unwrap();
        run_in(&netns, || configure(attachment)).unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let (nic, machine) = (File::from(nic.fd), File::from(machine.fd));
        for file in [&nic, &machine] {
            let flags = libc::TUN_F_CSUM | libc::TUN_F_TSO4 | libc::TUN_F_TSO6;
            // SAFETY: the descriptor is open, and the argument is a number.
            unsafe { tunsetoffload(file.as_raw_fd(), i32::try_from(flags).unwrap()) }.unwrap();
        }
        let relays = [(nic.try_clone().unwrap(), machine.try_clone().unwrap()), (machine, nic)];
        let relays = relays.map(|(from, to)| {
            let stop = Arc::clone(&stop);
            std::thread::spawn(move || relay(&from, &to, &stop))
        });
        Kernel { netns, stop, relays: relays.into() }
    }
}

impl Drop for Kernel {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for relay in self.relays.drain(..) {
            let _ = relay.join();
        }
    }
}

fn configure(attachment: &Attachment) {
    let eth0 = &attachment.network.interfaces[0];
    let mac = eth0.mac.map(|byte| format!("{byte:02x}")).join(":");
    // A guest has IPv6; only the tap of a VM has it disabled.
    std::fs::write("/proc/sys/net/ipv6/conf/eth0/disable_ipv6", "0").unwrap();
    ip(&["link", "set", "eth0", "address", &mac, "mtu", &eth0.mtu.to_string(), "up"]);
    for address in &eth0.addresses {
        let more: &[&str] = if address.addr().is_ipv6() { &["nodad"] } else { &[] };
        ip(&[&["addr", "add", &address.to_string(), "dev", "eth0"], more].concat());
    }
    for route in &attachment.network.routes {
        let family = if route.destination.addr().is_ipv6() { "-6" } else { "-4" };
        let destination = route.destination.to_string();
        let mut args = vec![family, "route", "add", &destination, "dev", "eth0"];
        let (gateway, metric) = (route.gateway.map(|ip| ip.to_string()), route.metric.map(|metric| metric.to_string()));
        args.extend(gateway.iter().flat_map(|gateway| ["via", gateway]));
        args.extend(metric.iter().flat_map(|metric| ["metric", metric]));
        ip(&args);
    }
}

fn relay(mut from: &File, mut to: &File, stop: &AtomicBool) {
    let mut frame = vec![0; FRAME];
    while !stop.load(Ordering::Relaxed) {
        let mut fds = [PollFd::new(from.as_fd(), PollFlags::POLLIN)];
        if poll(&mut fds, PollTimeout::from(50u8)).is_ok_and(|ready| ready > 0)
            && let Ok(length) = from.read(&mut frame)
        {
            // A frame may be lost, as on any network.
            let _ = to.write_all(&frame[..length]);
        }
    }
}
