//! Owns: many pods at once: `NACELLE_TEST_PODS` of them (3 without it).

use nacelle_e2e::node::Options;
use nacelle_e2e::{Image, Node, eventually};
use nacelle_proto::cri;
use nacelle_proto::cri::runtime_service_client::RuntimeServiceClient;
use std::collections::BTreeSet;
use std::path::PathBuf;
use tokio::task::JoinSet;
use tonic::transport::Channel;

/// Runs a pod with a container; returns the pod's id and what tells its machine from all others.
async fn one(channel: Channel, number: u32, image: String, logs: PathBuf) -> Result<(String, String), tonic::Status> {
    let mut client = RuntimeServiceClient::new(channel);
    let name = format!("many-{number}");
    let config = cri::PodSandboxConfig {
        metadata: Some(cri::PodSandboxMetadata {
            name: name.clone(),
            uid: name.clone(),
            namespace: "e2e".to_owned(),
            attempt: 0,
        }),
        log_directory: logs.join(&name).display().to_string(),
        ..Default::default()
    };
    let run = cri::RunPodSandboxRequest { config: Some(config.clone()), runtime_handler: String::new() };
    let pod = client.run_pod_sandbox(run).await?.into_inner().pod_sandbox_id;
    let container = cri::ContainerConfig {
        metadata: Some(cri::ContainerMetadata { name: "sleeper".to_owned(), attempt: 0 }),
        image: Some(cri::ImageSpec { image, ..Default::default() }),
        command: vec!["sleep".to_owned(), "3600".to_owned()],
        log_path: "sleeper.log".to_owned(),
        ..Default::default()
    };
    let create = cri::CreateContainerRequest {
        pod_sandbox_id: pod.clone(),
        config: Some(container),
        sandbox_config: Some(config),
    };
    let container_id = client.create_container(create).await?.into_inner().container_id;
    client.start_container(cri::StartContainerRequest { container_id: container_id.clone() }).await?;
    let cmd = ["cat", "/proc/sys/kernel/random/boot_id"].map(str::to_owned).to_vec();
    let said = client.exec_sync(cri::ExecSyncRequest { container_id, cmd, timeout: 0 }).await?.into_inner();
    Ok((pod, String::from_utf8_lossy(&said.stdout).into_owned()))
}

#[test]
fn many_pods_at_once_are_as_many_machines() {
    let count = std::env::var("NACELLE_TEST_PODS").map_or(3, |text| text.parse().expect("NACELLE_TEST_PODS"));
    // All of them share the processors of one node, which may be an emulated one.
    let extra = "[sandbox]\nboot_seconds = 900\nanswer_seconds = 600\n".to_owned();
    let node = Node::with(Options { ipv6: false, extra, ..Options::default() });
    let image = node.image(&Image::busybox(), "busybox:1");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut pods = JoinSet::new();
        for number in 0..count {
            pods.spawn(one(node.channel(), number, image.clone(), node.folder().join("logs")));
        }
        let (ids, machines): (Vec<_>, BTreeSet<_>) =
            pods.join_all().await.into_iter().map(|pod| pod.expect("a pod runs")).unzip();
        assert_eq!((machines.len(), node.machines().len()), (ids.len(), ids.len()), "{machines:?}");

        let mut removals = JoinSet::new();
        for pod_sandbox_id in ids {
            let mut client = RuntimeServiceClient::new(node.channel());
            removals.spawn(async move {
                client.stop_pod_sandbox(cri::StopPodSandboxRequest { pod_sandbox_id: pod_sandbox_id.clone() }).await?;
                client.remove_pod_sandbox(cri::RemovePodSandboxRequest { pod_sandbox_id }).await
            });
        }
        for removed in removals.join_all().await {
            removed.expect("a pod is removed");
        }
    });
    eventually("nothing is left", || node.left().is_empty().then_some(()));
}
