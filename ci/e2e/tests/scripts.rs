//! Tests functions of the scripts below `ci`.

use nacelle_e2e::eventually;
use nacelle_e2e::run::{run, run_program};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
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

/// The tarball's `install.sh` with files of one line in the place of programs, and a directory as the node's root.
struct Tarball {
    contents: PathBuf,
    root: PathBuf,
    _directory: tempfile::TempDir,
}

impl Tarball {
    fn new() -> Tarball {
        let directory = tempfile::tempdir().expect("the temporary directory is writable");
        let (contents, root) = (directory.path().join("tarball"), directory.path().join("root"));
        let pieces = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../package.d"));
        let tarball = Tarball { contents, root, _directory: directory };
        let read = |name: &str| std::fs::read_to_string(pieces.join(name)).expect("the tree has it");
        for (path, text) in [
            ("install.sh", read("install.sh")),
            ("VERSION", "1.0.0\n".to_owned()),
            ("bin/nacelle", "old\n".to_owned()),
            ("lib/nacelle/vmlinux", "kernel\n".to_owned()),
            ("share/doc/nacelle/examples/crictl.yaml", "# @PREFIX@\n".to_owned()),
            ("share/doc/nacelle/dropped.md", "old\n".to_owned()),
            ("templates/nacelle.service", read("nacelle.service").replace("/usr/", "@PREFIX@/")),
            ("templates/nacelle.socket", read("nacelle.socket")),
            ("templates/config.toml", "kernel = \"@PREFIX@/lib/nacelle/vmlinux\"\n".to_owned()),
        ] {
            tarball.write(path, &text);
        }
        std::os::unix::fs::symlink("examples", tarball.contents.join("share/doc/nacelle/link"))
            .expect("it is writable");
        std::fs::create_dir(&tarball.root).expect("the temporary directory is writable");
        tarball
    }

    fn write(&self, path: &str, text: &str) {
        let file = self.contents.join(path);
        std::fs::create_dir_all(file.parent().expect("a directory")).expect("the temporary directory is writable");
        std::fs::write(&file, text).expect("the temporary directory is writable");
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o755)).expect("the file is ours");
    }

    /// Runs `install.sh` and returns whether it succeeded.
    fn run(&self, arguments: &[&str]) -> bool {
        let mut script = Command::new("sh");
        script.arg(self.contents.join("install.sh")).arg("--root").arg(&self.root).args(arguments);
        script.output().expect("a shell is installed").status.success()
    }

    fn installed(&self, path: &str) -> String {
        std::fs::read_to_string(self.root.join(path)).unwrap_or_default()
    }

    /// Returns the paths of all files and links below the root, in order.
    fn files(&self) -> Vec<String> {
        let found = run_program("find", [&*self.root.to_string_lossy(), "!", "-type", "d", "-printf", "%P\n"]).ok();
        let mut files: Vec<String> = found.lines().map(str::to_owned).collect();
        files.sort();
        files
    }
}

