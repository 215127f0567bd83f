//! Implements the verbs of `exec POD -- @vm VERB`, by which users who have only `kubectl exec` control the VM itself.

use crate::changes;
use crate::dump;
use crate::error::KeeperError;
use crate::guest_agent::CommandResult;
use crate::hotplug;
use crate::qemu::AGENT_CHARDEV;
use crate::quiesce;
use crate::restart::PowerRequest;
use crate::snapshots::{self, VmSnapshot};
use crate::vm::{PodVm, PodVmState};
use nacelle_base::task::run_blocking;
use serde_json::{Value, json};
use std::sync::Arc;
use tokio::net::UnixStream;
use tokio::sync::oneshot;

/// The name that marks a command line as a verb instead of a program.
const PROGRAM: &str = "@vm";
/// The file of a screenshot while it is taken, in the directory of QEMU's sockets.
const SCREENSHOT_FILE: &str = "screen.png";
/// The maximum size of a screenshot in bytes.
const MAX_SCREENSHOT_BYTES: u64 = 64 << 20;
/// The maximum bytes of the guest's information about itself.
const MAX_GUEST_INFO_BYTES: usize = 1 << 20;

/// The verbs and their help texts.
const VERBS: &[(&str, &str)] = &[
    ("status", "report the VM's state as JSON"),
    ("changes", "write a line break at first and after each change of the status, until the output is closed"),
    ("running", "for probes: succeed if the VM runs; otherwise print the state and exit with 1"),
    ("pause", "pause the vCPUs"),
    ("unpause", "resume the vCPUs"),
    ("start", "start a VM that is stopped or stopping"),
    ("stop", "press the power button; the VM stays stopped"),
    ("restart", "press the power button; the VM starts again"),
    ("power-off", "power the VM off at once; the run strategy decides what follows"),
    ("reset", "reset the VM, like its reset button"),
    ("soft-reboot", "request the guest agent to restart the system"),
    ("power-button", "press the power button; the guest may ignore it"),
    ("screenshot", "write the screen to standard output as PNG"),
    ("memory-dump [FORMAT]", "write the guest's memory to standard output, as elf or kdump-zlib"),
    ("snapshot NAME", "save disks, memory and devices under this name"),
    ("restore NAME", "return to a snapshot"),
    ("snapshots", "list the snapshots as JSON"),
    ("rm-snapshot NAME", "delete a snapshot"),
    ("volumes", "list the hot-plugged disks as JSON"),
    ("add-volume NAME=SIZE", "hot-plug an empty disk"),
    ("rm-volume NAME", "remove a hot-plugged disk and its data"),
    ("hold NAME", "take a snapshot, keep the VM paused until the output is closed, and delete the snapshot"),
    ("credentials JSON", "set SSH keys and passwords of users by the guest agent; sent by the daemon"),
    ("guest-ping", "test whether the guest agent responds"),
    ("guest-info", "report the guest agent's information about the system as JSON"),
    ("help", "print this list"),
];

/// Earlier names of verbs and their names now, which are those of `nacelle vm`. The daemon sends the earlier ones: a pod process that an
/// earlier version started knows no others.
const EARLIER_NAMES: &[(&str, &str)] = &[("delete-snapshot", "rm-snapshot"), ("remove-volume", "rm-volume")];

/// Returns the verb of a command line and its argument, if it is one; the empty verb if it is unknown or missing.
pub fn parse_verb(args: &[String]) -> Option<(&str, &str)> {
    let (program, rest) = args.split_first()?;
    (program == PROGRAM).then_some(match rest {
        [verb] => (name_now(verb), ""),
        [verb, argument] => (name_now(verb), argument.as_str()),
        _ => ("", ""),
    })
}

fn name_now(verb: &str) -> &str {
    EARLIER_NAMES.iter().find(|(earlier, _)| *earlier == verb).map_or(verb, |(_, now)| now)
}

/// Returns whether the command is a verb whose answer is unbounded, and is sent to a stream while the verb runs.
pub fn streams_output(args: &[String]) -> bool {
    parse_verb(args).is_some_and(|(verb, _)| ["changes", "memory-dump", "hold"].contains(&verb))
}

fn help() -> String {
    VERBS.iter().map(|(verb, argument)| format!("{verb:<23}{argument}\n")).collect()
}

