//! Owns: what the CPUID instruction says in the guest: what KVM supports, and where each processor stands.
//! Pure: edits a list of entries.

use kvm_bindings::{KVM_CPUID_FLAG_SIGNIFCANT_INDEX, kvm_cpuid_entry2};

/// Leaf 1, ECX.
const TSC_DEADLINE: u32 = 1 << 24;
const HYPERVISOR: u32 = 1 << 31;
/// Leaf 1, EDX: more than one logical processor in the package.
const HTT: u32 = 1 << 28;
/// Leaf 0x8000_0001, ECX: the legacy way to say that.
const CMP_LEGACY: u32 = 1 << 1;

/// Where a processor stands: one package, one thread a core; the APIC id is the index.
#[derive(Clone, Copy)]
struct Place {
    id: u32,
    vcpus: u32,
    /// Bits of an APIC id that tell processors apart.
    bits: u32,
}

/// The entries for processor `id` of `vcpus`, from those that KVM supports.
pub(super) fn for_vcpu(supported: &[kvm_cpuid_entry2], id: u8, vcpus: u8) -> Vec<kvm_cpuid_entry2> {
    let vcpus = u32::from(vcpus.max(1));
    let place = Place { id: u32::from(id), vcpus, bits: vcpus.next_power_of_two().trailing_zeros() };
    let topology = [0xb, 0x1f];
    let mut entries: Vec<_> = supported.iter().filter(|entry| !topology.contains(&entry.function)).copied().collect();
    entries.iter_mut().for_each(|entry| place.edit(entry));
    let highest = supported.iter().find(|entry| entry.function == 0).map_or(0, |entry| entry.eax);
    for function in topology.into_iter().filter(|leaf| *leaf <= highest) {
        entries.extend(place.topology(function));
    }
    entries
}

impl Place {
    fn edit(self, entry: &mut kvm_cpuid_entry2) {
        let Place { id, vcpus, bits } = self;
        match entry.function {
            0x1 => {
                entry.ebx = id << 24 | vcpus << 16 | entry.ebx & 0xffff;
                entry.ecx |= TSC_DEADLINE | HYPERVISOR;
                set(&mut entry.edx, HTT, vcpus > 1);
            }
            // Deterministic cache parameters (Intel), cache topology (AMD): who shares this cache, and how many cores.
            // An entry of type 0 ends the list.
            0x4 | 0x8000_001d if entry.eax & 0x1f != 0 => {
                let level = entry.eax >> 5 & 0x7;
                let sharing = if level >= 3 { (1 << bits) - 1 } else { 0 };
                let cores = if entry.function == 0x4 { (1 << bits) - 1 } else { 0 };
                entry.eax = entry.eax & 0x3fff | sharing << 14 | cores << 26;
            }
            // No counters of events: a guest that finds them spends its boot on them.
            0xa => (entry.eax, entry.ebx, entry.ecx, entry.edx) = (0, 0, 0, 0),
            0x8000_0001 => set(&mut entry.ecx, CMP_LEGACY, vcpus > 1),
            0x8000_0008 => entry.ecx = bits << 12 | (vcpus - 1),
            0x8000_001e => (entry.eax, entry.ebx, entry.ecx) = (id, id, 0),
            _ => {}
        }
    }

    /// Extended topology: threads, then cores, then the end (Intel manual, volume 2A, CPUID leaves 0BH and 1FH).
    fn topology(self, function: u32) -> [kvm_cpuid_entry2; 3] {
        let Place { id, vcpus, bits } = self;
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

fn set(register: &mut u32, bit: u32, on: bool) {
    *register = if on { *register | bit } else { *register & !bit };
}

/// The processor's signature and features as leaf 1 tells them, for tables of the firmware.
pub(super) fn signature(entries: &[kvm_cpuid_entry2]) -> (u32, u32) {
    entries.iter().find(|entry| entry.function == 1).map_or((0, 0), |entry| (entry.eax, entry.edx))
}
