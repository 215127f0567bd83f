//! Damages the database and its copy in every way that a disk or an administrator may, and expects all or the copied state back.

use super::super::*;
use crate::copy_writer::CopyPolicy;
use nacelle_model::record::VmRecord;
use nacelle_model::testing::{container, pod};
use proptest::prelude::*;
use std::io::{BufRead, BufReader};
use std::time::Duration;

/// A store in a directory of its own.
pub(super) struct Place(pub tempfile::TempDir);

impl Place {
    pub fn new() -> Place {
        Place(tempfile::tempdir().unwrap())
    }

    pub fn path(&self) -> PathBuf {
        self.0.path().join("state.redb")
    }

    pub fn open(&self) -> (Store, Contents) {
        Store::open(&self.path(), None).unwrap()
    }

    /// Waits until the writer has closed the database.
    pub fn close(&self, store: Store) {
        drop(store);
        drop(open_database(&self.path()).unwrap());
    }

    /// Opens the store, commits three pods with their containers, a VM and a setting, of which one pod is forgotten again, and
    /// closes it.
    pub fn fill(&self) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let (store, _) = self.open();
        runtime.block_on(async {
            for n in 1..=4 {
                let (pod, container) = (pod(n), container(n + 100, n));
                store.commit(vec![Change::Pod(pod.into()), Change::Container(container.into())]).await.unwrap();
            }
            let vm = VmRecord::new("default", "db", &[7; 22], 9);
            store.commit(vec![Change::Vm(vm.into()), Change::Setting("pod_cidr", "10.0.0.0/24".into())]).await.unwrap();
            let (pod, container) = (pod(4), container(104, 4));
            store.commit(vec![Change::ForgetContainer(container.id), Change::ForgetPod(pod.id)]).await.unwrap();
        });
        self.close(store);
    }

    pub fn files(&self, part: &str) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(self.0.path()).unwrap().map(|entry| entry.unwrap().path());
        let mut files: Vec<_> = entries.filter(|path| path.to_str().unwrap().contains(part)).collect();
        files.sort();
        files
    }

    fn remove_copy(&self) {
        let files = self.files("state.c");
        assert!(files.len() >= 2, "a snapshot and its changes: {files:?}");
        files.iter().for_each(|file| std::fs::remove_file(file).unwrap());
    }
}

/// Checks that these are all the contents that `fill` has committed.
pub(super) fn check_filled(contents: &Contents) {
    assert_eq!(contents.pods, [pod(1), pod(2), pod(3)]);
    assert_eq!(contents.containers, [container(101, 1), container(102, 2), container(103, 3)]);
    assert_eq!(contents.vms, [VmRecord::new("default", "db", &[7; 22], 9)]);
    assert_eq!(contents.settings["pod_cidr"], "10.0.0.0/24");
}

fn overwrite(path: &Path, at: usize, bytes: &[u8]) {
    let mut content = std::fs::read(path).unwrap();
    content[at..at + bytes.len()].copy_from_slice(bytes);
    std::fs::write(path, content).unwrap();
}

#[test]
fn a_new_store_begins_empty() {
    let (_store, contents) = Place::new().open();
    assert_eq!(contents.origin, ContentsOrigin::Nothing);
    assert!(contents.pods.is_empty() && contents.settings.is_empty());
}

#[test]
fn a_missing_database_is_restored_whole() {
    let place = Place::new();
    place.fill();
    for _ in 0..2 {
        std::fs::remove_file(place.path()).unwrap();
        let (store, contents) = place.open();
        assert_eq!(contents.origin, ContentsOrigin::Copy);
        check_filled(&contents);
        place.close(store);
        // From then on it is a database as any other.
        let (store, contents) = place.open();
        assert_eq!(contents.origin, ContentsOrigin::Database);
        check_filled(&contents);
        place.close(store);
    }
    assert_eq!(place.files("damaged"), Vec::<PathBuf>::new());
}

/// Damages the file of this path.
type Damage = fn(&Path);

