//! Converts figures into metrics with cAdvisor's names. One table holds the name, the description and the source of each metric;
//! docs/reference/statistics.md, "Metrics", documents them.

use super::report::container_is_visible;
use super::stats::measured;
use crate::accounting::{ContainerFigures, Figures, ProcessCost};
use crate::lifecycle::View;
use cri::MetricType::{Counter, Gauge};
use nacelle_model::record::ContainerRecord;
use nacelle_model::state::ContainerState;
use nacelle_proto::{common, cri};

const NANOS: u64 = 1_000_000_000;
/// The kernel's default period of cpu.max in µs, and the shares that correspond to its default weight.
const USUAL_PERIOD: u64 = 100_000;
const USUAL_SHARES: u64 = 1024;

/// The labels of every metric, the same that kubelet gives to cAdvisor's metrics. In a pod's own metrics `container` and `image`
/// are empty, which means "no label".
const BASE: [&str; 6] = ["container", "id", "image", "name", "namespace", "pod"];

/// A running container.
struct Running<'a> {
    record: &'a ContainerRecord,
    at: i64,
    usage: &'a common::Usage,
    figures: &'a ContainerFigures,
    scratch: Option<&'a common::FileSystem>,
}

/// A pod with figures.
struct Pod<'a> {
    figures: &'a Figures,
    cost: Option<ProcessCost>,
}

/// Values of a metric, each with those of its labels that follow [`BASE`].
type Values = Vec<(Vec<String>, u64)>;

enum Read {
    One(fn(&Running) -> u64),
    Some(fn(&Running) -> Values),
    OfPod(fn(&Pod) -> Values),
}

struct Family {
    kind: cri::MetricType,
    name: &'static str,
    help: &'static str,
    labels: &'static [&'static str],
    read: Read,
}

const fn one(kind: cri::MetricType, name: &'static str, help: &'static str, read: fn(&Running) -> u64) -> Family {
    Family { kind, name, help, labels: &[], read: Read::One(read) }
}

const fn some(
    kind: cri::MetricType,
    name: &'static str,
    help: &'static str,
    labels: &'static [&'static str],
    read: fn(&Running) -> Values,
) -> Family {
    Family { kind, name, help, labels, read: Read::Some(read) }
}

const fn net(name: &'static str, help: &'static str, read: fn(&Pod) -> Values) -> Family {
    Family { kind: Counter, name, help, labels: &["interface"], read: Read::OfPod(read) }
}

const fn machine(kind: cri::MetricType, name: &'static str, help: &'static str, read: fn(&Pod) -> Values) -> Family {
    Family { kind, name, help, labels: &[], read: Read::OfPod(read) }
}

