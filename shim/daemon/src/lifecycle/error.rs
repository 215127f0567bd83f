//! Owns: why something asked of a pod or container did not happen, and what that means to the caller.

use super::kernel::OwnKernelError;
use crate::hugepages::TooFew;
use crate::oci::OciError;
use nacelle_base::files::FileError;
use nacelle_base::{Classify, Kind};
use nacelle_image::ImageError;
use nacelle_machines::machine_pod::SourceError;
use nacelle_machines::vms::VmError;
use nacelle_model::empty_dir::MIN_QUOTA;
use nacelle_model::record::CleanupFailure;
use nacelle_model::state::InvalidTransition;
use nacelle_net::NetError;
use nacelle_pod::client::ClientError;
use nacelle_pod::processors::ProcessorsError;
use nacelle_pod::scratch::ScratchError;
use nacelle_pod::share::VolumesError;
use nacelle_store::StoreError;
use std::sync::Arc;
use std::time::Duration;

/// Why it did not happen. Cheap to clone: several callers may wait for one answer.
#[derive(Clone, Debug, thiserror::Error)]
pub enum LifecycleError {
    /// There is no such thing.
    #[error("{what} {id} does not exist")]
    NotFound {
        /// "pod", "container", "image".
        what: &'static str,
        /// As it was named.
        id: String,
    },
    /// The beginning of several ids.
    #[error("{id} is the beginning of the ids of several {what}s; give more digits")]
    Ambiguous {
        /// "pod", "container".
        what: &'static str,
        /// As it was named.
        id: String,
    },
    /// The name belongs to another.
    #[error("the name {name} belongs to {what} {id} already; remove that one or ask with another attempt")]
    NameTaken {
        /// "pod", "container".
        what: &'static str,
        /// The name.
        name: String,
        /// Whose it is.
        id: String,
    },
    /// A machine that outlives its pods has one run at a time.
    #[error("machine {vm} is held by pod {name}, {id}: stop that one, and wait until its machine is gone")]
    VmHeld {
        /// Namespace and name.
        vm: String,
        /// The pod's name.
        name: String,
        /// Its id.
        id: String,
    },
    /// Not in this state.
    #[error("{whose} {id}")]
    Refused {
        /// "pod", "container".
        whose: &'static str,
        /// Which.
        id: String,
        /// What and why.
        source: InvalidTransition,
    },
    /// A pod without a machine to ask.
    #[error("pod {id} is not ready: {why}")]
    NotReady {
        /// Which.
        id: String,
        /// What is known of it.
        why: String,
    },
    /// A pod whose process does not answer at the moment.
    #[error("the process of pod {id} does not answer: it is searched for; try again")]
    Silent {
        /// Which.
        id: String,
    },
    /// A container that would have to run.
    #[error("container {id} does not run")]
    NotRunning {
        /// Which.
        id: String,
    },
    /// The start was told to give up.
    #[error("the pod was stopped while it was booting")]
    Cancelled,
    /// The node has no room for the machine's memory.
    #[error(transparent)]
    HugePages(#[from] TooFew),
    /// Machine or network could not be made.
    #[error("cannot {step}")]
    Step {
        /// "start the machine of the pod", ...
        step: &'static str,
        /// Why.
        source: StepError,
    },
    /// Something took too long.
    #[error("cannot {step}: it took longer than {} s", limit.as_secs())]
    TooSlow {
        /// What.
        step: &'static str,
        /// The limit.
        limit: Duration,
    },
    /// Something could not be given back; the next stop tries again.
    #[error("not everything of pod {id} could be given back: {left}")]
    Unclean {
        /// Which.
        id: String,
        /// What is left, and why.
        left: String,
    },
    /// No machine is so large.
    #[error("a machine with {asked} {what}: at most {most} are possible")]
    TooLarge {
        /// "vCPUs", "MiB of memory".
        what: &'static str,
        /// As limits, handler and annotations ask together.
        asked: u64,
        /// The most.
        most: u64,
    },
    /// A machine cannot become so large.
    #[error(
        "the machine of pod {id} can have {has} for its containers, which cannot hold {wanted}: make the pod anew, or \
         stay within it"
    )]
    TooSmall {
        /// Which.
        id: String,
        /// "268435456 bytes of memory", "1 CPUs".
        has: String,
        /// As was asked.
        wanted: String,
    },
    /// The node has not what a container is to be kept on.
    #[error("{field} is {asked:?}, but the node has {online} online")]
    NotOnline {
        /// "cpuset_cpus", "cpuset_mems".
        field: &'static str,
        /// As was asked.
        asked: String,
        /// What there is.
        online: String,
    },
    /// A machine's memory is not kept on some of the memory nodes.
    #[error(
        "cpuset_mems is {asked:?}, but the memory of a machine may lie on all memory nodes ({online}): leave it out, or run \
         the pod by a handler whose engine is host"
    )]
    MemoryNodes {
        /// As was asked.
        asked: String,
        /// What there is.
        online: String,
    },
    /// Processors of a machine that each have one of the node's to themselves.
    #[error(
        "cpuset_cpus is {asked:?}: that leaves pod {id} {left} processors of the node, and its machine has {vcpus}, each of which has one to \
         itself (dedicatedCpuPlacement): ask for as many whole processors, or make the pod anew with a smaller machine"
    )]
    TooFewProcessors {
        /// Which.
        id: String,
        /// As was asked.
        asked: String,
        /// Processors of the node.
        left: usize,
        /// Processors of the machine.
        vcpus: u32,
    },
    /// What was asked for as a device is none.
    #[error("config.devices.host_path is {path:?}: there is neither a device nor a folder with devices")]
    NoDevice {
        /// The path.
        path: String,
    },
    /// A volume of the machine's own whose mounts on the node are asked for.
    #[error(
        "config.mounts.propagation is not PROPAGATION_PRIVATE at {path:?}, a volume that is memory or a disk of the machine: leave \
         it out"
    )]
    OwnPropagation {
        /// The path.
        path: String,
    },
    /// A volume on a disk, for somebody who cannot have that.
    #[error("config.mounts.host_path is {path:?}: what is in this volume lies on a disk for machines: {instead}")]
    OnDisk {
        /// The path.
        path: String,
        /// What to do.
        instead: &'static str,
    },
    /// A part of a volume on a disk of which the node knows nothing.
    #[error(
        "config.mounts.host_path is {path:?}, which is to be a folder of a volume on a disk, and is none of those that are known of \
         it: only folders can be had as a subPath"
    )]
    NoPart {
        /// The path.
        path: String,
    },
    /// The node is full.
    #[error(
        "there is no room for the disk of the volume {path}: {free} bytes are free on the node, {MIN_QUOTA} are needed at least"
    )]
    NoRoomForDisk {
        /// Its folder.
        path: String,
        /// Bytes.
        free: u64,
    },
    /// A device that only a pod without a machine can have.
    #[error(
        "config.devices.host_path is {path:?}: of the node's devices only block devices reach a machine, which has /dev/fuse \
         and /dev/net/tun of its own (a machine pod has PCI devices by /dev/vfio, too); leave it out, or run the pod by a handler whose \
         engine is host"
    )]
    NotForMachines {
        /// The path.
        path: String,
    },
    /// A block device that cannot be opened.
    #[error("config.devices.host_path is {path:?}: the block device cannot be opened to {way}")]
    DeviceClosed {
        /// The path.
        path: String,
        /// "read", "read and write".
        way: &'static str,
        /// Why.
        source: Arc<std::io::Error>,
    },
    /// A block device without a disk behind it.
    #[error("config.devices.host_path is {path:?}: the block device has no bytes; nothing is behind it")]
    DeviceEmpty {
        /// The path.
        path: String,
    },
    /// Folders with devices have more than anybody uses.
    #[error("config.devices are more than {most} with those in folders")]
    TooManyDevices {
        /// The most.
        most: usize,
    },
    /// The container needs a privileged pod.
    #[error("container {name} is privileged and its pod is not: set linux.security_context.privileged of the pod too")]
    NotPrivileged {
        /// The container's name.
        name: String,
    },
    /// The PID namespaces do not fit.
    #[error(
        "container {name} asks for the PID namespace of the pod, but the pod was made without one (pid: CONTAINER)"
    )]
    NoPodPid {
        /// The container's name.
        name: String,
    },
    /// The pod's task has ended; asking again finds what is so now.
    #[error("the pod has just been removed")]
    Ended,
    /// The pod's task has panicked.
    #[error("BUG: the task of pod {pod} has failed; the pod runs on, restart nacelle to manage it again")]
    TaskFailed {
        /// The pod's id.
        pod: String,
    },
}

