//! Creates, starts, stops and removes containers in the guest: the effects behind the states of containers. The effects run as
//! tasks of their own, each with a deadline, and send their results to the pod's actor.

use super::boot::blocking;
use super::error::{LifecycleError, StepError, at};
use super::{Parts, clip};
use super::{devices, disks, machine, memory, pushed};
use crate::oci::{self, DeviceNode};
use nacelle_base::files::{self, FileError};
use nacelle_base::machine::{Extent, ImageDisk};
use nacelle_base::{Chain, Classify, ContainerId, Kind, share};
use nacelle_machines::machine_pod::{self, Passed};
use nacelle_model::container::ContainerConfig;
use nacelle_model::mount::{MountOption, NodeVolume, Propagation};
use nacelle_model::namespace::{IdRange, UserNamespace};
use nacelle_model::pod::PodConfig;
use nacelle_model::record::{ContainerRecord, PodRecord};
use nacelle_model::resources::VmResources;
use nacelle_model::security::{ContainerUser, PidMode};
use nacelle_pod::client::{ClientError, Offer, PodClient};
use nacelle_pod::share::{self as shares, Owners, Taker, Volume, VolumeAccess};
use nacelle_proto::{common, pod as proto};
use std::future::Future;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;

/// Pause between attempts to remove a container that is still being created.
const PAUSE: Duration = Duration::from_millis(50);
/// The largest number of a user's groups in a report of a pod process; Linux allows 65536.
const MAX_GROUPS: usize = 65536;

/// Sends a request to a pod process, with a time limit.
pub(crate) async fn ask<T>(
    step: &'static str,
    limit: Duration,
    call: impl Future<Output = Result<T, ClientError>>,
) -> Result<T, LifecycleError> {
    timeout(limit, call).await.map_err(|_elapsed| LifecycleError::TooSlow { step, limit })?.map_err(at(step))
}

/// Returns whether the pod process does not know the container.
fn is_unknown(error: &LifecycleError) -> bool {
    matches!(error, LifecycleError::Step { source: StepError::Pod(_), .. }) && error.kind() == Kind::NotFound
}

/// A container that is completely prepared on the node, with its volumes shared: only the guest's part is left.
pub(super) struct Prepared {
    request: proto::CreateContainerRequest,
    client: PodClient,
    /// Block devices and disks that were sent to the pod process already.
    offers: Vec<Offer>,
    /// The PCI devices of a machine pod's machine.
    passed: Option<Passed>,
    /// A volume is mounted in `/sys`, whose paths only the kernel of the containers knows.
    in_sysfs: bool,
}

impl Prepared {
    /// Returns whether the creation can no longer fail because of the request: it depends neither on the contents of images
    /// (names of users, paths in volumes) nor on the VM (device slots, paths in sysfs).
    pub(super) fn is_certain(&self) -> bool {
        let numbers = |user: &str| user.chars().all(|c| c.is_ascii_digit() || c == ':');
        self.offers.is_empty()
            && !self.in_sysfs
            && self.passed.as_ref().is_none_or(Passed::is_empty)
            && numbers(&self.request.user)
            && self.request.volumes.iter().all(|volume| volume.sub_path.is_empty())
    }
}

/// A volume that is part of the VM, and its disk, if it has one.
type OwnVolume = (proto::EmptyDir, Option<(proto::BlockDevice, OwnedFd)>);

