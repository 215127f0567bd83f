//! Changes settings of the host for the duration of a section: pages in the hugetlb pool, transparent huge pages for shared
//! memory. Each is reset afterwards.

use crate::facts::chosen;
use crate::undo::{self, Guard};
use anyhow::{Context, bail};
use std::fs;
use std::path::{Path, PathBuf};

/// The pool of 2 MiB pages.
const POOL: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB";
const THP: &str = "/sys/kernel/mm/transparent_hugepage";

/// Adds this many 2 MiB pages to the pool, until the guard is dropped.
pub fn enlarge_pool(pages: u64) -> anyhow::Result<Guard> {
    enlarge(Path::new(POOL), pages)
}

fn enlarge(pool: &Path, pages: u64) -> anyhow::Result<Guard> {
    let read = |name: &str| -> anyhow::Result<u64> {
        let path = pool.join(name);
        let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        text.trim().parse().with_context(|| format!("{} is no number", path.display()))
    };
    let before = read("nr_hugepages")?;
    let guard = set(pool.join("nr_hugepages"), before.to_string(), &(before + pages).to_string())?;
    let free = read("free_hugepages")?.saturating_sub(read("resv_hugepages")?);
    if free < pages {
        bail!(
            "{free} pages of 2 MiB are free of the {pages} that are needed: the host's memory is too small or too scattered"
        );
    }
    Ok(guard)
}

/// Enables transparent huge pages for memory that asks for them (madvise), where they are disabled: for anonymous and for shared
/// memory.
pub fn allow_transparent() -> Vec<anyhow::Result<Guard>> {
    [("enabled", "madvise"), ("shmem_enabled", "advise")]
        .into_iter()
        .filter_map(|(name, wanted)| allow(&Path::new(THP).join(name), wanted))
        .collect()
}

/// Returns `None` if the setting is not `never`.
fn allow(path: &Path, wanted: &str) -> Option<anyhow::Result<Guard>> {
    let setting = fs::read_to_string(path).ok()?;
    (chosen(&setting) == "never").then(|| set(path.to_owned(), "never".to_owned(), wanted))
}

fn set(path: PathBuf, before: String, now: &str) -> anyhow::Result<Guard> {
    fs::write(&path, now).with_context(|| format!("cannot write {now} to {}", path.display()))?;
    Ok(undo::later(move || {
        if let Err(error) = fs::write(&path, &before) {
            eprintln!("{} stays as it was set for the measurement, not {before}: {error}", path.display());
        }
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_is_set_back_also_when_it_does_not_get_its_pages() {
        let directory = tempfile::tempdir().unwrap();
        let file = |name: &str| directory.path().join(name);
        for (name, pages) in [("nr_hugepages", "3\n"), ("free_hugepages", "3\n"), ("resv_hugepages", "1\n")] {
            fs::write(file(name), pages).unwrap();
        }
        let error = enlarge(directory.path(), 5).unwrap_err();
        assert!(error.to_string().contains("2 pages of 2 MiB are free of the 5"), "{error}");
        assert_eq!(fs::read_to_string(file("nr_hugepages")).unwrap(), "3");
        let guard = enlarge(directory.path(), 2).unwrap();
        assert_eq!(fs::read_to_string(file("nr_hugepages")).unwrap(), "5");
        drop(guard);
        assert_eq!(fs::read_to_string(file("nr_hugepages")).unwrap(), "3");
    }

    #[test]
    fn only_what_is_off_is_switched_on() {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), "always [madvise] never").unwrap();
        assert!(allow(file.path(), "madvise").is_none());
        fs::write(file.path(), "always madvise [never]").unwrap();
        let guard = allow(file.path(), "madvise").unwrap().unwrap();
        assert_eq!(fs::read_to_string(file.path()).unwrap(), "madvise");
        drop(guard);
        assert_eq!(fs::read_to_string(file.path()).unwrap(), "never");
    }
}
