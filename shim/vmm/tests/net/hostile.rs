//! Tests that a hostile driver of a network device harms only itself.

use crate::guest::{FRAME_TYPE, HEADER, NetGuest, ServedBy, each, frame};
use crate::testing::{Driver, NEXT, WRITE};

const PLAIN: u64 = 1 << 32 | 1 << 29 | 1 << 28 | 1 << 17 | 1 << 15;

/// Offers an invalid frame and waits until it is returned. The kernel may stop serving the queue; then the driver resets the device.
fn bad(guest: &mut NetGuest, features: u64, offer: impl Fn(&mut Driver) -> u16) {
    offer(&mut guest.queues[1]);
    guest.kick(1);
    if guest.by == ServedBy::Threads {
        guest.wait_used(1);
    } else {
        guest.reset();
        guest.set_up(features);
    }
}

#[test]
fn invalid_frames_are_returned_and_the_next_is_sent() {
    each(1, |guest| {
        let mut guest = guest();
        let features = PLAIN | 1 | 1 << 11;
        guest.set_up(features);
        let at = guest.buffer(1, 0);
        // Too short for a header, too short for addresses, too long, only writable; then outside memory.
        for (length, writable) in [(0, false), (11, false), (25, false), (70_000, false), (2000, true)] {
            bad(&mut guest, features, |queue| queue.submit(&[(at, length, writable)]));
        }
        for outside in [u64::MAX - 5, 1 << 40] {
            bad(&mut guest, features, |queue| queue.submit(&[(outside, 100, false)]));
        }
        // Segments of no bytes, and a checksum beyond the end: the kernel checks them.
        for header in [[1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0, 0]] {
            guest.send(1, header, &frame(100, 1), &[]);
        }
        guest.send(1, [0; HEADER], &frame(100, 9), &[]);
        // Some of the invalid frames may have been sent, because they are frames too.
        while guest.host.receive(FRAME_TYPE)[10..] != frame(100, 9) {}
    });
}

#[test]
fn invalid_buffers_are_returned_and_the_next_is_filled() {
    each(1, |guest| {
        let mut guest = guest();
        guest.set_up(PLAIN);
        // Too small for a header, read-only, in the wrong order, and a loop.
        let at = guest.buffer(0, 0);
        guest.queues[0].submit(&[(at, 11, true)]);
        guest.queues[0].submit(&[(at, 1000, false)]);
        guest.queues[0].describe(100, at, 10, WRITE | NEXT, 101);
        guest.queues[0].describe(101, at, 10, 0, 0);
        guest.queues[0].offer(100);
        guest.queues[0].describe(102, at, 10, WRITE | NEXT, 102);
        guest.queues[0].offer(102);
        guest.kick(0);
        guest.host.send([0; 10], &frame(200, 1));
        guest.host.send([0; 10], &frame(200, 2));
        // A reset makes the device work again in every case.
        guest.reset();
        guest.set_up(PLAIN);
        for number in 0..4 {
            guest.provide_buffer(0, number, 1600);
        }
        guest.host.send([0; 10], &frame(200, 3));
        for number in 0..4 {
            let (_, written) = guest.wait_used(0);
            let bytes = guest.read(guest.buffer(0, number), written as usize);
            if bytes[HEADER..] == frame(200, 3) {
                return;
            }
        }
        panic!("the frame did not arrive");
    });
}

#[test]
fn concurrent_kicks_and_resets_are_harmless() {
    each(2, |guest| {
        let mut guest = guest();
        for round in 0..30 {
            guest.set_up(PLAIN | 1 << 22);
            for _ in 0..100 {
                (0..5).for_each(|index| guest.kick(index));
            }
            for number in 0..32 {
                let at = guest.buffer(1, number);
                guest.queues[1].submit(&[(at, 1000, false)]);
                let reply_bytes = guest.buffer(0, number);
                guest.queues[0].submit(&[(reply_bytes, 64, true)]);
                guest.host.send([0; 10], &frame(1000, number as u8));
            }
            guest.kick(1);
            guest.kick(0);
            if round % 3 == 0 {
                guest.command(&[4, 0, 1 + (round % 2) as u8, 0], 1);
            }
            guest.reset();
        }
    });
}

#[test]
fn a_broken_ring_is_not_served_until_the_reset() {
    each(1, |guest| {
        let mut guest = guest();
        guest.set_up(PLAIN);
        guest.queues[1].set_available(1000);
        guest.queues[0].set_available(1000);
        guest.kick(0);
        guest.kick(1);
        guest.host.send([0; 10], &frame(100, 1));
        guest.reset();
        guest.set_up(PLAIN);
        guest.send(1, [0; HEADER], &frame(100, 9), &[]);
        assert_eq!(guest.host.receive(FRAME_TYPE)[10..], frame(100, 9));
    });
}
