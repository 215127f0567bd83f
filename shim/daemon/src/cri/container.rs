//! Implements the container RPCs: converts the request, calls the lifecycle, converts the result.

use super::Cri;
use super::convert::{
    NodeParts, apply_cdi_edits, cdi_names, check_guest_volumes, container_config, container_label, report,
    requested_apparmor, resources_change, seccomp_profile,
};
use super::sandbox::required;
use super::status::{creation_status, refuse, status};
use crate::cdi;
use crate::profile;
use nacelle_base::FailureKind;
use nacelle_base::task::run_blocking;
use nacelle_image::ImageRecord;
use nacelle_keeper::streams_output;
use nacelle_machines::machine_pod::{check_container, check_volumes};
use nacelle_model::container::{ContainerConfig, ContainerImage};
use nacelle_model::pod::PodConfig;
use nacelle_model::record::ContainerRecord;
use nacelle_proto::cri;
use std::collections::HashMap;
use std::time::Duration;
use tonic::Status;

/// The number of bytes of each ExecSync stream that are returned, as CRI demands.
const EXEC_LIMIT: usize = 16 << 20;

/// A container as requested, with its images in the store.
pub(super) struct RequestedContainer {
    pub config: ContainerConfig,
    /// The image of the root file system.
    pub image: ContainerImage,
    /// The images of the image volumes, in the order of the volumes.
    pub volumes: Vec<ContainerImage>,
}

impl Cri {
    pub(super) async fn on_create_container(
        &self,
        request: cri::CreateContainerRequest,
    ) -> Result<cri::CreateContainerResponse, Status> {
        let pod = required("pod_sandbox_id", &request.pod_sandbox_id)?;
        let view = self.node.pod(pod).map_err(status)?;
        let asked = self.requested_container(&view.pod.config, !view.applies_profiles(), request.config).await?;
        let RequestedContainer { config, image, volumes } = asked;
        let id = self.node.create(pod, config, image, volumes).await.map_err(creation_status)?;
        Ok(cri::CreateContainerResponse { container_id: id.to_string() })
    }

    /// Checks the configuration of a new container of this pod, and finds its images. An old pod's agent applies no AppArmor profiles.
    pub(super) async fn requested_container(
        &self,
        pod: &PodConfig,
        is_old_pod: bool,
        mut asked: Option<cri::ContainerConfig>,
    ) -> Result<RequestedContainer, Status> {
        let names = asked.as_ref().map(cdi_names).unwrap_or_default();
        let mut devices = Vec::new();
        if let Some(config) = asked.as_mut().filter(|_| !names.is_empty()) {
            let directories = self.node.services().config.sandbox.cdi_dirs.clone();
            // As with seccomp profiles, the container gets the present contents of the files.
            let found = run_blocking("find the CDI devices", move || cdi::find_edits(&names, &directories)).await;
            devices = apply_cdi_edits(config, found.map_err(status)?.map_err(status)?);
        }
        let seccomp = match seccomp_profile(asked.as_ref()).map_err(status)? {
            // Read now: later changes of the file do not affect the container.
            Some(path) => {
                let read = run_blocking("read the seccomp profile", move || profile::read(&path)).await;
                Some(read.map_err(status)?.map_err(status)?)
            }
            None => None,
        };
        let (node, users) = (pod.kind.node_namespaces(), pod.user_namespace);
        let guest = pod.kind.has_guest();
        let apparmor = match requested_apparmor(asked.as_ref(), guest).map_err(status)? {
            _ if guest => None,
            requested => {
                let apparmor = self.apparmor.clone();
                let select = move || apparmor.select(&requested, is_old_pod);
                run_blocking("select the AppArmor profile", select).await.map_err(status)?.map_err(status)?
            }
        };
        let parts = NodeParts { seccomp, apparmor, devices };
        let config = container_config(asked.as_ref(), parts, node, users).map_err(status)?;
        container_label(asked.as_ref(), !guest && self.selinux).map_err(status)?;
        if let Some(machine) = pod.kind.machine() {
            check_container(machine, &config).map_err(status)?;
            check_volumes(machine, &config).map_err(status)?;
        } else if guest {
            check_guest_volumes(&config, &self.node.services().config).map_err(status)?;
        }
        let image = self.find_image("config.image.image", &config.image).await?;
        check_runnable(&image, &config.image)?;
        let mut volumes = Vec::new();
        for volume in &config.volumes {
            volumes.push(container_image(&self.find_image("config.mounts.image.image", &volume.image).await?));
        }
        Ok(RequestedContainer { config, image: container_image(&image), volumes })
    }

    /// Returns the image or artifact in a field of a container's configuration; it must have been pulled, and its files must be there.
    async fn find_image(&self, field: &str, name: &str) -> Result<ImageRecord, Status> {
        self.node.services().images.find_sound(name).await.map_err(status)?.ok_or_else(|| {
            let what = format!("{field} is {name:?}: there is no such image here; pull it first");
            refuse(FailureKind::NotFound, &what)
        })
    }

