//! Has a worker merge the layers of an image: to build its metadata, or to find files in it. The daemon only copies the layers' indexes
//! to the worker, and checks what the worker reports. Everything here blocks.

use crate::ImageError;
use crate::budget::{Budget, BudgetError, Cancel};
use crate::directory::ContentKind;
use crate::erofs::MAX_METADATA;
use crate::install::{StoreState, tree_name};
use crate::layer::index::MAX_FILE_CHUNKS;
use crate::layer::{BLOCK, MAX_PATH, PIECE};
use crate::worker::{
    FoundFile, Job, JobError, JobFigures, Launch, LayerHeader, Supervision, WorkerEnd, WorkerError, WorkerStreams,
};
use nacelle_base::files::at;
use nacelle_base::{Chain, json};
use nacelle_model::digest::Digest;
use std::fs::File;
use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::os::fd::OwnedFd;
use std::thread::Builder;

/// The maximum size in bytes of all indexes of an image, which are read one after the other.
const MAX_INDEXES: u64 = 512 << 20;
/// The maximum number of regular files of a directory that is listed.
const MAX_FOUND_FILES: usize = 4096;
/// The maximum number of JSON values of a found file: pairs of numbers for its chunks.
const MAX_FILE_VALUES: usize = 4 * MAX_FILE_CHUNKS as usize;

/// The digest that names the metadata, the length of the metadata, and the blobs that follow them with their lengths.
pub type BuiltTree = (Digest, u64, Vec<(Digest, u64)>);

/// The result of a worker, and the end of its output if it was not a file.
type WorkerResult = Result<(JobFigures, Vec<u8>), ImageError>;

impl StoreState {
    /// Returns the metadata of these layers, and writes them unless another image has the same, undamaged.
    pub fn build_tree(&self, diff_ids: &[Digest], cancel: &Cancel) -> Result<BuiltTree, ImageError> {
        let tree = tree_name(diff_ids);
        let key = (ContentKind::Tree, tree);
        let pin = self.directory.pin(key);
        let _writing = pin.blocking_lock();
        for same in self.published.images().values().filter(|stored| stored.tree == tree) {
            let blobs = same.blobs.iter().map(|(layer, length)| ((ContentKind::Layer, *layer), *length));
            let mut sound = true;
            for (key, length) in [(key, same.tree_length)].into_iter().chain(blobs) {
                sound &= self.check_content(key, Some(length))?.is_none();
            }
            if sound {
                return Ok((tree, same.tree_length, same.blobs.clone()));
            }
        }
        let layers = self.layer_headers(diff_ids)?;
        let mut budget = self.image_budget(&layers, cancel)?;
        let metadata = self.directory.create_temporary()?;
        let output = metadata.file.try_clone().map_err(at("open", metadata.path()))?;
        let job = Job::Merge { layers: layers.len() as u64, steps: budget.steps_limit() };
        let (figures, _) = self.run_merge_worker(job.clone(), &layers, MergeOutput::File(output), &mut budget)?;
        let length = metadata.file.metadata().map_err(at("read", metadata.path()))?.len();
        let (used, steps) = check_metadata(figures, length, layers.len())
            .map_err(|why| ImageError::Worker(WorkerError::Protocol { task: job.task(), why }))?;
        tracing::debug!(tree = %tree, bytes = budget.peak(), steps, "merged the layers of an image");
        self.directory.commit_tree(tree, self.directory.finish(metadata)?)?;
        if self.damage.set(key, None) {
            tracing::info!(tree = %tree, "repaired the damaged metadata of an image");
        }
        let used = used.iter().filter_map(|layer| layers.get(*layer)).map(|layer| (layer.diff_id, layer.blob_length));
        Ok((tree, length, used.collect()))
    }

