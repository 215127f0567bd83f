//! Computes the resources of a VM: at its creation from handler and pod, and at a resize from the pod's new limits. Pure.
//! docs/reference/configuration.md and docs/reference/cri-behavior.md have the rules.

use crate::config::Handler;
use crate::hugepages;
use crate::lifecycle::context::error::LifecycleError;
use nacelle_base::machine::{MemoryPages, Topology};
use nacelle_engine::MAX_VCPUS;
use nacelle_model::pod::PodConfig;
use nacelle_model::resources::{Resources, VmResources, cpu_milli};

/// An upper bound far above any node's memory, which rejects mistyped limits.
pub(crate) const MAX_MEMORY_MIB: u64 = 16 << 20;
/// CPU limits are in thousandths of a CPU.
const MILLI: u64 = 1000;
const MIB: u64 = 1 << 20;
/// The unit of memory hot-plug in the guest's kernel.
const BLOCK_MIB: u64 = nacelle_engine::BLOCK_MIB as u64;

/// Returns the VM's memory in MiB at boot: that of its annotations, otherwise the handler's plus the limit of its containers, in
/// whole huge pages.
pub(crate) fn memory_mib(config: &PodConfig, handler: &Handler) -> u64 {
    if let Some(machine) = config.kind.machine() {
        return machine.memory_mib;
    }
    let limit = config.memory_limit.map_or(0, |bytes| bytes.div_ceil(MIB));
    let shaped = config.kind.shape().and_then(|shape| shape.memory_mib);
    let mib = shaped.unwrap_or(handler.memory_mib.saturating_add(limit));
    match memory_pages(config, handler) {
        MemoryPages::Transparent => mib,
        MemoryPages::Hugetlb => mib.div_ceil(hugepages::PAGE_MIB).saturating_mul(hugepages::PAGE_MIB),
    }
}

/// Returns the memory in MiB that can be plugged into the VM in addition, in whole blocks and at most up to the handler's bound.
/// Zero for machine pods, for a VM whose memory an annotation sets, and for pages that the node must reserve in advance.
pub(crate) fn hotplug_memory_mib(config: &PodConfig, handler: &Handler) -> u64 {
    let shaped = config.kind.shape().is_some_and(|shape| shape.memory_mib.is_some());
    let grows = config.kind.machine().is_none() && !shaped && memory_pages(config, handler) == MemoryPages::Transparent;
    let more =
        handler.max_memory_mib.filter(|_| grows).map_or(0, |max| max.saturating_sub(memory_mib(config, handler)));
    more / BLOCK_MIB * BLOCK_MIB
}

/// Returns the page size that backs the VM's memory.
pub(crate) fn memory_pages(config: &PodConfig, handler: &Handler) -> MemoryPages {
    config.kind.shape().and_then(|shape| shape.memory_pages).unwrap_or(handler.memory_pages)
}

/// Returns the vCPU topology if the pod sets one.
pub(crate) fn topology(config: &PodConfig) -> Option<Topology> {
    config.kind.shape().and_then(|shape| shape.processors)
}

/// Returns the number of vCPUs at boot.
pub(crate) fn vcpus(config: &PodConfig, handler: &Handler) -> u32 {
    if let Some(machine) = config.kind.machine() {
        return machine.processors.count();
    }
    if let Some(topology) = topology(config) {
        return topology.count();
    }
    handler.vcpus.max(config.cpu_limit_milli.map_or(0, whole))
}

/// Returns the maximum number of vCPUs if that exceeds the number at boot: only for VMs whose number of vCPUs can
/// change ([`grows`]).
pub(crate) fn reserved(config: &PodConfig, handler: &Handler) -> Option<u32> {
    let now = vcpus(config, handler);
    handler.max_vcpus.filter(|max| *max > now && grows(config))
}

/// Returns whether the number of vCPUs follows the pod's limits: not if the pod sets their number or pins them.
pub(crate) fn grows(config: &PodConfig) -> bool {
    let shaped = config.kind.shape().is_some_and(|shape| shape.processors.is_some() || shape.pinned);
    config.kind.machine().is_none() && !shaped
}

/// Rejects resources that no VM can have, before anything is created.
pub(crate) fn check(config: &PodConfig, handler: &Handler) -> Result<(), LifecycleError> {
    let processors = (u64::from(vcpus(config, handler)), u64::from(MAX_VCPUS));
    let memory = (memory_mib(config, handler).saturating_add(hotplug_memory_mib(config, handler)), MAX_MEMORY_MIB);
    for (what, (asked, most)) in [("vCPUs", processors), ("MiB of memory", memory)] {
        if asked > most {
            return Err(LifecycleError::TooLarge { what, asked, most });
        }
    }
    Ok(())
}

