//! Owns: the boot without a guest: out of the node's namespaces onto a root of the pod's own, then the same handshake
//! over sockets that the pod process made. What is the node's (clock, random pool, modules, its mounts) is left alone.
//! May use: `frame`, `sys`, `zygote`, and the steps that a guest takes too.

use nacelle_base::Chain;
use nacelle_proto::agent::{BootConfig, BootReport};
use nix::sched::{CloneFlags, unshare};
use nix::sys::stat::{Mode, umask};
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use super::error::BootError;
use super::handshake::{monotonic_nanos, send_hello};
use super::ready::Ready;
use super::{apply, mounts};
use crate::frame;
use crate::huge_pages::HugePages;
use crate::image::Disks;
use crate::listener::Socket;
use crate::memory::Memory;
use crate::paths;
use crate::processors::Processors;
use crate::zygote::Zygote;

/// The first argument of an agent that has no guest.
pub const FLAG: &str = "--host";

/// What of the node the pod sees as its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shares {
    /// The network namespace.
    pub network: bool,
    /// The PID namespace.
    pub pid: bool,
    /// The IPC namespace, with /dev/shm.
    pub ipc: bool,
}

/// What the pod process hands over.
#[derive(Debug)]
pub struct Place {
    /// Connected to it.
    host: OwnedFd,
    /// Listens for the service.
    rpc: OwnedFd,
    /// Listens for the streams.
    streams: OwnedFd,
    /// The pod's folder on the node.
    folder: PathBuf,
    /// A folder of the node for what containers write.
    scratch: PathBuf,
    /// What is the node's.
    shares: Shares,
}

impl Place {
    /// Of the arguments after the flag: the pod's folder, the folder of scratch, the descriptors of handshake, service and
    /// streams, and a word for each namespace that is the node's.
    pub fn parse(arguments: impl IntoIterator<Item = String>) -> Option<Place> {
        let mut arguments = arguments.into_iter();
        let (folder, scratch) = (PathBuf::from(arguments.next()?), PathBuf::from(arguments.next()?));
        let numbers: Vec<i32> = arguments.by_ref().take(3).filter_map(|number| number.parse().ok()).collect();
        let distinct: BTreeSet<i32> = numbers.iter().copied().filter(|number| *number > 2).collect();
        let mut shares = Shares::default();
        for word in arguments {
            match word.as_str() {
                "network" => shares.network = true,
                "pid" => shares.pid = true,
                "ipc" => shares.ipc = true,
                _ => return None,
            }
        }
        if distinct.len() != 3 || !folder.is_absolute() || !scratch.is_absolute() {
            return None;
        }
        let mut fds = crate::sys::adopt(numbers).into_iter();
        Some(Place { host: fds.next()?, rpc: fds.next()?, streams: fds.next()?, folder, scratch, shares })
    }
}

/// Boots. The pod process has made the PID namespace and entered the network namespace already, and this process is
/// alone in the control group that is the root of the pod's.
pub fn boot(place: Place) -> Result<Ready, BootError> {
    let started = monotonic_nanos();
    let Place { host, rpc, streams, folder, scratch, shares } = place;
    crate::log::start_on_stdout();
    let mut host = File::from(host);
    let handshake = |source| BootError::Handshake { source };
    let mut own = CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWUTS | CloneFlags::CLONE_NEWCGROUP;
    own.set(CloneFlags::CLONE_NEWIPC, !shares.ipc);
    unshare(own).map_err(|source| BootError::Namespaces { source })?;
    // The pod process's own is not for devices, nor for containers.
    umask(Mode::empty());
    mounts::on_node(&folder)?;
    umask(Mode::from_bits_truncate(0o022));
    send_hello(&mut host, started).map_err(handshake)?;
    let config: BootConfig = frame::read(&mut host).map_err(handshake)?;
    // The network namespace is CNI's, which is none of the user namespace's.
    let configured = apply::pod(&config, (!shares.network).then_some((&[], &[])), CloneFlags::empty());
    let error = configured.as_ref().err().map(|error| Chain(error).to_string()).unwrap_or_default();
    frame::write(&mut host, &BootReport { error }).map_err(handshake)?;
    let users = configured?;

    mounts::rest(config.shm_bytes, shares.ipc)?;
    mounts::bind(&paths::of_node(&scratch), paths::SCRATCH.as_ref())?;
    apply::write_files(&config)?;
    apply::settle_user_namespace(users.as_ref())?;
    create_cgroups()?;
    // Where the PID namespace is the node's, containers' processes would go to its first process.
    nix::sys::prctl::set_child_subreaper(true).map_err(|source| BootError::Namespaces { source })?;
    drop(host);
    let zygote = Zygote::fork(&[&rpc, &streams]).map_err(|source| BootError::Zygote { source })?;
    crate::sys::limit_files(65_536, 1 << 19).map_err(|source| BootError::Limit { source })?;
    let (rpc, streams) = (Socket::Unix(rpc), Socket::Unix(streams));
    let (processors, memory, huge_pages) = (Processors::of_node(), Memory::of_node(), HugePages::of_node());
    let disks = Disks::on_node();
    Ok(Ready { config, disks, processors, memory, huge_pages, node_pid: shares.pid, users, rpc, streams, zygote })
}

/// Leaves the root of the pod's control groups, so that it can hand controllers on.
fn create_cgroups() -> Result<(), BootError> {
    for name in ["agent", paths::POD_CGROUP.trim_start_matches('/')] {
        let path = PathBuf::from(format!("{}/{name}", paths::CGROUP));
        fs::create_dir(&path).map_err(|source| BootError::File { path, source })?;
    }
    let path = PathBuf::from(format!("{}/agent/cgroup.procs", paths::CGROUP));
    fs::write(&path, "0").map_err(|source| BootError::File { path, source })?;
    // Containers shall be killed first; a node that does not allow that has said so in its own way.
    if let Err(error) = fs::write("/proc/self/oom_score_adj", "-998") {
        tracing::debug!(%error, "the agent may be killed as soon as its containers");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bad_arguments_are_refused() {
        for arguments in [
            &[][..],
            &["/f", "/s"],
            &["/f", "/s", "3", "4"],
            &["/f", "/s", "3", "4", "x"],
            &["/f", "/s", "0", "4", "5"],
            &["/f", "/s", "5", "5", "6"],
            &["f", "/s", "903", "904", "905"],
            &["/f", "s", "903", "904", "905"],
            &["/f", "/s", "903", "904", "905", "uts"],
        ] {
            assert!(Place::parse(arguments.iter().map(|word| (*word).to_owned())).is_none(), "{arguments:?}");
        }
    }
}
