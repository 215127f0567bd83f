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
//! | `bind` | number of devices that were bound to their driver just now, and the microseconds that it took |
//! | `hwrng` | 16 bytes of the entropy device, hexadecimal |
//! | `poweroff`, `panic` | none |

mod cases;
mod snapshots;
mod test_vm;

pub use cases::*;
pub use snapshots::*;
pub use test_vm::{TestVm, TestedEngine, fnv1a, lock_suite, spec};

/// Defines a `#[test]` for each behaviour. The argument is a function that returns the `TestedEngine`, or `None` after it has
/// printed `skipped: why`. The tests run one at a time, because they count leaked resources.
#[macro_export]
macro_rules! contract_tests {
    ($tested:path) => {
        $crate::contract_tests!(
            $tested:
            a_started_guest_connects_and_has_its_resources, several_vcpus, a_guest_that_powers_off_has_shut_down, a_kernel_panic_is_reported,
            a_kill_is_final, a_guest_without_grace_is_killed, a_vm_killed_from_outside_has_died, an_image_disk_grows_while_the_guest_runs,
            file_disks_appear_in_order, a_hundred_connections_are_independent, a_slow_reader_exerts_back_pressure, ports_without_a_listener_refuse_connections, a_paused_vm_does_nothing,
            two_vms_may_have_the_same_cid, waiting_calls_return_when_the_vm_ends, a_failed_start_leaks_nothing,
            dropping_a_vm_leaks_nothing, saved_vms_continue, running_vms_are_saved, clones_of_a_template_have_more_devices,
            clones_of_a_template_follow_each_other, invalid_snapshots_are_rejected
        );
    };
    ($tested:path: $($case:ident),+) => {
        $(
            #[test]
            fn $case() {
                let _suite_lock = $crate::contract::lock_suite();
                if let Some(tested) = $tested() {
                    $crate::contract::$case(&*tested);
                }
            }
        )+
    };
}
