//! Performs the boot handshake with the agent, from its hello to a configured guest. It owns no resource that needs
//! cleanup, so its future may be dropped at any point.

use crate::agent::{self, Agent, ExitWatch, read_guest_frame, tokio_stream_of, write_frame};
use crate::error::PodError;
use crate::guest_values::{Bounded, FromGuest};
use crate::machine::{IMAGE_DISK, SCRATCH_DISK, VOLUME_DISK, random};
use crate::memory::MemoryLayout;
use crate::spec::PodSpec;
use nacelle_base::task::run_blocking;
use nacelle_base::timeline::{self, Timeline};
use nacelle_engine::{GuestLink, LinkListener};
use nacelle_model::namespace::IdRange;
use nacelle_proto::{agent as proto, pod};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::UnixStream;
use tokio::sync::watch;

/// The pod's network; `None` until the daemon has sent it.
pub type NetworkWatch = watch::Receiver<Option<Arc<pod::ConfigureRequest>>>;

/// A VM whose agent has not been configured.
pub struct StartedVm {
    /// Accepts the agent's connection for the handshake.
    pub incoming: Box<dyn LinkListener>,
    /// The link to the guest.
    pub link: Arc<dyn GuestLink>,
    /// Reports how the VM has ended.
    pub exit_watch: ExitWatch,
    /// The layout of its memory.
    pub memory: MemoryLayout,
    /// The VM was restored from a template, not booted.
    pub from_template: bool,
}

/// A guest that is ready for containers.
pub struct ReadyGuest {
    /// The agent in the guest.
    pub agent: Agent,
    /// The reply to Configure: the agent's version, its kernel's release and the steps of the boot.
    pub response: Bounded<pod::ConfigureResponse>,
}

const PROTOCOL: u32 = 1;
/// The number of connections that may end without a hello before the boot fails.
const MAX_ABANDONED: u32 = 16;

/// Checks that a network fits the VM: its interfaces are a subsequence of the specification's.
pub fn check_network(spec: &PodSpec, request: &pod::ConfigureRequest) -> Result<(), PodError> {
    let mut names = spec.network.iter().flat_map(|network| &network.interfaces);
    for interface in &request.interfaces {
        let invalid = |field, value, rule| Err(PodError::Field { field, value, rule });
        if !names.any(|name| *name == interface.name) {
            return invalid(
                "interfaces[].name",
                interface.name.clone(),
                "only the interfaces of the specification are allowed, in its order",
            );
        }
        if interface.mac.len() != 6 {
            return invalid("interfaces[].mac", format!("{:?}", interface.mac), "6 bytes are expected");
        }
        if let Some(bad) = interface.neighbours.iter().find(|neighbour| neighbour.mac.len() != 6) {
            return invalid("interfaces[].neighbours[].mac", format!("{:?}", bad.mac), "6 bytes are expected");
        }
    }
    Ok(())
}

/// Waits for the agent and for the network, in any order, then configures the guest.
pub async fn configure_guest(
    spec: &PodSpec,
    vm: StartedVm,
    network: NetworkWatch,
    timeline: &Timeline,
) -> Result<ReadyGuest, PodError> {
    let StartedVm { incoming, link, exit_watch, memory, from_template } = vm;
    let outcome = handshake(spec, incoming, memory, from_template, network, timeline).await;
    match outcome {
        Ok(response) => Ok(ReadyGuest { agent: Agent::new(link, exit_watch, spec.timeouts.call()), response }),
        // A connection that breaks, or never arrives, usually means that the VM has exited.
        Err(error @ (PodError::Link { .. } | PodError::Stream { .. })) => Err(agent::exit_or(exit_watch, error).await),
        Err(error) => Err(error),
    }
}

