//! Owns: the process `nacelle-fs`: made of the pod process before that gives up its rights, shut in with nothing but the
//! place for volumes, answering until the pod process ends.
//! Threads: one.

use crate::error::ShareError;
use crate::mounts::Mounts;
use crate::pusher::Pusher;
use crate::queue::Served;
use crate::server::Server;
use crate::sys;
use nacelle_base::Chain;
use nacelle_base::descriptors::receive_with_descriptors;
use nacelle_base::retry::{self, retry_interrupted};
use nacelle_base::share::{HEADER, LEND, Lent, MAX_LENT, MAX_MESSAGE, MAX_PART, QUEUES, RETURN, SHOW};
use nacelle_jail::Mode;
use nix::errno::Errno;
use nix::fcntl::{OFlag, open};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::poll::{PollFd, PollFlags};
use nix::sched::{CloneFlags, unshare};
use nix::sys::prctl;
use nix::sys::resource::{Resource, getrlimit};
use nix::sys::signal::Signal;
use nix::sys::stat::{Mode as FileMode, umask};
use nix::unistd::{Pid, chdir, chroot, getppid, mkdir, pivot_root};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Where the volumes are mounted: the share's root, which cannot be written.
pub(crate) const SHOWN: &str = "/shown";
/// The same folder, where places for them are made.
pub(crate) const PLACES: &str = "/places";
/// Where the daemon mounts volumes that are pushed: out of the guest's reach.
pub(crate) const PUSHED: &str = "/pushed";
/// What it may take to be ready: it makes five mounts.
const START_LIMIT: Duration = Duration::from_secs(60);
/// What it says then.
const READY: u8 = b'!';
/// What it keeps of root's rights, as far as files are concerned: CHOWN, DAC_OVERRIDE, FOWNER, FSETID, SETGID, SETUID (to
/// act as the user in the guest), SETFCAP. Not MKNOD: no devices; not DAC_READ_SEARCH: no files by handle.
const CAPABILITIES: u64 = 1 | 1 << 1 | 1 << 3 | 1 << 4 | 1 << 6 | 1 << 7 | 1 << 31;

/// The pod process's end.
#[derive(Debug)]
pub struct Share {
    process: Pid,
    ways: Ways,
}

/// What guests see of the volumes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shown {
    /// One share with all of them.
    All,
    /// So many shares, each with a part of them, of which the process is told which (`nacelle_base::share::SHOW`).
    Parts(usize),
}

impl Shown {
    fn shares(self) -> usize {
        match self {
            Shown::All => 1,
            Shown::Parts(count) => count.max(1),
        }
    }
}

/// The ways to the process.
#[derive(Debug)]
pub struct Ways {
    /// Of each share one for each queue of its device: the guest's requests for files.
    pub files: Vec<[UnixStream; QUEUES]>,
    /// The pod process's questions about volumes that are pushed (`nacelle_base::push`).
    pub pushed: UnixStream,
}

impl Share {
    /// The process that has the volumes. It ends with the one that has made it.
    pub fn process(&self) -> Pid {
        self.process
    }

    /// Waits until it is ready; then the ways to it.
    pub fn ready(self) -> Result<Ways, ShareError> {
        let silent = |source| ShareError::Silent { source };
        let mut word = [0];
        let mut first =
            self.ways.files.first().map(|[first, _]| first).ok_or_else(|| silent(io::ErrorKind::NotFound.into()))?;
        let read = first.set_read_timeout(Some(START_LIMIT)).and_then(|()| first.read_exact(&mut word));
        read.map_err(|source| silent(retry::timed_out(source)))?;
        first.set_read_timeout(None).map_err(silent)?;
        Ok(self.ways)
    }
}

