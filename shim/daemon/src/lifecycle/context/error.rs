//! Defines the errors of operations on pods and containers, and their kinds for the caller.

use super::boot_files::BootFileError;
use crate::hugepages::HugepagesExhausted;
use crate::oci::OciError;
use nacelle_base::files::FileError;
use nacelle_base::{Classify, FailureKind};
use nacelle_engine::KernelError;
use nacelle_image::ImageError;
use nacelle_machines::machine_pod::SourceError;
use nacelle_machines::vms::VmError;
use nacelle_model::empty_dir::MIN_QUOTA;
use nacelle_model::record::CleanupFailure;
use nacelle_model::state::InvalidTransition;
use nacelle_net::NetError;
use nacelle_pod::MountNamespaceError;
use nacelle_pod::affinity::AffinityError;
use nacelle_pod::client::{ClientError, LogFileError};
use nacelle_pod::scratch::ScratchError;
use nacelle_pod::share::VolumesError;
use nacelle_store::StoreError;
use std::sync::Arc;
use std::time::Duration;

/// Why an operation failed. Cheap to clone, because several callers may wait for one result.
#[derive(Clone, Debug, thiserror::Error)]
pub enum LifecycleError {
    /// A restored container has a volume whose content is not in its checkpoint.
    #[error("the volume at {path} is not in the checkpoint: it is shared with the node now, or is another one")]
    NotInCheckpoint {
        /// The path in the container.
        path: String,
    },
    /// A container of a checkpoint was created with another attempt number meanwhile.
    #[error("container {name:?} has continued from the checkpoint already; try again to create a new one")]
    Continued {
        /// The container's name.
        name: String,
    },
    /// The pod, container or image does not exist.
    #[error("{what} {id} does not exist")]
    NotFound {
        /// The kind of object: "pod", "container", "image".
        what: &'static str,
        /// The name or id in the request.
        id: String,
    },
    /// The id prefix matches several ids.
    #[error("{id} is a prefix of the ids of several {what}s; use more digits")]
    Ambiguous {
        /// The kind of object: "pod", "container".
        what: &'static str,
        /// The prefix in the request.
        id: String,
    },
    /// Another object has this name.
    #[error("cannot create {what} {name}: {what} {id} has that name; remove it or use another attempt number")]
    NameTaken {
        /// The kind of object: "pod", "container".
        what: &'static str,
        /// The name.
        name: String,
        /// The id of the object that has the name.
        id: String,
    },
    /// Another pod runs the persistent VM, which has one run at a time.
    #[error("machine {vm} is held by pod {name}, {id}: stop that one, and wait until its machine is gone")]
    VmHeld {
        /// Namespace and name of the VM.
        vm: String,
        /// The name of the pod that runs it.
        name: String,
        /// The id of that pod.
        id: String,
    },
    /// The operation is invalid in the object's state.
    #[error("{whose} {id}")]
    Refused {
        /// The kind of object: "pod", "container".
        whose: &'static str,
        /// The object's id.
        id: String,
        /// The rejected transition.
        source: InvalidTransition,
    },
    /// The pod is not ready.
    #[error("pod {id} is not ready: {why}")]
    NotReady {
        /// The pod's id.
        id: String,
        /// The reason, as far as it is known.
        why: String,
    },
    /// The pod process does not respond at the moment.
    #[error("the process of pod {id} does not respond; the daemon is searching for it; try again")]
    Silent {
        /// The pod's id.
        id: String,
    },
    /// A port of a guest does not accept connections.
    #[error("cannot connect to port {port} of the guest of pod {id}")]
    NoPort {
        /// The pod's id.
        id: String,
        /// The TCP port.
        port: u16,
        /// The cause.
        source: Arc<std::io::Error>,
    },
    /// The container does not run.
    #[error("container {id} does not run{why}")]
    NotRunning {
        /// The container's id.
        id: String,
        /// ": " and how it ended, or empty.
        why: String,
    },
    /// The start was cancelled.
    #[error("the pod was stopped while it was booting")]
    Cancelled,
    /// The node has too few free huge pages for the VM's memory.
    #[error(transparent)]
    HugePages(#[from] HugepagesExhausted),
    /// The VM or the network could not be created.
    #[error("cannot {step}")]
    Step {
        /// The failed step: "start the machine of the pod", ...
        step: &'static str,
        /// The cause.
        source: StepError,
    },
    /// A step exceeded its time limit.
    #[error("cannot {step}: it took longer than {} s", limit.as_secs())]
    TooSlow {
        /// The step.
        step: &'static str,
        /// The limit.
        limit: Duration,
    },
    /// All users of pod processes belong to other pods.
    #[error(
        "cannot create a pod: other pods have all {count} user ids of pod processes; remove stopped pods or raise jail.user_count"
    )]
    NoUser {
        /// The number of user ids.
        count: u32,
    },
    /// The cleanup is incomplete; the next stop tries again.
    #[error("the cleanup of pod {id} is incomplete; the next stop tries again: {left}")]
    Unclean {
        /// The pod's id.
        id: String,
        /// The resources that remain, and why.
        left: String,
    },
    /// The requested resources exceed those of any VM.
    #[error("a machine with {asked} {what}: at most {most} are possible")]
    TooLarge {
        /// The resource: "vCPUs", "MiB of memory".
        what: &'static str,
        /// The sum of what limits, handler and annotations request.
        asked: u64,
        /// The maximum.
        most: u64,
    },
    /// A running VM cannot be resized that far.
    #[error(
        "the VM of pod {id} can have {has} for its containers, which cannot hold {wanted}: recreate the pod, or \
         stay within it"
    )]
    TooSmall {
        /// The pod's id.
        id: String,
        /// The maximum: "268435456 bytes of memory", "1 CPUs".
        has: String,
        /// The requested amount.
        wanted: String,
    },
    /// The node lacks the CPUs or memory nodes to which a container is to be confined.
    #[error("{field} is {asked:?}, but the node has {online} online")]
    NotOnline {
        /// The field of the request: "cpuset_cpus", "cpuset_mems".
        field: &'static str,
        /// The list in the request.
        asked: String,
        /// The list of those that are online.
        online: String,
    },
    /// A VM's memory cannot be confined to some of the memory nodes.
    #[error(
        "cpuset_mems is {asked:?}, but the memory of a machine may lie on all memory nodes ({online}): leave it out, or run \
         the pod by a handler whose engine is host"
    )]
    MemoryNodes {
        /// The list in the request.
        asked: String,
        /// The list of the node's memory nodes.
        online: String,
    },
    /// Too few CPUs would be left for the VM's pinned vCPUs.
    #[error(
        "cpuset_cpus is {requested:?}: that leaves pod {id} {left} CPUs of the node, but its VM has {vcpus} vCPUs, each pinned to a \
         CPU of its own (dedicatedCpuPlacement): request as many whole CPUs, or recreate the pod with fewer vCPUs"
    )]
    TooFewCpus {
        /// The pod's id.
        id: String,
        /// The list in the request.
        requested: String,
        /// The number of CPUs of the node that would be left.
        left: usize,
        /// The number of vCPUs of the VM.
        vcpus: u32,
    },
    /// The path of a requested device is not a device.
    #[error("config.devices.host_path is {path:?}: there is neither a device nor a directory with devices")]
    NoDevice {
        /// The path.
        path: String,
    },
    /// Mount propagation is requested for a volume that is part of the VM.
    #[error(
        "config.mounts.propagation is not PROPAGATION_PRIVATE at {path:?}, a volume that is memory or a disk of the machine: leave \
         it out"
    )]
    OwnPropagation {
        /// The path.
        path: String,
    },
    /// The pod's annotation names the path of a volume that has no sockets of the node.
    #[error(
        "config.annotations[\"vm.nacelle.dev/sockets\"] names {container_path:?}, where the container mounts {source_path:?}: {why}"
    )]
    NoSocketVolume {
        /// The path in the container.
        container_path: String,
        /// The path on the node, or the image.
        source_path: String,
        /// The reason and the advice.
        why: &'static str,
    },
    /// A volume that is a disk of the VM, in a container that cannot have one.
    #[error("config.mounts.host_path is {path:?}: what is in this volume lies on a disk for machines: {instead}")]
    OnDisk {
        /// The path.
        path: String,
        /// The advice for the user.
        instead: &'static str,
    },
    /// The path is no known directory of a volume that is a disk of the VM.
    #[error(
        "config.mounts.host_path is {path:?}, which is to be a directory of a volume on a disk, and is none of those that are known of \
         it: only directories can be had as a subPath"
    )]
    NoPart {
        /// The path.
        path: String,
    },
    /// The node's file system lacks the space for a disk.
    #[error(
        "cannot create the disk of volume {path}: {free} bytes are free on the node and at least {MIN_QUOTA} are needed"
    )]
    NoRoomForDisk {
        /// The volume's directory.
        path: String,
        /// Free bytes.
        free: u64,
    },
    /// The node's device is not what the request expects.
    #[error(
        "config.devices.host_path is {path:?}: {found} on the node, and the CDI specification expects {expected}; correct one of them"
    )]
    DeviceMismatch {
        /// The path.
        path: String,
        /// The kind or number that the request has.
        expected: String,
        /// The kind or number that the node's device has.
        found: String,
    },
    /// A container in a VM requests the device that starts VMs.
    #[error(
        "config.devices.host_path is {path:?}: a guest has no nested virtualization; leave it out, or run the pod by a handler whose \
         engine is host"
    )]
    NoNestedVirtualization {
        /// The path.
        path: String,
    },
    /// A device that only a pod without a guest can have.
    #[error(
        "config.devices.host_path is {path:?}: of the node's devices only block devices reach a VM, which has null, zero, full, \
         random, urandom, tty, fuse and net/tun of its own (a machine pod has PCI devices by /dev/vfio, too); leave it out, or run the \
         pod by a handler whose engine is host"
    )]
    NotForMachines {
        /// The path.
        path: String,
    },
    /// A block device cannot be opened.
    #[error("config.devices.host_path is {path:?}: the block device cannot be opened to {way}")]
    DeviceClosed {
        /// The path.
        path: String,
        /// The access: "read", "read and write".
        way: &'static str,
        /// The cause.
        source: Arc<std::io::Error>,
    },
    /// A block device has no medium.
    #[error("config.devices.host_path is {path:?}: the block device has no bytes; nothing is behind it")]
    DeviceEmpty {
        /// The path.
        path: String,
    },
    /// The requested directories contain too many devices.
    #[error("config.devices are more than {most} with those in directories")]
    TooManyDevices {
        /// The maximum.
        most: usize,
    },
    /// The container needs a privileged pod.
    #[error("container {name} is privileged and its pod is not: set linux.security_context.privileged of the pod too")]
    NotPrivileged {
        /// The container's name.
        name: String,
    },
    /// The container's PID namespace mode does not fit the pod's.
    #[error(
        "container {name} asks for the PID namespace of the pod, but the pod was made without one (pid: CONTAINER)"
    )]
    NoPodPid {
        /// The container's name.
        name: String,
    },
    /// The pod's task has ended; a repeated request finds the current state.
    #[error("the pod has just been removed")]
    Ended,
    /// The pod's task has panicked.
    #[error("BUG: the task of pod {pod} has failed; the pod runs on, restart nacelle to manage it again")]
    TaskFailed {
        /// The pod's id.
        pod: String,
    },
}

