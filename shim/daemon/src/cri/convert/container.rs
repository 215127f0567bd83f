//! Converts CRI's ContainerConfig into `ContainerConfig`.

use super::device::devices;
use super::resources::{fields, resources};
use super::volume::{mount_requests, volumes};
use super::{FieldError, bad, id_number, name, name_of_image, pairs, users};
use nacelle_model::capability;
use nacelle_model::container::ContainerConfig;
use nacelle_model::device::DeviceRequest;
use nacelle_model::namespace::{NodeNamespaces, UserNamespace};
use nacelle_model::seccomp::SeccompProfile;
use nacelle_model::security::{Capabilities, PidMode, RunAs, SeccompPolicy};
use nacelle_proto::cri;
use std::path::{Component, Path, PathBuf};

/// Returns the node's file with the seccomp profile that this container requests. A privileged container has no filter, whatever
/// it requests.
pub fn seccomp_profile(config: Option<&cri::ContainerConfig>) -> Result<Option<PathBuf>, FieldError> {
    let linux = config.and_then(|config| config.linux.as_ref());
    match linux.and_then(|linux| linux.security_context.as_ref()).filter(|security| !security.privileged) {
        Some(security) => match requested_seccomp(security)? {
            RequestedSeccomp::File(path) => Ok(Some(path)),
            RequestedSeccomp::Unconfined | RequestedSeccomp::RuntimeDefault => Ok(None),
        },
        None => Ok(None),
    }
}

/// What a container's configuration refers to on the node, as it was found there.
#[derive(Debug, Default)]
pub struct NodeParts {
    /// The contents of the file of [`seccomp_profile`].
    pub seccomp: Option<SeccompProfile>,
    /// The name of a loaded AppArmor profile.
    pub apparmor: Option<String>,
    /// The devices of [`super::apply_cdi_edits`].
    pub devices: Vec<DeviceRequest>,
}

/// Checks and converts a container's configuration. The containers of a pod share its namespaces of the node and its user
/// namespace.
pub fn container_config(
    config: Option<&cri::ContainerConfig>,
    parts: NodeParts,
    node: NodeNamespaces,
    user_namespace: Option<UserNamespace>,
) -> Result<ContainerConfig, FieldError> {
    let config = config.ok_or(FieldError::Missing { field: "config" })?;
    let metadata = config.metadata.as_ref().ok_or(FieldError::Missing { field: "config.metadata" })?;
    let image = config.image.as_ref().ok_or(FieldError::Missing { field: "config.image" })?;
    let linux = config.linux.clone().unwrap_or_default();
    let security = linux.security_context.unwrap_or_default();
    users::check_container(security.namespace_options.as_ref(), user_namespace)?;
    for word in config.command.iter().chain(&config.args).chain([&config.working_dir]) {
        if word.contains('\0') {
            return bad("config.command, args, working_dir", word, "no zero bytes are allowed");
        }
    }
    if !config.working_dir.is_empty() && !config.working_dir.starts_with('/') {
        return bad("config.working_dir", &config.working_dir, "an absolute path is needed");
    }
    if let Some(key) = config.annotations.keys().find(|key| key.starts_with(nacelle_vmi::annotations::PREFIX)) {
        return bad("config.annotations", key, "a VM belongs to the pod: set the annotation on the pod");
    }
    let (volumes, node_volumes) = volumes(&config.mounts, user_namespace)?;
    Ok(ContainerConfig {
        name: name("config.metadata.name", &metadata.name)?,
        attempt: metadata.attempt,
        image: name_of_image("config.image.image", image)?,
        user_image: if image.user_specified_image.is_empty() { &image.image } else { &image.user_specified_image }
            .clone(),
        command: config.command.clone(),
        args: config.args.clone(),
        working_dir: config.working_dir.clone(),
        envs: config.envs.iter().map(env).collect::<Result<_, _>>()?,
        labels: pairs(&config.labels),
        annotations: pairs(&config.annotations),
        log_path: log_path(&config.log_path)?,
        stdin: config.stdin,
        stdin_once: config.stdin_once,
        tty: config.tty,
        stop_signal: stop_signal(config.stop_signal)?,
        stop_signal_name: find_signal_alias(config.stop_signal),
        mounts: mount_requests(&config.mounts),
        resources: resources(&linux.resources.unwrap_or_default(), fields!("config.linux.resources"))?,
        privileged: security.privileged,
        capabilities: capabilities(security.capabilities.as_ref())?,
        pid: pid(security.namespace_options.as_ref(), node)?,
        run_as: run_as(&security)?,
        readonly_rootfs: security.readonly_rootfs,
        no_new_privs: security.no_new_privs,
        masked_paths: paths("config.linux.security_context.masked_paths", &security.masked_paths)?,
        readonly_paths: paths("config.linux.security_context.readonly_paths", &security.readonly_paths)?,
        seccomp: seccomp(&security, parts.seccomp)?,
        apparmor: parts.apparmor,
        volumes,
        node_volumes,
        devices: devices(&config.devices, &parts.devices, user_namespace)?,
    })
}

