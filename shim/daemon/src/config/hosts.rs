//! Reads the settings of registries from a directory in containerd's format: DIRECTORY/REGISTRY/hosts.toml, where REGISTRY is a host
//! and port, or `_default`. What Nacelle cannot do is refused by name.

use super::{RegistrySettings, SyntaxError};
use nacelle_base::files::{FileError, at};
use nacelle_base::{Classify, FailureKind};
use serde::Deserialize;
use serde::de::IgnoredAny;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use toml::de::{DeTable, DeValue, ValueDeserializer};

/// The maximum size of a file in bytes.
const MAX_FILE: u64 = 1 << 20;

/// Why the directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum HostsError {
    /// A directory or file cannot be read.
    #[error(transparent)]
    File(#[from] FileError),
    /// A file is not TOML, or a key or value is unknown. The cause has line and column.
    #[error("cannot parse {path}", path = path.display())]
    Syntax {
        /// The file.
        path: PathBuf,
        /// Line, column and reason.
        source: SyntaxError,
    },
    /// A setting that Nacelle does not support.
    #[error("{path}: {key}: {rule}", path = path.display())]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// The key, with its sections.
        key: String,
        /// What is supported instead.
        rule: &'static str,
    },
    /// A host has different settings in two places.
    #[error("{path}: {host} has other settings elsewhere; a host has the same ones wherever it is named", path = path.display())]
    Conflict {
        /// The file.
        path: PathBuf,
        /// The host and port.
        host: String,
    },
}

impl Classify for HostsError {
    fn kind(&self) -> FailureKind {
        match self {
            HostsError::File(error) => error.kind(),
            HostsError::Syntax { .. } | HostsError::Unsupported { .. } | HostsError::Conflict { .. } => {
                FailureKind::Invalid
            }
        }
    }
}

/// The settings of one host in a file: the keys of `[host."URL"]`, and at the top level those of the registry itself.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Endpoint {
    capabilities: Option<Vec<String>>,
    ca: Files,
    client: ClientFiles,
    skip_verify: bool,
    override_path: bool,
    header: BTreeMap<String, IgnoredAny>,
    dial_timeout: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Files {
    One(PathBuf),
    Several(Vec<PathBuf>),
}

