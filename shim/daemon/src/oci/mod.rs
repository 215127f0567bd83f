//! Builds the OCI runtime specification of a container from its configuration and its image's. It uses only the model, and knows
//! neither CRI nor pod processes. What `agent.proto` reserves for the agent is left out: root, paths of namespaces, cgroup path,
//! /etc/hosts and similar files.

mod capabilities;
mod limits;
mod seccomp;
mod volumes;

pub use limits::limits;
pub use volumes::anonymous_volumes;

use nacelle_base::{Classify, FailureKind};
use nacelle_image::ImageConfig;
use nacelle_model::container::ContainerConfig;
use nacelle_model::device::DeviceFileKind;
use nacelle_model::mount::{NodeVolume, Propagation};
use nacelle_model::pod::PodConfig;
use nacelle_model::resources::{NO_HUGEPAGE_LIMIT, Resources, UNLIMITED};
use nacelle_model::security::SeccompPolicy;
use oci_spec::runtime::Spec;
use serde_json::{Map, Value, json};
use std::collections::HashMap;

/// The search path of programs if neither image nor configuration sets one.
const DEFAULT_PATH: &str = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// The number of SIGTERM on Linux.
const SIGTERM: u32 = 15;

/// Why the specification cannot be built.
#[derive(Debug, thiserror::Error)]
pub enum OciError {
    /// Neither the container nor its image names a program.
    #[error("container {container} has no command, and its image {image} has no entrypoint and no cmd either")]
    NoCommand {
        /// The container's name.
        container: String,
        /// The image as the request names it.
        image: String,
    },
    /// The image's stop signal does not exist on Linux.
    #[error("image {image} has the stop signal {signal:?}, which does not exist on Linux")]
    StopSignal {
        /// The image as the request names it.
        image: String,
        /// The signal.
        signal: String,
    },
    /// A volume that the image declares cannot be made.
    #[error("image {image} declares {why}")]
    Volume {
        /// The image as the request names it.
        image: String,
        /// What it declares, and what is allowed.
        why: String,
    },
    /// The result is not a valid OCI specification: a bug of Nacelle.
    #[error("the specification of container {container} is not valid")]
    Invalid {
        /// The container's name.
        container: String,
        /// The invalid place and the reason.
        source: serde_json::Error,
    },
}

impl Classify for OciError {
    fn kind(&self) -> FailureKind {
        match self {
            OciError::NoCommand { .. } | OciError::StopSignal { .. } | OciError::Volume { .. } => FailureKind::Invalid,
            OciError::Invalid { .. } => FailureKind::Internal,
        }
    }
}

/// A device node of a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceNode {
    /// The path.
    pub path: String,
    /// The kind.
    pub kind: DeviceFileKind,
    /// The major number.
    pub major: u64,
    /// The minor number.
    pub minor: u64,
    /// The file's permissions.
    pub mode: u32,
    /// The owner's user id.
    pub uid: u32,
    /// The owner's group id.
    pub gid: u32,
    /// The allowed access: any of "r", "w" and "m"; empty for none.
    pub access: String,
}

impl DeviceNode {
    /// Returns the kind as the specification spells it.
    fn kind(&self) -> &'static str {
        match self.kind {
            DeviceFileKind::Block => "b",
            DeviceFileKind::Character => "c",
            DeviceFileKind::Fifo => "p",
        }
    }

    /// Returns whether the device has a rule in the cgroup.
    fn has_rule(&self) -> bool {
        self.kind != DeviceFileKind::Fifo && !self.access.is_empty()
    }
}

/// The mount option that marks, for the guest's kernel, a read-only volume below which mounts are writable
/// (`guest/kernel/0009-fuse-device-submounts.patch`).
const WRITABLE_BELOW: &str = "nodiratime";

/// A path in the mount namespace of the agent, where it finds a volume. In a pod with a guest this is a path of the guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuestPath(String);

impl GuestPath {
    /// Takes an absolute path.
    pub fn new(path: String) -> GuestPath {
        GuestPath(path)
    }

    /// Returns the path.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// A volume of the node as the agent mounts it into a container.
#[derive(Clone, Copy, Debug)]
pub struct VolumeMount<'a> {
    /// The volume as requested.
    pub volume: &'a NodeVolume,
    /// The path where the agent finds the volume.
    pub source: &'a GuestPath,
    /// Only the volume itself is read-only, and mounts below it are not.
    pub writable_below: bool,
}

