//! Tests merging: single rules, a comparison with a model on plain paths, and the cost of hostile layers.

use super::*;
use crate::budget::{Cancel, MemoryPool};
use crate::layer::index::IndexWriter;
use proptest::prelude::*;
use std::collections::BTreeMap;

pub fn entry(path: &str, kind: LayerEntryKind) -> LayerEntry {
    LayerEntry {
        path: path.as_bytes().to_vec(),
        meta: FileAttributes { mode: 0o644, ..FileAttributes::default() },
        kind,
    }
}

fn file(size: u64) -> LayerEntryKind {
    LayerEntryKind::File(FileData::Flat { size, block: 0 })
}

/// Returns the index of a layer whose blob holds all data of the tests.
pub fn layer(entries: Vec<LayerEntry>) -> Vec<u8> {
    let mut writer = IndexWriter::new();
    let mut budget = Budget::layer(&MemoryPool::new(1 << 30), &Cancel::default());
    entries.iter().for_each(|entry| writer.push(entry, &mut budget).unwrap());
    writer.finish(1 << 20)
}

/// Returns the tree of these layers, and the budget that it was charged to.
pub fn measured<'l>(layers: impl IntoIterator<Item = &'l Vec<u8>>) -> (Result<MergedTree, TreeError>, Budget) {
    let layers: Vec<_> = layers.into_iter().collect();
    let length = layers.iter().map(|layer| layer.len() as u64).sum();
    let mut budget = Budget::image(&MemoryPool::new(1 << 30), &Cancel::default(), length);
    let mut tree = MergedTree::new();
    let merged = layers
        .iter()
        .enumerate()
        .try_for_each(|(number, layer)| tree.apply_layer(number, &LayerIndex::open(layer).unwrap(), &mut budget));
    (merged.map(|()| tree), budget)
}

pub fn merge<'l>(layers: impl IntoIterator<Item = &'l Vec<u8>>) -> Result<MergedTree, TreeError> {
    measured(layers).0
}

/// Returns all paths: `None` for directories, layer and size for files.
fn flat(tree: &MergedTree) -> BTreeMap<String, Option<(usize, u64)>> {
    let mut all = BTreeMap::new();
    let mut todo = vec![(String::new(), 0)];
    while let Some((path, ino)) = todo.pop() {
        match &tree.inodes[ino].body {
            InodeContent::Directory(children) => {
                for (name, child) in children {
                    let name = String::from_utf8_lossy(name);
                    todo.push((if path.is_empty() { name.into_owned() } else { format!("{path}/{name}") }, *child));
                }
                all.insert(path, None);
            }
            InodeContent::File { layer, data: FileData::Flat { size, .. } } => {
                all.insert(path, Some((*layer, *size)));
            }
            _ => drop(all.insert(path, Some((usize::MAX, 0)))),
        }
    }
    all
}

#[test]
fn whiteouts_are_about_layers_below_wherever_they_stand() {
    let below = layer(vec![entry("d/old", file(1)), entry("e/old", file(1)), entry("f", file(1))]);
    let above = layer(vec![
        entry("d/new", file(2)),
        entry("d", LayerEntryKind::Opaque),
        entry("e/new", file(2)),
        entry("e", LayerEntryKind::Whiteout),
        entry("f", file(2)),
        entry("f", LayerEntryKind::Whiteout),
        entry("nothing/here", LayerEntryKind::Whiteout),
    ]);
    let tree = merge([&below, &above]).unwrap();
    let paths: Vec<_> = flat(&tree).into_keys().collect();
    assert_eq!(paths, ["", "d", "d/new", "e", "e/new", "f"]);
}

#[test]
fn links_are_names_of_one_file_until_one_is_replaced() {
    let below = layer(vec![entry("a", file(1)), entry("b", LayerEntryKind::Hardlink(b"a".to_vec()))]);
    let above = layer(vec![entry("a", file(2)), entry("c", LayerEntryKind::Hardlink(b"b".to_vec()))]);
    let tree = merge([&below, &above]).unwrap();
    let InodeContent::Directory(root) = &tree.inodes[0].body else { panic!("no directory") };
    assert_eq!(root[b"b".as_slice()], root[b"c".as_slice()]);
    assert_ne!(root[b"a".as_slice()], root[b"b".as_slice()]);
}

#[test]
fn links_in_paths_are_followed_inside_the_root() {
    let tree = merge([&layer(vec![
        entry("l", LayerEntryKind::Symlink(b"/../../x/./y".to_vec())),
        entry("l/f", file(1)),
        entry("deep/l", LayerEntryKind::Symlink(b"../../../z".to_vec())),
        entry("deep/l/f", file(1)),
    ])])
    .unwrap();
    let all = flat(&tree);
    assert!(all.contains_key("x/y/f") && all.contains_key("z/f"), "{all:?}");
}

