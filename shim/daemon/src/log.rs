//! Starts logging, and changes which events a running daemon logs.

use crate::bounded_log::BoundedLog;
use clap::ValueEnum;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;
use std::str::FromStr;
use std::sync::{Arc, Mutex, PoisonError};
use tracing_subscriber::Registry;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::prelude::*;
use tracing_subscriber::reload;

/// The environment variable with the filter.
const FILTER_VARIABLE: &str = "NACELLE_LOG";
/// The beginning of the modules of this project.
const OWN_MODULES: &str = "nacelle";

/// The format of the log on standard error.
#[derive(Clone, Copy, ValueEnum)]
pub enum LogFormat {
    /// Text for humans.
    Text,
    /// One JSON object per line.
    Json,
}

impl LogFormat {
    /// The environment variable with the format.
    pub const VARIABLE: &str = "NACELLE_LOG_FORMAT";
}

/// Which events are logged, as text: levels and `MODULE=LEVEL`, divided by commas. A level above info holds for Nacelle's own
/// modules only: at debug the HTTP libraries alone would fill the log.
#[derive(Clone, Debug, PartialEq)]
pub struct LogFilter {
    text: String,
    targets: Targets,
}

/// A log filter with an invalid part.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the log filter {text:?} is invalid at {part:?}: a level (error, warn, info, debug, trace, off) and MODULE=LEVEL, divided by commas, \
     are allowed"
)]
pub struct LogFilterError {
    /// The filter.
    pub text: String,
    /// Its invalid part.
    pub part: String,
}

impl Default for LogFilter {
    fn default() -> LogFilter {
        let targets = Targets::new().with_default(LevelFilter::INFO).with_target(OWN_MODULES, LevelFilter::INFO);
        LogFilter { text: "info".to_owned(), targets }
    }
}

impl FromStr for LogFilter {
    type Err = LogFilterError;

    fn from_str(text: &str) -> Result<LogFilter, LogFilterError> {
        let mut general = LevelFilter::INFO;
        let mut modules = Vec::new();
        for part in text.split(',').map(str::trim) {
            let invalid = || LogFilterError { text: text.to_owned(), part: part.to_owned() };
            let (module, level) = part.split_once('=').map_or((None, part), |(module, level)| (Some(module), level));
            // The library takes an empty word and numbers for levels, too.
            let named = level.chars().all(|letter| letter.is_ascii_alphabetic()) && !level.is_empty();
            let level = level.parse().ok().filter(|_| named).ok_or_else(invalid)?;
            match module {
                None => general = level,
                Some(module) if is_module(module) => modules.push((module, level)),
                Some(_) => return Err(invalid()),
            }
        }
        let targets = Targets::new().with_default(general.min(LevelFilter::INFO)).with_target(OWN_MODULES, general);
        Ok(LogFilter { text: text.to_owned(), targets: targets.with_targets(modules) })
    }
}

impl Serialize for LogFilter {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.text)
    }
}

impl<'de> Deserialize<'de> for LogFilter {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<LogFilter, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}

impl fmt::Display for LogFilter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

fn is_module(text: &str) -> bool {
    !text.is_empty() && text.chars().all(|letter| letter.is_ascii_alphanumeric() || matches!(letter, '_' | ':'))
}

/// The log of this process, whose filter can be changed.
#[derive(Clone)]
pub struct LogControl {
    handle: reload::Handle<Targets, Registry>,
    filter: Arc<Mutex<LogFilter>>,
    /// The filter of the environment, which the configuration does not replace.
    from_environment: Option<LogFilter>,
}

impl LogControl {
    /// Returns the control of a log with this filter, and the layer that filters it.
    pub fn new(filter: LogFilter) -> (LogControl, reload::Layer<Targets, Registry>) {
        let (layer, handle) = reload::Layer::new(filter.targets.clone());
        (LogControl { handle, filter: Arc::new(Mutex::new(filter)), from_environment: None }, layer)
    }