impl Default for Files {
    fn default() -> Self {
        Files::Several(Vec::new())
    }
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum ClientFiles {
    One(PathBuf),
    Several(Vec<Files>),
}

impl Default for ClientFiles {
    fn default() -> Self {
        ClientFiles::Several(Vec::new())
    }
}

/// Returns the settings of all registries and mirrors below the directory, by host and port. Blocks.
pub(super) fn read(directory: &Path) -> Result<BTreeMap<String, RegistrySettings>, HostsError> {
    let entries = fs::read_dir(directory).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    let mut names: Vec<_> = entries.map_err(at("read", directory))?.iter().map(fs::DirEntry::file_name).collect();
    names.sort();
    let mut registries = Registries::default();
    for name in names {
        let place = directory.join(&name);
        if let (Some(name), true) = (name.to_str(), place.is_dir()) {
            registries.add(&registry_name(name), &place)?;
        }
    }
    Ok(registries.with_default_mirrors())
}

/// Returns the registry that a directory is for: `host_5000_` is another form of `host:5000`.
fn registry_name(directory: &str) -> String {
    let parts = directory.strip_suffix('_').and_then(|rest| rest.rsplit_once('_'));
    match parts.filter(|(_, port)| port.parse::<u16>().is_ok()) {
        Some((host, port)) => format!("{host}:{port}"),
        None => directory.to_owned(),
    }
}

#[derive(Default)]
struct Registries {
    settings: BTreeMap<String, RegistrySettings>,
    /// The file that each host was first named in.
    places: BTreeMap<String, PathBuf>,
    /// The registries that have a file of their own.
    own: BTreeSet<String>,
}

impl Registries {
    /// Adds the settings of one registry and its mirrors.
    fn add(&mut self, registry: &str, directory: &Path) -> Result<(), HostsError> {
        let path = directory.join("hosts.toml");
        if !path.exists() {
            return without_file(directory);
        }
        let file = HostsFile { path: &path, directory };
        let (server, mut own, hosts) = file.parse(&file.text()?)?;
        if !self.own.insert(registry.to_owned()) {
            return Err(file.unsupported("directory", "another directory is for this registry, too"));
        }
        if registry == nacelle_image::DEFAULT_REGISTRY {
            if server.is_some() || own != RegistrySettings::default() {
                return Err(
                    file.unsupported("server", "_default has only hosts with the capabilities pull and resolve")
                );
            }
        } else {
            let server = server.as_deref().map(HostUrl::parse).transpose();
            let server = server.map_err(|rule| file.unsupported("server", rule))?;
            if server.as_ref().is_some_and(|server| !server.serves(registry)) {
                let rule = "must be the registry itself; name other hosts under [host.\"URL\"]";
                return Err(file.unsupported("server", rule));
            }
            let http = server.is_some_and(|server| server.http);
            file.check_tls("", http, &own)?;
            own.http = http;
        }
        let (mut mirrors, mut complete) = (Vec::new(), false);
        for (url, settings) in hosts {
            let section = section(&url);
            let url = HostUrl::parse(&url).map_err(|rule| file.unsupported(&section, rule))?;
            file.check_tls(&section, url.http, &settings)?;
            if url.serves(registry) {
                complete = true;
                let conflict = || HostsError::Conflict { path: path.clone(), host: registry.to_owned() };
                let settings = RegistrySettings { http: url.http, ..settings };
                own = merge(own, settings).ok_or_else(conflict)?;
            } else if complete {
                return Err(file.unsupported(&section, "the registry itself is asked last: name it after its mirrors"));
            } else {
                mirrors.push(url.to_string());
                self.set(&url.host, settings, &path)?;
            }
        }
        if registry != nacelle_image::DEFAULT_REGISTRY {
            self.set(registry, own, &path)?;
        }
        self.settings.entry(registry.to_owned()).or_default().mirrors = mirrors;
        Ok(())
    }

    /// Gives a host its settings, unless it has others already.
    fn set(&mut self, host: &str, settings: RegistrySettings, path: &Path) -> Result<(), HostsError> {
        let known = self.settings.entry(host.to_owned()).or_default();
        let place = self.places.entry(host.to_owned()).or_insert_with(|| path.to_owned());
        let is_less_checked = place != path && known.skip_tls_verify != settings.skip_tls_verify;
        let merged = merge(known.clone(), settings).filter(|_| !is_less_checked);
        *known = merged.ok_or_else(|| HostsError::Conflict { path: path.to_owned(), host: host.to_owned() })?;
        Ok(())
    }

