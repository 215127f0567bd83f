//! Defines the results of the commands for VMs.

use crate::cli::output::TableView;
use crate::cli::pods::short_id;
use crate::cli::table::format_table;
use crate::cli::units::{UNKNOWN, format_age, format_bytes, format_time};
use nacelle_proto::vm;
use serde::Serialize;

/// A VM, as `ls`, `describe` and `watch` print it.
#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(in crate::cli) struct VmView {
    namespace: String,
    name: String,
    phase: String,
    /// The VM is persistent.
    outlives_pods: bool,
    /// Empty: the pod's restartPolicy applies.
    run_strategy: String,
    /// The pod that runs the VM; all fields are empty if there is none.
    pod: VmPodView,
    addresses: Vec<String>,
    uuid: String,
    machine_id: String,
    mac: String,
    vcpus: u32,
    memory_bytes: u64,
    agent_connected: bool,
    software_emulation: bool,
    created_at: Option<String>,
    #[serde(skip)]
    created_nanos: i64,
}

#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct VmPodView {
    id: String,
    name: String,
    container: String,
}

impl From<vm::Machine> for VmView {
    fn from(machine: vm::Machine) -> VmView {
        VmView {
            namespace: machine.namespace,
            name: machine.name,
            phase: machine.phase,
            outlives_pods: machine.outlives_pods,
            run_strategy: machine.run_strategy,
            pod: VmPodView { id: machine.pod_id, name: machine.pod_name, container: machine.container_id },
            addresses: machine.addresses,
            uuid: machine.uuid,
            machine_id: machine.machine_id,
            mac: machine.mac,
            vcpus: machine.vcpus,
            memory_bytes: machine.memory_mib.saturating_mul(1 << 20),
            agent_connected: machine.agent_connected,
            software_emulation: machine.software_emulation,
            created_at: format_time(machine.created_at),
            created_nanos: machine.created_at,
        }
    }
}

fn or_unknown(text: &str) -> String {
    if text.is_empty() { UNKNOWN.to_owned() } else { text.to_owned() }
}

impl VmView {
    fn vcpus(&self) -> String {
        if self.vcpus == 0 { UNKNOWN.to_owned() } else { self.vcpus.to_string() }
    }

    fn memory(&self) -> String {
        if self.memory_bytes == 0 { UNKNOWN.to_owned() } else { format_bytes(self.memory_bytes) }
    }
}

impl TableView for Vec<VmView> {
    fn table(&self) -> String {
        let mut rows = vec![
            ["NAMESPACE", "NAME", "PHASE", "STRATEGY", "POD", "ADDRESS", "CPUS", "MEMORY", "AGE"].map(str::to_owned),
        ];
        rows.extend(self.iter().map(|vm| {
            [
                vm.namespace.clone(),
                vm.name.clone(),
                vm.phase.clone(),
                or_unknown(&vm.run_strategy),
                or_unknown(short_id(&vm.pod.id)),
                or_unknown(vm.addresses.first().map_or("", String::as_str)),
                vm.vcpus(),
                vm.memory(),
                format_age(vm.created_nanos),
            ]
        }));
        format_table(&rows)
    }
}

impl TableView for VmView {
    fn table(&self) -> String {
        let yes = |is: bool| if is { "yes" } else { "no" }.to_owned();
        let rows = [
            ("Namespace:", self.namespace.clone()),
            ("Name:", self.name.clone()),
            ("Phase:", self.phase.clone()),
            ("Persistent:", yes(self.outlives_pods)),
            ("Run strategy:", or_unknown(&self.run_strategy)),
            ("Pod:", or_unknown(&self.pod.name)),
            ("Pod ID:", or_unknown(&self.pod.id)),
            ("Container ID:", or_unknown(&self.pod.container)),
            ("Addresses:", or_unknown(&self.addresses.join(" "))),
            ("UUID:", or_unknown(&self.uuid)),
            ("Machine ID:", or_unknown(&self.machine_id)),
            ("MAC:", or_unknown(&self.mac)),
            ("vCPUs:", self.vcpus()),
            ("Memory:", self.memory()),
            ("Guest agent:", if self.agent_connected { "connected" } else { "not connected" }.to_owned()),
            ("Emulated:", yes(self.software_emulation)),
            ("Created:", self.created_at.clone().unwrap_or_else(|| UNKNOWN.to_owned())),
        ];
        format_table(&rows.map(|(name, value)| [name.to_owned(), value]))
    }
}

