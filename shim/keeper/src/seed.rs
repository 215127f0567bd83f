//! Builds small labelled FAT file systems in memory: the disk that cloud-init reads (see its data sources NoCloud and
//! ConfigDrive), and disks with files. The functions are pure.

use crate::error::KeeperError;
use crate::lines::printable;
use crate::network::{open_stack, version_2};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use nacelle_model::machine::{CloudInit, CloudInitForm, FilesDisk};
use nacelle_proto::agent::BootConfig;
use serde_json::json;
use std::io::{Cursor, Write};

/// The size of the file system in bytes in addition to its files.
const SPARE: usize = 256 << 10;
/// The minimum size in bytes.
const LEAST: usize = 512 << 10;
/// The length of a label in bytes.
const LABEL: usize = 11;
/// The largest cluster of a file system of this size, in bytes.
const CLUSTER: usize = 4096;
/// The size of a directory entry in bytes.
const ENTRY: usize = 32;
/// The characters of a long name per entry; each name has one further entry.
const LETTERS: usize = 13;

/// Returns the raw cloud-init disk.
pub fn disk(data: &CloudInit, network: &BootConfig) -> Result<Vec<u8>, KeeperError> {
    let (label, files) = match data.form {
        CloudInitForm::NoCloud => (*b"CIDATA     ", no_cloud(data, network)),
        CloudInitForm::ConfigDrive => (*b"CONFIG-2   ", config_drive(data, network)),
    };
    let files: Vec<_> = files.iter().map(|(path, text)| (*path, text.as_bytes())).collect();
    write(label, &files).map_err(|source| KeeperError::Resources { what: "a disk for cloud-init", source })
}

/// Returns a raw disk with these files.
pub fn files(disk: &FilesDisk) -> Result<Vec<u8>, KeeperError> {
    let wrong = |field, value: &str, rule| KeeperError::Field { field, value: printable(value), rule };
    let mut label = [b' '; LABEL];
    let place = label.get_mut(..disk.label.len());
    let place =
        place.ok_or_else(|| wrong("disks[].source.files.label", &disk.label, "at most 11 bytes are expected"))?;
    place.copy_from_slice(disk.label.as_bytes());
    let mut files = Vec::with_capacity(disk.files.len());
    for (path, text) in &disk.files {
        let bytes = STANDARD.decode(text);
        files.push((path.as_str(), bytes.map_err(|_none| wrong("disks[].source.files", path, "base64 is expected"))?));
    }
    let files: Vec<_> = files.iter().map(|(path, bytes)| (*path, bytes.as_slice())).collect();
    write(label, &files).map_err(|source| KeeperError::Resources { what: "a disk with files", source })
}

