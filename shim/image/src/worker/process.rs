//! The daemon's side of one worker process: starts it, sets its limits, reserves its memory, receives its result and ends it.
//!
//! The thread that starts a worker stays until the worker has ended, because the worker dies with it and because the thread has a PID
//! namespace for its children, of which the worker is process 1. The threads of one piece of work share a [`Supervision`]: if one of
//! them fails, or the caller cancels, all of its workers are killed, which ends every wait for their pipes.

use super::WorkerError;
use super::channel::{DaemonChannel, ReceiveError, channel_pair};
use super::program::encode_arguments;
use super::protocol::{Job, JobError, JobFigures, PROTOCOL_VERSION, WorkerReport, WorkerRequest};
use crate::budget::{Budget, BudgetError, Cancel, RESERVATION_STEP};
use crate::config::ImageWorkerConfig;
use crate::erofs::MAX_METADATA;
use crate::layer::ingest::LayerLimits;
use nacelle_base::writeback::start_writeback;
use nacelle_jail::WorkerJail;
use nix::sys::signal::Signal;
use nix::time::clock_getcpuclockid;
use nix::unistd::{Pid, geteuid};
use rustix::process::{Resource, Rlimit, prlimit};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How often the daemon checks whether a worker must end.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// How long a worker that has closed its channel may take to end.
const EXIT_TIMEOUT: Duration = Duration::from_secs(5);
/// The address space in bytes of a worker for its program, its stack and its buffers, besides the memory that it reserves.
const BASE_ADDRESS_SPACE: u64 = 128 << 20;
/// The CPU time in seconds of any worker.
const BASE_CPU_SECONDS: u64 = 60;
/// The bytes of a layer for which a worker may take a further second of CPU time: a tenth of what decompressing reaches.
const BYTES_PER_CPU_SECOND: u64 = 16 << 20;
/// The entries of a layer for which a worker may take a further second.
const ENTRIES_PER_CPU_SECOND: u64 = 10_000;
/// The steps of an image for which a worker may take a further second.
const STEPS_PER_CPU_SECOND: u64 = 1_000_000;

/// How workers are started.
#[derive(Clone, Copy, Debug)]
pub enum Launch<'a> {
    /// As jailed processes.
    Process(&'a ImageWorkerConfig),
    /// As threads, in unit tests: all of it but the jail and the limits.
    #[cfg(test)]
    Thread,
}

/// The state that the threads of one piece of work share.
#[derive(Debug)]
pub struct Supervision<'a> {
    launch: Launch<'a>,
    budget: Mutex<&'a mut Budget>,
    cancel: Cancel,
    stopped: AtomicBool,
    /// The source of the input has not delivered more, so that no worker can make progress.
    waits_for_source: AtomicBool,
    /// The number of reads and writes of pipes.
    moves: AtomicU64,
}

/// The streams of a worker.
pub struct WorkerStreams<'f> {
    /// Its standard input.
    pub input: OwnedFd,
    /// Its standard output.
    pub output: OwnedFd,
    /// The descriptor that comes with the job.
    pub blob: Option<&'f File>,
}

/// Reasons that a worker has no result.
#[derive(Debug)]
pub enum WorkerEnd {
    /// The worker reported that the job fails.
    Failed(JobError),
    /// The worker needs more than its budget, or the caller cancelled.
    Budget(BudgetError),
    /// The worker itself failed.
    Lost(WorkerError),
    /// Another thread failed first, so the worker was killed.
    Stopped,
}

