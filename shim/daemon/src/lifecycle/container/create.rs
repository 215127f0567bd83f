//! Creates a prepared container in the guest.

use super::machine;
use super::prepare::Prepared;
use crate::lifecycle::context::NodeServices;
use crate::lifecycle::context::error::LifecycleError;
use crate::lifecycle::context::request::ask;
use crate::lifecycle::volume::shared::{detach_all, detach_from};
use nacelle_model::record::{ContainerRecord, PodRecord};
use nacelle_model::security::ContainerUser;
use nacelle_pod::share::VolumeTarget;
use std::sync::Arc;

/// The largest number of a user's groups in a report of a pod process; Linux allows 65536.
const MAX_GROUPS: usize = 65536;

/// Creates the container in the guest. On failure its volumes are detached.
pub(crate) async fn create(
    services: Arc<NodeServices>,
    pod: PodRecord,
    record: ContainerRecord,
    prepared: Prepared,
) -> Result<ContainerUser, LifecycleError> {
    let Prepared { request, client, offers, passed, in_sysfs: _ } = prepared;
    let opened = !request.copied_in_volumes.is_empty() || !request.socket_volumes.is_empty();
    let mut made = ask("make the container", services.request_timeout(), client.create_container(request)).await;
    // Only now: another machine of the pod may have held its own devices until the creation.
    if let (Ok(_), Some(passed)) = (&made, passed)
        && let Err(error) = machine::pass(&services, &pod, passed).await
    {
        made = Err(error);
    }
    // By now the container holds the disks, or nothing does.
    drop(offers);
    match made {
        Ok(made) => {
            if opened {
                // The copied-in volumes are read, or stay open; the socket volumes stay open.
                detach_from(&services, &pod, &record, VolumeTarget::CopiedIn).await;
            }
            let groups = made.supplemental_groups.into_iter().take(MAX_GROUPS).collect();
            Ok(ContainerUser { uid: made.uid, gid: made.gid, groups })
        }
        Err(error) => {
            detach_all(&services, &pod, &record).await;
            Err(error)
        }
    }
}
