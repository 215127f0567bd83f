//! Authenticates to registries: parses challenges, sends basic credentials, and fetches tokens.

use super::http::{HttpClients, header_value, url_without_query};
use super::upload::RequestBody;
use crate::{Auth, ImageError};
use ::http::header::{AUTHORIZATION, CONTENT_TYPE, HeaderMap, WWW_AUTHENTICATE};
use ::http::{HeaderValue, Method, Uri};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use nacelle_base::json;
use serde::Deserialize;

/// The maximum size in bytes of a token server's response.
const MAX_TOKEN_BYTES: u64 = 1 << 20;

/// One challenge of a WWW-Authenticate header.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AuthChallenge {
    /// The scheme: "Bearer" or "Basic".
    pub scheme: String,
    /// The parameters: names in lower case, and values.
    pub parameters: Vec<(String, String)>,
}

impl AuthChallenge {
    fn get(&self, name: &str) -> Option<&str> {
        self.parameters.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }
}

/// Returns the challenges of all WWW-Authenticate headers.
pub fn find_challenges(headers: &HeaderMap) -> Vec<AuthChallenge> {
    let values = headers.get_all(WWW_AUTHENTICATE).iter();
    values.filter_map(|value| value.to_str().ok()).flat_map(parse_challenges).collect()
}

/// Parses a WWW-Authenticate header: `Scheme key=value, key="value", Scheme2 ...`. Stops at the first syntax error.
fn parse_challenges(text: &str) -> Vec<AuthChallenge> {
    let mut found: Vec<AuthChallenge> = Vec::new();
    let mut rest = text;
    loop {
        rest = rest.trim_start_matches([' ', '\t', ',']);
        let (word, after) = split_token(rest);
        if word.is_empty() {
            return found;
        }
        let value = after.trim_start_matches([' ', '\t']).strip_prefix('=').filter(|_| !found.is_empty());
        match (value, found.last_mut()) {
            (Some(value), Some(challenge)) => {
                let Some((value, after)) = parse_parameter(value.trim_start_matches([' ', '\t'])) else { return found };
                challenge.parameters.push((word.to_ascii_lowercase(), value));
                rest = after;
            }
            _ => {
                found.push(AuthChallenge { scheme: word.to_owned(), parameters: Vec::new() });
                rest = after;
            }
        }
    }
}

fn split_token(text: &str) -> (&str, &str) {
    let end = text.find(|c: char| !(c.is_ascii_alphanumeric() || "!#$%&'*+-.^_`|~".contains(c)));
    text.split_at_checked(end.unwrap_or(text.len())).unwrap_or((text, ""))
}

fn parse_parameter(text: &str) -> Option<(String, &str)> {
    let Some(quoted) = text.strip_prefix('"') else {
        let end = text.find([',', ' ', '\t']).unwrap_or(text.len());
        let (value, rest) = text.split_at_checked(end)?;
        return Some((value.to_owned(), rest));
    };
    let mut value = String::new();
    let mut characters = quoted.char_indices();
    while let Some((at, c)) = characters.next() {
        match c {
            '"' => return Some((value, quoted.get(at + 1..)?)),
            '\\' => value.push(characters.next()?.1),
            c => value.push(c),
        }
    }
    None
}

/// Returns the host (and port) of CRI's server_address, which may be a URL.
pub fn server_host(address: &str) -> String {
    let address = address.split_once("://").map_or(address, |(_, rest)| rest);
    let host = address.split('/').next().unwrap_or_default();
    match host {
        "index.docker.io" | "registry-1.docker.io" => "docker.io".to_owned(),
        host => host.to_owned(),
    }
}

/// Returns the header with a bearer token.
pub fn bearer_header(token: &str) -> Result<HeaderValue, ImageError> {
    let mut value = header_value(&format!("Bearer {token}"))?;
    value.set_sensitive(true);
    Ok(value)
}

/// Returns the header with user and password, or `None` without credentials.
pub fn basic_header(auth: &Auth) -> Option<Result<HeaderValue, ImageError>> {
    let encoded = if !auth.username.is_empty() {
        STANDARD.encode(format!("{}:{}", auth.username, auth.password))
    } else if !auth.auth.is_empty() {
        auth.auth.trim().to_owned()
    } else {
        return None;
    };
    Some(header_value(&format!("Basic {encoded}")).map(|mut value| {
        value.set_sensitive(true);
        value
    }))
}

#[derive(Deserialize)]
struct TokenResponse {
    #[serde(default)]
    token: Option<String>,
    #[serde(default)]
    access_token: Option<String>,
}

/// The request for a token. It is a POST request if it has a form, otherwise a GET request.
pub(super) struct TokenRequest {
    pub uri: Uri,
    pub headers: HeaderMap,
    /// The fields in the body.
    pub form: Option<String>,
}

