//! Parses and checks commands on the control queue (Virtio 1.2, 5.1.6.5). It does not execute them.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use super::filter::{FilterChange, MacAddress, is_group};

/// The maximum size of a command in bytes. The longest one is the table of addresses.
pub(crate) const MAX_COMMAND: usize = 16 << 10;

/// The commands that the negotiated features allow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CommandLimits {
    /// The number of queue pairs; 1 if the driver did not negotiate several.
    pub pairs: u16,
    /// The offloads that can be changed.
    pub offloads: u64,
    /// Whether the driver may set the address.
    pub mac: bool,
}

/// A valid command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ControlCommand {
    /// A change of the receive filter.
    Filter(FilterChange),
    /// The new address of the interface.
    Mac(MacAddress),
    /// The number of queue pairs to use from now on.
    Pairs(u16),
    /// The offloads that the driver accepts from now on.
    Offloads(u64),
}

const RX: u8 = 0;
const RX_PROMISCUOUS: u8 = 0;
const RX_ALL_MULTICAST: u8 = 1;
const MAC: u8 = 1;
const MAC_TABLE_SET: u8 = 0;
const MAC_ADDR_SET: u8 = 1;
const MQ: u8 = 4;
const MQ_PAIRS_SET: u8 = 0;
const OFFLOADS: u8 = 5;
const OFFLOADS_SET: u8 = 0;

impl ControlCommand {
    /// Parses a command. Returns `None` if it is unknown, of the wrong length or out of range.
    pub(crate) fn parse(bytes: &[u8], limits: CommandLimits) -> Option<ControlCommand> {
        let (&[class, command], body) = bytes.split_first_chunk()?;
        match (class, command) {
            (RX, RX_PROMISCUOUS) => Some(ControlCommand::Filter(FilterChange::Promiscuous(parse_switch(body)?))),
            (RX, RX_ALL_MULTICAST) => Some(ControlCommand::Filter(FilterChange::AllGroups(parse_switch(body)?))),
            (MAC, MAC_TABLE_SET) => {
                let (interfaces, rest) = split_table(body)?;
                let (groups, rest) = split_table(rest)?;
                let addresses = || FilterChange::Addresses([interfaces, groups].concat());
                rest.is_empty().then(|| ControlCommand::Filter(addresses()))
            }
            (MAC, MAC_ADDR_SET) => {
                let mac: MacAddress = body.try_into().ok()?;
                (limits.mac && is_unicast(mac)).then_some(ControlCommand::Mac(mac))
            }
            (MQ, MQ_PAIRS_SET) => {
                let pairs = u16::from_le_bytes(body.try_into().ok()?);
                (1..=limits.pairs).contains(&pairs).then_some(ControlCommand::Pairs(pairs))
            }
            (OFFLOADS, OFFLOADS_SET) => {
                let bits = u64::from_le_bytes(body.try_into().ok()?);
                (bits & !limits.offloads == 0).then_some(ControlCommand::Offloads(bits))
            }
            _ => None,
        }
    }
}

/// Returns whether the command switches something on. Drivers send 0 or 1.
fn parse_switch(body: &[u8]) -> Option<bool> {
    let [on] = body.try_into().ok()?;
    Some(on != 0)
}

/// Returns a table of addresses, which is a count followed by that many addresses of six bytes, and the bytes behind it.
fn split_table(bytes: &[u8]) -> Option<(&[MacAddress], &[u8])> {
    let (count, rest) = bytes.split_first_chunk()?;
    let length = usize::try_from(u32::from_le_bytes(*count)).ok()?.checked_mul(6)?;
    let (table, rest) = rest.split_at_checked(length)?;
    let (addresses, _) = table.as_chunks();
    Some((addresses, rest))
}

/// Returns whether the address is that of a single interface.
fn is_unicast(mac: MacAddress) -> bool {
    !is_group(&mac) && mac != [0; 6]
}

