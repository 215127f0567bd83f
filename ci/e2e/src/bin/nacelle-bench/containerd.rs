//! Runs the peer containerd (Debian's, with runc) on the same node, with the same registry and CNI configuration.

use crate::cri::RuntimeClient;
use nacelle_e2e::{TestImage, TestNode, census, eventually};
use std::fs;
use std::path::PathBuf;
use std::process::{Child, Stdio};

/// A containerd of our own. Dropping it ends it and everything that it started.
pub struct Containerd {
    process: Child,
    directory: PathBuf,
}

impl Containerd {
    /// Starts containerd on the node and waits until it answers.
    pub fn start(node: &TestNode) -> (Self, RuntimeClient) {
        let directory = node.directory().join("containerd");
        fs::create_dir_all(directory.join("logs")).expect("the node's directory is writable");
        let pause = node
            .registry
            .push(&TestImage::busybox().with_config("Cmd", serde_json::json!(["/bin/sleep", "1000000"])), "pause:1");
        let path_of = |name: &str| directory.join(name).display().to_string();
        let host = node.registry.host();
        let config = format!(
            "version = 2\nroot = {:?}\nstate = {:?}\ndisabled_plugins = [\"io.containerd.snapshotter.v1.zfs\"]\n\
             [grpc]\naddress = {:?}\n[ttrpc]\naddress = {:?}\n\
             [plugins.\"io.containerd.grpc.v1.cri\"]\nsandbox_image = {pause:?}\nrestrict_oom_score_adj = true\n\
             disable_apparmor = true\n\
             [plugins.\"io.containerd.grpc.v1.cri\".cni]\nbin_dir = \"/usr/lib/cni\"\nconf_dir = {:?}\n\
             [plugins.\"io.containerd.grpc.v1.cri\".registry.mirrors.{host:?}]\nendpoint = [\"http://{host}\"]\n",
            path_of("root"),
            path_of("state"),
            path_of("sock"),
            path_of("ttrpc"),
            node.directory().join("cni"),
        );
        fs::write(directory.join("config.toml"), config).expect("the node's directory is writable");
        let log = fs::File::create(directory.join("containerd.out")).expect("the node's directory is writable");
        let process = node
            .netns
            .command("containerd")
            .arg("--config")
            .arg(directory.join("config.toml"))
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("a file can be duplicated"))
            .stderr(log)
            .spawn()
            .expect("containerd is installed");
        let socket = directory.join("sock");
        eventually("containerd answers", || std::os::unix::net::UnixStream::connect(&socket).ok());
        let cri = RuntimeClient::connect(&socket, &directory.join("logs"));
        (Self { process, directory }, cri)
    }
}

impl Drop for Containerd {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.process.kill();
        let _ = self.process.wait();
        for (pid, _) in census::processes(&self.directory) {
            nacelle_e2e::run::run_program("kill", ["-9", &pid.to_string()]);
        }
        for mount in census::mounts(&self.directory).iter().rev() {
            nacelle_e2e::run::run_program("umount", ["--lazy", mount]);
        }
    }
}
