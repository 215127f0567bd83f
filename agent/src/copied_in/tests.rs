//! Tests writing copied-in volumes and swapping them in: what containers see at each moment, and which volumes are rejected.

use super::*;
use nacelle_base::copied_in::{DATA, MAX_BYTES, MAX_DEPTH, MAX_ENTRIES, MAX_RETURNED};
use nacelle_base::{Classify, FailureKind};
use nacelle_proto::agent::TreeEntry;
use proptest::prelude::*;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::Path;

fn owner() -> (u32, u32) {
    (nix::unistd::getuid().as_raw(), nix::unistd::getgid().as_raw())
}

fn entry(path: &str, mode: u32, data: &str) -> TreeEntry {
    let (uid, gid) = owner();
    TreeEntry { path: path.into(), mode, uid, gid, data: data.into(), more: false }
}

fn directory(path: &str) -> TreeEntry {
    entry(path, 0o40755, "")
}

fn file(path: &str, text: &str) -> TreeEntry {
    entry(path, 0o100640, text)
}

fn link(path: &str, to: &str) -> TreeEntry {
    entry(path, 0o120777, to)
}

/// A volume as kubelet writes it, with the files in the directory `data`.
fn live(data: &str, files: &[(&str, &str)]) -> Vec<TreeEntry> {
    let mut entries = vec![directory(""), link(DATA, data)];
    entries.extend(files.iter().map(|(name, _)| link(name, &format!("..data/{name}"))));
    entries.push(directory(data));
    entries.extend(files.iter().map(|(name, text)| file(&format!("{data}/{name}"), text)));
    entries
}

fn write_volume(volumes: &CopiedInVolumes, name: &str, entries: Vec<TreeEntry>) -> Result<(), CopiedInVolumeError> {
    let mut draft = volumes.begin(name)?;
    for entry in entries {
        draft.add(vec![entry])?;
    }
    draft.publish()
}

fn volumes() -> (tempfile::TempDir, CopiedInVolumes) {
    let outer = tempfile::tempdir().unwrap();
    let volumes = CopiedInVolumes::in_directory(outer.path());
    (outer, volumes)
}

