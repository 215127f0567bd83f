//! Lists, for every RPC and every message that the daemon sends to a pod process, which features it needs.
//!
//! Each message is destructured without `..`: a new field does not compile until it is here, either as a field of version 1.0
//! or with its feature. So a pod process never receives a field that it would drop.

use super::{PodFeature, PodFeatureSet};
use nacelle_proto::{common, pod};

/// What every process of this major version has.
const BASE: PodFeatureSet = PodFeatureSet::BASE;

/// Defines [`PodRpc`] with the features that each RPC needs besides those of its request.
macro_rules! pod_rpcs {
    ($($rpc:ident: $needed:expr,)*) => {
        /// An RPC of the service Pod, except Hello, which needs no feature.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum PodRpc {
            $($rpc,)*
        }

        impl PodRpc {
            #[cfg(test)]
            const ALL: &[PodRpc] = &[$(PodRpc::$rpc,)*];

            /// Returns the features that the RPC needs, besides those of its request.
            pub(crate) const fn needed(self) -> PodFeatureSet {
                match self {
                    $(PodRpc::$rpc => $needed,)*
                }
            }
        }
    };
}

pod_rpcs! {
    Configure: BASE,
    State: BASE,
    Watch: BASE,
    CreateContainer: BASE,
    StartContainer: BASE,
    StopContainer: BASE,
    RemoveContainer: BASE,
    ExecSync: BASE,
    Exec: BASE,
    StartGuestShell: PodFeatureSet::only(PodFeature::GuestShell),
    UpdateContainer: BASE,
    SetProcessors: BASE,
    SetMemory: BASE,
    Resize: BASE,
    Stats: BASE,
    Checkpoint: PodFeatureSet::only(PodFeature::Checkpoint),
    Stop: BASE,
}

/// A message that the daemon sends to a pod process.
pub trait GatedRequest {
    /// Returns the features that a process must have to understand this message completely.
    fn needed(&self) -> PodFeatureSet;
}

/// Returns the features that any of the messages needs.
fn all<'a, M: GatedRequest + 'a>(messages: impl IntoIterator<Item = &'a M>) -> PodFeatureSet {
    messages.into_iter().fold(BASE, |needed, message| needed.union(message.needed()))
}

/// Returns the feature if a field of it is set.
fn needed_if(is_set: bool, feature: PodFeature) -> PodFeatureSet {
    if is_set { feature.into() } else { BASE }
}

/// Implements [`GatedRequest`] for messages whose fields, all of them listed, are of version 1.0.
macro_rules! base_messages {
    ($($message:path { $($field:ident),* })*) => {
        $(impl GatedRequest for $message {
            fn needed(&self) -> PodFeatureSet {
                let Self { $($field: _),* } = self;
                BASE
            }
        })*
    };
}

base_messages! {
    common::Empty {}
    common::ContainerRef { id }
    common::Neighbour { address, mac }
    common::Route { destination, gateway, interface, metric, source, mtu }
    common::Dns { servers, searches, options }
    common::Limit { file, value }
    common::SetProcessorsRequest { count }
    common::ResizeRequest { id, exec_id, columns, rows }
    pod::Extent { path, offset, length }
    pod::Disk { name, path }
    pod::EmptyDir {
        name, path, source, bytes, mode, uid, gid, has_node_files, sub_path, sub_path_mode, sub_path_uid, sub_path_gid, page_bytes
    }
    pod::BlockDevice { key, path, writable, container_path, access, mode, uid, gid, is_empty_dir }
    pod::SocketVolume { name, server_path, path }
    pod::StopContainerRequest { id, timeout_ms }
    pod::ExecSyncRequest { id, args, timeout_ms }
    pod::ExecRequest { id, args, tty, stdin }
    pod::CheckpointRequest { name, container_ids }
    pod::SetMemoryRequest { bytes }
    pod::StopRequest { timeout_ms }
}

impl GatedRequest for common::Interface {
    fn needed(&self) -> PodFeatureSet {
        let Self { name: _, mac: _, mtu: _, addresses: _, neighbours } = self;
        all(neighbours)
    }
}

impl GatedRequest for common::UpdateContainerRequest {
    fn needed(&self) -> PodFeatureSet {
        let Self { id: _, limits, oom_score_adj: _, processors: _ } = self;
        all(limits)
    }
}

impl GatedRequest for pod::ConfigureRequest {
    fn needed(&self) -> PodFeatureSet {
        let Self { interfaces, routes, dns } = self;
        all(interfaces).union(all(routes)).union(all(dns))
    }
}

impl GatedRequest for pod::CopiedInVolume {
    fn needed(&self) -> PodFeatureSet {
        let Self { name: _, server_path: _, is_live: _, path: _, is_of_pod, is_returned } = self;
        needed_if(*is_of_pod || *is_returned, PodFeature::KubeletFiles)
    }
}

impl GatedRequest for pod::ImageVolume {
    fn needed(&self) -> PodFeatureSet {
        let Self { image_key: _, image, sub_path: _, container_path: _, noexec: _ } = self;
        all(image)
    }
}

