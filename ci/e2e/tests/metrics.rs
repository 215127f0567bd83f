//! Tests the metrics of a real daemon with a real pod: they agree with what crictl lists, and the next daemon counts what it found.

use nacelle_e2e::{ContainerRequest, NodeOptions, PodRequest, TestImage, TestNode, eventually};
use std::collections::BTreeMap;

const ADDRESS: &str = "127.0.0.1:9464";

/// Returns the samples of a scrape by name with labels.
fn scrape(node: &TestNode) -> BTreeMap<String, f64> {
    let url = format!("http://{ADDRESS}/metrics");
    let text = node.run_in_netns("curl", &["--silent", "--show-error", "--fail", &url]).ok();
    let samples = text.lines().filter(|line| !line.starts_with('#')).filter_map(|line| line.rsplit_once(' '));
    samples.map(|(name, value)| (name.to_owned(), value.parse().expect("a value is a number"))).collect()
}

/// Waits until the samples have these values: a scrape may have the text of another one half a second ago.
fn expect(node: &TestNode, expected: &[(&str, usize)]) -> BTreeMap<String, f64> {
    eventually(&format!("{expected:?}"), || {
        let samples = scrape(node);
        let agrees = |(name, value): &(&str, usize)| samples.get(*name) == Some(&(*value as f64));
        expected.iter().all(agrees).then_some(samples)
    })
}

#[test]
fn metrics_agree_with_what_crictl_lists() {
    let extra = format!("[metrics]\naddress = {ADDRESS:?}\n");
    let mut node = TestNode::with_options(NodeOptions { extra, ipv6: false, ..NodeOptions::default() });
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let pod = node.crictl.run_pod(PodRequest::new("counted", node.directory()));
    let runs = pod.start(ContainerRequest::sh("runs", &image, "sleep 600"));
    node.crictl.call(["exec", runs.id.as_str(), "true"]);
    pod.start(ContainerRequest::sh("fails", &image, "exit 3")).wait_for_exit();
    let lines = |arguments: &[&str]| node.crictl.call(arguments).lines().count();
    let samples = expect(
        &node,
        &[
            ("nacelle_pods{handler=\"nacelle\",state=\"ready\"}", lines(&["pods", "--quiet", "--state", "ready"])),
            ("nacelle_containers{state=\"running\"}", lines(&["ps", "--quiet"])),
            ("nacelle_containers{state=\"exited\"}", lines(&["ps", "--quiet", "--state", "exited"])),
            ("nacelle_images{state=\"sound\"}", lines(&["images", "--quiet"])),
            ("nacelle_pod_starts_total{handler=\"nacelle\",result=\"ready\"}", 1),
            ("nacelle_pod_start_phase_duration_seconds_count{handler=\"nacelle\",phase=\"cni_add\"}", 1),
            ("nacelle_pod_start_phase_duration_seconds_count{handler=\"nacelle\",phase=\"pod_process\"}", 1),
            ("nacelle_container_exits_total{reason=\"Error\"}", 1),
            ("nacelle_cni_requests_total{command=\"ADD\",result=\"success\"}", 1),
            ("nacelle_image_pulls_total{result=\"success\"}", 1),
            ("nacelle_stream_sessions_total{kind=\"exec\"}", 1),
            ("nacelle_stream_sessions_open{kind=\"exec\"}", 0),
            ("nacelle_cri_requests_total{rpc=\"RunPodSandbox\",code=\"OK\"}", 1),
        ],
    );
    for name in ["nacelle_image_received_bytes_total", "nacelle_pod_process_memory_bytes{handler=\"nacelle\"}"] {
        assert!(samples.get(name).is_some_and(|bytes| *bytes > 65_536.0), "{name}: {samples:?}");
    }
    let unknown: Vec<_> = samples.keys().filter(|name| name.contains("phase=\"other\"")).collect();
    assert!(unknown.is_empty(), "a step of a start has no label: {unknown:?} {}", node.nacelle(&["pods"]).stdout);

    let id = pod.id.clone();
    node.kill();
    node.start();
    expect(
        &node,
        &[
            ("nacelle_pods_recovered_total{outcome=\"adopted\"}", 1),
            ("nacelle_pod_starts_total{handler=\"nacelle\",result=\"ready\"}", 0),
            ("nacelle_pods{handler=\"nacelle\",state=\"ready\"}", 1),
        ],
    );
    node.crictl.call(["rmp", "--force", id.as_str()]);
    expect(&node, &[("nacelle_cni_requests_total{command=\"DEL\",result=\"success\"}", 1)]);
}
