//! Tests virtqueues that are shared with the file-server process, and large requests over a stream.

use super::guest::{BUFFER_BYTES, GETATTR, Guest, Queue, READ, RELEASE, ROOT, WRITE, eventually};
use super::{directory, volume};
use nix::mount::{MntFlags, umount2};
use nix::sys::signal::{Signal, kill};
use std::fs;
use vhost::VhostBackend;
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::EventFd;

/// `struct fuse_read_in`, and the beginning of `struct fuse_write_in`.
fn transfer(handle: u64, at: u64, bytes: u32) -> Vec<u8> {
    let mut body = [handle, at].map(u64::to_le_bytes).concat();
    body.extend([bytes, 0].map(u32::to_le_bytes).concat());
    body.extend([0; 16]);
    body
}

pub fn data_of_a_shared_virtqueue_is_transferred_correctly() {
    let (dir, directory) = directory();
    let mut guest = Guest::with_shared_virtqueues();
    guest.mount_volumes("c", &[volume(&directory)]).unwrap();
    let node = guest.find("c/0/file").unwrap();
    let handle = guest.open(node, libc::O_RDWR).unwrap();
    let data: Vec<u8> = (0..50_000u32).map(|number| (number / 7) as u8).collect();
    // The result does not depend on how request and reply are split.
    for (round, cuts) in [&[][..], &[40, 80], &[1, 2, 3, 15, 16, 17, 79, 81, 4096], &[40_000]].into_iter().enumerate() {
        let at = round as u64 * 100_000;
        let body = [transfer(handle, at, 50_000), data.clone()].concat();
        let request = guest.request(WRITE, node, &body);
        let answer = guest.send_over_virtqueue(&request, cuts);
        assert_eq!((answer.len(), &answer[16..20]), (24, &50_000u32.to_le_bytes()[..]));
        let request = guest.request(READ, node, &transfer(handle, at, 50_000));
        assert!(guest.send_over_virtqueue(&request, cuts)[16..] == data, "{cuts:?}");
        assert!(fs::read(directory.join("file")).unwrap()[at as usize..] == data, "{cuts:?}");
    }
    drop(guest);
    umount2(dir.path(), MntFlags::empty()).unwrap();
}

pub fn a_large_request_arrives_whole_over_a_stream() {
    let (dir, directory) = directory();
    let mut guest = Guest::new();
    guest.mount_volumes("c", &[volume(&directory)]).unwrap();
    let node = guest.find("c/0/file").unwrap();
    let file = guest.open(node, libc::O_RDWR).unwrap();
    // More than a stream accepts at once, and the maximum that virtiofsd writes.
    for length in [300_000u32, 1 << 20] {
        let data: Vec<u8> = (0..length).map(|number| (number / 3) as u8).collect();
        let written = guest.send_request(WRITE, node, &[transfer(file, 0, length), data.clone()].concat()).unwrap();
        assert_eq!(written[..4], length.to_le_bytes());
        assert!(fs::read(directory.join("file")).unwrap() == data, "{length}");
        // As Linux requests it: with space for exactly the reply.
        assert!(
            guest.send_request(READ, node, &transfer(file, 10, BUFFER_BYTES - 16)).unwrap()
                == data[10..][..BUFFER_BYTES as usize - 16]
        );
    }
    drop(guest);
    umount2(dir.path(), MntFlags::empty()).unwrap();
}

pub fn a_virtqueue_is_shared_returned_and_shared_again() {
    let (dir, directory) = directory();
    let mut guest = Guest::with_shared_virtqueues();
    guest.mount_volumes("c", &[volume(&directory)]).unwrap();
    for round in 0..3 {
        assert_eq!(guest.read("c/0/file").unwrap(), "of the node");
        let machine = guest.machine.as_mut().unwrap();
        if round == 0 {
            // Changes the interrupt while the virtqueue is in use.
            machine.queues[1].call = EventFd::new(libc::EFD_NONBLOCK).unwrap();
            machine.front.set_vring_call(1, &machine.queues[1].call).unwrap();
        } else {
            let base = u16::try_from(machine.front.get_vring_base(1).unwrap()).unwrap();
            assert_eq!(base, machine.queues[1].driver.taken());
            let queue = machine.queues.remove(1);
            machine.start(1, &queue, base);
            machine.queues.push(queue);
        }
    }
    drop(guest);
    umount2(dir.path(), MntFlags::empty()).unwrap();
}

