//! Provides sample records for tests, also of other crates (feature `testing`).

use crate::StringMap;
use crate::container::{ContainerConfig, ContainerImage};
use crate::digest::Digest;
use crate::network::{Bandwidth, DnsConfig, PortMapping, Protocol};
use crate::pod::{PodConfig, PodKind, PodName};
use crate::record::{ContainerRecord, PodRecord};
use crate::resources::Resources;
use crate::security::{Capabilities, ContainerUser, PidMode, RunAs, SeccompPolicy};
use crate::state;
use nacelle_base::{ContainerId, PodId};
use std::net::IpAddr;
use std::sync::Arc;

/// Returns the record of a ready pod whose id is made of `n`.
pub fn pod(n: u8) -> PodRecord {
    PodRecord {
        id: PodId::from_bytes([n; 32]),
        config: Arc::new(PodConfig {
            name: PodName { name: "web".into(), namespace: "default".into(), uid: format!("u{n}"), attempt: 1 },
            handler: String::new(),
            hostname: "web".into(),
            log_directory: Some("/var/log/pods/web".into()),
            dns: Some(DnsConfig { servers: vec!["10.0.0.10".into()], searches: vec![], options: vec![] }),
            ports: vec![PortMapping { host_port: 8080, container_port: 80, protocol: Protocol::Tcp, host_ip: None }],
            bandwidth: Bandwidth::default(),
            labels: [("app".to_owned(), "web".to_owned())].into(),
            annotations: StringMap::new(),
            sysctls: StringMap::new(),
            shared_pid: true,
            kind: PodKind::default(),
            user_namespace: None,
            empty_dirs: None,
            checkpoint: None,
            socket_mounts: Vec::new(),
            privileged: false,
            memory_limit: Some(1 << 28),
            overhead_memory: None,
            overhead_cpu_milli: None,
            cpu_limit_milli: None,
            cgroup_parent: None,
        }),
        handler: "nacelle".into(),
        state: state::PodState::Ready,
        created_at: 5,
        was_ready: true,
        applies_profiles: false,
        ips: vec![IpAddr::from([10, 1, 2, 3])],
        kernel_release: "6.12.0".into(),
        failure: String::new(),
        left: vec![],
        timeline: vec![],
        ending: vec![],
        machine: None,
        resources: None,
        user: None,
        process: None,
        restored: None,
    }
}

/// Returns the record of an exited container whose id is made of `n`, in the pod of `of`.
pub fn container(n: u8, of: u8) -> ContainerRecord {
    ContainerRecord {
        id: ContainerId::from_bytes([n; 32]),
        pod: PodId::from_bytes([of; 32]),
        config: Arc::new(ContainerConfig {
            name: "c".into(),
            attempt: 0,
            image: "busybox".into(),
            user_image: "busybox".into(),
            command: vec!["/bin/sh".into()],
            args: vec!["-c".into(), "true".into()],
            working_dir: String::new(),
            envs: vec![("A".into(), "b".into())],
            labels: StringMap::new(),
            annotations: StringMap::new(),
            log_path: "c/0.log".into(),
            stdin: false,
            stdin_once: false,
            tty: false,
            stop_signal: None,
            stop_signal_name: String::new(),
            mounts: vec![],
            resources: Resources::default(),
            privileged: false,
            capabilities: Capabilities::default(),
            pid: PidMode::Pod,
            run_as: RunAs::default(),
            readonly_rootfs: false,
            no_new_privs: true,
            masked_paths: vec!["/proc/kcore".into()],
            readonly_paths: vec![],
            seccomp: SeccompPolicy::RuntimeDefault,
            apparmor: None,
            volumes: vec![],
            node_volumes: vec![],
            devices: vec![],
        }),
        resources: None,
        image: ContainerImage { id: Digest([7; 32]), reference: "docker.io/library/busybox@sha256:aa".into() },
        volumes: vec![],
        log_path: Some("/var/log/pods/web/c/0.log".into()),
        state: state::ContainerState::Exited,
        created_at: 6,
        started_at: 7,
        finished_at: 8,
        exit_code: 3,
        oom_killed: false,
        start_failed: false,
        message: String::new(),
        timeline: vec![],
        answered: false,
        user: Some(ContainerUser { uid: 1000, gid: 1000, groups: vec![5] }),
        stop_signal: None,
    }
}
