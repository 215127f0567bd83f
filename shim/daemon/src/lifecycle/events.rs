//! Owns: the events of the node: their times, their order, and those who are told.
//! One ring of events serves all subscribers, so what waits is bounded however many there are and however slow: one
//! that has fallen behind by more than the ring holds is told so and ended, and nobody misses an event unknowingly.
//! Threads: the lock is held to stamp an event and put it into the ring, never while waiting.

use super::View;
use nacelle_base::{Classify, Kind};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};
use tokio::sync::broadcast;
use tokio_stream::Stream;
use tokio_stream::wrappers::BroadcastStream;
use tokio_stream::wrappers::errors::BroadcastStreamRecvError;

/// Events by which a subscriber may be behind: a power of two.
const RING: usize = 1024;
/// For the first subscriber of a daemon, to whom it also tells what happened since its start.
const FIRST: Duration = Duration::from_secs(300);

/// What happened, in the order of a life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum EventKind {
    /// It was made.
    Created,
    /// It runs; a pod: it is ready.
    Started,
    /// It ended; a pod: it is not ready any more.
    Stopped,
    /// It is forgotten.
    Deleted,
}

/// Something that happened to a pod or to a container.
#[derive(Clone, Debug)]
pub struct Event {
    /// What.
    pub kind: EventKind,
    /// Of the container, or of the pod.
    pub id: String,
    /// When, in nanoseconds since 1970: later than every earlier event.
    pub at: i64,
    /// The pod and its containers at that moment.
    pub view: Arc<View>,
}

/// Why a subscription ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Ended {
    /// The subscriber is too slow.
    #[error("the subscriber was too slow and has missed {missed} events: list what is there, then subscribe again")]
    Behind {
        /// How many.
        missed: u64,
    },
    /// The daemon ends.
    #[error("the daemon ends: subscribe again when it is back")]
    Closing,
}

impl Classify for Ended {
    fn kind(&self) -> Kind {
        match self {
            Ended::Behind { .. } => Kind::Exhausted,
            Ended::Closing => Kind::Unavailable,
        }
    }
}

type Receiver = broadcast::Receiver<Arc<Event>>;

struct Inner {
    /// None: closed.
    ring: Option<broadcast::Sender<Arc<Event>>>,
    /// What the first subscriber gets, until it is too late for that.
    first: Option<(Receiver, Instant)>,
    /// The time that was given last.
    last: i64,
}

/// The events of a node.
pub struct Events(Mutex<Inner>);

impl Default for Events {
    fn default() -> Events {
        Events::new(RING, FIRST)
    }
}

