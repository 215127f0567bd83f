//! Implements the service of the `nacelle vm` commands (proto/vm/v1): lists machines and runs their verbs. The keeper implements
//! the verbs; the daemon runs them like `exec -- @vm VERB`.

mod dump;
mod transfer;
mod ways;

use crate::cri::status::{refuse, status};
use crate::lifecycle::{Node, View};
use crate::streaming::Guests;
use nacelle_base::Kind;
use nacelle_base::json;
use nacelle_machines::vms;
use nacelle_model::machine::RunStrategy;
use nacelle_model::pod::PodConfig;
use nacelle_model::record::{ContainerRecord, VmRecord};
use nacelle_proto::vm;
use serde_json::Value;
use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};
use ways::Way;

/// Time limit of a verb without lasting work.
const VERB: Duration = Duration::from_secs(60);
/// Time from the end of a pod process until the end of its containers is known.
const ENDS: Duration = Duration::from_secs(10);
/// Time limit for writing all memory of a machine to a disk.
const SNAPSHOT: Duration = Duration::from_secs(1800);
/// Time limit for a machine's status, where many machines are asked.
const LOOK: Duration = Duration::from_secs(5);
/// Pause between two checks of a watch.
const WATCH: Duration = Duration::from_secs(1);
/// The phase of a machine that does not respond.
const UNKNOWN: &str = "Unknown";

/// A stream of data to the client.
type Pieces = Pin<Box<dyn Stream<Item = Result<vm::Piece, Status>> + Send>>;

/// The service on one node.
#[derive(Clone)]
pub(crate) struct VmService {
    node: Node,
}

impl VmService {
    pub(crate) fn new(node: Node) -> VmService {
        VmService { node }
    }

    /// Returns the pod that holds a machine, and the machine's container if it runs.
    fn find(&self, machine: &vm::MachineRef) -> Result<(Arc<View>, Option<ContainerRecord>), Status> {
        let id = vms::id(&machine.namespace, &machine.name);
        let wanted = Some((machine.namespace.as_str(), machine.name.as_str()));
        let named = |view: &Arc<View>| named(&view.pod.config) == wanted;
        let view = self.node.holder(&id).or_else(|| self.node.views().into_iter().find(named));
        match view {
            Some(view) => {
                let container = running(&view).cloned();
                Ok((view, container))
            }
            None if self.node.parts().vms.find(&id).is_some() => {
                Err(refuse(Kind::Conflict, &format!("machine {id} has no pod: run one with vm.nacelle.dev/name")))
            }
            None => Err(refuse(Kind::NotFound, &format!("machine {id} does not exist on this node"))),
        }
    }

    /// Returns the machine's running container.
    fn find_running(&self, machine: &vm::MachineRef) -> Result<ContainerRecord, Status> {
        let id = vms::id(&machine.namespace, &machine.name);
        self.find(machine)?.1.ok_or_else(|| refuse(Kind::Conflict, &format!("machine {id} does not run")))
    }

    async fn verb(&self, machine: vm::MachineRef, words: &[&str], limit: Duration) -> Result<Vec<u8>, Status> {
        self.ask(&self.find_running(&machine)?, words, limit).await
    }

    async fn ask(&self, container: &ContainerRecord, words: &[&str], limit: Duration) -> Result<Vec<u8>, Status> {
        let words = ["@vm"].iter().chain(words).map(|word| (*word).to_owned()).collect();
        let done = self.node.exec(container.id.as_str(), words, Some(limit)).await.map_err(status)?;
        if done.exit_code == 0 {
            return Ok(done.stdout);
        }
        let words = String::from_utf8_lossy(&done.stderr).trim().chars().take(500).collect::<String>();
        Err(refuse(Kind::Conflict, &words))
    }

    async fn done(&self, request: Request<vm::MachineRef>, verb: &'static str) -> Result<Response<vm::Empty>, Status> {
        self.verb(request.into_inner(), &[verb], VERB).await.map(|_| Response::new(vm::Empty {}))
    }

    /// Runs a verb that powers the machine off. If its pod process ends before the response, the machine has stopped too.
    async fn off(&self, request: Request<vm::MachineRef>, verb: &'static str) -> Result<Response<vm::Empty>, Status> {
        let container = self.find_running(&request.into_inner())?;
        match self.ask(&container, &[verb], VERB).await {
            Err(error)
                if error.code() == tonic::Code::Unavailable && self.node.ends(container.id.as_str(), ENDS).await => {}
            other => drop(other?),
        }
        Ok(Response::new(vm::Empty {}))
    }

