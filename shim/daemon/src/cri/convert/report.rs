//! Converts records into CRI's lists, statuses and events, and applies the filters of lists.

use super::container::find_signal;
use super::users;
use crate::lifecycle::announce::{self, AnnouncedState};
use crate::lifecycle::{Event, EventKind, View};
use crate::metrics::labels::ExitReason;
use nacelle_image::{ImageRecord, ImageUser};
use nacelle_model::StringMap;
use nacelle_model::container::ContainerImage;
use nacelle_model::mount::{ImageVolume, MountOption, NodeVolume, Propagation};
use nacelle_model::namespace::UserNamespace;
use nacelle_model::record::{ContainerRecord, PodRecord};
use nacelle_model::resources::Resources;
use nacelle_model::state::ContainerState;
use nacelle_pod::protocol::{PodFeature, PodPeer};
use nacelle_proto::cri;
use std::collections::{BTreeSet, HashMap};

pub(super) fn map(pairs: &StringMap) -> HashMap<String, String> {
    pairs.iter().map(|(key, value)| (key.clone(), value.clone())).collect()
}

pub(super) fn matches_labels(labels: &StringMap, selector: &HashMap<String, String>) -> bool {
    selector.iter().all(|(key, value)| labels.get(key) == Some(value))
}

fn pod_state(pod: &PodRecord) -> cri::PodSandboxState {
    match announce::pod(pod) {
        Some(AnnouncedState::Running) => cri::PodSandboxState::SandboxReady,
        _ => cri::PodSandboxState::SandboxNotready,
    }
}

pub(super) fn pod_metadata(pod: &PodRecord) -> cri::PodSandboxMetadata {
    let name = &pod.config.name;
    cri::PodSandboxMetadata {
        name: name.name.clone(),
        uid: name.uid.clone(),
        namespace: name.namespace.clone(),
        attempt: name.attempt,
    }
}

/// Returns whether lists contain the pod.
pub fn is_visible(pod: &PodRecord) -> bool {
    announce::pod(pod).is_some()
}

/// Returns whether the pod matches the filter.
pub fn matches_pod_filter(pod: &PodRecord, filter: Option<&cri::PodSandboxFilter>) -> bool {
    let Some(filter) = filter else { return true };
    pod.id.as_str().starts_with(&filter.id)
        && filter.state.as_ref().is_none_or(|state| state.state() == pod_state(pod))
        && matches_labels(&pod.config.labels, &filter.label_selector)
}

/// Returns the pod's entry in a list.
pub fn pod(pod: &PodRecord) -> cri::PodSandbox {
    cri::PodSandbox {
        id: pod.id.to_string(),
        metadata: Some(pod_metadata(pod)),
        state: pod_state(pod).into(),
        created_at: pod.created_at,
        labels: map(&pod.config.labels),
        annotations: map(&pod.config.annotations),
        runtime_handler: pod.config.handler.clone(),
    }
}

/// Returns the pod's status.
pub fn pod_status(pod: &PodRecord) -> cri::PodSandboxStatus {
    let mut ips = pod.ips.iter().map(ToString::to_string);
    let node = pod.config.kind.node_namespaces();
    let own = |shared, own| if shared { cri::NamespaceMode::Node } else { own };
    let pid = if pod.config.shared_pid { cri::NamespaceMode::Pod } else { cri::NamespaceMode::Container };
    let options = cri::NamespaceOption {
        network: own(node.network, cri::NamespaceMode::Pod).into(),
        pid: own(node.pid, pid).into(),
        ipc: own(node.ipc, cri::NamespaceMode::Pod).into(),
        userns_options: pod.config.user_namespace.map(users::report),
        ..Default::default()
    };
    cri::PodSandboxStatus {
        id: pod.id.to_string(),
        metadata: Some(pod_metadata(pod)),
        state: pod_state(pod).into(),
        created_at: pod.created_at,
        network: Some(cri::PodSandboxNetworkStatus {
            ip: ips.next().unwrap_or_default(),
            additional_ips: ips.map(|ip| cri::PodIp { ip }).collect(),
        }),
        linux: Some(cri::LinuxPodSandboxStatus { namespaces: Some(cri::Namespace { options: Some(options) }) }),
        labels: map(&pod.config.labels),
        annotations: map(&pod.config.annotations),
        runtime_handler: pod.config.handler.clone(),
    }
}

