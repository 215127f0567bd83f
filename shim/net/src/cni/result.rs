//! Parses the result of ADD as tolerantly as other runtimes do, and prepares it as the input of the next plugin.

use super::CniError;
use super::config::{Version, field, parse_object};
use ipnet::IpNet;
use nacelle_model::network::DnsConfig;
use serde::Deserialize;
use serde_json::{Map, Value};
use std::net::IpAddr;

/// The result of a chain.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct CniResult {
    /// The interfaces inside the pod, by their names there.
    pub interfaces: Vec<String>,
    /// The pod's addresses in the order of the result.
    pub ips: Vec<IpAddr>,
    pub dns: DnsConfig,
    /// The result itself, in the version of the configuration: `prevResult`.
    pub raw: Map<String, Value>,
}

/// The JSON form. Null and absent are the same everywhere.
#[derive(Deserialize)]
struct Wire {
    interfaces: Option<Vec<WireInterface>>,
    ips: Option<Vec<WireIp>>,
    dns: Option<WireDns>,
}

#[derive(Deserialize)]
struct WireInterface {
    name: Option<String>,
    sandbox: Option<String>,
}

#[derive(Deserialize)]
struct WireIp {
    address: IpNet,
}

#[derive(Deserialize)]
struct WireDns {
    nameservers: Option<Vec<String>>,
    domain: Option<String>,
    search: Option<Vec<String>>,
    options: Option<Vec<String>>,
}

impl CniResult {
    /// Parses the output of `what` (a plugin) for a configuration of this version.
    pub fn parse(what: &str, bytes: &[u8], version: Version) -> Result<CniResult, CniError> {
        CniResult::from_raw(what, parse_object(what, bytes)?, version)
    }

    /// Parses a result that was kept as JSON.
    pub fn from_raw(what: &str, mut raw: Map<String, Value>, version: Version) -> Result<CniResult, CniError> {
        let of_version = raw.get("cniVersion").unwrap_or(&Value::Null);
        // A result without a version has the version of the configuration.
        let known = of_version.is_null() || of_version.as_str().is_some_and(|text| Version::parse(text).is_some());
        if !known {
            return Err(field(what, "cniVersion", of_version, "a version from 0.3.0 to 1.1.0 is expected"));
        }
        let wire: Wire = serde_json::from_value(Value::Object(raw.clone()))
            .map_err(|source| CniError::Json { what: what.to_owned(), source })?;
        let inside = wire.interfaces.into_iter().flatten().filter(|interface| {
            // Interfaces of the host have no sandbox.
            interface.sandbox.as_ref().is_some_and(|sandbox| !sandbox.is_empty())
        });
        let interfaces = inside.filter_map(|interface| interface.name).collect();
        let ips = wire.ips.into_iter().flatten().map(|ip| ip.address.addr()).collect();
        let dns = wire.dns.map(|dns| parse_dns(what, dns)).transpose()?.unwrap_or_default();
        convert_to_version(&mut raw, version);
        Ok(CniResult { interfaces, ips, dns, raw })
    }
}

/// The values are written to a text file as single words, so none may contain a separator.
fn parse_dns(what: &str, dns: WireDns) -> Result<DnsConfig, CniError> {
    let mut searches = dns.search.unwrap_or_default();
    if let Some(domain) = dns.domain.filter(|domain| !domain.is_empty() && !searches.contains(domain)) {
        searches.insert(0, domain);
    }
    let dns =
        DnsConfig { servers: dns.nameservers.unwrap_or_default(), searches, options: dns.options.unwrap_or_default() };
    let mut words = dns.servers.iter().chain(&dns.searches).chain(&dns.options);
    match words.find(|word| word.is_empty() || word.chars().any(|c| c.is_whitespace() || c.is_control())) {
        Some(word) => Err(field(what, "dns", &Value::from(word.as_str()), "words without spaces are expected")),
        None => Ok(dns),
    }
}

/// Since 1.0.0 an address has no IP version; before, the field was required.
fn convert_to_version(raw: &mut Map<String, Value>, version: Version) {
    raw.insert("cniVersion".to_owned(), version.as_str().into());
    let ips = raw.get_mut("ips").and_then(Value::as_array_mut).into_iter().flatten();
    for ip in ips.filter_map(Value::as_object_mut) {
        if version >= Version::V1_0_0 {
            ip.remove("version");
        } else if !ip.contains_key("version") {
            let is_v6 = ip.get("address").and_then(Value::as_str).is_some_and(|address| address.contains(':'));
            ip.insert("version".to_owned(), if is_v6 { "6" } else { "4" }.into());
        }
    }
}
