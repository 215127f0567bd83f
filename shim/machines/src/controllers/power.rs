//! Applies the annotation `vm.nacelle.dev/power` to VMs, as it is now in a file of the downward API that kubelet keeps up to date
//! (docs/user/vm/lifecycle.md, "Power by annotation"). A verb is sent only when the annotation changes, so a later verb of a user
//! stays in effect. The files are read on the blocking pool.

use super::{Controller, RESYNC, RETRY, is_running};
use crate::machine_pod;
use crate::runtime::{MachinePodView, PodRuntime, PodRuntimeError};
use nacelle_base::files::{FileError, write_whole};
use nacelle_base::json;
use nacelle_base::task::{TaskError, run_blocking};
use nacelle_base::{Chain, ContainerId, PodId};
use nacelle_model::mount::NodeVolume;
use nacelle_model::record::ContainerRecord;
use nacelle_vmi::annotations::PREFIX;
use nacelle_vmi::spec::Power;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::io::Read;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// The longest pause before a verb that a VM rejected is sent again.
const MAX_RETRY: Duration = Duration::from_secs(60);
/// Time limit of a verb.
const VERB_TIMEOUT: Duration = Duration::from_secs(60);
/// The name of the file with the last applied value, in the pod's directory: it survives the daemon.
const APPLIED_FILE: &str = "power.json";
/// The largest such file in bytes.
const MAX_APPLIED_FILE: u64 = 4 << 10;

/// The last applied value, as it is stored.
#[derive(Serialize, Deserialize)]
struct AppliedPower {
    container: String,
    power: Power,
}

