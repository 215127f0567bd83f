//! Builds spans as OTLP has them: that of a CRI request, and those of the steps that it caused.

use super::exporter::SpanQueue;
use super::parent::ClientSpan;
use super::steps::TracedWork;
use nacelle_base::timeline::{TimelineStep, unix_nanos};
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue};
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use opentelemetry_proto::tonic::trace::v1::status::StatusCode;
use opentelemetry_proto::tonic::trace::v1::{Span, Status};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;
use tokio::task::JoinHandle;
use tonic::Code;

/// The maximum size in bytes of an attribute's value; a longer one is cut. A name of Kubernetes has at most 253.
const MAX_VALUE: usize = 256;

/// The maximum size in bytes of the message of a failed request.
pub(super) const MAX_MESSAGE: usize = 1024;

/// The flags of a span: it is sampled, and whether its parent is remote is known (0x100) and true (0x200).
const LOCAL_PARENT: u32 = 0x101;
const REMOTE_PARENT: u32 = 0x301;

tokio::task_local! {
    static CURRENT: RequestSpan;
}

/// The span of a CRI request that is recorded. Clones share it; those that live longer than the request add steps below it.
#[derive(Clone)]
pub(crate) struct RequestSpan(Arc<OpenSpan>);

struct OpenSpan {
    queue: SpanQueue,
    trace_id: [u8; 16],
    span_id: [u8; 8],
    parent: Option<[u8; 8]>,
    state: String,
    service: &'static str,
    method: &'static str,
    /// The beginning in nanoseconds since 1970.
    at: i64,
    since: Instant,
    /// The subject of the request.
    attributes: Mutex<Vec<KeyValue>>,
}

impl RequestSpan {
    /// Begins the span of a request, below the client's span or, with a trace id, as the root of a new trace.
    pub(super) fn begin(
        queue: SpanQueue,
        parent: Result<ClientSpan, [u8; 16]>,
        service: &'static str,
        method: &'static str,
    ) -> RequestSpan {
        let (trace_id, parent, state) = match parent {
            Ok(client) => (client.trace_id, Some(client.span_id), client.state),
            Err(trace_id) => (trace_id, None, String::new()),
        };
        let (span_id, attributes) = (random_id(), Mutex::default());
        let (at, since) = (unix_nanos(), Instant::now());
        RequestSpan(Arc::new(OpenSpan {
            queue,
            trace_id,
            span_id,
            parent,
            state,
            service,
            method,
            at,
            since,
            attributes,
        }))
    }

    /// Returns the span of the request that this task answers; `None` if it is not recorded.
    pub(crate) fn current() -> Option<RequestSpan> {
        CURRENT.try_with(RequestSpan::clone).ok()
    }

    /// Runs the answer of the request as its task.
    pub(super) async fn scope<F: Future>(self, answer: F) -> F::Output {
        CURRENT.scope(self, answer).await
    }

    /// Starts a task that works on the answer of the request, and to its end if the request is given up.
    pub(crate) fn spawn<F>(work: F) -> JoinHandle<F::Output>
    where
        F: Future<Output: Send> + Send + 'static,
    {
        match RequestSpan::current() {
            Some(span) => tokio::spawn(span.scope(work)),
            None => tokio::spawn(work),
        }
    }

