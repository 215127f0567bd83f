//! Locks persistent VMs against the pods that run them: a VM has one run at a time, and is copied or deleted only while no pod
//! holds it.

use super::Node;
use crate::lifecycle::context::error::{LifecycleError, at};
use crate::lifecycle::context::view::View;
use nacelle_machines::vms::Busy;
use nacelle_model::record::VmRecord;
use nacelle_model::state;
use std::sync::Arc;

/// Returns whether a pod holds a persistent VM. It does so until the VM is known to have stopped.
pub(super) fn holds(view: &View, vm: &str) -> bool {
    view.pod.config.vm.as_deref() == Some(vm) && view.pod.state != state::PodState::Stopped
}

pub(super) fn held(vm: &str, view: &View) -> LifecycleError {
    LifecycleError::VmHeld { vm: vm.to_owned(), name: view.pod.config.name.to_string(), id: view.pod.id.to_string() }
}

impl Node {
    /// Returns the pod that runs a persistent VM or has not released it yet.
    pub fn holder(&self, vm: &str) -> Option<Arc<View>> {
        self.views().into_iter().find(|view| holds(view, vm))
    }

    /// Copies a persistent VM that no pod holds. The copy gets an identity of its own.
    pub async fn copy_vm(&self, vm: &str, namespace: &str, name: &str) -> Result<VmRecord, LifecycleError> {
        let (_record, _busy) = self.lend_vm(vm, "copied")?;
        self.parts.vms.copy(vm, namespace, name).await.map_err(at("copy the machine"))
    }

    /// Locks a persistent VM that no pod holds; it does not change until the returned guard is dropped.
    pub fn lend_vm(&self, vm: &str, what: &'static str) -> Result<(VmRecord, Busy), LifecycleError> {
        // While the table is locked, no pod can begin to hold the VM.
        let rows = self.table.rows();
        let views = rows.pods.values().map(|handle| Arc::clone(&handle.view.borrow()));
        if let Some(view) = views.into_iter().find(|view| holds(view, vm)) {
            return Err(held(vm, &view));
        }
        let step = "have the machine to itself";
        Ok((self.parts.vms.known(vm).map_err(at(step))?, self.parts.vms.take(vm, what).map_err(at(step))?))
    }

    /// Deletes a persistent VM that no pod holds, with all its data.
    pub async fn forget_vm(&self, vm: &str) -> Result<(), LifecycleError> {
        let (_record, _busy) = self.lend_vm(vm, "deleted")?;
        self.parts.vms.forget(vm).await.map_err(at("forget the machine"))
    }
}