/// Returns the VM's resources at its creation; memory is what its containers can use.
pub(crate) fn of(config: &PodConfig, handler: &Handler) -> VmResources {
    let own = if config.memory_limit.is_some() && config.kind.machine().is_none() { handler.memory_mib } else { 0 };
    let memory = memory_mib(config, handler).saturating_sub(own).saturating_mul(MIB);
    let vcpus = vcpus(config, handler);
    let max_memory = memory.saturating_add(hotplug_memory_mib(config, handler).saturating_mul(MIB));
    let max_vcpus = reserved(config, handler).unwrap_or(vcpus);
    VmResources { vcpus, max_vcpus, memory, least_memory: memory, max_memory }
}

/// Returns the VM's resources for these limits of all containers together; the error holds what the VM can have and what was
/// wanted. A resource without a limit stays.
pub(crate) fn wanted(machine: VmResources, least: u32, asked: &Resources) -> Result<VmResources, (String, String)> {
    let memory = u64::try_from(asked.memory_limit).unwrap_or(0);
    if memory > machine.memory_bound() {
        return Err((format!("{} bytes of memory", machine.memory_bound()), memory.to_string()));
    }
    let machine = VmResources { memory: wanted_memory(machine, memory), ..machine };
    let bound = machine.vcpu_bound();
    match cpu_milli(asked.cpu_period, asked.cpu_quota) {
        Some(milli) if milli > u64::from(bound) * MILLI => {
            Err((format!("{bound} CPUs"), format!("{milli} thousandths")))
        }
        Some(milli) => Ok(VmResources { vcpus: whole(milli).max(least).min(bound), ..machine }),
        None => Ok(machine),
    }
}

/// Returns the memory for this limit: the VM's memory at its creation plus whole blocks.
fn wanted_memory(machine: VmResources, limit: u64) -> u64 {
    if machine.hotplug_memory_used().is_none() || limit == 0 {
        return machine.memory;
    }
    let block = BLOCK_MIB * MIB;
    let more = limit.saturating_sub(machine.least_memory).div_ceil(block).saturating_mul(block);
    machine.least_memory.saturating_add(more).min(machine.memory_bound())
}

/// Returns the number of vCPUs that provides this many thousandths of a CPU.
fn whole(milli: u64) -> u32 {
    narrow(milli.div_ceil(MILLI))
}

