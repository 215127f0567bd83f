//! Defines the errors of the CNI chain.

use nacelle_base::files::FileError;
use nacelle_base::task::TaskError;
use nacelle_base::{Classify, FailureKind};
use std::io;
use std::path::PathBuf;

/// A failure of the CNI chain.
#[derive(Debug, thiserror::Error)]
pub enum CniError {
    /// The configuration directory has no configuration: the network add-on is not installed yet.
    #[error("no CNI configuration (*.conf, *.conflist, *.json) in {dir}; install the cluster's network plugin", dir = dir.display())]
    NoConfig {
        /// The directory.
        dir: PathBuf,
    },
    /// A configuration or an attachment record could not be read or written.
    #[error("cannot keep CNI state")]
    File {
        /// The file and the reason.
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
        /// The file or the plugin's output.
        what: String,
        /// The position and the reason.
        source: serde_json::Error,
    },
    /// A field of a configuration has a value that is not allowed.
    #[error("{what}: field {field}: {value:?} is not allowed: {rule}")]
    Field {
        /// The file or the plugin's output.
        what: String,
        /// The field.
        field: &'static str,
        /// The value, truncated.
        value: String,
        /// The values that are allowed.
        rule: &'static str,
    },
    /// A value for CNI_ARGS contains a character that plugins would read as a separator.
    #[error("{field} {value:?} cannot be passed to CNI plugins: ';', '=' and control characters are not allowed")]
    Argument {
        /// The key, for example K8S_POD_NAME.
        field: &'static str,
        /// The value, truncated.
        value: String,
    },
    /// The plugin is in none of the directories.
    #[error("CNI plugin {plugin} is in none of {dirs:?}; install the cluster's network plugin again")]
    NoPlugin {
        /// The plugin's name.
        plugin: String,
        /// The directories that were searched.
        dirs: Vec<PathBuf>,
    },
    /// The plugin does not support the version of the configuration.
    #[error("CNI plugin {plugin} does not support version {version} of the configuration, only {supported:?}")]
    Version {
        /// The plugin's name.
        plugin: String,
        /// The version of the configuration.
        version: String,
        /// The versions that the plugin reports.
        supported: Vec<String>,
    },
    /// The plugin could not be started, or its input or output failed.
    #[error("cannot run CNI plugin {plugin} for {command}")]
    Exec {
        /// The plugin's name.
        plugin: String,
        /// The command: ADD, DEL and so on.
        command: &'static str,
        /// The reason.
        source: io::Error,
    },
    /// The plugin exceeded its deadline and was killed.
    #[error(
        "CNI plugin {plugin} did not finish {command} within {seconds} s and was killed; see what it waits for, or raise network.plugin_timeout"
    )]
    Timeout {
        /// The plugin's name.
        plugin: String,
        /// The command: ADD, DEL and so on.
        command: &'static str,
        /// The deadline in seconds.
        seconds: u64,
    },
    /// The plugins together exceeded their time limit; the running one was killed.
    #[error("the CNI plugins did not finish {command} within {seconds} s")]
    TooSlow {
        /// The command: DEL or GC.
        command: &'static str,
        /// The limit in seconds.
        seconds: u64,
    },
    /// The plugin's output exceeded its limit, and the plugin was killed.
    #[error("CNI plugin {plugin} printed more than {limit} bytes for {command} and was killed")]
    TooMuchOutput {
        /// The plugin's name.
        plugin: String,
        /// The command: ADD, DEL and so on.
        command: &'static str,
        /// The limit in bytes.
        limit: u64,
    },
    /// The plugin returned an error object of the CNI specification.
    #[error("CNI plugin {plugin} refused {command} with code {code}: {message}")]
    Plugin {
        /// The plugin's name.
        plugin: String,
        /// The command: ADD, DEL and so on.
        command: &'static str,
        /// The error code; codes below 100 are defined by the specification.
        code: u64,
        /// The message and details of the plugin.
        message: String,
    },
    /// The plugin failed without an error object.
    #[error("CNI plugin {plugin} failed {command} with {status}: {output}")]
    Failed {
        /// The plugin's name.
        plugin: String,
        /// The command: ADD, DEL and so on.
        command: &'static str,
        /// The exit status or signal.
        status: String,
        /// The plugin's output, or that there is none.
        output: String,
    },
    /// CHECK was called for a pod that has no network.
    #[error("no CNI result is kept for pod {pod}")]
    NotAttached {
        /// The pod.
        pod: String,
    },
    /// A plugin that was started for the pod earlier still runs, perhaps one of a daemon that was killed.
    #[error("a CNI plugin still runs for pod {pod}")]
    Busy {
        /// The pod.
        pod: String,
    },
    /// The standard input of a plugin could not be prepared.
    #[error("cannot prepare the input of CNI plugin {plugin}")]
    Input {
        /// The plugin's name.
        plugin: String,
        /// The reason.
        source: io::Error,
    },
    /// A blocking task panicked or was cancelled.
    #[error(transparent)]
    Task(#[from] TaskError),
}

impl Classify for CniError {
    fn kind(&self) -> FailureKind {
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
            | CniError::Failed { .. } => FailureKind::Unavailable,
            CniError::File { source } => source.kind(),
            CniError::Argument { .. } => FailureKind::Invalid,
            CniError::Timeout { .. } | CniError::TooSlow { .. } => FailureKind::Timeout,
            CniError::NotAttached { .. } => FailureKind::NotFound,
            CniError::Busy { .. } => FailureKind::Unavailable,
            CniError::Input { source, .. } => source.kind().into(),
            CniError::Task(error) => error.kind(),
        }
    }
}
