//! Enlarges the node's pool of huge pages for a test, and tests a VM that uses it.

use std::fs::{self, File};
use std::path::Path;
use std::time::{Duration, Instant};

use nacelle_base::machine::MemoryPages;
use nacelle_base::{Chain, Classify, FailureKind};
use nacelle_engine::contract::{TestVm, TestedEngine, lock_suite, spec};
use nacelle_engine::{EngineError, ExitKind};

use super::LONG;

const POOL: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB";
/// The number of huge pages of a VM of 128 MiB.
const NEEDED: u64 = 64;
/// More memory than any node has.
const TOO_MUCH_MIB: u32 = 64 << 20;

fn read(name: &str) -> Result<u64, String> {
    let path = Path::new(POOL).join(name);
    let text = fs::read_to_string(&path).map_err(|error| format!("{path:?}: {error}"))?;
    text.trim().parse().map_err(|error| format!("{path:?}: {error}"))
}

fn set(pages: u64) -> Result<(), String> {
    let path = Path::new(POOL).join("nr_hugepages");
    fs::write(&path, pages.to_string()).map_err(|error| format!("{path:?}: {error}"))
}

/// A pool with enough pages for a VM, restored on drop. Only one may exist on a node at a time.
struct Pool {
    before: u64,
    _lock: nix::fcntl::Flock<File>,
}

impl Pool {
    fn enlarge() -> Result<Pool, String> {
        let lock = File::open(POOL).map_err(|error| format!("{POOL}: {error}"))?;
        let lock = nix::fcntl::Flock::lock(lock, nix::fcntl::FlockArg::LockExclusive);
        let lock = lock.map_err(|(_, error)| error.to_string())?;
        let before = read("nr_hugepages")?;
        set(before + NEEDED)?;
        let pool = Pool { before, _lock: lock };
        match read("free_hugepages")? >= read("resv_hugepages")? + NEEDED {
            true => Ok(pool),
            false => Err("the node's memory is too scattered for huge pages".to_owned()),
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        if let Err(why) = set(self.before) {
            println!("the pool of huge pages stays larger: {why}");
        }
    }
}

/// A VM in huge pages allocates all of them at its start and releases them at its end; one that is too large fails before
/// its guest runs.
pub fn a_vm_allocates_and_releases_huge_pages(tested: Option<Box<impl TestedEngine>>) {
    let _suite_lock = lock_suite();
    let Some(tested) = tested else { return };
    let _pool = match Pool::enlarge() {
        Ok(pool) => pool,
        Err(why) => return println!("skipped: no huge pages: {why}"),
    };
    let free = || read("free_hugepages").unwrap();
    let before = free();
    let vm = TestVm::start(&*tested, vec![], |spec| spec.memory_pages = MemoryPages::Hugetlb);
    assert_eq!(before - free(), NEEDED, "all of it, and nothing else");
    assert_eq!(vm.query("cpus"), "1");
    assert!(vm.machine.as_snapshottable().is_none(), "it could not be restored as it is");
    drop(vm);
    let until = Instant::now() + LONG;
    while free() != before {
        assert!(Instant::now() < until, "{} of {before} are free again", free());
        std::thread::sleep(Duration::from_millis(20));
    }

    let directory = tempfile::tempdir().unwrap();
    let engine = tested.engine();
    let mut spec = spec(&*tested, directory.path(), vec![]);
    (spec.memory_pages, spec.memory_mib) = (MemoryPages::Hugetlb, TOO_MUCH_MIB);
    match engine.start(spec.check(&engine.limits()).unwrap()) {
        Err(error) => {
            assert!(
                matches!(error, EngineError::Machine { .. }) && error.kind() == FailureKind::Exhausted,
                "{error:?}"
            );
            assert!(Chain(&error).to_string().contains("nr_hugepages"), "{}", Chain(&error));
        }
        Ok(machine) => {
            let exit = machine.wait(LONG).unwrap();
            let ExitKind::Died { code: Some(1), message, .. } = &exit.how else { panic!("{exit:?}") };
            assert!(message.contains("memory"), "{message}");
        }
    }
    assert_eq!(free(), before);
}
