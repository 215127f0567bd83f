//! Implements `nacelle check --jail POD`: reports the rights of a running pod's process, and fails if it has more than its jail leaves.
//! All of it comes from /proc and from the daemon's part of the run directory.

use super::ExitStatus;
use super::exit::CommandError;
use super::finding::{CheckReport, Finding, Severity, finding};
use super::output::OutputArgument;
use crate::config::Config;
use anyhow::{Context, bail};
use nacelle_pod::identity;
use nacelle_pod::spec::{PodSpec, Seccomp};
use nacelle_pod::{ExpectedJail, PathAccess, expected_jail};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// The sets of capabilities in /proc/PID/status.
const CAPABILITY_SETS: [&str; 5] = ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"];
/// The names of all kinds of namespaces in /proc/PID/ns, in the order of the report.
const NAMESPACES: [&str; 7] = ["mnt", "net", "ipc", "uts", "cgroup", "pid", "user"];

/// Reports on the pod whose id begins with `pod`. The exit code is 1 if the process has more than its jail should leave.
pub(super) fn check_jail(config: &Config, pod: &str, output: OutputArgument) -> anyhow::Result<ExitStatus> {
    let directory = find_run_directory(&config.paths.pods(), pod)?;
    let spec = PodSpec::read(&directory).context("cannot read the specification of the pod")?;
    let process = identity::read(&directory)?.filter(|process| identity::is_alive(process).unwrap_or(false));
    let Some(process) = process else { bail!("pod {pod} has no running process") };
    let Some(expected) = expected_jail(&spec, &directory) else { bail!("pod {pod} was started without a jail") };
    let process = ProcessState::read(Path::new("/proc"), process.pid).context("cannot inspect the pod process")?;
    let (good, bad) =
        ("the pod process has what its jail leaves it", "the pod process has more than its jail should leave it");
    CheckReport::new(process.compare(&expected), good, bad).print(output)
}

/// Returns the only run directory of a pod whose id has this prefix. The directories are named after the first digits of the ids.
fn find_run_directory(pods: &Path, pod: &str) -> anyhow::Result<PathBuf> {
    let entries = fs::read_dir(pods).with_context(|| format!("cannot list {}", pods.display()))?;
    let fits = |name: &str| !pod.is_empty() && (name.starts_with(pod) || pod.starts_with(name));
    let found: Vec<_> = entries.flatten().filter(|entry| entry.file_name().to_str().is_some_and(fits)).collect();
    match found.as_slice() {
        [only] => Ok(only.path()),
        [] => Err(CommandError::NotFound { kind: "running pod", name: pod.to_owned() }.into()),
        _ => bail!("{pod} is a prefix of the ids of several pods; use more digits"),
    }
}

/// What a process has, according to /proc.
struct ProcessState {
    /// The fields of the status file of each thread.
    threads: Vec<BTreeMap<String, String>>,
    /// The kinds of namespaces that it shares with this process.
    shared: BTreeSet<&'static str>,
    /// The hard limits, up to which a process may raise the soft ones, by the names of /proc/PID/limits.
    limits: BTreeMap<String, String>,
    /// The mount points, and their options.
    mounts: BTreeMap<PathBuf, String>,
}

impl ProcessState {
    fn read(proc: &Path, pid: i32) -> std::io::Result<ProcessState> {
        let directory = proc.join(pid.to_string());
        let mut threads = Vec::new();
        let mut shared = BTreeSet::new();
        for task in fs::read_dir(directory.join("task"))? {
            let task = task?.path();
            // A thread that has ended meanwhile is skipped.
            let Ok(text) = fs::read_to_string(task.join("status")) else { continue };
            threads.push(parse_status(&text));
            for name in NAMESPACES {
                let of = |process: &Path| fs::read_link(process.join("ns").join(name));
                if of(&task).is_ok_and(|namespace| of(&proc.join("self")).is_ok_and(|own| own == namespace)) {
                    shared.insert(name);
                }
            }
        }
        let limits = parse_limits(&fs::read_to_string(directory.join("limits"))?);
        let mounts = parse_mounts(&fs::read_to_string(directory.join("mountinfo"))?);
        Ok(ProcessState { threads, shared, limits, mounts })
    }