#[test]
fn contradictions_are_refused_with_layer_and_path() {
    let error = merge([&layer(vec![]), &layer(vec![entry("a", file(1)), entry("a/b", file(1))])]).unwrap_err();
    assert!(matches!(&error, TreeError::Entry { layer: 2, path, .. } if path == "a/b"), "{error}");
    let circle = vec![
        entry("a", LayerEntryKind::Symlink(b"b".to_vec())),
        entry("b", LayerEntryKind::Symlink(b"a".to_vec())),
        entry("a/x", file(1)),
    ];
    assert!(merge([&layer(circle)]).is_err());
    let growing = vec![entry("a", LayerEntryKind::Symlink(b"a/a".to_vec())), entry("a/x", file(1))];
    assert!(merge([&layer(growing)]).is_err());
}

/// Returns a chain of links, each of which leads through the previous one and contains `dots` times `./`, and entries that go
/// through the last link, alternating below two names, so that consecutive look-ups differ.
fn chain(links: usize, dots: usize, entries: usize) -> Vec<u8> {
    let mut all = vec![entry("d", LayerEntryKind::Directory), entry("l0", LayerEntryKind::Symlink(b"d".to_vec()))];
    for n in 1..links {
        let target = [b"./".repeat(dots), format!("l{}", n - 1).into_bytes()].concat();
        all.push(entry(&format!("l{n}"), LayerEntryKind::Symlink(target)));
    }
    let last = links - 1;
    all.extend((0..entries).map(|n| entry(&format!("l{}/f{n}", last - n % 2), file(1))));
    layer(all)
}

#[test]
fn a_chain_of_links_ends_at_its_steps() {
    let (tree, budget) = measured([&chain(250, 2040, 2000)]);
    assert!(matches!(tree, Err(TreeError::Budget(BudgetError::Steps { .. }))), "{} steps", budget.steps());
    // Links as real images have them: a few in a row, with short targets.
    let (tree, budget) = measured([&chain(8, 1, 20_000)]);
    assert!(tree.is_ok() && budget.steps() < 20_000 * 40, "{} steps", budget.steps());
}

#[test]
fn steps_follow_the_size_of_the_layers() {
    let deep = |depth: usize| "d/".repeat(depth);
    for index in [
        chain(250, 2040, 100),
        chain(250, 1, 5000),
        layer((0..2000).map(|n| entry(&format!("{}{n}", deep(n % 1000)), file(1))).collect()),
        layer((0..2000).map(|n| entry(&format!("d{n}/{}", deep(500)), LayerEntryKind::Directory)).collect()),
        layer((0..5000).map(|n| entry(&format!("a{}/x", n % 7), LayerEntryKind::Whiteout)).collect()),
    ] {
        let (_, budget) = measured([&index]);
        let most = 1_000_000 + 8 * index.len() as u64 + 300;
        assert!(budget.steps() <= most, "{} steps for {} bytes", budget.steps(), index.len());
    }
}

#[test]
fn files_of_one_directory_are_found_at_once() {
    let deep = "a/b/c/d/e/f/g/h".to_owned();
    let index = layer((0..10_000).map(|n| entry(&format!("{deep}/{n}"), file(1))).collect());
    let (tree, budget) = measured([&index]);
    // Two steps for each entry: one checks for a whiteout, one applies it.
    assert!(tree.is_ok() && budget.steps() < 20_100, "{} steps", budget.steps());
}

#[test]
fn a_name_that_is_replaced_is_not_found_where_it_was() {
    let tree = merge([&layer(vec![
        entry("a", LayerEntryKind::Directory),
        entry("a/x", file(1)),
        entry("b", LayerEntryKind::Directory),
        entry("a", LayerEntryKind::Symlink(b"b".to_vec())),
        entry("a/y", file(1)),
    ])])
    .unwrap();
    assert!(flat(&tree).contains_key("b/y") && !flat(&tree).contains_key("a/x"));
    let tree = merge([
        &layer(vec![entry("a", LayerEntryKind::Directory), entry("a/x", file(1))]),
        &layer(vec![
            entry("a/x", LayerEntryKind::Whiteout),
            entry("a", LayerEntryKind::Whiteout),
            entry("a/z", file(1)),
        ]),
    ])
    .unwrap();
    assert_eq!(flat(&tree).into_keys().collect::<Vec<_>>(), ["", "a", "a/z"]);
}

