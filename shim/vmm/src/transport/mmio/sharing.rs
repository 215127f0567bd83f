//! Tests memory that a device shares with its driver: the driver finds it, only this memory is shared with a consumer of a
//! queue that lies in it, and a restore brings its content back.

use super::harness::{MEMORY, MmioGuest};
use super::{RestoreError, SharedPage, Transport, reg};
use crate::transport::vhost_user::harness::memfd;
use crate::virtio::fs::Fs;
use crate::virtio::fs::file_server_peer::{header, receive_shared_queue};
use crate::virtio::rng::Rng;
use crate::virtio::{Device, Memory, SHARED_MEMORY_ID};
use nacelle_base::share::{SharedRegion, SharedVirtqueue, UNSHARE_VIRTQUEUE};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread;
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestRegionMmap, MmapRegion};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

const BYTES: usize = 2 << 20;
/// The address of the second of the two memories; the queues lie at 0.
const FAR: u64 = 1 << 32;

fn region(address: u64) -> Arc<GuestRegionMmap<()>> {
    let mapped = MmapRegion::from_file(FileOffset::new(memfd(BYTES as u64), 0), BYTES).unwrap();
    Arc::new(GuestRegionMmap::new(mapped, GuestAddress(address)).unwrap())
}

/// Returns a guest whose own memory begins at `own`, with a device that shares memory at `shared`.
fn guest(device: Box<dyn Device>, own: u64, shared: u64) -> MmioGuest {
    let memory = Arc::new(Memory::from_ranges(&[(GuestAddress(own), MEMORY)]).unwrap());
    let region = region(shared);
    let irq = EventFd::new(EFD_NONBLOCK).unwrap();
    let ours = irq.try_clone().unwrap();
    let transport = Transport::with_shared_memory(device, memory.clone(), ours, Some(region.clone())).unwrap();
    MmioGuest { memory: Arc::new(memory.insert_region(region).unwrap()), transport, irq, queues: Vec::new() }
}

/// Returns a file-system device and the other ends of its streams.
fn files() -> (Box<dyn Device>, [UnixStream; 2]) {
    let (first, first_peer) = UnixStream::pair().unwrap();
    let (second, second_peer) = UnixStream::pair().unwrap();
    (Fs::new([first, second]).unwrap().sharing_queues().device(), [first_peer, second_peer])
}

#[test]
fn a_driver_finds_shared_memory_by_its_id() {
    let guest = guest(Rng::new().device(), 0, FAR + 0x20_0000);
    let read = |select| {
        guest.set(reg::SHM_SEL, select);
        [reg::SHM_LEN_LOW, reg::SHM_LEN_HIGH, reg::SHM_BASE_LOW, reg::SHM_BASE_HIGH].map(|register| guest.get(register))
    };
    assert_eq!(read(SHARED_MEMORY_ID), [BYTES as u32, 0, 0x20_0000, 1]);
    assert_eq!([0, 2, u32::MAX].map(read), [[u32::MAX; 4]; 3]);
}

#[test]
fn shared_memory_must_not_overlap_guest_memory() {
    let memory = Arc::new(Memory::from_ranges(&[(GuestAddress(0), MEMORY)]).unwrap());
    let irq = EventFd::new(EFD_NONBLOCK).unwrap();
    assert!(
        Transport::with_shared_memory(Rng::new().device(), memory, irq, Some(region(MEMORY as u64 - 4096))).is_err()
    );
}

#[test]
fn only_the_shared_memory_is_sent_to_the_file_server() {
    let (device, [mut first_peer, mut second_peer]) = files();
    let mut guest = guest(device, FAR, 0);
    guest.start();
    for (index, stream) in [&mut first_peer, &mut second_peer].into_iter().enumerate() {
        let (shared_queue, fds) = receive_shared_queue(stream).unwrap();
        let (descriptors, available, used) = guest.queues[index].addresses();
        let regions = vec![SharedRegion { address: 0, length: BYTES as u64, offset: 0 }];
        assert_eq!(
            shared_queue,
            SharedVirtqueue { size: 128, event_idx: true, next_avail: 0, descriptors, available, used, regions }
        );
        // The kick, the interrupt and the memory.
        assert_eq!(fds, 3);
    }
    let back = thread::spawn(move || {
        for stream in [&mut first_peer, &mut second_peer] {
            assert_eq!(header(stream), Some([UNSHARE_VIRTQUEUE, 0]));
            stream.write_all(&7u32.to_le_bytes()).unwrap();
        }
    });
    let state = guest.transport.save();
    back.join().unwrap();
    assert_eq!([0, 1].map(|index| state.registers.queues[index].next_available), [7, 7]);
}

#[test]
fn drivers_without_shared_memory_are_served_over_the_stream() {
    let (device, [_its, mut second_peer]) = files();
    let mut guest = guest(device, 0, FAR);
    guest.start();
    guest.memory.write_obj(7u64, GuestAddress(0x8_0000 + 8)).unwrap();
    guest.queues[1].submit(&[(0x8_0000, 40, false), (0x9_0000, 20, true)]);
    guest.kick(1);
    assert_eq!(header(&mut second_peer), Some([40, 20]));
    let mut request = [0; 40];
    second_peer.read_exact(&mut request).unwrap();
    assert_eq!(request[8], 7);
    second_peer.write_all(&[3, 0, 0, 0, 1, 2, 3]).unwrap();
    assert_eq!(guest.wait_used(1).1, 3);
}

#[test]
fn the_content_of_shared_memory_is_restored() {
    let there = guest(Rng::new().device(), 0, FAR);
    let at = |page: u64| GuestAddress(FAR + page * 4096 + 5);
    let last = BYTES as u64 / 4096 - 1;
    [1, last].into_iter().for_each(|page| there.memory.write_obj(0x1234_5678u32, at(page)).unwrap());
    let state = there.transport.save();
    assert_eq!(state.shared.iter().map(|page| u64::from(page.number)).collect::<Vec<_>>(), [1, last]);
    let written = serde_json::to_vec(&state).unwrap();
    let state: super::TransportState = serde_json::from_slice(&written).unwrap();

    let here = guest(Rng::new().device(), 0, FAR);
    here.memory.write_obj(9u32, at(0)).unwrap();
    here.transport.restore(&state).unwrap();
    assert_eq!([0, 1, last].map(|page| here.memory.read_obj::<u32>(at(page)).unwrap()), [0, 0x1234_5678, 0x1234_5678]);

    let with = |page| super::TransportState { shared: vec![page], ..state.clone() };
    let bytes = vec![1; 4096];
    for wrong in [
        SharedPage { number: last as u32 + 1, bytes: bytes.clone() },
        SharedPage { number: u32::MAX, bytes: bytes.clone() },
        SharedPage { number: 0, bytes: vec![1; 4097] },
    ] {
        let error = here.transport.restore(&with(wrong)).unwrap_err();
        assert!(matches!(error, RestoreError::Invalid { .. }), "{error}");
    }
    // A device without shared memory rejects saved pages.
    let none = MmioGuest::new(Rng::new().device());
    assert!(none.transport.restore(&with(SharedPage { number: 0, bytes })).is_err());
}
