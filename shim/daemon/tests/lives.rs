//! Tests whole life cycles of pods and containers over CRI, on simulated pod processes.

mod common;

use common::{World, container_config, image, pod_config};
use nacelle_proto::cri;
use tonic::Code;

#[test]
fn a_pod_and_its_container_from_birth_to_end_with_every_verb_twice() {
    let world = World::new();
    let mut daemon = world.daemon();
    world.run(async {
        let pod = daemon.run_pod("web").await.unwrap();
        assert_eq!(daemon.run_pod("web").await.unwrap(), pod, "the same pod asked for again is the same pod");
        let status = daemon.pod_status(&pod).await.unwrap();
        assert_eq!(status.state(), cri::PodSandboxState::SandboxReady);
        let network = status.network.unwrap();
        assert_eq!((network.ip.as_str(), network.additional_ips[0].ip.as_str()), ("10.1.2.3", "fd00::3"));
        let asked = world.pods.only().configured.lock().unwrap().clone().unwrap();
        assert_eq!(asked.interfaces[0].addresses, ["10.1.2.3/24", "fd00::3/64"]);

        let id = daemon.create_named(&pod, "c").await.unwrap();
        assert_eq!(daemon.create_named(&pod, "c").await.unwrap(), id);
        let status = daemon.status(&id).await.unwrap();
        assert_eq!((status.state(), status.started_at), (cri::ContainerState::ContainerCreated, 0));
        let user = status.user.unwrap().linux.unwrap();
        assert_eq!((user.uid, user.gid, user.supplemental_groups), (7, 8, vec![9]));
        let made = world.pods.only().made.lock().unwrap()[0].clone();
        assert!(!made.image.is_empty() && made.image_key.starts_with("sha256:"));
        let spec: serde_json::Value = serde_json::from_slice(&made.oci_spec).unwrap();
        assert_eq!(spec["process"]["args"][0], "/bin/true");

        daemon.start(&id).await.unwrap();
        daemon.start(&id).await.unwrap();
        let status = daemon.status(&id).await.unwrap();
        assert_eq!(status.state(), cri::ContainerState::ContainerRunning);
        assert!(status.started_at >= status.created_at && status.created_at > 0);
        let done = daemon.exec(&id[..12], &["x"]).await.unwrap();
        assert_eq!((done.stdout.as_slice(), done.exit_code), (&b"out"[..], 3));
        daemon.cri.reopen_container_log(cri::ReopenContainerLogRequest { container_id: id.clone() }).await.unwrap();

        daemon.stop(&id).await.unwrap();
        daemon.stop(&id).await.unwrap();
        let status = daemon.status(&id).await.unwrap();
        assert_eq!((status.state(), status.exit_code), (cri::ContainerState::ContainerExited, 137));
        assert_eq!(daemon.start(&id).await.unwrap_err().code(), Code::FailedPrecondition);
        assert_eq!(daemon.exec(&id, &["x"]).await.unwrap_err().code(), Code::FailedPrecondition);
        daemon.remove(&id).await.unwrap();
        daemon.remove(&id).await.unwrap();
        daemon.stop(&id).await.unwrap();
        assert_eq!(daemon.status(&id).await.unwrap_err().code(), Code::NotFound);

        // A running container is removed with its pod.
        let id = daemon.create(&pod, "d").await.unwrap();
        daemon.start(&id).await.unwrap();
        daemon.stop_pod(&pod).await.unwrap();
        daemon.stop_pod(&pod).await.unwrap();
        assert_eq!(daemon.status(&id).await.unwrap().state(), cri::ContainerState::ContainerExited);
        let status = daemon.pod_status(&pod).await.unwrap();
        assert_eq!(status.state(), cri::PodSandboxState::SandboxNotready);
        assert_eq!(status.network.unwrap().ip, "");
        assert_eq!(daemon.create(&pod, "e").await.unwrap_err().code(), Code::FailedPrecondition);
        assert_eq!(daemon.run_pod("web").await.unwrap_err().code(), Code::AlreadyExists);
        daemon.remove_pod(&pod).await.unwrap();
        daemon.remove_pod(&pod).await.unwrap();
        daemon.stop_pod(&pod).await.unwrap();
        assert_eq!(daemon.pod_status(&pod).await.unwrap_err().code(), Code::NotFound);
        assert!(daemon.containers().await.is_empty());
    });
    assert_eq!(world.left(), Vec::<String>::new());
}

