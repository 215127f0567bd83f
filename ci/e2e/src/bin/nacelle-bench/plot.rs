//! Draws the plots of the documentation as SVG from the JSON of the benchmarks. The functions are pure.

use serde_json::Value;
use std::fmt::Write as _;

const PARTS: [(&str, &str, &str); 3] =
    [("vmm", "VMM", "#4c6ef5"), ("kernel", "guest kernel", "#868e96"), ("init", "agent until its answer", "#f59f00")];
const LEFT: f64 = 130.0;
const WIDTH: f64 = 560.0;
const ROW: f64 = 44.0;
const TOP: f64 = 56.0;

/// Draws one bar for each entry of `details`.
pub fn boot(measured: &Value) -> String {
    let bars = measured["details"].as_array().map(Vec::as_slice).unwrap_or_default();
    let milliseconds_of = |bar: &Value, key: &str| bar[key].as_f64().unwrap_or(0.0).max(0.0);
    let total = |bar: &Value| PARTS.iter().map(|(key, ..)| milliseconds_of(bar, key)).sum::<f64>();
    let longest = bars.iter().map(total).fold(1.0, f64::max);
    let height = TOP + ROW * bars.len() as f64 + 40.0;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 780 {height:.0}\" font-family=\"sans-serif\" \
         font-size=\"13\">\n<rect width=\"780\" height=\"{height:.0}\" fill=\"white\"/>\n\
         <text x=\"12\" y=\"24\" font-size=\"15\">Process start to the agent's answer (ms, medians)</text>\n"
    );
    let mut line = |text: std::fmt::Arguments<'_>| writeln!(svg, "{text}").expect("a String");
    for (row, bar) in bars.iter().enumerate() {
        let y = TOP + ROW * row as f64;
        let name = bar["name"].as_str().unwrap_or_default();
        line(format_args!("<text x=\"12\" y=\"{:.0}\">{name}</text>", y + 19.0));
        let mut x = LEFT;
        for (key, label, colour) in PARTS {
            let (value, width) = (milliseconds_of(bar, key), milliseconds_of(bar, key) / longest * WIDTH);
            line(format_args!(
                "<rect x=\"{x:.1}\" y=\"{y:.0}\" width=\"{width:.1}\" height=\"28\" fill=\"{colour}\"><title>{label}: \
                 {value:.0} ms</title></rect>"
            ));
            if width > 34.0 {
                let (x, y) = (x + 5.0, y + 19.0);
                line(format_args!("<text x=\"{x:.1}\" y=\"{y:.0}\" fill=\"white\">{value:.0}</text>"));
            }
            x += width;
        }
        line(format_args!("<text x=\"{:.1}\" y=\"{:.0}\">{:.0}</text>", x + 6.0, y + 19.0, total(bar)));
    }
    for (n, (_, label, colour)) in PARTS.iter().enumerate() {
        let (x, y) = (LEFT + 180.0 * n as f64, height - 18.0);
        line(format_args!("<rect x=\"{x:.0}\" y=\"{:.0}\" width=\"12\" height=\"12\" fill=\"{colour}\"/>", y - 11.0));
        line(format_args!("<text x=\"{:.0}\" y=\"{y:.0}\">{label}</text>", x + 18.0));
    }
    svg.push_str("</svg>\n");
    svg
}

const COLOURS: [&str; 5] = ["#4c6ef5", "#f59f00", "#37b24d", "#e64980", "#868e96"];

/// Returns the distinct keys in the order of their first occurrence.
fn distinct<'a>(keys: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let mut found = Vec::new();
    for key in keys {
        if !found.contains(&key) {
            found.push(key);
        }
    }
    found
}

fn open_svg(width: f64, height: f64, title: &str) -> String {
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {height:.0}\" font-family=\"sans-serif\" \
         font-size=\"13\">\n<rect width=\"{width:.0}\" height=\"{height:.0}\" fill=\"white\"/>\n\
         <text x=\"12\" y=\"24\" font-size=\"15\">{title}</text>\n"
    )
}

