//! Owns: the figures of one control group, read from the files of cgroup v2 (Documentation/admin-guide/cgroup-v2.rst and
//! Documentation/accounting/psi.rst of Linux).

use nacelle_proto::common::{Pressure, Stall, Usage};
use std::fs;
use std::path::Path;

use crate::cgroup::{children, figure};

/// Groups below a container's that are looked at for processes.
const MAX_GROUPS: usize = 1000;

/// What the group has used; none if it is not there. A file that is missing or cannot be read says 0 or nothing.
pub fn of(cgroup: &Path, swap_total: u64) -> Option<Usage> {
    let read = |name: &str| fs::read_to_string(cgroup.join(name)).ok();
    let number = |name: &str| read(name)?.trim().parse::<u64>().ok();
    let pressure = |name: &str| pressure(&read(name)?);
    let cpu = read("cpu.stat")?;
    let memory = read("memory.stat").unwrap_or_default();
    let (faults, major) = (figure(&memory, "pgfault"), figure(&memory, "pgmajfault"));
    let events = read("memory.events").unwrap_or_default();
    let swap = number("memory.swap.current").unwrap_or(0);
    let swap_limit = number("memory.swap.max").unwrap_or(u64::MAX).min(swap_total);
    Some(Usage {
        cpu_nanos: figure(&cpu, "usage_usec").saturating_mul(1000),
        memory_bytes: number("memory.current").unwrap_or(0),
        memory_limit_bytes: number("memory.max"),
        anonymous_bytes: figure(&memory, "anon"),
        inactive_file_bytes: figure(&memory, "inactive_file"),
        page_faults: faults.saturating_sub(major),
        major_page_faults: major,
        swap_bytes: swap,
        swap_available_bytes: swap_limit.saturating_sub(swap),
        processes: u64::try_from(pids(cgroup).len()).unwrap_or(u64::MAX),
        cpu_pressure: pressure("cpu.pressure"),
        memory_pressure: pressure("memory.pressure"),
        io_pressure: pressure("io.pressure"),
        user_nanos: figure(&cpu, "user_usec").saturating_mul(1000),
        system_nanos: figure(&cpu, "system_usec").saturating_mul(1000),
        periods: figure(&cpu, "nr_periods"),
        throttled_periods: figure(&cpu, "nr_throttled"),
        throttled_nanos: figure(&cpu, "throttled_usec").saturating_mul(1000),
        cached_bytes: figure(&memory, "file"),
        mapped_bytes: figure(&memory, "file_mapped"),
        kernel_bytes: figure(&memory, "kernel"),
        peak_bytes: number("memory.peak").unwrap_or(0),
        limit_hits: figure(&events, "max"),
        oom_kills: figure(&events, "oom_kill"),
        threads: number("pids.current").unwrap_or(0),
        threads_limit: number("pids.max"),
    })
}

/// The processes in it and below it.
pub fn pids(cgroup: &Path) -> Vec<i32> {
    let (mut pids, mut groups) = (Vec::new(), 0);
    let mut folders = vec![cgroup.to_owned()];
    while let Some(folder) = folders.pop().filter(|_| groups < MAX_GROUPS) {
        groups += 1;
        let procs = fs::read_to_string(folder.join("cgroup.procs")).unwrap_or_default();
        pids.extend(procs.lines().filter_map(|line| line.parse::<i32>().ok()));
        folders.extend(children(&folder).into_iter().flatten().take(MAX_GROUPS));
    }
    pids
}

/// The bytes that a line of /proc/meminfo says, such as "SwapTotal".
pub fn memory(meminfo: &str, name: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    line.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024)
}

/// The two lines of a pressure file; none if it is no such file.
fn pressure(text: &str) -> Option<Pressure> {
    let line = |word: &str| text.lines().find_map(|line| stall(line.strip_prefix(word)?));
    Some(Pressure { some: Some(line("some ")?), full: line("full ") })
}

fn stall(words: &str) -> Option<Stall> {
    let word = |name: &str| words.split(' ').find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
    Some(Stall {
        total_nanos: word("total")?.parse::<u64>().ok()?.saturating_mul(1000),
        avg10: hundredths(word("avg10")?)?,
        avg60: hundredths(word("avg60")?)?,
        avg300: hundredths(word("avg300")?)?,
    })
}

