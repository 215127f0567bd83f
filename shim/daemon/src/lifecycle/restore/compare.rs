//! Decides whether a request and this node fit a checkpoint. What a new pod always has of its own may differ: its name, labels,
//! annotations, paths on the node, network, and the environment of its containers, which processes that run already keep.

use super::error::{Incompatibility, PodRestoreError};
use super::{ContainerToRestore, PodToRestore};
use crate::config::Handler;
use crate::lifecycle::pod::network::network;
use crate::lifecycle::pod::size;
use crate::lifecycle::template::node_cpu;
use nacelle_base::machine::{EngineKind, MemoryPages};
use nacelle_engine::BLOCK_MIB;
use nacelle_model::checkpoint::{CheckpointManifest, SavedContainer};
use nacelle_model::container::ContainerConfig;
use nacelle_model::network::Bandwidth;
use nacelle_model::pod::PodConfig;
use serde::Serialize;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;
use std::ops::RangeInclusive;
use std::path::PathBuf;

/// The line of /proc/cpuinfo that lists the features.
const FLAGS: &str = "flags";

/// Checks that the engine can continue a saved VM.
pub(super) fn check_engine(pod: &PodToRestore, handler: &Handler) -> Result<(), Incompatibility> {
    let is_transparent = size::memory_pages(&pod.config, handler) == MemoryPages::Transparent;
    match pod.engine == EngineKind::Kvm && is_transparent {
        true => Ok(()),
        false => Err(Incompatibility::Engine { handler: pod.handler.clone() }),
    }
}

/// Checks the pod and the node.
pub(super) fn check(
    manifest: &CheckpointManifest,
    pod: &PodToRestore,
    handler: &Handler,
) -> Result<(), PodRestoreError> {
    let config = &pod.config;
    equal("the handler", &manifest.handler, &pod.handler)?;
    let known = 1..=nacelle_engine::SNAPSHOT_VERSION;
    within("the version of the VM's state", manifest.vm.state_version.into(), known_range(&known))?;
    check_cpu(&manifest.vm.node_cpu, &node_cpu())?;
    check_vm(manifest, config, handler)?;
    let comparable = |config: &PodConfig| PodConfig {
        name: pod.config.name.clone(),
        checkpoint: None,
        hostname: String::new(),
        log_directory: None,
        dns: None,
        ports: Vec::new(),
        bandwidth: Bandwidth::default(),
        labels: BTreeMap::new(),
        annotations: BTreeMap::new(),
        cgroup_parent: None,
        handler: String::new(),
        ..config.clone()
    };
    Ok(same("the pod's", &comparable(&manifest.pod), &comparable(config))?)
}

fn known_range(known: &RangeInclusive<u32>) -> RangeInclusive<u64> {
    u64::from(*known.start())..=u64::from(*known.end())
}

/// Checks that the VM of such a pod is the saved one.
fn check_vm(manifest: &CheckpointManifest, config: &PodConfig, handler: &Handler) -> Result<(), Incompatibility> {
    let vm = &manifest.vm;
    let vcpus = size::vcpus(config, handler);
    equal("the number of vCPUs", &vm.vcpus, &vcpus)?;
    equal("the number of reserved vCPUs", &vm.max_vcpus, &size::reserved(config, handler).unwrap_or(vcpus))?;
    same("the vCPUs'", &vm.topology, &size::topology(config))?;
    let cpu_model = config.kind.shape().and_then(|shape| shape.cpu_model.clone());
    same("the CPU model's", &vm.cpu_model, &cpu_model)?;
    // A VM from a template gets the rest of its memory in whole blocks.
    let memory = size::memory_mib(config, handler);
    let saved = u64::from(vm.booted_mib) + u64::from(vm.added_mib);
    if !(memory..memory.saturating_add(u64::from(BLOCK_MIB))).contains(&saved) {
        return Err(setting("the memory of the VM in MiB", saved, memory));
    }
    let reserve = size::hotplug_memory_mib(config, handler);
    equal("the reserve of memory in MiB", &u64::from(vm.reserve_mib), &reserve)?;
    let reserve_bytes = reserve.saturating_mul(1 << 20);
    if vm.reserve_used_bytes > reserve_bytes {
        return Err(setting("the reserve of memory in bytes", vm.reserve_used_bytes, reserve_bytes));
    }
    equal("the size of the scratch disk in MiB", &vm.scratch_mib, &handler.scratch_mib)?;
    same("the console's", &vm.console, &handler.console)?;
    let interfaces = network(config, PathBuf::new()).interfaces.len();
    equal("the number of network interfaces", &vm.interfaces.len(), &interfaces)
}

