//! Sets what the node's OOM killer thinks of the processes of a pod: they do not inherit the daemon's protection, and those of a VM
//! are as dear as its containers.

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
/// A score below that of the process takes CAP_SYS_RESOURCE (proc_pid_oom_score_adj(5)), which a node that is a container itself lacks:
/// it then becomes as low as this process may make it, 0 at best, and that is logged.
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
    for _ in 0..MAX_ROUNDS {
        let members = list_members(directory)?;
        let new: Vec<_> = members.into_iter().filter(|(pid, _)| !done.contains(pid)).collect();
        if new.is_empty() {
            break;
        }
        for (pid, group) in new {
            set_score_of(pid, &group, proc, adjustment)?;
            done.insert(pid);
        }
    }
    Ok(())
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

fn set_score_of(pid: i32, group: &Path, proc: &Path, adjustment: i32) -> Result<(), FileError> {
    // The directory is that of one process, also if its pid is reused: it is opened before the members are read again.
    let Ok(process) = File::open(proc.join(pid.to_string())) else { return Ok(()) };
    let members = fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default();
    if !members.lines().any(|line| line.trim().parse() == Ok(pid)) {
        return Ok(());
    }
    let path = PathBuf::from(format!("/proc/self/fd/{}/oom_score_adj", process.as_raw_fd()));
    let is_gone =
        |error: &io::Error| error.raw_os_error() == Some(libc::ESRCH) || error.kind() == io::ErrorKind::NotFound;
    let written = match fs::write(&path, adjustment.to_string()) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            tracing::warn!(pid, adjustment, %error, "cannot protect a process of a VM from the OOM killer as its containers");
            fs::write(&path, adjustment.max(0).to_string())
        }
        other => other,
    };
    match written {
        Err(error) if is_gone(&error) || error.kind() == io::ErrorKind::PermissionDenied => Ok(()),
        other => other.map_err(at("write", &proc.join(pid.to_string()).join("oom_score_adj"))),
    }
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
        set_score_of(5, &group, &proc, 7).unwrap();
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
        // Lower than this process may make it, on a node that is a container.
        set_score_in(group.path(), Path::new("/proc"), -1).unwrap();
        assert!(["-1\n", "0\n"].contains(&score().as_str()), "{}", score());
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
