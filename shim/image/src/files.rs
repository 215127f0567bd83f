//! Finds and copies single files of an image in the store, for callers that need one file without the rest (the disk of a VM, its
//! kernel). Everything here blocks.

use crate::ImageError;
use crate::budget::Cancel;
use crate::directory::ContentKind;
use crate::install::StoreState;
use crate::layer::BLOCK;
use crate::layer::index::FileData;
use crate::worker::FoundFile;
use nacelle_base::files::at;
use nacelle_model::digest::ImageId;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::PathBuf;

/// A file in an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageFile {
    /// The file's name in its directory.
    pub name: String,
    /// The file's size in bytes.
    pub size: u64,
    /// The blob and the offset of the data in it, if they are contiguous. The bytes up to the next multiple of 4096 are zeros.
    /// `None` if the data are in several pieces, with holes.
    pub extent_start: Option<(PathBuf, u64)>,
}

/// The result of copying a file out of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyOutcome {
    /// The file was copied; the number of its bytes.
    All(u64),
    /// There is no regular file of this name.
    Missing,
    /// The file is larger than allowed; its size in bytes. Nothing was copied.
    TooLarge(u64),
}

impl StoreState {
    /// Implements `ImageStore::list_files`. Blocks.
    pub fn list_files(
        &self,
        id: ImageId,
        directory: &str,
        cancel: &Cancel,
    ) -> Result<Option<Vec<ImageFile>>, ImageError> {
        let stored = self.require_sound_image(&id)?;
        let Some(found) = self.find_files(&stored.layers, directory, None, cancel)? else { return Ok(None) };
        let file = |found: FoundFile| {
            let blob = self.directory.path((ContentKind::Layer, *stored.layers.get(found.layer)?));
            let (size, extent_start) = match found.data {
                FileData::Flat { size, block } => (size, Some((blob, u64::from(block) * BLOCK))),
                FileData::Chunks { size, .. } => (size, None),
            };
            Some(ImageFile { name: found.name, size, extent_start })
        };
        Ok(Some(found.into_iter().filter_map(file).collect()))
    }

    /// Implements `ImageStore::copy_file_from_image`. Blocks.
    pub fn copy_file_from_image(
        &self,
        id: ImageId,
        path: &str,
        most: u64,
        to: &mut File,
        cancel: &Cancel,
    ) -> Result<CopyOutcome, ImageError> {
        let stored = self.require_sound_image(&id)?;
        let (directory, name) = path.rsplit_once('/').unwrap_or(("", path));
        let found = self.find_files(&stored.layers, directory, Some(name), cancel)?;
        let found = found.unwrap_or_default().into_iter().find(|found| found.name == name);
        let Some(FoundFile { layer, data, .. }) = found else { return Ok(CopyOutcome::Missing) };
        let (FileData::Flat { size, .. } | FileData::Chunks { size, .. }) = data;
        if size > most {
            return Ok(CopyOutcome::TooLarge(size));
        }
        let Some(diff_id) = stored.layers.get(layer) else { return Ok(CopyOutcome::Missing) };
        let blob = self.directory.path((ContentKind::Layer, *diff_id));
        let copied = File::open(&blob).and_then(|mut from| copy(&mut from, &data, to));
        copied.map(|()| CopyOutcome::All(size)).map_err(at("copy a file out of", &blob)).map_err(ImageError::from)
    }
}

/// Copies the data of a file out of its layer's blob; holes stay holes.
fn copy(from: &mut File, data: &FileData, to: &mut File) -> io::Result<()> {
    let mut piece = |block: u32, at: u64, length: u64| {
        from.seek(SeekFrom::Start(u64::from(block) * BLOCK))?;
        to.seek(SeekFrom::Start(at))?;
        match io::copy(&mut from.by_ref().take(length), to)? {
            copied if copied == length => Ok(()),
            _ => Err(io::Error::from(io::ErrorKind::UnexpectedEof)),
        }
    };
    match data {
        FileData::Flat { size, block } => piece(*block, 0, *size),
        FileData::Chunks { size, bits, chunks } => {
            let chunk = BLOCK << bits;
            for (number, block) in chunks {
                let start = u64::from(*number) * chunk;
                piece(*block, start, chunk.min(size.saturating_sub(start)))?;
            }
            to.set_len(*size)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn what_lies_in_chunks_is_copied_with_its_holes() {
        let mut blob = tempfile::tempfile().unwrap();
        for byte in [1u8, 2, 3] {
            blob.write_all(&[byte; 4096]).unwrap();
        }
        let copied = |data: &FileData| {
            let mut to = tempfile::tempfile().unwrap();
            copy(&mut blob.try_clone().unwrap(), data, &mut to)?;
            let mut bytes = Vec::new();
            to.rewind()?;
            to.read_to_end(&mut bytes).map(|_| bytes)
        };
        // The last chunk ends with the file.
        let bytes = copied(&FileData::Chunks { size: 4 * 4096 + 10, bits: 0, chunks: vec![(1, 2), (4, 0)] }).unwrap();
        let expected: Vec<u8> = [(0, 4096), (3, 4096), (0, 8192), (1, 10)]
            .iter()
            .flat_map(|&(byte, count)| std::iter::repeat_n(byte, count))
            .collect();
        assert!(bytes == expected, "{} bytes", bytes.len());
        assert_eq!(copied(&FileData::Flat { size: 4097, block: 1 }).unwrap()[4095..], [2, 3]);
        // A truncated blob.
        let error = copied(&FileData::Flat { size: 4097, block: 2 }).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }
}
