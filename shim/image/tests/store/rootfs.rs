//! Tests that the mounted image matches its layers: compared file by file with what umoci unpacks, and with expected values where
//! tools differ.

use crate::common::{
    Packing, Tar, can_mount, compress_file, image, look, mount, noise, reopen, store_config, write_layout,
};
use nacelle_base::{Classify, FailureKind};
use nacelle_image::{CopyOutcome, ImageConfig, ImageStore, ImageUser, Reference};
use nacelle_model::digest::Digest;
use std::collections::HashSet;
use std::path::Path;
use std::process::Command;
use tar::EntryType;

macro_rules! need_mount {
    () => {
        if let Err(why) = can_mount() {
            eprintln!("skipped: {why}");
            return;
        }
    };
}

async fn load(layers: &[(Vec<u8>, Packing)], directory: &Path) -> (ImageStore, nacelle_image::RootFs) {
    let image = image(layers);
    write_layout(&image, &directory.join("layout"), "test:1");
    let store = ImageStore::open(&directory.join("store"), store_config()).unwrap();
    let loaded = store.load(&directory.join("layout"), None).await.unwrap();
    assert_eq!(loaded[0].id.to_string(), image.config);
    assert_eq!(loaded[0].names, ["docker.io/library/test:1"]);
    let rootfs = store.rootfs(&loaded[0].id).await.unwrap();
    (store, rootfs)
}

/// Returns three layers with every feature that tools agree on.
fn rich_layers() -> Vec<(Vec<u8>, Packing)> {
    let long = "long/".to_owned() + &"n".repeat(200) + "/" + &"m".repeat(255);
    let mut base = Tar::new()
        .directory("./", 0o755)
        .directory("bin", 0o1777)
        .file("bin/sh", 0o4755, &noise(300_000))
        .file("bin/empty", 0o600, b"")
        .file("bin/exactly", 0o644, &noise(8192))
        .link(EntryType::Link, "bin/hard", "bin/sh")
        .link(EntryType::Symlink, "bin/soft", "../bin/sh")
        .link(EntryType::Symlink, "lib", "usr/lib")
        .link(EntryType::Symlink, "far", &("d/".repeat(1000) + "x"))
        .directory("usr/lib", 0o755)
        .directory("long", 0o755)
        .directory(&long[..205], 0o755)
        .file(&long, 0o644, b"long")
        .device(EntryType::Char, "null", 1, 3)
        .device(EntryType::Block, "disk", 259, 1000)
        .device(EntryType::Fifo, "pipe", 0, 0)
        .pax(&[
            ("SCHILY.xattr.user.colour", b"blue"),
            ("SCHILY.xattr.user.bytes", b"\0\x01\xff"),
            ("mtime", b"1234.567890123"),
        ])
        .file("attributes", 0o644, b"a")
        .pax(&[("SCHILY.xattr.security.capability", &[1, 0, 0, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0])])
        .file("ping", 0o755, b"p")
        .pax(&[("uid", b"3000000"), ("gid", b"4000000000")])
        .file("owner", 0o644, b"o")
        .directory("opaque", 0o755)
        .file("opaque/below", 0o644, b"1")
        .directory("opaque/sub", 0o755)
        .file("opaque/sub/below", 0o644, b"1")
        .directory("gone", 0o755)
        .file("gone/file", 0o644, b"1")
        .file("gone-too", 0o644, b"1")
        .file("becomes-directory", 0o644, b"1")
        .directory("becomes-file", 0o755)
        .file("becomes-file/x", 0o644, b"1")
        .file("replaced", 0o644, b"old");
    base = base.raw(b"not-\xff-utf8", EntryType::Regular, b"", b"bytes");
    base = base.directory("many", 0o755);
    for number in 0..700 {
        base = base.file(&format!("many/file-{number:04}"), 0o644, format!("{number}").as_bytes());
    }
    let middle = Tar::new()
        .file("opaque/.wh..wh..opq", 0o644, b"")
        .file("opaque/above", 0o644, b"2")
        .file(".wh.gone", 0o644, b"")
        .file(".wh.gone-too", 0o644, b"")
        .file("many/.wh.file-0005", 0o644, b"")
        .directory("becomes-directory", 0o700)
        .file("becomes-directory/x", 0o644, b"2")
        .file("becomes-file", 0o644, b"2")
        .file("replaced", 0o600, b"new")
        .file("lib/through-link", 0o644, b"2")
        .file("bin/another", 0o644, b"2");
    let top = Tar::new().directory("gone", 0o711).file("gone/again", 0o644, b"3").file("opaque/sub", 0o644, b"3");
    vec![(base.done(), Packing::Gzip), (middle.done(), Packing::Gzip), (top.done(), Packing::Gzip)]
}

