//! Defines the contract tests of saving and restoring VMs, for engines that support it.

use std::fs;
use std::path::Path;
use std::thread;

use nacelle_base::machine::{Extent, ImageDisk};
use nacelle_base::{Classify, Kind};

use super::bench::{Belongings, Bench, LONG, World, eventually, fnv, read_all, tell};
use crate::DiskSpec;
use crate::machine::{ExitKind, MachineStatus, Stop};

const MIB: u64 = 1 << 20;
const CONTENT: [u8; 4096] = [0x5a; 4096];

/// Returns an image disk and a disk that is this file.
fn disks(file: &Path) -> Vec<DiskSpec> {
    let file = DiskSpec::File { path: file.to_owned(), read_only: false, serial: "scratch".into() };
    vec![DiskSpec::Growing { serial: "images".into() }, file]
}

fn image(directory: &Path) -> ImageDisk {
    let path = directory.join("layer");
    fs::write(&path, CONTENT).expect("a file");
    ImageDisk { extents: vec![Extent { path, offset: 0, length: CONTENT.len() as u64 }] }
}

fn millis(bench: &Bench) -> u64 {
    bench.ask("nap 20").parse().expect("milliseconds")
}

/// A VM continues after it was saved, and so do several that are restored from it at the same time: each has the saved
/// vCPUs, memory and disks, reset connections and an open port, continuing time, and random numbers of its own.
pub fn saved_machines_go_on(world: &dyn World) {
    if world.engine().as_restorer().is_none() {
        return println!("skipped: this engine saves nothing");
    }
    for vcpus in [1, 2, 4] {
        let files = tempfile::tempdir().expect("a directory for disks and snapshot");
        let (scratch, dir) = (files.path().join("scratch"), files.path().join("snapshot"));
        fs::File::create(&scratch).and_then(|file| file.set_len(2 * MIB)).expect("a disk");
        let bench = Bench::start(world, disks(&scratch), |spec| spec.vcpus = vcpus);
        bench.machine.disks()[0].place(MIB, &image(files.path())).expect("to place");
        bench.ask_until("size 0", &(2 * MIB).to_string());
        assert_eq!(bench.ask(&format!("fill 1 {MIB} 7 4096")), "ok");
        let open = bench.connect();
        tell(&open, "echo");
        bench.ask_until("connections", "2");
        let time = millis(&bench);

        let saved = bench.machine.as_snapshottable().expect("a machine that can be saved");
        let running = saved.save(&dir).expect_err("a machine that runs cannot be saved");
        assert_eq!(running.kind(), Kind::Conflict, "{running}");
        assert!(!dir.exists());
        let pausable = bench.machine.as_pausable().expect("a machine that can stand still");
        pausable.pause().expect("to pause");
        saved.save(&dir).expect("to save");
        let twice = saved.save(&dir).expect_err("there is a snapshot already");
        assert_eq!(twice.kind(), Kind::AlreadyExists, "{twice}");
        assert_eq!(bench.machine.status(), MachineStatus::Paused);

        let clones: Vec<_> = ["one", "two"]
            .map(|name| {
                let copy = files.path().join(name);
                fs::copy(&scratch, &copy).expect("a copy of the disk");
                Bench::restore(world, &dir, disks(&copy), vcpus).expect("to restore")
            })
            .into();
        for clone in &clones {
            assert_eq!(clone.machine.status(), MachineStatus::Paused);
            clone.machine.disks()[0].place(MIB, &image(files.path())).expect("to place again");
            clone.machine.as_pausable().expect("to stand still").resume().expect("to resume");
        }
        pausable.resume().expect("to resume");
        let all = || clones.iter().chain([&bench]);
        let drawn: Vec<_> = thread::scope(|scope| {
            let asked: Vec<_> = all().map(|bench| scope.spawn(|| bench.ask("random"))).collect();
            asked.into_iter().map(|asked| asked.join().expect("an answer")).collect()
        });
        assert!(drawn[0] != drawn[1] && drawn[0] != drawn[2] && drawn[1] != drawn[2], "{drawn:?}");
        for bench in all() {
            assert_eq!(bench.ask("cpus"), vcpus.to_string());
            assert_eq!(bench.ask(&format!("sum 0 {MIB} 4096")), format!("{:016x}", fnv(&CONTENT)));
            assert_eq!(bench.ask(&format!("sum 1 {MIB} 4096")), format!("{:016x}", fnv(&[7; 4096])));
            assert!(millis(bench) >= time, "time never goes back");
            let incoming = bench.link.listen(3000).expect("a port");
            assert_eq!(bench.ask("call 3000"), "ok");
            assert_eq!(read_all(&incoming.accept(LONG).expect("a call")), b"called\n");
        }
        // Connections of the saved VM continue; the restored VMs see theirs as closed.
        clones.iter().for_each(|clone| clone.ask_until("connections", "1"));
        assert_eq!(bench.ask("connections"), "2");
        drop(open);
        bench.ask_until("connections", "1");

        // The disks and the memory of the restored VMs are independent.
        assert_eq!(clones[0].ask(&format!("fill 1 {MIB} 9 4096")), "ok");
        assert_eq!(clones[1].ask(&format!("sum 1 {MIB} 4096")), format!("{:016x}", fnv(&[7; 4096])));
        tell(&clones[0].connect(), "poweroff");
        let exit = clones[0].machine.stop(Stop::Shutdown { grace: LONG }).expect("to stop");
        assert_eq!(exit.how, ExitKind::Shutdown, "{exit:?}");
        assert_eq!(clones[1].ask("cpus"), vcpus.to_string());
    }
}

