//! Owns: what the containers have used, asked for once for all of them. docs/reference/statistics.md says where each figure is from.
//! May use: the table of containers, for their ids. Knows no gRPC.
//! Threads: any; files are read on blocking threads.

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

/// How long an answer waits for the measuring of what containers wrote.
const PATIENCE: Duration = Duration::from_millis(500);

/// A container that is asked about.
pub struct Asked {
    /// Its id.
    pub id: String,
    /// Its first process, if that runs.
    pub pid: Option<i32>,
}

/// The figures of these containers. They come and go meanwhile: one that is gone has none.
pub async fn of(layers: &Arc<Layers>, containers: Vec<Asked>) -> io::Result<StatsResponse> {
    let ids = containers.iter().map(|asked| asked.id.clone()).collect();
    layer::renew_within(layers, ids, PATIENCE).await;
    let layers = layers.known();
    let read = tokio::task::spawn_blocking(move || {
        let memory = fs::read_to_string("/proc/meminfo")?;
        let swap = usage::memory(&memory, "SwapTotal").unwrap_or(0);
        let container = |Asked { id, pid }| {
            let layer = layers.get(&id).map(|measured| Layer {
                bytes: measured.size.bytes,
                inodes: measured.size.inodes,
                age_ms: u64::try_from(measured.at.elapsed().as_millis()).unwrap_or(u64::MAX),
            });
            let cgroup = cgroup::path(&id);
            let usage = usage::of(&cgroup, swap);
            let details = usage.is_some().then(|| details::of(&cgroup, pid));
            ContainerUsage { id, usage, layer, details }
        };
        Ok(StatsResponse {
            pod: usage::of(&cgroup::pod(), swap),
            containers: containers.into_iter().map(container).collect(),
            interfaces: net::interfaces(&fs::read_to_string("/proc/net/dev")?),
            scratch: details::file_system(Path::new(paths::SCRATCH)).ok(),
            free_bytes: usage::memory(&memory, "MemFree"),
        })
    });
    read.await.map_err(io::Error::other)?
}
