//! Owns: how a kernel's file gets into guest memory: read in place, after its headers have been checked.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use super::layout::{self, HIGH};
use crate::Memory;
use linux_loader::bootparam::setup_header;
use linux_loader::loader::KernelLoader;
use linux_loader::loader::bzimage::BzImage;
use linux_loader::loader::elf::{Elf, PvhBootCapability};
use nacelle_base::{Classify, Kind};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use vm_memory::{Bytes, GuestAddress};

/// The most segments that a kernel may have (Linux has five).
const MAX_SEGMENTS: usize = 64;
/// The most bytes of notes that are looked through.
const MAX_NOTES: u64 = 1 << 20;
/// The offset of a bzImage's 64-bit entry (`startup_64`) into its protected-mode code.
const BZ_IMAGE_ENTRY: u64 = 0x200;

/// A kernel or initial file system cannot be loaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KernelError {
    /// The file cannot be read.
    #[error("the file cannot be read")]
    Read {
        /// Why not.
        source: io::Error,
    },
    /// Neither an ELF file nor a bzImage.
    #[error("neither an ELF image nor a bzImage for x86-64")]
    Format,
    /// An ELF image whose headers make no sense.
    #[error("the ELF image is broken: {what}")]
    Elf {
        /// What is wrong.
        what: &'static str,
    },
    /// A kernel without an entry that this machine knows.
    #[error("the image has no 64-bit or PVH entry")]
    Entry,
    /// The loader could not use it.
    #[error("the image cannot be loaded")]
    Loader {
        /// Why not.
        source: linux_loader::loader::Error,
    },
    /// It needs more room than there is.
    #[error("it needs memory up to {needs:#x}, and low memory ends at {end:#x}")]
    Memory {
        /// The end of what it needs.
        needs: u64,
        /// The end of the memory below the hole for devices.
        end: u64,
    },
    /// The kernel's command line is too long.
    #[error("the kernel's command line has {got} bytes, at most {max}")]
    Cmdline {
        /// Its length.
        got: usize,
        /// The most.
        max: usize,
    },
    /// Guest memory cannot be written where something fixed belongs.
    #[error("guest memory cannot be written")]
    Write {
        /// Why not.
        source: vm_memory::GuestMemoryError,
    },
}

impl Classify for KernelError {
    fn kind(&self) -> Kind {
        match self {
            KernelError::Read { source } if source.kind() == io::ErrorKind::NotFound => Kind::NotFound,
            KernelError::Read { source } if source.kind() == io::ErrorKind::PermissionDenied => Kind::Denied,
            KernelError::Read { .. } | KernelError::Write { .. } => Kind::Internal,
            _ => Kind::Invalid,
        }
    }
}

/// Where a kernel starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Entry {
    /// In 64-bit mode with a zero page (boot protocol of Linux, "64-bit boot protocol").
    Long(u64),
    /// In 32-bit mode with PVH's start information (Xen's "x86/HVM direct boot ABI").
    Pvh(u64),
}

/// A kernel that lies in guest memory.
#[derive(Debug)]
pub(super) struct Loaded {
    /// Where it starts.
    pub entry: Entry,
    /// The first address that it does not need.
    pub end: u64,
    /// The header that it came with (bzImage).
    pub header: Option<setup_header>,
}

/// Loads the kernel at `path`.
pub(super) fn load(memory: &Memory, low_end: u64, path: &Path) -> Result<Loaded, KernelError> {
    let read = |source| KernelError::Read { source };
    let mut file = File::open(path).map_err(read)?;
    let length = file.metadata().map_err(read)?.len();
    let mut head = [0; 64];
    let got = read_some(&file, &mut head).map_err(read)?;
    if head.starts_with(b"\x7fELF") && got == head.len() {
        load_elf(memory, low_end, &mut file, length, &head)
    } else {
        load_bzimage(memory, low_end, &mut file, length)
    }
}

/// Reads the first bytes of a file, as many as there are.
fn read_some(file: &File, data: &mut [u8]) -> io::Result<usize> {
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
) -> Result<Loaded, KernelError> {
    let header = ElfHeader::parse(head)?;
    let mut table = vec![0; header.segments * Segment::SIZE];
    file.read_exact_at(&mut table, header.table).map_err(|source| KernelError::Read { source })?;
    let segments: Vec<Segment> = table.chunks_exact(Segment::SIZE).filter_map(Segment::parse).collect();
    let end = check_segments(&segments, low_end, length)?;
    let loaded = Elf::load(memory, None, file, None).map_err(|source| KernelError::Loader { source })?;
    let within = |address: u64| segments.iter().any(|segment| segment.runs(address));
    let entry = match loaded.pvh_boot_cap {
        _ if within(header.entry) => Entry::Long(header.entry),
        PvhBootCapability::PvhEntryPresent(address) if within(address.0) => Entry::Pvh(address.0),
        _ => return Err(KernelError::Entry),
    };
    Ok(Loaded { entry, end, header: None })
}

/// What we use of an ELF header: "ELF-64 Object File Format", figure 2.
struct ElfHeader {
    entry: u64,
    table: u64,
    segments: usize,
}

