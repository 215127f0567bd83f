//! Reads what the kernel has counted for this process (proc(5)), under the names that Prometheus' client libraries use. Blocks for
//! a few reads of /proc.

use super::family;
use nacelle_model::process::{ProcStat, status_field};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use std::fs;
use std::sync::atomic::AtomicU64;

/// Figures of a process. Those that cannot be read are absent.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct ProcessFigures {
    cpu_seconds: Option<f64>,
    /// In seconds since 1970.
    start_seconds: Option<f64>,
    resident_bytes: Option<u64>,
    virtual_bytes: Option<u64>,
    threads: Option<u64>,
    open_fds: Option<u64>,
    max_fds: Option<u64>,
}

impl ProcessFigures {
    /// Reads the figures of this process.
    pub(crate) fn read() -> ProcessFigures {
        let ticks = nix::unistd::sysconf(nix::unistd::SysconfVar::CLK_TCK).ok().flatten();
        let ticks = ticks.filter(|ticks| *ticks > 0).unwrap_or(100) as f64;
        let text = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let boot = text("/proc/stat").lines().find_map(|line| line.strip_prefix("btime ")?.trim().parse::<f64>().ok());
        let (max_fds, _) = nix::sys::resource::getrlimit(nix::sys::resource::Resource::RLIMIT_NOFILE).unwrap_or((0, 0));
        ProcessFigures {
            // One descriptor is that of the directory itself.
            open_fds: fs::read_dir("/proc/self/fd").ok().map(|entries| (entries.count() as u64).saturating_sub(1)),
            max_fds: (max_fds > 0).then_some(max_fds),
            ..ProcessFigures::parse(&text("/proc/self/stat"), &text("/proc/self/status"), ticks, boot)
        }
    }

    /// Parses /proc/PID/stat and status; `boot` is when the node started, in seconds since 1970.
    fn parse(stat: &str, status: &str, ticks: f64, boot: Option<f64>) -> ProcessFigures {
        let stat = ProcStat::parse(stat);
        let field = |number: usize| stat.as_ref()?.field::<u64>(number);
        let seconds = |ticks_used: u64| ticks_used as f64 / ticks;
        let of = |name: &str| status_field(status, name)?.split_whitespace().next()?.parse::<u64>().ok();
        ProcessFigures {
            cpu_seconds: field(14).zip(field(15)).map(|(user, system)| seconds(user.saturating_add(system))),
            start_seconds: field(22).zip(boot).map(|(start, boot)| boot + seconds(start)),
            resident_bytes: of("VmRSS").map(|kib| kib.saturating_mul(1024)),
            virtual_bytes: of("VmSize").map(|kib| kib.saturating_mul(1024)),
            threads: of("Threads"),
            open_fds: None,
            max_fds: None,
        }
    }

    /// Registers the figures.
    pub(crate) fn register(&self, registry: &mut Registry) {
        if let Some(seconds) = self.cpu_seconds {
            let counter = Counter::<f64, AtomicU64>::default();
            counter.inc_by(seconds);
            family::PROCESS_CPU.register(registry, counter);
        }
        for (family, value) in [
            (family::PROCESS_RESIDENT, self.resident_bytes),
            (family::PROCESS_VIRTUAL, self.virtual_bytes),
            (family::PROCESS_OPEN_FDS, self.open_fds),
            (family::PROCESS_MAX_FDS, self.max_fds),
            (family::PROCESS_THREADS, self.threads),
        ] {
            let Some(value) = value else { continue };
            let gauge = Gauge::<i64>::default();
            gauge.set(i64::try_from(value).unwrap_or(i64::MAX));
            family.register(registry, gauge);
        }
        if let Some(seconds) = self.start_seconds {
            let gauge = Gauge::<f64, AtomicU64>::default();
            gauge.set(seconds);
            family::PROCESS_START.register(registry, gauge);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{SystemTime, UNIX_EPOCH};

    #[test]
    fn the_figures_of_this_process_are_read() {
        let figures = ProcessFigures::read();
        assert!(figures.threads > Some(0) && figures.open_fds > Some(0), "{figures:?}");
        assert!(
            figures.resident_bytes > Some(1 << 16) && figures.virtual_bytes >= figures.resident_bytes,
            "{figures:?}"
        );
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs_f64();
        let start = figures.start_seconds.unwrap();
        assert!(start <= now + 1.0 && start > now - 7.0 * 24.0 * 3600.0, "{figures:?}");
    }

    #[test]
    fn missing_figures_are_absent() {
        let stat = "7 (a) b) S 1 7 7 0 -1 4194560 1 2 3 4 150 50 5 6 20 0 9 0 1000 123 45";
        let figures = ProcessFigures::parse(stat, "VmRSS:\t 8 kB\nThreads:\t9\n", 100.0, Some(5.0));
        assert_eq!((figures.cpu_seconds, figures.start_seconds), (Some(2.0), Some(15.0)));
        assert_eq!((figures.resident_bytes, figures.virtual_bytes, figures.threads), (Some(8192), None, Some(9)));
        assert_eq!(ProcessFigures::parse("x", "", 100.0, None), ProcessFigures::default());
    }
}
