//! Ends the processes of pods of which neither a record nor a run directory is left. Their command lines name the run directories
//! that they had. No other daemon of this mount namespace has pods there, but one in a container of the node may use the same path.
//! Its processes are seen here too, so processes of pods of another PID namespace than this daemon's are left alone.

use super::cleanup::kill_process;
use crate::identity;
use nacelle_base::Chain;
use nacelle_base::task::run_blocking_or_panic;
use nacelle_model::process::ProcessIdentity;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

/// The programs of pods, and the argument before the path of the run directory or of one in it.
const PROGRAMS: [(&str, &[u8]); 2] = [("nacelle-pod", b"--dir"), ("nacelle-agent", b"--host")];

/// The processes of a pod.
#[derive(Debug, Default)]
struct UnrecordedPod {
    processes: Vec<ProcessIdentity>,
    cgroups: BTreeSet<PathBuf>,
}

/// Ends all processes of pods whose run directory would be in `pods` and is not one of `known`, with their cgroups. Failures are
/// logged.
pub async fn end_unrecorded(pods: &Path, known: &BTreeSet<PathBuf>) {
    let (parent, known) = (pods.to_owned(), known.clone());
    let mut found = run_blocking_or_panic(move || find_unrecorded(&parent)).await;
    found.retain(|dir, _| !known.contains(dir));
    for (dir, UnrecordedPod { processes, cgroups }) in &found {
        let count = processes.len();
        tracing::warn!(dir = %dir.display(), count, ?cgroups, "ending the processes of a pod without a record and a run directory");
        for process in processes {
            if let Err(error) = kill_process(process).await {
                tracing::error!(dir = %dir.display(), pid = process.pid, "cannot end a process of a pod without a record: {}", Chain(&error));
            }
        }
        for cgroup in cgroups.clone() {
            let removed = run_blocking_or_panic(move || nacelle_jail::cgroup::remove(&cgroup)).await;
            if let Err(error) = removed {
                tracing::error!(dir = %dir.display(), "cannot end the control group of a pod without a record: {}", Chain(&error));
            }
        }
    }
}

/// Returns the pods of which processes run, by their run directories. Blocks.
fn find_unrecorded(pods: &Path) -> BTreeMap<PathBuf, UnrecordedPod> {
    let mut found = BTreeMap::<PathBuf, UnrecordedPod>::new();
    let entries = match std::fs::read_dir("/proc") {
        Ok(entries) => entries,
        Err(error) => {
            tracing::error!(%error, "cannot list the processes of pods without a record");
            return found;
        }
    };
    for pid in entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok()) {
        // Processes may end meanwhile. The identity is read first: if the process is another one by then, it is not killed.
        let Ok(process) = identity::of_pid(pid) else { continue };
        let Ok(line) = std::fs::read(format!("/proc/{pid}/cmdline")) else { continue };
        let Some(dir) = run_directory(&line, pods) else { continue };
        let Ok(status) = std::fs::read_to_string(format!("/proc/{pid}/status")) else { continue };
        if !is_of_own_pid_namespace(&status) {
            continue;
        }
        let pod = found.entry(dir.clone()).or_default();
        let groups = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
        pod.cgroups.extend(pod_cgroups(&groups, &dir));
        pod.processes.push(process);
    }
    found
}

/// Returns the run directory that the command line of a pod's process names, if it is in `pods`.
fn run_directory(line: &[u8], pods: &Path) -> Option<PathBuf> {
    let mut arguments = line.split(|byte| *byte == 0);
    let program = Path::new(OsStr::from_bytes(arguments.next()?)).file_name()?;
    let flag = arguments.next()?;
    PROGRAMS.iter().find(|known| known.0 == program && known.1 == flag)?;
    let path = Path::new(OsStr::from_bytes(arguments.next()?));
    match path.strip_prefix(pods).ok()?.components().next()? {
        Component::Normal(name) => Some(pods.join(name)),
        _ => None,
    }
}

/// Returns whether the pod of a process belongs to this PID namespace, given the text of its /proc/PID/status: the process is in this
/// namespace, or is process 1 of a namespace below it, as the jailed agent of a pod is.
fn is_of_own_pid_namespace(status: &str) -> bool {
    let ids = status.lines().find_map(|line| line.strip_prefix("NSpid:")).unwrap_or_default();
    matches!(ids.split_ascii_whitespace().collect::<Vec<_>>()[..], [_] | [_, "1"])
}

