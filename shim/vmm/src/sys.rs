//! Wraps the system calls that take raw pointers or raw descriptors.
#![allow(unsafe_code, reason = "guest memory is given to the kernel by address; received descriptors are raw numbers")]

use nacelle_base::retry::retry_interrupted;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use vm_memory::{GuestMemoryRegion, GuestRegionMmap, MemoryRegionAddress, VolatileSlice};
use vmm_sys_util::eventfd::EventFd;

/// The maximum number of pieces in one system call (IOV_MAX).
const MAX_IOVECS: usize = 1024;

/// The system call that moves bytes between a descriptor and guest memory.
#[derive(Clone, Copy)]
enum Transfer {
    ReadAt(u64),
    ReadCached(u64),
    WriteAt(u64),
    Read,
    Write,
    Send,
}

/// Performs one transfer between `fd` and the first [`MAX_IOVECS`] of `slices`, repeated while signals interrupt it. Returns
/// the number of bytes moved.
fn transfer_once(fd: RawFd, slices: &[VolatileSlice<'_>], transfer_kind: Transfer) -> io::Result<usize> {
    let slices = slices.get(..MAX_IOVECS).unwrap_or(slices);
    let guards: Vec<_> = slices.iter().map(|slice| slice.ptr_guard_mut()).collect();
    let mut iovecs: Vec<libc::iovec> =
        guards.iter().map(|guard| libc::iovec { iov_base: guard.as_ptr().cast(), iov_len: guard.len() }).collect();
    let offset = |at: u64| libc::off64_t::try_from(at).map_err(|_why| io::Error::from(io::ErrorKind::InvalidInput));
    let count = iovecs.len() as libc::c_int; // at most MAX_IOVECS
    let at = match transfer_kind {
        Transfer::ReadAt(at) | Transfer::ReadCached(at) | Transfer::WriteAt(at) => offset(at)?,
        Transfer::Read | Transfer::Write | Transfer::Send => 0,
    };
    retry_interrupted(|| {
        let moved = match transfer_kind {
            Transfer::ReadAt(_) => {
                // SAFETY: each iovec lies in a mapping that `guards` keep alive; the kernel writes only there.
                unsafe { libc::preadv64(fd, iovecs.as_ptr(), count, at) }
            }
            Transfer::ReadCached(_) => {
                // SAFETY: each iovec lies in a mapping that `guards` keep alive; the kernel writes only there.
                unsafe { libc::preadv64v2(fd, iovecs.as_ptr(), count, at, libc::RWF_NOWAIT) }
            }
            Transfer::WriteAt(_) => {
                // SAFETY: each iovec lies in a mapping that `guards` keep alive; the kernel only reads it.
                unsafe { libc::pwritev64(fd, iovecs.as_ptr(), count, at) }
            }
            // SAFETY: each iovec lies in a mapping that `guards` keep alive; the kernel writes only there.
            Transfer::Read => unsafe { libc::readv(fd, iovecs.as_ptr(), count) },
            // SAFETY: each iovec lies in a mapping that `guards` keep alive; the kernel only reads it.
            Transfer::Write => unsafe { libc::writev(fd, iovecs.as_ptr(), count) },
            Transfer::Send => {
                // SAFETY: an all-zero msghdr is a valid empty one.
                let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
                message.msg_iov = iovecs.as_mut_ptr();
                message.msg_iovlen = iovecs.len();
                // SAFETY: `message` points to iovecs in mappings that `guards` keep alive; the kernel only reads them.
                unsafe { libc::sendmsg(fd, &message, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT) }
            }
        };
        usize::try_from(moved).map_err(|_why| io::Error::last_os_error())
    })
}

/// Moves all bytes of `slices`, continuing after signals and short transfers.
fn transfer_all(file: &File, mut slices: Vec<VolatileSlice<'_>>, mut at: u64, write: bool) -> io::Result<()> {
    let mut rest = slices.as_mut_slice();
    while let Some(first) = rest.first() {
        if first.is_empty() {
            rest = rest.get_mut(1..).unwrap_or_default();
            continue;
        }
        let transfer_kind = if write { Transfer::WriteAt(at) } else { Transfer::ReadAt(at) };
        let moved = match transfer_once(file.as_raw_fd(), rest, transfer_kind) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(moved) => moved,
            Err(error) => return Err(error),
        };
        at = at.checked_add(moved as u64).ok_or(io::ErrorKind::InvalidInput)?;
        let mut left = moved;
        let mut done = 0;
        for slice in rest.iter_mut() {
            if left < slice.len() {
                *slice = slice.offset(left).map_err(io::Error::other)?;
                break;
            }
            left -= slice.len();
            done += 1;
        }
        rest = rest.get_mut(done..).unwrap_or_default();
    }
    Ok(())
}

/// Fills guest memory from byte `at` of a file. Fails with an error if the file ends earlier.
pub(crate) fn read_at(file: &File, slices: Vec<VolatileSlice<'_>>, at: u64) -> io::Result<()> {
    transfer_all(file, slices, at, false)
}