    async fn snapshot(
        &self,
        request: Request<vm::SnapshotRef>,
        verb: &'static str,
    ) -> Result<Response<vm::Empty>, Status> {
        let vm::SnapshotRef { machine, name } = request.into_inner();
        let machine = machine.ok_or_else(|| refuse(Kind::Invalid, "machine is missing"))?;
        if name.is_empty() {
            return Err(refuse(Kind::Invalid, "name is missing"));
        }
        self.verb(machine, &[verb, &name], SNAPSHOT).await.map(|_| Response::new(vm::Empty {}))
    }

    async fn way(
        &self,
        request: Request<tonic::Streaming<vm::WayRequest>>,
        way: Way,
    ) -> Result<Response<Pieces>, Status> {
        let mut asked = request.into_inner();
        let (machine, said) = ways::first(&mut asked).await?;
        let container = self.find_running(&machine)?;
        let ids = (container.pod.as_str(), container.id.as_str());
        let told = ways::open(&Guests::new(self.node.clone()), ids, way, said, asked).await?;
        Ok(Response::new(Box::pin(ReceiverStream::new(told))))
    }

    /// Lists the machines of a namespace (empty: all namespaces).
    async fn list(&self, namespace: &str) -> Vec<vm::Machine> {
        let mut asked = JoinSet::new();
        let mut machines = Vec::new();
        for view in self.node.views() {
            let Some(mut machine) = of_pod(&view) else { continue };
            if !namespace.is_empty() && machine.namespace != namespace {
                continue;
            }
            // For a persistent VM the pod that holds it counts.
            if machine.outlives_pods && machine.pod_id.is_empty() {
                continue;
            }
            match running(&view).cloned() {
                Some(container) => {
                    let service = self.clone();
                    asked.spawn(async move {
                        let told = service.ask(&container, &["status"], LOOK).await.ok();
                        look(&mut machine, told.as_deref());
                        machine
                    });
                }
                None => machines.push(machine),
            }
        }
        while let Some(Ok(machine)) = asked.join_next().await {
            machines.push(machine);
        }
        let records = self.node.parts().vms.list().into_iter().map(of_record);
        for machine in records.filter(|machine| namespace.is_empty() || machine.namespace == namespace) {
            let same = |other: &vm::Machine| other.namespace == machine.namespace && other.name == machine.name;
            if !machines.iter().any(|other| other.outlives_pods && same(other)) {
                machines.push(machine);
            }
        }
        machines.sort_by(|a, b| (&a.namespace, &a.name).cmp(&(&b.namespace, &b.name)));
        machines
    }
}

/// Returns namespace and name of a pod's machine.
fn named(pod: &PodConfig) -> Option<(&str, &str)> {
    pod.machine.as_ref()?;
    match &pod.vm {
        Some(id) => id.split_once('/'),
        None => Some((&pod.name.namespace, &pod.name.name)),
    }
}

/// Returns the machine's container, if it runs.
fn running(view: &View) -> Option<&ContainerRecord> {
    view.containers.values().find(|container| container.state == nacelle_model::state::ContainerState::Running)
}

/// Returns what is known of a pod's machine without a request to it.
fn of_pod(view: &View) -> Option<vm::Machine> {
    let config = &view.pod.config;
    let (namespace, name) = named(config)?;
    let machine = config.machine.as_ref()?;
    let mac = machine.cards.first().and_then(|card| card.mac);
    let holds = view.pod.state != nacelle_model::state::PodState::Stopped;
    let last = view.containers.values().max_by_key(|container| container.created_at);
    Some(vm::Machine {
        namespace: namespace.to_owned(),
        name: name.to_owned(),
        phase: if last.is_some_and(|last| last.finished_at > 0) { "Succeeded" } else { "Pending" }.to_owned(),
        outlives_pods: config.vm.is_some(),
        pod_id: if holds { view.pod.id.to_string() } else { String::new() },
        pod_name: config.name.name.clone(),
        container_id: running(view).map(|container| container.id.to_string()).unwrap_or_default(),
        addresses: view.pod.ips.iter().map(ToString::to_string).collect(),
        uuid: machine.identity.uuid.clone(),
        mac: mac.map(hex).unwrap_or_default(),
        vcpus: machine.processors.count(),
        memory_mib: machine.memory_mib,
        run_strategy: machine.strategy.map(word).unwrap_or_default().to_owned(),
        agent_connected: false,
        software_emulation: false,
        created_at: view.pod.created_at,
    })
}

