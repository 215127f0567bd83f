//! Implements `nacelle top`: shows the CPU time that pods use at the moment, from two readings of their accounts, and their memory.

use super::ExitStatus;
use super::daemon::connect;
use super::output::{self, OutputArgument, TableView};
use super::pods::{PodList, PodView, UsageView, short_id};
use super::table::format_table;
use super::units::{UNKNOWN, format_bytes};
use crate::config::{Config, parse_duration};
use nacelle_proto::cri::runtime_service_client::RuntimeServiceClient;
use serde::Serialize;
use std::cmp::Reverse;
use std::collections::HashMap;
use std::io::IsTerminal;
use std::time::Duration;

/// Moves the cursor of a terminal to its first line and clears what is below.
const CLEAR: &str = "\x1b[H\x1b[J";

#[derive(clap::Args)]
pub(super) struct TopArguments {
    #[command(flatten)]
    output: OutputArgument,
    /// The time between two readings: 100ms to 1h.
    #[arg(long, default_value = "2s", value_parser = parse_interval)]
    interval: Duration,
    /// Prints one reading and ends, also on a terminal.
    #[arg(long)]
    once: bool,
}

fn parse_interval(text: &str) -> Result<Duration, String> {
    let interval = parse_duration(text)?;
    match (Duration::from_millis(100)..=Duration::from_secs(3600)).contains(&interval) {
        true => Ok(interval),
        false => Err("100ms to 1h are allowed".to_owned()),
    }
}

/// The pods of a node, those first that cost most CPU time.
#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(super) struct TopView {
    pods: Vec<TopPodView>,
}

#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct TopPodView {
    id: String,
    namespace: String,
    name: String,
    handler: String,
    /// What the containers use, as the guest reports.
    usage: RateView,
    /// What the VM and its processes use on the node.
    cost: RateView,
}

/// `None`: not known.
#[derive(Clone, Copy, Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
struct RateView {
    /// Thousandths of a CPU.
    cpu_milli: Option<u64>,
    memory_bytes: Option<u64>,
}

pub(super) fn run(config: &Config, arguments: &TopArguments) -> anyhow::Result<ExitStatus> {
    let repeats = !arguments.once && arguments.output.is_table() && std::io::stdout().is_terminal();
    super::runtime()?.block_on(async {
        let mut client = RuntimeServiceClient::new(connect(&config.paths.socket).await?);
        let mut before = PodList::read(&mut client, config).await?;
        loop {
            tokio::time::sleep(arguments.interval).await;
            let now = PodList::read(&mut client, config).await?;
            let view = TopView::new(&before, &now);
            if !repeats {
                arguments.output.print(&view)?;
                return Ok(ExitStatus::Success);
            }
            output::print(&format!("{CLEAR}{}", view.table()))?;
            before = now;
        }
    })
}

impl TopView {
    fn new(before: &PodList, now: &PodList) -> TopView {
        let before: HashMap<_, _> = before.pods().iter().map(|pod| (pod.id.as_str(), pod)).collect();
        let of = |pod: &PodView| {
            let earlier = before.get(pod.id.as_str());
            let seconds = earlier.map(|earlier| pod.read_at.duration_since(earlier.read_at).as_secs_f64());
            let rate = |now: &UsageView, then: Option<&UsageView>| RateView {
                cpu_milli: cpu_milli(now.cpu_seconds, then.and_then(|then| then.cpu_seconds), seconds),
                memory_bytes: now.memory_bytes,
            };
            TopPodView {
                id: pod.id.clone(),
                namespace: pod.namespace.clone(),
                name: pod.name.clone(),
                handler: pod.handler.clone(),
                usage: rate(&pod.usage, earlier.map(|pod| &pod.usage)),
                cost: rate(&pod.cost, earlier.map(|pod| &pod.cost)),
            }
        };
        let mut pods: Vec<_> = now.pods().iter().map(of).collect();
        pods.sort_by_key(|pod| Reverse((pod.cost.cpu_milli, pod.usage.cpu_milli, pod.cost.memory_bytes)));
        TopView { pods }
    }
}

/// Returns the thousandths of a CPU between two readings; `None` if one of them is missing.
fn cpu_milli(now: Option<f64>, then: Option<f64>, seconds: Option<f64>) -> Option<u64> {
    let (used, seconds) = (now? - then?, seconds.filter(|seconds| *seconds > 0.0)?);
    // An account may begin anew. The cast saturates.
    Some((used.max(0.0) / seconds * 1000.0).round() as u64)
}

impl TableView for TopView {
    fn table(&self) -> String {
        let header = ["POD ID", "NAMESPACE/NAME", "HANDLER", "CPU", "MEMORY", "COST CPU", "COST MEMORY"];
        let mut rows = vec![header.map(str::to_owned)];
        rows.extend(self.pods.iter().map(|pod| {
            let milli = |rate: RateView| rate.cpu_milli.map_or(UNKNOWN.to_owned(), |milli| format!("{milli}m"));
            let bytes = |rate: RateView| rate.memory_bytes.map_or(UNKNOWN.to_owned(), format_bytes);
            [
                short_id(&pod.id).to_owned(),
                format!("{}/{}", pod.namespace, pod.name),
                pod.handler.clone(),
                milli(pod.usage),
                bytes(pod.usage),
                milli(pod.cost),
                bytes(pod.cost),
            ]
        }));
        format_table(&rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_time_is_what_was_used_between_two_readings() {
        assert_eq!(cpu_milli(Some(5.0), Some(4.0), Some(2.0)), Some(500));
        // A pod that is new, one whose account began anew, and two readings at the same time.
        assert_eq!(cpu_milli(Some(5.0), None, None), None);
        assert_eq!(cpu_milli(Some(1.0), Some(4.0), Some(2.0)), Some(0));
        assert_eq!(cpu_milli(Some(5.0), Some(4.0), Some(0.0)), None);
    }

    #[test]
    fn the_pods_that_cost_most_come_first() {
        let pod = |id: &str, cpu_milli, memory_bytes| {
            let rate = RateView { cpu_milli, memory_bytes };
            let (id, name) = (id.repeat(20), id.to_owned());
            TopPodView { id, namespace: "n".into(), name, handler: "h".into(), usage: rate, cost: rate }
        };
        let view = TopView { pods: vec![pod("a", Some(1500), Some(1 << 20)), pod("b", None, None)] };
        let lines: Vec<_> =
            view.table().lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
        assert_eq!(lines[1], "aaaaaaaaaaaaa n/a h 1500m 1.0 MiB 1500m 1.0 MiB");
        assert_eq!(lines[2], "bbbbbbbbbbbbb n/b h - - - -");
        assert_eq!(parse_interval("500ms"), Ok(Duration::from_millis(500)));
        assert!(parse_interval("99ms").is_err() && parse_interval("2h").is_err() && parse_interval("5").is_err());
    }
}
