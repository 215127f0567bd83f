//! Owns: the agent's log: warnings and errors, a line each, to the kernel's log, which the console shows. A few lines
//! of our own instead of a subscriber library, for each page of code costs boot time.

use nacelle_base::retry::retry_interrupted;
use std::fmt::Write as _;
use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::OnceLock;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

/// The longest line, in bytes; /dev/kmsg refuses lines of more than about 1,000.
const MAX_LINE: usize = 900;

/// Where libcontainer's errors go besides.
static COPY: OnceLock<OwnedFd> = OnceLock::new();

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
        if let Some(copy) = COPY.get().filter(|_| level == 3 && event.metadata().target().starts_with("libcontainer")) {
            // The reader has the outermost error without it.
            let cause = format!("{}\n", line.trim_start());
            let _ = retry_interrupted(|| nix::unistd::write(copy, cause.as_bytes()));
        }
        let mut text = format!("<{level}>nacelle-agent:{line}");
        while text.len() > MAX_LINE {
            text.pop();
        }
        text.push('\n');
        // A log that cannot be written has nowhere to say so.
        let _ = (&self.0).write_all(text.as_bytes());
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// Copies the errors that libcontainer logs in this process, and in those that it forks, to a pipe, a line each: the errors
/// that it returns from another process have lost their causes. Once in a process.
pub fn copy_errors_of_libcontainer(pipe: OwnedFd) {
    // Set before, it stays.
    let _ = COPY.set(pipe);
}

/// Sends this process's warnings and errors to the kernel's log.
pub fn start() {
    if let Ok(file) = OpenOptions::new().write(true).open("/dev/kmsg") {
        // It fails only if a subscriber is there already.
        let _ = tracing::subscriber::set_global_default(Log(file));
    }
}

/// Sends them to standard output, which the pod process keeps as the console: the node's kernel log is not this pod's.
pub fn start_on_stdout() {
    if let Ok(stdout) = std::io::stdout().as_fd().try_clone_to_owned() {
        // See above.
        let _ = tracing::subscriber::set_global_default(Log(File::from(stdout)));
    }
}
