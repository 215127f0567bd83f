//! Owns: PCI devices of the node that a machine gets by VFIO: what is in the groups that its container names, whether it can be had,
//! and where QEMU finds it: in a folder of the pod's that its processes see as /dev/vfio.
//! Reads sysfs; see the kernel's Documentation/driver-api/vfio.rst.

use crate::nouns::Device;
use nacelle_base::{Classify, Kind};
use nacelle_keeper::spec::{HostDevice, MOST_HOST_DEVICES, is_pci_address};
use nacelle_pod::passed::FOLDER;
use nix::errno::Errno;
use nix::fcntl::{OFlag, open, openat};
use nix::sys::stat::{Mode, SFlag, mkdirat, mknodat};
use nix::unistd::symlinkat;
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Where the node has what containers of such devices name: a number for each group, and one for all of them.
const NODES: &str = "/dev/vfio";
/// What every holder of a group needs beside it.
const CONTAINER: &str = "vfio";
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
    /// Sysfs, or the pod's folder.
    #[error("cannot {what} {}", path.display())]
    Io {
        /// "read", "make".
        what: &'static str,
        /// What.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

impl Classify for PassedError {
    fn kind(&self) -> Kind {
        match self {
            PassedError::NoGroup { .. } => Kind::Unsupported,
            PassedError::Nothing { .. } => Kind::Invalid,
            PassedError::Used { .. } => Kind::Conflict,
            PassedError::TooMany { .. } => Kind::Exhausted,
            PassedError::Io { .. } => Kind::Internal,
        }
    }
}

fn failed<E: Into<io::Error>>(what: &'static str, path: &Path) -> impl FnOnce(E) -> PassedError {
    let path = path.to_owned();
    move |source| PassedError::Io { what, path, source: source.into() }
}

/// Whether a container that asks for it means devices by VFIO.
pub fn is_vfio(device: &Device) -> bool {
    Path::new(&device.host_path).starts_with(NODES)
}

/// The devices of a container's groups, in the order of groups and addresses, put where the machine of the pod of this folder finds
/// them. The groups are the container's alone: what another one had is taken out. Blocks.
pub fn pass(devices: &[Device], pod: &Path) -> Result<Vec<HostDevice>, PassedError> {
    let groups = groups(devices, Path::new(SYSFS))?;
    if groups.is_empty() {
        return Ok(Vec::new());
    }
    let folder = Folder::open(pod.join(FOLDER))?;
    folder.node(CONTAINER, Path::new(NODES))?;
    for (number, members) in &groups {
        folder.node(&number.to_string(), Path::new(NODES))?;
        for address in members {
            folder.device(address, *number)?;
        }
    }
    Ok(groups.into_values().flatten().map(|address| HostDevice { address }).collect())
}

/// What is in each group that is asked for.
fn groups(devices: &[Device], sysfs: &Path) -> Result<BTreeMap<u32, Vec<String>>, PassedError> {
    let mut groups = BTreeMap::new();
    for device in devices.iter().filter(|device| is_vfio(device)) {
        let path = &device.host_path;
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
        entries => entries.map_err(failed("read", &folder))?,
    };
    let mut members = Vec::new();
    for entry in entries {
        let entry = entry.map_err(failed("read", &folder))?;
        // Devices of other buses are nothing that a machine could have.
        let Ok(address) = entry.file_name().into_string() else { continue };
        let class = entry.path().join("class");
        if !is_pci_address(&address) || fs::read_to_string(class).is_ok_and(|class| class.starts_with(BRIDGE)) {
            continue;
        }
        match fs::read_link(entry.path().join("driver")) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            link => {
                let link = link.map_err(failed("read", &entry.path()))?;
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

/// The folder that the machine's processes see as /dev/vfio. They can change it under its other name: nothing is done by a path.
struct Folder {
    path: PathBuf,
    handle: OwnedFd,
}

impl Folder {
    fn open(path: PathBuf) -> Result<Folder, PassedError> {
        let flags = OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let handle = open(&path, flags, Mode::empty()).map_err(failed("read", &path))?;
        Ok(Folder { path, handle })
    }

    /// The device of this name in `nodes`, for the owner alone.
    fn node(&self, name: &str, nodes: &Path) -> Result<(), PassedError> {
        let path = nodes.join(name);
        let metadata = fs::metadata(&path).map_err(failed("read", &path))?;
        if !metadata.file_type().is_char_device() {
            return Err(PassedError::Nothing { path: path.display().to_string() });
        }
        let mode = Mode::S_IRUSR | Mode::S_IWUSR;
        self.made(name, mknodat(self.handle.as_fd(), name, SFlag::S_IFCHR, mode, metadata.rdev()))
    }

    /// What QEMU reads of a device: which group it is in.
    fn device(&self, address: &str, group: u32) -> Result<(), PassedError> {
        self.made(address, mkdirat(self.handle.as_fd(), address, Mode::S_IRWXU))?;
        let flags = OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let inner = openat(self.handle.as_fd(), address, flags, Mode::empty());
        let inner = inner.map_err(failed("read", &self.path.join(address)))?;
        let target = format!("../{group}");
        self.made(address, symlinkat(target.as_str(), inner.as_fd(), "iommu_group"))
    }

    /// An earlier container had it, too.
    fn made(&self, name: &str, made: nix::Result<()>) -> Result<(), PassedError> {
        match made {
            Err(Errno::EEXIST) => Ok(()),
            made => made.map_err(failed("make", &self.path.join(name))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    fn devices(paths: &[&str]) -> Vec<Device> {
        let device = |path: &&str| Device {
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
    fn qemu_finds_a_device_by_its_group_and_nothing_is_made_elsewhere() {
        let pod = tempfile::tempdir().unwrap();
        let place = pod.path().join("vfio");
        fs::create_dir(&place).unwrap();
        let folder = Folder::open(place.clone()).unwrap();
        for _ in 0..2 {
            folder.device("0000:02:00.0", 7).unwrap();
        }
        let told = fs::read_link(place.join("0000:02:00.0/iommu_group")).unwrap();
        assert_eq!(told.file_name().unwrap(), "7");
        // A file is no device of a group.
        fs::write(pod.path().join("8"), "").unwrap();
        assert_eq!(folder.node("8", pod.path()).unwrap_err().kind(), Kind::Invalid);
        // The machine's processes have put links there.
        symlink(pod.path(), pod.path().join("linked")).unwrap();
        assert!(Folder::open(pod.path().join("linked")).is_err());
        symlink(pod.path(), place.join("0000:03:00.0")).unwrap();
        assert!(folder.device("0000:03:00.0", 7).is_err());
        assert!(!pod.path().join("iommu_group").exists());
    }
}
