//! Creates, runs, stops and removes one container. Every function here is one effect: the actor starts it, it owns no state
//! of the pod, and its result is reported to the actor.

use crate::agent::Agent;
use crate::broadcast::OutputBroadcast;
use crate::copied_volumes::CopiedVolumes;
use crate::devices::{self, PlacedDevice};
use crate::error::{Failure, PodError};
use crate::guest_values::{Bounded, FromGuest};
use crate::images::Placement;
use crate::log::{ContainerLog, LogStream, pump};
use crate::record::{ContainerPhase, LOST, SavedContainerState, SavedPodState};
use crate::returned_files::{self, ReturnedFile};
use crate::socket_volumes::SocketVolumes;
use nacelle_base::machine::ImageDisk;
use nacelle_base::task::run_blocking;
use nacelle_base::{Chain, Classify, FailureKind};
use nacelle_engine::{OpenExtent, Slot};
use nacelle_jail::ThreadKind;
use nacelle_proto::{agent as proto, common, pod};
use std::fs::File;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, watch};

/// The stack size of a pump thread: it calls little, and its buffers are on the heap.
const PUMP_STACK: usize = 128 << 10;
/// The limit from the end of a container to the end of its streams, which a leaked process may hold open.
const DRAIN_LIMIT: Duration = Duration::from_secs(30);
/// The first and the longest pause between two attempts to wait through an agent that fails; each failure is a line in the log.
const RETRY_PAUSE: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(8));
const SIGKILL: u32 = 9;

/// The outcome of attaching an image; `None` until it is attached or has failed.
pub type AttachOutcome = watch::Receiver<Option<Result<(), Failure>>>;

/// What one container needs of the image disk for one of its images.
pub struct ImageUse {
    /// The position of the image on the disk.
    pub placement: Placement,
    /// The work of attaching the image, for its first user.
    pub attachment: Option<ImageAttachment>,
    /// The outcome, for every user.
    pub outcome: AttachOutcome,
}

/// Where the content of an image is read from.
pub enum ImageContent {
    /// Open files, which are placed on the image disk.
    Files(Slot, Vec<OpenExtent>),
    /// Whole files, by their paths: the pod has no image disk.
    Paths(ImageDisk),
}

/// A new image, which `create` attaches to the VM and the agent mounts.
pub struct ImageAttachment {
    /// Its content.
    pub content: ImageContent,
    /// The key of the image, for errors.
    pub key: String,
    /// The sender of the outcome.
    pub sender: watch::Sender<Option<Result<(), Failure>>>,
}

/// What one container needs of the volume disk for one of its devices.
pub struct DeviceUse {
    /// The partition number of the device.
    pub number: u32,
    /// The work of attaching the device, if it is not attached yet.
    pub attachment: Option<DeviceAttachment>,
    /// The outcome, for every user.
    pub outcome: AttachOutcome,
}

/// A device that must be attached to the guest, or made writable there.
pub struct DeviceAttachment {
    /// The device and its position on the volume disk.
    pub placed: Arc<PlacedDevice>,
    /// The open device.
    pub file: File,
    /// The guest may write to the device.
    pub writable: bool,
    /// The outcome of the previous attachment, which must complete first.
    pub previous: Option<AttachOutcome>,
    /// The sender of the outcome.
    pub sender: watch::Sender<Option<Result<(), Failure>>>,
}

/// The clients of the file-server process for the volumes of containers that are not shared.
pub struct NodeVolumes {
    /// For the volumes that are copied in.
    pub copied_volumes: CopiedVolumes,
    /// For the sockets of the node.
    pub socket_volumes: SocketVolumes,
}

