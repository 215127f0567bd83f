//! Implements the service of the `nacelle vm` commands (proto/vm/v1): lists VMs and runs their verbs. The keeper implements the
//! verbs; this service runs them like `exec -- @vm VERB`.

mod console;
mod describe;
mod memory_dump;
mod status_changes;
mod transfer;

use crate::runtime::{ExecOutput, MachinePodView, PodRuntime, PodRuntimeError};
use crate::status::{error_status, rejection};
use crate::vms::{self, VmError};
use console::VmConsole;
use describe::{UNKNOWN_PHASE, add_status, describe_pod, describe_record, parse_snapshots, parse_volumes};
use nacelle_base::{Classify, ContainerId, FailureKind};
use nacelle_model::record::{ContainerRecord, VmRecord};
use nacelle_proto::vm;
use status_changes::{StatusChanges, StatusFollowers};
use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

/// Time limit of a verb without lasting work.
const VERB_TIMEOUT: Duration = Duration::from_secs(60);
/// Time from the end of a pod process until the end of its containers is known.
const END_TIMEOUT: Duration = Duration::from_secs(10);
/// Time limit for writing all memory of a VM to a disk.
const SNAPSHOT_TIMEOUT: Duration = Duration::from_secs(1800);
/// Time limit for a VM's status, where the status of all VMs is requested.
const STATUS_TIMEOUT: Duration = Duration::from_secs(5);
/// The shortest time between two lists of a watch.
const MIN_LIST_INTERVAL: Duration = Duration::from_millis(250);
/// Pause after which a watch requests the status of running VMs again if one did not respond.
const STATUS_RETRY: Duration = Duration::from_secs(2);
/// Interval at which a watch lists VMs although no change was reported.
const RESYNC: Duration = Duration::from_secs(30);

/// A stream of data to the client.
type DataStream = Pin<Box<dyn Stream<Item = Result<vm::Piece, Status>> + Send>>;

/// Why a request for a persistent VM failed.
#[derive(Debug, thiserror::Error)]
enum VmRequestError {
    /// A pod or another operation holds the VM, or it does not exist.
    #[error(transparent)]
    Lock(#[from] PodRuntimeError),
    /// The VM could not be copied.
    #[error("cannot copy VM {vm}")]
    Copy {
        /// Namespace and name of the VM.
        vm: String,
        /// The cause.
        source: VmError,
    },
    /// The VM could not be deleted.
    #[error("cannot delete VM {vm}")]
    Delete {
        /// Namespace and name of the VM.
        vm: String,
        /// The cause.
        source: VmError,
    },
}

impl Classify for VmRequestError {
    fn kind(&self) -> FailureKind {
        match self {
            VmRequestError::Lock(error) => error.kind(),
            VmRequestError::Copy { source, .. } | VmRequestError::Delete { source, .. } => source.kind(),
        }
    }
}

/// The service on one node.
#[derive(Clone)]
pub struct VmService {
    runtime: Arc<dyn PodRuntime>,
    followers: Arc<StatusFollowers>,
}

impl VmService {
    /// Creates the service for the pods of this runtime.
    pub fn new(runtime: Arc<dyn PodRuntime>) -> VmService {
        let followers = Arc::new(StatusFollowers::new(Arc::clone(&runtime)));
        VmService { runtime, followers }
    }

    /// Returns the pod that holds this persistent VM.
    fn holder(&self, vm: &str) -> Option<MachinePodView> {
        self.runtime.machine_pods().into_iter().find(|pod| pod.holds_vm(vm))
    }

