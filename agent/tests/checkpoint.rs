//! Tests holding a pod in a VM: all containers are frozen while the VM is saved. The tests need a guest image (`NACELLE_KERNEL`,
//! `NACELLE_INITRD`), and are skipped without; the test that saves a VM needs KVM too.

#[allow(dead_code, reason = "each test file uses a part of it")]
mod machine;

use machine::snapshot::{needs_kvm, restore, save};
use machine::{Guest, LIMIT, config, furnish, handshake, needs, place, spec};
use nacelle_engine::Engine;
use nacelle_engine::kvm::KvmEngine;
use nacelle_proto::agent::{
    ExecRequest, HoldRequest, HoldResponse, ReleaseRequest, RenewRequest, RestoreRequest, RestoredContainer,
    SignalRequest, WriteVolumeRequest,
};
use nacelle_proto::common::{ContainerRef, Empty, Stream};
use std::io::Read;
use std::sync::{Arc, Mutex};
use std::thread::{JoinHandle, sleep};
use std::time::{Duration, Instant};
use tonic::{Code, Status};

/// Prints the numbers from 1, as fast as it can.
const COUNT: &str = "i=0; while true; do i=$((i+1)); echo $i; done";

/// Longer than the lease of the tests that do not wait for its end.
const LONG_LEASE: u32 = 60_000;

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

fn exec(id: &str, exec_id: &str, script: &str) -> ExecRequest {
    let args = ["/bin/sh", "-c", script].map(str::to_owned).to_vec();
    ExecRequest { id: id.into(), exec_id: exec_id.into(), args, ..ExecRequest::default() }
}

fn kill(id: &str, exec_id: &str) -> SignalRequest {
    SignalRequest { id: id.into(), exec_id: exec_id.into(), signal: 9, all: false }
}

/// What a process has written to its stdout, read by a thread.
struct Output {
    text: Arc<Mutex<Vec<u8>>>,
    reader: JoinHandle<()>,
}

impl Output {
    fn of(guest: &Guest, id: &str, exec_id: &str) -> Output {
        let mut connection = guest.stream(id, exec_id, Stream::Stdout);
        let text = Arc::new(Mutex::new(Vec::new()));
        let to = Arc::clone(&text);
        let reader = std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            // A connection to a VM that has ended fails.
            while let Ok(read @ 1..) = connection.read(&mut buffer) {
                to.lock().unwrap().extend_from_slice(&buffer[..read]);
            }
        });
        Output { text, reader }
    }

    fn length(&self) -> usize {
        self.text.lock().unwrap().len()
    }

    /// Waits until the process has written more.
    fn wait_for_more(&self) {
        let (deadline, before) = (Instant::now() + LIMIT, self.length());
        while self.length() == before {
            assert!(Instant::now() < deadline, "the process does not run");
            sleep(Duration::from_millis(10));
        }
    }

    /// Waits until everything that a frozen process has written has arrived, and checks that no more follows. Returns its length.
    fn settle(&self) -> usize {
        let deadline = Instant::now() + LIMIT;
        let mut before = self.length();
        loop {
            sleep(Duration::from_secs(1));
            if self.length() == before {
                return before;
            }
            assert!(Instant::now() < deadline, "the process runs");
            before = self.length();
        }
    }

    /// Returns the numbers that a counter has printed, each with its line feed.
    fn numbers(&self) -> Vec<u64> {
        let text = self.text.lock().unwrap();
        let text = str::from_utf8(&text).unwrap();
        assert!(text.ends_with('\n'), "the last line is incomplete");
        text.lines().map(|line| line.parse().unwrap()).collect()
    }

    /// Reads to the end, and returns the numbers.
    fn finish(self) -> Vec<u64> {
        self.reader.join().unwrap();
        Output { text: self.text, reader: std::thread::spawn(|| ()) }.numbers()
    }
}

async fn hold(guest: &mut Guest, token: u8, lease_ms: u32) -> Result<HoldResponse, Status> {
    let request = HoldRequest { token: vec![token; 16], lease_ms };
    guest.agent.hold(request).await.map(tonic::Response::into_inner)
}

async fn release(guest: &mut Guest, token: u8) {
    guest.agent.release(ReleaseRequest { token: vec![token; 16] }).await.unwrap();
}

/// A request without a network, which the VMs of these tests do not have.
fn restore_request(containers: &[(&str, &str)]) -> RestoreRequest {
    let container =
        |(saved_id, id): &(&str, &str)| RestoredContainer { saved_id: (*saved_id).into(), id: (*id).into() };
    let containers = containers.iter().map(container).collect();
    RestoreRequest { hostname: "another".into(), containers, ..RestoreRequest::default() }
}

