//! Implements the CNI runtime: selects the network, runs its plugins in order and keeps their results.
//!
//! ADD runs the chain forwards, DEL backwards. The input of ADD is recorded before ADD starts; DEL, CHECK and GC use the record
//! and never today's configuration. Everything is async. GC begins when no other command runs, and blocks all others while it
//! runs.

mod attachment_store;
mod config;
mod error;
#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;
mod owed_deletes;
mod plugin_runner;
mod result;
#[cfg(test)]
mod tests;
mod types;

use crate::network::{KnownPods, NetConfig};
use crate::{NetError, NetNs};
use attachment_store::{AttachmentRecord, AttachmentStore, PluginLock, fill};
use config::{NetworkList, Plugin, Version};
use nacelle_base::json;
use nacelle_base::task::run_blocking;
use nacelle_base::{Chain, PodId};
use nix::sys::memfd::{MFdFlags, memfd_create};
use owed_deletes::OwedDeletes;
use plugin_runner::{CniCommand, PluginRunner};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::collections::{BTreeSet, HashMap};
use std::ffi::OsString;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};
use tokio::sync::{Semaphore, SemaphorePermit};

pub use error::CniError;
pub use owed_deletes::OwedDelete;
pub(crate) use result::CniResult;
pub use types::{InterfaceUsage, PodRef};

/// The name of the pod's default interface.
pub(crate) const INTERFACE: &str = "eth0";
/// The maximum number of pods that are attached or detached at the same time.
const MAX_PARALLEL: u32 = 64;
/// The interval of the checks whether a plugin of a former daemon has ended.
const FORMER_PLUGIN_POLL: Duration = Duration::from_millis(10);

/// The interval of the checks whether no command runs, before GC.
const IDLE_POLL: Duration = Duration::from_millis(50);

/// The CNI runtime of this node.
#[derive(Debug)]
pub(crate) struct Cni {
    conf_dir: PathBuf,
    runner: PluginRunner,
    store: AttachmentStore,
    /// Each command takes one permit; GC takes all.
    permits: Semaphore,
    versions: Mutex<HashMap<PathBuf, SupportedVersions>>,
    owed_deletes: Mutex<OwedDeletes>,
}

/// The versions that a plugin supports, and the state of its file at the request.
#[derive(Clone, Debug)]
struct SupportedVersions {
    file: (Option<SystemTime>, u64),
    versions: Vec<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct WireVersions {
    supported_versions: Vec<String>,
}

impl Cni {
    pub fn new(config: &NetConfig) -> Cni {
        Cni {
            conf_dir: config.conf_dir.clone(),
            runner: PluginRunner { bin_dirs: config.bin_dirs.clone(), deadline: config.plugin_deadline },
            store: AttachmentStore { dir: config.cache_dir.clone() },
            permits: Semaphore::new(MAX_PARALLEL as usize),
            versions: Mutex::default(),
            owed_deletes: Mutex::default(),
        }
    }

    /// Attaches the pod. First detaches it from the network of an earlier attempt.
    pub async fn add(&self, pod: &PodRef, netns: &Path) -> Result<CniResult, CniError> {
        let _permit = self.acquire_permits(1).await;
        let (args, capabilities) = (pod.args()?, pod.capabilities());
        let network = self.load_network().await?;
        self.detach(&pod.id).await?;
        let lock = self.lock_plugins(&pod.id).await?;
        for capability in capabilities.keys().filter(|name| ["portMappings", "bandwidth"].contains(&name.as_str())) {
            if !network.plugins.iter().any(|plugin| plugin.has_capability(capability)) {
                tracing::warn!(pod = %pod.id, network = network.name, capability, "no CNI plugin of the network has a capability that the pod requests");
            }
        }
        let mut record = AttachmentRecord {
            id: pod.id.clone(),
            netns: netns.to_owned(),
            interface: INTERFACE.to_owned(),
            args,
            capabilities,
            network: network.to_list(),
            result: None,
            owed: None,
        };
        self.write_record(&record).await?;
        for (position, plugin) in network.plugins.iter().enumerate() {
            match self.add_plugin(&lock, &record, &network, plugin).await {
                Ok(result) => record.result = Some(result),
                Err(error) => {
                    let ran = network.plugins.get(..=position).unwrap_or_default();
                    self.roll_back_add(&lock, &record, &network, ran).await;
                    return Err(error);
                }
            }
        }
        if let Err(error) = self.write_record(&record).await {
            self.roll_back_add(&lock, &record, &network, &network.plugins).await;
            return Err(error);
        }
        CniResult::from_raw("the CNI result", record.result.unwrap_or_default(), network.version)
    }

