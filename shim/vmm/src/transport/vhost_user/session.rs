//! Holds the state that one front end has set up, and decides when a queue runs: when it has memory, addresses, a size and a
//! kick, and is enabled.

use super::interrupt::VhostUserInterrupt;
use super::memory::FrontEndMemory;
use super::wire::{FrontEndRegion, QueueAddresses, VhostUserProtocolError, VhostUserReply, VhostUserRequest};
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
pub(super) struct VhostUserSession<'d> {
    device: &'d mut dyn Device,
    features: u64,
    protocol: u64,
    memory: Option<FrontEndMemory>,
    queues: Vec<QueueSetup>,
    interrupt: Arc<VhostUserInterrupt>,
    /// The configuration space as the front end last read it.
    last_config: Option<Vec<u8>>,
}

/// The configuration of one queue.
#[derive(Debug, Default)]
struct QueueSetup {
    size: u16,
    addresses: Option<QueueAddresses>,
    base: u16,
    kick: Option<OwnedFd>,
    enabled: bool,
    running: bool,
}

impl<'d> VhostUserSession<'d> {
    pub(super) fn new(device: &'d mut dyn Device) -> VhostUserSession<'d> {
        let count = device.queue_sizes().len();
        VhostUserSession {
            device,
            features: 0,
            protocol: 0,
            memory: None,
            queues: (0..count).map(|_| QueueSetup::default()).collect(),
            interrupt: Arc::new(VhostUserInterrupt::new(count)),
            last_config: None,
        }
    }

    /// Returns the memory that the front end shares at present.
    pub(super) fn memory(&self) -> Weak<Memory> {
        self.memory.as_ref().map_or_else(Weak::new, |shared| Arc::downgrade(&shared.memory))
    }

    /// Returns whether messages without a reply are acknowledged on request.
    pub(super) fn replies_on_request(&self) -> bool {
        self.protocol & P_REPLY_ACK != 0
    }

    /// Executes a request and returns its reply.
    pub(super) fn handle(&mut self, request: VhostUserRequest) -> Result<VhostUserReply, VhostUserProtocolError> {
        match request {
            VhostUserRequest::GetFeatures => return Ok(VhostUserReply::Number(self.offered_features())),
            VhostUserRequest::GetProtocolFeatures => return Ok(VhostUserReply::Number(PROTOCOL)),
            VhostUserRequest::GetQueueCount => return Ok(VhostUserReply::Number(self.queues.len() as u64)),
            VhostUserRequest::GetBase { index } => return self.stop_and_get_base(index),
            VhostUserRequest::GetConfig { offset, size } => return Ok(self.read_config(offset, size)),
            VhostUserRequest::SetFeatures(bits) => self.set_features(bits)?,
            VhostUserRequest::SetProtocolFeatures(bits) => self.protocol = bits & PROTOCOL,
            VhostUserRequest::SetOwner | VhostUserRequest::SetError => {}
            VhostUserRequest::Reset => {
                self.stop_queues();
                self.device.reset();
            }
            VhostUserRequest::SetMemory(regions) => self.set_memory(regions)?,
            VhostUserRequest::SetSize { index, size } => self.stopped_queue(index)?.size = to_u16("size", size)?,
            VhostUserRequest::SetAddresses { index, addresses } => {
                self.stopped_queue(index)?.addresses = Some(addresses);
            }
            VhostUserRequest::SetBase { index, base } => self.stopped_queue(index)?.base = to_u16("base", base)?,
            VhostUserRequest::SetKick { index, fd } => {
                self.stopped_queue(index)?.kick = fd;
                self.start_queue_if_ready(self.checked_index(index)?)?;
            }
            VhostUserRequest::SetCall { index, fd } => self.set_call(self.checked_index(index)?, fd)?,
            VhostUserRequest::SetEnabled { index, enabled } => self.set_enabled(index, enabled)?,
            VhostUserRequest::SetBackendChannel(channel) => {
                self.interrupt.set_channel(channel);
                self.report_missed_config_change();
            }
            VhostUserRequest::SetConfig { offset, data } => self.device.write_config(offset, &data),
        }
        Ok(VhostUserReply::Acknowledged)
    }

    fn stop_and_get_base(&mut self, index: u32) -> Result<VhostUserReply, VhostUserProtocolError> {
        let queue = self.stopped_queue(index)?;
        queue.kick = None;
        Ok(VhostUserReply::Base { index, base: queue.base.into() })
    }

    /// Reads the configuration space. The parser has checked the size.
    fn read_config(&mut self, offset: u32, size: u32) -> VhostUserReply {
        let mut data = vec![0; size as usize];
        self.device.read_config(offset, &mut data);
        if offset == 0 {
            self.last_config = Some(data.clone());
        }
        VhostUserReply::Config { offset, data }
    }

    /// Sets the negotiated features. Unknown bits are ignored, because a front end may set bits of its own.
    fn set_features(&mut self, bits: u64) -> Result<(), VhostUserProtocolError> {
        self.stop_queues();
        self.features = bits & self.offered_features();
        self.device.acknowledge(self.features & self.device.features());
        self.start_ready_queues()
    }

    fn set_memory(&mut self, regions: Vec<FrontEndRegion>) -> Result<(), VhostUserProtocolError> {
        let memory = FrontEndMemory::map(regions)?;
        self.stop_queues();
        self.memory = Some(memory);
        self.start_ready_queues()
    }

    fn set_call(&mut self, index: u16, fd: Option<OwnedFd>) -> Result<(), VhostUserProtocolError> {
        let restart = self.interrupt.is_call_copied(index);
        if restart {
            self.stop_queue(index);
        }
        self.interrupt.set_call(index, fd)?;
        if restart { self.start_queue_if_ready(index) } else { Ok(()) }
    }

    fn set_enabled(&mut self, index: u32, enabled: bool) -> Result<(), VhostUserProtocolError> {
        let number = self.checked_index(index)?;
        self.queue_setup(index)?.enabled = enabled;
        if enabled {
            return self.start_queue_if_ready(number);
        }
        self.stop_queue(number);
        Ok(())
    }

    fn start_ready_queues(&mut self) -> Result<(), VhostUserProtocolError> {
        self.queue_indexes().try_for_each(|index| self.start_queue_if_ready(index))
    }

    fn offered_features(&self) -> u64 {
        self.device.features() | F_PROTOCOL_FEATURES
    }

    fn queue_indexes(&self) -> std::ops::Range<u16> {
        0..u16::try_from(self.queues.len()).unwrap_or(u16::MAX)
    }

    fn checked_index(&self, index: u32) -> Result<u16, VhostUserProtocolError> {
        let number = u16::try_from(index).ok().filter(|number| self.queue_indexes().contains(number));
        number.ok_or(VhostUserProtocolError::NoQueue { index })
    }

    fn queue_setup(&mut self, index: u32) -> Result<&mut QueueSetup, VhostUserProtocolError> {
        let found = usize::try_from(index).ok().and_then(|number| self.queues.get_mut(number));
        found.ok_or(VhostUserProtocolError::NoQueue { index })
    }

    /// Stops a queue if it runs and returns its configuration for changes.
    fn stopped_queue(&mut self, index: u32) -> Result<&mut QueueSetup, VhostUserProtocolError> {
        self.stop_queue(self.checked_index(index)?);
        self.queue_setup(index)
    }

    fn stop_queue(&mut self, index: u16) {
        let Some(queue) = self.queues.get_mut(usize::from(index)) else { return };
        if std::mem::take(&mut queue.running)
            && let Some(state) = self.device.stop(index)
        {
            queue.base = state.next_avail;
        }
    }

    fn stop_queues(&mut self) {
        self.queue_indexes().for_each(|index| self.stop_queue(index));
    }

    fn start_queue_if_ready(&mut self, index: u16) -> Result<(), VhostUserProtocolError> {
        let sizes = self.device.queue_sizes();
        let always_enabled = self.features & F_PROTOCOL_FEATURES == 0;
        let (Some(queue), Some(max_size)) = (self.queues.get_mut(usize::from(index)), sizes.get(usize::from(index)))
        else {
            return Err(VhostUserProtocolError::NoQueue { index: index.into() });
        };
        let (Some(shared), Some(addresses), Some(kick)) = (&self.memory, queue.addresses, &queue.kick) else {
            return Ok(());
        };
        if queue.running || queue.size == 0 || !(queue.enabled || always_enabled) {
            return Ok(());
        }
        let address = |value| {
            let found = shared.guest_address(value);
            found.ok_or(VhostUserProtocolError::Memory {
                address: value,
                length: 0,
                why: "a queue is outside the shared memory",
            })
        };
        let bad = |source| VhostUserProtocolError::Queue { index, source };
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
        let interrupt: Arc<dyn Interrupt> = self.interrupt.clone();
        let ring = Ring::new(index, ready, shared.memory.clone(), kick.try_clone()?, interrupt)?;
        self.device.start(ring)?;
        queue.running = true;
        self.report_missed_config_change();
        Ok(())
    }

    /// Notifies the front end of configuration changes that it missed: it reads the configuration early and handles changes
    /// only while queues run.
    fn report_missed_config_change(&self) {
        let running = self.queues.iter().any(|queue| queue.running);
        if let Some(last_config) = self.last_config.as_ref().filter(|_| running) {
            let mut now = vec![0; last_config.len()];
            self.device.read_config(0, &mut now);
            if now != *last_config {
                self.interrupt.notify_config();
            }
        }
    }
}

impl Drop for VhostUserSession<'_> {
    fn drop(&mut self) {
        self.stop_queues();
    }
}

fn to_u16(what: &'static str, value: u32) -> Result<u16, VhostUserProtocolError> {
    u16::try_from(value).map_err(|_wide| VhostUserProtocolError::BadValue { what, value: value.into() })
}
