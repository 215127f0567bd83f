//! Brings the first blocks of the VM's hot-plug memory online, and the others offline. The memory that the VM booted with stays.
//!
//! There is one change at a time; it blocks for as long as the kernel moves pages.

use nacelle_base::{Chain, Classify, FailureKind};
use std::fs::{self, File};
use std::io::{self, Write};
use std::ops::Range;
use std::os::unix::thread::JoinHandleExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant};

use crate::sys;

/// The directory with a directory for each memory block that the kernel knows.
const BLOCKS_DIRECTORY: &str = "/sys/devices/system/memory";
/// The file with the amount of available memory.
pub(crate) const MEMINFO: &str = "/proc/meminfo";
/// The time in which all blocks of a request must be offline. The kernel tries for ever while it cannot move their pages.
const OFFLINE_TIMEOUT: Duration = Duration::from_secs(15);
/// The memory in bytes that must stay available: while the kernel moves pages, a lack of memory makes it kill processes.
pub(crate) const MIN_AVAILABLE: u64 = 32 << 20;
/// The time before an operation, or the signal that interrupts it, is repeated.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// Reasons the amount of memory cannot be changed.
#[derive(Debug, thiserror::Error)]
pub enum MemoryResizeError {
    /// The pod runs on the node, without a kernel of its own.
    #[error("cannot resize the memory: the pod runs on the node")]
    OfNode,
    /// The kernel does not support memory hot-plug.
    #[error(
        "the guest's kernel has no {}: it needs CONFIG_MEMORY_HOTPLUG, CONFIG_MEMORY_HOTREMOVE and CONFIG_ARCH_MEMORY_PROBE",
        path.display()
    )]
    Kernel {
        /// The missing file.
        path: PathBuf,
        /// The system call's error.
        source: io::Error,
    },
    /// The hot-plug memory is smaller, or does not consist of whole blocks.
    #[error("cannot bring {requested} bytes of hot-plug memory online: it has {reserve_bytes}, in blocks of {block}")]
    Size {
        /// The requested bytes.
        requested: u64,
        /// The bytes of the reserve, in whole blocks.
        reserve_bytes: u64,
        /// The size of a block in bytes.
        block: u64,
    },
    /// The memory is in use.
    #[error(
        "cannot take {to_remove} bytes of memory offline: only {available} are not in use, and {MIN_AVAILABLE} must remain"
    )]
    InUse {
        /// The bytes that should go offline.
        to_remove: u64,
        /// The bytes that are available.
        available: u64,
    },
    /// The kernel could not change a block.
    #[error("cannot {what} the memory at {address:#x}")]
    Switch {
        /// The operation: "add", "use" or "free".
        what: &'static str,
        /// The physical address of the block.
        address: u64,
        /// The system call's error.
        source: io::Error,
    },
}

impl Classify for MemoryResizeError {
    fn kind(&self) -> FailureKind {
        match self {
            MemoryResizeError::OfNode | MemoryResizeError::Kernel { .. } => FailureKind::Unsupported,
            MemoryResizeError::Size { .. } => FailureKind::Invalid,
            MemoryResizeError::InUse { .. } | MemoryResizeError::Switch { .. } => FailureKind::Conflict,
        }
    }
}

/// The memory of the guest.
#[derive(Debug)]
pub struct HotplugMemory {
    /// `None` on the node.
    files: Option<BlockFiles>,
    resize_lock: Mutex<()>,
}

#[derive(Debug)]
struct BlockFiles {
    blocks: PathBuf,
    meminfo: PathBuf,
    timeout: Duration,
}

/// What the kernel uses a block for, as the kernel names it.
#[derive(Clone, Copy, Debug)]
enum Zone {
    /// Everything. The block may stay in use for ever.
    Kernel,
    /// Pages that it can move away again.
    Movable,
}

impl Zone {
    fn state(self) -> &'static str {
        match self {
            Zone::Kernel => "online_kernel",
            Zone::Movable => "online_movable",
        }
    }
}

/// A memory block, by its number. All have the same size.
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

