//! Compresses files of artifacts with zstd and decompresses them, with the digests of both forms. Decompressed data are
//! untrusted: no more is written than was announced, and the decoder's window is at most 8 MiB. All functions block on files.

use super::Descriptor;
use crate::ImageError;
use nacelle_base::files::at;
use nacelle_base::retry::retry_interrupted;
use nacelle_model::digest::Digest;
use sha2::{Digest as _, Sha256};
use std::fs::{File, OpenOptions};
use std::io::{self, BufReader, Read};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The compression level: zstd's default.
const ZSTD_LEVEL: i32 = 3;
/// The largest window that is decompressed, as a power of two. `ZSTD_LEVEL` itself uses 21.
const MAX_WINDOW_LOG: u32 = 23;
/// The bytes of one read, and the smallest hole that is kept.
const PIECE: usize = 64 << 10;

/// The number of bytes transferred so far, and a flag that cancels the transfer. Clones share both.
#[derive(Clone, Debug, Default)]
pub struct TransferProgress(Arc<(AtomicU64, AtomicBool)>);

impl TransferProgress {
    /// Returns the number of bytes transferred.
    pub fn bytes(&self) -> u64 {
        self.0.0.load(Ordering::Relaxed)
    }

    /// Sets the number of bytes transferred.
    pub fn set(&self, bytes: u64) {
        self.0.0.store(bytes, Ordering::Relaxed);
    }

    pub(crate) fn add(&self, bytes: u64) {
        self.0.0.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Cancels the transfer: threads that take part in it end soon.
    pub fn cancel(&self) {
        self.0.1.store(true, Ordering::Relaxed);
    }

    fn check_not_cancelled(&self) -> io::Result<()> {
        if self.0.1.load(Ordering::Relaxed) { Err(io::ErrorKind::Interrupted.into()) } else { Ok(()) }
    }
}

/// The digest and size of an uncompressed file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileContent {
    /// The digest of the whole file.
    pub digest: Digest,
    /// The file's size in bytes.
    pub size: u64,
}

/// A file that was compressed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CompressedFile {
    /// The path of the compressed file.
    pub path: PathBuf,
    /// The compressed form.
    pub blob: Descriptor,
    /// The uncompressed form.
    pub content: FileContent,
}

/// Compresses an open file (`from` is its name in errors) into a new file, which must not exist. `progress` counts the bytes that
/// are read.
pub fn compress_file(
    source: File,
    from: &Path,
    to: &Path,
    progress: &TransferProgress,
) -> Result<CompressedFile, ImageError> {
    let target = OpenOptions::new().write(true).create_new(true).mode(0o600).open(to).map_err(at("create", to))?;
    let mut content = HashingStream::new(source);
    let mut blob = HashingStream::new(&target);
    let packed = (|| {
        let mut encoder = zstd::stream::write::Encoder::new(&mut blob, ZSTD_LEVEL)?;
        let mut piece = vec![0; PIECE];
        loop {
            progress.check_not_cancelled()?;
            let count = retry_interrupted(|| content.read(&mut piece))?;
            let Some(read) = piece.get(..count).filter(|read| !read.is_empty()) else { break };
            io::Write::write_all(&mut encoder, read)?;
            progress.add(read.len() as u64);
        }
        encoder.finish().map(drop)
    })();
    packed.map_err(at("compress", from))?;
    let ((digest, size), (of_content, length)) = (blob.finish(), content.finish());
    let content = FileContent { digest: of_content, size: length };
    Ok(CompressedFile { path: to.to_owned(), blob: Descriptor { digest, size }, content })
}

/// Unpacks a stream into an empty file and syncs it; `path` is its name in errors. Fails if either form differs from what was
/// announced.
pub fn decompress(
    source: impl Read,
    blob: &Descriptor,
    content: &FileContent,
    to: &File,
    path: &Path,
    progress: &TransferProgress,
) -> Result<(), ImageError> {
    let what = format!("blob {}", blob.digest);
    // The limit is one byte more than announced, so that a longer stream is noticed.
    let mut source = HashingStream::new(source.take(blob.size.saturating_add(1)));
    let unpacked = decompress_pieces(&mut source, content, to, path, progress)?;
    // Bytes after the compressed data belong to the digest.
    io::copy(&mut source, &mut io::sink()).map_err(at("receive", path))?;
    let (digest, size) = source.finish();
    if digest != blob.digest || size != blob.size {
        return Err(ImageError::Digest { what, got: digest });
    }
    if unpacked != content.digest {
        return Err(ImageError::Digest { what: format!("the content {} of {what}", content.digest), got: unpacked });
    }
    to.set_len(content.size).and_then(|()| to.sync_all()).map_err(at("write", path))?;
    Ok(())
}

/// Writes the stream to the file and returns the digest of the content.
fn decompress_pieces(
    source: &mut impl Read,
    content: &FileContent,
    to: &File,
    path: &Path,
    progress: &TransferProgress,
) -> Result<Digest, ImageError> {
    let mut decoder = zstd::stream::read::Decoder::with_buffer(BufReader::with_capacity(PIECE, source))
        .and_then(|mut decoder| decoder.window_log_max(MAX_WINDOW_LOG).map(|()| decoder))
        .map_err(at("unpack", path))?;
    let (mut hash, mut done) = (Sha256::new(), 0u64);
    let mut piece = vec![0; PIECE];
    loop {
        progress.check_not_cancelled().map_err(at("write", path))?;
        let count = read_full(&mut decoder, &mut piece).map_err(at("unpack", path))?;
        let Some(read) = piece.get(..count).filter(|read| !read.is_empty()) else { break };
        if done + read.len() as u64 > content.size {
            return Err(ImageError::TooLarge { what: format!("the content {}", content.digest), limit: content.size });
        }
        hash.update(read);
        // A piece of zeros becomes a hole.
        if read.iter().any(|byte| *byte != 0) {
            to.write_all_at(read, done).map_err(at("write", path))?;
        }
        done += read.len() as u64;
        progress.add(read.len() as u64);
    }
    match done == content.size {
        true => Ok(Digest(hash.finalize().into())),
        false => Err(ImageError::Truncated {
            what: format!("the content {}", content.digest),
            got: done,
            want: content.size,
        }),
    }
}

