//! Defines the host's handle to a block device, which changes its content and size. One change at a time holds the lock
//! `changing`, during its file operations; `state` is held only briefly and never during I/O. Lock order: `changing`, then `state`.

use super::copy::PendingCopy;
use super::device::SlotDevice;
use super::extent_map::{ExtentMap, FileRange, MAX_CAPACITY, WriteState};
use super::{BlockError, BlockMetrics, SECTOR};
use crate::virtio::{Device, Interrupt};
use nacelle_base::machine::{Extent, ImageDisk};
use std::fs::{File, OpenOptions};
use std::io::{Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard};

/// The maximum length of a serial number in bytes.
pub(super) const SERIAL: usize = 20;

/// A block device that exists from boot and whose backing changes while the guest runs. Clones are handles to the same slot.
#[derive(Clone, Debug)]
pub struct Slot(Arc<SlotInner>);

/// The state that handle and device share.
#[derive(Debug)]
pub(crate) struct SlotInner {
    pub(super) serial: String,
    pub(super) metrics: BlockMetrics,
    /// The host does not support reads from the page cache only, so every read of this disk may block.
    pub(super) no_cached_reads: AtomicBool,
    changing: Mutex<()>,
    state: Mutex<SlotState>,
}

struct SlotState {
    view: SlotView,
    interrupt: Option<Arc<dyn Interrupt>>,
}

/// The content of the slot at one moment. A request uses one view from its start to its end.
#[derive(Clone, Debug)]
pub(super) enum SlotView {
    ReadOnly(Arc<ExtentMap>),
    /// Files and block devices at their positions; some of them are writable.
    Volumes(Arc<ExtentMap>),
    ReadWrite {
        file: Arc<File>,
        path: Arc<PathBuf>,
        size: u64,
        /// What must be copied before it is changed.
        copy: Option<Arc<PendingCopy>>,
    },
}

impl SlotView {
    /// Returns the capacity in bytes.
    pub(super) fn capacity(&self) -> u64 {
        match self {
            SlotView::ReadOnly(extents) | SlotView::Volumes(extents) => extents.capacity(),
            SlotView::ReadWrite { size, .. } => *size,
        }
    }

    pub(super) fn is_read_only(&self) -> bool {
        matches!(self, SlotView::ReadOnly(_))
    }

    /// Returns whether a copy of the disk still needs what a range holds.
    pub(super) fn must_keep(&self, at: u64, length: u64) -> bool {
        matches!(self, SlotView::ReadWrite { copy: Some(copy), .. } if copy.needs(at, length))
    }

    /// Returns the map of the placed ranges, if this kind of slot has one.
    pub(super) fn extents(&self) -> Option<&Arc<ExtentMap>> {
        match self {
            SlotView::ReadOnly(extents) | SlotView::Volumes(extents) => Some(extents),
            SlotView::ReadWrite { .. } => None,
        }
    }

    /// Returns a view of the same kind with another map.
    fn with_extents(&self, extents: ExtentMap) -> SlotView {
        match self {
            SlotView::Volumes(_) => SlotView::Volumes(Arc::new(extents)),
            _ => SlotView::ReadOnly(Arc::new(extents)),
        }
    }
}

impl SlotInner {
    pub(super) fn view(&self) -> SlotView {
        self.state().view.clone()
    }

    pub(super) fn set_interrupt(&self, interrupt: Option<Arc<dyn Interrupt>>) {
        self.state().interrupt = interrupt;
    }

    fn state(&self) -> MutexGuard<'_, SlotState> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Increases the capacity of a slot for placed ranges to at least `capacity` bytes.
    pub(super) fn grow(&self, capacity: u64) {
        let _changes = self.changing.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let view = self.view();
        if let Some(extents) = view.extents() {
            self.replace_view(view.with_extents(extents.grown(capacity)));
        }
    }

    /// Replaces the view, and notifies the guest if the size changes.
    fn replace_view(&self, view: SlotView) {
        let mut state = self.state();
        let resized = view.capacity() != state.view.capacity();
        state.view = view;
        let interrupt = state.interrupt.clone().filter(|_| resized);
        drop(state);
        if let Some(interrupt) = interrupt {
            interrupt.notify_config();
        }
    }
}

/// An extent of an image whose file is open.
#[derive(Debug)]
pub struct OpenExtent {
    /// The open file.
    pub file: File,
    /// The range. The path is used in error messages.
    pub extent: Extent,
}

impl Slot {
    /// Creates a read-only slot without content: its capacity is 0 and grows with [`place`](Slot::place). The guest finds it by
    /// `serial` (1 to 20 printable ASCII characters) in /sys/block/*/serial.
    pub fn read_only(serial: &str) -> Result<Slot, BlockError> {
        Slot::new(serial, SlotView::ReadOnly(Arc::default()))
    }

