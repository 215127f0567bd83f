//! Writes the metadata of a tree as an uncompressed EROFS whose files point into the layers' blobs. On the block device of a
//! guest the blobs follow the metadata. Every block address counts from the start of that device, and the device table contains
//! the start of each blob, so that the same metadata can also be mounted with the blobs as separate devices. The same tree always
//! gives the same bytes.

use crate::budget::{Budget, BudgetError, heap};
use crate::layer::BLOCK;
use crate::layer::index::{Data, Device};
use crate::tree::{Body, Ino, Inode, Tree};
use nacelle_model::digest::Digest;
use std::collections::BTreeMap;

const BLOCK_LEN: usize = BLOCK as usize;
const MAGIC: u32 = 0xe0f5_e1e2;
const SUPER_AT: usize = 1024;
/// Slots of the device table have the superblock's size and follow it.
const SLOT: usize = 128;
const FIRST_SLOT: usize = (SUPER_AT + SLOT) / SLOT;
const COMPAT_MTIME: u32 = 2;
const INCOMPAT_CHUNKED: u32 = 4;
const INCOMPAT_DEVICES: u32 = 8;
const HOLE: u32 = u32::MAX;
/// The maximum size of the metadata in bytes.
const MAX_METADATA: usize = 512 << 20;
/// The alignment of inodes in bytes; an inode's number is its offset in this unit.
const UNIT: usize = 32;
const INODE: usize = 64;
const DIRENT: usize = 12;
/// The memory in bytes that `Plan::places` uses for an inode: an eleventh of a node of 280 bytes, or more where nodes are half
/// full.
const INODE_PLAN_BYTES: u64 = 64;
/// The memory in bytes that a name in a directory's blocks takes: in lists that may be half empty, and in the sorted list that
/// they are cut from.
const NAME_PLAN_BYTES: u64 = 3 * 32;

/// A blob as the metadata refer to it.
#[derive(Clone, Copy, Debug)]
pub struct Blob {
    /// The tag of the blob's slot in the device table.
    pub diff_id: Digest,
    /// The length in bytes, a multiple of `BLOCK`.
    pub length: u64,
}

/// Reasons that a tree cannot be written.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
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
pub struct Metadata {
    /// The bytes, a multiple of `BLOCK` long.
    pub bytes: Vec<u8>,
    /// The layers in use.
    pub used: Vec<usize>,
}

/// Writes a tree over these blobs, one per layer.
pub fn write(tree: &Tree, blobs: &[Blob], budget: &mut Budget) -> Result<Metadata, ErofsError> {
    let plan = Plan::new(tree, blobs, budget)?;
    budget.charge(u64::from(plan.blocks) * BLOCK)?;
    let mut out = vec![0; plan.blocks as usize * BLOCK_LEN];
    plan.superblock(&mut out, blobs);
    for placed in &plan.inodes {
        budget.step(1)?;
        plan.inode(&mut out, placed)?;
    }
    Ok(Metadata { bytes: out, used: plan.used.keys().copied().collect() })
}

/// The layout of the metadata, computed before a byte is written.
struct Plan<'t> {
    /// The inodes in the order of their offsets; the root is the first.
    inodes: Vec<Placed<'t>>,
    /// The offset in bytes and the number of links of each inode in use.
    places: BTreeMap<Ino, (usize, u32)>,
    /// The number of blocks of the metadata.
    blocks: u32,
    /// The first block of each blob in use.
    used: BTreeMap<usize, u32>,
}

struct Placed<'t> {
    ino: Ino,
    inode: &'t Inode,
    /// The content in the metadata: a directory's entries, a link's target, or the chunks of a file.
    content: Content<'t>,
    /// The bytes of the extended attributes that follow the inode.
    xattrs: Vec<u8>,
    /// The inode's offset in bytes.
    at: usize,
    /// The first block of content that has blocks of its own.
    block: u32,
}

enum Content<'t> {
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

impl Content<'_> {
    /// The bytes that may follow the inode directly or be in blocks of their own.
    fn movable(&self) -> usize {
        match self {
            Content::Directory { length, .. } => *length,
            Content::Symlink(target) => target.len(),
            Content::None | Content::Chunks { .. } => 0,
        }
    }
}

