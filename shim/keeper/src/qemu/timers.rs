//! Builds QEMU's arguments for the clock and the timers of a VM (QEMU's manual, "-rtc", and the machine properties). The
//! functions are pure.

use super::{Opt, QemuArgs};
use nacelle_engine::Accelerator;
use nacelle_model::machine::Clock;

/// Sets the timers of a board.
pub(super) fn set_board_timers(board: Opt, clock: &Clock) -> Opt {
    let on_off = |is_on: bool| if is_on { "on" } else { "off" };
    board.set_if("hpet", clock.hpet.map(on_off)).set_if("pit", clock.pit.map(on_off))
}

/// Adds the policy for missed ticks, and the base of the real-time clock.
pub(super) fn add_timers(args: &mut QemuArgs, clock: &Clock, accelerator: Accelerator) {
    let rtc = Opt::new("base=utc").set_if("driftfix", clock.rtc_catches_up.then_some("slew"));
    args.add("rtc", rtc.set_if("clock", clock.rtc_is_guests.then_some("vm")));
    if let (Some(discards), Accelerator::Kvm) = (clock.pit_discards, accelerator) {
        let policy = if discards { "discard" } else { "delay" };
        args.add("global", Opt::new(format!("kvm-pit.lost_tick_policy={policy}")));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(clock: &Clock, accelerator: Accelerator) -> Vec<String> {
        let mut args = QemuArgs { words: Vec::new(), free_slots: None };
        add_timers(&mut args, clock, accelerator);
        args.words.push(set_board_timers(Opt::new("q35"), clock).0);
        args.words
    }

    #[test]
    fn unset_timers_keep_qemus_defaults() {
        assert_eq!(values(&Clock::default(), Accelerator::Kvm), ["-rtc", "base=utc", "q35"]);
        let all = Clock {
            hpet: Some(false),
            pit: Some(true),
            pit_discards: Some(true),
            rtc_catches_up: true,
            rtc_is_guests: true,
            no_kvm_clock: true,
        };
        let rtc = ["-rtc", "base=utc,driftfix=slew,clock=vm"];
        let pit = ["-global", "kvm-pit.lost_tick_policy=discard"];
        assert_eq!(values(&all, Accelerator::Kvm), [&rtc[..], &pit, &["q35,hpet=off,pit=on"]].concat());
        assert_eq!(values(&all, Accelerator::Tcg), [&rtc[..], &["q35,hpet=off,pit=on"]].concat());
    }
}
