//! Tests reading a volume: what is read, in what order, and what is rejected.

use super::*;
use proptest::prelude::*;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

fn open_path(path: &Path) -> OwnedFd {
    File::open(path).unwrap().into()
}

/// Reads a whole volume, with the bytes of each file joined.
fn read_volume(path: &Path, live: bool, known: Option<&[u8]>) -> Result<Vec<TreeEntry>, VolumeReadError> {
    let mut reader = VolumeReader::begin(open_path(path).as_fd(), live, known)?;
    let mut all: Vec<TreeEntry> = Vec::new();
    loop {
        let (part, last) = reader.next_part()?;
        let size: usize = part.iter().map(|entry| entry.path.len() + entry.data.len() + ENTRY_BYTES).sum();
        assert!(size <= 2 * PART_BYTES + MAX_PATH + ENTRY_BYTES, "{size}");
        for entry in part {
            match all.last_mut() {
                Some(open) if open.more => {
                    assert_eq!(open.path, entry.path);
                    open.data.extend(entry.data);
                    open.more = entry.more;
                }
                _ => all.push(entry),
            }
        }
        if last {
            return Ok(all);
        }
    }
}

fn paths(entries: &[TreeEntry]) -> Vec<String> {
    entries.iter().map(|entry| display_path(&entry.path)).collect()
}

/// Creates a volume as kubelet writes it, with `..one` as the present directory.
fn kubelet_volume() -> tempfile::TempDir {
    let volume = tempfile::tempdir().unwrap();
    let data = volume.path().join("..one");
    fs::create_dir_all(data.join("deep/er")).unwrap();
    fs::write(data.join("key"), "value").unwrap();
    fs::write(data.join("deep/er/key"), vec![b'x'; PART_BYTES * 2]).unwrap();
    fs::set_permissions(data.join("key"), fs::Permissions::from_mode(0o640)).unwrap();
    symlink("..one", volume.path().join(DATA)).unwrap();
    symlink("..data/key", volume.path().join("key")).unwrap();
    symlink("..data/deep", volume.path().join("deep")).unwrap();
    // A directory that kubelet has not removed yet, or has just begun to write.
    fs::create_dir(volume.path().join("..two")).unwrap();
    fs::write(volume.path().join("..two/other"), "").unwrap();
    symlink("..two", volume.path().join("..data_tmp")).unwrap();
    volume
}

#[test]
fn a_kubelet_volume_is_read_as_its_links_and_the_current_data_directory() {
    let volume = kubelet_volume();
    let entries = read_volume(volume.path(), true, None).unwrap();
    let expected = [
        "the volume itself",
        "..data",
        "deep",
        "key",
        "..one",
        "..one/deep",
        "..one/deep/er",
        "..one/deep/er/key",
        "..one/key",
    ];
    assert_eq!(paths(&entries), expected);
    let entry_of = |path: &str| entries.iter().find(|entry| entry.path == path.as_bytes()).unwrap();
    assert_eq!((entry_of("..one/key").data.as_slice(), entry_of("..one/key").mode), (b"value".as_slice(), 0o100640));
    assert_eq!(entry_of("..one/deep/er/key").data.len(), PART_BYTES * 2);
    assert_eq!(entry_of("key").data, b"..data/key");
    assert_eq!(entry_of("..data").data, b"..one");
    // A directory that is known already is not read again.
    assert_eq!(paths(&read_volume(volume.path(), true, Some(b"..one")).unwrap()), expected[..4]);
    assert_eq!(read_volume(volume.path(), true, Some(b"..two")).unwrap().len(), expected.len());
}

#[test]
fn a_change_during_the_read_is_detected() {
    let volume = kubelet_volume();
    let mut reader = VolumeReader::begin(open_path(volume.path()).as_fd(), true, None).unwrap();
    fs::rename(volume.path().join("..data_tmp"), volume.path().join(DATA)).unwrap();
    fs::remove_dir_all(volume.path().join("..one")).unwrap();
    let end = loop {
        match reader.next_part() {
            Ok((_, false)) => {}
            other => break other,
        }
    };
    assert!(matches!(end, Err(VolumeReadError::Changed)), "{end:?}");
    assert_eq!(end.unwrap_err().reason(), CopyInFailure::Changed);
    // The same if all of the files still existed.
    let volume = kubelet_volume();
    let mut reader = VolumeReader::begin(open_path(volume.path()).as_fd(), true, Some(b"..one")).unwrap();
    fs::rename(volume.path().join("..data_tmp"), volume.path().join(DATA)).unwrap();
    assert!(matches!(reader.next_part(), Err(VolumeReadError::Changed)));
}

#[test]
fn files_and_directories_are_read_as_they_are() {
    let volume = kubelet_volume();
    let file = read_volume(&volume.path().join("..one/key"), false, None).unwrap();
    assert_eq!((file.len(), file[0].data.as_slice(), file[0].path.len()), (1, b"value".as_slice(), 0));
    let directory = read_volume(&volume.path().join("..one/deep"), false, None).unwrap();
    assert_eq!(paths(&directory), ["the volume itself", "er", "er/key"]);
    let empty = tempfile::tempdir().unwrap();
    assert_eq!(read_volume(empty.path(), false, None).unwrap().len(), 1);
    fs::write(empty.path().join("full"), vec![1; PART_BYTES]).unwrap();
    assert_eq!(read_volume(empty.path(), false, None).unwrap()[1].data.len(), PART_BYTES);
}

