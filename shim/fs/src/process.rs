//! Implements the file-server process `nacelle-fs`: the pod process forks it before it drops its rights; it enters a root
//! that contains only the volumes, and answers requests until the pod process ends. It has only one thread.

use crate::copied_in::CopiedInServer;
use crate::error::ShareError;
use crate::mounts::Mounts;
use crate::server::Server;
use crate::sys;
use crate::virtqueue::ServedVirtqueue;
use nacelle_base::Chain;
use nacelle_base::descriptors::receive_with_descriptors;
use nacelle_base::guest_error;
use nacelle_base::mounts::clone_tree;
use nacelle_base::retry::{self, retry_interrupted};
use nacelle_base::share::{
    MAX_MESSAGE, MAX_SHARED_VIRTQUEUE, MAX_VOLUME_NAME, QUEUES, REQUEST_HEADER, SELECT_VOLUME, SHARE_VIRTQUEUE,
    SharedVirtqueue, UNSHARE_VIRTQUEUE,
};
use nacelle_jail::{Mode, SocketUse};
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

/// The mount point of the volumes: the share's root, which is read-only. A later daemon uses these three paths
/// in a running process, so they cannot change.
pub(crate) const SHARE_ROOT: &str = "/shown";
/// The same directory, writable: mount points for volumes are created here.
pub(crate) const WRITABLE_ROOT: &str = "/places";
/// The mount point of copied-in volumes, which the guest cannot reach.
pub(crate) const COPIED_IN_ROOT: &str = "/pushed";
/// The timeout for the process to become ready: it makes five mounts.
const START_TIMEOUT: Duration = Duration::from_secs(60);
/// The byte that it sends when it is ready.
const READY: u8 = b'!';
/// The capabilities that it keeps, all for files: CHOWN, DAC_OVERRIDE, FOWNER, FSETID, SETGID, SETUID (to act as the
/// guest's user), SETFCAP. Without MKNOD it cannot create devices, without DAC_READ_SEARCH it cannot open files by handle.
const CAPABILITIES: u64 = 1 | 1 << 1 | 1 << 3 | 1 << 4 | 1 << 6 | 1 << 7 | 1 << 31;

/// The pod process's handle on the file-server process.
#[derive(Debug)]
pub struct FileServerProcess {
    pid: Pid,
    channels: FileServerChannels,
}

/// How a pod's volumes are divided into shares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShareLayout {
    /// One share contains all volumes.
    Single,
    /// So many shares, each of one volume, which is selected later (`nacelle_base::share::SELECT_VOLUME`).
    PerVolume(usize),
}

impl ShareLayout {
    fn share_count(self) -> usize {
        match self {
            ShareLayout::Single => 1,
            ShareLayout::PerVolume(count) => count.max(1),
        }
    }
}

/// The parameters of a file-server process.
#[derive(Clone, Copy, Debug)]
pub struct FileServerConfig {
    /// The reaction to a forbidden system call.
    pub seccomp: Mode,
    /// How long the guest may cache names and attributes.
    pub cache: Duration,
    /// How the volumes are divided.
    pub layout: ShareLayout,
    /// Whether it connects to sockets of volumes.
    pub sockets: SocketUse,
    /// The pod's user, to whom the kernel charges its inotify instance: each user of a node has 128 by default. `None` is root, who
    /// shares them with all other programs of the node.
    pub user: Option<u32>,
}

/// The channels to the file-server process.
#[derive(Debug)]
pub struct FileServerChannels {
    /// For each share one stream per queue of its device: the guest's file requests.
    pub file_requests: Vec<[UnixStream; QUEUES]>,
    /// The requests of the pod process for copied-in volumes and socket volumes (`nacelle_base::copied_in`).
    pub copied_in: UnixStream,
}

impl FileServerProcess {
    /// Returns the pid of the file-server process. It ends with the pod process.
    pub fn pid(&self) -> Pid {
        self.pid
    }

    /// Waits until the process is ready; returns the channels to it.
    pub fn wait_until_ready(self) -> Result<FileServerChannels, ShareError> {
        let not_ready = |source| ShareError::NotReady { source };
        let mut byte = [0];
        let mut first = self
            .channels
            .file_requests
            .first()
            .map(|[first, _]| first)
            .ok_or_else(|| not_ready(io::ErrorKind::NotFound.into()))?;
        let read = first.set_read_timeout(Some(START_TIMEOUT)).and_then(|()| first.read_exact(&mut byte));
        read.map_err(|source| not_ready(retry::timed_out(source)))?;
        first.set_read_timeout(None).map_err(not_ready)?;
        Ok(self.channels)
    }
}

