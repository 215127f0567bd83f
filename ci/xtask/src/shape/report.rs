//! The figures as one Markdown page: a table of all measures, then lists of what stands out.

use super::lengths::{FUNCTION_LIMIT, FileLengths, FunctionLengths};
use super::modules::{CrateCycles, DirectoryCycle};
use super::type_names::TypeNames;
use super::words::WordCount;
use serde::Serialize;

/// The crate whose modules are reported by themselves.
const DAEMON: &str = "shim/daemon";

/// What precedes the rows of the table of cycles.
const CYCLES_HEAD: [&str; 5] = [
    "A file points to another file if it names it by a path that begins with `crate`, `super` or `self`. The third column also counts",
    "paths from a module to its own children (`mod a; a::f()`). The cells are sizes of cycles: in files, in files, in modules.",
    "",
    "| crate | cycles of files | with paths to children | cycles of top-level modules |",
    "|---|---|---|---|",
];

#[derive(Serialize)]
pub struct Report {
    pub files: FileLengths,
    pub functions: FunctionLengths,
    pub crates: Vec<CrateCycles>,
    pub types: TypeNames,
    /// The number of types that describe each concept from the CRI request to the OCI specification.
    pub stages: Vec<(String, usize)>,
    pub words: Vec<WordCount>,
}

impl Report {
    /// The text is the same for the same tree, so that pages can be compared line by line.
    pub fn markdown(&self) -> String {
        let parts = [self.table(), self.lengths(), self.cycles(), self.names()];
        parts.map(|lines| lines.join("\n")).join("\n\n")
    }

    fn table(&self) -> Vec<String> {
        let Report { files, functions, types, .. } = self;
        let cyclic = self.crates.iter().flat_map(|one| &one.files);
        let mut lines = vec!["| measure, without tests | value |".to_owned(), "|---|---|".to_owned()];
        let mut row = |measure: &str, value: String| lines.push(format!("| {measure} | {value} |"));
        row("Rust files", files.count.to_string());
        row("lines of a file: median", files.median.to_string());
        row("lines of a file: 90th percentile", files.p90.to_string());
        row("lines of a file: maximum", files.maximum.to_string());
        let functions = format!("{} of {}", functions.above_limit, functions.count);
        row(&format!("functions above {FUNCTION_LIMIT} lines"), functions);
        row("import cycles between files of a crate", cyclic.clone().count().to_string());
        row("files of the largest such cycle", cyclic.map(Vec::len).max().unwrap_or_default().to_string());
        let between = self.crates.iter().map(|one| one.directories.len());
        row("import cycles between top-level modules of a crate", between.sum::<usize>().to_string());
        let daemon = self.daemon_cycle().map_or_else(|| "none".to_owned(), size);
        row(&format!("largest cycle between top-level modules of {DAEMON}"), daemon);
        let shared = format!("{} of {} ({} names)", types.sharing, types.types, types.shared_names);
        row("public types that share their name with another one", shared);
        for (concept, count) in &self.stages {
            row(&format!("types between CRI and OCI that describe: {concept}"), count.to_string());
        }
        for count in &self.words {
            let value =
                format!("{} (Rust {}, shell {})", count.in_rust + count.in_shell, count.in_rust, count.in_shell);
            row(&format!("words: {}", count.words), value);
        }
        lines
    }

    fn lengths(&self) -> Vec<String> {
        let mut lines = heading("Longest files");
        lines.extend(
            self.files
                .longest
                .iter()
                .map(|file| format!("- {}: {} lines, {} with tests", file.place, file.lines, file.lines_with_tests)),
        );
        lines.push(String::new());
        lines.extend(heading("Longest functions"));
        let longest = self.functions.longest.iter();
        lines.extend(longest.map(|one| format!("- {} `{}`: {} lines", one.place, one.name, one.lines)));
        lines
    }

