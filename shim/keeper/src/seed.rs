//! Builds small labelled FAT file systems in memory: the disk that cloud-init reads (see its data sources NoCloud and
//! ConfigDrive), and disks with files. The functions are pure.

use crate::error::KeeperError;
use crate::json_lines::printable;
use crate::network::{network_config_v2, openstack_network_data};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use nacelle_model::machine::{CloudInit, CloudInitForm, FilesDisk};
use nacelle_proto::agent::BootConfig;
use serde_json::json;
use std::io::{Cursor, Write};

/// The size of the file system in bytes in addition to its files.
const SPARE_BYTES: usize = 256 << 10;
/// The minimum size in bytes.
const MIN_SIZE: usize = 512 << 10;
/// The length of a label in bytes.
const LABEL_LENGTH: usize = 11;
/// The largest cluster, in bytes, of the FAT file systems that this module builds.
const MAX_CLUSTER: usize = 4096;
/// The size of a directory entry in bytes.
const DIRECTORY_ENTRY: usize = 32;
/// The characters of a long name per entry; each name has one further entry.
const CHARACTERS_PER_ENTRY: usize = 13;

/// Returns the raw cloud-init disk.
pub fn cloud_init_disk(data: &CloudInit, network: &BootConfig) -> Result<Vec<u8>, KeeperError> {
    let (label, files) = match data.form {
        CloudInitForm::NoCloud => (*b"CIDATA     ", no_cloud_files(data, network)),
        CloudInitForm::ConfigDrive => (*b"CONFIG-2   ", config_drive_files(data, network)),
    };
    let files: Vec<_> = files.iter().map(|(path, text)| (*path, text.as_bytes())).collect();
    build_fat(label, &files).map_err(|source| KeeperError::Resource { what: "build the cloud-init disk", source })
}

/// Returns a raw disk with these files.
pub fn files_disk(disk: &FilesDisk) -> Result<Vec<u8>, KeeperError> {
    let invalid = |field, value: &str, rule| KeeperError::InvalidField { field, value: printable(value), rule };
    let mut label = [b' '; LABEL_LENGTH];
    let target = label.get_mut(..disk.label.len());
    let target =
        target.ok_or_else(|| invalid("disks[].source.files.label", &disk.label, "at most 11 bytes are expected"))?;
    target.copy_from_slice(disk.label.as_bytes());
    let mut files = Vec::with_capacity(disk.files.len());
    for (path, text) in &disk.files {
        let bytes = STANDARD.decode(text);
        files
            .push((path.as_str(), bytes.map_err(|_none| invalid("disks[].source.files", path, "base64 is expected"))?));
    }
    let files: Vec<_> = files.iter().map(|(path, bytes)| (*path, bytes.as_slice())).collect();
    build_fat(label, &files).map_err(|source| KeeperError::Resource { what: "build the disk with files", source })
}

