//! Defines the layout of the guest's physical address space, as pure arithmetic.

use linux_loader::bootparam::boot_e820_entry;
use std::ops::Range;

/// One MiB, in bytes.
pub(super) const MIB: u64 = 1 << 20;
/// The start of the hole for devices. Memory below this address is one region; the rest starts at [`HIGH_MEMORY`].
pub(super) const HOLE: u64 = 3 << 30;
/// The start of the memory above the hole for devices.
pub(super) const HIGH_MEMORY: u64 = 4 << 30;

/// The address and the interrupt of the generation id. The interrupt is that of a second serial port, which the VM does not have.
pub(super) const GENERATION_ID: (u64, u32) = (WINDOWS - WINDOW_SIZE, 3);
/// The address of the first device's registers.
pub const WINDOWS: u64 = 0xd000_0000;
/// The size in bytes of one device's register window.
pub const WINDOW_SIZE: u64 = 0x1000;
/// The interrupt of the first device; each device has its own. Lower numbers belong to the timer, the serial port and similar devices.
pub const FIRST_GSI: u32 = 5;
/// The number of pins of the interrupt controller (the IO-APIC that KVM creates).
pub(super) const GSIS: u32 = 24;
/// The maximum number of devices of a VM.
pub const MAX_DEVICES: usize = (GSIS - FIRST_GSI) as usize;

/// The address range of the memory that devices share with their drivers.
pub(super) const SHARED: Range<u64> = 0xd800_0000..0xe000_0000;
/// The alignment of each device's shared memory: a large page of the guest.
pub(super) const SHARED_UNIT: u64 = 2 << 20;

/// The address at which Intel CPUs keep a task state segment (three pages) and an identity-mapping page table for a guest in
/// real mode. KVM requires an address that the guest does not use.
pub(super) const IDENTITY_MAP: u64 = 0xfffb_c000;
pub(super) const TSS: usize = 0xfffb_d000;

pub(super) const GDT: u64 = 0x500;
pub(super) const IDT: u64 = 0x540;
pub(super) const PVH_INFO: u64 = 0x6000;
pub(super) const PVH_MODULES: u64 = 0x6040;
pub(super) const PVH_MEMORY_MAP: u64 = 0x6060;
pub(super) const ZERO_PAGE: u64 = 0x7000;
pub(super) const STACK: u64 = 0x8ff0;
/// The page tables: the top level, the middle level, and four directories that map 1 GiB each.
pub(super) const PAGE_TABLES: [u64; 6] = [0x9000, 0xa000, 0xb000, 0xc000, 0xd000, 0xe000];
pub(super) const CMDLINE: u64 = 0x2_0000;
/// The maximum length of the kernel command line with its closing zero (`COMMAND_LINE_SIZE` on x86).
pub(super) const CMDLINE_MAX: usize = 2048;
/// The end of the memory below 1 MiB that the guest may use.
pub(super) const BASE_MEMORY_END: u64 = 0x9_fc00;
/// The address at which a kernel looks for firmware tables.
pub(super) const MP_TABLE: u64 = 0xf_0000;
/// The lowest load address of a kernel.
pub(super) const HIGH: u64 = MIB;

pub(super) const E820_RAM: u32 = 1;
pub(super) const E820_RESERVED: u32 = 2;

/// Returns the guest's memory as (address, length) of its regions, which are contiguous on the host.
pub(super) fn regions(memory_mib: u32) -> Vec<(u64, u64)> {
    let size = u64::from(memory_mib) * MIB;
    match size.checked_sub(HOLE) {
        None | Some(0) => vec![(0, size)],
        Some(rest) => vec![(0, HOLE), (HIGH_MEMORY, rest)],
    }
}

/// The granularity at which a kernel hot-adds memory, in MiB.
pub const BLOCK_MIB: u32 = 128;

