//! Chooses the http proxy of a request as Go's programs do, and connects by it: by CONNECT for https, and by the request's
//! absolute URL for http. Proxies that are themselves reached by TLS or SOCKS are refused by name.

use crate::ImageError;
use crate::config::ProxyConfig;
use ::http::{HeaderValue, Uri};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_util::client::legacy::connect::proxy::Tunnel;
use hyper_util::client::legacy::connect::{Connected, Connection, HttpConnector};
use hyper_util::rt::TokioIo;
use std::io;
use std::net::IpAddr;
use std::pin::Pin;
use std::task::{Context, Poll};
use tokio::net::TcpStream;
use tower::Service;

/// A proxy: its URL without credentials, and the header that authenticates this node to it.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Proxy {
    uri: Uri,
    /// The value of Proxy-Authorization, marked as sensitive.
    pub authorization: Option<HeaderValue>,
}

impl ProxyConfig {
    /// Returns the proxy for a URL, or `None` if the host is to be connected to directly.
    pub(crate) fn find_proxy(&self, url: &Uri) -> Result<Option<Proxy>, ImageError> {
        let https = url.scheme_str() == Some("https");
        let (name, text) = if https { ("https", &self.https_proxy) } else { ("http", &self.http_proxy) };
        let port = url.port_u16().unwrap_or(if https { 443 } else { 80 });
        let host = url.host().unwrap_or_default().trim_start_matches('[').trim_end_matches(']').to_ascii_lowercase();
        if text.is_empty() || is_exempt(&self.no_proxy, &host, port) {
            return Ok(None);
        }
        parse_proxy(text).map(Some).map_err(|why| ImageError::Proxy { scheme: name, why })
    }

    /// Returns why this node cannot use its proxies, if so, with the scheme of the requests.
    pub fn check(&self) -> Result<(), (&'static str, &'static str)> {
        for (name, text) in [("http", &self.http_proxy), ("https", &self.https_proxy)] {
            if !text.is_empty() {
                parse_proxy(text).map_err(|why| (name, why))?;
            }
        }
        Ok(())
    }
}

/// Parses `[http://][user:password@]host[:port]`.
fn parse_proxy(text: &str) -> Result<Proxy, &'static str> {
    const WRONG: &str = "a proxy is http://HOST:PORT or http://USER:PASSWORD@HOST:PORT";
    let rest = match text.split_once("://") {
        Some((scheme, rest)) if scheme.eq_ignore_ascii_case("http") => rest,
        Some(_) => return Err("only proxies with the scheme http are supported"),
        None => text,
    };
    let (authority, path) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
    // Then the authority is the beginning of a password that is not percent-encoded.
    if path.contains('@') {
        return Err(WRONG);
    }
    let (user, host) = authority.rsplit_once('@').map_or((None, authority), |(user, host)| (Some(user), host));
    let uri: Uri = format!("http://{host}/").parse().map_err(|_cause| WRONG)?;
    if uri.host().is_none_or(str::is_empty) || host.ends_with(':') {
        return Err(WRONG);
    }
    let authorization = user.map(|user| basic_authorization(user).ok_or(WRONG)).transpose()?;
    Ok(Proxy { uri, authorization })
}

/// Returns the header for `user[:password]`, each with percent escapes.
fn basic_authorization(user: &str) -> Option<HeaderValue> {
    let (user, password) = user.split_once(':').unwrap_or((user, ""));
    let decoded = [decode_percent(user)?, vec![b':'], decode_percent(password)?].concat();
    let mut value = HeaderValue::from_str(&format!("Basic {}", STANDARD.encode(decoded))).ok()?;
    value.set_sensitive(true);
    Some(value)
}

fn decode_percent(text: &str) -> Option<Vec<u8>> {
    let mut parts = text.split('%');
    let mut out = parts.next()?.as_bytes().to_vec();
    for part in parts {
        let (digits, rest) = part.split_at_checked(2)?;
        out.push(hex::decode(digits).ok()?.first().copied()?);
        out.extend_from_slice(rest.as_bytes());
    }
    Some(out)
}

