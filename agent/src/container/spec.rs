//! Owns: what the agent changes in an OCI specification so that it fits this guest: root, cgroup, namespaces, the
//! pod's files, user, environment. Pure.

use libcontainer::capabilities::CapabilityExt;
use libcontainer::oci_spec::runtime::{
    Capabilities, Capability, LinuxNamespace, LinuxNamespaceBuilder, LinuxNamespaceType, Mount, MountBuilder, Process,
    RootBuilder, Spec, User,
};
use std::path::{Path, PathBuf};

use super::shown;
use super::user::Found;
use crate::paths;

/// Why a specification cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SpecError {
    /// It is no specification.
    #[error("the OCI specification cannot be read")]
    Json {
        /// Why.
        #[from]
        source: serde_json::Error,
    },
    /// A part is missing.
    #[error("the OCI specification has no {part}")]
    Missing {
        /// The part: "process".
        part: &'static str,
    },
    /// Something that this guest cannot do.
    #[error("the OCI specification asks for {what}, which a pod's machine does not have")]
    Unsupported {
        /// What it asks for.
        what: &'static str,
    },
    /// libcontainer's types refuse a part that was built.
    #[error("the OCI specification cannot be adjusted")]
    Build {
        /// Why.
        #[from]
        source: libcontainer::oci_spec::OciSpecError,
    },
}

/// Where the PID namespace of a container comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PidNamespace {
    /// Its own.
    Own,
    /// The one of this process.
    Of(i32),
    /// The pod's, by its name.
    Named,
    /// The agent's, which is the node's.
    Node,
}

/// What the specification is adjusted to.
pub struct Place<'a> {
    /// The container.
    pub id: &'a str,
    /// Where its root is mounted.
    pub root: &'a Path,
    /// Its PID namespace.
    pub pid: PidNamespace,
    /// Its user, as found.
    pub user: &'a Found,
    /// All its supplemental groups.
    pub groups: &'a [u32],
    /// Its image volumes.
    pub volumes: Vec<Mount>,
    /// The capabilities that the agent has to give, a bit each.
    pub capabilities: u64,
    /// The agent's own `oom_score_adj`.
    pub oom_score_adj: i32,
    /// The pod has a user namespace of its own; true: its network namespace belongs to it.
    pub users: Option<bool>,
}

/// This process's own `oom_score_adj`; that of most processes if the kernel does not tell it.
pub fn own_oom_score_adj() -> i32 {
    let text = std::fs::read_to_string("/proc/self/oom_score_adj").unwrap_or_default();
    text.trim().parse().unwrap_or(0)
}

/// What the kernel lets the agent give of what is asked for: less than it has itself only with CAP_SYS_RESOURCE
/// (`proc_pid_oom_score_adj(5)`). Nodes that are containers themselves are without it, and kubelet asks for -997 for a node's own pods.
fn oom_score_adj(place: &Place, asked: i32) -> i32 {
    let least = place.oom_score_adj.min(0);
    if asked >= least || place.capabilities >> CapabilityExt::to_cap(&Capability::SysResource).index() & 1 == 1 {
        return asked;
    }
    tracing::warn!(
        id = place.id,
        asked,
        given = least,
        "oom_score_adj can be no lower here: CAP_SYS_RESOURCE is missing"
    );
    least
}

/// The capabilities that this process can give: its bounding set, as the kernel tells it; all of them if it does not.
pub fn own_capabilities() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    bounding_set(&status).unwrap_or(u64::MAX)
}

fn bounding_set(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("CapBnd:"))?;
    u64::from_str_radix(line.trim(), 16).ok()
}

/// Reads a specification.
pub fn parse(json: &[u8]) -> Result<Spec, SpecError> {
    let spec: Spec = serde_json::from_slice(json)?;
    if spec.process().as_ref().and_then(|process| process.args().as_ref()).is_none_or(Vec::is_empty) {
        return Err(SpecError::Missing { part: "process.args" });
    }
    let linux = spec.linux().as_ref().ok_or(SpecError::Missing { part: "linux" })?;
    let user_namespace = |namespace: &LinuxNamespace| namespace.typ() == LinuxNamespaceType::User;
    if linux.namespaces().iter().flatten().any(user_namespace) {
        return Err(SpecError::Unsupported { what: "a user namespace" });
    }
    if spec.hooks().is_some() {
        return Err(SpecError::Unsupported { what: "hooks" });
    }
    Ok(spec)
}

