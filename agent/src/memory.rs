//! Owns: volumes that are memory of the machine, one tmpfs each, for all containers of the pod until it ends; and the parts of
//! them that containers see.
//! May use: `container::shown`, which keeps parts until they are mounted. Containers write there: nothing in them is followed.

use nacelle_base::mounts;
use nacelle_base::{Classify, Kind};
use nacelle_proto::agent::MemoryVolume;
use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, OpenHow, ResolveFlag, openat2};
use nix::mount::{MsFlags, mount};
use nix::sys::stat::{FchmodatFlags, Mode, fchmodat, mkdirat};
use nix::unistd::{Gid, Uid, chown, fchownat};
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Component, Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use crate::paths;

/// Why a container cannot have such a volume.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the fields are what the message prints")]
pub enum MemoryError {
    #[error("{name:?} is no name of a volume: 1 to 128 letters, digits, '_', '-' and '.' are, not starting with '.'")]
    Name { name: String },
    #[error("{part:?} is no part of a volume: names without . and .. are")]
    Part { part: String },
    #[error(
        "the memory volume {path} has files on the node, which a machine would not see: put them there from a container"
    )]
    Occupied { path: String },
    #[error("the part {part:?} of the memory volume {path} is no folder, or leads out of the volume")]
    NoFolder { part: String, path: String },
    #[error("cannot {what} the memory volume {path}")]
    Io { what: &'static str, path: String, source: io::Error },
}

impl Classify for MemoryError {
    fn kind(&self) -> Kind {
        match self {
            MemoryError::Name { .. } | MemoryError::Part { .. } => Kind::Invalid,
            MemoryError::Occupied { .. } | MemoryError::NoFolder { .. } => Kind::Conflict,
            MemoryError::Io { source, .. } => source.kind().into(),
        }
    }
}

/// The volumes, by their names.
#[derive(Debug, Default)]
pub struct Memory {
    mounted: Mutex<BTreeSet<String>>,
}

/// Where a container finds what it asked for.
#[derive(Debug)]
pub enum Place {
    /// All of the volume.
    Whole(PathBuf),
    /// A mount of a part that lies nowhere yet.
    Part(OwnedFd),
}

impl Memory {
    /// Makes the volume, unless it is there, and finds what is asked for of it.
    pub fn place(&self, asked: &MemoryVolume) -> Result<Place, MemoryError> {
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
        let name = &asked.name;
        if !(1..=128).contains(&name.len()) || name.starts_with('.') || !name.chars().all(plain) {
            return Err(MemoryError::Name { name: name.chars().take(140).collect() });
        }
        let root = Path::new(paths::MEMORY).join(name);
        let mut mounted = self.mounted.lock().unwrap_or_else(PoisonError::into_inner);
        if !mounted.contains(name) {
            if asked.occupied {
                return Err(MemoryError::Occupied { path: asked.path.clone() });
            }
            make(asked, &root).map_err(|source| io_at("make", asked)(source))?;
            mounted.insert(name.clone());
        }
        drop(mounted);
        if asked.part.is_empty() {
            return Ok(Place::Whole(root));
        }
        let folder = part(&root, asked)?;
        let path = format!("/proc/self/fd/{}", folder.as_raw_fd());
        mounts::copy(Path::new(&path), false).map(Place::Part).map_err(io_at("show a part of", asked))
    }
}

fn io_at<E: Into<io::Error>>(what: &'static str, asked: &MemoryVolume) -> impl FnOnce(E) -> MemoryError {
    let path = asked.path.clone();
    move |source| MemoryError::Io { what, path, source: source.into() }
}

/// As the node has it, but no larger than the machine's memory.
fn make(asked: &MemoryVolume, root: &Path) -> io::Result<()> {
    let total = nix::sys::sysinfo::sysinfo()?.ram_total();
    fs::create_dir_all(root)?;
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    let options = format!("mode={:o},size={}", asked.mode & 0o7777, asked.bytes.min(total).max(4096));
    mount(Some("memory"), root, Some("tmpfs"), flags, Some(options.as_str()))?;
    Ok(chown(root, Some(Uid::from_raw(asked.uid)), Some(Gid::from_raw(asked.gid)))?)
}

