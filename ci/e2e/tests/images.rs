//! Tests images from a real registry, through crictl.

use nacelle_e2e::failure_answer::check_request;
use nacelle_e2e::node::NodeOptions;
use nacelle_e2e::registry::{LOGIN, RegistryKind};
use nacelle_e2e::{ContainerRequest, PodRequest, TestImage, TestNode, run};
use serde_json::json;
use std::fs;
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

#[test]
fn images_are_pulled_listed_and_removed() {
    let node = TestNode::new();
    let image = TestImage::busybox();
    let one = node.push_and_pull(&image, "app:1");
    let two = node.push_and_pull(&image, "app:2");
    let other = node.push_and_pull(&TestImage::busybox().with_config("User", json!("1000")), "other:1");
    let listed = node.crictl.call_json(["images", "-o", "json"])["images"].clone();
    let listed = listed.as_array().expect("a list").clone();
    assert_eq!(listed.len(), 2, "two tags of one image are one image: {listed:#?}");
    let app = listed.iter().find(|image| image["repoTags"].to_string().contains("app:1")).expect("app is listed");
    assert_eq!(app["repoTags"], json!([one, two]));
    assert!(app["repoDigests"][0].as_str().is_some_and(|digest| digest.contains("/app@sha256:")), "{app}");
    assert!(app["size"].as_str().is_some_and(|size| size.parse::<u64>().is_ok_and(|size| size > 500_000)), "{app}");
    let status = node.crictl.call_json(["inspecti", "-o", "json", &other]);
    assert_eq!(status["status"]["uid"]["value"], "1000", "{status}");
    let id = app["id"].as_str().expect("an id").to_owned();
    assert_eq!(node.crictl.call_json(["inspecti", "-o", "json", &id])["status"]["id"], json!(id));

    let used = |node: &TestNode| {
        let info = node.crictl.call_json(["imagefsinfo", "-o", "json"]);
        info["status"]["imageFilesystems"][0]["usedBytes"]["value"].as_str().and_then(|text| text.parse::<u64>().ok())
    };
    let before = used(&node).expect("the use of the disk");
    assert!(before > 500_000, "{before}");
    node.crictl.call(["rmi", &id]);
    node.crictl.call(["rmi", &other]);
    assert_eq!(node.crictl.call_json(["images", "-o", "json"])["images"], json!([]));
    let after = used(&node).expect("the use of the disk");
    assert!(after < before / 2, "{before} before, {after} after all images went");
}

#[test]
fn registry_credentials_are_required_and_used() {
    let node =
        TestNode::with_options(NodeOptions { registry: RegistryKind::HttpsWithPassword, ..NodeOptions::default() });
    let image = node.registry.push(&TestImage::busybox(), "private:1");
    let refused = node.crictl.try_call(["pull", &image]).err();
    assert!(refused.contains("401") || refused.to_lowercase().contains("credentials"), "{refused}");
    let wrong = node.crictl.try_call(["pull", "--creds", "pilot:wrong", &image]).err();
    assert!(!wrong.contains("wrong\""), "the password must not be printed: {wrong}");
    assert_eq!(node.crictl.call_json(["images", "-o", "json"])["images"], json!([]));
    node.crictl.call(["pull", "--creds", &format!("{}:{}", LOGIN.0, LOGIN.1), &image]);
    let pod = node.crictl.run_pod(PodRequest::new("private", node.directory()));
    pod.start(ContainerRequest::sh("one", &image, "echo from a private registry")).wait_for_output("private registry");
    pod.remove();
    assert!(!node.log().contains(LOGIN.1), "the password is in the daemon's log");
}

