//! Runs the vCPUs: starts, pauses, resumes and ends their threads, one `vcpuN` per vCPU. Other threads reach a vCPU by a flag
//! and a real-time signal. The signal is repeated until the vCPU reacts: a signal that arrives between the check of the flag
//! and the entry into the guest is lost.

use super::bus::DeviceBus;
use super::{Error, VmExit};
use crate::sys;
use kvm_ioctls::{VcpuExit, VcpuFd};
use nacelle_base::{guest_error, guest_warn};
use nacelle_jail::ThreadKind;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use vmm_sys_util::signal::{SIGRTMIN, register_signal_handler};

/// The interval at which a vCPU that has not reacted is signalled again.
const RESIGNAL_INTERVAL: Duration = Duration::from_millis(2);
/// The time within which all vCPUs must react to a request to pause or end.
const STOP_TIMEOUT: Duration = Duration::from_secs(60);

/// The target state of the vCPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum TargetState {
    Run,
    Pause,
    End,
}

/// The state that the vCPUs' threads share with the threads that control the VM.
pub(super) struct VcpuControl {
    /// A copy of `ControlState::target` for the fast path.
    target: AtomicU8,
    state: Mutex<ControlState>,
    changed: Condvar,
    /// A thread is already ending the other vCPUs.
    ending: AtomicBool,
}

struct ControlState {
    target: TargetState,
    /// The kernel thread ids of the running vCPU threads, and whether each vCPU is paused.
    threads: BTreeMap<u8, (i32, bool)>,
    exit: Option<VmExit>,
}

impl VcpuControl {
    pub fn new() -> VcpuControl {
        VcpuControl {
            target: AtomicU8::new(TargetState::Pause as u8),
            state: Mutex::new(ControlState { target: TargetState::Pause, threads: BTreeMap::new(), exit: None }),
            changed: Condvar::new(),
            ending: AtomicBool::new(false),
        }
    }