#[test]
fn the_tarball_is_installed_below_a_prefix_upgraded_and_removed() {
    let tarball = Tarball::new();
    let prefix = ["--prefix", "/var/opt/nacelle"];
    assert!(tarball.run(&prefix));
    let unit = tarball.installed("etc/systemd/system/nacelle.service");
    assert!(unit.contains("\nExecStart=/var/opt/nacelle/bin/nacelle serve\n") && !unit.contains("@PREFIX@"), "{unit}");
    assert_eq!(tarball.installed("etc/nacelle/config.toml"), "kernel = \"/var/opt/nacelle/lib/nacelle/vmlinux\"\n");
    assert_eq!(tarball.installed("var/opt/nacelle/share/doc/nacelle/examples/crictl.yaml"), "# /var/opt/nacelle\n");
    let first = tarball.files();
    assert!(first.iter().all(|path| path.starts_with("var/opt/nacelle/") || path.starts_with("etc/")), "{first:?}");

    // An upgrade replaces programs, removes what the new version does not have, and keeps the configuration.
    let changed = tarball.root.join("etc/nacelle/config.toml");
    std::fs::write(&changed, "mine\n").expect("the file is ours");
    let program = tarball.root.join("var/opt/nacelle/bin/nacelle");
    let running = std::fs::File::open(&program).expect("it is installed");
    tarball.write("bin/nacelle", "new\n");
    std::fs::remove_file(tarball.contents.join("share/doc/nacelle/dropped.md")).expect("the file is ours");
    assert!(tarball.run(&prefix));
    assert_eq!(tarball.installed("var/opt/nacelle/bin/nacelle"), "new\n");
    assert_eq!(std::io::read_to_string(running).expect("text"), "old\n", "a program that runs is not overwritten");
    assert_eq!(tarball.installed("etc/nacelle/config.toml"), "mine\n");
    let dropped = "var/opt/nacelle/share/doc/nacelle/dropped.md";
    assert_eq!(tarball.files(), first.into_iter().filter(|path| path != dropped).collect::<Vec<_>>());

    // Nothing of a running pod is removed. Without pods a removal releases the saved VMs, and a purge takes all.
    let [pod, templates, cgroup, disks] = [
        "run/nacelle/pods/0123456789abc",
        "run/nacelle/templates/key",
        "sys/fs/cgroup/memory/nacelle/templates",
        "var/lib/nacelle/disks",
    ]
    .map(|path| tarball.root.join(path));
    for directory in [&pod, &templates, &cgroup, &disks] {
        std::fs::create_dir_all(directory).expect("the temporary directory is writable");
    }
    let lock = tarball.root.join("run/.netns.nacelle-lock");
    std::fs::write(&lock, "").expect("the directory is ours");
    let exist = || [&templates, &cgroup, &disks].map(|path| path.exists());
    assert!(tarball.run(&[&prefix[..], &["--uninstall", "--purge"]].concat()));
    let kept = ["etc/nacelle/config.toml", "run/.netns.nacelle-lock"].map(str::to_owned).to_vec();
    assert_eq!((tarball.files(), exist()), (kept, [true; 3]));
    std::fs::remove_dir(&pod).expect("the directory is ours");
    // The templates are a file system of their own, which may still be in use.
    let mounted = templates.parent().expect("it has one");
    run_program("mount", ["-t", "tmpfs", "templates", &*mounted.to_string_lossy()]).ok();
    let in_use = std::fs::File::create(mounted.join("memory")).expect("an empty file system");
    assert!(tarball.run(&[&prefix[..], &["--uninstall"]].concat()));
    drop(in_use);
    assert_eq!((tarball.files(), exist()), (vec!["etc/nacelle/config.toml".to_owned()], [false, false, true]));
    assert!(tarball.run(&[&prefix[..], &["--uninstall", "--purge"]].concat()));
    assert_eq!(tarball.files(), Vec::<String>::new());
    for directory in ["run/nacelle", "sys/fs/cgroup/memory/nacelle", "var/lib/nacelle"] {
        assert!(!tarball.root.join(directory).exists(), "{directory}");
    }

    // What would not be a prefix, in a unit and in a sed expression.
    for prefix in ["/", "opt/nacelle", "/opt/a b", "/opt/../etc", "/opt/", "/opt//n", "/opt/a|b", "/opt/a&b"] {
        assert!(!tarball.run(&["--prefix", prefix]), "{prefix}");
    }
    assert_eq!(tarball.files(), Vec::<String>::new());
}

/// The installer's container of a DaemonSet on a node with systemd: `kubectl` and `nsenter` are scripts that write down their
/// arguments, and the node's runtime is the content of a file.
struct Installer {
    tarball: Tarball,
    tools: PathBuf,
}

impl Installer {
    fn new(runtime: &str) -> Installer {
        let tarball = Tarball::new();
        let tools = tarball.contents.with_file_name("tools");
        std::fs::create_dir_all(tarball.root.join("run/systemd/system")).expect("the temporary directory is writable");
        let installer = Installer { tarball, tools };
        installer.set_runtime(runtime);
        for (name, text) in [
            ("kubectl", "case $1 in get) cat \"$0.runtime\" ;; *) echo \"$*\" >>\"$0.calls\" ;; esac"),
            ("nsenter", "echo \"$*\" >>\"$0.calls\""),
        ] {
            let file = installer.tools.join(name);
            std::fs::write(&file, format!("#!/bin/sh\n{text}\n")).expect("the temporary directory is writable");
            std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o755)).expect("the file is ours");
        }
        installer
    }

    fn set_runtime(&self, runtime: &str) {
        std::fs::create_dir_all(&self.tools).expect("the temporary directory is writable");
        // In one step: the container may read it.
        let draft = self.tools.join("draft");
        std::fs::write(&draft, runtime).expect("the temporary directory is writable");
        std::fs::rename(&draft, self.tools.join("kubectl.runtime")).expect("the directory is ours");
    }

    fn start(&self, action: &str) -> Run {
        let mut command = Command::new("sh");
        command.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/../package.d/installer.sh")).arg(action);
        let path = format!("{}:{}", self.tools.display(), std::env::var("PATH").unwrap_or_default());
        command.env("PATH", path).env("NODE_NAME", "node-1").env("NACELLE_INTERVAL", "0.05");
        command.env("NACELLE_ROOT", &self.tarball.root).env("NACELLE_CONTENTS", &self.tarball.contents);
        Run(command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("a shell is installed"))
    }

    fn calls(&self, tool: &str) -> Vec<String> {
        let text = std::fs::read_to_string(self.tools.join(format!("{tool}.calls"))).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    /// Waits until the node has been labelled with this as the last change.
    fn wait_for_label(&self, change: &str) {
        let expected = format!("label --overwrite node node-1 {change}");
        eventually(change, || (self.calls("kubectl").last() == Some(&expected)).then_some(()));
    }
}

