//! Sets the size of a process's terminal.

use super::error::AgentError;
use super::pod::AgentPod;
use crate::sys;

impl AgentPod {
    /// Sets the size of a process's terminal, also of a process that has ended. Sizes above 65,535 are cut to that.
    pub fn resize_terminal(&self, id: &str, exec_id: &str, columns: u32, rows: u32) -> Result<(), AgentError> {
        let process = self.find_process(id, exec_id)?;
        let saturate = |number: u32| u16::try_from(number).unwrap_or(u16::MAX);
        let terminal = process.stdio.terminal.as_ref().ok_or_else(|| AgentError::NoTerminal { id: id.to_owned() })?;
        sys::set_window_size(terminal, saturate(columns), saturate(rows)).map_err(AgentError::io("size a terminal", id))
    }
}
