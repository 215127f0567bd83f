//! Takes over what the pod process passes at the start, and does the handshake with it: the same handshake as an agent in a guest
//! (agent.proto).

use crate::error::KeeperError;
use crate::sys;
use nacelle_base::share::QUEUES;
use nacelle_engine::Accelerator;
use nacelle_proto::agent::{AgentHello, BootConfig, BootReport};
use nacelle_proto::wire::{self, Shaped};
use prost::Message;
use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::os::fd::{OwnedFd, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;

/// The maximum length of a frame of the handshake in bytes.
const MAX_FRAME: u32 = 1 << 20;
/// The version of agent.proto.
const PROTOCOL: u32 = 1;

/// The arguments and descriptors from the pod process.
#[derive(Debug)]
pub struct StartupResources {
    /// The pod's directory on the node, for sockets.
    pub directory: PathBuf,
    /// The directory of the node for disks.
    pub scratch: PathBuf,
    /// The path of QEMU.
    pub qemu: PathBuf,
    /// The accelerator that QEMU uses.
    pub accelerator: Accelerator,
    /// The connection to the pod process.
    pub connection: UnixStream,
    /// The listener of the service.
    pub rpc: UnixListener,
    /// The listener of the streams.
    pub streams: UnixListener,
    /// The taps in the order of the pod's interfaces, each with its queues.
    pub taps: Vec<Vec<OwnedFd>>,
    /// The packet sockets for DHCP requests, one per tap.
    pub dhcp: Vec<OwnedFd>,
    /// The connections to the file-server process, which has the directories of the node that are shared with the guest.
    pub shares: Vec<[UnixStream; QUEUES]>,
}

impl StartupResources {
    /// Parses the arguments: the pod's directory, the directory for disks, QEMU, `kvm` or `tcg`, the number of directories of the
    /// node that are shared with the guest, and descriptor numbers: handshake, service, streams; for each interface its tap (its
    /// queues, separated by colons) and its packet socket; for each shared directory its streams.
    pub fn parse(arguments: impl IntoIterator<Item = String>) -> Option<StartupResources> {
        let mut arguments = arguments.into_iter();
        let mut path = || arguments.next().map(PathBuf::from).filter(|path| path.is_absolute());
        let (directory, scratch, qemu) = (path()?, path()?, path()?);
        let accelerator = match arguments.next()?.as_str() {
            "kvm" => Accelerator::Kvm,
            "tcg" => Accelerator::Tcg,
            _ => return None,
        };
        let shared: usize = arguments.next()?.parse().ok()?;
        let group = |group: String| group.split(':').map(|number| number.parse().ok()).collect::<Option<Vec<RawFd>>>();
        let groups: Vec<Vec<RawFd>> = arguments.map(group).collect::<Option<_>>()?;
        let numbers: Vec<RawFd> = groups.concat();
        let distinct: BTreeSet<RawFd> = numbers.iter().copied().filter(|number| *number > 2).collect();
        let without_shares = groups.len().checked_sub(shared.checked_mul(QUEUES)?)?;
        // Only a tap has several queues.
        let is_misplaced_group =
            |(n, group): (usize, &Vec<RawFd>)| group.len() > 1 && (n < 3 || n.is_multiple_of(2) || n >= without_shares);
        let is_malformed = groups.iter().enumerate().any(is_misplaced_group);
        if distinct.len() != numbers.len() || without_shares < 3 || without_shares.is_multiple_of(2) || is_malformed {
            return None;
        }
        let mut fds = sys::adopt_descriptors(numbers).ok()?.into_iter();
        let (connection, rpc, streams) = (fds.next()?.into(), fds.next()?.into(), fds.next()?.into());
        let (mut taps, mut dhcp) = (Vec::new(), Vec::new());
        for queues in groups.iter().take(without_shares).skip(3).step_by(2).map(Vec::len) {
            taps.push(fds.by_ref().take(queues).collect());
            dhcp.push(fds.next()?);
        }
        let mut shares = Vec::new();
        for _ in 0..shared {
            shares.push([fds.next()?.into(), fds.next()?.into()]);
        }
        Some(StartupResources { directory, scratch, qemu, accelerator, connection, rpc, streams, taps, dhcp, shares })
    }

    /// Sends hello, and receives the pod's network.
    pub fn handshake(&mut self) -> Result<BootConfig, KeeperError> {
        let failed = |source| KeeperError::Resource { what: "complete the handshake with the pod process", source };
        let release = nix::sys::utsname::uname().map_err(|errno| failed(errno.into()))?;
        let hello = AgentHello {
            protocol: PROTOCOL,
            agent_version: env!("CARGO_PKG_VERSION").to_owned(),
            kernel_release: release.release().to_string_lossy().into_owned(),
            started_nanos: 0,
            sent_nanos: 0,
        };
        send(&mut self.connection, &hello).map_err(failed)?;
        let config = receive(&mut self.connection).map_err(failed)?;
        send(&mut self.connection, &BootReport { error: String::new() }).map_err(failed)?;
        Ok(config)
    }
}

fn send(to: &mut impl Write, message: &impl Message) -> std::io::Result<()> {
    let payload = message.encode_to_vec();
    let length = u32::try_from(payload.len()).map_err(std::io::Error::other)?;
    to.write_all(&length.to_le_bytes())?;
    to.write_all(&payload)
}

fn receive<M: Message + Shaped + Default>(from: &mut impl Read) -> std::io::Result<M> {
    let mut head = [0; 4];
    from.read_exact(&mut head)?;
    let length = u32::from_le_bytes(head);
    if length > MAX_FRAME {
        return Err(std::io::ErrorKind::InvalidData.into());
    }
    let mut payload = vec![0; usize::try_from(length).unwrap_or_default()];
    from.read_exact(&mut payload)?;
    wire::decode(&payload).map_err(std::io::Error::other)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_arguments_are_rejected() {
        for arguments in [
            &[][..],
            &["/f", "/s", "/q", "tcg"],
            &["/f", "/s", "/q", "tcg", "0", "900", "901"],
            &["/f", "/s", "/q", "hvf", "0", "900", "901", "902"],
            &["/f", "/s", "q", "tcg", "0", "900", "901", "902"],
            &["/f", "/s", "/q", "tcg", "0", "900", "901", "901"],
            &["/f", "/s", "/q", "tcg", "0", "2", "901", "902"],
            &["/f", "/s", "/q", "tcg", "0", "900", "901", "902", "x"],
            &["/f", "/s", "/q", "tcg", "0", "900", "901", "902", "903"],
            &["/f", "/s", "/q", "tcg", "1", "900", "901", "902"],
            &["/f", "/s", "/q", "tcg", "1", "900", "901", "902", "903"],
            &["/f", "/s", "/q", "tcg", "18446744073709551615", "900", "901", "902"],
            &["/f", "/s", "/q", "tcg", "0", "900", "901", "902:903", "904", "905"],
            &["/f", "/s", "/q", "tcg", "0", "900", "901", "902", "903", "904:905"],
            &["/f", "/s", "/q", "tcg", "0", "900", "901", "902", "903:", "904"],
            &["/f", "/s", "/q", "tcg", "0", "900", "901", "902", "903:903", "904"],
            &["/f", "/s", "/q", "tcg", "1", "900", "901", "902", "903:904", "905"],
            // These descriptors are not open.
            &["/f", "/s", "/q", "tcg", "0", "900", "901", "902"],
        ] {
            assert!(
                StartupResources::parse(arguments.iter().map(|group| (*group).to_owned())).is_none(),
                "{arguments:?}"
            );
        }
    }

    #[test]
    fn the_handshake_matches_the_agents_protocol() {
        let (mut near, far) = UnixStream::pair().unwrap();
        let directory = tempfile::tempdir().unwrap();
        let listener = |name: &str| UnixListener::bind(directory.path().join(name)).unwrap();
        let mut startup = StartupResources {
            directory: "/f".into(),
            scratch: "/s".into(),
            qemu: "/q".into(),
            accelerator: Accelerator::Tcg,
            connection: far,
            rpc: listener("a"),
            streams: listener("b"),
            taps: Vec::new(),
            dhcp: Vec::new(),
            shares: Vec::new(),
        };
        let other = std::thread::spawn(move || startup.handshake().unwrap());
        assert_eq!(receive::<AgentHello>(&mut near).unwrap().protocol, PROTOCOL);
        send(&mut near, &BootConfig { hostname: "web".into(), ..Default::default() }).unwrap();
        assert_eq!(receive::<BootReport>(&mut near).unwrap().error, "");
        assert_eq!(other.join().unwrap().hostname, "web");
    }
}
