//! Reads and writes `DIR/jail/state.json`, the last state of the pod, which is written atomically on each change so that
//! exit codes outlive the pod process; and `DIR/last.json`, the daemon's own record of how a pod ended whose process is
//! gone.

use crate::spec::PodSpec;
use nacelle_base::files::{FileError, write_whole};
use nacelle_base::jailed::{JailedDir, JailedFile};
use nacelle_base::{Classify, FailureKind, PodId};
use nacelle_proto::pod as proto;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// The file of the pod process, in [`crate::jail_dir`].
const FILE: JailedFile = JailedFile::new("state.json");
/// The file of the daemon, in its part of the run directory.
const FINAL_FILE: &str = "last.json";
/// The maximum size in bytes of a file that is read.
const MAX_BYTES: u64 = 1 << 20;

/// The exit code of a container whose end was not observed.
pub const LOST: u32 = 255;
/// The exit code of processes that the kernel killed: 128 + SIGKILL.
pub const KILLED: u32 = 137;
/// The failure message of a VM that the node's OOM killer ended.
pub const OUT_OF_MEMORY: &str = "the node's OOM killer ended the VM: the memory of its cgroup, or of the node, ran out";

/// The last state of a pod.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedPodState {
    /// The id of the PodSandbox.
    pub id: PodId,
    /// The phase of the pod.
    pub phase: Phase,
    /// The reason why the VM ended by itself; empty otherwise.
    #[serde(default)]
    pub failure: String,
    /// The kernel release (`uname -r`) of the guest; empty until it is known.
    #[serde(default)]
    pub kernel_release: String,
    /// The containers, in the order of their creation.
    #[serde(default)]
    pub containers: Vec<SavedContainerState>,
}

/// The phase of a pod: see docs/contributor/state-machines.md.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// The VM boots or waits for its configuration.
    Booting,
    /// Containers can be created.
    Ready,
    /// The pod is being stopped.
    Stopping,
    /// The VM has ended.
    Stopped,
}

/// The phase of a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ContainerPhase {
    /// The container is created and not started.
    Created,
    /// The container is started.
    Running,
    /// The container has exited.
    Exited,
}

/// The last state of one container. Times are nanoseconds since 1970; 0 if the event has not happened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedContainerState {
    /// The id of the container.
    pub id: String,
    /// The phase of the container.
    pub phase: ContainerPhase,
    /// The time of its creation.
    pub created_at: i64,
    /// The time of its start.
    #[serde(default)]
    pub started_at: i64,
    /// The time of its end.
    #[serde(default)]
    pub finished_at: i64,
    /// The exit code, in phase Exited.
    #[serde(default)]
    pub exit_code: u32,
    /// The OOM killer ended the container.
    #[serde(default)]
    pub oom_killed: bool,
    /// The reason of a failed start or a loss; empty otherwise.
    #[serde(default)]
    pub message: String,
    /// The user id, resolved in the image.
    #[serde(default)]
    pub uid: u32,
    /// The primary group id.
    #[serde(default)]
    pub gid: u32,
    /// The supplementary group ids.
    #[serde(default)]
    pub supplemental_groups: Vec<u32>,
}

/// The record cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum SavedStateError {
    /// The file could not be read or written.
    #[error(transparent)]
    File(#[from] FileError),
    /// The file is not the JSON of a record, or has an unknown version.
    #[error("{} is not the saved state of a pod in a format that this version supports", path.display())]
    Format {
        /// The path of the file.
        path: PathBuf,
        /// The position and the cause.
        source: serde_json::Error,
    },
}

impl Classify for SavedStateError {
    fn kind(&self) -> FailureKind {
        FailureKind::Internal
    }
}

#[derive(Serialize, Deserialize)]
#[serde(tag = "version")]
enum Stored {
    #[serde(rename = "1")]
    V1(SavedPodState),
}

/// Reads the last record of the pod process; returns `None` if it has written none. The process may have written anything:
/// a file that is larger than [`MAX_BYTES`] or is not a record is an error.
pub fn read(dir: &Path) -> Result<Option<SavedPodState>, SavedStateError> {
    let bytes = crate::jailed(dir).read(FILE, MAX_BYTES)?;
    bytes.map(|bytes| parse(&bytes, FILE.in_jail(&crate::jail_dir(dir)))).transpose()
}

/// Reads what [`SavedPodState::write_final`] wrote; returns `None` if it was not called yet.
pub(crate) fn read_final(dir: &Path) -> Result<Option<SavedPodState>, SavedStateError> {
    let bytes = JailedDir::new(dir).read(FINAL_FILE, MAX_BYTES)?;
    bytes.map(|bytes| parse(&bytes, dir.join(FINAL_FILE))).transpose()
}

