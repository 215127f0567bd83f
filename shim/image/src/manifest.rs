//! Parses the JSON of registries and archives: manifests, indexes, image configurations. The JSON is untrusted; the callers bound
//! its size.

use crate::ImageConfig;
use crate::artifact::files::FileArtifact;
use nacelle_base::json;
use nacelle_model::digest::Digest;
use serde::Deserialize;
use serde::de::IgnoredAny;
use std::collections::BTreeMap;

/// The maximum size in bytes of a manifest or index.
pub const MAX_MANIFEST: u64 = 4 << 20;
/// The maximum size in bytes of an image configuration.
pub const MAX_CONFIG: u64 = 4 << 20;
/// The maximum number of layers of an image.
const MAX_LAYERS: usize = 1000;

/// The Accept header of a manifest request.
pub const ACCEPT: &str = "application/vnd.oci.image.index.v1+json, \
    application/vnd.docker.distribution.manifest.list.v2+json, application/vnd.oci.image.manifest.v1+json, \
    application/vnd.docker.distribution.manifest.v2+json";

/// Reasons that JSON is not a usable manifest or configuration.
#[derive(Debug, thiserror::Error)]
pub enum ManifestError {
    /// The text is not JSON, or a field is missing or has the wrong type.
    #[error("it is not JSON of the expected form")]
    Malformed(#[from] serde_json::Error),
    /// The manifest has an unsupported type.
    #[error("its type is not supported: {kind}")]
    UnsupportedType {
        /// The media type, or another description of the type.
        kind: String,
    },
    /// A digest is malformed.
    #[error("it contains {text:?}, which is not a sha256 digest")]
    Digest {
        /// The text.
        text: String,
    },
    /// The image has no variant for this node.
    #[error("the image has no variant for linux/{architecture}; it has {has}")]
    Platform {
        /// The node's architecture.
        architecture: &'static str,
        /// The architectures of the image.
        has: String,
    },
    /// Manifest and configuration have different numbers of layers, or too many.
    #[error(
        "it has {layers} layers and the configuration lists {diff_ids}; the numbers must be equal and at most 1000"
    )]
    Layers {
        /// The number in the manifest.
        layers: usize,
        /// The number in the configuration.
        diff_ids: usize,
    },
    /// A layer of an artifact has a name that no file can have.
    #[error("the name of one of its layers, {path:?}, cannot be the path of a file: {why}")]
    FileName {
        /// The name, truncated to 100 characters.
        path: String,
        /// The rule that the name violates.
        why: &'static str,
    },
    /// The artifact has more layers than its kind allows.
    #[error("it has {layers} layers; at most {most} are allowed")]
    TooManyLayers {
        /// The number in the manifest.
        layers: usize,
        /// The maximum.
        most: usize,
    },
}

/// The reference of a manifest to a blob.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Descriptor {
    /// The blob's digest.
    pub digest: Digest,
    /// The blob's size in bytes.
    pub size: u64,
}

/// An image for one platform.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageManifest {
    /// The image configuration.
    pub config: Descriptor,
    /// The layers, lowest first.
    pub layers: Vec<Descriptor>,
}

/// A manifest by the kind of its configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Manifest {
    /// An image.
    Image(ImageManifest),
    /// An artifact: its configuration is not that of an image.
    Artifact(FileArtifact),
}

/// The document that a manifest request returned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ManifestDocument {
    /// A manifest.
    Manifest(Manifest),
    /// An index; the descriptor is of the variant for this node.
    Index(Descriptor),
}

/// Returns the architecture of this node as Go names it.
pub fn node_architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct RawDocument {
    #[serde(default)]
    schema_version: u64,
    #[serde(default)]
    media_type: Option<String>,
    #[serde(default)]
    artifact_type: Option<String>,
    config: Option<RawDescriptor>,
    layers: Option<Vec<RawDescriptor>>,
    #[serde(default)]
    rootfs: Option<IgnoredAny>,
    manifests: Option<Vec<RawDescriptor>>,
}

