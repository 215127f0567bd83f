//! Saves and opens snapshots. A snapshot is a directory with two files, `state` and `memory`; a jailed process, which has no directory for
//! them, gets the open files. See docs/contributor/snapshots.md. The module [`machine`] defines the content of a VM's state.
//!
//! ```no_run
//! use nacelle_vmm::{machine::VmHandle, rng::Rng, snapshot};
//! # fn save_and_restore(machine: VmHandle) -> Result<(), Box<dyn std::error::Error>> {
//! machine.pause()?;
//! snapshot::save(&machine, "/var/lib/x/template".as_ref())?;
//! // … in this process or another one:
//! let saved = snapshot::open("/var/lib/x/template".as_ref())?;
//! let mut builder = saved.builder()?;
//! builder.attach(Rng::new().device())?; // the same devices in the same order
//! builder.restore(saved.state())?.resume()?;
//! # Ok(()) }
//! ```
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod directory;
mod envelope;
mod error;
mod live;
mod memory;
mod pagemap;
mod tracker;
mod working_set;

#[cfg(test)]
mod tests;

pub use directory::SnapshotDirectory;
pub use envelope::{MAX_STATE_BYTES, VERSION};
pub use error::SnapshotError;
pub use live::SavedPages;
pub use tracker::PageTracker;
pub use working_set::WorkingSet;

use crate::machine::{self, HostPages, MachineState, MemoryBacking, VmBuilder, VmConfig, VmHandle};
use crate::virtio::{DeviceKind, Memory};
use live::{CapturedMemory, LiveCopy};
use nacelle_base::guest_warn;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

/// The name of the file that holds everything except the memory.
pub const STATE_FILE: &str = "state";
/// The name of the file with the guest's memory.
pub const MEMORY_FILE: &str = "memory";

/// The document in the file `state`. New fields must be optional; any other change needs a new version.
#[derive(Debug, Serialize, Deserialize)]
struct Document<S> {
    memory_mib: u32,
    #[serde(rename = "reserve_mib", default, skip_serializing_if = "is_zero")]
    hotplug_mib: u32,
    /// The pages that a restored VM touches soon, see [`record_working_set`].
    #[serde(default, skip_serializing_if = "WorkingSet::is_empty")]
    working_set: WorkingSet,
    machine: S,
}

fn is_zero(mib: &u32) -> bool {
    *mib == 0
}

/// The two open files of a snapshot. Their file positions are not used, so several processes may share them.
#[derive(Debug)]
pub struct SnapshotFiles {
    /// The directory that holds the files, for messages.
    pub directory: PathBuf,
    /// Everything but the memory, see [`STATE_FILE`].
    pub state: File,
    /// The memory, see [`MEMORY_FILE`].
    pub memory: File,
    /// `/proc/self/pagemap`, which names the pages that a VM of this process has touched, for saving; `None`: all pages are read.
    pub pagemap: Option<File>,
}

impl SnapshotFiles {
    /// Creates empty files in an existing `directory`, which must have none, for saving. Only their owner may read them: they hold all
    /// secrets of the guest.
    pub fn create(directory: &Path) -> Result<SnapshotFiles, SnapshotError> {
        let create = |name: &str| {
            let path = directory.join(name);
            let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path);
            file.map_err(|source| SnapshotError::Io { what: "create", path, source })
        };
        let (state, memory) = (create(STATE_FILE)?, create(MEMORY_FILE)?);
        Ok(SnapshotFiles { state, memory, directory: directory.to_owned(), pagemap: pagemap::open().ok() })
    }

    /// Opens the files of the snapshot in `directory`, for reading.
    pub fn open(directory: &Path) -> Result<SnapshotFiles, SnapshotError> {
        SnapshotFiles::open_with(directory, OpenOptions::new().read(true))
    }

    /// Opens the files of the snapshot in `directory`, for [`record_working_set`].
    pub fn open_to_complete(directory: &Path) -> Result<SnapshotFiles, SnapshotError> {
        let files = SnapshotFiles::open_with(directory, OpenOptions::new().read(true).write(true))?;
        Ok(SnapshotFiles { pagemap: pagemap::open().ok(), ..files })
    }

    fn open_with(directory: &Path, options: &OpenOptions) -> Result<SnapshotFiles, SnapshotError> {
        let open = |name: &str| {
            let path = directory.join(name);
            options.open(&path).map_err(|source| SnapshotError::Io { what: "open", path, source })
        };
        let directory = directory.to_owned();
        Ok(SnapshotFiles { state: open(STATE_FILE)?, memory: open(MEMORY_FILE)?, directory, pagemap: None })
    }

    /// Returns further descriptors of the same files.
    pub fn try_clone(&self) -> Result<SnapshotFiles, SnapshotError> {
        let SnapshotFiles { directory, state, memory, pagemap } = self;
        Ok(SnapshotFiles {
            state: state.try_clone().map_err(self.failed("duplicate", STATE_FILE))?,
            memory: memory.try_clone().map_err(self.failed("duplicate", MEMORY_FILE))?,
            pagemap: pagemap.as_ref().and_then(|pagemap| pagemap.try_clone().ok()),
            directory: directory.clone(),
        })
    }

    /// Returns the conversion of an error of an operation on a file.
    fn failed(&self, what: &'static str, name: &str) -> impl FnOnce(std::io::Error) -> SnapshotError {
        let path = self.directory.join(name);
        move |source| SnapshotError::Io { what, path, source }
    }
}