/// Returns whether a host is connected to without a proxy: this node itself, and what `no_proxy` lists.
fn is_exempt(no_proxy: &str, host: &str, port: u16) -> bool {
    let address: Option<IpAddr> = host.parse().ok();
    host == "localhost"
        || address.is_some_and(|address| address.is_loopback())
        || no_proxy.split(',').any(|entry| matches_entry(&entry.trim().to_ascii_lowercase(), host, address, port))
}

/// Returns whether a host matches one entry: `*`, an address, a CIDR block, a domain with its subdomains, or a domain's
/// subdomains alone (`.domain`, `*.domain`). An entry may end with a port, except a CIDR block.
fn matches_entry(entry: &str, host: &str, address: Option<IpAddr>, port: u16) -> bool {
    if entry == "*" {
        return true;
    }
    if let Some((network, length)) = entry.split_once('/') {
        let network = network.parse().ok().zip(length.parse().ok());
        return network.zip(address).is_some_and(|((network, length), address)| contains(network, length, address));
    }
    let (name, entry_port) = match entry.rsplit_once(':') {
        Some((name, port)) if !name.contains(':') || name.ends_with(']') => (name, Some(port)),
        _ => (entry, None),
    };
    let name = name.trim_start_matches('[').trim_end_matches(']');
    if name.is_empty() || entry_port.is_some_and(|wanted| wanted.parse() != Ok(port)) {
        return false;
    }
    if let Ok(wanted) = name.parse::<IpAddr>() {
        return address == Some(wanted);
    }
    let name = name.strip_prefix('*').filter(|rest| rest.starts_with('.')).unwrap_or(name);
    match name.strip_prefix('.') {
        Some(domain) => host.strip_suffix(domain).is_some_and(|rest| rest.ends_with('.')),
        None => host.strip_suffix(name).is_some_and(|rest| rest.is_empty() || rest.ends_with('.')),
    }
}

fn contains(network: IpAddr, length: u32, address: IpAddr) -> bool {
    let (network, address, bits) = match (network, address) {
        (IpAddr::V4(network), IpAddr::V4(address)) => {
            (u128::from(network.to_bits()), u128::from(address.to_bits()), 32)
        }
        (IpAddr::V6(network), IpAddr::V6(address)) => (network.to_bits(), address.to_bits(), 128),
        _ => return false,
    };
    // A prefix of length 0 contains every address of its family; the shift would overflow only for IPv6.
    length <= bits && (network ^ address).checked_shr(bits - length).unwrap_or(0) == 0
}

/// Connects to a host directly or by a proxy.
#[derive(Clone)]
pub struct ProxyConnector {
    pub tcp: HttpConnector,
    pub proxy: Option<Proxy>,
}

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// The proxy cannot be reached, or does not connect to the host.
#[derive(Debug, thiserror::Error)]
#[error("cannot connect by the proxy {proxy}")]
struct ProxyError {
    proxy: String,
    source: BoxError,
}

impl Service<Uri> for ProxyConnector {
    type Response = ProxyStream;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<ProxyStream, BoxError>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.tcp.poll_ready(context).map_err(Into::into)
    }

    fn call(&mut self, host: Uri) -> Self::Future {
        let ProxyConnector { mut tcp, proxy } = self.clone();
        Box::pin(async move {
            let Some(Proxy { uri, authorization }) = proxy else {
                return Ok(ProxyStream { stream: tcp.call(host).await?, absolute_urls: false });
            };
            let absolute_urls = host.scheme_str() != Some("https");
            let name = uri.authority().map(ToString::to_string).unwrap_or_default();
            let stream: Result<_, BoxError> = if absolute_urls {
                tcp.call(uri).await.map_err(Into::into)
            } else {
                let tunnel = Tunnel::new(uri, tcp);
                let mut tunnel = match authorization {
                    Some(value) => tunnel.with_auth(value),
                    None => tunnel,
                };
                tunnel.call(host).await.map_err(Into::into)
            };
            let stream = stream.map_err(|source| ProxyError { proxy: name, source })?;
            Ok(ProxyStream { stream, absolute_urls })
        })
    }
}

