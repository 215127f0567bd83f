//! Reads and writes `DIR/process.json`, which identifies the process that serves a pod. The daemon writes it into its own
//! part of the run directory before the process may do anything. A pid alone can be reused; pid, start time and boot id
//! together cannot.

use nacelle_base::files::{FileError, at, write_whole};
use nacelle_base::pidfd::{pid_in_proc, pidfd_open};
use nacelle_base::{Classify, FailureKind};
use nacelle_model::process::{ProcStat, ProcessIdentity};
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

/// The name of the file in the pod's run directory.
pub const FILE: &str = "process.json";

/// The process that serves a pod cannot be identified.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// The file, or /proc, could not be read or written.
    #[error(transparent)]
    File(#[from] FileError),
    /// The file is not the JSON of an identity.
    #[error("{} does not identify the process that serves the pod", path.display())]
    Format {
        /// The path of the file.
        path: PathBuf,
        /// The position and the cause.
        source: serde_json::Error,
    },
    /// /proc/PID/stat does not have the format of proc(5).
    #[error("cannot identify process {pid}: /proc/{pid}/stat has no start time")]
    Stat {
        /// The pid.
        pid: i32,
    },
    /// The process could not be opened or signalled.
    #[error("cannot {what} process {pid}")]
    Process {
        /// The action: "open", "kill", "wait for".
        what: &'static str,
        /// The pid.
        pid: i32,
        /// The cause.
        source: io::Error,
    },
}

impl Classify for IdentityError {
    fn kind(&self) -> FailureKind {
        FailureKind::Internal
    }
}

/// Identifies the calling process by the number that /proc has for it: in a PID namespace of its own, getpid(2) returns another one.
pub fn of_this_process() -> Result<ProcessIdentity, IdentityError> {
    let path = Path::new("/proc/self/stat");
    let stat = std::fs::read_to_string(path).map_err(at("read", path))?;
    let pid = stat.split(' ').next().and_then(|pid| pid.parse().ok());
    of_pid(pid.ok_or(IdentityError::Stat { pid: nix::unistd::getpid().as_raw() })?)
}

/// Identifies a child of this process that has not been waited for, by the number that /proc has for it.
pub(crate) fn of_child(child: i32) -> Result<ProcessIdentity, IdentityError> {
    let failed = |source| IdentityError::Process { what: "open", pid: child, source };
    let pidfd = pidfd_open(child).map_err(failed)?;
    of_pid(pid_in_proc(&pidfd).map_err(failed)?)
}

/// Identifies the process that has this pid now. The caller knows that the pid has not been reused, because the process is its child
/// and has not been waited for; it may have ended.
pub(crate) fn of_pid(pid: i32) -> Result<ProcessIdentity, IdentityError> {
    let start_time = stat(pid)?.ok_or(IdentityError::Stat { pid })?.start_time;
    Ok(ProcessIdentity { pid, start_time, boot_id: boot_id()? })
}

/// Reads `DIR/process.json`; returns `None` if the daemon has recorded no process yet.
pub fn read(dir: &Path) -> Result<Option<ProcessIdentity>, IdentityError> {
    read_from(&dir.join(FILE))
}

/// Reads an identity file at any path; returns `None` if there is no such file.
pub(crate) fn read_from(path: &Path) -> Result<Option<ProcessIdentity>, IdentityError> {
    match std::fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(at("read", path)(error).into()),
        Ok(bytes) => {
            let format = |source| IdentityError::Format { path: path.to_owned(), source };
            Ok(Some(nacelle_base::json::read(&bytes).map_err(format)?))
        }
    }
}

/// Writes `DIR/process.json` atomically.
pub fn write(process: &ProcessIdentity, dir: &Path) -> Result<(), IdentityError> {
    write_to(process, &dir.join(FILE))
}

/// Writes an identity file at any path atomically.
pub(crate) fn write_to(process: &ProcessIdentity, path: &Path) -> Result<(), IdentityError> {
    let format = |source| IdentityError::Format { path: path.to_owned(), source };
    Ok(write_whole(path, &serde_json::to_vec(process).map_err(format)?)?)
}

/// Returns the pid of the parent of the process that has this pid now; `None` if that process is gone.
pub(crate) fn parent(process: &ProcessIdentity) -> Result<Option<i32>, IdentityError> {
    Ok(running(process.pid)?.map(|stat| stat.parent))
}

/// Opens a pidfd of exactly this process; returns `None` if it is gone (a zombie counts as gone).
pub(crate) fn open(process: &ProcessIdentity) -> Result<Option<OwnedFd>, IdentityError> {
    if process.boot_id != boot_id()? {
        return Ok(None);
    }
    // The pidfd comes first: if the start time that is read after it matches, the pidfd refers to that process.
    let pidfd = match pidfd_open(process.pid) {
        Ok(pidfd) => pidfd,
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => return Ok(None),
        Err(source) => return Err(IdentityError::Process { what: "open", pid: process.pid, source }),
    };
    Ok(running(process.pid)?.filter(|stat| stat.start_time == process.start_time).map(|_| pidfd))
}

