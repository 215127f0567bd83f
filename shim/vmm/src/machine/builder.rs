//! Creates a VM in the order of calls that KVM requires.

use super::bus::DeviceBus;
use super::genid::GenerationId;
use super::kernel::{self, KernelEntry};
use super::legacy::{self, KeyboardController, SerialPort};
use super::memory::{self, GuestMemory};
use super::state::{self, MachineState};
use super::vcpu::{Vcpu, VcpuControl, install_signal_handler};
use super::{Error, MAX_VCPUS, SerialSink, VmConfig, VmExit, VmHandle, boot, cpuid, layout, mptable};
use crate::mmio::{self, EmptyWindow, Transport};
use crate::{Device, Memory};
use kvm_bindings::{
    CpuId, KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, KVM_MAX_CPUID_ENTRIES, Msrs, kvm_cpuid_entry2, kvm_irqchip,
    kvm_msr_entry,
};
use kvm_ioctls::{Cap, IoEventAddress, Kvm, VcpuFd, VmFd};
use std::fs::File;
use std::path::Path;
use std::sync::{Arc, Mutex};
use vm_memory::{Bytes, GuestAddress, GuestMemoryRegion, GuestRegionMmap};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// A VM under construction: its memory exists and devices are attached, but no vCPU runs.
pub struct VmBuilder {
    config: VmConfig,
    supported: Vec<kvm_cpuid_entry2>,
    control: Arc<VcpuControl>,
    ports: DeviceBus,
    windows: DeviceBus,
    transports: Vec<Arc<Transport>>,
    serial: Option<Arc<SerialPort>>,
    /// The memory regions that devices share with their drivers.
    shared: Vec<Arc<GuestRegionMmap<()>>>,
    /// The ioeventfd for guest writes that this process need not handle.
    ignored_writes: EventFd,
    vm: Arc<VmFd>,
    /// Dropped last.
    memory: GuestMemory,
}

impl VmBuilder {
    /// Opens KVM and creates the memory and the interrupt controllers.
    pub fn new(config: VmConfig) -> Result<VmBuilder, Error> {
        let mib = layout::total_mib(config.memory_mib, config.hotplug_mib);
        let memory = GuestMemory::new(mib, config.backing, config.pages);
        VmBuilder::with_memory(config, memory)
    }

    /// Like [`new`](VmBuilder::new), with the memory that was saved to `file` (see [`VmHandle::save`]) by a VM with `saved_hotplug_mib`
    /// of hot-plug memory, at most as much as this one has. Its data is mapped privately, so it must not change as long as the VM lives;
    /// the rest is anonymous memory.
    pub fn with_saved_memory(config: VmConfig, saved_hotplug_mib: u32, file: &File) -> Result<VmBuilder, Error> {
        let mib = layout::total_mib(config.memory_mib, config.hotplug_mib);
        let saved_mib = layout::total_mib(config.memory_mib, saved_hotplug_mib);
        let memory = GuestMemory::from_file(mib, saved_mib, file, config.pages);
        VmBuilder::with_memory(config, memory)
    }