    /// Returns all settings. A host that is named as a mirror only has the mirrors of `_default`, except itself.
    fn with_default_mirrors(mut self) -> BTreeMap<String, RegistrySettings> {
        let default = self.settings.get(nacelle_image::DEFAULT_REGISTRY).map(|default| default.mirrors.clone());
        for (host, settings) in self.settings.iter_mut().filter(|(host, _)| !self.own.contains(*host)) {
            let others =
                default.iter().flatten().filter(|url| url.split_once("://").is_none_or(|(_, rest)| rest != host));
            settings.mirrors = others.cloned().collect();
        }
        self.settings
    }
}

/// Returns the settings of a host that has these in two places, or `None` if they differ. The scheme stands in each URL, so that one
/// place with http is enough. The mirrors are the first ones.
fn merge(known: RegistrySettings, new: RegistrySettings) -> Option<RegistrySettings> {
    let (http, mirrors) = (known.http || new.http, known.mirrors);
    let bare = |settings| RegistrySettings { http: false, mirrors: Vec::new(), ..settings };
    let (before, new) = (bare(RegistrySettings { mirrors: Vec::new(), ..known }), bare(new));
    let settings = match (before == RegistrySettings::default(), new == RegistrySettings::default()) {
        (true, _) => new,
        (false, true) => before,
        (false, false) => Some(new).filter(|new| *new == before)?,
    };
    Some(RegistrySettings { http, mirrors, ..settings })
}

/// Returns the section of a URL for messages, without a password that the URL may have.
fn section(url: &str) -> String {
    format!("host.{:?}", url.rsplit_once('@').map_or(url, |(_, host)| host))
}

/// The URL of a host: `[http://|https://]HOST[:PORT][/v2]`.
struct HostUrl {
    http: bool,
    host: String,
}

impl HostUrl {
    fn parse(url: &str) -> Result<HostUrl, &'static str> {
        let (scheme, rest) = url.split_once("://").unwrap_or(("https", url));
        let http = scheme.eq_ignore_ascii_case("http");
        if !http && !scheme.eq_ignore_ascii_case("https") {
            return Err("the scheme must be http or https");
        }
        let (host, path) = rest.split_once('/').unwrap_or((rest, ""));
        let is_host = |byte: u8| byte.is_ascii_alphanumeric() || b"-._:[]".contains(&byte);
        match path.trim_end_matches('/') {
            "" | "v2" if !host.is_empty() && host.bytes().all(is_host) => Ok(HostUrl { http, host: host.to_owned() }),
            _ => Err("must be a host with at most a port, and no path but /v2"),
        }
    }

    /// Returns whether this is the host of the registry, and not a mirror of it.
    fn serves(&self, registry: &str) -> bool {
        let port = if self.http { ":80" } else { ":443" };
        let without = |host: &str| host.strip_suffix(port).unwrap_or(host).to_owned();
        let host = without(&self.host);
        host == without(registry) || (registry == "docker.io" && host == "registry-1.docker.io")
    }
}

impl fmt::Display for HostUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}", if self.http { "http" } else { "https" }, self.host)
    }
}

/// Accepts a directory without hosts.toml, unless it has certificates in docker's form.
fn without_file(directory: &Path) -> Result<(), HostsError> {
    let entries = fs::read_dir(directory).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    let is_certificate =
        |path: &Path| path.extension().is_some_and(|form| ["crt", "cert", "key"].iter().any(|known| form == *known));
    match entries.map_err(at("read", directory))?.iter().map(fs::DirEntry::path).find(|path| is_certificate(path)) {
        None => Ok(()),
        Some(path) => {
            let rule = "certificates without a hosts.toml are not used: name them in it (ca, client)";
            Err(HostsError::Unsupported { path, key: "certificate".to_owned(), rule })
        }
    }
}

/// The parsed file: the URL of `server`, the settings of the registry itself, and the URLs of hosts with theirs, in their order.
type Parsed = (Option<String>, RegistrySettings, Vec<(String, RegistrySettings)>);

struct HostsFile<'a> {
    path: &'a Path,
    directory: &'a Path,
}

