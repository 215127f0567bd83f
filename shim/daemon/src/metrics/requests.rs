//! Counts CRI requests, read-only ones too, in a layer around the services: by RPC, with the gRPC code and the time until the
//! response began. A stream that fails after it began counts as its beginning did.

use super::counters::EventCounters;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Instant;
use tonic::body::Body;
use tonic::codegen::http::{Request, Response};
use tonic::{Code, Status};
use tower::{Layer, Service};

/// The beginning of the paths of CRI requests.
const CRI: &str = "/runtime.v1.";

/// The services of CRI.
const SERVICES: [&str; 2] = ["runtime.v1.RuntimeService", "runtime.v1.ImageService"];

/// The RPCs of CRI, sorted. A client may send any other name.
const RPCS: [&str; 43] = [
    "Attach",
    "CheckpointContainer",
    "CheckpointPod",
    "ContainerStats",
    "ContainerStatus",
    "CreateContainer",
    "Exec",
    "ExecSync",
    "GetContainerEvents",
    "ImageFsInfo",
    "ImageStatus",
    "ListContainerStats",
    "ListContainers",
    "ListImages",
    "ListMetricDescriptors",
    "ListPodSandbox",
    "ListPodSandboxMetrics",
    "ListPodSandboxStats",
    "PodSandboxStats",
    "PodSandboxStatus",
    "PortForward",
    "PullImage",
    "RemoveContainer",
    "RemoveImage",
    "RemovePodSandbox",
    "ReopenContainerLog",
    "RestorePod",
    "RunPodSandbox",
    "RuntimeConfig",
    "StartContainer",
    "Status",
    "StopContainer",
    "StopPodSandbox",
    "StreamContainerStats",
    "StreamContainers",
    "StreamImages",
    "StreamPodSandboxMetrics",
    "StreamPodSandboxStats",
    "StreamPodSandboxes",
    "UpdateContainerResources",
    "UpdatePodSandboxResources",
    "UpdateRuntimeConfig",
    "Version",
];

/// The label of a request whose RPC is not one of CRI.
const OTHER: &str = "other";

/// The layer that counts requests.
#[derive(Clone)]
pub(crate) struct CountLayer(pub EventCounters);

/// A service whose requests are counted.
#[derive(Clone)]
pub(crate) struct CountService<S> {
    counters: EventCounters,
    inner: S,
}

/// A request in progress. One that is dropped was given up by its caller.
struct CountedRequest {
    counters: EventCounters,
    rpc: &'static str,
    began: Instant,
    code: Code,
}

impl CountedRequest {
    fn set_code(&mut self, code: Code) {
        self.code = code;
    }
}

impl Drop for CountedRequest {
    fn drop(&mut self) {
        self.counters.count_request(self.rpc, code_label(self.code), self.began.elapsed());
    }
}

impl<S> Layer<S> for CountLayer {
    type Service = CountService<S>;

    fn layer(&self, inner: S) -> CountService<S> {
        CountService { counters: self.0.clone(), inner }
    }
}

impl<S, B> Service<Request<B>> for CountService<S>
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
        let rpc = find_rpc(request.uri().path());
        let response = self.inner.call(request);
        let Some(rpc) = rpc else { return Box::pin(response) };
        let counters = self.counters.clone();
        let mut counted = CountedRequest { counters, rpc, began: Instant::now(), code: Code::Cancelled };
        Box::pin(async move {
            let response = response.await;
            counted.set_code(match &response {
                // A failed request has its code in the header; a success has it after the message.
                Ok(response) => Status::from_header_map(response.headers()).map_or(Code::Ok, |status| status.code()),
                Err(_closed) => Code::Internal,
            });
            response
        })
    }
}

/// Returns the label of the RPC of this path; `None` if it is not a request to CRI.
fn find_rpc(path: &str) -> Option<&'static str> {
    let (_service, name) = path.strip_prefix(CRI)?.split_once('/')?;
    Some(RPCS.binary_search(&name).ok().and_then(|position| RPCS.get(position)).copied().unwrap_or(OTHER))
}

