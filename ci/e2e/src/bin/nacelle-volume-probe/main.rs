//! Tests that two containers share one directory: `hold DIR` in one container waits for what `meet DIR` does in another. Each
//! step works only if one kernel has a single inode for both: a UNIX socket, a FIFO, locks of both kinds, a shared mapping,
//! inotify. With `ro` the process that meets cannot write. `nameless DIR` needs no other: it works with a file without a name
//! (O_TMPFILE) and names it at last. Prints a line for each step; fails after five minutes.

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, Flock, FlockArg, fcntl};
use nix::sys::stat::Mode;
use rustix::fs::inotify::{self, CreateFlags, Reader, WatchFlags};
use rustix::fs::{AtFlags, CWD};
use std::error::Error;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::Duration;
use vm_memory::{Bytes, FileOffset, MmapRegion, VolatileMemory};

const TIME_LIMIT: Duration = Duration::from_secs(300);
/// The bytes in the mapping: the holder's first, that of the process that meets, and the holder's last.
const HELD: u8 = b'#';
const ASKED: u8 = b'?';
const ANSWERED: u8 = b'!';

type ProbeResult = Result<(), Box<dyn Error>>;

fn main() -> ProbeResult {
    std::thread::spawn(|| {
        std::thread::sleep(TIME_LIMIT);
        eprintln!("the other one did not come");
        std::process::exit(2);
    });
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let read_only = arguments.get(2).is_some_and(|word| word == "ro");
    match arguments.as_slice() {
        [word, dir, ..] if word == "hold" => hold(Path::new(dir), read_only),
        [word, dir, ..] if word == "meet" => meet(Path::new(dir), read_only),
        [word, dir] if word == "nameless" => name_a_file(Path::new(dir)),
        _ => Err("usage: nacelle-volume-probe hold|meet DIR [ro], or nameless DIR".into()),
    }
}

/// Returns a lock of the whole file for fcntl.
fn record_lock(kind: i32) -> FcntlArg<'static> {
    let lock = libc::flock { l_type: kind as libc::c_short, l_whence: 0, l_start: 0, l_len: 0, l_pid: 0 };
    FcntlArg::F_SETLK(Box::leak(Box::new(lock)))
}

fn map(file: File, writable: bool) -> Result<MmapRegion, Box<dyn Error>> {
    let write = if writable { libc::PROT_WRITE } else { 0 };
    Ok(MmapRegion::build(Some(FileOffset::new(file, 0)), 4096, libc::PROT_READ | write, libc::MAP_SHARED)?)
}

