//! Writes the metadata of a tree as an uncompressed EROFS whose files point into the layers' blobs. On the block device of a
//! guest the blobs follow the metadata. Every block address counts from the start of that device, and the device table contains
//! the start of each blob, so that the same metadata can also be mounted with the blobs as separate devices. The same tree always
//! gives the same bytes.

use crate::budget::{Budget, BudgetError, heap_bytes};
use crate::layer::BLOCK;
use crate::layer::index::{DeviceNumber, FileData};
use crate::tree::{Ino, Inode, InodeContent, MergedTree};
use nacelle_model::digest::Digest;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

const BLOCK_SIZE: usize = BLOCK as usize;
const MAGIC: u32 = 0xe0f5_e1e2;
const SUPERBLOCK_OFFSET: usize = 1024;
/// Slots of the device table have the superblock's size and follow it.
const DEVICE_SLOT_SIZE: usize = 128;
const FIRST_DEVICE_SLOT: usize = (SUPERBLOCK_OFFSET + DEVICE_SLOT_SIZE) / DEVICE_SLOT_SIZE;
const COMPAT_MTIME: u32 = 2;
const INCOMPAT_CHUNKED: u32 = 4;
const INCOMPAT_DEVICES: u32 = 8;
const HOLE: u32 = u32::MAX;
/// The maximum size of the metadata in bytes.
pub const MAX_METADATA: usize = 512 << 20;
/// The alignment of inodes in bytes; an inode's number is its offset in this unit.
const INODE_UNIT: usize = 32;
const INODE_SIZE: usize = 64;
const DIRENT_SIZE: usize = 12;
/// The memory in bytes that `MetadataLayout::inode_places` uses for an inode: an eleventh of a node of 280 bytes, or more where nodes are half
/// full.
const INODE_PLAN_BYTES: u64 = 64;
/// The memory in bytes that a name in a directory's blocks takes: in lists that may be half empty, and in the sorted list that
/// they are cut from.
const NAME_PLAN_BYTES: u64 = 3 * 32;

/// A blob as the metadata refer to it.
#[derive(Clone, Copy, Debug)]
pub struct LayerBlob {
    /// The tag of the blob's slot in the device table.
    pub diff_id: Digest,
    /// The length in bytes, a multiple of `BLOCK`.
    pub length: u64,
}

/// Reasons that a tree cannot be written.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
pub enum ErofsError {
    /// Metadata and blobs have more than 2^32 blocks.
    #[error("the image is larger than 16 TiB")]
    Oversize,
    /// There are too many files, names, attributes or holes.
    #[error("the image's metadata are larger than 512 MiB")]
    MetadataTooLarge,
    /// A file has more names than the format can count.
    #[error("a file has too many names")]
    TooManyLinks,
    /// The metadata exceed the budget.
    #[error("the metadata of the image cannot be built")]
    Budget(#[from] BudgetError),
}

/// The metadata, and the layers (by number, lowest first) whose blobs must follow them in this order.
#[derive(Debug)]
pub struct ErofsMetadata {
    /// The bytes, a multiple of `BLOCK` long.
    pub bytes: Vec<u8>,
    /// The layers in use.
    pub used: Vec<usize>,
}

/// Writes a tree over these blobs, one per layer.
pub fn write_erofs(tree: &MergedTree, blobs: &[LayerBlob], budget: &mut Budget) -> Result<ErofsMetadata, ErofsError> {
    let layout = MetadataLayout::new(tree, blobs, budget)?;
    budget.charge(u64::from(layout.blocks) * BLOCK)?;
    let mut out = vec![0; layout.blocks as usize * BLOCK_SIZE];
    layout.write_superblock(&mut out, blobs);
    for placed in &layout.inodes {
        budget.step(1)?;
        layout.write_inode(&mut out, placed)?;
    }
    Ok(ErofsMetadata { bytes: out, used: layout.first_blocks.keys().copied().collect() })
}

/// The layout of the metadata, computed before a byte is written.
struct MetadataLayout<'t> {
    /// The inodes in the order of their offsets; the root is the first.
    inodes: Vec<PlacedInode<'t>>,
    /// The offset in bytes and the number of links of each inode in use.
    inode_places: BTreeMap<Ino, (usize, u32)>,
    /// The number of blocks of the metadata.
    blocks: u32,
    /// The first block of each blob in use.
    first_blocks: BTreeMap<usize, u32>,
}