    /// Detaches the pod. Succeeds if the pod is not attached.
    pub async fn del(&self, id: &PodId) -> Result<(), CniError> {
        let _permit = self.acquire_permits(1).await;
        self.detach(id).await
    }

    /// Runs CHECK of all plugins: whether the attachment is as they made it.
    pub async fn check(&self, id: &PodId) -> Result<(), CniError> {
        let _permit = self.acquire_permits(1).await;
        let none = || CniError::NotAttached { pod: id.to_string() };
        self.read_record(id).await?.ok_or_else(none)?;
        let lock = self.lock_plugins(id).await?;
        let (record, network) = self.read_record(id).await?.ok_or_else(none)?;
        let result = record.result.clone().ok_or_else(none)?;
        if network.version < Version::V0_4_0 || network.disable_check {
            return Ok(());
        }
        for plugin in &network.plugins {
            let input = plugin.input(&network, &record.capabilities, prev_result(Some(&result)));
            let environment = record.environment(&record.netns);
            self.run(&lock, plugin, CniCommand::Check, &environment, input).await?;
        }
        Ok(())
    }

    /// Returns an error unless ADD is expected to succeed.
    pub async fn status(&self) -> Result<(), CniError> {
        let network = self.load_network().await?;
        for plugin in &network.plugins {
            let supported = self.supported_versions(&plugin.kind).await?;
            if !supported.iter().any(|version| version == network.version.as_str()) {
                let version = network.version.as_str().to_owned();
                return Err(CniError::Version { plugin: plugin.kind.clone(), version, supported });
            }
        }
        if network.version >= Version::V1_1_0 {
            for plugin in &network.plugins {
                let input = plugin.input(&network, &Map::new(), Map::new());
                self.run_without_pod(&plugin.kind, CniCommand::Status, &input).await?;
            }
        }
        Ok(())
    }

    /// Runs GC of the plugins of today's network with the attachments of the pods that are known when it begins as the valid
    /// ones. Continues after failures and returns the first one. The caller limits the time, also that until it begins.
    pub async fn gc(&self, known: &KnownPods<'_>) -> Result<(), CniError> {
        // Not in the queue, where it would hold up all commands behind it while one hangs.
        let _permit = loop {
            match self.permits.try_acquire_many(MAX_PARALLEL) {
                Ok(permits) => break permits,
                Err(_busy) => tokio::time::sleep(IDLE_POLL).await,
            }
        };
        // Only now: no attachment can be added until the end.
        let keep = known();
        let network = match self.load_network().await {
            Err(CniError::NoConfig { .. }) => return Ok(()),
            other => other?,
        };
        if network.version < Version::V1_1_0 || network.disable_gc {
            return Ok(());
        }
        let mut valid = Vec::new();
        for id in &keep {
            // An unreadable record counts as valid: GC must not detach a pod that may be running.
            let of_this = match self.read_record(id).await {
                Ok(Some((_, other))) => other.name == network.name,
                Ok(None) => false,
                Err(_) => true,
            };
            if of_this {
                valid.push(json!({ "containerID": id, "ifname": INTERFACE }));
            }
        }
        let mut first = Ok(());
        let valid = Map::from_iter([("cni.dev/valid-attachments".to_owned(), Value::Array(valid))]);
        for plugin in &network.plugins {
            let input = plugin.input(&network, &Map::new(), valid.clone());
            first = first.and(self.run_without_pod(&plugin.kind, CniCommand::Gc, &input).await.map(drop));
        }
        first
    }

