//! Implements `nacelle log`: shows or changes which events the daemon logs.

use super::ExitStatus;
use super::daemon::{connect, status_error};
use super::output::{OutputArgument, TableView};
use crate::config::Config;
use crate::log::LogFilter;
use nacelle_proto::node;
use nacelle_proto::node::node_client::NodeClient;
use serde::Serialize;

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(super) struct LogFilterView {
    filter: String,
}

impl TableView for LogFilterView {
    fn table(&self) -> String {
        format!("{}\n", self.filter)
    }
}

pub(super) fn run(config: &Config, filter: Option<LogFilter>, output: OutputArgument) -> anyhow::Result<ExitStatus> {
    let request = node::SetLogFilterRequest { filter: filter.map(|filter| filter.to_string()).unwrap_or_default() };
    let filter = super::runtime()?.block_on(async {
        let mut client = NodeClient::new(connect(&config.paths.socket).await?);
        Ok::<_, anyhow::Error>(client.set_log_filter(request).await.map_err(status_error)?.into_inner().filter)
    })?;
    output.print(&LogFilterView { filter })?;
    Ok(ExitStatus::Success)
}