/// The JSON form of a descriptor, with the fields that only some documents use.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RawDescriptor {
    #[serde(default)]
    media_type: Option<String>,
    digest: String,
    size: u64,
    platform: Option<Platform>,
    /// Annotations; in a layout they contain the names of an image.
    #[serde(default)]
    pub annotations: Option<BTreeMap<String, String>>,
}

#[derive(Clone, Debug, Deserialize)]
struct Platform {
    #[serde(default)]
    architecture: String,
    #[serde(default)]
    os: String,
}

impl RawDescriptor {
    /// Validates digest and size.
    pub fn validate(&self) -> Result<Descriptor, ManifestError> {
        let wrong = |_| ManifestError::Digest { text: self.digest.chars().take(100).collect() };
        Ok(Descriptor { digest: self.digest.parse().map_err(wrong)?, size: self.size })
    }

    /// Returns the media type, if there is one.
    pub fn media_type(&self) -> Option<&str> {
        self.media_type.as_deref()
    }

    fn has_media_type(&self, kinds: &[&str]) -> bool {
        self.media_type.as_deref().is_none_or(|kind| kind.is_empty() || kinds.contains(&kind))
    }

    /// Returns whether the descriptor names a manifest or an index, or has no media type.
    pub fn is_image(&self) -> bool {
        self.has_media_type(&[
            "application/vnd.oci.image.index.v1+json",
            "application/vnd.oci.image.manifest.v1+json",
            "application/vnd.docker.distribution.manifest.v2+json",
            "application/vnd.docker.distribution.manifest.list.v2+json",
        ])
    }
}

/// Parses the `manifests` of a layout's index.json.
pub fn parse_layout_index(bytes: &[u8]) -> Result<Vec<RawDescriptor>, ManifestError> {
    let raw: RawDocument = json::read(bytes)?;
    Ok(raw.manifests.unwrap_or_default())
}

/// Parses a manifest or index of OCI or Docker.
pub fn parse_manifest(bytes: &[u8]) -> Result<ManifestDocument, ManifestError> {
    let raw: RawDocument = json::read(bytes)?;
    let kind = |kind: &str| ManifestError::UnsupportedType { kind: kind.chars().take(100).collect() };
    if raw.schema_version == 1 {
        return Err(kind("Docker schema 1"));
    }
    if raw.layers.is_some() && raw.manifests.is_some() {
        // Two readers could see two different images.
        return Err(kind("manifest and index at once"));
    }
    if let (Some(config), Some(layers)) = (&raw.config, &raw.layers) {
        let configs = ["application/vnd.oci.image.config.v1+json", "application/vnd.docker.container.image.v1+json"];
        let is_image = config.has_media_type(&configs);
        if layers.len() > MAX_LAYERS {
            return Err(match is_image {
                true => ManifestError::Layers { layers: layers.len(), diff_ids: 0 },
                false => ManifestError::TooManyLayers { layers: layers.len(), most: MAX_LAYERS },
            });
        }
        if !is_image {
            if raw.rootfs.is_some() {
                // Its digest would be the id of an artifact and of an image.
                return Err(kind("manifest and image configuration at once"));
            }
            config.validate()?;
            let artifact_type = raw.artifact_type.as_deref().filter(|kind| !kind.is_empty());
            let artifact_type = artifact_type.or(config.media_type.as_deref()).unwrap_or_default();
            let artifact = FileArtifact::from_layers(artifact_type, layers)?;
            return Ok(ManifestDocument::Manifest(Manifest::Artifact(artifact)));
        }
        let layers = layers.iter().map(RawDescriptor::validate).collect::<Result<_, _>>()?;
        let image = ImageManifest { config: config.validate()?, layers };
        return Ok(ManifestDocument::Manifest(Manifest::Image(image)));
    }
    let Some(manifests) = raw.manifests else {
        return Err(kind(raw.media_type.as_deref().unwrap_or("neither manifest nor index")));
    };
    let named = |descriptor: &&RawDescriptor| match &descriptor.platform {
        Some(platform) => platform.os == "linux" && platform.architecture == node_architecture(),
        None => false,
    };
    let ours = manifests.iter().find(named).or_else(|| {
        // An index of a single manifest without a platform means that manifest.
        manifests.first().filter(|only| manifests.len() == 1 && only.platform.is_none())
    });
    match ours {
        Some(ours) => Ok(ManifestDocument::Index(ours.validate()?)),
        None => {
            let platforms = manifests.iter().filter_map(|descriptor| descriptor.platform.as_ref());
            let mut has: Vec<_> = platforms.map(|p| format!("{}/{}", p.os, p.architecture)).take(20).collect();
            has.dedup();
            let has = if has.is_empty() { "none".to_owned() } else { has.join(", ") };
            Err(ManifestError::Platform { architecture: node_architecture(), has: has.chars().take(300).collect() })
        }
    }
}