/// Prepares the container on the node. On failure its volumes are detached.
pub(super) async fn prepare(
    parts: &Parts,
    client: PodClient,
    pod: &PodRecord,
    record: &ContainerRecord,
) -> Result<Prepared, LifecycleError> {
    if let Some(machine) = &pod.config.machine {
        if let Some(vm) = &pod.config.vm {
            // Recorded before a disk refers to the images: they are kept as long as the disk.
            let images = machine_pod::images_under(machine, &record.config, &record.volumes, &record.image);
            parts.vms.of_images(vm, images).await.map_err(at("keep the images of the machine"))?;
        }
        let (request, offers, passed) = machine::prepare(parts, &client, pod, machine, record).await?;
        return Ok(Prepared { request, client, offers, passed: Some(passed), in_sysfs: false });
    }
    let asked = Arc::clone(&record.config);
    let mut found =
        blocking(move || resolve(&asked)).await.map_err(at("find the volumes of the container on the node"))?;
    let taker = taker(parts, pod);
    let mut blocks = Vec::new();
    let nodes = if taker == Taker::Share {
        // CPU numbers of the node mean nothing in the guest.
        found.resources = found.resources.in_guest();
        let asked = found.clone();
        let of_guest = blocking(move || devices::of_guest(&asked)).await?;
        blocks = of_guest.blocks;
        of_guest.nodes
    } else {
        // No device nodes can be created in a user namespace.
        let privileged = (found.privileged && pod.config.user_namespace.is_none()).then_some(Path::new("/dev"));
        devices::of_node(&found, privileged)?
    };
    let (id, looked) = (record.id.clone(), found.node_volumes.clone());
    let plan = match taker {
        Taker::Share if !looked.is_empty() => {
            let plan = blocking(move || Ok::<_, FileError>(pushed::plan(&id, &looked))).await;
            plan.map_err(at("look at the volumes of the container"))?
        }
        _ => looked.iter().map(|_shared| None).collect(),
    };
    let mut own = own_volumes(parts, pod, record, &found).await?;
    for disk in own.iter_mut().flatten() {
        blocks.extend(disk.1.take());
    }
    let own: Vec<_> = own.into_iter().map(|own| own.map(|(volume, _)| volume)).collect();
    let prepared = async {
        for (taker, pushed) in [(taker, false), (Taker::Pushed, true)] {
            let ways = plan.iter().zip(&own);
            let volumes = found.node_volumes.iter().zip(ways);
            let volumes = volumes.filter(|(_, (plan, own))| plan.is_some() == pushed && own.is_none());
            let volumes: Vec<_> = volumes.map(|(volume, _)| shared(volume, &pod.config)).collect();
            if !volumes.is_empty() {
                let attached = parts.pods.attach(&parts.pod_dir(&pod.id), taker, record.id.as_str(), volumes).await;
                attached.map_err(at("share the volumes of the container with the pod"))?;
            }
        }
        let marks = taker == Taker::Share && pod.config.user_namespace.is_none();
        let found = as_found(found, &record.id, &plan, &own, marks);
        let pushed = plan.into_iter().flatten().collect();
        let mut request = request(parts, pod, record, &found, &nodes, pushed).await?;
        request.empty_dirs = own.into_iter().flatten().collect();
        let mut offers = Vec::with_capacity(blocks.len());
        for (device, file) in blocks {
            let call = client.offer(record.id.as_str(), &device.container_path, file);
            offers.push(ask("hand a device over to the pod", parts.answer_limit(), call).await?);
            request.devices.push(device);
        }
        Ok((request, offers))
    };
    let in_sysfs =
        record.config.node_volumes.iter().any(|volume| Path::new(&volume.container_path).starts_with("/sys"));
    match prepared.await {
        Ok((request, offers)) => Ok(Prepared { request, client, offers, passed: None, in_sysfs }),
        Err(error) => {
            take_back(parts, pod, record).await;
            Err(error)
        }
    }
}

/// Creates the container in the guest. On failure its volumes are detached.
pub(super) async fn make(
    parts: Arc<Parts>,
    pod: PodRecord,
    record: ContainerRecord,
    prepared: Prepared,
) -> Result<ContainerUser, LifecycleError> {
    let Prepared { request, client, offers, passed, in_sysfs: _ } = prepared;
    let pushed = !request.pushed.is_empty();
    let mut made = ask("make the container", parts.answer_limit(), client.create_container(request)).await;
    // Only now: another machine of the pod may have held its own devices until the creation.
    if let (Ok(_), Some(passed)) = (&made, passed)
        && let Err(error) = machine::pass(&parts, &pod, passed).await
    {
        made = Err(error);
    }
    // By now the container holds the disks, or nothing does.
    drop(offers);
    match made {
        Ok(made) => {
            if pushed {
                // The pod process has read the copied-in volumes, or keeps them open.
                take_back_from(&parts, &pod, &record, Taker::Pushed).await;
            }
            let groups = made.supplemental_groups.into_iter().take(MAX_GROUPS).collect();
            Ok(ContainerUser { uid: made.uid, gid: made.gid, groups })
        }
        Err(error) => {
            take_back(&parts, &pod, &record).await;
            Err(error)
        }
    }
}