/// Starts the process. `scaffold` is a folder over which it makes its root, in a mount namespace of its own. There must be
/// one thread only, and nothing open that is not for it. `cache` is how long the guest may believe what it was told of a
/// name or a file's attributes.
pub fn start(scaffold: &Path, seccomp: Mode, cache: Duration, shown: Shown) -> Result<Share, ShareError> {
    let failed = |source| ShareError::Step { what: "be started", source };
    let pair = || UnixStream::pair().map_err(failed);
    let (mut files, mut its_files) = (Vec::new(), Vec::new());
    for _ in 0..shown.shares() {
        let ((first, its_first), (second, its_second)) = (pair()?, pair()?);
        files.push([first, second]);
        its_files.push([its_first, its_second]);
    }
    let (pushed, its_pushed) = pair()?;
    let parent = nix::unistd::getpid();
    match sys::fork().map_err(failed)? {
        Some(process) => Ok(Share { process, ways: Ways { files, pushed } }),
        None => {
            // It hears of their end.
            drop((files, pushed));
            match live(parent, scaffold, seccomp, cache, shown, Ways { files: its_files, pushed: its_pushed }) {
                Ok(()) => sys::exit(0),
                Err(error) => {
                    tracing::error!("{}", Chain(&error));
                    sys::exit(1)
                }
            }
        }
    }
}

/// The life of the process.
fn live(
    parent: Pid,
    scaffold: &Path,
    seccomp: Mode,
    cache: Duration,
    shown: Shown,
    ways: Ways,
) -> Result<(), ShareError> {
    let Ways { files: streams, pushed } = ways;
    let step = |what| move |errno: Errno| ShareError::Step { what, source: errno.into() };
    let bound = "be bound to the pod process";
    // Until it acts as another user for the first time; afterwards it hears of the end by its streams.
    prctl::set_pdeathsig(Signal::SIGKILL).map_err(step(bound))?;
    prctl::set_name(c"nacelle-fs").map_err(step(bound))?;
    if let Err(error) = be_named() {
        tracing::debug!("the process for volumes looks like the pod process: {error}");
    }
    if getppid() != parent {
        return Ok(());
    }
    // Modes are as the guest says.
    umask(FileMode::empty());
    let fds = retry_interrupted(|| open("/proc/self/fd", OFlag::O_PATH | OFlag::O_CLOEXEC, FileMode::empty()))
        .map_err(step("find its files"))?;
    let places = build(scaffold).map_err(step("leave the node's files"))?;
    let mounts = Mounts::new(&fds).map_err(|source| ShareError::Step { what: "find its mounts", source })?;
    nacelle_jail::confine(seccomp, CAPABILITIES)?;
    let (files, _) = getrlimit(Resource::RLIMIT_NOFILE).map_err(step("find its limits"))?;
    let serve = |source| ShareError::Step { what: "serve", source };
    let files = files / u64::try_from(shown.shares()).unwrap_or(u64::MAX);
    let maker = Maker { fds: File::from(fds), files, cache, mounts: Arc::new(mounts) };
    let mut shares = Vec::with_capacity(streams.len());
    for streams in streams {
        let server = match shown {
            Shown::All => Some(maker.server("/").map_err(serve)?),
            Shown::Parts(_) => None,
        };
        shares.push(Guest { server, ways: streams.map(|stream| Way { stream, lent: None }) });
    }
    let mut pusher = Pusher::new(pushed, places).map_err(serve)?;
    let first = shares.first_mut().and_then(|share| share.ways.first_mut());
    first.map_or(Ok(()), |first| first.stream.write_all(&[READY])).map_err(serve)?;
    match answer_all(&mut shares, &mut pusher, &maker) {
        // The pod process has ended, or wants no more.
        Err(error) if matches!(error.kind(), io::ErrorKind::UnexpectedEof | io::ErrorKind::BrokenPipe) => Ok(()),
        other => other.map_err(serve),
    }
}

