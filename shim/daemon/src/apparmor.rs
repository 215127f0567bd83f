//! Determines the AppArmor profile of a container of engine `host`, and loads the default one (`apparmor.profile`) into the node's
//! kernel when it is needed. `select` blocks on files of the kernel and on `apparmor_parser`, which compiles profiles.
//!
//! Source: Documentation/admin-guide/LSM/apparmor.rst of Linux; apparmor.d(5) and apparmor_parser(8).

use nacelle_base::{Classify, FailureKind};
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The name of the default profile.
const DEFAULT: &str = "nacelle-default";
const DEFAULT_TEXT: &str = include_str!("apparmor.profile");
/// The largest list of loaded profiles that is read, in bytes.
const LONGEST_LIST: u64 = 4 << 20;
/// The time that the parser has.
const PARSER_LIMIT: Duration = Duration::from_secs(30);

/// The AppArmor profile that a container requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RequestedApparmor {
    /// None: the container is not confined.
    Unconfined,
    /// Nothing is requested: the default profile applies where the node can load it.
    Unset,
    /// The default profile applies.
    RuntimeDefault,
    /// A profile of the node, by its name.
    Localhost(String),
}

/// Why the requested profile cannot confine a container.
#[derive(Debug, thiserror::Error)]
pub enum ApparmorError {
    #[error(
        "the AppArmor profile {name:?} is requested, but this node has no AppArmor; leave it out, or boot the node with apparmor=1"
    )]
    Disabled { name: String },
    #[error("the AppArmor profile {name:?} is not loaded on this node; load it with apparmor_parser")]
    NotLoaded { name: String },
    #[error(
        "RuntimeDefault needs the AppArmor profile {DEFAULT}, and there is no apparmor_parser to load it; install the package apparmor"
    )]
    NoParser,
    #[error("cannot read the loaded AppArmor profiles in {}", path.display())]
    List { path: PathBuf, source: io::Error },
    #[error("cannot run {}", path.display())]
    Run { path: PathBuf, source: io::Error },
    #[error("{} did not load the profile {DEFAULT}: {reason}", path.display())]
    Refused { path: PathBuf, reason: String },
}

impl Classify for ApparmorError {
    fn kind(&self) -> FailureKind {
        match self {
            ApparmorError::Disabled { .. } | ApparmorError::NotLoaded { .. } | ApparmorError::NoParser => {
                FailureKind::Conflict
            }
            ApparmorError::List { .. } | ApparmorError::Run { .. } | ApparmorError::Refused { .. } => {
                FailureKind::Internal
            }
        }
    }
}

/// The AppArmor of a node.
#[derive(Clone, Debug)]
pub struct Apparmor {
    /// The kernel's file that begins with "Y" where AppArmor is on.
    enabled: PathBuf,
    /// The kernel's list of loaded profiles: lines "NAME (MODE)".
    profiles: PathBuf,
    /// Paths at which the parser may be.
    parsers: Vec<PathBuf>,
}

impl Default for Apparmor {
    fn default() -> Self {
        Apparmor {
            enabled: "/sys/module/apparmor/parameters/enabled".into(),
            profiles: "/sys/kernel/security/apparmor/profiles".into(),
            parsers: vec!["/usr/sbin/apparmor_parser".into(), "/sbin/apparmor_parser".into()],
        }
    }
}

impl Apparmor {
    /// Returns whether the node's kernel confines programs by AppArmor.
    pub fn is_enabled(&self) -> bool {
        std::fs::read_to_string(&self.enabled).is_ok_and(|text| text.starts_with('Y'))
    }

    /// Returns the program that loads profiles.
    pub fn parser(&self) -> Option<&Path> {
        self.parsers.iter().find(|path| path.is_file()).map(PathBuf::as_path)
    }

    /// Returns the name of the profile for a container, which is loaded then; `None` for a container that is not confined.
    ///
    /// Without a request a container has the default profile where the node can load it. On a node without AppArmor RuntimeDefault
    /// means no profile.
    ///
    /// # Errors
    /// The node has no such profile, or the default profile cannot be loaded.
    pub fn select(&self, requested: &RequestedApparmor) -> Result<Option<String>, ApparmorError> {
        let enabled = self.is_enabled();
        match requested {
            RequestedApparmor::Unconfined => Ok(None),
            RequestedApparmor::Unset | RequestedApparmor::RuntimeDefault if !enabled => Ok(None),
            RequestedApparmor::Localhost(name) if !enabled => Err(ApparmorError::Disabled { name: name.clone() }),
            RequestedApparmor::Localhost(name) if self.is_loaded(name)? => Ok(Some(name.clone())),
            RequestedApparmor::Localhost(name) => Err(ApparmorError::NotLoaded { name: name.clone() }),
            RequestedApparmor::Unset | RequestedApparmor::RuntimeDefault => {
                if !self.is_loaded(DEFAULT)? {
                    match self.parser() {
                        Some(parser) => load_default(parser)?,
                        None if *requested == RequestedApparmor::Unset => return Ok(None),
                        None => return Err(ApparmorError::NoParser),
                    }
                }
                Ok(Some(DEFAULT.to_owned()))
            }
        }
    }

