//! Pushes and fetches artifacts: a configuration and compressed files that other crates of this project keep in a registry or in
//! an OCI layout, and reads artifacts of others as files (`files`). An artifact is not an image. Everything that is fetched is bounded,
//! and verified before it is used. Compression and file access block on blocking threads, as in `ImageStore`.

mod compress;
mod document;
pub mod files;
mod layout;

pub use crate::manifest::Descriptor;
pub use compress::{CompressedFile, FileContent, TransferProgress, compress_file};
pub use document::ArtifactKind;

use crate::registry::RegistrySession;
use crate::registry::download::DownloadMessage;
use crate::{Auth, ImageError, ImageStore, Reference};
use bytes::{Buf, Bytes};
use layout::LayoutReference;
use nacelle_base::task::run_blocking;
use nacelle_model::digest::Digest;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use tokio::sync::mpsc;

/// The artifact type of a persistent VM, which is imported and never mounted.
pub const VM_ARTIFACT_TYPE: &str = "application/vnd.nacelle.machine.v1";
/// The beginning of all media types of persistent VMs. Old registries may drop the artifact type.
pub(crate) const VM_TYPES_PREFIX: &str = "application/vnd.nacelle.machine.";

/// The prefix of a name that means a layout on the node instead of a registry: `oci:/DIRECTORY` or `oci:/DIRECTORY:TAG`.
const LAYOUT_PREFIX: &str = "oci:";

/// The manifest and configuration of an artifact. Both are verified; the layers are not yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Artifact {
    /// The digest of the manifest.
    pub digest: Digest,
    /// The content of the configuration.
    pub config: Vec<u8>,
    /// The compressed files.
    pub layers: Vec<Descriptor>,
}

/// The name of an artifact, and the client or layout behind it.
pub struct Artifacts {
    location: ArtifactLocation,
}

enum ArtifactLocation {
    Registry(Box<RegistrySession>, Reference),
    Layout(LayoutReference),
}

impl ImageStore {
    /// Opens the artifacts of this name: an image reference, or `oci:/DIRECTORY:TAG`. `plain_http` means that the registry is
    /// contacted over HTTP even if the configuration does not say so.
    pub fn artifacts(&self, name: &str, auth: Option<Auth>, plain_http: bool) -> Result<Artifacts, ImageError> {
        let location = match name.strip_prefix(LAYOUT_PREFIX) {
            Some(layout) => ArtifactLocation::Layout(LayoutReference::parse(name, layout)?),
            None => {
                let reference = Reference::parse(name)?;
                let session = RegistrySession::new(self.http_clients(), &reference, auth, plain_http)?;
                ArtifactLocation::Registry(Box::new(session), reference)
            }
        };
        Ok(Artifacts { location })
    }
}

impl Artifacts {
    /// Uploads a file.
    pub async fn upload_file(&self, packed: &CompressedFile, progress: &TransferProgress) -> Result<(), ImageError> {
        let CompressedFile { path, blob, .. } = packed;
        match &self.location {
            ArtifactLocation::Registry(session, _) => session.upload_file(blob, path.clone(), progress).await,
            ArtifactLocation::Layout(layout) => {
                let (layout, path, blob, progress) = (layout.clone(), path.clone(), blob.clone(), progress.clone());
                run_blocking("write a blob into an OCI layout", move || {
                    layout.put_blob(&path, &blob)?;
                    progress.add(blob.size);
                    Ok(())
                })
                .await?
            }
        }
    }

    /// Publishes configuration and manifest under the name. All layers must have been uploaded.
    pub async fn publish(
        &self,
        kind: &'static ArtifactKind,
        config: Vec<u8>,
        layers: Vec<(Descriptor, String)>,
    ) -> Result<Digest, ImageError> {
        let config = Bytes::from(config);
        let manifest = Bytes::from(document::encode_manifest(kind, &config, &layers));
        let digest = Digest::of(&manifest);
        match &self.location {
            ArtifactLocation::Registry(session, reference) => {
                if let Some(named) = reference.digest() {
                    // A later fetch by this digest would not find it.
                    if named != digest {
                        return Err(ImageError::Digest { what: format!("artifact {reference}"), got: digest });
                    }
                }
                session.upload_bytes(&config).await?;
                if layers.is_empty() {
                    session.upload_bytes(&Bytes::from_static(document::EMPTY_JSON)).await?;
                }
                session.put_manifest(reference.tag(), document::MANIFEST_MEDIA_TYPE, &manifest).await?;
            }
            ArtifactLocation::Layout(layout) => {
                let layout = layout.clone();
                run_blocking("write an artifact into an OCI layout", move || {
                    if layers.is_empty() {
                        layout.put_bytes(document::EMPTY_JSON)?;
                    }
                    layout.put_bytes(&config)?;
                    layout.publish(kind, &manifest)
                })
                .await??;
            }
        }
        Ok(digest)
    }

