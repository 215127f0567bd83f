//! Reclaims memory of a cgroup, above all page cache, so that a lower limit fits what is really in use.
//!
//! Lowering `memory.max` at once would do the same, but it kills processes if the rest does not fit.

use std::fs;
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use super::limits::write_file;

/// The file that reclaims as many bytes as are written to it, since Linux 5.19. The write fails with EAGAIN if it were fewer.
const RECLAIM: &str = "memory.reclaim";
/// The limit above which the kernel reclaims and slows processes down. Writing a lower one reclaims before the write returns.
const HIGH: &str = "memory.high";
/// The time in which the memory must be reclaimed.
const TIMEOUT: Duration = Duration::from_secs(5);
/// The number of attempts in a row that reclaim nothing, and the pause after each: changed pages become reclaimable when they are
/// written to their files.
const ATTEMPTS: (u32, Duration) = (5, Duration::from_millis(50));

/// Reclaims memory of a cgroup until it uses at most `limit` bytes. Returns how many it uses in the end, which are more if they cannot
/// be reclaimed.
pub(super) fn reclaim_down_to(cgroup: &Path, limit: u64) -> io::Result<u64> {
    let used = || {
        let text = fs::read_to_string(cgroup.join("memory.current"))?;
        text.trim().parse().map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
    };
    repeat(limit, used, |bytes| reclaim_once(cgroup, limit, bytes))
}

/// Reclaims until `used` returns at most `limit`, too many attempts reclaim nothing, or the time is over.
fn repeat(
    limit: u64,
    mut used: impl FnMut() -> io::Result<u64>,
    mut reclaim: impl FnMut(u64) -> io::Result<()>,
) -> io::Result<u64> {
    let deadline = Instant::now() + TIMEOUT;
    let mut before = used()?;
    let mut idle = 0;
    while before > limit && idle < ATTEMPTS.0 && Instant::now() < deadline {
        match reclaim(before - limit) {
            // A part was reclaimed.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            other => other?,
        }
        let after = used()?;
        if after < before {
            idle = 0;
        } else {
            idle += 1;
            std::thread::sleep(ATTEMPTS.1);
        }
        before = after;
    }
    Ok(before)
}

/// Asks the kernel to reclaim these bytes, or, if it is older than `memory.reclaim`, to reclaim down to `limit`.
fn reclaim_once(cgroup: &Path, limit: u64, bytes: u64) -> io::Result<()> {
    match write_file(&cgroup.join(RECLAIM), &bytes.to_string()) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        other => return other,
    }
    let high = cgroup.join(HIGH);
    let before = fs::read_to_string(&high)?;
    let lowered = write_file(&high, &limit.to_string());
    write_file(&high, before.trim())?;
    lowered
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    #[test]
    fn memory_is_reclaimed_as_long_as_there_is_some() {
        let (used, attempts) = (Cell::new(100), Cell::new(0));
        // Twenty bytes cannot be reclaimed, and each attempt gets half of the rest.
        let reclaim = |_bytes| {
            attempts.set(attempts.get() + 1);
            used.set(20 + (used.get() - 20) / 2);
            Err(io::ErrorKind::WouldBlock.into())
        };
        assert_eq!(repeat(30, || Ok(used.get()), reclaim).unwrap(), 30);
        assert_eq!(attempts.get(), 3);
        assert_eq!(repeat(10, || Ok(used.get()), reclaim).unwrap(), 20);
        assert_eq!(repeat(20, || Ok(used.get()), |_| panic!("nothing is to be reclaimed")).unwrap(), 20);
        let failed = repeat(10, || Ok(used.get()), |_| Err(io::ErrorKind::PermissionDenied.into()));
        assert_eq!(failed.unwrap_err().kind(), io::ErrorKind::PermissionDenied);
    }

    #[test]
    fn an_old_kernel_reclaims_when_another_limit_is_lowered() {
        let directory = tempfile::tempdir().unwrap();
        let file = |name: &str| directory.path().join(name);
        fs::write(file("memory.current"), "1000\n").unwrap();
        assert!(reclaim_down_to(directory.path(), 999).is_err());
        fs::write(file(HIGH), "max\n").unwrap();
        assert_eq!(reclaim_down_to(directory.path(), 999).unwrap(), 1000);
        assert_eq!(fs::read_to_string(file(HIGH)).unwrap(), "max");
        fs::write(file(RECLAIM), "").unwrap();
        assert_eq!(reclaim_down_to(directory.path(), 990).unwrap(), 1000);
        assert_eq!(fs::read_to_string(file(RECLAIM)).unwrap(), "10");
    }
}
