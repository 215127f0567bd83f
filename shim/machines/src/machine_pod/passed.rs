//! Owns: PCI devices of the node that a machine gets by VFIO: what is in the groups that its container names, whether it can be had,
//! and where QEMU finds it: in a folder of the pod's that its processes see as /dev/vfio.
//! Reads sysfs; see the kernel's Documentation/driver-api/vfio.rst.

use nacelle_base::files::{FileError, at};
use nacelle_base::{Classify, Kind};
use nacelle_model::device::DeviceRequest;
use nacelle_model::machine::VFIO_DIR;
use nacelle_model::machine::{HostDevice, MOST_HOST_DEVICES, is_pci_address};
use nix::sys::stat::{Mode, SFlag, mknod};
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::Path;

/// Where the node has what containers of such devices name: a number for each group, and one for all of them.
const NODES: &str = "/dev/vfio";
/// What every holder of a group needs beside it.
const CONTAINER: &str = "vfio";
/// Where the kernel tells of its devices.
const SYSFS: &str = "/sys";
/// A bridge between PCI buses, which is in a group with what is behind it, and is nobody's device (PCI class code 06 04).
const BRIDGE: &str = "0x0604";
/// Drivers that leave a device to nobody: it does not stand in its group's way, and cannot be had (drivers/vfio/vfio_main.c).
const NOBODYS: &str = "pci-stub";

/// Why devices cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum PassedError {
    /// No group.
    #[error(
        "config.devices.host_path is {path:?}: /dev/vfio/NUMBER, the group of a PCI device, is what a machine can have of that folder"
    )]
    NoGroup {
        /// The path.
        path: String,
    },
    /// A group that is not there, or has nothing in it.
    #[error("config.devices.host_path is {path:?}: the node's kernel has no PCI device in this IOMMU group")]
    Nothing {
        /// The path.
        path: String,
    },
    /// Another driver has a device of the group.
    #[error(
        "config.devices.host_path is {path:?}: of its IOMMU group the node itself uses {address} (driver {driver}): whoever has one device of a \
         group has all of them; bind it to vfio-pci"
    )]
    Used {
        /// The path.
        path: String,
        /// The device.
        address: String,
        /// Its driver.
        driver: String,
    },
    /// More than a machine has places for.
    #[error("the machine is to have {count} PCI devices of the node, and has places for {MOST_HOST_DEVICES}")]
    TooMany {
        /// How many.
        count: usize,
    },
    /// Rights that a device behind an IOMMU cannot be given in part.
    #[error(
        "config.devices.permissions is {permissions:?} of {path:?}: a machine reads and writes its PCI devices; say \"rw\""
    )]
    Rights {
        /// As was asked.
        permissions: String,
        /// The path.
        path: String,
    },
    /// Sysfs, or the pod's folder.
    #[error(transparent)]
    File(#[from] FileError),
}

impl Classify for PassedError {
    fn kind(&self) -> Kind {
        match self {
            PassedError::NoGroup { .. } => Kind::Unsupported,
            PassedError::Nothing { .. } | PassedError::Rights { .. } => Kind::Invalid,
            PassedError::Used { .. } => Kind::Conflict,
            PassedError::TooMany { .. } => Kind::Exhausted,
            PassedError::File(error) => error.kind(),
        }
    }
}

/// Whether a container that asks for it means devices by VFIO.
pub fn is_vfio(device: &DeviceRequest) -> bool {
    Path::new(&device.host_path).starts_with(NODES)
}

/// The groups of a container, with the addresses of the devices of each.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Passed(BTreeMap<u32, Vec<String>>);

