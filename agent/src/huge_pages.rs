//! Makes the guest's kernel reserve as many huge pages as the limits of all containers allow together, besides those that it reserved
//! at boot (Documentation/admin-guide/mm/hugetlbpage.rst of Linux).
//!
//! There is one change at a time; it blocks while the kernel moves pages.

use nacelle_base::{Chain, Classify, FailureKind};
use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use crate::memory::{self, MIN_AVAILABLE};

/// The directory with a directory for each huge page size that the kernel supports.
const POOLS_DIRECTORY: &str = "/sys/kernel/mm/hugepages";
/// Writing to this file makes the kernel compact free memory.
const COMPACT_FILE: &str = "/proc/sys/vm/compact_memory";

/// The limits of one container in bytes, by page size as cgroups name it ("2MB").
pub type HugePageLimits = BTreeMap<String, u64>;

/// Reasons a container does not get its huge pages.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the fields are what the message prints")]
pub enum HugePagesError {
    #[error("the guest has no huge pages of {size:?}; it has those of {available_sizes}")]
    Size { size: String, available_sizes: String },
    #[error(
        "cannot reserve {count} more huge pages of {size}: only {available} bytes of the guest's memory are not in use, and \
         {MIN_AVAILABLE} must remain; give the pod more memory"
    )]
    Short { size: String, count: u64, available: u64 },
    #[error(
        "cannot reserve {count} more huge pages of {size}: the guest has contiguous memory for only {allocated}; give the pod more memory"
    )]
    Pieces { size: String, count: u64, allocated: u64 },
    #[error("cannot use {}", path.display())]
    Io { path: PathBuf, source: io::Error },
}

impl Classify for HugePagesError {
    fn kind(&self) -> FailureKind {
        match self {
            HugePagesError::Size { .. } => FailureKind::Unsupported,
            HugePagesError::Short { .. } | HugePagesError::Pieces { .. } => FailureKind::Exhausted,
            HugePagesError::Io { .. } => FailureKind::Internal,
        }
    }
}

/// The huge pages of the guest, by the containers for which they are reserved.
#[derive(Debug)]
pub struct HugePages {
    /// `None` on the node, whose huge pages are not changed.
    files: Option<KernelFiles>,
    reserved: Mutex<Reservations>,
}

#[derive(Debug, Default)]
struct Reservations {
    containers: HashMap<String, HugePageLimits>,
    /// Pages of each size that belong to no container: those reserved before the first container had any.
    base_counts: BTreeMap<String, u64>,
}

#[derive(Debug)]
struct KernelFiles {
    pools: PathBuf,
    meminfo: PathBuf,
    compact: PathBuf,
}

impl HugePages {
    /// The huge pages of the guest whose first process this is.
    pub fn of_guest() -> HugePages {
        let files = KernelFiles {
            pools: POOLS_DIRECTORY.into(),
            meminfo: memory::MEMINFO.into(),
            compact: COMPACT_FILE.into(),
        };
        HugePages { files: Some(files), reserved: Mutex::default() }
    }

    /// The huge pages of the node, which are not changed: only the containers' cgroups limit them.
    pub fn of_node() -> HugePages {
        HugePages { files: None, reserved: Mutex::default() }
    }

    /// Reserves as many pages for a container as these limits allow, and returns the limits that undo the change. Other sizes stay
    /// unchanged. If there are not enough pages, nothing changes. A limit of 0 for a size of which the container has no pages is no
    /// change, whether the guest has that size or not.
    pub fn set_limits(&self, container: &str, limits: &HugePageLimits) -> Result<HugePageLimits, HugePagesError> {
        let mut reserved = self.reserved.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(files) = &self.files else { return Ok(HugePageLimits::new()) };
        let mut after = reserved.containers.get(container).cloned().unwrap_or_default();
        let changes = limits.iter().filter(|(size, bytes)| **bytes > 0 || after.contains_key(*size));
        let changes: HugePageLimits = changes.map(|(size, bytes)| (size.clone(), *bytes)).collect();
        let before = |size: &String| (size.clone(), after.get(size).copied().unwrap_or(0));
        let before = changes.keys().map(before).collect();
        if !changes.is_empty() {
            after.extend(changes.clone());
            files.replace_limits(&mut reserved, container, after, changes.keys())?;
        }
        Ok(before)
    }

