//! Lets clients of gRPC's C core (Python, C++, Ruby, PHP) talk to a server on a unix socket. They send the percent-encoded path
//! of the socket as `:authority`, and the HTTP/2 crate rejects a request whose authority has a `%` in it (RFC 3986 allows it).
//!
//! The filter is below HTTP/2 on the accepted connection and changes only what the client sends: in each header block it replaces
//! `%` by `-` in the value of a literal `:authority`. Both are one byte, and 6 bits in HPACK's Huffman code, so no length, no
//! padding and no entry of the dynamic table moves. Everything else, and everything that the filter does not understand, passes
//! unchanged. A header block is buffered until it is complete; a block of more than [`MAX_HEADER_BLOCK`] bytes passes unchanged.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

/// The connection preface of an HTTP/2 client (RFC 9113, section 3.4).
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// The length in bytes of a frame header (section 4.1): length (3), type, flags, stream (4).
const FRAME_HEADER_BYTES: usize = 9;
const HEADERS: u8 = 1;
const CONTINUATION: u8 = 9;
const END_HEADERS: u8 = 0x4;
const PADDED: u8 = 0x8;
const PRIORITY: u8 = 0x20;
/// The maximum bytes buffered of one header block, including its frame headers. A request has a few hundred.
const MAX_HEADER_BLOCK: usize = 64 << 10;

const AUTHORITY: &[u8] = b":authority";
/// The index of `:authority` in HPACK's static table (RFC 7541, appendix A).
const AUTHORITY_INDEX: usize = 1;

/// The number of symbols with codes of 5 bits, 6 bits and so on in HPACK's Huffman code (RFC 7541, appendix B), which is
/// canonical.
const HUFFMAN: [u32; 26] = [10, 26, 32, 6, 0, 5, 3, 2, 6, 2, 3, 0, 0, 0, 3, 8, 13, 26, 29, 12, 4, 15, 19, 29, 0, 4];
const SHORTEST_CODE: usize = 5;
/// The code of `%`: 010101. That of `-` is 010110: the last two bits change.
const PERCENT_CODE: (usize, u32) = (6, 0b01_0101);

/// The meaning of the next byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Part of the preface, of which this many bytes have arrived.
    Preface(usize),
    /// Part of a frame header, of which `have` bytes have arrived in `buffered`; `block` means that a header block is being buffered.
    Header { have: usize, block: bool },
    /// Part of a buffered frame's payload, of which `left` bytes are missing. `last` means that the header block ends with this
    /// frame.
    Buffered { left: usize, last: bool },
    /// Part of a payload that passes, of which this many bytes are missing.
    Passing(usize),
    /// Part of a stream that the filter does not understand, and passes from here on.
    Unknown,
}

/// The HPACK part of a buffered frame: a range of `buffered`.
type Fragment = std::ops::Range<usize>;

/// Rewrites the bytes of a client. Does no input or output itself.
#[derive(Debug)]
pub struct AuthorityFilter {
    state: State,
    buffered: Vec<u8>,
    /// The start of the current frame's header in `buffered`.
    frame: usize,
    fragments: Vec<Fragment>,
}

impl Default for AuthorityFilter {
    fn default() -> AuthorityFilter {
        AuthorityFilter::new()
    }
}

impl AuthorityFilter {
    /// Returns the filter of a new connection.
    pub fn new() -> AuthorityFilter {
        AuthorityFilter { state: State::Preface(0), buffered: Vec::new(), frame: 0, fragments: Vec::new() }
    }