impl Passed {
    /// Looks for them. Blocks.
    pub fn find(devices: &[DeviceRequest]) -> Result<Passed, PassedError> {
        Ok(Passed(groups(devices, Path::new(SYSFS))?))
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The devices, in the order of groups and addresses.
    pub fn devices(&self) -> Vec<HostDevice> {
        self.0.values().flatten().map(|address| HostDevice { address: address.clone() }).collect()
    }

    /// Puts them where the machine of the pod of this folder finds them, which has not started yet. What an earlier container had is taken
    /// out. Blocks.
    pub fn place(&self, pod: &Path) -> Result<(), PassedError> {
        let folder = pod.join(VFIO_DIR);
        clear(&folder)?;
        if !self.is_empty() {
            node(&folder, CONTAINER)?;
        }
        for (number, members) in &self.0 {
            node(&folder, &number.to_string())?;
            for address in members {
                describe(&folder.join(address), *number)?;
            }
        }
        Ok(())
    }
}

/// What is in each group that is asked for.
fn groups(devices: &[DeviceRequest], sysfs: &Path) -> Result<BTreeMap<u32, Vec<String>>, PassedError> {
    let mut groups = BTreeMap::new();
    for device in devices.iter().filter(|device| is_vfio(device)) {
        let path = &device.host_path;
        if !['r', 'w'].iter().all(|right| device.permissions.contains(*right)) {
            return Err(PassedError::Rights { permissions: device.permissions.clone(), path: path.clone() });
        }
        let name = Path::new(path).strip_prefix(NODES).ok().and_then(Path::to_str).unwrap_or_default();
        if name == CONTAINER {
            continue;
        }
        // "+1" is a number, and no name of a group.
        let digits = name.bytes().all(|byte| byte.is_ascii_digit());
        let number = name.parse::<u32>().ok().filter(|_| digits);
        let number = number.ok_or_else(|| PassedError::NoGroup { path: path.clone() })?;
        groups.insert(number, members(number, path, sysfs)?);
    }
    let count = groups.values().map(Vec::len).sum();
    if count > MOST_HOST_DEVICES {
        return Err(PassedError::TooMany { count });
    }
    Ok(groups)
}

/// The addresses of the devices of a group that a machine can have, all of which must be VFIO's.
fn members(number: u32, path: &str, sysfs: &Path) -> Result<Vec<String>, PassedError> {
    let folder = sysfs.join(format!("kernel/iommu_groups/{number}/devices"));
    let nothing = || PassedError::Nothing { path: path.to_owned() };
    let entries = match fs::read_dir(&folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(nothing()),
        entries => entries.map_err(at("read", &folder))?,
    };
    let mut members = Vec::new();
    for entry in entries {
        let entry = entry.map_err(at("read", &folder))?;
        // Devices of other buses are nothing that a machine could have.
        let Ok(address) = entry.file_name().into_string() else { continue };
        let class = entry.path().join("class");
        if !is_pci_address(&address) || fs::read_to_string(class).is_ok_and(|class| class.starts_with(BRIDGE)) {
            continue;
        }
        match fs::read_link(entry.path().join("driver")) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            link => {
                let link = link.map_err(at("read", &entry.path()))?;
                let driver = link.file_name().unwrap_or_default().to_string_lossy().into_owned();
                // Also mlx5_vfio_pci and its like, of makers who know more of their devices.
                match driver.replace('_', "-") {
                    vfio if vfio == "vfio-pci" || vfio.ends_with("-vfio-pci") => members.push(address),
                    nobodys if nobodys == NOBODYS => {}
                    _ => return Err(PassedError::Used { path: path.to_owned(), address, driver }),
                }
            }
        }
    }
    members.sort();
    if members.is_empty() { Err(nothing()) } else { Ok(members) }
}

/// Empties the folder. The machine's processes only read it: by path it is what it was made as.
fn clear(folder: &Path) -> Result<(), PassedError> {
    let entries = match fs::read_dir(folder) {
        // A pod of a daemon that did not pass devices.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries.map_err(at("read", folder))?,
    };
    for entry in entries {
        let entry = entry.map_err(at("read", folder))?;
        let path = entry.path();
        let kind = entry.file_type().map_err(at("read", &path))?;
        let removed = if kind.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
        removed.map_err(at("remove", &path))?;
    }
    Ok(())
}

/// Makes the node's device of this name again, for the owner alone.
fn node(folder: &Path, name: &str) -> Result<(), PassedError> {
    let (of_node, path) = (Path::new(NODES).join(name), folder.join(name));
    let metadata = fs::metadata(&of_node).map_err(at("read", &of_node))?;
    let mode = Mode::S_IRUSR | Mode::S_IWUSR;
    mknod(&path, SFlag::S_IFCHR, mode, metadata.rdev()).map_err(io::Error::from).map_err(at("make", &path))?;
    Ok(())
}

