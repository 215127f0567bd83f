//! Communicates with a registry and its mirrors: endpoints, tokens, manifests and blobs. Of this crate it uses only the
//! configuration, digests and the limits of manifests. Credentials go only to the endpoint that they are for.

mod auth;
pub mod auth_file;
pub mod download;
#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;
pub(crate) mod http;
mod proxy;
mod upload;

use crate::manifest::{ACCEPT, Descriptor, MAX_MANIFEST};
use crate::origins::LayerOrigin;
use crate::{Auth, ImageError, Reference};
use ::http::header::{ACCEPT as ACCEPT_HEADER, AUTHORIZATION, RANGE};
use ::http::{HeaderMap, HeaderValue, Method, StatusCode, Uri};
use auth::AuthChallenge;
pub use http::HttpClients;
use http::{HttpResponse, header_value};
use nacelle_base::task::run_blocking;
use nacelle_base::{Classify, FailureKind};
use nacelle_model::digest::Digest;
use std::path::PathBuf;
use std::sync::Arc;
use upload::RequestBody;

/// The requests of one pull to a registry and its mirrors.
pub struct RegistrySession {
    http: Arc<HttpClients>,
    /// The endpoints in the order of use: the mirrors first, the registry itself last.
    endpoints: Vec<RegistryEndpoint>,
    /// The registry that the reference names; mirrors that serve several registries need it.
    registry: String,
    repository: String,
}

struct RegistryEndpoint {
    /// The base URL, `https://host:port` or longer, without a final slash.
    base: String,
    mirror: bool,
    /// The credentials that this endpoint may receive.
    auth: Option<Auth>,
    /// The file and host of a mirror's own credentials, which are used if `auth` is absent.
    auth_file: Option<(PathBuf, String)>,
    /// The last Authorization header that the endpoint accepted.
    authorization: tokio::sync::Mutex<Option<HeaderValue>>,
}

impl RegistryEndpoint {
    /// Returns the credentials for this endpoint. Reads a mirror's file at each use, so that a change takes effect at once.
    async fn find_auth(&self) -> Result<Option<Auth>, ImageError> {
        match (&self.auth, &self.auth_file) {
            (None, Some((path, host))) => {
                let (path, host) = (path.clone(), host.clone());
                let read = move || {
                    let found = auth_file::read_auth_file(&path, &host)?;
                    found.ok_or(ImageError::NoCredentials { path, host }).map(Some)
                };
                run_blocking("read the credentials of a registry mirror", read).await?
            }
            (auth, _) => Ok(auth.clone()),
        }
    }
}

impl RegistrySession {
    /// Returns a session for one repository. `plain` means HTTP even if the configuration does not say so.
    pub fn new(
        http: Arc<HttpClients>,
        reference: &Reference,
        auth: Option<Auth>,
        plain: bool,
    ) -> Result<RegistrySession, ImageError> {
        let registry = reference.registry();
        let auth = auth.filter(|auth| *auth != Auth::default());
        let server =
            auth.as_ref().map(|auth| auth::server_host(&auth.server_address)).filter(|server| !server.is_empty());
        let registry_config = http.registry_config(registry);
        let endpoint = |base: String, mirror: bool| {
            let base = base.trim_end_matches('/').to_owned();
            let uri: Uri = base.parse().map_err(|_cause| ImageError::Url { url: base.clone() })?;
            let host = uri.authority().map(|authority| authority.as_str().to_owned());
            let host = host.filter(|_| matches!(uri.scheme_str(), Some("http" | "https")));
            let host = host.ok_or_else(|| ImageError::Url { url: base.clone() })?;
            let may_see = match &server {
                Some(server) => *server == host || !mirror && server == registry,
                None => !mirror,
            };
            let auth = auth.clone().filter(|_| may_see);
            let auth_file = http.registry_config(&host).auth_file.filter(|_| mirror).map(|path| (path, host));
            Ok::<_, ImageError>(RegistryEndpoint { base, mirror, auth, auth_file, authorization: Default::default() })
        };
        let mut endpoints = Vec::new();
        for mirror in http.mirrors(registry) {
            endpoints.push(endpoint(mirror.clone(), true)?);
        }
        let scheme = if registry_config.http || plain { "http" } else { "https" };
        let host = if registry == http::DOCKER_HUB { http::DOCKER_HUB_HOST } else { registry };
        endpoints.push(endpoint(format!("{scheme}://{host}"), false)?);
        Ok(RegistrySession {
            http,
            endpoints,
            registry: registry.to_owned(),
            repository: reference.repository().to_owned(),
        })
    }