/// Sorts containers for lists and statuses, the newest first: of several with one name, kubelet takes the first one for the
/// latest.
pub fn newest_first<'c>(containers: impl Iterator<Item = &'c ContainerRecord>) -> Vec<&'c ContainerRecord> {
    let mut shown: Vec<_> = containers.filter(|container| container_is_visible(container)).collect();
    shown.sort_by_key(|container| std::cmp::Reverse((container.created_at, container.config.attempt)));
    shown
}

/// Returns the statuses of a pod's containers.
pub fn container_statuses(view: &View) -> Vec<cri::ContainerStatus> {
    let users = view.pod.config.user_namespace;
    newest_first(view.containers.values()).into_iter().map(|container| container_status(container, users)).collect()
}

/// Converts an event, with the state of its pod at that time.
pub fn event(event: &Event) -> cri::ContainerEventResponse {
    let kind = match event.kind {
        EventKind::Created => cri::ContainerEventType::ContainerCreatedEvent,
        EventKind::Started => cri::ContainerEventType::ContainerStartedEvent,
        EventKind::Stopped => cri::ContainerEventType::ContainerStoppedEvent,
        EventKind::Deleted => cri::ContainerEventType::ContainerDeletedEvent,
    };
    cri::ContainerEventResponse {
        container_id: event.id.clone(),
        container_event_type: kind.into(),
        created_at: event.at,
        pod_sandbox_status: Some(pod_status(&event.view.pod)),
        containers_statuses: container_statuses(&event.view),
    }
}

/// Returns the JSON that `crictl inspectp` shows in addition to the status. `console` is the end of the guest's console output.
pub fn pod_info(view: &View, console: &str) -> serde_json::Value {
    let pod = &view.pod;
    let left: Vec<_> = pod.left.iter().map(|left| serde_json::json!({ "what": left.what, "why": left.why })).collect();
    serde_json::json!({
        "state": pod.state,
        "handler": pod.handler,
        "kernelRelease": pod.kernel_release,
        "failure": pod.failure,
        "timeline": pod.timeline,
        "ending": pod.ending,
        "console": console,
        "left": left,
        "hostname": pod.config.hostname,
        "containers": view.containers.len(),
        "machine": pod.machine,
        "shape": pod.config.kind.shape(),
        "resources": pod.resources,
        "process": view.peer().map(process_info),
    })
}

/// Returns the version of a pod's process.
fn process_info(peer: &PodPeer) -> serde_json::Value {
    let missing: Vec<_> = peer.missing_features().iter().map(PodFeature::name).collect();
    serde_json::json!({
        "version": peer.to_string(),
        "isSameVersion": peer.is_same_version(),
        "isCompatible": peer.is_compatible(),
        "missingFeatures": missing,
    })
}

fn container_state(container: &ContainerRecord) -> cri::ContainerState {
    match announce::container(container) {
        None | Some(AnnouncedState::Created) => cri::ContainerState::ContainerCreated,
        Some(AnnouncedState::Running) => cri::ContainerState::ContainerRunning,
        Some(AnnouncedState::Exited) => cri::ContainerState::ContainerExited,
    }
}

/// Returns whether lists contain the container.
pub fn container_is_visible(container: &ContainerRecord) -> bool {
    announce::container(container).is_some()
}

/// Returns whether the container matches the filter.
pub fn matches_container_filter(container: &ContainerRecord, filter: Option<&cri::ContainerFilter>) -> bool {
    let Some(filter) = filter else { return true };
    container.id.as_str().starts_with(&filter.id)
        && container.pod.as_str().starts_with(&filter.pod_sandbox_id)
        && filter.state.as_ref().is_none_or(|state| state.state() == container_state(container))
        && matches_labels(&container.config.labels, &filter.label_selector)
}

fn image_spec(container: &ContainerRecord) -> cri::ImageSpec {
    cri::ImageSpec {
        image: container.config.image.clone(),
        user_specified_image: container.config.user_image.clone(),
        ..Default::default()
    }
}

pub(super) fn metadata(container: &ContainerRecord) -> cri::ContainerMetadata {
    cri::ContainerMetadata { name: container.config.name.clone(), attempt: container.config.attempt }
}

/// Returns the container's entry in a list.
pub fn container(container: &ContainerRecord) -> cri::Container {
    let id = container.image.id.to_string();
    cri::Container {
        id: container.id.to_string(),
        pod_sandbox_id: container.pod.to_string(),
        metadata: Some(metadata(container)),
        image: Some(image_spec(container)),
        image_ref: id.clone(),
        state: container_state(container).into(),
        created_at: container.created_at,
        labels: map(&container.config.labels),
        annotations: map(&container.config.annotations),
        image_id: id,
    }
}

