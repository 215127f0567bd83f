//! Tests pods that continue from a checkpoint, on an engine whose guest is a function: the agent serves without a handshake, is renewed at
//! once, and becomes this pod when the network is known.

mod common;

use common::agent::{BootFault, RpcFault};
use common::{PodFixture, eventually, kind, network};
use nacelle_base::{Chain, ContainerId, FailureKind};
use nacelle_engine::fake::FakeEngine;
use nacelle_engine::{CheckedSpec, Engine, EngineError, EngineKind, Limits, Machine, Restorer, Snapshot};
use nacelle_pod::client::PodClient;
use nacelle_pod::spec::{CheckpointBase, CheckpointImage, CheckpointedContainer, EngineSpec, PodSpec};
use nacelle_proto::pod;
use std::fs::{self, File};
use std::path::PathBuf;
use std::time::Duration;
use tonic::Code;

const GRACE: Duration = Duration::from_secs(60);
/// The state of a VM with 16 MiB.
const DOCUMENT: &[u8] = include_bytes!("../../vmm/tests/corpus/snapshot/document-2");
const MEMORY_MIB: u8 = 64;

/// Continues saved machines by starting the guest, and boots none.
struct RestoringEngine(FakeEngine);

impl Engine for RestoringEngine {
    fn kind(&self) -> EngineKind {
        self.0.kind()
    }

    fn limits(&self) -> Limits {
        self.0.limits()
    }

    fn start(&self, _: CheckedSpec) -> Result<Box<dyn Machine>, EngineError> {
        panic!("a pod that continues does not boot")
    }

    fn as_restorer(&self) -> Option<&dyn Restorer> {
        Some(self)
    }
}

impl Restorer for RestoringEngine {
    fn start_template(&self, spec: CheckedSpec) -> Result<Box<dyn Machine>, EngineError> {
        self.0.start(spec)
    }

    fn restore(&self, spec: CheckedSpec, saved: Snapshot) -> Result<Box<dyn Machine>, EngineError> {
        assert_eq!(saved.memory_mib(), u32::from(MEMORY_MIB));
        self.0.start(spec)
    }

    fn restore_in_small_pages(&self, spec: CheckedSpec, _: Snapshot) -> Result<Box<dyn Machine>, EngineError> {
        self.0.start(spec)
    }
}

fn id(number: u8) -> ContainerId {
    ContainerId::from_bytes([number; 32])
}

/// Returns a file `state` of a VM with so much memory (docs/contributor/snapshots.md).
fn state(memory_mib: u8) -> Vec<u8> {
    let (before, after) = DOCUMENT.split_at(12);
    // Numbers below 24 have one byte in CBOR, and those below 256 have two.
    assert_eq!((before, after[0]), (&b"\xa2jmemory_mib"[..], 16));
    let document = [before, &[0x18, memory_mib], &after[1..]].concat();
    let version = 2_u32.to_le_bytes();
    let mut crc = !0_u32;
    for byte in version.iter().chain(&document) {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = (crc >> 1) ^ (0xedb8_8320 & (crc & 1).wrapping_neg());
        }
    }
    let (sum, length) = ((!crc).to_le_bytes(), (document.len() as u64).to_le_bytes());
    [&b"NACELLE\x1a"[..], &version, &sum, &length, &[0; 8], &document].concat()
}

/// A fixture with the files of a checkpoint.
fn world() -> PodFixture {
    let fixture = PodFixture::new();
    *fixture.agent.boot.lock().unwrap() = BootFault::Silent;
    let directory = checkpoint(&fixture);
    fs::create_dir(&directory).unwrap();
    fs::write(directory.join("state"), state(MEMORY_MIB)).unwrap();
    File::create(directory.join("memory")).unwrap().set_len(u64::from(MEMORY_MIB) << 20).unwrap();
    File::create(directory.join("scratch")).unwrap().set_len(16 << 20).unwrap();
    fs::write(directory.join("complete"), "").unwrap();
    fixture
}

fn checkpoint(fixture: &PodFixture) -> PathBuf {
    fixture.root.path().join("checkpoint")
}

