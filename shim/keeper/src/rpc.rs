//! Implements the gRPC service (agent.proto): converts messages to operations and errors to status codes. Requests that make
//! sense only for containers are rejected.

use crate::error::KeeperError;
use crate::vm_manager::VmManager;
use nacelle_base::{Chain, Classify};
use nacelle_proto::agent::agent_server::Agent;
use nacelle_proto::agent::{
    AbandonExecRequest, AttachDeviceRequest, AttachImageRequest, ClockReading, CreateContainerRequest,
    DetachDeviceRequest, DetachImageRequest, DropVolumeRequest, ExecRequest, FollowClockRequest, HoldRequest,
    HoldResponse, ListContainersResponse, ReadVolumeRequest, ReadVolumeResponse, ReleaseRequest, RenewRequest,
    RestoreRequest, RestoreResponse, SetMemoryRequest, SetSocketsRequest, SignalRequest, StatsResponse, WaitRequest,
    WaitResponse, WriteVolumeRequest,
};
use nacelle_proto::common::{
    ContainerRef, ContainerUsage, CreateContainerResponse, Empty, ResizeRequest, SetMemoryResponse,
    SetProcessorsRequest, UpdateContainerRequest, Usage,
};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Notify;
use tonic::{Code, Request, Response, Status, Streaming};

/// The longest wait of one Wait request.
const MAX_WAIT: Duration = Duration::from_secs(60);
const SIGKILL: u32 = 9;

/// The service.
pub struct KeeperService {
    /// The state of the pod.
    pub manager: Arc<VmManager>,
    /// Notified when the process must end.
    pub shutdown: Arc<Notify>,
}

fn status(error: &KeeperError) -> Status {
    Status::new(Code::from_i32(error.kind().grpc_code()), Chain(error).to_string())
}

fn empty_response<T>(outcome: Result<T, KeeperError>) -> Result<Response<Empty>, Status> {
    outcome.map(|_| Response::new(Empty {})).map_err(|error| status(&error))
}

fn unsupported<T>(what: &'static str, hint: &'static str) -> Result<Response<T>, Status> {
    Err(status(&KeeperError::Unsupported { what, hint }))
}

#[tonic::async_trait]
impl Agent for KeeperService {
    // The VM's document names the files of images.
    async fn attach_image(&self, _: Request<AttachImageRequest>) -> Result<Response<Empty>, Status> {
        Ok(Response::new(Empty {}))
    }

    async fn detach_image(&self, _: Request<DetachImageRequest>) -> Result<Response<Empty>, Status> {
        Ok(Response::new(Empty {}))
    }

    async fn attach_device(&self, _: Request<AttachDeviceRequest>) -> Result<Response<Empty>, Status> {
        unsupported("attach a device", "devices are disks of the VM document")
    }

    async fn detach_device(&self, _: Request<DetachDeviceRequest>) -> Result<Response<Empty>, Status> {
        unsupported("detach a device", "devices are disks of the VM document")
    }

    async fn create_container(
        &self,
        request: Request<CreateContainerRequest>,
    ) -> Result<Response<CreateContainerResponse>, Status> {
        let request = request.into_inner();
        let created = self.manager.create(request.id, &request.oci_spec).await;
        created.map(|()| Response::new(CreateContainerResponse::default())).map_err(|error| status(&error))
    }

    async fn start_container(&self, request: Request<ContainerRef>) -> Result<Response<Empty>, Status> {
        let vm = self.manager.find_vm(&request.into_inner().id).map_err(|error| status(&error))?;
        // In a task, so that it completes even if the caller disconnects: a partial start is not a valid state.
        let started = tokio::spawn(async move { vm.start().await }).await;
        empty_response(started.map_err(|error| Status::internal(error.to_string()))?)
    }

    async fn signal(&self, request: Request<SignalRequest>) -> Result<Response<Empty>, Status> {
        let SignalRequest { id, exec_id, signal, .. } = request.into_inner();
        if !exec_id.is_empty() {
            return empty_response(self.manager.abandon(&id, exec_id));
        }
        let vm = self.manager.find_vm(&id);
        empty_response(vm.map(|vm| if signal == SIGKILL { vm.kill() } else { vm.stop() }))
    }

    async fn wait(&self, request: Request<WaitRequest>) -> Result<Response<WaitResponse>, Status> {
        let WaitRequest { id, exec_id, timeout_ms } = request.into_inner();
        let limit = Duration::from_millis(timeout_ms.into()).min(MAX_WAIT);
        let exit = if exec_id.is_empty() {
            let vm = self.manager.find_vm(&id).map_err(|error| status(&error))?;
            vm.wait_for_end(limit).await
        } else {
            let command = self.manager.find_command(&id, &exec_id).map_err(|error| status(&error))?;
            command.wait_for_end(limit).await.map(|done| done.1)
        };
        Ok(Response::new(WaitResponse { exit }))
    }

    async fn write_volume(&self, _: Request<Streaming<WriteVolumeRequest>>) -> Result<Response<Empty>, Status> {
        unsupported("use a copied-in volume", "volumes are disks of the VM document")
    }

