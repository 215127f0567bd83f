//! Records a span for each sampled CRI request, with the steps of pods and containers below it, and sends them to a collector by
//! OTLP over gRPC.
//!
//! Without `tracing.endpoint` none of this runs. With it, no request ever waits for the collector: spans that the queue cannot hold
//! are dropped and counted. All times are the node's; a guest's clock is not used.

pub mod endpoint;
mod exporter;
mod parent;
mod request;
mod span;
mod steps;

pub(crate) use exporter::TraceExporter;
pub(crate) use span::RequestSpan;
pub(crate) use steps::TracedWork;
