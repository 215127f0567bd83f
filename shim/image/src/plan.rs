//! Describes what `install` needs of an image or artifact, whatever source it comes from.

use crate::ImageError;
use crate::artifact::VM_TYPES_PREFIX;
use crate::artifact::files::{ArtifactFile, FileArtifact};
use crate::catalogue::{Images, assign_tag};
use crate::layer::ingest::LayerError;
use crate::manifest::{Descriptor, ImageManifest, ManifestError, pair_layers, parse_config};
use crate::registry::RegistrySession;
use nacelle_model::digest::{Digest, ImageId};
use std::io::Read;
use std::sync::Arc;

/// An image or artifact, ready to be installed.
pub struct ImagePlan {
    /// The digest of the document.
    pub id: ImageId,
    /// The document that identifies it: the configuration of an image, or the manifest of an artifact.
    pub document: Vec<u8>,
    /// The user of the image's configuration; empty for an artifact.
    pub user: String,
    /// The artifact type; `None` for an image.
    pub artifact_type: Option<String>,
    /// The layers, lowest first.
    pub layers: Vec<LayerPlan>,
    /// The names that it gets.
    pub names: ImageNames,
}

/// A layer of a plan.
pub struct LayerPlan {
    /// The layer's name in the store.
    pub name: Digest,
    /// The source of its bytes.
    pub source: LayerSource,
    /// The size of the source in bytes, for people who wait; 0 if it is unknown.
    pub size: u64,
    /// The meaning of the bytes.
    pub form: LayerForm,
}

/// The source of a layer.
pub enum LayerSource {
    /// A registry.
    Registry(Arc<RegistrySession>, Descriptor),
    /// A stream from an archive, and the digest of its content if the archive has one.
    Archive(Box<dyn Read + Send>, Option<Digest>),
}

/// The meaning of a layer's bytes.
#[derive(Clone, Debug)]
pub enum LayerForm {
    /// A tar archive, compressed or not. The layer's name is the digest of the archive.
    Tar,
    /// The content of one file. The layer's name is [`ArtifactFile::layer_name`].
    File(ArtifactFile),
}

/// The names that an image gets.
#[derive(Clone, Debug, Default)]
pub struct ImageNames {
    /// Tags. Other images lose them.
    pub tags: Vec<String>,
    /// Digest references.
    pub digests: Vec<String>,
}

impl ImageNames {
    /// Adds the names to an image of the list, which is no longer removed then. Returns whether the list has the image.
    pub fn assign(&self, images: &mut Images, id: &ImageId) -> bool {
        let Some(stored) = images.get_mut(id) else { return false };
        stored.removed = false;
        stored.digests.extend(self.digests.iter().cloned());
        for tag in &self.tags {
            assign_tag(images, id, tag);
        }
        true
    }
}

impl ImagePlan {
    /// Plans an image by its manifest and configuration. `source` returns the source of a layer.
    pub fn of_image(
        manifest: &ImageManifest,
        config: Vec<u8>,
        names: ImageNames,
        mut source: impl FnMut(Descriptor) -> Result<LayerSource, ImageError>,
        wrong: impl Fn(ManifestError) -> ImageError,
    ) -> Result<ImagePlan, ImageError> {
        let (parsed, diff_ids) = parse_config(&config).map_err(&wrong)?;
        let layers = pair_layers(manifest, &diff_ids).map_err(&wrong)?;
        let layer = |(blob, name): (Descriptor, Digest)| {
            let size = blob.size;
            source(blob).map(|source| LayerPlan { name, source, size, form: LayerForm::Tar })
        };
        let layers = layers.into_iter().map(layer).collect::<Result<_, _>>()?;
        let id = Digest::of(&config);
        Ok(ImagePlan { id, document: config, user: parsed.user, artifact_type: None, layers, names })
    }

    /// Plans an artifact by its manifest. `max_file_bytes` bounds each file; `source` returns the source of one.
    pub fn of_artifact(
        artifact: FileArtifact,
        manifest: Vec<u8>,
        names: ImageNames,
        max_file_bytes: u64,
        mut source: impl FnMut(Descriptor) -> Result<LayerSource, ImageError>,
    ) -> Result<ImagePlan, ImageError> {
        if artifact.artifact_type.starts_with(VM_TYPES_PREFIX) {
            let name = names.digests.first().cloned().unwrap_or_else(|| Digest::of(&manifest).to_string());
            return Err(ImageError::VmArtifact { name });
        }
        if let Some(file) = artifact.files.iter().find(|file| file.blob.size > max_file_bytes) {
            let source = LayerError::too_many_bytes(max_file_bytes).into();
            return Err(ImageError::Layer { digest: file.blob.digest, source });
        }
        let layer = |file: ArtifactFile| {
            let source = source(file.blob.clone())?;
            Ok(LayerPlan { name: file.layer_name(), source, size: file.blob.size, form: LayerForm::File(file) })
        };
        let layers = artifact.files.into_iter().map(layer).collect::<Result<_, ImageError>>()?;
        let (id, artifact_type) = (Digest::of(&manifest), Some(artifact.artifact_type));
        Ok(ImagePlan { id, document: manifest, user: String::new(), artifact_type, layers, names })
    }
}
