//! Owns: the gRPC service: messages to verbs, errors to codes, and nothing else.

use nacelle_base::{Chain, Classify};
use nacelle_proto::agent::agent_server::Agent;
use nacelle_proto::agent::{
    AttachDeviceRequest, AttachImageRequest, BlockDevice, CreateContainerRequest, DetachDeviceRequest,
    DetachImageRequest, DropVolumeRequest, ExecRequest, ImageVolume, ListContainersResponse, MemoryRange,
    PushVolumeRequest, RenewRequest, SetMemoryRequest, SignalRequest, StatsResponse, WaitRequest, WaitResponse,
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

use crate::boot::apply;
use crate::container::devices::Device;
use crate::container::volumes::Volume;
use crate::container::{CreateOptions, ExecOptions, Pod, PodError};
use crate::memory::Memory;
use crate::processors::Processors;
use crate::pushed::{Draft, PushError, Volumes};
use crate::stats::Asked;

/// No request takes longer; a caller's own deadline may be nearer.
pub const DEADLINE: Duration = Duration::from_secs(120);
/// The longest that one Wait waits.
const LONGEST_WAIT: Duration = Duration::from_secs(60);

/// The service.
pub struct Service {
    /// What it is about.
    pub pod: Arc<Pod>,
    /// What it runs on.
    pub processors: Arc<Processors>,
    /// What it runs in.
    pub memory: Arc<Memory>,
    /// Told when the machine shall end.
    pub end: Arc<Notify>,
    /// The machine's life that it was told of last; empty: the first.
    pub generation: Mutex<Vec<u8>>,
}

fn status(error: &PodError) -> Status {
    Status::new(Code::from_i32(error.kind().grpc_code()), Chain(error).to_string())
}

fn volume(volume: ImageVolume) -> Volume {
    Volume {
        partition: volume.partition,
        sub_path: volume.sub_path,
        container_path: volume.container_path.into(),
        noexec: volume.noexec,
    }
}

fn device(device: BlockDevice) -> Device {
    Device {
        partition: device.partition,
        path: device.container_path.into(),
        access: device.access,
        mode: device.mode,
        owner: (device.uid, device.gid),
    }
}

fn cut(number: u32) -> u16 {
    u16::try_from(number).unwrap_or(u16::MAX)
}

/// Runs a verb to its end even if the caller goes away: half a verb is no state.
async fn whole<T: Send + 'static>(
    verb: impl Future<Output = Result<T, PodError>> + Send + 'static,
) -> Result<T, Status> {
    let done = tokio::spawn(verb).await.map_err(PodError::from);
    done.and_then(|result| result).map_err(|error| status(&error))
}

/// Writes a volume as it comes, and shows it when it is whole.
async fn take(volumes: Volumes, mut parts: Streaming<PushVolumeRequest>) -> Result<(), PodError> {
    let mut draft: Option<Draft> = None;
    loop {
        // If the host has gone, or was refused, there is no next part.
        let part = parts.message().await.unwrap_or_else(|status| {
            tracing::info!("a volume is not pushed to its end: {status}");
            None
        });
        let Some(PushVolumeRequest { name, tree, whole }) = part else {
            // Dropped where it may block.
            tokio::task::spawn_blocking(move || drop(draft)).await?;
            return Err(PushError::Short { name: String::new() }.into());
        };
        let (volumes, begun) = (volumes.clone(), draft.take());
        let write = move || -> Result<Option<Draft>, PushError> {
            let mut draft = begun.map_or_else(|| volumes.begin(&name), Ok)?;
            draft.add(tree.unwrap_or_default().entries)?;
            if whole { draft.show().map(|()| None) } else { Ok(Some(draft)) }
        };
        draft = tokio::task::spawn_blocking(write).await??;
        if draft.is_none() {
            return Ok(());
        }
    }
}