#[test]
fn a_damaged_database_is_set_aside_and_restored_whole() {
    let damages: [(&str, Damage); 6] = [
        ("a text", |path| std::fs::write(path, "hello, I am a text").unwrap()),
        ("zeros", |path| {
            std::fs::write(path, vec![0; usize::try_from(std::fs::metadata(path).unwrap().len()).unwrap()]).unwrap()
        }),
        ("cut to half", |path| {
            let file = std::fs::File::options().write(true).open(path).unwrap();
            file.set_len(file.metadata().unwrap().len() / 2).unwrap();
        }),
        ("cut to one byte", |path| std::fs::File::options().write(true).open(path).unwrap().set_len(1).unwrap()),
        ("another magic", |path| overwrite(path, 0, b"sqli")),
        ("a zeroed header", |path| overwrite(path, 0, &[0; 512])),
    ];
    let place = Place::new();
    place.fill();
    for (number, (what, damage)) in damages.into_iter().enumerate() {
        damage(&place.path());
        let damaged = std::fs::read(place.path()).unwrap();
        let (store, contents) = place.open();
        assert_eq!(contents.origin, ContentsOrigin::Copy, "{what}");
        check_filled(&contents);
        place.close(store);
        let kept = place.files("damaged-");
        assert_eq!(kept.len(), (number + 1).min(3), "{what}: {kept:?}");
        assert!(kept.iter().any(|file| std::fs::read(file).unwrap() == damaged), "{what}: the last one is kept");
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert!(kept.iter().chain(&place.files("state.c")).all(|file| mode(file) == 0o600), "records have passwords");
    }
}

#[test]
fn an_empty_file_and_one_without_tables_are_restored() {
    let place = Place::new();
    place.fill();
    std::fs::write(place.path(), "").unwrap();
    let (store, contents) = place.open();
    check_filled(&contents);
    place.close(store);
    std::fs::remove_file(place.path()).unwrap();
    drop(redb::Database::create(place.path()).unwrap());
    let contents = place.open().1;
    assert_eq!(contents.origin, ContentsOrigin::Copy);
    check_filled(&contents);
}

/// Writes bytes as a record of the database, below the store.
fn write_record(path: &Path, key: &str, bytes: &[u8]) {
    let database = open_database(path).unwrap();
    let row = StoredRow { table: database::StoreTable::Pods, key: key.to_owned(), value: Some(bytes.to_owned()) };
    write_rows(&database, &[row]).unwrap();
}

#[test]
fn an_undecodable_record_is_taken_from_the_copy_or_else_left_out() {
    for has_copy in [true, false] {
        let place = Place::new();
        place.fill();
        write_record(&place.path(), pod(2).id.as_str(), b"{\"version\":\"2\",\"id\":7}");
        if !has_copy {
            place.remove_copy();
        }
        let (store, contents) = place.open();
        if has_copy {
            assert_eq!(contents.origin, ContentsOrigin::Copy);
            check_filled(&contents);
        } else {
            assert_eq!(contents.origin, ContentsOrigin::Damaged);
            assert_eq!((contents.pods, contents.containers.len()), (vec![pod(1), pod(3)], 3));
        }
        place.close(store);
        assert_eq!(place.files("damaged-").len(), 1);
        // The next daemon does not find it again.
        assert_eq!(place.open().1.origin, ContentsOrigin::Database);
    }
}

#[test]
fn a_database_without_any_readable_record_and_without_a_copy_is_refused() {
    let place = Place::new();
    let (store, _) = place.open();
    place.close(store);
    write_record(&place.path(), pod(2).id.as_str(), b"{}");
    place.remove_copy();
    let error = Store::open(&place.path(), None).err().unwrap();
    assert!(matches!(error, StoreError::Lost { .. }), "{error}");
    // Neither a snapshot nor an intact line of changes.
    std::fs::remove_file(place.path()).unwrap();
    std::fs::write(place.0.path().join("state.changes.7"), "no copy").unwrap();
    let error = Store::open(&place.path(), None).err().unwrap();
    assert!(matches!(error, StoreError::Lost { .. }), "{error}");
}

#[test]
fn a_record_of_another_version_is_no_damage() {
    let place = Place::new();
    place.fill();
    let text = String::from_utf8(pod(2).encode().unwrap()).unwrap().replace("\"version\":\"2\"", "\"version\":\"9\"");
    write_record(&place.path(), pod(2).id.as_str(), text.as_bytes());
    let error = Store::open(&place.path(), None).err().unwrap();
    assert!(error.to_string().contains("version 9"), "{error}");
    assert_eq!(place.files("damaged-"), Vec::<PathBuf>::new());
}

