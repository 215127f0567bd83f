//! Builds QEMU's arguments for the clock and the timers of a VM (QEMU's manual, "-rtc", and the machine properties). The
//! functions are pure.

use super::{Args, Opt};
use nacelle_engine::Accelerator;
use nacelle_model::machine::Clock;

/// Sets the timers of a board.
pub(super) fn board(board: Opt, clock: &Clock) -> Opt {
    let word = |there: bool| if there { "on" } else { "off" };
    board.set_if("hpet", clock.hpet.map(word)).set_if("pit", clock.pit.map(word))
}

/// Adds the policy for missed ticks, and the base of the real-time clock.
pub(super) fn timers(args: &mut Args, clock: &Clock, accelerator: Accelerator) {
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

    fn told(clock: &Clock, accelerator: Accelerator) -> Vec<String> {
        let mut args = Args { words: Vec::new(), places: None };
        timers(&mut args, clock, accelerator);
        args.words.push(board(Opt::new("q35"), clock).0);
        args.words
    }

    #[test]
    fn what_is_not_said_is_as_qemu_has_it() {
        assert_eq!(told(&Clock::default(), Accelerator::Kvm), ["-rtc", "base=utc", "q35"]);
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
        assert_eq!(told(&all, Accelerator::Kvm), [&rtc[..], &pit, &["q35,hpet=off,pit=on"]].concat());
        assert_eq!(told(&all, Accelerator::Tcg), [&rtc[..], &["q35,hpet=off,pit=on"]].concat());
    }
}