    /// Releases all pages of a container. Pages that are still used in a volume are freed when the volume ends.
    pub fn release(&self, container: &str) -> Result<(), HugePagesError> {
        let mut reserved = self.reserved.lock().unwrap_or_else(PoisonError::into_inner);
        let (Some(files), Some(before)) = (&self.files, reserved.containers.get(container).cloned()) else {
            return Ok(());
        };
        files.replace_limits(&mut reserved, container, HugePageLimits::new(), before.keys())
    }
}

impl KernelFiles {
    /// Replaces the limits of a container. They may differ from the present ones in `sizes` only.
    fn replace_limits<'a>(
        &self,
        reserved: &mut Reservations,
        container: &str,
        after: HugePageLimits,
        sizes: impl Iterator<Item = &'a String>,
    ) -> Result<(), HugePagesError> {
        let mut pools = Vec::new();
        for size in sizes {
            pools.push(self.find_pool(size)?);
        }
        for Pool { size, directory, .. } in &pools {
            if !reserved.base_counts.contains_key(size) {
                reserved.base_counts.insert(size.clone(), count_reserved(directory)?);
            }
        }
        let before = reserved.containers.insert(container.to_owned(), after);
        let mut changed = Ok(());
        for pool in &pools {
            changed = self.reserve(pool, reserved.count_wanted(pool));
            if changed.is_err() {
                break;
            }
        }
        if changed.is_err() {
            match before {
                Some(before) => drop(reserved.containers.insert(container.to_owned(), before)),
                None => drop(reserved.containers.remove(container)),
            }
            for pool in &pools {
                if let Err(error) = self.reserve(pool, reserved.count_wanted(pool)) {
                    tracing::warn!(size = pool.size, "cannot restore the number of huge pages: {}", Chain(&error));
                }
            }
        } else if reserved.containers.get(container).is_some_and(|limits| limits.values().all(|bytes| *bytes == 0)) {
            reserved.containers.remove(container);
        }
        changed
    }

    /// Returns the kernel's pool of a size.
    fn find_pool(&self, size: &str) -> Result<Pool, HugePagesError> {
        let found = self.list_pools().into_iter().find(|pool| pool.size == size);
        found.ok_or_else(|| {
            let available_sizes: Vec<String> = self.list_pools().into_iter().map(|pool| pool.size).collect();
            let available_sizes =
                if available_sizes.is_empty() { "no size".to_owned() } else { available_sizes.join(" and ") };
            HugePagesError::Size { size: size.chars().take(20).collect(), available_sizes }
        })
    }

    fn list_pools(&self) -> Vec<Pool> {
        list_pools(&self.pools)
    }

    /// Makes the kernel reserve `wanted` pages of a size. The kernel reserves as many as it can.
    fn reserve(&self, pool: &Pool, wanted: u64) -> Result<(), HugePagesError> {
        let before = count_reserved(&pool.directory)?;
        let path = pool.directory.join("nr_hugepages");
        let write = |count: u64| {
            memory::write_once(&path, &count.to_string())
                .map_err(|source| HugePagesError::Io { path: path.clone(), source })
        };
        let Some(count) = wanted.checked_sub(before).filter(|count| *count > 0) else {
            return if wanted == before { Ok(()) } else { write(wanted) };
        };
        let size = || pool.size.clone();
        let available = memory::read_available(&self.meminfo)
            .map_err(|source| HugePagesError::Io { path: self.meminfo.clone(), source })?;
        if available < count.saturating_mul(pool.bytes).saturating_add(MIN_AVAILABLE) {
            return Err(HugePagesError::Short { size: size(), count, available });
        }
        write(wanted)?;
        if count_reserved(&pool.directory)? < wanted {
            // If compaction fails, the number of reserved pages shows it.
            let _ = memory::write_once(&self.compact, "1");
            write(wanted)?;
        }
        let allocated = count_reserved(&pool.directory)?.saturating_sub(before);
        if allocated < count { Err(HugePagesError::Pieces { size: size(), count, allocated }) } else { Ok(()) }
    }
}

/// The kernel's pool of huge pages of one size.
#[derive(Debug)]
struct Pool {
    /// The size as cgroups name it.
    size: String,
    bytes: u64,
    directory: PathBuf,
}

