//! Decompresses the stream of a layer: gzip or zstd, detected by its first bytes. The memory for zstd's window is charged to the budget.

use super::ingest::LayerError;
use super::{PIECE, drain};
use crate::budget::Budget;
use std::io::{self, BufReader, Read, Write};

/// The bytes at the beginning of a stream that identify the compression: the magic number and the longest header of a zstd frame
/// (RFC 8878, section 3.1.1.1), which is longer than the magic number of gzip.
const MAGIC_BYTES: usize = 4 + 14;
/// The bytes that [`is_compressed`] needs.
pub const SHORT_MAGIC_BYTES: usize = 4;
/// The window charged for a zstd stream whose first frame does not ask for a larger one, as a power of two: the largest that the
/// encoders of image builders use. A larger one is charged as well.
const DEFAULT_WINDOW_LOG: u32 = 25;
/// The largest window, as a power of two: that of `zstd --ultra`.
const MAX_WINDOW_LOG: u32 = 27;

/// The compression of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Compression {
    Uncompressed,
    Gzip,
    /// The largest window that frames may have, as a power of two.
    Zstd {
        window_log: u32,
    },
}

impl Compression {
    /// Detects the compression by the first bytes of a stream.
    fn detect(start: &[u8]) -> Compression {
        match start {
            [0x1f, 0x8b, ..] => Compression::Gzip,
            [0x28, 0xb5, 0x2f, 0xfd, frame @ ..] => Compression::Zstd {
                window_log: zstd_window_log(frame)
                    .unwrap_or(DEFAULT_WINDOW_LOG)
                    .clamp(DEFAULT_WINDOW_LOG, MAX_WINDOW_LOG),
            },
            [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => Compression::Zstd { window_log: DEFAULT_WINDOW_LOG },
            _ => Compression::Uncompressed,
        }
    }
}

/// Returns whether a stream that begins with these bytes is compressed.
pub fn is_compressed(start: &[u8]) -> bool {
    Compression::detect(start) != Compression::Uncompressed
}

/// Returns the window that the header of a frame asks for, rounded up to a power of two (RFC 8878, section 3.1.1.1).
fn zstd_window_log(frame: &[u8]) -> Option<u32> {
    let (&descriptor, rest) = frame.split_first()?;
    // A single segment: the window is the whole content. The content size follows the dictionary id.
    if descriptor & 0x20 != 0 {
        let (dictionary, field) = (descriptor & 3, descriptor >> 6);
        let size = rest.get((1 << dictionary >> 1)..)?.get(..1 << field)?;
        let mut bytes = [0; 8];
        bytes.iter_mut().zip(size).for_each(|(to, from)| *to = *from);
        let least = if field == 1 { 256 } else { 0 };
        let size = u64::from_le_bytes(bytes).saturating_add(least);
        return Some(size.checked_next_power_of_two().map_or(u64::BITS, u64::trailing_zeros));
    }
    let &value = rest.first()?;
    Some(10 + u32::from(value >> 3) + u32::from(value & 7 != 0))
}

/// Writes the decompressed stream to `sink`. Reads `source` to its end, because bytes after the compressed data belong to the layer.
pub fn decompress(mut source: impl Read, sink: &mut impl Write, budget: &mut Budget) -> Result<(), LayerError> {
    let mut start = Vec::with_capacity(MAGIC_BYTES);
    // One read may return less than `MAGIC_BYTES` bytes.
    (&mut source).take(MAGIC_BYTES as u64).read_to_end(&mut start).map_err(LayerError::Decompress)?;
    let compression = Compression::detect(&start);
    let mut source = BufReader::with_capacity(PIECE, io::Cursor::new(start).chain(source));
    match compression {
        Compression::Uncompressed => copy_stream(&mut source, sink)?,
        Compression::Gzip => copy_stream(flate2::bufread::MultiGzDecoder::new(&mut source), sink)?,
        Compression::Zstd { window_log } => {
            budget.charge(1 << window_log)?;
            let mut decoder = zstd::stream::read::Decoder::with_buffer(&mut source).map_err(LayerError::Decompress)?;
            decoder.window_log_max(window_log).map_err(LayerError::Decompress)?;
            copy_stream(decoder, sink)?;
        }
    }
    drain(&mut source).map_err(LayerError::Decompress)
}

fn copy_stream(mut stream: impl Read, sink: &mut impl Write) -> Result<(), LayerError> {
    let mut piece = vec![0; PIECE];
    loop {
        let got = match stream.read(&mut piece) {
            Ok(0) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            other => other.map_err(LayerError::Decompress)?,
        };
        sink.write_all(piece.get(..got).unwrap_or_default()).map_err(LayerError::Write)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::budget::{Cancel, MemoryPool};

    fn decompressed(stream: &[u8]) -> Result<Vec<u8>, LayerError> {
        let (mut bytes, mut budget) = (Vec::new(), Budget::layer(&MemoryPool::new(1 << 30), &Cancel::default()));
        decompress(stream, &mut bytes, &mut budget).map(|()| bytes)
    }

    #[test]
    fn windows_of_zstd_are_those_of_the_first_frame() {
        for log in [21, 25, 27] {
            let mut encoder = zstd::stream::write::Encoder::new(Vec::new(), 1).unwrap();
            encoder.window_log(log).unwrap();
            encoder.write_all(&[7; 9000]).unwrap();
            let stream = encoder.finish().unwrap();
            let window_log = log.max(DEFAULT_WINDOW_LOG);
            assert_eq!(Compression::detect(&stream), Compression::Zstd { window_log });
            assert_eq!(decompressed(&stream).unwrap(), [7; 9000]);
        }
        // A frame of one segment, whose window is its content.
        for (length, window_log) in [(1000, DEFAULT_WINDOW_LOG), (300, DEFAULT_WINDOW_LOG), (40 << 20, 26)] {
            let stream = zstd::bulk::compress(&vec![7; length], 22).unwrap();
            assert_ne!(stream[4] & 0x20, 0, "one segment");
            assert_eq!(Compression::detect(&stream), Compression::Zstd { window_log });
            assert_eq!(decompressed(&stream).unwrap().len(), length);
        }
        // The second frame must not ask for a larger window than was charged.
        let mut encoder = zstd::stream::write::Encoder::new(Vec::new(), 1).unwrap();
        encoder.window_log(27).unwrap();
        encoder.write_all(&[7; 9000]).unwrap();
        let stream = [zstd::encode_all(&[1; 100][..], 1).unwrap(), encoder.finish().unwrap()].concat();
        assert!(matches!(decompressed(&stream), Err(LayerError::Decompress(_))));
    }
}
