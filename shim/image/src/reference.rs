//! Parses image references as docker writes them, digests and image ids.

use crate::ImageError;
use nacelle_model::digest::{Digest, DigestError};
use std::fmt;
use std::str::FromStr;

/// The name of an image: registry, repository, and a tag or a digest or both. The registry defaults to docker.io, the namespace
/// there to `library`, and the tag to `latest` if there is no digest.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Reference {
    registry: String,
    repository: String,
    tag: Option<String>,
    digest: Option<Digest>,
}

fn invalid_reference(text: &str, why: &'static str) -> ImageError {
    ImageError::BadReference { text: text.chars().take(300).collect(), why }
}

impl Reference {
    /// Parses a reference as users write it: "busybox", "quay.io/a/b:1", "host:5000/a@sha256:...".
    pub fn parse(text: &str) -> Result<Reference, ImageError> {
        if text.is_empty() || text.len() > 1024 {
            return Err(invalid_reference(text, "a reference has 1 to 1024 characters"));
        }
        if Digest::from_hex(text).is_some() {
            return Err(invalid_reference(text, "64 hexadecimal digits are an image id, not a name"));
        }
        let (rest, digest) = match text.split_once('@') {
            Some((rest, digest)) => (
                rest,
                Some(digest.parse().map_err(|_cause: DigestError| {
                    invalid_reference(text, "what follows @ is not sha256: and 64 characters from 0-9a-f")
                })?),
            ),
            None => (text, None),
        };
        let (name, tag) = match rest.rsplit_once(':') {
            Some((name, tag)) if !tag.contains('/') => (name, Some(tag)),
            _ => (rest, None),
        };
        if tag.is_some_and(|tag| !is_tag(tag)) {
            return Err(invalid_reference(
                text,
                "a tag has 1 to 128 characters from A-Za-z0-9_.- and begins with none of .-",
            ));
        }
        let (registry, path) = match name.split_once('/') {
            Some((host, path)) if host.contains(['.', ':']) || host == "localhost" || host != host.to_lowercase() => {
                (host, path)
            }
            _ => ("docker.io", name),
        };
        if !is_registry_host(registry) {
            return Err(invalid_reference(
                text,
                "the part before the first / is not a host name with an optional port",
            ));
        }
        let registry = if registry == "index.docker.io" { "docker.io" } else { registry };
        if !path.split('/').all(is_component) || path.len() > 255 {
            return Err(invalid_reference(
                text,
                "a repository has parts from a-z0-9, joined inside by one of . _ __ - and by /",
            ));
        }
        let library = registry == "docker.io" && !path.contains('/');
        Ok(Reference {
            registry: registry.to_owned(),
            repository: if library { format!("library/{path}") } else { path.to_owned() },
            tag: tag.map(str::to_owned).or_else(|| digest.is_none().then(|| "latest".to_owned())),
            digest,
        })
    }

    /// Returns the host and port that the reference names: "docker.io", "registry.local:5000".
    pub fn registry(&self) -> &str {
        &self.registry
    }

    /// Returns the repository in the registry: "library/busybox".
    pub fn repository(&self) -> &str {
        &self.repository
    }

    /// Returns the tag, if there is one.
    pub fn tag(&self) -> Option<&str> {
        self.tag.as_deref()
    }

    /// Returns the digest, if there is one.
    pub fn digest(&self) -> Option<Digest> {
        self.digest
    }

    /// Returns registry and repository: "docker.io/library/busybox".
    pub fn name(&self) -> String {
        format!("{}/{}", self.registry, self.repository)
    }

    /// Returns the same name with this digest and no tag.
    pub fn with_digest(&self, digest: Digest) -> Reference {
        Reference { tag: None, digest: Some(digest), ..self.clone() }
    }
}

impl FromStr for Reference {
    type Err = ImageError;

    fn from_str(text: &str) -> Result<Self, ImageError> {
        Reference::parse(text)
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.registry, self.repository)?;
        if let Some(tag) = &self.tag {
            write!(f, ":{tag}")?;
        }
        match &self.digest {
            Some(digest) => write!(f, "@{digest}"),
            None => Ok(()),
        }
    }
}

impl fmt::Debug for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

