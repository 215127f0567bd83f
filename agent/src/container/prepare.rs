//! Prepares a container before any process of it exists: huge pages, root, user, volumes, and the specification on disk.
//!
//! The functions block. The undo stack of `create` removes what a failed preparation leaves.

use libcontainer::oci_spec::runtime::{Mount, Spec};
use nacelle_base::share;
use nacelle_proto::agent::EmptyDir;
use nacelle_proto::common::CreateContainerResponse;
use std::path::{Path, PathBuf};

use super::cpu_limit::take_cpu_limit;
use super::error::AgentError;
use super::options::CreateOptions;
use super::pod::AgentPod;
use super::spec::{PidNamespace, SpecContext, adjust_spec, parse_spec, read_bounding_set, read_oom_score_adj};
use super::{anonymous_volumes, devices, image_volumes, limits, mapped_mounts, root, user};
use crate::cgroup;
use crate::empty_dirs::EmptyDirSource;
use crate::huge_pages;
use crate::paths;
use crate::rootfs::{
    EntryKind, MountPoints, Owner, RootPathError, check_bind_mounts, is_bind_mount, read_file, take_late_mounts,
};
use crate::userns::UserNs;

/// The input of libcontainer and the zygote for the first process.
pub(super) struct PreparedContainer {
    /// The specification as it was written to the bundle.
    pub spec: Spec,
    /// The mount point of the image.
    pub image: PathBuf,
    /// The mounts at and below /dev that the zygote makes when libcontainer is done.
    pub late_mounts: Vec<Mount>,
    /// The file and value of the CPU limit, which the specification no longer has.
    pub cpu_limit: Option<(String, String)>,
    /// The user and groups that were found.
    pub response: CreateContainerResponse,
}

/// Prepares the container of these options, whose PID namespace is `pid`.
pub(super) fn prepare_container(
    pod: &AgentPod,
    options: &CreateOptions,
    pid: PidNamespace,
) -> Result<PreparedContainer, AgentError> {
    let id = &options.id;
    let in_spec = |source| AgentError::Spec { id: id.clone(), source };
    let in_root = |source| AgentError::Root { id: id.clone(), source };
    let spec = parse_spec(&options.spec).map_err(in_spec)?;
    pod.reserve_huge_pages(id, &limits::huge_page_limits(&spec))?;
    let image = pod.disks.image_mount_point(options.partition)?;
    pod.disks.mount_scratch()?;
    let users = pod.users.as_ref();
    let owner = users.map(UserNs::root);
    let root = root::mount_root(id, &image, users).map_err(in_root)?;
    let passwd = read_file(&root, "/etc/passwd").map_err(in_root)?;
    let group = read_file(&root, "/etc/group").map_err(in_root)?;
    let (user, groups) = find_user(options, &spec, users, &passwd, &group)?;
    let response = CreateContainerResponse { uid: user.uid, gid: user.gid, supplemental_groups: groups.clone() };
    let mut mounts = Vec::with_capacity(options.volumes.len());
    for volume in &options.volumes {
        let image = pod.disks.image_mount_point(volume.partition)?;
        let mount = image_volumes::prepare_mount(&root, &image, volume, owner);
        mounts.push(mount.map_err(|source| AgentError::Volume { id: id.clone(), source })?);
    }
    let anonymous = anonymous_volumes::prepare_volumes(id, &root, &options.anonymous_volumes, owner)
        .map_err(|source| AgentError::AnonymousVolume { id: id.clone(), source })?;
    let is_shared = |mount: &Mount| mount.source().as_ref().is_some_and(|source| source.starts_with(share::DIRECTORY));
    if spec.mounts().iter().flatten().any(is_shared) {
        pod.disks.mount_shared_volumes()?;
    }
    let spec = resolve_empty_dirs(pod, id, spec, &options.empty_dirs)?;
    let context = SpecContext {
        id,
        root: &root,
        pid,
        user: &user,
        groups: &groups,
        volumes: mounts,
        capabilities: read_bounding_set(),
        oom_score_adj: read_oom_score_adj(),
        users: users.map(|users| users.network),
    };
    let mut spec = adjust_spec(spec, context).map_err(in_spec)?;
    if let (Some(users), Some(mounts)) = (users, spec.mounts_mut()) {
        mapped_mounts::map_sources(id, users, mounts).map_err(in_root)?;
    }
    // First, so that volumes that the request has below one are mounted in it.
    spec.mounts_mut().get_or_insert_default().splice(..0, anonymous);
    for device in &options.devices {
        let numbers = pod.disks.device_numbers(device.partition)?;
        devices::add_device(&mut spec, device, numbers).map_err(|source| in_spec(source.into()))?;
    }
    let controllers = Path::new(paths::CGROUP).join("cgroup.controllers");
    limits::drop_unsupported_limits(
        &mut spec,
        &std::fs::read_to_string(controllers).unwrap_or_default(),
        &huge_pages::list_sizes(),
        cgroup::pod_path().join(limits::SWAP_LIMIT).exists(),
    );
    check_bind_mounts(&root, spec.mounts().as_deref().unwrap_or_default(), Path::new(mapped_mounts::SYS))
        .map_err(|source| AgentError::Mount { id: id.clone(), source })?;
    let late_mounts = take_late_mounts(&mut spec);
    let cpu_limit = take_cpu_limit(&mut spec);
    prepare_mount_points(&root, &mut spec, owner).map_err(|source| AgentError::Target { id: id.clone(), source })?;
    let path = Path::new(paths::BUNDLES).join(id).join("config.json");
    let json = serde_json::to_vec(&spec).map_err(|source| in_spec(source.into()))?;
    std::fs::write(&path, json).map_err(AgentError::file("write the bundle", &path, id))?;
    Ok(PreparedContainer { spec, image, late_mounts, cpu_limit, response })
}