    /// Returns the pod of a VM: the one that holds it, otherwise one that is named like it.
    fn find_pod(&self, reference: &vm::MachineRef) -> Result<MachinePodView, Status> {
        let id = vms::id(&reference.namespace, &reference.name);
        let name = Some((reference.namespace.as_str(), reference.name.as_str()));
        let with_name = || self.runtime.machine_pods().into_iter().find(|pod| pod.vm_name() == name);
        match self.holder(&id).or_else(with_name) {
            Some(pod) => Ok(pod),
            None if self.runtime.vms().find(&id).is_some() => {
                let message = format!("VM {id} has no pod: run a pod with the annotation vm.nacelle.dev/name");
                Err(rejection(FailureKind::Conflict, &message))
            }
            None => Err(not_found(&id)),
        }
    }

    /// Returns the container of a running VM.
    fn find_running(&self, reference: &vm::MachineRef) -> Result<ContainerRecord, Status> {
        let pod = self.find_pod(reference)?;
        pod.running_container().cloned().ok_or_else(|| {
            let id = vms::id(&reference.namespace, &reference.name);
            rejection(FailureKind::Conflict, &format!("VM {id} is not running: its pod has no running container"))
        })
    }

    /// Runs a verb of a running VM and returns its output.
    async fn run_verb(&self, reference: vm::MachineRef, verb: &[&str], timeout: Duration) -> Result<Vec<u8>, Status> {
        self.run_verb_in(&self.find_running(&reference)?.id, verb, timeout).await
    }

    async fn run_verb_in(&self, container: &ContainerId, verb: &[&str], timeout: Duration) -> Result<Vec<u8>, Status> {
        let args = ["@vm"].iter().chain(verb).map(|arg| (*arg).to_owned()).collect();
        let ExecOutput { stdout, stderr, exit_code } =
            self.runtime.exec(container, args, timeout).await.map_err(error_status)?;
        if exit_code == 0 {
            return Ok(stdout);
        }
        let message = String::from_utf8_lossy(&stderr).trim().chars().take(500).collect::<String>();
        Err(rejection(FailureKind::Conflict, &message))
    }

    /// Runs a verb without output.
    async fn run_simple_verb(
        &self,
        request: Request<vm::MachineRef>,
        verb: &'static str,
    ) -> Result<Response<vm::Empty>, Status> {
        self.run_verb(request.into_inner(), &[verb], VERB_TIMEOUT).await.map(|_| Response::new(vm::Empty {}))
    }

    /// Runs a verb that powers the VM off. If its pod process ends before the response, the VM has stopped too.
    async fn run_power_off_verb(
        &self,
        request: Request<vm::MachineRef>,
        verb: &'static str,
    ) -> Result<Response<vm::Empty>, Status> {
        let container = self.find_running(&request.into_inner())?.id;
        match self.run_verb_in(&container, &[verb], VERB_TIMEOUT).await {
            Err(error) if error.code() == tonic::Code::Unavailable && self.wait_for_end(&container).await => {}
            other => drop(other?),
        }
        Ok(Response::new(vm::Empty {}))
    }

    /// Waits until a container no longer runs; returns `false` after [`END_TIMEOUT`].
    async fn wait_for_end(&self, container: &ContainerId) -> bool {
        let mut changes = self.runtime.changes();
        let is_running = || {
            let pods = self.runtime.machine_pods();
            pods.iter().any(|pod| pod.running_container().is_some_and(|running| running.id == *container))
        };
        let ended = async {
            // Pods are listed after the receiver exists, so no change is missed.
            while is_running() && changes.changed().await.is_ok() {}
        };
        // The changes also end with the daemon, when nothing is known of the container any more.
        tokio::time::timeout(END_TIMEOUT, ended).await.is_ok() && !is_running()
    }

    async fn run_snapshot_verb(
        &self,
        request: Request<vm::SnapshotRef>,
        verb: &'static str,
    ) -> Result<Response<vm::Empty>, Status> {
        let vm::SnapshotRef { machine, name } = request.into_inner();
        let machine = machine.ok_or_else(|| missing("machine"))?;
        if name.is_empty() {
            return Err(missing("name"));
        }
        self.run_verb(machine, &[verb, &name], SNAPSHOT_TIMEOUT).await.map(|_| Response::new(vm::Empty {}))
    }

