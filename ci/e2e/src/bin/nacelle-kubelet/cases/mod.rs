//! Lists the cases.

mod admission;
mod checkpoints;
mod cluster;
mod csi;
mod eviction;
mod machines;
mod observability;
mod pod_features;
mod restarts;
mod termination;
mod volumes;

use crate::fixture::KubeletFixture;

/// The result of a case that did not fail.
pub enum CaseResult {
    /// The case passed.
    Passed,
    /// The case cannot run here, with the reason.
    Skipped(&'static str),
}

/// A case that shares the node with others.
pub type SharedCase = (&'static str, fn(&KubeletFixture) -> CaseResult);
/// A case that needs the node exclusively.
pub type ExclusiveCase = (&'static str, fn(&mut KubeletFixture) -> CaseResult);

/// The cases that share the node. Long ones come first.
pub const SHARED: &[SharedCase] = &[
    ("crash loop", termination::crash_loop),
    ("log rotation", observability::log_rotation),
    ("web server with probes", pod_features::web_server_with_probes),
    ("hooks and termination message", termination::hooks_and_termination_message),
    ("active deadline", termination::active_deadline),
    ("job with a retry", termination::job_with_a_retry),
    ("init container and sidecar", pod_features::init_container_and_sidecar),
    ("memory hog", termination::memory_hog),
    ("changed manifest", pod_features::changed_manifest),
    ("a missing image", pod_features::a_missing_image),
    ("host network", pod_features::host_network),
    ("restricted", pod_features::restricted),
    ("user namespace", pod_features::user_namespace),
    ("downward API and hostname", pod_features::downward_api_and_hostname),
    ("emptyDir volumes", volumes::empty_dir_volumes),
    ("huge pages", volumes::huge_pages),
    ("hostPath volumes", volumes::host_path_volumes),
    ("image volume", volumes::image_volume),
    ("exec, attach and logs", observability::exec_attach_and_logs),
    ("statistics and metrics", observability::statistics_and_metrics),
    ("evented PLEG", observability::evented_pleg),
];

/// The cases that need an API server: the node joins it after all others are done.
pub const CLUSTER: &[SharedCase] = &[
    ("eviction", cluster::eviction),
    ("machine pod", machines::machine_pod),
    ("replica set of machine pods", machines::replica_set_of_machine_pods),
    ("replica set from a checkpoint", checkpoints::replica_set_from_a_checkpoint),
    ("emptyDir with a size limit", cluster::empty_dir_with_a_size_limit),
    ("a database with a claim", cluster::a_database_with_a_claim),
    ("configuration updates", cluster::configuration_updates),
    ("node status", cluster::node_status),
    ("two runtime handlers", cluster::two_runtime_handlers),
    ("a raw block volume", cluster::a_raw_block_volume),
    ("CSI volumes", csi::csi_volumes),
    ("an ephemeral container", cluster::an_ephemeral_container),
    ("kubectl commands", cluster::kubectl_commands),
    ("pod resize", cluster::pod_resize),
    ("admission webhook", admission::admission_webhook),
    ("forced deletion", cluster::forced_deletion),
    ("a host port", cluster::a_host_port),
];

/// The cases that need the node exclusively, in this order.
pub const EXCLUSIVE: &[ExclusiveCase] = &[
    ("kubelet killed", restarts::kubelet_killed),
    ("nacelle killed", restarts::nacelle_killed),
    ("both killed", restarts::both_killed),
    ("a pod removed while both daemons are dead", restarts::a_pod_removed_while_both_daemons_are_dead),
];

/// The cases that need an API server and the node exclusively, after all others.
pub const CLUSTER_EXCLUSIVE: &[ExclusiveCase] =
    &[("eviction under memory pressure", eviction::eviction_under_memory_pressure)];
