//! Counts events of the daemon since its start. Clones share the counts. Each method is a few atomic additions, and may be called
//! on any thread.

use super::family::{self, MetricFamily};
use super::labels::{
    BuildLabels, CauseLabels, CniCommandLabel, CommandLabels, CommandResultLabels, ExitLabels, ExitReason,
    HandlerLabels, HandlerPhaseLabels, HandlerResultLabels, OutcomeLabels, PullLabels, PullResult, RecoveryOutcome,
    RequestResult, ResultLabels, RpcCodeLabels, RpcLabels, StartResult, VmEndCause, phase_label,
};
use crate::program;
use nacelle_base::timeline::TimelineStep;
use prometheus_client::encoding::{EncodeLabelSet, text};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;
use std::fmt;
use std::hash::Hash;
use std::sync::Arc;
use std::time::Duration;

/// The upper bounds of buckets in seconds: of requests.
const REQUEST_BUCKETS: [f64; 13] = [0.001, 0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 180.0];
/// Those of steps of a start.
const PHASE_BUCKETS: [f64; 13] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0];
/// Those of pulls.
const PULL_BUCKETS: [f64; 10] = [0.1, 0.5, 1.0, 5.0, 15.0, 30.0, 60.0, 180.0, 600.0, 1800.0];
/// Those of commits.
const COMMIT_BUCKETS: [f64; 10] = [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 5.0];

type Histograms<L> = Family<L, Histogram, fn() -> Histogram>;

/// The counts of events.
#[derive(Clone)]
pub struct EventCounters(Arc<Counters>);

struct Counters {
    registry: Registry,
    requests: Family<RpcCodeLabels, Counter>,
    request_duration: Histograms<RpcLabels>,
    pod_starts: Family<HandlerResultLabels, Counter>,
    pod_start_duration: Histograms<HandlerLabels>,
    pod_start_phases: Histograms<HandlerPhaseLabels>,
    pods_recovered: Family<OutcomeLabels, Counter>,
    vm_ends: Family<CauseLabels, Counter>,
    container_exits: Family<ExitLabels, Counter>,
    image_pulls: Family<PullLabels, Counter>,
    image_pull_duration: Histograms<PullLabels>,
    cni_requests: Family<CommandResultLabels, Counter>,
    cni_duration: Histograms<CommandLabels>,
    commits: Family<ResultLabels, Counter>,
    commit_duration: Histogram,
    trace_spans_dropped: Counter,
}

/// Creates and registers the families of counters.
#[derive(Default)]
struct Registrar(Registry);

impl Registrar {
    /// Registers counters that exist with value 0 for each of `known`: an alert on growth needs the value before the first event.
    fn counters<L>(&mut self, family: &MetricFamily, known: impl IntoIterator<Item = L>) -> Family<L, Counter>
    where
        L: Clone + Eq + Hash + EncodeLabelSet + Send + Sync + fmt::Debug + 'static,
    {
        let counters = Family::default();
        for labels in known {
            drop(counters.get_or_create(&labels));
        }
        family.register(&mut self.0, counters.clone());
        counters
    }

    fn histograms<L>(&mut self, family: &MetricFamily, create: fn() -> Histogram) -> Histograms<L>
    where
        L: Clone + Eq + Hash + EncodeLabelSet + Send + Sync + fmt::Debug + 'static,
    {
        let histograms = Family::new_with_constructor(create);
        family.register(&mut self.0, histograms.clone());
        histograms
    }
}

