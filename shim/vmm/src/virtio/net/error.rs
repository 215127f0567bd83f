//! Defines the errors of creating a network device.

use super::MAX_PAIRS;
use nacelle_base::{Classify, FailureKind};

/// A network device could not be created.
#[derive(Debug, thiserror::Error)]
pub enum NetError {
    /// The number of taps is not 1 to [`MAX_PAIRS`].
    #[error("cannot create a network device with {got} taps: it needs 1 to {MAX_PAIRS}")]
    Taps {
        /// The number of taps.
        got: usize,
    },
    /// The number of vhost-net files is neither 0 nor the number of taps.
    #[error("cannot create a network device with {got} files of vhost-net and {taps} taps: the numbers must be equal")]
    Vhosts {
        /// The number of vhost-net files.
        got: usize,
        /// The number of taps.
        taps: usize,
    },
    /// The tap does not have exactly the flags `IFF_TAP | IFF_NO_PI | IFF_VNET_HDR`, and `IFF_MULTI_QUEUE` if there are several taps.
    #[error("the tap has the flags {got:#x}, but needs {needed:#x}")]
    TapFlags {
        /// The flags of the tap.
        got: u32,
        /// The required flags.
        needed: u32,
    },
    /// A system call failed.
    #[error("cannot {what}")]
    System {
        /// The operation, as an infinitive.
        what: &'static str,
        /// The cause.
        source: std::io::Error,
    },
}

impl Classify for NetError {
    fn kind(&self) -> FailureKind {
        match self {
            NetError::Taps { .. } | NetError::Vhosts { .. } | NetError::TapFlags { .. } => FailureKind::Invalid,
            NetError::System { source, .. } => source.kind().into(),
        }
    }
}