/// Checks that CPUs with the lines `here` of /proc/cpuinfo have all that CPUs with the lines `saved` have.
fn check_cpu(saved: &[String], here: &[String]) -> Result<(), Incompatibility> {
    let parse = |lines: &[String]| -> BTreeMap<String, String> {
        let fields = lines.iter().filter_map(|line| line.split_once(':'));
        fields.map(|(name, value)| (name.trim().to_owned(), value.trim().to_owned())).collect()
    };
    let (saved, here) = (parse(saved), parse(here));
    for (name, value) in &saved {
        let found = here.get(name).map(String::as_str).unwrap_or_default();
        if name == FLAGS {
            let found: BTreeSet<&str> = found.split_whitespace().collect();
            if let Some(feature) = value.split_whitespace().find(|feature| !found.contains(feature)) {
                return Err(Incompatibility::CpuFeature { feature: feature.chars().take(64).collect() });
            }
        } else if name != "microcode" {
            equal(&format!("the CPU's {name}"), &value.as_str(), &found)?;
        }
    }
    Ok(())
}

/// Returns the containers of the checkpoint by their names.
pub(super) fn by_name(manifest: &CheckpointManifest) -> Result<BTreeMap<&str, &SavedContainer>, Incompatibility> {
    let mut containers = BTreeMap::new();
    for saved in &manifest.containers {
        let name = saved.config.name.as_str();
        if containers.insert(name, saved).is_some() {
            return Err(Incompatibility::SameName { name: name.to_owned() });
        }
    }
    Ok(containers)
}

/// Pairs the containers of the request, in their order, with those of the checkpoint by their names.
pub(super) fn pair<'a>(
    manifest: &'a CheckpointManifest,
    wanted: &'a [ContainerToRestore],
) -> Result<Vec<(&'a SavedContainer, &'a ContainerToRestore)>, PodRestoreError> {
    let mut left = by_name(manifest)?;
    let mut pairs: Vec<(&SavedContainer, &ContainerToRestore)> = Vec::with_capacity(wanted.len());
    for container in wanted {
        let name = &container.config.name;
        if pairs.iter().any(|(_, known)| known.config.name == *name) {
            return Err(PodRestoreError::Duplicate { name: name.clone() });
        }
        let saved = left.remove(name.as_str());
        let saved = saved.ok_or_else(|| Incompatibility::OtherContainer { name: name.clone() })?;
        check_container(saved, container)?;
        pairs.push((saved, container));
    }
    match left.keys().next() {
        Some(name) => Err(Incompatibility::MissingContainer { name: name.to_string() }.into()),
        None => Ok(pairs),
    }
}

/// Checks that a container fits the saved one.
pub(super) fn check_container(saved: &SavedContainer, wanted: &ContainerToRestore) -> Result<(), Incompatibility> {
    let name = &wanted.config.name;
    equal(&format!("the image of container {name:?}"), &saved.image.id, &wanted.image.id)?;
    let ids = |images: &[nacelle_model::container::ContainerImage]| -> Vec<String> {
        images.iter().map(|image| image.id.to_string()).collect()
    };
    same(&format!("container {name:?}: the image volumes'"), &ids(&saved.volumes), &ids(&wanted.volumes))?;
    let paths = |config: &ContainerConfig| -> BTreeSet<String> {
        config.node_volumes.iter().map(|volume| volume.container_path.clone()).collect()
    };
    let (before, now) = (paths(&saved.config), paths(&wanted.config));
    let missing = before.difference(&now).next().map(|path| (path, true));
    if let Some((path, is_saved)) = now.difference(&before).next().map(|path| (path, false)).or(missing) {
        return Err(Incompatibility::Volume { name: name.clone(), path: path.clone(), is_saved });
    }
    let resources = saved.resources.as_ref().unwrap_or(&saved.config.resources);
    let before = ContainerConfig { resources: resources.clone(), ..comparable(&saved.config) };
    same(&format!("container {name:?}: its"), &before, &comparable(&wanted.config))
}

/// Returns the configuration without what may differ.
fn comparable(config: &ContainerConfig) -> ContainerConfig {
    let mut config = ContainerConfig {
        attempt: 0,
        image: String::new(),
        user_image: String::new(),
        envs: Vec::new(),
        labels: BTreeMap::new(),
        annotations: BTreeMap::new(),
        log_path: String::new(),
        ..config.clone()
    };
    for volume in &mut config.node_volumes {
        volume.host_path.clear();
    }
    for volume in &mut config.volumes {
        (volume.image, volume.user_image) = (String::new(), String::new());
    }
    config
}

