//! Runs everything that decodes the content of layers in jailed processes: decompressing, reading tars, merging indexes, writing EROFS.
//!
//! One process does one job and ends. It has three descriptors, which are its standard streams: the bytes that it reads, the file or pipe
//! that it writes, and the channel to the daemon ([`channel`]); a job of kind `Index` gets one more. [`program`] is the process,
//! [`job`] its work, [`process`] the daemon's side of a process, and [`unpack`] the processes of a layer with what the daemon copies
//! and hashes between them. docs/contributor/images.md draws how they are connected.

mod channel;
mod error;
#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;
mod job;
mod process;
mod program;
mod protocol;
mod unpack;

pub use error::{UnpackError, WorkerError};
pub use process::{Launch, Supervision, WorkerEnd, WorkerStreams};
pub use program::run_worker_program;
pub use protocol::{FoundFile, Job, JobError, JobFigures, LayerHeader};
pub use unpack::{UnpackTarget, unpack_file, unpack_layer};
