//! Owns: how many of the machine's processors run: the first ones. The others are there and stand still.
//! May use: /sys of the guest. Threads: one change at a time; blocks for milliseconds a processor.

use nacelle_base::{Chain, Classify, Kind};
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

/// Where the kernel has a folder for each.
const FOLDER: &str = "/sys/devices/system/cpu";
/// More than any machine has.
const MOST: u32 = 1024;

/// Why another number of processors cannot run.
#[derive(Debug, thiserror::Error)]
pub enum ProcessorsError {
    /// The agent has no kernel of its own.
    #[error("the processors are the node's: they are not switched on and off for a pod")]
    OfNode,
    /// So many there are not.
    #[error("{asked} processors: the machine has {there}, and needs 1")]
    Count {
        /// Asked for.
        asked: u32,
        /// What there is.
        there: u32,
    },
    /// The kernel does not do it.
    #[error("cannot {what} processor {number}")]
    Switch {
        /// "start", "stop".
        what: &'static str,
        /// Which, from 0.
        number: u32,
        /// Why.
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

/// The machine's processors.
#[derive(Debug)]
pub struct Processors {
    /// None: there is no machine.
    folder: Option<PathBuf>,
    turn: Mutex<()>,
}

impl Processors {
    /// Those of the machine whose first process this is.
    pub fn of_machine() -> Processors {
        Processors { folder: Some(FOLDER.into()), turn: Mutex::default() }
    }

    /// Those of the node, which are let alone.
    pub fn of_node() -> Processors {
        Processors { folder: None, turn: Mutex::default() }
    }

    /// Has the first so many run, and no other. If one cannot be started or stopped, it is as it was before.
    pub fn set(&self, asked: u32) -> Result<(), ProcessorsError> {
        let folder = self.folder.as_ref().ok_or(ProcessorsError::OfNode)?;
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        // The first has no switch: it always runs.
        let switch = |number: u32| folder.join(format!("cpu{number}/online"));
        let there = (1..MOST).find(|number| !switch(*number).exists()).unwrap_or(MOST);
        if !(1..=there).contains(&asked) {
            return Err(ProcessorsError::Count { asked, there });
        }
        let mut changed = Vec::new();
        for number in 1..there {
            let on = number < asked;
            let turned = fs::read_to_string(switch(number)).and_then(|now| {
                let same = (now.trim_end() == "1") == on;
                if same { Ok(false) } else { turn(&switch(number), on).map(|()| true) }
            });
            match turned {
                Ok(true) => changed.push(number),
                Ok(false) => {}
                Err(source) => {
                    for number in changed.into_iter().rev() {
                        if let Err(error) = turn(&switch(number), !on) {
                            tracing::warn!(number, "a processor is not as it was: {}", Chain(&error));
                        }
                    }
                    let what = if on { "start" } else { "stop" };
                    return Err(ProcessorsError::Switch { what, number, source });
                }
            }
        }
        if !changed.is_empty() {
            tracing::info!(running = asked, there, "processors");
        }
        Ok(())
    }
}

/// To a file that is there.
fn turn(switch: &PathBuf, on: bool) -> io::Result<()> {
    let value = if on { b"1" } else { b"0" };
    File::options().write(true).truncate(true).open(switch)?.write_all(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(running: &[&str]) -> (tempfile::TempDir, Processors) {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("cpu0")).unwrap();
        for (number, value) in (1..).zip(running) {
            fs::create_dir(folder.path().join(format!("cpu{number}"))).unwrap();
            fs::write(folder.path().join(format!("cpu{number}/online")), value).unwrap();
        }
        let processors = Processors { folder: Some(folder.path().to_owned()), turn: Mutex::default() };
        (folder, processors)
    }

    fn now(folder: &tempfile::TempDir) -> Vec<String> {
        let read = |number: u32| fs::read_to_string(folder.path().join(format!("cpu{number}/online")));
        (1..).map_while(|number| read(number).ok()).map(|value| value.trim_end().to_owned()).collect()
    }

    #[test]
    fn the_first_ones_run() {
        let (folder, processors) = machine(&["1\n", "0\n", "0\n"]);
        for (count, running) in [(2, ["1", "0", "0"]), (4, ["1", "1", "1"]), (3, ["1", "1", "0"]), (1, ["0", "0", "0"])]
        {
            processors.set(count).unwrap();
            assert_eq!(now(&folder), running);
        }
        for count in [0, 5, u32::MAX] {
            let error = processors.set(count).unwrap_err();
            assert!(matches!(error, ProcessorsError::Count { there: 4, .. }), "{error}");
            assert_eq!(error.kind(), Kind::Invalid);
        }
        let (_folder, alone) = machine(&[]);
        alone.set(1).unwrap();
        assert!(alone.set(2).is_err());
    }

    #[test]
    fn one_that_cannot_be_switched_changes_nothing() {
        let (folder, processors) = machine(&["0", "0", "0"]);
        // A folder has no value that could be read or written.
        fs::remove_file(folder.path().join("cpu3/online")).unwrap();
        fs::create_dir(folder.path().join("cpu3/online")).unwrap();
        let error = processors.set(4).unwrap_err();
        assert!(matches!(error, ProcessorsError::Switch { number: 3, what: "start", .. }), "{error}");
        assert_eq!(now(&folder), ["0", "0"]);
    }

    #[test]
    fn the_nodes_are_let_alone() {
        assert_eq!(Processors::of_node().set(1).unwrap_err().kind(), Kind::Unsupported);
    }
}