    fn with_memory(config: VmConfig, memory: Result<GuestMemory, super::MemoryError>) -> Result<VmBuilder, Error> {
        let kvm = open_kvm()?;
        let max = kvm.get_max_vcpus().min(MAX_VCPUS.into());
        if config.vcpus == 0 || usize::from(config.vcpus) > max {
            return Err(Error::Vcpus { got: config.vcpus, max });
        }
        let memory = memory.map_err(|source| Error::Memory {
            mib: layout::total_mib(config.memory_mib, config.hotplug_mib),
            source,
        })?;
        let mut supported =
            kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).map_err(Error::kvm_call("report its CPUID entries"))?;
        cpuid::copy_brand_string(supported.as_mut_slice());
        let vm = create_vm(&kvm)?;
        memory.register_with(&vm).map_err(Error::kvm_call("register memory"))?;
        vm.set_identity_map_address(layout::IDENTITY_MAP)
            .map_err(Error::kvm_call("set the address of its page table"))?;
        vm.set_tss_address(layout::TSS).map_err(Error::kvm_call("set the address of its task state"))?;
        vm.create_irq_chip().map_err(Error::kvm_call("create interrupt controllers"))?;
        mask_pic_interrupts(&vm)?;
        let control = Arc::new(VcpuControl::new());
        let mut ports = DeviceBus::default();
        let ended = control.clone();
        let keyboard = KeyboardController::new(move || ended.request_end(VmExit::Reset));
        ports.insert(legacy::I8042, legacy::I8042_PORTS, Arc::new(keyboard));
        let ignored_writes =
            EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK).map_err(|source| Error::Create { what: "an eventfd", source })?;
        let mut windows = DeviceBus::default();
        windows.insert(layout::GENERATION_ID.0, layout::WINDOW_SIZE, Arc::new(GenerationId::new()?));
        Ok(VmBuilder {
            config,
            supported: supported.as_slice().to_vec(),
            control,
            ports,
            windows,
            transports: Vec::new(),
            serial: None,
            shared: Vec::new(),
            ignored_writes,
            vm: Arc::new(vm),
            memory,
        })
    }

    /// Returns the guest's memory, which is zero except for saved content.
    pub fn memory(&self) -> &Arc<Memory> {
        self.memory.memory()
    }

    /// Adds a serial port (`ttyS0`) whose output goes to `console`.
    pub fn serial(&mut self, console: SerialSink) -> Result<(), Error> {
        let (port, line) = SerialPort::new(console)?;
        self.vm.register_irqfd(&line, legacy::COM1_GSI).map_err(Error::kvm_call("register an interrupt"))?;
        let port = Arc::new(port);
        self.ports.insert(legacy::COM1, legacy::COM1_PORTS, port.clone());
        self.serial = Some(port);
        Ok(())
    }

    /// Attaches a device to the next window of registers, with an interrupt of its own.
    pub fn attach(&mut self, device: Box<dyn Device>) -> Result<Arc<Transport>, Error> {
        let (address, gsi) =
            layout::device_window(self.transports.len()).ok_or(Error::Devices { max: layout::MAX_DEVICES })?;
        let kind = device.kind();
        let attach = |source| Error::Attach { device: kind, source };
        let irq = EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK).map_err(attach)?;
        self.vm.register_irqfd(&irq, gsi).map_err(Error::kvm_call("register an interrupt"))?;
        let shared = self.create_shared_memory(device.shared_memory())?;
        let transport = Transport::with_shared_memory(device, self.memory().clone(), irq, shared).map_err(attach)?;
        let notify = IoEventAddress::Mmio(address + mmio::QUEUE_NOTIFY);
        for (queue, kick) in (0u32..).zip(transport.kicks()) {
            self.vm.register_ioevent(kick, &notify, queue).map_err(Error::kvm_call("register a queue notification"))?;
        }
        // Every interrupt is acknowledged by this write. If the kernel handles it, the vCPU does not exit to this process.
        let (register, queues_only) = mmio::INTERRUPT_ACK;
        let acknowledge = IoEventAddress::Mmio(address + register);
        let ignored_writes = self.vm.register_ioevent(&self.ignored_writes, &acknowledge, queues_only);
        ignored_writes.map_err(Error::kvm_call("register an interrupt acknowledgement"))?;
        self.windows.insert(address, layout::WINDOW_SIZE, transport.clone());
        self.transports.push(transport.clone());
        Ok(transport)
    }

    /// Creates the memory region that a device shares with its driver, above the regions of earlier devices. Returns `None` for size 0.
    fn create_shared_memory(&mut self, size: u64) -> Result<Option<Arc<GuestRegionMmap<()>>>, Error> {
        if size == 0 {
            return Ok(None);
        }
        let end = |last: &Arc<GuestRegionMmap<()>>| {
            last.last_addr().0.saturating_add(1).next_multiple_of(layout::SHARED_UNIT)
        };
        let address = self.shared.last().map_or(layout::SHARED.start, end);
        if address.checked_add(size).is_none_or(|end| end > layout::SHARED.end) {
            return Err(Error::Devices { max: layout::MAX_DEVICES });
        }
        let shared = memory::allocate_shared(address, size)
            .map_err(|source| Error::Memory { mib: u32::try_from(size / layout::MIB).unwrap_or(u32::MAX), source })?;
        self.memory
            .register_shared(&self.vm, self.shared.len(), &shared)
            .map_err(Error::kvm_call("register memory"))?;
        self.shared.push(shared.clone());
        Ok(Some(shared))
    }

    /// Loads the kernel and starts the VM.
    pub fn start(self) -> Result<VmHandle, Error> {
        let vcpus = self.create_vcpus()?;
        let entry = self.load_kernel()?;
        if let Some(first) = vcpus.first() {
            let mut sregs = first.get_sregs().map_err(Error::kvm_call("read registers"))?;
            boot::set_special_registers(&mut sregs, entry);
            first.set_sregs(&sregs).map_err(Error::kvm_call("set control registers"))?;
            first.set_regs(&boot::initial_registers(entry)).map_err(Error::kvm_call("set registers"))?;
        }
        let machine = self.spawn(vcpus)?;
        machine.resume()?;
        Ok(machine)
    }

    /// Restores the VM from a saved `state`. It stays paused until [`VmHandle::resume`]. If the saved VM announced all windows, this one
    /// may have further devices behind the saved ones; the guest finds them when it looks at their windows again. It does so once, so
    /// a snapshot of this VM is no template.
    pub fn restore(self, state: &MachineState) -> Result<VmHandle, Error> {
        let vcpus = self.create_vcpus()?;
        state::restore(&self.vm, &vcpus, &self.transports, self.serial.as_deref(), state)?;
        // The interrupt notifies the guest, before it runs on, that its generation id has changed.
        for active in [true, false] {
            let raised = self.vm.set_irq_line(layout::GENERATION_ID.1, active);
            raised.map_err(Error::kvm_call("raise an interrupt"))?;
        }
        let machine = self.spawn(vcpus)?;
        // Waits until the new threads are paused; from then on the VM may be saved again.
        machine.pause()?;
        Ok(machine)
    }

    /// Loads kernel and initramfs and writes the tables. Returns the entry point of the kernel.
    fn load_kernel(&self) -> Result<KernelEntry, Error> {
        let VmConfig { memory_mib, kernel: path, initrd, cmdline, vcpus, announce_all_windows, .. } = &self.config;
        let at = |path: &Path| {
            let path = path.to_owned();
            move |source| Error::Load { path, source }
        };
        let memory = self.memory();
        let kernel = kernel::load(memory, layout::low_end(*memory_mib), path).map_err(at(path))?;
        let initrd = match initrd {
            Some(file) => Some(kernel::load_initrd(memory, *memory_mib, &kernel, file).map_err(at(file))?),
            None => None,
        };
        // The caller's parameters come last, so that they take precedence.
        let parameters = ["reboot=k".to_owned(), layout::generation_id_parameter()].into_iter();
        let windows = if *announce_all_windows { layout::MAX_DEVICES } else { self.transports.len() };
        let parameters =
            parameters.chain((0..windows).filter_map(layout::device_parameter)).chain(cmdline.iter().cloned());
        let line = boot::cmdline(parameters).map_err(at(path))?;
        boot::write_boot_data(memory, *memory_mib, &kernel, &line, initrd).map_err(at(path))?;
        let (signature, features) = cpuid::signature(&self.supported);
        memory
            .write_slice(&mptable::table(*vcpus, signature, features), GuestAddress(layout::MP_TABLE))
            .map_err(|source| at(path)(super::KernelError::Write { source }))?;
        Ok(kernel.entry)
    }

    fn create_vcpus(&self) -> Result<Vec<VcpuFd>, Error> {
        (0..self.config.vcpus).map(|id| self.create_vcpu(id)).collect()
    }

    fn create_vcpu(&self, id: u8) -> Result<VcpuFd, Error> {
        let vcpu = self.vm.create_vcpu(id.into()).map_err(Error::kvm_call("create a vCPU"))?;
        let entries = cpuid::vcpu_entries(&self.supported, id, self.config.vcpus);
        let cpuid =
            CpuId::from_entries(&entries).map_err(|_too_many| Error::Missing { capability: "KVM_CAP_EXT_CPUID" })?;
        vcpu.set_cpuid2(&cpuid).map_err(Error::kvm_call("set CPUID entries"))?;
        set_msrs(&vcpu)?;
        set_local_interrupts(&vcpu)?;
        Ok(vcpu)
    }

    fn spawn(mut self, vcpus: Vec<VcpuFd>) -> Result<VmHandle, Error> {
        install_signal_handler()?;
        for (address, _) in (self.transports.len()..).map_while(layout::device_window) {
            self.windows.insert(address, layout::WINDOW_SIZE, Arc::new(EmptyWindow {}));
        }
        let vcpus: Vec<_> = vcpus.into_iter().map(|fd| Arc::new(Mutex::new(fd))).collect();
        let (ports, windows) = (Arc::new(self.ports), Arc::new(self.windows));
        // If a later step fails, dropping this value ends the threads started so far.
        let machine = VmHandle {
            config: self.config,
            control: self.control,
            threads: Mutex::default(),
            vcpus,
            transports: self.transports,
            serial: self.serial,
            vm: self.vm,
            memory: self.memory,
        };
        for (id, fd) in (0..).zip(&machine.vcpus) {
            let control = machine.control.clone();
            let vcpu = Vcpu { id, fd: fd.clone(), control, ports: ports.clone(), memory: windows.clone() };
            let thread = vcpu.spawn()?;
            machine.threads.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(thread);
        }
        Ok(machine)
    }
}

