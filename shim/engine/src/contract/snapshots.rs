//! Defines the contract tests of saving and restoring VMs, for engines that support it.

use std::collections::{BTreeSet, VecDeque};
use std::fs;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::thread;

use nacelle_base::machine::{Extent, ImageDisk};
use nacelle_base::{Classify, FailureKind};
use nacelle_vmm::block::{DiskCopy, PreparedCopy};

use super::test_vm::{LONG, ProcessResources, TestVm, TestedEngine, eventually, fnv1a, read_all, send_command};
use crate::machine::{ExitKind, Machine, MachineStatus, PauseSteps, StepFailed, StopMode};
use crate::{
    DiskSpec, EngineError, MachineSpec, PageTracker, STATE_FILE, SnapshotDirectory, SnapshotFiles, read_snapshot,
};

const MIB: u64 = 1 << 20;
const CONTENT: [u8; 4096] = [0x5a; 4096];

/// Returns an image disk and a disk that is this file.
fn disks(file: &Path) -> Vec<DiskSpec> {
    let file = DiskSpec::File { path: file.to_owned(), read_only: false, serial: "scratch".into() };
    vec![DiskSpec::Images { serial: "images".into() }, file]
}

fn image(directory: &Path) -> ImageDisk {
    let path = directory.join("layer");
    fs::write(&path, CONTENT).expect("a file");
    ImageDisk { extents: vec![Extent { path, offset: 0, length: CONTENT.len() as u64 }] }
}

fn millis(vm: &TestVm) -> u64 {
    vm.query("nap 20").parse().expect("milliseconds")
}

/// A VM continues after it was saved, and so do several that are restored from it at the same time: each has the saved
/// vCPUs, memory and disks, reset connections and an open port, continuing time, and random numbers of its own.
pub fn saved_vms_continue(tested: &dyn TestedEngine) {
    if tested.engine().as_restorer().is_none() {
        return println!("skipped: this engine saves nothing");
    }
    for vcpus in [1, 2, 4] {
        let files = tempfile::tempdir().expect("a directory for disks and snapshot");
        let (scratch, dir) = (files.path().join("scratch"), files.path().join("snapshot"));
        fs::File::create(&scratch).and_then(|file| file.set_len(2 * MIB)).expect("a disk");
        let vm = TestVm::start(tested, disks(&scratch), |spec| spec.vcpus = vcpus);
        vm.machine.disks()[0].place(MIB, &image(files.path())).expect("to place");
        vm.query_until("size 0", &(2 * MIB).to_string());
        assert_eq!(vm.query(&format!("fill 1 {MIB} 7 4096")), "ok");
        let open = vm.connect();
        send_command(&open, "echo");
        vm.query_until("connections", "2");
        let time = millis(&vm);

        let running = vm.save(&dir).expect_err("a machine that runs cannot be saved");
        assert_eq!(running.kind(), FailureKind::Conflict, "{running}");
        assert!(!dir.exists());
        let pausable = vm.machine.as_pausable().expect("a pausable machine");
        pausable.pause().expect("to pause");
        vm.save(&dir).expect("to save");
        let twice = vm.save(&dir).expect_err("there is a snapshot already");
        assert_eq!(twice.kind(), FailureKind::AlreadyExists, "{twice}");
        assert_eq!(vm.machine.status(), MachineStatus::Paused);

        let clones: Vec<_> = ["one", "two"]
            .map(|name| {
                let copy = files.path().join(name);
                fs::copy(&scratch, &copy).expect("a copy of the disk");
                TestVm::restore(tested, &dir, disks(&copy), vcpus).expect("to restore")
            })
            .into();
        for clone in &clones {
            assert_eq!(clone.machine.status(), MachineStatus::Paused);
            clone.machine.disks()[0].place(MIB, &image(files.path())).expect("to place again");
            clone.machine.as_pausable().expect("a pausable machine").resume().expect("to resume");
        }
        pausable.resume().expect("to resume");
        let all = || clones.iter().chain([&vm]);
        let drawn: Vec<_> = thread::scope(|scope| {
            let asked: Vec<_> = all().map(|vm| scope.spawn(|| vm.query("random"))).collect();
            asked.into_iter().map(|asked| asked.join().expect("an answer")).collect()
        });
        assert!(drawn[0] != drawn[1] && drawn[0] != drawn[2] && drawn[1] != drawn[2], "{drawn:?}");
        for vm in all() {
            assert_eq!(vm.query("cpus"), vcpus.to_string());
            assert_eq!(vm.query(&format!("sum 0 {MIB} 4096")), format!("{:016x}", fnv1a(&CONTENT)));
            assert_eq!(vm.query(&format!("sum 1 {MIB} 4096")), format!("{:016x}", fnv1a(&[7; 4096])));
            assert!(millis(vm) >= time, "time never goes back");
            let incoming = vm.link.listen(3000).expect("a port");
            assert_eq!(vm.query("call 3000"), "ok");
            assert_eq!(read_all(&incoming.accept(LONG).expect("a call")), b"called\n");
        }
        // Connections of the saved VM continue; the restored VMs see theirs as closed.
        clones.iter().for_each(|clone| clone.query_until("connections", "1"));
        assert_eq!(vm.query("connections"), "2");
        drop(open);
        vm.query_until("connections", "1");

        // The disks and the memory of the restored VMs are independent.
        assert_eq!(clones[0].query(&format!("fill 1 {MIB} 9 4096")), "ok");
        assert_eq!(clones[1].query(&format!("sum 1 {MIB} 4096")), format!("{:016x}", fnv1a(&[7; 4096])));
        send_command(&clones[0].connect(), "poweroff");
        let exit = clones[0].machine.stop(StopMode::Shutdown { grace: LONG }).expect("to stop");
        assert_eq!(exit.how, ExitKind::Shutdown, "{exit:?}");
        assert_eq!(clones[1].query("cpus"), vcpus.to_string());
    }
}