/// Adjusts a specification to its place in the guest.
pub fn adjust(mut spec: Spec, mut place: Place) -> Result<Spec, SpecError> {
    let read_only = spec.root().as_ref().and_then(|root| root.readonly()).unwrap_or(false);
    spec.set_root(Some(RootBuilder::default().path(place.root).readonly(read_only).build()?));
    spec.set_hostname(None).set_domainname(None);
    let volumes = std::mem::take(&mut place.volumes);
    let mut mounts = mounts(spec.mounts().clone().unwrap_or_default(), volumes)?;
    if place.users == Some(false) {
        show_sysfs(&mut mounts);
    }
    spec.set_mounts(Some(mounts));
    let mut linux = spec.linux().clone().ok_or(SpecError::Missing { part: "linux" })?;
    linux.set_cgroups_path(Some(PathBuf::from(paths::POD_CGROUP).join(place.id)));
    linux.set_namespaces(Some(namespaces(linux.namespaces().as_deref().unwrap_or_default(), &place)?));
    spec.set_linux(Some(linux));
    let process = spec.process().clone().ok_or(SpecError::Missing { part: "process" })?;
    spec.set_process(Some(adjust_process(process, &place)?));
    Ok(spec)
}

/// A sysfs shows a network namespace, and only who owns that may mount one: here it is the agent's that is seen.
fn show_sysfs(mounts: &mut [Mount]) {
    for mount in mounts.iter_mut().filter(|mount| mount.typ().as_deref() == Some("sysfs")) {
        let mut options = mount.options().clone().unwrap_or_default();
        options.push("bind".to_owned());
        mount.set_typ(Some("bind".to_owned())).set_source(Some(shown::SYS.into())).set_options(Some(options));
    }
}

