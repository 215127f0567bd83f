//! Implements the RPCs about the resource use of pods and containers, single and as lists.

use super::Cri;
use super::convert::{metrics, report, stats};
use super::sandbox::required;
use super::status::status;
use crate::lifecycle::LifecycleError;
use nacelle_model::state::ContainerState;
use nacelle_proto::cri;
use tonic::Status;

impl Cri {
    /// Returns the mount point of container files that ImageFsInfo reports.
    fn mountpoint(&self) -> String {
        self.node.services().images.directory().display().to_string()
    }

    pub(super) async fn on_container_stats(
        &self,
        request: cri::ContainerStatsRequest,
    ) -> Result<cri::ContainerStatsResponse, Status> {
        let requested = required("container_id", &request.container_id)?;
        let (id, view) = self.node.container(requested).map_err(status)?;
        let not_running = || status(LifecycleError::NotRunning { id: id.to_string(), why: String::new() });
        let record = view.containers.get(&id).filter(|record| record.state == ContainerState::Running);
        let record = record.ok_or_else(not_running)?;
        let limit = self.node.services().request_timeout();
        let figures = self.accounting.query(&view.pod.id, limit).await.map_err(status)?;
        let stats = stats::container(record, Some(&figures), &self.mountpoint());
        match stats.cpu {
            Some(_) => Ok(cri::ContainerStatsResponse { stats: Some(stats) }),
            // The container ended meanwhile.
            None => Err(not_running()),
        }
    }

    pub(super) async fn on_list_container_stats(
        &self,
        request: cri::ListContainerStatsRequest,
    ) -> Result<cri::ListContainerStatsResponse, Status> {
        let filter = request.filter.as_ref();
        let passes = |c: &_| report::container_is_visible(c) && stats::matches_container_filter(c, filter);
        let mut views = self.node.views();
        views.retain(|view| view.containers.values().any(passes));
        let figures = self.accounting.query_all(views.iter().map(AsRef::as_ref)).await;
        let mountpoint = self.mountpoint();
        let of_pod = views.iter().flat_map(|view| {
            let figures = figures.get(&view.pod.id);
            let shown = view.containers.values().filter(|container| passes(container));
            shown.map(|record| stats::container(record, figures, &mountpoint)).collect::<Vec<_>>()
        });
        Ok(cri::ListContainerStatsResponse { stats: of_pod.collect() })
    }

    pub(super) async fn on_pod_sandbox_stats(
        &self,
        request: cri::PodSandboxStatsRequest,
    ) -> Result<cri::PodSandboxStatsResponse, Status> {
        let view = self.node.pod(required("pod_sandbox_id", &request.pod_sandbox_id)?).map_err(status)?;
        let limit = self.node.services().request_timeout();
        let figures = self.accounting.query(&view.pod.id, limit).await.map_err(status)?;
        Ok(cri::PodSandboxStatsResponse { stats: Some(stats::pod(&view, &figures, &self.mountpoint())) })
    }

    /// Lists statistics. Those of pods that are not ready or do not respond are empty.
    pub(super) async fn on_list_pod_sandbox_stats(
        &self,
        request: cri::ListPodSandboxStatsRequest,
    ) -> Result<cri::ListPodSandboxStatsResponse, Status> {
        let filter = request.filter.as_ref();
        let mut views = self.node.views();
        views.retain(|view| report::is_visible(&view.pod) && stats::matches_pod_filter(&view.pod, filter));
        let figures = self.accounting.query_all(views.iter().map(AsRef::as_ref)).await;
        let mountpoint = self.mountpoint();
        let known = views.iter().filter_map(|view| Some((view, figures.get(&view.pod.id)?)));
        let stats = known.map(|(view, figures)| stats::pod(view, figures, &mountpoint)).collect();
        Ok(cri::ListPodSandboxStatsResponse { stats })
    }

    /// Lists metrics. Unknown values are left out, as in the statistics.
    pub(super) async fn on_list_pod_sandbox_metrics(
        &self,
        _: cri::ListPodSandboxMetricsRequest,
    ) -> Result<cri::ListPodSandboxMetricsResponse, Status> {
        let mut views = self.node.views();
        views.retain(|view| report::is_visible(&view.pod));
        let figures = self.accounting.query_all(views.iter().map(AsRef::as_ref)).await;
        let mut pod_metrics = Vec::new();
        for (view, figures) in views.iter().filter_map(|view| Some((view, figures.get(&view.pod.id)?))) {
            let cost = self.accounting.measure_processes(&view.pod.id).await;
            pod_metrics.push(metrics::pod(view, figures, cost));
        }
        Ok(cri::ListPodSandboxMetricsResponse { pod_metrics })
    }
}
