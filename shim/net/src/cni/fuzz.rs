//! Defines the fuzz harness for the output and the configuration of CNI plugins. ci/fuzz calls it; the tests run the committed corpus
//! (`tests/corpus/cni/*`). A harness fails only by a panic.

use super::attachment_store::AttachmentStore;
use super::config::{NetworkList, Version, parse_object};
use super::result::CniResult;
use serde_json::Map;
use std::path::Path;

/// The maximum number of bytes that a list with the same content takes more than its source, for the fields that are always written.
const MAX_GROWTH: usize = 256;

/// Parses the bytes as a configuration, as the result of a plugin and as the record of an attachment. What is accepted is the same when
/// it is written and read again, and is not much larger.
pub fn cni(data: &[u8]) {
    let Ok(object) = parse_object("test", data) else {
        assert!(CniResult::parse("test", data, Version::V1_0_0).is_err());
        return;
    };
    let networks = [NetworkList::from_list("test", object.clone()), NetworkList::from_single("test", object.clone())];
    for network in networks.into_iter().flatten() {
        assert_eq!(NetworkList::from_list("test", network.to_list()).expect("it was accepted before"), network);
        for plugin in &network.plugins {
            let input = plugin.input(&network, &Map::new(), Map::new());
            assert_eq!(parse_object("test", &input).expect("it is an object")["name"], network.name);
        }
    }
    for version in [Version::V0_3_1, Version::V1_0_0] {
        let Ok(result) = CniResult::from_raw("test", object.clone(), version) else { continue };
        assert_eq!(CniResult::from_raw("test", result.raw.clone(), version).expect("it was accepted before"), result);
        let words = result.dns.servers.iter().chain(&result.dns.searches).chain(&result.dns.options);
        // They become words of a text file.
        assert!(
            words
                .into_iter()
                .all(|word| !word.is_empty() && !word.contains(|c: char| c.is_whitespace() || c.is_control()))
        );
        assert!(result.ips.len() + result.interfaces.len() <= data.len());
        let written = serde_json::to_vec(&result.raw).expect("it is JSON");
        // Each address gets its IP version, and a character may take more bytes when it is written.
        assert!(
            written.len() <= 6 * data.len() + 16 * result.ips.len() + MAX_GROWTH,
            "{} of {}",
            written.len(),
            data.len()
        );
    }
    drop(AttachmentStore::parse(Path::new("test"), data));
}

/// A fuzz harness.
pub type Target = fn(&[u8]);

/// All harnesses by the names of their corpora.
pub const TARGETS: [(&str, Target); 1] = [("cni", cni)];
