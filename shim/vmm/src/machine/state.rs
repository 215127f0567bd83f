//! Saves and restores the state of vCPUs and in-kernel devices, in the order of calls that KVM requires.
#![allow(unsafe_code)] // reason: KVM's call that sets the extended registers trusts the size of what it is given.

use super::legacy::{SerialPort, SerialState};
use super::{Error, VmConfig, cpu_compat};
use crate::mmio::{Transport, TransportState};
use kvm_bindings::{
    CpuId, KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, KVM_MAX_CPUID_ENTRIES,
    KVM_MAX_MSR_ENTRIES, Msrs, kvm_clock_data, kvm_cpuid_entry2, kvm_debugregs, kvm_irqchip, kvm_lapic_state,
    kvm_mp_state, kvm_msr_entry, kvm_regs, kvm_sregs, kvm_vcpu_events, kvm_xcrs, kvm_xsave,
};
use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use serde::{Deserialize, Serialize};
use std::sync::{Arc, Mutex, PoisonError};

/// The whole state of a VM except its memory.
#[derive(Debug, Serialize, Deserialize)]
pub struct MachineState {
    /// The state that all vCPUs share: interrupt controllers and clock.
    pub vm: VmState,
    /// The vCPUs, by number.
    pub vcpus: Vec<VcpuState>,
    /// The devices, in the order in which they were attached.
    pub devices: Vec<TransportState>,
    /// The serial port, if there is one.
    pub serial: Option<SerialState>,
    /// Whether the kernel knows all windows for devices, also those without one.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub announces_all_windows: bool,
}

/// The state that all vCPUs share.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct VmState {
    /// The two PICs and the IO-APIC.
    pub chips: Vec<kvm_irqchip>,
    /// The paravirtual clock.
    pub clock: kvm_clock_data,
}

/// The state of one vCPU.
#[derive(Debug, Serialize, Deserialize)]
pub struct VcpuState {
    /// The CPUID entries.
    pub cpuid: Vec<kvm_cpuid_entry2>,
    /// Whether the vCPU runs, is halted or waits for its start.
    pub mp_state: kvm_mp_state,
    /// The general registers.
    pub regs: kvm_regs,
    /// The segments and control registers.
    pub sregs: kvm_sregs,
    /// The extended control registers, which enable extended state.
    pub xcrs: kvm_xcrs,
    /// The floating-point and vector registers.
    pub xsave: Box<kvm_xsave>,
    /// The debug registers.
    pub debug: kvm_debugregs,
    /// The local APIC.
    pub lapic: kvm_lapic_state,
    /// The model-specific registers that KVM supports.
    pub msrs: Vec<kvm_msr_entry>,
    /// The pending exceptions and interrupts.
    pub events: kvm_vcpu_events,
    /// The frequency of the TSC in kHz.
    pub tsc_khz: u32,
}

/// The registers that are written last: the deadline of the local APIC's timer depends on the TSC.
const TSC_DEADLINE: u32 = 0x6e0;

/// Returns the state of a paused VM.
pub(super) fn save(
    config: &VmConfig,
    vm: &VmFd,
    vcpus: &[Arc<Mutex<VcpuFd>>],
    transports: &[Arc<Transport>],
    serial: Option<&SerialPort>,
) -> Result<MachineState, Error> {
    let kvm = Kvm::new().map_err(|source| Error::Open { source })?;
    let list = kvm.get_msr_index_list().map_err(Error::kvm_call("list model-specific registers"))?;
    let saved = vcpus.iter().map(|fd| save_vcpu(&fd.lock().unwrap_or_else(PoisonError::into_inner), list.as_slice()));
    let vcpus = saved.collect::<Result<_, _>>()?;
    let chips = [KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, KVM_IRQCHIP_IOAPIC].map(|chip_id| {
        let mut chip = kvm_irqchip { chip_id, ..Default::default() };
        vm.get_irqchip(&mut chip).map(|()| chip).map_err(Error::kvm_call("read an interrupt controller's state"))
    });
    let chips = chips.into_iter().collect::<Result<_, _>>()?;
    let clock = vm.get_clock().map_err(Error::kvm_call("read the clock"))?;
    let devices = transports.iter().map(|transport| transport.save()).collect();
    Ok(MachineState {
        vm: VmState { chips, clock },
        vcpus,
        devices,
        serial: serial.map(SerialPort::save),
        announces_all_windows: config.announce_all_windows,
    })
}

