//! Provides the image of the tests: an OCI layout with one small layer, which contains a text file and a file in the format of a
//! kernel; and an artifact with one file.

use super::World;
use serde_json::json;
use sha2::{Digest, Sha256};
use std::fs;
use std::path::Path;

/// The image's name.
pub const NAME: &str = "test.local/tiny:1";

/// The name of the image that declares a volume.
pub const VOLUME_NAME: &str = "test.local/volume:1";

/// The artifact's name.
pub const ARTIFACT: &str = "test.local/model:1";

/// The artifact's type.
pub const ARTIFACT_TYPE: &str = "application/vnd.example.model.v1";

/// The path of the kernel in the image.
pub const KERNEL: &str = "/boot/vmlinux";

/// Returns an ELF image with one segment at 16 MiB and a PVH entry point in it.
pub fn kernel() -> Vec<u8> {
    let mut bytes = vec![0; 0x210];
    bytes[..7].copy_from_slice(b"\x7fELF\x02\x01\x01");
    bytes[18] = 62;
    bytes[32] = 64;
    bytes[54] = 56;
    bytes[56] = 2;
    let note = [&[4u32, 4, 18].map(u32::to_le_bytes).concat()[..], b"Xen\0", &(16u32 << 20).to_le_bytes()].concat();
    let load = [1u64, 0x200, 16 << 20, 16 << 20, 16, 16, 4096];
    for (at, words) in [(64, load), (120, [4, 0x100, 0, 0, note.len() as u64, 0, 4])] {
        for (n, word) in words.iter().enumerate() {
            bytes[at + n * 8..at + n * 8 + 8].copy_from_slice(&word.to_le_bytes());
        }
    }
    bytes[0x100..0x100 + note.len()].copy_from_slice(&note);
    bytes
}

fn blob(layout: &Path, bytes: &[u8]) -> String {
    let hex = hex::encode(Sha256::digest(bytes));
    fs::write(layout.join("blobs/sha256").join(&hex), bytes).unwrap();
    format!("sha256:{hex}")
}

/// Loads the image into the node's store, before any daemon runs.
pub fn load(world: &World) {
    load_image(world, NAME, json!({}));
}

/// Loads the image that declares a volume into the node's store, before any daemon runs.
pub fn load_with_volume(world: &World) {
    load_image(world, VOLUME_NAME, json!({ "/data": {} }));
}

fn load_image(world: &World, name: &str, volumes: serde_json::Value) {
    let layout = world.root.path().join("layout");
    fs::create_dir_all(layout.join("blobs/sha256")).unwrap();
    let mut tar = tar::Builder::new(Vec::new());
    for (path, bytes) in [("hello", &b"hello"[..]), (KERNEL.trim_start_matches('/'), &kernel())] {
        let mut header = tar::Header::new_gnu();
        header.set_size(bytes.len() as u64);
        header.set_mode(0o644);
        tar.append_data(&mut header, path, bytes).unwrap();
    }
    let layer_bytes = tar.into_inner().unwrap();
    let layer = blob(&layout, &layer_bytes);
    let config = json!({
        "architecture": "amd64", "os": "linux", "config": { "Cmd": ["/hello"], "Env": ["A=b"], "Volumes": volumes },
        "rootfs": { "type": "layers", "diff_ids": [layer] },
    })
    .to_string();
    let config_digest = blob(&layout, config.as_bytes());
    let manifest = json!({
        "schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": { "mediaType": "application/vnd.oci.image.config.v1+json", "digest": config_digest, "size": config.len() },
        "layers": [{ "mediaType": "application/vnd.oci.image.layer.v1.tar", "digest": layer, "size": layer_bytes.len() }],
    })
    .to_string();
    load_layout(world, &layout, name, &manifest);
}

/// Loads the artifact into the node's store, before any daemon runs. Returns its id.
pub fn load_artifact(world: &World) -> String {
    let layout = world.root.path().join("artifact");
    fs::create_dir_all(layout.join("blobs/sha256")).unwrap();
    let manifest = json!({
        "schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json", "artifactType": ARTIFACT_TYPE,
        "config": { "mediaType": "application/vnd.oci.empty.v1+json", "digest": blob(&layout, b"{}"), "size": 2 },
        "layers": [{
            "mediaType": "application/octet-stream", "digest": blob(&layout, b"weights"), "size": 7,
            "annotations": { "org.opencontainers.image.title": "model.bin" },
        }],
    })
    .to_string();
    load_layout(world, &layout, ARTIFACT, &manifest);
    blob(&layout, manifest.as_bytes())
}

/// Completes a layout of one manifest and loads it.
fn load_layout(world: &World, layout: &Path, name: &str, manifest: &str) {
    let manifest_digest = blob(layout, manifest.as_bytes());
    let index = json!({
        "schemaVersion": 2,
        "manifests": [{
            "mediaType": "application/vnd.oci.image.manifest.v1+json", "digest": manifest_digest, "size": manifest.len(),
            "annotations": { "org.opencontainers.image.ref.name": name },
        }],
    });
    fs::write(layout.join("index.json"), index.to_string()).unwrap();
    fs::write(layout.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).unwrap();
    let config = world.config();
    fs::create_dir_all(config.paths.images()).unwrap();
    world.run(async {
        let options = config.image_options(env!("CARGO_BIN_EXE_nacelle-unpack").as_ref());
        let store = nacelle_image::ImageStore::open(&config.paths.images(), options).unwrap();
        store.load(layout, None).await.unwrap();
    });
}
