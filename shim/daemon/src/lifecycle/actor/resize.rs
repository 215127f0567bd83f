//! Handles changes of the pod's resources, which resize its VM as far as the VM can follow.

use super::message::{Answer, Message};
use super::{Actor, ResizeRequest};
use crate::lifecycle::context::error::LifecycleError;
use crate::lifecycle::pod::resize::{self, Resize};
use crate::lifecycle::pod::size;
use nacelle_model::resources::{PodResources, Resources, VmResources};
use nacelle_model::state;
use nacelle_pod::client::PodClient;
use nacelle_store::Change;
use std::sync::Arc;

impl Actor {
    /// Changes the pod's resources: resizes the VM to hold them, then records them.
    pub(crate) async fn update_pod(&mut self, change: Box<PodResources>, answer: Answer<()>) {
        self.change_size(ResizeRequest::Pod(change), answer).await;
    }

    pub(crate) async fn change_size(&mut self, request: ResizeRequest, answer: Answer<()>) {
        self.updates.push_back((request, answer));
        if self.updates.len() == 1 {
            self.begin_pod_updates().await;
        }
    }

    /// Applies pending changes up to the first one that needs a resize of the VM.
    async fn begin_pod_updates(&mut self) {
        while let Some((request, _)) = self.updates.front() {
            let done = match self.next_size(request) {
                Ok((next, sizes, Some(client))) => {
                    let resized = resize::resize(Arc::clone(&self.services), client, sizes);
                    return self.effect(async move { Message::PodUpdated(Box::new(next), resized.await) });
                }
                Ok((next, _, None)) => {
                    let mut record = self.pod.clone();
                    record.resources = next;
                    let kept = self.commit(vec![Change::Pod(record.clone().into())]).await;
                    if kept.is_ok() {
                        self.pod = record;
                        self.publish();
                    }
                    kept
                }
                Err(error) => Err(error),
            };
            if let Some((_, answer)) = self.updates.pop_front() {
                drop(answer.send(done));
            }
        }
    }

    /// Returns the pod's resources after a change, the VM's resources that follow, and the client to ask for the resize: `None`
    /// if the VM keeps its size.
    fn next_size(
        &self,
        request: &ResizeRequest,
    ) -> Result<(Option<PodResources>, Resize, Option<PodClient>), LifecycleError> {
        if self.pod.state != state::PodState::Ready {
            return Err(self.not_ready());
        }
        let known = self.pod.resources.clone();
        let (next, asked) = match request {
            ResizeRequest::Pod(change) => {
                let next = known.unwrap_or_default().changed_by(change);
                (Some(next.clone()), next.containers)
            }
            // Never less than the current size: memory for other uses of the VM is part of the pod's limits.
            ResizeRequest::Containers(bytes) => {
                let least = self.pod.machine.map_or(0, |machine| machine.memory);
                let memory_limit = i64::try_from(least.max(*bytes)).unwrap_or(i64::MAX);
                (known, Resources { memory_limit, ..Resources::default() })
            }
        };
        // For a pod whose record is older than the record of VM resources, the promised size follows from its configuration.
        let config = &self.pod.config;
        let vcpus = config.cpu_limit_milli.map_or(1, |milli| u32::try_from(milli.div_ceil(1000)).unwrap_or(u32::MAX));
        let promised = VmResources {
            vcpus,
            max_vcpus: 0,
            memory: config.memory_limit.unwrap_or(0),
            least_memory: 0,
            max_memory: 0,
        };
        let machine = self.pod.machine.unwrap_or(promised);
        let handler = self.services.config.handler(&self.pod.handler);
        let least = handler.map_or(1, |(_, handler)| handler.vcpus);
        let sized = size::wanted(machine, least, &asked).map_err(|(has, wanted)| LifecycleError::TooSmall {
            id: self.pod.id.to_string(),
            has,
            wanted,
        })?;
        // The agent of a pod that is older than the `max_vcpus` field may not support it.
        let processors = machine.max_vcpus > 0 && size::grows(config);
        let to = if processors { sized } else { VmResources { vcpus: machine.vcpus, ..sized } };
        let sizes = Resize { from: machine, to, processors };
        if !(processors || machine.hotplug_memory_used().is_some()) || !self.pod.config.kind.has_guest() {
            return Ok((next, sizes, None));
        }
        // Sent even if the record shows this size already: an earlier response may have been lost.
        let client = self.client.clone().ok_or_else(|| self.not_ready())?;
        Ok((next, sizes, Some(client)))
    }

    pub(crate) async fn pod_updated(
        &mut self,
        next: Option<PodResources>,
        resized: Result<VmResources, LifecycleError>,
    ) {
        let result = match resized {
            Ok(machine) => {
                // The resize has happened, whether or not the record can be written.
                self.pod.resources = next;
                self.pod.machine = Some(machine);
                self.keep_pod().await;
                Ok(())
            }
            Err(error) => Err(error),
        };
        if let Some((_, answer)) = self.updates.pop_front() {
            drop(answer.send(result));
        }
        self.begin_pod_updates().await;
    }
}
