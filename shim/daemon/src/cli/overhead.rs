//! Implements `nacelle check --overhead`: measures what a VM of each handler costs beside its containers, with a pod without
//! containers, and prints it as the manifest of a RuntimeClass.

use super::{connect, told};
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
struct Seen {
    /// Bytes that the VM takes on the node beside the guest's memory.
    own: u64,
    /// Bytes of the guest's memory that its kernel and agent use.
    system: u64,
    /// Idle CPU use in thousandths of a CPU.
    milli: u64,
}

pub(super) fn run(config: &Config) -> anyhow::Result<ExitCode> {
    super::runtime()?.block_on(async {
        let socket = &config.paths.socket;
        let channel = connect(socket).await;
        let channel = channel.with_context(|| format!("nobody serves {}: is the daemon running?", socket.display()))?;
        let mut client = RuntimeServiceClient::new(channel);
        for (name, handler) in &config.handlers {
            if handler.engine == EngineSetting::Host {
                println!("# {name}: without a machine, which costs nothing beside its containers");
                continue;
            }
            let seen = measured(&mut client, name).await.with_context(|| format!("handler {name}"))?;
            print!("{}", manifest(name, handler, seen));
        }
        Ok(ExitCode::SUCCESS)
    })
}

/// Runs a pod without containers, measures it, and removes it in any case.
async fn measured(client: &mut Client, handler: &str) -> anyhow::Result<Seen> {
    let metadata = cri::PodSandboxMetadata {
        name: format!("overhead-{handler}"),
        uid: format!("{}-{:?}", std::process::id(), Instant::now()),
        namespace: NAMESPACE.to_owned(),
        attempt: 0,
    };
    let config =
        cri::PodSandboxConfig { metadata: Some(metadata), linux: Some(Default::default()), ..Default::default() };
    let request = cri::RunPodSandboxRequest { config: Some(config), runtime_handler: handler.to_owned() };
    let id = client.run_pod_sandbox(request).await.map_err(told)?.into_inner().pod_sandbox_id;
    let seen = tokio::select! {
        seen = watched(client.clone(), &id) => seen,
        _ = tokio::signal::ctrl_c() => Err(anyhow::anyhow!("interrupted")),
    };
    let pod_sandbox_id = id.clone();
    client.stop_pod_sandbox(cri::StopPodSandboxRequest { pod_sandbox_id }).await.map_err(told)?;
    client.remove_pod_sandbox(cri::RemovePodSandboxRequest { pod_sandbox_id: id }).await.map_err(told)?;
    seen
}

async fn watched(mut client: Client, id: &str) -> anyhow::Result<Seen> {
    tokio::time::sleep(IDLE).await;
    let (before, start) = (accounts(&mut client, id).await?, Instant::now());
    tokio::time::sleep(IDLE).await;
    let after = accounts(&mut client, id).await?;
    seen(&before, &after, start.elapsed()).with_context(|| format!("the pod does not say what it costs: {after}"))
}

async fn accounts(client: &mut Client, id: &str) -> anyhow::Result<Value> {
    let request = cri::PodSandboxStatusRequest { pod_sandbox_id: id.to_owned(), verbose: true };
    let answer = client.pod_sandbox_status(request).await.map_err(told)?.into_inner();
    Ok(answer.info.get("accounts").and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default())
}

/// Computes the measurements. The kernel's own count exceeds the resident memory of the processes: it includes page tables, page
/// cache and the VM's kernel structures.
fn seen(before: &Value, after: &Value, time: Duration) -> Option<Seen> {
    let (machine, was) = (&after["machine"], &before["machine"]);
    let guest = machine["guestBytes"].as_u64()?;
    let counted = after["node"]["memoryBytes"].as_u64().unwrap_or(0).saturating_sub(guest);
    let nanos = u128::from(machine["cpuNanos"].as_u64()?.saturating_sub(was["cpuNanos"].as_u64()?));
    Some(Seen {
        own: machine["processBytes"].as_u64()?.max(counted),
        system: after["system"]["memoryBytes"].as_u64().unwrap_or(0),
        milli: u64::try_from(nanos * 1000 / time.as_nanos().max(1)).unwrap_or(u64::MAX),
    })
}

/// Returns the manifest of a RuntimeClass. Its overhead is the handler's memory, all of which the guest may touch, plus the
/// measured memory that runs the VM.
fn manifest(name: &str, handler: &Handler, seen: Seen) -> String {
    let own = (seen.own >> 20).saturating_add(1);
    let pages = handler.memory_pages == MemoryPages::Hugetlb;
    let (memory, huge) = match pages {
        true => (own, handler.memory_mib.next_multiple_of(hugepages::PAGE_MIB)),
        false => (own.saturating_add(handler.memory_mib), 0),
    };
    let huge = if pages { format!(", hugepages-2Mi: {huge}Mi") } else { String::new() };
    let memory = memory.next_multiple_of(STEP_MIB);
    let cpu = (seen.milli + 1).next_multiple_of(10);
    format!(
        "# {name}: memory_mib = {} of the handler, of which the guest's kernel and agent use {} MiB; {own} MiB beside it; idle {}.{} % of a processor
apiVersion: node.k8s.io/v1
kind: RuntimeClass
metadata: {{name: {name}}}
handler: {name}
overhead: {{podFixed: {{memory: {memory}Mi{huge}, cpu: {cpu}m}}}}
---
",
        handler.memory_mib,
        seen.system >> 20,
        seen.milli / 10,
        seen.milli % 10,
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_was_seen_becomes_an_overhead() {
        let before = json!({"machine": {"cpuNanos": 1_000_000_000_u64}});
        let mut after = json!({
            "machine": {"cpuNanos": 1_200_000_000_u64, "guestBytes": 90 << 20, "processBytes": 30 << 20},
            "system": {"memoryBytes": 60 << 20}, "node": {"memoryBytes": 125 << 20},
        });
        let time = Duration::from_secs(10);
        let found = seen(&before, &after, time).unwrap();
        assert_eq!(found, Seen { own: 35 << 20, system: 60 << 20, milli: 20 });
        let handler = Handler { memory_mib: 128, ..Handler::default() };
        let text = manifest("large", &handler, found);
        assert!(text.contains("overhead: {podFixed: {memory: 168Mi, cpu: 30m}}"), "{text}");
        assert!(text.contains("use 60 MiB; 36 MiB beside it; idle 2.0 %"), "{text}");
        let huge = Handler { memory_pages: MemoryPages::Hugetlb, memory_mib: 129, ..Handler::default() };
        assert!(manifest("large", &huge, found).contains("{memory: 40Mi, hugepages-2Mi: 130Mi, cpu: 30m}"));
        after["node"] = Value::Null;
        assert_eq!(seen(&before, &after, time).unwrap().own, 30 << 20);
        assert_eq!(seen(&before, &json!({}), time), None);
    }
}
