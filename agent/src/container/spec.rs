//! Adjusts an OCI specification to this guest: root, cgroup, namespaces, the pod's files, user, environment, capabilities.
//!
//! All functions are pure, except those that read the agent's own capabilities and `oom_score_adj`.

use libcontainer::capabilities::CapabilityExt;
use libcontainer::oci_spec::runtime::{
    Capabilities, Capability, LinuxNamespace, LinuxNamespaceBuilder, LinuxNamespaceType, Mount, MountBuilder, Process,
    RootBuilder, Spec, User,
};
use std::path::{Path, PathBuf};

use super::mapped_mounts;
use super::user::UserAccount;
use crate::paths;

/// Reasons a specification is not usable.
#[derive(Debug, thiserror::Error)]
pub enum OciSpecError {
    /// The JSON is not a specification.
    #[error("cannot parse the OCI specification")]
    Json {
        /// The parser's error.
        #[from]
        source: serde_json::Error,
    },
    /// A part is missing.
    #[error("the OCI specification has no {part}")]
    Missing {
        /// The missing part, such as "process".
        part: &'static str,
    },
    /// The specification asks for something that this guest does not support.
    #[error("the OCI specification uses {what}, which the guest of a pod does not support")]
    Unsupported {
        /// The unsupported part.
        what: &'static str,
    },
    /// A builder of libcontainer's types failed.
    #[error("the OCI specification cannot be adjusted")]
    Build {
        /// The builder's error.
        #[from]
        source: libcontainer::oci_spec::OciSpecError,
    },
}

/// The PID namespace of a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PidNamespace {
    /// A new one for the container alone.
    Own,
    /// The PID namespace of the process with this PID.
    Of(i32),
    /// The pod's shared one, which is entered by `paths::PID_NAMESPACE`.
    Named,
    /// The agent's, which is the node's.
    Node,
}

/// The values to which a specification is adjusted.
pub struct SpecContext<'a> {
    /// The container's id.
    pub id: &'a str,
    /// The mount point of the container's root.
    pub root: &'a Path,
    /// The container's PID namespace.
    pub pid: PidNamespace,
    /// The user of the first process.
    pub user: &'a UserAccount,
    /// All supplemental groups of the first process.
    pub groups: &'a [u32],
    /// The mounts of image volumes.
    pub volumes: Vec<Mount>,
    /// The capabilities that the agent can grant, one bit each.
    pub capabilities: u64,
    /// The agent's own `oom_score_adj`.
    pub oom_score_adj: i32,
    /// `Some` if the pod has a user namespace of its own; `true` if that owns the pod's network namespace.
    pub users: Option<bool>,
}

/// Returns the `oom_score_adj` of this process; 0, the default, if it cannot be read.
pub fn read_oom_score_adj() -> i32 {
    let text = std::fs::read_to_string("/proc/self/oom_score_adj").unwrap_or_default();
    text.trim().parse().unwrap_or(0)
}

/// Returns the requested `oom_score_adj`, or the lowest one that the agent may set: one below its own takes CAP_SYS_RESOURCE
/// (`proc_pid_oom_score_adj(5)`). Nodes that are containers themselves lack it, and kubelet asks for -997 for a node's own pods.
fn limit_oom_score_adj(context: &SpecContext, asked: i32) -> i32 {
    let least = context.oom_score_adj.min(0);
    if asked >= least || context.capabilities >> CapabilityExt::to_cap(&Capability::SysResource).index() & 1 == 1 {
        return asked;
    }
    tracing::warn!(
        id = context.id,
        asked,
        given = least,
        "cannot set oom_score_adj lower: the agent has no CAP_SYS_RESOURCE"
    );
    least
}

/// Returns the capabilities that this process can grant, its bounding set; all if it cannot be read.
pub fn read_bounding_set() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    parse_bounding_set(&status).unwrap_or(u64::MAX)
}

