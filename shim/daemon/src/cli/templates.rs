//! Implements `nacelle templates`: lists, builds and removes the templates from which VMs start, through the daemon.

use super::ExitStatus;
use super::daemon::{connect, status_error};
use super::output::{OutputArgument, TableView};
use super::table::format_table;
use super::units::format_bytes;
use crate::config::Config;
use clap::Subcommand;
use nacelle_proto::node;
use nacelle_proto::node::node_client::NodeClient;
use serde::Serialize;
use std::collections::BTreeMap;

#[derive(Subcommand)]
pub(super) enum TemplateCommand {
    /// Lists the templates, and how many pods started from one.
    #[command(alias = "list")]
    Ls {
        #[command(flatten)]
        output: OutputArgument,
    },
    /// Builds the templates of all handlers, or of one, if they are missing, and waits for them.
    Build {
        /// The handler.
        handler: Option<String>,
        #[command(flatten)]
        output: OutputArgument,
    },
    /// Removes all templates, or one. A template is built again when a pod wants it.
    #[command(aliases = ["delete", "remove", "drop"])]
    Rm {
        /// The key of the template.
        key: Option<String>,
        #[command(flatten)]
        output: OutputArgument,
    },
}

/// The templates of a node, and what they were used for since the daemon began.
#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(super) struct TemplateList {
    templates: Vec<TemplateView>,
    started_pods: u64,
    booted_pods: u64,
    /// The number of booted pods by reason.
    boot_reasons: BTreeMap<String, u64>,
}

#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
struct TemplateView {
    key: String,
    state: String,
    vcpus: u32,
    max_vcpus: u32,
    memory_bytes: u64,
    /// `None`: pods of all namespaces start from it.
    namespace: Option<String>,
    size_bytes: u64,
    pods: u64,
}

/// The keys of templates that were built or removed.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(super) struct TemplateKeys {
    keys: Vec<String>,
}

impl TableView for TemplateKeys {
    fn table(&self) -> String {
        self.keys.iter().map(|key| format!("{key}\n")).collect()
    }
}

pub(super) fn run(config: &Config, command: TemplateCommand) -> anyhow::Result<ExitStatus> {
    super::runtime()?.block_on(async {
        let mut client = NodeClient::new(connect(&config.paths.socket).await?);
        match command {
            TemplateCommand::Ls { output } => {
                let listed = client.list_templates(node::ListTemplatesRequest {}).await.map_err(status_error)?;
                output.print(&TemplateList::new(listed.into_inner()))
            }
            TemplateCommand::Build { handler, output } => {
                let request = node::BuildTemplatesRequest { handler: handler.unwrap_or_default() };
                let keys = client.build_templates(request).await.map_err(status_error)?.into_inner().keys;
                output.print(&TemplateKeys { keys })
            }
            TemplateCommand::Rm { key, output } => {
                let request = node::DropTemplatesRequest { key: key.unwrap_or_default() };
                let keys = client.drop_templates(request).await.map_err(status_error)?.into_inner().keys;
                output.print(&TemplateKeys { keys })
            }
        }
    })?;
    Ok(ExitStatus::Success)
}

impl TemplateList {
    pub(super) fn new(listed: node::ListTemplatesResponse) -> TemplateList {
        TemplateList {
            templates: listed.templates.into_iter().map(TemplateView::new).collect(),
            started_pods: listed.hits,
            booted_pods: listed.misses.values().sum(),
            boot_reasons: listed.misses.into_iter().collect(),
        }
    }
}

impl TemplateView {
    fn new(template: node::Template) -> TemplateView {
        TemplateView {
            key: template.key,
            state: template.state,
            vcpus: template.vcpus,
            max_vcpus: template.max_vcpus.max(template.vcpus),
            memory_bytes: u64::from(template.memory_mib) << 20,
            namespace: Some(template.namespace).filter(|namespace| !namespace.is_empty()),
            size_bytes: template.bytes,
            pods: template.uses,
        }
    }

    fn row(&self) -> [String; 7] {
        let vcpus = match self.max_vcpus {
            max if max > self.vcpus => format!("{} to {max}", self.vcpus),
            _ => self.vcpus.to_string(),
        };
        [
            self.key.clone(),
            vcpus,
            format_bytes(self.memory_bytes),
            self.namespace.clone().unwrap_or_else(|| "all".to_owned()),
            format_bytes(self.size_bytes),
            self.pods.to_string(),
            self.state.clone(),
        ]
    }
}

impl TableView for TemplateList {
    fn table(&self) -> String {
        let mut rows = vec![["KEY", "VCPUS", "MEMORY", "NAMESPACE", "SIZE", "PODS", "STATE"].map(str::to_owned)];
        rows.extend(self.templates.iter().map(TemplateView::row));
        let reasons: Vec<_> = self.boot_reasons.iter().map(|(reason, count)| format!("{count} {reason}")).collect();
        let reasons = if reasons.is_empty() { String::new() } else { format!(" ({})", reasons.join(", ")) };
        let (started, booted) = (self.started_pods, self.booted_pods);
        format!("{}\n{started} pods started from a template, {booted} booted{reasons}\n", format_table(&rows))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_has_templates_and_counts() {
        let template = node::Template {
            key: "0".repeat(16),
            state: "ready".into(),
            vcpus: 1,
            max_vcpus: 4,
            memory_mib: 256,
            bytes: 36 << 20,
            uses: 7,
            ..Default::default()
        };
        let misses = [("not built yet".to_owned(), 2), ("the memory is in huge pages".to_owned(), 1)].into();
        let list = TemplateList::new(node::ListTemplatesResponse { templates: vec![template], hits: 7, misses });
        let text = list.table();
        assert!(text.contains("1 to 4") && text.contains("256.0 MiB") && text.contains("36.0 MiB"), "{text}");
        let last = "\n7 pods started from a template, 3 booted (2 not built yet, 1 the memory is in huge pages)\n";
        assert!(text.ends_with(last), "{text}");
        let json = serde_json::to_value(&list).unwrap();
        assert_eq!(json["templates"][0]["memoryBytes"], 256 << 20);
        assert_eq!((&json["bootedPods"], &json["bootReasons"]["not built yet"]), (&3.into(), &2.into()));
        let empty = TemplateList::new(node::ListTemplatesResponse::default());
        assert!(empty.table().ends_with("\n0 pods started from a template, 0 booted\n"));
    }
}
