//! Answers the FUSE requests of a guest with virtiofsd's file system. virtiofsd requires descriptors in guest memory, so
//! this process builds them in its own memory, which it presents as a part of the guest's. The checked beginning of each
//! request is copied there too, so that the guest cannot change it after the check.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use crate::mounts::Mounts;
use crate::names;
use crate::views::Views;
use nacelle_base::share::{MAX_MESSAGE, REPLY_HEADER};
use std::ffi::CString;
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use vhost_user_backend_of_virtiofsd::bitmap::BitmapMmapRegion as Bitmap;
use virtio_queue_of_virtiofsd::desc::split::Descriptor;
use virtio_queue_of_virtiofsd::{DescriptorChain, Queue, QueueT};
use virtiofsd::descriptor_utils::{Reader, Writer};
use virtiofsd::passthrough::{CachePolicy, Config, PassthroughFs};
use virtiofsd::server::Server as Fuse;
use vm_memory_of_virtiofsd::bitmap::BS;
use vm_memory_of_virtiofsd::{
    Bytes, GuestAddress, GuestMemoryMmap, GuestMemoryRegion, GuestRegionMmap, MemoryRegionAddress, MmapRegion,
    ReadVolatile, VolatileMemoryError, VolatileSlice, WriteVolatile,
};

/// Guest memory in virtiofsd's type.
pub(crate) type Memory = GuestMemoryMmap<Bitmap>;
/// A region of guest memory.
pub(crate) type Region = GuestRegionMmap<Bitmap>;

/// The guest address of this process's own memory, above all addresses that a guest can have: descriptor table and rings,
/// then a request, then a reply.
pub(crate) const OWN: u64 = 1 << 60;
const DESCRIPTORS: u64 = OWN;
const AVAILABLE: u64 = OWN + 0x2000;
const USED: u64 = OWN + 0x3000;
const REQUEST: u64 = OWN + 0x5000;
/// There is space before it for the header of a reply on a stream.
const ANSWER: u64 = REQUEST + MAX_MESSAGE as u64 + 0x10;
const BYTES: usize = 0x5000 + 2 * MAX_MESSAGE + 0x10;
/// The number of descriptors: the maximum number of buffers of a request.
pub(crate) const SIZE: u16 = 512;
/// `VIRTQ_DESC_F_NEXT`, `VIRTQ_DESC_F_WRITE`.
const NEXT: u16 = 1;
const WRITE: u16 = 2;
/// The number of descriptors that are reserved for other purposes than the guest's files.
const OWN_FILES: u64 = 64;
/// The length of `struct fuse_out_header`, and the offsets of a request's unique number and opcode.
const OUT_HEADER: usize = 16;
const UNIQUE: std::ops::Range<usize> = 8..16;
const OPCODE: std::ops::Range<usize> = 4..8;
/// `FUSE_WRITE`, and the length of what precedes its data: `struct fuse_in_header`, `struct fuse_write_in`.
const FUSE_WRITE: [u8; 4] = 16u32.to_le_bytes();
const WRITE_HEAD: usize = 40 + 40;
/// `FUSE_INIT`, the offset of both halves of its flags, and the flag of Nacelle's guest kernel
/// (guest/kernel/0009-fuse-device-submounts.patch), which mounts volumes that are not directories too.
const FUSE_INIT: [u8; 4] = 26u32.to_le_bytes();
const INIT_FLAGS: std::ops::Range<usize> = 52..60;
const DEVICE_SUBMOUNTS: u64 = 1 << 62;
/// `FUSE_OPEN` and `FUSE_CREATE`, and the offset of the open flags in both.
const FUSE_OPEN: [u8; 4] = 14u32.to_le_bytes();
const FUSE_CREATE: [u8; 4] = 35u32.to_le_bytes();
const OPEN_FLAGS: std::ops::Range<usize> = 40..44;
/// The length of `struct fuse_entry_out`, which precedes `struct fuse_open_out` in a reply to `FUSE_CREATE`; of the latter
/// the length, the offset of the flags, and `FOPEN_NOFLUSH`.
const ENTRY: u32 = 40 + 88;
const OPENED: u32 = 16;
const FLAGS_AT: u32 = 8;
const NO_FLUSH: u32 = 1 << 5;

/// The FUSE server of the files below a directory.
pub(crate) struct Server {
    fuse: Fuse<Views>,
    own: Arc<Region>,
    memory: Memory,
    queue: Queue,
    asked: u16,
    mounts: Arc<Mounts>,
    /// The guest's kernel mounts volumes that are not directories too.
    mounts_files: Arc<AtomicBool>,
    /// The copied beginning of a request; kept between requests to reuse its capacity.
    head: Vec<u8>,
}