/// Creates a container: attaches the images that are not attached yet (the root's is the first) and the devices, sends its
/// copied-in volumes and sockets, hands over its disks, and calls the agent.
pub async fn create(
    agent: Agent,
    request: Arc<pod::CreateContainerRequest>,
    mut images: Vec<ImageUse>,
    devices: Vec<DeviceUse>,
    disks: Vec<(String, File)>,
    volumes: NodeVolumes,
) -> Result<Bounded<common::CreateContainerResponse>, Failure> {
    // All of this container's images are attached before it waits for those of others, so that no container waits for one
    // that waits itself.
    for image in &mut images {
        if let Some(attachment) = image.attachment.take() {
            let ImageAttachment { content, key, sender } = attachment;
            let outcome = attach_image(&agent, content, key, image.placement).await.map_err(Failure::from);
            sender.send_replace(Some(outcome));
        }
    }
    let attached = attach_devices(&agent, devices).await;
    for image in &mut images {
        wait_until_attached(&mut image.outcome).await?;
    }
    let device_partitions = attached?;
    for volume in &request.copied_in_volumes {
        volumes.copied_volumes.copy_in(&agent, volume).await?;
    }
    for volume in &request.socket_volumes {
        volumes.socket_volumes.attach(&agent, volume).await?;
    }
    let mut handed_over = Vec::with_capacity(disks.len());
    for (name, file) in disks {
        handed_over.push(agent.hand_over(&request.id, &name, file).await?);
    }
    let mut partitions = images.iter().map(|image| image.placement.partition);
    let partition = partitions.next().ok_or(PodError::Ending)?;
    let volume = |(partition, volume): (u32, &pod::ImageVolume)| proto::ImageVolume {
        partition,
        sub_path: volume.sub_path.clone(),
        container_path: volume.container_path.clone(),
        noexec: volume.noexec,
    };
    let created = agent
        .create_container(proto::CreateContainerRequest {
            id: request.id.clone(),
            oci_spec: request.oci_spec.clone(),
            partition,
            user: request.user.clone(),
            merge_image_groups: request.merge_image_groups,
            stdin: request.stdin,
            pid_of: request.pid_of.clone(),
            pid_mode: if request.own_pid_namespace { proto::PidMode::Container } else { proto::PidMode::Pod }.into(),
            volumes: partitions.zip(&request.volumes).map(volume).collect(),
            devices: agent_devices(&request, &device_partitions),
            empty_dirs: agent_empty_dirs(&request, &device_partitions),
            anonymous_volumes: request.anonymous_volumes.clone(),
        })
        .await;
    // If the creation succeeded, the machine has the disks; otherwise this withdraws them.
    drop(handed_over);
    match created {
        Ok(response) => Ok(response),
        Err(error) => {
            // If the reply was lost, the agent may have created the container.
            if let Err(second) = agent.remove_container(&request.id).await {
                tracing::debug!("cannot remove a container whose creation failed: {}", Chain(&second));
            }
            Err(error.into())
        }
    }
}

/// Attaches a container's devices, or waits until other containers have; returns their partitions.
async fn attach_devices(agent: &Agent, mut uses: Vec<DeviceUse>) -> Result<Vec<u32>, Failure> {
    // As with images, no container waits for one that waits itself.
    for DeviceAttachment { placed, file, writable, previous, sender } in
        uses.iter_mut().filter_map(|device| device.attachment.take())
    {
        let attached = async {
            if let Some(mut previous) = previous {
                wait_until_attached(&mut previous).await?;
            }
            Ok(devices::attach(agent, &placed, file, writable).await?)
        };
        sender.send_replace(Some(attached.await));
    }
    for device in &mut uses {
        wait_until_attached(&mut device.outcome).await?;
    }
    Ok(uses.iter().map(|device| device.number).collect())
}

/// Returns the devices for the agent's request, without those that hold volumes.
fn agent_devices(request: &pod::CreateContainerRequest, partitions: &[u32]) -> Vec<proto::BlockDevice> {
    let all = partitions.iter().zip(&request.devices).filter(|(_, device)| !device.is_empty_dir);
    let convert = |(partition, device): (&u32, &pod::BlockDevice)| proto::BlockDevice {
        partition: *partition,
        container_path: device.container_path.clone(),
        access: device.access.clone(),
        mode: device.mode,
        uid: device.uid,
        gid: device.gid,
    };
    all.map(convert).collect()
}