/// The cause of a step that failed.
#[derive(Clone, Debug, thiserror::Error)]
pub enum StepError {
    /// The pod process.
    #[error(transparent)]
    Pod(#[from] Arc<ClientError>),
    /// The network.
    #[error(transparent)]
    Net(#[from] Arc<NetError>),
    /// The image store.
    #[error(transparent)]
    Image(#[from] Arc<ImageError>),
    /// The state store.
    #[error(transparent)]
    Store(#[from] Arc<StoreError>),
    /// A file.
    #[error(transparent)]
    File(#[from] Arc<FileError>),
    /// Volumes of the node.
    #[error(transparent)]
    Volumes(#[from] Arc<VolumesError>),
    /// Processors of the node.
    #[error(transparent)]
    Processors(#[from] Arc<ProcessorsError>),
    /// A disk.
    #[error(transparent)]
    Disk(#[from] Arc<ScratchError>),
    /// The OCI specification.
    #[error(transparent)]
    Oci(#[from] Arc<OciError>),
    /// A machine that outlives its pods.
    #[error(transparent)]
    Vm(#[from] Arc<VmError>),
    /// The disks of a machine pod.
    #[error(transparent)]
    Source(#[from] Arc<SourceError>),
    /// The kernel that the pod brings.
    #[error(transparent)]
    Kernel(#[from] Arc<OwnKernelError>),
}

macro_rules! from {
    ($($error:ty => $variant:ident),*) => {$(
        impl From<$error> for StepError {
            fn from(error: $error) -> Self {
                StepError::$variant(Arc::new(error))
            }
        }
    )*};
}
from!(ClientError => Pod, NetError => Net, ImageError => Image, StoreError => Store, FileError => File, OciError => Oci, VolumesError => Volumes, ProcessorsError => Processors, ScratchError => Disk, SourceError => Source, VmError => Vm, OwnKernelError => Kernel);

/// Says which step failed: `.map_err(at("start the machine"))`.
pub fn at<E: Into<StepError>>(step: &'static str) -> impl FnOnce(E) -> LifecycleError {
    move |error| LifecycleError::Step { step, source: error.into() }
}

/// What is left of a pod, on one line.
pub fn left_line(left: &[CleanupFailure]) -> String {
    let each: Vec<String> = left.iter().map(|left| format!("{}: {}", left.what, left.why)).collect();
    each.join("; ")
}

impl Classify for StepError {
    fn kind(&self) -> Kind {
        match self {
            StepError::Pod(error) => error.kind(),
            StepError::Net(error) => error.kind(),
            StepError::Image(error) => error.kind(),
            StepError::Store(error) => error.kind(),
            StepError::File(error) => error.kind(),
            StepError::Oci(error) => error.kind(),
            StepError::Disk(error) => error.kind(),
            StepError::Volumes(error) => error.kind(),
            StepError::Processors(error) => error.kind(),
            StepError::Source(error) => error.kind(),
            StepError::Vm(error) => error.kind(),
            StepError::Kernel(error) => error.kind(),
        }
    }
}

impl Classify for LifecycleError {
    fn kind(&self) -> Kind {
        match self {
            LifecycleError::NotFound { .. } => Kind::NotFound,
            LifecycleError::Ambiguous { .. }
            | LifecycleError::NotPrivileged { .. }
            | LifecycleError::NotOnline { .. }
            | LifecycleError::TooFewProcessors { .. }
            | LifecycleError::NoDevice { .. }
            | LifecycleError::TooManyDevices { .. }
            | LifecycleError::TooLarge { .. }
            | LifecycleError::NoPodPid { .. } => Kind::Invalid,
            LifecycleError::MemoryNodes { .. }
            | LifecycleError::NotForMachines { .. }
            | LifecycleError::OwnPropagation { .. } => Kind::Unsupported,
            LifecycleError::NoRoomForDisk { .. } => Kind::Exhausted,
            LifecycleError::NameTaken { .. } => Kind::AlreadyExists,
            LifecycleError::Refused { .. }
            | LifecycleError::NotReady { .. }
            | LifecycleError::NotRunning { .. }
            | LifecycleError::TooSmall { .. }
            | LifecycleError::DeviceClosed { .. }
            | LifecycleError::VmHeld { .. }
            | LifecycleError::DeviceEmpty { .. }
            | LifecycleError::OnDisk { .. }
            | LifecycleError::NoPart { .. }
            | LifecycleError::Cancelled => Kind::Conflict,
            LifecycleError::HugePages(source) => source.kind(),
            LifecycleError::Step { source, .. } => source.kind(),
            LifecycleError::TooSlow { .. } => Kind::Timeout,
            LifecycleError::Silent { .. } => Kind::Unavailable,
            LifecycleError::Unclean { .. } | LifecycleError::TaskFailed { .. } => Kind::Internal,
            LifecycleError::Ended => Kind::NotFound,
        }
    }
}