/// A snapshot of a VM.
#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(in crate::cli) struct SnapshotView {
    name: String,
    taken_at: Option<String>,
    /// The size of memory and devices.
    size_bytes: u64,
}

impl From<vm::SnapshotInfo> for SnapshotView {
    fn from(snapshot: vm::SnapshotInfo) -> SnapshotView {
        SnapshotView { name: snapshot.name, taken_at: format_time(snapshot.taken_at), size_bytes: snapshot.bytes }
    }
}

impl TableView for Vec<SnapshotView> {
    fn table(&self) -> String {
        let mut rows = vec![["NAME", "TAKEN", "SIZE"].map(str::to_owned)];
        rows.extend(self.iter().map(|snapshot| {
            let taken = snapshot.taken_at.clone().unwrap_or_else(|| UNKNOWN.to_owned());
            [snapshot.name.clone(), taken, format_bytes(snapshot.size_bytes)]
        }));
        format_table(&rows)
    }
}

/// A disk that was added to a VM.
#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(in crate::cli) struct VolumeView {
    name: String,
    size_bytes: u64,
}

impl From<vm::Volume> for VolumeView {
    fn from(volume: vm::Volume) -> VolumeView {
        VolumeView { name: volume.name, size_bytes: volume.bytes }
    }
}

impl TableView for Vec<VolumeView> {
    fn table(&self) -> String {
        let mut rows = vec![["NAME", "SIZE"].map(str::to_owned)];
        rows.extend(self.iter().map(|volume| [volume.name.clone(), format_bytes(volume.size_bytes)]));
        format_table(&rows)
    }
}

/// The result of an export.
#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(in crate::cli) struct ExportView {
    pub(super) reference: String,
    pub(super) digest: String,
    pub(super) snapshots: Vec<String>,
}

impl TableView for ExportView {
    fn table(&self) -> String {
        format!("{} {}\n{}", self.reference, self.digest, snapshot_line(&self.snapshots))
    }
}

/// The result of an import.
#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(in crate::cli) struct ImportView {
    pub(super) namespace: String,
    pub(super) name: String,
    pub(super) uuid: String,
    pub(super) mac: String,
    pub(super) snapshots: Vec<String>,
}

impl TableView for ImportView {
    fn table(&self) -> String {
        let ImportView { namespace, name, uuid, mac, snapshots } = self;
        format!("{namespace}/{name} {uuid} {mac}\n{}", snapshot_line(snapshots))
    }
}

fn snapshot_line(snapshots: &[String]) -> String {
    if snapshots.is_empty() { String::new() } else { format!("snapshots: {}\n", snapshots.join(" ")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vm_is_a_row_and_an_object() {
        let machine = vm::Machine {
            namespace: "default".into(),
            name: "db".into(),
            phase: "Running".into(),
            memory_mib: 512,
            ..vm::Machine::default()
        };
        let list = vec![VmView::from(machine)];
        let table = list.table();
        let lines: Vec<_> = table.lines().collect();
        assert_eq!(lines[0].split_whitespace().count(), 9);
        assert_eq!(
            lines[1].split_whitespace().collect::<Vec<_>>(),
            ["default", "db", "Running", "-", "-", "-", "-", "512.0", "MiB", "-"]
        );
        let json = serde_json::to_value(&list).unwrap();
        assert_eq!((&json[0]["memoryBytes"], &json[0]["createdAt"]), (&(512 << 20).into(), &serde_json::Value::Null));
        assert!(list[0].table().contains("\nPhase:         Running\n"), "{}", list[0].table());
    }
}