    /// Processes received bytes, and appends the bytes that pass to `out`.
    pub fn filter(&mut self, mut input: &[u8], out: &mut Vec<u8>) {
        while let Some((&first, rest)) = input.split_first() {
            match self.state {
                State::Unknown => {
                    out.extend_from_slice(input);
                    return;
                }
                State::Preface(have) => {
                    out.push(first);
                    input = rest;
                    self.state = match (PREFACE.get(have) == Some(&first), have + 1 == PREFACE.len()) {
                        (true, true) => State::Header { have: 0, block: false },
                        (true, false) => State::Preface(have + 1),
                        (false, _) => State::Unknown,
                    };
                }
                State::Header { have, block } => {
                    if have == 0 {
                        self.frame = self.buffered.len();
                    }
                    self.buffered.push(first);
                    input = rest;
                    self.state = State::Header { have: have + 1, block };
                    if have + 1 == FRAME_HEADER_BYTES {
                        self.begin_frame(block, out);
                    }
                }
                State::Buffered { left, last } => {
                    let (now, later) = input.split_at(left.min(input.len()));
                    self.buffered.extend_from_slice(now);
                    input = later;
                    self.state = State::Buffered { left: left - now.len(), last };
                    if now.len() == left {
                        self.end_frame(last, out);
                    }
                }
                State::Passing(left) => {
                    let (now, later) = input.split_at(left.min(input.len()));
                    out.extend_from_slice(now);
                    input = later;
                    self.state = match left - now.len() {
                        0 => State::Header { have: 0, block: false },
                        left => State::Passing(left),
                    };
                }
            }
        }
    }

    /// Ends the input of the client: buffered bytes pass.
    pub fn finish(&mut self, out: &mut Vec<u8>) {
        self.release(out);
        self.state = State::Unknown;
    }

    fn release(&mut self, out: &mut Vec<u8>) {
        out.append(&mut self.buffered);
        self.fragments.clear();
    }

    /// Handles a complete frame header.
    fn begin_frame(&mut self, block: bool, out: &mut Vec<u8>) {
        let Some(&[a, b, c, kind, flags, ..]) = self.buffered.get(self.frame..) else { return };
        let length = usize::try_from(u32::from_be_bytes([0, a, b, c])).unwrap_or(usize::MAX);
        let last = flags & END_HEADERS != 0;
        let whole = self.buffered.len().saturating_add(length) <= MAX_HEADER_BLOCK;
        match (kind, block) {
            (HEADERS, false) | (CONTINUATION, true) if whole => {
                self.state = State::Buffered { left: length, last };
                if length == 0 {
                    self.end_frame(last, out);
                }
            }
            // The block is too long to buffer: its remaining frames pass as they are.
            _ => {
                self.release(out);
                self.state = match length {
                    0 => State::Header { have: 0, block: false },
                    length => State::Passing(length),
                };
            }
        }
    }

    /// Handles the end of a frame of a header block.
    fn end_frame(&mut self, last: bool, out: &mut Vec<u8>) {
        match self.fragment() {
            Some(fragment) => self.fragments.push(fragment),
            // HTTP/2 rejects a frame with such padding itself.
            None => self.fragments.clear(),
        }
        if last {
            replace_in_block(&mut self.buffered, &self.fragments);
            self.release(out);
        }
        self.state = State::Header { have: 0, block: !last };
    }

    /// Returns the HPACK part of the current frame: all but padding and priority (RFC 9113, section 6.2).
    fn fragment(&self) -> Option<Fragment> {
        let head = self.buffered.get(self.frame..)?;
        let (kind, flags) = (*head.get(3)?, *head.get(4)?);
        let (mut start, mut end) = (self.frame + FRAME_HEADER_BYTES, self.buffered.len());
        if kind == HEADERS && flags & PADDED != 0 {
            end = end.checked_sub(usize::from(*self.buffered.get(start)?))?;
            start += 1;
        }
        if kind == HEADERS && flags & PRIORITY != 0 {
            start += 5;
        }
        (start <= end).then_some(start..end)
    }
}

/// Replaces `%` in the authority of a header block, whose bytes are in these parts of `buffered`.
fn replace_in_block(buffered: &mut [u8], fragments: &[Fragment]) {
    let mut block: Vec<u8> = Vec::with_capacity(buffered.len());
    block.extend(fragments.iter().filter_map(|fragment| buffered.get(fragment.clone())).flatten());
    let before = block.len();
    // HTTP/2 will reject a block that is malformed, so earlier changes to it do not matter.
    let _ = replace_in_fields(&mut block);
    debug_assert_eq!(before, block.len(), "no length may change");
    let mut changed = block.into_iter();
    for fragment in fragments {
        for byte in buffered.get_mut(fragment.clone()).into_iter().flatten() {
            *byte = changed.next().unwrap_or(*byte);
        }
    }
}

