//! Shared helpers of this crate's tests: build images, run servers that misbehave, compare file trees.

pub mod registry;
pub mod server;

use nacelle_base::machine::ImageDisk;
use nacelle_image::{ImageError, ImageStore, ImageStoreConfig};
use sha2::{Digest as _, Sha256};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// Returns `sha256:...` of these bytes.
pub fn digest(bytes: &[u8]) -> String {
    format!("sha256:{}", hex::encode(Sha256::digest(bytes)))
}

/// Returns bytes that do not compress: the same ones for each length.
pub fn noise(length: usize) -> Vec<u8> {
    let mut state = 3u64;
    let next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1);
        (state >> 56) as u8
    };
    std::iter::repeat_with(next).take(length).collect()
}

/// Returns the default configuration, with this crate's worker.
pub fn store_config() -> ImageStoreConfig {
    let mut config = ImageStoreConfig::default();
    config.worker.program = env!("CARGO_BIN_EXE_unpack-worker").into();
    config
}

/// Opens a store that has just been closed. A process that another test starts at this moment inherits the lock's descriptor
/// until it executes its program.
pub fn reopen(directory: &Path, config: &ImageStoreConfig) -> ImageStore {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        match ImageStore::open(directory, config.clone()) {
            Err(ImageError::Locked { .. }) if Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(5));
            }
            other => return other.unwrap(),
        }
    }
}

/// The compression of a layer.
#[derive(Clone, Copy, Debug)]
pub enum Packing {
    Plain,
    Gzip,
    Zstd,
}

/// Compresses a tar.
pub fn compress_file(tar: &[u8], packing: Packing) -> Vec<u8> {
    match packing {
        Packing::Plain => tar.to_vec(),
        Packing::Gzip => {
            let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
            encoder.write_all(tar).unwrap();
            encoder.finish().unwrap()
        }
        Packing::Zstd => zstd::encode_all(tar, 1).unwrap(),
    }
}

/// An image in memory: its blobs by digest, and the digests of manifest and configuration.
#[derive(Clone, Default)]
pub struct Image {
    pub blobs: BTreeMap<String, Vec<u8>>,
    pub manifest: String,
    pub config: String,
    pub layers: Vec<String>,
}

/// Builds an image of these tars.
pub fn image(tars: &[(Vec<u8>, Packing)]) -> Image {
    let mut image = Image::default();
    let mut layers = Vec::new();
    let mut diff_ids = Vec::new();
    for (tar, packing) in tars {
        let packed = compress_file(tar, *packing);
        let kind = match packing {
            Packing::Plain => "application/vnd.oci.image.layer.v1.tar",
            Packing::Gzip => "application/vnd.oci.image.layer.v1.tar+gzip",
            Packing::Zstd => "application/vnd.oci.image.layer.v1.tar+zstd",
        };
        layers.push(serde_json::json!({"mediaType": kind, "digest": digest(&packed), "size": packed.len()}));
        diff_ids.push(digest(tar));
        image.layers.push(digest(&packed));
        image.blobs.insert(digest(&packed), packed);
    }
    let config = serde_json::to_vec(&serde_json::json!({
        "architecture": "amd64", "os": "linux",
        "config": {"Cmd": ["/bin/sh"], "Env": ["A=b"], "User": "1000:1000", "WorkingDir": "/w", "Labels": {"l": "v"}},
        "rootfs": {"type": "layers", "diff_ids": diff_ids},
    }))
    .unwrap();
    let manifest = serde_json::to_vec(&serde_json::json!({
        "schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": {
            "mediaType": "application/vnd.oci.image.config.v1+json", "digest": digest(&config), "size": config.len(),
        },
        "layers": layers,
    }))
    .unwrap();
    image.config = digest(&config);
    image.manifest = digest(&manifest);
    image.blobs.insert(digest(&config), config);
    image.blobs.insert(digest(&manifest), manifest);
    image
}

/// The configuration of most artifacts.
pub const EMPTY_CONFIG: &str = "application/vnd.oci.empty.v1+json";

