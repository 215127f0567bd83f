//! The process of a worker: enters its jail, receives its job, does it and reports. Standard error is the channel to the daemon, so
//! nothing may be logged.

use super::channel::{DaemonMemory, WorkerChannel};
use super::job::run_job;
use super::protocol::{Job, JobError, PROTOCOL_VERSION, WorkerReport, WorkerRequest};
use crate::budget::Budget;
use crate::wire::clean_text;
use nacelle_base::Chain;
use nacelle_base::retry::retry_interrupted;
use nacelle_jail::{Mode, WorkerJail};
use std::io::{self, Read, Write};
use std::process::ExitCode;
use std::sync::Arc;

/// The user in the arguments of a worker that keeps its own.
const SAME_USER: &str = "-";

fn mode_argument(mode: Mode) -> &'static str {
    match mode {
        Mode::Kill => "kill",
        Mode::Log => "log",
        Mode::Off => "off",
    }
}

/// Returns the arguments of a worker with this jail.
pub(super) fn encode_arguments(jail: &WorkerJail) -> [String; 5] {
    let user = jail.user.map_or_else(|| SAME_USER.to_owned(), |user| user.to_string());
    let [address_space, cpu, file] =
        [jail.address_space, jail.cpu_seconds, jail.file_size].map(|limit| limit.to_string());
    [mode_argument(jail.seccomp).to_owned(), user, address_space, cpu, file]
}

fn decode_arguments(arguments: &[String]) -> Option<WorkerJail> {
    let [seccomp, user, address_space, cpu, file] = arguments else { return None };
    Some(WorkerJail {
        seccomp: [Mode::Kill, Mode::Log, Mode::Off].into_iter().find(|mode| mode_argument(*mode) == seccomp)?,
        user: if user == SAME_USER { None } else { Some(user.parse().ok()?) },
        address_space: address_space.parse().ok()?,
        cpu_seconds: cpu.parse().ok()?,
        file_size: file.parse().ok()?,
    })
}

/// Runs a worker to its end. `arguments` are those of the program, which only the daemon starts.
pub fn run_worker_program(arguments: impl Iterator<Item = String>) -> ExitCode {
    let Some(jail) = decode_arguments(&arguments.collect::<Vec<_>>()) else {
        // Standard error is a terminal or a log, or the channel of a daemon of another version.
        eprintln!("only the daemon nacelle of the same version starts this program");
        return ExitCode::from(2);
    };
    let channel = Arc::new(WorkerChannel::StandardError);
    let reporter = Arc::clone(&channel);
    std::panic::set_hook(Box::new(move |panic| report_failure(&reporter, &format!("it panicked: {panic}"))));
    nacelle_jail::drop_oom_protection();
    if let Err(error) = nacelle_jail::confine_worker(jail) {
        report_failure(&channel, &Chain(&error).to_string());
        return ExitCode::FAILURE;
    }
    match serve(&channel, StandardInput, StandardOutput) {
        Ok(()) => ExitCode::SUCCESS,
        // The daemon is gone.
        Err(_) => ExitCode::FAILURE,
    }
}

fn report_failure(channel: &WorkerChannel, message: &str) {
    let failed = WorkerReport::Failed(JobError::Worker(clean_text(message)));
    // Without a daemon, no process waits for the message.
    let _ = channel.send(&failed);
}

/// Receives a job, does it and reports the result.
pub(super) fn serve(channel: &Arc<WorkerChannel>, input: impl Read, output: impl Write) -> io::Result<()> {
    channel.send(&WorkerReport::Ready { version: PROTOCOL_VERSION })?;
    let (request, blob) = channel.receive()?;
    let WorkerRequest::Job(job) = request else { return Err(io::ErrorKind::InvalidData.into()) };
    let steps = match job {
        Job::Merge { steps, .. } | Job::Find { steps, .. } => steps,
        Job::Decompress { .. } | Job::Index { .. } => u64::MAX,
    };
    let mut budget = Budget::worker(Arc::new(DaemonMemory(Arc::clone(channel))), steps);
    channel.send(&match run_job(job, input, output, blob, &mut budget) {
        Ok(figures) => WorkerReport::Done(figures),
        Err(error) => WorkerReport::Failed(error),
    })
}

/// The input, without the buffer of `std::io::stdin`.
struct StandardInput;

impl Read for StandardInput {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        Ok(retry_interrupted(|| rustix::io::read(rustix::stdio::stdin(), &mut *buffer))?)
    }
}

/// The output, without the buffer of `std::io::stdout`.
struct StandardOutput;

impl Write for StandardOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(retry_interrupted(|| rustix::io::write(rustix::stdio::stdout(), bytes))?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_decoded_as_they_were_encoded() {
        for (seccomp, user) in [(Mode::Kill, None), (Mode::Log, Some(7)), (Mode::Off, Some(u32::MAX - 1))] {
            let jail = WorkerJail { seccomp, user, address_space: 1 << 40, cpu_seconds: 2, file_size: u64::MAX };
            let arguments = encode_arguments(&jail);
            assert_eq!(decode_arguments(&arguments), Some(jail));
            assert_eq!(decode_arguments(&arguments[1..]), None);
        }
    }
}
