//! Implements `nacelle templates`: lists, builds and drops the templates from which VMs start, through the daemon.

use super::table::format_table;
use super::{connect_to_daemon, status_error};
use crate::config::Config;
use clap::Subcommand;
use nacelle_proto::node;
use nacelle_proto::node::node_client::NodeClient;
use std::process::ExitCode;

#[derive(Subcommand)]
pub(super) enum TemplateCommand {
    /// Lists the templates, and how many pods started from one.
    Ls,
    /// Builds the templates of all handlers, or of one, if they are missing, and waits for them.
    Build {
        /// The handler.
        handler: Option<String>,
    },
    /// Removes all templates, or one. A template is built again when a pod wants it.
    Drop {
        /// The key of the template.
        key: Option<String>,
    },
}

pub(super) fn run(config: &Config, command: TemplateCommand) -> anyhow::Result<ExitCode> {
    let text = super::runtime()?.block_on(async {
        let mut client = NodeClient::new(connect_to_daemon(&config.paths.socket).await?);
        let keys = match command {
            TemplateCommand::Ls => {
                let listed = client.list_templates(node::ListTemplatesRequest {}).await.map_err(status_error)?;
                return Ok::<_, anyhow::Error>(list(listed.into_inner()));
            }
            TemplateCommand::Build { handler } => {
                let request = node::BuildTemplatesRequest { handler: handler.unwrap_or_default() };
                client.build_templates(request).await.map_err(status_error)?.into_inner().keys
            }
            TemplateCommand::Drop { key } => {
                let request = node::DropTemplatesRequest { key: key.unwrap_or_default() };
                client.drop_templates(request).await.map_err(status_error)?.into_inner().keys
            }
        };
        Ok(keys.iter().map(|key| format!("{key}\n")).collect())
    })?;
    print!("{text}");
    Ok(ExitCode::SUCCESS)
}

fn list(listed: node::ListTemplatesResponse) -> String {
    let node::ListTemplatesResponse { templates, hits, misses } = listed;
    let mut rows = vec![["KEY", "VCPUS", "MEMORY", "NAMESPACE", "TAKES", "PODS", "STATE"].map(str::to_owned)];
    rows.extend(templates.into_iter().map(|template| {
        let vcpus = match template.max_vcpus {
            max if max > template.vcpus => format!("{} to {max}", template.vcpus),
            _ => template.vcpus.to_string(),
        };
        let namespace = if template.namespace.is_empty() { "all".to_owned() } else { template.namespace };
        [
            template.key,
            vcpus,
            format!("{}Mi", template.memory_mib),
            namespace,
            format!("{}Mi", template.bytes >> 20),
            template.uses.to_string(),
            template.state,
        ]
    }));
    let mut misses: Vec<_> = misses.into_iter().collect();
    misses.sort();
    let count: u64 = misses.iter().map(|(_, count)| count).sum();
    let reasons: Vec<_> = misses.iter().map(|(reason, count)| format!("{count} {reason}")).collect();
    let reasons = if reasons.is_empty() { String::new() } else { format!(" ({})", reasons.join(", ")) };
    format!("{}\n{hits} pods started from a template, {count} booted{reasons}\n", format_table(&rows))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_tells_hits_and_misses() {
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
        let text = list(node::ListTemplatesResponse { templates: vec![template], hits: 7, misses });
        assert!(text.contains("1 to 4") && text.contains("256Mi") && text.contains("36Mi"), "{text}");
        let last = "\n7 pods started from a template, 3 booted (2 not built yet, 1 the memory is in huge pages)\n";
        assert!(text.ends_with(last), "{text}");
        assert!(list(node::ListTemplatesResponse::default()).ends_with("\n0 pods started from a template, 0 booted\n"));
    }
}
