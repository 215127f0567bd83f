//! Tests the events of GetContainerEvents: their order, statuses and times, unrequested ends, and restarts of the daemon.

mod common;

use common::{Daemon, LIMIT, World, container_config, pod_config};
use nacelle_daemon::lifecycle::Events;
use nacelle_proto::cri;
use std::time::Duration;
use tonic::{Code, Status, Streaming};

const CREATED: i32 = 0;
const STARTED: i32 = 1;
const STOPPED: i32 = 2;
const DELETED: i32 = 3;

type EventResponse = cri::ContainerEventResponse;

/// A subscriber.
struct Subscriber {
    stream: Streaming<EventResponse>,
    last: i64,
}

impl Subscriber {
    async fn new(daemon: &mut Daemon) -> Subscriber {
        let stream = daemon.cri.get_container_events(cri::GetEventsRequest {}).await.unwrap().into_inner();
        Subscriber { stream, last: 0 }
    }

    /// Returns the next event, which must be later than all earlier ones.
    async fn try_next(&mut self) -> Result<EventResponse, Status> {
        let event = self.stream.message().await?.expect("an error tells why it ends");
        assert!(event.created_at > self.last, "{event:?}");
        self.last = event.created_at;
        Ok(event)
    }

    /// Returns the next event, which must be of this kind and this pod or container.
    #[track_caller]
    fn expect<'a>(&'a mut self, kind: i32, id: &'a str) -> impl Future<Output = EventResponse> + 'a {
        let caller = std::panic::Location::caller();
        async move {
            let event = tokio::time::timeout(LIMIT, self.try_next()).await.expect("an event comes").unwrap();
            assert_eq!((event.container_event_type, event.container_id.as_str()), (kind, id), "at {caller}: {event:?}");
            event
        }
    }
}

fn pod_state(event: &EventResponse) -> cri::PodSandboxState {
    event.pod_sandbox_status.as_ref().unwrap().state()
}

/// Returns the state and the exit code of a container in an event.
fn state(event: &EventResponse, id: &str) -> Option<(cri::ContainerState, i32)> {
    let found = event.containers_statuses.iter().find(|status| status.id == id);
    found.map(|status| (status.state(), status.exit_code))
}

#[test]
fn a_life_is_told_in_order_with_all_statuses_to_everybody() {
    use cri::ContainerState::*;
    use cri::PodSandboxState::*;
    let world = World::new();
    let mut daemon = world.daemon();
    world.run(async {
        let mut first = Subscriber::new(&mut daemon).await;
        let mut second = Subscriber::new(&mut daemon).await;
        let pod = daemon.run_pod("web").await.unwrap();
        let a = daemon.create(&pod, "a").await.unwrap();
        daemon.start(&a).await.unwrap();
        let b = daemon.create(&pod, "b").await.unwrap();
        daemon.start(&b).await.unwrap();
        // One container ends by itself, and one is stopped.
        world.pods.only().exit(&a, 5);
        for subscriber in [&mut first, &mut second] {
            let received = subscriber.expect(CREATED, &pod).await;
            let status = received.pod_sandbox_status.unwrap();
            assert_eq!(status.metadata.unwrap().uid, "uid-web");
            assert_eq!((status.network.unwrap().ip.as_str(), received.containers_statuses.len()), ("10.1.2.3", 0));
            let event = subscriber.expect(STARTED, &pod).await;
            assert_eq!(pod_state(&event), SandboxReady);
            let event = subscriber.expect(CREATED, &a).await;
            assert_eq!((state(&event, &a), pod_state(&event)), (Some((ContainerCreated, 0)), SandboxReady));
            let event = subscriber.expect(STARTED, &a).await;
            assert_eq!(state(&event, &a), Some((ContainerRunning, 0)));
            let event = subscriber.expect(CREATED, &b).await;
            assert_eq!(state(&event, &b), Some((ContainerCreated, 0)));
            let event = subscriber.expect(STARTED, &b).await;
            assert_eq!(event.containers_statuses.len(), 2);
            let event = subscriber.expect(STOPPED, &a).await;
            assert_eq!(state(&event, &a), Some((ContainerExited, 5)));
            assert_eq!(state(&event, &b), Some((ContainerRunning, 0)));
        }
        // A status that is requested now is newer than the event.
        let request = cri::PodSandboxStatusRequest { pod_sandbox_id: pod.clone(), verbose: false };
        let status = daemon.cri.pod_sandbox_status(request).await.unwrap().into_inner();
        assert!(status.timestamp >= first.last);
        assert_eq!(status.containers_statuses.len(), 2);

        daemon.remove(&a).await.unwrap();
        daemon.stop_pod(&pod).await.unwrap();
        daemon.stop_pod(&pod).await.unwrap();
        daemon.remove_pod(&pod).await.unwrap();
        for subscriber in [&mut first, &mut second] {
            let event = subscriber.expect(DELETED, &a).await;
            assert_eq!((state(&event, &a), state(&event, &b)), (None, Some((ContainerRunning, 0))));
            // The containers of a pod stop before the pod.
            let event = subscriber.expect(STOPPED, &b).await;
            assert_eq!((state(&event, &b), pod_state(&event)), (Some((ContainerExited, 137)), SandboxNotready));
            subscriber.expect(STOPPED, &pod).await;
            let event = subscriber.expect(DELETED, &b).await;
            assert!(event.containers_statuses.is_empty());
            let event = subscriber.expect(DELETED, &pod).await;
            let status = event.pod_sandbox_status.unwrap();
            assert_eq!(
                (status.id.as_str(), status.state(), status.metadata.unwrap().uid.as_str()),
                (&*pod, SandboxNotready, "uid-web")
            );
        }
    });
}

