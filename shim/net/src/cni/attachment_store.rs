//! Records each attachment, one file a pod, so that DEL and CHECK send the same as ADD did even after a restart and with another
//! configuration. The module also serializes the plugins of a pod: only the holder of the lock of the pod's input file may run
//! plugins. A plugin has that file as its standard input and therefore holds the lock too, so a new daemon waits for the plugins
//! that a killed one started. All functions block.

use super::CniError;
use super::config::{NetworkList, read_limited};
use nacelle_base::PodId;
use nacelle_base::files::{at, remove_if_there, write_whole};
use nacelle_base::json;
use nacelle_base::task::run_blocking;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Seek, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

/// More than the largest configuration and the largest result together, each of 1 MiB.
const MAX_RECORD: u64 = 8 << 20;
/// The maximum number of JSON values of a record: a configuration, arguments and a result, each of which may have `json::MAX_VALUES`.
const MAX_VALUES: usize = 4 * json::MAX_VALUES;

/// The directory of the attachment records.
#[derive(Clone, Debug)]
pub(crate) struct AttachmentStore {
    pub dir: PathBuf,
}

/// One attachment. Written before ADD without its result, and after it with it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct AttachmentRecord {
    pub id: PodId,
    pub netns: PathBuf,
    pub interface: String,
    /// The value of CNI_ARGS.
    pub args: String,
    /// The runtime arguments by capability.
    pub capabilities: Map<String, Value>,
    /// The configuration list.
    pub network: Map<String, Value>,
    pub result: Option<Map<String, Value>>,
    /// Set when the pod is gone but DEL has not succeeded: DEL will be retried.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owed: Option<OwedDeleteState>,
}

/// The owed DEL of a pod that is gone.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct OwedDeleteState {
    /// When DEL first failed, in seconds since 1970.
    pub since: u64,
    /// The number of attempts.
    pub attempts: u32,
    /// The error of the last attempt.
    pub error: String,
}

#[derive(Serialize, Deserialize)]
#[serde(tag = "version")]
enum Stored {
    #[serde(rename = "1")]
    V1(AttachmentRecord),
}

impl AttachmentStore {
    fn path(&self, id: &PodId) -> PathBuf {
        self.dir.join(format!("{id}.json"))
    }

    /// Writes the record durably. It replaces an earlier one of this pod.
    pub fn write(&self, record: &AttachmentRecord) -> Result<(), CniError> {
        let path = self.path(&record.id);
        fs::create_dir_all(&self.dir).map_err(at("create", &self.dir))?;
        let bytes = serde_json::to_vec(&Stored::V1(record.clone())).map_err(bad(&path))?;
        Ok(write_whole(&path, &bytes)?)
    }

    /// Returns the pod's record, if there is one, and its network.
    pub fn read(&self, id: &PodId) -> Result<Option<(AttachmentRecord, NetworkList)>, CniError> {
        let path = self.path(id);
        let bytes = match read_limited(&path, MAX_RECORD) {
            Err(CniError::File { source }) if source.source.kind() == io::ErrorKind::NotFound => return Ok(None),
            other => other?,
        };
        AttachmentStore::parse(&path, &bytes).map(Some)
    }

    pub(super) fn parse(path: &Path, bytes: &[u8]) -> Result<(AttachmentRecord, NetworkList), CniError> {
        let what = path.display().to_string();
        let Stored::V1(record) = json::read_limited(bytes, MAX_VALUES).map_err(bad(path))?;
        let network = NetworkList::from_list(&what, record.network.clone())?;
        Ok((record, network))
    }

    /// Locks the pod's input file. Returns `None` while a plugin or another process holds it.
    pub fn lock_plugins(&self, id: &PodId) -> Result<Option<PluginLock>, CniError> {
        let path = self.input_path(id);
        fs::create_dir_all(&self.dir).map_err(at("create", &self.dir))?;
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let file = options.open(&path).map_err(at("create", &path))?;
        match file.try_lock() {
            Ok(()) => Ok(Some(PluginLock { file, running: AtomicBool::new(false) })),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(source)) => Err(at("lock", &path)(source).into()),
        }
    }

    /// Removes the record and the input file of the pod.
    pub fn remove(&self, id: &PodId) -> Result<(), CniError> {
        remove_if_there(&self.path(id))?;
        Ok(remove_if_there(&self.input_path(id))?)
    }

    fn input_path(&self, id: &PodId) -> PathBuf {
        self.dir.join(format!("{id}.input"))
    }

    /// Returns all pods that have a record or an input file; a killed daemon may have left only the latter.
    pub fn ids(&self) -> Result<BTreeSet<PodId>, CniError> {
        let entries = match fs::read_dir(&self.dir) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(BTreeSet::new()),
            other => other.map_err(at("read", &self.dir))?,
        };
        let mut ids = BTreeSet::new();
        for entry in entries {
            let name = entry.map_err(at("read", &self.dir))?.file_name();
            let stem = |name: &str| name.strip_suffix(".json").or_else(|| name.strip_suffix(".input"))?.parse().ok();
            ids.extend(name.to_str().and_then(stem));
        }
        Ok(ids)
    }
}

/// The lock on the plugins of a pod: its holder runs them one after the other.
#[derive(Debug)]
pub(crate) struct PluginLock {
    file: File,
    /// A plugin that was started may still run. It has the lock then, and keeps it when this value is dropped.
    running: AtomicBool,
}

impl PluginLock {
    /// Runs one plugin: `run` receives its standard input. If the future is dropped meanwhile, the lock is not released before
    /// the plugin and its children have ended.
    pub async fn run<T, R: Future<Output = T>>(&self, input: Vec<u8>, run: impl FnOnce(File) -> R) -> io::Result<T> {
        // The duplicate shares the open file description, and so the lock.
        let mut file = self.file.try_clone()?;
        let filled = run_blocking("write a CNI input file", move || fill(&mut file, &input).map(|()| file)).await;
        let file = filled.map_err(io::Error::other)??;
        self.running.store(true, Ordering::Relaxed);
        let ran = run(file).await;
        self.running.store(false, Ordering::Relaxed);
        Ok(ran)
    }
}

impl Drop for PluginLock {
    fn drop(&mut self) {
        if !self.running.load(Ordering::Relaxed)
            && let Err(error) = self.file.unlock()
        {
            tracing::warn!(%error, "cannot release the lock of a CNI input file");
        }
    }
}

/// Replaces the content of the file by `input`.
pub(super) fn fill(file: &mut File, input: &[u8]) -> io::Result<()> {
    file.set_len(0)?;
    file.rewind()?;
    file.write_all(input)?;
    file.rewind()
}

fn bad(path: &Path) -> impl FnOnce(serde_json::Error) -> CniError {
    let what = path.display().to_string();
    move |source| CniError::Json { what, source }
}
