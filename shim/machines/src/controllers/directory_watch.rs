//! Reports changes in directories that kubelet updates (downward API, secrets), with one inotify instance for the whole node:
//! the kernel limits the instances of a user, and kubelet needs some too.

use nacelle_base::Chain;
use rustix::fs::OFlags;
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};
use std::collections::HashMap;
use std::fs::OpenOptions;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::net::unix::pipe;
use tokio::sync::Notify;

/// The buffer for inotify events in bytes: some dozens of events.
const EVENT_BUFFER: usize = 4096;
/// kubelet's link to the directory with the current files. It replaces the link to update a volume.
const DATA_LINK: &[u8] = b"..data";

/// The subscribers of each inotify watch descriptor.
type Subscribers = HashMap<i32, Vec<Arc<Notify>>>;

/// Watches directories for their subscribers.
pub(super) struct DirectoryWatcher {
    /// The inotify instance, which is read like a pipe.
    inotify: pipe::Receiver,
    subscribers: Mutex<Subscribers>,
}

impl DirectoryWatcher {
    /// Creates the inotify instance. Must be called in a runtime.
    pub fn new() -> io::Result<DirectoryWatcher> {
        let inotify = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
        let inotify = pipe::Receiver::from_owned_fd_unchecked(inotify)?;
        Ok(DirectoryWatcher { inotify, subscribers: Mutex::default() })
    }

    fn subscribers(&self) -> MutexGuard<'_, Subscribers> {
        // Each change is a single insert or removal, so a panic in between leaves the map consistent.
        self.subscribers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Subscribes to the changes in these directories. A directory that cannot be watched is logged and left out. Blocks.
    pub fn subscribe(self: &Arc<Self>, directories: Vec<PathBuf>) -> DirectoryWatch {
        let mut watch = DirectoryWatch {
            watcher: Arc::clone(self),
            notify: Arc::new(Notify::new()),
            descriptors: Vec::new(),
            missing: Vec::new(),
        };
        watch.add(directories, |directory, error| {
            tracing::warn!(
                directory = %directory.display(),
                "cannot watch a volume of a machine pod, which is read periodically instead: {}",
                Chain(error)
            );
        });
        watch
    }

    fn add(&self, directory: &Path, notify: &Arc<Notify>) -> io::Result<i32> {
        let flags = WatchFlags::CREATE
            | WatchFlags::MOVED_TO
            | WatchFlags::CLOSE_WRITE
            | WatchFlags::MOVED_FROM
            | WatchFlags::DELETE
            | WatchFlags::ONLYDIR;
        // Opened without the lock: looking up a path may take long.
        let path_only = (OFlags::PATH | OFlags::DIRECTORY).bits().cast_signed();
        let open = OpenOptions::new().read(true).custom_flags(path_only).open(directory)?;
        let path = format!("/proc/self/fd/{}", open.as_raw_fd());
        // Held across the system call: the descriptor of a directory that is watched already is the same, and must not be removed
        // by its last subscriber meanwhile.
        let mut subscribers = self.subscribers();
        let descriptor = inotify::add_watch(&self.inotify, path, flags)?;
        subscribers.entry(descriptor).or_default().push(Arc::clone(notify));
        Ok(descriptor)
    }

    /// Passes events to the subscribers, forever.
    pub async fn dispatch(&self) -> io::Result<()> {
        let mut buffer = [0; EVENT_BUFFER];
        loop {
            self.inotify.readable().await?;
            match self.inotify.try_read(&mut buffer) {
                Ok(length) => self.notify(buffer.get(..length).unwrap_or_default()),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Notifies the subscribers of these events.
    fn notify(&self, mut events: &[u8]) {
        let subscribers = self.subscribers();
        while let Some((event, rest)) = InotifyEvent::parse(events) {
            events = rest;
            if event.mask & ReadFlags::QUEUE_OVERFLOW.bits() != 0 {
                subscribers.values().flatten().for_each(|subscriber| subscriber.notify_one());
            } else if !event.is_preparation() {
                subscribers.get(&event.descriptor).into_iter().flatten().for_each(|subscriber| subscriber.notify_one());
            }
        }
    }
}

/// An event as the kernel writes it (inotify(7)).
struct InotifyEvent<'a> {
    descriptor: i32,
    mask: u32,
    /// The name of the changed file in the directory; empty for the directory itself.
    name: &'a [u8],
}

impl InotifyEvent<'_> {
    /// Parses the first event; returns it with the remaining bytes. `None` if there is no complete event.
    fn parse(bytes: &[u8]) -> Option<(InotifyEvent<'_>, &[u8])> {
        let (descriptor, rest) = bytes.split_first_chunk()?;
        let (mask, rest) = rest.split_first_chunk()?;
        let (_cookie, rest) = rest.split_first_chunk::<4>()?;
        let (length, rest) = rest.split_first_chunk()?;
        let length = usize::try_from(u32::from_ne_bytes(*length)).ok()?;
        let (name, rest) = rest.split_at_checked(length)?;
        // The name is filled up with zero bytes.
        let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
        let (descriptor, mask) = (i32::from_ne_bytes(*descriptor), u32::from_ne_bytes(*mask));
        Some((InotifyEvent { descriptor, mask, name }, rest))
    }

    /// Returns whether this event only prepares an update by kubelet. It writes the new files to a directory whose name begins
    /// with "..", and then replaces the link.
    fn is_preparation(&self) -> bool {
        self.name.starts_with(b"..") && self.name != DATA_LINK
    }
}

/// A subscription to the changes in some directories.
pub(super) struct DirectoryWatch {
    watcher: Arc<DirectoryWatcher>,
    notify: Arc<Notify>,
    descriptors: Vec<i32>,
    /// The directories that are not watched.
    missing: Vec<PathBuf>,
}

impl DirectoryWatch {
    /// Returns whether all directories are watched.
    pub fn is_complete(&self) -> bool {
        self.missing.is_empty()
    }

