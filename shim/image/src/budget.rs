//! Bounds the cost of an image before it is spent: memory is charged before it is allocated, steps are counted before they are
//! made, and both fail once the caller has cancelled. All pulls and loads of a store share one [`MemoryPool`]. A worker takes its memory
//! from the daemon, which charges it to a budget of its own.
//!
//! A budget that finds the pool empty waits on its blocking thread for others to end, for a bounded time: budgets that wait for
//! each other end with the first of them whose wait times out.

use nacelle_base::{Classify, FailureKind};
use serde::{Deserialize, Serialize};
use std::fmt::Debug;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The maximum time that a budget waits for memory of others.
const MAX_WAIT: Duration = Duration::from_secs(30);
/// How often a budget that waits checks whether its caller has cancelled.
const CANCEL_POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Bytes that a budget takes from the pool at a time.
pub const RESERVATION_STEP: u64 = 1 << 20;
/// Steps that any image may take, even one without entries.
const BASE_STEPS: u64 = 1_000_000;
/// Steps for each byte of the layers' indexes. A path of n parts has at least 2n bytes there and is walked at most twice.
const STEPS_PER_BYTE: u64 = 8;

/// Reasons that work on an image ends early.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
pub enum BudgetError {
    /// The image alone needs too much memory.
    #[error(
        "it takes more than {limit} bytes of memory; an image of fewer files, names and attributes takes less, and max_unpack_memory in \
         [images] sets the limit"
    )]
    Memory {
        /// The limit in bytes.
        limit: u64,
    },
    /// Other images use the memory.
    #[error(
        "other pulls and loads have used all of the {limit} bytes of memory for unpacking for {seconds} seconds; pull it again later, \
         or raise max_unpack_memory in [images]"
    )]
    Pool {
        /// The limit in bytes of all pulls and loads together.
        limit: u64,
        /// The time that the budget waited, in seconds.
        seconds: u64,
    },
    /// The image takes too many steps.
    #[error(
        "its paths and links take more than {limit} steps to follow; links that lead through long chains of links are refused"
    )]
    Steps {
        /// The limit in steps.
        limit: u64,
    },
    /// The caller cancelled.
    #[error("the work was cancelled")]
    Cancelled,
}

impl Classify for BudgetError {
    fn kind(&self) -> FailureKind {
        match self {
            BudgetError::Memory { .. } | BudgetError::Pool { .. } | BudgetError::Steps { .. } => FailureKind::Exhausted,
            BudgetError::Cancelled => FailureKind::Unavailable,
        }
    }
}

impl BudgetError {
    /// Returns whether the same work may succeed later.
    pub fn is_transient(&self) -> bool {
        matches!(self, BudgetError::Pool { .. } | BudgetError::Cancelled)
    }
}

/// A flag that ends work on other threads. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct Cancel(Arc<AtomicBool>);

impl Cancel {
    /// Sets the flag. The work ends soon after.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Returns whether the work should end.
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Returns a guard that cancels when it is dropped. The future that waits for the work holds it.
    pub fn on_drop(&self) -> CancelOnDrop {
        CancelOnDrop(self.clone())
    }
}

/// A guard that cancels when it is dropped; see [`Cancel::on_drop`].
pub struct CancelOnDrop(Cancel);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

/// The source of a budget's memory.
pub trait MemorySource: Debug + Send + Sync {
    /// Takes bytes. Blocks until they are free.
    fn reserve(&self, bytes: u64, cancel: &Cancel) -> Result<(), BudgetError>;

    /// Returns bytes that are free again. Returns false if the budget must keep them.
    fn release(&self, bytes: u64) -> bool;
}

/// The memory of all pulls and loads of a store together.
#[derive(Debug)]
pub struct MemoryPool {
    limit: u64,
    wait: Duration,
    free: Mutex<u64>,
    released: Condvar,
}

impl MemoryPool {
    /// Returns a pool of `limit` bytes.
    pub fn new(limit: u64) -> Arc<MemoryPool> {
        MemoryPool::with_max_wait(limit, MAX_WAIT)
    }

