//! Begins and ends the spans of CRI requests, in a layer around the services. A client's trace is continued if the client records it;
//! of the requests without a trace, the configured rate begins one.

use super::exporter::SpanQueue;
use super::parent::ClientSpan;
use super::span::{RequestSpan, random_id};
use crate::metrics::requests::find_method;
use http::HeaderMap;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use tonic::body::Body;
use tonic::codegen::http::{Request, Response};
use tonic::{Code, Status};
use tower::{Layer, Service};

/// The scale of a sampling rate.
const MILLION: u32 = 1_000_000;

/// The layer that records requests.
#[derive(Clone)]
pub(crate) struct TraceLayer {
    queue: SpanQueue,
    /// Of a million requests without a client's trace, how many are recorded.
    rate: u32,
}

/// A service whose requests are recorded.
#[derive(Clone)]
pub(crate) struct TraceService<S> {
    layer: TraceLayer,
    inner: S,
}

/// A recorded request in progress. One that is dropped was given up by its caller.
struct RecordedRequest {
    span: RequestSpan,
    result: Option<Status>,
}

impl RecordedRequest {
    fn set_result(&mut self, result: Status) {
        self.result = Some(result);
    }
}

impl Drop for RecordedRequest {
    fn drop(&mut self) {
        match &self.result {
            Some(status) => self.span.end(status.code(), status.message()),
            None => self.span.end(Code::Cancelled, "its caller gave up, or its time limit passed"),
        }
    }
}

impl TraceLayer {
    pub(super) fn new(queue: SpanQueue, rate: u32) -> TraceLayer {
        TraceLayer { queue, rate }
    }

    /// Begins the span of a request to CRI; `None` if it is not recorded.
    fn begin(&self, path: &str, headers: &HeaderMap) -> Option<RequestSpan> {
        let parent = match ClientSpan::from_headers(headers) {
            Some(client) if client.is_sampled => Ok(client),
            Some(_not_sampled) => return None,
            None if self.rate == 0 => return None,
            None => Err(Some(random_id()).filter(|trace_id| is_sampled(trace_id, self.rate))?),
        };
        let (service, method) = find_method(path)?;
        Some(RequestSpan::begin(self.queue.clone(), parent, service, method))
    }
}

/// Returns whether a new trace is recorded: its id is random, so that the same share of ids is below the limit.
fn is_sampled(trace_id: &[u8; 16], rate: u32) -> bool {
    let random = u128::from_be_bytes(*trace_id) & u128::from(u64::MAX);
    random * u128::from(MILLION) < u128::from(rate) << 64
}

impl<S> Layer<S> for TraceLayer {
    type Service = TraceService<S>;

    fn layer(&self, inner: S) -> TraceService<S> {
        TraceService { layer: self.clone(), inner }
    }
}

impl<S, B> Service<Request<B>> for TraceService<S>
where
    S: Service<Request<B>, Response = Response<Body>>,
    S::Future: Send + 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<S::Response, S::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let span = self.layer.begin(request.uri().path(), request.headers());
        let response = self.inner.call(request);
        let Some(span) = span else { return Box::pin(response) };
        let mut recorded = RecordedRequest { span: span.clone(), result: None };
        Box::pin(async move {
            let response = span.scope(response).await;
            recorded.set_result(match &response {
                // A failed request has its status in the header; a success has it after the message.
                Ok(response) => Status::from_header_map(response.headers()).unwrap_or_else(|| Status::ok("")),
                Err(_closed) => Status::internal("the connection was closed"),
            });
            response
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_a_share_of_random_ids() {
        let id = |low: u64| u128::from(low).to_be_bytes();
        for (rate, low, expected) in [
            (0, 0, false),
            (1, 0, true),
            (500_000, u64::MAX / 2, true),
            (500_000, u64::MAX / 2 + 1, false),
            (MILLION, u64::MAX, true),
        ] {
            assert_eq!(is_sampled(&id(low), rate), expected, "{rate} {low}");
        }
        let sampled = (0..4000).filter(|_| is_sampled(&random_id(), MILLION / 4)).count();
        assert!((700..1300).contains(&sampled), "{sampled} of 4000");
    }
}