fn env(pair: &cri::KeyValue) -> Result<(String, String), FieldError> {
    if pair.key.is_empty() || pair.key.contains(['=', '\0']) {
        return bad("config.envs.key", &pair.key, "a name without = and zero bytes is needed");
    }
    match std::str::from_utf8(&pair.value) {
        Ok(value) if !value.contains('\0') => Ok((pair.key.clone(), value.to_owned())),
        _ => bad("config.envs.value", format!("that of {}", pair.key), "UTF-8 without zero bytes is needed"),
    }
}

fn log_path(text: &str) -> Result<String, FieldError> {
    let inside = Path::new(text).components().all(|part| matches!(part, Component::Normal(_)));
    if inside && !text.contains('\0') && !text.ends_with('/') {
        Ok(text.to_owned())
    } else {
        bad("config.log_path", text, "a path below the pod's log_directory is needed")
    }
}

/// Returns `None` for the stop signal of the image.
fn stop_signal(signal: i32) -> Result<Option<u32>, FieldError> {
    let unknown = || FieldError::Bad {
        field: "config.stop_signal",
        value: signal.to_string(),
        rule: "a value of CRI's Signal is needed".into(),
    };
    match cri::Signal::try_from(signal).map_err(|_unknown| unknown())? {
        cri::Signal::RuntimeDefault => Ok(None),
        signal => signal_number(signal).map(Some).ok_or_else(unknown),
    }
}

/// Returns the name of a signal whose number has another name that comes first; empty for all others.
fn find_signal_alias(signal: i32) -> String {
    let Ok(signal) = cri::Signal::try_from(signal) else { return String::new() };
    match signal_number(signal).and_then(find_signal) {
        Some(first) if first != signal => signal.as_str_name().to_owned(),
        _ => String::new(),
    }
}

/// Returns the first CRI signal with this Linux number.
pub(super) fn find_signal(number: u32) -> Option<cri::Signal> {
    (1..=65).filter_map(|value| cri::Signal::try_from(value).ok()).find(|signal| signal_number(*signal) == Some(number))
}

/// Returns the Linux number of a CRI signal; `None` for the stop signal of the image.
pub(super) fn signal_number(signal: cri::Signal) -> Option<u32> {
    let name = signal.as_str_name().strip_prefix("SIGNAL_SIG")?;
    crate::signals::number(&name.replace("PLUS", "+").replace("MINUS", "-"))
}

fn capabilities(requested: Option<&cri::Capability>) -> Result<Capabilities, FieldError> {
    let Some(requested) = requested else { return Ok(Capabilities::default()) };
    let list = |field, names: &[String]| -> Result<Vec<String>, FieldError> {
        let known = |name: &String| match capability::normalize(name) {
            normal if capability::is_known(&normal) => Ok(normal),
            _ => bad(field, name, "a capability of Linux or ALL is needed"),
        };
        names.iter().map(known).collect()
    };
    Ok(Capabilities {
        add: list("config.linux.security_context.capabilities.add_capabilities", &requested.add_capabilities)?,
        drop: list("config.linux.security_context.capabilities.drop_capabilities", &requested.drop_capabilities)?,
        ambient: list(
            "config.linux.security_context.capabilities.add_ambient_capabilities",
            &requested.add_ambient_capabilities,
        )?,
    })
}

/// Returns the PID namespace mode. `node` holds the pod's namespaces of the node, which its containers share.
fn pid(options: Option<&cri::NamespaceOption>, node: NodeNamespaces) -> Result<PidMode, FieldError> {
    let options = options.cloned().unwrap_or_default();
    for (field, mode, shared) in [
        ("config.linux.security_context.namespace_options.network", options.network(), node.network),
        ("config.linux.security_context.namespace_options.ipc", options.ipc(), node.ipc),
    ] {
        match mode {
            cri::NamespaceMode::Pod => {}
            cri::NamespaceMode::Node if shared => {}
            cri::NamespaceMode::Node => return Err(FieldError::NotThePods { field }),
            mode => return bad(field, mode.as_str_name(), "containers share the pod's (POD)"),
        }
    }
    match options.pid() {
        cri::NamespaceMode::Pod => Ok(PidMode::Pod),
        cri::NamespaceMode::Container => Ok(PidMode::Own),
        cri::NamespaceMode::Target => {
            Ok(PidMode::Of(name("config.linux.security_context.namespace_options.target_id", &options.target_id)?))
        }
        cri::NamespaceMode::Node if node.pid => Ok(PidMode::Pod),
        cri::NamespaceMode::Node => {
            Err(FieldError::NotThePods { field: "config.linux.security_context.namespace_options.pid" })
        }
    }
}

