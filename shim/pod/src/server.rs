//! Serves pod.proto on the pod process's socket: converts each request into one message to the actor, and each reply of the
//! actor into one response.

use crate::actor::{ActorHandles, ActorMessage, ActorRequest, ContainerHandle, Reply};
use crate::error::PodError;
use crate::exec::ExecProcess;
use crate::guest_values::{Bounded, StatisticsBounds};
use crate::memory::{self, MemoryResizer, RunningVm};
use crate::record::SavedPodState;
use crate::spec::PodSpec;
use nacelle_proto::{common, pod as proto};
use proto::pod_server::Pod;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot, watch};
use tokio_stream::wrappers::{ReceiverStream, WatchStream};
use tokio_stream::{Stream, StreamExt};
use tonic::{Request, Response, Status};

/// The gRPC service.
pub struct PodService {
    inbox: mpsc::UnboundedSender<ActorMessage>,
    published: watch::Receiver<SavedPodState>,
    spec: Arc<PodSpec>,
    memory: MemoryResizer,
}

impl PodService {
    /// Creates the service in front of this actor, for the pod of this specification.
    pub fn new(handles: ActorHandles, spec: Arc<PodSpec>) -> Self {
        Self { inbox: handles.inbox, published: handles.published, memory: MemoryResizer::new(&spec), spec }
    }

    async fn call<T>(&self, request: impl FnOnce(Reply<T>) -> ActorRequest) -> Result<Response<T>, Status> {
        let ending = || crate::codes::status(&PodError::Ending);
        let (reply, answer) = oneshot::channel();
        self.inbox.send(ActorMessage::Request(request(reply))).map_err(|_closed| ending())?;
        Ok(Response::new(answer.await.map_err(|_dropped| ending())??))
    }

    async fn call_for_guest_value<T>(
        &self,
        request: impl FnOnce(Reply<Bounded<T>>) -> ActorRequest,
    ) -> Result<Response<T>, Status> {
        self.call(request).await.map(|answer| answer.map(Bounded::into_inner))
    }

    async fn call_for_empty(
        &self,
        request: impl FnOnce(Reply<()>) -> ActorRequest,
    ) -> Result<Response<common::Empty>, Status> {
        self.call(request).await.map(|_| Response::new(common::Empty {}))
    }
}

/// The start and the end of a command.
type CommandEvents = ReceiverStream<Result<proto::ExecEvent, Status>>;

/// Reports the start and the end of a command.
fn report_command(started: Result<ExecProcess, PodError>) -> Result<Response<CommandEvents>, Status> {
    let process = started.map_err(|error| crate::codes::status(&error))?;
    let (events, receiver) = mpsc::channel(2);
    let began = proto::exec_event::Event::Started(process.exec_id().to_owned());
    // The channel has room, and its receiver is in this function.
    let _ = events.try_send(Ok(proto::ExecEvent { event: Some(began) }));
    tokio::spawn(process.forward_exit(events));
    Ok(Response::new(ReceiverStream::new(receiver)))
}

fn millis(count: u32) -> Duration {
    Duration::from_millis(count.into())
}

#[tonic::async_trait]
impl Pod for PodService {
    type WatchStream = Pin<Box<dyn Stream<Item = Result<proto::PodState, Status>> + Send>>;

    async fn hello(&self, _: Request<common::Empty>) -> Result<Response<proto::HelloResponse>, Status> {
        Ok(Response::new(crate::protocol::hello()))
    }

    async fn configure(
        &self,
        request: Request<proto::ConfigureRequest>,
    ) -> Result<Response<proto::ConfigureResponse>, Status> {
        self.call_for_guest_value(|reply| ActorRequest::Configure(request.into_inner(), reply)).await
    }

    async fn state(&self, _: Request<common::Empty>) -> Result<Response<proto::PodState>, Status> {
        Ok(Response::new((&*self.published.borrow()).into()))
    }

    async fn watch(&self, _: Request<common::Empty>) -> Result<Response<Self::WatchStream>, Status> {
        let states = WatchStream::new(self.published.clone()).map(|record| Ok((&record).into()));
        Ok(Response::new(Box::pin(states)))
    }

    async fn create_container(
        &self,
        request: Request<proto::CreateContainerRequest>,
    ) -> Result<Response<common::CreateContainerResponse>, Status> {
        let request = Box::new(request.into_inner());
        self.call_for_guest_value(|reply| ActorRequest::CreateContainer(request, reply)).await
    }

    async fn start_container(&self, request: Request<common::ContainerRef>) -> Result<Response<common::Empty>, Status> {
        self.call_for_empty(|reply| ActorRequest::StartContainer(request.into_inner().id, reply)).await
    }

    async fn stop_container(
        &self,
        request: Request<proto::StopContainerRequest>,
    ) -> Result<Response<common::Empty>, Status> {
        let request = request.into_inner();
        self.call_for_empty(|reply| ActorRequest::StopContainer(request.id, millis(request.timeout_ms), reply)).await
    }

    async fn remove_container(
        &self,
        request: Request<common::ContainerRef>,
    ) -> Result<Response<common::Empty>, Status> {
        self.call_for_empty(|reply| ActorRequest::RemoveContainer(request.into_inner().id, reply)).await
    }