pub(crate) fn narrow(value: u64) -> u32 {
    u32::try_from(value).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacelle_base::{Classify, FailureKind};
    use nacelle_engine::MachineSpec;
    use nacelle_model::pod::{PodKind, VmShape};
    use proptest::prelude::*;

    fn limited(memory_limit: Option<u64>, cpu_limit_milli: Option<u64>) -> PodConfig {
        PodConfig { memory_limit, cpu_limit_milli, ..(*nacelle_model::testing::pod(1).config).clone() }
    }

    fn asked(memory_limit: i64, cpu_quota: i64) -> Resources {
        Resources { memory_limit, cpu_quota, cpu_period: 100_000, ..Default::default() }
    }

    #[test]
    fn a_machine_holds_what_it_was_made_for() {
        let machine =
            VmResources { vcpus: 2, max_vcpus: 2, memory: 1 << 28, least_memory: 1 << 28, max_memory: 1 << 28 };
        let wanted = |memory, quota| wanted(machine, 2, &asked(memory, quota));
        // An unset limit requires nothing.
        for (memory, quota) in [(0, 0), (1 << 28, 200_000), (5, -1)] {
            assert_eq!(wanted(memory, quota), Ok(machine));
        }
        let (has, wants) = wanted((1 << 28) + 1, 0).unwrap_err();
        assert_eq!((has.as_str(), wants.as_str()), ("268435456 bytes of memory", "268435457"));
        let (has, wants) = wanted(5, 200_001).unwrap_err();
        assert_eq!((has.as_str(), wants.as_str()), ("2 CPUs", "2001 thousandths"));
        assert!(wanted(i64::MAX, i64::MAX).is_err());
    }

    #[test]
    fn processors_follow_the_limit_between_the_handlers_and_the_bound() {
        let handler = Handler { vcpus: 2, max_vcpus: Some(8), ..Handler::default() };
        let born = of(&limited(None, Some(2500)), &handler);
        assert_eq!((born.vcpus, born.max_vcpus), (3, 8));
        for (quota, vcpus) in [(100_000, 2), (300_001, 4), (800_000, 8), (-1, 3), (0, 3)] {
            assert_eq!(wanted(born, handler.vcpus, &asked(0, quota)).unwrap().vcpus, vcpus, "{quota}");
        }
        assert_eq!(wanted(born, 2, &asked(0, 800_001)).unwrap_err().0, "8 CPUs");
        // If the handler sets no bound, the bound is the number at boot.
        let born = of(&limited(None, Some(2500)), &Handler::default());
        assert_eq!((born.vcpus, born.vcpu_bound()), (3, 3));
        assert_eq!(wanted(born, 1, &asked(0, 100_000)).unwrap().vcpus, 1);
        // An annotation determines the number.
        let shape = VmShape { processors: Some(Topology::single_socket(4)), ..VmShape::default() };
        let config = PodConfig { kind: PodKind::Containers { shape }, ..limited(None, Some(2500)) };
        assert_eq!((vcpus(&config, &handler), reserved(&config, &handler), grows(&config)), (4, None, false));
        // The number of pinned vCPUs is fixed.
        let shape = VmShape { pinned: true, ..VmShape::default() };
        let config = PodConfig { kind: PodKind::Containers { shape }, ..limited(None, Some(3000)) };
        assert_eq!((vcpus(&config, &handler), reserved(&config, &handler), grows(&config)), (3, None, false));
    }

    #[test]
    fn memory_follows_the_limit_in_whole_blocks_between_birth_and_bound() {
        let handler = Handler { memory_mib: 256, max_memory_mib: Some(1100), ..Handler::default() };
        // 256 MiB and 100 MiB of 1100 MiB leave space for five blocks.
        let config = limited(Some(100 << 20), None);
        let born = of(&config, &handler);
        assert_eq!((hotplug_memory_mib(&config, &handler), born.memory >> 20, born.max_memory >> 20), (640, 100, 740));
        for (limit, mib) in [(101, 228), (228, 228), (229, 356), (740, 740), (100, 100), (1, 100), (-1, 100), (0, 100)]
        {
            let next = wanted(born, 1, &asked(limit * (1 << 20), 0)).unwrap();
            assert_eq!(next.memory >> 20, mib, "{limit}");
            assert_eq!(next.hotplug_memory_used(), Some((mib - 100) << 20));
        }
        // A resource without a limit stays.
        let grown = wanted(born, 1, &asked(300 << 20, 0)).unwrap();
        assert_eq!(wanted(grown, 1, &asked(0, 0)), Ok(grown));
        let (has, wants) = wanted(grown, 1, &asked((740 << 20) + 1, 0)).unwrap_err();
        assert_eq!((has.as_str(), wants.as_str()), ("775946240 bytes of memory", "775946241"));
        // A pod without a limit can use all memory of the VM.
        assert_eq!(of(&limited(None, None), &handler).memory_bound() >> 20, 256 + 768);
        // The VM cannot grow without a bound, with a bound that leaves no block, with a size set by annotations, and with huge
        // pages.
        let stays = |config: &PodConfig, handler: &Handler| {
            assert_eq!((hotplug_memory_mib(config, handler), of(config, handler).hotplug_memory_used()), (0, None));
        };
        stays(&config, &Handler { max_memory_mib: None, ..handler.clone() });
        stays(&config, &Handler { max_memory_mib: Some(483), ..handler.clone() });
        stays(&limited(Some(1 << 40), None), &handler);
        stays(&config, &Handler { memory_pages: MemoryPages::Hugetlb, ..handler.clone() });
        let shape = VmShape { memory_mib: Some(512), ..VmShape::default() };
        stays(&PodConfig { kind: PodKind::Containers { shape }, ..config.clone() }, &handler);
        // A record from before the bounds existed.
        let old = VmResources { vcpus: 1, max_vcpus: 0, memory: 5, least_memory: 0, max_memory: 0 };
        assert_eq!((old.hotplug_memory_used(), old.memory_bound()), (None, 5));
    }

    /// Numbers of all magnitudes.
    fn any_size() -> impl Strategy<Value = u64> {
        (0..64u32, any::<u64>()).prop_map(|(shift, value)| value >> shift)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(512))]
        /// Every requested size is either rejected by name or accepted by an engine.
        #[test]
        fn a_machine_boots_or_is_refused(
            memory_limit in prop::option::of(any_size()),
            cpus in prop::option::of(any_size()),
            own in 64..=MAX_MEMORY_MIB,
            (least, reserve) in (1..=64u32).prop_flat_map(|least| (Just(least), prop::option::of(least..=64))),
            shaped in prop::option::of(64..=u64::MAX),
            huge in any::<bool>(),
            max_memory_mib in prop::option::of(64..=MAX_MEMORY_MIB),
        ) {
            let pages = if huge { MemoryPages::Hugetlb } else { MemoryPages::Transparent };
            let handler =
                Handler { vcpus: least, max_vcpus: reserve, memory_mib: own, memory_pages: pages, max_memory_mib, ..Handler::default() };
            let shape = shaped.map(|mib| VmShape { memory_mib: Some(mib), ..VmShape::default() });
            let kind = PodKind::Containers { shape: shape.unwrap_or_default() };
            let config = PodConfig { kind, ..limited(memory_limit, cpus) };
            let mib = memory_mib(&config, &handler);
            prop_assert!(mib >= shaped.unwrap_or(own));
            prop_assert!(shaped.is_some() || mib == u64::MAX || mib / 2 >= memory_limit.unwrap_or(0) / MIB / 2);
            match check(&config, &handler) {
                Ok(()) => {
                    let size = of(&config, &handler);
                    prop_assert!(size.vcpus >= least && size.vcpu_bound() >= size.vcpus && size.vcpu_bound() <= 64);
                    prop_assert!(u64::from(size.vcpus) * MILLI >= cpus.unwrap_or(0));
                    prop_assert!(size.memory <= mib * MIB);
                    prop_assert!(shaped.is_some() || size.memory >= memory_limit.unwrap_or(0));
                    let spec = MachineSpec {
                        vcpus: u8::try_from(size.vcpu_bound()).unwrap(),
                        memory_mib: narrow(mib),
                        hotplug_mib: narrow(hotplug_memory_mib(&config, &handler)),
                        memory_pages: pages,
                        ..machine()
                    };
                    prop_assert_eq!(u64::from(spec.memory_mib), mib);
                    let together = mib + u64::from(spec.hotplug_mib);
                    prop_assert!(spec.hotplug_mib == 0 || together <= max_memory_mib.unwrap_or(0));
                    prop_assert_eq!(size.memory_bound() - size.memory, u64::from(spec.hotplug_mib) * MIB);
                    let limits = nacelle_engine::Limits { vcpus: MAX_VCPUS, devices: 0, cpu_models: false };
                    prop_assert!(spec.check(&limits).is_ok());
                }
                Err(error) => {
                    prop_assert_eq!(error.kind(), FailureKind::Invalid);
                    prop_assert!(mib > MAX_MEMORY_MIB || cpus.unwrap_or(0) > 64 * MILLI, "{}", error);
                }
            }
        }

        /// No resize leaves a VM with less than one vCPU, or larger than its bounds.
        #[test]
        fn one_that_runs_stays_within_its_bounds(
            (vcpus, max_vcpus) in (1..=64u32).prop_flat_map(|now| (Just(now), prop_oneof![Just(0), now..=64])),
            least in 0..=u32::MAX,
            (least_memory, used, rest) in (any_size(), 0..1u64 << 20, 0..1u64 << 20),
            old in any::<bool>(),
            memory_limit in any::<i64>(),
            cpu_quota in any::<i64>(),
            cpu_period in any::<i64>(),
        ) {
            const BLOCK: u64 = 128 << 20;
            let memory = least_memory.saturating_add(used * BLOCK);
            let max_memory = if old { 0 } else { memory.saturating_add(rest * BLOCK) };
            let machine = VmResources { vcpus, max_vcpus, memory, least_memory, max_memory };
            let asked = Resources { memory_limit, cpu_quota, cpu_period, ..Default::default() };
            match wanted(machine, least.max(1), &asked) {
                Ok(next) => {
                    prop_assert!((1..=machine.vcpu_bound()).contains(&next.vcpus));
                    prop_assert_eq!((next.least_memory, next.max_memory), (least_memory, max_memory));
                    prop_assert_eq!((next.memory_bound(), next.vcpu_bound()), (machine.memory_bound(), machine.vcpu_bound()));
                    prop_assert!(next.memory >= least_memory && (!old || next.memory == memory));
                    let more = next.memory - least_memory;
                    prop_assert!(more % BLOCK == 0 || next.memory == machine.memory_bound());
                    prop_assert!(memory_limit <= 0 || memory_limit.unsigned_abs() <= next.memory);
                    // Not one block more than necessary.
                    let needed = memory_limit.max(0).unsigned_abs();
                    prop_assert!(next.memory == memory || more == 0 || next.memory - needed < BLOCK);
                    let milli = cpu_milli(cpu_period, cpu_quota);
                    prop_assert!(u64::from(next.vcpus) * MILLI >= milli.unwrap_or(0));
                }
                Err((has, wants)) => prop_assert!(!has.is_empty() && !wants.is_empty()),
            }
        }
    }

    fn machine() -> MachineSpec {
        MachineSpec {
            vcpus: 1,
            topology: None,
            cpu_model: None,
            memory_mib: 64,
            hotplug_mib: 0,
            memory_pages: MemoryPages::Transparent,
            kernel: "/k".into(),
            initrd: "/i".into(),
            cmdline: vec![],
            disks: vec![],
            nics: vec![],
            run_dir: "/run/pod".into(),
            console: nacelle_base::machine::ConsoleKind::Serial,
            console_log: "/run/pod/console.log".into(),
            guest_cid: 3,
            shares: vec![],
        }
    }
}