/// Detaches the volumes of a container whose creation failed.
pub(super) async fn take_back(parts: &Parts, pod: &PodRecord, record: &ContainerRecord) {
    for taker in takers(parts, pod, &record.config) {
        take_back_from(parts, pod, record, *taker).await;
    }
}

async fn take_back_from(parts: &Parts, pod: &PodRecord, record: &ContainerRecord, taker: Taker) {
    if let Err(error) = parts.pods.detach(&parts.pod_dir(&pod.id), taker, record.id.as_str()).await {
        tracing::warn!(container = %record.id, "its volumes could not be taken back: {}", Chain(&error));
    }
}

/// Returns the processes that may hold volumes of a container.
fn takers(parts: &Parts, pod: &PodRecord, config: &ContainerConfig) -> &'static [Taker] {
    match taker(parts, pod) {
        _ if config.node_volumes.is_empty() => &[],
        _ if pod.config.machine.as_ref().is_some_and(|machine| machine.filesystems.is_empty()) => &[],
        Taker::Share | Taker::Pushed if pod.config.machine.is_some() => &[Taker::Share],
        Taker::Share | Taker::Pushed => &[Taker::Share, Taker::Pushed],
        Taker::Agent => &[Taker::Agent],
    }
}

/// Builds the creation request for the pod process.
async fn request(
    parts: &Parts,
    pod: &PodRecord,
    record: &ContainerRecord,
    config: &ContainerConfig,
    devices: &[DeviceNode],
    pushed: Vec<proto::PushedVolume>,
) -> Result<proto::CreateContainerRequest, LifecycleError> {
    let root = parts.images.rootfs(&record.image.id).await.map_err(at("read the image of the container"))?;
    let spec = oci::spec(&pod.config, config, &root.config, &pod.kernel_release, devices);
    let spec = spec.map_err(at("describe the container"))?;
    let stop_signal = oci::stop_signal(config, &root.config).map_err(at("describe the container"))?;
    let mut volumes = Vec::with_capacity(record.volumes.len());
    for (volume, image) in config.volumes.iter().zip(&record.volumes) {
        let root = parts.images.rootfs(&image.id).await.map_err(at("read the image of a volume of the container"))?;
        volumes.push(proto::ImageVolume {
            image_key: image.id.to_string(),
            image: extents(&root.disk),
            sub_path: volume.sub_path.clone(),
            container_path: volume.container_path.clone(),
            noexec: volume.options.contains(&MountOption::Noexec),
        });
    }
    Ok(proto::CreateContainerRequest {
        id: record.id.to_string(),
        oci_spec: spec,
        image_key: record.image.id.to_string(),
        image: extents(&root.disk),
        user: oci::user(config, &root.config),
        merge_image_groups: !config.run_as.strict,
        tty: config.tty,
        stdin: config.stdin,
        stdin_once: config.stdin_once,
        log_path: record.log_path.as_ref().map(|path| path.display().to_string()).unwrap_or_default(),
        stop_signal,
        pid_of: match &config.pid {
            PidMode::Of(target) => target.clone(),
            PidMode::Pod | PidMode::Own => String::new(),
        },
        own_pid_namespace: config.pid == PidMode::Own,
        volumes,
        pushed,
        devices: Vec::new(),
        empty_dirs: Vec::new(),
        disks: Vec::new(),
    })
}

/// Resolves symbolic links in the paths of the volumes, which would lead elsewhere where the agent finds them. Creates a
/// directory for a path that does not exist, as kubelet expects.
fn resolve(config: &ContainerConfig) -> Result<ContainerConfig, FileError> {
    let mut config = config.clone();
    for volume in &mut config.node_volumes {
        let path = Path::new(&volume.host_path);
        if !path.exists() {
            std::fs::create_dir_all(path).map_err(files::at("create", path))?;
        }
        let found = path.canonicalize().map_err(files::at("find", path))?;
        let name = found.into_os_string().into_string();
        volume.host_path =
            name.map_err(|_bytes| files::at("name", path)(std::io::ErrorKind::InvalidFilename.into()))?;
    }
    Ok(config)
}