fn is_tag(tag: &str) -> bool {
    (1..=128).contains(&tag.len())
        && !tag.starts_with(['.', '-'])
        && tag.bytes().all(|b| b.is_ascii_alphanumeric() || b"_.-".contains(&b))
}

/// Returns whether a text is a host with an optional port, as references name registries.
pub fn is_registry_host(host: &str) -> bool {
    let (name, port) = match host.rsplit_once(':') {
        Some((name, port)) if !port.ends_with(']') => (name, Some(port)),
        _ => (host, None),
    };
    let port_ok = port.is_none_or(|port| port.bytes().all(|b| b.is_ascii_digit()) && port.parse::<u16>().is_ok());
    let name_ok = match name.strip_prefix('[').and_then(|name| name.strip_suffix(']')) {
        Some(v6) => v6.parse::<std::net::Ipv6Addr>().is_ok(),
        None => name.split('.').all(|part| {
            !part.is_empty()
                && part.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
                && !part.starts_with('-')
                && !part.ends_with('-')
        }),
    };
    port_ok && name_ok && host.len() <= 255
}

/// Returns whether the text is a valid part of a repository: runs of a-z0-9 with one `.`, one or two `_`, or any number of `-`
/// between them.
fn is_component(part: &str) -> bool {
    let is_word = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    let separators = part.split(|c: char| c.is_ascii_lowercase() || c.is_ascii_digit());
    part.bytes().next().is_some_and(is_word)
        && part.bytes().next_back().is_some_and(is_word)
        && separators.into_iter().all(|s| matches!(s, "" | "." | "_" | "__") || s.bytes().all(|b| b == b'-'))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn hex64() -> String {
        "0123456789abcdef".repeat(4)
    }

    #[test]
    fn names_become_whole_as_docker_does() {
        let digest = format!("sha256:{}", hex64());
        for (short, long) in [
            ("busybox", "docker.io/library/busybox:latest".to_owned()),
            ("a/b", "docker.io/a/b:latest".into()),
            ("index.docker.io/busybox:1", "docker.io/library/busybox:1".into()),
            ("localhost/x", "localhost/x:latest".into()),
            ("localhost:5000/x/y/z:T.a-g_", "localhost:5000/x/y/z:T.a-g_".into()),
            ("[::1]:5000/x", "[::1]:5000/x:latest".into()),
            ("[::1]/x", "[::1]/x:latest".into()),
            ("quay.io/a/b--c__d.e_f:v1", "quay.io/a/b--c__d.e_f:v1".into()),
            (&format!("busybox@{digest}"), format!("docker.io/library/busybox@{digest}")),
            (&format!("busybox:1@{digest}"), format!("docker.io/library/busybox:1@{digest}")),
        ] {
            let reference = Reference::parse(short).unwrap();
            assert_eq!(reference.to_string(), long);
            assert_eq!(Reference::parse(&long).unwrap(), reference);
        }
    }

    #[test]
    fn what_is_no_reference_is_refused() {
        for text in [
            "",
            ":",
            "a:",
            ":a",
            "A",
            "a//b",
            "/a",
            "a/",
            "a b",
            "-a",
            "a-",
            "a..b",
            "a___b",
            "a:-x",
            "a@sha256:00",
            "a@sha512:00",
            "host:99999/a",
            "ho st/a",
            "[::x]/a",
            "a.-b/c",
            "é",
            "a\0",
            "../a",
            "x.y/../a",
            &"a".repeat(2000),
            &hex64(),
            &format!("a:{}", "t".repeat(129)),
            &format!("a@sha256:{}", hex64().to_uppercase()),
        ] {
            assert!(Reference::parse(text).is_err(), "{text:?}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_refused_or_comes_back(text in "[a-zA-Z0-9:/@._\\[\\]\\-é ]{0,60}") {
            if let Ok(reference) = Reference::parse(&text) {
                prop_assert_eq!(Reference::parse(&reference.to_string()).unwrap(), reference);
            }
        }

        #[test]
        fn digests_come_back(bytes: [u8; 32]) {
            let digest = Digest(bytes);
            prop_assert_eq!(digest.to_string().parse::<Digest>().unwrap(), digest);
        }
    }
}
