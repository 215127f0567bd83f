//! Runs many pods at once: `NACELLE_TEST_PODS` of them (3 without it).

use nacelle_e2e::cri::{container_config, exec};
use nacelle_e2e::node::NodeOptions;
use nacelle_e2e::{CriClient, CriPod, TestImage, TestNode, eventually};
use std::collections::BTreeSet;
use std::path::PathBuf;
use tokio::task::JoinSet;
use tonic::transport::Channel;

/// Runs a pod with a container; returns the pod and the boot id of its VM, which no other VM has.
async fn run_pod(
    channel: Channel,
    number: u32,
    image: String,
    logs: PathBuf,
) -> Result<(CriPod, String), tonic::Status> {
    let mut cri = CriClient::new(channel);
    let pod = CriPod::run(&mut cri, &format!("many-{number}"), &logs).await?;
    let container = container_config("sleeper", &image, &["sleep", "3600"]);
    let container_id = pod.start_container(&mut cri, container).await?;
    let output = exec(&mut cri, &container_id, &["cat", "/proc/sys/kernel/random/boot_id"], 0).await?;
    Ok((pod, String::from_utf8_lossy(&output.stdout).into_owned()))
}

#[test]
fn many_concurrent_pods_run_in_as_many_vms() {
    let count = std::env::var("NACELLE_TEST_PODS").map_or(3, |text| text.parse().expect("NACELLE_TEST_PODS"));
    // All of them share the CPUs of one node, which may be an emulated one.
    let extra = "[sandbox]\nboot_timeout = \"15m\"\npod_request_timeout = \"10m\"\n".to_owned();
    let node = TestNode::with_options(NodeOptions { ipv6: false, extra, ..NodeOptions::default() });
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut pods = JoinSet::new();
        for number in 0..count {
            pods.spawn(run_pod(node.channel(), number, image.clone(), node.directory().join("logs")));
        }
        let (pods, machines): (Vec<_>, BTreeSet<_>) =
            pods.join_all().await.into_iter().map(|pod| pod.expect("a pod runs")).unzip();
        assert_eq!((machines.len(), node.vm_pids().len()), (pods.len(), pods.len()), "{machines:?}");

        let mut removals = JoinSet::new();
        for pod in pods {
            let mut cri = CriClient::new(node.channel());
            removals.spawn(async move { pod.remove(&mut cri).await });
        }
        for removed in removals.join_all().await {
            removed.expect("a pod is removed");
        }
    });
    eventually("nothing is left", || node.leaked().is_empty().then_some(()));
}
