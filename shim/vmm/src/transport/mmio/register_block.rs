//! Implements the registers: which values the driver may write in which state, and when a queue runs. A queue runs while it is
//! ready, the driver has set DRIVER_OK and the VM is not paused. All calls are serialized by the transport's lock. Stopping a
//! queue waits for the request in flight, so no code that a queue needs to finish a request may take that lock.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use super::interrupt::MmioInterrupt;
use super::shared::SharedMemory;
use super::state::{QueueRegisters, Registers, RestoreError, TransportState};
use super::{CONFIG_BYTES, reg};
use crate::sys;
use crate::virtio::{Device, DeviceKind, Interrupt, Memory, Ring, StartError};
use nacelle_base::Chain;
use nacelle_base::{guest_error, guest_warn};
use std::sync::Arc;
use virtio_queue::{Queue, QueueState, QueueT};
use vmm_sys_util::eventfd::EventFd;

pub(super) const MAGIC: u32 = u32::from_le_bytes(*b"virt");
pub(super) const VERSION: u32 = 2;
/// The vendor id "NACL"; the specification reserves no numbers.
const VENDOR: u32 = u32::from_le_bytes(*b"NACL");

const ACKNOWLEDGE: u32 = 1;
const DRIVER: u32 = 2;
pub(super) const DRIVER_OK: u32 = 4;
const FEATURES_OK: u32 = 8;
const NEEDS_RESET: u32 = 64;
const FAILED: u32 = 128;

const F_EVENT_IDX: u64 = 1 << 29;
const F_VERSION_1: u64 = 1 << 32;

/// One device and its registers.
pub(super) struct RegisterBlock {
    kind: DeviceKind,
    device: Box<dyn Device>,
    memory: Arc<Memory>,
    shared: SharedMemory,
    kicks: Arc<[EventFd]>,
    interrupt: Arc<MmioInterrupt>,
    registers: Registers,
    /// For each queue of the device, whether it is being served.
    running: Vec<bool>,
    paused: bool,
    /// The configuration space when it was last compared.
    config: Vec<u8>,
    /// The configuration space has changed since the driver began to read it, and the driver has not been notified yet.
    config_change_pending: bool,
}

impl RegisterBlock {
    pub(super) fn new(
        device: Box<dyn Device>,
        memory: Arc<Memory>,
        shared: SharedMemory,
        kicks: Arc<[EventFd]>,
        interrupt: Arc<MmioInterrupt>,
    ) -> RegisterBlock {
        let count = device.queue_sizes().len();
        let mut block = RegisterBlock {
            kind: device.kind(),
            device,
            memory,
            shared,
            kicks,
            interrupt,
            registers: Registers::default(),
            running: vec![false; count],
            paused: false,
            config: Vec::new(),
            config_change_pending: false,
        };
        block.registers = block.initial_registers();
        block.config = block.read_whole_config();
        block
    }

    pub(super) fn read(&mut self, register: u64) -> u32 {
        let sizes = self.device.queue_sizes();
        match register {
            reg::MAGIC_VALUE => MAGIC,
            reg::VERSION => VERSION,
            reg::DEVICE_ID => self.kind.id(),
            reg::VENDOR_ID => VENDOR,
            reg::DEVICE_FEATURES => match self.registers.device_features_select {
                0 => low(self.device.features()),
                1 => high(self.device.features()),
                _ => 0,
            },
            reg::QUEUE_SIZE_MAX => {
                let max = usize::try_from(self.registers.queue_select).ok().and_then(|index| sizes.get(index));
                max.copied().unwrap_or(0).into()
            }
            reg::QUEUE_READY => self.selected_queue().is_some_and(|(_, queue)| queue.ready).into(),
            reg::STATUS => self.status(),
            reg::SHM_LEN_LOW | reg::SHM_LEN_HIGH | reg::SHM_BASE_LOW | reg::SHM_BASE_HIGH => {
                self.shared.read(register, self.registers.shared_select)
            }
            reg::CONFIG_GENERATION => {
                self.detect_config_change();
                self.interrupt.generation()
            }
            _ => 0,
        }
    }

