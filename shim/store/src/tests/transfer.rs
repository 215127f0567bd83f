//! Tests exports and imports: what they have, what they refuse, and that a refused import changes nothing.

use super::super::*;
use super::damage::{Place, check_filled};
use crate::copy_writer::CopyPolicy;
use nacelle_model::testing::{container, pod};
use std::time::Duration;

/// Returns the files of a store with checksums of their content.
fn content(place: &Place) -> Vec<(PathBuf, u32)> {
    let files = place.files("state").into_iter().filter(|path| path.is_file());
    files.map(|path| (path.clone(), crc32fast::hash(&std::fs::read(path).unwrap()))).collect()
}

fn export(place: &Place) -> PathBuf {
    let file = place.0.path().join("exported");
    export_store(&place.path(), &file).unwrap();
    file
}

const FILLED: StoreCounts = StoreCounts { pods: 3, containers: 3, vms: 1 };

#[test]
fn an_export_of_a_closed_store_is_its_records_and_can_be_imported() {
    let (from, to) = (Place::new(), Place::new());
    from.fill();
    let file = from.0.path().join("exported");
    assert_eq!(export_store(&from.path(), &file).unwrap(), FILLED);
    assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(import_store(&file, &to.path(), false).unwrap(), FILLED);
    assert_eq!(std::fs::metadata(to.path()).unwrap().permissions().mode() & 0o777, 0o600);
    let (before, after) = (from.open().1, to.open().1);
    assert_eq!(before.pods, after.pods);
    assert_eq!(before.containers, after.containers);
    assert_eq!(before.vms, after.vms);
    assert_eq!(before.settings, after.settings);
    // What runs without a record is ended.
    assert!(after.records_lost);
}

#[tokio::test]
async fn an_export_of_a_store_in_use_has_each_answered_commit() {
    let place = Place::new();
    let (store, _) = place.open();
    for n in 1..=30 {
        store.commit(vec![Change::Pod(pod(n).into())]).await.unwrap();
        let file = place.0.path().join("exported");
        let path = place.path();
        let counts = tokio::task::spawn_blocking(move || export_store(&path, &file)).await.unwrap().unwrap();
        assert_eq!(counts.pods, usize::from(n));
    }
}

#[tokio::test]
async fn an_export_while_snapshots_replace_each_other_has_each_answered_commit() {
    let place = Place::new();
    let policy = CopyPolicy { pause: Duration::ZERO, changes: 1 };
    let (store, _) = Store::open_with(&place.path(), None, policy).unwrap();
    for n in 1..=60 {
        store.commit(vec![Change::Pod(pod(n).into())]).await.unwrap();
        let (path, file) = (place.path(), place.0.path().join("exported"));
        let counts = tokio::task::spawn_blocking(move || export_store(&path, &file)).await.unwrap().unwrap();
        assert_eq!(counts.pods, usize::from(n));
    }
}

#[test]
fn an_export_does_not_replace_the_store_itself() {
    let place = Place::new();
    place.fill();
    let before = content(&place);
    for target in ["state.redb", "state.copy", "state.changes.1", "./state.redb"] {
        let error = export_store(&place.path(), &place.0.path().join(target)).unwrap_err().to_string();
        assert!(error.contains("a file of the store itself"), "{error}");
    }
    assert_eq!(content(&place), before);
    let link = place.0.path().join("link");
    std::os::unix::fs::symlink("/dev/null", &link).unwrap();
    for other in [&link, place.0.path()] {
        let error = export_store(&place.path(), other).unwrap_err();
        let error = nacelle_base::Chain(&error).to_string();
        assert!(error.contains("not a regular file"), "{error}");
    }
    assert!(link.is_symlink());
}

#[test]
fn an_import_replaces_a_store_only_if_it_may() {
    let (from, to) = (Place::new(), Place::new());
    from.fill();
    let file = export(&from);
    // The target has more commits than the source.
    to.fill();
    to.fill();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let (store, _) = to.open();
    runtime.block_on(store.commit(vec![Change::Container(container(9, 8).into())])).unwrap();
    let error = import_store(&file, &to.path(), true).unwrap_err();
    assert!(matches!(error, StoreError::InUse { .. }), "{error}");
    to.close(store);
    let before = content(&to);
    let error = import_store(&file, &to.path(), false).unwrap_err();
    assert!(matches!(error, StoreError::Exists { .. }), "{error}");
    assert_eq!(content(&to), before);
    assert_eq!(import_store(&file, &to.path(), true).unwrap(), FILLED);
    check_filled(&to.open().1);
    let aside = to.files("state.redb.replaced-");
    assert_eq!(aside.len(), 1);
    let replaced = export_store(&aside[0], &to.0.path().join("replaced")).unwrap();
    assert_eq!(replaced, StoreCounts { containers: 4, ..FILLED });
    assert_eq!(to.files("state.copy.replaced-").len(), 1);
}

