//! Owns: what can go wrong when a network device is made.

use super::MAX_PAIRS;
use nacelle_base::{Classify, Kind};

/// A network device could not be made.
#[derive(Debug, thiserror::Error)]
pub enum NetError {
    /// A device has 1 to [`MAX_PAIRS`] taps.
    #[error("{got} taps for a network device: it takes 1 to {MAX_PAIRS}")]
    Taps {
        /// Given.
        got: usize,
    },
    /// vhost-net is for all taps or none.
    #[error("{got} handles of vhost-net for {taps} taps")]
    Vhosts {
        /// Given.
        got: usize,
        /// The taps.
        taps: usize,
    },
    /// A tap is `IFF_TAP | IFF_NO_PI | IFF_VNET_HDR`, and `IFF_MULTI_QUEUE` if there are several.
    #[error("the tap has flags {got:#x}, {needed:#x} are needed")]
    TapFlags {
        /// Of the tap.
        got: u32,
        /// Needed.
        needed: u32,
    },
    /// The kernel refused.
    #[error("cannot {what}")]
    System {
        /// What was attempted.
        what: &'static str,
        /// Why not.
        source: std::io::Error,
    },
}

impl Classify for NetError {
    fn kind(&self) -> Kind {
        match self {
            NetError::Taps { .. } | NetError::Vhosts { .. } | NetError::TapFlags { .. } => Kind::Invalid,
            NetError::System { source, .. } => source.kind().into(),
        }
    }
}
