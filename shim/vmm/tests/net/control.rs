//! Tests the configuration space, the control queue and several pairs.

use crate::guest::{FRAME_TYPE, HEADER, MAC, NetGuest, ServedBy, each, frame, host};
use crate::host::Host;
use nacelle_vmm::net::{Net, NetConfig, NetError};
use std::time::{Duration, Instant};

const PLAIN: u64 = 1 << 32 | 1 << 29 | 1 << 28 | 1 << 17 | 1 << 15;
const MQ: u64 = 1 << 22;
const ALL: u64 = u64::MAX;

#[test]
fn the_configuration_space_describes_the_device() {
    each(1, |guest| {
        let guest = guest();
        // mac, status, max_virtqueue_pairs, mtu; then nothing
        assert_eq!(guest.config(), [&MAC[..], &[1, 0, 1, 0, 0xdc, 5, 0, 0, 0, 0]].concat());
        assert_eq!(guest.device.queue_sizes().len(), 3);
        assert_eq!(guest.device.features() & MQ, 0);
        let whatever_there_is = [0, 1, 2, 3, 5, 7, 8, 9, 11, 12, 13, 15, 16, 17, 18, 23, 28, 29, 32];
        let needed = whatever_there_is.iter().fold(0u64, |bits, bit| bits | 1 << bit);
        assert_eq!(guest.device.features() & needed, needed);
    });
    each(2, |guest| {
        let guest = guest();
        assert_eq!(guest.config()[8..10], [2, 0]);
        assert_eq!(guest.device.queue_sizes().len(), 5);
        assert_ne!(guest.device.features() & MQ, 0);
    });
}

#[test]
fn commands_are_answered_and_invalid_ones_rejected() {
    each(1, |guest| {
        let mut guest = guest();
        guest.set_up(ALL);
        let (ok, bad) = ((1, 0), (1, 1));
        assert_eq!(guest.command(&[1, 1, 2, 9, 9, 9, 9, 9], 1), ok);
        assert_eq!(guest.config()[..6], [2, 9, 9, 9, 9, 9]);
        assert_eq!(guest.command(&[1, 1, 1, 9, 9, 9, 9, 9], 1), bad, "a group's address");
        assert_eq!(guest.command(&[1, 1, 2, 8, 8, 8, 8], 1), bad, "too short");
        assert_eq!(guest.command(&[1, 1, 2, 8, 8, 8, 8, 8, 8], 1), bad, "too long");
        assert_eq!(guest.config()[..6], [2, 9, 9, 9, 9, 9]);
        assert_eq!(guest.command(&[0, 0, 1], 1), ok, "promiscuous");
        assert_eq!(guest.command(&[0, 2, 1], 1), bad, "CTRL_RX_EXTRA is not offered");
        assert_eq!(guest.command(&[1, 0, 0, 0, 0, 0, 0, 0, 0, 0], 1), ok, "no other addresses");
        assert_eq!(guest.command(&[2, 0, 1, 0], 1), bad, "VLANs are not offered");
        assert_eq!(guest.command(&[4, 0, 1, 0], 1), ok);
        assert_eq!(guest.command(&[4, 0, 2, 0], 1), bad, "two pairs");
        assert_eq!(guest.command(&[4, 0, 0, 0], 1), bad, "no pair");
        assert_eq!(guest.command(&[5, 0, 0x82, 0, 0, 0, 0, 0, 0, 0], 1), ok);
        assert_eq!(guest.command(&[5, 0, 0, 4, 0, 0, 0, 0, 0, 0], 1), bad, "UDP fragmentation");
        assert_eq!(guest.command(&[7, 7, 7], 1), bad);
        // The answer is always one byte. Without space for it the command is not executed.
        assert_eq!(guest.command(&[0, 0, 1], 100), ok);
        assert_eq!(guest.command(&[1, 1, 2, 7, 7, 7, 7, 7], 0), (0, 0xee));
        assert_eq!(guest.config()[..6], [2, 9, 9, 9, 9, 9]);
        // A reset restores the initial address.
        guest.reset();
        assert_eq!(guest.config()[..6], MAC);
    });
}

