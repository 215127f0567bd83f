//! Defines the figures as JSON, one object a line: the output of the sections and the input of `page`.

use anyhow::Context;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::io::Write;
use std::time::Instant;

/// One line. The optional fields determine its kind: samples, one value, something skipped, an error, or the host.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FigureLine {
    /// The name of the figure, or of the section that failed; `host` on the first line.
    pub name: String,
    /// The unit of the figures.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub unit: String,
    /// The value of a single figure.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value: Option<f64>,
    /// The median of `n` samples.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub median: Option<f64>,
    /// The 90th percentile of the samples.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub p90: Option<f64>,
    /// The number of samples.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub n: Option<usize>,
    /// Whether the section's time ended before all samples were taken.
    #[serde(default, skip_serializing_if = "is_false")]
    pub cut: bool,
    /// The configuration that was measured.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub config: Map<String, Value>,
    /// The reason that it was not measured: this machine does not support it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub skipped: Option<String>,
    /// The reason that the measurement failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// The facts about the host.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub facts: Map<String, Value>,
}

fn is_false(value: &bool) -> bool {
    !value
}

/// The samples of one figure.
#[derive(Clone, Debug, Default)]
pub struct Samples {
    /// The values in the order in which they were taken.
    pub values: Vec<f64>,
    /// Whether samples are missing because the time ended.
    pub cut: bool,
}

impl Samples {
    /// Returns the median; the mean of the two middle values for an even number.
    pub fn median(&self) -> Option<f64> {
        let sorted = self.sorted();
        let (half, odd) = (sorted.len() / 2, sorted.len() % 2 == 1);
        let upper = sorted.get(half).copied()?;
        Some(if odd { upper } else { (sorted[half - 1] + upper) / 2.0 })
    }

    /// Returns the smallest value that at most a tenth of the values exceed.
    pub fn p90(&self) -> Option<f64> {
        let sorted = self.sorted();
        let rank = (sorted.len() * 9).div_ceil(10);
        sorted.get(rank.checked_sub(1)?).copied()
    }

    fn sorted(&self) -> Vec<f64> {
        let mut sorted = self.values.clone();
        sorted.sort_by(f64::total_cmp);
        sorted
    }
}

/// Takes rounds of samples until there are `count` rounds or the time is over; at least one round. Each round is one sample of
/// each kind, so that changes of the host affect all of them. Rounds before the first counted one (`warm_up`) are discarded.
pub fn sample_rounds(
    until: Instant,
    warm_up: usize,
    count: usize,
    kinds: usize,
    mut sample: impl FnMut(usize) -> anyhow::Result<f64>,
) -> anyhow::Result<Vec<Samples>> {
    let mut all = vec![Samples::default(); kinds];
    for round in 0..warm_up + count {
        if round > warm_up && Instant::now() >= until {
            all.iter_mut().for_each(|samples| samples.cut = true);
            break;
        }
        for (kind, samples) in all.iter_mut().enumerate() {
            let value = sample(kind)?;
            if round >= warm_up {
                samples.values.push(value);
            }
        }
    }
    Ok(all)
}

/// Writes lines, and records whether one was an error.
pub struct FigureReport<W> {
    out: W,
    /// Whether a section has failed.
    pub failed: bool,
}

impl<W: Write> FigureReport<W> {
    /// Returns a report that is written to `out`.
    pub fn new(out: W) -> FigureReport<W> {
        FigureReport { out, failed: false }
    }

    /// Writes one line and flushes.
    pub fn write_line(&mut self, line: &FigureLine) -> anyhow::Result<()> {
        let text = serde_json::to_string(line).context("cannot write a figure as JSON")?;
        writeln!(self.out, "{text}").and_then(|()| self.out.flush()).context("cannot write to the output")
    }

