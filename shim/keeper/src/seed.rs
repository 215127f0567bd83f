//! Owns: the disk that cloud-init reads: a small FAT file system with a label, in memory. Pure.
//! Sources: cloud-init's documentation of its data sources NoCloud and ConfigDrive.

use crate::error::KeeperError;
use crate::network::{open_stack, version_2};
use crate::spec::{CloudInit, CloudInitForm};
use nacelle_proto::agent::BootConfig;
use serde_json::json;
use std::io::{Cursor, Write};

/// The size of the file system, in bytes, beside what is on it.
const SPARE: usize = 256 << 10;
/// The smallest that is made.
const LEAST: usize = 512 << 10;

/// The disk, byte by byte.
pub fn disk(data: &CloudInit, network: &BootConfig) -> Result<Vec<u8>, KeeperError> {
    let (label, files) = match data.form {
        CloudInitForm::NoCloud => (*b"CIDATA     ", no_cloud(data, network)),
        CloudInitForm::ConfigDrive => (*b"CONFIG-2   ", config_drive(data, network)),
    };
    write(label, &files).map_err(|source| KeeperError::Resources { what: "a disk for cloud-init", source })
}

type Files = Vec<(&'static str, String)>;

fn no_cloud(data: &CloudInit, network: &BootConfig) -> Files {
    let mut meta = json!({ "instance-id": data.instance, "local-hostname": data.hostname });
    if !data.keys.is_empty() {
        meta["public-keys"] = json!(data.keys);
    }
    let network = data.network_data.clone().unwrap_or_else(|| version_2(network).to_string());
    // JSON is YAML.
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

fn write(label: [u8; 11], files: &Files) -> std::io::Result<Vec<u8>> {
    let bytes: usize = files.iter().map(|(_, text)| text.len()).sum();
    let size = (bytes + SPARE).max(LEAST).next_multiple_of(4096);
    let mut disk = Cursor::new(vec![0; size]);
    fatfs::format_volume(&mut disk, fatfs::FormatVolumeOptions::new().volume_label(label))?;
    {
        let system = fatfs::FileSystem::new(&mut disk, fatfs::FsOptions::new())?;
        for (path, text) in files {
            let mut folder = system.root_dir();
            let mut parts = path.split('/').peekable();
            while let Some(part) = parts.next() {
                if parts.peek().is_some() {
                    folder = folder.create_dir(part)?;
                } else {
                    let mut file = folder.create_file(part)?;
                    file.write_all(text.as_bytes())?;
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
}
