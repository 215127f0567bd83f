//! Implements `nacelle log`: shows or changes which events the daemon logs.

use super::{connect_to_daemon, status_error};
use crate::config::Config;
use crate::log::LogFilter;
use nacelle_proto::node;
use nacelle_proto::node::node_client::NodeClient;
use std::process::ExitCode;

pub(super) fn run(config: &Config, filter: Option<LogFilter>) -> anyhow::Result<ExitCode> {
    let request = node::SetLogFilterRequest { filter: filter.map(|filter| filter.to_string()).unwrap_or_default() };
    let current = super::runtime()?.block_on(async {
        let mut client = NodeClient::new(connect_to_daemon(&config.paths.socket).await?);
        Ok::<_, anyhow::Error>(client.set_log_filter(request).await.map_err(status_error)?.into_inner().filter)
    })?;
    println!("{current}");
    Ok(ExitCode::SUCCESS)
}
