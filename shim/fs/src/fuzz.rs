//! Defines the fuzz harnesses for the file requests of a guest, over a stream and over a shared virtqueue. ci/fuzz calls them; the tests
//! run the committed corpus (`tests/corpus/TARGET/*`). A harness fails by a panic, by access to anything outside of the shared
//! directory, or by memory that does not follow from the requests.
//!
//! The server runs in the harness's process, without the jail of `nacelle-fs`, whose root directory contains nothing else.

use crate::mounts::Mounts;
use crate::server::Server;
use crate::virtqueue::ServedVirtqueue;
use nacelle_base::allocations::AllocationLimit;
use nacelle_base::retry::retry_interrupted;
use nacelle_base::share::{SharedRegion, SharedVirtqueue};
use nix::fcntl::{FcntlArg, OFlag, SealFlag, fcntl, open};
use nix::sched::{CloneFlags, unshare};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::stat::Mode;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, MetadataExt, symlink};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// The cost of one input. virtiofsd reads a directory into a buffer whose size the guest requests, at most 1 MiB, and the mount table of
/// the node is read anew for each server.
const LIMIT: AllocationLimit = AllocationLimit { base: 3 << 20, per_byte: 256, base_count: 20_000, count_per_byte: 20 };
/// The name of the file outside of the shared directory, which is also its content.
const SECRET: &[u8; 12] = b"Qz7!outside~";
/// The first request of a guest's kernel (`FUSE_INIT`): version 7.38 with all flags of Linux 6.12.
const INIT: (u32, [u32; 4]) = (26, [7, 38, 1 << 20, 0x3fff_ffff]);
/// The length of `struct fuse_in_header`, and the offset of the opcode.
const IN_HEADER: usize = 40;
const OPCODE: std::ops::Range<usize> = 4..8;
/// `FUSE_FALLOCATE` and `FUSE_COPY_FILE_RANGE`, and the offsets of their lengths: what they write does not come from the request.
const WITH_LENGTH: [(u32, std::ops::Range<usize>); 2] = [(43, 56..64), (47, 80..88)];
/// The guest's memory in bytes, and the addresses of the rings in it; the descriptor table is at address 0.
const MEMORY: u64 = 1 << 16;
const QUEUE_SIZE: u16 = 16;
const AVAILABLE: u64 = 0x100;
const USED: u64 = 0x200;

/// A shared directory, beside a directory that no request may reach.
struct SharedDirectory {
    outer: tempfile::TempDir,
    server: Server,
    /// Numbers that any access to the directory outside changes.
    before: Vec<i64>,
}

impl SharedDirectory {
    fn new() -> SharedDirectory {
        // virtiofsd changes the working directory for some requests. Fails only where a thread's cannot be its own.
        unshare(CloneFlags::CLONE_FS).expect("a working directory of its own");
        // In memory, where syncing takes no time.
        let outer = tempfile::tempdir_in(if fs::exists("/dev/shm").unwrap_or(false) { "/dev/shm" } else { "/tmp" });
        let outer = outer.expect("a temporary directory");
        let (shared, hidden) = (outer.path().join("shared"), outer.path().join("hidden"));
        let name = std::str::from_utf8(SECRET).expect("it is text");
        let created = fs::create_dir_all(shared.join("directory"))
            .and_then(|()| fs::create_dir(&hidden))
            .and_then(|()| fs::write(hidden.join(name), SECRET))
            .and_then(|()| fs::write(shared.join("file"), "hello"))
            .and_then(|()| fs::write(shared.join("directory/inner"), "world"))
            .and_then(|()| symlink("../hidden", shared.join("link")))
            .and_then(|()| symlink(&hidden, shared.join("directory/absolute")));
        created.expect("the directory is writable");
        let path = |path| retry_interrupted(|| open(path, OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty()));
        let own_fds = path("/proc/self/fd").expect("proc is mounted");
        let mounts = Mounts::new(path("/proc/self").expect("proc is mounted")).expect("a mount table");
        let root = shared.to_str().expect("it is text");
        let server = Server::new(root, own_fds.into(), 1024, Duration::ZERO, Arc::new(mounts)).expect("a server");
        let mut directory = SharedDirectory { outer, server, before: Vec::new() };
        directory.before = directory.outside();
        let (opcode, body) = INIT;
        let header = [(IN_HEADER + 16) as u32, opcode, 1, 0, 1, 0, 0, 0, 0, 0];
        let init: Vec<u8> = header.into_iter().chain(body).flat_map(u32::to_le_bytes).collect();
        assert!(!directory.request(&init, 1 << 12).is_empty(), "the server has not started");
        directory
    }