/// Returns the service and the name of the RPC of this path; `None` if CRI does not have them.
pub(crate) fn find_method(path: &str) -> Option<(&'static str, &'static str)> {
    let (service, _name) = path.strip_prefix('/')?.split_once('/')?;
    let service = SERVICES.into_iter().find(|known| *known == service)?;
    Some((service, find_rpc(path).filter(|rpc| *rpc != OTHER)?))
}

/// Returns the label of a gRPC code.
fn code_label(code: Code) -> &'static str {
    match code {
        Code::Ok => "OK",
        Code::Cancelled => "Cancelled",
        Code::Unknown => "Unknown",
        Code::InvalidArgument => "InvalidArgument",
        Code::DeadlineExceeded => "DeadlineExceeded",
        Code::NotFound => "NotFound",
        Code::AlreadyExists => "AlreadyExists",
        Code::PermissionDenied => "PermissionDenied",
        Code::ResourceExhausted => "ResourceExhausted",
        Code::FailedPrecondition => "FailedPrecondition",
        Code::Aborted => "Aborted",
        Code::OutOfRange => "OutOfRange",
        Code::Unimplemented => "Unimplemented",
        Code::Internal => "Internal",
        Code::Unavailable => "Unavailable",
        Code::DataLoss => "DataLoss",
        Code::Unauthenticated => "Unauthenticated",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use prost::Message;
    use prost_types::FileDescriptorSet;

    #[test]
    fn the_list_of_rpcs_is_that_of_cri() {
        let set = FileDescriptorSet::decode(nacelle_proto::DESCRIPTORS).unwrap();
        let cri = set.file.iter().filter(|file| file.package() == "runtime.v1");
        let methods = cri.flat_map(|file| &file.service).flat_map(|service| &service.method);
        let mut names: Vec<&str> = methods.map(|method| method.name()).collect();
        names.sort_unstable();
        assert_eq!(names, RPCS);
    }

    #[test]
    fn only_known_names_become_labels() {
        assert_eq!(find_rpc("/runtime.v1.RuntimeService/Version"), Some("Version"));
        assert_eq!(find_rpc("/runtime.v1.ImageService/PullImage"), Some("PullImage"));
        assert_eq!(find_rpc("/runtime.v1.RuntimeService/x"), Some(OTHER));
        assert_eq!(find_rpc("/nacelle.node.v1.Node/ListTemplates"), None);
        assert_eq!(find_rpc(""), None);
    }

    #[tokio::test]
    async fn requests_are_counted_with_their_code() {
        let counters = EventCounters::new([]);
        let answer = tower::service_fn(|request: Request<()>| async move {
            match request.uri().path().ends_with("Version") {
                true => Ok::<_, std::convert::Infallible>(Response::new(Body::empty())),
                false => Ok(Status::not_found("no").into_http()),
            }
        });
        let mut service = CountLayer(counters.clone()).layer(answer);
        for path in ["/runtime.v1.RuntimeService/Version", "/runtime.v1.RuntimeService/Status", "/other/Status"] {
            service.call(Request::builder().uri(path).body(()).unwrap()).await.unwrap();
        }
        drop(service.call(Request::builder().uri("/runtime.v1.RuntimeService/Exec").body(()).unwrap()));
        let mut text = String::new();
        counters.encode(&mut text).unwrap();
        let counted: Vec<&str> = text.lines().filter(|line| line.starts_with("nacelle_cri_requests_total")).collect();
        for line in [
            "nacelle_cri_requests_total{rpc=\"Version\",code=\"OK\"} 1",
            "nacelle_cri_requests_total{rpc=\"Status\",code=\"NotFound\"} 1",
            "nacelle_cri_requests_total{rpc=\"Exec\",code=\"Cancelled\"} 1",
        ] {
            assert!(counted.contains(&line), "{counted:?}");
        }
        assert_eq!(counted.len(), 3);
    }
}
