//! Passes SSH keys and passwords from the secrets of machine pods to their guests (docs/user/vm/cloud-init-and-credentials.md,
//! "Keys and passwords while it runs"). The keeper gets them by a verb when they change and when the machine starts anew. The
//! files are read on the blocking pool.

use crate::follow::{self, Follow, LOOK};
use crate::lifecycle::{LifecycleError, Node, View};
use nacelle_base::Chain;
use nacelle_base::task::{TaskError, run_blocking};
use nacelle_keeper::NO_GUEST_AGENT;
use nacelle_machines::machine_pod;
use nacelle_model::machine::Credentials;
use nacelle_model::record::ContainerRecord;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The longest pause before the next attempt, after the guest rejected the credentials or did not respond.
const LONGEST: Duration = Duration::from_secs(30);
/// Time after which unchanged credentials are sent again: the machine may have restarted, or returned to an earlier state.
const REMIND: Duration = Duration::from_secs(15);
/// Time limit of a verb.
const VERB: Duration = Duration::from_secs(60);

/// Why a guest does not have the credentials of the secrets.
#[derive(Debug, thiserror::Error)]
enum CredentialError {
    #[error("the secrets cannot be read")]
    Read(#[from] machine_pod::VolumeError),
    #[error("its guest agent does not answer yet")]
    Nobody,
    #[error("the guest refuses: {said}")]
    Refused { said: String },
    #[error("the machine cannot be asked")]
    Ask(#[from] LifecycleError),
    #[error("they cannot be written")]
    Write(#[from] serde_json::Error),
    #[error(transparent)]
    Task(#[from] TaskError),
}

/// The secrets of a machine whose guest agent is to set credentials.
pub(crate) enum Secrets {}

impl Follow for Secrets {
    fn wanted(view: &View, _container: &ContainerRecord) -> bool {
        view.pod.config.machine.as_ref().is_some_and(|machine| !machine.credentials.is_empty())
    }

    async fn follow(node: Node, view: Arc<View>, container: ContainerRecord) {
        keep(node, view, container).await;
    }
}

async fn keep(node: Node, view: Arc<View>, container: ContainerRecord) {
    let (pod, id) = (&view.pod.id, container.id.as_str());
    let lives = || follow::runs::<Secrets>(&node, &container.id);
    let (mut told, mut said, mut wait) = (None, String::new(), LOOK);
    while lives() {
        match tell(&node, &view, &container, &mut told).await {
            Ok(()) => {
                wait = LOOK;
                if !said.is_empty() {
                    tracing::info!(%pod, container = id, "the guest has the keys and passwords of its secrets");
                }
                said.clear();
            }
            Err(error) => {
                let text = Chain(&error).to_string();
                if text != said && lives() {
                    match error {
                        CredentialError::Nobody => {
                            tracing::info!(%pod, container = id, "keys and passwords wait: {text}")
                        }
                        _ => {
                            tracing::warn!(%pod, container = id, "the guest does not have all keys and passwords of its secrets: {text}")
                        }
                    }
                }
                said = text;
                wait = (wait * 2).min(LONGEST);
            }
        }
        tokio::time::sleep(wait).await;
    }
}

/// Sends the credentials of the secrets to the keeper, if they have changed or were sent long ago.
async fn tell(
    node: &Node,
    view: &Arc<View>,
    container: &ContainerRecord,
    told: &mut Option<(Credentials, Instant)>,
) -> Result<(), CredentialError> {
    let (read, config) = (Arc::clone(view), Arc::clone(&container.config));
    let found = run_blocking("read the secrets of a VM", move || {
        let machine = read.pod.config.machine.as_deref();
        machine.map(|machine| machine_pod::credentials(machine, &config)).transpose()
    });
    let Some(wanted) = found.await?? else { return Ok(()) };
    if told.as_ref().is_some_and(|(known, at)| *known == wanted && at.elapsed() < REMIND) {
        return Ok(());
    }
    let words = vec!["@vm".to_owned(), "credentials".to_owned(), serde_json::to_string(&wanted)?];
    let done = node.exec(container.id.as_str(), words, Some(VERB)).await?;
    match u32::try_from(done.exit_code) {
        Ok(0) => {
            *told = Some((wanted, Instant::now()));
            Ok(())
        }
        Ok(NO_GUEST_AGENT) => Err(CredentialError::Nobody),
        _ => {
            let said = String::from_utf8_lossy(&done.stderr).trim().chars().take(500).collect();
            Err(CredentialError::Refused { said })
        }
    }
}