/// Returns the reason of a container's state, in the words that kubelet and users expect.
fn reason(container: &ContainerRecord) -> &'static str {
    match container.state {
        ContainerState::Exited => ExitReason::of(container).as_str(),
        _ => "",
    }
}

/// Returns the stop signal: as the request names it, or the effective one.
fn stop_signal(container: &ContainerRecord) -> cri::Signal {
    let config = &container.config;
    let number = config.stop_signal.or(container.stop_signal);
    let named = cri::Signal::from_str_name(&config.stop_signal_name);
    named.or_else(|| number.and_then(find_signal)).unwrap_or(cri::Signal::RuntimeDefault)
}

/// Returns the mounts in the order of the request. `users` is the user namespace of the pod.
fn mounts(container: &ContainerRecord, users: Option<UserNamespace>) -> Vec<cri::Mount> {
    let config = &container.config;
    let node_volume = |volume: &NodeVolume| match users.filter(|_| volume.id_mapped).map(users::report) {
        Some(users) => cri::Mount { uid_mappings: users.uids, gid_mappings: users.gids, ..node_volume(volume) },
        None => node_volume(volume),
    };
    let of_images = config.volumes.iter().zip(&container.volumes).map(volume);
    let mut mounts: Vec<cri::Mount> = of_images.chain(config.node_volumes.iter().map(node_volume)).collect();
    let position =
        |mount: &cri::Mount| config.mounts.iter().position(|sent| sent.container_path == mount.container_path);
    for mount in &mut mounts {
        let sent = position(mount).and_then(|position| config.mounts.get(position));
        mount.selinux_relabel = sent.is_some_and(|sent| sent.selinux_relabel);
    }
    // The volumes are in the order in which they are mounted.
    mounts.sort_by_key(position);
    mounts
}

/// Returns the container's status. `users` is the user namespace of its pod.
pub fn container_status(container: &ContainerRecord, users: Option<UserNamespace>) -> cri::ContainerStatus {
    let config = &container.config;
    let user = container.user.as_ref().map(|user| cri::ContainerUser {
        linux: Some(cri::LinuxContainerUser {
            uid: user.uid.into(),
            gid: user.gid.into(),
            supplemental_groups: user.groups.iter().map(|group| (*group).into()).collect(),
        }),
    });
    let id = container.image.id.to_string();
    cri::ContainerStatus {
        id: container.id.to_string(),
        metadata: Some(metadata(container)),
        state: container_state(container).into(),
        created_at: container.created_at,
        started_at: container.started_at,
        finished_at: container.finished_at,
        exit_code: container.exit_code,
        // kubelet shows this to users: the image's name, even if the container was requested by the image id of a pull.
        image: Some(cri::ImageSpec { image: config.user_image.clone(), ..image_spec(container) }),
        image_ref: container.image.reference.clone(),
        reason: reason(container).to_owned(),
        message: container.message.clone(),
        labels: map(&config.labels),
        annotations: map(&config.annotations),
        mounts: mounts(container, users),
        log_path: container.log_path.as_ref().map(|path| path.display().to_string()).unwrap_or_default(),
        resources: Some(cri::ContainerResources { linux: Some(resources(container.resources())), windows: None }),
        image_id: id,
        user,
        stop_signal: stop_signal(container).into(),
    }
}

/// Returns the mount of an image volume, which has no path on the node.
fn volume((volume, image): (&ImageVolume, &ContainerImage)) -> cri::Mount {
    cri::Mount {
        container_path: volume.container_path.clone(),
        readonly: true,
        recursive_read_only: volume.recursive_read_only,
        image: Some(cri::ImageSpec {
            image: volume.image.clone(),
            user_specified_image: volume.user_image.clone(),
            image_ref: image.id.to_string(),
            ..Default::default()
        }),
        image_sub_path: volume.sub_path.clone(),
        mount_options: mount_options(&volume.options),
        ..Default::default()
    }
}

