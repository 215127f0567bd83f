//! Defines the contract of all engines, as one test function for each behaviour; tests run them on each engine with
//! [`contract_tests!`](crate::contract_tests). The functions use only the traits and know no particular engine.
//!
//! The guest under test connects to the host's port 1024 and sends `hello`, then serves port 1025. Each connection has one
//! line with a command, then the answer, then the end of the stream.
//!
//! | command | answer |
//! |---|---|
//! | `echo` | all further bytes, until the end |
//! | `cpus`, `memory` | number of vCPUs, MiB |
//! | `size DISK`, `serial DISK` | bytes, text |
//! | `sum DISK AT LENGTH` | FNV-1a (64 bits, hexadecimal) of these bytes |
//! | `fill DISK AT BYTE LENGTH` | `ok` or `errno N` |
//! | `call PORT` | `ok` after sending `called` to that port of the host, or `errno N` |
//! | `random` | 16 bytes of getrandom, hexadecimal |
//! | `nap MS` | milliseconds since the boot, after sleeping so long |
//! | `connections` | number of connections to its port, including this one |
//! | `hwrng` | 16 bytes of the entropy device, hexadecimal |
//! | `poweroff`, `panic` | none |

mod bench;
mod cases;
mod snapshots;

pub use bench::{Bench, World, fnv, spec, turn};
pub use cases::*;
pub use snapshots::*;

/// Defines a `#[test]` for each behaviour. The argument is a function that returns the `World`, or `None` after it has
/// printed `skipped: why`. The tests run one at a time, because they count leaked resources.
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
