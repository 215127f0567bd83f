//! Owns: what the guest says that its containers have used, made harmless: each figure within what the machine can
//! have, each container one that this process made, each name short and plain.
//! May use: the two protocols. No effects.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use nacelle_proto::{agent, common, pod};
use std::collections::BTreeSet;

/// The most interfaces that are passed on.
const MAX_INTERFACES: usize = 64;
/// IFNAMSIZ without the final zero.
const MAX_NAME: usize = 15;
/// Devices of one container that are passed on, and sizes of its huge pages.
const MAX_PARTS: usize = 32;
/// The name of a device, and a size of huge pages.
const MAX_LABEL: usize = 64;
/// A percentage, in hundredths.
const WHOLE: u32 = 10_000;

/// What is true of the machine, whatever its guest says.
pub struct Bounds<'a> {
    /// Bytes of the machine's memory; without a machine u64::MAX.
    pub memory: u64,
    /// Bytes of the disk with the writable layers.
    pub disk: u64,
    /// The ids of the containers.
    pub containers: BTreeSet<String>,
    /// The pod's first interface.
    pub interface: Option<&'a str>,
}

/// The guest's answer, within the bounds.
pub fn check(answer: agent::StatsResponse, mut bounds: Bounds) -> pod::StatsResponse {
    let mut containers = Vec::new();
    for container in answer.containers {
        if bounds.containers.remove(&container.id) {
            containers.push(common::ContainerUsage {
                id: container.id,
                usage: container.usage.map(|usage| bounds.usage(usage)),
                layer: container.layer.map(|layer| bounds.layer(layer)),
                details: container.details.map(|details| bounds.details(details)),
            });
        }
    }
    let mut names = BTreeSet::new();
    let mut interfaces: Vec<_> = answer.interfaces.into_iter().filter(|found| is_name(&found.name)).collect();
    interfaces.retain(|found| names.insert(found.name.clone()));
    interfaces.sort_by_key(|found| Some(found.name.as_str()) != bounds.interface);
    interfaces.truncate(MAX_INTERFACES);
    pod::StatsResponse {
        pod: answer.pod.map(|usage| bounds.usage(usage)),
        containers,
        interfaces: interfaces.into_iter().map(interface).collect(),
        scratch: answer.scratch.filter(|found| is_label(&found.device)).map(|found| common::FileSystem {
            device: found.device,
            bytes: count(found.bytes.min(bounds.disk)),
            inodes: count(found.inodes),
            free_inodes: count(found.free_inodes),
        }),
        used_bytes: answer
            .free_bytes
            .filter(|_| bounds.memory < u64::MAX)
            .map(|free| bounds.memory.saturating_sub(free)),
    }
}

impl Bounds<'_> {
    fn usage(&self, said: common::Usage) -> common::Usage {
        let memory = |bytes: u64| count(bytes.min(self.memory));
        common::Usage {
            cpu_nanos: count(said.cpu_nanos),
            memory_bytes: memory(said.memory_bytes),
            memory_limit_bytes: said.memory_limit_bytes.map(count),
            anonymous_bytes: memory(said.anonymous_bytes),
            inactive_file_bytes: memory(said.inactive_file_bytes),
            page_faults: count(said.page_faults),
            major_page_faults: count(said.major_page_faults),
            swap_bytes: count(said.swap_bytes),
            swap_available_bytes: count(said.swap_available_bytes),
            processes: count(said.processes),
            cpu_pressure: said.cpu_pressure.map(pressure),
            memory_pressure: said.memory_pressure.map(pressure),
            io_pressure: said.io_pressure.map(pressure),
            user_nanos: count(said.user_nanos),
            system_nanos: count(said.system_nanos),
            periods: count(said.periods),
            throttled_periods: count(said.throttled_periods),
            throttled_nanos: count(said.throttled_nanos),
            cached_bytes: memory(said.cached_bytes),
            mapped_bytes: memory(said.mapped_bytes),
            kernel_bytes: memory(said.kernel_bytes),
            peak_bytes: memory(said.peak_bytes),
            limit_hits: count(said.limit_hits),
            oom_kills: count(said.oom_kills),
            threads: count(said.threads),
            threads_limit: said.threads_limit.map(count),
        }
    }

    /// Whoever reads them may take devices and sizes as names: each is there once.
    fn details(&self, said: common::Details) -> common::Details {
        let mut names = BTreeSet::new();
        let mut new = |name: &str| is_label(name) && names.insert(name.to_owned());
        let disk = |said: common::DiskUsage| common::DiskUsage {
            device: said.device,
            major: said.major,
            minor: said.minor,
            read_bytes: count(said.read_bytes),
            written_bytes: count(said.written_bytes),
            reads: count(said.reads),
            writes: count(said.writes),
        };
        let disks = said.disks.into_iter().filter(|found| new(&found.device)).take(MAX_PARTS).map(disk).collect();
        let pages = |said: common::HugepageUsage| common::HugepageUsage {
            size: said.size,
            bytes: count(said.bytes.min(self.memory)),
        };
        let hugepages =
            said.hugepages.into_iter().filter(|found| new(&found.size)).take(MAX_PARTS).map(pages).collect();
        common::Details {
            descriptors: count(said.descriptors),
            sockets: count(said.sockets),
            open_files_limit: said.open_files_limit.map(count),
            disks,
            hugepages,
        }
    }

    fn layer(&self, said: common::Layer) -> common::Layer {
        common::Layer {
            bytes: count(said.bytes.min(self.disk)),
            inodes: count(said.inodes),
            age_ms: count(said.age_ms),
        }
    }
}