/// Makes what QEMU reads of a device: which group it is in.
fn describe(device: &Path, group: u32) -> Result<(), PassedError> {
    fs::create_dir(device).map_err(at("make", device))?;
    Ok(symlink(format!("../{group}"), device.join("iommu_group")).map_err(at("make", device))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn devices(paths: &[&str]) -> Vec<DeviceRequest> {
        let device = |path: &&str| DeviceRequest {
            host_path: (*path).to_owned(),
            container_path: (*path).to_owned(),
            permissions: "rwm".to_owned(),
        };
        paths.iter().map(device).collect()
    }

    /// A group with these devices: address, class, driver.
    fn group(sysfs: &Path, number: u32, members: &[(&str, &str, Option<&str>)]) {
        for (address, class, driver) in members {
            let folder = sysfs.join(format!("kernel/iommu_groups/{number}/devices/{address}"));
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join("class"), format!("{class}\n")).unwrap();
            if let Some(driver) = driver {
                symlink(format!("../../../bus/pci/drivers/{driver}"), folder.join("driver")).unwrap();
            }
        }
    }

    #[test]
    fn a_group_is_had_as_a_whole_or_not() {
        let sysfs = tempfile::tempdir().unwrap();
        let nic = "0x020000";
        let bridge = ("0000:00:02.0", "0x060400", Some("pcieport"));
        group(
            sysfs.path(),
            7,
            &[bridge, ("0000:02:00.1", nic, Some("mlx5_vfio_pci")), ("0000:02:00.0", nic, Some("vfio-pci"))],
        );
        group(sysfs.path(), 8, &[("0000:03:00.0", nic, Some("vfio-pci")), ("0000:03:00.1", nic, Some("e1000e"))]);
        group(sysfs.path(), 9, &[bridge, ("0000:04:00.0", nic, None), ("0000:04:00.1", nic, Some("pci-stub"))]);
        let found = |paths: &[&str]| groups(&devices(paths), sysfs.path());
        let both = found(&["/dev/vfio/vfio", "/dev/vfio/7", "/dev/vfio/7", "/dev/sda"]).unwrap();
        assert_eq!(both, BTreeMap::from([(7, vec!["0000:02:00.0".to_owned(), "0000:02:00.1".to_owned()])]));
        for (path, kind, words) in [
            ("/dev/vfio/8", Kind::Conflict, "0000:03:00.1 (driver e1000e)"),
            ("/dev/vfio/9", Kind::Invalid, "no PCI device"),
            ("/dev/vfio/10", Kind::Invalid, "no PCI device"),
            ("/dev/vfio/devices/vfio0", Kind::Unsupported, "/dev/vfio/NUMBER"),
            ("/dev/vfio/+7", Kind::Unsupported, "/dev/vfio/NUMBER"),
            ("/dev/vfio", Kind::Unsupported, "/dev/vfio/NUMBER"),
        ] {
            let error = found(&[path]).unwrap_err();
            assert_eq!(error.kind(), kind, "{path}: {error}");
            assert!(error.to_string().contains(words), "{error}");
        }
        assert!(found(&["/dev/vfio/vfio"]).unwrap().is_empty());
        let read_only =
            devices(&["/dev/vfio/7"]).into_iter().map(|device| DeviceRequest { permissions: "rm".into(), ..device });
        let error = groups(&read_only.collect::<Vec<_>>(), sysfs.path()).unwrap_err();
        assert!(error.kind() == Kind::Invalid && error.to_string().contains("\"rm\""), "{error}");
    }

    #[test]
    fn a_machine_has_places_for_some() {
        let sysfs = tempfile::tempdir().unwrap();
        let addresses: Vec<String> = (0..=MOST_HOST_DEVICES).map(|n| format!("0000:{n:02x}:00.0")).collect();
        let members: Vec<_> =
            addresses.iter().map(|address| (address.as_str(), "0x020000", Some("vfio-pci"))).collect();
        group(sysfs.path(), 1, &members);
        let error = groups(&devices(&["/dev/vfio/1"]), sysfs.path()).unwrap_err();
        assert!(matches!(error, PassedError::TooMany { count } if count == MOST_HOST_DEVICES + 1), "{error}");
    }

    #[test]
    fn qemu_finds_a_device_by_its_group_until_the_next_container() {
        let pod = tempfile::tempdir().unwrap();
        let folder = pod.path().join(VFIO_DIR);
        clear(&folder).unwrap();
        fs::create_dir(&folder).unwrap();
        for address in ["0000:02:00.0", "0000:02:00.1"] {
            describe(&folder.join(address), 7).unwrap();
        }
        let told = fs::read_link(folder.join("0000:02:00.0/iommu_group")).unwrap();
        assert_eq!(told.file_name().unwrap(), "7");
        fs::write(folder.join("7"), "").unwrap();
        Passed::default().place(pod.path()).unwrap();
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 0);
    }
}
