//! Owns: the huge pages that the machine's kernel keeps: as many as the limits of the containers allow together, beside those
//! that it was started with (the kernel's Documentation/admin-guide/mm/hugetlbpage.rst).
//! May use: /sys and /proc of the guest, `memory`. Threads: one change at a time; blocks while the kernel moves pages.

use nacelle_base::{Chain, Classify, Kind};
use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use crate::memory::{self, MARGIN};

/// Where the kernel has a folder for each size that it knows.
const POOLS: &str = "/sys/kernel/mm/hugepages";
/// Has the kernel move pages until free memory is in few pieces.
const COMPACT: &str = "/proc/sys/vm/compact_memory";

/// Limits of one container: of each size, as control groups call it ("2MB"), so many bytes.
pub type Limits = BTreeMap<String, u64>;

/// Why a container cannot have its huge pages.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the fields are what the message prints")]
pub enum HugePagesError {
    #[error("the machine has no huge pages of {size:?}; it has those of {has}")]
    Size { size: String, has: String },
    #[error(
        "{count} more huge pages of {size}: {available} bytes of the machine's memory are not in use, of which {MARGIN} must be \
         left. Give the machine more memory"
    )]
    Short { size: String, count: u64, available: u64 },
    #[error(
        "{made} of {count} more huge pages of {size} is all that is in one piece of the machine's memory. Give it more memory"
    )]
    Pieces { size: String, count: u64, made: u64 },
    #[error("cannot use {}", path.display())]
    Io { path: PathBuf, source: io::Error },
}

impl Classify for HugePagesError {
    fn kind(&self) -> Kind {
        match self {
            HugePagesError::Size { .. } => Kind::Unsupported,
            HugePagesError::Short { .. } | HugePagesError::Pieces { .. } => Kind::Exhausted,
            HugePagesError::Io { .. } => Kind::Internal,
        }
    }
}

/// The huge pages of a machine, by the containers that have them.
#[derive(Debug)]
pub struct HugePages {
    /// None: there is no machine, and the node's are let alone.
    place: Option<Place>,
    given: Mutex<Given>,
}

#[derive(Debug, Default)]
struct Given {
    containers: HashMap<String, Limits>,
    /// Pages of each size that are no container's: those that were there before the first one had any.
    others: BTreeMap<String, u64>,
}

#[derive(Debug)]
struct Place {
    pools: PathBuf,
    meminfo: PathBuf,
    compact: PathBuf,
}

impl HugePages {
    /// Those of the machine whose first process this is.
    pub fn of_machine() -> HugePages {
        let place = Place { pools: POOLS.into(), meminfo: memory::MEMINFO.into(), compact: COMPACT.into() };
        HugePages { place: Some(place), given: Mutex::default() }
    }

    /// Those of the node, which are let alone: a container's limits are its control group's business.
    pub fn of_node() -> HugePages {
        HugePages { place: None, given: Mutex::default() }
    }

    /// Has the kernel keep as many pages for a container as these limits allow (other sizes stay as they are), and returns what
    /// takes that back. If there are not as many, all is as it was. None of a size that the container has none of is no change,
    /// whether there is such a size or not.
    pub fn set(&self, container: &str, limits: &Limits) -> Result<Limits, HugePagesError> {
        let mut given = self.given.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(place) = &self.place else { return Ok(Limits::new()) };
        let mut after = given.containers.get(container).cloned().unwrap_or_default();
        let changes = limits.iter().filter(|(size, bytes)| **bytes > 0 || after.contains_key(*size));
        let changes: Limits = changes.map(|(size, bytes)| (size.clone(), *bytes)).collect();
        let before = |size: &String| (size.clone(), after.get(size).copied().unwrap_or(0));
        let before = changes.keys().map(before).collect();
        if !changes.is_empty() {
            after.extend(changes.clone());
            place.change(&mut given, container, after, changes.keys())?;
        }
        Ok(before)
    }