/// The pages in which the guest counts while it is saved: 8 MiB.
const COUNTED_PAGES: usize = 2048;

/// The copy of a disk that belongs to a saved VM.
enum DiskState {
    Prepared(PreparedCopy),
    Begun(DiskCopy),
}

/// Copies a disk, and records which steps are taken.
struct CopySteps<'a> {
    machine: &'a dyn Machine,
    /// The step that fails.
    fails: Option<&'static str>,
    taken: Vec<&'static str>,
    disk: Option<DiskState>,
}

impl CopySteps<'_> {
    fn take(&mut self, step: &'static str, status: MachineStatus) -> Result<(), StepFailed> {
        assert_eq!(self.machine.status(), status, "{step}");
        self.taken.push(step);
        if self.fails == Some(step) { Err(StepFailed) } else { Ok(()) }
    }
}

impl PauseSteps for CopySteps<'_> {
    fn before_pause(&mut self) -> Result<(), StepFailed> {
        self.take("before", MachineStatus::Running)
    }

    fn while_paused(&mut self) -> Result<(), StepFailed> {
        if let Some(DiskState::Prepared(prepared)) = self.disk.take() {
            self.disk = Some(DiskState::Begun(prepared.begin().expect("to begin the copy of the disk")));
        }
        self.take("paused", MachineStatus::Paused)
    }

    fn after_pause(&mut self) {
        self.take("after", MachineStatus::Running).expect("no step that fails");
    }
}

