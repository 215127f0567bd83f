//! Owns: who follows the machines of a node: one task for each that is to be followed, for as long as its container runs.
//! Threads: a task for each such machine, and the one that looks for them.

use crate::lifecycle::{Node, View};
use nacelle_base::ContainerId;
use nacelle_model::record::ContainerRecord;
use nacelle_model::state::ContainerState;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use tokio_util::task::AbortOnDropHandle;

/// Between two looks.
pub(crate) const LOOK: Duration = Duration::from_secs(1);

/// What is to be followed.
pub(crate) trait Follow: Send + Sync + 'static {
    /// Whether the machine of this pod, which this container is, has something to follow.
    fn wanted(view: &View, container: &ContainerRecord) -> bool;

    /// Follows it until it does not run any more ([`runs`]).
    fn follow(node: Node, view: Arc<View>, container: ContainerRecord) -> impl Future<Output = ()> + Send;
}

/// Follows all machines of a node, for ever.
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

/// Whether a container is a machine that runs and is to be followed.
pub(crate) fn runs<F: Follow>(node: &Node, id: &ContainerId) -> bool {
    let found = node.container(id.as_str());
    found.is_ok_and(|(_, view)| running::<F>(&view).is_some_and(|container| container.id == *id))
}

/// The machine that a pod is, if it runs and is to be followed.
fn running<F: Follow>(view: &View) -> Option<&ContainerRecord> {
    view.pod.config.machine.as_ref()?;
    let container = view.containers.values().find(|container| container.state == ContainerState::Running)?;
    F::wanted(view, container).then_some(container)
}
