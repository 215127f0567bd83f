//! Parses the container paths of socket volumes, `PATH,PATH`. Nodes use them for volumes (docs/contributor/volumes.md); here they
//! are only validated.

use std::collections::BTreeSet;
use std::path::{Component, Path, PathBuf};

/// The maximum number of paths of a pod.
pub const MANY: usize = 16;
/// The longest path in bytes that Linux accepts in a call.
const PATH_MAX: usize = 4095;
/// The rule, for causes.
pub const RULE: &str = "PATH,PATH is expected: 1 to 16 absolute paths of mounts in containers, each once, without .. and at most 4095 \
                        bytes long";

/// Returns the paths in the order of the text, without needless slashes, or `None` if the text violates the rule.
pub fn paths(text: &str) -> Option<Vec<String>> {
    let paths: Vec<String> = text.split(',').take(MANY + 1).map(path).collect::<Option<_>>()?;
    let different = paths.iter().collect::<BTreeSet<_>>().len() == paths.len();
    (paths.len() <= MANY && different).then_some(paths)
}

fn path(text: &str) -> Option<String> {
    let path = Path::new(text);
    let plain = |part| matches!(part, Component::RootDir | Component::Normal(_));
    let right = path.is_absolute()
        && text.len() <= PATH_MAX
        && !text.chars().any(char::is_control)
        && path.components().all(plain)
        && path.components().count() > 1;
    right.then(|| path.components().collect::<PathBuf>().to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn paths_lose_needless_slashes() {
        assert_eq!(paths("/run/spire/"), Some(vec!["/run/spire".to_owned()]));
        assert_eq!(paths("//var//run/./docker.sock,/a b"), Some(vec!["/var/run/docker.sock".into(), "/a b".into()]));
    }

    #[test]
    fn other_texts_are_refused() {
        let many: Vec<String> = (0..=MANY).map(|number| format!("/{number}")).collect();
        assert_eq!(paths(&many[1..].join(",")).unwrap().len(), MANY);
        let (many, long) = (many.join(","), format!("/{}", "a".repeat(PATH_MAX)));
        for text in ["", "/", "run", "/a,", ",/a", "/a,b", "/a/../b", "/a,/a", "/a,/a/", "/a, /b", "/a\n", &many, &long]
        {
            assert_eq!(paths(text), None, "{text}");
        }
    }

    proptest! {
        #[test]
        fn accepted_paths_are_in_bounds(text in "\\PC{0,64}|(/[a-c./]{0,6},?){0,20}") {
            for path in paths(&text).unwrap_or_default() {
                prop_assert!(path.starts_with('/') && path.len() > 1 && path.len() <= PATH_MAX);
                prop_assert!(!path.split('/').any(|part| part == ".."));
                prop_assert_eq!(paths(&path), Some(vec![path]));
            }
        }
    }
}