/// Waits for the agent's hello. A connection that ends before the hello was abandoned by the guest because the host was
/// slow, so the next connection is accepted. After the hello no further connection is accepted.
pub async fn accept_hello(
    mut incoming: Box<dyn LinkListener>,
    limit: Duration,
) -> Result<(UnixStream, FromGuest<proto::AgentHello>), PodError> {
    let mut abandoned = 0;
    loop {
        let (returned, accepted) = run_blocking("accept the agent's connection", move || {
            let accepted = incoming.accept(limit);
            (incoming, accepted)
        })
        .await?;
        incoming = returned;
        let stream =
            accepted.map_err(|source| PodError::Link { what: "accept the connection of the guest's agent", source })?;
        let mut stream = tokio_stream_of(stream)?;
        match read_guest_frame(&mut stream, "hello", limit).await {
            Ok(hello) => return Ok((stream, hello)),
            Err(PodError::Stream { .. }) if abandoned < MAX_ABANDONED => abandoned += 1,
            Err(error) => return Err(error),
        }
    }
}

async fn handshake(
    spec: &PodSpec,
    incoming: Box<dyn LinkListener>,
    memory: MemoryLayout,
    from_template: bool,
    network: NetworkWatch,
    timeline: &Timeline,
) -> Result<Bounded<pod::ConfigureResponse>, PodError> {
    let hello = async {
        let (stream, hello) = accept_hello(incoming, spec.timeouts.boot()).await?;
        let hello = hello.bound();
        if hello.protocol != PROTOCOL {
            return Err(PodError::Protocol { got: hello.protocol });
        }
        let millis = |nanos: u64| nanos / 1_000_000;
        tracing::info!(
            kernel = hello.kernel_release,
            kernel_ms = millis(hello.started_nanos),
            guest_ms = millis(hello.sent_nanos),
            from_template,
            "the agent has sent its hello"
        );
        // An agent that is a process of the node uses the node's clock, and one in a clone has booted before, so they have no boot steps.
        if spec.engine.has_disks() && !from_template {
            timeline.add(hello.boot_steps(timeline::unix_nanos(), spec.timeouts.boot()));
        }
        Ok((stream, hello))
    };
    let ((mut stream, hello), network) = tokio::try_join!(hello, wait_for_network(network))?;

    let step = timeline.begin("configuration of the guest");
    configure(&mut stream, &boot_config(spec, &network, memory)?, spec.timeouts.configure()).await?;
    step.done();
    Ok(hello.into_response(timeline.steps(), from_template))
}

/// Waits until the daemon has sent the network.
pub async fn wait_for_network(mut network: NetworkWatch) -> Result<Arc<pod::ConfigureRequest>, PodError> {
    let network = network.wait_for(Option::is_some).await.map_err(|_closed| PodError::Ending)?.clone();
    network.ok_or(PodError::Ending)
}

/// Sends the configuration to an agent that has said hello, and waits until it has applied it. Each may take `limit`.
pub async fn configure(stream: &mut UnixStream, config: &proto::BootConfig, limit: Duration) -> Result<(), PodError> {
    write_frame(stream, config, limit).await?;
    let report: FromGuest<proto::BootReport> = read_guest_frame(stream, "report", limit).await?;
    report.bound().map_err(|message| PodError::Guest { message })
}

