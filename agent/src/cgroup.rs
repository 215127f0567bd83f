//! Owns: what the agent itself does with a container's cgroup: killing, counting OOM kills, removing. Limits are
//! libcontainer's.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::paths;

/// The cgroup of all containers.
pub fn pod() -> PathBuf {
    Path::new(paths::CGROUP).join(paths::POD_CGROUP.trim_start_matches('/'))
}

/// The cgroup of a container.
pub fn path(id: &str) -> PathBuf {
    pod().join(id)
}

/// The number after a word in a file of lines "word number"; 0 if it is not there.
pub fn figure(text: &str, word: &str) -> u64 {
    let line = text.lines().find_map(|line| line.strip_prefix(word)?.strip_prefix(' '));
    line.and_then(|number| number.trim().parse().ok()).unwrap_or(0)
}

/// Whose memory had run out when the kernel's OOM killer took a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutOfMemory {
    /// The container's, or a group's of its own below it.
    Container,
    /// The guest's: no limit was reached.
    Guest,
}

/// Why the kernel's OOM killer took processes of it; none: it took none. A limit that is reached counts as `oom` in its group and
/// those above it, kills as `oom_kill` also where there was none (cgroup v2, `memory.events`).
pub fn out_of_memory(cgroup: &Path) -> Option<OutOfMemory> {
    let events = fs::read_to_string(cgroup.join("memory.events")).unwrap_or_default();
    match (figure(&events, "oom_kill"), figure(&events, "oom")) {
        (0, _) => None,
        (_, 0) => Some(OutOfMemory::Guest),
        _ => Some(OutOfMemory::Container),
    }
}

/// Are there processes in it or below it?
pub fn populated(cgroup: &Path) -> bool {
    fs::read_to_string(cgroup.join("cgroup.events")).is_ok_and(|text| figure(&text, "populated") != 0)
}

/// The cgroup of a process, a path in the file system, if it is below this one.
pub fn of_process(pid: i32, cgroup: &Path) -> Option<String> {
    below(&fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?, cgroup)
}

fn below(text: &str, cgroup: &Path) -> Option<String> {
    let path = text.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let path = Path::new(paths::CGROUP).join(path);
    let plain = path.components().all(|part| !matches!(part, std::path::Component::ParentDir));
    (plain && path != cgroup && path.starts_with(cgroup)).then(|| path.display().to_string())
}

/// Cgroups whose processes do not run until this is dropped.
#[derive(Debug, Default)]
pub struct Frozen(Vec<PathBuf>);

impl Frozen {
    /// Freezes these; waits at most `limit` until all their processes stand still. One that is gone needs none.
    pub async fn new(cgroups: Vec<PathBuf>, limit: Duration) -> io::Result<Frozen> {
        let mut frozen = Frozen::default();
        for cgroup in cgroups {
            match fs::write(cgroup.join("cgroup.freeze"), "1") {
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                other => other?,
            }
            frozen.0.push(cgroup);
        }
        let deadline = Instant::now() + limit;
        for cgroup in &frozen.0 {
            // What cannot be read any more has no processes.
            while fs::read_to_string(cgroup.join("cgroup.events")).is_ok_and(|text| figure(&text, "frozen") == 0) {
                if Instant::now() >= deadline {
                    return Err(io::ErrorKind::TimedOut.into());
                }
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        }
        Ok(frozen)
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        for cgroup in &self.0 {
            match fs::write(cgroup.join("cgroup.freeze"), "0") {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    tracing::error!(cgroup = %cgroup.display(), %error, "cannot let a container run on");
                }
                _ => {}
            }
        }
    }
}