fn parse_bounding_set(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("CapBnd:"))?;
    u64::from_str_radix(line.trim(), 16).ok()
}

/// Parses a specification, and rejects what the agent does not support.
pub fn parse_spec(json: &[u8]) -> Result<Spec, OciSpecError> {
    let spec: Spec = serde_json::from_slice(json)?;
    if spec.process().as_ref().and_then(|process| process.args().as_ref()).is_none_or(Vec::is_empty) {
        return Err(OciSpecError::Missing { part: "process.args" });
    }
    let linux = spec.linux().as_ref().ok_or(OciSpecError::Missing { part: "linux" })?;
    let user_namespace = |namespace: &LinuxNamespace| namespace.typ() == LinuxNamespaceType::User;
    if linux.namespaces().iter().flatten().any(user_namespace) {
        return Err(OciSpecError::Unsupported { what: "a user namespace" });
    }
    if spec.hooks().is_some() {
        return Err(OciSpecError::Unsupported { what: "hooks" });
    }
    Ok(spec)
}

/// Adjusts a specification to the guest.
pub fn adjust_spec(mut spec: Spec, mut context: SpecContext) -> Result<Spec, OciSpecError> {
    let read_only = spec.root().as_ref().and_then(|root| root.readonly()).unwrap_or(false);
    spec.set_root(Some(RootBuilder::default().path(context.root).readonly(read_only).build()?));
    spec.set_hostname(None).set_domainname(None);
    let volumes = std::mem::take(&mut context.volumes);
    let mut mounts = build_mounts(spec.mounts().clone().unwrap_or_default(), volumes, read_only)?;
    if context.users == Some(false) {
        bind_agent_sysfs(&mut mounts);
    }
    spec.set_mounts(Some(mounts));
    let mut linux = spec.linux().clone().ok_or(OciSpecError::Missing { part: "linux" })?;
    linux.set_cgroups_path(Some(PathBuf::from(paths::POD_CGROUP).join(context.id)));
    linux.set_namespaces(Some(build_namespaces(linux.namespaces().as_deref().unwrap_or_default(), &context)?));
    spec.set_linux(Some(linux));
    let process = spec.process().clone().ok_or(OciSpecError::Missing { part: "process" })?;
    spec.set_process(Some(adjust_process(process, &context)?));
    Ok(spec)
}

/// Replaces sysfs by a bind mount of the agent's. Mounting a sysfs takes CAP_SYS_ADMIN over the user namespace that owns the network
/// namespace, which the container does not have here.
fn bind_agent_sysfs(mounts: &mut [Mount]) {
    for mount in mounts.iter_mut().filter(|mount| mount.typ().as_deref() == Some("sysfs")) {
        let mut options = mount.options().clone().unwrap_or_default();
        options.push("bind".to_owned());
        mount.set_typ(Some("bind".to_owned())).set_source(Some(mapped_mounts::SYS.into())).set_options(Some(options));
    }
}

/// Returns the namespaces that the container makes or enters. Network, IPC and host name are the pod's, in which the agent is
/// already.
fn build_namespaces(asked: &[LinuxNamespace], context: &SpecContext) -> Result<Vec<LinuxNamespace>, OciSpecError> {
    let new = |kind| LinuxNamespaceBuilder::default().typ(kind).build();
    let mut namespaces = vec![new(LinuxNamespaceType::Mount)?];
    if context.users.is_some() {
        let user = LinuxNamespaceBuilder::default().typ(LinuxNamespaceType::User).path(paths::USER_NAMESPACE);
        namespaces.push(user.build()?);
    }
    if asked.iter().any(|namespace| namespace.typ() == LinuxNamespaceType::Cgroup) {
        namespaces.push(new(LinuxNamespaceType::Cgroup)?);
    }
    match &context.pid {
        PidNamespace::Own => namespaces.push(new(LinuxNamespaceType::Pid)?),
        PidNamespace::Of(pid) => {
            let path = format!("/proc/{pid}/ns/pid");
            namespaces.push(LinuxNamespaceBuilder::default().typ(LinuxNamespaceType::Pid).path(path).build()?);
        }
        PidNamespace::Named => {
            let pod = LinuxNamespaceBuilder::default().typ(LinuxNamespaceType::Pid).path(paths::PID_NAMESPACE);
            namespaces.push(pod.build()?);
        }
        PidNamespace::Node => {}
    }
    Ok(namespaces)
}

