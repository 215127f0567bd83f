//! Unpacks one layer with one or two workers. The daemon feeds them, hashes what it copies, and limits it:
//!
//! ```text
//! source -> daemon: digest -> worker Decompress -> daemon: diff id, limit -> worker Index -> blob, index
//! ```
//!
//! A layer of the store is shared by all images that name its diff id. So the daemon computes it, from the same bytes that the worker
//! gets that reads the tar: a worker that an image has taken over can claim no content but its own. A layer that is not compressed
//! needs one worker only.

use super::protocol::{Job, JobError, JobFigures};
use super::{Launch, Supervision, UnpackError, WorkerEnd, WorkerError, WorkerStreams};
use crate::budget::{Budget, BudgetError};
use crate::layer::decompress::{SHORT_MAGIC_BYTES, is_compressed};
use crate::layer::file_tar::FileTar;
use crate::layer::index::MIN_INDEX_BYTES;
use crate::layer::ingest::{FIXED_MEMORY, LayerError, LayerLimits};
use crate::layer::{BLOCK, PIECE};
use nacelle_base::retry::retry_interrupted;
use nacelle_model::digest::Digest;
use nix::fcntl::{FcntlArg, fcntl};
use rustix::io::Errno;
use rustix::pipe::{SpliceFlags, tee};
use sha2::{Digest as _, Sha256};
use std::fs::File;
use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::thread::{Builder, Scope, ScopedJoinHandle};

/// The capacity of a pipe in bytes, if the node allows it.
const PIPE_CAPACITY: i32 = 1 << 20;

/// The empty files that a layer is unpacked to.
#[derive(Clone, Copy, Debug)]
pub struct UnpackTarget<'f> {
    /// The file for the files' data.
    pub blob: &'f File,
    /// The file for the index.
    pub index: &'f File,
}

/// A layer that was read to its end. The caller still has to compare the digests with the expected ones.
#[derive(Debug)]
pub struct UnpackedLayer {
    /// The digest of the stream as received.
    pub digest: Digest,
    /// The digest of the unpacked tar.
    pub diff_id: Digest,
    /// The number of entries that the worker reports.
    pub entries: u64,
}

/// Reads a layer from `source` (gzip, zstd or plain, detected by its first bytes) and unpacks it. The caller syncs both files.
pub fn unpack_layer(
    launch: Launch<'_>,
    mut source: impl Read,
    target: UnpackTarget<'_>,
    limits: LayerLimits,
    budget: &mut Budget,
) -> Result<UnpackedLayer, UnpackError> {
    budget.charge(FIXED_MEMORY)?;
    let cancel = budget.cancel().clone();
    // One read may return less than all of them.
    let mut start = Vec::with_capacity(SHORT_MAGIC_BYTES);
    let read = (&mut source).take(SHORT_MAGIC_BYTES as u64).read_to_end(&mut start);
    read.map_err(
        |error| if cancel.is_cancelled() { BudgetError::Cancelled.into() } else { UnpackError::Source(error) },
    )?;
    let compressed = is_compressed(&start);
    let source = io::Cursor::new(start).chain(source);
    unpack_stream(launch, source, compressed, target, limits, budget)
}

/// Unpacks a file of an artifact as a layer with one file. The digest that it returns is that of the file. The caller syncs both
/// files.
pub fn unpack_file(
    launch: Launch<'_>,
    mut file: FileTar<impl Read>,
    target: UnpackTarget<'_>,
    limits: LayerLimits,
    budget: &mut Budget,
) -> Result<UnpackedLayer, UnpackError> {
    budget.charge(FIXED_MEMORY)?;
    let unpacked = unpack_stream(launch, &mut file, false, target, limits, budget)?;
    Ok(UnpackedLayer { digest: file.content_digest(), ..unpacked })
}

