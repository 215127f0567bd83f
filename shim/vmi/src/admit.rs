//! Admits annotations or a document: returns a validated specification, or everything that is wrong. Presets, instance type and
//! preference are applied before the defaults, because a default must not conflict with them.

use crate::annotations::machine_id::ExpectedMachineId;
use crate::annotations::{self, PodSettings};
use crate::cause::{Cause, Causes, Problem};
use crate::preset::{Applied, Catalogue, apply};
use crate::shape::field;
use crate::spec::{InstanceSpec, Power, RunStrategy, SpecKind, VirtualMachine};
use crate::tree::{ROOT, Tree};
use crate::version::written;
use crate::{complete, default, rules, tree};
use serde_json::Value;
use std::collections::BTreeMap;

/// A validated specification. Only admission creates one.
#[derive(Clone, Debug, PartialEq)]
pub struct Admitted {
    spec: InstanceSpec,
    explicit: InstanceSpec,
    settings: PodSettings,
    applied: Applied,
}

impl Admitted {
    /// Returns the specification with its defaults.
    pub fn spec(&self) -> &InstanceSpec {
        &self.spec
    }

    /// Returns the specification without its defaults: the document, the short annotations, presets, instance type and
    /// preference.
    pub fn explicit_spec(&self) -> &InstanceSpec {
        &self.explicit
    }

    /// Returns the paths of the fields that are set, each with its source if that is not the document.
    pub fn fields(&self) -> Vec<(String, Option<&str>)> {
        let mut paths = Vec::new();
        collect_leaf_paths(&written(&self.explicit), ROOT, &mut paths);
        let with_source = |path: String| {
            let from = tree::explicit_source(&self.applied.fields, &path);
            (path, from)
        };
        paths.into_iter().map(with_source).collect()
    }

    /// Returns the kind of the pod.
    pub fn kind(&self) -> SpecKind {
        self.settings.kind.unwrap_or(SpecKind::Container)
    }

    /// Returns the name of the persistent VM of which the pod is a run.
    pub fn name(&self) -> Option<&str> {
        self.settings.name.as_deref()
    }

    /// Returns the machine id that the persistent VM must have.
    pub fn machine_id(&self) -> Option<&ExpectedMachineId> {
        self.settings.machine_id.as_ref()
    }

    /// Returns the run strategy of the persistent VM.
    pub fn run_strategy(&self) -> Option<RunStrategy> {
        self.settings.run_strategy
    }

    /// Returns the initial power state.
    pub fn power(&self) -> Power {
        self.settings.power.unwrap_or(Power::On)
    }

    /// Returns the public SSH keys for the guest.
    pub fn ssh_keys(&self) -> &[String] {
        &self.settings.ssh_keys
    }

    /// Returns what was applied from the catalogue, and the fields that it set.
    pub fn applied(&self) -> &Applied {
        &self.applied
    }
}

/// Admits the annotations of a pod. Returns `None` if none of them is ours.
pub fn pod(annotations: &BTreeMap<String, String>, catalogue: &Catalogue) -> Result<Option<Admitted>, Causes> {
    let annotations = annotations::with_prefix(annotations);
    if annotations.is_empty() {
        return Ok(None);
    }
    let (tree, settings, mut causes) = annotations::read(&annotations);
    match tree {
        Some(mut tree) => {
            complete::restore_sources(&annotations, &mut tree, &mut causes);
            admit(tree, settings, causes, catalogue).map(Some)
        }
        None => Err(causes),
    }
}

/// Admits a specification by itself, as a machine pod. `wrong` are the causes from parsing it.
pub fn instance(spec: &InstanceSpec, wrong: Causes, catalogue: &Catalogue) -> Result<Admitted, Causes> {
    let settings = PodSettings { kind: Some(SpecKind::Machine), ..PodSettings::default() };
    admit(Tree::of(written(spec)), settings, wrong, catalogue)
}

/// Admits a persistent VM. `wrong` are the causes from parsing it.
pub fn machine(machine: &VirtualMachine, wrong: Causes, catalogue: &Catalogue) -> Result<Admitted, Causes> {
    let name = |matcher: &Option<crate::spec::Matcher>| matcher.as_ref().map(|matcher| matcher.name.clone());
    let settings = PodSettings {
        kind: Some(SpecKind::Machine),
        name: Some(machine.metadata.name.clone()),
        run_strategy: machine.spec.run_strategy,
        instancetype: name(&machine.spec.instancetype),
        preference: name(&machine.spec.preference),
        ..PodSettings::default()
    };
    let tree = Tree::of(written(&machine.spec.template.spec));
    match admit(tree, settings, Causes::default(), catalogue) {
        Ok(admitted) => wrong.into_result().map(|()| admitted),
        Err(causes) => Err(join_causes(wrong, below_template(causes))),
    }
}

/// Prefixes the paths of causes with that of the template.
pub(crate) fn below_template(mut causes: Causes) -> Causes {
    let own = ["spec.instancetype", "spec.preference", "spec.presets"];
    causes.for_each_mut(|cause| {
        if let Some(rest) = cause.field.strip_prefix("spec.")
            && !own.contains(&cause.field.as_str())
        {
            cause.field = format!("spec.template.spec.{rest}");
        }
    });
    causes
}

fn admit(tree: Tree, mut settings: PodSettings, shape: Causes, catalogue: &Catalogue) -> Result<Admitted, Causes> {
    let mut causes = Causes::default();
    let (mut spec, applied) = apply(tree, &settings, catalogue, &mut causes);
    let explicit = spec.clone();
    default::fill(&mut spec, &mut settings);
    rules::check(&spec, &settings, &mut causes);
    causes.for_each_mut(|cause| {
        if cause.reason != Problem::Conflict {
            cause.from = tree::explicit_source(&applied.fields, &cause.field).map(str::to_owned);
        }
    });
    join_causes(shape, causes).into_result()?;
    Ok(Admitted { spec, explicit, settings, applied })
}

/// Collects the paths of all values without parts.
fn collect_leaf_paths(value: &Value, at: &str, paths: &mut Vec<String>) {
    match value {
        Value::Object(fields) if !fields.is_empty() => {
            fields.iter().for_each(|(key, value)| collect_leaf_paths(value, &field(at, key), paths));
        }
        Value::Array(items) if !items.is_empty() => {
            items
                .iter()
                .enumerate()
                .for_each(|(index, item)| collect_leaf_paths(item, &format!("{at}[{index}]"), paths));
        }
        _ if at == ROOT => {}
        _ => paths.push(at.to_owned()),
    }
}

/// Joins all causes, without those of the rules that only follow from those of the shape.
fn join_causes(mut shape: Causes, rules: Causes) -> Causes {
    let reported: Vec<Cause> = shape.list().to_vec();
    for cause in rules.list() {
        if !reported.iter().any(|known| is_consequence(cause, known)) {
            shape.add(cause.clone());
        }
    }
    shape
}

/// Returns whether a cause only follows from another: a field with the wrong shape was removed, and is missing now.
fn is_consequence(cause: &Cause, known: &Cause) -> bool {
    let below = |inner: &str, outer: &str| {
        inner.strip_prefix(outer).is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
    };
    below(&cause.field, &known.field) || (cause.reason == Problem::Required && below(&known.field, &cause.field))
}