#[derive(Deserialize)]
struct RawImageConfig {
    #[serde(default)]
    os: Option<String>,
    #[serde(default)]
    architecture: Option<String>,
    #[serde(default)]
    config: Option<RawRunConfig>,
    rootfs: RawRootFs,
}

#[derive(Deserialize)]
struct RawRootFs {
    #[serde(default)]
    diff_ids: Option<Vec<String>>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
struct RawRunConfig {
    entrypoint: Option<Vec<String>>,
    cmd: Option<Vec<String>>,
    env: Option<Vec<String>>,
    user: Option<String>,
    working_dir: Option<String>,
    stop_signal: Option<String>,
    labels: Option<BTreeMap<String, String>>,
    volumes: Option<BTreeMap<String, IgnoredAny>>,
    exposed_ports: Option<BTreeMap<String, IgnoredAny>>,
}

/// Parses an image configuration. Returns how to run the image, and the digests of its unpacked layers.
pub fn parse_config(bytes: &[u8]) -> Result<(ImageConfig, Vec<Digest>), ManifestError> {
    let raw: RawImageConfig = json::read(bytes)?;
    let foreign = |ours: &str, theirs: &Option<String>| theirs.as_ref().is_some_and(|t| !t.is_empty() && t != ours);
    if foreign("linux", &raw.os) || foreign(node_architecture(), &raw.architecture) {
        let has = format!("{}/{}", raw.os.unwrap_or_default(), raw.architecture.unwrap_or_default());
        return Err(ManifestError::Platform {
            architecture: node_architecture(),
            has: has.chars().take(300).collect(),
        });
    }
    let diff_ids = raw.rootfs.diff_ids.unwrap_or_default();
    let digest =
        |text: &String| text.parse().map_err(|_cause| ManifestError::Digest { text: text.chars().take(100).collect() });
    if diff_ids.len() > MAX_LAYERS {
        return Err(ManifestError::Layers { layers: diff_ids.len(), diff_ids: diff_ids.len() });
    }
    let diff_ids = diff_ids.iter().map(digest).collect::<Result<_, _>>()?;
    let raw = raw.config.unwrap_or_default();
    let config = ImageConfig {
        entrypoint: raw.entrypoint.unwrap_or_default(),
        cmd: raw.cmd.unwrap_or_default(),
        env: raw.env.unwrap_or_default(),
        user: raw.user.unwrap_or_default(),
        working_dir: raw.working_dir.unwrap_or_default(),
        stop_signal: raw.stop_signal.filter(|signal| !signal.is_empty()),
        labels: raw.labels.unwrap_or_default(),
        volumes: raw.volumes.unwrap_or_default().into_keys().collect(),
        exposed_ports: raw.exposed_ports.unwrap_or_default().into_keys().collect(),
    };
    Ok((config, diff_ids))
}

/// Pairs each layer with the digest of its unpacked form.
pub fn pair_layers(manifest: &ImageManifest, diff_ids: &[Digest]) -> Result<Vec<(Descriptor, Digest)>, ManifestError> {
    if manifest.layers.len() != diff_ids.len() {
        return Err(ManifestError::Layers { layers: manifest.layers.len(), diff_ids: diff_ids.len() });
    }
    Ok(manifest.layers.iter().cloned().zip(diff_ids.iter().copied()).collect())
}

/// One image of a docker archive's manifest.json.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct DockerArchiveImage {
    /// The member with the configuration.
    pub config: String,
    /// The tags, `name:tag`.
    #[serde(default)]
    pub repo_tags: Option<Vec<String>>,
    /// The members with the layers, lowest first.
    #[serde(default)]
    pub layers: Vec<String>,
}

