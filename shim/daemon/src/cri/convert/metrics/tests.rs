//! Tests that each metric has a descriptor and that none of those that critest expects is missing.

use super::*;
use crate::accounting::CgroupFigures;
use nacelle_model::resources::Resources;
use nacelle_model::testing::{container as container_record, pod as pod_record};
use std::collections::{BTreeMap, BTreeSet};

/// The names that critest 1.37 expects (pkg/validate/pod.go), without "container_".
const EXPECTED: &str = "blkio_device_usage_total cpu_cfs_periods_total cpu_cfs_throttled_periods_total \
    cpu_cfs_throttled_seconds_total cpu_system_seconds_total cpu_usage_seconds_total cpu_user_seconds_total \
    file_descriptors fs_inodes_free fs_inodes_total fs_limit_bytes fs_reads_bytes_total fs_reads_total fs_usage_bytes \
    fs_writes_bytes_total fs_writes_total hugetlb_max_usage_bytes hugetlb_usage_bytes last_seen memory_cache \
    memory_failcnt memory_failures_total memory_kernel_usage memory_mapped_file memory_max_usage_bytes memory_rss \
    memory_swap memory_usage_bytes memory_working_set_bytes network_receive_bytes_total network_receive_errors_total \
    network_receive_packets_dropped_total network_receive_packets_total network_transmit_bytes_total \
    network_transmit_errors_total network_transmit_packets_dropped_total network_transmit_packets_total \
    oom_events_total pressure_cpu_stalled_seconds_total pressure_cpu_waiting_seconds_total \
    pressure_io_stalled_seconds_total pressure_io_waiting_seconds_total pressure_memory_stalled_seconds_total \
    pressure_memory_waiting_seconds_total processes sockets spec_cpu_period spec_cpu_quota spec_cpu_shares \
    spec_memory_limit_bytes spec_memory_reservation_limit_bytes spec_memory_swap_limit_bytes start_time_seconds \
    threads threads_max ulimits_soft";

fn usage() -> common::Usage {
    let stall = |seconds: u64| Some(common::Stall { total_nanos: seconds * NANOS + 9, ..Default::default() });
    let pressure = |some, full| Some(common::Pressure { some: stall(some), full: stall(full) });
    common::Usage {
        cpu_nanos: 7 * NANOS + 5,
        user_nanos: 4 * NANOS,
        system_nanos: 3 * NANOS,
        memory_bytes: 1000,
        inactive_file_bytes: 100,
        page_faults: 10,
        major_page_faults: 2,
        threads_limit: None,
        threads: 5,
        processes: 3,
        cpu_pressure: pressure(1, 2),
        memory_pressure: pressure(3, 4),
        io_pressure: pressure(5, 6),
        ..Default::default()
    }
}

/// Returns a pod with one running container that has all figures, and one that has stopped.
fn world() -> (View, Figures) {
    let mut record = container_record(2, 1);
    record.state = ContainerState::Running;
    record.started_at = 1_700_000_000 * 1_000_000_000 + 7;
    record.resources = Some(Resources {
        cpu_quota: 20_000,
        memory_limit: 1 << 26,
        unified: [("memory.low".to_owned(), "77\n".to_owned())].into(),
        ..Default::default()
    });
    let disk = |device: &str| common::DiskUsage { device: device.into(), major: 254, minor: 1, ..Default::default() };
    let details = common::Details {
        descriptors: 9,
        sockets: 2,
        open_files_limit: Some(1024),
        disks: vec![disk("/dev/vda"), disk("/dev/vdb")],
        hugepages: vec![common::HugepageUsage { size: "2MB".into(), bytes: 4 }],
    };
    let figures = ContainerFigures {
        used: Some(CgroupFigures { usage: usage(), nano_cores: None }),
        layer: Some(common::Layer { bytes: 4096, inodes: 2, age_ms: 3 }),
        details: Some(details),
        max_hugepages: [("2MB".to_owned(), 8)].into(),
    };
    let ended = container_record(3, 1);
    let interface = |name: &str| common::InterfaceUsage { name: name.into(), rx_dropped: 6, ..Default::default() };
    let figures = Figures {
        at: 1_700_000_100 * 1_000_000_000,
        pod: Some(CgroupFigures { usage: usage(), nano_cores: None }),
        containers: [(record.id.to_string(), figures.clone()), (ended.id.to_string(), figures)].into(),
        interfaces: ["eth0", "br0"].map(interface).into(),
        scratch: Some(common::FileSystem { device: "/dev/vdb".into(), bytes: 1 << 30, inodes: 50, free_inodes: 40 }),
        guest_used: None,
    };
    (View::new(&pod_record(1), [record, ended].iter(), None), figures)
}

fn cost() -> Option<ProcessCost> {
    Some(ProcessCost { cpu_nanos: 9 * NANOS, memory_bytes: 500, anonymous_bytes: 400 })
}

#[test]
fn every_name_that_critest_looks_for_is_described() {
    let descriptors = descriptors();
    let names: BTreeSet<&str> = descriptors.iter().map(|found| found.name.as_str()).collect();
    assert_eq!(names.len(), descriptors.len(), "a name twice");
    let own: Vec<&&str> = names.iter().filter(|name| name.starts_with("nacelle_")).collect();
    assert_eq!(own.len(), 4);
    let expected: BTreeSet<String> = EXPECTED.split_whitespace().map(|name| format!("container_{name}")).collect();
    assert_eq!(expected.len(), 56);
    let found: BTreeSet<String> =
        names.iter().filter(|name| !name.starts_with("nacelle_")).map(|name| (*name).to_owned()).collect();
    assert_eq!(found, expected);
    assert!(descriptors.iter().all(|found| found.help.ends_with('.')));
}