/// The next action towards the target state of a VM.
#[derive(Debug, PartialEq, Eq)]
enum PowerAction {
    /// The VM is in the target state.
    Done,
    /// This verb leads to the target state.
    Last(&'static str),
    /// This verb, after which the state is checked again.
    First(&'static str),
    /// The VM is changing its state.
    Wait,
}

/// Returns the next action for a VM in this phase. A running VM that is being stopped runs again after `start`.
fn next_action(target: Power, phase: &str) -> PowerAction {
    match (target, phase) {
        (_, "Succeeded") | (Power::Off, "Stopped") | (Power::Paused, "Paused") => PowerAction::Done,
        (Power::On, "Running" | "Stopped" | "CrashLoopBackOff") => PowerAction::Last("start"),
        (Power::On, "Paused") => PowerAction::Last("unpause"),
        (Power::Off, "Running" | "Paused" | "CrashLoopBackOff") => PowerAction::Last("stop"),
        (Power::Paused, "Running") => PowerAction::Last("pause"),
        (Power::Paused, "Stopped" | "CrashLoopBackOff") => PowerAction::First("start"),
        _ => PowerAction::Wait,
    }
}

/// Why the annotation could not be applied.
#[derive(Debug, thiserror::Error)]
enum PowerError {
    #[error("cannot read the annotations of the pod")]
    Read(#[from] machine_pod::VolumeError),
    #[error("the annotation is {value:?}: {} is expected", Power::WORDS.join(", "))]
    InvalidValue { value: String },
    #[error("handler {handler} does not allow this annotation: add it to the handler's allowed_annotations")]
    NotAllowed { handler: String },
    #[error("the keeper's status contains no phase")]
    NoPhase,
    #[error("the keeper rejected the verb {verb}: {message}")]
    Rejected { verb: &'static str, message: String },
    #[error("cannot send a verb to the keeper")]
    Exec(#[from] PodRuntimeError),
    #[error("cannot store the applied value")]
    Store(#[from] FileError),
    #[error(transparent)]
    Task(#[from] TaskError),
}

/// Applies the power annotation to one VM.
pub(super) struct PowerController {
    runtime: Arc<dyn PodRuntime>,
    pod: PodId,
    container: ContainerId,
    /// The downward API volume.
    volume: NodeVolume,
    handler: String,
    /// The file with the last applied value.
    applied_file: PathBuf,
    /// The annotation's value at the creation of the pod.
    initial: Power,
    /// The last applied value; `None` before the first run.
    applied: Option<Power>,
    retry: Duration,
    /// The last logged error.
    logged_error: String,
    /// Whether the first applied value was logged.
    has_logged_first: bool,
}

impl Controller for PowerController {
    fn new(runtime: &Arc<dyn PodRuntime>, view: &MachinePodView, container: &ContainerRecord) -> Option<Self> {
        let volume = machine_pod::annotations_mount(&container.config)?;
        let annotation = view.pod.config.annotations.get(&format!("{PREFIX}power"));
        Some(PowerController {
            runtime: Arc::clone(runtime),
            pod: view.pod.id.clone(),
            container: container.id.clone(),
            volume: volume.clone(),
            handler: view.pod.handler.clone(),
            applied_file: runtime.pod_directory(&view.pod.id).join(APPLIED_FILE),
            initial: annotation.and_then(|word| Power::of(word)).unwrap_or(Power::On),
            applied: None,
            retry: RETRY,
            logged_error: String::new(),
            has_logged_first: false,
        })
    }

    fn directories(&self) -> Vec<PathBuf> {
        vec![self.volume.host_path.clone().into()]
    }

    async fn reconcile(&mut self) -> Duration {
        let applied = match self.applied {
            Some(applied) => applied,
            None => self.stored_value().await.unwrap_or(self.initial),
        };
        self.applied = Some(applied);
        let (pod, container) = (&self.pod, &self.container);
        match self.apply(applied).await {
            Ok(Applied { power, is_complete }) => {
                if power != applied || !self.has_logged_first {
                    tracing::info!(%pod, %container, power = power.word(), "the VM follows its pod's power annotation");
                }
                (self.applied, self.retry, self.has_logged_first) = (Some(power), RETRY, true);
                self.logged_error.clear();
                if is_complete { RESYNC } else { RETRY }
            }
            Err(error) => {
                let text = Chain(&error).to_string();
                if text != self.logged_error && is_running(&*self.runtime, &self.container) {
                    tracing::warn!(%pod, %container, "cannot apply the power annotation of the pod to its VM: {text}");
                }
                self.logged_error = text;
                self.retry = (self.retry * 2).min(MAX_RETRY);
                self.retry
            }
        }
    }
}

/// The result of one run.
struct Applied {
    /// The value that is applied now.
    power: Power,
    /// Whether the VM has reached the annotation's value.
    is_complete: bool,
}

impl PowerController {
    /// Returns the value that an earlier daemon has applied.
    async fn stored_value(&self) -> Option<Power> {
        let file = self.applied_file.clone();
        let read = move || {
            let mut text = Vec::new();
            std::fs::File::open(file).ok()?.take(MAX_APPLIED_FILE).read_to_end(&mut text).ok()?;
            json::read::<AppliedPower>(&text).ok()
        };
        let stored = run_blocking("read the stored power state of a VM", read).await.ok()??;
        (stored.container == self.container.as_str()).then_some(stored.power)
    }

    /// Reads the annotation and applies it if it differs from the last applied value.
    async fn apply(&self, applied: Power) -> Result<Applied, PowerError> {
        let volume = self.volume.clone();
        let annotation = run_blocking("read the power annotation of a pod", move || {
            machine_pod::read_annotation(&volume, &format!("{PREFIX}power"))
        });
        let unchanged = Applied { power: applied, is_complete: true };
        let Some(value) = annotation.await?? else { return Ok(unchanged) };
        let target =
            Power::of(&value).ok_or_else(|| PowerError::InvalidValue { value: value.chars().take(100).collect() })?;
        if target == applied {
            return Ok(unchanged);
        }
        if !self.runtime.allows_annotation(&self.handler, &format!("{PREFIX}power")) {
            return Err(PowerError::NotAllowed { handler: self.handler.clone() });
        }
        match next_action(target, &self.phase().await?) {
            PowerAction::Done => {}
            PowerAction::Last(verb) => drop(self.send_verb(verb).await?),
            // The next run continues.
            PowerAction::First(verb) => {
                self.send_verb(verb).await?;
                return Ok(Applied { power: applied, is_complete: false });
            }
            PowerAction::Wait => return Ok(Applied { power: applied, is_complete: false }),
        }
        let stored = AppliedPower { container: self.container.to_string(), power: target };
        let (file, text) = (self.applied_file.clone(), serde_json::to_vec(&stored).unwrap_or_default());
        run_blocking("store the power state of a VM", move || write_whole(&file, &text)).await??;
        Ok(Applied { power: target, is_complete: true })
    }

    async fn send_verb(&self, verb: &'static str) -> Result<Vec<u8>, PowerError> {
        let args = vec!["@vm".to_owned(), verb.to_owned()];
        let output = self.runtime.exec(&self.container, args, VERB_TIMEOUT).await?;
        if output.exit_code == 0 {
            return Ok(output.stdout);
        }
        let message = String::from_utf8_lossy(&output.stderr).trim().chars().take(500).collect();
        Err(PowerError::Rejected { verb, message })
    }

    /// Returns the VM's phase, as the keeper reports it.
    async fn phase(&self) -> Result<String, PowerError> {
        let status: Value = json::read(&self.send_verb("status").await?).unwrap_or_default();
        status.get("phase").and_then(Value::as_str).map(str::to_owned).ok_or(PowerError::NoPhase)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_phase_has_an_action_for_each_power_state() {
        let actions = |target| {
            ["Running", "Paused", "Stopped", "CrashLoopBackOff", "Starting", "Stopping", "Succeeded"]
                .map(|phase| next_action(target, phase))
        };
        use PowerAction::{Done, First, Last, Wait};
        assert_eq!(
            actions(Power::On),
            [Last("start"), Last("unpause"), Last("start"), Last("start"), Wait, Wait, Done]
        );
        assert_eq!(actions(Power::Off), [Last("stop"), Last("stop"), Done, Last("stop"), Wait, Wait, Done]);
        assert_eq!(actions(Power::Paused), [Last("pause"), Done, First("start"), First("start"), Wait, Wait, Done]);
    }
}
