//! Tests which configurations, results and records the parsers accept and reject.

use super::attachment_store::AttachmentStore;
use super::config::{NetworkList, Version, parse_object};
use super::result::CniResult;
use super::*;
use nacelle_base::{Classify, FailureKind};
use proptest::prelude::*;
use std::fs;

fn list(text: &str) -> Result<NetworkList, CniError> {
    NetworkList::from_list("test", parse_object("test", text.as_bytes())?)
}

fn single(text: &str) -> Result<NetworkList, CniError> {
    NetworkList::from_single("test", parse_object("test", text.as_bytes())?)
}

fn result(text: &str, version: Version) -> Result<CniResult, CniError> {
    CniResult::parse("test", text.as_bytes(), version)
}

#[test]
fn the_first_file_in_lexical_order_counts() {
    let dir = tempfile::tempdir().unwrap();
    let load = || NetworkList::load(dir.path());
    assert!(matches!(load(), Err(CniError::NoConfig { .. })));
    assert!(matches!(NetworkList::load(&dir.path().join("none")), Err(CniError::NoConfig { .. })));
    let write = |name: &str, text: &str| fs::write(dir.path().join(name), text).unwrap();
    write("00-notes.txt", "no configuration");
    fs::create_dir(dir.path().join("01-directory.conf")).unwrap();
    write("30.conflist", r#"{"cniVersion":"1.1.0","name":"c","disableGC":true,"plugins":[{"type":"x"},{"type":"y"}]}"#);
    let found = load().unwrap();
    assert_eq!((found.name.as_str(), found.plugins.len(), found.disable_gc), ("c", 2, true));
    write("20.json", r#"{"cniVersion":"0.4.0","name":"b","type":"x"}"#);
    assert_eq!((load().unwrap().name.as_str(), load().unwrap().version), ("b", Version::V0_4_0));
    // A broken first file is an error. If it were skipped, the pods would silently get another network.
    write("10.conf", r#"{"cniVersion":"0.4.0","name":"a"}"#);
    let error = load().unwrap_err();
    assert!(error.to_string().contains("10.conf: field type"), "{error}");
    assert_eq!(error.kind(), FailureKind::Unavailable);
    write("05.conf", &" ".repeat((1 << 20) + 1));
    assert!(matches!(load(), Err(CniError::TooLarge { .. })));
}

#[test]
fn a_configuration_of_another_type_is_named_with_what_it_has() {
    let directory = tempfile::tempdir().unwrap();
    for (text, expected) in [
        ("[]", "is not what CNI expects"),
        ("null", "is not what CNI expects"),
        (r#"{"cniVersion":"1.0.0","name":"n"}"#, "plugins: \"null\" is not allowed"),
        (r#"{"cniVersion":"1.0.0","name":"n","plugins":"bridge"}"#, "bridge"),
        (r#"{"cniVersion":"1.0.0","name":"n","plugins":{"type":"bridge"}}"#, "bridge"),
    ] {
        fs::write(directory.path().join("10.conflist"), text).unwrap();
        let error = NetworkList::load(directory.path()).unwrap_err().to_string();
        assert!(error.contains("10.conflist") && error.contains(expected), "{text}: {error}");
    }
}

#[test]
fn plugins_in_the_directory_of_a_list_are_appended() {
    let directory = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| fs::write(directory.path().join(name), text).unwrap();
    fs::create_dir(directory.path().join("c")).unwrap();
    let kinds = || {
        let list = NetworkList::load(directory.path())?;
        Ok::<_, CniError>(list.plugins.into_iter().map(|plugin| plugin.kind).collect::<Vec<_>>().join(" "))
    };
    write("10.conflist", r#"{"cniVersion":"1.1.0","name":"c","plugins":[{"type":"x"}]}"#);
    assert_eq!(kinds().unwrap(), "x");
    write("c/20.conf", r#"{"type":"z"}"#);
    write("c/10.conf", r#"{"type":"y"}"#);
    write("c/30.conflist", "not read");
    assert_eq!(kinds().unwrap(), "x y z");
    // The record of an attachment has them all.
    let list = NetworkList::load(directory.path()).unwrap();
    assert_eq!(NetworkList::from_list("record", list.to_list()).unwrap(), list);
    write("10.conflist", r#"{"cniVersion":"1.1.0","name":"c"}"#);
    assert_eq!(kinds().unwrap(), "y z");
    write("10.conflist", r#"{"cniVersion":"1.1.0","name":"c","loadOnlyInlinedPlugins":true,"plugins":[{"type":"x"}]}"#);
    assert_eq!(kinds().unwrap(), "x");
    write("10.conflist", r#"{"cniVersion":"1.1.0","name":"c","loadOnlyInlinedPlugins":true}"#);
    assert!(kinds().unwrap_err().to_string().contains("plugins"));
    // A broken plugin is an error, because pods would get another network.
    write("10.conflist", r#"{"cniVersion":"1.1.0","name":"c","plugins":[{"type":"x"}]}"#);
    write("c/20.conf", "{");
    assert!(kinds().unwrap_err().to_string().contains("20.conf"));
    for number in 100..140 {
        write(&format!("c/{number}.conf"), r#"{"type":"y"}"#);
    }
    write("c/20.conf", r#"{"type":"z"}"#);
    assert!(kinds().unwrap_err().to_string().contains("1 to 32 plugins"));
}

#[test]
fn configurations_are_checked() {
    for (field, text) in [
        ("name", r#"{"cniVersion":"1.0.0","type":"x"}"#),
        ("name", r#"{"cniVersion":"1.0.0","name":"","type":"x"}"#),
        ("name", r#"{"cniVersion":"1.0.0","name":"../a","type":"x"}"#),
        ("name", r#"{"cniVersion":"1.0.0","name":7,"type":"x"}"#),
        ("cniVersion", r#"{"name":"a","type":"x"}"#),
        ("cniVersion", r#"{"cniVersion":"0.2.0","name":"a","type":"x"}"#),
        ("cniVersion", r#"{"cniVersion":"2.0.0","name":"a","type":"x"}"#),
        ("cniVersions", r#"{"cniVersions":["2.0.0"],"name":"a","type":"x"}"#),
        ("type", r#"{"cniVersion":"1.0.0","name":"a","type":"../x"}"#),
        ("type", r#"{"cniVersion":"1.0.0","name":"a","type":".."}"#),
        ("type", r#"{"cniVersion":"1.0.0","name":"a","type":"a\u0000b"}"#),
        ("capabilities", r#"{"cniVersion":"1.0.0","name":"a","type":"x","capabilities":{"dns":"yes"}}"#),
    ] {
        match single(text) {
            Err(CniError::Field { field: found, .. }) => assert_eq!(found, field, "{text}"),
            other => panic!("{text}: {other:?}"),
        }
    }
    for text in [
        r#"{"cniVersion":"1.0.0","name":"a"}"#,
        r#"{"cniVersion":"1.0.0","name":"a","plugins":[]}"#,
        r#"{"cniVersion":"1.0.0","name":"a","plugins":[7]}"#,
    ] {
        assert!(matches!(list(text), Err(CniError::Field { field: "plugins", .. })), "{text}");
    }
    let text = r#"{"cniVersion":"0.4.0","cniVersions":["1.0.0","9.0.0","0.4.0"],"name":"a","disableCheck":"true",
                   "plugins":[{"type":"x"}]}"#;
    let found = list(text).unwrap();
    assert_eq!((found.version, found.disable_check, found.disable_gc), (Version::V1_0_0, true, false));
}

#[test]
fn results_of_every_version_are_read() {
    let old = r#"{"cniVersion":"0.4.0","interfaces":[{"name":"br"},{"name":"eth0","mac":"02:00:00:00:00:01",
        "sandbox":"/run/netns/x"}],"ips":[{"version":"4","address":"10.1.0.5/16","gateway":"10.1.0.1","interface":1}],
        "routes":[{"dst":"0.0.0.0/0"}],"dns":{}}"#;
    let read = result(old, Version::V0_4_0).unwrap();
    assert_eq!(read.interfaces, ["eth0"]);
    assert_eq!(read.ips, ["10.1.0.5".parse::<std::net::IpAddr>().unwrap()]);
    assert_eq!(read.raw["ips"][0]["version"], "4");
    // The result is rewritten for a plugin of a newer version, and of an older one.
    let new = result(old, Version::V1_0_0).unwrap();
    assert_eq!((&new.raw["cniVersion"], new.raw["ips"][0].get("version")), (&json!("1.0.0"), None));
    let text = r#"{"cniVersion":"1.1.0","ips":[{"address":"fd00::5/64"}],"dns":null,"interfaces":null}"#;
    let back = result(text, Version::V0_3_1).unwrap();
    assert_eq!((&back.raw["cniVersion"], &back.raw["ips"][0]["version"]), (&json!("0.3.1"), &json!("6")));
    // As tolerant as other runtimes: any object is accepted.
    assert_eq!(result("{}", Version::V1_1_0).unwrap().raw["cniVersion"], "1.1.0");
    for bad in ["", "7", "[]", r#"{"ips":[{}]}"#, r#"{"ips":[{"address":"10.0.0.1"}]}"#, r#"{"ips":{}}"#] {
        assert!(matches!(result(bad, Version::V1_0_0), Err(CniError::Json { .. })), "{bad}");
    }
    for bad in [r#"{"cniVersion":"0.2.0"}"#, r#"{"cniVersion":1}"#, r#"{"dns":{"nameservers":["1.1.1.1\nsearch x"]}}"#]
    {
        assert!(matches!(result(bad, Version::V1_0_0), Err(CniError::Field { .. })), "{bad}");
    }
}

#[test]
fn a_record_comes_back_and_an_unknown_version_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let store = AttachmentStore { dir: dir.path().join("cache") };
    let id = PodId::from_bytes([9; 32]);
    assert_eq!(store.ids().unwrap(), [].into());
    assert_eq!(store.read(&id).unwrap(), None);
    let network = single(r#"{"cniVersion":"1.0.0","name":"a","type":"x","capabilities":{"dns":true}}"#).unwrap();
    let record = AttachmentRecord {
        id: id.clone(),
        netns: "/run/netns/x".into(),
        interface: INTERFACE.to_owned(),
        args: "IgnoreUnknown=1".to_owned(),
        capabilities: Map::new(),
        network: network.to_list(),
        result: None,
        owed: None,
    };
    // The form of daemons older than owed DELs.
    assert!(!serde_json::to_string(&record).unwrap().contains("owed"));
    store.write(&record).unwrap();
    assert_eq!(store.read(&id).unwrap(), Some((record.clone(), network)));
    assert_eq!(store.ids().unwrap(), [id.clone()].into());
    let path = store.dir.join(format!("{id}.json"));
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, text.replace(r#""version":"1""#, r#""version":"2""#)).unwrap();
    assert!(matches!(store.read(&id), Err(CniError::Json { .. })));
    store.remove(&id).unwrap();
    store.remove(&id).unwrap();
    assert_eq!(store.read(&id).unwrap(), None);
    // The input file of a daemon that was killed before it wrote the record.
    drop(store.lock_plugins(&id).unwrap());
    assert_eq!(store.ids().unwrap(), [id].into());
}

/// JSON with many keys of CNI.
fn cni_json() -> impl Strategy<Value = Value> {
    let word = prop_oneof![
        Just("1.0.0"),
        Just("1.1.0"),
        Just("0.4.0"),
        Just("eth0"),
        Just("10.0.0.1/8"),
        Just("fd00::1/64"),
        Just("x"),
    ]
    .prop_map(str::to_owned);
    let leaf = prop_oneof![
        4 => word.prop_map(Value::from),
        1 => any::<String>().prop_map(Value::from),
        1 => any::<i64>().prop_map(Value::from),
        1 => any::<bool>().prop_map(Value::from),
        1 => Just(Value::Null),
    ];
    let key = prop::sample::select(vec![
        "cniVersion",
        "cniVersions",
        "name",
        "type",
        "plugins",
        "capabilities",
        "disableCheck",
        "interfaces",
        "ips",
        "address",
        "dns",
        "nameservers",
        "domain",
        "search",
        "sandbox",
        "version",
        "network",
        "result",
    ]);
    leaf.prop_recursive(4, 48, 6, move |inner| {
        prop_oneof![
            1 => prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            3 => prop::collection::btree_map(key.clone().prop_map(str::to_owned), inner, 0..8)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

#[test]
fn the_corpus() {
    nacelle_base::corpus::run_corpora(env!("CARGO_MANIFEST_DIR"), &super::fuzz::TARGETS);
}

#[test]
fn the_mutated_corpus() {
    nacelle_base::corpus::run_mutated_corpora(env!("CARGO_MANIFEST_DIR"), &super::fuzz::TARGETS, 256);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        super::fuzz::cni(&bytes);
    }

    #[test]
    fn no_json_panics_and_what_is_accepted_comes_back(value in cni_json()) {
        super::fuzz::cni(value.to_string().as_bytes());
    }
}
