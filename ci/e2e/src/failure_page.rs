//! Reads the tables of docs/operator/failures.md: the texts that the tests expect are those of the page.

/// The page.
const TEXT: &str = include_str!("../../../docs/operator/failures.md");

/// A row of a table.
pub struct FailureRow {
    /// The failure, in the first column.
    pub failure: &'static str,
    /// The second column.
    pub request: &'static str,
    /// The code spans between the first and the last column.
    pub spans: Vec<&'static str>,
}

/// Returns all rows of the page.
///
/// # Panics
/// If a row has too few or too many columns.
pub fn rows() -> Vec<FailureRow> {
    let lines = TEXT.lines().filter_map(|line| line.strip_prefix("| ")?.strip_suffix(" |"));
    let rows = lines.map(|line| line.split(" | ").collect::<Vec<_>>()).filter(|cells| cells[0] != "failure");
    let row = |cells: Vec<&'static str>| {
        assert!(cells.len() == 3 || cells.len() == 4, "a row has 3 or 4 columns: {cells:?}");
        let expected = &cells[1..cells.len() - 1];
        let spans = expected.iter().flat_map(|cell| cell.split('`').skip(1).step_by(2)).collect();
        FailureRow { failure: cells[0], request: cells[1], spans }
    };
    rows.map(row).collect()
}

/// Returns the row of a failure.
///
/// # Panics
/// If the page has none.
pub fn row(failure: &str) -> FailureRow {
    let found = rows().into_iter().find(|row| row.failure == failure);
    found.unwrap_or_else(|| panic!("docs/operator/failures.md has no row {failure:?}"))
}

/// Checks that a text is the one that the page has for a failure as the last code span of its row.
///
/// # Panics
/// If it is another one.
#[track_caller]
pub fn check_text(failure: &str, text: &str) {
    let row = row(failure);
    let expected = row.spans.last().unwrap_or_else(|| panic!("{failure}: the page has no text"));
    assert!(matches(expected, text), "{failure}: reported:\n{text}\nin the page:\n{expected}");
}

/// Returns whether a text is what the page says. `…` stands for any text; an error number may follow.
fn matches(expected: &str, text: &str) -> bool {
    let mut rest = text;
    for (index, part) in expected.split('…').enumerate() {
        match rest.find(part) {
            Some(at) if index > 0 || at == 0 => rest = &rest[at + part.len()..],
            _ => return false,
        }
    }
    rest.is_empty() || expected.ends_with('…') || rest.starts_with(" (os error ") && rest.ends_with(')')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_failure_has_one_row_with_a_text() {
        let rows = rows();
        assert!(rows.len() > 30, "the tables are found: {}", rows.len());
        for row in &rows {
            let same = rows.iter().filter(|other| other.failure == row.failure).count();
            assert_eq!(same, 1, "{:?} has one row", row.failure);
            assert!(!row.spans.is_empty(), "{:?} has an expected text", row.failure);
        }
    }

    #[test]
    fn an_ellipsis_stands_for_any_text() {
        assert!(matches("a …: b", "a x: b (os error 2)") && matches("a…", "a") && matches("…b", "ab"));
        assert!(!matches("a", "ab") && !matches("b", "ab") && !matches("a…c", "ab"));
    }
}
