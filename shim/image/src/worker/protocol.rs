//! Defines the messages between the daemon and a worker. Each is one JSON document in one message of a socket.
//!
//! ```text
//! worker -> Ready               it is in its jail
//! daemon -> Job
//! worker -> Reserve, daemon -> Granted     any number of times
//! worker -> Done or Failed      its last message
//! ```
//!
//! The daemon refuses memory by ending the worker.

use crate::erofs::ErofsError;
use crate::layer::index::{FileData, IndexError};
use crate::layer::ingest::LayerError;
use crate::tree::TreeError;
use crate::wire;
use nacelle_model::digest::Digest;
use serde::{Deserialize, Serialize};

/// The version of the messages and of the streams. It changes with any of them.
pub const PROTOCOL_VERSION: u32 = 1;

/// A message of the daemon.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub enum WorkerRequest {
    /// The job, the first message. A job of kind `Index` comes with the descriptor of the blob.
    Job(Job),
    /// The memory is reserved.
    Granted,
}

/// The work of one worker.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Job {
    /// Decompresses the input to the output.
    Decompress {
        /// The maximum number of bytes of the output. The daemon enforces it, by reading no more.
        bytes: u64,
    },
    /// Reads a tar, and writes its files' data to the blob and its index to the output.
    Index {
        /// The maximum number of bytes of the tar.
        bytes: u64,
        /// The maximum number of entries.
        entries: u64,
    },
    /// Reads the indexes of layers, each behind its [`LayerHeader`], lowest first, and writes the metadata EROFS to the output.
    Merge {
        /// The number of layers.
        layers: u64,
        /// The maximum number of steps.
        steps: u64,
    },
    /// Reads the indexes of layers as `Merge` does, and writes the regular files of a directory to the output, one [`FoundFile`] a line.
    Find {
        /// The number of layers.
        layers: u64,
        /// The maximum number of steps.
        steps: u64,
        /// The directory.
        directory: String,
        /// The only name that is wanted.
        name: Option<String>,
    },
}

impl Job {
    /// Returns what a worker with this job does, for errors.
    pub fn task(&self) -> &'static str {
        match self {
            Job::Decompress { .. } => "decompressed a layer",
            Job::Index { .. } => "read the tar of a layer",
            Job::Merge { .. } => "merged the layers of an image",
            Job::Find { .. } => "looked for files of an image",
        }
    }
}

/// What precedes an index in the input of `Merge` and `Find`, in little-endian order: the digest, and both lengths as 64 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerHeader {
    /// The diff id of the layer.
    pub diff_id: Digest,
    /// The length of the index in bytes.
    pub index_length: u64,
    /// The length of the blob in bytes.
    pub blob_length: u64,
}

/// The length in bytes of a [`LayerHeader`].
pub const LAYER_HEADER_BYTES: usize = 48;

impl LayerHeader {
    /// Returns the bytes of the header.
    pub fn encode(&self) -> [u8; LAYER_HEADER_BYTES] {
        let mut bytes = [0; LAYER_HEADER_BYTES];
        let parts = [self.diff_id.0.as_slice(), &self.index_length.to_le_bytes(), &self.blob_length.to_le_bytes()];
        bytes.iter_mut().zip(parts.concat()).for_each(|(to, from)| *to = from);
        bytes
    }
}

/// A regular file that `Find` has found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FoundFile {
    /// The name in its directory.
    pub name: String,
    /// The layer, counted from the lowest, which is 0.
    pub layer: usize,
    /// The position of the data in the layer's blob.
    pub data: FileData,
}

/// A message of a worker.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub enum WorkerReport {
    /// The worker is in its jail.
    Ready {
        /// The worker's [`PROTOCOL_VERSION`].
        version: u32,
    },
    /// The worker needs more memory.
    Reserve {
        /// A multiple of [`RESERVATION_STEP`](crate::budget::RESERVATION_STEP).
        bytes: u64,
    },
    /// The job is done. All output has been written.
    Done(JobFigures),
    /// The job has failed.
    Failed(JobError),
}

