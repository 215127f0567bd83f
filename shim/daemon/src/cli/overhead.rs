//! Implements `nacelle check --overhead`: measures the overhead of a VM of each handler, with a pod without
//! containers, and prints it as the manifest of a RuntimeClass.

use super::{connect_to_daemon, status_error};
use crate::config::{Config, EngineSetting, Handler};
use crate::hugepages;
use anyhow::Context;
use nacelle_base::machine::MemoryPages;
use nacelle_proto::cri;
use nacelle_proto::cri::runtime_service_client::RuntimeServiceClient;
use serde_json::Value;
use std::process::ExitCode;
use std::time::{Duration, Instant};
use tonic::transport::Channel;

/// The time after which a VM counts as idle, and the time for which it is then measured.
const IDLE: Duration = Duration::from_secs(10);
/// Overheads are multiples of this many MiB.
const STEP_MIB: u64 = 8;
/// The namespace of the measured pods.
const NAMESPACE: &str = "nacelle-check";

type Client = RuntimeServiceClient<Channel>;

/// The measurements of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Overhead {
    /// Bytes on the node in addition to the guest's memory.
    own_bytes: u64,
    /// Bytes of the guest's memory that its kernel and agent use.
    system_bytes: u64,
    /// Idle CPU use in thousandths of a CPU.
    cpu_milli: u64,
}

pub(super) fn run(config: &Config) -> anyhow::Result<ExitCode> {
    super::runtime()?.block_on(async {
        let channel = connect_to_daemon(&config.paths.socket).await?;
        let mut client = RuntimeServiceClient::new(channel);
        for (name, handler) in &config.handlers {
            if handler.engine == EngineSetting::Host {
                println!("# {name}: engine host has no VM and no overhead");
                continue;
            }
            let overhead = measure_handler(&mut client, name).await.with_context(|| format!("handler {name}"))?;
            print!("{}", manifest(name, handler, overhead));
        }
        Ok(ExitCode::SUCCESS)
    })
}

/// Runs a pod without containers, measures it, and removes it in any case.
async fn measure_handler(client: &mut Client, handler: &str) -> anyhow::Result<Overhead> {
    let metadata = cri::PodSandboxMetadata {
        name: format!("overhead-{handler}"),
        uid: format!("{}-{:?}", std::process::id(), Instant::now()),
        namespace: NAMESPACE.to_owned(),
        attempt: 0,
    };
    let config =
        cri::PodSandboxConfig { metadata: Some(metadata), linux: Some(Default::default()), ..Default::default() };
    let request = cri::RunPodSandboxRequest { config: Some(config), runtime_handler: handler.to_owned() };
    let id = client.run_pod_sandbox(request).await.map_err(status_error)?.into_inner().pod_sandbox_id;
    let overhead = tokio::select! {
        overhead = measure_pod(client.clone(), &id) => overhead,
        _ = tokio::signal::ctrl_c() => Err(anyhow::anyhow!("interrupted")),
    };
    let pod_sandbox_id = id.clone();
    client.stop_pod_sandbox(cri::StopPodSandboxRequest { pod_sandbox_id }).await.map_err(status_error)?;
    client.remove_pod_sandbox(cri::RemovePodSandboxRequest { pod_sandbox_id: id }).await.map_err(status_error)?;
    overhead
}

async fn measure_pod(mut client: Client, id: &str) -> anyhow::Result<Overhead> {
    tokio::time::sleep(IDLE).await;
    let (before, start) = (read_accounts(&mut client, id).await?, Instant::now());
    tokio::time::sleep(IDLE).await;
    let after = read_accounts(&mut client, id).await?;
    compute(&before, &after, start.elapsed())
        .with_context(|| format!("cannot measure the overhead: the pod reports no accounts of its VM: {after}"))
}

async fn read_accounts(client: &mut Client, id: &str) -> anyhow::Result<Value> {
    let request = cri::PodSandboxStatusRequest { pod_sandbox_id: id.to_owned(), verbose: true };
    let response = client.pod_sandbox_status(request).await.map_err(status_error)?.into_inner();
    Ok(response.info.get("accounts").and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default())
}

