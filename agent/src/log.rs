//! Writes the agent's log, warnings and errors with one line each, to the kernel's log, which the console shows.
//!
//! It is a few lines of our own instead of a subscriber library, because each page of code costs boot time.

use nacelle_base::retry::retry_interrupted;
use std::fmt::Write as _;
use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::OnceLock;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

/// The longest line, in bytes. /dev/kmsg rejects lines of more than about 1,000.
const MAX_LINE: usize = 900;

/// A pipe to which errors of libcontainer are copied.
static ERROR_COPY: OnceLock<OwnedFd> = OnceLock::new();

struct Log(File);

struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        // Writing to a string does not fail.
        let _ = match field.name() {
            "message" => write!(self.0, " {value:?}"),
            name => write!(self.0, " {name}={value:?}"),
        };
    }
}

impl Subscriber for Log {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::WARN && metadata.is_event()
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let level = if *event.metadata().level() == Level::ERROR { 3 } else { 4 };
        let mut line = Line(String::new());
        event.record(&mut line);
        let line = line.0.replace('\n', " ");
        if let Some(copy) =
            ERROR_COPY.get().filter(|_| level == 3 && event.metadata().target().starts_with("libcontainer"))
        {
            // If the copy fails, the reader still has the outermost error.
            let cause = format!("{}\n", line.trim_start());
            let _ = retry_interrupted(|| nix::unistd::write(copy, cause.as_bytes()));
        }
        let mut text = format!("<{level}>nacelle-agent:{line}");
        while text.len() > MAX_LINE {
            text.pop();
        }
        text.push('\n');
        // There is no other place for the error of a log that cannot be written.
        let _ = (&self.0).write_all(text.as_bytes());
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// Copies the errors that libcontainer logs in this process and its forks to a pipe, one line each: the errors that it returns from
/// another process have lost their causes. Only the first call in a process has an effect.
pub fn copy_errors_of_libcontainer(pipe: OwnedFd) {
    let _ = ERROR_COPY.set(pipe);
}

/// Sends this process's warnings and errors to the kernel's log.
pub fn log_to_kernel() {
    if let Ok(file) = OpenOptions::new().write(true).open("/dev/kmsg") {
        // This fails only if there is a subscriber already.
        let _ = tracing::subscriber::set_global_default(Log(file));
    }
}

/// Sends this process's warnings and errors to stdout, which the pod process keeps as the console: the kernel's log is the node's.
pub fn log_to_stdout() {
    if let Ok(stdout) = std::io::stdout().as_fd().try_clone_to_owned() {
        // As above.
        let _ = tracing::subscriber::set_global_default(Log(File::from(stdout)));
    }
}
