//! Defines the protocol of volumes of the node, which three programs implement: the guest's agent mounts the virtio-fs
//! share, the device in the pod process forwards requests, and the file-server process (`nacelle-fs`) answers them. It
//! performs no I/O.

/// The virtio-fs tag of the share.
pub const TAG: &str = "nacelle";
/// The mount point of the share in the guest; each volume is `DIRECTORY/CONTAINER/NUMBER` in it.
pub const DIRECTORY: &str = "/run/nacelle/volumes";
/// The number of queues of the device, and of streams to the file-server process: one for high-priority requests and one
/// for all others.
pub const QUEUES: usize = 2;
/// The number of descriptors of a queue. Linux makes no request that does not fit into one: less than half a MiB of data.
pub const QUEUE_SIZE: u16 = 128;
/// The guest's read-ahead in KiB: the largest request that Linux makes on such a queue, which has one descriptor for each
/// page and four for headers.
pub const READ_AHEAD_KIB: u32 = (QUEUE_SIZE as u32 - 4) * 4;
/// The maximum length of a request, and of a reply, in bytes.
pub const MAX_MESSAGE: usize = (1 << 20) + (64 << 10);
/// The length of the header of a request on a stream: the length of the request and the maximum length of the reply, both
/// as little-endian u32. A reply follows its length in the same form; a request without a reply gets an empty one.
pub const REQUEST_HEADER: usize = 8;
/// The length of the header of a reply.
pub const REPLY_HEADER: usize = 4;

/// In place of a request's length: shares a virtqueue. As many bytes as the second number says follow and are a [`SharedVirtqueue`];
/// with the first of them come the descriptors: kick, call, and one for each memory region. From then on requests are
/// served in guest memory, and the stream is idle until the virtqueue is returned.
pub const SHARE_VIRTQUEUE: u32 = u32::MAX;
/// In place of a request's length: ends the sharing of the virtqueue. The reply, in place of a reply's length, is the next
/// index of the available ring; all requests before it are completed.
pub const UNSHARE_VIRTQUEUE: u32 = u32::MAX - 1;
/// In place of a request's length, on the first stream of a share of one volume: selects the volume and
/// resets the state of the share. As many bytes as the second number says follow and are the volume's name ([`volume_name`]). The
/// reply, in place of a reply's length, is 0 or an error number (errno(3)).
pub const SELECT_VOLUME: u32 = u32::MAX - 2;
/// The maximum length of a volume's name ([`volume_name`]) in bytes.
pub const MAX_VOLUME_NAME: usize = 256;

/// Returns the name of the n-th volume of a container.
pub fn volume_name(container: &str, number: usize) -> String {
    format!("{container}/{number}")
}

/// The maximum number of memory regions.
pub const MAX_REGIONS: usize = 16;
/// The maximum length of an encoded [`SharedVirtqueue`] in bytes.
pub const MAX_SHARED_VIRTQUEUE: usize = (HEAD_VALUES + REGION_VALUES * MAX_REGIONS) * VALUE_BYTES;

const VALUE_BYTES: usize = size_of::<u64>();
/// The number of u64 values before the regions, and of each region.
const HEAD_VALUES: usize = 6;
const REGION_VALUES: usize = 3;

/// A shared virtqueue, and the guest memory in which it and its requests lie.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SharedVirtqueue {
    /// The number of descriptors of the virtqueue.
    pub size: u16,
    /// Driver and device have negotiated `VIRTIO_RING_F_EVENT_IDX`.
    pub event_idx: bool,
    /// The next index of the available ring.
    pub next_avail: u16,
    /// The guest address of the descriptor table.
    pub descriptors: u64,
    /// The guest address of the available ring.
    pub available: u64,
    /// The guest address of the used ring, which contains its own index.
    pub used: u64,
    /// The regions of guest memory.
    pub regions: Vec<SharedRegion>,
}

/// A region of guest memory, which is a range of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedRegion {
    /// The guest address of the region.
    pub address: u64,
    /// The length in bytes.
    pub length: u64,
    /// The offset in the file.
    pub offset: u64,
}

impl SharedVirtqueue {
    /// Encodes the message.
    pub fn encode(&self) -> Vec<u8> {
        let SharedVirtqueue { size, event_idx, next_avail, descriptors, available, used, ref regions } = *self;
        let head = [size.into(), event_idx.into(), next_avail.into(), descriptors, available, used];
        let regions = regions.iter().flat_map(|region| [region.address, region.length, region.offset]);
        head.into_iter().chain(regions).flat_map(u64::to_le_bytes).collect()
    }

    /// Decodes the message; returns `None` if it is invalid.
    pub fn decode(bytes: &[u8]) -> Option<SharedVirtqueue> {
        let (numbers, rest) = bytes.as_chunks::<VALUE_BYTES>();
        let mut numbers = numbers.iter().map(|number| u64::from_le_bytes(*number));
        let mut virtqueue = SharedVirtqueue {
            size: numbers.next()?.try_into().ok()?,
            event_idx: [false, true].get(usize::try_from(numbers.next()?).ok()?).copied()?,
            next_avail: numbers.next()?.try_into().ok()?,
            descriptors: numbers.next()?,
            available: numbers.next()?,
            used: numbers.next()?,
            regions: Vec::new(),
        };
        while let Some(address) = numbers.next() {
            virtqueue.regions.push(SharedRegion { address, length: numbers.next()?, offset: numbers.next()? });
        }
        (rest.is_empty() && (1..=MAX_REGIONS).contains(&virtqueue.regions.len())).then_some(virtqueue)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shared_virtqueue_is_decoded_as_it_was_encoded() {
        let region = |number| SharedRegion { address: number, length: 2, offset: u64::MAX };
        for regions in [1, MAX_REGIONS] {
            let regions = (0..regions as u64).map(region).collect();
            let virtqueue = SharedVirtqueue {
                size: 128,
                event_idx: true,
                next_avail: 65_535,
                used: 1 << 40,
                regions,
                ..SharedVirtqueue::default()
            };
            let bytes = virtqueue.encode();
            assert_eq!(SharedVirtqueue::decode(&bytes), Some(virtqueue));
            assert!(bytes.len() <= MAX_SHARED_VIRTQUEUE);
            (0..bytes.len()).for_each(|cut| {
                assert!(SharedVirtqueue::decode(&bytes[..cut]).is_none_or(|less| less.regions.len() < MAX_REGIONS))
            });
        }
    }

    #[test]
    fn an_invalid_shared_virtqueue_is_not_decoded() {
        let virtqueue = SharedVirtqueue {
            regions: vec![SharedRegion { address: 0, length: 1, offset: 0 }],
            ..SharedVirtqueue::default()
        };
        let good = virtqueue.encode();
        assert_eq!(SharedVirtqueue::decode(&good), Some(virtqueue.clone()));
        for (number, value) in [(0, 65_536u64), (1, 2), (2, 65_536)] {
            let mut bad = good.clone();
            bad[8 * number..8 * number + 8].copy_from_slice(&value.to_le_bytes());
            assert_eq!(SharedVirtqueue::decode(&bad), None, "number {number}");
        }
        assert_eq!(
            SharedVirtqueue::decode(&SharedVirtqueue { regions: Vec::new(), ..virtqueue.clone() }.encode()),
            None
        );
        assert_eq!(
            SharedVirtqueue::decode(
                &SharedVirtqueue { regions: vec![virtqueue.regions[0]; MAX_REGIONS + 1], ..virtqueue }.encode()
            ),
            None
        );
    }
}
