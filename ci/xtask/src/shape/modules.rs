//! Import cycles of each crate: between its files, and between its top-level modules, each of which is a file or a directory.
//!
//! A file points to another one if it names it, or something in it, by a path that begins with `crate`, `super` or `self`. What a module
//! re-exports counts as its own, so a path through it leads no further. Each program in `src/bin`, and `main.rs` beside a `lib.rs`,
//! is a crate of its own.

use super::components::{Graph, components};
use super::paths;
use super::source_file::SourceFile;
use crate::source::tokens;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

#[derive(Serialize)]
pub struct CrateCycles {
    /// Directory of the crate, or the file or directory of a program.
    pub name: String,
    /// Files of each import cycle, below `src`; the largest cycle first.
    pub files: Vec<Vec<String>>,
    /// Sizes of the cycles in files if a module's paths to its own children (`mod a; a::f()`) count, too.
    pub with_children: Vec<usize>,
    /// Cycles between top-level modules; the one with the most modules first.
    pub directories: Vec<DirectoryCycle>,
}

#[derive(Serialize)]
pub struct DirectoryCycle {
    pub modules: Vec<String>,
    /// Lines of their files, without files for tests.
    pub lines: usize,
}

/// A module's names from the root of its crate on; the root has none.
type Module<'a> = Vec<&'a str>;
type Modules<'a> = BTreeMap<Module<'a>, &'a SourceFile<'a>>;

/// Returns the cycles of all crates, in the order of their names.
pub fn cycles(files: &[SourceFile<'_>]) -> Vec<CrateCycles> {
    group_by_crate(files).into_iter().map(|(name, modules)| cycles_of(name, &modules)).collect()
}

fn group_by_crate<'a>(files: &'a [SourceFile<'a>]) -> BTreeMap<String, Modules<'a>> {
    let libraries: BTreeSet<&str> = files.iter().filter_map(|file| file.place.strip_suffix("/src/lib.rs")).collect();
    let mut crates: BTreeMap<String, Modules<'a>> = BTreeMap::new();
    for file in files {
        if let Some((name, module)) = crate_and_module(file.place, &libraries) {
            crates.entry(name).or_default().insert(module, file);
        }
    }
    crates
}

/// Returns the crate and the module of a file, or `None` for one outside of `src`.
fn crate_and_module<'a>(place: &'a str, libraries: &BTreeSet<&str>) -> Option<(String, Module<'a>)> {
    let (package, inner) = place.split_once("/src/")?;
    let mut module: Module<'a> = inner.trim_end_matches(".rs").split('/').collect();
    let mut name = package.to_owned();
    if let ["bin", program, ..] = module[..] {
        name = format!("{package}/src/bin/{program}");
        module.drain(..2);
    } else if module == ["main"] && libraries.contains(package) {
        name = format!("{package}/src/main.rs");
    }
    if matches!(module[..], ["lib" | "main"] | [.., "mod"]) {
        module.pop();
    }
    Some((name, module))
}

fn cycles_of(name: String, modules: &Modules<'_>) -> CrateCycles {
    let graph = imports(modules, false);
    let inner = |module: &Module<'_>| {
        let place = modules.get(module).map_or("", |file| file.place);
        place.split_once("/src/").map_or(place, |(_, inner)| inner).to_owned()
    };
    let files = components(&graph).iter().map(|cycle| cycle.iter().map(inner).collect()).collect();
    let with_children = components(&imports(modules, true)).iter().map(Vec::len).collect();
    let directories = components(&top_level(&graph)).iter().map(|cycle| directory_cycle(cycle, modules)).collect();
    CrateCycles { name, files, with_children, directories }
}

fn directory_cycle(cycle: &[&str], modules: &Modules<'_>) -> DirectoryCycle {
    let inside = |module: &Module<'_>| module.first().is_some_and(|first| cycle.contains(first));
    let lines = modules.iter().filter(|(module, _)| inside(module)).map(|(_, file)| file.lines).sum();
    DirectoryCycle { modules: cycle.iter().map(|name| (*name).to_owned()).collect(), lines }
}

/// Returns which modules name which.
fn imports<'a>(modules: &Modules<'a>, with_children: bool) -> Graph<Module<'a>> {
    let mut graph = Graph::new();
    for (module, file) in modules {
        let tokens = tokens(&file.code);
        let mut targets = BTreeSet::new();
        for path in paths::named_paths(&tokens) {
            let base: Vec<&str> = module.iter().copied().chain(path.inside).collect();
            targets.extend(resolve_path(&base, &path.names, modules, with_children).filter(|target| target != module));
        }
        graph.insert(module.clone(), targets);
    }
    graph
}

