//! Owns: artifacts: what lies in a registry, or in an OCI layout, and is no image: a configuration and compressed files, as others of this
//! project want to keep them there. What comes from there is bounded, and verified before it counts.
//! May use: `registry`. Threads: as `Store`.

mod document;
mod layout;
mod packed;

pub use crate::manifest::Descriptor;
pub use document::ArtifactKind;
pub use packed::{Content, Moved, Packed, pack};

use crate::registry::Session;
use crate::registry::download::Part;
use crate::{Auth, ImageError, Reference, Store};
use bytes::{Buf, Bytes};
use layout::Layout;
use nacelle_base::task::run_blocking;
use nacelle_model::digest::Digest;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use tokio::sync::mpsc;

/// How a layout on the node is named, in place of a registry: `oci:/FOLDER` or `oci:/FOLDER:TAG`.
const LAYOUT: &str = "oci:";

/// An artifact as it was found, verified but for its layers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Artifact {
    /// Of its manifest.
    pub digest: Digest,
    /// Its configuration.
    pub config: Vec<u8>,
    /// Its files, compressed.
    pub layers: Vec<Descriptor>,
}

/// One name for artifacts, and the way there.
pub struct Artifacts {
    place: Place,
}

enum Place {
    Registry(Box<Session>, Reference),
    Layout(Layout),
}

impl Store {
    /// Artifacts under this name, which is a reference as of an image, or `oci:/FOLDER:TAG`. `plain_http`: the registry is asked by
    /// http, also if the configuration does not say so.
    pub fn artifacts(&self, name: &str, auth: Option<Auth>, plain_http: bool) -> Result<Artifacts, ImageError> {
        let place = match name.strip_prefix(LAYOUT) {
            Some(layout) => Place::Layout(Layout::parse(name, layout)?),
            None => {
                let reference = Reference::parse(name)?;
                let session = Session::new(self.http(), &reference, auth, plain_http)?;
                Place::Registry(Box::new(session), reference)
            }
        };
        Ok(Artifacts { place })
    }
}

impl Artifacts {
    /// Puts a file there.
    pub async fn put(&self, packed: &Packed, moved: &Moved) -> Result<(), ImageError> {
        let Packed { path, blob, .. } = packed;
        match &self.place {
            Place::Registry(session, _) => session.upload(blob, path.clone(), moved).await,
            Place::Layout(layout) => {
                let (layout, path, blob, moved) = (layout.clone(), path.clone(), blob.clone(), moved.clone());
                run_blocking("write a blob into an OCI layout", move || {
                    layout.put(&path, &blob)?;
                    moved.add(blob.size);
                    Ok(())
                })
                .await?
            }
        }
    }

    /// Puts configuration and manifest there, when all layers are, and gives them the name.
    pub async fn publish(
        &self,
        kind: &'static ArtifactKind,
        config: Vec<u8>,
        layers: Vec<(Descriptor, String)>,
    ) -> Result<Digest, ImageError> {
        let config = Bytes::from(config);
        let manifest = Bytes::from(document::write(kind, &config, &layers));
        let digest = Digest::of(&manifest);
        match &self.place {
            Place::Registry(session, reference) => {
                if let Some(named) = reference.digest() {
                    // It would not be found under it.
                    if named != digest {
                        return Err(ImageError::Digest { what: format!("artifact {reference}"), got: digest });
                    }
                }
                session.upload_bytes(&config).await?;
                if layers.is_empty() {
                    session.upload_bytes(&Bytes::from_static(document::NOTHING)).await?;
                }
                session.put_manifest(reference.tag(), document::MANIFEST, &manifest).await?;
            }
            Place::Layout(layout) => {
                let layout = layout.clone();
                run_blocking("write an artifact into an OCI layout", move || {
                    if layers.is_empty() {
                        layout.put_bytes(document::NOTHING)?;
                    }
                    layout.put_bytes(&config)?;
                    layout.publish(kind, &manifest)
                })
                .await??;
            }
        }
        Ok(digest)
    }

    /// What lies under the name, if it is of this kind: with at most so many layers, and so many bytes of configuration.
    pub async fn find(
        &self,
        kind: &'static ArtifactKind,
        most_layers: usize,
        most_config: u64,
    ) -> Result<Artifact, ImageError> {
        let (manifest, digest) = match &self.place {
            Place::Registry(session, reference) => session.manifest(reference.tag(), reference.digest()).await?,
            Place::Layout(layout) => {
                let layout = layout.clone();
                run_blocking("read the manifest of an artifact", move || layout.manifest()).await??
            }
        };
        let found = document::read(kind, &self.name(), &manifest, most_layers)?;
        let config = match &self.place {
            Place::Registry(session, _) => session.small_blob(&found.config, most_config, "configuration").await?,
            Place::Layout(layout) => {
                let (layout, wanted) = (layout.clone(), found.config.clone());
                run_blocking("read the configuration of an artifact", move || {
                    layout.bytes(&wanted, most_config, "configuration")
                })
                .await??
            }
        };
        Ok(Artifact { digest, config, layers: found.layers })
    }

    /// Brings a file, and unpacks it into this one, which is empty. If it is not as `blob` and `content` say, that is an error,
    /// and what the file has then means nothing.
    pub async fn fetch(
        &self,
        blob: &Descriptor,
        content: &Content,
        to: File,
        path: &Path,
        moved: &Moved,
    ) -> Result<(), ImageError> {
        let (blob, content, moved, path) = (blob.clone(), content.clone(), moved.clone(), path.to_owned());
        match &self.place {
            Place::Registry(session, _) => {
                let wanted = blob.clone();
                let (sender, receiver) = mpsc::channel(64);
                let taking = run_blocking("unpack a file of an artifact", move || {
                    let source = Incoming { receiver, piece: Bytes::new(), ended: false };
                    packed::unpack(source, &blob, &content, &to, &path, &moved)
                });
                let (sent, taken) = tokio::join!(session.download(&wanted, 0, sender), taking);
                // If the download broke off, the other end only knows that nothing came any more.
                sent.and_then(|()| taken?)
            }
            Place::Layout(layout) => {
                let layout = layout.clone();
                let unpack = move || packed::unpack(layout.open(&blob)?, &blob, &content, &to, &path, &moved);
                run_blocking("unpack a file of an artifact", unpack).await?
            }
        }
    }

    /// For people.
    pub fn name(&self) -> String {
        match &self.place {
            Place::Registry(_, reference) => reference.to_string(),
            Place::Layout(layout) => layout.name(),
        }
    }
}

/// A download as a stream.
struct Incoming {
    receiver: mpsc::Receiver<Part>,
    piece: Bytes,
    ended: bool,
}

impl Read for Incoming {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.piece.is_empty() && !self.ended {
            match self.receiver.blocking_recv() {
                Some(Part::Data(data)) => self.piece = data,
                Some(Part::End) => self.ended = true,
                None => return Err(io::ErrorKind::ConnectionAborted.into()),
            }
        }
        let length = buffer.len().min(self.piece.len());
        self.piece.copy_to_slice(buffer.get_mut(..length).unwrap_or_default());
        Ok(length)
    }
}

/// A file of these bytes that was packed: for tests of what comes after.
#[cfg(test)]
fn sample(folder: &Path, name: &str, bytes: &[u8]) -> Packed {
    let (from, to) = (folder.join(name), folder.join(format!("{name}.zst")));
    std::fs::write(&from, bytes).unwrap();
    pack(std::fs::File::open(&from).unwrap(), &from, &to, &Moved::default()).unwrap()
}