fn of_record(record: VmRecord) -> vm::Machine {
    let (namespace, name) = record.id.split_once('/').unwrap_or_default();
    vm::Machine {
        namespace: namespace.to_owned(),
        name: name.to_owned(),
        phase: "Stopped".to_owned(),
        outlives_pods: true,
        mac: hex(record.mac),
        created_at: record.created_at,
        uuid: record.uuid,
        ..vm::Machine::default()
    }
}

fn hex(mac: [u8; 6]) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

fn word(strategy: RunStrategy) -> &'static str {
    match strategy {
        RunStrategy::Always => "Always",
        RunStrategy::RerunOnFailure => "RerunOnFailure",
        RunStrategy::Once => "Once",
        RunStrategy::Manual => "Manual",
        RunStrategy::Halted => "Halted",
    }
}

/// Adds a machine's own status; `None` means that it did not respond. The keeper is a process of the pod and untrusted: its texts
/// are truncated.
fn look(machine: &mut vm::Machine, told: Option<&[u8]>) {
    let told: Value = told.and_then(|text| json::read(text).ok()).unwrap_or_default();
    let yes = |key: &str| told.get(key).and_then(Value::as_bool).unwrap_or_default();
    let phase = told.get("phase").and_then(Value::as_str).unwrap_or(UNKNOWN);
    machine.phase = phase.chars().filter(|c| c.is_ascii_alphanumeric()).take(32).collect();
    machine.agent_connected = yes("agentConnected");
    machine.software_emulation = yes("softwareEmulation");
}

/// Returns whether this is a name by Kubernetes' rules.
fn is_label(word: &str) -> bool {
    let alphanumeric = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    let ends = word.bytes().next().is_some_and(alphanumeric) && word.bytes().next_back().is_some_and(alphanumeric);
    ends && word.len() <= 63 && word.bytes().all(|b| alphanumeric(b) || b == b'-')
}

/// Checks a machine's name.
fn check_name(to: &vm::MachineRef) -> Result<(), Status> {
    for (field, word) in [("to.namespace", &to.namespace), ("to.name", &to.name)] {
        if !is_label(word) {
            let rule = "1 to 63 small letters, digits and '-' are expected, with a letter or digit at both ends";
            return Err(refuse(Kind::Invalid, &format!("{field} is {word:?}: {rule}")));
        }
    }
    Ok(())
}

/// Parses a keeper's list of snapshots; invalid entries are left out.
fn snapshots(told: &[u8]) -> Vec<vm::SnapshotInfo> {
    let told: Value = json::read(told).unwrap_or_default();
    let one = |entry: &Value| {
        Some(vm::SnapshotInfo {
            name: entry.get("name")?.as_str()?.chars().filter(|c| !c.is_control()).take(64).collect(),
            taken_at: entry.get("taken")?.as_i64()?.saturating_mul(1_000_000_000),
            bytes: entry.get("bytes")?.as_u64()?,
        })
    };
    told.as_array().into_iter().flatten().take(1000).filter_map(one).collect()
}

/// Parses a keeper's list of disks; invalid entries are left out.
fn volumes(told: &[u8]) -> Vec<vm::Volume> {
    let told: Value = json::read(told).unwrap_or_default();
    let one = |entry: &Value| {
        Some(vm::Volume {
            name: entry.get("name")?.as_str()?.chars().filter(|c| !c.is_control()).take(64).collect(),
            bytes: entry.get("bytes")?.as_u64()?,
        })
    };
    told.as_array().into_iter().flatten().take(100).filter_map(one).collect()
}

#[tonic::async_trait]
impl vm::machines_server::Machines for VmService {
    async fn list(&self, request: Request<vm::ListRequest>) -> Result<Response<vm::ListResponse>, Status> {
        let machines = self.list(&request.into_inner().namespace).await;
        Ok(Response::new(vm::ListResponse { machines }))
    }

    async fn describe(&self, request: Request<vm::MachineRef>) -> Result<Response<vm::Machine>, Status> {
        let vm::MachineRef { namespace, name } = request.into_inner();
        let machines = self.list(&namespace).await;
        let machine = machines.into_iter().find(|machine| machine.namespace == namespace && machine.name == name);
        let id = vms::id(&namespace, &name);
        let gone = || refuse(Kind::NotFound, &format!("machine {id} does not exist on this node"));
        machine.map(Response::new).ok_or_else(gone)
    }