/// `FUSE_FORGET`, `FUSE_RELEASE`, `FUSE_RELEASEDIR`, `FUSE_BATCH_FORGET`: in Nacelle's guests close() no longer waits for
/// their reply. (With another kernel it does wait, and then also for the next request if that has arrived already.)
const UNAWAITED: [[u8; 4]; 4] = [2u32.to_le_bytes(), 18u32.to_le_bytes(), 29u32.to_le_bytes(), 42u32.to_le_bytes()];

/// The result of a request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Answered {
    /// The length of the reply in bytes.
    pub bytes: u32,
    /// A process in the guest may wait for the reply.
    pub awaited: bool,
}

/// A buffer: address and length in bytes.
pub(crate) type Piece = (u64, u32);

impl Server {
    /// Creates a server of the directory `root`. `own_fds` is this process's `/proc/self/fd`, `files` the maximum number of
    /// open files, `cache` how long the guest may cache names and attributes: any process on the node may change any file
    /// at any time. `mounts` are this process's mounts.
    pub fn new(root: &str, own_fds: File, files: u64, cache: Duration, mounts: Arc<Mounts>) -> io::Result<Server> {
        let config = Config {
            root_dir: root.to_owned(),
            proc_sfd_rawfd: Some(own_fds.try_clone()?),
            entry_timeout: cache,
            attr_timeout: cache,
            cache_policy: CachePolicy::Auto,
            xattr: true,
            // Without this flag Linux requests an attribute before each write.
            killpriv_v2: true,
            announce_submounts: true,
            readdirplus: true,
            guest_fd_limit: files.saturating_sub(OWN_FILES),
            ..Config::default()
        };
        let mounts_files = Arc::new(AtomicBool::new(false));
        let views =
            Views::new(PassthroughFs::new(config)?, CString::new(root)?, own_fds, mounts.clone(), mounts_files.clone());
        let fuse = Fuse::new(views);
        let region = MmapRegion::new(BYTES).map_err(io::Error::other)?;
        let own = Arc::new(Region::new(region, GuestAddress(OWN)).ok_or(io::ErrorKind::OutOfMemory)?);
        let memory = Memory::from_arc_regions(vec![own.clone()]).map_err(io::Error::other)?;
        let mut queue = Queue::new(SIZE).map_err(io::Error::other)?;
        queue.set_size(SIZE);
        queue.try_set_desc_table_address(GuestAddress(DESCRIPTORS)).map_err(io::Error::other)?;
        queue.try_set_avail_ring_address(GuestAddress(AVAILABLE)).map_err(io::Error::other)?;
        queue.try_set_used_ring_address(GuestAddress(USED)).map_err(io::Error::other)?;
        queue.set_ready(true);
        Ok(Server { fuse, own, memory, queue, asked: 0, mounts, mounts_files, head: Vec::new() })
    }

    /// Returns this process's own memory, which must be added to the memory of a guest whose requests are served in place.
    pub fn own(&self) -> Arc<Region> {
        self.own.clone()
    }

    /// Reads a request of `length` bytes, at most [`MAX_MESSAGE`], from a stream, and writes the reply: its length as 32
    /// bits, at most `room`, then the reply; some requests have none. Only the checked beginning of the request is copied
    /// once more.
    pub fn answer(&mut self, stream: &mut UnixStream, length: usize, room: usize) -> io::Result<()> {
        let room = u32::try_from(room.min(MAX_MESSAGE)).unwrap_or(0);
        let memory = self.memory.clone();
        stream.read_exact_volatile(&mut self.place(REQUEST, length)?).map_err(stream_error)?;
        // Clears the header of the previous reply.
        memory.write_slice(&[0; OUT_HEADER], GuestAddress(ANSWER)).map_err(bad)?;
        let request = [(REQUEST, u32::try_from(length).unwrap_or(0))]; // all of it was read, so it is not longer than REQUEST
        let writable = [(ANSWER, room)];
        let writable = if room == 0 { &[] } else { writable.as_slice() };
        let mut head = std::mem::take(&mut self.head);
        head.clear();
        let looked_at =
            |length: usize, opcode: &[u8]| if opcode == FUSE_WRITE { length.min(WRITE_HEAD) } else { length };
        head.resize(length.min(OPCODE.end), 0);
        memory.read_slice(&mut head, GuestAddress(REQUEST)).map_err(bad)?;
        head.resize(looked_at(length, head.get(OPCODE).unwrap_or_default()), 0);
        memory.read_slice(&mut head, GuestAddress(REQUEST)).map_err(bad)?;
        let written = self.ask(&memory, &head, &request, writable).min(room);
        self.keep(head);
        let at = ANSWER - REPLY_HEADER as u64;
        memory.write_obj(written.to_le(), GuestAddress(at)).map_err(bad)?;
        stream.write_all_volatile(&self.place(at, REPLY_HEADER + written as usize)?).map_err(stream_error)
    }

