//! Records which registries have delivered a layer, in a file beside it. A pull uses a layer of the store without a download only
//! if its registry has delivered the same blob before: otherwise a manifest that names the digest of a private layer would be
//! enough to get its content.

use nacelle_base::files::{FileError, write_whole};
use nacelle_model::digest::Digest;
use std::fs;
use std::io;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

/// The maximum number of origins of a layer. Further origins are not recorded: each pull from them downloads the layer.
const MAX_ORIGINS: usize = 64;
/// The maximum number of them that are of one registry; a further one replaces the oldest.
const MAX_OF_REGISTRY: usize = 4;

/// Held while a file is changed. Verifications of the same layer run in parallel.
static CHANGES: Mutex<()> = Mutex::new(());

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

/// Returns whether the file lists this origin. A missing or unreadable file lists none. Blocks.
pub fn contains(path: &Path, origin: &LayerOrigin) -> bool {
    read(path).lines().any(|line| line == origin.line())
}

/// Adds an origin to the file. Blocks.
pub fn add(path: &Path, origin: &LayerOrigin) -> Result<(), FileError> {
    let _changes = CHANGES.lock().unwrap_or_else(PoisonError::into_inner);
    let text = read(path);
    let mut lines: Vec<&str> = text.lines().collect();
    let line = origin.line();
    if lines.contains(&line.as_str()) {
        return Ok(());
    }
    let is_same_registry = |line: &&str| line.split(' ').next() == Some(&origin.registry);
    if lines.iter().filter(|line| is_same_registry(line)).count() >= MAX_OF_REGISTRY
        && let Some(oldest) = lines.iter().position(is_same_registry)
    {
        lines.remove(oldest);
    }
    if lines.len() >= MAX_ORIGINS {
        return Ok(());
    }
    lines.push(&line);
    write_whole(path, (lines.join("\n") + "\n").as_bytes())
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| {
        if error.kind() != io::ErrorKind::NotFound {
            tracing::warn!(path = %path.display(), %error, "cannot read which registries have delivered a layer; it is downloaded again");
        }
        String::new()
    })
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
        assert!(!contains(&path, &origin("a.io", 1)));
        for _ in 0..2 {
            add(&path, &origin("a.io", 1)).unwrap();
        }
        add(&path, &origin("b.io:5000", 2)).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap().lines().count(), 2);
        for (registry, byte, there) in
            [("a.io", 1, true), ("a.io", 2, false), ("b.io:5000", 2, true), ("b.io", 2, false)]
        {
            assert_eq!(contains(&path, &origin(registry, byte)), there, "{registry} {byte}");
        }
        assert_ne!(origin("a.io", 1).partial_name(), origin("b.io", 1).partial_name());
    }

    #[test]
    fn the_number_of_origins_has_a_limit() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("layer.origins");
        add(&path, &origin("first.io", 1)).unwrap();
        for byte in 0..100 {
            add(&path, &origin("many-forms.io", byte)).unwrap();
        }
        assert!(contains(&path, &origin("many-forms.io", 99)) && !contains(&path, &origin("many-forms.io", 95)));
        for number in 0..100 {
            add(&path, &origin(&format!("{number}.io"), 1)).unwrap();
        }
        assert!(contains(&path, &origin("first.io", 1)) && !contains(&path, &origin("99.io", 1)));
        assert_eq!(fs::read_to_string(&path).unwrap().lines().count(), MAX_ORIGINS);
    }

    #[test]
    fn a_damaged_file_is_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("layer.origins");
        fs::write(&path, [0xff, 0xfe]).unwrap();
        assert!(!contains(&path, &origin("a.io", 1)));
        add(&path, &origin("a.io", 1)).unwrap();
        assert!(contains(&path, &origin("a.io", 1)));
    }
}