    /// Returns the regular files of a directory of these layers, or only that of one name; `None` if there is no such directory.
    pub fn find_files(
        &self,
        diff_ids: &[Digest],
        directory: &str,
        name: Option<&str>,
        cancel: &Cancel,
    ) -> Result<Option<Vec<FoundFile>>, ImageError> {
        if directory.len() + name.map_or(0, str::len) > MAX_PATH {
            return Ok(None);
        }
        let layers = self.layer_headers(diff_ids)?;
        let mut budget = self.image_budget(&layers, cancel)?;
        let (listed, name_given) = (directory.to_owned(), name.is_some());
        let (directory, name) = (directory.to_owned(), name.map(str::to_owned));
        let job = Job::Find { layers: layers.len() as u64, steps: budget.steps_limit(), directory, name };
        let (figures, lines) = self.run_merge_worker(job.clone(), &layers, MergeOutput::Pipe, &mut budget)?;
        let wrong = |why| ImageError::Worker(WorkerError::Protocol { task: job.task(), why });
        match figures {
            JobFigures::Found(true) => {}
            JobFigures::Found(false) => return Ok(None),
            _ => return Err(wrong("it reports the result of another job")),
        }
        // A decoded line takes more memory than its bytes, which are charged.
        let count = lines.iter().filter(|byte| **byte == b'\n').count();
        match name_given {
            true if count > 1 => return Err(wrong("it reports several files of one name")),
            false if count > MAX_FOUND_FILES => {
                let (directory, limit) = (listed, MAX_FOUND_FILES);
                return Err(ImageError::TooManyFiles { directory, limit });
            }
            _ => {}
        }
        let lines = lines.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
        let files = lines.map(|line| {
            let file: FoundFile = json::read_limited(line, MAX_FILE_VALUES).ok()?;
            let blocks = layers.get(file.layer)?.blob_length / BLOCK;
            file.data.check(blocks).ok()?;
            (!file.name.contains(['/', '\0'])).then_some(file)
        });
        files.collect::<Option<_>>().map(Some).ok_or_else(|| wrong("a file that it reports is invalid"))
    }

    fn layer_headers(&self, diff_ids: &[Digest]) -> Result<Vec<LayerHeader>, ImageError> {
        let header = |diff_id: &Digest| {
            let (index_length, blob_length) = self.directory.layer_lengths(*diff_id)?;
            Ok(LayerHeader { diff_id: *diff_id, index_length, blob_length })
        };
        diff_ids.iter().map(header).collect()
    }

    fn image_budget(&self, layers: &[LayerHeader], cancel: &Cancel) -> Result<Budget, ImageError> {
        let all = layers.iter().map(|layer| layer.index_length).fold(0, u64::saturating_add);
        if all > MAX_INDEXES {
            return Err(ImageError::TooLarge {
                what: "the indexes of the layers together".to_owned(),
                limit: MAX_INDEXES,
            });
        }
        Ok(Budget::image(&self.pool, cancel, all))
    }

    /// Runs a worker that reads the indexes of these layers.
    fn run_merge_worker(
        &self,
        job: Job,
        layers: &[LayerHeader],
        output: MergeOutput,
        budget: &mut Budget,
    ) -> WorkerResult {
        let connect = |source| ImageError::Worker(WorkerError::Control { what: "connect", source });
        let task = job.task();
        let work = Supervision::new(Launch::Process(&self.config.worker), budget);
        let (input, to_worker) = io::pipe().map_err(connect)?;
        let (output, pipe): (OwnedFd, _) = match output {
            MergeOutput::File(file) => (file.into(), None),
            MergeOutput::Pipe => {
                let (reader, writer) = io::pipe().map_err(connect)?;
                (writer.into(), Some(reader))
            }
        };
        let streams = WorkerStreams { input: input.into(), output, blob: None };
        let (fed, read, result) = std::thread::scope(|scope| {
            let work = &work;
            let run = move || work.run(job, streams);
            let running = Builder::new().name("image worker".into()).spawn_scoped(scope, run).map_err(connect)?;
            let fed = self.feed_indexes(work, layers, to_worker).inspect_err(|_| work.stop());
            let read = pipe.map(|pipe| read_output(work, pipe).inspect_err(|_| work.stop()));
            let result = running.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            Ok::<_, ImageError>((fed, read, result))
        })?;
        let protocol = |why| ImageError::Worker(WorkerError::Protocol { task, why });
        let figures = match (result, fed) {
            (Err(WorkerEnd::Budget(error)), _) => return Err(ImageError::Tree(error.into())),
            (_, _) if work.is_cancelled() => return Err(ImageError::Tree(BudgetError::Cancelled.into())),
            (Err(WorkerEnd::Failed(error)), _) => return Err(self.merge_error(error, layers, task)),
            (Err(WorkerEnd::Lost(error)), _) => return Err(ImageError::Worker(error)),
            (_, Err(FeedError::Store(error))) => return Err(error),
            (Ok(_), Err(FeedError::Closed)) => return Err(protocol("it did not read its input to the end")),
            (Err(WorkerEnd::Stopped), _) => match read {
                Some(Err(error)) => return Err(error),
                _ => return Err(protocol("it was stopped")),
            },
            (Ok(figures), Ok(())) => figures,
        };
        Ok((figures, read.transpose()?.unwrap_or_default()))
    }