/// Returns the cgroups of the pod of this run directory among those of a process, given the text of its /proc/PID/cgroup: the
/// ancestors that are named after the pod's id, `ID`, `nacelle-ID` or `nacelle-ID.scope`.
fn pod_cgroups(groups: &str, dir: &Path) -> BTreeSet<PathBuf> {
    let short = dir.file_name().and_then(OsStr::to_str).unwrap_or_default();
    let is_pods = |name: &OsStr| {
        let Some(name) = name.to_str() else { return false };
        let id = name.strip_suffix(".scope").unwrap_or(name);
        let id = id.strip_prefix("nacelle-").unwrap_or(id);
        id.len() == 64 && id.bytes().all(|byte| byte.is_ascii_hexdigit()) && id.get(..13) == Some(short)
    };
    let paths = groups.lines().filter_map(|line| line.splitn(3, ':').nth(2)).map(Path::new);
    let of = |path: &Path| path.ancestors().find(|group| group.file_name().is_some_and(is_pods)).map(Path::to_owned);
    paths.filter_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::unix::process::{CommandExt, ExitStatusExt};

    #[test]
    fn only_programs_of_pods_with_a_run_directory_there_are_found() {
        let pods = Path::new("/run/nacelle/pods");
        let of = |words: &[&str]| run_directory((words.join("\0") + "\0").as_bytes(), pods);
        let dir = Some(PathBuf::from("/run/nacelle/pods/0123456789abc"));
        assert_eq!(of(&["/usr/bin/nacelle-pod", "--dir", "/run/nacelle/pods/0123456789abc"]), dir);
        let jail = "/run/nacelle/pods/0123456789abc/jail";
        assert_eq!(of(&["/usr/bin/nacelle-agent", "--host", jail, "/var/lib/nacelle/scratch"]), dir);
        for other in [
            &["/usr/bin/nacelle-pod", "--dir", "/run/other/pods/0123456789abc"][..],
            &["/usr/bin/nacelle-pod", "--dir", "/run/nacelle/pods"],
            &["/usr/bin/nacelle-pod", "--dir", "/run/nacelle/pods/.."],
            &["/usr/bin/nacelle-pod", "--template", "/run/nacelle/pods/0123456789abc"],
            &["/usr/bin/nacelle-pod", "--dir"],
            &["tail", "-f", "/run/nacelle/pods/0123456789abc/jail/console.log"],
            &["rm", "--dir", "/run/nacelle/pods/0123456789abc"],
            &[""],
        ] {
            assert_eq!(of(other), None, "{other:?}");
        }
    }

    #[test]
    fn only_cgroups_that_are_named_after_the_pod_are_its_own() {
        let id = "0123456789abc".to_owned() + &"0".repeat(51);
        let dir = Path::new("/run/nacelle/pods/0123456789abc");
        let of =
            |text: String| pod_cgroups(&text, dir).iter().map(|path| path.display().to_string()).collect::<Vec<_>>();
        for group in [
            format!("/nacelle/{id}"),
            format!("/kubepods/pod1/nacelle-{id}"),
            format!("/nacelle.slice/nacelle-{id}.scope"),
        ] {
            assert_eq!(of(format!("0::{group}\n")), [group.as_str()]);
            assert_eq!(
                of(format!("4:memory:{group}/process\n3:cpu,cpuacct:{group}\n1:name=systemd:/\n")),
                [group.as_str()]
            );
        }
        let other = "f".repeat(64);
        for group in
            ["/".to_owned(), "/kubepods/pod1".into(), format!("/nacelle/{other}"), "/nacelle-0123456789abc".into()]
        {
            assert_eq!(of(format!("0::{group}\n")), Vec::<String>::new(), "{group}");
        }
    }

    #[test]
    fn only_processes_of_pods_of_this_pid_namespace_are_found() {
        let of = |ids: &str| is_of_own_pid_namespace(&format!("Name:\tnacelle-pod\nNSpid:\t{ids}\nNSpgid:\t7\n"));
        assert!(of("812") && of("812\t1"));
        // Of a daemon in a container.
        assert!(!of("812\t30") && !of("812\t31\t1") && !of(""));
        assert!(is_of_own_pid_namespace(&std::fs::read_to_string("/proc/self/status").unwrap()));
    }

    #[tokio::test]
    async fn a_process_without_a_record_is_ended_and_one_with_a_record_is_not() {
        let pods = tempfile::tempdir().unwrap();
        // echo waits for ever: the pipe of its output is full.
        let (_reader, mut full) = std::io::pipe().unwrap();
        full.write_all(&vec![0; 64 << 10]).unwrap();
        let start = |dir: &Path| {
            let mut command = std::process::Command::new("/bin/echo");
            command.arg0("nacelle-pod").arg("--dir").arg(dir).stdout(full.try_clone().unwrap()).spawn().unwrap()
        };
        let (lost, known) = (pods.path().join("0123456789abc"), pods.path().join("1123456789abc"));
        let (mut ended, mut spared) = (start(&lost), start(&known));
        end_unrecorded(pods.path(), &BTreeSet::from([known])).await;
        assert_eq!(ended.wait().unwrap().signal(), Some(libc::SIGKILL));
        assert!(spared.try_wait().unwrap().is_none());
        spared.kill().unwrap();
        spared.wait().unwrap();
    }
}