/// A VM that runs is saved at one moment, whatever it writes meanwhile: a booted one, and a clone of a template. It runs on,
/// also if saving fails, and so do VMs that are restored from it; their memory and disks are those of that moment.
pub fn running_vms_are_saved(tested: &dyn TestedEngine) {
    if tested.engine().as_restorer().is_none() {
        return println!("skipped: this engine saves nothing");
    }
    let tracker = PageTracker::open().expect("/proc is mounted");
    let in_node = std::env::var_os("NODE_ENDED").is_some();
    assert!(tracker.tracks_writes() || !in_node, "the test node's kernel can");
    for (vcpus, cloned) in [(1, false), (2, true)] {
        let files = tempfile::tempdir().expect("a directory for disks and snapshots");
        let [scratch, template, copy, saved] =
            ["scratch", "template", "copy", "saved"].map(|name| files.path().join(name));
        fs::File::create(&scratch).and_then(|file| file.set_len(2 * MIB)).expect("a disk");
        // A part of the clone's memory has no file behind it.
        let with_hotplug = |spec: &mut MachineSpec| {
            spec.vcpus = vcpus;
            spec.hotplug_mib = if cloned { 128 } else { 0 };
        };
        let vm = if cloned {
            let original = TestVm::start_template(tested, |spec| spec.vcpus = vcpus);
            original.machine.as_pausable().expect("a pausable machine").pause().expect("to pause");
            original.save(&template).expect("to save");
            drop(original);
            let vm = TestVm::restore_with(tested, &template, disks(&scratch), with_hotplug).expect("to restore");
            vm.machine.as_pausable().expect("a pausable machine").resume().expect("to resume");
            assert!(vm.query("bind").starts_with("2 "));
            vm
        } else {
            TestVm::start(tested, disks(&scratch), |spec| spec.vcpus = vcpus)
        };
        assert_eq!(vm.query(&format!("count {COUNTED_PAGES}")), "ok");
        let rounds = |vm: &TestVm| {
            let answer = vm.query("counted");
            let (rounds, errors) = answer.split_once(' ').expect("two numbers");
            assert_eq!(errors, "0", "a page was not that of the moment");
            rounds.parse::<u64>().expect("a number")
        };
        let counts_on = |vm: &TestVm| {
            let from = rounds(vm) + 2;
            eventually("the guest counts on", || rounds(vm) >= from);
        };
        counts_on(&vm);
        let save = |stop: bool, steps: &mut dyn PauseSteps| {
            let directory = SnapshotDirectory::create(&saved).expect("a directory");
            let snapshottable = vm.machine.as_snapshottable().expect("a machine that can be saved");
            let report = snapshottable.save_running(directory.files(), &tracker, &AtomicBool::new(stop), steps)?;
            directory.commit().expect("to save");
            Ok::<_, EngineError>(report)
        };
        let pausable = vm.machine.as_pausable().expect("a pausable machine");
        pausable.pause().expect("to pause");
        let steps =
            |fails: Option<&'static str>| CopySteps { machine: &*vm.machine, fails, taken: Vec::new(), disk: None };
        let target = || fs::File::options().read(true).write(true).create(true).truncate(true).open(&copy);
        let mut refused_steps = steps(None);
        let refused = save(false, &mut refused_steps).expect_err("it is paused");
        assert_eq!((refused.kind(), vm.machine.status()), (FailureKind::Conflict, MachineStatus::Paused), "{refused}");
        assert!(refused_steps.taken.is_empty());
        pausable.resume().expect("to resume");
        let all = ["before", "paused", "after"];
        for (stop, fails, taken) in
            [(true, None, &all[..0]), (false, Some("before"), &["before", "after"]), (false, Some("paused"), &all)]
        {
            let mut failing = steps(fails);
            let error = save(stop, &mut failing).expect_err("it was stopped, or a step failed");
            println!("{}", nacelle_base::Chain(&error));
            assert_eq!((vm.machine.status(), &failing.taken[..]), (MachineStatus::Running, taken));
            assert!(!saved.exists());
            counts_on(&vm);
        }

        assert_eq!(vm.query(&format!("fill 1 {MIB} 7 4096")), "ok");
        let before = rounds(&vm);
        let prepared =
            vm.machine.disks()[1].prepare_copy(target().expect("a file")).expect("a disk that can be copied");
        let mut steps = CopySteps { disk: Some(DiskState::Prepared(prepared)), ..steps(None) };
        let report = save(false, &mut steps).expect("to save");
        assert_eq!(steps.taken, all);
        println!("{vcpus} vCPUs, a clone: {cloned}: {report:?}");
        assert!(report.pages.private as usize >= COUNTED_PAGES);
        assert!(
            !tracker.tracks_writes() || report.pages.paused < report.pages.private,
            "what did not change is copied once"
        );
        assert_eq!(vm.query(&format!("fill 1 {MIB} 8 4096")), "ok");
        match steps.disk.take() {
            Some(DiskState::Begun(copying)) => copying.finish(&AtomicBool::new(false)).expect("to copy the disk"),
            _ => panic!("the copy of the disk has not begun"),
        };
        let clones: Vec<_> = ["one", "two"]
            .map(|name| {
                let own = files.path().join(name);
                fs::copy(&copy, &own).expect("a copy of the disk");
                TestVm::restore_with(tested, &saved, disks(&own), with_hotplug).expect("to restore")
            })
            .into();
        drop(fs::remove_dir_all(&template));
        for clone in &clones {
            clone.machine.as_pausable().expect("a pausable machine").resume().expect("to resume");
        }
        for clone in &clones {
            assert_eq!(clone.query("cpus"), vcpus.to_string());
            assert!(rounds(clone) >= before);
            counts_on(clone);
            assert_eq!(clone.query(&format!("sum 1 {MIB} 4096")), format!("{:016x}", fnv1a(&[7; 4096])));
        }
        counts_on(&vm);
        assert_eq!(vm.query(&format!("sum 1 {MIB} 4096")), format!("{:016x}", fnv1a(&[8; 4096])));

        // Files in which saving has begun hold no snapshot, whatever they had.
        drop(clones);
        let files = SnapshotFiles::open_to_complete(&saved).expect("a snapshot");
        let snapshottable = vm.machine.as_snapshottable().expect("a machine that can be saved");
        let stopped = snapshottable.save_running(&files, &tracker, &AtomicBool::new(true), &mut ());
        stopped.expect_err("it was stopped");
        read_snapshot(files).expect_err("it is no snapshot");
    }
}

