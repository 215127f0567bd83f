//! Holds the receive filter that the driver sets (Virtio 1.2, 5.1.6.5.1 and 5.1.6.5.2), and converts it into that of a tap
//! (`struct tun_filter`, linux/if_tun.h). The kernel then drops frames for others before they wake the VM: on a bridge each
//! multicast frame of one pod reaches all others.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

/// The address of an interface or of a group.
pub(crate) type MacAddress = [u8; 6];

/// The address of all interfaces.
const BROADCAST: MacAddress = [0xff; 6];
/// The tap compares this many addresses exactly (`FLT_EXACT_COUNT` in drivers/net/tun.c); the others are hashed, and must be groups.
const EXACT_ADDRESSES: usize = 8;
/// With more groups than this the guest receives the frames of all of them: the tap's hash has 64 bits.
const MAX_GROUPS: usize = 64;
/// `TUN_FLT_ALLMULTI`.
const ALL_GROUPS: u16 = 1;

/// A part of the filter, as a command of the driver sets it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum FilterChange {
    /// The guest receives all frames, or not any more.
    Promiscuous(bool),
    /// The guest receives the frames of all groups, or not any more.
    AllGroups(bool),
    /// The guest receives frames to these addresses of interfaces and groups besides those to its own and to all.
    Addresses(Vec<MacAddress>),
}

/// Which frames the guest receives. It receives all until the driver has set addresses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ReceiveFilter {
    promiscuous: bool,
    all_groups: bool,
    addresses: Option<Vec<MacAddress>>,
}

impl ReceiveFilter {
    pub(crate) fn change(&mut self, change: FilterChange) {
        match change {
            FilterChange::Promiscuous(on) => self.promiscuous = on,
            FilterChange::AllGroups(on) => self.all_groups = on,
            FilterChange::Addresses(addresses) => self.addresses = Some(addresses),
        }
    }

    /// Returns a `struct tun_filter` for an interface with the address `own`: flags and number of addresses, two bytes each, and
    /// the addresses. Without addresses the tap filters nothing.
    pub(crate) fn tun_filter(&self, own: MacAddress) -> Vec<u8> {
        let (flags, addresses) = self.tun_addresses(own).unwrap_or_default();
        let count = u16::try_from(addresses.len()).unwrap_or(0);
        [&flags.to_ne_bytes()[..], &count.to_ne_bytes(), addresses.as_flattened()].concat()
    }

    /// Returns flags and addresses for the tap; `None` if the guest receives all frames, or more interfaces' than a tap compares.
    fn tun_addresses(&self, own: MacAddress) -> Option<(u16, Vec<MacAddress>)> {
        let addresses = self.addresses.as_ref().filter(|_| !self.promiscuous)?;
        let (groups, interfaces): (Vec<MacAddress>, Vec<MacAddress>) =
            addresses.iter().copied().filter(|address| *address != BROADCAST).partition(is_group);
        let all_groups = self.all_groups || groups.len() > MAX_GROUPS;
        let exact = [&[own, BROADCAST][..], &interfaces].concat();
        if exact.len() > EXACT_ADDRESSES {
            return None;
        }
        Some(if all_groups { (ALL_GROUPS, exact) } else { (0, [exact, groups].concat()) })
    }
}

/// Returns whether the address is that of a group.
pub(crate) fn is_group(address: &MacAddress) -> bool {
    let [first, ..] = address;
    first & 1 != 0
}

#[cfg(test)]
mod tests {
    #![allow(clippy::indexing_slicing, clippy::unwrap_used, reason = "tests")]
    use super::*;
    use proptest::prelude::*;

    const OWN: MacAddress = [2, 0, 0, 0, 0, 1];
    const GROUP: MacAddress = [0x33, 0x33, 0, 0, 0, 1];
    const OTHER: MacAddress = [2, 0, 0, 0, 0, 9];
    /// No filter.
    const NOTHING: [u8; 4] = [0; 4];

    fn filter(changes: &[FilterChange]) -> Vec<u8> {
        let mut filter = ReceiveFilter::default();
        changes.iter().cloned().for_each(|change| filter.change(change));
        filter.tun_filter(OWN)
    }

    fn expected(flags: u16, addresses: &[MacAddress]) -> Vec<u8> {
        let count = u16::try_from(addresses.len()).unwrap();
        [&flags.to_ne_bytes()[..], &count.to_ne_bytes(), addresses.as_flattened()].concat()
    }

    #[test]
    fn frames_to_others_are_dropped_once_addresses_are_known() {
        use FilterChange::{Addresses, AllGroups, Promiscuous};
        let table = [
            (vec![], NOTHING.to_vec()),
            (vec![Promiscuous(false), AllGroups(false)], NOTHING.to_vec()),
            (vec![Addresses(vec![])], expected(0, &[OWN, BROADCAST])),
            (vec![Addresses(vec![GROUP, OTHER])], expected(0, &[OWN, BROADCAST, OTHER, GROUP])),
            (vec![Addresses(vec![BROADCAST])], expected(0, &[OWN, BROADCAST])),
            (vec![Addresses(vec![GROUP]), AllGroups(true)], expected(1, &[OWN, BROADCAST])),
            (vec![Addresses(vec![GROUP]), Promiscuous(true)], NOTHING.to_vec()),
            (vec![Promiscuous(true), Addresses(vec![]), Promiscuous(false)], expected(0, &[OWN, BROADCAST])),
            (vec![Addresses(vec![GROUP]), Addresses(vec![])], expected(0, &[OWN, BROADCAST])),
        ];
        for (changes, bytes) in table {
            assert_eq!(filter(&changes), bytes, "{changes:?}");
        }
    }

    #[test]
    fn more_addresses_than_a_tap_compares_let_more_frames_pass() {
        let interfaces = |count: u8| (0..count).map(|n| [2, 0, 0, 0, 1, n]).collect::<Vec<_>>();
        assert_eq!(filter(&[FilterChange::Addresses(interfaces(7))]), NOTHING);
        assert_eq!(filter(&[FilterChange::Addresses(interfaces(6))])[2..4], 8u16.to_ne_bytes());
        let groups = |count: u8| (0..count).map(|n| [1, 0, 0x5e, 0, 0, n]).collect::<Vec<_>>();
        assert_eq!(filter(&[FilterChange::Addresses(groups(64))])[2..4], 66u16.to_ne_bytes());
        assert_eq!(filter(&[FilterChange::Addresses(groups(65))]), expected(1, &[OWN, BROADCAST]));
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

        /// The kernel filters nothing if an address behind the exact ones is no group.
        #[test]
        fn only_groups_are_hashed(addresses in prop::collection::vec(any::<MacAddress>(), 0..90), all_groups: bool) {
            let bytes = filter(&[FilterChange::AllGroups(all_groups), FilterChange::Addresses(addresses)]);
            let (count, rest) = (u16::from_ne_bytes([bytes[2], bytes[3]]), &bytes[4..]);
            prop_assert_eq!(usize::from(count) * 6, rest.len());
            prop_assert!(rest.chunks(6).skip(EXACT_ADDRESSES).all(|address| address[0] & 1 != 0));
            prop_assert!(count == 0 || rest.chunks(6).take(2).eq([&OWN[..], &BROADCAST]));
        }
    }
}
