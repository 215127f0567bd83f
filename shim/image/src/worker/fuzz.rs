//! Defines the fuzz harnesses for what a worker reads, compressed streams, tars and indexes, and for its messages to the daemon. A harness
//! fails by a panic, by never ending, or by a cost that does not follow from the input.

use super::channel::decode;
use super::job::run_job;
use super::protocol::{Job, JobError, JobFigures, LayerHeader, WorkerReport};
use crate::budget::{Budget, Cancel, MemoryPool};
use crate::layer::BLOCK;
use crate::layer::index::LayerIndex;
use nacelle_base::Chain;
use nacelle_base::allocations::AllocationLimit;
use nacelle_model::digest::Digest;
use std::fs::File;
use std::io::{self, Write};

/// The memory in bytes of all jobs.
const MEMORY: u64 = 1 << 30;
/// The maximum number of bytes of a decompressed stream or a tar, as the daemon enforces it.
const MAX_BYTES: u64 = 16 << 20;
/// The maximum number of entries of a tar.
const MAX_ENTRIES: u64 = 10_000;
/// Bytes of an index that each byte of its tar may become: the numbers of an entry take less than its header of 512 bytes.
const INDEX_GROWTH: u64 = 2;
/// Bytes of memory that each byte of the indexes may take in the tree: two bytes can name a directory.
const TREE_GROWTH: u64 = 1000;
/// Bytes of memory that any image takes.
const TREE_BASE: u64 = 4 << 20;
/// The cost of decoding a message of a worker: a character of an escaped text, or a number in a list that doubles.
const REPORT_LIMIT: AllocationLimit =
    AllocationLimit { base: 4 << 10, per_byte: 32, base_count: 20, count_per_byte: 1 };
/// The maximum number of characters of an error: two texts of 300 characters, each of which may be escaped, and the sentence.
const MAX_REPORT: usize = 2 * 300 * 10 + 300;

/// An output that ends as the daemon ends it.
struct BoundedOutput(u64);

impl Write for BoundedOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0 = self.0.checked_sub(bytes.len() as u64).ok_or(io::ErrorKind::BrokenPipe)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Decompresses the bytes.
pub fn decompress(data: &[u8]) {
    let mut budget = Budget::layer(&MemoryPool::new(MEMORY), &Cancel::default());
    let done = run_job(Job::Decompress { bytes: MAX_BYTES }, data, BoundedOutput(MAX_BYTES), None, &mut budget);
    assert!(matches!(done, Ok(JobFigures::Decompressed) | Err(JobError::Layer(_))), "{done:?}");
}

/// Reads the bytes as a tar, and what comes of them as the only layer of an image and as two layers of another one.
pub fn layer(data: &[u8]) {
    let blob = unnamed_file();
    let (mut index, mut budget) = (Vec::new(), Budget::layer(&MemoryPool::new(MEMORY), &Cancel::default()));
    let job = Job::Index { bytes: MAX_BYTES, entries: MAX_ENTRIES };
    let done = run_job(job, data, &mut index, blob.try_clone().ok(), &mut budget);
    let Ok(figures) = done else {
        return assert!(matches!(done, Err(JobError::Layer(_))), "{done:?}");
    };
    let JobFigures::Indexed { blob_length, index_length, entries } = figures else { panic!("{figures:?}") };
    assert_eq!((index_length, blob_length), (index.len() as u64, blob.metadata().expect("it is open").len()));
    assert!(entries <= MAX_ENTRIES && blob_length % BLOCK == 0 && blob_length <= MAX_BYTES * BLOCK);
    assert!(index_length <= 4096 + INDEX_GROWTH * data.len() as u64, "{index_length} of {}", data.len());
    // What the worker has written is accepted.
    LayerIndex::open(&index)
        .expect("the worker's own index")
        .entries()
        .for_each(|entry| drop(entry.expect("its own entry")));
    merge(&index, 1);
    merge(&index, 2);
}

/// Reads the bytes as the body of an index, and merges it.
pub fn index(data: &[u8]) {
    let index = [data, &Digest::of(data).0].concat();
    merge(&index, 1);
    merge(&index, 2);
}

/// Decodes a message of a worker to the daemon. The text of an error is short and fits into a line.
pub fn reports(data: &[u8]) {
    let report = REPORT_LIMIT.enforce(data.len(), || decode::<WorkerReport>(data));
    let Some(WorkerReport::Failed(error)) = report else { return };
    let message = match &error {
        JobError::Layer(error) => Chain(error).to_string(),
        JobError::Index { source, .. } => Chain(source).to_string(),
        JobError::Tree(error) => Chain(error).to_string(),
        JobError::Erofs(error) => Chain(error).to_string(),
        JobError::Stream(error) => error.to_string(),
        JobError::Worker(message) => message.clone(),
    };
    assert!(message.chars().count() <= MAX_REPORT && !message.contains(char::is_control), "{message:?}");
}

/// Merges an index with itself.
fn merge(index: &[u8], layers: u64) {
    let Ok(opened) = LayerIndex::open(index) else { return };
    let header =
        LayerHeader { diff_id: Digest::of(index), index_length: index.len() as u64, blob_length: opened.blob_length };
    let input = [header.encode().as_slice(), index].concat().repeat(layers as usize);
    let all = index.len() as u64 * layers;
    let mut budget = Budget::image(&MemoryPool::new(MEMORY), &Cancel::default(), all);
    let (mut metadata, steps) = (Vec::new(), budget.steps_limit());
    let done = run_job(Job::Merge { layers, steps }, input.as_slice(), &mut metadata, None, &mut budget);
    assert!(budget.steps() <= steps + 1, "{} steps", budget.steps());
    assert!(budget.peak() <= TREE_BASE + TREE_GROWTH * all, "{} bytes of {all}", budget.peak());
    match done {
        Ok(JobFigures::Merged { length, used, steps: _ }) => {
            assert!(length == metadata.len() as u64 && length.is_multiple_of(BLOCK) && length > 0);
            assert!(used.iter().all(|layer| (*layer as u64) < layers), "{used:?}");
            // The magic number of the superblock (fs/erofs/erofs_fs.h).
            assert_eq!(metadata.get(1024..1028), Some(0xe0f5_e1e2_u32.to_le_bytes().as_slice()));
        }
        Err(JobError::Index { .. } | JobError::Tree(_) | JobError::Erofs(_)) => {}
        other => panic!("{other:?}"),
    }
}

fn unnamed_file() -> File {
    let file = nix::sys::memfd::memfd_create("blob", nix::sys::memfd::MFdFlags::MFD_CLOEXEC);
    File::from(file.expect("the kernel has memory files"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacelle_base::corpus::read_corpus;

    #[test]
    fn the_corpus_has_layers_that_become_images() {
        let is_layer = |data: &Vec<u8>| {
            let mut budget = Budget::layer(&MemoryPool::new(MEMORY), &Cancel::default());
            let job = Job::Index { bytes: MAX_BYTES, entries: MAX_ENTRIES };
            run_job(job, data.as_slice(), io::sink(), Some(unnamed_file()), &mut budget).is_ok()
        };
        assert!(read_corpus(env!("CARGO_MANIFEST_DIR"), "layer").iter().filter(|data| is_layer(data)).count() >= 2);
    }
}
