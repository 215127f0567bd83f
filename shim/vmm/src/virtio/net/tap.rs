//! Prepares the open tap of a pair: its flags, its header size, and its offloads for frames to the guest.

use super::feature;
use super::{HEADER, NetError, sys};
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

const TUN_F_CSUM: u32 = 0x01;
const TUN_F_TSO4: u32 = 0x02;
const TUN_F_TSO6: u32 = 0x04;
const TUN_F_TSO_ECN: u32 = 0x08;
const TUN_F_USO: u32 = 0x20 | 0x40; // IPv4 and IPv6: the kernel accepts both or none

/// One queue of a tap.
#[derive(Debug)]
pub(super) struct Tap {
    fd: OwnedFd,
    /// Whether the queue receives frames. A tap with a single queue is always attached.
    attached: AtomicBool,
}

impl Tap {
    /// Checks and prepares an open tap. It becomes non-blocking, also for other processes, because that is a property of the
    /// open file description.
    pub(super) fn new(fd: OwnedFd, several: bool) -> Result<Tap, NetError> {
        let system = |what| move |source| NetError::System { what, source };
        let several = if several { libc::IFF_MULTI_QUEUE } else { 0 };
        let needed = (libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR | several).cast_unsigned();
        let got = sys::tap_flags(fd.as_fd()).map_err(system("read the flags of a tap"))?;
        if got & needed != needed {
            return Err(NetError::TapFlags { got, needed });
        }
        sys::set_header_size(fd.as_fd(), HEADER).map_err(system("set the header of a tap"))?;
        let flags = fcntl(&fd, FcntlArg::F_GETFL).map(OFlag::from_bits_retain);
        flags
            .and_then(|flags| fcntl(&fd, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK)))
            .map_err(|error| system("make a tap non-blocking")(error.into()))?;
        Ok(Tap { fd, attached: AtomicBool::new(true) })
    }

    /// Returns whether the kernel supports UDP segmentation offload (Linux 6.2).
    pub(super) fn has_uso(&self) -> bool {
        let with = sys::set_offload(self.as_fd(), TUN_F_CSUM | TUN_F_USO);
        with.is_ok()
    }

    /// Sets the offloads that the guest accepts: bits of [`feature::GUEST_OFFLOADS`].
    pub(super) fn set_offloads(&self, guest: u64) -> io::Result<()> {
        sys::set_offload(self.as_fd(), tun_bits(guest))
    }

    /// Sets which frames to the guest the kernel drops: `tun_filter` is a `struct tun_filter`.
    pub(super) fn set_filter(&self, tun_filter: &[u8]) -> io::Result<()> {
        sys::set_filter(self.as_fd(), tun_filter)
    }

    /// Attaches the queue to the interface's traffic or detaches it.
    pub(super) fn attach(&self, on: bool) -> io::Result<()> {
        if self.attached.swap(on, Ordering::AcqRel) == on {
            return Ok(());
        }
        sys::set_queue(self.as_fd(), on).inspect_err(|_failed| self.attached.store(!on, Ordering::Release))
    }

    /// Returns whether the queue is attached.
    pub(super) fn is_attached(&self) -> bool {
        self.attached.load(Ordering::Acquire)
    }
}

impl AsFd for Tap {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Converts the driver's feature bits into the tap's. Without checksum offload there is no segmentation offload (Virtio 1.2, 5.1.3.1).
fn tun_bits(guest: u64) -> u32 {
    let has = |bits: u64| guest & bits == bits;
    let bit = |bits: u64, tun: u32| if has(bits) { tun } else { 0 };
    if !has(feature::GUEST_CSUM) {
        return 0;
    }
    let segments = bit(feature::GUEST_TSO4, TUN_F_TSO4) | bit(feature::GUEST_TSO6, TUN_F_TSO6);
    let ecn = if segments == 0 { 0 } else { bit(feature::GUEST_ECN, TUN_F_TSO_ECN) };
    TUN_F_CSUM | segments | ecn | bit(feature::GUEST_USO, TUN_F_USO)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tap_gets_exactly_the_guests_offloads() {
        use feature::{GUEST_CSUM, GUEST_ECN, GUEST_TSO4, GUEST_TSO6, GUEST_USO, GUEST_USO4};
        let table = [
            (0, 0),
            (GUEST_CSUM, 1),
            (GUEST_TSO4 | GUEST_TSO6 | GUEST_ECN | GUEST_USO, 0),
            (GUEST_CSUM | GUEST_TSO4, 1 | 2),
            (GUEST_CSUM | GUEST_TSO6 | GUEST_ECN, 1 | 4 | 8),
            (GUEST_CSUM | GUEST_ECN, 1),
            (GUEST_CSUM | GUEST_USO4, 1),
            (GUEST_CSUM | GUEST_USO, 1 | 0x60),
            (feature::GUEST_OFFLOADS, 0x6f),
            (u64::MAX, 0x6f),
        ];
        for (guest, tun) in table {
            assert_eq!(tun_bits(guest), tun, "{guest:#x}");
        }
    }
}
