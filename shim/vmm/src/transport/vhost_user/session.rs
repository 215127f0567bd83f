//! Holds the state that one front end has set up, and decides when a queue runs: when it has memory, addresses, a size and a
//! kick, and is enabled.

use super::line::Line;
use super::memory::Shared;
use super::wire::{Addresses, Answer, Ask, WireError};
use crate::virtio::{Device, Interrupt, Memory, Ring};
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use virtio_queue::{Queue, QueueState, QueueT};

const F_EVENT_IDX: u64 = 1 << 29;
const F_PROTOCOL_FEATURES: u64 = 1 << 30;

const P_MQ: u64 = 1 << 0;
const P_REPLY_ACK: u64 = 1 << 3;
const P_BACKEND_REQ: u64 = 1 << 5;
const P_CONFIG: u64 = 1 << 9;
const P_RESET_DEVICE: u64 = 1 << 13;
const PROTOCOL: u64 = P_MQ | P_REPLY_ACK | P_BACKEND_REQ | P_CONFIG | P_RESET_DEVICE;

/// The size of the queues that QEMU's MMIO transport offers to the guest, regardless of the device behind it.
const FRONT_END_SIZE: u16 = 1024;

/// The state of the connection to one front end.
pub(super) struct Session<'d> {
    device: &'d mut dyn Device,
    features: u64,
    protocol: u64,
    memory: Option<Shared>,
    queues: Vec<Setup>,
    line: Arc<Line>,
    /// The configuration space as the front end last read it.
    seen: Option<Vec<u8>>,
}

/// The configuration of one queue.
#[derive(Debug, Default)]
struct Setup {
    size: u16,
    addresses: Option<Addresses>,
    base: u16,
    kick: Option<OwnedFd>,
    enabled: bool,
    running: bool,
}