fn build_bind_mount(source: impl AsRef<Path>, destination: &str, options: &[&str]) -> Result<Mount, OciSpecError> {
    let options: Vec<String> = options.iter().map(|option| (*option).to_owned()).collect();
    let mount = MountBuilder::default().source(source.as_ref()).destination(destination).typ("bind").options(options);
    Ok(mount.build()?)
}

/// Returns the mounts of the specification with the pod's /dev/shm in place of the container's, then image volumes, then the pod's
/// files in /etc, unless another mount is there: a volume over /etc, which is read-only, has files of its own or none. The files
/// are read-only where the container's root is, as with containerd.
fn build_mounts(asked: Vec<Mount>, volumes: Vec<Mount>, read_only: bool) -> Result<Vec<Mount>, OciSpecError> {
    let mut mounts = Vec::with_capacity(asked.len() + volumes.len() + 4);
    for mount in asked {
        if mount.destination() == Path::new("/dev/shm") && mount.typ().as_deref() == Some("tmpfs") {
            mounts.push(build_bind_mount(paths::SHM, "/dev/shm", &["rbind", "rw", "nosuid", "nodev", "noexec"])?);
        } else {
            mounts.push(mount);
        }
    }
    mounts.extend(volumes);
    for name in ["hosts", "hostname", "resolv.conf"] {
        let destination = format!("/etc/{name}");
        if !mounts.iter().any(|mount| Path::new(&destination).starts_with(mount.destination())) {
            mounts.push(build_bind_mount(
                Path::new(paths::FILES).join(name),
                &destination,
                &["rbind", if read_only { "ro" } else { "rw" }, "nosuid", "nodev"],
            )?);
        }
    }
    Ok(mounts)
}

fn adjust_process(mut process: Process, context: &SpecContext) -> Result<Process, OciSpecError> {
    let mut user: User = process.user().clone();
    user.set_uid(context.user.uid).set_gid(context.user.gid).set_additional_gids(Some(context.groups.to_vec()));
    process.set_user(user);
    let mut env = process.env().clone().unwrap_or_default();
    if !env.iter().any(|entry| entry.starts_with("PATH=")) {
        env.push(format!("PATH={}", paths::DEFAULT_SEARCH_PATH));
    }
    // Without HOME libcontainer would ask the C library, which would run code of the image.
    if !env.iter().any(|entry| entry.strip_prefix("HOME=").is_some_and(|home| !home.is_empty())) {
        env.retain(|entry| !entry.starts_with("HOME="));
        let default = if context.user.uid == 0 { "/root" } else { "/" };
        env.push(format!("HOME={}", context.user.home.as_deref().unwrap_or(default)));
    }
    if process.terminal().unwrap_or(false) && !env.iter().any(|entry| entry.starts_with("TERM=")) {
        env.push("TERM=xterm".to_owned());
    }
    process.set_env(Some(env));
    if process.cwd().as_os_str().is_empty() {
        process.set_cwd(PathBuf::from("/"));
    }
    // libcontainer takes "false" for "true" when it chooses when to load the filter.
    process.set_no_new_privileges(process.no_new_privileges().filter(|set| *set));
    // Capabilities that the agent lacks are left out, as OCI requires: the node may itself be a container.
    if let Some(mut sets) = process.capabilities().clone() {
        let held = |set: &Option<Capabilities>| {
            let there = |capability: &&_| context.capabilities >> CapabilityExt::to_cap(*capability).index() & 1 == 1;
            set.as_ref().map(|set| set.iter().filter(there).copied().collect::<Capabilities>())
        };
        let bounding = held(sets.bounding());
        if bounding.as_ref().map(Capabilities::len) != sets.bounding().as_ref().map(Capabilities::len) {
            tracing::warn!(
                id = context.id,
                "some capabilities of the container are left out: the agent does not have them"
            );
        }
        let (effective, permitted) = (held(sets.effective()), held(sets.permitted()));
        let (inheritable, ambient) = (held(sets.inheritable()), held(sets.ambient()));
        sets.set_bounding(bounding).set_effective(effective).set_permitted(permitted);
        sets.set_inheritable(inheritable).set_ambient(ambient);
        process.set_capabilities(Some(sets));
    }
    // Always set, because the agent's own value would be inherited.
    process.set_oom_score_adj(Some(limit_oom_score_adj(context, process.oom_score_adj().unwrap_or(0))));
    // No container gets an SELinux label. An AppArmor profile of the node stays: the daemon requests one for containers without a guest.
    process.set_selinux_label(None);
    Ok(process)
}