#[cfg(test)]
mod tests {
    #![allow(clippy::indexing_slicing, reason = "tests")]
    use super::*;
    use proptest::prelude::*;

    const ALL: CommandLimits = CommandLimits { pairs: 4, offloads: 0b1010, mac: true };
    const NONE: CommandLimits = CommandLimits { pairs: 1, offloads: 0, mac: false };

    #[test]
    fn valid_commands_are_parsed() {
        let filter = |change| Some(ControlCommand::Filter(change));
        let addresses = |addresses: &[MacAddress]| filter(FilterChange::Addresses(addresses.to_vec()));
        let two = [[2, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6]];
        let table: [(&[u8], Option<ControlCommand>, Option<ControlCommand>); 15] = [
            (&[0, 0, 1], filter(FilterChange::Promiscuous(true)), filter(FilterChange::Promiscuous(true))),
            (&[0, 1, 0], filter(FilterChange::AllGroups(false)), filter(FilterChange::AllGroups(false))),
            (&[0, 2, 0], None, None),
            (&[0, 0], None, None),
            (&[0, 0, 1, 1], None, None),
            (&[1, 0, 0, 0, 0, 0, 0, 0, 0, 0], addresses(&[]), addresses(&[])),
            (&[1, 0, 1, 0, 0, 0, 2, 2, 3, 4, 5, 6, 1, 0, 0, 0, 1, 2, 3, 4, 5, 6], addresses(&two), addresses(&two)),
            (&[1, 0, 0, 0, 0, 0, 2, 0, 0, 0, 1, 2, 3, 4, 5, 6], None, None),
            (&[1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7], None, None),
            (&[1, 1, 2, 2, 3, 4, 5, 6], Some(ControlCommand::Mac([2, 2, 3, 4, 5, 6])), None),
            (&[1, 1, 3, 2, 3, 4, 5, 6], None, None),
            (&[4, 0, 4, 0], Some(ControlCommand::Pairs(4)), None),
            (&[4, 0, 5, 0], None, None),
            (&[5, 0, 8, 0, 0, 0, 0, 0, 0, 0], Some(ControlCommand::Offloads(8)), None),
            (&[5, 0, 4, 0, 0, 0, 0, 0, 0, 0], None, None),
        ];
        for (bytes, with, without) in table {
            assert_eq!(ControlCommand::parse(bytes, ALL), with, "{bytes:?}");
            assert_eq!(ControlCommand::parse(bytes, NONE), without, "{bytes:?}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn parsed_commands_respect_the_limits(
            head in (0..7u8, 0..3u8), body in prop::collection::vec(any::<u8>(), 0..24), pairs in 1..9u16,
        ) {
            let limits = CommandLimits { pairs, offloads: 0x182, mac: true };
            let bytes = [&[head.0, head.1], body.as_slice()].concat();
            match ControlCommand::parse(&bytes, limits) {
                None => {}
                Some(ControlCommand::Filter(FilterChange::Addresses(all))) => {
                    prop_assert!(head == (1, 0) && all.len() * 6 + 8 == body.len());
                }
                Some(ControlCommand::Filter(_)) => prop_assert!(head.0 == 0 && head.1 < 2 && body.len() == 1),
                Some(ControlCommand::Mac(mac)) => prop_assert!(mac[0] & 1 == 0 && body == mac),
                Some(ControlCommand::Pairs(count)) => prop_assert!((1..=pairs).contains(&count) && body.len() == 2),
                Some(ControlCommand::Offloads(bits)) => prop_assert!(bits & !0x182 == 0 && body.len() == 8),
            }
        }

        #[test]
        fn commands_of_the_wrong_length_are_rejected(cut in 0..8usize, more in 1..9usize) {
            let command = [1, 1, 2, 2, 3, 4, 5, 6];
            prop_assert_eq!(ControlCommand::parse(&command[..cut], ALL), None);
            prop_assert_eq!(ControlCommand::parse(&[&command[..], &[0; 9][..more]].concat(), ALL), None);
        }
    }
}
