//! Implements an engine without a VM for tests of the layers above: the guest is a function in this process. It keeps the
//! same contract as the real engines, and can be scripted to fail.
//!
//! Each machine has a thread for the guest, and one more for a scripted death.

use std::collections::{HashMap, VecDeque};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use crate::console::ConsoleLog;
use crate::disk::create_slot;
use crate::exit_latch::ExitLatch;
use crate::machine::{
    BOOT_PORT, Engine, ExitKind, GuestLink, LinkListener, Machine, MachineExit, MachineStatus, Pausable, PauseSteps,
    RunningSaveReport, Snapshottable, StopMode,
};
use crate::{
    CheckedSpec, EngineError, EngineKind, Limits, LinkError, PageTracker, SavedPages, Slot, SnapshotError,
    SnapshotFiles, Touched,
};

/// The failures of a fake engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FailureScript {
    /// `start` fails.
    pub fail_start: bool,
    /// The machine dies after this time.
    pub die_after: Option<Duration>,
    /// The guest refuses all connections of the host.
    pub refuse_connections: bool,
    /// What goes wrong when the running machine is saved.
    pub save: SaveFailure,
}

/// What goes wrong when a running fake machine is saved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SaveFailure {
    /// Nothing.
    #[default]
    None,
    /// It fails in the pause.
    InPause,
    /// It fails when the machine runs again.
    AfterPause,
    /// It does not end before it is stopped, after the pause.
    Hangs,
}

/// The guest, called on its own thread when a machine starts. Its return value is the machine's end. When the machine is
/// ended from outside, calls on `GuestHandle` fail with `LinkError::Stopped` and its streams end.
pub trait FakeGuest: Send + Sync + 'static {
    /// Runs the guest until its end.
    fn run(&self, guest: GuestHandle) -> ExitKind;
}

impl<F: Fn(GuestHandle) -> ExitKind + Send + Sync + 'static> FakeGuest for F {
    fn run(&self, guest: GuestHandle) -> ExitKind {
        self(guest)
    }
}

/// An engine whose guests are functions.
pub struct FakeEngine {
    guest: Arc<dyn FakeGuest>,
    script: FailureScript,
}

impl FakeEngine {
    /// Creates an engine whose machines all run `guest`.
    pub fn new(guest: impl FakeGuest) -> FakeEngine {
        FakeEngine { guest: Arc::new(guest), script: FailureScript::default() }
    }

    /// Returns the same engine with failures.
    pub fn with_script(self, script: FailureScript) -> FakeEngine {
        FakeEngine { script, ..self }
    }
}

/// The guest's view of a fake machine. Clones are handles to the same guest.
#[derive(Clone)]
pub struct GuestHandle {
    state: Arc<SharedState>,
    /// The number of vCPUs.
    pub vcpus: u8,
    /// The memory in MiB.
    pub memory_mib: u32,
    /// The kernel parameters of the specification.
    pub cmdline: Vec<String>,
    /// The slots of the disks: a fake guest does not speak virtio, but sees what was placed.
    pub disks: Vec<Slot>,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum LinkSide {
    Host,
    Guest,
}

#[derive(Default)]
struct FakeConnections {
    listeners: HashMap<(LinkSide, u32), VecDeque<UnixStream>>,
    guest_streams: Vec<Weak<UnixStream>>,
    /// The boot port is open, and the host does not listen there yet.
    boot_port_is_unclaimed: bool,
    paused: bool,
    ended: bool,
}

/// The state that host and guest share.
struct SharedState {
    connections: Mutex<FakeConnections>,
    changed: Condvar,
    ended: ExitLatch,
    console: Mutex<ConsoleLog>,
    refuse_connections: bool,
}

impl SharedState {
    fn connections(&self) -> MutexGuard<'_, FakeConnections> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn listen(&self, side: LinkSide, port: u32) -> Result<(), LinkError> {
        let mut connections = self.connections();
        if connections.ended {
            return Err(LinkError::Stopped);
        }
        if (side, port) == (LinkSide::Host, BOOT_PORT) && std::mem::take(&mut connections.boot_port_is_unclaimed) {
            return Ok(());
        }
        if connections.listeners.contains_key(&(side, port)) {
            return Err(LinkError::PortInUse { port });
        }
        connections.listeners.insert((side, port), VecDeque::new());
        Ok(())
    }

    fn connect(&self, to: LinkSide, port: u32) -> Result<UnixStream, LinkError> {
        let mut connections = self.connections();
        if connections.ended {
            return Err(LinkError::Stopped);
        }
        let is_refused = self.refuse_connections && to == LinkSide::Guest;
        let Some(waiting) = connections.listeners.get_mut(&(to, port)).filter(|_| !is_refused) else {
            return Err(LinkError::Refused { port });
        };
        let (near, far) = UnixStream::pair().map_err(|source| LinkError::Resources { source })?;
        waiting.push_back(far);
        self.changed.notify_all();
        Ok(near)
    }