impl HotplugMemory {
    /// The memory of the guest whose first process this is.
    pub fn of_guest() -> HotplugMemory {
        let files = BlockFiles { blocks: BLOCKS_DIRECTORY.into(), meminfo: MEMINFO.into(), timeout: OFFLINE_TIMEOUT };
        HotplugMemory { files: Some(files), resize_lock: Mutex::default() }
    }

    /// The memory of the node, which is not changed.
    pub fn of_node() -> HotplugMemory {
        HotplugMemory { files: None, resize_lock: Mutex::default() }
    }

    /// Brings hot-plug memory online that stays so for the life of the VM, as if the VM had booted with it: the kernel uses it for
    /// everything, not only for what it can move. The ranges must consist of whole blocks.
    pub fn add(&self, ranges: &[Range<u64>]) -> Result<(), MemoryResizeError> {
        let files = self.files.as_ref().ok_or(MemoryResizeError::OfNode)?;
        let _lock = self.resize_lock.lock().unwrap_or_else(PoisonError::into_inner);
        if ranges.is_empty() {
            return Ok(());
        }
        let block = files.read_block_size()?;
        let requested: u64 = ranges.iter().map(|range| range.end.saturating_sub(range.start)).sum();
        let blocks: Vec<Block> = ranges.iter().flat_map(|range| blocks_within(range, block)).collect();
        let whole = u64::try_from(blocks.len()).unwrap_or(u64::MAX).saturating_mul(block);
        if whole != requested {
            return Err(MemoryResizeError::Size { requested, reserve_bytes: whole, block });
        }
        for block in blocks {
            files.bring_online(block, Zone::Kernel)?;
        }
        tracing::info!(bytes = requested, "added memory");
        Ok(())
    }

    /// Brings the first `requested` bytes of the reserve online, in whole blocks, and all others offline. Returns the bytes that are
    /// online. If a block cannot be changed, all others are restored.
    pub fn set_online_bytes(&self, reserve: &[Range<u64>], requested: u64) -> Result<u64, MemoryResizeError> {
        let files = self.files.as_ref().ok_or(MemoryResizeError::OfNode)?;
        let _lock = self.resize_lock.lock().unwrap_or_else(PoisonError::into_inner);
        let block = files.read_block_size()?;
        let blocks: Vec<Block> = reserve.iter().flat_map(|range| blocks_within(range, block)).collect();
        let wanted = requested.div_ceil(block);
        let count = u64::try_from(blocks.len()).unwrap_or(u64::MAX);
        if wanted > count {
            return Err(MemoryResizeError::Size { requested, reserve_bytes: count.saturating_mul(block), block });
        }
        let (first, others) = blocks.split_at(usize::try_from(wanted).unwrap_or(usize::MAX));
        let to_remove: Vec<Block> = others.iter().rev().filter(|block| files.is_online(**block)).copied().collect();
        files.check_available(to_remove.iter().map(|block| block.bytes).sum())?;
        let to_add = first.iter().filter(|block| !files.is_online(**block)).copied();
        let deadline = Instant::now() + files.timeout;
        let mut changed: Vec<(Block, bool)> = Vec::new();
        for (block, online) in to_add.map(|block| (block, true)).chain(to_remove.iter().map(|block| (*block, false))) {
            if let Err(error) = files.set_block_online(block, online, deadline) {
                for (block, online) in changed.into_iter().rev() {
                    if let Err(error) = files.set_block_online(block, !online, Instant::now() + files.timeout) {
                        tracing::warn!("cannot restore the state of a memory block: {}", Chain(&error));
                    }
                }
                return Err(error);
            }
            changed.push((block, online));
        }
        let bytes = wanted.saturating_mul(block);
        if !changed.is_empty() {
            tracing::info!(bytes, blocks = changed.len(), "changed how much of the hot-plug memory is online");
        }
        Ok(bytes)
    }
}

/// Returns the blocks that lie completely in a range.
fn blocks_within(range: &Range<u64>, bytes: u64) -> impl Iterator<Item = Block> + use<> {
    let (first, end) = (range.start.div_ceil(bytes), range.end / bytes);
    (first..end).map(move |number| Block { number, bytes })
}

