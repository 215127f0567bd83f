//! Opens databases of older and newer schemas.

use super::damage::{Place, check_filled};
use crate::database::{SCHEMA, open_database};
use crate::recovery::back_up;
use crate::{ContentsOrigin, Store, StoreError};
use nacelle_base::{Classify, FailureKind};
use redb::TableDefinition;

const META: TableDefinition<&str, u32> = TableDefinition::new("meta");

/// Makes the file say this schema; `None` makes it one of schema 1, which does not say its.
fn set_schema(place: &Place, schema: Option<u32>) {
    let database = open_database(&place.path()).unwrap();
    let transaction = database.begin_write().unwrap();
    match schema {
        Some(schema) => drop(transaction.open_table(META).unwrap().insert("schema", schema).unwrap()),
        None => assert!(transaction.delete_table(META).unwrap()),
    }
    transaction.commit().unwrap();
}

fn refusal(place: &Place) -> StoreError {
    Store::open(&place.path(), None).err().expect("the store is refused")
}

#[test]
fn an_older_store_is_backed_up_and_migrated_once() {
    let place = Place::new();
    place.fill();
    set_schema(&place, None);
    let before = std::fs::read(place.path()).unwrap();
    let (store, contents) = place.open();
    assert_eq!(contents.origin, ContentsOrigin::Database);
    check_filled(&contents);
    place.close(store);
    let backup = place.0.path().join("state.redb.v1");
    // redb writes that the file is open into its header when it opens one.
    assert_eq!(std::fs::metadata(&backup).unwrap().len(), u64::try_from(before.len()).unwrap());
    let migrated = std::fs::metadata(&backup).unwrap().modified().unwrap();
    let (store, contents) = place.open();
    check_filled(&contents);
    place.close(store);
    assert_eq!(std::fs::metadata(&backup).unwrap().modified().unwrap(), migrated, "it is migrated once");
    // The backup is a whole store of schema 1.
    std::fs::remove_file(place.path()).unwrap();
    std::fs::rename(&backup, place.path()).unwrap();
    let (store, contents) = place.open();
    assert_eq!(contents.origin, ContentsOrigin::Database);
    check_filled(&contents);
    place.close(store);
    assert!(backup.exists(), "it is migrated again");
}

#[test]
fn a_newer_store_is_refused_with_both_versions_and_the_backup_to_use() {
    let place = Place::new();
    place.fill();
    set_schema(&place, Some(SCHEMA + 7));
    let error = refusal(&place);
    assert_eq!(error.kind(), FailureKind::Conflict);
    let text = error.to_string();
    for part in [format!("schema {}", SCHEMA + 7), format!("has schema {SCHEMA}"), "no backup".to_owned()] {
        assert!(text.contains(&part), "{part}: {text}");
    }
    std::fs::write(place.0.path().join(format!("state.redb.v{SCHEMA}")), "backup").unwrap();
    let text = refusal(&place).to_string();
    assert!(text.contains(&format!("state.redb.v{SCHEMA}")) && !text.contains("no backup"), "{text}");
    assert_eq!(place.files("damaged"), Vec::<std::path::PathBuf>::new());
    set_schema(&place, Some(SCHEMA));
    check_filled(&place.open().1);
}

#[test]
fn a_copy_of_a_newer_version_is_refused_too() {
    let place = Place::new();
    place.fill();
    std::fs::remove_file(place.path()).unwrap();
    let copy = place.0.path().join("state.copy");
    let text = std::fs::read_to_string(&copy).unwrap();
    let (first, rest) = text.split_once('\n').unwrap();
    let header = first.split_once(' ').unwrap().1.replace(&format!("\"schema\":{SCHEMA}"), "\"schema\":99");
    std::fs::write(&copy, format!("{:08x} {header}\n{rest}", crc32fast::hash(header.as_bytes()))).unwrap();
    let text = refusal(&place).to_string();
    assert!(text.contains("schema 99"), "{text}");
    assert!(!place.path().exists(), "nothing is changed");
}

#[test]
fn the_backups_of_the_last_three_schemas_are_kept() {
    let place = Place::new();
    place.fill();
    for schema in 1..=5 {
        back_up(&place.path(), schema).unwrap();
    }
    let names: Vec<_> =
        place.files("state.redb.v").into_iter().map(|path| path.extension().unwrap().to_owned()).collect();
    assert_eq!(names, ["v3", "v4", "v5"]);
}