    async fn connect(
        &self,
        request: Request<tonic::Streaming<vm::WayRequest>>,
        kind: VmConsole,
    ) -> Result<Response<DataStream>, Status> {
        let mut requests = request.into_inner();
        let (reference, first_data) = console::first_request(&mut requests).await?;
        let container = self.find_running(&reference)?;
        let output = console::open(&*self.runtime, &container, kind, first_data, requests).await?;
        Ok(Response::new(Box::pin(ReceiverStream::new(output))))
    }

    /// Lists the VMs of a namespace (empty: all namespaces).
    async fn list_vms(&self, namespace: &str) -> Vec<vm::Machine> {
        let mut requests = JoinSet::new();
        let mut listed = Vec::new();
        for pod in self.runtime.machine_pods() {
            let find_record = |vm: &str| self.runtime.vms().find(vm);
            let Some(mut machine) = describe_pod(&pod, find_record) else { continue };
            if !namespace.is_empty() && machine.namespace != namespace {
                continue;
            }
            // For a persistent VM the pod that holds it counts.
            if machine.outlives_pods && machine.pod_id.is_empty() {
                continue;
            }
            match pod.running_container().map(|container| container.id.clone()) {
                Some(container) => {
                    let service = self.clone();
                    requests.spawn(async move {
                        let status = service.run_verb_in(&container, &["status"], STATUS_TIMEOUT).await.ok();
                        add_status(&mut machine, status.as_deref());
                        machine
                    });
                }
                None => listed.push(machine),
            }
        }
        while let Some(Ok(machine)) = requests.join_next().await {
            listed.push(machine);
        }
        let records = self.runtime.vms().list().into_iter().map(describe_record);
        for machine in records.filter(|machine| namespace.is_empty() || machine.namespace == namespace) {
            let same = |other: &vm::Machine| other.namespace == machine.namespace && other.name == machine.name;
            if !listed.iter().any(|other| other.outlives_pods && same(other)) {
                listed.push(machine);
            }
        }
        listed.sort_by(|a, b| (&a.namespace, &a.name).cmp(&(&b.namespace, &b.name)));
        listed
    }

    /// Copies a persistent VM that no pod holds. The copy gets an identity of its own.
    async fn copy_vm(&self, vm: &str, namespace: &str, name: &str) -> Result<VmRecord, VmRequestError> {
        let (_record, _lock) = self.runtime.lock_vm(vm, "copied")?;
        let copied = self.runtime.vms().copy(vm, namespace, name).await;
        copied.map_err(|source| VmRequestError::Copy { vm: vm.to_owned(), source })
    }

    /// Deletes a persistent VM that no pod holds, with all its data.
    async fn delete_vm(&self, vm: &str) -> Result<(), VmRequestError> {
        let (_record, _lock) = self.runtime.lock_vm(vm, "deleted")?;
        let deleted = self.runtime.vms().delete(vm).await;
        deleted.map_err(|source| VmRequestError::Delete { vm: vm.to_owned(), source })
    }

