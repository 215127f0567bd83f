//! Requests of a guest to a block device.

use super::FrontEnd;
use vm_memory::{Bytes, GuestAddress};

pub const READ: u32 = 0;
pub const WRITE: u32 = 1;
pub const FLUSH: u32 = 4;
pub const SERIAL: u32 = 8;
pub const DISCARD: u32 = 11;
pub const ZEROES: u32 = 13;

/// Sends one request with `out` behind the header and space for `reply_bytes` bytes of data. Returns its status and the data read.
pub fn request(front_end: &mut FrontEnd, kind: u32, sector: u64, out: &[u8], reply_bytes: u32) -> (u8, Vec<u8>) {
    let at = front_end.allocate(8192 + out.len() as u64 + u64::from(reply_bytes));
    let memory = front_end.memory.clone();
    let (header, status, out_at) = (at, at + 512, at + 4096);
    let reply_at = out_at + out.len() as u64;
    memory.write_obj(kind, GuestAddress(header)).unwrap();
    memory.write_obj(sector, GuestAddress(header + 8)).unwrap();
    memory.write_obj(0xffu8, GuestAddress(status)).unwrap();
    let mut buffers = vec![(header, 16, false)];
    if !out.is_empty() {
        memory.write_slice(out, GuestAddress(out_at)).unwrap();
        buffers.push((out_at, out.len() as u32, false));
    }
    if reply_bytes > 0 {
        // Two pieces, to test that they are combined.
        let half = reply_bytes / 2;
        buffers.push((reply_at, half, true));
        buffers.push((reply_at + u64::from(half), reply_bytes - half, true));
    }
    buffers.push((status, 1, true));
    let queue = &mut front_end.queues[0];
    let head = queue.driver.submit(&buffers);
    queue.kick();
    let (used, written) = queue.wait_used();
    assert_eq!(used, head);
    let status: u8 = memory.read_obj(GuestAddress(status)).unwrap();
    if status == 0 && kind == READ {
        assert_eq!(written, reply_bytes + 1);
    }
    let mut bytes = vec![0; reply_bytes as usize];
    memory.read_slice(&mut bytes, GuestAddress(reply_at)).unwrap();
    (status, bytes)
}