#[rustfmt::skip] // one line each, as a table
static FAMILIES: [Family; 60] = [
    one(Counter, "container_cpu_usage_seconds_total", "Processor time, in whole seconds.", |c| c.usage.cpu_nanos / NANOS),
    one(Counter, "container_cpu_user_seconds_total", "Processor time of programs, in whole seconds.", |c| c.usage.user_nanos / NANOS),
    one(Counter, "container_cpu_system_seconds_total", "Processor time of the kernel for them, in whole seconds.", |c| c.usage.system_nanos / NANOS),
    one(Counter, "container_cpu_cfs_periods_total", "Periods of the CPU quota that were begun.", |c| c.usage.periods),
    one(Counter, "container_cpu_cfs_throttled_periods_total", "Periods in which the CPU quota did not last.", |c| c.usage.throttled_periods),
    one(Counter, "container_cpu_cfs_throttled_seconds_total", "Time without a CPU because the quota was used up, in whole seconds.", |c| c.usage.throttled_nanos / NANOS),

    one(Gauge, "container_memory_usage_bytes", "Memory in use, with the page cache.", |c| c.usage.memory_bytes),
    one(Gauge, "container_memory_working_set_bytes", "Memory in use, without page cache that has not been used for long.", |c| c.usage.memory_bytes.saturating_sub(c.usage.inactive_file_bytes)),
    one(Gauge, "container_memory_max_usage_bytes", "The most memory that was in use.", |c| c.usage.peak_bytes),
    one(Gauge, "container_memory_rss", "Anonymous memory, in bytes.", |c| c.usage.anonymous_bytes),
    one(Gauge, "container_memory_cache", "Page cache, in bytes.", |c| c.usage.cached_bytes),
    one(Gauge, "container_memory_mapped_file", "Mapped files, in bytes.", |c| c.usage.mapped_bytes),
    one(Gauge, "container_memory_kernel_usage", "Memory of the guest's kernel for it, in bytes.", |c| c.usage.kernel_bytes),
    one(Gauge, "container_memory_swap", "Swap in use, in bytes.", |c| c.usage.swap_bytes),
    one(Counter, "container_memory_failcnt", "How often memory was wanted beyond the limit.", |c| c.usage.limit_hits),
    some(Counter, "container_memory_failures_total", "Page faults.", &["failure_type", "scope"], faults),
    one(Counter, "container_oom_events_total", "Processes that were killed for want of memory.", |c| c.usage.oom_kills),
    some(Gauge, "container_hugetlb_usage_bytes", "Huge pages in use, in bytes.", &["pagesize"], |c| c.details().map_or(vec![], |d| d.hugepages.iter().map(|p| (vec![p.size.clone()], p.bytes)).collect())),
    some(Gauge, "container_hugetlb_max_usage_bytes", "The most huge pages that were seen in use, in bytes.", &["pagesize"], |c| c.figures.max_hugepages.iter().map(|(size, bytes)| (vec![size.clone()], *bytes)).collect()),

    some(Counter, "container_pressure_cpu_waiting_seconds_total", "Time in which some process waited for a CPU, in whole seconds.", &[], |c| waiting(c.usage.cpu_pressure)),
    some(Counter, "container_pressure_cpu_stalled_seconds_total", "Time in which all processes waited for a CPU, in whole seconds.", &[], |c| stalled(c.usage.cpu_pressure)),
    some(Counter, "container_pressure_memory_waiting_seconds_total", "Time in which some process waited for memory, in whole seconds.", &[], |c| waiting(c.usage.memory_pressure)),
    some(Counter, "container_pressure_memory_stalled_seconds_total", "Time in which all processes waited for memory, in whole seconds.", &[], |c| stalled(c.usage.memory_pressure)),
    some(Counter, "container_pressure_io_waiting_seconds_total", "Time in which some process waited for disks, in whole seconds.", &[], |c| waiting(c.usage.io_pressure)),
    some(Counter, "container_pressure_io_stalled_seconds_total", "Time in which all processes waited for disks, in whole seconds.", &[], |c| stalled(c.usage.io_pressure)),

    some(Gauge, "container_fs_usage_bytes", "What it wrote to its root, in bytes on the disk.", &["device"], |c| c.disk_of_root(c.figures.layer.map(|layer| layer.bytes))),
    some(Gauge, "container_fs_limit_bytes", "Bytes of the disk with its root.", &["device"], |c| c.disk_of_root(c.scratch.map(|s| s.bytes))),
    some(Gauge, "container_fs_inodes_total", "Inodes of the disk with its root.", &["device"], |c| c.disk_of_root(c.scratch.map(|s| s.inodes))),
    some(Gauge, "container_fs_inodes_free", "Free inodes of the disk with its root.", &["device"], |c| c.disk_of_root(c.scratch.map(|s| s.free_inodes))),
    some(Counter, "container_fs_reads_bytes_total", "Bytes that were read from the disk.", &["device"], |c| c.disks(|d| d.read_bytes)),
    some(Counter, "container_fs_reads_total", "Reads of the disk.", &["device"], |c| c.disks(|d| d.reads)),
    some(Counter, "container_fs_writes_bytes_total", "Bytes that were written to the disk.", &["device"], |c| c.disks(|d| d.written_bytes)),
    some(Counter, "container_fs_writes_total", "Writes to the disk.", &["device"], |c| c.disks(|d| d.writes)),
    some(Counter, "container_blkio_device_usage_total", "Bytes that were moved from and to the disk.", &["device", "major", "minor", "operation"], moved),

    one(Gauge, "container_processes", "Processes.", |c| c.usage.processes),
    one(Gauge, "container_threads", "Threads.", |c| c.usage.threads),
    one(Gauge, "container_threads_max", "Threads that are allowed; 0: no limit.", |c| c.usage.threads_limit.unwrap_or(0)),
    one(Gauge, "container_file_descriptors", "Open file descriptors.", |c| c.details().map_or(0, |d| d.descriptors)),
    one(Gauge, "container_sockets", "Open sockets.", |c| c.details().map_or(0, |d| d.sockets)),
    some(Gauge, "container_ulimits_soft", "Soft limits of the first process.", &["ulimit"], |c| c.details().and_then(|d| d.open_files_limit).map(|limit| (vec!["max_open_files".into()], limit)).into_iter().collect()),

    one(Gauge, "container_spec_cpu_period", "Period of the CPU quota, in microseconds.", |c| positive(c.record.resources().cpu_period).unwrap_or(USUAL_PERIOD)),
    some(Gauge, "container_spec_cpu_quota", "CPU quota in each period, in microseconds.", &[], |c| positive(c.record.resources().cpu_quota).map(|quota| (vec![], quota)).into_iter().collect()),
    one(Gauge, "container_spec_cpu_shares", "CPU shares.", |c| positive(c.record.resources().cpu_shares).unwrap_or(USUAL_SHARES)),
    one(Gauge, "container_spec_memory_limit_bytes", "Memory limit; 0: none.", |c| positive(c.record.resources().memory_limit).unwrap_or(0)),
    one(Gauge, "container_spec_memory_reservation_limit_bytes", "Memory that is left to it when memory is scarce; 0: none.", |c| c.record.resources().unified.get("memory.low").and_then(|low| low.trim().parse().ok()).unwrap_or(0)),
    one(Gauge, "container_spec_memory_swap_limit_bytes", "Limit of memory and swap together; 0: none.", |c| positive(c.record.resources().memory_swap_limit).unwrap_or(0)),
    one(Gauge, "container_start_time_seconds", "When it started, in seconds since 1970.", |c| seconds(c.record.started_at)),
    one(Gauge, "container_last_seen", "When these figures were read, in seconds since 1970.", |c| seconds(c.at)),

    net("container_network_receive_bytes_total", "Bytes received.", |p| p.interfaces(|i| i.rx_bytes)),
    net("container_network_receive_packets_total", "Packets received.", |p| p.interfaces(|i| i.rx_packets)),
    net("container_network_receive_packets_dropped_total", "Packets dropped on arrival.", |p| p.interfaces(|i| i.rx_dropped)),
    net("container_network_receive_errors_total", "Errors on arrival.", |p| p.interfaces(|i| i.rx_errors)),
    net("container_network_transmit_bytes_total", "Bytes sent.", |p| p.interfaces(|i| i.tx_bytes)),
    net("container_network_transmit_packets_total", "Packets sent.", |p| p.interfaces(|i| i.tx_packets)),
    net("container_network_transmit_packets_dropped_total", "Packets dropped instead of sent.", |p| p.interfaces(|i| i.tx_dropped)),
    net("container_network_transmit_errors_total", "Errors in sending.", |p| p.interfaces(|i| i.tx_errors)),

    machine(Counter, "nacelle_machine_cpu_seconds_total", "Processor time of the node for the pod's machine, in whole seconds.", |p| p.machine(|cost, _| cost.cpu_nanos / NANOS)),
    machine(Gauge, "nacelle_machine_memory_bytes", "Memory of the node that the pod's machine takes.", |p| p.machine(|cost, _| cost.memory_bytes)),
    machine(Gauge, "nacelle_machine_overhead_cpu_seconds", "Of the machine's processor time, what its containers did not use.", |p| p.machine(|cost, used| cost.cpu_nanos.saturating_sub(used.cpu_nanos) / NANOS)),
    machine(Gauge, "nacelle_machine_overhead_memory_bytes", "Of the machine's memory, what its containers do not use.", |p| p.machine(|cost, used| cost.memory_bytes.saturating_sub(used.memory_bytes))),
];

