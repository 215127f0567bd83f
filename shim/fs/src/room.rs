//! Implements the file-server process `nacelle-fs`: the pod process forks it before it drops its rights; it enters a root
//! that contains only the volumes, and answers requests until the pod process ends. It has only one thread.

use crate::error::ShareError;
use crate::mounts::Mounts;
use crate::pusher::Pusher;
use crate::queue::Served;
use crate::server::Server;
use crate::sys;
use nacelle_base::Chain;
use nacelle_base::descriptors::receive_with_descriptors;
use nacelle_base::retry::{self, retry_interrupted};
use nacelle_base::share::{
    MAX_MESSAGE, MAX_SHARED_VIRTQUEUE, MAX_VOLUME_NAME, QUEUES, REQUEST_HEADER, SELECT_VOLUME, SHARE_VIRTQUEUE,
    SharedVirtqueue, UNSHARE_VIRTQUEUE,
};
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

/// The mount point of the volumes: the share's root, which is read-only.
pub(crate) const SHOWN: &str = "/shown";
/// The same directory, writable: mount points for volumes are created here.
pub(crate) const PLACES: &str = "/places";
/// The mount point of copied-in volumes, which the guest cannot reach.
pub(crate) const PUSHED: &str = "/pushed";
/// The limit for the process to become ready: it makes five mounts.
const START_LIMIT: Duration = Duration::from_secs(60);
/// The byte that it sends when it is ready.
const READY: u8 = b'!';
/// The capabilities that it keeps, all for files: CHOWN, DAC_OVERRIDE, FOWNER, FSETID, SETGID, SETUID (to act as the
/// guest's user), SETFCAP. Without MKNOD it cannot create devices, without DAC_READ_SEARCH it cannot open files by handle.
const CAPABILITIES: u64 = 1 | 1 << 1 | 1 << 3 | 1 << 4 | 1 << 6 | 1 << 7 | 1 << 31;

/// The pod process's handle on the file-server process.
#[derive(Debug)]
pub struct Share {
    process: Pid,
    ways: Ways,
}

/// How a pod's volumes are divided into shares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shown {
    /// One share contains all volumes.
    All,
    /// So many shares, each of one volume, which is selected later (`nacelle_base::share::SELECT_VOLUME`).
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

/// The channels to the file-server process.
#[derive(Debug)]
pub struct Ways {
    /// For each share one stream per queue of its device: the guest's file requests.
    pub files: Vec<[UnixStream; QUEUES]>,
    /// The requests of the pod process for copied-in volumes (`nacelle_base::push`).
    pub pushed: UnixStream,
}

impl Share {
    /// Returns the pid of the file-server process. It ends with the pod process.
    pub fn process(&self) -> Pid {
        self.process
    }

    /// Waits until the process is ready; returns the channels to it.
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

/// Starts the file-server process. It builds its root over the directory `scaffold`, in its own mount namespace. The caller
/// must have one thread only, and no open descriptors that the process must not inherit. `cache` is how long the guest may
/// cache names and attributes.
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
            // The child must see the end of these streams when the parent closes them.
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

/// Runs the file-server process to its end.
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
    // The kernel clears this signal when the process first acts as another user; from then on it notices the parent's end
    // by its streams.
    prctl::set_pdeathsig(Signal::SIGKILL).map_err(step(bound))?;
    prctl::set_name(c"nacelle-fs").map_err(step(bound))?;
    if let Err(error) = be_named() {
        tracing::debug!("the process for volumes looks like the pod process: {error}");
    }
    if getppid() != parent {
        return Ok(());
    }
    // The modes of files are as the guest requests.
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
        // The pod process has ended, or closed the streams.
        Err(error) if matches!(error.kind(), io::ErrorKind::UnexpectedEof | io::ErrorKind::BrokenPipe) => Ok(()),
        other => other.map_err(serve),
    }
}

/// Changes the program's name in /proc/self/cmdline, which is a copy of the pod process's.
fn be_named() -> io::Result<()> {
    const NAMES: [&[u8]; 2] = [b"nacelle-pod", b"nacelle-fs\0"];
    let line = fs::read("/proc/self/cmdline")?;
    let Some(at) = line.windows(NAMES[0].len()).position(|name| name == NAMES[0]) else { return Ok(()) };
    // Field 48 of proc(5); the command's name may contain spaces and parentheses, so fields are counted from the last one.
    let stat = fs::read_to_string("/proc/self/stat")?;
    let start = stat.rsplit_once(')').and_then(|(_, fields)| fields.split_whitespace().nth(45)?.parse::<u64>().ok());
    let start = start.ok_or(io::ErrorKind::InvalidData)?;
    File::options().write(true).open("/proc/self/mem")?.write_all_at(NAMES[1], start + at as u64)
}

