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
const REACH: u64 = CLUSTER << (CLUSTER_BITS - 3);
/// The largest disk in bytes: the reach of an L1 table of one cluster.
pub const MAX_SIZE: u64 = REACH * (CLUSTER / 8);
/// The known features that change how the file is read: dirty and corrupt are flags of its state; 3 is the compression type.
const KNOWN: u64 = 0b1011;

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
pub fn format(head: &[u8]) -> Result<Format, Refusal> {
    let four = |at: usize| head.get(at..at + 4).and_then(|bytes| bytes.try_into().ok()).map(u32::from_be_bytes);
    let eight = |at: usize| head.get(at..at + 8).and_then(|bytes| bytes.try_into().ok()).map(u64::from_be_bytes);
    if four(0) != Some(MAGIC) {
        return Ok(Format::Raw);
    }
    let cut = "its qcow2 header is cut";
    let (version, backing) = (four(4).ok_or(cut)?, eight(8).ok_or(cut)?);
    let (size, encryption) = (eight(24).ok_or(cut)?, four(32).ok_or(cut)?);
    if !(2..=3).contains(&version) {
        return Err("a qcow2 file of version 2 or 3 is expected");
    }
    if backing != 0 {
        return Err("a qcow2 file that lies over another file is not taken: make one file of both");
    }
    if encryption != 0 {
        return Err("an encrypted qcow2 file is not taken");
    }
    if version == 3 && eight(72).ok_or(cut)? & !KNOWN != 0 {
        return Err("a qcow2 file whose data lie in another file, or that has unknown features, is not taken");
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
pub fn empty(size: u64) -> Vec<u8> {
    // The clusters: 0 the header, 1 the refcount table, 2 its only refcount block, 3 the L1 table.
    let mut file = vec![0; usize::try_from(4 * CLUSTER).unwrap_or_default()];
    let mut put = |at: usize, bytes: &[u8]| {
        if let Some(place) = file.get_mut(at..at + bytes.len()) {
            place.copy_from_slice(bytes);
        }
    };
    let entries = u32::try_from(size.div_ceil(REACH).max(1)).unwrap_or(u32::MAX);
    put(0, &MAGIC.to_be_bytes());
    put(4, &3u32.to_be_bytes());
    put(20, &CLUSTER_BITS.to_be_bytes());
    put(24, &size.to_be_bytes());
    put(36, &entries.to_be_bytes());
    put(40, &(3 * CLUSTER).to_be_bytes());
    put(48, &CLUSTER.to_be_bytes());
    put(56, &1u32.to_be_bytes());
    // Refcounts have 16 bits.
    put(96, &4u32.to_be_bytes());
    put(100, &u32::try_from(HEADER).unwrap_or_default().to_be_bytes());
    let at = |cluster: u64| usize::try_from(cluster * CLUSTER).unwrap_or_default();
    put(at(1), &(2 * CLUSTER).to_be_bytes());
    for cluster in 0..4 {
        put(at(2) + 2 * cluster, &1u16.to_be_bytes());
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
        let two = |at: usize| rest.get(at..at + 2).and_then(|bytes| bytes.try_into().ok()).map(u16::from_be_bytes);
        let four = |at: usize| rest.get(at..at + 4).and_then(|bytes| bytes.try_into().ok()).map(u32::from_be_bytes);
        let (Some(id), Some(name), Some(extra)) = (two(12), two(14), four(36)) else { break };
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
        empty(10 << 30)[..HEADER].to_vec()
    }

    #[test]
    fn what_is_written_is_read() {
        assert_eq!(format(&head()), Ok(Format::Qcow2 { size: 10 << 30 }));
        assert_eq!(format(b"\xebc\x90"), Ok(Format::Raw));
        assert_eq!(format(b""), Ok(Format::Raw));
    }

    #[test]
    fn files_that_lead_to_other_files_are_refused() {
        let refusal = |at: usize, value: u8| {
            let mut head = head();
            head[at] = value;
            format(&head).unwrap_err()
        };
        assert!(refusal(15, 1).contains("over another"), "a backing file");
        assert!(refusal(79, 4).contains("another file"), "an external data file");
        assert!(refusal(35, 2).contains("encrypted"));
        assert!(refusal(7, 9).contains("version"));
        assert!(refusal(24, 0xff).contains("4 TiB"));
        assert!(format(&head()[..40]).unwrap_err().contains("cut"));
    }

    #[test]
    fn snapshots_have_names() {
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
        fn no_table_makes_it_panic(table in prop::collection::vec(any::<u8>(), 0..300), count: u32) {
            snapshot_names(&table, count);
        }

        #[test]
        fn no_header_makes_it_panic(tail in prop::collection::vec(any::<u8>(), 0..120), cut in 0usize..124) {
            let mut head = [&MAGIC.to_be_bytes()[..], &tail].concat();
            head.truncate(cut);
            if let Ok(Format::Qcow2 { size }) = format(&head) {
                prop_assert!(size > 0 && size <= MAX_SIZE);
            }
        }

        #[test]
        fn every_size_has_its_table(size in 1..=MAX_SIZE) {
            let file = empty(size);
            let entries = u32::from_be_bytes(file[36..40].try_into().unwrap());
            prop_assert!(u64::from(entries) * REACH >= size && u64::from(entries) * 8 <= CLUSTER);
        }
    }
}
