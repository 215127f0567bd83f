//! Converts figures into CRI's statistics, and applies the filters of their lists.

use super::report::{map, matches_labels, metadata, pod_metadata};
use crate::accounting::{CgroupFigures, Figures, VmCost};
use crate::lifecycle::View;
use nacelle_model::record::{ContainerRecord, PodRecord};
use nacelle_model::state::ContainerState;
use nacelle_proto::{common, cri};
use serde_json::json;

/// Returns whether the container matches the filter.
pub fn matches_container_filter(container: &ContainerRecord, filter: Option<&cri::ContainerStatsFilter>) -> bool {
    let Some(filter) = filter else { return true };
    container.id.as_str().starts_with(&filter.id)
        && container.pod.as_str().starts_with(&filter.pod_sandbox_id)
        && matches_labels(&container.config.labels, &filter.label_selector)
}

/// Returns whether the pod matches the filter.
pub fn matches_pod_filter(pod: &PodRecord, filter: Option<&cri::PodSandboxStatsFilter>) -> bool {
    let Some(filter) = filter else { return true };
    pod.id.as_str().starts_with(&filter.id) && matches_labels(&pod.config.labels, &filter.label_selector)
}

fn value(value: u64) -> Option<cri::UInt64Value> {
    Some(cri::UInt64Value { value })
}

fn psi(pressure: Option<common::Pressure>) -> Option<cri::PsiStats> {
    let percent = |hundredths: u32| f64::from(hundredths) / 100.0;
    let data = |stall: common::Stall| cri::PsiData {
        total: stall.total_nanos,
        avg10: percent(stall.avg10),
        avg60: percent(stall.avg60),
        avg300: percent(stall.avg300),
    };
    pressure.map(|pressure| cri::PsiStats { full: pressure.full.map(data), some: pressure.some.map(data) })
}

fn cpu(used: &CgroupFigures, timestamp: i64) -> cri::CpuUsage {
    cri::CpuUsage {
        timestamp,
        usage_core_nano_seconds: value(used.usage.cpu_nanos),
        usage_nano_cores: used.nano_cores.and_then(value),
        psi: psi(used.usage.cpu_pressure),
    }
}

fn memory(usage: &common::Usage, timestamp: i64) -> cri::MemoryUsage {
    let working_set = usage.memory_bytes.saturating_sub(usage.inactive_file_bytes);
    cri::MemoryUsage {
        timestamp,
        working_set_bytes: value(working_set),
        available_bytes: usage.memory_limit_bytes.and_then(|limit| value(limit.saturating_sub(working_set))),
        usage_bytes: value(usage.memory_bytes),
        rss_bytes: value(usage.anonymous_bytes),
        page_faults: value(usage.page_faults),
        major_page_faults: value(usage.major_page_faults),
        psi: psi(usage.memory_pressure),
    }
}

fn io(usage: &common::Usage, timestamp: i64) -> Option<cri::IoUsage> {
    psi(usage.io_pressure).map(|psi| cri::IoUsage { timestamp, psi: Some(psi) })
}

/// Returns a container's statistics, as far as there are figures: a stopped container uses only its disk. `mountpoint` is that of
/// ImageFsInfo.
pub fn container(record: &ContainerRecord, figures: Option<&Figures>, mountpoint: &str) -> cri::ContainerStats {
    let found = figures.and_then(|figures| Some((figures.at, figures.containers.get(record.id.as_str())?)));
    let used =
        found.filter(|_| record.state == ContainerState::Running).and_then(|(at, f)| Some((at, f.used.as_ref()?)));
    let layer = found.and_then(|(at, figures)| Some((at, figures.layer.as_ref()?)));
    cri::ContainerStats {
        attributes: Some(cri::ContainerAttributes {
            id: record.id.to_string(),
            metadata: Some(metadata(record)),
            labels: map(&record.config.labels),
            annotations: map(&record.config.annotations),
        }),
        cpu: used.map(|(at, used)| cpu(used, at)),
        memory: used.map(|(at, used)| memory(&used.usage, at)),
        writable_layer: layer.map(|(at, layer)| cri::FilesystemUsage {
            timestamp: measured(at, layer),
            fs_id: Some(cri::FilesystemIdentifier { mountpoint: mountpoint.to_owned() }),
            used_bytes: value(layer.bytes),
            inodes_used: value(layer.inodes),
        }),
        swap: used.map(|(timestamp, used)| cri::SwapUsage {
            timestamp,
            swap_available_bytes: value(used.usage.swap_available_bytes),
            swap_usage_bytes: value(used.usage.swap_bytes),
        }),
        io: used.and_then(|(at, used)| io(&used.usage, at)),
    }
}

