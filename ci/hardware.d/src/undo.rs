//! Reverts everything that must not outlive the program, however it ends: child processes, pods, settings of the host, the work
//! directory.
//!
//! An [`UndoGuard`] runs its step when it is dropped. [`undo_all_and_exit`] runs the remaining steps, newest first, and ends the
//! program; the threads that wait for signals and for the end of the time limit call it. Once it has begun, a thread that starts
//! or registers anything waits for the exit, so that nothing new outlives the program.

use std::io;
use std::process::{Child, ChildStdin, ChildStdout, Command};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

type UndoStep = Box<dyn FnOnce() + Send>;

struct UndoSteps {
    next: u64,
    steps: Vec<(u64, UndoStep)>,
    /// The steps that were removed from the list and have not returned yet.
    running: usize,
    /// Whether [`UndoRegistry::run_all`] has begun.
    ending: bool,
}

/// The pending steps; the program has one list of them.
struct UndoRegistry {
    list: Mutex<UndoSteps>,
    /// Notified when a step has returned.
    returned: Condvar,
}

static PROGRAM: UndoRegistry = UndoRegistry::new();

/// Runs one step when it is dropped.
#[must_use]
#[derive(Debug)]
pub struct UndoGuard {
    registry: &'static UndoRegistry,
    number: u64,
}

/// A child process. It is killed and reaped when this is dropped, or at the end of the program; nothing else waits for it, so its
/// PID is not reused before that.
#[derive(Debug)]
pub struct ChildProcess {
    pid: u32,
    /// The pipes that the command requested.
    pub stdin: Option<ChildStdin>,
    pub stdout: Option<ChildStdout>,
    _guard: UndoGuard,
}

impl ChildProcess {
    pub fn pid(&self) -> u32 {
        self.pid
    }
}

/// Registers `step` to run when the guard is dropped, or at the end of the program.
pub fn register(step: impl FnOnce() + Send + 'static) -> UndoGuard {
    PROGRAM.register(step)
}

/// Starts a child process and registers the step that kills it, atomically.
pub fn spawn(command: &mut Command) -> io::Result<ChildProcess> {
    PROGRAM.spawn(command)
}

/// Runs all remaining steps and ends the program with this exit code.
pub fn undo_all_and_exit(code: u8) -> ! {
    PROGRAM.run_all();
    std::process::exit(code.into())
}

/// Returns at once, unless [`undo_all_and_exit`] has begun on another thread: then it waits for the exit. `main` calls it last,
/// because returning would interrupt the steps of that thread.
pub fn wait_if_ending() {
    PROGRAM.wait_if_ending();
}

fn wait_for_exit() -> ! {
    loop {
        std::thread::park();
    }
}

fn kill(mut child: Child) {
    // It may have ended already.
    let _ = child.kill();
    let _ = child.wait();
}

impl std::fmt::Debug for UndoRegistry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Registry").finish_non_exhaustive()
    }
}

