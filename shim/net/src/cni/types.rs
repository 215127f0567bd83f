//! Defines the description of a pod for CNI, and the DNS part of CNI's result.

use super::CniError;
use cni_plugin::config::BandwidthLimits;
use ipnet::IpNet;
use nacelle_base::PodId;
use nacelle_model::network::{Bandwidth, DnsConfig, PortMapping};
use serde_json::{Map, Value, json};

/// The pod that the plugins act on.
#[derive(Clone, Debug)]
pub struct PodRef {
    /// The id of the PodSandbox, for CNI_CONTAINERID.
    pub id: PodId,
    /// The pod's name, for K8S_POD_NAME.
    pub name: String,
    /// The pod's namespace, for K8S_POD_NAMESPACE.
    pub namespace: String,
    /// The pod's UID, for K8S_POD_UID.
    pub uid: String,
    /// The hostPorts. Mappings with `host_port` 0 are ignored.
    pub port_mappings: Vec<PortMapping>,
    /// The bandwidth limits.
    pub bandwidth: Bandwidth,
    /// The DNS configuration of the pod, for plugins with the capability `dns`.
    pub dns: Option<DnsConfig>,
    /// The node's pod CIDRs from UpdateRuntimeConfig (capability `ipRanges`); empty if unknown.
    pub pod_cidrs: Vec<IpNet>,
    /// The interfaces in addition to the default one, by their names in the namespace.
    pub additional_interfaces: Vec<String>,
    /// The user of the interfaces.
    pub usage: InterfaceUsage,
}

/// The user of the interfaces in a pod's namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InterfaceUsage {
    /// The pod's processes use them in the namespace. A further interface that the plugins did not create is left out.
    Namespace,
    /// The guest uses them in place of the namespace. A further interface that the plugins did not create is left out.
    Guest,
    /// The guest uses them in place of the namespace. The pod is not attached if a further interface is missing.
    GuestNeedsAll,
}

impl PodRef {
    /// Returns CNI_ARGS with the keys of Kubernetes that plugins know.
    pub(super) fn args(&self) -> Result<String, CniError> {
        let mut args = "IgnoreUnknown=1".to_owned();
        let pairs = [
            ("K8S_POD_NAMESPACE", self.namespace.as_str()),
            ("K8S_POD_NAME", &self.name),
            ("K8S_POD_INFRA_CONTAINER_ID", self.id.as_str()),
            ("K8S_POD_UID", &self.uid),
        ];
        for (field, value) in pairs {
            if value.contains(|c: char| matches!(c, ';' | '=') || c.is_control()) {
                return Err(CniError::Argument { field, value: value.chars().take(80).collect() });
            }
            args.extend([";", field, "=", value]);
        }
        Ok(args)
    }

    /// Returns the runtime arguments by capability, in the form of the CNI conventions.
    pub(super) fn capabilities(&self) -> Map<String, Value> {
        let mut all = Map::new();
        let ports: Vec<Value> = self.port_mappings.iter().filter(|port| port.host_port != 0).map(port).collect();
        if !ports.is_empty() {
            all.insert("portMappings".to_owned(), ports.into());
        }
        if let Some(limits) = limits(self.bandwidth) {
            all.insert("bandwidth".to_owned(), json!(limits));
        }
        if let Some(dns) = &self.dns {
            all.insert("dns".to_owned(), json!(dns));
        }
        if !self.pod_cidrs.is_empty() {
            let ranges = self.pod_cidrs.iter().map(|subnet| json!([{ "subnet": subnet }]));
            all.insert("ipRanges".to_owned(), ranges.collect());
        }
        all
    }
}

fn port(port: &PortMapping) -> Value {
    json!({
        "hostPort": port.host_port,
        "containerPort": port.container_port,
        "protocol": port.protocol,
        "hostIP": port.host_ip.map(|ip| ip.to_string()).unwrap_or_default(),
    })
}

/// A plugin with a rate limit also requires a burst: the largest one that it accepts, so that only the rate matters.
fn limits(bandwidth: Bandwidth) -> Option<BandwidthLimits> {
    const BURST: usize = u32::MAX as usize;
    let rate = |bps: Option<u64>| bps.map(|bps| usize::try_from(bps).unwrap_or(usize::MAX));
    let (ingress_rate, egress_rate) = (rate(bandwidth.ingress_bps), rate(bandwidth.egress_bps));
    (ingress_rate.is_some() || egress_rate.is_some()).then_some(BandwidthLimits {
        ingress_rate,
        ingress_burst: ingress_rate.map(|_| BURST),
        egress_rate,
        egress_burst: egress_rate.map(|_| BURST),
    })
}
