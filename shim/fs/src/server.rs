//! Owns: answering the requests of a guest with virtiofsd's file system. It wants descriptors in guest memory: each request
//! is laid into memory of this process, which is the guest's as far as it knows. The guest's own is never seen here.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use crate::names;
use nacelle_base::share::MAX_MESSAGE;
use std::fs::File;
use std::io;
use std::time::Duration;
use vhost_user_backend_of_virtiofsd::bitmap::BitmapMmapRegion;
use virtio_queue_of_virtiofsd::{Queue, QueueT, desc::split::Descriptor};
use virtiofsd::descriptor_utils::{Reader, Writer};
use virtiofsd::passthrough::{CachePolicy, Config, PassthroughFs};
use virtiofsd::server::Server as Fuse;
use vm_memory_of_virtiofsd::{Bytes, GuestAddress, GuestMemoryMmap};

type Memory = GuestMemoryMmap<BitmapMmapRegion>;

/// Two descriptors, and rings for them; then the request, then the answer.
const DESCRIPTORS: u64 = 0;
const AVAILABLE: u64 = 0x100;
const USED: u64 = 0x200;
const REQUEST: u64 = 0x1000;
const ANSWER: u64 = REQUEST + MAX_MESSAGE as u64;
const END: usize = ANSWER as usize + MAX_MESSAGE;
/// The number of descriptors.
const SIZE: u16 = 2;
/// `VIRTQ_DESC_F_NEXT`, `VIRTQ_DESC_F_WRITE`.
const NEXT: u16 = 1;
const WRITE: u16 = 2;
/// Descriptors that are not for the guest's files.
const OWN_FILES: u64 = 64;
/// `struct fuse_out_header`, and where a request has its number.
const OUT_HEADER: usize = 16;
const UNIQUE: std::ops::Range<usize> = 8..16;

/// The files below a folder, as a guest asks for them.
pub(crate) struct Server {
    fuse: Fuse<PassthroughFs>,
    memory: Memory,
    queue: Queue,
    asked: u16,
}

impl Server {
    /// A server of the folder `root`. `own_fds` is this process's `/proc/self/fd`, `files` how many it may have open,
    /// `cache` how long the guest may believe what it was told of names and attributes: somebody on the node may change
    /// any file at any time.
    pub fn new(root: &str, own_fds: File, files: u64, cache: Duration) -> io::Result<Server> {
        let config = Config {
            root_dir: root.to_owned(),
            proc_sfd_rawfd: Some(own_fds),
            entry_timeout: cache,
            attr_timeout: cache,
            cache_policy: CachePolicy::Auto,
            xattr: true,
            // Without it Linux asks for an attribute before each write.
            killpriv_v2: true,
            announce_submounts: true,
            readdirplus: true,
            guest_fd_limit: files.saturating_sub(OWN_FILES),
            ..Config::default()
        };
        let fuse = Fuse::new(PassthroughFs::new(config)?);
        let memory = Memory::from_ranges(&[(GuestAddress(0), END)]).map_err(io::Error::other)?;
        let mut queue = Queue::new(SIZE).map_err(io::Error::other)?;
        queue.set_size(SIZE);
        queue.try_set_desc_table_address(GuestAddress(DESCRIPTORS)).map_err(io::Error::other)?;
        queue.try_set_avail_ring_address(GuestAddress(AVAILABLE)).map_err(io::Error::other)?;
        queue.try_set_used_ring_address(GuestAddress(USED)).map_err(io::Error::other)?;
        queue.set_ready(true);
        Ok(Server { fuse, memory, queue, asked: 0 })
    }

    /// Appends the answer to a request, of at most `room` bytes; some have none.
    pub fn answer(&mut self, request: &[u8], room: usize, answer: &mut Vec<u8>) {
        let room = room.min(MAX_MESSAGE);
        if !names::stay(request) {
            tracing::warn!("the guest asks for a file by a name that leads out of its folder");
            return refuse(request, room, libc::EACCES, answer);
        }
        let start = answer.len();
        if let Err(error) = self.pass(request, room, answer) {
            tracing::debug!("a request of the guest makes no sense: {error}");
            answer.truncate(start);
            refuse(request, room, libc::EIO, answer);
        }
    }

    fn pass(&mut self, request: &[u8], room: usize, answer: &mut Vec<u8>) -> io::Result<()> {
        let bad = io::Error::other::<Box<dyn std::error::Error + Send + Sync>>;
        let length = u32::try_from(request.len()).ok().filter(|length| *length as usize <= MAX_MESSAGE);
        let length = length.ok_or(io::ErrorKind::InvalidInput)?;
        let memory = &self.memory;
        memory.write_slice(request, GuestAddress(REQUEST)).map_err(|error| bad(error.into()))?;
        let room = u32::try_from(room).unwrap_or(0);
        // An answer that an earlier one left there is none.
        let head = (room as usize).min(OUT_HEADER);
        memory
            .write_slice([0; OUT_HEADER].get(..head).unwrap_or_default(), GuestAddress(ANSWER))
            .map_err(|e| bad(e.into()))?;
        let chained = if room == 0 { 0 } else { NEXT };
        let descriptors = [Descriptor::new(REQUEST, length, chained, 1), Descriptor::new(ANSWER, room, WRITE, 0)];
        for (number, descriptor) in (0u64..).zip(descriptors) {
            memory.write_obj(descriptor, GuestAddress(DESCRIPTORS + 16 * number)).map_err(|error| bad(error.into()))?;
        }
        let slot = AVAILABLE + 4 + 2 * u64::from(self.asked % SIZE);
        self.asked = self.asked.wrapping_add(1);
        memory.write_obj(0u16, GuestAddress(slot)).map_err(|error| bad(error.into()))?;
        memory.write_obj(self.asked.to_le(), GuestAddress(AVAILABLE + 2)).map_err(|error| bad(error.into()))?;
        let chain = self.queue.pop_descriptor_chain(memory).ok_or(io::ErrorKind::InvalidData)?;
        let reader = Reader::new(memory, chain.clone()).map_err(|error| bad(error.into()))?;
        let writer = Writer::new(memory, chain).map_err(|error| bad(error.into()))?;
        let written = self.fuse.handle_message(reader, writer, None::<&mut ()>).map_err(|error| bad(error.into()))?;
        let start = answer.len();
        answer.resize(start + written.min(room as usize), 0);
        let bytes = answer.get_mut(start..).unwrap_or_default();
        memory.read_slice(bytes, GuestAddress(ANSWER)).map_err(|error| bad(error.into()))
    }
}

/// The answer that is an error, if there is room for one.
fn refuse(request: &[u8], room: usize, error: i32, answer: &mut Vec<u8>) {
    let Some(unique) = request.get(UNIQUE).filter(|_| room >= OUT_HEADER) else { return };
    answer.extend((OUT_HEADER as u32).to_le_bytes());
    answer.extend((-error).to_le_bytes());
    answer.extend(unique);
}