#[test]
fn what_was_undone_is_not_told() {
    let world = World::new();
    let mut daemon = world.daemon();
    world.run(async {
        let mut subscriber = Subscriber::new(&mut daemon).await;
        world.script.fail_named("configure", 1);
        daemon.run_pod("a").await.unwrap_err();
        let pod = daemon.run_pod("a").await.unwrap();
        world.script.fail_named("create", 1);
        daemon.create_named(&pod, "c").await.unwrap_err();
        world.script.fail_named("start", 1);
        let id = daemon.create(&pod, "c").await.unwrap();
        daemon.start(&id).await.unwrap_err();
        subscriber.expect(CREATED, &pod).await;
        subscriber.expect(STARTED, &pod).await;
        subscriber.expect(CREATED, &id).await;
        // This container never ran, and never will.
        let event = subscriber.expect(STOPPED, &id).await;
        assert_eq!(state(&event, &id), Some((cri::ContainerState::ContainerExited, 128)));
        // The same holds for a container whose creation fails late in the guest.
        world.script.fail_named("create", 1);
        let id = daemon.create(&pod, "e").await.unwrap();
        subscriber.expect(CREATED, &id).await;
        let event = subscriber.expect(STOPPED, &id).await;
        assert_eq!(state(&event, &id), Some((cri::ContainerState::ContainerExited, 128)));
        // A running container ends before its removal.
        let id = daemon.create(&pod, "d").await.unwrap();
        daemon.start(&id).await.unwrap();
        daemon.remove(&id).await.unwrap();
        subscriber.expect(CREATED, &id).await;
        subscriber.expect(STARTED, &id).await;
        let event = subscriber.expect(STOPPED, &id).await;
        assert_eq!(state(&event, &id), Some((cri::ContainerState::ContainerExited, 137)));
        subscriber.expect(DELETED, &id).await;
    });
}

#[test]
fn a_machine_that_dies_is_told_its_containers_first() {
    let world = World::new();
    let mut daemon = world.daemon();
    world.run(async {
        let mut subscriber = Subscriber::new(&mut daemon).await;
        let pod = daemon.run_pod("a").await.unwrap();
        let id = daemon.create(&pod, "c").await.unwrap();
        daemon.start(&id).await.unwrap();
        world.pods.alive().iter().for_each(|directory| world.pods.kill(directory));
        for (kind, id) in [(CREATED, &pod), (STARTED, &pod), (CREATED, &id), (STARTED, &id)] {
            subscriber.expect(kind, id).await;
        }
        let event = subscriber.expect(STOPPED, &id).await;
        assert_eq!(state(&event, &id), Some((cri::ContainerState::ContainerExited, 255)));
        let event = subscriber.expect(STOPPED, &pod).await;
        assert_eq!(pod_state(&event), cri::PodSandboxState::SandboxNotready);
    });
}

