//! Defines the state of a pod as other tasks see it. The pod's actor publishes a new view after each change.

use nacelle_base::ContainerId;
use nacelle_model::record::{ContainerRecord, PodRecord};
use nacelle_pod::client::PodClient;
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
}