pub fn requests_without_a_waiter_are_completed_and_notified() {
    let (dir, directory) = directory();
    let mut guest = Guest::with_shared_virtqueues();
    guest.mount_volumes("c", &[volume(&directory)]).unwrap();
    let node = guest.find("c/0/file").unwrap();
    let [first, second] = [0, 1].map(|_| guest.open(node, libc::O_RDONLY).unwrap());
    let open = || fs::read_dir(format!("/proc/{}/fd", guest.pid)).unwrap().count();
    let before = open();
    let release = |handle: u64| guest.request(RELEASE, node, &[handle.to_le_bytes().as_slice(), &[0; 16]].concat());
    let (alone, with, other) = (release(first), release(second), guest.request(GETATTR, node, &[0; 16]));
    let machine = guest.machine.as_mut().unwrap();
    let place = |number: u64| guest.buffer_address + 4096 * number;
    // A request without a waiter alone, then one before a request with a waiter, with one kick: one interrupt for each kick.
    for requests in [&[alone][..], &[with, other]] {
        let Queue { driver, kick, call } = &mut machine.queues[1];
        let _ = call.read(); // drains earlier interrupts
        driver.want_next_interrupt();
        for (number, request) in (0..).step_by(2).zip(requests) {
            machine.memory.write_slice(request, GuestAddress(place(number))).unwrap();
            driver.submit(&[(place(number), request.len() as u32, false), (place(number + 1), 200, true)]);
        }
        kick.write(1).unwrap();
        let mut called = 0;
        eventually("an interrupt", || {
            called = call.read().unwrap_or(0);
            called > 0
        });
        assert_eq!(called, 1);
        let used = std::iter::from_fn(|| driver.take_used()).map(|(_, written)| written).collect::<Vec<_>>();
        assert_eq!(used, [16, 120][..requests.len()]);
    }
    assert_eq!(before - open(), 2);
    drop(guest);
    umount2(dir.path(), MntFlags::empty()).unwrap();
}

pub fn invalid_chains_of_a_shared_virtqueue_have_no_effect() {
    let (dir, directory) = directory();
    let mut guest = Guest::with_shared_virtqueues();
    guest.mount_volumes("c", &[volume(&directory)]).unwrap();
    let (own, at) = (1u64 << 60, guest.buffer_address);
    let request = guest.request(GETATTR, ROOT, &[0; 16]);
    guest.machine.as_ref().unwrap().memory.write_slice(&request, GuestAddress(at)).unwrap();
    // Invalid addresses: outside guest memory, at its end, in the process's own; a readable buffer after a writable one; no space.
    let long = request.len() as u32;
    for (buffers, written) in [
        (vec![(1 << 40, long, false), (at + 4096, 200, true)], 0),
        (vec![((8 << 20) - 1, long, false), (at + 4096, 200, true)], 0),
        (vec![(own + 0x5000, long, false), (at + 4096, 200, true)], 0),
        (vec![(at, long, false), (own, 200, true)], 0),
        (vec![(at + 4096, 200, true), (at, long, false)], 0),
        (vec![(at, long, false)], 0),
        (vec![(at, 0, false), (at + 4096, 200, true)], 0),
        (vec![(at, 39, false), (at + 4096, 200, true)], 16),
        (vec![(at, 2 << 20, false), (at + 4096, 200, true)], 16),
        (vec![(at, long, false), (at + 4096, 200, true)], 120),
    ] {
        assert_eq!(guest.send_chain(&buffers), written, "{buffers:x?}");
    }
    // An invalid ring is not served any more; the process and the other virtqueue continue.
    let machine = guest.machine.as_mut().unwrap();
    machine.queues[1].driver.set_available(20_000);
    machine.queues[1].kick();
    machine.queues.swap(0, 1);
    assert_eq!(guest.read("c/0/file").unwrap(), "of the node");
    drop(guest);
    umount2(dir.path(), MntFlags::empty()).unwrap();
}

pub fn without_the_process_a_shared_virtqueue_is_answered_with_errors() {
    let mut guest = Guest::with_shared_virtqueues();
    guest.find("c").unwrap_err();
    kill(guest.pid, Signal::SIGKILL).unwrap();
    for _ in 0..3 {
        assert_eq!(guest.find("c"), Err(libc::EIO));
    }
}