impl Running<'_> {
    fn details(&self) -> Option<&common::Details> {
        self.figures.details.as_ref()
    }

    fn disk_of_root(&self, value: Option<u64>) -> Values {
        let of = |scratch: &common::FileSystem| value.map(|value| (vec![scratch.device.clone()], value));
        self.scratch.and_then(of).into_iter().collect()
    }

    fn disks(&self, value: fn(&common::DiskUsage) -> u64) -> Values {
        let disks = self.details().into_iter().flat_map(|details| &details.disks);
        disks.map(|disk| (vec![disk.device.clone()], value(disk))).collect()
    }
}

impl Pod<'_> {
    fn interfaces(&self, value: fn(&common::InterfaceUsage) -> u64) -> Values {
        self.figures.interfaces.iter().map(|found| (vec![found.name.clone()], value(found))).collect()
    }

    fn machine(&self, value: fn(&ProcessCost, &common::Usage) -> u64) -> Values {
        let used = self.figures.pod.as_ref().map(|used| used.usage).unwrap_or_default();
        self.cost.map(|cost| (vec![], value(&cost, &used))).into_iter().collect()
    }
}

/// Returns page faults by cAdvisor's labels. The kernel counts a cgroup with its descendants, so both scopes have the same value.
fn faults(container: &Running) -> Values {
    let usage = container.usage;
    let all = usage.page_faults.saturating_add(usage.major_page_faults);
    let kinds = [("pgfault", all), ("pgmajfault", usage.major_page_faults)];
    let scopes = |(kind, count): (&str, u64)| {
        ["container", "hierarchy"].map(|scope| (vec![kind.to_owned(), scope.to_owned()], count))
    };
    kinds.into_iter().flat_map(scopes).collect()
}

