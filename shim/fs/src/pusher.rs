//! Serves the pod process's requests for copied-in volumes in the file-server process: reads volumes part by part, and
//! reports that one has changed. Between two parts the guest's file requests are served. It runs on the process's only
//! thread and must not block: it reads only what has arrived.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use crate::tree::{TreeError, Walk};
use nacelle_base::Chain;
use nacelle_base::push::{CopyInFailure, CopyInMessage, CopyInRequest, DATA, MAX_COPY_IN_MESSAGE};
use nacelle_base::retry::retry_transient;
use nacelle_proto::agent::Tree;
use nix::unistd::{chdir, fchdir};
use prost::Message;
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};
use rustix::fs::{Mode, OFlags, ResolveFlags, openat2};
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// The maximum number of open volumes, more than any pod has.
const MAX_VOLUMES: usize = 4096;
/// The delay from the first event of a change to its report, because a change consists of several steps.
const SETTLE: Duration = Duration::from_millis(20);
/// The buffer size for inotify events in bytes: some dozens of events.
const NEWS: usize = 4096;

struct Volume {
    root: OwnedFd,
    live: bool,
    /// The inotify watch descriptor.
    watch: Option<i32>,
    walk: Option<Walk>,
    /// The name of the data directory that was read completely.
    read: Option<Vec<u8>>,
    /// The time at which its change must be reported.
    due: Option<Instant>,
    /// The change was reported.
    told: bool,
}

/// The open copied-in volumes.
pub(crate) struct Pusher {
    stream: UnixStream,
    places: OwnedFd,
    watcher: OwnedFd,
    volumes: BTreeMap<u32, Volume>,
}

impl Pusher {
    /// Serves requests on this stream; volumes are mounted below the directory `places`.
    pub fn new(stream: UnixStream, places: OwnedFd) -> io::Result<Pusher> {
        let watcher = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
        Ok(Pusher { stream, places, watcher, volumes: BTreeMap::new() })
    }

    /// Returns the stream on which the pod process sends requests.
    pub fn stream(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    /// Returns the inotify descriptor.
    pub fn watcher(&self) -> BorrowedFd<'_> {
        self.watcher.as_fd()
    }

    /// Returns the earliest time at which [`Pusher::tell`] has something to report.
    pub fn due(&self) -> Option<Instant> {
        self.volumes.values().filter_map(|volume| volume.due).min()
    }

    /// Reports the changes that are due.
    pub fn tell(&mut self) -> io::Result<()> {
        let now = Instant::now();
        for (id, volume) in &mut self.volumes {
            if volume.due.is_some_and(|due| due <= now) {
                volume.due = None;
                volume.told = true;
                say(&mut self.stream, &CopyInMessage::Changed { id: *id })?;
            }
        }
        Ok(())
    }

    /// Reads the inotify events.
    pub fn hear(&mut self) -> io::Result<()> {
        let mut room = [MaybeUninit::uninit(); NEWS];
        let mut news = Reader::new(&self.watcher, &mut room);
        loop {
            let event = match news.next() {
                Ok(event) => event,
                Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
            };
            let lost = event.events().contains(ReadFlags::QUEUE_OVERFLOW);
            // Directories beside the link are written before the link refers to them, and removed later.
            let other = event.file_name().is_none_or(|name| {
                let name = name.to_bytes();
                name.starts_with(b"..") && name != DATA.as_bytes()
            });
            if other && !lost {
                continue;
            }
            for volume in self.volumes.values_mut() {
                if (lost || volume.watch == Some(event.wd())) && volume.live && !volume.told {
                    volume.due.get_or_insert_with(|| Instant::now() + SETTLE);
                }
            }
        }
    }

