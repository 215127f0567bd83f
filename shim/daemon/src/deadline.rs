//! Ends requests with DEADLINE_EXCEEDED at the time limit of their callers (`grpc-timeout`). The library itself would use
//! CANCELLED, and on a busy node that reaches the caller before its own clock expires. Each request with a limit has a timer, and
//! no thread.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::time::{Instant, sleep_until};
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::http::{Request, Response};
use tower::{Layer, Service};

/// The header of the time limit (gRPC over HTTP/2: `Timeout`).
const HEADER: &str = "grpc-timeout";

/// The time at which the caller of a request gives up. It is in the extensions of each request that has a time limit, for handlers that
/// must clean up before they answer.
#[derive(Clone, Copy, Debug)]
pub struct CallerLimit(pub Instant);

/// The layer that limits the time of requests.
#[derive(Clone, Copy, Debug)]
pub struct DeadlineLayer;

/// A service with a time limit for its requests.
#[derive(Clone, Copy, Debug)]
pub struct DeadlineService<S>(S);

impl<S> Layer<S> for DeadlineLayer {
    type Service = DeadlineService<S>;

    fn layer(&self, inner: S) -> DeadlineService<S> {
        DeadlineService(inner)
    }
}

impl<S, B> Service<Request<B>> for DeadlineService<S>
where
    S: Service<Request<B>, Response = Response<Body>>,
    S::Future: Send + 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<S::Response, S::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, mut request: Request<B>) -> Self::Future {
        let limit = request.headers().get(HEADER).and_then(|text| parse_timeout(text.to_str().ok()?));
        let Some(limit) = limit else { return Box::pin(self.0.call(request)) };
        let limit = Instant::now() + limit;
        // The library's own timer for the request starts after this one, and therefore never expires before it.
        let expired = sleep_until(limit);
        request.extensions_mut().insert(CallerLimit(limit));
        let response = self.0.call(request);
        Box::pin(async move {
            tokio::select! {
                biased;
                response = response => response,
                () = expired => Ok(Status::deadline_exceeded("the request exceeded the time limit of the caller (grpc-timeout)").into_http()),
            }
        })
    }
}

/// Parses a time limit: at most eight digits and a unit; otherwise `None`.
fn parse_timeout(text: &str) -> Option<Duration> {
    let (number, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    let number: u64 = number.parse().ok().filter(|_| number.len() <= 8)?;
    Some(match unit {
        "H" => Duration::from_secs(number * 3600),
        "M" => Duration::from_secs(number * 60),
        "S" => Duration::from_secs(number),
        "m" => Duration::from_millis(number),
        "u" => Duration::from_micros(number),
        "n" => Duration::from_nanos(number),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::convert::Infallible;

    #[tokio::test]
    async fn a_request_beyond_its_deadline_fails_with_deadline_exceeded() {
        let request = || Request::builder().header(HEADER, "1m").body(()).unwrap();
        let forever = tower::service_fn(|_: Request<()>| std::future::pending::<Result<Response<Body>, Infallible>>());
        let response = DeadlineLayer.layer(forever).call(request()).await.unwrap();
        assert_eq!(response.headers()["grpc-status"], "4");
        let at_once = tower::service_fn(async |_: Request<()>| Ok::<_, Infallible>(Response::new(Body::empty())));
        let response = DeadlineLayer.layer(at_once).call(request()).await.unwrap();
        assert!(response.headers().is_empty());
    }

    #[tokio::test]
    async fn a_handler_finds_the_limit_of_its_caller() {
        let limit_of = async |header: Option<&str>| {
            let (sender, found) = std::sync::mpsc::channel();
            let service = tower::service_fn(move |request: Request<()>| {
                sender.send(request.extensions().get::<CallerLimit>().copied()).unwrap();
                async { Ok::<_, Infallible>(Response::new(Body::empty())) }
            });
            let request = header.into_iter().fold(Request::builder(), |builder, text| builder.header(HEADER, text));
            DeadlineLayer.layer(service).call(request.body(()).unwrap()).await.unwrap();
            found.recv().unwrap()
        };
        let before = Instant::now() + Duration::from_secs(5);
        let limit = limit_of(Some("5S")).await.unwrap().0;
        assert!(limit >= before && limit <= Instant::now() + Duration::from_secs(5));
        assert!(limit_of(None).await.is_none() && limit_of(Some("5")).await.is_none());
    }

    #[test]
    fn timeouts_are_parsed_in_every_unit() {
        let rows = [("1m", 1_000_000), ("99999999n", 99_999_999), ("2u", 2000), ("3S", 3_000_000_000)];
        for (text, nanos) in rows {
            assert_eq!(parse_timeout(text), Some(Duration::from_nanos(nanos)), "{text}");
        }
        assert_eq!(
            (parse_timeout("99999999H"), parse_timeout("5M")),
            (Some(Duration::from_secs(359_999_996_400)), Some(Duration::from_secs(300)))
        );
        for text in ["", "m", "1", "1x", "-1m", "123456789m", "1é", "é"] {
            assert_eq!(parse_timeout(text), None, "{text}");
        }
    }
}