async fn boot(fixture: &mut PodFixture) -> PodClient {
    let directory = checkpoint(fixture);
    let placed = |key: &str, partition, is_used| CheckpointImage {
        key: key.to_owned(),
        partition,
        offset: u64::from(partition) << 20,
        length: 8192,
        is_used,
    };
    let base = CheckpointBase {
        directory,
        booted_mib: MEMORY_MIB.into(),
        reserve_used_bytes: 128 << 20,
        containers: vec![CheckpointedContainer { saved_id: id(1), id: id(2) }],
        images: vec![placed("image", 5, true), placed("other", 2, false)],
    };
    let engine = RestoringEngine(common::engine(&fixture.agent));
    let change = |spec: &mut PodSpec| {
        spec.engine = EngineSpec::Kvm {};
        spec.checkpoint = Some(base);
    };
    fixture.boot_on(engine, change).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_continues_with_its_containers_and_images() {
    let mut fixture = world();
    let client = boot(&mut fixture).await;
    let agent = fixture.agent.clone();
    // The lease of the guest's hold runs, so it does not wait for the network.
    eventually("the guest is renewed", || agent.calls_of("renew") == 1).await;
    assert_eq!(agent.calls_of("restore"), 0);
    let configured = client.configure(network()).await.unwrap();
    assert!(configured.kernel_release.starts_with("6.12-fake") && configured.kernel_release.len() < 1000);
    assert!(!configured.from_template);
    let request = agent.restored.lock().unwrap().clone().unwrap();
    assert_eq!((request.hostname.as_str(), request.interfaces), ("pod-name", network().interfaces));
    assert_eq!(
        (request.containers[0].saved_id.clone(), request.containers[0].id.clone()),
        (id(1).to_string(), id(2).to_string())
    );
    assert!(agent.config.lock().unwrap().is_none(), "there is no handshake");
    eventually("the unused image is detached", || agent.calls_of("detach") == 1).await;

    let own = id(2).to_string();
    client.create_container(fixture.container(&own, "unused")).await.unwrap();
    assert_eq!(agent.images.lock().unwrap().get(&5), Some(&(5 << 20, 8192)), "the image keeps its place");
    let state = client.state().await.unwrap();
    assert_eq!((state.containers[0].phase(), state.containers[0].uid), (pod::ContainerPhase::Created, 1));
    fixture.set_log(&client, &own).await;
    client.start_container(&own).await.unwrap();
    eventually("its output", || fixture.log_text(&own).contains("stdout F continues")).await;
    // A new image gets a place and a number that no saved one has.
    let mut new = fixture.container("new", "hold");
    new.image_key = "new".into();
    client.create_container(new).await.unwrap();
    assert!(agent.images.lock().unwrap().keys().any(|partition| *partition != 5));
    client.stop_container(&own, Duration::ZERO).await.unwrap();
    client.remove_container(&own).await.unwrap();
    client.stop(GRACE).await.unwrap();
    fixture.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guest_that_cannot_become_this_pod_ends_it() {
    let mut fixture = world();
    fixture.agent.fault("restore", RpcFault::Refuse(Code::FailedPrecondition, "it was not restored".into()));
    let client = boot(&mut fixture).await;
    let error = client.configure(network()).await.unwrap_err();
    let text = Chain(&error).to_string();
    assert_eq!(kind::<()>(Err(error)), FailureKind::Conflict, "{text}");
    assert!(text.contains("the agent cannot become another pod: it was not restored"), "{text}");
    client.stop(GRACE).await.unwrap();
    fixture.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_is_stopped_before_its_network_is_known() {
    let mut fixture = world();
    let client = boot(&mut fixture).await;
    let agent = fixture.agent.clone();
    eventually("the guest is renewed", || agent.calls_of("renew") == 1).await;
    client.stop(GRACE).await.unwrap();
    assert_eq!(agent.calls_of("restore"), 0);
    fixture.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_state_that_is_no_such_vm_is_an_error_and_no_boot() {
    let (whole, other) = (state(MEMORY_MIB), state(MEMORY_MIB + 1));
    for state in [&whole[..100], b"", &other] {
        let mut fixture = world();
        fs::write(checkpoint(&fixture).join("state"), state).unwrap();
        let client = boot(&mut fixture).await;
        let error = Chain(&client.configure(network()).await.unwrap_err()).to_string();
        assert!(error.contains("its checkpoint cannot be read"), "{error}");
        assert_eq!(fixture.agent.calls_of("renew"), 0);
        client.stop(GRACE).await.unwrap();
        fixture.end().await;
    }
}
