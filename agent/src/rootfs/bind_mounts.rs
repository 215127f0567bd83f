//! Decides which bind mounts of a specification are allowed by where they lie in the container's root, which libcontainer does
//! not check.
//!
//! Bind mounts at and below /dev are taken out of the specification: libcontainer would create device nodes and links in what is
//! mounted there, which is the node's own /dev. The zygote makes them when the container's /dev is complete, before its program
//! starts. Mounts in the container's /proc are compared with the allowed ones only when libcontainer is done, because until then
//! another container can put a link into a shared volume.

use libcontainer::oci_spec::runtime::{Mount, Spec};
use nacelle_base::mounts::is_allowed_proc_target;
use nix::errno::Errno;
use std::path::{Path, PathBuf};

use super::error::RootPathError;
use super::root_dir::{PathStep, RootDir, RootEntry, follow_links};

const DEV: &str = "/dev";
const PROC: &str = "/proc";
const SYS: &str = "/sys";

/// Whether a mount shows existing files (bind, rbind).
pub fn is_bind_mount(mount: &Mount) -> bool {
    let is_bind = |option: &String| option == "bind" || option == "rbind";
    mount.typ().as_deref() == Some("bind") || mount.options().iter().flatten().any(is_bind)
}

/// Checks where the bind mounts of a specification lie in the container's root, in which nothing is mounted yet and no process
/// runs. `sysfs` is the mount point of a sysfs of the same kernel.
pub fn check_bind_mounts(root: &Path, mounts: &[Mount], sysfs: &Path) -> Result<(), RootPathError> {
    let opened = RootDir::open(root).map_err(|error| RootPathError::prepare("root", root, root, error))?;
    let binds: Vec<_> =
        mounts.iter().filter(|mount| is_bind_mount(mount)).map(|mount| mount.destination().as_path()).collect();
    for at in &binds {
        let to = resolve_links(&opened, at)?;
        let (literal_dev, literal) = (*at == Path::new(DEV), to == *at);
        if (to == Path::new(DEV) && !literal_dev) || (to.starts_with(PROC) && !(literal && is_allowed_proc_target(&to)))
        {
            return Err(RootPathError::Reserved { at: at.to_path_buf(), to });
        }
        let is_covered = || binds.iter().any(|other| other != at && other.starts_with(SYS) && to.starts_with(other));
        if let Ok(below) = to.strip_prefix(SYS)
            && !sysfs.join(below).exists()
            && !is_covered()
        {
            return Err(RootPathError::NotInSysfs { at: at.to_path_buf(), to });
        }
    }
    Ok(())
}

/// Returns where a path leads in a root. What is missing is entered as if it were a directory: it may come with a mount.
fn resolve_links(root: &RootDir, path: &Path) -> Result<PathBuf, RootPathError> {
    follow_links("mount target", path, |directory_path, part, _is_last| match root.look_up(directory_path, part) {
        Ok(RootEntry::Link(target)) => Ok(PathStep::Follow(target)),
        // A part below a missing or impossible one is no link, either.
        Ok(_) | Err(Errno::ENOENT | Errno::ENOTDIR | Errno::ENAMETOOLONG) => Ok(PathStep::Enter),
        Err(error) => Err(error),
    })
}

/// Returns the paths at and below the container's /proc where libcontainer mounts by this specification, one for each mount.
pub fn proc_mount_points(spec: &Spec) -> Vec<PathBuf> {
    let mounts = spec.mounts().iter().flatten().map(|mount| mount.destination().clone());
    let linux = spec.linux().as_ref();
    let covered = linux.into_iter().flat_map(|linux| [linux.masked_paths(), linux.readonly_paths()]);
    mounts.chain(covered.flatten().flatten().map(PathBuf::from)).filter(|at| at.starts_with(PROC)).collect()
}

/// Checks that a container has no other mounts at and below its /proc than `allowed`, each once. `mountinfo` is that of the
/// container's first process (proc_pid_mountinfo(5)).
pub fn check_proc_mounts(mountinfo: &str, allowed: &[PathBuf]) -> Result<(), RootPathError> {
    let mut left = allowed.to_vec();
    // The kernel escapes blanks and the like in paths. No allowed path has such a character.
    for at in mountinfo.lines().filter_map(|line| line.split(' ').nth(4)).map(Path::new) {
        if at.starts_with(PROC) {
            let found = left.iter().position(|directory_path| directory_path == at);
            left.swap_remove(found.ok_or_else(|| RootPathError::OverProc { at: at.to_owned() })?);
        }
    }
    Ok(())
}

/// Takes the bind mount at /dev, and all mounts below /dev that follow it, out of a specification. Returns them in their order.
pub fn take_late_mounts(spec: &mut Spec) -> Vec<Mount> {
    let Some(mounts) = spec.mounts_mut() else { return Vec::new() };
    let Some(first) = mounts.iter().position(|mount| is_bind_mount(mount) && mount.destination() == Path::new(DEV))
    else {
        return Vec::new();
    };
    let (late, after) = mounts.split_off(first).into_iter().partition(|mount| mount.destination().starts_with(DEV));
    mounts.extend::<Vec<_>>(after);
    late
}

#[cfg(test)]
mod tests {
    use super::*;
    use libcontainer::oci_spec::runtime::MountBuilder;
    use std::fs;
    use std::os::unix::fs::symlink;

    fn bind(at: &str) -> Mount {
        let options = vec!["rbind".to_owned()];
        MountBuilder::default().source("/srv").destination(at).typ("bind").options(options).build().unwrap()
    }

