//! Manages the templates from which pods of engine `kvm` start. A template is built by a process of its own when the daemon begins and
//! after a pod did not find one; no pod waits for it. docs/contributor/templates.md describes the whole.

mod catalogue;
mod image;
mod key;

pub(crate) use catalogue::{MissReason, Retry, TemplateCatalogue, TemplateEntry, TemplateFor, TemplateState};
pub(crate) use key::{KeyBase, TemplateKey, node_cpu};

use super::context::error::LifecycleError;
use super::context::services::Pods;
use crate::config::{Config, Handler, TemplateScope};
use nacelle_base::files::{FileError, at, remove_tree_if_there};
use nacelle_base::machine::MemoryPages;
use nacelle_base::task::run_blocking_or_panic as blocking;
use nacelle_base::{Chain, Classify, FailureKind};
use nacelle_engine::{MEMORY_FILE, STATE_FILE, SnapshotFiles, read_snapshot};
use nacelle_image::SmallImageError;
use nacelle_pod::client::ClientError;
use nacelle_pod::spec::{EngineSpec, PodSpec};
use nacelle_pod::template::{IMAGE_FILE, PodTemplate, TemplateShape, TemplateSpec, create_directory};
use std::fs::{self, DirBuilder};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// The cgroup of the processes that build templates, to which their files in memory are charged.
const CGROUP: &str = "nacelle/templates";
/// The name of the directory of the template that is being built. It is no longer than the name of a pod's run directory, because sockets
/// of a VM have paths in both.
const DRAFT: &str = "building";
/// The factor between the memory of two templates of a handler, and the bound of what a clone has in proportion to its template: the kernel
/// sizes its hash tables for the memory with which it boots.
const MEMORY_STEP: u32 = 8;
/// From 64 GiB of addresses on, of which 1 GiB is no memory, a kernel may use larger memory blocks than those in which a clone's memory is
/// added.
const MAX_MEMORY_MIB: u32 = 63 << 10;
/// The time for a build besides the boot and the rehearsal, each of which may take the boot timeout.
const BUILD_MARGIN: Duration = Duration::from_secs(60);

