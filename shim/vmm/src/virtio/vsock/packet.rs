//! Encodes and decodes the header of a vsock packet. Pure.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

/// The size of a header in bytes.
pub(crate) const HEADER: usize = 44;

/// The maximum payload of one packet in bytes; Linux sends no more.
pub(crate) const MAX_PAYLOAD: u32 = 64 << 10;

/// The type of a stream connection's packets.
pub(crate) const STREAM: u16 = 1;

/// A flag of [`Op::SHUTDOWN`]: the sender will receive no more data.
pub(crate) const SHUT_RECEIVE: u32 = 1;
/// A flag of [`Op::SHUTDOWN`]: the sender will send no more data.
pub(crate) const SHUT_SEND: u32 = 2;

/// The operation of a packet.
#[allow(non_snake_case, reason = "a namespace of constants")]
pub(crate) mod Op {
    pub(crate) const REQUEST: u16 = 1;
    pub(crate) const RESPONSE: u16 = 2;
    pub(crate) const RST: u16 = 3;
    pub(crate) const SHUTDOWN: u16 = 4;
    pub(crate) const RW: u16 = 5;
    pub(crate) const CREDIT_UPDATE: u16 = 6;
    pub(crate) const CREDIT_REQUEST: u16 = 7;
}

/// The header of a packet (`struct virtio_vsock_hdr`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PacketHeader {
    pub src_cid: u64,
    pub dst_cid: u64,
    pub src_port: u32,
    pub dst_port: u32,
    /// The length of the payload in bytes.
    pub length: u32,
    /// The socket type: [`STREAM`], or anything from a guest.
    pub kind: u16,
    /// One of [`Op`], or anything from a guest.
    pub op: u16,
    pub flags: u32,
    /// The size of the sender's buffer for this connection, in bytes.
    pub buf_alloc: u32,
    /// The total number of bytes that the sender has taken out of that buffer, modulo 2^32.
    pub fwd_cnt: u32,
}

impl PacketHeader {
    pub(crate) fn parse(bytes: &[u8; HEADER]) -> PacketHeader {
        let mut rest: &[u8] = bytes;
        let mut take_number = |count: usize| {
            let (front, back) = rest.split_at_checked(count).unwrap_or_default();
            rest = back;
            front.iter().rev().fold(0u64, |number, byte| number << 8 | u64::from(*byte))
        };
        // Each number is at most as wide as the bytes it was made of.
        PacketHeader {
            src_cid: take_number(8),
            dst_cid: take_number(8),
            src_port: take_number(4) as u32,
            dst_port: take_number(4) as u32,
            length: take_number(4) as u32,
            kind: take_number(2) as u16,
            op: take_number(2) as u16,
            flags: take_number(4) as u32,
            buf_alloc: take_number(4) as u32,
            fwd_cnt: take_number(4) as u32,
        }
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEADER);
        bytes.extend(self.src_cid.to_le_bytes());
        bytes.extend(self.dst_cid.to_le_bytes());
        bytes.extend(self.src_port.to_le_bytes());
        bytes.extend(self.dst_port.to_le_bytes());
        bytes.extend(self.length.to_le_bytes());
        bytes.extend(self.kind.to_le_bytes());
        bytes.extend(self.op.to_le_bytes());
        bytes.extend(self.flags.to_le_bytes());
        bytes.extend(self.buf_alloc.to_le_bytes());
        bytes.extend(self.fwd_cnt.to_le_bytes());
        bytes
    }

    /// Returns the reset that answers this packet.
    pub(crate) fn reset(&self) -> PacketHeader {
        PacketHeader {
            src_cid: self.dst_cid,
            dst_cid: self.src_cid,
            src_port: self.dst_port,
            dst_port: self.src_port,
            kind: self.kind,
            op: Op::RST,
            ..PacketHeader::default()
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn headers_are_encoded_as_they_were_parsed(bytes in prop::collection::vec(any::<u8>(), HEADER)) {
            let array: [u8; HEADER] = bytes.clone().try_into().unwrap();
            prop_assert_eq!(PacketHeader::parse(&array).encode(), bytes);
        }
    }
}