fn moved(container: &Running) -> Values {
    let disks = container.details().into_iter().flat_map(|details| &details.disks);
    let both = |disk: &common::DiskUsage| {
        let value = |operation: &str, bytes| {
            let labels = [disk.device.clone(), disk.major.to_string(), disk.minor.to_string(), operation.to_owned()];
            (labels.into(), bytes)
        };
        [value("Read", disk.read_bytes), value("Write", disk.written_bytes)]
    };
    disks.flat_map(both).collect()
}

fn waiting(pressure: Option<common::Pressure>) -> Values {
    stall(pressure.and_then(|pressure| pressure.some))
}

fn stalled(pressure: Option<common::Pressure>) -> Values {
    stall(pressure.and_then(|pressure| pressure.full))
}

fn stall(stall: Option<common::Stall>) -> Values {
    stall.map(|stall| (vec![], stall.total_nanos / NANOS)).into_iter().collect()
}

fn positive(number: i64) -> Option<u64> {
    u64::try_from(number).ok().filter(|number| *number > 0)
}

fn seconds(nanos: i64) -> u64 {
    u64::try_from(nanos).unwrap_or(0) / NANOS
}

/// Returns the descriptors of all metrics of [`pod`].
pub fn descriptors() -> Vec<cri::MetricDescriptor> {
    let descriptor = |family: &Family| cri::MetricDescriptor {
        name: family.name.to_owned(),
        help: family.help.to_owned(),
        label_keys: BASE.iter().chain(family.labels).map(|key| (*key).to_owned()).collect(),
    };
    FAMILIES.iter().map(descriptor).collect()
}

/// Returns the metrics of a pod and of its running containers.
pub fn pod(view: &View, figures: &Figures, cost: Option<ProcessCost>) -> cri::PodSandboxMetrics {
    let id = view.pod.id.as_str();
    let name = &view.pod.config.name;
    let own = Pod { figures, cost };
    let own = FAMILIES.iter().filter_map(|family| match family.read {
        Read::OfPod(read) => Some((family, read(&own))),
        Read::One(_) | Read::Some(_) => None,
    });
    let metrics = samples(own, &["", id, "", id, &name.namespace, &name.name], 0);
    let shown = view.containers.values().filter(|record| container_is_visible(record));
    let running = shown.filter(|record| record.state == ContainerState::Running).filter_map(|record| {
        let found = figures.containers.get(record.id.as_str())?;
        let usage = &found.used.as_ref()?.usage;
        let running = Running { record, at: figures.at, usage, figures: found, scratch: figures.scratch.as_ref() };
        let values = FAMILIES.iter().filter_map(|family| match family.read {
            Read::One(read) => Some((family, vec![(vec![], read(&running))])),
            Read::Some(read) => Some((family, read(&running))),
            Read::OfPod(_) => None,
        });
        let (id, config) = (record.id.as_str(), &record.config);
        let base = [&*config.name, id, &*config.user_image, id, &*name.namespace, &*name.name];
        let layer_at = found.layer.as_ref().map_or(0, |layer| measured(figures.at, layer));
        Some(cri::ContainerMetrics { container_id: id.to_owned(), metrics: samples(values, &base, layer_at) })
    });
    cri::PodSandboxMetrics { pod_sandbox_id: id.to_owned(), metrics, container_metrics: running.collect() }
}

/// Returns the samples of a metric family. A timestamp of 0 stands for the present; values measured earlier have the time of
/// their measurement.
fn samples<'a>(
    families: impl Iterator<Item = (&'a Family, Values)>,
    base: &[&str; BASE.len()],
    layer_at: i64,
) -> Vec<cri::Metric> {
    let of_family = |(family, values): (&'a Family, Values)| {
        let timestamp = if family.name == "container_fs_usage_bytes" { layer_at } else { 0 };
        values.into_iter().map(move |(labels, value)| cri::Metric {
            name: family.name.to_owned(),
            timestamp,
            metric_type: family.kind.into(),
            label_values: base.iter().map(|value| (*value).to_owned()).chain(labels).collect(),
            value: Some(cri::UInt64Value { value }),
        })
    };
    families.flat_map(of_family).collect()
}

#[cfg(test)]
mod tests;
