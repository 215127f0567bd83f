//! Applies files that kubelet updates to running VMs: the pod's power annotation and the secrets with keys and passwords. A
//! controller runs for each VM, from the start of its container to the container's end. Starts, ends and changed files are
//! reported to it; the periodic run ([`RESYNC`]) only covers what no event reports.

mod credentials;
mod directory_watch;
mod power;

use crate::runtime::{MachinePodView, PodRuntime};
use credentials::CredentialsController;
use directory_watch::{DirectoryWatch, DirectoryWatcher};
use nacelle_base::task::{TaskError, run_blocking};
use nacelle_base::{Chain, ContainerId};
use nacelle_model::record::ContainerRecord;
use power::PowerController;
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio_util::task::AbortOnDropHandle;

/// Time after which a VM in the target state is checked again although no event was reported.
const RESYNC: Duration = Duration::from_secs(30);
/// The shortest time between two runs of a controller: a pod may write into its volumes without an end.
const MIN_INTERVAL: Duration = Duration::from_millis(250);
/// The first pause before a failed or unfinished run is repeated.
const RETRY: Duration = Duration::from_secs(1);

/// Keeps one property of one running VM as files of the pod say.
trait Controller: Sized + Send + 'static {
    /// Returns the controller of this VM; `None` if its pod does not set the property.
    fn new(runtime: &Arc<dyn PodRuntime>, view: &MachinePodView, container: &ContainerRecord) -> Option<Self>;

    /// Returns the directories with the files.
    fn directories(&self) -> Vec<PathBuf>;

    /// Reads the files and applies them. Returns the time after which it is called again, unless a file changes earlier.
    fn reconcile(&mut self) -> impl Future<Output = Duration> + Send;
}

/// Runs the controllers of all VMs of a node until the daemon shuts down.
pub async fn run(runtime: Arc<dyn PodRuntime>) {
    let watcher = match DirectoryWatcher::new() {
        Ok(watcher) => Some(Arc::new(watcher)),
        Err(error) => {
            tracing::warn!(
                "cannot watch the volumes of machine pods, which are read every {} s instead: {}",
                RESYNC.as_secs(),
                Chain(&error)
            );
            None
        }
    };
    let controllers = async {
        tokio::join!(
            run_kind::<PowerController>(&runtime, watcher.as_ref()),
            run_kind::<CredentialsController>(&runtime, watcher.as_ref()),
        )
    };
    let dispatch = async {
        if let Some(Err(error)) = async { Some(watcher.as_ref()?.dispatch().await) }.await {
            tracing::error!("cannot read the events of watched volumes: {}", Chain(&error));
        }
        std::future::pending::<()>().await;
    };
    tokio::select! {
        _ = controllers => {}
        () = dispatch => {}
    }
}

/// Runs the controllers of one kind.
async fn run_kind<C: Controller>(runtime: &Arc<dyn PodRuntime>, watcher: Option<&Arc<DirectoryWatcher>>) {
    let mut changes = runtime.changes();
    let mut tasks: HashMap<ContainerId, AbortOnDropHandle<()>> = HashMap::new();
    loop {
        changes.mark_unchanged();
        let pods = runtime.machine_pods();
        let running: Vec<_> = pods.iter().filter_map(|pod| Some((pod, pod.running_container()?))).collect();
        // A controller ends only by a panic; the next run starts another one.
        tasks.retain(|id, task| !task.is_finished() && running.iter().any(|(_, container)| container.id == *id));
        for (pod, container) in running {
            if tasks.contains_key(&container.id) {
                continue;
            }
            let Some(controller) = C::new(runtime, pod, container) else { continue };
            let task = tokio::spawn(run_controller(controller, watcher.cloned()));
            tasks.insert(container.id.clone(), AbortOnDropHandle::new(task));
        }
        tokio::select! {
            changed = changes.changed() => {
                if changed.is_err() {
                    return;
                }
            }
            () = tokio::time::sleep(RESYNC) => {}
        }
    }
}

