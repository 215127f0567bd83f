//! Finds and validates the network configuration, and builds the input of each plugin from it.

use super::CniError;
use nacelle_base::json;
use serde_json::{Map, Value, json};
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

/// The maximum size in bytes of a configuration file; a larger one is a mistake.
const MAX_FILE: u64 = 1 << 20;
const MAX_PLUGINS: usize = 32;

/// A supported version of the CNI specification.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Version {
    V0_3_0,
    V0_3_1,
    /// Adds CHECK, and the previous result at DEL.
    V0_4_0,
    /// Drops the IP version of addresses in results.
    V1_0_0,
    /// Adds STATUS and GC.
    V1_1_0,
}

impl Version {
    const ALL: [Version; 5] = [Version::V0_3_0, Version::V0_3_1, Version::V0_4_0, Version::V1_0_0, Version::V1_1_0];

    pub fn as_str(self) -> &'static str {
        match self {
            Version::V0_3_0 => "0.3.0",
            Version::V0_3_1 => "0.3.1",
            Version::V0_4_0 => "0.4.0",
            Version::V1_0_0 => "1.0.0",
            Version::V1_1_0 => "1.1.0",
        }
    }

    pub fn parse(text: &str) -> Option<Version> {
        Version::ALL.into_iter().find(|version| version.as_str() == text)
    }
}

/// A validated network: a chain of at least one plugin.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct NetworkList {
    pub name: String,
    pub version: Version,
    pub disable_check: bool,
    pub disable_gc: bool,
    pub plugins: Vec<Plugin>,
}

/// One plugin of a chain, and its configuration as written.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Plugin {
    /// The name of the binary, without a path.
    pub kind: String,
    conf: Map<String, Value>,
}

impl NetworkList {
    /// Returns the network of this directory: the first `*.conf`, `*.conflist` or `*.json` in lexical order. Blocks. The result
    /// is not cached, because reading a few KB is cheap.
    pub fn load(dir: &Path) -> Result<NetworkList, CniError> {
        let path = find_files(dir, &["conf", "conflist", "json"])?.into_iter().next().ok_or_else(|| no_config(dir))?;
        let bytes = read_limited(&path, MAX_FILE)?;
        let what = path.display().to_string();
        let mut value = parse_object(&what, &bytes)?;
        if path.extension().is_some_and(|extension| extension == "conflist") {
            add_plugins_of_directory(&what, dir, &mut value)?;
            NetworkList::from_list(&what, value)
        } else {
            NetworkList::from_single(&what, value)
        }
    }

    /// Validates a configuration list.
    pub fn from_list(what: &str, mut list: Map<String, Value>) -> Result<NetworkList, CniError> {
        let plugins = match list.remove("plugins").unwrap_or_default() {
            Value::Array(plugins) => plugins,
            other => return Err(field(what, "plugins", &other, "a list of plugins is expected")),
        };
        if !(1..=MAX_PLUGINS).contains(&plugins.len()) {
            return Err(field(what, "plugins", &json!(plugins.len()), "1 to 32 plugins are expected"));
        }
        let plugins = plugins.into_iter().map(|plugin| match plugin {
            Value::Object(conf) => Plugin::check(what, conf),
            other => Err(field(what, "plugins", &other, "an object is expected for each plugin")),
        });
        Ok(NetworkList {
            name: name(what, &list)?,
            version: version(what, &list)?,
            disable_check: flag(what, &list, "disableCheck")?,
            disable_gc: flag(what, &list, "disableGC")?,
            plugins: plugins.collect::<Result<_, _>>()?,
        })
    }

    /// Validates the configuration of a single plugin: a list of one.
    pub fn from_single(what: &str, conf: Map<String, Value>) -> Result<NetworkList, CniError> {
        Ok(NetworkList {
            name: name(what, &conf)?,
            version: version(what, &conf)?,
            disable_check: false,
            disable_gc: false,
            plugins: vec![Plugin::check(what, conf)?],
        })
    }

    /// Returns the list in the form that `from_list` reads, for the attachment record.
    pub fn to_list(&self) -> Map<String, Value> {
        let plugins = self.plugins.iter().map(|plugin| Value::Object(plugin.conf.clone())).collect();
        Map::from_iter([
            ("cniVersion".to_owned(), self.version.as_str().into()),
            ("name".to_owned(), self.name.clone().into()),
            ("disableCheck".to_owned(), self.disable_check.into()),
            ("disableGC".to_owned(), self.disable_gc.into()),
            ("plugins".to_owned(), Value::Array(plugins)),
        ])
    }
}

impl Plugin {
    fn check(what: &str, conf: Map<String, Value>) -> Result<Plugin, CniError> {
        const RULE: &str = "the name of a plugin is expected, without a path";
        let kind = conf.get("type").unwrap_or(&Value::Null);
        let good = kind.as_str().filter(|kind| {
            !kind.is_empty() && !kind.starts_with('.') && kind.len() <= 255 && !kind.contains(['/', '\0'])
        });
        let kind = good.ok_or_else(|| field(what, "type", kind, RULE))?.to_owned();
        match conf.get("capabilities") {
            None | Some(Value::Null) => (),
            Some(Value::Object(all)) if all.values().all(Value::is_boolean) => (),
            Some(other) => return Err(field(what, "capabilities", other, "an object of true and false is expected")),
        }
        Ok(Plugin { kind, conf })
    }

    /// Returns whether the plugin declares this capability.
    pub fn has_capability(&self, capability: &str) -> bool {
        self.conf.get("capabilities").and_then(|all| all.get(capability)) == Some(&Value::Bool(true))
    }