/// Returns which volumes of a container are part of the VM, by their index in the list, with their disks.
async fn own_volumes(
    parts: &Parts,
    pod: &PodRecord,
    record: &ContainerRecord,
    config: &ContainerConfig,
) -> Result<Vec<Option<OwnVolume>>, LifecycleError> {
    let (id, looked) = (record.id.clone(), config.node_volumes.clone());
    let guest = parts.has_guest(pod);
    // Owner ids are mapped in a user namespace, which only a share of the node supports.
    let mapped = pod.config.user_namespace.is_some();
    let way = match &pod.config.empty_dirs {
        _ if !guest => disks::Way::Shares("run the pod by a handler whose engine is not host"),
        _ if mapped => disks::Way::Shares("run the pod without a user namespace of its own"),
        None => disks::Way::Shares("the pod was started by an older version of Nacelle; make it anew"),
        Some(rules) => disks::Way::Disks(rules.clone(), parts.pod_dir(&pod.id)),
    };
    blocking(move || {
        let disks = disks::plan(&way, &id, &looked)?;
        let memory = if guest && !mapped { memory::plan(&id, &looked)? } else { Vec::new() };
        let memory = memory.into_iter().chain(std::iter::repeat(None));
        let own = disks.into_iter().zip(memory).map(|(disk, memory)| match disk {
            Some(disk) => Some((disk.volume, Some((disk.device, disk.file)))),
            None => memory.map(|volume| (volume, None)),
        });
        Ok(own.collect())
    })
    .await
}

/// Returns which process mounts the volumes of a pod.
fn taker(parts: &Parts, pod: &PodRecord) -> Taker {
    if parts.has_guest(pod) { Taker::Share } else { Taker::Agent }
}

/// Returns the volumes as the agent finds them: part of the VM, copied in, or shared. A guest's kernel mounts file systems below
/// a shared volume with the flags of that volume: a mark in the request shows where only the volume itself is read-only
/// (`guest/kernel/0009-fuse-device-submounts.patch`). In a user namespace no such flag can be set, so everything below a
/// read-only volume is read-only there.
fn as_found(
    mut config: ContainerConfig,
    id: &ContainerId,
    plan: &[Option<proto::PushedVolume>],
    own: &[Option<proto::EmptyDir>],
    marks: bool,
) -> ContainerConfig {
    let mut numbers = 0..;
    for (volume, (plan, own)) in config.node_volumes.iter_mut().zip(plan.iter().zip(own)) {
        if let Some(own) = own {
            volume.host_path.clone_from(&own.source);
        } else if let Some(pushed) = plan {
            volume.host_path = pushed::in_guest(pushed);
        } else if let Some(number) = numbers.next() {
            volume.host_path = format!("{}/{id}/{number}", share::DIRECTORY);
            if marks && volume.readonly && !volume.recursive_read_only {
                volume.options.insert(MountOption::Nodiratime);
            }
        }
    }
    config
}

/// Returns the request to the process that mounts the volume.
pub(super) fn shared(volume: &NodeVolume, pod: &PodConfig) -> Volume {
    let range = |range: IdRange| (range.first, range.count);
    let owners = |users: UserNamespace| Owners { users: range(users.users), groups: range(users.groups) };
    Volume {
        path: PathBuf::from(&volume.host_path),
        access: match (volume.readonly, volume.recursive_read_only) {
            (_, true) => VolumeAccess::RecursiveReadOnly,
            (true, false) => VolumeAccess::ReadOnly,
            (false, false) => VolumeAccess::ReadWrite,
        },
        no_access_times: volume.options.contains(&MountOption::Noatime),
        propagation: match volume.propagation {
            Propagation::Private => shares::Propagation::Private,
            Propagation::FromNode => shares::Propagation::FromNode,
            Propagation::BothWays => shares::Propagation::BothWays,
        },
        owners: pod.user_namespace.filter(|_| volume.id_mapped).map(owners),
    }
}

pub(super) fn extents(disk: &ImageDisk) -> Vec<proto::Extent> {
    let text = |path: &std::path::Path| path.to_string_lossy().into_owned();
    let piece =
        |extent: &Extent| proto::Extent { path: text(&extent.path), offset: extent.offset, length: extent.length };
    disk.extents.iter().map(piece).collect()
}