    fn compare(&self, expected: &ExpectedJail) -> Vec<Finding> {
        vec![
            self.compare_user(expected),
            self.compare_rights(),
            self.compare_filters(expected),
            self.compare_namespaces(expected),
            self.compare_limits(expected),
            self.compare_files(expected),
        ]
    }

    /// Returns whether all threads have this value of a field, and all of them have the field.
    fn all_threads(&self, field: &str, is_right: impl Fn(&str) -> bool) -> bool {
        !self.threads.is_empty()
            && self.threads.iter().all(|thread| thread.get(field).is_some_and(|text| is_right(text)))
    }

    fn compare_user(&self, expected: &ExpectedJail) -> Finding {
        let user = expected.user.unwrap_or(0).to_string();
        let has_only = |field| self.all_threads(field, |ids| ids.split_whitespace().all(|id| id == user));
        // Root keeps the groups of the daemon.
        let has_groups = expected.user.is_some() && !self.all_threads("Groups", str::is_empty);
        match (has_only("Uid") && has_only("Gid") && !has_groups, expected.user) {
            (false, _) => finding(Severity::Fail, "user", format!("a thread has another user or group than {user}")),
            (true, Some(user)) => finding(Severity::Ok, "user", format!("user and group {user}, no other groups")),
            (true, None) => finding(
                Severity::Ok,
                "user",
                "root, as intended for engine host, by jail.user_count, or without idmapped mounts",
            ),
        }
    }

    fn compare_rights(&self) -> Finding {
        let set =
            CAPABILITY_SETS.iter().find(|set| !self.all_threads(set, |bits| bits.trim_start_matches('0').is_empty()));
        match set {
            Some(set) => finding(Severity::Fail, "rights", format!("a thread has capabilities ({set})")),
            None if !self.all_threads("NoNewPrivs", |value| value == "1") => {
                finding(Severity::Fail, "rights", "a thread does not have no_new_privs")
            }
            None => finding(Severity::Ok, "rights", "no capabilities, no_new_privs"),
        }
    }

    fn compare_filters(&self, expected: &ExpectedJail) -> Finding {
        match (expected.seccomp, self.all_threads("Seccomp", |mode| mode == "2")) {
            (Seccomp::Kill, true) => finding(Severity::Ok, "filter", "each thread has system call filters"),
            (Seccomp::Log, true) => finding(Severity::Note, "filter", "the filters only log: jail.seccomp is \"log\""),
            (Seccomp::Off, _) => finding(Severity::Note, "filter", "no filters: jail.seccomp is \"off\""),
            (Seccomp::Kill | Seccomp::Log, false) => {
                finding(Severity::Fail, "filter", "a thread has no system call filter")
            }
        }
    }

    fn compare_namespaces(&self, expected: &ExpectedJail) -> Finding {
        let excess: Vec<_> =
            self.shared.iter().filter(|name| !expected.shared_namespaces.contains(name)).copied().collect();
        if !excess.is_empty() {
            return finding(
                Severity::Fail,
                "spaces",
                format!("it shares namespaces of the node: {}", excess.join(" ")),
            );
        }
        let (shared, own): (Vec<_>, Vec<_>) = NAMESPACES.into_iter().partition(|name| self.shared.contains(name));
        finding(Severity::Ok, "spaces", format!("own {}; the node's {}", own.join(" "), shared.join(" ")))
    }

    fn compare_limits(&self, expected: &ExpectedJail) -> Finding {
        let mut words = Vec::new();
        for (name, word, most) in [
            ("Max core file size", "core", Some(0)),
            ("Max locked memory", "memlock", Some(expected.limits.locked_bytes)),
            ("Max open files", "nofile", expected.limits.open_files),
            ("Max processes", "nproc", expected.limits.threads),
        ] {
            let Some(most) = most else { continue };
            let Some(value) = self.limits.get(name) else {
                return finding(Severity::Fail, "limits", format!("/proc shows no limit \"{name}\""));
            };
            if value.parse::<u64>().map_or(true, |value| value > most) {
                return finding(Severity::Fail, "limits", format!("{name} is {value}, above {most}"));
            }
            words.push(format!("{word} {value}"));
        }
        finding(Severity::Ok, "limits", words.join(", "))
    }