#[test]
fn a_container_is_stopped_after_any_time() {
    let world = World::new();
    let mut daemon = world.daemon();
    world.run(async {
        let pod = daemon.run_pod("web").await.unwrap();
        for (name, timeout) in [("longest", i64::MAX), ("none", 0), ("negative", i64::MIN)] {
            let id = daemon.create_named(&pod, name).await.unwrap();
            daemon.start(&id).await.unwrap();
            let request = cri::StopContainerRequest { container_id: id.clone(), timeout };
            daemon.cri.stop_container(request).await.unwrap();
            assert_eq!(daemon.status(&id).await.unwrap().state(), cri::ContainerState::ContainerExited, "{timeout}");
        }
        daemon.remove_pod(&pod).await.unwrap();
        assert!(daemon.pods().await.is_empty());
    });
}

#[test]
fn removing_a_ready_pod_stops_it_first() {
    let world = World::new();
    let mut daemon = world.daemon();
    world.run(async {
        let pod = daemon.run_pod("web").await.unwrap();
        let id = daemon.create(&pod, "c").await.unwrap();
        daemon.start(&id).await.unwrap();
        daemon.remove_pod(&pod).await.unwrap();
        assert!(daemon.pods().await.is_empty() && daemon.containers().await.is_empty());
        daemon.run_pod("web").await.unwrap();
    });
}

#[test]
fn lists_are_filtered() {
    let world = World::new();
    let mut daemon = world.daemon();
    world.run(async {
        let a = daemon.run_pod("a").await.unwrap();
        let b = daemon.run_pod("b").await.unwrap();
        daemon.stop_pod(&b).await.unwrap();
        let id = daemon.create(&a, "c").await.unwrap();
        let mut list = async |filter: cri::PodSandboxFilter| {
            let request = cri::ListPodSandboxRequest { filter: Some(filter) };
            let items = daemon.cri.list_pod_sandbox(request).await.unwrap().into_inner().items;
            items.into_iter().map(|pod| pod.id).collect::<Vec<_>>()
        };
        let state = |state: cri::PodSandboxState| cri::PodSandboxFilter {
            state: Some(cri::PodSandboxStateValue { state: state.into() }),
            ..Default::default()
        };
        assert_eq!(list(state(cri::PodSandboxState::SandboxReady)).await, [&*a]);
        assert_eq!(list(state(cri::PodSandboxState::SandboxNotready)).await, [&*b]);
        assert_eq!(list(cri::PodSandboxFilter { id: a[..10].to_owned(), ..Default::default() }).await, [&*a]);
        let filter = cri::ContainerFilter { pod_sandbox_id: a, ..Default::default() };
        let request = cri::ListContainersRequest { filter: Some(filter) };
        let found = daemon.cri.list_containers(request).await.unwrap().into_inner().containers;
        assert_eq!(found.iter().map(|c| c.id.as_str()).collect::<Vec<_>>(), [id]);
    });
}

