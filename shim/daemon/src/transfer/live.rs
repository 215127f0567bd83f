//! Copies the files of a running VM: its keeper takes a snapshot and pauses it while they are copied. If this process ends
//! meanwhile, the keeper notices, and resumes the VM.

use super::export::{Listed, list, opened};
use super::{TransferError, WorkDirectory};
use crate::lifecycle::Node;
use crate::streaming::Guests;
use nacelle_base::files::at;
use nacelle_base::jailed::JailedDir;
use nacelle_base::task::run_blocking;
use nacelle_model::record::VmRecord;
use nacelle_stream::{Exec, Guests as _, Process};
use std::fs::OpenOptions;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::net::UnixStream;

/// The longest error text in bytes.
const WORDS: u64 = 2000;

/// Copies the files of the VM in this container into a directory, in a consistent state, with a snapshot of this name.
pub async fn copy(
    node: &Node,
    container: String,
    record: &VmRecord,
    snapshot: &str,
    to: &WorkDirectory,
) -> Result<Listed, TransferError> {
    let args = ["@vm", "hold", snapshot].map(str::to_owned).to_vec();
    let exec = Exec { container, args, tty: false, stdin: false, stdout: true, stderr: true };
    let Process { stdout, stderr, end, .. } = Guests::new(node.clone()).exec(&exec).await?;
    let (Some(mut beats), Some(stderr)) = (stdout, stderr) else {
        return Err(TransferError::NotHeld { words: "the command has no output".to_owned() });
    };
    let copied = async {
        if !beat(&mut beats).await {
            return Err(refusal(stderr).await);
        }
        let from = JailedDir::new(node.parts().vms.directory(record));
        let (record, to) = (record.clone(), to.path().to_owned());
        let listed = run_blocking("copy the files of the VM", move || copies(&from, &record, &to)).await??;
        // A heartbeat after the copy proves that the VM was paused all the time.
        old(&mut beats);
        if !beat(&mut beats).await {
            return Err(refusal(stderr).await);
        }
        Ok(listed)
    };
    let copied = copied.await;
    drop((beats, end));
    copied
}

/// Waits for a heartbeat; returns `false` if none will come.
async fn beat(beats: &mut UnixStream) -> bool {
    beats.read_u8().await.is_ok()
}

/// Discards the heartbeats that have arrived.
fn old(beats: &mut UnixStream) {
    let mut buffer = [0; 256];
    while matches!(beats.try_read(&mut buffer), Ok(count) if count > 0) {}
}

async fn refusal(stderr: impl AsyncRead + Unpin) -> TransferError {
    let mut words = Vec::new();
    // A partial error text is better than none.
    let _ = stderr.take(WORDS).read_to_end(&mut words).await;
    let words = String::from_utf8_lossy(&words);
    let words = words.trim();
    TransferError::NotHeld { words: if words.is_empty() { "it does not say why" } else { words }.to_owned() }
}

/// Copies the files; blocks are shared where the file system supports it. The VM's own processes may change the directory
/// meanwhile: of each file only the size that it has when its copy begins is copied. Blocks.
fn copies(from: &JailedDir, record: &VmRecord, to: &Path) -> Result<Listed, TransferError> {
    let mut listed = list(from, record)?;
    for (kept, name) in &mut listed.files {
        let copy = to.join(kept.file());
        let (source, length) = opened(from, name)?;
        let made = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&copy);
        std::io::copy(&mut source.take(length), &mut made.map_err(at("create", &copy))?).map_err(at("copy", &copy))?;
        *name = kept.file();
    }
    listed.dir = JailedDir::new(to);
    Ok(listed)
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
        let from = directory.path().join("machine");
        fs::create_dir(&from).unwrap();
        fs::write(from.join("disk0.qcow2"), qcow2::empty_image(1 << 20)).unwrap();
        symlink("/etc/shadow", from.join("disk1.qcow2")).unwrap();
        symlink("disk0.qcow2", from.join("disk2.qcow2")).unwrap();
        nix::unistd::mkfifo(&from.join("disk3.qcow2"), Mode::S_IRWXU).unwrap();
        fs::create_dir(from.join("disk4.qcow2")).unwrap();
        (directory, JailedDir::new(from), VmRecord::new("default", "db", &[1; 22], 0))
    }

    #[test]
    fn only_regular_files_of_a_machine_leave_the_node() {
        let (directory, from, record) = hostile();
        let listed = copies(&from, &record, &directory.path().join("copy")).unwrap();
        let names: Vec<&str> = listed.files.iter().map(|(_, name)| name.as_str()).collect();
        assert_eq!(names, ["disk0.qcow2"]);
        assert_eq!(opened(&listed.dir, "disk0.qcow2").unwrap().1, qcow2::empty_image(1 << 20).len() as u64);
    }

    #[test]
    fn what_takes_the_place_of_a_file_that_was_listed_is_not_opened() {
        let (directory, from, _) = hostile();
        let disk = directory.path().join("machine/disk0.qcow2");
        for other in ["disk1.qcow2", "disk3.qcow2"] {
            fs::remove_file(&disk).unwrap();
            fs::rename(directory.path().join("machine").join(other), &disk).unwrap();
            let error = opened(&from, "disk0.qcow2").unwrap_err();
            assert_eq!(error.source.kind(), std::io::ErrorKind::InvalidData, "{error}: {}", error.source);
        }
    }

    #[test]
    fn a_mark_or_a_list_that_is_too_large_or_no_file_ends_the_export() {
        for (name, bytes) in [("disk0.image", 129), (nacelle_keeper::HOTPLUG_LIST, (64 << 10) + 1)] {
            let (directory, from, record) = hostile();
            let file = directory.path().join("machine").join(name);
            fs::write(&file, vec![b' '; bytes]).unwrap();
            assert!(list(&from, &record).is_err(), "{name} of {bytes} bytes");
            fs::remove_file(&file).unwrap();
            nix::unistd::mkfifo(&file, Mode::S_IRWXU).unwrap();
            assert!(list(&from, &record).is_err(), "{name} is a FIFO");
        }
    }
}
