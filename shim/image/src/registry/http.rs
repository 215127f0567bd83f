//! Implements HTTP for the registry code: TLS per host, deadlines on progress, redirects that do not carry credentials to other
//! hosts, and bodies of bounded size.

use super::proxy::{Proxy, ProxyConnector};
use super::upload::{FileBody, RequestBody};
use crate::{ClientCertificate, DEFAULT_REGISTRY, ImageError, ImageStoreConfig, RegistryConfig};
use ::http::header::{AUTHORIZATION, HeaderMap, LOCATION, PROXY_AUTHORIZATION, USER_AGENT};
use ::http::{HeaderValue, Method, Request, StatusCode, Uri};
use bytes::Bytes;
use http_body_util::{BodyExt, Either, Full};
use hyper::body::Incoming;
use hyper_rustls::HttpsConnector;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use nacelle_base::files::at;
use nacelle_base::json;
use nacelle_base::task::run_blocking;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// The maximum number of redirects of one request.
const MAX_REDIRECTS: usize = 10;
/// The maximum bytes of an error response that are read for the message.
const MAX_ERROR_MESSAGE_BYTES: u64 = 16 << 10;

type HttpClient = Client<HttpsConnector<ProxyConnector>, Either<Full<Bytes>, FileBody>>;

/// The registry of references that name none, and the host that serves it.
pub const DOCKER_HUB: &str = "docker.io";
pub const DOCKER_HUB_HOST: &str = "registry-1.docker.io";

/// The clients of this process, one for each set of TLS settings and proxy.
pub struct HttpClients {
    config: ImageStoreConfig,
    clients: Mutex<HashMap<ClientKey, HttpClient>>,
    received: Arc<AtomicU64>,
}

type ClientKey = (TlsSettings, Option<Proxy>);

/// The settings by which a host's certificate is verified, and the certificate that the host receives.
#[derive(Clone, PartialEq, Eq, Hash)]
struct TlsSettings {
    skip: bool,
    ca_file: Option<PathBuf>,
    client_certificate: Option<ClientCertificate>,
}

/// A response whose body has not been read.
pub struct HttpResponse {
    /// The URL that answered, after redirects, without its query.
    pub url: String,
    /// The HTTP status.
    pub status: StatusCode,
    /// The response headers.
    pub headers: HeaderMap,
    body: Incoming,
    limit: Duration,
    /// The bytes that all responses of this process had.
    received: Arc<AtomicU64>,
}

/// Converts text that may come from an untrusted server to a header value.
pub fn header_value(text: &str) -> Result<HeaderValue, ImageError> {
    HeaderValue::from_str(text)
        .map_err(|_cause| ImageError::Protocol { url: String::new(), why: "a token contains control characters" })
}

impl HttpClients {
    /// Returns the clients for this configuration.
    pub fn new(config: ImageStoreConfig) -> HttpClients {
        HttpClients { config, clients: Mutex::default(), received: Arc::default() }
    }

    /// Returns the bytes of the bodies of all responses until now.
    pub fn received_bytes(&self) -> u64 {
        self.received.load(Ordering::Relaxed)
    }

    /// Returns the settings of a host. The host of Docker Hub has those of `docker.io`, unless it has an entry of its own.
    pub fn registry_config(&self, host: &str) -> RegistryConfig {
        let registries = &self.config.registries;
        let of_hub = || registries.get(DOCKER_HUB).filter(|_| host == DOCKER_HUB_HOST);
        registries.get(host).or_else(of_hub).cloned().unwrap_or_default()
    }

    /// Returns the URLs of a registry's mirrors: those of its entry, or the default ones if it has no entry.
    pub fn mirrors(&self, registry: &str) -> &[String] {
        let registries = &self.config.registries;
        let entry = registries.get(registry).or_else(|| registries.get(DEFAULT_REGISTRY));
        entry.map_or(&[], |entry| &entry.mirrors)
    }

    /// Sends a GET request. Follows redirects; the Authorization header goes to the first host only.
    pub async fn get(&self, url: &Uri, headers: HeaderMap) -> Result<HttpResponse, ImageError> {
        self.send_following_redirects(Method::GET, url, headers).await
    }