    /// Reads one request and replies.
    pub fn answer(&mut self) -> io::Result<()> {
        let mut length = [0; 4];
        self.stream.read_exact(&mut length)?;
        let length = u32::from_le_bytes(length) as usize;
        if length > MAX_COPY_IN_MESSAGE {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let mut word = vec![0; length];
        self.stream.read_exact(&mut word)?;
        let ask = CopyInRequest::decode(&word).ok_or(io::ErrorKind::InvalidData)?;
        let told = self.told(ask);
        say(&mut self.stream, &told)
    }

    fn told(&mut self, ask: CopyInRequest) -> CopyInMessage {
        match ask {
            CopyInRequest::Open { id, live, path } => match self.open(id, live, &path) {
                Ok(()) => CopyInMessage::Done { id },
                Err((reason, text)) => CopyInMessage::Failed { id, reason, text },
            },
            CopyInRequest::Begin { id, full: afresh } => self.part(id, Some(afresh)),
            CopyInRequest::Next { id } => self.part(id, None),
            CopyInRequest::Close { id } => {
                self.close(id);
                CopyInMessage::Done { id }
            }
        }
    }

    fn open(&mut self, id: u32, live: bool, place: &str) -> Result<(), (CopyInFailure, String)> {
        if self.volumes.len() >= MAX_VOLUMES {
            return Err((CopyInFailure::LimitExceeded, format!("the pod has {MAX_VOLUMES} volumes")));
        }
        self.close(id);
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
        let failed = |what: &str, error: io::Error| {
            let why =
                if error.kind() == io::ErrorKind::NotFound { CopyInFailure::Missing } else { CopyInFailure::Failed };
            (why, format!("cannot {what} it: {error}"))
        };
        let root = retry_transient(|| openat2(&self.places, place, flags, Mode::empty(), resolve));
        let root = root.map_err(|error| failed("open", error.into()))?;
        let watch = if live { Some(self.watch(&root).map_err(|error| failed("watch", error))?) } else { None };
        let volume = Volume { root, live, watch, walk: None, read: None, due: None, told: false };
        self.volumes.insert(id, volume);
        Ok(())
    }

    /// Watches a directory that has no path here, by making it the working directory for the call.
    fn watch(&self, root: &OwnedFd) -> io::Result<i32> {
        let what = WatchFlags::CREATE
            | WatchFlags::DELETE
            | WatchFlags::MOVED_TO
            | WatchFlags::MOVED_FROM
            | WatchFlags::ONLYDIR
            | WatchFlags::EXCL_UNLINK;
        fchdir(root)?;
        let watch = inotify::add_watch(&self.watcher, ".", what);
        chdir("/")?;
        Ok(watch?)
    }

    fn close(&mut self, id: u32) {
        let Some(volume) = self.volumes.remove(&id) else { return };
        let Some(watch) = volume.watch else { return };
        // Several volumes of the same directory share one watch.
        if self.volumes.values().all(|other| other.watch != Some(watch))
            && let Err(error) = inotify::remove_watch(&self.watcher, watch)
        {
            tracing::debug!("a watch that was not there: {error}");
        }
    }

    /// Returns a part of a volume, with `begin` the first one.
    fn part(&mut self, id: u32, begin: Option<bool>) -> CopyInMessage {
        let missing = || CopyInMessage::Failed { id, reason: CopyInFailure::Missing, text: "it is not open".into() };
        let Some(volume) = self.volumes.get_mut(&id) else { return missing() };
        match read(volume, begin) {
            Ok(Some((tree, last))) => CopyInMessage::Part { id, last, tree },
            Ok(None) => missing(),
            Err(error) => {
                volume.walk = None;
                CopyInMessage::Failed { id, reason: error.why(), text: Chain(&error).to_string() }
            }
        }
    }
}

fn read(volume: &mut Volume, begin: Option<bool>) -> Result<Option<(Vec<u8>, bool)>, TreeError> {
    if let Some(afresh) = begin {
        // Changes from here on are reported.
        (volume.due, volume.told) = (None, false);
        let known = volume.read.take().filter(|_| !afresh);
        volume.walk = Some(Walk::begin(volume.root.as_fd(), volume.live, known.as_deref())?);
    }
    let Some(walk) = &mut volume.walk else { return Ok(None) };
    let (entries, last) = walk.part()?;
    if last {
        volume.read = walk.data().map(<[u8]>::to_vec);
        volume.walk = None;
    }
    Ok(Some((Tree { entries }.encode_to_vec(), last)))
}

fn say(stream: &mut UnixStream, told: &CopyInMessage) -> io::Result<()> {
    let word = told.encode();
    let length = u32::try_from(word.len()).ok().filter(|length| *length as usize <= MAX_COPY_IN_MESSAGE);
    let length = length.ok_or(io::ErrorKind::InvalidData)?;
    stream.write_all(&[length.to_le_bytes().as_slice(), &word].concat())
}
