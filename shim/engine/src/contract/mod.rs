//! Owns: what every engine must show, as one function for each behaviour; tests run them on each engine with
//! [`contract_tests!`](crate::contract_tests).
//! May use: the traits only. Knows no particular engine.
//!
//! The guest under test connects to the host's port 1024 and says `hello`, then serves port 1025: a line with a
//! command, the answer, the end.
//!
//! | command | answer |
//! |---|---|
//! | `echo` | every further byte, until the end |
//! | `cpus`, `memory` | processors, MiB |
//! | `size DISK`, `serial DISK` | bytes, text |
//! | `sum DISK AT LENGTH` | FNV-1a (64 bits, hexadecimal) of these bytes |
//! | `fill DISK AT BYTE LENGTH` | `ok` or `errno N` |
//! | `call PORT` | `ok` after saying `called` to that port of the host, or `errno N` |
//! | `random` | 16 bytes of getrandom, hexadecimal |
//! | `nap MS` | after sleeping so long: milliseconds since the boot |
//! | `connections` | how many there are to its port, this one included |
//! | `hwrng` | 16 bytes of the entropy device, hexadecimal |
//! | `poweroff`, `panic` | none |

mod bench;
mod cases;
mod snapshots;

pub use bench::{Bench, World, fnv, spec, turn};
pub use cases::*;
pub use snapshots::*;

/// Makes a `#[test]` of each behaviour. The argument is a function that returns the world, or `None` after it has
/// printed `skipped: why`. One behaviour at a time: they count what they leave behind.
#[macro_export]
macro_rules! contract_tests {
    ($world:path) => {
        $crate::contract_tests!(
            $world:
            a_guest_says_hello, two_and_four_processors, powering_off_is_a_shutdown, a_panic_is_told,
            a_kill_is_final, no_grace_is_a_kill, a_lost_machine_has_died, disks_grow_while_the_guest_runs,
            files_are_disks, hundred_connections, a_slow_reader_is_waited_for, nobody_listens, a_machine_stands_still,
            two_machines_with_one_address, waiting_ends_with_the_machine, a_bad_start_leaves_nothing,
            dropping_leaves_nothing, saved_machines_go_on, what_was_not_saved_is_not_restored
        );
    };
    ($world:path: $($case:ident),+) => {
        $(
            #[test]
            fn $case() {
                let _turn = $crate::contract::turn();
                if let Some(world) = $world() {
                    $crate::contract::$case(&*world);
                }
            }
        )+
    };
}
