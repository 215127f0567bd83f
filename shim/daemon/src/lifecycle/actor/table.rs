//! Keeps the table of all pods: the inbox of each actor and the view that it published last. The table's lock is held for look-ups
//! and single changes only, never while waiting.

use super::message::{Answer, Message};
use crate::lifecycle::context::NodeServices;
use crate::lifecycle::context::error::LifecycleError;
use crate::lifecycle::context::text::clip;
use crate::lifecycle::context::view::View;
use crate::lifecycle::node::users::PodUsers;
use nacelle_base::{Chain, ContainerId, PodId};
use nacelle_model::digest::ImageId;
use nacelle_model::pod::PodName;
use nacelle_model::record::{ContainerRecord, PodRecord};
use std::collections::{BTreeMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::{mpsc, oneshot, watch};

/// The inbox of an existing pod, and the response that the pod is to send.
pub(crate) type Known = (mpsc::Sender<Message>, Answer<()>);

#[derive(Clone)]
pub(crate) struct Handle {
    pub(crate) inbox: mpsc::Sender<Message>,
    pub(crate) view: watch::Receiver<Arc<View>>,
}

#[derive(Default)]
pub(crate) struct Rows {
    pub(crate) pods: BTreeMap<PodId, Handle>,
    pub(crate) names: BTreeMap<PodName, PodId>,
    pub(crate) users: PodUsers,
}

/// The table of all pods.
#[derive(Default)]
pub(crate) struct Table(Mutex<Rows>);

impl Table {
    /// Returns a table without pods.
    pub(crate) fn new(users: PodUsers) -> Table {
        Table(Mutex::new(Rows { users, ..Rows::default() }))
    }

    pub(crate) fn rows(&self) -> MutexGuard<'_, Rows> {
        // Rows change by single inserts and removals, so a panic in between leaves the table consistent.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn forget(&self, pod: &PodRecord) {
        let mut rows = self.rows();
        rows.pods.remove(&pod.id);
        rows.users.release(pod.user);
        if rows.names.get(&pod.config.name) == Some(&pod.id) {
            rows.names.remove(&pod.config.name);
        }
    }

    /// Sends a request to the pod's task and waits for the response.
    pub(crate) async fn ask<T>(
        &self,
        handle: &Handle,
        message: impl FnOnce(Answer<T>) -> Message,
    ) -> Result<T, LifecycleError> {
        let asked = send_request(&handle.inbox, message).await;
        asked.map_err(|error| self.explain(&handle.view.borrow().pod.id, error))
    }

    /// Returns the error of a request to a pod's task that sent no response. A task that ends removes its row first: if the row
    /// is still there, the task has panicked, and the pod runs on.
    pub(crate) fn explain(&self, pod: &PodId, error: LifecycleError) -> LifecycleError {
        match error {
            LifecycleError::Ended if self.rows().pods.contains_key(pod) => {
                LifecycleError::TaskFailed { pod: pod.to_string() }
            }
            error => error,
        }
    }

    pub(crate) fn views(&self) -> Vec<Arc<View>> {
        self.rows().pods.values().map(|handle| Arc::clone(&handle.view.borrow())).collect()
    }

    pub(crate) fn images_in_use(&self) -> HashSet<ImageId> {
        let images_of =
            |c: &ContainerRecord| std::iter::once(&c.image).chain(&c.volumes).map(|i| i.id).collect::<Vec<_>>();
        self.views().iter().flat_map(|view| view.containers.values().flat_map(images_of).collect::<Vec<_>>()).collect()
    }

    /// Returns the only pod whose id has this prefix.
    pub(crate) fn find(&self, id: &str) -> Result<(PodId, Handle), LifecycleError> {
        let rows = self.rows();
        let mut fitting = rows.pods.iter().filter(|(known, _)| !id.is_empty() && known.as_str().starts_with(id));
        match (fitting.next(), fitting.next()) {
            (Some((id, handle)), None) => Ok((id.clone(), handle.clone())),
            (None, _) => Err(LifecycleError::NotFound { what: "pod", id: clip(id) }),
            (Some(_), Some(_)) => Err(LifecycleError::Ambiguous { what: "pod", id: clip(id) }),
        }
    }

    /// Returns the only container whose id has this prefix, with its pod.
    pub(crate) fn find_container(&self, id: &str) -> Result<(ContainerId, Handle, Arc<View>), LifecycleError> {
        let mut found = None;
        for handle in self.rows().pods.values() {
            let view = Arc::clone(&handle.view.borrow());
            for known in view.containers.keys().filter(|known| !id.is_empty() && known.as_str().starts_with(id)) {
                if found.is_some() {
                    return Err(LifecycleError::Ambiguous { what: "container", id: clip(id) });
                }
                found = Some((known.clone(), handle.clone(), Arc::clone(&view)));
            }
        }
        found.ok_or_else(|| LifecycleError::NotFound { what: "container", id: clip(id) })
    }

    /// Releases unused images in the background.
    pub(crate) fn collect_images(&self, services: &NodeServices) {
        let (images, mut in_use) = (services.images.clone(), self.images_in_use());
        in_use.extend(services.vms.images());
        tokio::spawn(async move {
            if let Err(error) = images.collect(&in_use).await {
                tracing::warn!("cannot collect images: {}", Chain(&error));
            }
        });
    }
}

pub(crate) async fn send_request<T>(
    inbox: &mpsc::Sender<Message>,
    message: impl FnOnce(Answer<T>) -> Message,
) -> Result<T, LifecycleError> {
    let (answer, answered) = oneshot::channel();
    inbox.send(message(answer)).await.map_err(|_closed| LifecycleError::Ended)?;
    answered.await.map_err(|_dropped| LifecycleError::Ended)?
}

/// Turns "not found" into success, for Stop and Remove.
pub(crate) fn ignore_not_found(error: LifecycleError) -> Result<(), LifecycleError> {
    match error {
        LifecycleError::NotFound { .. } | LifecycleError::Ended => Ok(()),
        error => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacelle_base::{Classify, FailureKind};

    #[tokio::test]
    async fn a_pod_whose_task_has_failed_is_not_said_to_be_gone() {
        let (table, pod) = (Table::default(), nacelle_model::testing::pod(1));
        let (inbox, task) = mpsc::channel(1);
        drop(task);
        let (_view, view) = watch::channel(Arc::new(View::new(&pod, std::iter::empty(), None)));
        let handle = Handle { inbox, view };
        table.rows().pods.insert(pod.id.clone(), handle.clone());
        let error = table.ask(&handle, Message::Stop).await.or_else(ignore_not_found).unwrap_err();
        assert!(
            matches!(&error, LifecycleError::TaskFailed { .. }) && error.kind() == FailureKind::Internal,
            "{error}"
        );
        table.forget(&pod);
        table.ask(&handle, Message::Stop).await.or_else(ignore_not_found).unwrap();
    }
}