#[test]
fn what_happened_without_a_daemon_is_told_to_the_first_who_asks_the_next_one() {
    let world = World::new();
    let mut daemon = world.daemon();
    let (pod, runs, ends, cut, mut before) = world.run(async {
        let subscriber = Subscriber::new(&mut daemon).await;
        let pod = daemon.run_pod("a").await.unwrap();
        let mut ids = Vec::new();
        for name in ["runs", "ends", "cut"] {
            let id = daemon.create(&pod, name).await.unwrap();
            daemon.start(&id).await.unwrap();
            ids.push(id);
        }
        let [runs, ends, cut] = ids.try_into().unwrap();
        (pod, runs, ends, cut, subscriber)
    });
    // When the daemon dies, one container is being created and one removed.
    world.script.hang_at("remove");
    let mut other = Daemon { runtime: None, cri: daemon.cri.clone(), images: daemon.images.clone() };
    let id = cut.clone();
    let removing = world.spawn(async move { other.remove(&id).await });
    world.eventually("the guest is asked", || world.script.seen("remove"));
    world.run(async {
        for (kind, id) in [(CREATED, &pod), (STARTED, &pod)] {
            before.expect(kind, id).await;
        }
        for id in [&runs, &ends, &cut] {
            before.expect(CREATED, id).await;
            before.expect(STARTED, id).await;
        }
    });
    daemon.kill();
    removing.abort();
    assert!(!matches!(world.run(before.stream.message()), Ok(Some(_))));
    world.script.release();
    world.pods.only().exit(&ends, 9);

    let mut daemon = world.daemon();
    world.run(async {
        let mut first = Subscriber::new(&mut daemon).await;
        first.last = before.last;
        let mut received = Vec::new();
        while received.len() < 3 {
            received.push(first.try_next().await.unwrap());
        }
        let of = |id: &str| -> Vec<_> {
            received.iter().filter(|event| event.container_id == id).map(|event| event.container_event_type).collect()
        };
        assert_eq!((of(&ends), of(&cut)), (vec![STOPPED], vec![STOPPED, DELETED]), "{received:?}");
        assert_eq!(state(&received[2], &ends), Some((cri::ContainerState::ContainerExited, 9)));
        assert_eq!(state(&received[2], &runs), Some((cri::ContainerState::ContainerRunning, 0)));
        // A later subscriber gets the events from then on.
        let mut second = Subscriber::new(&mut daemon).await;
        world.pods.only().exit(&runs, 4);
        for subscriber in [&mut first, &mut second] {
            let event = subscriber.expect(STOPPED, &runs).await;
            assert_eq!(state(&event, &runs), Some((cri::ContainerState::ContainerExited, 4)));
        }
    });
}

#[test]
fn one_that_does_not_read_is_ended_with_the_reason_and_the_others_miss_nothing() {
    let world = World::new();
    let mut daemon = world.daemon_telling(Events::new(16, Duration::from_secs(600)));
    world.run(async {
        let mut slow = Subscriber::new(&mut daemon).await;
        let mut good = Subscriber::new(&mut daemon).await;
        drop(Subscriber::new(&mut daemon).await);
        // Large events soon fill the connection and the ring.
        let mut config = pod_config("a");
        config.annotations.insert("large".into(), "x".repeat(1_000_000));
        let request = cri::RunPodSandboxRequest { config: Some(config), runtime_handler: String::new() };
        let pod = daemon.cri.run_pod_sandbox(request).await.unwrap().into_inner().pod_sandbox_id;
        good.expect(CREATED, &pod).await;
        good.expect(STARTED, &pod).await;
        for n in 0..10 {
            let mut config = container_config("c");
            config.metadata.as_mut().unwrap().attempt = n;
            let request =
                cri::CreateContainerRequest { pod_sandbox_id: pod.clone(), config: Some(config), sandbox_config: None };
            let id = daemon.cri.create_container(request).await.unwrap().into_inner().container_id;
            daemon.start(&id).await.unwrap();
            daemon.stop(&id).await.unwrap();
            daemon.remove(&id).await.unwrap();
            for kind in [CREATED, STARTED, STOPPED, DELETED] {
                good.expect(kind, &id).await;
            }
        }
        let mut read = 0;
        let error = loop {
            match slow.try_next().await {
                Ok(_) => read += 1,
                Err(error) => break error,
            }
        };
        assert_eq!(error.code(), Code::ResourceExhausted, "{error}");
        assert!(error.message().contains("missed") && read < 42, "{read} read: {error}");
        // The client subscribes again and gets new events.
        let mut again = Subscriber::new(&mut daemon).await;
        daemon.remove_pod(&pod).await.unwrap();
        for subscriber in [&mut again, &mut good] {
            subscriber.expect(STOPPED, &pod).await;
            subscriber.expect(DELETED, &pod).await;
        }
    });
}

#[test]
fn events_are_later_than_those_of_the_last_daemon_although_the_clock_was_set_back() {
    let world = World::new();
    let run = world.config().paths.run;
    std::fs::create_dir_all(&run).unwrap();
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    let ahead = i64::try_from((now + Duration::from_secs(3600)).as_nanos()).unwrap();
    // As a daemon leaves it whose clock was an hour ahead.
    std::fs::write(run.join("last-event"), ahead.to_le_bytes()).unwrap();
    let mut daemon = world.daemon();
    world.run(async {
        let mut subscriber = Subscriber::new(&mut daemon).await;
        let pod = daemon.run_pod("web").await.unwrap();
        assert!(subscriber.expect(CREATED, &pod).await.created_at > ahead);
        let request = cri::PodSandboxStatusRequest { pod_sandbox_id: pod, verbose: false };
        assert!(daemon.cri.pod_sandbox_status(request).await.unwrap().into_inner().timestamp > ahead);
    });
}
