//! Exports a VM: compresses its files one by one next to the VMs' directories, sends each and removes the compressed copy, and
//! finally sends the document. A stopped VM is locked during the export and does not change; a running one is copied first and
//! continues to run.

use super::document::{BackingImage, ExportedFile, ExportedVm, FileKind, VM_ARTIFACT};
use super::files::{VmFiles, list_files, open_file};
use super::{ArtifactLocation, Progress, TransferError, WorkDirectory, live};
use crate::runtime::PodRuntime;
use nacelle_base::ContainerId;
use nacelle_base::files::remove_if_there;
use nacelle_base::jailed::JailedDir;
use nacelle_base::task::run_blocking;
use nacelle_base::timeline::unix_nanos;
use nacelle_image::{Artifacts, compress_file};
use nacelle_model::digest::Digest;
use nacelle_model::record::VmRecord;
use std::path::Path;

/// The result of an export.
#[derive(Debug)]
pub struct Exported {
    /// The artifact's digest.
    pub digest: Digest,
    /// The snapshot that contains the memory of a running VM.
    pub snapshot: Option<String>,
}

/// Exports a VM, which runs in this container, or is stopped. Dropping the future cancels the export and leaves nothing on this
/// node.
pub async fn export(
    runtime: &dyn PodRuntime,
    vm: &str,
    container: Option<ContainerId>,
    location: ArtifactLocation,
    progress: &Progress,
) -> Result<Exported, TransferError> {
    let vms = runtime.vms();
    let artifacts = runtime.images().artifacts(&location.name, location.auth, location.plain_http)?;
    let (record, lock) = match container {
        None => runtime.lock_vm(vm, "exported")?,
        // The VM's pod holds it; the lock keeps a second export away.
        Some(_) => (vms.get(vm)?, vms.lock(vm, "exported")?),
    };
    let work = vms.work_directory();
    let work = run_blocking("create a work directory", move || WorkDirectory::create(work)).await??;
    let export = async {
        let snapshot = container.is_some().then(|| format!("exported-{}", unix_nanos() / 1_000_000_000));
        let files = match (container, &snapshot) {
            (Some(container), Some(snapshot)) => {
                progress.begin("copying the files of the running VM".to_owned(), 0);
                live::copy(runtime, &container, &record, snapshot, &work).await?
            }
            _ => {
                let (dir, record) = (JailedDir::new(vms.directory(&record)), record.clone());
                run_blocking("list the files of the VM", move || list_files(&dir, &record)).await??
            }
        };
        // Copied files need no lock any more; a VM whose own files are sent must not change.
        let lock = Some(lock).filter(|_| snapshot.is_none());
        let digest = send(runtime, &record, files, &work, &artifacts, progress).await?;
        drop(lock);
        Ok(Exported { digest, snapshot })
    };
    let exported = export.await;
    work.remove().await;
    if let Ok(Exported { digest, .. }) = &exported {
        tracing::info!(vm, artifact = artifacts.name(), %digest, "exported a persistent VM");
    }
    exported
}

/// Compresses and sends the files, then publishes the artifact.
async fn send(
    runtime: &dyn PodRuntime,
    record: &VmRecord,
    files: VmFiles,
    work: &WorkDirectory,
    artifacts: &Artifacts,
    progress: &Progress,
) -> Result<Digest, TransferError> {
    let VmFiles { dir, files, secure_boot, snapshots } = files;
    let (mut sent_files, mut layers) = (Vec::new(), Vec::new());
    for (n, (kind, name)) in files.into_iter().enumerate() {
        let (to, moved) = (work.path().join(format!("{n}.zst")), progress.moved.clone());
        let (from, file) = (dir.clone(), name.clone());
        let (source, size) = run_blocking("open a file of the VM", move || open_file(&from, &file)).await??;
        progress.begin(format!("compressing {}", kind.description()), size);
        let packed =
            run_blocking("compress a file of the VM", move || compress_file(source, Path::new(&name), &to, &moved))
                .await??;
        progress.begin(format!("sending {}", kind.description()), packed.blob.size);
        artifacts.upload_file(&packed, &progress.moved).await?;
        let sent = packed.path;
        run_blocking("remove a file that was sent", move || remove_if_there(&sent)).await??;
        layers.push((packed.blob, format!("{}.zst", kind.file_name())));
        sent_files.push(ExportedFile { kind, size: packed.content.size, digest: packed.content.digest });
    }
    let (namespace, name) = record.id.split_once('/').unwrap_or_default();
    let needs_image = sent_files.iter().any(|file| matches!(file.kind, FileKind::Disk { over_image: true, .. }));
    let image = record.image.filter(|_| needs_image);
    let image = image.map(|id| BackingImage { id, names: registry_names(runtime, id) });
    let exported = ExportedVm {
        namespace: namespace.to_owned(),
        name: name.to_owned(),
        uuid: record.uuid.clone(),
        mac: record.mac.map(|byte| format!("{byte:02x}")).join(":"),
        created_at: record.created_at,
        machine_id: record.machine_id.clone(),
        image,
        secure_boot,
        snapshots,
        files: sent_files,
    };
    let invalid = |source| TransferError::InvalidArtifact { name: artifacts.name(), source };
    let config = exported.into_json().map_err(invalid)?;
    progress.begin("publishing the artifact".to_owned(), 0);
    Ok(artifacts.publish(&VM_ARTIFACT, config, layers).await?)
}

/// Returns the image's names in registries: those with a digest first.
fn registry_names(runtime: &dyn PodRuntime, id: Digest) -> Vec<String> {
    let known = runtime.images().list().into_iter().find(|image| image.id == id);
    known.into_iter().flat_map(|image| image.repo_digests.into_iter().chain(image.repo_tags)).take(8).collect()
}