impl<'a> Supervision<'a> {
    /// Returns the state of a piece of work whose memory is charged to `budget`.
    pub fn new(launch: Launch<'a>, budget: &'a mut Budget) -> Supervision<'a> {
        let cancel = budget.cancel().clone();
        Supervision {
            launch,
            budget: Mutex::new(budget),
            cancel,
            stopped: AtomicBool::new(false),
            waits_for_source: AtomicBool::new(false),
            moves: AtomicU64::new(0),
        }
    }

    /// Ends all workers.
    pub fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
    }

    /// Returns whether the work must end.
    pub fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed) || self.cancel.is_cancelled()
    }

    /// Returns whether the caller has cancelled.
    pub fn is_cancelled(&self) -> bool {
        self.cancel.is_cancelled()
    }

    /// Calls `read`, which waits for the source of the input. Meanwhile no worker is expected to make progress.
    pub fn wait_for_source<T>(&self, read: impl FnOnce() -> T) -> T {
        self.waits_for_source.store(true, Ordering::Relaxed);
        let read = read();
        self.count_move();
        self.waits_for_source.store(false, Ordering::Relaxed);
        read
    }

    /// Records that a pipe was read or written.
    pub fn count_move(&self) {
        self.moves.fetch_add(1, Ordering::Relaxed);
    }

    /// The budget of the work.
    pub fn budget(&self) -> MutexGuard<'_, &'a mut Budget> {
        self.budget.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs a worker to its end. Blocks. Must be called on a thread that ends afterwards and starts no other thread.
    pub fn run(&self, job: Job, streams: WorkerStreams<'_>) -> Result<JobFigures, WorkerEnd> {
        let memory = self.budget().limit();
        let started = RunningWorker::start(self.launch, &job, memory, streams.input, streams.output);
        // A worker has written all of its output before it reports, so it may be killed then.
        let result = started.and_then(|mut worker| self.serve(&mut worker, job, streams.blob));
        if result.is_err() {
            self.stop();
        }
        result
    }

    /// Answers the messages of a worker until its result.
    fn serve(&self, worker: &mut RunningWorker, job: Job, blob: Option<&File>) -> Result<JobFigures, WorkerEnd> {
        let task = job.task();
        let protocol = |why| WorkerEnd::Lost(WorkerError::Protocol { task, why });
        match self.receive(worker, task, blob)? {
            WorkerReport::Ready { version: PROTOCOL_VERSION } => {}
            WorkerReport::Ready { version } => {
                return Err(WorkerEnd::Lost(WorkerError::Version { found: version, expected: PROTOCOL_VERSION }));
            }
            WorkerReport::Failed(error) => return Err(failure(&job, error)),
            _ => return Err(protocol("its first message is not that it is ready")),
        }
        worker.limit_memory()?;
        worker.send(&WorkerRequest::Job(job.clone()), blob, task)?;
        loop {
            match self.receive(worker, task, blob)? {
                WorkerReport::Ready { .. } => return Err(protocol("it is ready twice")),
                WorkerReport::Reserve { bytes } => {
                    if bytes == 0 || bytes % RESERVATION_STEP != 0 {
                        return Err(protocol("it requested memory that is not a positive multiple of 1 MiB"));
                    }
                    self.budget().charge(bytes).map_err(WorkerEnd::Budget)?;
                    worker.reserved = worker.reserved.saturating_add(bytes);
                    worker.limit_memory()?;
                    worker.send(&WorkerRequest::Granted, None, task)?;
                }
                WorkerReport::Done(figures) => return Ok(figures),
                WorkerReport::Failed(error) => return Err(failure(&job, error)),
            }
        }
    }

    /// Receives the next message of a worker, unless it must end or makes no progress.
    fn receive(
        &self,
        worker: &mut RunningWorker,
        task: &'static str,
        blob: Option<&File>,
    ) -> Result<WorkerReport, WorkerEnd> {
        let mut last = self.progress(worker);
        let mut since = Instant::now();
        loop {
            // Tested before: what the worker reported first is the cause.
            let must_stop = self.is_stopped();
            match worker.channel.receive() {
                Ok(report) => return Ok(report),
                Err(ReceiveError::Timeout) => {}
                Err(ReceiveError::Closed) => return Err(WorkerEnd::Lost(worker.wait_for_end(task))),
                Err(ReceiveError::Invalid(text)) => {
                    return Err(WorkerEnd::Lost(WorkerError::UnknownMessage { task, text }));
                }
                Err(ReceiveError::Io(source)) => {
                    let what = "receive a message of";
                    return Err(WorkerEnd::Lost(WorkerError::Control { what, source }));
                }
            }
            if self.cancel.is_cancelled() {
                return Err(WorkerEnd::Budget(BudgetError::Cancelled));
            }
            if must_stop {
                return Err(WorkerEnd::Stopped);
            }
            // Otherwise the disk would wait until the layer is unpacked. A failure comes back from the sync at its end.
            let _ = blob.map(start_writeback);
            let now = self.progress(worker);
            if now != last || self.waits_for_source.load(Ordering::Relaxed) {
                (last, since) = (now, Instant::now());
            } else if since.elapsed() >= worker.stall_timeout {
                let seconds = worker.stall_timeout.as_secs();
                return Err(WorkerEnd::Lost(WorkerError::Stalled { seconds, task }));
            }
        }
    }

    /// Returns values that change while a worker makes progress: the moves of pipes and its CPU time in seconds.
    fn progress(&self, worker: &RunningWorker) -> (u64, i64) {
        (self.moves.load(Ordering::Relaxed), worker.cpu_seconds())
    }
}