    fn compare_files(&self, expected: &ExpectedJail) -> Finding {
        let root = Path::new("/");
        let places: Vec<_> = self.mounts.iter().filter(|(place, _)| *place != root).collect();
        let has = |options: &str, wanted: &str| options.split(',').any(|option| option == wanted);
        for (place, options) in &places {
            let Some(access) = expected.places.get(*place) else {
                return finding(Severity::Fail, "files", format!("it sees {}", place.display()));
            };
            let may_write = matches!(access, PathAccess::Write | PathAccess::Take | PathAccess::Device);
            if has(options, "rw") && !may_write {
                return finding(Severity::Fail, "files", format!("{} is mounted writable", place.display()));
            }
        }
        if self.mounts.get(root).is_none_or(|options| !has(options, "ro")) {
            return finding(Severity::Fail, "files", "its root directory is writable");
        }
        if let Some((place, _)) = self.mounts.iter().find(|(_, options)| !has(options, "nosuid")) {
            return finding(Severity::Fail, "files", format!("set-user-ID programs work in {}", place.display()));
        }
        let writable = |options: &str| if has(options, "rw") { " (rw)" } else { "" };
        let words: Vec<_> =
            places.iter().map(|(place, options)| format!("{}{}", place.display(), writable(options))).collect();
        finding(Severity::Ok, "files", words.join(" "))
    }
}

fn parse_status(text: &str) -> BTreeMap<String, String> {
    text.lines().filter_map(|line| line.split_once(':')).map(|(k, v)| (k.to_owned(), v.trim().to_owned())).collect()
}

/// Parses /proc/PID/limits: the name and the hard limit of each line, whose columns are separated by two or more spaces.
fn parse_limits(text: &str) -> BTreeMap<String, String> {
    let columns =
        |line: &str| line.split("  ").map(str::trim).filter(|word| !word.is_empty()).map(str::to_owned).collect();
    let pair = |columns: Vec<String>| Some((columns.first()?.clone(), columns.get(2)?.clone()));
    text.lines().skip(1).filter_map(|line| pair(columns(line))).collect()
}