    /// Returns a slice of this process's own memory.
    fn place(&self, at: u64, length: usize) -> io::Result<VolatileSlice<'_, BS<'_, Bitmap>>> {
        self.own.get_slice(MemoryRegionAddress(at - OWN), length).map_err(bad)
    }

    /// Answers a request that lies in `memory`, which includes [`own`](Server::own). The buffers are the guest's, which may
    /// change them at any time: whatever is checked is copied first; file data is not.
    pub fn answer_there(&mut self, memory: &Memory, readable: &[Piece], writable: &[Piece]) -> Answered {
        let mut head = std::mem::take(&mut self.head);
        let bytes = match lay(memory, readable, &mut head) {
            Ok(rest) => {
                let length = u32::try_from(head.len()).unwrap_or(0); // at most MAX_MESSAGE
                let mut readable = vec![(REQUEST, length)];
                readable.extend(rest);
                self.ask(memory, &head, &readable, writable)
            }
            Err(error) => {
                tracing::debug!("a request of the guest makes no sense: {error}");
                self.refuse(memory, &head, writable, libc::EIO).unwrap_or(0)
            }
        };
        let awaited = !head.get(OPCODE).is_some_and(|opcode| UNAWAITED.iter().any(|other| other == opcode));
        self.keep(head);
        Answered { bytes, awaited }
    }

    /// Keeps the buffer between requests only at a size that small requests need.
    fn keep(&mut self, mut head: Vec<u8>) {
        head.clear();
        head.shrink_to(64 << 10);
        self.head = head;
    }

    /// Passes a request to virtiofsd whose beginning, `head`, was checked and copied, so that the guest cannot change it.
    fn ask(&mut self, memory: &Memory, head: &[u8], readable: &[Piece], writable: &[Piece]) -> u32 {
        let error = if names::stay(head) {
            if head.get(OPCODE).is_some_and(|opcode| opcode == FUSE_INIT) {
                let flags = head.get(INIT_FLAGS).and_then(|bytes| bytes.try_into().ok()).map_or(0, u64::from_le_bytes);
                self.mounts_files.store(flags & DEVICE_SUBMOUNTS != 0, Ordering::Relaxed);
            }
            match self.pass(memory, readable, writable) {
                Ok(written) => {
                    self.spare_flush(memory, head, writable, written);
                    return written;
                }
                Err(error) => {
                    tracing::debug!("a request of the guest makes no sense: {error}");
                    libc::EIO
                }
            }
        } else {
            tracing::warn!("the guest asks for a file by a name that leads out of its directory");
            libc::EACCES
        };
        self.refuse(memory, head, writable, error).unwrap_or(0)
    }

    fn pass(&mut self, memory: &Memory, readable: &[Piece], writable: &[Piece]) -> io::Result<u32> {
        let chain = self.chain(memory, readable, writable)?;
        let reader = Reader::new(memory, chain.clone()).map_err(bad)?;
        let writer = Writer::new(memory, chain).map_err(bad)?;
        let written = self.fuse.handle_message(reader, writer, None::<&mut ()>).map_err(bad)?;
        let room = writable.iter().fold(0u32, |room, (_, length)| room.saturating_add(*length));
        Ok(u32::try_from(written).unwrap_or(u32::MAX).min(room))
    }

