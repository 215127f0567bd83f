//! Implements a collector of traces in a node's network namespace, and the client's side of a trace: the header `traceparent`.

use crate::{TestNode, eventually};
use nix::sched::{CloneFlags, setns};
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{TraceService, TraceServiceServer};
use opentelemetry_proto::tonic::collector::trace::v1::{ExportTraceServiceRequest, ExportTraceServiceResponse};
use opentelemetry_proto::tonic::trace::v1::Span;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use tokio::runtime::Runtime;
use tonic::{Request, Response, Status};

/// The address of the collector, in the node's network namespace.
const ADDRESS: &str = "127.0.0.1:4317";

/// The id of the client's span in all traces.
pub const PARENT_SPAN: u64 = 0xb7ad_6b71_6920_3331;

/// Returns the lines of the daemon's configuration by which it sends its traces to the collector.
pub fn tracing_config() -> String {
    format!("[tracing]\nendpoint = \"http://{ADDRESS}\"\n")
}

/// Returns a request with the client's span of this trace. With `flags` 1 the client records the trace, with 0 it does not.
///
/// # Panics
/// Never: the header is ASCII.
pub fn traced<T>(message: T, trace: u128, flags: u8) -> Request<T> {
    let mut request = Request::new(message);
    let parent = format!("00-{trace:032x}-{PARENT_SPAN:016x}-{flags:02x}");
    request.metadata_mut().insert("traceparent", parent.parse().expect("it is ASCII"));
    request
}

/// A collector that keeps what it receives.
#[derive(Clone, Default)]
pub struct TraceCollector(Arc<Mutex<Vec<Span>>>);

#[tonic::async_trait]
impl TraceService for TraceCollector {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        for resource in request.into_inner().resource_spans {
            let names = resource.resource.expect("spans have a resource").attributes;
            assert!(names.iter().any(|name| name.key == "service.name"), "{names:?}");
            self.0.lock().unwrap().extend(resource.scope_spans.into_iter().flat_map(|scope| scope.spans));
        }
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

impl TraceCollector {
    /// Serves in the network namespace of the node.
    ///
    /// # Panics
    /// If the test is not root, or another collector serves there.
    pub fn start(node: &TestNode, runtime: &Runtime) -> TraceCollector {
        let (collector, namespace) = (TraceCollector::default(), node.netns.open());
        let bound = std::thread::spawn(move || {
            setns(namespace, CloneFlags::CLONE_NEWNET).expect("the test is root");
            std::net::TcpListener::bind(ADDRESS).expect("the port is free")
        });
        let listener = bound.join().expect("the thread has a listener");
        listener.set_nonblocking(true).expect("a socket can be non-blocking");
        let incoming = {
            let _context = runtime.enter();
            let listener = tokio::net::TcpListener::from_std(listener).expect("the runtime takes a socket");
            tonic::transport::server::TcpIncoming::from(listener)
        };
        let server = nacelle_proto::server::builder().add_service(TraceServiceServer::new(collector.clone()));
        runtime.spawn(server.serve_with_incoming(incoming));
        collector
    }

    /// Returns all spans that have arrived.
    ///
    /// # Panics
    /// If a request had no resource.
    pub fn spans(&self) -> Vec<Span> {
        self.0.lock().unwrap().clone()
    }

    /// Waits for the span of an RPC in a trace, and returns it with the spans below it by their names.
    ///
    /// # Panics
    /// If it does not arrive.
    pub fn wait_for(&self, trace: u128, rpc: &str) -> (Span, BTreeMap<String, Span>) {
        let of_trace = || self.spans().into_iter().filter(|span| span.trace_id == trace.to_be_bytes());
        let of_rpc = || of_trace().find(|span| span.name.ends_with(&format!("/{rpc}")));
        let span = eventually(&format!("the span of {rpc}"), of_rpc);
        let steps = of_trace().filter(|step| step.parent_span_id == span.span_id);
        let steps = steps.map(|step| (step.name.clone(), step)).collect();
        (span, steps)
    }
}
