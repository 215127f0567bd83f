//! Records which registries have delivered a layer, in a file beside it. A pull uses a layer of the store without a download only
//! if its registry has delivered the same blob before: otherwise a manifest that names the digest of a private layer would be
//! enough to get its content.

use nacelle_base::files::{FileError, at, write_whole};
use nacelle_model::digest::Digest;
use std::fs;
use std::io;
use std::path::Path;

/// The maximum number of origins of a layer. Further origins are not recorded: each pull from them downloads the layer.
const MAX_ORIGINS: usize = 64;

/// A blob of a registry: one form of a layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerOrigin {
    /// The registry that the reference names, `host` or `host:port`.
    pub registry: String,
    /// The digest of the blob.
    pub blob: Digest,
}

impl LayerOrigin {
    /// Returns the line in the file.
    fn line(&self) -> String {
        format!("{} {}", self.registry, self.blob)
    }

    /// Returns the digest that names the partial download. It includes the registry, so that no registry continues a download that
    /// another one began.
    pub fn partial_name(&self) -> Digest {
        Digest::of(self.line().as_bytes())
    }
}

/// Returns whether the file lists this origin. A missing file lists none.
pub fn contains(path: &Path, origin: &LayerOrigin) -> Result<bool, FileError> {
    Ok(read(path)?.lines().any(|line| line == origin.line()))
}

/// Adds an origin to the file. The caller holds the layer's lock.
pub fn add(path: &Path, origin: &LayerOrigin) -> Result<(), FileError> {
    let mut text = read(path)?;
    let line = origin.line();
    if text.lines().count() < MAX_ORIGINS && !text.lines().any(|known| known == line) {
        text.push_str(&line);
        text.push('\n');
        write_whole(path, text.as_bytes())?;
    }
    Ok(())
}

fn read(path: &Path) -> Result<String, FileError> {
    match fs::read_to_string(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(String::new()),
        other => other.map_err(at("read", path)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn origin(registry: &str, byte: u8) -> LayerOrigin {
        LayerOrigin { registry: registry.to_owned(), blob: Digest([byte; 32]) }
    }

    #[test]
    fn an_origin_is_a_registry_and_a_blob() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("layer.origins");
        assert!(!contains(&path, &origin("a.io", 1)).unwrap());
        for _ in 0..2 {
            add(&path, &origin("a.io", 1)).unwrap();
        }
        add(&path, &origin("b.io:5000", 2)).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap().lines().count(), 2);
        for (registry, byte, there) in
            [("a.io", 1, true), ("a.io", 2, false), ("b.io:5000", 2, true), ("b.io", 2, false)]
        {
            assert_eq!(contains(&path, &origin(registry, byte)).unwrap(), there, "{registry} {byte}");
        }
        assert_ne!(origin("a.io", 1).partial_name(), origin("b.io", 1).partial_name());
    }

    #[test]
    fn the_number_of_origins_has_a_limit() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("layer.origins");
        for byte in 0..=MAX_ORIGINS {
            add(&path, &origin("a.io", u8::try_from(byte).unwrap())).unwrap();
        }
        assert!(contains(&path, &origin("a.io", 63)).unwrap() && !contains(&path, &origin("a.io", 64)).unwrap());
    }
}
