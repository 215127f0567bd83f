//! Tests frames in both directions.

use crate::guest::{FRAME_TYPE, HEADER, NetGuest, ServedBy, each, frame, host};
use nacelle_vmm::DeviceState;
use std::time::Duration;
use vm_memory::{Bytes, GuestAddress};

const MRG_RXBUF: u64 = 1 << 15;
const GUEST_CSUM: u64 = 1 << 1;
const GUEST_TSO4: u64 = 1 << 7;
const PLAIN: u64 = 1 << 32 | 1 << 29 | 1 << 28 | 1 << 17;
const NO_HEADER: [u8; 10] = [0; 10];

/// Reads one frame from the queue and returns it with the number of its buffers, which the header contains.
fn read_frame(guest: &mut NetGuest, index: usize, first: u64) -> (Vec<u8>, u16) {
    let (_, written) = guest.wait_used(index);
    let mut bytes = guest.read(guest.buffer(index, first), written as usize);
    let count = u16::from_le_bytes([bytes[10], bytes[11]]);
    for number in 1..count {
        // All buffers are returned together with the first one.
        let (_, written) = guest.queues[index].take_used().expect("the rest of the frame");
        bytes.extend(guest.read(guest.buffer(index, first + u64::from(number)), written as usize));
    }
    (bytes, count)
}

#[test]
fn frames_of_all_sizes_pass_in_order() {
    each(1, |guest| {
        let mut guest = guest();
        guest.set_up(PLAIN | MRG_RXBUF);
        for (number, length) in (46..1500).step_by(97).chain([1500]).enumerate() {
            let there = frame(length, number as u8);
            assert_eq!(guest.send(1, [0; HEADER], &there, &[3, 9, 14, 100]), 0);
            let seen = guest.host.receive(FRAME_TYPE);
            assert_eq!(seen[10..], there, "{length}");
            let back = frame(length, number as u8 + 100);
            guest.provide_buffer(0, number as u64, 1600);
            guest.host.send(NO_HEADER, &back);
            let (bytes, count) = read_frame(&mut guest, 0, number as u64);
            assert_eq!((&bytes[HEADER..], count), (back.as_slice(), 1), "{length}");
        }
    });
}

#[test]
fn many_frames_may_be_in_flight() {
    each(1, |guest| {
        let mut guest = guest();
        guest.set_up(PLAIN | MRG_RXBUF);
        for round in 0..20 {
            for number in 0..32 {
                let at = guest.buffer(1, number);
                let bytes = [[0; HEADER].as_slice(), &frame(200, number as u8)].concat();
                guest.memory.write_slice(&bytes, GuestAddress(at)).unwrap();
                guest.queues[1].submit(&[(at, bytes.len() as u32, false)]);
                let at = guest.buffer(0, number);
                guest.queues[0].submit(&[(at, 1600, true)]);
            }
            guest.kick(1);
            guest.kick(0);
            for number in 0..32 {
                guest.host.send(NO_HEADER, &frame(300, number));
            }
            for number in 0..32 {
                assert_eq!(guest.wait_used(1).1, 0);
                assert_eq!(guest.host.receive(FRAME_TYPE)[10..], frame(200, number), "{round}");
                let (bytes, _) = read_frame(&mut guest, 0, number.into());
                assert_eq!(bytes[HEADER..], frame(300, number), "{round}");
            }
        }
    });
}

#[test]
fn a_long_frame_spans_buffers_and_waits_for_them() {
    each(1, |guest| {
        let mut guest = guest();
        guest.set_up(PLAIN | MRG_RXBUF);
        let long = frame(1500, 7);
        // Buffers are provided one after the other; the frame is complete only with the last one.
        guest.host.send(NO_HEADER, &long);
        for number in 0..16 {
            assert_eq!(guest.next_used(0, Duration::from_millis(1)), None, "{number}");
            guest.provide_buffer(0, number, 100);
        }
        let (bytes, count) = read_frame(&mut guest, 0, 0);
        assert_eq!((&bytes[HEADER..], count), (long.as_slice(), 16));
        // All buffers are provided before.
        (16..26).for_each(|number| guest.provide_buffer(0, number, 200));
        guest.host.send(NO_HEADER, &long);
        let (bytes, count) = read_frame(&mut guest, 0, 16);
        assert_eq!((&bytes[HEADER..], count), (long.as_slice(), 8));
    });
}

#[test]
fn without_mergeable_buffers_only_oversized_frames_are_dropped() {
    if host(1).is_none() {
        return;
    }
    let mut guest = NetGuest::new(ServedBy::Threads, 1);
    guest.set_up(PLAIN);
    guest.provide_buffer(0, 0, 400);
    guest.host.send(NO_HEADER, &frame(1000, 1));
    guest.host.send(NO_HEADER, &frame(300, 2));
    let (bytes, count) = read_frame(&mut guest, 0, 0);
    assert_eq!((&bytes[HEADER..], count), (frame(300, 2).as_slice(), 1));
}

/// Returns a TCP segment of `length` bytes in IPv4, and the header that lets the kernel segment it: without checksums, in
/// segments of 1448 bytes (Virtio 1.2, 5.1.6).
fn segments(length: usize) -> (Vec<u8>, [u8; 10]) {
    let mut frame = [[0xff; 6], [2, 0, 0, 0, 0, 9]].concat();
    frame.extend([8, 0, 0x45, 0]);
    frame.extend((length as u16 + 40).to_be_bytes());
    frame.extend([0, 1, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
    let sum: u32 = frame[14..34].chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1])).sum();
    let sum = !((sum & 0xffff) + (sum >> 16)) as u16;
    frame[24..26].copy_from_slice(&sum.to_be_bytes());
    // Ports, sequence numbers, 20 bytes of header, ACK; the sum of the pseudo header (any value works here).
    frame.extend([0x10, 0, 0x20, 0, 0, 0, 0, 1, 0, 0, 0, 1, 0x50, 0x10, 2, 0, 0, 0, 0, 0]);
    frame.extend((0..length).map(|at| (at % 251) as u8));
    let (needs_csum, tcp4) = (1, 1);
    (frame, [needs_csum, tcp4, 54, 0, 0xa8, 5, 34, 0, 16, 0])
}

