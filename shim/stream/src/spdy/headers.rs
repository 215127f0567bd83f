//! Encodes and decodes header blocks (section 2.6.10): pairs of strings, compressed with one zlib stream per direction and the
//! protocol's dictionary. A block must not decompress to more than [`MAX_BLOCK`] bytes.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use flate2::{Compress, Compression, Decompress, FlushCompress, FlushDecompress, Status};

/// The zlib dictionary of the protocol.
const DICTIONARY: &[u8] = include_bytes!("dictionary.bin");
/// The maximum size in bytes of a decompressed block.
pub const MAX_BLOCK: usize = 16 << 10;
/// The maximum number of pairs of a block.
pub const MAX_PAIRS: u32 = 64;

/// Reasons that a header block is invalid. The connection is lost with it, because later blocks depend on it.
#[derive(Debug, thiserror::Error)]
pub enum HeaderError {
    /// The block is not zlib data, or not with this dictionary.
    #[error("cannot decompress a header block")]
    Packed {
        /// The reason.
        source: flate2::DecompressError,
    },
    /// The decompressed block is too long.
    #[error("a header block decompresses to more than {MAX_BLOCK} bytes")]
    TooLong,
    /// The block has too many pairs.
    #[error("a header block has {got} pairs; at most {MAX_PAIRS} are allowed")]
    TooMany {
        /// The number of pairs in the block.
        got: u32,
    },
    /// The block ends before its last pair, or continues after it.
    #[error("a header block is truncated, or longer than its pairs")]
    Cut,
}

/// The headers: pairs of a lower-case name and a value.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Headers(Vec<(String, String)>);

impl Headers {
    /// Returns the value of a name in lower case.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }
}

/// Decodes the peer's blocks. They must be decoded in their order.
pub struct Decoder(Decompress);

impl Default for Decoder {
    fn default() -> Self {
        Decoder(Decompress::new(true))
    }
}

impl Decoder {
    /// Decompresses and parses a block.
    pub fn decode(&mut self, packed: &[u8]) -> Result<Headers, HeaderError> {
        pairs(&self.unpack(packed)?)
    }

    fn unpack(&mut self, packed: &[u8]) -> Result<Vec<u8>, HeaderError> {
        let (start, mut block) = (self.0.total_in(), vec![0; MAX_BLOCK + 1]);
        let (mut from, mut filled) = (0, 0);
        loop {
            let before = (from, filled);
            let input = packed.get(from..).unwrap_or_default();
            let output = block.get_mut(filled..).unwrap_or_default();
            let written = self.0.total_out();
            let step = self.0.decompress(input, output, FlushDecompress::Sync);
            from = usize::try_from(self.0.total_in() - start).unwrap_or(usize::MAX);
            filled += usize::try_from(self.0.total_out() - written).unwrap_or(usize::MAX);
            match step {
                Err(error) if error.needs_dictionary().is_some() => {
                    self.0.set_dictionary(DICTIONARY).map_err(|source| HeaderError::Packed { source })?;
                    continue;
                }
                Err(source) => return Err(HeaderError::Packed { source }),
                Ok(status) => {
                    if filled > MAX_BLOCK {
                        return Err(HeaderError::TooLong);
                    }
                    if from >= packed.len() && status != Status::StreamEnd {
                        block.truncate(filled);
                        return Ok(block);
                    }
                    if status == Status::StreamEnd || before == (from, filled) {
                        // The zlib stream of a connection must not end.
                        return Err(HeaderError::Cut);
                    }
                }
            }
        }
    }
}

fn pairs(mut block: &[u8]) -> Result<Headers, HeaderError> {
    let count = number(&mut block)?;
    if count > MAX_PAIRS {
        return Err(HeaderError::TooMany { got: count });
    }
    let mut headers = Vec::new();
    for _ in 0..count {
        let name = text(&mut block)?.to_ascii_lowercase();
        headers.push((name, text(&mut block)?));
    }
    if block.is_empty() { Ok(Headers(headers)) } else { Err(HeaderError::Cut) }
}

fn number(block: &mut &[u8]) -> Result<u32, HeaderError> {
    let (number, rest) = block.split_first_chunk().ok_or(HeaderError::Cut)?;
    *block = rest;
    Ok(u32::from_be_bytes(*number))
}