fn assert_conflict<T: std::fmt::Debug>(result: Result<T, Status>, text: &str) {
    let error = result.unwrap_err();
    assert_eq!(error.code(), Code::FailedPrecondition, "{error}");
    assert!(error.message().contains(text), "{error}");
}

#[test]
fn a_held_pod_is_frozen_and_its_output_is_complete() {
    runtime().block_on(async {
        let Some(mut guest) = Guest::boot(|_| ()).await else { return };
        guest.create("c1", COUNT, |_, _| ()).await;
        guest.create("created", COUNT, |_, _| ()).await;
        guest.start("c1").await;
        guest.agent.exec(exec("c1", "e1", COUNT)).await.unwrap();
        let (counter, command) = (Output::of(&guest, "c1", ""), Output::of(&guest, "c1", "e1"));
        counter.wait_for_more();
        command.wait_for_more();
        guest.agent.sync(Empty {}).await.unwrap();

        let held = hold(&mut guest, 1, LONG_LEASE).await.unwrap();
        assert_eq!(held, HoldResponse { running: vec!["c1".into()], undrained: vec![] });
        assert_eq!(hold(&mut guest, 1, LONG_LEASE).await.unwrap(), held);
        assert_conflict(hold(&mut guest, 2, LONG_LEASE).await, "held with another token");
        let (counted, written) = (counter.settle(), command.settle());

        // What changes nothing is served, and what changes the pod waits.
        assert_eq!(guest.agent.list_containers(Empty {}).await.unwrap().into_inner().containers.len(), 2);
        guest.agent.stats(Empty {}).await.unwrap();
        guest.agent.sync(Empty {}).await.unwrap();
        let mut other = guest.agent.clone();
        let start = tokio::spawn(async move { other.start_container(ContainerRef { id: "created".into() }).await });
        let mut other = guest.agent.clone();
        let (_, mut request) = machine::container("late", "");
        request.oci_spec = machine::container("late", "true").0.to_string().into_bytes();
        let create = tokio::spawn(async move { other.create_container(request).await });
        let tokenless = guest.agent.release(ReleaseRequest { token: vec![] }).await.unwrap_err();
        assert_eq!(tokenless.code(), Code::InvalidArgument, "{tokenless}");
        assert_conflict(guest.agent.restore(restore_request(&[("c1", "d1")])).await, "was not restored");
        release(&mut guest, 3).await;
        assert_eq!((counter.settle(), command.settle()), (counted, written));
        assert!(!start.is_finished() && !create.is_finished());
        for _ in 0..2 {
            release(&mut guest, 1).await;
        }
        start.await.unwrap().unwrap();
        create.await.unwrap().unwrap();
        counter.wait_for_more();
        command.wait_for_more();
        assert_conflict(hold(&mut guest, 1, LONG_LEASE).await, "use a new token");

        // A frozen container can be killed. Nothing is left of its output then: the host has read everything before.
        guest.agent.signal(kill("created", "")).await.unwrap();
        guest.end("created", "").await;
        let held = hold(&mut guest, 4, LONG_LEASE).await.unwrap();
        assert_eq!(held, HoldResponse { running: vec!["c1".into()], undrained: vec![] });
        let counted = counter.settle();
        guest.agent.signal(kill("c1", "")).await.unwrap();
        assert_eq!(guest.end("c1", "").await.code, 137);
        let text = Arc::clone(&counter.text);
        let numbers = counter.finish();
        assert_eq!(text.lock().unwrap().len(), counted);
        assert_eq!(numbers, (1..=numbers.len() as u64).collect::<Vec<_>>());
        release(&mut guest, 4).await;
        let (output, _) = guest.run("c2", "echo alive", |_, _| ()).await;
        assert_eq!(output, "alive\n");
    });
}

