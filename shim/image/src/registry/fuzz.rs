//! Defines the fuzz harness for what a registry answers before it delivers content: challenges, tokens, redirects and error messages.
//! A harness fails by a panic, or by a cost that does not follow from the input.

use super::auth::{bearer_header, build_token_request, find_challenges, parse_token};
use super::http::{error_message, resolve_location, url_without_query};
use crate::Auth;
use ::http::header::{AUTHORIZATION, HeaderMap, WWW_AUTHENTICATE};
use ::http::{HeaderValue, Uri};
use nacelle_base::allocations::AllocationLimit;

/// The cost of parsing the headers and the body. A byte can be the name of a challenge, and a character of a realm becomes up to three
/// of a query, in a text that grows.
const LIMIT: AllocationLimit = AllocationLimit { base: 32 << 10, per_byte: 400, base_count: 300, count_per_byte: 40 };
const SECRET: &str = "s3cret";
const REPOSITORY: &str = "library/app";

/// A response: lines of headers, an empty line, the body. Each line is a challenge and the location of a redirect, and the body is the
/// response of a token server and an error.
pub fn registry(data: &[u8]) {
    let end = data.windows(2).position(|pair| pair == b"\n\n").unwrap_or(data.len());
    let (head, body) = data.split_at(end);
    let body = body.get(2..).unwrap_or_default();
    let lines = head.split(|byte| *byte == b'\n').filter_map(|line| HeaderValue::from_bytes(line).ok());
    // As many as hyper accepts.
    let headers: HeaderMap = lines.take(100).map(|line| (WWW_AUTHENTICATE, line)).collect();
    LIMIT.enforce(data.len(), || {
        let message = error_message(body);
        assert!(message.chars().count() <= 302 && !message.contains(char::is_control), "{message:?}");
        challenges(&headers);
        let token_server = Uri::from_static("https://a/token");
        if let Ok(token) = parse_token(body, &token_server) {
            assert!(!token.is_empty() && token.len() <= body.len());
            assert!(bearer_header(&token).is_ok_and(|header| header.is_sensitive()) || token.contains(is_no_header));
        }
    });
    for base in ["https://a:1/v2/x/blobs/y", "http://a/x?q=1"] {
        let base = Uri::from_static(base);
        let locations = headers.values().filter_map(|line| line.to_str().ok());
        for uri in locations.filter_map(|location| resolve_location(&base, location)) {
            assert!(matches!(uri.scheme_str(), Some("http" | "https")) && uri.authority().is_some(), "{uri}");
            let shown = url_without_query(&uri);
            assert!(!shown.contains('?') && !shown.split('/').nth(2).unwrap_or_default().contains('@'), "{shown}");
        }
    }
}

/// Returns whether a character cannot be in the value of a header.
fn is_no_header(c: char) -> bool {
    c.is_control() || !c.is_ascii()
}

/// Answers the challenges with all kinds of credentials, which must go nowhere but into a header or a form for an allowed server.
fn challenges(headers: &HeaderMap) {
    let size: usize = headers.values().map(HeaderValue::len).sum();
    let challenges = find_challenges(headers);
    let texts = challenges.iter().flat_map(|challenge| {
        let parameters = challenge.parameters.iter().flat_map(|(name, value)| [name, value]);
        parameters.chain([&challenge.scheme])
    });
    assert!(texts.map(String::len).sum::<usize>() <= size, "{challenges:?}");
    let secret = || SECRET.to_owned();
    let password = Auth { username: "u".into(), password: secret(), ..Auth::default() };
    let identity = Auth { identity_token: secret(), ..Auth::default() };
    let Some(challenge) = challenges.iter().find(|challenge| challenge.scheme.eq_ignore_ascii_case("bearer")) else {
        return;
    };
    let realm = challenge.parameters.iter().find(|(name, _)| name == "realm").map(|(_, realm)| realm.as_str());
    let realm: Option<Uri> = realm.and_then(|realm| realm.parse().ok());
    for (base, auth) in [
        ("https://a", None),
        ("https://a", Some(&password)),
        ("https://a", Some(&identity)),
        ("http://a", Some(&password)),
    ] {
        let Ok(request) = build_token_request(base, REPOSITORY, challenge, auth) else { continue };
        let realm = realm.as_ref().expect("a request has a realm");
        assert_eq!((request.uri.authority(), request.uri.path()), (realm.authority(), realm.path()));
        assert!(request.uri.authority().is_some());
        let scheme = request.uri.scheme_str();
        assert!(scheme == Some("https") || scheme == Some("http") && base.starts_with("http:"), "{:?}", request.uri);
        let text = request.uri.to_string();
        assert!(text.len() <= 4 * size + 200, "{} of {size}", text.len());
        let was_sent = challenge.parameters.iter().any(|(_, value)| value.contains(SECRET));
        assert!(was_sent || !text.contains(SECRET), "{text}");
        let fields = request.form.as_deref().or(request.uri.query()).unwrap_or_default();
        assert!(fields.contains("scope=") && !fields.contains(char::is_whitespace), "{fields}");
        let identity_form = auth.is_some_and(|auth| !auth.identity_token.is_empty());
        assert_eq!(request.form.is_some(), identity_form);
        let authorization = request.headers.get(AUTHORIZATION);
        assert_eq!(authorization.is_some(), auth.is_some_and(|auth| !auth.username.is_empty()));
        assert!(authorization.is_none_or(HeaderValue::is_sensitive));
    }
}
