//! Owns: another program with a machine in it, for whoever knows how to speak with that: its start, its messages, its end.
//! Threads: the program's warden (`process`).

use crate::console::Console;
use crate::process::{Process, Warden};
use crate::{EngineError, MachineExit};
use std::os::fd::RawFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// A program that runs, or has ended. It ends when this is dropped, or its process ends.
pub struct Program {
    process: Arc<Process>,
    warden: Option<Warden>,
}

impl Program {
    /// Starts a program (an absolute path), which inherits these descriptors beside its standard streams and has no environment.
    /// What it prints goes to the file `log`, which stays small. Returns when it runs; it has not looked at its arguments then.
    pub fn start(program: &Path, args: Vec<String>, inherited: Vec<RawFd>, log: &Path) -> Result<Program, EngineError> {
        let failed = |source| EngineError::File { what: "open", path: log.to_owned(), source };
        let console = Console::open(log).map_err(failed)?;
        let (process, warden) = Process::start(program, args, inherited, console, || ())?;
        Ok(Program { process, warden: Some(warden) })
    }

    /// Its process id; another process may have it once this one has ended.
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Kills it, unless it has ended. Does not wait for the end.
    pub fn kill(&self) {
        self.process.kill();
    }

    /// Waits until it has ended; `None` after `timeout`.
    pub fn wait(&self, timeout: Duration) -> Option<MachineExit> {
        self.process.ended.wait(timeout)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        self.process.kill();
        if let Some(warden) = self.warden.take()
            && warden.join().is_err()
        {
            tracing::error!("the thread that watches a program broke down");
        }
    }
}
