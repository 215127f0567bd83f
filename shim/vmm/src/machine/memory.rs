//! Allocates guest memory on the host: one address-space reservation, aligned to huge pages, with inaccessible pages around it.
#![allow(unsafe_code)] // reason: guest memory is a mapping that is given to KVM by address.

use super::layout;
use super::{HostPages, MemoryBacking};
use crate::Memory;
use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::VmFd;
use nacelle_base::guest_error;
use nacelle_base::{Classify, FailureKind};
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap, mmap_anonymous, munmap};
use nix::unistd::{Whence, lseek};
use std::fs::File;
use std::io;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryRegion, GuestRegionMmap, MmapRegion};

/// The size of a huge page, in bytes.
pub(crate) const HUGE_PAGE: usize = 2 << 20;

/// The maximum number of parts of a file that are mapped one by one: far below the limit of a process (sysctl `vm.max_map_count`).
const MAX_DATA_RANGES: usize = 4096;

/// Guest memory cannot be allocated.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// The size is not supported.
    #[error("the size must be {min_mib} MiB or more, and a multiple of {step_mib} MiB")]
    Size {
        /// The minimum in MiB.
        min_mib: u32,
        /// The required granularity in MiB: 2 for huge pages.
        step_mib: u32,
    },
    /// The host refused the address space or the memory.
    #[error("the host cannot map it")]
    Map {
        /// The cause.
        source: Errno,
    },
    /// The host's pool of huge pages has too few free pages.
    #[error("the node has too few free huge pages of 2 MiB; increase /proc/sys/vm/nr_hugepages")]
    HugePages {
        /// The error of the host.
        source: Errno,
    },
    /// The pool has enough pages, but the limit of this process's cgroup is too low.
    #[error("the limit of its control group is too low; increase hugetlb.2MB.max")]
    HugePageLimit {
        /// The error of the host.
        source: Errno,
    },
    /// An operation on the file of shared or saved memory failed.
    #[error("cannot {what} its file")]
    File {
        /// The operation: "create", "measure", "map", "duplicate".
        what: &'static str,
        /// The cause.
        source: io::Error,
    },
    /// The file of saved memory is shorter or longer than the memory.
    #[error("its file has {got} bytes instead of {want}")]
    Length {
        /// The length of the file in bytes.
        got: u64,
        /// The length of the memory in bytes.
        want: u64,
    },
    /// The memory regions overlap or are misaligned.
    #[error("its regions overlap or are misaligned")]
    Regions,
}

impl Classify for MemoryError {
    fn kind(&self) -> FailureKind {
        match self {
            MemoryError::Size { .. } | MemoryError::Length { .. } => FailureKind::Invalid,
            MemoryError::Map { .. } | MemoryError::HugePages { .. } | MemoryError::HugePageLimit { .. } => {
                FailureKind::Exhausted
            }
            MemoryError::File { .. } | MemoryError::Regions => FailureKind::Internal,
        }
    }
}

/// The address-space reservation. Dropping it unmaps it, unless a region is still referenced: then it is leaked and an error is logged.
struct Reservation {
    start: NonNull<libc::c_void>,
    length: usize,
    regions: Vec<Arc<MmapRegion<()>>>,
}

// SAFETY: only its address and length are used, and only to unmap it, on the thread that drops it.
unsafe impl Send for Reservation {}
// SAFETY: as above; a shared reference gives access to nothing.
unsafe impl Sync for Reservation {}

impl Drop for Reservation {
    fn drop(&mut self) {
        if self.regions.iter().any(|region| Arc::strong_count(region) > 1) {
            guest_error!("BUG: guest memory is still referenced after the end of its VM, so it stays mapped");
            return;
        }
        // SAFETY: mapped by `reserve_address_space` with this length; no region of it is referenced any more (and no new reference can be
        // obtained from this value), so no pointer into it is in use.
        if let Err(error) = unsafe { munmap(self.start, self.length) } {
            guest_error!(%error, "cannot unmap guest memory");
        }
    }
}

/// Guest memory that its VM owns until its end.
pub(super) struct GuestMemory {
    /// Dropped before the reservation.
    memory: Arc<Memory>,
    _reservation: Reservation,
}

/// The backing of the mappings in the reservation.
struct MappingSource<'a> {
    file: Option<&'a File>,
    /// The parts of the file without data are anonymous memory.
    only_data: bool,
    flags: MapFlags,
    pages: HostPages,
}

