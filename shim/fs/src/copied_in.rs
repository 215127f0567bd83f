//! Serves the pod process's requests for copied-in volumes and socket volumes in the file-server process: reads volumes part
//! by part, reports that one has changed, and connects sockets. Between two parts the guest's file requests are served. It
//! runs on the process's only thread and must not block: it reads only what has arrived.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use crate::sockets::{connect_to, list_sockets};
use crate::volume_reader::{VolumeReadError, VolumeReader};
use nacelle_base::Chain;
use nacelle_base::copied_in::{CopyInFailure, CopyInKind, CopyInMessage, CopyInRequest, DATA, MAX_COPY_IN_MESSAGE};
use nacelle_base::descriptors::receive_with_descriptors;
use nacelle_base::retry::retry_transient;
use nacelle_base::sockets::SocketClient;
use nacelle_proto::agent::{Tree, TreeEntry};
use nix::unistd::{chdir, fchdir};
use prost::Message;
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};
use rustix::fs::{FileType, Mode, OFlags, ResolveFlags, fstat, openat2};
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};
use virtiofsd::passthrough::credentials::UnixCredentials;
use virtiofsd::soft_idmap::{HostGid, HostUid};

/// The maximum number of open volumes, more than any pod has.
const MAX_VOLUMES: usize = 4096;
/// The delay from the first event of a change to its report, because a change consists of several steps.
const SETTLE_DELAY: Duration = Duration::from_millis(20);
/// The number of inotify events after which no more are read at once; the others are read with the next call.
const MAX_EVENTS: usize = 1024;
/// The buffer size for inotify events in bytes: some dozens of events.
const EVENT_BUFFER: usize = 4096;

struct CopiedInVolume {
    root: OwnedFd,
    kind: CopyInKind,
    /// The inotify watch descriptor.
    watch: Option<i32>,
    reader: Option<VolumeReader>,
    /// The name of the data directory that was read completely.
    known_data: Option<Vec<u8>>,
    /// The time at which its change must be reported.
    report_at: Option<Instant>,
    /// The change was reported.
    reported: bool,
}

/// The open copied-in volumes.
pub(crate) struct CopiedInServer {
    stream: UnixStream,
    root: OwnedFd,
    /// This process's `/proc/self/fd`.
    own_fds: OwnedFd,
    inotify: OwnedFd,
    volumes: BTreeMap<u32, CopiedInVolume>,
}

impl CopiedInServer {
    /// Serves requests on this stream; volumes are mounted below the directory `root`. `own_fds` is this process's `/proc/self/fd`. The
    /// inotify instance and its watches are charged to `user`.
    pub fn new(stream: UnixStream, root: OwnedFd, own_fds: OwnedFd, user: Option<u32>) -> io::Result<CopiedInServer> {
        let charged = |user| {
            UnixCredentials::new(HostUid::from(user), HostGid::from(0)).supplementary_gid(true, Vec::new()).set()
        };
        let _charged = user.map(charged).transpose()?;
        let inotify = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
        Ok(CopiedInServer { stream, root, own_fds, inotify, volumes: BTreeMap::new() })
    }

    /// Returns the stream on which the pod process sends requests.
    pub fn stream(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    /// Returns the inotify descriptor.
    pub fn inotify(&self) -> BorrowedFd<'_> {
        self.inotify.as_fd()
    }

    /// Returns the earliest time at which [`CopiedInServer::report_changes`] has something to report.
    pub fn next_report(&self) -> Option<Instant> {
        self.volumes.values().filter_map(|volume| volume.report_at).min()
    }

    /// Reports the changes that are due.
    pub fn report_changes(&mut self) -> io::Result<()> {
        let now = Instant::now();
        for (id, volume) in &mut self.volumes {
            if volume.report_at.is_some_and(|time| time <= now) {
                volume.report_at = None;
                volume.reported = true;
                send_message(&mut self.stream, &CopyInMessage::Changed { id: *id })?;
            }
        }
        Ok(())
    }

