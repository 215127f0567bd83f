//! Parses the address on which metrics are served: an IP address and port, or the path of a Unix socket.

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

/// The prefix of the path of a Unix socket.
const UNIX: &str = "unix:";

/// The address on which metrics are served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MetricsAddress {
    /// An IP address and a port; port 0 selects any free one.
    Tcp(SocketAddr),
    /// The path of a Unix socket, to which only root can connect.
    Unix(PathBuf),
}

/// The text is not an address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not an address for metrics: IP:PORT (\"127.0.0.1:9464\", \"[::1]:9464\") or unix:/PATH is needed")]
pub struct InvalidMetricsAddress {
    /// The text.
    pub text: String,
}

impl FromStr for MetricsAddress {
    type Err = InvalidMetricsAddress;

    fn from_str(text: &str) -> Result<MetricsAddress, InvalidMetricsAddress> {
        let parsed = match text.strip_prefix(UNIX) {
            Some(path) => (!path.is_empty()).then(|| MetricsAddress::Unix(path.into())),
            None => text.parse().ok().map(MetricsAddress::Tcp),
        };
        parsed.ok_or_else(|| InvalidMetricsAddress { text: text.to_owned() })
    }
}

impl fmt::Display for MetricsAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MetricsAddress::Tcp(address) => address.fmt(f),
            MetricsAddress::Unix(path) => write!(f, "{UNIX}{}", path.display()),
        }
    }
}

impl Serialize for MetricsAddress {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for MetricsAddress {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<MetricsAddress, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_printed_as_it_is_read() {
        for text in ["127.0.0.1:9464", "[::1]:0", "unix:/run/nacelle/metrics.sock"] {
            assert_eq!(text.parse::<MetricsAddress>().unwrap().to_string(), text);
        }
        for text in
            ["", "9464", ":9464", "localhost:9464", "127.0.0.1", "127.0.0.1:65536", "unix:", "tcp://127.0.0.1:1"]
        {
            let error = text.parse::<MetricsAddress>().unwrap_err().to_string();
            assert!(error.contains(&format!("{text:?}")) && error.contains("IP:PORT"), "{error}");
        }
    }
}
