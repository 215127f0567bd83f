//! Handles the requested target states of the VM while it exists: to run, to be stopped, to end.

use super::{Machine, State};
use crate::error::KeeperError;
use crate::live::KILLED;
use crate::runs::Order;
use nacelle_base::Chain;
use serde_json::Value;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The interval between two presses of the power button: a guest that boots misses the first ones.
const PRESS: Duration = Duration::from_secs(5);

impl Machine {
    /// Sets the requested target. `End` is final.
    pub fn order(&self, order: Order) {
        let mut changing = self.changing();
        if changing.order != Order::End {
            changing.order = order;
        }
        drop(changing);
        // Also wakes a task that is only about to wait.
        self.ordered.notify_one();
    }

    /// Starts the VM. Has no effect on a running VM, except that one that was requested to stop runs again afterwards.
    pub fn switch_on(&self) {
        let mut changing = self.changing();
        if changing.live.is_none() {
            drop(changing);
            self.order(Order::On);
        } else if changing.order == Order::Off {
            changing.order = Order::Again;
        }
    }

    /// Presses the power button repeatedly until the VM has stopped.
    pub fn press(self: &Arc<Self>) {
        let Ok(live) = self.live() else { return };
        if std::mem::replace(&mut self.changing().pressing, true) {
            return;
        }
        tokio::spawn(async move {
            loop {
                // A paused VM does not receive the event.
                let pressed = match live.ask("cont", Value::Null).await {
                    Ok(_) => live.ask("system_powerdown", Value::Null).await,
                    refused => refused,
                };
                if let Err(error) = pressed {
                    return tracing::info!("the power button is not pressed any more: {}", Chain(&error));
                }
                tokio::time::sleep(PRESS).await;
            }
        });
    }

    /// Ends the container by the power button.
    pub fn stop(self: &Arc<Self>) {
        self.order(Order::End);
        self.press();
    }

    /// Powers the VM off and ends its container. A VM that has not started never will.
    pub fn kill(&self) {
        self.order(Order::End);
        let created = *self.state.borrow() == State::Created;
        match self.live() {
            Ok(live) => live.kill(),
            Err(_) if created => self.end(KILLED),
            Err(_) => {}
        }
    }

    /// Powers the VM off.
    pub fn power_off(&self) -> Result<(), KeeperError> {
        self.live().map(|live| live.kill())
    }

    /// Ends a run, and returns the target that was requested during it.
    pub(super) fn ended_with_order(&self) -> Order {
        let mut changing = self.changing();
        changing.live = None;
        changing.pressing = false;
        match changing.order {
            Order::End => Order::End,
            _ => std::mem::replace(&mut changing.order, Order::None),
        }
    }

    /// Waits at most `limit` for one of these targets or for the end; returns `Order::None` after that.
    pub(super) async fn wait_for_order(&self, limit: Duration, wanted: &[Order]) -> Order {
        let until = Instant::now().checked_add(limit);
        loop {
            let told = self.ordered.notified();
            {
                let mut changing = self.changing();
                let order = changing.order;
                if order == Order::End {
                    return order;
                }
                if wanted.contains(&order) {
                    changing.order = Order::None;
                    return order;
                }
            }
            let left =
                until.map_or(Duration::from_secs(86_400), |until| until.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return Order::None;
            }
            // Notified or not, the target is checked again.
            let _ = tokio::time::timeout(left, told).await;
        }
    }
}