#[test]
fn long_lists_come_in_pieces_and_say_the_same() {
    let world = World::new();
    let mut daemon = world.daemon();
    world.run(async {
        for (name, size) in [("a", 600_000), ("b", 600_000), ("c", 10)] {
            let mut config = pod_config(name);
            config.annotations.insert("large".into(), "x".repeat(size));
            config.labels.insert("size".into(), size.to_string());
            let request = cri::RunPodSandboxRequest { config: Some(config), runtime_handler: String::new() };
            let pod = daemon.cri.run_pod_sandbox(request).await.unwrap().into_inner().pod_sandbox_id;
            daemon.create(&pod, name).await.unwrap();
        }
        let large = cri::PodSandboxFilter {
            label_selector: [("size".to_owned(), "600000".to_owned())].into(),
            ..Default::default()
        };
        for (filter, sizes) in [(None, vec![2, 1]), (Some(large), vec![1, 1])] {
            let request = cri::ListPodSandboxRequest { filter: filter.clone() };
            let list = daemon.cri.list_pod_sandbox(request).await.unwrap().into_inner().items;
            let request = cri::StreamPodSandboxesRequest { filter };
            let mut stream = daemon.cri.stream_pod_sandboxes(request).await.unwrap().into_inner();
            let mut pieces = Vec::new();
            while let Some(piece) = stream.message().await.unwrap() {
                pieces.push(piece.pod_sandboxes);
            }
            assert_eq!(pieces.iter().map(Vec::len).collect::<Vec<_>>(), sizes);
            assert_eq!(pieces.concat(), list);
        }
        let containers = daemon.containers().await;
        for (filter, expected) in [
            (cri::ContainerFilter::default(), containers.clone()),
            (cri::ContainerFilter { id: containers[1].id.clone(), ..Default::default() }, vec![containers[1].clone()]),
            (cri::ContainerFilter { id: "none".into(), ..Default::default() }, vec![]),
        ] {
            let request = cri::StreamContainersRequest { filter: Some(filter) };
            let mut stream = daemon.cri.stream_containers(request).await.unwrap().into_inner();
            let first = stream.message().await.unwrap();
            assert_eq!(first.map(|piece| piece.containers).unwrap_or_default(), expected);
            assert!(stream.message().await.unwrap().is_none());
        }
        let images = daemon.images.list_images(cri::ListImagesRequest::default()).await.unwrap().into_inner().images;
        let request = cri::StreamImagesRequest::default();
        let mut stream = daemon.images.stream_images(request).await.unwrap().into_inner();
        assert_eq!(stream.message().await.unwrap().unwrap().images, images);
        assert!(stream.message().await.unwrap().is_none());
    });
}

#[test]
fn what_is_wrong_is_refused_with_its_code_and_changes_nothing() {
    let world = World::new();
    let mut daemon = world.daemon();
    world.run(async {
        let mut run = async |handler: &str, change: fn(&mut cri::PodSandboxConfig)| {
            let mut config = pod_config("a");
            change(&mut config);
            let request = cri::RunPodSandboxRequest { config: Some(config), runtime_handler: handler.into() };
            daemon.cri.run_pod_sandbox(request).await.map(drop)
        };
        let error = run("nonsense", |_| ()).await.unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument);
        assert!(
            error.message().contains("nonsense") && error.message().contains("huge, other, shaped, small"),
            "{error}"
        );
        let unknown = |c: &mut cri::PodSandboxConfig| drop(c.annotations.insert("vm.nacelle.dev/x".into(), "1".into()));
        let error = run("", unknown).await.unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument);
        assert!(error.message().contains("vm.nacelle.dev/cpus"), "{error}");
        let none = |c: &mut cri::PodSandboxConfig| drop(c.annotations.insert("vm.nacelle.dev/cpus".into(), "0".into()));
        let error = run("", none).await.unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument);
        assert!(error.message().contains("spec.domain.cpu.cores: Invalid value: 0: must be at least 1"), "{error}");
        let many =
            |c: &mut cri::PodSandboxConfig| drop(c.annotations.insert("vm.nacelle.dev/cpus".into(), "65".into()));
        let error = run("", many).await.unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument);
        assert!(error.message().contains("spec.domain.cpu is") && error.message().contains("at most 64"), "{error}");
        let host = |c: &mut cri::PodSandboxConfig| {
            let options = cri::NamespaceOption { network: 2, ..Default::default() };
            c.linux.as_mut().unwrap().security_context =
                Some(cri::LinuxSandboxSecurityContext { namespace_options: Some(options), ..Default::default() });
        };
        assert_eq!(run("", host).await.unwrap_err().code(), Code::FailedPrecondition);
        assert!(!world.script.seen("netns"));

        let unknown = "ab".repeat(32);
        assert_eq!(daemon.pod_status(&unknown).await.unwrap_err().code(), Code::NotFound);
        assert_eq!(daemon.status(&unknown).await.unwrap_err().code(), Code::NotFound);
        assert_eq!(daemon.start(&unknown).await.unwrap_err().code(), Code::NotFound);
        assert_eq!(daemon.exec(&unknown, &["x"]).await.unwrap_err().code(), Code::NotFound);
        assert_eq!(daemon.create(&unknown, "c").await.unwrap_err().code(), Code::NotFound);
        assert_eq!(daemon.stop_pod("").await.unwrap_err().code(), Code::InvalidArgument);

        let pod = daemon.run_pod("a").await.unwrap();
        let mut create = async |change: fn(&mut cri::ContainerConfig)| {
            let mut config = container_config("c");
            change(&mut config);
            let request =
                cri::CreateContainerRequest { pod_sandbox_id: pod.clone(), config: Some(config), sandbox_config: None };
            daemon.cri.create_container(request).await.map(drop)
        };
        let error = create(|c| c.image.as_mut().unwrap().image = "none:1".into()).await.unwrap_err();
        assert_eq!(error.code(), Code::NotFound);
        assert!(error.message().contains("none:1"), "{error}");
        let privileged = |c: &mut cri::ContainerConfig| {
            let security = cri::LinuxContainerSecurityContext { privileged: true, ..Default::default() };
            c.linux.as_mut().unwrap().security_context = Some(security);
        };
        assert_eq!(create(privileged).await.unwrap_err().code(), Code::InvalidArgument);
        assert!(daemon.containers().await.is_empty() && !world.script.seen("create"));
        let request = cri::CheckpointContainerRequest::default();
        let error = daemon.cri.checkpoint_container(request).await.unwrap_err();
        assert_eq!(error.code(), Code::Unimplemented);
        assert!(error.message().starts_with("CheckpointContainer "), "{error}");
    });
}

