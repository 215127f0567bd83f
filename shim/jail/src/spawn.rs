//! Owns: starting threads so that each has the filter of its kind, whoever asked for it.
//! Threads: one more in an armed process, which starts the others: a thread has the filters of the one that started
//! it beside its own, and the guest starts queues from the thread of a processor, which may do least of all.

use crate::{ThreadKind, thread};
use std::io;
use std::sync::OnceLock;
use std::sync::mpsc::{Sender, channel, sync_channel};
use std::thread::{Builder, JoinHandle};

type Job = Box<dyn FnOnce() + Send>;

/// The way to the thread that starts threads.
static STARTER: OnceLock<Sender<Job>> = OnceLock::new();
/// Its stack in bytes.
const STACK: usize = 128 << 10;

/// Starts a thread of this kind: `work` runs under its filter, if the process is armed.
pub fn spawn<T: Send + 'static>(
    kind: ThreadKind,
    builder: Builder,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    let work = move || {
        thread(kind);
        work()
    };
    let Some(starter) = STARTER.get() else { return builder.spawn(work) };
    let (tell, told) = sync_channel(1);
    let gone = || io::Error::from(io::ErrorKind::BrokenPipe);
    let job: Job = Box::new(move || {
        // Whoever asked waits for it below.
        let _ = tell.send(builder.spawn(work));
    });
    starter.send(job).map_err(|_gone| gone())?;
    told.recv().map_err(|_gone| gone())?
}

/// Starts the thread that starts the others from now on.
pub(crate) fn begin() -> io::Result<()> {
    let (jobs, inbox) = channel::<Job>();
    Builder::new().name("starter".into()).stack_size(STACK).spawn(move || inbox.iter().for_each(|job| job()))?;
    // A process is armed once.
    let _ = STARTER.set(jobs);
    Ok(())
}
