//! Checks the headers of a kernel's file and loads the kernel and the initramfs into guest memory. It does not trust any byte
//! of the file.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use super::layout::{self, HIGH};
use crate::Memory;
use linux_loader::bootparam::setup_header;
use linux_loader::loader::KernelLoader;
use linux_loader::loader::bzimage::BzImage;
use linux_loader::loader::elf::{Elf, PvhBootCapability};
use nacelle_base::{Classify, FailureKind};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use vm_memory::{Bytes, GuestAddress};

/// The maximum number of segments of a kernel (Linux has five).
const MAX_SEGMENTS: usize = 64;
/// The maximum size of an ELF note segment in bytes.
const MAX_NOTES: u64 = 1 << 20;
/// The offset of a bzImage's 64-bit entry (`startup_64`) into its protected-mode code.
const BZ_IMAGE_ENTRY: u64 = 0x200;

/// A kernel or initramfs cannot be loaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KernelError {
    /// The file cannot be read.
    #[error("cannot read the file")]
    Read {
        /// The cause.
        source: io::Error,
    },
    /// The file is neither an ELF file nor a bzImage.
    #[error("neither an ELF image nor a bzImage for x86-64")]
    Format,
    /// The headers of an ELF image are inconsistent.
    #[error("the ELF image is invalid: {what}")]
    Elf {
        /// The inconsistency.
        what: &'static str,
    },
    /// The kernel has no supported entry point.
    #[error("the image has no 64-bit or PVH entry")]
    Entry,
    /// The loader rejected the image.
    #[error("cannot load the image")]
    Loader {
        /// The cause.
        source: linux_loader::loader::Error,
    },
    /// The kernel or the initramfs does not fit in low memory.
    #[error("the image needs memory up to {needs:#x}, but low memory ends at {end:#x}")]
    Memory {
        /// The end address of the required memory.
        needs: u64,
        /// The end address of the memory below the hole for devices.
        end: u64,
    },
    /// The kernel command line is too long.
    #[error("the kernel command line is too long ({got} bytes): the maximum is {max}")]
    Cmdline {
        /// The length in bytes, with the closing zero.
        got: usize,
        /// The maximum length of the command line in bytes, with the closing zero.
        max: usize,
    },
    /// A fixed table cannot be written to guest memory.
    #[error("cannot write guest memory")]
    Write {
        /// The cause.
        source: vm_memory::GuestMemoryError,
    },
}

impl Classify for KernelError {
    fn kind(&self) -> FailureKind {
        match self {
            KernelError::Read { source } if source.kind() == io::ErrorKind::NotFound => FailureKind::NotFound,
            KernelError::Read { source } if source.kind() == io::ErrorKind::PermissionDenied => FailureKind::Denied,
            KernelError::Read { .. } | KernelError::Write { .. } => FailureKind::Internal,
            _ => FailureKind::Invalid,
        }
    }
}

/// The entry point of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum KernelEntry {
    /// The address of the 64-bit entry; it expects a zero page (boot protocol of Linux, "64-bit boot protocol").
    Long(u64),
    /// The address of the 32-bit entry; it expects PVH's start information (Xen's "x86/HVM direct boot ABI").
    Pvh(u64),
}

/// A kernel that has been loaded into guest memory.
#[derive(Debug)]
pub(super) struct LoadedKernel {
    /// The entry point.
    pub entry: KernelEntry,
    /// The first address above the memory that the kernel needs.
    pub end: u64,
    /// The setup header of a bzImage.
    pub header: Option<setup_header>,
}

/// Loads the kernel at `path`. `low_end` is the end of the memory below the hole.
pub(super) fn load(memory: &Memory, low_end: u64, path: &Path) -> Result<LoadedKernel, KernelError> {
    let read = |source| KernelError::Read { source };
    let mut file = File::open(path).map_err(read)?;
    let length = file.metadata().map_err(read)?.len();
    let mut head = [0; 64];
    let got = read_start(&file, &mut head).map_err(read)?;
    if head.starts_with(b"\x7fELF") && got == head.len() {
        load_elf(memory, low_end, &mut file, length, &head)
    } else {
        load_bzimage(memory, low_end, &mut file, length)
    }
}