impl GuestMemory {
    /// Allocates zeroed memory. Pages are populated on first access, except pages of the hugetlb pool, which are allocated at once.
    pub fn new(mib: u32, backing: MemoryBacking, pages: HostPages) -> Result<GuestMemory, MemoryError> {
        let from_hugetlb_pool = pages == HostPages::Hugetlb;
        let step_mib = if from_hugetlb_pool { 2 } else { 1 };
        if mib < 16 || !mib.is_multiple_of(step_mib) {
            return Err(MemoryError::Size { min_mib: 16, step_mib });
        }
        let file = match backing {
            MemoryBacking::Private => None,
            MemoryBacking::Shared => Some(
                memfd(u64::from(mib) * layout::MIB, pages)
                    .map_err(|source| MemoryError::File { what: "create", source })?,
            ),
        };
        let mut flags = if file.is_some() { MapFlags::MAP_SHARED } else { MapFlags::MAP_PRIVATE };
        if !from_hugetlb_pool {
            flags |= MapFlags::MAP_NORESERVE;
        } else if file.is_none() {
            flags |= MapFlags::MAP_HUGETLB | MapFlags::MAP_HUGE_2MB;
        }
        let mapped = GuestMemory::map(mib, MappingSource { file: file.as_ref(), only_data: false, flags, pages });
        if !from_hugetlb_pool {
            return mapped;
        }
        let mapped = mapped.map_err(|error| match error {
            MemoryError::Map { source: source @ (Errno::ENOMEM | Errno::EINVAL) } => MemoryError::HugePages { source },
            other => other,
        })?;
        mapped.populate()?;
        Ok(mapped)
    }

    /// Returns `mib` of memory, the first `saved_mib` of which have the content of `file`, which must not change as long as the VM lives.
    /// Its parts with data are mapped privately: pages are read on first access, and writes of the guest stay in this process. The other
    /// parts are anonymous memory, because a private mapping of a hole has small pages only, and each access to one on tmpfs adds a page
    /// to the file.
    pub fn from_file(mib: u32, saved_mib: u32, file: &File, pages: HostPages) -> Result<GuestMemory, MemoryError> {
        let want = u64::from(saved_mib) * layout::MIB;
        match file.metadata().map_err(|source| MemoryError::File { what: "measure", source })?.len() {
            got if got == want => {}
            got => return Err(MemoryError::Length { got, want }),
        }
        let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE;
        GuestMemory::map(mib, MappingSource { file: Some(file), only_data: true, flags, pages })
    }

    fn map(mib: u32, source: MappingSource<'_>) -> Result<GuestMemory, MemoryError> {
        let regions = layout::regions(mib);
        let size = usize::try_from(u64::from(mib) * layout::MIB)
            .map_err(|_huge| MemoryError::Map { source: Errno::ENOMEM })?;
        let (mut reservation, mut at) = reserve_address_space(size)?;
        let mut offset = 0;
        let mut mapped = Vec::with_capacity(regions.len());
        for (address, length) in regions {
            let region = map_region(at, length, offset, &source)?;
            offset += length;
            // SAFETY: the next region begins where this one ends, inside the reservation.
            at = unsafe { at.byte_add(region.size()) };
            reservation.regions.push(region.clone());
            let region = GuestRegionMmap::with_arc(region, GuestAddress(address)).ok_or(MemoryError::Regions)?;
            mapped.push(region);
        }
        let memory = Memory::from_regions(mapped).map_err(|_overlap| MemoryError::Regions)?;
        Ok(GuestMemory { memory: Arc::new(memory), _reservation: reservation })
    }

    /// Populates all pages. Mapping has reserved them in the pool, but a cgroup may have a lower limit, and then the process
    /// that touches a page above it is killed.
    fn populate(&self) -> Result<(), MemoryError> {
        for region in self.memory.iter() {
            let start = NonNull::new(region.as_ptr().cast()).ok_or(MemoryError::Regions)?;
            // SAFETY: the range is a whole mapping of this value; pages are added where there is none, and no content changes.
            match unsafe { madvise(start, region.len() as usize, MmapAdvise::MADV_POPULATE_WRITE) } {
                // EINVAL: the host runs Linux before 5.14, which does not have this advice.
                Ok(()) | Err(Errno::EINVAL) => {}
                Err(source) => return Err(MemoryError::HugePageLimit { source }),
            }
        }
        Ok(())
    }

