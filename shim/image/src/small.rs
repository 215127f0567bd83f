//! Writes an image of a few small files in memory, without a store: for a container that Nacelle itself needs.

use crate::budget::{Budget, BudgetError, Cancel, MemoryPool};
use crate::erofs::{ErofsError, LayerBlob, write_erofs};
use crate::layer::BLOCK;
use crate::layer::index::{FileAttributes, FileData, IndexError, IndexWriter, LayerEntry, LayerEntryKind, LayerIndex};
use crate::tree::{MergedTree, TreeError};
use nacelle_base::{Classify, FailureKind};
use nacelle_model::digest::Digest;

/// The maximum memory for the work, in bytes.
const MAX_MEMORY: u64 = 64 << 20;

/// A small image cannot be written.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub enum SmallImageError {
    /// The files need too much memory.
    Budget(#[from] BudgetError),
    /// The list of files is damaged.
    Index(#[from] IndexError),
    /// The names conflict.
    Tree(#[from] TreeError),
    /// The format has no place for the files.
    Erofs(#[from] ErofsError),
}

impl Classify for SmallImageError {
    fn kind(&self) -> FailureKind {
        match self {
            SmallImageError::Budget(_) => FailureKind::Exhausted,
            SmallImageError::Index(_) | SmallImageError::Tree(_) | SmallImageError::Erofs(_) => FailureKind::Invalid,
        }
    }
}

/// Returns an image, a whole number of blocks long, whose root directory has these executable files, which belong to root.
pub fn write_small_image(files: &[(&str, &[u8])]) -> Result<Vec<u8>, SmallImageError> {
    let (pool, cancel) = (MemoryPool::new(MAX_MEMORY), Cancel::default());
    let mut writer = IndexWriter::new();
    let mut blob = Vec::new();
    let mut budget = Budget::layer(&pool, &cancel);
    for (name, content) in files {
        let block = u32::try_from(blob.len() as u64 / BLOCK).map_err(|_large| ErofsError::Oversize)?;
        let kind = LayerEntryKind::File(FileData::Flat { size: content.len() as u64, block });
        let meta = FileAttributes { mode: 0o755, ..FileAttributes::default() };
        writer.push(&LayerEntry { path: name.as_bytes().to_vec(), meta, kind }, &mut budget)?;
        blob.extend_from_slice(content);
        blob.resize(blob.len().next_multiple_of(BLOCK as usize), 0);
    }
    let index = writer.finish(blob.len() as u64);
    drop(budget);
    let mut budget = Budget::image(&pool, &cancel, index.len() as u64);
    let mut tree = MergedTree::new();
    tree.apply_layer(0, &LayerIndex::open(&index)?, &mut budget)?;
    let layer = LayerBlob { diff_id: Digest([0; 32]), length: blob.len() as u64 };
    let mut image = write_erofs(&tree, &[layer], &mut budget)?.bytes;
    image.extend(blob);
    Ok(image)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;
    use std::process::Command;

    #[test]
    fn the_files_are_in_the_image() {
        let (one, two) = (vec![7; 5000], b"#!/bin/true".to_vec());
        let image = write_small_image(&[("one", &one), ("two", &two)]).unwrap();
        assert!(image.len().is_multiple_of(BLOCK as usize));
        let directory = tempfile::tempdir().unwrap();
        let (path, to) = (directory.path().join("image"), directory.path().join("files"));
        std::fs::write(&path, &image).unwrap();
        // Version 1.5 reads everything from the first device, but requires the others on the command line.
        let mut fsck = Command::new("fsck.erofs");
        fsck.arg(format!("--device={}", path.display())).arg(format!("--extract={}", to.display())).arg(&path);
        let Ok(checked) = fsck.output() else { return println!("skipped: there is no fsck.erofs") };
        assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stderr));
        for (name, content) in [("one", one), ("two", two)] {
            let path = to.join(name);
            assert!(std::fs::read(&path).unwrap() == content, "{name}");
            assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o755);
        }
    }
}
