//! Tests ingest with damaged, truncated, unusual and expensive streams.

use super::*;
use crate::budget::{Cancel, MemoryPool};
use crate::layer::index::LayerIndex;
use crate::worker::{Launch, UnpackError, UnpackTarget, unpack_layer};
use nacelle_model::digest::Digest;
use proptest::prelude::*;
use std::io::Write;

const LIMITS: LayerLimits = LayerLimits { bytes: 1 << 20, entries: 100 };

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

fn budget() -> Budget {
    Budget::layer(&MemoryPool::new(1 << 30), &Cancel::default())
}

fn index(ingested: &IngestedLayer) -> LayerIndex<'_> {
    LayerIndex::open(&ingested.index).unwrap()
}

/// A layer that was unpacked.
#[derive(Debug)]
struct IngestedLayer {
    digest: Digest,
    diff_id: Digest,
    index: Vec<u8>,
}

/// Unpacks a layer as the store does, with threads in place of processes.
fn ingest_layer(
    source: impl Read,
    blob: &File,
    limits: LayerLimits,
    budget: &mut Budget,
) -> Result<IngestedLayer, UnpackError> {
    let index = tempfile::NamedTempFile::new().unwrap();
    let target = UnpackTarget { blob, index: index.as_file() };
    let unpacked = unpack_layer(Launch::Thread, source, target, limits, budget)?;
    let index = std::fs::read(index.path()).unwrap();
    Ok(IngestedLayer { digest: unpacked.digest, diff_id: unpacked.diff_id, index })
}

fn ingest_sample(stream: &[u8]) -> Result<(IngestedLayer, Vec<u8>), UnpackError> {
    let blob = tempfile::NamedTempFile::new().unwrap();
    let ingested = ingest_layer(stream, blob.as_file(), LIMITS, &mut budget())?;
    Ok((ingested, std::fs::read(blob.path()).unwrap()))
}

#[test]
fn every_packing_gives_the_same_layer_and_its_own_digest() {
    let tar = sample();
    for packing in 0..3 {
        let stream = packed(packing, &tar);
        let (ingested, blob) = ingest_sample(&stream).unwrap();
        assert_eq!((ingested.digest, ingested.diff_id), (Digest::of(&stream), Digest::of(&tar)));
        assert_eq!((blob.len() as u64, index(&ingested).blob_length), (12_288, 12_288));
        assert_eq!((&blob[..5000], &blob[8192..8195]), ([7; 5000].as_slice(), b"abc".as_slice()));
        assert!(blob[5000..8192].iter().all(|&byte| byte == 0));
    }
}

#[test]
fn streams_of_several_members_are_whole() {
    let tar = sample();
    let (one, two) = tar.split_at(3000);
    assert_eq!(ingest_sample(&[gzip(one), gzip(two)].concat()).unwrap().0.diff_id, Digest::of(&tar));
    let zstd = [packed(2, one), packed(2, two)].concat();
    assert_eq!(ingest_sample(&zstd).unwrap().0.diff_id, Digest::of(&tar));
}

#[test]
fn what_follows_the_archive_belongs_to_the_digest() {
    let tar = [sample(), vec![9; 10_000]].concat();
    assert_eq!(ingest_sample(&gzip(&tar)).unwrap().0.diff_id, Digest::of(&tar));
}

#[test]
fn a_source_that_fails_is_the_reason() {
    struct Failing(usize);
    impl Read for Failing {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            let stream = gzip(&sample());
            let part = &stream[self.0..(self.0 + buffer.len().min(40)).min(stream.len() / 2)];
            if part.is_empty() {
                return Err(io::ErrorKind::ConnectionAborted.into());
            }
            buffer[..part.len()].copy_from_slice(part);
            self.0 += part.len();
            Ok(part.len())
        }
    }
    let blob = tempfile::tempfile().unwrap();
    match ingest_layer(Failing(0), &blob, LIMITS, &mut budget()) {
        Err(UnpackError::Source(error)) => assert_eq!(error.kind(), io::ErrorKind::ConnectionAborted),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_bomb_ends_at_the_limit() {
    let bomb = gzip(&vec![0; 64 << 20]);
    let many_zeros = [sample()[..512].to_vec(), vec![0; 64 << 20]].concat();
    for stream in [bomb, gzip(&many_zeros)] {
        let refused = ingest_sample(&stream).unwrap_err();
        assert_eq!(refused.to_string(), "the layer has more than 1048576 bytes");
    }
}

/// Returns a tar of files, each with these pax records before it.
fn with_records(files: usize, records: &[(&str, &[u8])]) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    for n in 0..files {
        builder.append_pax_extensions(records.iter().copied()).unwrap();
        let mut header = tar::Header::new_ustar();
        header.set_size(0);
        header.set_mode(0o644);
        builder.append_data(&mut header, format!("f{n}"), &b""[..]).unwrap();
    }
    builder.into_inner().unwrap()
}