    /// Returns the memory.
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// Registers the memory with the VM. The caller must drop the VM (all its descriptors) before this memory.
    pub fn register_with(&self, vm: &VmFd) -> Result<(), kvm_ioctls::Error> {
        for (slot, region) in (0..).zip(self.memory.iter()) {
            let region = kvm_region(slot, region);
            // SAFETY: the region is mapped, and stays so as long as the VM can run.
            unsafe { vm.set_user_memory_region(region) }?;
        }
        Ok(())
    }

    /// Registers memory that a device shares with its driver. `number` counts such regions from 0.
    pub fn register_shared(
        &self,
        vm: &VmFd,
        number: usize,
        shared: &GuestRegionMmap<()>,
    ) -> Result<(), kvm_ioctls::Error> {
        let slot = self.memory.num_regions().saturating_add(number);
        let region = kvm_region(u32::try_from(slot).unwrap_or(u32::MAX), shared); // KVM rejects a slot above its maximum
        // SAFETY: the region is mapped, and the device's transport, which the caller holds as long as the VM can run, keeps it.
        unsafe { vm.set_user_memory_region(region) }
    }
}

/// Returns the parts of `within`, a range of `file`, that have data, in units of huge pages from its start; all of it if they are too many
/// to be mapped one by one. A file system that does not report holes has data everywhere.
pub(crate) fn find_data(file: &File, within: Range<u64>) -> Vec<Range<u64>> {
    let huge = HUGE_PAGE as u64;
    let mut ranges: Vec<Range<u64>> = Vec::new();
    let mut at = within.start;
    while at < within.end {
        let data = match lseek(file, at as libc::off_t, Whence::SeekData) {
            // A file system of another process (FUSE) may return anything.
            Ok(data) => u64::try_from(data).unwrap_or(at).max(at),
            Err(Errno::ENXIO) => break,
            Err(_) => at,
        };
        if data >= within.end {
            break;
        }
        let start = within.start + (data - within.start) / huge * huge;
        at = (start + huge).min(within.end);
        match ranges.last_mut() {
            Some(last) if last.end == start => last.end = at,
            _ => ranges.push(start..at),
        }
    }
    if ranges.len() > MAX_DATA_RANGES { vec![within] } else { ranges }
}

fn kvm_region(slot: u32, region: &GuestRegionMmap<()>) -> kvm_userspace_memory_region {
    kvm_userspace_memory_region {
        slot,
        guest_phys_addr: region.start_addr().0,
        memory_size: region.len(),
        userspace_addr: region.as_ptr().addr() as u64,
        flags: 0,
    }
}

/// Allocates memory that can be shared with other processes, at a guest address outside [`GuestMemory`].
pub(super) fn allocate_shared(address: u64, size: u64) -> Result<Arc<GuestRegionMmap<()>>, MemoryError> {
    let file = memfd(size, HostPages::Small).map_err(|source| MemoryError::File { what: "create", source })?;
    let length = usize::try_from(size).map_err(|_huge| MemoryError::Map { source: Errno::ENOMEM })?;
    let region = MmapRegion::from_file(FileOffset::new(file, 0), length)
        .map_err(|source| MemoryError::File { what: "map", source: io::Error::other(source) })?;
    if let Some(start) = NonNull::new(region.as_ptr().cast()) {
        advise(start, length, None);
    }
    GuestRegionMmap::new(region, GuestAddress(address)).map(Arc::new).ok_or(MemoryError::Regions)
}

/// Reserves address space for `size` bytes at an address aligned to huge pages, with inaccessible pages around it.
fn reserve_address_space(size: usize) -> Result<(Reservation, NonNull<libc::c_void>), MemoryError> {
    let length = size
        .checked_next_multiple_of(HUGE_PAGE)
        .and_then(|size| size.checked_add(2 * HUGE_PAGE))
        .and_then(NonZeroUsize::new)
        .ok_or(MemoryError::Map { source: Errno::ENOMEM })?;
    let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE;
    // SAFETY: an anonymous mapping at an address of the kernel's choice touches nothing that exists.
    let start = unsafe { mmap_anonymous(None, length, ProtFlags::PROT_NONE, flags) }
        .map_err(|source| MemoryError::Map { source })?;
    let reservation = Reservation { start, length: length.get(), regions: Vec::new() };
    let first = (start.addr().get() + 1).next_multiple_of(HUGE_PAGE);
    // SAFETY: the pointer moves by at most one huge page, into a reservation that is two huge pages longer than `size`.
    let aligned = unsafe { start.byte_add(first - start.addr().get()) };
    Ok((reservation, aligned))
}

