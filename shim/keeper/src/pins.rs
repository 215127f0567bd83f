//! Pins the vCPUs of a VM to CPUs of the node: the threads of QEMU that run them get an affinity by sched_setaffinity(2). The
//! thread ids come from QEMU's query-cpus-fast.

use crate::error::KeeperError;
use crate::live::Live;
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use tokio::sync::{Mutex, MutexGuard};

/// The CPUs of the node in the order of the VM's vCPUs; `None` without pinning.
pub struct Pins(Mutex<Option<Vec<u32>>>);

impl Pins {
    /// Returns the pins of a VM before its first run.
    pub fn new(first: Option<Vec<u32>>) -> Pins {
        Pins(Mutex::new(first))
    }

    /// Pins the vCPUs of a QEMU that has started. The pins do not change until the result is dropped.
    pub async fn pin(&self, live: &Live) -> Result<MutexGuard<'_, Option<Vec<u32>>>, KeeperError> {
        let pins = self.0.lock().await;
        if let Some(pins) = pins.as_deref() {
            pin(live, pins).await?;
        }
        Ok(pins)
    }

    /// Changes the pins, also for later runs. `live` returns the running QEMU, if there is one.
    pub async fn change(
        &self,
        processors: Vec<u32>,
        live: impl FnOnce() -> Option<Arc<Live>>,
    ) -> Result<(), KeeperError> {
        let mut pins = self.0.lock().await;
        let Some(known) = pins.as_mut().filter(|_| !processors.is_empty()) else { return Ok(()) };
        if known.len() != processors.len() {
            let rule = "as many processors of the node are expected as the machine has";
            return Err(KeeperError::Field { field: "processors", value: format!("{processors:?}"), rule });
        }
        if let Some(live) = live() {
            pin(&live, &processors).await?;
        }
        *known = processors;
        Ok(())
    }
}

/// Pins the vCPUs. With emulation a single thread runs all of them: it may use all of these CPUs.
async fn pin(live: &Live, pins: &[u32]) -> Result<(), KeeperError> {
    let told = live.ask("query-cpus-fast", Value::Null).await?;
    let failed = |source: nix::errno::Errno| KeeperError::Resources {
        what: "processors of the node for those of the machine",
        source: source.into(),
    };
    for (thread, processors) in threads(&told, pins)? {
        let mut set = CpuSet::new();
        for number in processors {
            set.set(usize::try_from(number).unwrap_or(usize::MAX)).map_err(failed)?;
        }
        sched_setaffinity(Pid::from_raw(thread), &set).map_err(failed)?;
    }
    Ok(())
}

/// Returns QEMU's threads and their CPUs.
fn threads(told: &Value, pins: &[u32]) -> Result<BTreeMap<i32, BTreeSet<u32>>, KeeperError> {
    let garbled = |what| KeeperError::Garbled { whom: "QEMU", command: "query-cpus-fast".into(), what };
    let mut threads: BTreeMap<i32, BTreeSet<u32>> = BTreeMap::new();
    for processor in told.as_array().ok_or_else(|| garbled("a list is expected"))? {
        let number = |key: &str| processor.get(key).and_then(Value::as_u64);
        let thread = number("thread-id").and_then(|thread| i32::try_from(thread).ok()).filter(|thread| *thread > 0);
        let thread = thread.ok_or_else(|| garbled("a processor without a thread"))?;
        let index = number("cpu-index").and_then(|index| usize::try_from(index).ok());
        let pin = index.and_then(|index| pins.get(index)).ok_or_else(|| garbled("a processor too many"))?;
        threads.entry(thread).or_default().insert(*pin);
    }
    Ok(threads)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[tokio::test]
    async fn processors_change_as_many_as_they_are() {
        let pins = Pins::new(Some(vec![0, 1]));
        pins.change(vec![], || panic!("nothing changes")).await.unwrap();
        let error = pins.change(vec![3], || panic!("nothing changes")).await.unwrap_err();
        assert!(error.to_string().contains("[3]"), "{error}");
        assert_eq!(*pins.0.lock().await, Some(vec![0, 1]));
        // The VM does not run: the next QEMU gets the pins.
        pins.change(vec![3, 2], || None).await.unwrap();
        assert_eq!(*pins.0.lock().await, Some(vec![3, 2]));
        let none = Pins::new(None);
        none.change(vec![3], || panic!("it runs where its container may")).await.unwrap();
        assert_eq!(*none.0.lock().await, None);
    }

    #[test]
    fn each_thread_has_the_processors_of_those_that_it_runs() {
        let told = |threads: &[i64]| {
            let one = |(n, thread): (usize, &i64)| json!({ "cpu-index": n, "thread-id": thread });
            threads_of(&Value::Array(threads.iter().enumerate().map(one).collect()))
        };
        fn threads_of(told: &Value) -> Option<Vec<(i32, Vec<u32>)>> {
            let found = threads(told, &[4, 7]).ok()?;
            Some(found.into_iter().map(|(thread, all)| (thread, all.into_iter().collect())).collect())
        }
        assert_eq!(told(&[10, 11]), Some(vec![(10, vec![4]), (11, vec![7])]));
        assert_eq!(told(&[10, 10]), Some(vec![(10, vec![4, 7])]));
        for wrong in [&[10, 11, 12][..], &[0], &[-1], &[1 << 40]] {
            assert_eq!(told(wrong), None, "{wrong:?}");
        }
        assert_eq!(threads_of(&json!({})), None);
    }
}