/// Runs a verb that blocks.
async fn blocking<E: Into<PodError> + Send + 'static>(
    verb: impl FnOnce() -> Result<(), E> + Send + 'static,
) -> Result<Response<Empty>, Status> {
    let done = tokio::task::spawn_blocking(verb).await.map_err(PodError::from);
    done.and_then(|result| result.map_err(Into::into)).map_err(|error| status(&error))?;
    Ok(Response::new(Empty {}))
}

#[tonic::async_trait]
impl Agent for Service {
    async fn attach_image(&self, request: Request<AttachImageRequest>) -> Result<Response<Empty>, Status> {
        let (request, pod) = (request.into_inner(), Arc::clone(&self.pod));
        blocking(move || match request.files {
            files if files.is_empty() => pod.disks.attach(request.partition, request.offset, request.length),
            files => pod.disks.attach_files(request.partition, files.into_iter().map(PathBuf::from).collect()),
        })
        .await
    }

    async fn detach_image(&self, request: Request<DetachImageRequest>) -> Result<Response<Empty>, Status> {
        let (request, pod) = (request.into_inner(), Arc::clone(&self.pod));
        blocking(move || pod.disks.detach(request.partition)).await
    }

    async fn attach_device(&self, request: Request<AttachDeviceRequest>) -> Result<Response<Empty>, Status> {
        let (request, pod) = (request.into_inner(), Arc::clone(&self.pod));
        let AttachDeviceRequest { partition, offset, length, writable } = request;
        blocking(move || pod.disks.attach_device(partition, offset, length, writable)).await
    }

    async fn detach_device(&self, request: Request<DetachDeviceRequest>) -> Result<Response<Empty>, Status> {
        let (request, pod) = (request.into_inner(), Arc::clone(&self.pod));
        blocking(move || pod.disks.detach_device(request.partition)).await
    }

    async fn create_container(
        &self,
        request: Request<CreateContainerRequest>,
    ) -> Result<Response<CreateContainerResponse>, Status> {
        let request = request.into_inner();
        let pid_mode = request.pid_mode();
        let options = CreateOptions {
            id: request.id,
            spec: request.oci_spec,
            partition: request.partition,
            user: request.user,
            merge_groups: request.merge_image_groups,
            stdin: request.stdin,
            pid_of: request.pid_of,
            pid_mode,
            volumes: request.volumes.into_iter().map(volume).collect(),
            devices: request.devices.into_iter().map(device).collect(),
            empty_dirs: request.empty_dirs,
        };
        whole(Arc::clone(&self.pod).create_container(options)).await.map(Response::new)
    }

    async fn start_container(&self, request: Request<ContainerRef>) -> Result<Response<Empty>, Status> {
        whole(Arc::clone(&self.pod).start_container(request.into_inner().id)).await?;
        Ok(Response::new(Empty {}))
    }

    async fn signal(&self, request: Request<SignalRequest>) -> Result<Response<Empty>, Status> {
        let (request, pod) = (request.into_inner(), Arc::clone(&self.pod));
        blocking(move || pod.send_signal(&request.id, &request.exec_id, request.signal, request.all)).await
    }

    async fn wait(&self, request: Request<WaitRequest>) -> Result<Response<WaitResponse>, Status> {
        let request = request.into_inner();
        let process = self.pod.find_process(&request.id, &request.exec_id).map_err(|error| status(&error))?;
        let limit = Duration::from_millis(request.timeout_ms.into()).min(LONGEST_WAIT);
        Ok(Response::new(WaitResponse { exit: process.wait(limit).await }))
    }

    async fn push_volume(&self, request: Request<Streaming<PushVolumeRequest>>) -> Result<Response<Empty>, Status> {
        whole(take(self.pod.volumes.clone(), request.into_inner())).await?;
        Ok(Response::new(Empty {}))
    }

    async fn drop_volume(&self, request: Request<DropVolumeRequest>) -> Result<Response<Empty>, Status> {
        let (name, volumes) = (request.into_inner().name, self.pod.volumes.clone());
        blocking(move || volumes.remove(&name)).await
    }

