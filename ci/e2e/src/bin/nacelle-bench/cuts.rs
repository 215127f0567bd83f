//! Compares methods to save the memory that a running VM has for itself: how long the VM is paused, and what it costs the guest meanwhile.
#![allow(unsafe_code, reason = "fork and userfaultfd have no safe wrapper")]
#![allow(clippy::single_range_in_vec_init, reason = "a list of ranges, of which there is one")]

use crate::guests::{GuestFiles, parse_number};
use crate::machines::{BenchVm, CUT_COMMAND, CUT_END_COMMAND, SAVE_COMMAND, VmDescription, Vmm, monotonic_nanos};
use crate::median;
use nacelle_engine::{Machine, PageTracker, SnapshotDirectory};
use serde_json::{Value, json};
use std::ffi::c_void;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{
    Arc, Mutex,
    atomic::{AtomicBool, AtomicU64, Ordering},
};
use std::thread::JoinHandle;

const PAGE: usize = 4096;
/// The pages that are looked at together.
const CHUNK_PAGES: usize = 256;
/// Bits of an entry of a pagemap (kernel's admin-guide/mm/pagemap).
const PRESENT_OR_SWAPPED: u64 = 0b11 << 62;
const OF_FILE: u64 = 1 << 61;
const PRESENT: u64 = 1 << 63;
const WRITE_PROTECTED: u64 = 1 << 57;

/// The methods: copy all in the pause; fork in the pause, and copy in the child; write-protect in the pause (userfaultfd), and copy in threads;
/// copy before the pause, and in it what was written since (`Snapshottable::save_running`). `+busy`: while the guest writes to new memory.
pub const METHODS: [&str; 8] =
    ["copy", "fork", "protect", "ahead", "copy+busy", "fork+busy", "protect+busy", "ahead+busy"];

/// Returns rows `{"method", "touched" (MiB), "pause", "total" (ms), "saved" (MiB), "loop" (nanoseconds for each page that the guest writes
/// meanwhile)}` with medians of `runs` alternating runs, and one without any method.
///
/// # Panics
/// If anything fails, because there is no figure then.
pub fn measure(runs: usize) -> Value {
    let files = GuestFiles::with_commands(Path::new("/dev/shm"));
    let saved = files.directory().join("template");
    let template = VmDescription { template: true, memory_mib: 256, disks: Vec::new(), ..files.describe(1) };
    parse_number(&BenchVm::start(Vmm::Ours, &template).send_command(&format!("{SAVE_COMMAND}{}", saved.display())));
    let clone = VmDescription { from: Some(saved), asked: true, ..template };
    let mut rows = Vec::new();
    for touched in [8, 64] {
        let mut samples = [const { Vec::new() }; METHODS.len() + 1];
        for _ in 0..runs {
            for (number, samples) in samples.iter_mut().enumerate() {
                let mut vm = BenchVm::start(Vmm::Ours, &clone);
                vm.send_command(&format!("faults {touched}"));
                let method = METHODS.get(number);
                let cut: Value = match method {
                    Some(method) => {
                        let path = files.directory().join("cut");
                        serde_json::from_str(&vm.send_command(&format!("{CUT_COMMAND}{method} {}", path.display())))
                            .expect("JSON")
                    }
                    None => Value::Null,
                };
                let per_page = parse_number(&vm.send_command("faults 4"));
                let end: Value = match method {
                    Some(_) => serde_json::from_str(&vm.send_command(CUT_END_COMMAND)).expect("JSON"),
                    None => Value::Null,
                };
                let of = |value: &Value, name: &str| value[name].as_f64().unwrap_or(0.0);
                samples.push([of(&cut, "pause"), of(&end, "total"), of(&end, "saved"), per_page]);
            }
        }
        for (number, samples) in samples.iter().enumerate() {
            let column = |n: usize| median(&samples.iter().map(|sample: &[f64; 4]| sample[n]).collect::<Vec<_>>());
            let row = json!({"method": METHODS.get(number).unwrap_or(&"none"), "touched": touched, "pause": column(0), "total": column(1),
                "saved": column(2), "loop": column(3)});
            eprintln!("{row}");
            rows.push(row);
        }
    }
    Value::Array(rows)
}