/// Why a template could not be built.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TemplateError {
    /// A file operation failed.
    #[error(transparent)]
    File(#[from] FileError),
    /// The process that builds it failed.
    #[error(transparent)]
    Process(#[from] ClientError),
    /// There is no user for the process.
    #[error(transparent)]
    User(Box<LifecycleError>),
    /// There is no image to rehearse with.
    #[error("cannot write the image with which the template is rehearsed")]
    Image(#[from] SmallImageError),
    /// The kernel, the initramfs or the program was replaced meanwhile.
    #[error("the kernel, the initramfs or nacelle-pod was replaced while the template was built")]
    Replaced,
}

impl Classify for TemplateError {
    fn kind(&self) -> FailureKind {
        match self {
            TemplateError::File(error) => error.kind(),
            TemplateError::Process(error) => error.kind(),
            TemplateError::User(error) => error.kind(),
            TemplateError::Image(error) => error.kind(),
            TemplateError::Replaced => FailureKind::Conflict,
        }
    }
}

/// The templates of a node.
pub(crate) struct Templates {
    directory: PathBuf,
    scope: TemplateScope,
    max_bytes: u64,
    keys: Arc<KeyBase>,
    catalogue: Mutex<TemplateCatalogue>,
    /// Held while directories of templates get or lose their names, so that they fit the catalogue.
    files: tokio::sync::Mutex<()>,
    /// Changes with each change of the catalogue.
    changed: watch::Sender<()>,
}

impl Templates {
    /// Opens the directory of templates: keeps those that can be used, and removes what else is there. If that fails, there are no
    /// templates, and pods boot. Blocks.
    pub(crate) fn open(config: &Config, program: PathBuf) -> Templates {
        let mut templates = Templates {
            directory: config.paths.templates(),
            scope: config.sandbox.templates,
            max_bytes: config.sandbox.templates_max_mib.saturating_mul(1 << 20),
            keys: Arc::new(KeyBase::read(program)),
            catalogue: Mutex::default(),
            files: tokio::sync::Mutex::default(),
            changed: watch::Sender::default(),
        };
        if let Err(error) = templates.read_all() {
            tracing::warn!("no VM starts from a template, because their directory cannot be used: {}", Chain(&error));
            templates.scope = TemplateScope::Off;
        }
        templates
    }

    fn read_all(&self) -> Result<(), FileError> {
        let directory = &self.directory;
        if self.scope != TemplateScope::Off {
            // Besides the templates, one that is being built.
            create_directory(directory, self.max_bytes.saturating_mul(2))?;
        } else if !directory.exists() {
            return Ok(());
        }
        for entry in fs::read_dir(directory).map_err(at("list", directory))? {
            let path = entry.map_err(at("list", directory))?.path();
            let kept = if self.scope == TemplateScope::Off { None } else { self.read(&path) };
            match kept {
                Some((key, content, bytes)) => self.lock().insert_ready(key, content, bytes),
                None => remove_tree_if_there(&path)?,
            }
        }
        let evicted = self.lock().evict(self.max_bytes);
        evicted.iter().try_for_each(|key| remove_tree_if_there(&self.directory_of(key)))
    }

    fn lock(&self) -> MutexGuard<'_, TemplateCatalogue> {
        self.catalogue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads a template of an earlier daemon; `None` if it is incomplete, or is for another kernel, CPU or program.
    fn read(&self, path: &Path) -> Option<(TemplateKey, TemplateFor, u64)> {
        let key = TemplateKey::parse(path.file_name()?.to_str()?)?;
        let TemplateSpec { shape, namespace, .. } = TemplateSpec::read(path).ok()?;
        let expected = self.keys.key(&shape, namespace.as_deref()).ok()?;
        let bytes = used_bytes(path).ok()?;
        let is_of_scope = namespace.is_some() == (self.scope == TemplateScope::Namespace);
        (key == expected && is_of_scope).then_some((key, TemplateFor { shape, namespace }, bytes))
    }

    /// Returns the template from which a pod of this namespace starts; if there is none, it is built for the next one. Its outcome must be
    /// reported.
    pub(crate) async fn find(&self, spec: &PodSpec, namespace: &str, handler: &Handler) -> Option<FoundTemplate> {
        if self.scope == TemplateScope::Off || !matches!(spec.engine, EngineSpec::Kvm {}) {
            return None;
        }
        let found = match self.content(spec, namespace, handler) {
            Ok(content) => self.look_up(content).await,
            Err(reason) => Err(self.lock().miss(reason)),
        };
        match found {
            Ok(found) => Some(found),
            Err(reason) => {
                tracing::info!(pod = %spec.id, %reason, "the VM of the pod boots: there is no template for it");
                None
            }
        }
    }

    /// Returns what template a pod needs, or why there is none for it.
    fn content(&self, spec: &PodSpec, namespace: &str, handler: &Handler) -> Result<TemplateFor, MissReason> {
        if spec.kernel != handler.kernel {
            return Err(MissReason::OwnKernel);
        }
        if spec.memory_pages == MemoryPages::Hugetlb {
            return Err(MissReason::HugePages);
        }
        let first = u32::try_from(handler.memory_mib).unwrap_or(u32::MAX);
        let memory_mib = template_memory(spec.memory_mib, first).ok_or(MissReason::Memory)?;
        let namespace = (self.scope == TemplateScope::Namespace).then(|| namespace.to_owned());
        Ok(TemplateFor { shape: TemplateShape::of(spec, memory_mib), namespace })
    }

    async fn look_up(&self, content: TemplateFor) -> Result<FoundTemplate, MissReason> {
        let memory_mib = content.shape.memory_mib;
        let key = match self.key(&content).await {
            Ok(key) => key,
            // The boot reports a missing file.
            Err(error) => {
                tracing::debug!("cannot look for a template: {}", Chain(&error));
                return Err(self.lock().miss(MissReason::BuildFailed));
            }
        };
        let found = self.lock().find(&key, content, Instant::now());
        self.changed.send_replace(());
        let template = PodTemplate { directory: self.directory_of(&key), memory_mib };
        found.map(|generation| FoundTemplate { template, key, generation })
    }

    async fn key(&self, content: &TemplateFor) -> Result<TemplateKey, FileError> {
        let (keys, content) = (Arc::clone(&self.keys), content.clone());
        blocking(move || keys.key(&content.shape, content.namespace.as_deref())).await
    }

    fn directory_of(&self, key: &TemplateKey) -> PathBuf {
        self.directory.join(key.to_string())
    }

    /// Records how the pod started that had this template. One that cannot be used is removed, and built again when a pod wants it.
    pub(crate) async fn report(&self, found: &FoundTemplate, outcome: TemplateOutcome) {
        let FoundTemplate { template, key, generation } = found;
        let why = match outcome {
            TemplateOutcome::Started => return self.lock().count_start(key, *generation),
            TemplateOutcome::Booted => {
                self.lock().miss(MissReason::Unusable);
                // A pod process is no authority: it may lack memory or descriptors, or be hostile.
                let directory = template.directory.clone();
                match blocking(move || SnapshotFiles::open(&directory).and_then(read_snapshot)).await {
                    Ok(_usable) => {
                        tracing::warn!(template = %key, "a pod process did not use the template");
                        return;
                    }
                    Err(error) => Chain(&error).to_string(),
                }
            }
            TemplateOutcome::Failed => match self.lock().count_failed_start(key, *generation) {
                true => "pods do not start from it".to_owned(),
                false => return,
            },
        };
        tracing::warn!(template = %key, why, "removed a template");
        self.remove(key, Some(*generation)).await;
    }

    /// Removes a template; VMs that run from it are not affected. Returns whether there was one.
    pub(crate) async fn drop_template(&self, key: &TemplateKey) -> bool {
        self.remove(key, None).await
    }

    async fn remove(&self, key: &TemplateKey, generation: Option<u64>) -> bool {
        let existed = self.lock().remove(key, generation);
        if existed {
            self.remove_files(key).await;
            self.changed.send_replace(());
        }
        existed
    }

    /// Removes the files of a template that is not in the catalogue.
    async fn remove_files(&self, key: &TemplateKey) {
        let _names = self.files.lock().await;
        if matches!(self.lock().state(key), Some(TemplateState::Ready { .. })) {
            // It was built again meanwhile.
            return;
        }
        let directory = self.directory_of(key);
        if let Err(error) = blocking(move || remove_tree_if_there(&directory)).await {
            tracing::warn!(template = %key, "cannot remove the template: {}", Chain(&error));
        }
    }

    /// Requests the template for pods of a handler without limits, if the handler's VMs start from one and all namespaces share it.
    pub(crate) async fn want_for(&self, handler: &Handler, retry: Retry) -> Result<Option<TemplateKey>, FileError> {
        if self.scope != TemplateScope::Node || handler.memory_pages == MemoryPages::Hugetlb {
            return Ok(None);
        }
        let first = u32::try_from(handler.memory_mib).unwrap_or(u32::MAX);
        let Some(memory_mib) = template_memory(first, first) else { return Ok(None) };
        let shape = TemplateShape {
            vcpus: handler.vcpus,
            max_vcpus: handler.max_vcpus.unwrap_or(handler.vcpus).max(handler.vcpus),
            memory_mib,
            console: handler.console,
            kernel: handler.kernel.clone(),
            initrd: handler.initrd.clone(),
            kernel_args: handler.kernel_args.clone(),
        };
        let content = TemplateFor { shape, namespace: None };
        let key = self.key(&content).await?;
        self.lock().want(&key, content, Instant::now(), retry);
        self.changed.send_replace(());
        Ok(Some(key))
    }

    /// Waits until the template is neither wanted nor being built, and returns its state then; `None` if it was removed.
    pub(crate) async fn wait_for(&self, key: &TemplateKey) -> Option<TemplateState> {
        let mut changed = self.changed.subscribe();
        loop {
            match self.lock().state(key).cloned() {
                Some(TemplateState::Wanted | TemplateState::Building) => {}
                state => return state,
            }
            // The sender is a part of this value.
            let _ = changed.changed().await;
        }
    }

    /// Calls `look` with the catalogue.
    pub(crate) fn look<T>(&self, look: impl FnOnce(&TemplateCatalogue) -> T) -> T {
        look(&self.lock())
    }

    /// Builds templates that are wanted, one after the other, until the future is dropped. `lend` lends a user to a process.
    pub(crate) async fn build_wanted(
        &self,
        config: &Config,
        pods: &dyn Pods,
        lend: impl Fn() -> Result<Option<LentUser>, LifecycleError>,
    ) {
        let mut changed = self.changed.subscribe();
        loop {
            loop {
                let Some((key, content)) = self.lock().begin_build() else { break };
                let began = Instant::now();
                let built = match lend() {
                    Ok(user) => self.build(&key, content, config, pods, user).await,
                    Err(error) => Err(TemplateError::User(Box::new(error))),
                };
                match built {
                    Ok(()) => {
                        tracing::info!(template = %key, seconds = began.elapsed().as_secs_f64(), "built a template")
                    }
                    Err(error) => {
                        tracing::warn!(template = %key, "cannot build a template, so pods boot: {}", Chain(&error));
                        self.lock().fail_build(&key, Chain(&error).to_string(), Instant::now());
                    }
                }
                self.remove_stale().await;
                self.changed.send_replace(());
            }
            // The sender is a part of this value.
            let _ = changed.changed().await;
        }
    }

    /// Builds a template, and removes what is not complete. If the future is dropped, the next daemon does so.
    async fn build(
        &self,
        key: &TemplateKey,
        content: TemplateFor,
        config: &Config,
        pods: &dyn Pods,
        user: Option<LentUser>,
    ) -> Result<(), TemplateError> {
        let draft = self.directory.join(DRAFT);
        let built = self.build_in(&draft, key, content, config, pods, user).await;
        if let Err(error) = blocking(move || remove_tree_if_there(&draft)).await {
            tracing::warn!("cannot remove an incomplete template: {}", Chain(&error));
        }
        built
    }

    async fn build_in(
        &self,
        draft: &Path,
        key: &TemplateKey,
        content: TemplateFor,
        config: &Config,
        pods: &dyn Pods,
        user: Option<LentUser>,
    ) -> Result<(), TemplateError> {
        let boot_timeout = config.sandbox.boot_timeout;
        let spec = TemplateSpec {
            version: nacelle_pod::spec::VERSION,
            shape: content.shape.clone(),
            namespace: content.namespace.clone(),
            boot_ms: config.sandbox.boot_timeout_ms(),
            seccomp: config.jail.seccomp,
            cgroup: CGROUP.into(),
            user: user.as_ref().map(|user| user.id),
        };
        let created = draft.to_owned();
        blocking(move || create_draft(&created)).await?;
        let limit = boot_timeout.saturating_mul(2).saturating_add(BUILD_MARGIN);
        pods.build_template(draft, &spec, limit).await?;
        // The process has read the files by their names.
        if self.key(&content).await? != *key {
            return Err(TemplateError::Replaced);
        }
        let evicted = {
            let _names = self.files.lock().await;
            let (built, target) = (draft.to_owned(), self.directory_of(key));
            let bytes = blocking(move || finish(&built, &target)).await?;
            let mut catalogue = self.lock();
            match catalogue.end_build(key, bytes) {
                true => catalogue.evict(self.max_bytes),
                false => vec![key.clone()],
            }
        };
        for key in evicted {
            tracing::info!(template = %key, "removed a template");
            self.remove_files(&key).await;
        }
        Ok(())
    }

    /// Removes the templates whose kernel, initramfs or program was replaced.
    async fn remove_stale(&self) {
        let all: Vec<_> = self.look(|catalogue| {
            let ready = catalogue.entries().filter(|(_, entry)| matches!(entry.state, TemplateState::Ready { .. }));
            ready.map(|(key, entry)| (key.clone(), entry.content.clone())).collect()
        });
        for (key, content) in all {
            if !self.key(&content).await.is_ok_and(|now| now == key) {
                tracing::info!(template = %key, "removed a template whose kernel, initramfs or program was replaced");
                self.drop_template(&key).await;
            }
        }
    }
}

/// A template that a pod has found.
pub(crate) struct FoundTemplate {
    pub template: PodTemplate,
    key: TemplateKey,
    generation: u64,
}

/// How a pod started that had found a template.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TemplateOutcome {
    /// From the template.
    Started,
    /// It booted, because its process could not use the template.
    Booted,
    /// Not at all.
    Failed,
}

/// A user that a process has while it builds a template.
pub(crate) struct LentUser {
    pub id: u32,
    give_back: Box<dyn Fn(u32) + Send + Sync>,
}

impl LentUser {
    pub(crate) fn new(id: u32, give_back: impl Fn(u32) + Send + Sync + 'static) -> LentUser {
        LentUser { id, give_back: Box::new(give_back) }
    }
}

impl Drop for LentUser {
    fn drop(&mut self) {
        (self.give_back)(self.id);
    }
}

/// Creates the directory of a template, with what the process needs that builds it, in place of what an earlier build has left.
fn create_draft(directory: &Path) -> Result<(), TemplateError> {
    remove_tree_if_there(directory)?;
    DirBuilder::new().recursive(true).mode(0o700).create(directory).map_err(at("create", directory))?;
    let (image, path) = (image::rehearsal_image()?, directory.join(IMAGE_FILE));
    Ok(fs::write(&path, image).map_err(at("write", &path))?)
}

/// Gives a template its name. Returns the memory that its files take.
fn finish(built: &Path, target: &Path) -> Result<u64, FileError> {
    let bytes = used_bytes(built).map_err(at("stat", built))?;
    remove_tree_if_there(target)?;
    fs::rename(built, target).map_err(at("rename", built))?;
    Ok(bytes)
}

/// Returns the memory that a template's files take.
fn used_bytes(directory: &Path) -> std::io::Result<u64> {
    let used = |name: &str| directory.join(name).metadata().map(|file| file.blocks() * 512);
    Ok(used(STATE_FILE)? + used(MEMORY_FILE)?)
}

/// Returns the memory of the template for a VM with `memory_mib`: the first template's memory, or eight or sixty-four times as much and
/// so on, as the VM has. A VM with less than that gets a template of its own size. `None` for sizes at which no template is used.
fn template_memory(memory_mib: u32, first: u32) -> Option<u32> {
    let mut template = first.min(memory_mib);
    while let Some(next) = template.checked_mul(MEMORY_STEP).filter(|next| *next <= memory_mib) {
        template = next;
    }
    (template < MAX_MEMORY_MIB).then_some(template)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_template_has_at_least_an_eighth_of_the_memory() {
        for (memory, first, template) in [
            (256, 256, Some(256)),
            (300, 256, Some(256)),
            (100, 256, Some(100)),
            (2047, 256, Some(256)),
            (2048, 256, Some(2048)),
            ((128 << 10) - 1, 256, Some(16 << 10)),
            (128 << 10, 256, None),
            (1 << 20, 63 << 10, None),
            (u32::MAX, 128, None),
        ] {
            assert_eq!(template_memory(memory, first), template, "{memory} {first}");
        }
    }
}
