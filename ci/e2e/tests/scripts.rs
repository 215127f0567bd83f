//! Tests functions of the scripts below `ci`.

use nacelle_e2e::eventually;
use nacelle_e2e::run::run_program;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// A run of `ci/kubelet --kubeadm`, as far as the directories are concerned: it mounts over them in a mount namespace of its own.
struct Run(Child);

impl Run {
    fn start(directory: &Path) -> Run {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../kubelet.d/directories.sh");
        let steps = r#"set -e
            source "$1"
            claim_directories "$2/lock" "$2/claimed"
            mount -t tmpfs run "$2/claimed"
            touch "$2/claimed/mine"
            while read -r order; do
                case $order in
                look) [ -e "$2/claimed/mine" ] && echo mounted || echo lost ;;
                end) umount "$2/claimed"; release_directories "$2/claimed"; echo ended; exit ;;
                esac
            done"#;
        let mut command = Command::new("unshare");
        command.args(["--mount", "--propagation", "private", "bash", "-c", steps, "-", script]).arg(directory);
        Run(command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("unshare is installed"))
    }

    fn order(&mut self, order: &str) -> String {
        writeln!(self.0.stdin.as_mut().expect("a pipe"), "{order}").expect("it reads");
        let mut line = String::new();
        BufReader::new(self.0.stdout.as_mut().expect("a pipe")).read_line(&mut line).expect("it answers");
        line.trim_end().to_owned()
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_run_that_ends_does_not_take_the_directories_of_others() {
    let directory = tempfile::tempdir().expect("the temporary directory is writable");
    let (mut first, mut second) = (Run::start(directory.path()), Run::start(directory.path()));
    assert_eq!([first.order("look"), second.order("look")], ["mounted", "mounted"]);
    assert_eq!(first.order("end"), "ended");
    assert_eq!(second.order("look"), "mounted");
    assert!(directory.path().join("claimed").exists());
    assert_eq!(second.order("end"), "ended");
    assert!(!directory.path().join("claimed").exists(), "the last run removes them");
}

/// A run in namespaces of its own that says when it runs, and cleans up at SIGTERM.
const ALONE: &str = r#"set -euo pipefail
    source "$1"
    run_alone bash -c 'trap "echo cleaned up; exit 3" TERM; echo $$; while :; do sleep 0.1; done'"#;

#[test]
fn a_run_cleans_up_at_sigterm() {
    let cache = tempfile::tempdir().expect("the temporary directory is writable");
    let library = concat!(env!("CARGO_MANIFEST_DIR"), "/../lib.sh");
    let mut command = Command::new("bash");
    command.args(["-c", ALONE, "-", library]).env("NACELLE_CACHE", cache.path()).stdout(Stdio::piped());
    let mut run = command.spawn().expect("bash is installed");
    let mut lines = BufReader::new(run.stdout.take().expect("a pipe")).lines();
    let first = lines.next().expect("it runs").expect("text");
    assert_eq!(first, "1", "it has process ids of its own");
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(run.id().cast_signed()), nix::sys::signal::Signal::SIGTERM)
        .expect("the run is ours");
    let status = eventually("the run ends", || run.try_wait().expect("a child"));
    assert_eq!((status.code(), status.signal()), (Some(3), None), "the exit code is that of the command");
    let rest: Vec<String> = lines.map_while(Result::ok).collect();
    assert_eq!(rest, ["cleaned up"], "the output ends, so nothing of the run is left");
}

#[test]
fn programs_that_are_cut_leave_no_process_and_are_no_success() {
    let directory = tempfile::tempdir().expect("the temporary directory is writable");
    let program = directory.path().join("program");
    let sleeper = format!("sleep 70{}", std::process::id());
    let left = "/var/tmp/nacelle-e2e-1-0-script";
    let script = format!("#!/bin/sh\ntrap 'exit 0' TERM\nmkdir {left}\n{sleeper} &\nwait\n");
    std::fs::write(&program, script).expect("the temporary directory is writable");
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).expect("the file is ours");
    let line = |name: &str| format!("/\t{name}\t{}", program.display());
    let list = [line("first"), line("second")].join("\n");
    let mut run = Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../run-tests"));
    let ended = run.arg(list).env("RUN_LIMIT", "1").output().expect("bash is installed");
    let output = String::from_utf8_lossy(&ended.stdout);
    assert_eq!(ended.status.code(), Some(124), "{output}");
    assert!(output.contains("Running first") && !output.contains("Running second"), "{output}");
    assert!(output.contains("the rest was not run: "), "{output}");
    assert_ne!(run_program("pgrep", ["-fx", &sleeper]).code, 0, "its processes have ended");
    assert!(!std::path::Path::new(left).exists(), "its directories are gone");
}
