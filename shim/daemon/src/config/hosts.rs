//! Reads the settings of registries from a directory in containerd's format: DIRECTORY/REGISTRY/hosts.toml, where REGISTRY is a host
//! and port, or `_default`. What Nacelle cannot do is refused by name.

use super::{RegistrySettings, SyntaxError};
use nacelle_base::files::{FileError, at};
use nacelle_base::{Classify, FailureKind};
use serde::Deserialize;
use serde::de::IgnoredAny;
use std::collections::BTreeMap;
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
    Ok(registries.0)
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
struct Registries(BTreeMap<String, RegistrySettings>);

impl Registries {
    /// Adds the settings of one registry and its mirrors.
    fn add(&mut self, registry: &str, directory: &Path) -> Result<(), HostsError> {
        let path = directory.join("hosts.toml");
        if !path.exists() {
            return without_file(directory);
        }
        let reader = Reader { path: &path, directory };
        let (server, own, hosts) = reader.parse(&reader.text()?)?;
        if nacelle_image::DEFAULT_REGISTRY == registry {
            if server.is_some() || own != RegistrySettings::default() {
                return Err(
                    reader.unsupported("server", "_default has only hosts with the capabilities pull and resolve")
                );
            }
        } else {
            let https = server.as_deref().is_none_or(|server| !server.starts_with("http://"));
            let named =
                server.as_deref().map(authority).transpose().map_err(|rule| reader.unsupported("server", rule))?;
            if named.is_some_and(|named| named != registry && Some(named) != upstream(registry)) {
                return Err(
                    reader.unsupported("server", "must be the registry itself; name other hosts under [host.\"URL\"]")
                );
            }
            self.set(registry, RegistrySettings { http: !https, ..own }, &path)?;
        }
        let mut mirrors = Vec::new();
        for (url, settings) in hosts {
            let key = format!("host.{url:?}");
            let host = authority(&url).map_err(|rule| reader.unsupported(&key, rule))?;
            if host != registry {
                let url = if url.contains("://") { url.clone() } else { format!("https://{url}") };
                mirrors.push(url.trim_end_matches('/').trim_end_matches("/v2").to_owned());
            }
            // The URL of a mirror has its scheme; the registry itself needs it in its settings.
            let http = host == registry && url.starts_with("http://");
            self.set(host, RegistrySettings { http, ..settings }, &path)?;
        }
        self.0.entry(registry.to_owned()).or_default().mirrors = mirrors;
        Ok(())
    }

    /// Gives a host its settings, unless it has others already.
    fn set(&mut self, host: &str, settings: RegistrySettings, path: &Path) -> Result<(), HostsError> {
        let known = self.0.entry(host.to_owned()).or_default();
        let settings = RegistrySettings { mirrors: known.mirrors.clone(), ..settings };
        let none = RegistrySettings { mirrors: known.mirrors.clone(), ..RegistrySettings::default() };
        if *known == none {
            *known = settings;
        } else if settings != none && settings != *known {
            return Err(HostsError::Conflict { path: path.to_owned(), host: host.to_owned() });
        }
        Ok(())
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

/// Returns the host and port of a URL without a path, or with the path `/v2`; without a scheme it is https.
fn authority(url: &str) -> Result<&str, &'static str> {
    let rest = match url.split_once("://") {
        Some(("http" | "https", rest)) => rest,
        Some(_) => return Err("the scheme must be http or https"),
        None => url,
    };
    let (host, path) = rest.split_once('/').unwrap_or((rest, ""));
    match path.trim_end_matches('/') {
        "" | "v2" if !host.is_empty() && !host.contains('@') => Ok(host),
        _ => Err("must be a host with at most a port, and no path but /v2"),
    }
}

/// Returns the host that serves a registry, if it has another name.
fn upstream(registry: &str) -> Option<&'static str> {
    (registry == "docker.io").then_some("registry-1.docker.io")
}

/// What a file says: the URL of `server`, the settings of the registry itself, and the URLs of hosts with theirs, in their order.
type Parsed = (Option<String>, RegistrySettings, Vec<(String, RegistrySettings)>);

struct Reader<'a> {
    path: &'a Path,
    directory: &'a Path,
}

impl Reader<'_> {
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
        let own = self.settings("", own)?.unwrap_or_default();
        // A table of TOML has no order; that of the text counts.
        let mut hosts: Vec<_> = hosts.into_iter().collect();
        hosts.sort_by_key(|(url, _)| url.span().start);
        let mut found = Vec::new();
        for (url, value) in hosts {
            let url = url.into_inner().into_owned();
            let endpoint = Endpoint::deserialize(ValueDeserializer::from(value)).map_err(syntax)?;
            if let Some(settings) = self.settings(&format!("host.{url:?}."), endpoint)? {
                found.push((url, settings));
            }
        }
        Ok((server.transpose().map_err(syntax)?, own, found))
    }

    /// Returns the settings of a host, or `None` if it serves pushes only. `prefix` is the section of its keys.
    fn settings(&self, prefix: &str, endpoint: Endpoint) -> Result<Option<RegistrySettings>, HostsError> {
        let unsupported = |key: &str, rule| Err(self.unsupported(&format!("{prefix}{key}"), rule));
        if let Some(capabilities) = &endpoint.capabilities {
            let has = |name: &str| capabilities.iter().any(|capability| capability == name);
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
    fn what_is_not_supported_is_named() {
        for (registry, text, named) in [
            ("r", "server = \"https://other\"", "D/r/hosts.toml: server: must be the registry itself"),
            ("r", "server = \"ftp://r\"", "server: the scheme"),
            ("_default", "server = \"https://r\"", "server: _default has only hosts"),
            ("r", "[host.\"https://m/path\"]", "host.\"https://m/path\": must be a host"),
            ("r", "[host.\"https://u:p@m\"]", "must be a host"),
            ("r", "[host.m]\ncapabilities = [\"pull\"]", "host.\"m\".capabilities: a host has both"),
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