/// Walks the field representations of a header block (RFC 7541, section 6). Returns `None` if it is malformed.
fn replace_in_fields(block: &mut [u8]) -> Option<()> {
    let mut at = 0;
    while let Some(first) = block.get(at).copied() {
        let prefix = match first {
            0x80.. => 7,
            0x40.. => 6,
            0x20.. => 5,
            _ => 4,
        };
        let index = read_integer(block, &mut at, prefix)?;
        // An indexed field has no literal value, and neither has a table size update.
        if matches!(first, 0x80.. | 0x20..0x40) {
            continue;
        }
        let authority = match index {
            AUTHORITY_INDEX => true,
            0 => {
                let (huffman, name) = read_string(block, &mut at)?;
                !huffman && block.get(name) == Some(AUTHORITY)
            }
            _ => false,
        };
        let (huffman, value) = read_string(block, &mut at)?;
        match (authority, huffman) {
            (false, _) => {}
            (true, false) => {
                block.get_mut(value)?.iter_mut().filter(|byte| **byte == b'%').for_each(|byte| *byte = b'-');
            }
            (true, true) => replace_in_huffman(block.get_mut(value)?),
        }
    }
    Some(())
}

/// Reads an integer with a prefix of `prefix` bits (section 5.1). Returns `None` if it is too large for a length or an index
/// here.
fn read_integer(block: &[u8], at: &mut usize, prefix: u32) -> Option<usize> {
    let mask = (1_u8 << prefix) - 1;
    let mut value = usize::from(block.get(*at)? & mask);
    *at += 1;
    if value < usize::from(mask) {
        return Some(value);
    }
    // Three more bytes can encode more than the size of a block.
    for shift in [0, 7, 14] {
        let next = *block.get(*at)?;
        *at += 1;
        value += usize::from(next & 0x7f) << shift;
        if next & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

/// Returns the range of a string's bytes, and whether they are Huffman-coded (section 5.2).
fn read_string(block: &[u8], at: &mut usize) -> Option<(bool, Fragment)> {
    let huffman = block.get(*at)? & 0x80 != 0;
    let length = read_integer(block, at, 7)?;
    let range = *at..at.checked_add(length)?;
    block.get(range.clone())?;
    *at = range.end;
    Some((huffman, range))
}

/// Replaces the code of `%` by that of `-`, symbol by symbol. Stops at an invalid code.
fn replace_in_huffman(value: &mut [u8]) {
    let bit = |value: &[u8], at: usize| value.get(at / 8).map(|byte| u32::from(byte >> (7 - at % 8) & 1));
    let mut start = 0;
    while let Some((length, code)) = read_symbol(|at| bit(value, start + at)) {
        if (length, code) == PERCENT_CODE {
            for at in [start + length - 2, start + length - 1] {
                if let Some(byte) = value.get_mut(at / 8) {
                    *byte ^= 1 << (7 - at % 8);
                }
            }
        }
        start += length;
    }
}

/// Returns the length and the code of the symbol that begins with these bits.
fn read_symbol(bit: impl Fn(usize) -> Option<u32>) -> Option<(usize, u32)> {
    let (mut code, mut first) = (0, 0);
    for at in 0..SHORTEST_CODE - 1 {
        code = code << 1 | bit(at)?;
    }
    for (more, count) in HUFFMAN.into_iter().enumerate() {
        let length = SHORTEST_CODE + more;
        code = code << 1 | bit(length - 1)?;
        // The first code of a length follows the last one of the shorter length.
        if code.checked_sub(first)? < count {
            return Some((length, code));
        }
        first = (first + count) << 1;
    }
    None
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The first bytes of a client of grpcio 1.85.3 (C core 58.0.0) that calls Version of CRI on /run/nacelle-rec/nacelle.sock.
    const GRPCIO: &[u8] = include_bytes!("../tests/corpus/authority/grpcio");

    /// Returns the output for this input if it arrives in pieces that end at `ends`.
    fn passed(all: &[u8], ends: &[usize]) -> Vec<u8> {
        let (mut filter, mut out, mut from) = (AuthorityFilter::new(), Vec::new(), 0);
        for end in ends.iter().map(|end| end % (all.len() + 1)).chain([all.len()]) {
            let end = end.max(from);
            filter.filter(&all[from..end], &mut out);
            from = end;
        }
        filter.finish(&mut out);
        out
    }

    fn frame(kind: u8, flags: u8, payload: &[u8]) -> Vec<u8> {
        let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
        [&length[1..], &[kind, flags, 0, 0, 0, 1], payload].concat()
    }

    fn stream(frames: &[Vec<u8>]) -> Vec<u8> {
        [PREFACE, &frames.concat()].concat()
    }

    /// Returns a block as Python's hpack writes it, with `:authority` by its index and Huffman-coded, and the expected output.
    fn blocks() -> (Vec<u8>, Vec<u8>) {
        let block = |authority: &str| {
            hex::decode(format!(
                "838644{}41{authority}4082497f864d833505b11f",
                "9962cb6a49a92afdc2bedb6a49a92ee2d9dcc42b1c4b620c7abf"
            ))
        };
        (block("89b2da95161a9741c9d7").unwrap(), block("89b2da96161a9741c9d7").unwrap())
    }

    #[test]
    fn the_code_is_complete_and_its_symbols_are_256_and_the_end() {
        assert_eq!(HUFFMAN.iter().sum::<u32>(), 257);
        let lengths = HUFFMAN.iter().enumerate().map(|(more, count)| u64::from(*count) << (30 - SHORTEST_CODE - more));
        assert_eq!(lengths.sum::<u64>(), 1 << 30);
    }

    #[test]
    fn percent_becomes_dash_in_huffmans_code_and_nothing_else_does() {
        for (before, after) in [
            ("b2da95161a8642d14155161a8642d1415741c9d7", "b2da96161a8642d14156161a8642d1415741c9d7"),
            // Between symbols of 13, 26 and 13 bits.
            ("ffc2bfffff72aafff7", "ffc2dfffff72cb7ff7"),
            ("", ""),
            ("ff", "ff"),
        ] {
            let mut value = hex::decode(before).unwrap();
            replace_in_huffman(&mut value);
            assert_eq!(hex::encode(value), after);
        }
    }

    #[test]
    fn what_grpcio_sends_gets_an_authority_that_is_one() {
        let before = b"run%2Fnacelle-rec%2Fnacelle.sock";
        let at = GRPCIO.windows(before.len()).position(|window| window == before).unwrap();
        let mut expected = GRPCIO.to_vec();
        expected[at..at + before.len()].copy_from_slice(b"run-2Fnacelle-rec-2Fnacelle.sock");
        assert_eq!(passed(GRPCIO, &[]), expected);
        for end in 0..GRPCIO.len() {
            assert_eq!(passed(GRPCIO, &[end]), expected, "{end}");
        }
    }

    #[test]
    fn blocks_are_found_in_all_kinds_of_frames() {
        let (before, after) = blocks();
        let priority = [0, 0, 0, 0, 9];
        let padded = |block: &[u8]| [&[3], block, &[0; 3]].concat();
        let both = |block: &[u8]| [&[2], &priority[..], block, &[0; 2]].concat();
        let data = frame(0, 0, b"41 % is no block");
        for (flags, wrap) in [
            (0, (&|block: &[u8]| block.to_vec()) as &dyn Fn(&[u8]) -> Vec<u8>),
            (PADDED, &padded),
            (PRIORITY, &|block: &[u8]| [&priority[..], block].concat()),
            (PADDED | PRIORITY, &both),
        ] {
            let whole =
                |block: &[u8]| stream(&[data.clone(), frame(HEADERS, END_HEADERS | flags, &wrap(block)), data.clone()]);
            assert_eq!(passed(&whole(&before), &[]), whole(&after));
            for cut in 0..before.len() {
                let parts = |block: &[u8]| {
                    let (first, rest) = block.split_at(cut);
                    let (middle, last) = rest.split_at(rest.len() / 2);
                    stream(&[
                        frame(HEADERS, flags, &wrap(first)),
                        frame(CONTINUATION, 0, middle),
                        frame(CONTINUATION, END_HEADERS, last),
                        data.clone(),
                    ])
                };
                assert_eq!(passed(&parts(&before), &[]), parts(&after), "{cut}");
            }
        }
    }

    #[test]
    fn only_a_literal_authority_is_changed() {
        let literal = |first: u8, name: &[u8], value: &[u8]| {
            let string = |text: &[u8]| [&[u8::try_from(text.len()).unwrap()], text].concat();
            let name = if name.is_empty() { vec![] } else { string(name) };
            [vec![first], name, string(value)].concat()
        };
        for (block, changed) in [
            (literal(0x41, b"", b"a%2Fb"), true),
            (literal(0x01, b"", b"a%2Fb"), true),
            (literal(0x11, b"", b"a%2Fb"), true),
            (literal(0x40, b":authority", b"a%2Fb"), true),
            (literal(0x10, b":authority", b"a%2Fb"), true),
            ([literal(0x44, b"", b"/a%2Fb"), vec![0x3f, 0xe1, 0x1f], literal(0x41, b"", b"%")].concat(), true),
            (literal(0x44, b"", b"/a%2Fb"), false),
            (literal(0x40, b"authority", b"a%2Fb"), false),
            (literal(0x7f, b"", b"a%2Fb"), false),
            (literal(0x41, b"", b"a:2"), false),
        ] {
            let before = stream(&[frame(HEADERS, END_HEADERS, &block)]);
            let after = passed(&before, &[]);
            assert_eq!((after.len(), after != before), (before.len(), changed), "{block:?}");
            if !block.contains(&b'/') {
                assert!(!changed || !after.contains(&b'%'), "{block:?}");
            }
        }
    }

    #[test]
    fn what_is_not_understood_passes_as_it_came() {
        let (block, _) = blocks();
        let headers = |flags, payload: &[u8]| frame(HEADERS, flags, payload);
        let long = vec![0x82; MAX_HEADER_BLOCK];
        for all in [
            b"GET / HTTP/1.1\r\nHost: a%b\r\n\r\n".to_vec(),
            PREFACE[..10].to_vec(),
            // A block that never ends, one of wrong frames, one that is too long, one with more padding than bytes.
            stream(&[headers(0, &block)]),
            stream(&[headers(0, &block), frame(0, 0, b"x"), frame(CONTINUATION, END_HEADERS, b"")]),
            stream(&[frame(CONTINUATION, END_HEADERS, &block)]),
            stream(&[headers(0, &block), frame(CONTINUATION, 0, &long), frame(CONTINUATION, END_HEADERS, &block)]),
            stream(&[headers(END_HEADERS | PADDED, &[&[0xff], &block[..]].concat())]),
            stream(&[headers(END_HEADERS | PADDED, b"")]),
            stream(&[headers(END_HEADERS | PRIORITY, b"abc")]),
        ] {
            assert!(passed(&all, &[]) == all, "{:?}", all.get(..80));
        }
        // The block after one that is too long is rewritten again.
        let (before, after) = blocks();
        let all = |block: &[u8]| {
            stream(&[headers(0, &long), frame(CONTINUATION, END_HEADERS, b""), headers(END_HEADERS, block)])
        };
        assert!(passed(&all(&before), &[]) == all(&after));
    }

    proptest! {
        #[test]
        fn pieces_do_not_matter(tail: Vec<u8>, ends in prop::collection::vec(any::<usize>(), 0..20), valid: bool) {
            let (block, _) = blocks();
            let mut all = if valid { GRPCIO.to_vec() } else { PREFACE.to_vec() };
            all.extend(frame(HEADERS, END_HEADERS, &block));
            all.extend(&tail);
            let mut ends: Vec<usize> = ends.into_iter().map(|end| end % (all.len() + 1)).collect();
            ends.sort_unstable();
            prop_assert_eq!(passed(&all, &ends), passed(&all, &[]));
            prop_assert_eq!(passed(&all, &[]).len(), all.len());
        }

        #[test]
        fn what_has_no_percent_passes_as_it_came(frames in prop::collection::vec((0..11_u8, any::<u8>(), prop::collection::vec(0..37_u8, 0..60)), 0..8)) {
            // No string contains a `%`, and none is Huffman-coded.
            let all = stream(&frames.into_iter().map(|(kind, flags, payload)| frame(kind, flags, &payload)).collect::<Vec<_>>());
            prop_assert_eq!(passed(&all, &[]), all);
        }

        #[test]
        fn no_block_breaks_it(mut block: Vec<u8>) {
            let before = block.clone();
            let _ = replace_in_fields(&mut block);
            prop_assert_eq!(before.len(), block.len());
            replace_in_huffman(&mut block);
        }
    }
}