#[test]
fn a_corrupted_layer_is_refused_and_leaves_nothing() {
    let node = TestNode::new();
    let noise: Vec<u8> = (0..3_000_000_u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let image = node
        .registry
        .push(&TestImage::busybox().with_layer(|layer| layer.add_file("noise", &noise, 0o644)), "spoiled:1");
    let blob = largest(&node.registry.data_directory());
    let length = fs::metadata(&blob).unwrap().len();
    let mut file = fs::File::options().read(true).write(true).open(&blob).unwrap();
    file.seek(SeekFrom::Start(length / 2)).unwrap();
    file.write_all(b"spoiled").unwrap();
    drop(file);
    let refused = node.crictl.try_call(["pull", &image]).err();
    assert!(refused.contains("sha256:"), "the message names the digest: {refused}");
    assert_eq!(node.crictl.call_json(["images", "-o", "json"])["images"], json!([]));
    assert!(node.crictl.try_call(["inspecti", &image]).code != 0);
}

#[test]
fn a_full_disk_fails_the_pull_and_nothing_else() {
    let node = TestNode::with_options(NodeOptions { disk_mib: Some(24), ..NodeOptions::default() });
    let small = node.push_and_pull(&TestImage::busybox(), "small:1");
    let noise: Vec<u8> = (0..40_000_000_u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let large =
        node.registry.push(&TestImage::busybox().with_layer(|layer| layer.add_file("noise", &noise, 0o644)), "large:1");
    check_request(&node, "disk of the image store full during a pull", &node.crictl.try_call(["pull", &large]));
    // Random bytes are as large in the registry as on the disk.
    let mut random = vec![0; 24 << 20];
    fs::File::open("/dev/urandom").and_then(|mut source| source.read_exact(&mut random)).expect("it never ends");
    let dense = node
        .registry
        .push(&TestImage::busybox().with_layer(|layer| layer.add_file("dense", &random, 0o644)), "dense:1");
    check_request(&node, "disk of the image store full", &node.crictl.try_call(["pull", &dense]));
    let listed = node.crictl.call_json(["images", "-o", "json"])["images"].clone();
    assert_eq!(listed.as_array().map(Vec::len), Some(1), "{listed}");
    // The failed pull released its space: another small image fits.
    let again = node.push_and_pull(
        &TestImage::busybox().with_layer(|layer| layer.add_file("more", &[7; 1 << 20], 0o644)),
        "more:1",
    );
    node.crictl.call(["inspecti", &again]);
    node.crictl.call(["inspecti", &small]);
}

#[test]
fn an_archive_is_loaded_without_a_registry() {
    let node = TestNode::new();
    let layout = TestImage::busybox().write_layout(node.directory(), "archive");
    let archive = node.directory().join("archive.tar");
    let copy = [
        "copy".to_owned(),
        "--quiet".to_owned(),
        format!("oci:{}:latest", layout.display()),
        format!("oci-archive:{}:example.org/loaded:1", archive.display()),
    ];
    run::run_program("skopeo", copy).ok();
    let mut load = node.netns.command(nacelle_e2e::path_from_env("NACELLE_BIN"));
    load.args(["image", "load", "--config"]).arg(node.directory().join("config.toml")).arg(&archive);
    let output = run::run(&mut load).ok();
    assert!(output.contains("example.org/loaded:1"), "{output}");
    let pod = node.crictl.run_pod(PodRequest::new("loaded", node.directory()));
    pod.start(ContainerRequest::sh("one", "example.org/loaded:1", "echo loaded")).wait_for_output("loaded");
    pod.remove();
}

#[test]
fn damaged_images_are_found_named_and_repaired() {
    let node = TestNode::new();
    let image = node.push_and_pull(&TestImage::busybox(), "app:1");
    let store = node.directory().join("root/images");
    let verify = |more: &[&str]| {
        let mut verify = node.netns.command(nacelle_e2e::path_from_env("NACELLE_BIN"));
        verify.args(["image", "verify", "--config"]).arg(node.directory().join("config.toml")).args(more);
        run::run(&mut verify)
    };
    let pod = node.crictl.run_pod(PodRequest::new("app", node.directory()));
    let running = pod.start(ContainerRequest::sh("running", &image, "echo up; exec sleep 1000"));
    running.wait_for_output("up");
    assert!(verify(&[]).ok().contains("no damage"));

    // A changed byte is found by its digest; the container that has the file open runs on.
    let blob = largest(&store.join("layers"));
    let mut file = fs::File::options().read(true).write(true).open(&blob).unwrap();
    file.seek(SeekFrom::Start(fs::metadata(&blob).unwrap().len() / 2)).unwrap();
    file.write_all(b"spoiled").unwrap();
    drop(file);
    let found = verify(&["-o", "json"]);
    let report: serde_json::Value = serde_json::from_str(&found.stdout).expect("JSON");
    assert!(found.code == 1 && report["damaged"][0]["file"] == json!(blob), "{report}");
    assert_ne!(node.crictl.try_call(["inspecti", &image]).code, 0, "a damaged image is absent");
    let repaired = verify(&["--repair"]);
    assert!(repaired.code == 0 && repaired.stdout.contains("1 damaged, 1 of them repaired"), "{repaired:?}");
    node.crictl.call(["inspecti", &image]);

    // A missing file is named by the container that needs it, and the next pull fetches it.
    let tree = largest(&store.join("trees"));
    fs::remove_file(&tree).unwrap();
    let refused = pod.try_create(ContainerRequest::sh("early", &image, "echo no"));
    check_request(&node, "damaged image", &refused);
    assert!(refused.stderr.contains(tree.to_str().unwrap()), "{refused:?}");
    assert_ne!(node.crictl.try_call(["inspecti", &image]).code, 0);
    node.crictl.call(["pull", &image]);
    pod.start(ContainerRequest::sh("late", &image, "echo repaired")).wait_for_output("repaired");
    pod.remove();
}

/// Changes one bit of a file's block on the unmounted ext4 image `disk`, as a decaying disk does. `file` is a path in the image.
fn decay(disk: &Path, file: &str, block: u64) {
    let found = run::run_program("debugfs", ["-R", &format!("bmap {file} {block}"), disk.to_str().unwrap()]).ok();
    let found: u64 = found.trim().parse().expect("the number of a block");
    let disk = fs::File::options().read(true).write(true).open(disk).unwrap();
    let mut byte = [0];
    disk.read_exact_at(&mut byte, found * 4096 + 9).unwrap();
    disk.write_all_at(&[byte[0] ^ 1], found * 4096 + 9).unwrap();
}

#[test]
fn fs_verity_finds_replaced_files_and_decayed_blocks() {
    if !Path::new("/sys/fs/ext4/features/verity").exists() {
        println!("skipped: the kernel has no fs-verity for ext4");
        return;
    }
    let (disk_mib, mkfs_arguments) = (Some(64), &["-b", "4096", "-O", "verity"] as &[_]);
    let mut node = TestNode::with_options(NodeOptions { disk_mib, mkfs_arguments, ..NodeOptions::default() });
    let noise: Vec<u8> = (0..3_000_000_u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let image =
        node.push_and_pull(&TestImage::busybox().with_layer(|layer| layer.add_file("noise", &noise, 0o644)), "app:1");
    let layers = node.directory().join("root/images/layers");
    let verify = |node: &TestNode| {
        let mut verify = node.netns.command(nacelle_e2e::path_from_env("NACELLE_BIN"));
        verify.args(["image", "verify", "-o", "json", "--config"]).arg(node.directory().join("config.toml"));
        let output = run::run(&mut verify);
        serde_json::from_str::<serde_json::Value>(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
    };
    // All but the configuration: metadata, and two files of each layer.
    let sound = verify(&node);
    assert!(sound["damaged"] == json!([]) && sound["files"] == json!(6) && sound["verityFiles"] == json!(5), "{sound}");
    let blob = largest(&layers);
    let refused = fs::File::options().write(true).open(&blob).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::PermissionDenied, "{refused}");
    let read_noise = |name| ContainerRequest::sh(name, &image, "cat /noise >/dev/null 2>&1; echo code $?.");
    let pod = node.crictl.run_pod(PodRequest::new("one", node.directory()));
    assert_eq!(pod.start(read_noise("sound")).wait_for_output(".").trim(), "code 0.");

    // A file of the same length takes the place of the blob.
    let mut other = fs::read(&blob).unwrap();
    other[5000] ^= 1;
    fs::remove_file(&blob).unwrap();
    fs::write(&blob, other).unwrap();
    let refused = pod.try_create(read_noise("replaced")).err();
    assert!(refused.contains(&format!("{} has lost its fs-verity", blob.display())), "{refused}");
    pod.remove();
    assert!(node.terminate(), "the daemon exits cleanly");
    node.start();
    assert_ne!(node.crictl.try_call(["inspecti", &image]).code, 0, "the start has found it without reading the file");
    node.crictl.call(["pull", &image]);
    assert_eq!(verify(&node), sound);

    // A bit changes on the disk: the container gets an error instead of the wrong byte, and a verification finds the damage.
    let file = format!("/images/layers/{}", blob.file_name().unwrap().to_string_lossy());
    node.change_disk(|disk| decay(disk, &file, 300));
    let pod = node.crictl.run_pod(PodRequest::new("two", node.directory()));
    let output = pod.start(read_noise("decayed")).wait_for_output(".");
    assert_eq!(output.trim(), "code 1.", "the container must not read the wrong bit");
    let failed = fs::read(&blob).unwrap_err();
    assert_eq!(failed.raw_os_error(), Some(libc::EIO), "{failed}");
    let found = verify(&node);
    assert_eq!(found["damaged"][0]["file"], json!(blob), "{found}");
    assert!(found["damaged"][0]["damage"].to_string().contains("cannot be read: Input/output error"), "{found}");
    node.crictl.call(["pull", &image]);
    assert_eq!(verify(&node), sound);
    pod.remove();

    // The layers are those of an older version, and the metadata were copied: a verification protects both.
    for (directory, is_older) in [(&layers, true), (&node.directory().join("root/images/trees"), false)] {
        for path in fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()) {
            let mut content = fs::read(&path).unwrap();
            if is_older && path.extension().is_some_and(|extension| extension == "sum") {
                let mut sums: serde_json::Value = serde_json::from_slice(&content).unwrap();
                for file in ["main", "index"] {
                    sums[file].as_object_mut().unwrap().remove("verity").expect("a recorded fs-verity digest");
                }
                content = serde_json::to_vec(&sums).unwrap();
            }
            fs::remove_file(&path).unwrap();
            fs::write(&path, content).unwrap();
        }
    }
    assert_eq!(verify(&node), sound);
    node.crictl.call(["inspecti", &image]);
    assert!(fs::File::options().write(true).open(&blob).is_err(), "the blob is protected again");
}

/// Returns the largest file below a directory.
fn largest(directory: &Path) -> PathBuf {
    fn all(directory: &Path, files: &mut Vec<(u64, PathBuf)>) {
        for entry in fs::read_dir(directory).expect("the directory is readable").flatten() {
            if entry.path().is_dir() {
                all(&entry.path(), files);
            } else {
                files.push((entry.metadata().expect("the file is there").len(), entry.path()));
            }
        }
    }
    let mut files = Vec::new();
    all(directory, &mut files);
    files.into_iter().max().expect("the registry has a blob").1
}