/// Checks that an error is one of those that a job may have.
fn failure(job: &Job, error: JobError) -> WorkerEnd {
    use crate::erofs::ErofsError as E;
    use crate::layer::ingest::LayerError as L;
    use crate::tree::TreeError as T;
    let task = job.task();
    let allowed = match (job, &error) {
        (_, JobError::Worker(message)) => {
            return WorkerEnd::Lost(WorkerError::Failed { task, message: message.clone() });
        }
        (Job::Decompress { .. }, JobError::Layer(L::Decompress(_) | L::Write(_))) => true,
        (Job::Index { .. }, JobError::Layer(L::Tar(_) | L::Entry { .. } | L::TooLarge { .. } | L::Write(_))) => true,
        (Job::Merge { .. } | Job::Find { .. }, JobError::Index { .. } | JobError::Stream(_)) => true,
        (Job::Merge { .. } | Job::Find { .. }, JobError::Tree(T::Entry { .. } | T::Index { .. })) => true,
        (Job::Merge { .. } | Job::Find { .. }, JobError::Tree(T::Budget(BudgetError::Steps { .. }))) => true,
        (Job::Merge { .. }, JobError::Erofs(E::Budget(error))) => matches!(error, BudgetError::Steps { .. }),
        (Job::Merge { .. }, JobError::Erofs(_)) => true,
        _ => false,
    };
    match allowed {
        true => WorkerEnd::Failed(error),
        false => WorkerEnd::Lost(WorkerError::Protocol { task, why: "it reports an error that its job cannot have" }),
    }
}

/// A worker that has been started. Dropping it kills it and waits for its end.
struct RunningWorker {
    channel: DaemonChannel,
    /// `None` if it is a thread.
    child: Option<Child>,
    stall_timeout: Duration,
    /// The bytes that it has reserved.
    reserved: u64,
    /// The maximum address space in bytes, which it has when all of the budget is reserved.
    max_address_space: u64,
    /// The limit of its CPU time in seconds.
    cpu_limit: u64,
}

impl Drop for RunningWorker {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child
            && let Err(error) = child.kill().and_then(|()| child.wait())
        {
            tracing::error!(%error, "cannot end an image worker");
        }
    }
}

impl RunningWorker {
    /// Starts a worker whose budget is at most `memory` bytes.
    fn start(
        launch: Launch<'_>,
        job: &Job,
        memory: u64,
        input: OwnedFd,
        output: OwnedFd,
    ) -> Result<RunningWorker, WorkerEnd> {
        let control = |source| WorkerEnd::Lost(WorkerError::Control { what: "connect", source });
        let (channel, theirs) = channel_pair(POLL_INTERVAL).map_err(control)?;
        let (max_address_space, cpu_limit) = (address_space(memory), cpu_limit(job));
        let worker = |child, stall_timeout| RunningWorker {
            channel,
            child,
            stall_timeout,
            reserved: 0,
            max_address_space,
            cpu_limit,
        };
        match launch {
            Launch::Process(config) => {
                let jail = WorkerJail {
                    seccomp: config.seccomp,
                    user: config.user,
                    address_space: max_address_space,
                    cpu_seconds: cpu_limit,
                    file_size: file_limit(job),
                };
                let mut command = Command::new(&config.program);
                command.args(encode_arguments(&jail)).env_clear().current_dir("/");
                command.stdin(Stdio::from(input)).stdout(Stdio::from(output)).stderr(Stdio::from(theirs));
                let child = spawn_in_pid_namespace(&mut command);
                let failed = |source| WorkerError::Start { program: config.program.clone(), source };
                Ok(worker(Some(child.map_err(failed).map_err(WorkerEnd::Lost)?), config.stall_timeout))
            }
            #[cfg(test)]
            Launch::Thread => {
                let channel = std::sync::Arc::new(super::channel::WorkerChannel::Socket(theirs));
                std::thread::spawn(move || super::program::serve(&channel, File::from(input), File::from(output)));
                Ok(worker(None, Duration::from_secs(60)))
            }
        }
    }

    fn pid(&self) -> Option<i32> {
        self.child.as_ref().and_then(|child| i32::try_from(child.id()).ok())
    }