/// "12.34" as 1234: the kernel writes two digits.
fn hundredths(text: &str) -> Option<u32> {
    let (whole, part) = text.split_once('.')?;
    let part = if part.len() == 2 { part.parse::<u32>().ok()? } else { return None };
    whole.parse::<u32>().ok()?.checked_mul(100)?.checked_add(part)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn group(files: &[(&str, &str)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("below")).unwrap();
        files.iter().for_each(|(name, text)| fs::write(folder.path().join(name), text).unwrap());
        folder
    }

    #[test]
    fn a_group_is_read() {
        let group = group(&[
            (
                "cpu.stat",
                "usage_usec 1500\nuser_usec 1000\nsystem_usec 500\nnr_periods 6\nnr_throttled 4\nthrottled_usec 9\n",
            ),
            ("memory.current", "8192\n"),
            ("memory.max", "65536\n"),
            (
                "memory.stat",
                "anon 4096\nfile 12\nkernel 13\nfile_mapped 11\ninactive_file 2048\npgfault 9\npgmajfault 2\n",
            ),
            ("memory.peak", "9000\n"),
            ("memory.events", "low 0\nhigh 1\nmax 14\noom 3\noom_kill 2\n"),
            ("pids.current", "5\n"),
            ("pids.max", "77\n"),
            ("memory.swap.current", "100\n"),
            ("memory.swap.max", "max\n"),
            ("cgroup.procs", "1\n2\n"),
            ("below/cgroup.procs", "3\n"),
            ("cpu.pressure", "some avg10=1.50 avg60=0.07 avg300=100.00 total=12\n"),
            (
                "io.pressure",
                "some avg10=0.00 avg60=0.00 avg300=0.00 total=3\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=2\n",
            ),
        ]);
        let usage = of(group.path(), 1000).unwrap();
        let stall = |total_nanos| Stall { total_nanos, ..Stall::default() };
        let expected = Usage {
            cpu_nanos: 1_500_000,
            memory_bytes: 8192,
            memory_limit_bytes: Some(65536),
            anonymous_bytes: 4096,
            inactive_file_bytes: 2048,
            page_faults: 7,
            major_page_faults: 2,
            swap_bytes: 100,
            swap_available_bytes: 900,
            processes: 3,
            cpu_pressure: Some(Pressure {
                some: Some(Stall { total_nanos: 12_000, avg10: 150, avg60: 7, avg300: 10_000 }),
                full: None,
            }),
            memory_pressure: None,
            io_pressure: Some(Pressure { some: Some(stall(3000)), full: Some(stall(2000)) }),
            user_nanos: 1_000_000,
            system_nanos: 500_000,
            periods: 6,
            throttled_periods: 4,
            throttled_nanos: 9000,
            cached_bytes: 12,
            mapped_bytes: 11,
            kernel_bytes: 13,
            peak_bytes: 9000,
            limit_hits: 14,
            oom_kills: 2,
            threads: 5,
            threads_limit: Some(77),
        };
        assert_eq!(usage, expected);
    }

    #[test]
    fn without_limits_swap_or_files_there_are_no_figures() {
        let unlimited = group(&[("cpu.stat", "usage_usec 1\n"), ("memory.max", "max\n"), ("cgroup.procs", "")]);
        let usage = of(unlimited.path(), 0).unwrap();
        assert_eq!((usage.memory_limit_bytes, usage.swap_available_bytes, usage.processes), (None, 0, 0));
        assert_eq!(of(&unlimited.path().join("gone"), 0), None);
    }

    #[test]
    fn swap_of_the_machine() {
        let swap = |text| memory(text, "SwapTotal");
        assert_eq!(swap("MemTotal:  5 kB\nSwapCached: 7 kB\nSwapTotal:      12 kB\n"), Some(12 * 1024));
        for wrong in ["", "SwapTotal: x kB", "SwapTotal: 1", "SwapTotal: 18014398509481984 kB", "Swap: 1 kB"] {
            assert_eq!(swap(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn what_is_no_pressure_file_is_none() {
        for text in [
            "",
            "some",
            "some avg10=1 avg60=0.00 avg300=0.00 total=1",
            "full avg10=0.00 avg60=0.00 avg300=0.00 total=1",
        ] {
            assert_eq!(pressure(text), None, "{text:?}");
        }
        assert_eq!((hundredths("99999999.00"), hundredths("-1.00"), hundredths("1.0")), (None, None, None));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(128))]
        #[test]
        fn no_text_makes_it_panic(text in "(some|full|avg10=|[0-9. =\n]|\\PC){0,40}") {
            let _ = (pressure(&text), memory(&text, "MemFree"), hundredths(&text));
        }
    }
}
