//! Implements the two services of CRI by dispatching each RPC to a function of the modules below, one per group of RPCs. RPCs
//! that are not implemented yet are rejected by name. It uses the lifecycle and the image store, and holds no state of its own.

mod checkpoint;
mod container;
pub mod convert;
mod events;
mod image;
mod list_stream;
mod machine;
mod request_log;
mod runtime;
mod sandbox;
mod stats;
pub mod status;
mod streaming;

use crate::accounting::Accounting;
use crate::apparmor::Apparmor;
use crate::deadline::CallerLimit;
use crate::lifecycle::Node;
use list_stream::ListStream;
use nacelle_proto::cri;
use request_log::ChangingRequest;
use status::not_yet;
use tonic::{Request, Response, Status};

/// Both services of CRI on one node.
#[derive(Clone)]
pub struct Cri {
    accounting: Accounting,
    node: Node,
    streams: nacelle_stream::StreamingServer,
    /// The node's kernel enforces SELinux labels.
    selinux: bool,
    apparmor: Apparmor,
}

impl Cri {
    /// Creates the services for this node; `streams` serves the streams of exec, attach and port-forward.
    pub fn new(node: Node, streams: nacelle_stream::StreamingServer) -> Cri {
        let accounting = Accounting::new(node.clone());
        Cri { accounting, node, streams, selinux: convert::node_has_selinux(), apparmor: Apparmor::default() }
    }
}

impl Cri {
    /// Answers a request that changes something by `answer`, and logs it.
    async fn logged<R: ChangingRequest>(
        &self,
        request: Request<R>,
        answer: impl AsyncFnOnce(R) -> Result<R::Reply, Status>,
    ) -> Answer<R::Reply> {
        request_log::logged(&self.node, request.into_inner(), answer).await.map(Response::new)
    }
}

type Answer<T> = Result<Response<T>, Status>;

#[tonic::async_trait]
impl cri::runtime_service_server::RuntimeService for Cri {
    type StreamPodSandboxesStream = ListStream<cri::StreamPodSandboxesResponse>;
    type StreamContainersStream = ListStream<cri::StreamContainersResponse>;
    type StreamContainerStatsStream = ListStream<cri::StreamContainerStatsResponse>;
    type StreamPodSandboxStatsStream = ListStream<cri::StreamPodSandboxStatsResponse>;
    type GetContainerEventsStream = events::Events;
    type StreamPodSandboxMetricsStream = ListStream<cri::StreamPodSandboxMetricsResponse>;

    async fn version(&self, request: Request<cri::VersionRequest>) -> Answer<cri::VersionResponse> {
        self.on_version(request.into_inner()).await.map(Response::new)
    }

    async fn run_pod_sandbox(&self, request: Request<cri::RunPodSandboxRequest>) -> Answer<cri::RunPodSandboxResponse> {
        self.logged(request, async |request| self.on_run_pod_sandbox(request).await).await
    }

    async fn stop_pod_sandbox(
        &self,
        request: Request<cri::StopPodSandboxRequest>,
    ) -> Answer<cri::StopPodSandboxResponse> {
        self.logged(request, async |request| self.on_stop_pod_sandbox(request).await).await
    }

    async fn remove_pod_sandbox(
        &self,
        request: Request<cri::RemovePodSandboxRequest>,
    ) -> Answer<cri::RemovePodSandboxResponse> {
        self.logged(request, async |request| self.on_remove_pod_sandbox(request).await).await
    }

    async fn pod_sandbox_status(
        &self,
        request: Request<cri::PodSandboxStatusRequest>,
    ) -> Answer<cri::PodSandboxStatusResponse> {
        self.on_pod_sandbox_status(request.into_inner()).await.map(Response::new)
    }

    async fn list_pod_sandbox(
        &self,
        request: Request<cri::ListPodSandboxRequest>,
    ) -> Answer<cri::ListPodSandboxResponse> {
        self.on_list_pod_sandbox(request.into_inner()).await.map(Response::new)
    }

    async fn stream_pod_sandboxes(
        &self,
        request: Request<cri::StreamPodSandboxesRequest>,
    ) -> Answer<Self::StreamPodSandboxesStream> {
        self.on_stream_pod_sandboxes(request.into_inner()).await
    }

