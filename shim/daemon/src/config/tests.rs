//! Tests reading the configuration: names, defaults, limits and the errors that name a setting.

use super::*;
use nacelle_base::machine::EngineKind;
use nacelle_base::{Classify, FailureKind};
use std::collections::BTreeSet;
use std::error::Error;
use std::path::Path;

fn parse(text: &str) -> Result<Config, ConfigError> {
    Config::parse(text, Path::new("c.toml"))
}

#[test]
fn an_empty_file_is_complete() {
    let config = parse("").unwrap();
    assert_eq!(config.handler("").unwrap().0, "nacelle");
    assert_eq!(config.handler("nacelle").unwrap().1, &Handler::default());
    assert!(config.handler("other").is_none());
    assert_eq!(config.paths.socket, Path::new("/run/nacelle/nacelle.sock"));
}

#[test]
fn an_engine_is_named_or_found() {
    let config = parse(
        "default_handler = \"a\"\n[handlers.a]\n[handlers.k]\nengine = \"kvm\"\n\
                        [handlers.q]\nengine = \"qemu\"\n[handlers.b]\nengine = \"auto\"\n",
    );
    let config = config.unwrap();
    let engine = |name, fitting| config.handler(name).unwrap().1.engine.or(fitting);
    for fitting in [EngineKind::Kvm, EngineKind::Qemu] {
        assert_eq!([engine("a", fitting), engine("b", fitting)], [fitting, fitting]);
        assert_eq!([engine("k", fitting), engine("q", fitting)], [EngineKind::Kvm, EngineKind::Qemu]);
    }
}

#[test]
fn the_users_of_pod_processes_are_a_range_above_those_of_the_node() {
    let jail = |first: u64, count: u64| parse(&format!("[jail]\nfirst_user = {first}\nuser_count = {count}\n"));
    for (first, count) in [(65_536, 2), (4_294_967_293, 2), (65_536, 4_294_901_759), (0, 0), (1000, 0)] {
        assert!(jail(first, count).is_ok(), "{first} {count}");
    }
    for (first, count, key) in [
        (65_535, 2, "jail.first_user"),
        (0, 2, "jail.first_user"),
        (4_294_967_295, 2, "jail.first_user"),
        (65_536, 1, "jail.user_count"),
        (4_294_967_294, 2, "jail.user_count"),
        (65_536, 4_294_901_760, "jail.user_count"),
    ] {
        let error = nacelle_base::Chain(&jail(first, count).unwrap_err()).to_string();
        assert!(error.contains(key), "{first} {count}: {error}");
    }
}

#[test]
fn an_unknown_key_is_named_with_line_and_column() {
    for (text, place) in [
        ("default_handler = \"nacelle\"\nfoo = 1\n", "line 2, column 1"),
        ("[paths]\nroot = \"/r\"\n\n  rooot = \"/r\"\n", "line 4, column 3"),
        ("[handlers.a]\nvcpu = 1\n", "line 2, column 1"),
        ("[handlers.a]\nengine = \"bochs\"\n", "line 2, column 10"),
        ("[handlers.a]\nmemory_pages = \"2M\"\n", "line 2, column 16"),
        ("[images.registries.\"r:5000\"]\nhttps = true\n", "line 2, column 1"),
    ] {
        let error = parse(text).unwrap_err();
        assert_eq!(error.kind(), FailureKind::Invalid);
        let cause = error.source().unwrap().to_string();
        assert!(cause.contains(place), "{cause}");
    }
}

#[test]
fn an_error_does_not_show_the_line_with_a_password() {
    let wrong_type = "[images.registries.r]\nmirrors = \"https://u:s3cret@m\"\n";
    for text in [
        wrong_type,
        "[images]\nhttps_proxy = \"http://u:s3c\\wet@h\"\n",
        "[images]\nhttp_proxy = \"http://u:s3cret@h\n",
    ] {
        let error = nacelle_base::Chain(&parse(text).unwrap_err()).to_string();
        assert!(error.contains("line 2, column") && !error.contains("s3c"), "{error}");
    }
}

fn keys(value: &toml::Value, path: &str, into: &mut BTreeSet<String>) {
    match value {
        toml::Value::Table(table) if !table.is_empty() => {
            for (key, value) in table {
                let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                keys(value, &path, into);
            }
        }
        _ => {
            into.insert(path.to_owned());
        }
    }
}

