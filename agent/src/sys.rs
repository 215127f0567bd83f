//! Makes the system calls that no safe wrapper offers, one function each, and nothing else.

#![allow(unsafe_code, reason = "ioctls, bpf and fork have no safe wrapper")]

use linux_raw_sys::loop_device;
pub use nacelle_base::pidfd::{pidfd_open, pidfd_signal};
use nacelle_base::retry::{retry_interrupted, retry_transient};
use std::ffi::{CStr, CString, c_int, c_void};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use tokio::io::unix::AsyncFd;

fn check(result: c_int) -> io::Result<c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

const RNDADDENTROPY: libc::Ioctl = 0x4008_5203;
const RNDRESEEDCRNG: libc::Ioctl = 0x5207;
const BLKPG: libc::Ioctl = 0x1269;
const BLKPG_ADD_PARTITION: c_int = 1;
const BLKPG_DEL_PARTITION: c_int = 2;
const BLKPG_RESIZE_PARTITION: c_int = 3;
const BLKROSET: libc::Ioctl = 0x125d;
const TIOCGPTPEER: libc::Ioctl = 0x5441;

/// The longest seed that `add_entropy` takes, in bytes.
pub const MAX_ENTROPY: usize = 512;

/// Adds bytes to the kernel's random pool, counts them as random, and draws a new key for the generator from the pool
/// at once: one that was copied with a snapshot would give the same numbers in each copy for up to a minute.
pub fn add_entropy(random: impl AsFd, bytes: &[u8]) -> io::Result<()> {
    /// `struct rand_pool_info` of `RNDADDENTROPY` (random(4)).
    #[repr(C)]
    struct RandPoolInfo {
        bits: c_int,
        size: c_int,
        bytes: [u8; MAX_ENTROPY],
    }
    let mut info = RandPoolInfo { bits: 0, size: 0, bytes: [0; MAX_ENTROPY] };
    for (to, from) in info.bytes.iter_mut().zip(bytes) {
        *to = *from;
        info.size += 1;
        info.bits += 8;
    }
    // SAFETY: the kernel reads `size` bytes of `info.bytes`, which has at least that many.
    retry_interrupted(|| check(unsafe { libc::ioctl(random.as_fd().as_raw_fd(), RNDADDENTROPY, &raw const info) }))?;
    // SAFETY: the request takes no argument.
    match retry_interrupted(|| check(unsafe { libc::ioctl(random.as_fd().as_raw_fd(), RNDRESEEDCRNG) })) {
        // The generator has no key yet: its first one will be of this pool.
        Err(error) if error.raw_os_error() == Some(libc::ENODATA) => Ok(()),
        result => result.map(drop),
    }
}

/// Makes the clock run faster or slower by 0.05 % until so many microseconds are made up for (adjtime(3)). Replaces an earlier
/// request; 0 ends it.
pub fn slew_clock(micros: i64) -> io::Result<()> {
    // SAFETY: the structure has integers only, for which zeros are valid.
    let mut request: libc::timex = unsafe { std::mem::zeroed() };
    request.modes = libc::ADJ_OFFSET_SINGLESHOT;
    request.offset = micros;
    // SAFETY: the kernel reads and writes the structure, which outlives the call.
    check(unsafe { libc::adjtimex(&raw mut request) }).map(drop)
}

#[repr(C)]
struct Partition {
    start: i64,
    length: i64,
    number: c_int,
    device_name: [u8; 64],
    volume_name: [u8; 64],
}

fn blkpg(disk: impl AsFd, operation: c_int, start: i64, length: i64, number: u8) -> io::Result<()> {
    #[repr(C)]
    struct Argument {
        operation: c_int,
        flags: c_int,
        length: c_int,
        data: *mut c_void,
    }
    let mut partition =
        Partition { start, length, number: c_int::from(number), device_name: [0; 64], volume_name: [0; 64] };
    let argument = Argument {
        operation,
        flags: 0,
        length: size_of::<Partition>() as c_int,
        data: (&raw mut partition).cast::<c_void>(),
    };
    // SAFETY: `argument` points to a partition record that lives until the call returns.
    retry_interrupted(|| check(unsafe { libc::ioctl(disk.as_fd().as_raw_fd(), BLKPG, &raw const argument) })).map(drop)
}

