//! The CPU limit of a new container, which takes effect when the container has been created.
//!
//! What prepares a container runs in the container's cgroup. Under a limit such as `10m` it would take a hundred times as long, and
//! the caller would give up before the container exists.

use libcontainer::oci_spec::runtime::Spec;

/// The file of cgroup v2 that limits CPU time: quota or `max`, and period, in µs (the kernel's
/// Documentation/admin-guide/cgroup-v2.rst).
const CPU_LIMIT: &str = "cpu.max";
/// The kernel's default period, in µs.
const DEFAULT_PERIOD: u64 = 100_000;

/// Removes the CPU limit from a specification and returns its file and value, as `limits::change_limits` takes them; `None` if there
/// is none. `unified` takes precedence over `cpu`.
pub(super) fn take_cpu_limit(spec: &mut Spec) -> Option<(String, String)> {
    let resources = spec.linux_mut().as_mut()?.resources_mut().as_mut()?;
    let from_unified = resources.unified_mut().as_mut().and_then(|files| files.remove(CPU_LIMIT));
    let from_cpu = resources.cpu_mut().as_mut().and_then(|cpu| {
        let (quota, period) = (cpu.quota().filter(|quota| *quota > 0), cpu.period());
        cpu.set_quota(None).set_period(None);
        let quota = quota.map_or_else(|| "max".to_owned(), |quota| quota.to_string());
        let value = format!("{quota} {}", period.unwrap_or(DEFAULT_PERIOD));
        (quota != "max" || period.is_some()).then_some(value)
    });
    from_unified.or(from_cpu).map(|value| (CPU_LIMIT.to_owned(), value))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn take(resources: Value) -> (Option<String>, Value) {
        let linux = json!({ "linux": { "resources": resources }, "ociVersion": "1.0.2" });
        let mut spec: Spec = serde_json::from_value(linux).unwrap();
        let limit = take_cpu_limit(&mut spec).map(|(file, value)| format!("{file}: {value}"));
        (limit, serde_json::to_value(&spec).unwrap()["linux"]["resources"].clone())
    }

    #[test]
    fn the_limit_leaves_the_specification_and_the_rest_stays() {
        let cpu = |cpu: Value| json!({ "cpu": cpu, "pids": { "limit": 5 } });
        for (asked, limit, left) in [
            (
                cpu(json!({ "quota": 1000, "period": 50_000, "shares": 10 })),
                Some("cpu.max: 1000 50000"),
                cpu(json!({ "shares": 10 })),
            ),
            (cpu(json!({ "quota": 1000, "cpus": "0" })), Some("cpu.max: 1000 100000"), cpu(json!({ "cpus": "0" }))),
            (cpu(json!({ "quota": -1, "period": 50_000 })), Some("cpu.max: max 50000"), cpu(json!({}))),
            (cpu(json!({ "quota": -1 })), None, cpu(json!({}))),
            (cpu(json!({ "shares": 10 })), None, cpu(json!({ "shares": 10 }))),
            (json!({}), None, json!({})),
            (
                json!({ "cpu": { "quota": 1000 }, "unified": { "cpu.max": "7 9", "memory.high": "5" } }),
                Some("cpu.max: 7 9"),
                json!({ "cpu": {}, "unified": { "memory.high": "5" } }),
            ),
        ] {
            assert_eq!(take(asked.clone()), (limit.map(str::to_owned), left), "{asked}");
        }
    }
}