    /// Reads inotify events, some [`MAX_EVENTS`] at most: writers of a directory must not keep the requests of the guest waiting.
    pub fn read_events(&mut self) -> io::Result<()> {
        let mut buffer = [MaybeUninit::uninit(); EVENT_BUFFER];
        let mut events = Reader::new(&self.inotify, &mut buffer);
        let mut count = 0;
        // Events that have been read must not be lost.
        while count < MAX_EVENTS || !events.is_buffer_empty() {
            count += 1;
            let event = match events.next() {
                Ok(event) => event,
                Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
            };
            let overflowed = event.events().contains(ReadFlags::QUEUE_OVERFLOW);
            let name = event.file_name().map(std::ffi::CStr::to_bytes);
            // Directories beside the link are written before the link refers to them, and removed later.
            let is_data = |name: &[u8]| !name.starts_with(b"..") || name == DATA.as_bytes();
            for volume in self.volumes.values_mut() {
                let is_relevant = match volume.kind {
                    CopyInKind::Once => false,
                    CopyInKind::Live => overflowed || name.is_some_and(is_data),
                    // Without a name: the directory itself has another mode or owner.
                    CopyInKind::Sockets => true,
                };
                if (overflowed || volume.watch == Some(event.wd())) && is_relevant && !volume.reported {
                    volume.report_at.get_or_insert_with(|| Instant::now() + SETTLE_DELAY);
                }
            }
        }
        Ok(())
    }