/// Reads until the buffer is full or the stream ends.
fn read_full(from: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut filled = 0;
    while let Some(rest) = buffer.get_mut(filled..).filter(|rest| !rest.is_empty()) {
        match from.read(rest) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}

/// A stream that counts and hashes the bytes that pass.
struct HashingStream<T> {
    inner: T,
    hash: Sha256,
    size: u64,
}

impl<T> HashingStream<T> {
    fn new(inner: T) -> HashingStream<T> {
        HashingStream { inner, hash: Sha256::new(), size: 0 }
    }

    fn finish(self) -> (Digest, u64) {
        (Digest(self.hash.finalize().into()), self.size)
    }

    fn update(&mut self, bytes: &[u8]) {
        self.hash.update(bytes);
        self.size += bytes.len() as u64;
    }
}

impl<T: Read> Read for HashingStream<T> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(buffer)?;
        if let Some(read) = buffer.get(..count) {
            self.update(read);
        }
        Ok(count)
    }
}

impl<T: io::Write> io::Write for HashingStream<T> {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        let count = self.inner.write(buffer)?;
        if let Some(written) = buffer.get(..count) {
            self.update(written);
        }
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    fn unpacked(packed: &[u8], blob: &Descriptor, content: &FileContent) -> Result<Vec<u8>, ImageError> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        let file = File::create(&path).unwrap();
        decompress(packed, blob, content, &file, &path, &TransferProgress::default())?;
        Ok(std::fs::read(&path).unwrap())
    }

    #[test]
    fn a_file_is_unpacked_with_its_holes() {
        let directory = tempfile::tempdir().unwrap();
        let bytes = [vec![7; 100], vec![0; 4 << 20], b"end".to_vec(), vec![0; 3 * PIECE]].concat();
        let packed = super::super::sample(directory.path(), "a", &bytes);
        assert!(packed.blob.size < 4096 && packed.content.size == bytes.len() as u64);
        let stored = std::fs::read(&packed.path).unwrap();
        assert_eq!(packed.blob, Descriptor { digest: Digest::of(&stored), size: stored.len() as u64 });
        let (back, progress) = (directory.path().join("b"), TransferProgress::default());
        let file = File::create(&back).unwrap();
        decompress(stored.as_slice(), &packed.blob, &packed.content, &file, &back, &progress).unwrap();
        assert!(std::fs::read(&back).unwrap() == bytes && progress.bytes() == bytes.len() as u64);
        assert!(std::fs::metadata(&back).unwrap().blocks() * 512 < 1 << 20, "zeros take no room");
        let stored_file = || File::open(&packed.path).unwrap();
        assert!(compress_file(stored_file(), &packed.path, &packed.path, &progress).is_err(), "nothing is overwritten");
        progress.cancel();
        assert!(decompress(stored.as_slice(), &packed.blob, &packed.content, &file, &back, &progress).is_err());
        assert!(compress_file(stored_file(), &back, &directory.path().join("c"), &progress).is_err());
    }

    #[test]
    fn content_that_differs_from_its_descriptor_is_rejected() {
        let directory = tempfile::tempdir().unwrap();
        let CompressedFile { path, blob, content } = super::super::sample(directory.path(), "a", &[5; 100_000]);
        let stored = std::fs::read(&path).unwrap();
        assert_eq!(unpacked(&stored, &blob, &content).unwrap(), vec![5; 100_000]);
        let with = |size: u64| FileContent { size, ..content.clone() };
        for size in [0, 99_999, 100_001, u64::MAX] {
            let error = unpacked(&stored, &blob, &with(size)).unwrap_err().to_string();
            assert!(error.contains("larger than") || error.contains("ends after"), "{error}");
        }
        let other = FileContent { digest: Digest([1; 32]), ..content.clone() };
        assert!(unpacked(&stored, &blob, &other).unwrap_err().to_string().contains("the content"));
        for blob in
            [Descriptor { size: blob.size - 1, ..blob.clone() }, Descriptor { size: blob.size + 1, ..blob.clone() }]
        {
            assert!(unpacked(&stored, &blob, &content).is_err());
        }
        // Trailing bytes, a flipped bit, a truncated stream, and bytes that are not zstd.
        let mut longer = stored.clone();
        longer.push(0);
        let mut other = stored.clone();
        *other.last_mut().unwrap() ^= 1;
        for bytes in [&longer[..], &other, &stored[..stored.len() / 2], b"rubbish", b""] {
            assert!(unpacked(bytes, &blob, &content).is_err());
        }
        // A window of 128 MiB.
        let mut encoder = zstd::stream::write::Encoder::new(Vec::new(), 1).unwrap();
        encoder.window_log(27).unwrap();
        io::Write::write_all(&mut encoder, &[5; 100_000]).unwrap();
        let wide = encoder.finish().unwrap();
        let blob = Descriptor { digest: Digest::of(&wide), size: wide.len() as u64 };
        let error = nacelle_base::Chain(&unpacked(&wide, &blob, &content).unwrap_err()).to_string();
        assert!(error.contains("emory") || error.contains("indow"), "{error}");
    }
}
