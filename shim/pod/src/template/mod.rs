//! Templates: saved VMs whose agents wait for their configuration, and from which pods start. [`build`] is the process that makes
//! one; [`open`] is called by the process of a pod that starts from one. docs/contributor/templates.md describes the whole.

mod build;
mod directory;
mod rehearsal;
mod spec;

pub use build::build;
pub use directory::create_directory;
pub use rehearsal::{IMAGE_FILE, PROGRAM};
pub use spec::{FILE, PodTemplate, TemplateShape, TemplateSpec};

use crate::spec::{EngineSpec, PodSpec};
use nacelle_base::Chain;
use nacelle_engine::{Snapshot, SnapshotFiles, read_snapshot};

/// Opens the template that the specification names, before the process is jailed. Returns `None` if there is none, or if it cannot be
/// used: then the VM boots.
pub(crate) fn open(spec: &PodSpec) -> Option<Snapshot> {
    let template = spec.template.as_ref()?;
    if !matches!(spec.engine, EngineSpec::Kvm {}) {
        return None;
    }
    let directory = template.directory.display();
    match SnapshotFiles::open(&template.directory).and_then(read_snapshot) {
        Ok(saved) if saved.is_template() && saved.memory_mib() == template.memory_mib => Some(saved),
        Ok(saved) => {
            tracing::warn!(%directory, memory_mib = saved.memory_mib(), "the VM boots, because its template is another one");
            None
        }
        Err(error) => {
            tracing::warn!(%directory, "the VM boots, because its template cannot be used: {}", Chain(&error));
            None
        }
    }
}
