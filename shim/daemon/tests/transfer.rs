//! Tests import and export of persistent VMs through an OCI layout: imports are checked, an export equals its import, and a
//! failure leaves nothing.

mod common;

use common::World;
use nacelle_image::{ArtifactKind, CompressedFile, ImageStore, ImageStoreConfig, TransferProgress, compress_file};
use nacelle_proto::vm::machines_client::MachinesClient;
use nacelle_proto::{cri, vm};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use tonic::transport::Channel;
use tonic::{Code, Status};

static MACHINE: ArtifactKind = ArtifactKind {
    artifact: "application/vnd.nacelle.machine.v1",
    config: "application/vnd.nacelle.machine.config.v1+json",
    layer: "application/vnd.nacelle.machine.file.v1+zstd",
};
const UUID: &str = "01020304-0506-4708-890a-0b0c0d0e0f10";

type Client = MachinesClient<Channel>;

/// Returns a qcow2 disk of 1 MiB that contains a word.
fn disk(word: &str) -> Vec<u8> {
    let mut disk = nacelle_keeper::qcow2::empty_image(1 << 20);
    disk.extend(word.as_bytes());
    disk
}

/// Creates untrusted artifacts.
struct Stranger {
    directory: PathBuf,
    store: ImageStore,
}

impl Stranger {
    fn new(world: &World) -> Stranger {
        let directory = world.root.path().join("stranger");
        fs::create_dir(&directory).unwrap();
        let store = ImageStore::open(&directory.join("store"), ImageStoreConfig::default()).unwrap();
        Stranger { directory, store }
    }

    fn name(&self, tag: &str) -> String {
        format!("oci:{}:{tag}", self.directory.join("layout").display())
    }

    fn packed(&self, bytes: &[u8]) -> CompressedFile {
        let [from, to] = ["plain", "packed"].map(|name| self.directory.join(name));
        fs::write(&from, bytes).unwrap();
        if to.exists() {
            fs::remove_file(&to).unwrap();
        }
        compress_file(fs::File::open(&from).unwrap(), &from, &to, &TransferProgress::default()).unwrap()
    }

    /// Publishes an artifact with this document and these files.
    async fn publish(
        &self,
        tag: &str,
        kind: &'static ArtifactKind,
        change: impl FnOnce(&mut Value),
        files: &[&[u8]],
    ) -> String {
        let artifacts = self.store.artifacts(&self.name(tag), None, false).unwrap();
        let (mut described, mut layers) = (Vec::new(), Vec::new());
        for (n, bytes) in files.iter().enumerate() {
            let packed = self.packed(bytes);
            artifacts.upload_file(&packed, &TransferProgress::default()).await.unwrap();
            described.push(json!({
                "kind": "disk", "name": format!("disk{n}"), "bytes": 1 << 20, "overImage": false,
                "size": packed.content.size, "digest": packed.content.digest,
            }));
            layers.push((packed.blob, "disk".to_owned()));
        }
        let mut document = json!({
            "version": "1", "namespace": "default", "name": "db", "uuid": UUID, "mac": "02:00:00:00:00:01", "createdAt": 5,
            "files": described,
        });
        change(&mut document);
        artifacts.publish(kind, document.to_string().into_bytes(), layers).await.unwrap();
        self.name(tag)
    }
}

async fn last(mut messages: tonic::Streaming<vm::Transfer>) -> Result<vm::Transfer, Status> {
    let mut last = None;
    while let Some(message) = messages.message().await? {
        last = Some(message);
    }
    Ok(last.expect("there is a last word"))
}

fn artifact(name: &str) -> Option<vm::Artifact> {
    Some(vm::Artifact { name: name.to_owned(), credentials: None, plain_http: false })
}

fn machine(name: &str) -> Option<vm::MachineRef> {
    Some(vm::MachineRef { namespace: "default".into(), name: name.into() })
}

