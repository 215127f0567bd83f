//! Locks persistent VMs against the pods that run them: a VM has one run at a time, and is copied or deleted only while no pod
//! holds it.

use super::Node;
use crate::lifecycle::context::error::{LifecycleError, at};
use crate::lifecycle::context::view::View;
use nacelle_machines::runtime::holds_vm;
use nacelle_machines::vms::VmLock;
use nacelle_model::pod::PodName;
use nacelle_model::record::VmRecord;
use std::sync::Arc;

pub(super) fn held(vm: &str, view: &View) -> LifecycleError {
    LifecycleError::VmHeld { vm: vm.to_owned(), name: view.pod.config.name.to_string(), id: view.pod.id.to_string() }
}

impl Node {
    /// Fails if a pod of another name holds this persistent VM. [`Node::run_pod`] checks it again when the pod begins to hold it.
    pub fn check_not_held(&self, vm: &str, pod: &PodName) -> Result<(), LifecycleError> {
        let holds = |view: &Arc<View>| holds_vm(&view.pod, vm) && view.pod.config.name != *pod;
        self.views().iter().find(|view| holds(view)).map_or(Ok(()), |view| Err(held(vm, view)))
    }

    /// Locks a persistent VM that no pod holds; it does not change until the returned guard is dropped.
    pub fn lock_vm(&self, vm: &str, operation: &'static str) -> Result<(VmRecord, VmLock), LifecycleError> {
        // While the table is locked, no pod can begin to hold the VM.
        let rows = self.table.rows();
        let views = rows.pods.values().map(|handle| Arc::clone(&handle.view.borrow()));
        if let Some(view) = views.into_iter().find(|view| holds_vm(&view.pod, vm)) {
            return Err(held(vm, &view));
        }
        let step = "lock the VM";
        Ok((self.services.vms.get(vm).map_err(at(step))?, self.services.vms.lock(vm, operation).map_err(at(step))?))
    }
}