    /// A container has none any more. What it left in use in a volume is given back when that goes.
    pub fn release(&self, container: &str) -> Result<(), HugePagesError> {
        let mut given = self.given.lock().unwrap_or_else(PoisonError::into_inner);
        let (Some(place), Some(before)) = (&self.place, given.containers.get(container).cloned()) else {
            return Ok(());
        };
        place.change(&mut given, container, Limits::new(), before.keys())
    }
}

impl Place {
    /// Gives a container these limits instead of those that it has, which differ in `sizes` at most.
    fn change<'a>(
        &self,
        given: &mut Given,
        container: &str,
        after: Limits,
        sizes: impl Iterator<Item = &'a String>,
    ) -> Result<(), HugePagesError> {
        let mut pools = Vec::new();
        for size in sizes {
            pools.push(self.pool(size)?);
        }
        for Pool { size, folder, .. } in &pools {
            if !given.others.contains_key(size) {
                given.others.insert(size.clone(), kept(folder)?);
            }
        }
        let before = given.containers.insert(container.to_owned(), after);
        let mut changed = Ok(());
        for pool in &pools {
            changed = self.keep(pool, given.wanted(pool));
            if changed.is_err() {
                break;
            }
        }
        if changed.is_err() {
            match before {
                Some(before) => drop(given.containers.insert(container.to_owned(), before)),
                None => drop(given.containers.remove(container)),
            }
            for pool in &pools {
                if let Err(error) = self.keep(pool, given.wanted(pool)) {
                    tracing::warn!(size = pool.size, "huge pages are not as they were: {}", Chain(&error));
                }
            }
        } else if given.containers.get(container).is_some_and(|limits| limits.values().all(|bytes| *bytes == 0)) {
            given.containers.remove(container);
        }
        changed
    }

    /// The kernel's pool of a size.
    fn pool(&self, size: &str) -> Result<Pool, HugePagesError> {
        let found = self.pools().into_iter().find(|pool| pool.size == size);
        found.ok_or_else(|| {
            let has: Vec<String> = self.pools().into_iter().map(|pool| pool.size).collect();
            let has = if has.is_empty() { "no size".to_owned() } else { has.join(" and ") };
            HugePagesError::Size { size: size.chars().take(20).collect(), has }
        })
    }

    fn pools(&self) -> Vec<Pool> {
        pools(&self.pools)
    }

    /// Has the kernel keep so many pages of a size. It makes what there is room for.
    fn keep(&self, pool: &Pool, wanted: u64) -> Result<(), HugePagesError> {
        let before = kept(&pool.folder)?;
        let path = pool.folder.join("nr_hugepages");
        let write = |count: u64| {
            memory::write(&path, &count.to_string()).map_err(|source| HugePagesError::Io { path: path.clone(), source })
        };
        let Some(count) = wanted.checked_sub(before).filter(|count| *count > 0) else {
            return if wanted == before { Ok(()) } else { write(wanted) };
        };
        let size = || pool.size.clone();
        let available = memory::available(&self.meminfo)
            .map_err(|source| HugePagesError::Io { path: self.meminfo.clone(), source })?;
        if available < count.saturating_mul(pool.bytes).saturating_add(MARGIN) {
            return Err(HugePagesError::Short { size: size(), count, available });
        }
        write(wanted)?;
        if kept(&pool.folder)? < wanted {
            // A kernel that cannot do it says what it has made all the same.
            let _ = memory::write(&self.compact, "1");
            write(wanted)?;
        }
        let made = kept(&pool.folder)?.saturating_sub(before);
        if made < count { Err(HugePagesError::Pieces { size: size(), count, made }) } else { Ok(()) }
    }
}

/// Huge pages of one size.
#[derive(Debug)]
struct Pool {
    /// As control groups call it.
    size: String,
    bytes: u64,
    folder: PathBuf,
}

