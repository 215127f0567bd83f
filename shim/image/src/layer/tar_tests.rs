//! Tests the tar reader with real archives, broken archives and arbitrary bytes.

use super::*;
use proptest::prelude::*;

/// Returns a header block with a correct checksum.
fn block(name: &[u8], flag: u8, size: u64, change: impl FnOnce(&mut [u8; 512])) -> [u8; 512] {
    let mut raw = [0u8; 512];
    raw[..name.len()].copy_from_slice(name);
    raw[100..107].copy_from_slice(b"0000644");
    raw[108..115].copy_from_slice(b"0000001");
    raw[116..123].copy_from_slice(b"0000002");
    raw[124..135].copy_from_slice(format!("{size:011o}").as_bytes());
    raw[136..147].copy_from_slice(b"00000000012");
    raw[156] = flag;
    raw[257..265].copy_from_slice(b"ustar\x0000");
    change(&mut raw);
    raw[148..156].copy_from_slice(b"        ");
    let sum: u32 = raw.iter().map(|&byte| u32::from(byte)).sum();
    raw[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
    raw
}

fn padded(content: &[u8]) -> Vec<u8> {
    let mut padded = content.to_vec();
    padded.resize(content.len().next_multiple_of(512), 0);
    padded
}

fn special(flag: u8, content: &[u8]) -> Vec<u8> {
    [block(b"special", flag, content.len() as u64, |_| ()).as_slice(), &padded(content)].concat()
}

fn pax(records: &[(&str, &str)]) -> Vec<u8> {
    let mut content = Vec::new();
    for (key, value) in records {
        let body = key.len() + value.len() + 3;
        let length = (body + 1..).find(|length| length.to_string().len() + body == *length).unwrap();
        content.extend_from_slice(format!("{length} {key}={value}\n").as_bytes());
    }
    special(b'x', &content)
}

fn read(bytes: &[u8]) -> Result<Vec<(EntryHeader, Vec<u8>)>, TarError> {
    let mut archive = TarReader::new(bytes);
    let mut all = Vec::new();
    while let Some(header) = archive.next_entry()? {
        let mut content = Vec::new();
        archive.read_to_end(&mut content).map_err(|source| TarError::Read { at: 0, source })?;
        all.push((header, content));
    }
    Ok(all)
}

#[test]
fn an_archive_may_end_with_the_data_of_its_last_entry() {
    let archive = [block(b"f", b'0', 5, |_| ()).as_slice(), b"bytes"].concat();
    for end in [0, 1, 506, 507] {
        let entries = read(&[archive.as_slice(), &vec![0; end]].concat()).unwrap();
        assert_eq!(entries.iter().map(|(_, content)| content.as_slice()).collect::<Vec<_>>(), [b"bytes"], "{end}");
    }
    assert!(read(&archive[..archive.len() - 1]).is_err(), "a byte of the data is missing");
    assert!(read(&[archive.as_slice(), &[0; 508]].concat()).is_err(), "a part of the next header");
}

#[test]
fn an_attribute_with_an_empty_value_is_none() {
    let records = [("a", "1"), ("b", ""), ("a", ""), ("c", ""), ("c", "3"), ("d", "4")];
    let names = records.map(|(name, value)| (format!("SCHILY.xattr.user.{name}"), value));
    let archive =
        [pax(&names.each_ref().map(|(name, value)| (name.as_str(), *value))), block(b"f", b'0', 0, |_| ()).to_vec()];
    let found = read(&archive.concat()).unwrap().remove(0).0.xattrs;
    assert_eq!(found, [("user.c", "3"), ("user.d", "4")].map(|(name, value)| (name.into(), value.into())));
}

#[test]
fn pax_headers_before_one_entry_have_an_end() {
    let value = "v".repeat(1_000_000);
    let many = |count| {
        let headers = (0..count).map(|at: u32| pax(&[(&format!("SCHILY.xattr.user.{at}"), &value)]));
        [headers.collect::<Vec<_>>().concat(), block(b"a", b'0', 0, |_| ()).to_vec()].concat()
    };
    assert_eq!(read(&many(4)).unwrap()[0].0.xattrs.len(), 4);
    assert!(matches!(read(&many(5)), Err(TarError::Header { .. })));
    // The limit is per entry.
    assert_eq!(read(&[many(4), many(4)].concat()).unwrap().len(), 2);
}

#[test]
fn prefixes_long_names_and_pax_names_are_whole() {
    let with_prefix = block(b"name", b'0', 0, |raw| raw[345..351].copy_from_slice(b"prefix"));
    let long = vec![b'l'; 300];
    let archive = [
        with_prefix.to_vec(),
        special(b'L', &[long.as_slice(), b"\0"].concat()),
        special(b'K', b"target\0"),
        block(b"short", b'2', 0, |_| ()).to_vec(),
        pax(&[("path", "päth"), ("mtime", "-1.5"), ("uid", "70000"), ("size", "3")]),
        block(b"x", b'0', 0, |_| ()).to_vec(),
        padded(b"abc"),
        pax(&[("path", "kept"), ("path", "")]),
        block(b"own", b'0', 0, |_| ()).to_vec(),
        vec![0; 1024],
    ]
    .concat();
    let all = read(&archive).unwrap();
    let paths: Vec<_> = all.iter().map(|(header, _)| header.path.as_slice()).collect();
    assert_eq!(paths, [b"prefix/name".as_slice(), &long, "päth".as_bytes(), b"own"]);
    assert_eq!(all[1].0.link, b"target");
    let (header, content) = &all[2];
    assert_eq!((header.mtime, header.nanos, header.uid, header.gid), (-2, 500_000_000, 70_000, 2));
    assert_eq!(content, b"abc");
}

#[test]
fn numbers_in_base_256_are_read() {
    let raw = block(b"a", b'0', 0, |raw| {
        raw[108..116].copy_from_slice(&[0x80, 0, 0, 0, 0, 1, 0, 0]);
        raw[136..148].copy_from_slice(&[0xff; 12]);
    });
    let all = read(&raw).unwrap();
    assert_eq!((all[0].0.uid, all[0].0.mtime), (65_536, -1));
}

#[test]
fn only_files_have_data_and_globals_are_left_out() {
    let archive = [
        special(b'g', b"12 path=xx\n "),
        block(b"link", b'1', 100, |_| ()).to_vec(),
        block(b"directory/", b'0', 0, |_| ()).to_vec(),
        block(b"dev", b'3', 5, |raw| {
            raw[329..336].copy_from_slice(b"0000010");
            raw[337..344].copy_from_slice(b"0000003");
        })
        .to_vec(),
    ]
    .concat();
    let all = read(&archive).unwrap();
    assert_eq!(
        all.iter().map(|(header, _)| header.kind).collect::<Vec<_>>(),
        [EntryType::Hardlink, EntryType::Directory, EntryType::Char]
    );
    assert_eq!(all[2].0.device, (8, 3));
}

#[test]
fn old_sparse_maps_go_on_in_further_blocks() {
    let piece = |offset: u64, length: u64| format!("{offset:011o}\0{length:011o}\0").into_bytes();
    let first = block(b"s", b'S', 10, |raw| {
        for number in 0..4 {
            raw[386 + number * 24..][..24].copy_from_slice(&piece(number as u64 * 1000, 2));
        }
        raw[482] = 1;
        raw[483..494].copy_from_slice(format!("{:011o}", 9000).as_bytes());
    });
    let mut second = [0; 512];
    second[..24].copy_from_slice(&piece(8000, 2));
    let archive = [first.as_slice(), &second, &padded(b"aabbccddee")].concat();
    let (header, content) = read(&archive).unwrap().remove(0);
    assert_eq!(header.size, 9000);
    assert_eq!(header.sparse.unwrap(), [(0, 2), (1000, 2), (2000, 2), (3000, 2), (8000, 2)]);
    assert_eq!(content, b"aabbccddee");
}

#[test]
fn maps_that_do_not_fit_are_refused() {
    for map in ["0,2,1,2", "0,9", "7,2", "0,1", "18446744073709551615,2", "0", "a,b"] {
        let records = [("GNU.sparse.map", map), ("GNU.sparse.size", "8"), ("GNU.sparse.name", "n")];
        let archive = [pax(&records), block(b"s", b'0', 4, |_| ()).to_vec(), padded(b"abcd")].concat();
        assert!(read(&archive).is_err(), "{map}");
    }
    let records = [("GNU.sparse.major", "1"), ("GNU.sparse.minor", "0"), ("GNU.sparse.realsize", "8")];
    for data in ["9999999999\n", "1\n0\n", "x\n", "\n", "1\n0\n4\n"] {
        let archive =
            [pax(&records), block(b"s", b'0', data.len() as u64, |_| ()).to_vec(), padded(data.as_bytes())].concat();
        assert!(read(&archive).is_err(), "{data:?}");
    }
}

#[test]
fn broken_headers_are_refused() {
    let good = block(b"a", b'0', 600, |_| ());
    let mut wrong_sum = good;
    wrong_sum[0] = b'b';
    let cases: Vec<Vec<u8>> = vec![
        wrong_sum.to_vec(),
        good[..300].to_vec(),
        [good.as_slice(), &[1; 512]].concat(),
        block(b"a", b'9', 0, |_| ()).to_vec(),
        block(b"a", b'0', 0, |raw| raw[124..130].copy_from_slice(b"-00001")).to_vec(),
        block(b"a", b'0', 0, |raw| raw[124] = 0xff).to_vec(),
        block(b"a", b'3', 0, |raw| raw[329..336].copy_from_slice(b"7777777")).to_vec(),
        special(b'x', b"8 path=a\n"),
        special(b'x', b"99 path=a\n"),
        pax(&[("path", "a\0b")]),
        pax(&[("uid", "-1")]),
        pax(&[("GNU.sparse.numbytes", "1")]),
        block(b"long", b'L', 2 << 20, |_| ()).to_vec(),
    ];
    for (number, archive) in cases.into_iter().enumerate() {
        assert!(read(&[archive, good[..0].to_vec()].concat()).is_err(), "{number}");
    }
}

#[test]
fn what_the_tar_crate_writes_is_read() {
    let mut builder = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_gnu();
    header.set_size(3);
    header.set_mode(0o4711);
    let path = "p/".repeat(100) + "file";
    builder.append_data(&mut header, &path, b"abc".as_slice()).unwrap();
    let all = read(&builder.into_inner().unwrap()).unwrap();
    assert_eq!(
        (all[0].0.path.as_slice(), all[0].0.mode, all[0].1.as_slice()),
        (path.as_bytes(), 0o4711, b"abc".as_slice())
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn any_bytes_are_read_without_panic(
        changes in prop::collection::vec((0..512usize, any::<u8>()), 0..6),
        flag in prop::sample::select(b"0123456gxLKSD7".to_vec()),
        size in 0..3000u64,
        rest in prop::collection::vec(any::<u8>(), 0..3000),
    ) {
        let raw = block(b"name", flag, size, |raw| {
            for (at, byte) in &changes { raw[*at] = *byte; }
        });
        let bytes = [raw.as_slice(), &rest, raw.as_slice()].concat();
        if let Ok(all) = read(&bytes) {
            prop_assert!(all.iter().map(|(_, content)| content.len()).sum::<usize>() <= bytes.len());
        }
    }

    #[test]
    fn any_pax_records_are_read_without_harm(
        key in "(path|size|uid|mtime|GNU.sparse.(map|size|major|offset|numbytes|realsize|numblocks)|SCHILY.xattr.user.x)",
        value in "[0-9a-z.,\\-]{0,30}",
        other in "\\PC{0,40}",
    ) {
        let archive = [pax(&[(&key, &value)]), special(b'x', other.as_bytes()), block(b"n", b'0', 0, |_| ()).to_vec()].concat();
        let _ = read(&archive);
        let _ = read(&[pax(&[(&key, &value)]), block(b"n", b'0', 0, |_| ()).to_vec()].concat());
    }

    #[test]
    fn times_come_back(seconds in -1_000_000i64..1_000_000, nanos in 0..1_000_000_000u32) {
        let value = if seconds < 0 && nanos > 0 {
            format!("-{}.{:09}", -(seconds + 1), 1_000_000_000 - nanos)
        } else {
            format!("{seconds}.{nanos:09}")
        };
        prop_assert_eq!(parse_time(value.as_bytes()), Some((seconds, nanos)));
    }
}
