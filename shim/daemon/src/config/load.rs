//! Reads the configuration file, and collects all mistakes in it.

use super::check::BrokenRule;
use super::key::KeyPath;
use super::problem::{ConfigProblem, ConfigProblems};
use super::syntax::{TextPosition, describe};
use super::{Config, DEFAULT_PATH, Handler, RegistrySettings, check, files, hosts, renamed};
use nacelle_base::files::{FileError, at};
use nacelle_base::{Chain, Classify, FailureKind};
use serde::Deserialize;
use std::io::Read;
use std::path::{Path, PathBuf};
use toml::de::DeTable;

/// The largest size of a configuration file in bytes.
const MAX_BYTES: u64 = 4 << 20;
/// The largest number of mistakes that are reported.
const MAX_PROBLEMS: usize = 100;

/// Why the configuration cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error(transparent)]
    File(#[from] FileError),
    /// The file is not TOML, has an unknown key, or a value that is not allowed.
    #[error("invalid configuration in {path}", path = path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// All mistakes.
        source: ConfigProblems,
    },
}

impl Classify for ConfigError {
    fn kind(&self) -> FailureKind {
        match self {
            ConfigError::File(error) => error.kind(),
            ConfigError::Invalid { .. } => FailureKind::Invalid,
        }
    }
}

/// What a text contains.
struct ParsedText {
    /// `None` if the text is not TOML, or a mistake cannot be left out.
    config: Option<Config>,
    /// Deprecated keys.
    warnings: Vec<String>,
    problems: Vec<ConfigProblem>,
}

impl Config {
    /// Reads and checks a file. The default file may be missing: then all settings have their defaults.
    pub fn load(path: Option<&Path>) -> Result<Config, ConfigError> {
        read_file(path, |_| Vec::new())
    }

    /// Like `load`, and checks the files that the configuration names: certificates, keys and credentials. Blocks.
    pub fn load_with_files(path: Option<&Path>) -> Result<Config, ConfigError> {
        read_file(path, |config| [files::check_streaming(config), files::check_registries(config)].concat())
    }

    /// Like `load_with_files`, for the daemon: logs the files of registries that cannot be used, because pods whose images are there
    /// do not need them. Blocks.
    pub fn load_to_serve(path: Option<&Path>) -> Result<Config, ConfigError> {
        read_file(path, |config| {
            for broken in files::check_registries(config) {
                let problem = broken.into_problem(None);
                tracing::warn!("pulls from a registry will fail: {}", problem.reason());
            }
            files::check_streaming(config)
        })
    }

    /// Parses and checks the text of a file, and logs a warning for each deprecated key; `path` is for errors.
    pub fn parse(text: &str, path: &Path) -> Result<Config, ConfigError> {
        let (config, warnings) = Config::parse_with_warnings(text, path)?;
        log_warnings(&warnings, path);
        Ok(config)
    }

    pub(super) fn parse_with_warnings(text: &str, path: &Path) -> Result<(Config, Vec<String>), ConfigError> {
        let parsed = parse_text(text, |_| Vec::new());
        Ok((sound(parsed.config, parsed.problems, path)?, parsed.warnings))
    }

    /// Adds the registries of `images.hosts_dir`. Those that the file itself describes take precedence.
    fn add_hosts(&mut self) -> Result<(), BrokenRule> {
        let Some(directory) = &self.images.hosts_dir else { return Ok(()) };
        let unusable = |error| BrokenRule::new("images.hosts_dir", directory, Chain(&error).to_string());
        for (host, settings) in hosts::read(directory).map_err(unusable)? {
            let known = self.images.registries.entry(host.clone()).or_default();
            let auth_file = known.auth_file.clone();
            if *known == (RegistrySettings { auth_file: auth_file.clone(), ..RegistrySettings::default() }) {
                *known = RegistrySettings { auth_file, ..settings };
            } else {
                tracing::warn!(
                    host,
                    "images.registries has settings of the host: those of images.hosts_dir are not used"
                );
            }
        }
        Ok(())
    }
}

fn read_file(path: Option<&Path>, more: fn(&Config) -> Vec<BrokenRule>) -> Result<Config, ConfigError> {
    let (path, needed) = match path {
        Some(path) => (path, true),
        None => (Path::new(DEFAULT_PATH), false),
    };
    let text = match read_text(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound && !needed => String::new(),
        other => other.map_err(at("read", path))?,
    };
    let parsed = parse_text(&text, |config| {
        let hosts = config.add_hosts().err();
        hosts.into_iter().chain(more(config)).collect()
    });
    log_warnings(&parsed.warnings, path);
    sound(parsed.config, parsed.problems, path)
}

