//! Reads an artifact of any type as files that containers can mount: each layer is one file, named by an annotation of its descriptor.
//! Pure. The names are untrusted: what is no relative path without surprises is rejected, and with it the artifact.

use crate::layer::{MAX_NAME, MAX_PATH};
use crate::manifest::{Descriptor, ManifestError, RawDescriptor};
use nacelle_model::digest::Digest;

use super::document::{EMPTY_MEDIA_TYPE, TITLE_ANNOTATION};

/// The annotation of model artifacts (CNCF ModelPack) with the path of a layer's file, for layers without a title.
const FILE_PATH_ANNOTATION: &str = "org.cncf.model.filepath";
/// The beginning of names that layers of images use for deleted files.
const WHITEOUT_PREFIX: &str = ".wh.";
/// The maximum number of characters of an artifact type that are kept. Media types are shorter (RFC 6838, section 4.2).
const MAX_TYPE: usize = 255;

/// An artifact as a tree of files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileArtifact {
    /// The artifact type, or the media type of the configuration if the manifest has none. Printable.
    pub artifact_type: String,
    /// The files, in the order of the layers. No path is that of another file or of a directory above one.
    pub files: Vec<ArtifactFile>,
}

/// A file of an artifact.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArtifactFile {
    /// The path in the volume, relative, without `.` and `..`.
    pub path: String,
    /// The content.
    pub blob: Descriptor,
}

impl ArtifactFile {
    /// Returns the name of this file among the layers of the store. The hashed text is shorter than a block of a tar archive, so that no
    /// layer of an image has its digest.
    pub fn layer_name(&self) -> Digest {
        Digest::of(self.name_text().as_bytes())
    }

    fn name_text(&self) -> String {
        format!("artifact file 1\n{}\n{}", self.blob.digest, Digest::of(self.path.as_bytes()))
    }
}

impl FileArtifact {
    /// Reads the layers of a manifest; the caller has bounded their number.
    pub fn from_layers(artifact_type: &str, layers: &[RawDescriptor]) -> Result<FileArtifact, ManifestError> {
        let mut files: Vec<ArtifactFile> = Vec::with_capacity(layers.len());
        for layer in layers {
            let blob = layer.validate()?;
            let annotation = |key| layer.annotations.as_ref().and_then(|all| all.get(key));
            match annotation(TITLE_ANNOTATION).or_else(|| annotation(FILE_PATH_ANNOTATION)) {
                Some(path) => {
                    check_path(path).map_err(|why| file_name_error(path, why))?;
                    files.push(ArtifactFile { path: path.clone(), blob });
                }
                // It stands for an artifact without files.
                None if layer.media_type() == Some(EMPTY_MEDIA_TYPE) => {}
                None => {
                    let file = ArtifactFile { path: format!("sha256-{}", blob.digest.hex()), blob };
                    if !files.contains(&file) {
                        files.push(file);
                    }
                }
            }
        }
        check_conflicts(&files)?;
        let artifact_type = artifact_type.chars().filter(|c| !c.is_control()).take(MAX_TYPE).collect();
        Ok(FileArtifact { artifact_type, files })
    }
}

fn file_name_error(path: &str, why: &'static str) -> ManifestError {
    ManifestError::FileName { path: path.chars().take(100).collect(), why }
}

/// Checks a path by itself.
fn check_path(path: &str) -> Result<(), &'static str> {
    if path.is_empty() {
        return Err("it is empty");
    }
    if path.len() > MAX_PATH {
        return Err("it is longer than 4095 bytes");
    }
    if path.chars().any(char::is_control) {
        return Err("it contains a control character");
    }
    if path.starts_with('/') {
        return Err("it is absolute");
    }
    for part in path.split('/') {
        match part {
            "" => return Err("a part of it is empty"),
            "." | ".." => return Err("it contains . or .."),
            part if part.len() > MAX_NAME => return Err("a part of it is longer than 255 bytes"),
            part if part.starts_with(WHITEOUT_PREFIX) => return Err("a part of it begins with .wh."),
            _ => {}
        }
    }
    Ok(())
}

