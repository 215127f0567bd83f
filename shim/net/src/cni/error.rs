//! Owns: what can go wrong between us and CNI plugins.

use nacelle_base::files::FileError;
use nacelle_base::task::TaskError;
use nacelle_base::{Classify, Kind};
use std::io;
use std::path::PathBuf;

/// A failure of the CNI chain.
#[derive(Debug, thiserror::Error)]
pub enum CniError {
    /// The configuration folder holds no configuration: the network add-on is not installed yet.
    #[error("no CNI configuration (*.conf, *.conflist, *.json) in {dir}", dir = dir.display())]
    NoConfig {
        /// The folder.
        dir: PathBuf,
    },
    /// A configuration or cache file could not be read or written.
    #[error("cannot keep CNI state")]
    File {
        /// Which and why.
        #[from]
        source: FileError,
    },
    /// A file is larger than a configuration may be.
    #[error("{path} is larger than {limit} bytes", path = path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// The limit in bytes.
        limit: u64,
    },
    /// A text is not the JSON that was expected.
    #[error("{what} is not what CNI expects")]
    Json {
        /// The file or the plugin's answer.
        what: String,
        /// Where and why.
        source: serde_json::Error,
    },
    /// A field of a configuration has a value that is not allowed.
    #[error("{what}: field {field}: {value:?} is not allowed: {rule}")]
    Field {
        /// The file or the plugin's answer.
        what: String,
        /// The field.
        field: &'static str,
        /// Its value, cut.
        value: String,
        /// What is allowed.
        rule: &'static str,
    },
    /// Something that a plugin is told by CNI_ARGS has a character that would be read as a separator.
    #[error("{field} {value:?} cannot be told to CNI plugins: ';', '=' and control characters are not allowed")]
    Argument {
        /// K8S_POD_NAME and so on.
        field: &'static str,
        /// The value, cut.
        value: String,
    },
    /// The plugin is in none of the folders.
    #[error("CNI plugin {plugin} is in none of {dirs:?}")]
    NoPlugin {
        /// Its name.
        plugin: String,
        /// Where it was looked for.
        dirs: Vec<PathBuf>,
    },
    /// The plugin does not speak the version of the configuration.
    #[error("CNI plugin {plugin} does not support version {version} of the configuration, only {supported:?}")]
    Version {
        /// Its name.
        plugin: String,
        /// The version of the configuration.
        version: String,
        /// What the plugin says of itself.
        supported: Vec<String>,
    },
    /// The plugin could not be started, fed or read.
    #[error("cannot run CNI plugin {plugin} for {command}")]
    Exec {
        /// Its name.
        plugin: String,
        /// ADD, DEL and so on.
        command: &'static str,
        /// Why.
        source: io::Error,
    },
    /// The plugin did not end in time and was killed.
    #[error("CNI plugin {plugin} did not finish {command} within {seconds} s and was killed")]
    Timeout {
        /// Its name.
        plugin: String,
        /// ADD, DEL and so on.
        command: &'static str,
        /// The limit.
        seconds: u64,
    },
    /// All plugins together did not end in time; the one that ran was killed.
    #[error("the CNI plugins did not finish {command} within {seconds} s")]
    TooSlow {
        /// DEL or GC.
        command: &'static str,
        /// The limit.
        seconds: u64,
    },
    /// The plugin printed more than an answer may have, and was killed.
    #[error("CNI plugin {plugin} printed more than {limit} bytes for {command} and was killed")]
    TooMuchOutput {
        /// Its name.
        plugin: String,
        /// ADD, DEL and so on.
        command: &'static str,
        /// The limit in bytes.
        limit: u64,
    },
    /// The plugin refused with an error of the CNI form.
    #[error("CNI plugin {plugin} refused {command} with code {code}: {message}")]
    Plugin {
        /// Its name.
        plugin: String,
        /// ADD, DEL and so on.
        command: &'static str,
        /// The code: below 100 from the specification.
        code: u64,
        /// Its message and details.
        message: String,
    },
    /// The plugin failed without an error of the CNI form.
    #[error("CNI plugin {plugin} failed {command} with {status}: {output}")]
    Failed {
        /// Its name.
        plugin: String,
        /// ADD, DEL and so on.
        command: &'static str,
        /// How it ended.
        status: String,
        /// The end of what it printed.
        output: String,
    },
    /// CHECK was asked for a pod that has no network.
    #[error("no CNI result is kept for pod {pod}")]
    NotAttached {
        /// The pod.
        pod: String,
    },
    /// A plugin that was started for the pod before, perhaps by a daemon that was killed since, still runs.
    #[error("a CNI plugin still runs for pod {pod}")]
    Busy {
        /// The pod.
        pod: String,
    },
    /// The input of a plugin could not be prepared.
    #[error("cannot prepare the input of CNI plugin {plugin}")]
    Input {
        /// Its name.
        plugin: String,
        /// Why.
        source: io::Error,
    },
    /// A task of the runtime did not finish.
    #[error(transparent)]
    Task(#[from] TaskError),
}

impl Classify for CniError {
    fn kind(&self) -> Kind {
        match self {
            CniError::NoConfig { .. }
            | CniError::TooLarge { .. }
            | CniError::Json { .. }
            | CniError::Field { .. }
            | CniError::NoPlugin { .. }
            | CniError::Version { .. }
            | CniError::Exec { .. }
            | CniError::TooMuchOutput { .. }
            | CniError::Plugin { .. }
            | CniError::Failed { .. } => Kind::Unavailable,
            CniError::File { source } => source.kind(),
            CniError::Argument { .. } => Kind::Invalid,
            CniError::Timeout { .. } | CniError::TooSlow { .. } => Kind::Timeout,
            CniError::NotAttached { .. } => Kind::NotFound,
            CniError::Busy { .. } => Kind::Unavailable,
            CniError::Input { source, .. } => source.kind().into(),
            CniError::Task(error) => error.kind(),
        }
    }
}