/// Sends a frame to this address, and one to all. Returns whether the guest receives the first one.
fn receives(guest: &mut NetGuest, address: [u8; 6]) -> bool {
    let (mut asked, to_all) = (frame(100, 1), frame(200, 1));
    asked[..6].copy_from_slice(&address);
    guest.host.send([0; 10], &asked);
    guest.host.send([0; 10], &to_all);
    let mut next_length = || {
        let (number, length) = guest.wait_used(0);
        guest.provide_buffer(0, number.into(), 1600);
        length as usize - HEADER
    };
    let first = next_length();
    let received = first == asked.len();
    assert_eq!(if received { next_length() } else { first }, to_all.len());
    received
}

/// Returns the command that sets the tables of addresses: of interfaces, and of groups.
fn tables(interfaces: &[[u8; 6]], groups: &[[u8; 6]]) -> Vec<u8> {
    let table = |all: &[[u8; 6]]| [&(all.len() as u32).to_le_bytes(), all.as_flattened()].concat();
    [vec![1, 0], table(interfaces), table(groups)].concat()
}

#[test]
fn the_guest_receives_what_its_driver_asks_for() {
    const OTHER: [u8; 6] = [2, 0, 0, 0, 0, 0x77];
    const GROUP: [u8; 6] = [0x33, 0x33, 0, 0, 0, 1];
    const ROUTERS: [u8; 6] = [0x33, 0x33, 0, 0, 0, 2];
    let what = |guest: &mut NetGuest| [MAC, OTHER, GROUP, ROUTERS].map(|address| receives(guest, address));
    each(1, |guest| {
        let mut guest = guest();
        guest.set_up(ALL);
        (0..8).for_each(|number| guest.provide_buffer(0, number, 1600));
        assert_eq!(what(&mut guest), [true; 4], "nothing is filtered before the driver asks");
        let steps: [(Vec<u8>, [bool; 4]); 9] = [
            (tables(&[], &[GROUP]), [true, false, true, false]),
            (vec![0, 0, 1], [true; 4]),
            (vec![0, 0, 0], [true, false, true, false]),
            (vec![0, 1, 1], [true, false, true, true]),
            (vec![0, 1, 0], [true, false, true, false]),
            (tables(&[OTHER], &[ROUTERS]), [true, true, false, true]),
            // More interfaces than a tap compares.
            (tables(&[OTHER; 7], &[]), [true; 4]),
            (tables(&[], &[]), [true, false, false, false]),
            ([&[1, 1][..], &OTHER].concat(), [false, true, false, false]),
        ];
        for (command, received) in steps {
            assert_eq!(guest.command(&command, 1), (1, 0), "{command:?}");
            assert_eq!(what(&mut guest), received, "{command:?}");
        }
        guest.reset();
        guest.set_up(PLAIN);
        (0..8).for_each(|number| guest.provide_buffer(0, number, 1600));
        assert_eq!(what(&mut guest), [true; 4], "a reset ends the filter");
        assert_eq!(guest.command(&tables(&[], &[]), 1), (1, 0));
        assert_eq!(what(&mut guest), [true; 4], "a driver without the feature receives everything");
    });
}

/// Sends frames of many flows to the guest. Returns whether one arrives in this queue within `limit`.
fn frame_arrives(guest: &mut NetGuest, index: usize, limit: Duration) -> bool {
    let start = Instant::now();
    let mut source = 0u8;
    while start.elapsed() < limit {
        source = source.wrapping_add(1);
        // The kernel selects the queue by addresses and ports.
        let mut bytes = frame(60, 1);
        bytes[12..14].copy_from_slice(&[8, 0]);
        bytes.splice(14..34, [0x45, 0, 0, 60, 0, 0, 0, 0, 64, 17, 0, 0, 10, 0, 0, source, 10, 0, 0, 2]);
        bytes[34..36].copy_from_slice(&[source, 1]);
        guest.host.send([0; 10], &bytes);
        if guest.next_used(index, Duration::from_millis(5)).is_some() {
            guest.provide_buffer(index, 0, 1600);
            return true;
        }
        for other in [0, 2] {
            while guest.queues[other].take_used().is_some() {
                guest.provide_buffer(other, 0, 1600);
                if other == index {
                    return true;
                }
            }
        }
    }
    false
}