/// The number of concurrent clones in a test.
const CLONES: u8 = 20;

/// Clones of a template without disks have disks, each its own, when their guests have bound the driver to them, and may have hot-plug
/// memory, which their kernels do not use by themselves. They continue when the template's files are removed. A VM that was not started as
/// a template has no clones with more devices or memory.
pub fn clones_of_a_template_have_more_devices(tested: &dyn TestedEngine) {
    if tested.engine().as_restorer().is_none() {
        return println!("skipped: this engine saves nothing");
    }
    for (vcpus, number) in [(1, CLONES), (2, 2), (8, 2)] {
        let files = tempfile::tempdir().expect("a directory for disks and template");
        let dir = files.path().join("template");
        let template = TestVm::start_template(tested, |spec| spec.vcpus = vcpus);
        template.machine.as_pausable().expect("a pausable machine").pause().expect("to pause");
        template.save(&dir).expect("to save");
        drop(template);
        let before = ProcessResources::count().expect("to count");
        let recorded = fs::metadata(dir.join(STATE_FILE)).expect("the state").len();
        TestVm::record_working_set(tested, &dir, |spec| spec.vcpus = vcpus);
        assert!(fs::metadata(dir.join(STATE_FILE)).expect("the state").len() > recorded, "it has pages");
        let clones: Vec<_> = (0..number)
            .map(|clone| {
                let scratch = files.path().join(format!("scratch-{clone}"));
                fs::write(&scratch, vec![clone; MIB as usize]).expect("a disk");
                let change = |spec: &mut MachineSpec| {
                    spec.vcpus = vcpus;
                    spec.hotplug_mib = u32::from(clone % 3) * 128;
                };
                TestVm::restore_with(tested, &dir, disks(&scratch), change).expect("to restore")
            })
            .collect();
        fs::remove_dir_all(&dir).expect("to remove the template");
        for clone in &clones {
            clone.machine.as_pausable().expect("a pausable machine").resume().expect("to resume");
        }
        let memory: BTreeSet<String> = clones.iter().map(|clone| clone.query("memory")).collect();
        assert_eq!(memory.len(), 1, "{memory:?}");
        for (clone, content) in clones.iter().zip(0..) {
            assert_eq!(clone.machine.as_memory_hotplug().is_some(), content % 3 > 0);
            assert_eq!(clone.query("size 0"), "errno 2", "no device before it is bound");
            let answer = clone.query("bind");
            assert!(answer.starts_with("2 "), "the guest bound {answer}");
            clone.machine.disks()[0].place(0, &image(files.path())).expect("to place");
            clone.query_until("size 0", &MIB.to_string());
            assert_eq!(clone.query("sum 0 0 4096"), format!("{:016x}", fnv1a(&CONTENT)));
            assert_eq!(clone.query("sum 1 4096 4096"), format!("{:016x}", fnv1a(&[content; 4096])));
            assert_eq!((clone.query("serial 0"), clone.query("serial 1")), ("images".to_owned(), "scratch".to_owned()));
            assert_eq!(clone.query("cpus"), vcpus.to_string());
            assert!(clone.query("bind").starts_with("0 "), "everything is bound");
        }
        drop(clones);
        before.wait_until_restored();
    }

    let files = tempfile::tempdir().expect("a directory for disks and snapshot");
    let (scratch, dir) = (files.path().join("scratch"), files.path().join("snapshot"));
    fs::File::create(&scratch).and_then(|file| file.set_len(MIB)).expect("a disk");
    let vm = TestVm::start(tested, Vec::new(), |_| ());
    vm.machine.as_pausable().expect("a pausable machine").pause().expect("to pause");
    vm.save(&dir).expect("to save");
    let error = TestVm::restore(tested, &dir, disks(&scratch), 1).err().expect("no template is restored as one");
    assert_eq!(error.kind(), FailureKind::Invalid, "{}", nacelle_base::Chain(&error));
    let more_memory = TestVm::restore_with(tested, &dir, Vec::new(), |spec| spec.hotplug_mib = 128);
    let error = more_memory.err().expect("no template is restored as one");
    assert_eq!(error.kind(), FailureKind::Invalid, "{}", nacelle_base::Chain(&error));
    drop(vm);

    // Nor is a clone a template: its guest has bound its devices.
    let [template_dir, clone_dir] = ["template", "clone"].map(|name| files.path().join(name));
    let template = TestVm::start_template(tested, |_| ());
    template.machine.as_pausable().expect("a pausable machine").pause().expect("to pause");
    template.save(&template_dir).expect("to save");
    drop(template);
    let clone = TestVm::restore(tested, &template_dir, disks(&scratch), 1).expect("to restore");
    clone.machine.as_pausable().expect("a pausable machine").resume().expect("to resume");
    assert!(clone.query("bind").starts_with("2 "));
    clone.machine.as_pausable().expect("a pausable machine").pause().expect("to pause");
    clone.save(&clone_dir).expect("to save");
    drop(clone);
    let more = DiskSpec::File { path: scratch.clone(), read_only: true, serial: "more".into() };
    let more_disks = disks(&scratch).into_iter().chain([more]).collect();
    let error = TestVm::restore(tested, &clone_dir, more_disks, 1).err().expect("no clone is restored as a template");
    assert_eq!(error.kind(), FailureKind::Invalid, "{}", nacelle_base::Chain(&error));
    let again = TestVm::restore(tested, &clone_dir, disks(&scratch), 1).expect("to restore");
    again.machine.as_pausable().expect("a pausable machine").resume().expect("to resume");
    assert_eq!(again.query("serial 1"), "scratch");
}