/// Returns whether exactly this process runs.
pub fn is_alive(process: &ProcessIdentity) -> Result<bool, IdentityError> {
    Ok(open(process)?.is_some())
}

fn boot_id() -> Result<String, IdentityError> {
    let path = Path::new("/proc/sys/kernel/random/boot_id");
    Ok(std::fs::read_to_string(path).map_err(at("read", path))?.trim().to_owned())
}

/// The fields of /proc/PID/stat that identify a process.
#[derive(Debug, PartialEq, Eq)]
struct Stat {
    state: char,
    parent: i32,
    start_time: u64,
}

/// Returns `None` for a process that is gone or a zombie.
fn running(pid: i32) -> Result<Option<Stat>, IdentityError> {
    Ok(stat(pid)?.filter(|stat| !matches!(stat.state, 'Z' | 'X')))
}

/// Returns `None` for a process that is gone.
fn stat(pid: i32) -> Result<Option<Stat>, IdentityError> {
    let path = PathBuf::from(format!("/proc/{pid}/stat"));
    match std::fs::read_to_string(&path) {
        Ok(stat) => match parse_stat(&stat) {
            Some(stat) => Ok(Some(stat)),
            None => Err(IdentityError::Stat { pid }),
        },
        Err(error) if error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESRCH) => Ok(None),
        Err(error) => Err(at("read", &path)(error).into()),
    }
}

fn parse_stat(stat: &str) -> Option<Stat> {
    let stat = ProcStat::parse(stat)?;
    Some(Stat { state: stat.field(3)?, parent: stat.field(4)?, start_time: stat.field(22)? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parentheses_in_a_command_name_do_not_shift_the_fields() {
        let rest = "S 1 1 1 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 777 9";
        assert_eq!(parse_stat(&format!("12 (a) b) {rest}")), Some(Stat { state: 'S', parent: 1, start_time: 777 }));
        assert_eq!(parse_stat("12 (a) S 1"), None);
        assert_eq!(parse_stat(""), None);
    }

    #[test]
    fn a_reused_pid_is_another_process() {
        let this = of_this_process().unwrap();
        assert!(is_alive(&this).unwrap());
        assert!(!is_alive(&ProcessIdentity { start_time: this.start_time + 1, ..this.clone() }).unwrap());
        assert!(!is_alive(&ProcessIdentity { boot_id: "another".into(), ..this.clone() }).unwrap());
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        child.wait().unwrap();
        assert!(!is_alive(&ProcessIdentity { pid, ..this.clone() }).unwrap());
        // The pid of a process that is gone may be a thread's id by now.
        let thread = || is_alive(&ProcessIdentity { pid: nix::unistd::gettid().as_raw(), ..this.clone() });
        assert!(!std::thread::scope(|scope| scope.spawn(thread).join().unwrap()).unwrap());
    }

    #[test]
    fn a_process_in_a_pid_namespace_is_known_by_the_number_of_proc() {
        const INSIDE: &str = "NACELLE_TEST_IN_PID_NAMESPACE";
        if !nix::unistd::geteuid().is_root() {
            return println!("skipped: not root");
        }
        if std::env::var_os(INSIDE).is_none() {
            let name = "identity::tests::a_process_in_a_pid_namespace_is_known_by_the_number_of_proc";
            let mut again = std::process::Command::new("unshare");
            again.args(["--pid", "--fork", "--kill-child"]).arg(std::env::current_exe().unwrap());
            let inside = again.args(["--exact", name, "--nocapture"]).env(INSIDE, "yes").output().unwrap();
            let text = String::from_utf8_lossy(&inside.stdout);
            assert!(
                inside.status.success() && text.contains("1 passed"),
                "{text}{}",
                String::from_utf8_lossy(&inside.stderr)
            );
            return;
        }
        let this = of_this_process().unwrap();
        assert_ne!(this.pid, nix::unistd::getpid().as_raw());
        let mut child = std::process::Command::new("sleep").arg("600").spawn().unwrap();
        let number = i32::try_from(child.id()).unwrap();
        let identity = of_child(number).unwrap();
        assert_ne!(identity.pid, number);
        assert_eq!(parent(&identity).unwrap(), Some(this.pid));
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(parent(&identity).unwrap(), None);
    }

    #[test]
    fn a_zombie_can_be_identified() {
        use nix::sys::wait::{Id, WaitPidFlag, waitid};
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let ended = WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT;
        waitid(Id::Pid(nix::unistd::Pid::from_raw(pid)), ended).unwrap();
        let identity = of_pid(pid).unwrap();
        assert!(!is_alive(&identity).unwrap());
        assert_eq!(parent(&identity).unwrap(), None);
        child.wait().unwrap();
    }

    #[test]
    fn an_identity_is_read_back() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(read(dir.path()).unwrap(), None);
        let this = of_this_process().unwrap();
        write(&this, dir.path()).unwrap();
        assert_eq!(read(dir.path()).unwrap(), Some(this));
    }
}