    /// Sends GET or HEAD, as `get`.
    pub async fn send_following_redirects(
        &self,
        method: Method,
        url: &Uri,
        headers: HeaderMap,
    ) -> Result<HttpResponse, ImageError> {
        let mut url = url.clone();
        let mut headers = headers;
        for _ in 0..=MAX_REDIRECTS {
            let response = self.send(method.clone(), &url, headers.clone(), &RequestBody::empty()).await?;
            if !matches!(response.status.as_u16(), 301 | 302 | 303 | 307 | 308) {
                return Ok(response);
            }
            let wrong = |why| ImageError::Protocol { url: response.url.clone(), why };
            let location = response.headers.get(LOCATION).and_then(|location| location.to_str().ok());
            let next = location.and_then(|location| resolve_location(&url, location));
            let next = next.ok_or_else(|| wrong("it redirects without a valid Location header"))?;
            if url.scheme_str() == Some("https") && next.scheme_str() != Some("https") {
                return Err(wrong("it redirects from https to http"));
            }
            if next.authority() != url.authority() || next.scheme() != url.scheme() {
                headers.remove(AUTHORIZATION);
            }
            url = next;
        }
        Err(ImageError::Protocol { url: url_without_query(&url), why: "it redirects more than 10 times" })
    }

    /// Sends one request and follows no redirects. The response must begin within the configured time limit, counted from the last
    /// byte that was sent.
    pub async fn send(
        &self,
        method: Method,
        url: &Uri,
        headers: HeaderMap,
        payload: &RequestBody,
    ) -> Result<HttpResponse, ImageError> {
        let host = url.authority().map(|authority| authority.as_str()).unwrap_or_default();
        let proxy = self.config.proxy.find_proxy(url)?;
        // Inside of a tunnel, the registry would receive the header.
        let for_proxy = proxy.as_ref().filter(|_| url.scheme_str() != Some("https"));
        let for_proxy = for_proxy.and_then(|proxy| proxy.authorization.clone());
        let by_proxy = proxy.is_some() && url.scheme_str() != Some("https");
        let client = self.client(host, proxy).await?;
        let mut request = Request::new(payload.open().await?);
        *request.method_mut() = method;
        *request.uri_mut() = url.clone();
        *request.headers_mut() = headers;
        let agent = HeaderValue::from_static(concat!("nacelle/", env!("CARGO_PKG_VERSION")));
        request.headers_mut().insert(USER_AGENT, agent);
        request.headers_mut().extend(for_proxy.map(|value| (PROXY_AUTHORIZATION, value)));
        let limit = self.config.progress_timeout.max(Duration::from_secs(1));
        let response = payload.await_response(limit, client.request(request)).await;
        let response =
            response.ok_or_else(|| ImageError::Timeout { url: url_without_query(url), seconds: limit.as_secs() })?;
        let (parts, body) =
            response.map_err(|source| ImageError::Request { url: url_without_query(url), source })?.into_parts();
        if by_proxy && parts.status == StatusCode::PROXY_AUTHENTICATION_REQUIRED {
            let why = "it requires other credentials (407)";
            return Err(ImageError::Proxy { scheme: "http", why });
        }
        Ok(HttpResponse {
            url: url_without_query(url),
            status: parts.status,
            headers: parts.headers,
            body,
            limit,
            received: Arc::clone(&self.received),
        })
    }

    /// Returns the client that verifies this host's certificate as configured, and connects by the proxy.
    async fn client(&self, host: &str, proxy: Option<Proxy>) -> Result<HttpClient, ImageError> {
        let RegistryConfig { skip_tls_verify: skip, ca_file, client_certificate, .. } = self.registry_config(host);
        let settings = TlsSettings { skip, ca_file, client_certificate };
        let known = |key: &ClientKey| self.clients.lock().unwrap_or_else(PoisonError::into_inner).get(key).cloned();
        let key = (settings.clone(), proxy.clone());
        if let Some(client) = known(&key) {
            return Ok(client);
        }
        let tls = run_blocking("read the CA certificates of a registry", move || tls_config(&settings)).await??;
        let mut tcp = HttpConnector::new();
        tcp.enforce_http(false);
        tcp.set_nodelay(true);
        tcp.set_connect_timeout(Some(
            self.config.progress_timeout.clamp(Duration::from_secs(1), Duration::from_secs(30)),
        ));
        let connector = hyper_rustls::HttpsConnectorBuilder::new().with_tls_config(tls).https_or_http().enable_http1();
        let client = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(Duration::from_secs(15))
            .build(connector.wrap_connector(ProxyConnector { tcp, proxy }));
        self.clients.lock().unwrap_or_else(PoisonError::into_inner).insert(key, client.clone());
        Ok(client)
    }
}

