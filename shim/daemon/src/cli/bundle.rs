//! Implements `nacelle debug bundle`: collects what a report of a fault needs into one archive. It has no credentials of registries
//! and no environment of containers; the log may contain what guests print. Size and time are bounded, also when the daemon hangs,
//! and what cannot be collected is listed in it.

use super::ExitStatus;
use super::output::{TableView, print};
use super::pods::PodList;
use super::templates::TemplateList;
use super::timeline::PodTimeline;
use super::units::format_time;
use super::{ConfigArgument, check, daemon, image, machines, version};
use crate::config::Config;
use anyhow::Context;
use clap::Subcommand;
use flate2::Compression;
use flate2::write::GzEncoder;
use nacelle_base::retry::retry_interrupted;
use nacelle_base::timeline::unix_nanos;
use nacelle_proto::cri::runtime_service_client::RuntimeServiceClient;
use nacelle_proto::node;
use nacelle_proto::node::node_client::NodeClient;
use serde::Serialize;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use tonic::transport::Channel;

/// The largest size of a file in the archive, in bytes.
const MAX_FILE: usize = 4 << 20;
/// The largest size of all files together, in bytes.
const MAX_TOTAL: usize = 64 << 20;
/// The largest number of pods whose timelines are collected.
const MAX_TIMELINES: usize = 200;
/// The number of lines of the journal.
const JOURNAL_LINES: &str = "5000";
/// The time in seconds after which the reader of the journal is killed.
const JOURNAL_SECONDS: &str = "30";
/// Time for one request to the daemon.
const REQUEST_LIMIT: Duration = Duration::from_secs(20);
/// Time for all requests to the daemon.
const DAEMON_LIMIT: Duration = Duration::from_secs(60);
/// Files of the node that have no secrets.
const NODE_FILES: &[&str] = &[
    "/etc/os-release",
    "/proc/version",
    "/proc/cpuinfo",
    "/proc/meminfo",
    "/proc/loadavg",
    "/proc/filesystems",
    "/proc/modules",
    "/proc/pressure/cpu",
    "/proc/pressure/io",
    "/proc/pressure/memory",
    "/sys/fs/cgroup/cgroup.controllers",
    "/sys/fs/cgroup/cgroup.subtree_control",
];

#[derive(Subcommand)]
pub(super) enum DebugCommand {
    /// Collects version, configuration, checks, pods with timelines, images, templates, VMs, the daemon's journal and facts of the
    /// node in an archive that only its owner can read. It has no credentials of registries and no environment of containers; the
    /// journal may contain what guests and network plugins print.
    Bundle {
        /// The archive, which must not exist [default: nacelle-debug-TIME.tar.gz in the working directory].
        #[arg(long, short, value_name = "FILE")]
        output: Option<PathBuf>,
    },
}

/// Collects everything, and prints the path of the archive.
pub(super) fn run(argument: &ConfigArgument, output: Option<PathBuf>) -> anyhow::Result<ExitStatus> {
    let name = || format!("nacelle-debug-{}.tar.gz", format_time(unix_nanos()).unwrap_or_default().replace(':', ""));
    let path = output.unwrap_or_else(|| name().into());
    let failed = || format!("cannot create {}", path.display());
    anyhow::ensure!(!path.try_exists().with_context(failed)?, "cannot create {}: it exists", path.display());
    // In memory until it is complete: half an archive would only mislead.
    let mut archive = Vec::new();
    let mut bundle = Bundle::new(&mut archive);
    collect(&mut bundle, argument).and_then(|()| bundle.finish()).context("cannot collect a bundle")?;
    let mut file = File::options().write(true).create_new(true).mode(0o600).open(&path).with_context(failed)?;
    if let Err(error) = file.write_all(&archive) {
        // The first error is reported.
        let _ = std::fs::remove_file(&path);
        return Err(anyhow::Error::new(error).context(format!("cannot write {}", path.display())));
    }
    print(&format!("{}\n", path.display()))?;
    Ok(ExitStatus::Success)
}

