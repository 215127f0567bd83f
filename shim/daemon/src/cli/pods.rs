//! Implements `nacelle pods`: shows what the pods of a node use and cost, and how one of them started. All data comes from the
//! daemon's verbose CRI statuses.

use super::{connect, told};
use crate::config::Config;
use anyhow::Context;
use nacelle_base::timeline::{Millis, Step};
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
        let socket = &config.paths.socket;
        let channel = connect(socket).await;
        let channel = channel.with_context(|| format!("nobody serves {}: is the daemon running?", socket.display()))?;
        let mut client = RuntimeServiceClient::new(channel);
        match timeline {
            Some(id) => started(&mut client, id).await,
            None => Ok(list(&mut client).await? + &owed(config).await?),
        }
    })?;
    print!("{text}");
    Ok(ExitCode::SUCCESS)
}

async fn list(client: &mut Client) -> anyhow::Result<String> {
    let listed = client.list_pod_sandbox(cri::ListPodSandboxRequest::default()).await.map_err(told)?.into_inner();
    let mut rows = vec![
        ["POD ID", "NAMESPACE/NAME", "STATE", "HANDLER", "CONTAINERS", "CPU", "MEMORY", "COST CPU", "COST MEMORY"]
            .map(str::to_owned),
    ];
    for pod in listed.items {
        let (status, info) = match status_of(client, &pod.id).await {
            Ok(known) => known,
            // The pod was removed after it was listed.
            Err(_) => continue,
        };
        rows.push(row(&pod, &status, &info));
    }
    Ok(table(&rows))
}

/// Returns a line for each owed CNI DEL of a removed pod.
async fn owed(config: &Config) -> anyhow::Result<String> {
    let owed = nacelle_net::Network::new(config.network_options()).owed().await?;
    Ok(owed.iter().map(|one| super::owed_line(one) + "\n").collect())
}

struct Info {
    pod: Value,
    accounts: Value,
}

async fn status_of(client: &mut Client, id: &str) -> anyhow::Result<(cri::PodSandboxStatusResponse, Info)> {
    let request = cri::PodSandboxStatusRequest { pod_sandbox_id: id.to_owned(), verbose: true };
    let answer = client.pod_sandbox_status(request).await.map_err(told)?.into_inner();
    let read = |key: &str| answer.info.get(key).and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default();
    let info = Info { pod: read("info"), accounts: read("accounts") };
    Ok((answer, info))
}

fn row(pod: &cri::PodSandbox, status: &cri::PodSandboxStatusResponse, info: &Info) -> [String; 9] {
    let metadata = pod.metadata.clone().unwrap_or_default();
    let runs = |status: &&cri::ContainerStatus| status.state() == cri::ContainerState::ContainerRunning;
    let running = status.containers_statuses.iter().filter(runs).count();
    let state = match pod.state() {
        cri::PodSandboxState::SandboxReady => "Ready",
        cri::PodSandboxState::SandboxNotready => "NotReady",
    };
    let figure = |of: &str, what: &str| info.accounts[of][what].as_i64();
    [
        short(&pod.id).to_owned(),
        format!("{}/{}", metadata.namespace, metadata.name),
        state.to_owned(),
        info.pod["handler"].as_str().unwrap_or_default().to_owned(),
        format!("{running}/{}", status.containers_statuses.len()),
        seconds(figure("containers", "cpuNanos")),
        mebibytes(figure("containers", "memoryBytes")),
        seconds(figure("machine", "cpuNanos")),
        mebibytes(figure("machine", "memoryBytes")),
    ]
}

fn short(id: &str) -> &str {
    id.get(..SHORT).unwrap_or(id)
}

fn seconds(nanos: Option<i64>) -> String {
    nanos.map_or_else(|| "-".to_owned(), |nanos| format!("{}.{:02} s", nanos / 1_000_000_000, nanos / 10_000_000 % 100))
}

fn mebibytes(bytes: Option<i64>) -> String {
    bytes.map_or_else(|| "-".to_owned(), |bytes| format!("{} MiB", bytes >> 20))
}

/// Aligns the columns of a table.
fn table(rows: &[[String; 9]]) -> String {
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: [usize; 9] = std::array::from_fn(width);
    let mut text = String::new();
    for row in rows {
        let cells = row.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}"));
        text.push_str(cells.collect::<Vec<_>>().join("  ").trim_end());
        text.push('\n');
    }
    text
}

