//! Provides static pods for the cases: the manifest, the status from kubelet, commands in containers.

use crate::kubelet::{Kubelet, NODE};
use crate::websocket::Exec;
use crate::world::World;
use nacelle_e2e::run::{LIMIT, Output};
use serde_json::Value;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The directory of the example manifests for users.
const EXAMPLES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/examples");

/// Returns the text of `docs/examples/NAME.yaml`.
pub fn example(name: &str) -> String {
    fs::read_to_string(Path::new(EXAMPLES).join(format!("{name}.yaml"))).expect("the repository is here")
}

/// Polls `question` until it returns a value, at an interval that does not load kubelet.
#[track_caller]
pub fn wait<T>(what: &str, mut question: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + LIMIT;
    loop {
        if let Some(answer) = question() {
            return answer;
        }
        assert!(Instant::now() < end, "waited {LIMIT:?} in vain for: {what}");
        std::thread::sleep(Duration::from_millis(250));
    }
}

/// A pod that a case observes.
pub trait ObservedPod {
    /// The pod's name.
    fn name(&self) -> &str;

    /// Returns the pod as the API shows it now; `None` if it is not there.
    fn object(&self) -> Option<Value>;

    /// Waits until `question` has an answer for the pod.
    #[track_caller]
    fn until<T>(&self, what: &str, mut question: impl FnMut(&Value) -> Option<T>) -> T {
        wait(&format!("pod {}: {what}", self.name()), || question(&self.object()?))
    }

    /// Waits until the pod is Ready.
    #[track_caller]
    fn ready(&self) -> Value {
        self.until("it is Ready", |pod| condition(pod, "Ready").then(|| pod.clone()))
    }

    /// Waits until the pod has this phase.
    #[track_caller]
    fn phase(&self, phase: &str) -> Value {
        self.until(phase, |pod| (pod["status"]["phase"] == phase).then(|| pod.clone()))
    }
}

impl ObservedPod for StaticPod<'_> {
    fn name(&self) -> &str {
        &self.name
    }

    /// Returns the pod from kubelet.
    fn object(&self) -> Option<Value> {
        let pods = self.kubelet.json("/pods");
        let all = pods["items"].as_array()?;
        all.iter().find(|pod| pod["metadata"]["name"] == self.full_name().as_str()).cloned()
    }
}

/// A pod whose manifest exists until this is dropped.
pub struct StaticPod<'w> {
    kubelet: &'w Kubelet,
    world: &'w World,
    name: String,
    /// The manifest is kept when this is dropped.
    stays: bool,
}

impl<'w> StaticPod<'w> {
    /// Writes a manifest into kubelet's directory; the pod's name must be `name`.
    pub fn new(world: &'w World, name: &str, manifest: &str) -> Self {
        let pod = Self { kubelet: &world.kubelet, world, name: name.to_owned(), stays: false };
        pod.change(manifest);
        pod
    }

    /// Creates the pod of an example.
    pub fn example(world: &'w World, name: &str) -> Self {
        Self::new(world, name, &example(name))
    }

    /// Replaces the manifest.
    pub fn change(&self, manifest: &str) {
        let draft = self.world.node.directory().join(format!("{}.yaml", self.name));
        fs::write(&draft, manifest).expect("the node's directory is writable");
        fs::rename(draft, self.manifest()).expect("the node's directory is writable");
    }

    fn manifest(&self) -> PathBuf {
        self.kubelet.manifests().join(format!("{}.yaml", self.name))
    }

    /// Returns the pod's name in kubelet's API.
    pub fn full_name(&self) -> String {
        format!("{}-{NODE}", self.name)
    }

    /// Runs a command in a container through kubelet and returns its output. Panics if it fails.
    #[track_caller]
    pub fn run(&self, container: &str, command: &[&str]) -> String {
        self.try_run(container, command).ok()
    }

    /// Like `run`, but returns the failure.
    pub fn try_run(&self, container: &str, command: &[&str]) -> Output {
        let path = format!("/run/default/{}/{container}?cmd={}", self.full_name(), encoded(&command.join(" ")));
        self.kubelet.ask("POST", &path)
    }

    /// Runs a shell script in a container through kubelet's streams, and returns output and status.
    pub fn shell(&self, container: &str, script: &str, input: &[u8]) -> Exec {
        let mut path = format!("/exec/default/{}/{container}?output=1&error=1&input=1", self.full_name());
        for word in ["sh", "-c", script] {
            write!(path, "&command={}", encoded(word)).expect("a String");
        }
        Exec::run(self.kubelet.netns(), &path, input)
    }

    /// Returns a container's log through kubelet.
    #[track_caller]
    pub fn log(&self, container: &str) -> String {
        self.kubelet.ask("GET", &format!("/containerLogs/default/{}/{container}", self.full_name())).ok()
    }

    /// Removes the manifest and waits until kubelet has forgotten the pod and no process of it is left.
    #[track_caller]
    pub fn remove(self) {
        self.withdraw();
        wait(&format!("pod {} is gone", self.name), || self.object().is_none().then_some(()));
        wait(&format!("nothing of pod {} runs", self.name), || {
            let ready = self.world.node.crictl.call(["pods", "-q", "--state", "Ready", "--name", &self.full_name()]);
            ready.is_empty().then_some(())
        });
    }

    /// Removes the manifest; kubelet then stops the pod.
    pub fn withdraw(&self) {
        // It may have been removed already.
        let _ = fs::remove_file(self.manifest());
    }

    /// Keeps the manifest.
    pub fn stays(mut self) {
        self.stays = true;
    }
}

impl Drop for StaticPod<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let status = self.object().map(|pod| pod["status"].clone()).unwrap_or_default();
            eprintln!("--- pod {}: {status:#}", self.name);
            eprintln!("--- kubelet of {}:\n{}", self.name, self.kubelet.log_of(&self.full_name()));
        }
        if !self.stays {
            self.withdraw();
        }
    }
}

/// Returns whether a condition of a pod is true.
pub fn condition(pod: &Value, kind: &str) -> bool {
    let conditions = pod["status"]["conditions"].as_array();
    conditions.is_some_and(|all| all.iter().any(|one| one["type"] == kind && one["status"] == "True"))
}

/// Returns the status of a container, or of an init container.
pub fn container<'p>(pod: &'p Value, name: &str) -> &'p Value {
    let lists = ["containerStatuses", "initContainerStatuses"].map(|list| pod["status"][list].as_array());
    let found = lists.into_iter().flatten().flatten().find(|status| status["name"] == name);
    found.unwrap_or(&Value::Null)
}

/// Encodes a word for the query of a URL.
fn encoded(word: &str) -> String {
    word.bytes().fold(String::new(), |mut text, byte| {
        if byte.is_ascii_alphanumeric() {
            text.push(char::from(byte));
        } else {
            write!(text, "%{byte:02X}").expect("a String");
        }
        text
    })
}