impl Placed<'_> {
    /// Returns whether the content follows the inode directly. The kernel requires both in one block then.
    fn inline(&self) -> bool {
        let movable = self.content.movable();
        movable > 0 && INODE + self.xattrs.len() + movable <= BLOCK_LEN
    }
}

impl<'t> Plan<'t> {
    fn new(tree: &'t Tree, blobs: &[Blob], budget: &mut Budget) -> Result<Self, ErofsError> {
        let mut plan = Plan { inodes: Vec::new(), places: BTreeMap::new(), blocks: 0, used: BTreeMap::new() };
        plan.collect(tree, budget)?;
        for placed in &plan.inodes {
            if let Body::File { layer, data } = &placed.inode.body
                && data.stored()
            {
                plan.used.insert(*layer, 0);
            }
        }
        let mut at = (FIRST_SLOT + plan.used.len()) * SLOT;
        at = at.next_multiple_of(BLOCK_LEN);
        for placed in &mut plan.inodes {
            let together = INODE + placed.xattrs.len() + if placed.inline() { placed.content.movable() } else { 0 };
            let in_block = at % BLOCK_LEN;
            if in_block + together > BLOCK_LEN && together <= BLOCK_LEN {
                at += BLOCK_LEN - in_block;
            }
            placed.at = at;
            if let Some(place) = plan.places.get_mut(&placed.ino) {
                place.0 = at;
            }
            at += together;
            if let Content::Chunks { count, .. } = placed.content {
                at = at.next_multiple_of(4) + count * 4;
            }
            at = at.next_multiple_of(UNIT);
            if at > MAX_METADATA {
                return Err(ErofsError::MetadataTooLarge);
            }
        }
        let mut blocks = at.div_ceil(BLOCK_LEN);
        for placed in plan.inodes.iter_mut().filter(|placed| !placed.inline()) {
            placed.block = u32::try_from(blocks).map_err(|_cause| ErofsError::Oversize)?;
            blocks += placed.content.movable().div_ceil(BLOCK_LEN);
        }
        if blocks > MAX_METADATA / BLOCK_LEN {
            return Err(ErofsError::MetadataTooLarge);
        }
        let mut next = u32::try_from(blocks).map_err(|_cause| ErofsError::Oversize)?;
        plan.blocks = next;
        for (layer, first) in &mut plan.used {
            *first = next;
            let length = blobs.get(*layer).map_or(0, |blob| blob.length / BLOCK);
            next =
                u32::try_from(length).ok().and_then(|length| next.checked_add(length)).ok_or(ErofsError::Oversize)?;
        }
        if next == HOLE { Err(ErofsError::Oversize) } else { Ok(plan) }
    }

    /// Lists the inodes in use, directories before their entries, and counts their links.
    fn collect(&mut self, tree: &'t Tree, budget: &mut Budget) -> Result<(), BudgetError> {
        let mut todo = vec![(0, 0)];
        self.places.insert(0, (0, 2));
        while let Some((ino, parent)) = todo.pop() {
            let Some(inode) = tree.inodes.get(ino) else { continue };
            charge(inode, budget)?;
            let mut below = Vec::new();
            let content = match &inode.body {
                Body::Directory(children) => {
                    for &child in children.values() {
                        let directory =
                            matches!(tree.inodes.get(child).map(|inode| &inode.body), Some(Body::Directory(_)));
                        if let Some((_, names)) = self.places.get_mut(&child) {
                            *names = names.saturating_add(1);
                            continue;
                        }
                        self.places.insert(child, (0, if directory { 2 } else { 1 }));
                        if let Some((_, names)) = self.places.get_mut(&ino).filter(|_| directory) {
                            *names = names.saturating_add(1);
                        }
                        below.push((child, ino));
                    }
                    directory_content(tree, children, ino, parent)
                }
                Body::Symlink(target) => Content::Symlink(target),
                Body::File { data: Data::Chunks { size, bits, chunks }, .. } => {
                    let count = size.div_ceil(BLOCK << bits);
                    Content::Chunks { count: usize::try_from(count).unwrap_or(usize::MAX), chunks }
                }
                _ => Content::None,
            };
            self.inodes.push(Placed { ino, inode, content, xattrs: xattr_bytes(inode), at: 0, block: 0 });
            todo.extend(below.into_iter().rev());
        }
        Ok(())
    }