/// Users, network, IPC and host name are the machine's, which is the pod's: a container enters none of its own.
fn namespaces(asked: &[LinuxNamespace], place: &Place) -> Result<Vec<LinuxNamespace>, SpecError> {
    let new = |kind| LinuxNamespaceBuilder::default().typ(kind).build();
    let mut namespaces = vec![new(LinuxNamespaceType::Mount)?];
    if place.users.is_some() {
        let user = LinuxNamespaceBuilder::default().typ(LinuxNamespaceType::User).path(paths::USER_NAMESPACE);
        namespaces.push(user.build()?);
    }
    if asked.iter().any(|namespace| namespace.typ() == LinuxNamespaceType::Cgroup) {
        namespaces.push(new(LinuxNamespaceType::Cgroup)?);
    }
    match &place.pid {
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

fn bind(source: impl AsRef<Path>, destination: &str, options: &[&str]) -> Result<Mount, SpecError> {
    let options: Vec<String> = options.iter().map(|option| (*option).to_owned()).collect();
    let mount = MountBuilder::default().source(source.as_ref()).destination(destination).typ("bind").options(options);
    Ok(mount.build()?)
}

/// The pod's shared memory instead of one of the container's own; the volumes; the pod's files in /etc where nobody
/// else mounts: a volume over /etc, which is read-only, has its own or none.
fn mounts(asked: Vec<Mount>, volumes: Vec<Mount>) -> Result<Vec<Mount>, SpecError> {
    let mut mounts = Vec::with_capacity(asked.len() + volumes.len() + 4);
    for mount in asked {
        if mount.destination() == Path::new("/dev/shm") && mount.typ().as_deref() == Some("tmpfs") {
            mounts.push(bind(paths::SHM, "/dev/shm", &["rbind", "rw", "nosuid", "nodev", "noexec"])?);
        } else {
            mounts.push(mount);
        }
    }
    mounts.extend(volumes);
    for name in ["hosts", "hostname", "resolv.conf"] {
        let destination = format!("/etc/{name}");
        if !mounts.iter().any(|mount| Path::new(&destination).starts_with(mount.destination())) {
            mounts.push(bind(Path::new(paths::FILES).join(name), &destination, &["rbind", "rw", "nosuid", "nodev"])?);
        }
    }
    Ok(mounts)
}

fn adjust_process(mut process: Process, place: &Place) -> Result<Process, SpecError> {
    let mut user: User = process.user().clone();
    user.set_uid(place.user.uid).set_gid(place.user.gid).set_additional_gids(Some(place.groups.to_vec()));
    process.set_user(user);
    let mut env = process.env().clone().unwrap_or_default();
    if !env.iter().any(|entry| entry.starts_with("PATH=")) {
        env.push(format!("PATH={}", paths::DEFAULT_SEARCH_PATH));
    }
    // libcontainer would ask the C library, which would run code of the image.
    if !env.iter().any(|entry| entry.strip_prefix("HOME=").is_some_and(|home| !home.is_empty())) {
        env.retain(|entry| !entry.starts_with("HOME="));
        let default = if place.user.uid == 0 { "/root" } else { "/" };
        env.push(format!("HOME={}", place.user.home.as_deref().unwrap_or(default)));
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
    // What cannot be granted is left out, as OCI has it: a node may itself be somebody's container.
    if let Some(mut sets) = process.capabilities().clone() {
        let held = |set: &Option<Capabilities>| {
            let there = |capability: &&_| place.capabilities >> CapabilityExt::to_cap(*capability).index() & 1 == 1;
            set.as_ref().map(|set| set.iter().filter(there).copied().collect::<Capabilities>())
        };
        let bounding = held(sets.bounding());
        if bounding.as_ref().map(Capabilities::len) != sets.bounding().as_ref().map(Capabilities::len) {
            tracing::warn!(id = place.id, "there are not all the capabilities here that the container may have");
        }
        let (effective, permitted) = (held(sets.effective()), held(sets.permitted()));
        let (inheritable, ambient) = (held(sets.inheritable()), held(sets.ambient()));
        sets.set_bounding(bounding).set_effective(effective).set_permitted(permitted);
        sets.set_inheritable(inheritable).set_ambient(ambient);
        process.set_capabilities(Some(sets));
    }
    // The agent's own value must not be inherited.
    process.set_oom_score_adj(Some(oom_score_adj(place, process.oom_score_adj().unwrap_or(0))));
    // The guest's kernel has neither.
    process.set_apparmor_profile(None).set_selinux_label(None);
    Ok(process)
}

/// The process of an exec: the container's, with other arguments and another terminal setting.
pub fn exec_process(container: &Process, args: Vec<String>, tty: bool) -> Process {
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
        let user = Found { uid: 5, gid: 6, name: None, home: Some("/home/u".into()) };
        let place = Place {
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
        adjust(parse(json.to_string().as_bytes()).unwrap(), place).unwrap()
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
    fn what_the_agent_may_not_lower_is_as_low_as_its_own() {
        let user = Found { uid: 0, gid: 0, name: None, home: None };
        let place = |own: i32, capabilities: u64| Place {
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
            assert_eq!(oom_score_adj(&place(own, capabilities), asked), given, "{own} {asked}");
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
        assert_eq!(bounding_set("Name:\tx\nCapBnd:\t00000000000000ff\n"), Some(0xff));
        assert_eq!(bounding_set("CapBnd:\tx"), None);
        assert_ne!(own_capabilities(), 0);
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
    fn volumes_come_after_what_every_container_has_and_before_the_pods_files() {
        let order = |at: &str| {
            let mounts = mounts(vec![bind("/h", "/dev", &[]).unwrap()], vec![bind("/image", at, &[]).unwrap()]);
            let mounts = mounts.unwrap();
            mounts.iter().map(|mount| mount.destination().display().to_string()).collect::<Vec<_>>()
        };
        assert_eq!(order("/data"), ["/dev", "/data", "/etc/hosts", "/etc/hostname", "/etc/resolv.conf"]);
        assert_eq!(order("/etc"), ["/dev", "/etc"]);
        assert_eq!(order("/etc/hosts"), ["/dev", "/etc/hosts", "/etc/hostname", "/etc/resolv.conf"]);
    }

    #[test]
    fn what_the_image_sets_stays() {
        let mut json = minimal();
        json["process"]["env"] = serde_json::json!(["PATH=/x", "HOME=/y"]);
        let spec = adjusted(&json, PidNamespace::Own);
        assert_eq!(spec.process().as_ref().unwrap().env().as_deref().unwrap(), ["PATH=/x", "HOME=/y"]);
    }

    #[test]
    fn what_cannot_be_is_refused() {
        assert!(matches!(parse(b"{"), Err(SpecError::Json { .. })));
        let mut json = minimal();
        json["process"]["args"] = serde_json::json!([]);
        assert!(matches!(parse(json.to_string().as_bytes()), Err(SpecError::Missing { part: "process.args" })));
        let mut json = minimal();
        json["linux"]["namespaces"] = serde_json::json!([{ "type": "user" }]);
        assert!(matches!(parse(json.to_string().as_bytes()), Err(SpecError::Unsupported { .. })));
    }
}
