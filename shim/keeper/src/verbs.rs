//! Implements the verbs of `exec POD -- @vm VERB`, by which users who have only `kubectl exec` control the VM itself.

use crate::added;
use crate::dump;
use crate::error::KeeperError;
use crate::guest_agent::Outcome;
use crate::hold;
use crate::machine::{Machine, State};
use crate::runs::Order;
use crate::snapshots::{self, Snapshot};
use nacelle_base::task::run_blocking;
use serde_json::{Value, json};
use std::sync::Arc;
use tokio::net::UnixStream;
use tokio::sync::oneshot;

/// The name that marks a command line as a verb instead of a program.
const PROGRAM: &str = "@vm";
/// The file of a screenshot while it is taken, in the directory of QEMU's sockets.
const PICTURE: &str = "screen.png";
/// The maximum size of a screenshot in bytes.
const MAX_PICTURE: u64 = 64 << 20;
/// The maximum bytes of the guest's information about itself.
const MAX_INFO: usize = 1 << 20;

/// The verbs and their help texts.
const VERBS: &[(&str, &str)] = &[
    ("status", "how the machine is, as JSON"),
    ("running", "whether it runs, for a probe: nothing, or why not, and exit code 1"),
    ("pause", "the processors stand still"),
    ("unpause", "they go on"),
    ("start", "one that is off, or on its way there, runs"),
    ("stop", "the power button, and it stays off"),
    ("restart", "the power button, and it runs again"),
    ("power-off", "its power is taken; what follows is as after any end"),
    ("reset", "as the button"),
    ("soft-reboot", "the guest agent is asked to restart the system"),
    ("power-button", "as the button: the system ends, if it listens"),
    ("screenshot", "a picture of the screen, as PNG"),
    ("memory-dump [FORMAT]", "the guest's memory, as elf or kdump-zlib, on standard output"),
    ("snapshot NAME", "disks, memory and devices are kept under this name"),
    ("restore NAME", "all is as it was then"),
    ("snapshots", "those there are, as JSON"),
    ("delete-snapshot NAME", "it is forgotten"),
    ("volumes", "the disks that were added, as JSON"),
    ("add-volume NAME=SIZE", "another disk, empty"),
    ("remove-volume NAME", "one of these, with all that is on it"),
    ("hold NAME", "as snapshot; then it stands still until nobody reads the output, and the snapshot goes"),
    ("credentials JSON", "keys and passwords of users, which the guest agent gives them; the daemon says it"),
    ("guest-ping", "whether the guest agent answers"),
    ("guest-info", "what the guest agent says of the system, as JSON"),
    ("help", "this"),
];

/// Returns the verb of a command line and its argument, if it is one; the empty verb if it is unknown or missing.
pub fn of(args: &[String]) -> Option<(&str, &str)> {
    let (program, rest) = args.split_first()?;
    (program == PROGRAM).then_some(match rest {
        [verb] => (verb.as_str(), ""),
        [verb, what] => (verb.as_str(), what.as_str()),
        _ => ("", ""),
    })
}

/// Returns whether the command is a verb whose answer is unbounded, and is sent to a stream while the verb runs.
pub fn has_long_answer(args: &[String]) -> bool {
    of(args).is_some_and(|(verb, _)| ["memory-dump", "hold"].contains(&verb))
}

fn help() -> String {
    VERBS.iter().map(|(verb, what)| format!("{verb:<23}{what}\n")).collect()
}

fn usage() -> Outcome {
    Outcome { code: 2, stdout: Vec::new(), stderr: format!("{PROGRAM} VERB:\n{}", help()).into_bytes() }
}

async fn all_snapshots(machine: &Arc<Machine>) -> Result<Outcome, KeeperError> {
    let one = |snapshot: Snapshot| json!({ "name": snapshot.name, "taken": snapshot.taken, "bytes": snapshot.bytes });
    let all: Vec<Value> = snapshots::list(machine).await?.into_iter().map(one).collect();
    Ok(said(format!("{}\n", Value::Array(all))))
}

fn said(text: String) -> Outcome {
    Outcome { stdout: text.into_bytes(), ..Outcome::default() }
}

