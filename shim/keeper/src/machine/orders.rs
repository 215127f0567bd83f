//! Owns: what is wanted of the machine while it is there: to run, to be off, to end.

use super::{Machine, State};
use crate::error::KeeperError;
use crate::live::KILLED;
use crate::runs::Order;
use nacelle_base::Chain;
use serde_json::Value;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Between two presses of the power button: a guest that boots does not notice it.
const PRESS: Duration = Duration::from_secs(5);

impl Machine {
    /// Says what is wanted of it. The end is the last word.
    pub fn order(&self, order: Order) {
        let mut changing = self.changing();
        if changing.order != Order::End {
            changing.order = order;
        }
        drop(changing);
        // Also for whoever is only about to wait.
        self.ordered.notify_one();
    }

    /// It shall run. Of one that runs nothing is wanted, but if it was told to be off, it runs again after that.
    pub fn switch_on(&self) {
        let mut changing = self.changing();
        if changing.live.is_none() {
            drop(changing);
            self.order(Order::On);
        } else if changing.order == Order::Off {
            changing.order = Order::Again;
        }
    }

    /// Presses the power button, again and again until it does not run any more.
    pub fn press(self: &Arc<Self>) {
        let Ok(live) = self.live() else { return };
        if std::mem::replace(&mut self.changing().pressing, true) {
            return;
        }
        tokio::spawn(async move {
            loop {
                // One that stands still hears nothing.
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

    /// Its container shall end: by the power button.
    pub fn stop(self: &Arc<Self>) {
        self.order(Order::End);
        self.press();
    }

    /// Takes its power away, and ends its container. One that has not started never will.
    pub fn kill(&self) {
        self.order(Order::End);
        let created = *self.state.borrow() == State::Created;
        match self.live() {
            Ok(live) => live.kill(),
            Err(_) if created => self.end(KILLED),
            Err(_) => {}
        }
    }

    /// Takes its power away.
    pub fn power_off(&self) -> Result<(), KeeperError> {
        self.live().map(|live| live.kill())
    }

    /// After a run: the order that was given during it.
    pub(super) fn ended_with_order(&self) -> Order {
        let mut changing = self.changing();
        changing.live = None;
        changing.pressing = false;
        match changing.order {
            Order::End => Order::End,
            _ => std::mem::replace(&mut changing.order, Order::None),
        }
    }

    /// Waits at most so long for one of these orders, or for the end; `None` when the time is over.
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
            // Told, or not: it is looked at again.
            let _ = tokio::time::timeout(left, told).await;
        }
    }
}
