//! Checks that the node's pool of huge pages is large enough for one more VM.

use nacelle_base::{Classify, FailureKind};
use std::path::Path;

/// The directory of the node's pools in sysfs.
const POOLS: &str = "/sys/kernel/mm/hugepages";
/// The size of the default huge pages in MiB.
pub const PAGE_MIB: u64 = 2;
/// The size of the largest huge pages in MiB.
pub const LARGEST_MIB: u64 = 1024;

/// The pool is too small.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "a VM with {mib} MiB in huge pages needs {needed} pages of {page} MiB, and the node has {free} free: write a \
     larger number to {POOLS}/hugepages-{}kB/nr_hugepages, or set memory_pages of its handler to \"transparent\"", page * 1024
)]
pub struct HugepagesExhausted {
    /// The VM's memory in MiB.
    pub mib: u64,
    /// The page size in MiB.
    pub page: u64,
    /// The number of pages that the VM takes.
    pub needed: u64,
    /// The number of pages that are available.
    pub free: u64,
}

impl Classify for HugepagesExhausted {
    fn kind(&self) -> FailureKind {
        FailureKind::Exhausted
    }
}

/// Checks that a VM with this much memory in pages of this size could start now. Another VM may take the pages first; the start
/// reports that.
pub fn check(mib: u64, page: u64) -> Result<(), HugepagesExhausted> {
    check_in(&Path::new(POOLS).join(format!("hugepages-{}kB", page * 1024)), mib, page)
}

fn check_in(pool: &Path, mib: u64, page: u64) -> Result<(), HugepagesExhausted> {
    let (needed, free) = (mib.div_ceil(page), free(pool));
    if needed <= free { Ok(()) } else { Err(HugepagesExhausted { mib, page, needed, free }) }
}

/// Returns the number of unreserved pages, including those that Linux may allocate beyond the pool; 0 on a node without huge
/// pages.
fn free(pool: &Path) -> u64 {
    let read = |name: &str| {
        let text = std::fs::read_to_string(pool.join(name)).unwrap_or_default();
        text.trim().parse::<u64>().unwrap_or(0)
    };
    let more = read("nr_overcommit_hugepages").saturating_sub(read("surplus_hugepages"));
    read("free_hugepages").saturating_sub(read("resv_hugepages")).saturating_add(more)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reserved_pages_are_not_free_and_overcommit_pages_are() {
        let pool = tempfile::tempdir().unwrap();
        let numbers = [("free", 100), ("resv", 40), ("nr_overcommit", 9), ("surplus", 5)];
        for (name, number) in numbers {
            std::fs::write(pool.path().join(format!("{name}_hugepages")), format!("{number}\n")).unwrap();
        }
        assert_eq!(check_in(pool.path(), 128, PAGE_MIB), Ok(()));
        let error = check_in(pool.path(), 130, PAGE_MIB).unwrap_err();
        assert_eq!((error.needed, error.free, error.kind()), (65, 64, FailureKind::Exhausted));
        for words in ["65", "has 64 free", "nr_hugepages", "memory_pages"] {
            assert!(error.to_string().contains(words), "{error}");
        }
        assert_eq!(check_in(pool.path(), 64 << 10, LARGEST_MIB), Ok(()));
        let none = HugepagesExhausted { mib: 2048, page: 1024, needed: 2, free: 0 };
        assert_eq!(check_in(Path::new("/nowhere"), 2048, LARGEST_MIB), Err(none.clone()));
        assert!(none.to_string().contains("hugepages-1048576kB/nr_hugepages"), "{none}");
    }
}