fn unpack_stream(
    launch: Launch<'_>,
    source: impl Read,
    compressed: bool,
    target: UnpackTarget<'_>,
    limits: LayerLimits,
    budget: &mut Budget,
) -> Result<UnpackedLayer, UnpackError> {
    let work = Supervision::new(launch, budget);
    let source = WaitingReader { source, work: &work };
    let ends = run_workers(&work, source, compressed, target, limits)?;
    let (digest, diff_id, figures) = ends.into_result(&work, limits)?;
    let entries = check_figures(&figures, target, limits, work.budget().limit())?;
    Ok(UnpackedLayer { digest, diff_id, entries })
}

/// The results of all threads that worked on a layer.
struct ThreadResults {
    /// Of the thread that reads the source: its digest.
    fed: Result<Digest, CopyError>,
    /// Of the thread between the workers: the diff id. `None` if there is only one worker.
    pumped: Option<Result<Digest, CopyError>>,
    decompressed: Option<Result<JobFigures, WorkerEnd>>,
    indexed: Result<JobFigures, WorkerEnd>,
}

/// Reasons that copying a stream to a worker ends early.
enum CopyError {
    /// The stream cannot be read.
    Read(io::Error),
    /// The worker reads no more, or another thread has failed.
    Closed,
    /// The stream is longer than allowed.
    TooLong,
}

/// Runs the workers of a layer, each with a thread that serves it, and copies the streams between them.
fn run_workers(
    work: &Supervision<'_>,
    source: impl Read,
    compressed: bool,
    target: UnpackTarget<'_>,
    limits: LayerLimits,
) -> Result<ThreadResults, UnpackError> {
    let connect = |source| UnpackError::Worker(WorkerError::Control { what: "connect", source });
    std::thread::scope(|scope| {
        // If a thread cannot be started, those before it end.
        let _stop = StopOnDrop(work);
        let (tar, to_index) = open_pipe().map_err(connect)?;
        let index = target.index.try_clone().map_err(connect)?;
        let job = Job::Index { bytes: limits.bytes, entries: limits.entries };
        let streams = WorkerStreams { input: tar.into(), output: index.into(), blob: Some(target.blob) };
        let indexing = start_worker(scope, work, job, streams).map_err(connect)?;
        if !compressed {
            let fed = copy_stream(work, source, to_index, limits.bytes);
            return Ok(ThreadResults { fed, pumped: None, decompressed: None, indexed: join(indexing) });
        }
        let (packed, to_decompress) = open_pipe().map_err(connect)?;
        let (unpacked, output) = open_pipe().map_err(connect)?;
        let job = Job::Decompress { bytes: limits.bytes };
        let streams = WorkerStreams { input: packed.into(), output: output.into(), blob: None };
        let decompressing = start_worker(scope, work, job, streams).map_err(connect)?;
        let pump = move || forward_output(work, unpacked, to_index, limits.bytes);
        let pumping = Builder::new().name("layer pump".into()).spawn_scoped(scope, pump).map_err(connect)?;
        let fed = copy_stream(work, source, to_decompress, u64::MAX);
        Ok(ThreadResults {
            fed,
            pumped: Some(join(pumping)),
            decompressed: Some(join(decompressing)),
            indexed: join(indexing),
        })
    })
}

fn open_pipe() -> io::Result<(PipeReader, PipeWriter)> {
    let (reader, writer) = io::pipe()?;
    // A smaller pipe is slower.
    let _ = fcntl(&writer, FcntlArg::F_SETPIPE_SZ(PIPE_CAPACITY));
    Ok((reader, writer))
}

fn start_worker<'scope>(
    scope: &'scope Scope<'scope, '_>,
    work: &'scope Supervision<'_>,
    job: Job,
    streams: WorkerStreams<'scope>,
) -> io::Result<ScopedJoinHandle<'scope, Result<JobFigures, WorkerEnd>>> {
    Builder::new().name("image worker".into()).spawn_scoped(scope, move || work.run(job, streams))
}

