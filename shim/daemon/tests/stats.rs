//! Tests CRI's statistics of pods and containers, on simulated pod processes.

mod common;

use common::{Daemon, World};
use nacelle_proto::common::{ContainerUsage, Details, InterfaceUsage, Layer, Usage};
use nacelle_proto::{cri, pod as proto};
use tokio_stream::StreamExt;
use tonic::Code;

fn usage(cpu_nanos: u64) -> Usage {
    Usage { cpu_nanos, memory_bytes: 1000, inactive_file_bytes: 100, processes: 4, ..Default::default() }
}

fn figures(ids: &[&str]) -> proto::StatsResponse {
    let layer = Layer { bytes: 4096, inodes: 2, age_ms: 0 };
    let container = |id: &&str| ContainerUsage {
        id: (*id).into(),
        usage: Some(usage(5)),
        layer: Some(layer),
        details: Some(Details { sockets: 3, ..Default::default() }),
    };
    let interface = |name: &str| InterfaceUsage { name: name.into(), rx_bytes: 7, ..Default::default() };
    proto::StatsResponse {
        pod: Some(usage(9)),
        containers: ids.iter().map(container).collect(),
        interfaces: vec![interface("eth0"), interface("br0")],
        scratch: None,
        used_bytes: None,
    }
}

async fn container(daemon: &mut Daemon, id: &str) -> Result<cri::ContainerStats, tonic::Status> {
    let request = cri::ContainerStatsRequest { container_id: id.into() };
    Ok(daemon.cri.container_stats(request).await?.into_inner().stats.unwrap())
}

async fn list(daemon: &mut Daemon, filter: cri::ContainerStatsFilter) -> Vec<cri::ContainerStats> {
    let request = cri::ListContainerStatsRequest { filter: Some(filter) };
    daemon.cri.list_container_stats(request).await.unwrap().into_inner().stats
}

async fn pods(daemon: &mut Daemon) -> Vec<cri::PodSandboxStats> {
    daemon.cri.list_pod_sandbox_stats(cri::ListPodSandboxStatsRequest::default()).await.unwrap().into_inner().stats
}

fn id(stats: &cri::ContainerStats) -> &str {
    &stats.attributes.as_ref().unwrap().id
}

#[test]
fn figures_of_a_pod_and_its_containers() {
    let world = World::new();
    let mut daemon = world.daemon();
    world.run(async {
        let pod = daemon.run_pod("web").await.unwrap();
        let running = daemon.create(&pod, "running").await.unwrap();
        daemon.start(&running).await.unwrap();
        let created = daemon.create(&pod, "created").await.unwrap();
        *world.pods.only().stats.lock().unwrap() = Some(figures(&[&running, &created, "stranger"]));

        let stats = container(&mut daemon, &running[..12]).await.unwrap();
        assert_eq!(
            (id(&stats), stats.attributes.as_ref().unwrap().metadata.as_ref().unwrap().name.as_str()),
            (&*running, "running")
        );
        let cpu = stats.cpu.unwrap();
        assert!(cpu.timestamp > 0 && cpu.usage_nano_cores.is_none(), "seen once, it has no rate");
        assert_eq!(cpu.usage_core_nano_seconds.unwrap().value, 5);
        assert_eq!(stats.memory.unwrap().working_set_bytes.unwrap().value, 900);
        let info = daemon.images.image_fs_info(cri::ImageFsInfoRequest {}).await.unwrap().into_inner();
        let layer = stats.writable_layer.unwrap();
        assert_eq!(layer.fs_id, info.container_filesystems[0].fs_id);
        assert_eq!(container(&mut daemon, &created).await.unwrap_err().code(), Code::FailedPrecondition);
        assert_eq!(container(&mut daemon, "ffff").await.unwrap_err().code(), Code::NotFound);

        // In a list, a stopped container has only its disk.
        let all = list(&mut daemon, cri::ContainerStatsFilter::default()).await;
        assert_eq!(all.len(), 2);
        for stats in &all {
            assert_eq!(stats.cpu.is_some(), id(stats) == running);
            assert_eq!(stats.writable_layer.as_ref().unwrap().used_bytes.unwrap().value, 4096);
        }
        let by_id = cri::ContainerStatsFilter { id: running[..12].to_owned(), ..Default::default() };
        let found = list(&mut daemon, by_id).await;
        assert_eq!((found.len(), id(&found[0])), (1, &*running));
        let labels = [("no".to_owned(), "such".to_owned())].into();
        assert!(
            list(&mut daemon, cri::ContainerStatsFilter { label_selector: labels, ..Default::default() })
                .await
                .is_empty()
        );

        let listed = pods(&mut daemon).await;
        assert_eq!((listed.len(), &listed[0].attributes.as_ref().unwrap().id), (1, &pod));
        let linux = listed[0].linux.as_ref().unwrap();
        let network = linux.network.as_ref().unwrap();
        assert_eq!(network.default_interface.as_ref().unwrap().name, "eth0");
        assert_eq!(network.interfaces.iter().map(|i| i.name.as_str()).collect::<Vec<_>>(), ["br0"]);
        assert_eq!((linux.containers.len(), linux.process.unwrap().process_count.unwrap().value), (2, 4));
        let streamed = daemon.cri.stream_container_stats(cri::StreamContainerStatsRequest::default()).await;
        let messages: Vec<_> = streamed.unwrap().into_inner().map(Result::unwrap).collect().await;
        assert_eq!((messages.len(), messages[0].container_stats.len()), (1, 2));
        let streamed = daemon.cri.stream_pod_sandbox_stats(cri::StreamPodSandboxStatsRequest::default()).await;
        let messages: Vec<_> = streamed.unwrap().into_inner().map(Result::unwrap).collect().await;
        assert_eq!((messages.len(), messages[0].pod_sandbox_stats.len()), (1, 1));

        let request = cri::PodSandboxStatusRequest { pod_sandbox_id: pod.clone(), verbose: true };
        let info = daemon.cri.pod_sandbox_status(request).await.unwrap().into_inner().info;
        let accounts: serde_json::Value = serde_json::from_str(&info["accounts"]).unwrap();
        assert_eq!(accounts["containers"]["cpuNanos"], 9);
        assert!(accounts["machine"]["memoryBytes"].as_u64().unwrap() > 0, "{accounts}");

        daemon.stop_pod(&pod).await.unwrap();
        assert!(pods(&mut daemon).await.is_empty());
        let stopped = cri::PodSandboxStatsRequest { pod_sandbox_id: pod };
        assert_eq!(daemon.cri.pod_sandbox_stats(stopped).await.unwrap_err().code(), Code::FailedPrecondition);
        let all = list(&mut daemon, cri::ContainerStatsFilter::default()).await;
        assert_eq!(all.iter().filter(|stats| stats.cpu.is_none() && stats.writable_layer.is_none()).count(), 2);
    });
}

