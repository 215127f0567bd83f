//! Creates, opens, enters and removes named network namespaces. A function that must change namespace does so on a thread of its
//! own, so that the caller's thread stays in its namespace. All functions block for a few kernel calls.

use crate::NetError;
use crate::netlink::Netlink;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::statfs::{NSFS_MAGIC, fstatfs};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// An open network namespace. It lives as long as this value, even if its name is removed.
#[derive(Debug)]
pub struct NetNs {
    file: File,
    path: PathBuf,
}

impl NetNs {
    /// Opens the namespace with this path.
    pub fn open(path: &Path) -> Result<NetNs, NetError> {
        let file = File::open(path).map_err(failed("open", path))?;
        let kind = fstatfs(&file).map_err(|errno| failed("open", path)(errno.into()))?.filesystem_type();
        if kind != NSFS_MAGIC {
            return Err(NetError::NotNetns { path: path.to_owned() });
        }
        Ok(NetNs { file, path: path.to_owned() })
    }

    /// The path under which the namespace was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl AsFd for NetNs {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Creates a namespace with its loopback up, and names it `path`. Creates the directory if it is missing.
///
/// Fails with the kind `AlreadyExists` if the file exists. Leaves nothing behind on failure.
pub fn create(path: &Path) -> Result<NetNs, NetError> {
    if let Some(directory) = path.parent() {
        fs::create_dir_all(directory).map_err(failed("create", path))?;
    }
    OpenOptions::new().write(true).create_new(true).mode(0o444).open(path).map_err(failed("create", path))?;
    let made = run_on_thread(path, || {
        unshare(CloneFlags::CLONE_NEWNET).map_err(|errno| failed("create", path)(errno.into()))?;
        Netlink::open()?.set_up("lo")?;
        mount(Some("/proc/thread-self/ns/net"), path, None::<&str>, MsFlags::MS_BIND, None::<&str>)
            .map_err(|errno| failed("create", path)(errno.into()))
    })
    .flatten()
    .and_then(|()| NetNs::open(path));
    if made.is_err() {
        // The first error is returned; a name that could not be removed is removed with the pod.
        let _ = remove(path);
    }
    made
}

/// Disables the router solicitations of the namespace's own stack on interfaces that are created later. The guest that uses them in
/// its place sends its own, and each such frame reaches all pods of a bridge.
pub(crate) fn disable_router_solicitations(netns: &NetNs) -> Result<(), NetError> {
    let set = run_in(netns, || set_ipv6_option("default", "router_solicitations", "0"))?;
    set.map_err(failed("set up", netns.path()))
}

/// Sets an option of IPv6 of an interface (`net.ipv6.conf`) in this thread's namespace. A kernel without IPv6 has no such file.
pub(crate) fn set_ipv6_option(interface: &str, option: &str, value: &str) -> io::Result<()> {
    match fs::write(format!("/proc/sys/net/ipv6/conf/{interface}/{option}"), value) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// Removes the name. The namespace goes with its last user. Succeeds if there is no such name.
pub fn remove(path: &Path) -> Result<(), NetError> {
    match umount2(path, MntFlags::MNT_DETACH) {
        // EINVAL: an empty file, left by a crash between creation and mount.
        Ok(()) | Err(nix::errno::Errno::EINVAL) => (),
        Err(nix::errno::Errno::ENOENT) => return Ok(()),
        Err(errno) => return Err(failed("remove", path)(errno.into())),
    }
    nacelle_base::files::remove_if_there(path).map_err(|error| failed("remove", path)(error.source))
}

/// Runs `work` on a new thread inside the namespace and waits for its result.
pub fn run_in<T: Send>(netns: &NetNs, work: impl FnOnce() -> T + Send) -> Result<T, NetError> {
    run_on_thread(&netns.path, || {
        setns(netns, CloneFlags::CLONE_NEWNET).map_err(|errno| failed("enter", &netns.path)(errno.into()))?;
        Ok(work())
    })?
}

/// Runs `work` on a thread that may change its namespaces. Resumes a panic of `work` in the caller.
fn run_on_thread<T: Send>(path: &Path, work: impl FnOnce() -> T + Send) -> Result<T, NetError> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new()
            .name("netns".into())
            .spawn_scoped(scope, work)
            .map_err(failed("enter", path))?;
        thread.join().map_err(|panic| std::panic::resume_unwind(panic))
    })
}

fn failed(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> NetError {
    let path = path.to_owned();
    move |source| NetError::Netns { what, path, source }
}
