//! Tests that the reference page, the alert rules and the dashboard name exactly the families that exist.

use super::family::{FAMILIES, FamilyKind, MetricFamily};
use serde_json::Value;
use std::collections::BTreeSet;

const PAGE: &str = include_str!("../../../../docs/reference/metrics.md");
const GUIDE: &str = include_str!("../../../../docs/operator/monitoring.md");
const ALERTS: &str = include_str!("../../../../docs/examples/monitoring/alerts.yaml");
const DASHBOARD: &str = include_str!("../../../../docs/examples/monitoring/dashboard.json");

/// Returns the name, type, unit and labels of a family as a row of the page has them.
fn row(family: &MetricFamily) -> [String; 4] {
    let labels: Vec<String> = family.labels.iter().map(|label| format!("`{label}`")).collect();
    let texts = [family.name, family.kind.as_str(), family.unit().unwrap_or_default()];
    let [name, kind, unit] = texts.map(str::to_owned);
    [name, kind, unit, labels.join(", ")]
}

#[test]
fn the_reference_page_has_each_family_with_type_unit_and_labels() {
    let rows = PAGE.lines().filter_map(|line| line.strip_prefix("| `")?.split_once('`'));
    let mut documented = Vec::new();
    for (name, rest) in rows {
        let cells: Vec<&str> = rest.split('|').map(str::trim).collect();
        let [_, kind, unit, labels, meaning, _] = cells[..] else { continue };
        assert!(!meaning.is_empty(), "{name} has no meaning");
        documented.push([name, kind, unit, labels].map(str::to_owned));
    }
    let families: Vec<_> = FAMILIES.iter().map(row).collect();
    assert_eq!(families, documented);
}

#[test]
fn names_and_types_follow_openmetrics() {
    let mut names = BTreeSet::new();
    for family in FAMILIES {
        let name = family.name;
        assert!(names.insert(name), "{name} stands twice");
        assert!(name.starts_with("nacelle_") || name.starts_with("process_"), "{name}");
        assert!(name.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_'), "{name}");
        assert_eq!(name.ends_with("_total"), family.kind == FamilyKind::Counter, "{name}");
        assert_eq!(name.ends_with("_info"), family.kind == FamilyKind::Info, "{name}");
        assert!(!family.help.ends_with('.'), "{name}");
        assert!(
            !family.labels.iter().any(|label| ["pod", "namespace", "container", "image"].contains(label)),
            "{name}"
        );
    }
}

/// Returns the names of metrics in an expression of PromQL.
fn names_in(expression: &str) -> BTreeSet<String> {
    let words = expression.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    words.filter(|word| word.starts_with("nacelle_") || word.starts_with("process_")).map(str::to_owned).collect()
}

/// Fails if an expression names a series that no family has.
fn check_names(what: &str, expression: &str) {
    for name in names_in(expression) {
        let is_series = |family: &MetricFamily| match family.kind {
            FamilyKind::Histogram => {
                ["_bucket", "_sum", "_count"].iter().any(|suffix| name == format!("{}{suffix}", family.name))
            }
            _ => name == family.name,
        };
        assert!(FAMILIES.iter().any(is_series), "{what}: there is no metric {name}");
    }
}

/// Calls `check` with each string that has this key.
fn each_text(value: &Value, key: &str, check: &mut impl FnMut(&str)) {
    match value {
        Value::Object(fields) => fields.iter().for_each(|(name, value)| match value {
            Value::String(text) if name == key => check(text),
            value => each_text(value, key, check),
        }),
        Value::Array(values) => values.iter().for_each(|value| each_text(value, key, check)),
        _ => {}
    }
}

#[test]
fn alerts_dashboard_and_guide_use_metrics_that_exist() {
    let alerts: Value = serde_saphyr::from_str(ALERTS).unwrap();
    let dashboard: Value = serde_json::from_str(DASHBOARD).unwrap();
    for (what, document, least) in [("alerts.yaml", alerts, 8), ("dashboard.json", dashboard, 12)] {
        let mut expressions = 0;
        each_text(&document, "expr", &mut |expression| {
            check_names(what, expression);
            expressions += 1;
        });
        assert!(expressions >= least, "{what} has {expressions} expressions");
    }
    let queries: Vec<&str> = GUIDE.split("```promql\n").skip(1).filter_map(|rest| rest.split("```").next()).collect();
    assert!(!queries.is_empty());
    queries.into_iter().for_each(|query| check_names("monitoring.md", query));
}

#[test]
#[should_panic(expected = "there is no metric nacelle_podz")]
fn an_unknown_metric_is_found() {
    check_names("x", "sum(nacelle_pods) + rate(nacelle_podz[5m])");
}
