//! Collects the actions that release resources. A caller registers, directly after each acquisition, how to release the
//! resource; `unwind` runs the actions in reverse order and continues after failures.

use std::error::Error;

type UndoAction = Box<dyn FnOnce() -> Result<(), Box<dyn Error + Send + Sync>> + Send>;

/// A resource that could not be released, with the error and its causes on one line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnreleasedResource {
    /// The name under which the resource was registered.
    pub what: &'static str,
    /// The error and its causes.
    pub reason: String,
}

/// The release actions, newest last. Dropping the stack without `unwind` or `keep` also unwinds it, and logs each action
/// that fails, so that a panic or an early return leaks nothing.
#[derive(Default)]
pub struct UndoStack(Vec<(&'static str, UndoAction)>);

impl UndoStack {
    /// Returns an empty stack.
    pub fn new() -> Self {
        Self::default()
    }

    /// Registers the action that releases `what`.
    pub fn push<E>(&mut self, what: &'static str, action: impl FnOnce() -> Result<(), E> + Send + 'static)
    where
        E: Into<Box<dyn Error + Send + Sync>>,
    {
        self.0.push((what, Box::new(move || action().map_err(Into::into))));
    }

    /// Keeps all resources: discards the actions.
    pub fn keep(mut self) {
        self.0.clear();
    }

    /// Releases all resources in reverse order; returns those that could not be released.
    #[must_use = "unreleased resources must be recorded"]
    pub fn unwind(mut self) -> Vec<UnreleasedResource> {
        self.run_actions()
    }

    fn run_actions(&mut self) -> Vec<UnreleasedResource> {
        let mut unreleased = Vec::new();
        while let Some((what, action)) = self.0.pop() {
            if let Err(error) = action() {
                unreleased.push(UnreleasedResource { what, reason: crate::Chain(error.as_ref()).to_string() });
            }
        }
        unreleased
    }
}

impl Drop for UndoStack {
    fn drop(&mut self) {
        for UnreleasedResource { what, reason } in self.run_actions() {
            tracing::error!(what, reason, "cannot release a resource");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};

    type Log = Arc<Mutex<Vec<&'static str>>>;

    fn record(log: &Log, what: &'static str) -> impl FnOnce() -> Result<(), std::io::Error> + use<> {
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
        undo.push("netns", record(&log, "netns"));
        undo.push("tap", || Err(std::io::Error::other("busy")));
        undo.push("disk", record(&log, "disk"));
        assert_eq!(undo.unwind(), [UnreleasedResource { what: "tap", reason: "busy".into() }]);
        assert_eq!(*log.lock().unwrap(), ["disk", "netns"]);
    }

    #[test]
    fn dropping_unwinds_and_keeping_does_not() {
        let log = Log::default();
        let mut undo = UndoStack::new();
        undo.push("a", record(&log, "a"));
        drop(undo);
        let mut undo = UndoStack::new();
        undo.push("b", record(&log, "b"));
        undo.keep();
        assert_eq!(*log.lock().unwrap(), ["a"]);
    }
}
