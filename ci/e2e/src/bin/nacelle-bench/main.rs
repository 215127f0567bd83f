//! Owns: the benchmarks of docs/budgets.md: ours and a peer in turn, medians and their ratio. `ci/bench` starts it.

mod benches;
mod containerd;
mod cri;
mod microvm;

use std::process::ExitCode;

/// What was measured: samples of ours and of the peer, taken in turn.
struct Measured {
    unit: &'static str,
    peer: &'static str,
    ours: Vec<f64>,
    peers: Vec<f64>,
}

fn median(samples: &[f64]) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => sorted[n / 2],
        n => (sorted[n / 2 - 1] + sorted[n / 2]) / 2.0,
    }
}

fn main() -> ExitCode {
    let mut names = Vec::new();
    let (mut json, mut runs) = (false, 5);
    for argument in std::env::args().skip(1) {
        match argument.strip_prefix("--runs=").map(str::parse) {
            Some(Ok(number)) => runs = number,
            Some(Err(error)) => {
                eprintln!("{argument}: {error}");
                return ExitCode::from(2);
            }
            None if argument == "--json" => json = true,
            None => names.push(argument),
        }
    }
    if names.is_empty() || names.iter().any(|name| !benches::ALL.iter().any(|(known, ..)| known == name)) {
        eprintln!("usage: ci/bench NAME [--json] [--runs=5]");
        for (name, what, _) in benches::ALL {
            eprintln!("  {name:12} {what}");
        }
        return ExitCode::from(2);
    }
    for (name, what, bench) in benches::ALL.iter().filter(|(name, ..)| names.iter().any(|wanted| wanted == name)) {
        let Measured { unit, peer, ours: samples, peers } = bench(runs);
        let (ours, theirs) = (median(&samples), median(&peers));
        let ratio = ours / theirs;
        if json {
            println!(
                "{}",
                serde_json::json!({"name": name, "unit": unit, "ours": ours, "peer": theirs, "ratio": ratio,
                                   "peer_name": peer, "samples": samples, "peer_samples": peers})
            );
        } else {
            println!("{name}: {what}");
            println!(
                "  ours {ours:.1} {unit}, {peer} {theirs:.1} {unit}, ratio {ratio:.2} (medians of {})",
                samples.len()
            );
            println!("  ours {samples:.1?}\n  {peer} {peers:.1?}");
        }
    }
    ExitCode::SUCCESS
}
