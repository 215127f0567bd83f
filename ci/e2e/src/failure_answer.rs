//! Compares the answers of a daemon with the texts of docs/operator/failures.md.

use crate::failure_page::{self, FailureRow};
use crate::{PodRequest, ProgramOutput, TestNode, eventually};
use serde_json::Value;

/// Returns the gRPC code and the message in the output of a crictl that failed.
fn code_and_message(output: &ProgramOutput) -> (String, String) {
    assert_ne!(output.code, 0, "the request succeeded: {}", output.stdout);
    let line = output.stderr.lines().rev().find(|line| line.contains("rpc error: code = "));
    let line = line.unwrap_or_else(|| panic!("no gRPC error: {output:?}"));
    let text = line.rsplit_once("rpc error: code = ").expect("it was found").1;
    let (code, message) = text.split_once(" desc = ").expect("an error has a message");
    let message = message.strip_suffix('"').unwrap_or(message);
    (code.to_owned(), message.replace("\\\"", "\"").replace("\\\\", "\\"))
}

/// Checks that a failed request has the code and the message that the page names, and that the log has both.
///
/// # Panics
/// If it has others.
#[track_caller]
pub fn check_request(node: &TestNode, failure: &str, output: &ProgramOutput) {
    let (code, message) = code_and_message(output);
    check_status(node, failure, &code, &message);
}

/// Checks the code and the message of a failed request as [`check_request`] does.
///
/// # Panics
/// If they are not those of the page.
#[track_caller]
pub fn check_status(node: &TestNode, failure: &str, code: &str, message: &str) {
    let FailureRow { request, spans, .. } = failure_page::row(failure);
    let [expected_code, _] = spans[..] else { panic!("{failure}: the page has no code and message") };
    failure_page::check_text(failure, message);
    assert_eq!(code, expected_code, "{failure}: {message}");
    let event = format!("request failed: {message} rpc={request:?} code={code} ");
    assert!(node.log().contains(&event), "{failure}: the log has no event {event:?}");
}

/// Checks the status of a container that has ended by itself or with its VM. The page has no message for a container that has none.
///
/// # Panics
/// If its exit code, reason or message are not those of the page.
#[track_caller]
pub fn check_exit(failure: &str, status: &Value) {
    let FailureRow { spans, .. } = failure_page::row(failure);
    let (code, reason, message) = match spans[..] {
        [code, reason] => (code, reason, None),
        [code, reason, message] => (code, reason, Some(message)),
        _ => panic!("{failure}: the page has no exit code and reason"),
    };
    let found = (status["exitCode"].to_string(), status["reason"].as_str());
    assert_eq!(found, (code.to_owned(), Some(reason)), "{status}");
    let reported = status["message"].as_str().unwrap_or_default();
    match message {
        Some(_) => failure_page::check_text(failure, reported),
        None => assert_eq!(reported, "", "{status}"),
    }
}

/// Checks the status of a container whose VM has ended, and the event of its pod's end in the log.
///
/// # Panics
/// If they are not those of the page.
#[track_caller]
pub fn check_end(node: &TestNode, failure: &str, pod: &str, status: &Value) {
    check_exit(failure, status);
    let message = status["message"].as_str().unwrap_or_default();
    // The event also has the signal that ended the process.
    let message = format!("{message:?}");
    let event = format!("WARN the machine of the pod is gone pod={pod} failure={}", message.trim_end_matches('"'));
    eventually(&event, || node.log().contains(&event).then_some(()));
}

/// Checks the last line of a daemon that did not start.
///
/// # Panics
/// If its text is not that of the page.
#[track_caller]
pub fn check_daemon(failure: &str, stderr: &str) {
    let last = stderr.lines().last().unwrap_or_default();
    failure_page::check_text(failure, last.split_once("nacelle: ").map_or(last, |(_, message)| message));
}

/// Tries to run a pod with a handler; the empty name is the default one.
pub fn try_run_pod(node: &TestNode, handler: &str) -> ProgramOutput {
    let file = node.crictl.write_input("pod", &PodRequest::new("failing", node.directory()).0);
    node.crictl.try_call(["runp", "--runtime", handler, &file])
}
