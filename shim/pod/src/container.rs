//! Creates, runs, stops and removes one container. Every function here is one effect: the actor starts it, it owns no state
//! of the pod, and its result is reported to the actor.

use crate::agent::Agent;
use crate::devices::{self, Placed};
use crate::error::{Failure, PodError};
use crate::fan::Fan;
use crate::guest_values::{Bounded, FromGuest};
use crate::images::Placement;
use crate::log::{LogFile, LogPath, Source, pump};
use crate::pushed::Pushed;
use crate::record::{ContainerPhase, ContainerRecord, LOST, PodRecord};
use nacelle_base::machine::ImageDisk;
use nacelle_base::task::run_blocking;
use nacelle_base::{Chain, Classify, Kind};
use nacelle_engine::Slot;
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
const DRAIN: Duration = Duration::from_secs(30);
/// The first and the longest pause between two attempts to wait through an agent that fails; each failure is a line in the log.
const RETRY: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(8));
const SIGKILL: u32 = 9;

/// The outcome of attaching an image; `None` until it is attached or has failed.
pub type Attached = watch::Receiver<Option<Result<(), Failure>>>;

/// What one container needs of the image disk for one of its images.
pub struct ImageUse {
    /// The position of the image on the disk.
    pub placement: Placement,
    /// The work of attaching the image, for its first user.
    pub attach: Option<Attach>,
    /// The outcome, for every user.
    pub attached: Attached,
}

/// An image that must be placed and mounted.
pub struct Attach {
    /// The image disk; `None` without a guest.
    pub slot: Option<Slot>,
    /// The key of the image, for errors.
    pub key: String,
    /// The extents of the image.
    pub image: ImageDisk,
    /// The sender of the outcome.
    pub tell: watch::Sender<Option<Result<(), Failure>>>,
}

/// What one container needs of the volume disk for one of its devices.
pub struct DeviceUse {
    /// The partition number of the device.
    pub number: u32,
    /// The work of attaching the device, if it is not attached yet.
    pub attach: Option<DeviceAttach>,
    /// The outcome, for every user.
    pub attached: Attached,
}

/// A device that must be attached to the guest, or made writable there.
pub struct DeviceAttach {
    /// The device and its position on the volume disk.
    pub placed: Arc<Placed>,
    /// The open device.
    pub file: File,
    /// The guest may write to the device.
    pub writable: bool,
    /// The outcome of the previous attachment, which must complete first.
    pub before: Option<Attached>,
    /// The sender of the outcome.
    pub tell: watch::Sender<Option<Result<(), Failure>>>,
}

/// Creates a container: attaches the images that are not attached yet (the root's is the first) and the devices, sends its
/// copied-in volumes, hands over its disks, and calls the agent.
pub async fn make(
    agent: Agent,
    request: Arc<pod::CreateContainerRequest>,
    mut images: Vec<ImageUse>,
    devices: Vec<DeviceUse>,
    disks: Vec<(String, File)>,
    pushed: Pushed,
) -> Result<Bounded<common::CreateContainerResponse>, Failure> {
    // All of this container's images are attached before it waits for those of others, so that no container waits for one
    // that waits itself.
    for image in &mut images {
        if let Some(attach) = image.attach.take() {
            let outcome = place(&agent, &attach, image.placement).await.map_err(Failure::from);
            attach.tell.send_replace(Some(outcome));
        }
    }
    let attached = attach(&agent, devices).await;
    for image in &mut images {
        outcome(&mut image.attached).await?;
    }
    let of_devices = attached?;
    for volume in &request.pushed {
        pushed.bring(&agent, volume).await?;
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
    let made = agent
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
            devices: devices_of(&request, &of_devices),
            empty_dirs: empty_dirs_of(&request, &of_devices),
        })
        .await;
    // If the creation succeeded, the machine has the disks; otherwise this withdraws them.
    drop(handed_over);
    match made {
        Ok(made) => Ok(made),
        Err(error) => {
            // If the reply was lost, the agent may have created the container.
            if let Err(second) = agent.remove_container(&request.id).await {
                tracing::debug!("after a failed creation: {}", Chain(&second));
            }
            Err(error.into())
        }
    }
}

