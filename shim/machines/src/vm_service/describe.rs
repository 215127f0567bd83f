//! Describes VMs to clients: from the records of their pods, and from what their keepers report, which is untrusted. Pure.

use crate::runtime::MachinePodView;
use nacelle_base::json;
use nacelle_model::machine::RunStrategy;
use nacelle_model::record::VmRecord;
use nacelle_model::state::PodState;
use nacelle_proto::vm;
use serde_json::Value;

/// The phase of a VM that does not respond.
pub(super) const UNKNOWN_PHASE: &str = "Unknown";

/// Returns what is known of a pod's VM without a request to its keeper. `find_record` returns the record of a persistent VM.
pub(super) fn describe_pod(
    view: &MachinePodView,
    find_record: impl Fn(&str) -> Option<VmRecord>,
) -> Option<vm::Machine> {
    let config = &view.pod.config;
    let (namespace, name) = view.vm_name()?;
    let machine = config.kind.machine()?;
    let mac = machine.cards.first().and_then(|card| card.mac);
    let holds = view.pod.state != PodState::Stopped;
    let machine_id = config.kind.persistent_vm().and_then(find_record).and_then(|record| record.machine_id);
    let last = view.containers.values().max_by_key(|container| container.created_at);
    Some(vm::Machine {
        namespace: namespace.to_owned(),
        name: name.to_owned(),
        phase: if last.is_some_and(|last| last.finished_at > 0) { "Succeeded" } else { "Pending" }.to_owned(),
        outlives_pods: config.kind.persistent_vm().is_some(),
        pod_id: if holds { view.pod.id.to_string() } else { String::new() },
        pod_name: config.name.name.clone(),
        container_id: view.running_container().map(|container| container.id.to_string()).unwrap_or_default(),
        addresses: view.pod.ips.iter().map(ToString::to_string).collect(),
        uuid: machine.identity.uuid.clone(),
        mac: mac.map(format_mac).unwrap_or_default(),
        vcpus: machine.processors.count(),
        memory_mib: machine.memory_mib,
        run_strategy: machine.strategy.map(strategy_word).unwrap_or_default().to_owned(),
        agent_connected: false,
        software_emulation: false,
        created_at: view.pod.created_at,
        machine_id: machine_id.unwrap_or_default(),
    })
}

/// Returns what is known of a persistent VM without a pod.
pub(super) fn describe_record(record: VmRecord) -> vm::Machine {
    let (namespace, name) = record.id.split_once('/').unwrap_or_default();
    vm::Machine {
        namespace: namespace.to_owned(),
        name: name.to_owned(),
        phase: "Stopped".to_owned(),
        outlives_pods: true,
        mac: format_mac(record.mac),
        created_at: record.created_at,
        uuid: record.uuid,
        machine_id: record.machine_id.unwrap_or_default(),
        ..vm::Machine::default()
    }
}

fn format_mac(mac: [u8; 6]) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

fn strategy_word(strategy: RunStrategy) -> &'static str {
    match strategy {
        RunStrategy::Always => "Always",
        RunStrategy::RerunOnFailure => "RerunOnFailure",
        RunStrategy::Once => "Once",
        RunStrategy::Manual => "Manual",
        RunStrategy::Halted => "Halted",
    }
}

/// Adds the keeper's status of a VM; `None` means that it did not respond. The keeper is a process of the pod and untrusted: its
/// texts are truncated.
pub(super) fn add_status(machine: &mut vm::Machine, status: Option<&[u8]>) {
    let status: Value = status.and_then(|text| json::read(text).ok()).unwrap_or_default();
    let is_set = |key: &str| status.get(key).and_then(Value::as_bool).unwrap_or_default();
    let phase = status.get("phase").and_then(Value::as_str).unwrap_or(UNKNOWN_PHASE);
    machine.phase = phase.chars().filter(|c| c.is_ascii_alphanumeric()).take(32).collect();
    machine.agent_connected = is_set("agentConnected");
    machine.software_emulation = is_set("softwareEmulation");
}

/// Parses a keeper's list of snapshots; invalid entries are left out.
pub(super) fn parse_snapshots(output: &[u8]) -> Vec<vm::SnapshotInfo> {
    let list: Value = json::read(output).unwrap_or_default();
    let parse_entry = |entry: &Value| {
        Some(vm::SnapshotInfo {
            name: entry.get("name")?.as_str()?.chars().filter(|c| !c.is_control()).take(64).collect(),
            taken_at: entry.get("taken")?.as_i64()?.saturating_mul(1_000_000_000),
            bytes: entry.get("bytes")?.as_u64()?,
        })
    };
    list.as_array().into_iter().flatten().take(1000).filter_map(parse_entry).collect()
}

/// Parses a keeper's list of disks; invalid entries are left out.
pub(super) fn parse_volumes(output: &[u8]) -> Vec<vm::Volume> {
    let list: Value = json::read(output).unwrap_or_default();
    let parse_entry = |entry: &Value| {
        Some(vm::Volume {
            name: entry.get("name")?.as_str()?.chars().filter(|c| !c.is_control()).take(64).collect(),
            bytes: entry.get("bytes")?.as_u64()?,
        })
    };
    list.as_array().into_iter().flatten().take(100).filter_map(parse_entry).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_status_of_a_keeper_is_truncated() {
        let mut machine = vm::Machine::default();
        add_status(&mut machine, Some(br#"{"phase": "Running", "agentConnected": true, "softwareEmulation": true}"#));
        assert_eq!(
            (machine.phase.as_str(), machine.agent_connected, machine.software_emulation),
            ("Running", true, true)
        );
        for status in [None, Some(&b"rubbish"[..]), Some(b"[]")] {
            add_status(&mut machine, status);
            assert_eq!((machine.phase.as_str(), machine.agent_connected), (UNKNOWN_PHASE, false));
        }
        let long = format!(r#"{{"phase": "{}\u0007"}}"#, "x".repeat(1000));
        add_status(&mut machine, Some(long.as_bytes()));
        assert_eq!(machine.phase.len(), 32);
    }
}
