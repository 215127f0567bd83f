//! Distributes the events of the node: stamps them, keeps their order and passes them to the subscribers. One ring buffer serves
//! all subscribers, so the queued events are bounded whatever the number and speed of the subscribers. A subscriber that falls
//! behind by more than the ring holds gets an error and is ended, so that no subscriber misses an event silently. The lock is
//! held to stamp an event and to put it into the ring, never while waiting.

use super::unix_nanos;
use super::view::View;
use nacelle_base::files::{FileError, at};
use nacelle_base::{Classify, FailureKind};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};
use tokio::sync::{broadcast, watch};
use tokio_stream::Stream;
use tokio_stream::wrappers::BroadcastStream;
use tokio_stream::wrappers::errors::BroadcastStreamRecvError;

/// Capacity of the ring in events, a power of two: the largest backlog of a subscriber.
const RING: usize = 1024;
/// Time for which the events since the daemon's start are kept for its first subscriber.
const FIRST: Duration = Duration::from_secs(300);

/// The kind of an event, in the order of a life cycle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum EventKind {
    /// The object was created.
    Created,
    /// The container runs, or the pod is ready.
    Started,
    /// The container ended, or the pod is no longer ready.
    Stopped,
    /// The object was removed.
    Deleted,
}

/// An event of a pod or of a container.
#[derive(Clone, Debug)]
pub struct Event {
    /// The kind of the event.
    pub kind: EventKind,
    /// The id of the container or of the pod.
    pub id: String,
    /// The time in nanoseconds since 1970, later than that of every earlier event.
    pub at: i64,
    /// The pod and its containers at that time.
    pub view: Arc<View>,
}

/// The reason a subscription ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Ended {
    /// The subscriber was too slow.
    #[error("the subscriber was too slow and has missed {missed} events: list what is there, then subscribe again")]
    Behind {
        /// The number of missed events.
        missed: u64,
    },
    /// The daemon is shutting down.
    #[error("the daemon ends: subscribe again when it is back")]
    Closing,
}

impl Classify for Ended {
    fn kind(&self) -> FailureKind {
        match self {
            Ended::Behind { .. } => FailureKind::Exhausted,
            Ended::Closing => FailureKind::Unavailable,
        }
    }
}

type Receiver = broadcast::Receiver<Arc<Event>>;

struct Inner {
    /// `None` once the events are closed.
    ring: Option<broadcast::Sender<Arc<Event>>>,
    /// The receiver for the first subscriber, and the time until which it is kept.
    first: Option<(Receiver, Instant)>,
    /// The time of the last event.
    last: i64,
    /// The file that has this time, for the next daemon.
    file: Option<File>,
    /// Notified after each published change; `None` once the events are closed.
    changes: Option<watch::Sender<()>>,
}

impl Inner {
    /// Sets the time of the last event, unless it is later already.
    fn advance(&mut self, time: i64) {
        if time <= self.last {
            return;
        }
        self.last = time;
        // Eight bytes in the page cache: the next daemon reads them also if this one is killed. A node that loses its power forgets them.
        let written = self.file.as_ref().map(|file| file.write_all_at(&time.to_le_bytes(), 0));
        if let Some(Err(error)) = written {
            tracing::warn!("cannot keep the time of the last event for the next daemon: {error}");
            self.file = None;
        }
    }
}

/// The event source of a node.
pub struct Events(Mutex<Inner>);

impl Default for Events {
    fn default() -> Events {
        Events::new(RING, FIRST)
    }
}

impl Events {
    /// Creates a ring of this many events (a power of two), which are kept for the first subscriber for this long.
    pub fn new(ring: usize, first: Duration) -> Events {
        let (ring, receiver) = broadcast::channel(ring);
        Events(Mutex::new(Inner {
            ring: Some(ring),
            first: Some((receiver, Instant::now() + first)),
            last: 0,
            file: None,
            changes: Some(watch::Sender::new(())),
        }))
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        // Each change is a single assignment, so a panic in between leaves the state consistent.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends an event to all subscribers.
    pub(crate) fn publish(&self, kind: EventKind, id: &str, view: &Arc<View>) {
        let mut inner = self.inner();
        let next = inner.last.saturating_add(1);
        inner.advance(unix_nanos().max(next));
        if inner.first.as_ref().is_some_and(|(_, until)| *until <= Instant::now()) {
            inner.first = None;
        }
        if let Some(ring) = &inner.ring {
            // `send` fails if there is no subscriber.
            let _ = ring.send(Arc::new(Event { kind, id: id.to_owned(), at: inner.last, view: Arc::clone(view) }));
        }
    }

    /// Notifies the receivers of [`Events::changes`].
    pub(in crate::lifecycle) fn notify_change(&self) {
        if let Some(changes) = &self.inner().changes {
            changes.send_replace(());
        }
    }

    /// Returns a receiver that is notified after each change of a pod or a container, also after those without an event. It is
    /// closed when the daemon shuts down.
    pub fn changes(&self) -> watch::Receiver<()> {
        match &self.inner().changes {
            Some(changes) => changes.subscribe(),
            None => watch::channel(()).1,
        }
    }

    /// Returns a future that ends when the events are closed, because the daemon shuts down.
    pub fn closed(&self) -> impl Future<Output = ()> + Send + 'static {
        let mut changes = self.changes();
        async move { while changes.changed().await.is_ok() {} }
    }