    /// Creates a read-write slot over an existing raw file or block device. A shorter file is extended to `size` bytes
    /// (sparse). `size` must be a multiple of 512.
    pub fn read_write(serial: &str, path: &Path, size: u64) -> Result<Slot, BlockError> {
        check_aligned("size", size)?;
        let open = |source| BlockError::Open { path: path.to_owned(), source };
        let file = OpenOptions::new().read(true).write(true).open(path).map_err(open)?;
        extend_file(&file, path, size)?;
        let (file, path) = (Arc::new(file), Arc::new(path.to_owned()));
        Slot::new(serial, SlotView::ReadWrite { file, path, size, copy: None })
    }

    /// Creates a slot without content like [`read_only`](Slot::read_only), on which [`place_volume`](Slot::place_volume) places
    /// writable ranges.
    pub fn volumes(serial: &str) -> Result<Slot, BlockError> {
        Slot::new(serial, SlotView::Volumes(Arc::default()))
    }

    fn new(serial: &str, view: SlotView) -> Result<Slot, BlockError> {
        if serial.is_empty() || serial.len() > SERIAL || !serial.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(BlockError::Serial { serial: serial.to_owned() });
        }
        Ok(Slot(Arc::new(SlotInner {
            serial: serial.to_owned(),
            metrics: BlockMetrics::default(),
            no_cached_reads: AtomicBool::new(false),
            changing: Mutex::new(()),
            state: Mutex::new(SlotState { view, interrupt: None }),
        })))
    }

    /// Places the pieces of `disk`, one after the other, from byte `at` (a multiple of 512). The files are opened here and may
    /// be unlinked afterwards. The capacity grows to at least the end of the image, rounded up to 1 MiB, and the guest is
    /// notified; it never shrinks. Fails if the range overlaps another one.
    pub fn place(&self, at: u64, disk: &ImageDisk) -> Result<(), BlockError> {
        check_image(at, disk.extents.iter())?; // Before any file is opened.
        let open = |extent: &Extent| {
            let file = File::open(&extent.path);
            let file = file.map_err(|source| BlockError::Open { path: extent.path.clone(), source })?;
            Ok(OpenExtent { file, extent: extent.clone() })
        };
        self.place_open(at, disk.extents.iter().map(open).collect::<Result<_, _>>()?)
    }

    /// Places extents whose files are already open; otherwise like [`place`](Slot::place).
    pub fn place_open(&self, at: u64, extents: Vec<OpenExtent>) -> Result<(), BlockError> {
        let end = check_image(at, extents.iter().map(|open| &open.extent))?;
        let _changes = self.lock_changes();
        let SlotView::ReadOnly(placed) = self.0.view() else { return Err(self.wrong_kind("place an image on")) };
        let nonempty = extents.into_iter().filter(|open| open.extent.length > 0);
        let files = nonempty.map(file_range).collect::<Result<Vec<_>, _>>()?;
        let placed = placed.with(at, files).map_err(|other| BlockError::Overlap {
            at,
            length: end - at,
            other: other.start,
            other_length: other.end - other.start,
        })?;
        self.0.replace_view(SlotView::ReadOnly(Arc::new(placed)));
        Ok(())
    }

    /// Places the first `length` bytes of a file or block device at byte `at` of a slot for volumes. Replaces the range that
    /// was placed there before, if any; the caller must pass the same file or device then, with more access or a greater
    /// length. `name` is used in error messages.
    pub fn place_volume(
        &self,
        at: u64,
        file: File,
        length: u64,
        writable: bool,
        name: &Path,
    ) -> Result<(), BlockError> {
        check_aligned("offset", at)?;
        check_aligned("length", length)?;
        check_aligned("end of the volume", at.saturating_add(length))?;
        if length == 0 {
            return Err(BlockError::Empty { at });
        }
        let _changes = self.lock_changes();
        let SlotView::Volumes(extents) = self.0.view() else { return Err(self.wrong_kind("place a volume on")) };
        let file_length = file_length(&file, name)?;
        if file_length < length {
            return Err(BlockError::TooShort { path: name.to_owned(), length: file_length, needed: length });
        }
        let earlier_writes = extents.source(at).and_then(|source| source.writes.clone());
        let writes = writable.then(|| earlier_writes.unwrap_or_else(|| Arc::new(WriteState::default())));
        let source = FileRange { file: Arc::new(file), offset: 0, length, writes };
        let extents = extents.replaced(at, source).map_err(|other| BlockError::Overlap {
            at,
            length,
            other: other.start,
            other_length: other.end - other.start,
        })?;
        self.0.replace_view(SlotView::Volumes(Arc::new(extents)));
        Ok(())
    }

    /// Removes the range placed at byte `at`, which then reads as zeros (requests in flight may still read the old bytes).
    /// Returns `false` if no range was placed there.
    pub fn unplace(&self, at: u64) -> bool {
        let _changes = self.lock_changes();
        let view = self.0.view();
        let Some(extents) = view.extents().and_then(|extents| extents.without(at)) else { return false };
        self.0.replace_view(view.with_extents(extents));
        true
    }

    /// Changes the size of a read-write slot (in bytes, a multiple of 512) and notifies the guest. A file is extended (sparse)
    /// but never truncated.
    pub fn resize(&self, size: u64) -> Result<(), BlockError> {
        check_aligned("size", size)?;
        let _changes = self.lock_changes();
        let SlotView::ReadWrite { file, path, copy, .. } = self.0.view() else { return Err(self.wrong_kind("resize")) };
        extend_file(&file, &path, size)?;
        self.0.replace_view(SlotView::ReadWrite { file, path, size, copy });
        Ok(())
    }

    /// Returns the file of a read-write slot.
    pub(super) fn writable_file(&self, operation: &'static str) -> Result<Arc<File>, BlockError> {
        match self.0.view() {
            SlotView::ReadWrite { file, .. } => Ok(file),
            _ => Err(self.wrong_kind(operation)),
        }
    }

    /// Makes every request that begins from now on preserve for this copy what it changes.
    pub(super) fn begin_copy(&self, pending: Arc<PendingCopy>) -> Result<(), BlockError> {
        let _changes = self.lock_changes();
        match self.0.view() {
            SlotView::ReadWrite { file, path, size, copy: None } => {
                self.0.replace_view(SlotView::ReadWrite { file, path, size, copy: Some(pending) });
                Ok(())
            }
            SlotView::ReadWrite { .. } => Err(BlockError::Copying { serial: self.0.serial.clone() }),
            _ => Err(self.wrong_kind("copy")),
        }
    }

    /// Reverts [`begin_copy`](Slot::begin_copy).
    pub(super) fn end_copy(&self) {
        let _changes = self.lock_changes();
        if let SlotView::ReadWrite { file, path, size, .. } = self.0.view() {
            self.0.replace_view(SlotView::ReadWrite { file, path, size, copy: None });
        }
    }

    /// Returns the size that the guest sees, in bytes.
    pub fn capacity(&self) -> u64 {
        self.0.view().capacity()
    }

    /// Returns the serial number by which the guest finds the disk.
    pub fn serial(&self) -> &str {
        &self.0.serial
    }

    /// Returns the counters.
    pub fn metrics(&self) -> &BlockMetrics {
        &self.0.metrics
    }

    /// Returns the device for a transport. Call it once per slot.
    pub fn device(&self) -> Box<dyn Device> {
        Box::new(SlotDevice::new(self.0.clone()))
    }

    #[cfg(any(test, feature = "fuzz"))]
    pub(crate) fn inner(&self) -> &Arc<SlotInner> {
        &self.0
    }

    fn lock_changes(&self) -> MutexGuard<'_, ()> {
        self.0.changing.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn wrong_kind(&self, operation: &'static str) -> BlockError {
        let slot_kind = match self.0.view() {
            SlotView::ReadOnly(_) => "read-only",
            SlotView::Volumes(_) => "for volumes",
            SlotView::ReadWrite { .. } => "read-write",
        };
        BlockError::WrongKind { serial: self.0.serial.clone(), slot_kind, operation }
    }
}

