//! Finds the pages of memory and files that are worth copying.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod set;

pub use set::{MAX_RUN_BYTES, PageSet};

use nix::errno::Errno;
use nix::unistd::{Whence, lseek};
use std::fs::File;
use std::ops::Range;

/// The size of a page in bytes.
pub const PAGE: usize = 4096;

/// Returns whether a file has any data in this range of bytes. A file system that does not report holes has data everywhere.
pub fn has_data(file: &File, range: Range<u64>) -> bool {
    let Ok(start) = i64::try_from(range.start) else { return true };
    match lseek(file, start, Whence::SeekData) {
        Ok(data) => u64::try_from(data).is_ok_and(|data| data < range.end),
        Err(Errno::ENXIO) => false,
        Err(_) => true,
    }
}

/// Returns the runs of pages that are wanted, each with its position in `bytes`. The closure gets the position of a page and its content.
pub fn runs_of_pages(
    bytes: &[u8],
    mut is_wanted: impl FnMut(usize, &[u8]) -> bool,
) -> impl Iterator<Item = (usize, &[u8])> {
    let mut pages = bytes.chunks(PAGE).enumerate().map(|(number, page)| (number * PAGE, page));
    std::iter::from_fn(move || {
        let (start, first) = pages.find(|(at, page)| is_wanted(*at, page))?;
        let mut end = start + first.len();
        for (at, page) in pages.by_ref() {
            if !is_wanted(at, page) {
                break;
            }
            end = at + page.len();
        }
        Some((start, bytes.get(start..end)?))
    })
}

/// Returns whether a page, or a part of one, has only zeros.
pub fn is_zero(page: &[u8]) -> bool {
    static ZEROS: [u8; PAGE] = [0; PAGE];
    ZEROS.get(..page.len()) == Some(page)
}