    /// Reads one request and replies.
    pub fn handle_request(&mut self) -> io::Result<()> {
        let mut length = [0; 4];
        // A descriptor comes with the first byte.
        let (received, descriptors) = receive_with_descriptors(&self.stream, &mut length)?;
        if received == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.stream.read_exact(length.get_mut(received..).unwrap_or_default())?;
        let length = u32::from_le_bytes(length) as usize;
        if length > MAX_COPY_IN_MESSAGE {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let mut bytes = vec![0; length];
        self.stream.read_exact(&mut bytes)?;
        let request = CopyInRequest::decode(&bytes).ok_or(io::ErrorKind::InvalidData)?;
        let reply = self.respond_to(request, descriptors);
        send_message(&mut self.stream, &reply)
    }

    fn respond_to(&mut self, request: CopyInRequest, descriptors: Vec<OwnedFd>) -> CopyInMessage {
        match request {
            CopyInRequest::Open { id, kind, path } => match self.open(id, kind, &path) {
                Ok(()) => CopyInMessage::Done { id },
                Err((reason, text)) => CopyInMessage::Failed { id, reason, text },
            },
            CopyInRequest::Begin { id, full } => self.read_part(id, Some(full)),
            CopyInRequest::Next { id } => self.read_part(id, None),
            CopyInRequest::Close { id } => {
                self.close(id);
                CopyInMessage::Done { id }
            }
            CopyInRequest::Connect { id, client, name } => match self.connect(id, client, &name, descriptors) {
                Ok(()) => CopyInMessage::Done { id },
                Err(error) => {
                    let reason = match error.kind() {
                        io::ErrorKind::NotFound => CopyInFailure::Missing,
                        _ => CopyInFailure::Failed,
                    };
                    CopyInMessage::Failed { id, reason, text: format!("cannot connect to the socket: {error}") }
                }
            },
        }
    }

    fn connect(&self, id: u32, client: SocketClient, name: &[u8], mut descriptors: Vec<OwnedFd>) -> io::Result<()> {
        let volume = self.volumes.get(&id).filter(|volume| volume.kind == CopyInKind::Sockets);
        let volume = volume.ok_or(io::ErrorKind::NotFound)?;
        let socket = descriptors.pop().filter(|_| descriptors.is_empty()).ok_or(io::ErrorKind::InvalidInput)?;
        connect_to(volume.root.as_fd(), name, client, &socket, self.own_fds.as_fd())
    }

    fn open(&mut self, id: u32, kind: CopyInKind, path: &str) -> Result<(), (CopyInFailure, String)> {
        if self.volumes.len() >= MAX_VOLUMES {
            return Err((
                CopyInFailure::LimitExceeded,
                format!("the pod has the maximum of {MAX_VOLUMES} open copied-in volumes"),
            ));
        }
        self.close(id);
        let flags = match kind {
            // The volume may be a socket.
            CopyInKind::Sockets => OFlags::PATH | OFlags::CLOEXEC,
            CopyInKind::Once | CopyInKind::Live => OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC,
        };
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
        let failed = |what: &str, error: io::Error| {
            let reason =
                if error.kind() == io::ErrorKind::NotFound { CopyInFailure::Missing } else { CopyInFailure::Failed };
            (reason, format!("cannot {what} the volume: {error}"))
        };
        let root = retry_transient(|| openat2(&self.root, path, flags, Mode::empty(), resolve));
        let root = root.map_err(|error| failed("open", error.into()))?;
        let inspected = fstat(&root).map_err(|error| failed("inspect", error.into()))?;
        let is_watched = match kind {
            CopyInKind::Once => false,
            CopyInKind::Live => true,
            CopyInKind::Sockets => FileType::from_raw_mode(inspected.st_mode) == FileType::Directory,
        };
        let watch =
            if is_watched { Some(self.add_watch(&root, kind).map_err(|error| failed("watch", error))?) } else { None };
        let volume =
            CopiedInVolume { root, kind, watch, reader: None, known_data: None, report_at: None, reported: false };
        self.volumes.insert(id, volume);
        Ok(())
    }

    /// Watches a directory that has no path here, by making it the working directory for the call.
    fn add_watch(&self, root: &OwnedFd, kind: CopyInKind) -> io::Result<i32> {
        // A server changes the owner and the mode of its socket after it has created it.
        let more = if kind == CopyInKind::Sockets { WatchFlags::ATTRIB } else { WatchFlags::empty() };
        let events = more
            // Several volumes of the same directory share one watch.
            | WatchFlags::MASK_ADD
            | WatchFlags::CREATE
            | WatchFlags::DELETE
            | WatchFlags::MOVED_TO
            | WatchFlags::MOVED_FROM
            | WatchFlags::ONLYDIR
            | WatchFlags::EXCL_UNLINK;
        fchdir(root)?;
        let watch = inotify::add_watch(&self.inotify, ".", events);
        chdir("/")?;
        Ok(watch?)
    }

    fn close(&mut self, id: u32) {
        let Some(volume) = self.volumes.remove(&id) else { return };
        let Some(watch) = volume.watch else { return };
        if self.volumes.values().all(|other| other.watch != Some(watch))
            && let Err(error) = inotify::remove_watch(&self.inotify, watch)
        {
            tracing::debug!("cannot remove an inotify watch: {error}");
        }
    }

    /// Returns the next part of a volume; with `begin` the first one, `true` for the whole volume.
    fn read_part(&mut self, id: u32, begin: Option<bool>) -> CopyInMessage {
        let missing =
            || CopyInMessage::Failed { id, reason: CopyInFailure::Missing, text: "the volume is not open".into() };
        let Some(volume) = self.volumes.get_mut(&id) else { return missing() };
        match read_next_part(volume, begin) {
            Ok(Some((entries, last))) => CopyInMessage::Part { id, last, tree: Tree { entries }.encode_to_vec() },
            Ok(None) => missing(),
            Err(error) => {
                volume.reader = None;
                CopyInMessage::Failed { id, reason: error.reason(), text: Chain(&error).to_string() }
            }
        }
    }
}

fn read_next_part(
    volume: &mut CopiedInVolume,
    begin: Option<bool>,
) -> Result<Option<(Vec<TreeEntry>, bool)>, VolumeReadError> {
    if let Some(full) = begin {
        // Changes from here on are reported.
        (volume.report_at, volume.reported) = (None, false);
        if volume.kind == CopyInKind::Sockets {
            return Ok(Some((list_sockets(volume.root.as_fd())?, true)));
        }
        let known = volume.known_data.take().filter(|_| !full);
        volume.reader =
            Some(VolumeReader::begin(volume.root.as_fd(), volume.kind == CopyInKind::Live, known.as_deref())?);
    }
    let Some(reader) = &mut volume.reader else { return Ok(None) };
    let (entries, last) = reader.next_part()?;
    if last {
        volume.known_data = reader.data_directory().map(<[u8]>::to_vec);
        volume.reader = None;
    }
    Ok(Some((entries, last)))
}

fn send_message(stream: &mut UnixStream, message: &CopyInMessage) -> io::Result<()> {
    let bytes = message.encode();
    let length = u32::try_from(bytes.len()).ok().filter(|length| *length as usize <= MAX_COPY_IN_MESSAGE);
    let length = length.ok_or(io::ErrorKind::InvalidData)?;
    stream.write_all(&[length.to_le_bytes().as_slice(), &bytes].concat())
}