pub(crate) fn parse(bytes: &[u8], path: PathBuf) -> Result<SavedPodState, SavedStateError> {
    let Stored::V1(record) =
        nacelle_base::json::read(bytes).map_err(|source| SavedStateError::Format { path, source })?;
    Ok(record)
}

pub(crate) fn encode(record: &SavedPodState) -> Result<Vec<u8>, serde_json::Error> {
    serde_json::to_vec(&Stored::V1(record.clone()))
}

/// Records why a pod process ends before it serves its pod. Called by the pod process.
pub(crate) fn write_failed_start(dir: &Path, failure: String) -> Result<(), SavedStateError> {
    // What the pod has recorded since is more.
    let known = read(dir)?;
    let Some(spec) = PodSpec::read_if_present(dir).ok().flatten().filter(|_| known.is_none()) else { return Ok(()) };
    let record = SavedPodState { phase: Phase::Stopped, failure, ..SavedPodState::new(spec.id) };
    record.write(dir)
}

impl SavedPodState {
    /// Returns the record of a pod that has just begun.
    pub fn new(id: PodId) -> Self {
        Self {
            id,
            phase: Phase::Booting,
            failure: String::new(),
            kernel_release: String::new(),
            containers: Vec::new(),
        }
    }

    /// Writes `DIR/jail/state.json` atomically. Called by the pod process.
    pub fn write(&self, dir: &Path) -> Result<(), SavedStateError> {
        self.write_to(FILE.in_jail(&crate::jail_dir(dir)))
    }

    /// Writes `DIR/last.json` atomically: the record of a pod whose process is gone. Called by the daemon.
    pub(crate) fn write_final(&self, dir: &Path) -> Result<(), SavedStateError> {
        self.write_to(dir.join(FINAL_FILE))
    }

    fn write_to(&self, path: PathBuf) -> Result<(), SavedStateError> {
        let bytes = encode(self).map_err(|source| SavedStateError::Format { path: path.clone(), source })?;
        Ok(write_whole(&path, &bytes)?)
    }

    /// Records that the VM ended for this reason at this time: containers that still lived exit with [`LOST`].
    pub fn mark_lost(&mut self, why: &str, now: i64) {
        if self.phase != Phase::Stopped {
            self.phase = Phase::Stopped;
            self.failure = why.to_owned();
        }
        self.mark_containers_lost(why, now);
    }

    /// Changes a lost record as [`mark_oom_killed`] changes a state.
    pub(crate) fn mark_oom_killed(&mut self) {
        let containers = self.containers.iter_mut();
        set_oom_killed(&mut self.failure, containers.map(|c| (&mut c.exit_code, &mut c.oom_killed, &mut c.message)));
    }

    /// Returns whether [`Self::mark_oom_killed`] has changed this record.
    pub(crate) fn is_oom_killed(&self) -> bool {
        self.failure.starts_with(OUT_OF_MEMORY)
    }

    /// Marks the containers that still lived as lost, as [`SavedPodState::mark_lost`] does.
    pub fn mark_containers_lost(&mut self, why: &str, now: i64) {
        for container in self.containers.iter_mut().filter(|c| c.phase != ContainerPhase::Exited) {
            container.phase = ContainerPhase::Exited;
            container.exit_code = LOST;
            container.finished_at = now;
            container.message = why.to_owned();
        }
    }
}

/// Changes the state of a lost pod: the node's OOM killer ended the VM, and with it the containers that were lost.
pub fn mark_oom_killed(state: &mut proto::PodState) {
    let containers = state.containers.iter_mut();
    set_oom_killed(&mut state.failure, containers.map(|c| (&mut c.exit_code, &mut c.oom_killed, &mut c.message)));
}

fn set_oom_killed<'a>(
    failure: &mut String,
    containers: impl Iterator<Item = (&'a mut u32, &'a mut bool, &'a mut String)>,
) {
    *failure = match failure.as_str() {
        "" => OUT_OF_MEMORY.to_owned(),
        reason => format!("{OUT_OF_MEMORY} ({reason})"),
    };
    for (exit_code, oom_killed, message) in containers.filter(|(exit_code, ..)| **exit_code == LOST) {
        (*exit_code, *oom_killed) = (KILLED, true);
        OUT_OF_MEMORY.clone_into(message);
    }
}

impl From<&SavedPodState> for proto::PodState {
    fn from(record: &SavedPodState) -> Self {
        let phase = match record.phase {
            Phase::Booting => proto::Phase::Booting,
            Phase::Ready => proto::Phase::Ready,
            Phase::Stopping => proto::Phase::Stopping,
            Phase::Stopped => proto::Phase::Stopped,
        };
        proto::PodState {
            phase: phase.into(),
            failure: record.failure.clone(),
            containers: record.containers.iter().map(Into::into).collect(),
            kernel_release: record.kernel_release.clone(),
        }
    }
}

