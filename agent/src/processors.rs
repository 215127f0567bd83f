//! Brings the first vCPUs of the guest online, as many as the host asks for, and the others offline.
//!
//! There is one change at a time; it blocks for milliseconds per vCPU.

use nacelle_base::{Chain, Classify, Kind};
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

/// The directory with a directory for each vCPU.
const CPUS: &str = "/sys/devices/system/cpu";
/// More vCPUs than any VM has.
const MAX_CPUS: u32 = 1024;

/// Reasons the number of online vCPUs cannot be changed.
#[derive(Debug, thiserror::Error)]
pub enum ProcessorsError {
    /// The pod runs on the node, without a kernel of its own.
    #[error("the CPUs are the node's: they are not brought online and offline for a pod")]
    OfNode,
    /// The VM has fewer vCPUs, or none was requested.
    #[error("cannot run {asked} vCPUs: the VM has {there}, and needs at least 1")]
    Count {
        /// The requested number.
        asked: u32,
        /// The number of vCPUs of the VM.
        there: u32,
    },
    /// The kernel could not change a vCPU.
    #[error("cannot {what} vCPU {number}")]
    Switch {
        /// The operation: "start" or "stop".
        what: &'static str,
        /// The number of the vCPU, from 0.
        number: u32,
        /// The system call's error.
        source: io::Error,
    },
}

impl Classify for ProcessorsError {
    fn kind(&self) -> Kind {
        match self {
            ProcessorsError::OfNode => Kind::Unsupported,
            ProcessorsError::Count { .. } => Kind::Invalid,
            ProcessorsError::Switch { .. } => Kind::Conflict,
        }
    }
}

/// The vCPUs of the guest.
#[derive(Debug)]
pub struct Processors {
    /// `None` on the node.
    directory: Option<PathBuf>,
    turn: Mutex<()>,
}

impl Processors {
    /// The vCPUs of the guest whose first process this is.
    pub fn of_guest() -> Processors {
        Processors { directory: Some(CPUS.into()), turn: Mutex::default() }
    }

    /// The CPUs of the node, which are not changed.
    pub fn of_node() -> Processors {
        Processors { directory: None, turn: Mutex::default() }
    }

    /// Brings the first `asked` vCPUs online and all others offline. If one cannot be changed, all others are restored.
    pub fn set_online_count(&self, asked: u32) -> Result<(), ProcessorsError> {
        let directory = self.directory.as_ref().ok_or(ProcessorsError::OfNode)?;
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        // The first vCPU has no such file: it is always online.
        let switch = |number: u32| directory.join(format!("cpu{number}/online"));
        let there = (1..MAX_CPUS).find(|number| !switch(*number).exists()).unwrap_or(MAX_CPUS);
        if !(1..=there).contains(&asked) {
            return Err(ProcessorsError::Count { asked, there });
        }
        let mut changed = Vec::new();
        for number in 1..there {
            let on = number < asked;
            let turned = fs::read_to_string(switch(number)).and_then(|now| {
                let same = (now.trim_end() == "1") == on;
                if same { Ok(false) } else { set_online(&switch(number), on).map(|()| true) }
            });
            match turned {
                Ok(true) => changed.push(number),
                Ok(false) => {}
                Err(source) => {
                    for number in changed.into_iter().rev() {
                        if let Err(error) = set_online(&switch(number), !on) {
                            tracing::warn!(number, "cannot restore the state of a vCPU: {}", Chain(&error));
                        }
                    }
                    let what = if on { "start" } else { "stop" };
                    return Err(ProcessorsError::Switch { what, number, source });
                }
            }
        }
        if !changed.is_empty() {
            tracing::info!(running = asked, there, "changed the number of online vCPUs");
        }
        Ok(())
    }
}

/// Writes the state of a vCPU to its existing file.
fn set_online(switch: &PathBuf, on: bool) -> io::Result<()> {
    let value = if on { b"1" } else { b"0" };
    File::options().write(true).truncate(true).open(switch)?.write_all(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guest(running: &[&str]) -> (tempfile::TempDir, Processors) {
        let directory = tempfile::tempdir().unwrap();
        fs::create_dir(directory.path().join("cpu0")).unwrap();
        for (number, value) in (1..).zip(running) {
            fs::create_dir(directory.path().join(format!("cpu{number}"))).unwrap();
            fs::write(directory.path().join(format!("cpu{number}/online")), value).unwrap();
        }
        let processors = Processors { directory: Some(directory.path().to_owned()), turn: Mutex::default() };
        (directory, processors)
    }

    fn now(directory: &tempfile::TempDir) -> Vec<String> {
        let read = |number: u32| fs::read_to_string(directory.path().join(format!("cpu{number}/online")));
        (1..).map_while(|number| read(number).ok()).map(|value| value.trim_end().to_owned()).collect()
    }

    #[test]
    fn the_first_ones_run() {
        let (directory, processors) = guest(&["1\n", "0\n", "0\n"]);
        for (count, running) in [(2, ["1", "0", "0"]), (4, ["1", "1", "1"]), (3, ["1", "1", "0"]), (1, ["0", "0", "0"])]
        {
            processors.set_online_count(count).unwrap();
            assert_eq!(now(&directory), running);
        }
        for count in [0, 5, u32::MAX] {
            let error = processors.set_online_count(count).unwrap_err();
            assert!(matches!(error, ProcessorsError::Count { there: 4, .. }), "{error}");
            assert_eq!(error.kind(), Kind::Invalid);
        }
        let (_directory, alone) = guest(&[]);
        alone.set_online_count(1).unwrap();
        assert!(alone.set_online_count(2).is_err());
    }

    #[test]
    fn one_that_cannot_be_switched_changes_nothing() {
        let (directory, processors) = guest(&["0", "0", "0"]);
        // A directory in place of the file cannot be read or written.
        fs::remove_file(directory.path().join("cpu3/online")).unwrap();
        fs::create_dir(directory.path().join("cpu3/online")).unwrap();
        let error = processors.set_online_count(4).unwrap_err();
        assert!(matches!(error, ProcessorsError::Switch { number: 3, what: "start", .. }), "{error}");
        assert_eq!(now(&directory), ["0", "0"]);
    }

    #[test]
    fn the_nodes_cpus_are_not_changed() {
        assert_eq!(Processors::of_node().set_online_count(1).unwrap_err().kind(), Kind::Unsupported);
    }
}