/// Reads the state of a vCPU in KVM's order: `KVM_GET_MP_STATE` may take pending events and change all other state, reading the
/// local APIC may change it, and events are final only at the end.
fn save_vcpu(fd: &VcpuFd, msrs: &[u32]) -> Result<VcpuState, Error> {
    Ok(VcpuState {
        mp_state: fd.get_mp_state().map_err(Error::kvm_call("read the run state of a vCPU"))?,
        regs: fd.get_regs().map_err(Error::kvm_call("read registers"))?,
        sregs: fd.get_sregs().map_err(Error::kvm_call("read control registers"))?,
        xsave: fd.get_xsave().map(Box::new).map_err(Error::kvm_call("read extended registers"))?,
        xcrs: fd.get_xcrs().map_err(Error::kvm_call("read extended control registers"))?,
        debug: fd.get_debug_regs().map_err(Error::kvm_call("read debug registers"))?,
        lapic: fd.get_lapic().map_err(Error::kvm_call("read an interrupt controller's state"))?,
        tsc_khz: fd.get_tsc_khz().map_err(Error::kvm_call("read the TSC frequency"))?,
        cpuid: cpuid(fd)?,
        msrs: save_msrs(fd, msrs)?,
        events: fd.get_vcpu_events().map_err(Error::kvm_call("read pending events"))?,
    })
}

fn cpuid(fd: &VcpuFd) -> Result<Vec<kvm_cpuid_entry2>, Error> {
    let cpuid = fd.get_cpuid2(KVM_MAX_CPUID_ENTRIES).map_err(Error::kvm_call("read CPUID entries"))?;
    Ok(cpuid.as_slice().to_vec())
}

/// Reads those registers of the list that the vCPU has. KVM stops at the first register that does not exist.
fn save_msrs(fd: &VcpuFd, mut list: &[u32]) -> Result<Vec<kvm_msr_entry>, Error> {
    let mut saved = Vec::with_capacity(list.len());
    while !list.is_empty() {
        let batch = list.get(..KVM_MAX_MSR_ENTRIES).unwrap_or(list);
        let entries: Vec<_> = batch.iter().map(|index| kvm_msr_entry { index: *index, ..Default::default() }).collect();
        let mut msrs =
            Msrs::from_entries(&entries).map_err(|_too_many| Error::Missing { capability: "KVM_GET_MSRS" })?;
        let got = fd.get_msrs(&mut msrs).map_err(Error::kvm_call("read model-specific registers"))?;
        saved.extend(msrs.as_slice().iter().take(got));
        // Skips the register at which KVM stopped.
        list = list.get(got + usize::from(got < batch.len())..).unwrap_or_default();
    }
    Ok(saved)
}

/// Restores the saved state in a VM that has not run yet.
pub(super) fn restore(
    vm: &VmFd,
    vcpus: &[VcpuFd],
    transports: &[Arc<Transport>],
    serial: Option<&SerialPort>,
    state: &MachineState,
) -> Result<(), Error> {
    // Devices behind the saved ones are new to the guest: it must know their windows.
    let more_devices = transports.len() > state.devices.len();
    if transports.len() < state.devices.len() || more_devices && !state.announces_all_windows {
        return Err(Error::Mismatch { what: "devices", saved: state.devices.len(), here: transports.len() });
    }
    if state.vcpus.len() != vcpus.len() {
        return Err(Error::Mismatch { what: "vCPUs", saved: state.vcpus.len(), here: vcpus.len() });
    }
    for (fd, saved) in vcpus.iter().zip(&state.vcpus) {
        restore_vcpu(fd, saved)?;
    }
    for chip in &state.vm.chips {
        vm.set_irqchip(chip).map_err(Error::kvm_call("set an interrupt controller's state"))?;
    }
    // No flags: the guest's clock continues from the saved value, regardless of the time that has passed since.
    let clock = kvm_clock_data { clock: state.vm.clock.clock, ..Default::default() };
    vm.set_clock(&clock).map_err(Error::kvm_call("set the clock"))?;
    for (transport, saved) in transports.iter().zip(&state.devices) {
        transport.restore(saved).map_err(|source| Error::Restore { device: transport.kind(), source })?;
    }
    if let (Some(port), Some(saved)) = (serial, &state.serial) {
        port.restore(saved);
    }
    Ok(())
}

