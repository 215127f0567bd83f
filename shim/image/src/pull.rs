//! Pulls an image: manifest, variant, configuration, layers, name, in this order.

use crate::install::{ImageNames, LayerSource, StoreState};
use crate::manifest::{self, ImageManifest, MAX_CONFIG, ManifestDocument, ManifestError};
use crate::registry::RegistrySession;
use crate::{Auth, ImageError, Reference};
use nacelle_model::digest::{Digest, ImageId};
use std::sync::Arc;

/// Pulls an image and gives it the reference's name.
pub async fn pull(shared: &Arc<StoreState>, reference: &Reference, auth: Option<Auth>) -> Result<ImageId, ImageError> {
    let session = Arc::new(RegistrySession::new(Arc::clone(&shared.http), reference, auth, false)?);
    let (manifest, digest) = manifest_of(&session, reference).await?;
    let names = ImageNames {
        // The tag of a reference with a digest is ignored: the registry was asked for the digest.
        tags: reference.digest().is_none().then(|| reference.to_string()).into_iter().collect(),
        digests: vec![reference.with_digest(digest).to_string()],
    };
    let id = manifest.config.digest;
    if shared.assign_names_if_delivered(id, names.clone()).await? {
        return Ok(id);
    }
    let config = session.fetch_small_blob(&manifest.config, MAX_CONFIG, "configuration").await?;
    let wrong = |source| ImageError::Manifest { what: format!("configuration {id} of {reference}"), source };
    let (_, diff_ids) = manifest::parse_config(&config).map_err(wrong)?;
    let layers = manifest::pair_layers(&manifest, &diff_ids).map_err(wrong)?;
    let layers = layers.into_iter().map(|(blob, diff_id)| (diff_id, LayerSource::Registry(Arc::clone(&session), blob)));
    shared.install_image(config, layers.collect(), names).await
}

/// Returns the manifest for this node, and the digest of the document that the reference names.
async fn manifest_of(session: &RegistrySession, reference: &Reference) -> Result<(ImageManifest, Digest), ImageError> {
    let (mut bytes, named) = session.fetch_manifest(reference.tag(), reference.digest()).await?;
    let mut digest = named;
    for _ in 0..3 {
        let wrong = |source| ImageError::Manifest { what: format!("manifest {digest} of {reference}"), source };
        match manifest::parse_manifest(&bytes).map_err(wrong)? {
            ManifestDocument::Manifest(manifest) => return Ok((manifest, named)),
            ManifestDocument::Index(ours) => (bytes, digest) = session.fetch_manifest(None, Some(ours.digest)).await?,
        }
    }
    let source = ManifestError::UnsupportedType { kind: "an index of indexes of indexes".to_owned() };
    Err(ImageError::Manifest { what: format!("manifest {named} of {reference}"), source })
}
