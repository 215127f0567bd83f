//! Runs commands to their end, and polls for conditions.

use std::ffi::OsStr;
use std::io::Write;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// The time limit of all waits of the tests: far more than needed, because emulated VMs on a busy node are slow.
pub const WAIT_LIMIT: Duration = Duration::from_secs(600);

/// The output and the exit code of a command.
#[derive(Debug, Clone)]
pub struct ProgramOutput {
    /// The exit code; -1 if a signal ended the command.
    pub code: i32,
    /// The standard output, lossy, without the last line end.
    pub stdout: String,
    /// The standard error, lossy, without the last line end.
    pub stderr: String,
}

impl ProgramOutput {
    /// Returns the standard output of a command that succeeded.
    ///
    /// # Panics
    /// If it failed, with all of its output.
    #[track_caller]
    pub fn ok(self) -> String {
        assert!(self.code == 0, "exit code {}: {}{}", self.code, self.stdout, self.stderr);
        self.stdout
    }

    /// Returns the error text of a command that failed.
    ///
    /// # Panics
    /// If it succeeded.
    #[track_caller]
    pub fn err(self) -> String {
        assert!(self.code != 0, "it should have failed and printed: {}", self.stdout);
        self.stderr
    }
}

/// Runs a command with empty standard input.
///
/// # Panics
/// If it cannot be started.
pub fn run(command: &mut Command) -> ProgramOutput {
    run_with_input(command, b"")
}

/// Runs a command with this standard input, which it need not read.
///
/// # Panics
/// If it cannot be started.
pub fn run_with_input(command: &mut Command, input: &[u8]) -> ProgramOutput {
    let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let mut child = child.unwrap_or_else(|error| panic!("cannot start {:?}: {error}", command.get_program()));
    let stdin = child.stdin.take();
    let output = std::thread::scope(|scope| {
        scope.spawn(move || {
            // The command may end before it has read all of its input.
            let _ = stdin.expect("the input is a pipe").write_all(input);
        });
        child.wait_with_output().expect("a child can be waited for")
    });
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim_end().to_owned();
    ProgramOutput {
        code: output.status.code().unwrap_or(-1),
        stdout: text(&output.stdout),
        stderr: text(&output.stderr),
    }
}

/// Runs a program with arguments; see [`run`].
pub fn run_program<S: AsRef<OsStr>>(
    program: impl AsRef<OsStr>,
    arguments: impl IntoIterator<Item = S>,
) -> ProgramOutput {
    run(Command::new(program).args(arguments))
}

/// Blocks on a request that crictl cannot make.
///
/// # Panics
/// If no runtime can be made.
pub fn block_on<T>(request: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    runtime.expect("threads can be started").block_on(request)
}

/// Returns the end of a wait that begins now: [`WAIT_LIMIT`] later, but before ci/run-tests ends the test program (at the Unix time
/// `NACELLE_TEST_END`, in seconds), so that a test that waits in vain says for what.
pub fn wait_end() -> Instant {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let end = std::env::var("NACELLE_TEST_END").ok().and_then(|end| end.parse().ok()).map(Duration::from_secs);
    Instant::now() + wait_limit(now, end)
}

/// Returns how long a wait may take that begins `now`, in a program that is ended at `end`, both since 1970.
fn wait_limit(now: Duration, end: Option<Duration>) -> Duration {
    const BEFORE_END: Duration = Duration::from_secs(20);
    end.map_or(WAIT_LIMIT, |end| end.saturating_sub(now + BEFORE_END).min(WAIT_LIMIT))
}

/// Polls `condition` until it returns a value.
///
/// # Panics
/// At [`wait_end`] without one, with `what`.
#[track_caller]
pub fn eventually<T>(what: &str, mut condition: impl FnMut() -> Option<T>) -> T {
    let (began, end) = (Instant::now(), wait_end());
    loop {
        if let Some(value) = condition() {
            return value;
        }
        assert!(Instant::now() < end, "waited {:?} in vain for: {what}", began.elapsed());
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_ends_before_its_program_is_ended() {
        let seconds = Duration::from_secs;
        assert_eq!(wait_limit(seconds(1000), None), WAIT_LIMIT);
        assert_eq!(wait_limit(seconds(1000), Some(seconds(9000))), WAIT_LIMIT);
        assert_eq!(wait_limit(seconds(1000), Some(seconds(1400))), seconds(380));
        assert_eq!(wait_limit(seconds(1000), Some(seconds(900))), Duration::ZERO);
    }
}