/// Builds an artifact of these files (annotations, content), with an artifact type unless it is empty.
pub fn artifact(artifact_type: &str, config_type: &str, files: &[(serde_json::Value, &[u8])]) -> Image {
    let mut image = Image::default();
    let mut layers = Vec::new();
    for (annotations, content) in files {
        layers.push(serde_json::json!({
            "mediaType": "application/vnd.example.file", "digest": digest(content), "size": content.len(),
            "annotations": annotations,
        }));
        image.layers.push(digest(content));
        image.blobs.insert(digest(content), content.to_vec());
    }
    let mut manifest = serde_json::json!({
        "schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": {"mediaType": config_type, "digest": digest(b"{}"), "size": 2},
        "layers": layers,
    });
    if !artifact_type.is_empty() {
        manifest["artifactType"] = artifact_type.into();
    }
    let manifest = serde_json::to_vec(&manifest).unwrap();
    image.config = digest(b"{}");
    image.manifest = digest(&manifest);
    image.blobs.insert(digest(b"{}"), b"{}".to_vec());
    image.blobs.insert(digest(&manifest), manifest);
    image
}

/// Returns the annotations of a file with this title.
pub fn title(text: &str) -> serde_json::Value {
    serde_json::json!({"org.opencontainers.image.title": text})
}

/// Writes an OCI layout of one image.
pub fn write_layout(image: &Image, directory: &Path, name: &str) {
    let blobs = directory.join("blobs/sha256");
    fs::create_dir_all(&blobs).unwrap();
    for (digest, bytes) in &image.blobs {
        fs::write(blobs.join(digest.strip_prefix("sha256:").unwrap()), bytes).unwrap();
    }
    fs::write(directory.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).unwrap();
    let index = serde_json::json!({"schemaVersion": 2, "manifests": [{
        "mediaType": "application/vnd.oci.image.manifest.v1+json", "digest": image.manifest,
        "size": image.blobs[&image.manifest].len(), "annotations": {"org.opencontainers.image.ref.name": name},
    }]});
    fs::write(directory.join("index.json"), serde_json::to_vec(&index).unwrap()).unwrap();
}

/// A builder that writes a tar entry by entry.
pub struct Tar(pub tar::Builder<Vec<u8>>);

impl Tar {
    pub fn new() -> Tar {
        Tar(tar::Builder::new(Vec::new()))
    }

    /// Returns a header with fixed owner and time.
    pub fn header(kind: tar::EntryType, mode: u32, size: u64) -> tar::Header {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(kind);
        header.set_mode(mode);
        header.set_uid(1);
        header.set_gid(2);
        header.set_mtime(1_700_000_000);
        header.set_size(size);
        header
    }

    pub fn file(mut self, path: &str, mode: u32, content: &[u8]) -> Tar {
        let mut header = Tar::header(tar::EntryType::Regular, mode, content.len() as u64);
        self.0.append_data(&mut header, path, content).unwrap();
        self
    }

    pub fn directory(mut self, path: &str, mode: u32) -> Tar {
        let mut header = Tar::header(tar::EntryType::Directory, mode, 0);
        self.0.append_data(&mut header, path, std::io::empty()).unwrap();
        self
    }

    pub fn link(mut self, kind: tar::EntryType, path: &str, target: &str) -> Tar {
        let mut header = Tar::header(kind, 0o777, 0);
        self.0.append_link(&mut header, path, target).unwrap();
        self
    }

    pub fn device(mut self, kind: tar::EntryType, path: &str, major: u32, minor: u32) -> Tar {
        let mut header = Tar::header(kind, 0o600, 0);
        header.set_device_major(major).unwrap();
        header.set_device_minor(minor).unwrap();
        self.0.append_data(&mut header, path, std::io::empty()).unwrap();
        self
    }

    /// Adds an entry whose name the builder would reject.
    pub fn raw(mut self, path: &[u8], kind: tar::EntryType, link: &[u8], content: &[u8]) -> Tar {
        let mut header = Tar::header(kind, 0o644, content.len() as u64);
        header.as_old_mut().name[..path.len()].copy_from_slice(path);
        header.as_old_mut().linkname[..link.len()].copy_from_slice(link);
        header.set_cksum();
        self.0.append(&header, content).unwrap();
        self
    }

    /// Adds pax records for the next entry.
    pub fn pax(mut self, records: &[(&str, &[u8])]) -> Tar {
        self.0.append_pax_extensions(records.iter().copied()).unwrap();
        self
    }