    async fn add_plugin(
        &self,
        lock: &PluginLock,
        record: &AttachmentRecord,
        network: &NetworkList,
        plugin: &Plugin,
    ) -> Result<Map<String, Value>, CniError> {
        let input = plugin.input(network, &record.capabilities, prev_result(record.result.as_ref()));
        let output = self.run(lock, plugin, CniCommand::Add, &record.environment(&record.netns), input).await?;
        let what = format!("the output of CNI plugin {} to ADD", plugin.kind);
        CniResult::parse(&what, &output, network.version).map(|result| result.raw)
    }

    /// Runs DEL of the plugins that ran, after a failed ADD. If that fails too, the record stays, for the next DEL.
    async fn roll_back_add(&self, lock: &PluginLock, record: &AttachmentRecord, network: &NetworkList, ran: &[Plugin]) {
        let mut undone = self.del_chain(lock, record, network, ran).await;
        if undone.is_ok() {
            undone = self.remove_record(&record.id).await;
        }
        if let Err(error) = undone {
            tracing::warn!(pod = %record.id, error = %Chain(&error), "cannot clean up after a failed CNI ADD; the next DEL retries it");
        }
    }

    async fn detach(&self, id: &PodId) -> Result<(), CniError> {
        if self.read_record(id).await?.is_some() {
            let lock = self.lock_plugins(id).await?;
            // Read again: the previous holder of the file may have changed it.
            if let Some((record, network)) = self.read_record(id).await? {
                self.del_chain(&lock, &record, &network, &network.plugins).await?;
            }
        }
        self.remove_record(id).await
    }

    /// Runs DEL backwards through the chain. After a failure of one plugin the others still run.
    async fn del_chain(
        &self,
        lock: &PluginLock,
        record: &AttachmentRecord,
        network: &NetworkList,
        plugins: &[Plugin],
    ) -> Result<(), CniError> {
        // After a reboot, or if its mount was lost, the namespace does not exist; CNI expects an empty path then.
        let netns = record.netns.clone();
        let there = run_blocking("look at a network namespace", move || is_namespace(&netns)).await?;
        let environment = record.environment(if there { &record.netns } else { Path::new("") });
        let known = record.result.as_ref().filter(|_| network.version >= Version::V0_4_0);
        let mut first = Ok(());
        for plugin in plugins.iter().rev() {
            let input = plugin.input(network, &record.capabilities, prev_result(known));
            let ran = self.run(lock, plugin, CniCommand::Del, &environment, input).await;
            first = first.and(ran.map(drop));
        }
        first
    }

    /// Returns the versions that a plugin supports. The plugin is run again when its file changes.
    async fn supported_versions(&self, plugin: &str) -> Result<Vec<String>, CniError> {
        let path = self.runner.find(plugin).await?;
        let file = match tokio::fs::metadata(&path).await {
            Ok(found) => (found.modified().ok(), found.len()),
            Err(source) => return Err(CniError::Exec { plugin: plugin.to_owned(), command: "VERSION", source }),
        };
        let known = self.versions.lock().unwrap_or_else(PoisonError::into_inner).get(&path).cloned();
        if let Some(known) = known.filter(|known| known.file == file) {
            return Ok(known.versions);
        }
        let input = json!({ "cniVersion": Version::V1_1_0.as_str() }).to_string();
        let output = self.run_without_pod(plugin, CniCommand::Version, input.as_bytes()).await?;
        let wire: WireVersions = json::read(&output).map_err(|source| {
            let what = format!("the output of CNI plugin {plugin} to VERSION");
            CniError::Json { what, source }
        })?;
        let entry = SupportedVersions { file, versions: wire.supported_versions.clone() };
        self.versions.lock().unwrap_or_else(PoisonError::into_inner).insert(path, entry);
        Ok(wire.supported_versions)
    }

