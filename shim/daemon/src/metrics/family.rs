//! Lists the metric families. Each has its name as queries write it, its type, its labels and its help, and is registered only by
//! this description.

use prometheus_client::registry::{Metric, Registry, Unit};

/// The type of a family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FamilyKind {
    /// It only grows while the daemon runs. Its name ends in `_total`.
    Counter,
    /// A value at the time of the scrape.
    Gauge,
    /// A distribution: `_bucket`, `_sum` and `_count` are added to its name.
    Histogram,
    /// A constant 1, whose labels have the information. Its name ends in `_info`.
    Info,
}

impl FamilyKind {
    /// Returns the name of the type in OpenMetrics.
    pub fn as_str(self) -> &'static str {
        match self {
            FamilyKind::Counter => "counter",
            FamilyKind::Gauge => "gauge",
            FamilyKind::Histogram => "histogram",
            FamilyKind::Info => "info",
        }
    }
}

/// The description of a family.
#[derive(Clone, Copy, Debug)]
pub struct MetricFamily {
    /// The name as queries write it; for histograms without the suffix of a series.
    pub name: &'static str,
    /// The type.
    pub kind: FamilyKind,
    /// The names of the labels, in their order.
    pub labels: &'static [&'static str],
    /// One sentence without a full stop, which the encoder adds.
    pub help: &'static str,
}

impl MetricFamily {
    /// Returns the unit, which is a part of the name: "seconds" or "bytes".
    pub fn unit(&self) -> Option<&'static str> {
        ["seconds", "bytes"].into_iter().find(|unit| self.without_type_suffix().ends_with(&format!("_{unit}")))
    }

    fn without_type_suffix(&self) -> &'static str {
        let suffix = match self.kind {
            FamilyKind::Counter => "_total",
            FamilyKind::Info => "_info",
            FamilyKind::Gauge | FamilyKind::Histogram => "",
        };
        self.name.strip_suffix(suffix).unwrap_or(self.name)
    }

    /// Registers a metric of this family. The encoder adds the suffixes of type and unit to the name.
    pub(crate) fn register(&self, registry: &mut Registry, metric: impl Metric) {
        let stem = self.without_type_suffix();
        let unit = match self.unit() {
            Some("seconds") => Unit::Seconds,
            Some(_bytes) => Unit::Bytes,
            None => return registry.register(stem, self.help, metric),
        };
        let stem = stem.strip_suffix(unit.as_str()).and_then(|stem| stem.strip_suffix('_')).unwrap_or(stem);
        registry.register_with_unit(stem, self.help, unit, metric);
    }
}

/// Defines a constant for each family, and the list of all.
macro_rules! families {
    ($($constant:ident: $kind:ident $name:literal [$($label:literal)*] $help:literal;)*) => {
        $(pub(crate) const $constant: MetricFamily = MetricFamily {
            name: $name, kind: FamilyKind::$kind, labels: &[$($label),*], help: $help,
        };)*

        /// All families, in the order of the reference page.
        pub const FAMILIES: &[MetricFamily] = &[$($constant),*];
    };
}

families! {
    BUILD: Info "nacelle_build_info" ["version" "commit"] "The version of the daemon, and the commit it was built from";
    CRI_REQUESTS: Counter "nacelle_cri_requests_total" ["rpc" "code"] "CRI requests by their gRPC code";
    CRI_DURATION: Histogram "nacelle_cri_request_duration_seconds" ["rpc"] "Time until the response of a CRI request began";
    POD_STARTS: Counter "nacelle_pod_starts_total" ["handler" "result"] "Starts of pods that have ended";
    POD_START_DURATION: Histogram "nacelle_pod_start_duration_seconds" ["handler"] "Time from the request of a pod until it was ready";
    POD_START_PHASES: Histogram "nacelle_pod_start_phase_duration_seconds" ["handler" "phase"] "Time of one step of a pod's start; steps overlap";
    PODS: Gauge "nacelle_pods" ["handler" "state"] "Pods on the node";
    CONTAINERS: Gauge "nacelle_containers" ["state"] "Containers on the node";
    POD_MEMORY: Gauge "nacelle_pod_process_memory_bytes" ["handler"] "Resident memory of the processes of ready pods, with their guests";
    PODS_RECOVERED: Counter "nacelle_pods_recovered_total" ["outcome"] "Pods of an earlier daemon that this daemon found when it started";
    VM_ENDS: Counter "nacelle_vm_ends_total" ["cause"] "VMs and pod processes that ended without a request";
    CONTAINER_EXITS: Counter "nacelle_container_exits_total" ["reason"] "Containers that have ended";
    TEMPLATE_HITS: Counter "nacelle_template_hits_total" [] "Pods that started from a template";
    TEMPLATE_MISSES: Counter "nacelle_template_misses_total" ["reason"] "Pods that could have a template and booted instead";
    TEMPLATES: Gauge "nacelle_templates" ["state"] "Templates of VMs";
    TEMPLATE_MEMORY: Gauge "nacelle_template_memory_bytes" [] "Memory that the templates occupy";
    IMAGE_PULLS: Counter "nacelle_image_pulls_total" ["result"] "Requests to pull an image";
    IMAGE_PULL_DURATION: Histogram "nacelle_image_pull_duration_seconds" ["result"] "Time of a request to pull an image";
    IMAGE_RECEIVED: Counter "nacelle_image_received_bytes_total" [] "Bytes that registries have sent";
    IMAGES: Gauge "nacelle_images" ["state"] "Images in the store";
    IMAGE_STORE: Gauge "nacelle_image_store_bytes" [] "Disk usage of the image store";
    CNI_REQUESTS: Counter "nacelle_cni_requests_total" ["command" "result"] "Requests to the plugins of a network";
    CNI_DURATION: Histogram "nacelle_cni_request_duration_seconds" ["command"] "Time of a request to the plugins of a network";
    CNI_OWED: Gauge "nacelle_cni_owed_deletes" [] "Pods that are gone and whose CNI DEL has not succeeded";
    STORE_COMMITS: Counter "nacelle_state_store_commits_total" ["result"] "Commits of the state store";
    STORE_DURATION: Histogram "nacelle_state_store_commit_duration_seconds" [] "Time to write a commit of the state store to the disk";
    STORE_SIZE: Gauge "nacelle_state_store_bytes" [] "Size of the files of the state store and its copy";
    STREAM_SESSIONS: Counter "nacelle_stream_sessions_total" ["kind"] "Sessions of exec, attach and port-forward that were accepted";
    STREAM_SESSIONS_OPEN: Gauge "nacelle_stream_sessions_open" ["kind"] "Sessions of exec, attach and port-forward that are open";
    TRACE_SPANS_DROPPED: Counter "nacelle_trace_spans_dropped_total" [] "Spans of traces that did not reach the collector";
    PROCESS_CPU: Counter "process_cpu_seconds_total" [] "CPU time of the daemon";
    PROCESS_RESIDENT: Gauge "process_resident_memory_bytes" [] "Resident memory of the daemon";
    PROCESS_VIRTUAL: Gauge "process_virtual_memory_bytes" [] "Virtual memory of the daemon";
    PROCESS_OPEN_FDS: Gauge "process_open_fds" [] "Open file descriptors of the daemon";
    PROCESS_MAX_FDS: Gauge "process_max_fds" [] "The limit on open file descriptors of the daemon";
    PROCESS_THREADS: Gauge "process_threads" [] "Threads of the daemon";
    PROCESS_START: Gauge "process_start_time_seconds" [] "When the daemon started, in seconds since 1970";
}