#[test]
fn a_hold_ends_with_its_lease_or_is_cancelled_or_refused() {
    runtime().block_on(async {
        let Some(mut guest) = Guest::boot(|_| ()).await else { return };
        for (length, lease_ms) in [(15, LONG_LEASE), (0, LONG_LEASE), (16, 999), (16, 60_001)] {
            let refused = guest.agent.hold(HoldRequest { token: vec![1; length], lease_ms }).await.unwrap_err();
            assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
        }
        guest.create("c1", COUNT, |_, _| ()).await;
        guest.create("quiet", "echo unread; sleep 1000", |_, _| ()).await;
        guest.start("c1").await;
        guest.start("quiet").await;
        let counter = Output::of(&guest, "c1", "");
        counter.wait_for_more();

        // Output that no client reads does not keep the pod from being held.
        let held = hold(&mut guest, 1, 1000).await.unwrap();
        assert_eq!(held, HoldResponse { running: vec!["c1".into(), "quiet".into()], undrained: vec!["quiet".into()] });
        counter.wait_for_more();
        let ended = hold(&mut guest, 1, LONG_LEASE).await;
        assert_conflict(ended, "its lease has ended");

        // A volume that is being written delays a hold, which is cancelled meanwhile.
        let (parts, stream) = tokio::sync::mpsc::channel(1);
        let mut other = guest.agent.clone();
        let stream = tokio_stream::wrappers::ReceiverStream::new(stream);
        let writing = tokio::spawn(async move { other.write_volume(stream).await });
        let part = |complete| WriteVolumeRequest { name: "volume".into(), tree: None, complete };
        parts.send(part(false)).await.unwrap();
        tokio::time::sleep(Duration::from_millis(500)).await;
        let mut other = guest.agent.clone();
        let request = HoldRequest { token: vec![2; 16], lease_ms: LONG_LEASE };
        let holding = tokio::spawn(async move { other.hold(request).await });
        tokio::time::sleep(Duration::from_millis(500)).await;
        assert!(!holding.is_finished());
        release(&mut guest, 2).await;
        assert_conflict(holding.await.unwrap(), "has been released");
        drop(parts);
        writing.await.unwrap().unwrap_err();
        // The same while the output is awaited, when the containers are frozen.
        let mut other = guest.agent.clone();
        let request = HoldRequest { token: vec![3; 16], lease_ms: LONG_LEASE };
        let holding = tokio::spawn(async move { other.hold(request).await });
        tokio::time::sleep(Duration::from_millis(500)).await;
        release(&mut guest, 3).await;
        assert_conflict(holding.await.unwrap(), "has been released");
        counter.wait_for_more();

        guest.agent.start_guest_shell(exec("c1", "shell", "sleep 1000")).await.unwrap();
        assert_conflict(hold(&mut guest, 4, LONG_LEASE).await, "a command runs in the guest");
        guest.agent.signal(kill("c1", "shell")).await.unwrap();
        guest.end("c1", "shell").await;

        // A container that is frozen on its own stays so.
        let file = "/sys/fs/cgroup/pod/c1/cgroup.freeze";
        guest.agent.start_guest_shell(exec("c1", "freeze", &format!("echo 1 >{file}"))).await.unwrap();
        assert_eq!(guest.end("c1", "freeze").await.code, 0);
        let counted = counter.settle();
        guest.create("c2", COUNT, |_, _| ()).await;
        guest.start("c2").await;
        let second = Output::of(&guest, "c2", "");
        second.wait_for_more();
        hold(&mut guest, 4, LONG_LEASE).await.unwrap();
        second.settle();
        release(&mut guest, 4).await;
        second.wait_for_more();
        assert_eq!(counter.settle(), counted);
        guest.agent.start_guest_shell(exec("c1", "thaw", &format!("echo 0 >{file}"))).await.unwrap();
        counter.wait_for_more();
    });
}