#[test]
fn a_name_is_taken_until_its_pod_is_removed() {
    let world = World::new();
    let mut daemon = world.daemon();
    world.run(async {
        let pod = daemon.run_pod("a").await.unwrap();
        let mut config = pod_config("a");
        config.hostname = "another".into();
        let request = cri::RunPodSandboxRequest { config: Some(config.clone()), runtime_handler: String::new() };
        let error = daemon.cri.run_pod_sandbox(request).await.unwrap_err();
        assert_eq!(error.code(), Code::AlreadyExists);
        assert!(error.message().contains(&pod), "{error}");
        config.metadata.as_mut().unwrap().attempt = 1;
        let request = cri::RunPodSandboxRequest { config: Some(config), runtime_handler: "other".into() };
        daemon.cri.run_pod_sandbox(request).await.unwrap();
        let id = daemon.create(&pod, "c").await.unwrap();
        daemon.start(&id).await.unwrap();
        let error = daemon.create(&pod, "c").await.unwrap_err();
        assert_eq!(error.code(), Code::AlreadyExists);
        assert!(error.message().contains(&id), "{error}");
    });
}

#[test]
fn the_runtime_says_what_it_is_and_what_is_missing() {
    let world = World::new();
    let mut daemon = world.daemon();
    world.run(async {
        let version = daemon.cri.version(cri::VersionRequest::default()).await.unwrap().into_inner();
        assert_eq!((version.runtime_name.as_str(), version.runtime_api_version.as_str()), ("nacelle", "v1"));
        world.script.fail_named("status", 1);
        let request = cri::StatusRequest { verbose: true };
        let status = daemon.cri.status(request).await.unwrap().into_inner();
        let conditions = status.status.unwrap().conditions;
        let network = conditions.iter().find(|c| c.r#type == "NetworkReady").unwrap();
        assert!(!network.status && network.message.contains("scripted"), "{network:?}");
        let runtime = conditions.iter().find(|c| c.r#type == "RuntimeReady").unwrap();
        assert!(!runtime.status && runtime.message.contains("/usr/bin/qemu"), "{runtime:?}");
        assert_eq!(status.runtime_handlers.len(), 5);
        assert!(serde_json::from_str::<serde_json::Value>(&status.info["config"]).is_ok());
        let config = daemon.cri.runtime_config(cri::RuntimeConfigRequest {}).await.unwrap().into_inner();
        assert_eq!(config.linux.unwrap().cgroup_driver(), cri::CgroupDriver::Cgroupfs);
        let cidr = |cidr: &str| cri::UpdateRuntimeConfigRequest {
            runtime_config: Some(cri::RuntimeConfig {
                network_config: Some(cri::NetworkConfig { pod_cidr: cidr.into() }),
            }),
        };
        daemon.cri.update_runtime_config(cidr("10.0.0.0/24,fd00::/64")).await.unwrap();
        let error = daemon.cri.update_runtime_config(cidr("10.0.0.0")).await.unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument);
    });
}

#[test]
fn an_artifact_is_a_volume_and_no_image_to_run() {
    let world = World::new();
    let id = image::load_artifact(&world);
    let mut daemon = world.daemon();
    let spec = |image: &str| Some(cri::ImageSpec { image: image.into(), ..Default::default() });
    world.run(async {
        let listed = daemon.images.list_images(cri::ListImagesRequest::default()).await.unwrap().into_inner().images;
        assert!(
            listed.iter().any(|listed| listed.id == id && listed.repo_tags == [image::ARTIFACT] && listed.size > 0)
        );
        let find = cri::ImageStatusRequest { image: spec(image::ARTIFACT), verbose: true };
        let found = daemon.images.image_status(find).await.unwrap().into_inner();
        assert_eq!(found.image.unwrap().id, id);
        assert!(found.info["info"].contains(image::ARTIFACT_TYPE), "{:?}", found.info);

        let pod = daemon.run_pod("a").await.unwrap();
        let create = |config| cri::CreateContainerRequest {
            pod_sandbox_id: pod.clone(),
            config: Some(config),
            sandbox_config: None,
        };
        for name in [image::ARTIFACT, &id] {
            let mut config = container_config("own");
            config.image = spec(name);
            let error = daemon.cri.create_container(create(config)).await.unwrap_err();
            assert_eq!(error.code(), Code::InvalidArgument, "{error}");
            for words in [image::ARTIFACT, image::ARTIFACT_TYPE, "image volume"] {
                assert!(error.message().contains(words), "{error}");
            }
        }
        let mut config = container_config("c");
        config.mounts = vec![cri::Mount {
            container_path: "/models".into(),
            readonly: true,
            image: spec(&id),
            ..Default::default()
        }];
        let container = daemon.cri.create_container(create(config)).await.unwrap().into_inner().container_id;
        daemon.start(&container).await.unwrap(); // It waits for the creation.
        let asked = world.pods.only().made.lock().unwrap()[0].clone();
        assert_eq!((asked.volumes[0].image_key.as_str(), asked.volumes[0].image.len()), (id.as_str(), 2));
        daemon.images.remove_image(cri::RemoveImageRequest { image: spec(&id) }).await.unwrap();
        let piece = asked.volumes[0].image[1].path.clone();
        assert!(std::path::Path::new(&piece).exists(), "still in use");
        daemon.remove(&container).await.unwrap();
        tokio::task::spawn_blocking(move || {
            let deadline = std::time::Instant::now() + common::LIMIT;
            while std::path::Path::new(&piece).exists() {
                assert!(std::time::Instant::now() < deadline, "never collected");
                std::thread::sleep(std::time::Duration::from_millis(10));
            }
        })
        .await
        .unwrap();
    });
}

#[test]
fn images_are_listed_found_kept_while_used_and_removed() {
    let world = World::new();
    let mut daemon = world.daemon();
    let spec = |image: &str| Some(cri::ImageSpec { image: image.into(), ..Default::default() });
    world.run(async {
        let listed = daemon.images.list_images(cri::ListImagesRequest::default()).await.unwrap().into_inner().images;
        assert_eq!(listed.len(), 1);
        let id = listed[0].id.clone();
        assert_eq!(listed[0].repo_tags, [image::NAME]);
        let find = |name: &str| cri::ImageStatusRequest { image: spec(name), verbose: true };
        let found = daemon.images.image_status(find(&id)).await.unwrap().into_inner();
        assert_eq!(found.image.unwrap().id, id);
        assert!(found.info["info"].contains("/hello"));
        assert!(daemon.images.image_status(find("none:1")).await.unwrap().into_inner().image.is_none());
        let info = daemon.images.image_fs_info(cri::ImageFsInfoRequest {}).await.unwrap().into_inner();
        assert!(info.image_filesystems[0].used_bytes.as_ref().unwrap().value > 0);

        let pod = daemon.run_pod("a").await.unwrap();
        let mut config = container_config("c");
        config.mounts = vec![cri::Mount {
            container_path: "/data".into(),
            readonly: true,
            image: spec(image::NAME),
            image_sub_path: "sub".into(),
            ..Default::default()
        }];
        let create = |config| cri::CreateContainerRequest {
            pod_sandbox_id: pod.clone(),
            config: Some(config),
            sandbox_config: None,
        };
        let made = daemon.cri.create_container(create(config.clone())).await.unwrap().into_inner();
        let container = made.container_id;
        let again = daemon.cri.create_container(create(config.clone())).await.unwrap().into_inner();
        assert_eq!(again.container_id, container);
        config.mounts[0].image = spec("none:1");
        let error = daemon.cri.create_container(create(config)).await.unwrap_err();
        assert_eq!(error.code(), Code::NotFound, "{error}");
        let status = daemon.status(&container).await.unwrap();
        assert_eq!((status.image_id.as_str(), status.mounts[0].container_path.as_str()), (id.as_str(), "/data"));
        assert_eq!(status.mounts[0].image.as_ref().unwrap().image_ref, id);
        let asked = world.pods.only().made.lock().unwrap()[0].clone();
        assert_eq!((asked.volumes[0].image_key.as_str(), asked.volumes[0].sub_path.as_str()), (id.as_str(), "sub"));
        assert_eq!(asked.volumes[0].image, asked.image);
        let remove = || cri::RemoveImageRequest { image: spec(image::NAME) };
        daemon.images.remove_image(remove()).await.unwrap();
        daemon.images.remove_image(remove()).await.unwrap();
        assert!(daemon.images.image_status(find(&id)).await.unwrap().into_inner().image.is_none());
        let pieces = world.pods.only().made.lock().unwrap()[0].image.clone();
        assert!(pieces.iter().all(|piece| std::path::Path::new(&piece.path).exists()), "still in use");
        daemon.remove(&container).await.unwrap();
        let path = pieces[0].path.clone();
        tokio::task::spawn_blocking(move || {
            let deadline = std::time::Instant::now() + common::LIMIT;
            while std::path::Path::new(&path).exists() {
                assert!(std::time::Instant::now() < deadline, "never collected");
                std::thread::sleep(std::time::Duration::from_millis(5));
            }
        })
        .await
        .unwrap();
        let error = daemon.images.pull_image(cri::PullImageRequest { image: spec("Not A Name"), ..Default::default() });
        assert_eq!(error.await.unwrap_err().code(), Code::InvalidArgument);
    });
}

#[test]
fn many_at_once_do_not_mix() {
    let world = World::new();
    let daemon = world.daemon();
    let tasks: Vec<_> = (0..8)
        .map(|n| {
            let mut daemon = common::Daemon { runtime: None, cri: daemon.cri.clone(), images: daemon.images.clone() };
            world.spawn(async move {
                let name = format!("pod-{n}");
                let mut twin = common::Daemon { runtime: None, cri: daemon.cri.clone(), images: daemon.images.clone() };
                let (pod, same) = tokio::join!(daemon.run_pod(&name), twin.run_pod(&name));
                let pod = pod.unwrap();
                assert_eq!(same.unwrap(), pod);
                let (a, b) = tokio::join!(daemon.create(&pod, "a"), twin.create(&pod, "b"));
                let (a, b) = (a.unwrap(), b.unwrap());
                daemon.start(&a).await.unwrap();
                let (stop, remove) = tokio::join!(daemon.stop(&a), twin.remove(&b));
                stop.unwrap();
                remove.unwrap();
                let (stop, remove) = tokio::join!(daemon.stop_pod(&pod), twin.remove_pod(&pod));
                stop.unwrap();
                remove.unwrap();
            })
        })
        .collect();
    world.run(async {
        for task in tasks {
            task.await.unwrap();
        }
    });
    assert_eq!(world.left(), Vec::<String>::new());
}