/// Creates the VM. KVM starts kernel threads for it, and a signal to this thread (such as SIGCHLD) may interrupt that; then it retries.
fn create_vm(kvm: &Kvm) -> Result<VmFd, Error> {
    const TRIES: usize = 100;
    let interrupted = |created: &Result<VmFd, kvm_ioctls::Error>| {
        created.as_ref().err().is_some_and(|error| matches!(error.errno(), libc::EINTR | libc::EAGAIN))
    };
    let mut tries = std::iter::repeat_with(|| kvm.create_vm()).take(TRIES);
    let created = tries.find(|created| !interrupted(created)).unwrap_or_else(|| kvm.create_vm());
    created.map_err(Error::kvm_call("create a VM"))
}

/// Opens KVM and checks that it has all required capabilities.
fn open_kvm() -> Result<Kvm, Error> {
    let kvm = Kvm::new().map_err(|source| Error::Open { source })?;
    match kvm.get_api_version() {
        12 => {}
        got => return Err(Error::Version { got }),
    }
    let needed = [
        (Cap::Irqchip, "KVM_CAP_IRQCHIP"),
        (Cap::Irqfd, "KVM_CAP_IRQFD"),
        (Cap::Ioeventfd, "KVM_CAP_IOEVENTFD"),
        (Cap::UserMemory, "KVM_CAP_USER_MEMORY"),
        (Cap::SetTssAddr, "KVM_CAP_SET_TSS_ADDR"),
        (Cap::ExtCpuid, "KVM_CAP_EXT_CPUID"),
        (Cap::MpState, "KVM_CAP_MP_STATE"),
        (Cap::ImmediateExit, "KVM_CAP_IMMEDIATE_EXIT"),
        (Cap::TscDeadlineTimer, "KVM_CAP_TSC_DEADLINE_TIMER"),
    ];
    match needed.into_iter().find(|(cap, _)| !kvm.check_extension(*cap)) {
        Some((_, capability)) => Err(Error::Missing { capability }),
        None => Ok(kvm),
    }
}

