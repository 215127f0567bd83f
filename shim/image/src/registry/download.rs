//! Downloads one blob, from the end of an earlier attempt on, across broken connections and mirrors. The bytes are not verified
//! here: the reader at the other end of the channel does that.

use super::{RegistryEndpoint, RegistrySession, is_transient};
use crate::ImageError;
use crate::manifest::Descriptor;
use ::http::StatusCode;
use ::http::header::CONTENT_RANGE;
use bytes::Bytes;
use nacelle_base::Chain;
use nacelle_model::digest::Digest;
use std::time::Duration;
use tokio::sync::mpsc::Sender;

/// The attempts without progress after which an endpoint is skipped.
pub const MAX_RETRIES: u32 = 4;

/// Sleeps before the next attempt: 0.1 s, doubled each time.
pub async fn sleep_before_retry(tries: u32) {
    tokio::time::sleep(Duration::from_millis(50 << tries.min(6))).await;
}

/// The messages to the reader. Without `End` the blob is incomplete.
#[derive(Debug)]
pub enum DownloadMessage {
    /// The next bytes.
    Data(Bytes),
    /// The end of the blob.
    End,
}

enum DownloadFailure {
    /// The reader closed the channel; its own error is the cause.
    ReceiverClosed,
    Error(ImageError),
}

impl From<ImageError> for DownloadFailure {
    fn from(error: ImageError) -> Self {
        DownloadFailure::Error(error)
    }
}

impl RegistrySession {
    /// Sends the bytes of a blob from `from` on. Also returns `Ok` if the reader closes the channel.
    pub async fn download_blob(
        &self,
        blob: &Descriptor,
        from: u64,
        to: Sender<DownloadMessage>,
    ) -> Result<(), ImageError> {
        let mut at = from;
        let mut last = None;
        for endpoint in &self.endpoints {
            let mut tries = 0;
            while tries <= MAX_RETRIES {
                let before = at;
                match self.download_from(endpoint, blob, &mut at, &to).await {
                    Ok(()) | Err(DownloadFailure::ReceiverClosed) => return Ok(()),
                    Err(DownloadFailure::Error(error)) => {
                        let again = is_transient(&error)
                            || matches!(error, ImageError::Request { .. } | ImageError::Timeout { .. });
                        tracing::info!(digest = %blob.digest, at, error = %Chain(&error), again, "a download failed");
                        last = Some(error);
                        if !again {
                            break;
                        }
                    }
                }
                tries = if at > before { 0 } else { tries + 1 };
                sleep_before_retry(tries).await;
            }
        }
        Err(last.unwrap_or_else(|| ImageError::NotFound { name: blob.digest.to_string() }))
    }

    async fn download_from(
        &self,
        endpoint: &RegistryEndpoint,
        blob: &Descriptor,
        at: &mut u64,
        to: &Sender<DownloadMessage>,
    ) -> Result<(), DownloadFailure> {
        if *at < blob.size {
            let mut response = self.request_blob(endpoint, blob.digest, *at).await?.into_success().await?;
            let range = response.headers.get(CONTENT_RANGE).and_then(|range| range.to_str().ok());
            let mut skip = match (response.status, range) {
                (StatusCode::PARTIAL_CONTENT, Some(range)) if range.starts_with(&format!("bytes {at}-")) => 0,
                (StatusCode::PARTIAL_CONTENT, _) => {
                    let why = "it contains another range than requested";
                    return Err(ImageError::Protocol { url: response.url, why }.into());
                }
                _ => *at,
            };
            while let Some(piece) = response.next_piece().await? {
                let known = usize::try_from(skip).unwrap_or(usize::MAX).min(piece.len());
                skip -= known as u64;
                let piece = piece.slice(known..);
                if *at + piece.len() as u64 > blob.size {
                    return Err(ImageError::TooLarge { what: format!("blob {}", blob.digest), limit: blob.size }.into());
                }
                if !piece.is_empty() {
                    *at += piece.len() as u64;
                    to.send(DownloadMessage::Data(piece)).await.map_err(|_cause| DownloadFailure::ReceiverClosed)?;
                }
            }
            if *at < blob.size {
                return Err(ImageError::ShortBody { url: response.url, got: *at, want: blob.size }.into());
            }
        }
        to.send(DownloadMessage::End).await.map_err(|_cause| DownloadFailure::ReceiverClosed)
    }

    /// Downloads a small blob as a whole and verifies it.
    pub async fn fetch_small_blob(&self, blob: &Descriptor, limit: u64, what: &str) -> Result<Vec<u8>, ImageError> {
        if blob.size > limit {
            return Err(ImageError::TooLarge { what: what.to_owned(), limit });
        }
        let (sender, mut receiver) = tokio::sync::mpsc::channel(8);
        let collect = async {
            let mut bytes = Vec::new();
            while let Some(DownloadMessage::Data(data)) = receiver.recv().await {
                bytes.extend_from_slice(&data);
            }
            bytes
        };
        let (sent, bytes) = tokio::join!(self.download_blob(blob, 0, sender), collect);
        sent?;
        match Digest::of(&bytes) {
            got if got == blob.digest => Ok(bytes),
            got => Err(ImageError::Digest { what: format!("{what} {}", blob.digest), got }),
        }
    }
}