/// Returns the paths of all keys, with NAME and HOST for the names of handlers and registries.
pub(crate) fn all_keys() -> BTreeSet<String> {
    let mut example = Config::default();
    let disk_limits = DiskLimits {
        read_bytes_per_second: Some(1),
        write_bytes_per_second: Some(1),
        reads_per_second: Some(1),
        writes_per_second: Some(1),
    };
    example.handlers.insert(
        "NAME".into(),
        Handler {
            max_vcpus: Some(2),
            max_memory_mib: Some(512),
            disk_limits: Some(disk_limits),
            empty_dir_mib: Some(64),
            ..Handler::default()
        },
    );
    let registry = RegistrySettings {
        ca_file: Some("/ca.pem".into()),
        auth_file: Some("/auth.json".into()),
        client_cert_file: Some("/cert.pem".into()),
        client_key_file: Some("/key.pem".into()),
        ..RegistrySettings::default()
    };
    example.images.registries.insert("HOST".into(), registry);
    example.images.hosts_dir = Some("/certs.d".into());
    example.images.http_proxy = Some("http://p.example:1".into());
    example.images.https_proxy = example.images.http_proxy.clone();
    example.images.no_proxy = Some("a.example".into());
    example.metrics.address = Some("127.0.0.1:9464".parse().unwrap());
    example.tracing.endpoint = Some("http://127.0.0.1:4317".parse().unwrap());
    example.streaming.tls_cert_file = Some("/cert.pem".into());
    example.streaming.tls_key_file = Some("/key.pem".into());
    let mut all = BTreeSet::new();
    keys(&toml::Value::try_from(&example).unwrap(), "", &mut all);
    all
}

#[test]
fn the_documentation_names_every_key_and_no_other() {
    let page = include_str!("../../../../docs/reference/configuration.md");
    let documented: BTreeSet<String> = page
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split_once('`'))
        .map(|(key, _)| key.to_owned())
        .collect();
    assert_eq!(all_keys(), documented);
}

#[test]
fn configured_proxies_replace_those_of_the_environment() {
    let environment = |name: &str| match name {
        "HTTP_PROXY" => Some("http://upper.example:1".to_owned()),
        "http_proxy" => Some("http://lower.example:1".to_owned()),
        "https_proxy" => Some("http://secure.example:1".to_owned()),
        "no_proxy" => Some("a.example".to_owned()),
        _ => None,
    };
    let proxy = parse("").unwrap().images.proxy(environment);
    assert_eq!(proxy.http_proxy, "http://upper.example:1");
    assert_eq!((proxy.https_proxy.as_str(), proxy.no_proxy.as_str()), ("http://secure.example:1", "a.example"));
    let proxy = parse("[images]\nhttp_proxy = \"\"\nno_proxy = \"b\"").unwrap().images.proxy(environment);
    assert_eq!((proxy.http_proxy.as_str(), proxy.no_proxy.as_str()), ("", "b"));
    assert_eq!(proxy.https_proxy, "http://secure.example:1");
}

#[test]
fn the_packages_file_says_every_default_and_changes_none() {
    let page = include_str!("../../../../ci/package.d/config.toml");
    let none = parse("").unwrap();
    assert_eq!(parse(page).unwrap(), none);
    let key = |line: &str| {
        line.strip_prefix('#').filter(|rest| rest.starts_with(|c: char| c.is_ascii_lowercase())).map(str::to_owned)
    };
    let said: String = page.lines().map(|line| key(line).unwrap_or_else(|| line.to_owned()) + "\n").collect();
    assert_eq!(parse(&said).unwrap(), none);
    let of = |value: &toml::Value| {
        let mut into = BTreeSet::new();
        keys(value, "", &mut into);
        into
    };
    let all = of(&toml::Value::try_from(&none).unwrap());
    let missing: Vec<_> = all.difference(&of(&toml::from_str(&said).unwrap())).cloned().collect();
    // By default there are none, and the file shows an example.
    assert_eq!(missing, ["images.registries"]);
}

#[test]
fn the_examples_in_the_documentation_are_valid() {
    let page = include_str!("../../../../docs/reference/configuration.md");
    let mut count = 0;
    for block in page.split("```toml\n").skip(1) {
        parse(block.split("```").next().unwrap()).unwrap();
        count += 1;
    }
    assert!(count > 0);
}

#[test]
fn pods_of_every_handler_may_run_on_the_host_if_a_setting_sends_them_there() {
    let may = |text: &str| parse(text).unwrap().may_run_on_host();
    assert!(!may("[handlers.nacelle]\nengine = \"kvm\"\n"));
    assert!(may("[handlers.nacelle]\nengine = \"kvm\"\n[handlers.node]\nengine = \"host\"\n"));
    assert!(may("[sandbox]\nhost_namespaces = \"run-on-host\"\n"));
    assert!(may("[sandbox]\nprivileged = \"run-on-host\"\n"));
}
