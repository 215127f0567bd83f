//! Manages a pair of queues with its tap, served by two threads of this process or by the kernel.

use super::tap::Tap;
use super::vhost::Vhost;
use super::{Metrics, feature, worker};
use crate::virtio::Ring;
use crate::virtio::queue_thread::QueueThread;
use nacelle_jail::ThreadKind;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use virtio_queue::QueueState;

/// The indexes of the queues in a pair.
pub(super) const RECEIVE: usize = 0;

/// A pair of queues and its tap.
#[derive(Debug)]
pub(super) struct Pair {
    tap: Arc<Tap>,
    vhost: Option<Vhost>,
    queues: [Option<Side>; 2],
}

/// A running queue.
#[derive(Debug)]
enum Side {
    Ours(QueueThread),
    Kernel(Ring),
}

impl Pair {
    pub(super) fn new(tap: Tap, vhost: Option<OwnedFd>) -> Pair {
        Pair { tap: Arc::new(tap), vhost: vhost.map(Vhost::new), queues: [None, None] }
    }

    pub(super) fn tap(&self) -> &Tap {
        &self.tap
    }

    pub(super) fn vhost(&self) -> Option<&Vhost> {
        self.vhost.as_ref()
    }

    /// Returns whether queue `place` of the pair runs.
    pub(super) fn runs(&self, place: usize) -> bool {
        self.queues[place].is_some()
    }

    /// Starts serving queue `place` of the pair. Frames flow while the pair is active. `gone` is called when the interface no
    /// longer exists.
    pub(super) fn start(
        &mut self,
        place: usize,
        ring: Ring,
        features: u64,
        metrics: &Arc<Metrics>,
        gone: impl Fn() + Send + 'static,
    ) -> io::Result<()> {
        // Without an eventfd to interrupt the guest, the kernel cannot serve its queues.
        let call = self.vhost.as_ref().and_then(|_| ring.interrupt().eventfd(ring.index()));
        let side = match (&mut self.vhost, call) {
            (Some(vhost), Some(call)) => {
                vhost.set_up(place, &ring, call, features)?;
                if self.tap.is_attached() {
                    vhost.connect(place, &ring, &self.tap)?;
                }
                Side::Kernel(ring)
            }
            _ => {
                let (tap, metrics) = (self.tap.clone(), metrics.clone());
                let mergeable = features & feature::MRG_RXBUF != 0;
                let thread = if place == RECEIVE {
                    QueueThread::run("net-rx", ThreadKind::Queue, ring, move |ring, stop| {
                        worker::receive(ring, stop, &tap, mergeable, metrics, gone)
                    })
                } else {
                    QueueThread::run("net-tx", ThreadKind::Queue, ring, move |ring, stop| {
                        worker::transmit(ring, stop, &tap, metrics)
                    })
                };
                Side::Ours(thread?)
            }
        };
        self.queues[place] = Some(side);
        Ok(())
    }

    /// Stops queue `place` of the pair.
    pub(super) fn stop(&mut self, place: usize) -> Option<QueueState> {
        match self.queues[place].take()? {
            Side::Ours(thread) => thread.stop(),
            Side::Kernel(mut ring) => {
                let vhost = self.vhost.as_mut()?;
                if let Err(error) = vhost.take_back(place, &mut ring) {
                    tracing::error!("the kernel does not give a network queue back: {error}");
                }
                Some(ring.into_state())
            }
        }
    }

    /// Makes the pair active or inactive in the interface's traffic, whether its queues run or not.
    pub(super) fn set_active(&mut self, active: bool) -> io::Result<()> {
        if active == self.tap.is_attached() {
            return Ok(());
        }
        if active {
            self.tap.attach(true)?;
        }
        for (place, side) in self.queues.iter().enumerate() {
            match (side, &self.vhost) {
                (Some(Side::Kernel(ring)), Some(vhost)) if active => vhost.connect(place, ring, &self.tap)?,
                (Some(Side::Kernel(_)), Some(vhost)) => vhost.disconnect(place)?,
                (Some(Side::Ours(thread)), _) => thread.nudge(),
                _ => {}
            }
        }
        if active { Ok(()) } else { self.tap.attach(false) }
    }
}