    fn is_loaded(&self, name: &str) -> Result<bool, ApparmorError> {
        let failed = |source| ApparmorError::List { path: self.profiles.clone(), source };
        let mut list = Vec::new();
        File::open(&self.profiles).and_then(|file| file.take(LONGEST_LIST).read_to_end(&mut list)).map_err(failed)?;
        let list = String::from_utf8_lossy(&list);
        Ok(list.lines().any(|line| line.rsplit_once(" (").is_some_and(|(loaded, _mode)| loaded == name)))
    }
}

/// Loads the default profile, or replaces it: two calls at the same time do no harm.
fn load_default(parser: &Path) -> Result<(), ApparmorError> {
    let failed = |source| ApparmorError::Run { path: parser.to_owned(), source };
    let refused = |reason: String| ApparmorError::Refused { path: parser.to_owned(), reason };
    let mut command = Command::new(parser);
    command.args(["--replace", "--skip-cache", "--quiet"]).env_clear();
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(failed)?;
    // The text is shorter than a pipe is long. A parser that ends early says why.
    let written = child.stdin.take().map_or(Ok(()), |mut stdin| stdin.write_all(DEFAULT_TEXT.as_bytes()));
    let deadline = Instant::now() + PARSER_LIMIT;
    let status = loop {
        match child.try_wait().map_err(failed)? {
            Some(status) => break status,
            None if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(5)),
            None => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(refused(format!("it took longer than {} s", PARSER_LIMIT.as_secs())));
            }
        }
    };
    if status.success() {
        return written.map_err(failed);
    }
    let mut reason = [0; 1 << 10];
    // One read: what is in the pipe by now.
    let length = child.stderr.take().map_or(0, |mut stderr| stderr.read(&mut reason).unwrap_or(0));
    let reason = String::from_utf8_lossy(reason.get(..length).unwrap_or_default()).trim().to_owned();
    Err(refused(format!("{status}: {reason}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    /// A node whose kernel has these profiles, and a parser that is this shell script.
    fn node(enabled: &str, profiles: &str, parser: Option<&str>) -> (tempfile::TempDir, Apparmor) {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        let node = Apparmor { enabled: path("enabled"), profiles: path("profiles"), parsers: vec![path("parser")] };
        fs::write(&node.enabled, enabled).unwrap();
        fs::write(&node.profiles, profiles).unwrap();
        if let Some(script) = parser {
            fs::write(path("parser"), format!("#!/bin/sh\ncd {}\n{script}\n", directory.path().display())).unwrap();
            fs::set_permissions(path("parser"), fs::Permissions::from_mode(0o755)).unwrap();
        }
        (directory, node)
    }

    const LOADS: &str = "/bin/cat >loaded; echo 'nacelle-default (enforce)' >>profiles";

    fn local(name: &str) -> RequestedApparmor {
        RequestedApparmor::Localhost(name.into())
    }

    #[test]
    fn a_container_has_the_profile_that_it_requests_or_the_default_one() {
        use RequestedApparmor::{RuntimeDefault, Unconfined, Unset};
        for (enabled, requested, expected) in [
            ("N\n", RuntimeDefault, None),
            ("N\n", Unset, None),
            ("Y\n", Unconfined, None),
            ("Y\n", Unset, Some("nacelle-default")),
            ("Y\n", RuntimeDefault, Some("nacelle-default")),
            ("Y\n", local("my own (v2)"), Some("my own (v2)")),
        ] {
            let (directory, node) = node(enabled, "other (complain)\nmy own (v2) (enforce)\n", Some(LOADS));
            assert_eq!(node.select(&requested).unwrap().as_deref(), expected, "{requested:?}");
            let loaded = fs::read_to_string(directory.path().join("loaded")).ok();
            assert_eq!(loaded.as_deref(), expected.filter(|name| *name == DEFAULT).map(|_| DEFAULT_TEXT));
        }
    }

    #[test]
    fn a_loaded_default_profile_is_not_loaded_again() {
        let (_directory, node) = node("Y\n", "nacelle-default (enforce)\n", Some("exit 1"));
        assert_eq!(node.select(&RequestedApparmor::RuntimeDefault).unwrap().as_deref(), Some(DEFAULT));
    }

    #[test]
    fn without_a_parser_only_an_explicit_request_fails() {
        let (_directory, node) = node("Y\n", "", None);
        assert_eq!(node.select(&RequestedApparmor::Unset).unwrap(), None);
        assert!(matches!(node.select(&RequestedApparmor::RuntimeDefault), Err(ApparmorError::NoParser)));
    }

    #[test]
    fn a_profile_that_the_node_lacks_is_refused_by_name() {
        for (enabled, cause) in [("N\n", "no AppArmor"), ("Y\n", "not loaded")] {
            let (_directory, node) = node(enabled, "mine-too (enforce)\n", Some(LOADS));
            let error = node.select(&local("mine")).unwrap_err();
            assert_eq!(error.kind(), FailureKind::Conflict);
            assert!(error.to_string().contains("\"mine\"") && error.to_string().contains(cause), "{error}");
        }
    }

    #[test]
    fn a_failing_parser_is_reported_with_its_words() {
        let (_directory, node) = node("Y\n", "", Some("echo 'syntax error, line 3' >&2; exit 1"));
        let error = node.select(&RequestedApparmor::Unset).unwrap_err();
        assert!(error.to_string().contains("syntax error, line 3"), "{error}");
    }

    #[test]
    fn the_default_profile_has_its_name() {
        assert!(DEFAULT_TEXT.contains(&format!("profile {DEFAULT} ")));
    }
}
