//! Owns: what is remembered of each attachment, one file a pod, so that DEL and CHECK say the same as ADD did
//! even after a restart and with another configuration. And who may run plugins for a pod: whoever holds the
//! lock of its input file. A plugin has that file as its standard input and so holds the lock too: what a
//! daemon started that was killed since is waited for by the next one.
//! Threads: blocks.

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

/// More than the largest configuration and the largest result, each of 1 MiB.
const MAX_RECORD: u64 = 8 << 20;
/// Values of a record: of a configuration, arguments and a result, each of which may have `json::VALUES`.
const MAX_VALUES: usize = 4 * json::VALUES;

#[derive(Clone, Debug)]
pub(crate) struct Cache {
    pub dir: PathBuf,
}

/// One attachment. Written before ADD without, and after it with its result.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Record {
    pub id: PodId,
    pub netns: PathBuf,
    pub interface: String,
    /// CNI_ARGS.
    pub args: String,
    /// Arguments by capability.
    pub capabilities: Map<String, Value>,
    /// The configuration list.
    pub network: Map<String, Value>,
    pub result: Option<Map<String, Value>>,
    /// Set when the pod is gone and DEL has not succeeded: it is still to be done.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owed: Option<Owed>,
}

/// A DEL that is still to be done.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Owed {
    /// When it failed first, in seconds since 1970.
    pub since: u64,
    /// How often it was tried.
    pub attempts: u32,
    /// Why it failed last.
    pub error: String,
}

#[derive(Serialize, Deserialize)]
#[serde(tag = "version")]
enum Stored {
    #[serde(rename = "1")]
    V1(Record),
}

impl Cache {
    fn path(&self, id: &PodId) -> PathBuf {
        self.dir.join(format!("{id}.json"))
    }

    /// Keeps the record durably, in the place of an earlier one of this pod.
    pub fn write(&self, record: &Record) -> Result<(), CniError> {
        let path = self.path(&record.id);
        fs::create_dir_all(&self.dir).map_err(at("create", &self.dir))?;
        let bytes = serde_json::to_vec(&Stored::V1(record.clone())).map_err(bad(&path))?;
        Ok(write_whole(&path, &bytes)?)
    }

    /// The pod's record, if there is one, and its network.
    pub fn read(&self, id: &PodId) -> Result<Option<(Record, NetworkList)>, CniError> {
        let path = self.path(id);
        let bytes = match read_limited(&path, MAX_RECORD) {
            Err(CniError::File { source }) if source.source.kind() == io::ErrorKind::NotFound => return Ok(None),
            other => other?,
        };
        Cache::parse(&path, &bytes).map(Some)
    }

    pub(super) fn parse(path: &Path, bytes: &[u8]) -> Result<(Record, NetworkList), CniError> {
        let what = path.display().to_string();
        let Stored::V1(record) = json::read_most(bytes, MAX_VALUES).map_err(bad(path))?;
        let network = NetworkList::from_list(&what, record.network.clone())?;
        Ok((record, network))
    }

    /// The pod's input file, locked; nothing while a plugin or somebody else holds it.
    pub fn claim(&self, id: &PodId) -> Result<Option<Claim>, CniError> {
        let path = self.input_path(id);
        fs::create_dir_all(&self.dir).map_err(at("create", &self.dir))?;
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let file = options.open(&path).map_err(at("create", &path))?;
        match file.try_lock() {
            Ok(()) => Ok(Some(Claim { file, running: AtomicBool::new(false) })),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(source)) => Err(at("lock", &path)(source).into()),
        }
    }

    /// Forgets the pod.
    pub fn remove(&self, id: &PodId) -> Result<(), CniError> {
        remove_if_there(&self.path(id))?;
        Ok(remove_if_there(&self.input_path(id))?)
    }

    fn input_path(&self, id: &PodId) -> PathBuf {
        self.dir.join(format!("{id}.input"))
    }

    /// All pods that have a record, or an input file: a killed daemon may have left that alone.
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

/// The right to run plugins for a pod, one after the other.
#[derive(Debug)]
pub(crate) struct Claim {
    file: File,
    /// Whether a plugin that was started may still run: then it has the lock, and keeps it when this goes.
    running: AtomicBool,
}

impl Claim {
    /// Runs one plugin: `run` is given its standard input. If the caller gives up meanwhile, the right is
    /// not given back before the plugin and what it started have ended.
    pub async fn run<T, R: Future<Output = T>>(&self, input: Vec<u8>, run: impl FnOnce(File) -> R) -> io::Result<T> {
        // The same open file, and so the same lock.
        let mut file = self.file.try_clone()?;
        let filled = run_blocking("write a CNI input file", move || fill(&mut file, &input).map(|()| file)).await;
        let file = filled.map_err(io::Error::other)??;
        self.running.store(true, Ordering::Relaxed);
        let ran = run(file).await;
        self.running.store(false, Ordering::Relaxed);
        Ok(ran)
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if !self.running.load(Ordering::Relaxed)
            && let Err(error) = self.file.unlock()
        {
            tracing::warn!(%error, "the lock of a CNI input file could not be given back");
        }
    }
}

/// Makes `input` what is read from the file.
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
