//! Owns: the tests of ingest with damaged, cut and odd streams.

use super::*;
use proptest::prelude::*;
use std::io::Write;

const LIMITS: Limits = Limits { bytes: 1 << 20, entries: 100 };

fn sample() -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    let mut add = |kind, path: &str, content: &[u8]| {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(kind);
        header.set_mode(0o644);
        header.set_size(content.len() as u64);
        builder.append_data(&mut header, path, content).unwrap();
    };
    add(tar::EntryType::Directory, "d", b"");
    add(tar::EntryType::Regular, "d/file", &[7; 5000]);
    add(tar::EntryType::Regular, "d/.wh.gone", b"");
    add(tar::EntryType::Regular, &"long/".repeat(60), b"");
    add(tar::EntryType::Regular, "last", b"abc");
    builder.into_inner().unwrap()
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn packed(packing: u8, bytes: &[u8]) -> Vec<u8> {
    match packing {
        0 => bytes.to_vec(),
        1 => gzip(bytes),
        _ => zstd::encode_all(bytes, 1).unwrap(),
    }
}

fn take(stream: &[u8]) -> Result<(Ingested, Vec<u8>), LayerError> {
    let blob = tempfile::NamedTempFile::new().unwrap();
    let ingested = ingest(stream, blob.as_file(), LIMITS)?;
    Ok((ingested, std::fs::read(blob.path()).unwrap()))
}

#[test]
fn every_packing_gives_the_same_layer_and_its_own_digest() {
    let tar = sample();
    for packing in 0..3 {
        let stream = packed(packing, &tar);
        let (ingested, blob) = take(&stream).unwrap();
        assert_eq!((ingested.digest, ingested.diff_id), (Digest::of(&stream), Digest::of(&tar)));
        assert_eq!((blob.len() as u64, ingested.index.blob_length), (12_288, 12_288));
        assert_eq!((&blob[..5000], &blob[8192..8195]), ([7; 5000].as_slice(), b"abc".as_slice()));
        assert!(blob[5000..8192].iter().all(|&byte| byte == 0));
    }
}

#[test]
fn streams_of_several_members_are_whole() {
    let tar = sample();
    let (one, two) = tar.split_at(3000);
    assert_eq!(take(&[gzip(one), gzip(two)].concat()).unwrap().0.diff_id, Digest::of(&tar));
    let zstd = [packed(2, one), packed(2, two)].concat();
    assert_eq!(take(&zstd).unwrap().0.diff_id, Digest::of(&tar));
}

#[test]
fn what_follows_the_archive_belongs_to_the_digest() {
    let tar = [sample(), vec![9; 10_000]].concat();
    assert_eq!(take(&gzip(&tar)).unwrap().0.diff_id, Digest::of(&tar));
}

#[test]
fn a_source_that_fails_is_the_reason() {
    struct Failing(usize);
    impl Read for Failing {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            let stream = gzip(&sample());
            let part = &stream[self.0..(self.0 + 40).min(stream.len() / 2)];
            if part.is_empty() {
                return Err(io::ErrorKind::ConnectionAborted.into());
            }
            buffer[..part.len()].copy_from_slice(part);
            self.0 += part.len();
            Ok(part.len())
        }
    }
    let blob = tempfile::tempfile().unwrap();
    match ingest(Failing(0), &blob, LIMITS) {
        Err(LayerError::Source(error)) => assert_eq!(error.kind(), io::ErrorKind::ConnectionAborted),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_bomb_ends_at_the_limit() {
    let bomb = gzip(&vec![0; 64 << 20]);
    let many_zeros = [sample()[..512].to_vec(), vec![0; 64 << 20]].concat();
    for stream in [bomb, gzip(&many_zeros)] {
        assert!(matches!(take(&stream), Err(LayerError::TooLarge { what: "bytes", limit: 1_048_576 })));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn damaged_streams_do_no_harm(
        packing in 0..3u8,
        inside: bool,
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let mut tar = sample();
        let mut stream = packed(packing, &tar);
        let damaged = if inside { &mut tar } else { &mut stream };
        for (at, byte) in &changes {
            *at.get_mut(damaged) = *byte;
        }
        if inside {
            stream = packed(packing, &tar);
        }
        if let Some(cut) = cut {
            stream.truncate(cut.index(stream.len()));
        }
        if let Ok((ingested, blob)) = take(&stream) {
            prop_assert_eq!(ingested.digest, Digest::of(&stream));
            prop_assert_eq!(blob.len() as u64, ingested.index.blob_length);
            // Whatever is taken keeps the rules on which the later stages rely.
            prop_assert_eq!(LayerIndex::decode(&ingested.index.encode()).unwrap(), ingested.index);
        }
    }
}