#[test]
fn what_is_sent_is_described_and_has_a_value_for_each_label() {
    let (view, figures) = world();
    let sent = pod(&view, &figures, cost());
    assert_eq!(sent.pod_sandbox_id, view.pod.id.as_str());
    assert_eq!(sent.container_metrics.len(), 1, "what does not run has none");
    let all: Vec<&cri::Metric> =
        sent.metrics.iter().chain(sent.container_metrics.iter().flat_map(|container| &container.metrics)).collect();
    let keys: BTreeMap<String, Vec<String>> =
        descriptors().into_iter().map(|found| (found.name, found.label_keys)).collect();
    let mut series = BTreeSet::new();
    for metric in &all {
        assert_eq!(metric.label_values.len(), keys[&metric.name].len(), "{}", metric.name);
        let counts = (metric.name.ends_with("_total") && metric.name != "container_fs_inodes_total")
            || metric.name == "container_memory_failcnt";
        assert_eq!(metric.metric_type() == Counter, counts, "{}", metric.name);
        assert!(series.insert((&metric.name, &metric.label_values)), "{metric:?} twice");
    }
    let names: BTreeSet<&String> = all.iter().map(|metric| &metric.name).collect();
    assert_eq!(names, keys.keys().collect(), "described, and not sent");
}

#[test]
fn each_metric_has_its_figure() {
    let (view, figures) = world();
    let sent = pod(&view, &figures, cost());
    let container = &sent.container_metrics[0].metrics;
    let values = |metrics: &[cri::Metric], name: &str| -> Vec<(Vec<String>, u64)> {
        let found = metrics.iter().filter(|metric| metric.name == name);
        found.map(|metric| (metric.label_values[BASE.len()..].to_vec(), metric.value.unwrap().value)).collect()
    };
    let value = |name: &str| values(container, name)[0].1;
    for (name, expected) in [
        ("container_cpu_usage_seconds_total", 7),
        ("container_memory_working_set_bytes", 900),
        ("container_pressure_io_stalled_seconds_total", 6),
        ("container_pressure_memory_waiting_seconds_total", 3),
        ("container_threads", 5),
        ("container_threads_max", 0),
        ("container_sockets", 2),
        ("container_hugetlb_max_usage_bytes", 8),
        ("container_spec_cpu_period", 100_000),
        ("container_spec_cpu_quota", 20_000),
        ("container_spec_cpu_shares", 1024),
        ("container_spec_memory_limit_bytes", 1 << 26),
        ("container_spec_memory_reservation_limit_bytes", 77),
        ("container_spec_memory_swap_limit_bytes", 0),
        ("container_start_time_seconds", 1_700_000_000),
        ("container_last_seen", 1_700_000_100),
        ("container_fs_usage_bytes", 4096),
        ("container_fs_inodes_free", 40),
    ] {
        assert_eq!(value(name), expected, "{name}");
    }
    let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
    let faults = values(container, "container_memory_failures_total");
    assert_eq!(faults[0], (words(&["pgfault", "container"]), 12));
    assert_eq!((faults.len(), &faults[3]), (4, &(words(&["pgmajfault", "hierarchy"]), 2)));
    let moved = values(container, "container_blkio_device_usage_total");
    assert_eq!((moved.len(), &moved[1].0), (4, &words(&["/dev/vda", "254", "1", "Write"])));
    let dropped = values(&sent.metrics, "container_network_receive_packets_dropped_total");
    assert_eq!(dropped, [(words(&["eth0"]), 6), (words(&["br0"]), 6)]);
    assert_eq!(values(&sent.metrics, "nacelle_machine_overhead_cpu_seconds")[0].1, 1);
    assert_eq!(values(&sent.metrics, "nacelle_machine_overhead_memory_bytes")[0].1, 0, "not below zero");

    let base = &container[0].label_values;
    let id = sent.container_metrics[0].container_id.as_str();
    assert_eq!(base[..], words(&["c", id, "busybox", id, "default", "web"]));
    let base = &sent.metrics[0].label_values[..BASE.len()];
    assert_eq!(base, words(&["", view.pod.id.as_str(), "", view.pod.id.as_str(), "default", "web"]));
    let times: BTreeSet<_> =
        container.iter().filter(|metric| metric.timestamp != 0).map(|m| (&*m.name, m.timestamp)).collect();
    assert_eq!(times, [("container_fs_usage_bytes", figures.at - 3_000_000)].into());
}

#[test]
fn without_a_cost_or_details_there_is_less() {
    let (view, mut figures) = world();
    for found in figures.containers.values_mut() {
        (found.details, found.layer) = (None, None);
        found.max_hugepages.clear();
    }
    figures.scratch = None;
    let sent = pod(&view, &figures, None);
    assert!(sent.metrics.iter().all(|metric| metric.name.starts_with("container_network_")));
    let names: BTreeSet<_> = sent.container_metrics[0].metrics.iter().map(|metric| metric.name.as_str()).collect();
    assert!(names.contains("container_cpu_usage_seconds_total") && !names.contains("container_fs_usage_bytes"));
    // A container without a cgroup has no samples.
    figures.containers.values_mut().for_each(|found| found.used = None);
    assert!(pod(&view, &figures, None).container_metrics.is_empty());
}