fn node_volume(volume: &NodeVolume) -> cri::Mount {
    cri::Mount {
        container_path: volume.container_path.clone(),
        host_path: volume.host_path.clone(),
        readonly: volume.readonly,
        recursive_read_only: volume.recursive_read_only,
        propagation: match volume.propagation {
            Propagation::Private => cri::MountPropagation::PropagationPrivate,
            Propagation::FromNode => cri::MountPropagation::PropagationHostToContainer,
            Propagation::BothWays => cri::MountPropagation::PropagationBidirectional,
        }
        .into(),
        mount_options: mount_options(&volume.options),
        ..Default::default()
    }
}

fn mount_options(options: &BTreeSet<MountOption>) -> Vec<String> {
    options.iter().map(|option| option.word().to_owned()).collect()
}

fn resources(resources: &Resources) -> cri::LinuxContainerResources {
    cri::LinuxContainerResources {
        cpu_period: resources.cpu_period,
        cpu_quota: resources.cpu_quota,
        cpu_shares: resources.cpu_shares,
        memory_limit_in_bytes: resources.memory_limit,
        memory_swap_limit_in_bytes: resources.memory_swap_limit,
        oom_score_adj: resources.oom_score_adj,
        hugepage_limits: resources
            .hugepages
            .iter()
            .map(|(page_size, limit)| cri::HugepageLimit { page_size: page_size.clone(), limit: *limit })
            .collect(),
        unified: map(&resources.unified),
        cpuset_cpus: resources.cpuset_cpus.clone(),
        cpuset_mems: resources.cpuset_mems.clone(),
    }
}

