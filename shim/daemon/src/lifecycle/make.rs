//! Owns: the effects on containers: making, starting, stopping, removing them in the guest. Each has a deadline.
//! Threads: run as tasks of their own; they answer to the pod's actor.

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

/// Between attempts to remove what is still being made.
const PAUSE: Duration = Duration::from_millis(50);
/// Groups that a pod process may report of one user; Linux allows 65536.
const MAX_GROUPS: usize = 65536;

/// Asks a pod process, within a limit.
pub(crate) async fn ask<T>(
    step: &'static str,
    limit: Duration,
    call: impl Future<Output = Result<T, ClientError>>,
) -> Result<T, LifecycleError> {
    timeout(limit, call).await.map_err(|_elapsed| LifecycleError::TooSlow { step, limit })?.map_err(at(step))
}

/// Whether the pod process says that it does not know the container.
fn is_unknown(error: &LifecycleError) -> bool {
    matches!(error, LifecycleError::Step { source: StepError::Pod(_), .. }) && error.kind() == Kind::NotFound
}

/// A container of which all that the node can know is known, with its volumes shared: what is left is the guest's.
pub(super) struct Prepared {
    request: proto::CreateContainerRequest,
    client: PodClient,
    /// Its block devices and disks, which the pod process has already.
    offers: Vec<Offer>,
    /// The PCI devices of a machine pod's machine.
    passed: Option<Passed>,
    /// A volume lies in `/sys`, where only the kernel of the containers knows what there is.
    in_sysfs: bool,
}

impl Prepared {
    /// Whether nothing that was asked for depends on what is in its images (names of users, paths in volumes), or in the machine:
    /// room for devices, paths in sysfs.
    pub(super) fn is_certain(&self) -> bool {
        let numbers = |user: &str| user.chars().all(|c| c.is_ascii_digit() || c == ':');
        self.offers.is_empty()
            && !self.in_sysfs
            && self.passed.as_ref().is_none_or(Passed::is_empty)
            && numbers(&self.request.user)
            && self.request.volumes.iter().all(|volume| volume.sub_path.is_empty())
    }
}

/// A volume of the machine's own, and its disk, if it has one.
type OwnVolume = (proto::EmptyDir, Option<(proto::BlockDevice, OwnedFd)>);