#[test]
fn a_restored_vm_is_held_until_it_becomes_another_pod() {
    if let Err(why) = needs_kvm() {
        return println!("skipped: {why}");
    }
    /// Long enough for the VM to be saved and restored.
    const LEASE: Duration = Duration::from_secs(30);
    runtime().block_on(async {
        let directory = tempfile::tempdir().unwrap();
        furnish(directory.path());
        let engine = KvmEngine::new();
        let spec = spec(needs().unwrap(), directory.path(), 1, Vec::new());
        let machine = engine.start(spec.check(&engine.limits()).unwrap()).unwrap();
        let (hello, report) = handshake(&*machine.link(), &config(), directory.path());
        assert_eq!(report.error, "");
        let mut source = Guest::of(machine, directory, hello, true).await;
        for id in ["c1", "c2", "left"] {
            source.create(id, COUNT, |_, _| ()).await;
            source.start(id).await;
        }
        source.create("created", COUNT, |_, _| ()).await;
        source.agent.exec(exec("c1", "e1", "sleep 1000; echo never")).await.unwrap();
        let counter = Output::of(&source, "c1", "");
        let others = ["c2", "left"].map(|id| Output::of(&source, id, ""));
        counter.wait_for_more();
        hold(&mut source, 1, LEASE.as_millis() as u32).await.unwrap();
        counter.settle();
        let last = *counter.numbers().last().unwrap();
        let snapshot = source.directory.path().join("snapshot");
        save(&*source.machine, &snapshot);
        let (machine, files) = restore(&snapshot, source.directory.path(), 1, Vec::new());
        source.machine.as_pausable().unwrap().resume().unwrap();
        release(&mut source, 1).await;
        counter.wait_for_more();

        place(&*machine, &files.path().join("image.erofs"), 0);
        machine.as_pausable().unwrap().resume().unwrap();
        let mut clone = Guest::of(machine, files, source.hello.clone(), false).await;
        let renew =
            RenewRequest { generation: vec![1; 16], time_unix_nanos: 2_000_000_000_000_000_000, entropy: vec![9; 32] };
        clone.agent.renew(renew).await.unwrap();
        tokio::time::sleep(LEASE + Duration::from_secs(2)).await;
        let refusals = [
            (restore_request(&[("c1", "d1"), ("none", "d2")]), Code::NotFound, "none did not run"),
            (restore_request(&[("created", "d1")]), Code::NotFound, "created did not run"),
            (restore_request(&[("c1", "d1"), ("c1", "d2")]), Code::InvalidArgument, "c1 twice"),
            (restore_request(&[("c1", "d1"), ("c2", "d1")]), Code::InvalidArgument, "d1 twice"),
            (restore_request(&[("c1", "../d")]), Code::InvalidArgument, "invalid id"),
        ];
        for (request, code, text) in refusals {
            let refused = clone.agent.restore(request).await.unwrap_err();
            assert!(refused.code() == code && refused.message().contains(text), "{refused}");
        }
        let request = restore_request(&[("c1", "d1"), ("c2", "d2")]);
        for _ in 0..2 {
            let restored = clone.agent.restore(request.clone()).await.unwrap().into_inner();
            assert_eq!(restored.kernel_release, clone.hello.kernel_release);
        }
        assert_conflict(clone.agent.restore(restore_request(&[("c1", "d3")])).await, "was not restored");

        // Only the named containers are there, by their new ids, and neither runs before it is started.
        let ids = |containers: Vec<String>| containers.into_iter().collect::<std::collections::BTreeSet<_>>();
        let expected = ids(vec!["d1".into(), "d2".into()]);
        let listed = clone.agent.list_containers(Empty {}).await.unwrap().into_inner().containers;
        assert_eq!(ids(listed.into_iter().map(|container| container.id).collect()), expected);
        let usage = clone.agent.stats(Empty {}).await.unwrap().into_inner().containers;
        assert!(usage.iter().all(|container| container.usage.is_some()), "{usage:?}");
        assert_eq!(ids(usage.into_iter().map(|container| container.id).collect()), expected);
        let (counter, second) = (Output::of(&clone, "d1", ""), Output::of(&clone, "d2", ""));
        assert_conflict(clone.agent.exec(exec("d1", "e2", "true")).await, "is not running");
        clone.create("d1", COUNT, |_, _| ()).await;
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!((counter.length(), second.length()), (0, 0), "the containers wait for their start");
        for _ in 0..2 {
            clone.start("d1").await;
        }
        counter.wait_for_more();
        assert_eq!(second.length(), 0);
        // One that has not been started does not count as running, and does not run after a hold.
        let held = hold(&mut clone, 5, LONG_LEASE).await.unwrap();
        assert_eq!(held.running, ["d1"]);
        release(&mut clone, 5).await;
        counter.wait_for_more();
        assert_eq!(second.length(), 0);
        clone.start("d2").await;
        second.wait_for_more();
        clone.agent.exec(exec("d2", "e1", "echo here")).await.unwrap();
        assert_eq!(clone.end("d2", "e1").await.code, 0);
        for _ in 0..2 {
            clone.agent.remove_container(ContainerRef { id: "d2".into() }).await.unwrap();
        }
        let old = clone.agent.remove_container(ContainerRef { id: "c1".into() }).await.unwrap_err();
        assert_eq!(old.code(), Code::InvalidArgument, "the id of the saved pod is no id any more: {old}");
        counter.wait_for_more();
        clone.agent.signal(kill("d1", "")).await.unwrap();
        assert_eq!(clone.end("d1", "").await.code, 137);
        drop(others);
        let numbers = counter.finish();
        let expected = (last + 1..).take(numbers.len()).collect::<Vec<_>>();
        assert_eq!(numbers, expected, "the output continues where it was cut");
    });
}
