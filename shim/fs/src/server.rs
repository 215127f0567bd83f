//! Answers the FUSE requests of a guest with virtiofsd's file system. virtiofsd requires descriptors in guest memory, so
//! this process builds them in its own memory, which it presents as a part of the guest's. The checked beginning of each
//! request is copied there too, so that the guest cannot change it after the check.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use crate::mounts::Mounts;
use crate::names;
use crate::views::Views;
use nacelle_base::guest_warn;
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
use virtiofsd::passthrough::{CachePolicy, Config, NegotiationMode, PassthroughFs};
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
pub(crate) const OWN_ADDRESS: u64 = 1 << 60;
const DESCRIPTORS: u64 = OWN_ADDRESS;
const AVAILABLE: u64 = OWN_ADDRESS + 0x2000;
const USED: u64 = OWN_ADDRESS + 0x3000;
const REQUEST: u64 = OWN_ADDRESS + 0x5000;
/// There is space before it for the header of a reply on a stream.
const REPLY: u64 = REQUEST + MAX_MESSAGE as u64 + 0x10;
const OWN_BYTES: usize = 0x5000 + 2 * MAX_MESSAGE + 0x10;
/// The number of descriptors: the maximum number of buffers of a request.
pub(crate) const QUEUE_SIZE: u16 = 512;
/// `VIRTQ_DESC_F_NEXT`, `VIRTQ_DESC_F_WRITE`.
const DESCRIPTOR_NEXT: u16 = 1;
const DESCRIPTOR_WRITE: u16 = 2;
/// The number of descriptors that are reserved for other purposes than the guest's files.
const RESERVED_FILES: u64 = 64;
/// The part of all open files that may be files without a name.
const NAMELESS_PART: u64 = 8;
/// The length of `struct fuse_out_header`, and the offsets of a request's unique number and opcode.
const OUT_HEADER: usize = 16;
const UNIQUE: std::ops::Range<usize> = 8..16;
const OPCODE: std::ops::Range<usize> = 4..8;
/// `FUSE_WRITE`, and the length of what precedes its data: `struct fuse_in_header`, `struct fuse_write_in`.
const FUSE_WRITE: [u8; 4] = 16u32.to_le_bytes();
const WRITE_HEAD: usize = 40 + 40;
/// `FUSE_READ`, and the position in the file in it and in `FUSE_WRITE`.
const FUSE_READ: [u8; 4] = 15u32.to_le_bytes();
const FILE_POSITION: std::ops::Range<usize> = 48..56;
/// `FUSE_INIT`, the offset of both halves of its flags, and the flag of Nacelle's guest kernel
/// (guest/kernel/0009-fuse-device-submounts.patch), which mounts volumes that are not directories too.
const FUSE_INIT: [u8; 4] = 26u32.to_le_bytes();
const INIT_FLAGS: std::ops::Range<usize> = 52..60;
const DEVICE_SUBMOUNTS: u64 = 1 << 62;
/// `FUSE_OPEN` and `FUSE_CREATE`, and the offset of the open flags in both.
const FUSE_OPEN: [u8; 4] = 14u32.to_le_bytes();
const FUSE_CREATE: [u8; 4] = 35u32.to_le_bytes();
const OPEN_FLAGS: std::ops::Range<usize> = 40..44;
/// `FUSE_TMPFILE`: a request as `FUSE_CREATE`, whose name means nothing. Its flags contain O_TMPFILE only if a program sent it: an overlay
/// of the guest's kernel leaves that out.
const FUSE_TMPFILE: [u8; 4] = 51u32.to_le_bytes();
/// The length of `struct fuse_entry_out`, which precedes `struct fuse_open_out` in a reply to `FUSE_CREATE`; of the latter
/// the length, the offset of the flags, and `FOPEN_NOFLUSH`.
const ENTRY_OUT: u32 = 40 + 88;
const OPEN_OUT: u32 = 16;
const OPEN_OUT_FLAGS: u32 = 8;
const FOPEN_NOFLUSH: u32 = 1 << 5;

/// The FUSE server of the files below a directory.
pub(crate) struct Server {
    fuse: Fuse<Views>,
    own_region: Arc<Region>,
    memory: Memory,
    queue: Queue,
    request_count: u16,
    mounts: Arc<Mounts>,
    /// The guest's kernel mounts volumes that are not directories too.
    supports_file_submounts: Arc<AtomicBool>,
    /// The copied beginning of a request; kept between requests to reuse its capacity.
    head: Vec<u8>,
}