/// Returns the time of a layer's measurement; CRI requires a time after 1970.
pub(super) fn measured(at: i64, layer: &common::Layer) -> i64 {
    let age = i64::try_from(layer.age_ms).unwrap_or(i64::MAX).saturating_mul(1_000_000);
    at.saturating_sub(age).max(1)
}

/// Returns `None` without a default interface: kubelet dereferences that without a check, and crashes if it is missing.
fn network(figures: &Figures) -> Option<cri::NetworkUsage> {
    let interface = |found: &common::InterfaceUsage| cri::NetworkInterfaceUsage {
        name: found.name.clone(),
        rx_bytes: value(found.rx_bytes),
        rx_errors: value(found.rx_errors),
        tx_bytes: value(found.tx_bytes),
        tx_errors: value(found.tx_errors),
    };
    let mut interfaces = figures.interfaces.iter().map(interface);
    let default_interface = Some(interfaces.next()?);
    Some(cri::NetworkUsage { timestamp: figures.at, default_interface, interfaces: interfaces.collect() })
}

/// Returns a pod's statistics, with those of its containers.
pub fn pod(view: &View, figures: &Figures, mountpoint: &str) -> cri::PodSandboxStats {
    let timestamp = figures.at;
    let shown = view.containers.values().filter(|container| super::report::container_is_visible(container));
    let used = figures.pod.as_ref();
    cri::PodSandboxStats {
        attributes: Some(cri::PodSandboxAttributes {
            id: view.pod.id.to_string(),
            metadata: Some(pod_metadata(&view.pod)),
            labels: map(&view.pod.config.labels),
            annotations: map(&view.pod.config.annotations),
        }),
        linux: Some(cri::LinuxPodSandboxStats {
            cpu: used.map(|used| cpu(used, timestamp)),
            memory: used.map(|used| memory(&used.usage, timestamp)),
            network: network(figures),
            process: used.map(|used| cri::ProcessUsage { timestamp, process_count: value(used.usage.processes) }),
            containers: shown.map(|record| container(record, Some(figures), mountpoint)).collect(),
            io: used.and_then(|used| io(&used.usage, timestamp)),
        }),
        windows: None,
    }
}

/// Returns the figures for which CRI has no field: use of the containers in the guest, use of the guest's kernel and agent, the
/// VM's cost on the node by purpose, the difference between them, and the node's own counters for the pod.
pub fn accounts(figures: Option<&Figures>, account: Option<VmCost>) -> serde_json::Value {
    let both = |cpu: i128, memory: i128| json!({ "cpuNanos": clamp(cpu), "memoryBytes": clamp(memory) });
    let used = figures.and_then(|figures| figures.pod.as_ref()).map(|used| &used.usage);
    let used = used.map(|usage| (i128::from(usage.cpu_nanos), i128::from(usage.memory_bytes)));
    let cost = account.map(|account| (i128::from(account.whole.cpu_nanos), i128::from(account.whole.memory_bytes)));
    let difference = used.zip(cost).map(|(used, cost)| both(cost.0 - used.0, cost.1 - used.1));
    let guest = figures.and_then(|figures| figures.guest_used).map(i128::from);
    let system = used.zip(guest).map(|(used, guest)| json!({ "memoryBytes": clamp((guest - used.1).max(0)) }));
    let machine = account.map(|account| {
        let (whole, guest) = (account.whole.memory_bytes, account.guest_bytes);
        json!({
            "cpuNanos": value64(account.whole.cpu_nanos), "memoryBytes": value64(whole),
            "anonymousBytes": value64(account.whole.anonymous_bytes), "guestBytes": value64(guest), "processBytes": value64(whole.saturating_sub(guest)),
        })
    });
    let node = account.and_then(|account| account.group).map(|group| {
        json!({
            "cpuNanos": value64(group.cpu_nanos), "memoryBytes": value64(group.memory_bytes),
            "anonymousBytes": value64(group.anonymous_bytes), "peakBytes": group.peak_bytes.map(value64),
        })
    });
    json!({
        "containers": used.map(|(cpu, memory)| both(cpu, memory)), "system": system, "machine": machine,
        "difference": difference, "node": node,
    })
}