#[test]
fn the_installer_labels_nodes_and_removes_only_what_kubelet_does_not_use() {
    let installer = Installer::new("containerd://2.1.0");
    let mut container = installer.start("install");
    installer.wait_for_label("nacelle.dev/runtime-");
    assert_eq!(installer.calls("kubectl")[0], "label --overwrite node node-1 nacelle.dev/installed=1.0.0");
    assert_eq!(installer.tarball.installed("opt/nacelle/bin/nacelle"), "old\n");
    let started = installer.calls("nsenter");
    let restart = "-t 1 -m -u -i -n -p -- systemctl restart nacelle.service";
    assert_eq!(started.last().expect("calls"), restart);
    // Kubelet is moved to Nacelle while the container runs.
    installer.set_runtime("nacelle://0.1.0");
    installer.wait_for_label("nacelle.dev/runtime=true");
    nix::sys::signal::kill(
        nix::unistd::Pid::from_raw(container.0.id().cast_signed()),
        nix::sys::signal::Signal::SIGTERM,
    )
    .expect("the container is ours");
    assert!(eventually("the container ends", || container.0.try_wait().expect("a child")).success());

    // The same version again restarts nothing.
    let container = installer.start("install");
    eventually("the daemon is started", || (installer.calls("nsenter").len() == 2 * started.len()).then_some(()));
    assert!(installer.calls("nsenter")[started.len()..].iter().all(|call| !call.contains("restart")));
    drop(container);

    // A container that ended between the installation and the restart has not started the daemon of the new version.
    let nsenter = installer.tools.join("nsenter");
    let works = std::fs::read(&nsenter).expect("the script is there");
    std::fs::write(installer.tarball.contents.join("VERSION"), "1.0.1 abc\n").expect("the directory is ours");
    std::fs::write(&nsenter, "#!/bin/sh\ncase $* in *restart*) exit 1 ;; esac\n").expect("the script is ours");
    let mut interrupted = installer.start("install");
    assert!(!eventually("the container fails", || interrupted.0.try_wait().expect("a child")).success());
    assert_eq!(installer.tarball.installed("opt/nacelle/VERSION"), "1.0.1 abc\n");
    std::fs::write(&nsenter, works).expect("the script is ours");
    let container = installer.start("install");
    eventually("the daemon is restarted", || (installer.calls("nsenter").last()? == restart).then_some(()));
    drop(container);

    let mut refused = installer.start("uninstall");
    assert!(!eventually("the container fails", || refused.0.try_wait().expect("a child")).success());
    assert_eq!(installer.tarball.installed("opt/nacelle/bin/nacelle"), "old\n");
    installer.set_runtime("containerd://2.1.0");
    let _container = installer.start("uninstall");
    installer.wait_for_label("nacelle.dev/runtime- nacelle.dev/installed-");
    assert_eq!(installer.tarball.files(), ["etc/nacelle/config.toml"]);
    assert!(installer.calls("nsenter").iter().any(|call| call.contains("disable --quiet --now")));
}

#[test]
fn an_initramfs_has_a_static_init() {
    let cache = tempfile::tempdir().expect("the temporary directory is writable");
    let build = |binary: &Path| {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../guest/build");
        let mut command = Command::new(script);
        run(command.arg("initramfs").arg(binary).env("NACELLE_CACHE", cache.path()))
    };
    let refused = build(&std::env::current_exe().expect("it runs"));
    assert!(refused.code == 1 && refused.stderr.contains("is linked dynamically"), "{refused:?}");
    let refused = build(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml")));
    assert!(refused.code == 1 && refused.stderr.contains("is no ELF file"), "{refused:?}");
    // A failed build leaves nothing that the next one takes for an archive.
    assert_eq!(std::fs::read_dir(cache.path().join("guest")).expect("it was made").count(), 0);
    let archive = build(Path::new("/bin/busybox")).ok();
    assert!(std::fs::read(archive.trim()).expect("it was written").starts_with(b"070701"));
}
