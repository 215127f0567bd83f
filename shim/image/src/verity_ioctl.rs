//! Enables and measures fs-verity (Documentation/filesystems/fsverity.rst). It makes a file read-only for good, and the kernel compares
//! each block with a Merkle tree when it reads the block from the disk: a changed block fails with EIO. Files of the store have SHA-256,
//! blocks of 4096 bytes and no salt, so that the same bytes always have the same fs-verity digest. They can still be renamed and removed.

#![allow(unsafe_code, reason = "the two ioctls have no safe wrappers")]

use nacelle_model::digest::Digest;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::time::{Duration, Instant};

/// `FS_VERITY_HASH_ALG_SHA256` of linux/fsverity.h.
const SHA256: u16 = 1;
/// The size of the blocks that the kernel verifies, in bytes. The file system needs blocks of this size at least.
const BLOCK_BYTES: u32 = 4096;
/// How long to wait for the end of other descriptors that can write to the file: those of a process that this one has forked and that has
/// not executed its program yet, and of a worker that was killed.
const WRITERS_TIMEOUT: Duration = Duration::from_secs(2);
const WRITERS_PAUSE: Duration = Duration::from_millis(2);

/// `struct fsverity_enable_arg` of linux/fsverity.h.
#[repr(C)]
pub struct EnableRequest {
    version: u32,
    hash_algorithm: u32,
    block_size: u32,
    salt_size: u32,
    salt: u64,
    signature_size: u32,
    reserved1: u32,
    signature: u64,
    reserved2: [u64; 11],
}

/// `struct fsverity_digest` of linux/fsverity.h with room for a SHA-256.
#[repr(C)]
pub struct MeasureReply {
    algorithm: u16,
    /// The room before the call, the length of the digest after it, in bytes.
    size: u16,
    digest: [u8; 32],
}

nix::ioctl_write_ptr!(
    /// `FS_IOC_ENABLE_VERITY`.
    fs_ioc_enable_verity,
    b'f',
    133,
    EnableRequest
);

// The number has the size of `struct fsverity_digest` without the digest.
nix::ioctl_readwrite_bad!(
    /// `FS_IOC_MEASURE_VERITY`.
    fs_ioc_measure_verity,
    nix::request_code_readwrite!(b'f', 134, 4),
    MeasureReply
);

/// What the kernel knows of a file's fs-verity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Measurement {
    /// The file has fs-verity and this digest.
    Enabled(Digest),
    /// The file has no fs-verity, and its file system offers it.
    Disabled,
    /// The file system or the kernel does not offer fs-verity.
    Unsupported,
}

/// Enables fs-verity for a file that is open for reading only. Succeeds if the file has it already. Reads the whole file and writes its
/// Merkle tree, 1/127 of its length, behind its end. The caller syncs the file. Blocks.
///
/// # Errors
///
/// ETXTBSY: a descriptor can write to the file, after [`WRITERS_TIMEOUT`], too. ENOTTY, EOPNOTSUPP, EINVAL and others: see
/// [`is_unsupported`].
pub fn enable_verity(file: &File) -> io::Result<()> {
    let request = EnableRequest {
        version: 1,
        hash_algorithm: SHA256.into(),
        block_size: BLOCK_BYTES,
        salt_size: 0,
        salt: 0,
        signature_size: 0,
        reserved1: 0,
        signature: 0,
        reserved2: [0; 11],
    };
    let deadline = Instant::now() + WRITERS_TIMEOUT;
    loop {
        // SAFETY: the descriptor is open, and the kernel reads one `fsverity_enable_arg`, which lives until the call returns and has
        // neither salt nor signature.
        match unsafe { fs_ioc_enable_verity(file.as_raw_fd(), &raw const request) } {
            Ok(_) | Err(nix::Error::EEXIST) => return Ok(()),
            Err(nix::Error::EINTR) => {}
            // EBUSY: another caller is enabling it at the moment.
            Err(nix::Error::ETXTBSY | nix::Error::EBUSY) if Instant::now() < deadline => {
                std::thread::sleep(WRITERS_PAUSE);
            }
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// Measures a file, or a directory, which never has it. Takes constant time. Blocks.
pub fn measure_verity(file: &File) -> io::Result<Measurement> {
    let mut reply = MeasureReply { algorithm: 0, size: 32, digest: [0; 32] };
    // SAFETY: the descriptor is open, and the kernel writes at most `size` bytes behind the two numbers; the structure has room for them
    // and lives until the call returns.
    match unsafe { fs_ioc_measure_verity(file.as_raw_fd(), &raw mut reply) } {
        Ok(_) if (reply.algorithm, reply.size) == (SHA256, 32) => Ok(Measurement::Enabled(Digest(reply.digest))),
        // Another program has enabled it with other parameters. No digest of the store has this form.
        Ok(_) | Err(nix::Error::EOVERFLOW) => Ok(Measurement::Disabled),
        Err(nix::Error::ENODATA) => Ok(Measurement::Disabled),
        Err(nix::Error::ENOTTY | nix::Error::EOPNOTSUPP) => Ok(Measurement::Unsupported),
        Err(errno) => Err(errno.into()),
    }
}

/// Measures the file at this path. Blocks.
pub fn measure_path(path: &Path) -> io::Result<Measurement> {
    measure_verity(&File::open(path)?)
}

/// Returns whether an error of [`enable_verity`] comes neither from the disk nor from its free space: the file can do without fs-verity.
/// Besides missing support that is an algorithm that the kernel lacks (ENOPKG), the rule that each file needs a signature (EPERM,
/// `fs.verity.require_signatures`), a file that is too large (EFBIG) and a writer that does not end (ETXTBSY).
pub fn is_unsupported(error: &io::Error) -> bool {
    let disk = [libc::EIO, libc::EUCLEAN, libc::ENOSPC, libc::EDQUOT, libc::EROFS, libc::ENOMEM];
    error.raw_os_error().is_some_and(|number| !disk.contains(&number))
}

/// Returns whether [`File::open`] has failed because the file's fs-verity is damaged (EINVAL).
pub fn is_verity_open_error(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::EINVAL)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_structures_have_the_sizes_of_the_kernel() {
        assert_eq!(size_of::<EnableRequest>(), 128);
        assert_eq!(std::mem::offset_of!(MeasureReply, digest), 4);
        assert_eq!(nix::request_code_readwrite!(b'f', 134, 4), 0xc004_6686);
        assert_eq!(nix::request_code_write!(b'f', 133, size_of::<EnableRequest>()), 0x4080_6685);
    }

    #[test]
    fn a_file_system_without_verity_says_so() {
        // tmpfs has no fs-verity in any kernel.
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = directory.path().join("f");
        std::fs::write(&path, b"content").unwrap();
        assert_eq!(measure_path(&path).unwrap(), Measurement::Unsupported);
        assert!(is_unsupported(&enable_verity(&File::open(&path).unwrap()).unwrap_err()));
        let full = io::Error::from_raw_os_error(libc::ENOSPC);
        assert!(!is_unsupported(&full), "a full disk fails the pull");
    }
}
