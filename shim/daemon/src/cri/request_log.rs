//! Logs each request that changes something: one event with its subject, gRPC code and duration, at level debug if it succeeded
//! and at level warn if it failed. Credentials, environment, arguments and annotations of a request are not logged; the message of a
//! failure may name a value that was refused.

use crate::lifecycle::Node;
use crate::traces::RequestSpan;
use nacelle_proto::cri;
use std::time::Instant;
use tonic::{Code, Status};
use tracing::Level;

/// The subject of a request. Fields are empty if neither the request nor the node has them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Subject {
    /// The id of the pod, or its beginning as in the request.
    pub pod: String,
    pub namespace: String,
    pub name: String,
    pub uid: String,
    pub handler: String,
    /// The id of the container, or its beginning as in the request.
    pub container: String,
    /// The name of the container in its pod.
    pub container_name: String,
    pub image: String,
}

/// A request that changes something.
pub(super) trait ChangingRequest {
    /// The answer to it.
    type Reply;
    /// The name of the RPC.
    const RPC: &'static str;

    /// Returns what the request says of its subject.
    fn subject(&self) -> Subject;

    /// Adds what only the answer says: the id of what was created.
    fn add_result(_subject: &mut Subject, _reply: &Self::Reply) {}
}

/// A request in progress. One that is dropped was given up by its caller.
struct RequestInProgress<'n> {
    node: &'n Node,
    rpc: &'static str,
    subject: Subject,
    /// The span of the request, if it is recorded.
    span: Option<RequestSpan>,
    began: Instant,
    has_ended: bool,
}

/// Answers a request by `answer`, and logs it.
pub(super) async fn logged<R: ChangingRequest>(
    node: &Node,
    request: R,
    answer: impl AsyncFnOnce(R) -> Result<R::Reply, Status>,
) -> Result<R::Reply, Status> {
    let (subject, span) = (request.subject(), RequestSpan::current());
    let mut running = RequestInProgress { node, rpc: R::RPC, subject, span, began: Instant::now(), has_ended: false };
    // A removed pod has no names any more.
    if tracing::enabled!(Level::DEBUG) || running.span.is_some() {
        running.subject.complete(node);
    }
    let result = answer(request).await;
    if let Ok(reply) = &result {
        R::add_result(&mut running.subject, reply);
    }
    running.end(result.as_ref().err());
    result
}

impl RequestInProgress<'_> {
    fn end(&mut self, failure: Option<&Status>) {
        self.has_ended = true;
        let ms = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX);
        if failure.is_some() {
            self.subject.complete(self.node);
        }
        if let Some(span) = &self.span {
            span.set_subject(self.subject.attributes());
        }
        let rpc = self.rpc;
        let [pod, namespace, name, uid, handler, container, container_name, image] = self.subject.fields();
        // The level of an event is a constant.
        match failure {
            None => tracing::debug!(
                rpc, code = ?Code::Ok, ms, pod, namespace, name, uid, handler, container, container_name, image, "request"
            ),
            Some(status) => tracing::warn!(
                rpc, code = ?status.code(), ms, pod, namespace, name, uid, handler, container, container_name, image,
                "request failed: {}", status.message()
            ),
        }
    }
}

impl Drop for RequestInProgress<'_> {
    fn drop(&mut self) {
        if !self.has_ended {
            self.end(Some(&Status::cancelled("its caller gave up, or its time limit passed")));
        }
    }
}

impl Subject {
    /// Adds the names of a pod and a container that are known by their ids.
    fn complete(&mut self, node: &Node) {
        let view = if self.container.is_empty() {
            if self.pod.is_empty() { None } else { node.pod(&self.pod).ok() }
        } else {
            node.container(&self.container).ok().map(|(id, view)| {
                if let Some(record) = view.containers.get(&id) {
                    self.container_name.clone_from(&record.config.name);
                    self.image.clone_from(&record.config.image);
                }
                self.container = id.to_string();
                view
            })
        };
        if let Some(view) = view {
            let config = &view.pod.config;
            self.pod = view.pod.id.to_string();
            self.namespace.clone_from(&config.name.namespace);
            self.name.clone_from(&config.name.name);
            self.uid.clone_from(&config.name.uid);
            self.handler.clone_from(&view.pod.handler);
        }
    }

    /// Returns the fields of an event: none for what is empty.
    fn fields(&self) -> [Option<&str>; 8] {
        let Subject { pod, namespace, name, uid, handler, container, container_name, image } = self;
        [pod, namespace, name, uid, handler, container, container_name, image]
            .map(|text| Some(text.as_str()).filter(|text| !text.is_empty()))
    }

    /// Returns the subject as attributes of a span, with the names of OpenTelemetry where it has one.
    fn attributes(&self) -> [(&'static str, &str); 8] {
        let Subject { pod, namespace, name, uid, handler, container, container_name, image } = self;
        [
            ("nacelle.pod.id", pod),
            ("k8s.namespace.name", namespace),
            ("k8s.pod.name", name),
            ("k8s.pod.uid", uid),
            ("nacelle.handler", handler),
            ("container.id", container),
            ("container.name", container_name),
            ("container.image.name", image),
        ]
    }

    fn of_pod(id: &str) -> Subject {
        Subject { pod: id.to_owned(), ..Subject::default() }
    }

    fn of_container(id: &str) -> Subject {
        Subject { container: id.to_owned(), ..Subject::default() }
    }

    fn of_image(image: Option<&cri::ImageSpec>) -> Subject {
        Subject { image: image.map(|spec| spec.image.clone()).unwrap_or_default(), ..Subject::default() }
    }

    fn of_metadata(metadata: Option<&cri::PodSandboxMetadata>) -> Subject {
        let Some(metadata) = metadata else { return Subject::default() };
        let cri::PodSandboxMetadata { name, uid, namespace, .. } = metadata.clone();
        Subject { name, uid, namespace, ..Subject::default() }
    }
}

impl ChangingRequest for cri::RunPodSandboxRequest {
    type Reply = cri::RunPodSandboxResponse;
    const RPC: &'static str = "RunPodSandbox";