/// Returns the emptyDirs for the agent's request, with the partitions of those on disks.
fn agent_empty_dirs(request: &pod::CreateContainerRequest, partitions: &[u32]) -> Vec<proto::EmptyDir> {
    let partition = |source: &str| {
        let mut all = partitions.iter().zip(&request.devices);
        all.find(|(_, device)| device.is_empty_dir && device.container_path == source)
            .map_or(0, |(partition, _)| *partition)
    };
    let convert = |volume: &pod::EmptyDir| {
        let pod::EmptyDir { name, path, source, sub_path, .. } = volume.clone();
        proto::EmptyDir {
            partition: partition(&source),
            name,
            path,
            source,
            bytes: volume.bytes,
            mode: volume.mode,
            uid: volume.uid,
            gid: volume.gid,
            has_node_files: volume.has_node_files,
            sub_path,
            sub_path_mode: volume.sub_path_mode,
            sub_path_uid: volume.sub_path_uid,
            sub_path_gid: volume.sub_path_gid,
            page_bytes: volume.page_bytes,
        }
    };
    request.empty_dirs.iter().map(convert).collect()
}

/// Waits until an image or a device is attached, or could not be.
async fn wait_until_attached(outcome: &mut AttachOutcome) -> Result<(), Failure> {
    let outcome = outcome.wait_for(Option::is_some).await.map_err(|_closed| PodError::Ending)?.clone();
    outcome.unwrap_or_else(|| Err(PodError::Ending.into()))
}

async fn attach_image(agent: &Agent, content: ImageContent, key: String, placement: Placement) -> Result<(), PodError> {
    let mut request = proto::AttachImageRequest { partition: placement.partition, ..Default::default() };
    match content {
        ImageContent::Files(slot, pieces) => {
            let place = move || slot.place_open(placement.offset, pieces);
            let placed = run_blocking("add an image to its disk", place).await?;
            placed.map_err(|source| PodError::Place { key, source })?;
            (request.offset, request.length) = (placement.offset, placement.length);
        }
        ImageContent::Paths(image) => {
            request.files = image.extents.iter().map(|piece| piece.path.display().to_string()).collect();
        }
    }
    agent.attach_image(request).await
}

/// Unmounts an image without users and removes it from the disk. If the agent cannot unmount it, its range stays in use.
pub async fn detach_image(agent: Option<Agent>, slot: Option<Slot>, placement: Placement) -> Result<(), PodError> {
    if let Some(agent) = agent {
        agent.detach_image(placement.partition).await?;
    }
    if let Some(slot) = slot {
        run_blocking("remove an image from its disk", move || slot.unplace(placement.offset)).await?;
    }
    Ok(())
}

/// The open streams of a container.
#[derive(Default)]
pub struct OutputStreams(Vec<Arc<UnixStream>>);

