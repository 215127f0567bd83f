//! Implements the gRPC service: converts requests to operations of `Pod` and errors to status codes, and nothing else.

use nacelle_base::{Chain, Classify};
use nacelle_proto::agent::agent_server::Agent;
use nacelle_proto::agent::{
    AbandonExecRequest, AttachDeviceRequest, AttachImageRequest, ClockReading, ContainerState, CreateContainerRequest,
    DetachDeviceRequest, DetachImageRequest, DropVolumeRequest, ExecRequest, FollowClockRequest, HoldRequest,
    HoldResponse, ListContainersResponse, MemoryRange, ReadVolumeRequest, ReadVolumeResponse, ReleaseRequest,
    RenewRequest, RestoreRequest, RestoreResponse, SetMemoryRequest, SetSocketsRequest, SignalRequest, StatsResponse,
    WaitRequest, WaitResponse, WriteVolumeRequest,
};
use nacelle_proto::common::{
    ContainerRef, CreateContainerResponse, Empty, ResizeRequest, SetMemoryResponse, SetProcessorsRequest,
    UpdateContainerRequest,
};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::Notify;
use tonic::{Code, Request, Response, Status, Streaming};

use crate::boot::{self, apply};
use crate::clock;
use crate::container::{AgentError, AgentPod, CreateOptions, ExecOptions, HoldError, HostIds};
use crate::copied_in::{CopiedInVolumeError, CopiedInVolumes, VolumeDraft};
use crate::memory::HotplugMemory;
use crate::processors::OnlineCpus;
use crate::stats::MeasuredContainer;

/// The length of `RenewRequest::generation` in bytes.
const GENERATION_BYTES: usize = 16;

/// The deadline of every request. A client may set a shorter one.
pub const DEADLINE: Duration = Duration::from_secs(120);
/// The longest time that one Wait request waits.
const MAX_WAIT: Duration = Duration::from_secs(60);

/// The agent's gRPC service.
pub struct AgentService {
    /// The pod.
    pub pod: Arc<AgentPod>,
    /// The VM's vCPUs.
    pub processors: Arc<OnlineCpus>,
    /// The VM's memory.
    pub memory: Arc<HotplugMemory>,
    /// Notified when the VM must power off.
    pub end: Arc<Notify>,
    /// The pod has a guest, whose clock is its own.
    pub has_guest: bool,
    /// The generation of the last Renew request; empty before the first one. A VM that is restored gets a new generation.
    pub generation: Mutex<Vec<u8>>,
}

fn to_status(error: &AgentError) -> Status {
    Status::new(Code::from_i32(error.kind().grpc_code()), Chain(error).to_string())
}

fn saturate(number: u32) -> u16 {
    u16::try_from(number).unwrap_or(u16::MAX)
}

fn exec_options(request: ExecRequest, ids: &HostIds) -> ExecOptions {
    ExecOptions {
        id: ids.in_guest(request.id),
        exec_id: request.exec_id,
        args: request.args,
        tty: request.tty,
        stdin: request.stdin,
        size: (saturate(request.columns), saturate(request.rows)),
    }
}

impl AgentService {
    /// Runs an operation that changes the pod to its end even if the client disconnects, so that none stops halfway. While the pod is held, it
    /// waits, and does not begin if the client disconnects.
    async fn run_change<T: Send + 'static>(
        &self,
        operation: impl Future<Output = Result<T, AgentError>> + Send + 'static,
    ) -> Result<T, Status> {
        let guard = self.pod.begin_operation().await;
        let done = tokio::spawn(async move {
            let result = operation.await;
            drop(guard);
            result
        });
        done.await.map_err(AgentError::from).and_then(|result| result).map_err(|error| to_status(&error))
    }

    /// Runs an operation that changes the pod and blocks, as `run_change` does.
    async fn run_blocking_change<T: Send + 'static, E: Into<AgentError> + Send + 'static>(
        &self,
        operation: impl FnOnce() -> Result<T, E> + Send + 'static,
    ) -> Result<T, Status> {
        self.run_change(async move { tokio::task::spawn_blocking(operation).await?.map_err(Into::into) }).await
    }
}