/// Returns the process of an exec: the container's, with other arguments and another terminal setting.
pub fn derive_exec_process(container: &Process, args: Vec<String>, tty: bool) -> Process {
    let mut process = container.clone();
    process.set_args(Some(args)).set_terminal(Some(tty));
    if tty
        && let Some(env) = process.env_mut().as_mut().filter(|env| !env.iter().any(|entry| entry.starts_with("TERM=")))
    {
        env.push("TERM=xterm".to_owned());
    }
    process
}

#[cfg(test)]
mod tests {
    use super::*;

    fn minimal() -> serde_json::Value {
        serde_json::json!({
            "ociVersion": "1.2.0",
            "process": { "args": ["sh"], "cwd": "/", "user": { "uid": 0, "gid": 0 }, "noNewPrivileges": false },
            "root": { "path": "x", "readonly": true },
            "mounts": [{ "destination": "/dev/shm", "type": "tmpfs", "source": "shm" },
                       { "destination": "/etc/hosts", "type": "bind", "source": "/h", "options": ["bind"] }],
            "linux": { "namespaces": [{ "type": "network" }, { "type": "ipc" }, { "type": "cgroup" }, { "type": "pid" }] }
        })
    }

    fn adjusted(json: &serde_json::Value, pid: PidNamespace) -> Spec {
        adjusted_for(json, pid, None)
    }

    fn adjusted_for(json: &serde_json::Value, pid: PidNamespace, users: Option<bool>) -> Spec {
        let user = UserAccount { uid: 5, gid: 6, name: None, home: Some("/home/u".into()) };
        let context = SpecContext {
            id: "c1",
            root: Path::new("/r"),
            pid,
            user: &user,
            groups: &[6, 7],
            volumes: vec![],
            capabilities: 1 << 12 | 1 << 5,
            oom_score_adj: -3,
            users,
        };
        adjust_spec(parse_spec(json.to_string().as_bytes()).unwrap(), context).unwrap()
    }