fn join<T>(thread: ScopedJoinHandle<'_, T>) -> T {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Copies a stream to a worker, and returns its digest.
fn copy_stream(
    work: &Supervision<'_>,
    mut from: impl Read,
    mut to: PipeWriter,
    limit: u64,
) -> Result<Digest, CopyError> {
    hash_stream(work, limit, |piece| {
        let got = match from.read(piece) {
            // Another failure came first: a download is given up then.
            Err(error) if error.kind() != io::ErrorKind::Interrupted && work.is_stopped() => {
                return Err(CopyError::Closed);
            }
            other => other.map_err(CopyError::Read)?,
        };
        // The worker has closed its input: its own result says why.
        to.write_all(piece.get(..got).unwrap_or_default()).map_err(|_closed| CopyError::Closed)?;
        Ok(got)
    })
}

/// Passes the output of a worker on to the next one, and returns its digest. Both readers get the same pages of the kernel (tee(2)), which
/// the writer cannot change: its filter allows no call that puts pages of its own into a pipe.
fn forward_output(
    work: &Supervision<'_>,
    mut from: PipeReader,
    to: PipeWriter,
    limit: u64,
) -> Result<Digest, CopyError> {
    hash_stream(work, limit, |piece| {
        let teed = retry_interrupted(|| tee(&from, &to, piece.len(), SpliceFlags::empty()));
        let got = teed.map_err(|errno| match errno {
            Errno::PIPE => CopyError::Closed,
            errno => CopyError::Read(errno.into()),
        })?;
        from.read_exact(piece.get_mut(..got).unwrap_or_default()).map_err(CopyError::Read)?;
        Ok(got)
    })
}

/// Calls `next` until it returns 0, and returns the digest of what it has put at the beginning of the buffer. An error ends all workers.
fn hash_stream(
    work: &Supervision<'_>,
    limit: u64,
    mut next: impl FnMut(&mut [u8]) -> Result<usize, CopyError>,
) -> Result<Digest, CopyError> {
    let mut hash_all = || {
        let (mut hash, mut left, mut piece) = (Sha256::new(), limit, vec![0; PIECE]);
        loop {
            if work.is_stopped() {
                return Err(CopyError::Closed);
            }
            let got = match next(&mut piece) {
                Ok(0) => return Ok(Digest(hash.finalize().into())),
                Err(CopyError::Read(error)) if error.kind() == io::ErrorKind::Interrupted => continue,
                other => other?,
            };
            left = left.checked_sub(got as u64).ok_or(CopyError::TooLong)?;
            hash.update(piece.get(..got).unwrap_or_default());
            work.count_move();
        }
    };
    let hashed = hash_all();
    if hashed.is_err() {
        work.stop();
    }
    hashed
}

/// The source of a layer, for which workers may wait longer than for anything else.
struct WaitingReader<'w, 'b, R> {
    source: R,
    work: &'w Supervision<'b>,
}

impl<R: Read> Read for WaitingReader<'_, '_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let source = &mut self.source;
        self.work.wait_for_source(|| source.read(buffer))
    }
}

/// Ends all workers when it is dropped.
struct StopOnDrop<'w, 'b>(&'w Supervision<'b>);

impl Drop for StopOnDrop<'_, '_> {
    fn drop(&mut self) {
        self.0.stop();
    }
}

/// How likely an error is the cause of the others; the first is reported. What fails ends the streams of the others, so that they fail too.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Cause {
    Budget,
    Source,
    Compression,
    Length,
    Decompressor,
    Indexer,
    Input,
    Output,
}