    fn cycles(&self) -> Vec<String> {
        let mut lines = heading("Import cycles of each crate");
        lines.extend(CYCLES_HEAD.map(str::to_owned));
        for one in self.crates.iter().filter(|one| !one.with_children.is_empty() || !one.files.is_empty()) {
            let files = sizes(one.files.iter().map(Vec::len));
            let with_children = sizes(one.with_children.iter().copied());
            let directories = sizes(one.directories.iter().map(|cycle| cycle.modules.len()));
            lines.push(format!("| {} | {files} | {with_children} | {directories} |", one.name));
        }
        lines.push(String::new());
        lines.extend(heading("Files of each import cycle"));
        for one in &self.crates {
            lines.extend(
                one.files.iter().map(|files| format!("- {}, {} files: {}", one.name, files.len(), files.join(", "))),
            );
        }
        lines.push(String::new());
        lines.extend(heading("Top-level modules of each import cycle"));
        for one in &self.crates {
            lines.extend(
                one.directories
                    .iter()
                    .map(|cycle| format!("- {}, {}: {}", one.name, size(cycle), cycle.modules.join(", "))),
            );
        }
        lines
    }

    fn names(&self) -> Vec<String> {
        let mut lines = heading("Most frequent names of public types");
        lines.extend(self.types.most_frequent.iter().map(|one| format!("- `{}`: {}", one.name, one.places.len())));
        lines
    }

    /// Returns the cycle of the daemon's top-level modules that has the most lines.
    fn daemon_cycle(&self) -> Option<&DirectoryCycle> {
        let daemon = self.crates.iter().find(|one| one.name == DAEMON)?;
        daemon.directories.iter().max_by_key(|cycle| cycle.lines)
    }
}

fn heading(text: &str) -> Vec<String> {
    vec![format!("## {text}"), String::new()]
}

fn size(cycle: &DirectoryCycle) -> String {
    format!("{} modules, {} lines", cycle.modules.len(), cycle.lines)
}

fn sizes(cycles: impl Iterator<Item = usize>) -> String {
    let sizes: Vec<_> = cycles.map(|size| size.to_string()).collect();
    if sizes.is_empty() { "none".to_owned() } else { sizes.join(", ") }
}

#[cfg(test)]
mod tests {
    use super::super::{lengths, modules, source_file, type_names, words};
    use super::*;

    #[test]
    fn a_page_has_a_table_and_lists() {
        let file = |place: &str, text: &str| (place.to_owned(), text.to_owned());
        let tree = [
            file("shim/daemon/src/a.rs", "use crate::b::B;\npub struct A;\nfn told() {}\n"),
            file("shim/daemon/src/b.rs", "use crate::a;\npub struct A;\n"),
            file("shim/daemon/src/lib.rs", "mod a;\nmod b;\n"),
        ];
        let files = source_file::production_files(&tree);
        let report = Report {
            files: lengths::measure_files(&files),
            functions: lengths::measure_functions(&files),
            crates: modules::cycles(&files),
            types: type_names::count_shared(&files),
            stages: vec![("device".to_owned(), 4)],
            words: words::count_words(&files, &[]),
        };
        let page = report.markdown();
        for line in [
            "| Rust files | 3 |",
            "| lines of a file: maximum | 3 |",
            "| functions above 60 lines | 0 of 1 |",
            "| files of the largest such cycle | 2 |",
            "| largest cycle between top-level modules of shim/daemon | 2 modules, 5 lines |",
            "| public types that share their name with another one | 2 of 2 (1 names) |",
            "| types between CRI and OCI that describe: device | 4 |",
            "| words: told | 1 (Rust 1, shell 0) |",
            "- shim/daemon/src/a.rs: 3 lines, 3 with tests",
            "- shim/daemon/src/a.rs:3 `told`: 1 lines",
            "| shim/daemon | 2 | 2 | 2 |",
            "- shim/daemon, 2 files: a.rs, b.rs",
            "- shim/daemon, 2 modules, 5 lines: a, b",
            "- `A`: 2",
        ] {
            assert!(page.lines().any(|found| found == line), "{line} is missing:\n{page}");
        }
        assert_eq!(page, report.markdown());
    }
}
