//! Implements the commands of `nacelle vm` that need no daemon: check and convert the manifests of machines, and print their
//! schema. The rules are the same on every node. Operations on machines are in `machines`.

use super::ExitStatus;
use super::machines::{self, VmOperation};
use super::output::{OutputArgument, TableView, print, warn};
use anyhow::Context;
use clap::{Subcommand, ValueEnum};
use nacelle_machines::supported::{UnsupportedSetting, unknown_presets, unsupported_settings};
use nacelle_vmi::manifest::{self, Options, Verdict};
use nacelle_vmi::preset::Catalogue;
use nacelle_vmi::version::Version;
use nacelle_vmi::{Causes, read};
use serde::Serialize;
use serde_json::Value;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

#[derive(Subcommand)]
pub(super) enum VmCommand {
    /// Checks manifests: pods and workloads with Nacelle's annotations, VirtualMachines of Nacelle and KubeVirt, and bare VM
    /// specifications.
    Validate {
        /// Files with YAML or JSON documents; - means standard input.
        #[arg(required = true, value_name = "FILE")]
        files: Vec<PathBuf>,
        #[command(flatten)]
        catalogue: CatalogueFiles,
        #[command(flatten)]
        output: OutputArgument,
    },
    /// Converts KubeVirt's VMs into pods, ReplicaSets, Deployments and VirtualMachine records.
    Convert {
        /// Files with YAML or JSON documents; - means standard input.
        #[arg(required = true, value_name = "FILE")]
        files: Vec<PathBuf>,
        #[command(flatten)]
        catalogue: CatalogueFiles,
        /// The RuntimeClass of the pods.
        #[arg(long, value_name = "NAME")]
        runtime_class: Option<String>,
        /// The image of pods whose VMs have no disk in an image.
        #[arg(long, value_name = "REFERENCE")]
        image: Option<String>,
    },
    /// Manages the VMs of this node, through the daemon.
    #[command(flatten)]
    Operation(VmOperation),
    /// Prints the schema of VM documents as OpenAPI v3.
    Schema {
        /// The version of the documents.
        #[arg(long, value_enum, default_value = "v1")]
        api_version: SchemaVersion,
    },
}

#[derive(Clone, clap::Args)]
pub(super) struct CatalogueFiles {
    /// A file with instance types, preferences and presets, in addition to the built-in ones. May be repeated.
    #[arg(long, value_name = "FILE")]
    catalogue: Vec<PathBuf>,
}

/// What differs when a file has another content.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct FileVersion {
    device: u64,
    inode: u64,
    bytes: u64,
    /// When it was changed, in seconds and nanoseconds.
    changed: (i64, i64),
}

impl FileVersion {
    fn of(path: &Path) -> Option<FileVersion> {
        let found = std::fs::metadata(path).ok()?;
        let changed = (found.ctime(), found.ctime_nsec());
        Some(FileVersion { device: found.dev(), inode: found.ino(), bytes: found.len(), changed })
    }
}

#[derive(Clone, Copy, ValueEnum)]
pub(super) enum SchemaVersion {
    V1,
    V1alpha1,
}

pub(super) fn run(config: &super::ConfigArgument, command: VmCommand) -> anyhow::Result<ExitStatus> {
    match command {
        VmCommand::Operation(operation) => machines::run(&config.load()?, operation),
        VmCommand::Validate { files, catalogue, output } => validate(&files, &catalogue.read()?, output),
        VmCommand::Convert { files, catalogue, runtime_class, image } => {
            let defaults = Options::default();
            let options = Options {
                runtime_class: runtime_class.unwrap_or(defaults.runtime_class),
                image: image.unwrap_or(defaults.image),
            };
            convert(&files, &catalogue.read()?, &options)
        }
        VmCommand::Schema { api_version } => {
            let version = match api_version {
                SchemaVersion::V1 => Version::V1,
                SchemaVersion::V1alpha1 => Version::V1Alpha1,
            };
            print(&format!("{:#}\n", manifest::openapi(version)))?;
            Ok(ExitStatus::Success)
        }
    }
}

impl CatalogueFiles {
    /// Returns whether one of the files is standard input.
    pub(super) fn includes_stdin(&self) -> bool {
        self.catalogue.iter().any(|file| file == Path::new("-"))
    }

    /// Returns the versions of the files; `None` stands for a file that cannot be looked at.
    pub(super) fn versions(&self) -> Vec<Option<FileVersion>> {
        self.catalogue.iter().map(|file| FileVersion::of(file)).collect()
    }

    pub(super) fn read(&self) -> anyhow::Result<Catalogue> {
        let mut catalogue = Catalogue::default();
        for file in &self.catalogue {
            for document in read_documents(file)? {
                catalogue.add(document, "document").with_context(|| format!("invalid catalogue {}", file.display()))?;
            }
        }
        Ok(catalogue)
    }
}

