//! Tests a guest whose console is a virtio device.

use std::io::Write;

use nacelle_base::machine::ConsoleKind;
use nacelle_engine::ExitKind;
use nacelle_engine::contract::{TestVm, TestedEngine, lock_suite};

use super::LONG;

/// The kernel's early messages come over the serial port and the later ones, including a panic's, over the device: all are
/// in one log, in order, and none twice.
pub fn a_virtio_console_logs_all_messages_in_order(tested: Option<Box<impl TestedEngine>>) {
    let _suite_lock = lock_suite();
    let Some(tested) = tested else { return };
    let vm = TestVm::start(&*tested, vec![], |spec| {
        spec.console = ConsoleKind::Virtio;
        spec.cmdline.push("loglevel=6".into()); // includes notices
    });
    vm.connect().write_all(b"panic\n").unwrap();
    let exit = vm.machine.wait(LONG).unwrap();
    assert_eq!(exit.how, ExitKind::Panicked, "{exit:?}");
    assert!(exit.console_tail.contains("Attempted to kill init!"), "{}", exit.console_tail);
    let log = std::fs::read_to_string(vm.directory.path().join("console.log")).unwrap();
    let words = ["Kernel command line:", "contract: about to panic", "Attempted to kill init!"];
    let places = words.map(|words| log.match_indices(words).map(|(at, _)| at).collect::<Vec<_>>());
    assert!(places.iter().all(|places| !places.is_empty()) && places.is_sorted(), "{log}");
    assert!(places[0].len() == 1 && places[1].len() == 1, "twice: {log}");
}
