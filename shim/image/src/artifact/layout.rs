//! Stores artifacts in an OCI image layout, a directory of the node, where there is no registry (OCI image specification 1.1,
//! image-layout.md). All functions block on files.

use super::{ArtifactKind, document};
use crate::ImageError;
use crate::manifest::{Descriptor, MAX_MANIFEST, RawDescriptor};
use nacelle_base::draft::{self, Draft};
use nacelle_base::files::{at, write_whole};
use nacelle_base::json;
use nacelle_model::digest::Digest;
use serde_json::{Value, json};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

/// The annotation with the name of a manifest in a layout's index.
const REF_NAME_ANNOTATION: &str = "org.opencontainers.image.ref.name";
/// The content of the file that marks a directory as a layout.
const LAYOUT_FILE_CONTENT: &[u8] = br#"{"imageLayoutVersion":"1.0.0"}"#;

/// A name in a layout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayoutReference {
    directory: PathBuf,
    tag: String,
}

impl LayoutReference {
    /// Parses `/DIRECTORY` or `/DIRECTORY:TAG`. `whole` is the text that the user wrote, for errors.
    pub fn parse(whole: &str, text: &str) -> Result<LayoutReference, ImageError> {
        let (directory, tag) = match text.rsplit_once(':') {
            Some((directory, tag)) if !tag.contains('/') => (directory, tag),
            _ => (text, "latest"),
        };
        let bad = |why| Err(ImageError::BadReference { text: whole.chars().take(300).collect(), why });
        let plain = |b: u8| b.is_ascii_alphanumeric() || b"_.-".contains(&b);
        if tag.is_empty() || tag.len() > 128 || !tag.bytes().all(plain) {
            return bad("a tag has 1 to 128 characters from A-Za-z0-9_.-");
        }
        let directory = PathBuf::from(directory);
        if !directory.is_absolute() || directory.components().any(|part| part == std::path::Component::ParentDir) {
            return bad("after oci: the absolute path of a directory without .. is expected");
        }
        Ok(LayoutReference { directory, tag: tag.to_owned() })
    }

    /// The name as users write it.
    pub fn name(&self) -> String {
        format!("oci:{}:{}", self.directory.display(), self.tag)
    }

    fn blob_path(&self, digest: &Digest) -> PathBuf {
        self.directory.join("blobs/sha256").join(digest.hex())
    }

    fn create_directories(&self) -> Result<(), ImageError> {
        let blobs = self.directory.join("blobs/sha256");
        std::fs::create_dir_all(&blobs).map_err(at("create", &blobs))?;
        // Drafts of exports that were killed.
        Ok(draft::remove_stale_drafts(&blobs)?)
    }

    /// Copies a file into the layout as a blob.
    pub fn put_blob(&self, from: &Path, blob: &Descriptor) -> Result<(), ImageError> {
        self.create_directories()?;
        let path = self.blob_path(&blob.digest);
        if path.exists() {
            return Ok(());
        }
        let mut source = File::open(from).map_err(at("open", from))?;
        let mut draft = Draft::create(&path)?;
        std::io::copy(&mut source, &mut draft.file).map_err(at("write", &path))?;
        Ok(draft.commit()?)
    }

    /// Writes a small blob.
    pub fn put_bytes(&self, bytes: &[u8]) -> Result<(), ImageError> {
        self.create_directories()?;
        Ok(write_whole(&self.blob_path(&Digest::of(bytes)), bytes)?)
    }

    /// Writes a manifest and sets the name to it. The manifest that had the name before loses it.
    pub fn publish(&self, kind: &ArtifactKind, manifest: &[u8]) -> Result<(), ImageError> {
        self.put_bytes(manifest)?;
        let (mark, index) = (self.directory.join("oci-layout"), self.directory.join("index.json"));
        // The lock makes publishing processes take turns.
        let lock = File::open(&self.directory).map_err(at("open", &self.directory))?;
        lock.lock().map_err(at("lock", &self.directory))?;
        write_whole(&mark, LAYOUT_FILE_CONTENT)?;
        let mut whole = match self.read_bounded(&index, MAX_MANIFEST, "index.json")? {
            Some(bytes) => json::read(&bytes).map_err(|source| self.manifest_error("index.json", source.into()))?,
            None => json!({ "schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json" }),
        };
        let others = whole.get("manifests").and_then(Value::as_array).into_iter().flatten();
        let named = |entry: &&Value| {
            entry.get("annotations").and_then(|all| all.get(REF_NAME_ANNOTATION)) == Some(&json!(self.tag))
        };
        let mut all: Vec<Value> = others.filter(|entry| !named(entry)).cloned().collect();
        all.push(json!({
            "mediaType": document::MANIFEST_MEDIA_TYPE,
            "artifactType": kind.artifact,
            "digest": Digest::of(manifest),
            "size": manifest.len(),
            "annotations": { REF_NAME_ANNOTATION: self.tag },
        }));
        match whole.as_object_mut() {
            Some(index) => drop(index.insert("manifests".to_owned(), Value::Array(all))),
            None => {
                return Err(ImageError::Archive {
                    path: self.directory.clone(),
                    why: "its index.json is not an image index",
                });
            }
        }
        Ok(write_whole(&index, whole.to_string().as_bytes())?)
    }

