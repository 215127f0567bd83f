//! Edits the CPUID entries that KVM supports into those of each vCPU of a guest. All functions are pure, except that
//! [`copy_brand_string`] executes CPUID on the host.

use core::arch::x86_64::__cpuid;
use kvm_bindings::{KVM_CPUID_FLAG_SIGNIFCANT_INDEX, kvm_cpuid_entry2};
use std::ops::RangeInclusive;

/// Leaf 1, ECX.
const TSC_DEADLINE: u32 = 1 << 24;
const HYPERVISOR: u32 = 1 << 31;
/// Leaf 1, EDX: more than one logical processor in the package.
const HTT: u32 = 1 << 28;
/// Leaf 0x8000_0001, ECX: the legacy bit with the same meaning.
const CMP_LEGACY: u32 = 1 << 1;

/// The leaves of the CPU's brand string, which are zero in the entries that KVM supports.
const BRAND_STRING: RangeInclusive<u32> = 0x8000_0002..=0x8000_0004;

/// The position of a vCPU in the topology: one package, one thread per core; the APIC id is the index.
#[derive(Clone, Copy)]
struct VcpuTopology {
    id: u32,
    vcpus: u32,
    /// The number of bits of an APIC id that distinguish vCPUs.
    bits: u32,
}

/// Copies the node's CPU brand string into the entries, if the node's CPU has one.
pub(super) fn copy_brand_string(supported: &mut [kvm_cpuid_entry2]) {
    let highest = __cpuid(0x8000_0000).eax;
    for entry in
        supported.iter_mut().filter(|entry| BRAND_STRING.contains(&entry.function) && entry.function <= highest)
    {
        let host = __cpuid(entry.function);
        (entry.eax, entry.ebx, entry.ecx, entry.edx) = (host.eax, host.ebx, host.ecx, host.edx);
    }
}

/// Returns the entries for vCPU `id` of `vcpus`, derived from those that KVM supports.
pub(super) fn vcpu_entries(supported: &[kvm_cpuid_entry2], id: u8, vcpus: u8) -> Vec<kvm_cpuid_entry2> {
    let vcpus = u32::from(vcpus.max(1));
    let topology = VcpuTopology { id: u32::from(id), vcpus, bits: vcpus.next_power_of_two().trailing_zeros() };
    let topology_leaves = [0xb, 0x1f];
    // The last leaf is AMD's variant. Without it a guest falls back to the others.
    let is_copied = |leaf: u32| !topology_leaves.contains(&leaf) && leaf != 0x8000_0026;
    let mut entries: Vec<_> = supported.iter().filter(|entry| is_copied(entry.function)).copied().collect();
    entries.iter_mut().for_each(|entry| topology.edit(entry));
    let highest = supported.iter().find(|entry| entry.function == 0).map_or(0, |entry| entry.eax);
    for function in topology_leaves.into_iter().filter(|leaf| *leaf <= highest) {
        entries.extend(topology.topology_entries(function));
    }
    entries
}

impl VcpuTopology {
    fn edit(self, entry: &mut kvm_cpuid_entry2) {
        let VcpuTopology { id, vcpus, bits } = self;
        match entry.function {
            0x1 => {
                entry.ebx = id << 24 | vcpus << 16 | entry.ebx & 0xffff;
                entry.ecx |= TSC_DEADLINE | HYPERVISOR;
                set_bit(&mut entry.edx, HTT, vcpus > 1);
            }
            // Deterministic cache parameters (Intel), cache topology (AMD): the threads that share this cache, and the number
            // of cores. An entry of type 0 ends the list.
            0x4 | 0x8000_001d if entry.eax & 0x1f != 0 => {
                let level = entry.eax >> 5 & 0x7;
                let sharing = if level >= 3 { (1 << bits) - 1 } else { 0 };
                let cores = if entry.function == 0x4 { (1 << bits) - 1 } else { 0 };
                entry.eax = entry.eax & 0x3fff | sharing << 14 | cores << 26;
            }
            // No performance counters: a guest that finds them spends boot time on setting them up.
            0xa => (entry.eax, entry.ebx, entry.ecx, entry.edx) = (0, 0, 0, 0),
            0x8000_0001 => set_bit(&mut entry.ecx, CMP_LEGACY, vcpus > 1),
            0x8000_0008 => entry.ecx = bits << 12 | (vcpus - 1),
            0x8000_001e => (entry.eax, entry.ebx, entry.ecx) = (id, id, 0),
            _ => {}
        }
    }

    /// Returns the extended topology: threads, then cores, then the end (Intel manual, volume 2A, CPUID leaves 0BH and 1FH).
    fn topology_entries(self, function: u32) -> [kvm_cpuid_entry2; 3] {
        let VcpuTopology { id, vcpus, bits } = self;
        let level = |index: u32, eax, ebx, kind: u32| kvm_cpuid_entry2 {
            function,
            index,
            flags: KVM_CPUID_FLAG_SIGNIFCANT_INDEX,
            eax,
            ebx,
            ecx: kind << 8 | index,
            edx: id,
            ..Default::default()
        };
        [level(0, 0, 1, 1), level(1, bits, vcpus, 2), level(2, 0, 0, 0)]
    }
}

