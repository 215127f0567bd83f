//! Owns: how much of the memory that the machine has in reserve is in use: its first blocks. What a machine is born with stays.
//! May use: /sys and /proc of the guest, `sys`. Threads: one change at a time; blocks for as long as the kernel moves pages.

use nacelle_base::{Chain, Classify, Kind};
use std::fs::{self, File};
use std::io::{self, Write};
use std::ops::Range;
use std::os::unix::thread::JoinHandleExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant};

use crate::sys;

/// Where the kernel has a folder for each block that it knows.
const FOLDER: &str = "/sys/devices/system/memory";
/// Where it says what is available.
pub(crate) const MEMINFO: &str = "/proc/meminfo";
/// How long blocks may take to be taken out of use, together. The kernel tries for ever while their pages have nowhere to go.
const PATIENCE: Duration = Duration::from_secs(15);
/// What must be left when memory goes: a kernel that is short of it while it moves pages ends processes.
pub(crate) const MARGIN: u64 = 32 << 20;
/// How long to wait before the kernel is asked again, or told again to give up.
const MOMENT: Duration = Duration::from_millis(100);

/// Why the machine cannot have another amount of memory.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// The agent has no kernel of its own.
    #[error("the memory is the node's: it does not grow and shrink for a pod")]
    OfNode,
    /// The kernel cannot add any.
    #[error(
        "the guest's kernel does not tell {}: it needs CONFIG_MEMORY_HOTPLUG, CONFIG_MEMORY_HOTREMOVE and CONFIG_ARCH_MEMORY_PROBE",
        path.display()
    )]
    Kernel {
        /// What it does not have.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// So much there is not.
    #[error("{asked} bytes of the reserve: it has {there}, in blocks of {block}")]
    Size {
        /// Asked for.
        asked: u64,
        /// What there is.
        there: u64,
        /// What the kernel adds at a time.
        block: u64,
    },
    /// It is in use.
    #[error("{less} bytes less memory: only {available} are not in use, and {MARGIN} must be left")]
    InUse {
        /// What should go.
        less: u64,
        /// What the kernel could spare.
        available: u64,
    },
    /// The kernel does not do it.
    #[error("cannot {what} the memory at {address:#x}")]
    Switch {
        /// "add", "use", "free".
        what: &'static str,
        /// Of the block.
        address: u64,
        /// Why.
        source: io::Error,
    },
}

impl Classify for MemoryError {
    fn kind(&self) -> Kind {
        match self {
            MemoryError::OfNode | MemoryError::Kernel { .. } => Kind::Unsupported,
            MemoryError::Size { .. } => Kind::Invalid,
            MemoryError::InUse { .. } | MemoryError::Switch { .. } => Kind::Conflict,
        }
    }
}

/// The machine's memory.
#[derive(Debug)]
pub struct Memory {
    /// None: there is no machine.
    place: Option<Place>,
    turn: Mutex<()>,
}

#[derive(Debug)]
struct Place {
    folder: PathBuf,
    meminfo: PathBuf,
    patience: Duration,
}

/// One block, by its number; so many bytes each.
#[derive(Clone, Copy, Debug)]
struct Block {
    number: u64,
    bytes: u64,
}

impl Block {
    fn address(self) -> u64 {
        self.number.saturating_mul(self.bytes)
    }
}

impl Memory {
    /// That of the machine whose first process this is.
    pub fn of_machine() -> Memory {
        let place = Place { folder: FOLDER.into(), meminfo: MEMINFO.into(), patience: PATIENCE };
        Memory { place: Some(place), turn: Mutex::default() }
    }

    /// That of the node, which is let alone.
    pub fn of_node() -> Memory {
        Memory { place: None, turn: Mutex::default() }
    }