/// Returns the memory that a VM is created with, in MiB. Hot-plug memory starts at a block boundary.
pub fn total_mib(memory_mib: u32, hotplug_mib: u32) -> u32 {
    match hotplug_mib {
        0 => memory_mib,
        _ => memory_mib.div_ceil(BLOCK_MIB).saturating_mul(BLOCK_MIB).saturating_add(hotplug_mib),
    }
}

/// Returns the address ranges of the last `hotplug_mib` of the memory, without the first `used_mib` of them. The hole begins
/// and ends at a block boundary.
pub fn unused_hotplug_ranges(memory_mib: u32, hotplug_mib: u32, used_mib: u32) -> Vec<Range<u64>> {
    let total = total_mib(memory_mib, hotplug_mib);
    let first = u64::from(total - hotplug_mib.saturating_sub(used_mib)) * MIB;
    let after = |(start, length): (u64, u64)| {
        // The amount of memory below this region.
        let before = if start < HIGH_MEMORY { start } else { start - (HIGH_MEMORY - HOLE) };
        let skipped = first.saturating_sub(before).min(length);
        start + skipped..start + length
    };
    regions(total).into_iter().map(after).filter(|range| !range.is_empty()).collect()
}

/// Returns the end address of the memory.
pub fn memory_end(memory_mib: u32) -> u64 {
    regions(memory_mib).last().map_or(0, |(start, length)| start + length)
}

/// Returns the end address of the memory below the hole.
pub(super) fn low_end(memory_mib: u32) -> u64 {
    (u64::from(memory_mib) * MIB).min(HOLE)
}