impl ElfHeader {
    fn parse(head: &[u8; 64]) -> Result<ElfHeader, KernelError> {
        let broken = |what| KernelError::Elf { what };
        let word = |at: usize| u16_at(head, at).ok_or(broken("no header"));
        const CLASS_64_LITTLE: [u8; 2] = [2, 1];
        const X86_64: u16 = 62;
        if head.get(4..6) != Some(&CLASS_64_LITTLE) || word(18)? != X86_64 {
            return Err(KernelError::Format);
        }
        let segments = usize::from(word(56)?);
        if usize::from(word(54)?) != Segment::SIZE {
            return Err(broken("its program headers have an unknown size"));
        }
        if !(1..=MAX_SEGMENTS).contains(&segments) {
            return Err(broken("no or too many segments"));
        }
        let long = |at: usize| u64_at(head, at).ok_or(broken("no header"));
        Ok(ElfHeader { entry: long(24)?, table: long(32)?, segments })
    }
}

/// What we use of a program header: "ELF-64 Object File Format", figure 6.
#[derive(Clone, Debug, Default)]
struct Segment {
    kind: u32,
    offset: u64,
    address: u64,
    in_file: u64,
    in_memory: u64,
}

impl Segment {
    const SIZE: usize = 56;
    const LOAD: u32 = 1;
    const NOTE: u32 = 4;

    fn parse(bytes: &[u8]) -> Option<Segment> {
        Some(Segment {
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

    /// Does the byte at `address` come from this segment of the file?
    fn runs(&self, address: u64) -> bool {
        self.kind == Segment::LOAD && address.checked_sub(self.address).is_some_and(|offset| offset < self.in_file)
    }
}

/// Segments must lie in the file, in low memory above 1 MiB, and beside each other. The end of the last one.
fn check_segments(segments: &[Segment], low_end: u64, file_length: u64) -> Result<u64, KernelError> {
    let broken = |what| KernelError::Elf { what };
    let mut ranges = Vec::new();
    for segment in segments.iter().filter(|segment| matches!(segment.kind, Segment::LOAD | Segment::NOTE)) {
        let end = segment.offset.checked_add(segment.in_file);
        if end.is_none_or(|end| end > file_length) {
            return Err(broken("a segment lies beyond the end of the file"));
        }
        if segment.kind == Segment::NOTE {
            if segment.in_file > MAX_NOTES {
                return Err(broken("too many notes"));
            }
            continue;
        }
        if segment.in_file > segment.in_memory {
            return Err(broken("a segment is longer in the file than in memory"));
        }
        let range = segment.range().ok_or(broken("a segment has no end"))?;
        if range.start < HIGH {
            return Err(broken("a segment lies below 1 MiB"));
        }
        if range.end > low_end {
            return Err(KernelError::Memory { needs: range.end, end: low_end });
        }
        ranges.push((range.start, range.end));
    }
    ranges.sort_unstable();
    if ranges.iter().zip(ranges.iter().skip(1)).any(|(one, next)| one.1 > next.0) {
        return Err(broken("segments overlap"));
    }
    ranges.last().map(|last| last.1).ok_or(broken("nothing to load"))
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

/// A bzImage unpacks itself: it goes to 1 MiB and needs room where it wants to run.
fn load_bzimage(memory: &Memory, low_end: u64, file: &mut File, length: u64) -> Result<Loaded, KernelError> {
    const MAGIC: &[u8] = b"HdrS";
    let mut magic = [0; 4];
    if length < 1024 || file.read_exact_at(&mut magic, 0x202).is_err() || magic != MAGIC {
        return Err(KernelError::Format);
    }
    match HIGH.checked_add(length) {
        Some(needs) if needs > low_end => return Err(KernelError::Memory { needs, end: low_end }),
        None => return Err(KernelError::Format),
        Some(_) => {}
    }
    let loaded =
        BzImage::load(memory, Some(GuestAddress(HIGH)), file, None).map_err(|source| KernelError::Loader { source })?;
    let header = loaded.setup_header.ok_or(KernelError::Format)?;
    /// "2.12: xloadflags", and its bit for a 64-bit entry at 0x200.
    const VERSION_WITH_FLAGS: u16 = 0x20c;
    const HAS_64_BIT_ENTRY: u16 = 1;
    if header.version < VERSION_WITH_FLAGS || header.xloadflags & HAS_64_BIT_ENTRY == 0 {
        return Err(KernelError::Entry);
    }
    let runs_at = header.pref_address.max(HIGH);
    let needs = runs_at.checked_add(u64::from(header.init_size)).ok_or(KernelError::Format)?.max(loaded.kernel_end);
    if needs > low_end {
        return Err(KernelError::Memory { needs, end: low_end });
    }
    Ok(Loaded { entry: Entry::Long(HIGH + BZ_IMAGE_ENTRY), end: needs, header: Some(header) })
}

/// Reads the initial file system at `path` into memory above `kernel_end`; its address and size.
pub(super) fn load_initrd(
    memory: &Memory,
    memory_mib: u32,
    kernel: &Loaded,
    path: &Path,
) -> Result<(u64, u64), KernelError> {
    let read = |source| KernelError::Read { source };
    let mut file = File::open(path).map_err(read)?;
    let size = file.metadata().map_err(read)?.len();
    let limit = kernel.header.map_or(u64::from(u32::MAX), |header| u64::from(header.initrd_addr_max));
    let no_room = KernelError::Memory { needs: kernel.end.saturating_add(size), end: layout::low_end(memory_mib) };
    let Some(address) = layout::initrd_address(memory_mib, limit, kernel.end, size) else { return Err(no_room) };
    let count = usize::try_from(size).map_err(|_huge| no_room)?;
    memory
        .read_exact_volatile_from(GuestAddress(address), &mut file, count)
        .map_err(|source| KernelError::Write { source })?;
    Ok((address, size))
}
