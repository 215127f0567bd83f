//! Checks the names in a guest's requests. A name must be an entry of the directory that the request is about; a request
//! with any other name is rejected before a file is accessed. Linux sends no such names.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

/// `struct fuse_in_header`.
const IN_HEADER: usize = 40;

/// Returns whether all names in a request are plain names. Requests without names, and invalid requests, pass.
pub(crate) fn are_plain(request: &[u8]) -> bool {
    let Some(opcode) = request.get(4..8).and_then(|bytes| bytes.try_into().ok()).map(u32::from_le_bytes) else {
        return true;
    };
    // The offset of the names, and how many there are (linux/fuse.h). The name in a TMPFILE request is never used.
    let (offset, count) = match opcode {
        1 | 6 | 10 | 11 => (0, 1), // LOOKUP, SYMLINK (the target follows), UNLINK, RMDIR
        9 | 13 => (8, 1),          // MKDIR, LINK
        8 | 35 => (16, 1),         // MKNOD, CREATE
        12 => (8, 2),              // RENAME
        45 => (16, 2),             // RENAME2
        _ => return true,
    };
    let names = request.get(IN_HEADER + offset..).unwrap_or_default();
    names.split(|byte| *byte == 0).take(count).all(|name| !matches!(name, b"." | b"..") && !name.contains(&b'/'))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn request(opcode: u32, before: usize, names: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0; IN_HEADER + before];
        bytes[4..8].copy_from_slice(&opcode.to_le_bytes());
        bytes.extend(names);
        bytes
    }

    const WITH_NAMES: [(u32, usize); 10] =
        [(1, 0), (6, 0), (8, 16), (9, 8), (10, 0), (11, 0), (12, 8), (13, 8), (35, 16), (45, 16)];

    #[test]
    fn names_that_lead_out_of_the_directory_are_rejected() {
        for (opcode, before) in WITH_NAMES {
            for name in ["..", ".", "/", "../x", "a/b", "/etc", "a/.."] {
                assert!(!are_plain(&request(opcode, before, format!("{name}\0rest\0").as_bytes())), "{opcode} {name}");
                let second = are_plain(&request(opcode, before, format!("a\0{name}\0").as_bytes()));
                assert_eq!(second, !matches!(opcode, 12 | 45), "{opcode} {name}");
            }
            for name in ["a", "...", "..a", ".a", "-"] {
                assert!(are_plain(&request(opcode, before, format!("{name}\0b\0").as_bytes())), "{opcode} {name}");
            }
        }
        // The target of a symbolic link may be any text: the guest follows it.
        assert!(are_plain(&request(6, 0, b"link\0../../etc\0")));
    }

    proptest! {
        #[test]
        fn any_bytes_can_be_looked_at(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            are_plain(&bytes);
        }

        #[test]
        fn a_name_that_passes_has_no_way_out(
            which in 0..WITH_NAMES.len(), name in proptest::collection::vec(prop_oneof![Just(b'.'), Just(b'/'), any::<u8>()], 0..6),
        ) {
            let (opcode, before) = WITH_NAMES[which];
            let bytes = request(opcode, before, &name);
            let first: &[u8] = name.split(|byte| *byte == 0).next().unwrap();
            if are_plain(&bytes) {
                prop_assert!(first != b".." && !first.contains(&b'/'));
            }
        }
    }
}
