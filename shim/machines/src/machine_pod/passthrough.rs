//! Passes PCI devices of the node to a machine by VFIO: lists the devices in the IOMMU groups that its container names, checks
//! that they are available, and creates their nodes for QEMU in a directory of the pod that the pod's processes see as /dev/vfio.
//! Reads sysfs; see the kernel's Documentation/driver-api/vfio.rst.

use nacelle_base::files::{FileError, at};
use nacelle_base::{Classify, FailureKind};
use nacelle_model::device::DeviceRequest;
use nacelle_model::machine::VFIO_DIR;
use nacelle_model::machine::{HostDevice, MOST_HOST_DEVICES, is_pci_address};
use nix::sys::stat::{Mode, SFlag, mknod};
use std::collections::BTreeMap;
use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::Path;

/// The node's directory of VFIO devices: a number for each group, and one device for all of them.
const VFIO_DIRECTORY: &str = "/dev/vfio";
/// The device that every user of a group needs in addition.
const VFIO_CONTAINER: &str = "vfio";
/// The mount point of sysfs.
const SYSFS: &str = "/sys";
/// The PCI class of a bridge (06 04), which shares a group with the devices behind it and is not passed itself.
const BRIDGE: &str = "0x0604";
/// The driver of devices that are not used: such a device does not block its group, and cannot be passed
/// (drivers/vfio/vfio_main.c).
const UNUSED_DRIVER: &str = "pci-stub";

/// Why devices are not available.
#[derive(Debug, thiserror::Error)]
pub enum PassthroughError {
    /// The path is not a VFIO group.
    #[error(
        "config.devices.host_path is {path:?}: of that directory, a machine pod can only have /dev/vfio/NUMBER, the IOMMU group of a PCI device"
    )]
    NoGroup {
        /// The path of the device on the node, for example /dev/vfio/12.
        path: String,
    },
    /// The group does not exist, or is empty.
    #[error("config.devices.host_path is {path:?}: the node's kernel has no PCI device in this IOMMU group")]
    EmptyGroup {
        /// The path of the device on the node, for example /dev/vfio/12.
        path: String,
    },
    /// Another driver uses a device of the group.
    #[error(
        "config.devices.host_path is {path:?}: the node itself uses {address} (driver {driver}) of this IOMMU group, and a group can only be \
         passed as a whole; bind the device to vfio-pci"
    )]
    Used {
        /// The path of the device on the node, for example /dev/vfio/12.
        path: String,
        /// The device's PCI address.
        address: String,
        /// The device's driver.
        driver: String,
    },
    /// The number of devices exceeds the machine's slots.
    #[error("cannot pass {count} PCI devices of the node to the VM: it has slots for {MOST_HOST_DEVICES}")]
    TooMany {
        /// The number of devices.
        count: usize,
    },
    /// The permissions of a passed device cannot be restricted.
    #[error(
        "config.devices.permissions is {permissions:?} for {path:?}: a VM reads and writes its PCI devices; use \"rw\""
    )]
    Permissions {
        /// The requested permissions.
        permissions: String,
        /// The path of the device on the node, for example /dev/vfio/12.
        path: String,
    },
    /// An operation on sysfs or in the pod's directory failed.
    #[error(transparent)]
    File(#[from] FileError),
}

impl Classify for PassthroughError {
    fn kind(&self) -> FailureKind {
        match self {
            PassthroughError::NoGroup { .. } => FailureKind::Unsupported,
            PassthroughError::EmptyGroup { .. } | PassthroughError::Permissions { .. } => FailureKind::Invalid,
            PassthroughError::Used { .. } => FailureKind::Conflict,
            PassthroughError::TooMany { .. } => FailureKind::Exhausted,
            PassthroughError::File(error) => error.kind(),
        }
    }
}

/// Returns whether this device request is for VFIO.
pub fn is_vfio(device: &DeviceRequest) -> bool {
    Path::new(&device.host_path).starts_with(VFIO_DIRECTORY)
}

/// The IOMMU groups of a container, with the PCI addresses of their devices.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct PassthroughDevices(BTreeMap<u32, Vec<String>>);

impl PassthroughDevices {
    /// Finds the groups of these device requests. Blocks.
    pub fn find(devices: &[DeviceRequest]) -> Result<PassthroughDevices, PassthroughError> {
        Ok(PassthroughDevices(find_groups(devices, Path::new(SYSFS))?))
    }

    /// Returns whether there is no group.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the devices, sorted by group and address.
    pub fn devices(&self) -> Vec<HostDevice> {
        self.0.values().flatten().map(|address| HostDevice { address: address.clone() }).collect()
    }