/// Starts the file-server process. It builds its root over the directory `scaffold`, in its own mount namespace. The caller
/// must have one thread only, and no open descriptors that the process must not inherit.
pub fn start_file_server(scaffold: &Path, config: FileServerConfig) -> Result<FileServerProcess, ShareError> {
    let failed = |source| ShareError::Step { what: "start the file-server process", source };
    let pair = || UnixStream::pair().map_err(failed);
    let (mut file_requests, mut child_file_requests) = (Vec::new(), Vec::new());
    for _ in 0..config.layout.share_count() {
        let ((first, child_first), (second, child_second)) = (pair()?, pair()?);
        file_requests.push([first, second]);
        child_file_requests.push([child_first, child_second]);
    }
    let (copied_in, child_copied_in) = pair()?;
    let parent = nix::unistd::getpid();
    match sys::fork().map_err(failed)? {
        Some(pid) => Ok(FileServerProcess { pid, channels: FileServerChannels { file_requests, copied_in } }),
        None => {
            // The child must see the end of these streams when the parent closes them.
            drop((file_requests, copied_in));
            match run(
                parent,
                scaffold,
                config,
                FileServerChannels { file_requests: child_file_requests, copied_in: child_copied_in },
            ) {
                Ok(()) => sys::exit(0),
                Err(error) => {
                    guest_error!("{}", Chain(&error));
                    sys::exit(1)
                }
            }
        }
    }
}

/// Runs the file-server process to its end.
fn run(parent: Pid, scaffold: &Path, config: FileServerConfig, channels: FileServerChannels) -> Result<(), ShareError> {
    let FileServerConfig { seccomp, cache, layout, sockets, user } = config;
    let FileServerChannels { file_requests, copied_in } = channels;
    let step = |what| move |errno: Errno| ShareError::Step { what, source: errno.into() };
    let set_up = "bind the file-server process to the pod process";
    // The kernel clears this signal when the process first acts as another user, and does not deliver it from a pod process whose signals
    // Landlock limits; the process then notices the parent's end by its streams.
    prctl::set_pdeathsig(Signal::SIGKILL).map_err(step(set_up))?;
    prctl::set_name(c"nacelle-fs").map_err(step(set_up))?;
    if let Err(error) = set_command_line() {
        tracing::debug!("cannot set the command line of the file-server process, which shows as nacelle-pod: {error}");
    }
    if getppid() != parent {
        return Ok(());
    }
    // The modes of files are as the guest requests.
    umask(FileMode::empty());
    // A mount of its own, above which there is nothing: from a plain descriptor, `..` leads to all of the node's /proc.
    let fds = clone_tree(Path::new("/proc/self/fd"), false)
        .map_err(|source| ShareError::Step { what: "clone the file-server process's /proc/self/fd", source })?;
    let own_proc = retry_interrupted(|| open("/proc/self", OFlag::O_PATH | OFlag::O_CLOEXEC, FileMode::empty()))
        .map_err(step("open the file-server process's /proc/self"))?;
    let copied_in_root = build_root(scaffold).map_err(step("build the root directory of the file-server process"))?;
    let mounts = Mounts::new(own_proc)
        .map_err(|source| ShareError::Step { what: "open the mount table of the file-server process", source })?;
    nacelle_jail::confine(seccomp, CAPABILITIES, sockets)?;
    let (max_files, _) =
        getrlimit(Resource::RLIMIT_NOFILE).map_err(step("read the file-server process's limit of open files"))?;
    let watch = |source| ShareError::Step { what: "create the inotify instance of the file-server process", source };
    let serve = |source| ShareError::Step { what: "serve the requests to the file-server process", source };
    let max_files = max_files / u64::try_from(layout.share_count()).unwrap_or(u64::MAX);
    let factory = ServerFactory { own_fds: File::from(fds), max_files, cache, mounts: Arc::new(mounts) };
    let mut shares = Vec::with_capacity(file_requests.len());
    for streams in file_requests {
        let server = match layout {
            ShareLayout::Single => Some(factory.new_server("/").map_err(serve)?),
            ShareLayout::PerVolume(_) => None,
        };
        shares.push(ServedShare { server, channels: streams.map(|stream| QueueChannel { stream, virtqueue: None }) });
    }
    let own_fds = factory.own_fds.try_clone().map_err(serve)?.into();
    let mut copied_in = CopiedInServer::new(copied_in, copied_in_root, own_fds, user).map_err(watch)?;
    let first = shares.first_mut().and_then(|share| share.channels.first_mut());
    first.map_or(Ok(()), |first| first.stream.write_all(&[READY])).map_err(serve)?;
    match serve_requests(&mut shares, &mut copied_in, &factory) {
        // The pod process has ended, or closed the streams.
        Err(error) if matches!(error.kind(), io::ErrorKind::UnexpectedEof | io::ErrorKind::BrokenPipe) => Ok(()),
        other => other.map_err(serve),
    }
}

