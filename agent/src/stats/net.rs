//! Parses the figures of the guest's network interfaces in /proc/net/dev (proc(5)).

use nacelle_proto::common::InterfaceUsage;

/// Parses all interfaces but the loopback.
pub fn parse_interfaces(text: &str) -> Vec<InterfaceUsage> {
    text.lines().filter_map(parse_interface).filter(|interface| interface.name != "lo").collect()
}

fn parse_interface(line: &str) -> Option<InterfaceUsage> {
    let (name, figures) = line.rsplit_once(':')?;
    let figures: Vec<u64> = figures.split_whitespace().map(|word| word.parse().ok()).collect::<Option<_>>()?;
    Some(InterfaceUsage {
        name: name.trim().to_owned(),
        rx_bytes: *figures.first()?,
        rx_errors: *figures.get(2)?,
        tx_bytes: *figures.get(8)?,
        tx_errors: *figures.get(10)?,
        rx_packets: *figures.get(1)?,
        rx_dropped: *figures.get(3)?,
        tx_packets: *figures.get(9)?,
        tx_dropped: *figures.get(11)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn each_interface_has_its_columns() {
        let text = "\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo:     100       1    0    0    0     0          0         0      100       1    0    0    0     0       0          0
  eth0:  123456     789    3    4    5     6          7         8    98765     432    9   10    0     0       0          0
 a:b:1:1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16
";
        let interface = |name: &str, rx: [u64; 4], tx: [u64; 4]| InterfaceUsage {
            name: name.into(),
            rx_bytes: rx[0],
            rx_packets: rx[1],
            rx_errors: rx[2],
            rx_dropped: rx[3],
            tx_bytes: tx[0],
            tx_packets: tx[1],
            tx_errors: tx[2],
            tx_dropped: tx[3],
        };
        let eth0 = interface("eth0", [123_456, 789, 3, 4], [98_765, 432, 9, 10]);
        assert_eq!(parse_interfaces(text), [eth0, interface("a:b:1", [1, 2, 3, 4], [9, 10, 11, 12])]);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(128))]
        #[test]
        fn no_text_makes_it_panic(text in "([a-z0-9: \n]|\\PC){0,80}") {
            parse_interfaces(&text);
        }
    }
}