fn check_aligned(what: &'static str, value: u64) -> Result<(), BlockError> {
    if value.is_multiple_of(SECTOR) && value <= MAX_CAPACITY {
        Ok(())
    } else {
        Err(BlockError::Unaligned { what, value })
    }
}

fn file_length(mut file: &File, path: &Path) -> Result<u64, BlockError> {
    // Seeking to the end also works for block devices, whose metadata contains no length.
    file.seek(SeekFrom::End(0)).map_err(|source| BlockError::Open { path: path.to_owned(), source })
}

/// Checks the extents of an image that begins at byte `at`. Returns its end.
fn check_image<'a>(at: u64, extents: impl Iterator<Item = &'a Extent>) -> Result<u64, BlockError> {
    check_aligned("offset", at)?;
    let mut end = at;
    for extent in extents {
        check_aligned("extent offset", extent.offset)?;
        check_aligned("extent length", extent.length)?;
        end = end.saturating_add(extent.length);
        check_aligned("end of the image", end)?;
    }
    if end == at { Err(BlockError::Empty { at }) } else { Ok(end) }
}

fn file_range(open: OpenExtent) -> Result<FileRange, BlockError> {
    let OpenExtent { file, extent } = open;
    let path = &extent.path;
    let length = file_length(&file, path)?;
    // Both numbers are at most MAX_CAPACITY.
    let needed = extent.offset + extent.length;
    if length < needed {
        return Err(BlockError::TooShort { path: path.clone(), length, needed });
    }
    Ok(FileRange { file: Arc::new(file), offset: extent.offset, length: extent.length, writes: None })
}

fn extend_file(file: &File, path: &Path, needed: u64) -> Result<(), BlockError> {
    let error = |source| BlockError::Open { path: path.to_owned(), source };
    let length = file_length(file, path)?;
    if length >= needed {
        return Ok(());
    }
    if !file.metadata().map_err(error)?.is_file() {
        return Err(BlockError::TooShort { path: path.to_owned(), length, needed });
    }
    file.set_len(needed).map_err(error)
}

impl std::fmt::Debug for SlotState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SlotState").field("view", &self.view).finish_non_exhaustive()
    }
}