    fn root() -> (tempfile::TempDir, PathBuf) {
        let outer = tempfile::tempdir().unwrap();
        let base = outer.path().canonicalize().unwrap();
        let root = base.join("root");
        for path in ["root/proc", "root/dev", "root/etc", "sysfs/fs/bpf"] {
            fs::create_dir_all(base.join(path)).unwrap();
        }
        for (target, name) in [
            ("/proc", "to-proc"),
            ("../dev", "etc/to-dev"),
            ("/proc/cpuinfo", "info"),
            ("/sys", "to-sys"),
            ("/etc", "to-etc"),
            ("/proc/sys", "to-kernel"),
            ("loop", "loop"),
        ] {
            symlink(target, root.join(name)).unwrap();
        }
        (outer, root)
    }

    #[test]
    fn mount_targets_are_compared_after_their_links_are_resolved() {
        let (_kept, root) = root();
        let sysfs = root.parent().unwrap().join("sysfs");
        let check =
            |list: &[&str]| check_bind_mounts(&root, &list.iter().map(|at| bind(at)).collect::<Vec<_>>(), &sysfs);
        for good in [
            "/dev",
            "/dev/",
            "/dev/net",
            "/sys",
            "/sys/fs",
            "/sys/fs/bpf",
            "/proc/cpuinfo",
            "/new/deep",
            "/to-etc/x",
            "/etc/to-dev/x",
        ] {
            check(&[good]).unwrap_or_else(|error| panic!("{good}: {error}"));
        }
        for (bad, to) in [
            ("/proc", "/proc"),
            ("/proc/1", "/proc/1"),
            ("/proc/sys/kernel", "/proc/sys/kernel"),
            ("/to-proc", "/proc"),
            ("/to-proc/sys/new", "/proc/sys/new"),
            ("/info", "/proc/cpuinfo"),
            ("/to-kernel/kernel", "/proc/sys/kernel"),
            ("/etc/to-dev", "/dev"),
        ] {
            match check(&[bad]) {
                Err(RootPathError::Reserved { to: found, .. }) => assert_eq!(found, Path::new(to), "{bad}"),
                other => panic!("{bad}: {other:?}"),
            }
        }
        for bad in ["/sys/none", "/sys/fs/bpf/none", "/to-sys/none"] {
            assert!(matches!(check(&[bad]), Err(RootPathError::NotInSysfs { .. })), "{bad}");
        }
        assert!(matches!(check(&["/loop/x"]), Err(RootPathError::Prepare { .. })));
        // What is mounted over sysfs has directories of its own.
        check(&["/sys", "/sys/none"]).unwrap();
        check(&["/sys/fs/bpf", "/sys/fs/bpf/none"]).unwrap();
    }

    #[test]
    fn the_check_and_the_preparation_follow_links_to_the_same_place() {
        use crate::rootfs::{EntryKind, MountPoints};
        let (_kept, root) = root();
        let (opened, points) = (RootDir::open(&root).unwrap(), MountPoints::open(&root, None).unwrap());
        for requested in ["/to-etc/to-dev/x", "/to-sys/../etc", "/etc/to-dev/../../new", "/to-kernel/new", "/../../up"]
        {
            let checked = resolve_links(&opened, Path::new(requested)).unwrap();
            let prepared = points.prepare_path("mount target", Path::new(requested), EntryKind::Directory).unwrap();
            assert_eq!(checked, prepared, "{requested}");
        }
    }

    #[test]
    fn unexpected_mounts_over_proc_are_rejected() {
        let mut spec = Spec::default();
        spec.set_mounts(Some(vec![bind("/proc"), bind("/proc/cpuinfo"), bind("/data"), bind("/data/x")]));
        let linux = spec.linux_mut().as_mut().unwrap();
        linux.set_masked_paths(Some(vec!["/proc/kcore".to_owned(), "/sys/firmware".to_owned()]));
        linux.set_readonly_paths(Some(vec!["/proc/sys".to_owned()]));
        let allowed = proc_mount_points(&spec);
        let check = |places: &[&str]| {
            let lines = places.iter().map(|at| format!("30 29 0:25 / {at} rw,nosuid - proc proc rw\n"));
            check_proc_mounts(&lines.collect::<String>(), &allowed)
        };
        let good = ["/", "/proc", "/data", "/data/x", "/proc/cpuinfo", "/proc/kcore", "/proc/sys", "/processes"];
        check(&good).unwrap();
        check(&["/", "/proc"]).unwrap();
        for bad in ["/proc/sys", "/proc", "/proc/self/attr", "/proc/a\\040b"] {
            let refused = check(&[&good[..], &[bad]].concat()).unwrap_err();
            assert!(matches!(refused, RootPathError::OverProc { at } if at == Path::new(bad)), "{bad}");
        }
    }

    #[test]
    fn mounts_below_dev_are_made_last() {
        let spec = |list: &[&str]| {
            let mut spec = Spec::default();
            spec.set_mounts(Some(list.iter().map(|at| bind(at)).collect()));
            let late = take_late_mounts(&mut spec);
            let names =
                |mounts: &[Mount]| mounts.iter().map(|m| m.destination().display().to_string()).collect::<Vec<_>>();
            (names(spec.mounts().as_deref().unwrap()), names(&late))
        };
        let (kept, late) = spec(&["/dev/shm", "/data", "/dev", "/devices", "/dev/termination-log", "/etc/hosts"]);
        assert_eq!(kept, ["/dev/shm", "/data", "/devices", "/etc/hosts"]);
        assert_eq!(late, ["/dev", "/dev/termination-log"]);
        let (kept, late) = spec(&["/dev/shm", "/dev/termination-log"]);
        assert_eq!((kept.len(), late.len()), (2, 0));
    }
}