    /// Sets `FOPEN_NOFLUSH`, so that Linux sends no request when the file is closed: for files that were opened read-only,
    /// since nothing was written, and where closing does nothing on the node.
    fn spare_flush(&self, memory: &Memory, head: &[u8], writable: &[Piece], written: u32) {
        let before = match head.get(OPCODE) {
            Some(opcode) if opcode == FUSE_OPEN => OUT_HEADER as u32,
            Some(opcode) if opcode == FUSE_CREATE => OUT_HEADER as u32 + ENTRY,
            _ => return,
        };
        let flags = head.get(OPEN_FLAGS).and_then(|bytes| bytes.try_into().ok()).map(i32::from_le_bytes);
        let read_only = flags.is_some_and(|flags| flags & libc::O_ACCMODE == libc::O_RDONLY);
        if written != before + OPENED || !(read_only || self.mounts.need_no_flush()) {
            return;
        }
        let (flags_at, mut before) = (u64::from(before + FLAGS_AT), 0);
        for (address, length) in writable {
            let end = before + u64::from(*length);
            // Flags that are split over two buffers stay unchanged.
            if before <= flags_at && flags_at + size_of::<u32>() as u64 <= end {
                let at = GuestAddress(address.saturating_add(flags_at - before));
                let flags = memory.read_obj::<u32>(at).map(u32::from_le);
                let _ = flags.and_then(|flags| memory.write_obj((flags | NO_FLUSH).to_le(), at));
            }
            before = end;
        }
    }

    /// Writes an error reply, if the buffers have space for it.
    fn refuse(&mut self, memory: &Memory, head: &[u8], writable: &[Piece], error: i32) -> io::Result<u32> {
        let mut writer = Writer::new(memory, self.chain(memory, &[], writable)?).map_err(bad)?;
        let Some(unique) = head.get(UNIQUE).filter(|_| writer.available_bytes() >= OUT_HEADER) else { return Ok(0) };
        let answer = [(OUT_HEADER as u32).to_le_bytes().as_slice(), &(-error).to_le_bytes(), unique].concat();
        writer.write_all(&answer)?;
        Ok(OUT_HEADER as u32)
    }

    /// Builds a descriptor chain in the form that virtiofsd requires.
    fn chain<'m>(
        &mut self,
        memory: &'m Memory,
        readable: &[Piece],
        writable: &[Piece],
    ) -> io::Result<DescriptorChain<&'m Memory>> {
        let pieces = readable.iter().map(|piece| (piece, 0)).chain(writable.iter().map(|piece| (piece, WRITE)));
        let count = u16::try_from(readable.len() + writable.len()).ok().filter(|count| (1..=SIZE).contains(count));
        let count = count.ok_or(io::ErrorKind::InvalidInput)?;
        for (number, ((address, length), flags)) in (1..=count).zip(pieces) {
            let flags = if number == count { flags } else { flags | NEXT };
            let at = DESCRIPTORS + 16 * u64::from(number - 1);
            let descriptor = Descriptor::new(*address, *length, flags, number);
            memory.write_obj(descriptor, GuestAddress(at)).map_err(bad)?;
        }
        let slot = AVAILABLE + 4 + 2 * u64::from(self.asked % SIZE);
        self.asked = self.asked.wrapping_add(1);
        memory.write_obj(0u16, GuestAddress(slot)).map_err(bad)?;
        memory.write_obj(self.asked.to_le(), GuestAddress(AVAILABLE + 2)).map_err(bad)?;
        self.queue.pop_descriptor_chain(memory).ok_or_else(|| io::ErrorKind::InvalidData.into())
    }
}

/// Returns the stream's own error without the wrapper of vm-memory.
fn stream_error(error: VolatileMemoryError) -> io::Error {
    match error {
        VolatileMemoryError::IOError(error) => error,
        other => bad(other),
    }
}

fn bad(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::other(error)
}

/// Copies a request into `head` and from there into own memory, except for the data of a write; returns the buffers of that data.
fn lay(memory: &Memory, pieces: &[Piece], head: &mut Vec<u8>) -> io::Result<Vec<Piece>> {
    head.clear();
    let mut rest = Vec::new();
    for &(address, length) in pieces {
        let mut taken = 0;
        while taken < length {
            let limit = match head.get(OPCODE) {
                None => WRITE_HEAD,
                Some(opcode) if opcode == FUSE_WRITE => WRITE_HEAD,
                Some(_) => MAX_MESSAGE,
            };
            let room = limit.saturating_sub(head.len());
            if room == 0 {
                break;
            }
            let now = (length - taken).min(u32::try_from(room).unwrap_or(u32::MAX));
            let start = head.len();
            head.resize(start + now as usize, 0);
            let bytes = head.get_mut(start..).unwrap_or_default();
            memory.read_slice(bytes, GuestAddress(address.saturating_add(taken.into()))).map_err(bad)?;
            taken += now;
        }
        if taken < length {
            rest.push((address.saturating_add(taken.into()), length - taken));
        }
    }
    if !rest.is_empty() && head.get(OPCODE) != Some(&FUSE_WRITE) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is too long"));
    }
    memory.write_slice(head, GuestAddress(REQUEST)).map_err(bad)?;
    Ok(rest)
}
