//! Implements `nacelle check --overhead`: measures the overhead of a VM of each handler, with a pod without
//! containers, and prints it as the manifest of a RuntimeClass.

use super::ExitStatus;
use super::daemon::{connect, status_error};
use super::output::{OutputArgument, TableView};
use crate::config::{Config, EngineSetting, Handler};
use crate::hugepages;
use anyhow::Context;
use nacelle_base::machine::MemoryPages;
use nacelle_proto::cri;
use nacelle_proto::cri::runtime_service_client::RuntimeServiceClient;
use serde::Serialize;
use serde_json::Value;
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

/// The overhead of all handlers.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(super) struct OverheadReport {
    handlers: Vec<HandlerOverhead>,
}

/// The overhead of a handler. All figures are 0 for engine host, which has no VM.
#[derive(Debug, Default, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
struct HandlerOverhead {
    handler: String,
    has_vm: bool,
    /// The handler's memory of a VM.
    memory_bytes: u64,
    /// What the guest's kernel and agent use of it.
    system_memory_bytes: u64,
    /// What the VM uses in addition to the guest's memory.
    outside_memory_bytes: u64,
    idle_cpu_milli: u64,
    pod_fixed: PodFixed,
}

/// `overhead.podFixed` of a RuntimeClass.
#[derive(Debug, Default, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
struct PodFixed {
    memory_bytes: u64,
    huge_pages_bytes: u64,
    cpu_milli: u64,
}

pub(super) fn run(config: &Config, output: OutputArgument) -> anyhow::Result<ExitStatus> {
    let handlers = super::runtime()?.block_on(async {
        let mut client = RuntimeServiceClient::new(connect(&config.paths.socket).await?);
        let mut handlers = Vec::new();
        for (name, handler) in &config.handlers {
            if handler.engine == EngineSetting::Host {
                handlers.push(HandlerOverhead { handler: name.clone(), ..HandlerOverhead::default() });
                continue;
            }
            let overhead = measure_handler(&mut client, name).await.with_context(|| format!("handler {name}"))?;
            handlers.push(HandlerOverhead::new(name, handler, overhead));
        }
        anyhow::Ok(handlers)
    })?;
    output.print(&OverheadReport { handlers })?;
    Ok(ExitStatus::Success)
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

impl HandlerOverhead {
    /// Computes what a RuntimeClass needs: the handler's memory, all of which the guest may touch, plus the measured memory that
    /// runs the VM.
    fn new(name: &str, handler: &Handler, overhead: Overhead) -> HandlerOverhead {
        let outside = (overhead.own_bytes >> 20).saturating_add(1);
        let (memory, huge) = match handler.memory_pages {
            MemoryPages::Hugetlb => (outside, handler.memory_mib.next_multiple_of(hugepages::PAGE_MIB)),
            MemoryPages::Transparent => (outside.saturating_add(handler.memory_mib), 0),
        };
        HandlerOverhead {
            handler: name.to_owned(),
            has_vm: true,
            memory_bytes: handler.memory_mib << 20,
            system_memory_bytes: overhead.system_bytes,
            outside_memory_bytes: outside << 20,
            idle_cpu_milli: overhead.cpu_milli,
            pod_fixed: PodFixed {
                memory_bytes: memory.next_multiple_of(STEP_MIB) << 20,
                huge_pages_bytes: huge << 20,
                cpu_milli: (overhead.cpu_milli + 1).next_multiple_of(10),
            },
        }
    }

    /// Returns the manifest of a RuntimeClass.
    fn manifest(&self) -> String {
        let name = &self.handler;
        if !self.has_vm {
            return format!("# {name}: engine host has no VM and no overhead\n");
        }
        let PodFixed { memory_bytes, huge_pages_bytes, cpu_milli } = self.pod_fixed;
        let memory = memory_bytes >> 20;
        let huge = match huge_pages_bytes >> 20 {
            0 => String::new(),
            mib => format!(", hugepages-2Mi: {mib}Mi"),
        };
        format!(
            "# {name}: memory_mib = {} of the handler, of which the guest's kernel and agent use {} MiB; {} MiB outside the guest; idle {}.{} % of a CPU
apiVersion: node.k8s.io/v1
kind: RuntimeClass
metadata: {{name: {name}}}
handler: {name}
overhead: {{podFixed: {{memory: {memory}Mi{huge}, cpu: {cpu_milli}m}}}}
---
",
            self.memory_bytes >> 20,
            self.system_memory_bytes >> 20,
            self.outside_memory_bytes >> 20,
            self.idle_cpu_milli / 10,
            self.idle_cpu_milli % 10,
        )
    }
}

impl TableView for OverheadReport {
    fn table(&self) -> String {
        self.handlers.iter().map(HandlerOverhead::manifest).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_examples_have_the_measured_overhead() {
        let read =
            |path: &str| std::fs::read_to_string(format!("{}/../../{path}", env!("CARGO_MANIFEST_DIR"))).unwrap();
        let measured = read("docs/operator/statistics.md");
        let row = measured.lines().find(|line| line.starts_with("| `kvm` | 256 |")).expect("the row of engine kvm");
        let pod_fixed = row.split('`').rev().nth(1).expect("the last column");
        for path in [
            "README.md",
            "docs/user/runtime-classes.md",
            "docs/examples/runtime-classes.yaml",
            "docs/examples/installer/installer.yaml",
        ] {
            let text = read(path);
            let given: Vec<&str> = text.lines().filter(|line| line.contains("podFixed:")).collect();
            let is_measured = |line: &&str| line.contains(&format!("podFixed: {pod_fixed}"));
            assert!(!given.is_empty() && given.iter().all(is_measured), "{path}: {given:?}, measured {pod_fixed}");
        }
    }
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
        let text = HandlerOverhead::new("large", &handler, found).manifest();
        assert!(text.contains("overhead: {podFixed: {memory: 168Mi, cpu: 30m}}"), "{text}");
        assert!(text.contains("use 60 MiB; 36 MiB outside the guest; idle 2.0 %"), "{text}");
        let huge = Handler { memory_pages: MemoryPages::Hugetlb, memory_mib: 129, ..Handler::default() };
        let text = HandlerOverhead::new("large", &huge, found).manifest();
        assert!(text.contains("{memory: 40Mi, hugepages-2Mi: 130Mi, cpu: 30m}"), "{text}");
        after["node"] = Value::Null;
        assert_eq!(compute(&before, &after, time).unwrap().own_bytes, 30 << 20);
        assert_eq!(compute(&before, &json!({}), time), None);
    }
}