/// Changes the program's name in /proc/self/cmdline, which is a copy of the pod process's.
fn set_command_line() -> io::Result<()> {
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
fn build_root(scaffold: &Path) -> nix::Result<OwnedFd> {
    let none = None::<&str>;
    let mode = FileMode::from_bits_truncate(0o755);
    // It keeps the network namespace: it may not create sockets, and those that it connects are of the pod process's.
    let namespaces = CloneFlags::CLONE_NEWIPC | CloneFlags::CLONE_NEWUTS | CloneFlags::CLONE_NEWCGROUP;
    unshare(CloneFlags::CLONE_NEWNS | namespaces)?;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)?;
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    mount(Some("nacelle"), scaffold, Some("tmpfs"), flags, Some("mode=0755,size=1m,nr_inodes=64k"))?;
    chdir(scaffold)?;
    let [share_root, writable_root, copied_in_root] =
        [SHARE_ROOT, WRITABLE_ROOT, COPIED_IN_ROOT].map(|path| path.trim_start_matches('/'));
    for directory in [share_root, writable_root, copied_in_root] {
        mkdir(directory, mode)?;
    }
    mount(Some(writable_root), share_root, none, MsFlags::MS_BIND, none)?;
    mount(none, share_root, none, flags | MsFlags::MS_REMOUNT | MsFlags::MS_BIND | MsFlags::MS_RDONLY, none)?;
    // The old root is now stacked on the new one, and is unmounted.
    pivot_root(".", ".")?;
    umount2(".", MntFlags::MNT_DETACH)?;
    let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    let copied_in_root = retry_interrupted(|| open(COPIED_IN_ROOT, flags, FileMode::empty()))?;
    chroot(SHARE_ROOT)?;
    chdir("/")?;
    Ok(copied_in_root)
}

/// The channel of one of the guest's queues.
struct QueueChannel {
    stream: UnixStream,
    /// The virtqueue, if it is shared with this process: then requests come by it, and not by the stream.
    virtqueue: Option<ServedVirtqueue>,
}

/// One share.
struct ServedShare {
    /// `None` until the pod process has selected the volume of the share.
    server: Option<Server>,
    channels: [QueueChannel; QUEUES],
}

/// The parameters of new servers.
struct ServerFactory {
    /// This process's `/proc/self/fd`.
    own_fds: File,
    /// The maximum number of open files of each server.
    max_files: u64,
    cache: Duration,
    mounts: Arc<Mounts>,
}

impl ServerFactory {
    fn new_server(&self, root: &str) -> io::Result<Server> {
        Server::new(root, self.own_fds.try_clone()?, self.max_files, self.cache, self.mounts.clone())
    }

    /// Creates the server of a share that contains one volume of a container, which must be a directory.
    fn new_volume_server(&self, name: &str) -> io::Result<Server> {
        let is_plain = |name: &str| !name.is_empty() && !name.starts_with('.') && !name.contains(['/', '\0']);
        if !name.split_once('/').is_some_and(|(container, number)| is_plain(container) && is_plain(number)) {
            return Err(Errno::EINVAL.into());
        }
        let root = format!("/{name}");
        if !fs::symlink_metadata(&root)?.is_dir() {
            return Err(Errno::ENOTDIR.into());
        }
        self.new_server(&root)
    }
}