/// Computes the measurements. The kernel's own count exceeds the resident memory of the processes: it includes page tables, page
/// cache and the VM's kernel structures.
fn compute(before: &Value, after: &Value, time: Duration) -> Option<Overhead> {
    let (machine, machine_before) = (&after["machine"], &before["machine"]);
    let guest = machine["guestBytes"].as_u64()?;
    let counted = after["node"]["memoryBytes"].as_u64().unwrap_or(0).saturating_sub(guest);
    let nanos = u128::from(machine["cpuNanos"].as_u64()?.saturating_sub(machine_before["cpuNanos"].as_u64()?));
    Some(Overhead {
        own_bytes: machine["processBytes"].as_u64()?.max(counted),
        system_bytes: after["system"]["memoryBytes"].as_u64().unwrap_or(0),
        cpu_milli: u64::try_from(nanos * 1000 / time.as_nanos().max(1)).unwrap_or(u64::MAX),
    })
}

/// Returns the manifest of a RuntimeClass. Its overhead is the handler's memory, all of which the guest may touch, plus the
/// measured memory that runs the VM.
fn manifest(name: &str, handler: &Handler, overhead: Overhead) -> String {
    let own = (overhead.own_bytes >> 20).saturating_add(1);
    let pages = handler.memory_pages == MemoryPages::Hugetlb;
    let (memory, huge) = match pages {
        true => (own, handler.memory_mib.next_multiple_of(hugepages::PAGE_MIB)),
        false => (own.saturating_add(handler.memory_mib), 0),
    };
    let huge = if pages { format!(", hugepages-2Mi: {huge}Mi") } else { String::new() };
    let memory = memory.next_multiple_of(STEP_MIB);
    let cpu = (overhead.cpu_milli + 1).next_multiple_of(10);
    format!(
        "# {name}: memory_mib = {} of the handler, of which the guest's kernel and agent use {} MiB; {own} MiB outside the guest; idle {}.{} % of a CPU
apiVersion: node.k8s.io/v1
kind: RuntimeClass
metadata: {{name: {name}}}
handler: {name}
overhead: {{podFixed: {{memory: {memory}Mi{huge}, cpu: {cpu}m}}}}
---
",
        handler.memory_mib,
        overhead.system_bytes >> 20,
        overhead.cpu_milli / 10,
        overhead.cpu_milli % 10,
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn measurements_become_the_overhead_of_a_runtime_class() {
        let before = json!({"machine": {"cpuNanos": 1_000_000_000_u64}});
        let mut after = json!({
            "machine": {"cpuNanos": 1_200_000_000_u64, "guestBytes": 90 << 20, "processBytes": 30 << 20},
            "system": {"memoryBytes": 60 << 20}, "node": {"memoryBytes": 125 << 20},
        });
        let time = Duration::from_secs(10);
        let found = compute(&before, &after, time).unwrap();
        assert_eq!(found, Overhead { own_bytes: 35 << 20, system_bytes: 60 << 20, cpu_milli: 20 });
        let handler = Handler { memory_mib: 128, ..Handler::default() };
        let text = manifest("large", &handler, found);
        assert!(text.contains("overhead: {podFixed: {memory: 168Mi, cpu: 30m}}"), "{text}");
        assert!(text.contains("use 60 MiB; 36 MiB outside the guest; idle 2.0 %"), "{text}");
        let huge = Handler { memory_pages: MemoryPages::Hugetlb, memory_mib: 129, ..Handler::default() };
        assert!(manifest("large", &huge, found).contains("{memory: 40Mi, hugepages-2Mi: 130Mi, cpu: 30m}"));
        after["node"] = Value::Null;
        assert_eq!(compute(&before, &after, time).unwrap().own_bytes, 30 << 20);
        assert_eq!(compute(&before, &json!({}), time), None);
    }
}