/// Parses a docker archive's manifest.json.
pub fn parse_docker_archive(bytes: &[u8]) -> Result<Vec<DockerArchiveImage>, ManifestError> {
    Ok(json::read(bytes)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn digest(byte: u8) -> String {
        Digest([byte; 32]).to_string()
    }

    #[test]
    fn manifests_of_both_kinds_are_read() {
        for (manifest, config) in [
            ("application/vnd.oci.image.manifest.v1+json", "application/vnd.oci.image.config.v1+json"),
            ("application/vnd.docker.distribution.manifest.v2+json", "application/vnd.docker.container.image.v1+json"),
        ] {
            let text = format!(
                r#"{{"schemaVersion":2,"mediaType":"{manifest}","config":{{"mediaType":"{config}","digest":"{}","size":7}},
                "layers":[{{"digest":"{}","size":9}}]}}"#,
                digest(1),
                digest(2)
            );
            let ManifestDocument::Manifest(Manifest::Image(read)) = parse_manifest(text.as_bytes()).unwrap() else {
                panic!("no manifest")
            };
            assert_eq!(read.config, Descriptor { digest: Digest([1; 32]), size: 7 });
            assert_eq!(read.layers, [Descriptor { digest: Digest([2; 32]), size: 9 }]);
        }
    }

    #[test]
    fn an_index_gives_our_variant_or_says_what_it_has() {
        let variant = |os: &str, architecture: &str, byte| {
            format!(
                r#"{{"digest":"{}","size":1,"platform":{{"os":"{os}","architecture":"{architecture}"}}}}"#,
                digest(byte)
            )
        };
        let foreign = [variant("unknown", "unknown", 1), variant("linux", "s390x", 2)].join(",");
        let text =
            format!(r#"{{"schemaVersion":2,"manifests":[{foreign},{}]}}"#, variant("linux", node_architecture(), 3));
        assert_eq!(
            parse_manifest(text.as_bytes()).unwrap(),
            ManifestDocument::Index(Descriptor { digest: Digest([3; 32]), size: 1 })
        );
        let error = parse_manifest(format!(r#"{{"manifests":[{foreign}]}}"#).as_bytes()).unwrap_err().to_string();
        assert!(error.contains("linux/s390x"), "{error}");
    }

    #[test]
    fn what_is_no_image_is_refused() {
        for text in [
            "",
            "[]",
            "{}",
            r#"{"schemaVersion":1,"fsLayers":[]}"#,
            r#"{"manifests":[{"digest":"../x","size":1}]}"#,
            r#"{"config":{"mediaType":"application/vnd.cncf.helm.config.v1+json","digest":"x","size":1},"layers":[]}"#,
            r#"{"config":{"mediaType":"application/vnd.cncf.helm.config.v1+json","size":1},"layers":[]}"#,
            r#"{"config":{"digest":"sha256:0","size":1},"layers":[]}"#,
            r#"{"config":{"digest":"x","size":-1},"layers":[]}"#,
        ] {
            assert!(parse_manifest(text.as_bytes()).is_err(), "{text}");
        }
        let one = digest(1);
        let both = format!(
            r#"{{"config":{{"digest":"{one}","size":1}},"layers":[],"manifests":[{{"digest":"{one}","size":1}}]}}"#
        );
        assert!(matches!(parse_manifest(both.as_bytes()), Err(ManifestError::UnsupportedType { .. })));
        let many = vec![format!("\"{one}\""); MAX_LAYERS + 1].join(",");
        let many = format!(r#"{{"rootfs":{{"diff_ids":[{many}]}}}}"#);
        assert!(matches!(parse_config(many.as_bytes()), Err(ManifestError::Layers { .. })));
    }

    #[test]
    fn manifests_with_other_configurations_are_artifacts() {
        let parse = |more: &str, layers: &str| {
            let text = format!(
                r#"{{"schemaVersion":2,{more}"config":{{"mediaType":"application/vnd.oci.empty.v1+json","digest":"{}","size":2}},
                "layers":[{layers}]}}"#,
                digest(1)
            );
            parse_manifest(text.as_bytes())
        };
        let title = r#""annotations":{"org.opencontainers.image.title":"model"}"#;
        let layer = format!(r#"{{"mediaType":"a/b","digest":"{}","size":9,{title}}}"#, digest(2));
        for (more, expected) in [
            (r#""artifactType":"application/vnd.example.model","#, "application/vnd.example.model"),
            (r#""artifactType":"","#, "application/vnd.oci.empty.v1+json"),
            ("", "application/vnd.oci.empty.v1+json"),
        ] {
            let ManifestDocument::Manifest(Manifest::Artifact(read)) = parse(more, &layer).unwrap() else {
                panic!("no artifact")
            };
            assert_eq!(read.artifact_type, expected);
            assert_eq!((read.files.len(), read.files[0].path.as_str(), read.files[0].blob.size), (1, "model", 9));
        }
        // It would be an image with the same id as well.
        let both = parse(r#""rootfs":{"diff_ids":[]},"#, &layer);
        assert!(matches!(both, Err(ManifestError::UnsupportedType { .. })), "{both:?}");
        let many = vec![layer; MAX_LAYERS + 1].join(",");
        assert!(matches!(parse("", &many), Err(ManifestError::TooManyLayers { layers: 1001, most: 1000 })));
    }

    #[test]
    fn a_configuration_is_read_with_nulls_and_unknown_fields() {
        let text = format!(
            r#"{{"os":"linux","config":{{"Cmd":["sh"],"Entrypoint":null,"Env":["A=b"],"User":"1000:1","Labels":{{"a":"b"}},
            "ArgsEscaped":true,"ExposedPorts":{{"80/tcp":{{}}}},"StopSignal":""}},"rootfs":{{"type":"layers","diff_ids":["{}"]}}}}"#,
            digest(4)
        );
        let (config, diff_ids) = parse_config(text.as_bytes()).unwrap();
        assert_eq!((config.cmd, config.user.as_str()), (vec!["sh".to_owned()], "1000:1"));
        assert_eq!((config.exposed_ports, config.stop_signal), (vec!["80/tcp".to_owned()], None));
        assert_eq!(diff_ids, [Digest([4; 32])]);
        assert!(parse_config(br#"{"os":"windows","rootfs":{}}"#).is_err());
    }

    proptest! {
        #[test]
        fn any_json_is_read_without_harm(text in r#"[\[\]{}:,"a-z0-9]{0,80}"#, at in 0..200usize, byte: u8) {
            let _ = (parse_manifest(text.as_bytes()), parse_config(text.as_bytes()), parse_docker_archive(text.as_bytes()));
            let mut whole = format!(r#"{{"schemaVersion":2,"config":{{"digest":"{}","size":7}},"layers":[]}}"#, digest(1)).into_bytes();
            if let Some(place) = whole.get_mut(at) { *place = byte; }
            let _ = parse_manifest(&whole);
        }
    }
}