    async fn exec_sync(
        &self,
        request: Request<proto::ExecSyncRequest>,
    ) -> Result<Response<proto::ExecSyncResponse>, Status> {
        self.call_for_guest_value(|reply| ActorRequest::ExecSync(request.into_inner(), reply)).await
    }

    type ExecStream = CommandEvents;

    async fn exec(&self, request: Request<proto::ExecRequest>) -> Result<Response<Self::ExecStream>, Status> {
        let request = request.into_inner();
        let ContainerHandle { agent, .. } =
            self.call(|reply| ActorRequest::GetContainer(request.id.clone(), reply)).await?.into_inner();
        report_command(ExecProcess::start_in_container(agent, request).await)
    }

    type StartGuestShellStream = CommandEvents;

    async fn start_guest_shell(
        &self,
        request: Request<proto::ExecRequest>,
    ) -> Result<Response<Self::StartGuestShellStream>, Status> {
        if !self.spec.engine.has_disks() {
            return Err(crate::codes::status(&PodError::NoContainerGuest { has_vm: self.spec.engine.has_vm() }));
        }
        let agent = self.call(ActorRequest::GetAgent).await?.into_inner();
        // The agent knows whether the container exists.
        report_command(ExecProcess::start_in_guest(agent, request.into_inner()).await)
    }

    async fn update_container(
        &self,
        request: Request<common::UpdateContainerRequest>,
    ) -> Result<Response<common::Empty>, Status> {
        let agent = self.call(ActorRequest::GetAgent).await?.into_inner();
        agent.update_container(request.into_inner()).await.map_err(|error| crate::codes::status(&error))?;
        Ok(Response::new(common::Empty {}))
    }

    async fn set_processors(
        &self,
        request: Request<common::SetProcessorsRequest>,
    ) -> Result<Response<common::Empty>, Status> {
        let count = request.into_inner().count;
        let maximum = self.spec.max_vcpus();
        if !(1..=maximum).contains(&count) {
            let rule = "1 to the number of vCPUs with which the VM was created are allowed";
            let wrong = PodError::Field { field: "count", value: format!("{count} of {maximum}"), rule };
            return Err(crate::codes::status(&wrong));
        }
        let agent = self.call(ActorRequest::GetAgent).await?.into_inner();
        agent.set_processors(count).await.map_err(|error| crate::codes::status(&error))?;
        Ok(Response::new(common::Empty {}))
    }

    async fn set_memory(
        &self,
        request: Request<proto::SetMemoryRequest>,
    ) -> Result<Response<common::SetMemoryResponse>, Status> {
        let requested = request.into_inner().bytes;
        memory::check_request(&self.spec, requested).map_err(|error| crate::codes::status(&error))?;
        let vm = self.call(ActorRequest::GetVm).await?.into_inner();
        let set = self.memory.set(vm, requested).await;
        let set = set.map_err(|error| crate::codes::status(&error))?;
        Ok(Response::new(set.into_inner()))
    }

    async fn resize(&self, request: Request<common::ResizeRequest>) -> Result<Response<common::Empty>, Status> {
        let request = request.into_inner();
        let agent = match request.exec_id.is_empty() {
            true => self.call(|reply| ActorRequest::GetContainer(request.id.clone(), reply)).await?.into_inner().agent,
            // A command may run in the guest when its container has exited. The agent knows it.
            false => self.call(ActorRequest::GetAgent).await?.into_inner(),
        };
        let resized = agent.resize(request).await;
        resized.map_err(|error| crate::codes::status(&error))?;
        Ok(Response::new(common::Empty {}))
    }

    async fn stats(&self, _: Request<common::Empty>) -> Result<Response<proto::StatsResponse>, Status> {
        let RunningVm { agent, memory, .. } = self.call(ActorRequest::GetVm).await?.into_inner();
        let answer = agent.stats().await.map_err(|error| crate::codes::status(&error))?;
        let network = self.spec.network.as_ref();
        // Without a guest the node is the only bound.
        let has_vm = self.spec.engine.has_vm();
        let bounds = StatisticsBounds {
            memory: if has_vm { u64::from(memory.total_mib()) << 20 } else { u64::MAX },
            disk: if self.spec.engine.has_disks() {
                self.spec.scratch.size_mib.saturating_mul(1 << 20)
            } else {
                u64::MAX
            },
            containers: self.published.borrow().containers.iter().map(|container| container.id.clone()).collect(),
            interface: network.and_then(|network| network.interfaces.first()).map(String::as_str),
        };
        Ok(Response::new(answer.bound(bounds).into_inner()))
    }

    async fn checkpoint(
        &self,
        request: Request<proto::CheckpointRequest>,
    ) -> Result<Response<proto::CheckpointResponse>, Status> {
        let memory = self.memory.clone();
        self.call_for_guest_value(|reply| ActorRequest::Checkpoint(request.into_inner(), memory, reply)).await
    }

    async fn stop(&self, request: Request<proto::StopRequest>) -> Result<Response<common::Empty>, Status> {
        let grace = millis(request.into_inner().timeout_ms);
        self.call_for_empty(|reply| ActorRequest::StopPod(grace, Some(reply))).await
    }
}
