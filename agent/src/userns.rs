//! Creates the pod's user namespace and the namespaces that it owns, and maps ids inside it to ids outside.
//!
//! `create`, `run_as_root` and `run_inside` are for a process with one thread.

use nacelle_base::retry::retry_interrupted;
use nacelle_proto::agent::{IdRange, UserNamespace};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::prctl::{get_pdeathsig, set_pdeathsig};
use nix::sys::wait::waitpid;
use nix::unistd::{Gid, Pid, Uid, chown, seteuid};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;

use crate::{paths, sys};

/// The user namespace of a pod, which its containers share. The agent itself stays outside.
#[derive(Debug)]
pub struct UserNs {
    file: OwnedFd,
    users: IdRange,
    groups: IdRange,
    /// Whether it owns the pod's network namespace.
    pub network: bool,
}

/// A namespace that the user namespace owns.
#[derive(Debug)]
pub struct OwnedNamespace {
    /// A descriptor of the namespace, for setns(2).
    pub file: OwnedFd,
    /// The kind of namespace, one flag.
    pub kind: CloneFlags,
}

impl UserNs {
    /// Creates a user namespace, and namespaces of the kinds `namespaces` that it owns, which this process may enter.
    pub fn create(request: &UserNamespace, namespaces: CloneFlags) -> io::Result<(UserNs, Vec<OwnedNamespace>)> {
        let range = |range: Option<IdRange>| range.ok_or(io::Error::from(io::ErrorKind::InvalidInput));
        let (users, groups) = (range(request.users)?, range(request.groups)?);
        let (mut ours, theirs) = UnixStream::pair()?;
        // A namespace needs a process in it until this process has opened it.
        let holder = match sys::fork()? {
            None => {
                drop(ours);
                run_holder(theirs, namespaces)
            }
            Some(pid) => pid,
        };
        drop(theirs);
        let open = |name: &str| File::open(format!("/proc/{holder}/ns/{name}")).map(OwnedFd::from);
        let result = (|| {
            read_result(&mut ours)?;
            for (file, range) in [("uid_map", users), ("gid_map", groups)] {
                fs::write(format!("/proc/{holder}/{file}"), format!("0 {} {}", range.first, range.count))?;
            }
            ours.write_all(b"!")?;
            read_result(&mut ours)?;
            let mut others = Vec::new();
            for (kind, name) in [
                (CloneFlags::CLONE_NEWIPC, "ipc"),
                (CloneFlags::CLONE_NEWUTS, "uts"),
                (CloneFlags::CLONE_NEWNET, "net"),
            ] {
                if namespaces.contains(kind) {
                    others.push(OwnedNamespace { file: open(name)?, kind });
                }
            }
            let network = namespaces.contains(CloneFlags::CLONE_NEWNET);
            Ok((UserNs { file: open("user")?, users, groups, network }, others))
        })();
        drop(ours);
        retry_interrupted(|| waitpid(Pid::from_raw(holder), None))?;
        result
    }

    /// Binds the user namespace to `paths::USER_NAMESPACE`, and makes its root the owner of the pod's files.
    pub fn publish(&self) -> io::Result<()> {
        bind_namespace(&format!("/proc/self/fd/{}", self.file.as_raw_fd()), paths::USER_NAMESPACE)?;
        let (uid, gid) = self.root();
        let files = ["hosts", "hostname", "resolv.conf"].map(|name| Path::new(paths::FILES).join(name));
        for path in files.iter().map(|path| path.as_path()).chain([Path::new(paths::SHM)]) {
            chown(path, Some(uid), Some(gid))?;
        }
        Ok(())
    }

    /// Runs `work` with the user id of the namespace's root outside, for files that check the user id of a writer.
    pub fn run_as_root<T>(&self, work: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        // seteuid(2) clears the parent-death signal, so it is restored below.
        let at_end = get_pdeathsig()?;
        seteuid(self.root().0)?;
        let result = work();
        seteuid(Uid::from_raw(0))?;
        set_pdeathsig(at_end)?;
        result
    }

