//! Owns: whether the node's pool of huge pages has enough for one more machine.

use nacelle_base::{Classify, Kind};
use std::path::Path;

/// The node's pool of 2 MiB pages, in sysfs.
const POOL: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB";
/// The size of its pages, in MiB.
pub const PAGE_MIB: u64 = 2;

/// The pool is too small.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "a machine of {mib} MiB in huge pages takes {needed} of the node's pages of 2 MiB, and {free} are free: write a \
     larger number to /proc/sys/vm/nr_hugepages, or set memory_pages of its handler to \"transparent\""
)]
pub struct TooFew {
    /// The machine's memory.
    pub mib: u64,
    /// The pages that it takes.
    pub needed: u64,
    /// The pages that it could have.
    pub free: u64,
}

impl Classify for TooFew {
    fn kind(&self) -> Kind {
        Kind::Exhausted
    }
}

/// Whether a machine with so much memory could start now. Others may be quicker: its start says so then.
pub fn check(mib: u64) -> Result<(), TooFew> {
    check_in(Path::new(POOL), mib)
}

fn check_in(pool: &Path, mib: u64) -> Result<(), TooFew> {
    let (needed, free) = (mib.div_ceil(PAGE_MIB), free(pool));
    if needed <= free { Ok(()) } else { Err(TooFew { mib, needed, free }) }
}

/// Pages that are promised to nobody, with those that Linux may make beyond the pool. A node that does not know of
/// huge pages has none.
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
    fn what_is_promised_is_not_free_and_what_may_be_made_is() {
        let pool = tempfile::tempdir().unwrap();
        let numbers = [("free", 100), ("resv", 40), ("nr_overcommit", 9), ("surplus", 5)];
        for (name, number) in numbers {
            std::fs::write(pool.path().join(format!("{name}_hugepages")), format!("{number}\n")).unwrap();
        }
        assert_eq!(check_in(pool.path(), 128), Ok(()));
        let error = check_in(pool.path(), 130).unwrap_err();
        assert_eq!((error.needed, error.free, error.kind()), (65, 64, Kind::Exhausted));
        for words in ["65", "64 are free", "nr_hugepages", "memory_pages"] {
            assert!(error.to_string().contains(words), "{error}");
        }
        assert_eq!(check_in(Path::new("/nowhere"), 64), Err(TooFew { mib: 64, needed: 32, free: 0 }));
    }
}