    async fn start(&self, request: Request<vm::MachineRef>) -> Result<Response<vm::Empty>, Status> {
        self.done(request, "start").await
    }

    async fn stop(&self, request: Request<vm::MachineRef>) -> Result<Response<vm::Empty>, Status> {
        self.off(request, "stop").await
    }

    async fn restart(&self, request: Request<vm::MachineRef>) -> Result<Response<vm::Empty>, Status> {
        self.done(request, "restart").await
    }

    async fn power_off(&self, request: Request<vm::MachineRef>) -> Result<Response<vm::Empty>, Status> {
        self.off(request, "power-off").await
    }

    async fn pause(&self, request: Request<vm::MachineRef>) -> Result<Response<vm::Empty>, Status> {
        self.done(request, "pause").await
    }

    async fn unpause(&self, request: Request<vm::MachineRef>) -> Result<Response<vm::Empty>, Status> {
        self.done(request, "unpause").await
    }

    async fn reset(&self, request: Request<vm::MachineRef>) -> Result<Response<vm::Empty>, Status> {
        self.done(request, "reset").await
    }

    async fn soft_reboot(&self, request: Request<vm::MachineRef>) -> Result<Response<vm::Empty>, Status> {
        self.done(request, "soft-reboot").await
    }

    async fn screenshot(&self, request: Request<vm::MachineRef>) -> Result<Response<vm::Picture>, Status> {
        let png = self.verb(request.into_inner(), &["screenshot"], VERB).await?;
        Ok(Response::new(vm::Picture { png }))
    }

    type ConsoleStream = Pieces;

    async fn console(
        &self,
        request: Request<tonic::Streaming<vm::WayRequest>>,
    ) -> Result<Response<Self::ConsoleStream>, Status> {
        self.way(request, Way::Console).await
    }

    type ScreenStream = Pieces;

    async fn screen(
        &self,
        request: Request<tonic::Streaming<vm::WayRequest>>,
    ) -> Result<Response<Self::ScreenStream>, Status> {
        self.way(request, Way::Screen).await
    }

    type MemoryDumpStream = Pieces;

    async fn memory_dump(
        &self,
        request: Request<vm::MemoryDumpRequest>,
    ) -> Result<Response<Self::MemoryDumpStream>, Status> {
        let vm::MemoryDumpRequest { machine, format } = request.into_inner();
        let machine = machine.ok_or_else(|| refuse(Kind::Invalid, "machine is missing"))?;
        let container = self.find_running(&machine)?.id.to_string();
        let pieces = dump::begin(&self.node, container, format).await?;
        Ok(Response::new(Box::pin(ReceiverStream::new(pieces))))
    }

    async fn guest_info(&self, request: Request<vm::MachineRef>) -> Result<Response<vm::Json>, Status> {
        let told = self.verb(request.into_inner(), &["guest-info"], VERB).await?;
        Ok(Response::new(vm::Json { text: String::from_utf8_lossy(&told).into_owned() }))
    }

    async fn snapshot(&self, request: Request<vm::SnapshotRef>) -> Result<Response<vm::Empty>, Status> {
        self.snapshot(request, "snapshot").await
    }

    async fn restore(&self, request: Request<vm::SnapshotRef>) -> Result<Response<vm::Empty>, Status> {
        self.snapshot(request, "restore").await
    }

    async fn delete_snapshot(&self, request: Request<vm::SnapshotRef>) -> Result<Response<vm::Empty>, Status> {
        self.snapshot(request, "delete-snapshot").await
    }

    async fn list_snapshots(&self, request: Request<vm::MachineRef>) -> Result<Response<vm::Snapshots>, Status> {
        let told = self.verb(request.into_inner(), &["snapshots"], VERB).await?;
        Ok(Response::new(vm::Snapshots { snapshots: snapshots(&told) }))
    }

    async fn add_volume(&self, request: Request<vm::AddVolumeRequest>) -> Result<Response<vm::Empty>, Status> {
        let vm::AddVolumeRequest { machine, name, bytes } = request.into_inner();
        let machine = machine.ok_or_else(|| refuse(Kind::Invalid, "machine is missing"))?;
        let volume = format!("{name}={bytes}");
        nacelle_keeper::check_volume(&volume).map_err(status)?;
        self.verb(machine, &["add-volume", &volume], VERB).await.map(|_| Response::new(vm::Empty {}))
    }