    /// Creates the device nodes for the machine of the pod with this directory, which must not have started; `user` is that of the
    /// pod's processes, `None` for root. Removes those of an earlier container. Blocks.
    pub fn create_nodes(&self, pod: &Path, user: Option<u32>) -> Result<(), PassthroughError> {
        let directory = pod.join(VFIO_DIR);
        remove_entries(&directory)?;
        let create = |name: &str| create_node(&directory, name, Path::new(VFIO_DIRECTORY), user);
        if !self.is_empty() {
            create(VFIO_CONTAINER)?;
        }
        for (number, members) in &self.0 {
            create(&number.to_string())?;
            for address in members {
                create_group_link(&directory.join(address), *number)?;
            }
        }
        Ok(())
    }
}

/// Returns the devices of each requested group.
fn find_groups(devices: &[DeviceRequest], sysfs: &Path) -> Result<BTreeMap<u32, Vec<String>>, PassthroughError> {
    let mut groups = BTreeMap::new();
    for device in devices.iter().filter(|device| is_vfio(device)) {
        let path = &device.host_path;
        if !['r', 'w'].iter().all(|letter| device.permissions.contains(*letter)) {
            return Err(PassthroughError::Permissions { permissions: device.permissions.clone(), path: path.clone() });
        }
        let name = Path::new(path).strip_prefix(VFIO_DIRECTORY).ok().and_then(Path::to_str).unwrap_or_default();
        if name == VFIO_CONTAINER {
            continue;
        }
        // "+1" parses as a number, but is not the name of a group.
        let digits = name.bytes().all(|byte| byte.is_ascii_digit());
        let number = name.parse::<u32>().ok().filter(|_| digits);
        let number = number.ok_or_else(|| PassthroughError::NoGroup { path: path.clone() })?;
        groups.insert(number, group_members(number, path, sysfs)?);
    }
    let count = groups.values().map(Vec::len).sum();
    if count > MOST_HOST_DEVICES {
        return Err(PassthroughError::TooMany { count });
    }
    Ok(groups)
}

/// Returns the addresses of a group's devices that can be passed, all of which must have a VFIO driver.
fn group_members(number: u32, path: &str, sysfs: &Path) -> Result<Vec<String>, PassthroughError> {
    let directory = sysfs.join(format!("kernel/iommu_groups/{number}/devices"));
    let empty_group = || PassthroughError::EmptyGroup { path: path.to_owned() };
    let entries = match fs::read_dir(&directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(empty_group()),
        entries => entries.map_err(at("read", &directory))?,
    };
    let mut members = Vec::new();
    for entry in entries {
        let entry = entry.map_err(at("read", &directory))?;
        // Devices of other buses cannot be passed.
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
                // Includes vendor drivers such as mlx5_vfio_pci.
                match driver.replace('_', "-") {
                    vfio if vfio == "vfio-pci" || vfio.ends_with("-vfio-pci") => members.push(address),
                    nobodys if nobodys == UNUSED_DRIVER => {}
                    _ => return Err(PassthroughError::Used { path: path.to_owned(), address, driver }),
                }
            }
        }
    }
    members.sort();
    if members.is_empty() { Err(empty_group()) } else { Ok(members) }
}

/// Empties the directory. The machine's processes can only read it, so its paths are as the daemon created them.
fn remove_entries(directory: &Path) -> Result<(), PassthroughError> {
    let entries = match fs::read_dir(directory) {
        // The pod was created by a daemon that could not pass devices.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries.map_err(at("read", directory))?,
    };
    for entry in entries {
        let entry = entry.map_err(at("read", directory))?;
        let path = entry.path();
        let kind = entry.file_type().map_err(at("read", &path))?;
        let removed = if kind.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
        removed.map_err(at("remove", &path))?;
    }
    Ok(())
}

/// Creates a copy of the device with this name in `devices`, which only `user` may open.
fn create_node(directory: &Path, name: &str, devices: &Path, user: Option<u32>) -> Result<(), PassthroughError> {
    let (node_device, path) = (devices.join(name), directory.join(name));
    let metadata = fs::metadata(&node_device).map_err(at("read", &node_device))?;
    let mode = Mode::S_IRUSR | Mode::S_IWUSR;
    mknod(&path, SFlag::S_IFCHR, mode, metadata.rdev()).map_err(io::Error::from).map_err(at("create", &path))?;
    Ok(chown(&path, user, user).map_err(at("change the owner of", &path))?)
}

