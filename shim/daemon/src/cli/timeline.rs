//! Implements `nacelle pods --timeline`: shows how long each step of a pod's start and teardown took.

use super::ExitStatus;
use super::daemon::{connect, status_error};
use super::output::{OutputArgument, TableView};
use super::pods::{CriClient, pod_status, short_id};
use crate::config::Config;
use nacelle_base::timeline::{MicrosAsMillis, TimelineStep};
use nacelle_proto::cri;
use nacelle_proto::cri::runtime_service_client::RuntimeServiceClient;
use serde::Serialize;
use serde_json::Value;

/// The width of a bar in characters.
const BAR: usize = 40;

/// The steps of a pod and its containers.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(super) struct PodTimeline {
    id: String,
    namespace: String,
    name: String,
    #[serde(serialize_with = "serialize_steps")]
    #[cfg_attr(test, schemars(with = "Vec<StepView<'static>>"))]
    start: Vec<TimelineStep>,
    #[serde(serialize_with = "serialize_steps")]
    #[cfg_attr(test, schemars(with = "Vec<StepView<'static>>"))]
    teardown: Vec<TimelineStep>,
    /// The oldest first.
    containers: Vec<ContainerTimeline>,
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
struct ContainerTimeline {
    id: String,
    name: String,
    #[serde(serialize_with = "serialize_steps")]
    #[cfg_attr(test, schemars(with = "Vec<StepView<'static>>"))]
    start: Vec<TimelineStep>,
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
struct StepView<'a> {
    name: &'a str,
    started_at: String,
    duration_seconds: f64,
    failed: bool,
}

impl StepView<'_> {
    fn new(step: &TimelineStep) -> StepView<'_> {
        StepView {
            name: &step.what,
            started_at: nacelle_pod::rfc3339(step.at),
            duration_seconds: step.micros as f64 / 1e6,
            failed: step.failed,
        }
    }
}

fn serialize_steps<S: serde::Serializer>(steps: &[TimelineStep], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(steps.iter().map(StepView::new))
}

pub(super) fn run(config: &Config, pod: String, output: OutputArgument) -> anyhow::Result<ExitStatus> {
    let timeline = super::runtime()?.block_on(async {
        let mut client = RuntimeServiceClient::new(connect(&config.paths.socket).await?);
        PodTimeline::read(&mut client, &pod).await
    })?;
    output.print(&timeline)?;
    Ok(ExitStatus::Success)
}

impl PodTimeline {
    pub(super) async fn read(client: &mut CriClient, pod: &str) -> anyhow::Result<PodTimeline> {
        let (response, info) = pod_status(client, pod).await?;
        let status = response.status.unwrap_or_default();
        let metadata = status.metadata.unwrap_or_default();
        let mut containers = Vec::new();
        for container in response.containers_statuses.into_iter().rev() {
            let request = cri::ContainerStatusRequest { container_id: container.id.clone(), verbose: true };
            let response = client.container_status(request).await.map_err(status_error)?.into_inner();
            let info = response.info.get("info").and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default();
            let name = container.metadata.unwrap_or_default().name;
            containers.push(ContainerTimeline { id: container.id, name, start: read_steps(&info, "timeline") });
        }
        Ok(PodTimeline {
            id: status.id,
            namespace: metadata.namespace,
            name: metadata.name,
            start: read_steps(&info.pod, "timeline"),
            teardown: read_steps(&info.pod, "ending"),
            containers,
        })
    }
}

impl TableView for PodTimeline {
    fn table(&self) -> String {
        let mut text = format!("pod {} {}/{}\n{}", short_id(&self.id), self.namespace, self.name, draw(&self.start));
        if !self.teardown.is_empty() {
            text += "teardown of the pod\n";
            text += &draw(&self.teardown);
        }
        for ContainerTimeline { id, name, start } in &self.containers {
            text += &format!("container {} {name}\n{}", short_id(id), draw(start));
        }
        text
    }
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
    fn steps_have_times_and_durations() {
        let kernel = step("kernel", 1_735_689_599_000, 1500);
        let steps = [StepView::new(&kernel)];
        let json = serde_json::to_value(&steps).unwrap();
        let expected = serde_json::json!([{
            "name": "kernel", "startedAt": "2024-12-31T23:59:59.000000000Z", "durationSeconds": 1.5, "failed": false,
        }]);
        assert_eq!(json, expected);
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