    fn superblock(&self, out: &mut [u8], blobs: &[Blob]) {
        let used = u16::try_from(self.used.len()).unwrap_or(u16::MAX); // Images have at most 1000 layers.
        let chunked = self.inodes.iter().any(|placed| matches!(placed.content, Content::Chunks { .. }));
        let incompat = if chunked { INCOMPAT_CHUNKED } else { 0 } | if used > 0 { INCOMPAT_DEVICES } else { 0 };
        let meta_block = ((FIRST_SLOT + self.used.len()) * SLOT).div_ceil(BLOCK_LEN);
        let root = self.nid(0, meta_block);
        let mut sb = Field { out, at: SUPER_AT };
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
        sb.u16(FIRST_SLOT as u16);
        for (slot, (layer, first)) in self.used.iter().enumerate() {
            let Some(blob) = blobs.get(*layer) else { continue };
            let mut entry = Field { out: &mut *sb.out, at: (FIRST_SLOT + slot) * SLOT };
            entry.bytes(blob.diff_id.hex().as_bytes());
            entry.u32(u32::try_from(blob.length / BLOCK).unwrap_or(u32::MAX)); // `new` has checked this.
            entry.u32(*first);
        }
    }

    fn meta_block(&self) -> usize {
        ((FIRST_SLOT + self.used.len()) * SLOT).div_ceil(BLOCK_LEN)
    }

    fn nid(&self, ino: Ino, meta_block: usize) -> u64 {
        let place = self.places.get(&ino).map_or(0, |place| place.0);
        (place.saturating_sub(meta_block * BLOCK_LEN) / UNIT) as u64
    }

    fn inode(&self, out: &mut [u8], placed: &Placed) -> Result<(), ErofsError> {
        let meta = &placed.inode.meta;
        let names = self.places.get(&placed.ino).map_or(1, |place| place.1);
        if names == u32::MAX {
            return Err(ErofsError::TooManyLinks);
        }
        let base = |layer: &usize| self.used.get(layer).copied().unwrap_or(0);
        let (kind, size, layout, value) = match (&placed.inode.body, &placed.content) {
            (Body::Directory(_), _) => (0o040_000, placed.content.movable() as u64, 0, placed.block),
            (Body::Symlink(target), _) => (0o120_000, target.len() as u64, 0, placed.block),
            (Body::File { data: Data::Chunks { size, bits, .. }, .. }, _) => (0o100_000, *size, 4, u32::from(*bits)),
            (Body::File { layer, data: Data::Flat { size, block } }, _) => {
                (0o100_000, *size, 0, if *size > 0 { base(layer) + block } else { 0 })
            }
            (Body::Char(device), _) => (0o020_000, 0, 0, device_number(*device)),
            (Body::Block(device), _) => (0o060_000, 0, 0, device_number(*device)),
            (Body::Fifo, _) => (0o010_000, 0, 0, 0),
        };
        let layout = if placed.inline() { 2 } else { layout };
        let xattr_count = if placed.xattrs.is_empty() { 0 } else { (placed.xattrs.len() - 12) / 4 + 1 };
        let mut field = Field { out, at: placed.at };
        field.u16(1 | layout << 1); // the long form of inodes
        field.u16(u16::try_from(xattr_count).unwrap_or(0)); // At most 128 KiB.
        field.u16(kind | meta.mode);
        field.u16(0);
        field.u64(size);
        field.u32(if placed.inline() { 0 } else { value });
        field.u32(u32::try_from(self.nid(placed.ino, self.meta_block())).unwrap_or(0)); // for 32-bit stat only
        field.u32(meta.uid);
        field.u32(meta.gid);
        field.bytes(&meta.mtime.to_le_bytes());
        field.u32(meta.nanos);
        field.u32(names);
        field.at += 16;
        field.bytes(&placed.xattrs);
        let after = field.at;
        let content_at = if placed.inline() { after } else { placed.block as usize * BLOCK_LEN };
        match &placed.content {
            Content::None => {}
            Content::Symlink(target) => Field { out, at: content_at }.bytes(target),
            Content::Directory { blocks, .. } => self.directory(out, content_at, blocks),
            Content::Chunks { count, chunks, .. } => {
                let Body::File { layer, .. } = &placed.inode.body else { return Ok(()) };
                let mut field = Field { out, at: after.next_multiple_of(4) };
                let mut chunks = chunks.iter().peekable();
                for number in 0..*count {
                    let stored = chunks.next_if(|chunk| chunk.0 as usize == number);
                    field.u32(stored.map_or(HOLE, |chunk| base(layer) + chunk.1));
                }
            }
        }
        Ok(())
    }