    /// Runs `work` in a child process that is in the namespace, with all capabilities there.
    pub fn run_inside(&self, work: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        let (mut ours, mut theirs) = UnixStream::pair()?;
        let child = match sys::fork()? {
            None => {
                drop(ours);
                let result =
                    setns(&self.file, CloneFlags::CLONE_NEWUSER).map_err(io::Error::from).and_then(|()| work());
                let code = result.err().map_or(0, |error| error.raw_os_error().unwrap_or(libc::EIO));
                std::process::exit(i32::from(theirs.write_all(&code.to_ne_bytes()).is_err()));
            }
            Some(pid) => pid,
        };
        drop(theirs);
        let result = read_result(&mut ours);
        retry_interrupted(|| waitpid(Pid::from_raw(child), None))?;
        result
    }

    /// Returns the ids outside of the namespace's root.
    pub fn root(&self) -> (Uid, Gid) {
        let (uid, gid) = self.to_outer_ids(0, 0);
        (Uid::from_raw(uid), Gid::from_raw(gid))
    }

    /// Maps ids inside to ids outside. Both are within the limits.
    pub fn to_outer_ids(&self, uid: u32, gid: u32) -> (u32, u32) {
        (self.users.first.saturating_add(uid), self.groups.first.saturating_add(gid))
    }

    /// Returns the largest ids of a user and of a group inside.
    pub fn max_ids(&self) -> (u32, u32) {
        (self.users.count.saturating_sub(1), self.groups.count.saturating_sub(1))
    }
}

impl AsFd for UserNs {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Binds a namespace to a file. Processes in a user namespace cannot enter it by /proc of a process outside.
pub fn bind_namespace(namespace: &str, path: &str) -> io::Result<()> {
    fs::write(path, "")?;
    let none = None::<&str>;
    Ok(mount(Some(namespace), path, none, MsFlags::MS_BIND, none)?)
}

/// Becomes the root of the user namespace that this process has just entered, in which it had no user before.
pub fn become_root() -> io::Result<()> {
    nix::unistd::setgroups(&[])?;
    nix::unistd::setresgid(Gid::from_raw(0), Gid::from_raw(0), Gid::from_raw(0))?;
    nix::unistd::setresuid(Uid::from_raw(0), Uid::from_raw(0), Uid::from_raw(0))?;
    Ok(())
}

/// Reads the error number of a step of the holder; 0 means success.
fn read_result(holder: &mut UnixStream) -> io::Result<()> {
    let mut code = [0; 4];
    holder.read_exact(&mut code)?;
    match i32::from_ne_bytes(code) {
        0 => Ok(()),
        code => Err(io::Error::from_raw_os_error(code)),
    }
}

/// Runs the holder: unshares the user namespace, waits until the agent has set its id maps, then unshares the others.
fn run_holder(mut agent: UnixStream, namespaces: CloneFlags) -> ! {
    let mut run = || -> io::Result<()> {
        for flags in [CloneFlags::CLONE_NEWUSER, namespaces] {
            let result = unshare(flags);
            let code = result.err().map_or(0, |error| error as i32);
            agent.write_all(&code.to_ne_bytes())?;
            // Wait for the agent's byte to continue. The end of the connection means to stop.
            if result.is_err() || retry_interrupted(|| agent.read(&mut [0]))? == 0 {
                break;
            }
        }
        Ok(())
    };
    std::process::exit(i32::from(run().is_err()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn namespace(first: u32, count: u32) -> UserNs {
        let range = IdRange { first, count };
        UserNs { file: File::open("/dev/null").unwrap().into(), users: range, groups: range, network: true }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(128))]
        #[test]
        fn numbers_inside_stay_within_their_range_outside(first: u32, count in 1_u32.., uid: u32) {
            let users = namespace(first, count);
            let (limit, _) = users.max_ids();
            let (outside, _) = users.to_outer_ids(uid.min(limit), 0);
            prop_assert!(outside >= first);
            prop_assert!(u64::from(outside) < u64::from(first) + u64::from(count));
        }
    }
}
