//! Boots the peers that are installed, QEMU's microvm and Firecracker, with the same kernel and the same init, and measures from
//! the start of the process to the mark on the serial console.

use crate::memory::{mappings, overhead_mib};
use crate::undo;
use crate::vm::{PARAMETERS, milliseconds_between, monotonic_ns};
use anyhow::{Context, bail};
use nacelle_hardware::MARK;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use serde_json::json;
use std::ffi::OsString;
use std::io::Read;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

/// The memory of each VM in MiB.
pub const MEMORY_MIB: u32 = 128;

/// Another VMM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peer {
    Qemu,
    Firecracker,
}

impl Peer {
    /// Returns the peers in `PATH`.
    pub fn installed() -> Vec<Peer> {
        let found = |peer: &Peer| find_in_path(peer.program(), std::env::var_os("PATH").unwrap_or_default()).is_some();
        [Peer::Qemu, Peer::Firecracker].into_iter().filter(found).collect()
    }

    /// Returns the name in the figures.
    pub fn name(self) -> &'static str {
        match self {
            Peer::Qemu => "qemu microvm",
            Peer::Firecracker => "firecracker",
        }
    }

    fn program(self) -> &'static str {
        match self {
            Peer::Qemu => "qemu-system-x86_64",
            Peer::Firecracker => "firecracker",
        }
    }

    fn arguments(self, kernel: &Path, initrd: &Path, directory: &Path) -> anyhow::Result<Vec<OsString>> {
        let words = |words: &[&str]| words.iter().map(OsString::from).collect::<Vec<_>>();
        Ok(match self {
            Peer::Qemu => {
                let mut all =
                    words(&["-M", "microvm,x-option-roms=off,acpi=off,pit=off,pic=off,rtc=on,isa-serial=on,accel=kvm"]);
                all.extend(words(&["-cpu", "host", "-smp", "1", "-nodefaults", "-no-user-config", "-no-reboot"]));
                all.extend(words(&["-display", "none", "-serial", "stdio", "-m"]));
                all.extend([format!("{MEMORY_MIB}M").into(), "-append".into(), kernel_parameters("t").into()]);
                all.extend(["-kernel".into(), kernel.into(), "-initrd".into(), initrd.into()]);
                all
            }
            Peer::Firecracker => {
                let file = directory.join("firecracker.json");
                let document = json!({
                    "boot-source": {"kernel_image_path": kernel, "initrd_path": initrd, "boot_args": kernel_parameters("k")},
                    "drives": [],
                    "machine-config": {"vcpu_count": 1, "mem_size_mib": MEMORY_MIB},
                });
                std::fs::write(&file, document.to_string()).context("cannot write Firecracker's configuration")?;
                vec!["--no-api".into(), "--config-file".into(), file.into()]
            }
        })
    }

    /// Boots once; returns the milliseconds from the start of the process to the mark, and the process's resident MiB without the
    /// guest's memory at that time.
    pub fn boot(self, kernel: &Path, initrd: &Path, directory: &Path, limit: Instant) -> anyhow::Result<(f64, f64)> {
        let arguments = self.arguments(kernel, initrd, directory)?;
        let started = monotonic_ns();
        let mut command = Command::new(self.program());
        let spawned = undo::spawn(command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()));
        let mut process = spawned.with_context(|| format!("cannot start {}", self.program()))?;
        let mut console = process.stdout.take().context("the process has no pipe for its console")?;
        let mut output = Vec::new();
        while !output.windows(MARK.len()).any(|window| window == MARK.as_bytes()) {
            let wait = limit.saturating_duration_since(Instant::now());
            let timeout = PollTimeout::try_from(wait).unwrap_or(PollTimeout::MAX);
            let ready = poll(&mut [PollFd::new(console.as_fd(), PollFlags::POLLIN)], timeout)
                .context("cannot wait for the console")?;
            let mut chunk = [0; 4096];
            let count = if ready == 0 { 0 } else { console.read(&mut chunk).context("cannot read the console")? };
            if count == 0 {
                bail!(
                    "{} did not print the mark of init; its console: {}",
                    self.name(),
                    String::from_utf8_lossy(&output)
                );
            }
            output.extend_from_slice(&chunk[..count]);
        }
        let took = milliseconds_between(started, monotonic_ns());
        Ok((took, overhead_mib(&mappings(process.pid())?)))
    }
}

/// Returns the kernel parameters, with the VM's reset method.
fn kernel_parameters(reset: &str) -> String {
    format!("{} reboot={reset}", PARAMETERS.join(" "))
}

fn find_in_path(program: &str, path: OsString) -> Option<PathBuf> {
    std::env::split_paths(&path).map(|directory| directory.join(program)).find(|file| file.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_is_installed_if_its_program_is_in_the_path() {
        let directory = tempfile::tempdir().unwrap();
        let path = std::env::join_paths([Path::new("/nowhere"), directory.path()]).unwrap();
        assert_eq!(find_in_path("firecracker", path.clone()), None);
        std::fs::write(directory.path().join("firecracker"), "").unwrap();
        assert_eq!(find_in_path("firecracker", path), Some(directory.path().join("firecracker")));
    }

    #[test]
    fn peers_boot_the_same_kernel_and_initrd() {
        let directory = tempfile::tempdir().unwrap();
        let (kernel, initrd) = (Path::new("/b/vmlinux"), Path::new("/b/initrd"));
        let qemu = Peer::Qemu.arguments(kernel, initrd, directory.path()).unwrap();
        assert!(qemu.iter().any(|word| word == "/b/vmlinux") && qemu.iter().any(|word| word == "/b/initrd"));
        Peer::Firecracker.arguments(kernel, initrd, directory.path()).unwrap();
        let written = std::fs::read(directory.path().join("firecracker.json")).unwrap();
        let document: serde_json::Value = serde_json::from_slice(&written).unwrap();
        assert_eq!(document["boot-source"]["kernel_image_path"], "/b/vmlinux");
        assert!(document["boot-source"]["boot_args"].as_str().unwrap().contains("quiet"));
    }
}