/// A directory without a snapshot, and a VM of another shape, are rejected without a leak; a VM of the same shape can be
/// restored, and saved again.
pub fn what_was_not_saved_is_not_restored(world: &dyn World) {
    if world.engine().as_restorer().is_none() {
        return println!("skipped: this engine saves nothing");
    }
    let files = tempfile::tempdir().expect("a directory for disks and snapshot");
    let (scratch, dir) = (files.path().join("scratch"), files.path().join("snapshot"));
    fs::File::create(&scratch).and_then(|file| file.set_len(MIB)).expect("a disk");
    let bench = Bench::start(world, disks(&scratch), |_| ());
    bench.machine.as_pausable().expect("to stand still").pause().expect("to pause");
    bench.machine.as_snapshottable().expect("to be saved").save(&dir).expect("to save");
    drop(bench);

    let before = Belongings::count().expect("to count");
    let refused = |what: &str, from: &Path, disks: Vec<DiskSpec>, vcpus: u8, kind: Kind| {
        let error = Bench::restore(world, from, disks, vcpus).err().unwrap_or_else(|| panic!("{what} is restored"));
        assert_eq!(error.kind(), kind, "{what}: {}", nacelle_base::Chain(&error));
    };
    refused("nothing", files.path(), disks(&scratch), 1, Kind::NotFound);
    refused("two processors of one", &dir, disks(&scratch), 2, Kind::Invalid);
    refused("fewer disks", &dir, disks(&scratch).split_off(1), 1, Kind::Invalid);
    refused("other disks", &dir, disks(&scratch).into_iter().rev().collect(), 1, Kind::Invalid);
    let state = fs::read(dir.join("state")).expect("the state");
    fs::write(dir.join("state"), &state[..state.len() / 2]).expect("half a state");
    refused("half a state", &dir, disks(&scratch), 1, Kind::Invalid);
    fs::write(dir.join("state"), &state).expect("the state");
    before.eventually_again();

    let one = Bench::restore(world, &dir, disks(&scratch), 1).expect("to restore");
    one.machine.as_snapshottable().expect("to be saved").save(&files.path().join("again")).expect("to save");
    drop(one);
    let two = Bench::restore(world, &files.path().join("again"), disks(&scratch), 1).expect("to restore");
    two.machine.as_pausable().expect("to stand still").resume().expect("to resume");
    eventually("the guest", || two.ask("cpus") == "1");
    drop(two);
    before.eventually_again();
}
