//! Implements `nacelle pods`: shows what the pods of a node use and cost, and how one of them started. All data comes from the
//! daemon's verbose CRI statuses.

use super::table::format_table;
use super::{connect_to_daemon, status_error};
use crate::config::Config;
use nacelle_base::timeline::{MicrosAsMillis, TimelineStep};
use nacelle_proto::cri;
use nacelle_proto::cri::runtime_service_client::RuntimeServiceClient;
use serde_json::Value;
use std::fmt::Write;
use std::process::ExitCode;
use tonic::transport::Channel;

/// The number of characters of an id that are shown.
const SHORT: usize = 13;
/// The width of a bar in characters.
const BAR: usize = 40;

type Client = RuntimeServiceClient<Channel>;

pub(super) fn run(config: &Config, timeline: Option<String>) -> anyhow::Result<ExitCode> {
    let text = super::runtime()?.block_on(async {
        let channel = connect_to_daemon(&config.paths.socket).await?;
        let mut client = RuntimeServiceClient::new(channel);
        match timeline {
            Some(id) => draw_timelines(&mut client, id).await,
            None => Ok(list_pods(&mut client).await? + &list_owed_deletes(config).await?),
        }
    })?;
    print!("{text}");
    Ok(ExitCode::SUCCESS)
}

async fn list_pods(client: &mut Client) -> anyhow::Result<String> {
    let listed =
        client.list_pod_sandbox(cri::ListPodSandboxRequest::default()).await.map_err(status_error)?.into_inner();
    let mut rows = vec![
        ["POD ID", "NAMESPACE/NAME", "STATE", "HANDLER", "CONTAINERS", "CPU", "MEMORY", "COST CPU", "COST MEMORY"]
            .map(str::to_owned),
    ];
    for pod in listed.items {
        let (status, info) = match pod_status(client, &pod.id).await {
            Ok(status) => status,
            // The pod was removed after it was listed.
            Err(_) => continue,
        };
        rows.push(pod_row(&pod, &status, &info));
    }
    Ok(format_table(&rows))
}

/// Returns a line for each owed CNI DEL of a removed pod.
async fn list_owed_deletes(config: &Config) -> anyhow::Result<String> {
    let owed = nacelle_net::NodeNetworks::new(config.network_options()).owed_deletes().await?;
    Ok(owed.iter().map(|delete| super::owed_delete_line(delete) + "\n").collect())
}

struct PodInfo {
    pod: Value,
    accounts: Value,
}

async fn pod_status(client: &mut Client, id: &str) -> anyhow::Result<(cri::PodSandboxStatusResponse, PodInfo)> {
    let request = cri::PodSandboxStatusRequest { pod_sandbox_id: id.to_owned(), verbose: true };
    let response = client.pod_sandbox_status(request).await.map_err(status_error)?.into_inner();
    let parse = |key: &str| response.info.get(key).and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default();
    let info = PodInfo { pod: parse("info"), accounts: parse("accounts") };
    Ok((response, info))
}

fn pod_row(pod: &cri::PodSandbox, status: &cri::PodSandboxStatusResponse, info: &PodInfo) -> [String; 9] {
    let metadata = pod.metadata.clone().unwrap_or_default();
    let runs = |status: &&cri::ContainerStatus| status.state() == cri::ContainerState::ContainerRunning;
    let running = status.containers_statuses.iter().filter(runs).count();
    let state = match pod.state() {
        cri::PodSandboxState::SandboxReady => "Ready",
        cri::PodSandboxState::SandboxNotready => "NotReady",
    };
    let account = |part: &str, figure: &str| info.accounts[part][figure].as_i64();
    [
        short_id(&pod.id).to_owned(),
        format!("{}/{}", metadata.namespace, metadata.name),
        state.to_owned(),
        info.pod["handler"].as_str().unwrap_or_default().to_owned(),
        format!("{running}/{}", status.containers_statuses.len()),
        format_seconds(account("containers", "cpuNanos")),
        format_mebibytes(account("containers", "memoryBytes")),
        format_seconds(account("machine", "cpuNanos")),
        format_mebibytes(account("machine", "memoryBytes")),
    ]
}

fn short_id(id: &str) -> &str {
    id.get(..SHORT).unwrap_or(id)
}

fn format_seconds(nanos: Option<i64>) -> String {
    nanos.map_or_else(|| "-".to_owned(), |nanos| format!("{}.{:02} s", nanos / 1_000_000_000, nanos / 10_000_000 % 100))
}

fn format_mebibytes(bytes: Option<i64>) -> String {
    bytes.map_or_else(|| "-".to_owned(), |bytes| format!("{} MiB", bytes >> 20))
}