fn text(block: &mut &[u8]) -> Result<String, HeaderError> {
    let length = usize::try_from(number(block)?).map_err(|_too_long| HeaderError::Cut)?;
    let (text, rest) = block.split_at_checked(length).ok_or(HeaderError::Cut)?;
    *block = rest;
    Ok(String::from_utf8_lossy(text).into_owned())
}

/// Encodes our blocks, in their order.
pub struct Encoder(Compress);

impl Encoder {
    /// Returns an encoder with the dictionary set.
    pub fn new() -> Result<Encoder, flate2::CompressError> {
        let mut compress = Compress::new(Compression::fast(), true);
        compress.set_dictionary(DICTIONARY)?;
        Ok(Encoder(compress))
    }

    /// Returns a block of these pairs, whose names are in lower case.
    pub fn encode(&mut self, headers: &[(&str, &str)]) -> Result<Vec<u8>, flate2::CompressError> {
        let long = |length: usize| u32::try_from(length).unwrap_or(u32::MAX).to_be_bytes();
        let mut block = long(headers.len()).to_vec();
        for text in headers.iter().flat_map(|(name, value)| [name, value]) {
            block.extend_from_slice(&long(text.len()));
            block.extend_from_slice(text.as_bytes());
        }
        // Enough for incompressible data and the overhead of zlib.
        let mut packed = Vec::with_capacity(block.len() + block.len() / 8 + 64);
        self.0.compress_vec(&block, &mut packed, FlushCompress::Sync)?;
        Ok(packed)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The first block of a connection of the Go implementation that crictl uses: streamtype: error.
    #[test]
    fn blocks_come_back_and_depend_on_those_before() {
        let (mut encoder, mut decoder) = (Encoder::new().unwrap(), Decoder::default());
        let blocks = [
            encoder.encode(&[("streamtype", "error")]).unwrap(),
            encoder.encode(&[("streamtype", "stdin"), ("x", "")]).unwrap(),
            encoder.encode(&[]).unwrap(),
        ];
        assert!(Decoder::default().decode(&blocks[1]).is_err());
        assert_eq!(decoder.decode(&blocks[0]).unwrap().get("streamtype"), Some("error"));
        let second = decoder.decode(&blocks[1]).unwrap();
        assert_eq!((second.get("streamtype"), second.get("x"), second.get("y")), (Some("stdin"), Some(""), None));
        assert_eq!(decoder.decode(&blocks[2]).unwrap(), Headers::default());
    }

    #[test]
    fn what_unpacks_to_too_much_is_refused() {
        let long = "x".repeat(MAX_BLOCK);
        let packed = Encoder::new().unwrap().encode(&[("a", &long)]).unwrap();
        assert!(packed.len() < 200, "it packs well");
        assert!(matches!(Decoder::default().decode(&packed), Err(HeaderError::TooLong)));
        let many = vec![("a", "b"); 65];
        let packed = Encoder::new().unwrap().encode(&many).unwrap();
        assert!(matches!(Decoder::default().decode(&packed), Err(HeaderError::TooMany { got: 65 })));
    }

    #[test]
    fn a_block_that_is_cut_is_refused() {
        let packed = Encoder::new().unwrap().encode(&[("streamtype", "error")]).unwrap();
        assert!(Decoder::default().decode(&packed[..packed.len() - 8]).is_err());
        assert!(Decoder::default().decode(&[]).is_err());
        assert!(Decoder::default().decode(b"GET / HTTP/1.1\r\n").is_err());
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(128))]
        #[test]
        fn any_pairs_come_back(all in prop::collection::vec(prop::collection::vec(("[a-z-]{1,20}", "\\PC{0,40}"), 0..6), 1..4)) {
            let (mut encoder, mut decoder) = (Encoder::new().unwrap(), Decoder::default());
            for headers in all {
                let block: Vec<(&str, &str)> = headers.iter().map(|(a, b)| (a.as_str(), b.as_str())).collect();
                let read = decoder.decode(&encoder.encode(&block).unwrap()).unwrap();
                prop_assert_eq!(read, Headers(headers));
            }
        }

        #[test]
        fn any_bytes_are_read_without_panic(blocks in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..80), 1..4)) {
            let mut decoder = Decoder::default();
            for block in blocks {
                let _ = decoder.decode(&block);
                let _ = pairs(&block);
            }
        }
    }
}
