//! Implements `nacelle pods`: shows what the pods of a node use and cost. The data comes from the daemon's verbose CRI statuses.

use super::ExitStatus;
use super::daemon::{connect, status_error};
use super::output::{OutputArgument, TableView};
use super::owed_deletes::OwedDeleteView;
use super::table::format_table;
use super::units::{UNKNOWN, format_age, format_bytes, format_seconds, format_time};
use crate::config::Config;
use nacelle_proto::cri;
use nacelle_proto::cri::runtime_service_client::RuntimeServiceClient;
use serde::Serialize;
use serde_json::Value;
use std::time::Instant;
use tonic::transport::Channel;

/// The number of characters of an id that tables show.
pub(super) const SHORT: usize = 13;

pub(super) type CriClient = RuntimeServiceClient<Channel>;

/// The pods of a node.
#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(super) struct PodList {
    pods: Vec<PodView>,
    owed_deletes: Vec<OwedDeleteView>,
}

#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(super) struct PodView {
    pub(super) id: String,
    pub(super) namespace: String,
    pub(super) name: String,
    state: &'static str,
    pub(super) handler: String,
    created_at: Option<String>,
    running_containers: usize,
    containers: usize,
    /// The version of the pod's process, if it is not the daemon's.
    other_version: Option<String>,
    /// What the containers have used, as the guest reports.
    pub(super) usage: UsageView,
    /// What the VM and its processes have used on the node.
    pub(super) cost: UsageView,
    #[serde(skip)]
    created_nanos: i64,
    #[serde(skip)]
    pub(super) read_at: Instant,
}

/// `None`: not known.
#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(super) struct UsageView {
    pub(super) cpu_seconds: Option<f64>,
    pub(super) memory_bytes: Option<u64>,
}

/// What the daemon reports about a pod beside CRI's status.
pub(super) struct PodInfo {
    pub(super) pod: Value,
    pub(super) accounts: Value,
}

pub(super) fn run(config: &Config, output: OutputArgument) -> anyhow::Result<ExitStatus> {
    let list = super::runtime()?.block_on(async {
        let mut client = RuntimeServiceClient::new(connect(&config.paths.socket).await?);
        PodList::read(&mut client, config).await
    })?;
    output.print(&list)?;
    Ok(ExitStatus::Success)
}

impl PodList {
    pub(super) async fn read(client: &mut CriClient, config: &Config) -> anyhow::Result<PodList> {
        let listed = client.list_pod_sandbox(cri::ListPodSandboxRequest::default()).await.map_err(status_error)?;
        let mut pods = Vec::new();
        for pod in listed.into_inner().items {
            // A pod without a status was removed after it was listed.
            let Ok((status, info)) = pod_status(client, &pod.id).await else { continue };
            pods.push(PodView::new(pod, &status, &info));
        }
        let owed = nacelle_net::NodeNetworks::new(config.network_options()).owed_deletes().await?;
        Ok(PodList { pods, owed_deletes: owed.iter().map(OwedDeleteView::new).collect() })
    }

    pub(super) fn pods(&self) -> &[PodView] {
        &self.pods
    }

    /// Returns the ids of the pods.
    pub(super) fn ids(&self) -> impl Iterator<Item = &str> {
        self.pods.iter().map(|pod| pod.id.as_str())
    }
}

pub(super) async fn pod_status(
    client: &mut CriClient,
    id: &str,
) -> anyhow::Result<(cri::PodSandboxStatusResponse, PodInfo)> {
    let request = cri::PodSandboxStatusRequest { pod_sandbox_id: id.to_owned(), verbose: true };
    let response = client.pod_sandbox_status(request).await.map_err(status_error)?.into_inner();
    let parse = |key: &str| response.info.get(key).and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default();
    let info = PodInfo { pod: parse("info"), accounts: parse("accounts") };
    Ok((response, info))
}

impl PodView {
    fn new(pod: cri::PodSandbox, status: &cri::PodSandboxStatusResponse, info: &PodInfo) -> PodView {
        let runs = |status: &&cri::ContainerStatus| status.state() == cri::ContainerState::ContainerRunning;
        let state = match pod.state() {
            cri::PodSandboxState::SandboxReady => "Ready",
            cri::PodSandboxState::SandboxNotready => "NotReady",
        };
        let metadata = pod.metadata.unwrap_or_default();
        PodView {
            id: pod.id,
            namespace: metadata.namespace,
            name: metadata.name,
            state,
            handler: info.pod["handler"].as_str().unwrap_or_default().to_owned(),
            created_at: format_time(pod.created_at),
            running_containers: status.containers_statuses.iter().filter(runs).count(),
            containers: status.containers_statuses.len(),
            other_version: other_version(&info.pod["process"]),
            usage: UsageView::new(&info.accounts["containers"]),
            cost: UsageView::new(&info.accounts["machine"]),
            created_nanos: pod.created_at,
            read_at: Instant::now(),
        }
    }