impl<S> Document<S> {
    fn memory_bytes(&self) -> u64 {
        u64::from(machine::total_mib(self.memory_mib, self.hotplug_mib)) << 20
    }
}

/// A snapshot that was read, without its memory.
#[derive(Debug)]
pub struct Snapshot<S = MachineState> {
    document: Document<S>,
    memory: File,
}

/// Writes the snapshot of a paused VM to `dir`, which must be empty or not exist. Afterwards `dir` holds the whole snapshot, on
/// stable storage, or no snapshot at all. The VM stays paused.
pub fn save(machine: &VmHandle, dir: &Path) -> Result<(), SnapshotError> {
    let directory = SnapshotDirectory::create(dir)?;
    save_to_files(machine, directory.files())?;
    directory.commit()
}

/// Writes the snapshot of a paused VM to `files`, which must be writable; earlier content is lost, so no VM may run from them. After an
/// error they hold no snapshot. The VM stays paused.
pub fn save_to_files(machine: &VmHandle, files: &SnapshotFiles) -> Result<(), SnapshotError> {
    let state = machine.save().map_err(|source| SnapshotError::Machine { source })?;
    let VmConfig { memory_mib, hotplug_mib, .. } = *machine.config();
    let document = Document { memory_mib, hotplug_mib, working_set: WorkingSet::default(), machine: state };
    write(files, &document, machine.memory())
}

/// A VM whose memory is being saved while it runs.
pub struct RunningSave<'a> {
    machine: &'a VmHandle,
    files: &'a SnapshotFiles,
    copy: LiveCopy<'a>,
}

/// The state of a VM at the moment at which it was paused. The VM may run again; its files are complete after
/// [`finish`](CapturedVm::finish).
pub struct CapturedVm<'a> {
    files: &'a SnapshotFiles,
    document: Document<MachineState>,
    memory: CapturedMemory<'a>,
}

/// Begins to write the snapshot of a running VM to `files`, as [`save_to_files`] does: copies the memory that it has for itself. If the
/// kernel tracks no writes, this is done when the VM is paused. Every step but the flush at the end fails soon after `stop` has become
/// true, with [`SnapshotError::Stopped`].
pub fn begin_save<'a>(
    machine: &'a VmHandle,
    files: &'a SnapshotFiles,
    tracker: &'a PageTracker,
    stop: &'a AtomicBool,
) -> Result<RunningSave<'a>, SnapshotError> {
    let VmConfig { backing, pages, .. } = *machine.config();
    if backing == MemoryBacking::Shared || pages == HostPages::Hugetlb {
        return Err(SnapshotError::Untracked);
    }
    files.state.set_len(0).map_err(files.failed("truncate", STATE_FILE))?;
    Ok(RunningSave { machine, files, copy: LiveCopy::begin(machine.memory(), files, tracker, stop)? })
}