    /// Sends each VM of a namespace at first and after each change of it, until the client or the daemon ends.
    async fn send_changes(&self, namespace: &str, messages: &mpsc::Sender<Result<vm::Machine, Status>>) {
        let (mut pod_changes, mut vm_changes) = (self.runtime.changes(), self.runtime.vms().changes());
        let mut status_changes = StatusChanges::new(Arc::clone(&self.followers));
        let mut known: BTreeMap<(String, String), vm::Machine> = BTreeMap::new();
        loop {
            pod_changes.mark_unchanged();
            vm_changes.mark_unchanged();
            status_changes.mark_unchanged();
            let key = |machine: &vm::Machine| (machine.namespace.clone(), machine.name.clone());
            let listed = self.list_vms(namespace).await;
            let present: BTreeMap<_, _> = listed.into_iter().map(|machine| (key(&machine), machine)).collect();
            let changed = present.iter().filter(|(key, machine)| known.get(*key) != Some(*machine));
            let deleted = known.iter().filter(|(key, _)| !present.contains_key(*key));
            let as_deleted = |machine: &vm::Machine| vm::Machine { phase: "Deleted".to_owned(), ..machine.clone() };
            let updates: Vec<_> = changed
                .map(|(_, machine)| machine.clone())
                .chain(deleted.map(|(_, machine)| as_deleted(machine)))
                .collect();
            for machine in updates {
                if messages.send(Ok(machine)).await.is_err() {
                    return;
                }
            }
            let running = present.values().filter_map(|machine| machine.container_id.parse().ok());
            status_changes.follow(running.collect());
            let is_any_unknown =
                present.values().any(|machine| !machine.container_id.is_empty() && machine.phase == UNKNOWN_PHASE);
            known = present;
            tokio::select! {
                changed = pod_changes.changed() => {
                    // The daemon is shutting down.
                    if changed.is_err() {
                        return;
                    }
                }
                _ = vm_changes.changed() => {}
                () = status_changes.changed() => {}
                () = tokio::time::sleep(if is_any_unknown { STATUS_RETRY } else { RESYNC }) => {}
                () = messages.closed() => return,
            }
            // Each list asks every running VM for its status; changes of all pods of the node arrive here.
            tokio::time::sleep(MIN_LIST_INTERVAL).await;
        }
    }
}

fn missing(field: &str) -> Status {
    rejection(FailureKind::Invalid, &format!("{field} is missing"))
}

fn not_found(id: &str) -> Status {
    rejection(FailureKind::NotFound, &format!("VM {id} does not exist on this node"))
}

/// Returns whether this is a label name by Kubernetes' rules.
fn is_label(word: &str) -> bool {
    let alphanumeric = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    let ends = word.bytes().next().is_some_and(alphanumeric) && word.bytes().next_back().is_some_and(alphanumeric);
    ends && word.len() <= 63 && word.bytes().all(|b| alphanumeric(b) || b == b'-')
}

/// Checks the name of a new VM.
fn check_name(to: &vm::MachineRef) -> Result<(), Status> {
    for (field, word) in [("to.namespace", &to.namespace), ("to.name", &to.name)] {
        if !is_label(word) {
            let rule = "1 to 63 small letters, digits and '-' are expected, with a letter or digit at both ends";
            return Err(rejection(FailureKind::Invalid, &format!("{field} is {word:?}: {rule}")));
        }
    }
    Ok(())
}

#[tonic::async_trait]
impl vm::machines_server::Machines for VmService {
    async fn list(&self, request: Request<vm::ListRequest>) -> Result<Response<vm::ListResponse>, Status> {
        let machines = self.list_vms(&request.into_inner().namespace).await;
        Ok(Response::new(vm::ListResponse { machines }))
    }

    async fn describe(&self, request: Request<vm::MachineRef>) -> Result<Response<vm::Machine>, Status> {
        let vm::MachineRef { namespace, name } = request.into_inner();
        let machines = self.list_vms(&namespace).await;
        let machine = machines.into_iter().find(|machine| machine.namespace == namespace && machine.name == name);
        machine.map(Response::new).ok_or_else(|| not_found(&vms::id(&namespace, &name)))
    }

    async fn start(&self, request: Request<vm::MachineRef>) -> Result<Response<vm::Empty>, Status> {
        self.run_simple_verb(request, "start").await
    }

    async fn stop(&self, request: Request<vm::MachineRef>) -> Result<Response<vm::Empty>, Status> {
        self.run_power_off_verb(request, "stop").await
    }

    async fn restart(&self, request: Request<vm::MachineRef>) -> Result<Response<vm::Empty>, Status> {
        self.run_simple_verb(request, "restart").await
    }

    async fn power_off(&self, request: Request<vm::MachineRef>) -> Result<Response<vm::Empty>, Status> {
        self.run_power_off_verb(request, "power-off").await
    }

