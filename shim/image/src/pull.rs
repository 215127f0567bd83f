//! Pulls an image or artifact: manifest, variant, configuration of an image, layers, name, in this order.

use crate::install::StoreState;
use crate::manifest::{self, Descriptor, MAX_CONFIG, Manifest, ManifestDocument, ManifestError};
use crate::plan::{ImageNames, ImagePlan, LayerSource};
use crate::progress::InstallationCounter;
use crate::registry::RegistrySession;
use crate::{Auth, ImageError, Reference};
use nacelle_base::timeline::Timeline;
use nacelle_model::digest::{Digest, ImageId};
use std::sync::Arc;

/// Pulls an image or artifact and gives it the reference's name; counts its layers. Adds its steps to `timeline`: "manifest",
/// "configuration", "layer" for each layer (download and unpacking run at the same time) and "tree".
pub async fn pull(
    shared: &Arc<StoreState>,
    reference: &Reference,
    auth: Option<Auth>,
    counter: &InstallationCounter,
    timeline: &Timeline,
) -> Result<ImageId, ImageError> {
    let session = Arc::new(RegistrySession::new(Arc::clone(&shared.http), reference, auth, false)?);
    let (bytes, manifest, named) = timeline.measure("manifest", fetch_manifest(&session, reference)).await?;
    let names = ImageNames {
        // The tag of a reference with a digest is ignored: the registry was asked for the digest.
        tags: reference.digest().is_none().then(|| reference.to_string()).into_iter().collect(),
        digests: vec![reference.with_digest(named).to_string()],
    };
    let id = match &manifest {
        Manifest::Image(image) => image.config.digest,
        Manifest::Artifact(_) => Digest::of(&bytes),
    };
    if shared.assign_names_if_delivered(id, names.clone()).await? {
        return Ok(id);
    }
    let source = |blob: Descriptor| Ok(LayerSource::Registry(Arc::clone(&session), blob));
    let plan = match manifest {
        Manifest::Image(image) => {
            let fetched = session.fetch_small_blob(&image.config, MAX_CONFIG, "configuration");
            let config = timeline.measure("configuration", fetched).await?;
            let wrong = |source| ImageError::Manifest { what: format!("configuration {id} of {reference}"), source };
            ImagePlan::of_image(&image, config, names, source, wrong)?
        }
        Manifest::Artifact(artifact) => {
            ImagePlan::of_artifact(artifact, bytes, names, shared.config.max_layer_bytes, source)?
        }
    };
    shared.install_image(plan, counter, timeline).await
}

/// Returns the manifest for this node, as bytes and parsed, and the digest of the document that the reference names.
async fn fetch_manifest(
    session: &RegistrySession,
    reference: &Reference,
) -> Result<(Vec<u8>, Manifest, Digest), ImageError> {
    let (mut bytes, named) = session.fetch_manifest(reference.tag(), reference.digest()).await?;
    let mut digest = named;
    for _ in 0..3 {
        let wrong = |source| ImageError::Manifest { what: format!("manifest {digest} of {reference}"), source };
        match manifest::parse_manifest(&bytes).map_err(wrong)? {
            ManifestDocument::Index(ours) => (bytes, digest) = session.fetch_manifest(None, Some(ours.digest)).await?,
            ManifestDocument::Manifest(manifest) => return Ok((bytes, manifest, named)),
        }
    }
    let source = ManifestError::UnsupportedType { kind: "an index of indexes of indexes".to_owned() };
    Err(ImageError::Manifest { what: format!("manifest {named} of {reference}"), source })
}
