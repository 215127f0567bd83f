//! Resolves paths in the root of a container.
//!
//! Nothing outside the root is reached, whatever links the image or a volume has: every path is opened beneath the root with
//! openat2(2), `RESOLVE_IN_ROOT` and `RESOLVE_NO_MAGICLINKS`. `bind_mounts` decides which mounts of a specification are allowed,
//! and `mount_points` makes what is missing and returns paths without links, which libcontainer requires. Both run before the
//! container's program starts, and both follow links with the same function, `follow_links`.

mod bind_mounts;
mod copy_tree;
mod error;
mod mount_points;
mod root_dir;

pub use bind_mounts::{check_bind_mounts, check_proc_mounts, is_bind_mount, proc_mount_points, take_late_mounts};
pub use copy_tree::{CopyBudget, CopyError, copy_tree};
pub(crate) use error::root_error;
pub use error::{RootError, RootPathError};
pub use mount_points::{EntryKind, MountPoints, Owner};
pub use root_dir::{RootDir, find, read_file};
