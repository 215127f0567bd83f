//! Owns: files of an image where they lie in the store: for whoever reads one without the rest (a disk of a machine).
//! May use: `folder`, `tree`, `layer`.

use crate::folder::Part;
use crate::install::Shared;
use crate::layer::BLOCK;
use crate::layer::index::Data;
use crate::tree::{Body, Inode, Tree};
use crate::{ImageError, ImageId};
use std::path::PathBuf;

/// A file in an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageFile {
    /// Its name in its folder.
    pub name: String,
    /// Its bytes.
    pub size: u64,
    /// Where they lie in one piece: a file, and bytes from its start. What follows there up to a multiple of 4096 bytes is zeros.
    /// None: they lie in several pieces, with holes.
    pub place: Option<(PathBuf, u64)>,
}

impl Shared {
    /// Blocking: see `Store::files`.
    pub fn files(&self, id: ImageId, folder: &str) -> Result<Option<Vec<ImageFile>>, ImageError> {
        let stored = self.published.images().get(&id).cloned();
        let stored = stored.ok_or_else(|| ImageError::NotFound { name: id.to_string() })?;
        let layers = stored.layers.iter().map(|diff_id| self.folder.layer(*diff_id)).collect::<Result<Vec<_>, _>>()?;
        let mut tree = Tree::merge(&layers)?;
        let Some(found) = tree.list(folder) else { return Ok(None) };
        let file = |(name, inode): (&[u8], &Inode)| {
            let Body::File { layer, data } = &inode.body else { return None };
            let blob = self.folder.path((Part::Layer, *stored.layers.get(*layer)?));
            let (size, place) = match data {
                Data::Flat { size, block } => (*size, Some((blob, u64::from(*block) * BLOCK))),
                Data::Chunks { size, .. } => (*size, None),
            };
            Some(ImageFile { name: String::from_utf8(name.to_vec()).ok()?, size, place })
        };
        Ok(Some(found.into_iter().filter_map(file).collect()))
    }
}
