//! Makes each file of the node one inode for the guest, through however many mounts it is reached.
//!
//! A pod's volumes are mounts; a directory, a part of it and its parent may all be volumes of containers of the pod. virtiofsd has an
//! inode for each mount through which it reaches a file, which is called a view here. The guest gets one inode (a node) with all
//! views of it: its key is the device and the inode number on the node, and the bits of its number above [`nodes::DEVICE_SHIFT`] name the
//! device, by which the guest's kernel knows which mounts are one file system. A request is answered by the view that allows most, so
//! the node refuses a write where no container of the pod may write the file; what one container may not write while another may, the
//! guest's kernel refuses. Views whose owners are mapped are another device: the same file has other owners there.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod filesystem;
mod nameless;
mod nodes;
mod resolve;

use crate::mounts::Mounts;
use nameless::NamelessFiles;
use nodes::ViewState;
use std::ffi::CString;
use std::fs::File;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use virtiofsd::passthrough::PassthroughFs;

/// virtiofsd's file system, with one inode for each file.
pub(crate) struct Views {
    inner: PassthroughFs,
    root: CString,
    /// This process's `/proc/self/fd`.
    own_fds: File,
    mounts: Arc<Mounts>,
    /// The guest's kernel mounts volumes that are not directories too.
    supports_file_submounts: Arc<AtomicBool>,
    /// How long the guest may cache names and attributes.
    cache: Duration,
    /// The files that are open without virtiofsd.
    nameless_files: NamelessFiles,
    state: Mutex<ViewState>,
}

impl Views {
    /// Wraps virtiofsd's file system; `root` is the path of its root directory. At most `max_nameless` files are open without it.
    pub fn new(
        inner: PassthroughFs,
        root: CString,
        own_fds: File,
        mounts: Arc<Mounts>,
        supports_file_submounts: Arc<AtomicBool>,
        cache: Duration,
        max_nameless: usize,
    ) -> Views {
        let nameless_files = NamelessFiles::new(max_nameless);
        Views { inner, root, own_fds, mounts, supports_file_submounts, cache, nameless_files, state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, ViewState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
