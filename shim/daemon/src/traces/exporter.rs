//! Sends spans to the collector in batches. The queue before it is bounded, and spans are dropped and counted rather than waited
//! for. A collector that does not respond is tried again for a while, and the log names it at most once a minute.

use super::endpoint::TraceEndpoint;
use super::request::TraceLayer;
use super::span::{MAX_MESSAGE, cut, text};
use crate::config::TracingSettings;
use crate::metrics::EventCounters;
use crate::program;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_client::TraceServiceClient;
use opentelemetry_proto::tonic::common::v1::InstrumentationScope;
use opentelemetry_proto::tonic::resource::v1::Resource;
use opentelemetry_proto::tonic::trace::v1::{ResourceSpans, ScopeSpans, Span};
use std::time::{Duration, Instant};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tonic::transport::{Channel, Endpoint, Error};
use tonic::{Code, Status};

/// The maximum number of spans that wait; each has at most about 4 KiB.
const QUEUE: usize = 2048;

/// The maximum number of spans in one request: far below the 4 MiB that collectors accept, in practice about 300 bytes for each.
const BATCH: usize = 512;

/// Time that the first span of a batch waits for others.
const BATCH_PAUSE: Duration = Duration::from_secs(1);

/// Time limit of one request.
const REQUEST_LIMIT: Duration = Duration::from_secs(10);

/// Pauses before a request is repeated. Then its spans are dropped.
const PAUSES: [Duration; 4] =
    [Duration::from_secs(1), Duration::from_secs(2), Duration::from_secs(4), Duration::from_secs(8)];

/// Time limit for sending what is left when the daemon stops.
const FLUSH_LIMIT: Duration = Duration::from_secs(2);

/// Time between two messages in the log.
const LOG_PAUSE: Duration = Duration::from_secs(60);

/// The sending end of the queue of ended spans.
#[derive(Clone)]
pub(super) struct SpanQueue {
    spans: mpsc::Sender<Span>,
    counters: EventCounters,
}

impl SpanQueue {
    /// Queues a span, or drops and counts it if the queue is full. Never waits.
    pub(super) fn push(&self, span: Span) {
        if self.spans.try_send(span).is_err() {
            self.counters.count_dropped_spans(1);
        }
    }
}

#[cfg(test)]
impl SpanQueue {
    /// Returns a queue that drops all spans.
    pub(super) fn unread() -> SpanQueue {
        SpanQueue { spans: mpsc::channel(1).0, counters: EventCounters::new([]) }
    }
}

/// The task that sends spans to the collector.
pub(crate) struct TraceExporter {
    end: CancellationToken,
    task: JoinHandle<()>,
}

impl TraceExporter {
    /// Starts the task and returns the layer whose spans it sends; `None` without an endpoint. The collector need not exist yet.
    pub(crate) fn start(settings: &TracingSettings, counters: &EventCounters) -> Option<(TraceLayer, TraceExporter)> {
        let endpoint = settings.endpoint.clone()?;
        let channel = match connect(&endpoint) {
            Ok(channel) => channel,
            Err(error) => {
                // The configuration was checked before.
                tracing::error!(%endpoint, %error, "traces are not sent");
                return None;
            }
        };
        let (spans, queue) = mpsc::channel(QUEUE);
        let end = CancellationToken::new();
        let client = TraceServiceClient::new(channel);
        let sender = BatchSender::new(client, endpoint, PAUSES, counters);
        let task = tokio::spawn(send_batches(queue, sender, end.clone()));
        let layer =
            TraceLayer::new(SpanQueue { spans, counters: counters.clone() }, settings.sampling_rate_per_million);
        Some((layer, TraceExporter { end, task }))
    }

    /// Sends what is queued, for at most `FLUSH_LIMIT`, and ends the task.
    pub(crate) async fn finish(self) {
        self.end.cancel();
        let _ = self.task.await;
    }
}

/// Returns a channel that connects with the first request, and again after a failure.
fn connect(endpoint: &TraceEndpoint) -> Result<Channel, Error> {
    let endpoint = Endpoint::from_shared(endpoint.as_str().to_owned())?;
    Ok(endpoint.connect_timeout(REQUEST_LIMIT).timeout(REQUEST_LIMIT).connect_lazy())
}

/// Returns the attributes of the daemon.
fn describe_daemon() -> Resource {
    let host = nix::unistd::gethostname().ok().and_then(|name| name.into_string().ok()).unwrap_or_default();
    let attributes = [("service.name", "nacelle"), ("service.version", program::RELEASE), ("host.name", host.as_str())];
    Resource { attributes: attributes.map(|(key, value)| text(key, value)).to_vec(), ..Resource::default() }
}