/// Checks the headers of a kernel's file. Fails if no VM with this much memory can start it. If `pvh` is set, an ELF image must
/// have a PVH entry.
pub fn check_kernel(file: &File, memory_mib: u32, pvh: bool) -> Result<(), KernelError> {
    let read = |source| KernelError::Read { source };
    let (low_end, length) = (layout::low_end(memory_mib), file.metadata().map_err(read)?.len());
    let mut head = [0; 64];
    let got = read_start(file, &mut head).map_err(read)?;
    if !head.starts_with(b"\x7fELF") || got < head.len() {
        let header = BzHeader::read(file, length)?;
        return header.memory_end(header.copied_end(length, low_end)?, low_end).map(drop);
    }
    let (header, segments, _end) = read_elf(file, low_end, length, &head)?;
    let is_loaded = |address: u64| segments.iter().any(|segment| segment.loads(address));
    if !pvh && is_loaded(header.entry) {
        return Ok(());
    }
    match pvh_entry(file, &segments).map_err(read)? {
        Some(entry) if is_loaded(entry) => Ok(()),
        _ => Err(KernelError::Entry),
    }
}

/// Reads up to `data.len()` bytes from the start of a file. Returns their number.
fn read_start(file: &File, data: &mut [u8]) -> io::Result<usize> {
    let mut done = 0;
    while let Some(rest) = data.get_mut(done..).filter(|rest| !rest.is_empty()) {
        match file.read_at(rest, done as u64) {
            Ok(0) => break,
            Ok(got) => done += got,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}

fn load_elf(
    memory: &Memory,
    low_end: u64,
    file: &mut File,
    length: u64,
    head: &[u8; 64],
) -> Result<LoadedKernel, KernelError> {
    let (header, segments, end) = read_elf(file, low_end, length, head)?;
    let loaded = Elf::load(memory, None, file, None).map_err(|source| KernelError::Loader { source })?;
    let is_loaded = |address: u64| segments.iter().any(|segment| segment.loads(address));
    let entry = match loaded.pvh_boot_cap {
        _ if is_loaded(header.entry) => KernelEntry::Long(header.entry),
        PvhBootCapability::PvhEntryPresent(address) if is_loaded(address.0) => KernelEntry::Pvh(address.0),
        _ => return Err(KernelError::Entry),
    };
    Ok(LoadedKernel { entry, end, header: None })
}

/// Reads and checks an ELF image's headers. Returns them with the end address of the memory that the image needs.
fn read_elf(
    file: &File,
    low_end: u64,
    length: u64,
    head: &[u8; 64],
) -> Result<(ElfHeader, Vec<ElfSegment>, u64), KernelError> {
    let header = ElfHeader::parse(head)?;
    let mut table = vec![0; header.segments * ElfSegment::SIZE];
    if header.table.checked_add(table.len() as u64).is_none_or(|end| end > length) {
        return Err(KernelError::Elf { what: "its program headers lie beyond the end of the file" });
    }
    file.read_exact_at(&mut table, header.table).map_err(|source| KernelError::Read { source })?;
    let segments: Vec<ElfSegment> = table.chunks_exact(ElfSegment::SIZE).filter_map(ElfSegment::parse).collect();
    let end = check_segments(&segments, low_end, length)?;
    Ok((header, segments, end))
}

/// Returns the entry point that a note of the image names ("x86/HVM direct boot ABI", XEN_ELFNOTE_PHYS32_ENTRY).
fn pvh_entry(file: &File, segments: &[ElfSegment]) -> io::Result<Option<u64>> {
    for segment in segments.iter().filter(|segment| segment.kind == ElfSegment::NOTE) {
        let mut notes = vec![0; usize::try_from(segment.in_file.min(MAX_NOTES)).unwrap_or_default()];
        file.read_exact_at(&mut notes, segment.offset)?;
        if let Some(entry) = pvh_note(&notes) {
            return Ok(Some(entry));
        }
    }
    Ok(None)
}

fn pvh_note(mut notes: &[u8]) -> Option<u64> {
    const PHYS32_ENTRY: u32 = 18;
    let word = |notes: &[u8], at: usize| Some(u32::from_le_bytes(notes.get(at..at + 4)?.try_into().ok()?));
    loop {
        let (name, text) = (word(notes, 0)? as usize, word(notes, 4)? as usize);
        let (name_end, from) = (12usize.checked_add(name)?, 12usize.checked_add(name)?.checked_next_multiple_of(4)?);
        if word(notes, 8)? == PHYS32_ENTRY && notes.get(12..name_end)? == b"Xen\0" {
            return word(notes, from).filter(|_| text >= 4).map(u64::from);
        }
        notes = notes.get(from.checked_add(text)?.checked_next_multiple_of(4)?..)?;
    }
}

/// The used fields of an ELF header ("ELF-64 Object File Format", figure 2).
struct ElfHeader {
    entry: u64,
    table: u64,
    segments: usize,
}

impl ElfHeader {
    fn parse(head: &[u8; 64]) -> Result<ElfHeader, KernelError> {
        let elf_error = |what| KernelError::Elf { what };
        let word = |at: usize| u16_at(head, at).ok_or(elf_error("no header"));
        const CLASS_64_LITTLE: [u8; 2] = [2, 1];
        const X86_64: u16 = 62;
        if head.get(4..6) != Some(&CLASS_64_LITTLE) || word(18)? != X86_64 {
            return Err(KernelError::Format);
        }
        let segments = usize::from(word(56)?);
        if usize::from(word(54)?) != ElfSegment::SIZE {
            return Err(elf_error("its program headers have an unknown size"));
        }
        if !(1..=MAX_SEGMENTS).contains(&segments) {
            return Err(elf_error("no or too many segments"));
        }
        let long = |at: usize| u64_at(head, at).ok_or(elf_error("no header"));
        Ok(ElfHeader { entry: long(24)?, table: long(32)?, segments })
    }
}

/// The used fields of a program header ("ELF-64 Object File Format", figure 6).
#[derive(Clone, Debug, Default)]
struct ElfSegment {
    kind: u32,
    offset: u64,
    address: u64,
    in_file: u64,
    in_memory: u64,
}

impl ElfSegment {
    const SIZE: usize = 56;
    const LOAD: u32 = 1;
    const NOTE: u32 = 4;

    fn parse(bytes: &[u8]) -> Option<ElfSegment> {
        Some(ElfSegment {
            kind: u32::from_le_bytes(bytes.get(..4)?.try_into().ok()?),
            offset: u64_at(bytes, 8)?,
            address: u64_at(bytes, 24)?,
            in_file: u64_at(bytes, 32)?,
            in_memory: u64_at(bytes, 40)?,
        })
    }

    fn range(&self) -> Option<Range<u64>> {
        Some(self.address..self.address.checked_add(self.in_memory)?)
    }

    /// Returns whether the byte at `address` is loaded from the file by this segment.
    fn loads(&self, address: u64) -> bool {
        self.kind == ElfSegment::LOAD && address.checked_sub(self.address).is_some_and(|offset| offset < self.in_file)
    }
}

/// Checks that the segments lie in the file and in low memory above 1 MiB, and do not overlap. Returns the end of the last one.
fn check_segments(segments: &[ElfSegment], low_end: u64, file_length: u64) -> Result<u64, KernelError> {
    let elf_error = |what| KernelError::Elf { what };
    let mut ranges = Vec::new();
    for segment in segments.iter().filter(|segment| matches!(segment.kind, ElfSegment::LOAD | ElfSegment::NOTE)) {
        let end = segment.offset.checked_add(segment.in_file);
        if end.is_none_or(|end| end > file_length) {
            return Err(elf_error("a segment lies beyond the end of the file"));
        }
        if segment.kind == ElfSegment::NOTE {
            if segment.in_file > MAX_NOTES {
                return Err(elf_error("too many notes"));
            }
            continue;
        }
        if segment.in_file > segment.in_memory {
            return Err(elf_error("a segment is longer in the file than in memory"));
        }
        let range = segment.range().ok_or(elf_error("a segment has no end"))?;
        if range.start < HIGH {
            return Err(elf_error("a segment lies below 1 MiB"));
        }
        if range.end > low_end {
            return Err(KernelError::Memory { needs: range.end, end: low_end });
        }
        ranges.push((range.start, range.end));
    }
    ranges.sort_unstable();
    if ranges.iter().zip(ranges.iter().skip(1)).any(|(one, next)| one.1 > next.0) {
        return Err(elf_error("segments overlap"));
    }
    ranges.last().map(|last| last.1).ok_or(elf_error("nothing to load"))
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

/// The used fields of a bzImage's header ("The Linux/x86 Boot Protocol", "Details of Header Fields").
struct BzHeader {
    version: u16,
    flags: u16,
    preferred: u64,
    init_size: u32,
}

impl BzHeader {
    /// The offset of the header in the file.
    const AT: u64 = 0x202;

    fn read(file: &File, length: u64) -> Result<BzHeader, KernelError> {
        let mut bytes = [0; 0x62];
        if length < 1024 || file.read_exact_at(&mut bytes, BzHeader::AT).is_err() || !bytes.starts_with(b"HdrS") {
            return Err(KernelError::Format);
        }
        let fields = || {
            Some(BzHeader {
                version: u16_at(&bytes, 0x206 - 0x202)?,
                flags: u16_at(&bytes, 0x236 - 0x202)?,
                preferred: u64_at(&bytes, 0x258 - 0x202)?,
                init_size: u32::from_le_bytes(bytes.get(0x260 - 0x202..0x264 - 0x202)?.try_into().ok()?),
            })
        };
        fields().ok_or(KernelError::Format)
    }

    /// Returns an upper bound for the end of the image after it has been copied to 1 MiB.
    fn copied_end(&self, length: u64, low_end: u64) -> Result<u64, KernelError> {
        match HIGH.checked_add(length) {
            Some(needs) if needs > low_end => Err(KernelError::Memory { needs, end: low_end }),
            None => Err(KernelError::Format),
            Some(needs) => Ok(needs),
        }
    }

    /// Returns the end of the memory that the kernel needs: it decompresses itself to its preferred address.
    fn memory_end(&self, copied_end: u64, low_end: u64) -> Result<u64, KernelError> {
        /// The first version with the field `xloadflags` (2.12), and the bit of that field for a 64-bit entry at 0x200.
        const VERSION_WITH_FLAGS: u16 = 0x20c;
        const HAS_64_BIT_ENTRY: u16 = 1;
        if self.version < VERSION_WITH_FLAGS || self.flags & HAS_64_BIT_ENTRY == 0 {
            return Err(KernelError::Entry);
        }
        let load_address = self.preferred.max(HIGH);
        let needs = load_address.checked_add(u64::from(self.init_size)).ok_or(KernelError::Format)?.max(copied_end);
        if needs > low_end {
            return Err(KernelError::Memory { needs, end: low_end });
        }
        Ok(needs)
    }
}

/// Loads a bzImage at 1 MiB, if there is also enough memory at its preferred address.
fn load_bzimage(memory: &Memory, low_end: u64, file: &mut File, length: u64) -> Result<LoadedKernel, KernelError> {
    let fields = BzHeader::read(file, length)?;
    fields.copied_end(length, low_end)?;
    let loaded =
        BzImage::load(memory, Some(GuestAddress(HIGH)), file, None).map_err(|source| KernelError::Loader { source })?;
    let header = loaded.setup_header.ok_or(KernelError::Format)?;
    let entry = HIGH + BZ_IMAGE_ENTRY;
    let end = fields.memory_end(loaded.kernel_end, low_end)?;
    // The header's sector count may leave no code to run.
    if loaded.kernel_end <= entry {
        return Err(KernelError::Entry);
    }
    Ok(LoadedKernel { entry: KernelEntry::Long(entry), end, header: Some(header) })
}

/// Reads the initramfs at `path` into memory above the kernel. Returns its address and size.
pub(super) fn load_initrd(
    memory: &Memory,
    memory_mib: u32,
    kernel: &LoadedKernel,
    path: &Path,
) -> Result<(u64, u64), KernelError> {
    let read = |source| KernelError::Read { source };
    let mut file = File::open(path).map_err(read)?;
    let size = file.metadata().map_err(read)?.len();
    let limit = kernel.header.map_or(u64::from(u32::MAX), |header| u64::from(header.initrd_addr_max));
    let memory_error = KernelError::Memory { needs: kernel.end.saturating_add(size), end: layout::low_end(memory_mib) };
    let Some(address) = layout::initrd_address(memory_mib, limit, kernel.end, size) else { return Err(memory_error) };
    let count = usize::try_from(size).map_err(|_huge| memory_error)?;
    memory
        .read_exact_volatile_from(GuestAddress(address), &mut file, count)
        .map_err(|source| KernelError::Write { source })?;
    Ok((address, size))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]
mod tests {
    use super::*;
    use crate::machine::layout::MIB;
    use proptest::prelude::*;
    use std::io::Write;

    const MIB_OF_MEMORY: u32 = 16;

    fn memory() -> Memory {
        Memory::from_ranges(&[(GuestAddress(0), MIB_OF_MEMORY as usize * MIB as usize)]).unwrap()
    }

    fn load_bytes(memory: &Memory, bytes: &[u8]) -> Result<LoadedKernel, KernelError> {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(bytes).unwrap();
        let loaded = load(memory, layout::low_end(MIB_OF_MEMORY), file.path());
        let check_bytes = check_kernel(file.as_file(), MIB_OF_MEMORY, false);
        assert!(loaded.is_err() || check_bytes.is_ok(), "{check_bytes:?} of what can be loaded");
        loaded
    }

    fn check_bytes(bytes: &[u8], pvh: bool) -> Result<(), KernelError> {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(bytes).unwrap();
        check_kernel(file.as_file(), MIB_OF_MEMORY, pvh)
    }

    /// Type, offset, address, bytes in the file, bytes in memory.
    type SegmentHeader = (u32, u64, u64, u64, u64);

    fn elf(entry: u64, headers: &[SegmentHeader], length: usize) -> Vec<u8> {
        let mut bytes = vec![0; 64];
        bytes[..7].copy_from_slice(b"\x7fELF\x02\x01\x01");
        bytes[18..20].copy_from_slice(&62u16.to_le_bytes());
        bytes[24..32].copy_from_slice(&entry.to_le_bytes());
        bytes[32..40].copy_from_slice(&64u64.to_le_bytes());
        bytes[54..56].copy_from_slice(&56u16.to_le_bytes());
        bytes[56..58].copy_from_slice(&(headers.len() as u16).to_le_bytes());
        for (kind, offset, address, in_file, in_memory) in headers {
            bytes.extend(kind.to_le_bytes());
            bytes.extend([0; 4]);
            for word in [offset, address, address, in_file, in_memory, &4096] {
                bytes.extend(word.to_le_bytes());
            }
        }
        let from = bytes.len().min(length);
        bytes.resize(length, 0);
        bytes[from..].iter_mut().enumerate().for_each(|(at, byte)| *byte = at as u8);
        bytes
    }

    #[test]
    fn segments_are_loaded_at_their_addresses() {
        let memory = memory();
        let image = elf(0x20_0010, &[(1, 0x200, 0x20_0000, 0x100, 0x3000), (1, 0x300, 0x30_0000, 8, 8)], 0x400);
        let loaded = load_bytes(&memory, &image).unwrap();
        assert_eq!((loaded.entry, loaded.end), (KernelEntry::Long(0x20_0010), 0x30_0008));
        let mut there = [0; 0x108];
        memory.read_slice(&mut there, GuestAddress(0x20_0000)).unwrap();
        assert_eq!((&there[..0x100], &there[0x100..]), (&image[0x200..0x300], &[0; 8][..]));
    }

    #[test]
    fn a_pvh_entry_is_used_without_a_64_bit_entry() {
        let mut note = [4u32, 4, 18].map(u32::to_le_bytes).concat();
        note.extend(b"Xen\0");
        note.extend(0x20_0040u32.to_le_bytes());
        for (entry, expected) in [(0, KernelEntry::Pvh(0x20_0040)), (0x20_0000, KernelEntry::Long(0x20_0000))] {
            let headers = [(1, 0x200, 0x20_0000, 0x100, 0x100), (4, 0x300, 0, note.len() as u64, 0)];
            let mut image = elf(entry, &headers, 0x300);
            image.extend(&note);
            assert_eq!(load_bytes(&memory(), &image).unwrap().entry, expected);
            assert!(check_bytes(&image, false).is_ok() && check_bytes(&image, true).is_ok());
            image[0x308] = 17;
            assert_eq!((check_bytes(&image, false).is_ok(), check_bytes(&image, true).is_ok()), (entry != 0, false));
            image.truncate(0x310);
            assert!(matches!(check_bytes(&image, true), Err(KernelError::Elf { .. })));
        }
    }

    #[test]
    fn invalid_images_are_rejected() {
        let good = (1, 0x200, 0x20_0000, 0x100, 0x100);
        let elf_error: [(u64, &[SegmentHeader]); 11] = [
            (0x10_0000, &[good]),
            (0x20_0000, &[]),
            (0x20_0000, &[(4, 0x200, 0, 0, 0)]),
            (0x20_0000, &[(1, 0x200, 0x20_0000, 0x400, 0x400)]),
            (0x20_0000, &[(1, u64::MAX, 0x20_0000, 0x100, 0x100)]),
            (0x20_0000, &[(1, 0x200, 0x20_0000, 0x100, 0x80)]),
            (0x2000, &[(1, 0x200, 0x2000, 0x100, 0x100)]),
            (0x20_0000, &[(1, 0x200, 0x20_0000, 0x100, 16 * MIB)]),
            (0x20_0000, &[(1, 0x200, 0x20_0000, 0x100, u64::MAX)]),
            (0x20_0000, &[good, (1, 0x200, 0x20_00ff, 1, 1)]),
            (0x20_0000, &[good, (4, 0x200, 0, 0x10_0000, 0)]),
        ];
        for (entry, headers) in elf_error {
            let error = load_bytes(&memory(), &elf(entry, headers, 0x400)).unwrap_err();
            assert_eq!(error.kind(), FailureKind::Invalid, "{headers:x?}: {error}");
            assert!(check_bytes(&elf(entry, headers, 0x400), false).is_err(), "{headers:x?}");
        }
        for bytes in [&b""[..], b"\x7fELF", &[0; 4096], b"#!/bin/sh\n"] {
            assert!(matches!(load_bytes(&memory(), bytes), Err(KernelError::Format)));
            assert!(matches!(check_bytes(bytes, true), Err(KernelError::Format)));
        }
    }

    #[test]
    fn a_bzimage_needs_memory_and_a_64_bit_entry() {
        let image = |version: u16, flags: u16, preferred: u64, init_size: u32| {
            let mut bytes = vec![0; 8192];
            bytes[0x1f1] = 3;
            bytes[0x202..0x206].copy_from_slice(b"HdrS");
            bytes[0x206..0x208].copy_from_slice(&version.to_le_bytes());
            bytes[0x211] = 1;
            bytes[0x236..0x238].copy_from_slice(&flags.to_le_bytes());
            bytes[0x258..0x260].copy_from_slice(&preferred.to_le_bytes());
            bytes[0x260..0x264].copy_from_slice(&init_size.to_le_bytes());
            bytes
        };
        let loaded = load_bytes(&memory(), &image(0x20f, 1, 0x20_0000, 0x10_0000)).unwrap();
        assert_eq!((loaded.entry, loaded.end), (KernelEntry::Long(0x10_0200), 0x30_0000));
        for bad in [
            image(0x20b, 1, 0x20_0000, 0x10_0000),
            image(0x20f, 2, 0x20_0000, 0x10_0000),
            image(0x20f, 1, 0x20_0000, u32::MAX),
            image(0x20f, 1, u64::MAX, 0x10_0000),
        ] {
            assert_eq!(load_bytes(&memory(), &bad).unwrap_err().kind(), FailureKind::Invalid);
            assert_eq!(check_bytes(&bad, true).unwrap_err().kind(), FailureKind::Invalid);
        }
        let mut short = image(0x20f, 1, 0x20_0000, 0x10_0000);
        short.truncate(4 * 512 + 0x200);
        assert!(matches!(load_bytes(&memory(), &short), Err(KernelError::Entry)), "all of it is header");
        let mut sectors = image(0x20f, 1, 0x20_0000, 0x10_0000);
        sectors[0x1f1] = 0xff;
        assert_eq!(load_bytes(&memory(), &sectors).unwrap_err().kind(), FailureKind::Invalid);
    }

    #[test]
    fn an_oversized_initrd_is_rejected() {
        let loaded = |header| LoadedKernel { entry: KernelEntry::Long(0), end: 15 * MIB, header };
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(MIB + 1).unwrap();
        let refused = load_initrd(&memory(), MIB_OF_MEMORY, &loaded(None), file.path());
        assert!(matches!(refused, Err(KernelError::Memory { .. })), "{refused:?}");
        file.as_file().set_len(MIB - 1).unwrap();
        assert_eq!(load_initrd(&memory(), MIB_OF_MEMORY, &loaded(None), file.path()).unwrap(), (15 * MIB, MIB - 1));
        let low = setup_header { initrd_addr_max: 8 << 20, ..Default::default() };
        assert!(load_initrd(&memory(), MIB_OF_MEMORY, &loaded(Some(low)), file.path()).is_err());
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(300))]

        /// Loading any file ends with a kernel in memory or with an error.
        #[test]
        fn any_headers_are_loaded_or_rejected(
            entry in any::<u64>(),
            headers in prop::collection::vec(
                (prop_oneof![Just(1u32), Just(4), any::<u32>()], numbers_near_valid_ones(), numbers_near_valid_ones(), numbers_near_valid_ones(), numbers_near_valid_ones()), 0..6),
            noise in prop::collection::vec((0usize..0x400, any::<u8>()), 0..4),
        ) {
            let mut image = elf(entry, &headers, 0x400);
            noise.into_iter().for_each(|(at, byte)| image[at] = byte);
            if let Ok(loaded) = load_bytes(&memory(), &image) {
                prop_assert!(loaded.end <= layout::low_end(MIB_OF_MEMORY));
                let (KernelEntry::Long(entry) | KernelEntry::Pvh(entry)) = loaded.entry;
                prop_assert!(entry >= HIGH && entry < loaded.end);
            }
        }
    }

    /// Returns numbers that are often close to valid ones.
    fn numbers_near_valid_ones() -> impl Strategy<Value = u64> {
        prop_oneof![0u64..0x400, (0u64..17).prop_map(|mib| mib * MIB), any::<u64>(), Just(u64::MAX)]
    }
}
