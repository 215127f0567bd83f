//! Reads the credentials of one host from a file in the format of docker and podman (config.json, auth.json). Credential helpers
//! that such a file names are not run.

use crate::{Auth, ImageError};
use nacelle_base::files::at;
use nacelle_base::json;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// The maximum size of the file in bytes.
const MAX_AUTH_FILE: u64 = 1 << 20;

#[derive(Deserialize)]
struct AuthFile {
    #[serde(default)]
    auths: BTreeMap<String, AuthFileEntry>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct AuthFileEntry {
    username: String,
    password: String,
    auth: String,
    identitytoken: String,
    registrytoken: String,
}

/// Returns the credentials that the file has for this host (and port), or `None` if it has none. Blocks. Errors contain nothing of the
/// file.
pub fn read_auth_file(path: &Path, host: &str) -> Result<Option<Auth>, ImageError> {
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(at("open", path))?;
    file.take(MAX_AUTH_FILE + 1).read_to_end(&mut bytes).map_err(at("read", path))?;
    if bytes.len() as u64 > MAX_AUTH_FILE {
        return Err(ImageError::TooLarge { what: path.display().to_string(), limit: MAX_AUTH_FILE });
    }
    // The parser's message may quote a value, which is a secret here.
    let file: AuthFile = json::read(&bytes).map_err(|error| ImageError::AuthFile {
        path: path.to_owned(),
        line: error.line(),
        column: error.column(),
    })?;
    let wanted = super::auth::server_host(host);
    let entry = file.auths.into_iter().find(|(key, _)| is_of_host(key) && super::auth::server_host(key) == wanted);
    let Some((_, entry)) = entry else { return Ok(None) };
    let auth = Auth {
        username: entry.username,
        password: entry.password,
        auth: entry.auth,
        server_address: host.to_owned(),
        identity_token: entry.identitytoken,
        registry_token: entry.registrytoken,
    };
    let empty = Auth { server_address: host.to_owned(), ..Auth::default() };
    Ok(Some(auth).filter(|auth| *auth != empty))
}

/// Returns whether a key is for all of a host, and not for a repository of it (`mirror.example/team`).
fn is_of_host(key: &str) -> bool {
    let key = key.split_once("://").map_or(key, |(_, rest)| rest);
    let path = key.split_once('/').map_or("", |(_, path)| path);
    matches!(path.trim_end_matches('/'), "" | "v1" | "v2")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_entry_of_the_host_is_used() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("auth.json");
        let text = r#"{"auths": {"https://a.example:5000/v2/": {"auth": "dTpw", "email": "x"}, "b": {"username": "u", "password": "p"},
            "b/team": {"username": "t", "password": "t"}, "https://index.docker.io/v1/": {"auth": "aHVi"}, "c/x": {"auth": "eA=="},
            "empty": {}}, "credsStore": "desktop"}"#;
        std::fs::write(&path, text).unwrap();
        let auth = read_auth_file(&path, "a.example:5000").unwrap().unwrap();
        assert_eq!((auth.auth.as_str(), auth.server_address.as_str()), ("dTpw", "a.example:5000"));
        let auth = read_auth_file(&path, "b").unwrap().unwrap();
        assert_eq!((auth.username.as_str(), auth.password.as_str()), ("u", "p"));
        assert_eq!(read_auth_file(&path, "registry-1.docker.io").unwrap().unwrap().auth, "aHVi");
        for host in ["a.example", "empty", "", "c"] {
            assert_eq!(read_auth_file(&path, host).unwrap(), None, "{host}");
        }
    }

    #[test]
    fn a_file_that_is_missing_large_or_no_json_is_named_without_its_content() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("auth.json");
        let read = || nacelle_base::Chain(&read_auth_file(&path, "a").unwrap_err()).to_string();
        assert!(read().contains("auth.json"));
        for text in [r#"{"auths": {"a": {"auth": "c2VjcmV0"}"#, r#"{"auths": {"a": "c2VjcmV0"}}"#] {
            std::fs::write(&path, text).unwrap();
            assert!(read().contains("auth.json") && !read().contains("c2VjcmV0"), "{}", read());
        }
        std::fs::write(&path, " ".repeat((1 << 20) + 1)).unwrap();
        assert!(read().contains("auth.json"));
    }
}
