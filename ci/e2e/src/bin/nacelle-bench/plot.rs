//! Owns: the plot of a boot's timeline as SVG, from the JSON of `nacelle-bench boot --json`. Pure.

use serde_json::Value;
use std::fmt::Write as _;

const PARTS: [(&str, &str, &str); 3] =
    [("vmm", "VMM", "#4c6ef5"), ("kernel", "guest kernel", "#868e96"), ("init", "agent until its answer", "#f59f00")];
const LEFT: f64 = 130.0;
const WIDTH: f64 = 560.0;
const ROW: f64 = 44.0;
const TOP: f64 = 56.0;

/// One bar for each entry of `details`.
pub fn boot(measured: &Value) -> String {
    let bars = measured["details"].as_array().map(Vec::as_slice).unwrap_or_default();
    let part = |bar: &Value, key: &str| bar[key].as_f64().unwrap_or(0.0).max(0.0);
    let total = |bar: &Value| PARTS.iter().map(|(key, ..)| part(bar, key)).sum::<f64>();
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
            let (value, width) = (part(bar, key), part(bar, key) / longest * WIDTH);
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