impl UndoRegistry {
    const fn new() -> UndoRegistry {
        let steps = UndoSteps { next: 0, steps: Vec::new(), running: 0, ending: false };
        UndoRegistry { list: Mutex::new(steps), returned: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, UndoSteps> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&'static self, list: &mut UndoSteps, step: UndoStep) -> UndoGuard {
        list.next += 1;
        list.steps.push((list.next, step));
        UndoGuard { registry: self, number: list.next }
    }

    fn register(&'static self, step: impl FnOnce() + Send + 'static) -> UndoGuard {
        let guard = self.push(&mut self.lock(), Box::new(step));
        // At the end of the program the step runs, and the caller must not create what it registered the step for.
        self.wait_if_ending();
        guard
    }

    fn spawn(&'static self, command: &mut Command) -> io::Result<ChildProcess> {
        // The list stays locked, so the end begins before the start or after the registration.
        let mut list = self.lock();
        if list.ending {
            drop(list);
            wait_for_exit();
        }
        let mut child = command.spawn()?;
        let (pid, stdin, stdout) = (child.id(), child.stdin.take(), child.stdout.take());
        let guard = self.push(&mut list, Box::new(move || kill(child)));
        Ok(ChildProcess { pid, stdin, stdout, _guard: guard })
    }

    fn wait_if_ending(&self) {
        let ending = self.lock().ending;
        if ending {
            wait_for_exit();
        }
    }

    /// Runs a step that was counted as running. The list is not locked: a step may drop other guards.
    fn run(&self, step: UndoStep) {
        step();
        self.lock().running -= 1;
        self.returned.notify_all();
    }

    /// Runs all steps, the newest first, and waits for those that other threads run.
    fn run_all(&self) {
        let mut list = self.lock();
        list.ending = true;
        loop {
            if list.running > 0 {
                list = self.returned.wait(list).unwrap_or_else(PoisonError::into_inner);
            } else if let Some((_, step)) = list.steps.pop() {
                list.running += 1;
                drop(list);
                self.run(step);
                list = self.lock();
            } else {
                return;
            }
        }
    }
}

impl Drop for UndoGuard {
    fn drop(&mut self) {
        let mut list = self.registry.lock();
        let at = list.steps.iter().position(|(number, _)| *number == self.number);
        let Some((_, step)) = at.map(|at| list.steps.remove(at)) else { return };
        list.running += 1;
        drop(list);
        self.registry.run(step);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::{Arc, mpsc};
    use std::time::Duration;

    // Each test has a registry of its own, because other tests use that of the program.

    #[test]
    fn each_step_runs_once_and_the_newest_first() {
        static REGISTRY: UndoRegistry = UndoRegistry::new();
        let order = Arc::new(Mutex::new(Vec::new()));
        let step = |name: &'static str| {
            let order = order.clone();
            move || order.lock().unwrap().push(name)
        };
        let (first, second, third) =
            (REGISTRY.register(step("first")), REGISTRY.register(step("second")), REGISTRY.register(step("third")));
        drop(second);
        REGISTRY.run_all();
        drop((first, third));
        assert_eq!(*order.lock().unwrap(), ["second", "third", "first"]);
    }

    #[test]
    fn a_child_is_killed_and_reaped_with_its_guard_and_at_the_end() {
        static REGISTRY: UndoRegistry = UndoRegistry::new();
        let start = || REGISTRY.spawn(Command::new("sleep").arg("1000")).unwrap();
        let exists = |pid: u32| Path::new("/proc").join(pid.to_string()).exists();
        let (first, second) = (start(), start());
        let (one, other) = (first.pid(), second.pid());
        drop(first);
        assert!(!exists(one) && exists(other));
        REGISTRY.run_all();
        assert!(!exists(other));
        drop(second);
    }

    #[test]
    fn the_end_waits_for_a_step_of_another_thread() {
        static REGISTRY: UndoRegistry = UndoRegistry::new();
        let (begin, begun) = mpsc::channel();
        let done = Arc::new(AtomicBool::new(false));
        let in_step = done.clone();
        let guard = REGISTRY.register(move || {
            begin.send(()).unwrap();
            std::thread::sleep(Duration::from_millis(100));
            in_step.store(true, Ordering::Relaxed);
        });
        let dropping = std::thread::spawn(move || drop(guard));
        begun.recv().unwrap();
        REGISTRY.run_all();
        assert!(done.load(Ordering::Relaxed));
        dropping.join().unwrap();
    }

    #[test]
    fn nothing_is_registered_or_started_after_the_end() {
        static REGISTRY: UndoRegistry = UndoRegistry::new();
        REGISTRY.run_all();
        let (send, received) = mpsc::channel();
        let started = send.clone();
        // These threads wait for the exit of the test.
        std::thread::spawn(move || {
            drop(REGISTRY.register(|| ()));
            send.send("registered")
        });
        std::thread::spawn(move || {
            drop(REGISTRY.spawn(&mut Command::new("true")));
            started.send("started")
        });
        assert_eq!(received.recv_timeout(Duration::from_millis(100)), Err(mpsc::RecvTimeoutError::Timeout));
    }
}