/// Builds a root that contains only the mount points of volumes, read-only and writable, and changes to the read-only one.
/// Returns the directory of copied-in volumes, which stays open.
fn build(scaffold: &Path) -> nix::Result<OwnedFd> {
    let none = None::<&str>;
    let mode = FileMode::from_bits_truncate(0o755);
    unshare(CloneFlags::CLONE_NEWNS)?;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)?;
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    mount(Some("nacelle"), scaffold, Some("tmpfs"), flags, Some("mode=0755,size=1m,nr_inodes=64k"))?;
    chdir(scaffold)?;
    let [shown, places, pushed] = [SHOWN, PLACES, PUSHED].map(|path| path.trim_start_matches('/'));
    for directory in [shown, places, pushed] {
        mkdir(directory, mode)?;
    }
    mount(Some(places), shown, none, MsFlags::MS_BIND, none)?;
    mount(none, shown, none, flags | MsFlags::MS_REMOUNT | MsFlags::MS_BIND | MsFlags::MS_RDONLY, none)?;
    // The old root is now stacked on the new one, and is unmounted.
    pivot_root(".", ".")?;
    umount2(".", MntFlags::MNT_DETACH)?;
    let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    let pushed = retry_interrupted(|| open(PUSHED, flags, FileMode::empty()))?;
    chroot(SHOWN)?;
    chdir("/")?;
    Ok(pushed)
}

/// The channel of one of the guest's queues.
struct Way {
    stream: UnixStream,
    /// The virtqueue, if it is shared with this process: then requests come by it, and not by the stream.
    lent: Option<Served>,
}

/// One share.
struct Guest {
    /// `None` until the pod process has selected the volume of the share.
    server: Option<Server>,
    ways: [Way; QUEUES],
}

/// The parameters of new servers.
struct Maker {
    /// This process's `/proc/self/fd`.
    fds: File,
    /// The maximum number of open files of each server.
    files: u64,
    cache: Duration,
    mounts: Arc<Mounts>,
}

impl Maker {
    fn server(&self, root: &str) -> io::Result<Server> {
        Server::new(root, self.fds.try_clone()?, self.files, self.cache, self.mounts.clone())
    }

    /// Creates the server of a part: one volume of a container, which must be a directory.
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

/// Serves requests until a stream ends: those of the high-priority queues first, the pod process's last.
fn answer_all(shares: &mut [Guest], pusher: &mut Pusher, maker: &Maker) -> io::Result<()> {
    loop {
        // A virtqueue has more requests than its share of a round.
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
        // A virtqueue that the guest broke would stay readable forever.
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
    let mut header = [0; REQUEST_HEADER];
    way.stream.read_exact(&mut header)?;
    let (length, room) = header.split_at(4);
    let number = |bytes: &[u8]| bytes.try_into().map_or(0, u32::from_le_bytes);
    let (length, room) = (number(length), number(room) as usize);
    if length == SELECT_VOLUME {
        if !idle || room > MAX_VOLUME_NAME {
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
        (SHARE_VIRTQUEUE, None) => {
            let (lent, fds) = lent(&mut way.stream, room)?;
            way.lent = Some(Served::new(&lent, fds, server.own())?);
            return Ok(());
        }
        (UNSHARE_VIRTQUEUE, Some(lent)) => {
            let next = u32::from(lent.next_avail());
            way.lent = None;
            return way.stream.write_all(&next.to_le_bytes());
        }
        (_, None) if length as usize <= MAX_MESSAGE => {}
        _ => return Err(bad()),
    }
    server.answer(&mut way.stream, length as usize, room)
}

/// Receives an encoded [`SharedVirtqueue`] of this length and the descriptors that come with it.
fn lent(stream: &mut UnixStream, length: usize) -> io::Result<(SharedVirtqueue, Vec<OwnedFd>)> {
    let bad = || io::Error::new(io::ErrorKind::InvalidData, "what was lent is no queue");
    if length > MAX_SHARED_VIRTQUEUE {
        return Err(bad());
    }
    let mut bytes = vec![0; length];
    let (got, fds) = receive_with_descriptors(&*stream, &mut bytes)?;
    stream.read_exact(bytes.get_mut(got..).unwrap_or_default())?;
    Ok((SharedVirtqueue::decode(&bytes).ok_or_else(bad)?, fds))
}