/// Sends spans until `end`, and then those that are left.
async fn send_batches(mut queue: mpsc::Receiver<Span>, mut sender: BatchSender, end: CancellationToken) {
    let mut batch = Vec::new();
    loop {
        tokio::select! {
            () = fill_batch(&mut queue, &mut batch) => {}
            () = end.cancelled() => break,
        }
        tokio::select! {
            () = sender.send(&batch) => batch.clear(),
            () = end.cancelled() => break,
        }
    }
    queue.close();
    while queue.recv_many(&mut batch, QUEUE).await > 0 {}
    let mut sent = 0;
    let _limit = timeout(FLUSH_LIMIT, async {
        for part in batch.chunks(BATCH) {
            if sender.try_send(part).await.is_err() {
                break;
            }
            sent += part.len();
        }
    })
    .await;
    if sent < batch.len() {
        sender.report_loss(batch.len() - sent, "the daemon stops");
    }
}

/// Waits for a span, and then for others until the batch is full or the pause has passed. A dropped call loses no span.
async fn fill_batch(queue: &mut mpsc::Receiver<Span>, batch: &mut Vec<Span>) {
    if queue.recv_many(batch, BATCH).await == 0 {
        // No request can be recorded any more.
        return std::future::pending().await;
    }
    let _limit = timeout(BATCH_PAUSE, async {
        while batch.len() < BATCH && queue.recv_many(batch, BATCH - batch.len()).await > 0 {}
    })
    .await;
}

struct BatchSender {
    client: TraceServiceClient<Channel>,
    endpoint: TraceEndpoint,
    resource: Resource,
    counters: EventCounters,
    /// The pauses before a request is repeated.
    pauses: [Duration; PAUSES.len()],
    /// When the log last named a loss.
    last_log: Option<Instant>,
}

impl BatchSender {
    fn new(
        client: TraceServiceClient<Channel>,
        endpoint: TraceEndpoint,
        pauses: [Duration; PAUSES.len()],
        counters: &EventCounters,
    ) -> BatchSender {
        let (resource, counters) = (describe_daemon(), counters.clone());
        BatchSender { client, endpoint, resource, counters, pauses, last_log: None }
    }

    /// Sends spans, repeatedly if the collector may accept them later. Those that it does not accept are dropped.
    async fn send(&mut self, spans: &[Span]) {
        let mut pauses = self.pauses.into_iter();
        loop {
            let Err(status) = self.try_send(spans).await else { return };
            match pauses.next().filter(|_| is_temporary(status.code())) {
                Some(pause) => tokio::time::sleep(pause).await,
                None => return self.report_loss(spans.len(), &format!("{:?}: {}", status.code(), status.message())),
            }
        }
    }

    /// Sends spans once.
    async fn try_send(&mut self, spans: &[Span]) -> Result<(), Status> {
        let scope = InstrumentationScope { name: "nacelle".to_owned(), ..InstrumentationScope::default() };
        let scope_spans = ScopeSpans { scope: Some(scope), spans: spans.to_vec(), ..ScopeSpans::default() };
        let resource = Some(self.resource.clone());
        let resource_spans =
            vec![ResourceSpans { resource, scope_spans: vec![scope_spans], ..ResourceSpans::default() }];
        let sent = timeout(REQUEST_LIMIT, self.client.export(ExportTraceServiceRequest { resource_spans })).await;
        let reply = sent.map_err(|_elapsed| Status::deadline_exceeded("the collector does not respond"))??;
        if let Some(partial) = reply.into_inner().partial_success
            && let Ok(rejected @ 1..) = usize::try_from(partial.rejected_spans)
        {
            self.report_loss(
                rejected.min(spans.len()),
                &format!("the collector rejected them: {}", partial.error_message),
            );
        }
        Ok(())
    }

    /// Counts dropped spans, and logs the cause if the last message is old enough.
    fn report_loss(&mut self, count: usize, cause: &str) {
        self.counters.count_dropped_spans(u64::try_from(count).unwrap_or(u64::MAX));
        if self.last_log.is_none_or(|last| last.elapsed() >= LOG_PAUSE) {
            self.last_log = Some(Instant::now());
            let (endpoint, cause) = (&self.endpoint, cut(cause, MAX_MESSAGE));
            tracing::warn!(%endpoint, count, cause, "spans of traces are lost; losses of the next minute are only counted");
        }
    }
}

