//! Pins the vCPUs of a VM to CPUs of the node: the threads of QEMU that run them get an affinity by sched_setaffinity(2). The
//! thread ids come from QEMU's query-cpus-fast.

use crate::error::KeeperError;
use crate::qemu_process::QemuProcess;
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use tokio::sync::{Mutex, MutexGuard};

/// The CPUs of the node in the order of the VM's vCPUs; `None` without pinning.
pub struct CpuPinning(Mutex<Option<Vec<u32>>>);

impl CpuPinning {
    /// Returns the pins of a VM before its first run.
    pub fn new(first: Option<Vec<u32>>) -> CpuPinning {
        CpuPinning(Mutex::new(first))
    }

    /// Pins the vCPUs of a QEMU that has started. The pins do not change until the result is dropped.
    pub async fn pin(&self, qemu: &QemuProcess) -> Result<MutexGuard<'_, Option<Vec<u32>>>, KeeperError> {
        let pins = self.0.lock().await;
        if let Some(pins) = pins.as_deref() {
            pin_threads(qemu, pins).await?;
        }
        Ok(pins)
    }

    /// Changes the pins, also for later runs. `qemu` returns the running QEMU, if there is one.
    pub async fn set(
        &self,
        processors: Vec<u32>,
        qemu: impl FnOnce() -> Option<Arc<QemuProcess>>,
    ) -> Result<(), KeeperError> {
        let mut pins = self.0.lock().await;
        let Some(current) = pins.as_mut().filter(|_| !processors.is_empty()) else { return Ok(()) };
        if current.len() != processors.len() {
            let rule = "one CPU of the node for each vCPU is expected";
            return Err(KeeperError::InvalidField { field: "processors", value: format!("{processors:?}"), rule });
        }
        if let Some(qemu) = qemu() {
            pin_threads(&qemu, &processors).await?;
        }
        *current = processors;
        Ok(())
    }
}

/// Pins the vCPUs. With emulation a single thread runs all of them: it may use all of these CPUs.
async fn pin_threads(qemu: &QemuProcess, pins: &[u32]) -> Result<(), KeeperError> {
    let reply = qemu.execute("query-cpus-fast", Value::Null).await?;
    let failed = |source: nix::errno::Errno| KeeperError::Resource {
        what: "pin the VM's vCPUs to CPUs of the node",
        source: source.into(),
    };
    for (thread, processors) in affinity_by_thread(&reply, pins)? {
        let mut set = CpuSet::new();
        for number in processors {
            set.set(usize::try_from(number).unwrap_or(usize::MAX)).map_err(failed)?;
        }
        sched_setaffinity(Pid::from_raw(thread), &set).map_err(failed)?;
    }
    Ok(())
}

/// Returns QEMU's threads and their CPUs.
fn affinity_by_thread(reply: &Value, pins: &[u32]) -> Result<BTreeMap<i32, BTreeSet<u32>>, KeeperError> {
    let malformed = |what| KeeperError::MalformedReply { peer: "QEMU", command: "query-cpus-fast".into(), what };
    let mut threads: BTreeMap<i32, BTreeSet<u32>> = BTreeMap::new();
    for processor in reply.as_array().ok_or_else(|| malformed("a list is expected"))? {
        let number = |key: &str| processor.get(key).and_then(Value::as_u64);
        let thread = number("thread-id").and_then(|thread| i32::try_from(thread).ok()).filter(|thread| *thread > 0);
        let thread = thread.ok_or_else(|| malformed("a vCPU without a thread"))?;
        let index = number("cpu-index").and_then(|index| usize::try_from(index).ok());
        let pin = index.and_then(|index| pins.get(index)).ok_or_else(|| malformed("too many vCPUs"))?;
        threads.entry(thread).or_default().insert(*pin);
    }
    Ok(threads)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[tokio::test]
    async fn the_number_of_pinned_cpus_cannot_change() {
        let pins = CpuPinning::new(Some(vec![0, 1]));
        pins.set(vec![], || panic!("nothing changes")).await.unwrap();
        let error = pins.set(vec![3], || panic!("nothing changes")).await.unwrap_err();
        assert!(error.to_string().contains("[3]"), "{error}");
        assert_eq!(*pins.0.lock().await, Some(vec![0, 1]));
        // The VM does not run: the next QEMU gets the pins.
        pins.set(vec![3, 2], || None).await.unwrap();
        assert_eq!(*pins.0.lock().await, Some(vec![3, 2]));
        let none = CpuPinning::new(None);
        none.set(vec![3], || panic!("it runs where its container may")).await.unwrap();
        assert_eq!(*none.0.lock().await, None);
    }

    #[test]
    fn each_qemu_thread_gets_the_cpus_of_its_vcpus() {
        let reply = |threads: &[i64]| {
            let one = |(n, thread): (usize, &i64)| json!({ "cpu-index": n, "thread-id": thread });
            threads_of(&Value::Array(threads.iter().enumerate().map(one).collect()))
        };
        fn threads_of(reply: &Value) -> Option<Vec<(i32, Vec<u32>)>> {
            let found = affinity_by_thread(reply, &[4, 7]).ok()?;
            Some(found.into_iter().map(|(thread, all)| (thread, all.into_iter().collect())).collect())
        }
        assert_eq!(reply(&[10, 11]), Some(vec![(10, vec![4]), (11, vec![7])]));
        assert_eq!(reply(&[10, 10]), Some(vec![(10, vec![4, 7])]));
        for wrong in [&[10, 11, 12][..], &[0], &[-1], &[1 << 40]] {
            assert_eq!(reply(wrong), None, "{wrong:?}");
        }
        assert_eq!(threads_of(&json!({})), None);
    }
}