    pub(super) fn write(&mut self, register: u64, value: u32) {
        match register {
            reg::DEVICE_FEATURES_SEL => self.registers.device_features_select = value,
            reg::DRIVER_FEATURES => self.set_driver_features(value),
            reg::DRIVER_FEATURES_SEL => self.registers.driver_features_select = value,
            reg::QUEUE_SEL => self.registers.queue_select = value,
            reg::QUEUE_READY => self.set_queue_ready(value),
            reg::QUEUE_SIZE => self.edit_selected_queue(|queue| queue.size = value),
            reg::QUEUE_DESC_LOW => self.edit_selected_queue(|queue| set_low(&mut queue.descriptors, value)),
            reg::QUEUE_DESC_HIGH => self.edit_selected_queue(|queue| set_high(&mut queue.descriptors, value)),
            reg::QUEUE_DRIVER_LOW => self.edit_selected_queue(|queue| set_low(&mut queue.available, value)),
            reg::QUEUE_DRIVER_HIGH => self.edit_selected_queue(|queue| set_high(&mut queue.available, value)),
            reg::QUEUE_DEVICE_LOW => self.edit_selected_queue(|queue| set_low(&mut queue.used, value)),
            reg::QUEUE_DEVICE_HIGH => self.edit_selected_queue(|queue| set_high(&mut queue.used, value)),
            reg::STATUS => self.set_status(value),
            reg::SHM_SEL => self.registers.shared_select = value,
            _ => self.warn_violation("a write to a register that cannot be written", register),
        }
    }

    pub(super) fn read_config(&self, offset: u32, data: &mut [u8]) {
        self.device.read_config(offset, data);
    }

    pub(super) fn write_config(&mut self, offset: u32, data: &[u8]) {
        self.device.write_config(offset, data);
    }

    /// Stops all queues and records their positions.
    pub(super) fn pause(&mut self) {
        if !std::mem::replace(&mut self.paused, true) {
            self.detect_config_change();
            self.config_change_pending &= !self.is_live();
            self.stop_queues();
        }
    }

    /// Starts the queues that ran before the pause or that the driver has made ready since.
    pub(super) fn resume(&mut self) -> Result<(), StartError> {
        if !std::mem::replace(&mut self.paused, false) {
            return Ok(());
        }
        let started = self.start_queues();
        self.interrupt.resend();
        started
    }

    /// Pauses and returns the state from which the transport can continue in another process.
    pub(super) fn save(&mut self) -> TransportState {
        self.pause();
        TransportState {
            registers: Registers { status: self.status(), ..self.registers.clone() },
            interrupts: self.interrupt.pending(),
            generation: self.interrupt.generation(),
            config: self.config.clone(),
            config_change_pending: self.config_change_pending,
            shared: self.shared.save(),
            device: self.device.save(),
        }
    }

    /// Restores a saved state, in the paused state. On an error the device is reset.
    pub(super) fn restore(&mut self, state: &TransportState) -> Result<(), RestoreError> {
        self.reset();
        self.paused = true;
        let TransportState { registers, interrupts, generation, config, config_change_pending, shared, device } = state;
        self.check_registers(registers)?;
        if config.len() > CONFIG_BYTES {
            return Err(self.invalid("a configuration space of bytes", config.len() as u64));
        }
        self.shared.restore(shared).map_err(|page| self.invalid("shared memory, of it a page", page))?;
        self.device.restore(device.clone())?;
        self.registers = Registers { status: registers.status & !NEEDS_RESET, ..registers.clone() };
        self.config = config.clone();
        self.config_change_pending = *config_change_pending;
        if registers.status & FEATURES_OK != 0 {
            self.device.acknowledge(registers.features);
        }
        self.interrupt.restore(*interrupts, *generation, self.is_live(), registers.status & NEEDS_RESET != 0);
        Ok(())
    }

    fn check_registers(&self, registers: &Registers) -> Result<(), RestoreError> {
        let Registers { status, features, queues, .. } = registers;
        let steps = status & (ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK);
        let is_valid_sequence = [0, 1, 3, 11, 15].contains(&steps);
        if !is_valid_sequence || status & !(steps | NEEDS_RESET | FAILED) != 0 {
            return Err(self.invalid("the status", (*status).into()));
        }
        let accepted = features & !self.device.features() == 0 && features & F_VERSION_1 != 0;
        if status & FEATURES_OK != 0 && (!accepted || registers.excess_features) {
            return Err(self.invalid("the features", *features));
        }
        if queues.len() != self.running.len() {
            return Err(self.invalid("queues, in number", queues.len() as u64));
        }
        for (index, queue) in (0..).zip(queues) {
            if queue.ready
                && let Err(what) = self.checked_queue(index, queue, *features)
            {
                return Err(self.invalid(what, index.into()));
            }
        }
        Ok(())
    }

    fn invalid(&self, what: &'static str, value: u64) -> RestoreError {
        RestoreError::Invalid { device: self.kind, what, value }
    }

    fn warn_violation(&self, what: &str, value: u64) {
        guest_warn!(device = %self.kind, "the guest's driver did {what}: {value:#x}");
    }

    /// Returns the registers after a reset.
    fn initial_registers(&self) -> Registers {
        let queue = |size: &u16| QueueRegisters { size: (*size).into(), ..QueueRegisters::default() };
        Registers { queues: self.device.queue_sizes().iter().map(queue).collect(), ..Registers::default() }
    }