/// Runs one controller until the task is aborted. The directories are watched before they are read, so no change is missed.
async fn run_controller(mut controller: impl Controller, watcher: Option<Arc<DirectoryWatcher>>) {
    let mut watch = match watcher {
        None => None,
        Some(watcher) => {
            let directories = controller.directories();
            let subscribe = move || watcher.subscribe(directories);
            log_failure(run_blocking("watch the volumes of a VM", subscribe).await)
        }
    };
    let mut renewed_at = Instant::now();
    loop {
        // A directory that is not watched yet is retried.
        if let Some(mut incomplete) = watch.take_if(|watch| !watch.is_complete() && renewed_at.elapsed() >= RESYNC) {
            renewed_at = Instant::now();
            let renew = move || {
                incomplete.add_missing();
                incomplete
            };
            watch = log_failure(run_blocking("watch the volumes of a VM", renew).await);
        }
        let pause = controller.reconcile().await;
        let changed = async {
            match &watch {
                Some(watch) => watch.changed().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = changed => tokio::time::sleep(MIN_INTERVAL).await,
            () = tokio::time::sleep(pause) => {}
        }
    }
}

/// Returns the watch; logs that there is none.
fn log_failure(watch: Result<DirectoryWatch, TaskError>) -> Option<DirectoryWatch> {
    watch.inspect_err(|error| tracing::warn!("{}", Chain(error))).ok()
}

/// Returns whether this container of a machine pod runs.
fn is_running(runtime: &dyn PodRuntime, container: &ContainerId) -> bool {
    runtime.machine_pods().iter().any(|pod| pod.running_container().is_some_and(|running| running.id == *container))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::testing::FakeRuntime;
    use nacelle_model::mount::{NodeVolume, Propagation};
    use nacelle_model::state::ContainerState;
    use nacelle_model::testing;
    use std::os::unix::fs::symlink;
    use std::path::Path;
    use tokio::sync::mpsc::UnboundedReceiver;

    /// Longer than any event takes, and shorter than a run without events.
    const LIMIT: Duration = Duration::from_secs(15);

    /// Writes the annotations as kubelet does.
    fn write_annotation(directory: &Path, update: u32, power: &str) {
        let files = format!("..2026_11_27_12_00_0{update}.1");
        std::fs::create_dir(directory.join(&files)).unwrap();
        let text = format!("vm.nacelle.dev/power=\"{power}\"\n");
        std::fs::write(directory.join(&files).join("annotations"), text).unwrap();
        symlink(&files, directory.join("..data_tmp")).unwrap();
        std::fs::rename(directory.join("..data_tmp"), directory.join("..data")).unwrap();
    }

    fn pod_with_annotations(volume: &Path, state: ContainerState) -> MachinePodView {
        let mut container = testing::container(1, 1);
        let mut config = (*container.config).clone();
        config.node_volumes = vec![NodeVolume {
            host_path: volume.display().to_string(),
            container_path: "/run/nacelle/pod".into(),
            readonly: true,
            recursive_read_only: false,
            propagation: Propagation::Private,
            id_mapped: false,
            options: [].into(),
        }];
        (container.config, container.state) = (Arc::new(config), state);
        MachinePodView { pod: testing::pod(1), containers: [(container.id.clone(), container)].into() }
    }

    async fn next_verb(execs: &mut UnboundedReceiver<Vec<String>>) -> String {
        let args = tokio::time::timeout(LIMIT, execs.recv()).await.expect("an event causes the verb").unwrap();
        args[1].clone()
    }

    #[tokio::test]
    async fn started_vms_and_changed_files_are_handled_without_the_periodic_run() {
        const { assert!(RESYNC.as_secs() >= 2 * LIMIT.as_secs()) };
        let volume = tempfile::tempdir().unwrap();
        let (runtime, mut execs) = FakeRuntime::new();
        let runtime = Arc::new(runtime);
        let _controllers = AbortOnDropHandle::new(tokio::spawn(run(runtime.clone())));
        // A pod starts whose annotation has changed since.
        write_annotation(volume.path(), 1, "paused");
        runtime.set_pods(vec![pod_with_annotations(volume.path(), ContainerState::Running)]);
        assert_eq!([next_verb(&mut execs).await, next_verb(&mut execs).await], ["status", "pause"]);
        // kubelet updates the file.
        write_annotation(volume.path(), 2, "off");
        assert_eq!([next_verb(&mut execs).await, next_verb(&mut execs).await], ["status", "stop"]);
        // The container ends.
        runtime.set_pods(vec![pod_with_annotations(volume.path(), ContainerState::Exited)]);
        tokio::time::sleep(Duration::from_millis(200)).await;
        write_annotation(volume.path(), 3, "on");
        assert!(tokio::time::timeout(Duration::from_millis(300), execs.recv()).await.is_err());
    }
}
