//! Owns: copies of the files of a machine that runs: its keeper takes a snapshot and has it stand still while they are made. If this process
//! ends meanwhile, the keeper notices, and the machine goes on.

use super::export::{Listed, list};
use super::{Folder, TransferError, blocking};
use crate::lifecycle::Node;
use crate::store::VmRecord;
use crate::streaming::Guests;
use nacelle_base::files::at;
use nacelle_stream::{Exec, Guests as _, Process};
use nix::fcntl::OFlag;
use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::net::UnixStream;

/// Bytes of a refusal's words.
const WORDS: u64 = 2000;

/// Copies what the machine in this container has kept into a folder, as it is at one moment, with a snapshot of this name.
pub async fn copy(
    node: &Node,
    container: String,
    record: &VmRecord,
    snapshot: &str,
    to: &Folder,
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
        let (from, record, to) = (node.parts().vms.folder(record), record.clone(), to.path().to_owned());
        let listed = blocking(move || copies(&from, &record, &to)).await?;
        // One that comes after all is copied says that nothing has changed meanwhile.
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

/// Waits for one; false: there will be none.
async fn beat(beats: &mut UnixStream) -> bool {
    beats.read_u8().await.is_ok()
}

/// Takes those that have come.
fn old(beats: &mut UnixStream) {
    let mut buffer = [0; 256];
    while matches!(beats.try_read(&mut buffer), Ok(count) if count > 0) {}
}

async fn refusal(stderr: impl AsyncRead + Unpin) -> TransferError {
    let mut words = Vec::new();
    // What can be read of them is told.
    let _ = stderr.take(WORDS).read_to_end(&mut words).await;
    let words = String::from_utf8_lossy(&words);
    let words = words.trim();
    TransferError::NotHeld { words: if words.is_empty() { "it does not say why" } else { words }.to_owned() }
}

/// Blocks are shared where the file system can. The machine's own processes may change the folder meanwhile: no link is followed. Blocks.
fn copies(from: &Path, record: &VmRecord, to: &Path) -> Result<Listed, TransferError> {
    let mut listed = list(from, record)?;
    for (kept, path) in &mut listed.files {
        let copy = to.join(kept.file());
        let file = |options: &mut OpenOptions, path: &Path| {
            options.mode(0o600).custom_flags(OFlag::O_NOFOLLOW.bits()).open(path)
        };
        let mut source = file(OpenOptions::new().read(true), path).map_err(at("open", path))?;
        let mut target = file(OpenOptions::new().write(true).create_new(true), &copy).map_err(at("create", &copy))?;
        std::io::copy(&mut source, &mut target).map_err(at("copy", path))?;
        *path = copy;
    }
    Ok(listed)
}