/// Writes a copied-in volume as it arrives, and swaps it in when it is complete.
async fn receive_volume(volumes: CopiedInVolumes, mut parts: Streaming<WriteVolumeRequest>) -> Result<(), AgentError> {
    let mut draft: Option<VolumeDraft> = None;
    loop {
        // If the host has disconnected or the stream failed, there is no next part.
        let part = parts.message().await.unwrap_or_else(|status| {
            tracing::info!("a copied-in volume is incomplete: {status}");
            None
        });
        let Some(WriteVolumeRequest { name, tree, complete }) = part else {
            // Dropped on a thread where it may block.
            tokio::task::spawn_blocking(move || drop(draft)).await?;
            return Err(CopiedInVolumeError::Short { name: String::new() }.into());
        };
        let (volumes, begun) = (volumes.clone(), draft.take());
        let write = move || -> Result<Option<VolumeDraft>, CopiedInVolumeError> {
            let mut draft = begun.map_or_else(|| volumes.begin(&name), Ok)?;
            draft.add(tree.unwrap_or_default().entries)?;
            if complete { draft.publish().map(|()| None) } else { Ok(Some(draft)) }
        };
        draft = tokio::task::spawn_blocking(write).await??;
        if draft.is_none() {
            return Ok(());
        }
    }
}

/// Runs an operation that blocks and that a hold does not delay, on a thread for such.
async fn run_blocking<E: Into<AgentError> + Send + 'static>(
    operation: impl FnOnce() -> Result<(), E> + Send + 'static,
) -> Result<Response<Empty>, Status> {
    let done = tokio::task::spawn_blocking(operation).await.map_err(AgentError::from);
    done.and_then(|result| result.map_err(Into::into)).map_err(|error| to_status(&error))?;
    Ok(Response::new(Empty {}))
}

#[tonic::async_trait]
impl Agent for AgentService {
    async fn attach_image(&self, request: Request<AttachImageRequest>) -> Result<Response<Empty>, Status> {
        let (request, pod) = (request.into_inner(), Arc::clone(&self.pod));
        self.run_blocking_change(move || match request.files {
            files if files.is_empty() => pod.disks.attach_image(request.partition, request.offset, request.length),
            files => pod.disks.attach_files(request.partition, files.into_iter().map(PathBuf::from).collect()),
        })
        .await?;
        Ok(Response::new(Empty {}))
    }

    async fn detach_image(&self, request: Request<DetachImageRequest>) -> Result<Response<Empty>, Status> {
        let (request, pod) = (request.into_inner(), Arc::clone(&self.pod));
        self.run_blocking_change(move || pod.disks.detach_image(request.partition)).await?;
        Ok(Response::new(Empty {}))
    }

    async fn attach_device(&self, request: Request<AttachDeviceRequest>) -> Result<Response<Empty>, Status> {
        let (request, pod) = (request.into_inner(), Arc::clone(&self.pod));
        let AttachDeviceRequest { partition, offset, length, writable } = request;
        self.run_blocking_change(move || pod.disks.attach_device(partition, offset, length, writable)).await?;
        Ok(Response::new(Empty {}))
    }

    async fn detach_device(&self, request: Request<DetachDeviceRequest>) -> Result<Response<Empty>, Status> {
        let (request, pod) = (request.into_inner(), Arc::clone(&self.pod));
        self.run_blocking_change(move || pod.disks.detach_device(request.partition)).await?;
        Ok(Response::new(Empty {}))
    }

    async fn create_container(
        &self,
        request: Request<CreateContainerRequest>,
    ) -> Result<Response<CreateContainerResponse>, Status> {
        let request = request.into_inner();
        let pid_mode = request.pid_mode();
        let options = CreateOptions {
            id: self.pod.ids.in_guest(request.id),
            spec: request.oci_spec,
            partition: request.partition,
            user: request.user,
            merge_groups: request.merge_image_groups,
            stdin: request.stdin,
            pid_of: self.pod.ids.in_guest(request.pid_of),
            pid_mode,
            volumes: request.volumes,
            anonymous_volumes: request.anonymous_volumes,
            devices: request.devices,
            empty_dirs: request.empty_dirs,
        };
        self.run_change(Arc::clone(&self.pod).create_container(options)).await.map(Response::new)
    }

    async fn start_container(&self, request: Request<ContainerRef>) -> Result<Response<Empty>, Status> {
        let id = self.pod.ids.in_guest(request.into_inner().id);
        self.run_change(Arc::clone(&self.pod).start_container(id)).await?;
        Ok(Response::new(Empty {}))
    }

    async fn signal(&self, request: Request<SignalRequest>) -> Result<Response<Empty>, Status> {
        let (SignalRequest { id, exec_id, signal, all }, pod) = (request.into_inner(), Arc::clone(&self.pod));
        run_blocking(move || pod.send_signal(&pod.ids.in_guest(id), &exec_id, signal, all)).await
    }

