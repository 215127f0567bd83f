//! Prepares the boot state that a kernel expects: zero page or PVH start information, descriptor and page tables, registers.

use super::kernel::{KernelEntry, KernelError, LoadedKernel};
use super::layout::{self, memory_map};
use crate::Memory;
use kvm_bindings::{kvm_regs, kvm_segment, kvm_sregs};
use linux_loader::bootparam::boot_params;
use linux_loader::loader::elf::start_info::{hvm_memmap_table_entry, hvm_modlist_entry, hvm_start_info};
use vm_memory::{Bytes, GuestAddress};

/// The segments that both entry points need: code, data and a task, at the selectors of Linux' boot protocol.
#[derive(Clone, Copy)]
struct SegmentDescriptor {
    selector: u16,
    /// The access byte: present, ring 0, and the type.
    access: u8,
    /// The upper four bits of the flags: granularity, size, long mode.
    flags: u8,
    limit: u32,
}

const CODE_64: SegmentDescriptor = SegmentDescriptor { selector: 0x10, access: 0x9b, flags: 0xa, limit: 0xf_ffff };
const CODE_32: SegmentDescriptor = SegmentDescriptor { selector: 0x10, access: 0x9b, flags: 0xc, limit: 0xf_ffff };
const DATA: SegmentDescriptor = SegmentDescriptor { selector: 0x18, access: 0x93, flags: 0xc, limit: 0xf_ffff };
const TASK: SegmentDescriptor = SegmentDescriptor { selector: 0x20, access: 0x8b, flags: 0x0, limit: 0x67 };

impl SegmentDescriptor {
    /// Encodes the descriptor as a table entry (AMD64 manual, volume 2, 4.7 and 4.8) with base 0.
    fn entry(self) -> u64 {
        let limit = u64::from(self.limit);
        (limit & 0xffff) | u64::from(self.access) << 40 | (limit >> 16) << 48 | u64::from(self.flags) << 52
    }

    /// Encodes the descriptor as KVM's segment register.
    fn segment(self) -> kvm_segment {
        let bit = |byte: u8, at: u8| byte >> at & 1;
        let pages = bit(self.flags, 3) == 1;
        kvm_segment {
            base: 0,
            limit: if pages { self.limit << 12 | 0xfff } else { self.limit },
            selector: self.selector,
            type_: self.access & 0xf,
            present: bit(self.access, 7),
            dpl: 0,
            db: bit(self.flags, 2),
            s: bit(self.access, 4),
            l: bit(self.flags, 1),
            g: bit(self.flags, 3),
            ..Default::default()
        }
    }
}

/// Joins the kernel command-line parameters. Fails if the line with its closing zero exceeds `CMDLINE_MAX` bytes.
pub(super) fn cmdline(parameters: impl IntoIterator<Item = String>) -> Result<String, KernelError> {
    let line = parameters.into_iter().collect::<Vec<_>>().join(" ");
    match line.len() + 1 {
        got if got > layout::CMDLINE_MAX => Err(KernelError::Cmdline { got, max: layout::CMDLINE_MAX }),
        _ => Ok(line),
    }
}

/// Writes all boot data to memory. `initrd` is the address and size of the initramfs.
pub(super) fn write_boot_data(
    memory: &Memory,
    memory_mib: u32,
    kernel: &LoadedKernel,
    cmdline: &str,
    initrd: Option<(u64, u64)>,
) -> Result<(), KernelError> {
    let mut writer = BootWriter { memory };
    writer.write_bytes(layout::CMDLINE, cmdline.as_bytes())?;
    writer.write_bytes(layout::CMDLINE + cmdline.len() as u64, &[0])?;
    match kernel.entry {
        KernelEntry::Long(_) => {
            writer.write_object(layout::ZERO_PAGE, zero_page(memory_mib, kernel, cmdline, initrd))?;
            writer.write_descriptor_tables(CODE_64)?;
            writer.write_page_tables()
        }
        KernelEntry::Pvh(_) => {
            writer.write_descriptor_tables(CODE_32)?;
            writer.write_start_info(memory_mib, initrd)
        }
    }
}

