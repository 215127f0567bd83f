//! Admits annotations or a document: returns a validated specification, or everything that is wrong. Presets, instance type and
//! preference are applied before the defaults, because a default must not conflict with them.

use crate::annotations::{self, Wishes};
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
    said: InstanceSpec,
    wishes: Wishes,
    applied: Applied,
}

impl Admitted {
    /// Returns the specification with its defaults.
    pub fn spec(&self) -> &InstanceSpec {
        &self.spec
    }

    /// Returns the specification without its defaults: the document, the short annotations, presets, instance type and
    /// preference.
    pub fn said(&self) -> &InstanceSpec {
        &self.said
    }

    /// Returns the paths of the fields that are set, each with its source if that is not the document.
    pub fn fields(&self) -> Vec<(String, Option<&str>)> {
        let mut paths = Vec::new();
        leaves(&written(&self.said), ROOT, &mut paths);
        let with_source = |path: String| {
            let from = tree::said(&self.applied.fields, &path);
            (path, from)
        };
        paths.into_iter().map(with_source).collect()
    }

    /// Returns the kind of the pod.
    pub fn kind(&self) -> SpecKind {
        self.wishes.kind.unwrap_or(SpecKind::Container)
    }

    /// Returns the name of the persistent VM of which the pod is a run.
    pub fn name(&self) -> Option<&str> {
        self.wishes.name.as_deref()
    }

    /// Returns the run strategy of the persistent VM.
    pub fn run_strategy(&self) -> Option<RunStrategy> {
        self.wishes.run_strategy
    }

    /// Returns the initial power state.
    pub fn power(&self) -> Power {
        self.wishes.power.unwrap_or(Power::On)
    }

    /// Returns the public SSH keys for the guest.
    pub fn ssh_keys(&self) -> &[String] {
        &self.wishes.ssh_keys
    }

    /// Returns what was applied from the catalogue, and the fields that it set.
    pub fn applied(&self) -> &Applied {
        &self.applied
    }
}

/// Admits the annotations of a pod. Returns `None` if none of them is ours.
pub fn pod(annotations: &BTreeMap<String, String>, catalogue: &Catalogue) -> Result<Option<Admitted>, Causes> {
    let ours = annotations::ours(annotations);
    if ours.is_empty() {
        return Ok(None);
    }
    let (tree, wishes, mut causes) = annotations::read(&ours);
    match tree {
        Some(mut tree) => {
            complete::recall(&ours, &mut tree, &mut causes);
            admit(tree, wishes, causes, catalogue).map(Some)
        }
        None => Err(causes),
    }
}

/// Admits a specification by itself, as a machine pod. `wrong` are the causes from parsing it.
pub fn instance(spec: &InstanceSpec, wrong: Causes, catalogue: &Catalogue) -> Result<Admitted, Causes> {
    let wishes = Wishes { kind: Some(SpecKind::Machine), ..Wishes::default() };
    admit(Tree::of(written(spec)), wishes, wrong, catalogue)
}

/// Admits a persistent VM. `wrong` are the causes from parsing it.
pub fn machine(machine: &VirtualMachine, wrong: Causes, catalogue: &Catalogue) -> Result<Admitted, Causes> {
    let name = |matcher: &Option<crate::spec::Matcher>| matcher.as_ref().map(|matcher| matcher.name.clone());
    let wishes = Wishes {
        kind: Some(SpecKind::Machine),
        name: Some(machine.metadata.name.clone()),
        run_strategy: machine.spec.run_strategy,
        instancetype: name(&machine.spec.instancetype),
        preference: name(&machine.spec.preference),
        ..Wishes::default()
    };
    let tree = Tree::of(written(&machine.spec.template.spec));
    match admit(tree, wishes, Causes::default(), catalogue) {
        Ok(admitted) => wrong.done().map(|()| admitted),
        Err(causes) => Err(joined(wrong, below_template(causes))),
    }
}

/// Prefixes the paths of causes with that of the template.
pub(crate) fn below_template(mut causes: Causes) -> Causes {
    let own = ["spec.instancetype", "spec.preference", "spec.presets"];
    causes.each(|cause| {
        if let Some(rest) = cause.field.strip_prefix("spec.")
            && !own.contains(&cause.field.as_str())
        {
            cause.field = format!("spec.template.spec.{rest}");
        }
    });
    causes
}

fn admit(tree: Tree, mut wishes: Wishes, shape: Causes, catalogue: &Catalogue) -> Result<Admitted, Causes> {
    let mut causes = Causes::default();
    let (mut spec, applied) = apply(tree, &wishes, catalogue, &mut causes);
    let said = spec.clone();
    default::fill(&mut spec, &mut wishes);
    rules::check(&spec, &wishes, &mut causes);
    causes.each(|cause| {
        if cause.reason != Problem::Conflict {
            cause.from = tree::said(&applied.fields, &cause.field).map(str::to_owned);
        }
    });
    joined(shape, causes).done()?;
    Ok(Admitted { spec, said, wishes, applied })
}

/// Collects the paths of all values without parts.
fn leaves(value: &Value, at: &str, paths: &mut Vec<String>) {
    match value {
        Value::Object(fields) if !fields.is_empty() => {
            fields.iter().for_each(|(key, value)| leaves(value, &field(at, key), paths));
        }
        Value::Array(items) if !items.is_empty() => {
            items.iter().enumerate().for_each(|(index, item)| leaves(item, &format!("{at}[{index}]"), paths));
        }
        _ if at == ROOT => {}
        _ => paths.push(at.to_owned()),
    }
}

/// Joins all causes, without those of the rules that only follow from those of the shape.
fn joined(mut shape: Causes, rules: Causes) -> Causes {
    let told: Vec<Cause> = shape.list().to_vec();
    for cause in rules.list() {
        if !told.iter().any(|known| follows(cause, known)) {
            shape.add(cause.clone());
        }
    }
    shape
}

/// Returns whether a cause only follows from another: a field with the wrong shape was removed, and is missing now.
fn follows(cause: &Cause, known: &Cause) -> bool {
    let below = |inner: &str, outer: &str| {
        inner.strip_prefix(outer).is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
    };
    below(&cause.field, &known.field) || (cause.reason == Problem::Required && below(&known.field, &cause.field))
}