    async fn wait(&self, request: Request<WaitRequest>) -> Result<Response<WaitResponse>, Status> {
        let request = request.into_inner();
        let id = self.pod.ids.in_guest(request.id);
        let process = self.pod.find_process(&id, &request.exec_id).map_err(|error| to_status(&error))?;
        let limit = Duration::from_millis(request.timeout_ms.into()).min(MAX_WAIT);
        Ok(Response::new(WaitResponse { exit: process.wait(limit).await }))
    }

    async fn write_volume(&self, request: Request<Streaming<WriteVolumeRequest>>) -> Result<Response<Empty>, Status> {
        self.run_change(receive_volume(self.pod.volumes.clone(), request.into_inner())).await?;
        Ok(Response::new(Empty {}))
    }

    async fn read_volume(&self, request: Request<ReadVolumeRequest>) -> Result<Response<ReadVolumeResponse>, Status> {
        let (name, volumes) = (request.into_inner().name, self.pod.volumes.clone());
        let read = tokio::task::spawn_blocking(move || volumes.read_end(&name)).await.map_err(AgentError::from);
        let end = read.and_then(|read| read.map_err(Into::into)).map_err(|error| to_status(&error))?;
        Ok(Response::new(ReadVolumeResponse { end }))
    }

    async fn drop_volume(&self, request: Request<DropVolumeRequest>) -> Result<Response<Empty>, Status> {
        let (name, volumes) = (request.into_inner().name, self.pod.volumes.clone());
        self.run_blocking_change(move || volumes.remove(&name)).await?;
        Ok(Response::new(Empty {}))
    }

    async fn set_sockets(&self, request: Request<SetSocketsRequest>) -> Result<Response<Empty>, Status> {
        let (SetSocketsRequest { name, token, tree }, pod) = (request.into_inner(), Arc::clone(&self.pod));
        self.run_blocking_change(move || pod.sockets.set(&name, &token, &tree.unwrap_or_default().entries)).await?;
        Ok(Response::new(Empty {}))
    }

    async fn remove_container(&self, request: Request<ContainerRef>) -> Result<Response<Empty>, Status> {
        let id = self.pod.ids.in_guest(request.into_inner().id);
        self.run_change(Arc::clone(&self.pod).remove_container(id)).await?;
        Ok(Response::new(Empty {}))
    }

    async fn exec(&self, request: Request<ExecRequest>) -> Result<Response<Empty>, Status> {
        self.run_change(Arc::clone(&self.pod).start_exec(exec_options(request.into_inner(), &self.pod.ids))).await?;
        Ok(Response::new(Empty {}))
    }

    async fn start_guest_shell(&self, request: Request<ExecRequest>) -> Result<Response<Empty>, Status> {
        if !self.has_guest {
            return Err(to_status(&AgentError::NoGuest));
        }
        self.run_change(Arc::clone(&self.pod).start_guest_shell(exec_options(request.into_inner(), &self.pod.ids)))
            .await?;
        Ok(Response::new(Empty {}))
    }

    async fn abandon_exec(&self, request: Request<AbandonExecRequest>) -> Result<Response<Empty>, Status> {
        let (AbandonExecRequest { id, exec_id }, pod) = (request.into_inner(), Arc::clone(&self.pod));
        self.run_blocking_change(move || pod.abandon_exec(&pod.ids.in_guest(id), &exec_id)).await?;
        Ok(Response::new(Empty {}))
    }

    async fn update_container(&self, request: Request<UpdateContainerRequest>) -> Result<Response<Empty>, Status> {
        let UpdateContainerRequest { id, .. } = request.get_ref();
        let request = UpdateContainerRequest { id: self.pod.ids.in_guest(id.clone()), ..request.into_inner() };
        self.run_change(Arc::clone(&self.pod).update_container(request)).await?;
        Ok(Response::new(Empty {}))
    }

    async fn set_processors(&self, request: Request<SetProcessorsRequest>) -> Result<Response<Empty>, Status> {
        let (count, processors) = (request.into_inner().count, Arc::clone(&self.processors));
        self.run_blocking_change(move || processors.set_online_count(count)).await?;
        Ok(Response::new(Empty {}))
    }

    async fn set_memory(&self, request: Request<SetMemoryRequest>) -> Result<Response<SetMemoryResponse>, Status> {
        let (SetMemoryRequest { reserve, bytes }, memory) = (request.into_inner(), Arc::clone(&self.memory));
        let range = |range: &MemoryRange| range.address..range.address.saturating_add(range.bytes);
        let reserve: Vec<_> = reserve.iter().map(range).collect();
        let bytes = self.run_blocking_change(move || memory.set_online_bytes(&reserve, bytes)).await?;
        Ok(Response::new(SetMemoryResponse { bytes }))
    }