async fn started(client: &mut Client, id: String) -> anyhow::Result<String> {
    let (status, info) = status_of(client, &id).await?;
    let pod = status.status.unwrap_or_default();
    let metadata = pod.metadata.unwrap_or_default();
    let mut text = format!("pod {} {}/{}\n", short(&pod.id), metadata.namespace, metadata.name);
    text += &drawn(&steps(&info.pod, "timeline"));
    let ending = steps(&info.pod, "ending");
    if !ending.is_empty() {
        text += "its end\n";
        text += &drawn(&ending);
    }
    // The oldest pod first.
    for container in status.containers_statuses.iter().rev() {
        let request = cri::ContainerStatusRequest { container_id: container.id.clone(), verbose: true };
        let answer = client.container_status(request).await.map_err(told)?.into_inner();
        let info = answer.info.get("info").and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default();
        let name = container.metadata.clone().unwrap_or_default().name;
        writeln!(text, "container {} {name}", short(&container.id))?;
        text += &drawn(&steps(&info, "timeline"));
    }
    Ok(text)
}

fn steps(info: &Value, which: &str) -> Vec<Step> {
    serde_json::from_value(info[which].clone()).unwrap_or_default()
}

/// Returns a line for each step: its name, a bar at its position in the whole time, and its duration.
fn drawn(steps: &[Step]) -> String {
    let micros = |step: &Step| u64::try_from(step.at / 1000).unwrap_or(0);
    let end = |step: &Step| micros(step).saturating_add(step.micros);
    let (Some(first), Some(last)) = (steps.iter().map(micros).min(), steps.iter().map(end).max()) else {
        return "  nothing is known of it\n".to_owned();
    };
    let whole = last.saturating_sub(first).max(1);
    let names = steps.iter().map(|step| step.what.chars().count()).max().unwrap_or(0);
    let place = |at: u64| usize::try_from(u128::from(at) * BAR as u128 / u128::from(whole)).unwrap_or(BAR).min(BAR);
    let mut text = String::new();
    for step in steps {
        let from = place(micros(step) - first).min(BAR - 1);
        let to = place(end(step) - first).max(from + 1);
        let (before, bar, after) = (" ".repeat(from), "█".repeat(to - from), " ".repeat(BAR - to));
        let failed = if step.failed { "  failed" } else { "" };
        let took = Millis(step.micros).to_string();
        text += &format!("  {:names$}  |{before}{bar}{after}|  {took:>12}{failed}\n", step.what);
    }
    text + &format!("  {:names$}   {:BAR$}   {:>12}\n", "all", "", Millis(whole).to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn step(what: &str, at_ms: i64, ms: u64) -> Step {
        Step { what: what.into(), at: at_ms * 1_000_000, micros: ms * 1000, failed: false }
    }

    #[test]
    fn steps_lie_where_their_time_was() {
        let mut late = step("late", 30, 10);
        late.failed = true;
        let text = drawn(&[step("first", 0, 20), late]);
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
        assert_eq!(drawn(&[]), "  nothing is known of it\n");
    }

    #[test]
    fn pods_are_a_table_of_what_they_use_and_cost() {
        let accounts = serde_json::json!({
            "containers": {"cpuNanos": 1_230_000_000, "memoryBytes": 3 << 20}, "machine": null,
        });
        let info = Info { pod: serde_json::json!({"handler": "nacelle"}), accounts };
        let metadata =
            cri::PodSandboxMetadata { name: "web".into(), namespace: "default".into(), ..Default::default() };
        let pod = cri::PodSandbox { id: "0123456789abcdef".into(), metadata: Some(metadata), ..Default::default() };
        let row = row(&pod, &cri::PodSandboxStatusResponse::default(), &info);
        assert_eq!(row.join(" "), "0123456789abc default/web Ready nacelle 0/0 1.23 s 3 MiB - -");
        let mut head = row.clone();
        head[0] = "ID".into();
        let text = table(&[head, row]);
        assert_eq!(text.lines().map(|line| line.find("default")).collect::<Vec<_>>(), [Some(15), Some(15)]);
    }

    proptest! {
        #[test]
        fn whatever_was_measured_is_drawn(times in proptest::collection::vec((any::<i64>(), any::<u64>()), 1..9)) {
            let step = |(at, micros)| Step { what: "x".into(), at, micros, failed: false };
            let steps: Vec<_> = times.into_iter().map(step).collect();
            let text = drawn(&steps);
            prop_assert_eq!(text.lines().count(), steps.len() + 1);
            prop_assert!(text.lines().take(steps.len()).all(|line| line.contains('█')));
        }
    }
}