/// Returns the labels and the value of the only metric of this name.
fn metric<'a>(metrics: &'a [cri::Metric], name: &str) -> (&'a [String], u64) {
    let mut found = metrics.iter().filter(|metric| metric.name == name);
    let metric = found.next().unwrap_or_else(|| panic!("no {name}"));
    assert!(found.next().is_none(), "{name} twice");
    (&metric.label_values, metric.value.unwrap().value)
}

#[test]
fn metrics_of_pods_that_answer() {
    let world = World::new();
    let mut daemon = world.daemon();
    world.run(async {
        let pod = daemon.run_pod("web").await.unwrap();
        let running = daemon.create(&pod, "running").await.unwrap();
        daemon.start(&running).await.unwrap();
        let created = daemon.create(&pod, "created").await.unwrap();
        *world.pods.only().stats.lock().unwrap() = Some(figures(&[&running, &created]));

        let request = cri::ListMetricDescriptorsRequest {};
        let descriptors = daemon.cri.list_metric_descriptors(request).await.unwrap().into_inner().descriptors;
        let keys = |name: &str| &descriptors.iter().find(|found| found.name == name).unwrap().label_keys;
        let request = cri::ListPodSandboxMetricsRequest {};
        let listed = daemon.cri.list_pod_sandbox_metrics(request).await.unwrap().into_inner().pod_metrics;
        assert_eq!((listed.len(), &listed[0].pod_sandbox_id), (1, &pod));
        assert_eq!(listed[0].container_metrics.len(), 1);
        assert_eq!(listed[0].container_metrics[0].container_id, running);
        let (labels, sockets) = metric(&listed[0].container_metrics[0].metrics, "container_sockets");
        assert_eq!(sockets, 3);
        let label = |key: &str| &labels[keys("container_sockets").iter().position(|found| found == key).unwrap()];
        assert_eq!((label("container").as_str(), label("pod").as_str()), ("running", "web"));
        let (_, memory) = metric(&listed[0].metrics, "nacelle_machine_memory_bytes");
        assert!(memory > 0);
        for found in listed[0].metrics.iter().chain(&listed[0].container_metrics[0].metrics) {
            assert_eq!(found.label_values.len(), keys(&found.name).len(), "{}", found.name);
        }

        let request = cri::StreamPodSandboxMetricsRequest {};
        let streamed = daemon.cri.stream_pod_sandbox_metrics(request).await.unwrap().into_inner();
        let messages: Vec<_> = streamed.map(Result::unwrap).collect().await;
        assert_eq!((messages.len(), messages[0].pod_sandbox_metrics.len()), (1, 1));

        daemon.stop_pod(&pod).await.unwrap();
        let request = cri::ListPodSandboxMetricsRequest {};
        assert!(daemon.cri.list_pod_sandbox_metrics(request).await.unwrap().into_inner().pod_metrics.is_empty());
    });
}

#[test]
fn a_pod_that_hangs_costs_nobody_the_others() {
    let world = World::new();
    let mut daemon = world.daemon();
    world.run(async {
        let (good, bad) = (daemon.run_pod("good").await.unwrap(), daemon.run_pod("bad").await.unwrap());
        let mut containers = Vec::new();
        for pod in [&good, &bad] {
            let id = daemon.create(pod, "c").await.unwrap();
            daemon.start(&id).await.unwrap();
            containers.push(id);
        }
        *world.pods.of(&good).stats.lock().unwrap() = Some(figures(&[&containers[0]]));
        *world.pods.of(&bad).stats.lock().unwrap() = None;
        let all = list(&mut daemon, cri::ContainerStatsFilter::default()).await;
        let known: Vec<_> = all.iter().filter(|stats| stats.cpu.is_some()).map(id).collect();
        assert_eq!((all.len(), known), (2, vec![&*containers[0]]));
        // A pod outside of the filter is not waited for.
        let only = cri::PodSandboxStatsFilter { id: good.clone(), ..Default::default() };
        let request = cri::ListPodSandboxStatsRequest { filter: Some(only) };
        assert_eq!(daemon.cri.list_pod_sandbox_stats(request).await.unwrap().into_inner().stats.len(), 1);
    });
}