/// Checks that no path occurs twice, and that none is a directory of another one.
fn check_conflicts(files: &[ArtifactFile]) -> Result<(), ManifestError> {
    let mut paths: Vec<&str> = files.iter().map(|file| file.path.as_str()).collect();
    // In this order, what is in a directory follows it directly.
    paths.sort_by(|a, b| a.split('/').cmp(b.split('/')));
    for (path, next) in paths.iter().zip(paths.iter().skip(1)) {
        match next.strip_prefix(path) {
            Some("") => return Err(file_name_error(path, "several layers have it")),
            Some(below) if below.starts_with('/') => {
                return Err(file_name_error(path, "it is the directory of another file as well"));
            }
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    fn layers(annotations: &[Value]) -> Vec<RawDescriptor> {
        let layer = |(n, annotations): (usize, &Value)| {
            let digest = Digest([u8::try_from(n).unwrap(); 32]);
            json!({"mediaType": "application/vnd.x", "digest": digest, "size": 3, "annotations": annotations})
        };
        let all: Vec<Value> = annotations.iter().enumerate().map(layer).collect();
        serde_json::from_value(Value::Array(all)).unwrap()
    }

    fn titles(titles: &[&str]) -> Vec<RawDescriptor> {
        layers(&titles.iter().map(|title| json!({TITLE_ANNOTATION: title})).collect::<Vec<_>>())
    }

    fn paths(layers: &[RawDescriptor]) -> Result<Vec<String>, String> {
        let read = FileArtifact::from_layers("a/b", layers).map_err(|error| error.to_string())?;
        Ok(read.files.into_iter().map(|file| file.path).collect())
    }

    #[test]
    fn layers_are_named_by_their_annotations() {
        let title = |text: &str| json!({TITLE_ANNOTATION: text});
        let path = |text: &str| json!({FILE_PATH_ANNOTATION: text});
        let both = json!({TITLE_ANNOTATION: "title", FILE_PATH_ANNOTATION: "path"});
        let unnamed = format!("sha256-{}", Digest([4; 32]).hex());
        let read = paths(&layers(&[title("a b"), title("dir/é"), path("dir/2"), both, Value::Null, title("...")]));
        assert_eq!(read.unwrap(), ["a b", "dir/é", "dir/2", "title", &unnamed, "..."]);
        // The same blob twice without a name is one file.
        let twice = [layers(&[Value::Null]), layers(&[Value::Null])].concat();
        assert_eq!(paths(&twice).unwrap().len(), 1);
        let empty = json!([{"mediaType": EMPTY_MEDIA_TYPE, "digest": Digest::of(b"{}"), "size": 2}]);
        assert!(paths(&serde_json::from_value::<Vec<_>>(empty).unwrap()).unwrap().is_empty());
    }

    #[test]
    fn hostile_titles_are_rejected() {
        let (long, deep) = ("n".repeat(256), "a/".repeat(2048) + "a");
        for (hostile, why) in [
            (&["../../etc/passwd"][..], "contains . or .."),
            (&["a/../b"], "contains . or .."),
            (&["."], "contains . or .."),
            (&["./a"], "contains . or .."),
            (&["/etc/passwd"], "absolute"),
            (&["//"], "absolute"),
            (&[""], "is empty"),
            (&["a//b"], "part of it is empty"),
            (&["a/"], "part of it is empty"),
            (&["a\0b"], "control character"),
            (&["a\nb"], "control character"),
            (&["a\u{9b}b"], "control character"),
            (&[&long], "longer than 255"),
            (&[&deep], "longer than 4095"),
            (&[".wh.a"], "begins with .wh."),
            (&[".wh..wh..opq/a"], "begins with .wh."),
            (&["a", "b", "a"], "several layers"),
            (&["a/b", "a"], "directory of another file"),
            (&["a", "a.b", "a/b"], "directory of another file"),
        ] {
            let error = paths(&titles(hostile)).unwrap_err();
            assert!(error.contains(why) && error.len() < 400, "{hostile:?}: {error}");
            assert!(!error.chars().any(char::is_control), "{error:?}");
        }
        let type_of = |text: &str| FileArtifact::from_layers(text, &[]).unwrap().artifact_type;
        assert_eq!((type_of("a\nb").as_str(), type_of(&"t".repeat(1000)).len()), ("ab", MAX_TYPE));
    }

    #[test]
    fn the_same_content_under_another_name_is_another_layer() {
        let file =
            |path: &str, n| ArtifactFile { path: path.into(), blob: Descriptor { digest: Digest([n; 32]), size: 1 } };
        assert_eq!(file("a", 1).layer_name(), file("a", 1).layer_name());
        assert_ne!(file("a", 1).layer_name(), file("b", 1).layer_name());
        assert_ne!(file("a", 1).layer_name(), file("a", 2).layer_name());
        assert!((file(&"a".repeat(MAX_PATH), 1).name_text().len() as u64) < crate::layer::tar::BLOCK);
    }

    proptest! {
        #[test]
        fn accepted_titles_are_different_files_below_the_root(
            text in prop::collection::vec(prop_oneof!["[a/.]{0,6}", "(\\.\\./|a/|\\./|/)[ab]{0,3}", ".{0,8}"], 0..5)
        ) {
            let text: Vec<&str> = text.iter().map(String::as_str).collect();
            if let Ok(paths) = paths(&titles(&text)) {
                let root = tempfile::tempdir().unwrap();
                for path in &paths {
                    let file = root.path().join(path);
                    prop_assert!(file.components().all(|part| part != std::path::Component::ParentDir));
                    prop_assert!(file.starts_with(root.path()));
                    std::fs::create_dir_all(file.parent().unwrap()).unwrap();
                    std::fs::File::create_new(file).unwrap();
                }
            }
        }
    }
}