    /// Like `new`, with another time limit for waiting.
    pub fn with_max_wait(limit: u64, wait: Duration) -> Arc<MemoryPool> {
        Arc::new(MemoryPool { limit, wait, free: Mutex::new(limit), released: Condvar::new() })
    }

    /// The bytes that no budget holds.
    #[cfg(test)]
    pub fn free(&self) -> u64 {
        *self.free.lock().unwrap()
    }
}

impl MemorySource for MemoryPool {
    /// Blocks up to the pool's time limit.
    fn reserve(&self, bytes: u64, cancel: &Cancel) -> Result<(), BudgetError> {
        let since = Instant::now();
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(left) = free.checked_sub(bytes) {
                *free = left;
                return Ok(());
            }
            if cancel.is_cancelled() {
                return Err(BudgetError::Cancelled);
            }
            if since.elapsed() >= self.wait {
                return Err(BudgetError::Pool { limit: self.limit, seconds: self.wait.as_secs() });
            }
            free = self.released.wait_timeout(free, CANCEL_POLL_INTERVAL).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn release(&self, bytes: u64) -> bool {
        *self.free.lock().unwrap_or_else(PoisonError::into_inner) += bytes;
        self.released.notify_all();
        true
    }
}

/// The memory and steps of one layer, or of one image. Dropping it returns its memory to the pool.
#[derive(Debug)]
pub struct Budget {
    source: Arc<dyn MemorySource>,
    cancel: Cancel,
    limit: u64,
    /// The bytes that are charged.
    used: u64,
    /// The maximum of `used` so far.
    peak: u64,
    /// The bytes taken from the source, at least `used`.
    reserved: u64,
    steps: u64,
    steps_limit: u64,
}

impl Budget {
    /// Returns the budget of a layer: a quarter of the pool. Steps are not limited, because the number of entries is bounded
    /// elsewhere.
    pub fn layer(pool: &Arc<MemoryPool>, cancel: &Cancel) -> Budget {
        Budget::new(Arc::clone(pool) as _, cancel, pool.limit / 4, u64::MAX)
    }

    /// Returns the budget of an image, whose layers have `indexes` bytes of indexes: seven eighths of the pool. An image that
    /// needs more fails by itself and does not wait for memory that its own archive or pull holds.
    pub fn image(pool: &Arc<MemoryPool>, cancel: &Cancel, indexes: u64) -> Budget {
        let steps = BASE_STEPS.saturating_add(indexes.saturating_mul(STEPS_PER_BYTE));
        Budget::new(Arc::clone(pool) as _, cancel, pool.limit / 8 * 7, steps)
    }

    /// Returns the budget of the names in an archive of images: an eighth of the pool, the part that its images cannot use.
    pub fn archive(pool: &Arc<MemoryPool>, cancel: &Cancel) -> Budget {
        Budget::new(Arc::clone(pool) as _, cancel, pool.limit / 8, u64::MAX)
    }

    /// Returns the budget of a worker. The daemon, which is the source, limits the memory.
    pub fn worker(source: Arc<dyn MemorySource>, steps_limit: u64) -> Budget {
        Budget::new(source, &Cancel::default(), u64::MAX, steps_limit)
    }

    fn new(source: Arc<dyn MemorySource>, cancel: &Cancel, limit: u64, steps_limit: u64) -> Budget {
        Budget { source, cancel: cancel.clone(), limit, used: 0, peak: 0, reserved: 0, steps: 0, steps_limit }
    }

    /// Charges bytes that are about to be allocated.
    pub fn charge(&mut self, bytes: u64) -> Result<(), BudgetError> {
        let used = self.used.saturating_add(bytes);
        if used > self.limit {
            return Err(BudgetError::Memory { limit: self.limit });
        }
        if used > self.reserved {
            let more = (used - self.reserved).next_multiple_of(RESERVATION_STEP).min(self.limit - self.reserved);
            self.source.reserve(more, &self.cancel)?;
            self.reserved += more;
        }
        (self.used, self.peak) = (used, self.peak.max(used));
        Ok(())
    }