    fn subject(&self) -> Subject {
        let metadata = self.config.as_ref().and_then(|config| config.metadata.as_ref());
        Subject { handler: self.runtime_handler.clone(), ..Subject::of_metadata(metadata) }
    }

    fn add_result(subject: &mut Subject, reply: &Self::Reply) {
        subject.pod.clone_from(&reply.pod_sandbox_id);
    }
}

impl ChangingRequest for cri::RestorePodRequest {
    type Reply = cri::RestorePodResponse;
    const RPC: &'static str = "RestorePod";

    fn subject(&self) -> Subject {
        let metadata = self.config.as_ref().and_then(|config| config.metadata.as_ref());
        Subject { handler: self.runtime_handler.clone(), ..Subject::of_metadata(metadata) }
    }

    fn add_result(subject: &mut Subject, reply: &Self::Reply) {
        subject.pod.clone_from(&reply.pod_sandbox_id);
    }
}

impl ChangingRequest for cri::CreateContainerRequest {
    type Reply = cri::CreateContainerResponse;
    const RPC: &'static str = "CreateContainer";

    fn subject(&self) -> Subject {
        let config = self.config.as_ref();
        let container_name = config.and_then(|config| config.metadata.as_ref()).map(|metadata| metadata.name.clone());
        Subject {
            pod: self.pod_sandbox_id.clone(),
            container_name: container_name.unwrap_or_default(),
            ..Subject::of_image(config.and_then(|config| config.image.as_ref()))
        }
    }

    fn add_result(subject: &mut Subject, reply: &Self::Reply) {
        subject.container.clone_from(&reply.container_id);
    }
}

/// Implements `ChangingRequest` for requests whose subject is one field: RPC, request, reply, kind of subject, field.
macro_rules! changing_requests {
    ($($rpc:literal, $request:ty, $reply:ty, $of:ident, $field:ident;)*) => {
        $(impl ChangingRequest for $request {
            type Reply = $reply;
            const RPC: &'static str = $rpc;

            fn subject(&self) -> Subject {
                Subject::$of(&self.$field)
            }
        })*
    };
}

changing_requests! {
    "StopPodSandbox", cri::StopPodSandboxRequest, cri::StopPodSandboxResponse, of_pod, pod_sandbox_id;
    "RemovePodSandbox", cri::RemovePodSandboxRequest, cri::RemovePodSandboxResponse, of_pod, pod_sandbox_id;
    "UpdatePodSandboxResources", cri::UpdatePodSandboxResourcesRequest, cri::UpdatePodSandboxResourcesResponse, of_pod, pod_sandbox_id;
    "CheckpointPod", cri::CheckpointPodRequest, cri::CheckpointPodResponse, of_pod, pod_sandbox_id;
    "PortForward", cri::PortForwardRequest, cri::PortForwardResponse, of_pod, pod_sandbox_id;
    "StartContainer", cri::StartContainerRequest, cri::StartContainerResponse, of_container, container_id;
    "StopContainer", cri::StopContainerRequest, cri::StopContainerResponse, of_container, container_id;
    "RemoveContainer", cri::RemoveContainerRequest, cri::RemoveContainerResponse, of_container, container_id;
    "UpdateContainerResources", cri::UpdateContainerResourcesRequest, cri::UpdateContainerResourcesResponse, of_container, container_id;
    "ReopenContainerLog", cri::ReopenContainerLogRequest, cri::ReopenContainerLogResponse, of_container, container_id;
    "ExecSync", cri::ExecSyncRequest, cri::ExecSyncResponse, of_container, container_id;
    "Exec", cri::ExecRequest, cri::ExecResponse, of_container, container_id;
    "Attach", cri::AttachRequest, cri::AttachResponse, of_container, container_id;
}

impl ChangingRequest for cri::PullImageRequest {
    type Reply = cri::PullImageResponse;
    const RPC: &'static str = "PullImage";

    fn subject(&self) -> Subject {
        let metadata = self.sandbox_config.as_ref().and_then(|config| config.metadata.as_ref());
        Subject { image: Subject::of_image(self.image.as_ref()).image, ..Subject::of_metadata(metadata) }
    }
}

impl ChangingRequest for cri::RemoveImageRequest {
    type Reply = cri::RemoveImageResponse;
    const RPC: &'static str = "RemoveImage";

    fn subject(&self) -> Subject {
        Subject::of_image(self.image.as_ref())
    }
}

impl ChangingRequest for cri::UpdateRuntimeConfigRequest {
    type Reply = cri::UpdateRuntimeConfigResponse;
    const RPC: &'static str = "UpdateRuntimeConfig";

    fn subject(&self) -> Subject {
        Subject::default()
    }
}
