//! Writes and reads the manifest of an artifact: an OCI image manifest with an artifact type (OCI image specification 1.1,
//! manifest.md, "Guidelines for Artifact Usage"). The functions are pure. The bytes that they read are untrusted; the caller
//! bounds their size.

use crate::ImageError;
use crate::manifest::{Descriptor, ManifestError, RawDescriptor};
use nacelle_base::json;
use nacelle_model::digest::Digest;
use serde::Deserialize;
use serde_json::{Value, json};

/// The media type of all artifact manifests.
pub const MANIFEST_MEDIA_TYPE: &str = "application/vnd.oci.image.manifest.v1+json";
/// The single layer of an artifact without files: some registries require a layer.
pub const EMPTY_JSON: &[u8] = b"{}";
/// The media type of `EMPTY_JSON`.
pub const EMPTY_MEDIA_TYPE: &str = "application/vnd.oci.empty.v1+json";
/// The annotation with the display name of a layer.
pub const TITLE_ANNOTATION: &str = "org.opencontainers.image.title";

/// The media types of a kind of artifact.
#[derive(Debug, PartialEq, Eq)]
pub struct ArtifactKind {
    /// The artifact type.
    pub artifact: &'static str,
    /// The media type of the configuration.
    pub config: &'static str,
    /// The media type of the layers, which are compressed with zstd.
    pub layer: &'static str,
}

/// A validated manifest.
#[derive(Debug, PartialEq, Eq)]
pub struct ArtifactManifest {
    pub config: Descriptor,
    pub layers: Vec<Descriptor>,
}

/// Writes a manifest. The same content always gives the same bytes.
pub fn encode_manifest(kind: &ArtifactKind, config: &[u8], layers: &[(Descriptor, String)]) -> Vec<u8> {
    let descriptor =
        |kind: &str, digest: &Digest, size: u64| json!({ "mediaType": kind, "digest": digest, "size": size });
    let mut described: Vec<Value> = layers
        .iter()
        .map(|(blob, title)| {
            let mut layer = descriptor(kind.layer, &blob.digest, blob.size);
            layer["annotations"] = json!({ TITLE_ANNOTATION: title });
            layer
        })
        .collect();
    if described.is_empty() {
        described.push(descriptor(EMPTY_MEDIA_TYPE, &Digest::of(EMPTY_JSON), EMPTY_JSON.len() as u64));
    }
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": MANIFEST_MEDIA_TYPE,
        "artifactType": kind.artifact,
        "config": descriptor(kind.config, &Digest::of(config), config.len() as u64),
        "layers": described,
    });
    manifest.to_string().into_bytes()
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct RawArtifactManifest {
    #[serde(default)]
    schema_version: u64,
    #[serde(default)]
    media_type: Option<String>,
    #[serde(default)]
    artifact_type: Option<String>,
    config: Option<RawDescriptor>,
    layers: Option<Vec<RawDescriptor>>,
    manifests: Option<Vec<serde::de::IgnoredAny>>,
}