impl HttpResponse {
    /// Returns the response if its status is a success, otherwise an error with the registry's message.
    pub async fn into_success(self) -> Result<HttpResponse, ImageError> {
        if self.status.is_success() {
            return Ok(self);
        }
        let (url, status) = (self.url.clone(), self.status.as_u16());
        let body = self.read_body(MAX_ERROR_MESSAGE_BYTES, "the error message").await.unwrap_or_default();
        Err(ImageError::Status { url, status, message: error_message(&body) })
    }

    /// Returns the next piece of the body, or `None` at its end.
    pub async fn next_piece(&mut self) -> Result<Option<Bytes>, ImageError> {
        loop {
            let frame = tokio::time::timeout(self.limit, self.body.frame()).await;
            let frame =
                frame.map_err(|_cause| ImageError::Timeout { url: self.url.clone(), seconds: self.limit.as_secs() })?;
            match frame {
                None => return Ok(None),
                Some(Err(source)) => return Err(ImageError::BrokenBody { url: self.url.clone(), source }),
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) if data.is_empty() => {}
                    Ok(data) => {
                        self.received.fetch_add(data.len() as u64, Ordering::Relaxed);
                        return Ok(Some(data));
                    }
                    Err(_trailers) => {}
                },
            }
        }
    }

    /// Returns the whole body, or an error if it is larger than `limit`.
    pub async fn read_body(mut self, limit: u64, what: &str) -> Result<Vec<u8>, ImageError> {
        let mut all = Vec::new();
        while let Some(piece) = self.next_piece().await? {
            if (all.len() + piece.len()) as u64 > limit {
                return Err(ImageError::TooLarge { what: what.to_owned(), limit });
            }
            all.extend_from_slice(&piece);
        }
        Ok(all)
    }
}

/// Returns the message of the first error in a registry's JSON.
pub(super) fn error_message(body: &[u8]) -> String {
    let json: serde_json::Value = json::read(body).unwrap_or_default();
    let text = json.pointer("/errors/0/message").or_else(|| json.get("details")).and_then(|text| text.as_str());
    text.map(|text| format!(": {}", text.chars().filter(|c| !c.is_control()).take(300).collect::<String>()))
        .unwrap_or_default()
}

/// Returns a URL without its query, which may contain secrets.
pub fn url_without_query(url: &Uri) -> String {
    let authority = url.authority().map(|authority| authority.as_str()).unwrap_or_default();
    let authority = authority.rsplit_once('@').map_or(authority, |(_, host)| host);
    format!("{}://{authority}{}", url.scheme_str().unwrap_or_default(), url.path())
}

/// Resolves a Location header. Returns `None` unless the result is http or https.
pub fn resolve_location(base: &Uri, location: &str) -> Option<Uri> {
    let text = if location.starts_with("//") {
        format!("{}:{location}", base.scheme_str()?)
    } else if location.starts_with('/') {
        format!("{}://{}{location}", base.scheme_str()?, base.authority()?)
    } else if location.contains("://") {
        location.to_owned()
    } else {
        let directory = base.path().rsplit_once('/').map_or("", |(directory, _)| directory);
        format!("{}://{}{directory}/{location}", base.scheme_str()?, base.authority()?)
    };
    let uri: Uri = text.split('#').next()?.parse().ok()?;
    (matches!(uri.scheme_str(), Some("http" | "https")) && uri.authority().is_some()).then_some(uri)
}

/// Builds the TLS configuration. Blocks: it reads the system's certificates and the configured files.
fn tls_config(settings: &TlsSettings) -> Result<rustls::ClientConfig, ImageError> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder =
        rustls::ClientConfig::builder_with_provider(Arc::clone(&provider)).with_safe_default_protocol_versions()?;
    let builder = if settings.skip {
        let verifier = Arc::new(SkippedCertificateCheck(provider));
        builder.dangerous().with_custom_certificate_verifier(verifier)
    } else {
        let mut roots = rustls::RootCertStore::empty();
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        for certificate in settings.ca_file.as_deref().map(read_certificates).transpose()?.unwrap_or_default() {
            roots.add(certificate)?;
        }
        builder.with_root_certificates(roots)
    };
    let Some(ClientCertificate { certificate, key }) = &settings.client_certificate else {
        return Ok(builder.with_no_client_auth());
    };
    let pem = std::fs::read(key).map_err(at("read", key))?;
    let private =
        PrivateKeyDer::from_pem_slice(&pem).map_err(|source| ImageError::PrivateKey { path: key.clone(), source })?;
    builder.with_client_auth_cert(read_certificates(certificate)?, private).map_err(|source| {
        ImageError::ClientCertificate { certificate: certificate.clone(), key: key.clone(), source: Box::new(source) }
    })
}

