//! Writes all metrics as text: the counts of events, and figures of the daemon's state, which are computed for each scrape. Figures
//! are read at most twice a second, whatever the number of clients, and nothing is computed while no client asks.

use crate::accounting::Accounting;
use crate::lifecycle::Node;
use crate::lifecycle::template::{MissReason, TemplateCatalogue, TemplateState};
use crate::metrics::counters::EventCounters;
use crate::metrics::family::{self, MetricFamily};
use crate::metrics::labels::{
    HandlerLabels, HandlerStateLabels, KindLabels, ReasonLabels, StateLabels, container_state_label, pod_state_label,
};
use crate::metrics::process::ProcessFigures;
use bytes::Bytes;
use nacelle_base::Chain;
use nacelle_base::task::run_blocking;
use nacelle_image::ImageCounts;
use nacelle_model::state::{ContainerState, PodState};
use nacelle_stream::StreamingServer;
use prometheus_client::encoding::{EncodeLabelSet, text};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use std::fmt::Debug;
use std::hash::Hash;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::Mutex;

/// The age up to which a client gets the text of an earlier scrape.
const MAX_AGE: Duration = Duration::from_millis(500);

/// Writes the metrics of a daemon.
pub(crate) struct Exporter {
    node: Node,
    streams: StreamingServer,
    accounting: Accounting,
    /// The last text and the time at which it was complete. The lock is held during a scrape: further clients wait for its text.
    last: Arc<Mutex<Option<(Instant, Bytes)>>>,
}

/// Registers figures of a state.
#[derive(Default)]
struct StateRegistrar(Registry);

impl StateRegistrar {
    fn gauge(&mut self, family: &MetricFamily, value: u64) {
        let gauge = Gauge::<i64>::default();
        gauge.set(i64::try_from(value).unwrap_or(i64::MAX));
        family.register(&mut self.0, gauge);
    }

    fn counter(&mut self, family: &MetricFamily, value: u64) {
        let counter = Counter::<u64>::default();
        counter.inc_by(value);
        family.register(&mut self.0, counter);
    }

    /// Registers gauges that are the sums of these values by their labels.
    fn gauges<L>(&mut self, family: &MetricFamily, values: impl IntoIterator<Item = (L, u64)>)
    where
        L: Clone + Eq + Hash + EncodeLabelSet + Send + Sync + Debug + 'static,
    {
        let gauges = Family::<L, Gauge>::default();
        for (labels, value) in values {
            gauges.get_or_create(&labels).inc_by(i64::try_from(value).unwrap_or(i64::MAX));
        }
        family.register(&mut self.0, gauges);
    }

    fn counters<L>(&mut self, family: &MetricFamily, values: impl IntoIterator<Item = (L, u64)>)
    where
        L: Clone + Eq + Hash + EncodeLabelSet + Send + Sync + Debug + 'static,
    {
        let counters = Family::<L, Counter>::default();
        for (labels, value) in values {
            counters.get_or_create(&labels).inc_by(value);
        }
        family.register(&mut self.0, counters);
    }
}

impl Exporter {
    /// Creates the exporter of this node; `streams` counts its sessions itself.
    pub(crate) fn new(node: Node, streams: StreamingServer) -> Exporter {
        let accounting = Accounting::new(node.clone());
        Exporter { node, streams, accounting, last: Arc::default() }
    }

    /// Returns all metrics in OpenMetrics' text format; nothing after a panic, which is a defect. A scrape goes on when its client has
    /// gone, because what it has begun cannot be stopped, and no second one begins meanwhile.
    pub(crate) async fn render(self: &Arc<Self>) -> Bytes {
        let mut last = Arc::clone(&self.last).lock_owned().await;
        if let Some((at, text)) = last.as_ref()
            && at.elapsed() < MAX_AGE
        {
            return text.clone();
        }
        let exporter = Arc::clone(self);
        let scrape = tokio::spawn(async move {
            let text = Bytes::from(exporter.encode().await);
            *last = Some((Instant::now(), text.clone()));
            text
        });
        scrape.await.unwrap_or_default()
    }