impl From<&SavedContainerState> for proto::ContainerState {
    fn from(record: &SavedContainerState) -> Self {
        let phase = match record.phase {
            ContainerPhase::Created => proto::ContainerPhase::Created,
            ContainerPhase::Running => proto::ContainerPhase::Running,
            ContainerPhase::Exited => proto::ContainerPhase::Exited,
        };
        proto::ContainerState {
            id: record.id.clone(),
            phase: phase.into(),
            created_at: record.created_at,
            started_at: record.started_at,
            finished_at: record.finished_at,
            exit_code: record.exit_code,
            oom_killed: record.oom_killed,
            message: record.message.clone(),
            uid: record.uid,
            gid: record.gid,
            supplemental_groups: record.supplemental_groups.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> SavedPodState {
        let container = |id: &str, phase| SavedContainerState {
            id: id.into(),
            phase,
            created_at: 1,
            started_at: 2,
            finished_at: 0,
            exit_code: 0,
            oom_killed: false,
            message: String::new(),
            uid: 0,
            gid: 0,
            supplemental_groups: vec![],
        };
        let mut record = SavedPodState::new(PodId::from_bytes([3; 32]));
        record.phase = Phase::Ready;
        record.containers = vec![container("a", ContainerPhase::Exited), container("b", ContainerPhase::Running)];
        record
    }

    #[test]
    fn a_saved_state_is_read_back() {
        let dir = tempfile::tempdir().unwrap();
        crate::create_jail(dir.path()).unwrap();
        assert_eq!((read(dir.path()).unwrap(), read_final(dir.path()).unwrap()), (None, None));
        sample().write(dir.path()).unwrap();
        assert_eq!((read(dir.path()).unwrap(), read_final(dir.path()).unwrap()), (Some(sample()), None));
        sample().write_final(dir.path()).unwrap();
        assert_eq!(read_final(dir.path()).unwrap(), Some(sample()));
    }

    #[test]
    fn version_1_stays_readable_and_others_are_rejected() {
        let dir = tempfile::tempdir().unwrap();
        let golden = format!(
            r#"{{"version":"1","id":"{}","phase":"ready","containers":[{{"id":"c","phase":"exited","created_at":5,"exit_code":3}}]}}"#,
            "03".repeat(32)
        );
        crate::create_jail(dir.path()).unwrap();
        let file = FILE.in_jail(&crate::jail_dir(dir.path()));
        std::fs::write(&file, &golden).unwrap();
        assert_eq!(read(dir.path()).unwrap().unwrap().containers[0].exit_code, 3);
        std::fs::write(&file, golden.replace(r#""1""#, r#""9""#)).unwrap();
        assert!(matches!(read(dir.path()), Err(SavedStateError::Format { .. })));
    }

    #[tokio::test]
    async fn an_end_by_the_oom_killer_is_known_when_the_cgroup_is_gone() {
        let dir = tempfile::tempdir().unwrap();
        let mut record = sample();
        record.mark_lost("the pod process died of signal 9", 9);
        record.write_final(dir.path()).unwrap();
        assert!(!crate::client::was_oom_killed(dir.path()).await);
        record.mark_oom_killed();
        record.write_final(dir.path()).unwrap();
        assert!(crate::client::was_oom_killed(dir.path()).await);
    }

    #[test]
    fn a_lost_pod_keeps_the_exit_codes_that_were_recorded() {
        let mut record = sample();
        record.mark_lost("gone", 9);
        assert_eq!((record.phase, record.failure.as_str()), (Phase::Stopped, "gone"));
        assert_eq!((record.containers[0].exit_code, record.containers[1].exit_code), (0, LOST));
        assert_eq!(record.containers[1].finished_at, 9);
        let before = record.clone();
        record.mark_lost("again", 10);
        assert_eq!(record, before);
    }

    #[test]
    fn the_state_of_an_oom_killed_pod_says_so() {
        let mut record = sample();
        record.mark_lost("the pod process died of signal 9", 9);
        let mut state = proto::PodState::from(&record);
        record.mark_oom_killed();
        mark_oom_killed(&mut state);
        assert_eq!(proto::PodState::from(&record), state);
        assert_eq!(record.failure, format!("{OUT_OF_MEMORY} (the pod process died of signal 9)"));
        let [seen, lost] = &record.containers[..] else { panic!("{record:?}") };
        assert_eq!((seen.exit_code, seen.oom_killed, seen.message.as_str()), (0, false, ""));
        assert_eq!((lost.exit_code, lost.oom_killed, lost.message.as_str()), (KILLED, true, OUT_OF_MEMORY));
    }
}