fn setting(what: &str, saved: impl Display, here: impl Display) -> Incompatibility {
    let value = |value: String| crate::lifecycle::context::text::clip(&value);
    Incompatibility::Setting { what: what.to_owned(), saved: value(saved.to_string()), here: value(here.to_string()) }
}

fn equal<T: PartialEq + Display>(what: &str, saved: &T, here: &T) -> Result<(), Incompatibility> {
    if saved == here { Ok(()) } else { Err(setting(what, saved, here)) }
}

fn within(what: &str, saved: u64, known: RangeInclusive<u64>) -> Result<(), Incompatibility> {
    if known.contains(&saved) { Ok(()) } else { Err(setting(what, saved, format!("{} or older", known.end()))) }
}

/// Compares two values by their JSON; names the first field that differs.
fn same<T: Serialize>(of: &str, saved: &T, here: &T) -> Result<(), Incompatibility> {
    // Values without maps whose keys are no strings cannot fail.
    let [saved, here] = [saved, here].map(|value| serde_json::to_value(value).unwrap_or_default());
    if saved == here {
        return Ok(());
    }
    if let (Value::Object(saved), Value::Object(here)) = (&saved, &here) {
        let names: BTreeSet<&String> = saved.keys().chain(here.keys()).collect();
        for name in names {
            let (saved, here) = (saved.get(name).unwrap_or(&Value::Null), here.get(name).unwrap_or(&Value::Null));
            if saved != here {
                return Err(Incompatibility::of_values(format!("{of} {name}"), saved, here));
            }
        }
    }
    Err(Incompatibility::of_values(format!("{of} value"), &saved, &here))
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacelle_model::testing::container;

    type Change = fn(&mut ContainerConfig);

    fn lines(lines: &[&str]) -> Vec<String> {
        lines.iter().map(|line| (*line).to_owned()).collect()
    }

    #[test]
    fn the_first_missing_feature_of_the_cpu_is_named() {
        let saved = lines(&["vendor_id\t: A", "model\t\t: 7", "flags\t\t: fpu avx sse", "microcode\t: 0x1"]);
        let with = |model: &str, flags: &str| {
            check_cpu(&saved, &lines(&["vendor_id\t: A", &format!("model : {model}"), &format!("flags : {flags}")]))
        };
        assert_eq!(with("7", "sse fpu new avx"), Ok(()));
        let lacks = Incompatibility::CpuFeature { feature: "avx".into() };
        assert_eq!(with("7", "fpu sse"), Err(lacks));
        let error = with("8", "fpu avx sse").unwrap_err().to_string();
        assert_eq!(error, "the CPU's model is 8 now, and 7 in the checkpoint");
    }

    #[test]
    fn containers_of_one_name_cannot_be_told_apart() {
        let golden = include_str!("../../../../model/tests/golden/checkpoint-v1.json");
        let mut manifest = CheckpointManifest::decode(golden.as_bytes()).unwrap();
        let saved = manifest.containers[0].clone();
        let (config, image, volumes) = ((*saved.config).clone(), saved.image.clone(), saved.volumes.clone());
        let wanted = [ContainerToRestore { config, image, volumes }];
        assert_eq!(pair(&manifest, &wanted).unwrap().len(), 1);
        // Another attempt of the same container may run, too.
        let other = ContainerConfig { attempt: 1, ..(*saved.config).clone() };
        manifest.containers.push(SavedContainer { config: other.into(), ..saved });
        let error = pair(&manifest, &wanted).unwrap_err();
        assert!(matches!(error, PodRestoreError::Incompatible(Incompatibility::SameName { .. })), "{error}");
    }

    #[test]
    fn the_first_setting_that_differs_is_named_and_the_rest_may_differ() {
        let saved = container(2, 1).saved(Vec::new());
        let wanted = |change: Change| {
            let mut config = (*saved.config).clone();
            change(&mut config);
            let (image, volumes) = (saved.image.clone(), saved.volumes.clone());
            check_container(&saved, &ContainerToRestore { config, image, volumes })
        };
        let allowed = wanted(|config| {
            (config.attempt, config.log_path) = (7, "other".into());
            (config.envs, config.image) = (vec![("A".into(), "b".into())], "other".into());
            config.labels.insert("a".into(), "b".into());
            for volume in &mut config.node_volumes {
                volume.host_path.push_str("/other");
            }
        });
        assert_eq!(allowed, Ok(()));
        let changes: [(Change, &str); 3] = [
            (|config| config.command = vec!["x".into()], "its command is [\"x\"]"),
            (|config| config.tty = !config.tty, "its tty"),
            (|config| config.resources.cpu_shares += 77, "its resources"),
        ];
        for (change, text) in changes {
            let error = wanted(change).unwrap_err().to_string();
            assert!(error.contains(text), "{error}");
        }
    }
}