    /// Returns the current time on the clock of events: data read afterwards is at least as new as every earlier event.
    pub fn moment(&self) -> i64 {
        let mut inner = self.inner();
        inner.advance(unix_nanos());
        inner.last
    }

    /// Makes all further events later than `time`.
    pub(crate) fn go_on_after(&self, time: i64) {
        self.inner().advance(time);
    }

    /// Makes all further events later than those of the daemons that have used this file, and keeps the time of the last event in
    /// it: the node's clock may be set back while no daemon runs. The file belongs in a directory that is empty after a boot. Blocks.
    pub fn keep_last_time(&self, path: &Path) -> Result<(), FileError> {
        let opened = OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path);
        let file = opened.map_err(at("open", path))?;
        let mut bytes = [0; 8];
        let last = match file.read_exact_at(&mut bytes, 0) {
            Ok(()) => i64::from_le_bytes(bytes),
            // A new file.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => 0,
            Err(error) => return Err(at("read", path)(error)),
        };
        let mut inner = self.inner();
        inner.file = Some(file);
        inner.advance(last);
        Ok(())
    }

    /// Subscribes to all further events. The first subscriber also gets those since the daemon's start, if it subscribes in time:
    /// recovery finds events of the time without a daemon before any client can subscribe.
    pub fn subscribe(&self) -> Subscription {
        let mut inner = self.inner();
        let first = inner.first.take().filter(|(_, until)| Instant::now() < *until).map(|(receiver, _)| receiver);
        let receiver = first.or_else(|| inner.ring.as_ref().map(broadcast::Sender::subscribe));
        match receiver {
            Some(receiver) => Subscription::Open(BroadcastStream::new(receiver)),
            None => Subscription::Closed,
        }
    }

    /// Ends all subscriptions after they have delivered the events until now.
    pub fn close(&self) {
        let mut inner = self.inner();
        (inner.ring, inner.first, inner.changes) = (None, None, None);
    }
}

/// A stream of events; an error is its last item.
pub enum Subscription {
    /// More events may follow.
    Open(BroadcastStream<Arc<Event>>),
    /// The daemon is shutting down.
    Closed,
    /// The error was returned, and no more items follow.
    Over,
}

