//! Bounds the guest's statistics: each figure by what the VM has, each container to one that the pod process created, and each name
//! to a short one without spaces.
//!
//! The functions change a message in place and name all its fields, so that a new field does not compile without a bound.

use super::{Bounded, FromGuest};
use nacelle_proto::common::{
    ContainerUsage, Details, DiskUsage, FileSystem, HugepageUsage, InterfaceUsage, Layer, Pressure, Stall, Usage,
};
use nacelle_proto::{agent, pod};
use std::collections::BTreeSet;

/// The most network interfaces of a pod.
const MAX_INTERFACES: usize = 64;
/// The longest interface name, in bytes: IFNAMSIZ without the final zero.
const MAX_NAME: usize = 15;
/// The most block devices of a container, and the most sizes of its huge pages.
const MAX_PARTS: usize = 32;
/// The longest name of a block device or of a huge page size, in bytes.
const MAX_LABEL: usize = 64;
/// 100 %, in hundredths of a percent.
const HUNDRED_PERCENT: u32 = 10_000;

/// What the pod process knows of the pod, whatever its guest sends.
pub struct StatisticsBounds<'a> {
    /// Bytes of the VM's memory; `u64::MAX` without a VM.
    pub memory: u64,
    /// Bytes of the disk with the writable layers.
    pub disk: u64,
    /// The ids of the pod's containers.
    pub containers: BTreeSet<String>,
    /// The name of the pod's first network interface.
    pub interface: Option<&'a str>,
}

impl FromGuest<agent::StatsResponse> {
    /// Removes unknown and repeated entries, and lowers figures that are too large. The pod's first interface comes first.
    pub fn bound(self, mut bounds: StatisticsBounds) -> Bounded<pod::StatsResponse> {
        let agent::StatsResponse { mut pod, mut containers, mut interfaces, scratch, free_bytes } = self.0;
        pod.iter_mut().for_each(|usage| bounds.usage(usage));
        containers.retain(|container| bounds.containers.remove(&container.id));
        containers.iter_mut().for_each(|container| bounds.container(container));
        let mut names = BTreeSet::new();
        interfaces.retain(|found| is_name(&found.name) && names.insert(found.name.clone()));
        interfaces.sort_by_key(|found| Some(found.name.as_str()) != bounds.interface);
        interfaces.truncate(MAX_INTERFACES);
        interfaces.iter_mut().for_each(bound_interface);
        let mut scratch = scratch.filter(|found| is_label(&found.device));
        scratch.iter_mut().for_each(|found| bounds.scratch(found));
        let used_bytes = free_bytes.filter(|_| bounds.memory < u64::MAX).map(|free| bounds.memory.saturating_sub(free));
        Bounded(pod::StatsResponse { pod, containers, interfaces, scratch, used_bytes })
    }
}