/// A cut whose copy is not complete yet.
pub struct OpenCut {
    began: u64,
    rest: Rest,
}

enum Rest {
    Done,
    Child(i32),
    Threads { copier: JoinHandle<u64>, handler: JoinHandle<u64>, is_done: Arc<AtomicBool> },
}

/// Guest memory of this process, and where it is saved.
struct Source {
    ranges: Vec<Range<usize>>,
    file: File,
    first: usize,
}

impl Source {
    fn find(path: &Path) -> Source {
        let ranges = guest_memory();
        let first = ranges.first().expect("a VM has memory").start;
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(path).expect("a file");
        Source { ranges, file, first }
    }

    /// Writes the pages that are the process's own and, if asked, still protected. Returns their number. Allocates nothing.
    fn write_own(&self, pagemap: &File, protected_only: bool, mut done: impl FnMut(Range<usize>)) -> u64 {
        let mut saved = 0;
        let mut buffer = [0_u8; CHUNK_PAGES * 8];
        for range in &self.ranges {
            let mut at = range.start;
            while at < range.end {
                let pages = CHUNK_PAGES.min((range.end - at) / PAGE);
                let entries = &mut buffer[..pages * 8];
                if pagemap.read_exact_at(entries, (at / PAGE * 8) as u64).is_err() {
                    return u64::MAX;
                }
                let is_own = |n: usize| {
                    let entry = u64::from_le_bytes(entries[n * 8..n * 8 + 8].try_into().unwrap_or_default());
                    entry & PRESENT_OR_SWAPPED != 0
                        && entry & OF_FILE == 0
                        && // A mark without a page counts as swapped.
                        (!protected_only || entry & (PRESENT | WRITE_PROTECTED) == PRESENT | WRITE_PROTECTED)
                };
                let mut n = 0;
                while n < pages {
                    let begin = n;
                    while n < pages && is_own(n) {
                        n += 1;
                    }
                    if n > begin {
                        self.write(at + begin * PAGE..at + n * PAGE);
                        saved += (n - begin) as u64;
                        done(at + begin * PAGE..at + n * PAGE);
                    }
                    n += 1;
                }
                at += pages * PAGE;
            }
        }
        saved
    }

    fn write(&self, range: Range<usize>) {
        let offset = (range.start - self.first) as libc::off_t;
        // SAFETY: the range is guest memory of this process, which stays mapped; the kernel reads it.
        let written = unsafe { libc::pwrite(self.file.as_raw_fd(), range.start as *const c_void, range.len(), offset) };
        assert_eq!(written, range.len().cast_signed(), "{}", io::Error::last_os_error());
    }
}

fn guest_memory() -> Vec<Range<usize>> {
    let text = fs::read_to_string("/proc/self/maps").expect("/proc is mounted");
    let mut found: Vec<Range<usize>> = Vec::new();
    for line in text.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        let (start, end) = words[0].split_once('-').expect("a range");
        let [start, end] = [start, end].map(|text| usize::from_str_radix(text, 16).expect("an address"));
        if words[1].starts_with("rw") && words.get(5).is_none_or(|name| name.ends_with("/memory")) {
            found.push(start..end);
        }
    }
    let runs = found.chunk_by(|one, next| one.end == next.start);
    let size =
        |run: &&[Range<usize>]| run.last().map_or(0, |last| last.end) - run.first().map_or(0, |first| first.start);
    runs.max_by_key(size).expect("a VM has memory").to_vec()
}