    async fn create_container(
        &self,
        request: Request<cri::CreateContainerRequest>,
    ) -> Answer<cri::CreateContainerResponse> {
        self.logged(request, async |request| self.on_create_container(request).await).await
    }

    async fn start_container(
        &self,
        request: Request<cri::StartContainerRequest>,
    ) -> Answer<cri::StartContainerResponse> {
        self.logged(request, async |request| self.on_start_container(request).await).await
    }

    async fn stop_container(&self, request: Request<cri::StopContainerRequest>) -> Answer<cri::StopContainerResponse> {
        self.logged(request, async |request| self.on_stop_container(request).await).await
    }

    async fn remove_container(
        &self,
        request: Request<cri::RemoveContainerRequest>,
    ) -> Answer<cri::RemoveContainerResponse> {
        self.logged(request, async |request| self.on_remove_container(request).await).await
    }

    async fn list_containers(
        &self,
        request: Request<cri::ListContainersRequest>,
    ) -> Answer<cri::ListContainersResponse> {
        self.on_list_containers(request.into_inner()).await.map(Response::new)
    }

    async fn stream_containers(
        &self,
        request: Request<cri::StreamContainersRequest>,
    ) -> Answer<Self::StreamContainersStream> {
        self.on_stream_containers(request.into_inner()).await
    }

    async fn container_status(
        &self,
        request: Request<cri::ContainerStatusRequest>,
    ) -> Answer<cri::ContainerStatusResponse> {
        self.on_container_status(request.into_inner()).await.map(Response::new)
    }

    async fn update_container_resources(
        &self,
        request: Request<cri::UpdateContainerResourcesRequest>,
    ) -> Answer<cri::UpdateContainerResourcesResponse> {
        self.logged(request, async |request| self.on_update_container_resources(request).await).await
    }

    async fn reopen_container_log(
        &self,
        request: Request<cri::ReopenContainerLogRequest>,
    ) -> Answer<cri::ReopenContainerLogResponse> {
        self.logged(request, async |request| self.on_reopen_container_log(request).await).await
    }

    async fn exec_sync(&self, request: Request<cri::ExecSyncRequest>) -> Answer<cri::ExecSyncResponse> {
        self.logged(request, async |request| self.on_exec_sync(request).await).await
    }

    async fn exec(&self, request: Request<cri::ExecRequest>) -> Answer<cri::ExecResponse> {
        self.logged(request, async |request| self.on_exec(request).await).await
    }

    async fn attach(&self, request: Request<cri::AttachRequest>) -> Answer<cri::AttachResponse> {
        self.logged(request, async |request| self.on_attach(request).await).await
    }

    async fn port_forward(&self, request: Request<cri::PortForwardRequest>) -> Answer<cri::PortForwardResponse> {
        self.logged(request, async |request| self.on_port_forward(request).await).await
    }

    async fn container_stats(
        &self,
        request: Request<cri::ContainerStatsRequest>,
    ) -> Answer<cri::ContainerStatsResponse> {
        self.on_container_stats(request.into_inner()).await.map(Response::new)
    }

    async fn list_container_stats(
        &self,
        request: Request<cri::ListContainerStatsRequest>,
    ) -> Answer<cri::ListContainerStatsResponse> {
        self.on_list_container_stats(request.into_inner()).await.map(Response::new)
    }

    async fn stream_container_stats(
        &self,
        request: Request<cri::StreamContainerStatsRequest>,
    ) -> Answer<Self::StreamContainerStatsStream> {
        self.on_stream_container_stats(request.into_inner()).await
    }

    async fn pod_sandbox_stats(
        &self,
        request: Request<cri::PodSandboxStatsRequest>,
    ) -> Answer<cri::PodSandboxStatsResponse> {
        self.on_pod_sandbox_stats(request.into_inner()).await.map(Response::new)
    }

    async fn list_pod_sandbox_stats(
        &self,
        request: Request<cri::ListPodSandboxStatsRequest>,
    ) -> Answer<cri::ListPodSandboxStatsResponse> {
        self.on_list_pod_sandbox_stats(request.into_inner()).await.map(Response::new)
    }

    async fn stream_pod_sandbox_stats(
        &self,
        request: Request<cri::StreamPodSandboxStatsRequest>,
    ) -> Answer<Self::StreamPodSandboxStatsStream> {
        self.on_stream_pod_sandbox_stats(request.into_inner()).await
    }