impl BlockFiles {
    fn read_block_size(&self) -> Result<u64, MemoryResizeError> {
        let path = self.blocks.join("block_size_bytes");
        let parse = |text: String| {
            let parsed = u64::from_str_radix(text.trim_end(), 16).ok().filter(|bytes| *bytes > 0);
            parsed.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, format!("{text:?} is no size")))
        };
        fs::read_to_string(&path).and_then(parse).map_err(|source| MemoryResizeError::Kernel { path, source })
    }

    fn state_path(&self, block: Block) -> PathBuf {
        self.blocks.join(format!("memory{}/state", block.number))
    }

    /// Whether a block is online. A block that the kernel does not know yet has no state.
    fn is_online(&self, block: Block) -> bool {
        fs::read_to_string(self.state_path(block)).is_ok_and(|state| state.starts_with("online"))
    }

    /// Checks that `to_remove` bytes are available and `MIN_AVAILABLE` besides: the kernel would try to free memory that is in use for ever.
    fn check_available(&self, to_remove: u64) -> Result<(), MemoryResizeError> {
        if to_remove == 0 {
            return Ok(());
        }
        let unknown = |source| MemoryResizeError::Kernel { path: self.meminfo.clone(), source };
        let available = read_available(&self.meminfo).map_err(unknown)?;
        if available < to_remove.saturating_add(MIN_AVAILABLE) {
            Err(MemoryResizeError::InUse { to_remove, available })
        } else {
            Ok(())
        }
    }

    fn set_block_online(&self, block: Block, online: bool, deadline: Instant) -> Result<(), MemoryResizeError> {
        if online {
            return self.bring_online(block, Zone::Movable);
        }
        let failed = |source| MemoryResizeError::Switch { what: "free", address: block.address(), source };
        take_offline(&self.state_path(block), deadline).map_err(failed)
    }

    fn bring_online(&self, block: Block, zone: Zone) -> Result<(), MemoryResizeError> {
        let address = block.address();
        let failed = |what| move |source| MemoryResizeError::Switch { what, address, source };
        // A block that was added stays known to the kernel, online or offline.
        if !self.state_path(block).exists() {
            let path = self.blocks.join("probe");
            match write_once(&path, &format!("{address:#x}")) {
                Err(source) if source.kind() == io::ErrorKind::NotFound => {
                    return Err(MemoryResizeError::Kernel { path, source });
                }
                added => added.map_err(failed("add"))?,
            }
        }
        if self.is_online(block) {
            return Ok(());
        }
        write_once(&self.state_path(block), zone.state()).map_err(failed("use"))
    }
}

/// Reads the bytes that are available to programs.
pub(crate) fn read_available(meminfo: &Path) -> io::Result<u64> {
    read_meminfo(meminfo, "MemAvailable")
}

/// Reads a line of /proc/meminfo (proc_meminfo(5)), in bytes.
pub(crate) fn read_meminfo(meminfo: &Path, name: &str) -> io::Result<u64> {
    let text = fs::read_to_string(meminfo)?;
    let of =
        |line: &str| line.strip_prefix(name)?.strip_prefix(':')?.trim().strip_suffix("kB")?.trim_end().parse().ok();
    let parsed = text.lines().find_map(of).map(|kib: u64| kib.saturating_mul(1024));
    parsed.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, format!("there is no line {name}")))
}

/// Writes to an existing file with one call of write(2), which a signal may interrupt.
pub(crate) fn write_once(path: &Path, text: &str) -> io::Result<()> {
    File::options().write(true).truncate(true).open(path)?.write(text.as_bytes()).map(drop)
}

/// Takes a block offline. Tries again while the kernel reports it as busy, until the deadline.
fn take_offline(state: &Path, deadline: Instant) -> io::Result<()> {
    loop {
        let result = take_offline_once(state, deadline);
        // Any signal to that thread interrupts the kernel, not only the one that is sent at the deadline.
        let is_retryable =
            |error: &io::Error| matches!(error.raw_os_error(), Some(libc::EBUSY | libc::EAGAIN | libc::EINTR));
        if !result.as_ref().err().is_some_and(is_retryable) || Instant::now() + RETRY_INTERVAL > deadline {
            return result.map_err(|error| match error.kind() {
                io::ErrorKind::Interrupted => io::ErrorKind::TimedOut.into(),
                _ => error,
            });
        }
        std::thread::sleep(RETRY_INTERVAL);
    }
}

