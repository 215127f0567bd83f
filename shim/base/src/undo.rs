//! Collects the actions that release resources. A caller registers, directly after each acquisition, how to release the
//! resource; `unwind` runs the actions in reverse order and continues after failures.

use std::error::Error;

type Step = Box<dyn FnOnce() -> Result<(), Box<dyn Error + Send + Sync>> + Send>;

/// A resource that could not be released, with the error and its causes on one line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Left {
    /// The name under which the resource was registered.
    pub what: &'static str,
    /// The error and its causes.
    pub why: String,
}

/// The release actions, newest last. Dropping the stack without `unwind` or `keep` also unwinds it, and logs each action
/// that fails, so that a panic or an early return leaks nothing.
#[derive(Default)]
pub struct UndoStack(Vec<(&'static str, Step)>);

impl UndoStack {
    /// Returns an empty stack.
    pub fn new() -> Self {
        Self::default()
    }

    /// Registers the action that releases `what`.
    pub fn push<E>(&mut self, what: &'static str, step: impl FnOnce() -> Result<(), E> + Send + 'static)
    where
        E: Into<Box<dyn Error + Send + Sync>>,
    {
        self.0.push((what, Box::new(move || step().map_err(Into::into))));
    }

    /// Keeps all resources: discards the actions.
    pub fn keep(mut self) {
        self.0.clear();
    }

    /// Releases all resources in reverse order; returns those that could not be released.
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
