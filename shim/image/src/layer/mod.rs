//! Owns: one layer: from a tar stream to a blob with the files' data and an index with everything else.
//! May use: nothing else of this crate but digests.

pub mod index;
pub mod ingest;
pub mod tar;

/// The unit of everything that a guest maps: the block size of the EROFS and the alignment of file data.
pub const BLOCK: u64 = 4096;

/// The longest name of one file or folder.
pub const MAX_NAME: usize = 255;

/// The longest path and the longest symlink target that Linux takes, without the final NUL.
pub const MAX_PATH: usize = 4095;

/// Splits a path into its parts, in the way in which tools that unpack layers into a folder do: `.` and empty parts
/// vanish, `..` takes the part before it away and stays at the root when there is none.
pub fn clean(path: &[u8]) -> Vec<&[u8]> {
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
        let join = |path: &[u8]| String::from_utf8(clean(path).join(&b'/')).unwrap();
        assert_eq!(join(b"./a//b/./c/"), "a/b/c");
        assert_eq!(join(b"../../etc/passwd"), "etc/passwd");
        assert_eq!(join(b"/a/../../b"), "b");
        assert_eq!(join(b"./"), "");
    }
}