/// `FUSE_FORGET`, `FUSE_RELEASE`, `FUSE_RELEASEDIR`, `FUSE_BATCH_FORGET`: in Nacelle's guests close() no longer waits for
/// their reply. (With another kernel it does wait, and then also for the next request if that has arrived already.)
const WITHOUT_WAITER: [[u8; 4]; 4] =
    [2u32.to_le_bytes(), 18u32.to_le_bytes(), 29u32.to_le_bytes(), 42u32.to_le_bytes()];

/// `FUSE_FORGET`, `FUSE_BATCH_FORGET`: they have no reply.
const WITHOUT_REPLY: [[u8; 4]; 2] = [2u32.to_le_bytes(), 42u32.to_le_bytes()];

/// The completion of a request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Completion {
    /// The length of the reply in bytes.
    pub bytes: u32,
    /// A process in the guest may wait for the reply.
    pub awaited: bool,
}

/// A buffer: address and length in bytes.
pub(crate) type Buffer = (u64, u32);

impl Server {
    /// Creates a server of the directory `root`. `own_fds` is this process's `/proc/self/fd`, `files` the maximum number of
    /// open files, `cache` how long the guest may cache names and attributes: any process on the node may change any file
    /// at any time. `mounts` are this process's mounts.
    pub fn new(root: &str, own_fds: File, files: u64, cache: Duration, mounts: Arc<Mounts>) -> io::Result<Server> {
        let max_nameless = files / NAMELESS_PART;
        let config = Config {
            root_dir: root.to_owned(),
            proc_sfd_rawfd: Some(own_fds.try_clone()?),
            entry_timeout: cache,
            attr_timeout: cache,
            cache_policy: CachePolicy::Auto,
            xattr: true,
            // The guest's kernel checks the ACLs too. A kernel without them works as before.
            posix_acl: NegotiationMode::Auto,
            // Without this flag Linux requests an attribute before each write.
            killpriv_v2: true,
            announce_submounts: true,
            readdirplus: true,
            guest_fd_limit: (files - max_nameless).saturating_sub(RESERVED_FILES),
            ..Config::default()
        };
        let supports_file_submounts = Arc::new(AtomicBool::new(false));
        let views = Views::new(
            PassthroughFs::new(config)?,
            CString::new(root)?,
            own_fds,
            mounts.clone(),
            supports_file_submounts.clone(),
            cache,
            usize::try_from(max_nameless).unwrap_or(usize::MAX),
        );
        let fuse = Fuse::new(views);
        let region = MmapRegion::new(OWN_BYTES).map_err(io::Error::other)?;
        let own_region = Arc::new(Region::new(region, GuestAddress(OWN_ADDRESS)).ok_or(io::ErrorKind::OutOfMemory)?);
        let memory = Memory::from_arc_regions(vec![own_region.clone()]).map_err(io::Error::other)?;
        let mut queue = Queue::new(QUEUE_SIZE).map_err(io::Error::other)?;
        queue.set_size(QUEUE_SIZE);
        queue.try_set_desc_table_address(GuestAddress(DESCRIPTORS)).map_err(io::Error::other)?;
        queue.try_set_avail_ring_address(GuestAddress(AVAILABLE)).map_err(io::Error::other)?;
        queue.try_set_used_ring_address(GuestAddress(USED)).map_err(io::Error::other)?;
        queue.set_ready(true);
        Ok(Server {
            fuse,
            own_region,
            memory,
            queue,
            request_count: 0,
            mounts,
            supports_file_submounts,
            head: Vec::new(),
        })
    }

    /// Returns this process's own memory, which must be added to the memory of a guest whose requests are served in place.
    pub fn own_region(&self) -> Arc<Region> {
        self.own_region.clone()
    }

