//! Owns: what the daemon says of a pod to CNI, and the DNS part of what CNI says back.

use super::CniError;
use cni_plugin::config::BandwidthLimits;
use ipnet::IpNet;
use nacelle_base::PodId;
use nacelle_model::network::{DnsConfig, PortMapping};
use serde_json::{Map, Value, json};

/// A pod, as the plugins are told of it.
#[derive(Clone, Debug)]
pub struct PodRef {
    /// The id of the PodSandbox: CNI_CONTAINERID.
    pub id: PodId,
    /// K8S_POD_NAME.
    pub name: String,
    /// K8S_POD_NAMESPACE.
    pub namespace: String,
    /// K8S_POD_UID.
    pub uid: String,
    /// hostPorts; those with `host_port` 0 ask for none and are passed over.
    pub port_mappings: Vec<PortMapping>,
    /// Limits, if the pod asks for some.
    pub bandwidth: Option<Bandwidth>,
    /// DNS of the pod, for plugins that want to know (capability `dns`).
    pub dns: Option<DnsConfig>,
    /// The node's pod CIDRs as UpdateRuntimeConfig told them (capability `ipRanges`); empty if unknown.
    pub pod_cidrs: Vec<IpNet>,
    /// The interfaces beside the default one, by their names in the namespace.
    pub further: Vec<String>,
    /// Who uses the interfaces.
    pub usage: InterfaceUsage,
}

/// Who uses the interfaces of a pod's namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InterfaceUsage {
    /// The pod's processes, in the namespace. A further interface that the plugins did not create is left out.
    Namespace,
    /// The guest, in their place. A further interface that the plugins did not create is left out.
    Guest,
    /// The guest, in their place. The pod is not attached if a further interface is missing.
    GuestNeedsAll,
}

/// Limits of a pod's traffic, in bits per second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bandwidth {
    /// To the pod.
    pub ingress_bps: Option<u64>,
    /// From the pod.
    pub egress_bps: Option<u64>,
}

impl PodRef {
    /// CNI_ARGS: the words of Kubernetes that plugins know.
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

    /// The arguments of the runtime by capability, in the form of the CNI conventions.
    pub(super) fn capabilities(&self) -> Map<String, Value> {
        let mut all = Map::new();
        let ports: Vec<Value> = self.port_mappings.iter().filter(|port| port.host_port != 0).map(port).collect();
        if !ports.is_empty() {
            all.insert("portMappings".to_owned(), ports.into());
        }
        if let Some(limits) = self.bandwidth.and_then(limits) {
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

/// A plugin that limits wants a burst as well: the largest one that it accepts, so that only the rate counts.
fn limits(bandwidth: Bandwidth) -> Option<BandwidthLimits> {
    const BURST: usize = u32::MAX as usize;
    let rate = |bps: Option<u64>| bps.filter(|bps| *bps > 0).map(|bps| usize::try_from(bps).unwrap_or(usize::MAX));
    let (ingress_rate, egress_rate) = (rate(bandwidth.ingress_bps), rate(bandwidth.egress_bps));
    (ingress_rate.is_some() || egress_rate.is_some()).then_some(BandwidthLimits {
        ingress_rate,
        ingress_burst: ingress_rate.map(|_| BURST),
        egress_rate,
        egress_burst: egress_rate.map(|_| BURST),
    })
}