/// Sets the model-specific registers that firmware would have set.
fn set_msrs(vcpu: &VcpuFd) -> Result<(), Error> {
    const MISC_ENABLE: u32 = 0x1a0;
    const FAST_STRING: u64 = 1;
    const MTRR_DEF_TYPE: u32 = 0x2ff;
    const WRITE_BACK_EVERYWHERE: u64 = 1 << 11 | 6;
    let entry = |index, data| kvm_msr_entry { index, data, ..Default::default() };
    let too_many = |_too_many| Error::Missing { capability: "KVM_GET_MSRS" };
    let mut misc = Msrs::from_entries(&[entry(MISC_ENABLE, 0)]).map_err(too_many)?;
    vcpu.get_msrs(&mut misc).map_err(Error::kvm_call("read model-specific registers"))?;
    let before = misc.as_slice().first().map_or(0, |entry| entry.data);
    let entries = [entry(MISC_ENABLE, before | FAST_STRING), entry(MTRR_DEF_TYPE, WRITE_BACK_EVERYWHERE)];
    let msrs = Msrs::from_entries(&entries).map_err(too_many)?;
    match vcpu.set_msrs(&msrs).map_err(Error::kvm_call("set model-specific registers"))? {
        done if done == entries.len() => Ok(()),
        _ => Err(Error::Missing { capability: "MSR IA32_MISC_ENABLE or IA32_MTRR_DEF_TYPE" }),
    }
}

/// Masks all interrupts of the two PICs, as a PC's firmware does, until a kernel initializes them. KVM creates them with all
/// lines unmasked and vectors from 0, which are those of CPU exceptions.
fn mask_pic_interrupts(vm: &VmFd) -> Result<(), Error> {
    for chip_id in [KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE] {
        let mut chip = kvm_irqchip { chip_id, ..Default::default() };
        vm.get_irqchip(&mut chip).map_err(Error::kvm_call("read an interrupt controller's state"))?;
        chip.chip.pic.imr = 0xff;
        vm.set_irqchip(&chip).map_err(Error::kvm_call("set an interrupt controller's state"))?;
    }
    Ok(())
}

/// Sets LINT0 to deliver the interrupts of the PICs and LINT1 to deliver NMIs, as a PC's firmware does.
fn set_local_interrupts(vcpu: &VcpuFd) -> Result<(), Error> {
    const LINT0: usize = 0x350;
    const LINT1: usize = 0x360;
    const EXT_INT: u8 = 7;
    const NMI: u8 = 4;
    let mut lapic = vcpu.get_lapic().map_err(Error::kvm_call("read an interrupt controller's state"))?;
    for (register, mode) in [(LINT0, EXT_INT), (LINT1, NMI)] {
        // The delivery mode is in bits 8 to 10.
        let byte = &mut lapic.regs[register + 1];
        *byte = (*byte as u8 & !0x7 | mode) as libc::c_char;
    }
    vcpu.set_lapic(&lapic).map_err(Error::kvm_call("set an interrupt controller's state"))
}