fn usage() -> CommandResult {
    CommandResult { code: 2, stdout: Vec::new(), stderr: format!("{PROGRAM} VERB:\n{}", help()).into_bytes() }
}

async fn list_snapshots(vm: &Arc<PodVm>) -> Result<CommandResult, KeeperError> {
    let one =
        |snapshot: VmSnapshot| json!({ "name": snapshot.name, "taken": snapshot.taken_at, "bytes": snapshot.bytes });
    let all: Vec<Value> = snapshots::list(vm).await?.into_iter().map(one).collect();
    Ok(success(format!("{}\n", Value::Array(all))))
}

fn success(text: String) -> CommandResult {
    CommandResult { stdout: text.into_bytes(), ..CommandResult::default() }
}

/// Runs a verb. A long answer goes to the stream from `reader`.
pub async fn run(
    vm: &Arc<PodVm>,
    (verb, argument): (&str, &str),
    reader: oneshot::Receiver<UnixStream>,
) -> Result<CommandResult, KeeperError> {
    let qemu = async |command: &str| vm.execute(command, Value::Null).await.map(|_| CommandResult::default());
    match verb {
        "snapshot" => snapshots::save(vm, argument).await.map(|()| CommandResult::default()),
        "restore" => snapshots::load(vm, argument).await.map(|()| CommandResult::default()),
        "rm-snapshot" => snapshots::delete(vm, argument).await.map(|()| CommandResult::default()),
        "add-volume" => run_to_end(vm, argument, hotplug::add).await,
        "rm-volume" => run_to_end(vm, argument, hotplug::remove).await,
        "hold" => quiesce::quiesce(vm, argument, reader).await.map(|()| CommandResult::default()),
        "credentials" => {
            let qemu = vm.qemu()?;
            qemu.credentials.install(&qemu.agent, argument).await
        }
        "memory-dump" => dump::dump_memory(vm, argument, reader).await.map(|()| CommandResult::default()),
        _ if !argument.is_empty() => Ok(usage()),
        "changes" => changes::report(vm, reader).await.map(|()| CommandResult::default()),
        "snapshots" => list_snapshots(vm).await,
        "volumes" => Ok(success(format!("{}\n", hotplug::list(vm).await))),
        "status" => status(vm).await,
        "running" => Ok(probe_result(phase(vm).await?.0)),
        "pause" => qemu("stop").await,
        "unpause" => qemu("cont").await,
        "start" => {
            vm.power_on();
            Ok(CommandResult::default())
        }
        "stop" => request_power(vm, PowerRequest::Stop),
        "restart" => request_power(vm, PowerRequest::Restart),
        "power-off" => vm.power_off().map(|()| CommandResult::default()),
        "reset" => qemu("system_reset").await,
        "power-button" => qemu("system_powerdown").await,
        "soft-reboot" => soft_reboot(vm).await,
        "screenshot" => screenshot(vm).await,
        "guest-ping" => vm.guest_command("guest-ping", Value::Null).await.map(|_| CommandResult::default()),
        "guest-info" => guest_info(vm).await,
        "help" => Ok(success(help())),
        _ => Ok(usage()),
    }
}

/// Runs a verb to its end even if the caller is gone.
async fn run_to_end<F: Future<Output = Result<(), KeeperError>> + Send + 'static>(
    vm: &Arc<PodVm>,
    argument: &str,
    verb: impl FnOnce(Arc<PodVm>, String) -> F,
) -> Result<CommandResult, KeeperError> {
    let task = verb(Arc::clone(vm), argument.to_owned());
    let done = tokio::spawn(task).await;
    let task_failed = |error| KeeperError::Resource { what: "finish a task", source: std::io::Error::other(error) };
    done.map_err(task_failed)?.map(|()| CommandResult::default())
}

/// Sets the target state; a running VM is stopped by its power button. Only a VM that outlives its pod can be stopped.
fn request_power(vm: &Arc<PodVm>, request: PowerRequest) -> Result<CommandResult, KeeperError> {
    if vm.document.strategy.is_none() && request == PowerRequest::Stop {
        let hint = "it ends with its container: stop that, or make the VM persistent by a name (vm.nacelle.dev/name)";
        return Err(KeeperError::Unsupported { what: "stay stopped", hint });
    }
    vm.request_power(request);
    vm.press_power_button();
    Ok(CommandResult::default())
}

