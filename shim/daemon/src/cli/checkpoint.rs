//! Implements `nacelle checkpoint`: saves pods through the daemon into the directory from which pods can continue by an annotation, and
//! lists and removes what is there. Its subdirectories are namespaces, and below each the checkpoints.

use super::ExitStatus;
use super::daemon::{connect, status_error};
use super::exit::CommandError;
use super::output::{OutputArgument, TableView};
use super::pods::pod_status;
use super::table::format_table;
use super::units::{UNKNOWN, format_age, format_bytes};
use crate::config::Config;
use crate::lifecycle::read_checkpoint;
use anyhow::{Context, bail};
use clap::Subcommand;
use nacelle_base::files::at;
use nacelle_base::{Chain, files::FileError};
use nacelle_model::checkpoint::COMPLETE_FILE;
use nacelle_proto::cri;
use nacelle_proto::cri::runtime_service_client::RuntimeServiceClient;
use nacelle_vmi::annotations::checkpoint::{RULE, is_name};
use serde::Serialize;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The bytes of a block in the metadata of a file (stat(2)).
const BLOCK: u64 = 512;

#[derive(Subcommand)]
pub(super) enum CheckpointCommand {
    /// Saves a running pod with all its containers. The pod runs on.
    Create {
        /// The id of the pod, or a unique prefix of it.
        pod: String,
        /// The name of the checkpoint, in the namespace of the pod: a DNS label.
        name: String,
        /// The time after which it is given up.
        #[arg(long, value_name = "SECONDS", default_value_t = 600, value_parser = clap::value_parser!(u32).range(1..=86_400))]
        limit: u32,
        #[command(flatten)]
        output: OutputArgument,
    },
    /// Lists the checkpoints of this node.
    #[command(alias = "list")]
    Ls {
        /// The Kubernetes namespace [default: all].
        #[arg(long, short)]
        namespace: Option<String>,
        #[command(flatten)]
        output: OutputArgument,
    },
    /// Removes checkpoints. Pods that continued from one run on.
    #[command(aliases = ["delete", "remove"])]
    Rm {
        /// The names of the checkpoints.
        #[arg(required = true)]
        names: Vec<String>,
        /// Their Kubernetes namespace.
        #[arg(long, short, default_value = "default")]
        namespace: String,
    },
}

/// A checkpoint. What is not known is `None`.
#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(super) struct CheckpointView {
    namespace: String,
    name: String,
    path: String,
    /// The blocks of its files on the disk.
    size_bytes: u64,
    /// Why no pod can continue from it.
    problem: Option<String>,
    /// The pod that was saved.
    pod_name: Option<String>,
    pod_id: Option<String>,
    handler: Option<String>,
    created_at: Option<String>,
    /// The names of its containers.
    containers: Vec<String>,
    /// The size of the memory of its VM.
    memory_bytes: Option<u64>,
    #[serde(skip)]
    created_nanos: Option<i64>,
}

impl CheckpointView {
    fn read(namespace: &str, name: &str, path: &Path) -> CheckpointView {
        let (manifest, problem) = match read_checkpoint(path) {
            Ok(manifest) => (Some(manifest), None),
            Err(error) => (None, Some(Chain(&error).to_string())),
        };
        let saved = manifest.as_ref();
        CheckpointView {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            path: path.display().to_string(),
            size_bytes: size_of(path),
            problem,
            pod_name: saved.map(|saved| saved.pod.name.name.clone()),
            pod_id: saved.map(|saved| saved.pod_id.to_string()),
            handler: saved.map(|saved| saved.handler.clone()),
            created_at: saved.map(|saved| nacelle_pod::rfc3339(saved.created_at)),
            containers: saved
                .iter()
                .flat_map(|saved| &saved.containers)
                .map(|container| container.config.name.clone())
                .collect(),
            memory_bytes: saved.map(|saved| {
                let vm = &saved.vm;
                ((u64::from(vm.booted_mib) + u64::from(vm.added_mib)) << 20).saturating_add(vm.reserve_used_bytes)
            }),
            created_nanos: saved.map(|saved| saved.created_at),
        }
    }

    fn row(&self) -> [String; 7] {
        let or_unknown = |text: &Option<String>| text.clone().unwrap_or_else(|| UNKNOWN.to_owned());
        [
            self.namespace.clone(),
            self.name.clone(),
            or_unknown(&self.pod_name),
            if self.containers.is_empty() { UNKNOWN.to_owned() } else { self.containers.join(",") },
            self.created_nanos.map_or_else(|| UNKNOWN.to_owned(), format_age),
            format_bytes(self.size_bytes),
            if self.problem.is_none() { "usable" } else { "unusable" }.to_owned(),
        ]
    }
}