    async fn resize(&self, request: Request<ResizeRequest>) -> Result<Response<Empty>, Status> {
        let (ResizeRequest { id, exec_id, columns, rows }, pod) = (request.into_inner(), Arc::clone(&self.pod));
        run_blocking(move || pod.resize_terminal(&pod.ids.in_guest(id), &exec_id, columns, rows)).await
    }

    async fn list_containers(&self, _: Request<Empty>) -> Result<Response<ListContainersResponse>, Status> {
        let ids = &self.pod.ids;
        let on_host = |container: ContainerState| ContainerState { id: ids.on_host(container.id), ..container };
        let containers = self.pod.list_containers().into_iter().map(on_host).collect();
        Ok(Response::new(ListContainersResponse { containers }))
    }

    async fn stats(&self, _: Request<Empty>) -> Result<Response<StatsResponse>, Status> {
        let asked = |id: String| {
            let process = self.pod.find_process(&id, "").ok().filter(|process| process.exit().is_none());
            MeasuredContainer { pid: process.map(|process| process.pid), id }
        };
        let containers = self.pod.list_containers().into_iter().map(|container| asked(container.id)).collect();
        let read = crate::stats::read_usage(&self.pod.layers, containers).await;
        let failed = |source| Status::internal(format!("cannot read what the containers use: {}", Chain(&source)));
        let mut usage = read.map_err(failed)?;
        for container in &mut usage.containers {
            container.id = self.pod.ids.on_host(std::mem::take(&mut container.id));
        }
        Ok(Response::new(usage))
    }

    async fn renew(&self, request: Request<RenewRequest>) -> Result<Response<Empty>, Status> {
        let request = request.into_inner();
        if request.generation.len() != GENERATION_BYTES {
            let length = request.generation.len();
            return Err(Status::invalid_argument(format!(
                "a generation has {GENERATION_BYTES} bytes and not {length}"
            )));
        }
        let mut generation = self.generation.lock().unwrap_or_else(PoisonError::into_inner);
        if *generation == request.generation {
            return Ok(Response::new(Empty {}));
        }
        let renewed = apply::add_entropy(&request.entropy).and_then(|()| apply::set_clock(request.time_unix_nanos));
        renewed.map_err(|error| Status::internal(Chain(&error).to_string()))?;
        *generation = request.generation;
        self.pod.end_lease();
        tracing::info!("the VM was restored: the clock and the random pool are set again");
        Ok(Response::new(Empty {}))
    }

    async fn sync(&self, _: Request<Empty>) -> Result<Response<Empty>, Status> {
        if !self.has_guest {
            return Err(to_status(&AgentError::from(Arc::new(HoldError::NoScratchDisk))));
        }
        let pod = Arc::clone(&self.pod);
        run_blocking(move || pod.disks.sync_scratch()).await
    }

    async fn hold(&self, request: Request<HoldRequest>) -> Result<Response<HoldResponse>, Status> {
        let HoldRequest { token, lease_ms } = request.into_inner();
        if !self.has_guest {
            return Err(to_status(&AgentError::from(Arc::new(HoldError::NoGuest))));
        }
        let held = Arc::clone(&self.pod).hold(&token, Duration::from_millis(lease_ms.into())).await;
        held.map(Response::new).map_err(|error| to_status(&error))
    }

    async fn release(&self, request: Request<ReleaseRequest>) -> Result<Response<Empty>, Status> {
        self.pod.release(&request.into_inner().token).await.map_err(|error| to_status(&error))?;
        Ok(Response::new(Empty {}))
    }

    async fn restore(&self, request: Request<RestoreRequest>) -> Result<Response<RestoreResponse>, Status> {
        // Not delayed by the hold, which it ends. It runs to its end even if the client disconnects.
        let done = tokio::spawn(Arc::clone(&self.pod).restore(request.into_inner())).await.map_err(AgentError::from);
        done.and_then(|result| result).map_err(|error| to_status(&error))?;
        let (agent_version, kernel_release) = boot::versions();
        Ok(Response::new(RestoreResponse { agent_version, kernel_release }))
    }

    async fn follow_clock(&self, request: Request<FollowClockRequest>) -> Result<Response<ClockReading>, Status> {
        let followed = clock::follow(request.into_inner().reference, self.has_guest);
        let refused =
            |error: clock::ClockError| Status::new(Code::from_i32(error.kind().grpc_code()), Chain(&error).to_string());
        followed.map(Response::new).map_err(refused)
    }

    async fn shutdown(&self, _: Request<Empty>) -> Result<Response<Empty>, Status> {
        self.end.notify_one();
        Ok(Response::new(Empty {}))
    }
}