    async fn pause(&self, request: Request<vm::MachineRef>) -> Result<Response<vm::Empty>, Status> {
        self.run_simple_verb(request, "pause").await
    }

    async fn unpause(&self, request: Request<vm::MachineRef>) -> Result<Response<vm::Empty>, Status> {
        self.run_simple_verb(request, "unpause").await
    }

    async fn reset(&self, request: Request<vm::MachineRef>) -> Result<Response<vm::Empty>, Status> {
        self.run_simple_verb(request, "reset").await
    }

    async fn soft_reboot(&self, request: Request<vm::MachineRef>) -> Result<Response<vm::Empty>, Status> {
        self.run_simple_verb(request, "soft-reboot").await
    }

    async fn screenshot(&self, request: Request<vm::MachineRef>) -> Result<Response<vm::Picture>, Status> {
        let png = self.run_verb(request.into_inner(), &["screenshot"], VERB_TIMEOUT).await?;
        Ok(Response::new(vm::Picture { png }))
    }

    type ConsoleStream = DataStream;

    async fn console(
        &self,
        request: Request<tonic::Streaming<vm::WayRequest>>,
    ) -> Result<Response<Self::ConsoleStream>, Status> {
        self.connect(request, VmConsole::Serial).await
    }

    type ScreenStream = DataStream;

    async fn screen(
        &self,
        request: Request<tonic::Streaming<vm::WayRequest>>,
    ) -> Result<Response<Self::ScreenStream>, Status> {
        self.connect(request, VmConsole::Screen).await
    }

    type MemoryDumpStream = DataStream;

    async fn memory_dump(
        &self,
        request: Request<vm::MemoryDumpRequest>,
    ) -> Result<Response<Self::MemoryDumpStream>, Status> {
        let vm::MemoryDumpRequest { machine, format } = request.into_inner();
        let machine = machine.ok_or_else(|| missing("machine"))?;
        let container = self.find_running(&machine)?.id;
        let dump = memory_dump::start(&*self.runtime, &container, format).await?;
        Ok(Response::new(Box::pin(ReceiverStream::new(dump))))
    }

    async fn guest_info(&self, request: Request<vm::MachineRef>) -> Result<Response<vm::Json>, Status> {
        let output = self.run_verb(request.into_inner(), &["guest-info"], VERB_TIMEOUT).await?;
        Ok(Response::new(vm::Json { text: String::from_utf8_lossy(&output).into_owned() }))
    }

    async fn snapshot(&self, request: Request<vm::SnapshotRef>) -> Result<Response<vm::Empty>, Status> {
        self.run_snapshot_verb(request, "snapshot").await
    }

    async fn restore(&self, request: Request<vm::SnapshotRef>) -> Result<Response<vm::Empty>, Status> {
        self.run_snapshot_verb(request, "restore").await
    }

    async fn delete_snapshot(&self, request: Request<vm::SnapshotRef>) -> Result<Response<vm::Empty>, Status> {
        self.run_snapshot_verb(request, "delete-snapshot").await
    }

    async fn list_snapshots(&self, request: Request<vm::MachineRef>) -> Result<Response<vm::Snapshots>, Status> {
        let output = self.run_verb(request.into_inner(), &["snapshots"], VERB_TIMEOUT).await?;
        Ok(Response::new(vm::Snapshots { snapshots: parse_snapshots(&output) }))
    }

    async fn add_volume(&self, request: Request<vm::AddVolumeRequest>) -> Result<Response<vm::Empty>, Status> {
        let vm::AddVolumeRequest { machine, name, bytes } = request.into_inner();
        let machine = machine.ok_or_else(|| missing("machine"))?;
        let volume = format!("{name}={bytes}");
        nacelle_keeper::check_volume(&volume).map_err(error_status)?;
        self.run_verb(machine, &["add-volume", &volume], VERB_TIMEOUT).await.map(|_| Response::new(vm::Empty {}))
    }

