//! Defines the findings of `nacelle check`, one line each.

use std::fmt;
use std::process::ExitCode;

/// The weight of a finding.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Severity {
    /// Nothing is wrong.
    Ok,
    /// It works, with a disadvantage.
    Note,
    /// It does not work, or does not protect.
    Fail,
}

/// What one check has found.
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

/// Prints the findings and a last line: `good` if nothing fails, else `bad` and the number of problems. Returns the exit code.
pub(super) fn report(findings: &[Finding], good: &str, bad: &str) -> ExitCode {
    for finding in findings {
        println!("{finding}");
    }
    match findings.iter().filter(|finding| finding.severity == Severity::Fail).count() {
        0 => {
            println!("check: {good}");
            ExitCode::SUCCESS
        }
        1 => {
            println!("check: {bad}: 1 problem");
            ExitCode::FAILURE
        }
        count => {
            println!("check: {bad}: {count} problems");
            ExitCode::FAILURE
        }
    }
}