    /// Returns a charge when the bytes are free again.
    pub fn refund(&mut self, bytes: u64) {
        self.used = self.used.saturating_sub(bytes);
        let spare = self.reserved - self.used.next_multiple_of(RESERVATION_STEP).min(self.reserved);
        if spare > 0 && self.source.release(spare) {
            self.reserved -= spare;
        }
    }

    /// Counts steps that are about to be made.
    pub fn step(&mut self, count: u64) -> Result<(), BudgetError> {
        if self.cancel.is_cancelled() {
            return Err(BudgetError::Cancelled);
        }
        self.steps = self.steps.saturating_add(count);
        if self.steps > self.steps_limit {
            return Err(BudgetError::Steps { limit: self.steps_limit });
        }
        Ok(())
    }

    /// The flag that ends the work.
    pub fn cancel(&self) -> &Cancel {
        &self.cancel
    }

    /// The limit in bytes.
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// The maximum number of steps.
    pub fn steps_limit(&self) -> u64 {
        self.steps_limit
    }

    /// The number of steps counted so far.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// The most bytes that were charged at a time.
    pub fn peak(&self) -> u64 {
        self.peak
    }
}

impl Drop for Budget {
    fn drop(&mut self) {
        self.source.release(self.reserved);
    }
}

/// Returns the bytes that an allocation of this size takes, including the allocator's overhead.
pub fn heap_bytes(bytes: usize) -> u64 {
    if bytes == 0 { 0 } else { (bytes as u64).saturating_add(8).next_multiple_of(16).max(32) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tiny(limit: u64) -> Arc<MemoryPool> {
        MemoryPool::with_max_wait(limit, Duration::from_millis(50))
    }

    #[test]
    fn memory_comes_from_the_pool_and_goes_back() {
        let pool = tiny(160 << 20);
        let mut budget = Budget::image(&pool, &Cancel::default(), 0);
        budget.charge(10).unwrap();
        assert_eq!(pool.free(), 159 << 20);
        budget.charge(60 << 20).unwrap();
        budget.refund(60 << 20);
        assert_eq!((pool.free(), budget.peak()), (159 << 20, (60 << 20) + 10));
        assert_eq!(budget.charge(140 << 20), Err(BudgetError::Memory { limit: 140 << 20 }));
        drop(budget);
        assert_eq!(pool.free(), 160 << 20);
    }

    #[test]
    fn a_layer_has_a_quarter() {
        let pool = tiny(100 << 20);
        let mut budget = Budget::layer(&pool, &Cancel::default());
        budget.charge(25 << 20).unwrap();
        assert_eq!(budget.charge(1), Err(BudgetError::Memory { limit: 25 << 20 }));
    }

    #[test]
    fn a_budget_waits_for_an_empty_pool_and_then_fails() {
        let pool = tiny(10 << 20);
        let mut first = Budget::image(&pool, &Cancel::default(), 0);
        first.charge(7 << 20).unwrap();
        let mut second = Budget::image(&pool, &Cancel::default(), 0);
        let error = second.charge(4 << 20).unwrap_err();
        assert_eq!((error.kind(), error.is_transient()), (FailureKind::Exhausted, true));
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| second.charge(4 << 20));
            drop(first);
            waiting.join().unwrap().unwrap();
        });
    }

    #[test]
    fn a_cancelled_budget_does_not_wait() {
        let pool = MemoryPool::new(8 << 20);
        let cancel = Cancel::default();
        let mut first = Budget::image(&pool, &Cancel::default(), 0);
        let mut rest = Budget::layer(&pool, &Cancel::default());
        first.charge(7 << 20).unwrap();
        rest.charge(1 << 20).unwrap();
        let mut second = Budget::image(&pool, &cancel, 0);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| second.charge(1));
            drop(cancel.on_drop());
            assert_eq!(waiting.join().unwrap(), Err(BudgetError::Cancelled));
        });
    }

    #[test]
    fn steps_follow_the_size_of_the_indexes() {
        let pool = tiny(1 << 20);
        let mut budget = Budget::image(&pool, &Cancel::default(), 100);
        budget.step(BASE_STEPS + 800).unwrap();
        assert_eq!(budget.step(1), Err(BudgetError::Steps { limit: BASE_STEPS + 800 }));
    }
}