    /// Replaces the attributes that name the subject of the request. Empty values are left out, and long ones are cut.
    pub(crate) fn set_subject<'a>(&self, subject: impl IntoIterator<Item = (&'static str, &'a str)>) {
        let subject = subject.into_iter().filter(|(_, value)| !value.is_empty());
        let attributes = subject.map(|(key, value)| text(key, value)).collect();
        *self.0.attributes.lock().unwrap_or_else(PoisonError::into_inner) = attributes;
    }

    /// Adds a span for each step that began after the request. A pod process may report any times: no step ends in the future.
    pub(crate) fn add_steps(&self, work: TracedWork, steps: &[TimelineStep]) {
        let now = unix_nanos();
        for step in steps.iter().filter(|step| (self.0.at..=now).contains(&step.at)) {
            let nanos = i64::try_from(step.micros).unwrap_or(i64::MAX).saturating_mul(1000);
            let status = step.failed.then(|| Status { code: StatusCode::Error.into(), ..Status::default() });
            self.0.queue.push(Span {
                span_id: random_id::<8>().to_vec(),
                parent_span_id: self.0.span_id.to_vec(),
                flags: LOCAL_PARENT,
                name: work.step_name(&step.what).to_owned(),
                kind: SpanKind::Internal.into(),
                start_time_unix_nano: unsigned(step.at),
                end_time_unix_nano: unsigned(step.at.saturating_add(nanos).min(now)),
                status,
                ..self.0.frame()
            });
        }
    }

    /// Ends the span with the request's result.
    pub(super) fn end(&self, code: Code, message: &str) {
        let span = &self.0;
        let nanos = i64::try_from(span.since.elapsed().as_nanos()).unwrap_or(i64::MAX);
        let mut attributes =
            vec![text("rpc.system", "grpc"), text("rpc.service", span.service), text("rpc.method", span.method)];
        attributes.push(attribute("rpc.grpc.status_code", Value::IntValue(i64::from(i32::from(code)))));
        attributes.append(&mut span.attributes.lock().unwrap_or_else(PoisonError::into_inner));
        let status = is_server_fault(code)
            .then(|| Status { code: StatusCode::Error.into(), message: cut(message, MAX_MESSAGE).to_owned() });
        span.queue.push(Span {
            span_id: span.span_id.to_vec(),
            parent_span_id: span.parent.map(Vec::from).unwrap_or_default(),
            flags: if span.parent.is_some() { REMOTE_PARENT } else { LOCAL_PARENT },
            name: format!("{}/{}", span.service, span.method),
            kind: SpanKind::Server.into(),
            start_time_unix_nano: unsigned(span.at),
            end_time_unix_nano: unsigned(span.at.saturating_add(nanos)),
            attributes,
            status,
            ..span.frame()
        });
    }
}

impl OpenSpan {
    /// Returns what all spans of the request have.
    fn frame(&self) -> Span {
        Span { trace_id: self.trace_id.to_vec(), trace_state: self.state.clone(), ..Span::default() }
    }
}

/// Returns whether a request failed by a fault of this server and not of its client, as OpenTelemetry's semantic conventions for gRPC
/// servers classify the codes: only then is the span an error.
fn is_server_fault(code: Code) -> bool {
    matches!(
        code,
        Code::Unknown
            | Code::DeadlineExceeded
            | Code::Unimplemented
            | Code::Internal
            | Code::Unavailable
            | Code::DataLoss
    )
}

/// Returns a random id, which is not all zeros.
pub(super) fn random_id<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    // Without random bytes, ids are not unique, and a trace is confused: no reason to fail a request.
    let _ = nacelle_base::random::fill(&mut bytes);
    if bytes == [0; N] {
        bytes = [1; N];
    }
    bytes
}

pub(super) fn text(key: &str, value: &str) -> KeyValue {
    attribute(key, Value::StringValue(cut(value, MAX_VALUE).to_owned()))
}

/// Returns the beginning of a text, at most `max` bytes.
pub(super) fn cut(text: &str, max: usize) -> &str {
    let end = (0..=max.min(text.len())).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
    text.get(..end).unwrap_or_default()
}

fn attribute(key: &str, value: Value) -> KeyValue {
    KeyValue { key: key.to_owned(), value: Some(AnyValue { value: Some(value) }), ..KeyValue::default() }
}

fn unsigned(nanos: i64) -> u64 {
    u64::try_from(nanos).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_task_of_a_request_adds_steps_to_its_span() {
        let is_recorded = async || RequestSpan::spawn(async { RequestSpan::current().is_some() }).await.unwrap();
        assert!(!is_recorded().await);
        let span = RequestSpan::begin(SpanQueue::unread(), Err([1; 16]), "service", "method");
        assert!(span.scope(is_recorded()).await);
    }

    #[test]
    fn only_faults_of_the_server_are_errors() {
        let faults = (0..=16).filter(|code| is_server_fault(Code::from_i32(*code)));
        // UNKNOWN, DEADLINE_EXCEEDED, UNIMPLEMENTED, INTERNAL, UNAVAILABLE and DATA_LOSS.
        assert_eq!(faults.collect::<Vec<_>>(), [2, 4, 12, 13, 14, 15]);
    }
}
