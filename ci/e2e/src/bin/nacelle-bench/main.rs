//! Runs the benchmarks of docs/reference/budgets.md: Nacelle and a peer, alternating; it prints medians and their ratio.
//! `ci/bench` starts it.

mod accounts;
mod benches;
mod containerd;
mod cri;
mod crowd;
mod density;
mod files;
mod guests;
mod machines;
mod memory;
mod microvm;
mod minimal;
mod plot;
mod vm;

use std::process::ExitCode;

/// The result of a benchmark: samples of Nacelle and of the peer, taken alternately.
struct Measured {
    unit: &'static str,
    peer: &'static str,
    ours: Vec<f64>,
    peers: Vec<f64>,
    /// Further data for the plots; null if there are none.
    details: serde_json::Value,
}

impl Measured {
    fn new(unit: &'static str, peer: &'static str) -> Measured {
        Measured { unit, peer, ours: Vec::new(), peers: Vec::new(), details: serde_json::Value::Null }
    }
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
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [machines::SERVE, description] => return machines::serve(description),
        [minimal::SERVE, description] => return minimal::serve(description),
        ["plot", name @ ("boot" | "critest" | "crowd" | "density" | "files")] => {
            let measured = serde_json::from_reader(std::io::stdin()).expect("the JSON of the bench on stdin");
            let plot = match name {
                "boot" => plot::boot,
                "critest" => plot::critest,
                "density" => plot::density,
                "files" => plot::files,
                _ => plot::crowd,
            };
            print!("{}", plot(&measured));
            return ExitCode::SUCCESS;
        }
        ["files", runs, ref only @ ..] => {
            let (Ok(runs), [] | ["volumes"]) = (runs.parse(), only) else {
                eprintln!("usage: ci/bench files RUNS [volumes]");
                return ExitCode::from(2);
            };
            println!("{}", files::measure(runs, !only.is_empty()));
            return ExitCode::SUCCESS;
        }
        ["vm", runs] => {
            let Ok(runs) = runs.parse() else {
                eprintln!("usage: ci/bench vm RUNS");
                return ExitCode::from(2);
            };
            println!("{}", vm::measure(runs));
            return ExitCode::SUCCESS;
        }
        ["density", who, ref pods @ ..] => {
            let who: Vec<&str> = who.split(',').collect();
            let pods: Result<Vec<usize>, _> = pods.iter().map(|number| number.parse()).collect();
            let (Ok(pods), true) = (pods, who.iter().all(|name| density::WHO.contains(name))) else {
                eprintln!("usage: nacelle-bench density {} PODS...", density::WHO.join(","));
                return ExitCode::from(2);
            };
            println!("{}", density::measure(&who, &pods));
            return ExitCode::SUCCESS;
        }
        ["crowd", pods, clients] => {
            let (Ok(pods), Ok(clients)) = (pods.parse(), clients.parse()) else {
                eprintln!("usage: ci/bench crowd PODS CLIENTS");
                return ExitCode::from(2);
            };
            println!("{}", crowd::measure(pods, clients));
            return ExitCode::SUCCESS;
        }
        _ => {}
    }
    let mut names = Vec::new();
    let (mut json, mut runs) = (false, 5);
    for argument in arguments {
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
        let Measured { unit, peer, ours: samples, peers, details } = bench(runs);
        let (ours, theirs) = (median(&samples), median(&peers));
        let ratio = ours / theirs;
        if json {
            println!(
                "{}",
                serde_json::json!({"name": name, "unit": unit, "ours": ours, "peer": theirs, "ratio": ratio,
                                   "peer_name": peer, "samples": samples, "peer_samples": peers, "details": details})
            );
        } else {
            println!("{name}: {what}");
            println!(
                "  ours {ours:.2} {unit}, {peer} {theirs:.2} {unit}, ratio {ratio:.2} (medians of {})",
                samples.len()
            );
            println!("  ours {samples:.2?}\n  {peer} {peers:.2?}");
            for bar in details.as_array().into_iter().flatten() {
                println!("  {bar}");
            }
        }
    }
    ExitCode::SUCCESS
}