fn names(path: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(path).unwrap().map(|name| name.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn a_volume_is_published_and_updated_atomically() {
    let (home, volumes) = volumes();
    let at = home.path().join("conf");
    write_volume(&volumes, "conf", live("..1", &[("a", "one"), ("gone", "soon"), ("same", "same")])).unwrap();
    assert_eq!(names(&at), ["..1", DATA, "a", "gone", "same"]);
    assert_eq!(fs::read_to_string(at.join("a")).unwrap(), "one");
    assert_eq!(fs::metadata(at.join("a")).unwrap().mode(), 0o100640);
    let (same, root) = (fs::metadata(at.join("same")).unwrap().ino(), fs::metadata(&at).unwrap().ino());
    write_volume(&volumes, "conf", live("..2", &[("a", "two"), ("new", "new"), ("same", "same")])).unwrap();
    assert_eq!(names(&at), ["..2", DATA, "a", "new", "same"]);
    assert_eq!(fs::read_to_string(at.join("a")).unwrap(), "two");
    assert_eq!(fs::metadata(at.join("same")).unwrap().ino(), same, "what is the same takes no room twice");
    assert_eq!(fs::metadata(&at).unwrap().ino(), root, "containers have this directory mounted");
    // The same volume again, also without its files, which exist already.
    write_volume(&volumes, "conf", live("..2", &[("a", "two"), ("new", "new"), ("same", "same")])).unwrap();
    write_volume(&volumes, "conf", vec![directory(""), link(DATA, "..2"), link("a", "..data/a")]).unwrap();
    assert_eq!(names(&at), ["..2", DATA, "a"]);
    assert_eq!(names(home.path()), ["conf"]);
    volumes.remove("conf").unwrap();
    volumes.remove("conf").unwrap();
    assert_eq!(names(home.path()), [""; 0]);
}

#[test]
fn a_watch_of_the_directory_reports_the_change() {
    use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};
    let (home, volumes) = volumes();
    write_volume(&volumes, "conf", live("..1", &[("a", "one")])).unwrap();
    let watcher = inotify::init(CreateFlags::NONBLOCK).unwrap();
    inotify::add_watch(&watcher, home.path().join("conf"), WatchFlags::MOVED_TO | WatchFlags::CREATE).unwrap();
    write_volume(&volumes, "conf", live("..2", &[("a", "two"), ("b", "two")])).unwrap();
    let mut room = [std::mem::MaybeUninit::uninit(); 4096];
    let mut news = Reader::new(&watcher, &mut room);
    let mut heard = Vec::new();
    while let Ok(event) = news.next() {
        if event.events().contains(ReadFlags::MOVED_TO) {
            heard.push(event.file_name().unwrap().to_str().unwrap().to_owned());
        }
    }
    // The new files are there before the link leads to them.
    assert_eq!(heard, ["..2", DATA, "b"]);
}

#[test]
fn a_changed_owner_mode_or_size_creates_a_new_file() {
    let (home, volumes) = volumes();
    write_volume(&volumes, "conf", live("..1", &[("a", "one")])).unwrap();
    let before = fs::metadata(home.path().join("conf/a")).unwrap().ino();
    let mut changed = live("..2", &[("a", "one")]);
    changed.last_mut().unwrap().mode = 0o100600;
    write_volume(&volumes, "conf", changed).unwrap();
    let after = fs::metadata(home.path().join("conf/a")).unwrap();
    assert_eq!((after.ino() == before, after.mode()), (false, 0o100600));
}

#[test]
fn what_containers_have_mounted_without_kubelets_layout_is_changed_in_its_place() {
    let (home, volumes) = volumes();
    let inode = |name: &str| fs::metadata(home.path().join(name)).unwrap().ino();
    write_volume(&volumes, "hosts", vec![file("", "a long text")]).unwrap();
    write_volume(&volumes, "part", vec![directory(""), file("old", "1"), directory("d"), file("d/x", "1")]).unwrap();
    let before = (inode("hosts"), inode("part"));
    write_volume(&volumes, "hosts", vec![entry("", 0o100604, "short")]).unwrap();
    write_volume(&volumes, "part", vec![entry("", 0o40711, ""), file("new", "2"), directory("d"), file("d/y", "2")])
        .unwrap();
    assert_eq!((inode("hosts"), inode("part")), before, "containers have them mounted");
    assert_eq!(fs::read_to_string(home.path().join("hosts")).unwrap(), "short");
    assert_eq!(fs::metadata(home.path().join("hosts")).unwrap().mode(), 0o100604);
    assert_eq!(names(&home.path().join("part")), ["d", "new"]);
    assert_eq!(names(&home.path().join("part/d")), ["y"]);
    assert_eq!(fs::metadata(home.path().join("part")).unwrap().mode(), 0o40711);
    // Neither becomes the other, nor a volume with that layout.
    for (name, entries) in [("hosts", vec![directory("")]), ("part", vec![file("", "x")]), ("hosts", live("..1", &[]))]
    {
        let error = write_volume(&volumes, name, entries).unwrap_err();
        assert!(matches!(error, CopiedInVolumeError::Exists { .. }), "{error}");
    }
    assert_eq!(names(home.path()), ["hosts", "part"]);
    assert_eq!(fs::read_to_string(home.path().join("hosts")).unwrap(), "short");
}

#[test]
fn the_end_of_a_file_is_returned() {
    let (home, volumes) = volumes();
    write_volume(&volumes, "log", vec![file("", "")]).unwrap();
    assert_eq!(volumes.read_end("log").unwrap(), b"");
    fs::write(home.path().join("log"), "written by the container").unwrap();
    assert_eq!(volumes.read_end("log").unwrap(), b"written by the container");
    fs::write(home.path().join("log"), [vec![b'a'; 10_000], vec![b'z'; MAX_RETURNED]].concat()).unwrap();
    assert_eq!(volumes.read_end("log").unwrap(), vec![b'z'; MAX_RETURNED]);
    write_volume(&volumes, "conf", live("..1", &[])).unwrap();
    symlink("log", home.path().join("link")).unwrap();
    for name in ["none", "conf", "link"] {
        assert!(matches!(volumes.read_end(name), Err(CopiedInVolumeError::NoFile { .. })), "{name}");
    }
    assert!(matches!(volumes.read_end("../log"), Err(CopiedInVolumeError::Name { .. })));
}

#[test]
fn an_incomplete_volume_is_not_published() {
    let (home, volumes) = volumes();
    write_volume(&volumes, "conf", live("..1", &[("a", "one")])).unwrap();
    let mut draft = volumes.begin("conf").unwrap();
    draft.add(live("..2", &[("a", "two")])).unwrap();
    assert!(matches!(volumes.begin("conf"), Err(CopiedInVolumeError::Busy { .. })));
    drop(draft);
    assert_eq!(
        (names(home.path()), names(&home.path().join("conf"))),
        (vec!["conf".into()], vec!["..1".into(), DATA.into(), "a".to_owned()])
    );
    // Incomplete volumes: no root, half a file, a link to files that were not sent.
    assert!(matches!(volumes.begin("x").unwrap().publish(), Err(CopiedInVolumeError::Short { .. })));
    let half = TreeEntry { more: true, ..file("", "half") };
    assert!(matches!(write_volume(&volumes, "x", vec![half]), Err(CopiedInVolumeError::Short { .. })));
    for name in ["x", "conf"] {
        let error = write_volume(&volumes, name, vec![directory(""), link(DATA, "..3")]).unwrap_err();
        assert!(matches!(error, CopiedInVolumeError::NoData { .. }), "{error}");
    }
    assert_eq!(names(home.path()), ["conf"]);
}

#[test]
fn copies_are_files_and_directories() {
    let (home, volumes) = volumes();
    let parts = || vec![TreeEntry { more: true, ..file("", "one ") }, file("", "two")];
    write_volume(&volumes, "c.0", parts()).unwrap();
    assert_eq!(fs::read_to_string(home.path().join("c.0")).unwrap(), "one two");
    write_volume(&volumes, "c.0", parts()).unwrap();
    write_volume(&volumes, "c.1", vec![directory(""), directory("d"), file("d/f", "deep"), link("l", "/d/f")]).unwrap();
    assert_eq!(fs::read_to_string(home.path().join("c.1/d/f")).unwrap(), "deep");
    let error = write_volume(&volumes, "c.1", live("..1", &[])).unwrap_err();
    assert!(matches!(error, CopiedInVolumeError::Exists { .. }), "{error}");
    assert_eq!(names(home.path()), ["c.0", "c.1"]);
}

#[test]
fn nothing_is_written_elsewhere() {
    let (home, volumes) = volumes();
    let out = tempfile::tempdir().unwrap();
    for name in ["", ".x", "..", "a/b", "ä"] {
        assert!(matches!(volumes.begin(name), Err(CopiedInVolumeError::Name { .. })), "{name:?}");
    }
    let to = out.path().to_str().unwrap();
    for (invalid, kind) in [
        (file("/abs", ""), FailureKind::Invalid),
        (file("../x", ""), FailureKind::Invalid),
        (file("a//b", ""), FailureKind::Invalid),
        (file("./x", ""), FailureKind::Invalid),
        (file("..", ""), FailureKind::Invalid),
        (file("l/x", ""), FailureKind::Invalid),
        (directory("l/x"), FailureKind::Invalid),
        (file("none/x", ""), FailureKind::Invalid),
        (file("l", ""), FailureKind::Invalid),
        (directory(""), FailureKind::Invalid),
        (entry("fifo", 0o10644, ""), FailureKind::Invalid),
        (entry("device", 0o20644, ""), FailureKind::Invalid),
        (file(&"x/".repeat(MAX_DEPTH + 1), ""), FailureKind::Invalid),
        (file("nul\0", ""), FailureKind::Invalid),
    ] {
        let what = format!("{invalid:?}");
        let error = write_volume(&volumes, "v", vec![directory(""), link("l", to), invalid]).unwrap_err();
        assert_eq!(error.kind(), kind, "{what}: {error}");
    }
    assert_eq!((names(out.path()), names(home.path())), (vec![], vec![]));
    // A container with many capabilities can change the volume that it sees.
    write_volume(&volumes, "v", live("..1", &[("a", "one")])).unwrap();
    let seen = home.path().join("v");
    fs::remove_dir_all(seen.join("..1")).unwrap();
    symlink(out.path(), seen.join("..1")).unwrap();
    symlink(out.path(), seen.join("..data_tmp")).unwrap();
    fs::write(out.path().join("a"), "one").unwrap();
    write_volume(&volumes, "v", live("..2", &[("a", "one")])).unwrap();
    assert_eq!((names(&seen), names(out.path())), (vec!["..2".into(), DATA.into(), "a".into()], vec!["a".to_owned()]));
    assert_eq!(fs::symlink_metadata(seen.join("..2/a")).unwrap().nlink(), 1, "not the file outside");
}

#[test]
fn entries_bytes_and_paths_are_limited() {
    let (home, volumes) = volumes();
    let mut draft = volumes.begin("v").unwrap();
    draft.add(vec![directory("")]).unwrap();
    let many = (0..=MAX_ENTRIES).map(|n| link(&n.to_string(), "x")).collect();
    assert!(matches!(draft.add(many), Err(CopiedInVolumeError::TooMuch)));
    drop(draft);
    let mut draft = volumes.begin("v").unwrap();
    draft.add(vec![directory("")]).unwrap();
    let mebibyte = "x".repeat(1 << 20);
    let large = (0..=MAX_BYTES >> 20).map(|_| TreeEntry { more: true, ..file("f", &mebibyte) });
    assert!(matches!(
        large.map(|part| draft.add(vec![part])).find(Result::is_err),
        Some(Err(CopiedInVolumeError::TooMuch))
    ));
    drop(draft);
    assert_eq!(names(home.path()), [""; 0]);
}

/// Entries whose names, types and texts are likely to collide.
fn any_entry() -> impl Strategy<Value = TreeEntry> {
    let path = "(\\.\\.1|\\.\\.data|\\.\\.|a|b|)(/(\\.\\.|a|b)){0,2}";
    let mode = prop::sample::select(vec![0o40755, 0o100644, 0o120777, 0o10644, 0]);
    let data = prop::sample::select(vec!["", "..1", "a", "/", "../.."]);
    (path, mode, data, any::<bool>())
        .prop_map(|(path, mode, data, more)| TreeEntry { more, ..entry(&path, mode, data) })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]
    /// No entries leave anything but the volume that is swapped in, and nothing is written outside.
    #[test]
    fn no_entries_are_written_outside_the_volume(versions in prop::collection::vec(prop::collection::vec(any_entry(), 0..8), 1..4)) {
        let outer = tempfile::tempdir().unwrap();
        let home = outer.path().join("home");
        fs::create_dir(&home).unwrap();
        let volumes = CopiedInVolumes::in_directory(&home);
        for entries in versions {
            let _ = write_volume(&volumes, "v", [vec![directory("")], entries].concat());
        }
        prop_assert_eq!(names(outer.path()), ["home"]);
        let left = names(&home);
        prop_assert!(left.is_empty() || left == ["v"], "{:?}", left);
    }
}