#[test]
fn a_damaged_database_without_a_copy_is_refused_and_left_in_place() {
    for content in ["hello, I am a text", ""] {
        let place = Place::new();
        place.fill();
        place.remove_copy();
        std::fs::write(place.path(), content).unwrap();
        for _ in 0..2 {
            let error = Store::open(&place.path(), None).err().unwrap();
            let text = error.to_string();
            assert!(matches!(error, StoreError::Lost { .. }), "{text}");
            for part in [&*place.path().to_string_lossy(), "no copy", "from a backup", "away", "ends all pods"] {
                assert!(text.contains(part), "{part}: {text}");
            }
            assert_eq!(std::fs::read_to_string(place.path()).unwrap(), content);
        }
        // The administrator's decision.
        std::fs::rename(place.path(), place.0.path().join("away")).unwrap();
        let contents = place.open().1;
        assert_eq!(contents.origin, ContentsOrigin::Nothing);
        assert!(contents.pods.is_empty() && contents.records_lost);
    }
}

#[test]
fn a_restored_store_says_that_records_may_be_lost_until_that_is_handled() {
    let place = Place::new();
    place.fill();
    std::fs::remove_file(place.path()).unwrap();
    for _ in 0..2 {
        let (store, contents) = place.open();
        assert!(contents.records_lost);
        assert_eq!(contents.settings.len(), 1, "{:?}", contents.settings);
        place.close(store);
    }
    let (store, _) = place.open();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(store.commit(vec![Change::LostRecordsHandled])).unwrap();
    place.close(store);
    assert!(!place.open().1.records_lost);
}

#[tokio::test]
async fn a_last_commit_that_the_database_has_lost_is_taken_from_the_copy() {
    let place = Place::new();
    let (store, _) = place.open();
    // So many that the file does not shrink any more: then the commit before the last one is whole too.
    for n in 1..=20 {
        store.commit(vec![Change::Pod(pod(n).into())]).await.unwrap();
    }
    let before = std::fs::read(place.path()).unwrap();
    store.commit(vec![Change::Pod(pod(21).into())]).await.unwrap();
    // As after a kill: the database was not closed.
    let killed = Place::new();
    for file in place.files("state.") {
        std::fs::copy(&file, killed.0.path().join(file.file_name().unwrap())).unwrap();
    }
    let mut after = std::fs::read(killed.path()).unwrap();
    // Damages the record in the pages that the last commit has written.
    let id = pod(21).id.to_string();
    let places: Vec<_> = (0..after.len()).filter(|at| after[*at..].starts_with(id.as_bytes())).collect();
    assert!(!places.is_empty() && !before.windows(id.len()).any(|part| part == id.as_bytes()));
    places.into_iter().for_each(|at| after[at] ^= 0xff);
    std::fs::write(killed.path(), after).unwrap();
    let contents = killed.open().1;
    assert_eq!(contents.pods.len(), 21);
    assert_eq!(contents.origin, ContentsOrigin::Copy);
    assert_eq!(killed.files("damaged-").len(), 1);
}

#[test]
fn a_copy_that_the_disk_cannot_read_is_kept_and_the_store_is_refused() {
    let place = Place::new();
    place.fill();
    let copy = place.0.path().join("state.copy");
    let kept = place.0.path().join("kept");
    std::fs::rename(&copy, &kept).unwrap();
    // Opening it fails with ELOOP, for root too.
    std::os::unix::fs::symlink("state.copy", &copy).unwrap();
    let database = std::fs::read(place.path()).unwrap();
    std::fs::write(place.path(), "hello, I am a text").unwrap();
    let error = Store::open(&place.path(), None).err().unwrap();
    assert!(matches!(error, StoreError::File(_)) && error.to_string().contains("state.copy"), "{error}");
    std::fs::remove_file(place.path()).unwrap();
    assert!(Store::open(&place.path(), None).is_err());
    assert!(copy.is_symlink() && !place.path().exists(), "nothing is changed");
    // An intact database does not need it, and it is kept.
    std::fs::write(place.path(), database).unwrap();
    let (store, contents) = place.open();
    assert_eq!(contents.origin, ContentsOrigin::Database);
    check_filled(&contents);
    place.close(store);
    assert_eq!(place.files("state.copy.damaged-").len(), 1);
    assert!(!copy.is_symlink() && copy.exists());
}

