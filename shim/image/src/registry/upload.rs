//! Uploads blobs and manifests to a registry: each blob in one request, out of a file, as fast as the registry accepts it.
//! Mirrors receive nothing.

use super::http::{join, shown};
use super::{Endpoint, Session, download, is_passing};
use crate::manifest::Descriptor;
use crate::{ImageError, Moved};
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
const PIECE: usize = 256 << 10;
/// The maximum number of pieces in transit.
const PIECES: usize = 4;

/// The body of a request.
pub enum Payload {
    /// A short body, or none.
    Bytes(Bytes),
    /// A file, opened again for each attempt.
    File {
        /// The file's path.
        path: PathBuf,
        /// The file's size in bytes.
        size: u64,
        /// The counter of the bytes that were sent.
        moved: Moved,
    },
}

impl Payload {
    pub fn none() -> Payload {
        Payload::Bytes(Bytes::new())
    }

    pub async fn open(&self) -> Result<Either<Full<Bytes>, Outgoing>, ImageError> {
        let (path, size, moved) = match self {
            Payload::Bytes(bytes) => return Ok(Either::Left(Full::new(bytes.clone()))),
            Payload::File { path, size, moved } => (path.clone(), *size, moved.clone()),
        };
        let file =
            run_blocking("open a file for an upload", move || File::open(&path).map_err(at("open", &path))).await??;
        let (sender, pieces) = mpsc::channel(PIECES);
        tokio::task::spawn_blocking(move || read(file, &sender));
        Ok(Either::Right(Outgoing { pieces, left: size, moved }))
    }

    /// Returns the answer if it comes within the limit after the last byte that moved, otherwise `None`.
    pub async fn in_time<T>(&self, limit: Duration, answer: impl Future<Output = T>) -> Option<T> {
        let moved = || match self {
            Payload::Bytes(_) => 0,
            Payload::File { moved, .. } => moved.bytes(),
        };
        let mut answer = pin!(answer);
        loop {
            let before = moved();
            match tokio::time::timeout(limit, &mut answer).await {
                Ok(answer) => return Some(answer),
                Err(_elapsed) if moved() != before => {}
                Err(_elapsed) => return None,
            }
        }
    }
}

/// Reads the file into the channel. Blocks. Ends when the receiver is dropped.
fn read(mut file: File, to: &mpsc::Sender<io::Result<Bytes>>) {
    loop {
        let mut piece = vec![0; PIECE];
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
pub struct Outgoing {
    pieces: mpsc::Receiver<io::Result<Bytes>>,
    left: u64,
    moved: Moved,
}

impl Body for Outgoing {
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
        this.moved.add(length);
        Poll::Ready(Some(Ok(Frame::data(piece))))
    }

    fn is_end_stream(&self) -> bool {
        self.left == 0
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.left)
    }
}

impl Session {
    /// Returns the endpoint of the registry itself.
    fn registry(&self) -> Result<&Endpoint, ImageError> {
        self.endpoints.last().ok_or_else(|| ImageError::Url { url: self.registry.clone() })
    }

    /// Uploads a file as a blob, unless the registry has it.
    pub async fn upload(&self, blob: &Descriptor, path: PathBuf, moved: &Moved) -> Result<(), ImageError> {
        let endpoint = self.registry()?;
        let before = moved.bytes();
        let payload = Payload::File { path, size: blob.size, moved: moved.clone() };
        let mut tries = 0;
        loop {
            let put = match self.has_blob(endpoint, blob.digest).await {
                Ok(true) => {
                    moved.add(blob.size);
                    Ok(())
                }
                Ok(false) => self.put_blob(endpoint, blob.digest, &payload).await,
                Err(error) => Err(error),
            };
            match put {
                Err(error) if tries < download::TRIES && is_passing(&error) => {
                    tries += 1;
                    tracing::info!(digest = %blob.digest, error = %Chain(&error), tries, "sending the blob again");
                    moved.set(before);
                    download::pause(tries).await;
                }
                put => return put,
            }
        }
    }

    /// Uploads a few bytes as a blob, unless the registry has them.
    pub async fn upload_bytes(&self, bytes: &Bytes) -> Result<Descriptor, ImageError> {
        let endpoint = self.registry()?;
        let blob = Descriptor { digest: Digest::of(bytes), size: bytes.len() as u64 };
        if !self.has_blob(endpoint, blob.digest).await? {
            self.put_blob(endpoint, blob.digest, &Payload::Bytes(bytes.clone())).await?;
        }
        Ok(blob)
    }

    async fn has_blob(&self, endpoint: &Endpoint, digest: Digest) -> Result<bool, ImageError> {
        let url = self.url(endpoint, &format!("blobs/{digest}"))?;
        let answer = self.ask(endpoint, Method::HEAD, &url, HeaderMap::new(), &Payload::none()).await?;
        match answer.status {
            // A client without permission to read may still have permission to write.
            StatusCode::NOT_FOUND | StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => Ok(false),
            _ => answer.ok().await.map(|_there| true),
        }
    }

    async fn put_blob(&self, endpoint: &Endpoint, digest: Digest, payload: &Payload) -> Result<(), ImageError> {
        let url = self.url(endpoint, "blobs/uploads/")?;
        let begun = self.ask(endpoint, Method::POST, &url, HeaderMap::new(), &Payload::none()).await?.ok().await?;
        let wrong = |why| ImageError::Protocol { url: begun.url.clone(), why };
        let location = begun.headers.get(LOCATION).and_then(|location| location.to_str().ok());
        let place = location.and_then(|location| join(&url, location));
        let place = place.ok_or_else(|| wrong("it does not say where to send the blob"))?;
        if url.scheme_str() == Some("https") && place.scheme_str() != Some("https") {
            return Err(wrong("it wants by http what was begun by https"));
        }
        let joint = if place.query().is_some() { '&' } else { '?' };
        let text = format!("{place}{joint}digest=sha256%3A{}", digest.hex());
        let put: Uri = text.parse().map_err(|_cause| wrong("it does not say where to send the blob"))?;
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
        let answer = match put.authority() == url.authority() && put.scheme() == url.scheme() {
            true => self.ask(endpoint, Method::PUT, &put, headers, payload).await?,
            // Another host gets no credentials: the upload URL itself authorizes the request.
            false => self.http.send(Method::PUT, &put, headers, payload).await?,
        };
        created(&put, answer.ok().await?.status)
    }

    /// Uploads a manifest under a tag or its digest.
    pub async fn put_manifest(&self, tag: Option<&str>, kind: &'static str, bytes: &Bytes) -> Result<(), ImageError> {
        let endpoint = self.registry()?;
        let digest = Digest::of(bytes).to_string();
        let url = self.url(endpoint, &format!("manifests/{}", tag.unwrap_or(&digest)))?;
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(kind));
        let answer = self.ask(endpoint, Method::PUT, &url, headers, &Payload::Bytes(bytes.clone())).await?;
        created(&url, answer.ok().await?.status)
    }
}

fn created(url: &Uri, status: StatusCode) -> Result<(), ImageError> {
    match status {
        StatusCode::CREATED | StatusCode::OK | StatusCode::NO_CONTENT => Ok(()),
        _ => Err(ImageError::Protocol { url: shown(url), why: "it does not say that it has taken what it was sent" }),
    }
}
