//! Determines the AppArmor profile of a container of engine `host`, and loads the default one (`apparmor.profile`) into the node's
//! kernel when it is needed. `select` blocks on files of the kernel and on `apparmor_parser`, which compiles profiles.
//!
//! Source: Documentation/admin-guide/LSM/apparmor.rst of Linux; apparmor.d(5) and apparmor_parser(8).

use nacelle_base::{Chain, Classify, FailureKind};
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The name of the default profile.
const DEFAULT: &str = "nacelle-default";
const DEFAULT_TEXT: &str = include_str!("apparmor.profile");
/// The features of AppArmor that the default profile is written for. Without this line it would be for those of the running kernel, and
/// a newer one would deny what the text does not know, such as UNIX sockets.
const ABI_LINE: &str = "abi <abi/3.0>,\n";
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
    #[error(
        "the AppArmor profile {name:?} is requested, but the pod was started by a version of Nacelle that does not apply profiles; recreate the pod"
    )]
    OldPod { name: String },
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
            ApparmorError::Disabled { .. }
            | ApparmorError::OldPod { .. }
            | ApparmorError::NotLoaded { .. }
            | ApparmorError::NoParser => FailureKind::Conflict,
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
    /// The file of the parser that describes the features of [`ABI_LINE`].
    abi: PathBuf,
    /// This process has loaded the default profile, which replaces that of an earlier version.
    has_loaded: Arc<Mutex<bool>>,
}

impl Default for Apparmor {
    fn default() -> Self {
        Apparmor {
            enabled: "/sys/module/apparmor/parameters/enabled".into(),
            profiles: "/sys/kernel/security/apparmor/profiles".into(),
            parsers: vec!["/usr/sbin/apparmor_parser".into(), "/sbin/apparmor_parser".into()],
            abi: "/etc/apparmor.d/abi/3.0".into(),
            has_loaded: Arc::default(),
        }
    }
}

impl Apparmor {
    /// Returns whether the node's kernel confines programs by AppArmor, and its profiles can be seen from here. In a container whose node
    /// has AppArmor they cannot.
    pub fn is_enabled(&self) -> bool {
        std::fs::read_to_string(&self.enabled).is_ok_and(|text| text.starts_with('Y')) && self.profiles.exists()
    }

    /// Returns the program that loads profiles.
    pub fn parser(&self) -> Option<&Path> {
        self.parsers.iter().find(|path| path.is_file()).map(PathBuf::as_path)
    }

    /// Returns the name of the profile for a container, which is loaded then; `None` for a container that is not confined.
    ///
    /// Without a request a container has the default profile where the node can load it. On a node without AppArmor RuntimeDefault
    /// means no profile. A pod of an earlier version (`is_old_pod`) has no profiles.
    ///
    /// # Errors
    /// The node has no such profile, or the default profile is requested and cannot be loaded.
    pub fn select(&self, requested: &RequestedApparmor, is_old_pod: bool) -> Result<Option<String>, ApparmorError> {
        let enabled = self.is_enabled();
        match requested {
            RequestedApparmor::Unconfined => Ok(None),
            RequestedApparmor::Unset | RequestedApparmor::RuntimeDefault if !enabled || is_old_pod => Ok(None),
            RequestedApparmor::Localhost(name) if !enabled => Err(ApparmorError::Disabled { name: name.clone() }),
            RequestedApparmor::Localhost(name) if is_old_pod => Err(ApparmorError::OldPod { name: name.clone() }),
            RequestedApparmor::Localhost(name) if self.is_loaded(name)? => Ok(Some(name.clone())),
            RequestedApparmor::Localhost(name) => Err(ApparmorError::NotLoaded { name: name.clone() }),
            RequestedApparmor::RuntimeDefault => self.ensure_default().map(|()| Some(DEFAULT.to_owned())),
            RequestedApparmor::Unset => match self.ensure_default() {
                Ok(()) => Ok(Some(DEFAULT.to_owned())),
                Err(error) => {
                    tracing::warn!(error = %Chain(&error), "a container runs without an AppArmor profile");
                    Ok(None)
                }
            },
        }
    }

    /// Loads the default profile, once in this process and again when it is missing.
    fn ensure_default(&self) -> Result<(), ApparmorError> {
        let mut has_loaded = self.has_loaded.lock().unwrap_or_else(PoisonError::into_inner);
        if !*has_loaded || !self.is_loaded(DEFAULT)? {
            let abi = if self.abi.exists() { ABI_LINE } else { "" };
            load(self.parser().ok_or(ApparmorError::NoParser)?, &format!("{abi}{DEFAULT_TEXT}"))?;
            *has_loaded = true;
        }
        Ok(())
    }