/// Restores a vCPU. CPUID comes first, because it decides which registers exist; control registers come before the local APIC,
/// because they hold its address and mode; events come last, because other calls clear them.
fn restore_vcpu(fd: &VcpuFd, saved: &VcpuState) -> Result<(), Error> {
    if let Some(missing) = cpu_compat::missing_feature(&cpuid(fd)?, &saved.cpuid) {
        return Err(Error::Processor { missing });
    }
    let cpuid =
        CpuId::from_entries(&saved.cpuid).map_err(|_too_many| Error::Missing { capability: "KVM_CAP_EXT_CPUID" })?;
    fd.set_cpuid2(&cpuid).map_err(Error::kvm_call("set CPUID entries"))?;
    match fd.get_tsc_khz() {
        Ok(khz) if khz == saved.tsc_khz => {}
        _ => fd.set_tsc_khz(saved.tsc_khz).map_err(Error::kvm_call("set the TSC frequency"))?,
    }
    fd.set_mp_state(saved.mp_state).map_err(Error::kvm_call("set the run state of a vCPU"))?;
    fd.set_regs(&saved.regs).map_err(Error::kvm_call("set registers"))?;
    fd.set_sregs(&saved.sregs).map_err(Error::kvm_call("set control registers"))?;
    fd.set_xcrs(&saved.xcrs).map_err(Error::kvm_call("set extended control registers"))?;
    // SAFETY: KVM reads as many bytes as a kvm_xsave has: it would read more only after this process had asked for dynamic
    // features (ARCH_REQ_XCOMP_GUEST_PERM), which it never does.
    unsafe { fd.set_xsave(&saved.xsave) }.map_err(Error::kvm_call("set extended registers"))?;
    fd.set_debug_regs(&saved.debug).map_err(Error::kvm_call("set debug registers"))?;
    fd.set_lapic(&saved.lapic).map_err(Error::kvm_call("set an interrupt controller's state"))?;
    let (last, first): (Vec<_>, Vec<_>) = saved.msrs.iter().partition(|entry| entry.index == TSC_DEADLINE);
    restore_msrs(fd, &first)?;
    restore_msrs(fd, &last)?;
    fd.set_vcpu_events(&saved.events).map_err(Error::kvm_call("set pending events"))
}

/// Writes the registers. KVM stops at a register whose value it rejects; this is an error unless the register already has the value.
fn restore_msrs(fd: &VcpuFd, mut entries: &[kvm_msr_entry]) -> Result<(), Error> {
    let too_many = |_too_many| Error::Missing { capability: "KVM_SET_MSRS" };
    while !entries.is_empty() {
        let batch = entries.get(..KVM_MAX_MSR_ENTRIES).unwrap_or(entries);
        let msrs = Msrs::from_entries(batch).map_err(too_many)?;
        let done = fd.set_msrs(&msrs).map_err(Error::kvm_call("set model-specific registers"))?;
        entries = entries.get(done..).unwrap_or_default();
        let Some((rejected, rest)) = entries.split_first().filter(|_| done < batch.len()) else { continue };
        let mut here = Msrs::from_entries(&[kvm_msr_entry { data: 0, ..*rejected }]).map_err(too_many)?;
        let got = fd.get_msrs(&mut here).map_err(Error::kvm_call("read model-specific registers"))?;
        if got != 1 || here.as_slice().first().is_none_or(|entry| entry.data != rejected.data) {
            return Err(Error::Msr { index: rejected.index, value: rejected.data });
        }
        entries = rest;
    }
    Ok(())
}
