//! Puts the terminal of a command into raw mode, and reads its size.

use anyhow::Context;
use nix::sys::termios::{SetArg, Termios, cfmakeraw, tcgetattr, tcsetattr};

/// The terminal of standard input in raw mode: what is typed goes to the other end as it is. Dropping it restores the attributes.
pub(super) struct RawTerminal(Termios);

impl RawTerminal {
    pub(super) fn enter() -> anyhow::Result<RawTerminal> {
        let before = tcgetattr(std::io::stdin()).context("cannot read the attributes of the terminal")?;
        let mut raw = before.clone();
        cfmakeraw(&mut raw);
        tcsetattr(std::io::stdin(), SetArg::TCSANOW, &raw).context("cannot set the attributes of the terminal")?;
        Ok(RawTerminal(before))
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        // Errors are ignored: a terminal that is gone needs no reset.
        let _ = tcsetattr(std::io::stdin(), SetArg::TCSANOW, &self.0);
    }
}

/// Returns the columns and rows of the terminal of standard input; `None` if they are unknown.
pub(super) fn size() -> Option<(u16, u16)> {
    crate::sys::window_size(std::io::stdin()).ok().filter(|(columns, rows)| *columns != 0 && *rows != 0)
}
