//! Tests that the daemon opens the logs of containers and hands them to the pod process, which here writes one line to each.

mod common;

use common::{World, container_config, pod_config};
use nacelle_proto::cri;
use std::fs;
use tonic::Code;

#[test]
fn a_container_writes_to_the_log_that_has_its_name() {
    let world = World::new();
    let mut daemon = world.daemon();
    world.run(async {
        let logs = world.root.path().join("logs");
        let log_directory = logs.to_str().unwrap().to_owned();
        let config = Some(cri::PodSandboxConfig { log_directory, ..pod_config("logged") });
        let request = cri::RunPodSandboxRequest { config, runtime_handler: String::new() };
        let pod = daemon.cri.run_pod_sandbox(request).await.unwrap().into_inner().pod_sandbox_id;
        let config = |name: &str, path: &str| cri::ContainerConfig { log_path: path.into(), ..container_config(name) };
        let id = daemon.create_from(&pod, config("c", "c/0.log")).await.unwrap();
        let log = logs.join("c/0.log");
        assert!(!log.exists(), "it is opened when the container starts");
        daemon.start(&id).await.unwrap();
        let line = format!("the log of {id}\n");
        assert_eq!(fs::read_to_string(&log).unwrap(), line);
        // kubelet renames the log and asks for a new one.
        fs::rename(&log, log.with_extension("old")).unwrap();
        let reopen = cri::ReopenContainerLogRequest { container_id: id.clone() };
        daemon.cri.reopen_container_log(reopen.clone()).await.unwrap();
        assert_eq!(fs::read_to_string(&log).unwrap(), line);
        // Another program removes the directory of logs, and may create it again.
        for created in [true, false] {
            fs::remove_dir_all(&logs).unwrap();
            if created {
                fs::create_dir(&logs).unwrap();
            }
            daemon.cri.reopen_container_log(reopen.clone()).await.unwrap();
            assert_eq!(fs::read_to_string(&log).unwrap(), line);
        }
        daemon.stop(&id).await.unwrap();
        let late = daemon.cri.reopen_container_log(reopen).await.unwrap_err();
        assert_eq!(late.code(), Code::FailedPrecondition, "{late}");

        // A log that cannot be opened is the reason why its container does not start.
        std::os::unix::fs::symlink(world.root.path().join("elsewhere"), logs.join("linked")).unwrap();
        let id = daemon.create_from(&pod, config("linked", "linked/0.log")).await.unwrap();
        let refused = daemon.start(&id).await.unwrap_err();
        assert!(refused.message().contains("cannot prepare the log of the container"), "{refused}");
        let status = daemon.status(&id).await.unwrap();
        assert_eq!((status.state(), status.reason.as_str()), (cri::ContainerState::ContainerExited, "StartError"));
        assert!(status.message.contains("linked"), "{}", status.message);
    });
}