    fn lock(&self) -> MutexGuard<'_, ControlState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, state: &mut ControlState, target: TargetState) {
        state.target = target;
        self.target.store(target as u8, Ordering::Release);
        self.changed.notify_all();
    }

    /// Ends the VM, unless it has ended already. The vCPUs end asynchronously.
    pub fn request_end(&self, exit: VmExit) {
        let mut state = self.lock();
        if state.exit.is_none() {
            tracing::debug!(%exit, "the VM ends");
            state.exit = Some(exit);
        }
        self.set(&mut state, TargetState::End);
    }

    /// Returns how the VM ended, or `None` while a vCPU still runs.
    pub fn exit(&self) -> Option<VmExit> {
        self.lock().ended()
    }

    /// Waits until no vCPU runs. Returns `None` after `timeout`.
    pub fn wait(&self, timeout: Duration) -> Option<VmExit> {
        let state = self.lock();
        let waited = self.changed.wait_timeout_while(state, timeout, |state| state.ended().is_none());
        waited.unwrap_or_else(PoisonError::into_inner).0.ended()
    }

    /// Signals the vCPUs that are not paused until `done` holds. Returns `false` after [`STOP_TIMEOUT`].
    fn signal_until(&self, mut state: MutexGuard<'_, ControlState>, done: impl Fn(&ControlState) -> bool) -> bool {
        let deadline = Instant::now() + STOP_TIMEOUT;
        while !done(&state) {
            if Instant::now() > deadline {
                return false;
            }
            for (thread, paused) in state.threads.values() {
                if !paused {
                    sys::signal_thread(*thread, signal());
                }
            }
            let waited = self.changed.wait_timeout(state, RESIGNAL_INTERVAL);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// Pauses all vCPUs and waits until they are paused.
    pub fn pause(&self) -> Result<(), Error> {
        let mut state = self.lock();
        if let Some(exit) = &state.exit {
            return Err(Error::Ended { exit: exit.clone() });
        }
        self.set(&mut state, TargetState::Pause);
        let is_stopped =
            |state: &ControlState| state.exit.is_some() || state.threads.values().all(|(_, paused)| *paused);
        if !self.signal_until(state, is_stopped) {
            return Err(Error::Stuck { seconds: STOP_TIMEOUT.as_secs() });
        }
        match &self.lock().exit {
            Some(exit) => Err(Error::Ended { exit: exit.clone() }),
            None => Ok(()),
        }
    }

    /// Lets the vCPUs run.
    pub fn resume(&self) -> Result<(), Error> {
        let mut state = self.lock();
        if let Some(exit) = &state.exit {
            return Err(Error::Ended { exit: exit.clone() });
        }
        self.set(&mut state, TargetState::Run);
        Ok(())
    }

    /// Returns whether all vCPUs are paused and stay so until another call changes that.
    pub fn is_paused(&self) -> bool {
        let state = self.lock();
        state.target == TargetState::Pause && state.threads.values().all(|(_, paused)| *paused)
    }

    /// Waits until the threads of all vCPUs have ended, after [`VcpuControl::request_end`]. Returns `false` after [`STOP_TIMEOUT`].
    pub fn wait_for_threads(&self) -> bool {
        self.signal_until(self.lock(), |state| state.threads.is_empty())
    }

    fn target(&self) -> TargetState {
        match self.target.load(Ordering::Acquire) {
            run if run == TargetState::Run as u8 => TargetState::Run,
            pause if pause == TargetState::Pause as u8 => TargetState::Pause,
            _ => TargetState::End,
        }
    }

    /// Waits, paused, until the target state changes.
    fn wait_while_paused(&self, id: u8) {
        let mut state = self.lock();
        state.set_paused(id, true);
        self.changed.notify_all();
        let waited = self.changed.wait_while(state, |state| state.target == TargetState::Pause);
        waited.unwrap_or_else(PoisonError::into_inner).set_paused(id, false);
    }

    /// Removes a vCPU whose thread is about to end. The first thread that ends makes the others end too.
    fn remove_thread(&self, id: u8) {
        let mut state = self.lock();
        state.threads.remove(&id);
        self.changed.notify_all();
        drop(state);
        if !self.ending.swap(true, Ordering::AcqRel) && !self.wait_for_threads() {
            guest_error!("a vCPU of a VM that has ended does not stop");
        }
    }
}

impl ControlState {
    fn ended(&self) -> Option<VmExit> {
        self.exit.clone().filter(|_| self.threads.is_empty())
    }

    fn set_paused(&mut self, id: u8, paused: bool) {
        if let Some(thread) = self.threads.get_mut(&id) {
            thread.1 = paused;
        }
    }
}

fn signal() -> i32 {
    SIGRTMIN()
}

extern "C" fn ignore_signal(_signal: libc::c_int, _info: *mut libc::siginfo_t, _context: *mut libc::c_void) {}

/// Installs a handler for the signal that only interrupts a vCPU. Affects the whole process; may be repeated.
pub(super) fn install_signal_handler() -> Result<(), Error> {
    register_signal_handler(signal(), ignore_signal)
        .map_err(|error| Error::Create { what: "a signal handler", source: error.into() })
}

/// The data of a vCPU's thread.
pub(super) struct Vcpu {
    pub id: u8,
    /// Locked by the thread while the vCPU runs; other threads may lock it while the vCPU is paused.
    pub fd: Arc<Mutex<VcpuFd>>,
    pub control: Arc<VcpuControl>,
    pub ports: Arc<DeviceBus>,
    pub memory: Arc<DeviceBus>,
}

impl Vcpu {
    /// Starts the thread, in the paused state; [`VcpuControl::resume`] lets the vCPU run. On return the thread can be signalled.
    pub fn spawn(self) -> Result<JoinHandle<()>, Error> {
        let (id, control) = (self.id, self.control.clone());
        let (registered, registration) = mpsc::channel::<()>();
        let builder = std::thread::Builder::new().name(format!("vcpu{id}"));
        let thread = nacelle_jail::spawn(ThreadKind::Vcpu, builder, move || {
            let guard = ThreadGuard { id, control: &control };
            control.lock().threads.insert(id, (nix::unistd::gettid().as_raw(), false));
            drop(registered);
            self.run();
            drop(guard);
        })
        .map_err(|source| Error::Create { what: "a vCPU thread", source })?;
        // No message is ever sent: the receiver returns when the thread has dropped the sender, after its registration or its death.
        let _ = registration.recv();
        Ok(thread)
    }

    fn run(&self) {
        let lock = || self.fd.lock().unwrap_or_else(PoisonError::into_inner);
        let mut fd = lock();
        loop {
            match self.control.target() {
                TargetState::Run => {}
                TargetState::Pause => {
                    finish_access(&mut fd);
                    drop(fd);
                    self.control.wait_while_paused(self.id);
                    fd = lock();
                    continue;
                }
                TargetState::End => return,
            }
            if let Some(exit) = self.run_until_exit(&mut fd) {
                self.control.request_end(exit);
            }
        }
    }

    /// Runs the guest until its next exit and handles the exit. Returns the reason if the VM must end.
    fn run_until_exit(&self, fd: &mut VcpuFd) -> Option<VmExit> {
        let failed = |what: String| Some(VmExit::Failed { what: format!("vCPU {}: {what}", self.id) });
        match fd.run() {
            Ok(VcpuExit::MmioWrite(address, data)) => self.memory.write(address, data),
            Ok(VcpuExit::MmioRead(address, data)) => self.memory.read(address, data),
            Ok(VcpuExit::IoOut(port, data)) => self.ports.write(port.into(), data),
            Ok(VcpuExit::IoIn(port, data)) => self.ports.read(port.into(), data),
            Ok(VcpuExit::Intr) => {}
            Ok(VcpuExit::Shutdown) => {
                return Some(VmExit::TripleFault { what: format!("vCPU {}: {}", self.id, describe_state(fd)) });
            }
            Ok(VcpuExit::Hlt) => return failed("halted with interrupts disabled".to_owned()),
            Ok(VcpuExit::FailEntry(reason, _)) => return failed(format!("entry failed with reason {reason:#x}")),
            Ok(VcpuExit::InternalError) => return failed(describe_internal_error(fd)),
            Ok(other) => return failed(format!("unexpected exit: {other:?}")),
            Err(error) if matches!(error.errno(), libc::EINTR | libc::EAGAIN) => {}
            Err(error) => return failed(format!("cannot run: {error}")),
        }
        None
    }
}

/// Completes a device access at which the guest exited. KVM does that only on the next entry into the guest.
fn finish_access(fd: &mut VcpuFd) {
    fd.set_kvm_immediate_exit(1);
    match fd.run() {
        Err(error) if matches!(error.errno(), libc::EINTR | libc::EAGAIN) => {}
        other => guest_warn!("a vCPU ran although it was to exit immediately: {other:?}"),
    }
    fd.set_kvm_immediate_exit(0);
}

/// Describes KVM's internal error: its kind, its data, and the guest's instruction pointer.
fn describe_internal_error(fd: &mut VcpuFd) -> String {
    let rip = fd.get_regs().map_or(0, |regs| regs.rip);
    let (suberror, data) = sys::internal_error(fd);
    format!("KVM internal error at {rip:#x}: suberror {suberror}, data {data:x?}")
}

/// Describes the state of a vCPU in one line.
fn describe_state(fd: &VcpuFd) -> String {
    /// The base of the code segment after a reset.
    const RESET: u64 = 0xffff_0000;
    let (Ok(regs), Ok(sregs)) = (fd.get_regs(), fd.get_sregs()) else {
        return "its registers cannot be read".to_owned();
    };
    // On AMD, the state of a CPU after a triple fault is undefined.
    if (regs.rip, sregs.cs.base) == (0xfff0, RESET) {
        return "KVM has reset its registers".to_owned();
    }
    let mut text = format!(
        "rip {:#x}, rsp {:#x}, rflags {:#x}, cr0 {:#x}, cr2 {:#x}, cr3 {:#x}, cr4 {:#x}, efer {:#x}, idt {:#x}",
        regs.rip, regs.rsp, regs.rflags, sregs.cr0, sregs.cr2, sregs.cr3, sregs.cr4, sregs.efer, sregs.idt.base
    );
    if let Ok(events) = fd.get_vcpu_events() {
        for (what, is_injected, number) in [
            ("exception", events.exception.injected, events.exception.nr),
            ("interrupt", events.interrupt.injected, events.interrupt.nr),
            ("NMI", events.nmi.injected, 2),
        ] {
            if is_injected != 0 {
                text += &format!(", delivering {what} {number}");
            }
        }
    }
    text
}

/// Retires the vCPU when its thread ends, even after a panic.
struct ThreadGuard<'a> {
    id: u8,
    control: &'a VcpuControl,
}

impl Drop for ThreadGuard<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.control.request_end(VmExit::Failed { what: format!("the thread of vCPU {} panicked", self.id) });
        }
        self.control.remove_thread(self.id);
    }
}