    /// Returns the filter in use.
    pub fn filter(&self) -> LogFilter {
        self.filter.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Uses another filter from now on.
    pub fn set(&self, filter: LogFilter) {
        let mut current = self.filter.lock().unwrap_or_else(PoisonError::into_inner);
        match self.handle.reload(filter.targets.clone()) {
            Ok(()) => *current = filter,
            Err(error) => tracing::error!(%error, "BUG: the log filter cannot be changed"),
        }
    }

    /// Uses the filter of the environment, otherwise that of the configuration.
    pub fn configure(&self, configured: &LogFilter) {
        let filter = self.from_environment.as_ref().unwrap_or(configured);
        if *filter != self.filter() {
            self.set(filter.clone());
        }
    }
}

impl fmt::Debug for LogControl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LogControl").field("filter", &self.filter().text).finish_non_exhaustive()
    }
}

/// Starts logging to standard error, with the filter in NACELLE_LOG or, without it, from level info.
pub fn init_log(format: LogFormat) -> LogControl {
    init(format, std::io::stderr)
}

/// As [`init_log`], for a process whose standard error is a file: the file keeps the newest 1 MiB.
pub fn init_pod_log(format: LogFormat) {
    init(format, BoundedLog::stderr());
}

fn init(format: LogFormat, writer: impl for<'a> MakeWriter<'a> + Send + Sync + 'static) -> LogControl {
    let variable = std::env::var_os(FILTER_VARIABLE).map(|text| text.to_string_lossy().into_owned());
    let variable = variable.filter(|text| !text.is_empty());
    let (from_environment, invalid) = match variable.map(|text| text.parse::<LogFilter>()) {
        None => (None, None),
        Some(Ok(filter)) => (Some(filter), None),
        Some(Err(error)) => (None, Some(error)),
    };
    let filter = from_environment.clone().unwrap_or_default();
    let (control, targets) = LogControl::new(filter);
    let layer = tracing_subscriber::fmt::layer().with_writer(writer).with_ansi(false).log_internal_errors(false);
    let registry = tracing_subscriber::registry();
    match format {
        LogFormat::Text => registry.with(layer.with_target(false).with_filter(targets)).init(),
        LogFormat::Json => registry.with(layer.json().with_filter(targets)).init(),
    }
    if let Some(error) = invalid {
        tracing::warn!("{FILTER_VARIABLE} is not used: {error}");
    }
    LogControl { from_environment, ..control }
}

/// Starts logging to standard output, which a machine pod's flight recorder keeps together with the guest's console.
pub fn init_recorder_log() {
    let layer = tracing_subscriber::fmt::layer().with_writer(std::io::stdout).with_ansi(false).with_target(false);
    tracing_subscriber::registry().with(layer.with_filter(LogFilter::default().targets)).init();
}

#[cfg(test)]
mod tests {
    use super::*;
    use tracing::Level;

    #[test]
    fn a_level_above_info_holds_for_our_own_modules() {
        let cases = [
            ("info", Level::INFO, Level::INFO),
            ("debug", Level::DEBUG, Level::INFO),
            ("TRACE", Level::TRACE, Level::INFO),
            ("warn", Level::WARN, Level::WARN),
            ("nacelle=debug", Level::DEBUG, Level::INFO),
            ("nacelle_daemon=debug, warn", Level::DEBUG, Level::WARN),
            ("debug,h2=trace", Level::DEBUG, Level::TRACE),
            ("debug,nacelle_daemon=warn", Level::WARN, Level::INFO),
        ];
        let all = [Level::TRACE, Level::DEBUG, Level::INFO, Level::WARN, Level::ERROR];
        for (text, own, foreign) in cases {
            let filter: LogFilter = text.parse().unwrap();
            assert_eq!(filter.to_string(), text);
            for (target, lowest) in [("nacelle_daemon::cri", own), ("h2::proto", foreign)] {
                let found = all.into_iter().find(|level| filter.targets.would_enable(target, level));
                assert_eq!(found, Some(lowest), "{text} {target}");
            }
        }
        assert_eq!("info".parse(), Ok(LogFilter::default()));
        let off: LogFilter = "off".parse().unwrap();
        assert!(!off.targets.would_enable("nacelle", &Level::ERROR));
    }

    #[test]
    fn what_is_no_level_is_refused_by_name() {
        for (text, wrong) in [
            ("", ""),
            ("debg", "debg"),
            ("info,", ""),
            ("3", "3"),
            ("a=debg", "a=debg"),
            ("=info", "=info"),
            ("a b=info", "a b=info"),
        ] {
            let error = text.parse::<LogFilter>().unwrap_err();
            assert_eq!(error, LogFilterError { text: text.to_owned(), part: wrong.to_owned() });
        }
    }
}
