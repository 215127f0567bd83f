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
use std::error::Error;
use std::path::Path;

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