/// Draws labelled squares from left to right.
fn legend(svg: &mut String, names: &[&str], left: f64, y: f64, step: f64) {
    for (n, name) in names.iter().enumerate() {
        let (x, colour) = (left + step * n as f64, COLOURS[n % COLOURS.len()]);
        writeln!(
            svg,
            "<rect x=\"{x:.0}\" y=\"{:.0}\" width=\"12\" height=\"12\" fill=\"{colour}\"/>\
             <text x=\"{:.0}\" y=\"{y:.0}\">{name}</text>",
            y - 11.0,
            x + 18.0
        )
        .expect("a String");
    }
}

/// Draws the medians of critest's benchmarks, `[{"runtime", "operation", "p50"}, ...]` in ms.
pub fn critest(measured: &Value) -> String {
    bars(measured, "critest -benchmark: medians (ms, logarithmic)", LEFT)
}

/// Draws the result of `files::measure`.
pub fn files(measured: &Value) -> String {
    bars(measured, "Files, by fio: medians (logarithmic, longer is faster)", LEFT + 110.0)
}

/// Draws `[{"runtime", "operation", "p50"}, ...]`: one bar each, by operation, from `left` on, on a logarithmic scale.
fn bars(measured: &Value, title: &str, left: f64) -> String {
    let rows = measured.as_array().map(Vec::as_slice).unwrap_or_default();
    let text = |row: &'_ Value, key: &str| row[key].as_str().unwrap_or_default().to_owned();
    let texts = |key: &str| rows.iter().map(|row| text(row, key)).collect::<Vec<_>>();
    let (operations, runtimes) = (texts("operation"), texts("runtime"));
    let operations = distinct(operations.iter().map(String::as_str));
    let runtimes = distinct(runtimes.iter().map(String::as_str));
    let values: Vec<f64> = rows.iter().filter_map(|row| row["p50"].as_f64()).filter(|value| *value > 0.0).collect();
    let (least, most) = values.iter().fold((f64::MAX, f64::MIN), |(a, b), v| (a.min(*v), b.max(*v)));
    let (floor, ceiling) = (least.log10().floor(), most.log10().max(least.log10().floor() + 1.0));
    let group = 18.0 * runtimes.len() as f64 + 12.0;
    let height = TOP + group * operations.len() as f64 + 30.0;
    let mut svg = open_svg(780.0, height, title);
    for row in rows {
        let place = |names: &[&str], name: String| names.iter().position(|known| *known == name).unwrap_or(0);
        let (o, r) = (place(&operations, text(row, "operation")), place(&runtimes, text(row, "runtime")));
        let value = row["p50"].as_f64().unwrap_or(0.0);
        let width = ((value.log10() - floor) / (ceiling - floor)).max(0.01) * (WIDTH + LEFT - left - 20.0);
        let y = TOP + group * o as f64 + 18.0 * r as f64;
        if r == 0 {
            writeln!(svg, "<text x=\"12\" y=\"{:.0}\">{}</text>", y + 13.0, operations[o]).expect("a String");
        }
        writeln!(
            svg,
            "<rect x=\"{left:.0}\" y=\"{y:.0}\" width=\"{width:.1}\" height=\"15\" fill=\"{}\"/>\
             <text x=\"{:.1}\" y=\"{:.0}\">{value:.1}</text>",
            COLOURS[r % COLOURS.len()],
            left + width + 6.0,
            y + 12.0
        )
        .expect("a String");
    }
    legend(&mut svg, &runtimes, 12.0, height - 12.0, 152.0);
    svg.push_str("</svg>\n");
    svg
}