fn collect(bundle: &mut Bundle<impl Write>, argument: &ConfigArgument) -> anyhow::Result<()> {
    bundle.add_json("version.json", Ok(version::view()))?;
    for path in NODE_FILES {
        bundle.add("node", path.trim_start_matches('/'), read_limited(Path::new(path)))?;
    }
    bundle.add("", "journal.txt", read_journal())?;
    let config = match argument.load() {
        Ok(config) => config,
        Err(error) => {
            bundle.note("config.toml", &error);
            return Ok(());
        }
    };
    bundle.add("", "config.toml", redacted(&config))?;
    let report = check::find_problems(&config);
    bundle.add("", "check.txt", report.as_ref().map(|report| report.table().into_bytes()).map_err(copy_error))?;
    bundle.add_json("check.json", report)?;
    super::runtime()?.block_on(async {
        let end = Instant::now() + DAEMON_LIMIT;
        let connected = async { Ok(daemon::connect(&config.paths.socket).await?) };
        match within(end, connected).await {
            Ok(channel) => collect_from_daemon(bundle, channel, &config, end).await,
            Err(error) => {
                bundle.note("pods.json", &error);
                Ok(())
            }
        }
    })
}

async fn collect_from_daemon(
    bundle: &mut Bundle<impl Write>,
    channel: Channel,
    config: &Config,
    end: Instant,
) -> anyhow::Result<()> {
    let mut client = RuntimeServiceClient::new(channel.clone());
    let pods = within(end, PodList::read(&mut client, config)).await;
    let ids: Vec<String> = pods.iter().flat_map(PodList::ids).take(MAX_TIMELINES).map(str::to_owned).collect();
    bundle.add_json("pods.json", pods)?;
    bundle.add_json("images.json", within(end, image::list(channel.clone())).await)?;
    bundle.add_json("vms.json", within(end, machines::list(channel.clone())).await)?;
    let mut templates = NodeClient::new(channel);
    let listed = async {
        let listed = templates.list_templates(node::ListTemplatesRequest {}).await.map_err(daemon::status_error)?;
        Ok(TemplateList::new(listed.into_inner()))
    };
    bundle.add_json("templates.json", within(end, listed).await)?;
    for id in ids {
        let timeline = within(end, PodTimeline::read(&mut client, &id)).await;
        bundle.add_json(&format!("timelines/{id}.json"), timeline)?;
    }
    Ok(())
}

/// Awaits an answer of the daemon, which may hang, until `end` at most.
async fn within<T>(end: Instant, answer: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    let limit = end.min(Instant::now() + REQUEST_LIMIT);
    let answered = tokio::time::timeout_at(limit.into(), answer).await;
    answered.unwrap_or_else(|_elapsed| Err(anyhow::anyhow!("the daemon did not respond in time")))
}

/// Returns the configuration with all defaults. The URLs of proxies are left out: they may contain passwords.
fn redacted(config: &Config) -> anyhow::Result<Vec<u8>> {
    let mut config = config.clone();
    for proxy in [&mut config.images.http_proxy, &mut config.images.https_proxy] {
        if proxy.as_ref().is_some_and(|proxy| !proxy.is_empty()) {
            *proxy = Some("REDACTED".to_owned());
        }
    }
    Ok(toml::to_string(&config).context("cannot format the configuration")?.into_bytes())
}

/// Returns the first bytes of a file.
fn read_limited(path: &Path) -> anyhow::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(u64::try_from(MAX_FILE)?).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Returns the end of the daemon's journal.
fn read_journal() -> anyhow::Result<Vec<u8>> {
    let mut command = Command::new("timeout");
    command.args([JOURNAL_SECONDS, "journalctl"]);
    command.args(["--unit", "nacelle.service", "--no-pager", "--output", "short-iso", "--lines", JOURNAL_LINES]);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().context("cannot run journalctl")?;
    let read = child.stdout.take().map(read_end).transpose();
    let status = child.wait().context("cannot wait for journalctl")?;
    anyhow::ensure!(status.success(), "journalctl ended with {status}");
    Ok(read.context("cannot read from journalctl")?.unwrap_or_default())
}

/// Reads to the end, and returns the last bytes.
fn read_end(mut from: impl Read) -> io::Result<Vec<u8>> {
    let (mut end, mut chunk) = (Vec::new(), vec![0; 64 << 10]);
    loop {
        let count = retry_interrupted(|| from.read(&mut chunk))?;
        end.extend_from_slice(chunk.get(..count).unwrap_or_default());
        if count == 0 || end.len() > 2 * MAX_FILE {
            end.drain(..end.len().saturating_sub(MAX_FILE));
        }
        if count == 0 {
            return Ok(end);
        }
    }
}

fn copy_error(error: &anyhow::Error) -> anyhow::Error {
    anyhow::anyhow!("{error:#}")
}

/// An archive that is being written.
struct Bundle<W: Write> {
    archive: tar::Builder<GzEncoder<W>>,
    remaining: usize,
    time: u64,
    /// What could not be collected.
    missing: String,
}

