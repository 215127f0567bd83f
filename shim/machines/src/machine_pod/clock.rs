//! Converts the clock and the timers of a specification. Pure.

use super::rejection::{SpecRejection, reject_value};
use nacelle_model::machine::{Board, Clock};
use nacelle_vmi::spec::{Domain, TickPolicy, Track};

/// Returns the clock of a machine with this board.
pub fn convert_clock(domain: &Domain, board: Board) -> Result<Clock, SpecRejection> {
    let Some(requested) = &domain.clock else { return Ok(Clock::default()) };
    let path = |field: &str| format!("spec.domain.clock.{field}");
    if let Some(offset) = requested.utc.as_ref().and_then(|utc| utc.offset_seconds).filter(|offset| *offset != 0) {
        return reject_value(path("utc.offsetSeconds"), offset, "the clock starts at UTC: remove the offset");
    }
    let mut clock = Clock::default();
    let Some(timer) = &requested.timer else { return Ok(clock) };
    clock.hpet = timer.hpet.as_ref().and_then(|hpet| hpet.present);
    if board == Board::Microvm && clock.hpet.take() == Some(true) {
        return reject_value(path("timer.hpet.present"), true, "the board microvm has no HPET: use q35 or pc");
    }
    if let Some(pit) = &timer.pit {
        clock.pit = pit.present;
        clock.pit_discards = match pit.tick_policy {
            None => None,
            Some(TickPolicy::Discard) => Some(true),
            Some(TickPolicy::Delay) => Some(false),
            Some(other) => {
                return reject_value(path("timer.pit.tickPolicy"), other.word(), "delay and discard are supported");
            }
        };
    }
    if let Some(rtc) = &timer.rtc {
        if rtc.present == Some(false) {
            return reject_value(path("timer.rtc.present"), false, "every board has one");
        }
        clock.rtc_catches_up = match rtc.tick_policy {
            None | Some(TickPolicy::Delay) => false,
            Some(TickPolicy::Catchup) => true,
            Some(other) => {
                return reject_value(path("timer.rtc.tickPolicy"), other.word(), "delay and catchup are supported");
            }
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

    fn convert(spec: Value, board: Board) -> Result<Clock, String> {
        let domain: Domain = serde_json::from_value(json!({ "clock": spec })).unwrap();
        convert_clock(&domain, board).map_err(|error| error.to_string())
    }

    #[test]
    fn timers_follow_the_specification() {
        let spec = json!({ "utc": {}, "timer": {
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
        assert_eq!(convert(spec.clone(), Board::Q35), Ok(clock));
        assert_eq!(convert(spec, Board::Microvm), Ok(Clock { hpet: None, ..clock }));
        assert_eq!(convert(json!({}), Board::Pc), Ok(Clock::default()));
        for (spec, board, field) in [
            (json!({ "utc": { "offsetSeconds": 3600 } }), Board::Q35, "utc.offsetSeconds"),
            (json!({ "timer": { "hpet": { "present": true } } }), Board::Microvm, "timer.hpet.present"),
            (json!({ "timer": { "pit": { "tickPolicy": "catchup" } } }), Board::Q35, "timer.pit.tickPolicy"),
            (json!({ "timer": { "rtc": { "tickPolicy": "merge" } } }), Board::Q35, "timer.rtc.tickPolicy"),
            (json!({ "timer": { "rtc": { "present": false } } }), Board::Q35, "timer.rtc.present"),
        ] {
            assert!(convert(spec, board).unwrap_err().contains(&format!("spec.domain.clock.{field}")), "{field}");
        }
    }
}
