//! Owns: what the guest says that its containers have used, made harmless: each figure within what the machine can
//! have, each container one that this process made, each name short and plain.
//! May use: the two protocols. No effects.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use nacelle_proto::{agent, pod};
use std::collections::BTreeSet;

/// The most interfaces that are passed on.
const MAX_INTERFACES: usize = 64;
/// IFNAMSIZ without the final zero.
const MAX_NAME: usize = 15;
/// A percentage, in hundredths.
const WHOLE: u32 = 10_000;

/// What is true of the machine, whatever its guest says.
pub struct Bounds<'a> {
    /// Bytes of the machine's memory.
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
            containers.push(pod::ContainerUsage {
                id: container.id,
                usage: container.usage.map(|usage| bounds.usage(usage)),
                layer: container.layer.map(|layer| bounds.layer(layer)),
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
    }
}

impl Bounds<'_> {
    fn usage(&self, said: agent::Usage) -> pod::Usage {
        let memory = |bytes: u64| bytes.min(self.memory);
        pod::Usage {
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
        }
    }

    fn layer(&self, said: agent::Layer) -> pod::Layer {
        pod::Layer { bytes: said.bytes.min(self.disk), inodes: count(said.inodes), age_ms: count(said.age_ms) }
    }
}

/// What reads it may keep it as an int64.
fn count(number: u64) -> u64 {
    number.min(i64::MAX.unsigned_abs())
}

fn pressure(said: agent::Pressure) -> pod::Pressure {
    let stall = |said: agent::Stall| pod::Stall {
        total_nanos: count(said.total_nanos),
        avg10: said.avg10.min(WHOLE),
        avg60: said.avg60.min(WHOLE),
        avg300: said.avg300.min(WHOLE),
    };
    pod::Pressure { some: said.some.map(stall), full: said.full.map(stall) }
}

fn is_name(name: &str) -> bool {
    (1..=MAX_NAME).contains(&name.len()) && name.chars().all(|c| c.is_ascii_graphic() && c != '/')
}

fn interface(said: agent::InterfaceUsage) -> pod::InterfaceUsage {
    pod::InterfaceUsage {
        name: said.name,
        rx_bytes: count(said.rx_bytes),
        rx_errors: count(said.rx_errors),
        tx_bytes: count(said.tx_bytes),
        tx_errors: count(said.tx_errors),
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

    fn interface(name: &str) -> agent::InterfaceUsage {
        agent::InterfaceUsage { name: name.into(), rx_bytes: u64::MAX, ..Default::default() }
    }

    #[test]
    fn figures_are_passed_on() {
        let usage = agent::Usage {
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
            io_pressure: Some(agent::Pressure {
                some: Some(agent::Stall { total_nanos: 11, avg10: 12, avg60: 13, avg300: 14 }),
                full: None,
            }),
            ..Default::default()
        };
        let layer = agent::Layer { bytes: 4096, inodes: 3, age_ms: 5 };
        let container = agent::ContainerUsage { id: "a".into(), usage: Some(usage), layer: Some(layer) };
        let answer = agent::StatsResponse { containers: vec![container], ..Default::default() };
        let checked = check(answer, bounds());
        assert_eq!((checked.pod, checked.containers.len()), (None, 1));
        // The two messages have the same fields, by number.
        assert_eq!(checked.containers[0].usage.unwrap().encode_to_vec(), usage.encode_to_vec());
        assert_eq!(checked.containers[0].layer, Some(pod::Layer { bytes: 4096, inodes: 3, age_ms: 5 }));
    }

    #[test]
    fn a_guest_cannot_say_more_than_there_is() {
        let stall = agent::Stall { total_nanos: u64::MAX, avg10: u32::MAX, avg60: 10_001, avg300: 1 };
        let usage = agent::Usage {
            cpu_nanos: u64::MAX,
            memory_bytes: u64::MAX,
            cpu_pressure: Some(agent::Pressure { some: None, full: Some(stall) }),
            ..Default::default()
        };
        let layer = agent::Layer { bytes: u64::MAX, inodes: u64::MAX, age_ms: u64::MAX };
        let container = |id: &str| agent::ContainerUsage { id: id.into(), usage: Some(usage), layer: Some(layer) };
        let names = ["br0", "eth0", "eth0", "", "a b", "x/y", "sixteen-letters!", "\u{e9}"];
        let answer = agent::StatsResponse {
            pod: Some(usage),
            containers: ["a", "a", "unknown", "b"].map(container).into(),
            interfaces: names.into_iter().map(interface).chain((0..100).map(|n| interface(&format!("v{n}")))).collect(),
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
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]
        #[test]
        fn whatever_bytes_a_guest_answers(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            if let Ok(answer) = agent::StatsResponse::decode(bytes.as_slice()) {
                let checked = check(answer, bounds());
                prop_assert!(checked.containers.len() <= 2 && checked.interfaces.len() <= MAX_INTERFACES);
            }
        }
    }
}
