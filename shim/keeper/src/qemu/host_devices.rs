//! Builds QEMU's arguments for passed-through PCI devices of the node. The functions are pure.

use super::{Opt, QemuArgs};
use nacelle_model::machine::{Board, MachineDocument};

/// The directory where this process sees the devices' attributes: it does not see sysfs.
const VFIO_DIRECTORY: &str = "/dev/vfio";
/// The first chassis number of the ports, after those of hot-plug slots.
const FIRST_CHASSIS: usize = 32;

/// Adds all devices, each behind a root port of its own where the board has ports, as on physical boards.
pub(super) fn add_devices(args: &mut QemuArgs, document: &MachineDocument) {
    for (n, device) in document.host_devices.iter().enumerate() {
        let port = (document.board == Board::Q35).then(|| format!("passed-port{n}"));
        if let Some(port) = &port {
            let root =
                Opt::new("pcie-root-port").set("id", port).set("bus", "pcie.0").set("chassis", FIRST_CHASSIS + n);
            args.device(root);
        }
        let address = &device.address;
        let vfio = Opt::new("vfio-pci").set("id", format!("passed{n}")).set("host", address);
        args.device(vfio.set("sysfsdev", format!("{VFIO_DIRECTORY}/{address}")).set_if("bus", port));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::qemu::tests::document;
    use nacelle_model::machine::HostDevice;

    #[test]
    fn each_host_device_has_a_root_port_on_q35() {
        let words = |board| {
            let host_devices = vec![HostDevice { address: "0000:3b:00.1".into() }];
            let document = MachineDocument { board, host_devices, ..document() };
            let mut args = QemuArgs { words: Vec::new(), free_slots: board.places() };
            add_devices(&mut args, &document);
            args.words.into_iter().filter(|word| word != "-device").collect::<Vec<_>>()
        };
        let device = "vfio-pci,id=passed0,host=0000:3b:00.1,sysfsdev=/dev/vfio/0000:3b:00.1";
        let port = "pcie-root-port,id=passed-port0,bus=pcie.0,chassis=32";
        assert_eq!(words(Board::Q35), [port.to_owned(), format!("{device},bus=passed-port0")]);
        assert_eq!(words(Board::Pc), [device]);
    }
}