struct PlacedInode<'t> {
    ino: Ino,
    inode: &'t Inode,
    /// The content in the metadata: a directory's entries, a link's target, or the chunks of a file.
    content: MetadataContent<'t>,
    /// The bytes of the extended attributes that follow the inode.
    xattrs: Vec<u8>,
    /// The inode's offset in bytes.
    at: usize,
    /// The first block of content that has blocks of its own.
    block: u32,
}

enum MetadataContent<'t> {
    None,
    /// Names, inodes and kinds of a directory's entries, sorted and cut into blocks, and the length of all.
    Directory {
        blocks: Vec<Vec<(&'t [u8], Ino, u8)>>,
        length: usize,
    },
    Symlink(&'t [u8]),
    Chunks {
        count: usize,
        chunks: &'t [(u32, u32)],
    },
}

impl MetadataContent<'_> {
    /// The bytes that may follow the inode directly or be in blocks of their own.
    fn data_length(&self) -> usize {
        match self {
            MetadataContent::Directory { length, .. } => *length,
            MetadataContent::Symlink(target) => target.len(),
            MetadataContent::None | MetadataContent::Chunks { .. } => 0,
        }
    }
}

impl PlacedInode<'_> {
    /// Returns whether the content follows the inode directly. The kernel requires both in one block then.
    fn is_inline(&self) -> bool {
        let data_length = self.content.data_length();
        data_length > 0 && INODE_SIZE + self.xattrs.len() + data_length <= BLOCK_SIZE
    }
}

impl<'t> MetadataLayout<'t> {
    fn new(tree: &'t MergedTree, blobs: &[LayerBlob], budget: &mut Budget) -> Result<Self, ErofsError> {
        let mut layout = MetadataLayout {
            inodes: Vec::new(),
            inode_places: BTreeMap::new(),
            blocks: 0,
            first_blocks: BTreeMap::new(),
        };
        layout.collect_inodes(tree, budget)?;
        for placed in &layout.inodes {
            if let InodeContent::File { layer, data } = &placed.inode.body
                && data.has_stored_bytes()
            {
                layout.first_blocks.insert(*layer, 0);
            }
        }
        let mut at = (FIRST_DEVICE_SLOT + layout.first_blocks.len()) * DEVICE_SLOT_SIZE;
        at = at.next_multiple_of(BLOCK_SIZE);
        for placed in &mut layout.inodes {
            let inline_length =
                INODE_SIZE + placed.xattrs.len() + if placed.is_inline() { placed.content.data_length() } else { 0 };
            let in_block = at % BLOCK_SIZE;
            if in_block + inline_length > BLOCK_SIZE && inline_length <= BLOCK_SIZE {
                at += BLOCK_SIZE - in_block;
            }
            placed.at = at;
            if let Some(place) = layout.inode_places.get_mut(&placed.ino) {
                place.0 = at;
            }
            at += inline_length;
            if let MetadataContent::Chunks { count, .. } = placed.content {
                at = at.next_multiple_of(4) + count * 4;
            }
            at = at.next_multiple_of(INODE_UNIT);
            if at > MAX_METADATA {
                return Err(ErofsError::MetadataTooLarge);
            }
        }
        let mut blocks = at.div_ceil(BLOCK_SIZE);
        for placed in layout.inodes.iter_mut().filter(|placed| !placed.is_inline()) {
            placed.block = u32::try_from(blocks).map_err(|_cause| ErofsError::Oversize)?;
            blocks += placed.content.data_length().div_ceil(BLOCK_SIZE);
        }
        if blocks > MAX_METADATA / BLOCK_SIZE {
            return Err(ErofsError::MetadataTooLarge);
        }
        let mut next = u32::try_from(blocks).map_err(|_cause| ErofsError::Oversize)?;
        layout.blocks = next;
        for (layer, first) in &mut layout.first_blocks {
            *first = next;
            let length = blobs.get(*layer).map_or(0, |blob| blob.length / BLOCK);
            next =
                u32::try_from(length).ok().and_then(|length| next.checked_add(length)).ok_or(ErofsError::Oversize)?;
        }
        if next == HOLE { Err(ErofsError::Oversize) } else { Ok(layout) }
    }

