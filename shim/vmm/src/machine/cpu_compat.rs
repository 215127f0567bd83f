//! Checks whether a saved vCPU can continue on this node: the guest has read CPUID before and relies on it. Pure: compares two
//! lists of entries.

use kvm_bindings::kvm_cpuid_entry2;

type CpuidEntry = kvm_cpuid_entry2;

#[derive(Clone, Copy)]
enum CpuidRegister {
    Eax,
    Ebx,
    Ecx,
    Edx,
}

/// Registers with feature bits (leaf, subleaf, register), and their bits that follow what the guest has enabled (OSXSAVE, OSPKE).
const FEATURES: [(u32, u32, CpuidRegister, u32); 22] = [
    (0x1, 0, CpuidRegister::Ecx, 1 << 27),
    (0x1, 0, CpuidRegister::Edx, 0),
    (0x6, 0, CpuidRegister::Eax, 0),
    (0x7, 0, CpuidRegister::Ebx, 0),
    (0x7, 0, CpuidRegister::Ecx, 1 << 4),
    (0x7, 0, CpuidRegister::Edx, 0),
    (0x7, 1, CpuidRegister::Eax, 0),
    (0x7, 1, CpuidRegister::Edx, 0),
    (0x7, 2, CpuidRegister::Edx, 0),
    (0xd, 0, CpuidRegister::Eax, 0),
    (0xd, 0, CpuidRegister::Edx, 0),
    (0xd, 1, CpuidRegister::Eax, 0),
    (0x14, 0, CpuidRegister::Ebx, 0),
    (0x4000_0001, 0, CpuidRegister::Eax, 0),
    (0x8000_0001, 0, CpuidRegister::Ecx, 0),
    (0x8000_0001, 0, CpuidRegister::Edx, 0),
    (0x8000_0007, 0, CpuidRegister::Ebx, 0),
    (0x8000_0007, 0, CpuidRegister::Edx, 0),
    (0x8000_0008, 0, CpuidRegister::Ebx, 0),
    (0x8000_000a, 0, CpuidRegister::Edx, 0),
    (0x8000_001f, 0, CpuidRegister::Eax, 0),
    (0x8000_0021, 0, CpuidRegister::Eax, 0),
];

impl CpuidRegister {
    fn value(self, entry: &CpuidEntry) -> u32 {
        match self {
            CpuidRegister::Eax => entry.eax,
            CpuidRegister::Ebx => entry.ebx,
            CpuidRegister::Ecx => entry.ecx,
            CpuidRegister::Edx => entry.edx,
        }
    }

    fn name(self) -> &'static str {
        match self {
            CpuidRegister::Eax => "EAX",
            CpuidRegister::Ebx => "EBX",
            CpuidRegister::Ecx => "ECX",
            CpuidRegister::Edx => "EDX",
        }
    }
}

fn find(entries: &[CpuidEntry], function: u32, index: u32) -> Option<&CpuidEntry> {
    entries.iter().find(|entry| (entry.function, entry.index) == (function, index))
}

/// Returns the first feature that the saved vCPU had and that a vCPU of a new VM does not have `here`, or `None` if the saved vCPU can
/// continue here. (The list of features that KVM supports is not the criterion: KVM changes some of the entries that it is given.)
pub(super) fn missing_feature(here: &[CpuidEntry], saved: &[CpuidEntry]) -> Option<String> {
    let vendor = |entries| find(entries, 0, 0).map(|entry| [entry.ebx, entry.edx, entry.ecx]);
    if vendor(saved) != vendor(here) {
        let name = vendor(saved).unwrap_or_default().map(u32::to_le_bytes).concat();
        return Some(format!("the vendor {:?}", String::from_utf8_lossy(&name)));
    }
    for (function, index, register, dynamic) in FEATURES {
        let had = find(saved, function, index).map_or(0, |entry| register.value(entry));
        let has = find(here, function, index).map_or(0, |entry| register.value(entry));
        let lost = had & !has & !dynamic;
        if lost != 0 {
            return Some(format!("the bits {lost:#x} of CPUID {function:#x}.{index} {}", register.name()));
        }
    }
    let width = |entries| find(entries, 0x8000_0008, 0).map_or(0, |entry| entry.eax & 0xff);
    (width(saved) > width(here)).then(|| format!("physical addresses of {} bits", width(saved)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(function: u32, index: u32, [eax, ebx, ecx, edx]: [u32; 4]) -> CpuidEntry {
        CpuidEntry { function, index, eax, ebx, ecx, edx, ..Default::default() }
    }

    fn host() -> Vec<CpuidEntry> {
        let vendor = [0x10, 0x6874_7541, 0x444d_4163, 0x6974_6e65];
        vec![
            entry(0, 0, vendor),
            entry(1, 0, [0x80_0f12, 0, 0x7ed8_320b, 0x178b_fbff]),
            entry(7, 0, [1, 0x209c_01a9, 0x40_0004, 0]),
            entry(0xd, 0, [7, 0x340, 0x340, 0]),
            entry(0x4000_0001, 0, [0x100_7efb, 0, 0, 0]),
            entry(0x8000_0001, 0, [0, 0, 0x40_03f3, 0x2fd3_fbff]),
            entry(0x8000_0008, 0, [0x3028, 0x1000, 0, 0]),
        ]
    }

    #[test]
    fn bits_that_the_guest_enables_are_ignored() {
        let mut saved = host();
        saved[1].ecx |= 1 << 27;
        saved[2].ecx |= 1 << 4;
        assert_eq!(missing_feature(&host(), &saved), None);
    }

    #[test]
    fn missing_features_are_named() {
        let saved = host();
        type Change = fn(&mut Vec<CpuidEntry>);
        let table: [(Change, &str); 6] = [
            (|host| host[0].ebx = 0, "the vendor \"AuthenticAMD\""),
            (|host| host[2].ebx &= !(1 << 5), "the bits 0x20 of CPUID 0x7.0 EBX"),
            (|host| host.truncate(2), "the bits 0x209c01a9 of CPUID 0x7.0 EBX"),
            (|host| host[3].eax = 3, "the bits 0x4 of CPUID 0xd.0 EAX"),
            (|host| host[4].eax &= !8, "the bits 0x8 of CPUID 0x40000001.0 EAX"),
            (|host| host[6].eax = 0x3024, "physical addresses of 40 bits"),
        ];
        for (change, expected) in table {
            let mut other = host();
            change(&mut other);
            assert_eq!(missing_feature(&other, &saved).as_deref(), Some(expected));
        }
        let mut better = host();
        better[2].ecx |= 1 << 8;
        assert_eq!(missing_feature(&better, &saved), None, "more is no hindrance");
    }
}