impl GatedRequest for pod::CreateContainerRequest {
    fn needed(&self) -> PodFeatureSet {
        let Self {
            id: _,
            // Its fields are the agent's: a caller that sets one that agents of version 1.0 drop also calls `PodClient::require`.
            oci_spec: _,
            image_key: _,
            image,
            user: _,
            merge_image_groups: _,
            tty: _,
            stdin: _,
            stdin_once: _,
            stop_signal: _,
            pid_of: _,
            own_pid_namespace: _,
            volumes,
            copied_in_volumes,
            devices,
            empty_dirs,
            disks,
            images_by_path: _,
            anonymous_volumes,
            socket_volumes,
        } = self;
        all(image)
            .union(all(volumes))
            .union(all(copied_in_volumes))
            .union(all(devices))
            .union(all(empty_dirs))
            .union(all(disks))
            .union(needed_if(!anonymous_volumes.is_empty(), PodFeature::AnonymousVolumes))
            .union(needed_if(!socket_volumes.is_empty(), PodFeature::SocketVolumes))
            .union(all(socket_volumes))
    }
}

impl GatedRequest for pod::StreamOpen {
    fn needed(&self) -> PodFeatureSet {
        let Self { id: _, exec_id: _, stream: _, port: _, name: _, descriptors: _ } = self;
        match self.stream() {
            common::Stream::Unspecified
            | common::Stream::Stdin
            | common::Stream::Stdout
            | common::Stream::Stderr
            | common::Stream::Port
            | common::Stream::Device
            | common::Stream::Log
            | common::Stream::Image => BASE,
            common::Stream::Checkpoint => PodFeature::Checkpoint.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::PodPeer;
    use super::*;
    use pod::CreateContainerRequest;

    const PROTO: &str = include_str!("../../../../proto/pod/v1/pod.proto");

    /// Returns a request that needs exactly this feature; `None` if no message of the protocol does.
    fn request_for(feature: PodFeature) -> Option<CreateContainerRequest> {
        let request = CreateContainerRequest::default();
        match feature {
            PodFeature::AnonymousVolumes => {
                Some(CreateContainerRequest { anonymous_volumes: vec!["/data".into()], ..request })
            }
            PodFeature::KubeletFiles => {
                let copied_in_volumes = vec![pod::CopiedInVolume { is_returned: true, ..Default::default() }];
                Some(CreateContainerRequest { copied_in_volumes, ..request })
            }
            PodFeature::SocketVolumes => {
                Some(CreateContainerRequest { socket_volumes: vec![pod::SocketVolume::default()], ..request })
            }
            // It is in the OCI specification; the daemon requires it.
            PodFeature::ApparmorProfiles => None,
            // It is a property of the process.
            PodFeature::DetachedExec => None,
            // It is an RPC.
            PodFeature::Checkpoint | PodFeature::GuestShell => None,
        }
    }

    #[test]
    fn a_request_is_refused_by_a_peer_that_lacks_its_feature_and_only_then() {
        let everything: PodFeatureSet = PodFeature::ALL.into_iter().collect();
        for feature in PodFeature::ALL {
            let Some(request) = request_for(feature) else { continue };
            assert_eq!(request.needed(), feature.into());
            let old = PodPeer::before_hello(everything.without(feature.into()));
            let text = old.require(request.needed()).unwrap_err().to_string();
            assert!(text.contains(feature.name()), "{text}");
            assert_eq!(PodPeer::before_hello(feature.into()).require(request.needed()), Ok(()));
        }
        assert_eq!(CreateContainerRequest::default().needed(), BASE);
    }

    #[test]
    fn every_rpc_is_in_the_table() {
        let rpcs = PROTO.lines().filter_map(|line| line.trim_start().strip_prefix("rpc ")?.split('(').next());
        let known = PodRpc::ALL.iter().map(|rpc| format!("{rpc:?}"));
        let listed: Vec<_> = std::iter::once("Hello".to_owned()).chain(known).collect();
        assert_eq!(rpcs.collect::<Vec<_>>(), listed);
        for rpc in PodRpc::ALL.iter().filter(|rpc| rpc.needed() != BASE) {
            assert!(REFUSALS.iter().any(|(refused, ..)| refused == rpc), "{rpc:?} needs a test of its refusal");
        }
    }

    /// The RPCs that need a feature, with the refusal for a peer without it.
    const REFUSALS: [(PodRpc, PodFeature, &str); 2] = [
        (
            PodRpc::StartGuestShell,
            PodFeature::GuestShell,
            "lacks the feature guest-shell, which commands in the guest need; replace the pod",
        ),
        (
            PodRpc::Checkpoint,
            PodFeature::Checkpoint,
            "lacks the feature checkpoint, which checkpoints of a running pod need; replace the pod",
        ),
    ];

    #[test]
    fn an_rpc_is_refused_by_a_peer_that_would_not_know_it() {
        let everything: PodFeatureSet = PodFeature::ALL.into_iter().collect();
        for (rpc, feature, expected) in REFUSALS {
            let needed = rpc.needed();
            assert_eq!(needed, feature.into());
            let text = PodPeer::before_hello(everything.without(needed)).require(needed).unwrap_err().to_string();
            assert!(text.contains(expected), "{text}");
            assert_eq!(PodPeer::before_hello(needed).require(needed), Ok(()));
        }
        let offer = pod::StreamOpen { stream: common::Stream::Checkpoint.into(), ..Default::default() };
        assert_eq!(offer.needed(), PodFeature::Checkpoint.into());
    }
}
