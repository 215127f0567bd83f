//! Provides the `main` of test programs that are their own test harness, because they are also the program that they test. It reads
//! the arguments and writes the results as the test programs of cargo do. Only with the feature `testing`.

use std::process::ExitCode;

/// A test: its name and its function.
pub type Test = (&'static str, fn());

/// Runs the tests that the program's arguments select, one after the other on this thread. Without root they are skipped.
pub fn run_tests_as_root(tests: &[Test]) -> ExitCode {
    run_tests(tests, |test| {
        if nix::unistd::geteuid().is_root() {
            std::panic::catch_unwind(test).is_ok()
        } else {
            println!("skipped: not root");
            true
        }
    })
}

/// Calls `run`, which returns whether the test passed, for each test that the program's arguments select.
pub fn run_tests<T>(tests: &[(&str, T)], run: impl FnMut(&T) -> bool) -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if run_selected(tests, &arguments, run) { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Runs the tests whose names contain one of the arguments, or all of them; with `--list` it only prints their names. Returns whether
/// all passed.
fn run_selected<T>(tests: &[(&str, T)], arguments: &[String], mut run: impl FnMut(&T) -> bool) -> bool {
    let filters: Vec<&String> = arguments.iter().filter(|argument| !argument.starts_with('-')).collect();
    let selects = |name: &str| filters.is_empty() || filters.iter().any(|filter| name.contains(filter.as_str()));
    let selected: Vec<_> = tests.iter().filter(|(name, _)| selects(name)).collect();
    if arguments.iter().any(|argument| argument == "--list") {
        selected.iter().for_each(|(name, _)| println!("{name}: test"));
        return true;
    }
    println!("\nrunning {} tests", selected.len());
    let mut failed = Vec::new();
    for (name, test) in &selected {
        let passed = run(test);
        println!("test {name} ... {}", if passed { "ok" } else { "FAILED" });
        if !passed {
            failed.push(name);
        }
    }
    if !failed.is_empty() {
        println!("\nfailures:");
        failed.iter().for_each(|name| println!("    {name}"));
    }
    println!(
        "\ntest result: {}. {} passed; {} failed; 0 ignored; 0 measured; {} filtered out\n",
        if failed.is_empty() { "ok" } else { "FAILED" },
        selected.len() - failed.len(),
        failed.len(),
        tests.len() - selected.len()
    );
    failed.is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_arguments_select_the_tests() {
        let run = |arguments: &[&str]| {
            let arguments: Vec<String> = arguments.iter().map(|argument| (*argument).to_owned()).collect();
            let mut called = Vec::new();
            let passed = run_selected(&[("one", 1), ("two", 2), ("zone", 3)], &arguments, |number| {
                called.push(*number);
                *number != 2
            });
            (passed, called)
        };
        assert_eq!(run(&[]), (false, vec![1, 2, 3]));
        assert_eq!(run(&["one", "--nocapture"]), (true, vec![1, 3]));
        assert_eq!(run(&["tw", "zo"]), (false, vec![2, 3]));
        assert_eq!(run(&["--list"]), (true, vec![]));
        assert_eq!(run(&["none"]), (true, vec![]));
    }
}