fn boot_config(
    spec: &PodSpec,
    network: &pod::ConfigureRequest,
    memory: MemoryLayout,
) -> Result<proto::BootConfig, PodError> {
    let mut entropy = vec![0; 64];
    random(&mut entropy)?;
    let number = |disk: usize| u32::try_from(disk).unwrap_or(u32::MAX);
    let range = |range: IdRange| proto::IdRange { first: range.first, count: range.count };
    let user_namespace = spec.user_namespace.map(|namespace| proto::UserNamespace {
        users: Some(range(namespace.users)),
        groups: Some(range(namespace.groups)),
    });
    Ok(proto::BootConfig {
        hostname: spec.hostname.clone(),
        interfaces: network.interfaces.clone(),
        routes: network.routes.clone(),
        dns: network.dns.clone(),
        time_unix_nanos: crate::now_nanos(),
        entropy,
        sysctls: spec.sysctls.iter().map(|(name, value)| (name.clone(), value.clone())).collect(),
        shared_pid: spec.shared_pid,
        scratch_disk: number(SCRATCH_DISK),
        image_disk: number(IMAGE_DISK),
        volume_disk: number(VOLUME_DISK),
        shm_bytes: spec.shm_bytes,
        user_namespace,
        added_memory: agent::memory_ranges(&memory.added()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::tests::sample;
    use nacelle_model::namespace::UserNamespace;
    use nacelle_proto::common;

    #[test]
    fn a_network_must_match_the_specification() {
        let interface = |name: &str, mac: &[u8]| common::Interface {
            name: name.into(),
            mac: mac.into(),
            mtu: 1500,
            ..common::Interface::default()
        };
        let request = |interfaces| pod::ConfigureRequest { interfaces, routes: vec![], dns: None };
        assert!(check_network(&sample(), &request(vec![])).is_ok());
        assert!(check_network(&sample(), &request(vec![interface("eth0", &[2; 6])])).is_ok());
        for bad in [
            vec![interface("eth1", &[2; 6])],
            vec![interface("eth0", &[2; 5])],
            vec![interface("eth0", &[2; 6]), interface("eth1", &[4; 6])],
        ] {
            assert!(check_network(&sample(), &request(bad)).is_err());
        }
        let mut several = sample();
        let names = ["eth0", "net1", "net2"].map(str::to_owned);
        several.network.as_mut().unwrap().interfaces = names.to_vec();
        let of = |names: &[&str]| {
            check_network(&several, &request(names.iter().map(|name| interface(name, &[2; 6])).collect())).is_ok()
        };
        assert!(
            of(&["eth0", "net1", "net2"]) && of(&["eth0", "net2"]) && !of(&["net2", "net1"]) && !of(&["eth0", "eth0"])
        );
    }

    #[test]
    fn the_boot_configuration_is_complete() {
        let mut spec = sample();
        spec.sysctls.insert("kernel.shmmax".into(), "1".into());
        spec.shared_pid = true;
        let range = |first| IdRange { first, count: 65_536 };
        spec.user_namespace = Some(UserNamespace { users: range(65_536), groups: range(131_072) });
        let network = pod::ConfigureRequest {
            interfaces: vec![common::Interface {
                name: "eth0".into(),
                mac: vec![2; 6],
                mtu: 1400,
                addresses: vec!["10.0.0.2/24".into()],
                neighbours: vec![common::Neighbour { address: "10.0.0.1".into(), mac: vec![4; 6] }],
            }],
            routes: vec![common::Route {
                destination: "0.0.0.0/0".into(),
                gateway: "10.0.0.1".into(),
                interface: "eth0".into(),
                metric: Some(3),
                source: "10.0.0.2".into(),
                mtu: 1300,
            }],
            dns: Some(common::Dns { servers: vec!["1.1.1.1".into()], searches: vec!["a".into()], options: vec![] }),
        };
        let memory = MemoryLayout { booted_mib: 256, added_mib: 128, reserve_mib: 128 };
        let config = boot_config(&spec, &network, memory).unwrap();
        assert_eq!(config.added_memory, [proto::MemoryRange { address: 256 << 20, bytes: 128 << 20 }]);
        assert_eq!((config.image_disk, config.scratch_disk, config.shared_pid), (0, 1, true));
        let users = config.user_namespace.unwrap();
        assert_eq!((users.users.unwrap().first, users.groups.unwrap().first), (65_536, 131_072));
        assert_eq!(config.interfaces[0].addresses, ["10.0.0.2/24"]);
        let neighbour = &config.interfaces[0].neighbours[0];
        assert_eq!((neighbour.address.as_str(), neighbour.mac.as_slice()), ("10.0.0.1", &[4; 6][..]));
        let route = &config.routes[0];
        assert_eq!((route.metric, route.source.as_str(), route.mtu), (Some(3), "10.0.0.2", 1300));
        assert_eq!(config.dns.unwrap().servers, ["1.1.1.1"]);
        assert_eq!(config.sysctls["kernel.shmmax"], "1");
        assert_eq!(config.entropy.len(), 64);
        assert!(config.entropy.iter().any(|byte| *byte != 0) && config.time_unix_nanos > 0);
    }
}