    pub(super) async fn on_start_container(
        &self,
        request: cri::StartContainerRequest,
    ) -> Result<cri::StartContainerResponse, Status> {
        self.node.start(required("container_id", &request.container_id)?).await.map_err(status)?;
        Ok(cri::StartContainerResponse {})
    }

    pub(super) async fn on_stop_container(
        &self,
        request: cri::StopContainerRequest,
    ) -> Result<cri::StopContainerResponse, Status> {
        let id = required("container_id", &request.container_id)?;
        let grace = Duration::from_secs(u64::try_from(request.timeout).unwrap_or(0));
        self.node.stop(id, grace).await.map_err(status)?;
        Ok(cri::StopContainerResponse {})
    }

    pub(super) async fn on_remove_container(
        &self,
        request: cri::RemoveContainerRequest,
    ) -> Result<cri::RemoveContainerResponse, Status> {
        self.node.remove(required("container_id", &request.container_id)?).await.map_err(status)?;
        Ok(cri::RemoveContainerResponse {})
    }

    pub(super) async fn on_update_container_resources(
        &self,
        request: cri::UpdateContainerResourcesRequest,
    ) -> Result<cri::UpdateContainerResourcesResponse, Status> {
        let id = required("container_id", &request.container_id)?;
        let change = resources_change(request.linux.as_ref()).map_err(status)?;
        self.node.update(id, change).await.map_err(status)?;
        Ok(cri::UpdateContainerResourcesResponse {})
    }

    pub(super) async fn on_list_containers(
        &self,
        request: cri::ListContainersRequest,
    ) -> Result<cri::ListContainersResponse, Status> {
        let views = self.node.views();
        let passes =
            |container: &&ContainerRecord| report::matches_container_filter(container, request.filter.as_ref());
        let shown = report::newest_first(views.iter().flat_map(|view| view.containers.values()).filter(passes));
        Ok(cri::ListContainersResponse { containers: shown.into_iter().map(report::container).collect() })
    }

    pub(super) async fn on_container_status(
        &self,
        request: cri::ContainerStatusRequest,
    ) -> Result<cri::ContainerStatusResponse, Status> {
        let requested = required("container_id", &request.container_id)?;
        let (id, view) = self.node.container(requested).map_err(status)?;
        let gone = || refuse(FailureKind::NotFound, &format!("container {requested} does not exist"));
        let container = view.containers.get(&id).ok_or_else(gone)?;
        let info = || {
            serde_json::json!({
                "sandboxID": container.pod,
                "state": container.state,
                "config": container.config,
                "timeline": container.timeline,
            })
        };
        Ok(cri::ContainerStatusResponse {
            status: Some(report::container_status(container, view.pod.config.user_namespace)),
            info: match request.verbose {
                true => HashMap::from([("info".to_owned(), info().to_string())]),
                false => HashMap::new(),
            },
        })
    }

    pub(super) async fn on_exec_sync(&self, request: cri::ExecSyncRequest) -> Result<cri::ExecSyncResponse, Status> {
        let id = required("container_id", &request.container_id)?;
        if request.cmd.is_empty() {
            return Err(refuse(FailureKind::Invalid, "cmd is missing"));
        }
        if streams_output(&request.cmd)
            && self.node.container(id).map_err(status)?.1.pod.config.kind.machine().is_some()
        {
            let message = "cmd: ExecSync returns at most 16 MiB, when the command has ended, and this verb streams its output: use Exec (crictl exec, kubectl exec) or nacelle vm";
            return Err(refuse(FailureKind::Invalid, message));
        }
        let limit = u64::try_from(request.timeout).ok().filter(|seconds| *seconds > 0).map(Duration::from_secs);
        let mut done = self.node.exec(id, request.cmd, limit).await.map_err(status)?;
        done.stdout.truncate(EXEC_LIMIT);
        done.stderr.truncate(EXEC_LIMIT);
        Ok(cri::ExecSyncResponse { stdout: done.stdout, stderr: done.stderr, exit_code: done.exit_code })
    }

    pub(super) async fn on_reopen_container_log(
        &self,
        request: cri::ReopenContainerLogRequest,
    ) -> Result<cri::ReopenContainerLogResponse, Status> {
        self.node.reopen_log(required("container_id", &request.container_id)?).await.map_err(status)?;
        Ok(cri::ReopenContainerLogResponse {})
    }
}

fn container_image(image: &ImageRecord) -> ContainerImage {
    let reference = image.repo_digests.first().cloned().unwrap_or_else(|| image.id.to_string());
    ContainerImage { id: image.id, reference }
}

/// Refuses an artifact as the image that a container runs. `name` is the name in the request.
fn check_runnable(image: &ImageRecord, name: &str) -> Result<(), Status> {
    let Some(artifact_type) = &image.artifact_type else { return Ok(()) };
    let name = image.repo_tags.first().or(image.repo_digests.first()).map_or(name, String::as_str);
    let message = format!(
        "config.image.image is {name:?}, an artifact of type {artifact_type:?}, which has files but no program to run; \
         mount it as an image volume"
    );
    Err(refuse(FailureKind::Invalid, &message))
}
