//! Measures the cost of hostile and honest images: the memory that a load takes, in a process of its own or in its largest worker, compared
//! with the size of the archive and the number of its files. `NACELLE_IMAGE_FILES=500000 cargo test -p nacelle-image --test store cost::large
//! -- --ignored --nocapture` measures the limits of docs/contributor/images.md.

use crate::common::{Packing, Tar, image, store_config, write_layout};
use nacelle_base::{Chain, Classify, FailureKind};
use nacelle_image::{ImageStore, ImageStoreConfig};
use std::path::Path;
use std::process::Command;
use std::time::Instant;

/// Returns layers of about `count` entries that need much memory or time.
fn hostile(name: &str, count: usize) -> Vec<Vec<u8>> {
    let mut tar = Tar::new();
    match name {
        "many small attributes" => {
            let names: Vec<_> = (0..count).map(|n| format!("SCHILY.xattr.user.{n:x}")).collect();
            for file in 0..8 {
                tar = tar.pax(&shortest(&names)).file(&format!("f{file}"), 0o644, b"");
            }
        }
        "as many attributes as are allowed" => {
            let names: Vec<_> = (0..128).map(|n| format!("SCHILY.xattr.user.{n:x}")).collect();
            for file in 0..count / 128 {
                tar = tar.pax(&shortest(&names)).file(&format!("f{file}"), 0o644, b"");
            }
        }
        "attributes that are deleted again and again" => {
            let names: Vec<_> = (0..128).map(|n| format!("SCHILY.xattr.user.{n:x}")).collect();
            let set: Vec<(&str, &[u8])> = names.iter().map(|name| (name.as_str(), &b"x"[..])).collect();
            let deleted = vec![("SCHILY.xattr.user.none", &b""[..]); count];
            tar = tar.pax(&[set, deleted].concat()).file("f", 0o644, b"");
        }
        "long names" => {
            for file in 0..count / 64 {
                let directory = "n".repeat(250);
                let path = format!("{file}/{}", vec![directory; 15].join("/"));
                tar = tar.pax(&[("path", path.as_bytes())]).file("f", 0o644, b"");
            }
        }
        "deep directories" => {
            for file in 0..count / 64 {
                let path = format!("{file}/{}", "d/".repeat(1000));
                tar = tar.pax(&[("path", path.as_bytes())]).file("f", 0o644, b"");
            }
        }
        "chains of links" => {
            let link = tar::EntryType::Symlink;
            tar = tar.directory("d", 0o755).link(link, "l0", "d");
            for n in 1..250 {
                let target = format!("{}l{}", "./".repeat(2040), n - 1);
                tar = tar.pax(&[("linkpath", target.as_bytes())]).link(link, &format!("l{n}"), "x");
            }
            for file in 0..count {
                tar = tar.file(&format!("l{}/{file}", 249 - file % 2), 0o644, b"");
            }
        }
        "files" => {
            for file in 0..count {
                let path = format!("usr/lib/package-{}/share/locale/file-{file}.txt", file / 40);
                tar = tar.file(&path, 0o644, b"");
            }
        }
        other => panic!("no input {other}"),
    }
    vec![tar.done()]
}

/// Returns pax records with the shortest value.
fn shortest(names: &[String]) -> Vec<(&str, &[u8])> {
    names.iter().map(|name| (name.as_str(), &b"v"[..])).collect()
}

fn memory(field: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with(field)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
}

/// Not a test of its own: the child process of `load`. It loads the layout that the parent has written and reports its cost.
#[tokio::test(flavor = "multi_thread")]
async fn load_in_a_process() {
    let Ok(directory) = std::env::var("COST_DIRECTORY") else { return };
    let directory = Path::new(&directory);
    let max_unpack_memory = std::env::var("COST_MEMORY").unwrap().parse().unwrap();
    let config = ImageStoreConfig { max_unpack_memory, ..store_config() };
    let store = ImageStore::open(&directory.join("store"), config).unwrap();
    let (before, since) = (memory("VmRSS:"), Instant::now());
    let loaded = store.load(&directory.join("layout"), None).await;
    let said = match loaded {
        Ok(_) => "loaded".to_owned(),
        Err(error) => format!("{:?} {}", error.kind(), Chain(&error)),
    };
    // The workers have ended, and count as children. One has the pages of this process until it executes its program.
    let workers = nix::sys::resource::getrusage(nix::sys::resource::UsageWho::RUSAGE_CHILDREN).unwrap().max_rss();
    let workers = (u64::try_from(workers).unwrap() << 10).saturating_sub(before);
    let took = workers.max(memory("VmHWM:") - before);
    println!("took {took} {} {said}", since.elapsed().as_millis());
}

struct Took {
    bytes: u64,
    millis: u64,
    said: String,
}

