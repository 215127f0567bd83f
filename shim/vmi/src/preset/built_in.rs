//! Contains the built-in instance types: the u1 series of KubeVirt's common instance types (one vCPU for each 4 GiB), so that
//! manifests with these names have the same meaning here.

use super::{InstancetypeCpu, InstancetypeMemory, InstancetypeSpec};
use crate::Quantity;
use std::collections::BTreeMap;

/// The name, the number of vCPUs, the memory in MiB.
const U1: &[(&str, u32, u64)] = &[
    ("u1.nano", 1, 512),
    ("u1.micro", 1, 1024),
    ("u1.small", 1, 2048),
    ("u1.medium", 1, 4096),
    ("u1.large", 2, 8192),
    ("u1.xlarge", 4, 16_384),
    ("u1.2xlarge", 8, 32_768),
    ("u1.4xlarge", 16, 65_536),
    ("u1.8xlarge", 32, 131_072),
];

pub(super) fn instancetypes() -> BTreeMap<String, InstancetypeSpec> {
    let one = |(name, cpus, mib): &(&str, u32, u64)| {
        let cpu = InstancetypeCpu { guest: Some(*cpus), ..InstancetypeCpu::default() };
        let memory = InstancetypeMemory { guest: Some(Quantity::units(mib << 20)), ..InstancetypeMemory::default() };
        ((*name).to_owned(), InstancetypeSpec { cpu, memory })
    };
    U1.iter().map(one).collect()
}
