//! Reads the settings of registries from a directory in containerd's format: DIRECTORY/REGISTRY/hosts.toml, where REGISTRY is a host
//! and port, or `_default`.

mod error;
mod file;
mod url;

#[cfg(test)]
mod tests;

pub use error::HostsError;

use super::RegistrySettings;
use file::HostsFile;
use nacelle_base::files::at;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use url::{HostUrl, section};

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
