//! Defines the findings of `nacelle check`, one line each.

use super::ExitStatus;
use super::output::{OutputArgument, TableView};
use serde::Serialize;
use std::fmt;

/// The weight of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub(super) enum Severity {
    /// Nothing is wrong.
    Ok,
    /// It works, with a disadvantage.
    Note,
    /// It does not work, or does not protect.
    Fail,
}

/// What one check has found.
#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(super) struct Finding {
    pub(super) severity: Severity,
    pub(super) subject: &'static str,
    pub(super) message: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = match self.severity {
            Severity::Ok => "ok",
            Severity::Note => "note",
            Severity::Fail => "FAIL",
        };
        write!(f, "{word:<5}{:<9}{}", self.subject, self.message)
    }
}

pub(super) fn finding(severity: Severity, subject: &'static str, message: impl Into<String>) -> Finding {
    Finding { severity, subject, message: message.into() }
}

/// The findings of all checks, and what follows from them.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(super) struct CheckReport {
    /// No finding is a failure.
    ok: bool,
    /// The conclusion.
    conclusion: &'static str,
    problems: usize,
    findings: Vec<Finding>,
}

impl CheckReport {
    /// Makes a report whose conclusion is `good` if nothing fails, otherwise `bad`.
    pub(super) fn new(findings: Vec<Finding>, good: &'static str, bad: &'static str) -> CheckReport {
        let problems = findings.iter().filter(|finding| finding.severity == Severity::Fail).count();
        let ok = problems == 0;
        CheckReport { ok, conclusion: if ok { good } else { bad }, problems, findings }
    }

    /// Prints the report, and returns the exit status.
    pub(super) fn print(&self, output: OutputArgument) -> anyhow::Result<ExitStatus> {
        output.print(self)?;
        Ok(ExitStatus::of(self.ok))
    }
}

impl TableView for CheckReport {
    fn table(&self) -> String {
        let lines: String = self.findings.iter().map(|finding| format!("{finding}\n")).collect();
        let count = match self.problems {
            0 => String::new(),
            1 => ": 1 problem".to_owned(),
            count => format!(": {count} problems"),
        };
        format!("{lines}check: {}{count}\n", self.conclusion)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_counts_its_problems() {
        let of = |severities: &[Severity]| {
            let findings = severities.iter().map(|severity| finding(*severity, "user", "root"));
            CheckReport::new(findings.collect(), "good", "bad")
        };
        let good = of(&[Severity::Ok, Severity::Note]);
        assert_eq!(good.table(), "ok   user     root\nnote user     root\ncheck: good\n");
        assert!(of(&[Severity::Fail]).table().ends_with("\ncheck: bad: 1 problem\n"));
        let bad = of(&[Severity::Fail, Severity::Fail]);
        assert!(bad.table().ends_with("\ncheck: bad: 2 problems\n"));
        let expected = serde_json::json!({"severity": "fail", "subject": "user", "message": "root"});
        let json = serde_json::to_value(&bad).unwrap();
        assert_eq!((&json["findings"][1], &json["ok"], &json["problems"]), (&expected, &false.into(), &2.into()));
    }
}
