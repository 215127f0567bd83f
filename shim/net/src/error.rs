//! Defines the errors outside of CNI, and their classification for callers.

use crate::cni::CniError;
use nacelle_base::files::disk_advice;
use nacelle_base::task::TaskError;
use nacelle_base::{Classify, FailureKind};
use std::io;
use std::path::PathBuf;

/// A failure of the pod network.
#[derive(Debug, thiserror::Error)]
pub enum NetError {
    /// A step on a network namespace failed.
    #[error("cannot {what} the network namespace {path}{advice}", path = path.display(), advice = disk_advice(source))]
    Netns {
        /// The step: "create", "open", "enter", "remove", "list".
        what: &'static str,
        /// The file that names the namespace.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// The file exists but is not a network namespace.
    #[error("{path} is not a network namespace", path = path.display())]
    NotNetns {
        /// The file.
        path: PathBuf,
    },
    /// A netlink request failed.
    #[error("cannot {what} {object} by netlink")]
    Netlink {
        /// The request: "read the routes of".
        what: &'static str,
        /// The object of the request: an interface, "the namespace".
        object: String,
        /// The reason.
        source: io::Error,
    },
    /// A step on a tap failed.
    #[error("cannot {what} the tap {name}")]
    Tap {
        /// The step: "open", "create", "disable IPv6 of".
        what: &'static str,
        /// The tap's name.
        name: String,
        /// The reason.
        source: io::Error,
    },
    /// The name is not valid for an interface.
    #[error("{name:?} is not an interface name: 1 to 15 letters, digits, '.', '_' or '-' are expected")]
    BadName {
        /// The name.
        name: String,
    },
    /// The namespace has no such interface.
    #[error("no interface {name} in the pod's network namespace")]
    NoInterface {
        /// The interface.
        name: String,
    },
    /// The CNI plugins did not create an interface that the pod needs.
    #[error(
        "the CNI plugins created no interface {name} in the pod's network namespace, but a network that the pod requests needs it"
    )]
    MissingInterface {
        /// The interface.
        name: String,
    },
    /// The interface is not Ethernet, so a guest cannot have one like it.
    #[error("interface {name} has no Ethernet address, so no guest can have it")]
    NotEthernet {
        /// The interface.
        name: String,
    },
    /// The Ethernet address is not valid for a guest's network card.
    #[error(
        "interface {name} has the Ethernet address {mac:02x?}, which is not a unicast address, so no guest can have it"
    )]
    BadMac {
        /// The interface.
        name: String,
        /// The interface's Ethernet address.
        mac: [u8; 6],
    },
    /// The MTU is too small for a guest's network card.
    #[error("interface {name} has an MTU of {mtu} bytes; with its addresses a guest needs at least {least}")]
    SmallMtu {
        /// The interface.
        name: String,
        /// The interface's MTU.
        mtu: u32,
        /// The minimum.
        least: u32,
    },
    /// The pod has more objects of a kind than a guest can get.
    #[error("the CNI plugins set {count} {what} in the pod's network namespace; a guest gets at most {limit}")]
    TooMany {
        /// The kind of object, for example "routes".
        what: &'static str,
        /// The actual number.
        count: usize,
        /// The maximum.
        limit: usize,
    },
    /// The CNI plugins gave the pod no address.
    #[error("the CNI plugins gave interface {name} no address")]
    NoAddress {
        /// The interface.
        name: String,
    },
    /// A route cannot be configured in a guest.
    #[error("the route to {destination} cannot be configured in the guest: {why}")]
    Route {
        /// The route's destination.
        destination: String,
        /// The reason.
        why: &'static str,
    },
    /// A failure of the CNI chain.
    #[error(transparent)]
    Cni(#[from] CniError),
    /// A blocking task panicked or was cancelled.
    #[error(transparent)]
    Task(#[from] TaskError),
}

impl Classify for NetError {
    fn kind(&self) -> FailureKind {
        match self {
            NetError::Netns { source, .. } => source.kind().into(),
            NetError::Netlink { .. } | NetError::Tap { .. } => FailureKind::Internal,
            NetError::Task(error) => error.kind(),
            NetError::NotNetns { .. } | NetError::MissingInterface { .. } => FailureKind::Conflict,
            NetError::BadName { .. } => FailureKind::Invalid,
            NetError::NoInterface { .. } | NetError::NotEthernet { .. } | NetError::NoAddress { .. } => {
                FailureKind::Unavailable
            }
            NetError::Route { .. } | NetError::BadMac { .. } | NetError::SmallMtu { .. } | NetError::TooMany { .. } => {
                FailureKind::Unsupported
            }
            NetError::Cni(error) => error.kind(),
        }
    }
}