    fn accept(&self, side: LinkSide, port: u32, limit: Duration) -> Result<UnixStream, LinkError> {
        let until = Instant::now() + limit.min(Duration::from_secs(86_400));
        let mut connections = self.connections();
        loop {
            if connections.ended {
                return Err(LinkError::Stopped);
            }
            if let Some(stream) = connections.listeners.get_mut(&(side, port)).and_then(VecDeque::pop_front) {
                return Ok(stream);
            }
            let Some(left) = until.checked_duration_since(Instant::now()) else {
                return Err(LinkError::Timeout { port, limit });
            };
            connections = self.changed.wait_timeout(connections, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Registers the guest's end of a connection, which is closed when the machine ends.
    fn register_guest_stream(&self, stream: UnixStream) -> Arc<UnixStream> {
        let stream = Arc::new(stream);
        let mut connections = self.connections();
        if connections.ended {
            shut_down(&stream);
        }
        connections.guest_streams.retain(|end| end.strong_count() > 0);
        connections.guest_streams.push(Arc::downgrade(&stream));
        stream
    }

    fn end(&self, how: ExitKind) {
        let mut connections = self.connections();
        if !connections.ended {
            connections.ended = true;
            connections.listeners.clear();
            connections.guest_streams.iter().filter_map(Weak::upgrade).for_each(|stream| shut_down(&stream));
            let console = self.console.lock().unwrap_or_else(PoisonError::into_inner);
            self.ended.set(MachineExit { how, console_tail: console.tail() });
        }
        self.changed.notify_all();
    }
}

fn shut_down(stream: &UnixStream) {
    // The guest may have closed the stream already.
    let _ = stream.shutdown(std::net::Shutdown::Both);
}

impl GuestHandle {
    /// Connects to the host's `port`. The stream is shared, so that it can be closed when the machine ends; `&UnixStream`
    /// reads and writes.
    pub fn connect(&self, port: u32) -> Result<Arc<UnixStream>, LinkError> {
        self.state.connect(LinkSide::Host, port).map(|stream| self.state.register_guest_stream(stream))
    }

    /// Opens a port for the host, until the machine ends.
    pub fn listen(&self, port: u32) -> Result<(), LinkError> {
        self.state.listen(LinkSide::Guest, port)
    }

    /// Accepts the host's next connection to an open port; waits until the machine ends.
    pub fn accept(&self, port: u32) -> Result<Arc<UnixStream>, LinkError> {
        loop {
            match self.state.accept(LinkSide::Guest, port, Duration::MAX) {
                Err(LinkError::Timeout { .. }) => {}
                other => return other.map(|stream| self.state.register_guest_stream(stream)),
            }
        }
    }

    /// Prints on the console.
    pub fn print(&self, text: &str) {
        self.state.console.lock().unwrap_or_else(PoisonError::into_inner).append(text.as_bytes());
    }

    /// Ends the machine from inside, from any thread.
    pub fn end(&self, how: ExitKind) {
        self.state.end(how);
    }
}

impl Engine for FakeEngine {
    fn kind(&self) -> EngineKind {
        EngineKind::Qemu
    }

    fn limits(&self) -> Limits {
        Limits { vcpus: crate::spec::MAX_VCPUS, devices: 6, cpu_models: true }
    }

    fn start(&self, spec: CheckedSpec) -> Result<Box<dyn Machine>, EngineError> {
        if self.script.fail_start {
            return Err(EngineError::Scripted);
        }
        let spec = spec.into_inner();
        let disks = spec.disks.iter().map(create_slot).collect::<Result<Vec<_>, _>>()?;
        let console = ConsoleLog::create(&spec.console_log).map_err(|source| EngineError::File {
            what: "open",
            path: spec.console_log.clone(),
            source,
        })?;
        let state = Arc::new(SharedState {
            connections: Mutex::new(FakeConnections {
                listeners: HashMap::from([((LinkSide::Host, BOOT_PORT), VecDeque::new())]),
                boot_port_is_unclaimed: true,
                ..FakeConnections::default()
            }),
            changed: Condvar::new(),
            ended: ExitLatch::default(),
            console: Mutex::new(console),
            refuse_connections: self.script.refuse_connections,
        });
        let handle = GuestHandle {
            state: Arc::clone(&state),
            vcpus: spec.vcpus,
            memory_mib: spec.memory_mib,
            cmdline: spec.cmdline,
            disks: disks.clone(),
        };
        let guest = Arc::clone(&self.guest);
        let thread = |source| EngineError::Resources { what: "a thread for a fake guest", source };
        // The machine exists before the guest runs: if the second thread cannot be created, dropping it ends the first.
        let machine = FakeMachine { state, disks, save: self.script.save };
        thread::Builder::new()
            .name("fake-guest".into())
            .spawn(move || {
                let how = guest.run(handle.clone());
                handle.end(how);
            })
            .map_err(thread)?;
        if let Some(after) = self.script.die_after {
            let state = Arc::clone(&machine.state);
            let die = move || {
                if state.ended.wait(after).is_none() {
                    state.end(ExitKind::Died {
                        code: None,
                        signal: Some(9),
                        message: "the test's script ended the VM".into(),
                    });
                }
            };
            thread::Builder::new().name("fake-death".into()).spawn(die).map_err(thread)?;
        }
        Ok(Box::new(machine))
    }
}

struct FakeMachine {
    state: Arc<SharedState>,
    disks: Vec<Slot>,
    save: SaveFailure,
}

impl Machine for FakeMachine {
    fn status(&self) -> MachineStatus {
        self.state.ended.status(self.state.connections().paused)
    }

    fn wait(&self, timeout: Duration) -> Option<MachineExit> {
        self.state.ended.wait(timeout)
    }

    fn stop(&self, how: StopMode) -> Result<MachineExit, EngineError> {
        self.state.ended.stop(how, std::process::id(), || {
            self.state.end(ExitKind::Killed);
            Ok(())
        })
    }

    fn link(&self) -> Arc<dyn GuestLink> {
        Arc::new(FakeLink(Arc::clone(&self.state)))
    }

    fn disks(&self) -> &[Slot] {
        &self.disks
    }

    fn as_pausable(&self) -> Option<&dyn Pausable> {
        Some(self)
    }

    fn as_snapshottable(&self) -> Option<&dyn Snapshottable> {
        Some(self)
    }
}

/// Saves a text instead of a VM, which cannot be restored.
impl Snapshottable for FakeMachine {
    fn save(&self, to: &SnapshotFiles) -> Result<(), EngineError> {
        let failed = |source| EngineError::File { what: "write", path: to.directory.clone(), source };
        to.memory.write_all_at(b"the memory of a fake guest", 0).map_err(failed)?;
        to.state.write_all_at(b"the state of a fake guest", 0).map_err(failed)
    }

    fn save_running(
        &self,
        to: &SnapshotFiles,
        _: &PageTracker,
        stop: &AtomicBool,
        steps: &mut dyn PauseSteps,
    ) -> Result<RunningSaveReport, EngineError> {
        let step_failed = |source| EngineError::Step { source };
        let begun = steps.before_pause().map_err(step_failed).and_then(|()| self.pause());
        let saved = begun.and_then(|()| match self.save {
            SaveFailure::InPause => Err(EngineError::Scripted),
            _ => steps.while_paused().map_err(step_failed),
        });
        let resumed = self.resume();
        steps.after_pause();
        resumed.and(saved)?;
        while self.save == SaveFailure::Hangs && !stop.load(Ordering::Relaxed) {
            thread::sleep(Duration::from_millis(1));
        }
        match self.save {
            SaveFailure::AfterPause => Err(EngineError::Scripted),
            SaveFailure::Hangs => Err(EngineError::Snapshot { what: "write", source: SnapshotError::Stopped }),
            _ => self.save(to).map(|()| RunningSaveReport { pause: Duration::ZERO, pages: SavedPages::default() }),
        }
    }

    fn record_working_set(&self, _: &SnapshotFiles, _: Touched) -> Result<(), EngineError> {
        Ok(())
    }
}

impl FakeMachine {
    fn set_paused(&self, what: &'static str, paused: bool) -> Result<(), EngineError> {
        let mut connections = self.state.connections();
        if connections.ended {
            return Err(EngineError::Ended { what });
        }
        connections.paused = paused;
        Ok(())
    }
}

impl Pausable for FakeMachine {
    fn pause(&self) -> Result<(), EngineError> {
        self.set_paused("pause", true)
    }

    fn resume(&self) -> Result<(), EngineError> {
        self.set_paused("resume", false)
    }
}

impl Drop for FakeMachine {
    fn drop(&mut self) {
        self.state.end(ExitKind::Killed);
    }
}

struct FakeLink(Arc<SharedState>);

impl GuestLink for FakeLink {
    fn connect(&self, port: u32, _timeout: Duration) -> Result<UnixStream, LinkError> {
        self.0.connect(LinkSide::Guest, port)
    }

    fn listen(&self, port: u32) -> Result<Box<dyn LinkListener>, LinkError> {
        self.0.listen(LinkSide::Host, port)?;
        Ok(Box::new(FakeIncoming { state: Arc::clone(&self.0), port }))
    }
}

struct FakeIncoming {
    state: Arc<SharedState>,
    port: u32,
}

impl LinkListener for FakeIncoming {
    fn accept(&self, timeout: Duration) -> Result<UnixStream, LinkError> {
        self.state.accept(LinkSide::Host, self.port, timeout)
    }
}

impl Drop for FakeIncoming {
    fn drop(&mut self) {
        self.state.connections().listeners.remove(&(LinkSide::Host, self.port));
    }
}
