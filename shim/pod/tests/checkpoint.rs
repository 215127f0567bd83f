//! Tests checkpoints of a pod whose guest is a function, on the fake engine: what is frozen is released, whatever fails.

mod common;

use common::agent::RpcFault;
use common::{LIMIT, PodFixture, eventually, kind, network};
use nacelle_base::{Chain, FailureKind};
use nacelle_engine::fake::{FailureScript, SaveFailure};
use nacelle_pod::client::{CheckpointWriters, ClientError, PodClient};
use nacelle_pod::spec::{EngineSpec, PodSpec};
use nacelle_proto::pod;
use serde_json::{Value, json};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tonic::Code;

const GRACE: Duration = Duration::from_secs(60);

/// A ready pod with the container "a", which runs.
struct World {
    fixture: PodFixture,
    client: PodClient,
}

impl World {
    async fn new(save: SaveFailure) -> World {
        let mut fixture = PodFixture::new();
        let kvm = |spec: &mut PodSpec| spec.engine = EngineSpec::Kvm {};
        let client = fixture.boot(kvm, FailureScript { save, ..FailureScript::default() }).await;
        client.configure(network()).await.unwrap();
        let world = World { fixture, client };
        world.run("a", &json!([])).await;
        world
    }

    fn request(&self, id: &str, mounts: &Value) -> pod::CreateContainerRequest {
        self.fixture.container(id, &json!({"hostname": "hold", "mounts": mounts}).to_string())
    }

    async fn run(&self, id: &str, mounts: &Value) {
        self.client.create_container(self.request(id, mounts)).await.unwrap();
        self.client.start_container(id).await.unwrap();
    }

    fn path(&self, name: &str) -> PathBuf {
        self.fixture.root.path().join(name)
    }

    fn files(&self) -> CheckpointWriters {
        let create = |name: &str| File::create(self.path(name)).unwrap();
        CheckpointWriters { state: create("state"), memory: create("memory"), scratch: create("scratch") }
    }

    async fn save_until(
        &self,
        ids: &[&str],
        stop: impl Future<Output = ()>,
    ) -> Result<pod::CheckpointResponse, ClientError> {
        let ids = ids.iter().map(|id| (*id).to_owned()).collect();
        self.client.checkpoint("first", ids, self.files(), stop).await
    }

    async fn save(&self, ids: &[&str]) -> Result<pod::CheckpointResponse, ClientError> {
        self.save_until(ids, std::future::pending()).await
    }

    /// Checks that the pod is as it was before a checkpoint, and can be saved.
    async fn check_released(&self) {
        assert_eq!(*self.fixture.agent.holder.lock().unwrap(), None);
        let state = self.client.state().await.unwrap();
        assert_eq!((state.phase(), state.containers[0].phase()), (pod::Phase::Ready, pod::ContainerPhase::Running));
    }

    async fn end(self) {
        self.client.stop(GRACE).await.unwrap();
        self.fixture.end().await;
    }
}

fn text(error: &ClientError) -> String {
    Chain(error).to_string()
}