    /// Lists the inodes in use, directories before their entries, and counts their links.
    fn collect_inodes(&mut self, tree: &'t MergedTree, budget: &mut Budget) -> Result<(), BudgetError> {
        let mut todo = vec![(0, 0)];
        self.inode_places.insert(0, (0, 2));
        while let Some((ino, parent)) = todo.pop() {
            let Some(inode) = tree.inodes.get(ino) else { continue };
            charge_inode(inode, budget)?;
            let mut below = Vec::new();
            let content = match &inode.body {
                InodeContent::Directory(children) => {
                    for &child in children.values() {
                        let directory =
                            matches!(tree.inodes.get(child).map(|inode| &inode.body), Some(InodeContent::Directory(_)));
                        if let Some((_, names)) = self.inode_places.get_mut(&child) {
                            *names = names.saturating_add(1);
                            continue;
                        }
                        self.inode_places.insert(child, (0, if directory { 2 } else { 1 }));
                        if let Some((_, names)) = self.inode_places.get_mut(&ino).filter(|_| directory) {
                            *names = names.saturating_add(1);
                        }
                        below.push((child, ino));
                    }
                    layout_directory(tree, children, ino, parent)
                }
                InodeContent::Symlink(target) => MetadataContent::Symlink(target),
                InodeContent::File { data: FileData::Chunks { size, bits, chunks }, .. } => {
                    let count = size.div_ceil(BLOCK << bits);
                    MetadataContent::Chunks { count: usize::try_from(count).unwrap_or(usize::MAX), chunks }
                }
                _ => MetadataContent::None,
            };
            self.inodes.push(PlacedInode { ino, inode, content, xattrs: encode_xattrs(inode), at: 0, block: 0 });
            todo.extend(below.into_iter().rev());
        }
        Ok(())
    }

    fn write_superblock(&self, out: &mut [u8], blobs: &[LayerBlob]) {
        let used = u16::try_from(self.first_blocks.len()).unwrap_or(u16::MAX); // Images have at most 1000 layers.
        let chunked = self.inodes.iter().any(|placed| matches!(placed.content, MetadataContent::Chunks { .. }));
        let incompat = if chunked { INCOMPAT_CHUNKED } else { 0 } | if used > 0 { INCOMPAT_DEVICES } else { 0 };
        let meta_block = ((FIRST_DEVICE_SLOT + self.first_blocks.len()) * DEVICE_SLOT_SIZE).div_ceil(BLOCK_SIZE);
        let root = self.nid(0, meta_block);
        let mut sb = FieldWriter { out, at: SUPERBLOCK_OFFSET };
        sb.u32(MAGIC);
        sb.u32(0); // checksum: not used
        sb.u32(COMPAT_MTIME);
        sb.bytes(&[12, 0]); // log2 of the block size; no extension slots
        sb.u16(u16::try_from(root).unwrap_or(0)); // The root is the first inode.
        sb.u64(self.inodes.len() as u64);
        sb.u64(0); // time of building
        sb.u32(0);
        sb.u32(self.blocks);
        sb.u32(meta_block as u32);
        sb.u32(0); // no shared attributes
        sb.bytes(&[0; 32]); // UUID and name
        sb.u32(incompat);
        sb.u16(0);
        sb.u16(used);
        sb.u16(FIRST_DEVICE_SLOT as u16);
        for (slot, (layer, first)) in self.first_blocks.iter().enumerate() {
            let Some(blob) = blobs.get(*layer) else { continue };
            let mut entry = FieldWriter { out: &mut *sb.out, at: (FIRST_DEVICE_SLOT + slot) * DEVICE_SLOT_SIZE };
            entry.bytes(blob.diff_id.hex().as_bytes());
            entry.u32(u32::try_from(blob.length / BLOCK).unwrap_or(u32::MAX)); // `new` has checked this.
            entry.u32(*first);
        }
    }

    fn meta_block(&self) -> usize {
        ((FIRST_DEVICE_SLOT + self.first_blocks.len()) * DEVICE_SLOT_SIZE).div_ceil(BLOCK_SIZE)
    }

    fn nid(&self, ino: Ino, meta_block: usize) -> u64 {
        let place = self.inode_places.get(&ino).map_or(0, |place| place.0);
        (place.saturating_sub(meta_block * BLOCK_SIZE) / INODE_UNIT) as u64
    }