#[tokio::test]
async fn a_database_that_is_removed_while_the_daemon_runs_is_not_created_again() {
    let place = Place::new();
    let (store, _) = place.open();
    store.commit(vec![Change::Pod(pod(1).into())]).await.unwrap();
    place.close(store);
    let copy =
        CopyWriter::start(CopyPaths::of(&place.path()), CopyPolicy::default(), &open_database(&place.path()).unwrap());
    let mut file = StoreFile { path: place.path(), database: None, commits: 1, copy };
    let away = place.0.path().join("away");
    std::fs::rename(place.path(), &away).unwrap();
    let change = [Change::Pod(pod(2).into())];
    for content in [None, Some("")] {
        if let Some(content) = content {
            std::fs::write(place.path(), content).unwrap();
        }
        file.write(&change).unwrap_err();
        assert_eq!(std::fs::read_to_string(place.path()).ok().as_deref(), content);
    }
    std::fs::rename(&away, place.path()).unwrap();
    file.write(&change).unwrap();
    drop(file);
    assert_eq!(place.open().1.pods, [pod(1), pod(2)]);
}

#[test]
fn a_restore_that_was_killed_begins_again() {
    let place = Place::new();
    place.fill();
    std::fs::write(place.path(), "hello, I am a text").unwrap();
    std::fs::write(place.0.path().join("state.redb.new"), "half a database").unwrap();
    let (store, contents) = place.open();
    check_filled(&contents);
    place.close(store);
    assert_eq!(place.files("state.redb.new"), Vec::<PathBuf>::new());
    // A draft that cannot be created leaves everything in place.
    std::fs::write(place.path(), "hello, I am a text").unwrap();
    std::fs::create_dir(place.0.path().join("state.redb.new")).unwrap();
    assert!(Store::open(&place.path(), None).is_err());
    assert_eq!(std::fs::read_to_string(place.path()).unwrap(), "hello, I am a text");
    assert_eq!(place.files("damaged-").len(), 1);
}

#[tokio::test]
async fn changes_with_another_header_or_without_an_end_are_reported_as_lost() {
    let place = Place::new();
    let (store, _) = place.open();
    store.commit(vec![Change::Pod(pod(1).into())]).await.unwrap();
    place.close(store);
    let paths = CopyPaths::of(&place.path());
    let first = place.files("state.changes.").pop().unwrap();
    let number: u64 = first.extension().unwrap().to_str().unwrap().parse().unwrap();
    // The next file exists, and this one has no end.
    std::fs::copy(&first, paths.changes(number + 1)).unwrap();
    let copy = copy::read_copy(&paths).unwrap().unwrap();
    assert!(copy.cut.unwrap().contains("lacks its last line"));
    // A file that belongs to another snapshot: none of its rows is used.
    std::fs::remove_file(paths.changes(number + 1)).unwrap();
    let text = std::fs::read_to_string(&first).unwrap();
    let (_, rest) = text.split_once('\n').unwrap();
    let header = format!("{{\"begin\":{{\"format\":1,\"schema\":2,\"generation\":{}}}}}", number + 1);
    std::fs::write(&first, format!("{:08x} {header}\n{rest}", crc32fast::hash(header.as_bytes()))).unwrap();
    let copy = copy::read_copy(&paths).unwrap().unwrap();
    assert!(copy.cut.unwrap().contains("line 1"));
    assert!(copy.rows.iter().all(|row| row.table != database::StoreTable::Pods), "{:?}", copy.rows);
}

#[tokio::test]
async fn a_commit_longer_than_a_line_is_not_written_to_the_copy() {
    let place = Place::new();
    let policy = CopyPolicy { pause: Duration::from_secs(3600), changes: 1 << 30 };
    let (store, _) = Store::open_with(&place.path(), None, policy).unwrap();
    store.commit(vec![Change::Pod(pod(1).into())]).await.unwrap();
    store.commit(vec![Change::Setting("long", "x".repeat(64 << 20))]).await.unwrap();
    store.commit(vec![Change::Pod(pod(2).into())]).await.unwrap();
    let copy = copy::read_copy(&CopyPaths::of(&place.path())).unwrap().unwrap();
    assert_eq!(copy.rows.iter().filter(|row| row.table == database::StoreTable::Pods).count(), 1);
    assert!(copy.cut.is_none(), "the copy ends before the commit: {:?}", copy.cut);
    assert_eq!(copy.commits, Some(1));
}

