//! Owns: the list of what must be given back. Whoever takes something registers how to give it back
//! before the next step; `unwind` runs the list newest first and never stops at a failure.

use std::error::Error;

type Step = Box<dyn FnOnce() -> Result<(), Box<dyn Error + Send + Sync>> + Send>;

/// What could not be given back: its name and the error with its causes on one line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Left {
    /// The name under which it was registered.
    pub what: &'static str,
    /// Why it is still there.
    pub why: String,
}

/// Steps to undo, newest last. Dropping it without `unwind` or `keep` unwinds it too, with a line in the
/// log for each step that fails: a panic or an early return leaks nothing.
#[derive(Default)]
pub struct UndoStack(Vec<(&'static str, Step)>);

impl UndoStack {
    /// An empty list.
    pub fn new() -> Self {
        Self::default()
    }

    /// Registers how to give `what` back.
    pub fn push<E>(&mut self, what: &'static str, step: impl FnOnce() -> Result<(), E> + Send + 'static)
    where
        E: Into<Box<dyn Error + Send + Sync>>,
    {
        self.0.push((what, Box::new(move || step().map_err(Into::into))));
    }

    /// Success: everything taken is kept.
    pub fn keep(mut self) {
        self.0.clear();
    }

    /// Gives everything back, newest first; returns what could not be.
    #[must_use = "what could not be undone must be recorded"]
    pub fn unwind(mut self) -> Vec<Left> {
        self.run()
    }

    fn run(&mut self) -> Vec<Left> {
        let mut left = Vec::new();
        while let Some((what, step)) = self.0.pop() {
            if let Err(error) = step() {
                left.push(Left { what, why: crate::Chain(error.as_ref()).to_string() });
            }
        }
        left
    }
}

impl Drop for UndoStack {
    fn drop(&mut self) {
        for Left { what, why } in self.run() {
            tracing::error!(what, why, "could not be undone");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};

    type Log = Arc<Mutex<Vec<&'static str>>>;

    fn noting(log: &Log, what: &'static str) -> impl FnOnce() -> Result<(), std::io::Error> + use<> {
        let log = Arc::clone(log);
        move || {
            log.lock().unwrap().push(what);
            Ok(())
        }
    }

    #[test]
    fn unwinds_newest_first_and_past_failures() {
        let log = Log::default();
        let mut undo = UndoStack::new();
        undo.push("netns", noting(&log, "netns"));
        undo.push("tap", || Err(std::io::Error::other("busy")));
        undo.push("disk", noting(&log, "disk"));
        assert_eq!(undo.unwind(), [Left { what: "tap", why: "busy".into() }]);
        assert_eq!(*log.lock().unwrap(), ["disk", "netns"]);
    }

    #[test]
    fn dropping_unwinds_and_keeping_does_not() {
        let log = Log::default();
        let mut undo = UndoStack::new();
        undo.push("a", noting(&log, "a"));
        drop(undo);
        let mut undo = UndoStack::new();
        undo.push("b", noting(&log, "b"));
        undo.keep();
        assert_eq!(*log.lock().unwrap(), ["a"]);
    }
}