impl Events {
    /// With a ring of this many events (a power of two), which waits this long for the first subscriber.
    pub fn new(ring: usize, first: Duration) -> Events {
        let (ring, receiver) = broadcast::channel(ring);
        Events(Mutex::new(Inner { ring: Some(ring), first: Some((receiver, Instant::now() + first)), last: 0 }))
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        // Each change of it is a single assignment: a panic in between leaves it whole.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells all subscribers.
    pub(super) fn tell(&self, kind: EventKind, id: &str, view: &Arc<View>) {
        let mut inner = self.inner();
        inner.last = super::now().max(inner.last.saturating_add(1));
        if inner.first.as_ref().is_some_and(|(_, until)| *until <= Instant::now()) {
            inner.first = None;
        }
        if let Some(ring) = &inner.ring {
            // An error: nobody has subscribed.
            let _ = ring.send(Arc::new(Event { kind, id: id.to_owned(), at: inner.last, view: Arc::clone(view) }));
        }
    }

    /// Now, on the clock of events: what is looked at afterwards is at least as new as every event before.
    pub fn moment(&self) -> i64 {
        let mut inner = self.inner();
        inner.last = super::now().max(inner.last);
        inner.last
    }

    /// All events are later than this.
    pub(super) fn go_on_after(&self, time: i64) {
        let mut inner = self.inner();
        inner.last = inner.last.max(time);
    }

    /// All events from now on. The first subscriber also gets those since the daemon's start, if it comes soon: what
    /// happened while there was no daemon is found out before anybody can subscribe.
    pub fn subscribe(&self) -> Subscription {
        let mut inner = self.inner();
        let first = inner.first.take().filter(|(_, until)| Instant::now() < *until).map(|(receiver, _)| receiver);
        let receiver = first.or_else(|| inner.ring.as_ref().map(broadcast::Sender::subscribe));
        match receiver {
            Some(receiver) => Subscription::Open(BroadcastStream::new(receiver)),
            None => Subscription::Closed,
        }
    }

    /// Whether the daemon does not end yet.
    pub fn is_open(&self) -> bool {
        self.inner().ring.is_some()
    }

    /// Ends all subscriptions once they have told what happened until now.
    pub fn close(&self) {
        let mut inner = self.inner();
        (inner.ring, inner.first) = (None, None);
    }
}

/// Events one after the other; an error is the last item.
pub enum Subscription {
    /// There may be more.
    Open(BroadcastStream<Arc<Event>>),
    /// The daemon ends.
    Closed,
    /// It was said why there are no more.
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
        // Nothing is kept for a subscriber that gets no more.
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
        // The clock stands far behind: times grow all the same.
        let future = i64::MAX / 2;
        events.go_on_after(future);
        let mut subscribers: Vec<_> = (0..3).map(|_| events.subscribe()).collect();
        let told: Vec<String> = (0..100).map(|n| n.to_string()).collect();
        told.iter().for_each(|id| events.tell(EventKind::Started, id, &view()));
        assert!(events.moment() >= future + 100);
        for subscriber in &mut subscribers {
            let mut last = future;
            for id in &told {
                let event = subscriber.next().await.unwrap().unwrap();
                assert_eq!(event.id, *id);
                assert!(event.at > last);
                last = event.at;
            }
        }
    }

    #[tokio::test]
    async fn one_that_falls_behind_is_told_so_and_keeps_nothing_and_nobody_back() {
        let events = Events::new(4, FIRST);
        let mut slow = events.subscribe();
        let mut good = events.subscribe();
        let view = view();
        for n in 0..6 {
            events.tell(EventKind::Created, &n.to_string(), &view);
            assert_eq!(ids(&mut good, 1).await, [n.to_string()]);
        }
        // Ours and the four of the ring.
        assert_eq!(Arc::strong_count(&view), 5);
        let error = slow.next().await.unwrap().unwrap_err();
        assert_eq!((error, error.kind()), (Ended::Behind { missed: 2 }, Kind::Exhausted));
        assert!(slow.next().await.is_none());
        assert_eq!(Arc::strong_count(&view), 1);
        events.tell(EventKind::Stopped, "on", &view);
        assert_eq!(ids(&mut good, 1).await, ["on"]);
        drop(good);
        events.tell(EventKind::Stopped, "nobody", &view);
        assert_eq!(Arc::strong_count(&view), 1);
    }

    #[tokio::test]
    async fn the_first_is_told_what_was_before_it_unless_it_comes_late() {
        let view = view();
        let events = Events::default();
        events.tell(EventKind::Stopped, "before", &view);
        let (mut first, mut second) = (events.subscribe(), events.subscribe());
        events.tell(EventKind::Stopped, "after", &view);
        assert_eq!(ids(&mut first, 2).await, ["before", "after"]);
        assert_eq!(ids(&mut second, 1).await, ["after"]);

        let events = Events::new(4, Duration::ZERO);
        events.tell(EventKind::Stopped, "before", &view);
        assert_eq!(Arc::strong_count(&view), 1);
        let mut late = events.subscribe();
        events.tell(EventKind::Stopped, "after", &view);
        assert_eq!(ids(&mut late, 1).await, ["after"]);
    }

    #[tokio::test]
    async fn at_the_end_all_is_told_and_then_why_it_ends() {
        let events = Events::default();
        let mut subscriber = events.subscribe();
        events.tell(EventKind::Stopped, "last", &view());
        events.close();
        events.tell(EventKind::Stopped, "too late", &view());
        assert_eq!(ids(&mut subscriber, 1).await, ["last"]);
        for mut subscriber in [subscriber, events.subscribe()] {
            assert_eq!(subscriber.next().await.unwrap().unwrap_err(), Ended::Closing);
            assert!(subscriber.next().await.is_none());
        }
    }
}