impl Given {
    /// How many pages of a size there have to be.
    fn wanted(&self, pool: &Pool) -> u64 {
        let of = |limits: &Limits| limits.get(&pool.size).map_or(0, |bytes| bytes / pool.bytes);
        let all = self.containers.values().map(of).fold(0u64, u64::saturating_add);
        all.saturating_add(self.others.get(&pool.size).copied().unwrap_or(0))
    }
}

fn pools(folder: &Path) -> Vec<Pool> {
    let pool = |entry: fs::DirEntry| {
        let name = entry.file_name();
        let kib = name.to_str()?.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse().ok()?;
        Some(Pool { size: called(kib), bytes: kib.checked_mul(1024)?, folder: entry.path() })
    };
    let mut pools: Vec<Pool> = fs::read_dir(folder).into_iter().flatten().flatten().filter_map(pool).collect();
    pools.sort_by_key(|pool| pool.bytes);
    pools
}

/// The sizes that this kernel knows, be it the machine's or the node's.
pub fn sizes() -> Vec<String> {
    pools(Path::new(POOLS)).into_iter().map(|pool| pool.size).collect()
}

/// How a size is called in the names of files of control groups (`mem_fmt` in mm/hugetlb_cgroup.c).
fn called(kib: u64) -> String {
    match kib {
        kib if kib >= 1 << 20 => format!("{}GB", kib >> 20),
        kib if kib >= 1 << 10 => format!("{}MB", kib >> 10),
        kib => format!("{kib}KB"),
    }
}

/// The pages of a pool that stay; surplus ones go as soon as nobody uses them.
fn kept(folder: &Path) -> Result<u64, HugePagesError> {
    let read = |name: &str| {
        let path = folder.join(name);
        let parse = |text: String| {
            text.trim().parse::<u64>().map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
        };
        fs::read_to_string(&path).and_then(parse).map_err(|source| HugePagesError::Io { path, source })
    };
    Ok(read("nr_hugepages")?.saturating_sub(read("surplus_hugepages")?))
}

