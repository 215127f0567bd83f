//! Checks where in a container its bind mounts lie, which libcontainer does not, and takes those at and below `/dev` out of the
//! specification: libcontainer would make device nodes and links in whatever is mounted there, which is the node's own `/dev`.
//! The zygote mounts them when the container's `/dev` is complete, before its program starts. What is mounted in the container's
//! proc is compared with what may be there when libcontainer is done: until then another container may put a link into a volume.

use libcontainer::oci_spec::runtime::{Mount, Spec};
use nacelle_base::mounts::is_place_in_proc;
use nacelle_base::{Classify, Kind};
use std::fs;
use std::io;
use std::path::{Component, Path, PathBuf};

use super::targets::MAX_LINKS;

const DEV: &str = "/dev";
const PROC: &str = "/proc";
const SYS: &str = "/sys";

/// Why nothing can be mounted at a place of a container.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the fields are what the message prints")]
pub enum PlaceError {
    #[error(
        "the mount at {} leads to {}, where a container has a file system of its own; mount it at a path that is no link",
        at.display(), to.display()
    )]
    Reserved { at: PathBuf, to: PathBuf },
    #[error(
        "the mount at {} lies in sysfs, in which nothing can be made, and the kernel has no {}: mount over /sys, or elsewhere",
        at.display(), to.display()
    )]
    NotInSysfs { at: PathBuf, to: PathBuf },
    #[error("cannot prepare the mount target {} in the container's root", at.display())]
    Loop { at: PathBuf, source: io::Error },
    #[error(
        "a mount of the container has come to lie at {}, where its proc is: a volume may not be mounted through a link in another volume",
        at.display()
    )]
    OverProc { at: PathBuf },
}

impl Classify for PlaceError {
    fn kind(&self) -> Kind {
        match self {
            PlaceError::Reserved { .. }
            | PlaceError::NotInSysfs { .. }
            | PlaceError::Loop { .. }
            | PlaceError::OverProc { .. } => Kind::Invalid,
        }
    }
}

/// Whether a mount shows something that exists already.
pub fn is_bind(mount: &Mount) -> bool {
    let bind = |option: &String| option == "bind" || option == "rbind";
    mount.typ().as_deref() == Some("bind") || mount.options().iter().flatten().any(bind)
}

/// Checks where the bind mounts of a specification come to lie in the root of its container. `sysfs` is a sysfs of the same kernel.
pub fn check(root: &Path, mounts: &[Mount], sysfs: &Path) -> Result<(), PlaceError> {
    let binds: Vec<_> =
        mounts.iter().filter(|mount| is_bind(mount)).map(|mount| mount.destination().as_path()).collect();
    for at in &binds {
        let to = resolve(root, at)?;
        let (literal_dev, literal) = (*at == Path::new(DEV), to == *at);
        if (to == Path::new(DEV) && !literal_dev) || (to.starts_with(PROC) && !(literal && is_place_in_proc(&to))) {
            return Err(PlaceError::Reserved { at: at.to_path_buf(), to });
        }
        let covered = || binds.iter().any(|other| other != at && other.starts_with(SYS) && to.starts_with(other));
        if let Ok(below) = to.strip_prefix(SYS)
            && !sysfs.join(below).exists()
            && !covered()
        {
            return Err(PlaceError::NotInSysfs { at: at.to_path_buf(), to });
        }
    }
    Ok(())
}

/// The places at and below `/proc` of a container that libcontainer mounts at by this specification, one for each mount.
pub fn in_proc(spec: &Spec) -> Vec<PathBuf> {
    let mounts = spec.mounts().iter().flatten().map(|mount| mount.destination().clone());
    let linux = spec.linux().as_ref();
    let covered = linux.into_iter().flat_map(|linux| [linux.masked_paths(), linux.readonly_paths()]);
    mounts.chain(covered.flatten().flatten().map(PathBuf::from)).filter(|at| at.starts_with(PROC)).collect()
}

/// Checks that a container's mounts at and below `/proc` are no others than `allowed`, each once. `mountinfo`: that of its first
/// process (proc_pid_mountinfo(5)).
pub fn check_proc(mountinfo: &str, allowed: &[PathBuf]) -> Result<(), PlaceError> {
    let mut left = allowed.to_vec();
    // Names with blanks and the like are escaped, and none of those allowed has one.
    for at in mountinfo.lines().filter_map(|line| line.split(' ').nth(4)).map(Path::new) {
        if at.starts_with(PROC) {
            let found = left.iter().position(|place| place == at);
            left.swap_remove(found.ok_or_else(|| PlaceError::OverProc { at: at.to_owned() })?);
        }
    }
    Ok(())
}