impl TableView for CheckpointView {
    fn table(&self) -> String {
        format!("{}\n", self.path)
    }
}

impl TableView for Vec<CheckpointView> {
    fn table(&self) -> String {
        let mut rows = vec![["NAMESPACE", "NAME", "POD", "CONTAINERS", "AGE", "SIZE", "STATE"].map(str::to_owned)];
        rows.extend(self.iter().map(CheckpointView::row));
        let problem =
            |view: &CheckpointView| Some(format!("{}/{}: {}\n", view.namespace, view.name, view.problem.as_ref()?));
        let problems: Vec<String> = self.iter().filter_map(problem).collect();
        let divider = if problems.is_empty() { "" } else { "\n" };
        format_table(&rows) + divider + &problems.concat()
    }
}

pub(super) fn run(config: &Config, command: CheckpointCommand) -> anyhow::Result<ExitStatus> {
    let directory = config.paths.checkpoints();
    match command {
        CheckpointCommand::Create { pod, name, limit, output } => {
            let limit = Duration::from_secs(limit.into());
            let created = super::runtime()?.block_on(create(config, &pod, &name, limit))?;
            output.print(&created)?;
        }
        CheckpointCommand::Ls { namespace, output } => output.print(&list(&directory, namespace.as_deref())?)?,
        CheckpointCommand::Rm { names, namespace } => {
            // All of them are tried.
            let outcomes: Vec<_> = names.iter().map(|name| remove(&directory, &namespace, name)).collect();
            outcomes.into_iter().collect::<anyhow::Result<()>>()?;
        }
    }
    Ok(ExitStatus::Success)
}

async fn create(config: &Config, pod: &str, name: &str, limit: Duration) -> anyhow::Result<CheckpointView> {
    check_name("NAME", name)?;
    let mut client = RuntimeServiceClient::new(connect(&config.paths.socket).await?);
    let status = pod_status(&mut client, pod).await?.0.status.unwrap_or_default();
    let namespace = status.metadata.unwrap_or_default().namespace;
    check_name("the namespace of the pod", &namespace)?;
    let filter = cri::ContainerFilter {
        pod_sandbox_id: status.id.clone(),
        state: Some(cri::ContainerStateValue { state: cri::ContainerState::ContainerRunning.into() }),
        ..Default::default()
    };
    let request = cri::ListContainersRequest { filter: Some(filter) };
    let running = client.list_containers(request).await.map_err(status_error)?.into_inner().containers;
    if running.is_empty() {
        bail!("pod {} has no running container", status.id);
    }
    let path = make_directory(&config.paths.checkpoints(), &namespace, name)?;
    let mut request = tonic::Request::new(cri::CheckpointPodRequest {
        pod_sandbox_id: status.id,
        output_path: path.display().to_string(),
        container_ids: running.into_iter().map(|container| container.id).collect(),
        options: [].into(),
    });
    request.set_timeout(limit);
    if let Err(status) = client.checkpoint_pod(request).await {
        // The daemon has removed the files, if it could.
        let _ = fs::remove_dir(&path);
        return Err(status_error(status));
    }
    Ok(CheckpointView::read(&namespace, name, &path))
}

/// Makes the empty directory of a checkpoint, which may be left from one that was given up.
fn make_directory(directory: &Path, namespace: &str, name: &str) -> anyhow::Result<PathBuf> {
    let parent = directory.join(namespace);
    let path = parent.join(name);
    DirBuilder::new().recursive(true).mode(0o700).create(&parent).map_err(at("create", &parent))?;
    match DirBuilder::new().mode(0o700).create(&path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            if fs::read_dir(&path).map_err(at("read", &path))?.next().is_some() {
                bail!("checkpoint {namespace}/{name} exists: remove it, or choose another name");
            }
        }
        made => made.map_err(at("create", &path))?,
    }
    Ok(path)
}

fn list(directory: &Path, only: Option<&str>) -> Result<Vec<CheckpointView>, FileError> {
    let mut views = Vec::new();
    for namespace in names(directory)?.into_iter().filter(|name| only.is_none_or(|only| only == name)) {
        let parent = directory.join(&namespace);
        for name in names(&parent)? {
            views.push(CheckpointView::read(&namespace, &name, &parent.join(&name)));
        }
    }
    Ok(views)
}