    /// Returns the origin of a layer that this registry delivers as `blob`.
    pub fn origin_of(&self, blob: &Descriptor) -> LayerOrigin {
        LayerOrigin { registry: self.registry.clone(), blob: blob.digest }
    }

    /// Returns whether an endpoint says that this client may read a blob of the repository; false if none can be asked.
    pub async fn may_read_blob(&self, digest: Digest) -> bool {
        for endpoint in &self.endpoints {
            match self.has_blob(endpoint, digest).await {
                Ok(true) => return true,
                Ok(false) => {}
                Err(error) => {
                    tracing::debug!(%digest, error = %nacelle_base::Chain(&error), "cannot ask a registry for a blob");
                }
            }
        }
        false
    }

    /// Returns whether this client may read a blob of the repository.
    async fn has_blob(&self, endpoint: &RegistryEndpoint, digest: Digest) -> Result<bool, ImageError> {
        let url = self.url(endpoint, &format!("blobs/{digest}"))?;
        let response =
            self.send_authorized(endpoint, Method::HEAD, &url, HeaderMap::new(), &RequestBody::empty()).await?;
        match response.status {
            // A client without permission to read may still have permission to write.
            StatusCode::NOT_FOUND | StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => Ok(false),
            _ => response.into_success().await.map(|_there| true),
        }
    }

    /// Returns a manifest or index by tag or digest, and its digest, from the first endpoint that has it.
    pub async fn fetch_manifest(
        &self,
        tag: Option<&str>,
        digest: Option<Digest>,
    ) -> Result<(Vec<u8>, Digest), ImageError> {
        let by_digest = digest.map(|digest| digest.to_string());
        let name = by_digest.as_deref().or(tag).unwrap_or("latest");
        let mut last = None;
        for endpoint in &self.endpoints {
            let mut tries = 0;
            loop {
                match self.fetch_manifest_from(endpoint, name, digest).await {
                    Ok(found) => return Ok(found),
                    Err(error) if tries < download::MAX_RETRIES && is_transient(&error) => {
                        tries += 1;
                        tracing::debug!(error = %nacelle_base::Chain(&error), tries, "retrying the request for a manifest");
                        download::sleep_before_retry(tries).await;
                    }
                    Err(error) => {
                        let chain = nacelle_base::Chain(&error);
                        match (endpoint.mirror, error.kind()) {
                            // This node's configuration is wrong.
                            (true, FailureKind::Internal) => {
                                tracing::warn!(error = %chain, "skipping a registry mirror")
                            }
                            (true, _) => tracing::info!(error = %chain, "skipping a registry mirror"),
                            (false, _) => {}
                        }
                        last = Some(error);
                        break;
                    }
                }
            }
        }
        Err(last.unwrap_or_else(|| ImageError::NotFound { name: name.to_owned() }))
    }

    async fn fetch_manifest_from(
        &self,
        endpoint: &RegistryEndpoint,
        name: &str,
        digest: Option<Digest>,
    ) -> Result<(Vec<u8>, Digest), ImageError> {
        let mut headers = HeaderMap::new();
        headers.insert(ACCEPT_HEADER, HeaderValue::from_static(ACCEPT));
        let response = self.get(endpoint, &format!("manifests/{name}"), headers).await?.into_success().await?;
        let what = format!("manifest {name} of {}", self.repository);
        let bytes = response.read_body(MAX_MANIFEST, &what).await?;
        let got = Digest::of(&bytes);
        match digest {
            Some(digest) if digest != got => Err(ImageError::Digest { what, got }),
            _ => Ok((bytes, got)),
        }
    }

