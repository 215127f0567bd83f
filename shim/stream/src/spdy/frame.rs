//! Parses and writes frames (section 2.2). All functions are pure. Lengths are checked before memory is allocated. Only the
//! headers of data frames are parsed here; their bytes are not buffered.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

/// The length in bytes of a frame's header.
pub const HEAD: usize = 8;
/// The maximum length in bytes of a control frame after its header.
pub const MAX_CONTROL: u32 = 16 << 10;

const FIN: u8 = 1;
const UNIDIRECTIONAL: u8 = 2;
const VERSION: u16 = 3;
/// The mask of stream ids, window deltas and the like, which have 31 bits.
const LOW: u32 = 0x7fff_ffff;
/// SETTINGS: the initial window of new streams (section 2.6.4).
const INITIAL_WINDOW: u32 = 7;

/// A frame's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Head {
    /// A data frame: bytes of a stream follow.
    Data {
        /// The stream.
        id: u32,
        /// Whether the stream ends with this frame.
        last: bool,
        /// The number of bytes, less than 16 MiB.
        length: u32,
    },
    /// A control frame of at most [`MAX_CONTROL`] bytes.
    Control {
        /// The frame's type.
        kind: u16,
        /// The frame's flags.
        flags: u8,
        /// The number of bytes that follow.
        length: u32,
    },
}

/// A control frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Control {
    /// SYN_STREAM: the peer opens a stream.
    Open {
        /// The stream.
        id: u32,
        /// Whether the peer will send nothing in it.
        last: bool,
        /// Whether the peer accepts nothing in it.
        unidirectional: bool,
        /// The compressed headers.
        headers: Vec<u8>,
    },
    /// HEADERS: further headers of a stream.
    Headers {
        /// The stream.
        id: u32,
        /// Whether the stream ends with this frame.
        last: bool,
        /// The compressed headers.
        headers: Vec<u8>,
    },
    /// RST_STREAM: a stream is aborted.
    Reset(u32),
    /// SETTINGS: the new initial window of streams.
    InitialWindow(u32),
    /// PING: must be echoed.
    Ping(u32),
    /// GOAWAY: the peer opens no more streams.
    GoAway,
    /// WINDOW_UPDATE: the peer accepts this many bytes more of a stream, or of all (0).
    Window(u32, u32),
    /// A frame that is ignored.
    Other,
}

/// Reasons that a frame is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// The frame has another protocol version, or is not SPDY.
    #[error("a control frame has version {got}; {VERSION} is expected")]
    Version {
        /// The frame's version.
        got: u16,
    },
    /// The frame exceeds the maximum length.
    #[error("a control frame of {got} bytes is longer than {MAX_CONTROL}")]
    TooLong {
        /// The frame's length in bytes.
        got: u32,
    },
    /// The length is wrong for the type.
    #[error("a control frame of type {kind} has {got} bytes, which is not the length of that type")]
    Length {
        /// The frame's type.
        kind: u16,
        /// The frame's length in bytes.
        got: usize,
    },
}

/// Parses a header.
pub fn head(bytes: [u8; HEAD]) -> Result<Head, FrameError> {
    let [a, b, c, d, flags, x, y, z] = bytes;
    let length = u32::from_be_bytes([0, x, y, z]);
    if a & 0x80 == 0 {
        return Ok(Head::Data { id: u32::from_be_bytes([a, b, c, d]), last: flags & FIN != 0, length });
    }
    let version = u16::from_be_bytes([a & 0x7f, b]);
    if version != VERSION {
        return Err(FrameError::Version { got: version });
    }
    if length > MAX_CONTROL {
        return Err(FrameError::TooLong { got: length });
    }
    Ok(Head::Control { kind: u16::from_be_bytes([c, d]), flags, length })
}

/// Parses the rest of a control frame.
pub fn control(kind: u16, flags: u8, body: &[u8]) -> Result<Control, FrameError> {
    let wrong = || FrameError::Length { kind, got: body.len() };
    let number = |at: usize| -> Result<u32, FrameError> {
        let bytes = body.get(at..at + 4).and_then(|bytes| bytes.try_into().ok()).ok_or_else(wrong)?;
        Ok(u32::from_be_bytes(bytes))
    };
    let rest = |at: usize| body.get(at..).map(<[u8]>::to_vec).ok_or_else(wrong);
    let exactly = |length: usize| if body.len() == length { Ok(()) } else { Err(wrong()) };
    let last = flags & FIN != 0;
    Ok(match kind {
        1 => Control::Open {
            id: number(0)? & LOW,
            last,
            unidirectional: flags & UNIDIRECTIONAL != 0,
            headers: rest(10)?,
        },
        3 => {
            exactly(8)?;
            Control::Reset(number(0)? & LOW)
        }
        4 => {
            let count = usize::try_from(number(0)?).map_err(|_too_many| wrong())?;
            exactly(count.checked_mul(8).and_then(|bytes| bytes.checked_add(4)).ok_or_else(wrong)?)?;
            let mut found = Control::Other;
            for entry in (0..count).map(|entry| 4 + entry * 8) {
                if number(entry)? & 0x00ff_ffff == INITIAL_WINDOW {
                    found = Control::InitialWindow(number(entry + 4)? & LOW);
                }
            }
            found
        }
        6 => {
            exactly(4)?;
            Control::Ping(number(0)?)
        }
        7 => {
            exactly(8)?;
            Control::GoAway
        }
        8 => Control::Headers { id: number(0)? & LOW, last, headers: rest(4)? },
        9 => {
            exactly(8)?;
            Control::Window(number(0)? & LOW, number(4)? & LOW)
        }
        // Replies to streams, which we never open, and types of later versions.
        _ => Control::Other,
    })
}

