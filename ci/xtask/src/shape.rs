//! `cargo xtask shape`: measures how the code is cut into files, functions, modules and names. It judges nothing and always succeeds;
//! what the figures should be is written in docs/contributor.

mod cfg_test;
mod components;
mod lengths;
mod modules;
mod paths;
mod report;
mod source_file;
mod stages;
mod type_names;
mod words;

use crate::{Finding, files};
use report::Report;
use std::collections::BTreeMap;
use std::error::Error;
use std::path::Path;

/// What the rules about language look at.
pub struct Language {
    /// Where each name of a public type stands.
    pub types: BTreeMap<String, Vec<String>>,
    /// How often each group of words occurs.
    pub words: Vec<(String, usize)>,
}

/// Counts types and words outside of tests below `root`.
pub fn language(root: &Path) -> Result<Language, Box<dyn Error>> {
    let (rust, scripts) = (files::read_rust(root)?, files::read_scripts(root)?);
    let files = source_file::production_files(&rust);
    let scripts: Vec<_> = scripts.into_iter().filter(|(place, _)| !source_file::is_test(place)).collect();
    let counts =
        words::count_words(&files, &scripts).into_iter().map(|count| (count.words, count.in_rust + count.in_shell));
    Ok(Language { types: type_names::definitions(&files), words: counts.collect() })
}

/// Checks the list of the types that describe a mount, a device or resources. `rust` are all Rust files.
pub fn check_stages(root: &Path, rust: &[(String, String)]) -> Result<Vec<Finding>, Box<dyn Error>> {
    let mut files: Vec<_> =
        source_file::production_files(rust).into_iter().map(|file| (file.place.to_owned(), file.code)).collect();
    files.extend(files::read_protocols(root)?);
    stages::check(root, &files)
}

/// Measures the tree below `root`. Returns JSON or Markdown.
pub fn measure(root: &Path, json: bool) -> Result<String, Box<dyn Error>> {
    let (rust, scripts) = (files::read_rust(root)?, files::read_scripts(root)?);
    let files = source_file::production_files(&rust);
    let scripts: Vec<_> = scripts.into_iter().filter(|(place, _)| !source_file::is_test(place)).collect();
    let report = Report {
        files: lengths::measure_files(&files),
        functions: lengths::measure_functions(&files),
        crates: modules::cycles(&files),
        types: type_names::count_shared(&files),
        stages: stages::count(root)?,
        words: words::count_words(&files, &scripts),
    };
    if json { Ok(serde_json::to_string_pretty(&report)?) } else { Ok(report.markdown()) }
}
