//! Reads details of a container besides the plain figures of its cgroup: open descriptors and their limit (proc(5)), disks (io.stat),
//! huge pages (hugetlb.*.current); and the file system of the scratch disk.

use nacelle_proto::common::{Details, DiskUsage, FileSystem, HugepageUsage};
use nix::sys::stat::{major, minor, stat};
use nix::sys::statvfs::statvfs;
use std::fs;
use std::io;
use std::path::Path;

use super::usage::list_pids;

/// The most descriptors of one container that are counted.
const MAX_DESCRIPTORS: u64 = 10_000;
/// The most devices of one container that are reported.
const MAX_DISKS: usize = 32;

/// Reads the details of a container with this cgroup and this first process.
pub fn read_details(cgroup: &Path, pid: Option<i32>) -> Details {
    let proc = Path::new("/proc");
    let (descriptors, sockets) = count_descriptors(proc, &list_pids(cgroup));
    let limits = pid.and_then(|pid| fs::read_to_string(proc.join(format!("{pid}/limits"))).ok());
    let io = fs::read_to_string(cgroup.join("io.stat")).unwrap_or_default();
    Details {
        descriptors,
        sockets,
        open_files_limit: limits.and_then(|limits| parse_open_files(&limits)),
        disks: io.lines().filter_map(parse_disk).take(MAX_DISKS).collect(),
        hugepages: read_hugepages(cgroup),
    }
}

/// Counts the descriptors of processes, and how many of those are sockets.
fn count_descriptors(proc: &Path, pids: &[i32]) -> (u64, u64) {
    let (mut all, mut sockets) = (0, 0);
    let directories = pids.iter().map(|pid| proc.join(format!("{pid}/fd")));
    for entry in directories.filter_map(|directory| fs::read_dir(directory).ok()).flatten().flatten() {
        all += 1;
        let target = fs::read_link(entry.path()).unwrap_or_default();
        sockets += u64::from(target.as_os_str().as_encoded_bytes().starts_with(b"socket:["));
        if all == MAX_DESCRIPTORS {
            break;
        }
    }
    (all, sockets)
}

/// Parses the soft limit of open files in /proc/PID/limits.
fn parse_open_files(limits: &str) -> Option<u64> {
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files"))?;
    line.split_whitespace().next()?.parse().ok()
}

/// Parses a line of io.stat: "254:16 rbytes=1 wbytes=2 rios=3 wios=4 dbytes=5 dios=6".
fn parse_disk(line: &str) -> Option<DiskUsage> {
    let (number, figures) = line.split_once(' ')?;
    let (major, minor) = number.split_once(':')?;
    let (major, minor) = (major.parse().ok()?, minor.parse().ok()?);
    let figure = |name: &str| {
        let value = figures.split(' ').find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
        value.and_then(|value| value.parse().ok()).unwrap_or(0)
    };
    Some(DiskUsage {
        device: device_name(major, minor),
        major,
        minor,
        read_bytes: figure("rbytes"),
        written_bytes: figure("wbytes"),
        reads: figure("rios"),
        writes: figure("wios"),
    })
}

/// Returns the path of a block device, or its number if it has no name.
fn device_name(major: u32, minor: u32) -> String {
    let text = fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/uevent")).unwrap_or_default();
    let name = text.lines().find_map(|line| line.strip_prefix("DEVNAME="));
    name.map_or_else(|| format!("{major}:{minor}"), |name| format!("/dev/{name}"))
}

/// Reads the usage of each size of huge pages of a cgroup.
fn read_hugepages(cgroup: &Path) -> Vec<HugepageUsage> {
    let size = |name: &str| name.strip_prefix("hugetlb.")?.strip_suffix(".current").map(str::to_owned);
    let usage = |entry: fs::DirEntry| {
        // Not "hugetlb.2MB.rsvd.current".
        let size = size(entry.file_name().to_str()?).filter(|size| !size.contains('.'))?;
        let bytes = fs::read_to_string(entry.path()).ok()?.trim().parse().ok()?;
        Some(HugepageUsage { size, bytes })
    };
    let mut found: Vec<_> = fs::read_dir(cgroup).into_iter().flatten().flatten().filter_map(usage).collect();
    found.sort_by(|a, b| a.size.cmp(&b.size));
    found
}