async fn draw_timelines(client: &mut Client, id: String) -> anyhow::Result<String> {
    let (status, info) = pod_status(client, &id).await?;
    let pod = status.status.unwrap_or_default();
    let metadata = pod.metadata.unwrap_or_default();
    let mut text = format!("pod {} {}/{}\n", short_id(&pod.id), metadata.namespace, metadata.name);
    text += &draw(&read_steps(&info.pod, "timeline"));
    let ending = read_steps(&info.pod, "ending");
    if !ending.is_empty() {
        text += "teardown of the pod\n";
        text += &draw(&ending);
    }
    // The oldest container first.
    for container in status.containers_statuses.iter().rev() {
        let request = cri::ContainerStatusRequest { container_id: container.id.clone(), verbose: true };
        let response = client.container_status(request).await.map_err(status_error)?.into_inner();
        let info = response.info.get("info").and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default();
        let name = container.metadata.clone().unwrap_or_default().name;
        writeln!(text, "container {} {name}", short_id(&container.id))?;
        text += &draw(&read_steps(&info, "timeline"));
    }
    Ok(text)
}

fn read_steps(info: &Value, key: &str) -> Vec<TimelineStep> {
    serde_json::from_value(info[key].clone()).unwrap_or_default()
}

/// Returns a line for each step: its name, a bar at its position in the whole time, and its duration.
fn draw(steps: &[TimelineStep]) -> String {
    let micros = |step: &TimelineStep| u64::try_from(step.at / 1000).unwrap_or(0);
    let end = |step: &TimelineStep| micros(step).saturating_add(step.micros);
    let (Some(first), Some(last)) = (steps.iter().map(micros).min(), steps.iter().map(end).max()) else {
        return "  no steps are recorded\n".to_owned();
    };
    let whole = last.saturating_sub(first).max(1);
    let names = steps.iter().map(|step| step.what.chars().count()).max().unwrap_or(0);
    let column = |at: u64| usize::try_from(u128::from(at) * BAR as u128 / u128::from(whole)).unwrap_or(BAR).min(BAR);
    let mut text = String::new();
    for step in steps {
        let from = column(micros(step) - first).min(BAR - 1);
        let to = column(end(step) - first).max(from + 1);
        let (before, bar, after) = (" ".repeat(from), "█".repeat(to - from), " ".repeat(BAR - to));
        let failed = if step.failed { "  failed" } else { "" };
        let took = MicrosAsMillis(step.micros).to_string();
        text += &format!("  {:names$}  |{before}{bar}{after}|  {took:>12}{failed}\n", step.what);
    }
    text + &format!("  {:names$}   {:BAR$}   {:>12}\n", "all", "", MicrosAsMillis(whole).to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn step(what: &str, at_ms: i64, ms: u64) -> TimelineStep {
        TimelineStep { what: what.into(), at: at_ms * 1_000_000, micros: ms * 1000, failed: false }
    }

    #[test]
    fn a_bar_shows_when_its_step_ran() {
        let mut late = step("late", 30, 10);
        late.failed = true;
        let text = draw(&[step("first", 0, 20), late]);
        let bar = |spaces: usize, blocks: usize| {
            format!("|{}{}{}|", " ".repeat(spaces), "█".repeat(blocks), " ".repeat(BAR - spaces - blocks))
        };
        let expected = format!(
            "  first  {}       20.0 ms\n  late   {}       10.0 ms  failed\n  all    {:42}       40.0 ms\n",
            bar(0, 20),
            bar(30, 10),
            ""
        );
        assert_eq!(text, expected);
        assert_eq!(draw(&[]), "  no steps are recorded\n");
    }

    #[test]
    fn the_table_shows_resource_use_and_overhead_of_pods() {
        let accounts = serde_json::json!({
            "containers": {"cpuNanos": 1_230_000_000, "memoryBytes": 3 << 20}, "machine": null,
        });
        let info = PodInfo { pod: serde_json::json!({"handler": "nacelle"}), accounts };
        let metadata =
            cri::PodSandboxMetadata { name: "web".into(), namespace: "default".into(), ..Default::default() };
        let pod = cri::PodSandbox { id: "0123456789abcdef".into(), metadata: Some(metadata), ..Default::default() };
        let row = pod_row(&pod, &cri::PodSandboxStatusResponse::default(), &info);
        assert_eq!(row.join(" "), "0123456789abc default/web Ready nacelle 0/0 1.23 s 3 MiB - -");
        let mut head = row.clone();
        head[0] = "ID".into();
        let text = format_table(&[head, row]);
        assert_eq!(text.lines().map(|line| line.find("default")).collect::<Vec<_>>(), [Some(15), Some(15)]);
    }

    proptest! {
        #[test]
        fn every_measured_step_has_a_bar(times in proptest::collection::vec((any::<i64>(), any::<u64>()), 1..9)) {
            let step = |(at, micros)| TimelineStep { what: "x".into(), at, micros, failed: false };
            let steps: Vec<_> = times.into_iter().map(step).collect();
            let text = draw(&steps);
            prop_assert_eq!(text.lines().count(), steps.len() + 1);
            prop_assert!(text.lines().take(steps.len()).all(|line| line.contains('█')));
        }
    }
}
