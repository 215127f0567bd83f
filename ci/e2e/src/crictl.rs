//! Runs the real crictl for tests: pods and containers are described by JSON, and answers are parsed as JSON.

use crate::node::Netns;
use crate::run::{ProgramOutput, eventually, run, run_with_input};
use serde_json::{Value, json};
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

/// A crictl for one daemon.
pub struct Crictl {
    directory: PathBuf,
    socket: PathBuf,
    netns: Netns,
}

const STDERR_FILE: &str = "crictl.err";
static NEXT: AtomicU32 = AtomicU32::new(0);

fn next_number() -> u32 {
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl Crictl {
    /// Returns a crictl for the runtime at `socket`; its files go to `directory`.
    pub fn new(directory: &Path, netns: &Netns, socket: &Path) -> Self {
        Self { directory: directory.to_owned(), socket: socket.to_owned(), netns: netns.clone() }
    }

    fn command<S: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = S>) -> Command {
        let endpoint = format!("unix://{}", self.socket.display());
        let mut command = self.netns.command(crate::path_from_env("CRICTL"));
        command.args(["--runtime-endpoint", &endpoint, "--image-endpoint", &endpoint, "--timeout", "180s"]);
        command.args(arguments).env("HOME", &self.directory);
        command
    }

    /// Runs crictl and returns output and exit code.
    pub fn try_call<S: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = S>) -> ProgramOutput {
        run(&mut self.command(arguments))
    }

    /// Runs crictl with this standard input and returns output and exit code.
    pub fn call_with_input<S: AsRef<OsStr>>(
        &self,
        arguments: impl IntoIterator<Item = S>,
        input: &[u8],
    ) -> ProgramOutput {
        run_with_input(&mut self.command(arguments), input)
    }

    /// Runs crictl in a terminal of 77 columns and 33 rows without input.
    pub fn call_in_terminal<S: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = S>) -> ProgramOutput {
        run(&mut self.command_in_terminal(arguments))
    }

    fn command_in_terminal<S: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = S>) -> Command {
        let command = self.command(arguments);
        let words = [command.get_program()].into_iter().chain(command.get_args());
        let quoted: Vec<String> = words.map(|word| format!("'{}'", word.to_string_lossy())).collect();
        let line = format!("stty cols 77 rows 33; HOME={} exec {}", self.directory.display(), quoted.join(" "));
        let mut command = Command::new("script");
        command.args(["-qec", &line, "/dev/null"]);
        command
    }

    /// Starts crictl in a terminal of 77 columns and 33 rows, and does not wait for it. Its input is a pipe.
    pub fn spawn_in_terminal<S: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = S>) -> Child {
        let mut command = self.command_in_terminal(arguments);
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(self.open_stderr_file());
        command.spawn().expect("script is installed")
    }

    /// Like [`spawn`](Self::spawn), with a pipe as its input.
    pub fn spawn_with_input<S: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = S>) -> Child {
        let mut command = self.command(arguments);
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(self.open_stderr_file());
        command.spawn().expect("crictl can be started")
    }

    /// Runs crictl and returns its output.
    ///
    /// # Panics
    /// If it fails.
    #[track_caller]
    pub fn call<S: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = S>) -> String {
        self.try_call(arguments).ok()
    }

    /// Runs crictl and parses its output as JSON.
    ///
    /// # Panics
    /// If it fails or prints something else.
    #[track_caller]
    pub fn call_json<S: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = S>) -> Value {
        let text = self.call(arguments);
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
    }

    /// Starts crictl and does not wait for it. Its errors are in [`complaints`](Self::complaints).
    pub fn spawn<S: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = S>) -> Child {
        let mut command = self.command(arguments);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(self.open_stderr_file());
        command.spawn().expect("crictl can be started")
    }

    /// Like `spawn`, for a crictl that keeps printing; also returns the file with its output.
    pub fn spawn_with_output_file<S: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = S>) -> (Child, PathBuf) {
        let path = self.directory.join(format!("crictl-{}.out", next_number()));
        let output = fs::File::create(&path).expect("the node's directory is writable");
        let mut command = self.command(arguments);
        command.stdin(Stdio::null()).stdout(output).stderr(self.open_stderr_file());
        (command.spawn().expect("crictl can be started"), path)
    }

    fn open_stderr_file(&self) -> fs::File {
        let file = fs::File::options().create(true).append(true).open(self.directory.join(STDERR_FILE));
        file.expect("the node's directory is writable")
    }

    /// Returns the errors of all crictls that were started and not waited for.
    pub fn spawned_stderr(&self) -> String {
        fs::read_to_string(self.directory.join(STDERR_FILE)).unwrap_or_default()
    }

    /// Writes a document as crictl's input; returns its path.
    pub fn write_input(&self, what: &str, document: &Value) -> String {
        let path = self.directory.join(format!("{what}-{}.json", next_number()));
        fs::write(&path, document.to_string()).expect("the node's directory is writable");
        path.display().to_string()
    }

    /// Runs a pod.
    ///
    /// # Panics
    /// If it does not become ready.
    #[track_caller]
    pub fn run_pod(&self, pod: PodRequest) -> RunningPod<'_> {
        self.run_pod_with_handler("", pod)
    }

    /// Runs a pod of this handler; empty means the default one.
    ///
    /// # Panics
    /// If it does not become ready.
    #[track_caller]
    pub fn run_pod_with_handler(&self, handler: &str, pod: PodRequest) -> RunningPod<'_> {
        let file = self.write_input("pod", &pod.0);
        let id = self.call(["runp", "--runtime", handler, &file]);
        RunningPod { crictl: self, id, file, config: pod.0 }
    }
}