fn write(kind: u16, flags: u8, body: &[u8]) -> Vec<u8> {
    let [_, x, y, z] = u32::try_from(body.len()).unwrap_or(u32::MAX).to_be_bytes();
    let mut frame = Vec::with_capacity(HEAD + body.len());
    frame.extend_from_slice(&(VERSION | 0x8000).to_be_bytes());
    frame.extend_from_slice(&kind.to_be_bytes());
    frame.extend_from_slice(&[flags, x, y, z]);
    frame.extend_from_slice(body);
    frame
}

fn two(first: u32, second: u32) -> Vec<u8> {
    [first.to_be_bytes(), second.to_be_bytes()].concat()
}

/// Returns the header of a data frame of less than 16 MiB.
pub fn data(id: u32, last: bool, length: usize) -> [u8; HEAD] {
    let [a, b, c, d] = (id & LOW).to_be_bytes();
    let [_, x, y, z] = u32::try_from(length).unwrap_or(u32::MAX).to_be_bytes();
    [a, b, c, d, if last { FIN } else { 0 }, x, y, z]
}

/// Returns SYN_REPLY: a stream is accepted.
pub fn opened(id: u32, headers: &[u8]) -> Vec<u8> {
    write(2, 0, &[&id.to_be_bytes()[..], headers].concat())
}

/// Returns RST_STREAM with "refused stream".
pub fn refused(id: u32) -> Vec<u8> {
    write(3, 0, &two(id, 3))
}

/// Returns PING with the peer's id.
pub fn ping(id: u32) -> Vec<u8> {
    write(6, 0, &id.to_be_bytes())
}

/// Returns GOAWAY with the status OK.
pub fn go_away(last: u32) -> Vec<u8> {
    write(7, 0, &two(last, 0))
}

/// Returns WINDOW_UPDATE: this many bytes more of a stream, or of all (0).
pub fn window(id: u32, bytes: u32) -> Vec<u8> {
    write(9, 0, &two(id, bytes & LOW))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Parses one of our own frames.
    fn read(frame: &[u8]) -> Control {
        let Head::Control { kind, flags, length } = head(frame[..HEAD].try_into().unwrap()).unwrap() else {
            panic!("a control frame")
        };
        assert_eq!(length as usize, frame.len() - HEAD);
        control(kind, flags, &frame[HEAD..]).unwrap()
    }

    #[test]
    fn ours_are_read_as_they_were_meant() {
        assert_eq!(read(&ping(7)), Control::Ping(7));
        assert_eq!(read(&refused(3)), Control::Reset(3));
        assert_eq!(read(&go_away(9)), Control::GoAway);
        assert_eq!(read(&window(5, 100)), Control::Window(5, 100));
        assert_eq!(read(&opened(5, b"x")), Control::Other);
        assert_eq!(head(data(5, true, 70_000)).unwrap(), Head::Data { id: 5, last: true, length: 70_000 });
    }

    #[test]
    fn a_clients_frames_are_read() {
        // SYN_STREAM 1, FIN, priority 7, with two bytes of headers.
        let frame = [0x80, 3, 0, 1, 1, 0, 0, 12, 0, 0, 0, 1, 0, 0, 0, 0, 0xe0, 0, 0xaa, 0xbb];
        let open = Control::Open { id: 1, last: true, unidirectional: false, headers: vec![0xaa, 0xbb] };
        assert_eq!(read(&frame), open);
        // SETTINGS with two entries, the second the initial window.
        let frame = [0x80, 3, 0, 4, 0, 0, 0, 20, 0, 0, 0, 2, 0, 0, 0, 4, 0, 0, 0, 100, 0, 0, 0, 7, 0, 1, 0, 0];
        assert_eq!(read(&frame), Control::InitialWindow(65536));
    }

    #[test]
    fn what_is_wrong_is_refused() {
        assert_eq!(head([0x80, 2, 0, 1, 0, 0, 0, 12]), Err(FrameError::Version { got: 2 }));
        assert_eq!(head([0x80, 3, 0, 1, 0, 1, 0, 0]), Err(FrameError::TooLong { got: 65536 }));
        for (kind, body) in
            [(1, &[0; 9][..]), (3, &[0; 7]), (4, &[0, 0, 0, 1]), (4, &[0xff; 4]), (6, &[]), (9, &[0; 9])]
        {
            assert_eq!(control(kind, 0, body), Err(FrameError::Length { kind, got: body.len() }));
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]
        #[test]
        fn any_bytes_are_read_without_panic(
            start: [u8; HEAD], kind in 0u16..12, flags: u8, body in prop::collection::vec(any::<u8>(), 0..64),
        ) {
            let _ = head(start);
            let _ = control(kind, flags, &body);
        }
    }
}