    /// Has the first so many bytes of the reserve, in whole blocks, be in use, and no other; says how many that are. If a block
    /// cannot be switched, all are as they were before.
    pub fn set(&self, reserve: &[Range<u64>], asked: u64) -> Result<u64, MemoryError> {
        let place = self.place.as_ref().ok_or(MemoryError::OfNode)?;
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let block = place.block_bytes()?;
        let blocks: Vec<Block> = reserve.iter().flat_map(|range| blocks(range, block)).collect();
        let wanted = asked.div_ceil(block);
        let count = u64::try_from(blocks.len()).unwrap_or(u64::MAX);
        if wanted > count {
            return Err(MemoryError::Size { asked, there: count.saturating_mul(block), block });
        }
        let (first, others) = blocks.split_at(usize::try_from(wanted).unwrap_or(usize::MAX));
        let less: Vec<Block> = others.iter().rev().filter(|block| place.is_used(**block)).copied().collect();
        place.spare(less.iter().map(|block| block.bytes).sum())?;
        let more = first.iter().filter(|block| !place.is_used(**block)).copied();
        let deadline = Instant::now() + place.patience;
        let mut changed: Vec<(Block, bool)> = Vec::new();
        for (block, on) in more.map(|block| (block, true)).chain(less.iter().map(|block| (*block, false))) {
            if let Err(error) = place.switch(block, on, deadline) {
                for (block, on) in changed.into_iter().rev() {
                    if let Err(error) = place.switch(block, !on, Instant::now() + place.patience) {
                        tracing::warn!("memory is not as it was: {}", Chain(&error));
                    }
                }
                return Err(error);
            }
            changed.push((block, on));
        }
        let bytes = wanted.saturating_mul(block);
        if !changed.is_empty() {
            tracing::info!(bytes, blocks = changed.len(), "memory of the reserve");
        }
        Ok(bytes)
    }
}

/// The blocks that lie in a range as a whole.
fn blocks(range: &Range<u64>, bytes: u64) -> impl Iterator<Item = Block> + use<> {
    let (first, end) = (range.start.div_ceil(bytes), range.end / bytes);
    (first..end).map(move |number| Block { number, bytes })
}

impl Place {
    fn block_bytes(&self) -> Result<u64, MemoryError> {
        let path = self.folder.join("block_size_bytes");
        let parse = |text: String| {
            let parsed = u64::from_str_radix(text.trim_end(), 16).ok().filter(|bytes| *bytes > 0);
            parsed.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, format!("{text:?} is no size")))
        };
        fs::read_to_string(&path).and_then(parse).map_err(|source| MemoryError::Kernel { path, source })
    }

    fn state(&self, block: Block) -> PathBuf {
        self.folder.join(format!("memory{}/state", block.number))
    }

    /// Of one that the kernel does not know yet there is nothing to read.
    fn is_used(&self, block: Block) -> bool {
        fs::read_to_string(self.state(block)).is_ok_and(|state| state.starts_with("online"))
    }

    /// Refuses to take away what is in use: the kernel would try as long as it is let.
    fn spare(&self, less: u64) -> Result<(), MemoryError> {
        if less == 0 {
            return Ok(());
        }
        let unknown = |source| MemoryError::Kernel { path: self.meminfo.clone(), source };
        let available = available(&self.meminfo).map_err(unknown)?;
        if available < less.saturating_add(MARGIN) { Err(MemoryError::InUse { less, available }) } else { Ok(()) }
    }

    fn switch(&self, block: Block, on: bool, deadline: Instant) -> Result<(), MemoryError> {
        let address = block.address();
        let failed = |what| move |source| MemoryError::Switch { what, address, source };
        if !on {
            return free(&self.state(block), deadline).map_err(failed("free"));
        }
        // Once added it stays known to the kernel, in use or not.
        if !self.state(block).exists() {
            let path = self.folder.join("probe");
            match write(&path, &format!("{address:#x}")) {
                Err(source) if source.kind() == io::ErrorKind::NotFound => {
                    return Err(MemoryError::Kernel { path, source });
                }
                added => added.map_err(failed("add"))?,
            }
        }
        if self.is_used(block) {
            return Ok(());
        }
        // What cannot be moved away again, the kernel keeps out of it.
        write(&self.state(block), "online_movable").map_err(failed("use"))
    }
}