    async fn read_volume(&self, _: Request<ReadVolumeRequest>) -> Result<Response<ReadVolumeResponse>, Status> {
        unsupported("use a copied-in volume", "volumes are disks of the VM document")
    }

    async fn drop_volume(&self, _: Request<DropVolumeRequest>) -> Result<Response<Empty>, Status> {
        Ok(Response::new(Empty {}))
    }

    async fn set_sockets(&self, _: Request<SetSocketsRequest>) -> Result<Response<Empty>, Status> {
        unsupported("use a socket volume", "volumes are disks of the VM document")
    }

    async fn remove_container(&self, request: Request<ContainerRef>) -> Result<Response<Empty>, Status> {
        empty_response(self.manager.remove(&request.into_inner().id).await)
    }

    async fn exec(&self, request: Request<ExecRequest>) -> Result<Response<Empty>, Status> {
        let ExecRequest { id, exec_id, args, tty, stdin, .. } = request.into_inner();
        if tty || stdin {
            let hint = "the guest agent runs a command without a terminal and without input; attach has the console";
            return unsupported("give a command a terminal or input", hint);
        }
        empty_response(self.manager.start_command(&id, exec_id, args))
    }

    async fn start_guest_shell(&self, _: Request<ExecRequest>) -> Result<Response<Empty>, Status> {
        unsupported("run a shell in its guest", "the guest has its own console: use nacelle vm console, or exec")
    }

    // A command of a machine pod is killed when its client disconnects.
    async fn abandon_exec(&self, request: Request<AbandonExecRequest>) -> Result<Response<Empty>, Status> {
        let AbandonExecRequest { id, exec_id } = request.into_inner();
        if self.manager.find_vm(&id).is_err() {
            // Everything of a VM that was removed has ended.
            return Ok(Response::new(Empty {}));
        }
        empty_response(self.manager.abandon(&id, exec_id))
    }

    async fn update_container(&self, request: Request<UpdateContainerRequest>) -> Result<Response<Empty>, Status> {
        let UpdateContainerRequest { id, limits, oom_score_adj, processors } = request.into_inner();
        if !limits.is_empty() || oom_score_adj.is_some() {
            return unsupported("change its limits", "the VM has the resources of its pod");
        }
        let vm = self.manager.find_vm(&id).map_err(|error| status(&error))?;
        empty_response(vm.pinning.set(processors, || vm.qemu().ok()).await)
    }

    async fn set_processors(&self, _: Request<SetProcessorsRequest>) -> Result<Response<Empty>, Status> {
        unsupported("change its vCPUs", "the VM has the resources of its pod")
    }

    async fn set_memory(&self, _: Request<SetMemoryRequest>) -> Result<Response<SetMemoryResponse>, Status> {
        unsupported("change its memory", "the VM has the resources of its pod")
    }

    // A serial console has no size.
    async fn resize(&self, request: Request<ResizeRequest>) -> Result<Response<Empty>, Status> {
        empty_response(self.manager.find_vm(&request.into_inner().id))
    }

    async fn list_containers(&self, _: Request<Empty>) -> Result<Response<ListContainersResponse>, Status> {
        Ok(Response::new(ListContainersResponse { containers: self.manager.list() }))
    }

    async fn stats(&self, _: Request<Empty>) -> Result<Response<StatsResponse>, Status> {
        let Some(vm) = self.manager.newest() else { return Ok(Response::new(StatsResponse::default())) };
        // A VM that does not run uses nothing.
        let (cpu_nanos, memory_bytes) = vm.resource_usage().await.unwrap_or_default();
        let usage = Usage {
            cpu_nanos,
            memory_bytes,
            memory_limit_bytes: Some(vm.document.memory_mib << 20),
            processes: 1,
            ..Usage::default()
        };
        let container = ContainerUsage { id: vm.id.clone(), usage: Some(usage), layer: None, details: None };
        Ok(Response::new(StatsResponse { pod: Some(usage), containers: vec![container], ..StatsResponse::default() }))
    }

    async fn renew(&self, _: Request<RenewRequest>) -> Result<Response<Empty>, Status> {
        unsupported("be renewed", "it is not restored from a snapshot")
    }

    async fn sync(&self, _: Request<Empty>) -> Result<Response<Empty>, Status> {
        unsupported("write its dirty pages", "its system does that")
    }

    async fn hold(&self, _: Request<HoldRequest>) -> Result<Response<HoldResponse>, Status> {
        unsupported("be held", "nacelle vm snapshot saves it")
    }

    async fn release(&self, _: Request<ReleaseRequest>) -> Result<Response<Empty>, Status> {
        unsupported("be released", "it is never held")
    }

    async fn restore(&self, _: Request<RestoreRequest>) -> Result<Response<RestoreResponse>, Status> {
        unsupported("be restored", "nacelle vm snapshot restores it")
    }

    async fn follow_clock(&self, _: Request<FollowClockRequest>) -> Result<Response<ClockReading>, Status> {
        unsupported("follow the node's clock", "its system sets its own clock")
    }

    async fn shutdown(&self, _: Request<Empty>) -> Result<Response<Empty>, Status> {
        self.shutdown.notify_one();
        Ok(Response::new(Empty {}))
    }
}
