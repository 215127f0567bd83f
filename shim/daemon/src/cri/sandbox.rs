//! Implements the pod RPCs: converts the request, calls the lifecycle, converts the result.

use super::Cri;
use super::convert::{
    checkpoint, empty_dirs, pod_config, pod_label, pod_resources_change, report, socket_mounts, stats,
};
use super::machine;
use super::status::{refuse, status};
use nacelle_base::machine::EngineKind;
use nacelle_base::{FailureKind, PodId};
use nacelle_machines::{machine_pod, vms};
use nacelle_model::pod::{PodConfig, PodKind};
use nacelle_model::record::VmRecord;
use nacelle_proto::cri;
use nacelle_vmi::annotations::PREFIX;
use std::collections::HashMap;
use std::time::Duration;
use tonic::Status;

/// Time that a verbose status waits for the guest's figures.
const ACCOUNTS_LIMIT: Duration = Duration::from_secs(2);

impl Cri {
    pub(super) async fn on_run_pod_sandbox(
        &self,
        request: cri::RunPodSandboxRequest,
    ) -> Result<cri::RunPodSandboxResponse, Status> {
        let (pod, name, engine) = self.requested_pod(request.config.as_ref(), &request.runtime_handler).await?;
        let id = self.node.run_pod(pod, name, engine).await.map_err(status)?;
        Ok(cri::RunPodSandboxResponse { pod_sandbox_id: id.to_string() })
    }

    /// Checks the configuration of a new pod. Returns it with the name of its handler and its engine.
    pub(super) async fn requested_pod(
        &self,
        asked: Option<&cri::PodSandboxConfig>,
        requested: &str,
    ) -> Result<(PodConfig, String, EngineKind), Status> {
        let config = &self.node.services().config;
        let Some((name, handler)) = config.handler(requested) else {
            let known: Vec<&str> = config.handlers.keys().map(String::as_str).collect();
            let message = format!("runtime_handler is {requested:?}: this node has the handlers {}", known.join(", "));
            return Err(refuse(FailureKind::Invalid, &message));
        };
        let mut pod = pod_config(asked, requested, handler.engine, &config.sandbox).map_err(status)?;
        if let Some(key) =
            pod.annotations.keys().find(|key| key.starts_with(PREFIX) && !handler.allowed_annotations.contains(key))
        {
            let message = format!(
                "config.annotations has {key:?}: handler {name} allows {:?} of the annotations of Nacelle",
                handler.allowed_annotations
            );
            return Err(refuse(FailureKind::Invalid, &message));
        }
        let engine = self.node.services().engine.resolve(handler.engine, &pod.kind);
        pod_label(asked, !pod.kind.has_guest() && self.selinux).map_err(status)?;
        match machine::vm_request(&pod, config, handler, engine)? {
            Some(machine::VmRequest::Machine { mut machine, vm: requested }) => {
                let mut vm = None;
                if let Some(requested) = requested {
                    let record = self.find_vm(&pod, &requested).await?;
                    machine_pod::set_identity(&mut machine, &record, self.node.services().vms.directory(&record));
                    vm = Some(record.id);
                }
                pod.kind = PodKind::Machine { machine, vm };
            }
            Some(machine::VmRequest::Shape(shape)) => pod.kind = PodKind::Containers { shape },
            None => {}
        }
        if pod.kind.machine().is_none() {
            machine::check_interface_slots(&pod, engine)?;
        }
        pod.empty_dirs = empty_dirs(&pod, handler).map_err(status)?;
        pod.socket_mounts = socket_mounts(&pod).map_err(status)?;
        pod.checkpoint = checkpoint(&pod).map_err(status)?;
        Ok((pod, name.to_owned(), engine))
    }