    fn directory(&self, out: &mut [u8], at: usize, blocks: &[Vec<(&[u8], Ino, u8)>]) {
        let meta_block = self.meta_block();
        for (number, block) in blocks.iter().enumerate() {
            let start = at + number * BLOCK_LEN;
            let mut entry = Field { out, at: start };
            let mut name_at = block.len() * DIRENT;
            for (name, ino, kind) in block {
                entry.u64(self.nid(*ino, meta_block));
                entry.u16(u16::try_from(name_at).unwrap_or(0)); // Less than a block.
                entry.bytes(&[*kind, 0]);
                Field { out: &mut *entry.out, at: start + name_at }.bytes(name);
                name_at += name.len();
            }
        }
    }
}

/// Charges the memory of an inode in the plan, and the steps for it: its place, the copy of its attributes, and twice the names
/// of a directory, which are in the list of inodes to be placed and in the directory's blocks.
fn charge(inode: &Inode, budget: &mut Budget) -> Result<(), BudgetError> {
    let names = if let Body::Directory(children) = &inode.body { children.len() + 2 } else { 0 };
    budget.step(1 + names as u64)?;
    let xattrs = inode.meta.xattrs.iter().map(|(name, value)| name.len() + value.len() + 8).sum::<usize>();
    let of_names = names as u64 * (NAME_PLAN_BYTES + size_of::<(Ino, Ino)>() as u64);
    budget.charge(size_of::<Placed>() as u64 + INODE_PLAN_BYTES + heap(12 + 2 * xattrs) + of_names)
}

/// Returns a directory's entries with `.` and `..`, sorted by their bytes and cut into blocks.
fn directory_content<'t>(tree: &'t Tree, children: &'t BTreeMap<Vec<u8>, Ino>, ino: Ino, parent: Ino) -> Content<'t> {
    let mut entries: Vec<(&[u8], Ino, u8)> = vec![(b".", ino, 2), (b"..", parent, 2)];
    entries.extend(children.iter().map(|(name, &child)| {
        (name.as_slice(), child, tree.inodes.get(child).map_or(0, |inode| kind_number(&inode.body)))
    }));
    entries.sort_by_key(|entry| entry.0);
    let mut blocks: Vec<Vec<_>> = Vec::new();
    let mut length = BLOCK_LEN;
    let mut full = 0;
    for entry in entries {
        let size = DIRENT + entry.0.len();
        if length + size > BLOCK_LEN {
            full = blocks.len() * BLOCK_LEN;
            blocks.push(Vec::new());
            length = 0;
        }
        length += size;
        if let Some(block) = blocks.last_mut() {
            block.push(entry);
        }
    }
    Content::Directory { blocks, length: full + length }
}

fn kind_number(body: &Body) -> u8 {
    match body {
        Body::File { .. } => 1,
        Body::Directory(_) => 2,
        Body::Char(_) => 3,
        Body::Block(_) => 4,
        Body::Fifo => 5,
        Body::Symlink(_) => 7,
    }
}

/// Encodes a device number in Linux' on-disk form.
fn device_number(device: Device) -> u32 {
    device.minor & 0xff | device.major << 8 | (device.minor & !0xff) << 12
}

/// Encodes the extended attributes that follow an inode: a header of 12 bytes, then each attribute, aligned to 4.
fn xattr_bytes(inode: &Inode) -> Vec<u8> {
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
struct Field<'o> {
    out: &'o mut [u8],
    at: usize,
}

impl Field<'_> {
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
