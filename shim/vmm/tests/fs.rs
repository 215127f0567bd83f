//! Tests shared queues of the file-system device: what the file-server process receives, and what happens to a queue that this
//! process does not return. That such a queue is served is tested in shim/fs/tests/file_server.rs.

#[path = "../src/virtio/fs/file_server_peer.rs"]
mod file_server_peer;
#[allow(dead_code, reason = "each test file uses a part of it")]
mod guest;

use file_server_peer::{header, receive_shared_queue};
use guest::{FrontEnd, REGION, SECOND};
use nacelle_base::share::{SharedRegion, SharedVirtqueue, UNSHARE_VIRTQUEUE};
use nacelle_vmm::fs::Fs;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::thread;
use vhost::VhostBackend;
use vm_memory::{Bytes, GuestAddress};

/// Returns a front end whose device shares its queues, and the other ends of the streams.
fn device_sharing_queues() -> (FrontEnd, [UnixStream; 2]) {
    let (first, first_peer) = UnixStream::pair().unwrap();
    let (second, second_peer) = UnixStream::pair().unwrap();
    (FrontEnd::new(Fs::new([first, second]).unwrap().sharing_queues().device(), 2), [first_peer, second_peer])
}

#[test]
fn the_file_server_receives_the_location_of_a_queue() {
    let (mut front_end, [_its, mut second_peer]) = device_sharing_queues();
    let (descriptors, available, used) = front_end.queues[1].driver.addresses();
    // Returns the queue each time it is requested, with a position one further than the last time.
    let other = thread::spawn(move || {
        let mut all = Vec::new();
        for next in 5u32.. {
            let Some((shared, fds)) = receive_shared_queue(&mut second_peer) else { break };
            assert_eq!(fds, 2 + shared.regions.len());
            all.push(shared);
            assert_eq!(header(&mut second_peer), Some([UNSHARE_VIRTQUEUE, 0]));
            second_peer.write_all(&next.to_le_bytes()).unwrap();
        }
        all
    });
    assert_eq!(front_end.front.get_vring_base(1).unwrap(), 5);
    let queue = front_end.queues.remove(1);
    // The queue continues with the old interrupt, and again with each new one.
    front_end.start(1, &queue, 5);
    front_end.front.set_vring_call(1, &queue.call).unwrap();
    assert_eq!(front_end.front.get_vring_base(1).unwrap(), 8);
    drop(front_end);
    let regions = vec![
        SharedRegion { address: 0, length: REGION, offset: 0 },
        SharedRegion { address: SECOND, length: REGION, offset: REGION },
    ];
    let shared = SharedVirtqueue { size: 128, event_idx: true, next_avail: 0, descriptors, available, used, regions };
    let all = [0, 5, 6, 7].map(|next_avail| SharedVirtqueue { next_avail, ..shared.clone() });
    assert_eq!(other.join().unwrap(), all);
}

#[test]
fn a_file_server_that_keeps_a_queue_is_disconnected() {
    for nonsense in [false, true] {
        let (mut front_end, [_its, mut second_peer]) = device_sharing_queues();
        receive_shared_queue(&mut second_peer).unwrap();
        let at = front_end.allocate(4096);
        front_end.memory.write_obj(7u64, GuestAddress(at + 8)).unwrap();
        front_end.queues[1].driver.submit(&[(at, 40, false), (at + 2048, 100, true)]);
        if nonsense {
            // This process serves the queue from now on.
            second_peer.write_all(b"a word without a question").unwrap();
        } else {
            // The request fails after some seconds.
            assert_eq!(front_end.front.get_vring_base(1).unwrap(), 0);
            let queue = front_end.queues.remove(1);
            front_end.start(1, &queue, 0);
            front_end.queues.push(queue);
        }
        assert_eq!(front_end.queues[1].wait_used().1, 16);
        let error: i32 = front_end.memory.read_obj(GuestAddress(at + 2048 + 4)).unwrap();
        assert_eq!(error, -libc::EIO);
    }
}