    /// Tries to watch the directories that are not watched. Blocks.
    pub fn add_missing(&mut self) {
        let missing = std::mem::take(&mut self.missing);
        self.add(missing, |_, _| {});
    }

    fn add(&mut self, directories: Vec<PathBuf>, report: impl Fn(&Path, &io::Error)) {
        for directory in directories {
            match self.watcher.add(&directory, &self.notify) {
                Ok(descriptor) => self.descriptors.push(descriptor),
                Err(error) => {
                    report(&directory, &error);
                    self.missing.push(directory);
                }
            }
        }
    }

    /// Waits for a change since the last call, or since the subscription.
    pub async fn changed(&self) {
        self.notify.notified().await;
    }
}

impl Drop for DirectoryWatch {
    fn drop(&mut self) {
        let mut subscribers = self.watcher.subscribers();
        for descriptor in &self.descriptors {
            let Some(all) = subscribers.get_mut(descriptor) else { continue };
            all.retain(|other| !Arc::ptr_eq(other, &self.notify));
            if all.is_empty() {
                subscribers.remove(descriptor);
                // Fails if the directory was removed or unmounted, and its watch with it.
                let _ = inotify::remove_watch(&self.watcher.inotify, *descriptor);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use tokio_util::task::AbortOnDropHandle;

    async fn is_notified(watch: &DirectoryWatch) -> bool {
        tokio::time::timeout(Duration::from_millis(200), watch.changed()).await.is_ok()
    }

    #[tokio::test]
    async fn subscribers_of_a_directory_are_notified_of_its_changes_until_they_unsubscribe() {
        let [first, second] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let watcher = Arc::new(DirectoryWatcher::new().unwrap());
        let dispatching = Arc::clone(&watcher);
        let _task = AbortOnDropHandle::new(tokio::spawn(async move { dispatching.dispatch().await }));
        let paths = |directories: &[&tempfile::TempDir]| -> Vec<PathBuf> {
            directories.iter().map(|directory| directory.path().to_owned()).collect()
        };
        let one = watcher.subscribe(paths(&[&first]));
        let both = watcher.subscribe(paths(&[&first, &second]));
        assert!(!is_notified(&one).await && !is_notified(&both).await);
        std::fs::write(second.path().join("a"), "").unwrap();
        assert!(is_notified(&both).await && !is_notified(&one).await);
        // An update as kubelet makes it: a new directory, and then the link.
        std::fs::create_dir(first.path().join("..2026")).unwrap();
        assert!(!is_notified(&one).await);
        std::os::unix::fs::symlink("..2026", first.path().join("..data_tmp")).unwrap();
        std::fs::rename(first.path().join("..data_tmp"), first.path().join("..data")).unwrap();
        assert!(is_notified(&one).await && is_notified(&both).await);
        drop(both);
        std::fs::write(first.path().join("b"), "").unwrap();
        assert!(is_notified(&one).await, "another subscriber has left");
        drop(one);
        assert!(watcher.subscribers().is_empty());
        // A directory that is created later is watched then.
        let late = first.path().join("late");
        let mut watch = watcher.subscribe(vec![late.clone()]);
        assert!(watch.descriptors.is_empty() && !watch.is_complete());
        std::fs::create_dir(&late).unwrap();
        watch.add_missing();
        std::fs::write(late.join("a"), "").unwrap();
        assert!(watch.is_complete() && is_notified(&watch).await);
    }
}