/// Returns the specification as JSON, for a kernel of this release, with these devices.
pub fn spec(
    pod: &PodConfig,
    container: &ContainerConfig,
    image: &ImageConfig,
    kernel: &str,
    devices: &[DeviceNode],
    volumes: &[VolumeMount<'_>],
) -> Result<Vec<u8>, OciError> {
    let invalid = |source| OciError::Invalid { container: container.name.clone(), source };
    // Converted by way of the typed specification, so that it contains nothing that another runtime could not read.
    let spec: Spec =
        serde_json::from_value(build_document(pod, container, image, kernel, devices, volumes)?).map_err(invalid)?;
    serde_json::to_vec(&spec).map_err(invalid)
}

/// Returns the user for the agent to look up ("name", "uid", "uid:gid"; empty for root). The image's group counts only together
/// with the image's user.
pub fn user(container: &ContainerConfig, image: &ImageConfig) -> String {
    let run_as = &container.run_as;
    match (&run_as.user, run_as.group) {
        (None, None) => image.user.clone(),
        (None, Some(group)) => {
            let user = image.user.split(':').next().filter(|user| !user.is_empty()).unwrap_or("0");
            format!("{user}:{group}")
        }
        (Some(user), None) => user.clone(),
        (Some(user), Some(group)) => format!("{user}:{group}"),
    }
}

/// Returns the number of the container's stop signal.
pub fn stop_signal(container: &ContainerConfig, image: &ImageConfig) -> Result<u32, OciError> {
    match (container.stop_signal, image.stop_signal.as_deref()) {
        (Some(number), _) => Ok(number),
        (None, None | Some("")) => Ok(SIGTERM),
        (None, Some(signal)) => crate::signals::number(signal).ok_or_else(|| OciError::StopSignal {
            image: container.image.clone(),
            signal: signal.chars().take(40).collect(),
        }),
    }
}

fn build_document(
    pod: &PodConfig,
    container: &ContainerConfig,
    image: &ImageConfig,
    kernel: &str,
    devices: &[DeviceNode],
    volumes: &[VolumeMount<'_>],
) -> Result<Value, OciError> {
    let privileged = container.privileged;
    let capabilities = capabilities::compute_sets(container);
    let mut linux = Map::new();
    linux.insert("namespaces".into(), namespaces());
    linux.insert("resources".into(), resources(&container.resources, privileged, devices));
    if !devices.is_empty() {
        linux.insert("devices".into(), devices.iter().map(device).collect());
    }
    // The agent gets each volume with a propagation of its own, but the propagation of the root applies to all of them: a private
    // root keeps each volume isolated, and with a slave root no mount in a volume propagates to the node.
    let has = |propagation| volumes.iter().any(|mount| mount.volume.propagation == propagation);
    let propagation = match (has(Propagation::BothWays), has(Propagation::FromNode)) {
        (true, _) => "shared",
        (false, true) => "slave",
        (false, false) => "private",
    };
    linux.insert("rootfsPropagation".into(), json!(propagation));
    if !privileged {
        linux.insert("maskedPaths".into(), json!(container.masked_paths));
        linux.insert("readonlyPaths".into(), json!(container.readonly_paths));
    }
    let filter = match &container.seccomp {
        _ if privileged => None,
        SeccompPolicy::Unconfined => None,
        SeccompPolicy::RuntimeDefault => Some(seccomp::default_profile(&capabilities.bounding)),
        SeccompPolicy::Localhost(profile) => Some(profile.resolve(&capabilities.bounding, kernel)),
    };
    if let Some(filter) = filter {
        linux.insert("seccomp".into(), filter);
    }
    Ok(json!({
        "ociVersion": "1.0.2",
        "hostname": pod.hostname,
        "root": { "path": "rootfs", "readonly": container.readonly_rootfs },
        "process": process(pod, container, image, &capabilities)?,
        "mounts": mounts(privileged).chain(volumes.iter().map(node_volume)).collect::<Vec<_>>(),
        "linux": linux,
    }))
}

fn process(
    pod: &PodConfig,
    container: &ContainerConfig,
    image: &ImageConfig,
    capabilities: &capabilities::CapabilitySets,
) -> Result<Value, OciError> {
    let args = command(container, image);
    if args.is_empty() {
        return Err(OciError::NoCommand { container: container.name.clone(), image: container.image.clone() });
    }
    let cwd = [&container.working_dir, &image.working_dir].into_iter().find(|dir| !dir.is_empty());
    let mut process = json!({
        "terminal": container.tty,
        // The agent looks the user up in the image; these are the additional groups.
        "user": { "uid": 0, "gid": 0, "additionalGids": container.run_as.supplemental },
        "args": args,
        "env": environment(pod, container, image),
        "cwd": cwd.map_or("/", |dir| dir.as_str()),
        "noNewPrivileges": container.no_new_privs,
        "capabilities": {
            "bounding": capabilities.bounding, "effective": capabilities.bounding,
            "permitted": capabilities.bounding, "inheritable": capabilities.ambient,
            "ambient": capabilities.ambient,
        },
    });
    if let Some(profile) = &container.apparmor {
        process["apparmorProfile"] = json!(profile);
    }
    if container.resources.oom_score_adj != 0 {
        process["oomScoreAdj"] = json!(container.resources.oom_score_adj);
    }
    Ok(process)
}

/// Returns the command line by Kubernetes' rules: a command replaces entry point and arguments of the image, and arguments alone
/// replace its arguments.
fn command(container: &ContainerConfig, image: &ImageConfig) -> Vec<String> {
    let (program, args) = match (container.command.is_empty(), container.args.is_empty()) {
        (true, true) => (&image.entrypoint, &image.cmd),
        (true, false) => (&image.entrypoint, &container.args),
        (false, _) => (&container.command, &container.args),
    };
    program.iter().chain(args).cloned().collect()
}

/// Returns the environment: the image's, then the container's, which takes precedence.
fn environment(pod: &PodConfig, container: &ContainerConfig, image: &ImageConfig) -> Vec<String> {
    let mut env: Vec<String> = Vec::new();
    // An image and a request may contain a hundred thousand variables.
    let mut positions: HashMap<String, usize> = HashMap::new();
    let mut set = |line: String| {
        let name = line.split('=').next().unwrap_or_default();
        match positions.get(name).and_then(|position| env.get_mut(*position)) {
            Some(known) => *known = line,
            None => {
                positions.insert(name.to_owned(), env.len());
                env.push(line);
            }
        }
    };
    set(DEFAULT_PATH.to_owned());
    if container.tty {
        set("TERM=xterm".to_owned());
    }
    set(format!("HOSTNAME={}", pod.hostname));
    // The image is untrusted: entries that are not variables are left out.
    let usable = |line: &&String| !line.starts_with('=') && line.contains('=') && !line.contains('\0');
    image.env.iter().filter(usable).for_each(|line| set(line.clone()));
    container.envs.iter().for_each(|(name, value)| set(format!("{name}={value}")));
    env
}

fn namespaces() -> Value {
    // The agent decides which of these namespaces the containers of a pod share; network, IPC and UTS always are shared.
    json!([
        { "type": "pid" }, { "type": "network" }, { "type": "ipc" }, { "type": "uts" }, { "type": "mount" },
        { "type": "cgroup" },
    ])
}

/// Returns the mount of a volume of the node.
fn node_volume(mount: &VolumeMount<'_>) -> Value {
    let volume = mount.volume;
    let mut options = match (volume.readonly, volume.recursive_read_only) {
        (true, true) => vec!["rbind", "ro", "rro"],
        (true, false) => vec!["rbind", "ro"],
        _ => vec!["rbind", "rw"],
    };
    options.extend(volume.options.iter().map(|option| option.word()));
    if mount.writable_below {
        options.push(WRITABLE_BELOW);
    }
    json!({ "destination": volume.container_path, "type": "bind", "source": mount.source.as_str(), "options": options })
}

fn mounts(privileged: bool) -> impl Iterator<Item = Value> {
    let write = if privileged { "rw" } else { "ro" };
    [
        json!({ "destination": "/proc", "type": "proc", "source": "proc", "options": ["nosuid", "noexec", "nodev"] }),
        json!({ "destination": "/dev", "type": "tmpfs", "source": "tmpfs",
          "options": ["nosuid", "strictatime", "mode=755", "size=65536k"] }),
        json!({ "destination": "/dev/pts", "type": "devpts", "source": "devpts",
          "options": ["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"] }),
        json!({ "destination": "/dev/mqueue", "type": "mqueue", "source": "mqueue", "options": ["nosuid", "noexec", "nodev"] }),
        json!({ "destination": "/dev/shm", "type": "bind", "source": "/dev/shm", "options": ["rbind", "rw"] }),
        json!({ "destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["nosuid", "noexec", "nodev", write] }),
        json!({ "destination": "/sys/fs/cgroup", "type": "cgroup", "source": "cgroup",
          "options": ["nosuid", "noexec", "nodev", "relatime", write] }),
    ]
    .into_iter()
}

fn device(node: &DeviceNode) -> Value {
    json!({
        "path": node.path, "type": node.kind(), "major": node.major, "minor": node.minor,
        "fileMode": node.mode, "uid": node.uid, "gid": node.gid,
    })
}

fn resources(requested: &Resources, privileged: bool, devices: &[DeviceNode]) -> Value {
    let mut resources = Map::new();
    let rule = |node: &DeviceNode| {
        json!({
            "allow": true, "type": node.kind(), "major": node.major, "minor": node.minor, "access": node.access,
        })
    };
    let devices = if privileged {
        json!([{ "allow": true, "access": "rwm" }])
    } else {
        // Character devices that every container has, and terminals.
        let device = |major: i64, minor: Option<i64>| match minor {
            Some(minor) => json!({ "allow": true, "type": "c", "major": major, "minor": minor, "access": "rwm" }),
            None => json!({ "allow": true, "type": "c", "major": major, "access": "rwm" }),
        };
        let mut list = vec![json!({ "allow": false, "access": "rwm" })];
        list.extend([3, 5, 7, 8, 9].map(|minor| device(1, Some(minor))));
        list.extend([device(5, Some(0)), device(5, Some(2)), device(136, None)]);
        list.extend(devices.iter().filter(|node| node.has_rule()).map(rule));
        Value::Array(list)
    };
    resources.insert("devices".into(), devices);
    let mut cpu = Map::new();
    if requested.cpu_shares > 0 {
        cpu.insert("shares".into(), json!(requested.cpu_shares));
    }
    if requested.cpu_quota != 0 {
        cpu.insert("quota".into(), json!(requested.cpu_quota));
    }
    if requested.cpu_period > 0 {
        cpu.insert("period".into(), json!(requested.cpu_period));
    }
    for (name, list) in [("cpus", &requested.cpuset_cpus), ("mems", &requested.cpuset_mems)] {
        if !list.is_empty() {
            cpu.insert(name.into(), json!(list));
        }
    }
    resources.insert("cpu".into(), Value::Object(cpu));
    if requested.memory_limit > 0 {
        let mut memory = json!({ "limit": requested.memory_limit });
        if let Some(swap) = requested.swap_limit() {
            // Of memory and swap together.
            let both = if swap == UNLIMITED { UNLIMITED } else { requested.memory_limit.saturating_add(swap) };
            memory["swap"] = json!(both);
        }
        resources.insert("memory".into(), memory);
    }
    let pages: Vec<Value> = (requested.hugepages.iter().filter(|(_, limit)| *limit != NO_HUGEPAGE_LIMIT))
        .map(|(size, limit)| json!({ "pageSize": size, "limit": limit }))
        .collect();
    if !pages.is_empty() {
        resources.insert("hugepageLimits".into(), Value::Array(pages));
    }
    if !requested.unified.is_empty() {
        resources.insert("unified".into(), json!(requested.unified));
    }
    Value::Object(resources)
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacelle_model::mount::MountOption;
    use nacelle_model::security::RunAs;
    use nacelle_model::testing::{container, pod};
    use std::collections::BTreeSet;

    fn image() -> ImageConfig {
        ImageConfig {
            entrypoint: vec!["/entry".into()],
            cmd: vec!["cmd".into()],
            env: vec!["PATH=/bin".into(), "A=image".into(), "broken".into(), "=x".into()],
            user: "app:staff".into(),
            working_dir: "/work".into(),
            ..ImageConfig::default()
        }
    }

    fn built(change: impl FnOnce(&mut ContainerConfig)) -> Value {
        let mut config = (*container(1, 1).config).clone();
        change(&mut config);
        let source = GuestPath::new("/srv/data".into());
        let mounts: Vec<_> = config
            .node_volumes
            .iter()
            .map(|volume| VolumeMount { volume, source: &source, writable_below: volume.container_path == "/d" })
            .collect();
        serde_json::from_slice(&spec(&pod(1).config, &config, &image(), "6.12.0", &[], &mounts).unwrap()).unwrap()
    }

    #[test]
    fn commands_replace_what_kubernetes_says() {
        let args = |command: &[&str], args: &[&str]| {
            let list = |list: &[&str]| list.iter().map(|s| (*s).to_owned()).collect();
            let built = built(|config| (config.command, config.args) = (list(command), list(args)));
            built["process"]["args"]
                .as_array()
                .unwrap()
                .iter()
                .map(|v| v.as_str().unwrap().to_owned())
                .collect::<Vec<_>>()
        };
        assert_eq!(args(&[], &[]), ["/entry", "cmd"]);
        assert_eq!(args(&[], &["x"]), ["/entry", "x"]);
        assert_eq!(args(&["c"], &[]), ["c"]);
        assert_eq!(args(&["c"], &["x"]), ["c", "x"]);
        let mut config = (*container(1, 1).config).clone();
        (config.command, config.args) = (vec![], vec![]);
        let error = spec(&pod(1).config, &config, &ImageConfig::default(), "", &[], &[]).unwrap_err();
        assert_eq!(error.kind(), FailureKind::Invalid);
        assert!(error.to_string().contains("busybox"), "{error}");
    }

    #[test]
    fn the_container_wins_over_the_image() {
        let built = built(|config| config.envs = vec![("A".into(), "mine".into()), ("B".into(), String::new())]);
        let process = &built["process"];
        assert_eq!(process["env"], json!(["PATH=/bin", "HOSTNAME=web", "A=mine", "B="]));
        assert_eq!(process["cwd"], "/work");
        assert_eq!(process["noNewPrivileges"], true);
        assert_eq!(built["linux"]["maskedPaths"], json!(["/proc/kcore"]));
        assert_eq!(built["hostname"], "web");
    }

    /// With a linear search for each variable this takes minutes.
    #[test]
    fn an_environment_may_be_large() {
        let all = built(|config| config.envs = (0..200_000).map(|n| (format!("V{}", n / 2), n.to_string())).collect());
        let env = all["process"]["env"].as_array().unwrap();
        assert_eq!((env.len(), env.last().unwrap().as_str()), (100_003, Some("V99999=199999")));
    }

    #[test]
    fn volumes_of_the_node_are_mounts_of_what_the_agent_sees() {
        let volume = |at: &str, readonly, recursive_read_only, propagation| NodeVolume {
            host_path: "/of/the/request".into(),
            container_path: at.into(),
            readonly,
            recursive_read_only,
            propagation,
            id_mapped: at == "/c",
            options: if at == "/b" { MountOption::ALL.into() } else { BTreeSet::new() },
        };
        let spec = built(|config| {
            config.node_volumes = vec![
                volume("/a", false, false, Propagation::Private),
                volume("/b", true, false, Propagation::Private),
                volume("/c", true, true, Propagation::Private),
                volume("/d", true, false, Propagation::Private),
            ];
        });
        let of = |at: &str| spec["mounts"].as_array().unwrap().iter().find(|m| m["destination"] == at).unwrap().clone();
        assert_eq!(of("/a")["source"], "/srv/data");
        assert_eq!(of("/a")["options"], json!(["rbind", "rw"]));
        assert_eq!(of("/b")["options"], json!(["rbind", "ro", "nosuid", "nodev", "noexec", "noatime"]));
        assert_eq!(of("/c")["options"], json!(["rbind", "ro", "rro"]));
        assert_eq!(of("/d")["options"], json!(["rbind", "ro", "nodiratime"]));
        assert_eq!(spec["linux"]["rootfsPropagation"], "private");
        let spec = built(|config| config.node_volumes = vec![volume("/a", false, false, Propagation::FromNode)]);
        assert_eq!(spec["linux"]["rootfsPropagation"], "slave");
        let spec = built(|config| {
            config.node_volumes =
                [Propagation::FromNode, Propagation::BothWays].map(|p| volume("/a", false, false, p)).into();
        });
        assert_eq!(spec["linux"]["rootfsPropagation"], "shared");
    }

    #[test]
    fn devices_are_nodes_with_the_rights_that_were_asked_for() {
        let config = (*container(1, 1).config).clone();
        let disk = DeviceNode {
            path: "/dev/disk".into(),
            kind: DeviceFileKind::Block,
            major: 8,
            minor: 1,
            mode: 0o660,
            uid: 0,
            gid: 6,
            access: "r".into(),
        };
        let closed = DeviceNode { path: "/dev/closed".into(), access: String::new(), ..disk.clone() };
        let pipe =
            DeviceNode { path: "/dev/pipe".into(), kind: DeviceFileKind::Fifo, major: 0, minor: 0, ..disk.clone() };
        let spec = spec(&pod(1).config, &config, &image(), "6.12.0", &[closed, pipe, disk], &[]).unwrap();
        let linux = serde_json::from_slice::<Value>(&spec).unwrap()["linux"].clone();
        let device = json!({
            "path": "/dev/disk", "type": "b", "major": 8, "minor": 1, "fileMode": 0o660, "uid": 0, "gid": 6,
        });
        assert_eq!((&linux["devices"][1]["type"], &linux["devices"][2]), (&json!("p"), &device));
        assert_eq!(linux["devices"][0]["path"], "/dev/closed");
        let rules = linux["resources"]["devices"].as_array().unwrap();
        assert_eq!(rules[0], json!({ "allow": false, "access": "rwm" }));
        let last = json!({ "allow": true, "type": "b", "major": 8, "minor": 1, "access": "r" });
        assert_eq!(rules.last(), Some(&last));
        assert!(rules[..rules.len() - 1].iter().all(|rule| rule["major"] != 8 && rule["type"] != "p"), "{rules:?}");
    }

    #[test]
    fn users_are_joined_as_cri_says() {
        let user = |user: Option<&str>, group: Option<u32>, in_image: &str| {
            let mut config = (*container(1, 1).config).clone();
            config.run_as = RunAs { user: user.map(str::to_owned), group, ..RunAs::default() };
            super::user(&config, &ImageConfig { user: in_image.into(), ..ImageConfig::default() })
        };
        assert_eq!(user(None, None, "app:staff"), "app:staff");
        assert_eq!(user(None, Some(5), "app:staff"), "app:5");
        assert_eq!(user(None, Some(5), ""), "0:5");
        assert_eq!(user(Some("7"), None, "app:staff"), "7");
        assert_eq!(user(Some("7"), Some(8), "app"), "7:8");
        assert_eq!(user(None, None, ""), "");
    }

    #[test]
    fn the_stop_signal_is_the_containers_then_the_images() {
        let image = |signal: &str| ImageConfig { stop_signal: Some(signal.into()), ..ImageConfig::default() };
        let mut config = (*container(1, 1).config).clone();
        assert_eq!(stop_signal(&config, &ImageConfig::default()).unwrap(), 15);
        assert_eq!(stop_signal(&config, &image("SIGQUIT")).unwrap(), 3);
        assert_eq!(stop_signal(&config, &image("RTMIN+3")).unwrap(), 37);
        assert_eq!(stop_signal(&config, &image("10")).unwrap(), 10);
        for bad in ["SIGNOTHING", "0", "65", "-1"] {
            assert_eq!(stop_signal(&config, &image(bad)).unwrap_err().kind(), FailureKind::Invalid, "{bad}");
        }
        config.stop_signal = Some(12);
        assert_eq!(stop_signal(&config, &image("SIGQUIT")).unwrap(), 12);
    }

    #[test]
    fn limits_arrive_and_what_is_not_set_does_not() {
        let empty = built(|config| config.resources = Resources::default());
        assert_eq!(empty["linux"]["resources"]["memory"], Value::Null);
        assert_eq!(empty["process"]["oomScoreAdj"], Value::Null);
        let full = built(|config| {
            config.resources = Resources {
                cpu_period: 100_000,
                cpu_quota: 50_000,
                cpu_shares: 512,
                memory_limit: 1 << 26,
                memory_swap_limit: 1 << 27,
                oom_score_adj: 500,
                hugepages: vec![("2MB".into(), 1 << 21)],
                unified: [("memory.oom.group".to_owned(), "1".to_owned())].into(),
                cpuset_cpus: "0-1,4".into(),
                cpuset_mems: "0".into(),
            };
        });
        let resources = &full["linux"]["resources"];
        assert_eq!(
            resources["cpu"],
            json!({ "shares": 512, "quota": 50_000, "period": 100_000, "cpus": "0-1,4", "mems": "0" })
        );
        assert_eq!(resources["memory"], json!({ "limit": 1 << 26, "swap": 1 << 27 }));
        assert_eq!(resources["hugepageLimits"], json!([{ "pageSize": "2MB", "limit": 1 << 21 }]));
        assert_eq!(resources["unified"], json!({ "memory.oom.group": "1" }));
        assert_eq!(full["process"]["oomScoreAdj"], 500);
        for (memory_limit, memory_swap_limit, memory) in [
            (1 << 26, 0, json!({ "limit": 1 << 26 })),
            (1 << 26, UNLIMITED, json!({ "limit": 1 << 26, "swap": -1 })),
            (1 << 26, 1 << 26, json!({ "limit": 1 << 26, "swap": 1 << 26 })),
            // Less than the memory: no swap.
            (1 << 26, 5, json!({ "limit": 1 << 26, "swap": 1 << 26 })),
            (0, 1 << 26, Value::Null),
        ] {
            let limits = Resources { memory_limit, memory_swap_limit, ..Resources::default() };
            let in_guest = built(|config| config.resources = limits.in_guest());
            assert_eq!(in_guest["linux"]["resources"]["memory"].get("swap"), None, "a guest has no swap");
            let on_host = built(|config| config.resources = limits);
            assert_eq!(on_host["linux"]["resources"]["memory"], memory);
        }
        let endless = built(|config| {
            config.resources.memory_limit = UNLIMITED;
            config.resources.hugepages = vec![("2MB".into(), NO_HUGEPAGE_LIMIT), ("1GB".into(), 0)];
        });
        let resources = &endless["linux"]["resources"];
        assert_eq!(resources["memory"], Value::Null);
        assert_eq!(resources["hugepageLimits"], json!([{ "pageSize": "1GB", "limit": 0 }]));
    }

    #[test]
    fn a_profile_of_the_node_is_the_filter_unless_the_container_is_privileged() {
        let json = json!({
            "defaultAction": "SCMP_ACT_ALLOW",
            "syscalls": [
                { "names": ["chmod"], "action": "SCMP_ACT_ERRNO", "includes": { "caps": ["CAP_CHOWN"] } },
                { "names": ["mount"], "action": "SCMP_ACT_ERRNO", "includes": { "caps": ["CAP_SYS_ADMIN"] } },
            ],
        });
        let profile = || SeccompPolicy::Localhost(Box::new(serde_json::from_value(json.clone()).unwrap()));
        let filter = built(|config| config.seccomp = profile())["linux"]["seccomp"].clone();
        assert_eq!(filter["defaultAction"], "SCMP_ACT_ALLOW");
        assert_eq!(filter["syscalls"], json!([{ "names": ["chmod"], "action": "SCMP_ACT_ERRNO" }]));
        let confined = built(|config| config.apparmor = Some("p".into()));
        assert_eq!(
            (&confined["process"]["apparmorProfile"], &built(|_| ())["process"]["apparmorProfile"]),
            (&json!("p"), &Value::Null)
        );
        let privileged = built(|config| (config.seccomp, config.privileged) = (profile(), true));
        assert_eq!(privileged["linux"]["seccomp"], Value::Null);
    }

    #[test]
    fn privileged_means_all_rights_in_the_guest() {
        let built = built(|config| config.privileged = true);
        assert_eq!(built["linux"]["seccomp"], Value::Null);
        assert_eq!(built["linux"]["maskedPaths"], Value::Null);
        assert_eq!(built["process"]["capabilities"]["bounding"].as_array().unwrap().len(), 41);
        assert_eq!(built["linux"]["resources"]["devices"][0]["allow"], true);
    }
}