impl StatisticsBounds<'_> {
    fn container(&self, container: &mut ContainerUsage) {
        let ContainerUsage { id: _, usage, layer, details } = container;
        usage.iter_mut().for_each(|usage| self.usage(usage));
        layer.iter_mut().for_each(|layer| self.layer(layer));
        details.iter_mut().for_each(|details| self.details(details));
    }

    fn usage(&self, usage: &mut Usage) {
        let Usage {
            cpu_nanos,
            memory_bytes,
            memory_limit_bytes,
            anonymous_bytes,
            inactive_file_bytes,
            page_faults,
            major_page_faults,
            swap_bytes,
            swap_available_bytes,
            processes,
            cpu_pressure,
            memory_pressure,
            io_pressure,
            user_nanos,
            system_nanos,
            periods,
            throttled_periods,
            throttled_nanos,
            cached_bytes,
            mapped_bytes,
            kernel_bytes,
            peak_bytes,
            limit_hits,
            oom_kills,
            threads,
            threads_limit,
        } = usage;
        let memory =
            [memory_bytes, anonymous_bytes, inactive_file_bytes, cached_bytes, mapped_bytes, kernel_bytes, peak_bytes];
        lower_to(memory, self.memory);
        lower_to([cpu_nanos, user_nanos, system_nanos, periods, throttled_periods, throttled_nanos], u64::MAX);
        lower_to([page_faults, major_page_faults, swap_bytes, swap_available_bytes], u64::MAX);
        lower_to([processes, threads, limit_hits, oom_kills], u64::MAX);
        lower_to(memory_limit_bytes.iter_mut().chain(threads_limit), u64::MAX);
        for Pressure { some, full } in [cpu_pressure, memory_pressure, io_pressure].into_iter().flatten() {
            some.iter_mut().chain(full).for_each(bound_stall);
        }
    }

    /// Readers use devices and page sizes as keys, so each name occurs once.
    fn details(&self, details: &mut Details) {
        let Details { descriptors, sockets, open_files_limit, disks, hugepages } = details;
        lower_to([descriptors, sockets], u64::MAX);
        lower_to(open_files_limit, u64::MAX);
        let mut names = BTreeSet::new();
        let mut is_new = |name: &str| is_label(name) && names.insert(name.to_owned());
        retain_first(disks, MAX_PARTS, |disk| is_new(&disk.device));
        retain_first(hugepages, MAX_PARTS, |pages| is_new(&pages.size));
        for DiskUsage { device: _, major: _, minor: _, read_bytes, written_bytes, reads, writes } in disks {
            lower_to([read_bytes, written_bytes, reads, writes], u64::MAX);
        }
        for HugepageUsage { size: _, bytes } in hugepages {
            lower_to([bytes], self.memory);
        }
    }

    fn layer(&self, layer: &mut Layer) {
        let Layer { bytes, inodes, age_ms } = layer;
        lower_to([bytes], self.disk);
        lower_to([inodes, age_ms], u64::MAX);
    }

    fn scratch(&self, scratch: &mut FileSystem) {
        let FileSystem { device: _, bytes, inodes, free_inodes } = scratch;
        lower_to([bytes], self.disk);
        lower_to([inodes, free_inodes], u64::MAX);
    }
}

/// Lowers numbers to at most `maximum`, and to the largest int64: CRI and Prometheus clients read them as that.
fn lower_to<'a>(numbers: impl IntoIterator<Item = &'a mut u64>, maximum: u64) {
    let maximum = maximum.min(i64::MAX.unsigned_abs());
    for number in numbers {
        *number = (*number).min(maximum);
    }
}

fn bound_stall(stall: &mut Stall) {
    let Stall { total_nanos, avg10, avg60, avg300 } = stall;
    lower_to([total_nanos], u64::MAX);
    for average in [avg10, avg60, avg300] {
        *average = (*average).min(HUNDRED_PERCENT);
    }
}

fn bound_interface(interface: &mut InterfaceUsage) {
    let InterfaceUsage {
        name: _,
        rx_bytes,
        rx_errors,
        tx_bytes,
        tx_errors,
        rx_packets,
        rx_dropped,
        tx_packets,
        tx_dropped,
    } = interface;
    lower_to([rx_bytes, rx_errors, tx_bytes, tx_errors, rx_packets, rx_dropped, tx_packets, tx_dropped], u64::MAX);
}

/// Keeps the first `maximum` elements that pass the test; the test does not see those after them.
fn retain_first<T>(list: &mut Vec<T>, maximum: usize, mut passes: impl FnMut(&T) -> bool) {
    let mut kept = 0;
    list.retain(|element| {
        let keep = kept < maximum && passes(element);
        kept += usize::from(keep);
        keep
    });
}

fn is_name(name: &str) -> bool {
    (1..=MAX_NAME).contains(&name.len()) && name.chars().all(|c| c.is_ascii_graphic() && c != '/')
}