fn open(at: &OwnedFd, name: &OsStr) -> nix::Result<OwnedFd> {
    let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    let resolve = ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_SYMLINKS | ResolveFlag::RESOLVE_NO_XDEV;
    openat2(at, name, OpenHow::new().flags(flags).resolve(resolve))
}

/// A folder of the volume, made like that of the node where it is missing.
fn part(root: &Path, asked: &MemoryVolume) -> Result<OwnedFd, MemoryError> {
    let wrong = || MemoryError::Part { part: asked.part.chars().take(200).collect() };
    let root = File::options().read(true).open(root).map_err(io_at("open", asked))?;
    let mut folder = OwnedFd::from(root);
    for name in Path::new(&asked.part).components() {
        let Component::Normal(name) = name else { return Err(wrong()) };
        let mode = Mode::from_bits_truncate(asked.part_mode & 0o7777);
        match mkdirat(&folder, name, mode) {
            Ok(()) => {
                let owner = (Some(Uid::from_raw(asked.part_uid)), Some(Gid::from_raw(asked.part_gid)));
                fchownat(&folder, name, owner.0, owner.1, AtFlags::AT_SYMLINK_NOFOLLOW)
                    .map_err(io_at("give a part of", asked))?;
                // Whatever the umask has taken off.
                let opened = open(&folder, name).map_err(io_at("open a part of", asked))?;
                fchmodat(&opened, ".", mode, FchmodatFlags::FollowSymlink)
                    .map_err(io_at("set the mode of a part of", asked))?;
            }
            Err(Errno::EEXIST) => {}
            Err(error) => return Err(io_at("make a part of", asked)(error)),
        }
        folder = open(&folder, name).map_err(|error| match error {
            Errno::ELOOP | Errno::ENOTDIR | Errno::EXDEV => {
                MemoryError::NoFolder { part: asked.part.clone(), path: asked.path.clone() }
            }
            error => io_at("open a part of", asked)(error),
        })?;
    }
    Ok(folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(part: &str) -> MemoryVolume {
        let (uid, gid) = (nix::unistd::getuid().as_raw(), nix::unistd::getgid().as_raw());
        MemoryVolume { part: part.into(), part_mode: 0o2750, part_uid: uid, part_gid: gid, ..Default::default() }
    }

    #[test]
    fn a_part_is_a_folder_of_the_volume_and_nothing_else() {
        use std::os::unix::fs::{MetadataExt, symlink};
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        let opened = File::from(part(root, &asked("a/b")).unwrap());
        let made = fs::metadata(root.join("a/b")).unwrap();
        assert_eq!((opened.metadata().unwrap().ino(), made.mode() & 0o7777), (made.ino(), 0o2750));
        part(root, &asked("a/b")).unwrap();
        symlink("/", root.join("link")).unwrap();
        fs::write(root.join("file"), "").unwrap();
        for (bad, kind) in [
            ("link", Kind::Conflict),
            ("link/etc", Kind::Conflict),
            ("file", Kind::Conflict),
            ("../x", Kind::Invalid),
            ("/etc", Kind::Invalid),
        ] {
            assert_eq!(part(root, &asked(bad)).unwrap_err().kind(), kind, "{bad}");
        }
    }

    #[test]
    fn names_are_plain_and_what_is_on_the_node_is_not_hidden() {
        let memory = Memory::default();
        for name in ["", ".x", "a/b"] {
            let error = memory.place(&MemoryVolume { name: name.into(), ..asked("") }).unwrap_err();
            assert_eq!(error.kind(), Kind::Invalid, "{error}");
        }
        let there = MemoryVolume { name: "memory.x".into(), path: "/k/x".into(), occupied: true, ..asked("") };
        let error = memory.place(&there).unwrap_err();
        assert!(error.kind() == Kind::Conflict && error.to_string().contains("/k/x"), "{error}");
    }
}
