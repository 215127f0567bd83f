//! Runs the process that builds a template, and waits for its end.

use super::ClientError;
use super::spawn::{LOG_FILE, log_tail, open_process_log};
use crate::template::TemplateSpec;
use crate::{create_jail, jail_dir, sys};
use nacelle_base::files::{remove_if_there, remove_tree_if_there};
use nacelle_base::task::run_blocking_or_panic;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;
use tokio::process::{Child, Command};

/// Builds a template with `PROGRAM --template DIR` in the existing empty directory `dir`, which then holds `template.json` and the saved
/// VM. Fails if that takes longer than `limit`. The process ends if the future is dropped or the caller ends.
pub async fn build_template(
    program: &Path,
    dir: &Path,
    spec: &TemplateSpec,
    limit: Duration,
) -> Result<(), ClientError> {
    let (own_program, own_dir, own_spec) = (program.to_owned(), dir.to_owned(), spec.clone());
    let mut child = run_blocking_or_panic(move || start(&own_program, &own_dir, &own_spec)).await?;
    // The process ends when this does, which `wait` would close.
    let _input = child.stdin.take();
    let status = match tokio::time::timeout(limit, child.wait()).await {
        Ok(status) => status.map_err(|source| ClientError::Start { program: program.to_owned(), source })?,
        Err(_elapsed) => {
            let _killed = child.kill().await;
            return Err(ClientError::Timeout { what: "build the template", limit });
        }
    };
    if status.success() {
        // Only the process needed the rest.
        let own_dir = dir.to_owned();
        let remove = move || remove_tree_if_there(&jail_dir(&own_dir)).and(remove_if_there(&own_dir.join(LOG_FILE)));
        return Ok(run_blocking_or_panic(remove).await?);
    }
    let tail = log_tail(dir).unwrap_or_default();
    Err(ClientError::NotBuilt { status, tail })
}

/// Starts the process. It ends when its standard input does. Blocks for a few file operations.
fn start(program: &Path, dir: &Path, spec: &TemplateSpec) -> Result<Child, ClientError> {
    spec.write(dir)?;
    create_jail(dir)?;
    let (log, errors) = open_process_log(dir)?;
    let mut command = Command::new(program);
    command.arg("--template").arg(dir).current_dir("/").kill_on_drop(true);
    command.stdin(Stdio::piped()).stdout(log).stderr(errors);
    sys::detach(&mut command);
    let started = sys::spawn_in_pid_namespace(&mut command);
    started.map_err(|source| ClientError::Start { program: program.to_owned(), source })
}
