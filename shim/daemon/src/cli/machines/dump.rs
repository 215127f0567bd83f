//! Writes what the daemon sends to standard output, or to a file that appears only when it is complete.

use super::{output_error, status_error};
use anyhow::Context;
use nacelle_base::files::ensure_replaceable;
use nacelle_proto::vm;
use std::ffi::OsString;
use std::io::{self, IsTerminal};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use tokio::fs::File;
use tokio::io::{AsyncWrite, AsyncWriteExt};
use tokio::signal::unix::{SignalKind, signal};
use tonic::Streaming;

/// Writes the whole dump. After an interrupt or an error no file is left.
pub(super) async fn write(pieces: Streaming<vm::Piece>, output: Option<PathBuf>) -> anyhow::Result<()> {
    let Some(path) = output else {
        anyhow::ensure!(
            !std::io::stdout().is_terminal(),
            "cannot write a memory dump to a terminal: use --output FILE"
        );
        let mut stdout = tokio::io::stdout();
        return copy(pieces, &mut stdout, output_error).await;
    };
    let (partial, mut file) = PartialFile::create(&path)?;
    let mut terminated = signal(SignalKind::terminate())?;
    tokio::select! {
        copied = copy(pieces, &mut file, |error| anyhow::Error::new(error).context("cannot write the memory dump")) => copied?,
        interrupted = tokio::signal::ctrl_c() => {
            interrupted?;
            anyhow::bail!("interrupted");
        }
        _ = terminated.recv() => anyhow::bail!("terminated by SIGTERM"),
    }
    let failed = || format!("cannot write {}", path.display());
    file.sync_all().await.with_context(failed)?;
    partial.rename_to(&path).with_context(failed)
}

/// Copies the whole dump. `failed` converts errors of `to`.
async fn copy(
    mut pieces: Streaming<vm::Piece>,
    to: &mut (impl AsyncWrite + Unpin),
    failed: fn(io::Error) -> anyhow::Error,
) -> anyhow::Result<()> {
    while let Some(vm::Piece { data }) = pieces.message().await.map_err(status_error)? {
        to.write_all(&data).await.map_err(failed)?;
    }
    to.flush().await.map_err(failed)
}

/// A temporary file next to the output file, removed on drop.
struct PartialFile(PathBuf);

impl PartialFile {
    /// Creates the temporary file. A memory dump contains secrets: no other user may read it.
    fn create(path: &Path) -> anyhow::Result<(PartialFile, File)> {
        let mut name = path.file_name().context("--output is not the path of a file")?.to_owned();
        name.push(OsString::from(format!(".partial.{}", std::process::id())));
        let partial = path.with_file_name(name);
        ensure_replaceable(path)?;
        let file = std::fs::File::options().write(true).create_new(true).mode(0o600).open(&partial);
        let file = file.with_context(|| format!("cannot create {}", partial.display()))?;
        Ok((PartialFile(partial), File::from_std(file)))
    }

    fn rename_to(self, path: &Path) -> std::io::Result<()> {
        std::fs::rename(&self.0, path)
    }
}

impl Drop for PartialFile {
    fn drop(&mut self) {
        // The file no longer has this name after it was renamed to the output file.
        let _ = std::fs::remove_file(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[tokio::test]
    async fn the_output_file_appears_when_it_is_complete() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("memory.elf");
        let names = || std::fs::read_dir(directory.path()).unwrap().count();
        std::fs::write(&path, "old").unwrap();
        let (partial, mut file) = PartialFile::create(&path).unwrap();
        file.write_all(b"half").await.unwrap();
        assert_eq!(names(), 2);
        drop(partial);
        assert_eq!((names(), std::fs::read(&path).unwrap().as_slice()), (1, &b"old"[..]));
        let (partial, mut file) = PartialFile::create(&path).unwrap();
        file.write_all(b"whole").await.unwrap();
        file.flush().await.unwrap();
        partial.rename_to(&path).unwrap();
        assert_eq!((names(), std::fs::read(&path).unwrap().as_slice()), (1, &b"whole"[..]));
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        for other in ["/", "/dev/null"] {
            assert!(PartialFile::create(Path::new(other)).is_err(), "{other}");
        }
    }
}