    fn write_inode(&self, out: &mut [u8], placed: &PlacedInode) -> Result<(), ErofsError> {
        let meta = &placed.inode.meta;
        let names = self.inode_places.get(&placed.ino).map_or(1, |place| place.1);
        if names == u32::MAX {
            return Err(ErofsError::TooManyLinks);
        }
        let base = |layer: &usize| self.first_blocks.get(layer).copied().unwrap_or(0);
        let (kind, size, layout, value) = match (&placed.inode.body, &placed.content) {
            (InodeContent::Directory(_), _) => (0o040_000, placed.content.data_length() as u64, 0, placed.block),
            (InodeContent::Symlink(target), _) => (0o120_000, target.len() as u64, 0, placed.block),
            (InodeContent::File { data: FileData::Chunks { size, bits, .. }, .. }, _) => {
                (0o100_000, *size, 4, u32::from(*bits))
            }
            (InodeContent::File { layer, data: FileData::Flat { size, block } }, _) => {
                (0o100_000, *size, 0, if *size > 0 { base(layer) + block } else { 0 })
            }
            (InodeContent::Char(device), _) => (0o020_000, 0, 0, encode_device_number(*device)),
            (InodeContent::Block(device), _) => (0o060_000, 0, 0, encode_device_number(*device)),
            (InodeContent::Fifo, _) => (0o010_000, 0, 0, 0),
        };
        let layout = if placed.is_inline() { 2 } else { layout };
        let xattr_count = if placed.xattrs.is_empty() { 0 } else { (placed.xattrs.len() - 12) / 4 + 1 };
        let mut field = FieldWriter { out, at: placed.at };
        field.u16(1 | layout << 1); // the long form of inodes
        field.u16(u16::try_from(xattr_count).unwrap_or(0)); // At most 128 KiB.
        field.u16(kind | meta.mode);
        field.u16(0);
        field.u64(size);
        field.u32(if placed.is_inline() { 0 } else { value });
        field.u32(u32::try_from(self.nid(placed.ino, self.meta_block())).unwrap_or(0)); // for 32-bit stat only
        field.u32(meta.uid);
        field.u32(meta.gid);
        field.bytes(&meta.mtime.to_le_bytes());
        field.u32(meta.nanos);
        field.u32(names);
        field.at += 16;
        field.bytes(&placed.xattrs);
        let after = field.at;
        let content_at = if placed.is_inline() { after } else { placed.block as usize * BLOCK_SIZE };
        match &placed.content {
            MetadataContent::None => {}
            MetadataContent::Symlink(target) => FieldWriter { out, at: content_at }.bytes(target),
            MetadataContent::Directory { blocks, .. } => self.write_directory(out, content_at, blocks),
            MetadataContent::Chunks { count, chunks, .. } => {
                let InodeContent::File { layer, .. } = &placed.inode.body else { return Ok(()) };
                let mut field = FieldWriter { out, at: after.next_multiple_of(4) };
                let mut chunks = chunks.iter().peekable();
                for number in 0..*count {
                    let stored = chunks.next_if(|chunk| chunk.0 as usize == number);
                    field.u32(stored.map_or(HOLE, |chunk| base(layer) + chunk.1));
                }
            }
        }
        Ok(())
    }

    fn write_directory(&self, out: &mut [u8], at: usize, blocks: &[Vec<(&[u8], Ino, u8)>]) {
        let meta_block = self.meta_block();
        for (number, block) in blocks.iter().enumerate() {
            let start = at + number * BLOCK_SIZE;
            let mut entry = FieldWriter { out, at: start };
            let mut name_at = block.len() * DIRENT_SIZE;
            for (name, ino, kind) in block {
                entry.u64(self.nid(*ino, meta_block));
                entry.u16(u16::try_from(name_at).unwrap_or(0)); // Less than a block.
                entry.bytes(&[*kind, 0]);
                FieldWriter { out: &mut *entry.out, at: start + name_at }.bytes(name);
                name_at += name.len();
            }
        }
    }
}

