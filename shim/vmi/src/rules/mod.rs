//! Checks the rules of a specification after its defaults were set. Each rule checks one property of one field; all rules are
//! checked, and all violations are reported. There is one file for each subject.

mod devices;
mod disks;
mod domain;
mod instance;
mod interfaces;
mod pod;
mod volumes;

use crate::annotations::PodSettings;
use crate::cause::Causes;
use crate::spec::{InstanceSpec, SpecKind};

/// Checks all rules.
pub fn check(spec: &InstanceSpec, settings: &PodSettings, causes: &mut Causes) {
    let kind = settings.kind.unwrap_or(SpecKind::Container);
    domain::processors(&spec.domain, causes);
    domain::memory(&spec.domain, kind, causes);
    domain::resources(&spec.domain, causes);
    domain::firmware(spec, settings, causes);
    domain::clock(&spec.domain, causes);
    disks::check(spec, causes);
    interfaces::check(spec, causes);
    devices::check(spec, causes);
    volumes::check(spec, causes);
    instance::check_instance_fields(spec, causes);
    pod::check(spec, settings, kind, causes);
}