impl HostsFile<'_> {
    fn text(&self) -> Result<String, HostsError> {
        let mut text = String::new();
        let file = File::open(self.path).map_err(at("open", self.path))?;
        file.take(MAX_FILE + 1).read_to_string(&mut text).map_err(at("read", self.path))?;
        if text.len() as u64 > MAX_FILE {
            return Err(self.unsupported("size", "the file has more than 1 MiB"));
        }
        Ok(text)
    }

    fn parse(&self, text: &str) -> Result<Parsed, HostsError> {
        let syntax = |error: toml::de::Error| HostsError::Syntax {
            path: self.path.to_owned(),
            source: SyntaxError::new(&error, text),
        };
        let mut file = DeTable::parse(text).map_err(syntax)?;
        let server = file.get_mut().remove("server").map(|value| String::deserialize(ValueDeserializer::from(value)));
        let hosts = match file.get_mut().remove("host").map(toml::Spanned::into_inner) {
            None => DeTable::new(),
            Some(DeValue::Table(hosts)) => hosts,
            Some(_) => return Err(self.unsupported("host", "must be a table with a section for each URL")),
        };
        let own = Endpoint::deserialize(toml::Deserializer::from(file)).map_err(syntax)?;
        let rule = "the registry itself serves pulls";
        let own = self.settings("", own)?.ok_or_else(|| self.unsupported("capabilities", rule))?;
        // A table of TOML has no order; that of the text counts.
        let mut hosts: Vec<_> = hosts.into_iter().collect();
        hosts.sort_by_key(|(url, _)| url.span().start);
        let mut found = Vec::new();
        for (url, value) in hosts {
            let url = url.into_inner().into_owned();
            let endpoint = Endpoint::deserialize(ValueDeserializer::from(value)).map_err(syntax)?;
            if let Some(settings) = self.settings(&format!("{}.", section(&url)), endpoint)? {
                found.push((url, settings));
            }
        }
        Ok((server.transpose().map_err(syntax)?, own, found))
    }

    /// Returns the settings of a host, or `None` if it serves pushes only. `prefix` is the section of its keys.
    fn settings(&self, prefix: &str, endpoint: Endpoint) -> Result<Option<RegistrySettings>, HostsError> {
        let unsupported = |key: &str, rule| Err(self.unsupported(&format!("{prefix}{key}"), rule));
        // An empty list means all.
        if let Some(capabilities) = endpoint.capabilities.as_ref().filter(|list| !list.is_empty()) {
            let has = |name: &str| capabilities.iter().any(|capability| capability.eq_ignore_ascii_case(name));
            let known = ["pull", "resolve", "push"];
            if !capabilities.iter().all(|word| known.iter().any(|known| word.eq_ignore_ascii_case(known))) {
                return unsupported("capabilities", "pull, resolve and push are allowed");
            }
            match (has("pull"), has("resolve")) {
                (true, true) => {}
                (false, false) => return Ok(None),
                _ => return unsupported("capabilities", "a host has both pull and resolve, or neither"),
            }
        }
        if endpoint.override_path {
            return unsupported("override_path", "only false is supported");
        }
        if !endpoint.header.is_empty() {
            return unsupported("header", "is not supported");
        }
        if endpoint.dial_timeout.is_some() {
            return unsupported("dial_timeout", "is not supported; images.progress_timeout limits each request");
        }
        let ca = match endpoint.ca {
            Files::One(file) => vec![file],
            Files::Several(files) => files,
        };
        let client = match endpoint.client {
            ClientFiles::One(file) => vec![vec![file]],
            ClientFiles::Several(clients) => clients
                .into_iter()
                .map(|files| match files {
                    Files::One(file) => vec![file],
                    Files::Several(files) => files,
                })
                .collect(),
        };
        if ca.len() > 1 {
            return unsupported("ca", "name one file; it may contain several certificates");
        }
        let at_place = |file: &PathBuf| self.directory.join(file);
        // A single file has certificate and key.
        let (certificate, key) = match client.as_slice() {
            [] => (None, None),
            [files] => match files.as_slice() {
                [both] => (Some(both), Some(both)),
                [certificate, key] if !key.as_os_str().is_empty() => (Some(certificate), Some(key)),
                [both, _] => (Some(both), Some(both)),
                _ => return unsupported("client", "name a file, or a certificate and its key"),
            },
            _ => return unsupported("client", "name one client certificate"),
        };
        Ok(Some(RegistrySettings {
            skip_tls_verify: endpoint.skip_verify,
            ca_file: ca.first().map(at_place),
            client_cert_file: certificate.map(at_place),
            client_key_file: key.map(at_place),
            ..RegistrySettings::default()
        }))
    }

    /// Refuses certificates of a host that is connected to by plain http.
    fn check_tls(&self, section: &str, http: bool, settings: &RegistrySettings) -> Result<(), HostsError> {
        if http && (settings.ca_file.is_some() || settings.client_cert_file.is_some()) {
            return Err(self.unsupported(section, "ca and client need https"));
        }
        Ok(())
    }

    fn unsupported(&self, key: &str, rule: &'static str) -> HostsError {
        HostsError::Unsupported { path: self.path.to_owned(), key: key.to_owned(), rule }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacelle_base::Chain;

    /// The settings of a directory with these files: their registries and their texts.
    fn read_files(files: &[(&str, &str)]) -> Result<BTreeMap<String, RegistrySettings>, String> {
        let directory = tempfile::tempdir().unwrap();
        for (registry, text) in files {
            fs::create_dir(directory.path().join(registry)).unwrap();
            fs::write(directory.path().join(registry).join("hosts.toml"), text).unwrap();
        }
        let prefix = directory.path().display().to_string();
        let clean = |file: Option<PathBuf>| file.map(|file| file.strip_prefix(&prefix).unwrap_or(&file).to_owned());
        let registries = read(directory.path()).map_err(|error| Chain(&error).to_string().replace(&prefix, "D"))?;
        Ok(registries
            .into_iter()
            .map(|(host, settings)| {
                let ca_file = clean(settings.ca_file.clone());
                (host, RegistrySettings { ca_file, ..settings })
            })
            .collect())
    }

    #[test]
    fn mirrors_are_in_the_order_of_the_text() {
        let text = r#"
            server = "https://registry-1.docker.io"
            [host."https://z.example/v2/"]
              capabilities = ["pull", "resolve"]
              ca = "z.pem"
            [host."http://a.example:5000"]
            [host."https://push.example"]
              capabilities = ["push"]
            [host."b.example"]
              skip_verify = true
              client = [["/c.pem", "/k.pem"]]
        "#;
        let registries = read_files(&[("docker.io", text)]).unwrap();
        let mirrors = ["https://z.example", "http://a.example:5000", "https://b.example"];
        assert_eq!(
            registries["docker.io"],
            RegistrySettings { mirrors: mirrors.map(str::to_owned).into(), ..Default::default() }
        );
        assert_eq!(registries["z.example"].ca_file.as_deref(), Some(Path::new("docker.io/z.pem")));
        let b = &registries["b.example"];
        assert!(b.skip_tls_verify);
        assert_eq!(b.client_cert_file.as_deref(), Some(Path::new("/c.pem")));
        assert_eq!(b.client_key_file.as_deref(), Some(Path::new("/k.pem")));
        assert!(!registries.contains_key("push.example"));
    }

    #[test]
    fn a_registry_has_its_own_settings() {
        let files = [
            ("r.example:5000", "ca = [\"/ca.pem\"]\nclient = \"/both.pem\"\n"),
            ("plain_80_", "server = \"http://plain:80\""),
            ("self.example", "[host.\"http://self.example\"]\n"),
            ("_default", "[host.\"https://m.example\"]\n"),
        ];
        let registries = read_files(&files).unwrap();
        let own = &registries["r.example:5000"];
        assert_eq!((own.ca_file.as_deref(), own.mirrors.len()), (Some(Path::new("/ca.pem")), 0));
        assert_eq!(own.client_cert_file, own.client_key_file);
        assert!(registries["plain:80"].http && registries["self.example"].http);
        assert_eq!(registries["self.example"].mirrors, [""; 0]);
        assert_eq!(registries["_default"].mirrors, ["https://m.example"]);
    }

    #[test]
    fn the_files_of_containerds_documentation_are_accepted() {
        let hub = "server = \"https://docker.io\"\nca = \"/hub\"\n[host.\"https://registry-1.docker.io\"]\n";
        let registries = read_files(&[("docker.io", hub)]).unwrap();
        assert_eq!(registries.keys().collect::<Vec<_>>(), ["docker.io"]);
        assert_eq!((registries["docker.io"].mirrors.len(), registries["docker.io"].ca_file.is_some()), (0, true));
        let plain = "server = \"http://r:5000\"\n[host.\"http://r:5000\"]\nskip_verify = true\ncapabilities = []\n";
        let registries =
            read_files(&[("r:5000", plain), ("docker.io", "[host.\"http://r:5000\"]\nskip_verify = true")]);
        let registries = registries.unwrap();
        assert!(registries["r:5000"].http && registries["r:5000"].skip_tls_verify);
        assert_eq!(registries["docker.io"].mirrors, ["http://r:5000"]);
        // A mirror without a file of its own has the default mirrors.
        let files = [("_default", "[host.cache]\n"), ("docker.io", "[host.\"https://mirror\"]\n[host.cache]\n")];
        let registries = read_files(&files).unwrap();
        assert_eq!(
            (&registries["mirror"].mirrors[..], registries["cache"].mirrors.len()),
            (&["https://cache".to_owned()][..], 0)
        );
    }

    #[test]
    fn what_is_not_supported_is_named() {
        for (registry, text, named) in [
            ("r", "server = \"https://other\"", "D/r/hosts.toml: server: must be the registry itself"),
            ("r", "server = \"ftp://r\"", "server: the scheme"),
            ("_default", "server = \"https://r\"", "server: _default has only hosts"),
            ("r", "[host.\"https://m/path\"]", "host.\"https://m/path\": must be a host"),
            ("r", "[host.\"https://u:p@m\"]", "hosts.toml: host.\"m\": must be a host"),
            ("r", "[host.m]\ncapabilities = [\"pull\"]", "host.\"m\".capabilities: a host has both"),
            ("r", "capabilities = [\"push\"]", "capabilities: the registry itself"),
            ("r", "[host.m]\ncapabilities = [\"pul\"]", "host.\"m\".capabilities: pull, resolve and push"),
            ("r", "[host.r]\n[host.m]", "host.\"m\": the registry itself is asked last"),
            ("r", "[host.\"http://m\"]\nca = \"/ca\"", "host.\"http://m\": ca and client need https"),
            ("r", "[host.\"https://m?x\"]", "must be a host"),
            ("r", "[host.m]\noverride_path = true", "host.\"m\".override_path"),
            ("r", "[host.m.header]\nx = \"y\"", "host.\"m\".header"),
            ("r", "dial_timeout = \"1s\"", "dial_timeout: is not supported"),
            ("r", "ca = [\"a\", \"b\"]", "ca: name one file"),
            ("r", "client = [[\"a\", \"b\"], [\"c\", \"d\"]]", "client: name one client certificate"),
            ("r", "client = [[\"a\", \"b\", \"c\"]]", "client: name a file"),
            ("r", "host = 1", "host: must be a table"),
            ("r", "skip_verfy = true", "unknown field `skip_verfy`"),
            ("r", "[host.m]\nca = 1", "cannot parse D/r/hosts.toml"),
            ("r", "= 1", "cannot parse D/r/hosts.toml"),
        ] {
            let error = read_files(&[(registry, text)]).unwrap_err();
            assert!(error.contains(named), "{text}: {error}");
        }
        let less = [("a", "[host.m]\nskip_verify = true"), ("m", "")];
        assert!(read_files(&less).unwrap_err().contains("m has other settings elsewhere"));
        let twice = [("m:5000", ""), ("m_5000_", "")];
        assert!(read_files(&twice).unwrap_err().contains("another directory is for this registry"));
        let two = [("a", "[host.m]\nskip_verify = true"), ("b", "[host.m]\nca = \"/ca\"")];
        assert!(read_files(&two).unwrap_err().contains("D/b/hosts.toml: m has other settings elsewhere"));
    }

    #[test]
    fn certificates_without_a_file_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        fs::create_dir(directory.path().join("r")).unwrap();
        assert!(read(directory.path()).unwrap().is_empty());
        fs::write(directory.path().join("r/ca.crt"), "").unwrap();
        let error = Chain(&read(directory.path()).unwrap_err()).to_string();
        assert!(error.contains("r/ca.crt: certificate: certificates without a hosts.toml"), "{error}");
        assert!(read(&directory.path().join("none")).is_err());
    }
}