/// Where a path leads to in a root that has no file systems mounted in it yet, and no process: links are followed by their text, because
/// what they lead to may be in a file system that comes.
fn resolve(root: &Path, path: &Path) -> Result<PathBuf, PlaceError> {
    let parts = |path: &Path| path.components().rev().map(|part| part.as_os_str().to_owned()).collect::<Vec<_>>();
    let (mut done, mut left, mut links) = (PathBuf::from("/"), parts(path), 0);
    while let Some(part) = left.pop() {
        match Path::new(&part).components().next() {
            Some(Component::RootDir) => done = PathBuf::from("/"),
            Some(Component::ParentDir) => {
                done.pop();
            }
            Some(Component::Normal(name)) => {
                let inside = done.strip_prefix("/").unwrap_or(&done).join(name);
                // What is no link, or is not there, leads nowhere else.
                match fs::read_link(root.join(inside)) {
                    Ok(_) if links == MAX_LINKS => {
                        let source = io::Error::from_raw_os_error(libc::ELOOP);
                        return Err(PlaceError::Loop { at: path.to_owned(), source });
                    }
                    Ok(target) => {
                        links += 1;
                        left.extend(parts(&target));
                    }
                    Err(_) => done.push(name),
                }
            }
            Some(Component::CurDir | Component::Prefix(_)) | None => {}
        }
    }
    Ok(done)
}

/// Takes the bind mount at `/dev` out of a specification, and all that are mounted below it afterwards; in their order.
pub fn take_late(spec: &mut Spec) -> Vec<Mount> {
    let Some(mounts) = spec.mounts_mut() else { return Vec::new() };
    let Some(first) = mounts.iter().position(|mount| is_bind(mount) && mount.destination() == Path::new(DEV)) else {
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
    use std::os::unix::fs::symlink;

    fn bind(at: &str) -> Mount {
        let options = vec!["rbind".to_owned()];
        MountBuilder::default().source("/srv").destination(at).typ("bind").options(options).build().unwrap()
    }

    fn root() -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let base = folder.path().canonicalize().unwrap();
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
        (folder, root)
    }

    #[test]
    fn what_links_lead_to_counts() {
        let (_kept, root) = root();
        let sysfs = root.parent().unwrap().join("sysfs");
        let check = |list: &[&str]| check(&root, &list.iter().map(|at| bind(at)).collect::<Vec<_>>(), &sysfs);
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
                Err(PlaceError::Reserved { to: found, .. }) => assert_eq!(found, Path::new(to), "{bad}"),
                other => panic!("{bad}: {other:?}"),
            }
        }
        for bad in ["/sys/none", "/sys/fs/bpf/none", "/to-sys/none"] {
            assert!(matches!(check(&[bad]), Err(PlaceError::NotInSysfs { .. })), "{bad}");
        }
        assert!(matches!(check(&["/loop/x"]), Err(PlaceError::Loop { .. })));
        // What is mounted over sysfs has folders of its own.
        check(&["/sys", "/sys/none"]).unwrap();
        check(&["/sys/fs/bpf", "/sys/fs/bpf/none"]).unwrap();
    }

    #[test]
    fn nothing_else_is_mounted_over_proc() {
        let mut spec = Spec::default();
        spec.set_mounts(Some(vec![bind("/proc"), bind("/proc/cpuinfo"), bind("/data"), bind("/data/x")]));
        let linux = spec.linux_mut().as_mut().unwrap();
        linux.set_masked_paths(Some(vec!["/proc/kcore".to_owned(), "/sys/firmware".to_owned()]));
        linux.set_readonly_paths(Some(vec!["/proc/sys".to_owned()]));
        let allowed = in_proc(&spec);
        let check = |places: &[&str]| {
            let lines = places.iter().map(|at| format!("30 29 0:25 / {at} rw,nosuid - proc proc rw\n"));
            check_proc(&lines.collect::<String>(), &allowed)
        };
        let good = ["/", "/proc", "/data", "/data/x", "/proc/cpuinfo", "/proc/kcore", "/proc/sys", "/processes"];
        check(&good).unwrap();
        check(&["/", "/proc"]).unwrap();
        for bad in ["/proc/sys", "/proc", "/proc/self/attr", "/proc/a\\040b"] {
            let refused = check(&[&good[..], &[bad]].concat()).unwrap_err();
            assert!(matches!(refused, PlaceError::OverProc { at } if at == Path::new(bad)), "{bad}");
        }
    }

    #[test]
    fn what_lies_over_dev_is_mounted_after_the_rest() {
        let spec = |list: &[&str]| {
            let mut spec = Spec::default();
            spec.set_mounts(Some(list.iter().map(|at| bind(at)).collect()));
            let late = take_late(&mut spec);
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