fn wait_for(map: &MmapRegion, byte: u8) -> ProbeResult {
    while map.as_volatile_slice().read_obj::<u8>(0)? != byte {
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

fn hold(dir: &Path, read_only: bool) -> ProbeResult {
    for name in ["sock", "fifo", "flock", "fcntl", "map", "event"] {
        let _ = fs::remove_file(dir.join(name)); // of an earlier one
    }
    let listener = UnixListener::bind(dir.join("sock"))?;
    nix::unistd::mkfifo(&dir.join("fifo"), Mode::from_bits_truncate(0o666))?;
    let _flock = Flock::lock(File::create(dir.join("flock"))?, FlockArg::LockExclusive).map_err(|(_, errno)| errno)?;
    let record = File::create(dir.join("fcntl"))?;
    fcntl(&record, record_lock(libc::F_WRLCK))?;
    let file = File::options().read(true).write(true).create_new(true).open(dir.join("map"))?;
    file.set_len(4096)?;
    let map = map(file, true)?;
    map.as_volatile_slice().write_obj(HELD, 0)?;
    let watcher = inotify::init(CreateFlags::CLOEXEC)?;
    inotify::add_watch(&watcher, dir, WatchFlags::CREATE)?;
    println!("ready");
    let mut heard = String::new();
    listener.accept()?.0.read_to_string(&mut heard)?;
    println!("socket: {heard}");
    println!("fifo: {}", fs::read_to_string(dir.join("fifo"))?);
    if !read_only {
        wait_for(&map, ASKED)?;
        map.as_volatile_slice().write_obj(ANSWERED, 0)?;
        println!("map: answered");
        let mut events = [MaybeUninit::uninit(); 4096];
        let mut reader = Reader::new(watcher, &mut events);
        let event = reader.next()?;
        println!("event: {}", event.file_name().unwrap_or_default().to_string_lossy());
    }
    // Locks are held until the other process has seen them.
    listener.accept()?;
    println!("done");
    Ok(())
}

fn meet(dir: &Path, read_only: bool) -> ProbeResult {
    let open = |name: &str| File::options().read(true).write(!read_only).open(dir.join(name));
    UnixStream::connect(dir.join("sock"))?.write_all(b"hello")?;
    File::options().write(true).open(dir.join("fifo"))?.write_all(b"through")?;
    match Flock::lock(open("flock")?, FlockArg::LockExclusiveNonblock) {
        Err((_, Errno::EWOULDBLOCK)) => println!("flock: held"),
        other => return Err(format!("flock: {other:?}").into()),
    }
    let kind = if read_only { libc::F_RDLCK } else { libc::F_WRLCK };
    match fcntl(open("fcntl")?, record_lock(kind)) {
        Err(Errno::EAGAIN | Errno::EACCES) => println!("fcntl: held"),
        other => return Err(format!("fcntl: {other:?}").into()),
    }
    let map = map(open("map")?, !read_only)?;
    wait_for(&map, HELD)?;
    println!("map: seen");
    if read_only {
        match File::create(dir.join("event")).map_err(|error| error.raw_os_error()) {
            Err(Some(libc::EROFS)) => println!("event: read-only"),
            other => return Err(format!("event: {other:?}").into()),
        }
    } else {
        map.as_volatile_slice().write_obj(ASKED, 0)?;
        wait_for(&map, ANSWERED)?;
        File::create(dir.join("event"))?;
    }
    UnixStream::connect(dir.join("sock"))?;
    println!("done");
    Ok(())
}

/// Creates a file without a name, uses it, and gives it the name `named`.
fn name_a_file(dir: &Path) -> ProbeResult {
    let create =
        |flags: i32| File::options().read(true).write(true).custom_flags(libc::O_TMPFILE | flags).mode(0o666).open(dir);
    let link = |file: &File, name: &str| {
        let from = format!("/proc/self/fd/{}", file.as_raw_fd());
        rustix::fs::linkat(CWD, from, CWD, dir.join(name), AtFlags::SYMLINK_FOLLOW)
    };
    let names = |step: &str| -> ProbeResult {
        let count =
            fs::read_dir(dir)?.filter(|entry| entry.as_ref().is_ok_and(|entry| entry.file_name() == "named")).count();
        println!("{step}: {count} names");
        Ok(())
    };
    let _ = fs::remove_file(dir.join("named")); // of an earlier one
    let mut file = create(0)?;
    file.write_all(b"without a name")?;
    file.sync_all()?;
    let status = file.metadata()?;
    println!("created: {} links, {} bytes", status.nlink(), status.len());
    names("before")?;
    let again = fs::read_to_string(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
    println!("opened again: {again}");
    file.set_len(4096)?;
    file.set_permissions(fs::Permissions::from_mode(0o640))?;
    let mapped = map(file.try_clone()?, true)?;
    mapped.as_volatile_slice().write_slice(b"mapped!", 0)?;
    link(&file, "named")?;
    names("linked")?;
    let named = File::options().read(true).write(true).open(dir.join("named"))?;
    let (ours, theirs) = (file.metadata()?, named.metadata()?);
    println!("one inode: {}, {} links, mode {:o}", ours.ino() == theirs.ino(), ours.nlink(), theirs.mode() & 0o7777);
    file.write_all_at(b"later", 100)?;
    let mut text = [0; 105];
    named.read_exact_at(&mut text, 0)?;
    println!("through its name: {} {}", String::from_utf8_lossy(&text[..14]), String::from_utf8_lossy(&text[100..]));
    let exclusive = create(libc::O_EXCL)?;
    println!("exclusive: {:?}", link(&exclusive, "other").err());
    drop((file, named, mapped, exclusive));
    println!("closed: {} bytes", fs::metadata(dir.join("named"))?.len());
    Ok(())
}
