//! Simulates a VM without a CPU: memory, and a vhost-user front end that drives one device as QEMU would.

#[path = "../../src/testing.rs"]
#[allow(dead_code, reason = "each test file uses a part of it")]
mod testing;

use nacelle_vmm::vhost_user::{self, VhostUserServer};
use nacelle_vmm::{Device, Memory};
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::poll::{PollFd, PollFlags, poll};
use nix::sys::memfd::{MFdFlags, memfd_create};
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use vhost::vhost_user::message::{VhostUserConfigFlags, VhostUserHeaderFlag};
use vhost::vhost_user::{Frontend, VhostUserFrontend, VhostUserProtocolFeatures};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vm_memory::{FileOffset, GuestAddress, GuestMemoryBackend};
use vmm_sys_util::eventfd::EventFd;

pub mod disk;

pub use testing::{Driver, QUEUE_BYTES};

/// The timeout of every wait in a test.
pub const LIMIT: Duration = Duration::from_secs(60);
/// The size of each of the two regions of guest memory, which have a hole between them.
pub const REGION: u64 = 8 << 20;
pub const SECOND: u64 = 64 << 20;
/// The first address behind the queues, which lie at the start of memory.
pub const FREE: u64 = 0x20000;

const F_PROTOCOL: u64 = 1 << 30;

/// Polls a condition until it holds; panics after [`LIMIT`].
pub fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < LIMIT, "waited {LIMIT:?} for {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

pub fn memory(seals: SealFlag) -> Arc<Memory> {
    let file = File::from(memfd_create(c"guest", MFdFlags::MFD_ALLOW_SEALING | MFdFlags::MFD_CLOEXEC).unwrap());
    file.set_len(2 * REGION).unwrap();
    fcntl(&file, FcntlArg::F_ADD_SEALS(seals)).unwrap();
    let part = |at: u64| Some(FileOffset::new(file.try_clone().unwrap(), at));
    let ranges = [(GuestAddress(0), REGION as usize, part(0)), (GuestAddress(SECOND), REGION as usize, part(REGION))];
    Arc::new(Memory::from_ranges_with_files(ranges).unwrap())
}

/// A queue as the front end uses it.
pub struct Queue {
    pub driver: Driver,
    pub kick: EventFd,
    pub call: EventFd,
}

impl Queue {
    /// Waits for the next returned request.
    pub fn wait_used(&mut self) -> (u16, u32) {
        let start = Instant::now();
        loop {
            if let Some(used) = self.driver.take_used() {
                return used;
            }
            self.driver.want_next_interrupt();
            if let Some(used) = self.driver.take_used() {
                return used;
            }
            assert!(start.elapsed() < LIMIT, "no request came back for {LIMIT:?}");
            wait(&self.call);
        }
    }

    pub fn kick(&self) {
        self.kick.write(1).unwrap();
    }
}

/// Waits for at most a second until an eventfd is written.
fn wait(event: &EventFd) {
    // The caller owns the event, so it lives as long as the borrow.
    #[allow(unsafe_code, reason = "EventFd has no AsFd")]
    // SAFETY: `event` is open while this function runs.
    let fd = unsafe { BorrowedFd::borrow_raw(event.as_raw_fd()) };
    if poll(&mut [PollFd::new(fd, PollFlags::POLLIN)], 1000u16).unwrap() > 0 {
        event.read().unwrap();
    }
}

/// A server and its front end.
pub struct FrontEnd {
    pub memory: Arc<Memory>,
    pub front: Frontend,
    pub queues: Vec<Queue>,
    pub channel: UnixStream,
    pub server: Option<VhostUserServer>,
    pub socket: PathBuf,
    next: u64,
    _dir: tempfile::TempDir,
}

impl FrontEnd {
    /// Serves a device, connects, and starts `count` of its queues.
    pub fn new(device: Box<dyn Device>, count: usize) -> FrontEnd {
        let mut front_end = FrontEnd::connected(device);
        front_end.set_up(count);
        front_end
    }

