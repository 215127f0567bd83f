//! Provides static pods for the cases: the manifest, the status from kubelet, commands in containers.

use crate::fixture::KubeletFixture;
use crate::kubelet::{Kubelet, NODE};
use crate::websocket::ExecSession;
use nacelle_e2e::run::{ProgramOutput, WAIT_LIMIT};
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

/// Polls `condition` until it returns a value, at an interval that does not load kubelet.
#[track_caller]
pub fn wait_for<T>(what: &str, mut condition: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + WAIT_LIMIT;
    loop {
        if let Some(answer) = condition() {
            return answer;
        }
        assert!(Instant::now() < end, "waited {WAIT_LIMIT:?} in vain for: {what}");
        std::thread::sleep(Duration::from_millis(250));
    }
}

/// A pod that a case observes.
pub trait ObservedPod {
    /// The pod's name.
    fn name(&self) -> &str;

    /// Returns the pod as the API shows it now; `None` if it is not there.
    fn object(&self) -> Option<Value>;

    /// Waits until `condition` has an answer for the pod.
    #[track_caller]
    fn wait_until<T>(&self, what: &str, mut condition: impl FnMut(&Value) -> Option<T>) -> T {
        wait_for(&format!("pod {}: {what}", self.name()), || condition(&self.object()?))
    }

    /// Waits until the pod is Ready.
    #[track_caller]
    fn wait_until_ready(&self) -> Value {
        self.wait_until("it is Ready", |pod| has_condition(pod, "Ready").then(|| pod.clone()))
    }

    /// Waits until the pod has this phase.
    #[track_caller]
    fn wait_for_phase(&self, phase: &str) -> Value {
        self.wait_until(phase, |pod| (pod["status"]["phase"] == phase).then(|| pod.clone()))
    }
}

impl ObservedPod for StaticPod<'_> {
    fn name(&self) -> &str {
        &self.name
    }

    /// Returns the pod from kubelet.
    fn object(&self) -> Option<Value> {
        let pods = self.kubelet.get_json("/pods");
        let all = pods["items"].as_array()?;
        all.iter().find(|pod| pod["metadata"]["name"] == self.full_name().as_str()).cloned()
    }
}

/// A pod whose manifest exists until this is dropped.
pub struct StaticPod<'w> {
    kubelet: &'w Kubelet,
    fixture: &'w KubeletFixture,
    name: String,
    /// The manifest is kept when this is dropped.
    keep: bool,
}

impl<'w> StaticPod<'w> {
    /// Writes a manifest into kubelet's directory; the pod's name must be `name`.
    pub fn new(fixture: &'w KubeletFixture, name: &str, manifest: &str) -> Self {
        let pod = Self { kubelet: &fixture.kubelet, fixture, name: name.to_owned(), keep: false };
        pod.write_manifest(manifest);
        pod
    }

    /// Creates the pod of an example.
    pub fn example(fixture: &'w KubeletFixture, name: &str) -> Self {
        Self::new(fixture, name, &example(name))
    }

    /// Replaces the manifest.
    pub fn write_manifest(&self, manifest: &str) {
        let draft = self.fixture.node.directory().join(format!("{}.yaml", self.name));
        fs::write(&draft, manifest).expect("the node's directory is writable");
        fs::rename(draft, self.manifest_path()).expect("the node's directory is writable");
    }

    fn manifest_path(&self) -> PathBuf {
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
    pub fn try_run(&self, container: &str, command: &[&str]) -> ProgramOutput {
        let path = format!("/run/default/{}/{container}?cmd={}", self.full_name(), percent_encoded(&command.join(" ")));
        self.kubelet.request("POST", &path)
    }

    /// Runs a shell script in a container through kubelet's streams, and returns output and status.
    pub fn shell(&self, container: &str, script: &str, input: &[u8]) -> ExecSession {
        let mut path = format!("/exec/default/{}/{container}?output=1&error=1&input=1", self.full_name());
        for word in ["sh", "-c", script] {
            write!(path, "&command={}", percent_encoded(word)).expect("a String");
        }
        ExecSession::run(self.kubelet.netns(), &path, input)
    }

    /// Returns a container's log through kubelet.
    #[track_caller]
    pub fn log(&self, container: &str) -> String {
        self.kubelet.request("GET", &format!("/containerLogs/default/{}/{container}", self.full_name())).ok()
    }

    /// Removes the manifest and waits until kubelet has forgotten the pod and no process of it is left.
    #[track_caller]
    pub fn remove(self) {
        self.remove_manifest();
        wait_for(&format!("pod {} is gone", self.name), || self.object().is_none().then_some(()));
        wait_for(&format!("nothing of pod {} runs", self.name), || {
            let ready = self.fixture.node.crictl.call(["pods", "-q", "--state", "Ready", "--name", &self.full_name()]);
            ready.is_empty().then_some(())
        });
    }

    /// Removes the manifest; kubelet then stops the pod.
    pub fn remove_manifest(&self) {
        // It may have been removed already.
        let _ = fs::remove_file(self.manifest_path());
    }

    /// Keeps the manifest.
    pub fn keep_manifest(mut self) {
        self.keep = true;
    }
}

impl Drop for StaticPod<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let status = self.object().map(|pod| pod["status"].clone()).unwrap_or_default();
            eprintln!("--- pod {}: {status:#}", self.name);
            eprintln!("--- kubelet of {}:\n{}", self.name, self.kubelet.log_lines_with(&self.full_name()));
        }
        if !self.keep {
            self.remove_manifest();
        }
    }
}

/// Returns whether a condition of a pod is true.
pub fn has_condition(pod: &Value, kind: &str) -> bool {
    let conditions = pod["status"]["conditions"].as_array();
    conditions.is_some_and(|all| all.iter().any(|one| one["type"] == kind && one["status"] == "True"))
}

/// Returns the status of a container, or of an init container.
pub fn container_status<'p>(pod: &'p Value, name: &str) -> &'p Value {
    let lists = ["containerStatuses", "initContainerStatuses"].map(|list| pod["status"][list].as_array());
    let found = lists.into_iter().flatten().flatten().find(|status| status["name"] == name);
    found.unwrap_or(&Value::Null)
}

/// Encodes a word for the query of a URL.
fn percent_encoded(word: &str) -> String {
    word.bytes().fold(String::new(), |mut text, byte| {
        if byte.is_ascii_alphanumeric() {
            text.push(char::from(byte));
        } else {
            write!(text, "%{byte:02X}").expect("a String");
        }
        text
    })
}