impl Stream for Subscription {
    type Item = Result<Arc<Event>, Ended>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let ended = match &mut *self {
            Subscription::Open(events) => match ready!(Pin::new(events).poll_next(context)) {
                Some(Ok(event)) => return Poll::Ready(Some(Ok(event))),
                Some(Err(BroadcastStreamRecvError::Lagged(missed))) => Ended::Behind { missed },
                None => Ended::Closing,
            },
            Subscription::Closed => Ended::Closing,
            Subscription::Over => return Poll::Ready(None),
        };
        // Keep no events for a subscriber that gets no more.
        *self = Subscription::Over;
        Poll::Ready(Some(Err(ended)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacelle_model::testing::pod;
    use tokio_stream::StreamExt;

    fn view() -> Arc<View> {
        Arc::new(View::new(&pod(1), std::iter::empty(), None))
    }

    async fn ids(subscription: &mut Subscription, count: usize) -> Vec<String> {
        let mut ids = Vec::new();
        for _ in 0..count {
            ids.push(subscription.next().await.unwrap().unwrap().id.clone());
        }
        ids
    }

    #[tokio::test]
    async fn all_subscribers_are_told_all_in_one_order_and_times_only_grow() {
        let events = Events::default();
        // The clock is far behind; the times increase all the same.
        let future = i64::MAX / 2;
        events.go_on_after(future);
        let mut subscribers: Vec<_> = (0..3).map(|_| events.subscribe()).collect();
        let ids: Vec<String> = (0..100).map(|n| n.to_string()).collect();
        ids.iter().for_each(|id| events.publish(EventKind::Started, id, &view()));
        assert!(events.moment() >= future + 100);
        for subscriber in &mut subscribers {
            let mut last = future;
            for id in &ids {
                let event = subscriber.next().await.unwrap().unwrap();
                assert_eq!(event.id, *id);
                assert!(event.at > last);
                last = event.at;
            }
        }
    }

    #[tokio::test]
    async fn the_events_of_the_next_daemon_are_later_although_the_clock_was_set_back() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("last-event");
        let events = Events::default();
        events.keep_last_time(&path).unwrap();
        // The clock was an hour ahead while this daemon ran.
        events.go_on_after(unix_nanos() + 3_600_000_000_000);
        let mut subscriber = events.subscribe();
        events.publish(EventKind::Deleted, "last", &view());
        let last = subscriber.next().await.unwrap().unwrap().at;
        let moment = events.moment();
        assert_eq!(moment, last);
        // It is killed.
        drop((subscriber, events));
        let events = Events::default();
        events.keep_last_time(&path).unwrap();
        let mut subscriber = events.subscribe();
        events.publish(EventKind::Created, "next", &view());
        assert!(subscriber.next().await.unwrap().unwrap().at > moment);

        std::fs::write(&path, "short").unwrap();
        Events::default().keep_last_time(&path).unwrap();
        assert!(Events::default().keep_last_time(directory.path()).is_err());
    }

    #[tokio::test]
    async fn one_that_falls_behind_is_told_so_and_keeps_nothing_and_nobody_back() {
        let events = Events::new(4, FIRST);
        let mut slow = events.subscribe();
        let mut good = events.subscribe();
        let view = view();
        for n in 0..6 {
            events.publish(EventKind::Created, &n.to_string(), &view);
            assert_eq!(ids(&mut good, 1).await, [n.to_string()]);
        }
        // One reference of this test and four of the ring.
        assert_eq!(Arc::strong_count(&view), 5);
        let error = slow.next().await.unwrap().unwrap_err();
        assert_eq!((error, error.kind()), (Ended::Behind { missed: 2 }, FailureKind::Exhausted));
        assert!(slow.next().await.is_none());
        assert_eq!(Arc::strong_count(&view), 1);
        events.publish(EventKind::Stopped, "on", &view);
        assert_eq!(ids(&mut good, 1).await, ["on"]);
        drop(good);
        events.publish(EventKind::Stopped, "nobody", &view);
        assert_eq!(Arc::strong_count(&view), 1);
    }

    #[tokio::test]
    async fn the_first_is_told_what_was_before_it_unless_it_comes_late() {
        let view = view();
        let events = Events::default();
        events.publish(EventKind::Stopped, "before", &view);
        let (mut first, mut second) = (events.subscribe(), events.subscribe());
        events.publish(EventKind::Stopped, "after", &view);
        assert_eq!(ids(&mut first, 2).await, ["before", "after"]);
        assert_eq!(ids(&mut second, 1).await, ["after"]);

        let events = Events::new(4, Duration::ZERO);
        events.publish(EventKind::Stopped, "before", &view);
        assert_eq!(Arc::strong_count(&view), 1);
        let mut late = events.subscribe();
        events.publish(EventKind::Stopped, "after", &view);
        assert_eq!(ids(&mut late, 1).await, ["after"]);
    }

    #[tokio::test]
    async fn at_the_end_all_is_told_and_then_why_it_ends() {
        let events = Events::default();
        let mut subscriber = events.subscribe();
        events.publish(EventKind::Stopped, "last", &view());
        events.close();
        events.publish(EventKind::Stopped, "too late", &view());
        assert_eq!(ids(&mut subscriber, 1).await, ["last"]);
        for mut subscriber in [subscriber, events.subscribe()] {
            assert_eq!(subscriber.next().await.unwrap().unwrap_err(), Ended::Closing);
            assert!(subscriber.next().await.is_none());
        }
    }

    #[tokio::test]
    async fn receivers_of_changes_are_notified_of_each_change_and_closed_at_the_end() {
        let events = Events::default();
        let mut changes = events.changes();
        assert!(!changes.has_changed().unwrap());
        events.notify_change();
        changes.changed().await.unwrap();
        assert!(!changes.has_changed().unwrap());
        events.close();
        events.notify_change();
        assert!(changes.changed().await.is_err());
        assert!(events.changes().changed().await.is_err());
    }
}
