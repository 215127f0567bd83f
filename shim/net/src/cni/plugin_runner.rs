//! Runs one plugin once: finds it, writes its input, reads its output within limits, and parses its error. A plugin that exceeds
//! a limit is killed with all its children. Everything is async; dropping the future kills the plugin.

use super::CniError;
use nacelle_base::json;
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use serde::Deserialize;
use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::process::{Child, Command};

/// The maximum size of the standard output in bytes; more than any result needs.
const MAX_OUTPUT: u64 = 1 << 20;
/// The bytes of standard error that are kept for the log; the rest is read and dropped.
const MAX_LOG: u64 = 16 << 10;

/// How long to wait for a killed plugin; it ends at once unless the kernel blocks it.
const KILL_WAIT: Duration = Duration::from_secs(5);

/// A command of the CNI protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CniCommand {
    Add,
    Del,
    Check,
    Status,
    Gc,
    Version,
}

impl CniCommand {
    fn as_str(self) -> &'static str {
        match self {
            CniCommand::Add => "ADD",
            CniCommand::Del => "DEL",
            CniCommand::Check => "CHECK",
            CniCommand::Status => "STATUS",
            CniCommand::Gc => "GC",
            CniCommand::Version => "VERSION",
        }
    }
}

/// The plugin directories and the deadline of one plugin.
#[derive(Clone, Debug)]
pub(crate) struct PluginRunner {
    pub bin_dirs: Vec<PathBuf>,
    pub deadline: Duration,
}

/// The error object of the CNI protocol.
#[derive(Deserialize)]
struct WireError {
    code: u64,
    msg: Option<String>,
    details: Option<String>,
}

impl PluginRunner {
    /// Returns the path of the plugin in the first directory that has it.
    pub async fn find(&self, plugin: &str) -> Result<PathBuf, CniError> {
        for dir in &self.bin_dirs {
            let path = dir.join(plugin);
            if tokio::fs::metadata(&path).await.is_ok_and(|found| found.is_file()) {
                return Ok(path);
            }
        }
        Err(CniError::NoPlugin { plugin: plugin.to_owned(), dirs: self.bin_dirs.clone() })
    }