fn length(path: &Path) -> u64 {
    std::fs::metadata(path).unwrap().len()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_is_saved_between_hold_and_release() {
    let world = World::new(SaveFailure::None).await;
    world.run("b", &json!([{"destination": "/x", "source": "/run/nacelle/copied-in/b.0"}])).await;
    assert_eq!(world.client.set_memory(128 << 20).await.unwrap(), 128 << 20);
    let saved = world.save(&["b", "a"]).await.unwrap();
    assert_eq!((saved.booted_mib, saved.added_mib, saved.reserve_bytes), (64, 0, 128 << 20));
    let [image] = &saved.images[..] else { panic!("{saved:?}") };
    assert_eq!((image.image_key.as_str(), image.partition, image.length), ("image", 1, 8192));
    assert_eq!(saved.undrained, ["a"], "without a container that the pod does not have");
    assert!(saved.frozen_micros > 0);
    for (name, content) in [("state", "the state of a fake guest"), ("memory", "the memory of a fake guest")] {
        assert_eq!(std::fs::read_to_string(world.path(name)).unwrap(), content);
    }
    assert_eq!(length(&world.path("scratch")), world.fixture.agent.disk_capacity(1));
    let calls = world.fixture.agent.calls.lock().unwrap().clone();
    let calls: Vec<_> = calls.iter().filter(|call| ["sync", "hold", "release"].contains(&call.as_str())).collect();
    assert_eq!(calls, ["sync", "hold", "release"]);
    world.check_released().await;
    world.save(&["a", "b"]).await.unwrap();
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whatever_fails_the_containers_are_released() {
    for (save, fault, expected) in [
        (SaveFailure::None, Some("hold"), "the agent cannot freeze the containers: no"),
        (SaveFailure::InPause, None, "script"),
        (SaveFailure::AfterPause, None, "script"),
    ] {
        let world = World::new(save).await;
        if let Some(method) = fault {
            world.fixture.agent.fault(method, RpcFault::Refuse(Code::FailedPrecondition, "no".into()));
        }
        let failed = world.save(&["a"]).await.unwrap_err();
        assert!(text(&failed).contains(expected), "{}", text(&failed));
        world.check_released().await;
        world.end().await;
    }
    // The dirty pages of the guest are in the saved memory, too.
    let world = World::new(SaveFailure::None).await;
    world.fixture.agent.fault("sync", RpcFault::Refuse(Code::Internal, "no".into()));
    world.save(&["a"]).await.unwrap();
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_disk_is_the_cause_that_is_reported() {
    let world = World::new(SaveFailure::Hangs).await;
    let files = CheckpointWriters { scratch: File::options().write(true).open("/dev/full").unwrap(), ..world.files() };
    let failed = world.client.checkpoint("full", vec!["a".into()], files, std::future::pending()).await.unwrap_err();
    assert!(
        text(&failed).contains("cannot save the pod's scratch disk: cannot copy disk scratch"),
        "{}",
        text(&failed)
    );
    world.check_released().await;
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_end_of_the_offer_stops_a_checkpoint() {
    // In the guest, and when the VM runs again.
    for (save, hangs) in [(SaveFailure::None, Some("hold")), (SaveFailure::Hangs, None)] {
        let world = World::new(save).await;
        if let Some(method) = hangs {
            world.fixture.agent.fault(method, RpcFault::Hang);
        }
        let seen = if hangs.is_some() { "hold" } else { "release" };
        let stop = eventually("it has begun", || world.fixture.agent.calls_of(seen) > 0);
        let stopped = world.save_until(&["a"], stop).await.unwrap_err();
        assert!(text(&stopped).contains("the checkpoint was stopped"), "{}", text(&stopped));
        world.check_released().await;
        world.end().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_checkpoint_is_alone_and_ends_with_its_pod() {
    let world = World::new(SaveFailure::Hangs).await;
    let first = world.save(&["a"]);
    let meanwhile = async {
        eventually("it has begun", || world.fixture.agent.calls_of("release") > 0).await;
        let second = world.client.checkpoint("second", vec!["a".into()], world.files(), std::future::pending()).await;
        let second = second.unwrap_err();
        assert!(text(&second).contains("another checkpoint of it is in progress"), "{}", text(&second));
        // The containers run again, and so do other requests.
        assert_eq!(world.client.set_memory(128 << 20).await.unwrap(), 128 << 20);
        world.client.stop(GRACE).await.unwrap();
    };
    let (first, ()) = tokio::time::timeout(LIMIT, async { tokio::join!(first, meanwhile) }).await.unwrap();
    first.unwrap_err();
    world.fixture.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_be_saved_is_refused_before_anything_is_frozen() {
    let world = World::new(SaveFailure::None).await;
    let shared = json!([{"destination": "/data", "source": "/run/nacelle/volumes/b/0"}]);
    world.client.create_container(world.request("b", &shared)).await.unwrap();
    let refused = world.save(&["a"]).await.unwrap_err();
    assert!(
        text(&refused).contains("container b has /data, a volume that it shares with the node"),
        "{}",
        text(&refused)
    );
    world.client.remove_container("b").await.unwrap();
    assert_eq!(world.fixture.agent.calls_of("sync") + world.fixture.agent.calls_of("hold"), 0);

    for ids in [&[][..], &["a", "b"], &["b"]] {
        let refused = world.save(ids).await.unwrap_err();
        let list = ids.join(", ");
        let expected = format!("the request names the containers [{list}], and [a] run");
        assert!(text(&refused).contains(&expected), "{}", text(&refused));
        world.check_released().await;
    }
    assert_eq!(kind(world.save(&[]).await), FailureKind::Conflict);
    world.save(&["a"]).await.unwrap();
    world.end().await;

    let (fixture, client) = PodFixture::ready().await;
    let world = World { fixture, client };
    let refused = world.save(&[]).await.unwrap_err();
    assert!(text(&refused).contains("that needs engine kvm"), "{}", text(&refused));
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_container_that_starts_meanwhile_is_not_saved_silently() {
    let world = World::new(SaveFailure::None).await;
    // Before the containers are frozen.
    world.fixture.agent.fault("sync", RpcFault::Wait(Duration::from_secs(1)));
    let meanwhile = async {
        eventually("it has begun", || world.fixture.agent.calls_of("sync") > 0).await;
        world.run("b", &json!([])).await;
    };
    let (saved, ()) = tokio::join!(world.save(&["a"]), meanwhile);
    let refused = saved.unwrap_err();
    assert!(text(&refused).contains("the containers [a], and [a, b] run"), "{}", text(&refused));
    world.check_released().await;

    let shared = json!([{"destination": "/data", "source": "/run/nacelle/volumes/c/0"}]);
    let meanwhile = async {
        eventually("it has begun", || world.fixture.agent.calls_of("sync") > 1).await;
        world.client.create_container(world.request("c", &shared)).await.unwrap();
    };
    let (saved, ()) = tokio::join!(world.save(&["a", "b"]), meanwhile);
    let refused = saved.unwrap_err();
    assert!(text(&refused).contains("container c has /data"), "{}", text(&refused));
    world.check_released().await;
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_is_repeated() {
    let world = World::new(SaveFailure::None).await;
    world.fixture.agent.fault("release", RpcFault::Refuse(Code::Unavailable, "not now".into()));
    let meanwhile = async {
        eventually("it is repeated", || world.fixture.agent.calls_of("release") > 3).await;
        world.fixture.agent.faults.lock().unwrap().clear();
    };
    let (saved, ()) = tokio::join!(world.save(&["a"]), meanwhile);
    saved.unwrap();
    world.check_released().await;
    world.end().await;
}