/// Takes a block offline in a thread, which receives a signal at the deadline: the kernel moves pages until it is done or a signal
/// is pending.
fn take_offline_once(state: &Path, deadline: Instant) -> io::Result<()> {
    sys::let_signal_interrupt(sys::WAKE_SIGNAL)?;
    let (sender, receiver) = mpsc::channel();
    let state = state.to_owned();
    let builder = std::thread::Builder::new().name("memory".into());
    let thread = builder.spawn(move || _ = sender.send(write_once(&state, "offline")))?;
    let mut wait = deadline.saturating_duration_since(Instant::now());
    loop {
        match receiver.recv_timeout(wait) {
            Err(mpsc::RecvTimeoutError::Timeout) => {
                sys::signal_thread(thread.as_pthread_t(), sys::WAKE_SIGNAL)?;
                wait = RETRY_INTERVAL;
            }
            result => {
                drop(thread.join());
                return result
                    .unwrap_or_else(|_panicked| Err(io::Error::other("the thread that writes the state has ended")));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::OpenOptionsExt;

    const BLOCK: u64 = 128 << 20;
    /// Two blocks, a hole, one block. The first range begins within a block.
    const RESERVE: [Range<u64>; 2] = [(BLOCK + 5)..(4 * BLOCK), (8 * BLOCK)..(9 * BLOCK + 7)];
    const NUMBERS: [u64; 3] = [2, 3, 8];

    struct Fake {
        directory: tempfile::TempDir,
        memory: HotplugMemory,
    }

    /// A guest whose kernel has blocks in these states.
    fn guest(states: &[&str], available_kib: u64) -> Fake {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("block_size_bytes"), "8000000\n").unwrap();
        fs::write(directory.path().join("probe"), "").unwrap();
        let meminfo = directory.path().join("meminfo");
        fs::write(&meminfo, format!("MemTotal:  9 kB\nMemAvailable:  {available_kib} kB\n")).unwrap();
        for (number, state) in NUMBERS.iter().zip(states) {
            fs::create_dir(directory.path().join(format!("memory{number}"))).unwrap();
            fs::write(directory.path().join(format!("memory{number}/state")), state).unwrap();
        }
        let files = BlockFiles { blocks: directory.path().to_owned(), meminfo, timeout: Duration::from_millis(10) };
        Fake { directory, memory: HotplugMemory { files: Some(files), resize_lock: Mutex::default() } }
    }

    impl Fake {
        fn now(&self) -> Vec<String> {
            let read = |number| fs::read_to_string(self.directory.path().join(format!("memory{number}/state")));
            NUMBERS.iter().map_while(|number| read(number).ok()).map(|state| state.trim_end().to_owned()).collect()
        }

        /// Makes the state of a block unreadable and unwritable: puts a directory in place of its file.
        fn break_block(&self, number: u64) {
            let state = self.directory.path().join(format!("memory{number}/state"));
            fs::remove_file(&state).unwrap();
            fs::create_dir(&state).unwrap();
        }
    }

    #[test]
    fn the_first_memory_blocks_are_online() {
        let fake = guest(&["offline\n"; 3], 1 << 20);
        let (online, off) = ("online_movable", "offline");
        for (bytes, used, states) in [
            (1, 1, [online, off, off]),
            (3 * BLOCK, 3, [online, online, online]),
            (BLOCK + 1, 2, [online, online, off]),
            (0, 0, [off, off, off]),
        ] {
            assert_eq!(fake.memory.set_online_bytes(&RESERVE, bytes).unwrap(), used * BLOCK);
            assert_eq!(fake.now().iter().map(|state| state.trim_end()).collect::<Vec<_>>(), states);
        }
        for bytes in [3 * BLOCK + 1, u64::MAX] {
            let error = fake.memory.set_online_bytes(&RESERVE, bytes).unwrap_err();
            assert!(matches!(error, MemoryResizeError::Size { block: BLOCK, .. }), "{error}");
            assert_eq!(error.kind(), FailureKind::Invalid);
        }
        assert_eq!(fake.memory.set_online_bytes(&[], 0).unwrap(), 0);
        assert!(fake.memory.set_online_bytes(&[], 1).is_err());
    }

    #[test]
    fn added_memory_is_used_for_everything() {
        let fake = guest(&["offline\n"; 3], 1 << 20);
        fake.memory.add(std::slice::from_ref(&(2 * BLOCK..4 * BLOCK))).unwrap();
        assert_eq!(fake.now(), ["online_kernel", "online_kernel", "offline"]);
        // It stays as it is when the reserve behind it changes.
        assert_eq!(fake.memory.set_online_bytes(&RESERVE[1..], BLOCK).unwrap(), BLOCK);
        assert_eq!(fake.now(), ["online_kernel", "online_kernel", "online_movable"]);
        fake.memory.add(&[]).unwrap();
        let error = fake.memory.add(&RESERVE).unwrap_err();
        assert!(matches!(error, MemoryResizeError::Size { block: BLOCK, .. }), "{error}");
        fake.break_block(3);
        let error = fake.memory.add(std::slice::from_ref(&(3 * BLOCK..4 * BLOCK))).unwrap_err();
        assert!(matches!(error, MemoryResizeError::Switch { what: "use", .. }), "{error}");
    }

    #[test]
    fn unknown_memory_blocks_are_added_first() {
        let fake = guest(&["online\n"], 1 << 20);
        // The file takes the address, but no block appears.
        let error = fake.memory.set_online_bytes(&RESERVE, 2 * BLOCK).unwrap_err();
        assert!(matches!(error, MemoryResizeError::Switch { what: "use", address: 0x1800_0000, .. }), "{error}");
        assert_eq!(fs::read_to_string(fake.directory.path().join("probe")).unwrap(), "0x18000000");
        fs::remove_file(fake.directory.path().join("probe")).unwrap();
        assert_eq!(fake.memory.set_online_bytes(&RESERVE, 2 * BLOCK).unwrap_err().kind(), FailureKind::Unsupported);
        assert_eq!(fake.now(), ["online"]);
        fs::remove_file(fake.directory.path().join("block_size_bytes")).unwrap();
        assert_eq!(fake.memory.set_online_bytes(&RESERVE, 0).unwrap_err().kind(), FailureKind::Unsupported);
    }

    #[test]
    fn a_memory_block_that_cannot_be_changed_restores_all() {
        let fake = guest(&["offline\n"; 3], 1 << 20);
        fake.break_block(8);
        let error = fake.memory.set_online_bytes(&RESERVE, 3 * BLOCK).unwrap_err();
        assert!(matches!(error, MemoryResizeError::Switch { what: "use", address: 0x4000_0000, .. }), "{error}");
        assert_eq!(error.kind(), FailureKind::Conflict);
        assert_eq!(fake.now(), ["offline", "offline"]);
    }

    #[test]
    fn memory_in_use_stays_online() {
        let fake = guest(&["online\n"; 3], ((2 * BLOCK + MIN_AVAILABLE) >> 10) - 1);
        let error = fake.memory.set_online_bytes(&RESERVE, BLOCK).unwrap_err();
        assert!(matches!(error, MemoryResizeError::InUse { to_remove, .. } if to_remove == 2 * BLOCK), "{error}");
        assert_eq!(error.kind(), FailureKind::Conflict);
        assert_eq!(fake.now(), ["online"; 3]);
        assert_eq!(fake.memory.set_online_bytes(&RESERVE, 2 * BLOCK).unwrap(), 2 * BLOCK);
    }

    #[test]
    fn a_blocked_offline_request_is_interrupted() {
        let pipe = tempfile::tempdir().unwrap();
        let path = pipe.path().join("state");
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let mut full = File::options().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(&path).unwrap();
        // Fill the pipe, which no process reads.
        while full.write(&[0; 4096]).is_ok() {}
        let error = take_offline(&path, Instant::now() + Duration::from_millis(10)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }

    #[test]
    fn the_nodes_memory_is_not_changed() {
        assert_eq!(
            HotplugMemory::of_node().set_online_bytes(&RESERVE, 0).unwrap_err().kind(),
            FailureKind::Unsupported
        );
    }
}
