//! Raises the limit on open files, and finds the paths of the binaries.

use std::path::PathBuf;

/// The program of pod processes, in the directory of the daemon's.
const POD_PROGRAM: &str = "nacelle-pod";
/// The keeper, which runs the VM of a machine pod, in the same directory.
const KEEPER_PROGRAM: &str = "nacelle-keeper";
/// The workers that decode layers of images, in the same directory.
const UNPACK_PROGRAM: &str = "nacelle-unpack";
/// The agent, the same as in the guests' initramfs, in the same directory.
const AGENT_PROGRAM: &str = "nacelle-agent";

/// The version of this program.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");
/// The commit from which this program was built, if the build knew it.
pub const COMMIT: Option<&str> = option_env!("NACELLE_COMMIT");

/// Returns the version, and the commit from which this program was built if the build knew it.
pub fn version() -> String {
    let commit = COMMIT.map(|commit| format!(" ({commit})")).unwrap_or_default();
    format!("{VERSION}{commit}")
}

/// Raises the soft limit on open files to the hard limit. The usual soft limit of 1024 is for programs that use select(2), and
/// each connection of a pod needs two descriptors.
pub fn raise_file_limit() {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    let result = getrlimit(Resource::RLIMIT_NOFILE)
        .and_then(|(soft, hard)| if soft < hard { setrlimit(Resource::RLIMIT_NOFILE, hard, hard) } else { Ok(()) });
    if let Err(error) = result {
        tracing::warn!("cannot raise the limit on open files: {error}");
    }
}

/// Returns the path of the agent's program, for pods without a guest.
pub fn agent_program() -> std::io::Result<PathBuf> {
    Ok(std::env::current_exe()?.with_file_name(AGENT_PROGRAM))
}

/// Returns the path of the keeper's program.
pub fn keeper_program() -> std::io::Result<PathBuf> {
    Ok(std::env::current_exe()?.with_file_name(KEEPER_PROGRAM))
}

/// Returns the path of the program that decodes layers of images.
pub fn unpack_program() -> std::io::Result<PathBuf> {
    Ok(std::env::current_exe()?.with_file_name(UNPACK_PROGRAM))
}

/// Returns the path of the program of pod processes.
pub fn pod_program() -> std::io::Result<PathBuf> {
    Ok(std::env::current_exe()?.with_file_name(POD_PROGRAM))
}
