//! Compares the answers of a daemon with the page.

use super::page::{self, FailureRow};
use nacelle_e2e::{PodRequest, ProgramOutput, TestNode, eventually};
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
pub fn check(node: &TestNode, failure: &str, output: &ProgramOutput) {
    let FailureRow { request, spans, .. } = page::row(failure);
    let [expected_code, expected] = spans[..] else { panic!("{failure}: the page has no code and message") };
    let (code, message) = code_and_message(output);
    assert!(page::matches(expected, &message), "{failure}: reported:\n{message}\nin the page:\n{expected}");
    assert_eq!(code, expected_code, "{failure}: {message}");
    let event = format!("request failed: {message} rpc={request:?} code={code} ");
    assert!(node.log().contains(&event), "{failure}: the log has no event {event:?}");
}

/// Checks the status of a container that has ended, and the event of its pod's end.
pub fn check_end(node: &TestNode, failure: &str, pod: &str, status: &Value) {
    let FailureRow { spans, .. } = page::row(failure);
    let [code, reason, expected] = spans[..] else {
        panic!("{failure}: the page has no exit code, reason and message")
    };
    assert_eq!(
        (status["exitCode"].to_string(), status["reason"].as_str()),
        (code.to_owned(), Some(reason)),
        "{status}"
    );
    let message = status["message"].as_str().unwrap_or_default();
    assert!(page::matches(expected, message), "{failure}: reported:\n{message}\nin the page:\n{expected}");
    let event = format!("WARN the machine of the pod is gone pod={pod} failure={message:?}");
    eventually(&event, || node.log().contains(&event).then_some(()));
}

/// Tries to run a pod with a handler; the empty name is the default one.
pub fn run_pod(node: &TestNode, handler: &str) -> ProgramOutput {
    let file = node.crictl.write_input("pod", &PodRequest::new("failing", node.directory()).0);
    node.crictl.try_call(["runp", "--runtime", handler, &file])
}