impl EventCounters {
    /// Creates counters with value 0. `handlers` are those of the configuration.
    pub fn new<'a>(handlers: impl IntoIterator<Item = &'a String>) -> EventCounters {
        let mut registrar = Registrar::default();
        let (version, commit) = (program::RELEASE, program::COMMIT.unwrap_or("unknown"));
        family::BUILD.register(&mut registrar.0, Info::new(BuildLabels { version, commit }));
        let results = StartResult::ALL;
        let starts = handlers.into_iter().flat_map(|handler| {
            results.iter().map(|result| HandlerResultLabels { handler: handler.clone(), result: *result })
        });
        let cni = CniCommandLabel::ALL.iter().flat_map(|command| {
            RequestResult::ALL.iter().map(|result| CommandResultLabels { command: *command, result: *result })
        });
        let requests = registrar.counters(&family::CRI_REQUESTS, []);
        let request_duration = registrar.histograms(&family::CRI_DURATION, || Histogram::new(REQUEST_BUCKETS));
        let pod_starts = registrar.counters(&family::POD_STARTS, starts);
        let pod_start_duration = registrar.histograms(&family::POD_START_DURATION, || Histogram::new(REQUEST_BUCKETS));
        let pod_start_phases = registrar.histograms(&family::POD_START_PHASES, || Histogram::new(PHASE_BUCKETS));
        let outcomes = RecoveryOutcome::ALL.iter().map(|outcome| OutcomeLabels { outcome: *outcome });
        let pods_recovered = registrar.counters(&family::PODS_RECOVERED, outcomes);
        let causes = VmEndCause::ALL.iter().map(|cause| CauseLabels { cause: *cause });
        let vm_ends = registrar.counters(&family::VM_ENDS, causes);
        let reasons = ExitReason::ALL.iter().map(|reason| ExitLabels { reason: *reason });
        let container_exits = registrar.counters(&family::CONTAINER_EXITS, reasons);
        let pulls = PullResult::ALL.iter().map(|result| PullLabels { result: *result });
        let image_pulls = registrar.counters(&family::IMAGE_PULLS, pulls);
        let image_pull_duration = registrar.histograms(&family::IMAGE_PULL_DURATION, || Histogram::new(PULL_BUCKETS));
        let cni_requests = registrar.counters(&family::CNI_REQUESTS, cni);
        let cni_duration = registrar.histograms(&family::CNI_DURATION, || Histogram::new(REQUEST_BUCKETS));
        let results = RequestResult::ALL.iter().map(|result| ResultLabels { result: *result });
        let commits = registrar.counters(&family::STORE_COMMITS, results);
        let commit_duration = Histogram::new(COMMIT_BUCKETS);
        family::STORE_DURATION.register(&mut registrar.0, commit_duration.clone());
        let trace_spans_dropped = Counter::default();
        family::TRACE_SPANS_DROPPED.register(&mut registrar.0, trace_spans_dropped.clone());
        EventCounters(Arc::new(Counters {
            registry: registrar.0,
            requests,
            request_duration,
            pod_starts,
            pod_start_duration,
            pod_start_phases,
            pods_recovered,
            vm_ends,
            container_exits,
            image_pulls,
            image_pull_duration,
            cni_requests,
            cni_duration,
            commits,
            commit_duration,
            trace_spans_dropped,
        }))
    }

    /// Appends the families in OpenMetrics' text format, without the mark of the end.
    pub(crate) fn encode(&self, into: &mut String) -> fmt::Result {
        text::encode_registry(into, &self.0.registry)
    }

    /// Counts a CRI request: the name of its RPC, its gRPC code, and the time until its response began.
    pub(crate) fn count_request(&self, rpc: &'static str, code: &'static str, duration: Duration) {
        self.0.requests.get_or_create(&RpcCodeLabels { rpc, code }).inc();
        self.0.request_duration.get_or_create(&RpcLabels { rpc }).observe(duration.as_secs_f64());
    }

    /// Counts the end of a pod's start, and its steps if the pod is ready. `longest` is the longest time of a step: a pod process may
    /// report any.
    pub(crate) fn count_pod_start(
        &self,
        handler: &str,
        result: StartResult,
        duration: Duration,
        steps: &[TimelineStep],
        longest: Duration,
    ) {
        let handler = handler.to_owned();
        self.0.pod_starts.get_or_create(&HandlerResultLabels { handler: handler.clone(), result }).inc();
        if result != StartResult::Ready {
            return;
        }
        let labels = HandlerLabels { handler: handler.clone() };
        self.0.pod_start_duration.get_or_create(&labels).observe(duration.as_secs_f64());
        for step in steps {
            let labels = HandlerPhaseLabels { handler: handler.clone(), phase: phase_label(&step.what) };
            let duration = Duration::from_micros(step.micros).min(longest);
            self.0.pod_start_phases.get_or_create(&labels).observe(duration.as_secs_f64());
        }
    }

    /// Counts a pod of an earlier daemon.
    pub(crate) fn count_recovery(&self, outcome: RecoveryOutcome) {
        self.0.pods_recovered.get_or_create(&OutcomeLabels { outcome }).inc();
    }

    /// Counts the unrequested end of a VM.
    pub(crate) fn count_vm_end(&self, cause: VmEndCause) {
        self.0.vm_ends.get_or_create(&CauseLabels { cause }).inc();
    }

    /// Counts the end of a container.
    pub(crate) fn count_container_exit(&self, reason: ExitReason) {
        self.0.container_exits.get_or_create(&ExitLabels { reason }).inc();
    }

    /// Counts a request to pull an image.
    pub(crate) fn count_pull(&self, result: PullResult, duration: Duration) {
        self.0.image_pulls.get_or_create(&PullLabels { result }).inc();
        self.0.image_pull_duration.get_or_create(&PullLabels { result }).observe(duration.as_secs_f64());
    }

    /// Counts a request to the plugins of a network.
    pub(crate) fn count_cni(&self, command: CniCommandLabel, result: RequestResult, duration: Duration) {
        self.0.cni_requests.get_or_create(&CommandResultLabels { command, result }).inc();
        self.0.cni_duration.get_or_create(&CommandLabels { command }).observe(duration.as_secs_f64());
    }

    /// Counts a commit of the state store.
    pub(crate) fn count_commit(&self, result: RequestResult, duration: Duration) {
        self.0.commits.get_or_create(&ResultLabels { result }).inc();
        self.0.commit_duration.observe(duration.as_secs_f64());
    }

    /// Counts spans that were dropped.
    pub(crate) fn count_dropped_spans(&self, count: u64) {
        self.0.trace_spans_dropped.inc_by(count);
    }
}