#[test]
fn a_copy_that_is_damaged_too_gives_what_is_intact() {
    let place = Place::new();
    place.fill();
    // The changes after the third commit.
    let changes = place.files("state.changes.").pop().unwrap();
    let text = std::fs::read_to_string(&changes).unwrap();
    let cut: Vec<_> = text.lines().take(4).collect();
    for tail in ["\n00000000 {\"rows\":[]}\n", "\n1234", "\n\0\0\0\0\0\0\0\0\0\0\0\n"] {
        std::fs::write(&changes, cut.join("\n") + tail).unwrap();
        let copy = copy::read_copy(&CopyPaths::of(&place.path())).unwrap().unwrap();
        // Three pods, their containers, and the mark of the new store.
        assert_eq!(copy.rows.len(), 7);
        assert!(copy.cut.unwrap().contains("line 5"));
    }
    // The snapshot is damaged too: the rows of the changes are used.
    std::fs::write(place.files("state.copy").pop().unwrap(), "no copy").unwrap();
    std::fs::remove_file(place.path()).unwrap();
    let (store, contents) = place.open();
    assert_eq!((contents.origin, contents.pods.len()), (ContentsOrigin::Copy, 3));
    assert!(contents.records_lost);
    place.close(store);
    let aside = place.files("state.copy.damaged-").pop().unwrap();
    assert_eq!(std::fs::read_to_string(aside.join("state.copy")).unwrap(), "no copy");
    assert!(aside.join(changes.file_name().unwrap()).exists());
    // Nothing of the copy is intact.
    place
        .files("state.c")
        .iter()
        .filter(|path| path.is_file())
        .for_each(|path| std::fs::write(path, "no copy").unwrap());
    let database = std::fs::read(place.path()).unwrap();
    std::fs::remove_file(place.path()).unwrap();
    let error = Store::open(&place.path(), None).err().unwrap();
    assert!(matches!(error, StoreError::Lost { .. }), "{error}");
    // An intact database does not need it. A new copy replaces it.
    std::fs::write(place.path(), database).unwrap();
    let (store, contents) = place.open();
    assert_eq!((contents.origin, contents.pods.len()), (ContentsOrigin::Database, 3));
    place.close(store);
    assert_eq!(place.files("state.copy.damaged-").len(), 2);
    place.fill();
    std::fs::remove_file(place.path()).unwrap();
    check_filled(&place.open().1);
}

#[tokio::test]
async fn snapshots_while_commits_come_lose_nothing_and_leave_few_files() {
    let place = Place::new();
    let policy = CopyPolicy { pause: Duration::ZERO, changes: 1 };
    let (store, _) = Store::open_with(&place.path(), None, policy).unwrap();
    for n in 1..=200 {
        store.commit(vec![Change::Pod(pod(n).into()), Change::Setting("last", n.to_string())]).await.unwrap();
        if n > 1 {
            store.commit(vec![Change::ForgetPod(pod(n - 1).id)]).await.unwrap();
        }
        if n % 20 == 0 {
            // The copy has each commit before its caller knows of it, also while a snapshot is written.
            let copy = tempfile::tempdir().unwrap();
            for file in place.files("state.c") {
                // A file may be removed meanwhile by the snapshot that replaces it.
                let _ = std::fs::copy(&file, copy.path().join(file.file_name().unwrap()));
            }
            let copied = copy::read_copy(&CopyPaths::of(&copy.path().join("state.redb"))).unwrap().unwrap();
            let last = copied.rows.iter().find(|row| row.key == "last").unwrap();
            assert_eq!(last.value.as_deref().unwrap(), format!("\"{n}\"").as_bytes());
            let pods: Vec<_> = copied.rows.iter().filter(|row| row.table == database::StoreTable::Pods).collect();
            assert_eq!(pods.len(), 1, "{pods:?}");
            assert_eq!(pods[0].key, pod(n).id.to_string());
        }
    }
    place.close(store);
    let store = place.open().0;
    place.close(store);
    assert!(place.files("state.c").len() <= 2, "{:?}", place.files("state.c"));
    std::fs::remove_file(place.path()).unwrap();
    let contents = place.open().1;
    assert_eq!((contents.pods, contents.settings["last"].as_str()), (vec![pod(200)], "200"));
}

