//! Cleans up after a pod process: kills what still runs, releases its resources, and determines how the pod ended.

use super::spawn::{ExitStatusWatch, exit_statuses};
use super::{ClientError, wait_for_exit};
use crate::identity::{self, IdentityError};
use crate::record::{self, SavedPodState, SavedStateError};
use crate::share;
use crate::spec::PodSpec;
use nacelle_base::Chain;
use nacelle_base::files::remove_tree_if_there;
use nacelle_base::pidfd::pidfd_signal;
use nacelle_base::task::run_blocking_or_panic;
use nacelle_model::process::{PodProcess, ProcessIdentity};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::ExitStatus;
use std::time::Duration;
use tokio::time::timeout;

/// The limit from the end of a process until it is reaped.
const REAP_LIMIT: Duration = Duration::from_secs(5);

/// Kills what remains of a pod process and returns its last record, with every container that still lived marked as lost.
/// Kills exactly the process that was started, if it still runs, and the processes in its cgroup; both are known from the
/// store (`stored`) and from the daemon's part of the run directory, either of which may be missing. Nothing that the
/// process has written decides what is killed or removed. The call may be repeated. Returns `None` if the process recorded
/// nothing usable.
pub async fn clean_up(dir: &Path, stored: Option<&PodProcess>) -> Result<Option<SavedPodState>, ClientError> {
    let end = exit_statuses().get(dir).cloned();
    let from = dir.to_owned();
    let (spec, recorded) = run_blocking_or_panic(move || (recorded_spec(&from), recorded_processes(&from))).await;
    let [pod, file_server] = recorded;
    let mut end_result = Ok(());
    for identity in without_duplicates([stored.map(|stored| stored.identity.clone()), pod, file_server]) {
        end_result = end_result.and(kill_process(&identity).await);
    }
    end_result?;
    let cgroup = spec.as_ref().and_then(|spec| spec.jail.as_ref()?.cgroup.clone());
    let cgroups = without_duplicates([stored.and_then(|stored| stored.cgroup.clone()), cgroup]);
    // How the pod ended is recorded before the cgroup is gone, which has the count: `was_oom_killed` knows it at any time.
    let counted = cgroups.clone();
    let count = move || counted.iter().any(|cgroup| nacelle_jail::cgroup::oom_kills(cgroup) > 0);
    let oom_killed = run_blocking_or_panic(count).await;
    let from = dir.to_owned();
    let mut last = run_blocking_or_panic(move || last_state(&from)).await;
    if let Some(last) = &mut last {
        let before = last.clone();
        last.mark_lost(&describe_death(end).await, crate::now_nanos());
        if *last != before {
            if oom_killed {
                last.mark_oom_killed();
            }
            let (record, to) = (last.clone(), dir.to_owned());
            if let Err(error) = run_blocking_or_panic(move || record.write_final(&to)).await {
                // The caller has the record. A full file system is freed when the directory is removed.
                tracing::warn!(dir = %dir.display(), "cannot record how the pod ended: {}", Chain(&error));
            }
        }
    }
    // From here on each step is tried whether or not the earlier ones failed. After a failure the caller repeats the whole cleanup.
    let mut first_error = Ok(());
    for cgroup in cgroups {
        // Other processes in the cgroup may still be exiting, or run on.
        first_error = first_error.and(run_blocking_or_panic(move || nacelle_jail::cgroup::remove(&cgroup)).await);
    }
    // No process writes there any more. A scratch disk has a name only until the VM has opened it.
    let scratch = spec.as_ref().map(PodSpec::scratch_file);
    for scratch in without_duplicates([stored.map(|stored| stored.scratch.clone()), scratch]) {
        first_error = first_error.and(run_blocking_or_panic(move || remove_tree_if_there(&scratch)).await);
    }
    let from = dir.to_owned();
    // The sockets are those of the pod process and of its virtio devices.
    if let Err(error) = run_blocking_or_panic(move || crate::jailed(&from).remove_sockets()).await {
        // They are removed with the directory. The process may have created more entries than are read.
        tracing::warn!(dir = %dir.display(), "cannot remove the sockets of a pod process; they stay until its run directory is removed: {}", Chain(&error));
    }
    first_error?;
    exit_statuses().remove(dir);
    Ok(last)
}