    /// Returns the standard input of the plugin: its configuration, the arguments of its capabilities, and `extra` (for example
    /// the previous result).
    pub fn input(&self, network: &NetworkList, arguments: &Map<String, Value>, extra: Map<String, Value>) -> Vec<u8> {
        let mut input = self.conf.clone();
        input.insert("name".to_owned(), network.name.clone().into());
        input.insert("cniVersion".to_owned(), network.version.as_str().into());
        let wanted = arguments.iter().filter(|(capability, _)| self.has_capability(capability));
        let wanted = Map::from_iter(wanted.map(|(capability, argument)| (capability.clone(), argument.clone())));
        if !wanted.is_empty() {
            input.insert("runtimeConfig".to_owned(), Value::Object(wanted));
        }
        input.extend(extra);
        Value::Object(input).to_string().into_bytes()
    }
}

/// Appends to a list the plugins that lie in the directory of its name beside it (CNI 1.1.0, "Configuration format"; since then a list
/// may also have none of its own).
fn add_plugins_of_directory(what: &str, dir: &Path, list: &mut Map<String, Value>) -> Result<(), CniError> {
    if flag(what, list, "loadOnlyInlinedPlugins")? {
        return Ok(());
    }
    // The name has no path separator.
    let files = find_files(&dir.join(name(what, list)?), &["conf"])?;
    if files.is_empty() {
        return Ok(());
    }
    let plugins = list.entry("plugins").or_insert_with(|| Value::Array(Vec::new()));
    // A value of another type is refused with the list.
    let Value::Array(plugins) = plugins else { return Ok(()) };
    // One more than allowed is refused with the list, too.
    for path in files.into_iter().take(MAX_PLUGINS + 1) {
        let plugin = parse_object(&path.display().to_string(), &read_limited(&path, MAX_FILE)?)?;
        plugins.push(Value::Object(plugin));
    }
    Ok(())
}

fn no_config(dir: &Path) -> CniError {
    CniError::NoConfig { dir: dir.to_owned() }
}

/// Returns the files of a directory with one of these extensions, in lexical order; none if there is no such directory.
fn find_files(dir: &Path, extensions: &[&str]) -> Result<Vec<PathBuf>, CniError> {
    let unreadable = |source| nacelle_base::files::at("read", dir)(source);
    let entries = match fs::read_dir(dir) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.map_err(unreadable)?,
    };
    let mut files = Vec::new();
    for entry in entries {
        let path = entry.map_err(unreadable)?.path();
        if path.extension().is_some_and(|end| extensions.iter().any(|known| end == *known)) && path.is_file() {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

/// Reads a file of at most `limit` bytes.
pub(super) fn read_limited(path: &Path, limit: u64) -> Result<Vec<u8>, CniError> {
    let mut bytes = Vec::new();
    let read = File::open(path).and_then(|file| file.take(limit + 1).read_to_end(&mut bytes));
    read.map_err(nacelle_base::files::at("read", path))?;
    if bytes.len() as u64 > limit {
        return Err(CniError::TooLarge { path: path.to_owned(), limit });
    }
    Ok(bytes)
}

pub(super) fn parse_object(what: &str, bytes: &[u8]) -> Result<Map<String, Value>, CniError> {
    json::read(bytes).map_err(|source| CniError::Json { what: what.to_owned(), source })
}

fn name(what: &str, conf: &Map<String, Value>) -> Result<String, CniError> {
    const RULE: &str = "letters and digits are expected, after the first one also '.', '_' and '-'";
    let value = conf.get("name").unwrap_or(&Value::Null);
    let text = value.as_str().filter(|text| {
        text.len() <= 255
            && text.starts_with(|first: char| first.is_ascii_alphanumeric())
            && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-'))
    });
    text.map(str::to_owned).ok_or_else(|| field(what, "name", value, RULE))
}

/// The version is the highest supported one of `cniVersions` (since 1.1.0), or else `cniVersion`.
fn version(what: &str, conf: &Map<String, Value>) -> Result<Version, CniError> {
    const RULE: &str = "0.3.0, 0.3.1, 0.4.0, 1.0.0 or 1.1.0 is expected";
    let known = |value: &Value| value.as_str().and_then(Version::parse);
    if let Some(several) = conf.get("cniVersions").filter(|value| !value.is_null()) {
        let best = several.as_array().into_iter().flatten().chain(conf.get("cniVersion")).filter_map(known).max();
        return best.ok_or_else(|| field(what, "cniVersions", several, RULE));
    }
    let value = conf.get("cniVersion").unwrap_or(&Value::Null);
    known(value).ok_or_else(|| field(what, "cniVersion", value, RULE))
}

/// Older configurations may write a flag as a string.
fn flag(what: &str, conf: &Map<String, Value>, name: &'static str) -> Result<bool, CniError> {
    match conf.get(name) {
        None | Some(Value::Null) => Ok(false),
        Some(Value::Bool(flag)) => Ok(*flag),
        Some(Value::String(word)) if word.eq_ignore_ascii_case("true") => Ok(true),
        Some(Value::String(word)) if word.eq_ignore_ascii_case("false") => Ok(false),
        Some(other) => Err(field(what, name, other, "true or false is expected")),
    }
}

pub(super) fn field(what: &str, field: &'static str, value: &Value, rule: &'static str) -> CniError {
    CniError::Field { what: what.to_owned(), field, value: value.to_string().chars().take(80).collect(), rule }
}
