//! Tests what the daemon logs of requests: on simulated pod processes, in one test, because a process has one log.

mod common;

use common::{World, container_config, pod_config};
use nacelle_proto::cri;
use serde_json::Value;
use std::io::Write;
use std::sync::{Arc, Mutex};
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::prelude::*;

/// What must not be in a log.
const SECRET: &str = "correct-horse-battery";

/// A log in memory.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Lines {
    fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }

    /// Returns the events of an RPC.
    fn of(&self, rpc: &str) -> Vec<Value> {
        let events = self.text().lines().map(|line| serde_json::from_str::<Value>(line).unwrap()).collect::<Vec<_>>();
        events.into_iter().filter(|event| event["fields"]["rpc"] == rpc).collect()
    }
}

/// Returns level, gRPC code, namespace/name/uid of the pod, name of the container and image.
fn summary(event: &Value) -> String {
    let fields = &event["fields"];
    let text = |key: &str| fields[key].as_str().unwrap_or("-").to_owned();
    assert!(fields["ms"].is_u64(), "{event}");
    let level = event["level"].as_str().unwrap();
    let [namespace, name, uid, container, image] = ["namespace", "name", "uid", "container_name", "image"].map(text);
    format!("{level} {} {namespace}/{name}/{uid} {container} {image}", text("code"))
}

#[test]
fn each_changing_request_is_one_event_without_secrets() {
    let lines = Lines::default();
    let writer = lines.clone();
    let layer = tracing_subscriber::fmt::layer().json().with_writer(move || writer.clone());
    let filter = Targets::new().with_target("nacelle", LevelFilter::TRACE);
    tracing_subscriber::registry().with(layer.with_filter(filter)).init();

    let world = World::new();
    let mut daemon = world.daemon();
    // A caller that gives up.
    world.script.hang_at("configure");
    let mut client = daemon.cri.clone();
    let request = cri::RunPodSandboxRequest { config: Some(pod_config("b")), ..Default::default() };
    let waiting = world.spawn(async move { client.run_pod_sandbox(request).await });
    world.eventually("the pod is being configured", || world.script.seen("configure"));
    waiting.abort();
    world.eventually("the request that was given up is logged", || lines.of("RunPodSandbox").len() == 1);
    assert!(summary(&lines.of("RunPodSandbox")[0]).starts_with("WARN Cancelled "), "{}", lines.text());
    world.script.release();

    let (pod, container) = world.run(async {
        let pod = daemon.run_pod("a").await.unwrap();
        let mut config = container_config("c");
        config.envs.push(cri::KeyValue { key: "TOKEN".into(), value: SECRET.into() });
        config.args.push(SECRET.into());
        config.annotations.insert("example.com/token".into(), SECRET.into());
        let container = daemon.create_from(&pod, config).await.unwrap();
        daemon.start(&container).await.unwrap();
        daemon.exec(&container, &["login", SECRET]).await.unwrap();
        daemon.start("0123456789ab").await.unwrap_err();
        let auth = cri::AuthConfig { username: "me".into(), password: SECRET.into(), ..Default::default() };
        let image = cri::ImageSpec { image: "Not A Reference".into(), ..Default::default() };
        let request =
            cri::PullImageRequest { image: Some(image), auth: Some(auth), sandbox_config: Some(pod_config("a")) };
        daemon.images.pull_image(request).await.unwrap_err();
        daemon.pods().await;
        daemon.stop(&container).await.unwrap();
        daemon.remove(&container).await.unwrap();
        daemon.stop_pod(&pod).await.unwrap();
        daemon.remove_pod(&pod).await.unwrap();
        (pod, container)
    });
    let subject = {
        let metadata = pod_config("a").metadata.unwrap();
        format!("{}/{}/{}", metadata.namespace, metadata.name, metadata.uid)
    };
    let image = container_config("c").image.unwrap().image;
    let one = |rpc: &str| {
        let events = lines.of(rpc);
        assert_eq!(events.len(), 1, "{rpc}: {events:?}");
        events[0].clone()
    };
    let ran = lines.of("RunPodSandbox").pop().unwrap();
    for event in [ran, one("StopPodSandbox"), one("RemovePodSandbox")] {
        assert_eq!(summary(&event), format!("DEBUG Ok {subject} - -"), "{event}");
        assert_eq!(event["fields"]["pod"], pod.as_str(), "{event}");
    }
    for rpc in ["CreateContainer", "ExecSync", "StopContainer", "RemoveContainer"] {
        assert_eq!(summary(&one(rpc)), format!("DEBUG Ok {subject} c {image}"), "{rpc}");
        assert_eq!(one(rpc)["fields"]["container"], container.as_str(), "{rpc}");
    }
    let starts = lines.of("StartContainer");
    assert_eq!(summary(&starts[0]), format!("DEBUG Ok {subject} c {image}"));
    assert_eq!(summary(&starts[1]), "WARN NotFound -/-/- - -");
    assert_eq!(starts[1]["fields"]["container"], "0123456789ab");
    let pull = one("PullImage");
    assert_eq!(summary(&pull), format!("WARN InvalidArgument {subject} - Not A Reference"));
    assert!(pull["fields"]["message"].as_str().unwrap().contains("Not A Reference"), "{pull}");
    assert!(lines.of("ListPodSandbox").is_empty());

    assert!(!lines.text().contains(SECRET), "{}", lines.text());
}
