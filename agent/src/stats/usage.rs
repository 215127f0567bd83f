//! Reads the figures of one cgroup from the files of cgroup v2 (Documentation/admin-guide/cgroup-v2.rst and
//! Documentation/accounting/psi.rst of Linux).

use nacelle_proto::common::{Pressure, Stall, Usage};
use std::fs;
use std::path::Path;

use crate::cgroup::{list_children, read_figure};

/// The most cgroups of a container in which processes are counted.
const MAX_CGROUPS: usize = 1000;

/// Reads the usage of a cgroup, or `None` if it does not exist. Figures whose files are missing are 0 or `None`.
pub fn read_cgroup(cgroup: &Path, swap_total: u64) -> Option<Usage> {
    let read = |name: &str| fs::read_to_string(cgroup.join(name)).ok();
    let number = |name: &str| read(name)?.trim().parse::<u64>().ok();
    let pressure = |name: &str| parse_pressure(&read(name)?);
    let cpu = read("cpu.stat")?;
    let memory = read("memory.stat").unwrap_or_default();
    let (faults, major) = (read_figure(&memory, "pgfault"), read_figure(&memory, "pgmajfault"));
    let events = read("memory.events").unwrap_or_default();
    let swap = number("memory.swap.current").unwrap_or(0);
    let swap_limit = number("memory.swap.max").unwrap_or(u64::MAX).min(swap_total);
    Some(Usage {
        cpu_nanos: read_figure(&cpu, "usage_usec").saturating_mul(1000),
        memory_bytes: number("memory.current").unwrap_or(0),
        memory_limit_bytes: number("memory.max"),
        anonymous_bytes: read_figure(&memory, "anon"),
        inactive_file_bytes: read_figure(&memory, "inactive_file"),
        page_faults: faults.saturating_sub(major),
        major_page_faults: major,
        swap_bytes: swap,
        swap_available_bytes: swap_limit.saturating_sub(swap),
        processes: u64::try_from(list_pids(cgroup).len()).unwrap_or(u64::MAX),
        cpu_pressure: pressure("cpu.pressure"),
        memory_pressure: pressure("memory.pressure"),
        io_pressure: pressure("io.pressure"),
        user_nanos: read_figure(&cpu, "user_usec").saturating_mul(1000),
        system_nanos: read_figure(&cpu, "system_usec").saturating_mul(1000),
        periods: read_figure(&cpu, "nr_periods"),
        throttled_periods: read_figure(&cpu, "nr_throttled"),
        throttled_nanos: read_figure(&cpu, "throttled_usec").saturating_mul(1000),
        cached_bytes: read_figure(&memory, "file"),
        mapped_bytes: read_figure(&memory, "file_mapped"),
        kernel_bytes: read_figure(&memory, "kernel"),
        peak_bytes: number("memory.peak").unwrap_or(0),
        limit_hits: read_figure(&events, "max"),
        oom_kills: read_figure(&events, "oom_kill"),
        threads: number("pids.current").unwrap_or(0),
        threads_limit: number("pids.max"),
    })
}

/// Lists the PIDs of the processes in a cgroup and below it.
pub fn list_pids(cgroup: &Path) -> Vec<i32> {
    let (mut pids, mut groups) = (Vec::new(), 0);
    let mut directories = vec![cgroup.to_owned()];
    while let Some(directory) = directories.pop().filter(|_| groups < MAX_CGROUPS) {
        groups += 1;
        let procs = fs::read_to_string(directory.join("cgroup.procs")).unwrap_or_default();
        pids.extend(procs.lines().filter_map(|line| line.parse::<i32>().ok()));
        directories.extend(list_children(&directory).into_iter().flatten().take(MAX_CGROUPS));
    }
    pids
}

/// Parses a line of /proc/meminfo, such as "SwapTotal", and returns bytes.
pub fn parse_meminfo(meminfo: &str, name: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    line.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024)
}

/// Parses the lines "some" and "full" of a pressure file; `None` if it is not one.
fn parse_pressure(text: &str) -> Option<Pressure> {
    let line = |word: &str| text.lines().find_map(|line| parse_stall(line.strip_prefix(word)?));
    Some(Pressure { some: Some(line("some ")?), full: line("full ") })
}

fn parse_stall(words: &str) -> Option<Stall> {
    let word = |name: &str| words.split(' ').find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
    Some(Stall {
        total_nanos: word("total")?.parse::<u64>().ok()?.saturating_mul(1000),
        avg10: parse_hundredths(word("avg10")?)?,
        avg60: parse_hundredths(word("avg60")?)?,
        avg300: parse_hundredths(word("avg300")?)?,
    })
}

/// Parses "12.34" as 1234: the kernel writes two digits after the point.
fn parse_hundredths(text: &str) -> Option<u32> {
    let (whole, part) = text.split_once('.')?;
    let part = if part.len() == 2 { part.parse::<u32>().ok()? } else { return None };
    whole.parse::<u32>().ok()?.checked_mul(100)?.checked_add(part)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn group(files: &[(&str, &str)]) -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        fs::create_dir(directory.path().join("below")).unwrap();
        files.iter().for_each(|(name, text)| fs::write(directory.path().join(name), text).unwrap());
        directory
    }

    #[test]
    fn the_usage_of_a_cgroup_is_read() {
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
        let usage = read_cgroup(group.path(), 1000).unwrap();
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
    fn missing_cgroup_files_yield_no_figures() {
        let unlimited = group(&[("cpu.stat", "usage_usec 1\n"), ("memory.max", "max\n"), ("cgroup.procs", "")]);
        let usage = read_cgroup(unlimited.path(), 0).unwrap();
        assert_eq!((usage.memory_limit_bytes, usage.swap_available_bytes, usage.processes), (None, 0, 0));
        assert_eq!(read_cgroup(&unlimited.path().join("gone"), 0), None);
    }

    #[test]
    fn swap_figures_are_those_of_the_guest() {
        let swap = |text| parse_meminfo(text, "SwapTotal");
        assert_eq!(swap("MemTotal:  5 kB\nSwapCached: 7 kB\nSwapTotal:      12 kB\n"), Some(12 * 1024));
        for wrong in ["", "SwapTotal: x kB", "SwapTotal: 1", "SwapTotal: 18014398509481984 kB", "Swap: 1 kB"] {
            assert_eq!(swap(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn an_invalid_pressure_file_yields_none() {
        for text in [
            "",
            "some",
            "some avg10=1 avg60=0.00 avg300=0.00 total=1",
            "full avg10=0.00 avg60=0.00 avg300=0.00 total=1",
        ] {
            assert_eq!(parse_pressure(text), None, "{text:?}");
        }
        assert_eq!(
            (parse_hundredths("99999999.00"), parse_hundredths("-1.00"), parse_hundredths("1.0")),
            (None, None, None)
        );
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(128))]
        #[test]
        fn no_text_makes_it_panic(text in "(some|full|avg10=|[0-9. =\n]|\\PC){0,40}") {
            let _ = (parse_pressure(&text), parse_meminfo(&text, "MemFree"), parse_hundredths(&text));
        }
    }
}
