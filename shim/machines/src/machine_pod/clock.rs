//! Converts the clock and the timers of a specification. Pure.

use super::build::{Refused, value};
use nacelle_model::machine::{Board, Clock};
use nacelle_vmi::spec::{Domain, TickPolicy, Track};

/// Returns the clock of a machine with this board.
pub fn clock(domain: &Domain, board: Board) -> Result<Clock, Refused> {
    let Some(said) = &domain.clock else { return Ok(Clock::default()) };
    let at = |field: &str| format!("spec.domain.clock.{field}");
    if let Some(offset) = said.utc.as_ref().and_then(|utc| utc.offset_seconds).filter(|offset| *offset != 0) {
        return value(at("utc.offsetSeconds"), offset, "the clock begins with UTC: leave it out");
    }
    let mut clock = Clock::default();
    let Some(timer) = &said.timer else { return Ok(clock) };
    clock.hpet = timer.hpet.as_ref().and_then(|hpet| hpet.present);
    if board == Board::Microvm && clock.hpet.take() == Some(true) {
        return value(at("timer.hpet.present"), true, "the board microvm has none: q35 and pc have");
    }
    if let Some(pit) = &timer.pit {
        clock.pit = pit.present;
        clock.pit_discards = match pit.tick_policy {
            None => None,
            Some(TickPolicy::Discard) => Some(true),
            Some(TickPolicy::Delay) => Some(false),
            Some(other) => return value(at("timer.pit.tickPolicy"), other.word(), "delay and discard are possible"),
        };
    }
    if let Some(rtc) = &timer.rtc {
        if rtc.present == Some(false) {
            return value(at("timer.rtc.present"), false, "every board has one");
        }
        clock.rtc_catches_up = match rtc.tick_policy {
            None | Some(TickPolicy::Delay) => false,
            Some(TickPolicy::Catchup) => true,
            Some(other) => return value(at("timer.rtc.tickPolicy"), other.word(), "delay and catchup are possible"),
        };
        clock.rtc_is_guests = rtc.track == Some(Track::Guest);
    }
    clock.no_kvm_clock = timer.kvm.as_ref().is_some_and(|kvm| kvm.present == Some(false));
    Ok(clock)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn built(said: Value, board: Board) -> Result<Clock, String> {
        let domain: Domain = serde_json::from_value(json!({ "clock": said })).unwrap();
        clock(&domain, board).map_err(|refused| refused.to_string())
    }

    #[test]
    fn timers_are_as_they_are_said() {
        let said = json!({ "utc": {}, "timer": {
            "hpet": { "present": false }, "pit": { "tickPolicy": "delay" }, "rtc": { "tickPolicy": "catchup", "track": "guest" },
            "kvm": { "present": false },
        } });
        let clock = Clock {
            hpet: Some(false),
            pit_discards: Some(false),
            rtc_catches_up: true,
            rtc_is_guests: true,
            no_kvm_clock: true,
            ..Clock::default()
        };
        assert_eq!(built(said.clone(), Board::Q35), Ok(clock));
        assert_eq!(built(said, Board::Microvm), Ok(Clock { hpet: None, ..clock }));
        assert_eq!(built(json!({}), Board::Pc), Ok(Clock::default()));
        for (said, board, field) in [
            (json!({ "utc": { "offsetSeconds": 3600 } }), Board::Q35, "utc.offsetSeconds"),
            (json!({ "timer": { "hpet": { "present": true } } }), Board::Microvm, "timer.hpet.present"),
            (json!({ "timer": { "pit": { "tickPolicy": "catchup" } } }), Board::Q35, "timer.pit.tickPolicy"),
            (json!({ "timer": { "rtc": { "tickPolicy": "merge" } } }), Board::Q35, "timer.rtc.tickPolicy"),
            (json!({ "timer": { "rtc": { "present": false } } }), Board::Q35, "timer.rtc.present"),
        ] {
            assert!(built(said, board).unwrap_err().contains(&format!("spec.domain.clock.{field}")), "{field}");
        }
    }
}
