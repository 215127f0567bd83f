//! Builds the tables of the MultiProcessor Specification (version 1.4), in which a kernel without ACPI finds its vCPUs and the IO-APIC.

use super::layout::{GSIS, MP_TABLE};

const LOCAL_APIC: u32 = 0xfee0_0000;
const IO_APIC: u32 = 0xfec0_0000;
const APIC_VERSION: u8 = 0x14;
/// The id of the only bus, ISA, whose interrupts are edge-triggered and active high by default.
const BUS: u8 = 0;
const ALL_LOCAL_APICS: u8 = 0xff;
/// Types of interrupt entries (table 4-9).
const INT: u8 = 0;
const NMI: u8 = 1;
const EXT_INT: u8 = 3;

/// Returns the floating pointer structure followed by the configuration table, to be written to [`MP_TABLE`]. APIC ids count
/// from 0; the id of the IO-APIC follows that of the last vCPU.
pub(super) fn table(vcpus: u8, signature: u32, features: u32) -> Vec<u8> {
    let io_apic_id = vcpus;
    let mut entries = Vec::new();
    let mut count: u16 = 0;
    let mut entry = |bytes: &[u8]| {
        entries.extend_from_slice(bytes);
        count += 1;
    };
    for id in 0..vcpus {
        let boots = 1 | u8::from(id == 0) << 1; // enabled; the boot processor
        let mut processor = vec![0, id, APIC_VERSION, boots];
        processor.extend(signature.to_le_bytes());
        processor.extend(features.to_le_bytes());
        processor.extend([0; 8]);
        entry(&processor);
    }
    entry(&[1, BUS, b'I', b'S', b'A', b' ', b' ', b' ']);
    let [a, b, c, d] = IO_APIC.to_le_bytes();
    entry(&[2, io_apic_id, APIC_VERSION, 1, a, b, c, d]);
    for pin in 0..GSIS as u8 {
        entry(&[3, INT, 0, 0, BUS, pin, io_apic_id, pin]);
    }
    entry(&[4, EXT_INT, 0, 0, BUS, 0, 0, 0]);
    entry(&[4, NMI, 0, 0, BUS, 0, ALL_LOCAL_APICS, 1]);

    let mut header = Vec::from(*b"PCMP");
    header.extend(((44 + entries.len()) as u16).to_le_bytes());
    header.extend([4, 0]); // revision, checksum
    header.extend(b"NACELLE MACHINE     ");
    header.extend([0; 6]); // no OEM table
    header.extend(count.to_le_bytes());
    header.extend(LOCAL_APIC.to_le_bytes());
    header.extend([0; 4]); // no extended table
    header.extend(entries);
    header[7] = checksum(&header);

    let mut pointer = Vec::from(*b"_MP_");
    pointer.extend((MP_TABLE as u32 + 16).to_le_bytes());
    pointer.extend([1, 4, 0, 0, 0, 0, 0, 0]); // paragraphs, revision, checksum, features
    pointer[10] = checksum(&pointer);
    pointer.extend(header);
    pointer
}

/// Returns the byte that makes the sum of all bytes 0 (modulo 256).
fn checksum(bytes: &[u8]) -> u8 {
    bytes.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte)).wrapping_neg()
}

#[cfg(test)]
mod tests {
    use super::super::layout::HIGH;
    use super::*;

    #[test]
    fn checksums_are_zero_and_all_vcpus_are_listed() {
        for vcpus in [1, 2, 64] {
            let bytes = table(vcpus, 0x800f12, 1);
            assert!(MP_TABLE + bytes.len() as u64 <= HIGH);
            assert_eq!(checksum(&bytes[..16]), 0);
            assert_eq!(checksum(&bytes[16..]), 0);
            let table = &bytes[16..];
            assert_eq!(usize::from(u16::from_le_bytes([table[4], table[5]])), table.len());
            let (mut at, mut seen) = (44, 0);
            let mut processors = 0;
            while at < table.len() {
                processors += usize::from(table[at] == 0);
                at += if table[at] == 0 { 20 } else { 8 };
                seen += 1;
            }
            assert_eq!((at, processors), (table.len(), usize::from(vcpus)));
            assert_eq!(u16::from_le_bytes([table[34], table[35]]), seen);
        }
    }
}