    /// Reads a request of `length` bytes, at most [`MAX_MESSAGE`], from a stream, and writes the reply: its length as 32
    /// bits, at most `capacity`, then the reply; some requests have none. Only the checked beginning of the request is copied
    /// once more.
    pub fn serve_stream_request(&mut self, stream: &mut UnixStream, length: usize, capacity: usize) -> io::Result<()> {
        let capacity = u32::try_from(capacity.min(MAX_MESSAGE)).unwrap_or(0);
        let memory = self.memory.clone();
        stream.read_exact_volatile(&mut self.own_slice(REQUEST, length)?).map_err(stream_error)?;
        // Clears the header of the previous reply.
        memory.write_slice(&[0; OUT_HEADER], GuestAddress(REPLY)).map_err(other_error)?;
        let request = [(REQUEST, u32::try_from(length).unwrap_or(0))]; // all of it was read, so it is not longer than REQUEST
        let writable = [(REPLY, capacity)];
        let writable = if capacity == 0 { &[] } else { writable.as_slice() };
        let mut head = std::mem::take(&mut self.head);
        head.clear();
        let checked_length =
            |length: usize, opcode: &[u8]| if opcode == FUSE_WRITE { length.min(WRITE_HEAD) } else { length };
        head.resize(length.min(OPCODE.end), 0);
        memory.read_slice(&mut head, GuestAddress(REQUEST)).map_err(other_error)?;
        head.resize(checked_length(length, head.get(OPCODE).unwrap_or_default()), 0);
        memory.read_slice(&mut head, GuestAddress(REQUEST)).map_err(other_error)?;
        let written = self.handle_request(&memory, &head, &request, writable).min(capacity);
        self.recycle_head(head);
        let at = REPLY - REPLY_HEADER as u64;
        memory.write_obj(written.to_le(), GuestAddress(at)).map_err(other_error)?;
        stream.write_all_volatile(&self.own_slice(at, REPLY_HEADER + written as usize)?).map_err(stream_error)
    }

    /// Returns a slice of this process's own memory.
    fn own_slice(&self, at: u64, length: usize) -> io::Result<VolatileSlice<'_, BS<'_, Bitmap>>> {
        self.own_region.get_slice(MemoryRegionAddress(at - OWN_ADDRESS), length).map_err(other_error)
    }

    /// Answers a request that lies in `memory`, which includes [`own_region`](Server::own_region). The buffers are the guest's, which may
    /// change them at any time: whatever is checked is copied first; file data is not.
    pub fn serve_in_place(&mut self, memory: &Memory, readable: &[Buffer], writable: &[Buffer]) -> Completion {
        let mut head = std::mem::take(&mut self.head);
        let bytes = match copy_request_head(memory, readable, &mut head) {
            Ok(rest) => {
                let length = u32::try_from(head.len()).unwrap_or(0); // at most MAX_MESSAGE
                let mut readable = vec![(REQUEST, length)];
                readable.extend(rest);
                self.handle_request(memory, &head, &readable, writable)
            }
            Err(error) => {
                tracing::debug!("the guest sent an invalid file request: {error}");
                self.write_error(memory, &head, writable, libc::EIO).unwrap_or(0)
            }
        };
        let awaited = !head.get(OPCODE).is_some_and(|opcode| WITHOUT_WAITER.iter().any(|other| other == opcode));
        self.recycle_head(head);
        Completion { bytes, awaited }
    }

    /// Keeps the buffer between requests only at a size that small requests need.
    fn recycle_head(&mut self, mut head: Vec<u8>) {
        head.clear();
        head.shrink_to(64 << 10);
        self.head = head;
    }

    /// Passes a request to virtiofsd whose beginning, `head`, was checked and copied, so that the guest cannot change it.
    fn handle_request(&mut self, memory: &Memory, head: &[u8], readable: &[Buffer], writable: &[Buffer]) -> u32 {
        self.mounts.expire();
        let error = if !has_possible_position(head) {
            tracing::debug!("the guest sent an invalid file request: no file has this position");
            libc::EINVAL
        } else if names::are_plain(head) {
            if head.get(OPCODE).is_some_and(|opcode| opcode == FUSE_INIT) {
                let flags = head.get(INIT_FLAGS).and_then(|bytes| bytes.try_into().ok()).map_or(0, u64::from_le_bytes);
                self.supports_file_submounts.store(flags & DEVICE_SUBMOUNTS != 0, Ordering::Relaxed);
            }
            match self.rewrite(memory, head).and_then(|()| self.forward(memory, head, readable, writable)) {
                Ok(written) => {
                    self.skip_flush(memory, head, writable, written);
                    return written;
                }
                Err(error) => {
                    tracing::debug!("the guest sent an invalid file request: {error}");
                    libc::EIO
                }
            }
        } else {
            guest_warn!("rejected a file request of the guest: its name leads out of the directory");
            libc::EACCES
        };
        self.write_error(memory, head, writable, error).unwrap_or(0)
    }