impl ThreadResults {
    /// Returns the digest, the diff id and the figures of the blob; or the error that caused all others.
    fn into_result(
        self,
        work: &Supervision<'_>,
        limits: LayerLimits,
    ) -> Result<(Digest, Digest, JobFigures), UnpackError> {
        let ThreadResults { fed, pumped, decompressed, indexed } = self;
        let (fed, indexed) = match (fed, indexed, &pumped, &decompressed) {
            (Ok(digest), Ok(figures), None, None) => return Ok((digest, digest, figures)),
            (Ok(digest), Ok(figures), Some(Ok(diff_id)), Some(Ok(JobFigures::Decompressed))) => {
                return Ok((digest, *diff_id, figures));
            }
            (fed, indexed, ..) => (fed, indexed),
        };
        if work.is_cancelled() {
            return Err(BudgetError::Cancelled.into());
        }
        let worker = |task, why| UnpackError::Worker(WorkerError::Protocol { task, why });
        let (decompress, index) = (Job::Decompress { bytes: 0 }.task(), Job::Index { bytes: 0, entries: 0 }.task());
        let mut errors: Vec<(Cause, UnpackError)> = Vec::new();
        let reader = if pumped.is_some() { decompress } else { index };
        for (copied, task, is_source) in [(Some(fed), reader, true), (pumped, index, false)] {
            errors.extend(copied.and_then(Result::err).map(|error| match error {
                CopyError::Read(error) if is_source => (Cause::Source, UnpackError::Source(error)),
                CopyError::Read(source) => {
                    (Cause::Decompressor, UnpackError::Worker(WorkerError::Control { what: "read from", source }))
                }
                CopyError::TooLong => (Cause::Length, LayerError::too_many_bytes(limits.bytes).into()),
                CopyError::Closed => (Cause::Input, worker(task, "it did not read its input to the end")),
            }));
        }
        for (result, task, lost) in
            [(decompressed, decompress, Cause::Decompressor), (Some(indexed), index, Cause::Indexer)]
        {
            errors.extend(match result {
                None | Some(Err(WorkerEnd::Stopped)) => None,
                Some(Ok(JobFigures::Decompressed)) if task == decompress => None,
                Some(Ok(JobFigures::Indexed { .. })) if task == index => None,
                Some(Ok(_)) => Some((lost, worker(task, "it reports the result of another job"))),
                Some(Err(WorkerEnd::Budget(error))) => Some((Cause::Budget, error.into())),
                Some(Err(WorkerEnd::Lost(error))) => Some((lost, error.into())),
                Some(Err(WorkerEnd::Failed(JobError::Layer(error)))) => {
                    let cause = match error {
                        LayerError::Decompress(_) => Cause::Compression,
                        LayerError::Write(_) if task == decompress => Cause::Output,
                        _ => Cause::Indexer,
                    };
                    Some((cause, error.into()))
                }
                Some(Err(WorkerEnd::Failed(_))) => Some((lost, worker(task, "it reports the error of another job"))),
            });
        }
        let first = errors.into_iter().min_by_key(|(cause, _)| *cause);
        Err(first.map_or(BudgetError::Cancelled.into(), |(_, error)| error))
    }
}

/// Compares what the worker reports with the files that it has written. Returns the number of entries.
fn check_figures(
    figures: &JobFigures,
    target: UnpackTarget<'_>,
    limits: LayerLimits,
    memory: u64,
) -> Result<u64, UnpackError> {
    let task = Job::Index { bytes: 0, entries: 0 }.task();
    let wrong = |why| Err(UnpackError::Worker(WorkerError::Protocol { task, why }));
    let measure = |file: &File| file.metadata().map_err(LayerError::Write);
    let (blob, index) = (measure(target.blob)?, measure(target.index)?);
    match *figures {
        JobFigures::Indexed { blob_length, index_length, entries } => {
            if blob_length != blob.len() || blob_length % BLOCK != 0 {
                return wrong("the length of the blob is not what it reports");
            }
            // It had the index in its memory.
            if index_length != index.len() || !(MIN_INDEX_BYTES..=memory).contains(&index_length) {
                return wrong("the length of the index is not what it reports");
            }
            if entries > limits.entries {
                return wrong("it reports too many entries");
            }
            // Twice, because a file system may reserve as much again.
            let most = limits.bytes.saturating_mul(2).saturating_add(limits.entries.saturating_mul(BLOCK));
            if blob_length > limits.max_blob_length() || blob.blocks().saturating_mul(512) > most {
                return Err(LayerError::too_many_bytes(limits.bytes).into());
            }
            Ok(entries)
        }
        _ => wrong("it reports the result of another job"),
    }
}
