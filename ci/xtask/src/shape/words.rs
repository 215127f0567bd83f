//! Counts the words that `prose.md` replaces, in code and comments outside of tests.

use super::source_file::SourceFile;
use serde::Serialize;

/// The words, as parts of longer words and in either case.
const WORDS: [&[&str]; 3] = [&["told"], &["whoever", "somebody", "nobody"], &["folder"]];

#[derive(Serialize)]
pub struct WordCount {
    pub words: String,
    pub in_rust: usize,
    pub in_shell: usize,
}

/// `scripts` are the paths and texts of the shell scripts.
pub fn count_words(files: &[SourceFile<'_>], scripts: &[(String, String)]) -> Vec<WordCount> {
    let count = |words: &&[&str]| WordCount {
        words: words.join(", "),
        in_rust: files.iter().flat_map(SourceFile::production).map(|line| occurrences(line, words)).sum(),
        in_shell: scripts.iter().map(|(_, text)| occurrences(text, words)).sum(),
    };
    WORDS.iter().map(count).collect()
}

fn occurrences(text: &str, words: &[&str]) -> usize {
    let text = text.to_lowercase();
    words.iter().map(|word| text.matches(word).count()).sum()
}

#[cfg(test)]
mod tests {
    use super::super::source_file::production_files;
    use super::*;

    #[test]
    fn words_outside_of_tests_are_counted() {
        let text = "//! Told to nobody.\nstruct ToldOf;\n#[cfg(test)]\nmod tests {\n    // told\n}\n";
        let files = [("a/src/b.rs".to_owned(), text.to_owned())];
        let scripts = [("ci/test".to_owned(), "folders=2 # Somebody\n".to_owned())];
        let counts: Vec<_> = count_words(&production_files(&files), &scripts)
            .into_iter()
            .map(|count| (count.words, count.in_rust, count.in_shell))
            .collect();
        let expected = [("told", 2, 0), ("whoever, somebody, nobody", 1, 1), ("folder", 0, 1)];
        assert_eq!(counts, expected.map(|(words, rust, shell)| (words.to_owned(), rust, shell)));
    }
}
