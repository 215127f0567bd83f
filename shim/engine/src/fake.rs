//! Implements an engine without a VM for tests of the layers above: the guest is a function in this process. It keeps the
//! same contract as the real engines, and can be scripted to fail.
//!
//! Each machine has a thread for the guest, and one more for a scripted death.

use std::collections::{HashMap, VecDeque};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use crate::console::Console;
use crate::disk::make_slot;
use crate::ended::Ended;
use crate::machine::{
    BOOT_PORT, Engine, ExitKind, GuestLink, Incoming, Machine, MachineExit, MachineStatus, Pausable, Stop,
};
use crate::{CheckedSpec, EngineError, EngineKind, Limits, LinkError, Slot};

/// The failures of a fake engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Script {
    /// `start` fails.
    pub fail_start: bool,
    /// The machine dies after this time.
    pub die_after: Option<Duration>,
    /// The guest refuses all connections of the host.
    pub refuse_connections: bool,
}

/// The guest, called on its own thread when a machine starts. Its return value is the machine's end. When the machine is
/// ended from outside, calls on `Guest` fail with `LinkError::Stopped` and its streams end.
pub trait FakeGuest: Send + Sync + 'static {
    /// Runs the guest until its end.
    fn run(&self, guest: Guest) -> ExitKind;
}

impl<F: Fn(Guest) -> ExitKind + Send + Sync + 'static> FakeGuest for F {
    fn run(&self, guest: Guest) -> ExitKind {
        self(guest)
    }
}

/// An engine whose guests are functions.
pub struct Fake {
    guest: Arc<dyn FakeGuest>,
    script: Script,
}

impl Fake {
    /// Creates an engine whose machines all run `guest`.
    pub fn new(guest: impl FakeGuest) -> Fake {
        Fake { guest: Arc::new(guest), script: Script::default() }
    }

    /// Returns the same engine with failures.
    pub fn with_script(self, script: Script) -> Fake {
        Fake { script, ..self }
    }
}

/// The guest's view of a fake machine. Clones are handles to the same guest.
#[derive(Clone)]
pub struct Guest {
    world: Arc<World>,
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
enum Side {
    Host,
    Guest,
}

#[derive(Default)]
struct Net {
    listeners: HashMap<(Side, u32), VecDeque<UnixStream>>,
    guest_ends: Vec<Weak<UnixStream>>,
    /// The boot port is open, and the host does not listen there yet.
    boot_is_early: bool,
    paused: bool,
    ended: bool,
}

/// The state that host and guest share.
struct World {
    net: Mutex<Net>,
    changed: Condvar,
    ended: Ended,
    console: Mutex<Console>,
    refuse: bool,
}

impl World {
    fn net(&self) -> MutexGuard<'_, Net> {
        self.net.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn listen(&self, side: Side, port: u32) -> Result<(), LinkError> {
        let mut net = self.net();
        if net.ended {
            return Err(LinkError::Stopped);
        }
        if (side, port) == (Side::Host, BOOT_PORT) && std::mem::take(&mut net.boot_is_early) {
            return Ok(());
        }
        if net.listeners.contains_key(&(side, port)) {
            return Err(LinkError::PortInUse { port });
        }
        net.listeners.insert((side, port), VecDeque::new());
        Ok(())
    }

    fn connect(&self, to: Side, port: u32) -> Result<UnixStream, LinkError> {
        let mut net = self.net();
        if net.ended {
            return Err(LinkError::Stopped);
        }
        let refused = self.refuse && to == Side::Guest;
        let Some(waiting) = net.listeners.get_mut(&(to, port)).filter(|_| !refused) else {
            return Err(LinkError::Refused { port });
        };
        let (near, far) = UnixStream::pair().map_err(|source| LinkError::Resources { source })?;
        waiting.push_back(far);
        self.changed.notify_all();
        Ok(near)
    }

