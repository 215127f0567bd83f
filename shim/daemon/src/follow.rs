//! Runs a task for each machine of the node that a follower wants, for as long as the machine's container runs. One more task
//! looks for new machines.

use crate::lifecycle::{Node, View};
use nacelle_base::ContainerId;
use nacelle_model::record::ContainerRecord;
use nacelle_model::state::ContainerState;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use tokio_util::task::AbortOnDropHandle;

/// Pause between two looks for new machines.
pub(crate) const LOOK: Duration = Duration::from_secs(1);

/// A kind of follower.
pub(crate) trait Follow: Send + Sync + 'static {
    /// Returns whether this pod's machine, which is this container, is to be followed.
    fn wanted(view: &View, container: &ContainerRecord) -> bool;

    /// Follows the machine until it no longer runs ([`runs`]).
    fn follow(node: Node, view: Arc<View>, container: ContainerRecord) -> impl Future<Output = ()> + Send;
}

/// Follows all machines of a node, forever.
pub(crate) async fn all<F: Follow>(node: Node) {
    let mut followed: HashMap<ContainerId, AbortOnDropHandle<()>> = HashMap::new();
    loop {
        followed.retain(|_, task| !task.is_finished());
        for view in node.views() {
            let Some(container) = running::<F>(&view) else { continue };
            if !followed.contains_key(&container.id) {
                let task = tokio::spawn(F::follow(node.clone(), Arc::clone(&view), container.clone()));
                followed.insert(container.id.clone(), AbortOnDropHandle::new(task));
            }
        }
        tokio::time::sleep(LOOK).await;
    }
}

/// Returns whether a container is a running machine that is to be followed.
pub(crate) fn runs<F: Follow>(node: &Node, id: &ContainerId) -> bool {
    let found = node.container(id.as_str());
    found.is_ok_and(|(_, view)| running::<F>(&view).is_some_and(|container| container.id == *id))
}

/// Returns the pod's machine, if it runs and is to be followed.
fn running<F: Follow>(view: &View) -> Option<&ContainerRecord> {
    view.pod.config.machine.as_ref()?;
    let container = view.containers.values().find(|container| container.state == ContainerState::Running)?;
    F::wanted(view, container).then_some(container)
}
