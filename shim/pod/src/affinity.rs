//! Sets the CPU affinity of a pod: of all threads of the pod process and of its child processes, and of single vCPU threads
//! if each vCPU is pinned to a CPU of its own. The reads of /proc run on the blocking pool.

use crate::identity::{self, IdentityError};
use nacelle_base::task::{TaskError, run_blocking};
use nacelle_base::{Classify, FailureKind};
use nix::errno::Errno;
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// The maximum number of threads of a pod, more than any VM has.
const MAX_THREADS: usize = 16_384;

/// The CPU affinity of a pod cannot be set.
#[derive(Debug, thiserror::Error)]
pub enum AffinityError {
    /// The pod process is gone.
    #[error("cannot set the CPU affinity of the pod in {}: it has no process", dir.display())]
    Gone {
        /// The pod's run directory.
        dir: PathBuf,
    },
    /// The pod process cannot be identified.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// The kernel does not support a CPU number.
    #[error("CPU number {number} is invalid: the kernel supports no number so large")]
    Number {
        /// The requested number.
        number: u32,
    },
    /// The kernel rejects the affinity of a thread.
    #[error("cannot set the CPU affinity of thread {thread} to {cpus:?}")]
    Set {
        /// The thread's id.
        thread: i32,
        /// The requested CPUs.
        cpus: BTreeSet<u32>,
        /// The cause.
        source: Errno,
    },
    /// Some vCPU threads cannot be found.
    #[error("cannot pin the vCPUs: only {found} of {vcpus} vCPU threads were found")]
    MissingVcpuThreads {
        /// The number of vCPU threads that were found.
        found: usize,
        /// The number of vCPUs of the VM.
        vcpus: u32,
    },
    /// The pod has too many threads.
    #[error("cannot set the CPU affinity of process {pid}: it has more than {MAX_THREADS} threads")]
    TooManyThreads {
        /// The pid of the pod process.
        pid: i32,
    },
    /// The work on the blocking pool did not finish.
    #[error(transparent)]
    Task(#[from] TaskError),
}

impl Classify for AffinityError {
    fn kind(&self) -> FailureKind {
        match self {
            AffinityError::Gone { .. } => FailureKind::Unavailable,
            AffinityError::Identity(source) => source.kind(),
            AffinityError::Number { .. } => FailureKind::Invalid,
            // None of the CPUs is online and in the pod's cgroup.
            AffinityError::Set { source: Errno::EINVAL, .. } => FailureKind::Conflict,
            AffinityError::Set { .. }
            | AffinityError::MissingVcpuThreads { .. }
            | AffinityError::TooManyThreads { .. } => FailureKind::Internal,
            AffinityError::Task(error) => error.kind(),
        }
    }
}

/// Restricts the processes of the pod in `dir` to these CPUs; an empty set means all that the caller may use. Processes
/// that they start later inherit the affinity. With `pinned`, the number of the VM's vCPUs, the nth vCPU is pinned to the
/// nth of these CPUs; where vCPUs are emulated, one thread runs them all, on all of these CPUs.
pub async fn set_pod_affinity(dir: &Path, cpus: BTreeSet<u32>, pinned: Option<u32>) -> Result<(), AffinityError> {
    let dir = dir.to_owned();
    run_blocking("set the CPU affinity of the pod process", move || {
        let process = identity::read(&dir)?.filter(|process| identity::is_alive(process).unwrap_or(false));
        let pid = process.ok_or(AffinityError::Gone { dir })?.pid;
        set_all_threads(pid, &cpus)?;
        pinned.map_or(Ok(()), |vcpus| pin_vcpus(&threads(pid), &cpus, vcpus))
    })
    .await?
}

fn set_all_threads(pid: i32, cpus: &BTreeSet<u32>) -> Result<(), AffinityError> {
    let set = cpu_set(cpus)?;
    let mut done = BTreeSet::new();
    // A new thread inherits the affinity of its creator, so this repeats until no new thread is found.
    loop {
        let new: Vec<i32> = threads(pid).into_iter().filter(|thread| !done.contains(thread)).collect();
        if new.is_empty() {
            return Ok(());
        }
        if done.len() + new.len() > MAX_THREADS {
            return Err(AffinityError::TooManyThreads { pid });
        }
        for thread in new {
            match sched_setaffinity(Pid::from_raw(thread), &set) {
                Ok(()) | Err(Errno::ESRCH) => {}
                // A kernel thread of the process, whose affinity cannot be changed.
                Err(Errno::EINVAL) if thread != pid => {}
                Err(source) => {
                    return Err(AffinityError::Set { thread, cpus: cpus.clone(), source });
                }
            }
            done.insert(thread);
        }
    }
}

/// The vCPUs that a thread runs.
#[derive(Debug, PartialEq, Eq)]
enum VcpuThread {
    /// One vCPU, counted from 0.
    One(u32),
    /// All vCPUs, one after the other.
    All,
}

/// Recognizes vCPU threads by the names that engine `kvm` and QEMU (`debug-threads`) give them. A compromised process may
/// name its threads as it likes, but gains no CPUs that the pod does not have.
fn vcpus_of_thread(name: &str) -> Option<VcpuThread> {
    if name == "ALL CPUs/TCG" {
        return Some(VcpuThread::All);
    }
    let of_qemu =
        || name.strip_prefix("CPU ")?.strip_suffix("/KVM").or(name.strip_prefix("CPU ")?.strip_suffix("/TCG"));
    name.strip_prefix("vcpu").or_else(of_qemu)?.parse().ok().map(VcpuThread::One)
}

fn pin_vcpus(threads: &[i32], cpus: &BTreeSet<u32>, vcpus: u32) -> Result<(), AffinityError> {
    let mut pinned = BTreeSet::new();
    let assigned: BTreeMap<u32, u32> = (0..vcpus).zip(cpus.iter().copied()).collect();
    for &thread in threads {
        // A thread that is gone has no name.
        let name = fs::read_to_string(format!("/proc/{thread}/comm")).unwrap_or_default();
        let number = match vcpus_of_thread(name.trim_end()) {
            Some(VcpuThread::All) => return Ok(()),
            Some(VcpuThread::One(number)) => number,
            None => continue,
        };
        let Some(cpu) = assigned.get(&number) else { continue };
        let one = BTreeSet::from([*cpu]);
        match sched_setaffinity(Pid::from_raw(thread), &cpu_set(&one)?) {
            Ok(()) => drop(pinned.insert(number)),
            Err(Errno::ESRCH) => {}
            Err(source) => return Err(AffinityError::Set { thread, cpus: one, source }),
        }
    }
    match pinned.len() {
        found if u32::try_from(found) == Ok(vcpus) => Ok(()),
        found => Err(AffinityError::MissingVcpuThreads { found, vcpus }),
    }
}

fn cpu_set(cpus: &BTreeSet<u32>) -> Result<CpuSet, AffinityError> {
    if cpus.is_empty() {
        let current = sched_getaffinity(Pid::from_raw(0));
        return current.map_err(|source| AffinityError::Set { thread: 0, cpus: BTreeSet::new(), source });
    }
    let mut set = CpuSet::new();
    for &number in cpus {
        let index = usize::try_from(number).unwrap_or(usize::MAX);
        set.set(index).map_err(|_too_large| AffinityError::Number { number })?;
    }
    Ok(set)
}

/// Returns the threads of a process and of its descendants.
fn threads(pid: i32) -> Vec<i32> {
    let (mut pids, mut threads, mut at) = (vec![pid], Vec::new(), 0);
    while let Some(next) = pids.get(at).copied().filter(|_| threads.len() <= MAX_THREADS) {
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
    fn a_process_and_its_children_get_the_affinity() {
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
        for (requested, expected) in [(&one, &one), (&BTreeSet::new(), &all)] {
            set_all_threads(pid, requested).unwrap();
            for thread in threads(pid) {
                assert_eq!(allowed(&sched_getaffinity(Pid::from_raw(thread)).unwrap()), *expected);
            }
        }
        for (number, kind) in
            [(1023, FailureKind::Conflict), (1024, FailureKind::Invalid), (u32::MAX, FailureKind::Invalid)]
        {
            if !all.contains(&number) {
                assert_eq!(set_all_threads(pid, &[number].into()).unwrap_err().kind(), kind, "{number}");
            }
        }
        drop(shell.stdin.take());
        shell.wait().unwrap();
        // Threads that are gone are skipped.
        set_all_threads(pid, &one).unwrap();
    }

    #[test]
    fn vcpu_threads_are_recognized_by_name() {
        for (name, expected) in [
            ("vcpu0", Some(VcpuThread::One(0))),
            ("vcpu63", Some(VcpuThread::One(63))),
            ("CPU 3/KVM", Some(VcpuThread::One(3))),
            ("CPU 12/TCG", Some(VcpuThread::One(12))),
            ("ALL CPUs/TCG", Some(VcpuThread::All)),
            ("CPU 3", None),
            ("vcpu", None),
            ("vcpu-1", None),
            ("vcpu99999999999", None),
            ("kvm-warden", None),
            ("", None),
        ] {
            assert_eq!(vcpus_of_thread(name), expected, "{name}");
        }
    }

    #[test]
    fn each_vcpu_is_pinned_to_a_cpu_of_its_own() {
        let all = allowed(&sched_getaffinity(Pid::from_raw(0)).unwrap());
        let (thread_id, started_thread) = std::sync::mpsc::channel();
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let ended = std::sync::Arc::new(std::sync::Mutex::new(ended));
        let start = |name: &str| {
            let (thread_id, ended) = (thread_id.clone(), std::sync::Arc::clone(&ended));
            let run = move || {
                thread_id.send(nix::unistd::gettid().as_raw()).unwrap();
                drop(ended.lock().map(|ended| ended.recv()));
            };
            let handle = std::thread::Builder::new().name(name.to_owned()).spawn(run).unwrap();
            (started_thread.recv().unwrap(), handle)
        };
        let of = |thread: i32| allowed(&sched_getaffinity(Pid::from_raw(thread)).unwrap());
        let vcpus = u32::try_from(all.len().min(2)).unwrap();
        let mut started: Vec<_> = (0..vcpus).map(|n| start(&format!("vcpu{n}"))).collect();
        started.push(start("worker"));
        let threads: Vec<i32> = started.iter().map(|(thread, _)| *thread).collect();
        pin_vcpus(&threads, &all, vcpus).unwrap();
        for (thread, cpu) in threads.iter().zip(&all).take(vcpus as usize) {
            assert_eq!(of(*thread), [*cpu].into());
        }
        assert_eq!(of(threads[vcpus as usize]), all, "other threads are not pinned");
        let error = pin_vcpus(&threads, &all, vcpus + 1).unwrap_err();
        let message = format!("cannot pin the vCPUs: only {vcpus} of {} vCPU threads were found", vcpus + 1);
        assert_eq!((error.kind(), error.to_string()), (FailureKind::Internal, message));
        // With emulation one thread runs all vCPUs.
        started.push(start("ALL CPUs/TCG"));
        let thread = started.last().unwrap().0;
        pin_vcpus(&[thread], &all, 64).unwrap();
        assert_eq!(of(thread), all);
        drop(end);
        started.into_iter().for_each(|(_, handle)| handle.join().unwrap());
    }
}
