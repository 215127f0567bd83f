//! Owns: what can go wrong outside of CNI, and what it means to the caller.

use crate::cni::CniError;
use nacelle_base::task::TaskError;
use nacelle_base::{Classify, Kind};
use std::io;
use std::path::PathBuf;

/// A failure of the pod network.
#[derive(Debug, thiserror::Error)]
pub enum NetError {
    /// A step on a network namespace failed.
    #[error("cannot {what} the network namespace {path}", path = path.display())]
    Netns {
        /// The step: "create", "open", "enter", "remove", "list".
        what: &'static str,
        /// The file that names it.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The file is there but is no network namespace.
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
        /// What it was about: an interface, "the namespace".
        object: String,
        /// Why.
        source: io::Error,
    },
    /// A step on a tap failed.
    #[error("cannot {what} the tap {name}")]
    Tap {
        /// The step: "open", "create", "silence".
        what: &'static str,
        /// Its name.
        name: String,
        /// Why.
        source: io::Error,
    },
    /// The name cannot be an interface's.
    #[error("{name:?} is no interface name: 1 to 15 letters, digits, '.', '_' or '-' are expected")]
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
    /// The CNI plugins did not make an interface that the pod needs.
    #[error(
        "the CNI plugins made no interface {name} in the pod's network namespace, and the pod shall have one: a network that it asks for \
         is not there"
    )]
    NotMade {
        /// The interface.
        name: String,
    },
    /// A guest cannot have this interface: no Ethernet.
    #[error("interface {name} has no Ethernet address, so no guest can have it")]
    NotEthernet {
        /// The interface.
        name: String,
    },
    /// A guest's card cannot have this Ethernet address.
    #[error(
        "interface {name} has the Ethernet address {mac:02x?}, which no single station can have, so no guest can have it"
    )]
    BadMac {
        /// The interface.
        name: String,
        /// Its address.
        mac: [u8; 6],
    },
    /// A guest's card cannot have this MTU.
    #[error("interface {name} has an MTU of {mtu} bytes; with its addresses a guest needs at least {least}")]
    SmallMtu {
        /// The interface.
        name: String,
        /// Its MTU.
        mtu: u32,
        /// The smallest that is possible.
        least: u32,
    },
    /// There are more of them than a guest gets.
    #[error("the CNI plugins set {count} {what} in the pod's network namespace; a guest gets at most {limit}")]
    TooMany {
        /// "routes".
        what: &'static str,
        /// How many there are.
        count: usize,
        /// How many there may be.
        limit: usize,
    },
    /// The CNI plugins gave the pod no address.
    #[error("the CNI plugins gave interface {name} no address")]
    NoAddress {
        /// The interface.
        name: String,
    },
    /// A route that cannot be handed to a guest.
    #[error("the route to {destination} cannot be given to the guest: {why}")]
    Route {
        /// Where it leads.
        destination: String,
        /// What about it is not possible.
        why: &'static str,
    },
    /// A failure of the CNI chain.
    #[error(transparent)]
    Cni(#[from] CniError),
    /// A task of the runtime did not finish.
    #[error(transparent)]
    Task(#[from] TaskError),
}

impl Classify for NetError {
    fn kind(&self) -> Kind {
        match self {
            NetError::Netns { source, .. } => source.kind().into(),
            NetError::Netlink { .. } | NetError::Tap { .. } => Kind::Internal,
            NetError::Task(error) => error.kind(),
            NetError::NotNetns { .. } | NetError::NotMade { .. } => Kind::Conflict,
            NetError::BadName { .. } => Kind::Invalid,
            NetError::NoInterface { .. } | NetError::NotEthernet { .. } | NetError::NoAddress { .. } => {
                Kind::Unavailable
            }
            NetError::Route { .. } | NetError::BadMac { .. } | NetError::SmallMtu { .. } | NetError::TooMany { .. } => {
                Kind::Unsupported
            }
            NetError::Cni(error) => error.kind(),
        }
    }
}