/// Parses /proc/PID/mountinfo (proc(5)): the mount point and the options of each mount.
fn parse_mounts(text: &str) -> BTreeMap<PathBuf, String> {
    let pair = |line: &str| {
        let mut fields = line.split(' ').skip(4);
        Some((PathBuf::from(fields.next()?), fields.next()?.to_owned()))
    };
    text.lines().filter_map(pair).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacelle_pod::ResourceLimits;

    const USER: u32 = 1_879_048_200;

    fn jailed_process() -> ProcessState {
        let status = format!(
            "Name:\tnacelle-pod\nUid:\t{USER}\t{USER}\t{USER}\t{USER}\nGid:\t{USER}\t{USER}\t{USER}\t{USER}\nGroups:\t \n\
             CapInh:\t0000000000000000\nCapPrm:\t0000000000000000\nCapEff:\t0000000000000000\nCapBnd:\t0000000000000000\n\
             CapAmb:\t0000000000000000\nNoNewPrivs:\t1\nSeccomp:\t2\n"
        );
        let limits = "Limit                     Soft Limit           Hard Limit           Units     \n\
                      Max core file size        0                    0                    bytes     \n\
                      Max processes             4096                 4096                 processes \n\
                      Max open files            1024                 262144               files     \n\
                      Max locked memory         0                    0                    bytes     \n";
        let mounts = "90 89 0:55 / / ro,nosuid,nodev,noexec,relatime - tmpfs nacelle rw,size=1024k\n\
                      91 90 0:25 /a/jail /run/a/jail rw,nosuid,nodev,noexec - tmpfs tmpfs rw\n\
                      92 90 0:55 /dev/kvm /dev/kvm rw,nosuid,noexec - tmpfs nacelle rw\n";
        ProcessState {
            threads: vec![parse_status(&status); 2],
            shared: BTreeSet::from(["user"]),
            limits: parse_limits(limits),
            mounts: parse_mounts(mounts),
        }
    }

    fn expected() -> ExpectedJail {
        let limits = ResourceLimits { locked_bytes: 0, open_files: Some(262_144), threads: Some(4096) };
        ExpectedJail {
            user: Some(USER),
            seccomp: Seccomp::Kill,
            limits,
            shared_namespaces: &["user"],
            places: BTreeMap::from([
                ("/run/a/jail".into(), PathAccess::Write),
                ("/dev/kvm".into(), PathAccess::Device),
                ("/dev/vhost-net".into(), PathAccess::Device),
                ("/usr".into(), PathAccess::Execute),
            ]),
        }
    }

    #[test]
    fn a_jailed_process_is_as_expected() {
        let found = jailed_process().compare(&expected());
        let lines: Vec<_> = found.iter().map(ToString::to_string).collect();
        assert_eq!(
            lines,
            [
                "ok   user     user and group 1879048200, no other groups",
                "ok   rights   no capabilities, no_new_privs",
                "ok   filter   each thread has system call filters",
                "ok   spaces   own mnt net ipc uts cgroup pid; the node's user",
                "ok   limits   core 0, memlock 0, nofile 262144, nproc 4096",
                "ok   files    /dev/kvm (rw) /run/a/jail (rw)",
            ]
        );
    }

    #[test]
    fn anything_more_fails() {
        let fails = |change: &dyn Fn(&mut ProcessState)| {
            let mut process = jailed_process();
            change(&mut process);
            let failed = process.compare(&expected()).into_iter().filter(|found| found.severity == Severity::Fail);
            failed.map(|found| found.subject).collect::<Vec<_>>()
        };
        let second_thread = |field: &'static str, value: &'static str| {
            fails(&move |process| {
                process.threads[1].insert(field.to_owned(), value.to_owned());
            })
        };
        assert_eq!(second_thread("Uid", "1879048200\t0\t1879048200\t1879048200"), ["user"]);
        assert_eq!(second_thread("Groups", "0"), ["user"]);
        assert_eq!(second_thread("CapBnd", "0000000000000001"), ["rights"]);
        assert_eq!(second_thread("NoNewPrivs", "0"), ["rights"]);
        assert_eq!(second_thread("Seccomp", "0"), ["filter"]);
        assert_eq!(fails(&|process| process.threads.clear()), ["user", "rights", "filter"]);
        assert_eq!(fails(&|process| process.shared.extend(["net"])), ["spaces"]);
        let limit = |name: &'static str, value: &'static str| {
            fails(&move |process| {
                process.limits.insert(name.to_owned(), value.to_owned());
            })
        };
        assert_eq!(limit("Max core file size", "1"), ["limits"]);
        assert_eq!(limit("Max open files", "unlimited"), ["limits"]);
        assert_eq!(fails(&|process| process.limits.clear()), ["limits"]);
        let mount = |place: &'static str, options: &'static str| {
            fails(&move |process| {
                process.mounts.insert(place.into(), options.to_owned());
            })
        };
        assert_eq!(mount("/etc", "ro,nosuid"), ["files"]);
        assert_eq!(mount("/usr", "rw,nosuid"), ["files"]);
        assert!(mount("/usr", "ro,nosuid").is_empty());
        assert_eq!(mount("/", "rw,nosuid"), ["files"]);
        assert_eq!(mount("/run/a/jail", "rw,nodev"), ["files"]);
    }

    #[test]
    fn a_pod_is_found_by_a_prefix_of_its_id() {
        let pods = tempfile::tempdir().unwrap();
        for name in ["0123456789abc", "0123456789abd"] {
            fs::create_dir(pods.path().join(name)).unwrap();
        }
        let find = |pod: &str| find_run_directory(pods.path(), pod).map(|path| path.file_name().unwrap().to_owned());
        assert_eq!(find("0123456789abc").unwrap(), "0123456789abc");
        assert_eq!(find("0123456789abdeffff").unwrap(), "0123456789abd");
        assert!(find("0123").unwrap_err().to_string().contains("several pods"));
        assert!(find("ff").unwrap_err().to_string().contains("does not exist") && find("").is_err());
    }
}