fn is_label(label: &str) -> bool {
    (1..=MAX_LABEL).contains(&label.len()) && label.chars().all(|c| c.is_ascii_graphic())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use prost::Message;

    fn bounds() -> StatisticsBounds<'static> {
        let containers = ["a", "b"].map(str::to_owned).into();
        StatisticsBounds { memory: 1 << 27, disk: 1 << 29, containers, interface: Some("eth0") }
    }

    fn interface(name: &str) -> InterfaceUsage {
        InterfaceUsage { name: name.into(), rx_bytes: u64::MAX, ..Default::default() }
    }

    #[test]
    fn figures_are_passed_on() {
        let usage = Usage {
            cpu_nanos: 1,
            memory_bytes: 2,
            memory_limit_bytes: Some(3),
            anonymous_bytes: 4,
            inactive_file_bytes: 5,
            page_faults: 6,
            major_page_faults: 7,
            swap_bytes: 8,
            swap_available_bytes: 9,
            processes: 10,
            io_pressure: Some(Pressure {
                some: Some(Stall { total_nanos: 11, avg10: 12, avg60: 13, avg300: 14 }),
                full: None,
            }),
            user_nanos: 15,
            system_nanos: 16,
            periods: 17,
            throttled_periods: 18,
            throttled_nanos: 19,
            cached_bytes: 20,
            mapped_bytes: 21,
            kernel_bytes: 22,
            peak_bytes: 23,
            limit_hits: 24,
            oom_kills: 25,
            threads: 26,
            threads_limit: Some(27),
            ..Default::default()
        };
        let layer = Layer { bytes: 4096, inodes: 3, age_ms: 5 };
        let disk = DiskUsage {
            device: "/dev/vda".into(),
            major: 1,
            minor: 2,
            read_bytes: 3,
            written_bytes: 4,
            reads: 5,
            writes: 6,
        };
        let details = Details {
            descriptors: 1,
            sockets: 2,
            open_files_limit: Some(3),
            disks: vec![disk],
            hugepages: vec![HugepageUsage { size: "2MB".into(), bytes: 4 }],
        };
        let container =
            ContainerUsage { id: "a".into(), usage: Some(usage), layer: Some(layer), details: Some(details) };
        let interface = InterfaceUsage {
            name: "eth0".into(),
            rx_bytes: 1,
            rx_errors: 2,
            tx_bytes: 3,
            tx_errors: 4,
            rx_packets: 5,
            rx_dropped: 6,
            tx_packets: 7,
            tx_dropped: 8,
        };
        let answer = agent::StatsResponse {
            pod: Some(usage),
            containers: vec![container],
            interfaces: vec![interface],
            scratch: Some(FileSystem { device: "/dev/vdb".into(), bytes: 1, inodes: 2, free_inodes: 3 }),
            // Half of the memory is free, so the other half is used.
            free_bytes: Some(1 << 26),
        };
        // The two messages have the same fields, by number; free and used bytes are equal here.
        assert_eq!(FromGuest(answer.clone()).bound(bounds()).encode_to_vec(), answer.encode_to_vec());
    }

    #[test]
    fn impossible_figures_are_lowered() {
        let stall = Stall { total_nanos: u64::MAX, avg10: u32::MAX, avg60: 10_001, avg300: 1 };
        let usage = Usage {
            cpu_nanos: u64::MAX,
            memory_bytes: u64::MAX,
            cpu_pressure: Some(Pressure { some: None, full: Some(stall) }),
            ..Default::default()
        };
        let layer = Layer { bytes: u64::MAX, inodes: u64::MAX, age_ms: u64::MAX };
        let disk = |device: &str| DiskUsage { device: device.into(), reads: u64::MAX, ..Default::default() };
        let long = "x".repeat(MAX_LABEL + 1);
        let details = Details {
            disks: ["/dev/vda", "/dev/vda", "", "a b", "\u{e9}", &long].into_iter().map(disk).collect(),
            hugepages: vec![HugepageUsage { size: "2MB".into(), bytes: u64::MAX }; 1000],
            ..Default::default()
        };
        let container = |id: &str| ContainerUsage {
            id: id.into(),
            usage: Some(usage),
            layer: Some(layer),
            details: Some(details.clone()),
        };
        let names = ["br0", "eth0", "eth0", "", "a b", "x/y", "sixteen-letters!", "\u{e9}"];
        let answer = agent::StatsResponse {
            pod: Some(usage),
            containers: ["a", "a", "unknown", "b"].map(container).into(),
            interfaces: names.into_iter().map(interface).chain((0..100).map(|n| interface(&format!("v{n}")))).collect(),
            scratch: Some(FileSystem { device: "x".into(), bytes: u64::MAX, ..Default::default() }),
            free_bytes: Some(u64::MAX),
        };
        let bounded = FromGuest(answer).bound(bounds()).into_inner();
        assert_eq!(bounded.containers.iter().map(|c| c.id.as_str()).collect::<Vec<_>>(), ["a", "b"]);
        let usage = bounded.pod.unwrap();
        assert_eq!((usage.cpu_nanos, usage.memory_bytes), (i64::MAX.unsigned_abs(), 1 << 27));
        let stall = usage.cpu_pressure.unwrap().full.unwrap();
        assert_eq!((stall.avg10, stall.avg60, stall.avg300), (10_000, 10_000, 1));
        let layer = bounded.containers[0].layer.unwrap();
        assert_eq!((layer.bytes, layer.age_ms), (1 << 29, i64::MAX.unsigned_abs()));
        let names: Vec<_> = bounded.interfaces.iter().take(3).map(|found| found.name.as_str()).collect();
        assert_eq!((names, bounded.interfaces.len()), (vec!["eth0", "br0", "v0"], MAX_INTERFACES));
        assert_eq!(bounded.interfaces[0].rx_bytes, i64::MAX.unsigned_abs());
        let details = bounded.containers[0].details.as_ref().unwrap();
        assert_eq!((details.disks.len(), details.disks[0].reads), (1, i64::MAX.unsigned_abs()));
        assert_eq!(details.hugepages, [HugepageUsage { size: "2MB".into(), bytes: 1 << 27 }]);
        assert_eq!((bounded.scratch.unwrap().bytes, bounded.used_bytes), (1 << 29, Some(0)));
        let none = StatisticsBounds { memory: u64::MAX, ..bounds() };
        let answer = agent::StatsResponse { free_bytes: Some(1), ..Default::default() };
        assert_eq!(FromGuest(answer).bound(none).used_bytes, None, "without a VM");
    }

    fn names() -> impl Strategy<Value = String> {
        prop_oneof!["a|b|eth0|/dev/vda|2MB", "\\PC{0,80}"]
    }

    fn answers() -> impl Strategy<Value = agent::StatsResponse> {
        let number = || prop_oneof![any::<u64>(), Just(u64::MAX), 0..9u64];
        let usage = (number(), number(), prop::option::of(number())).prop_map(|(a, b, c)| Usage {
            cpu_nanos: a,
            memory_bytes: b,
            memory_limit_bytes: c,
            user_nanos: b,
            peak_bytes: a,
            threads_limit: c,
            cpu_pressure: Some(Pressure {
                some: None,
                full: Some(Stall { total_nanos: a, avg10: u32::MAX, ..Default::default() }),
            }),
            ..Default::default()
        });
        let disk = (names(), number()).prop_map(|(device, reads)| DiskUsage { device, reads, ..Default::default() });
        let pages = (names(), number()).prop_map(|(size, bytes)| HugepageUsage { size, bytes });
        let parts = (prop::collection::vec(disk, 0..40), prop::collection::vec(pages, 0..40));
        let details = (parts, number()).prop_map(|((disks, hugepages), sockets)| Details {
            disks,
            hugepages,
            sockets,
            ..Default::default()
        });
        let container = (names(), prop::option::of(usage.clone()), prop::option::of(details));
        let container = container.prop_map(|(id, usage, details)| ContainerUsage { id, usage, layer: None, details });
        let interface = (names(), number()).prop_map(|(name, tx_dropped)| InterfaceUsage {
            name,
            tx_dropped,
            ..Default::default()
        });
        let scratch =
            (names(), number()).prop_map(|(device, bytes)| FileSystem { device, bytes, ..Default::default() });
        let lists = (prop::collection::vec(container, 0..4), prop::collection::vec(interface, 0..80));
        let rest = (prop::option::of(scratch), prop::option::of(number()));
        (prop::option::of(usage), lists, rest).prop_map(|(pod, (containers, interfaces), (scratch, free_bytes))| {
            agent::StatsResponse { pod, containers, interfaces, scratch, free_bytes }
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]
        #[test]
        fn any_bytes_are_bounded(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            crate::fuzz::statistics(&bytes);
        }

        #[test]
        fn any_well_formed_response_is_bounded(answer in answers()) {
            crate::fuzz::statistics(&answer.encode_to_vec());
        }
    }
}
