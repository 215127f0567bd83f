//! Parses one hosts.toml. What Nacelle cannot do is refused by name.

use super::error::HostsError;
use super::url::section;
use crate::config::{RegistrySettings, SyntaxError};
use nacelle_base::files::at;
use serde::Deserialize;
use serde::de::IgnoredAny;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use toml::de::{DeTable, DeValue, ValueDeserializer};

/// The maximum size of a file in bytes.
const MAX_FILE: u64 = 1 << 20;

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

/// The parsed file: the URL of `server`, the settings of the registry itself, and the URLs of hosts with theirs, in their order.
pub(super) type Parsed = (Option<String>, RegistrySettings, Vec<(String, RegistrySettings)>);

pub(super) struct HostsFile<'a> {
    pub path: &'a Path,
    pub directory: &'a Path,
}

impl HostsFile<'_> {
    pub fn text(&self) -> Result<String, HostsError> {
        let mut text = String::new();
        let file = File::open(self.path).map_err(at("open", self.path))?;
        file.take(MAX_FILE + 1).read_to_string(&mut text).map_err(at("read", self.path))?;
        if text.len() as u64 > MAX_FILE {
            return Err(self.unsupported("size", "the file has more than 1 MiB"));
        }
        Ok(text)
    }

    pub fn parse(&self, text: &str) -> Result<Parsed, HostsError> {
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
    pub fn check_tls(&self, section: &str, http: bool, settings: &RegistrySettings) -> Result<(), HostsError> {
        if http && (settings.ca_file.is_some() || settings.client_cert_file.is_some()) {
            return Err(self.unsupported(section, "ca and client need https"));
        }
        Ok(())
    }

    pub fn unsupported(&self, key: &str, rule: &'static str) -> HostsError {
        HostsError::Unsupported { path: self.path.to_owned(), key: key.to_owned(), rule }
    }
}