/// Finds the user of the container's processes and all their supplemental groups, and checks that the numbers are allowed.
fn find_user(
    options: &CreateOptions,
    spec: &Spec,
    users: Option<&UserNs>,
    passwd: &str,
    group: &str,
) -> Result<(user::UserAccount, Vec<u32>), AgentError> {
    let id = &options.id;
    let asked = spec.process().as_ref().map(|process| process.user().clone()).unwrap_or_default();
    let user = if options.user.is_empty() {
        user::user_with_ids(asked.uid(), asked.gid(), passwd)
    } else {
        user::find_user(&options.user, passwd, group).map_err(|source| AgentError::User { id: id.clone(), source })?
    };
    let mut groups = vec![user.gid];
    let merged = match &user.name {
        Some(name) if options.merge_groups => user::list_memberships(name, group),
        _ => Vec::new(),
    };
    // Those of the image first: ContainerStatus reports this order, as other runtimes do.
    for gid in merged.into_iter().chain(asked.additional_gids().iter().flatten().copied()) {
        if !groups.contains(&gid) {
            groups.push(gid);
        }
    }
    let last = users.map(UserNs::max_ids);
    user::check_ids([user.uid], last.map(|(user, _)| user))
        .and_then(|()| user::check_ids(groups.iter().copied(), last.map(|(_, group)| group)))
        .map_err(|source| AgentError::Numbers { id: id.clone(), source })?;
    Ok((user, groups))
}

/// Resolves the destinations of all mounts and the working directory in the root, and makes what is missing there, so that
/// libcontainer gets paths without links.
fn prepare_mount_points(root: &Path, spec: &mut Spec, owner: Owner) -> Result<(), RootPathError> {
    let mut points = MountPoints::open(root, owner)?;
    points.check_reserved_directories()?;
    for mount in spec.mounts_mut().iter_mut().flatten() {
        let of_file = is_bind_mount(mount) && mount.source().as_ref().is_some_and(|source| !source.is_dir());
        let kind = if of_file { EntryKind::File } else { EntryKind::Directory };
        let destination = points.add_mount(mount.destination(), kind)?;
        mount.set_destination(destination);
    }
    if let Some(process) = spec.process() {
        points.prepare_path("working directory", process.cwd(), EntryKind::Directory)?;
    }
    let devices = spec.linux().as_ref().and_then(|linux| linux.devices().as_ref());
    devices.into_iter().flatten().try_for_each(|device| points.check_device(device.path()))
}

/// Creates the emptyDir volumes that do not exist yet, and sets the sources of their mounts to where they are in the VM.
fn resolve_empty_dirs(pod: &AgentPod, id: &str, mut spec: Spec, volumes: &[EmptyDir]) -> Result<Spec, AgentError> {
    for (number, volume) in volumes.iter().enumerate() {
        let source = match pod.empty_dirs.prepare(volume, &pod.disks)? {
            EmptyDirSource::Whole(path) => path,
            EmptyDirSource::SubPath(mount) => mapped_mounts::attach_mount(id, mount, &format!("own{number}"))
                .map_err(|source| AgentError::Root { id: id.to_owned(), source })?,
        };
        let asked = Path::new(&volume.source);
        for mount in spec.mounts_mut().iter_mut().flatten() {
            if mount.source().as_deref() == Some(asked) {
                mount.set_source(Some(source.clone()));
            }
        }
    }
    Ok(spec)
}