/// Starts the container in the guest.
pub(super) async fn start(parts: Arc<Parts>, client: PodClient, id: ContainerId) -> Result<(), LifecycleError> {
    let started = ask("start the container", parts.answer_limit(), client.start_container(id.as_str())).await;
    if let Err(LifecycleError::TooSlow { .. }) = &started {
        // After a failed request the container may start all the same, and would then run although it counts as ended.
        if let Err(error) = stop(parts, client, id.clone(), Duration::ZERO).await {
            tracing::warn!(container = %id, "its late start could not be stopped: {}", Chain(&error));
        }
    }
    started
}

/// Stops the container and returns how it ended; `None` if the pod process does not know it any more.
pub(super) async fn stop(
    parts: Arc<Parts>,
    client: PodClient,
    id: ContainerId,
    grace: Duration,
) -> Result<Option<proto::PodState>, LifecycleError> {
    let limit = grace.saturating_add(parts.answer_limit());
    match ask("stop the container", limit, client.stop_container(id.as_str(), grace)).await {
        Ok(()) => ask("ask the pod for its state", parts.answer_limit(), client.state()).await.map(Some),
        Err(error) if is_unknown(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Removes the container. It is no error if the guest does not know it.
pub(super) async fn remove(
    parts: Arc<Parts>,
    client: Option<PodClient>,
    pod: PodRecord,
    record: Arc<ContainerConfig>,
    id: ContainerId,
) -> Result<(), LifecycleError> {
    // Without a VM there is nothing in a guest to remove.
    let Some(client) = client else { return Ok(()) };
    remove_from_guest(&parts, client, &id).await?;
    // Copied-in volumes are left over only if a daemon died while it created the container.
    for taker in takers(&parts, &pod, &record) {
        let detached = parts.pods.detach(&parts.pod_dir(&pod.id), *taker, id.as_str()).await;
        detached.map_err(at("take back the volumes of the container"))?;
    }
    Ok(())
}

async fn remove_from_guest(parts: &Parts, client: PodClient, id: &ContainerId) -> Result<(), LifecycleError> {
    let deadline = tokio::time::Instant::now() + parts.answer_limit();
    loop {
        match ask("remove the container", parts.answer_limit(), client.remove_container(id.as_str())).await {
            Err(error) if is_unknown(&error) => return Ok(()),
            // The guest still executes the creation for an earlier daemon; the removal succeeds once that is complete.
            Err(error) if error.kind() == Kind::Conflict && tokio::time::Instant::now() < deadline => {
                tokio::time::sleep(PAUSE).await;
            }
            other => return other,
        }
    }
}

/// Runs a command in the container to its end.
pub(super) async fn exec(
    parts: &Parts,
    client: PodClient,
    id: &ContainerId,
    args: Vec<String>,
    limit: Option<Duration>,
) -> Result<proto::ExecSyncResponse, LifecycleError> {
    let step = "run the command";
    let call = client.exec_sync(id.as_str(), args, limit);
    match limit {
        // The caller set no limit; dropping the request ends the command.
        None => call.await.map_err(at(step)),
        Some(limit) => ask(step, limit.saturating_add(parts.answer_limit()), call).await,
    }
}

/// Changes the container's limits in the guest.
pub(super) async fn update(
    parts: Arc<Parts>,
    client: PodClient,
    id: ContainerId,
    limits: Vec<(String, String)>,
    oom_score_adj: Option<i32>,
    processors: Vec<u32>,
) -> Result<(), LifecycleError> {
    let limits = limits.into_iter().map(|(file, value)| common::Limit { file, value }).collect();
    let request = common::UpdateContainerRequest { id: id.to_string(), limits, oom_score_adj, processors };
    ask("change the limits of the container", parts.answer_limit(), client.update_container(request)).await
}

/// A resize of the VM.
#[derive(Clone, Copy, Debug)]
pub(super) struct Resize {
    /// The present resources, and the target.
    pub from: VmResources,
    pub to: VmResources,
    /// Whether the number of vCPUs changes too.
    pub processors: bool,
}

/// Resizes the pod's VM, completely or not at all, and returns its new resources.
pub(super) async fn resize(parts: Arc<Parts>, client: PodClient, sizes: Resize) -> Result<VmResources, LifecycleError> {
    let Resize { from, mut to, processors } = sizes;
    let run = async |count| {
        ask("change the processors of the pod's machine", parts.answer_limit(), client.set_processors(count)).await
    };
    if processors {
        run(to.vcpus).await?;
    }
    if let Some(bytes) = to.reserve_used() {
        let asked = ask("change the memory of the pod's machine", parts.answer_limit(), client.set_memory(bytes)).await;
        match asked {
            Ok(used) => to.memory = to.least_memory.saturating_add(used),
            Err(error) => {
                if processors && let Err(error) = run(from.vcpus).await {
                    tracing::warn!("processors are not as they were: {}", Chain(&error));
                }
                return Err(error);
            }
        }
    }
    Ok(to)
}

/// Closes the container's log file and opens it again by its name.
pub(super) async fn reopen(parts: &Parts, client: PodClient, id: &ContainerId) -> Result<(), LifecycleError> {
    ask("open the log again", parts.answer_limit(), client.reopen_log(id.as_str())).await
}

/// The report of a pod process about a container, sanitized: times lie between `from` and now, and codes are in range.
pub(super) struct Told {
    pub phase: proto::ContainerPhase,
    pub started_at: i64,
    pub finished_at: i64,
    pub exit_code: i32,
    pub oom_killed: bool,
    pub message: String,
}

pub(super) fn told(state: &proto::ContainerState, from: i64, now: i64) -> Told {
    let sane = |time: i64| if (from..=now).contains(&time) { time } else { now };
    let started_at = if state.started_at == 0 { 0 } else { sane(state.started_at) };
    Told {
        phase: state.phase(),
        started_at,
        finished_at: sane(state.finished_at).max(started_at),
        exit_code: i32::try_from(state.exit_code).unwrap_or(i32::MAX),
        oom_killed: state.oom_killed,
        message: clip(&state.message),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn volumes_of_the_node_are_found_or_made() {
        let directory = tempfile::tempdir().unwrap();
        let base = directory.path().canonicalize().unwrap();
        std::fs::write(base.join("file"), "").unwrap();
        std::os::unix::fs::symlink("file", base.join("link")).unwrap();
        let mut config = (*nacelle_model::testing::container(1, 1).config).clone();
        let volume = |name: &str| NodeVolume {
            host_path: base.join(name).to_str().unwrap().into(),
            container_path: "/x".into(),
            readonly: false,
            recursive_read_only: false,
            propagation: Propagation::Private,
            id_mapped: false,
            options: [].into(),
        };
        config.node_volumes = vec![volume("link"), volume("new/deep")];
        let resolved = resolve(&config).unwrap();
        let paths: Vec<_> = resolved.node_volumes.iter().map(|volume| volume.host_path.clone()).collect();
        assert_eq!(paths, [base.join("file"), base.join("new/deep")].map(|path| path.to_str().unwrap().to_owned()));
        assert!(base.join("new/deep").is_dir());
        let found = as_found(resolved, &ContainerId::from_bytes([1; 32]), &[None, None], &[None, None], true)
            .node_volumes[0]
            .host_path
            .clone();
        assert_eq!(found, format!("/run/nacelle/volumes/{}/0", "01".repeat(32)));
        config.node_volumes = vec![volume("file/x")];
        assert!(resolve(&config).is_err());
    }

    proptest! {
        #[test]
        fn whatever_a_pod_process_says_times_stay_in_order(
            created: i64, started: i64, finished: i64, code: u32, phase: i32, message in ".{0,5000}",
        ) {
            let state = proto::ContainerState {
                id: String::new(), phase, created_at: created, started_at: started, finished_at: finished,
                exit_code: code, oom_killed: false, message, uid: 0, gid: 0, supplemental_groups: vec![],
            };
            let told = told(&state, 100, 200);
            prop_assert!(told.started_at == 0 || (100..=200).contains(&told.started_at));
            prop_assert!((100..=200).contains(&told.finished_at) && told.finished_at >= told.started_at);
            prop_assert!(told.exit_code >= 0 && told.message.len() <= crate::lifecycle::CLIP + 3);
        }
    }
}