    fn status(&self) -> u32 {
        self.registers.status | if self.interrupt.needs_reset() { NEEDS_RESET } else { 0 }
    }

    fn has_status(&self, bit: u32) -> bool {
        self.registers.status & bit != 0
    }

    /// Returns whether ready queues run (unless the VM is paused).
    fn is_live(&self) -> bool {
        self.has_status(DRIVER_OK) && !self.has_status(FAILED)
    }

    fn set_status(&mut self, value: u32) {
        if value == 0 {
            return self.reset();
        }
        let known = value & (ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK | FAILED);
        if value & !(known | NEEDS_RESET) != 0 || self.registers.status & !known != 0 {
            return self.warn_violation("an invalid change of the status", value.into());
        }
        for bit in [ACKNOWLEDGE, DRIVER, FEATURES_OK, DRIVER_OK, FAILED] {
            if known & bit != 0 && !self.has_status(bit) && !self.advance_status(bit) {
                return self.warn_violation("a step of the initialization too early", value.into());
            }
        }
    }

    /// Performs one step of the initialization. Returns `false` if the step is not allowed in the current state.
    fn advance_status(&mut self, bit: u32) -> bool {
        let required = match bit {
            ACKNOWLEDGE | FAILED => 0,
            DRIVER => ACKNOWLEDGE,
            FEATURES_OK => DRIVER,
            _ => FEATURES_OK,
        };
        if self.registers.status & required != required || self.has_status(FAILED) {
            return false;
        }
        match bit {
            FEATURES_OK => {
                let features = self.registers.features;
                let offered = features & !self.device.features() == 0 && !self.registers.excess_features;
                if !offered || features & F_VERSION_1 == 0 {
                    return false; // the driver reads the status back and sees that the features are not accepted
                }
                self.device.acknowledge(features);
            }
            FAILED => self.stop_queues(),
            _ => {}
        }
        self.registers.status |= bit;
        if bit == DRIVER_OK {
            self.interrupt.enable();
            // A failure is reported to the driver by NEEDS_RESET.
            let _ = self.start_queues();
        }
        true
    }

    /// Resets the device and discards everything that the driver has set up.
    fn reset(&mut self) {
        self.stop_queues();
        self.device.reset();
        self.interrupt.disable();
        for kick in self.kicks.iter() {
            let _ = kick.read(); // fails if the counter is 0
        }
        self.registers = self.initial_registers();
        self.config = self.read_whole_config();
        self.config_change_pending = false;
    }

    fn set_driver_features(&mut self, value: u32) {
        if !self.has_status(DRIVER) || self.has_status(FEATURES_OK | FAILED) {
            return self.warn_violation("a choice of features at the wrong time", value.into());
        }
        match self.registers.driver_features_select {
            0 => set_low(&mut self.registers.features, value),
            1 => set_high(&mut self.registers.features, value),
            _ => self.registers.excess_features |= value != 0,
        }
    }

    fn selected_queue(&self) -> Option<(u16, &QueueRegisters)> {
        let index = u16::try_from(self.registers.queue_select).ok()?;
        Some((index, self.registers.queues.get(usize::from(index))?))
    }

    /// Writes a register of the selected queue, unless the queue is ready.
    fn edit_selected_queue(&mut self, write: impl FnOnce(&mut QueueRegisters)) {
        let index = usize::try_from(self.registers.queue_select).unwrap_or(usize::MAX);
        match self.registers.queues.get_mut(index) {
            Some(queue) if !queue.ready => write(queue),
            _ => self.warn_violation("a write to a queue that is ready or does not exist", index as u64),
        }
    }

    fn set_queue_ready(&mut self, value: u32) {
        let Some((index, queue)) = self.selected_queue() else {
            return self.warn_violation("a write to a queue that does not exist", self.registers.queue_select.into());
        };
        let ready = match value {
            0 => false,
            1 if !self.has_status(FEATURES_OK) => {
                return self.warn_violation("a queue ready before the features were negotiated", index.into());
            }
            1 if queue.ready => return,
            1 => match self.checked_queue(index, queue, self.registers.features) {
                Ok(_) => true,
                Err(what) => return self.warn_violation(what, index.into()),
            },
            _ => return self.warn_violation("an unknown value of QueueReady", value.into()),
        };
        if !ready {
            self.stop_queue(index);
        }
        if let Some(queue) = self.registers.queues.get_mut(usize::from(index)) {
            queue.ready = ready;
            // A queue that is made ready again starts from the beginning.
            queue.next_available = 0;
            queue.next_used = 0;
        }
        if ready && self.is_live() && !self.paused {
            let _ = self.start_queue(index);
        }
    }