fn run_as(security: &cri::LinuxContainerSecurityContext) -> Result<RunAs, FieldError> {
    let field = "config.linux.security_context.run_as_user";
    let number = security.run_as_user.as_ref().map(|user| id_number(field, user.value)).transpose()?;
    let user_name = security.run_as_username.as_str();
    if user_name.contains([':', '\0', '\n']) {
        return bad("config.linux.security_context.run_as_username", user_name, "a user's name is needed");
    }
    let user = match (number, user_name) {
        (Some(number), _) => Some(number.to_string()),
        (None, "") => None,
        (None, name) => Some(name.to_owned()),
    };
    let field = "config.linux.security_context.run_as_group";
    let group = security.run_as_group.as_ref().map(|group| id_number(field, group.value)).transpose()?;
    if let (Some(group), None) = (group, &user) {
        return bad(field, group, "it is allowed together with run_as_user or run_as_username only");
    }
    let field = "config.linux.security_context.supplemental_groups";
    Ok(RunAs {
        user,
        group,
        supplemental: security
            .supplemental_groups
            .iter()
            .map(|group| id_number(field, *group))
            .collect::<Result<_, _>>()?,
        strict: security.supplemental_groups_policy() == cri::SupplementalGroupsPolicy::Strict,
    })
}

fn paths(field: &'static str, paths: &[String]) -> Result<Vec<String>, FieldError> {
    match paths.iter().find(|path| !path.starts_with('/') || path.contains('\0')) {
        Some(path) => bad(field, path, "an absolute path is needed"),
        None => Ok(paths.to_vec()),
    }
}

/// A request for a seccomp filter, or for the file with one.
enum RequestedSeccomp {
    Unconfined,
    RuntimeDefault,
    File(PathBuf),
}

#[expect(deprecated, reason = "kubelets before 1.26 send the old field")]
fn requested_seccomp(security: &cri::LinuxContainerSecurityContext) -> Result<RequestedSeccomp, FieldError> {
    use cri::security_profile::ProfileType;
    let (field, path) = match (&security.seccomp, security.seccomp_profile_path.as_str()) {
        (Some(profile), _) => match profile.profile_type() {
            ProfileType::RuntimeDefault => return Ok(RequestedSeccomp::RuntimeDefault),
            ProfileType::Unconfined => return Ok(RequestedSeccomp::Unconfined),
            ProfileType::Localhost => {
                ("config.linux.security_context.seccomp.localhost_ref", profile.localhost_ref.as_str())
            }
        },
        (None, "runtime/default" | "docker/default") => return Ok(RequestedSeccomp::RuntimeDefault),
        (None, "" | "unconfined") => return Ok(RequestedSeccomp::Unconfined),
        (None, path) => ("config.linux.security_context.seccomp_profile_path", path),
    };
    // The prefix belongs to the deprecated field; some clients write it into the new field too.
    let file = path.strip_prefix("localhost/").unwrap_or(path);
    if file.starts_with('/') && !file.contains('\0') {
        Ok(RequestedSeccomp::File(file.into()))
    } else {
        bad(field, path, "the absolute path of a profile on the node is needed")
    }
}

