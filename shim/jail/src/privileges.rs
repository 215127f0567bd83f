//! Drops the privileges of a process: user, groups, capabilities, and what a program could give it. Only the first thread may call it,
//! while it is the only one.

use crate::sys;
use nix::sys::prctl;
use nix::unistd::{Gid, Uid, setgroups, setresgid, setresuid};
use std::io;

/// A step that failed.
pub(crate) struct FailedStep {
    /// The step: "drop the capabilities", "change the user".
    pub(crate) what: &'static str,
    /// The cause.
    pub(crate) source: io::Error,
}

/// Changes the user, if there is one, and keeps only these capabilities, one bit each. Resets the dumpable flag and the parent-death
/// signal.
pub(crate) fn drop_privileges(user: Option<u32>, capabilities: u64) -> Result<(), FailedStep> {
    let failed = |what| move |source| FailedStep { what, source };
    prctl::set_no_new_privs().map_err(|errno| failed("set no_new_privs")(errno.into()))?;
    // Needs CAP_SETPCAP, which a change of the user takes away.
    sys::restrict_bounding_set(capabilities).map_err(failed("drop the capabilities"))?;
    if let Some(user) = user {
        change_user(user).map_err(|errno| failed("change the user")(errno.into()))?;
    }
    sys::set_capabilities(capabilities).map_err(failed("drop the capabilities"))
}

/// Sets the real, effective and saved ids of user and group, and removes all other groups. The file-system ids follow.
fn change_user(user: u32) -> nix::Result<()> {
    let (user, group) = (Uid::from_raw(user), Gid::from_raw(user));
    setgroups(&[])?;
    setresgid(group, group, group)?;
    setresuid(user, user, user)
}
