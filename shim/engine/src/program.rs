//! Runs another program that contains a machine, for callers that speak its protocol: start, output, end. Each program has
//! a warden thread (`process`).

use crate::console::ConsoleLog;
use crate::process::{Process, Warden};
use crate::{EngineError, MachineExit};
use std::os::fd::RawFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// A program that runs or has ended. It is killed when this value is dropped, or when this process ends.
pub struct MachineProgram {
    process: Arc<Process>,
    warden: Option<Warden>,
}

impl MachineProgram {
    /// Starts a program (an absolute path) without environment, which inherits these descriptors besides its standard
    /// streams. Its output goes to the file `log`, whose size is bounded. Returns when the program runs, before it has
    /// parsed its arguments.
    pub fn start(
        program: &Path,
        args: Vec<String>,
        inherited: Vec<RawFd>,
        log: &Path,
    ) -> Result<MachineProgram, EngineError> {
        let failed = |source| EngineError::File { what: "open", path: log.to_owned(), source };
        let console = ConsoleLog::create(log).map_err(failed)?;
        let (process, warden) = Process::start(program, args, inherited, console, || ())?;
        Ok(MachineProgram { process, warden: Some(warden) })
    }

    /// Returns the pid. After the end it may belong to another process.
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Kills the program, unless it has ended. Does not wait for the end.
    pub fn kill(&self) {
        self.process.kill();
    }

    /// Waits until the program has ended; returns `None` after `timeout`.
    pub fn wait(&self, timeout: Duration) -> Option<MachineExit> {
        self.process.ended.wait(timeout)
    }
}

impl Drop for MachineProgram {
    fn drop(&mut self) {
        self.process.kill();
        if let Some(warden) = self.warden.take()
            && warden.join().is_err()
        {
            tracing::error!("BUG: the thread that watches a program panicked");
        }
    }
}