fn value64(number: u64) -> i64 {
    clamp(number.into())
}

fn clamp(number: i128) -> i64 {
    i64::try_from(number).unwrap_or(if number < 0 { i64::MIN } else { i64::MAX })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::accounting::{ContainerFigures, ProcessCost};
    use nacelle_model::testing::{container as container_record, pod as pod_record};
    use nacelle_pod::GroupUsage;

    fn used() -> CgroupFigures {
        let stall = common::Stall { total_nanos: 9, avg10: 1234, avg60: 1, avg300: 10_000 };
        let usage = common::Usage {
            cpu_nanos: 5_000,
            memory_bytes: 1000,
            memory_limit_bytes: Some(2000),
            anonymous_bytes: 600,
            inactive_file_bytes: 100,
            page_faults: 7,
            major_page_faults: 8,
            swap_bytes: 1,
            swap_available_bytes: 2,
            processes: 3,
            io_pressure: Some(common::Pressure { some: Some(stall), full: None }),
            ..Default::default()
        };
        CgroupFigures { usage, nano_cores: Some(77) }
    }

    fn figures(id: &str) -> Figures {
        let layer = common::Layer { bytes: 4096, inodes: 2, age_ms: 3 };
        let container = ContainerFigures {
            used: Some(used()),
            layer: Some(layer),
            details: None,
            max_hugepages: Default::default(),
        };
        let interface = |name: &str| common::InterfaceUsage { name: name.into(), rx_bytes: 1, ..Default::default() };
        Figures {
            at: 10_000_000,
            pod: Some(used()),
            containers: [(id.to_owned(), container)].into(),
            interfaces: ["eth0", "br0"].map(interface).into(),
            scratch: None,
            guest_used: Some(1500),
        }
    }

    #[test]
    fn a_running_container_has_all_figures() {
        let mut record = container_record(2, 1);
        record.state = ContainerState::Running;
        let figures = figures(record.id.as_str());
        let stats = container(&record, Some(&figures), "/images");
        let number = |value: Option<cri::UInt64Value>| value.map(|value| value.value);
        let cpu = stats.cpu.unwrap();
        assert_eq!((cpu.timestamp, number(cpu.usage_core_nano_seconds)), (10_000_000, Some(5_000)));
        assert_eq!((number(cpu.usage_nano_cores), cpu.psi), (Some(77), None));
        let memory = stats.memory.unwrap();
        assert_eq!((number(memory.working_set_bytes), number(memory.available_bytes)), (Some(900), Some(1100)));
        assert_eq!((number(memory.usage_bytes), number(memory.rss_bytes)), (Some(1000), Some(600)));
        assert_eq!((number(memory.page_faults), number(memory.major_page_faults)), (Some(7), Some(8)));
        let swap = stats.swap.unwrap();
        assert_eq!((number(swap.swap_usage_bytes), number(swap.swap_available_bytes)), (Some(1), Some(2)));
        let psi = stats.io.unwrap().psi.unwrap();
        assert_eq!(psi.full, None);
        let some = psi.some.unwrap();
        assert_eq!((some.total, some.avg10, some.avg60, some.avg300), (9, 12.34, 0.01, 100.0));
        let layer = stats.writable_layer.unwrap();
        assert_eq!((layer.timestamp, layer.fs_id.unwrap().mountpoint.as_str()), (7_000_000, "/images"));
        assert_eq!((number(layer.used_bytes), number(layer.inodes_used)), (Some(4096), Some(2)));
    }

    #[test]
    fn without_a_default_interface_there_is_no_network() {
        let mut figures = figures("a");
        let reported = network(&figures).unwrap();
        assert_eq!((reported.default_interface.unwrap().name.as_str(), reported.interfaces.len()), ("eth0", 1));
        // A machine pod, or a guest that reports no interfaces.
        figures.interfaces = Default::default();
        assert_eq!(network(&figures), None);
    }

    #[test]
    fn what_does_not_run_uses_its_disk_only() {
        let record = container_record(2, 1);
        let stats = container(&record, Some(&figures(record.id.as_str())), "/images");
        assert_eq!((&stats.cpu, &stats.memory, &stats.swap, &stats.io), (&None, &None, &None, &None));
        assert!(stats.writable_layer.is_some());
        let unknown = container(&record, None, "/images");
        assert_eq!(unknown.attributes, stats.attributes);
        assert_eq!(unknown.writable_layer, None);
    }

    #[test]
    fn without_a_limit_nothing_is_said_to_be_available() {
        let usage = common::Usage { memory_bytes: 1, inactive_file_bytes: 2, ..Default::default() };
        let memory = memory(&usage, 1);
        assert_eq!((memory.available_bytes, memory.working_set_bytes), (None, value(0)));
    }

    #[test]
    fn filters_are_all_of_them_together() {
        let record = container_record(2, 1);
        let (key, label) = record.config.labels.iter().next().map(|(k, v)| (k.clone(), v.clone())).unwrap_or_default();
        let filter = |id: &str, pod: &str| cri::ContainerStatsFilter {
            id: id.into(),
            pod_sandbox_id: pod.into(),
            ..Default::default()
        };
        assert!(matches_container_filter(&record, None) && matches_container_filter(&record, Some(&filter("", ""))));
        assert!(matches_container_filter(&record, Some(&filter("0202", "01"))));
        assert!(!matches_container_filter(&record, Some(&filter("01", "01"))));
        assert!(!matches_container_filter(&record, Some(&filter("02", "02"))));
        let labelled = |value: &str| cri::ContainerStatsFilter {
            label_selector: [(key.clone(), value.to_owned())].into(),
            ..Default::default()
        };
        assert!(key.is_empty() || matches_container_filter(&record, Some(&labelled(&label))));
        assert!(!matches_container_filter(&record, Some(&labelled("other"))));

        let record = pod_record(1);
        let filter = |id: &str, app: &str| cri::PodSandboxStatsFilter {
            id: id.into(),
            label_selector: [("app".to_owned(), app.to_owned())].into(),
        };
        assert!(matches_pod_filter(&record, None) && matches_pod_filter(&record, Some(&filter("01", "web"))));
        assert!(
            !matches_pod_filter(&record, Some(&filter("02", "web")))
                && !matches_pod_filter(&record, Some(&filter("01", "db")))
        );
    }

    #[test]
    fn the_difference_may_be_below_zero() {
        let figures = figures("a");
        let group = GroupUsage { cpu_nanos: 5, memory_bytes: 4, anonymous_bytes: 3, peak_bytes: None };
        let whole = ProcessCost { cpu_nanos: 4_000, memory_bytes: u64::MAX, anonymous_bytes: 2 };
        let account = VmCost { whole, guest_bytes: 1 << 20, group: Some(group) };
        let reported = accounts(Some(&figures), Some(account));
        assert_eq!(reported["difference"]["cpuNanos"], -1000);
        assert_eq!(reported["machine"]["memoryBytes"], i64::MAX);
        assert_eq!(
            (&reported["machine"]["guestBytes"], &reported["system"]["memoryBytes"]),
            (&json!(1 << 20), &json!(500))
        );
        assert_eq!(reported["node"], json!({"cpuNanos": 5, "memoryBytes": 4, "anonymousBytes": 3, "peakBytes": null}));
        let reported = accounts(None, Some(VmCost { group: None, ..account }));
        assert!(["difference", "system", "node", "containers"].iter().all(|key| reported[key].is_null()), "{reported}");
    }
}