impl Reservations {
    /// Returns how many pages of a size must be reserved.
    fn count_wanted(&self, pool: &Pool) -> u64 {
        let of = |limits: &HugePageLimits| limits.get(&pool.size).map_or(0, |bytes| bytes / pool.bytes);
        let all = self.containers.values().map(of).fold(0u64, u64::saturating_add);
        all.saturating_add(self.base_counts.get(&pool.size).copied().unwrap_or(0))
    }
}

fn list_pools(directory: &Path) -> Vec<Pool> {
    let pool = |entry: fs::DirEntry| {
        let name = entry.file_name();
        let kib = name.to_str()?.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse().ok()?;
        Some(Pool { size: cgroup_size_name(kib), bytes: kib.checked_mul(1024)?, directory: entry.path() })
    };
    let mut pools: Vec<Pool> = fs::read_dir(directory).into_iter().flatten().flatten().filter_map(pool).collect();
    pools.sort_by_key(|pool| pool.bytes);
    pools
}

/// Returns the huge page sizes that this kernel, the guest's or the node's, supports.
pub fn list_sizes() -> Vec<String> {
    list_pools(Path::new(POOLS_DIRECTORY)).into_iter().map(|pool| pool.size).collect()
}

/// Returns the name of a size in the names of cgroup files (`mem_fmt` in mm/hugetlb_cgroup.c).
fn cgroup_size_name(kib: u64) -> String {
    match kib {
        kib if kib >= 1 << 20 => format!("{}GB", kib >> 20),
        kib if kib >= 1 << 10 => format!("{}MB", kib >> 10),
        kib => format!("{kib}KB"),
    }
}

/// Returns the reserved pages of a pool. Surplus pages are not counted: the kernel frees them when they are no longer used.
fn count_reserved(directory: &Path) -> Result<u64, HugePagesError> {
    let read = |name: &str| {
        let path = directory.join(name);
        let parse = |text: String| {
            text.trim().parse::<u64>().map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
        };
        fs::read_to_string(&path).and_then(parse).map_err(|source| HugePagesError::Io { path, source })
    };
    Ok(read("nr_hugepages")?.saturating_sub(read("surplus_hugepages")?))
}

