//! Counts the sessions of the streaming server by kind.

use std::sync::atomic::{AtomicU64, Ordering};

/// The kind of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SessionKind {
    /// A command in a container.
    Exec,
    /// The streams of a container.
    Attach,
    /// Ports of a pod, however many connections the session has.
    PortForward,
}

impl SessionKind {
    /// All kinds.
    pub const ALL: [SessionKind; 3] = [SessionKind::Exec, SessionKind::Attach, SessionKind::PortForward];

    /// Returns the name of the kind.
    pub fn as_str(self) -> &'static str {
        match self {
            SessionKind::Exec => "exec",
            SessionKind::Attach => "attach",
            SessionKind::PortForward => "port_forward",
        }
    }
}

/// The number of sessions of a kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SessionCount {
    /// Those that were accepted since the start of the server.
    pub total: u64,
    /// Those that are open.
    pub open: u64,
}

/// The counts of all kinds.
#[derive(Debug, Default)]
pub(crate) struct SessionCounters {
    exec: KindCounters,
    attach: KindCounters,
    port_forward: KindCounters,
}

#[derive(Debug, Default)]
struct KindCounters {
    total: AtomicU64,
    open: AtomicU64,
}

/// A session that is counted as open until it is dropped.
pub(crate) struct OpenSession<'c>(&'c KindCounters);

impl SessionCounters {
    fn of(&self, kind: SessionKind) -> &KindCounters {
        match kind {
            SessionKind::Exec => &self.exec,
            SessionKind::Attach => &self.attach,
            SessionKind::PortForward => &self.port_forward,
        }
    }

    /// Counts an accepted session.
    pub(crate) fn begin(&self, kind: SessionKind) -> OpenSession<'_> {
        let counters = self.of(kind);
        counters.total.fetch_add(1, Ordering::Relaxed);
        counters.open.fetch_add(1, Ordering::Relaxed);
        OpenSession(counters)
    }

    /// Returns the counts of a kind.
    pub(crate) fn count(&self, kind: SessionKind) -> SessionCount {
        let KindCounters { total, open } = self.of(kind);
        SessionCount { total: total.load(Ordering::Relaxed), open: open.load(Ordering::Relaxed) }
    }
}

impl Drop for OpenSession<'_> {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_is_open_until_it_is_dropped() {
        let counters = SessionCounters::default();
        let (first, second) = (counters.begin(SessionKind::Exec), counters.begin(SessionKind::Exec));
        drop(first);
        assert_eq!(counters.count(SessionKind::Exec), SessionCount { total: 2, open: 1 });
        drop(second);
        assert_eq!(counters.count(SessionKind::Exec), SessionCount { total: 2, open: 0 });
        assert_eq!(counters.count(SessionKind::Attach), SessionCount::default());
    }
}
