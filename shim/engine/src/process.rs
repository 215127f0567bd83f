//! Manages the process in which a machine lives: inherited descriptors, output, end.
//!
//! Each process has a warden thread. It starts QEMU, and QEMU is killed when that thread ends (`PR_SET_PDEATHSIG` refers to
//! the thread), so the warden lives exactly as long as QEMU. An agent without a guest was started by the first thread,
//! which lives as long as this process; its warden only watches.
#![allow(unsafe_code)] // reason: `pre_exec` and three system calls in it that no safe wrapper offers.

use nacelle_base::retry::{self, retry_interrupted};
use std::io::{self, Read};
use std::os::fd::{AsFd, RawFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, ChildStderr, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use nacelle_jail::ThreadKind;
use nix::poll::{PollFd, PollFlags};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{Id, WaitPidFlag, waitid};
use nix::unistd::Pid;

use crate::console::{ConsoleLog, PANIC_MESSAGE, printable_tail};
use crate::exit_latch::{self, ExitLatch};
use crate::machine::{MachineStatus, StopMode};
use crate::{EngineError, ExitKind, MachineExit};

/// The number of bytes of QEMU's messages that are kept.
const MAX_MESSAGES_BYTES: usize = 4 << 10;

/// A process that runs or has ended.
pub(crate) struct Process {
    pid: Pid,
    /// True until the process is reaped: while this lock is held and true, the pid is not reused.
    alive: Mutex<bool>,
    killed: AtomicBool,
    pub ended: ExitLatch,
}

/// The warden's thread.
pub(crate) type Warden = JoinHandle<()>;

impl Process {
    /// Starts QEMU and returns when it runs, before it has parsed its arguments. The warden thread calls `on_exit` before it
    /// records the end.
    pub fn start(
        program: &Path,
        args: Vec<String>,
        inherited: Vec<RawFd>,
        console: ConsoleLog,
        on_exit: impl FnOnce() + Send + 'static,
    ) -> Result<(Arc<Process>, Warden), EngineError> {
        let mut command = Command::new(program);
        command.args(args).env_clear().current_dir("/").process_group(0);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let parent = std::process::id();
        // SAFETY: between fork and exec only async-signal-safe calls are made: prctl, getppid, close_range, fcntl. The
        // closure allocates nothing and owns its list of descriptors.
        unsafe { command.pre_exec(move || prepare_child(parent, &inherited)) };
        let (result_sender, start_result) = mpsc::sync_channel(1);
        let warden = nacelle_jail::spawn(ThreadKind::Warden, Builder::new().name("qemu-warden".into()), move || {
            let mut child = match command.spawn() {
                Ok(child) => child,
                Err(error) => {
                    // The caller waits for this message, so the channel is open.
                    let _ = result_sender.send(Err(error));
                    return;
                }
            };
            let process = Arc::new(Process::new(&child));
            let _ = result_sender.send(Ok(Arc::clone(&process)));
            process.watch_until_exit(&mut child, console, on_exit);
        })
        .map_err(|source| EngineError::Resources { what: "a thread for QEMU", source })?;
        let spawn = |source| EngineError::Spawn { program: program.to_owned(), source };
        match start_result.recv() {
            Ok(Ok(process)) => Ok((process, warden)),
            Ok(Err(source)) => Err(spawn(source)),
            Err(mpsc::RecvError) => Err(spawn(io::ErrorKind::BrokenPipe.into())),
        }
    }

    /// Watches a process that runs already.
    pub fn adopt(
        mut child: Child,
        console: ConsoleLog,
        on_exit: impl FnOnce() + Send + 'static,
    ) -> Result<(Arc<Process>, Warden), EngineError> {
        let process = Arc::new(Process::new(&child));
        let watched = Arc::clone(&process);
        let watch = move || watched.watch_until_exit(&mut child, console, on_exit);
        let warden = nacelle_jail::spawn(ThreadKind::Warden, Builder::new().name("agent-warden".into()), watch);
        let warden = warden.map_err(|source| EngineError::Resources { what: "a thread for the agent", source })?;
        Ok((process, warden))
    }

    fn new(child: &Child) -> Process {
        Process {
            pid: Pid::from_raw(child.id().cast_signed()),
            alive: Mutex::new(true),
            killed: AtomicBool::new(false),
            ended: ExitLatch::default(),
        }
    }

    /// Watches the process until its end.
    fn watch_until_exit(&self, child: &mut Child, console: ConsoleLog, on_exit: impl FnOnce()) {
        let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
        let (console, messages) = collect_output(console, stdout, stderr);
        let status = self.reap(child);
        on_exit();
        self.ended.set(self.machine_exit(status, &console, &messages));
    }

    /// Returns the pid. After the end it may belong to another process.
    pub fn pid(&self) -> u32 {
        self.pid.as_raw().cast_unsigned()
    }

    /// Sends SIGKILL, unless the process has ended.
    pub fn kill(&self) {
        let alive = self.alive.lock().unwrap_or_else(PoisonError::into_inner);
        if *alive {
            self.killed.store(true, Ordering::SeqCst);
            if let Err(error) = kill(self.pid, Signal::SIGKILL) {
                tracing::error!(pid = self.pid(), %error, "cannot kill the process of a VM");
            }
        }
    }

    fn reap(&self, child: &mut Child) -> io::Result<ExitStatus> {
        // Waits without reaping, so that `kill` cannot hit another process with the same pid.
        let ended = retry_interrupted(|| waitid(Id::Pid(self.pid), WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT));
        if let Err(error) = ended {
            tracing::error!(pid = self.pid(), %error, "cannot wait for the process of a VM");
        }
        let mut alive = self.alive.lock().unwrap_or_else(PoisonError::into_inner);
        let status = child.wait();
        *alive = false;
        status
    }

    fn machine_exit(&self, status: io::Result<ExitStatus>, console: &ConsoleLog, messages: &[u8]) -> MachineExit {
        let (code, signal) = match &status {
            Ok(status) => (status.code(), status.signal()),
            Err(_) => (None, None),
        };
        let how = match (code, signal) {
            (_, Some(libc::SIGKILL)) if self.killed.load(Ordering::SeqCst) => ExitKind::Killed,
            (Some(0), _) if console.contains(PANIC_MESSAGE) => ExitKind::Panicked,
            (Some(0), _) => ExitKind::Shutdown,
            _ => ExitKind::Died {
                code,
                signal,
                message: without_warnings(&printable_tail(messages, MAX_MESSAGES_BYTES)),
            },
        };
        MachineExit { how, console_tail: console.tail() }
    }
}

/// Removes the warnings from QEMU's messages: they are none of the reasons of its end, and would hide these.
fn without_warnings(messages: &str) -> String {
    let lines: Vec<&str> = messages.lines().filter(|line| !line.contains(": warning: ")).collect();
    lines.join("\n")
}

/// A machine that is a process. Dropping it kills the process and waits for its end.
pub(crate) struct MachineProcess {
    process: Arc<Process>,
    warden: Option<Warden>,
}

impl MachineProcess {
    pub fn new(process: Arc<Process>, warden: Warden) -> MachineProcess {
        MachineProcess { process, warden: Some(warden) }
    }

    /// Returns the status of the machine; `paused` counts while it has not ended.
    pub fn status(&self, paused: bool) -> MachineStatus {
        self.process.ended.status(paused)
    }

    /// Waits for the end; returns `None` after `timeout`.
    pub fn wait(&self, timeout: Duration) -> Option<MachineExit> {
        self.process.ended.wait(timeout)
    }

    /// Ends the machine as `Machine::stop` does.
    pub fn stop(&self, how: StopMode) -> Result<MachineExit, EngineError> {
        self.process.ended.stop(how, self.process.pid(), || {
            self.process.kill();
            Ok(())
        })
    }
}

impl Drop for MachineProcess {
    fn drop(&mut self) {
        exit_latch::finish_drop(self.stop(StopMode::Kill), self.warden.take());
    }
}

/// Prepares the child between fork and exec.
fn prepare_child(parent: u32, inherited: &[RawFd]) -> io::Result<()> {
    // SAFETY: prctl with these arguments touches no memory of this process.
    if unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) } == -1 {
        return Err(io::Error::last_os_error());
    }
    // The parent may have died before the prctl.
    if std::os::unix::process::parent_id() != parent {
        return Err(io::ErrorKind::BrokenPipe.into());
    }
    // SAFETY: marks descriptors as close-on-exec and touches no memory. Kernels before 5.11 do not support it; there the
    // descriptors that this process opened are so marked all the same.
    unsafe { libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC) };
    for fd in inherited {
        // SAFETY: F_SETFD on a descriptor that the parent holds open for the child; touches no memory.
        if unsafe { libc::fcntl(*fd, libc::F_SETFD, 0) } == -1 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// Reads the output of the process and its guest until both pipes end, which is when the process ends.
fn collect_output(
    mut console: ConsoleLog,
    out: Option<ChildStdout>,
    err: Option<ChildStderr>,
) -> (ConsoleLog, Vec<u8>) {
    let (mut out, mut err, mut messages) = (out, err, Vec::new());
    let mut buffer = [0; 4096];
    while out.is_some() || err.is_some() {
        let [out_ready, err_ready] = match poll_readable(out.as_ref(), err.as_ref()) {
            Ok(ready) => ready,
            Err(error) => {
                tracing::error!(%error, "cannot read the output of a VM any more");
                break;
            }
        };
        if out_ready && !read_once(&mut out, &mut buffer, |bytes| console.append(bytes)) {
            out = None;
        }
        let keep = |bytes: &[u8]| {
            messages.extend_from_slice(bytes);
            let surplus = messages.len().saturating_sub(2 * MAX_MESSAGES_BYTES);
            messages.drain(..surplus);
        };
        if err_ready && !read_once(&mut err, &mut buffer, keep) {
            err = None;
        }
    }
    (console, messages)
}

fn poll_readable(out: Option<&ChildStdout>, err: Option<&ChildStderr>) -> io::Result<[bool; 2]> {
    let fds = [out.map(AsFd::as_fd), err.map(AsFd::as_fd)];
    let mut polled: Vec<PollFd<'_>> = fds.iter().flatten().map(|fd| PollFd::new(*fd, PollFlags::POLLIN)).collect();
    retry::poll(&mut polled, None)?;
    let mut readable = polled.iter().map(|fd| fd.any().unwrap_or(true));
    Ok(fds.map(|fd| fd.is_some() && readable.next().unwrap_or(false)))
}

/// Reads once; returns false at the end.
fn read_once(from: &mut Option<impl Read>, buffer: &mut [u8], take: impl FnOnce(&[u8])) -> bool {
    match from.as_mut().map(|from| from.read(buffer)) {
        Some(Ok(count)) if count > 0 => {
            take(buffer.get(..count).unwrap_or_default());
            true
        }
        Some(Err(error)) if error.kind() == io::ErrorKind::Interrupted => true,
        _ => false,
    }
}