/// Returns the innermost module with a file that a path leads to. `base` is the module that the path stands in.
fn resolve_path<'a>(
    base: &[&'a str],
    names: &[&'a str],
    modules: &Modules<'a>,
    with_children: bool,
) -> Option<Module<'a>> {
    let mut module = base.to_vec();
    match *names.first()? {
        "crate" => module.clear(),
        "self" | "super" => {}
        child if with_children && modules.contains_key(&[base, &[child]].concat()) => {}
        _ => return None,
    }
    for name in names {
        match *name {
            "crate" | "self" => {}
            "super" => {
                module.pop();
            }
            name => module.push(name),
        }
    }
    while !modules.contains_key(&module) {
        module.pop()?;
    }
    Some(module)
}

/// Returns which top-level modules name which, through any of their files. The root of the crate is none of them.
fn top_level<'a>(imports: &Graph<Module<'a>>) -> Graph<&'a str> {
    let mut graph: Graph<&str> = Graph::new();
    for (module, targets) in imports {
        if let Some(from) = module.first() {
            let others = targets.iter().filter_map(|target| target.first()).filter(|to| *to != from);
            graph.entry(*from).or_default().extend(others);
        }
    }
    graph
}

#[cfg(test)]
mod tests {
    use super::super::source_file::production_files;
    use super::*;

    fn crate_of(files: &[(&str, &str)]) -> CrateCycles {
        let files: Vec<_> = files.iter().map(|(place, text)| (format!("a/src/{place}"), (*text).to_owned())).collect();
        cycles(&production_files(&files)).into_iter().find(|one| one.name == "a").expect("the crate has files")
    }

    #[test]
    fn a_file_belongs_to_a_crate() {
        let libraries = BTreeSet::from(["a"]);
        for (place, name, module) in [
            ("a/src/lib.rs", "a", vec![]),
            ("a/src/b.rs", "a", vec!["b"]),
            ("a/src/b/mod.rs", "a", vec!["b"]),
            ("a/src/b/c.rs", "a", vec!["b", "c"]),
            ("a/src/main.rs", "a/src/main.rs", vec![]),
            ("b/src/main.rs", "b", vec![]),
            ("a/src/bin/c.rs", "a/src/bin/c", vec![]),
            ("a/src/bin/c/main.rs", "a/src/bin/c", vec![]),
            ("a/src/bin/c/d/mod.rs", "a/src/bin/c", vec!["d"]),
        ] {
            assert_eq!(crate_and_module(place, &libraries), Some((name.to_owned(), module)), "{place}");
        }
        assert_eq!(crate_and_module("a/build.rs", &libraries), None);
    }

    #[test]
    fn a_cycle_of_files_is_found() {
        let found = crate_of(&[
            ("lib.rs", "mod b; mod c; mod d;"),
            ("b.rs", "use crate::{c::C, d};"),
            ("c.rs", "fn f() { super::b::g() }"),
            ("d.rs", "// crate::b\nfn f() { \"crate::b\"; }\n#[cfg(test)]\nmod tests { use crate::b; }"),
        ]);
        assert_eq!(found.files, [["b.rs", "c.rs"]]);
        assert_eq!(found.directories.len(), 1);
        assert_eq!((found.directories[0].modules.join(" "), found.directories[0].lines), ("b c".to_owned(), 2));
    }

    #[test]
    fn paths_inside_of_modules_are_resolved() {
        let found = crate_of(&[
            ("b/mod.rs", "pub mod c; pub mod d; mod inner { use super::super::e; use super::c; }"),
            ("b/c.rs", "use super::d::X; use super::{d as y};"),
            ("b/d.rs", "use super::c::{self, Z};"),
            ("e.rs", "use crate::b::d;"),
        ]);
        assert_eq!(found.files, [["b/c.rs", "b/d.rs"]]);
        let directories: Vec<_> = found.directories.iter().map(|one| one.modules.join(" ")).collect();
        assert_eq!(directories, ["b e"]);
    }

    #[test]
    fn paths_to_children_count_apart() {
        let found = crate_of(&[("b.rs", "mod c; use c::C; fn f() { d::g() }"), ("b/c.rs", "use super::f;")]);
        assert!(found.files.is_empty() && found.directories.is_empty());
        assert_eq!(found.with_children, [2]);
    }
}