/// Maps one region into the reservation at `at`, where `length` bytes are free.
fn map_region(
    at: NonNull<libc::c_void>,
    length: u64,
    offset: u64,
    source: &MappingSource<'_>,
) -> Result<Arc<MmapRegion<()>>, MemoryError> {
    let size = usize::try_from(length).ok().and_then(NonZeroUsize::new).ok_or(MemoryError::Regions)?;
    let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
    let flags = source.flags | MapFlags::MAP_FIXED;
    let map_error = |source| MemoryError::Map { source };
    let map_file = |file: &File, range: Range<u64>| {
        let size = usize::try_from(range.end - range.start).ok().and_then(NonZeroUsize::new).ok_or(Errno::EINVAL)?;
        let start = at.addr().saturating_add((range.start - offset) as usize);
        // SAFETY: the callers below pass parts of `offset..offset + length` (`find_data` returns parts of its argument), so the mapping lies
        // in this module's own reservation, and nothing has a pointer into it.
        unsafe { mmap(Some(start), size, protection, flags, file, range.start as libc::off_t) }.map(drop)
    };
    let mut short_holes = Vec::new();
    match source.file {
        Some(file) if !source.only_data => map_file(file, offset..offset + length).map_err(map_error)?,
        file => {
            // SAFETY: as above.
            unsafe { mmap_anonymous(Some(at.addr()), size, protection, flags) }.map_err(map_error)?;
            if let Some(file) = file {
                // Behind the end of the file there is nothing to map: an access would be fatal.
                let end = file.metadata().map_err(|source| MemoryError::File { what: "measure", source })?.len();
                let data = find_data(file, offset..(offset + length).min(end).max(offset));
                let holes = data.windows(2).filter_map(|pair| Some(pair.first()?.end..pair.last()?.start));
                short_holes.extend(holes.filter(|hole| hole.end - hole.start <= HUGE_PAGE as u64));
                for range in data {
                    map_file(file, range).map_err(map_error)?;
                }
            }
        }
    }
    let pages = match source.pages {
        HostPages::Transparent => Some(MmapAdvise::MADV_HUGEPAGE),
        HostPages::Small => Some(MmapAdvise::MADV_NOHUGEPAGE),
        HostPages::Hugetlb => None,
    };
    advise(at, size.get(), pages);
    // A guest that continues first takes what is left free beside its data: a huge page there would be for a few small ones.
    for hole in short_holes.into_iter().filter(|_hole| source.pages == HostPages::Transparent) {
        // SAFETY: `find_data` returns parts of `offset..offset + length`, so the pointer stays in the region that was mapped above.
        let start = unsafe { at.byte_add((hole.start - offset) as usize) };
        advise(start, (hole.end - hole.start) as usize, Some(MmapAdvise::MADV_NOHUGEPAGE));
    }
    let mut builder =
        MmapRegionBuilder::new(size.get()).with_mmap_prot(protection.bits()).with_mmap_flags(source.flags.bits());
    // This also applies to private memory: when it is saved again, pages that were never touched must be found in the file.
    if let Some(file) = source.file {
        let file = file.try_clone().map_err(|source| MemoryError::File { what: "duplicate", source })?;
        builder = builder.with_file_offset(FileOffset::new(file, offset));
    }
    // SAFETY: the mapping was made above and stays until the reservation is dropped, which checks that the region is not
    // referenced any more.
    let region = unsafe { builder.with_raw_mmap_pointer(at.as_ptr().cast()) }.build();
    region.map(Arc::new).map_err(|_unaligned| MemoryError::Regions)
}