    /// Returns the persistent VM that a pod names; it is created if the pod allows it.
    async fn find_vm(&self, pod: &PodConfig, requested: &machine::PersistentVmRequest) -> Result<VmRecord, Status> {
        let machine::PersistentVmRequest { name, machine_id } = requested;
        let namespace = &pod.name.namespace;
        // Checked first, because a pod that cannot run the VM must not give it a machine id.
        self.node.check_not_held(&vms::id(namespace, name), &pod.name).map_err(status)?;
        self.node.services().vms.get_or_create(namespace, name, machine_id.as_ref()).await.map_err(status)
    }

    pub(super) async fn on_stop_pod_sandbox(
        &self,
        request: cri::StopPodSandboxRequest,
    ) -> Result<cri::StopPodSandboxResponse, Status> {
        let id = required("pod_sandbox_id", &request.pod_sandbox_id)?;
        self.node.stop_pod(id).await.map_err(status)?;
        Ok(cri::StopPodSandboxResponse {})
    }

    pub(super) async fn on_remove_pod_sandbox(
        &self,
        request: cri::RemovePodSandboxRequest,
    ) -> Result<cri::RemovePodSandboxResponse, Status> {
        let id = required("pod_sandbox_id", &request.pod_sandbox_id)?;
        self.node.remove_pod(id).await.map_err(status)?;
        Ok(cri::RemovePodSandboxResponse {})
    }

    pub(super) async fn on_pod_sandbox_status(
        &self,
        request: cri::PodSandboxStatusRequest,
    ) -> Result<cri::PodSandboxStatusResponse, Status> {
        // Taken before the state: an event that is not yet in the state has a later time.
        let timestamp = self.node.services().events.moment();
        let view = self.node.pod(required("pod_sandbox_id", &request.pod_sandbox_id)?).map_err(status)?;
        let mut info = HashMap::new();
        if request.verbose {
            let console = self.node.console(&view.pod.id).await;
            info.insert("info".to_owned(), report::pod_info(&view, &console).to_string());
            info.insert("accounts".to_owned(), self.accounts(&view.pod.id).await.to_string());
        }
        Ok(cri::PodSandboxStatusResponse {
            status: Some(report::pod_status(&view.pod)),
            info,
            containers_statuses: report::container_statuses(&view),
            timestamp,
        })
    }

    pub(super) async fn on_update_pod_sandbox_resources(
        &self,
        request: cri::UpdatePodSandboxResourcesRequest,
    ) -> Result<cri::UpdatePodSandboxResourcesResponse, Status> {
        let id = required("pod_sandbox_id", &request.pod_sandbox_id)?;
        let change = pod_resources_change(&request).map_err(status)?;
        self.node.update_pod(id, change).await.map_err(status)?;
        Ok(cri::UpdatePodSandboxResourcesResponse {})
    }

    /// Returns what a pod uses and costs; empty if the guest does not respond in time.
    async fn accounts(&self, pod: &PodId) -> serde_json::Value {
        let (figures, account) =
            tokio::join!(self.accounting.query(pod, ACCOUNTS_LIMIT), self.accounting.measure_vm_cost(pod));
        stats::accounts(figures.ok().as_ref(), account)
    }

    pub(super) async fn on_list_pod_sandbox(
        &self,
        request: cri::ListPodSandboxRequest,
    ) -> Result<cri::ListPodSandboxResponse, Status> {
        let filter = request.filter.as_ref();
        let mut views = self.node.views();
        views.retain(|view| report::is_visible(&view.pod) && report::matches_pod_filter(&view.pod, filter));
        views.sort_by_key(|view| std::cmp::Reverse(view.pod.created_at));
        Ok(cri::ListPodSandboxResponse { items: views.iter().map(|view| report::pod(&view.pod)).collect() })
    }
}

/// Returns a field that must not be empty.
pub(super) fn required<'a>(field: &str, value: &'a str) -> Result<&'a str, Status> {
    match value {
        "" => Err(refuse(FailureKind::Invalid, &format!("{field} is missing"))),
        value => Ok(value),
    }
}