/// Adds a partition (bytes from the start of the disk, bytes) to an open disk.
pub fn add_partition(disk: impl AsFd, number: u8, start: i64, length: i64) -> io::Result<()> {
    blkpg(disk, BLKPG_ADD_PARTITION, start, length, number)
}

/// Deletes a partition of an open disk.
pub fn delete_partition(disk: impl AsFd, number: u8) -> io::Result<()> {
    blkpg(disk, BLKPG_DEL_PARTITION, 0, 0, number)
}

/// Changes the length of a partition of an open disk.
pub fn resize_partition(disk: impl AsFd, number: u8, start: i64, length: i64) -> io::Result<()> {
    blkpg(disk, BLKPG_RESIZE_PARTITION, start, length, number)
}

/// Sets whether an open block device is read-only for later openers.
pub fn set_read_only(device: impl AsFd, read_only: bool) -> io::Result<()> {
    let flag = c_int::from(read_only);
    // SAFETY: the kernel reads one number, which lives until the call returns.
    retry_interrupted(|| check(unsafe { libc::ioctl(device.as_fd().as_raw_fd(), BLKROSET, &raw const flag) })).map(drop)
}

/// Sets a terminal's size.
pub fn set_window_size(terminal: impl AsFd, columns: u16, rows: u16) -> io::Result<()> {
    let size = libc::winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: the kernel reads one winsize.
    retry_interrupted(|| check(unsafe { libc::ioctl(terminal.as_fd().as_raw_fd(), libc::TIOCSWINSZ, &raw const size) }))
        .map(drop)
}

/// Unlocks a pseudoterminal's slave and opens it, without using its path.
pub fn open_pty_peer(master: impl AsFd) -> io::Result<OwnedFd> {
    let unlocked: c_int = 0;
    let raw = master.as_fd().as_raw_fd();
    // SAFETY: the kernel reads one int.
    retry_interrupted(|| check(unsafe { libc::ioctl(raw, libc::TIOCSPTLCK, &raw const unlocked) }))?;
    let fd = retry_interrupted(|| {
        // SAFETY: takes flags, returns a new descriptor.
        check(unsafe { libc::ioctl(raw, TIOCGPTPEER, libc::O_RDWR | libc::O_NOCTTY | libc::O_CLOEXEC) })
    })?;
    // SAFETY: the descriptor is new and not owned elsewhere.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Makes the terminal on descriptor 0 the controlling one of the caller's session.
pub fn take_terminal() -> io::Result<()> {
    // SAFETY: no memory is passed.
    retry_interrupted(|| check(unsafe { libc::ioctl(0, libc::TIOCSCTTY, 0) })).map(drop)
}

/// Closes every descriptor from 3 up but these.
pub fn close_all_but(keep: &[c_int]) -> io::Result<()> {
    let mut keep: Vec<u32> = keep.iter().filter_map(|fd| u32::try_from(*fd).ok()).filter(|fd| *fd > 2).collect();
    keep.sort_unstable();
    let mut first = 3;
    for fd in keep.into_iter().chain([u32::MAX]) {
        let last = if fd == u32::MAX { fd } else { fd.saturating_sub(1) };
        if first <= last {
            // SAFETY: no memory is passed; the caller, which never returns from where it calls this, uses none of them again.
            let result = unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) };
            if result < 0 {
                return Err(io::Error::last_os_error());
            }
        }
        first = fd.saturating_add(1);
    }
    Ok(())
}

/// Whether the working directory is beneath this thread's root. The kernel follows the mounts upwards. getcwd of the C library is no
/// replacement: for a directory outside, it looks for the root by device and inode, and finds it elsewhere.
pub fn is_beneath_root() -> io::Result<bool> {
    let mut path = [0_u8; libc::PATH_MAX as usize];
    // SAFETY: the kernel writes at most as many bytes as `path` has.
    let length = unsafe { libc::syscall(libc::SYS_getcwd, path.as_mut_ptr(), path.len()) };
    // Outside, the path begins with "(unreachable)".
    if length < 0 { Err(io::Error::last_os_error()) } else { Ok(path.first() == Some(&b'/')) }
}

