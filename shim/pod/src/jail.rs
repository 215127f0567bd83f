//! Builds the jail plan of a pod process from the specification: what stays accessible to the process in its
//! `nacelle-jail`. docs/contributor/jail.md lists the same as a table, with reasons.

use crate::error::PodError;
use crate::spec::{Accelerator, EngineSpec, JailSpec, PodSpec, Seccomp};
use crate::template::TemplateSpec;
use crate::{jail_dir, vfio_dir};
use nacelle_base::files::at;
use nacelle_jail::cgroup;
use nacelle_jail::disk_limits::limit_disk;
pub use nacelle_jail::{Access, ResourceLimits};
use nacelle_jail::{JailPlan, NetworkAccess, Profile, VisiblePath};
pub use nacelle_jail::{MountNamespaceError, check_idmapped_mounts};
use std::collections::BTreeMap;
use std::os::unix::fs::lchown;
use std::path::{Path, PathBuf};

/// What programs need to start: the directories of programs and libraries. Names that do not exist on the node are skipped.
const PROGRAMS: [&str; 6] = ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64"];
const LINKER: [&str; 2] = ["/etc/ld.so.cache", "/etc/alternatives"];

/// The maximum number of open files of the process: 255 images with 512 pieces each, 1,024 streams and 512 connections of the guest
/// with two descriptors each, devices and logs, and almost as much again.
const MAX_OPEN_FILES: u64 = 1 << 18;
/// The maximum number of threads of the process and its QEMU: 64 vCPU threads and 64 helper threads in each of them, and in the process
/// also those of queues and of the logs of 255 containers.
const MAX_THREADS: u64 = 4096;

/// Puts the process into its jail, with access to what the pod in `dir` needs. Open descriptors stay open. The process must
/// have only one thread.
pub(crate) fn enter(spec: &PodSpec, jail: &JailSpec, dir: &Path) -> Result<(), PodError> {
    if let (Some(group), Some(limits)) = (&jail.cgroup, &spec.disk_limits) {
        limit_disk(group, &spec.scratch.templates, limits)?;
        // A process that stays outside of the group would have no limit.
        cgroup::join(group)?;
    }
    if matches!(spec.engine, EngineSpec::Keeper { .. }) {
        vfio_dir::create(dir)?;
        if jail.user.is_none() {
            let why = "jail.user_count is 0, or the node cannot map the owners of the pod's files: see `nacelle check`";
            tracing::warn!("the processes of this machine pod are root, without capabilities: {why}");
        }
    }
    if let Some(user) = jail.user
        && spec.kernel.starts_with(jail_dir(dir))
    {
        // The daemon has written the pod's own kernel with mode 0600, so its owner must change. No other file in the directory exists
        // before this process.
        lchown(&spec.kernel, Some(user), Some(user)).map_err(at("change the owner of", &spec.kernel))?;
    }
    Ok(nacelle_jail::enter(plan(spec, jail, dir))?)
}

/// Puts the process that builds a template into its jail: it sees the guest's kernel and initramfs, `/dev/kvm`, and the part of
/// `dir` that a pod process would see, and takes the disks of its rehearsal along.
pub(crate) fn enter_as_builder(spec: &TemplateSpec, dir: &Path, disks: [PathBuf; 2]) -> Result<(), PodError> {
    let visible_path =
        |path: PathBuf, access| VisiblePath { path, visible_as: None, access, is_required: true, is_idmapped: false };
    let shape = &spec.shape;
    let mut visible_paths = vec![
        visible_path(jail_dir(dir), Access::Write),
        visible_path(shape.kernel.clone(), Access::Read),
        visible_path(shape.initrd.clone(), Access::Read),
        visible_path("/dev/kvm".into(), Access::Device),
    ];
    visible_paths.extend(disks.map(|disk| visible_path(disk, Access::Take)));
    Ok(nacelle_jail::enter(JailPlan {
        visible_paths,
        mount_point: dir.to_owned(),
        cgroup: Some(spec.cgroup.clone()),
        user: spec.user,
        network: NetworkAccess::None,
        signals_earlier_children: false,
        limits: ResourceLimits {
            locked_bytes: 0,
            open_files: Some(MAX_OPEN_FILES),
            threads: spec.user.map(|_user| MAX_THREADS),
        },
        seccomp: spec.seccomp,
        profile: Profile::InProcess,
    })?)
}

