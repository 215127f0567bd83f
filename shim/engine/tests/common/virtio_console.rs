//! Tests a guest whose console is a virtio device.

use std::io::Write;

use nacelle_base::machine::ConsoleKind;
use nacelle_engine::ExitKind;
use nacelle_engine::contract::{Bench, World, turn};

use super::LONG;

/// The kernel's early messages come over the serial port and the later ones, including a panic's, over the device: all are
/// in one log, in order, and none twice.
pub fn a_console_on_virtio_has_all_words_in_order(world: Option<Box<impl World>>) {
    let _turn = turn();
    let Some(world) = world else { return };
    let bench = Bench::start(&*world, vec![], |spec| {
        spec.console = ConsoleKind::Virtio;
        spec.cmdline.push("loglevel=6".into()); // includes notices
    });
    bench.connect().write_all(b"panic\n").unwrap();
    let exit = bench.machine.wait(LONG).unwrap();
    assert_eq!(exit.how, ExitKind::Panicked, "{exit:?}");
    assert!(exit.console_tail.contains("Attempted to kill init!"), "{}", exit.console_tail);
    let log = std::fs::read_to_string(bench.directory.path().join("console.log")).unwrap();
    let words = ["Kernel command line:", "contract: about to panic", "Attempted to kill init!"];
    let places = words.map(|words| log.match_indices(words).map(|(at, _)| at).collect::<Vec<_>>());
    assert!(places.iter().all(|places| !places.is_empty()) && places.is_sorted(), "{log}");
    assert!(places[0].len() == 1 && places[1].len() == 1, "twice: {log}");
}
