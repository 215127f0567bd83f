//! Owns: the threads of the processors: how they run, stand still and end, and who makes them.
//! Threads: one `vcpuN` for each processor. The others reach them by a flag and a real-time signal, which is sent
//! again until it has been noticed: one that falls between looking at the flag and entering the guest is lost.

use super::bus::Bus;
use super::{Error, Exit};
use crate::sys;
use kvm_ioctls::{VcpuExit, VcpuFd};
use nacelle_jail::ThreadKind;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use vmm_sys_util::signal::{SIGRTMIN, register_signal_handler};

/// The wait before a processor that has not noticed a signal gets another one.
const AGAIN: Duration = Duration::from_millis(2);
/// How long all processors may take to notice that they shall stop.
const PATIENCE: Duration = Duration::from_secs(60);

/// What the processors shall do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Want {
    Run,
    Pause,
    End,
}

/// What all threads of the processors share with those who drive them.
pub(super) struct Control {
    /// A copy of `State::want` for the fast path.
    want: AtomicU8,
    state: Mutex<State>,
    changed: Condvar,
    /// Somebody is ending the other processors already.
    reaped: AtomicBool,
}

struct State {
    want: Want,
    /// Kernel thread ids of the processors whose threads live, and whether they stand still.
    threads: BTreeMap<u8, (i32, bool)>,
    exit: Option<Exit>,
}