/// Runs a verb. A long answer goes to the stream from `reader`.
pub async fn run(
    machine: &Arc<Machine>,
    (verb, what): (&str, &str),
    reader: oneshot::Receiver<UnixStream>,
) -> Result<Outcome, KeeperError> {
    let qemu = async |command: &str| machine.ask(command, Value::Null).await.map(|_| Outcome::default());
    match verb {
        "snapshot" => snapshots::save(machine, what).await.map(|()| Outcome::default()),
        "restore" => snapshots::load(machine, what).await.map(|()| Outcome::default()),
        "delete-snapshot" => snapshots::delete(machine, what).await.map(|()| Outcome::default()),
        "add-volume" => whole(machine, what, added::add).await,
        "remove-volume" => whole(machine, what, added::remove).await,
        "hold" => hold::hold(machine, what, reader).await.map(|()| Outcome::default()),
        "credentials" => {
            let live = machine.live()?;
            live.given.give(&live.agent, what).await
        }
        "memory-dump" => dump::dump(machine, what, reader).await.map(|()| Outcome::default()),
        _ if !what.is_empty() => Ok(usage()),
        "snapshots" => all_snapshots(machine).await,
        "volumes" => Ok(said(format!("{}\n", added::list(machine).await))),
        "status" => status(machine).await,
        "running" => Ok(running(phase(machine).await?.0)),
        "pause" => qemu("stop").await,
        "unpause" => qemu("cont").await,
        "start" => {
            machine.switch_on();
            Ok(Outcome::default())
        }
        "stop" => switch(machine, Order::Off),
        "restart" => switch(machine, Order::Again),
        "power-off" => machine.power_off().map(|()| Outcome::default()),
        "reset" => qemu("system_reset").await,
        "power-button" => qemu("system_powerdown").await,
        "soft-reboot" => soft_reboot(machine).await,
        "screenshot" => screenshot(machine).await,
        "guest-ping" => machine.ask_guest("guest-ping", Value::Null).await.map(|_| Outcome::default()),
        "guest-info" => guest_info(machine).await,
        "help" => Ok(said(help())),
        _ => Ok(usage()),
    }
}

/// Runs a verb to its end even if the caller is gone.
async fn whole<F: Future<Output = Result<(), KeeperError>> + Send + 'static>(
    machine: &Arc<Machine>,
    what: &str,
    verb: impl FnOnce(Arc<Machine>, String) -> F,
) -> Result<Outcome, KeeperError> {
    let doing = verb(Arc::clone(machine), what.to_owned());
    let done = tokio::spawn(doing).await;
    let given_up = |error| KeeperError::Resources { what: "a task", source: std::io::Error::other(error) };
    done.map_err(given_up)?.map(|()| Outcome::default())
}

/// Sets the target state; a running VM is stopped by its power button. Only a VM that outlives its pod can be stopped.
fn switch(machine: &Arc<Machine>, order: Order) -> Result<Outcome, KeeperError> {
    if machine.document.strategy.is_none() && order == Order::Off {
        let hint = "its end is its container's: stop that, or name the machine (vm.nacelle.dev/name)";
        return Err(KeeperError::Unsupported { what: "be off", hint });
    }
    machine.order(order);
    machine.press();
    Ok(Outcome::default())
}

/// Returns the state in KubeVirt's terms and, if the VM is on, in QEMU's.
async fn phase(machine: &Machine) -> Result<(&'static str, Option<Value>), KeeperError> {
    match machine.state() {
        State::Off => return Ok(("Stopped", None)),
        State::Crashing => return Ok(("CrashLoopBackOff", None)),
        State::Created | State::Starting => return Ok(("Starting", None)),
        State::Ended(_) => return Ok(("Succeeded", None)),
        State::Running => {}
    }
    let told = match machine.ask("query-status", Value::Null).await {
        // The VM ended during the request.
        Err(KeeperError::Gone { .. }) => return Ok(("Stopping", None)),
        told => told?,
    };
    let qemu = told.get("status").cloned().unwrap_or_default();
    let phase = match qemu.as_str() {
        Some("paused" | "prelaunch" | "suspended") => "Paused",
        _ => "Running",
    };
    Ok((phase, Some(qemu)))
}

async fn status(machine: &Machine) -> Result<Outcome, KeeperError> {
    let mut status = match phase(machine).await? {
        (phase, None) => json!({ "phase": phase, "agentConnected": false }),
        (phase, Some(qemu)) => {
            let accelerated = machine.ask("query-kvm", Value::Null).await?;
            json!({
                "phase": phase,
                "qemu": qemu,
                "agentConnected": machine.ask_guest("guest-ping", Value::Null).await.is_ok(),
                "softwareEmulation": accelerated.get("enabled") != Some(&json!(true)),
            })
        }
    };
    if let Some(said) = machine.live().ok().and_then(|live| live.given.said()) {
        status["credentials"] = json!(said);
    }
    Ok(said(format!("{status}\n")))
}