impl<W: Write> Bundle<W> {
    fn new(to: W) -> Bundle<W> {
        Bundle {
            archive: tar::Builder::new(GzEncoder::new(to, Compression::default())),
            remaining: MAX_TOTAL,
            time: u64::try_from(unix_nanos() / 1_000_000_000).unwrap_or_default(),
            missing: String::new(),
        }
    }

    /// Notes that a file is missing.
    fn note(&mut self, name: &str, error: &anyhow::Error) {
        self.missing += &format!("{name}: {error:#}\n");
    }

    /// Adds a file, or notes why it is missing.
    fn add(&mut self, directory: &str, name: &str, content: anyhow::Result<Vec<u8>>) -> anyhow::Result<()> {
        let name = Path::new("nacelle-debug").join(directory).join(name);
        match content {
            Ok(content) if content.len() <= MAX_FILE && content.len() <= self.remaining => {
                self.remaining -= content.len();
                self.append(&name, &content)
            }
            Ok(content) => {
                self.note(&name.display().to_string(), &anyhow::anyhow!("it has {} bytes", content.len()));
                Ok(())
            }
            Err(error) => {
                self.note(&name.display().to_string(), &error);
                Ok(())
            }
        }
    }

    fn add_json<T: Serialize>(&mut self, name: &str, value: anyhow::Result<T>) -> anyhow::Result<()> {
        self.add("", name, value.and_then(|value| Ok(serde_json::to_vec_pretty(&value)?)))
    }

    fn append(&mut self, name: &Path, content: &[u8]) -> anyhow::Result<()> {
        let mut header = tar::Header::new_gnu();
        header.set_size(u64::try_from(content.len())?);
        header.set_mode(0o600);
        header.set_mtime(self.time);
        Ok(self.archive.append_data(&mut header, name, content)?)
    }

    /// Writes the list of what is missing, and the end of the archive.
    fn finish(mut self) -> anyhow::Result<()> {
        let missing = std::mem::take(&mut self.missing);
        if !missing.is_empty() {
            self.append(Path::new("nacelle-debug/missing.txt"), missing.as_bytes())?;
        }
        self.archive.into_inner()?.finish()?.flush()?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flate2::read::GzDecoder;
    use std::collections::BTreeMap;

    fn unpack(bytes: &[u8]) -> BTreeMap<String, String> {
        let mut archive = tar::Archive::new(GzDecoder::new(bytes));
        let entries = archive.entries().unwrap().map(|entry| {
            let mut entry = entry.unwrap();
            assert_eq!(entry.header().mode().unwrap(), 0o600);
            let mut text = String::new();
            entry.read_to_string(&mut text).unwrap();
            (entry.path().unwrap().display().to_string(), text)
        });
        entries.collect()
    }

    #[test]
    fn a_bundle_lists_what_is_missing() {
        let mut bytes = Vec::new();
        let mut bundle = Bundle::new(&mut bytes);
        bundle.add("node", "proc/version", Ok(b"Linux".to_vec())).unwrap();
        bundle.add_json("pods.json", Err::<(), _>(anyhow::anyhow!("no daemon"))).unwrap();
        bundle.add("", "large", Ok(vec![0; MAX_FILE + 1])).unwrap();
        bundle.finish().unwrap();
        let files = unpack(&bytes);
        assert_eq!(files["nacelle-debug/node/proc/version"], "Linux");
        let missing = &files["nacelle-debug/missing.txt"];
        assert!(missing.contains("pods.json: no daemon") && missing.contains("large: it has"), "{missing}");
        assert_eq!(files.len(), 2);
    }

    #[tokio::test]
    async fn a_daemon_that_hangs_is_given_up() {
        let error = within(Instant::now(), std::future::pending::<anyhow::Result<()>>()).await.unwrap_err();
        assert!(error.to_string().contains("did not respond"), "{error}");
    }

    #[test]
    fn the_end_of_a_long_output_is_kept() {
        let text = [vec![b'a'; 3 * MAX_FILE], b"end".to_vec()].concat();
        let end = read_end(text.as_slice()).unwrap();
        assert!(end.len() == MAX_FILE && end.ends_with(b"aend"));
    }

    #[test]
    fn no_password_is_in_the_configuration() {
        let text = "[images]\nhttps_proxy = \"http://user:s3cret@proxy.example:1\"\n";
        let config = Config::parse(text, Path::new("c.toml")).unwrap();
        let redacted = String::from_utf8(redacted(&config).unwrap()).unwrap();
        assert!(redacted.contains("https_proxy = \"REDACTED\"") && !redacted.contains("s3cret"), "{redacted}");
    }
}
