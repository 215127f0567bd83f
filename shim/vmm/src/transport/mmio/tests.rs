//! Tests the registers against a device that records its calls, with drivers that follow the specification and drivers that break it.

use super::harness::*;
use super::{EmptyWindow, INTERRUPT_ACK, RestoreError, TransportState, reg};
use crate::virtio::{COMMON_FEATURES, Device, DeviceKind, DeviceState, Interrupt, Ring, StartError, StateError};
use proptest::prelude::*;
use std::sync::{Arc, Mutex};
use virtio_queue::QueueState;

/// A recorded call of the device.
#[derive(Clone, Debug, PartialEq, Eq)]
enum LoggedCall {
    Features(u64),
    Start(u16),
    Stop(u16),
    Reset,
    Write(u32, Vec<u8>),
}

#[derive(Clone, Default)]
struct DeviceLog(Arc<Mutex<Vec<LoggedCall>>>);

impl DeviceLog {
    fn record(&self, entry: LoggedCall) {
        self.0.lock().unwrap().push(entry);
    }

    /// Returns the calls recorded since the last time.
    fn take(&self) -> Vec<LoggedCall> {
        std::mem::take(&mut self.0.lock().unwrap())
    }
}

/// A device that does nothing with its queues.
#[derive(Default)]
struct LoggingDevice {
    log: DeviceLog,
    rings: Vec<Ring>,
    config: Arc<Mutex<[u8; 12]>>,
    interrupt: Arc<Mutex<Option<Arc<dyn Interrupt>>>>,
    /// Whether the queue that was stopped last had event indexes.
    event_indexes: Arc<Mutex<Option<bool>>>,
    fails: bool,
}

impl Device for LoggingDevice {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Rng
    }

    fn features(&self) -> u64 {
        COMMON_FEATURES | 1 << 5 | 1 << 40
    }

    fn acknowledge(&mut self, features: u64) {
        assert!(self.rings.is_empty());
        self.log.record(LoggedCall::Features(features));
    }

    fn queue_sizes(&self) -> &[u16] {
        &[256, 64, 64, 64]
    }

    fn read_config(&self, offset: u32, data: &mut [u8]) {
        crate::virtio::read_config(&*self.config.lock().unwrap(), offset, data);
    }

    fn write_config(&mut self, offset: u32, data: &[u8]) {
        self.log.record(LoggedCall::Write(offset, data.to_vec()));
    }

    fn start(&mut self, ring: Ring) -> Result<(), StartError> {
        let index = ring.index();
        assert!(self.rings.iter().all(|other| other.index() != index), "started twice");
        if self.fails {
            return Err(StartError::NoSuchQueue { device: self.kind(), index });
        }
        self.log.record(LoggedCall::Start(index));
        *self.interrupt.lock().unwrap() = Some(ring.interrupt().clone());
        self.rings.push(ring);
        Ok(())
    }

    fn stop(&mut self, index: u16) -> Option<QueueState> {
        let at = self.rings.iter().position(|ring| ring.index() == index)?;
        self.log.record(LoggedCall::Stop(index));
        let state = self.rings.remove(at).into_state();
        *self.event_indexes.lock().unwrap() = Some(state.event_idx_enabled);
        Some(QueueState { next_avail: state.next_avail.wrapping_add(7), ..state })
    }

    fn reset(&mut self) {
        assert!(self.rings.is_empty(), "the transport stops the queues");
        self.log.record(LoggedCall::Reset);
    }

    fn save(&self) -> DeviceState {
        assert!(self.rings.is_empty());
        DeviceState::Rng
    }

    fn restore(&mut self, state: DeviceState) -> Result<(), StateError> {
        match state {
            DeviceState::Rng => Ok(()),
            other => Err(other.wrong(self.kind())),
        }
    }
}

fn logging_device() -> (MmioGuest, DeviceLog) {
    let log = DeviceLog::default();
    (MmioGuest::new(Box::new(LoggingDevice { log: log.clone(), ..LoggingDevice::default() })), log)
}

