//! Uploads blobs and manifests to a registry: each blob in one request, out of a file, as fast as the registry accepts it.
//! Mirrors receive nothing.

use super::http::{resolve_location, url_without_query};
use super::{RegistryEndpoint, RegistrySession, download, is_transient};
use crate::manifest::Descriptor;
use crate::{ImageError, TransferProgress};
use ::http::header::{CONTENT_TYPE, LOCATION};
use ::http::{HeaderMap, HeaderValue, Method, StatusCode, Uri};
use bytes::Bytes;
use http_body_util::{Either, Full};
use hyper::body::{Body, Frame, SizeHint};
use nacelle_base::Chain;
use nacelle_base::files::at;
use nacelle_base::retry::retry_interrupted;
use nacelle_base::task::run_blocking;
use nacelle_model::digest::Digest;
use std::fs::File;
use std::io::{self, Read};
use std::path::PathBuf;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::sync::mpsc;

/// The bytes of one read.
const READ_SIZE: usize = 256 << 10;
/// The maximum number of pieces in transit.
const MAX_PIECES_IN_TRANSIT: usize = 4;

/// The body of a request.
pub enum RequestBody {
    /// A short body, or none.
    Bytes(Bytes),
    /// A file, opened again for each attempt.
    File {
        /// The file's path.
        path: PathBuf,
        /// The file's size in bytes.
        size: u64,
        /// The counter of the bytes that were sent.
        progress: TransferProgress,
    },
}

impl RequestBody {
    pub fn empty() -> RequestBody {
        RequestBody::Bytes(Bytes::new())
    }

    pub async fn open(&self) -> Result<Either<Full<Bytes>, FileBody>, ImageError> {
        let (path, size, progress) = match self {
            RequestBody::Bytes(bytes) => return Ok(Either::Left(Full::new(bytes.clone()))),
            RequestBody::File { path, size, progress } => (path.clone(), *size, progress.clone()),
        };
        let file =
            run_blocking("open a file for an upload", move || File::open(&path).map_err(at("open", &path))).await??;
        let (sender, pieces) = mpsc::channel(MAX_PIECES_IN_TRANSIT);
        tokio::task::spawn_blocking(move || send_file(file, &sender));
        Ok(Either::Right(FileBody { pieces, left: size, progress }))
    }

    /// Returns the response if it begins within the limit after the last byte that was sent, otherwise `None`.
    pub async fn await_response<T>(&self, limit: Duration, response: impl Future<Output = T>) -> Option<T> {
        let sent_bytes = || match self {
            RequestBody::Bytes(_) => 0,
            RequestBody::File { progress, .. } => progress.bytes(),
        };
        let mut response = pin!(response);
        loop {
            let before = sent_bytes();
            match tokio::time::timeout(limit, &mut response).await {
                Ok(response) => return Some(response),
                Err(_elapsed) if sent_bytes() != before => {}
                Err(_elapsed) => return None,
            }
        }
    }
}

/// Reads the file into the channel. Blocks. Ends when the receiver is dropped.
fn send_file(mut file: File, to: &mpsc::Sender<io::Result<Bytes>>) {
    loop {
        let mut piece = vec![0; READ_SIZE];
        let read = retry_interrupted(|| file.read(&mut piece)).map(|count| {
            piece.truncate(count);
            Bytes::from(piece)
        });
        let last = read.as_ref().map_or(true, Bytes::is_empty);
        if read.as_ref().is_ok_and(Bytes::is_empty) || to.blocking_send(read).is_err() || last {
            return;
        }
    }
}

/// A file that is being sent, as a request body.
pub struct FileBody {
    pieces: mpsc::Receiver<io::Result<Bytes>>,
    left: u64,
    progress: TransferProgress,
}

impl Body for FileBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        let this = self.get_mut();
        if this.left == 0 {
            return Poll::Ready(None);
        }
        let piece = match ready!(this.pieces.poll_recv(context)) {
            Some(Ok(piece)) => piece,
            Some(Err(error)) => return Poll::Ready(Some(Err(error))),
            None => return Poll::Ready(Some(Err(io::ErrorKind::UnexpectedEof.into()))),
        };
        let length = piece.len() as u64;
        if length > this.left {
            return Poll::Ready(Some(Err(io::ErrorKind::InvalidData.into())));
        }
        this.left -= length;
        this.progress.add(length);
        Poll::Ready(Some(Ok(Frame::data(piece))))
    }

    fn is_end_stream(&self) -> bool {
        self.left == 0
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.left)
    }
}

