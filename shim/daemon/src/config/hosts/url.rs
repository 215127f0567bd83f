//! Parses the URLs of hosts in hosts.toml.

use std::fmt;

/// Returns the section of a URL for messages, without a password that the URL may have.
pub(super) fn section(url: &str) -> String {
    format!("host.{:?}", url.rsplit_once('@').map_or(url, |(_, host)| host))
}

/// The URL of a host: `[http://|https://]HOST[:PORT][/v2]`.
pub(super) struct HostUrl {
    pub http: bool,
    pub host: String,
}

impl HostUrl {
    pub fn parse(url: &str) -> Result<HostUrl, &'static str> {
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
    pub fn serves(&self, registry: &str) -> bool {
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