    /// Returns the queue as the driver has set it up, or what is invalid about it.
    fn checked_queue(&self, index: u16, queue: &QueueRegisters, features: u64) -> Result<Queue, &'static str> {
        const SIZE: &str = "a queue ready with an invalid size";
        let max_size = self.device.queue_sizes().get(usize::from(index)).copied().unwrap_or(0);
        let size = u16::try_from(queue.size).map_err(|_wide| SIZE)?;
        if size == 0 || size > max_size || !size.is_power_of_two() {
            return Err(SIZE);
        }
        let state = QueueState {
            max_size,
            next_avail: queue.next_available,
            next_used: queue.next_used,
            event_idx_enabled: features & F_EVENT_IDX != 0,
            size,
            ready: true,
            desc_table: queue.descriptors,
            avail_ring: queue.available,
            used_ring: queue.used,
        };
        let queue_state = Queue::try_from(state).map_err(|_why| "a queue ready whose rings are not aligned")?;
        if queue.available == 0 || !queue_state.is_valid(&*self.memory) {
            return Err("a queue ready whose rings are not in guest memory");
        }
        Ok(queue_state)
    }

    /// Starts all ready queues in the order of their numbers, and notifies the driver if the configuration space has changed.
    fn start_queues(&mut self) -> Result<(), StartError> {
        if self.paused || !self.is_live() {
            return Ok(());
        }
        let mut result = Ok(());
        for index in self.queue_indexes() {
            let started = self.start_queue(index);
            result = result.and(started);
        }
        self.detect_config_change();
        if std::mem::take(&mut self.config_change_pending) {
            self.interrupt.notify_config();
        }
        result
    }

    fn start_queue(&mut self, index: u16) -> Result<(), StartError> {
        let queue_index = usize::from(index);
        let (Some(queue), Some(kick), Some(false)) =
            (self.registers.queues.get(queue_index), self.kicks.get(queue_index), self.running.get(queue_index))
        else {
            return Ok(());
        };
        if !queue.ready {
            return Ok(());
        }
        // The queue was valid when it was made ready, and memory does not change.
        let Ok(queue_state) = self.checked_queue(index, queue, self.registers.features) else { return Ok(()) };
        let interrupt: Arc<dyn Interrupt> = self.interrupt.clone();
        let ring =
            sys::duplicate(kick).and_then(|kick| Ring::new(index, queue_state, self.memory.clone(), kick, interrupt));
        let started = match ring {
            Ok(ring) => self.device.start(ring),
            Err(source) => Err(StartError::Thread { device: self.kind, index, source }),
        };
        match started {
            Ok(()) => {
                if let Some(running) = self.running.get_mut(queue_index) {
                    *running = true;
                }
                Ok(())
            }
            Err(error) => {
                guest_error!("{}", Chain(&error));
                self.interrupt.report_broken(index);
                Err(error)
            }
        }
    }

    fn queue_indexes(&self) -> std::ops::Range<u16> {
        0..u16::try_from(self.running.len()).unwrap_or(u16::MAX)
    }

    fn stop_queues(&mut self) {
        self.queue_indexes().for_each(|index| self.stop_queue(index));
    }

    fn stop_queue(&mut self, index: u16) {
        let queue_index = usize::from(index);
        let (Some(queue), Some(running)) =
            (self.registers.queues.get_mut(queue_index), self.running.get_mut(queue_index))
        else {
            return;
        };
        if !std::mem::take(running) {
            return;
        }
        match self.device.stop(index) {
            Some(state) => {
                queue.next_available = state.next_avail;
                queue.next_used = state.next_used;
            }
            // The queue's thread has panicked, and the position of the queue is lost.
            None => {
                queue.ready = false;
                self.interrupt.report_broken(index);
            }
        }
    }

    /// Compares the configuration space with the last known one and records a change.
    fn detect_config_change(&mut self) {
        let now = self.read_whole_config();
        if now != self.config {
            self.config = now;
            self.config_change_pending = true;
            self.interrupt.next_generation();
        }
    }

    /// Returns the whole configuration space without trailing zeros.
    fn read_whole_config(&self) -> Vec<u8> {
        let mut bytes = vec![0; CONFIG_BYTES];
        self.device.read_config(0, &mut bytes);
        let length = bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
        bytes.truncate(length);
        bytes
    }
}

impl Drop for RegisterBlock {
    fn drop(&mut self) {
        self.stop_queues();
        self.device.reset();
    }
}

fn low(number: u64) -> u32 {
    number as u32 // the lower half
}

fn high(number: u64) -> u32 {
    low(number >> 32)
}

fn set_low(number: &mut u64, value: u32) {
    *number = *number >> 32 << 32 | u64::from(value);
}

fn set_high(number: &mut u64, value: u32) {
    *number = u64::from(value) << 32 | u64::from(low(*number));
}