    /// Sets the limit of its address space to what it has reserved. The worker has set the maximum, and cannot change either.
    fn limit_memory(&self) -> Result<(), WorkerEnd> {
        let Some(pid) = self.pid().and_then(rustix::process::Pid::from_raw) else { return Ok(()) };
        let current = address_space(self.reserved).min(self.max_address_space);
        let limit = Rlimit { current: Some(current), maximum: Some(self.max_address_space) };
        match prlimit(Some(pid), Resource::As, limit) {
            // A worker of another user has its maximum from the beginning, where the daemon has no CAP_SYS_RESOURCE.
            Ok(_) | Err(rustix::io::Errno::PERM) => Ok(()),
            Err(errno) => Err(WorkerEnd::Lost(WorkerError::Control { what: "limit", source: errno.into() })),
        }
    }

    /// Sends a message, with the descriptor of a file if there is one.
    fn send(&mut self, request: &WorkerRequest, file: Option<&File>, task: &'static str) -> Result<(), WorkerEnd> {
        let Err(source) = self.channel.send(request, file.map(AsFd::as_fd)) else { return Ok(()) };
        Err(WorkerEnd::Lost(match source.kind() {
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => self.wait_for_end(task),
            io::ErrorKind::WouldBlock => WorkerError::Protocol { task, why: "it does not read the answers to it" },
            _ => WorkerError::Control { what: "send a message to", source },
        }))
    }

    /// Returns the CPU time that it has used, in seconds.
    fn cpu_seconds(&self) -> i64 {
        let clock = self.pid().and_then(|pid| clock_getcpuclockid(Pid::from_raw(pid)).ok());
        clock.and_then(|clock| clock.now().ok()).map_or(0, |time| time.tv_sec())
    }

    /// Waits for the end of a worker that has closed its channel without a result, and returns how it has ended.
    fn wait_for_end(&mut self, task: &'static str) -> WorkerError {
        let Some(child) = &mut self.child else { return WorkerError::NoResult { status: -1, task } };
        let deadline = Instant::now() + EXIT_TIMEOUT;
        loop {
            match child.try_wait() {
                Ok(Some(status)) => return end_of(status, self.cpu_limit, task),
                Ok(None) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(2)),
                Ok(None) => return WorkerError::Protocol { task, why: "it closed its channel and did not end" },
                Err(source) => return WorkerError::Control { what: "wait for", source },
            }
        }
    }
}

/// Returns why a process has ended.
fn end_of(status: ExitStatus, cpu_limit: u64, task: &'static str) -> WorkerError {
    match status.signal() {
        Some(libc::SIGKILL) => WorkerError::Killed { seconds: cpu_limit, task },
        Some(signal) => {
            let name = Signal::try_from(signal).map_or("unknown", Signal::as_str);
            WorkerError::Signal { signal, name, task }
        }
        None => WorkerError::NoResult { status: status.code().unwrap_or(-1), task },
    }
}

/// Returns the address space of a worker that has reserved so many bytes. A quarter more is for what the allocator leaves unused.
fn address_space(reserved: u64) -> u64 {
    reserved.saturating_add(reserved / 4).saturating_add(BASE_ADDRESS_SPACE)
}

/// Returns the maximum CPU time of a job in seconds. It is far above what any layer takes, so that only a worker that loops reaches it.
fn cpu_limit(job: &Job) -> u64 {
    BASE_CPU_SECONDS
        + match job {
            Job::Decompress { bytes } => bytes / BYTES_PER_CPU_SECOND,
            Job::Index { bytes, entries } => bytes / BYTES_PER_CPU_SECOND + entries / ENTRIES_PER_CPU_SECOND,
            Job::Merge { steps, .. } | Job::Find { steps, .. } => steps / STEPS_PER_CPU_SECOND,
        }
}

/// Returns the maximum size in bytes of the files that a job writes.
fn file_limit(job: &Job) -> u64 {
    match *job {
        Job::Index { bytes, entries } => LayerLimits { bytes, entries }.max_blob_length(),
        Job::Merge { .. } => MAX_METADATA as u64,
        Job::Decompress { .. } | Job::Find { .. } => 0,
    }
}

/// Starts a command as process 1 of a new PID namespace, which is that of this thread's children from now on. Without root there is
/// none: the worker then enters a user namespace of its own, which limits what it reaches in another way.
fn spawn_in_pid_namespace(command: &mut Command) -> io::Result<Child> {
    if geteuid().is_root() {
        nacelle_jail::create_child_pid_namespace()?;
    }
    command.spawn()
}