type SeedFiles = Vec<(&'static str, String)>;

fn no_cloud_files(data: &CloudInit, network: &BootConfig) -> SeedFiles {
    let mut meta = json!({ "instance-id": data.instance, "local-hostname": data.hostname });
    if !data.keys.is_empty() {
        meta["public-keys"] = json!(data.keys);
    }
    let network = data.network_data.clone().unwrap_or_else(|| network_config_v2(network).to_string());
    // JSON is valid YAML.
    vec![("meta-data", meta.to_string()), ("user-data", data.user_data.clone()), ("network-config", network)]
}

fn config_drive_files(data: &CloudInit, network: &BootConfig) -> SeedFiles {
    let keys: serde_json::Map<_, _> =
        data.keys.iter().enumerate().map(|(n, key)| (format!("key{n}"), json!(key))).collect();
    let meta = json!({
        "uuid": data.instance,
        "instance_id": data.instance,
        "hostname": data.hostname,
        "local_hostname": data.hostname,
        "public_keys": keys,
    });
    let network = data.network_data.clone().unwrap_or_else(|| openstack_network_data(network).to_string());
    vec![
        ("openstack/latest/meta_data.json", meta.to_string()),
        ("openstack/latest/user_data", data.user_data.clone()),
        ("openstack/latest/network_data.json", network),
    ]
}

fn build_fat(label: [u8; LABEL_LENGTH], files: &[(&str, &[u8])]) -> std::io::Result<Vec<u8>> {
    let bytes: usize = files.iter().map(|(_, bytes)| bytes.len().next_multiple_of(MAX_CLUSTER)).sum();
    let parts =
        files.iter().map(|(path, _)| path.split('/').map(|part| part.len() / CHARACTERS_PER_ENTRY + 2).sum::<usize>());
    let entries = (parts.sum::<usize>() + 1).max(512).next_multiple_of(MAX_CLUSTER / DIRECTORY_ENTRY);
    // In subdirectories, each directory starts a cluster of its own.
    let directories: usize = files.iter().map(|(path, _)| path.matches('/').count()).sum();
    let needed = bytes + entries * DIRECTORY_ENTRY * 2 + directories * MAX_CLUSTER;
    let size = (needed + SPARE_BYTES).max(MIN_SIZE).next_multiple_of(MAX_CLUSTER);
    let mut disk = Cursor::new(vec![0; size]);
    let options = fatfs::FormatVolumeOptions::new().volume_label(label);
    let options = options.max_root_dir_entries(u16::try_from(entries).map_err(std::io::Error::other)?);
    fatfs::format_volume(&mut disk, options)?;
    {
        let filesystem = fatfs::FileSystem::new(&mut disk, fatfs::FsOptions::new())?;
        for (path, bytes) in files {
            let mut directory = filesystem.root_dir();
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
        filesystem.unmount()?;
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
        let filesystem = fatfs::FileSystem::new(Cursor::new(disk), fatfs::FsOptions::new()).unwrap();
        let mut text = String::new();
        filesystem.root_dir().open_file(path).unwrap().read_to_string(&mut text).unwrap();
        text
    }

    #[test]
    fn a_seed_has_its_label_and_its_files() {
        let seed = cloud_init_disk(&data(CloudInitForm::NoCloud), &BootConfig::default()).unwrap();
        let filesystem = fatfs::FileSystem::new(Cursor::new(seed.clone()), fatfs::FsOptions::new()).unwrap();
        assert_eq!(filesystem.volume_label(), "CIDATA");
        assert_eq!(read(seed.clone(), "user-data").len(), 40_000 * 14);
        let meta: serde_json::Value = serde_json::from_str(&read(seed, "meta-data")).unwrap();
        assert_eq!((meta["instance-id"].as_str(), meta["local-hostname"].as_str()), (Some("i-1"), Some("db")));
        assert_eq!(meta["public-keys"][0], "ssh-ed25519 AAAA me");
    }

    #[test]
    fn a_config_drive_has_openstacks_layout() {
        let mut data = data(CloudInitForm::ConfigDrive);
        data.network_data = Some("{}".into());
        let drive = cloud_init_disk(&data, &BootConfig::default()).unwrap();
        let meta: serde_json::Value =
            serde_json::from_str(&read(drive.clone(), "openstack/latest/meta_data.json")).unwrap();
        assert_eq!(meta["public_keys"]["key0"], "ssh-ed25519 AAAA me");
        assert_eq!(read(drive, "openstack/latest/network_data.json"), "{}");
    }

    #[test]
    fn the_maximum_number_of_files_fits() {
        let text = |n: usize| format!("{n}").repeat(1000);
        let name = |n: usize| format!("{n}-directory/{}", "k".repeat(240));
        let long = |n: usize| format!("{n}-{}", "k".repeat(30));
        let wide = (0..900).map(|n| (long(n), STANDARD.encode(text(n))));
        let deep = (900..1000).map(|n| (name(n), STANDARD.encode(text(n))));
        let disk = FilesDisk { label: "cfgdata".into(), files: wide.chain(deep).collect() };
        assert!(!format!("{disk:?}").contains(&STANDARD.encode(text(1))));
        let bytes = files_disk(&disk).unwrap();
        let filesystem = fatfs::FileSystem::new(Cursor::new(bytes.clone()), fatfs::FsOptions::new()).unwrap();
        assert_eq!((filesystem.volume_label(), filesystem.root_dir().iter().count()), ("cfgdata".to_owned(), 1000));
        assert_eq!(read(bytes.clone(), &long(899)), text(899));
        assert_eq!(read(bytes, &name(999)), text(999));
        let one = vec![7u8; 4 << 20];
        let big = FilesDisk { label: String::new(), files: [("big".to_owned(), STANDARD.encode(&one))].into() };
        assert!(files_disk(&big).unwrap().windows(one.len()).any(|part| part == one));
        let invalid = FilesDisk { label: "twelve-bytes".into(), files: [].into() };
        assert!(files_disk(&invalid).unwrap_err().to_string().contains("at most 11 bytes"));
        let invalid = FilesDisk { label: String::new(), files: [("a".to_owned(), "?".to_owned())].into() };
        assert!(files_disk(&invalid).unwrap_err().to_string().contains("base64"));
    }
}