/// What reads it may keep it as an int64.
fn count(number: u64) -> u64 {
    number.min(i64::MAX.unsigned_abs())
}

fn pressure(said: common::Pressure) -> common::Pressure {
    let stall = |said: common::Stall| common::Stall {
        total_nanos: count(said.total_nanos),
        avg10: said.avg10.min(WHOLE),
        avg60: said.avg60.min(WHOLE),
        avg300: said.avg300.min(WHOLE),
    };
    common::Pressure { some: said.some.map(stall), full: said.full.map(stall) }
}

fn is_name(name: &str) -> bool {
    (1..=MAX_NAME).contains(&name.len()) && name.chars().all(|c| c.is_ascii_graphic() && c != '/')
}

fn is_label(label: &str) -> bool {
    (1..=MAX_LABEL).contains(&label.len()) && label.chars().all(|c| c.is_ascii_graphic())
}

fn interface(said: common::InterfaceUsage) -> common::InterfaceUsage {
    common::InterfaceUsage {
        name: said.name,
        rx_bytes: count(said.rx_bytes),
        rx_errors: count(said.rx_errors),
        tx_bytes: count(said.tx_bytes),
        tx_errors: count(said.tx_errors),
        rx_packets: count(said.rx_packets),
        rx_dropped: count(said.rx_dropped),
        tx_packets: count(said.tx_packets),
        tx_dropped: count(said.tx_dropped),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use prost::Message;

    fn bounds() -> Bounds<'static> {
        let containers = ["a", "b"].map(str::to_owned).into();
        Bounds { memory: 1 << 27, disk: 1 << 29, containers, interface: Some("eth0") }
    }

    fn interface(name: &str) -> common::InterfaceUsage {
        common::InterfaceUsage { name: name.into(), rx_bytes: u64::MAX, ..Default::default() }
    }

    #[test]
    fn figures_are_passed_on() {
        let usage = common::Usage {
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
            io_pressure: Some(common::Pressure {
                some: Some(common::Stall { total_nanos: 11, avg10: 12, avg60: 13, avg300: 14 }),
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
        let layer = common::Layer { bytes: 4096, inodes: 3, age_ms: 5 };
        let disk = common::DiskUsage {
            device: "/dev/vda".into(),
            major: 1,
            minor: 2,
            read_bytes: 3,
            written_bytes: 4,
            reads: 5,
            writes: 6,
        };
        let details = common::Details {
            descriptors: 1,
            sockets: 2,
            open_files_limit: Some(3),
            disks: vec![disk],
            hugepages: vec![common::HugepageUsage { size: "2MB".into(), bytes: 4 }],
        };
        let container =
            common::ContainerUsage { id: "a".into(), usage: Some(usage), layer: Some(layer), details: Some(details) };
        let interface = common::InterfaceUsage {
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
            scratch: Some(common::FileSystem { device: "/dev/vdb".into(), bytes: 1, inodes: 2, free_inodes: 3 }),
            // Half of the memory; so the other half is used.
            free_bytes: Some(1 << 26),
        };
        // The two messages have the same fields, by number.
        assert_eq!(check(answer.clone(), bounds()).encode_to_vec(), answer.encode_to_vec());
    }

    #[test]
    fn a_guest_cannot_say_more_than_there_is() {
        let stall = common::Stall { total_nanos: u64::MAX, avg10: u32::MAX, avg60: 10_001, avg300: 1 };
        let usage = common::Usage {
            cpu_nanos: u64::MAX,
            memory_bytes: u64::MAX,
            cpu_pressure: Some(common::Pressure { some: None, full: Some(stall) }),
            ..Default::default()
        };
        let layer = common::Layer { bytes: u64::MAX, inodes: u64::MAX, age_ms: u64::MAX };
        let disk = |device: &str| common::DiskUsage { device: device.into(), reads: u64::MAX, ..Default::default() };
        let long = "x".repeat(MAX_LABEL + 1);
        let details = common::Details {
            disks: ["/dev/vda", "/dev/vda", "", "a b", "\u{e9}", &long].into_iter().map(disk).collect(),
            hugepages: vec![common::HugepageUsage { size: "2MB".into(), bytes: u64::MAX }; 1000],
            ..Default::default()
        };
        let container = |id: &str| common::ContainerUsage {
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
            scratch: Some(common::FileSystem { device: "x".into(), bytes: u64::MAX, ..Default::default() }),
            free_bytes: Some(u64::MAX),
        };
        let checked = check(answer, bounds());
        assert_eq!(checked.containers.iter().map(|c| c.id.as_str()).collect::<Vec<_>>(), ["a", "b"]);
        let usage = checked.pod.unwrap();
        assert_eq!((usage.cpu_nanos, usage.memory_bytes), (i64::MAX.unsigned_abs(), 1 << 27));
        let stall = usage.cpu_pressure.unwrap().full.unwrap();
        assert_eq!((stall.avg10, stall.avg60, stall.avg300), (10_000, 10_000, 1));
        let layer = checked.containers[0].layer.unwrap();
        assert_eq!((layer.bytes, layer.age_ms), (1 << 29, i64::MAX.unsigned_abs()));
        let names: Vec<_> = checked.interfaces.iter().take(3).map(|found| found.name.as_str()).collect();
        assert_eq!((names, checked.interfaces.len()), (vec!["eth0", "br0", "v0"], MAX_INTERFACES));
        assert_eq!(checked.interfaces[0].rx_bytes, i64::MAX.unsigned_abs());
        let details = checked.containers[0].details.as_ref().unwrap();
        assert_eq!((details.disks.len(), details.disks[0].reads), (1, i64::MAX.unsigned_abs()));
        assert_eq!(details.hugepages, [common::HugepageUsage { size: "2MB".into(), bytes: 1 << 27 }]);
        assert_eq!((checked.scratch.unwrap().bytes, checked.used_bytes), (1 << 29, Some(0)));
        let none = Bounds { memory: u64::MAX, ..bounds() };
        let answer = agent::StatsResponse { free_bytes: Some(1), ..Default::default() };
        assert_eq!(check(answer, none).used_bytes, None, "without a machine");
    }

    fn names() -> impl Strategy<Value = String> {
        prop_oneof!["a|b|eth0|/dev/vda|2MB", "\\PC{0,80}"]
    }

    fn answers() -> impl Strategy<Value = agent::StatsResponse> {
        let number = || prop_oneof![any::<u64>(), Just(u64::MAX), 0..9u64];
        let usage = (number(), number(), prop::option::of(number())).prop_map(|(a, b, c)| common::Usage {
            cpu_nanos: a,
            memory_bytes: b,
            memory_limit_bytes: c,
            user_nanos: b,
            peak_bytes: a,
            threads_limit: c,
            cpu_pressure: Some(common::Pressure {
                some: None,
                full: Some(common::Stall { total_nanos: a, avg10: u32::MAX, ..Default::default() }),
            }),
            ..Default::default()
        });
        let disk =
            (names(), number()).prop_map(|(device, reads)| common::DiskUsage { device, reads, ..Default::default() });
        let pages = (names(), number()).prop_map(|(size, bytes)| common::HugepageUsage { size, bytes });
        let parts = (prop::collection::vec(disk, 0..40), prop::collection::vec(pages, 0..40));
        let details = (parts, number()).prop_map(|((disks, hugepages), sockets)| common::Details {
            disks,
            hugepages,
            sockets,
            ..Default::default()
        });
        let container = (names(), prop::option::of(usage.clone()), prop::option::of(details));
        let container =
            container.prop_map(|(id, usage, details)| common::ContainerUsage { id, usage, layer: None, details });
        let interface = (names(), number()).prop_map(|(name, tx_dropped)| common::InterfaceUsage {
            name,
            tx_dropped,
            ..Default::default()
        });
        let scratch =
            (names(), number()).prop_map(|(device, bytes)| common::FileSystem { device, bytes, ..Default::default() });
        let lists = (prop::collection::vec(container, 0..4), prop::collection::vec(interface, 0..80));
        let rest = (prop::option::of(scratch), prop::option::of(number()));
        (prop::option::of(usage), lists, rest).prop_map(|(pod, (containers, interfaces), (scratch, free_bytes))| {
            agent::StatsResponse { pod, containers, interfaces, scratch, free_bytes }
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]
        #[test]
        fn whatever_bytes_a_guest_answers(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            crate::fuzz::statistics(&bytes);
        }

        #[test]
        fn whatever_well_formed_answer(answer in answers()) {
            crate::fuzz::statistics(&answer.encode_to_vec());
        }
    }
}