    async fn remove_volume(&self, request: Request<vm::VolumeRef>) -> Result<Response<vm::Empty>, Status> {
        let vm::VolumeRef { machine, name } = request.into_inner();
        let machine = machine.ok_or_else(|| missing("machine"))?;
        if name.is_empty() {
            return Err(missing("name"));
        }
        self.run_verb(machine, &["remove-volume", &name], VERB_TIMEOUT).await.map(|_| Response::new(vm::Empty {}))
    }

    async fn list_volumes(&self, request: Request<vm::MachineRef>) -> Result<Response<vm::Volumes>, Status> {
        let output = self.run_verb(request.into_inner(), &["volumes"], VERB_TIMEOUT).await?;
        Ok(Response::new(vm::Volumes { volumes: parse_volumes(&output) }))
    }

    async fn copy(&self, request: Request<vm::CopyRequest>) -> Result<Response<vm::Machine>, Status> {
        let vm::CopyRequest { from, to } = request.into_inner();
        let (from, to) = (from.ok_or_else(|| missing("from"))?, to.ok_or_else(|| missing("to"))?);
        check_name(&to)?;
        let copied = self.copy_vm(&vms::id(&from.namespace, &from.name), &to.namespace, &to.name).await;
        Ok(Response::new(describe_record(copied.map_err(error_status)?)))
    }

    type ExportStream = transfer::ProgressStream;

    async fn export(&self, request: Request<vm::ExportRequest>) -> Result<Response<Self::ExportStream>, Status> {
        transfer::export(self, request.into_inner()).map(Response::new)
    }

    type ImportStream = transfer::ProgressStream;

    async fn import(&self, request: Request<vm::ImportRequest>) -> Result<Response<Self::ImportStream>, Status> {
        transfer::import(self, request.into_inner()).map(Response::new)
    }

    async fn delete(&self, request: Request<vm::MachineRef>) -> Result<Response<vm::Empty>, Status> {
        let vm::MachineRef { namespace, name } = request.into_inner();
        match self.delete_vm(&vms::id(&namespace, &name)).await {
            // A VM that does not exist counts as deleted.
            Err(error) if error.kind() == FailureKind::NotFound => {}
            other => other.map_err(error_status)?,
        }
        Ok(Response::new(vm::Empty {}))
    }

    type WatchStream = Pin<Box<dyn Stream<Item = Result<vm::Machine, Status>> + Send>>;

    async fn watch(&self, request: Request<vm::ListRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let (namespace, service) = (request.into_inner().namespace, self.clone());
        let (sender, messages) = mpsc::channel(16);
        tokio::spawn(async move { service.send_changes(&namespace, &sender).await });
        Ok(Response::new(Box::pin(ReceiverStream::new(messages))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::testing::FakeRuntime;
    use tokio_util::task::AbortOnDropHandle;

    #[tokio::test]
    async fn a_watch_sends_changes_of_persistent_vms_without_the_periodic_list() {
        let (runtime, _execs) = FakeRuntime::new();
        let runtime = Arc::new(runtime);
        let service = VmService::new(runtime.clone());
        let (sender, mut messages) = mpsc::channel(16);
        let _watch = AbortOnDropHandle::new(tokio::spawn(async move { service.send_changes("", &sender).await }));
        let mut next = async || {
            let limit = RESYNC / 2;
            let message = tokio::time::timeout(limit, messages.recv()).await.expect("a change causes a message");
            let machine = message.unwrap().unwrap();
            (machine.name, machine.phase)
        };
        runtime.vms().get_or_create("default", "db", None).await.unwrap();
        assert_eq!(next().await, ("db".to_owned(), "Stopped".to_owned()));
        runtime.vms().delete("default/db").await.unwrap();
        assert_eq!(next().await, ("db".to_owned(), "Deleted".to_owned()));
    }
}