#[test]
fn an_empty_window_has_the_device_id_zero() {
    let get = |offset: u64, width: usize| {
        let mut bytes = vec![0xff; width];
        EmptyWindow::default().read(offset, &mut bytes);
        bytes
    };
    assert_eq!(get(reg::MAGIC_VALUE, 4), b"virt");
    assert_eq!(get(reg::VERSION, 4), [2, 0, 0, 0]);
    let others = (reg::DEVICE_ID..0x1000).step_by(4).map(|offset| get(offset, 4));
    assert!(others.into_iter().all(|value| value == [0; 4]));
    for (offset, width) in [(0, 1), (0, 8), (1, 4), (reg::CONFIG, 2), (u64::MAX, 8)] {
        assert_eq!(get(offset, width), vec![0; width], "{offset:#x}");
    }
}

#[test]
fn registers_are_accessed_only_as_32_bit_words() {
    let (guest, _) = logging_device();
    assert_eq!([0, 4, 8].map(|register| guest.get(register)), [0x7472_6976, 2, 4]);
    assert_eq!(guest.offered(), COMMON_FEATURES | 1 << 5 | 1 << 40);
    guest.set(reg::DEVICE_FEATURES_SEL, 2);
    assert_eq!(guest.get(reg::DEVICE_FEATURES), 0);
    let sizes = [0, 1, 3, 4, 1 << 16, u32::MAX].map(|index| {
        guest.set(reg::QUEUE_SEL, index);
        guest.get(reg::QUEUE_SIZE_MAX)
    });
    assert_eq!(sizes, [256, 64, 64, 0, 0, 0]);
    for select in [0, 1, u32::MAX] {
        guest.set(reg::SHM_SEL, select);
        assert_eq!([0xb0, 0xb4, 0xb8, 0xbc].map(|register| guest.get(register)), [u32::MAX; 4]);
    }
    // Write-only registers, and offsets without a register.
    for register in [0x14, 0x20, 0x24, 0x30, 0x38, 0x50, 0x64, 0x80, 0x94, 0xa0, 0xac, 0xc0, 0x28, 0x3c, 0x40, 0xf8] {
        assert_eq!(guest.get(register), 0, "{register:#x}");
    }
    for (offset, length) in [(0, 1), (0, 2), (0, 3), (0, 8), (1, 4), (2, 4), (0xfe, 4), (0xff, 1), (0xfd, 8), (0, 0)] {
        let mut bytes = vec![0xff; length];
        guest.transport.read(offset, &mut bytes);
        assert_eq!(bytes, vec![0; length], "{length} bytes at {offset:#x}");
    }
    // A write of the wrong width to Status is ignored.
    guest.transport.write(reg::STATUS, &[1]);
    guest.transport.write(reg::STATUS, &[1, 0]);
    guest.transport.write(reg::STATUS, &[1, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(guest.status(), 0);
}

#[test]
fn the_configuration_space_supports_the_standard_widths() {
    let log = DeviceLog::default();
    let config = Arc::new(Mutex::new([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]));
    let guest = MmioGuest::new(Box::new(LoggingDevice { log: log.clone(), config, ..LoggingDevice::default() }));
    assert_eq!(guest.config::<1>(3), [4]);
    assert_eq!(guest.config::<2>(1), [2, 3]);
    assert_eq!(guest.config::<4>(10), [11, 12, 0, 0]);
    assert_eq!(guest.config::<8>(0), [1, 2, 3, 4, 5, 6, 7, 8]);
    assert_eq!(guest.config::<8>(0xef8), [0; 8]);
    assert_eq!((guest.config::<3>(0), guest.config::<5>(0), guest.config::<16>(0)), ([0; 3], [0; 5], [0; 16]));
    log.take();
    for length in 0..=16 {
        guest.transport.write(reg::CONFIG + 4, &[7; 16][..length]);
    }
    let written = [1, 2, 4, 8].map(|length| LoggedCall::Write(4, vec![7; length]));
    assert_eq!(log.take(), written);
    guest.transport.write(u64::MAX, &[1]);
    assert_eq!(log.take(), [], "an offset that no window has");
}

#[test]
fn only_offered_features_with_version_1_are_accepted() {
    const V1: u64 = 1 << 32;
    let (mut guest, log) = logging_device();
    for (features, good) in [
        (V1, true),
        (COMMON_FEATURES | 1 << 5 | 1 << 40, true),
        (0, false),
        (1 << 5, false),
        (V1 | 1 << 6, false),
        (V1 | 1 << 63, false),
    ] {
        guest.negotiate(features);
        let acknowledged = log.take().contains(&LoggedCall::Features(features));
        assert_eq!((guest.status() & FEATURES_OK != 0, acknowledged), (good, good), "{features:#x}");
    }
    // A feature word that does not exist.
    guest.negotiate(0);
    guest.set(reg::DRIVER_FEATURES_SEL, 1);
    guest.set(reg::DRIVER_FEATURES, 1);
    guest.set(reg::DRIVER_FEATURES_SEL, 2);
    guest.set(reg::DRIVER_FEATURES, 1);
    guest.set_status_bit(FEATURES_OK);
    assert_eq!(guest.status(), ACKNOWLEDGE | DRIVER);
    // Features after FEATURES_OK are ignored.
    guest.negotiate(V1);
    guest.set(reg::DRIVER_FEATURES_SEL, 0);
    guest.set(reg::DRIVER_FEATURES, 1 << 5);
    assert_eq!(guest.transport.save().registers.features, V1);
    // Features before DRIVER are ignored.
    guest.set(reg::STATUS, 0);
    guest.set_status_bit(ACKNOWLEDGE);
    guest.set(reg::DRIVER_FEATURES, 1 << 5);
    assert_eq!(guest.transport.save().registers.features, 0);
}

#[test]
fn status_bits_are_only_set_in_order() {
    let steps = [ACKNOWLEDGE, DRIVER, FEATURES_OK, DRIVER_OK];
    let mut live = 0;
    // All orders, with repetition.
    for order in 0..256usize {
        let (mut guest, log) = logging_device();
        guest.negotiate(0);
        guest.set(reg::STATUS, 0);
        for place in 0..4 {
            let before = guest.status();
            let bit = steps[order >> (2 * place) & 3];
            if bit == FEATURES_OK {
                guest.set(reg::DRIVER_FEATURES_SEL, 1);
                guest.set(reg::DRIVER_FEATURES, 1);
            }
            guest.set(reg::STATUS, before | bit);
            let after = guest.status();
            assert!([0, 1, 3, 11, 15].contains(&after) && after & before == before, "{after:#x}");
            guest.set(reg::STATUS, bit);
            assert_eq!(guest.status(), after, "bits cannot be taken back");
        }
        live += u32::from(guest.status() == LIVE);
        log.take();
        guest.set(reg::STATUS, 0);
        assert_eq!((guest.status(), log.take()), (0, vec![LoggedCall::Reset]));
    }
    assert_eq!(live, 1);
}

#[test]
fn a_failed_driver_must_reset() {
    let (mut guest, log) = logging_device();
    guest.start();
    log.take();
    guest.set_status_bit(FAILED);
    assert_eq!(guest.status(), LIVE | FAILED);
    assert_eq!(log.take(), [0, 1, 2, 3].map(LoggedCall::Stop));
    guest.set(reg::QUEUE_READY, 0);
    guest.set_up_queue(3, 16);
    guest.set(reg::QUEUE_READY, 1);
    assert_eq!(log.take(), []);
    guest.start();
    // A status with unknown bits is ignored.
    guest.set(reg::STATUS, LIVE | 0x100);
    guest.set(reg::STATUS, u32::MAX);
    assert_eq!(guest.status(), LIVE);
    guest.set(reg::STATUS, FAILED);
    assert_eq!(guest.status(), LIVE, "the other bits are missing");
}

#[test]
fn queues_start_in_numeric_order() {
    let (mut guest, log) = logging_device();
    guest.negotiate(guest.offered());
    for index in [3, 0, 2] {
        guest.ready(index, 16);
    }
    log.take();
    guest.set_status_bit(DRIVER_OK);
    assert_eq!(log.take(), [0, 2, 3].map(LoggedCall::Start));
    guest.ready(1, 64);
    assert_eq!(log.take(), [LoggedCall::Start(1)]);
    guest.set(reg::QUEUE_READY, 1);
    assert_eq!(log.take(), [], "it runs already");
    guest.set(reg::QUEUE_READY, 2);
    assert_eq!((guest.get(reg::QUEUE_READY), log.take()), (1, vec![]));
    for round in 0..100 {
        guest.set(reg::QUEUE_READY, round % 2);
    }
    assert_eq!(log.take().len(), 100);
    assert_eq!(guest.get(reg::QUEUE_READY), 1);
    guest.set(reg::STATUS, 0);
    assert_eq!(
        log.take(),
        [0, 1, 2, 3].map(LoggedCall::Stop).into_iter().chain([LoggedCall::Reset]).collect::<Vec<_>>()
    );
    assert_eq!(guest.get(reg::QUEUE_READY), 0);
}

#[test]
fn only_valid_queues_become_ready() {
    let (mut guest, log) = logging_device();
    let last = MEMORY as u64;
    guest.negotiate(guest.offered());
    let attempt = |size: u32, [descriptors, available, used]: [u64; 3]| {
        guest.set_up_queue(1, size);
        for (register, address) in [(0x80, descriptors), (0x90, available), (0xa0, used)] {
            guest.set(register, address as u32);
            guest.set(register + 4, (address >> 32) as u32);
        }
        guest.set(reg::QUEUE_READY, 1);
        let ready = guest.get(reg::QUEUE_READY) == 1;
        guest.set(reg::QUEUE_READY, 0);
        ready
    };
    let good = [0x4000, 0x6000, 0x7000];
    for (size, ready) in [(1, true), (64, true), (0, false), (3, false), (65, false), (128, false)] {
        assert_eq!(attempt(size, good), ready, "{size}");
    }
    assert!(!attempt(1 << 16 | 16, good) && !attempt(u32::MAX, good));
    // The sizes of the three parts with 16 descriptors: 256, 38 and 134 bytes.
    assert!(attempt(16, [last - 256, last - 38, last - 136]));
    for bad in [
        [last - 240, 0x6000, 0x7000],
        [0x4000, last - 36, 0x7000],
        [0x4000, 0x6000, last - 132],
        [0x4008, 0x6000, 0x7000],
        [0x4000, 0x6001, 0x7000],
        [0x4000, 0x6000, 0x7002],
        [1 << 40, 0x6000, 0x7000],
        [u64::MAX - 15, u64::MAX - 1, u64::MAX - 3],
        [0x4000, 0, 0x7000],
    ] {
        assert!(!attempt(16, bad), "{bad:x?}");
    }
    // A ready queue keeps its addresses, and a queue that does not exist cannot be set up.
    guest.ready(1, 16);
    let before = guest.transport.save();
    guest.set_up_queue(1, 32);
    guest.set_up_queue(4, 32);
    guest.set(reg::QUEUE_READY, 1);
    assert_eq!(guest.transport.save().registers.queues, before.registers.queues);
    // A queue cannot be made ready before the features are negotiated, because they change how queues work.
    guest.set(reg::STATUS, 0);
    guest.ready(0, 16);
    assert_eq!(guest.get(reg::QUEUE_READY), 0);
    assert!(!log.take().iter().any(|entry| matches!(entry, LoggedCall::Start(_))));
}

#[test]
fn a_queue_has_the_negotiated_properties() {
    for (features, expected) in [(1 << 32, false), (1 << 32 | 1 << 29, true)] {
        let logging_device = LoggingDevice::default();
        let seen = logging_device.event_indexes.clone();
        let mut guest = MmioGuest::new(Box::new(logging_device));
        guest.negotiate(features);
        guest.ready(0, 16);
        guest.set_status_bit(DRIVER_OK);
        guest.transport.pause();
        assert_eq!(*seen.lock().unwrap(), Some(expected));
    }
}

#[test]
fn interrupt_status_contains_the_cause() {
    let logging_device = LoggingDevice::default();
    let (interrupt, config) = (logging_device.interrupt.clone(), logging_device.config.clone());
    let mut guest = MmioGuest::new(Box::new(logging_device));
    guest.start();
    let interrupt = interrupt.lock().unwrap().clone().unwrap();
    assert_eq!((guest.get(reg::INTERRUPT_STATUS), guest.irq.read().is_err()), (1, true));
    interrupt.notify_queue(3);
    assert_eq!(guest.wait_interrupt(), 1);
    let generation = guest.get(reg::CONFIG_GENERATION);
    config.lock().unwrap()[0] = 1;
    assert_ne!(guest.get(reg::CONFIG_GENERATION), generation, "also without an interrupt");
    let generation = guest.get(reg::CONFIG_GENERATION);
    assert_eq!(guest.get(reg::CONFIG_GENERATION), generation);
    interrupt.notify_queue(0);
    interrupt.notify_config();
    assert_ne!(guest.get(reg::CONFIG_GENERATION), generation);
    // The acknowledgement that the VM lets the kernel handle has no effect; a configuration change stays visible until it is
    // acknowledged.
    let (register, queues_only) = INTERRUPT_ACK;
    for _ in 0..2 {
        assert_eq!(guest.get(reg::INTERRUPT_STATUS), 3);
        guest.set(register, queues_only);
    }
    guest.set(reg::INTERRUPT_ACK, 3);
    assert_eq!(guest.get(reg::INTERRUPT_STATUS), 1);
    interrupt.notify_config();
    guest.set(reg::INTERRUPT_ACK, u32::MAX);
    assert_eq!(guest.get(reg::INTERRUPT_STATUS), 1);
    // After a reset the guest is not interrupted, even if a device still holds the line.
    interrupt.notify_queue(0);
    guest.irq.read().unwrap();
    guest.set(reg::STATUS, 0);
    interrupt.notify_queue(0);
    interrupt.notify_config();
    assert_eq!((guest.get(reg::INTERRUPT_STATUS), guest.irq.read().is_err()), (0, true));
}

#[test]
fn direct_interrupts_show_in_the_status() {
    let logging_device = LoggingDevice::default();
    let interrupt = logging_device.interrupt.clone();
    let mut guest = MmioGuest::new(Box::new(logging_device));
    guest.start();
    let interrupt = interrupt.lock().unwrap().clone().unwrap();
    let direct = interrupt.interrupt_eventfd(0).unwrap();
    nix::unistd::write(&direct, &1u64.to_ne_bytes()).unwrap();
    assert_eq!(guest.wait_interrupt(), 1);
    assert_eq!(guest.get(reg::INTERRUPT_STATUS), 1, "acknowledging changes nothing");
    guest.set(reg::STATUS, 0);
    assert_eq!(guest.get(reg::INTERRUPT_STATUS), 0);
}

#[test]
fn a_broken_queue_requests_a_reset() {
    let logging_device = LoggingDevice::default();
    let interrupt = logging_device.interrupt.clone();
    let mut guest = MmioGuest::new(Box::new(logging_device));
    guest.start();
    interrupt.lock().unwrap().clone().unwrap().report_broken(1);
    assert_eq!(guest.wait_interrupt(), 3);
    assert_eq!(guest.status(), LIVE | NEEDS_RESET);
    guest.set(reg::STATUS, LIVE | NEEDS_RESET);
    guest.set(reg::STATUS, LIVE);
    assert_eq!(guest.status(), LIVE | NEEDS_RESET, "the driver cannot take it back");
    let state = guest.transport.save();
    guest.transport.restore(&state).unwrap();
    assert_eq!(guest.status(), LIVE | NEEDS_RESET);
    guest.start();
    // A queue that the host cannot serve has the same effect.
    let mut guest = MmioGuest::new(Box::new(LoggingDevice { fails: true, ..LoggingDevice::default() }));
    guest.negotiate(guest.offered());
    guest.ready(0, 16);
    guest.set_status_bit(DRIVER_OK);
    assert_eq!((guest.status(), guest.wait_interrupt()), (LIVE | NEEDS_RESET, 3));
    guest.transport.pause();
    assert!(guest.transport.resume().is_err());
}

#[test]
fn configuration_changes_are_always_reported() {
    let logging_device = LoggingDevice::default();
    let config = logging_device.config.clone();
    let mut guest = MmioGuest::new(Box::new(logging_device));
    let change = || config.lock().unwrap()[5] += 1;
    // The configuration changes between the driver's read and DRIVER_OK.
    guest.negotiate(guest.offered());
    guest.get(reg::CONFIG_GENERATION);
    change();
    guest.get(reg::CONFIG_GENERATION);
    assert!(guest.irq.read().is_err());
    guest.set_status_bit(DRIVER_OK);
    assert_eq!(guest.wait_interrupt(), 3);
    // The configuration changes while the VM is paused, and while it is saved.
    guest.transport.pause();
    let state = guest.transport.save();
    change();
    let generation = state.generation;
    guest.transport.restore(&state).unwrap();
    guest.transport.resume().unwrap();
    assert_eq!(guest.wait_interrupt(), 3);
    assert_ne!(guest.get(reg::CONFIG_GENERATION), generation);
    guest.transport.pause();
    guest.transport.resume().unwrap();
    assert_eq!(guest.wait_interrupt(), 1, "notified once");
}

#[test]
fn a_pause_keeps_the_positions_of_queues() {
    let (mut guest, log) = logging_device();
    guest.negotiate(guest.offered());
    guest.ready(0, 16);
    guest.ready(2, 16);
    guest.set_status_bit(DRIVER_OK);
    log.take();
    guest.transport.pause();
    guest.transport.pause();
    assert_eq!(log.take(), [0, 2].map(LoggedCall::Stop));
    // Changes by the driver during a pause take effect later.
    guest.set(reg::QUEUE_SEL, 2);
    guest.set(reg::QUEUE_READY, 0);
    guest.ready(1, 16);
    assert_eq!(log.take(), []);
    guest.transport.resume().unwrap();
    guest.transport.resume().unwrap();
    assert_eq!(log.take(), [0, 1].map(LoggedCall::Start));
    let at =
        |state: &TransportState| state.registers.queues.iter().map(|queue| queue.next_available).collect::<Vec<_>>();
    assert_eq!(at(&guest.transport.save()), [14, 7, 0, 0], "each stop of the toy counts 7");
    // The driver resets the device during a pause.
    log.take();
    guest.start();
    assert_eq!(log.take(), [LoggedCall::Reset, LoggedCall::Features(guest.offered())]);
    guest.transport.resume().unwrap();
    assert_eq!(log.take(), [0, 1, 2, 3].map(LoggedCall::Start));
}

#[test]
fn invalid_states_are_rejected() {
    let (mut guest, _) = logging_device();
    guest.start();
    let good = guest.transport.save();
    let written = serde_json::to_string(&good).unwrap();
    assert_eq!(serde_json::from_str::<TransportState>(&written).unwrap(), good);
    let refused = |change: &dyn Fn(&mut TransportState)| {
        let (guest, log) = logging_device();
        let mut state = good.clone();
        change(&mut state);
        let error = guest.transport.restore(&state).unwrap_err();
        assert_eq!(guest.status(), 0);
        guest.transport.resume().unwrap();
        assert_eq!(log.take(), [LoggedCall::Reset]);
        matches!(error, RestoreError::Invalid { .. })
    };
    assert!(refused(&|state| state.registers.status = DRIVER_OK));
    assert!(refused(&|state| state.registers.status |= 0x100));
    assert!(refused(&|state| state.registers.features |= 1));
    assert!(refused(&|state| state.registers.features = 0));
    assert!(refused(&|state| state.registers.excess_features = true));
    assert!(refused(&|state| state.registers.queues.truncate(3)));
    assert!(refused(&|state| state.registers.queues[1].size = 65));
    assert!(refused(&|state| state.registers.queues[1].used = 1 << 50));
    assert!(refused(&|state| state.config = vec![1; 257]));
    let other = crate::virtio::vsock::VsockState { guest_cid: 3 };
    assert!(!refused(&|state| state.device = DeviceState::Vsock(other.clone())), "a device's own error");
    let (fresh, log) = logging_device();
    fresh.transport.restore(&good).unwrap();
    assert_eq!(fresh.transport.save(), good);
    assert_eq!(log.take(), [LoggedCall::Reset, LoggedCall::Features(fresh.offered())]);
    fresh.transport.resume().unwrap();
    assert_eq!(log.take(), [0, 1, 2, 3].map(LoggedCall::Start));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    /// Any state, for example from a manipulated file, is rejected or works.
    #[test]
    fn restoring_any_state_never_panics(
        status in prop_oneof![Just(LIVE), Just(11), any::<u32>()],
        features in prop_oneof![Just(COMMON_FEATURES), any::<u64>()],
        queues in prop::collection::vec((0..300u32, 0..0x8000u64, any::<bool>(), any::<u16>()), 4),
    ) {
        let (mut guest, _) = logging_device();
        let mut state = guest.transport.save();
        state.registers.status = status;
        state.registers.features = features;
        for (saved, (size, at, ready, next)) in state.registers.queues.iter_mut().zip(queues) {
            saved.size = if size > 256 { size } else { size.next_power_of_two() };
            saved.descriptors = at & !15;
            saved.available = (at & !1) + 0x8000;
            saved.used = (at & !3) + 0x10000;
            (saved.ready, saved.next_available, saved.next_used) = (ready, next, next.wrapping_mul(3));
        }
        if guest.transport.restore(&state).is_ok() {
            prop_assert_eq!(guest.transport.save(), state);
        }
        guest.transport.resume().unwrap();
        guest.start();
    }
}