#[tokio::test]
async fn a_copy_that_could_not_be_written_is_made_up_for() {
    let place = Place::new();
    let policy = CopyPolicy { pause: Duration::ZERO, changes: 1 };
    let (store, _) = Store::open_with(&place.path(), None, policy).unwrap();
    // No file can be created at these paths.
    let paths = CopyPaths::of(&place.path());
    let obstacles: Vec<_> = (2..30).map(|generation| paths.changes(generation)).collect();
    obstacles.iter().for_each(|path| std::fs::create_dir(path).unwrap());
    for n in 1..=20 {
        store.commit(vec![Change::Pod(pod(n).into())]).await.unwrap();
    }
    // The first commit is in the file of changes that was there, and the copy has no gaps.
    let pods = || {
        let rows = copy::read_copy(&paths).unwrap().unwrap().rows;
        rows.into_iter().filter(|row| row.table == database::StoreTable::Pods).count()
    };
    assert_eq!(pods(), 1);
    for n in 21..=40 {
        store.commit(vec![Change::Pod(pod(n).into())]).await.unwrap();
    }
    obstacles.iter().for_each(|path| std::fs::remove_dir(path).unwrap());
    store.commit(vec![Change::Pod(pod(41).into())]).await.unwrap();
    place.close(store);
    assert_eq!(pods(), 41);
    assert!(place.files("state.changes.").len() <= 2, "{:?}", place.files("state.changes."));
}

/// The variable that makes `commit_until_killed` the child of the test below.
const CHILD: &str = "NACELLE_STORE_TEST_CHILD";

/// Commits as fast as it can until it is killed, with a snapshot after each commit, and prints the number of each commit.
#[test]
fn commit_until_killed() {
    let Some(path) = std::env::var_os(CHILD) else { return };
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let policy = CopyPolicy { pause: Duration::ZERO, changes: 1 };
    let (store, contents) = Store::open_with(Path::new(&path), None, policy).unwrap();
    let first: u64 = contents.settings.get("last").map_or(0, |last| last.parse().unwrap());
    runtime.block_on(async {
        for n in first + 1.. {
            let change = Change::Setting("last", n.to_string());
            store.commit(vec![Change::Pod(pod(u8::try_from(n % 200).unwrap()).into()), change]).await.unwrap();
            eprintln!("committed {n}");
        }
    });
}

#[test]
fn a_process_killed_at_any_moment_leaves_a_copy_with_all_that_was_answered() {
    let place = Place::new();
    for round in 0..6 {
        let mut child = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "--nocapture", "tests::damage::commit_until_killed"])
            .env(CHILD, place.path())
            .stdout(std::process::Stdio::null())
            .stderr(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
        let number = |line: String| line.strip_prefix("committed ").map(|number| number.parse::<u64>().unwrap());
        let mut last = lines.by_ref().find_map(number).expect("the child commits");
        // This varies the moment of the kill; it is not a wait for anything.
        std::thread::sleep(Duration::from_millis(30 + 17 * round));
        child.kill().unwrap();
        last = lines.filter_map(number).last().unwrap_or(last);
        child.wait().unwrap();
        std::fs::remove_file(place.path()).unwrap();
        let contents = place.open().1;
        assert_eq!(contents.origin, ContentsOrigin::Copy);
        let found: u64 = contents.settings["last"].parse().unwrap();
        assert!(found == last || found == last + 1, "{found} of {last}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

    /// Whatever bytes of the file change: the store opens, with exactly the state of before.
    #[test]
    fn no_damage_is_trusted_and_none_keeps_the_daemon_from_starting(
        places in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 1_usize..300), 1..8),
        length in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let place = Place::new();
        place.fill();
        let mut content = std::fs::read(place.path()).unwrap();
        for (at, byte, count) in places {
            let at = at.index(content.len());
            content.iter_mut().skip(at).take(count).for_each(|old| *old ^= byte);
        }
        if let Some(length) = length {
            content.truncate(length.index(content.len()));
        }
        std::fs::write(place.path(), content).unwrap();
        check_filled(&place.open().1);
    }
}

#[test]
fn a_file_whose_number_no_store_reaches_is_ignored() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("state.redb");
    drop(Store::open(&path, None).unwrap());
    let foreign = directory.path().join(format!("state.changes.{}", u64::MAX));
    std::fs::write(&foreign, "").unwrap();
    drop(Store::open(&path, None).unwrap());
    assert!(foreign.exists());
}