/// Returns whether OTLP allows to repeat a request that failed with this code.
fn is_temporary(code: Code) -> bool {
    matches!(
        code,
        Code::Cancelled
            | Code::DeadlineExceeded
            | Code::ResourceExhausted
            | Code::Aborted
            | Code::OutOfRange
            | Code::Unavailable
            | Code::DataLoss
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{TraceService, TraceServiceServer};
    use opentelemetry_proto::tonic::collector::trace::v1::{ExportTracePartialSuccess, ExportTraceServiceResponse};
    use std::sync::{Arc, Mutex};
    use tokio::net::UnixListener;
    use tokio_stream::wrappers::UnixListenerStream;
    use tonic::{Request, Response};

    /// A collector that counts the spans it receives. It rejects one span of each request with more than one, and refuses a request
    /// that has a span without a name.
    #[derive(Clone, Default)]
    struct FakeCollector(Arc<Mutex<usize>>);

    #[tonic::async_trait]
    impl TraceService for FakeCollector {
        async fn export(
            &self,
            request: Request<ExportTraceServiceRequest>,
        ) -> Result<Response<ExportTraceServiceResponse>, Status> {
            let resource_spans = request.into_inner().resource_spans;
            let scopes = resource_spans.into_iter().flat_map(|resource| resource.scope_spans);
            let spans: Vec<_> = scopes.flat_map(|scope| scope.spans).collect();
            if spans.iter().any(|span| span.name.is_empty()) {
                return Err(Status::invalid_argument("a span has no name"));
            }
            *self.0.lock().unwrap() += spans.len();
            let rejected = ExportTracePartialSuccess { rejected_spans: 1, error_message: "too old".to_owned() };
            let partial_success = (spans.len() > 1).then_some(rejected);
            Ok(Response::new(ExportTraceServiceResponse { partial_success }))
        }
    }

    fn dropped(counters: &EventCounters) -> String {
        let mut text = String::new();
        counters.encode(&mut text).unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix("nacelle_trace_spans_dropped_total "));
        line.unwrap().to_owned()
    }

    fn named(name: &str) -> Span {
        Span { name: name.to_owned(), ..Span::default() }
    }

    /// Returns a sender to a collector on a socket in this directory.
    fn sender_to(directory: &tempfile::TempDir, counters: &EventCounters) -> BatchSender {
        let endpoint: TraceEndpoint = format!("unix:{}", directory.path().join("s").display()).parse().unwrap();
        let client = TraceServiceClient::new(connect(&endpoint).unwrap());
        BatchSender::new(client, endpoint, [Duration::ZERO; PAUSES.len()], counters)
    }

    fn serve(directory: &tempfile::TempDir) -> FakeCollector {
        serve_until(directory, CancellationToken::new()).0
    }

    /// Serves until `end`.
    fn serve_until(directory: &tempfile::TempDir, end: CancellationToken) -> (FakeCollector, JoinHandle<()>) {
        let collector = FakeCollector::default();
        let socket = directory.path().join("s");
        let listener = UnixListener::bind(&socket).unwrap();
        let server = nacelle_proto::server::builder().add_service(TraceServiceServer::new(collector.clone()));
        let serving = tokio::spawn(async move {
            let incoming = UnixListenerStream::new(listener);
            server.serve_with_incoming_shutdown(incoming, end.cancelled_owned()).await.unwrap();
            std::fs::remove_file(socket).unwrap();
        });
        (collector, serving)
    }

    #[test]
    fn spans_beyond_the_queue_are_dropped_and_counted() {
        let counters = EventCounters::new([]);
        let (spans, _receiver) = mpsc::channel(2);
        let queue = SpanQueue { spans, counters: counters.clone() };
        (0..5).for_each(|_| queue.push(Span::default()));
        assert_eq!(dropped(&counters), "3");
    }

    #[tokio::test]
    async fn what_the_collector_refuses_is_counted_and_logged_once() {
        let (directory, counters) = (tempfile::tempdir().unwrap(), EventCounters::new([]));
        let (mut sender, collector) = (sender_to(&directory, &counters), serve(&directory));
        sender.send(&[named("a")]).await;
        assert!(sender.last_log.is_none());
        sender.send(&[named("b"), named("c"), named("d")]).await;
        assert_eq!((*collector.0.lock().unwrap(), dropped(&counters).as_str()), (4, "1"));
        let logged = sender.last_log;
        sender.send(&[named("e"), named("")]).await;
        assert_eq!((*collector.0.lock().unwrap(), dropped(&counters).as_str()), (4, "3"));
        assert!(logged.is_some() && sender.last_log == logged);
    }

    #[tokio::test]
    async fn spans_arrive_again_after_a_restart_of_the_collector_and_lost_ones_are_counted() {
        let (directory, counters) = (tempfile::tempdir().unwrap(), EventCounters::new([]));
        let mut sender = sender_to(&directory, &counters);
        let end = CancellationToken::new();
        let (first, serving) = serve_until(&directory, end.clone());
        sender.send(&[named("a")]).await;
        end.cancel();
        serving.await.unwrap();
        sender.send(&[named("b"), named("c")]).await;
        assert_eq!((*first.0.lock().unwrap(), dropped(&counters).as_str()), (1, "2"));
        let second = serve(&directory);
        sender.send(&[named("d")]).await;
        assert_eq!((*second.0.lock().unwrap(), dropped(&counters).as_str()), (1, "2"));
    }

    #[tokio::test]
    async fn spans_that_wait_at_the_end_are_sent_or_counted() {
        for has_collector in [true, false] {
            let (directory, counters) = (tempfile::tempdir().unwrap(), EventCounters::new([]));
            let sender = sender_to(&directory, &counters);
            let collector = has_collector.then(|| serve(&directory));
            let (spans, receiver) = mpsc::channel(QUEUE);
            let queue = SpanQueue { spans, counters: counters.clone() };
            queue.push(named("a"));
            let end = CancellationToken::new();
            end.cancel();
            send_batches(receiver, sender, end).await;
            assert_eq!(collector.map(|collector| *collector.0.lock().unwrap()), has_collector.then_some(1));
            assert_eq!(dropped(&counters), if has_collector { "0" } else { "1" });
            queue.push(named("too late"));
            assert_eq!(dropped(&counters), if has_collector { "1" } else { "2" });
        }
    }
}