/// Prepares the container on the node; its volumes are taken back if it cannot be made.
pub(super) async fn prepare(
    parts: &Parts,
    client: PodClient,
    pod: &PodRecord,
    record: &ContainerRecord,
) -> Result<Prepared, LifecycleError> {
    if let Some(machine) = &pod.config.machine {
        if let Some(vm) = &pod.config.vm {
            // Before the disk is made of it: it stays as long as the disk.
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
        // Processors of the node are not the guest's.
        found.resources = found.resources.in_guest();
        let asked = found.clone();
        let of_guest = blocking(move || devices::of_guest(&asked)).await?;
        blocks = of_guest.blocks;
        of_guest.nodes
    } else {
        // A user namespace may make no devices.
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

/// Makes the container in the guest; its volumes are taken back if it cannot be made.
pub(super) async fn make(
    parts: Arc<Parts>,
    pod: PodRecord,
    record: ContainerRecord,
    prepared: Prepared,
) -> Result<ContainerUser, LifecycleError> {
    let Prepared { request, client, offers, passed, in_sysfs: _ } = prepared;
    let pushed = !request.pushed.is_empty();
    let mut made = ask("make the container", parts.answer_limit(), client.create_container(request)).await;
    // Not before: another machine of the pod may still have its own.
    if let (Ok(_), Some(passed)) = (&made, passed)
        && let Err(error) = machine::pass(&parts, &pod, passed).await
    {
        made = Err(error);
    }
    // The container has them, or nobody.
    drop(offers);
    match made {
        Ok(made) => {
            if pushed {
                // It was read, or is kept open by whoever reads it.
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

/// Takes back the volumes of a container that is not made.
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

/// Where a container may have volumes.
fn takers(parts: &Parts, pod: &PodRecord, config: &ContainerConfig) -> &'static [Taker] {
    match taker(parts, pod) {
        _ if config.node_volumes.is_empty() => &[],
        _ if pod.config.machine.as_ref().is_some_and(|machine| machine.filesystems.is_empty()) => &[],
        Taker::Share | Taker::Pushed if pod.config.machine.is_some() => &[Taker::Share],
        Taker::Share | Taker::Pushed => &[Taker::Share, Taker::Pushed],
        Taker::Agent => &[Taker::Agent],
    }
}

/// What the pod process is asked for.
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

/// The volumes of the node without links, which would lead elsewhere where the agent finds them; a folder is made for what is not
/// there, as kubelet expects.
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

/// The volumes of a container that are its machine's own, by their place in the list; those on a disk with that.
async fn own_volumes(
    parts: &Parts,
    pod: &PodRecord,
    record: &ContainerRecord,
    config: &ContainerConfig,
) -> Result<Vec<Option<OwnVolume>>, LifecycleError> {
    let (id, looked) = (record.id.clone(), config.node_volumes.clone());
    let guest = parts.has_guest(pod);
    // In a user namespace owners are mapped, which is the node's work.
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

/// Which process has the volumes of a pod.
fn taker(parts: &Parts, pod: &PodRecord) -> Taker {
    if parts.has_guest(pod) { Taker::Share } else { Taker::Agent }
}

/// Volumes as the agent finds them: the machine's own, pushed or shared. A guest's kernel mounts what is mounted below a shared volume with
/// the flags of that: a mark tells it where only the volume itself is read-only (`guest/kernel/0009-fuse-device-submounts.patch`). No
/// flag like it can be set in a user namespace, where all below such a volume is read-only.
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
            volume.host_path = format!("{}/{id}/{number}", share::FOLDER);
            if marks && volume.readonly && !volume.recursive_read_only {
                volume.options.insert(MountOption::Nodiratime);
            }
        }
    }
    config
}

/// What the process that takes it is asked for.
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

/// Starts it.
pub(super) async fn start(parts: Arc<Parts>, client: PodClient, id: ContainerId) -> Result<(), LifecycleError> {
    let started = ask("start the container", parts.answer_limit(), client.start_container(id.as_str())).await;
    if let Err(LifecycleError::TooSlow { .. }) = &started {
        // It may start all the same, and would then run as a container that counts as ended.
        if let Err(error) = stop(parts, client, id.clone(), Duration::ZERO).await {
            tracing::warn!(container = %id, "its late start could not be stopped: {}", Chain(&error));
        }
    }
    started
}

/// Stops it and asks how it ended. None: the pod process does not know it any more.
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

/// Removes it; one that the guest does not know is no failure.
pub(super) async fn remove(
    parts: Arc<Parts>,
    client: Option<PodClient>,
    pod: PodRecord,
    record: Arc<ContainerConfig>,
    id: ContainerId,
) -> Result<(), LifecycleError> {
    // Without a machine there is nothing in a guest to remove.
    let Some(client) = client else { return Ok(()) };
    remove_from_guest(&parts, client, &id).await?;
    // Of what is pushed there is something only if a daemon died while it made the container.
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
            // The guest still makes it, for a daemon that is no more: it is removed when it is made.
            Err(error) if error.kind() == Kind::Conflict && tokio::time::Instant::now() < deadline => {
                tokio::time::sleep(PAUSE).await;
            }
            other => return other,
        }
    }
}

/// Runs a command in it to its end.
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
        // The caller asked for no limit; dropping the request ends it.
        None => call.await.map_err(at(step)),
        Some(limit) => ask(step, limit.saturating_add(parts.answer_limit()), call).await,
    }
}

/// Changes its limits.
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

/// What is changed of a machine's size.
#[derive(Clone, Copy, Debug)]
pub(super) struct Resize {
    /// As it is, and as it shall be.
    pub from: VmResources,
    pub to: VmResources,
    /// Whether its processors follow.
    pub processors: bool,
}

/// Gives the pod's machine another size: all of it, or it stays as it was. Says how large it is then.
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

/// Closes its log and opens it again by its name.
pub(super) async fn reopen(parts: &Parts, client: PodClient, id: &ContainerId) -> Result<(), LifecycleError> {
    ask("open the log again", parts.answer_limit(), client.reopen_log(id.as_str())).await
}

/// What a pod process says of a container, made harmless: times between `from` and now, codes in range.
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
        let folder = tempfile::tempdir().unwrap();
        let base = folder.path().canonicalize().unwrap();
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
