//! Brings the first vCPUs of the guest online, as many as the host asks for, and the others offline.
//!
//! There is one change at a time; it blocks for milliseconds per vCPU.

use nacelle_base::{Chain, Classify, FailureKind};
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

/// The directory with a directory for each vCPU.
const CPU_DIRECTORY: &str = "/sys/devices/system/cpu";
/// More vCPUs than any VM has.
const MAX_CPUS: u32 = 1024;

/// Reasons the number of online vCPUs cannot be changed.
#[derive(Debug, thiserror::Error)]
pub enum OnlineCpusError {
    /// The pod runs on the node, without a kernel of its own.
    #[error("cannot change the number of CPUs: the pod runs on the node, whose CPUs stay online")]
    OfNode,
    /// The VM has fewer vCPUs, or none was requested.
    #[error("cannot run {requested} vCPUs: the VM has {vcpus}, and needs at least 1")]
    Count {
        /// The requested number.
        requested: u32,
        /// The number of vCPUs of the VM.
        vcpus: u32,
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

impl Classify for OnlineCpusError {
    fn kind(&self) -> FailureKind {
        match self {
            OnlineCpusError::OfNode => FailureKind::Unsupported,
            OnlineCpusError::Count { .. } => FailureKind::Invalid,
            OnlineCpusError::Switch { .. } => FailureKind::Conflict,
        }
    }
}

/// The vCPUs of the guest.
#[derive(Debug)]
pub struct OnlineCpus {
    /// `None` on the node.
    directory: Option<PathBuf>,
    resize_lock: Mutex<()>,
}

impl OnlineCpus {
    /// The vCPUs of the guest whose first process this is.
    pub fn of_guest() -> OnlineCpus {
        OnlineCpus { directory: Some(CPU_DIRECTORY.into()), resize_lock: Mutex::default() }
    }

    /// The CPUs of the node, which are not changed.
    pub fn of_node() -> OnlineCpus {
        OnlineCpus { directory: None, resize_lock: Mutex::default() }
    }

    /// Brings the first `requested` vCPUs online and all others offline. If one cannot be changed, all others are restored.
    pub fn set_online_count(&self, requested: u32) -> Result<(), OnlineCpusError> {
        let directory = self.directory.as_ref().ok_or(OnlineCpusError::OfNode)?;
        let _lock = self.resize_lock.lock().unwrap_or_else(PoisonError::into_inner);
        // The first vCPU has no such file: it is always online.
        let online_file = |number: u32| directory.join(format!("cpu{number}/online"));
        let vcpus = (1..MAX_CPUS).find(|number| !online_file(*number).exists()).unwrap_or(MAX_CPUS);
        if !(1..=vcpus).contains(&requested) {
            return Err(OnlineCpusError::Count { requested, vcpus });
        }
        let mut changed = Vec::new();
        for number in 1..vcpus {
            let online = number < requested;
            let result = fs::read_to_string(online_file(number)).and_then(|now| {
                let unchanged = (now.trim_end() == "1") == online;
                if unchanged { Ok(false) } else { set_online(&online_file(number), online).map(|()| true) }
            });
            match result {
                Ok(true) => changed.push(number),
                Ok(false) => {}
                Err(source) => {
                    for number in changed.into_iter().rev() {
                        if let Err(error) = set_online(&online_file(number), !online) {
                            tracing::warn!(number, "cannot restore the state of a vCPU: {}", Chain(&error));
                        }
                    }
                    let what = if online { "start" } else { "stop" };
                    return Err(OnlineCpusError::Switch { what, number, source });
                }
            }
        }
        if !changed.is_empty() {
            tracing::info!(running = requested, vcpus, "changed the number of online vCPUs");
        }
        Ok(())
    }
}

/// Writes the state of a vCPU to its existing file.
fn set_online(online_file: &PathBuf, online: bool) -> io::Result<()> {
    let value = if online { b"1" } else { b"0" };
    File::options().write(true).truncate(true).open(online_file)?.write_all(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guest(running: &[&str]) -> (tempfile::TempDir, OnlineCpus) {
        let directory = tempfile::tempdir().unwrap();
        fs::create_dir(directory.path().join("cpu0")).unwrap();
        for (number, value) in (1..).zip(running) {
            fs::create_dir(directory.path().join(format!("cpu{number}"))).unwrap();
            fs::write(directory.path().join(format!("cpu{number}/online")), value).unwrap();
        }
        let processors = OnlineCpus { directory: Some(directory.path().to_owned()), resize_lock: Mutex::default() };
        (directory, processors)
    }

    fn now(directory: &tempfile::TempDir) -> Vec<String> {
        let read = |number: u32| fs::read_to_string(directory.path().join(format!("cpu{number}/online")));
        (1..).map_while(|number| read(number).ok()).map(|value| value.trim_end().to_owned()).collect()
    }

    #[test]
    fn the_first_vcpus_are_online() {
        let (directory, processors) = guest(&["1\n", "0\n", "0\n"]);
        for (count, running) in [(2, ["1", "0", "0"]), (4, ["1", "1", "1"]), (3, ["1", "1", "0"]), (1, ["0", "0", "0"])]
        {
            processors.set_online_count(count).unwrap();
            assert_eq!(now(&directory), running);
        }
        for count in [0, 5, u32::MAX] {
            let error = processors.set_online_count(count).unwrap_err();
            assert!(matches!(error, OnlineCpusError::Count { vcpus: 4, .. }), "{error}");
            assert_eq!(error.kind(), FailureKind::Invalid);
        }
        let (_directory, alone) = guest(&[]);
        alone.set_online_count(1).unwrap();
        assert!(alone.set_online_count(2).is_err());
    }

    #[test]
    fn a_vcpu_that_cannot_be_changed_restores_all() {
        let (directory, processors) = guest(&["0", "0", "0"]);
        // A directory in place of the file cannot be read or written.
        fs::remove_file(directory.path().join("cpu3/online")).unwrap();
        fs::create_dir(directory.path().join("cpu3/online")).unwrap();
        let error = processors.set_online_count(4).unwrap_err();
        assert!(matches!(error, OnlineCpusError::Switch { number: 3, what: "start", .. }), "{error}");
        assert_eq!(now(&directory), ["0", "0"]);
    }

    #[test]
    fn the_nodes_cpus_are_not_changed() {
        assert_eq!(OnlineCpus::of_node().set_online_count(1).unwrap_err().kind(), FailureKind::Unsupported);
    }
}
