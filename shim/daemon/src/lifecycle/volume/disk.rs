//! Decides which emptyDirs on kubelet's disk are disks of the pod's VM instead of shares, computes their sizes, and creates and
//! opens their files, because a pod process sees none. docs/contributor/volumes.md has the rules. Guests write these files: the
//! node only passes them on and must never mount or parse one.

use super::empty_dir::{self, DIRECTORY, MOST};
use super::host_path::HostPath;
use crate::lifecycle::context::error::{LifecycleError, at};
use nacelle_base::ContainerId;
use nacelle_base::files::{self, FileError, remove_if_there};
use nacelle_model::empty_dir::{EmptyDirs, MAX_QUOTA, MIN_QUOTA};
use nacelle_model::mount::{NodeVolume, Propagation};
use nacelle_pod::scratch;
use nacelle_proto::pod as proto;
use nix::sys::statvfs::statvfs;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// The name of the disk's file in the volume's directory.
const FILE: &str = "nacelle-volume.ext4";
/// The name of that file until it is complete.
const DRAFT: &str = "nacelle-volume.ext4.draft";
/// Prefix of the files in a pod's directory that mark volumes as shares until the pod ends.
const MARK: &str = "shared.";

/// The form in which the pod's emptyDirs are available.
#[derive(Debug)]
pub(crate) enum EmptyDirForm {
    /// Disks, for which the VM was created; with the pod's directory.
    Disks(EmptyDirs, PathBuf),
    /// Shares only. A volume that is a disk already is not available; the text is the advice for the error.
    Shared(&'static str),
}

/// A volume that is a disk of the VM.
#[derive(Debug)]
pub(crate) struct Disk {
    /// The volume, as a message to the pod process.
    pub volume: proto::EmptyDir,
    /// The disk, as a message to the pod process.
    pub device: proto::BlockDevice,
    /// The open file of the disk.
    pub file: OwnedFd,
}

/// Returns the disk that a volume of the node becomes, the `index`th of the container; `None` for a volume that is none. Creates a
/// missing disk.
pub(super) fn plan(
    form: &EmptyDirForm,
    id: &ContainerId,
    index: usize,
    volume: &NodeVolume,
    host: &HostPath,
) -> Result<Option<Disk>, LifecycleError> {
    let found = empty_dir::named(host.as_path());
    let Some((name, root)) = found.filter(|(_, root)| root.is_dir() && empty_dir::kind(root).is_none()) else {
        return Ok(None);
    };
    let (rules, pod) = match form {
        EmptyDirForm::Disks(rules, pod) => (rules, pod),
        EmptyDirForm::Shared(instead) => {
            return match fs::symlink_metadata(root.join(FILE)) {
                Ok(_) => Err(LifecycleError::OnDisk { path: host.as_str().to_owned(), instead }),
                Err(_none) => Ok(None),
            };
        }
    };
    let called = super::copied_in::called("disk", &name, &root);
    // Two containers may request the volume at once.
    let alone = File::open(&root).and_then(|directory| directory.lock().map(|()| directory));
    let alone = alone.map_err(step("lock", &root))?;
    let mark = pod.join(format!("{MARK}{called}"));
    if !is_disk(rules, &name, &root, &mark)? {
        return Ok(None);
    }
    drop(alone);
    disk(volume, host, called, &root, format!("{DIRECTORY}/{id}.{index}")).map(Some)
}

fn step<E>(what: &'static str, path: &Path) -> impl FnOnce(E) -> LifecycleError
where
    E: Into<io::Error>,
{
    let path = path.to_owned();
    move |source| at("have the disk of a volume")(files::at(what, &path)(source.into()))
}

/// Returns whether this volume is a disk, or is to become one. A volume with files on the node stays a share until the pod ends,
/// whatever happens to the files.
fn is_disk(rules: &EmptyDirs, name: &str, root: &Path, mark: &Path) -> Result<bool, LifecycleError> {
    let there = |path: &Path| fs::symlink_metadata(path).is_ok();
    let file = root.join(FILE);
    if there(&file) {
        return Ok(true);
    }
    if !rules.disks || there(mark) {
        return Ok(false);
    }
    let draft = root.join(DRAFT);
    let looked = remove_if_there(&draft).and_then(|()| {
        let occupied = empty_dir::occupied(root);
        if occupied {
            File::create_new(mark).map_err(files::at("write", mark))?;
        }
        Ok::<_, FileError>(occupied)
    });
    if looked.map_err(at("have the disk of a volume"))? {
        tracing::info!(volume = %root.display(), "has files on the node: it is shared, and is no disk of its machine");
        return Ok(false);
    }
    scratch::create_volume_disk(&file, &draft, size(rules, name, root)?).map_err(at("make the disk of a volume"))?;
    Ok(true)
}

/// Returns the size of the file. The space that it takes on the node, including the metadata of the node's file system, must not
/// exceed the limit: otherwise kubelet, which measures that space, would evict the pod for a volume that is just full.
fn size(rules: &EmptyDirs, name: &str, root: &Path) -> Result<u64, LifecycleError> {
    if let Some(limit) = rules.limits.get(name).copied().or(rules.limit) {
        return Ok((limit - (limit / 64).max(256 << 10)) & !4095);
    }
    let room = statvfs(root).map_err(step("measure", root))?;
    let free = room.blocks_available().saturating_mul(room.fragment_size()).min(MAX_QUOTA);
    if free < MIN_QUOTA {
        return Err(LifecycleError::NoRoomForDisk { path: root.display().to_string(), free });
    }
    Ok(free & !((1 << 20) - 1))
}

fn disk(
    volume: &NodeVolume,
    host: &HostPath,
    name: String,
    root: &Path,
    source: String,
) -> Result<Disk, LifecycleError> {
    let path = host.as_path();
    if volume.propagation != Propagation::Private {
        return Err(LifecycleError::OwnPropagation { path: host.as_str().to_owned() });
    }
    let part = part(path, root).ok_or_else(|| LifecycleError::NoPart { path: host.as_str().to_owned() })?;
    let place = root.join(FILE);
    let open = OpenOptions::new().read(true).write(true).custom_flags(nix::libc::O_NOFOLLOW).open(&place);
    let file = open.map_err(step("open", &place))?;
    let found = file.metadata().map_err(step("look at", &place))?;
    if !found.is_file() {
        return Err(step("open", &place)(io::Error::from(io::ErrorKind::InvalidInput)));
    }
    let (whole, seen) = (fs::metadata(root), fs::metadata(path));
    let (whole, seen) = (whole.map_err(step("look at", root))?, seen.map_err(step("look at", path))?);
    let device = proto::BlockDevice {
        key: format!("volume:{}:{}", found.dev(), found.ino()),
        path: place.display().to_string(),
        writable: true,
        container_path: source.clone(),
        is_empty_dir: true,
        ..Default::default()
    };
    let volume = proto::EmptyDir {
        name,
        path: root.display().to_string(),
        source,
        mode: whole.mode() & 0o7777,
        uid: whole.uid(),
        gid: whole.gid(),
        sub_path: part,
        sub_path_mode: seen.mode() & 0o7777,
        sub_path_uid: seen.uid(),
        sub_path_gid: seen.gid(),
        ..Default::default()
    };
    Ok(Disk { volume, device, file: file.into() })
}

/// Returns which directory of a volume is mounted at this path: kubelet creates it in the volume and mounts it elsewhere.
fn part(path: &Path, root: &Path) -> Option<String> {
    let same = |path: &Path| fs::symlink_metadata(path).map(|found| (found.dev(), found.ino())).ok();
    let wanted = same(path)?;
    let (mut directories, mut looked) = (vec![root.to_owned()], 0);
    while let Some(directory) = directories.pop().filter(|_| looked < MOST) {
        looked += 1;
        if same(&directory) == Some(wanted) {
            return directory.strip_prefix(root).ok()?.to_str().map(str::to_owned);
        }
        let entries = fs::read_dir(&directory).into_iter().flatten().flatten();
        directories.extend(
            entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())).map(|entry| entry.path()),
        );
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacelle_base::{Classify, FailureKind};
    use std::collections::BTreeMap;

    struct Place {
        pod: tempfile::TempDir,
        run: tempfile::TempDir,
    }

    impl Place {
        fn new() -> Place {
            let place = Place { pod: tempfile::tempdir().unwrap(), run: tempfile::tempdir().unwrap() };
            fs::create_dir_all(place.root()).unwrap();
            place
        }

        fn root(&self) -> PathBuf {
            self.pod.path().join("pods/uid/volumes/kubernetes.io~empty-dir/scratch")
        }

        fn plan(&self, disks: bool, volume: &NodeVolume) -> Result<Option<Disk>, LifecycleError> {
            let rules = EmptyDirs { disks, limits: [("scratch".to_owned(), 32 << 20)].into(), limit: None };
            let form = EmptyDirForm::Disks(rules, self.run.path().to_owned());
            plan(&form, &ContainerId::from_bytes([1; 32]), 0, volume, &HostPath::of(Path::new(&volume.host_path)))
        }
    }

    fn volume(path: &Path) -> NodeVolume {
        NodeVolume {
            host_path: path.display().to_string(),
            container_path: "/v".into(),
            readonly: false,
            recursive_read_only: false,
            propagation: Propagation::Private,
            id_mapped: false,
            options: [].into(),
        }
    }

    #[test]
    fn a_disk_is_made_once_and_is_below_its_limit() {
        let place = Place::new();
        let whole = volume(&place.root());
        assert!(place.plan(false, &whole).unwrap().is_none());
        fs::create_dir_all(place.root().join("deep/part")).unwrap();
        fs::write(place.root().join(DRAFT), "of a daemon that died").unwrap();
        let first = place.plan(true, &whole).unwrap().unwrap();
        assert_eq!(File::from(first.file).metadata().unwrap().len(), (32 << 20) - (512 << 10));
        assert_eq!((first.volume.sub_path.as_str(), first.device.is_empty_dir), ("", true));
        assert_eq!(first.volume.source, first.device.container_path);
        // A disk stays a disk, whatever the handler's setting for new ones is.
        let again = place.plan(false, &volume(&place.root().join("deep/part"))).unwrap();
        assert!(again.is_none(), "a directory below it is nothing that kubelet hands over");
        let again = place.plan(false, &whole).unwrap().unwrap();
        assert_eq!((again.device.key, again.volume.name), (first.device.key, first.volume.name));
        assert!(!place.root().join(DRAFT).exists());
        let propagated = NodeVolume { propagation: Propagation::FromNode, ..whole.clone() };
        assert_eq!(place.plan(true, &propagated).unwrap_err().kind(), FailureKind::Unsupported);
        let shares = EmptyDirForm::Shared("make it a machine");
        let error =
            plan(&shares, &ContainerId::from_bytes([1; 32]), 0, &whole, &HostPath::of(&place.root())).unwrap_err();
        assert!(error.kind() == FailureKind::Conflict && error.to_string().contains("make it a machine"), "{error}");
    }

    #[test]
    fn what_has_files_stays_a_share_until_the_pod_ends() {
        let place = Place::new();
        fs::write(place.root().join("file"), "").unwrap();
        assert!(place.plan(true, &volume(&place.root())).unwrap().is_none());
        fs::remove_file(place.root().join("file")).unwrap();
        assert!(place.plan(true, &volume(&place.root())).unwrap().is_none());
        let next = Place { run: tempfile::tempdir().unwrap(), ..place };
        assert!(next.plan(true, &volume(&next.root())).unwrap().is_some());
    }

    #[test]
    fn a_file_that_leads_elsewhere_is_no_disk() {
        let place = Place::new();
        std::os::unix::fs::symlink("/dev/zero", place.root().join(FILE)).unwrap();
        assert!(place.plan(true, &volume(&place.root())).is_err());
        fs::remove_file(place.root().join(FILE)).unwrap();
        fs::create_dir(place.root().join(FILE)).unwrap();
        assert!(place.plan(true, &volume(&place.root())).is_err());
    }

    #[test]
    fn parts_are_found_by_what_they_are() {
        let place = Place::new();
        let root = place.root();
        fs::create_dir_all(root.join("a/b")).unwrap();
        fs::create_dir_all(root.join("c")).unwrap();
        assert_eq!(part(&root.join("a/../a/b"), &root).as_deref(), Some("a/b"));
        assert_eq!(part(&root, &root).as_deref(), Some(""));
        let elsewhere = place.pod.path().join("pods/uid/volume-subpaths/scratch/c/0");
        fs::create_dir_all(&elsewhere).unwrap();
        assert_eq!(part(&elsewhere, &root), None);
        let error = place.plan(true, &volume(&elsewhere)).unwrap_err();
        assert_eq!(error.kind(), FailureKind::Conflict, "{error}");
    }

    #[test]
    fn sizes() {
        let root = tempfile::tempdir().unwrap();
        let rules =
            EmptyDirs { disks: true, limits: BTreeMap::from([("a".to_owned(), 16 << 20)]), limit: Some(1 << 30) };
        assert_eq!(size(&rules, "a", root.path()).unwrap(), (16 << 20) - (256 << 10));
        assert_eq!(size(&rules, "b", root.path()).unwrap(), (1 << 30) - (16 << 20));
        let free = size(&EmptyDirs { limit: None, ..rules }, "b", root.path()).unwrap();
        assert!((MIN_QUOTA..=MAX_QUOTA).contains(&free) && free.is_multiple_of(1 << 20), "{free}");
    }
}
