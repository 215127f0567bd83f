//! Reads the keys that earlier versions had for durations: numbers of seconds, under names that end in `_seconds`.

use super::key::KeyPath;
use super::problem::ConfigProblem;
use super::syntax::{TextPosition, describe};
use serde::Deserialize;
use serde::de::IntoDeserializer;
use std::borrow::Cow;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// A key of an earlier version and the key that replaces it in the same section.
struct RenamedKey {
    section: &'static str,
    old: &'static str,
    new: &'static str,
}

const RENAMED_KEYS: [RenamedKey; 7] = [
    RenamedKey { section: "sandbox", old: "boot_seconds", new: "boot_timeout" },
    RenamedKey { section: "sandbox", old: "answer_seconds", new: "pod_request_timeout" },
    RenamedKey { section: "sandbox", old: "undo_seconds", new: "teardown_timeout" },
    RenamedKey { section: "sandbox", old: "volume_cache_seconds", new: "volume_cache_ttl" },
    RenamedKey { section: "network", old: "plugin_seconds", new: "plugin_timeout" },
    RenamedKey { section: "streaming", old: "idle_seconds", new: "idle_timeout" },
    RenamedKey { section: "images", old: "progress_seconds", new: "progress_timeout" },
];

/// Returns the paths of the old keys.
#[cfg(test)]
pub(crate) fn old_keys() -> impl Iterator<Item = String> {
    RENAMED_KEYS.iter().map(|key| format!("{}.{}", key.section, key.old))
}

/// Replaces the old keys in a parsed file by the new ones. Returns a warning for each replaced key, and the mistakes: an old key
/// beside the new one, or with a value that is no number of seconds. Such an old key is removed.
pub(super) fn replace_old_keys(file: &mut DeTable<'_>, text: &str) -> (Vec<String>, Vec<ConfigProblem>) {
    let (mut warnings, mut problems) = (Vec::new(), Vec::new());
    for RenamedKey { section, old, new } in RENAMED_KEYS {
        let Some(DeValue::Table(table)) = file.get_mut(section).map(Spanned::get_mut) else { continue };
        let Some((key, value)) = table.remove_entry(old) else { continue };
        let mut refuse = |start: usize, message: String| {
            let path = KeyPath::from(section).child(old);
            problems.push(ConfigProblem::new(Some(TextPosition::new(text, start)), Some(&path), message));
        };
        if table.contains_key(new) {
            let message = format!("{section}.{old} and {section}.{new} are the same setting; remove {section}.{old}");
            refuse(key.span().start, message);
            continue;
        }
        let span = value.span();
        let seconds = match u64::deserialize(value.into_deserializer()) {
            Ok(seconds) => seconds,
            Err(error) => {
                refuse(span.start, describe(error.message()));
                continue;
            }
        };
        let text = format!("{seconds}s");
        warnings.push(format!("configuration key {section}.{old} is deprecated; write {section}.{new} = {text:?}"));
        let value = DeValue::String(Cow::Owned(text));
        table.insert(Spanned::new(key.span(), Cow::Borrowed(new)), Spanned::new(span, value));
    }
    (warnings, problems)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Config, ConfigError};
    use std::error::Error;
    use std::path::Path;
    use std::time::Duration;

    fn parse(text: &str) -> Result<(Config, Vec<String>), ConfigError> {
        Config::parse_with_warnings(text, Path::new("c.toml"))
    }

    /// Reads the value of a key from a serialized configuration.
    fn value_of(config: &Config, section: &str, key: &str) -> String {
        let value = toml::Value::try_from(config).unwrap();
        value[section][key].as_str().unwrap().to_owned()
    }

    #[test]
    fn an_old_key_is_read_with_a_warning_that_names_the_new_key() {
        for RenamedKey { section, old, new } in RENAMED_KEYS {
            let (config, warnings) = parse(&format!("[{section}]\n{old} = 42\n")).unwrap();
            assert_eq!(value_of(&config, section, new), "42s");
            let warning = format!("configuration key {section}.{old} is deprecated; write {section}.{new} = \"42s\"");
            assert_eq!(warnings, [warning]);
        }
        let text = "[sandbox]\nundo_seconds = 1\nanswer_seconds = 0x10\n[streaming]\nidle_seconds = 604_800\n";
        let (config, warnings) = parse(text).unwrap();
        assert_eq!(warnings.len(), 3);
        assert_eq!(config.sandbox.teardown_timeout, Duration::from_secs(1));
        assert_eq!(config.sandbox.pod_request_timeout, Duration::from_secs(16));
        assert_eq!(config.streaming.idle_timeout, Duration::from_secs(604_800));
    }

    #[test]
    fn a_new_key_is_read_without_a_warning() {
        for RenamedKey { section, new, .. } in RENAMED_KEYS {
            let (config, warnings) = parse(&format!("[{section}]\n{new} = \"42s\"\n")).unwrap();
            assert_eq!(value_of(&config, section, new), "42s");
            assert_eq!(warnings, [""; 0]);
        }
        let (config, _) = parse("[sandbox]\nboot_timeout = \"1h\"\nteardown_timeout = \"1500ms\"\n").unwrap();
        assert_eq!(config.sandbox.boot_timeout, Duration::from_secs(3600));
        assert_eq!(config.sandbox.teardown_timeout, Duration::from_millis(1500));
    }

    #[test]
    fn the_old_and_the_new_key_together_are_an_error() {
        for RenamedKey { section, old, new } in RENAMED_KEYS {
            let error = parse(&format!("[{section}]\n{old} = 42\n{new} = \"42s\"\n")).unwrap_err();
            let expected = format!("{section}.{old} and {section}.{new} are the same setting; remove {section}.{old}");
            let cause = error.source().unwrap().to_string();
            assert!(cause.ends_with(&expected) && cause.starts_with("line 2"), "{cause}");
        }
    }

    #[test]
    fn a_new_key_needs_a_unit_and_an_old_one_has_none() {
        for (text, place, reason) in [
            (
                "[sandbox]\nboot_timeout = 30\n",
                "line 2, column 16",
                "duration 30 has no unit: write \"30s\" for seconds",
            ),
            ("[sandbox]\nboot_timeout = \"30\"\n", "line 2, column 16", "duration \"30\" has no unit"),
            ("[sandbox]\nboot_timeout = \"1d\"\n", "line 2, column 16", "unit \"d\" is not known"),
            ("[sandbox]\nboot_timeout = true\n", "line 2, column 16", "a duration with a unit, such as \"30s\""),
            ("[sandbox]\nundo_seconds = \"30s\"\n", "line 2, column 16", "invalid type: string"),
            ("[sandbox]\nundo_seconds = -1\n", "line 2, column 16", "invalid value: integer `-1`"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(matches!(error, ConfigError::Invalid { .. }), "{error:?}");
            let cause = error.source().unwrap().to_string();
            assert!(cause.contains(place) && cause.contains(reason), "{cause}");
        }
    }

    #[test]
    fn an_old_key_outside_its_range_is_reported_under_the_new_key() {
        let error = parse("[sandbox]\nundo_seconds = 0\n").unwrap_err();
        let cause = error.source().unwrap().to_string();
        assert_eq!(cause, "line 2, column 16: sandbox.teardown_timeout = \"0s\": 1s to 1h are allowed");
    }
}