/// Returns the boot parameters of Linux ("The Linux/x86 Boot Protocol", "zero page").
fn zero_page(memory_mib: u32, kernel: &LoadedKernel, cmdline: &str, initrd: Option<(u64, u64)>) -> boot_params {
    let mut page = boot_params { hdr: kernel.header.unwrap_or_default(), ..Default::default() };
    page.hdr.type_of_loader = 0xff; // a boot loader without an assigned number
    page.hdr.boot_flag = 0xaa55;
    page.hdr.header = u32::from_le_bytes(*b"HdrS");
    page.hdr.cmd_line_ptr = layout::CMDLINE as u32;
    page.hdr.cmdline_size = cmdline.len() as u32;
    if kernel.header.is_none() {
        page.hdr.kernel_alignment = 0x100_0000;
    }
    if let Some((address, size)) = initrd {
        page.hdr.ramdisk_image = address as u32; // below the hole
        page.hdr.ramdisk_size = size as u32;
    }
    let map = memory_map(memory_mib);
    page.e820_entries = map.len() as u8; // four at most
    page.e820_table[..map.len()].copy_from_slice(&map);
    page
}

struct BootWriter<'a> {
    memory: &'a Memory,
}

impl BootWriter<'_> {
    fn write_bytes(&mut self, at: u64, bytes: &[u8]) -> Result<(), KernelError> {
        self.memory.write_slice(bytes, GuestAddress(at)).map_err(|source| KernelError::Write { source })
    }

    fn write_object<T: vm_memory::ByteValued>(&mut self, at: u64, object: T) -> Result<(), KernelError> {
        self.memory.write_obj(object, GuestAddress(at)).map_err(|source| KernelError::Write { source })
    }

    /// Writes the descriptor table, and an empty interrupt table.
    fn write_descriptor_tables(&mut self, code: SegmentDescriptor) -> Result<(), KernelError> {
        let mut table = [0u64; GDT_ENTRIES];
        for descriptor in [code, DATA, TASK] {
            table[usize::from(descriptor.selector / 8)] = descriptor.entry();
        }
        let bytes: Vec<u8> = table.iter().flat_map(|entry| entry.to_le_bytes()).collect();
        self.write_bytes(layout::GDT, &bytes)?;
        self.write_object(layout::IDT, 0u64)
    }

    /// Writes page tables that map the first 4 GiB one to one, in pages of 2 MiB.
    fn write_page_tables(&mut self) -> Result<(), KernelError> {
        const PRESENT_WRITABLE: u64 = 0x3;
        const LARGE: u64 = 0x80;
        let [top, middle, directories @ ..] = layout::PAGE_TABLES;
        self.write_object(top, middle | PRESENT_WRITABLE)?;
        for (gib, directory) in directories.into_iter().enumerate() {
            self.write_object(middle + gib as u64 * 8, directory | PRESENT_WRITABLE)?;
            let pages = (0..512).map(|page| (gib as u64) << 30 | page << 21 | PRESENT_WRITABLE | LARGE);
            let bytes: Vec<u8> = pages.flat_map(u64::to_le_bytes).collect();
            self.write_bytes(directory, &bytes)?;
        }
        Ok(())
    }

    /// Writes PVH's start information (`xen/include/public/arch-x86/hvm/start_info.h`).
    fn write_start_info(&mut self, memory_mib: u32, initrd: Option<(u64, u64)>) -> Result<(), KernelError> {
        const MAGIC: u32 = 0x336e_c578;
        let map = memory_map(memory_mib);
        let info = hvm_start_info {
            magic: MAGIC,
            version: 1,
            nr_modules: u32::from(initrd.is_some()),
            modlist_paddr: layout::PVH_MODULES,
            cmdline_paddr: layout::CMDLINE,
            memmap_paddr: layout::PVH_MEMORY_MAP,
            memmap_entries: map.len() as u32,
            ..Default::default()
        };
        self.write_object(layout::PVH_INFO, info)?;
        if let Some((paddr, size)) = initrd {
            self.write_object(layout::PVH_MODULES, hvm_modlist_entry { paddr, size, ..Default::default() })?;
        }
        for (index, entry) in map.iter().enumerate() {
            let entry = hvm_memmap_table_entry { addr: entry.addr, size: entry.size, type_: entry.r#type, reserved: 0 };
            self.write_object(layout::PVH_MEMORY_MAP + (index * size_of::<hvm_memmap_table_entry>()) as u64, entry)?;
        }
        Ok(())
    }
}