/// The default number of clones that follow each other; the environment variable `NACELLE_CLONES` overrides it.
const CLONES_IN_SEQUENCE: usize = 20;

/// Clones of a template follow each other, of which a tenth are alive at a time, and each answers until its end. Nothing is left of them.
pub fn clones_of_a_template_follow_each_other(tested: &dyn TestedEngine) {
    if tested.engine().as_restorer().is_none() {
        return println!("skipped: this engine saves nothing");
    }
    let count = std::env::var("NACELLE_CLONES").map_or(CLONES_IN_SEQUENCE, |text| text.parse().expect("a number"));
    let files = tempfile::tempdir().expect("a directory for the template");
    let dir = files.path().join("template");
    let template = TestVm::start_template(tested, |_| ());
    template.machine.as_pausable().expect("a pausable machine").pause().expect("to pause");
    template.save(&dir).expect("to save");
    drop(template);
    TestVm::record_working_set(tested, &dir, |_| ());
    let before = ProcessResources::count().expect("to count");
    let mut alive = VecDeque::new();
    for number in 0..count {
        let clone = TestVm::restore(tested, &dir, Vec::new(), 1).unwrap_or_else(|error| panic!("{number}: {error}"));
        clone.machine.as_pausable().expect("a pausable machine").resume().expect("to resume");
        assert_eq!(clone.query("cpus"), "1", "{number}");
        alive.push_back(clone);
        if alive.len() > count / 10 {
            let oldest = alive.pop_front().expect("there is one");
            assert_eq!(oldest.query("cpus"), "1", "{number}");
        }
    }
    drop(alive);
    before.wait_until_restored();
}