    fn is_loaded(&self, name: &str) -> Result<bool, ApparmorError> {
        let failed = |source| ApparmorError::List { path: self.profiles.clone(), source };
        let mut list = Vec::new();
        File::open(&self.profiles).and_then(|file| file.take(LONGEST_LIST).read_to_end(&mut list)).map_err(failed)?;
        let list = String::from_utf8_lossy(&list);
        Ok(list.lines().any(|line| line.rsplit_once(" (").is_some_and(|(loaded, _mode)| loaded == name)))
    }
}

/// Loads the profile in this text, or replaces the one of its name.
fn load(parser: &Path, text: &str) -> Result<(), ApparmorError> {
    let failed = |source| ApparmorError::Run { path: parser.to_owned(), source };
    let refused = |reason: String| ApparmorError::Refused { path: parser.to_owned(), reason };
    let mut command = Command::new(parser);
    command.args(["--replace", "--skip-cache", "--quiet"]).env_clear();
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(failed)?;
    // The text is shorter than a pipe is long. A parser that ends early reports the reason on standard error.
    let written = child.stdin.take().map_or(Ok(()), |mut stdin| stdin.write_all(text.as_bytes()));
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
        let node = Apparmor {
            enabled: path("enabled"),
            profiles: path("profiles"),
            parsers: vec![path("parser")],
            abi: path("abi"),
            has_loaded: Arc::default(),
        };
        fs::write(&node.enabled, enabled).unwrap();
        fs::write(&node.profiles, profiles).unwrap();
        if let Some(script) = parser {
            fs::write(path("parser"), format!("#!/bin/sh\ncd {}\n{script}\n", directory.path().display())).unwrap();
            fs::set_permissions(path("parser"), fs::Permissions::from_mode(0o755)).unwrap();
        }
        (directory, node)
    }

    const LOADS: &str = "/bin/cat >>loaded; echo 'nacelle-default (enforce)' >>profiles";

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
            for _ in 0..2 {
                assert_eq!(node.select(&requested, false).unwrap().as_deref(), expected, "{requested:?}");
            }
            let loaded = fs::read_to_string(directory.path().join("loaded")).ok();
            assert_eq!(loaded.as_deref(), expected.filter(|name| *name == DEFAULT).map(|_| DEFAULT_TEXT), "once");
        }
    }

    #[test]
    fn the_default_profile_of_an_earlier_version_is_replaced() {
        let (directory, node) = node("Y\n", "nacelle-default (complain)\n", Some(LOADS));
        fs::write(&node.abi, "").unwrap();
        assert_eq!(node.select(&RequestedApparmor::Unset, false).unwrap().as_deref(), Some(DEFAULT));
        let loaded = fs::read_to_string(directory.path().join("loaded")).unwrap();
        assert_eq!(loaded, format!("{ABI_LINE}{DEFAULT_TEXT}"));
        // The profile was removed meanwhile.
        fs::write(&node.profiles, "").unwrap();
        node.select(&RequestedApparmor::Unset, false).unwrap();
        assert_eq!(fs::read_to_string(directory.path().join("loaded")).unwrap().len(), 2 * loaded.len());
    }

    #[test]
    fn a_node_that_cannot_load_the_default_profile_refuses_only_an_explicit_request() {
        for (parser, cause) in
            [(None, "no apparmor_parser"), (Some("echo 'syntax error, line 3' >&2; exit 1"), "line 3")]
        {
            let (_directory, node) = node("Y\n", "", parser);
            assert_eq!(node.select(&RequestedApparmor::Unset, false).unwrap(), None);
            let error = node.select(&RequestedApparmor::RuntimeDefault, false).unwrap_err();
            assert!(error.to_string().contains(cause), "{error}");
        }
        // In a container on a node with AppArmor.
        let (_directory, node) = node("Y\n", "", Some(LOADS));
        fs::remove_file(&node.profiles).unwrap();
        assert_eq!(node.select(&RequestedApparmor::RuntimeDefault, false).unwrap(), None);
    }

    #[test]
    fn a_profile_that_does_not_apply_is_refused_by_name() {
        for (enabled, old, cause) in
            [("N\n", false, "no AppArmor"), ("Y\n", false, "not loaded"), ("Y\n", true, "recreate the pod")]
        {
            let (_directory, node) = node(enabled, "mine-too (enforce)\n", Some(LOADS));
            let error = node.select(&local("mine"), old).unwrap_err();
            assert_eq!(error.kind(), FailureKind::Conflict);
            assert!(error.to_string().contains("\"mine\"") && error.to_string().contains(cause), "{error}");
        }
        let (_directory, node) = node("Y\n", "", Some(LOADS));
        assert_eq!(node.select(&RequestedApparmor::RuntimeDefault, true).unwrap(), None);
    }

    #[test]
    fn the_default_profile_has_its_name() {
        assert!(DEFAULT_TEXT.contains(&format!("profile {DEFAULT} ")));
    }
}