/// Returns the image's entry in a list.
pub fn image(image: &ImageRecord) -> cri::Image {
    let (uid, username) = match &image.user {
        ImageUser::Uid(uid) => (Some(cri::Int64Value { value: *uid }), String::new()),
        ImageUser::Name(name) => (None, name.clone()),
    };
    cri::Image {
        id: image.id.to_string(),
        repo_tags: image.repo_tags.clone(),
        repo_digests: image.repo_digests.clone(),
        size: image.size,
        uid,
        username,
        spec: None,
        pinned: image.pinned,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacelle_model::testing::{container as container_record, pod as pod_record};
    use std::sync::Arc;

    #[test]
    fn filters_are_all_of_them_together() {
        let record = pod_record(1);
        let filter = |id: &str, state: Option<i32>, label: Option<(&str, &str)>| cri::PodSandboxFilter {
            id: id.into(),
            state: state.map(|state| cri::PodSandboxStateValue { state }),
            label_selector: label.map(|(k, v)| (k.to_owned(), v.to_owned())).into_iter().collect(),
        };
        let passes = |f| matches_pod_filter(&record, Some(&f));
        assert!(matches_pod_filter(&record, None));
        assert!(passes(filter("", None, None)));
        assert!(passes(filter("0101", Some(0), Some(("app", "web")))));
        assert!(!passes(filter("0101", Some(1), Some(("app", "web")))));
        assert!(!passes(filter("02", Some(0), None)));
        assert!(!passes(filter("", None, Some(("app", "db")))));
        assert!(!passes(filter("", None, Some(("none", "")))));

        let record = container_record(2, 1);
        let filter = |pod: &str, state| cri::ContainerFilter {
            pod_sandbox_id: pod.into(),
            state: Some(cri::ContainerStateValue { state }),
            ..Default::default()
        };
        assert!(matches_container_filter(&record, Some(&filter("01", 2))));
        assert!(!matches_container_filter(&record, Some(&filter("02", 2))));
        assert!(!matches_container_filter(&record, Some(&filter("01", 1))));
    }

    #[test]
    fn ends_have_the_words_that_kubelet_looks_for() {
        let ended = |change: fn(&mut ContainerRecord)| {
            let mut record = container_record(2, 1);
            change(&mut record);
            container_status(&record, None)
        };
        assert_eq!(ended(|r| r.exit_code = 0).reason, "Completed");
        assert_eq!(ended(|r| r.exit_code = 3).reason, "Error");
        assert_eq!(ended(|r| (r.exit_code, r.oom_killed) = (137, true)).reason, "OOMKilled");
        assert_eq!(ended(|r| r.start_failed = true).reason, "StartError");
        assert_eq!(ended(|r| r.state = ContainerState::Running).reason, "");
        let status = ended(|r| {
            let config = Arc::make_mut(&mut r.config);
            (config.image, config.user_image) = ("sha256:aa".into(), "busybox:1".into());
        });
        assert_eq!(status.image.unwrap().image, "busybox:1");
        let status = ended(|r| Arc::make_mut(&mut r.config).stop_signal = Some(3));
        assert_eq!(status.stop_signal(), cri::Signal::Sigquit);
        assert_eq!(ended(|_| ()).stop_signal(), cri::Signal::RuntimeDefault);
        let of_image = |record: &mut ContainerRecord| record.stop_signal = Some(10);
        assert_eq!(ended(of_image).stop_signal(), cri::Signal::Sigusr1);
        let status = ended(|r| {
            let config = Arc::make_mut(&mut r.config);
            (config.stop_signal, config.stop_signal_name) = (Some(6), "SIGNAL_SIGIOT".into());
        });
        assert_eq!(status.stop_signal(), cri::Signal::Sigiot);
        assert_eq!(status.image_id, container(&container_record(2, 1)).image_id);
        assert_eq!(status.log_path, "/var/log/pods/web/c/0.log");
        assert_eq!(status.user.unwrap().linux.unwrap().supplemental_groups, [5]);
        let status = ended(|r| {
            Arc::make_mut(&mut r.config).volumes = vec![ImageVolume {
                image: "sha256:aa".into(),
                user_image: "data:1".into(),
                sub_path: "etc".into(),
                container_path: "/data".into(),
                recursive_read_only: false,
                options: [MountOption::Noexec].into(),
            }];
            r.volumes = vec![r.image.clone()];
        });
        let [mount] = status.mounts.as_slice() else { panic!("{:?}", status.mounts) };
        assert!(mount.readonly && mount.host_path.is_empty() && mount.mount_options == ["noexec"]);
        assert_eq!((mount.container_path.as_str(), mount.image_sub_path.as_str()), ("/data", "etc"));
        assert_eq!(mount.image.as_ref().unwrap().image_ref, status.image_id);
    }

    #[test]
    fn mounts_come_back_as_they_were_sent() {
        use nacelle_model::namespace::IdRange;
        let range = IdRange { first: 65_536, count: 65_536 };
        let users = UserNamespace { users: range, groups: range };
        let mapping = vec![cri::IdMapping { host_id: 65_536, container_id: 0, length: 65_536 }];
        let plain =
            |at: &str| cri::Mount { container_path: at.into(), host_path: "/srv/data".into(), ..Default::default() };
        let mapped = cri::Mount { uid_mappings: mapping.clone(), gid_mappings: mapping, ..plain("/a/b/c") };
        let labelled = cri::Mount { selinux_relabel: true, ..plain("/z") };
        let image = cri::ImageSpec {
            image: "sha256:aa".into(),
            user_specified_image: "data:1".into(),
            image_ref: container_record(2, 1).image.id.to_string(),
            ..Default::default()
        };
        let of_image = cri::Mount { image: Some(image), readonly: true, ..plain("/i") };
        let of_image = cri::Mount { host_path: String::new(), ..of_image };
        let sent = vec![mapped, labelled, of_image, plain("/a")];
        let mut record = container_record(2, 1);
        let config = Arc::make_mut(&mut record.config);
        (config.volumes, config.node_volumes) = crate::cri::convert::volume::volumes(&sent, Some(users)).unwrap();
        config.mounts = crate::cri::convert::volume::mount_requests(&sent);
        record.volumes = vec![record.image.clone()];
        assert_eq!(container_status(&record, Some(users)).mounts, sent);
    }

    #[test]
    fn the_latest_of_one_name_comes_first() {
        let attempt = |id: u8, number: u32, at: i64| {
            let mut record = container_record(id, 1);
            Arc::make_mut(&mut record.config).attempt = number;
            record.created_at = at;
            record
        };
        let all = [attempt(7, 0, 100), attempt(5, 2, 300), attempt(9, 1, 200), attempt(8, 3, 300)];
        let order: Vec<u32> = newest_first(all.iter()).iter().map(|record| record.config.attempt).collect();
        assert_eq!(order, [3, 2, 1, 0]);
    }

    #[test]
    fn annotations_and_addresses_come_back_as_they_were() {
        let mut record = pod_record(1);
        record.ips.push(std::net::IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, 2]));
        Arc::make_mut(&mut record.config).annotations.insert("k".into(), "v\n é".into());
        let status = pod_status(&record);
        assert_eq!(status.annotations["k"], "v\n é");
        let network = status.network.unwrap();
        assert_eq!((network.ip.as_str(), network.additional_ips[0].ip.as_str()), ("10.1.2.3", "fd00::2"));
        assert_eq!(status.runtime_handler, "");
    }
}