/// Reads a file of a bounded size.
fn read_text(path: &Path) -> std::io::Result<String> {
    let mut text = String::new();
    let read = std::fs::File::open(path)?.take(MAX_BYTES + 1).read_to_string(&mut text)?;
    match u64::try_from(read).is_ok_and(|read| read <= MAX_BYTES) {
        true => Ok(text),
        false => Err(std::io::Error::new(std::io::ErrorKind::FileTooLarge, "it is larger than 4 MiB")),
    }
}

fn log_warnings(warnings: &[String], path: &Path) {
    for warning in warnings {
        tracing::warn!("{}: {warning}", path.display());
    }
}

/// Returns the configuration if nothing is wrong.
fn sound(config: Option<Config>, problems: Vec<ConfigProblem>, path: &Path) -> Result<Config, ConfigError> {
    match config {
        Some(config) if problems.is_empty() => Ok(config),
        _ => Err(ConfigError::Invalid { path: path.to_owned(), source: ConfigProblems::new(problems) }),
    }
}

/// Parses a text and checks its values, the latter also with `more`.
fn parse_text(text: &str, more: impl FnOnce(&mut Config) -> Vec<BrokenRule>) -> ParsedText {
    let (mut file, errors) = DeTable::parse_recoverable(text);
    if !errors.is_empty() {
        let problem = |error: toml::de::Error| {
            ConfigProblem::new(Some(TextPosition::of_error(text, &error)), None, describe(error.message()))
        };
        let problems = errors.into_iter().take(MAX_PROBLEMS).map(problem).collect();
        return ParsedText { config: None, warnings: Vec::new(), problems };
    }
    let written = file.get_ref().clone();
    let (warnings, mut problems) = renamed::replace_old_keys(file.get_mut(), text);
    let mut left_out: Vec<KeyPath> = Vec::new();
    let config = loop {
        let error = match Config::deserialize(toml::Deserializer::from(file.clone())) {
            Ok(config) => break Some(config),
            Err(error) => error,
        };
        let offset = error.span().map_or(0, |span| span.start);
        let key = KeyPath::at(file.get_ref(), offset);
        let position = TextPosition::of_error(text, &error);
        problems.push(ConfigProblem::new(Some(position), key.as_ref(), describe(error.message())));
        // Without this key, the next mistake is found.
        match key {
            Some(key) if problems.len() < MAX_PROBLEMS => {
                let is_unknown = key.has_name_at(file.get_ref(), offset);
                if !key.remove_from(file.get_mut()) {
                    break None;
                }
                if !is_unknown {
                    left_out.push(key);
                }
            }
            _ => break None,
        }
    };
    let config = config.map(|mut config| {
        if config.handlers.is_empty() {
            config.handlers.insert(config.default_handler.clone(), Handler::default());
        }
        let mut broken = check::check(&config);
        broken.extend(more(&mut config));
        // A rule between keys of a section means nothing when one of them was left out.
        broken.retain(|rule| !left_out.iter().any(|key| key.is_beside(&rule.key)));
        problems.extend(broken.into_iter().map(|rule| {
            let span = rule.key.span(file.get_ref()).or_else(|| rule.key.span(&written));
            rule.into_problem(span.map(|span| TextPosition::new(text, span.start)))
        }));
        config
    });
    problems.truncate(MAX_PROBLEMS);
    ParsedText { config, warnings, problems }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problems(text: &str) -> Vec<String> {
        match Config::parse(text, Path::new("c.toml")) {
            Err(ConfigError::Invalid { source, .. }) => source.list().iter().map(ToString::to_string).collect(),
            other => panic!("{text}: {other:?}"),
        }
    }

    #[test]
    fn all_mistakes_are_reported_with_line_and_key() {
        let text = "\
default_handler = \"a\"
[sandbox]
boot_timeout = 30
teardown_timeout = \"0s\"
[network]
plugin_timeout = \"2h\"
[images.registries.\"https://docker.io/\"]
http = true
[handlers.a]
memory_mib = 63
allowed_annotations = [\"vm.nacelle.dev/spec\", \"vm.nacelle.dev/spek\"]
[handlers.d]
vcpu = 1
scratch_mib = 1
[handlers.b]
vcpu = 1
memory_mib = \"lots\"
[handlers.c]
vcpus = \"two\"
memory_mib = true
";
        let found = problems(text);
        let expected = [
            "line 3, column 16: sandbox.boot_timeout: duration 30 has no unit: write \"30s\" for seconds",
            "line 6, column 18: network.plugin_timeout = \"2h\": 1s to 1h are allowed",
            "line 7, column 20: images.registries.\"https://docker.io/\": the key is a host with an optional port, such as \"docker.io\"",
            "line 10, column 14: handlers.a.memory_mib = 63: 64 MiB to 16 TiB are allowed",
            "line 11, column 23: handlers.a.allowed_annotations = \"vm.nacelle.dev/spek\": there is no such annotation",
            "line 13, column 1: handlers.d.vcpu: unknown field `vcpu`",
            "line 14, column 15: handlers.d.scratch_mib = 1: 64 MiB to 16 TiB are allowed",
            "line 16, column 1: handlers.b.vcpu: unknown field `vcpu`",
            "line 17, column 14: handlers.b.memory_mib: invalid size \"lots\": expected a number and a unit",
            "line 19, column 9: handlers.c.vcpus: invalid type: string, expected a whole number",
            "line 20, column 14: handlers.c.memory_mib: invalid type: boolean `true`, expected a number of MiB or a size with a unit",
        ];
        assert_eq!(found.len(), expected.len(), "{found:#?}");
        for (found, expected) in found.iter().zip(expected) {
            assert!(found.starts_with(expected), "{found}\n{expected}");
        }
    }

    #[test]
    fn all_errors_of_the_syntax_are_reported() {
        let found = problems("a = \n[paths]\nroot = /r\n");
        assert!(found.iter().any(|problem| problem.starts_with("line 1")), "{found:?}");
        assert!(found.iter().any(|problem| problem.starts_with("line 3")), "{found:?}");
    }

    #[test]
    fn sizes_and_durations_have_units_for_people() {
        let text = "\
[sandbox]
templates_max_mib = \"1Gi\"
boot_timeout = \"2m30s\"
[images]
max_layer_bytes = \"64Gi\"
max_unpack_memory = \"1Gi\"
[handlers.nacelle]
memory_mib = \"256Mi\"
max_memory_mib = \"1.5Gi\"
scratch_mib = \"10Gi\"
empty_dir_mib = \"1Gi\"
disk_limits = { read_bytes_per_second = \"200M\", writes_per_second = 2000 }
";
        let config = Config::parse(text, Path::new("c.toml")).unwrap();
        let handler = &config.handlers["nacelle"];
        assert_eq!((config.sandbox.templates_max_mib, config.images.max_layer_bytes), (1024, 64 << 30));
        assert_eq!((handler.memory_mib, handler.max_memory_mib), (256, Some(1536)));
        assert_eq!((handler.scratch_mib, handler.empty_dir_mib), (10240, Some(1024)));
        let limits = handler.disk_limits.as_ref().unwrap();
        assert_eq!((limits.read_bytes_per_second, limits.writes_per_second), (Some(200_000_000), Some(2000)));
    }

    #[test]
    fn files_that_the_configuration_names_are_checked() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("config.toml");
        let text = format!(
            "[streaming]\ntls_cert_file = \"{0}/c\"\ntls_key_file = \"{0}/k\"\n\
             [images]\nhosts_dir = \"{0}/none\"\n\
             [images.registries.\"r.example\"]\nca_file = \"{0}/ca\"\nauth_file = \"{0}/auth\"\n",
            directory.path().display()
        );
        std::fs::write(&path, &text).unwrap();
        let Err(ConfigError::Invalid { source, .. }) = Config::load_with_files(Some(&path)) else { panic!() };
        let found: Vec<_> = source.list().iter().map(|problem| (problem.line, problem.key.clone().unwrap())).collect();
        let registry = |key: &str| format!("images.registries.\"r.example\".{key}");
        let expected = [
            (Some(2), "streaming.tls_cert_file".to_owned()),
            (Some(5), "images.hosts_dir".to_owned()),
            (Some(7), registry("ca_file")),
            (Some(8), registry("auth_file")),
        ];
        assert_eq!(found, expected, "{source}");
        assert!(source.to_string().contains("No such file"), "{source}");
        assert!(matches!(Config::load_with_files(Some(&directory.path().join("x"))), Err(ConfigError::File(_))));
    }
}
