//! Implements the image RPCs: converts the request, calls the image store, converts the result.

use super::Cri;
use super::convert::report;
use super::sandbox::required;
use super::status::status;
use crate::lifecycle::unix_nanos;
use crate::metrics::EventCounters;
use crate::metrics::labels::PullResult;
use crate::traces::{RequestSpan, TracedWork};
use nacelle_base::Chain;
use nacelle_base::task::TaskError;
use nacelle_base::timeline::Timeline;
use nacelle_image::{Auth, ImageError, ImageRecord, Reference};
use nacelle_proto::cri;
use std::collections::HashMap;
use std::time::Instant;
use tonic::Status;

/// A pull in progress. One that is dropped was given up by its caller.
struct CountedPull<'c> {
    counters: &'c EventCounters,
    began: Instant,
    result: PullResult,
}

impl CountedPull<'_> {
    fn new(counters: &EventCounters) -> CountedPull<'_> {
        CountedPull { counters, began: Instant::now(), result: PullResult::Cancelled }
    }
}

impl Drop for CountedPull<'_> {
    fn drop(&mut self) {
        self.counters.count_pull(self.result, self.began.elapsed());
    }
}

impl Cri {
    pub(super) async fn on_list_images(
        &self,
        request: cri::ListImagesRequest,
    ) -> Result<cri::ListImagesResponse, Status> {
        let store = &self.node.services().images;
        let name = request.filter.and_then(|filter| filter.image).map(|image| image.image).unwrap_or_default();
        let images = match name.as_str() {
            "" => store.list(),
            name => self.find_sound_image(name).await?.into_iter().collect(),
        };
        Ok(cri::ListImagesResponse { images: images.iter().map(report::image).collect() })
    }

    pub(super) async fn on_image_status(
        &self,
        request: cri::ImageStatusRequest,
    ) -> Result<cri::ImageStatusResponse, Status> {
        let name = image_name(request.image.as_ref())?;
        let store = &self.node.services().images;
        let mut image = self.find_sound_image(name).await?;
        let root = match &image {
            Some(image) if request.verbose => match store.rootfs(&image.id).await {
                Err(ImageError::Damaged { .. }) => None,
                root => Some(root.map_err(status)?),
            },
            _ => None,
        };
        if request.verbose && root.is_none() {
            image = None; // Its configuration is damaged.
        }
        let info = match (&image, root) {
            (Some(image), Some(root)) => {
                let config = root.config;
                let spec = serde_json::json!({ "config": {
                    "Entrypoint": config.entrypoint, "Cmd": config.cmd, "Env": config.env, "User": config.user,
                    "WorkingDir": config.working_dir, "StopSignal": config.stop_signal, "Labels": config.labels,
                }});
                let mut info = serde_json::json!({ "imageSpec": spec, "pieces": root.disk.extents.len() });
                if let Some(artifact_type) = &image.artifact_type {
                    info["artifactType"] = artifact_type.as_str().into();
                }
                HashMap::from([("info".to_owned(), info.to_string())])
            }
            _ => HashMap::new(),
        };
        Ok(cri::ImageStatusResponse { image: image.as_ref().map(report::image), info })
    }

    /// Returns the image of this name; `None` if a file of it is damaged, so that kubelet pulls it again.
    async fn find_sound_image(&self, name: &str) -> Result<Option<ImageRecord>, Status> {
        match self.node.services().images.find_sound(name).await {
            Err(error @ ImageError::Damaged { .. }) => {
                tracing::warn!(image = name, error = %Chain(&error), "an image counts as absent");
                Ok(None)
            }
            found => found.map_err(status),
        }
    }

    pub(super) async fn on_pull_image(&self, request: cri::PullImageRequest) -> Result<cri::PullImageResponse, Status> {
        let reference = Reference::parse(image_name(request.image.as_ref())?).map_err(status)?;
        let auth = request.auth.map(|auth| Auth {
            username: auth.username,
            password: auth.password,
            auth: auth.auth,
            server_address: auth.server_address,
            identity_token: auth.identity_token,
            registry_token: auth.registry_token,
        });
        // Dropped with the request: a cancel by kubelet ends the download, and the next pull resumes it.
        let services = self.node.services();
        let mut counted = CountedPull::new(&services.counters);
        let timeline = Timeline::default();
        let pulled = services.images.pull_with_timeline(&reference, auth, &timeline).await;
        counted.result = if pulled.is_ok() { PullResult::Success } else { PullResult::Failure };
        drop(counted);
        if let Some(span) = RequestSpan::current() {
            span.add_steps(TracedWork::Pull, &timeline.steps());
        }
        let id = pulled.map_err(status)?;
        tracing::info!(image = %reference, %id, "pulled");
        Ok(cri::PullImageResponse { image_ref: id.to_string() })
    }

    pub(super) async fn on_remove_image(
        &self,
        request: cri::RemoveImageRequest,
    ) -> Result<cri::RemoveImageResponse, Status> {
        let name = image_name(request.image.as_ref())?.to_owned();
        let (store, in_use) = (self.node.services().images.clone(), self.node.images_in_use());
        // The removal continues if the request is dropped.
        let removing = tokio::spawn(async move { store.remove(&name, &in_use).await });
        let removed = removing.await.map_err(|error| status(TaskError::new("remove an image", error)))?;
        removed.map_err(status)?;
        Ok(cri::RemoveImageResponse {})
    }

    pub(super) async fn on_image_fs_info(
        &self,
        _: cri::ImageFsInfoRequest,
    ) -> Result<cri::ImageFsInfoResponse, Status> {
        let info = self.node.services().images.fs_info().await.map_err(status)?;
        let usage = cri::FilesystemUsage {
            timestamp: unix_nanos(),
            fs_id: Some(cri::FilesystemIdentifier { mountpoint: info.path.display().to_string() }),
            used_bytes: Some(cri::UInt64Value { value: info.used_bytes }),
            inodes_used: Some(cri::UInt64Value { value: info.inodes_used }),
        };
        Ok(cri::ImageFsInfoResponse { image_filesystems: vec![usage.clone()], container_filesystems: vec![usage] })
    }
}

fn image_name(image: Option<&cri::ImageSpec>) -> Result<&str, Status> {
    required("image.image", image.map(|image| image.image.as_str()).unwrap_or_default())
}
