//! Starts threads so that each has the filter of its kind, whichever thread requests it.
//!
//! An armed process has a starter thread, because a new thread inherits the filters of its creator in addition to its own:
//! the guest starts virtqueues from a vCPU thread, which has the strictest filter.

use crate::{ThreadKind, filter_thread};
use std::io;
use std::sync::OnceLock;
use std::sync::mpsc::{Sender, channel, sync_channel};
use std::thread::{Builder, JoinHandle};

type Job = Box<dyn FnOnce() + Send>;

/// The channel to the starter thread.
static STARTER: OnceLock<Sender<Job>> = OnceLock::new();
/// The stack size of the starter thread in bytes.
const STACK_BYTES: usize = 128 << 10;

/// Starts a thread of this kind: `work` runs under its filter, if the process is armed.
pub fn spawn<T: Send + 'static>(
    kind: ThreadKind,
    builder: Builder,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    let work = move || {
        filter_thread(kind);
        work()
    };
    let Some(starter) = STARTER.get() else { return builder.spawn(work) };
    let (reply_sender, reply) = sync_channel(1);
    let stopped = || io::Error::from(io::ErrorKind::BrokenPipe);
    let job: Job = Box::new(move || {
        // The requesting thread waits for this message below.
        let _ = reply_sender.send(builder.spawn(work));
    });
    starter.send(job).map_err(|_gone| stopped())?;
    reply.recv().map_err(|_gone| stopped())?
}

/// Starts the starter thread.
pub(crate) fn start_starter() -> io::Result<()> {
    let (jobs, inbox) = channel::<Job>();
    Builder::new().name("starter".into()).stack_size(STACK_BYTES).spawn(move || inbox.iter().for_each(|job| job()))?;
    // `install_process_filter` succeeds only once, so the channel is not set yet.
    let _ = STARTER.set(jobs);
    Ok(())
}