/// Returns the request for a token of this repository, which goes to the challenge's realm. `base` is the URL of the registry.
pub(super) fn build_token_request(
    base: &str,
    repository: &str,
    challenge: &AuthChallenge,
    auth: Option<&Auth>,
) -> Result<TokenRequest, ImageError> {
    let wrong = |why| ImageError::Protocol { url: base.to_owned(), why };
    let realm = challenge.get("realm").ok_or_else(|| wrong("its challenge has no realm"))?;
    let uri: Uri = realm.parse().map_err(|_cause| wrong("its challenge's realm is not a URL"))?;
    let safe = uri.scheme_str() == Some("https") || base.starts_with("http://") && uri.scheme_str() == Some("http");
    if !safe || uri.authority().is_none() {
        return Err(wrong("its challenge's realm is not an https URL"));
    }
    let scope = challenge.get("scope").map_or_else(|| format!("repository:{repository}:pull"), str::to_owned);
    let mut fields = vec![("scope", scope.as_str())];
    fields.extend(challenge.get("service").map(|service| ("service", service)));
    let mut headers = HeaderMap::new();
    let refresh = auth.map(|auth| auth.identity_token.as_str()).filter(|token| !token.is_empty());
    if let Some(refresh) = refresh {
        fields.extend([("grant_type", "refresh_token"), ("refresh_token", refresh), ("client_id", "nacelle")]);
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/x-www-form-urlencoded"));
        return Ok(TokenRequest { uri, headers, form: Some(encode_form(&fields)) });
    }
    if let Some(value) = auth.and_then(basic_header) {
        headers.insert(AUTHORIZATION, value?);
    }
    let joint = if uri.query().is_some() { '&' } else { '?' };
    let text = format!("{uri}{joint}{}", encode_form(&fields));
    let uri = text.parse().map_err(|_cause| wrong("its challenge's realm is not a URL"))?;
    Ok(TokenRequest { uri, headers, form: None })
}

/// Returns the token in the response of a token server.
pub(super) fn parse_token(body: &[u8], uri: &Uri) -> Result<String, ImageError> {
    let no_token = || ImageError::Protocol { url: url_without_query(uri), why: "it contains no token" };
    let response: TokenResponse = json::read(body).map_err(|_cause| no_token())?;
    let given = [response.token, response.access_token].into_iter().flatten().find(|token| !token.is_empty());
    given.ok_or_else(no_token)
}

/// Fetches a token for this repository from the challenge's realm.
pub async fn fetch_token(
    http: &HttpClients,
    base: &str,
    repository: &str,
    challenge: &AuthChallenge,
    auth: Option<&Auth>,
) -> Result<String, ImageError> {
    let TokenRequest { uri, headers, form } = build_token_request(base, repository, challenge, auth)?;
    let response = match form {
        Some(form) => http.send(Method::POST, &uri, headers, &RequestBody::Bytes(Bytes::from(form))).await?,
        None => http.get(&uri, headers).await?,
    };
    let body = response.into_success().await?.read_body(MAX_TOKEN_BYTES, "the token").await?;
    parse_token(&body, &uri)
}

/// Encodes fields as `key=value&...` and escapes all characters that are not unreserved.
fn encode_form(fields: &[(&str, &str)]) -> String {
    let mut out = String::new();
    for (key, value) in fields {
        if !out.is_empty() {
            out.push('&');
        }
        out.push_str(key);
        out.push('=');
        for byte in value.bytes() {
            match byte {
                b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => out.push(char::from(byte)),
                byte => out.push_str(&format!("%{byte:02X}")),
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn challenge(scheme: &str, parameters: &[(&str, &str)]) -> AuthChallenge {
        let own = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
        AuthChallenge { scheme: scheme.to_owned(), parameters: parameters.iter().map(own).collect() }
    }

    #[test]
    fn challenges_are_read() {
        let docker = r#"Bearer realm="https://auth.docker.io/token",service="registry.docker.io",scope="repository:a/b:pull,push""#;
        assert_eq!(
            parse_challenges(docker),
            [challenge(
                "Bearer",
                &[
                    ("realm", "https://auth.docker.io/token"),
                    ("service", "registry.docker.io"),
                    ("scope", "repository:a/b:pull,push"),
                ]
            )]
        );
        assert_eq!(
            parse_challenges(r#"Basic Realm = x , error="a\"b", Bearer realm=y"#),
            [challenge("Basic", &[("realm", "x"), ("error", "a\"b")]), challenge("Bearer", &[("realm", "y")]),]
        );
        assert_eq!(parse_challenges(r#"Bearer realm="open"#), [challenge("Bearer", &[])]);
        assert_eq!(parse_challenges("=,\"x"), []);
    }

    #[test]
    fn fields_are_escaped() {
        assert_eq!(
            encode_form(&[("scope", "repository:a/b:pull"), ("x", "é ")]),
            "scope=repository%3Aa%2Fb%3Apull&x=%C3%A9%20"
        );
    }

    #[test]
    fn servers_are_hosts() {
        for (address, host) in
            [("https://index.docker.io/v1/", "docker.io"), ("a:5000", "a:5000"), ("http://a/b", "a"), ("", "")]
        {
            assert_eq!(server_host(address), host);
        }
    }

    #[test]
    fn credentials_come_from_either_form() {
        let auth = Auth { username: "u".into(), password: "p".into(), ..Auth::default() };
        let value = basic_header(&auth).unwrap().unwrap();
        assert_eq!(value, "Basic dTpw");
        assert_eq!(basic_header(&Auth { auth: "dTpw".into(), ..Auth::default() }).unwrap().unwrap(), value);
        assert!(basic_header(&Auth::default()).is_none());
        assert!(basic_header(&Auth { auth: "a\nb".into(), ..Auth::default() }).unwrap().is_err());
    }

    proptest! {
        #[test]
        fn any_header_is_read_without_harm(text in "[a-zA-Z=,\" \\\\é\t/:]{0,80}") {
            for challenge in parse_challenges(&text) {
                prop_assert!(!challenge.scheme.is_empty());
            }
        }

        #[test]
        fn what_is_quoted_comes_back(value in "\\PC{0,30}") {
            let quoted = value.replace('\\', "\\\\").replace('"', "\\\"");
            let found = parse_challenges(&format!("Bearer realm=\"{quoted}\",x=y"));
            prop_assert_eq!(found, [challenge("Bearer", &[("realm", &value), ("x", "y")])]);
        }
    }
}
