//! Implements the process that builds a template: it boots a VM without devices of its own, waits for the agent's hello, saves the VM,
//! and rehearses a pod's start in a clone. It is jailed like a pod process, with less: no network but a tap that leads nowhere, no disks but
//! those of the rehearsal.

use super::rehearsal::{RehearsalDevices, rehearse};
use super::spec::TemplateSpec;
use crate::boot::accept_hello;
use crate::error::PodError;
use crate::machine::{CONSOLE_FILE, GUEST_CID, kernel_args};
use crate::{agent, jail, jail_dir, process};
use nacelle_base::Chain;
use nacelle_base::machine::MemoryPages;
use nacelle_base::retry::retry_interrupted;
use nacelle_engine::kvm::KvmEngine;
use nacelle_engine::{
    Engine, EngineError, Machine, MachineSpec, Pausable, Restorer, SnapshotError, SnapshotFiles, StopMode, fill_holes,
    read_snapshot,
};
use nacelle_jail::{ThreadKind, cgroup};
use std::path::Path;
use std::process::ExitCode;
use tokio::runtime::Runtime;

/// By how much the process lowers its priority (nice(2)).
const NICENESS: i32 = 10;

/// Builds the template that `DIR/template.json` specifies, in the same directory: its files `state` and `memory`. The exit code is 0 if
/// they are complete. Ends when its standard input does, because then no one wants the template; closes all other inherited descriptors.
pub fn build(dir: &Path) -> ExitCode {
    let built = nacelle_jail::close_inherited().map_err(PodError::from).and_then(|()| build_in(dir));
    match built {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{}", Chain(&error));
            ExitCode::FAILURE
        }
    }
}

fn build_in(dir: &Path) -> Result<(), PodError> {
    let spec = TemplateSpec::read(dir)?;
    nix::sys::stat::umask(nix::sys::stat::Mode::from_bits_truncate(0o077));
    nacelle_jail::drop_oom_protection();
    // No pod waits for a template. Where the node has no such controller, the nice value counts.
    let joined = cgroup::join(&spec.cgroup).and_then(|()| cgroup::set_lowest_cpu_weight(&spec.cgroup));
    if let Err(error) = joined {
        tracing::warn!("the template is charged to the daemon: {}", Chain(&error));
    }
    if let Err(error) = rustix::process::nice(NICENESS) {
        tracing::warn!(%error, "cannot lower the priority of this process");
    }
    let files = SnapshotFiles::create(dir).map_err(snapshot_error("create"))?;
    let devices = RehearsalDevices::create(&spec, dir)?;
    jail::enter_as_builder(&spec, dir, devices.files())?;
    let ends = std::thread::Builder::new().name("input".into());
    let watch = nacelle_jail::spawn(ThreadKind::Warden, ends, exit_with_input);
    watch.map_err(|source| PodError::Thread { what: "watch the standard input", source })?;
    let runtime = process::runtime()?;

    let engine = KvmEngine::new();
    let vm = engine.start_template(machine_spec(&spec, dir).check(&engine.limits())?)?;
    greet(&runtime, &*vm, &spec)?;
    pausable(&*vm)?.pause()?;
    let saver = vm.as_snapshottable().ok_or(EngineError::Ended { what: "save" })?;
    let saved = saver.save(&files).map_err(PodError::from);
    let saved = saved.and_then(|()| fill_holes(&files).map_err(snapshot_error("complete")));
    if saved.is_err() {
        // In a file system that is full, the log would have no room to say so. What fails here changes nothing.
        let _ = files.memory.set_len(0);
    }
    saved?;
    vm.stop(StopMode::Kill)?;
    drop(vm);

    let saved = files.try_clone().and_then(read_snapshot).map_err(snapshot_error("read"))?;
    rehearse(&engine, &runtime, &spec, dir, devices, &files, saved)
}

fn snapshot_error(what: &'static str) -> impl FnOnce(SnapshotError) -> PodError {
    move |source| EngineError::Snapshot { what, source }.into()
}

pub(super) fn pausable(vm: &dyn Machine) -> Result<&dyn Pausable, EngineError> {
    vm.as_pausable().ok_or(EngineError::Ended { what: "pause" })
}

/// Returns the specification of the VM: what every pod has, and nothing else.
pub(super) fn machine_spec(spec: &TemplateSpec, dir: &Path) -> MachineSpec {
    let shape = &spec.shape;
    MachineSpec {
        vcpus: u8::try_from(shape.max_vcpus).unwrap_or(u8::MAX),
        topology: None,
        cpu_model: None,
        memory_mib: shape.memory_mib,
        hotplug_mib: 0,
        memory_pages: MemoryPages::Transparent,
        console: shape.console,
        kernel: shape.kernel.clone(),
        initrd: shape.initrd.clone(),
        cmdline: kernel_args(&shape.kernel_args, shape.vcpus, shape.max_vcpus),
        disks: Vec::new(),
        nics: Vec::new(),
        run_dir: jail_dir(dir),
        console_log: CONSOLE_FILE.in_jail(&jail_dir(dir)),
        guest_cid: GUEST_CID,
        shares: Vec::new(),
    }
}

/// Waits for the hello of the VM's agent, which then waits for its configuration.
fn greet(runtime: &Runtime, vm: &dyn Machine, spec: &TemplateSpec) -> Result<(), PodError> {
    let listening = vm.link().listen(agent::BOOT_PORT);
    let incoming = listening.map_err(|source| PodError::Link { what: "listen for the guest's agent", source })?;
    let greeted = runtime.block_on(accept_hello(incoming, spec.boot()));
    match greeted {
        Ok(_hello) => Ok(()),
        // How the VM has ended explains more than the missing hello.
        Err(error) => match vm.wait(std::time::Duration::ZERO) {
            Some(exit) => Err(PodError::Died { why: crate::guest_values::describe_exit(&exit) }),
            None => Err(error),
        },
    }
}

/// Ends this process when its standard input ends.
fn exit_with_input() {
    let mut byte = [0];
    while matches!(retry_interrupted(|| nix::unistd::read(std::io::stdin(), &mut byte)), Ok(1)) {}
    tracing::warn!("the daemon has ended or gave up, so the template is not built");
    std::process::exit(1);
}
