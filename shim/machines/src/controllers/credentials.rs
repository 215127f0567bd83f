//! Passes SSH keys and passwords from the secrets of machine pods to their guests (docs/user/vm/cloud-init-and-credentials.md,
//! "Keys and passwords while it runs"). The keeper gets them by a verb when they change and when the VM has restarted. The files
//! are read on the blocking pool.

use super::{Controller, RETRY, is_running};
use crate::machine_pod;
use crate::runtime::{MachinePodView, PodRuntime, PodRuntimeError};
use nacelle_base::task::{TaskError, run_blocking};
use nacelle_base::{Chain, ContainerId, PodId};
use nacelle_keeper::NO_GUEST_AGENT;
use nacelle_model::container::ContainerConfig;
use nacelle_model::machine::Credentials;
use nacelle_model::machine_pod::MachinePod;
use nacelle_model::record::ContainerRecord;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The longest pause before the next attempt, after the guest rejected the credentials or did not respond.
const MAX_RETRY: Duration = Duration::from_secs(30);
/// Time after which unchanged credentials are sent again: the VM may have restarted, or returned to an earlier state.
const RESEND: Duration = Duration::from_secs(15);
/// Time limit of a verb.
const VERB_TIMEOUT: Duration = Duration::from_secs(60);

/// Why a guest does not have the credentials of the secrets.
#[derive(Debug, thiserror::Error)]
enum CredentialError {
    #[error("cannot read the secrets")]
    Read(#[from] machine_pod::VolumeError),
    #[error("the guest agent has not responded yet")]
    NoGuestAgent,
    #[error("the guest agent rejected them: {message}")]
    Rejected { message: String },
    #[error("cannot send them to the keeper")]
    Exec(#[from] PodRuntimeError),
    #[error("cannot serialize them")]
    Serialize(#[from] serde_json::Error),
    #[error(transparent)]
    Task(#[from] TaskError),
}

/// Passes the credentials of one VM to its guest agent.
pub(super) struct CredentialsController {
    runtime: Arc<dyn PodRuntime>,
    pod: PodId,
    container: ContainerId,
    machine: Arc<MachinePod>,
    config: Arc<ContainerConfig>,
    /// The credentials that the guest agent has accepted, and when.
    accepted: Option<(Credentials, Instant)>,
    retry: Duration,
    /// The last logged error.
    logged_error: String,
}

impl Controller for CredentialsController {
    fn new(runtime: &Arc<dyn PodRuntime>, view: &MachinePodView, container: &ContainerRecord) -> Option<Self> {
        let machine = view.pod.config.kind.machine().filter(|machine| !machine.credentials.is_empty())?;
        Some(CredentialsController {
            runtime: Arc::clone(runtime),
            pod: view.pod.id.clone(),
            container: container.id.clone(),
            machine: Arc::new(machine.clone()),
            config: Arc::clone(&container.config),
            accepted: None,
            retry: RETRY,
            logged_error: String::new(),
        })
    }

    fn directories(&self) -> Vec<PathBuf> {
        machine_pod::credential_directories(&self.machine, &self.config)
    }

    async fn reconcile(&mut self) -> Duration {
        let sent = self.send_if_due().await;
        let (pod, container) = (&self.pod, &self.container);
        match sent {
            Ok(()) => {
                self.retry = RETRY;
                if !self.logged_error.is_empty() {
                    tracing::info!(%pod, %container, "the guest has the keys and passwords of its secrets");
                }
                self.logged_error.clear();
                self.accepted.as_ref().map_or(RESEND, |(_, at)| RESEND.saturating_sub(at.elapsed()))
            }
            Err(error) => {
                let text = Chain(&error).to_string();
                if text != self.logged_error && is_running(&*self.runtime, container) {
                    match error {
                        CredentialError::NoGuestAgent => {
                            tracing::info!(%pod, %container, "keys and passwords of the secrets are not set yet: {text}");
                        }
                        _ => {
                            tracing::warn!(%pod, %container, "cannot set the keys and passwords of the secrets in the guest: {text}");
                        }
                    }
                }
                self.logged_error = text;
                self.retry = (self.retry * 2).min(MAX_RETRY);
                self.retry
            }
        }
    }
}

impl CredentialsController {
    /// Sends the credentials of the secrets to the keeper, if they have changed or were sent more than [`RESEND`] ago.
    async fn send_if_due(&mut self) -> Result<(), CredentialError> {
        let (machine, config) = (Arc::clone(&self.machine), Arc::clone(&self.config));
        let read = run_blocking("read the secrets of a VM", move || machine_pod::read_credentials(&machine, &config));
        let credentials = read.await??;
        if self.accepted.as_ref().is_some_and(|(known, at)| *known == credentials && at.elapsed() < RESEND) {
            return Ok(());
        }
        let args = vec!["@vm".to_owned(), "credentials".to_owned(), serde_json::to_string(&credentials)?];
        let output = self.runtime.exec(&self.container, args, VERB_TIMEOUT).await?;
        match u32::try_from(output.exit_code) {
            Ok(0) => {
                self.accepted = Some((credentials, Instant::now()));
                Ok(())
            }
            Ok(NO_GUEST_AGENT) => Err(CredentialError::NoGuestAgent),
            _ => {
                let message = String::from_utf8_lossy(&output.stderr).trim().chars().take(500).collect();
                Err(CredentialError::Rejected { message })
            }
        }
    }
}