    /// Serves a device and connects to it, without starting a queue.
    pub fn connected(device: Box<dyn Device>) -> FrontEnd {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("device.sock");
        let server = vhost_user::serve(device, UnixListener::bind(&socket).unwrap()).unwrap();
        let (front, channel) = connect(&socket);
        let seals = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW;
        let (memory, queues, server) = (memory(seals), Vec::new(), Some(server));
        FrontEnd { memory, front, queues, channel, server, socket, next: FREE, _dir: dir }
    }

    /// Sets up the device as QEMU does when the guest's driver is ready.
    pub fn set_up(&mut self, count: usize) {
        let regions: Vec<_> =
            self.memory.iter().map(|region| VhostUserMemoryRegionInfo::from_guest_region(region).unwrap()).collect();
        self.front.set_mem_table(&regions).unwrap();
        for index in 0..count {
            let size = 128;
            let driver = Driver::new(self.memory.clone(), index as u64 * QUEUE_BYTES, size);
            let (kick, call) = (EventFd::new(0).unwrap(), EventFd::new(libc_nonblock()).unwrap());
            let queue = Queue { driver, kick, call };
            self.start(index, &queue, 0);
            self.queues.push(queue);
        }
    }

    /// Starts a queue at index `base` of its available ring.
    pub fn start(&mut self, index: usize, queue: &Queue, base: u16) {
        let host = |at: u64| self.memory.get_host_address(GuestAddress(at)).unwrap() as u64;
        let (descriptors, available, used) = queue.driver.addresses();
        let addresses = VringConfigData {
            queue_max_size: queue.driver.size(),
            queue_size: queue.driver.size(),
            flags: 0,
            desc_table_addr: host(descriptors),
            used_ring_addr: host(used),
            avail_ring_addr: host(available),
            log_addr: None,
        };
        self.front.set_vring_num(index, queue.driver.size()).unwrap();
        self.front.set_vring_base(index, base).unwrap();
        self.front.set_vring_addr(index, &addresses).unwrap();
        self.front.set_vring_kick(index, &queue.kick).unwrap();
        self.front.set_vring_call(index, &queue.call).unwrap();
        self.front.set_vring_enable(index, true).unwrap();
    }

    /// Disconnects the front end, so that the server accepts the next one.
    pub fn disconnect(&mut self) {
        self.front = Frontend::from_stream(UnixStream::pair().unwrap().0, 1);
    }

    /// Allocates unused guest memory and returns its address.
    pub fn allocate(&mut self, bytes: u64) -> u64 {
        let at = self.next;
        self.next += bytes.next_multiple_of(4096);
        assert!(self.next <= REGION, "guest memory is used up");
        at
    }

    pub fn config(&mut self, size: u32) -> Vec<u8> {
        let empty = vec![0; size as usize];
        self.front.get_config(0, size, VhostUserConfigFlags::empty(), &empty).unwrap().1
    }

    /// Waits until the device reports a configuration change.
    pub fn wait_config_change(&mut self) {
        self.channel.set_read_timeout(Some(LIMIT)).unwrap();
        let mut message = [0; 12];
        self.channel.read_exact(&mut message).unwrap();
        assert_eq!(message, [2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
    }
}

fn libc_nonblock() -> i32 {
    nix::sys::eventfd::EfdFlags::EFD_NONBLOCK.bits()
}

/// Connects and negotiates features, as QEMU does before the guest runs.
pub fn connect(socket: &std::path::Path) -> (Frontend, UnixStream) {
    let mut front = Frontend::connect(socket, 8).unwrap();
    front.set_owner().unwrap();
    let features = front.get_features().unwrap();
    assert_ne!(features & F_PROTOCOL, 0);
    front.set_features(features).unwrap();
    let offered = front.get_protocol_features().unwrap();
    let wanted = VhostUserProtocolFeatures::MQ
        | VhostUserProtocolFeatures::REPLY_ACK
        | VhostUserProtocolFeatures::BACKEND_REQ
        | VhostUserProtocolFeatures::CONFIG;
    assert!(offered.contains(wanted));
    front.set_protocol_features(wanted).unwrap();
    front.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
    let (channel, theirs) = UnixStream::pair().unwrap();
    front.set_backend_request_fd(&theirs).unwrap();
    (front, channel)
}