/// Mounts the image of these layers and compares it with umoci's result. Returns the number of files.
async fn compare_with_umoci(layers: &[(Vec<u8>, Packing)]) -> usize {
    let directory = tempfile::tempdir().unwrap();
    let (_store, rootfs) = load(layers, directory.path()).await;
    let mounted = mount(&rootfs.disk);
    let bundle = directory.path().join("bundle");
    // umoci expects the bare tag as the name.
    let layout = directory.path().join("layout");
    let index = std::fs::read_to_string(layout.join("index.json")).unwrap().replace("test:1", "t");
    std::fs::write(layout.join("index.json"), index).unwrap();
    let mut umoci = Command::new("umoci");
    let unpacked =
        umoci.arg("unpack").arg("--image").arg(format!("{}:t", layout.display())).arg(&bundle).output().unwrap();
    assert!(unpacked.status.success(), "{}", String::from_utf8_lossy(&unpacked.stderr));
    let mut theirs = look(&bundle.join("rootfs"));
    let ours = look(&mounted.path);
    assert_eq!(ours.keys().collect::<Vec<_>>(), theirs.keys().collect::<Vec<_>>());
    for (path, ours) in &ours {
        let theirs = theirs.get_mut(path).unwrap();
        if theirs.mode & 0o170000 == 0o040000 {
            // Directories of ext4 and tmpfs have different link counts, and umoci sets the times of changed directories to the
            // time of the change.
            theirs.names = ours.names;
            theirs.time = ours.time;
        }
        assert_eq!(ours, theirs, "{}", String::from_utf8_lossy(path));
    }
    ours.len()
}

fn has_umoci() -> bool {
    let has = Command::new("umoci").arg("--version").output().is_ok();
    if !has {
        eprintln!("skipped: there is no umoci");
    }
    has
}

#[tokio::test(flavor = "multi_thread")]
async fn the_same_as_umoci_unpacks() {
    need_mount!();
    if has_umoci() {
        assert!(compare_with_umoci(&rich_layers()).await > 700);
    }
}