/// Checks a file with certificates of authorities, as requests to a registry use it. Blocks.
pub fn check_authorities(path: &Path) -> Result<(), ImageError> {
    let mut roots = rustls::RootCertStore::empty();
    read_certificates(path)?.into_iter().try_for_each(|certificate| Ok(roots.add(certificate)?))
}

/// Checks the files of a client certificate, as requests to a registry use them. Blocks.
pub fn check_client_certificate(certificate: &ClientCertificate) -> Result<(), ImageError> {
    let settings = TlsSettings { skip: true, ca_file: None, client_certificate: Some(certificate.clone()) };
    tls_config(&settings).map(drop)
}

/// Reads the certificates of a PEM file.
fn read_certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, ImageError> {
    let pem = std::fs::read(path).map_err(at("read", path))?;
    let certificates: Result<_, _> = CertificateDer::pem_slice_iter(&pem).collect();
    certificates.map_err(|source| ImageError::Certificates { path: path.to_owned(), source })
}

/// Accepts any certificate, because the administrator configured it for this host. Signatures are still verified.
#[derive(Debug)]
struct SkippedCertificateCheck(Arc<rustls::crypto::CryptoProvider>);

impl ServerCertVerifier for SkippedCertificateCheck {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &rustls::DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        rustls::crypto::verify_tls12_signature(
            message,
            certificate,
            signature,
            &self.0.signature_verification_algorithms,
        )
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &rustls::DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        rustls::crypto::verify_tls13_signature(
            message,
            certificate,
            signature,
            &self.0.signature_verification_algorithms,
        )
    }

    fn supported_verify_schemes(&self) -> Vec<rustls::SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_settings_of_docker_hub_are_those_of_its_host() {
        let with = |ca: &str| RegistryConfig { ca_file: Some(ca.into()), ..RegistryConfig::default() };
        let ca_of = |registries: &[(&str, &str)]| {
            let registries = registries.iter().map(|(host, ca)| ((*host).to_owned(), with(ca))).collect();
            let clients = HttpClients::new(ImageStoreConfig { registries, ..ImageStoreConfig::default() });
            ["registry-1.docker.io", "docker.io", "r"].map(|host| clients.registry_config(host).ca_file)
        };
        let ca = |name: &str| Some(PathBuf::from(name));
        assert_eq!(ca_of(&[("docker.io", "hub")]), [ca("hub"), ca("hub"), None]);
        assert_eq!(ca_of(&[("docker.io", "hub"), ("registry-1.docker.io", "own")]), [ca("own"), ca("hub"), None]);
    }

    #[test]
    fn locations_are_joined() {
        let base: Uri = "https://a:1/v2/x/blobs/y".parse().unwrap();
        for (location, whole) in [
            ("https://b/z?q=1#f", Some("https://b/z?q=1")),
            ("//b/z", Some("https://b/z")),
            ("/z", Some("https://a:1/z")),
            ("z", Some("https://a:1/v2/x/blobs/z")),
            ("ftp://b/z", None),
            ("https://", None),
        ] {
            assert_eq!(resolve_location(&base, location).map(|uri| uri.to_string()).as_deref(), whole, "{location}");
        }
    }

    #[test]
    fn secrets_of_urls_are_not_shown() {
        assert_eq!(url_without_query(&"https://u:p@h:1/a?sig=s".parse().unwrap()), "https://h:1/a");
    }

    #[test]
    fn a_registrys_words_are_cut_to_size() {
        assert_eq!(error_message(br#"{"errors":[{"message":"no\nsuch"}]}"#), ": nosuch");
        assert_eq!(error_message(b"<html>"), "");
    }

    proptest! {
        #[test]
        fn any_location_is_read_without_harm(location in "\\PC{0,60}") {
            let _ = resolve_location(&"https://a:1/v2/x".parse().unwrap(), &location);
            let _ = error_message(location.as_bytes());
        }
    }
}