    /// Sends the indexes of these layers, each behind its header.
    fn feed_indexes(
        &self,
        work: &Supervision<'_>,
        layers: &[LayerHeader],
        mut to: PipeWriter,
    ) -> Result<(), FeedError> {
        let mut piece = vec![0; PIECE];
        for layer in layers {
            let (file, path) =
                self.directory.open_index(layer.diff_id).map_err(|error| FeedError::Store(error.into()))?;
            to.write_all(&layer.encode()).map_err(|_closed| FeedError::Closed)?;
            let mut left = file.take(layer.index_length);
            loop {
                let got = match left.read(&mut piece) {
                    Ok(0) => break,
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                    other => other.map_err(at("read", &path)).map_err(|error| FeedError::Store(error.into()))?,
                };
                to.write_all(piece.get(..got).unwrap_or_default()).map_err(|_closed| FeedError::Closed)?;
                work.count_move();
            }
        }
        Ok(())
    }

    fn merge_error(&self, error: JobError, layers: &[LayerHeader], task: &'static str) -> ImageError {
        match error {
            JobError::Index { layer, source } => match layers.get(layer) {
                Some(layer) => {
                    // The worker may be wrong about a layer that other images use, too.
                    if let Err(error) = self.verify_layer(layer.diff_id) {
                        tracing::warn!(error = %Chain(&error), "cannot verify a layer whose index seems to be damaged");
                    }
                    ImageError::Index { path: self.directory.index_path(layer.diff_id), source }
                }
                None => ImageError::Worker(WorkerError::Protocol { task, why: "it names a layer that does not exist" }),
            },
            JobError::Tree(error) => ImageError::Tree(error),
            JobError::Erofs(error) => ImageError::Erofs(error),
            JobError::Stream(source) => ImageError::MergeStream(source),
            JobError::Layer(_) | JobError::Worker(_) => {
                ImageError::Worker(WorkerError::Protocol { task, why: "it reports the error of another job" })
            }
        }
    }
}

/// Where a worker writes its result.
enum MergeOutput {
    File(File),
    /// A pipe, which this process reads.
    Pipe,
}

/// Reasons that a worker gets no more indexes.
enum FeedError {
    /// The worker has closed its input: its own result says why.
    Closed,
    /// An index cannot be read.
    Store(ImageError),
}

/// Reads the output of a worker. The memory for it is charged first.
fn read_output(work: &Supervision<'_>, mut pipe: PipeReader) -> Result<Vec<u8>, ImageError> {
    let mut output = Vec::new();
    loop {
        if output.len() == output.capacity() {
            // Allocated at once, so that what is charged is what is taken.
            let more = (output.len() / 2).max(PIECE);
            work.budget().charge(more as u64).map_err(|error| ImageError::Tree(error.into()))?;
            output.reserve_exact(more);
        }
        let room = (output.capacity() - output.len()) as u64;
        let got = (&mut pipe).take(room).read_to_end(&mut output);
        let got = got.map_err(|source| ImageError::Worker(WorkerError::Control { what: "read from", source }))?;
        work.count_move();
        if got == 0 {
            return Ok(output);
        }
    }
}

/// Compares what the worker reports with the file that it has written. Returns the layers in use and the number of steps.
fn check_metadata(figures: JobFigures, file: u64, layers: usize) -> Result<(Vec<usize>, u64), &'static str> {
    let JobFigures::Merged { length, used, steps } = figures else {
        return Err("it reports the result of another job");
    };
    if length != file || length == 0 || length % BLOCK != 0 || length > MAX_METADATA as u64 {
        return Err("the length of the metadata is not what it reports");
    }
    let ascending = used.windows(2).all(|pair| matches!(pair, [a, b] if a < b));
    if !ascending || used.last().is_some_and(|last| *last >= layers) {
        return Err("it names layers that do not exist");
    }
    Ok((used, steps))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_of_a_merge_must_fit_its_file_and_layers() {
        let merged = |length, used: &[usize]| JobFigures::Merged { length, used: used.to_vec(), steps: 7 };
        assert_eq!(check_metadata(merged(8192, &[0, 2]), 8192, 3), Ok((vec![0, 2], 7)));
        for (figures, file) in [
            (merged(8192, &[]), 4096),
            (merged(0, &[]), 0),
            (merged(100, &[]), 100),
            (merged(1 << 30, &[]), 1 << 30),
            (merged(4096, &[3]), 4096),
            (merged(4096, &[1, 1]), 4096),
            (merged(4096, &[2, 0]), 4096),
            (JobFigures::Found(true), 4096),
        ] {
            assert!(check_metadata(figures.clone(), file, 3).is_err(), "{figures:?}");
        }
    }
}
