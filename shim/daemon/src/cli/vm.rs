//! Implements the commands of `nacelle vm` that need no daemon: check and convert the manifests of machines, and print their
//! schema. The rules are the same on every node. Operations on machines are in `machines`.

use super::machines::{self, Machines};
use anyhow::Context;
use clap::{Subcommand, ValueEnum};
use nacelle_machines::honoured::{NotRun, not_known, not_run};
use nacelle_vmi::manifest::{self, Options, Verdict};
use nacelle_vmi::preset::Catalogue;
use nacelle_vmi::version::Version;
use nacelle_vmi::{Causes, read};
use serde_json::{Value, json};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

#[derive(Subcommand)]
pub(super) enum Vm {
    /// Checks manifests: pods and workloads with annotations of Nacelle, machines, KubeVirt's machines, specifications.
    Validate {
        /// Files with YAML or JSON documents; - is the standard input.
        #[arg(required = true, value_name = "FILE")]
        files: Vec<PathBuf>,
        #[command(flatten)]
        catalogue: Documents,
        /// How it is told.
        #[arg(long, short, value_enum, default_value = "text")]
        output: Output,
    },
    /// Turns KubeVirt's machines into pods, ReplicaSets, Deployments and machine records.
    Convert {
        /// Files with YAML or JSON documents; - is the standard input.
        #[arg(required = true, value_name = "FILE")]
        files: Vec<PathBuf>,
        #[command(flatten)]
        catalogue: Documents,
        /// The RuntimeClass of the pods.
        #[arg(long, value_name = "NAME")]
        runtime_class: Option<String>,
        /// The image of pods whose machines have their disks elsewhere.
        #[arg(long, value_name = "REFERENCE")]
        image: Option<String>,
    },
    /// Works with the machines of this node, through the daemon.
    #[command(flatten)]
    Machines(Machines),
    /// Prints the schema of machines as an OpenAPI v3 document.
    Schema {
        /// The version of the documents.
        #[arg(long, value_enum, default_value = "v1")]
        api_version: SchemaVersion,
    },
}

#[derive(clap::Args)]
pub(super) struct Documents {
    /// Files with instance types, preferences and presets, beside those that are built in.
    #[arg(long, value_name = "FILE")]
    catalogue: Vec<PathBuf>,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
pub(super) enum Output {
    Text,
    Json,
}

#[derive(Clone, Copy, ValueEnum)]
pub(super) enum SchemaVersion {
    V1,
    V1alpha1,
}

pub(super) fn run(config: &super::Config, command: Vm) -> anyhow::Result<ExitCode> {
    match command {
        Vm::Machines(command) => machines::run(&config.load()?, command),
        Vm::Validate { files, catalogue, output } => validate(&files, &catalogue.read()?, output),
        Vm::Convert { files, catalogue, runtime_class, image } => {
            let usual = Options::default();
            let options = Options {
                runtime_class: runtime_class.unwrap_or(usual.runtime_class),
                image: image.unwrap_or(usual.image),
            };
            convert(&files, &catalogue.read()?, &options)
        }
        Vm::Schema { api_version } => {
            let version = match api_version {
                SchemaVersion::V1 => Version::V1,
                SchemaVersion::V1alpha1 => Version::V1Alpha1,
            };
            println!("{:#}", manifest::openapi(version));
            Ok(ExitCode::SUCCESS)
        }
    }
}

impl Documents {
    pub(super) fn read(&self) -> anyhow::Result<Catalogue> {
        let mut catalogue = Catalogue::default();
        for file in &self.catalogue {
            for document in documents(file)? {
                catalogue.add(document, "document").with_context(|| format!("{} is no catalogue", file.display()))?;
            }
        }
        Ok(catalogue)
    }
}

/// The documents of a file.
fn documents(file: &Path) -> anyhow::Result<Vec<Value>> {
    let mut text = String::new();
    // One byte above the limit, so that a longer file is detected.
    let most = u64::try_from(read::MAX_BYTES)?.saturating_add(1);
    let read = if file == Path::new("-") {
        std::io::stdin().take(most).read_to_string(&mut text)
    } else {
        std::fs::File::open(file).and_then(|opened| opened.take(most).read_to_string(&mut text))
    };
    read.with_context(|| format!("cannot read {}", file.display()))?;
    Ok(read::all(&text, &file.display().to_string())?)
}

fn validate(files: &[PathBuf], catalogue: &Catalogue, output: Output) -> anyhow::Result<ExitCode> {
    let mut told = Vec::new();
    let mut right = true;
    for file in files {
        let verdicts = manifest::validate(&documents(file)?, catalogue);
        anyhow::ensure!(!verdicts.is_empty(), "{} has no document", file.display());
        right &= verdicts.iter().all(|verdict| verdict.causes.is_empty());
        match output {
            Output::Text => verdicts.iter().for_each(|verdict| print!("{}", lines(file, verdict))),
            Output::Json => told.extend(verdicts.iter().map(|verdict| {
                json!({ "file": file, "kind": verdict.kind, "name": verdict.name, "machine": verdict.machine,
                    "valid": verdict.causes.is_empty(), "causes": verdict.causes, "warnings": warnings(verdict) })
            })),
        }
    }
    if output == Output::Json {
        println!("{:#}", Value::Array(told));
    }
    Ok(if right { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// What is right, and refused by nodes all the same.
fn warnings(verdict: &Verdict) -> Vec<NotRun> {
    let Some(admitted) = &verdict.admitted else { return Vec::new() };
    // The Deployment in the record names this.
    let names = if manifest::is_machine(&verdict.kind) { Vec::new() } else { not_known(admitted) };
    names.into_iter().chain(not_run(admitted)).collect()
}

/// A line for each cause, or one that says that there is none, and one for each warning.
fn lines(file: &Path, verdict: &Verdict) -> String {
    let kind = if verdict.kind.is_empty() { "specification" } else { &verdict.kind };
    let who = format!("{}: {kind} {}", file.display(), verdict.name);
    let who = who.trim_end();
    if verdict.causes.is_empty() {
        let what = if verdict.machine { "right" } else { "says nothing of a machine" };
        let warnings = warnings(verdict).into_iter().map(|warning| format!("{who}: warning: {warning}\n"));
        return format!("{who}: {what}\n{}", warnings.collect::<String>());
    }
    each(who, &verdict.causes)
}

fn each(who: &str, causes: &Causes) -> String {
    causes.list().iter().map(|cause| format!("{who}: {cause}\n")).collect()
}

fn convert(files: &[PathBuf], catalogue: &Catalogue, options: &Options) -> anyhow::Result<ExitCode> {
    let mut made = Vec::new();
    let mut right = true;
    let mut catalogue = catalogue.clone();
    for file in files {
        let (listed, rest): (Vec<Value>, Vec<Value>) = documents(file)?.into_iter().partition(manifest::is_catalogue);
        for document in listed {
            catalogue.add(document, "document").with_context(|| format!("{} is no catalogue", file.display()))?;
        }
        for document in rest {
            let text = |pointer: &str| document.pointer(pointer).and_then(Value::as_str).unwrap_or_default();
            let who = format!("{}: {} {}", file.display(), text("/kind"), text("/metadata/name"));
            match manifest::convert(&document, &catalogue, options) {
                Ok(converted) => {
                    converted.notes.iter().for_each(|note| eprintln!("{who}: note: {note}"));
                    made.extend(converted.documents);
                }
                Err(causes) => {
                    right = false;
                    eprint!("{}", each(&who, &causes));
                }
            }
        }
    }
    print!("{}", manifest::text(&made));
    Ok(if right { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