/// The largest kernel in bytes: /run is memory.
pub(crate) const MAX_KERNEL_BYTES: u64 = 128 << 20;

/// Why the pod's kernel cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum OwnKernelError {
    /// The image is not on the node, and the node cannot pull it.
    #[error(
        "image {image} is not on this node, and cannot be pulled without credentials of the pod's: bring it there (crictl pull {image})"
    )]
    Pull {
        /// The image.
        image: String,
        /// The cause.
        source: ImageError,
    },
    /// The image is named by an id, which cannot be pulled, and is not on the node.
    #[error("image {image} is not on this node: bring it there, or name it by a reference")]
    NotHere {
        /// The id.
        image: String,
    },
    /// The image cannot be read.
    #[error("image {image} cannot be read")]
    Image {
        /// The image.
        image: String,
        /// The cause.
        source: ImageError,
    },
    /// The image has no such file.
    #[error("image {image} has no file {path:?} (links are not followed to it)")]
    NoFile {
        /// The image.
        image: String,
        /// The path.
        path: String,
    },
    /// The file is too large.
    #[error("{path:?} of image {image} has {size} bytes, and a kernel {MAX_KERNEL_BYTES} at most")]
    TooLarge {
        /// The image.
        image: String,
        /// The path.
        path: String,
        /// The file's size in bytes.
        size: u64,
    },
    /// The file is not a kernel that the VM can boot.
    #[error("{path:?} of image {image} is no kernel for this machine")]
    NoKernel {
        /// The image.
        image: String,
        /// The path.
        path: String,
        /// The cause.
        source: KernelError,
    },
    /// The kernel cannot be written to the pod's directory.
    #[error(transparent)]
    File(#[from] FileError),
}

