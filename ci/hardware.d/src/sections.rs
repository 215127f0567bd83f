//! Runs the measurements, section by section. Each has a time limit of its own; one that fails does not prevent the others.

mod loops;
mod vms;
mod whole_pods;

use crate::pods::PodFactory;
use crate::report::FigureReport;
use std::io::Write;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// The common input of the sections.
pub struct SectionInput {
    pub pods: PodFactory,
    /// The initramfs with the measuring guest.
    pub guest: PathBuf,
    /// A directory on the disk that is measured.
    pub disk: PathBuf,
    /// Take few and short samples: enough to check that everything works.
    pub quick: bool,
    pub runtime: tokio::runtime::Runtime,
}

impl SectionInput {
    /// Returns the number of samples: `full`, or few in a quick run.
    fn sample_count(&self, full: usize) -> usize {
        if self.quick { full.min(2) } else { full }
    }

    /// Returns the duration of a loop in milliseconds.
    fn loop_ms(&self, full: u64) -> u64 {
        if self.quick { full.min(200) } else { full }
    }

    /// Returns the deadline of one step of a VM.
    fn step_deadline(&self) -> Instant {
        Instant::now() + Duration::from_secs(if self.quick { 120 } else { 30 })
    }

    /// Creates an empty directory.
    fn create_directory(&self, name: &str) -> anyhow::Result<PathBuf> {
        let path = self.disk.join(name);
        std::fs::create_dir_all(&path)?;
        Ok(path)
    }
}

/// A section: it writes its figures to the report, and ends soon after `until`.
pub type Section<W> = fn(&SectionInput, &mut FigureReport<W>, Instant) -> anyhow::Result<()>;

/// Returns the name, the time limit in seconds and the function of each section. Together they take less than eight minutes.
pub fn all<W: Write>() -> [(&'static str, u64, Section<W>); 8] {
    [
        ("boot", 75, vms::boot),
        ("snapshot", 40, vms::snapshot),
        ("concurrent", 60, whole_pods::concurrent),
        ("density", 70, whole_pods::density),
        ("exec", 20, whole_pods::exec),
        ("disk", 45, vms::disk),
        ("network", 35, vms::network),
        ("loops", 105, loops::loops),
    ]
}

/// The time limit of all sections.
pub const LIMIT: Duration = Duration::from_secs(8 * 60);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sections_leave_time_for_a_step_that_is_late() {
        let seconds: u64 = all::<Vec<u8>>().iter().map(|(_, seconds, _)| seconds).sum();
        assert!(Duration::from_secs(seconds + 20) < LIMIT, "{seconds} s");
    }
}