/// Loads an image of these layers in a process of its own, with `memory` bytes for unpacking.
fn load(layers: Vec<Vec<u8>>, memory: u64) -> (u64, Took) {
    let directory = tempfile::tempdir().unwrap();
    let length = layers.iter().map(|layer| layer.len() as u64).sum();
    let layers: Vec<_> = layers.into_iter().map(|layer| (layer, Packing::Gzip)).collect();
    write_layout(&image(&layers), &directory.path().join("layout"), "cost:1");
    drop(layers);
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "cost::load_in_a_process", "--nocapture"]).env("COST_DIRECTORY", directory.path());
    command.env("COST_MEMORY", memory.to_string());
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let line = text.split("took ").nth(1).unwrap_or_else(|| panic!("{text}")).lines().next().unwrap();
    let mut words = line.splitn(3, ' ');
    let mut number = || words.next().unwrap().parse().unwrap();
    let (bytes, millis) = (number(), number());
    (length, Took { bytes, millis, said: words.next().unwrap().to_owned() })
}

const MIB: u64 = 1 << 20;

#[test]
fn the_memory_of_a_load_follows_the_size_of_its_layers() {
    // A directory without an entry of its own has two bytes in a path, and about 1 KiB in the tree and the metadata.
    for (name, factor) in [
        ("many small attributes", 2),
        ("as many attributes as are allowed", 2),
        ("attributes that are deleted again and again", 2),
        ("long names", 8),
        ("deep directories", 512),
        ("files", 2),
    ] {
        for count in [2_000, 20_000] {
            let (length, took) = load(hostile(name, count), 1 << 30);
            println!("{name}, {count}, {length} bytes: {} KiB, {} ms: {}", took.bytes >> 10, took.millis, took.said);
            let most = factor * length + 16 * MIB;
            assert!(took.bytes <= most, "{name}, {count}: {} of {length}: {}", took.bytes, took.said);
        }
    }
}

#[test]
fn what_is_charged_is_what_is_taken() {
    let memory = 384 * MIB;
    for (name, count) in [("deep directories", 60_000), ("files", 600_000)] {
        let (length, took) = load(hostile(name, count), memory);
        println!("{name}, {count}, {length} bytes: {} KiB, {} ms: {}", took.bytes >> 10, took.millis, took.said);
        assert!(took.said.starts_with("Exhausted") && took.said.contains("max_unpack_memory"), "{name}: {}", took.said);
        // The measured memory is between a third of the budget and slightly more than the budget.
        assert!((memory / 3..memory + 16 * MIB).contains(&took.bytes), "{name}: {}", took.bytes);
    }
}

#[test]
fn an_image_whose_links_lead_too_far_is_refused_soon() {
    // Following all links would take hours. An error about steps proves that the limit ended it, however long that took.
    let (_, took) = load(hostile("chains of links", 2_000), 1 << 30);
    assert!(took.said.starts_with("Exhausted") && took.said.contains("steps"), "{} ms: {}", took.millis, took.said);
}

#[test]
fn attributes_beyond_their_number_are_refused() {
    let (_, took) = load(hostile("many small attributes", 2_000), 1 << 30);
    assert!(
        took.said.starts_with(&format!("{:?} ", FailureKind::Invalid)) && took.said.contains("128"),
        "{}",
        took.said
    );
}

#[tokio::test]
async fn an_archive_names_an_image_a_thousand_times_at_most() {
    let directory = tempfile::tempdir().unwrap();
    let layout = directory.path().join("layout");
    write_layout(&image(&[(Tar::new().done(), Packing::Plain)]), &layout, "cost:1");
    let store = ImageStore::open(&directory.path().join("store"), store_config()).unwrap();
    let index: serde_json::Value = serde_json::from_slice(&std::fs::read(layout.join("index.json")).unwrap()).unwrap();
    let named = |times: usize| {
        let mut whole = index.clone();
        whole["manifests"] = vec![index["manifests"][0].clone(); times].into();
        std::fs::write(layout.join("index.json"), whole.to_string()).unwrap();
    };
    named(1000);
    assert_eq!(store.load(&layout, None).await.unwrap().len(), 1);
    named(1001);
    let refused = store.load(&layout, None).await.unwrap_err();
    assert!(refused.kind() == FailureKind::Invalid && refused.to_string().contains("1000 images"), "{refused}");
}

#[test]
fn the_memory_for_unpacking_has_a_least() {
    let directory = tempfile::tempdir().unwrap();
    let config = ImageStoreConfig { max_unpack_memory: 1 << 20, ..store_config() };
    let Err(refused) = ImageStore::open(directory.path(), config) else { panic!("it is opened") };
    assert!(refused.to_string().contains("at least 402653184 bytes"), "{refused}");
}

/// Measures the cost of an honest image of many files.
#[test]
#[ignore = "takes minutes; docs/contributor/images.md says how it is run"]
fn large() {
    let count = std::env::var("NACELLE_IMAGE_FILES").ok().and_then(|count| count.parse().ok()).unwrap_or(500_000);
    let (length, took) = load(hostile("files", count), 1 << 30);
    println!("{count} files, {length} bytes: {} MiB, {} ms: {}", took.bytes / MIB, took.millis, took.said);
    assert_eq!(took.said, "loaded");
}
