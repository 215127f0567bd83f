//! Serves the metrics of a node as OpenMetrics on `metrics.address`: the counts of events, and figures of the daemon's state, which
//! are computed when a client reads them, and only then.

mod exporter;
pub(crate) mod networks;
mod server;

pub(crate) use exporter::Exporter;
pub(crate) use server::serve_metrics;