    async fn encode(&self) -> String {
        let mut state = StateRegistrar::default();
        self.add_pods(&mut state).await;
        self.node.templates().look(|catalogue| add_templates(&mut state, catalogue));
        self.add_images(&mut state).await;
        let services = self.node.services();
        let owed = u64::try_from(services.networks.count_owed_deletes()).unwrap_or(u64::MAX);
        state.gauge(&family::CNI_OWED, owed);
        for (family, open) in [(&family::STREAM_SESSIONS, false), (&family::STREAM_SESSIONS_OPEN, true)] {
            let counts = self.streams.session_counts().into_iter();
            let values = counts
                .map(|(kind, count)| (KindLabels { kind: kind.as_str() }, if open { count.open } else { count.total }));
            if open { state.gauges(family, values) } else { state.counters(family, values) }
        }
        let store = services.config.paths.store();
        let read = move || (ProcessFigures::read(), store_bytes(&store));
        match run_blocking("read the figures of the daemon", read).await {
            Ok((process, bytes)) => {
                process.register(&mut state.0);
                state.gauge(&family::STORE_SIZE, bytes);
            }
            Err(error) => tracing::warn!("metrics lack figures of the daemon: {}", Chain(&error)),
        }
        encode_all(&services.counters, &state.0)
    }

    async fn add_pods(&self, state: &mut StateRegistrar) {
        let views = self.node.views();
        let of = |handler: &String, pod: PodState| HandlerStateLabels {
            handler: handler.clone(),
            state: pod_state_label(pod),
        };
        let handlers = self.node.services().config.handlers.keys();
        // Those without a pod have the value 0.
        let none = handlers.clone().flat_map(|handler| PodState::ALL.map(|state| (of(handler, state), 0)));
        let pods = views.iter().map(|view| (of(&view.pod.handler, view.pod.state), 1));
        state.gauges(&family::PODS, none.chain(pods));
        let of = |state: ContainerState| StateLabels { state: container_state_label(state) };
        let none = ContainerState::ALL.into_iter().map(|state| (of(state), 0));
        let containers = views.iter().flat_map(|view| view.containers.values()).map(|one| (of(one.state), 1));
        state.gauges(&family::CONTAINERS, none.chain(containers));
        let memory = self.accounting.measure_memory(&views).await;
        let none = handlers.map(|handler| (HandlerLabels { handler: handler.clone() }, 0));
        let memory = memory.into_iter().map(|(handler, bytes)| (HandlerLabels { handler }, bytes));
        state.gauges(&family::POD_MEMORY, none.chain(memory));
    }

    async fn add_images(&self, state: &mut StateRegistrar) {
        let images = &self.node.services().images;
        let ImageCounts { sound, damaged } = images.count_images();
        let counts = [("sound", sound), ("damaged", damaged)];
        state.gauges(&family::IMAGES, counts.map(|(state, count)| (StateLabels { state }, count)));
        state.counter(&family::IMAGE_RECEIVED, images.received_bytes());
        match images.fs_info().await {
            Ok(info) => state.gauge(&family::IMAGE_STORE, info.used_bytes),
            Err(error) => tracing::warn!("metrics lack the size of the image store: {}", Chain(&error)),
        }
    }
}

/// Encodes both registries as one document.
fn encode_all(counters: &EventCounters, state: &Registry) -> String {
    let mut text = String::new();
    // Writing to a string does not fail.
    let written = counters
        .encode(&mut text)
        .and_then(|()| text::encode_registry(&mut text, state))
        .and_then(|()| text::encode_eof(&mut text));
    if written.is_err() {
        tracing::error!("BUG: metrics cannot be encoded");
    }
    text
}

fn add_templates(state: &mut StateRegistrar, catalogue: &TemplateCatalogue) {
    state.counter(&family::TEMPLATE_HITS, catalogue.hits);
    let misses = MissReason::ALL
        .into_iter()
        .map(|reason| (ReasonLabels { reason: reason.label() }, catalogue.misses.get(&reason).copied().unwrap_or(0)));
    state.counters(&family::TEMPLATE_MISSES, misses);
    let label = |state: &TemplateState| match state {
        TemplateState::Wanted => "wanted",
        TemplateState::Building => "building",
        TemplateState::Ready { .. } => "ready",
        TemplateState::Failed { .. } => "failed",
    };
    let none = ["wanted", "building", "ready", "failed"].map(|state| (StateLabels { state }, 0));
    let entries = catalogue.entries().map(|(_, entry)| (StateLabels { state: label(&entry.state) }, 1));
    state.gauges(&family::TEMPLATES, none.into_iter().chain(entries));
    let bytes = catalogue.entries().map(|(_, entry)| match entry.state {
        TemplateState::Ready { bytes } => bytes,
        _ => 0,
    });
    state.gauge(&family::TEMPLATE_MEMORY, bytes.sum());
}

/// Returns the size in bytes of all files of the state store: the database, its copy, and those that were set aside. Blocks.
fn store_bytes(store: &Path) -> u64 {
    let (Some(directory), Some(stem)) = (store.parent(), store.file_stem()) else { return 0 };
    let prefix = format!("{}.", stem.to_string_lossy());
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let files = entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(&prefix));
    files.filter_map(|file| file.metadata().ok()).filter(std::fs::Metadata::is_file).map(|file| file.len()).sum()
}