fn set_bit(register: &mut u32, bit: u32, on: bool) {
    *register = if on { *register | bit } else { *register & !bit };
}

/// Returns the CPU's signature and features as in leaf 1, for the firmware tables.
pub(super) fn signature(entries: &[kvm_cpuid_entry2]) -> (u32, u32) {
    entries.iter().find(|entry| entry.function == 1).map_or((0, 0), |entry| (entry.eax, entry.edx))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn entry(function: u32, index: u32, [eax, ebx, ecx, edx]: [u32; 4]) -> kvm_cpuid_entry2 {
        kvm_cpuid_entry2 { function, index, eax, ebx, ecx, edx, ..Default::default() }
    }

    fn supported() -> Vec<kvm_cpuid_entry2> {
        vec![
            entry(0x0, 0, [0x1f, 0, 0, 0]),
            entry(0x1, 0, [0x800f12, 0xaa10_08bb, 0, 1 << 28]),
            entry(0x4, 0, [0xfc00_4121, 1, 2, 3]),
            entry(0x4, 3, [0xfc03_c163, 1, 2, 3]),
            entry(0x4, 4, [0; 4]),
            entry(0xa, 0, [0x0830_0805, 1, 2, 3]),
            entry(0xb, 0, [7, 7, 7, 7]),
            entry(0x8000_0001, 0, [0; 4]),
            entry(0x8000_0008, 0, [0x3030, 0x200, 0x7007, 0]),
            entry(0x8000_001d, 3, [0x163, 1, 2, 3]),
            entry(0x8000_001e, 0, [9, 0x109, 0x203, 0]),
        ]
    }

    fn find(entries: &[kvm_cpuid_entry2], function: u32, index: u32) -> [u32; 4] {
        let found = entries.iter().find(|entry| (entry.function, entry.index) == (function, index));
        found.map(|entry| [entry.eax, entry.ebx, entry.ecx, entry.edx]).unwrap()
    }

    #[test]
    fn the_entries_of_the_third_of_three_vcpus() {
        let entries = vcpu_entries(&supported(), 2, 3);
        assert_eq!(find(&entries, 0x1, 0), [0x800f12, 0x0203_08bb, 1 << 31 | 1 << 24, 1 << 28]);
        assert_eq!(find(&entries, 0x4, 0)[0], 3 << 26 | 0x121, "a cache of one core");
        assert_eq!(find(&entries, 0x4, 3)[0], 3 << 26 | 3 << 14 | 0x163, "a cache of all four places");
        assert_eq!(find(&entries, 0x4, 4), [0; 4], "the end of the list");
        assert_eq!(find(&entries, 0xa, 0), [0; 4]);
        for leaf in [0xb, 0x1f] {
            assert_eq!(find(&entries, leaf, 0), [0, 1, 1 << 8, 2]);
            assert_eq!(find(&entries, leaf, 1), [2, 3, 2 << 8 | 1, 2]);
            assert_eq!(find(&entries, leaf, 2), [0, 0, 2, 2]);
        }
        assert_eq!(find(&entries, 0x8000_0001, 0)[2], CMP_LEGACY);
        assert_eq!(find(&entries, 0x8000_0008, 0), [0x3030, 0x200, 0x2002, 0]);
        assert_eq!(find(&entries, 0x8000_001d, 3)[0], 3 << 14 | 0x163);
        assert_eq!(find(&entries, 0x8000_001e, 0), [2, 2, 0, 0]);
        assert_eq!(signature(&entries), (0x800f12, 1 << 28));
    }

    #[test]
    fn vcpus_have_the_nodes_brand_string() {
        let mut entries: Vec<_> = BRAND_STRING.chain([1]).map(|leaf| entry(leaf, 0, [0; 4])).collect();
        copy_brand_string(&mut entries);
        assert_eq!(find(&entries, 1, 0), [0; 4]);
        let text: Vec<u8> = BRAND_STRING.flat_map(|leaf| find(&entries, leaf, 0)).flat_map(u32::to_le_bytes).collect();
        let text = String::from_utf8_lossy(&text).trim_matches(['\0', ' ']).to_owned();
        let node = std::fs::read_to_string("/proc/cpuinfo").unwrap();
        let node = node.lines().find(|line| line.starts_with("model name")).unwrap();
        assert!(node.ends_with(&text), "{text:?} is not {node:?}");
    }

    proptest! {
        #[test]
        fn vcpus_have_unique_ids_and_equal_topologies(vcpus in 1u8..=64) {
            let all: Vec<_> = (0..vcpus).map(|id| vcpu_entries(&supported(), id, vcpus)).collect();
            for (id, entries) in (0u32..).zip(&all) {
                let [_, ebx, _, edx] = find(entries, 0x1, 0);
                prop_assert_eq!((ebx >> 24, ebx >> 16 & 0xff), (id, u32::from(vcpus)));
                prop_assert_eq!(edx & HTT != 0, vcpus > 1);
                let [bits, ..] = find(entries, 0xb, 1);
                prop_assert!(id >> bits == 0, "one package");
                prop_assert!(u32::from(vcpus) <= 1 << bits && (1 << bits) < 2 * u32::from(vcpus));
                prop_assert_eq!(find(entries, 0x8000_001e, 0)[0], id);
            }
        }
    }
}