/// A connection to a host, or to a proxy that needs absolute URLs.
pub struct ProxyStream {
    stream: TokioIo<TcpStream>,
    absolute_urls: bool,
}

impl Connection for ProxyStream {
    fn connected(&self) -> Connected {
        self.stream.connected().proxy(self.absolute_urls)
    }
}

impl Read for ProxyStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl Write for ProxyStream {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, pieces)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_exempt_as_in_go() {
        let list = "a.example, .b.example,*.c.example,10.0.0.0/8,fd00::/8,192.0.2.1,192.0.2.2:5000,d.example:5000,[2001:db8::1]:443,";
        for (host, port, exempt) in [
            ("a.example", 443, true),
            ("x.a.example", 443, true),
            ("xa.example", 443, false),
            ("b.example", 443, false),
            ("x.b.example", 443, true),
            ("c.example", 443, false),
            ("x.c.example", 443, true),
            ("10.1.2.3", 443, true),
            ("11.1.2.3", 443, false),
            ("fd12::1", 443, true),
            ("fe80::1", 443, false),
            ("192.0.2.1", 1, true),
            ("192.0.2.2", 5000, true),
            ("192.0.2.2", 443, false),
            ("d.example", 5000, true),
            ("d.example", 443, false),
            ("2001:db8::1", 443, true),
            ("2001:db8::1", 80, false),
            ("localhost", 443, true),
            ("127.9.9.9", 443, true),
            ("::1", 443, true),
            ("other.example", 443, false),
        ] {
            assert_eq!(is_exempt(list, host, port), exempt, "{host}:{port}");
        }
        assert!(is_exempt("*", "any.example", 1) && is_exempt("0.0.0.0/0,::/0", "192.0.2.9", 1));
        assert!(is_exempt("::/0", "2001:db8::1", 1) && !is_exempt("::/129,10.0.0.0/33,/,x/y", "10.0.0.1", 1));
    }

    #[test]
    fn proxies_are_parsed_with_their_credentials() {
        for (text, uri, header) in [
            ("p.example:3128", "http://p.example:3128/", None),
            ("http://p.example", "http://p.example/", None),
            ("http://u:p%40w@[::1]:1/x", "http://[::1]:1/", Some("Basic dTpwQHc=")),
            ("HTTP://p.example", "http://p.example/", None),
            ("u@h:1", "http://h:1/", Some("Basic dTo=")),
        ] {
            let proxy = parse_proxy(text).unwrap();
            assert_eq!(proxy.uri.to_string(), uri);
            assert_eq!(proxy.authorization.as_ref().map(|value| value.to_str().unwrap()), header, "{text}");
            assert!(proxy.authorization.is_none_or(|value| value.is_sensitive()));
        }
        for text in [
            "https://p:1",
            "socks5://p:1",
            "http://",
            "http://u:p%4@h:1",
            "http://u@",
            "h:",
            "h h",
            "http://u:1/2@p:1",
            "u?x@h",
        ] {
            assert!(parse_proxy(text).is_err(), "{text}");
        }
    }

    #[test]
    fn each_scheme_has_its_proxy() {
        let config = ProxyConfig { https_proxy: "p:1".into(), no_proxy: "direct.example".into(), ..Default::default() };
        let used = |url: &str| config.find_proxy(&url.parse().unwrap()).unwrap().is_some();
        assert!(used("https://a.example/v2/") && !used("http://a.example/v2/"));
        assert!(!used("https://DIRECT.example/") && !used("https://127.0.0.1:5000/") && !used("https://[::1]/"));
    }
}