/// Changes the name of the program in the command line that others see: it is a copy of the pod process's.
fn be_named() -> io::Result<()> {
    const NAMES: [&[u8]; 2] = [b"nacelle-pod", b"nacelle-fs\0"];
    let line = fs::read("/proc/self/cmdline")?;
    let Some(at) = line.windows(NAMES[0].len()).position(|name| name == NAMES[0]) else { return Ok(()) };
    // Field 48 (proc(5)); the command's name may hold spaces and brackets, so fields count from the last one.
    let stat = fs::read_to_string("/proc/self/stat")?;
    let start = stat.rsplit_once(')').and_then(|(_, fields)| fields.split_whitespace().nth(45)?.parse::<u64>().ok());
    let start = start.ok_or(io::ErrorKind::InvalidData)?;
    File::options().write(true).open("/proc/self/mem")?.write_all_at(NAMES[1], start + at as u64)
}

/// A root with nothing but the place for volumes, and the same place where it can be written; then a root in that. What
/// stays open is the place for volumes that are pushed.
fn build(scaffold: &Path) -> nix::Result<OwnedFd> {
    let none = None::<&str>;
    let mode = FileMode::from_bits_truncate(0o755);
    unshare(CloneFlags::CLONE_NEWNS)?;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)?;
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    mount(Some("nacelle"), scaffold, Some("tmpfs"), flags, Some("mode=0755,size=1m,nr_inodes=64k"))?;
    chdir(scaffold)?;
    let [shown, places, pushed] = [SHOWN, PLACES, PUSHED].map(|path| path.trim_start_matches('/'));
    for folder in [shown, places, pushed] {
        mkdir(folder, mode)?;
    }
    mount(Some(places), shown, none, MsFlags::MS_BIND, none)?;
    mount(none, shown, none, flags | MsFlags::MS_REMOUNT | MsFlags::MS_BIND | MsFlags::MS_RDONLY, none)?;
    // The old root lands on the new one, and is taken off.
    pivot_root(".", ".")?;
    umount2(".", MntFlags::MNT_DETACH)?;
    let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    let pushed = retry_interrupted(|| open(PUSHED, flags, FileMode::empty()))?;
    chroot(SHOWN)?;
    chdir("/")?;
    Ok(pushed)
}

/// The way of one of the guest's queues.
struct Way {
    stream: UnixStream,
    /// The queue, if it is lent to this process: then requests come by it, and not by the stream.
    lent: Option<Served>,
}

/// One share.
struct Guest {
    /// None: nobody has said yet what it shows.
    server: Option<Server>,
    ways: [Way; QUEUES],
}

/// What servers are made of.
struct Maker {
    /// This process's own descriptors.
    fds: File,
    /// How many each may have open.
    files: u64,
    cache: Duration,
    mounts: Arc<Mounts>,
}

impl Maker {
    fn server(&self, root: &str) -> io::Result<Server> {
        Server::new(root, self.fds.try_clone()?, self.files, self.cache, self.mounts.clone())
    }

    /// One that shows a part: a volume of a container, which is a folder.
    fn part(&self, name: &str) -> io::Result<Server> {
        let plain = |name: &str| !name.is_empty() && !name.starts_with('.') && !name.contains(['/', '\0']);
        if !name.split_once('/').is_some_and(|(container, number)| plain(container) && plain(number)) {
            return Err(Errno::EINVAL.into());
        }
        let root = format!("/{name}");
        if !fs::symlink_metadata(&root)?.is_dir() {
            return Err(Errno::ENOTDIR.into());
        }
        self.server(&root)
    }
}

