//! Owns: the house rules that a machine can check: `cargo xtask rules`.

mod calls;
mod decoders;
mod files;
mod jailed;
mod layers;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// A broken rule: where, and what is wrong there.
struct Finding {
    place: String,
    rule: String,
}

fn root() -> PathBuf {
    // As cargo says it now: where the program was built may be a clone that is gone, if both have one target folder.
    let package = std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
    Path::new(&package).ancestors().nth(2).expect("ci/xtask lies two folders deep").to_owned()
}

fn main() -> ExitCode {
    if std::env::args().nth(1).as_deref() != Some("rules") {
        eprintln!("usage: cargo xtask rules");
        return ExitCode::from(2);
    }
    let root = root();
    match layers::check(&root).and_then(|mut found| {
        let files = files::all(&root)?;
        found.extend(files::check(&root, &files)?);
        found.extend(calls::check(&files));
        found.extend(decoders::check(&root, &files)?);
        found.extend(jailed::check(&root, &files)?);
        Ok(found)
    }) {
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