impl Control {
    pub fn new() -> Control {
        Control {
            want: AtomicU8::new(Want::Pause as u8),
            state: Mutex::new(State { want: Want::Pause, threads: BTreeMap::new(), exit: None }),
            changed: Condvar::new(),
            reaped: AtomicBool::new(false),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, state: &mut State, want: Want) {
        state.want = want;
        self.want.store(want as u8, Ordering::Release);
        self.changed.notify_all();
    }

    /// Ends the machine, unless it has ended already. The processors follow.
    pub fn end(&self, exit: Exit) {
        let mut state = self.lock();
        if state.exit.is_none() {
            tracing::debug!(%exit, "the machine ends");
            state.exit = Some(exit);
        }
        self.set(&mut state, Want::End);
    }

    /// How the machine ended, once no processor runs any more.
    pub fn exit(&self) -> Option<Exit> {
        self.lock().ended()
    }

    /// Waits for the end.
    pub fn wait(&self, timeout: Duration) -> Option<Exit> {
        let state = self.lock();
        let waited = self.changed.wait_timeout_while(state, timeout, |state| state.ended().is_none());
        waited.unwrap_or_else(PoisonError::into_inner).0.ended()
    }

    /// Signals processors that do not do what they shall until all do; `false` if they do not in time.
    fn signal_until(&self, mut state: MutexGuard<'_, State>, done: impl Fn(&State) -> bool) -> bool {
        let give_up = Instant::now() + PATIENCE;
        while !done(&state) {
            if Instant::now() > give_up {
                return false;
            }
            for (thread, still) in state.threads.values() {
                if !still {
                    sys::signal_thread(*thread, signal());
                }
            }
            let waited = self.changed.wait_timeout(state, AGAIN);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// Stops all processors where they are.
    pub fn pause(&self) -> Result<(), Error> {
        let mut state = self.lock();
        if let Some(exit) = &state.exit {
            return Err(Error::Ended { exit: exit.clone() });
        }
        self.set(&mut state, Want::Pause);
        let stopped = |state: &State| state.exit.is_some() || state.threads.values().all(|(_, still)| *still);
        if !self.signal_until(state, stopped) {
            return Err(Error::Stuck { seconds: PATIENCE.as_secs() });
        }
        match &self.lock().exit {
            Some(exit) => Err(Error::Ended { exit: exit.clone() }),
            None => Ok(()),
        }
    }

    /// Lets them run (again).
    pub fn resume(&self) -> Result<(), Error> {
        let mut state = self.lock();
        if let Some(exit) = &state.exit {
            return Err(Error::Ended { exit: exit.clone() });
        }
        self.set(&mut state, Want::Run);
        Ok(())
    }

    /// Do all processors stand still, and will they until somebody says otherwise?
    pub fn is_paused(&self) -> bool {
        let state = self.lock();
        state.want == Want::Pause && state.threads.values().all(|(_, still)| *still)
    }

    /// Sees to it that the threads of all processors end; [`Control::end`] has been called.
    pub fn reap(&self) -> bool {
        self.signal_until(self.lock(), |state| state.threads.is_empty())
    }

    fn want(&self) -> Want {
        match self.want.load(Ordering::Acquire) {
            run if run == Want::Run as u8 => Want::Run,
            pause if pause == Want::Pause as u8 => Want::Pause,
            _ => Want::End,
        }
    }

    /// Stands still until something else is wanted.
    fn park(&self, id: u8) {
        let mut state = self.lock();
        state.set_still(id, true);
        self.changed.notify_all();
        let waited = self.changed.wait_while(state, |state| state.want == Want::Pause);
        waited.unwrap_or_else(PoisonError::into_inner).set_still(id, false);
    }

    /// The last thing a processor's thread does: the first one to come here ends the others.
    fn retire(&self, id: u8) {
        let mut state = self.lock();
        state.threads.remove(&id);
        self.changed.notify_all();
        drop(state);
        if !self.reaped.swap(true, Ordering::AcqRel) && !self.reap() {
            tracing::error!("a processor of a machine that has ended does not stop");
        }
    }
}

impl State {
    fn ended(&self) -> Option<Exit> {
        self.exit.clone().filter(|_| self.threads.is_empty())
    }

    fn set_still(&mut self, id: u8, still: bool) {
        if let Some(thread) = self.threads.get_mut(&id) {
            thread.1 = still;
        }
    }
}

fn signal() -> i32 {
    SIGRTMIN()
}

extern "C" fn nothing(_signal: libc::c_int, _info: *mut libc::siginfo_t, _context: *mut libc::c_void) {}

/// Makes the signal interrupt a processor and do nothing else. Process-wide; may be repeated.
pub(super) fn prepare_signal() -> Result<(), Error> {
    register_signal_handler(signal(), nothing)
        .map_err(|error| Error::Make { what: "a signal handler", source: error.into() })
}

/// What a processor's thread works with.
pub(super) struct Vcpu {
    pub id: u8,
    /// The thread has it while it runs, others while it stands still.
    pub fd: Arc<Mutex<VcpuFd>>,
    pub control: Arc<Control>,
    pub ports: Arc<Bus>,
    pub memory: Arc<Bus>,
}

impl Vcpu {
    /// Starts the thread; it stands still until [`Control::resume`]. On return it can be signalled.
    pub fn spawn(self) -> Result<JoinHandle<()>, Error> {
        let (id, control) = (self.id, self.control.clone());
        let (registered, told) = mpsc::channel::<()>();
        let builder = std::thread::Builder::new().name(format!("vcpu{id}"));
        let thread = nacelle_jail::spawn(ThreadKind::Vcpu, builder, move || {
            let retire = Retire { id, control: &control };
            control.lock().threads.insert(id, (nix::unistd::gettid().as_raw(), false));
            drop(registered);
            self.run();
            drop(retire);
        })
        .map_err(|source| Error::Make { what: "a processor's thread", source })?;
        // Nothing is ever sent: the thread lets go of its end when it is registered, or dead.
        let _ = told.recv();
        Ok(thread)
    }

    fn run(&self) {
        let lock = || self.fd.lock().unwrap_or_else(PoisonError::into_inner);
        let mut fd = lock();
        loop {
            match self.control.want() {
                Want::Run => {}
                Want::Pause => {
                    finish_access(&mut fd);
                    drop(fd);
                    self.control.park(self.id);
                    fd = lock();
                    continue;
                }
                Want::End => return,
            }
            if let Some(exit) = self.step(&mut fd) {
                self.control.end(exit);
            }
        }
    }

    /// Runs the guest until it leaves, and does what it left for.
    fn step(&self, fd: &mut VcpuFd) -> Option<Exit> {
        let failed = |what: String| Some(Exit::Failed { what: format!("vCPU {}: {what}", self.id) });
        match fd.run() {
            Ok(VcpuExit::MmioWrite(address, data)) => self.memory.write(address, data),
            Ok(VcpuExit::MmioRead(address, data)) => self.memory.read(address, data),
            Ok(VcpuExit::IoOut(port, data)) => self.ports.write(port.into(), data),
            Ok(VcpuExit::IoIn(port, data)) => self.ports.read(port.into(), data),
            Ok(VcpuExit::Intr) => {}
            Ok(VcpuExit::Shutdown) => {
                return Some(Exit::TripleFault { what: format!("vCPU {}: {}", self.id, state(fd)) });
            }
            Ok(VcpuExit::Hlt) => return failed("halted for good".to_owned()),
            Ok(VcpuExit::FailEntry(reason, _)) => return failed(format!("entry failed with reason {reason:#x}")),
            Ok(VcpuExit::InternalError) => return failed(internal_error(fd)),
            Ok(other) => return failed(format!("left in an unexpected way: {other:?}")),
            Err(error) if matches!(error.errno(), libc::EINTR | libc::EAGAIN) => {}
            Err(error) => return failed(format!("cannot run: {error}")),
        }
        None
    }
}

/// An access to a device that the guest was interrupted in is only done when the guest is entered again.
fn finish_access(fd: &mut VcpuFd) {
    fd.set_kvm_immediate_exit(1);
    match fd.run() {
        Err(error) if matches!(error.errno(), libc::EINTR | libc::EAGAIN) => {}
        other => tracing::warn!("a processor that should not have run did: {other:?}"),
    }
    fd.set_kvm_immediate_exit(0);
}

/// What KVM tells about an error of its own: the kind, its data, and where the guest was.
fn internal_error(fd: &mut VcpuFd) -> String {
    let rip = fd.get_regs().map_or(0, |regs| regs.rip);
    let (suberror, data) = sys::internal_error(fd);
    format!("KVM cannot go on at {rip:#x}: suberror {suberror}, data {data:x?}")
}

/// Where a processor is, in one line.
fn state(fd: &VcpuFd) -> String {
    /// The base of the code segment after a reset.
    const RESET: u64 = 0xffff_0000;
    let (Ok(regs), Ok(sregs)) = (fd.get_regs(), fd.get_sregs()) else {
        return "its registers cannot be read".to_owned();
    };
    // On AMD a processor's state is undefined after a triple fault.
    if (regs.rip, sregs.cs.base) == (0xfff0, RESET) {
        return "KVM has reset its registers".to_owned();
    }
    let mut text = format!(
        "rip {:#x}, rsp {:#x}, rflags {:#x}, cr0 {:#x}, cr2 {:#x}, cr3 {:#x}, cr4 {:#x}, efer {:#x}, idt {:#x}",
        regs.rip, regs.rsp, regs.rflags, sregs.cr0, sregs.cr2, sregs.cr3, sregs.cr4, sregs.efer, sregs.idt.base
    );
    if let Ok(events) = fd.get_vcpu_events() {
        for (what, there, number) in [
            ("exception", events.exception.injected, events.exception.nr),
            ("interrupt", events.interrupt.injected, events.interrupt.nr),
            ("NMI", events.nmi.injected, 2),
        ] {
            if there != 0 {
                text += &format!(", delivering {what} {number}");
            }
        }
    }
    text
}

/// Retires the processor when its thread ends, even in a panic.
struct Retire<'a> {
    id: u8,
    control: &'a Control,
}

impl Drop for Retire<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.control.end(Exit::Failed { what: format!("the thread of vCPU {} panicked", self.id) });
        }
        self.control.retire(self.id);
    }
}