#[test]
fn the_driver_activates_queue_pairs() {
    each(2, |guest| {
        let mut guest = guest();
        guest.set_up(PLAIN | MQ);
        (0..8).for_each(|number| guest.provide_buffer(0, number, 1600));
        (0..8).for_each(|number| guest.provide_buffer(2, number, 1600));
        assert!(frame_arrives(&mut guest, 0, crate::guest::LIMIT));
        assert!(!frame_arrives(&mut guest, 2, Duration::from_millis(500)), "one pair until the driver says so");
        for _ in 0..3 {
            assert_eq!(guest.command(&[4, 0, 2, 0], 1), (1, 0));
            assert!(frame_arrives(&mut guest, 2, crate::guest::LIMIT));
            assert!(frame_arrives(&mut guest, 0, crate::guest::LIMIT));
            guest.send(1, [0; HEADER], &frame(60, 1), &[]);
            assert_eq!(guest.host.receive(FRAME_TYPE)[10..], frame(60, 1));
            guest.send(3, [0; HEADER], &frame(60, 2), &[]);
            assert_eq!(guest.host.receive(FRAME_TYPE)[10..], frame(60, 2));
            assert_eq!(guest.command(&[4, 0, 3, 0], 1), (1, 1));
            assert_eq!(guest.command(&[4, 0, 1, 0], 1), (1, 0));
        }
        assert_eq!(guest.command(&[4, 0, 2, 0], 1), (1, 0));
        let saved = guest.device.save();
        guest.stop();
        guest.reset();
        assert_ne!(guest.device.save(), saved, "a reset goes back to one pair");
    });
}

#[test]
fn without_multiqueue_the_control_queue_is_queue_2() {
    if host(2).is_none() {
        return;
    }
    let mut guest = NetGuest::new(ServedBy::Threads, 2);
    guest.queues.truncate(3);
    guest.set_up(PLAIN | 1 << 23);
    assert_eq!(guest.command_on(2, &[1, 1, 2, 9, 9, 9, 9, 9], 1), (1, 0));
    assert_eq!(guest.command_on(2, &[4, 0, 2, 0], 1), (1, 1));
}

#[test]
fn taps_with_wrong_flags_are_rejected() {
    let net = |taps: Vec<_>, vhost| Net::new(NetConfig { taps, mac: MAC, mtu: 1500, vhost });
    assert!(matches!(net(Vec::new(), Vec::new()), Err(NetError::Taps { got: 0 })));
    let file = || std::fs::File::open("/dev/null").unwrap().into();
    assert!(matches!(net((0..9).map(|_| file()).collect(), Vec::new()), Err(NetError::Taps { got: 9 })));
    assert!(matches!(net(vec![file()], vec![file(), file()]), Err(NetError::Vhosts { got: 2, taps: 1 })));
    assert!(matches!(net(vec![file()], Vec::new()), Err(NetError::System { .. })));
    let Some(host) = host(1) else { return };
    let with = |flags| Host::with_flags(1, flags).unwrap().taps.remove(0);
    let without_header = with(libc::IFF_TAP | libc::IFF_NO_PI);
    assert!(matches!(net(vec![without_header], Vec::new()), Err(NetError::TapFlags { .. })));
    let two = host.taps.iter().chain(&host.taps).map(|tap| tap.try_clone().unwrap()).collect();
    assert!(matches!(net(two, Vec::new()), Err(NetError::TapFlags { .. })), "one queue, twice");
}
