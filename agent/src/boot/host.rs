//! Boots the agent without a guest: it leaves the node's namespaces for a root of the pod's own, then does the same handshake.
//!
//! The connections are sockets that the pod process made. What belongs to the node (clock, random pool, modules, mounts) is left
//! unchanged.

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
use super::ready::BootedAgent;
use super::{apply, mounts};
use crate::frame;
use crate::huge_pages::HugePages;
use crate::image::GuestDisks;
use crate::listener::HostSocket;
use crate::memory::HotplugMemory;
use crate::paths;
use crate::processors::OnlineCpus;
use crate::zygote::Zygote;

/// The first argument of an agent that runs on the node.
pub const FLAG: &str = "--host";

/// The node's namespaces that the pod uses instead of its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodeNamespaceFlags {
    /// The network namespace.
    pub network: bool,
    /// The PID namespace.
    pub pid: bool,
    /// The IPC namespace, with /dev/shm.
    pub ipc: bool,
}

/// The descriptors and directories that the pod process hands over as arguments.
#[derive(Debug)]
pub struct HostArguments {
    /// A connection to the pod process.
    host: OwnedFd,
    /// Listens for the gRPC service.
    rpc: OwnedFd,
    /// Listens for the streams.
    streams: OwnedFd,
    /// The pod's directory on the node.
    directory: PathBuf,
    /// The node's directory for what containers write.
    scratch: PathBuf,
    shares: NodeNamespaceFlags,
}

impl HostArguments {
    /// Parses the arguments after the flag: the pod's directory, the scratch directory, the descriptors of handshake, service and
    /// streams, and a word for each namespace that is the node's. `None` if they are invalid.
    pub fn parse(arguments: impl IntoIterator<Item = String>) -> Option<HostArguments> {
        let mut arguments = arguments.into_iter();
        let (directory, scratch) = (PathBuf::from(arguments.next()?), PathBuf::from(arguments.next()?));
        let numbers: Vec<i32> = arguments.by_ref().take(3).filter_map(|number| number.parse().ok()).collect();
        let distinct: BTreeSet<i32> = numbers.iter().copied().filter(|number| *number > 2).collect();
        let mut shares = NodeNamespaceFlags::default();
        for word in arguments {
            match word.as_str() {
                "network" => shares.network = true,
                "pid" => shares.pid = true,
                "ipc" => shares.ipc = true,
                _ => return None,
            }
        }
        if distinct.len() != 3 || !directory.is_absolute() || !scratch.is_absolute() {
            return None;
        }
        let mut fds = crate::sys::adopt_descriptors(numbers).into_iter();
        Some(HostArguments { host: fds.next()?, rpc: fds.next()?, streams: fds.next()?, directory, scratch, shares })
    }
}

/// Boots on the node. The pod process has made the PID namespace and entered the network namespace already, and this process is
/// alone in the cgroup that is the root of the pod's.
pub fn boot(arguments: HostArguments) -> Result<BootedAgent, BootError> {
    let started = monotonic_nanos();
    let HostArguments { host, rpc, streams, directory, scratch, shares } = arguments;
    crate::log::log_to_stdout();
    let mut host = File::from(host);
    let handshake = |source| BootError::Handshake { source };
    let mut own = CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWUTS | CloneFlags::CLONE_NEWCGROUP;
    own.set(CloneFlags::CLONE_NEWIPC, !shares.ipc);
    unshare(own).map_err(|source| BootError::Namespaces { source })?;
    // The umask of the pod process is neither for devices nor for containers.
    umask(Mode::empty());
    mounts::switch_root_on_node(&directory)?;
    umask(Mode::from_bits_truncate(0o022));
    send_hello(&mut host, started).map_err(handshake)?;
    let config: BootConfig = frame::read(&mut host).map_err(handshake)?;
    // CNI made the network namespace, so the pod's user namespace does not own it.
    let configured = apply::apply_to_pod(&config, (!shares.network).then_some((&[], &[])), CloneFlags::empty());
    let error = configured.as_ref().err().map(|error| Chain(error).to_string()).unwrap_or_default();
    frame::write(&mut host, &BootReport { error }).map_err(handshake)?;
    let users = configured?;

    mounts::mount_for_containers(config.shm_bytes, shares.ipc)?;
    mounts::bind_mount(&paths::node_path(&scratch), paths::SCRATCH.as_ref())?;
    apply::write_files(&config.hostname, &config.interfaces, config.dns.as_ref())?;
    apply::publish_user_namespace(users.as_ref())?;
    create_cgroups()?;
    // In the node's PID namespace, orphans of containers would otherwise become children of the node's PID 1.
    nix::sys::prctl::set_child_subreaper(true).map_err(|source| BootError::Namespaces { source })?;
    drop(host);
    let zygote = Zygote::fork(&[&rpc, &streams]).map_err(|source| BootError::Zygote { source })?;
    crate::sys::limit_files(65_536, 1 << 19).map_err(|source| BootError::Limit { source })?;
    let (rpc, streams) = (HostSocket::Unix(rpc), HostSocket::Unix(streams));
    let (processors, memory, huge_pages) = (OnlineCpus::of_node(), HotplugMemory::of_node(), HugePages::of_node());
    let disks = GuestDisks::on_node();
    let (node_pid, has_guest) = (shares.pid, false);
    Ok(BootedAgent { config, disks, processors, memory, huge_pages, node_pid, has_guest, users, rpc, streams, zygote })
}

/// Moves the agent out of the root of the pod's cgroups, so that the root can enable controllers.
fn create_cgroups() -> Result<(), BootError> {
    for name in ["agent", paths::POD_CGROUP.trim_start_matches('/')] {
        let path = PathBuf::from(format!("{}/{name}", paths::CGROUP));
        fs::create_dir(&path).map_err(|source| BootError::File { path, source })?;
    }
    let path = PathBuf::from(format!("{}/agent/cgroup.procs", paths::CGROUP));
    fs::write(&path, "0").map_err(|source| BootError::File { path, source })?;
    // The OOM killer should kill containers first. A node may forbid a lower value.
    if let Err(error) = fs::write("/proc/self/oom_score_adj", "-998") {
        tracing::debug!(%error, "cannot lower oom_score_adj: the OOM killer may kill the agent as soon as its containers");
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
            assert!(HostArguments::parse(arguments.iter().map(|word| (*word).to_owned())).is_none(), "{arguments:?}");
        }
    }
}