/// The bytes that programs could still use, as this file says (proc_meminfo(5)).
pub(crate) fn available(meminfo: &Path) -> io::Result<u64> {
    let text = fs::read_to_string(meminfo)?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:")?.trim().strip_suffix("kB"));
    let parsed = line.and_then(|kib| kib.trim_end().parse::<u64>().ok()).map(|kib| kib.saturating_mul(1024));
    parsed.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "it does not say what is available"))
}

/// One call: an interrupted one is over. To a file that is there.
pub(crate) fn write(path: &Path, text: &str) -> io::Result<()> {
    File::options().write(true).truncate(true).open(path)?.write(text.as_bytes()).map(drop)
}

/// Takes a block out of use, as often as the kernel says that it is busy, until the deadline.
fn free(state: &Path, deadline: Instant) -> io::Result<()> {
    loop {
        let done = free_once(state, deadline);
        // Any signal to that thread interrupts the kernel, not only the one that ends it at the deadline.
        let again = |error: &io::Error| matches!(error.raw_os_error(), Some(libc::EBUSY | libc::EAGAIN | libc::EINTR));
        if !done.as_ref().err().is_some_and(again) || Instant::now() + MOMENT > deadline {
            return done.map_err(|error| match error.kind() {
                io::ErrorKind::Interrupted => io::ErrorKind::TimedOut.into(),
                _ => error,
            });
        }
        std::thread::sleep(MOMENT);
    }
}