/// Serves requests until a stream ends: those of the high-priority queues first, the pod process's last.
fn serve_requests(
    shares: &mut [ServedShare],
    copied_in: &mut CopiedInServer,
    factory: &ServerFactory,
) -> io::Result<()> {
    loop {
        // A virtqueue has more requests than its share of a round.
        let mut more = false;
        for ServedShare { server, channels } in shares.iter_mut() {
            let Some(server) = server else { continue };
            let virtqueues = channels.iter_mut().filter_map(|channel| channel.virtqueue.as_mut());
            more = virtqueues.fold(more, |more, virtqueue| virtqueue.serve(server) | more);
        }
        let deadline = if more { Some(Instant::now()) } else { copied_in.next_report() };
        let [requests, inotify] = [copied_in.stream(), copied_in.inotify()];
        let channels = || shares.iter().flat_map(|share| &share.channels);
        let streams = channels().map(|channel| channel.stream.as_fd());
        // A virtqueue that the guest broke would stay readable forever.
        let kicks: Vec<_> = channels()
            .map(|channel| channel.virtqueue.as_ref().filter(|virtqueue| !virtqueue.is_broken()).map(AsFd::as_fd))
            .collect();
        let fds = [requests, inotify].into_iter().chain(streams).chain(kicks.iter().flatten().copied());
        let mut events: Vec<PollFd<'_>> = fds.map(|fd| PollFd::new(fd, PollFlags::POLLIN)).collect();
        retry::poll(&mut events, deadline)?;
        let mut ready = events.iter().map(|event| event.any().unwrap_or(false));
        let mut next = || ready.next().unwrap_or(false);
        let (has_request, has_event) = (next(), next());
        let streams: Vec<bool> = channels().map(|_| next()).collect();
        let kicked: Vec<bool> = kicks.iter().map(|kick| kick.is_some() && next()).collect();
        let all = shares.iter_mut().flat_map(|share| &mut share.channels);
        for (channel, _) in all.zip(kicked).filter(|(_, kicked)| *kicked) {
            channel.virtqueue.as_mut().map(ServedVirtqueue::read_kick);
        }
        if has_event {
            copied_in.read_events()?;
        }
        copied_in.report_changes()?;
        if let Some(number) = streams.iter().position(|ready| *ready) {
            // `QUEUES` is not 0.
            let share = shares.get_mut(number / QUEUES).ok_or(io::ErrorKind::InvalidData)?;
            handle_stream_message(share, number % QUEUES, factory)?;
        } else if has_request {
            copied_in.handle_request()?;
        }
    }
}

/// Reads one message of the pod process from the stream of a queue, and handles it.
fn handle_stream_message(share: &mut ServedShare, queue: usize, factory: &ServerFactory) -> io::Result<()> {
    let invalid = || io::Error::from(io::ErrorKind::InvalidData);
    let no_virtqueue = share.channels.iter().all(|channel| channel.virtqueue.is_none());
    let channel = share.channels.get_mut(queue).ok_or_else(invalid)?;
    let mut header = [0; REQUEST_HEADER];
    channel.stream.read_exact(&mut header)?;
    let (length, capacity) = header.split_at(4);
    let number = |bytes: &[u8]| bytes.try_into().map_or(0, u32::from_le_bytes);
    let (length, capacity) = (number(length), number(capacity) as usize);
    if length == SELECT_VOLUME {
        if !no_virtqueue || capacity > MAX_VOLUME_NAME {
            return Err(invalid());
        }
        let mut name = vec![0; capacity];
        channel.stream.read_exact(&mut name)?;
        let server = std::str::from_utf8(&name)
            .map_err(|_no_text| Errno::EINVAL.into())
            .and_then(|name| factory.new_volume_server(name));
        let errno = server.as_ref().err().map_or(0, |error| error.raw_os_error().unwrap_or(libc::EIO));
        share.server = server.ok();
        return channel.stream.write_all(&errno.to_le_bytes());
    }
    let server = share.server.as_mut().ok_or_else(invalid)?;
    match (length, &channel.virtqueue) {
        (SHARE_VIRTQUEUE, None) => {
            let (virtqueue, fds) = receive_virtqueue(&mut channel.stream, capacity)?;
            channel.virtqueue = Some(ServedVirtqueue::new(&virtqueue, fds, server.own_region())?);
            return Ok(());
        }
        (UNSHARE_VIRTQUEUE, Some(virtqueue)) => {
            let next = u32::from(virtqueue.next_avail());
            channel.virtqueue = None;
            return channel.stream.write_all(&next.to_le_bytes());
        }
        (_, None) if length as usize <= MAX_MESSAGE => {}
        _ => return Err(invalid()),
    }
    server.serve_stream_request(&mut channel.stream, length as usize, capacity)
}

/// Receives an encoded [`SharedVirtqueue`] of this length and the descriptors that come with it.
fn receive_virtqueue(stream: &mut UnixStream, length: usize) -> io::Result<(SharedVirtqueue, Vec<OwnedFd>)> {
    let invalid = || io::Error::new(io::ErrorKind::InvalidData, "the message is not a valid shared virtqueue");
    if length > MAX_SHARED_VIRTQUEUE {
        return Err(invalid());
    }
    let mut bytes = vec![0; length];
    let (received, fds) = receive_with_descriptors(&*stream, &mut bytes)?;
    stream.read_exact(bytes.get_mut(received..).unwrap_or_default())?;
    Ok((SharedVirtqueue::decode(&bytes).ok_or_else(invalid)?, fds))
}