#[test]
fn an_import_that_was_killed_before_its_end_is_not_undone_by_the_copy() {
    let (from, to) = (Place::new(), Place::new());
    from.fill();
    let file = export(&from);
    to.fill();
    let (store, _) = to.open();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    for n in 20..40 {
        runtime.block_on(store.commit(vec![Change::Pod(pod(n).into())])).unwrap();
    }
    to.close(store);
    let copy =
        to.files("state.c").into_iter().map(|path| (path.clone(), std::fs::read(path).unwrap())).collect::<Vec<_>>();
    import_store(&file, &to.path(), true).unwrap();
    for (path, bytes) in copy {
        std::fs::write(path, bytes).unwrap();
    }
    let (_store, contents) = to.open();
    assert_eq!(contents.origin, ContentsOrigin::Database);
    check_filled(&contents);
}

#[test]
fn an_invalid_export_is_refused_and_changes_nothing() {
    let (from, to) = (Place::new(), Place::new());
    from.fill();
    let file = export(&from);
    to.fill();
    let before = content(&to);
    let intact = std::fs::read_to_string(&file).unwrap();
    let lines: Vec<_> = intact.lines().collect();
    let sealed = |json: &str| format!("{:08x} {json}\n", crc32fast::hash(json.as_bytes()));
    let first = |schema: u32, generation: u64, commits: u64| {
        let fields = format!(r#""format":1,"schema":{schema},"generation":{generation},"commits":{commits}"#);
        sealed(&format!(r#"{{"begin":{{{fields}}}}}"#))
    };
    let header = |schema: u32| first(schema, 0, 1);
    let row = |row: &str| {
        format!("{}{}{}", header(SCHEMA), sealed(&format!(r#"{{"rows":[{row}]}}"#)), sealed(r#"{"end":1}"#))
    };
    let cases = [
        (String::new(), "its first line"),
        ("hello\n".to_owned(), "its first line"),
        (lines[..lines.len() - 1].join("\n") + "\n", "its end is missing"),
        (intact.replacen("default", "defau1t", 1), "is invalid"),
        (intact.clone() + lines[1] + "\n", "is invalid"),
        (format!("{}{}", header(SCHEMA + 1), sealed(r#"{"end":0}"#)), "schema 3"),
        (row(r#"["pods","x",{"version":1}]"#), "pod x"),
        (row(r#"["settings","pod_cidr",7]"#), "pod_cidr"),
        (format!("{}{}", first(SCHEMA, 0, u64::MAX), sealed(r#"{"end":0}"#)), "its first line"),
        (format!("{}{}", first(SCHEMA, 7, 1), sealed(r#"{"end":0}"#)), "may lack changes"),
    ];
    for (text, why) in &cases {
        std::fs::write(&file, text).unwrap();
        let error = nacelle_base::Chain(&import_store(&file, &to.path(), true).unwrap_err()).to_string();
        assert!(error.contains(why) && error.contains(file.to_str().unwrap()), "{why}: {error}");
        assert_eq!(content(&to), before, "{why}");
    }
    let fifo = to.0.path().join("fifo");
    nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let error = import_store(&fifo, &to.path(), true).unwrap_err().to_string();
    assert!(error.contains("it is not a file"), "{error}");
    let error = import_store(&to.0.path().join("none"), &to.path(), true).unwrap_err().to_string();
    assert!(error.contains("does not exist"), "{error}");
}

#[test]
fn fifos_in_place_of_the_files_of_a_store_hang_nothing() {
    for name in ["state.redb", "state.copy"] {
        let place = Place::new();
        place.fill();
        let path = place.0.path().join(name);
        std::fs::remove_file(&path).unwrap();
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert_eq!(export_store(&place.path(), &place.0.path().join("exported")).unwrap(), FILLED, "{name}");
        let opened = Store::open(&place.path(), None).map(|(_, contents)| contents.pods.len());
        match name {
            "state.redb" => assert!(opened.unwrap_err().to_string().contains("state.redb")),
            _ => assert_eq!(opened.unwrap(), 3),
        }
    }
}

#[test]
fn a_damaged_store_is_exported_from_what_is_intact() {
    let place = Place::new();
    place.fill();
    let file = place.0.path().join("exported");
    std::fs::write(place.path(), "damaged").unwrap();
    assert_eq!(export_store(&place.path(), &file).unwrap(), FILLED);
    std::fs::remove_file(place.path()).unwrap();
    assert_eq!(export_store(&place.path(), &file).unwrap(), FILLED);
    std::fs::remove_file(&file).unwrap();
    place.files("state.c").iter().for_each(|file| std::fs::remove_file(file).unwrap());
    let error = export_store(&place.path(), &file).unwrap_err().to_string();
    assert!(error.contains("missing") && error.contains("no copy"), "{error}");
    assert!(!file.exists() && !place.path().exists());
}