    /// Runs the plugin with `input` as its standard input, and returns its output. The plugin and its children hold `input` open
    /// for their lifetime.
    pub async fn run(
        &self,
        plugin: &str,
        command: CniCommand,
        environment: &[(&'static str, OsString)],
        input: File,
    ) -> Result<Vec<u8>, CniError> {
        let path = self.find(plugin).await?;
        let name = command.as_str();
        let failed = |source| CniError::Exec { plugin: plugin.to_owned(), command: name, source };
        let search = std::env::join_paths(&self.bin_dirs)
            .map_err(|error| failed(io::Error::new(io::ErrorKind::InvalidInput, error)))?;
        let mut child = PluginProcess::spawn(&path, name, &search, environment, input).map_err(failed)?;
        let ran = tokio::time::timeout(self.deadline, child.read_output()).await;
        let Ok(ran) = ran else {
            child.kill().await;
            let seconds = self.deadline.as_secs();
            return Err(CniError::Timeout { plugin: plugin.to_owned(), command: name, seconds });
        };
        let Some(PluginOutput { output, log, status }) = ran.map_err(failed)? else {
            child.kill().await;
            return Err(CniError::TooMuchOutput { plugin: plugin.to_owned(), command: name, limit: MAX_OUTPUT });
        };
        let log = to_one_line(&log);
        if status.success() {
            if !log.is_empty() {
                tracing::debug!(plugin, command = name, log, "CNI plugin wrote to its standard error");
            }
            return Ok(output);
        }
        Err(match json::read::<WireError>(&output) {
            Ok(WireError { code, msg, details }) => CniError::Plugin {
                plugin: plugin.to_owned(),
                command: name,
                code,
                message: [msg, details].into_iter().flatten().filter(|text| !text.is_empty()).fold(
                    String::new(),
                    |all, text| {
                        let text = to_one_line(text.as_bytes());
                        if all.is_empty() { text } else { format!("{all}; {text}") }
                    },
                ),
            },
            Err(_not_of_that_form) => CniError::Failed {
                plugin: plugin.to_owned(),
                command: name,
                status: status.to_string(),
                output: match (log, to_one_line(&output)) {
                    (log, _) if !log.is_empty() => log,
                    (_, output) if !output.is_empty() => output,
                    _ => "it printed nothing".to_owned(),
                },
            },
        })
    }
}

struct PluginOutput {
    output: Vec<u8>,
    log: Vec<u8>,
    status: ExitStatus,
}

/// A plugin and its children: one process group, killed if this is dropped before the plugin was reaped.
struct PluginProcess {
    child: Child,
    /// Set until the plugin has been reaped: its PID cannot be reused before.
    group: Option<Pid>,
}

impl PluginProcess {
    fn spawn(
        path: &Path,
        command: &str,
        search: &OsString,
        more: &[(&'static str, OsString)],
        input: File,
    ) -> io::Result<PluginProcess> {
        let mut process = Command::new(path);
        process.env("CNI_COMMAND", command).env("CNI_PATH", search);
        for name in ["CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME", "CNI_ARGS"] {
            process.env_remove(name);
        }
        process.envs(more.iter().map(|(name, value)| (name, value)));
        process.stdin(input).stdout(Stdio::piped()).stderr(Stdio::piped());
        process.process_group(0).kill_on_drop(true).current_dir("/");
        let child = process.spawn()?;
        let group = child.id().and_then(|id| i32::try_from(id).ok()).map(Pid::from_raw);
        Ok(PluginProcess { child, group })
    }

    /// Reads the output; `None` if it exceeds the limit. Waits for the end of both outputs before it waits for the plugin, so
    /// that the deadline also covers an orphaned child that holds them.
    async fn read_output(&mut self) -> io::Result<Option<PluginOutput>> {
        let (stdout, stderr) = (self.child.stdout.take(), self.child.stderr.take());
        let read = async {
            let output = read_up_to(stdout, MAX_OUTPUT + 1).await?;
            // Output beyond the limit ends the run: the pipe is closed, and the group is killed.
            if output.len() as u64 > MAX_OUTPUT {
                Err(io::Error::from(io::ErrorKind::FileTooLarge))
            } else {
                Ok(output)
            }
        };
        let log = async {
            let mut stderr = stderr;
            let log = read_up_to(stderr.as_mut(), MAX_LOG).await?;
            if let Some(mut rest) = stderr {
                tokio::io::copy(&mut rest, &mut tokio::io::sink()).await?;
            }
            Ok(log)
        };
        let (output, log) = match tokio::try_join!(read, log) {
            Ok((output, log)) => (output, log),
            Err(error) if error.kind() == io::ErrorKind::FileTooLarge => return Ok(None),
            Err(error) => return Err(error),
        };
        let status = self.child.wait().await?;
        self.group = None;
        Ok(Some(PluginOutput { output, log, status }))
    }
}

impl PluginProcess {
    /// Kills the group and waits for the plugin, so that it is gone when the next command runs.
    async fn kill(mut self) {
        self.signal();
        let ended = tokio::time::timeout(KILL_WAIT, self.child.wait()).await;
        if !matches!(ended, Ok(Ok(_))) {
            tracing::warn!(child = self.child.id(), "a killed CNI plugin did not end");
        }
    }

    fn signal(&mut self) {
        if let Some(group) = self.group.take()
            && let Err(error) = killpg(group, Signal::SIGKILL)
        {
            tracing::warn!(%group, %error, "a CNI plugin could not be killed");
        }
    }
}

impl Drop for PluginProcess {
    fn drop(&mut self) {
        self.signal();
    }
}

async fn read_up_to(from: Option<impl AsyncRead + Unpin>, limit: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    if let Some(from) = from {
        from.take(limit).read_to_end(&mut bytes).await?;
    }
    Ok(bytes)
}

/// Returns the start of a plugin's output, on one line.
fn to_one_line(bytes: &[u8]) -> String {
    const MAX: usize = 2000;
    let text = String::from_utf8_lossy(bytes);
    text.trim().chars().take(MAX).map(|c| if c.is_control() { ' ' } else { c }).collect()
}
