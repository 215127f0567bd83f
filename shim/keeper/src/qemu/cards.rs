//! Builds QEMU's arguments for network cards. The functions are pure.

use super::{Opt, QemuArgs};
use crate::network::format_mac;
use nacelle_model::machine::{Board, CardModel};
use std::os::fd::RawFd;

/// A network card.
#[derive(Debug)]
pub struct NetworkCard {
    /// The queues of the card's tap.
    pub taps: Vec<RawFd>,
    /// The card's model.
    pub model: CardModel,
    /// The hardware address.
    pub mac: [u8; 6],
    /// The MTU that the guest receives; 0 for none.
    pub mtu: u32,
    /// The position in the boot order.
    pub boot_order: Option<u32>,
}

/// Adds all cards with their backends.
pub(super) fn add_cards(args: &mut QemuArgs, cards: &[NetworkCard], board: Board) {
    for (n, card) in cards.iter().enumerate() {
        let name = format!("net{n}");
        let tap = Opt::new("tap").set("id", &name);
        let has_queues = card.taps.len() > 1;
        let numbers = card.taps.iter().map(ToString::to_string).collect::<Vec<_>>().join(":");
        args.add("netdev", tap.set(if has_queues { "fds" } else { "fd" }, numbers).set("vhost", "off"));
        let device = card_model(args, card.model).set("netdev", &name).set("mac", format_mac(&card.mac));
        let device = device.set_if("mq", has_queues.then_some("on"));
        // On PCI: one interrupt per queue and direction, one for configuration changes, and one for the control queue.
        let vectors = (has_queues && board != Board::Microvm).then(|| card.taps.len() * 2 + 2);
        let mtu = (card.model == CardModel::Virtio && card.mtu > 0).then_some(card.mtu);
        // No option ROM unless the VM boots from the card. Only PCI cards have one.
        let program = (card.boot_order.is_none() && board != Board::Microvm).then_some("");
        let device = device.set_if("vectors", vectors).set_if("host_mtu", mtu);
        args.device(device.set_if("bootindex", card.boot_order).set_if("romfile", program));
    }
}

fn card_model(args: &mut QemuArgs, model: CardModel) -> Opt {
    match model {
        CardModel::Virtio => args.virtio("virtio-net"),
        CardModel::E1000 => Opt::new("e1000"),
        CardModel::E1000e => Opt::new("e1000e"),
        CardModel::Rtl8139 => Opt::new("rtl8139"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_card_has_its_tap_with_all_its_queues() {
        let card = |taps: &[RawFd], model| NetworkCard {
            taps: taps.to_vec(),
            model,
            mac: [2, 0, 0, 0, 0, 1],
            mtu: 1500,
            boot_order: None,
        };
        let words = |board: Board| {
            let mut args = QemuArgs { words: Vec::new(), free_slots: board.places() };
            add_cards(&mut args, &[card(&[7, 8], CardModel::Virtio), card(&[9], CardModel::E1000)], board);
            args.words
        };
        let pci = words(Board::Q35);
        assert_eq!(pci[1], "tap,id=net0,fds=7:8,vhost=off");
        assert_eq!(pci[3], "virtio-net-pci,netdev=net0,mac=02:00:00:00:00:01,mq=on,vectors=6,host_mtu=1500,romfile=");
        assert_eq!(pci[5], "tap,id=net1,fd=9,vhost=off");
        assert_eq!(pci[7], "e1000,netdev=net1,mac=02:00:00:00:00:01,romfile=");
        assert!(words(Board::Microvm)[3].ends_with("netdev=net0,mac=02:00:00:00:00:01,mq=on,host_mtu=1500"));
    }
}