    async fn remove_volume(&self, request: Request<vm::VolumeRef>) -> Result<Response<vm::Empty>, Status> {
        let vm::VolumeRef { machine, name } = request.into_inner();
        let machine = machine.ok_or_else(|| refuse(Kind::Invalid, "machine is missing"))?;
        if name.is_empty() {
            return Err(refuse(Kind::Invalid, "name is missing"));
        }
        self.verb(machine, &["remove-volume", &name], VERB).await.map(|_| Response::new(vm::Empty {}))
    }

    async fn list_volumes(&self, request: Request<vm::MachineRef>) -> Result<Response<vm::Volumes>, Status> {
        let told = self.verb(request.into_inner(), &["volumes"], VERB).await?;
        Ok(Response::new(vm::Volumes { volumes: volumes(&told) }))
    }

    async fn copy(&self, request: Request<vm::CopyRequest>) -> Result<Response<vm::Machine>, Status> {
        let vm::CopyRequest { from, to } = request.into_inner();
        let missing = |field: &str| refuse(Kind::Invalid, &format!("{field} is missing"));
        let (from, to) = (from.ok_or_else(|| missing("from"))?, to.ok_or_else(|| missing("to"))?);
        check_name(&to)?;
        let copied = self.node.copy_vm(&vms::id(&from.namespace, &from.name), &to.namespace, &to.name).await;
        Ok(Response::new(of_record(copied.map_err(status)?)))
    }

    type ExportStream = transfer::Told;

    async fn export(&self, request: Request<vm::ExportRequest>) -> Result<Response<Self::ExportStream>, Status> {
        transfer::export(self, request.into_inner()).map(Response::new)
    }

    type ImportStream = transfer::Told;

    async fn import(&self, request: Request<vm::ImportRequest>) -> Result<Response<Self::ImportStream>, Status> {
        transfer::import(&self.node, request.into_inner()).map(Response::new)
    }

    async fn delete(&self, request: Request<vm::MachineRef>) -> Result<Response<vm::Empty>, Status> {
        let vm::MachineRef { namespace, name } = request.into_inner();
        match self.node.forget_vm(&vms::id(&namespace, &name)).await {
            // A machine that does not exist counts as deleted.
            Err(error) if nacelle_base::Classify::kind(&error) == Kind::NotFound => {}
            other => other.map_err(status)?,
        }
        Ok(Response::new(vm::Empty {}))
    }

    type WatchStream = Pin<Box<dyn Stream<Item = Result<vm::Machine, Status>> + Send>>;

    async fn watch(&self, request: Request<vm::ListRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let (namespace, service) = (request.into_inner().namespace, self.clone());
        let (tell, told) = mpsc::channel(16);
        tokio::spawn(async move {
            let mut known: BTreeMap<(String, String), vm::Machine> = BTreeMap::new();
            while service.node.parts().events.is_open() {
                let key = |machine: &vm::Machine| (machine.namespace.clone(), machine.name.clone());
                let listed = service.list(&namespace).await;
                let now: BTreeMap<_, _> = listed.into_iter().map(|machine| (key(&machine), machine)).collect();
                let other = now.iter().filter(|(key, machine)| known.get(*key) != Some(*machine));
                let gone = known.iter().filter(|(key, _)| !now.contains_key(*key));
                let deleted = |machine: &vm::Machine| vm::Machine { phase: "Deleted".to_owned(), ..machine.clone() };
                let news: Vec<_> = other
                    .map(|(_, machine)| machine.clone())
                    .chain(gone.map(|(_, machine)| deleted(machine)))
                    .collect();
                for machine in news {
                    if tell.send(Ok(machine)).await.is_err() {
                        return;
                    }
                }
                known = now;
                tokio::select! {
                    () = tokio::time::sleep(WATCH) => {}
                    () = tell.closed() => return,
                }
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(told))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_machine_says_is_cut() {
        let mut machine = vm::Machine::default();
        look(&mut machine, Some(br#"{"phase": "Running", "agentConnected": true, "softwareEmulation": true}"#));
        assert_eq!(
            (machine.phase.as_str(), machine.agent_connected, machine.software_emulation),
            ("Running", true, true)
        );
        for told in [None, Some(&b"rubbish"[..]), Some(b"[]")] {
            look(&mut machine, told);
            assert_eq!((machine.phase.as_str(), machine.agent_connected), (UNKNOWN, false));
        }
        let long = format!(r#"{{"phase": "{}\u0007"}}"#, "x".repeat(1000));
        look(&mut machine, Some(long.as_bytes()));
        assert_eq!(machine.phase.len(), 32);
    }
}