/// The kernel moves pages until it is done or has a signal to look at.
fn free_once(state: &Path, deadline: Instant) -> io::Result<()> {
    sys::interrupt_by(sys::WAKE)?;
    let (tell, told) = mpsc::channel();
    let state = state.to_owned();
    let builder = std::thread::Builder::new().name("memory".into());
    let thread = builder.spawn(move || _ = tell.send(write(&state, "offline")))?;
    let mut wait = deadline.saturating_duration_since(Instant::now());
    loop {
        match told.recv_timeout(wait) {
            Err(mpsc::RecvTimeoutError::Timeout) => {
                sys::signal_thread(thread.as_pthread_t(), sys::WAKE)?;
                wait = MOMENT;
            }
            done => {
                drop(thread.join());
                return done.unwrap_or_else(|_panicked| Err(io::Error::other("the thread that does it has ended")));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::OpenOptionsExt;

    const BLOCK: u64 = 128 << 20;
    /// Two blocks, a hole, one block; the first begins within a block.
    const RESERVE: [Range<u64>; 2] = [(BLOCK + 5)..(4 * BLOCK), (8 * BLOCK)..(9 * BLOCK + 7)];
    const NUMBERS: [u64; 3] = [2, 3, 8];

    struct Fake {
        folder: tempfile::TempDir,
        memory: Memory,
    }

    /// A machine whose kernel knows blocks in these states.
    fn machine(states: &[&str], available_kib: u64) -> Fake {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("block_size_bytes"), "8000000\n").unwrap();
        fs::write(folder.path().join("probe"), "").unwrap();
        let meminfo = folder.path().join("meminfo");
        fs::write(&meminfo, format!("MemTotal:  9 kB\nMemAvailable:  {available_kib} kB\n")).unwrap();
        for (number, state) in NUMBERS.iter().zip(states) {
            fs::create_dir(folder.path().join(format!("memory{number}"))).unwrap();
            fs::write(folder.path().join(format!("memory{number}/state")), state).unwrap();
        }
        let place = Place { folder: folder.path().to_owned(), meminfo, patience: Duration::from_millis(10) };
        Fake { folder, memory: Memory { place: Some(place), turn: Mutex::default() } }
    }

    impl Fake {
        fn now(&self) -> Vec<String> {
            let read = |number| fs::read_to_string(self.folder.path().join(format!("memory{number}/state")));
            NUMBERS.iter().map_while(|number| read(number).ok()).map(|state| state.trim_end().to_owned()).collect()
        }

        /// Makes a block one that cannot be switched: a folder has no value that could be read or written.
        fn break_block(&self, number: u64) {
            let state = self.folder.path().join(format!("memory{number}/state"));
            fs::remove_file(&state).unwrap();
            fs::create_dir(&state).unwrap();
        }
    }

    #[test]
    fn the_first_blocks_are_in_use() {
        let fake = machine(&["offline\n"; 3], 1 << 20);
        let (on, off) = ("online_movable", "offline");
        for (bytes, used, states) in [
            (1, 1, [on, off, off]),
            (3 * BLOCK, 3, [on, on, on]),
            (BLOCK + 1, 2, [on, on, off]),
            (0, 0, [off, off, off]),
        ] {
            assert_eq!(fake.memory.set(&RESERVE, bytes).unwrap(), used * BLOCK);
            assert_eq!(fake.now().iter().map(|state| state.trim_end()).collect::<Vec<_>>(), states);
        }
        for bytes in [3 * BLOCK + 1, u64::MAX] {
            let error = fake.memory.set(&RESERVE, bytes).unwrap_err();
            assert!(matches!(error, MemoryError::Size { block: BLOCK, .. }), "{error}");
            assert_eq!(error.kind(), Kind::Invalid);
        }
        assert_eq!(fake.memory.set(&[], 0).unwrap(), 0);
        assert!(fake.memory.set(&[], 1).is_err());
    }

    #[test]
    fn what_the_kernel_does_not_know_is_added_first() {
        let fake = machine(&["online\n"], 1 << 20);
        // The file takes the address, and no block comes of it.
        let error = fake.memory.set(&RESERVE, 2 * BLOCK).unwrap_err();
        assert!(matches!(error, MemoryError::Switch { what: "use", address: 0x1800_0000, .. }), "{error}");
        assert_eq!(fs::read_to_string(fake.folder.path().join("probe")).unwrap(), "0x18000000");
        fs::remove_file(fake.folder.path().join("probe")).unwrap();
        assert_eq!(fake.memory.set(&RESERVE, 2 * BLOCK).unwrap_err().kind(), Kind::Unsupported);
        assert_eq!(fake.now(), ["online"]);
        fs::remove_file(fake.folder.path().join("block_size_bytes")).unwrap();
        assert_eq!(fake.memory.set(&RESERVE, 0).unwrap_err().kind(), Kind::Unsupported);
    }

    #[test]
    fn a_block_that_cannot_be_switched_changes_nothing() {
        let fake = machine(&["offline\n"; 3], 1 << 20);
        fake.break_block(8);
        let error = fake.memory.set(&RESERVE, 3 * BLOCK).unwrap_err();
        assert!(matches!(error, MemoryError::Switch { what: "use", address: 0x4000_0000, .. }), "{error}");
        assert_eq!(error.kind(), Kind::Conflict);
        assert_eq!(fake.now(), ["offline", "offline"]);
    }

    #[test]
    fn what_is_in_use_stays() {
        let fake = machine(&["online\n"; 3], ((2 * BLOCK + MARGIN) >> 10) - 1);
        let error = fake.memory.set(&RESERVE, BLOCK).unwrap_err();
        assert!(matches!(error, MemoryError::InUse { less, .. } if less == 2 * BLOCK), "{error}");
        assert_eq!(error.kind(), Kind::Conflict);
        assert_eq!(fake.now(), ["online"; 3]);
        assert_eq!(fake.memory.set(&RESERVE, 2 * BLOCK).unwrap(), 2 * BLOCK);
    }

    #[test]
    fn a_kernel_that_does_not_end_is_told_to() {
        let pipe = tempfile::tempdir().unwrap();
        let path = pipe.path().join("state");
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let mut full = File::options().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(&path).unwrap();
        // A pipe that nobody reads.
        while full.write(&[0; 4096]).is_ok() {}
        let error = free(&path, Instant::now() + Duration::from_millis(10)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }

    #[test]
    fn the_nodes_is_let_alone() {
        assert_eq!(Memory::of_node().set(&RESERVE, 0).unwrap_err().kind(), Kind::Unsupported);
    }
}
