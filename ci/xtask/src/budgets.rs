//! Checks the time budgets of the suites of `ci/test` (`ci/budgets.tsv`): each line is complete, and all suites fit into an hour.
//!
//! The suites of lane `main` run one after the other. Those of lane `node` run at the same time, and on both lanes after `main` has
//! ended. Suites of `main?` and `node?` are left out when time is short, so they do not count.

use crate::Finding;
use std::error::Error;
use std::fs;
use std::path::Path;

const BUDGETS_FILE: &str = "ci/budgets.tsv";

/// All suites together take less, in seconds.
const MAX_SECONDS: u32 = 3600;

pub fn check(root: &Path) -> Result<Vec<Finding>, Box<dyn Error>> {
    Ok(violations(&fs::read_to_string(root.join(BUDGETS_FILE))?))
}

fn violations(table: &str) -> Vec<Finding> {
    let (mut found, mut main, mut node) = (Vec::new(), 0_u32, 0_u32);
    for (before, line) in table.lines().enumerate().filter(|(_, line)| !line.is_empty() && !line.starts_with('#')) {
        match budget(line) {
            Some(("main", seconds)) => main += seconds,
            Some(("node", seconds)) => node += seconds,
            Some(_) => {}
            None => found.push(Finding {
                place: format!("{BUDGETS_FILE}:{}", before + 1),
                rule:
                    "is not seconds, a lane (main, main?, node or node?), test programs and a name, separated by tabs"
                        .to_owned(),
            }),
        }
    }
    for (suites, seconds) in [("lane main", main), ("both lanes, each with half of the suites,", main.midpoint(node))] {
        if seconds >= MAX_SECONDS {
            let rule = format!("the budgets of {suites} are {seconds} s, which is not below {MAX_SECONDS} s");
            found.push(Finding { place: BUDGETS_FILE.to_owned(), rule });
        }
    }
    found
}

/// Returns the lane and the seconds of a line.
fn budget(line: &str) -> Option<(&str, u32)> {
    let fields: Vec<&str> = line.split('\t').collect();
    match fields[..] {
        [seconds, lane @ ("main" | "main?" | "node" | "node?"), programs, name]
            if !programs.is_empty() && !name.is_empty() =>
        {
            Some((lane, seconds.parse().ok()?))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(table: &str) -> Vec<String> {
        violations(table).into_iter().map(|found| format!("{}: {}", found.place, found.rule)).collect()
    }

    #[test]
    fn a_table_below_an_hour_is_right() {
        let table = "# a comment\n\n10\tmain\t-\tformat\n3000\tmain\t-\tthe rest\n3900\tnode\tvmm\tmachines\n9000\tnode?\ta|b\tmore\n900\tmain?\tc\tlast\n";
        assert_eq!(findings(table), Vec::<String>::new());
    }

    #[test]
    fn an_hour_is_too_much() {
        let found = findings("3000\tmain\t-\ta\n600\tmain\t-\tb\n");
        assert!(found.len() == 1 && found[0].contains("lane main are 3600 s"), "{found:?}");
        let found = findings("3000\tmain\t-\ta\n4200\tnode\tvmm\tb\n");
        assert!(found.len() == 1 && found[0].contains("both lanes"), "{found:?}");
    }

    #[test]
    fn an_incomplete_line_is_found() {
        for line in
            ["10 main - format", "10\tmain\tformat", "x\tmain\t-\tformat", "10\tside\t-\tformat", "10\tmain\t-\t"]
        {
            assert!(findings(&format!("# a comment\n{line}\n"))[0].starts_with("ci/budgets.tsv:2: is not"), "{line}");
        }
    }
}
