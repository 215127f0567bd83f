//! Defines the state of a pod as other tasks see it. The pod's actor publishes a new view after each change.

use nacelle_base::ContainerId;
use nacelle_model::record::{ContainerRecord, PodRecord};
use nacelle_pod::client::PodClient;
use nacelle_pod::protocol::{PodFeature, PodPeer};
use std::collections::BTreeMap;

/// The state of a pod as its actor last published it.
#[derive(Clone, Debug)]
pub struct View {
    /// The pod.
    pub pod: PodRecord,
    /// The pod's containers.
    pub containers: BTreeMap<ContainerId, ContainerRecord>,
    pub(crate) client: Option<PodClient>,
}

impl View {
    pub(crate) fn new<'a>(
        pod: &PodRecord,
        containers: impl Iterator<Item = &'a ContainerRecord>,
        client: Option<PodClient>,
    ) -> View {
        View { pod: pod.clone(), containers: containers.map(|c| (c.id.clone(), c.clone())).collect(), client }
    }

    /// Returns whether new containers of the pod can have AppArmor profiles.
    pub(crate) fn applies_profiles(&self) -> bool {
        match &self.client {
            Some(client) => client.peer().has(PodFeature::ApparmorProfiles),
            None => self.pod.applies_profiles,
        }
    }

    /// Returns the version of the pod's process; `None` if no process is connected.
    pub(crate) fn peer(&self) -> Option<&PodPeer> {
        self.client.as_ref().map(PodClient::peer)
    }
}
