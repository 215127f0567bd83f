//! Does the job of a worker, between streams that the caller has opened. Opens, starts and connects nothing.

use super::protocol::{FoundFile, Job, JobError, JobFigures, LAYER_HEADER_BYTES, LayerHeader};
use crate::budget::{Budget, BudgetError};
use crate::erofs::{LayerBlob, write_erofs};
use crate::layer::decompress::decompress;
use crate::layer::index::{IndexError, LayerIndex};
use crate::layer::ingest::{LayerError, LayerLimits, index_layer};
use crate::tree::{InodeContent, MergedTree};
use nacelle_model::digest::Digest;
use std::fs::File;
use std::io::{self, Read, Write};

/// Does a job. `blob` is the file of a job of kind `Index`. All output has been written when it returns.
pub fn run_job(
    job: Job,
    mut input: impl Read,
    mut output: impl Write,
    blob: Option<File>,
    budget: &mut Budget,
) -> Result<JobFigures, JobError> {
    match job {
        Job::Decompress { .. } => {
            decompress(input, &mut output, budget).map_err(JobError::Layer)?;
            Ok(JobFigures::Decompressed)
        }
        Job::Index { bytes, entries } => {
            let blob = blob.ok_or_else(|| JobError::Worker("the job came without its file".to_owned()))?;
            let indexed = index_layer(input, &blob, LayerLimits { bytes, entries }, budget).map_err(JobError::Layer)?;
            output.write_all(&indexed.index).map_err(|error| JobError::Layer(LayerError::Write(error)))?;
            let index_length = indexed.index.len() as u64;
            Ok(JobFigures::Indexed { blob_length: indexed.blob_length, index_length, entries: indexed.entries })
        }
        Job::Merge { layers, .. } => {
            let (tree, blobs) = read_layers(&mut input, layers, budget)?;
            let metadata = write_erofs(&tree, &blobs, budget).map_err(JobError::Erofs)?;
            output.write_all(&metadata.bytes).map_err(JobError::Stream)?;
            Ok(JobFigures::Merged { length: metadata.bytes.len() as u64, used: metadata.used, steps: budget.steps() })
        }
        Job::Find { layers, directory, name, .. } => {
            let (mut tree, _) = read_layers(&mut input, layers, budget)?;
            let over = |error: BudgetError| JobError::Tree(error.into());
            let Some(found) = tree.list_directory(&directory, budget).map_err(over)? else {
                return Ok(JobFigures::Found(false));
            };
            for (found, inode) in found {
                let InodeContent::File { layer, data } = &inode.body else { continue };
                let Ok(found) = std::str::from_utf8(found) else { continue };
                if name.as_deref().is_some_and(|name| name != found) {
                    continue;
                }
                let file = FoundFile { name: found.to_owned(), layer: *layer, data: data.clone() };
                let mut line = serde_json::to_vec(&file).map_err(|error| JobError::Stream(error.into()))?;
                line.push(b'\n');
                output.write_all(&line).map_err(JobError::Stream)?;
            }
            Ok(JobFigures::Found(true))
        }
    }
}

/// Reads the indexes of an image and merges them.
fn read_layers(
    input: &mut impl Read,
    layers: u64,
    budget: &mut Budget,
) -> Result<(MergedTree, Vec<LayerBlob>), JobError> {
    let (mut tree, mut blobs) = (MergedTree::new(), Vec::new());
    for layer in 0..usize::try_from(layers).unwrap_or(usize::MAX) {
        let header = read_layer_header(input).map_err(JobError::Stream)?;
        let damaged = |source| JobError::Index { layer, source };
        budget.charge(header.index_length).map_err(|error| JobError::Tree(error.into()))?;
        let mut bytes = vec![0; usize::try_from(header.index_length).unwrap_or(usize::MAX)];
        input.read_exact(&mut bytes).map_err(JobError::Stream)?;
        let index = LayerIndex::open(&bytes).map_err(damaged)?;
        if index.blob_length != header.blob_length {
            return Err(damaged(IndexError::Damaged));
        }
        tree.apply_layer(layer, &index, budget).map_err(JobError::Tree)?;
        blobs.push(LayerBlob { diff_id: header.diff_id, length: index.blob_length });
        budget.refund(header.index_length);
    }
    Ok((tree, blobs))
}

/// Reads a header.
fn read_layer_header(input: &mut impl Read) -> io::Result<LayerHeader> {
    let mut bytes = [0; LAYER_HEADER_BYTES];
    input.read_exact(&mut bytes)?;
    let (diff_id, lengths) = bytes.split_first_chunk::<32>().ok_or(io::ErrorKind::UnexpectedEof)?;
    let (index_length, blob_length) = lengths.split_first_chunk::<8>().ok_or(io::ErrorKind::UnexpectedEof)?;
    let blob_length = blob_length.try_into().map(u64::from_le_bytes).unwrap_or_default();
    Ok(LayerHeader { diff_id: Digest(*diff_id), index_length: u64::from_le_bytes(*index_length), blob_length })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layer_headers_are_read_as_they_were_written() {
        let header = LayerHeader { diff_id: Digest::of(b"x"), index_length: 0x0102_0304_0506, blob_length: u64::MAX };
        assert_eq!(read_layer_header(&mut header.encode().as_slice()).unwrap(), header);
        assert!(read_layer_header(&mut &header.encode()[1..]).is_err());
    }
}