/// Returns the state in KubeVirt's terms and, if the VM is on, in QEMU's.
async fn phase(vm: &PodVm) -> Result<(&'static str, Option<Value>), KeeperError> {
    match vm.state() {
        PodVmState::Stopped => return Ok(("Stopped", None)),
        PodVmState::CrashLoopBackOff => return Ok(("CrashLoopBackOff", None)),
        PodVmState::Created | PodVmState::Starting => return Ok(("Starting", None)),
        PodVmState::Ended(_) => return Ok(("Succeeded", None)),
        PodVmState::Running => {}
    }
    let reply = match vm.execute("query-status", Value::Null).await {
        // The VM ended during the request.
        Err(KeeperError::Disconnected { .. }) => return Ok(("Stopping", None)),
        reply => reply?,
    };
    let qemu = reply.get("status").cloned().unwrap_or_default();
    let phase = match qemu.as_str() {
        Some("paused" | "prelaunch" | "suspended") => "Paused",
        _ => "Running",
    };
    Ok((phase, Some(qemu)))
}

async fn status(vm: &PodVm) -> Result<CommandResult, KeeperError> {
    let mut status = match phase(vm).await? {
        (phase, None) => json!({ "phase": phase, "agentConnected": false }),
        (phase, Some(qemu)) => {
            let accelerated = vm.execute("query-kvm", Value::Null).await?;
            json!({
                "phase": phase,
                "qemu": qemu,
                "agentConnected": is_agent_connected(vm).await?,
                "softwareEmulation": accelerated.get("enabled") != Some(&json!(true)),
            })
        }
    };
    if let Some(result) = vm.qemu().ok().and_then(|qemu| qemu.credentials.last_result()) {
        status["credentials"] = json!(result);
    }
    Ok(success(format!("{status}\n")))
}

/// Returns whether the guest agent answers. QEMU reports whether the guest has opened the agent's port, so a guest without an agent
/// causes no wait.
async fn is_agent_connected(vm: &PodVm) -> Result<bool, KeeperError> {
    let devices = vm.execute("query-chardev", Value::Null).await?;
    Ok(is_agent_port_open(&devices) && vm.qemu()?.agent.responds().await)
}

fn is_agent_port_open(devices: &Value) -> bool {
    let is_open = |device: &Value| {
        device.get("label") == Some(&json!(AGENT_CHARDEV)) && device.get("frontend-open") == Some(&json!(true))
    };
    devices.as_array().into_iter().flatten().any(is_open)
}

/// Returns the result of a readiness probe: a pod whose VM is stopped or paused is not Ready.
fn probe_result(phase: &str) -> CommandResult {
    if phase == "Running" {
        return CommandResult::default();
    }
    CommandResult { code: 1, stderr: format!("the VM is {phase}\n").into_bytes(), ..CommandResult::default() }
}

async fn soft_reboot(vm: &Arc<PodVm>) -> Result<CommandResult, KeeperError> {
    match vm.guest_command("guest-shutdown", json!({ "mode": "reboot" })).await {
        // A guest that shuts down may not answer any more.
        Err(KeeperError::Timeout { command, .. }) if command == "guest-shutdown" => Ok(CommandResult::default()),
        Err(error) => Err(error),
        Ok(_) => Ok(CommandResult::default()),
    }
}

async fn screenshot(vm: &Arc<PodVm>) -> Result<CommandResult, KeeperError> {
    let Some(socket) = vm.screen() else {
        let hint = "it has no screen; set domain.devices.autoattachGraphicsDevice";
        return Err(KeeperError::Unsupported { what: "take a screenshot", hint });
    };
    let path = socket.with_file_name(SCREENSHOT_FILE);
    vm.execute("screendump", json!({ "filename": path, "format": "png" })).await?;
    run_blocking("read the screenshot", move || {
        let failed = |source| KeeperError::File { what: "read", path: path.clone(), source };
        let length = std::fs::metadata(&path).map_err(failed)?.len();
        if length > MAX_SCREENSHOT_BYTES {
            return Err(failed(std::io::ErrorKind::FileTooLarge.into()));
        }
        let image = std::fs::read(&path).map_err(failed)?;
        std::fs::remove_file(&path).map_err(failed)?;
        Ok(CommandResult { stdout: image, ..CommandResult::default() })
    })
    .await?
}