/// Returns the result of a readiness probe: a pod whose VM is stopped or paused is not Ready.
fn running(phase: &str) -> Outcome {
    if phase == "Running" {
        return Outcome::default();
    }
    Outcome { code: 1, stderr: format!("the machine is {phase}\n").into_bytes(), ..Outcome::default() }
}

async fn soft_reboot(machine: &Arc<Machine>) -> Result<Outcome, KeeperError> {
    match machine.ask_guest("guest-shutdown", json!({ "mode": "reboot" })).await {
        // A guest that shuts down may not answer any more.
        Err(KeeperError::TooSlow { command, .. }) if command == "guest-shutdown" => Ok(Outcome::default()),
        Err(error) => Err(error),
        Ok(_) => Ok(Outcome::default()),
    }
}

async fn screenshot(machine: &Arc<Machine>) -> Result<Outcome, KeeperError> {
    let Some(socket) = machine.screen() else {
        let hint = "it has no screen: say domain.devices.autoattachGraphicsDevice";
        return Err(KeeperError::Unsupported { what: "show its screen", hint });
    };
    let path = socket.with_file_name(PICTURE);
    machine.ask("screendump", json!({ "filename": path, "format": "png" })).await?;
    run_blocking("read the screenshot", move || {
        let failed = |source| KeeperError::File { what: "read", path: path.clone(), source };
        let length = std::fs::metadata(&path).map_err(failed)?.len();
        if length > MAX_PICTURE {
            return Err(failed(std::io::ErrorKind::FileTooLarge.into()));
        }
        let picture = std::fs::read(&path).map_err(failed)?;
        std::fs::remove_file(&path).map_err(failed)?;
        Ok(Outcome { stdout: picture, ..Outcome::default() })
    })
    .await?
}

/// Returns the guest's information about itself, bounded.
fn info(os: &Value, name: &Value, interfaces: &Value) -> Result<Outcome, KeeperError> {
    let info = format!("{}\n", json!({ "os": os, "hostname": name.get("host-name"), "interfaces": interfaces }));
    if info.len() > MAX_INFO {
        let command = "guest-network-get-interfaces".to_owned();
        return Err(KeeperError::Garbled { whom: "the guest agent", command, what: "more than 1 MiB" });
    }
    Ok(said(info))
}

async fn guest_info(machine: &Arc<Machine>) -> Result<Outcome, KeeperError> {
    let system = machine.ask_guest("guest-get-osinfo", Value::Null).await?;
    let name = machine.ask_guest("guest-get-host-name", Value::Null).await?;
    let interfaces = machine.ask_guest("guest-network-get-interfaces", Value::Null).await?;
    info(&system, &name, &interfaces)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_verb_is_told_from_a_program() {
        let verb = |words: &[&str]| {
            let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
            of(&words).map(|(verb, what)| format!("{verb}:{what}"))
        };
        assert_eq!(verb(&["@vm", "pause"]).as_deref(), Some("pause:"));
        assert_eq!(verb(&["@vm"]).as_deref(), Some(":"));
        assert_eq!(verb(&["@vm", "snapshot", "a"]).as_deref(), Some("snapshot:a"));
        assert_eq!(verb(&["@vm", "snapshot", "a", "b"]).as_deref(), Some(":"));
        assert_eq!(verb(&["/bin/vm", "pause"]), None);
        assert_eq!(verb(&[]), None);
        let long = |words: &[&str]| has_long_answer(&words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>());
        assert!(long(&["@vm", "memory-dump"]) && long(&["@vm", "memory-dump", "elf"]));
        assert!(!long(&["@vm", "status"]) && !long(&["memory-dump"]));
    }

    #[test]
    fn a_probe_is_told_whether_it_runs() {
        assert_eq!(running("Running"), Outcome::default());
        for phase in ["Paused", "Stopped", "CrashLoopBackOff", "Starting", "Stopping", "Succeeded"] {
            let told = running(phase);
            assert_eq!((told.code, told.stderr), (1, format!("the machine is {phase}\n").into_bytes()));
        }
    }

    #[test]
    fn what_a_guest_says_of_itself_is_bounded() {
        let told = info(&json!({ "id": "debian" }), &json!({ "host-name": "db" }), &json!([])).unwrap();
        let told: Value = serde_json::from_slice(&told.stdout).unwrap();
        assert_eq!((&told["os"]["id"], &told["hostname"]), (&json!("debian"), &json!("db")));
        let error = info(&Value::Null, &Value::Null, &json!("x".repeat(MAX_INFO))).unwrap_err();
        assert!(error.to_string().contains("more than 1 MiB"), "{error}");
    }
}
