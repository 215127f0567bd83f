//! Does the last steps of a container's first process, as libcontainer's executor: checks the working directory, finds the program and
//! executes it.
//!
//! libcontainer reports errors as text only, and repeats them, so a refusal is also written to a pipe.

use libcontainer::oci_spec::runtime::Spec;
use libcontainer::workload::{Executor, ExecutorError, ExecutorValidationError};
use nacelle_base::retry::retry_interrupted;
use nix::errno::Errno;
use std::ffi::CString;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::message::{Refusal, RefusalKind};
use crate::sys;

/// Executes the program of a specification.
#[derive(Clone)]
pub(super) struct ContainerProgram {
    /// A pipe for the refusal.
    pub report: Arc<OwnedFd>,
}

/// Classifies an error of execve(2).
pub(super) fn exec_error_kind(error: Errno) -> RefusalKind {
    match error {
        Errno::ENOENT | Errno::ENOTDIR => RefusalKind::NoSuchProgram,
        Errno::EACCES
        | Errno::EPERM
        | Errno::ENOEXEC
        | Errno::EISDIR
        | Errno::ELOOP
        | Errno::ENAMETOOLONG
        | Errno::EINVAL
        | Errno::E2BIG
        | Errno::ETXTBSY => RefusalKind::Unusable,
        // execve(2): the user has as many processes as RLIMIT_NPROC allows.
        Errno::EAGAIN => RefusalKind::Exhausted,
        _ => RefusalKind::Internal,
    }
}

/// Returns the paths at which a program is looked for, in order.
pub(super) fn candidate_paths(name: &str, env: &[String]) -> Vec<String> {
    if name.contains('/') {
        return vec![name.to_owned()];
    }
    let path =
        env.iter().rev().find_map(|entry| entry.strip_prefix("PATH=")).unwrap_or(crate::paths::DEFAULT_SEARCH_PATH);
    path.split(':').map(|directory| format!("{}/{name}", if directory.is_empty() { "." } else { directory })).collect()
}

/// Finds an executable file by the name of a program, with the caller's root, working directory and user.
pub(super) fn find_program(name: &str, env: &[String]) -> Result<CString, Errno> {
    let mut error = Errno::ENOENT;
    if name.is_empty() {
        return Err(error);
    }
    for candidate in candidate_paths(name, env) {
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

/// Converts strings for execve(2). One with a NUL inside fails with EINVAL.
pub(super) fn to_c_strings(texts: &[String]) -> Result<Vec<CString>, Errno> {
    texts.iter().map(|description| CString::new(description.as_str()).ok().ok_or(Errno::EINVAL)).collect()
}

fn args_and_env(spec: &Spec) -> (&[String], &[String]) {
    let process = spec.process().as_ref();
    let args = process.and_then(|process| process.args().as_deref()).unwrap_or_default();
    let env = process.and_then(|process| process.env().as_deref()).unwrap_or_default();
    (args, env)
}

impl Executor for ContainerProgram {
    fn validate(&self, spec: &Spec) -> Result<(), ExecutorValidationError> {
        let (args, env) = args_and_env(spec);
        let name = args.first().map(String::as_str).unwrap_or_default();
        let refused = |kind: RefusalKind, message: String| {
            let refusal = Refusal { message, kind };
            // If the report is lost, libcontainer's text still has the reason.
            let _ = retry_interrupted(|| nix::unistd::write(&self.report, &refusal.to_report()));
            ExecutorValidationError::ArgValidationError(refusal.message)
        };
        // libcontainer has entered the working directory with all rights, and has checked it only by getcwd of the C library.
        let cwd = spec.process().as_ref().map(|process| process.cwd().display().to_string()).unwrap_or_default();
        match sys::is_beneath_root() {
            Ok(true) => {}
            Ok(false) => {
                let message = format!("the working directory {cwd:?} leads out of the container's root");
                return Err(refused(RefusalKind::Unusable, message));
            }
            Err(error) => {
                return Err(refused(
                    RefusalKind::Unusable,
                    format!("cannot verify the working directory {cwd:?}: {error}"),
                ));
            }
        }
        find_program(name, env)
            .map(drop)
            .map_err(|error| refused(exec_error_kind(error), format!("cannot run {name:?}: {}", error.desc())))
    }

    fn exec(&self, spec: &Spec) -> Result<(), ExecutorError> {
        let (args, env) = args_and_env(spec);
        let name = args.first().map(String::as_str).unwrap_or_default();
        let result = find_program(name, env).and_then(|path| Ok((path, to_c_strings(args)?, to_c_strings(env)?)));
        let error = match result {
            Ok((path, args, env)) => sys::execve(&path, &args, &env),
            Err(error) => error,
        };
        // No process waits for an answer any more: the error goes to the container's stderr, with the exit code that shells use.
        eprintln!("cannot run {name:?}: {}", error.desc());
        std::process::exit(if exec_error_kind(error) == RefusalKind::NoSuchProgram { 127 } else { 126 });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_looked_up_in_the_path() {
        let env = ["PATH=/a:/b".to_owned()];
        assert_eq!(candidate_paths("x", &env), ["/a/x", "/b/x"]);
        assert_eq!(candidate_paths("./x", &env), ["./x"]);
    }

    #[test]
    fn exec_errors_are_classified() {
        let env = ["PATH=/usr/bin:/bin".to_owned()];
        assert_eq!(find_program("true", &env).map(drop), Ok(()));
        assert_eq!(
            find_program("no-such-program", &env).map_err(exec_error_kind).map(drop),
            Err(RefusalKind::NoSuchProgram)
        );
        assert_eq!(find_program("/etc", &env).map_err(exec_error_kind).map(drop), Err(RefusalKind::Unusable));
        assert_eq!(find_program("/etc/passwd", &env).map_err(exec_error_kind).map(drop), Err(RefusalKind::Unusable));
        assert_eq!(find_program("", &env).map(drop), Err(Errno::ENOENT));
    }
}