/// What the process of a pod should have left in its jail, for a comparison with what it has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpectedJail {
    /// The user id and the group id; `None` for root.
    pub user: Option<u32>,
    /// The reaction to a system call that is not on the list.
    pub seccomp: Seccomp,
    /// The resource limits.
    pub limits: ResourceLimits,
    /// The namespaces of the node that the process may share, by their names in /proc/PID/ns.
    pub shared_namespaces: &'static [&'static str],
    /// The mount points that it may have, besides its root directory, and the access to each.
    pub places: BTreeMap<PathBuf, Access>,
}

/// Returns what the process of the pod in `dir` should have left; `None` if the pod has no jail.
pub fn expected_jail(spec: &PodSpec, dir: &Path) -> Option<ExpectedJail> {
    let jail = spec.jail.as_ref()?;
    let plan = plan(spec, jail, dir);
    let shared_namespaces: &[&str] = if spec.engine.has_vm() { &["user"] } else { &["pid", "user"] };
    let place = |place: VisiblePath| (place.visible_as.unwrap_or(place.path), place.access);
    let places = plan.visible_paths.into_iter().map(place).collect();
    Some(ExpectedJail { user: plan.user, seccomp: plan.seccomp, limits: plan.limits, shared_namespaces, places })
}

fn plan(spec: &PodSpec, jail: &JailSpec, dir: &Path) -> JailPlan {
    let visible_path = |path: &Path, access, is_required| VisiblePath {
        path: path.to_owned(),
        visible_as: None,
        access,
        is_required,
        is_idmapped: false,
    };
    // The files in these directories stay root's: a persistent VM and the image store outlive the pod and its user.
    let idmapped = |path: &Path, access| VisiblePath { is_idmapped: true, ..visible_path(path, access, true) };
    let mut paths = vec![visible_path(&jail_dir(dir), Access::Write, true)];
    if matches!(spec.engine, EngineSpec::Host { .. }) {
        // The agent, which runs already, has access to the rest. This process starts no other process.
        return JailPlan {
            visible_paths: paths,
            mount_point: dir.to_owned(),
            cgroup: jail.cgroup.as_deref().map(crate::host::process_group),
            // It signals the agent, which is root.
            user: None,
            // The agent has the pod's network.
            network: NetworkAccess::None,
            // The agent.
            signals_earlier_children: true,
            limits: ResourceLimits { open_files: Some(MAX_OPEN_FILES), ..ResourceLimits::default() },
            seccomp: jail.seccomp,
            profile: Profile::StartsPrograms,
        };
    }
    paths.push(match spec.engine.has_disks() {
        true => visible_path(&spec.scratch_file(), Access::Take, true),
        false => idmapped(&spec.scratch_file(), Access::Write),
    });
    paths.extend(jail.image_layers.iter().map(|images| idmapped(images, Access::Read)));
    // The engine reports a missing file. A kernel that the pod brings along lies in the jail directory and is removed later.
    let files = [&spec.kernel, &spec.initrd].into_iter().filter(|file| !file.starts_with(jail_dir(dir)));
    paths.extend(files.map(|file| visible_path(file, Access::Read, false)));
    let device = |name: &str| visible_path(Path::new(name), Access::Device, false);
    let (qemu, needs_kvm) = match &spec.engine {
        EngineSpec::Kvm {} => (None, true),
        EngineSpec::Qemu { binary, accelerator } => (Some(binary), *accelerator == Accelerator::Kvm),
        EngineSpec::Keeper { qemu, accelerator, .. } => (Some(qemu), *accelerator == Accelerator::Kvm),
        EngineSpec::Host { .. } => (None, false),
    };
    if let Some(program) = qemu {
        paths.extend(PROGRAMS.map(|path| visible_path(Path::new(path), Access::Execute, false)));
        paths.extend(LINKER.map(|path| visible_path(Path::new(path), Access::Read, false)));
        paths.extend(install_dir(program).map(|path| visible_path(&path, Access::Execute, false)));
        if let EngineSpec::Keeper { program, keep, .. } = &spec.engine {
            paths.push(visible_path(program, Access::Execute, true));
            paths.extend(keep.iter().map(|directory| idmapped(directory, Access::Write)));
            // The directory is empty until a container with devices is created. It lies in the daemon's part of the run directory.
            let (directory, shown) =
                (dir.join(nacelle_model::machine::VFIO_DIR), Some(PathBuf::from(vfio_dir::MOUNT_POINT)));
            paths.push(VisiblePath { visible_as: shown, ..visible_path(&directory, Access::Device, true) });
        }
        paths.extend(["/dev/null", "/dev/urandom"].map(device));
    }
    let locked_bytes = match spec.engine {
        EngineSpec::Keeper { .. } => vfio_dir::locked_bytes(spec.memory_mib),
        _ => 0,
    };
    if needs_kvm {
        paths.push(device("/dev/kvm"));
    }
    if qemu.is_none() {
        paths.push(device("/dev/vhost-net"));
    }
    JailPlan {
        visible_paths: paths,
        mount_point: dir.to_owned(),
        cgroup: jail.cgroup.clone(),
        user: jail.user,
        network: network_access(spec),
        signals_earlier_children: false,
        limits: ResourceLimits {
            locked_bytes,
            open_files: Some(MAX_OPEN_FILES),
            threads: jail.user.map(|_user| MAX_THREADS),
        },
        seccomp: jail.seccomp,
        profile: if qemu.is_some() { Profile::StartsPrograms } else { Profile::InProcess },
    }
}