#[test]
fn any_tree_is_the_same_as_umoci_unpacks() {
    need_mount!();
    if !has_umoci() {
        return;
    }
    use proptest::prelude::*;
    let part = "[a-zA-Z0-9 +=~-]{1,12}|[x-z]{100,250}|[ab]";
    let path = prop::collection::vec(part, 1..4).prop_map(|parts| parts.join("/d/"));
    let files = prop::collection::btree_map(path, (0..6u8, 0..20_000usize, 0..0o10000u32, any::<u16>()), 0..60);
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig { cases: 8, ..ProptestConfig::default() });
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let run = runner.run(&files, |files| {
        let mut tar = Tar::new().directory("./", 0o755);
        let mut first = None;
        for (number, (path, (kind, size, mode, xattr))) in files.iter().enumerate() {
            // A separate prefix keeps the files of the cases apart.
            let path = format!("{number}-{path}");
            tar = match kind {
                0 => tar.directory(&path, *mode),
                1 => tar.link(EntryType::Symlink, &path, &"t".repeat(size % 4000 + 1)),
                2 if first.is_some() => tar.link(EntryType::Link, &path, first.as_deref().unwrap_or_default()),
                3 => tar.pax(&[("SCHILY.xattr.user.x", &noise(usize::from(xattr % 3000)))]).file(&path, *mode, b"x"),
                _ => {
                    first.get_or_insert_with(|| path.clone());
                    tar.file(&path, *mode, &noise(*size))
                }
            };
        }
        runtime.block_on(compare_with_umoci(&[(tar.done(), Packing::Gzip)]));
        Ok(())
    });
    run.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn directories_have_their_times_and_counts() {
    need_mount!();
    let directory = tempfile::tempdir().unwrap();
    let (_store, rootfs) = load(&rich_layers(), directory.path()).await;
    let mounted = mount(&rootfs.disk);
    let seen = look(&mounted.path);
    assert_eq!(seen[b"opaque".as_slice()].names, 2);
    assert_eq!(seen[b"usr".as_slice()].names, 3);
    assert_eq!(seen[b"bin".as_slice()].time, (1_700_000_000, 0));
    assert_eq!(seen[b"attributes".as_slice()].time, (1234, 567_890_123));
    assert_eq!(seen[b"owner".as_slice()].owner, (3_000_000, 4_000_000_000));
    assert_eq!(seen[b"bin/hard".as_slice()].names, 2);
    assert_eq!(seen[b"becomes-file".as_slice()].names, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn layers_that_try_to_leave_the_root_do_not() {
    need_mount!();
    let directory = tempfile::tempdir().unwrap();
    let outside = directory.path().join("outside");
    std::fs::create_dir(&outside).unwrap();
    let tar = Tar::new()
        .raw(b"../../../dotdot", EntryType::Regular, b"", b"1")
        .raw(b"/absolute", EntryType::Regular, b"", b"2")
        .raw(b"a/../../b", EntryType::Regular, b"", b"3")
        .link(EntryType::Symlink, "escape", outside.to_str().unwrap())
        .file("escape/file", 0o644, b"4")
        .link(EntryType::Symlink, "up", "../../../../../etc")
        .file("up/passwd", 0o644, b"5")
        .raw(b"hard", EntryType::Link, b"../../../../dotdot", b"")
        .done();
    let (_store, rootfs) = load(&[(tar, Packing::Zstd)], directory.path()).await;
    let mounted = mount(&rootfs.disk);
    let read = |path: &str| std::fs::read(mounted.path.join(path)).unwrap();
    assert_eq!((read("dotdot"), read("absolute"), read("b")), (b"1".into(), b"2".into(), b"3".into()));
    assert_eq!((read("etc/passwd"), read("hard")), (b"5".into(), b"1".into()));
    assert_eq!(read(&outside.strip_prefix("/").unwrap().join("file").display().to_string()), b"4");
    assert_eq!(std::fs::read_dir(&outside).unwrap().count(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn layers_that_contradict_themselves_are_refused() {
    let bad = [
        Tar::new().link(EntryType::Link, "a", "missing").done(),
        Tar::new().directory("d", 0o755).link(EntryType::Link, "a", "d").done(),
        Tar::new().file("f", 0o644, b"").file("f/x", 0o644, b"").done(),
        Tar::new().link(EntryType::Symlink, "l", "l").file("l/x", 0o644, b"").done(),
        Tar::new().raw(b"./", EntryType::Regular, b"", b"x").done(),
        Tar::new().raw(b"x", EntryType::Symlink, b"", b"").done(),
        Tar::new().raw(b".wh.", EntryType::Regular, b"", b"").done(),
        Tar::new().file("f", 0o644, &noise(5000)).done()[..3000].to_vec(),
        noise(10_000),
    ];
    for tar in bad {
        let directory = tempfile::tempdir().unwrap();
        write_layout(&image(&[(tar, Packing::Plain)]), &directory.path().join("layout"), "x:1");
        let store = ImageStore::open(&directory.path().join("store"), store_config()).unwrap();
        let error = store.load(&directory.path().join("layout"), None).await.unwrap_err();
        assert_eq!(nacelle_base::Classify::kind(&error), nacelle_base::FailureKind::Invalid, "{error:?}");
        assert!(store.list().is_empty());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn sparse_files_of_every_format_keep_their_holes() {
    need_mount!();
    let directory = tempfile::tempdir().unwrap();
    let source = directory.path().join("source");
    std::fs::create_dir(&source).unwrap();
    let file = std::fs::File::create(source.join("sparse")).unwrap();
    for (offset, length) in [(5000, 10_000), (3 << 20, 4096), (5 << 30, 70_000)] {
        std::os::unix::fs::FileExt::write_all_at(&file, &noise(length), offset).unwrap();
    }
    file.set_len((5 << 30) + (1 << 20)).unwrap();
    let hash = |path: &Path| {
        use std::os::unix::fs::FileExt;
        let file = std::fs::File::open(path).unwrap();
        let mut buffer = vec![0; 200_000];
        [4000, (3 << 20) - 1000, (5 << 30) - 50_000].map(|offset| {
            file.read_exact_at(&mut buffer, offset).unwrap();
            crate::common::digest(&buffer)
        })
    };
    let mut lengths = HashSet::new();
    for (number, format) in [
        vec!["--format=gnu"],
        vec!["--format=posix", "--sparse-version=0.0"],
        vec!["--format=posix", "--sparse-version=0.1"],
        vec!["--format=posix", "--sparse-version=1.0"],
    ]
    .into_iter()
    .enumerate()
    {
        let tar = Command::new("tar")
            .args(&format)
            .args(["-S", "-C"])
            .arg(&source)
            .args(["-cf", "-", "sparse"])
            .output()
            .unwrap();
        assert!(tar.status.success() && tar.stdout.len() < 1 << 20, "{format:?}");
        let place = directory.path().join(number.to_string());
        std::fs::create_dir(&place).unwrap();
        let (_store, rootfs) = load(&[(tar.stdout, Packing::Gzip)], &place).await;
        lengths.insert(rootfs.disk.extents[1].length);
        assert!(rootfs.disk.length() < 16 << 20, "{format:?}");
        let mounted = mount(&rootfs.disk);
        let path = mounted.path.join("sparse");
        assert_eq!(std::fs::metadata(&path).unwrap().len(), (5 << 30) + (1 << 20), "{format:?}");
        assert_eq!(hash(&path), hash(&source.join("sparse")), "{format:?}");
    }
    assert_eq!(lengths.len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_same_layers_give_the_same_bytes_and_all_packings_the_same_layer() {
    let tar = rich_layers().remove(0).0;
    let mut metadata = HashSet::new();
    for packing in [Packing::Plain, Packing::Gzip, Packing::Zstd] {
        let directory = tempfile::tempdir().unwrap();
        let (_store, rootfs) = load(&[(tar.clone(), packing)], directory.path()).await;
        let bytes: Vec<_> = rootfs.disk.extents.iter().map(|extent| std::fs::read(&extent.path).unwrap()).collect();
        metadata.insert(crate::common::digest(&bytes.concat()));
    }
    assert_eq!(metadata.len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn erofs_utils_agree() {
    let directory = tempfile::tempdir().unwrap();
    let (_store, rootfs) = load(&rich_layers(), directory.path()).await;
    // Version 1.5 reads everything from the first device, but requires the others on the command line.
    let device = directory.path().join("device");
    let mut file = std::fs::File::create(&device).unwrap();
    for extent in &rootfs.disk.extents {
        std::io::copy(&mut std::fs::File::open(&extent.path).unwrap(), &mut file).unwrap();
    }
    let mut fsck = Command::new("fsck.erofs");
    fsck.args(rootfs.disk.extents[1..].iter().map(|blob| format!("--device={}", blob.path.display())));
    let Ok(checked) = fsck.arg("--extract").arg(&device).output() else {
        eprintln!("skipped: there is no fsck.erofs");
        return;
    };
    let text = String::from_utf8_lossy(&checked.stdout) + String::from_utf8_lossy(&checked.stderr);
    assert!(checked.status.success(), "{}: {text}", checked.status);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_is_described_kept_while_in_use_and_then_gone() {
    let directory = tempfile::tempdir().unwrap();
    let (store, rootfs) = load(&rich_layers(), directory.path()).await;
    let [record] = store.list().try_into().unwrap();
    let id = record.id;
    assert_eq!(store.status("test:1").unwrap(), Some(record.clone()));
    assert_eq!((record.user, record.pinned), (ImageUser::Uid(1000), false));
    assert!(record.size > 300_000);
    assert_eq!(
        rootfs.config,
        ImageConfig {
            cmd: vec!["/bin/sh".into()],
            env: vec!["A=b".into()],
            user: "1000:1000".into(),
            working_dir: "/w".into(),
            labels: [("l".to_owned(), "v".to_owned())].into(),
            ..ImageConfig::default()
        }
    );
    let full = store.fs_info().await.unwrap();
    let in_use = HashSet::from([id]);
    store.remove("test:1", &in_use).await.unwrap();
    assert!(store.list().is_empty() && store.status("test:1").unwrap().is_none());
    assert_eq!(store.rootfs(&id).await.unwrap(), rootfs);
    drop(store);
    let store = reopen(&directory.path().join("store"), &store_config());
    assert_eq!(store.rootfs(&id).await.unwrap(), rootfs);
    store.collect(&in_use).await.unwrap();
    assert!(rootfs.disk.extents.iter().all(|extent| extent.path.exists()));
    store.collect(&HashSet::new()).await.unwrap();
    assert!(store.rootfs(&id).await.is_err());
    assert!(rootfs.disk.extents.iter().all(|extent| !extent.path.exists()));
    let empty = store.fs_info().await.unwrap();
    assert!(empty.used_bytes + 300_000 < full.used_bytes && empty.inodes_used <= 2, "{empty:?} {full:?}");
    store.remove("test:1", &HashSet::new()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn archives_of_all_kinds_are_loaded() {
    let directory = tempfile::tempdir().unwrap();
    let image = image(&rich_layers());
    let layout = directory.path().join("layout");
    write_layout(&image, &layout, "localhost/x:1");
    let oci = directory.path().join("oci.tar");
    assert!(Command::new("tar").arg("-C").arg(&layout).arg("-cf").arg(&oci).arg(".").status().unwrap().success());
    let mut docker = tar::Builder::new(std::fs::File::create(directory.path().join("docker.tar")).unwrap());
    let mut add = |name: &str, bytes: &[u8]| {
        docker.append_data(&mut Tar::header(EntryType::Regular, 0o644, bytes.len() as u64), name, bytes).unwrap();
    };
    let mut names = Vec::new();
    for (number, (tar, _)) in rich_layers().iter().enumerate() {
        names.push(format!("{number}/layer.tar"));
        // The first layer is a link to the layer of another image.
        add(if number == 0 { "other/layer.tar" } else { &names[number] }, tar);
    }
    let mut link = Tar::header(EntryType::Symlink, 0o777, 0);
    docker.append_link(&mut link, &names[0], "../other/layer.tar").unwrap();
    let mut add = |name: &str, bytes: &[u8]| {
        docker.append_data(&mut Tar::header(EntryType::Regular, 0o644, bytes.len() as u64), name, bytes).unwrap();
    };
    add("config.json", &image.blobs[&image.config]);
    let list = serde_json::json!([{"Config": "config.json", "RepoTags": ["busybox:9"], "Layers": names}]);
    add("manifest.json", &serde_json::to_vec(&list).unwrap());
    docker.finish().unwrap();
    for (path, name, tags) in [
        (layout, None, vec!["localhost/x:1"]),
        (oci, Some("extra"), vec!["docker.io/library/extra:latest", "localhost/x:1"]),
        (directory.path().join("docker.tar"), None, vec!["docker.io/library/busybox:9"]),
    ] {
        let place = tempfile::tempdir().unwrap();
        let store = ImageStore::open(place.path(), store_config()).unwrap();
        let name = name.map(|name| Reference::parse(name).unwrap());
        let loaded = store.load(&path, name.as_ref()).await.unwrap();
        assert_eq!((loaded.len(), loaded[0].id.to_string()), (1, image.config.clone()));
        assert_eq!(loaded[0].names, tags);
        assert_eq!(store.rootfs(&loaded[0].id).await.unwrap().disk.extents.len(), 4);
    }
    let store = ImageStore::open(&directory.path().join("store"), store_config()).unwrap();
    for path in [directory.path().join("nothing"), directory.path().to_owned()] {
        assert!(store.load(&path, None).await.is_err());
    }
    let archive = std::fs::read(directory.path().join("docker.tar")).unwrap();
    let packed = directory.path().join("packed");
    for bytes in [compress_file(&archive, Packing::Gzip), compress_file(&archive, Packing::Zstd)] {
        std::fs::write(&packed, bytes).unwrap();
        let error = store.load(&packed, None).await.unwrap_err();
        assert!(error.kind() == FailureKind::Invalid && error.to_string().contains("is compressed"), "{error}");
    }
}

#[tokio::test]
async fn a_file_is_read_where_it_lies() {
    let directory = tempfile::tempdir().unwrap();
    let disk = noise(10_001);
    let base =
        Tar::new().directory("disk", 0o755).file("disk/old.img", 0o644, b"old").file("disk/root.img", 0o440, b"x");
    let top = Tar::new()
        .file("disk/.wh.old.img", 0o644, b"")
        .file("disk/root.img", 0o440, &disk)
        .link(EntryType::Symlink, "disk/link", "root.img")
        .link(EntryType::Symlink, "other", "disk");
    let layers = [(base.done(), Packing::Gzip), (top.done(), Packing::Plain)];
    write_layout(&image(&layers), &directory.path().join("layout"), "disk:1");
    let store = ImageStore::open(&directory.path().join("store"), store_config()).unwrap();
    let id = store.load(&directory.path().join("layout"), None).await.unwrap()[0].id;
    for name in ["disk", "/disk/", "other", "a/../disk"] {
        let Some(files) = store.list_files(&id, name).await.unwrap() else {
            assert_eq!(name, "a/../disk", "a directory that is not there leads nowhere");
            continue;
        };
        let [file] = files.as_slice() else { panic!("{files:?}") };
        assert_eq!((file.name.as_str(), file.size), ("root.img", 10_001));
        let (blob, offset) = file.extent_start.clone().unwrap();
        let bytes = std::fs::read(blob).unwrap();
        let offset = usize::try_from(offset).unwrap();
        assert_eq!(&bytes[offset..offset + disk.len()], disk);
        assert!(bytes[offset + disk.len()..offset + 12_288].iter().all(|byte| *byte == 0));
    }
    assert_eq!(store.list_files(&id, "none").await.unwrap(), None);
    assert_eq!(store.list_files(&id, "disk/root.img").await.unwrap(), None);
}

#[tokio::test]
async fn a_file_is_copied_out_of_its_image_and_nothing_else_is() {
    let directory = tempfile::tempdir().unwrap();
    let kernel = noise(10_001);
    let base =
        Tar::new().directory("boot", 0o755).file("boot/old", 0o644, b"old").file("boot/vmlinux", 0o600, b"older");
    let top = Tar::new()
        .file("boot/.wh.old", 0o644, b"")
        .file("boot/vmlinux", 0o600, &kernel)
        .link(EntryType::Symlink, "boot/link", "vmlinux")
        .link(EntryType::Symlink, "boot/out", "/etc/passwd")
        .link(EntryType::Symlink, "up", "../../../../../boot");
    let layers = [(base.done(), Packing::Gzip), (top.done(), Packing::Plain)];
    write_layout(&image(&layers), &directory.path().join("layout"), "kernel:1");
    let store = ImageStore::open(&directory.path().join("store"), store_config()).unwrap();
    let id = store.load(&directory.path().join("layout"), None).await.unwrap()[0].id;
    let to = directory.path().join("copy");
    let copy = async |path: &str, most| {
        let file = std::fs::File::create(&to).unwrap();
        let copied = store.copy_file_from_image(&id, path, most, file).await.unwrap();
        (copied, std::fs::read(&to).unwrap())
    };
    // The root is the image's: no path leads above it.
    for path in ["/boot/vmlinux", "boot/vmlinux", "/up/vmlinux", "/../../boot/vmlinux"] {
        assert!(copy(path, 10_001).await == (CopyOutcome::All(10_001), kernel.clone()), "{path}");
    }
    assert_eq!(copy("/boot/vmlinux", 10_000).await, (CopyOutcome::TooLarge(10_001), vec![]));
    for path in ["/boot/old", "/boot/link", "/boot/out", "/boot", "/none/vmlinux", "/boot/vmlinux/x", "/", ""] {
        assert_eq!(copy(path, 10_001).await, (CopyOutcome::Missing, vec![]), "{path}");
    }
    let other = Digest::of(b"another");
    let error = store.copy_file_from_image(&other, "/a", 1, std::fs::File::create(&to).unwrap()).await.unwrap_err();
    assert_eq!(error.kind(), FailureKind::NotFound);
}
