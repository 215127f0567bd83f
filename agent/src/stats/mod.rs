//! Reads the resource usage of all containers in one request. docs/reference/statistics.md has the source of each figure.
//!
//! Files are read on blocking threads. This module does not know gRPC.

mod details;
mod layer;
mod net;
mod usage;

use nacelle_proto::agent::StatsResponse;
use nacelle_proto::common::{ContainerUsage, Layer};
use std::fs;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::cgroup;
use crate::paths;
pub use layer::Layers;

/// The longest time that an answer waits until the writable layers are measured.
const MEASURE_TIMEOUT: Duration = Duration::from_millis(500);

/// A container whose usage is read.
pub struct MeasuredContainer {
    /// The container's id.
    pub id: String,
    /// The PID of its first process, if that runs.
    pub pid: Option<i32>,
}

/// Reads the usage of these containers. A container that is removed meanwhile has none.
pub async fn read_usage(layers: &Arc<Layers>, containers: Vec<MeasuredContainer>) -> io::Result<StatsResponse> {
    let ids = containers.iter().map(|asked| asked.id.clone()).collect();
    layer::measure_stale_within(layers, ids, MEASURE_TIMEOUT).await;
    let layers = layers.sizes();
    let read = tokio::task::spawn_blocking(move || {
        let memory = fs::read_to_string("/proc/meminfo")?;
        let swap = usage::parse_meminfo(&memory, "SwapTotal").unwrap_or(0);
        let container = |MeasuredContainer { id, pid }| {
            let layer = layers.get(&id).map(|measured| Layer {
                bytes: measured.size.bytes,
                inodes: measured.size.inodes,
                age_ms: u64::try_from(measured.at.elapsed().as_millis()).unwrap_or(u64::MAX),
            });
            let cgroup = cgroup::container_path(&id);
            let usage = usage::read_cgroup(&cgroup, swap);
            let details = usage.is_some().then(|| details::read_details(&cgroup, pid));
            ContainerUsage { id, usage, layer, details }
        };
        Ok(StatsResponse {
            pod: usage::read_cgroup(&cgroup::pod_path(), swap),
            containers: containers.into_iter().map(container).collect(),
            interfaces: net::parse_interfaces(&fs::read_to_string("/proc/net/dev")?),
            scratch: details::read_file_system(Path::new(paths::SCRATCH)).ok(),
            free_bytes: usage::parse_meminfo(&memory, "MemFree"),
        })
    });
    read.await.map_err(io::Error::other)?
}