impl Drop for OutputStreams {
    /// Ends the pumps, which may block in a read.
    fn drop(&mut self) {
        for stream in &self.0 {
            // A stream that has ended already cannot be shut down, which is no failure.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

/// The outputs of a container that clients attach to.
#[derive(Clone, Debug, Default)]
pub struct Outputs {
    /// The standard output, or the output of the terminal.
    pub stdout: Arc<OutputBroadcast>,
    /// The standard error.
    pub stderr: Arc<OutputBroadcast>,
}

/// The handles of a started container, which the actor keeps.
pub struct StartedContainer {
    /// The streams; the actor drops them when the container is removed.
    pub streams: OutputStreams,
    /// The outputs, for clients that attach.
    pub outputs: Outputs,
    /// This channel closes when all pump threads have ended.
    pub pumps_running: mpsc::Receiver<()>,
}

/// Opens the streams, then calls the agent to start the container, so that no byte of output is missed.
pub async fn start(agent: &Agent, id: &str, tty: bool, log: Arc<ContainerLog>) -> Result<StartedContainer, PodError> {
    let stdout = agent.open_stream(id, "", common::Stream::Stdout);
    let mut opened = Vec::new();
    if tty {
        opened.push((LogStream::Stdout, stdout.await?));
    } else {
        let (stdout, stderr) = tokio::try_join!(stdout, agent.open_stream(id, "", common::Stream::Stderr))?;
        opened.extend([(LogStream::Stdout, stdout), (LogStream::Stderr, stderr)]);
    }
    let (mut streams, outputs) = (OutputStreams::default(), Outputs::default());
    let (pump_guard, pumps_running) = mpsc::channel::<()>(1);
    for (source, stream) in opened {
        let stream = Arc::new(stream);
        streams.0.push(Arc::clone(&stream));
        let broadcast = Arc::clone(if source == LogStream::Stdout { &outputs.stdout } else { &outputs.stderr });
        let (log, pump_guard) = (Arc::clone(&log), pump_guard.clone());
        let run = move || {
            pump(&*stream, source, &log, &broadcast);
            drop(pump_guard);
        };
        let builder = std::thread::Builder::new().name("log".into()).stack_size(PUMP_STACK);
        let thread = nacelle_jail::spawn(ThreadKind::Log, builder, run);
        thread.map_err(|source| PodError::Thread { what: "start the thread that writes a container's log", source })?;
    }
    if let Err(error) = agent.start_container(id).await {
        // The reply may have been lost; the container counts as exited from here on.
        if let Err(second) = agent.signal(id, "", SIGKILL, true).await {
            tracing::debug!("cannot kill a container whose start failed: {}", Chain(&second));
        }
        return Err(error);
    }
    if tty {
        outputs.stderr.end();
    }
    Ok(StartedContainer { streams, outputs, pumps_running })
}

/// The message for a container that the guest's OOM killer ended although it had not reached a limit of its own.
const GUEST_OUT_OF_MEMORY: &str = "the container reached no limit of its own: the memory of its VM ran out \
    (without a VM: of its pod's cgroup, or of the node); set a memory limit, by which the VM is sized";

/// How a container ended.
pub struct ContainerExit {
    /// The exit code.
    pub code: u32,
    /// The OOM killer ended the container.
    pub oom_killed: bool,
    /// The time in nanoseconds since 1970, by the guest's clock.
    pub finished_at: FromGuest<i64>,
    /// The reason of a loss, or that the guest's memory ran out; empty otherwise.
    pub message: String,
}

/// Waits until a container has ended, its output is in the log, and its files are returned.
pub async fn wait_for_exit(
    agent: &Agent,
    id: &str,
    pumps_running: &mut mpsc::Receiver<()>,
    returned: Vec<ReturnedFile>,
) -> ContainerExit {
    let mut pause = RETRY_PAUSE.0;
    let exit = loop {
        match agent.wait(id, "").await {
            Ok(None) => pause = RETRY_PAUSE.0,
            Ok(Some(reported)) => {
                let message = if reported.guest_out_of_memory { GUEST_OUT_OF_MEMORY } else { "" };
                break ContainerExit {
                    code: reported.code,
                    oom_killed: reported.oom_killed,
                    finished_at: reported.finished_at,
                    message: message.to_owned(),
                };
            }
            Err(error) if error.kind() == FailureKind::NotFound => {
                let message = Chain(&error).to_string();
                // The end of its streams cannot be predicted.
                let finished_at = FromGuest::new(crate::now_nanos());
                return ContainerExit { code: LOST, oom_killed: false, finished_at, message };
            }
            // If the VM has ended, the actor learns that elsewhere and aborts this task.
            Err(error) => {
                tracing::warn!(container = id, "{}", Chain(&error));
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(RETRY_PAUSE.1);
            }
        }
    };
    if tokio::time::timeout(DRAIN_LIMIT, pumps_running.recv()).await.is_err() {
        tracing::warn!(container = id, "the output of a container did not end with the container");
    }
    returned_files::write_back(agent, id, returned).await;
    exit
}

/// Waits until a container is gone or has the wanted phase.
pub(crate) async fn wait_for_phase(
    published: &mut watch::Receiver<SavedPodState>,
    id: &str,
    limit: Duration,
    what: &'static str,
    wanted: impl Fn(ContainerPhase) -> bool,
) -> Result<(), PodError> {
    let is_reached = |record: &SavedPodState| match record.containers.iter().find(|container| container.id == id) {
        Some(container) => wanted(container.phase),
        None => true,
    };
    match tokio::time::timeout(limit, published.wait_for(is_reached)).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(_closed)) => Err(PodError::Ending),
        Err(_elapsed) => Err(PodError::TooSlow { what, limit }),
    }
}

/// Returns the record of a container that was just created.
pub fn created_record(id: &str, response: &common::CreateContainerResponse) -> SavedContainerState {
    SavedContainerState {
        id: id.to_owned(),
        phase: ContainerPhase::Created,
        created_at: crate::now_nanos(),
        started_at: 0,
        finished_at: 0,
        exit_code: 0,
        oom_killed: false,
        message: String::new(),
        uid: response.uid,
        gid: response.gid,
        supplemental_groups: response.supplemental_groups.clone(),
    }
}