    /// Returns the verified manifest of this name, and its digest.
    pub fn read_manifest(&self) -> Result<(Vec<u8>, Digest), ImageError> {
        let index = self.read_bounded(&self.directory.join("index.json"), MAX_MANIFEST, "index.json")?;
        let why = "it is not an OCI layout: it has no index.json";
        let index = index.ok_or_else(|| ImageError::Archive { path: self.directory.clone(), why })?;
        let entries =
            crate::manifest::parse_layout_index(&index).map_err(|source| self.manifest_error("index.json", source))?;
        let named = |entry: &&RawDescriptor| {
            entry
                .annotations
                .as_ref()
                .and_then(|all| all.get(REF_NAME_ANNOTATION))
                .is_some_and(|name| *name == self.tag)
        };
        let entry = entries.iter().find(named).ok_or_else(|| ImageError::NotFound { name: self.name() })?;
        let wanted = entry.validate().map_err(|source| self.manifest_error("index.json", source))?;
        Ok((self.read_blob(&wanted, MAX_MANIFEST, "manifest")?, wanted.digest))
    }

    /// Returns a small blob, verified.
    pub fn read_blob(&self, wanted: &Descriptor, limit: u64, what: &str) -> Result<Vec<u8>, ImageError> {
        let path = self.blob_path(&wanted.digest);
        let why = "a file that it refers to is missing";
        let missing = || ImageError::Archive { path: self.directory.clone(), why };
        let bytes = self.read_bounded(&path, limit, what)?.ok_or_else(missing)?;
        match Digest::of(&bytes) {
            got if got == wanted.digest => Ok(bytes),
            got => Err(ImageError::Digest { what: format!("{what} {}", wanted.digest), got }),
        }
    }

    /// Opens a blob for reading.
    pub fn open_blob(&self, blob: &Descriptor) -> Result<File, ImageError> {
        let path = self.blob_path(&blob.digest);
        Ok(File::open(&path).map_err(at("open", &path))?)
    }

    fn read_bounded(&self, path: &Path, limit: u64, what: &str) -> Result<Option<Vec<u8>>, ImageError> {
        let file = match File::open(path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            file => file.map_err(at("open", path))?,
        };
        let mut bytes = Vec::new();
        file.take(limit + 1).read_to_end(&mut bytes).map_err(at("read", path))?;
        if bytes.len() as u64 > limit {
            return Err(ImageError::TooLarge { what: format!("{what} of {}", self.name()), limit });
        }
        Ok(Some(bytes))
    }

    fn manifest_error(&self, what: &str, source: crate::manifest::ManifestError) -> ImageError {
        ImageError::Manifest { what: format!("{what} of {}", self.directory.display()), source }
    }
}

#[cfg(test)]
mod tests {
    use super::super::document::tests::SAMPLE;
    use super::super::{TransferProgress, sample};
    use super::*;
    use crate::{ImageStore, ImageStoreConfig};
    use nacelle_base::{Classify, FailureKind};

    #[test]
    fn names_are_whole_paths_with_a_tag() {
        let parsed =
            |text: &str| LayoutReference::parse(text, text.strip_prefix("oci:").unwrap()).map(|layout| layout.name());
        assert_eq!(parsed("oci:/a/b").unwrap(), "oci:/a/b:latest");
        assert_eq!(parsed("oci:/a:b/c:v1.2").unwrap(), "oci:/a:b/c:v1.2");
        for text in ["oci:", "oci:a", "oci:/a:", "oci:/a/../b", "oci:/a:b c"] {
            assert_eq!(parsed(text).unwrap_err().kind(), FailureKind::Invalid, "{text}");
        }
    }

    #[tokio::test]
    async fn an_artifact_is_read_back_from_a_layout() {
        let directory = tempfile::tempdir().unwrap();
        let store = ImageStore::open(&directory.path().join("store"), ImageStoreConfig::default()).unwrap();
        let name = |tag: &str| format!("oci:{}:{tag}", directory.path().join("layout").display());
        let at = |tag: &str| store.artifacts(&name(tag), None, false).unwrap();
        let (one, progress) = (sample(directory.path(), "a", b"content"), TransferProgress::default());
        assert_eq!(at("v1").fetch_artifact(&SAMPLE, 1, 10).await.unwrap_err().kind(), FailureKind::Invalid);
        for _ in 0..2 {
            at("v1").upload_file(&one, &progress).await.unwrap();
            at("v1").publish(&SAMPLE, b"{}".to_vec(), vec![(one.blob.clone(), "a.zst".into())]).await.unwrap();
        }
        at("v2").publish(&SAMPLE, b"[]".to_vec(), vec![]).await.unwrap();
        let found = at("v1").fetch_artifact(&SAMPLE, 1, 10).await.unwrap();
        assert_eq!((found.config.as_slice(), found.layers.as_slice()), (&b"{}"[..], &[one.blob.clone()][..]));
        assert_eq!(at("v2").fetch_artifact(&SAMPLE, 1, 10).await.unwrap().layers, []);
        assert_eq!(at("v3").fetch_artifact(&SAMPLE, 1, 10).await.unwrap_err().kind(), FailureKind::NotFound);
        assert!(at("v1").fetch_artifact(&SAMPLE, 1, 1).await.unwrap_err().to_string().contains("larger than 1"));
        let path = directory.path().join("back");
        let fetch = || async {
            let file = File::create(&path).unwrap();
            at("v1").fetch_file(&one.blob, &one.content, file, &path, &progress).await
        };
        fetch().await.unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"content");
        let blob = directory.path().join("layout/blobs/sha256").join(one.blob.digest.hex());
        std::fs::write(&blob, "other").unwrap();
        assert!(fetch().await.is_err());
        let manifest = directory.path().join("layout/blobs/sha256").join(found.digest.hex());
        std::fs::write(&manifest, "{}").unwrap();
        assert!(at("v1").fetch_artifact(&SAMPLE, 1, 10).await.unwrap_err().to_string().contains("damaged"));
    }
}
