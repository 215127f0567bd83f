//! Runs the contract tests on the fake engine, and tests its scripted failures.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use nacelle_engine::contract::{TestedEngine, lock_suite};
use nacelle_engine::fake::{FailureScript, FakeEngine, GuestHandle};
use nacelle_engine::{Engine, EngineError, ExitKind, LinkError, MachineSpec, StopMode};

const LONG: Duration = Duration::from_secs(60);

/// Implements the guest of the contract tests without a kernel.
fn contract_guest(guest: GuestHandle) -> ExitKind {
    if guest.listen(1025).is_err() {
        return ExitKind::Killed;
    }
    let Ok(mut hello) = guest.connect(1024).map(|stream| stream.try_clone().unwrap()) else {
        return ExitKind::Panicked;
    };
    hello.write_all(b"hello\n").unwrap();
    drop(hello);
    while let Ok(stream) = guest.accept(1025) {
        let guest = guest.clone();
        thread::spawn(move || serve(&guest, &stream));
    }
    ExitKind::Killed
}

fn serve(guest: &GuestHandle, stream: &UnixStream) -> Option<()> {
    let (mut line, mut byte, mut out) = (Vec::new(), [0], stream);
    while out.read(&mut byte).ok()? == 1 && byte != *b"\n" {
        line.extend(byte);
    }
    let line = String::from_utf8(line).ok()?;
    let words: Vec<&str> = line.split(' ').collect();
    let answer = match words[..] {
        ["echo"] => {
            let mut buffer = [0; 4096];
            loop {
                match out.read(&mut buffer).ok()? {
                    0 => return Some(()),
                    count => out.write_all(&buffer[..count]).ok()?,
                }
            }
        }
        ["cpus"] => guest.vcpus.to_string(),
        ["memory"] => guest.memory_mib.to_string(),
        ["size", disk] => guest.disks.get(disk.parse::<usize>().ok()?)?.capacity().to_string(),
        ["call", port] => match guest.connect(port.parse().ok()?) {
            Ok(host) => (&*host).write_all(b"called\n").map_or("errno 32".into(), |()| "ok".into()),
            Err(_) => "errno 104".into(),
        },
        ["poweroff"] => {
            guest.end(ExitKind::Shutdown);
            return Some(());
        }
        ["panic"] => {
            guest.print("contract: about to panic\nKernel panic - not syncing: Attempted to kill init!\n");
            guest.end(ExitKind::Panicked);
            return Some(());
        }
        _ => "what?".into(),
    };
    out.write_all(format!("{answer}\n").as_bytes()).ok()
}

struct TestedFake {
    /// The running guests, so that the test can lose a machine.
    guests: Arc<Mutex<Vec<GuestHandle>>>,
}

impl TestedEngine for TestedFake {
    fn engine(&self) -> Box<dyn Engine> {
        let guests = Arc::clone(&self.guests);
        Box::new(FakeEngine::new(move |guest: GuestHandle| {
            guests.lock().unwrap().push(guest.clone());
            let how = contract_guest(guest);
            guests.lock().unwrap().clear();
            how
        }))
    }

    fn kernel(&self) -> PathBuf {
        "/nowhere/vmlinux".into()
    }

    fn initrd(&self) -> PathBuf {
        "/nowhere/initrd".into()
    }

    fn kill_from_outside(&self, _run_dir: &Path) -> bool {
        let guest = self.guests.lock().unwrap().pop().unwrap();
        guest.end(ExitKind::Died { code: None, signal: Some(9), message: "an accident".into() });
        true
    }

    fn reads_disks(&self) -> bool {
        false
    }
}

fn tested() -> Option<Box<dyn TestedEngine>> {
    Some(Box::new(TestedFake { guests: Arc::default() }))
}

nacelle_engine::contract_tests!(tested);

fn start(fake: &FakeEngine, directory: &Path) -> Result<Box<dyn nacelle_engine::Machine>, EngineError> {
    let spec = MachineSpec {
        vcpus: 1,
        topology: None,
        cpu_model: None,
        memory_mib: 64,
        hotplug_mib: 0,
        memory_pages: Default::default(),
        console: Default::default(),
        kernel: "/nowhere/vmlinux".into(),
        initrd: "/nowhere/initrd".into(),
        cmdline: vec![],
        disks: vec![],
        nics: vec![],
        run_dir: directory.to_owned(),
        console_log: directory.join("console.log"),
        guest_cid: 3,
        shares: Vec::new(),
    };
    fake.start(spec.check(&fake.limits()).unwrap())
}

#[test]
fn scripted_failures_happen() {
    let _suite_lock = lock_suite();
    let directory = tempfile::tempdir().unwrap();
    let patient = |guest: GuestHandle| {
        guest.listen(7).unwrap();
        while guest.accept(7).is_ok() {}
        ExitKind::Killed
    };
    let fake = FakeEngine::new(patient).with_script(FailureScript { fail_start: true, ..FailureScript::default() });
    assert!(matches!(start(&fake, directory.path()), Err(EngineError::Scripted)));

    let dies = FailureScript { die_after: Some(Duration::from_millis(1)), ..FailureScript::default() };
    let machine = start(&FakeEngine::new(patient).with_script(dies), directory.path()).unwrap();
    assert!(matches!(machine.wait(LONG).unwrap().how, ExitKind::Died { .. }));

    let refuses = FailureScript { refuse_connections: true, ..FailureScript::default() };
    let machine = start(&FakeEngine::new(patient).with_script(refuses), directory.path()).unwrap();
    assert!(matches!(machine.link().connect(7, LONG), Err(LinkError::Refused { port: 7 })));
    assert_eq!(machine.stop(StopMode::Kill).unwrap().how, ExitKind::Killed);
}

#[test]
fn the_guest_function_determines_the_exit() {
    let _suite_lock = lock_suite();
    let directory = tempfile::tempdir().unwrap();
    let machine = start(
        &FakeEngine::new(|guest: GuestHandle| {
            guest.print("bye\n");
            ExitKind::Shutdown
        }),
        directory.path(),
    );
    let exit = machine.unwrap().wait(LONG).unwrap();
    assert_eq!((exit.how, exit.console_tail.as_str()), (ExitKind::Shutdown, "bye"));
}