/// Reads the documents of a file, or of standard input for "-".
fn read_documents(file: &Path) -> anyhow::Result<Vec<Value>> {
    let mut text = String::new();
    // One byte above the limit, so that a longer file is detected.
    let limit = u64::try_from(read::MAX_BYTES)?.saturating_add(1);
    let read = if file == Path::new("-") {
        std::io::stdin().take(limit).read_to_string(&mut text)
    } else {
        std::fs::File::open(file).and_then(|opened| opened.take(limit).read_to_string(&mut text))
    };
    read.with_context(|| format!("cannot read {}", file.display()))?;
    Ok(read::all(&text, &file.display().to_string())?)
}

/// The verdict on a document.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(super) struct DocumentReport {
    file: PathBuf,
    kind: String,
    name: String,
    machine: bool,
    valid: bool,
    causes: Causes,
    #[cfg_attr(test, schemars(with = "Vec<serde_json::Value>"))]
    warnings: Vec<UnsupportedSetting>,
}

fn validate(files: &[PathBuf], catalogue: &Catalogue, output: OutputArgument) -> anyhow::Result<ExitStatus> {
    let mut reports: Vec<DocumentReport> = Vec::new();
    for file in files {
        let verdicts = manifest::validate(&read_documents(file)?, catalogue);
        anyhow::ensure!(!verdicts.is_empty(), "{} contains no document", file.display());
        reports.extend(verdicts.into_iter().map(|verdict| DocumentReport::new(file, verdict)));
    }
    output.print(&reports)?;
    Ok(ExitStatus::of(reports.iter().all(|report| report.valid)))
}

/// Returns the fields of a valid specification for which nodes of this version reject the pod.
fn warnings(verdict: &Verdict) -> Vec<UnsupportedSetting> {
    let Some(admitted) = &verdict.admitted else { return Vec::new() };
    // The record's Deployment has these names.
    let unknown = if manifest::is_machine(&verdict.kind) { Vec::new() } else { unknown_presets(admitted) };
    unknown.into_iter().chain(unsupported_settings(admitted)).collect()
}

impl DocumentReport {
    fn new(file: &Path, verdict: Verdict) -> DocumentReport {
        let warnings = warnings(&verdict);
        DocumentReport {
            file: file.to_owned(),
            kind: verdict.kind,
            name: verdict.name,
            machine: verdict.machine,
            valid: verdict.causes.is_empty(),
            causes: verdict.causes,
            warnings,
        }
    }

    /// Returns a line for each cause, or a line for a valid document and one for each warning.
    fn lines(&self) -> String {
        let kind = if self.kind.is_empty() { "specification" } else { &self.kind };
        let subject = format!("{}: {kind} {}", self.file.display(), self.name);
        let subject = subject.trim_end();
        if !self.valid {
            return cause_lines(subject, &self.causes);
        }
        let result = if self.machine { "valid" } else { "valid, requests no VM settings" };
        let warnings = self.warnings.iter().map(|warning| format!("{subject}: warning: {warning}\n"));
        format!("{subject}: {result}\n{}", warnings.collect::<String>())
    }
}

impl TableView for Vec<DocumentReport> {
    fn table(&self) -> String {
        self.iter().map(DocumentReport::lines).collect()
    }
}

fn cause_lines(subject: &str, causes: &Causes) -> String {
    causes.list().iter().map(|cause| format!("{subject}: {cause}\n")).collect()
}

fn convert(files: &[PathBuf], catalogue: &Catalogue, options: &Options) -> anyhow::Result<ExitStatus> {
    let mut converted_documents = Vec::new();
    let mut all_valid = true;
    let mut catalogue = catalogue.clone();
    for file in files {
        let (catalogues, rest): (Vec<Value>, Vec<Value>) =
            read_documents(file)?.into_iter().partition(manifest::is_catalogue);
        for document in catalogues {
            catalogue.add(document, "document").with_context(|| format!("invalid catalogue {}", file.display()))?;
        }
        for document in rest {
            let text = |pointer: &str| document.pointer(pointer).and_then(Value::as_str).unwrap_or_default();
            let subject = format!("{}: {} {}", file.display(), text("/kind"), text("/metadata/name"));
            match manifest::convert(&document, &catalogue, options) {
                Ok(converted) => {
                    converted.notes.iter().for_each(|note| warn(&format!("{subject}: note: {note}")));
                    converted_documents.extend(converted.documents);
                }
                Err(causes) => {
                    all_valid = false;
                    warn(cause_lines(&subject, &causes).trim_end());
                }
            }
        }
    }
    print(&manifest::text(&converted_documents))?;
    Ok(ExitStatus::of(all_valid))
}
