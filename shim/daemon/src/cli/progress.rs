//! Shows people how far a long operation has come: a line on standard error, if that is a terminal, with rate and remaining time.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::time::Duration;

/// The interval at which the progress of another process is asked for.
const INTERVAL: Duration = Duration::from_millis(250);
/// The line of an operation whose size is known.
const WITH_SIZE: &str =
    "{msg}: {binary_bytes} of {binary_total_bytes} {wide_bar} {percent}% {binary_bytes_per_sec}, {eta} left";
/// The line of an operation whose size is not known.
const WITHOUT_SIZE: &str = "{msg} {spinner} {elapsed}";

/// How far an operation has come.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct OperationProgress {
    /// What it does at the moment, in a few words.
    pub step: String,
    /// The bytes that are done.
    pub bytes: u64,
    /// The bytes of the whole step; 0 if they are not known.
    pub total_bytes: u64,
}

/// The line on the terminal. It is removed when this is dropped.
pub(super) struct ProgressLine {
    bar: ProgressBar,
    /// The step and the size of the bar, which begins anew with each step that has a size.
    shown: Option<(String, u64)>,
}

impl ProgressLine {
    /// Returns a line on standard error, which is not shown unless that is a terminal.
    pub(super) fn new() -> ProgressLine {
        ProgressLine::on(ProgressDrawTarget::stderr())
    }

    fn on(target: ProgressDrawTarget) -> ProgressLine {
        ProgressLine { bar: ProgressBar::with_draw_target(None, target), shown: None }
    }

    fn is_hidden(&self) -> bool {
        self.bar.is_hidden()
    }

    /// Shows this progress.
    pub(super) fn show(&mut self, progress: &OperationProgress) {
        let size = progress.total_bytes;
        if self.shown.as_ref().is_none_or(|(_, shown)| *shown != size) {
            let template = if size == 0 { WITHOUT_SIZE } else { WITH_SIZE };
            // The templates are valid, which a test checks.
            self.bar.set_style(ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()));
            self.bar.set_length(size);
            self.bar.reset();
        }
        self.shown = Some((progress.step.clone(), size));
        self.bar.set_message(progress.step.clone());
        self.bar.set_position(progress.bytes);
        self.bar.tick();
    }
}

impl Drop for ProgressLine {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

/// Waits for an operation, and meanwhile shows how far it has come, which `look` returns if it is known.
pub(super) async fn with_progress<T>(
    operation: impl Future<Output = T>,
    look: impl AsyncFn() -> Option<OperationProgress>,
) -> T {
    let mut line = ProgressLine::new();
    if line.is_hidden() {
        return operation.await;
    }
    let show = async {
        loop {
            tokio::time::sleep(INTERVAL).await;
            if let Some(progress) = look().await {
                line.show(&progress);
            }
        }
    };
    tokio::select! {
        biased;
        result = operation => result,
        never = show => never,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use indicatif::InMemoryTerm;

    #[test]
    fn the_line_has_step_size_rate_and_remaining_time() {
        let terminal = InMemoryTerm::new(3, 100);
        let mut line = ProgressLine::on(ProgressDrawTarget::term_like_with_hz(Box::new(terminal.clone()), 255));
        let mut show = |step: &str, bytes, total_bytes| {
            std::thread::sleep(Duration::from_millis(20)); // The terminal is drawn at most 255 times a second.
            line.show(&OperationProgress { step: step.to_owned(), bytes, total_bytes });
            terminal.contents()
        };
        assert!(show("reading the manifest", 0, 0).starts_with("reading the manifest"));
        show("1 of 2 layers", 0, 8 << 20);
        let shown = show("1 of 2 layers", 2 << 20, 8 << 20);
        assert!(shown.starts_with("1 of 2 layers: 2.00 MiB of 8.00 MiB"), "{shown:?}");
        assert!(shown.contains(" 25% ") && shown.contains("MiB/s, ") && shown.ends_with("s left"), "{shown:?}");
        drop(line);
        assert_eq!(terminal.contents(), "");
    }
}
