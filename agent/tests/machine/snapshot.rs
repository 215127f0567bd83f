//! Saves VMs of engine `kvm` and restores them.

use super::{needs, spec};
use nacelle_engine::kvm::KvmEngine;
use nacelle_engine::{
    Engine, KvmVerdict, Machine, NicSpec, Restorer, SnapshotDirectory, SnapshotFiles, probe_kvm, read_snapshot,
};
use std::fs;
use std::path::Path;
use tempfile::TempDir;

/// Returns why a test that saves VMs must be skipped.
pub fn needs_kvm() -> Result<(), String> {
    match probe_kvm() {
        KvmVerdict::Hardware { .. } => needs().map(drop),
        verdict => Err(verdict.to_string()),
    }
}

/// Pauses a VM and saves it to a new directory.
pub fn save(machine: &dyn Machine, to: &Path) {
    machine.as_pausable().unwrap().pause().unwrap();
    let directory = SnapshotDirectory::create(to).unwrap();
    machine.as_snapshottable().unwrap().save(directory.files()).unwrap();
    directory.commit().unwrap();
}

/// Restores a VM from a snapshot, paused, in a directory of its own with copies of the files in `files`.
pub fn restore(from: &Path, files: &Path, vcpus: u8, nics: Vec<NicSpec>) -> (Box<dyn Machine>, TempDir) {
    let directory = tempfile::tempdir().unwrap();
    for name in ["scratch", "image.erofs"] {
        fs::copy(files.join(name), directory.path().join(name)).unwrap();
    }
    let engine = KvmEngine::new();
    let spec = spec(needs().unwrap(), directory.path(), vcpus, nics);
    let saved = read_snapshot(SnapshotFiles::open(from).unwrap()).unwrap();
    (engine.restore(spec.check(&engine.limits()).unwrap(), saved).unwrap(), directory)
}
