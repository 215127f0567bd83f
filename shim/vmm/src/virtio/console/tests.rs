//! Tests the console with a driver that can break any rule.

use super::requests::{INPUT, OUTPUT};
use super::{INPUT_BYTES, MAX_BYTES, VirtioConsole};
use crate::fuzz::ring;
use crate::virtio::scripted::{Scripted, eventually};
use crate::virtio::{DeviceState, StateError};
use proptest::prelude::*;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};
use vm_memory::{Bytes, GuestAddress};

const AT: u64 = 0x20000;
const MEMORY: usize = 0x100000;

/// Returns a console and its output so far.
fn console() -> (VirtioConsole, Arc<Mutex<Vec<u8>>>) {
    let printed = Arc::new(Mutex::new(Vec::new()));
    let to = printed.clone();
    (VirtioConsole::new(Box::new(move |bytes| to.lock().unwrap().extend_from_slice(bytes))), printed)
}

fn scripted(console: &VirtioConsole) -> Scripted {
    Scripted::new(console.device(), &[(GuestAddress(0), MEMORY)])
}

#[test]
fn output_reaches_the_sink_in_order() {
    let (console, printed) = console();
    let mut machine = scripted(&console);
    machine.memory.write_slice(b"one two three", GuestAddress(AT)).unwrap();
    machine.request(OUTPUT, &[(AT, 4, false), (AT + 4, 4, false)]);
    machine.request(OUTPUT, &[(AT + 8, 5, false)]);
    assert_eq!(*printed.lock().unwrap(), b"one two three");
    assert_eq!(console.metrics().output_bytes.load(Relaxed), 13);
    // Device-writable buffers are not output.
    machine.request(OUTPUT, &[(AT, 4, true)]);
    assert_eq!(printed.lock().unwrap().len(), 13);
}

#[test]
fn the_output_of_a_request_is_bounded() {
    let (console, printed) = console();
    let mut machine = scripted(&console);
    machine.request(OUTPUT, &[(0, MEMORY as u32, false); 16]);
    assert_eq!(printed.lock().unwrap().len(), MAX_BYTES);
    assert_eq!(console.metrics().dropped_bytes.load(Relaxed), (16 * MEMORY - MAX_BYTES) as u64);
}

#[test]
fn input_and_buffers_wait_for_each_other() {
    let (console, _) = console();
    let mut machine = scripted(&console);
    assert_eq!(console.input(b"early"), 5);
    machine.drivers[usize::from(INPUT)].submit(&[(AT, 3, true)]);
    machine.start(INPUT);
    assert_eq!(machine.wait(INPUT), 3);
    machine.stop(INPUT);
    assert_eq!(machine.request(INPUT, &[(AT + 3, 100, true)]), 2);
    let mut bytes = [0; 5];
    machine.memory.read_slice(&mut bytes, GuestAddress(AT)).unwrap();
    assert_eq!(&bytes, b"early");

    // The buffer is available before the input, and survives a stop of the queue.
    machine.drivers[usize::from(INPUT)].submit(&[(AT, 100, true)]);
    machine.start(INPUT);
    machine.stop(INPUT);
    machine.start(INPUT);
    assert_eq!(machine.drivers[usize::from(INPUT)].take_used(), None);
    assert_eq!(console.input(b"late"), 4);
    assert_eq!(machine.wait(INPUT), 4);
    assert_eq!(console.metrics().input_bytes.load(Relaxed), 9);
}

#[test]
fn unread_input_is_bounded() {
    let (console, _) = console();
    let mut machine = scripted(&console);
    assert_eq!(console.input(&[7; 3 * INPUT_BYTES]), INPUT_BYTES);
    assert_eq!(console.input(&[7]), 0);
    assert_eq!(machine.request(INPUT, &[(AT, 10, true)]), 10);
    assert_eq!(console.input(&[7; 100]), 10);
    // A request without writable bytes consumes no input and is returned.
    assert_eq!(machine.request(INPUT, &[(AT, 10, false)]), 0);
    assert_eq!(console.input(&[7]), 0);
}

#[test]
fn a_kernel_without_a_driver_can_print() {
    let (console, printed) = console();
    let mut device = console.device();
    for character in *b"panic" {
        device.write_config(8, &u32::from(character).to_le_bytes());
    }
    device.write_config(8, b"!");
    // Writes to other offsets, or of no bytes, print nothing.
    device.write_config(0, b"xxxx");
    device.write_config(9, b"x");
    device.write_config(u32::MAX, b"x");
    device.write_config(8, b"");
    assert_eq!(*printed.lock().unwrap(), b"panic!");
    assert_eq!(console.metrics().emergency_bytes.load(Relaxed), 6);
}

#[test]
fn the_guest_sees_the_size_of_the_terminal() {
    let (console, _) = console();
    let mut device = console.device();
    console.resize(132, 0x0150);
    let mut config = [0xff; 16];
    device.read_config(0, &mut config);
    assert_eq!(config, [132, 0, 0x50, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);

    let (other, _) = self::console();
    let mut there = other.device();
    there.restore(device.save()).unwrap();
    assert_eq!(there.save(), device.save());
    assert!(matches!(there.restore(DeviceState::Rng), Err(StateError::FailureKind { .. })));
    device.reset();
}

#[test]
fn a_flooded_console_can_be_stopped() {
    let (console, printed) = console();
    let mut machine = scripted(&console);
    for _ in 0..20 {
        for index in [INPUT, OUTPUT] {
            machine.renew(index);
            for _ in 0..16 {
                machine.drivers[usize::from(index)].submit(&[(AT, 4096, index == INPUT)]);
            }
            machine.start(index);
        }
        // An index far beyond the queue's size: the ring itself detects that.
        machine.drivers[usize::from(OUTPUT)].set_available(0x8000);
        console.input(b"x");
        assert!(machine.device.start(ring(&machine.drivers[1], 1)).is_err());
        assert!(machine.device.start(ring(&machine.drivers[1], 2)).is_err());
        machine.device.reset();
        assert!(machine.device.stop(OUTPUT).is_none());
    }
    assert!(printed.lock().unwrap().len() <= 20 * 17 * 4096);
}

#[test]
fn both_queues_share_a_thread() {
    let (console, _) = console();
    let mut machine = scripted(&console);
    machine.start(OUTPUT);
    machine.start(INPUT);
    machine.stop(OUTPUT);
    machine.drivers[usize::from(OUTPUT)].submit(&[(AT, 10, false)]);
    machine.start(OUTPUT);
    machine.wait(OUTPUT);
    machine.stop(INPUT);
    eventually("output", || console.metrics().output_bytes.load(Relaxed) == 10);
    machine.stop(OUTPUT);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_sink_receives_exactly_what_was_sent(pieces in prop::collection::vec((0u32..9000, 0u64..0x10000), 1..12)) {
        let (console, printed) = console();
        let mut machine = scripted(&console);
        let text: Vec<u8> = (0..0x20000u32).map(|at| (at % 251) as u8).collect();
        machine.memory.write_slice(&text, GuestAddress(AT)).unwrap();
        let buffers: Vec<_> = pieces.iter().map(|(length, at)| (AT + at, *length, false)).collect();
        machine.request(OUTPUT, &buffers);
        let mut sent = Vec::new();
        for (length, at) in pieces {
            sent.extend_from_slice(&text[at as usize..][..length as usize]);
        }
        sent.truncate(MAX_BYTES);
        prop_assert_eq!(&*printed.lock().unwrap(), &sent);
    }
}
