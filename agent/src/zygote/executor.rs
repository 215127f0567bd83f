//! Owns: the last steps of a container's first process: is there such a program, its environment, exec. Says in one
//! byte why not, because libcontainer carries only text.

use libcontainer::oci_spec::runtime::Spec;
use libcontainer::workload::{Executor, ExecutorError, ExecutorValidationError};
use nacelle_base::retry::retry_interrupted;
use nix::errno::Errno;
use std::ffi::CString;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::message::Why;
use crate::sys;

/// Runs the program of the spec.
#[derive(Clone)]
pub(super) struct Program {
    /// Where the reason goes when there is no such program.
    pub report: Arc<OwnedFd>,
}

/// What an error of exec means.
pub(super) fn why(error: Errno) -> Why {
    match error {
        Errno::ENOENT | Errno::ENOTDIR => Why::NoSuchProgram,
        Errno::EACCES
        | Errno::EPERM
        | Errno::ENOEXEC
        | Errno::EISDIR
        | Errno::ELOOP
        | Errno::ENAMETOOLONG
        | Errno::EINVAL
        | Errno::E2BIG
        | Errno::ETXTBSY => Why::Unusable,
        // execve(2): the user has as many processes as RLIMIT_NPROC allows.
        Errno::EAGAIN => Why::Exhausted,
        _ => Why::Defect,
    }
}

/// The files that a program's name may mean, in order.
pub(super) fn candidates(name: &str, env: &[String]) -> Vec<String> {
    if name.contains('/') {
        return vec![name.to_owned()];
    }
    let path =
        env.iter().rev().find_map(|entry| entry.strip_prefix("PATH=")).unwrap_or(crate::paths::DEFAULT_SEARCH_PATH);
    path.split(':').map(|folder| format!("{}/{name}", if folder.is_empty() { "." } else { folder })).collect()
}

/// Is there a program of this name that may be run? Uses the caller's root, folder and user.
pub(super) fn find(name: &str, env: &[String]) -> Result<CString, Errno> {
    let mut error = Errno::ENOENT;
    if name.is_empty() {
        return Err(error);
    }
    for candidate in candidates(name, env) {
        let Ok(path) = CString::new(candidate) else { return Err(Errno::EINVAL) };
        let found = nix::sys::stat::stat(path.as_c_str()).and_then(|stat| {
            let kind = nix::sys::stat::SFlag::from_bits_truncate(stat.st_mode) & nix::sys::stat::SFlag::S_IFMT;
            if kind == nix::sys::stat::SFlag::S_IFDIR {
                return Err(Errno::EISDIR);
            }
            nix::unistd::eaccess(path.as_c_str(), nix::unistd::AccessFlags::X_OK)
        });
        match found {
            Ok(()) => return Ok(path),
            Err(Errno::ENOENT | Errno::ENOTDIR) => {}
            Err(other) => error = other,
        }
    }
    Err(error)
}

/// Texts for the kernel; one with a NUL inside is an error.
pub(super) fn c_strings(texts: &[String]) -> Result<Vec<CString>, Errno> {
    texts.iter().map(|text| CString::new(text.as_str()).ok().ok_or(Errno::EINVAL)).collect()
}

fn args_and_env(spec: &Spec) -> (&[String], &[String]) {
    let process = spec.process().as_ref();
    let args = process.and_then(|process| process.args().as_deref()).unwrap_or_default();
    let env = process.and_then(|process| process.env().as_deref()).unwrap_or_default();
    (args, env)
}

impl Executor for Program {
    fn validate(&self, spec: &Spec) -> Result<(), ExecutorValidationError> {
        let (args, env) = args_and_env(spec);
        let name = args.first().map(String::as_str).unwrap_or_default();
        let refused = |why: Why, message: String| {
            // If the reason is lost, the text still says it.
            let _ = retry_interrupted(|| nix::unistd::write(&self.report, &[why as u8]));
            ExecutorValidationError::ArgValidationError(message)
        };
        // libcontainer has entered it with all rights, and has asked only the C library where it is.
        let cwd = spec.process().as_ref().map(|process| process.cwd().display().to_string()).unwrap_or_default();
        match sys::is_beneath_root() {
            Ok(true) => {}
            Ok(false) => {
                let message = format!("the working directory {cwd:?} leads out of the container's root");
                return Err(refused(Why::Unusable, message));
            }
            Err(error) => {
                return Err(refused(Why::Unusable, format!("cannot verify the working directory {cwd:?}: {error}")));
            }
        }
        find(name, env).map(drop).map_err(|error| refused(why(error), format!("cannot run {name:?}: {}", error.desc())))
    }

    fn exec(&self, spec: &Spec) -> Result<(), ExecutorError> {
        let (args, env) = args_and_env(spec);
        let name = args.first().map(String::as_str).unwrap_or_default();
        let result = find(name, env).and_then(|path| Ok((path, c_strings(args)?, c_strings(env)?)));
        let error = match result {
            Ok((path, args, env)) => sys::execve(&path, &args, &env),
            Err(error) => error,
        };
        // Nobody waits for an answer any more: the container's log is the place, and the shells' exit codes.
        eprintln!("cannot run {name:?}: {}", error.desc());
        std::process::exit(if why(error) == Why::NoSuchProgram { 127 } else { 126 });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_looked_up_in_the_path() {
        let env = ["PATH=/a:/b".to_owned()];
        assert_eq!(candidates("x", &env), ["/a/x", "/b/x"]);
        assert_eq!(candidates("./x", &env), ["./x"]);
    }

    #[test]
    fn what_cannot_run_is_told_apart() {
        let env = ["PATH=/usr/bin:/bin".to_owned()];
        assert_eq!(find("true", &env).map(drop), Ok(()));
        assert_eq!(find("no-such-program", &env).map_err(why).map(drop), Err(Why::NoSuchProgram));
        assert_eq!(find("/etc", &env).map_err(why).map(drop), Err(Why::Unusable));
        assert_eq!(find("/etc/passwd", &env).map_err(why).map(drop), Err(Why::Unusable));
        assert_eq!(find("", &env).map(drop), Err(Errno::ENOENT));
    }
}
