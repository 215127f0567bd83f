//! `cargo xtask shape`: measures how the code is cut into files, functions, modules and names. It judges nothing and always succeeds;
//! what the figures should be is written in docs/contributor.

mod cfg_test;
mod components;
mod lengths;
mod modules;
mod paths;
mod report;
mod source_file;
mod type_names;
mod words;

use crate::files;
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
    let (rust, scripts) = (files::all(root)?, files::scripts(root)?);
    let files = source_file::production(&rust);
    let scripts: Vec<_> = scripts.into_iter().filter(|(place, _)| !source_file::is_test(place)).collect();
    let counts = words::count(&files, &scripts).into_iter().map(|count| (count.words, count.in_rust + count.in_shell));
    Ok(Language { types: type_names::places(&files), words: counts.collect() })
}

/// Measures the tree below `root`. Returns JSON or Markdown.
pub fn measure(root: &Path, json: bool) -> Result<String, Box<dyn Error>> {
    let (rust, scripts) = (files::all(root)?, files::scripts(root)?);
    let files = source_file::production(&rust);
    let scripts: Vec<_> = scripts.into_iter().filter(|(place, _)| !source_file::is_test(place)).collect();
    let report = Report {
        files: lengths::files(&files),
        functions: lengths::functions(&files),
        crates: modules::cycles(&files),
        types: type_names::count(&files),
        words: words::count(&files, &scripts),
    };
    if json { Ok(serde_json::to_string_pretty(&report)?) } else { Ok(report.markdown()) }
}