    /// Runs a plugin for the pod whose lock is held.
    async fn run(
        &self,
        lock: &PluginLock,
        plugin: &Plugin,
        command: CniCommand,
        environment: &[(&'static str, OsString)],
        input: Vec<u8>,
    ) -> Result<Vec<u8>, CniError> {
        let ran = lock.run(input, |file| self.runner.run(&plugin.kind, command, environment, file)).await;
        ran.map_err(|source| CniError::Input { plugin: plugin.kind.clone(), source })?
    }

    /// Runs a plugin without a pod.
    async fn run_without_pod(&self, plugin: &str, command: CniCommand, input: &[u8]) -> Result<Vec<u8>, CniError> {
        let failed = |source| CniError::Input { plugin: plugin.to_owned(), source };
        let memory = memfd_create(c"cni", MFdFlags::MFD_CLOEXEC).map_err(|errno| failed(errno.into()))?;
        let mut file = File::from(memory);
        fill(&mut file, input).map_err(failed)?;
        self.runner.run(plugin, command, &[], file).await
    }

    /// Locks the pod's plugins. Waits while a plugin runs for it, at most for the plugin deadline (`Busy`).
    async fn lock_plugins(&self, id: &PodId) -> Result<PluginLock, CniError> {
        let end = Instant::now() + self.runner.deadline;
        loop {
            let (store, of) = (self.store.clone(), id.clone());
            if let Some(lock) = run_blocking("lock a CNI input file", move || store.lock_plugins(&of)).await?? {
                return Ok(lock);
            }
            if Instant::now() >= end {
                return Err(CniError::Busy { pod: id.to_string() });
            }
            tokio::time::sleep(FORMER_PLUGIN_POLL).await;
        }
    }

    async fn acquire_permits(&self, weight: u32) -> Option<SemaphorePermit<'_>> {
        // The semaphore is never closed, so this is never an error.
        self.permits.acquire_many(weight).await.ok()
    }

    async fn load_network(&self) -> Result<NetworkList, CniError> {
        let dir = self.conf_dir.clone();
        run_blocking("read the CNI configuration", move || NetworkList::load(&dir)).await?
    }

    async fn write_record(&self, record: &AttachmentRecord) -> Result<(), CniError> {
        let (store, record) = (self.store.clone(), record.clone());
        run_blocking("write a CNI record", move || store.write(&record)).await?
    }

    async fn read_record(&self, id: &PodId) -> Result<Option<(AttachmentRecord, NetworkList)>, CniError> {
        let (store, id) = (self.store.clone(), id.clone());
        run_blocking("read a CNI record", move || store.read(&id)).await?
    }

    async fn remove_record(&self, id: &PodId) -> Result<(), CniError> {
        let (store, id) = (self.store.clone(), id.clone());
        run_blocking("remove a CNI record", move || store.remove(&id)).await?
    }

    /// Returns all pods that are attached, or were when something failed.
    pub async fn ids(&self) -> Result<BTreeSet<PodId>, CniError> {
        let store = self.store.clone();
        run_blocking("list the CNI records", move || store.ids()).await?
    }
}

impl AttachmentRecord {
    fn environment(&self, netns: &Path) -> [(&'static str, OsString); 4] {
        [
            ("CNI_CONTAINERID", self.id.as_str().into()),
            ("CNI_NETNS", netns.into()),
            ("CNI_IFNAME", self.interface.clone().into()),
            ("CNI_ARGS", self.args.clone().into()),
        ]
    }
}

/// Returns whether DEL can name this namespace. If that cannot be determined, returns true: the plugins report the error.
fn is_namespace(path: &Path) -> bool {
    match NetNs::open(path) {
        Err(NetError::NotNetns { .. }) => false,
        Err(NetError::Netns { source, .. }) => source.kind() != std::io::ErrorKind::NotFound,
        _ => true,
    }
}

fn prev_result(result: Option<&Map<String, Value>>) -> Map<String, Value> {
    Map::from_iter(result.map(|result| ("prevResult".to_owned(), Value::Object(result.clone()))))
}