/// The figures of a job, which the daemon compares with the files.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum JobFigures {
    /// Of `Decompress`.
    Decompressed,
    /// Of `Index`.
    Indexed {
        /// The length of the blob in bytes.
        blob_length: u64,
        /// The length of the index in bytes.
        index_length: u64,
        /// The number of entries.
        entries: u64,
    },
    /// Of `Merge`.
    Merged {
        /// The length of the metadata in bytes.
        length: u64,
        /// The layers whose blobs follow the metadata, by number, lowest first.
        used: Vec<usize>,
        /// The number of steps.
        steps: u64,
    },
    /// Of `Find`: whether the directory exists.
    Found(bool),
}

/// Reasons that a job fails.
#[derive(Debug, Serialize, Deserialize)]
pub enum JobError {
    /// Of `Decompress` and `Index`.
    Layer(LayerError),
    /// Of `Merge` and `Find`: an index is damaged.
    Index {
        /// The layer, counted from the lowest, which is 0.
        layer: usize,
        /// The reason.
        source: IndexError,
    },
    /// Of `Merge` and `Find`.
    Tree(TreeError),
    /// Of `Merge`.
    Erofs(ErofsError),
    /// The output cannot be written, or the input ends early.
    Stream(#[serde(with = "wire::io_error")] std::io::Error),
    /// The worker could not enter its jail, or it panicked.
    Worker(#[serde(deserialize_with = "wire::string")] String),
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::budget::BudgetError;
    use crate::layer::tar::TarError;
    use nacelle_base::Chain;
    use std::io;

    fn reported(error: &JobError) -> JobError {
        serde_json::from_slice(&serde_json::to_vec(error).unwrap()).unwrap()
    }

    #[test]
    fn errors_keep_their_texts_and_kinds() {
        let no_space = || io::Error::from_raw_os_error(libc::ENOSPC);
        let layer = |error: LayerError| match reported(&JobError::Layer(error)) {
            JobError::Layer(error) => error,
            other => panic!("{other:?}"),
        };
        for (error, text) in [
            (LayerError::Write(no_space()), "cannot write the layer's data: No space left on device (os error 28)"),
            (
                LayerError::Tar(TarError::Read { at: 7, source: io::ErrorKind::UnexpectedEof.into() }),
                "the layer is not a supported tar archive: cannot read the archive at byte 7: unexpected end of file",
            ),
            (
                LayerError::Entry { path: "a\n".into(), why: "the root is not a directory".into() },
                "cannot unpack the layer's entry \"a\": the root is not a directory",
            ),
            (LayerError::too_many_bytes(9), "the layer has more than 9 bytes"),
            (
                LayerError::Decompress(io::Error::new(io::ErrorKind::InvalidInput, "corrupt")),
                "cannot decompress the layer: corrupt",
            ),
        ] {
            let (kind, error) = (kind_of(&error), layer(error));
            assert_eq!((Chain(&error).to_string().as_str(), kind_of(&error)), (text, kind));
        }
        let steps = JobError::Tree(BudgetError::Steps { limit: 3 }.into());
        assert!(matches!(reported(&steps), JobError::Tree(TreeError::Budget(BudgetError::Steps { limit: 3 }))));
        let oversize = JobError::Erofs(ErofsError::Oversize);
        assert!(matches!(reported(&oversize), JobError::Erofs(ErofsError::Oversize)));
    }

    /// Returns the kind of the I/O error in an error.
    fn kind_of(error: &LayerError) -> Option<io::ErrorKind> {
        match error {
            LayerError::Write(error) | LayerError::Decompress(error) => Some(error.kind()),
            LayerError::Tar(TarError::Read { source, .. }) => Some(source.kind()),
            _ => None,
        }
    }

    #[test]
    fn texts_of_a_worker_become_short_and_printable() {
        let hostile = JobError::Worker(format!("\u{1b}[2J\r\n{}", "x".repeat(100_000)));
        let JobError::Worker(text) = reported(&hostile) else { panic!("it is another error") };
        assert!(text.len() == 300 && text.starts_with("[2Jx") && !text.contains(char::is_control));
    }

    #[test]
    fn layers_in_a_report_are_numbers() {
        for text in
            [r#"{"Done":{"Merged":{"length":-1,"used":[],"steps":0}}}"#, r#"{"Done":{"Merged":{}}}"#, "{}", "[]"]
        {
            assert!(serde_json::from_str::<WorkerReport>(text).is_err(), "{text}");
        }
    }
}