    /// Turns FUSE_TMPFILE, which virtiofsd does not answer, into FUSE_CREATE with O_TMPFILE, which [`Views`] do. Fails for a request that
    /// has no flags.
    fn rewrite(&self, memory: &Memory, head: &[u8]) -> io::Result<()> {
        if !is_opcode(head, FUSE_TMPFILE) {
            return Ok(());
        }
        let flags = head.get(OPEN_FLAGS).and_then(|bytes| bytes.try_into().ok()).map(u32::from_le_bytes);
        let flags = flags.ok_or(io::ErrorKind::InvalidInput)? | libc::O_TMPFILE as u32;
        memory
            .write_slice(&flags.to_le_bytes(), GuestAddress(REQUEST + OPEN_FLAGS.start as u64))
            .map_err(other_error)?;
        memory.write_slice(&FUSE_CREATE, GuestAddress(REQUEST + OPCODE.start as u64)).map_err(other_error)
    }

    fn forward(&mut self, memory: &Memory, head: &[u8], readable: &[Buffer], writable: &[Buffer]) -> io::Result<u32> {
        let capacity = writable.iter().fold(0u32, |sum, (_, length)| sum.saturating_add(*length));
        let has_reply = !head.get(OPCODE).is_some_and(|opcode| WITHOUT_REPLY.iter().any(|other| other == opcode));
        if has_reply && (capacity as usize) < OUT_HEADER {
            // virtiofsd would panic.
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "there is no space for the header of the reply"));
        }
        let chain = self.build_chain(memory, readable, writable)?;
        let reader = Reader::new(memory, chain.clone()).map_err(other_error)?;
        let writer = Writer::new(memory, chain).map_err(other_error)?;
        let written = self.fuse.handle_message(reader, writer, None::<&mut ()>).map_err(other_error)?;
        Ok(u32::try_from(written).unwrap_or(u32::MAX).min(capacity))
    }

    /// Sets `FOPEN_NOFLUSH`, so that Linux sends no request when the file is closed: for files that were opened read-only,
    /// since nothing was written, and where closing does nothing on the node.
    fn skip_flush(&self, memory: &Memory, head: &[u8], writable: &[Buffer], written: u32) {
        let before = match head.get(OPCODE) {
            Some(opcode) if opcode == FUSE_OPEN => OUT_HEADER as u32,
            Some(opcode) if opcode == FUSE_CREATE || opcode == FUSE_TMPFILE => OUT_HEADER as u32 + ENTRY_OUT,
            _ => return,
        };
        let flags = head.get(OPEN_FLAGS).and_then(|bytes| bytes.try_into().ok()).map(i32::from_le_bytes);
        let read_only = flags.is_some_and(|flags| flags & libc::O_ACCMODE == libc::O_RDONLY);
        if written != before + OPEN_OUT || !(read_only || self.mounts.is_flush_needless()) {
            return;
        }
        let (flags_at, mut before) = (u64::from(before + OPEN_OUT_FLAGS), 0);
        for (address, length) in writable {
            let end = before + u64::from(*length);
            // Flags that are split over two buffers stay unchanged.
            if before <= flags_at && flags_at + size_of::<u32>() as u64 <= end {
                let at = GuestAddress(address.saturating_add(flags_at - before));
                let flags = memory.read_obj::<u32>(at).map(u32::from_le);
                let _ = flags.and_then(|flags| memory.write_obj((flags | FOPEN_NOFLUSH).to_le(), at));
            }
            before = end;
        }
    }

    /// Writes an error reply, if the buffers have space for it.
    fn write_error(&mut self, memory: &Memory, head: &[u8], writable: &[Buffer], error: i32) -> io::Result<u32> {
        let mut writer = Writer::new(memory, self.build_chain(memory, &[], writable)?).map_err(other_error)?;
        let Some(unique) = head.get(UNIQUE).filter(|_| writer.available_bytes() >= OUT_HEADER) else { return Ok(0) };
        let reply = [(OUT_HEADER as u32).to_le_bytes().as_slice(), &(-error).to_le_bytes(), unique].concat();
        writer.write_all(&reply)?;
        Ok(OUT_HEADER as u32)
    }

    /// Builds a descriptor chain in the form that virtiofsd requires.
    fn build_chain<'m>(
        &mut self,
        memory: &'m Memory,
        readable: &[Buffer],
        writable: &[Buffer],
    ) -> io::Result<DescriptorChain<&'m Memory>> {
        let buffers =
            readable.iter().map(|buffer| (buffer, 0)).chain(writable.iter().map(|buffer| (buffer, DESCRIPTOR_WRITE)));
        let count =
            u16::try_from(readable.len() + writable.len()).ok().filter(|count| (1..=QUEUE_SIZE).contains(count));
        let count = count.ok_or(io::ErrorKind::InvalidInput)?;
        for (number, ((address, length), flags)) in (1..=count).zip(buffers) {
            let flags = if number == count { flags } else { flags | DESCRIPTOR_NEXT };
            let at = DESCRIPTORS + 16 * u64::from(number - 1);
            let descriptor = Descriptor::new(*address, *length, flags, number);
            memory.write_obj(descriptor, GuestAddress(at)).map_err(other_error)?;
        }
        let slot = AVAILABLE + 4 + 2 * u64::from(self.request_count % QUEUE_SIZE);
        self.request_count = self.request_count.wrapping_add(1);
        memory.write_obj(0u16, GuestAddress(slot)).map_err(other_error)?;
        memory.write_obj(self.request_count.to_le(), GuestAddress(AVAILABLE + 2)).map_err(other_error)?;
        self.queue.pop_descriptor_chain(memory).ok_or_else(|| io::ErrorKind::InvalidData.into())
    }
}