/// Closes every descriptor from `first` up.
pub fn close_all(first: u32) -> io::Result<()> {
    // SAFETY: no memory is passed; the caller, which is about to live without descriptors, uses none of them again.
    let result = unsafe { libc::syscall(libc::SYS_close_range, first, u32::MAX, 0) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Reaps one process that has ended, and returns its PID and its wait status.
pub fn reap_one() -> Option<(i32, c_int)> {
    let mut status = 0;
    // SAFETY: the kernel writes one int.
    let pid = retry_interrupted(|| check(unsafe { libc::waitpid(-1, &raw mut status, libc::WNOHANG) }))
        .ok()
        .filter(|pid| *pid > 0)?;
    Some((pid, status))
}

/// Forks. `Ok(None)` in the child. Only for a process that has one thread.
pub fn fork() -> io::Result<Option<i32>> {
    // SAFETY: the callers (the agent before its first thread, and the zygote) have one thread.
    match check(unsafe { libc::fork() })? {
        0 => Ok(None),
        pid => Ok(Some(pid)),
    }
}

/// Sets the disposition of a signal to ignore or default.
pub fn set_signal(signal: c_int, ignore: bool) -> io::Result<()> {
    let handler = if ignore { libc::SIG_IGN } else { libc::SIG_DFL };
    // SAFETY: neither disposition runs code of ours.
    if unsafe { libc::signal(signal, handler) } == libc::SIG_ERR { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// The signal that only interrupts the system call of a thread.
pub const WAKE_SIGNAL: c_int = libc::SIGUSR1;

/// Sets a handler for a signal that does nothing, so that the signal only interrupts the system call of its thread.
pub fn let_signal_interrupt(signal: c_int) -> io::Result<()> {
    extern "C" fn nothing(_signal: c_int) {}
    // SAFETY: all zeroes are a valid sigaction: no flags, so that no call is begun anew, and an empty mask.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = nothing as *const () as usize;
    // SAFETY: the handler does nothing, which it may at any time; the old action is not asked for.
    check(unsafe { libc::sigaction(signal, &raw const action, std::ptr::null_mut()) }).map(drop)
}

/// Sends a signal to a thread of this process that has not been joined.
pub fn signal_thread(thread: libc::pthread_t, signal: c_int) -> io::Result<()> {
    // SAFETY: the caller holds the handle of the thread, so its number is not another's.
    match unsafe { libc::pthread_kill(thread, signal) } {
        // ESRCH: it has ended.
        0 | libc::ESRCH => Ok(()),
        error => Err(io::Error::from_raw_os_error(error)),
    }
}

/// Replaces this process; returns only the error.
pub fn execve(path: &CString, args: &[CString], env: &[CString]) -> nix::errno::Errno {
    match nix::unistd::execve(path, args, env) {
        Err(error) => error,
        Ok(never) => match never {},
    }
}

/// Sets how many files this process may open; at most its hard limit, if it may not raise that.
pub fn limit_files(soft: u64, hard: u64) -> io::Result<()> {
    match set_rlimit(libc::RLIMIT_NOFILE, soft, hard) {
        Err(error) if error.raw_os_error() == Some(libc::EPERM) => {
            let mut now = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
            // SAFETY: the kernel writes one rlimit.
            check(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut now) })?;
            set_rlimit(libc::RLIMIT_NOFILE, soft.min(now.rlim_max), hard.min(now.rlim_max))
        }
        set => set,
    }
}

/// Sets a resource limit of this process.
pub fn set_rlimit(resource: u32, soft: u64, hard: u64) -> io::Result<()> {
    let limit = libc::rlimit { rlim_cur: soft, rlim_max: hard };
    // SAFETY: the kernel reads one rlimit.
    check(unsafe { libc::setrlimit(resource, &raw const limit) }).map(drop)
}

/// Loads a device program (struct bpf_insn, 8 bytes each) and attaches it to a cgroup.
pub fn attach_device_program(cgroup: impl AsFd, program: &[[u8; 8]]) -> io::Result<()> {
    const PROG_LOAD: c_int = 5;
    const PROG_ATTACH: c_int = 8;
    const TYPE_CGROUP_DEVICE: u32 = 15;
    const ATTACH_CGROUP_DEVICE: u32 = 6;
    const ALLOW_MULTI: u32 = 2;
    #[repr(C)]
    #[derive(Default)]
    struct Load {
        kind: u32,
        count: u32,
        program: u64,
        license: u64,
        log: [u64; 2],
        rest: [u64; 4],
    }
    #[repr(C)]
    struct Attach {
        target: u32,
        program: u32,
        kind: u32,
        flags: u32,
    }
    let count = u32::try_from(program.len()).unwrap_or(u32::MAX);
    let load = Load {
        kind: TYPE_CGROUP_DEVICE,
        count,
        program: program.as_ptr() as u64,
        license: c"Apache-2.0".as_ptr() as u64,
        ..Load::default()
    };
    let loaded = retry_transient(|| {
        // SAFETY: `load` says the true number of instructions, and everything it points to outlives the call.
        let fd = unsafe { libc::syscall(libc::SYS_bpf, PROG_LOAD, &raw const load, size_of::<Load>()) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor is new and not owned elsewhere; the kernel's descriptors fit an int.
        Ok(unsafe { OwnedFd::from_raw_fd(fd as c_int) })
    })?;
    let attach = Attach {
        target: cgroup.as_fd().as_raw_fd() as u32,
        program: loaded.as_raw_fd() as u32,
        kind: ATTACH_CGROUP_DEVICE,
        flags: ALLOW_MULTI,
    };
    retry_transient(|| {
        // SAFETY: the kernel reads `attach` only.
        let result = unsafe { libc::syscall(libc::SYS_bpf, PROG_ATTACH, &raw const attach, size_of::<Attach>()) };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    })
}

/// Takes ownership of descriptors that a received message carried, or that this process was started with.
pub fn adopt_descriptors(fds: Vec<c_int>) -> Vec<OwnedFd> {
    // SAFETY: the kernel has just installed these descriptors for this process; no other code in it owns them.
    fds.into_iter().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }).collect()
}

/// Converts a listening vsock socket to tokio's type. Must be called inside a runtime.
pub fn vsock_listener(fd: OwnedFd) -> tokio_vsock::VsockListener {
    use std::os::fd::IntoRawFd;
    // SAFETY: the descriptor is a listening vsock socket whose ownership passes on.
    unsafe { tokio_vsock::VsockListener::from_raw_fd(fd.into_raw_fd()) }
}

/// Registers a file for readiness events. Must be called inside a runtime.
pub fn register(file: File) -> io::Result<AsyncFd<File>> {
    // SAFETY: a File owns one descriptor and keeps it open until it is dropped, after its registration.
    Ok(unsafe { AsyncFd::register(file)? })
}

/// Returns the number of a loop device that is free, creating it if there is none. Another process may be faster to use it.
pub fn find_free_loop_device(control: impl AsFd) -> io::Result<c_int> {
    let request = libc::Ioctl::from(loop_device::LOOP_CTL_GET_FREE);
    // SAFETY: no memory is passed.
    retry_interrupted(|| check(unsafe { libc::ioctl(control.as_fd().as_raw_fd(), request) }))
}

/// Gives an open loop device this file, read-only, until the last process closes the device and no file system is mounted from it.
/// Fails with EBUSY if the device has a file.
pub fn configure_loop_device(device: impl AsFd, file: impl AsFd) -> io::Result<()> {
    let request = libc::Ioctl::from(loop_device::LOOP_CONFIGURE);
    // SAFETY: the structure has integers only, for which zeros are valid.
    let mut config: loop_device::loop_config = unsafe { std::mem::zeroed() };
    config.fd = file.as_fd().as_raw_fd().unsigned_abs();
    config.info.lo_flags = loop_device::LO_FLAGS_READ_ONLY as u32 | loop_device::LO_FLAGS_AUTOCLEAR as u32;
    // SAFETY: the kernel reads the structure, which lives until the call returns; both descriptors are open.
    retry_interrupted(|| check(unsafe { libc::ioctl(device.as_fd().as_raw_fd(), request, &raw const config) }))
        .map(drop)
}

/// Mounts an EROFS image read-only on a directory, from block devices or from regular files. Kernels that cannot mount files
/// (before Linux 6.12) fail with ENOTBLK.
pub fn mount_erofs(tree: &Path, layers: &[PathBuf], point: &Path) -> io::Result<()> {
    const SET_FLAG: u32 = 0;
    const SET_STRING: u32 = 1;
    const CREATE: u32 = 6;
    const CLOEXEC: u32 = 1;
    const READ_ONLY_NO_SETUID_NO_DEVICES: u32 = 7;
    let new = |fd: libc::c_long| {
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor is new and not owned elsewhere; the kernel's descriptors fit an int.
        Ok(unsafe { OwnedFd::from_raw_fd(fd as c_int) })
    };
    // SAFETY: the name is a string with a closing zero.
    let context = new(unsafe { libc::syscall(libc::SYS_fsopen, c"erofs".as_ptr(), CLOEXEC) })?;
    let set = |command: u32, key: Option<&CStr>, value: Option<&CStr>| {
        let (key, value) = (key.map_or(std::ptr::null(), CStr::as_ptr), value.map_or(std::ptr::null(), CStr::as_ptr));
        // SAFETY: both are null or strings with a closing zero that live until the call returns.
        let result = unsafe { libc::syscall(libc::SYS_fsconfig, context.as_raw_fd(), command, key, value, 0) };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    };
    set(SET_STRING, Some(c"source"), Some(&c_path(tree)?))?;
    for layer in layers {
        set(SET_STRING, Some(c"device"), Some(&c_path(layer)?))?;
    }
    set(SET_FLAG, Some(c"ro"), None)?;
    set(CREATE, None, None)?;
    // SAFETY: no memory is passed.
    let mounted =
        unsafe { libc::syscall(libc::SYS_fsmount, context.as_raw_fd(), CLOEXEC, READ_ONLY_NO_SETUID_NO_DEVICES) };
    nacelle_base::mounts::attach(new(mounted)?, point)
}

fn c_path(path: &Path) -> io::Result<CString> {
    CString::new(path.as_os_str().as_bytes()).map_err(|_zero| io::ErrorKind::InvalidInput.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::mount::{MsFlags, mount};
    use nix::sched::{CloneFlags, unshare};
    use nix::unistd::{chdir, chroot, getcwd};

    #[test]
    fn a_working_directory_outside_the_root_is_known() {
        if !nix::unistd::geteuid().is_root() {
            println!("skipped: only root can change its root");
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let inside = directory.path().join("root/below");
        std::fs::create_dir_all(&inside).unwrap();
        let path = directory.path().to_owned();
        let thread = std::thread::spawn(move || {
            // Root, working directory and mounts of this thread alone.
            unshare(CloneFlags::CLONE_NEWNS).unwrap();
            let none = None::<&str>;
            mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).unwrap();
            let (root, again) = (path.join("root"), path.join("again"));
            std::fs::create_dir(&again).unwrap();
            mount(Some(&root), &again, none, MsFlags::MS_BIND, none).unwrap();
            chdir(&again.join("below")).unwrap();
            assert!(is_beneath_root().unwrap());
            chroot(&root).unwrap();
            assert!(!is_beneath_root().unwrap());
            // Why the C library is not asked.
            assert_eq!(getcwd().unwrap(), Path::new("/below"));
            chdir("/below").unwrap();
            assert!(is_beneath_root().unwrap());
            std::fs::remove_dir("/below").unwrap();
            assert_eq!(is_beneath_root().unwrap_err().raw_os_error(), Some(libc::ENOENT));
        });
        thread.join().unwrap();
    }
}