/// Reads the figures of the file system of a directory.
pub fn read_file_system(directory: &Path) -> io::Result<FileSystem> {
    let (disk, number) = (statvfs(directory)?, stat(directory)?.st_dev);
    let small = |number: u64| u32::try_from(number).unwrap_or(u32::MAX);
    Ok(FileSystem {
        device: device_name(small(major(number)), small(minor(number))),
        bytes: disk.blocks().saturating_mul(disk.fragment_size()),
        inodes: disk.files(),
        free_inodes: disk.files_free(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn disks_by_their_lines() {
        let found = parse_disk("4095:4095 rbytes=1 wbytes=2 rios=3 wios=4 dbytes=5 dios=6").unwrap();
        let expected = DiskUsage {
            device: "4095:4095".into(),
            major: 4095,
            minor: 4095,
            read_bytes: 1,
            written_bytes: 2,
            reads: 3,
            writes: 4,
        };
        assert_eq!(found, expected);
        assert_eq!(parse_disk("1:2 rios=7").map(|disk| (disk.reads, disk.read_bytes)), Some((7, 0)));
        assert_eq!(
            (parse_disk(""), parse_disk("1:2"), parse_disk("x:2 rios=7"), parse_disk("12 rios=7")),
            (None, None, None, None)
        );
    }

    #[test]
    fn sockets_are_descriptors_too() {
        let proc = tempfile::tempdir().unwrap();
        let fds = proc.path().join("5/fd");
        fs::create_dir_all(&fds).unwrap();
        symlink("/dev/null", fds.join("0")).unwrap();
        symlink("socket:[77]", fds.join("3")).unwrap();
        // Process 6 has ended.
        assert_eq!(count_descriptors(proc.path(), &[6, 5]), (2, 1));
        let own = i32::try_from(std::process::id()).unwrap();
        let _open = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let (all, sockets) = count_descriptors(Path::new("/proc"), &[own]);
        assert!(sockets >= 1 && all > sockets, "{all} {sockets}");
    }

    #[test]
    fn the_soft_limit_of_open_files() {
        let limits = "Limit    Soft Limit    Hard Limit   Units\nMax open files            1024    4096    files\n";
        assert_eq!(parse_open_files(limits), Some(1024));
        assert_eq!(
            (parse_open_files("Max open files   unlimited  unlimited files"), parse_open_files("")),
            (None, None)
        );
        assert!(parse_open_files(&fs::read_to_string("/proc/self/limits").unwrap()).is_some());
    }

    #[test]
    fn huge_pages_by_size() {
        let group = tempfile::tempdir().unwrap();
        for (name, text) in [
            ("hugetlb.2MB.current", "4194304\n"),
            ("hugetlb.1GB.current", "0\n"),
            ("hugetlb.2MB.rsvd.current", "1\n"),
            ("hugetlb.2MB.max", "max\n"),
        ] {
            fs::write(group.path().join(name), text).unwrap();
        }
        let page = |size: &str, bytes| HugepageUsage { size: size.into(), bytes };
        assert_eq!(read_hugepages(group.path()), [page("1GB", 0), page("2MB", 4 << 20)]);
        assert!(read_hugepages(&group.path().join("none")).is_empty());
    }

    #[test]
    fn a_file_system_has_a_size_and_a_name() {
        let directory = tempfile::tempdir().unwrap();
        let found = read_file_system(directory.path()).unwrap();
        assert!(found.bytes > 0 && !found.device.is_empty());
        assert!(read_file_system(&directory.path().join("none")).is_err());
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(128))]
        #[test]
        fn no_text_makes_it_panic(text in "([0-9]{1,5}:[0-9]{1,5} |[rw]bytes=|Max open files|[0-9 \n]|\\PC){0,40}") {
            let _ = (parse_disk(&text), parse_open_files(&text));
        }
    }
}