#[test]
fn a_tree_that_is_cancelled_ends() {
    let (index, cancel) = (chain(250, 2040, 10), Cancel::default());
    let mut budget = Budget::image(&MemoryPool::new(1 << 30), &cancel, index.len() as u64);
    drop(cancel.on_drop());
    let ended = MergedTree::new().apply_layer(0, &LayerIndex::open(&index).unwrap(), &mut budget);
    assert_eq!(ended, Err(TreeError::Budget(BudgetError::Cancelled)));
    assert_eq!(budget.steps(), 0);
}

#[derive(Clone, Debug)]
enum Step {
    File(String),
    Directory(String),
    Whiteout(String),
    Opaque(String),
}

fn step() -> impl Strategy<Value = Step> {
    let path = prop::collection::vec("[ab]", 1..4).prop_map(|parts| parts.join("/"));
    (0..4u8, path).prop_map(|(kind, path)| match kind {
        0 => Step::File(path),
        1 => Step::Directory(path),
        2 => Step::Whiteout(path),
        _ => Step::Opaque(path),
    })
}

type Model = BTreeMap<String, Option<(usize, u64)>>;

fn below(model: &mut Model, path: &str) {
    let prefix = format!("{path}/");
    model.retain(|other, _| !other.starts_with(&prefix));
}

/// Applies the same rules to plain paths. Returns `None` if a file blocks a path.
fn model(layers: &[Vec<Step>]) -> Option<Model> {
    let mut model = Model::from([(String::new(), None)]);
    for (number, layer) in layers.iter().enumerate() {
        for step in layer {
            match step {
                Step::Whiteout(path) => {
                    model.remove(path);
                    below(&mut model, path);
                }
                Step::Opaque(path) => below(&mut model, path),
                _ => {}
            }
        }
        for (size, step) in layer.iter().enumerate() {
            let (path, what) = match step {
                Step::File(path) => (path, Some((number, size as u64))),
                Step::Directory(path) => (path, None),
                _ => continue,
            };
            for (at, _) in path.match_indices('/') {
                match model.entry(path[..at].to_owned()).or_insert(None) {
                    None => {}
                    Some(_) => return None,
                }
            }
            if what.is_some() {
                below(&mut model, path);
            }
            model.insert(path.clone(), what);
        }
    }
    Some(model)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn merging_follows_the_model(layers in prop::collection::vec(prop::collection::vec(step(), 0..8), 0..4)) {
        let indexes: Vec<_> = layers.iter().map(|steps| {
            layer(steps.iter().enumerate().map(|(size, step)| match step {
                Step::File(path) => entry(path, file(size as u64)),
                Step::Directory(path) => entry(path, LayerEntryKind::Directory),
                Step::Whiteout(path) => entry(path, LayerEntryKind::Whiteout),
                Step::Opaque(path) => entry(path, LayerEntryKind::Opaque),
            }).collect())
        }).collect();
        let ours = merge(&indexes).ok().map(|tree| flat(&tree));
        prop_assert_eq!(ours, model(&layers));
    }

    #[test]
    fn any_paths_and_targets_are_merged_without_harm(
        entries in prop::collection::vec(("[ab/.]{0,8}", "[ab/.]{1,8}", 0..5u8), 0..12),
    ) {
        let entries = entries.into_iter().map(|(path, target, kind)| {
            let path = crate::layer::split_clean(path.as_bytes()).join(&b'/');
            let kind = match kind {
                _ if path.is_empty() => LayerEntryKind::Directory,
                0 => LayerEntryKind::Symlink(target.into_bytes()),
                1 => LayerEntryKind::Hardlink(crate::layer::split_clean(target.as_bytes()).join(&b'/')),
                2 => LayerEntryKind::Directory,
                3 => LayerEntryKind::Whiteout,
                _ => file(1),
            };
            LayerEntry { path, meta: FileAttributes::default(), kind }
        });
        if let (Ok(tree), mut budget) = measured([&layer(entries.collect())]) {
            let blob = crate::erofs::LayerBlob { diff_id: nacelle_model::digest::Digest([0; 32]), length: 4096 };
            let _ = crate::erofs::write_erofs(&tree, &[blob], &mut budget);
        }
    }
}

#[test]
fn a_symbolic_link_has_mode_777_and_other_files_their_own() {
    let only = layer(vec![entry("f", file(1)), entry("l", LayerEntryKind::Symlink(b"f".to_vec()))]);
    let tree = merge([&only]).unwrap();
    for inode in &tree.inodes {
        match inode.body {
            InodeContent::Symlink(_) => assert_eq!(inode.meta.mode, 0o777),
            InodeContent::File { .. } => assert_eq!(inode.meta.mode, 0o644),
            _ => {}
        }
    }
    assert_eq!(tree.inodes.len(), 3);
}