/// Like [`read_at`], but only if all the bytes are in the page cache. Fails with `WouldBlock` if they are not (Linux then
/// starts to read them), or with EOPNOTSUPP if the file system does not support the check.
pub(crate) fn read_cached(file: &File, slices: &[VolatileSlice<'_>], at: u64) -> io::Result<()> {
    let wanted: usize = slices.iter().map(|slice| slice.len()).sum();
    match transfer_once(file.as_raw_fd(), slices, Transfer::ReadCached(at))? {
        all if all == wanted => Ok(()),
        _ => Err(io::ErrorKind::WouldBlock.into()),
    }
}

/// Writes guest memory to byte `at` of a file.
pub(crate) fn write_at(file: &File, slices: Vec<VolatileSlice<'_>>, at: u64) -> io::Result<()> {
    transfer_all(file, slices, at, true)
}

/// Reads once from a stream into guest memory. Returns 0 at the end of the stream.
pub(crate) fn read_stream(fd: BorrowedFd<'_>, slices: &[VolatileSlice<'_>]) -> io::Result<usize> {
    transfer_once(fd.as_raw_fd(), slices, Transfer::Read)
}

/// Writes guest memory once, as one frame of a tap. Takes at most 1024 slices.
pub(crate) fn write_stream(fd: BorrowedFd<'_>, slices: &[VolatileSlice<'_>]) -> io::Result<usize> {
    transfer_once(fd.as_raw_fd(), slices, Transfer::Write)
}

/// Sends guest memory once to a socket, without blocking and without SIGPIPE.
pub(crate) fn send_stream(fd: BorrowedFd<'_>, slices: &[VolatileSlice<'_>]) -> io::Result<usize> {
    transfer_once(fd.as_raw_fd(), slices, Transfer::Send)
}

/// Releases `length` bytes from byte `offset` of a region to the host: in every process that maps them if the mapping is
/// shared, otherwise only in this process.
pub(crate) fn discard(region: &GuestRegionMmap<()>, offset: u64, length: u64) -> io::Result<()> {
    let is_shared = region.flags() & libc::MAP_SHARED != 0;
    advise(region, offset, length, if is_shared { libc::MADV_REMOVE } else { libc::MADV_DONTNEED })
}

/// Gives `length` bytes from byte `offset` of a region pages of their own, as a first write to each would.
pub(crate) fn populate(region: &GuestRegionMmap<()>, offset: u64, length: u64) -> io::Result<()> {
    retry_interrupted(|| advise(region, offset, length, libc::MADV_POPULATE_WRITE))
}

/// Keeps the host from using huge pages for `length` bytes from byte `offset` of a region.
pub(crate) fn use_small_pages(region: &GuestRegionMmap<()>, offset: u64, length: u64) -> io::Result<()> {
    match advise(region, offset, length, libc::MADV_NOHUGEPAGE) {
        // The host's kernel has no huge pages.
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(()),
        done => done,
    }
}

fn advise(region: &GuestRegionMmap<()>, offset: u64, length: u64, advice: libc::c_int) -> io::Result<()> {
    let invalid = |_why| io::Error::from(io::ErrorKind::InvalidInput);
    let offset = MemoryRegionAddress(offset);
    let slice = region.get_slice(offset, usize::try_from(length).map_err(invalid)?).map_err(io::Error::other)?;
    let guard = slice.ptr_guard_mut();
    // SAFETY: the bytes lie in one mapping of guest memory, which `region` keeps alive. They are accessed by
    // volatile operations and system calls only, which expect them to change at any time.
    let done = unsafe { libc::madvise(guard.as_ptr().cast(), guard.len(), advice) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Discards a range of bytes of a block device (BLKDISCARD).
pub(crate) fn discard_blocks(device: &File, at: u64, length: u64) -> io::Result<()> {
    /// `_IO(0x12, 119)`.
    const BLKDISCARD: libc::c_ulong = 0x1277;
    let range = [at, length];
    // SAFETY: the descriptor is open, and the kernel reads two numbers, which live until the call returns.
    retry_interrupted(|| match unsafe { libc::ioctl(device.as_raw_fd(), BLKDISCARD as _, range.as_ptr()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    })
}

/// Returns another descriptor for the same eventfd.
pub(crate) fn duplicate(event: &EventFd) -> io::Result<OwnedFd> {
    // SAFETY: `event` is borrowed for the whole call and owns its descriptor, which is open as long.
    unsafe { BorrowedFd::borrow_raw(event.as_raw_fd()) }.try_clone_to_owned()
}

/// Sends a signal to a thread of this process. A thread that has ended is ignored.
pub(crate) fn signal_thread(thread: i32, signal: i32) {
    // SAFETY: the call takes three numbers; a thread of another process is out of reach, because the call names this process.
    let sent = unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), thread, signal) };
    if sent != 0 {
        tracing::debug!(thread, "cannot signal a thread: {}", io::Error::last_os_error());
    }
}

/// Returns the kind and the data of an internal error of KVM. Valid only directly after KVM has reported one.
pub(crate) fn internal_error(vcpu: &mut kvm_ioctls::VcpuFd) -> (u32, Vec<u64>) {
    // SAFETY: the union holds plain numbers, of which any value is valid; KVM has just filled this member.
    let report = unsafe { vcpu.get_kvm_run().__bindgen_anon_1.internal };
    (report.suberror, report.data.into_iter().take(report.ndata as usize).collect())
}