/// Charges the memory of an inode in the plan, and the steps for it: its place, the copy of its attributes, and twice the names
/// of a directory, which are in the list of inodes to be placed and in the directory's blocks.
fn charge_inode(inode: &Inode, budget: &mut Budget) -> Result<(), BudgetError> {
    let names = if let InodeContent::Directory(children) = &inode.body { children.len() + 2 } else { 0 };
    budget.step(1 + names as u64)?;
    let xattrs = inode.meta.xattrs.iter().map(|(name, value)| name.len() + value.len() + 8).sum::<usize>();
    let of_names = names as u64 * (NAME_PLAN_BYTES + size_of::<(Ino, Ino)>() as u64);
    budget.charge(size_of::<PlacedInode>() as u64 + INODE_PLAN_BYTES + heap_bytes(12 + 2 * xattrs) + of_names)
}

/// Returns a directory's entries with `.` and `..`, sorted by their bytes and cut into blocks.
fn layout_directory<'t>(
    tree: &'t MergedTree,
    children: &'t BTreeMap<Vec<u8>, Ino>,
    ino: Ino,
    parent: Ino,
) -> MetadataContent<'t> {
    let mut entries: Vec<(&[u8], Ino, u8)> = vec![(b".", ino, 2), (b"..", parent, 2)];
    entries.extend(children.iter().map(|(name, &child)| {
        (name.as_slice(), child, tree.inodes.get(child).map_or(0, |inode| dirent_type(&inode.body)))
    }));
    entries.sort_by_key(|entry| entry.0);
    let mut blocks: Vec<Vec<_>> = Vec::new();
    let mut length = BLOCK_SIZE;
    let mut full = 0;
    for entry in entries {
        let size = DIRENT_SIZE + entry.0.len();
        if length + size > BLOCK_SIZE {
            full = blocks.len() * BLOCK_SIZE;
            blocks.push(Vec::new());
            length = 0;
        }
        length += size;
        if let Some(block) = blocks.last_mut() {
            block.push(entry);
        }
    }
    MetadataContent::Directory { blocks, length: full + length }
}

fn dirent_type(body: &InodeContent) -> u8 {
    match body {
        InodeContent::File { .. } => 1,
        InodeContent::Directory(_) => 2,
        InodeContent::Char(_) => 3,
        InodeContent::Block(_) => 4,
        InodeContent::Fifo => 5,
        InodeContent::Symlink(_) => 7,
    }
}

/// Encodes a device number in Linux' on-disk form.
fn encode_device_number(device: DeviceNumber) -> u32 {
    device.minor & 0xff | device.major << 8 | (device.minor & !0xff) << 12
}

/// Encodes the extended attributes that follow an inode: a header of 12 bytes, then each attribute, aligned to 4.
fn encode_xattrs(inode: &Inode) -> Vec<u8> {
    if inode.meta.xattrs.is_empty() {
        return Vec::new();
    }
    let mut out = vec![0; 12];
    for (name, value) in &inode.meta.xattrs {
        let known: [(u8, &[u8]); 5] = [
            (1, b"user."),
            (2, b"system.posix_acl_access"),
            (3, b"system.posix_acl_default"),
            (4, b"trusted."),
            (6, b"security."),
        ];
        let Some((index, suffix)) = known.iter().find_map(|(index, p)| Some((*index, name.strip_prefix(*p)?))) else {
            continue; // The layer rejects all other prefixes.
        };
        // The layer's `clean_xattrs` has checked both lengths.
        let (Ok(name_len), Ok(value_len)) = (u8::try_from(suffix.len()), u16::try_from(value.len())) else { continue };
        out.extend_from_slice(&[name_len, index]);
        out.extend_from_slice(&value_len.to_le_bytes());
        out.extend_from_slice(suffix);
        out.extend_from_slice(value);
        out.resize(out.len().next_multiple_of(4), 0);
    }
    out
}

/// Writes numbers one after the other. The plan has reserved the bytes for all of them.
struct FieldWriter<'o> {
    out: &'o mut [u8],
    at: usize,
}

impl FieldWriter<'_> {
    fn bytes(&mut self, bytes: &[u8]) {
        if let Some(place) = self.out.get_mut(self.at..self.at + bytes.len()) {
            place.copy_from_slice(bytes);
        }
        self.at += bytes.len();
    }

    fn u16(&mut self, value: u16) {
        self.bytes(&value.to_le_bytes());
    }

    fn u32(&mut self, value: u32) {
        self.bytes(&value.to_le_bytes());
    }

    fn u64(&mut self, value: u64) {
        self.bytes(&value.to_le_bytes());
    }
}

#[cfg(test)]
#[path = "erofs_tests.rs"]
mod tests;