impl RegistrySession {
    /// Returns the endpoint of the registry itself.
    fn registry_endpoint(&self) -> Result<&RegistryEndpoint, ImageError> {
        self.endpoints.last().ok_or_else(|| ImageError::Url { url: self.registry.clone() })
    }

    /// Uploads a file as a blob, unless the registry has it.
    pub async fn upload_file(
        &self,
        blob: &Descriptor,
        path: PathBuf,
        progress: &TransferProgress,
    ) -> Result<(), ImageError> {
        let endpoint = self.registry_endpoint()?;
        let before = progress.bytes();
        let payload = RequestBody::File { path, size: blob.size, progress: progress.clone() };
        let mut tries = 0;
        loop {
            let put = match self.has_blob(endpoint, blob.digest).await {
                Ok(true) => {
                    progress.add(blob.size);
                    Ok(())
                }
                Ok(false) => self.put_blob(endpoint, blob.digest, &payload).await,
                Err(error) => Err(error),
            };
            match put {
                Err(error) if tries < download::MAX_RETRIES && is_transient(&error) => {
                    tries += 1;
                    tracing::info!(digest = %blob.digest, error = %Chain(&error), tries, "retrying the upload of a blob");
                    progress.set(before);
                    download::sleep_before_retry(tries).await;
                }
                put => return put,
            }
        }
    }

    /// Uploads a few bytes as a blob, unless the registry has them.
    pub async fn upload_bytes(&self, bytes: &Bytes) -> Result<Descriptor, ImageError> {
        let endpoint = self.registry_endpoint()?;
        let blob = Descriptor { digest: Digest::of(bytes), size: bytes.len() as u64 };
        if !self.has_blob(endpoint, blob.digest).await? {
            self.put_blob(endpoint, blob.digest, &RequestBody::Bytes(bytes.clone())).await?;
        }
        Ok(blob)
    }

    async fn put_blob(
        &self,
        endpoint: &RegistryEndpoint,
        digest: Digest,
        payload: &RequestBody,
    ) -> Result<(), ImageError> {
        let url = self.url(endpoint, "blobs/uploads/")?;
        let begun = self
            .send_authorized(endpoint, Method::POST, &url, HeaderMap::new(), &RequestBody::empty())
            .await?
            .into_success()
            .await?;
        let wrong = |why| ImageError::Protocol { url: begun.url.clone(), why };
        let location = begun.headers.get(LOCATION).and_then(|location| location.to_str().ok());
        let place = location.and_then(|location| resolve_location(&url, location));
        let place = place.ok_or_else(|| wrong("it has no valid Location header with the upload URL"))?;
        if url.scheme_str() == Some("https") && place.scheme_str() != Some("https") {
            return Err(wrong("the upload was started over https, but its URL is http"));
        }
        let joint = if place.query().is_some() { '&' } else { '?' };
        let text = format!("{place}{joint}digest=sha256%3A{}", digest.hex());
        let put: Uri = text.parse().map_err(|_cause| wrong("it has no valid Location header with the upload URL"))?;
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
        let response = match put.authority() == url.authority() && put.scheme() == url.scheme() {
            true => self.send_authorized(endpoint, Method::PUT, &put, headers, payload).await?,
            // Another host gets no credentials: the upload URL itself authorizes the request.
            false => self.http.send(Method::PUT, &put, headers, payload).await?,
        };
        check_created(&put, response.into_success().await?.status)
    }

    /// Uploads a manifest under a tag or its digest.
    pub async fn put_manifest(&self, tag: Option<&str>, kind: &'static str, bytes: &Bytes) -> Result<(), ImageError> {
        let endpoint = self.registry_endpoint()?;
        let digest = Digest::of(bytes).to_string();
        let url = self.url(endpoint, &format!("manifests/{}", tag.unwrap_or(&digest)))?;
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(kind));
        let response =
            self.send_authorized(endpoint, Method::PUT, &url, headers, &RequestBody::Bytes(bytes.clone())).await?;
        check_created(&url, response.into_success().await?.status)
    }
}

fn check_created(url: &Uri, status: StatusCode) -> Result<(), ImageError> {
    match status {
        StatusCode::CREATED | StatusCode::OK | StatusCode::NO_CONTENT => Ok(()),
        _ => Err(ImageError::Protocol { url: url_without_query(url), why: "it does not confirm the upload" }),
    }
}
