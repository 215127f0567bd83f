//! Defines the values of labels. Each label has few values, whatever guests, images and clients send: a handler is a key of the
//! configuration, and everything else is one of the lists here.

use nacelle_model::record::ContainerRecord;
use nacelle_model::state::{ContainerState, PodState};
use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue, LabelValueEncoder};
use std::fmt::{self, Write};

/// Defines the values of a label.
macro_rules! label_values {
    ($(#[$doc:meta])* $name:ident { $($(#[$variant_doc:meta])* $variant:ident = $text:literal,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum $name {
            $($(#[$variant_doc])* $variant,)*
        }

        impl $name {
            /// All values.
            pub const ALL: &[$name] = &[$($name::$variant),*];

            /// Returns the text of the label.
            pub fn as_str(self) -> &'static str {
                match self {
                    $($name::$variant => $text,)*
                }
            }
        }

        impl EncodeLabelValue for $name {
            fn encode(&self, encoder: &mut LabelValueEncoder) -> fmt::Result {
                encoder.write_str(self.as_str())
            }
        }
    };
}

label_values! {
    /// The result of a request.
    RequestResult {
        /// It succeeded.
        Success = "success",
        /// It failed.
        Failure = "failure",
    }
}

impl RequestResult {
    /// Returns the result for `Result::is_ok`.
    pub fn of(is_ok: bool) -> RequestResult {
        if is_ok { RequestResult::Success } else { RequestResult::Failure }
    }
}

label_values! {
    /// The result of a pull.
    PullResult {
        /// The image is in the store.
        Success = "success",
        /// It failed.
        Failure = "failure",
        /// The client gave up, or its time limit passed.
        Cancelled = "cancelled",
    }
}

label_values! {
    /// The end of a pod's start.
    StartResult {
        /// The pod is ready.
        Ready = "ready",
        /// The start failed.
        Failed = "failed",
        /// A request stopped the pod while it started.
        Cancelled = "cancelled",
    }
}

label_values! {
    /// How a pod of an earlier daemon continues.
    RecoveryOutcome {
        /// Its process responds: it continues unchanged.
        Adopted = "adopted",
        /// Its process exists and does not respond: the daemon searches for it.
        Silent = "silent",
        /// Its process ended while no daemon ran.
        Lost = "lost",
        /// It was being stopped, or its cleanup had failed.
        CleanedUp = "cleaned_up",
        /// No client knew it: its start was cut, or its removal.
        Discarded = "discarded",
        /// It had been stopped before.
        Stopped = "stopped",
    }
}

label_values! {
    /// Why a VM ended without a request.
    VmEndCause {
        /// The pod process reported it: the guest ended, or its VMM failed.
        Ended = "ended",
        /// The OOM killer of the node ended a process of the pod.
        OomKilled = "oom_killed",
        /// The pod process ended.
        ProcessLost = "process_lost",
        /// It ended while no daemon ran.
        Unobserved = "unobserved",
    }
}

label_values! {
    /// The reason of a container's end, in the words that kubelet and users expect.
    ExitReason {
        /// Exit code 0.
        Completed = "Completed",
        /// Another exit code, or the container ended with its VM.
        Error = "Error",
        /// The OOM killer ended it.
        OomKilled = "OOMKilled",
        /// It could not be started.
        StartError = "StartError",
    }
}

impl ExitReason {
    /// Returns the reason of an ended container.
    pub fn of(container: &ContainerRecord) -> ExitReason {
        match container.exit_code {
            _ if container.oom_killed => ExitReason::OomKilled,
            _ if container.start_failed => ExitReason::StartError,
            0 => ExitReason::Completed,
            _ => ExitReason::Error,
        }
    }
}

label_values! {
    /// A CNI command that the daemon sends to the plugins of a network.
    CniCommandLabel {
        /// Attaches a pod.
        Add = "ADD",
        /// Detaches a pod.
        Del = "DEL",
        /// Whether ADD would succeed.
        Status = "STATUS",
        /// Releases what no pod has.
        Gc = "GC",
    }
}

/// The step of a pod's start that the label `phase` names; the names of the timeline come from the daemon and the pod process,
/// which may send anything.
pub(crate) fn phase_label(step: &str) -> &'static str {
    match step {
        "kernel out of its image" => "kernel_from_image",
        "network namespace" => "network_namespace",
        "CNI" => "cni_add",
        "pod process" => "pod_process",
        "taps joined to the network" => "join_taps",
        "guest ready" => "guest_ready",
        "template" => "template",
        "taps" | "taps and scratch disk" => "taps_and_scratch_disk",
        "machine" => "vm",
        "machine from its template" => "vm_from_template",
        "kernel" => "kernel",
        "agent" => "agent",
        "configuration of the guest" => "configure_guest",
        _ => "other",
    }
}

/// Returns the label of a pod's state.
pub(crate) fn pod_state_label(state: PodState) -> &'static str {
    match state {
        PodState::Booting => "booting",
        PodState::Ready => "ready",
        PodState::Stopping => "stopping",
        PodState::Unclean => "unclean",
        PodState::Stopped => "stopped",
        PodState::Removing => "removing",
    }
}

/// Returns the label of a container's state.
pub(crate) fn container_state_label(state: ContainerState) -> &'static str {
    match state {
        ContainerState::Creating => "creating",
        ContainerState::Created => "created",
        ContainerState::Starting => "starting",
        ContainerState::Running => "running",
        ContainerState::Exited => "exited",
        ContainerState::Removing => "removing",
    }
}

/// Defines the labels of families.
macro_rules! label_sets {
    ($($name:ident { $($label:ident: $value:ty),* })*) => {
        $(#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
        pub(crate) struct $name { $(pub $label: $value),* })*
    };
}

label_sets! {
    BuildLabels { version: &'static str, commit: &'static str }
    RpcLabels { rpc: &'static str }
    RpcCodeLabels { rpc: &'static str, code: &'static str }
    HandlerLabels { handler: String }
    HandlerStateLabels { handler: String, state: &'static str }
    HandlerResultLabels { handler: String, result: StartResult }
    HandlerPhaseLabels { handler: String, phase: &'static str }
    StateLabels { state: &'static str }
    OutcomeLabels { outcome: RecoveryOutcome }
    CauseLabels { cause: VmEndCause }
    ExitLabels { reason: ExitReason }
    ReasonLabels { reason: &'static str }
    ResultLabels { result: RequestResult }
    PullLabels { result: PullResult }
    CommandLabels { command: CniCommandLabel }
    CommandResultLabels { command: CniCommandLabel, result: RequestResult }
    KindLabels { kind: &'static str }
}
