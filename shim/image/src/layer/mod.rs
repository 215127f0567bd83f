//! Decompresses one layer and converts its tar stream to a blob with the files' data and an index with everything else. Jailed
//! workers do this (`crate::worker`); the daemon only detects compression and checks the places of files that they report.

pub mod decompress;
pub mod file_tar;
pub mod index;
pub mod ingest;
pub mod tar;

use std::io::{self, Read};

/// The unit of everything that a guest maps, in bytes: the block size of the EROFS and the alignment of file data.
pub const BLOCK: u64 = 4096;

/// The size in bytes of the pieces in which streams are copied and files are written.
pub const PIECE: usize = 256 << 10;

/// The maximum length in bytes of the name of one file or directory.
pub const MAX_NAME: usize = 255;

/// The maximum length in bytes of a path and of a symlink target on Linux, without the final NUL.
pub const MAX_PATH: usize = 4095;

/// Reads a stream to its end.
pub fn drain(stream: &mut impl Read) -> io::Result<()> {
    let mut piece = vec![0; PIECE];
    loop {
        match stream.read(&mut piece) {
            Ok(0) => return Ok(()),
            Err(error) if error.kind() != io::ErrorKind::Interrupted => return Err(error),
            _ => {}
        }
    }
}

/// Splits a path into its parts as tools do that unpack layers into a directory: `.` and empty parts are dropped, and `..`
/// removes the part before it or has no effect at the root.
pub fn split_clean(path: &[u8]) -> Vec<&[u8]> {
    let mut parts: Vec<&[u8]> = Vec::new();
    for part in path.split(|&byte| byte == b'/') {
        match part {
            b"" | b"." => {}
            b".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_cannot_leave_the_root() {
        let join = |path: &[u8]| String::from_utf8(split_clean(path).join(&b'/')).unwrap();
        assert_eq!(join(b"./a//b/./c/"), "a/b/c");
        assert_eq!(join(b"../../etc/passwd"), "etc/passwd");
        assert_eq!(join(b"/a/../../b"), "b");
        assert_eq!(join(b"./"), "");
    }
}