    pub fn done(self) -> Vec<u8> {
        self.0.into_inner().unwrap()
    }
}

/// The attributes of a file that a user can see.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    pub mode: u32,
    pub owner: (u32, u32),
    pub time: (i64, i64),
    pub device: u64,
    pub names: u64,
    pub content: String,
    pub xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
}

/// Returns everything below a directory, by path.
pub fn look(root: &Path) -> BTreeMap<Vec<u8>, Seen> {
    let mut seen = BTreeMap::new();
    let mut todo = vec![root.to_owned()];
    while let Some(path) = todo.pop() {
        let metadata = fs::symlink_metadata(&path).unwrap();
        let kind = metadata.file_type();
        let content = if kind.is_symlink() {
            format!("{:?}", fs::read_link(&path).unwrap())
        } else if kind.is_file() {
            format!("{} bytes {}", metadata.len(), content(&path))
        } else {
            String::new()
        };
        if kind.is_dir() {
            todo.extend(fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
        }
        let names = xattr::list(&path).map(Vec::from_iter).unwrap_or_default();
        let xattrs = names.into_iter().map(|name| {
            let value = xattr::get(&path, &name).unwrap().unwrap_or_default();
            (name.as_bytes().to_vec(), value)
        });
        seen.insert(
            path.strip_prefix(root).unwrap().as_os_str().as_bytes().to_vec(),
            Seen {
                mode: metadata.mode(),
                owner: (metadata.uid(), metadata.gid()),
                time: (metadata.mtime(), metadata.mtime_nsec()),
                device: metadata.rdev(),
                names: metadata.nlink(),
                content,
                xattrs: xattrs.collect(),
            },
        );
    }
    seen
}

/// Returns the hash of a file. Holes are hashed without being read, because large sparse files are slow to read.
fn content(path: &Path) -> String {
    let mut hash = Sha256::new();
    let mut file = File::open(path).unwrap();
    let mut buffer = vec![0; 1 << 20];
    loop {
        match file.read(&mut buffer).unwrap() {
            0 => return hex::encode(hash.finalize()),
            got => hash.update(&buffer[..got]),
        }
    }
}

/// A mounted image; unmounted when dropped.
pub struct Mounted {
    pub path: PathBuf,
    _directory: tempfile::TempDir,
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.path).status();
    }
}

/// Returns whether this machine can mount an EROFS from a file, or the reason why not.
pub fn can_mount() -> Result<(), String> {
    if !nix::unistd::geteuid().is_root() {
        return Err("mounting needs root".into());
    }
    if !Path::new("/dev/loop-control").exists() {
        return Err("there is no /dev/loop-control".into());
    }
    if !Command::new("losetup").arg("-f").output().is_ok_and(|output| output.status.success()) {
        return Err("there is no free loop device".into());
    }
    match fs::read_to_string("/proc/filesystems") {
        Ok(known) if known.contains("erofs") => {}
        _ => return Err("the kernel has no EROFS".into()),
    }
    let release = nix::sys::utsname::uname().map_err(|errno| errno.to_string())?;
    let release = release.release().to_string_lossy().into_owned();
    let numbers: Vec<u32> = release.split(['.', '-']).map_while(|part| part.parse().ok()).collect();
    if numbers < vec![6, 6] { Err(format!("kernel {release} is older than 6.6")) } else { Ok(()) }
}

/// Mounts an image as a guest sees it: its pieces one after the other on one device.
pub fn mount(disk: &ImageDisk) -> Mounted {
    let directory = tempfile::tempdir().unwrap();
    let device = directory.path().join("device");
    let mut file = File::create(&device).unwrap();
    for extent in &disk.extents {
        let piece = File::open(&extent.path).unwrap();
        assert_eq!(piece.metadata().unwrap().len(), extent.length);
        assert_eq!((extent.offset, extent.length % 4096), (0, 0));
        std::io::copy(&mut piece.take(extent.length), &mut file).unwrap();
    }
    drop(file);
    let path = directory.path().join("root");
    fs::create_dir(&path).unwrap();
    let status = Command::new("mount").args(["-t", "erofs", "-o", "ro,loop"]).arg(&device).arg(&path).status().unwrap();
    assert!(status.success(), "mount: {status}");
    Mounted { path, _directory: directory }
}