/// Draws the result of `crowd::measure`: a dot for each call, by the number of pods when it began.
pub fn crowd(measured: &Value) -> String {
    let calls = measured["calls"].as_array().map(Vec::as_slice).unwrap_or_default();
    let names = distinct(calls.iter().filter_map(|call| call[0].as_str()));
    let number = |call: &Value, at: usize| call[at].as_f64().unwrap_or(0.0);
    let most = |at: usize| calls.iter().map(|call| number(call, at)).fold(1.0, f64::max);
    let (pods, longest, height, bottom) = (most(1), most(2), 460.0, 400.0);
    let title = format!(
        "{} clients make and remove {} pods at once, engine {} (ms by pods there)",
        measured["clients"],
        measured["pods"],
        measured["engine"].as_str().unwrap_or_default()
    );
    let mut svg = open_svg(780.0, height, &title);
    for tick in 0..=4 {
        let part = f64::from(tick) / 4.0;
        let (y, x) = (bottom - part * (bottom - TOP), 70.0 + part * 680.0);
        writeln!(
            svg,
            "<path d=\"M70 {y:.0}H750\" stroke=\"#dee2e6\"/><text x=\"62\" y=\"{:.0}\" text-anchor=\"end\">{:.0}</text>\
             <text x=\"{x:.0}\" y=\"{:.0}\" text-anchor=\"middle\">{:.0}</text>",
            y + 4.0,
            part * longest,
            bottom + 18.0,
            part * pods
        )
        .expect("a String");
    }
    for call in calls {
        let name = names.iter().position(|name| call[0] == **name).unwrap_or(0);
        let x = 70.0 + number(call, 1) / pods * 680.0;
        let y = bottom - number(call, 2) / longest * (bottom - TOP);
        let colour = COLOURS[name % COLOURS.len()];
        writeln!(svg, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"2.2\" fill=\"{colour}\" opacity=\"0.7\"/>")
            .expect("a String");
    }
    for (n, name) in names.iter().enumerate() {
        let (row, column) = (n / 2, n % 2);
        let (x, y) = (70.0 + 340.0 * column as f64, 436.0 + 18.0 * row as f64);
        let colour = COLOURS[n % COLOURS.len()];
        writeln!(
            svg,
            "<circle cx=\"{x:.0}\" cy=\"{:.0}\" r=\"5\" fill=\"{colour}\"/><text x=\"{:.0}\" y=\"{y:.0}\">{name}</text>",
            y - 4.0,
            x + 12.0
        )
        .expect("a String");
    }
    svg.push_str("</svg>\n");
    svg
}

/// Draws `density` of the result of `density::measure` of several engines: a line for each runtime, by the number of pods, with
/// memory on a logarithmic scale.
pub fn density(measured: &Value) -> String {
    let rows = measured["density"].as_array().map(Vec::as_slice).unwrap_or_default();
    let number = |row: &Value, key: &str| row[key].as_f64().unwrap_or(0.0);
    let names = distinct(rows.iter().filter_map(|row| row["runtime"].as_str()));
    let most = |key: &str| rows.iter().map(|row| number(row, key)).fold(1.0, f64::max);
    let (pods, top) = (most("pods"), most("pss").log10().ceil().max(1.0));
    let bottom = 400.0;
    let x = |row: &Value| 70.0 + number(row, "pods") / pods * 680.0;
    let y = |row: &Value| bottom - number(row, "pss").max(1.0).log10() / top * (bottom - TOP);
    let title = "Memory of the processes of each pod that sleeps (Pss, MiB, logarithmic, by pods there)";
    let mut svg = open_svg(780.0, 460.0, title);
    let mut line = |text: std::fmt::Arguments<'_>| writeln!(svg, "{text}").expect("a String");
    for power in 0..=top as i32 {
        let (value, y) = (10_f64.powi(power), bottom - f64::from(power) / top * (bottom - TOP));
        line(format_args!(
            "<path d=\"M70 {y:.0}H750\" stroke=\"#dee2e6\"/><text x=\"62\" y=\"{:.0}\" text-anchor=\"end\">{value:.0}</text>",
            y + 4.0
        ));
    }
    let stages: std::collections::BTreeSet<u64> = rows.iter().filter_map(|row| row["pods"].as_u64()).collect();
    for stage in stages {
        let x = 70.0 + stage as f64 / pods * 680.0;
        line(format_args!("<text x=\"{x:.0}\" y=\"{:.0}\" text-anchor=\"middle\">{stage}</text>", bottom + 18.0));
    }
    for (n, name) in names.iter().enumerate() {
        let colour = COLOURS[n % COLOURS.len()];
        let own = rows.iter().filter(|row| row["runtime"] == **name);
        let points: Vec<String> = own.map(|row| format!("{:.1},{:.1}", x(row), y(row))).collect();
        let points = points.join(" ");
        line(format_args!("<polyline points=\"{points}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>"));
        for row in rows.iter().filter(|row| row["runtime"] == **name) {
            line(format_args!(
                "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"3\" fill=\"{colour}\"><title>{name}, {} pods: {:.1} MiB</title></circle>",
                x(row),
                y(row),
                row["pods"],
                number(row, "pss")
            ));
        }
    }
    legend(&mut svg, &names, 70.0, 446.0, 172.0);
    svg.push_str("</svg>\n");
    svg
}