impl Classify for OwnKernelError {
    fn kind(&self) -> FailureKind {
        match self {
            OwnKernelError::Pull { source, .. } | OwnKernelError::Image { source, .. } => source.kind(),
            OwnKernelError::NotHere { .. } | OwnKernelError::NoFile { .. } => FailureKind::Conflict,
            OwnKernelError::TooLarge { .. } => FailureKind::Invalid,
            OwnKernelError::NoKernel { source, .. } => source.kind(),
            OwnKernelError::File(source) => source.kind(),
        }
    }
}

/// The cause of a failed step.
#[derive(Clone, Debug, thiserror::Error)]
pub enum StepError {
    /// The pod process failed.
    #[error(transparent)]
    Pod(#[from] Arc<ClientError>),
    /// A file from which the VM starts is missing or damaged.
    #[error(transparent)]
    BootFile(#[from] Arc<BootFileError>),
    /// The network failed.
    #[error(transparent)]
    Net(#[from] Arc<NetError>),
    /// The image store failed.
    #[error(transparent)]
    Image(#[from] Arc<ImageError>),
    /// The state store failed.
    #[error(transparent)]
    Store(#[from] Arc<StoreError>),
    /// A file operation failed.
    #[error(transparent)]
    File(#[from] Arc<FileError>),
    /// The log file of a container cannot be opened.
    #[error(transparent)]
    LogFile(#[from] Arc<LogFileError>),
    /// The volumes of the node failed.
    #[error(transparent)]
    Volumes(#[from] Arc<VolumesError>),
    /// The CPUs of the node are the cause.
    #[error(transparent)]
    Processors(#[from] Arc<AffinityError>),
    /// A disk failed.
    #[error(transparent)]
    Disk(#[from] Arc<ScratchError>),
    /// The OCI specification could not be built.
    #[error(transparent)]
    Oci(#[from] Arc<OciError>),
    /// The persistent VM failed.
    #[error(transparent)]
    Vm(#[from] Arc<VmError>),
    /// The disks of a machine pod are the cause.
    #[error(transparent)]
    Source(#[from] Arc<SourceError>),
    /// The kernel that the pod brings is the cause.
    #[error(transparent)]
    Kernel(#[from] Arc<OwnKernelError>),
    /// The owners of the files of a machine pod are the cause.
    #[error(transparent)]
    Owners(#[from] Arc<MountNamespaceError>),
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
from!(ClientError => Pod, BootFileError => BootFile, NetError => Net, ImageError => Image, StoreError => Store, FileError => File, LogFileError => LogFile, OciError => Oci, VolumesError => Volumes, AffinityError => Processors, ScratchError => Disk, SourceError => Source, VmError => Vm, OwnKernelError => Kernel, MountNamespaceError => Owners);

/// Returns a closure that adds the failed step to an error: `.map_err(at("start the machine"))`.
pub fn at<E: Into<StepError>>(step: &'static str) -> impl FnOnce(E) -> LifecycleError {
    move |error| LifecycleError::Step { step, source: error.into() }
}

/// Returns the remaining resources of a pod on one line.
pub fn left_line(left: &[CleanupFailure]) -> String {
    let each: Vec<String> = left.iter().map(|left| format!("{}: {}", left.what, left.why)).collect();
    each.join("; ")
}

impl Classify for StepError {
    fn kind(&self) -> FailureKind {
        match self {
            StepError::Pod(error) => error.kind(),
            StepError::BootFile(error) => error.kind(),
            StepError::Net(error) => error.kind(),
            StepError::Image(error) => error.kind(),
            StepError::Store(error) => error.kind(),
            StepError::File(error) => error.kind(),
            StepError::LogFile(error) => error.kind(),
            StepError::Oci(error) => error.kind(),
            StepError::Disk(error) => error.kind(),
            StepError::Volumes(error) => error.kind(),
            StepError::Processors(error) => error.kind(),
            StepError::Source(error) => error.kind(),
            StepError::Vm(error) => error.kind(),
            StepError::Kernel(error) => error.kind(),
            StepError::Owners(error) => error.kind(),
        }
    }
}

impl Classify for LifecycleError {
    fn kind(&self) -> FailureKind {
        match self {
            LifecycleError::NotInCheckpoint { .. } | LifecycleError::Continued { .. } => FailureKind::Conflict,
            LifecycleError::NotFound { .. } => FailureKind::NotFound,
            LifecycleError::Ambiguous { .. }
            | LifecycleError::NotPrivileged { .. }
            | LifecycleError::NotOnline { .. }
            | LifecycleError::TooFewCpus { .. }
            | LifecycleError::NoDevice { .. }
            | LifecycleError::DeviceMismatch { .. }
            | LifecycleError::TooManyDevices { .. }
            | LifecycleError::TooLarge { .. }
            | LifecycleError::NoPodPid { .. } => FailureKind::Invalid,
            LifecycleError::MemoryNodes { .. }
            | LifecycleError::NotForMachines { .. }
            | LifecycleError::NoNestedVirtualization { .. }
            | LifecycleError::OwnPropagation { .. } => FailureKind::Unsupported,
            LifecycleError::NoRoomForDisk { .. } | LifecycleError::NoUser { .. } => FailureKind::Exhausted,
            LifecycleError::NameTaken { .. } => FailureKind::AlreadyExists,
            LifecycleError::Refused { .. }
            | LifecycleError::NotReady { .. }
            | LifecycleError::NotRunning { .. }
            | LifecycleError::TooSmall { .. }
            | LifecycleError::DeviceClosed { .. }
            | LifecycleError::VmHeld { .. }
            | LifecycleError::DeviceEmpty { .. }
            | LifecycleError::NoSocketVolume { .. }
            | LifecycleError::OnDisk { .. }
            | LifecycleError::NoPart { .. }
            | LifecycleError::Cancelled => FailureKind::Conflict,
            LifecycleError::HugePages(source) => source.kind(),
            LifecycleError::Step { source, .. } => source.kind(),
            LifecycleError::TooSlow { .. } => FailureKind::Timeout,
            LifecycleError::Silent { .. } | LifecycleError::NoPort { .. } => FailureKind::Unavailable,
            LifecycleError::Unclean { .. } | LifecycleError::TaskFailed { .. } => FailureKind::Internal,
            LifecycleError::Ended => FailureKind::NotFound,
        }
    }
}