/// Cuts the memory of the VM in this process into a file. Returns the milliseconds that the VM was paused.
pub fn cut(machine: &dyn Machine, method: &str, path: &Path) -> (f64, OpenCut) {
    let source = Source::find(path);
    let pagemap = File::open("/proc/self/pagemap").expect("a pagemap");
    let pausable = machine.as_pausable().expect("a VM that can be paused");
    let uffd = (method == "protect").then(|| Arc::new(Uffd::open(&source.ranges)));
    if method.starts_with("fork") {
        for range in &source.ranges {
            // SAFETY: the range is guest memory; the advice changes no content.
            unsafe { libc::madvise(range.start as *mut c_void, range.len(), libc::MADV_DOFORK) };
        }
    }
    if method == "ahead" {
        // Complete when it returns: the template's pages are in it, too.
        let directory = path.with_extension("snapshot");
        drop(fs::remove_dir_all(&directory));
        let snapshot = SnapshotDirectory::create(&directory).expect("a directory");
        let tracker = PageTracker::open().expect("/proc is mounted");
        assert!(tracker.tracks_writes(), "the kernel can");
        let snapshottable = machine.as_snapshottable().expect("a VM that can be saved");
        let began = monotonic_nanos();
        let report =
            snapshottable.save_running(snapshot.files(), &tracker, &AtomicBool::new(false), &mut ()).expect("to save");
        snapshot.commit().expect("to save");
        fs::rename(directory.join("memory"), path).expect("its memory");
        return (report.pause.as_secs_f64() * 1e3, OpenCut { began, rest: Rest::Done });
    }
    let began = monotonic_nanos();
    pausable.pause().expect("to pause");
    let rest = match method {
        "copy" => {
            source.write_own(&pagemap, false, |_| ());
            Rest::Done
        }
        "fork" => {
            // SAFETY: the child calls only functions that are safe after fork, and allocates nothing.
            match unsafe { libc::fork() } {
                0 => {
                    // SAFETY: a path that ends with zero.
                    let own = unsafe { libc::open(c"/proc/self/pagemap".as_ptr(), libc::O_RDONLY) };
                    // SAFETY: the descriptor was just opened.
                    let own = unsafe { File::from_raw_fd(own) };
                    let saved = source.write_own(&own, false, |_| ());
                    // SAFETY: the child ends.
                    unsafe { libc::_exit(if saved == u64::MAX { 1 } else { 0 }) }
                }
                -1 => panic!("cannot fork: {}", io::Error::last_os_error()),
                child => Rest::Child(child),
            }
        }
        "protect" => {
            let uffd = uffd.expect("made above");
            for range in &source.ranges {
                uffd.protect(range.clone(), true).expect("to protect");
            }
            protected_copy(source, pagemap, uffd)
        }
        _ => panic!("no method {method:?}"),
    };
    pausable.resume().expect("to resume");
    let pause = (monotonic_nanos() - began) as f64 / 1e6;
    (pause, OpenCut { began, rest })
}

/// Copies in one thread, and in another what the guest wants to write first.
fn protected_copy(source: Source, pagemap: File, uffd: Arc<Uffd>) -> Rest {
    let is_done = Arc::new(AtomicBool::new(false));
    let source = Arc::new((source, Mutex::new(())));
    let copier = std::thread::spawn({
        let (source, uffd, pagemap) =
            (Arc::clone(&source), Arc::clone(&uffd), pagemap.try_clone().expect("a descriptor"));
        move || {
            // One range after the other, so that the handler gets its turn.
            let mut saved = 0;
            let (source, turn) = &*source;
            for range in &source.ranges {
                let mut at = range.start;
                while at < range.end {
                    let end = range.end.min(at + CHUNK_PAGES * PAGE);
                    let part = Source {
                        ranges: vec![at..end],
                        file: source.file.try_clone().expect("a descriptor"),
                        first: source.first,
                    };
                    let _turn = turn.lock().expect("no thread panics");
                    saved += part.write_own(&pagemap, true, |_| ());
                    uffd.protect(at..end, false).expect("to unprotect");
                    at = end;
                }
            }
            saved
        }
    });
    let handler = std::thread::spawn({
        let is_done = Arc::clone(&is_done);
        move || {
            let saved = AtomicU64::new(0);
            while let Some(address) = uffd.next_fault(&is_done) {
                let (source, turn) = &*source;
                let _turn = turn.lock().expect("no thread panics");
                let page = address / PAGE * PAGE;
                let one = Source {
                    ranges: vec![page..page + PAGE],
                    file: source.file.try_clone().expect("a descriptor"),
                    first: source.first,
                };
                saved.fetch_add(one.write_own(&pagemap, true, |_| ()), Ordering::Relaxed);
                uffd.protect(page..page + PAGE, false).expect("to unprotect");
            }
            saved.into_inner()
        }
    });
    Rest::Threads { copier, handler, is_done }
}

