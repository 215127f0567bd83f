//! Owns: on which processors of the node a pod's machine runs: the threads of the pod process and of the processes that it
//! has started.
//! Threads: the work, reads of /proc, is on threads of the pool.

use crate::identity::{Identity, IdentityError};
use nacelle_base::{Classify, Kind};
use nix::errno::Errno;
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;
use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Threads of one pod that are looked at: more than a machine can have.
const MOST: usize = 16_384;

/// Why a machine does not run where it should.
#[derive(Debug, thiserror::Error)]
pub enum ProcessorsError {
    /// The pod process is gone.
    #[error("the pod in {} has no process", dir.display())]
    Gone {
        /// The pod's run directory.
        dir: PathBuf,
    },
    /// It could not be found.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// The kernel does not take a number.
    #[error("{number} is too large for the number of a processor")]
    Number {
        /// As asked.
        number: u32,
    },
    /// The kernel does not let it.
    #[error("cannot have thread {thread} run on processors {processors:?}")]
    Set {
        /// Its id.
        thread: i32,
        /// As asked.
        processors: BTreeSet<u32>,
        /// Why.
        source: Errno,
    },
    /// More threads than any machine has.
    #[error("process {pid} has made more than {MOST} threads meanwhile")]
    TooMany {
        /// The pod process.
        pid: i32,
    },
    /// The work was given up.
    #[error("the processors were given up")]
    GivenUp {
        /// Why.
        source: io::Error,
    },
}

impl Classify for ProcessorsError {
    fn kind(&self) -> Kind {
        match self {
            ProcessorsError::Gone { .. } => Kind::Unavailable,
            ProcessorsError::Identity(source) => source.kind(),
            ProcessorsError::Number { .. } => Kind::Invalid,
            // None of them is for the pod's control group, or on.
            ProcessorsError::Set { source: Errno::EINVAL, .. } => Kind::Conflict,
            ProcessorsError::Set { .. } | ProcessorsError::TooMany { .. } | ProcessorsError::GivenUp { .. } => {
                Kind::Internal
            }
        }
    }
}

/// Has the machine of the pod that is served from `dir` run on these processors only; none: on all that the caller may
/// use. What it starts later runs there, too.
pub async fn confine(dir: &Path, processors: BTreeSet<u32>) -> Result<(), ProcessorsError> {
    let dir = dir.to_owned();
    let done = tokio::task::spawn_blocking(move || {
        let process = Identity::read(&dir)?.filter(|process| process.is_alive().unwrap_or(false));
        let pid = process.ok_or(ProcessorsError::Gone { dir })?.pid;
        set_all(pid, &processors)
    });
    done.await.map_err(|error| ProcessorsError::GivenUp { source: io::Error::other(error) })?
}

fn set_all(pid: i32, processors: &BTreeSet<u32>) -> Result<(), ProcessorsError> {
    let set = set_of(processors)?;
    let mut done = BTreeSet::new();
    // A thread that is made meanwhile has its maker's: until there is none that is not known.
    loop {
        let new: Vec<i32> = threads(pid).into_iter().filter(|thread| !done.contains(thread)).collect();
        if new.is_empty() {
            return Ok(());
        }
        if done.len() + new.len() > MOST {
            return Err(ProcessorsError::TooMany { pid });
        }
        for thread in new {
            match sched_setaffinity(Pid::from_raw(thread), &set) {
                Ok(()) | Err(Errno::ESRCH) => {}
                // A thread of the kernel's in the process, which keeps its own.
                Err(Errno::EINVAL) if thread != pid => {}
                Err(source) => {
                    return Err(ProcessorsError::Set { thread, processors: processors.clone(), source });
                }
            }
            done.insert(thread);
        }
    }
}

fn set_of(processors: &BTreeSet<u32>) -> Result<CpuSet, ProcessorsError> {
    if processors.is_empty() {
        let own = sched_getaffinity(Pid::from_raw(0));
        return own.map_err(|source| ProcessorsError::Set { thread: 0, processors: BTreeSet::new(), source });
    }
    let mut set = CpuSet::new();
    for &number in processors {
        let index = usize::try_from(number).unwrap_or(usize::MAX);
        set.set(index).map_err(|_too_large| ProcessorsError::Number { number })?;
    }
    Ok(set)
}

/// The threads of a process and of its descendants.
fn threads(pid: i32) -> Vec<i32> {
    let (mut pids, mut threads, mut at) = (vec![pid], Vec::new(), 0);
    while let Some(next) = pids.get(at).copied().filter(|_| threads.len() <= MOST) {
        at += 1;
        let Ok(entries) = fs::read_dir(format!("/proc/{next}/task")) else { continue };
        for thread in entries.flatten() {
            threads.extend(thread.file_name().to_str().and_then(|name| name.parse::<i32>().ok()));
            let children = fs::read_to_string(thread.path().join("children")).unwrap_or_default();
            pids.extend(children.split_whitespace().filter_map(|pid| pid.parse::<i32>().ok()));
        }
    }
    threads
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    fn allowed(set: &CpuSet) -> BTreeSet<u32> {
        (0..1024).filter(|number| set.is_set(usize::try_from(*number).unwrap()).unwrap()).collect()
    }

    #[test]
    fn a_process_and_what_it_has_started_run_where_they_should() {
        let all = allowed(&sched_getaffinity(Pid::from_raw(0)).unwrap());
        let one: BTreeSet<u32> = all.iter().copied().take(1).collect();
        let mut shell = Command::new("/bin/sh")
            .args(["-c", "sleep 600 & read line; kill $!"])
            .stdin(Stdio::piped())
            .spawn()
            .unwrap();
        let pid = i32::try_from(shell.id()).unwrap();
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
        while threads(pid).len() < 2 {
            assert!(std::time::Instant::now() < deadline, "the shell starts nothing");
            std::thread::yield_now();
        }
        for (asked, found) in [(&one, &one), (&BTreeSet::new(), &all)] {
            set_all(pid, asked).unwrap();
            for thread in threads(pid) {
                assert_eq!(allowed(&sched_getaffinity(Pid::from_raw(thread)).unwrap()), *found);
            }
        }
        for (asked, kind) in [(1023, Kind::Conflict), (1024, Kind::Invalid), (u32::MAX, Kind::Invalid)] {
            if !all.contains(&asked) {
                assert_eq!(set_all(pid, &[asked].into()).unwrap_err().kind(), kind, "{asked}");
            }
        }
        drop(shell.stdin.take());
        shell.wait().unwrap();
        // What is gone has nothing left to set.
        set_all(pid, &one).unwrap();
    }
}