const IPV4: [u8; 2] = [8, 0];

#[test]
fn the_kernel_segments_large_frames_of_the_guest() {
    each(1, |guest| {
        let mut guest = guest();
        guest.set_up(PLAIN | MRG_RXBUF | 1 | 1 << 11);
        let (whole, header) = segments(60_000);
        let header = [header.as_slice(), &[0, 0]].concat().try_into().unwrap();
        guest.send(1, header, &whole, &[12, 54, 4096, 4096, 4096, 30_000]);
        let seen = guest.host.receive(IPV4);
        assert_eq!(seen[10..].len(), whole.len(), "it is not segmented before it must be");
        assert_eq!((seen[1], &seen[4..6]), (1, [0xa8, 5].as_slice()));
        assert_eq!(seen[10 + 54..], whole[54..]);
    });
}

#[test]
fn the_guest_receives_large_frames_if_it_accepts_them() {
    each(1, |guest| {
        let (whole, header) = segments(60_000);
        let mut guest = guest();
        guest.set_up(PLAIN | MRG_RXBUF | GUEST_CSUM | GUEST_TSO4);
        (0..32).for_each(|number| guest.provide_buffer(0, number, 2048));
        guest.host.send(header, &whole);
        let (bytes, count) = read_frame(&mut guest, 0, 0);
        assert_eq!((bytes.len(), count), (HEADER + whole.len(), 30));
        assert_eq!((bytes[1], &bytes[4..6]), (1, [0xa8, 5].as_slice()));
        assert_eq!(bytes[HEADER + 54..], whole[54..]);
        // Without the offload, the guest receives segments.
        guest.reset();
        guest.set_up(PLAIN | MRG_RXBUF);
        (0..32).for_each(|number| guest.provide_buffer(0, number, 2048));
        guest.host.send(header, &segments(14_480).0);
        for number in 0..10 {
            let (bytes, count) = read_frame(&mut guest, 0, number);
            assert_eq!((bytes.len(), count, bytes[1]), (HEADER + 54 + 1448, 1, 0));
        }
    });
}

#[test]
fn queues_continue_at_their_positions() {
    each(1, |fresh| {
        let mut guest = fresh();
        guest.set_up(PLAIN | MRG_RXBUF | GUEST_CSUM | 1 << 2 | 1 << 23);
        (0..8).for_each(|number| guest.provide_buffer(0, number, 1600));
        guest.host.send(NO_HEADER, &frame(100, 1));
        assert_eq!(read_frame(&mut guest, 0, 0).0[HEADER..], frame(100, 1));
        guest.send(1, [0; HEADER], &frame(100, 2), &[]);
        assert_eq!(guest.command(&[1, 1, 2, 2, 2, 2, 2, 2], 1), (1, 0));
        assert_eq!(guest.command(&[5, 0, 0, 0, 0, 0, 0, 0, 0, 0], 1), (1, 0));
        let queues = guest.stop();
        assert_eq!((queues[0].next_avail, queues[0].next_used), (1, 1), "what was not used was put back");
        assert_eq!((queues[1].next_avail, queues[1].next_used), (1, 1));
        let saved = guest.device.save();
        let DeviceState::Net(state) = &saved else { panic!("{saved:?}") };
        assert_eq!((state.mac, state.max_pairs, state.pairs, state.offloads), ([2; 6], 1, 1, 0));

        // Another process with another tap.
        let mut other = fresh();
        std::mem::swap(&mut guest.device, &mut other.device);
        std::mem::swap(&mut guest.host, &mut other.host);
        drop(other);
        guest.device.restore(saved.clone()).unwrap();
        guest.device.acknowledge(PLAIN | MRG_RXBUF | GUEST_CSUM | 1 << 2 | 1 << 23);
        assert_eq!(guest.device.save(), saved);
        assert_eq!(guest.config()[..6], [2; 6]);
        // A frame that the guest submitted before is sent without a kick.
        let at = guest.buffer(1, 5);
        let bytes = [[0; HEADER].as_slice(), &frame(100, 3)].concat();
        guest.memory.write_slice(&bytes, GuestAddress(at)).unwrap();
        guest.queues[1].submit(&[(at, bytes.len() as u32, false)]);
        for (index, state) in queues.into_iter().enumerate() {
            guest.start(index, state);
        }
        assert_eq!(guest.host.receive(FRAME_TYPE)[10..], frame(100, 3));
        for number in 1..8 {
            guest.host.send(NO_HEADER, &frame(100, number as u8));
            assert_eq!(read_frame(&mut guest, 0, number).0[HEADER..], frame(100, number as u8));
        }
    });
}

#[test]
fn the_guest_sees_link_down_when_the_interface_is_removed() {
    if host(1).is_none() {
        return;
    }
    let mut guest = NetGuest::new(ServedBy::Threads, 1);
    guest.set_up(PLAIN | MRG_RXBUF | 1 << 16);
    guest.provide_buffer(0, 0, 1600);
    assert_eq!(guest.config()[6..8], [1, 0]);
    guest.host.remove();
    guest.wait_config_change();
    assert_eq!(guest.config()[6..8], [0, 0]);
    // The guest can still send, and gets its buffers back.
    guest.send(1, [0; HEADER], &frame(100, 2), &[]);
}