    fn hidden(&self) -> PathBuf {
        self.outer.path().join("hidden")
    }

    /// Sends a request over a stream, and returns the reply.
    fn request(&mut self, request: &[u8], capacity: usize) -> Vec<u8> {
        let (mut near, mut far) = UnixStream::pair().expect("a pair of streams");
        near.write_all(request).expect("the request fits into the socket's buffer");
        // A reply that does not fit would block.
        far.set_write_timeout(Some(Duration::from_secs(5))).expect("the time is valid");
        if self.server.serve_stream_request(&mut far, request.len(), capacity).is_err() {
            return Vec::new();
        }
        drop(far);
        let mut reply = Vec::with_capacity(capacity + 4);
        near.read_to_end(&mut reply).expect("the other end is closed");
        assert!((4..=capacity + 4).contains(&reply.len()), "{} of {capacity}", reply.len());
        reply.split_off(4)
    }

    /// Returns sizes, owners, permissions and times of what lies outside of the shared directory.
    fn outside(&self) -> Vec<i64> {
        let names = fs::read_dir(self.hidden()).expect("it is there");
        let files = names.map(|name| name.expect("it can be read").path());
        let all = [self.hidden()].into_iter().chain(files).flat_map(|path| {
            let status = fs::symlink_metadata(path).expect("it is there");
            let numbers = [status.ino(), status.nlink(), status.len(), status.mode().into(), status.uid().into()];
            let times = [status.mtime(), status.mtime_nsec(), status.ctime(), status.ctime_nsec()];
            numbers.map(u64::cast_signed).into_iter().chain(times)
        });
        let mut all: Vec<_> = all.collect();
        let names = fs::read_dir(self.outer.path()).expect("it is there");
        all.push(names.count().try_into().expect("a few"));
        all
    }

    /// Fails if the bytes that the guest has received, or the files outside, show an access.
    fn assert_contained(&self, received: &[u8]) {
        assert!(!received.windows(SECRET.len()).any(|part| part == SECRET), "the guest has read a file outside");
        assert_eq!(self.outside(), self.before, "the guest has changed a file outside");
    }
}

/// Returns whether an input has a part of the secret itself.
fn knows_secret(data: &[u8]) -> bool {
    data.windows(4).any(|part| SECRET.windows(4).any(|secret| part == secret))
}

/// Sends requests over a stream: each is the length of the request and an eighth of the space for its reply, two bytes each, and the
/// request.
pub fn fuse(data: &[u8]) {
    if knows_secret(data) {
        return;
    }
    let mut directory = SharedDirectory::new();
    let mut rest = data;
    let mut received = Vec::with_capacity(1 << 20);
    LIMIT.enforce(data.len(), || {
        while let Some((head, after)) = rest.split_first_chunk::<4>() {
            let [length, capacity] = [[head[0], head[1]], [head[2], head[3]]].map(u16::from_le_bytes).map(usize::from);
            let (request, after) = after.split_at(length.min(after.len()));
            rest = after;
            let mut request = request.to_vec();
            shorten(&mut request);
            let reply = directory.request(&request, capacity % 0x1000 * 8);
            if received.len() + reply.len() <= received.capacity() {
                received.extend_from_slice(&reply);
            }
        }
    });
    directory.assert_contained(&received);
}

