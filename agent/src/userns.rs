//! Owns: the pod's user namespace: making it and the namespaces that belong to it, and what a number inside is outside.
//! May use: `sys`, `paths`.
//! Threads: `make` and `as_root` are for a process with one thread.

use nacelle_base::retry::retry_interrupted;
use nacelle_proto::agent::{IdRange, UserNamespace};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
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
    /// The pod's network namespace belongs to it.
    pub network: bool,
}

/// A namespace that belongs to a user namespace.
#[derive(Debug)]
pub struct Other {
    /// Refers to it.
    pub file: OwnedFd,
    /// Its kind.
    pub kind: CloneFlags,
}

impl UserNs {
    /// Makes it, and further namespaces that it owns, which this process may enter.
    pub fn make(asked: &UserNamespace, with: CloneFlags) -> io::Result<(UserNs, Vec<Other>)> {
        let range = |range: Option<IdRange>| range.ok_or(io::Error::from(io::ErrorKind::InvalidInput));
        let (users, groups) = (range(asked.users)?, range(asked.groups)?);
        let (mut ours, theirs) = UnixStream::pair()?;
        // A namespace is somebody's: of a process that lives until this one refers to it.
        let holder = match sys::fork()? {
            None => {
                drop(ours);
                hold(theirs, with)
            }
            Some(pid) => pid,
        };
        drop(theirs);
        let open = |name: &str| File::open(format!("/proc/{holder}/ns/{name}")).map(OwnedFd::from);
        let made = (|| {
            answer(&mut ours)?;
            for (file, range) in [("uid_map", users), ("gid_map", groups)] {
                fs::write(format!("/proc/{holder}/{file}"), format!("0 {} {}", range.first, range.count))?;
            }
            ours.write_all(b"!")?;
            answer(&mut ours)?;
            let mut others = Vec::new();
            for (kind, name) in [
                (CloneFlags::CLONE_NEWIPC, "ipc"),
                (CloneFlags::CLONE_NEWUTS, "uts"),
                (CloneFlags::CLONE_NEWNET, "net"),
            ] {
                if with.contains(kind) {
                    others.push(Other { file: open(name)?, kind });
                }
            }
            let network = with.contains(CloneFlags::CLONE_NEWNET);
            Ok((UserNs { file: open("user")?, users, groups, network }, others))
        })();
        drop(ours);
        retry_interrupted(|| waitpid(Pid::from_raw(holder), None))?;
        made
    }

    /// Gives it its name among the agent's files, and the pod's files to its root.
    pub fn settle(&self) -> io::Result<()> {
        name(&format!("/proc/self/fd/{}", self.file.as_raw_fd()), paths::USER_NAMESPACE)?;
        let (uid, gid) = self.root();
        let files = ["hosts", "hostname", "resolv.conf"].map(|name| Path::new(paths::FILES).join(name));
        for path in files.iter().map(|path| path.as_path()).chain([Path::new(paths::SHM)]) {
            chown(path, Some(uid), Some(gid))?;
        }
        Ok(())
    }

    /// Does something as its root; for what belongs to one of its namespaces and asks who does it.
    pub fn as_root<T>(&self, work: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        // Whoever becomes somebody else is not told of the end of its parent any more.
        let at_end = get_pdeathsig()?;
        seteuid(self.root().0)?;
        let done = work();
        seteuid(Uid::from_raw(0))?;
        set_pdeathsig(at_end)?;
        done
    }

    /// What its root is outside.
    pub fn root(&self) -> (Uid, Gid) {
        let (uid, gid) = self.outside(0, 0);
        (Uid::from_raw(uid), Gid::from_raw(gid))
    }

    /// What a user and a group inside are outside. Both are within the limits.
    pub fn outside(&self, uid: u32, gid: u32) -> (u32, u32) {
        (self.users.first.saturating_add(uid), self.groups.first.saturating_add(gid))
    }

    /// The largest numbers of a user and of a group inside.
    pub fn limits(&self) -> (u32, u32) {
        (self.users.count.saturating_sub(1), self.groups.count.saturating_sub(1))
    }
}

impl AsFd for UserNs {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Gives a namespace a name. Who is in a user namespace may not enter by the /proc of a process that is the agent's.
pub fn name(namespace: &str, path: &str) -> io::Result<()> {
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

/// Reads an error number from the holder; 0 is none.
fn answer(holder: &mut UnixStream) -> io::Result<()> {
    let mut code = [0; 4];
    holder.read_exact(&mut code)?;
    match i32::from_ne_bytes(code) {
        0 => Ok(()),
        code => Err(io::Error::from_raw_os_error(code)),
    }
}

/// The holder's life: into the user namespace, whose numbers the agent sets, then into the others.
fn hold(mut agent: UnixStream, with: CloneFlags) -> ! {
    let mut held = || -> io::Result<()> {
        for flags in [CloneFlags::CLONE_NEWUSER, with] {
            let made = unshare(flags);
            let code = made.err().map_or(0, |error| error as i32);
            agent.write_all(&code.to_ne_bytes())?;
            // The agent's word to go on, or its end of the connection.
            if made.is_err() || retry_interrupted(|| agent.read(&mut [0]))? == 0 {
                break;
            }
        }
        Ok(())
    };
    std::process::exit(i32::from(held().is_err()))
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
            let (limit, _) = users.limits();
            let (outside, _) = users.outside(uid.min(limit), 0);
            prop_assert!(outside >= first);
            prop_assert!(u64::from(outside) < u64::from(first) + u64::from(count));
        }
    }
}
