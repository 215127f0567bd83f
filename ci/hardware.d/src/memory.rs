//! Reads the memory of processes as the host's kernel counts it (proc_pid_smaps(5)).

use anyhow::Context;
use std::collections::BTreeSet;
use std::fs;

/// A mapping of /proc/PID/smaps, with its fields in KiB.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Mapping {
    /// The file, or empty.
    pub name: String,
    fields: Vec<(String, u64)>,
}

impl Mapping {
    /// Returns a field in MiB; 0 if the kernel does not have it.
    pub fn mib(&self, name: &str) -> f64 {
        let field = self.fields.iter().find(|(field, _)| field == name);
        field.map_or(0.0, |(_, kib)| *kib as f64 / 1024.0)
    }
}

/// Returns all mappings of a process.
pub fn mappings(pid: u32) -> anyhow::Result<Vec<Mapping>> {
    let path = format!("/proc/{pid}/smaps");
    Ok(parse_smaps(&fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?))
}

fn parse_smaps(smaps: &str) -> Vec<Mapping> {
    let mut all: Vec<Mapping> = Vec::new();
    for line in smaps.lines() {
        let mut words = line.split_whitespace();
        let Some(first) = words.next() else { continue };
        if let Some(field) = first.strip_suffix(':') {
            if let (Some(mapping), Some(Ok(kib))) = (all.last_mut(), words.next().map(str::parse)) {
                mapping.fields.push((field.to_owned(), kib));
            }
        } else {
            // Permissions, offset, device and inode precede the name.
            all.push(Mapping { name: words.skip(4).collect::<Vec<_>>().join(" "), fields: Vec::new() });
        }
    }
    all
}

/// Returns the mapping of the guest's memory: the largest one with resident pages.
pub fn guest_memory(mappings: &[Mapping]) -> Option<&Mapping> {
    let resident =
        |mapping: &Mapping| mapping.mib("Rss") + mapping.mib("Shared_Hugetlb") + mapping.mib("Private_Hugetlb");
    let candidates = mappings.iter().filter(|mapping| resident(mapping) > 0.0);
    candidates.max_by(|one, other| one.mib("Size").total_cmp(&other.mib("Size")))
}

/// Returns the resident MiB of a process with a guest, without the guest's memory and without the memory that a device shares
/// with the guest.
pub fn overhead_mib(mappings: &[Mapping]) -> f64 {
    let guest = guest_memory(mappings).map_or(0.0, |guest| guest.mib("Rss"));
    let others = mappings.iter().filter(|mapping| !mapping.name.contains("memfd:nacelle-guest"));
    let all: f64 = others.map(|mapping| mapping.mib("Rss")).sum();
    let shared = guest_memory(mappings).is_some_and(|guest| guest.name.contains("memfd:nacelle-guest"));
    if shared { all } else { all - guest }
}

/// Returns the proportional MiB of a process; 0 if it has ended.
pub fn pss_mib(pid: u32) -> f64 {
    let rollup = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap_or_default();
    parse_smaps(&rollup).iter().map(|mapping| mapping.mib("Pss")).sum()
}

/// Returns a process and all its descendants.
pub fn with_descendants(root: u32) -> BTreeSet<u32> {
    let pids = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = pids.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let parents: Vec<(u32, u32)> = pids
        .filter_map(|pid: u32| Some((pid, parse_parent(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)?)))
        .collect();
    let mut found = BTreeSet::from([root]);
    loop {
        let more: Vec<u32> = parents
            .iter()
            .filter(|(pid, of)| found.contains(of) && !found.contains(pid))
            .map(|(pid, _)| *pid)
            .collect();
        if more.is_empty() {
            return found;
        }
        found.extend(more);
    }
}

/// Returns the parent from /proc/PID/stat; the command's name before it may contain any characters.
fn parse_parent(stat: &str) -> Option<u32> {
    stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMAPS: &str = "\
7f0000000000-7f0008000000 rw-p 00000000 00:00 0
Size:             131072 kB
Rss:               40960 kB
AnonHugePages:     38912 kB
VmFlags: rd wr mr mw
7f1000000000-7f1040000000 ---p 00000000 00:00 0
Size:            1048576 kB
Rss:                   0 kB
7f2000000000-7f2001000000 rw-s 00000000 00:01 77                         /memfd:nacelle-guest (deleted)
Size:              16384 kB
Rss:                1024 kB
55d000000000-55d000400000 r-xp 00000000 08:01 123                        /usr/bin/nacelle pod
Size:               4096 kB
Rss:                3072 kB
Pss:                1536 kB
";

    #[test]
    fn the_guests_memory_is_the_largest_mapping_with_content() {
        let all = parse_smaps(SMAPS);
        assert_eq!(all.len(), 4);
        let guest = guest_memory(&all).unwrap();
        assert_eq!((guest.mib("Rss"), guest.mib("AnonHugePages"), guest.mib("Unknown")), (40.0, 38.0, 0.0));
        assert_eq!(overhead_mib(&all), 3.0, "neither the guest's memory nor what is shared with it");
        assert_eq!(all[3].name, "/usr/bin/nacelle pod");
        assert_eq!(parse_smaps("").len(), 0);
    }

    #[test]
    fn this_process_has_memory_and_a_parent() {
        let pid = std::process::id();
        assert!(pss_mib(pid) > 0.0 && !mappings(pid).unwrap().is_empty());
        assert!(with_descendants(std::os::unix::process::parent_id()).contains(&pid));
        assert_eq!(parse_parent("12 (a) b) S 7 12"), Some(7));
    }
}