/// Reads a manifest of this kind. `name` is the name that it was found under, for errors.
pub fn decode_manifest(
    kind: &ArtifactKind,
    name: &str,
    bytes: &[u8],
    most: usize,
) -> Result<ArtifactManifest, ImageError> {
    let wrong = |source| ImageError::Manifest { what: format!("manifest of {name}"), source };
    let other = |found: &str| {
        let found = found.chars().filter(|c| !c.is_control()).take(100).collect();
        Err(ImageError::OtherArtifact { name: name.to_owned(), found, wanted: kind.artifact })
    };
    let raw: RawArtifactManifest = json::read(bytes).map_err(|source| wrong(source.into()))?;
    let (Some(config), Some(layers)) = (raw.config, raw.layers) else {
        return other(raw.media_type.as_deref().unwrap_or("no manifest"));
    };
    let of_config = config.media_type().unwrap_or_default();
    // Registries and tools older than OCI 1.1 may drop the artifact type.
    let said = raw.artifact_type.as_deref().filter(|said| !said.is_empty()).unwrap_or(of_config);
    let known = [kind.artifact, kind.config].contains(&said) && of_config == kind.config;
    if raw.manifests.is_some() || raw.schema_version != 2 || !known {
        return other(said);
    }
    if layers.len() > most {
        return Err(wrong(ManifestError::TooManyLayers { layers: layers.len(), most }));
    }
    let mut checked = Vec::with_capacity(layers.len());
    for layer in &layers {
        let named = layer.validate().map_err(wrong)?;
        match layer.media_type().unwrap_or_default() {
            EMPTY_MEDIA_TYPE if layers.len() == 1 => {}
            found if found == kind.layer => checked.push(named),
            found => return other(&format!("one with a layer {found}")),
        }
    }
    Ok(ArtifactManifest { config: config.validate().map_err(wrong)?, layers: checked })
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use nacelle_base::{Classify, FailureKind};
    use proptest::prelude::*;

    pub static SAMPLE: ArtifactKind = ArtifactKind {
        artifact: "application/vnd.a.v1",
        config: "application/vnd.a.config",
        layer: "application/vnd.a+zstd",
    };

    fn blob(n: u8) -> Descriptor {
        Descriptor { digest: Digest([n; 32]), size: u64::from(n) }
    }

    #[test]
    fn a_written_manifest_is_read_back() {
        for layers in [vec![], vec![blob(1)], vec![blob(1), blob(2)]] {
            let named: Vec<_> = layers.iter().map(|blob| (blob.clone(), "a".to_owned())).collect();
            let written = encode_manifest(&SAMPLE, b"{\"a\":1}", &named);
            let config = Descriptor { digest: Digest::of(b"{\"a\":1}"), size: 7 };
            assert_eq!(decode_manifest(&SAMPLE, "x", &written, 2).unwrap(), ArtifactManifest { config, layers });
            assert_eq!(written, encode_manifest(&SAMPLE, b"{\"a\":1}", &named));
        }
    }

    #[test]
    fn other_documents_are_rejected() {
        let named: Vec<_> = (1..4).map(|n| (blob(n), "a".to_owned())).collect();
        let whole: Value = serde_json::from_slice(&encode_manifest(&SAMPLE, b"{}", &named)).unwrap();
        let error_after_change = |key: &str, value: Value| {
            let mut changed = whole.clone();
            *changed.pointer_mut(key).unwrap() = value;
            let error = decode_manifest(&SAMPLE, "x", changed.to_string().as_bytes(), 3).unwrap_err();
            assert_eq!(error.kind(), FailureKind::Invalid, "{error}");
            nacelle_base::Chain(&error).to_string()
        };
        for (key, value, words) in [
            ("/artifactType", json!("application/vnd.b"), "application/vnd.b"),
            ("/config/mediaType", json!("application/vnd.oci.image.config.v1+json"), "but application/vnd.a.v1"),
            ("/schemaVersion", json!(1), "application/vnd.a.v1"),
            ("/layers/1/mediaType", json!(EMPTY_MEDIA_TYPE), "a layer application/vnd.oci.empty"),
            ("/layers/1/digest", json!("../../etc/passwd"), "not a sha256 digest"),
            ("/layers/1/size", json!(-1), "form"),
            ("/config/digest", json!("md5:0"), "not a sha256 digest"),
        ] {
            let error = error_after_change(key, value);
            assert!(error.contains(words), "{words:?} in {error}");
        }
        let error = decode_manifest(&SAMPLE, "x", whole.to_string().as_bytes(), 2).unwrap_err();
        assert!(nacelle_base::Chain(&error).to_string().contains("3 layers"), "{error}");
        for text in ["{}", "[]", "", r#"{"schemaVersion":2,"manifests":[]}"#] {
            assert_eq!(
                decode_manifest(&SAMPLE, "x", text.as_bytes(), 3).unwrap_err().kind(),
                FailureKind::Invalid,
                "{text}"
            );
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_without_panic(at in 0..400usize, byte: u8) {
            let mut whole = encode_manifest(&SAMPLE, b"{}", &[(blob(1), "a".to_owned())]);
            if let Some(target) = whole.get_mut(at) { *target = byte; }
            if let Ok(found) = decode_manifest(&SAMPLE, "x", &whole, 1) {
                prop_assert!(found.layers.len() <= 1);
            }
        }
    }
}