    /// Returns the artifact of the name if it is of this kind and has at most `most` layers and a bounded configuration.
    pub async fn fetch_artifact(
        &self,
        kind: &'static ArtifactKind,
        most_layers: usize,
        most_config: u64,
    ) -> Result<Artifact, ImageError> {
        let (manifest, digest) = match &self.location {
            ArtifactLocation::Registry(session, reference) => {
                session.fetch_manifest(reference.tag(), reference.digest()).await?
            }
            ArtifactLocation::Layout(layout) => {
                let layout = layout.clone();
                run_blocking("read the manifest of an artifact", move || layout.read_manifest()).await??
            }
        };
        let found = document::decode_manifest(kind, &self.name(), &manifest, most_layers)?;
        let config = match &self.location {
            ArtifactLocation::Registry(session, _) => {
                session.fetch_small_blob(&found.config, most_config, "configuration").await?
            }
            ArtifactLocation::Layout(layout) => {
                let (layout, wanted) = (layout.clone(), found.config.clone());
                run_blocking("read the configuration of an artifact", move || {
                    layout.read_blob(&wanted, most_config, "configuration")
                })
                .await??
            }
        };
        Ok(Artifact { digest, config, layers: found.layers })
    }

    /// Downloads a file and unpacks it into `to`, which is empty. Fails if the data do not match `blob` and `content`; the
    /// content of the file is then undefined.
    pub async fn fetch_file(
        &self,
        blob: &Descriptor,
        content: &FileContent,
        to: File,
        path: &Path,
        progress: &TransferProgress,
    ) -> Result<(), ImageError> {
        let (blob, content, progress, path) = (blob.clone(), content.clone(), progress.clone(), path.to_owned());
        match &self.location {
            ArtifactLocation::Registry(session, _) => {
                let wanted = blob.clone();
                let (sender, receiver) = mpsc::channel(64);
                let unpacking = run_blocking("unpack a file of an artifact", move || {
                    let source = DownloadReader { receiver, piece: Bytes::new(), ended: false };
                    compress::decompress(source, &blob, &content, &to, &path, &progress)
                });
                let (sent, unpacked) = tokio::join!(session.download_blob(&wanted, 0, sender), unpacking);
                // If the download failed, the unpacking thread only sees that the stream ended, so the error of the download
                // comes first.
                sent.and_then(|()| unpacked?)
            }
            ArtifactLocation::Layout(layout) => {
                let layout = layout.clone();
                let unpack =
                    move || compress::decompress(layout.open_blob(&blob)?, &blob, &content, &to, &path, &progress);
                run_blocking("unpack a file of an artifact", unpack).await?
            }
        }
    }

    /// The name for messages.
    pub fn name(&self) -> String {
        match &self.location {
            ArtifactLocation::Registry(_, reference) => reference.to_string(),
            ArtifactLocation::Layout(layout) => layout.name(),
        }
    }
}

/// A download as a byte stream.
struct DownloadReader {
    receiver: mpsc::Receiver<DownloadMessage>,
    piece: Bytes,
    ended: bool,
}

impl Read for DownloadReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.piece.is_empty() && !self.ended {
            match self.receiver.blocking_recv() {
                Some(DownloadMessage::Data(data)) => self.piece = data,
                Some(DownloadMessage::End) => self.ended = true,
                None => return Err(io::ErrorKind::ConnectionAborted.into()),
            }
        }
        let length = buffer.len().min(self.piece.len());
        self.piece.copy_to_slice(buffer.get_mut(..length).unwrap_or_default());
        Ok(length)
    }
}

/// Packs a file of these bytes. For tests of later stages.
#[cfg(test)]
fn sample(directory: &Path, name: &str, bytes: &[u8]) -> CompressedFile {
    let (from, to) = (directory.join(name), directory.join(format!("{name}.zst")));
    std::fs::write(&from, bytes).unwrap();
    compress_file(std::fs::File::open(&from).unwrap(), &from, &to, &TransferProgress::default()).unwrap()
}
