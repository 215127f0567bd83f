//! Tests functions of the scripts below `ci`.

use std::io::{BufRead, BufReader, Write};
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
