//! Reads and limits the memory of the cgroup that all pods of a test are in, which stands for that of kubelet's pods.

use nacelle_e2e::TestNode;
use nacelle_e2e::census::cgroup_parent;
use nacelle_e2e::run::eventually;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// By how much [`PodsCgroup::exceed`] limits the memory below what is in use, in bytes.
const STEP: u64 = 4 << 20;

/// The cgroup of all pods of a node.
pub struct PodsCgroup(PathBuf);

impl PodsCgroup {
    /// Finds the cgroup, which exists while there are pods. `None` where the node does not limit memory by cgroup v2.
    pub fn find(node: &TestNode) -> Option<PodsCgroup> {
        let parent = cgroup_parent(node.directory());
        let directory = Path::new("/sys/fs/cgroup").join(parent.trim_start_matches('/'));
        directory.join("memory.max").exists().then_some(PodsCgroup(directory))
    }

    /// Returns how many bytes are in use.
    pub fn used(&self) -> u64 {
        let text = fs::read_to_string(self.0.join("memory.current")).expect("the cgroup has pods");
        text.trim().parse().expect("a number of bytes")
    }

    /// Returns a value of `memory.stat`, in bytes.
    pub fn statistic(&self, name: &str) -> u64 {
        self.value("memory.stat", name)
    }

    /// Sets the limit, in bytes.
    pub fn limit(&self, bytes: u64) {
        fs::write(self.0.join("memory.max"), bytes.to_string()).expect("the test may limit its own cgroup");
    }

    /// Removes the limit.
    pub fn lift_limit(&self) {
        fs::write(self.0.join("memory.max"), "max").expect("the test may limit its own cgroup");
    }

    /// Returns how many processes of the cgroup and those below it the OOM killer has ended.
    pub fn kills(&self) -> u64 {
        self.value("memory.events", "oom_kill")
    }

    /// Returns how often the memory reached the limit, so that the kernel had to reclaim some.
    pub fn limit_reached(&self) -> u64 {
        self.value("memory.events", "max")
    }

    fn value(&self, file: &str, name: &str) -> u64 {
        let text = fs::read_to_string(self.0.join(file)).expect("the cgroup has pods");
        let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        value.and_then(|value| value.parse().ok()).unwrap_or_else(|| panic!("{file} has no number {name}: {text}"))
    }

    /// Lowers the limit below what is in use until the OOM killer has ended a process, and removes it.
    ///
    /// The write lasts until enough memory is free, and while it lasts the kernel may choose another process: it does not see the one
    /// that it has ended between the end of its last thread and that of its memory. So another process writes and is killed at once.
    pub fn exceed(&self) {
        let before = self.kills();
        eventually("the OOM killer ends a process", || {
            let limit = self.used().saturating_sub(STEP).to_string();
            let script = r#"echo "$0" >"$1""#;
            let mut writer = Command::new("sh")
                .args(["-c", script, &limit])
                .arg(self.0.join("memory.max"))
                .spawn()
                .expect("a shell");
            while self.kills() == before && writer.try_wait().expect("a child").is_none() {
                std::thread::sleep(Duration::from_millis(1));
            }
            writer.kill().and_then(|()| writer.wait()).expect("the child ends");
            (self.kills() > before).then_some(())
        });
        self.lift_limit();
    }
}
