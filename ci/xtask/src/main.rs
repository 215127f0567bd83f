//! Checks the house rules (`cargo xtask rules`), measures the code (`cargo xtask shape`), and writes the tables of documents that
//! follow from the code (`cargo xtask docs`) and the package's bill of materials (`cargo xtask sbom`).

mod budgets;
mod calls;
mod decoders;
mod docs;
mod files;
mod guest_logs;
mod jailed;
mod language;
mod layers;
mod sandboxing;
mod sbom;
mod scripts;
mod servers;
mod shape;
mod source;
mod threats;
mod versions;

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// A broken rule: where, and what is wrong there.
struct Finding {
    place: String,
    /// What is wrong there.
    rule: String,
}

fn root() -> PathBuf {
    // Cargo's variable at run time: the clone in which the program was built may be gone, if two clones share a target directory.
    let package = std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
    Path::new(&package).ancestors().nth(2).expect("ci/xtask lies two directories deep").to_owned()
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        ["rules"] => print_rules(&root()),
        ["shape"] => print_shape(&root(), false),
        ["shape", "--json"] => print_shape(&root(), true),
        ["docs"] => docs::write(&root()),
        ["sbom"] => sbom::print(&root()),
        _ => {
            eprintln!("usage: cargo xtask rules            checks the house rules");
            eprintln!("       cargo xtask shape [--json]   measures files, functions, import cycles and names");
            eprintln!("       cargo xtask docs             writes the tables of documents that follow from the code");
            eprintln!(
                "       cargo xtask sbom             prints the software bill of materials of the package, as CycloneDX JSON"
            );
            ExitCode::from(2)
        }
    }
}

fn broken_rules(root: &Path) -> Result<Vec<Finding>, Box<dyn Error>> {
    let mut found = layers::check(root)?;
    let files = files::read_rust(root)?;
    found.extend(files::check(root, &files)?);
    found.extend(calls::check(&files));
    found.extend(decoders::check(root, &files)?);
    found.extend(jailed::check(root, &files)?);
    found.extend(sandboxing::check(root)?);
    found.extend(scripts::check(root)?);
    found.extend(servers::check(&files));
    found.extend(threats::check(root, &files)?);
    found.extend(guest_logs::check(&files));
    found.extend(budgets::check(root)?);
    found.extend(versions::check(root)?);
    found.extend(shape::check_stages(root, &files)?);
    found.extend(language::check(root, &files)?);
    Ok(found)
}

fn print_rules(root: &Path) -> ExitCode {
    match broken_rules(root) {
        Ok(found) if found.is_empty() => {
            println!("rules: all kept");
            ExitCode::SUCCESS
        }
        Ok(found) => {
            for Finding { place, rule } in &found {
                println!("{place}: {rule}");
            }
            println!("rules: {} broken", found.len());
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("rules: cannot be checked: {error}");
            ExitCode::FAILURE
        }
    }
}

fn print_shape(root: &Path, json: bool) -> ExitCode {
    match shape::measure(root, json) {
        Ok(text) => {
            println!("{text}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("shape: cannot be measured: {error}");
            ExitCode::FAILURE
        }
    }
}