async fn import(daemon: &Client, from: &str, to: &str, new_identity: bool) -> Result<vm::Transfer, Status> {
    let request = vm::ImportRequest { from: artifact(from), to: machine(to), new_identity };
    last(daemon.clone().import(request).await?.into_inner()).await
}

async fn export(daemon: &Client, from: &str, to: &str) -> Result<vm::Transfer, Status> {
    let request = vm::ExportRequest { machine: machine(from), to: artifact(to) };
    last(daemon.clone().export(request).await?.into_inner()).await
}

/// Returns the directories of the VMs, with the names of their files.
fn kept(world: &World) -> Vec<Vec<String>> {
    let names = |path: &Path| {
        let entries = fs::read_dir(path).unwrap();
        let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    };
    let directory = world.config().paths.machines();
    names(&directory).iter().map(|name| names(&directory.join(name))).collect()
}

#[test]
fn a_machine_comes_out_of_an_artifact_and_goes_into_one() {
    let world = World::new();
    let daemon = world.daemon();
    let client = world.machines();
    let stranger = Stranger::new(&world);
    let to = format!("oci:{}:v1", world.root.path().join("out").display());
    world.run(async {
        let listed = daemon.images.clone().list_images(cri::ListImagesRequest::default()).await.unwrap();
        let image = listed.into_inner().images[0].id.clone();
        let with_image = |document: &mut Value| {
            document["image"] = json!({ "id": image, "names": ["test.local/tiny:1"] });
            document["files"][0]["overImage"] = json!(true);
            document["snapshots"] = json!(["before"]);
        };
        let from = stranger.publish("one", &MACHINE, with_image, &[&disk("first"), &disk("second")]).await;
        let done = import(&client, &from, "db", false).await.unwrap();
        let made = done.machine.unwrap();
        assert_eq!((made.uuid.as_str(), made.mac.as_str(), made.name.as_str()), (UUID, "02:00:00:00:00:01", "db"));
        assert_eq!(done.snapshots, ["before"]);
        assert_eq!(kept(&world), [["disk0.image", "disk0.qcow2", "disk1.qcow2"]]);
        // A second import with the same identity is rejected; one with a new identity succeeds.
        assert_eq!(import(&client, &from, "db", false).await.unwrap_err().code(), Code::AlreadyExists);
        let same = import(&client, &from, "db2", false).await.unwrap_err();
        assert!(same.code() == Code::FailedPrecondition && same.message().contains("default/db "), "{same}");
        let twin = import(&client, &from, "twin", true).await.unwrap().machine.unwrap();
        assert!(twin.uuid != UUID && twin.mac != "02:00:00:00:00:01");

        let first = export(&client, "db", &to).await.unwrap();
        assert_eq!(
            export(&client, "db", &to).await.unwrap().digest,
            first.digest,
            "the same machine is the same artifact"
        );
        assert_eq!(export(&client, "no", &to).await.unwrap_err().code(), Code::NotFound);
        assert_eq!(export(&client, "db", "oci:here").await.unwrap_err().code(), Code::InvalidArgument);
        assert_eq!(kept(&world).len(), 2);
    });
    // The same on another node, which is this one with another daemon.
    daemon.kill();
    let _daemon = world.daemon();
    let client = world.machines();
    world.run(async {
        for name in ["db", "twin"] {
            let machine = vm::MachineRef { namespace: "default".into(), name: name.into() };
            client.clone().delete(machine).await.unwrap();
        }
        assert!(kept(&world).is_empty());
        import(&client, &to, "moved", false).await.unwrap();
        let moved = vm::MachineRef { namespace: "default".into(), name: "moved".into() };
        assert_eq!(client.clone().describe(moved).await.unwrap().into_inner().uuid, UUID);
    });
    let directory = fs::read_dir(world.config().paths.machines()).unwrap().next().unwrap().unwrap().path();
    assert_eq!(fs::read(directory.join("disk0.qcow2")).unwrap(), disk("first"));
    assert_eq!(fs::read(directory.join("disk1.qcow2")).unwrap(), disk("second"));
}