    /// Writes median and 90th percentile of samples.
    pub fn write_samples(&mut self, name: &str, unit: &str, config: Value, samples: &Samples) -> anyhow::Result<()> {
        self.write_line(&FigureLine {
            name: name.to_owned(),
            unit: unit.to_owned(),
            median: samples.median(),
            p90: samples.p90(),
            n: Some(samples.values.len()),
            cut: samples.cut,
            config: object(config),
            ..FigureLine::default()
        })
    }

    /// Writes a single figure.
    pub fn write_value(&mut self, name: &str, unit: &str, config: Value, value: f64) -> anyhow::Result<()> {
        let (name, unit) = (name.to_owned(), unit.to_owned());
        self.write_line(&FigureLine { name, unit, value: Some(value), config: object(config), ..FigureLine::default() })
    }

    /// Writes that this machine does not support something.
    pub fn write_skipped(&mut self, name: &str, config: Value, why: String) -> anyhow::Result<()> {
        self.write_line(&FigureLine {
            name: name.to_owned(),
            config: object(config),
            skipped: Some(why),
            ..FigureLine::default()
        })
    }

    /// Writes an error.
    pub fn write_error(&mut self, name: &str, error: &anyhow::Error) -> anyhow::Result<()> {
        self.failed = true;
        self.write_line(&FigureLine {
            name: name.to_owned(),
            error: Some(format!("{error:#}")),
            ..FigureLine::default()
        })
    }
}

/// Returns the fields of an object; none for another value.
pub fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(map) => map,
        _ => Map::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::time::Duration;

    fn samples(values: &[f64]) -> Samples {
        Samples { values: values.to_vec(), cut: false }
    }

    #[test]
    fn the_median_and_the_ninetieth_percentile() {
        let ten = samples(&[10.0, 9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0]);
        assert_eq!((ten.median(), ten.p90()), (Some(5.5), Some(9.0)));
        assert_eq!((samples(&[3.0, 1.0, 2.0]).median(), samples(&[3.0]).p90()), (Some(2.0), Some(3.0)));
        assert_eq!((samples(&[]).median(), samples(&[]).p90()), (None, None));
    }

    #[test]
    fn rounds_end_when_their_time_is_over_but_not_before_the_first() {
        let later = Instant::now() + Duration::from_secs(60);
        let mut order = Vec::new();
        let all = sample_rounds(later, 1, 2, 2, |kind| {
            order.push(kind);
            Ok(order.len() as f64)
        });
        let all = all.unwrap();
        assert_eq!(order, [0, 1, 0, 1, 0, 1]);
        assert_eq!(all[0].values, [3.0, 5.0], "the first round is not counted");
        assert!(!all[0].cut);
        let all = sample_rounds(Instant::now(), 0, 5, 1, |_| Ok(1.0)).unwrap();
        assert!(all[0].values.len() == 1 && all[0].cut);
        assert!(sample_rounds(later, 0, 5, 1, |_| anyhow::bail!("broken")).is_err());
    }

    #[test]
    fn lines_are_read_as_they_were_written() {
        let mut out = Vec::new();
        let mut report = FigureReport::new(&mut out);
        report
            .write_samples("boot", "ms", json!({"vmm": "nacelle"}), &Samples { values: vec![1.0, 2.0], cut: true })
            .unwrap();
        report.write_value("rss", "MiB", json!({}), 3.5).unwrap();
        report.write_skipped("loops", json!({"pages": "2 MiB"}), "no pool".to_owned()).unwrap();
        assert!(!report.failed);
        report.write_error("disk", &anyhow::anyhow!("cause").context("it failed")).unwrap();
        assert!(report.failed);
        let text = String::from_utf8(out).unwrap();
        let lines: Vec<FigureLine> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!((lines[0].median, lines[0].n, lines[0].cut), (Some(1.5), Some(2), true));
        assert_eq!(lines[1].value, Some(3.5));
        assert_eq!(lines[2].skipped.as_deref(), Some("no pool"));
        assert_eq!(lines[3].error.as_deref(), Some("it failed: cause"));
        assert!(serde_json::from_str::<FigureLine>(r#"{"name":"a","more":1}"#).is_err(), "unknown fields are refused");
    }
}