impl OpenCut {
    /// Waits until all is copied. Returns the milliseconds since the pause began, and the saved MiB.
    pub fn finish(self, path: &Path) -> Value {
        let faults = match self.rest {
            Rest::Done => 0,
            Rest::Child(child) => {
                let mut status = 0;
                // SAFETY: the child is ours.
                assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
                assert_eq!(status, 0, "the child has copied");
                0
            }
            Rest::Threads { copier, handler, is_done } => {
                copier.join().expect("the copier");
                is_done.store(true, Ordering::Relaxed);
                handler.join().expect("the handler")
            }
        };
        let total = (monotonic_nanos() - self.began) as f64 / 1e6;
        use std::os::unix::fs::MetadataExt;
        let saved = fs::metadata(path).expect("the cut").blocks() as f64 * 512.0 / 1_048_576.0;
        json!({"total": total, "saved": saved, "faults": faults})
    }
}

/// A userfaultfd (userfaultfd(2)).
struct Uffd(OwnedFd);

#[repr(C)]
struct UffdApi {
    api: u64,
    features: u64,
    ioctls: u64,
}

#[repr(C)]
struct UffdRegister {
    start: u64,
    length: u64,
    mode: u64,
    ioctls: u64,
}

#[repr(C)]
struct UffdWriteProtect {
    start: u64,
    length: u64,
    mode: u64,
}

const UFFDIO_API: libc::c_ulong = 0xc018_aa3f;
const UFFDIO_REGISTER: libc::c_ulong = 0xc020_aa00;
const UFFDIO_WRITEPROTECT: libc::c_ulong = 0xc018_aa06;
const UFFD_FEATURE_PAGEFAULT_FLAG_WP: u64 = 1;
const UFFD_FEATURE_WP_HUGETLBFS_SHMEM: u64 = 1 << 12;

impl Uffd {
    fn open(ranges: &[Range<usize>]) -> Uffd {
        // SAFETY: the call has no pointer.
        let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK) };
        assert!(fd >= 0, "no userfaultfd: {}", io::Error::last_os_error());
        // SAFETY: the descriptor was just made.
        let uffd = Uffd(unsafe { OwnedFd::from_raw_fd(i32::try_from(fd).expect("a descriptor")) });
        let features = UFFD_FEATURE_PAGEFAULT_FLAG_WP | UFFD_FEATURE_WP_HUGETLBFS_SHMEM;
        uffd.call(UFFDIO_API, &mut UffdApi { api: 0xaa, features, ioctls: 0 }).expect("its interface");
        for range in ranges {
            let mut register =
                UffdRegister { start: range.start as u64, length: range.len() as u64, mode: 2, ioctls: 0 };
            uffd.call(UFFDIO_REGISTER, &mut register).expect("to register");
        }
        uffd
    }

    fn call<T>(&self, request: libc::c_ulong, argument: &mut T) -> io::Result<()> {
        // SAFETY: the structure is that of the request.
        match unsafe { libc::ioctl(self.0.as_raw_fd(), request, std::ptr::from_mut(argument)) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    fn protect(&self, range: Range<usize>, on: bool) -> io::Result<()> {
        let (start, length, mode) = (range.start as u64, range.len() as u64, u64::from(on));
        self.call(UFFDIO_WRITEPROTECT, &mut UffdWriteProtect { start, length, mode })
    }

    /// Returns the address of the next write to a protected page.
    fn next_fault(&self, is_done: &AtomicBool) -> Option<usize> {
        let mut message = [0_u8; 32];
        loop {
            // SAFETY: the buffer is as long as said.
            let length = unsafe { libc::read(self.0.as_raw_fd(), message.as_mut_ptr().cast(), message.len()) };
            if length == 32 {
                return Some(u64::from_le_bytes(message[16..24].try_into().expect("eight bytes")) as usize);
            }
            if is_done.load(Ordering::Relaxed) {
                return None;
            }
            let mut wait = libc::pollfd { fd: self.0.as_raw_fd(), events: libc::POLLIN, revents: 0 };
            // SAFETY: one entry.
            unsafe { libc::poll(&raw mut wait, 1, 10) };
        }
    }
}
