//! Owns: what a machine costs the node: the processor time and the memory of its pod process and of the processes that
//! one has started, read from /proc (proc(5)).
//! Threads: blocks for some reads of /proc.

use nacelle_pod::identity::Identity;
use std::fs;
use std::path::Path;

/// Processes of one pod that are looked at.
const MAX_PROCESSES: usize = 64;

/// What processes have used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// Processor time, in nanoseconds; also that of children that have ended.
    pub cpu_nanos: u64,
    /// Resident memory, in bytes, with huge pages.
    pub memory_bytes: u64,
}

/// The cost of this process with its descendants; none if it is gone.
pub fn of(process: &Identity) -> Option<Cost> {
    below(Path::new("/proc"), process.pid, Some(process.start_time))
}

fn below(proc: &Path, pid: i32, started: Option<u64>) -> Option<Cost> {
    let ticks = nix::unistd::sysconf(nix::unistd::SysconfVar::CLK_TCK).ok().flatten();
    let nanos = 1_000_000_000 / u64::try_from(ticks.unwrap_or(100)).unwrap_or(100).max(1);
    let mut sum = Cost::default();
    let mut pids = vec![pid];
    let mut at = 0;
    while let Some(&next) = pids.get(at).filter(|_| at < MAX_PROCESSES) {
        let folder = proc.join(next.to_string());
        let (Ok(stat), Ok(status)) =
            (fs::read_to_string(folder.join("stat")), fs::read_to_string(folder.join("status")))
        else {
            // One that has ended meanwhile; without the first there is nothing.
            (at > 0).then_some(())?;
            at += 1;
            continue;
        };
        let (ticks, start) = times(&stat)?;
        if at == 0 && started.is_some_and(|started| started != start) {
            return None;
        }
        sum.cpu_nanos = sum.cpu_nanos.saturating_add(ticks.saturating_mul(nanos));
        sum.memory_bytes = sum.memory_bytes.saturating_add(resident(&status));
        pids.extend(children(&folder));
        at += 1;
    }
    Some(sum)
}

/// Of /proc/PID/stat: the ticks that it and its children that ended have used, and when it started.
fn times(stat: &str) -> Option<(u64, u64)> {
    // The name may hold anything.
    let (_, fields) = stat.rsplit_once(')')?;
    let fields: Vec<&str> = fields.split_whitespace().collect();
    let field = |number: usize| fields.get(number - 3)?.parse::<u64>().ok();
    let ticks = (14..=17).map(field).try_fold(0_u64, |sum, ticks| Some(sum.saturating_add(ticks?)))?;
    Some((ticks, field(22)?))
}

/// Of /proc/PID/status: the resident bytes.
fn resident(status: &str) -> u64 {
    let kib = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        line.trim().strip_suffix(" kB")?.parse::<u64>().ok()
    };
    ["VmRSS", "HugetlbPages"].into_iter().filter_map(kib).fold(0, u64::saturating_add).saturating_mul(1024)
}

fn children(folder: &Path) -> Vec<i32> {
    let threads = fs::read_dir(folder.join("task")).into_iter().flatten().flatten();
    let lists = threads.filter_map(|thread| fs::read_to_string(thread.path().join("children")).ok());
    lists.flat_map(|list| list.split_whitespace().filter_map(|pid| pid.parse().ok()).collect::<Vec<i32>>()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(proc: &Path, pid: i32, ticks: u64, kib: u64, children: &str) {
        let folder = proc.join(pid.to_string());
        fs::create_dir_all(folder.join(format!("task/{pid}"))).unwrap();
        fs::create_dir_all(folder.join("task/9")).unwrap();
        let stat = format!("{pid} (a) b) S 1 1 1 0 -1 0 0 0 0 0 {ticks} 1 0 0 20 0 4 0 777 1000 1 0");
        fs::write(folder.join("stat"), stat).unwrap();
        fs::write(folder.join("status"), format!("Name:\tx\nVmRSS:\t{kib} kB\nHugetlbPages:\t1 kB\n")).unwrap();
        fs::write(folder.join("task/9/children"), children).unwrap();
    }

    #[test]
    fn a_process_counts_with_those_it_started() {
        let proc = tempfile::tempdir().unwrap();
        process(proc.path(), 5, 10, 100, "6 8 ");
        process(proc.path(), 6, 20, 200, "");
        let cost = below(proc.path(), 5, Some(777)).unwrap();
        assert_eq!(cost.memory_bytes, 302 << 10);
        assert_eq!(cost.cpu_nanos % 32, 0, "32 ticks");
        assert_eq!(below(proc.path(), 5, Some(778)), None, "another process of this number");
        assert_eq!(below(proc.path(), 8, None), None);
    }

    #[test]
    fn this_process_has_used_something() {
        let cost = below(Path::new("/proc"), i32::try_from(std::process::id()).unwrap(), None).unwrap();
        assert!(cost.memory_bytes > 0);
    }

    #[test]
    fn what_is_no_stat_is_none() {
        for text in ["", ")", "1 (x) S 1 2", "1 (x) S 1 1 1 0 -1 0 0 0 0 0 a 1 0 0 20 0 4 0 777"] {
            assert_eq!(times(text), None, "{text:?}");
        }
        assert_eq!(resident("VmRSS: x kB\nVmRSS:"), 0);
    }
}