    async fn remove_container(&self, request: Request<ContainerRef>) -> Result<Response<Empty>, Status> {
        whole(Arc::clone(&self.pod).remove_container(request.into_inner().id)).await?;
        Ok(Response::new(Empty {}))
    }

    async fn exec(&self, request: Request<ExecRequest>) -> Result<Response<Empty>, Status> {
        let request = request.into_inner();
        let options = ExecOptions {
            id: request.id,
            exec_id: request.exec_id,
            args: request.args,
            tty: request.tty,
            stdin: request.stdin,
            size: (cut(request.columns), cut(request.rows)),
        };
        whole(Arc::clone(&self.pod).start_exec(options)).await?;
        Ok(Response::new(Empty {}))
    }

    async fn update_container(&self, request: Request<UpdateContainerRequest>) -> Result<Response<Empty>, Status> {
        whole(Arc::clone(&self.pod).update_container(request.into_inner())).await?;
        Ok(Response::new(Empty {}))
    }

    async fn set_processors(&self, request: Request<SetProcessorsRequest>) -> Result<Response<Empty>, Status> {
        let (count, processors) = (request.into_inner().count, Arc::clone(&self.processors));
        blocking(move || processors.set(count)).await
    }

    async fn set_memory(&self, request: Request<SetMemoryRequest>) -> Result<Response<SetMemoryResponse>, Status> {
        let (SetMemoryRequest { reserve, bytes }, memory) = (request.into_inner(), Arc::clone(&self.memory));
        let range = |range: &MemoryRange| range.address..range.address.saturating_add(range.bytes);
        let reserve: Vec<_> = reserve.iter().map(range).collect();
        let set = tokio::task::spawn_blocking(move || memory.set(&reserve, bytes)).await.map_err(PodError::from);
        let bytes = set.and_then(|set| set.map_err(Into::into)).map_err(|error| status(&error))?;
        Ok(Response::new(SetMemoryResponse { bytes }))
    }

    async fn resize(&self, request: Request<ResizeRequest>) -> Result<Response<Empty>, Status> {
        let (request, pod) = (request.into_inner(), Arc::clone(&self.pod));
        blocking(move || pod.resize_terminal(&request.id, &request.exec_id, request.columns, request.rows)).await
    }

    async fn list_containers(&self, _: Request<Empty>) -> Result<Response<ListContainersResponse>, Status> {
        Ok(Response::new(ListContainersResponse { containers: self.pod.list_containers() }))
    }

    async fn stats(&self, _: Request<Empty>) -> Result<Response<StatsResponse>, Status> {
        let asked = |id: String| {
            let process = self.pod.find_process(&id, "").ok().filter(|process| process.exit().is_none());
            Asked { pid: process.map(|process| process.pid), id }
        };
        let containers = self.pod.list_containers().into_iter().map(|container| asked(container.id)).collect();
        let read = crate::stats::of(&self.pod.layers, containers).await;
        let failed = |source| Status::internal(format!("cannot read what the containers use: {}", Chain(&source)));
        read.map(Response::new).map_err(failed)
    }

    async fn renew(&self, request: Request<RenewRequest>) -> Result<Response<Empty>, Status> {
        let request = request.into_inner();
        let mut generation = self.generation.lock().unwrap_or_else(PoisonError::into_inner);
        if *generation == request.generation {
            return Ok(Response::new(Empty {}));
        }
        // The clock last: what is slow before it would make it late.
        let renewed = apply::entropy(&request.entropy).and_then(|()| apply::clock(request.time_unix_nanos));
        renewed.map_err(|error| Status::internal(Chain(&error).to_string()))?;
        *generation = request.generation;
        tracing::info!("this machine was restored: clock and random pool are new");
        Ok(Response::new(Empty {}))
    }

    async fn shutdown(&self, _: Request<Empty>) -> Result<Response<Empty>, Status> {
        self.end.notify_one();
        Ok(Response::new(Empty {}))
    }
}