impl<'a> RunningSave<'a> {
    /// Copies what the VM, which must be paused, has written since, and its state. It may be resumed then.
    pub fn capture(self) -> Result<CapturedVm<'a>, SnapshotError> {
        let machine = self.machine.save().map_err(|source| SnapshotError::Machine { source })?;
        let VmConfig { memory_mib, hotplug_mib, .. } = *self.machine.config();
        let document = Document { memory_mib, hotplug_mib, working_set: WorkingSet::default(), machine };
        Ok(CapturedVm { files: self.files, document, memory: self.copy.capture()? })
    }
}

impl CapturedVm<'_> {
    /// Writes the rest of the memory, and the state last: without it there is no snapshot.
    pub fn finish(self) -> Result<SavedPages, SnapshotError> {
        let bytes = envelope::encode(&self.document)?;
        let pages = self.memory.finish()?;
        write_state(self.files, &bytes)?;
        Ok(pages)
    }
}

/// When a VM has touched the pages of a working set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Touched {
    /// Before it does anything for its user: every VM touches them.
    Early,
    /// Since then.
    Later,
}

/// Records in `files` which pages this VM, which was restored from them in small pages, has touched until now. VMs that are restored from
/// them later get these pages before they run; with [`Touched::Later`] they only get small pages there when they need them. Without the
/// pagemap of this process nothing is recorded.
pub fn record_working_set(machine: &VmHandle, files: &SnapshotFiles, when: Touched) -> Result<(), SnapshotError> {
    let Some(pagemap) = &files.pagemap else {
        guest_warn!("the working set is not recorded, because this process cannot read its pagemap");
        return Ok(());
    };
    let mut document: Document<MachineState> = read_document(files)?;
    let found = WorkingSet::find(machine.memory(), &files.memory, pagemap);
    let found = found.map_err(files.failed("measure", MEMORY_FILE))?;
    match when {
        Touched::Early => document.working_set = found,
        Touched::Later => document.working_set.extend(found),
    }
    write_state(files, &envelope::encode(&document)?)
}

/// Allocates the holes beside the data of a saved memory, as far as restored VMs map them with the data. Otherwise each first access to one
/// adds a page to a file on tmpfs, which counts as memory of the process that happens to be the first.
pub fn fill_holes(files: &SnapshotFiles) -> Result<(), SnapshotError> {
    memory::fill_holes(&files.memory).map_err(files.failed("allocate", MEMORY_FILE))
}

/// Reads the snapshot in `dir` except its memory, like [`read_files`].
pub fn open(dir: &Path) -> Result<Snapshot, SnapshotError> {
    read_files(SnapshotFiles::open(dir)?)
}

/// Reads a snapshot except its memory. The files may hold any bytes: the result is a snapshot or an error, and at most
/// [`MAX_STATE_BYTES`] are read.
pub fn read_files(files: SnapshotFiles) -> Result<Snapshot, SnapshotError> {
    read(files)
}

/// Writes the state last: without it there is no snapshot.
fn write(files: &SnapshotFiles, document: &Document<impl Serialize>, memory: &Memory) -> Result<(), SnapshotError> {
    let bytes = envelope::encode(document)?;
    files.state.set_len(0).map_err(files.failed("truncate", STATE_FILE))?;
    // Zero pages are not written: where an earlier snapshot has data, they must be holes.
    files.memory.set_len(0).map_err(files.failed("truncate", MEMORY_FILE))?;
    memory::write(&files.memory, memory, files.pagemap.as_ref()).map_err(files.failed("write", MEMORY_FILE))?;
    files.memory.sync_all().map_err(files.failed("flush", MEMORY_FILE))?;
    write_state(files, &bytes)
}

fn write_state(files: &SnapshotFiles, bytes: &[u8]) -> Result<(), SnapshotError> {
    files.state.set_len(0).map_err(files.failed("truncate", STATE_FILE))?;
    files.state.write_all_at(bytes, 0).map_err(files.failed("write", STATE_FILE))?;
    files.state.sync_all().map_err(files.failed("flush", STATE_FILE))
}

fn read<S: DeserializeOwned>(files: SnapshotFiles) -> Result<Snapshot<S>, SnapshotError> {
    let document = read_document(&files)?;
    let expected = document.memory_bytes();
    match files.memory.metadata().map(|file| file.len()) {
        Ok(got) if got == expected => Ok(Snapshot { document, memory: files.memory }),
        Ok(got) => Err(SnapshotError::Length { path: files.directory.join(MEMORY_FILE), got, expected }),
        Err(source) => Err(files.failed("read the size of", MEMORY_FILE)(source)),
    }
}

