//! Implements the RPCs about the runtime itself.

use super::Cri;
use super::status::{refuse, status};
use crate::config::{CgroupDriver, HostNamespaces};
use crate::lifecycle::BootFiles;
use nacelle_base::machine::EngineKind;
use nacelle_base::task::run_blocking_or_panic;
use nacelle_base::{Chain, FailureKind};
use nacelle_proto::cri;
use serde_json::json;
use std::collections::HashMap;
use tonic::Status;

/// Version of kubelet's runtime API in the first field of Version; it has never changed.
const KUBE_API: &str = "0.1.0";
/// The version of CRI.
const CRI_API: &str = "v1";

impl Cri {
    pub(super) async fn on_version(&self, _: cri::VersionRequest) -> Result<cri::VersionResponse, Status> {
        Ok(cri::VersionResponse {
            version: KUBE_API.to_owned(),
            runtime_name: "nacelle".to_owned(),
            runtime_version: env!("CARGO_PKG_VERSION").to_owned(),
            runtime_api_version: CRI_API.to_owned(),
        })
    }

    pub(super) async fn on_status(&self, request: cri::StatusRequest) -> Result<cri::StatusResponse, Status> {
        let services = self.node.services();
        let network = match services.networks.status().await {
            Ok(()) => condition("NetworkReady", None),
            Err(error) => condition("NetworkReady", Some(("NetworkPluginNotReady", Chain(&error).to_string()))),
        };
        let missing = find_unusable_file(services).await;
        let runtime = match missing {
            None => condition("RuntimeReady", None),
            Some(why) => condition("RuntimeReady", Some(("GuestMissing", why))),
        };
        // The features of the handlers that CRI can announce. The empty name is the default handler.
        let names = std::iter::once(String::new()).chain(services.config.handlers.keys().cloned());
        let features = cri::RuntimeHandlerFeatures { recursive_read_only_mounts: true, user_namespaces: true };
        Ok(cri::StatusResponse {
            status: Some(cri::RuntimeStatus { conditions: vec![runtime, network] }),
            info: if request.verbose { self.info() } else { HashMap::new() },
            runtime_handlers: names.map(|name| cri::RuntimeHandler { features: Some(features), name }).collect(),
            features: Some(cri::RuntimeFeatures {
                supplemental_groups_policy: true,
                mount_options: true,
                // Of the node's pods with hostNetwork, if it takes any.
                user_namespaces_host_network: services.config.sandbox.host_namespaces == HostNamespaces::RunOnHost,
            }),
        })
    }

    fn info(&self) -> HashMap<String, String> {
        let services = self.node.services();
        let info = json!({
            "version": env!("CARGO_PKG_VERSION"),
            "engine": {
                "fitting": services.engine.fitting, "qemu": services.engine.qemu, "accelerator": services.engine.accelerator,
            },
            "config": services.config,
            "pods": self.node.views().len(),
        });
        HashMap::from([("config".to_owned(), info.to_string())])
    }

    pub(super) async fn on_runtime_config(
        &self,
        _: cri::RuntimeConfigRequest,
    ) -> Result<cri::RuntimeConfigResponse, Status> {
        let driver = match self.node.services().config.sandbox.cgroup_driver {
            CgroupDriver::Cgroupfs => cri::CgroupDriver::Cgroupfs,
            CgroupDriver::Systemd => cri::CgroupDriver::Systemd,
        };
        Ok(cri::RuntimeConfigResponse { linux: Some(cri::LinuxRuntimeConfiguration { cgroup_driver: driver.into() }) })
    }

    pub(super) async fn on_update_runtime_config(
        &self,
        request: cri::UpdateRuntimeConfigRequest,
    ) -> Result<cri::UpdateRuntimeConfigResponse, Status> {
        let config = request.runtime_config.and_then(|config| config.network_config).unwrap_or_default();
        let parsed = config.pod_cidr.split(',').filter(|cidr| !cidr.is_empty()).map(|cidr| {
            cidr.trim().parse().map_err(|_no_network| {
                let message = format!(
                    "runtime_config.network_config.pod_cidr is {cidr:?}: networks like 10.0.0.0/24, divided by commas, \
                     are allowed"
                );
                refuse(FailureKind::Invalid, &message)
            })
        });
        let cidrs: Vec<ipnet::IpNet> = parsed.collect::<Result<_, _>>()?;
        if !cidrs.is_empty() {
            self.node.set_pod_cidrs(cidrs).await.map_err(status)?;
        }
        Ok(cri::UpdateRuntimeConfigResponse {})
    }
}

/// Returns what is missing or damaged if no pod of the default handler can start.
async fn find_unusable_file(services: &crate::lifecycle::NodeServices) -> Option<String> {
    let (name, handler) = services.config.handler("")?;
    let engine = handler.engine.or(services.engine.fitting);
    if engine == EngineKind::Host {
        let agent = &services.engine.agent;
        let is_missing = tokio::fs::metadata(agent).await.is_err();
        return is_missing.then(|| format!("handler {name}: the agent {} does not exist; install it", agent.display()));
    }
    let files = BootFiles {
        engine,
        qemu: services.engine.qemu.clone(),
        kernel: handler.kernel.clone(),
        initrd: handler.initrd.clone(),
        memory_mib: u32::try_from(handler.memory_mib).unwrap_or(u32::MAX),
    };
    let checked = run_blocking_or_panic(move || files.check()).await;
    checked.err().map(|error| format!("handler {name}: {}", Chain(&error)))
}

fn condition(name: &str, problem: Option<(&str, String)>) -> cri::RuntimeCondition {
    let status = problem.is_none();
    let (reason, message) = problem.unwrap_or_default();
    cri::RuntimeCondition { r#type: name.to_owned(), status, reason: reason.to_owned(), message }
}
