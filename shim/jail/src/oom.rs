//! Sets the OOM score adjustment of a pod's processes: they do not inherit the daemon's, and those of a VM have that of its containers.

use crate::cgroup;
use nacelle_base::files::{FileError, at};
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

/// The OOM score adjustment of this process, which its children inherit (proc_pid_oom_score_adj(5)).
const OOM_SCORE: &str = "/proc/self/oom_score_adj";
/// How often the processes of a cgroup are listed again for those that others have started meanwhile.
const MAX_ROUNDS: u32 = 8;

/// Raises a negative OOM score adjustment of this process to 0. A higher one stays. If it cannot be changed, that is only logged.
pub fn drop_oom_protection() {
    drop_protection_in(Path::new(OOM_SCORE));
}

fn drop_protection_in(file: &Path) {
    let score = std::fs::read_to_string(file).ok().and_then(|text| text.trim().parse::<i32>().ok());
    if score.is_some_and(|score| score < 0)
        && let Err(error) = std::fs::write(file, "0")
    {
        tracing::warn!(%error, "cannot raise the OOM score of this process; the OOM killer spares it as it does the daemon");
    }
}

/// Sets the OOM score adjustment of all processes of a cgroup and its children; those that they start later inherit it. A cgroup
/// that does not exist has none. Blocks.
///
/// A score below the lowest one that a process has had takes CAP_SYS_RESOURCE (proc_pid_oom_score_adj(5)), which a node that is a
/// container itself lacks: a negative one then becomes 0, or stays as it is where even that is not allowed, and this is logged.
///
/// # Errors
/// That of reading the cgroup or writing a process's file. Processes that end meanwhile are none.
pub fn set_oom_score(group: &Path, adjustment: i32) -> Result<(), FileError> {
    match cgroup::directories(group).first() {
        Some(directory) => set_score_in(directory, Path::new("/proc"), adjustment),
        None => Ok(()),
    }
}

fn set_score_in(directory: &Path, proc: &Path, adjustment: i32) -> Result<(), FileError> {
    let mut done = BTreeSet::new();
    let mut denied = 0_usize;
    for _ in 0..MAX_ROUNDS {
        let members = list_members(directory)?;
        let new: Vec<_> = members.into_iter().filter(|(pid, _)| !done.contains(pid)).collect();
        if new.is_empty() {
            break;
        }
        for (pid, group) in new {
            denied += usize::from(set_score_of(pid, &group, proc, adjustment)? == ScoreChange::Denied);
            done.insert(pid);
        }
    }
    if denied > 0 {
        let group = directory.display();
        tracing::warn!(%group, denied, adjustment, "cannot lower the OOM scores of a VM's processes: this takes CAP_SYS_RESOURCE");
    }
    Ok(())
}

/// What became of the score of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ScoreChange {
    Done,
    /// The process is not, or no longer, in the cgroup.
    Gone,
    /// This process may not lower the score so far.
    Denied,
}

/// Returns the processes of a cgroup and its children, each with its cgroup's directory.
fn list_members(directory: &Path) -> Result<Vec<(i32, PathBuf)>, FileError> {
    let file = directory.join("cgroup.procs");
    let text = match fs::read_to_string(&file) {
        Ok(text) => text,
        // The cgroup has been removed (ENODEV while it is open).
        Err(error) if error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ENODEV) => {
            return Ok(Vec::new());
        }
        Err(error) => return Err(at("read", &file)(error)),
    };
    let pids = text.lines().filter_map(|line| line.trim().parse().ok());
    let mut members: Vec<_> = pids.map(|pid| (pid, directory.to_owned())).collect();
    for below in fs::read_dir(directory).into_iter().flatten().flatten() {
        if below.file_type().is_ok_and(|kind| kind.is_dir()) {
            members.extend(list_members(&below.path())?);
        }
    }
    Ok(members)
}

fn set_score_of(pid: i32, group: &Path, proc: &Path, adjustment: i32) -> Result<ScoreChange, FileError> {
    // The directory is that of one process, also if its pid is reused: it is opened before the members are read again.
    let Ok(process) = File::open(proc.join(pid.to_string())) else { return Ok(ScoreChange::Gone) };
    let members = fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default();
    if !members.lines().any(|line| line.trim().parse() == Ok(pid)) {
        return Ok(ScoreChange::Gone);
    }
    let path = PathBuf::from(format!("/proc/self/fd/{}/oom_score_adj", process.as_raw_fd()));
    let write = |adjustment: i32| match fs::write(&path, adjustment.to_string()) {
        Ok(()) => Ok(ScoreChange::Done),
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(ScoreChange::Denied),
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) || error.kind() == io::ErrorKind::NotFound => {
            Ok(ScoreChange::Gone)
        }
        Err(error) => Err(at("write", &proc.join(pid.to_string()).join("oom_score_adj"))(error)),
    };
    let change = write(adjustment)?;
    if change == ScoreChange::Denied && adjustment < 0 {
        write(0)?;
    }
    Ok(change)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_processes_of_a_group_get_the_score_and_no_others() {
        let root = tempfile::tempdir().unwrap();
        let (group, proc) = (root.path().join("group"), root.path().join("proc"));
        fs::create_dir_all(group.join("process")).unwrap();
        // Process 4 has ended.
        fs::write(group.join("cgroup.procs"), "2\n4\n").unwrap();
        fs::write(group.join("process/cgroup.procs"), "3\n").unwrap();
        for pid in [2, 3, 5] {
            fs::create_dir_all(proc.join(pid.to_string())).unwrap();
            fs::write(proc.join(format!("{pid}/oom_score_adj")), "0\n").unwrap();
        }
        set_score_in(&group, &proc, -997).unwrap();
        let score = |pid: i32| fs::read_to_string(proc.join(format!("{pid}/oom_score_adj"))).unwrap();
        assert_eq!([2, 3, 5].map(score), ["-997", "-997", "0\n"]);
        set_score_in(&root.path().join("gone"), &proc, 5).unwrap();
        assert_eq!(set_score_of(5, &group, &proc, 7).unwrap(), ScoreChange::Gone);
        assert_eq!(score(5), "0\n", "process 5 is not of the group");
    }

    #[test]
    fn a_real_process_gets_its_score() {
        let group = tempfile::tempdir().unwrap();
        let mut child = std::process::Command::new("sleep").arg("600").spawn().unwrap();
        fs::write(group.path().join("cgroup.procs"), child.id().to_string()).unwrap();
        let score = || fs::read_to_string(format!("/proc/{}/oom_score_adj", child.id())).unwrap();
        set_score_in(group.path(), Path::new("/proc"), 700).unwrap();
        assert_eq!(score(), "700\n");
        // A node that is a container may not allow this, nor 0 if the test itself has a higher score.
        set_score_in(group.path(), Path::new("/proc"), -1).unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let allowed = set_score_of(pid, group.path(), Path::new("/proc"), -1).unwrap() == ScoreChange::Done;
        assert_eq!(allowed, score() == "-1\n", "{}", score());
        child.kill().unwrap();
        child.wait().unwrap();
        set_score_in(group.path(), Path::new("/proc"), 1).unwrap();
    }

    #[test]
    fn only_a_negative_oom_score_is_raised() {
        let file = tempfile::NamedTempFile::new().unwrap();
        for (before, after) in [("-999\n", "0"), ("0\n", "0\n"), ("300\n", "300\n")] {
            std::fs::write(file.path(), before).unwrap();
            drop_protection_in(file.path());
            assert_eq!(std::fs::read_to_string(file.path()).unwrap(), after);
        }
    }
}
