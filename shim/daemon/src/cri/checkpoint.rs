//! Implements CheckpointPod and RestorePod: checks the request, calls the lifecycle, converts the result.

use super::Cri;
use super::container::RequestedContainer;
use super::convert::FROM_CHECKPOINT;
use super::sandbox::required;
use super::status::{refuse, status};
use crate::deadline::CallerLimit;
use crate::lifecycle::{CheckpointOrder, ContainerToRestore, PodToRestore, RestoreOrder};
use nacelle_base::{ContainerId, FailureKind};
use nacelle_proto::cri;
use std::collections::HashMap;
use std::path::{Component, Path};
use std::time::Duration;
use tokio::time::Instant;
use tonic::Status;

/// The limit for a request without one of its own. kubelet always sends a limit; other clients may not.
const OWN_LIMIT: Duration = Duration::from_secs(600);

impl Cri {
    pub(super) async fn on_checkpoint_pod(
        &self,
        request: cri::CheckpointPodRequest,
        limit: Option<CallerLimit>,
    ) -> Result<cri::CheckpointPodResponse, Status> {
        let limit = end_of(limit);
        self.node.checkpoint_pod(checkpoint_order(request, limit)?).await.map_err(status)?;
        Ok(cri::CheckpointPodResponse {})
    }

    pub(super) async fn on_restore_pod(
        &self,
        request: cri::RestorePodRequest,
        limit: Option<CallerLimit>,
    ) -> Result<cri::RestorePodResponse, Status> {
        let limit = end_of(limit);
        let cri::RestorePodRequest { checkpoint_path, config, runtime_handler, options, container_configs } = request;
        let checkpoint = checkpoint_directory("checkpoint_path", &checkpoint_path)?.to_owned();
        refuse_options(&options)?;
        let (config, handler, engine) = self.requested_pod(config.as_ref(), &runtime_handler).await?;
        if config.checkpoint.is_some() {
            let message =
                format!("config.annotations has {FROM_CHECKPOINT:?}, and checkpoint_path names a checkpoint, too");
            return Err(refuse(FailureKind::Invalid, &message));
        }
        let mut containers = Vec::with_capacity(container_configs.len());
        for asked in container_configs {
            let RequestedContainer { config, image, volumes } =
                self.requested_container(&config, false, Some(asked)).await?;
            if !config.devices.is_empty() {
                let message = format!("container {:?} has devices, which a checkpoint cannot hold", config.name);
                return Err(refuse(FailureKind::Conflict, &message));
            }
            containers.push(ContainerToRestore { config, image, volumes });
        }
        let pod = PodToRestore { checkpoint, config, handler, engine };
        let order = RestoreOrder { pod, containers, limit };
        let restored = self.node.restore_pod(order).await.map_err(status)?;
        let container =
            |(name, id): (String, ContainerId)| cri::RestoredContainer { name, container_id: id.to_string() };
        Ok(cri::RestorePodResponse {
            pod_sandbox_id: restored.id.to_string(),
            restored_containers: restored.containers.into_iter().map(container).collect(),
        })
    }
}

/// Returns when the caller gives up.
fn end_of(limit: Option<CallerLimit>) -> Instant {
    limit.map_or_else(|| Instant::now() + OWN_LIMIT, |limit| limit.0)
}

/// Checks the path of a directory for a checkpoint.
fn checkpoint_directory<'a>(field: &'static str, path: &'a str) -> Result<&'a Path, Status> {
    let directory = Path::new(required(field, path)?);
    let is_plain = !directory.components().any(|part| part == Component::ParentDir) && !path.contains('\0');
    if directory.is_absolute() && is_plain {
        return Ok(directory);
    }
    Err(refuse(FailureKind::Invalid, &format!("{field} is {path:?}: an absolute path without .. is needed")))
}

fn refuse_options(options: &HashMap<String, String>) -> Result<(), Status> {
    let Some(key) = options.keys().min() else { return Ok(()) };
    let message = format!("options has {key:?}: this version of Nacelle knows no options; leave it out");
    Err(refuse(FailureKind::Invalid, &message))
}

/// Checks the form of a request.
fn checkpoint_order(request: cri::CheckpointPodRequest, limit: Instant) -> Result<CheckpointOrder, Status> {
    let cri::CheckpointPodRequest { pod_sandbox_id, output_path, container_ids, options } = request;
    required("pod_sandbox_id", &pod_sandbox_id)?;
    let output = checkpoint_directory("output_path", &output_path)?;
    if container_ids.is_empty() {
        let message = "container_ids is empty: all running containers of the pod must be named";
        return Err(refuse(FailureKind::Invalid, message));
    }
    refuse_options(&options)?;
    Ok(CheckpointOrder { pod: pod_sandbox_id, output: output.to_owned(), containers: container_ids, limit })
}

#[cfg(test)]
mod tests {
    use super::*;
    use tonic::Code;

    type Change = fn(&mut cri::CheckpointPodRequest);

    #[test]
    fn a_request_of_the_wrong_form_is_refused_by_the_name_of_its_field() {
        let request = cri::CheckpointPodRequest {
            pod_sandbox_id: "a".into(),
            output_path: "/out".into(),
            container_ids: vec!["b".into()],
            options: [].into(),
        };
        let check = |change: Change| {
            let mut request = request.clone();
            change(&mut request);
            checkpoint_order(request, Instant::now())
        };
        let order = check(|_| ()).unwrap();
        assert_eq!((order.pod.as_str(), order.output.as_path(), order.containers.len()), ("a", Path::new("/out"), 1));
        let rows: [(Change, &str); 7] = [
            (|request| request.pod_sandbox_id.clear(), "pod_sandbox_id is missing"),
            (|request| request.output_path.clear(), "output_path is missing"),
            (
                |request| request.output_path = "out".into(),
                "output_path is \"out\": an absolute path without .. is needed",
            ),
            (|request| request.output_path = "/a/../b".into(), "output_path is \"/a/../b\""),
            (|request| request.output_path = "/a\0".into(), "output_path is \"/a\\0\""),
            (|request| request.container_ids.clear(), "container_ids is empty"),
            (|request| request.options = [("x".into(), String::new())].into(), "options has \"x\""),
        ];
        for (change, expected) in rows {
            let status = check(change).unwrap_err();
            assert_eq!(status.code(), Code::InvalidArgument);
            assert!(status.message().starts_with(expected), "{expected}: {status}");
        }
    }
}
