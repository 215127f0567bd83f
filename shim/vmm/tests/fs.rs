//! Tests shared queues of the file-system device: what the file-server process receives, and what happens to a queue that this
//! process does not return. That such a queue is served is tested in shim/fs/tests/file_server.rs.

#[path = "../src/virtio/fs/borrower.rs"]
mod borrower;
#[allow(dead_code, reason = "each test file uses a part of it")]
mod guest;

use borrower::{header, take};
use guest::{Machine, REGION, SECOND};
use nacelle_base::share::{SharedRegion, SharedVirtqueue, UNSHARE_VIRTQUEUE};
use nacelle_vmm::fs::Fs;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::thread;
use vhost::VhostBackend;
use vm_memory::{Bytes, GuestAddress};

/// Returns a front end whose device shares its queues, and the other ends of the streams.
fn lending() -> (Machine, [UnixStream; 2]) {
    let (first, its) = UnixStream::pair().unwrap();
    let (second, theirs) = UnixStream::pair().unwrap();
    (Machine::new(Fs::new([first, second]).unwrap().lending().device(), 2), [its, theirs])
}

#[test]
fn who_has_the_files_is_told_where_a_queue_lies() {
    let (mut machine, [_its, mut theirs]) = lending();
    let (descriptors, available, used) = machine.queues[1].driver.addresses();
    // Returns the queue each time it is requested, with a position one further than the last time.
    let other = thread::spawn(move || {
        let mut all = Vec::new();
        for next in 5u32.. {
            let Some((lent, fds)) = take(&mut theirs) else { break };
            assert_eq!(fds, 2 + lent.regions.len());
            all.push(lent);
            assert_eq!(header(&mut theirs), Some([UNSHARE_VIRTQUEUE, 0]));
            theirs.write_all(&next.to_le_bytes()).unwrap();
        }
        all
    });
    assert_eq!(machine.front.get_vring_base(1).unwrap(), 5);
    let queue = machine.queues.remove(1);
    // The queue continues with the old interrupt, and again with each new one.
    machine.start(1, &queue, 5);
    machine.front.set_vring_call(1, &queue.call).unwrap();
    assert_eq!(machine.front.get_vring_base(1).unwrap(), 8);
    drop(machine);
    let regions = vec![
        SharedRegion { address: 0, length: REGION, offset: 0 },
        SharedRegion { address: SECOND, length: REGION, offset: REGION },
    ];
    let lent = SharedVirtqueue { size: 128, event_idx: true, next_avail: 0, descriptors, available, used, regions };
    let all = [0, 5, 6, 7].map(|next_avail| SharedVirtqueue { next_avail, ..lent.clone() });
    assert_eq!(other.join().unwrap(), all);
}

#[test]
fn who_does_not_give_a_queue_back_is_asked_no_more() {
    for nonsense in [false, true] {
        let (mut machine, [_its, mut theirs]) = lending();
        take(&mut theirs).unwrap();
        let at = machine.allocate(4096);
        machine.memory.write_obj(7u64, GuestAddress(at + 8)).unwrap();
        machine.queues[1].driver.submit(&[(at, 40, false), (at + 2048, 100, true)]);
        if nonsense {
            // This process serves the queue from now on.
            theirs.write_all(b"a word without a question").unwrap();
        } else {
            // The request fails after some seconds.
            assert_eq!(machine.front.get_vring_base(1).unwrap(), 0);
            let queue = machine.queues.remove(1);
            machine.start(1, &queue, 0);
            machine.queues.push(queue);
        }
        assert_eq!(machine.queues[1].wait_used().1, 16);
        let error: i32 = machine.memory.read_obj(GuestAddress(at + 2048 + 4)).unwrap();
        assert_eq!(error, -libc::EIO);
    }
}
