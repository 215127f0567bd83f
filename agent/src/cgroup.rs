//! Kills, freezes and removes the cgroup of a container, and reads its events. libcontainer sets the limits.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::paths;

/// Returns the cgroup of all containers.
pub fn pod_path() -> PathBuf {
    Path::new(paths::CGROUP).join(paths::POD_CGROUP.trim_start_matches('/'))
}

/// Returns the cgroup of a container.
pub fn container_path(id: &str) -> PathBuf {
    pod_path().join(id)
}

/// Returns the cgroup of all processes that run in the guest by request and not in a container. They are not in the cgroup of the
/// containers, whose limit on processes may be the reason for the request.
pub fn guest_shells_path() -> PathBuf {
    Path::new(paths::CGROUP).join("guest-shells")
}

/// Returns the cgroup of the processes in the guest that have their programs from this container.
pub fn container_shells_path(id: &str) -> PathBuf {
    guest_shells_path().join(id)
}

/// Returns the number after a word in a file of lines "word number"; 0 if the word is missing.
pub fn read_figure(text: &str, word: &str) -> u64 {
    let line = text.lines().find_map(|line| line.strip_prefix(word)?.strip_prefix(' '));
    line.and_then(|number| number.trim().parse().ok()).unwrap_or(0)
}

/// The memory that had run out when the OOM killer killed a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutOfMemory {
    /// The limit of the container, or of a cgroup that it made, was reached.
    Container,
    /// No limit was reached: the guest had no more memory.
    Guest,
}

/// Returns why the OOM killer killed processes of a cgroup, or `None` if it killed none. `memory.events` of cgroup v2 counts a limit
/// that is reached as `oom`, and each kill as `oom_kill`, also where no limit was reached.
pub fn oom_kill_cause(cgroup: &Path) -> Option<OutOfMemory> {
    let events = fs::read_to_string(cgroup.join("memory.events")).unwrap_or_default();
    match (read_figure(&events, "oom_kill"), read_figure(&events, "oom")) {
        (0, _) => None,
        (_, 0) => Some(OutOfMemory::Guest),
        _ => Some(OutOfMemory::Container),
    }
}

/// Whether there are processes in a cgroup or below it.
pub fn is_populated(cgroup: &Path) -> bool {
    fs::read_to_string(cgroup.join("cgroup.events")).is_ok_and(|text| read_figure(&text, "populated") != 0)
}

/// Returns the cgroup of a process, as a path in the file system, if it is below `cgroup` and not `cgroup` itself.
pub fn cgroup_of_process(pid: i32, cgroup: &Path) -> Option<String> {
    parse_cgroup_below(&fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?, cgroup)
}

fn parse_cgroup_below(text: &str, cgroup: &Path) -> Option<String> {
    let path = text.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let path = Path::new(paths::CGROUP).join(path);
    let plain = path.components().all(|part| !matches!(part, std::path::Component::ParentDir));
    (plain && path != cgroup && path.starts_with(cgroup)).then(|| path.display().to_string())
}

/// Cgroups whose processes are frozen until this is dropped.
#[derive(Debug, Default)]
pub struct FrozenCgroups(Vec<PathBuf>);

impl FrozenCgroups {
    /// Freezes cgroups, and waits at most `limit` until all their processes are frozen. Skips cgroups that do not exist.
    pub async fn freeze(cgroups: Vec<PathBuf>, limit: Duration) -> io::Result<FrozenCgroups> {
        let mut frozen = FrozenCgroups::default();
        for cgroup in cgroups {
            match fs::write(cgroup.join("cgroup.freeze"), "1") {
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                other => other?,
            }
            frozen.0.push(cgroup);
        }
        let deadline = Instant::now() + limit;
        for cgroup in &frozen.0 {
            // A cgroup whose events cannot be read was removed: it has no processes.
            while fs::read_to_string(cgroup.join("cgroup.events")).is_ok_and(|text| read_figure(&text, "frozen") == 0) {
                if Instant::now() >= deadline {
                    return Err(io::ErrorKind::TimedOut.into());
                }
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        }
        Ok(frozen)
    }
}

impl Drop for FrozenCgroups {
    fn drop(&mut self) {
        for cgroup in &self.0 {
            match fs::write(cgroup.join("cgroup.freeze"), "0") {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    tracing::error!(cgroup = %cgroup.display(), %error, "cannot thaw a container");
                }
                _ => {}
            }
        }
    }
}