/// Attaches a container's devices, or waits until other containers have; returns their partitions.
async fn attach(agent: &Agent, mut uses: Vec<DeviceUse>) -> Result<Vec<u32>, Failure> {
    // As with images, no container waits for one that waits itself.
    for DeviceAttach { placed, file, writable, before, tell } in uses.iter_mut().filter_map(|one| one.attach.take()) {
        let attached = async {
            if let Some(mut before) = before {
                outcome(&mut before).await?;
            }
            Ok(devices::attach(agent, &placed, file, writable).await?)
        };
        tell.send_replace(Some(attached.await));
    }
    for one in &mut uses {
        outcome(&mut one.attached).await?;
    }
    Ok(uses.iter().map(|one| one.number).collect())
}

/// Returns the devices for the agent's request, without those that hold volumes.
fn devices_of(request: &pod::CreateContainerRequest, partitions: &[u32]) -> Vec<proto::BlockDevice> {
    let all = partitions.iter().zip(&request.devices).filter(|(_, device)| !device.of_volume);
    let told = |(partition, device): (&u32, &pod::BlockDevice)| proto::BlockDevice {
        partition: *partition,
        container_path: device.container_path.clone(),
        access: device.access.clone(),
        mode: device.mode,
        uid: device.uid,
        gid: device.gid,
    };
    all.map(told).collect()
}

/// Returns the emptyDirs for the agent's request, with the partitions of those on disks.
fn empty_dirs_of(request: &pod::CreateContainerRequest, partitions: &[u32]) -> Vec<proto::EmptyDir> {
    let partition = |source: &str| {
        let mut all = partitions.iter().zip(&request.devices);
        all.find(|(_, device)| device.of_volume && device.container_path == source)
            .map_or(0, |(partition, _)| *partition)
    };
    let told = |volume: &pod::EmptyDir| {
        let pod::EmptyDir { name, path, source, part, .. } = volume.clone();
        proto::EmptyDir {
            partition: partition(&source),
            name,
            path,
            source,
            bytes: volume.bytes,
            mode: volume.mode,
            uid: volume.uid,
            gid: volume.gid,
            occupied: volume.occupied,
            part,
            part_mode: volume.part_mode,
            part_uid: volume.part_uid,
            part_gid: volume.part_gid,
            page_bytes: volume.page_bytes,
        }
    };
    request.empty_dirs.iter().map(told).collect()
}

/// Waits until something is attached.
async fn outcome(attached: &mut Attached) -> Result<(), Failure> {
    let attached = attached.wait_for(Option::is_some).await.map_err(|_closed| PodError::Ending)?.clone();
    attached.unwrap_or_else(|| Err(PodError::Ending.into()))
}

async fn place(agent: &Agent, attach: &Attach, at: Placement) -> Result<(), PodError> {
    let mut request = proto::AttachImageRequest { partition: at.partition, ..Default::default() };
    if let Some(slot) = attach.slot.clone() {
        let image = attach.image.clone();
        let placed = run_blocking("add an image to its disk", move || slot.place(at.offset, &image)).await?;
        placed.map_err(|source| PodError::Place { key: attach.key.clone(), source })?;
        (request.offset, request.length) = (at.offset, at.length);
    } else {
        // The extents of an image are whole files.
        request.files = attach.image.extents.iter().map(|piece| piece.path.display().to_string()).collect();
    }
    agent.attach_image(request).await
}

/// Unmounts an image without users and removes it from the disk. If the agent cannot unmount it, its range stays in use.
pub async fn detach(agent: Option<Agent>, slot: Option<Slot>, at: Placement) -> Result<(), PodError> {
    if let Some(agent) = agent {
        agent.detach_image(at.partition).await?;
    }
    if let Some(slot) = slot {
        run_blocking("remove an image from its disk", move || slot.unplace(at.offset)).await?;
    }
    Ok(())
}

/// The open streams of a container.
#[derive(Default)]
pub struct Streams(Vec<Arc<UnixStream>>);

impl Drop for Streams {
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
    pub stdout: Arc<Fan>,
    /// The standard error.
    pub stderr: Arc<Fan>,
}

/// The handles of a started container, which the actor keeps.
pub struct Started {
    /// The streams; the actor drops them when the container is removed.
    pub streams: Streams,
    /// The log file, for ReopenLog.
    pub log: Arc<LogFile>,
    /// The outputs, for clients that attach.
    pub outputs: Outputs,
    /// This channel closes when all pumps have ended.
    pub pumping: mpsc::Receiver<()>,
}

