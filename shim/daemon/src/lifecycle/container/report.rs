//! Sanitizes the reports of a pod process about its containers.

use crate::lifecycle::context::text::clip;
use nacelle_proto::pod as proto;

/// The report of a pod process about a container, sanitized: times lie between `from` and now, and codes are in range.
pub(crate) struct ContainerReport {
    pub phase: proto::ContainerPhase,
    pub started_at: i64,
    pub finished_at: i64,
    pub exit_code: i32,
    pub oom_killed: bool,
    pub message: String,
}

pub(crate) fn sanitize(state: &proto::ContainerState, from: i64, now: i64) -> ContainerReport {
    let sane = |time: i64| if (from..=now).contains(&time) { time } else { now };
    let started_at = if state.started_at == 0 { 0 } else { sane(state.started_at) };
    ContainerReport {
        phase: state.phase(),
        started_at,
        finished_at: sane(state.finished_at).max(started_at),
        exit_code: i32::try_from(state.exit_code).unwrap_or(i32::MAX),
        oom_killed: state.oom_killed,
        message: clip(&state.message),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn times_of_any_report_stay_in_order(
            created: i64, started: i64, finished: i64, code: u32, phase: i32, message in ".{0,5000}",
        ) {
            let state = proto::ContainerState {
                id: String::new(), phase, created_at: created, started_at: started, finished_at: finished,
                exit_code: code, oom_killed: false, message, uid: 0, gid: 0, supplemental_groups: vec![],
            };
            let report = sanitize(&state, 100, 200);
            prop_assert!(report.started_at == 0 || (100..=200).contains(&report.started_at));
            prop_assert!((100..=200).contains(&report.finished_at) && report.finished_at >= report.started_at);
            prop_assert!(report.exit_code >= 0 && report.message.len() <= crate::lifecycle::context::text::CLIP + 3);
        }
    }
}
