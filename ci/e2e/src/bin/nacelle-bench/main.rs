//! Runs the benchmarks of docs/reference/budgets.md: Nacelle and a peer, alternating; it prints medians and their ratio.
//! `ci/bench` starts it.

mod accounts;
mod benches;
mod clones;
mod containerd;
mod cri;
mod crowd;
mod cuts;
mod density;
mod files;
mod guests;
mod machines;
mod memory;
mod microvm;
mod minimal;
mod observed;
mod plot;
mod restores;
mod vm;

use std::process::ExitCode;

/// The result of a benchmark: samples of Nacelle and of the peer, taken alternately.
struct BenchResult {
    unit: &'static str,
    peer: &'static str,
    ours: Vec<f64>,
    peers: Vec<f64>,
    /// Further data for the plots; null if there are none.
    details: serde_json::Value,
}

impl BenchResult {
    fn new(unit: &'static str, peer: &'static str) -> BenchResult {
        BenchResult { unit, peer, ours: Vec::new(), peers: Vec::new(), details: serde_json::Value::Null }
    }

    /// Returns the result as one JSON object, the format of `ci/bench NAME --json`.
    fn to_json(&self, name: &str) -> serde_json::Value {
        let (ours, theirs) = (median(&self.ours), median(&self.peers));
        serde_json::json!({"name": name, "unit": self.unit, "ours": ours, "peer": theirs, "ratio": ours / theirs,
                           "peer_name": self.peer, "samples": self.ours, "peer_samples": self.peers,
                           "details": self.details})
    }

    /// Prints the result for a reader.
    fn print(&self, name: &str, what: &str) {
        let Self { unit, peer, ours: samples, peers, details } = self;
        let (ours, theirs) = (median(samples), median(peers));
        println!("{name}: {what}");
        println!(
            "  ours {ours:.2} {unit}, {peer} {theirs:.2} {unit}, ratio {:.2} (medians of {})",
            ours / theirs,
            samples.len()
        );
        println!("  ours {samples:.2?}\n  {peer} {peers:.2?}");
        for bar in details.as_array().into_iter().flatten() {
            println!("  {bar}");
        }
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
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    run_subcommand(&words).unwrap_or_else(|| run_benchmarks(&arguments))
}

/// Runs the subcommand that the first argument names; returns `None` if the arguments name benchmarks.
fn run_subcommand(arguments: &[&str]) -> Option<ExitCode> {
    Some(match arguments {
        [machines::CHILD_ARGUMENT, description] => machines::run_vm_child(description),
        [minimal::CHILD_ARGUMENT, description] => minimal::run_minimal_child(description),
        ["plot", name @ ("boot" | "critest" | "crowd" | "density" | "files")] => {
            let measured = serde_json::from_reader(std::io::stdin()).expect("the JSON of the bench on stdin");
            let plot = match *name {
                "boot" => plot::boot,
                "critest" => plot::critest,
                "density" => plot::density,
                "files" => plot::files,
                _ => plot::crowd,
            };
            print!("{}", plot(&measured));
            ExitCode::SUCCESS
        }
        ["files", runs, only @ ..] => {
            let (Ok(runs), [] | ["volumes"]) = (runs.parse(), only) else {
                return Some(usage_error("ci/bench files RUNS [volumes]"));
            };
            println!("{}", files::measure(runs, !only.is_empty()));
            ExitCode::SUCCESS
        }
        ["vm", runs] => {
            let Ok(runs) = runs.parse() else { return Some(usage_error("ci/bench vm RUNS")) };
            println!("{}", vm::measure(runs));
            ExitCode::SUCCESS
        }
        ["cuts", runs] => {
            let Ok(runs) = runs.parse() else { return Some(usage_error("ci/bench cuts RUNS")) };
            println!("{}", cuts::measure(runs));
            ExitCode::SUCCESS
        }
        ["clones", clones, runs] => {
            let (Ok(clones), Ok(runs)) = (clones.parse(), runs.parse()) else {
                return Some(usage_error("ci/bench clones CLONES RUNS"));
            };
            println!("{}", clones::measure(clones, runs));
            ExitCode::SUCCESS
        }
        ["density", subjects, pods @ ..] => {
            let subjects: Vec<&str> = subjects.split(',').collect();
            let pods: Result<Vec<usize>, _> = pods.iter().map(|number| number.parse()).collect();
            let (Ok(pods), true) = (pods, subjects.iter().all(|name| density::SUBJECTS.contains(name))) else {
                return Some(usage_error(&format!("nacelle-bench density {} PODS...", density::SUBJECTS.join(","))));
            };
            println!("{}", density::measure(&subjects, &pods));
            ExitCode::SUCCESS
        }
        ["crowd", pods, clients] => {
            let (Ok(pods), Ok(clients)) = (pods.parse(), clients.parse()) else {
                return Some(usage_error("ci/bench crowd PODS CLIENTS"));
            };
            println!("{}", crowd::measure(pods, clients));
            ExitCode::SUCCESS
        }
        _ => return None,
    })
}

/// Prints how a subcommand is called; returns the exit code of a wrong command line.
fn usage_error(usage: &str) -> ExitCode {
    eprintln!("usage: {usage}");
    ExitCode::from(2)
}

/// Runs the named benchmarks and prints their results.
fn run_benchmarks(arguments: &[String]) -> ExitCode {
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
            None => names.push(argument.as_str()),
        }
    }
    if names.is_empty() || names.iter().any(|name| !benches::ALL.iter().any(|(known, ..)| known == name)) {
        let code = usage_error("ci/bench NAME [--json] [--runs=5]");
        for (name, what, _) in benches::ALL {
            eprintln!("  {name:12} {what}");
        }
        return code;
    }
    for (name, what, bench) in benches::ALL.iter().filter(|(name, ..)| names.contains(name)) {
        let result = bench(runs);
        if json {
            println!("{}", result.to_json(name));
        } else {
            result.print(name, what);
        }
    }
    ExitCode::SUCCESS
}