/// Excludes guest memory from child processes and core dumps, and sets the page size. A failure is only logged.
fn advise(at: NonNull<libc::c_void>, size: usize, pages: Option<MmapAdvise>) {
    let advice = [MmapAdvise::MADV_DONTFORK, MmapAdvise::MADV_DONTDUMP].into_iter().chain(pages);
    for advice in advice {
        // SAFETY: the range is a mapping of this module; none of these advices changes its content.
        if let Err(error) = unsafe { madvise(at, size, advice) } {
            tracing::debug!(%error, ?advice, "the host rejects advice on guest memory");
        }
    }
}

/// Creates a memfd that is sealed against changes of its size.
fn memfd(size: u64, pages: HostPages) -> io::Result<File> {
    let mut flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
    if pages == HostPages::Hugetlb {
        flags |= MFdFlags::MFD_HUGETLB | MFdFlags::MFD_HUGE_2MB;
    }
    let file = File::from(memfd_create(c"nacelle-guest", flags)?);
    file.set_len(size)?;
    fcntl(&file, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL))?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::unix::fs::{FileExt, MetadataExt};
    use vm_memory::Bytes;

    /// Returns the ranges of this process's mappings that overlap the page of `address`, with their permissions.
    fn mapped(address: usize) -> Option<String> {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        maps.lines().find_map(|line| {
            let (range, rest) = line.split_once(' ')?;
            let (start, end) = range.split_once('-')?;
            let start = usize::from_str_radix(start, 16).ok()?;
            let end = usize::from_str_radix(end, 16).ok()?;
            (start..end).contains(&address).then(|| rest.get(..4).unwrap_or_default().to_owned())
        })
    }

    #[test]
    fn memory_is_aligned_and_fenced_and_unmapped_at_the_end() {
        for backing in [MemoryBacking::Private, MemoryBacking::Shared] {
            let guest = GuestMemory::new(33, backing, HostPages::Transparent).unwrap();
            let region = guest.memory().iter().next().unwrap();
            let (start, length) = (region.as_ptr().addr(), region.len() as usize);
            assert!(start.is_multiple_of(HUGE_PAGE) && length == 33 << 20);
            assert_eq!(region.file_offset().is_some(), backing == MemoryBacking::Shared, "others can map it");
            guest.memory().write_obj(7u64, GuestAddress((33 << 20) - 8)).unwrap();
            assert_eq!(mapped(start).unwrap().get(..3), Some("rw-"));
            assert_eq!(mapped(start - 1).unwrap().get(..3), Some("---"));
            assert_eq!(mapped(start + length).unwrap().get(..3), Some("---"));
            // Another mapping may reuse an address immediately; the file's inode is unique to this memory.
            let file = region.file_offset().map(|offset| offset.file().metadata().unwrap().ino());
            let is_mapped = |inode: u64| {
                let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
                maps.lines().any(|line| line.contains("nacelle-guest") && line.contains(&format!(" {inode} ")))
            };
            assert!(file.is_none_or(is_mapped));
            drop(guest);
            assert!(!file.is_some_and(is_mapped));
        }
    }

    #[test]
    fn referenced_memory_stays_mapped() {
        let guest = GuestMemory::new(16, MemoryBacking::Private, HostPages::Transparent).unwrap();
        let kept = guest.memory().clone();
        drop(guest);
        kept.write_obj(7u64, GuestAddress(0x1000)).unwrap();
        assert_eq!(kept.read_obj::<u64>(GuestAddress(0x1000)).unwrap(), 7);
    }

    #[test]
    fn memory_above_the_hole_is_contiguous_on_the_host() {
        let guest = GuestMemory::new(3 * 1024 + 32, MemoryBacking::Private, HostPages::Transparent).unwrap();
        let ends: Vec<_> = guest.memory().iter().map(|region| (region.start_addr().0, region.len())).collect();
        assert_eq!(ends, [(0, 3 << 30), (4 << 30, 32 << 20)]);
        guest.memory().write_obj(9u64, GuestAddress(4 << 30)).unwrap();
        assert!(guest.memory().write_obj(9u64, GuestAddress(3 << 30)).is_err());
        for region in guest.memory().iter() {
            assert!(region.as_ptr().addr().is_multiple_of(HUGE_PAGE), "both can have huge pages");
        }
    }

    #[test]
    fn a_file_is_mapped_privately_and_completely() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[0x5a; 4096]).unwrap();
        let got = GuestMemory::from_file(16, 16, &file, HostPages::Transparent).err();
        assert!(matches!(got, Some(MemoryError::Length { got: 4096, .. })), "{got:?}");
        file.set_len(16 << 20).unwrap();
        let (one, two) = (
            GuestMemory::from_file(16, 16, &file, HostPages::Transparent).unwrap(),
            GuestMemory::from_file(16, 16, &file, HostPages::Transparent).unwrap(),
        );
        one.memory().write_obj(1u8, GuestAddress(5)).unwrap();
        assert_eq!(two.memory().read_obj::<u16>(GuestAddress(4)).unwrap(), 0x5a5a);
        assert_eq!(one.memory().read_obj::<u16>(GuestAddress(4)).unwrap(), 0x015a);
    }

    #[test]
    fn memory_behind_the_file_is_anonymous() {
        // The file ends within a huge page that has data.
        let file = tempfile::tempfile().unwrap();
        file.set_len(17 << 20).unwrap();
        file.write_all_at(&[0x5a; 4096], 16 << 20).unwrap();
        let guest = GuestMemory::from_file(64, 17, &file, HostPages::Transparent).unwrap();
        assert_eq!(guest.memory().read_obj::<u8>(GuestAddress(16 << 20)).unwrap(), 0x5a);
        for at in [17 << 20, (18 << 20) - 1, 63 << 20] {
            assert_eq!(guest.memory().read_obj::<u8>(GuestAddress(at)).unwrap(), 0);
            guest.memory().write_obj(1u8, GuestAddress(at)).unwrap();
        }
        assert_eq!(file.metadata().unwrap().len(), 17 << 20);
    }

    #[test]
    fn only_the_parts_with_data_are_mapped_from_the_file() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(16 << 20).unwrap();
        // In the second huge page, across the border of the fifth and sixth, and in the last.
        for at in [(2 << 20) + 8192, (10 << 20) - 4096, 10 << 20, (16 << 20) - 4096] {
            file.write_all_at(&[0x5a; 4096], at).unwrap();
        }
        let found = find_data(&file, 0..16 << 20);
        assert_eq!(found, [2 << 20..4 << 20, 8 << 20..12 << 20, 14 << 20..16 << 20]);
        assert_eq!(find_data(&file, 4 << 20..8 << 20), []);
        let guest = GuestMemory::from_file(16, 16, &file, HostPages::Transparent).unwrap();
        let (mut content, mut expected) = (vec![0; 16 << 20], vec![0; 16 << 20]);
        // Reading a hole of a private mapping would add pages to a file on tmpfs.
        let blocks = file.metadata().unwrap().blocks();
        for hole in [0..2 << 20, 4 << 20..8 << 20, 12 << 20..14 << 20] {
            guest.memory().read_slice(&mut content[hole.clone()], GuestAddress(hole.start as u64)).unwrap();
        }
        assert_eq!(file.metadata().unwrap().blocks(), blocks);
        guest.memory().read_slice(&mut content, GuestAddress(0)).unwrap();
        file.read_exact_at(&mut expected, 0).unwrap();
        assert!(content == expected);
        guest.memory().write_slice(&[1; 16 << 20], GuestAddress(0)).unwrap();
        file.read_exact_at(&mut content, 0).unwrap();
        assert!(content == expected, "writes stay private");
        let start = guest.memory().iter().next().unwrap().as_ptr().addr();
        for (at, from_file) in [(0, false), (2 << 20, true), (4 << 20, false), (8 << 20, true), (12 << 20, false)] {
            let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
            let line = maps.lines().find(|line| line.starts_with(&format!("{:x}-", start + at))).unwrap();
            assert_eq!(line.contains("(deleted)"), from_file, "{line}");
        }
    }

    #[test]
    fn a_short_hole_between_data_has_small_pages() {
        if !std::path::Path::new("/sys/kernel/mm/transparent_hugepage").exists() {
            return println!("skipped: this kernel has no transparent huge pages");
        }
        let file = tempfile::tempfile().unwrap();
        file.set_len(16 << 20).unwrap();
        for at in [0, 4 << 20, 12 << 20] {
            file.write_all_at(&[1; 4096], at).unwrap();
        }
        let guest = GuestMemory::from_file(16, 16, &file, HostPages::Transparent).unwrap();
        let start = guest.memory().iter().next().unwrap().as_ptr().addr();
        for (at, flag) in [(2 << 20, "nh"), (6 << 20, "hg"), (14 << 20, "hg")] {
            let flags = smaps(start + at, "VmFlags").unwrap();
            assert!(flags.split(' ').any(|found| found == flag), "{at:x}: {flags}");
        }
    }

    #[test]
    fn data_on_both_sides_of_the_hole_is_where_it_was_saved() {
        let file = tempfile::tempfile().unwrap();
        // One MiB more than the memory below the hole for devices: the last unit is half a huge page.
        file.set_len(3073 << 20).unwrap();
        for (at, byte) in [(0, 1), ((3 << 30) - 4096, 2), (3 << 30, 3), ((3073 << 20) - 4096, 4)] {
            file.write_all_at(&[byte; 4096], at).unwrap();
        }
        let above = find_data(&file, 3 << 30..3073 << 20);
        assert!(above.first() == Some(&(3 << 30..3073 << 20)) && above.len() == 1, "{above:?}");
        let guest = GuestMemory::from_file(3073, 3073, &file, HostPages::Transparent).unwrap();
        let at = |address: u64| guest.memory().read_obj::<u8>(GuestAddress(address)).unwrap();
        let hole = 3 << 30;
        assert_eq!((at(0), at(4096), at(hole - 4097), at(hole - 4096)), (1, 0, 0, 2));
        let end = (4 << 30) + (1 << 20);
        assert_eq!((at(4 << 30), at((4 << 30) + 4096), at(end - 4097), at(end - 1)), (3, 0, 0, 4));
    }

    /// Returns a field of the mapping in /proc/self/smaps that begins at `address`.
    fn smaps(address: usize, field: &str) -> Option<String> {
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut lines = smaps.lines().skip_while(|line| !line.starts_with(&format!("{address:x}-")));
        lines.find_map(|line| Some(line.strip_prefix(field)?.strip_prefix(':')?.trim().to_owned()))
    }

    #[test]
    fn the_host_gets_advice_on_the_page_size() {
        if !std::path::Path::new("/sys/kernel/mm/transparent_hugepage").exists() {
            return println!("skipped: this kernel has no transparent huge pages");
        }
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[1; 4096]).unwrap(); // so that memory begins with a mapping of the file
        file.set_len(16 << 20).unwrap();
        for (pages, flag) in [(HostPages::Transparent, "hg"), (HostPages::Small, "nh")] {
            let made = [
                GuestMemory::new(16, MemoryBacking::Private, pages).unwrap(),
                GuestMemory::new(16, MemoryBacking::Shared, pages).unwrap(),
                GuestMemory::from_file(16, 16, &file, pages).unwrap(),
            ];
            for guest in made {
                let start = guest.memory().iter().next().unwrap().as_ptr().addr();
                let flags = smaps(start, "VmFlags").unwrap();
                assert!(flags.split(' ').any(|found| found == flag), "{pages:?}: {flags}");
            }
        }
    }

    #[test]
    fn hugetlb_memory_is_allocated_or_reports_the_shortage() {
        for backing in [MemoryBacking::Private, MemoryBacking::Shared] {
            match GuestMemory::new(16, backing, HostPages::Hugetlb) {
                Ok(guest) => {
                    let start = guest.memory().iter().next().unwrap().as_ptr().addr();
                    assert_eq!(smaps(start, "KernelPageSize").as_deref(), Some("2048 kB"), "{backing:?}");
                }
                Err(error) => {
                    assert!(matches!(error, MemoryError::HugePages { .. }), "{backing:?}: {error:?}");
                    println!("skipped: {error}");
                }
            }
        }
    }

    #[test]
    fn invalid_sizes_are_rejected() {
        for (mib, backing, pages) in [
            (0, MemoryBacking::Private, HostPages::Transparent),
            (15, MemoryBacking::Shared, HostPages::Small),
            (17, MemoryBacking::Private, HostPages::Hugetlb),
            (17, MemoryBacking::Shared, HostPages::Hugetlb),
        ] {
            let got = GuestMemory::new(mib, backing, pages);
            assert!(matches!(got, Err(MemoryError::Size { .. })), "{mib} {backing:?} {pages:?}");
        }
        let size = GuestMemory::new(u32::MAX, MemoryBacking::Private, HostPages::Small).err();
        assert_eq!(size.map(|error| error.kind()), Some(FailureKind::Exhausted));
    }
}