fn read_document<S: DeserializeOwned>(files: &SnapshotFiles) -> Result<Document<S>, SnapshotError> {
    let length = files.state.metadata().map_err(files.failed("read the size of", STATE_FILE))?.len();
    if length > MAX_STATE_BYTES {
        return Err(SnapshotError::TooLarge { bytes: length, max: MAX_STATE_BYTES });
    }
    let mut bytes = vec![0; usize::try_from(length).unwrap_or_default()]; // at most MAX_STATE_BYTES
    files.state.read_exact_at(&mut bytes, 0).map_err(files.failed("read", STATE_FILE))?;
    let path = files.directory.join(STATE_FILE);
    let document: Document<S> = envelope::decode(&bytes, &path)?;
    match document.working_set.check(document.memory_bytes()) {
        Ok(()) => Ok(document),
        Err(source) => Err(SnapshotError::Decode { path, source: source.into() }),
    }
}

/// Harness for `fuzz`: reads these bytes as a file `state`, and as the document of a file with a valid header of each version.
#[cfg(any(test, feature = "fuzz"))]
pub(crate) fn harness(data: &[u8]) {
    let [json, cbor] = [1, VERSION].map(|version| envelope::add_header(version, data).unwrap_or_default());
    for bytes in [data, &json, &cbor] {
        if let Ok(document) = envelope::decode::<Document<MachineState>>(bytes, Path::new(STATE_FILE)) {
            let reencoded = envelope::encode(&document).unwrap_or_default();
            assert!(envelope::decode::<Document<MachineState>>(&reencoded, Path::new(STATE_FILE)).is_ok());
        }
    }
}

impl Snapshot {
    /// Returns the state, for [`VmBuilder::restore`].
    pub fn state(&self) -> &MachineState {
        &self.document.machine
    }

    /// Returns the number of vCPUs.
    pub fn vcpus(&self) -> usize {
        self.document.machine.vcpus.len()
    }

    /// Returns the size of the memory in MiB.
    pub fn memory_mib(&self) -> u32 {
        self.document.memory_mib
    }

    /// Returns the size of the hot-plug memory in MiB.
    pub fn hotplug_mib(&self) -> u32 {
        self.document.hotplug_mib
    }

    /// Returns whether the snapshot is a template: VMs that are restored from it may have more devices and more hot-plug memory.
    pub fn is_template(&self) -> bool {
        self.document.machine.announces_all_windows
    }

    /// Returns the kinds of the devices, in the order in which the caller must attach them to the builder.
    pub fn devices(&self) -> impl Iterator<Item = DeviceKind> {
        self.document.machine.devices.iter().map(|transport| transport.device.kind())
    }

    /// Returns a builder with the snapshot's memory. Its data is mapped privately: pages are read from the file on first access, and
    /// writes of the guest stay in this process. The file must not change as long as the VM lives.
    pub fn builder(&self) -> Result<VmBuilder, machine::Error> {
        self.builder_with(self.hotplug_mib(), HostPages::default())
    }

    /// Like [`builder`](Snapshot::builder), with so much hot-plug memory, which for a template may be more than it was saved with, and with
    /// pages of this kind where the snapshot has no data.
    pub fn builder_with(&self, hotplug_mib: u32, pages: HostPages) -> Result<VmBuilder, machine::Error> {
        let (saved, memory_mib) = (self.hotplug_mib(), self.memory_mib());
        if hotplug_mib != saved && !(self.is_template() && hotplug_mib > saved) {
            let (what, saved, here) = ("MiB of hot-plug memory", saved as usize, hotplug_mib as usize);
            return Err(machine::Error::Mismatch { what, saved, here });
        }
        let vcpus = u8::try_from(self.vcpus()).unwrap_or(u8::MAX); // too many for any VM
        let config = VmConfig { vcpus, memory_mib, hotplug_mib, pages, ..VmConfig::default() };
        let builder = VmBuilder::with_saved_memory(config, saved, &self.memory)?;
        self.document.working_set.populate(builder.memory());
        Ok(builder)
    }
}