/// Picks the huge page limits out of cgroup files and their values. "max" is no limit.
pub fn limits_from_files<'a>(files: impl IntoIterator<Item = (&'a str, &'a str)>) -> HugePageLimits {
    let limit = |(file, value): (&'a str, &'a str)| {
        let size = file.strip_prefix("hugetlb.")?.strip_suffix(".max").filter(|size| !size.contains('.'))?;
        Some((size.to_owned(), value.parse().ok()?))
    };
    files.into_iter().filter_map(limit).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Fake {
        directory: tempfile::TempDir,
        pages: HugePages,
    }

    impl Fake {
        fn new(available_kib: u64) -> Fake {
            let directory = tempfile::tempdir().unwrap();
            for (kib, there) in [(2048, "3"), (1_048_576, "0")] {
                let pool = directory.path().join(format!("hugepages-{kib}kB"));
                fs::create_dir(&pool).unwrap();
                fs::write(pool.join("nr_hugepages"), there).unwrap();
                fs::write(pool.join("surplus_hugepages"), "0").unwrap();
            }
            let (meminfo, compact) = (directory.path().join("meminfo"), directory.path().join("compact"));
            fs::write(&meminfo, format!("MemTotal:  9 kB\nMemAvailable:  {available_kib} kB\n")).unwrap();
            fs::write(&compact, "").unwrap();
            let files = KernelFiles { pools: directory.path().to_owned(), meminfo, compact };
            Fake { directory, pages: HugePages { files: Some(files), reserved: Mutex::default() } }
        }

        fn file(&self, name: &str) -> PathBuf {
            self.directory.path().join("hugepages-2048kB").join(name)
        }

        fn now(&self) -> u64 {
            count_reserved(&self.directory.path().join("hugepages-2048kB")).unwrap()
        }

        fn set(&self, container: &str, mib: u64) -> Result<HugePageLimits, HugePagesError> {
            self.pages.set_limits(container, &HugePageLimits::from([("2MB".to_owned(), mib << 20)]))
        }
    }

    #[test]
    fn huge_pages_are_the_sum_of_all_limits_and_the_initial_ones() {
        let fake = Fake::new(1 << 20);
        assert_eq!(fake.set("a", 8).unwrap(), HugePageLimits::from([("2MB".into(), 0)]));
        assert_eq!(fake.now(), 3 + 4);
        // A limit below one page allows none.
        fake.set("b", 5).unwrap();
        assert_eq!(fake.now(), 3 + 4 + 2);
        assert_eq!(fake.set("a", 2).unwrap(), HugePageLimits::from([("2MB".into(), 8 << 20)]));
        assert_eq!(fake.now(), 3 + 1 + 2);
        fake.pages.release("a").unwrap();
        fake.pages.release("a").unwrap();
        assert_eq!(fake.now(), 3 + 2);
        fake.set("b", 0).unwrap();
        assert_eq!(fake.now(), 3);
        // A limit of 0 for sizes of which it has no pages.
        assert_eq!(
            fake.pages.set_limits("b", &HugePageLimits::from([("64KB".into(), 0), ("2MB".into(), 0)])).unwrap(),
            HugePageLimits::new()
        );
        assert!(fake.pages.reserved.lock().unwrap().containers.is_empty());
    }

    #[test]
    fn a_missing_page_size_changes_nothing() {
        let fake = Fake::new((64 << 10) + (MIN_AVAILABLE >> 10));
        fake.set("a", 64).unwrap();
        let error = fake.set("b", 66).unwrap_err();
        assert!(matches!(error, HugePagesError::Short { count: 33, .. }), "{error}");
        assert_eq!((error.kind(), fake.now()), (FailureKind::Exhausted, 3 + 32));
        for bytes in [u64::MAX, u64::MAX - 1] {
            let limits = HugePageLimits::from([("2MB".to_owned(), bytes)]);
            assert_eq!(fake.pages.set_limits("b", &limits).unwrap_err().kind(), FailureKind::Exhausted);
        }
        // One of two sizes is not available.
        let both = HugePageLimits::from([("2MB".to_owned(), 8 << 20), ("1GB".to_owned(), 1 << 30)]);
        assert_eq!(fake.pages.set_limits("b", &both).unwrap_err().kind(), FailureKind::Exhausted);
        assert_eq!(fake.now(), 3 + 32);
        let error = fake.pages.set_limits("b", &HugePageLimits::from([("64KB".to_owned(), 1 << 20)])).unwrap_err();
        assert!(error.kind() == FailureKind::Unsupported && error.to_string().contains("2MB and 1GB"), "{error}");
        let error = fake.pages.set_limits("b", &HugePageLimits::from([("2MB/../x".to_owned(), 1)])).unwrap_err();
        assert_eq!(error.kind(), FailureKind::Unsupported);
    }

    #[test]
    fn a_partial_allocation_is_retried_after_compaction() {
        let fake = Fake::new(1 << 20);
        // The file takes the number, but two of the pages are surplus.
        fs::write(fake.file("surplus_hugepages"), "2").unwrap();
        let error = fake.set("a", 8).unwrap_err();
        assert!(matches!(error, HugePagesError::Pieces { count: 4, allocated: 2, .. }), "{error}");
        assert_eq!(error.kind(), FailureKind::Exhausted);
        assert_eq!(fs::read_to_string(fake.directory.path().join("compact")).unwrap(), "1");
        assert!(fake.pages.reserved.lock().unwrap().containers.is_empty());
    }

    #[test]
    fn page_sizes_have_their_cgroup_names() {
        for (kib, name) in [(64, "64KB"), (2048, "2MB"), (32 << 10, "32MB"), (1 << 20, "1GB")] {
            assert_eq!(cgroup_size_name(kib), name);
        }
        let files = [("hugetlb.2MB.max", "4194304"), ("hugetlb.1GB.max", "max"), ("hugetlb.2MB.rsvd.max", "1")];
        let base_counts = [("memory.max", "1"), ("hugetlb.2MB.events", "2")];
        assert_eq!(
            limits_from_files(files.into_iter().chain(base_counts)),
            HugePageLimits::from([("2MB".into(), 4 << 20)])
        );
    }

    #[test]
    fn the_nodes_huge_pages_are_not_changed() {
        let pages = HugePages::of_node();
        assert_eq!(
            pages.set_limits("a", &HugePageLimits::from([("2MB".into(), 1 << 21)])).unwrap(),
            HugePageLimits::new()
        );
        pages.release("a").unwrap();
    }
}
