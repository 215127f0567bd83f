//! Implements a CRI client without crictl, for tests with concurrent requests or with fields that crictl does not know.

use nacelle_proto::cri;
use nacelle_proto::cri::runtime_service_client::RuntimeServiceClient;
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;
use tonic::Status;
use tonic::transport::Channel;

/// A client of the daemon.
pub type CriClient = RuntimeServiceClient<Channel>;

/// Returns the configuration of a pod that writes its logs into a directory of its name below `logs`.
pub fn pod_config(namespace: &str, name: &str, logs: &Path) -> cri::PodSandboxConfig {
    cri::PodSandboxConfig {
        metadata: Some(cri::PodSandboxMetadata {
            name: name.to_owned(),
            uid: name.to_owned(),
            namespace: namespace.to_owned(),
            attempt: 0,
        }),
        log_directory: logs.join(name).display().to_string(),
        ..Default::default()
    }
}

/// Returns the configuration of a container that runs a command and writes its log into `NAME.log`.
pub fn container_config(name: &str, image: &str, command: &[&str]) -> cri::ContainerConfig {
    cri::ContainerConfig {
        metadata: Some(cri::ContainerMetadata { name: name.to_owned(), attempt: 0 }),
        image: Some(cri::ImageSpec { image: image.to_owned(), ..Default::default() }),
        command: command.iter().map(|word| (*word).to_owned()).collect(),
        log_path: format!("{name}.log"),
        ..Default::default()
    }
}

/// A pod that was started through CRI.
#[derive(Clone, Debug)]
pub struct CriPod {
    /// The pod's id.
    pub id: String,
    /// The pod's configuration.
    pub config: cri::PodSandboxConfig,
}

impl CriPod {
    /// Runs a pod in namespace `e2e`; see [`pod_config`].
    ///
    /// # Errors
    /// The daemon's.
    pub async fn run(cri: &mut CriClient, name: &str, logs: &Path) -> Result<CriPod, Status> {
        let config = pod_config("e2e", name, logs);
        let run = cri::RunPodSandboxRequest { config: Some(config.clone()), runtime_handler: String::new() };
        Ok(CriPod { id: cri.run_pod_sandbox(run).await?.into_inner().pod_sandbox_id, config })
    }

    /// Creates and starts a container; returns its id.
    ///
    /// # Errors
    /// The daemon's.
    pub async fn start_container(
        &self,
        cri: &mut CriClient,
        container: cri::ContainerConfig,
    ) -> Result<String, Status> {
        let create = cri::CreateContainerRequest {
            pod_sandbox_id: self.id.clone(),
            config: Some(container),
            sandbox_config: Some(self.config.clone()),
        };
        let container_id = cri.create_container(create).await?.into_inner().container_id;
        cri.start_container(cri::StartContainerRequest { container_id: container_id.clone() }).await?;
        Ok(container_id)
    }

    /// Stops and removes the pod.
    ///
    /// # Errors
    /// The daemon's.
    pub async fn remove(self, cri: &mut CriClient) -> Result<(), Status> {
        cri.stop_pod_sandbox(cri::StopPodSandboxRequest { pod_sandbox_id: self.id.clone() }).await?;
        cri.remove_pod_sandbox(cri::RemovePodSandboxRequest { pod_sandbox_id: self.id }).await.map(drop)
    }
}

/// Runs a command in a container. `timeout` is in seconds; 0 is none.
///
/// # Errors
/// The daemon's.
pub async fn exec(
    cri: &mut CriClient,
    container_id: &str,
    command: &[&str],
    timeout: i64,
) -> Result<cri::ExecSyncResponse, Status> {
    let cmd = command.iter().map(|word| (*word).to_owned()).collect();
    let request = cri::ExecSyncRequest { container_id: container_id.to_owned(), cmd, timeout };
    Ok(cri.exec_sync(request).await?.into_inner())
}

/// Saves a running pod into an empty directory; the request has this time limit.
///
/// # Errors
/// The daemon's.
pub async fn checkpoint(
    cri: &mut CriClient,
    pod: &CriPod,
    container_ids: &[&str],
    output: &Path,
    limit: Duration,
) -> Result<(), Status> {
    let mut request = tonic::Request::new(cri::CheckpointPodRequest {
        pod_sandbox_id: pod.id.clone(),
        output_path: output.display().to_string(),
        container_ids: container_ids.iter().map(|id| (*id).to_owned()).collect(),
        ..Default::default()
    });
    request.set_timeout(limit);
    cri.checkpoint_pod(request).await.map(drop)
}

/// Restores a pod from a checkpoint; returns it, and the ids of its containers by their names. The request has this time limit.
///
/// # Errors
/// The daemon's.
pub async fn restore(
    cri: &mut CriClient,
    checkpoint: &Path,
    handler: &str,
    config: cri::PodSandboxConfig,
    containers: &[cri::ContainerConfig],
    limit: Duration,
) -> Result<(CriPod, BTreeMap<String, String>), Status> {
    let mut request = tonic::Request::new(cri::RestorePodRequest {
        checkpoint_path: checkpoint.display().to_string(),
        runtime_handler: handler.to_owned(),
        config: Some(config.clone()),
        container_configs: containers.to_vec(),
        ..Default::default()
    });
    request.set_timeout(limit);
    let restored = cri.restore_pod(request).await?.into_inner();
    let ids = restored.restored_containers.into_iter().map(|container| (container.name, container.container_id));
    Ok((CriPod { id: restored.pod_sandbox_id, config }, ids.collect()))
}