/// Answers requests, those of high priority first and the pod process's last, until a stream ends.
fn answer_all(shares: &mut [Guest], pusher: &mut Pusher, maker: &Maker) -> io::Result<()> {
    loop {
        // What is more than a queue's share of the time.
        let mut more = false;
        for Guest { server, ways } in shares.iter_mut() {
            let Some(server) = server else { continue };
            let lent = ways.iter_mut().filter_map(|way| way.lent.as_mut());
            more = lent.fold(more, |more, lent| lent.serve(server) | more);
        }
        let deadline = if more { Some(Instant::now()) } else { pusher.due() };
        let [asked, news] = [pusher.stream(), pusher.watcher()];
        let ways = || shares.iter().flat_map(|share| &share.ways);
        let streams = ways().map(|way| way.stream.as_fd());
        // A queue that the guest broke would be ready for ever.
        let kicks: Vec<_> =
            ways().map(|way| way.lent.as_ref().filter(|lent| !lent.is_broken()).map(AsFd::as_fd)).collect();
        let fds = [asked, news].into_iter().chain(streams).chain(kicks.iter().flatten().copied());
        let mut events: Vec<PollFd<'_>> = fds.map(|fd| PollFd::new(fd, PollFlags::POLLIN)).collect();
        retry::poll(&mut events, deadline)?;
        let mut ready = events.iter().map(|event| event.any().unwrap_or(false));
        let mut next = || ready.next().unwrap_or(false);
        let (asked, news) = (next(), next());
        let streams: Vec<bool> = ways().map(|_| next()).collect();
        let kicked: Vec<bool> = kicks.iter().map(|kick| kick.is_some() && next()).collect();
        let all = shares.iter_mut().flat_map(|share| &mut share.ways);
        for (way, _) in all.zip(kicked).filter(|(_, kicked)| *kicked) {
            way.lent.as_mut().map(Served::kicked);
        }
        if news {
            pusher.hear()?;
        }
        pusher.tell()?;
        if let Some(number) = streams.iter().position(|ready| *ready) {
            // `QUEUES` is not 0.
            let share = shares.get_mut(number / QUEUES).ok_or(io::ErrorKind::InvalidData)?;
            answer(share, number % QUEUES, maker)?;
        } else if asked {
            pusher.answer()?;
        }
    }
}

fn answer(share: &mut Guest, queue: usize, maker: &Maker) -> io::Result<()> {
    let bad = || io::Error::from(io::ErrorKind::InvalidData);
    let idle = share.ways.iter().all(|way| way.lent.is_none());
    let way = share.ways.get_mut(queue).ok_or_else(bad)?;
    let mut header = [0; HEADER];
    way.stream.read_exact(&mut header)?;
    let (length, room) = header.split_at(4);
    let number = |bytes: &[u8]| bytes.try_into().map_or(0, u32::from_le_bytes);
    let (length, room) = (number(length), number(room) as usize);
    if length == SHOW {
        if !idle || room > MAX_PART {
            return Err(bad());
        }
        let mut name = vec![0; room];
        way.stream.read_exact(&mut name)?;
        let made =
            std::str::from_utf8(&name).map_err(|_no_text| Errno::EINVAL.into()).and_then(|name| maker.part(name));
        let told = made.as_ref().err().map_or(0, |error| error.raw_os_error().unwrap_or(libc::EIO));
        share.server = made.ok();
        return way.stream.write_all(&told.to_le_bytes());
    }
    let server = share.server.as_mut().ok_or_else(bad)?;
    match (length, &way.lent) {
        (LEND, None) => {
            let (lent, fds) = lent(&mut way.stream, room)?;
            way.lent = Some(Served::new(&lent, fds, server.own())?);
            return Ok(());
        }
        (RETURN, Some(lent)) => {
            let next = u32::from(lent.next_avail());
            way.lent = None;
            return way.stream.write_all(&next.to_le_bytes());
        }
        (_, None) if length as usize <= MAX_MESSAGE => {}
        _ => return Err(bad()),
    }
    server.answer(&mut way.stream, length as usize, room)
}

/// What is lent, in so many bytes, and the descriptors that come with them.
fn lent(stream: &mut UnixStream, length: usize) -> io::Result<(Lent, Vec<OwnedFd>)> {
    let bad = || io::Error::new(io::ErrorKind::InvalidData, "what was lent is no queue");
    if length > MAX_LENT {
        return Err(bad());
    }
    let mut bytes = vec![0; length];
    let (got, fds) = receive_with_descriptors(&*stream, &mut bytes)?;
    stream.read_exact(bytes.get_mut(got..).unwrap_or_default())?;
    Ok((Lent::decode(&bytes).ok_or_else(bad)?, fds))
}