/// Opens the log and the streams, then calls the agent to start the container, so that no byte of output is missed.
pub async fn start(agent: &Agent, id: &str, tty: bool, log: Option<LogPath>) -> Result<Started, PodError> {
    let log = Arc::new(run_blocking("open the log of a container", move || LogFile::open(log)).await??);
    let stdout = agent.open_stream(id, "", common::Stream::Stdout);
    let mut opened = Vec::new();
    if tty {
        opened.push((Source::Stdout, stdout.await?));
    } else {
        let (stdout, stderr) = tokio::try_join!(stdout, agent.open_stream(id, "", common::Stream::Stderr))?;
        opened.extend([(Source::Stdout, stdout), (Source::Stderr, stderr)]);
    }
    let (mut streams, outputs) = (Streams::default(), Outputs::default());
    let (alive, pumping) = mpsc::channel::<()>(1);
    for (source, stream) in opened {
        let stream = Arc::new(stream);
        streams.0.push(Arc::clone(&stream));
        let fan = Arc::clone(if source == Source::Stdout { &outputs.stdout } else { &outputs.stderr });
        let (log, alive) = (Arc::clone(&log), alive.clone());
        let run = move || {
            pump(&*stream, source, &log, &fan);
            drop(alive);
        };
        let builder = std::thread::Builder::new().name("log".into()).stack_size(PUMP_STACK);
        let thread = nacelle_jail::spawn(ThreadKind::Log, builder, run);
        thread.map_err(|source| PodError::Thread { what: "a log's thread", source })?;
    }
    if let Err(error) = agent.start_container(id).await {
        // The reply may have been lost; the container counts as exited from here on.
        if let Err(second) = agent.signal(id, "", SIGKILL, true).await {
            tracing::debug!("after a failed start: {}", Chain(&second));
        }
        return Err(error);
    }
    if tty {
        outputs.stderr.end();
    }
    Ok(Started { streams, log, outputs, pumping })
}

/// The message for a container that the guest's OOM killer ended although it had not reached a limit of its own.
const GUEST_OUT_OF_MEMORY: &str = "no limit of the container was reached: the memory of its machine ran out \
    (without a machine: of its pod's control group, or of the node); limits of memory make machines that hold what containers use";

/// How a container ended.
pub struct Ended {
    /// The exit code.
    pub code: u32,
    /// The OOM killer ended the container.
    pub oom_killed: bool,
    /// The time in nanoseconds since 1970, by the guest's clock.
    pub at: FromGuest<i64>,
    /// The reason of a loss, or that the guest's memory ran out; empty otherwise.
    pub message: String,
}

/// Waits until a container has ended and its output is in the log.
pub async fn ended(agent: &Agent, id: &str, pumping: &mut mpsc::Receiver<()>) -> Ended {
    let mut pause = RETRY.0;
    let end = loop {
        match agent.wait(id, "").await {
            Ok(None) => pause = RETRY.0,
            Ok(Some(exit)) => {
                let message = if exit.guest_out_of_memory { GUEST_OUT_OF_MEMORY } else { "" };
                break Ended {
                    code: exit.code,
                    oom_killed: exit.oom_killed,
                    at: exit.finished_at,
                    message: message.to_owned(),
                };
            }
            Err(error) if error.kind() == Kind::NotFound => {
                let message = Chain(&error).to_string();
                // The end of its streams cannot be predicted.
                let at = FromGuest::new(crate::now_nanos());
                return Ended { code: LOST, oom_killed: false, at, message };
            }
            // If the VM has ended, the actor learns that elsewhere and aborts this task.
            Err(error) => {
                tracing::warn!(container = id, "{}", Chain(&error));
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(RETRY.1);
            }
        }
    };
    if tokio::time::timeout(DRAIN, pumping.recv()).await.is_err() {
        tracing::warn!(container = id, "the container has ended, its output has not");
    }
    end
}

/// Waits until a container is gone or has the wanted phase.
pub(crate) async fn until(
    published: &mut watch::Receiver<PodRecord>,
    id: &str,
    limit: Duration,
    what: &'static str,
    wanted: impl Fn(ContainerPhase) -> bool,
) -> Result<(), PodError> {
    let so = |record: &PodRecord| match record.containers.iter().find(|container| container.id == id) {
        Some(container) => wanted(container.phase),
        None => true,
    };
    match tokio::time::timeout(limit, published.wait_for(so)).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(_closed)) => Err(PodError::Ending),
        Err(_elapsed) => Err(PodError::TooSlow { what, limit }),
    }
}

/// Returns the record of a container that was just created.
pub fn made_record(id: &str, response: &common::CreateContainerResponse) -> ContainerRecord {
    ContainerRecord {
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