impl<'d> Session<'d> {
    pub(super) fn new(device: &'d mut dyn Device) -> Session<'d> {
        let count = device.queue_sizes().len();
        Session {
            device,
            features: 0,
            protocol: 0,
            memory: None,
            queues: (0..count).map(|_| Setup::default()).collect(),
            line: Arc::new(Line::new(count)),
            seen: None,
        }
    }

    /// Returns the memory that the front end shares at present.
    pub(super) fn memory(&self) -> Weak<Memory> {
        self.memory.as_ref().map_or_else(Weak::new, |shared| Arc::downgrade(&shared.memory))
    }

    /// Returns whether messages without a reply are acknowledged on request.
    pub(super) fn acknowledges(&self) -> bool {
        self.protocol & P_REPLY_ACK != 0
    }

    pub(super) fn handle(&mut self, ask: Ask) -> Result<Answer, WireError> {
        match ask {
            Ask::GetFeatures => return Ok(Answer::Number(self.offered())),
            Ask::GetProtocolFeatures => return Ok(Answer::Number(PROTOCOL)),
            Ask::GetQueueCount => return Ok(Answer::Number(self.queues.len() as u64)),
            Ask::GetBase { index } => {
                let number = self.index(index)?;
                self.stop(number);
                let queue = self.queue(index)?;
                queue.kick = None;
                return Ok(Answer::Base { index, base: queue.base.into() });
            }
            Ask::GetConfig { offset, size } => {
                let mut data = vec![0; size as usize]; // checked by the parser
                self.device.read_config(offset, &mut data);
                if offset == 0 {
                    self.seen = Some(data.clone());
                }
                return Ok(Answer::Config { offset, data });
            }
            // Unknown bits are ignored, because a front end may set bits of its own.
            Ask::SetFeatures(bits) => {
                self.stop_all();
                self.features = bits & self.offered();
                self.device.acknowledge(self.features & self.device.features());
                for index in self.indexes() {
                    self.start_if_ready(index)?;
                }
            }
            Ask::SetProtocolFeatures(bits) => self.protocol = bits & PROTOCOL,
            Ask::SetOwner | Ask::SetError => {}
            Ask::Reset => {
                self.stop_all();
                self.device.reset();
            }
            Ask::SetMemory(regions) => {
                let memory = Shared::map(regions)?;
                self.stop_all();
                self.memory = Some(memory);
                for index in self.indexes() {
                    self.start_if_ready(index)?;
                }
            }
            Ask::SetSize { index, size } => {
                self.idle(index)?.size = narrow("size", size)?;
            }
            Ask::SetAddresses { index, addresses } => {
                self.idle(index)?.addresses = Some(addresses);
            }
            Ask::SetBase { index, base } => {
                self.idle(index)?.base = narrow("base", base)?;
            }
            Ask::SetKick { index, fd } => {
                self.idle(index)?.kick = fd;
                self.start_if_ready(self.index(index)?)?;
            }
            Ask::SetCall { index, fd } => {
                let number = self.index(index)?;
                let again = self.line.is_copied(number);
                if again {
                    self.stop(number);
                }
                self.line.set_call(number, fd)?;
                if again {
                    self.start_if_ready(number)?;
                }
            }
            Ask::SetEnabled { index, enabled } => {
                let number = self.index(index)?;
                self.queue(index)?.enabled = enabled;
                if enabled {
                    self.start_if_ready(number)?;
                } else {
                    self.stop(number);
                }
            }
            Ask::SetBackendChannel(channel) => {
                self.line.set_channel(channel);
                self.tell_of_changes();
            }
            Ask::SetConfig { offset, data } => self.device.write_config(offset, &data),
        }
        Ok(Answer::Done)
    }

    fn offered(&self) -> u64 {
        self.device.features() | F_PROTOCOL_FEATURES
    }

    fn indexes(&self) -> std::ops::Range<u16> {
        0..u16::try_from(self.queues.len()).unwrap_or(u16::MAX)
    }

    fn index(&self, index: u32) -> Result<u16, WireError> {
        let number = u16::try_from(index).ok().filter(|number| self.indexes().contains(number));
        number.ok_or(WireError::NoQueue { index })
    }

    fn queue(&mut self, index: u32) -> Result<&mut Setup, WireError> {
        let found = usize::try_from(index).ok().and_then(|number| self.queues.get_mut(number));
        found.ok_or(WireError::NoQueue { index })
    }

    /// Stops a queue if it runs and returns its configuration for changes.
    fn idle(&mut self, index: u32) -> Result<&mut Setup, WireError> {
        self.stop(self.index(index)?);
        self.queue(index)
    }

    fn stop(&mut self, index: u16) {
        let Some(queue) = self.queues.get_mut(usize::from(index)) else { return };
        if std::mem::take(&mut queue.running)
            && let Some(state) = self.device.stop(index)
        {
            queue.base = state.next_avail;
        }
    }

    fn stop_all(&mut self) {
        self.indexes().for_each(|index| self.stop(index));
    }

    fn start_if_ready(&mut self, index: u16) -> Result<(), WireError> {
        let sizes = self.device.queue_sizes();
        let enabled_by_nature = self.features & F_PROTOCOL_FEATURES == 0;
        let (Some(queue), Some(max_size)) = (self.queues.get_mut(usize::from(index)), sizes.get(usize::from(index)))
        else {
            return Err(WireError::NoQueue { index: index.into() });
        };
        let (Some(shared), Some(addresses), Some(kick)) = (&self.memory, queue.addresses, &queue.kick) else {
            return Ok(());
        };
        if queue.running || queue.size == 0 || !(queue.enabled || enabled_by_nature) {
            return Ok(());
        }
        let address = |value| {
            let found = shared.guest_address(value);
            found.ok_or(WireError::Memory { address: value, length: 0, why: "a queue lies outside" })
        };
        let bad = |source| WireError::Queue { index, source };
        let state = QueueState {
            max_size: (*max_size).max(FRONT_END_SIZE),
            next_avail: queue.base,
            next_used: 0,
            event_idx_enabled: self.features & F_EVENT_IDX != 0,
            size: queue.size,
            ready: true,
            desc_table: address(addresses.descriptors)?,
            avail_ring: address(addresses.available)?,
            used_ring: address(addresses.used)?,
        };
        let mut ready = Queue::try_from(state).map_err(bad)?;
        if !ready.is_valid(&*shared.memory) {
            return Err(bad(virtio_queue::Error::FindMemoryRegion));
        }
        // The protocol has no message for the index of the used ring, so it is read from the ring.
        let used = ready.used_idx(&*shared.memory, Ordering::Acquire).map_err(bad)?;
        ready.set_next_used(used.0);
        let line: Arc<dyn Interrupt> = self.line.clone();
        let ring = Ring::new(index, ready, shared.memory.clone(), kick.try_clone()?, line)?;
        self.device.start(ring)?;
        queue.running = true;
        self.tell_of_changes();
        Ok(())
    }

    /// Notifies the front end of configuration changes that it missed: it reads the configuration early and handles changes
    /// only while queues run.
    fn tell_of_changes(&self) {
        let running = self.queues.iter().any(|queue| queue.running);
        if let Some(seen) = self.seen.as_ref().filter(|_| running) {
            let mut now = vec![0; seen.len()];
            self.device.read_config(0, &mut now);
            if now != *seen {
                self.line.config();
            }
        }
    }
}

impl Drop for Session<'_> {
    fn drop(&mut self) {
        self.stop_all();
    }
}

fn narrow(what: &'static str, value: u32) -> Result<u16, WireError> {
    u16::try_from(value).map_err(|_wide| WireError::BadValue { what, value: value.into() })
}