#[test]
fn an_entry_has_so_many_attributes() {
    let names: Vec<_> = (0..200).map(|n| format!("SCHILY.xattr.user.{n}")).collect();
    let records = |count: usize| names.iter().take(count).map(|name| (name.as_str(), &b"v"[..])).collect::<Vec<_>>();
    let tar = with_records(1, &records(128));
    let (ingested, _) = ingest_sample(&gzip(&tar)).unwrap();
    assert_eq!(index(&ingested).entries().next().unwrap().unwrap().meta.xattrs.len(), 128);
    let error = ingest_sample(&gzip(&with_records(1, &records(129)))).unwrap_err();
    assert!(
        matches!(&error, UnpackError::Layer(LayerError::Tar(TarError::Header { why, .. })) if why.contains("128")),
        "{error:?}"
    );
}

#[test]
fn an_index_that_is_too_large_is_refused() {
    let value = vec![b'x'; 60_000];
    let tar = gzip(&with_records(99, &[("SCHILY.xattr.user.a", &value)]));
    let blob = tempfile::tempfile().unwrap();
    // A layer gets a quarter of the pool: here the fixed part and 2 MiB.
    let pool = MemoryPool::new(4 * (FIXED_MEMORY + (2 << 20)));
    let mut budget = Budget::layer(&pool, &Cancel::default());
    let limits = LayerLimits { bytes: 16 << 20, ..LIMITS };
    let refused = ingest_layer(tar.as_slice(), &blob, limits, &mut budget).unwrap_err();
    assert!(matches!(refused, UnpackError::Layer(LayerError::Budget(BudgetError::Memory { .. }))), "{refused:?}");
    drop(budget);
    assert_eq!(pool.free(), 4 * (FIXED_MEMORY + (2 << 20)));
}

#[test]
fn a_layer_that_is_cancelled_ends() {
    /// Endless zeros. The caller cancels after some of them.
    struct Endless(Cancel, u64);
    impl Read for Endless {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            self.1 += buffer.len() as u64;
            if self.1 > 8 << 20 {
                self.0.cancel();
            }
            assert!(self.1 < 64 << 20, "it is read on after it was cancelled");
            buffer.fill(0);
            Ok(buffer.len())
        }
    }
    let (blob, cancel) = (tempfile::tempfile().unwrap(), Cancel::default());
    let mut budget = Budget::layer(&MemoryPool::new(1 << 30), &cancel);
    let limits = LayerLimits { bytes: u64::MAX, ..LIMITS };
    let ended = ingest_layer(Endless(cancel, 0), &blob, limits, &mut budget).unwrap_err();
    assert!(matches!(ended, UnpackError::Layer(LayerError::Budget(BudgetError::Cancelled))), "{ended:?}");
}

#[test]
fn windows_of_zstd_are_those_of_the_first_frame() {
    for log in [21, 25, 27] {
        let mut encoder = zstd::stream::write::Encoder::new(Vec::new(), 1).unwrap();
        encoder.window_log(log).unwrap();
        encoder.write_all(&sample()).unwrap();
        let stream = encoder.finish().unwrap();
        assert!(ingest_sample(&stream).is_ok());
    }
    // A frame of one segment, whose window is its content.
    for length in [1000, 300, 40 << 20] {
        let mut content = sample();
        content.resize(length.max(content.len()), 0);
        let stream = zstd::bulk::compress(&content, 22).unwrap();
        assert_ne!(stream[4] & 0x20, 0, "one segment");
        let (blob, limits) = (tempfile::tempfile().unwrap(), LayerLimits { bytes: 64 << 20, ..LIMITS });
        let mut budget = Budget::layer(&MemoryPool::new(1 << 30), &Cancel::default());
        ingest_layer(&stream[..], &blob, limits, &mut budget).unwrap_or_else(|error| panic!("{length}: {error:?}"));
        // The result does not depend on the size of the pieces.
        let mut budget = Budget::layer(&MemoryPool::new(1 << 30), &Cancel::default());
        ingest_layer(Bytewise(&stream), &blob, limits, &mut budget)
            .unwrap_or_else(|error| panic!("{length}: {error:?}"));
    }
    // The second frame must not ask for a larger window than was charged.
    let mut encoder = zstd::stream::write::Encoder::new(Vec::new(), 1).unwrap();
    encoder.window_log(27).unwrap();
    encoder.write_all(&sample()).unwrap();
    let stream = [packed(2, &sample()[..512]), encoder.finish().unwrap()].concat();
    assert!(matches!(ingest_sample(&stream), Err(UnpackError::Layer(LayerError::Decompress(_)))));
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
        if let Ok((ingested, blob)) = ingest_sample(&stream) {
            prop_assert_eq!(ingested.digest, Digest::of(&stream));
            prop_assert_eq!(blob.len() as u64, index(&ingested).blob_length);
            // Every accepted layer satisfies the rules that the later stages rely on.
            prop_assert!(index(&ingested).entries().all(|entry| entry.is_ok()));
        }
    }
}

/// A stream of which each read returns one byte, as from a slow sender.
struct Bytewise<'a>(&'a [u8]);

impl Read for Bytewise<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let most = buffer.len().min(1);
        self.0.read(&mut buffer[..most])
    }
}