    #[test]
    fn the_guest_decides_root_cgroup_namespaces_and_user() {
        let spec = adjusted(&minimal(), PidNamespace::Of(42));
        assert_eq!(spec.root().as_ref().unwrap().path(), Path::new("/r"));
        assert_eq!(spec.root().as_ref().unwrap().readonly(), Some(true));
        let linux = spec.linux().as_ref().unwrap();
        assert_eq!(linux.cgroups_path().as_deref(), Some(Path::new("/pod/c1")));
        let kinds: Vec<_> = linux.namespaces().iter().flatten().map(|namespace| namespace.typ()).collect();
        assert_eq!(kinds, [LinuxNamespaceType::Mount, LinuxNamespaceType::Cgroup, LinuxNamespaceType::Pid]);
        let pid = linux.namespaces().iter().flatten().last().unwrap();
        assert_eq!(pid.path().as_deref(), Some(Path::new("/proc/42/ns/pid")));
        let process = spec.process().as_ref().unwrap();
        assert_eq!((process.user().uid(), process.user().gid()), (5, 6));
        assert_eq!(process.user().additional_gids().as_deref(), Some(&[6, 7][..]));
        assert_eq!(process.no_new_privileges(), None);
        assert_eq!(process.oom_score_adj(), Some(0));
        assert_eq!(
            process.env().as_deref(),
            Some(&[format!("PATH={}", paths::DEFAULT_SEARCH_PATH), "HOME=/home/u".to_owned()][..])
        );
    }

    #[test]
    fn an_apparmor_profile_applies_to_every_process() {
        let mut json = minimal();
        json["process"]["apparmorProfile"] = "p".into();
        let process = adjusted(&json, PidNamespace::Own).process().clone().unwrap();
        let command = derive_exec_process(&process, vec!["true".to_owned()], false);
        for process in [process, command] {
            assert_eq!(process.apparmor_profile().as_deref(), Some("p"));
        }
    }