#[test]
fn what_a_stranger_made_is_checked_and_leaves_nothing() {
    static OTHER: ArtifactKind =
        ArtifactKind { artifact: "application/vnd.b", config: "application/vnd.b", layer: "c" };
    let world = World::new();
    let _daemon = world.daemon();
    let client = world.machines();
    let stranger = Stranger::new(&world);
    world.run(async {
        let refused = async |tag: &str, code: Code, words: &str, change: &dyn Fn(&mut Value), files: &[&[u8]]| {
            let from = stranger.publish(tag, &MACHINE, change, files).await;
            let error = import(&client, &from, "db", false).await.unwrap_err();
            assert!(error.code() == code && error.message().contains(words), "{tag}: {words:?} in {error:?}");
            assert!(kept(&world).is_empty(), "{tag}");
        };
        let same = |_: &mut Value| {};
        let mut over = disk("a");
        over[15] = 1;
        let mut encrypted = disk("a");
        encrypted[35] = 2;
        let mut outside = disk("a");
        outside[79] = 4;
        use Code::{FailedPrecondition, InvalidArgument, ResourceExhausted};
        refused("over", InvalidArgument, "backing file", &same, &[&over]).await;
        refused("encrypted", InvalidArgument, "encrypted", &same, &[&disk("a"), &encrypted]).await;
        refused("outside", InvalidArgument, "external data file", &same, &[&outside]).await;
        refused("raw", InvalidArgument, "a qcow2 file is expected", &same, &[b"raw"]).await;
        refused(
            "size",
            InvalidArgument,
            "virtual size differs",
            &|of| of["files"][0]["bytes"] = json!(2 << 20),
            &[&disk("a")],
        )
        .await;
        refused("path", InvalidArgument, "files[].name", &|of| of["files"][0]["name"] = json!("../x"), &[&disk("a")])
            .await;
        refused("many", InvalidArgument, "layers", &same, &vec![&b"a"[..]; 65]).await;
        refused("fewer", InvalidArgument, "0 files, but it has 1 layers", &|of| of["files"] = json!([]), &[&disk("a")])
            .await;
        refused("bomb", InvalidArgument, "larger than 5", &|of| of["files"][0]["size"] = json!(5), &[&disk("a")]).await;
        refused(
            "huge",
            ResourceExhausted,
            "bytes, and the file system",
            &|of| of["files"][0]["size"] = json!(1u64 << 60),
            &[&disk("a")],
        )
        .await;
        let other = |of: &mut Value| of["files"][0]["digest"] = json!(format!("sha256:{}", "0".repeat(64)));
        refused("damaged", Code::Unavailable, "is damaged", &other, &[&disk("a")]).await;
        let gone = format!("sha256:{}", "1".repeat(64));
        let image = move |of: &mut Value| {
            of["image"] = json!({ "id": gone, "names": ["a.example/b@sha256:".to_owned() + &"2".repeat(64)] })
        };
        refused("image", FailedPrecondition, "pull a.example/b@sha256:2222", &image, &[&disk("a")]).await;
        refused("document", InvalidArgument, "is not that of a VM artifact", &|of| *of = json!([]), &[]).await;
        refused("version", InvalidArgument, "unknown variant `9`", &|of| of["version"] = json!("9"), &[]).await;

        let other = stranger.publish("other", &OTHER, same, &[]).await;
        let error = import(&client, &other, "db", false).await.unwrap_err();
        assert!(error.code() == InvalidArgument && error.message().contains("application/vnd.b"), "{error}");
        assert_eq!(import(&client, &stranger.name("unknown"), "db", false).await.unwrap_err().code(), Code::NotFound);
        for (name, code) in [("Db", InvalidArgument), ("", InvalidArgument)] {
            assert_eq!(import(&client, &other, name, false).await.unwrap_err().code(), code);
        }
        // No process listens on this port.
        let error = import(&client, "127.0.0.1:1/a:1", "db", false).await.unwrap_err();
        assert_eq!(error.code(), Code::Unavailable, "{error}");
        assert!(kept(&world).is_empty());
    });
}
