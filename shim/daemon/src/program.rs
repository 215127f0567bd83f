//! Raises the limit on open files, and finds the paths of the binaries.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::LazyLock;

/// The program of pod processes, in the directory of the daemon's.
const POD_PROGRAM: &str = "nacelle-pod";
/// The keeper, which runs the VM of a machine pod, in the same directory.
const KEEPER_PROGRAM: &str = "nacelle-keeper";
/// The workers that decode layers of images, in the same directory.
const UNPACK_PROGRAM: &str = "nacelle-unpack";
/// The agent, the same as in the guests' initramfs, in the same directory.
const AGENT_PROGRAM: &str = "nacelle-agent";

/// The version.
pub const RELEASE: &str = env!("CARGO_PKG_VERSION");
/// The commit from which this program was built, if the build knew it (NACELLE_COMMIT).
pub const COMMIT: Option<&str> = option_env!("NACELLE_COMMIT");

/// Returns the version, and the commit if it is known: "0.2.0 (0123456789ab)".
pub fn version() -> &'static str {
    static VERSION: LazyLock<String> = LazyLock::new(|| match COMMIT {
        Some(commit) => format!("{RELEASE} ({commit})"),
        None => RELEASE.to_owned(),
    });
    &VERSION
}

/// Answers `--help` and `--version` of a program that other programs start. Returns the exit code, or `None` if the only
/// argument is neither.
pub fn answer_usual_flags(program: &str, purpose: &str) -> Option<ExitCode> {
    let mut arguments = std::env::args_os().skip(1);
    let (only, None) = (arguments.next()?, arguments.next()) else { return None };
    let text = match only.to_str()? {
        "-h" | "--help" => {
            format!(
                "{program} {}\n\n{purpose}\nNacelle starts this program; it has no options for people except --help and --version.\n",
                version()
            )
        }
        "-V" | "--version" => format!("{program} {}\n", version()),
        _ => return None,
    };
    // A closed pipe is no failure of this program.
    let _ = std::io::stdout().write_all(text.as_bytes());
    Some(ExitCode::SUCCESS)
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