/// The number of GDT entries: null, unused, code, data, task.
const GDT_ENTRIES: usize = 5;

/// Returns the general registers of the boot vCPU.
pub(super) fn initial_registers(entry: KernelEntry) -> kvm_regs {
    let regs = kvm_regs { rflags: 0x2, ..Default::default() };
    match entry {
        KernelEntry::Long(rip) => {
            kvm_regs { rip, rsp: layout::STACK, rbp: layout::STACK, rsi: layout::ZERO_PAGE, ..regs }
        }
        KernelEntry::Pvh(rip) => kvm_regs { rip, rbx: layout::PVH_INFO, ..regs },
    }
}

/// Sets the segments and control registers of the boot vCPU. The fields of the APIC keep KVM's values.
pub(super) fn set_special_registers(sregs: &mut kvm_sregs, entry: KernelEntry) {
    const CR0_PROTECTED: u64 = 1 | 1 << 4; // PE, ET
    const CR0_PAGING: u64 = 1 << 31;
    const CR4_PAE: u64 = 1 << 5;
    const EFER_LONG: u64 = 1 << 8 | 1 << 10; // LME, LMA
    let code = match entry {
        KernelEntry::Long(_) => CODE_64,
        KernelEntry::Pvh(_) => CODE_32,
    };
    sregs.cs = code.segment();
    let data = DATA.segment();
    (sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss) = (data, data, data, data, data);
    sregs.tr = TASK.segment();
    (sregs.gdt.base, sregs.gdt.limit) = (layout::GDT, GDT_ENTRIES as u16 * 8 - 1);
    (sregs.idt.base, sregs.idt.limit) = (layout::IDT, 7);
    match entry {
        KernelEntry::Long(_) => {
            sregs.cr0 = CR0_PROTECTED | CR0_PAGING;
            sregs.cr3 = layout::PAGE_TABLES[0];
            sregs.cr4 = CR4_PAE;
            sregs.efer = EFER_LONG;
        }
        KernelEntry::Pvh(_) => (sregs.cr0, sregs.cr4, sregs.efer) = (CR0_PROTECTED, 0, 0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vm_memory::GuestMemoryMmap;

    const MIB: u32 = 16;

    fn memory_with_boot_data(entry: KernelEntry, initrd: Option<(u64, u64)>) -> Memory {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 16 << 20)]).unwrap();
        write_boot_data(&memory, MIB, &LoadedKernel { entry, end: 2 << 20, header: None }, "a=1 quiet", initrd)
            .unwrap();
        memory
    }

    fn read_object<T: vm_memory::ByteValued>(memory: &Memory, at: u64) -> T {
        memory.read_obj(GuestAddress(at)).unwrap()
    }

    /// Walks the page tables as a CPU does.
    fn translate(memory: &Memory, address: u64) -> Option<u64> {
        let mut table = layout::PAGE_TABLES[0];
        for shift in [39, 30, 21] {
            let entry: u64 = read_object(memory, table + (address >> shift & 0x1ff) * 8);
            match (entry & 1, entry >> 7 & 1) {
                (0, _) => return None,
                (_, 0) => table = entry & !0xfff,
                _ => return Some(entry & !0x1f_ffff | address & ((1 << shift) - 1)),
            }
        }
        None
    }

    #[test]
    fn the_first_4_gib_are_identity_mapped() {
        let memory = memory_with_boot_data(KernelEntry::Long(2 << 20), None);
        for address in [0, 0x7000, 0x1f_ffff, 0x20_0000, (1 << 30) - 1, 1 << 30, 0xd000_0123, (4 << 30) - 1] {
            assert_eq!(translate(&memory, address), Some(address), "{address:#x}");
        }
        assert_eq!(translate(&memory, 4 << 30), None);
    }

    #[test]
    fn the_zero_page_follows_the_boot_protocol() {
        let memory = memory_with_boot_data(KernelEntry::Long(2 << 20), Some((0xff_0000, 0x1234)));
        let page: boot_params = read_object(&memory, layout::ZERO_PAGE);
        let header = page.hdr;
        let (magic, flag, line, image, size) =
            (header.header, header.boot_flag, header.cmd_line_ptr, header.ramdisk_image, header.ramdisk_size);
        assert_eq!((magic, flag, line), (0x5372_6448, 0xaa55, layout::CMDLINE as u32));
        assert_eq!((image, size), (0xff_0000, 0x1234));
        assert_eq!(usize::from(page.e820_entries), memory_map(MIB).len());
        let mut text = [0xff; 10];
        memory.read_slice(&mut text, GuestAddress(layout::CMDLINE)).unwrap();
        assert_eq!(&text, b"a=1 quiet\0");
    }

    #[test]
    fn segment_registers_match_the_descriptor_table() {
        // The values that Linux' boot protocol requires, in the encoding of Linux' own boot code.
        assert_eq!(CODE_64.entry(), 0x00af_9b00_0000_ffff);
        assert_eq!(CODE_32.entry(), 0x00cf_9b00_0000_ffff);
        assert_eq!(DATA.entry(), 0x00cf_9300_0000_ffff);
        let memory = memory_with_boot_data(KernelEntry::Long(2 << 20), None);
        let mut sregs = kvm_sregs::default();
        set_special_registers(&mut sregs, KernelEntry::Long(2 << 20));
        for segment in [sregs.cs, sregs.ds, sregs.tr] {
            let entry: u64 = read_object(&memory, sregs.gdt.base + u64::from(segment.selector));
            assert_eq!(entry >> 40 & 0xf, u64::from(segment.type_));
            assert_eq!(entry >> 53 & 1, u64::from(segment.l));
            assert!(u64::from(segment.selector) + 7 <= u64::from(sregs.gdt.limit));
        }
        assert_eq!(sregs.cs.limit, u32::MAX);
    }

    #[test]
    fn pvh_start_info_contains_memory_and_modules() {
        let memory = memory_with_boot_data(KernelEntry::Pvh(2 << 20), Some((0xff_0000, 0x1234)));
        let info: hvm_start_info = read_object(&memory, layout::PVH_INFO);
        assert_eq!((info.magic, info.version, info.nr_modules), (0x336e_c578, 1, 1));
        let module: hvm_modlist_entry = read_object(&memory, info.modlist_paddr);
        assert_eq!((module.paddr, module.size), (0xff_0000, 0x1234));
        let last: hvm_memmap_table_entry = read_object(&memory, info.memmap_paddr + 2 * 24);
        assert_eq!((last.addr, last.size, last.type_), (1 << 20, 15 << 20, 1));
        let mut sregs = kvm_sregs::default();
        set_special_registers(&mut sregs, KernelEntry::Pvh(2 << 20));
        assert_eq!((sregs.cr0 >> 31, sregs.cs.l, sregs.cs.db), (0, 0, 1), "32 bits, no paging");
        assert_eq!(initial_registers(KernelEntry::Pvh(2 << 20)).rbx, layout::PVH_INFO);
    }

    #[test]
    fn an_oversized_command_line_is_rejected() {
        let parameters = |count: usize| std::iter::repeat_n("abcdefg".to_owned(), count);
        assert_eq!(cmdline(parameters(256)).unwrap().len() + 1, layout::CMDLINE_MAX);
        assert!(matches!(cmdline(parameters(257)), Err(KernelError::Cmdline { .. })));
    }
}