/// Returns whether a request has an opcode.
fn is_opcode(head: &[u8], opcode: [u8; 4]) -> bool {
    head.get(OPCODE).is_some_and(|found| found == opcode)
}

/// Returns whether a request to read or write begins and ends at positions that a file can have; virtiofsd panics otherwise. Other
/// requests pass.
fn has_possible_position(head: &[u8]) -> bool {
    if !head.get(OPCODE).is_some_and(|opcode| [FUSE_READ, FUSE_WRITE].iter().any(|known| known == opcode)) {
        return true;
    }
    let position = head.get(FILE_POSITION).and_then(|bytes| bytes.try_into().ok()).map_or(0, u64::from_le_bytes);
    position.checked_add(MAX_MESSAGE as u64).is_some_and(|end| i64::try_from(end).is_ok())
}

/// Returns the stream's own error without the wrapper of vm-memory.
fn stream_error(error: VolatileMemoryError) -> io::Error {
    match error {
        VolatileMemoryError::IOError(error) => error,
        other => other_error(other),
    }
}

fn other_error(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::other(error)
}

/// Copies a request into `head` and from there into own memory, except for the data of a write; returns the buffers of that data.
fn copy_request_head(memory: &Memory, buffers: &[Buffer], head: &mut Vec<u8>) -> io::Result<Vec<Buffer>> {
    head.clear();
    let mut rest = Vec::new();
    for &(address, length) in buffers {
        let mut copied = 0;
        while copied < length {
            let limit = match head.get(OPCODE) {
                None => WRITE_HEAD,
                Some(opcode) if opcode == FUSE_WRITE => WRITE_HEAD,
                Some(_) => MAX_MESSAGE,
            };
            let remaining = limit.saturating_sub(head.len());
            if remaining == 0 {
                break;
            }
            let count = (length - copied).min(u32::try_from(remaining).unwrap_or(u32::MAX));
            let start = head.len();
            head.resize(start + count as usize, 0);
            let bytes = head.get_mut(start..).unwrap_or_default();
            memory.read_slice(bytes, GuestAddress(address.saturating_add(copied.into()))).map_err(other_error)?;
            copied += count;
        }
        if copied < length {
            rest.push((address.saturating_add(copied.into()), length - copied));
        }
    }
    if !rest.is_empty() && head.get(OPCODE) != Some(&FUSE_WRITE) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "the request is too long"));
    }
    memory.write_slice(head, GuestAddress(REQUEST)).map_err(other_error)?;
    Ok(rest)
}