    async fn update_runtime_config(
        &self,
        request: Request<cri::UpdateRuntimeConfigRequest>,
    ) -> Answer<cri::UpdateRuntimeConfigResponse> {
        self.logged(request, async |request| self.on_update_runtime_config(request).await).await
    }

    async fn status(&self, request: Request<cri::StatusRequest>) -> Answer<cri::StatusResponse> {
        self.on_status(request.into_inner()).await.map(Response::new)
    }

    async fn checkpoint_container(
        &self,
        _: Request<cri::CheckpointContainerRequest>,
    ) -> Answer<cri::CheckpointContainerResponse> {
        Err(not_yet("CheckpointContainer"))
    }

    async fn checkpoint_pod(&self, request: Request<cri::CheckpointPodRequest>) -> Answer<cri::CheckpointPodResponse> {
        let limit = request.extensions().get::<CallerLimit>().copied();
        self.logged(request, async |request| self.on_checkpoint_pod(request, limit).await).await
    }

    async fn restore_pod(&self, request: Request<cri::RestorePodRequest>) -> Answer<cri::RestorePodResponse> {
        let limit = request.extensions().get::<CallerLimit>().copied();
        self.logged(request, async |request| self.on_restore_pod(request, limit).await).await
    }

    async fn get_container_events(&self, _: Request<cri::GetEventsRequest>) -> Answer<Self::GetContainerEventsStream> {
        Ok(Response::new(self.on_get_container_events()))
    }

    async fn list_metric_descriptors(
        &self,
        _: Request<cri::ListMetricDescriptorsRequest>,
    ) -> Answer<cri::ListMetricDescriptorsResponse> {
        Ok(Response::new(cri::ListMetricDescriptorsResponse { descriptors: convert::metrics::descriptors() }))
    }

    async fn list_pod_sandbox_metrics(
        &self,
        request: Request<cri::ListPodSandboxMetricsRequest>,
    ) -> Answer<cri::ListPodSandboxMetricsResponse> {
        self.on_list_pod_sandbox_metrics(request.into_inner()).await.map(Response::new)
    }

    async fn stream_pod_sandbox_metrics(
        &self,
        request: Request<cri::StreamPodSandboxMetricsRequest>,
    ) -> Answer<Self::StreamPodSandboxMetricsStream> {
        self.on_stream_pod_sandbox_metrics(request.into_inner()).await
    }

    async fn runtime_config(&self, request: Request<cri::RuntimeConfigRequest>) -> Answer<cri::RuntimeConfigResponse> {
        self.on_runtime_config(request.into_inner()).await.map(Response::new)
    }

    async fn update_pod_sandbox_resources(
        &self,
        request: Request<cri::UpdatePodSandboxResourcesRequest>,
    ) -> Answer<cri::UpdatePodSandboxResourcesResponse> {
        self.logged(request, async |request| self.on_update_pod_sandbox_resources(request).await).await
    }
}

#[tonic::async_trait]
impl cri::image_service_server::ImageService for Cri {
    type StreamImagesStream = ListStream<cri::StreamImagesResponse>;

    async fn list_images(&self, request: Request<cri::ListImagesRequest>) -> Answer<cri::ListImagesResponse> {
        self.on_list_images(request.into_inner()).await.map(Response::new)
    }

    async fn stream_images(&self, request: Request<cri::StreamImagesRequest>) -> Answer<Self::StreamImagesStream> {
        self.on_stream_images(request.into_inner()).await
    }

    async fn image_status(&self, request: Request<cri::ImageStatusRequest>) -> Answer<cri::ImageStatusResponse> {
        self.on_image_status(request.into_inner()).await.map(Response::new)
    }

    async fn pull_image(&self, request: Request<cri::PullImageRequest>) -> Answer<cri::PullImageResponse> {
        self.logged(request, async |request| self.on_pull_image(request).await).await
    }

    async fn remove_image(&self, request: Request<cri::RemoveImageRequest>) -> Answer<cri::RemoveImageResponse> {
        self.logged(request, async |request| self.on_remove_image(request).await).await
    }

    async fn image_fs_info(&self, request: Request<cri::ImageFsInfoRequest>) -> Answer<cri::ImageFsInfoResponse> {
        self.on_image_fs_info(request.into_inner()).await.map(Response::new)
    }
}
