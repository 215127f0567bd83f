//! Reads /proc/PID/pagemap, which says what is behind each page of a process (kernel's admin-guide/mm/pagemap).

use crate::pages::PAGE;
use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

const PAGEMAP: &str = "/proc/self/pagemap";
/// The size of an entry in bytes.
const ENTRY: usize = 8;
/// How many entries are read at a time: those of 32 MiB. The kernel looks at 2 MiB at a time.
const MAX_ENTRIES: usize = 16 * 512;
/// Bits of an entry: the page is in memory or in swap.
const IS_PRESENT_OR_SWAPPED: u64 = 0b11 << 62;
/// A bit of an entry: no other process has the page mapped. Not set for the page of zeros, which is there after a read.
const IS_EXCLUSIVE: u64 = 1 << 56;
/// A bit of an entry: the page is that of a file, or shared.
const IS_OF_FILE: u64 = 1 << 61;
/// A bit of an entry: the page is in swap.
const IS_SWAPPED: u64 = 1 << 62;
/// A bit of an entry: the page was written since the soft-dirty bits were cleared (kernel's admin-guide/mm/soft-dirty).
const IS_SOFT_DIRTY: u64 = 1 << 55;

/// What is behind a page of the process.
pub struct PageEntry(u64);

/// Opens the pagemap of this process without the rights to see page frame numbers, which help against the node's memory (row hammer): a
/// process that a guest has taken over may still have the file open. The kernel looks at the capabilities of the thread that opens it.
pub fn open() -> io::Result<File> {
    let sets = capabilities(None)?;
    set_capabilities(None, CapabilitySets { effective: CapabilitySet::empty(), ..sets })?;
    let opened = File::open(PAGEMAP);
    set_capabilities(None, sets)?;
    opened
}

impl PageEntry {
    /// Returns whether the page was touched.
    pub fn is_touched(&self) -> bool {
        self.0 & IS_PRESENT_OR_SWAPPED != 0
    }

    /// Returns whether the page belongs to private memory of the process and not to a file, or is the page of zeros. In a private mapping of
    /// a file, the content of all other pages is that of the file.
    pub fn is_private(&self) -> bool {
        self.is_touched() && self.0 & IS_OF_FILE == 0
    }

    /// Returns whether the page was written since the soft-dirty bits of the process were cleared.
    pub fn is_soft_dirty(&self) -> bool {
        self.0 & IS_SOFT_DIRTY != 0
    }

    /// Returns whether the process has written the page, and so has it for itself, in private memory that no child process shares. The kernel
    /// may deny it of a page that another process once shared, so what is to be saved is found with [`is_private`](PageEntry::is_private).
    pub fn is_own(&self) -> bool {
        self.0 & IS_OF_FILE == 0 && self.0 & (IS_EXCLUSIVE | IS_SWAPPED) != 0
    }
}

/// Calls `see` with the entry of each of `pages` pages from `address` on, as long as it returns `true`.
pub fn read(pagemap: &File, address: usize, pages: usize, mut see: impl FnMut(PageEntry) -> bool) -> io::Result<()> {
    let mut buffer = vec![0; pages.min(MAX_ENTRIES).saturating_mul(ENTRY)];
    let mut position = (address / PAGE).saturating_mul(ENTRY) as u64;
    let mut left = pages.saturating_mul(ENTRY);
    while left > 0 {
        let part = left.min(buffer.len());
        let entries = buffer.get_mut(..part).unwrap_or_default();
        pagemap.read_exact_at(entries, position)?;
        position = position.saturating_add(part as u64);
        left -= part;
        for entry in entries.chunks_exact(ENTRY) {
            if !see(PageEntry(entry.try_into().map_or(0, u64::from_le_bytes))) {
                return Ok(());
            }
        }
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    /// The part of an entry of a page in memory that is its page frame number.
    const FRAME: u64 = (1 << 55) - 1;

    #[test]
    fn an_open_pagemap_shows_no_page_frame_numbers() {
        let touched = vec![7u8; 4 * PAGE];
        let entry_in = |pagemap: &File| {
            let mut found = None;
            read(pagemap, touched.as_ptr().addr() + PAGE, 1, |PageEntry(entry)| {
                found = Some(entry);
                false
            })
            .unwrap();
            found.unwrap()
        };
        let before = capabilities(None).unwrap();
        let opened = open().unwrap();
        assert_eq!(capabilities(None).unwrap(), before);
        let entry = entry_in(&opened);
        assert!(PageEntry(entry).is_private() && entry & FRAME == 0, "{entry:#x}");
        // Otherwise the test shows nothing.
        if before.effective.contains(CapabilitySet::SYS_ADMIN) {
            assert_ne!(entry_in(&File::open(PAGEMAP).unwrap()) & FRAME, 0);
        }
    }
}