/// Creates the sysfs entries that QEMU reads of a device: the link to its group. Any user that sees the directory may read it.
fn create_group_link(device: &Path, group: u32) -> Result<(), PassthroughError> {
    let created = fs::create_dir(device).and_then(|()| fs::set_permissions(device, Permissions::from_mode(0o755)));
    created.map_err(at("create", device))?;
    Ok(symlink(format!("../{group}"), device.join("iommu_group")).map_err(at("create", device))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn devices(paths: &[&str]) -> Vec<DeviceRequest> {
        let device = |path: &&str| DeviceRequest {
            host_path: (*path).to_owned(),
            container_path: (*path).to_owned(),
            permissions: "rwm".to_owned(),
            ..DeviceRequest::default()
        };
        paths.iter().map(device).collect()
    }

    /// Creates a group with these devices: address, class, driver.
    fn group(sysfs: &Path, number: u32, members: &[(&str, &str, Option<&str>)]) {
        for (address, class, driver) in members {
            let directory = sysfs.join(format!("kernel/iommu_groups/{number}/devices/{address}"));
            fs::create_dir_all(&directory).unwrap();
            fs::write(directory.join("class"), format!("{class}\n")).unwrap();
            if let Some(driver) = driver {
                symlink(format!("../../../bus/pci/drivers/{driver}"), directory.join("driver")).unwrap();
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
        let found = |paths: &[&str]| find_groups(&devices(paths), sysfs.path());
        let both = found(&["/dev/vfio/vfio", "/dev/vfio/7", "/dev/vfio/7", "/dev/sda"]).unwrap();
        assert_eq!(both, BTreeMap::from([(7, vec!["0000:02:00.0".to_owned(), "0000:02:00.1".to_owned()])]));
        for (path, kind, words) in [
            ("/dev/vfio/8", FailureKind::Conflict, "0000:03:00.1 (driver e1000e)"),
            ("/dev/vfio/9", FailureKind::Invalid, "no PCI device"),
            ("/dev/vfio/10", FailureKind::Invalid, "no PCI device"),
            ("/dev/vfio/devices/vfio0", FailureKind::Unsupported, "/dev/vfio/NUMBER"),
            ("/dev/vfio/+7", FailureKind::Unsupported, "/dev/vfio/NUMBER"),
            ("/dev/vfio", FailureKind::Unsupported, "/dev/vfio/NUMBER"),
        ] {
            let error = found(&[path]).unwrap_err();
            assert_eq!(error.kind(), kind, "{path}: {error}");
            assert!(error.to_string().contains(words), "{error}");
        }
        assert!(found(&["/dev/vfio/vfio"]).unwrap().is_empty());
        let read_only =
            devices(&["/dev/vfio/7"]).into_iter().map(|device| DeviceRequest { permissions: "rm".into(), ..device });
        let error = find_groups(&read_only.collect::<Vec<_>>(), sysfs.path()).unwrap_err();
        assert!(error.kind() == FailureKind::Invalid && error.to_string().contains("\"rm\""), "{error}");
    }

    #[test]
    fn the_number_of_devices_is_limited() {
        let sysfs = tempfile::tempdir().unwrap();
        let addresses: Vec<String> = (0..=MOST_HOST_DEVICES).map(|n| format!("0000:{n:02x}:00.0")).collect();
        let members: Vec<_> =
            addresses.iter().map(|address| (address.as_str(), "0x020000", Some("vfio-pci"))).collect();
        group(sysfs.path(), 1, &members);
        let error = find_groups(&devices(&["/dev/vfio/1"]), sysfs.path()).unwrap_err();
        assert!(matches!(error, PassthroughError::TooMany { count } if count == MOST_HOST_DEVICES + 1), "{error}");
    }

    #[test]
    fn qemu_finds_a_device_by_its_group_until_the_next_container() {
        let pod = tempfile::tempdir().unwrap();
        let directory = pod.path().join(VFIO_DIR);
        remove_entries(&directory).unwrap();
        fs::create_dir(&directory).unwrap();
        for address in ["0000:02:00.0", "0000:02:00.1"] {
            create_group_link(&directory.join(address), 7).unwrap();
        }
        let link = fs::read_link(directory.join("0000:02:00.0/iommu_group")).unwrap();
        assert_eq!(link.file_name().unwrap(), "7");
        fs::write(directory.join("7"), "").unwrap();
        PassthroughDevices::default().create_nodes(pod.path(), Some(70_001)).unwrap();
        assert_eq!(fs::read_dir(&directory).unwrap().count(), 0);
    }

    #[test]
    fn a_device_node_belongs_to_the_user_of_the_pod() {
        if !nix::unistd::geteuid().is_root() {
            return println!("skipped: not root");
        }
        for (user, owner) in [(Some(70_001), 70_001), (None, 0)] {
            let directory = tempfile::tempdir().unwrap();
            create_node(directory.path(), "null", Path::new("/dev"), user).unwrap();
            let node = fs::metadata(directory.path().join("null")).unwrap();
            assert_eq!((node.uid(), node.gid(), node.mode() & 0o7777), (owner, owner, 0o600));
            assert_eq!(node.rdev(), fs::metadata("/dev/null").unwrap().rdev());
        }
    }
}