    fn other_version_line(&self) -> Option<String> {
        let version = self.other_version.as_deref()?;
        Some(format!("the process of pod {} is of another version: {version}", short_id(&self.id)))
    }

    fn row(&self) -> [String; 10] {
        let seconds = |usage: &UsageView| usage.cpu_seconds.map_or(UNKNOWN.to_owned(), format_seconds);
        let bytes = |usage: &UsageView| usage.memory_bytes.map_or(UNKNOWN.to_owned(), format_bytes);
        [
            short_id(&self.id).to_owned(),
            format!("{}/{}", self.namespace, self.name),
            self.state.to_owned(),
            self.handler.clone(),
            format_age(self.created_nanos),
            format!("{}/{}", self.running_containers, self.containers),
            seconds(&self.usage),
            bytes(&self.usage),
            seconds(&self.cost),
            bytes(&self.cost),
        ]
    }
}

/// Returns the version of a pod's process if it is not the daemon's.
fn other_version(process: &Value) -> Option<String> {
    let version = process["version"].as_str().filter(|_| process["isSameVersion"] == false)?;
    Some(match process["isCompatible"] == false {
        true => format!("{version}; it can only be stopped and removed"),
        false => version.to_owned(),
    })
}

impl UsageView {
    fn new(account: &Value) -> UsageView {
        UsageView {
            cpu_seconds: account["cpuNanos"].as_u64().map(|nanos| nanos as f64 / 1e9),
            memory_bytes: account["memoryBytes"].as_u64(),
        }
    }
}

impl TableView for PodList {
    fn table(&self) -> String {
        let mut rows = vec![
            [
                "POD ID",
                "NAMESPACE/NAME",
                "STATE",
                "HANDLER",
                "AGE",
                "CONTAINERS",
                "CPU",
                "MEMORY",
                "COST CPU",
                "COST MEMORY",
            ]
            .map(str::to_owned),
        ];
        rows.extend(self.pods.iter().map(PodView::row));
        let other_versions = self.pods.iter().filter_map(PodView::other_version_line);
        let owed = self.owed_deletes.iter().map(OwedDeleteView::line);
        format_table(&rows) + &other_versions.chain(owed).map(|line| line + "\n").collect::<String>()
    }
}

pub(super) fn short_id(id: &str) -> &str {
    id.get(..SHORT).unwrap_or(id)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_has_resource_use_and_overhead_of_pods() {
        let accounts = serde_json::json!({
            "containers": {"cpuNanos": 1_230_000_000, "memoryBytes": 3 << 20}, "machine": null,
        });
        let info = PodInfo { pod: serde_json::json!({"handler": "nacelle"}), accounts };
        let metadata =
            cri::PodSandboxMetadata { name: "web".into(), namespace: "default".into(), ..Default::default() };
        let pod = cri::PodSandbox { id: "0123456789abcdef".into(), metadata: Some(metadata), ..Default::default() };
        let view = PodView::new(pod, &cri::PodSandboxStatusResponse::default(), &info);
        assert_eq!(view.row().join(" "), "0123456789abc default/web Ready nacelle - 0/0 1.23 s 3.0 MiB - -");
        let list = PodList { pods: vec![view], owed_deletes: vec![] };
        let columns = |name: &str| list.table().lines().map(|line| line.find(name)).collect::<Vec<_>>();
        assert_eq!((columns("NAMESPACE/")[0], columns("default/")[1]), (Some(15), Some(15)));
        let json = serde_json::to_value(&list).unwrap();
        assert!(json["pods"][0]["otherVersion"].is_null() && list.table().lines().count() == 2, "{json}");
        let usage = serde_json::json!({"cpuSeconds": 1.23, "memoryBytes": 3 << 20});
        assert_eq!((&json["pods"][0]["usage"], &json["pods"][0]["id"]), (&usage, &"0123456789abcdef".into()));
    }
    #[test]
    fn a_process_of_another_version_is_named_below_the_table() {
        let process = |same: bool, compatible: bool| {
            let version = "version 9.8.7, protocol 1.99";
            serde_json::json!({"version": version, "isSameVersion": same, "isCompatible": compatible})
        };
        for (process, expected) in [
            (serde_json::Value::Null, None),
            (process(true, true), None),
            (process(false, true), Some("version 9.8.7, protocol 1.99")),
            (process(false, false), Some("version 9.8.7, protocol 1.99; it can only be stopped and removed")),
        ] {
            let info = PodInfo { pod: serde_json::json!({ "process": process }), accounts: Value::Null };
            let pod = cri::PodSandbox { id: "0123456789abcdef".into(), ..Default::default() };
            let view = PodView::new(pod, &cri::PodSandboxStatusResponse::default(), &info);
            assert_eq!(view.other_version.as_deref(), expected);
            let list = PodList { pods: vec![view], owed_deletes: vec![] };
            let line =
                expected.map(|version| format!("the process of pod 0123456789abc is of another version: {version}"));
            assert_eq!(list.table().lines().nth(2), line.as_deref());
        }
    }
}
