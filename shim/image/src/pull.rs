//! Pulls an image: manifest, variant, configuration, layers, name, in this order.

use crate::install::{Names, Shared, Source};
use crate::manifest::{self, Document, MAX_CONFIG, Manifest, ManifestError};
use crate::registry::Session;
use crate::{Auth, ImageError, Reference};
use nacelle_model::digest::{Digest, ImageId};
use std::sync::Arc;

/// Pulls an image and gives it the reference's name.
pub async fn pull(shared: &Arc<Shared>, reference: &Reference, auth: Option<Auth>) -> Result<ImageId, ImageError> {
    let session = Arc::new(Session::new(Arc::clone(&shared.http), reference, auth, false)?);
    let (manifest, digest) = manifest_of(&session, reference).await?;
    let names = Names {
        // The tag of a reference with a digest is ignored: the registry was asked for the digest.
        tags: reference.digest().is_none().then(|| reference.to_string()).into_iter().collect(),
        digests: vec![reference.with_digest(digest).to_string()],
    };
    let id = manifest.config.digest;
    if shared.name(id, names.clone()).await? {
        return Ok(id);
    }
    let config = session.small_blob(&manifest.config, MAX_CONFIG, "configuration").await?;
    let wrong = |source| ImageError::Manifest { what: format!("configuration {id} of {reference}"), source };
    let (_, diff_ids) = manifest::parse_config(&config).map_err(wrong)?;
    let layers = manifest::pair(&manifest, &diff_ids).map_err(wrong)?;
    let layers = layers.into_iter().map(|(blob, diff_id)| (diff_id, Source::Registry(Arc::clone(&session), blob)));
    shared.install(config, layers.collect(), names).await
}

/// Returns the manifest for this node, and the digest of the document that the reference names.
async fn manifest_of(session: &Session, reference: &Reference) -> Result<(Manifest, Digest), ImageError> {
    let (mut bytes, named) = session.manifest(reference.tag(), reference.digest()).await?;
    let mut digest = named;
    for _ in 0..3 {
        let wrong = |source| ImageError::Manifest { what: format!("manifest {digest} of {reference}"), source };
        match manifest::parse(&bytes).map_err(wrong)? {
            Document::Manifest(manifest) => return Ok((manifest, named)),
            Document::Index(ours) => (bytes, digest) = session.manifest(None, Some(ours.digest)).await?,
        }
    }
    let source = ManifestError::Kind { kind: "an index of indexes of indexes".to_owned() };
    Err(ImageError::Manifest { what: format!("manifest {named} of {reference}"), source })
}
