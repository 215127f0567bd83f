//! Lets the kernel serve a pair of queues (vhost-net; linux/vhost.h). The kernel takes the addresses of a ring as addresses of
//! this process, so each part of a ring is first checked to lie in one piece of guest memory. The kernel checks the addresses
//! that it finds in a ring against the table of guest memory.

use super::tap::Tap;
use super::{NetError, feature, sys};
use crate::virtio::{COMMON_FEATURES, Memory, Ring};
use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::Arc;
use vhost::vhost_kern::VhostKernBackend;
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vm_memory::{Address, GuestAddress, GuestMemoryBackend, GuestMemoryRegion};

const DEVICE: &str = "/dev/vhost-net";

/// The features that the kernel must implement for the queues that it serves.
const KERNEL_FEATURES: u64 = COMMON_FEATURES | feature::MRG_RXBUF;

/// Opens vhost-net for `pairs` pairs of queues. Returns no files if the kernel has no vhost-net.
pub fn open(pairs: usize) -> Result<Vec<OwnedFd>, NetError> {
    let entry = || OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(DEVICE);
    match (0..pairs).map(|_| entry().map(OwnedFd::from)).collect() {
        Ok(all) => Ok(all),
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENODEV | libc::ENXIO)) => Ok(Vec::new()),
        Err(source) => Err(NetError::System { what: "open /dev/vhost-net", source }),
    }
}

/// The vhost-net file of a pair.
#[derive(Debug)]
pub(super) struct VhostNet {
    fd: OwnedFd,
    /// Whether this process has been set as the owner.
    has_owner: bool,
    /// Whether each of the two queues is set up.
    ready: [bool; 2],
}

/// The open file with the guest's memory, as the crate `vhost` expects it.
struct VhostHandle<'v> {
    fd: &'v OwnedFd,
    memory: Arc<Memory>,
}

impl AsRawFd for VhostHandle<'_> {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

impl VhostKernBackend for VhostHandle<'_> {
    type AS = Arc<Memory>;

    fn mem(&self) -> &Arc<Memory> {
        &self.memory
    }
}

impl VhostNet {
    pub(super) fn new(fd: OwnedFd) -> VhostNet {
        VhostNet { fd, has_owner: false, ready: [false; 2] }
    }

    /// Returns those features of `offered` that remain possible if the kernel serves the queues.
    pub(super) fn features(&self, offered: u64) -> Result<u64, NetError> {
        let handle = VhostHandle { fd: &self.fd, memory: Arc::default() };
        let here = handle.get_features().map_err(|error| NetError::System {
            what: "read the features of vhost-net",
            source: io::Error::other(error),
        })?;
        Ok(offered & (here | !KERNEL_FEATURES))
    }

    /// Sets up a queue of the pair. The kernel does not serve it before [`start_queue`](VhostNet::start_queue).
    pub(super) fn set_up_queue(&mut self, queue: usize, ring: &Ring, call: OwnedFd, features: u64) -> io::Result<()> {
        let state = ring.state();
        let memory = ring.memory();
        let size = usize::from(state.size);
        // The sizes include the event indexes at the ends of the rings (Virtio 1.2, 2.7).
        let parts = [(state.desc_table, 16 * size), (state.avail_ring, 6 + 2 * size), (state.used_ring, 6 + 8 * size)];
        for (address, length) in parts {
            GuestMemoryBackend::get_slice(&**memory, GuestAddress(address), length).map_err(io::Error::other)?;
        }
        let handle = VhostHandle { fd: &self.fd, memory: memory.clone() };
        let setup = || -> Result<(), vhost::Error> {
            if !self.has_owner {
                handle.set_owner()?;
            }
            if self.ready == [false; 2] {
                handle.set_features(features & KERNEL_FEATURES)?;
                handle.set_mem_table(&memory_table(memory))?;
            }
            handle.set_vring_num(queue, state.size)?;
            handle.set_vring_base(queue, state.next_avail)?;
            handle.set_vring_addr(
                queue,
                &VringConfigData {
                    queue_max_size: state.size,
                    queue_size: state.size,
                    flags: 0,
                    desc_table_addr: state.desc_table,
                    used_ring_addr: state.used_ring,
                    avail_ring_addr: state.avail_ring,
                    log_addr: None,
                },
            )
        };
        setup().map_err(io::Error::other)?;
        self.has_owner = true;
        // The kernel duplicates both descriptors.
        handle.set_vring_call(queue, &sys::event(call)).map_err(io::Error::other)?;
        handle.set_vring_kick(queue, &sys::event(ring.as_fd().try_clone_to_owned()?)).map_err(io::Error::other)?;
        self.ready[queue] = true;
        Ok(())
    }

    /// Lets the kernel serve the queue, starting with the requests that are already in it.
    pub(super) fn start_queue(&self, queue: usize, ring: &Ring, tap: &Tap) -> io::Result<()> {
        sys::set_backend(self.fd.as_fd(), queue as u32, Some(tap.as_fd()))?; // 0 or 1
        ring.kick()
    }

    /// Stops the kernel from serving the queue: on return it accesses neither ring nor buffers.
    pub(super) fn pause_queue(&self, queue: usize) -> io::Result<()> {
        sys::set_backend(self.fd.as_fd(), queue as u32, None) // 0 or 1
    }

    /// Stops the queue and sets the position in `ring`.
    pub(super) fn stop_queue(&mut self, queue: usize, ring: &mut Ring) -> io::Result<()> {
        self.ready[queue] = false;
        self.pause_queue(queue)?;
        let handle = VhostHandle { fd: &self.fd, memory: ring.memory().clone() };
        let base = handle.get_vring_base(queue).map_err(io::Error::other)?;
        ring.set_next_available(base as u16); // an index of a split ring
        Ok(())
    }
}

/// Returns guest memory as the kernel's memory table.
fn memory_table(memory: &Memory) -> Vec<VhostUserMemoryRegionInfo> {
    let entry = |region: &vm_memory::GuestRegionMmap<()>| VhostUserMemoryRegionInfo {
        guest_phys_addr: region.start_addr().raw_value(),
        memory_size: region.len(),
        userspace_addr: region.as_ptr() as u64,
        ..Default::default()
    };
    memory.iter().map(entry).collect()
}
