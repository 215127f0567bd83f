//! CNI configurations with which a pod gets no network.

use nacelle_e2e::TestNode;
use nacelle_e2e::failure_answer::{check_request, try_run_pod};
use serde_json::json;
use std::fs;
use std::path::PathBuf;

/// The rows that [`check`] causes.
pub const ROWS: [&str; 9] = [
    "plugin refuses",
    "plugin fails without a message",
    "plugin crashes",
    "plugin hangs",
    "plugin prints no result",
    "plugin creates no interface",
    "plugin uninstalled",
    "no configuration",
    "invalid configuration",
];

fn file(node: &TestNode) -> PathBuf {
    node.directory().join("cni/10-e2e.conflist")
}

/// Returns the configuration of a plugin for tests that does this at ADD.
fn plugin(node: &TestNode, mode: &str) -> serde_json::Value {
    json!({"type": "nacelle-fake", "dir": node.directory(), "tag": "fake", "mode": mode})
}

fn configure(node: &TestNode, plugins: serde_json::Value) {
    let list = json!({"cniVersion": "1.0.0", "name": "own", "plugins": plugins});
    fs::write(file(node), list.to_string()).expect("the node's directory is writable");
}

/// Runs a pod with each of the configurations.
pub fn check(node: &TestNode) {
    let modes = ["json", "silent", "suicide", "hang", "garbage", ""];
    for (failure, mode) in ROWS.into_iter().zip(modes) {
        configure(node, json!([plugin(node, mode)]));
        check_request(node, failure, &try_run_pod(node, ""));
    }
    configure(node, json!([{"type": "uninstalled"}]));
    check_request(node, "plugin uninstalled", &try_run_pod(node, ""));
    fs::remove_file(file(node)).expect("it was written");
    check_request(node, "no configuration", &try_run_pod(node, ""));
    fs::write(file(node), "{x").expect("the node's directory is writable");
    check_request(node, "invalid configuration", &try_run_pod(node, ""));
}

/// Sets a configuration whose last plugin waits for the file `go` in the node's directory.
pub fn wait_for_file(node: &TestNode) {
    let original = fs::read(file(node)).expect("the node has a configuration");
    let mut list: serde_json::Value = serde_json::from_slice(&original).expect("it is JSON");
    fs::write(file(node).with_extension("original"), original).expect("the node's directory is writable");
    list["plugins"].as_array_mut().expect("a list").push(plugin(node, "wait"));
    fs::write(file(node), list.to_string()).expect("the node's directory is writable");
}

/// Sets the configuration from before [`wait_for_file`].
pub fn restore(node: &TestNode) {
    fs::rename(file(node).with_extension("original"), file(node)).expect("it was written");
}