fn seccomp(
    security: &cri::LinuxContainerSecurityContext,
    profile: Option<SeccompProfile>,
) -> Result<SeccompPolicy, FieldError> {
    Ok(match (requested_seccomp(security)?, profile) {
        (RequestedSeccomp::RuntimeDefault, _) => SeccompPolicy::RuntimeDefault,
        (RequestedSeccomp::File(_), Some(profile)) => SeccompPolicy::Localhost(Box::new(profile)),
        // The file is not read for a privileged container.
        (RequestedSeccomp::Unconfined | RequestedSeccomp::File(_), _) => SeccompPolicy::Unconfined,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacelle_base::{Classify, FailureKind};
    use proptest::prelude::*;

    fn sample() -> cri::ContainerConfig {
        cri::ContainerConfig {
            metadata: Some(cri::ContainerMetadata { name: "c".into(), attempt: 1 }),
            image: Some(cri::ImageSpec { image: "sha256:aa".into(), ..Default::default() }),
            log_path: "c/0.log".into(),
            linux: Some(cri::LinuxContainerConfig::default()),
            ..Default::default()
        }
    }

    fn converted(change: impl FnOnce(&mut cri::ContainerConfig)) -> Result<ContainerConfig, FieldError> {
        let mut config = sample();
        change(&mut config);
        seccomp_profile(Some(&config))?;
        container_config(Some(&config), NodeParts::default(), NodeNamespaces::default(), None)
    }

    fn security(config: &mut cri::ContainerConfig) -> &mut cri::LinuxContainerSecurityContext {
        config.linux.get_or_insert_default().security_context.get_or_insert_default()
    }

    fn limits(config: &mut cri::ContainerConfig) -> &mut cri::LinuxContainerResources {
        config.linux.get_or_insert_default().resources.get_or_insert_default()
    }

    #[test]
    fn what_kubelet_sends_is_taken_over() {
        let container = converted(|config| {
            config.envs = vec![cri::KeyValue { key: "A".into(), value: "ä=b".into() }];
            config.stop_signal = cri::Signal::Sigrtminplus3.into();
            limits(config).hugepage_limits = vec![cri::HugepageLimit { page_size: "2MB".into(), limit: 0 }];
            limits(config).unified.insert("memory.oom.group".into(), "1".into());
            let security = security(config);
            security.capabilities = Some(cri::Capability {
                add_capabilities: vec!["net_admin".into()],
                drop_capabilities: vec!["ALL".into()],
                ..Default::default()
            });
            security.run_as_user = Some(cri::Int64Value { value: 1000 });
            security.run_as_group = Some(cri::Int64Value { value: 1001 });
            security.supplemental_groups = vec![5];
            security.supplemental_groups_policy = 1;
            security.namespace_options = Some(cri::NamespaceOption { pid: 1, ..Default::default() });
            security.seccomp = Some(cri::SecurityProfile::default());
        })
        .unwrap();
        assert_eq!(container.envs, [("A".to_owned(), "ä=b".to_owned())]);
        assert_eq!(container.stop_signal, Some(37));
        assert_eq!(container.resources.hugepages, [("2MB".to_owned(), 0)]);
        assert_eq!(
            (container.capabilities.add, container.capabilities.drop),
            (vec!["NET_ADMIN".to_owned()], vec!["ALL".into()])
        );
        let run_as = RunAs { user: Some("1000".into()), group: Some(1001), supplemental: vec![5], strict: true };
        assert_eq!(container.run_as, run_as);
        assert_eq!((container.pid, container.seccomp), (PidMode::Own, SeccompPolicy::RuntimeDefault));
        let plain = converted(|_| ()).unwrap();
        assert_eq!((plain.pid, plain.seccomp, plain.stop_signal), (PidMode::Pod, SeccompPolicy::Unconfined, None));
    }

    #[test]
    fn a_profile_of_the_node_is_asked_for_by_its_path() {
        use cri::security_profile::ProfileType::Localhost;
        let requested = |change: fn(&mut cri::LinuxContainerSecurityContext)| {
            let mut config = sample();
            change(security(&mut config));
            let path = seccomp_profile(Some(&config)).unwrap();
            let profile = serde_json::from_str(r#"{ "defaultAction": "SCMP_ACT_LOG" }"#).unwrap();
            let parts = NodeParts { seccomp: path.is_some().then_some(profile), ..Default::default() };
            let config = container_config(Some(&config), parts, NodeNamespaces::default(), None).unwrap();
            (path, matches!(config.seccomp, SeccompPolicy::Localhost(_)))
        };
        fn local(path: &str) -> Option<cri::SecurityProfile> {
            Some(cri::SecurityProfile { profile_type: Localhost.into(), localhost_ref: path.into() })
        }
        let path = Some(PathBuf::from("/p.json"));
        assert_eq!(requested(|s| s.seccomp = local("/p.json")), (path.clone(), true));
        assert_eq!(requested(|s| s.seccomp = local("localhost//p.json")), (path.clone(), true));
        #[expect(deprecated, reason = "old kubelets")]
        fn old(security: &mut cri::LinuxContainerSecurityContext) {
            security.seccomp_profile_path = "localhost//p.json".into();
        }
        assert_eq!(requested(old), (path, true));
        assert_eq!(requested(|s| (s.seccomp, s.privileged) = (local("/p.json"), true)), (None, false));
        assert_eq!(requested(|s| s.seccomp = Some(cri::SecurityProfile::default())), (None, false));
        assert_eq!(seccomp_profile(None), Ok(None));
    }

    #[test]
    fn every_refusal_names_field_and_rule() {
        type Change = fn(&mut cri::ContainerConfig);
        let rows: [(Change, FailureKind, &str); 25] = [
            (|c| c.metadata = None, FailureKind::Invalid, "config.metadata is missing"),
            (|c| c.metadata.as_mut().unwrap().name.clear(), FailureKind::Invalid, "name is missing"),
            (|c| c.image = None, FailureKind::Invalid, "config.image is missing"),
            (|c| c.image.as_mut().unwrap().image.clear(), FailureKind::Invalid, "config.image.image is missing"),
            (|c| c.log_path = "../x".into(), FailureKind::Invalid, "log_path"),
            (|c| c.log_path = "/x".into(), FailureKind::Invalid, "log_path"),
            (|c| c.log_path = "x/".into(), FailureKind::Invalid, "log_path"),
            (|c| c.working_dir = "x".into(), FailureKind::Invalid, "working_dir"),
            (|c| c.command = vec!["a\0".into()], FailureKind::Invalid, "command"),
            (
                |c| c.mounts = vec![cri::Mount { host_path: "/etc".into(), ..Default::default() }],
                FailureKind::Invalid,
                "container_path",
            ),
            (
                |c| c.devices = vec![cri::Device { host_path: "dev/fuse".into(), ..Default::default() }],
                FailureKind::Invalid,
                "dev/fuse",
            ),
            (|c| c.envs = vec![cri::KeyValue { key: "a=".into(), value: vec![] }], FailureKind::Invalid, "envs.key"),
            (|c| c.envs = vec![cri::KeyValue { key: "a".into(), value: vec![0xff] }], FailureKind::Invalid, "UTF-8"),
            (|c| c.stop_signal = 99, FailureKind::Invalid, "stop_signal"),
            (|c| limits(c).cpu_shares = -1, FailureKind::Invalid, "cpu_shares"),
            (|c| limits(c).oom_score_adj = 1001, FailureKind::Invalid, "oom_score_adj"),
            (|c| limits(c).cpuset_cpus = "3-0".into(), FailureKind::Invalid, "cpuset_cpus is \"3-0\""),
            (
                |c| limits(c).hugepage_limits = vec![cri::HugepageLimit { page_size: "2/../MB".into(), limit: 1 }],
                FailureKind::Invalid,
                "hugepage_limits.page_size is \"2/../MB\"",
            ),
            (|c| limits(c).unified.extend([("../x".into(), "1".into())]), FailureKind::Invalid, "unified"),
            (
                |c| {
                    security(c).capabilities =
                        Some(cri::Capability { add_capabilities: vec!["FLY".into()], ..Default::default() })
                },
                FailureKind::Invalid,
                "FLY",
            ),
            (|c| security(c).run_as_group = Some(cri::Int64Value { value: 1 }), FailureKind::Invalid, "run_as_user"),
            (|c| security(c).run_as_user = Some(cri::Int64Value { value: -1 }), FailureKind::Invalid, "run_as_user"),
            (|c| security(c).masked_paths = vec!["proc".into()], FailureKind::Invalid, "masked_paths"),
            (
                |c| security(c).namespace_options = Some(cri::NamespaceOption { network: 2, ..Default::default() }),
                FailureKind::Conflict,
                "network is NODE",
            ),
            (
                |c| {
                    security(c).seccomp = Some(cri::SecurityProfile { profile_type: 2, localhost_ref: "p.json".into() })
                },
                FailureKind::Invalid,
                "localhost_ref is \"p.json\"",
            ),
        ];
        for (change, kind, words) in rows {
            let error = converted(change).unwrap_err();
            assert_eq!(error.kind(), kind, "{error}");
            assert!(error.to_string().contains(words), "{error}");
        }
    }

    #[test]
    fn every_signal_of_cri_has_a_number() {
        for number in 1..=65 {
            let signal = cri::Signal::try_from(number).unwrap();
            assert!(signal_number(signal).is_some(), "{signal:?}");
        }
        assert_eq!(signal_number(cri::Signal::Sigrtmaxminus14), Some(50));
        assert_eq!(signal_number(cri::Signal::Sigcld), Some(17));
    }

    proptest! {
        #[test]
        fn a_log_never_leaves_its_directory(text in "[a./]{0,12}") {
            if let Ok(path) = log_path(&text) {
                let whole = Path::new("/logs").join(path);
                prop_assert!(whole.components().all(|part| part != Component::ParentDir));
                prop_assert!(whole.starts_with("/logs"));
            }
        }
    }
}