/// A directory without a snapshot, and a VM of another shape, are rejected without a leak; a VM of the same shape can be
/// restored, and saved again.
pub fn invalid_snapshots_are_rejected(tested: &dyn TestedEngine) {
    if tested.engine().as_restorer().is_none() {
        return println!("skipped: this engine saves nothing");
    }
    let files = tempfile::tempdir().expect("a directory for disks and snapshot");
    let (scratch, dir) = (files.path().join("scratch"), files.path().join("snapshot"));
    fs::File::create(&scratch).and_then(|file| file.set_len(MIB)).expect("a disk");
    let vm = TestVm::start(tested, disks(&scratch), |_| ());
    vm.machine.as_pausable().expect("a pausable machine").pause().expect("to pause");
    vm.save(&dir).expect("to save");
    drop(vm);

    let before = ProcessResources::count().expect("to count");
    let refused = |what: &str, from: &Path, disks: Vec<DiskSpec>, vcpus: u8, kind: FailureKind| {
        let error = TestVm::restore(tested, from, disks, vcpus).err().unwrap_or_else(|| panic!("{what} is restored"));
        assert_eq!(error.kind(), kind, "{what}: {}", nacelle_base::Chain(&error));
    };
    refused("nothing", files.path(), disks(&scratch), 1, FailureKind::NotFound);
    refused("two vCPUs instead of one", &dir, disks(&scratch), 2, FailureKind::Invalid);
    refused("fewer disks", &dir, disks(&scratch).split_off(1), 1, FailureKind::Invalid);
    refused("other disks", &dir, disks(&scratch).into_iter().rev().collect(), 1, FailureKind::Invalid);
    let state = fs::read(dir.join("state")).expect("the state");
    fs::write(dir.join("state"), &state[..state.len() / 2]).expect("half a state");
    refused("half a state", &dir, disks(&scratch), 1, FailureKind::Invalid);
    fs::write(dir.join("state"), &state).expect("the state");
    before.wait_until_restored();

    let one = TestVm::restore(tested, &dir, disks(&scratch), 1).expect("to restore");
    one.save(&files.path().join("again")).expect("to save");
    drop(one);
    let two = TestVm::restore(tested, &files.path().join("again"), disks(&scratch), 1).expect("to restore");
    two.machine.as_pausable().expect("a pausable machine").resume().expect("to resume");
    eventually("the guest", || two.query("cpus") == "1");
    drop(two);
    before.wait_until_restored();
}
