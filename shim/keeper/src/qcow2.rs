//! Parses the header of an untrusted qcow2 file, and writes an empty overlay (QEMU's docs/interop/qcow2.txt). The functions are
//! pure.

/// The magic number of a qcow2 file.
const MAGIC: u32 = 0x5146_49fb;
/// The length in bytes of the header of version 3.
pub const HEADER: usize = 104;
/// The cluster size of overlays that are written here: 64 KiB.
const CLUSTER_BITS: u32 = 16;
const CLUSTER: u64 = 1 << CLUSTER_BITS;
/// The bytes of the disk that one L1 entry covers: an L2 table of 8192 clusters.
const L1_ENTRY_BYTES: u64 = CLUSTER << (CLUSTER_BITS - 3);
/// The largest disk in bytes: the reach of an L1 table of one cluster.
pub const MAX_SIZE: u64 = L1_ENTRY_BYTES * (CLUSTER / 8);
/// The known features that change how the file is read: dirty and corrupt are flags of its state; 3 is the compression type.
const KNOWN_FEATURES: u64 = 0b1011;

/// The format of a file by its first bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// A raw disk.
    Raw,
    /// A qcow2 file.
    Qcow2 {
        /// The size of the disk in bytes.
        size: u64,
    },
}

/// The reason that a qcow2 file is rejected.
pub type Refusal = &'static str;

/// Determines the format by the first bytes of a file, at most [`HEADER`] of them.
pub fn detect_format(head: &[u8]) -> Result<Format, Refusal> {
    let be32 = |at: usize| head.get(at..at + 4).and_then(|bytes| bytes.try_into().ok()).map(u32::from_be_bytes);
    let be64 = |at: usize| head.get(at..at + 8).and_then(|bytes| bytes.try_into().ok()).map(u64::from_be_bytes);
    if be32(0) != Some(MAGIC) {
        return Ok(Format::Raw);
    }
    let truncated = "its qcow2 header is truncated";
    let (version, backing) = (be32(4).ok_or(truncated)?, be64(8).ok_or(truncated)?);
    let (size, encryption) = (be64(24).ok_or(truncated)?, be32(32).ok_or(truncated)?);
    if !(2..=3).contains(&version) {
        return Err("a qcow2 file of version 2 or 3 is expected");
    }
    if backing != 0 {
        return Err("a qcow2 file with a backing file is not supported: merge both into one file");
    }
    if encryption != 0 {
        return Err("an encrypted qcow2 file is not supported");
    }
    if version == 3 && be64(72).ok_or(truncated)? & !KNOWN_FEATURES != 0 {
        return Err("a qcow2 file with an external data file or unknown features is not supported");
    }
    if size == 0 || size > MAX_SIZE {
        return Err("a disk of 1 byte to 4 TiB is expected");
    }
    Ok(Format::Qcow2 { size })
}

/// Returns the number of snapshots in a file with these first bytes.
pub fn snapshots(head: &[u8]) -> u32 {
    let count = head.get(60..64).and_then(|bytes| bytes.try_into().ok()).map(u32::from_be_bytes);
    count.unwrap_or_default()
}

/// Returns an empty qcow2 file of version 3 with its header, refcount table and L1 table. Unwritten clusters are those of the
/// backing file, which is passed to QEMU by name. `size` is the size of the disk in bytes, at most [`MAX_SIZE`].
pub fn empty_image(size: u64) -> Vec<u8> {
    // The clusters: 0 the header, 1 the refcount table, 2 its only refcount block, 3 the L1 table.
    let mut file = vec![0; usize::try_from(4 * CLUSTER).unwrap_or_default()];
    let mut write_at = |at: usize, bytes: &[u8]| {
        if let Some(target) = file.get_mut(at..at + bytes.len()) {
            target.copy_from_slice(bytes);
        }
    };
    let entries = u32::try_from(size.div_ceil(L1_ENTRY_BYTES).max(1)).unwrap_or(u32::MAX);
    write_at(0, &MAGIC.to_be_bytes());
    write_at(4, &3u32.to_be_bytes());
    write_at(20, &CLUSTER_BITS.to_be_bytes());
    write_at(24, &size.to_be_bytes());
    write_at(36, &entries.to_be_bytes());
    write_at(40, &(3 * CLUSTER).to_be_bytes());
    write_at(48, &CLUSTER.to_be_bytes());
    write_at(56, &1u32.to_be_bytes());
    // Refcounts have 16 bits.
    write_at(96, &4u32.to_be_bytes());
    write_at(100, &u32::try_from(HEADER).unwrap_or_default().to_be_bytes());
    let at = |cluster: u64| usize::try_from(cluster * CLUSTER).unwrap_or_default();
    write_at(at(1), &(2 * CLUSTER).to_be_bytes());
    for cluster in 0..4 {
        write_at(at(2) + 2 * cluster, &1u16.to_be_bytes());
    }
    file
}