/// The limits of huge pages among these files of a control group and their values; "max" is none.
pub fn among<'a>(files: impl IntoIterator<Item = (&'a str, &'a str)>) -> Limits {
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
        folder: tempfile::TempDir,
        pages: HugePages,
    }

    impl Fake {
        fn new(available_kib: u64) -> Fake {
            let folder = tempfile::tempdir().unwrap();
            for (kib, there) in [(2048, "3"), (1_048_576, "0")] {
                let pool = folder.path().join(format!("hugepages-{kib}kB"));
                fs::create_dir(&pool).unwrap();
                fs::write(pool.join("nr_hugepages"), there).unwrap();
                fs::write(pool.join("surplus_hugepages"), "0").unwrap();
            }
            let (meminfo, compact) = (folder.path().join("meminfo"), folder.path().join("compact"));
            fs::write(&meminfo, format!("MemTotal:  9 kB\nMemAvailable:  {available_kib} kB\n")).unwrap();
            fs::write(&compact, "").unwrap();
            let place = Place { pools: folder.path().to_owned(), meminfo, compact };
            Fake { folder, pages: HugePages { place: Some(place), given: Mutex::default() } }
        }

        fn file(&self, name: &str) -> PathBuf {
            self.folder.path().join("hugepages-2048kB").join(name)
        }

        fn now(&self) -> u64 {
            kept(&self.folder.path().join("hugepages-2048kB")).unwrap()
        }

        fn set(&self, container: &str, mib: u64) -> Result<Limits, HugePagesError> {
            self.pages.set(container, &Limits::from([("2MB".to_owned(), mib << 20)]))
        }
    }

    #[test]
    fn there_are_as_many_as_all_containers_may_have_beside_those_of_before() {
        let fake = Fake::new(1 << 20);
        assert_eq!(fake.set("a", 8).unwrap(), Limits::from([("2MB".into(), 0)]));
        assert_eq!(fake.now(), 3 + 4);
        // Less than a page is none.
        fake.set("b", 5).unwrap();
        assert_eq!(fake.now(), 3 + 4 + 2);
        assert_eq!(fake.set("a", 2).unwrap(), Limits::from([("2MB".into(), 8 << 20)]));
        assert_eq!(fake.now(), 3 + 1 + 2);
        fake.pages.release("a").unwrap();
        fake.pages.release("a").unwrap();
        assert_eq!(fake.now(), 3 + 2);
        fake.set("b", 0).unwrap();
        assert_eq!(fake.now(), 3);
        // None of what there is none of.
        assert_eq!(fake.pages.set("b", &Limits::from([("64KB".into(), 0), ("2MB".into(), 0)])).unwrap(), Limits::new());
        assert!(fake.pages.given.lock().unwrap().containers.is_empty());
    }

    #[test]
    fn what_is_not_there_changes_nothing() {
        let fake = Fake::new((64 << 10) + (MARGIN >> 10));
        fake.set("a", 64).unwrap();
        let error = fake.set("b", 66).unwrap_err();
        assert!(matches!(error, HugePagesError::Short { count: 33, .. }), "{error}");
        assert_eq!((error.kind(), fake.now()), (Kind::Exhausted, 3 + 32));
        for bytes in [u64::MAX, u64::MAX - 1] {
            let limits = Limits::from([("2MB".to_owned(), bytes)]);
            assert_eq!(fake.pages.set("b", &limits).unwrap_err().kind(), Kind::Exhausted);
        }
        // Of two sizes one is not there.
        let both = Limits::from([("2MB".to_owned(), 8 << 20), ("1GB".to_owned(), 1 << 30)]);
        assert_eq!(fake.pages.set("b", &both).unwrap_err().kind(), Kind::Exhausted);
        assert_eq!(fake.now(), 3 + 32);
        let error = fake.pages.set("b", &Limits::from([("64KB".to_owned(), 1 << 20)])).unwrap_err();
        assert!(error.kind() == Kind::Unsupported && error.to_string().contains("2MB and 1GB"), "{error}");
        let error = fake.pages.set("b", &Limits::from([("2MB/../x".to_owned(), 1)])).unwrap_err();
        assert_eq!(error.kind(), Kind::Unsupported);
    }

    #[test]
    fn a_kernel_that_makes_fewer_is_asked_once_more_after_it_has_tidied_up() {
        let fake = Fake::new(1 << 20);
        // It takes the number, and two of the pages are such as it does not keep.
        fs::write(fake.file("surplus_hugepages"), "2").unwrap();
        let error = fake.set("a", 8).unwrap_err();
        assert!(matches!(error, HugePagesError::Pieces { count: 4, made: 2, .. }), "{error}");
        assert_eq!(error.kind(), Kind::Exhausted);
        assert_eq!(fs::read_to_string(fake.folder.path().join("compact")).unwrap(), "1");
        assert!(fake.pages.given.lock().unwrap().containers.is_empty());
    }

    #[test]
    fn sizes_are_called_as_control_groups_call_them() {
        for (kib, name) in [(64, "64KB"), (2048, "2MB"), (32 << 10, "32MB"), (1 << 20, "1GB")] {
            assert_eq!(called(kib), name);
        }
        let files = [("hugetlb.2MB.max", "4194304"), ("hugetlb.1GB.max", "max"), ("hugetlb.2MB.rsvd.max", "1")];
        let others = [("memory.max", "1"), ("hugetlb.2MB.events", "2")];
        assert_eq!(among(files.into_iter().chain(others)), Limits::from([("2MB".into(), 4 << 20)]));
    }

    #[test]
    fn the_nodes_are_let_alone() {
        let pages = HugePages::of_node();
        assert_eq!(pages.set("a", &Limits::from([("2MB".into(), 1 << 21)])).unwrap(), Limits::new());
        pages.release("a").unwrap();
    }
}
