//! Applies the annotation `vm.nacelle.dev/power` to machines, as it is now in a file of the downward API that kubelet keeps up to
//! date (docs/user/vm/lifecycle.md, "Power by annotation"). A verb is sent only when the annotation changes, so a later verb of a
//! user stays in effect. The files are read on the blocking pool.

use crate::follow::{self, Follow, LOOK};
use crate::lifecycle::{Node, View};
use nacelle_base::files::{FileError, write_whole};
use nacelle_base::json;
use nacelle_base::task::{TaskError, run_blocking};
use nacelle_base::{Chain, ContainerId};
use nacelle_machines::machine_pod;
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

/// The longest pause before a verb that a machine rejected is sent again.
const LONGEST: Duration = Duration::from_secs(60);
/// Time limit of a verb.
const VERB: Duration = Duration::from_secs(60);
/// The name of the file with the last applied value, in the directory of the pod: it survives the daemon.
const TOLD: &str = "power.json";
/// The largest such file in bytes.
const TOLD_BYTES: u64 = 4 << 10;

/// The last applied value of a container's machine.
#[derive(Serialize, Deserialize)]
struct Told {
    container: String,
    power: Power,
}

/// The next step towards the wanted state of a machine.
#[derive(Debug, PartialEq, Eq)]
enum Step {
    /// The machine is in the wanted state.
    Done,
    /// This verb leads to the wanted state.
    Last(&'static str),
    /// This verb, after which the state is checked again.
    First(&'static str),
    /// The machine is changing its state.
    Wait,
}

/// Returns the next step for a machine in this phase. A running machine that is being stopped runs again after `start`.
fn step(wanted: Power, phase: &str) -> Step {
    match (wanted, phase) {
        (_, "Succeeded") | (Power::Off, "Stopped") | (Power::Paused, "Paused") => Step::Done,
        (Power::On, "Running" | "Stopped" | "CrashLoopBackOff") => Step::Last("start"),
        (Power::On, "Paused") => Step::Last("unpause"),
        (Power::Off, "Running" | "Paused" | "CrashLoopBackOff") => Step::Last("stop"),
        (Power::Paused, "Running") => Step::Last("pause"),
        (Power::Paused, "Stopped" | "CrashLoopBackOff") => Step::First("start"),
        _ => Step::Wait,
    }
}

/// Why the annotation could not be applied.
#[derive(Debug, thiserror::Error)]
enum PowerError {
    #[error("the annotations of the pod cannot be read")]
    Read(#[from] machine_pod::VolumeError),
    #[error("the annotation is {found:?}: {} is expected", Power::WORDS.join(", "))]
    Word { found: String },
    #[error("handler {handler} does not allow this annotation: its allowed_annotations have to name it")]
    NotAllowed { handler: String },
    #[error("the machine does not say how it is")]
    Status,
    #[error("the machine refuses to {verb}: {said}")]
    Refused { verb: &'static str, said: String },
    #[error("the machine cannot be asked")]
    Ask(#[from] crate::lifecycle::LifecycleError),
    #[error("what it was told cannot be kept")]
    Keep(#[from] FileError),
    #[error(transparent)]
    Task(#[from] TaskError),
}

/// The power annotation of a pod that has it in a file.
pub(crate) enum Annotation {}

impl Follow for Annotation {
    fn wanted(_view: &View, container: &ContainerRecord) -> bool {
        machine_pod::annotations_mount(&container.config).is_some()
    }

    async fn follow(node: Node, view: Arc<View>, container: ContainerRecord) {
        if let Some(mount) = machine_pod::annotations_mount(&container.config) {
            Follower::new(&node, &view, &container, mount).run().await;
        }
    }
}

/// Follows the annotation of one machine.
struct Follower {
    node: Node,
    /// The ids of pod and container.
    ids: (String, ContainerId),
    mount: NodeVolume,
    handler: String,
    /// The file with the last applied value.
    file: PathBuf,
    /// The annotation's value at the creation of the pod.
    first: Power,
}

impl Follower {
    fn new(node: &Node, view: &Arc<View>, container: &ContainerRecord, mount: &NodeVolume) -> Follower {
        let annotation = view.pod.config.annotations.get(&format!("{PREFIX}power"));
        Follower {
            node: node.clone(),
            ids: (view.pod.id.to_string(), container.id.clone()),
            mount: mount.clone(),
            handler: view.pod.handler.clone(),
            file: node.parts().pod_dir(&view.pod.id).join(TOLD),
            first: annotation.and_then(|word| Power::of(word)).unwrap_or(Power::On),
        }
    }

    async fn run(self) {
        let (pod, container) = &self.ids;
        let mut told = self.last().await.unwrap_or(self.first);
        let (mut said, mut wait, mut followed) = (String::new(), LOOK, false);
        while self.lives() {
            match self.look(told).await {
                Ok(now) => {
                    if now != told || !followed {
                        tracing::info!(%pod, %container, power = now.word(), "the machine follows its pod's annotation");
                    }
                    (told, wait, followed) = (now, LOOK, true);
                    said.clear();
                }
                Err(error) => {
                    let text = Chain(&error).to_string();
                    if text != said && self.lives() {
                        tracing::warn!(%pod, %container, "the machine does not follow its pod's annotation: {text}");
                    }
                    said = text;
                    wait = (wait * 2).min(LONGEST);
                }
            }
            tokio::time::sleep(wait).await;
        }
    }

    fn lives(&self) -> bool {
        follow::runs::<Annotation>(&self.node, &self.ids.1)
    }

    /// Returns the value that an earlier daemon has applied.
    async fn last(&self) -> Option<Power> {
        let file = self.file.clone();
        let read = move || {
            let mut text = Vec::new();
            std::fs::File::open(file).ok()?.take(TOLD_BYTES).read_to_end(&mut text).ok()?;
            json::read::<Told>(&text).ok()
        };
        let told = run_blocking("read the stored power state of a VM", read).await.ok()??;
        (told.container == self.ids.1.as_str()).then_some(told.power)
    }

    /// Reads the annotation and applies it if it differs from the last applied value. Returns the value that is applied now.
    async fn look(&self, told: Power) -> Result<Power, PowerError> {
        let mount = self.mount.clone();
        let Some(found) = run_blocking("read the power annotation of a pod", move || {
            machine_pod::annotation_of(&mount, &format!("{PREFIX}power"))
        })
        .await??
        else {
            return Ok(told);
        };
        let wanted = Power::of(&found).ok_or_else(|| PowerError::Word { found: found.chars().take(100).collect() })?;
        if wanted == told {
            return Ok(told);
        }
        let handler = self.node.parts().config.handler(&self.handler);
        if !handler.is_some_and(|(_, handler)| handler.allowed_annotations.contains(&format!("{PREFIX}power"))) {
            return Err(PowerError::NotAllowed { handler: self.handler.clone() });
        }
        match step(wanted, &self.phase().await?) {
            Step::Done => {}
            Step::Last(verb) => drop(self.ask(verb).await?),
            // The next look continues.
            Step::First(verb) => return self.ask(verb).await.map(|_| told),
            Step::Wait => return Ok(told),
        }
        let kept = Told { container: self.ids.1.to_string(), power: wanted };
        let (file, text) = (self.file.clone(), serde_json::to_vec(&kept).unwrap_or_default());
        run_blocking("store the power state of a VM", move || write_whole(&file, &text)).await??;
        Ok(wanted)
    }

    async fn ask(&self, verb: &'static str) -> Result<Vec<u8>, PowerError> {
        let words = vec!["@vm".to_owned(), verb.to_owned()];
        let done = self.node.exec(self.ids.1.as_str(), words, Some(VERB)).await?;
        if done.exit_code == 0 {
            return Ok(done.stdout);
        }
        let said = String::from_utf8_lossy(&done.stderr).trim().chars().take(500).collect();
        Err(PowerError::Refused { verb, said })
    }

    async fn phase(&self) -> Result<String, PowerError> {
        let told: Value = json::read(&self.ask("status").await?).unwrap_or_default();
        told.get("phase").and_then(Value::as_str).map(str::to_owned).ok_or(PowerError::Status)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_phase_has_its_way_to_every_power() {
        let way = |wanted| {
            ["Running", "Paused", "Stopped", "CrashLoopBackOff", "Starting", "Stopping", "Succeeded"]
                .map(|phase| step(wanted, phase))
        };
        use Step::{Done, First, Last, Wait};
        assert_eq!(way(Power::On), [Last("start"), Last("unpause"), Last("start"), Last("start"), Wait, Wait, Done]);
        assert_eq!(way(Power::Off), [Last("stop"), Last("stop"), Done, Last("stop"), Wait, Wait, Done]);
        assert_eq!(way(Power::Paused), [Last("pause"), Done, First("start"), First("start"), Wait, Wait, Done]);
    }
}
