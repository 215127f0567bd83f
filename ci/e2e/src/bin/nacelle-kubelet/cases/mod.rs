//! Lists the cases.

mod admission;
mod cluster;
mod driven;
mod ends;
mod machines;
mod restarts;
mod runs;
mod shows;
mod volumes;

use crate::world::World;

/// The result of a case that did not fail.
pub enum Outcome {
    /// The case passed.
    Passed,
    /// The case cannot run here, with the reason.
    Skipped(&'static str),
}

/// A case that shares the node with others.
pub type Shared = (&'static str, fn(&World) -> Outcome);
/// A case that needs the node exclusively.
pub type Alone = (&'static str, fn(&mut World) -> Outcome);

/// The cases that share the node. Long ones come first.
pub const SHARED: &[Shared] = &[
    ("crash loop", ends::crash_loop),
    ("log rotation", shows::log_rotation),
    ("web server with probes", runs::web_server_with_probes),
    ("hooks and last words", ends::hooks_and_last_words),
    ("a deadline", ends::a_deadline),
    ("a job that is tried again", ends::a_job_that_is_tried_again),
    ("init container and sidecar", runs::init_container_and_sidecar),
    ("memory hog", ends::memory_hog),
    ("another manifest", runs::another_manifest),
    ("a missing image", runs::a_missing_image),
    ("host network", runs::host_network),
    ("restricted", runs::restricted),
    ("user namespace", runs::user_namespace),
    ("what a pod knows of itself", runs::what_a_pod_knows_of_itself),
    ("scratch volumes", volumes::scratch),
    ("huge pages", volumes::huge_pages),
    ("directories of the node", volumes::directories_of_the_node),
    ("an image as a volume", volumes::an_image_as_a_volume),
    ("exec, attach and logs", shows::exec_attach_and_logs),
    ("statistics and metrics", shows::statistics_and_metrics),
    ("evented PLEG", shows::evented_pleg),
];

/// The cases that need an API server: the node joins it after all others are done.
pub const CLUSTER: &[Shared] = &[
    ("eviction", cluster::eviction),
    ("a machine", machines::a_machine),
    ("a set of machines", machines::a_set_of_machines),
    ("a volume with a limit", cluster::a_volume_with_a_limit),
    ("a database with a claim", cluster::a_database_with_a_claim),
    ("configuration that changes", cluster::configuration_that_changes),
    ("what the node says", cluster::what_the_node_says),
    ("two handlers side by side", cluster::two_handlers_side_by_side),
    ("a raw block volume", cluster::a_raw_block_volume),
    ("volumes of a driver", driven::volumes_of_a_driver),
    ("an ephemeral container", cluster::an_ephemeral_container),
    ("kubectl by hand", cluster::kubectl_by_hand),
    ("a size that changes", cluster::a_size_that_changes),
    ("a wrong machine", admission::a_wrong_machine),
    ("deleted at once", cluster::deleted_at_once),
    ("a host port", cluster::a_host_port),
];

/// The cases that need the node exclusively, in this order.
pub const ALONE: &[Alone] = &[
    ("kubelet killed", restarts::kubelet_killed),
    ("nacelle killed", restarts::nacelle_killed),
    ("both killed", restarts::both_killed),
    ("a pod removed while all are dead", restarts::a_pod_removed_while_all_are_dead),
];
