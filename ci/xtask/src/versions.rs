//! Checks that the documents name packages and images of the version in `Cargo.toml`: `nacelle_0.2.0_amd64.deb`.

use crate::Finding;
use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};

/// What stands before the version of a package or an image.
const NAMES: [&str; 4] = ["nacelle_", "nacelle-", "nacelle:", "nacelle-installer:"];

pub fn check(root: &Path) -> Result<Vec<Finding>, Box<dyn Error>> {
    let manifest = fs::read_to_string(root.join("Cargo.toml"))?;
    let version = workspace_version(&manifest).ok_or("Cargo.toml has no version of the workspace")?;
    let mut pages = vec![root.join("README.md")];
    collect_pages(&root.join("docs"), &mut pages)?;
    let mut found = Vec::new();
    for page in pages {
        let place = page.strip_prefix(root)?.to_string_lossy().into_owned();
        let text = fs::read_to_string(&page)?;
        found.extend(other_versions(&text, version).into_iter().map(|name| Finding {
            place: place.clone(),
            rule: format!("names {name}, but Cargo.toml has the version {version}"),
        }));
    }
    Ok(found)
}

fn collect_pages(directory: &Path, into: &mut Vec<PathBuf>) -> Result<(), Box<dyn Error>> {
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        if path.is_dir() {
            collect_pages(&path, into)?;
        } else if path.extension().is_some_and(|extension| extension == "md" || extension == "yaml") {
            into.push(path);
        }
    }
    Ok(())
}

fn workspace_version(manifest: &str) -> Option<&str> {
    let (_, section) = manifest.split_once("[workspace.package]")?;
    section.lines().find_map(|line| line.strip_prefix("version = \"")?.strip_suffix('"'))
}

/// Returns the names of packages and images with another version than `version`.
fn other_versions<'a>(text: &'a str, version: &str) -> Vec<&'a str> {
    let mut found = Vec::new();
    for name in NAMES {
        for (at, _) in text.match_indices(name) {
            let rest = &text[at + name.len()..];
            let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(rest.len());
            let named = rest[..end].trim_end_matches('.');
            if named.split('.').count() == 3 && named != version {
                found.push(&text[at..at + name.len() + named.len()]);
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_packages_and_images_have_the_version() {
        let page = "apt install nacelle_0.1.0_amd64.deb\ntar -xf nacelle-0.2.0-x86_64.tar.xz\nr.example/nacelle-installer:0.3.0.\n\
                    nacelle-pod 1.1 nacelle_build_info nacelle_NEW_amd64.deb";
        assert_eq!(other_versions(page, "0.2.0"), ["nacelle_0.1.0", "nacelle-installer:0.3.0"]);
        assert_eq!(workspace_version("[workspace]\n[workspace.package]\nversion = \"0.2.0\"\n"), Some("0.2.0"));
        assert_eq!(workspace_version("[workspace]\n"), None);
    }
}