/// Returns the names of the subdirectories that can be namespaces or checkpoints, in their order; none if the directory does not exist.
fn names(directory: &Path) -> Result<Vec<String>, FileError> {
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(at("read", directory))?,
    };
    let mut names = Vec::new();
    for entry in entries {
        let entry = entry.map_err(at("read", directory))?;
        if entry.file_type().map_err(at("inspect", &entry.path()))?.is_dir() {
            names.extend(entry.file_name().into_string().ok().filter(|name| is_name(name)));
        }
    }
    names.sort_unstable();
    Ok(names)
}

/// Removes a checkpoint. It is incomplete before its first file is gone.
fn remove(directory: &Path, namespace: &str, name: &str) -> anyhow::Result<()> {
    check_name("--namespace", namespace)?;
    check_name("NAME", name)?;
    let path = directory.join(namespace).join(name);
    if !path.is_dir() {
        return Err(CommandError::NotFound { kind: "checkpoint", name: format!("{namespace}/{name}") }.into());
    }
    let complete = path.join(COMPLETE_FILE);
    match fs::remove_file(&complete) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(at("remove", &complete)(error))?,
        _ => fs::remove_dir_all(&path).map_err(at("remove", &path))?,
    }
    Ok(())
}

fn check_name(what: &str, name: &str) -> anyhow::Result<()> {
    match is_name(name) {
        true => Ok(()),
        false => Err(anyhow::anyhow!("{RULE}")).with_context(|| format!("{what} is {name:?}")),
    }
}

/// Returns the blocks of the files in a directory in bytes; files that vanish meanwhile have none.
fn size_of(directory: &Path) -> u64 {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.metadata().ok()).map(|file| file.blocks() * BLOCK).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacelle_model::checkpoint::{CheckpointManifest, MANIFEST_FILE, MEMORY_FILE, SCRATCH_FILE, STATE_FILE};
    use std::fs::File;

    const GOLDEN: &str = include_str!("../../../model/tests/golden/checkpoint-v1.json");

    fn write_checkpoint(path: &Path) {
        let files = CheckpointManifest::decode(GOLDEN.as_bytes()).unwrap().files;
        for (name, length) in [(STATE_FILE, files.state), (MEMORY_FILE, files.memory), (SCRATCH_FILE, files.scratch)] {
            File::create(path.join(name)).unwrap().set_len(length).unwrap();
        }
        fs::write(path.join(MANIFEST_FILE), GOLDEN).unwrap();
        fs::write(path.join(COMPLETE_FILE), "").unwrap();
    }

    #[test]
    fn checkpoints_are_listed_and_removed_by_namespace_and_name() {
        let world = tempfile::tempdir().unwrap();
        let directory = world.path().join("checkpoints");
        assert_eq!(list(&directory, None).unwrap().len(), 0, "there is no directory yet");
        let whole = make_directory(&directory, "default", "web").unwrap();
        write_checkpoint(&whole);
        let error = make_directory(&directory, "default", "web").unwrap_err().to_string();
        assert!(error.contains("default/web exists"), "{error}");
        for _ in 0..2 {
            make_directory(&directory, "other", "half").unwrap();
        }
        fs::create_dir(directory.join("..lost")).unwrap();
        fs::write(directory.join("file"), "").unwrap();

        let views = list(&directory, None).unwrap();
        let text = views.table();
        assert!(text.contains("unusable") && text.contains("\nother/half: "), "{text}");
        let manifest = CheckpointManifest::decode(GOLDEN.as_bytes()).unwrap();
        let [web, half] = views.try_into().unwrap();
        assert_eq!((web.namespace.as_str(), web.name.as_str(), web.problem), ("default", "web", None));
        assert_eq!(web.containers, [manifest.containers[0].config.name.clone()]);
        assert_eq!(web.memory_bytes, Some(512 << 20));
        assert!(web.size_bytes >= 4096, "the manifest has a block");
        assert_eq!((half.pod_name, half.memory_bytes), (None, None));
        assert_eq!(list(&directory, Some("default")).unwrap().len(), 1);

        for (namespace, name) in [("default", "none"), ("none", "web")] {
            let error = remove(&directory, namespace, name).unwrap_err();
            assert_eq!(ExitStatus::of_error(&error), ExitStatus::NotFound);
        }
        for (namespace, name) in [("..", "web"), ("default", "../default/web"), ("default", "")] {
            let error = format!("{:#}", remove(&directory, namespace, name).unwrap_err());
            assert!(error.contains("1 to 63 lower-case letters"), "{error}");
        }
        remove(&directory, "default", "web").unwrap();
        remove(&directory, "other", "half").unwrap();
        assert_eq!(list(&directory, None).unwrap().len(), 0);
    }
}