/// Returns the guest's information about itself, bounded.
fn format_guest_info(os: &Value, name: &Value, interfaces: &Value) -> Result<CommandResult, KeeperError> {
    let info = format!("{}\n", json!({ "os": os, "hostname": name.get("host-name"), "interfaces": interfaces }));
    if info.len() > MAX_GUEST_INFO_BYTES {
        let command = "guest-network-get-interfaces".to_owned();
        return Err(KeeperError::MalformedReply { peer: "the guest agent", command, what: "more than 1 MiB" });
    }
    Ok(success(info))
}

async fn guest_info(vm: &Arc<PodVm>) -> Result<CommandResult, KeeperError> {
    let system = vm.guest_command("guest-get-osinfo", Value::Null).await?;
    let name = vm.guest_command("guest-get-host-name", Value::Null).await?;
    let interfaces = vm.guest_command("guest-network-get-interfaces", Value::Null).await?;
    format_guest_info(&system, &name, &interfaces)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_verb_is_distinguished_from_a_program() {
        let verb = |words: &[&str]| {
            let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
            parse_verb(&words).map(|(verb, argument)| format!("{verb}:{argument}"))
        };
        assert_eq!(verb(&["@vm", "pause"]).as_deref(), Some("pause:"));
        assert_eq!(verb(&["@vm"]).as_deref(), Some(":"));
        assert_eq!(verb(&["@vm", "snapshot", "a"]).as_deref(), Some("snapshot:a"));
        assert_eq!(verb(&["@vm", "snapshot", "a", "b"]).as_deref(), Some(":"));
        assert_eq!(verb(&["/bin/vm", "pause"]), None);
        assert_eq!(verb(&[]), None);
        let long = |words: &[&str]| streams_output(&words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>());
        assert!(long(&["@vm", "memory-dump"]) && long(&["@vm", "memory-dump", "elf"]));
        assert!(long(&["@vm", "changes"]));
        assert!(!long(&["@vm", "status"]) && !long(&["memory-dump"]));
    }

    #[test]
    fn verbs_are_known_by_their_earlier_names() {
        let words = ["@vm", "remove-volume", "data"].map(str::to_owned);
        assert_eq!(parse_verb(&words), Some(("rm-volume", "data")));
        let names: Vec<&str> = VERBS.iter().filter_map(|(usage, _)| usage.split(' ').next()).collect();
        for (earlier, now) in EARLIER_NAMES {
            assert!(names.contains(now) && !names.contains(earlier), "{earlier}");
        }
    }

    #[test]
    fn the_agent_is_queried_only_if_the_guest_has_opened_its_port() {
        let devices = |open: bool| json!([{ "label": "monitor", "frontend-open": true }, { "label": "agent", "frontend-open": open }]);
        assert!(is_agent_port_open(&devices(true)) && !is_agent_port_open(&devices(false)));
        assert!(!is_agent_port_open(&Value::Null));
    }

    #[test]
    fn a_probe_succeeds_only_for_a_running_vm() {
        assert_eq!(probe_result("Running"), CommandResult::default());
        for phase in ["Paused", "Stopped", "CrashLoopBackOff", "Starting", "Stopping", "Succeeded"] {
            let reply = probe_result(phase);
            assert_eq!((reply.code, reply.stderr), (1, format!("the VM is {phase}\n").into_bytes()));
        }
    }

    #[test]
    fn guest_information_is_bounded() {
        let reply = format_guest_info(&json!({ "id": "debian" }), &json!({ "host-name": "db" }), &json!([])).unwrap();
        let reply: Value = serde_json::from_slice(&reply.stdout).unwrap();
        assert_eq!((&reply["os"]["id"], &reply["hostname"]), (&json!("debian"), &json!("db")));
        let error =
            format_guest_info(&Value::Null, &Value::Null, &json!("x".repeat(MAX_GUEST_INFO_BYTES))).unwrap_err();
        assert!(error.to_string().contains("more than 1 MiB"), "{error}");
    }
}