/// Returns the offset of a file's snapshot table and the number of snapshots, from its header.
pub fn snapshot_table(head: &[u8]) -> (u64, u32) {
    let table = head.get(64..72).and_then(|bytes| bytes.try_into().ok()).map(u64::from_be_bytes);
    (table.unwrap_or_default(), snapshots(head))
}

/// Returns the names of the snapshots in a table, up to its end. Skips invalid names.
pub fn snapshot_names(table: &[u8], count: u32) -> Vec<String> {
    let mut names = Vec::new();
    let mut rest = table;
    for _ in 0..count {
        let be16 = |at: usize| rest.get(at..at + 2).and_then(|bytes| bytes.try_into().ok()).map(u16::from_be_bytes);
        let be32 = |at: usize| rest.get(at..at + 4).and_then(|bytes| bytes.try_into().ok()).map(u32::from_be_bytes);
        let (Some(id), Some(name), Some(extra)) = (be16(12), be16(14), be32(36)) else { break };
        let Some(begin) = usize::try_from(extra).ok().and_then(|extra| extra.checked_add(40 + usize::from(id))) else {
            break;
        };
        let end = begin.saturating_add(usize::from(name));
        let Some(text) = rest.get(begin..end) else { break };
        let plain = !text.is_empty() && text.len() <= 64 && text.iter().all(u8::is_ascii_graphic);
        names.extend(plain.then(|| String::from_utf8_lossy(text).into_owned()));
        // Entries begin at multiples of eight.
        rest = rest.get(end.next_multiple_of(8)..).unwrap_or_default();
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn head() -> Vec<u8> {
        empty_image(10 << 30)[..HEADER].to_vec()
    }

    #[test]
    fn a_written_header_is_detected() {
        assert_eq!(detect_format(&head()), Ok(Format::Qcow2 { size: 10 << 30 }));
        assert_eq!(detect_format(b"\xebc\x90"), Ok(Format::Raw));
        assert_eq!(detect_format(b""), Ok(Format::Raw));
    }

    #[test]
    fn files_that_refer_to_other_files_are_rejected() {
        let refusal = |at: usize, value: u8| {
            let mut head = head();
            head[at] = value;
            detect_format(&head).unwrap_err()
        };
        assert!(refusal(15, 1).contains("backing file"));
        assert!(refusal(79, 4).contains("external data file"));
        assert!(refusal(35, 2).contains("encrypted"));
        assert!(refusal(7, 9).contains("version"));
        assert!(refusal(24, 0xff).contains("4 TiB"));
        assert!(detect_format(&head()[..40]).unwrap_err().contains("truncated"));
    }

    #[test]
    fn snapshot_names_are_parsed() {
        let entry = |id: &str, name: &str, extra: usize| {
            let mut entry = vec![0; 40 + extra];
            entry[12..14].copy_from_slice(&(id.len() as u16).to_be_bytes());
            entry[14..16].copy_from_slice(&(name.len() as u16).to_be_bytes());
            entry[36..40].copy_from_slice(&(extra as u32).to_be_bytes());
            entry.extend([id.as_bytes(), name.as_bytes()].concat());
            entry.resize(entry.len().next_multiple_of(8), 0);
            entry
        };
        let table = [entry("1", "before", 16), entry("22", "a\nb", 0), entry("3", "after", 24)].concat();
        assert_eq!(snapshot_names(&table, 3), ["before", "after"]);
        assert_eq!(snapshot_names(&table, u32::MAX), ["before", "after"]);
        assert_eq!(snapshot_names(&table, 1), ["before"]);
        let mut head = head();
        head[63] = 3;
        head[70] = 5;
        assert_eq!((snapshot_table(&head), snapshot_table(b"QFI")), ((5 << 8, 3), (0, 0)));
    }

    proptest! {
        #[test]
        fn no_snapshot_table_causes_a_panic(table in prop::collection::vec(any::<u8>(), 0..300), count: u32) {
            snapshot_names(&table, count);
        }

        #[test]
        fn no_header_causes_a_panic(tail in prop::collection::vec(any::<u8>(), 0..120), truncated in 0usize..124) {
            let mut head = [&MAGIC.to_be_bytes()[..], &tail].concat();
            head.truncate(truncated);
            if let Ok(Format::Qcow2 { size }) = detect_format(&head) {
                prop_assert!(size > 0 && size <= MAX_SIZE);
            }
        }

        #[test]
        fn every_disk_size_has_a_sufficient_l1_table(size in 1..=MAX_SIZE) {
            let file = empty_image(size);
            let entries = u32::from_be_bytes(file[36..40].try_into().unwrap());
            prop_assert!(u64::from(entries) * L1_ENTRY_BYTES >= size && u64::from(entries) * 8 <= CLUSTER);
        }
    }
}
