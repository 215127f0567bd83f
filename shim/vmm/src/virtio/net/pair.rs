//! Manages a pair of queues with its tap, served by two threads of this process or by the kernel.

use super::tap::Tap;
use super::vhost::VhostNet;
use super::{NetMetrics, feature, worker};
use crate::virtio::Ring;
use crate::virtio::queue_thread::QueueThread;
use nacelle_base::guest_error;
use nacelle_jail::ThreadKind;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use virtio_queue::QueueState;

/// The indexes of the queues in a pair.
pub(super) const RECEIVE: usize = 0;

/// A pair of queues and its tap.
#[derive(Debug)]
pub(super) struct QueuePair {
    tap: Arc<Tap>,
    vhost: Option<VhostNet>,
    queues: [Option<RunningQueue>; 2],
}

/// A running queue.
#[derive(Debug)]
enum RunningQueue {
    Thread(QueueThread),
    Kernel(Ring),
}

impl QueuePair {
    pub(super) fn new(tap: Tap, vhost: Option<OwnedFd>) -> QueuePair {
        QueuePair { tap: Arc::new(tap), vhost: vhost.map(VhostNet::new), queues: [None, None] }
    }

    pub(super) fn tap(&self) -> &Tap {
        &self.tap
    }

    pub(super) fn vhost(&self) -> Option<&VhostNet> {
        self.vhost.as_ref()
    }

    /// Returns whether queue `side` of the pair runs.
    pub(super) fn is_running(&self, side: usize) -> bool {
        self.queues[side].is_some()
    }

    /// Starts serving queue `side` of the pair. Frames flow while the pair is active. `on_removed` is called when the interface
    /// no longer exists.
    pub(super) fn start(
        &mut self,
        side: usize,
        ring: Ring,
        features: u64,
        metrics: &Arc<NetMetrics>,
        on_removed: impl Fn() + Send + 'static,
    ) -> io::Result<()> {
        // Without an eventfd to interrupt the guest, the kernel cannot serve its queues.
        let call = self.vhost.as_ref().and_then(|_| ring.interrupt().interrupt_eventfd(ring.index()));
        let running = match (&mut self.vhost, call) {
            (Some(vhost), Some(call)) => {
                vhost.set_up_queue(side, &ring, call, features)?;
                if self.tap.is_attached() {
                    vhost.start_queue(side, &ring, &self.tap)?;
                }
                RunningQueue::Kernel(ring)
            }
            _ => {
                let (tap, metrics) = (self.tap.clone(), metrics.clone());
                let mergeable = features & feature::MRG_RXBUF != 0;
                let thread = if side == RECEIVE {
                    QueueThread::run("net-rx", ThreadKind::Queue, ring, move |ring, stop| {
                        worker::receive(ring, stop, &tap, mergeable, metrics, on_removed)
                    })
                } else {
                    QueueThread::run("net-tx", ThreadKind::Queue, ring, move |ring, stop| {
                        worker::transmit(ring, stop, &tap, metrics)
                    })
                };
                RunningQueue::Thread(thread?)
            }
        };
        self.queues[side] = Some(running);
        Ok(())
    }

    /// Stops queue `side` of the pair.
    pub(super) fn stop(&mut self, side: usize) -> Option<QueueState> {
        match self.queues[side].take()? {
            RunningQueue::Thread(thread) => thread.stop(),
            RunningQueue::Kernel(mut ring) => {
                let vhost = self.vhost.as_mut()?;
                if let Err(error) = vhost.stop_queue(side, &mut ring) {
                    guest_error!("cannot stop vhost-net on a network queue: {error}");
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
        for (side, running) in self.queues.iter().enumerate() {
            match (running, &self.vhost) {
                (Some(RunningQueue::Kernel(ring)), Some(vhost)) if active => {
                    vhost.start_queue(side, ring, &self.tap)?
                }
                (Some(RunningQueue::Kernel(_)), Some(vhost)) => vhost.pause_queue(side)?,
                (Some(RunningQueue::Thread(thread)), _) => thread.wake(),
                _ => {}
            }
        }
        if active { Ok(()) } else { self.tap.attach(false) }
    }
}
