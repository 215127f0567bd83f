//! Implements CheckpointPod: checks the request, calls the lifecycle, converts the result.

use super::Cri;
use super::sandbox::required;
use super::status::{refuse, status};
use crate::deadline::CallerLimit;
use crate::lifecycle::CheckpointOrder;
use nacelle_base::FailureKind;
use nacelle_proto::cri;
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
        let limit = limit.map_or_else(|| Instant::now() + OWN_LIMIT, |limit| limit.0);
        self.node.checkpoint_pod(checkpoint_order(request, limit)?).await.map_err(status)?;
        Ok(cri::CheckpointPodResponse {})
    }
}

/// Checks the form of a request.
fn checkpoint_order(request: cri::CheckpointPodRequest, limit: Instant) -> Result<CheckpointOrder, Status> {
    let invalid = |message: String| Err(refuse(FailureKind::Invalid, &message));
    let cri::CheckpointPodRequest { pod_sandbox_id, output_path, container_ids, options } = request;
    required("pod_sandbox_id", &pod_sandbox_id)?;
    let output = Path::new(required("output_path", &output_path)?);
    let is_plain = !output.components().any(|part| part == Component::ParentDir) && !output_path.contains('\0');
    if !output.is_absolute() || !is_plain {
        return invalid(format!("output_path is {output_path:?}: an absolute path without .. is needed"));
    }
    if container_ids.is_empty() {
        return invalid("container_ids is empty: all running containers of the pod must be named".to_owned());
    }
    if let Some(key) = options.keys().min() {
        return invalid(format!("options has {key:?}: this version of Nacelle knows no options; leave it out"));
    }
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
