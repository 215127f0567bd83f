//! Boots the agent as PID 1 of a VM.
//!
//! The hello is sent before anything else, so that the host prepares its answer while the guest works. What only containers
//! need is done after the report. A template is saved when it has sent its hello, so it does first what does not depend on the pod.

use nacelle_base::Chain;
use nacelle_proto::agent::BootReport;
use nix::sys::socket::{Backlog, VsockAddr, bind, listen};
use std::fs;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;

use super::error::BootError;
use super::handshake::{connect_and_greet, monotonic_nanos, open_vsock, receive_configuration};
use super::ports::{RPC_PORT, STREAM_PORT};
use super::ready::BootedAgent;
use super::{apply, cgroups, mounts, template};
use crate::frame;
use crate::huge_pages::HugePages;
use crate::image::GuestDisks;
use crate::listener::HostSocket;
use crate::memory::HotplugMemory;
use crate::processors::OnlineCpus;
use crate::zygote::Zygote;

/// Boots the guest. An error while the configuration is applied is reported to the host before it is returned.
pub fn boot() -> Result<BootedAgent, BootError> {
    let started_nanos = monotonic_nanos();
    let handshake = |source| BootError::Handshake { source };
    let greeted = if template::is_template() { None } else { Some(connect_and_greet(started_nanos)?) };
    mounts::switch_root()?;
    crate::log::log_to_kernel();
    let (prepared, host) = match greeted {
        Some(host) => (None, host),
        None => (Some(Prepared::new()?), connect_and_greet(started_nanos)?),
    };
    let (mut host, config) = receive_configuration(host, started_nanos)?;
    let configured = apply::apply(&config).and_then(|users| match prepared {
        Some(Prepared { rpc, streams, zygote }) => Ok((users, rpc, streams, Some(zygote))),
        None => Ok((users, listen_on(RPC_PORT)?, listen_on(STREAM_PORT)?, None)),
    });
    let error = configured.as_ref().err().map(|error| Chain(error).to_string()).unwrap_or_default();
    frame::write(&mut host, &BootReport { error }).map_err(handshake)?;
    let (users, rpc, streams, early_zygote) = configured?;

    mounts::mount_for_containers(config.shm_bytes, false)?;
    apply::write_files(&config.hostname, &config.interfaces, config.dns.as_ref())?;
    apply::publish_user_namespace(users.as_ref())?;
    if early_zygote.is_none() {
        cgroups::create()?;
        allow_overcommit()?;
    }
    cgroups::limit_threads()?;
    // The zygote would keep the connection open for as long as the VM runs.
    drop(host);
    let mine = [&rpc, &streams];
    let zygote = match early_zygote {
        None => Zygote::fork(&mine),
        // It has the namespaces and the limits that the agent had when it was forked.
        Some(zygote) if users.is_none() && config.added_memory.is_empty() => Ok(zygote),
        Some(zygote) => zygote.replace(&mine),
    };
    let zygote = zygote.map_err(|source| BootError::Zygote { source })?;
    crate::sys::limit_files(65_536, 1 << 19).map_err(|source| BootError::Limit { source })?;
    let disks = GuestDisks::new(config.image_disk, config.scratch_disk, config.volume_disk);
    let (rpc, streams) = (HostSocket::Vsock(rpc), HostSocket::Vsock(streams));
    let (processors, memory, huge_pages) = (OnlineCpus::of_guest(), HotplugMemory::of_guest(), HugePages::of_guest());
    let (node_pid, has_guest) = (false, true);
    Ok(BootedAgent { config, disks, processors, memory, huge_pages, node_pid, has_guest, users, rpc, streams, zygote })
}

/// What a template has before it is configured.
struct Prepared {
    rpc: OwnedFd,
    streams: OwnedFd,
    zygote: Zygote,
}

impl Prepared {
    fn new() -> Result<Prepared, BootError> {
        // The pod gets another mount of the same hierarchy.
        mounts::mount_cgroups()?;
        cgroups::create()?;
        cgroups::allow_agent_devices()?;
        allow_overcommit()?;
        let (rpc, streams) = (listen_on(RPC_PORT)?, listen_on(STREAM_PORT)?);
        let zygote = Zygote::fork(&[&rpc, &streams]).map_err(|source| BootError::Zygote { source })?;
        Ok(Prepared { rpc, streams, zygote })
    }
}

fn listen_on(port: u32) -> Result<OwnedFd, BootError> {
    let listening = || {
        let fd = open_vsock()?;
        bind(fd.as_raw_fd(), &VsockAddr::new(libc::VMADDR_CID_ANY, port))?;
        listen(&fd, Backlog::new(128)?)?;
        Ok(fd)
    };
    listening().map_err(|source| BootError::Listen { port, source })
}

/// Sets `vm.overcommit_memory` (Documentation/admin-guide/sysctl/vm.rst) to 1, as kubelet does on nodes: mapping more than the
/// memory is no error, because the containers' cgroups limit what is used.
fn allow_overcommit() -> Result<(), BootError> {
    let path = PathBuf::from("/proc/sys/vm/overcommit_memory");
    fs::write(&path, "1").map_err(|source| BootError::File { path, source })
}
