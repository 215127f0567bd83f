//! Owns: what the three programs that take part in volumes of the node agree on: the guest's agent mounts the share, the
//! device in the pod process passes requests on, the process beside it (`nacelle-fs`) answers them. Pure.

/// The tag by which the guest knows the share.
pub const TAG: &str = "nacelle";
/// Where the agent mounts it; each volume is `FOLDER/CONTAINER/NUMBER` in it.
pub const FOLDER: &str = "/run/nacelle/volumes";
/// The queues of the device, and the streams to the process that answers: requests of high priority, and the others.
pub const QUEUES: usize = 2;
/// The descriptors of a queue. Linux makes no request that does not fit into one: less than half a MiB of data.
pub const QUEUE_SIZE: u16 = 128;
/// What the guest reads ahead of a program that reads on and on, in KiB: the largest request that Linux makes on such a queue (but
/// for four descriptors one for each page).
pub const READ_AHEAD_KIB: u32 = (QUEUE_SIZE as u32 - 4) * 4;
/// The most bytes of a request, and of an answer.
pub const MAX_MESSAGE: usize = (1 << 20) + (64 << 10);
/// Before each request on a stream: its bytes, and the bytes of the largest answer, both as little-endian 32 bits. Before
/// each answer stand its bytes, in the same way; a request that has no answer gets an empty one.
pub const HEADER: usize = 8;
/// The bytes before each answer.
pub const ANSWER_HEADER: usize = 4;

/// In the place of a request's bytes: the queue is lent. The bytes that follow (as many as the second number says) are a
/// [`Lent`], and with the first of them come the descriptors: its kick, its call, and one for each region of memory. From
/// then on requests are answered where they lie, and the stream is still until the queue is taken back.
pub const LEND: u32 = u32::MAX;
/// In the place of a request's bytes: the queue is taken back. The answer to it is the next index of the available ring, in
/// the place of an answer's bytes; all requests before it are answered.
pub const RETURN: u32 = u32::MAX - 1;
/// In the place of a request's bytes, on the first stream of a share that shows a part of the volumes: which part it shows from
/// now on, as if nobody had asked for anything before. The bytes that follow (as many as the second number says) are its
/// [`part`]. The answer, in the place of an answer's bytes, is 0 or the number of an error (errno(3)).
pub const SHOW: u32 = u32::MAX - 2;
/// The most bytes of a part's name.
pub const MAX_PART: usize = 256;

/// How the n-th volume of a container is called.
pub fn part(container: &str, number: usize) -> String {
    format!("{container}/{number}")
}

/// The most regions of memory.
pub const MAX_REGIONS: usize = 16;
/// The most bytes of a [`Lent`].
pub const MAX_LENT: usize = (HEAD + EACH * MAX_REGIONS) * NUMBER;

const NUMBER: usize = size_of::<u64>();
/// The numbers before the regions, and of each region.
const HEAD: usize = 6;
const EACH: usize = 3;

/// A queue, and the guest memory in which it and its requests lie.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Lent {
    /// The number of its descriptors.
    pub size: u16,
    /// Whether driver and device have agreed on `VIRTIO_RING_F_EVENT_IDX`.
    pub event_idx: bool,
    /// The next index of the available ring.
    pub next_avail: u16,
    /// Where the guest has the table of descriptors.
    pub descriptors: u64,
    /// The available ring.
    pub available: u64,
    /// The used ring, which says itself how far it is filled.
    pub used: u64,
    /// The guest's memory.
    pub regions: Vec<Region>,
}

/// A part of the guest's memory, which is a part of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// Where the guest has it.
    pub address: u64,
    /// Its bytes.
    pub length: u64,
    /// Where it begins in the file.
    pub offset: u64,
}

impl Lent {
    /// As it is sent.
    pub fn encode(&self) -> Vec<u8> {
        let Lent { size, event_idx, next_avail, descriptors, available, used, ref regions } = *self;
        let head = [size.into(), event_idx.into(), next_avail.into(), descriptors, available, used];
        let regions = regions.iter().flat_map(|region| [region.address, region.length, region.offset]);
        head.into_iter().chain(regions).flat_map(u64::to_le_bytes).collect()
    }

    /// None: it makes no sense.
    pub fn decode(bytes: &[u8]) -> Option<Lent> {
        let (numbers, rest) = bytes.as_chunks::<NUMBER>();
        let mut numbers = numbers.iter().map(|number| u64::from_le_bytes(*number));
        let mut lent = Lent {
            size: numbers.next()?.try_into().ok()?,
            event_idx: [false, true].get(usize::try_from(numbers.next()?).ok()?).copied()?,
            next_avail: numbers.next()?.try_into().ok()?,
            descriptors: numbers.next()?,
            available: numbers.next()?,
            used: numbers.next()?,
            regions: Vec::new(),
        };
        while let Some(address) = numbers.next() {
            lent.regions.push(Region { address, length: numbers.next()?, offset: numbers.next()? });
        }
        (rest.is_empty() && (1..=MAX_REGIONS).contains(&lent.regions.len())).then_some(lent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_lent_arrives_as_it_was() {
        let region = |number| Region { address: number, length: 2, offset: u64::MAX };
        for regions in [1, MAX_REGIONS] {
            let regions = (0..regions as u64).map(region).collect();
            let lent =
                Lent { size: 128, event_idx: true, next_avail: 65_535, used: 1 << 40, regions, ..Lent::default() };
            let bytes = lent.encode();
            assert_eq!(Lent::decode(&bytes), Some(lent));
            assert!(bytes.len() <= MAX_LENT);
            (0..bytes.len()).for_each(|cut| {
                assert!(Lent::decode(&bytes[..cut]).is_none_or(|less| less.regions.len() < MAX_REGIONS))
            });
        }
    }

    #[test]
    fn what_makes_no_sense_is_not_taken() {
        let lent = Lent { regions: vec![Region { address: 0, length: 1, offset: 0 }], ..Lent::default() };
        let good = lent.encode();
        assert_eq!(Lent::decode(&good), Some(lent.clone()));
        for (number, value) in [(0, 65_536u64), (1, 2), (2, 65_536)] {
            let mut bad = good.clone();
            bad[8 * number..8 * number + 8].copy_from_slice(&value.to_le_bytes());
            assert_eq!(Lent::decode(&bad), None, "number {number}");
        }
        assert_eq!(Lent::decode(&Lent { regions: Vec::new(), ..lent.clone() }.encode()), None);
        assert_eq!(Lent::decode(&Lent { regions: vec![lent.regions[0]; MAX_REGIONS + 1], ..lent }.encode()), None);
    }
}