#[test]
fn links_are_read_and_never_followed() {
    let volume = kubelet_volume();
    let secret = tempfile::tempdir().unwrap();
    fs::write(secret.path().join("secret"), "not for pods").unwrap();
    let data = volume.path().join("..one");
    symlink(secret.path(), data.join("out")).unwrap();
    symlink("../../../../etc", data.join("up")).unwrap();
    symlink("loop", data.join("loop")).unwrap();
    let entries = read_volume(volume.path(), true, None).unwrap();
    let out = entries.iter().find(|entry| entry.path == b"..one/out").unwrap();
    assert_eq!(out.data, secret.path().as_os_str().as_bytes());
    assert!(!entries.iter().any(|entry| entry.data == b"not for pods" || display_path(&entry.path).contains("secret")));
    // The target of the link must not be a link itself.
    fs::remove_dir_all(&data).unwrap();
    symlink(secret.path(), &data).unwrap();
    assert!(read_volume(volume.path(), true, None).is_err());
    for to in ["/etc", "../etc", "..", ".", "key", "..one/deep", "..data"] {
        fs::remove_file(volume.path().join(DATA)).unwrap();
        symlink(to, volume.path().join(DATA)).unwrap();
        let error = read_volume(volume.path(), true, None).unwrap_err();
        assert!(matches!(error, VolumeReadError::UnsupportedEntry { .. }), "{to}: {error:?}");
    }
}

#[test]
fn unsupported_entries_are_rejected_without_blocking() {
    let volume = kubelet_volume();
    let fifo = volume.path().join("..one/odd");
    nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let error = read_volume(volume.path(), true, None).unwrap_err();
    assert_eq!(
        (error.reason(), error.to_string().as_str()),
        (CopyInFailure::UnsupportedEntry, "..one/odd is neither file, directory nor link")
    );
    fs::remove_file(&fifo).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(&fifo).unwrap();
    assert_eq!(read_volume(volume.path(), true, None).unwrap_err().reason(), CopyInFailure::UnsupportedEntry);
    fs::remove_file(&fifo).unwrap();
    fs::write(volume.path().join("beside"), "").unwrap();
    let error = read_volume(volume.path(), true, None).unwrap_err();
    assert!(error.to_string().contains("beside is not a link"), "{error}");
}

#[test]
fn limits_of_entries_bytes_and_depth_are_enforced() {
    let volume = kubelet_volume();
    let data = volume.path().join("..one");
    let huge = File::create(data.join("huge")).unwrap();
    huge.set_len(1 << 40).unwrap();
    let error = read_volume(volume.path(), true, None).unwrap_err();
    assert!(matches!(error, VolumeReadError::TooLarge), "{error:?}");
    huge.set_len(MAX_BYTES / 2).unwrap();
    assert!(read_volume(volume.path(), true, None).is_ok());
    fs::remove_file(data.join("huge")).unwrap();
    let deep = (0..MAX_DEPTH).fold(data.clone(), |path, _| path.join("d"));
    fs::create_dir_all(&deep).unwrap();
    let error = read_volume(volume.path(), true, None).unwrap_err();
    assert!(matches!(error, VolumeReadError::TooDeep { .. }), "{error:?}");
    fs::remove_dir_all(data.join("d")).unwrap();
    // The same file many times.
    for n in 0..MAX_ENTRIES {
        fs::hard_link(data.join("key"), data.join(format!("{n}")))
            .or_else(|_most_links| fs::write(data.join(format!("{n}")), ""))
            .unwrap();
    }
    let error = read_volume(volume.path(), true, None).unwrap_err();
    assert_eq!(
        (error.reason(), matches!(error, VolumeReadError::TooManyEntries)),
        (CopyInFailure::LimitExceeded, true)
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]
    /// Whatever files there are, all of them are read, parents first.
    #[test]
    fn all_files_are_read_parents_first(sizes in prop::collection::btree_map("[a-c]{1,2}(/[a-c]{1,2}){0,2}", 0usize..300_000, 0..8)) {
        let volume = tempfile::tempdir().unwrap();
        let mut expected = std::collections::BTreeMap::new();
        for (path, size) in sizes {
            let path = volume.path().join(&path);
            // A name may be a directory already, or lie below a file.
            if fs::create_dir_all(path.parent().unwrap()).is_ok() && !path.is_dir() {
                let bytes: Vec<u8> = (0..size).map(|n| (n % 251) as u8).collect();
                fs::write(&path, &bytes).unwrap();
                expected.insert(path.strip_prefix(volume.path()).unwrap().as_os_str().as_bytes().to_vec(), bytes);
            }
        }
        let entries = read_volume(volume.path(), false, None).unwrap();
        let mut seen = std::collections::BTreeSet::new();
        for entry in &entries {
            let parent = entry.path.iter().rposition(|byte| *byte == b'/').map_or(&[][..], |at| &entry.path[..at]);
            prop_assert!(entry.path.is_empty() || seen.contains(parent), "{}", display_path(&entry.path));
            prop_assert!(seen.insert(entry.path.clone()));
        }
        let files: std::collections::BTreeMap<_, _> = entries
            .into_iter()
            .filter(|entry| entry.mode & libc::S_IFMT == libc::S_IFREG)
            .map(|entry| (entry.path, entry.data))
            .collect();
        prop_assert_eq!(files, expected);
    }
}