/// Kills every process in it and below it.
pub fn kill(cgroup: &Path) -> io::Result<()> {
    match fs::write(cgroup.join("cgroup.kill"), "1") {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// The processes in it and below it.
pub fn processes(cgroup: &Path) -> io::Result<Vec<i32>> {
    let mut all = Vec::new();
    let mut folders = vec![cgroup.to_owned()];
    while let Some(folder) = folders.pop() {
        let text = match fs::read_to_string(folder.join("cgroup.procs")) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            other => other?,
        };
        all.extend(text.lines().filter_map(|line| line.parse::<i32>().ok()).filter(|pid| *pid > 0));
        folders.extend(children(&folder)?);
    }
    Ok(all)
}

/// Kills what is in it and removes it; waits at most `limit` for the processes to be gone. Blocks.
pub fn clear(cgroup: &Path, limit: Duration) -> io::Result<()> {
    kill(cgroup)?;
    let deadline = Instant::now() + limit;
    while populated(cgroup) && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(2));
        kill(cgroup)?;
    }
    remove(cgroup)
}

/// The groups below it.
pub fn children(cgroup: &Path) -> io::Result<Vec<PathBuf>> {
    let mut folders = Vec::new();
    for entry in fs::read_dir(cgroup)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            folders.push(entry.path());
        }
    }
    Ok(folders)
}

/// Removes it and what a container made below it; it must have no processes. One that is not there is no failure.
pub fn remove(cgroup: &Path) -> io::Result<()> {
    let mut order = vec![cgroup.to_owned()];
    let mut at = 0;
    while let Some(folder) = order.get(at).cloned() {
        match children(&folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            other => order.extend(other?),
        }
        at += 1;
    }
    for folder in order.iter().rev() {
        match fs::remove_dir(folder) {
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
    fn figures_are_found_by_their_whole_word() {
        let text = "oom 5\noom_kill 3\noom_kill_other 9\npopulated 1\n";
        assert_eq!((figure(text, "oom_kill"), figure(text, "oom"), figure(text, "none")), (3, 5, 0));
    }

    #[test]
    fn memory_runs_out_in_a_container_or_in_the_guest() {
        let cgroup = tempfile::tempdir().unwrap();
        assert_eq!(out_of_memory(cgroup.path()), None);
        for (events, why) in [
            ("max 3\noom 0\noom_kill 0\n", None),
            ("max 3\noom 1\noom_kill 0\n", None),
            ("max 9\noom 1\noom_kill 2\n", Some(OutOfMemory::Container)),
            ("max 0\noom 0\noom_kill 1\n", Some(OutOfMemory::Guest)),
        ] {
            fs::write(cgroup.path().join("memory.events"), events).unwrap();
            assert_eq!(out_of_memory(cgroup.path()), why, "{events}");
        }
    }

    #[test]
    fn a_process_is_followed_only_below_its_container() {
        let c1 = path("c1");
        assert_eq!(below("0::/pod/c1/init\n", &c1).as_deref(), Some("/sys/fs/cgroup/pod/c1/init"));
        for other in ["0::/pod/c1\n", "0::/pod/c11/init\n", "0::/agent\n", "0::/pod/c1/../../agent\n", "0::/../x", ""] {
            assert_eq!(below(other, &c1), None, "{other}");
        }
    }

    #[test]
    fn folders_go_from_the_deepest() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("c");
        fs::create_dir_all(root.join("a/b")).unwrap();
        fs::create_dir_all(root.join("d")).unwrap();
        fs::write(folder.path().join("keep"), "").unwrap();
        remove(&root).unwrap();
        remove(&root).unwrap();
        assert!(!root.exists());
        assert!(folder.path().join("keep").exists());
    }

    #[test]
    fn processes_of_all_levels_are_listed() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("below")).unwrap();
        fs::write(folder.path().join("cgroup.procs"), "3\n4\n").unwrap();
        fs::write(folder.path().join("below/cgroup.procs"), "5\n0\nx\n").unwrap();
        assert_eq!(processes(folder.path()).unwrap(), [3, 4, 5]);
        assert!(!populated(folder.path()));
        kill(&folder.path().join("none")).unwrap();
        clear(&folder.path().join("none"), Duration::ZERO).unwrap();
    }
}