/// Kills every process in a cgroup and below it. Succeeds if the cgroup does not exist.
pub fn kill_processes(cgroup: &Path) -> io::Result<()> {
    match fs::write(cgroup.join("cgroup.kill"), "1") {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// Returns the PIDs of the processes in a cgroup and below it. Cgroups that are removed meanwhile have none.
pub fn list_processes(cgroup: &Path) -> io::Result<Vec<i32>> {
    let mut all = Vec::new();
    let mut directories = vec![cgroup.to_owned()];
    while let Some(directory) = directories.pop() {
        let text = match fs::read_to_string(directory.join("cgroup.procs")) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            other => other?,
        };
        all.extend(text.lines().filter_map(|line| line.parse::<i32>().ok()).filter(|pid| *pid > 0));
        directories.extend(list_children(&directory)?);
    }
    Ok(all)
}

/// Kills the processes of a cgroup, waits at most `limit` until they have ended, and removes the cgroup. Blocks.
pub fn kill_and_remove(cgroup: &Path, limit: Duration) -> io::Result<()> {
    kill_processes(cgroup)?;
    let deadline = Instant::now() + limit;
    while is_populated(cgroup) && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(2));
        kill_processes(cgroup)?;
    }
    remove(cgroup)
}

/// Returns the cgroups directly below a cgroup.
pub fn list_children(cgroup: &Path) -> io::Result<Vec<PathBuf>> {
    let mut directories = Vec::new();
    for entry in fs::read_dir(cgroup)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            directories.push(entry.path());
        }
    }
    Ok(directories)
}

/// Removes a cgroup and what its container made below it. It must have no processes. Succeeds if the cgroup does not exist.
pub fn remove(cgroup: &Path) -> io::Result<()> {
    let mut order = vec![cgroup.to_owned()];
    let mut at = 0;
    while let Some(directory) = order.get(at).cloned() {
        match list_children(&directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            other => order.extend(other?),
        }
        at += 1;
    }
    for directory in order.iter().rev() {
        match fs::remove_dir(directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            other => other?,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_found_by_their_full_name() {
        let text = "oom 5\noom_kill 3\noom_kill_other 9\npopulated 1\n";
        assert_eq!((read_figure(text, "oom_kill"), read_figure(text, "oom"), read_figure(text, "none")), (3, 5, 0));
    }

    #[test]
    fn an_oom_kill_is_attributed_to_the_container_or_the_guest() {
        let cgroup = tempfile::tempdir().unwrap();
        assert_eq!(oom_kill_cause(cgroup.path()), None);
        for (events, why) in [
            ("max 3\noom 0\noom_kill 0\n", None),
            ("max 3\noom 1\noom_kill 0\n", None),
            ("max 9\noom 1\noom_kill 2\n", Some(OutOfMemory::Container)),
            ("max 0\noom 0\noom_kill 1\n", Some(OutOfMemory::Guest)),
        ] {
            fs::write(cgroup.path().join("memory.events"), events).unwrap();
            assert_eq!(oom_kill_cause(cgroup.path()), why, "{events}");
        }
    }

    #[test]
    fn a_cgroup_of_a_process_must_be_below_its_container() {
        let c1 = container_path("c1");
        assert_eq!(parse_cgroup_below("0::/pod/c1/init\n", &c1).as_deref(), Some("/sys/fs/cgroup/pod/c1/init"));
        for other in ["0::/pod/c1\n", "0::/pod/c11/init\n", "0::/agent\n", "0::/pod/c1/../../agent\n", "0::/../x", ""] {
            assert_eq!(parse_cgroup_below(other, &c1), None, "{other}");
        }
    }

    #[test]
    fn cgroups_are_removed_from_the_deepest() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path().join("c");
        fs::create_dir_all(root.join("a/b")).unwrap();
        fs::create_dir_all(root.join("d")).unwrap();
        fs::write(directory.path().join("keep"), "").unwrap();
        remove(&root).unwrap();
        remove(&root).unwrap();
        assert!(!root.exists());
        assert!(directory.path().join("keep").exists());
    }

    #[test]
    fn processes_of_all_levels_are_listed() {
        let directory = tempfile::tempdir().unwrap();
        fs::create_dir(directory.path().join("below")).unwrap();
        fs::write(directory.path().join("cgroup.procs"), "3\n4\n").unwrap();
        fs::write(directory.path().join("below/cgroup.procs"), "5\n0\nx\n").unwrap();
        assert_eq!(list_processes(directory.path()).unwrap(), [3, 4, 5]);
        assert!(!is_populated(directory.path()));
        kill_processes(&directory.path().join("none")).unwrap();
        kill_and_remove(&directory.path().join("none"), Duration::ZERO).unwrap();
    }
}