/// Returns the specification with which the pod process was started, or `None` if no process was. A specification of
/// another version must not prevent the cleanup of what the store names. Blocks.
fn recorded_spec(dir: &Path) -> Option<PodSpec> {
    PodSpec::read_if_present(dir).unwrap_or_else(|error| {
        tracing::error!(dir = %dir.display(), "cannot read the specification of a pod process; cleaning up without it: {}", Chain(&error));
        None
    })
}

/// Returns the processes that the run directory names: the pod process and its file-server process. If one of the files
/// cannot be read, the process that the other names must still be killed. Blocks.
fn recorded_processes(dir: &Path) -> [Option<ProcessIdentity>; 2] {
    [identity::read(dir), share::read_identity(dir)].map(|read| {
        read.unwrap_or_else(|error| {
            tracing::error!(dir = %dir.display(), "cannot read which process belongs to a pod; cleaning up without it: {}", Chain(&error));
            None
        })
    })
}

/// Returns the daemon's own record of the pod's end if there is one, otherwise the last record of the pod process. That
/// record is untrusted: an unusable one must not prevent the cleanup.
fn last_state(dir: &Path) -> Option<SavedPodState> {
    let usable = |read: Result<Option<SavedPodState>, SavedStateError>| {
        read.unwrap_or_else(|error| {
            tracing::warn!(dir = %dir.display(), "the saved state of a pod is unusable: {}", Chain(&error));
            None
        })
    };
    usable(record::read_final(dir)).or_else(|| usable(record::read(dir)))
}

/// Kills this process, if it still runs, and waits for its end.
pub(super) async fn kill_process(identity: &ProcessIdentity) -> Result<(), ClientError> {
    let Some(pidfd) = identity::open(identity)? else { return Ok(()) };
    let failed = |what| move |source| IdentityError::Process { what, pid: identity.pid, source };
    match pidfd_signal(&pidfd, libc::SIGKILL) {
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
        sent => sent.map_err(failed("kill"))?,
    }
    Ok(wait_for_exit(pidfd).await?.map_err(failed("wait for"))?)
}

/// Returns the values that are present, without duplicates.
fn without_duplicates<T: PartialEq, const N: usize>(all: [Option<T>; N]) -> Vec<T> {
    let mut distinct_values = Vec::with_capacity(N);
    for value in all.into_iter().flatten() {
        if !distinct_values.contains(&value) {
            distinct_values.push(value);
        }
    }
    distinct_values
}

/// Returns whether the node's OOM killer has killed a process of the pod of this run directory: by the count of its cgroup, and by
/// the record of its end, which [`clean_up`] writes before it removes the cgroup.
pub async fn was_oom_killed(dir: &Path) -> bool {
    let dir = dir.to_owned();
    run_blocking_or_panic(move || {
        let cgroup = PodSpec::read(&dir).ok().and_then(|spec| spec.jail?.cgroup);
        let is_counted = cgroup.is_some_and(|cgroup| nacelle_jail::cgroup::oom_kills(&cgroup) > 0);
        is_counted || record::read_final(&dir).ok().flatten().is_some_and(|last| last.is_oom_killed())
    })
    .await
}

/// Describes how a pod process died, as far as that is known.
pub(super) async fn describe_death(end: Option<ExitStatusWatch>) -> String {
    let status = match end {
        // The process is gone; the task that reaps it is about to report.
        Some(mut end) => timeout(REAP_LIMIT, end.wait_for(Option::is_some)).await.ok().and_then(|s| *s.ok()?),
        None => None,
    };
    describe_exit(status)
}

/// Describes how a pod process ended.
pub(super) fn describe_exit(status: Option<ExitStatus>) -> String {
    match status.map(|status| (status.signal(), status.code())) {
        Some((Some(libc::SIGSYS), _)) => {
            "the pod process died of a system call that its seccomp filter forbids".to_owned()
        }
        Some((Some(signal), _)) => format!("the pod process died of signal {signal}"),
        Some((None, Some(code))) => format!("the pod process ended with exit code {code}"),
        _ => "the pod process died".to_owned(),
    }
}