    fn accept(&self, side: Side, port: u32, limit: Duration) -> Result<UnixStream, LinkError> {
        let until = Instant::now() + limit.min(Duration::from_secs(86_400));
        let mut net = self.net();
        loop {
            if net.ended {
                return Err(LinkError::Stopped);
            }
            if let Some(stream) = net.listeners.get_mut(&(side, port)).and_then(VecDeque::pop_front) {
                return Ok(stream);
            }
            let Some(left) = until.checked_duration_since(Instant::now()) else {
                return Err(LinkError::Timeout { port, limit });
            };
            net = self.changed.wait_timeout(net, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Registers the guest's end of a connection, which is closed when the machine ends.
    fn guest_end(&self, stream: UnixStream) -> Arc<UnixStream> {
        let stream = Arc::new(stream);
        let mut net = self.net();
        if net.ended {
            sever(&stream);
        }
        net.guest_ends.retain(|end| end.strong_count() > 0);
        net.guest_ends.push(Arc::downgrade(&stream));
        stream
    }

    fn end(&self, how: ExitKind) {
        let mut net = self.net();
        if !net.ended {
            net.ended = true;
            net.listeners.clear();
            net.guest_ends.iter().filter_map(Weak::upgrade).for_each(|stream| sever(&stream));
            let console = self.console.lock().unwrap_or_else(PoisonError::into_inner);
            self.ended.set(MachineExit { how, console_tail: console.tail() });
        }
        self.changed.notify_all();
    }
}

fn sever(stream: &UnixStream) {
    // The guest may have closed the stream already.
    let _ = stream.shutdown(std::net::Shutdown::Both);
}

impl Guest {
    /// Connects to the host's `port`. The stream is shared, so that it can be closed when the machine ends; `&UnixStream`
    /// reads and writes.
    pub fn connect(&self, port: u32) -> Result<Arc<UnixStream>, LinkError> {
        self.world.connect(Side::Host, port).map(|stream| self.world.guest_end(stream))
    }

    /// Opens a port for the host, until the machine ends.
    pub fn listen(&self, port: u32) -> Result<(), LinkError> {
        self.world.listen(Side::Guest, port)
    }

    /// Accepts the host's next connection to an open port; waits until the machine ends.
    pub fn accept(&self, port: u32) -> Result<Arc<UnixStream>, LinkError> {
        loop {
            match self.world.accept(Side::Guest, port, Duration::MAX) {
                Err(LinkError::Timeout { .. }) => {}
                other => return other.map(|stream| self.world.guest_end(stream)),
            }
        }
    }

    /// Prints on the console.
    pub fn print(&self, text: &str) {
        self.world.console.lock().unwrap_or_else(PoisonError::into_inner).push(text.as_bytes());
    }

    /// Ends the machine from inside, from any thread.
    pub fn end(&self, how: ExitKind) {
        self.world.end(how);
    }
}

impl Engine for Fake {
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
        let disks = spec.disks.iter().map(make_slot).collect::<Result<Vec<_>, _>>()?;
        let console = Console::open(&spec.console_log).map_err(|source| EngineError::File {
            what: "open",
            path: spec.console_log.clone(),
            source,
        })?;
        let world = Arc::new(World {
            net: Mutex::new(Net {
                listeners: HashMap::from([((Side::Host, BOOT_PORT), VecDeque::new())]),
                boot_is_early: true,
                ..Net::default()
            }),
            changed: Condvar::new(),
            ended: Ended::default(),
            console: Mutex::new(console),
            refuse: self.script.refuse_connections,
        });
        let inside = Guest {
            world: Arc::clone(&world),
            vcpus: spec.vcpus,
            memory_mib: spec.memory_mib,
            cmdline: spec.cmdline,
            disks: disks.clone(),
        };
        let guest = Arc::clone(&self.guest);
        let thread = |source| EngineError::Resources { what: "a thread for a fake guest", source };
        // The machine exists before the guest runs: if the second thread cannot be created, dropping it ends the first.
        let machine = FakeMachine { world, disks };
        thread::Builder::new()
            .name("fake-guest".into())
            .spawn(move || {
                let how = guest.run(inside.clone());
                inside.end(how);
            })
            .map_err(thread)?;
        if let Some(after) = self.script.die_after {
            let world = Arc::clone(&machine.world);
            let die = move || {
                if world.ended.wait(after).is_none() {
                    world.end(ExitKind::Died { code: None, signal: Some(9), message: "so says the script".into() });
                }
            };
            thread::Builder::new().name("fake-death".into()).spawn(die).map_err(thread)?;
        }
        Ok(Box::new(machine))
    }
}

struct FakeMachine {
    world: Arc<World>,
    disks: Vec<Slot>,
}

impl Machine for FakeMachine {
    fn status(&self) -> MachineStatus {
        self.world.ended.status(self.world.net().paused)
    }

    fn wait(&self, timeout: Duration) -> Option<MachineExit> {
        self.world.ended.wait(timeout)
    }

    fn stop(&self, how: Stop) -> Result<MachineExit, EngineError> {
        self.world.ended.stop(how, std::process::id(), || {
            self.world.end(ExitKind::Killed);
            Ok(())
        })
    }

    fn link(&self) -> Arc<dyn GuestLink> {
        Arc::new(FakeLink(Arc::clone(&self.world)))
    }

    fn disks(&self) -> &[Slot] {
        &self.disks
    }

    fn as_pausable(&self) -> Option<&dyn Pausable> {
        Some(self)
    }
}

impl FakeMachine {
    fn set_paused(&self, what: &'static str, paused: bool) -> Result<(), EngineError> {
        let mut net = self.world.net();
        if net.ended {
            return Err(EngineError::Ended { what });
        }
        net.paused = paused;
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
        self.world.end(ExitKind::Killed);
    }
}

struct FakeLink(Arc<World>);

impl GuestLink for FakeLink {
    fn connect(&self, port: u32, _timeout: Duration) -> Result<UnixStream, LinkError> {
        self.0.connect(Side::Guest, port)
    }

    fn listen(&self, port: u32) -> Result<Box<dyn Incoming>, LinkError> {
        self.0.listen(Side::Host, port)?;
        Ok(Box::new(FakeIncoming { world: Arc::clone(&self.0), port }))
    }
}

struct FakeIncoming {
    world: Arc<World>,
    port: u32,
}

impl Incoming for FakeIncoming {
    fn accept(&self, timeout: Duration) -> Result<UnixStream, LinkError> {
        self.world.accept(Side::Host, self.port, timeout)
    }
}

impl Drop for FakeIncoming {
    fn drop(&mut self) {
        self.world.net().listeners.remove(&(Side::Host, self.port));
    }
}