    /// Requests a blob from byte `from` on.
    async fn request_blob(
        &self,
        endpoint: &RegistryEndpoint,
        digest: Digest,
        from: u64,
    ) -> Result<HttpResponse, ImageError> {
        let mut headers = HeaderMap::new();
        if from > 0 {
            headers.insert(RANGE, header_value(&format!("bytes={from}-"))?);
        }
        self.get(endpoint, &format!("blobs/{digest}"), headers).await
    }

    /// Sends a GET request with the credentials that the endpoint requires. Returns a response with an error status as it is.
    async fn get(
        &self,
        endpoint: &RegistryEndpoint,
        path: &str,
        headers: HeaderMap,
    ) -> Result<HttpResponse, ImageError> {
        let url = self.url(endpoint, path)?;
        self.send_authorized(endpoint, Method::GET, &url, headers, &RequestBody::empty()).await
    }

    /// Returns a URL of the repository at this endpoint.
    fn url(&self, endpoint: &RegistryEndpoint, path: &str) -> Result<Uri, ImageError> {
        let query = if endpoint.mirror { format!("?ns={}", self.registry) } else { String::new() };
        let text = format!("{}/v2/{}/{path}{query}", endpoint.base, self.repository);
        text.parse().map_err(|_cause| ImageError::Url { url: text })
    }

    /// Sends a request with the credentials that the endpoint requires. Returns a response with an error status as it is.
    async fn send_authorized(
        &self,
        endpoint: &RegistryEndpoint,
        method: Method,
        url: &Uri,
        headers: HeaderMap,
        payload: &RequestBody,
    ) -> Result<HttpResponse, ImageError> {
        let used = endpoint.authorization.lock().await.clone();
        let response = self.send_once(&method, url, with_authorization(&headers, used.as_ref()), payload).await?;
        if response.status != StatusCode::UNAUTHORIZED {
            return Ok(response);
        }
        let mut authorization = endpoint.authorization.lock().await;
        if *authorization == used {
            match self.authorize(endpoint, auth::find_challenges(&response.headers)).await? {
                Some(new) => *authorization = Some(new),
                None => return Ok(response),
            }
        }
        let now = authorization.clone();
        drop(authorization);
        self.send_once(&method, url, with_authorization(&headers, now.as_ref()), payload).await
    }

    async fn send_once(
        &self,
        method: &Method,
        url: &Uri,
        headers: HeaderMap,
        payload: &RequestBody,
    ) -> Result<HttpResponse, ImageError> {
        match *method {
            Method::GET | Method::HEAD => self.http.send_following_redirects(method.clone(), url, headers).await,
            _ => self.http.send(method.clone(), url, headers, payload).await,
        }
    }

    /// Returns the Authorization header that answers one of these challenges, or `None` if no credentials fit.
    async fn authorize(
        &self,
        endpoint: &RegistryEndpoint,
        challenges: Vec<AuthChallenge>,
    ) -> Result<Option<HeaderValue>, ImageError> {
        let auth = endpoint.find_auth().await?;
        let auth = auth.as_ref();
        if let Some(token) = auth.map(|auth| &auth.registry_token).filter(|token| !token.is_empty()) {
            return auth::bearer_header(token).map(Some);
        }
        let bearer = challenges.iter().find(|challenge| challenge.scheme.eq_ignore_ascii_case("bearer"));
        if let Some(challenge) = bearer {
            let token = auth::fetch_token(&self.http, &endpoint.base, &self.repository, challenge, auth).await?;
            return auth::bearer_header(&token).map(Some);
        }
        let basic = challenges.iter().any(|challenge| challenge.scheme.eq_ignore_ascii_case("basic"));
        match auth.and_then(auth::basic_header).filter(|_| basic) {
            Some(value) => value.map(Some),
            None => Ok(None),
        }
    }
}

fn with_authorization(headers: &HeaderMap, authorization: Option<&HeaderValue>) -> HeaderMap {
    let mut headers = headers.clone();
    if let Some(value) = authorization {
        headers.insert(AUTHORIZATION, value.clone());
    }
    headers
}

/// Returns whether a retry may help.
fn is_transient(error: &ImageError) -> bool {
    match error {
        ImageError::Request { source, .. } => !source.is_connect(),
        ImageError::Digest { .. } | ImageError::Protocol { .. } => false,
        error => error.kind() == FailureKind::Unavailable,
    }
}