/// Returns the network namespace of the process. The taps are open already.
fn network_access(spec: &PodSpec) -> NetworkAccess {
    match &spec.network {
        Some(network) => NetworkAccess::Join(network.netns.clone()),
        None => NetworkAccess::None,
    }
}

/// Returns the installation directory of a program that is not in a standard directory, so that its other files are accessible.
fn install_dir(program: &Path) -> Option<PathBuf> {
    let directory = program.parent()?;
    if PROGRAMS.iter().any(|known| directory.starts_with(known)) {
        return None;
    }
    let install_dir = if directory.ends_with("bin") { directory.parent()? } else { directory };
    install_dir.parent().map(|_not_the_root| install_dir.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::tests::sample;
    use nacelle_jail::Mode;

    fn jail() -> JailSpec {
        JailSpec { seccomp: Mode::Kill, image_layers: None, cgroup: None, user: None }
    }

    #[test]
    fn a_pod_may_write_to_its_own_files() {
        let plan = plan(&sample(), &jail(), Path::new("/run/nacelle/pods/a"));
        let written = plan.visible_paths.iter().filter(|path| matches!(path.access, Access::Write | Access::Take));
        let written: Vec<_> = written.map(|path| path.path.to_str().unwrap().to_owned()).collect();
        let disk = sample().scratch_file();
        assert_eq!(written, ["/run/nacelle/pods/a/jail", disk.to_str().unwrap()]);
        assert!(plan.visible_paths.iter().all(|path| !path.path.ends_with("kvm")), "emulated");
        assert_eq!(plan.profile, Profile::StartsPrograms);
    }

    #[test]
    fn a_kernel_in_the_jail_directory_needs_no_entry() {
        let dir = Path::new("/run/nacelle/pods/a");
        let has = |kernel: PathBuf| {
            let plan = plan(&PodSpec { kernel: kernel.clone(), ..sample() }, &jail(), dir);
            plan.visible_paths.iter().any(|path| path.path == kernel)
        };
        assert_eq!((has("/usr/lib/nacelle/vmlinux".into()), has(jail_dir(dir).join("kernel"))), (true, false));
    }

    #[test]
    fn a_vm_in_the_pod_process_needs_no_programs() {
        let spec = PodSpec { engine: EngineSpec::Kvm {}, ..sample() };
        let plan = plan(&spec, &jail(), Path::new("/run/nacelle/pods/a"));
        assert!(plan.visible_paths.iter().all(|path| path.access != Access::Execute));
        let devices = plan.visible_paths.iter().filter(|path| path.access == Access::Device);
        let devices: Vec<_> = devices.map(|path| path.path.to_str().unwrap()).collect();
        assert_eq!((devices, plan.profile), (vec!["/dev/kvm", "/dev/vhost-net"], Profile::InProcess));
    }

    #[test]
    fn a_machine_pod_has_its_own_files_and_devices_and_creates_no_devices() {
        let dir = Path::new("/run/nacelle/pods/a");
        let engine = EngineSpec::Keeper {
            program: "/usr/bin/nacelle-keeper".into(),
            qemu: "/usr/bin/qemu".into(),
            accelerator: Accelerator::Tcg,
            keep: Some("/var/lib/nacelle/machines/b".into()),
            shares: 0,
        };
        let spec = PodSpec { engine, memory_mib: 1024, ..sample() };
        let jail = JailSpec { image_layers: Some("/var/lib/nacelle/images".into()), user: Some(70_001), ..jail() };
        let plan = plan(&spec, &jail, dir);
        let of_directory = plan.visible_paths.iter().filter(|path| path.path == dir.join("vfio"));
        let seen: Vec<_> = of_directory.map(|path| (path.visible_as.as_deref(), path.access)).collect();
        assert_eq!(seen, [(Some(Path::new("/dev/vfio")), Access::Device)]);
        assert_eq!(plan.limits.locked_bytes, 1152 << 20);
        assert_eq!((plan.user, plan.limits.threads), (Some(70_001), Some(MAX_THREADS)));
        // Files that are on the node before or after the pod stay root's.
        let mapped = plan.visible_paths.iter().filter(|path| path.is_idmapped);
        let mapped: Vec<_> = mapped.map(|path| (path.path.to_owned(), path.access)).collect();
        let of_vm = |path: &str, access| (PathBuf::from(path), access);
        let (images, keep) = ("/var/lib/nacelle/images", "/var/lib/nacelle/machines/b");
        assert_eq!(
            mapped,
            [(spec.scratch_file(), Access::Write), of_vm(images, Access::Read), of_vm(keep, Access::Write)]
        );
    }

    #[test]
    fn a_pod_without_guest_sees_only_its_jail_directory() {
        let engine = EngineSpec::Host { agent: "/usr/bin/nacelle-agent".into(), shares: Default::default() };
        let jail = JailSpec { cgroup: Some("nacelle/a".into()), ..jail() };
        let plan = plan(&PodSpec { engine, ..sample() }, &jail, Path::new("/run/nacelle/pods/a"));
        assert!(plan.visible_paths.iter().all(|path| path.access == Access::Write), "{:?}", plan.visible_paths);
        assert_eq!((plan.visible_paths.len(), plan.cgroup), (1, Some("nacelle/a/process".into())));
    }

    #[test]
    fn the_installation_directory_of_a_program_is_accessible() {
        let install_dir = |program: &str| install_dir(Path::new(program)).map(|path| path.to_str().unwrap().to_owned());
        assert_eq!(install_dir("/usr/bin/qemu"), None);
        assert_eq!(install_dir("/opt/qemu/bin/qemu").as_deref(), Some("/opt/qemu"));
        assert_eq!(install_dir("/opt/qemu/qemu").as_deref(), Some("/opt/qemu"));
        assert_eq!(install_dir("/qemu"), None);
    }
}
