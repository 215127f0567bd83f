//! Changes settings of the host for the duration of a section: pages in the hugetlb pool, transparent huge pages for shared
//! memory. Each is reset afterwards.

use crate::facts::selected_setting;
use crate::undo::{self, UndoGuard};
use anyhow::{Context, bail};
use std::fs;
use std::path::{Path, PathBuf};

/// The pool of 2 MiB pages.
const POOL: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB";
const THP: &str = "/sys/kernel/mm/transparent_hugepage";

/// Adds this many 2 MiB pages to the pool, until the guard is dropped.
pub fn enlarge_pool(pages: u64) -> anyhow::Result<UndoGuard> {
    enlarge_pool_in(Path::new(POOL), pages)
}

fn enlarge_pool_in(pool: &Path, pages: u64) -> anyhow::Result<UndoGuard> {
    let read = |name: &str| -> anyhow::Result<u64> {
        let path = pool.join(name);
        let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        text.trim().parse().with_context(|| format!("{} does not contain a number", path.display()))
    };
    let before = read("nr_hugepages")?;
    let guard = write_until_dropped(pool.join("nr_hugepages"), before.to_string(), &(before + pages).to_string())?;
    let free = read("free_hugepages")?.saturating_sub(read("resv_hugepages")?);
    if free < pages {
        bail!(
            "{free} pages of 2 MiB are free of the {pages} that are needed: the host's memory is too small or too fragmented"
        );
    }
    Ok(guard)
}

/// Enables transparent huge pages for memory that asks for them (madvise), where they are disabled: for anonymous and for shared
/// memory.
pub fn enable_transparent() -> Vec<anyhow::Result<UndoGuard>> {
    [("enabled", "madvise"), ("shmem_enabled", "advise")]
        .into_iter()
        .filter_map(|(name, wanted)| enable_if_never(&Path::new(THP).join(name), wanted))
        .collect()
}

/// Returns `None` if the setting is not `never`.
fn enable_if_never(path: &Path, wanted: &str) -> Option<anyhow::Result<UndoGuard>> {
    let setting = fs::read_to_string(path).ok()?;
    (selected_setting(&setting) == "never").then(|| write_until_dropped(path.to_owned(), "never".to_owned(), wanted))
}

fn write_until_dropped(path: PathBuf, before: String, value: &str) -> anyhow::Result<UndoGuard> {
    fs::write(&path, value).with_context(|| format!("cannot write {value} to {}", path.display()))?;
    Ok(undo::register(move || {
        if let Err(error) = fs::write(&path, &before) {
            eprintln!("cannot reset {} to {before}: {error}", path.display());
        }
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pool_is_reset_even_without_enough_pages() {
        let directory = tempfile::tempdir().unwrap();
        let file = |name: &str| directory.path().join(name);
        for (name, pages) in [("nr_hugepages", "3\n"), ("free_hugepages", "3\n"), ("resv_hugepages", "1\n")] {
            fs::write(file(name), pages).unwrap();
        }
        let error = enlarge_pool_in(directory.path(), 5).unwrap_err();
        assert!(error.to_string().contains("2 pages of 2 MiB are free of the 5"), "{error}");
        assert_eq!(fs::read_to_string(file("nr_hugepages")).unwrap(), "3");
        let guard = enlarge_pool_in(directory.path(), 2).unwrap();
        assert_eq!(fs::read_to_string(file("nr_hugepages")).unwrap(), "5");
        drop(guard);
        assert_eq!(fs::read_to_string(file("nr_hugepages")).unwrap(), "3");
    }

    #[test]
    fn only_a_disabled_setting_is_enabled() {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), "always [madvise] never").unwrap();
        assert!(enable_if_never(file.path(), "madvise").is_none());
        fs::write(file.path(), "always madvise [never]").unwrap();
        let guard = enable_if_never(file.path(), "madvise").unwrap().unwrap();
        assert_eq!(fs::read_to_string(file.path()).unwrap(), "madvise");
        drop(guard);
        assert_eq!(fs::read_to_string(file.path()).unwrap(), "never");
    }
}