/// Reduces the length of a request that writes as much as it says: it would fill the memory of the node, which is not what is tested.
fn shorten(request: &mut [u8]) {
    let opcode = request.get(OPCODE).and_then(|bytes| bytes.try_into().ok()).map(u32::from_le_bytes);
    let length = WITH_LENGTH.iter().find(|(known, _)| Some(*known) == opcode).map(|(_, length)| length.clone());
    if let Some(high) = length.and_then(|length| request.get_mut(length.start + 2..length.end)) {
        high.fill(0);
    }
}

/// Sets the beginning of a guest's memory, in which all of a virtqueue lies, and serves the virtqueue.
pub fn fuse_queue(data: &[u8]) {
    // Such a request cannot be shortened: it lies anywhere.
    let writes = |part: &[u8]| WITH_LENGTH.iter().any(|(opcode, _)| part == opcode.to_le_bytes());
    if knows_secret(data) || data.windows(4).any(writes) {
        return;
    }
    let mut directory = SharedDirectory::new();
    let memory = memfd_create("guest", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING).map(File::from);
    let memory = memory.expect("the kernel has memory files");
    memory.set_len(MEMORY).expect("it can grow");
    fcntl(&memory, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_SHRINK)).expect("it can be sealed");
    memory.write_all_at(data.get(..MEMORY as usize).unwrap_or(data), 0).expect("there is space");
    let shared = SharedVirtqueue {
        size: QUEUE_SIZE,
        event_idx: data.first().is_some_and(|first| first & 1 == 1),
        next_avail: 0,
        descriptors: 0,
        available: AVAILABLE,
        used: USED,
        regions: vec![SharedRegion { address: 0, length: MEMORY, offset: 0 }],
    };
    let eventfd = || OwnedFd::from(EventFd::from_flags(EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC).expect("one"));
    let fds = vec![eventfd(), eventfd(), memory.try_clone().expect("a copy").into()];
    LIMIT.enforce(data.len(), || {
        let own_region = directory.server.own_region();
        let mut virtqueue = ServedVirtqueue::new(&shared, fds, own_region).expect("the virtqueue is valid");
        // A guest that writes into its own rings may never end.
        for _ in 0..4 {
            if !virtqueue.serve(&mut directory.server) {
                break;
            }
        }
    });
    let mut received = vec![0; MEMORY as usize];
    memory.read_exact_at(&mut received, 0).expect("it has the same length");
    directory.assert_contained(&received);
}

/// A fuzz harness.
pub type Target = fn(&[u8]);

/// All harnesses by the names of their corpora.
pub const TARGETS: [(&str, Target); 2] = [("fuse", fuse), ("fuse_queue", fuse_queue)];

#[cfg(test)]
mod tests {
    use super::*;
    use nacelle_base::allocations::CountingAllocator;
    use nacelle_base::corpus::{run_corpora, run_mutated_corpora};

    #[global_allocator]
    static ALLOCATOR: CountingAllocator = CountingAllocator;

    #[test]
    fn the_corpus() {
        run_corpora(env!("CARGO_MANIFEST_DIR"), &TARGETS);
    }

    #[test]
    fn the_mutated_corpus() {
        run_mutated_corpora(env!("CARGO_MANIFEST_DIR"), &TARGETS, 256);
    }

    #[test]
    fn an_access_outside_is_noticed() {
        let directory = SharedDirectory::new();
        directory.assert_contained(b"hello");
        let failed = |work: &dyn Fn()| std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).is_err();
        assert!(failed(&|| directory.assert_contained(&[b"hello", SECRET.as_slice()].concat())));
        fs::write(directory.hidden().join("new"), "").unwrap();
        assert!(failed(&|| directory.assert_contained(b"hello")));
    }
}
