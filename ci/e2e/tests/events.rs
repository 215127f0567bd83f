//! Tests the events of real pods: crictl and a CRI client subscribe at the same time.

use nacelle_e2e::{ContainerRequest, PodRequest, TestImage, TestNode, eventually};
use nacelle_proto::cri;
use nacelle_proto::cri::runtime_service_client::RuntimeServiceClient;
use serde_json::Value;
use std::fs;

/// Returns crictl's output so far: one JSON document after the other.
fn printed_events(path: &std::path::Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap_or_default();
    serde_json::Deserializer::from_str(&text).into_iter().map_while(Result::ok).collect()
}

/// Returns the kinds of the events of this id, in their order.
fn event_types(events: &[Value], id: &str) -> Vec<String> {
    let of = events.iter().filter(|event| event["containerId"] == id);
    of.map(|event| event["containerEventType"].as_str().unwrap_or_default().to_owned()).collect()
}

#[test]
fn container_events_report_the_life_cycle_of_a_pod() {
    let node = TestNode::new();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let (mut crictl, file) = node.crictl.spawn_with_output_file(["events"]);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let mut stream = runtime.block_on(async {
        let mut client = RuntimeServiceClient::new(node.channel());
        client.get_container_events(cri::GetEventsRequest {}).await.unwrap().into_inner()
    });
    let life = ["CREATED", "STARTED", "STOPPED", "DELETED"].map(|kind| format!("CONTAINER_{kind}_EVENT"));
    // crictl does not report when it has subscribed: pods are created and removed until it prints one.
    let pod = eventually("crictl receives the events of a pod", || {
        let pod = node.crictl.run_pod(PodRequest::new("watched", node.directory()));
        if event_types(&printed_events(&file), &pod.id) == life[..2] {
            return Some(pod);
        }
        pod.remove();
        None
    });
    let brief = pod.start(ContainerRequest::sh("brief", &image, "exit 3"));
    brief.wait_for_exit();
    let long = pod.start(ContainerRequest::sh("long", &image, "sleep 600"));
    node.crictl.call(["rm", &brief.id]);
    let (pod_id, brief, long) = (pod.id.clone(), brief.id.clone(), long.id.clone());
    pod.remove();

    let events = eventually("crictl receives the event of the pod's end", || {
        let events = printed_events(&file);
        (event_types(&events, &pod_id).last() == Some(&life[3])).then_some(events)
    });
    for id in [&pod_id, &brief, &long] {
        assert_eq!(event_types(&events, id), life, "{id}");
    }
    let at = |event: &Value| event["createdAt"].as_str().map_or(event["createdAt"].as_i64(), |text| text.parse().ok());
    let times: Vec<i64> = events.iter().map(|event| at(event).expect("a time")).collect();
    assert!(times.is_sorted_by(|earlier, later| earlier < later), "{times:?}");
    let ended =
        events.iter().find(|e| e["containerId"] == brief && e["containerEventType"] == life[2].as_str()).unwrap();
    assert_eq!(ended["containersStatuses"][0]["exitCode"], 3);
    assert_eq!(ended["podSandboxStatus"]["metadata"]["name"], "watched");

    // The other subscriber received the same events.
    let mut same = Vec::new();
    runtime.block_on(async {
        while same.last() != Some(&(pod_id.clone(), 3)) {
            let event = stream.message().await.unwrap().expect("the stream goes on");
            same.push((event.container_id, event.container_event_type));
        }
    });
    let number =
        |kind: &Value| life.iter().position(|name| kind == name.as_str()).and_then(|place| i32::try_from(place).ok());
    let first = same.len() - events.len();
    for (event, same) in events.iter().zip(&same[first..]) {
        assert_eq!(event["containerId"], same.0.as_str());
        assert_eq!(number(&event["containerEventType"]), Some(same.1));
    }
    drop(stream);
    crictl.kill().unwrap();
    crictl.wait().unwrap();
}
