//! Handles the requested target states of the VM while it exists: to run, to be stopped, to end.

use super::{PodVm, PodVmState};
use crate::error::KeeperError;
use crate::qemu_process::KILLED;
use crate::restart::PowerRequest;
use nacelle_base::Chain;
use serde_json::Value;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The interval between two presses of the power button: a guest that boots misses the first ones.
const PRESS_INTERVAL: Duration = Duration::from_secs(5);

impl PodVm {
    /// Sets the requested target. `End` is final.
    pub fn request_power(&self, power_request: PowerRequest) {
        let mut run_state = self.run_state();
        if run_state.power_request != PowerRequest::End {
            run_state.power_request = power_request;
        }
        drop(run_state);
        // Also wakes a task that is only about to wait.
        self.power_requested.notify_one();
    }

    /// Starts the VM. Has no effect on a running VM, except that one that was requested to stop runs again afterwards.
    pub fn power_on(&self) {
        let mut run_state = self.run_state();
        if run_state.qemu.is_none() {
            drop(run_state);
            self.request_power(PowerRequest::Start);
        } else if run_state.power_request == PowerRequest::Stop {
            run_state.power_request = PowerRequest::Restart;
        }
    }

    /// Presses the power button repeatedly until the VM has stopped.
    pub fn press_power_button(self: &Arc<Self>) {
        let Ok(qemu) = self.qemu() else { return };
        if std::mem::replace(&mut self.run_state().is_pressing_power_button, true) {
            return;
        }
        tokio::spawn(async move {
            loop {
                // A paused VM does not receive the event.
                let pressed = match qemu.execute("cont", Value::Null).await {
                    Ok(_) => qemu.execute("system_powerdown", Value::Null).await,
                    rejected => rejected,
                };
                if let Err(error) = pressed {
                    return tracing::info!("cannot press the power button any more: {}", Chain(&error));
                }
                tokio::time::sleep(PRESS_INTERVAL).await;
            }
        });
    }

    /// Ends the container by the power button.
    pub fn stop(self: &Arc<Self>) {
        self.request_power(PowerRequest::End);
        self.press_power_button();
    }

    /// Powers the VM off and ends its container. A VM that has not started never will.
    pub fn kill(&self) {
        self.request_power(PowerRequest::End);
        let created = *self.state.borrow() == PodVmState::Created;
        match self.qemu() {
            Ok(qemu) => qemu.kill(),
            Err(_) if created => self.set_ended(KILLED),
            Err(_) => {}
        }
    }

    /// Powers the VM off.
    pub fn power_off(&self) -> Result<(), KeeperError> {
        self.qemu().map(|qemu| qemu.kill())
    }

    /// Ends a run, and returns the target that was requested during it.
    pub(super) fn finish_run(&self) -> PowerRequest {
        let mut run_state = self.run_state();
        run_state.qemu = None;
        run_state.is_pressing_power_button = false;
        match run_state.power_request {
            PowerRequest::End => PowerRequest::End,
            _ => std::mem::replace(&mut run_state.power_request, PowerRequest::None),
        }
    }

    /// Waits at most `limit` for one of these targets or for the end; returns `PowerRequest::None` after that.
    pub(super) async fn wait_for_power_request(&self, limit: Duration, awaited: &[PowerRequest]) -> PowerRequest {
        let deadline = Instant::now().checked_add(limit);
        loop {
            let notified = self.power_requested.notified();
            {
                let mut run_state = self.run_state();
                let power_request = run_state.power_request;
                if power_request == PowerRequest::End {
                    return power_request;
                }
                if awaited.contains(&power_request) {
                    run_state.power_request = PowerRequest::None;
                    return power_request;
                }
            }
            let remaining = deadline
                .map_or(Duration::from_secs(86_400), |deadline| deadline.saturating_duration_since(Instant::now()));
            if remaining.is_zero() {
                return PowerRequest::None;
            }
            // Notified or not, the target is checked again.
            let _ = tokio::time::timeout(remaining, notified).await;
        }
    }
}