impl Crictl {
    /// Returns the handle of a pod that already runs, for instance since before the daemon.
    pub fn pod_handle(&self, id: &str, pod: PodRequest) -> RunningPod<'_> {
        RunningPod { crictl: self, id: id.to_owned(), file: self.write_input("pod", &pod.0), config: pod.0 }
    }
}

/// A pod's configuration.
pub struct PodRequest(pub Value);

impl PodRequest {
    /// Returns a pod of this name; `logs` is the directory of its logs.
    pub fn new(name: &str, logs: &Path) -> Self {
        let directory = logs.join(format!("{name}-{}", next_number()));
        fs::create_dir_all(&directory).expect("the node's directory is writable");
        Self(json!({
            "metadata": {"name": name, "namespace": "e2e", "uid": format!("uid-{name}-{}", next_number()), "attempt": 0},
            "log_directory": directory.display().to_string(),
            "labels": {"app": name},
            "linux": {"cgroup_parent": crate::census::cgroup_parent(logs)},
        }))
    }

    /// Sets a top-level field.
    pub fn set(mut self, key: &str, value: Value) -> Self {
        self.0[key] = value;
        self
    }
}

/// A container's configuration.
pub struct ContainerRequest(pub Value);

impl ContainerRequest {
    /// Returns a container of this name and image that runs `sh -c script`.
    pub fn sh(name: &str, image: &str, script: &str) -> Self {
        Self::new(name, image, &["/bin/sh", "-c", script])
    }

    /// Returns a container with this command; an empty one means the image's.
    pub fn new(name: &str, image: &str, command: &[&str]) -> Self {
        Self(json!({
            "metadata": {"name": name, "attempt": 0}, "image": {"image": image}, "command": command,
            "log_path": format!("{name}-0.log"), "labels": {"name": name}, "linux": {},
        }))
    }

    /// Sets a top-level field.
    pub fn set(mut self, key: &str, value: Value) -> Self {
        self.0[key] = value;
        self
    }
}

/// A running pod.
pub struct RunningPod<'a> {
    crictl: &'a Crictl,
    /// The pod's id.
    pub id: String,
    /// The file with the pod's configuration.
    pub file: String,
    config: Value,
}

impl<'a> RunningPod<'a> {
    /// Returns the output of `crictl inspectp`.
    pub fn inspect(&self) -> Value {
        self.crictl.call_json(["inspectp", "-o", "json", &self.id])
    }

    /// Returns the pod's first address.
    ///
    /// # Panics
    /// If it has none.
    pub fn ip(&self) -> String {
        self.inspect()["status"]["network"]["ip"].as_str().expect("the pod has an address").to_owned()
    }

    /// Creates a container and does not start it.
    #[track_caller]
    pub fn create(&self, container: ContainerRequest) -> RunningContainer<'a> {
        let file = self.crictl.write_input("container", &container.0);
        let id = self.crictl.call(["create", &self.id, &file, &self.file]);
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let log = Path::new(&text(&self.config["log_directory"])).join(text(&container.0["log_path"]));
        RunningContainer { crictl: self.crictl, id, log }
    }

    /// Tries to create a container.
    pub fn try_create(&self, container: ContainerRequest) -> ProgramOutput {
        let file = self.crictl.write_input("container", &container.0);
        self.crictl.try_call(["create", &self.id, &file, &self.file])
    }

    /// Creates a container and starts it.
    #[track_caller]
    pub fn start(&self, container: ContainerRequest) -> RunningContainer<'a> {
        let container = self.create(container);
        self.crictl.call(["start", &container.id]);
        container
    }

    /// Stops and removes the pod.
    #[track_caller]
    pub fn remove(self) {
        self.crictl.call(["stopp", &self.id]);
        self.crictl.call(["rmp", &self.id]);
    }
}

/// A container in a running pod.
pub struct RunningContainer<'a> {
    crictl: &'a Crictl,
    /// The container's id.
    pub id: String,
    /// The container's log file.
    pub log: PathBuf,
}

impl RunningContainer<'_> {
    /// Returns `status` of `crictl inspect`.
    pub fn status(&self) -> Value {
        self.crictl.call_json(["inspect", "-o", "json", &self.id])["status"].take()
    }

    /// Waits until the container has exited; returns its status.
    #[track_caller]
    pub fn wait_for_exit(&self) -> Value {
        eventually("the container has exited", || {
            let status = self.status();
            (status["state"] == "CONTAINER_EXITED").then_some(status)
        })
    }

    /// Returns the container's output so far, without the columns of the log format.
    pub fn output(&self) -> String {
        let text = fs::read_to_string(&self.log).unwrap_or_default();
        let mut output = String::new();
        for line in text.lines() {
            let mut columns = line.splitn(4, ' ').skip(2);
            let whole = columns.next() == Some("F");
            output += columns.next().unwrap_or_default();
            if whole {
                output.push('\n');
            }
        }
        output
    }

    /// Waits until the output contains `text`; returns the output.
    #[track_caller]
    pub fn wait_for_output(&self, text: &str) -> String {
        eventually(&format!("the container says {text:?}"), || Some(self.output()).filter(|all| all.contains(text)))
    }

    /// Runs `sh -c script` in the container.
    pub fn exec(&self, script: &str) -> ProgramOutput {
        self.crictl.try_call(["exec", "--sync", &self.id, "/bin/sh", "-c", script])
    }
}
