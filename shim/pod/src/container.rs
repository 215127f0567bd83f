//! Owns: what is done to make, run, stop and remove one container. Every function here is one effect: it is started
//! by the actor, owns no state of the pod, and reports back.

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

/// A pump's stack: it calls little and its buffers are on the heap.
const PUMP_STACK: usize = 128 << 10;
/// From the end of a container to the end of its streams, which a process left behind may hold open.
const DRAIN: Duration = Duration::from_secs(30);
/// Between two tries to hear from an agent that fails; the second is the longest: each failure is a line in our log.
const RETRY: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(8));
const SIGKILL: u32 = 9;

/// Whether an image is attached; none: not yet.
pub type Attached = watch::Receiver<Option<Result<(), Failure>>>;

/// What one container needs of the image disk for one of its images.
pub struct ImageUse {
    /// Where the image lies.
    pub placement: Placement,
    /// The work, for the first user.
    pub attach: Option<Attach>,
    /// Its outcome, for every user.
    pub attached: Attached,
}

/// An image that must be placed and mounted.
pub struct Attach {
    /// The image disk; none without a guest.
    pub slot: Option<Slot>,
    /// The image's name, for errors.
    pub key: String,
    /// Its pieces.
    pub image: ImageDisk,
    /// Where the outcome is told.
    pub tell: watch::Sender<Option<Result<(), Failure>>>,
}

/// What one container needs of the disk for volumes for one of its devices.
pub struct DeviceUse {
    /// The device's partition.
    pub number: u32,
    /// The work, if there is some.
    pub attach: Option<DeviceAttach>,
    /// Its outcome, for every user.
    pub attached: Attached,
}

/// A device that must be shown to the guest, or may be written from now on.
pub struct DeviceAttach {
    /// Where.
    pub placed: Arc<Placed>,
    /// Opened.
    pub file: File,
    /// For writing, too.
    pub writable: bool,
    /// What was to be done with it before.
    pub before: Option<Attached>,
    /// Where the outcome is told.
    pub tell: watch::Sender<Option<Result<(), Failure>>>,
}

/// Attaches the images that nobody did (the root's is the first), and the devices, pushes its volumes, hands its disks over, and has
/// the agent make the container.
pub async fn make(
    agent: Agent,
    request: Arc<pod::CreateContainerRequest>,
    mut images: Vec<ImageUse>,
    devices: Vec<DeviceUse>,
    disks: Vec<(String, File)>,
    pushed: Pushed,
) -> Result<Bounded<common::CreateContainerResponse>, Failure> {
    // All of them, before it waits for others: nobody waits for a container that waits.
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
    // The machine has them, or nobody.
    drop(handed_over);
    match made {
        Ok(made) => Ok(made),
        Err(error) => {
            // A reply that was lost may hide a container that was made.
            if let Err(second) = agent.remove_container(&request.id).await {
                tracing::debug!("after a failed creation: {}", Chain(&second));
            }
            Err(error.into())
        }
    }
}

/// Attaches a container's devices, or waits until others have; their partitions.
async fn attach(agent: &Agent, mut uses: Vec<DeviceUse>) -> Result<Vec<u32>, Failure> {
    // As with images: nobody waits for a container that waits.
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

/// Devices as the agent is told of them; those with volumes are none.
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

/// emptyDirs as the agent is told of them, with the partitions of those on disks.
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
        // The pieces of an image are whole files.
        request.files = attach.image.extents.iter().map(|piece| piece.path.display().to_string()).collect();
    }
    agent.attach_image(request).await
}

/// Unmounts an image that nobody uses and takes it off the disk. If the agent does not let go of it, its place
/// stays taken.
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
    /// Ends the pumps, wherever they are.
    fn drop(&mut self) {
        for stream in &self.0 {
            // One that has ended already is as good.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

/// Those who listen to a container.
#[derive(Clone, Debug, Default)]
pub struct Outputs {
    /// To its output, or its terminal.
    pub stdout: Arc<Fan>,
    /// To its errors.
    pub stderr: Arc<Fan>,
}

/// What a started container leaves with the actor.
pub struct Started {
    /// To be dropped when the container is removed.
    pub streams: Streams,
    /// For ReopenLog.
    pub log: Arc<LogFile>,
    /// For those who listen.
    pub outputs: Outputs,
    /// Ends when all pumps have.
    pub pumping: mpsc::Receiver<()>,
}

/// Opens the log and the streams, then has the agent start the container: no byte of output can be missed.
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
        // The answer may have been lost, and the container counts as ended from here on.
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

/// What the OOM killer of the guest says of a container that had not reached a limit of its own.
const GUEST_OUT_OF_MEMORY: &str = "no limit of the container was reached: the memory of its machine ran out \
    (without a machine: of its pod's control group, or of the node); limits of memory make machines that hold what containers use";

/// How a container ended.
pub struct Ended {
    /// Its exit code.
    pub code: u32,
    /// The OOM killer ended it.
    pub oom_killed: bool,
    /// Nanoseconds since 1970, by the guest's clock.
    pub at: FromGuest<i64>,
    /// Why it was lost, or that the guest's memory ran out; empty otherwise.
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
                // Nobody knows when its streams will end.
                let at = FromGuest::new(crate::now_nanos());
                return Ended { code: LOST, oom_killed: false, at, message };
            }
            // The machine's end, if it is that, is noticed elsewhere and ends this task.
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

/// Waits until a container is gone or its phase is as wanted.
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

/// The record of a container that was just made.
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