    #[test]
    fn the_pods_user_namespace_is_entered() {
        let mut json = minimal();
        json["mounts"] = serde_json::json!([
            { "destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["nosuid", "ro"] }
        ]);
        for (users, kind, options) in
            [(Some(true), "sysfs", &["nosuid", "ro"][..]), (Some(false), "bind", &["nosuid", "ro", "bind"])]
        {
            let spec = adjusted_for(&json, PidNamespace::Own, users);
            let linux = spec.linux().as_ref().unwrap();
            let user = linux.namespaces().iter().flatten().find(|n| n.typ() == LinuxNamespaceType::User).unwrap();
            assert_eq!(user.path().as_deref(), Some(Path::new(paths::USER_NAMESPACE)));
            let sysfs = spec.mounts().iter().flatten().find(|mount| mount.destination() == Path::new("/sys")).unwrap();
            assert_eq!(
                (sysfs.typ().as_deref(), sysfs.options().as_deref().unwrap().len()),
                (Some(kind), options.len())
            );
            assert!(options.iter().all(|option| sysfs.options().as_ref().unwrap().iter().any(|o| o == option)));
        }
    }

    #[test]
    fn oom_score_adj_is_limited_to_the_agents_own() {
        let user = UserAccount { uid: 0, gid: 0, name: None, home: None };
        let context = |own: i32, capabilities: u64| SpecContext {
            id: "c1",
            root: Path::new("/r"),
            pid: PidNamespace::Own,
            user: &user,
            groups: &[],
            volumes: vec![],
            capabilities,
            oom_score_adj: own,
            users: None,
        };
        for (own, capabilities, asked, given) in [
            (-3, 1 << 12, -997, -3),
            (-3, 1 << 24, -997, -997),
            (-998, 1 << 12, -997, -997),
            (500, 1 << 12, -997, 0),
            (500, 1 << 12, 0, 0),
            (0, 0, 1000, 1000),
        ] {
            assert_eq!(limit_oom_score_adj(&context(own, capabilities), asked), given, "{own} {asked}");
        }
    }

    #[test]
    fn capabilities_that_the_agent_lacks_are_left_out() {
        let mut json = minimal();
        let all = ["CAP_KILL", "CAP_NET_ADMIN", "CAP_SYS_RESOURCE"];
        json["process"]["capabilities"] = serde_json::json!({
            "bounding": all, "effective": all, "permitted": all, "inheritable": [], "ambient": ["CAP_SYS_RESOURCE"],
        });
        let spec = adjusted(&json, PidNamespace::Own);
        let sets = spec.process().as_ref().unwrap().capabilities().clone().unwrap();
        for set in [sets.bounding(), sets.effective(), sets.permitted()] {
            let mut names: Vec<_> = set.iter().flatten().map(ToString::to_string).collect();
            names.sort();
            assert_eq!(names.len(), 2, "{names:?}");
            assert!(names[0].contains("KILL") && names[1].contains("NET_ADMIN"), "{names:?}");
        }
        assert!(sets.ambient().as_ref().unwrap().is_empty());
        assert_eq!(parse_bounding_set("Name:\tx\nCapBnd:\t00000000000000ff\n"), Some(0xff));
        assert_eq!(parse_bounding_set("CapBnd:\tx"), None);
        assert_ne!(read_bounding_set(), 0);
    }

    #[test]
    fn the_pods_files_are_there_unless_the_spec_mounts_its_own() {
        let spec = adjusted(&minimal(), PidNamespace::Own);
        let of = |destination: &str| {
            let mount = spec.mounts().iter().flatten().find(|mount| mount.destination() == Path::new(destination));
            mount.and_then(|mount| mount.source().clone())
        };
        assert_eq!(of("/etc/hosts"), Some("/h".into()));
        assert_eq!(of("/etc/resolv.conf"), Some(Path::new(paths::FILES).join("resolv.conf")));
        assert_eq!(of("/dev/shm"), Some(paths::SHM.into()));
    }

    #[test]
    fn the_pods_files_are_read_only_where_the_root_is() {
        for (read_only, option) in [(true, "ro"), (false, "rw")] {
            let mut json = minimal();
            json["root"]["readonly"] = read_only.into();
            let spec = adjusted(&json, PidNamespace::Own);
            let has = |destination: &str, option: &str| {
                let mount = spec.mounts().iter().flatten().find(|mount| mount.destination() == Path::new(destination));
                mount.unwrap().options().iter().flatten().any(|each| each == option)
            };
            assert!(has("/etc/hostname", option) && has("/etc/resolv.conf", option), "{read_only}");
            assert!(has("/dev/shm", "rw"), "{read_only}");
        }
    }

    #[test]
    fn volumes_come_after_what_every_container_has_and_before_the_pods_files() {
        let order = |at: &str| {
            let mounts = build_mounts(
                vec![build_bind_mount("/h", "/dev", &[]).unwrap()],
                vec![build_bind_mount("/image", at, &[]).unwrap()],
                false,
            );
            let mounts = mounts.unwrap();
            mounts.iter().map(|mount| mount.destination().display().to_string()).collect::<Vec<_>>()
        };
        assert_eq!(order("/data"), ["/dev", "/data", "/etc/hosts", "/etc/hostname", "/etc/resolv.conf"]);
        assert_eq!(order("/etc"), ["/dev", "/etc"]);
        assert_eq!(order("/etc/hosts"), ["/dev", "/etc/hosts", "/etc/hostname", "/etc/resolv.conf"]);
    }

    #[test]
    fn environment_of_the_image_is_kept() {
        let mut json = minimal();
        json["process"]["env"] = serde_json::json!(["PATH=/x", "HOME=/y"]);
        let spec = adjusted(&json, PidNamespace::Own);
        assert_eq!(spec.process().as_ref().unwrap().env().as_deref().unwrap(), ["PATH=/x", "HOME=/y"]);
    }

    #[test]
    fn invalid_specifications_are_rejected() {
        assert!(matches!(parse_spec(b"{"), Err(OciSpecError::Json { .. })));
        let mut json = minimal();
        json["process"]["args"] = serde_json::json!([]);
        assert!(matches!(parse_spec(json.to_string().as_bytes()), Err(OciSpecError::Missing { part: "process.args" })));
        let mut json = minimal();
        json["linux"]["namespaces"] = serde_json::json!([{ "type": "user" }]);
        assert!(matches!(parse_spec(json.to_string().as_bytes()), Err(OciSpecError::Unsupported { .. })));
    }
}