/// Returns the memory map for the kernel (e820).
pub(super) fn memory_map(memory_mib: u32) -> Vec<boot_e820_entry> {
    let entry = |addr, end, kind| boot_e820_entry { addr, size: end - addr, r#type: kind };
    let mut map = vec![entry(0, BASE_MEMORY_END, E820_RAM), entry(BASE_MEMORY_END, HIGH, E820_RESERVED)];
    for (start, length) in regions(memory_mib) {
        map.push(entry(start.max(HIGH), start + length, E820_RAM));
    }
    map
}

/// Returns the address of an initramfs of `size` bytes: page-aligned and as high as possible below the hole and `limit` (a
/// field of the boot protocol). Returns `None` if it does not fit above `kernel_end`.
pub(super) fn initrd_address(memory_mib: u32, limit: u64, kernel_end: u64, size: u64) -> Option<u64> {
    let end = low_end(memory_mib).min(limit);
    let address = end.checked_sub(size)? & !0xfff;
    (address >= kernel_end.max(HIGH)).then_some(address)
}

/// Returns the register address and the interrupt of device `index`.
pub(super) fn device_window(index: usize) -> Option<(u64, u32)> {
    (index < MAX_DEVICES).then(|| (WINDOWS + index as u64 * WINDOW_SIZE, FIRST_GSI + index as u32))
}

/// Returns the kernel command-line parameter that announces the generation id to Nacelle's driver in the guest's kernel.
pub(super) fn generation_id_parameter() -> String {
    let (address, gsi) = GENERATION_ID;
    format!("nacelle_genid={address:#x}:{gsi}")
}

/// Returns the kernel command-line parameter that announces device `index`.
pub(super) fn device_parameter(index: usize) -> Option<String> {
    device_window(index).map(|(address, gsi)| format!("virtio_mmio.device=4K@{address:#x}:{gsi}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn fixed_addresses_do_not_overlap() {
        let mut ranges = vec![
            (GDT, 0x40),
            (IDT, 8),
            (PVH_INFO, 0x40),
            (PVH_MODULES, 0x20),
            (PVH_MEMORY_MAP, 24 * 5),
            (ZERO_PAGE, 0x1000),
            (STACK - 0xff0, 0xff0),
            (CMDLINE, CMDLINE_MAX as u64),
            (MP_TABLE, HIGH - MP_TABLE),
        ];
        ranges.extend(PAGE_TABLES.map(|at| (at, 0x1000)));
        ranges.sort();
        for pair in ranges.windows(2) {
            assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{pair:x?}");
        }
    }

    /// Tries all pairs of devices.
    #[test]
    fn no_window_overlaps_another_one_or_memory() {
        let mut windows: Vec<Range<u64>> = (0..MAX_DEVICES)
            .filter_map(device_window)
            .map(|(address, _)| address..address + WINDOW_SIZE)
            .chain([GENERATION_ID.0..GENERATION_ID.0 + WINDOW_SIZE, SHARED])
            .collect();
        windows.sort_by_key(|window| window.start);
        assert!(windows.windows(2).all(|pair| pair[0].end <= pair[1].start), "{windows:x?}");
        assert!(windows.iter().all(|window| window.start >= HOLE && window.end <= IDENTITY_MAP));
        let mut interrupts: Vec<u32> = (0..MAX_DEVICES).filter_map(device_window).map(|(_, gsi)| gsi).collect();
        interrupts.push(GENERATION_ID.1);
        interrupts.sort_unstable();
        interrupts.dedup();
        assert!(interrupts.len() == MAX_DEVICES + 1 && interrupts.iter().all(|gsi| *gsi < GSIS));
    }

    /// Tries all sizes up to 6 GiB by steps of 64 MiB around each block, and the largest ones, with hot-plug memory of each kind.
    #[test]
    fn memory_is_where_it_can_be_and_addresses_do_not_wrap() {
        let sizes = (0..=6 << 10).step_by(64).flat_map(|mib: u32| [mib.saturating_sub(1), mib, mib + 1]);
        let large = [16 << 20, (16 << 20) + 1, u32::MAX - 1, u32::MAX];
        for memory_mib in sizes.filter(|mib| *mib > 0).chain(large) {
            for hotplug_mib in [0, 128, 1024, 3 << 10, 16 << 20, u32::MAX / BLOCK_MIB * BLOCK_MIB] {
                let total = total_mib(memory_mib, hotplug_mib);
                let regions = regions(total);
                let bytes: u64 = regions.iter().map(|(_, length)| length).sum();
                assert_eq!(bytes, u64::from(total) * MIB);
                for (start, length) in &regions {
                    let end = start.checked_add(*length).unwrap();
                    assert!(*length > 0 && (end <= HOLE || *start >= HIGH_MEMORY), "{memory_mib} {hotplug_mib}");
                }
                for used_mib in [0, hotplug_mib / 2, hotplug_mib] {
                    let unused = unused_hotplug_ranges(memory_mib, hotplug_mib, used_mib);
                    let is_in = |range: &Range<u64>| {
                        regions.iter().any(|(start, length)| range.start >= *start && range.end <= start + length)
                    };
                    assert!(unused.iter().all(is_in), "{memory_mib} {hotplug_mib} {used_mib}: {unused:x?}");
                    let bytes: u64 = unused.iter().map(|range| range.end - range.start).sum();
                    // Of saturated sizes there is less than requested.
                    assert!(
                        bytes <= u64::from(hotplug_mib - used_mib) * MIB
                            && (total == u32::MAX || bytes == u64::from(hotplug_mib - used_mib) * MIB)
                    );
                }
            }
        }
    }

    #[test]
    fn the_last_window_uses_the_last_interrupt() {
        assert_eq!(device_window(0), Some((0xd000_0000, 5)));
        assert_eq!(device_window(MAX_DEVICES - 1), Some((0xd001_2000, 23)));
        assert_eq!(device_window(MAX_DEVICES), None);
        assert_eq!(device_parameter(2).as_deref(), Some("virtio_mmio.device=4K@0xd0002000:7"));
    }

    #[test]
    fn hotplug_memory_continues_above_the_hole() {
        let ranges = |memory_mib, hotplug_mib, used_mib| {
            let ranges = unused_hotplug_ranges(memory_mib, hotplug_mib, used_mib).into_iter();
            ranges.map(|range| (range.start, range.end)).collect::<Vec<_>>()
        };
        assert_eq!(ranges(300, 256, 0), [(384 << 20, 640 << 20)]);
        assert_eq!(ranges(300, 256, 128), [(512 << 20, 640 << 20)]);
        assert_eq!(ranges(2048, 2048, 0), [(2 << 30, 3 << 30), (4 << 30, 5 << 30)]);
        assert_eq!(ranges(2048, 2048, 1024), [(4 << 30, 5 << 30)]);
        assert_eq!(ranges(2048, 2048, 1536), [((4 << 30) + (512 << 20), 5 << 30)]);
        assert_eq!(ranges(3500, 128, 0), [((4 << 30) + (512 << 20), (4 << 30) + (640 << 20))]);
        assert_eq!((ranges(300, 0, 0), total_mib(300, 0)), (vec![], 300));
        assert_eq!((memory_end(256), memory_end(3072), memory_end(3073)), (256 << 20, 3 << 30, (4 << 30) + (1 << 20)));
    }

    proptest! {
        #[test]
        fn memory_regions_are_complete_and_avoid_the_hole(mib in 16u32..1 << 20) {
            let regions = regions(mib);
            prop_assert_eq!(regions.iter().map(|region| region.1).sum::<u64>(), u64::from(mib) * MIB);
            for (start, length) in &regions {
                prop_assert!(start + length <= HOLE || *start >= HIGH_MEMORY);
            }
            let map = memory_map(mib);
            for pair in map.windows(2) {
                let (address, size, next) = (pair[0].addr, pair[0].size, pair[1].addr);
                prop_assert!(address + size <= next);
            }
            let usable: u64 = map.iter().filter(|entry| entry.r#type == E820_RAM).map(|entry| entry.size).sum();
            prop_assert_eq!(usable, u64::from(mib) * MIB - (HIGH - BASE_MEMORY_END));
        }

        #[test]
        fn hotplug_memory_consists_of_whole_blocks_above_the_reported_memory(
            mib in 16u32..8192,
            blocks in 0u32..64,
            used in 0u32..80,
        ) {
            let hotplug_mib = blocks * BLOCK_MIB;
            let (total, all) = (total_mib(mib, hotplug_mib), unused_hotplug_ranges(mib, hotplug_mib, 0));
            prop_assert!(total >= mib + hotplug_mib && total - mib - hotplug_mib < BLOCK_MIB);
            prop_assert_eq!(all.iter().map(|range| range.end - range.start).sum::<u64>(), u64::from(hotplug_mib) * MIB);
            let reported_end = memory_map(mib).last().map_or(0, |entry| entry.addr + entry.size);
            prop_assert_eq!(reported_end, memory_end(mib));
            let block = u64::from(BLOCK_MIB) * MIB;
            for range in &all {
                prop_assert!(range.start % block == 0 && range.end % block == 0 && range.start >= reported_end);
                prop_assert!(regions(total).iter().any(|(start, length)| *start <= range.start && range.end <= start + length));
            }
            // The last blocks of the hot-plug memory are the unused ones.
            let rest = unused_hotplug_ranges(mib, hotplug_mib, used * BLOCK_MIB);
            let left = u64::from(blocks.saturating_sub(used)) * block;
            prop_assert_eq!(rest.iter().map(|range| range.end - range.start).sum::<u64>(), left);
            prop_assert!(left == 0 || rest.last().map(|range| range.end) == all.last().map(|range| range.end));
        }

        #[test]
        fn an_initrd_is_between_the_kernel_and_the_hole(mib in 16u32..8192, end in 0u64..1 << 33, size in 0u64..1 << 33) {
            if let Some(address) = initrd_address(mib, u64::MAX, end, size) {
                prop_assert!(address >= end && address >= HIGH && address % 4096 == 0);
                prop_assert!(address + size <= low_end(mib));
            }
        }
    }
}
