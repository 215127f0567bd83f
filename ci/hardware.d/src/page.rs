//! Renders the lines of a run as Markdown for the documentation.

use crate::report::FigureLine;
use anyhow::{Context, bail};
use serde_json::{Map, Value};
use std::fmt::Write;
use std::io::BufRead;

/// Reads lines and returns the page. A line that is not a figure of this program is an error, so that the page does not silently
/// omit anything.
pub fn render_page(input: impl BufRead) -> anyhow::Result<String> {
    let mut lines = Vec::new();
    for (number, line) in input.lines().enumerate() {
        let line = line.context("cannot read the figures")?;
        if !line.trim().is_empty() {
            let parsed = serde_json::from_str(&line);
            lines.push(parsed.with_context(|| format!("line {} is not a figure of nacelle-hardware", number + 1))?);
        }
    }
    render_lines(&lines)
}

fn render_lines(lines: &[FigureLine]) -> anyhow::Result<String> {
    let Some((host, figures)) = lines.split_first().filter(|(host, _)| !host.facts.is_empty()) else {
        bail!("the first line does not describe the host");
    };
    let mut page = String::from("## Figures from one machine\n\n");
    for (name, value) in &host.facts {
        writeln!(page, "- {name}: {}", plain_text(value))?;
    }
    if host.facts.get("virtual").is_some_and(|value| value == &Value::Bool(true)) {
        page +=
            "\nThis machine is itself a virtual machine: its KVM is nested, and guests are slower than on hardware.\n";
    }
    page += "\n| measurement | configuration | n | median | p90 | unit |\n|---|---|---|---|---|---|\n";
    for line in figures.iter().filter(|line| line.error.is_none() && line.skipped.is_none()) {
        let n = line.n.map_or_else(|| "1".to_owned(), |n| format!("{n}{}", if line.cut { ", cut" } else { "" }));
        let median = line.median.or(line.value).map_or_else(|| "none".to_owned(), format_figure);
        let p90 = line.p90.map_or_else(String::new, format_figure);
        let (name, config) = (table_cell(&line.name), table_cell(&describe_config(&line.config)));
        writeln!(page, "| {name} | {config} | {n} | {median} | {p90} | {} |", table_cell(&line.unit))?;
    }
    for title in ["Not measured", "Failed"] {
        let mut begun = false;
        for line in figures {
            let why = if title == "Failed" { &line.error } else { &line.skipped };
            let Some(why) = why else { continue };
            if !std::mem::replace(&mut begun, true) {
                write!(page, "\n{title}:\n\n")?;
            }
            let config = describe_config(&line.config);
            let config = if config.is_empty() { config } else { format!(" ({config})") };
            writeln!(page, "- {}{config}: {}", line.name, why.replace('\n', " "))?;
        }
    }
    Ok(page)
}

fn describe_config(config: &Map<String, Value>) -> String {
    let words: Vec<String> = config.iter().map(|(name, value)| format!("{name} {}", plain_text(value))).collect();
    words.join(", ")
}

/// Formats a value without the quotes of JSON.
fn plain_text(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

/// Escapes a text for a table cell.
fn table_cell(text: &str) -> String {
    text.replace('|', "\\|").replace('\n', " ")
}

/// Formats a figure with three significant digits.
fn format_figure(value: f64) -> String {
    if value == 0.0 {
        return "0".to_owned();
    }
    let before = value.abs().log10().floor() as i32 + 1;
    let decimals = usize::try_from((3 - before).max(0)).unwrap_or(0);
    format!("{value:.decimals$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOST: &str = r#"{"name":"host","facts":{"cpu":"A processor","virtual":true}}"#;

    #[test]
    fn figures_become_a_table() {
        let lines = [
            HOST,
            r#"{"name":"boot.init","unit":"ms","median":123.456,"p90":150,"n":20,"config":{"vmm":"nacelle"}}"#,
            r#"{"name":"density.pss","unit":"MiB","value":31.25,"config":{"pods":10,"a|b":"c"}}"#,
            r#"{"name":"exec","unit":"ms","median":0.01234,"p90":2,"n":3,"cut":true}"#,
            r#"{"name":"loops","config":{"pages":"2 MiB"},"skipped":"no pool"}"#,
            r#"{"name":"disk","error":"no\nspace"}"#,
        ];
        let page = render_page(lines.join("\n").as_bytes()).unwrap();
        for expected in [
            "- cpu: A processor\n",
            "is itself a virtual machine",
            "| boot.init | vmm nacelle | 20 | 123 | 150 | ms |\n",
            "| density.pss | a\\|b c, pods 10 | 1 | 31.2 |  | MiB |\n",
            "| exec |  | 3, cut | 0.0123 | 2.00 | ms |\n",
            "Not measured:\n\n- loops (pages 2 MiB): no pool\n",
            "Failed:\n\n- disk: no space\n",
        ] {
            assert!(page.contains(expected), "{expected:?} is not in:\n{page}");
        }
    }

    #[test]
    fn input_that_is_not_a_run_is_refused() {
        assert!(render_page("".as_bytes()).is_err());
        assert!(render_page(r#"{"name":"boot","value":1}"#.as_bytes()).is_err(), "no host");
        let error = render_page(format!("{HOST}\nnonsense").as_bytes()).unwrap_err();
        assert!(error.to_string().contains("line 2"), "{error}");
    }

    #[test]
    fn a_physical_machine_is_not_called_virtual() {
        let page = render_page(r#"{"name":"host","facts":{"cpu":"A processor","virtual":false}}"#.as_bytes()).unwrap();
        assert!(!page.contains("is itself"), "{page}");
    }
}