type Files = Vec<(&'static str, String)>;

fn no_cloud(data: &CloudInit, network: &BootConfig) -> Files {
    let mut meta = json!({ "instance-id": data.instance, "local-hostname": data.hostname });
    if !data.keys.is_empty() {
        meta["public-keys"] = json!(data.keys);
    }
    let network = data.network_data.clone().unwrap_or_else(|| version_2(network).to_string());
    // JSON is valid YAML.
    vec![("meta-data", meta.to_string()), ("user-data", data.user_data.clone()), ("network-config", network)]
}

fn config_drive(data: &CloudInit, network: &BootConfig) -> Files {
    let keys: serde_json::Map<_, _> =
        data.keys.iter().enumerate().map(|(n, key)| (format!("key{n}"), json!(key))).collect();
    let meta = json!({
        "uuid": data.instance,
        "instance_id": data.instance,
        "hostname": data.hostname,
        "local_hostname": data.hostname,
        "public_keys": keys,
    });
    let network = data.network_data.clone().unwrap_or_else(|| open_stack(network).to_string());
    vec![
        ("openstack/latest/meta_data.json", meta.to_string()),
        ("openstack/latest/user_data", data.user_data.clone()),
        ("openstack/latest/network_data.json", network),
    ]
}

fn write(label: [u8; LABEL], files: &[(&str, &[u8])]) -> std::io::Result<Vec<u8>> {
    let bytes: usize = files.iter().map(|(_, bytes)| bytes.len().next_multiple_of(CLUSTER)).sum();
    let parts = files.iter().map(|(path, _)| path.split('/').map(|part| part.len() / LETTERS + 2).sum::<usize>());
    let entries = (parts.sum::<usize>() + 1).max(512).next_multiple_of(CLUSTER / ENTRY);
    // In subdirectories, each directory starts a cluster of its own.
    let directories: usize = files.iter().map(|(path, _)| path.matches('/').count()).sum();
    let room = bytes + entries * ENTRY * 2 + directories * CLUSTER;
    let size = (room + SPARE).max(LEAST).next_multiple_of(CLUSTER);
    let mut disk = Cursor::new(vec![0; size]);
    let options = fatfs::FormatVolumeOptions::new().volume_label(label);
    let options = options.max_root_dir_entries(u16::try_from(entries).map_err(std::io::Error::other)?);
    fatfs::format_volume(&mut disk, options)?;
    {
        let system = fatfs::FileSystem::new(&mut disk, fatfs::FsOptions::new())?;
        for (path, bytes) in files {
            let mut directory = system.root_dir();
            let mut parts = path.split('/').peekable();
            while let Some(part) = parts.next() {
                if parts.peek().is_some() {
                    directory = directory.create_dir(part)?;
                } else {
                    let mut file = directory.create_file(part)?;
                    file.write_all(bytes)?;
                    file.flush()?;
                }
            }
        }
        system.unmount()?;
    }
    Ok(disk.into_inner())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    fn data(form: CloudInitForm) -> CloudInit {
        CloudInit {
            form,
            instance: "i-1".into(),
            hostname: "db".into(),
            keys: vec!["ssh-ed25519 AAAA me".into()],
            user_data: "#cloud-config\n".repeat(40_000),
            network_data: None,
        }
    }

    fn read(disk: Vec<u8>, path: &str) -> String {
        let system = fatfs::FileSystem::new(Cursor::new(disk), fatfs::FsOptions::new()).unwrap();
        let mut text = String::new();
        system.root_dir().open_file(path).unwrap().read_to_string(&mut text).unwrap();
        text
    }

    #[test]
    fn a_seed_has_its_label_and_its_files() {
        let seed = disk(&data(CloudInitForm::NoCloud), &BootConfig::default()).unwrap();
        let system = fatfs::FileSystem::new(Cursor::new(seed.clone()), fatfs::FsOptions::new()).unwrap();
        assert_eq!(system.volume_label(), "CIDATA");
        assert_eq!(read(seed.clone(), "user-data").len(), 40_000 * 14);
        let meta: serde_json::Value = serde_json::from_str(&read(seed, "meta-data")).unwrap();
        assert_eq!((meta["instance-id"].as_str(), meta["local-hostname"].as_str()), (Some("i-1"), Some("db")));
        assert_eq!(meta["public-keys"][0], "ssh-ed25519 AAAA me");
    }

    #[test]
    fn a_config_drive_is_openstacks() {
        let mut data = data(CloudInitForm::ConfigDrive);
        data.network_data = Some("{}".into());
        let drive = disk(&data, &BootConfig::default()).unwrap();
        let meta: serde_json::Value =
            serde_json::from_str(&read(drive.clone(), "openstack/latest/meta_data.json")).unwrap();
        assert_eq!(meta["public_keys"]["key0"], "ssh-ed25519 AAAA me");
        assert_eq!(read(drive, "openstack/latest/network_data.json"), "{}");
    }

    #[test]
    fn as_many_files_as_may_be_are_all_there() {
        let text = |n: usize| format!("{n}").repeat(1000);
        let name = |n: usize| format!("{n}-directory/{}", "k".repeat(240));
        let long = |n: usize| format!("{n}-{}", "k".repeat(30));
        let wide = (0..900).map(|n| (long(n), STANDARD.encode(text(n))));
        let deep = (900..1000).map(|n| (name(n), STANDARD.encode(text(n))));
        let disk = FilesDisk { label: "cfgdata".into(), files: wide.chain(deep).collect() };
        assert!(!format!("{disk:?}").contains(&STANDARD.encode(text(1))));
        let bytes = files(&disk).unwrap();
        let system = fatfs::FileSystem::new(Cursor::new(bytes.clone()), fatfs::FsOptions::new()).unwrap();
        assert_eq!((system.volume_label(), system.root_dir().iter().count()), ("cfgdata".to_owned(), 1000));
        assert_eq!(read(bytes.clone(), &long(899)), text(899));
        assert_eq!(read(bytes, &name(999)), text(999));
        let one = vec![7u8; 4 << 20];
        let big = FilesDisk { label: String::new(), files: [("big".to_owned(), STANDARD.encode(&one))].into() };
        assert!(files(&big).unwrap().windows(one.len()).any(|part| part == one));
        let wrong = FilesDisk { label: "twelve-bytes".into(), files: [].into() };
        assert!(files(&wrong).unwrap_err().to_string().contains("at most 11 bytes"));
        let wrong = FilesDisk { label: String::new(), files: [("a".to_owned(), "?".to_owned())].into() };
        assert!(files(&wrong).unwrap_err().to_string().contains("base64"));
    }
}
