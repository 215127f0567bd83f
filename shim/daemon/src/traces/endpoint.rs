//! Parses the address of a trace collector: http://HOST:PORT, or the path of a Unix socket.

use http::Uri;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;
use std::path::Path;
use std::str::FromStr;

/// The prefix of the path of a Unix socket.
const UNIX: &str = "unix:";

/// The address of a collector that receives OTLP over gRPC without TLS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceEndpoint(String);

/// The text is not an address of a collector.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{text:?} is not an address of a trace collector: http://HOST:PORT (\"http://127.0.0.1:4317\") without a path, or unix:/PATH is \
     needed"
)]
pub struct InvalidTraceEndpoint {
    /// The text.
    pub text: String,
}

impl TraceEndpoint {
    /// Returns the address as gRPC clients take it.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Returns whether this is a plain http URI of a host and a port: no credentials, path or query.
fn is_host_and_port(text: &str) -> bool {
    let Ok(uri) = text.parse::<Uri>() else { return false };
    let Some(authority) = uri.authority() else { return false };
    let has_port = authority.port_u16().is_some_and(|port| port != 0);
    uri.scheme_str() == Some("http")
        && has_port
        && !authority.host().is_empty()
        && !authority.as_str().contains('@')
        && uri.path_and_query().is_none_or(|rest| rest == "/")
}

impl FromStr for TraceEndpoint {
    type Err = InvalidTraceEndpoint;

    fn from_str(text: &str) -> Result<TraceEndpoint, InvalidTraceEndpoint> {
        let is_valid = match text.strip_prefix(UNIX) {
            Some(path) => Path::new(path).is_absolute() && !path.starts_with("//") && !path.contains('\0'),
            None => is_host_and_port(text),
        };
        if is_valid { Ok(TraceEndpoint(text.to_owned())) } else { Err(InvalidTraceEndpoint { text: text.to_owned() }) }
    }
}

impl fmt::Display for TraceEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Serialize for TraceEndpoint {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for TraceEndpoint {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<TraceEndpoint, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_is_a_host_with_port_or_a_socket() {
        for text in
            ["http://127.0.0.1:4317", "http://[::1]:4317/", "http://collector.example:4317", "unix:/run/otel.sock"]
        {
            assert_eq!(text.parse::<TraceEndpoint>().unwrap().to_string(), text);
        }
        for text in [
            "",
            "127.0.0.1:4317",
            "http://127.0.0.1",
            "http://127.0.0.1:0",
            "http://:4317",
            "https://127.0.0.1:4317",
            "http://user:secret@127.0.0.1:4317",
            "http://127.0.0.1:4317/v1/traces",
            "http://127.0.0.1:4317?x",
            "unix:",
            "unix:run/otel.sock",
            "unix://run/otel.sock",
        ] {
            let error = text.parse::<TraceEndpoint>().unwrap_err().to_string();
            assert!(error.contains(&format!("{text:?}")) && error.contains("http://HOST:PORT"), "{error}");
        }
    }
}
