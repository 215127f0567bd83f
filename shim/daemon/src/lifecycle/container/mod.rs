//! Creates, starts, stops and removes containers in the guest: effects that run as tasks of their own, each with a deadline, and send
//! their results to the pod's actor. One verb per file.

pub(crate) mod cpus;
pub(crate) mod create;
pub(crate) mod exec;
pub(crate) mod log;
mod machine;
pub(crate) mod memory_policy;
pub(crate) mod prepare;
pub(crate) mod remove;
pub(crate) mod report;
pub(crate) mod start;
pub(crate) mod stop;
pub(crate) mod update;

use nacelle_base::machine::{Extent, ImageDisk};
use nacelle_proto::pod as proto;

/// Returns the parts of files that make up an image's disk, as the pod process receives them.
fn extents(disk: &ImageDisk) -> Vec<proto::Extent> {
    let text = |path: &std::path::Path| path.to_string_lossy().into_owned();
    let piece =
        |extent: &Extent| proto::Extent { path: text(&extent.path), offset: extent.offset, length: extent.length };
    disk.extents.iter().map(piece).collect()
}
