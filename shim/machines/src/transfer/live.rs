//! Copies the files of a running VM: its keeper takes a snapshot and pauses it while they are copied. If this process ends
//! meanwhile, the keeper notices, and resumes the VM.

use super::files::{VmFiles, list_files, open_file};
use super::{TransferError, WorkDirectory};
use crate::runtime::{ExecStreams, PodRuntime};
use nacelle_base::ContainerId;
use nacelle_base::files::at;
use nacelle_base::jailed::JailedDir;
use nacelle_base::task::run_blocking;
use nacelle_model::record::VmRecord;
use std::fs::OpenOptions;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::net::UnixStream;

/// The longest error text in bytes.
const MAX_ERROR_TEXT: u64 = 2000;

/// Copies the files of the VM in this container into a directory, in a consistent state, with a snapshot of this name.
pub async fn copy(
    runtime: &dyn PodRuntime,
    container: &ContainerId,
    record: &VmRecord,
    snapshot: &str,
    to: &WorkDirectory,
) -> Result<VmFiles, TransferError> {
    let args = ["@vm", "hold", snapshot].map(str::to_owned).to_vec();
    let ExecStreams { stdout: mut heartbeats, stderr, exit_code } = runtime.start_exec(container, args).await?;
    let copy = async {
        if !wait_for_heartbeat(&mut heartbeats).await {
            return Err(keeper_error(stderr).await);
        }
        let from = JailedDir::new(runtime.vms().directory(record));
        let (record, to) = (record.clone(), to.path().to_owned());
        let files = run_blocking("copy the files of the VM", move || copy_files(&from, &record, &to)).await??;
        // A heartbeat after the copy proves that the VM was paused all the time.
        discard_heartbeats(&mut heartbeats);
        if !wait_for_heartbeat(&mut heartbeats).await {
            return Err(keeper_error(stderr).await);
        }
        Ok(files)
    };
    let copied = copy.await;
    drop((heartbeats, exit_code));
    copied
}

/// Waits for a heartbeat; returns `false` if none will come.
async fn wait_for_heartbeat(heartbeats: &mut UnixStream) -> bool {
    heartbeats.read_u8().await.is_ok()
}

/// Discards the heartbeats that have arrived.
fn discard_heartbeats(heartbeats: &mut UnixStream) {
    let mut buffer = [0; 256];
    while matches!(heartbeats.try_read(&mut buffer), Ok(count) if count > 0) {}
}

async fn keeper_error(stderr: impl AsyncRead + Unpin) -> TransferError {
    let mut text = Vec::new();
    // A partial error text is better than none.
    let _ = stderr.take(MAX_ERROR_TEXT).read_to_end(&mut text).await;
    let text = String::from_utf8_lossy(&text);
    let text = text.trim();
    TransferError::NotPaused {
        message: if text.is_empty() { "the keeper reported no reason" } else { text }.to_owned(),
    }
}

/// Copies the files; blocks are shared where the file system supports it. The VM's own processes may change the directory
/// meanwhile: of each file only the size that it has when its copy begins is copied. Blocks.
fn copy_files(from: &JailedDir, record: &VmRecord, to: &Path) -> Result<VmFiles, TransferError> {
    let mut files = list_files(from, record)?;
    for (kind, name) in &mut files.files {
        let copy = to.join(kind.file_name());
        let (source, length) = open_file(from, name)?;
        let target = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&copy);
        let mut target = target.map_err(at("create", &copy))?;
        std::io::copy(&mut source.take(length), &mut target).map_err(at("copy", &copy))?;
        *name = kind.file_name();
    }
    files.dir = JailedDir::new(to);
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacelle_keeper::qcow2;
    use nix::sys::stat::Mode;
    use std::fs;
    use std::os::unix::fs::symlink;

    /// Returns the directory of a VM whose processes are compromised.
    fn hostile() -> (tempfile::TempDir, JailedDir, VmRecord) {
        let directory = tempfile::tempdir().unwrap();
        fs::create_dir(directory.path().join("copy")).unwrap();
        let from = directory.path().join("vm");
        fs::create_dir(&from).unwrap();
        fs::write(from.join("disk0.qcow2"), qcow2::empty_image(1 << 20)).unwrap();
        symlink("/etc/shadow", from.join("disk1.qcow2")).unwrap();
        symlink("disk0.qcow2", from.join("disk2.qcow2")).unwrap();
        nix::unistd::mkfifo(&from.join("disk3.qcow2"), Mode::S_IRWXU).unwrap();
        fs::create_dir(from.join("disk4.qcow2")).unwrap();
        (directory, JailedDir::new(from), VmRecord::new("default", "db", &[1; 22], 0))
    }

    #[test]
    fn only_regular_files_of_a_vm_are_exported() {
        let (directory, from, record) = hostile();
        let listed = copy_files(&from, &record, &directory.path().join("copy")).unwrap();
        let names: Vec<&str> = listed.files.iter().map(|(_, name)| name.as_str()).collect();
        assert_eq!(names, ["disk0.qcow2"]);
        assert_eq!(open_file(&listed.dir, "disk0.qcow2").unwrap().1, qcow2::empty_image(1 << 20).len() as u64);
    }

    #[test]
    fn a_link_that_replaces_a_listed_file_is_not_followed() {
        let (directory, from, _) = hostile();
        let disk = directory.path().join("vm/disk0.qcow2");
        for other in ["disk1.qcow2", "disk3.qcow2"] {
            fs::remove_file(&disk).unwrap();
            fs::rename(directory.path().join("vm").join(other), &disk).unwrap();
            let error = open_file(&from, "disk0.qcow2").unwrap_err();
            assert_eq!(error.source.kind(), std::io::ErrorKind::InvalidData, "{error}: {}", error.source);
        }
    }

    #[test]
    fn an_oversized_or_irregular_metadata_file_fails_the_export() {
        for (name, bytes) in [("disk0.image", 129), (nacelle_keeper::HOTPLUG_LIST, (64 << 10) + 1)] {
            let (directory, from, record) = hostile();
            let file = directory.path().join("vm").join(name);
            fs::write(&file, vec![b' '; bytes]).unwrap();
            assert!(list_files(&from, &record).is_err(), "{name} of {bytes} bytes");
            fs::remove_file(&file).unwrap();
            nix::unistd::mkfifo(&file, Mode::S_IRWXU).unwrap();
            assert!(list_files(&from, &record).is_err(), "{name} is a FIFO");
        }
    }
}
