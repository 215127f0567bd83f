//! Defines the version and the features of the protocol between the daemon and a pod process, and what a daemon may do with a
//! process of another version: [`PodPeer`].
//!
//! A pod process outlives the daemon that started it, so either of them may be the newer one. A process of the same major
//! version is adopted, and requests that need a feature that it lacks are refused by name. A process of another major version
//! gets no request at all: it is followed by its record and stopped by a signal.

mod features;
mod requests;

pub use features::{PodFeature, PodFeatureSet};
pub use requests::GatedRequest;
pub(crate) use requests::PodRpc;

use crate::text::printable;
use nacelle_base::{Classify, FailureKind};
use nacelle_proto::pod as proto;
use std::fmt;

/// The maximum number of features of a process that are read; further ones are ignored.
const MAX_FEATURES: usize = 64;
/// The maximum number of characters of a program version.
const MAX_PROGRAM_VERSION: usize = 32;
/// The version of this program.
const PROGRAM_VERSION: &str = env!("CARGO_PKG_VERSION");

/// A version of the protocol. Another minor version adds features; another major version is incompatible.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PodProtocolVersion {
    /// The major version.
    pub major: u32,
    /// The minor version.
    pub minor: u32,
}

impl PodProtocolVersion {
    /// The version of this build.
    pub const CURRENT: PodProtocolVersion = PodProtocolVersion { major: 1, minor: 4 };
    /// The version of processes that do not implement Hello.
    pub const BEFORE_HELLO: PodProtocolVersion = PodProtocolVersion { major: 1, minor: 0 };
}

impl fmt::Display for PodProtocolVersion {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}.{}", self.major, self.minor)
    }
}

/// A request cannot be sent to a pod process of another version.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PodProtocolError {
    /// The process lacks a feature that the request needs.
    #[error(
        "the pod process ({peer}) lacks the feature {feature}, which {} need; replace the pod, so that it runs with this version",
        feature.purpose()
    )]
    MissingFeature {
        /// The feature.
        feature: PodFeature,
        /// The version of the process.
        peer: String,
    },
    /// The process has another major version.
    #[error(
        "the pod process ({peer}) is incompatible with this daemon, whose protocol is {}: its containers run on, but the pod \
         can only be stopped and removed; replace the pod, or install the version of Nacelle that started it",
        PodProtocolVersion::CURRENT
    )]
    OtherMajor {
        /// The version of the process.
        peer: String,
    },
}

impl Classify for PodProtocolError {
    fn kind(&self) -> FailureKind {
        // FailedPrecondition: a retry does not help as long as the pod is the same.
        FailureKind::Conflict
    }
}

/// The version and the features of the pod process at the other end of a connection, as far as it says them.
///
/// The process is not trusted. What it says can only reduce or enable the use of the protocol, and unknown features are ignored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodPeer {
    version: PodProtocolVersion,
    /// The version of its program; `None` if it does not implement Hello.
    program: Option<String>,
    features: PodFeatureSet,
}

impl PodPeer {
    /// Returns the peer that has sent this reply.
    pub fn from_hello(hello: &proto::HelloResponse) -> PodPeer {
        let named = hello.features.iter().take(MAX_FEATURES);
        PodPeer {
            version: PodProtocolVersion { major: hello.major, minor: hello.minor },
            program: Some(printable(&hello.program_version, MAX_PROGRAM_VERSION)),
            features: named.filter_map(|name| PodFeature::from_name(name)).collect(),
        }
    }

    /// Returns a peer from before Hello. `features` are those that are known from what its daemon has recorded of it.
    pub fn before_hello(features: PodFeatureSet) -> PodPeer {
        PodPeer { version: PodProtocolVersion::BEFORE_HELLO, program: None, features }
    }

    /// Adds features of a peer from before Hello that the caller knows from a record of the daemon. Changes no other peer.
    pub(crate) fn add_recorded_features(&mut self, recorded: PodFeatureSet) {
        if self.is_from_before_hello() {
            self.features = self.features.union(recorded);
        }
    }

    /// Returns the protocol version.
    pub fn version(&self) -> PodProtocolVersion {
        self.version
    }

    /// Returns whether both ends know the feature.
    pub fn has(&self, feature: PodFeature) -> bool {
        self.features.contains(feature)
    }

    /// Returns the features of this build that the process lacks.
    pub fn missing_features(&self) -> PodFeatureSet {
        PodFeature::ALL.into_iter().collect::<PodFeatureSet>().without(self.features)
    }

    /// Returns whether the process does not implement Hello.
    pub(crate) fn is_from_before_hello(&self) -> bool {
        self.program.is_none()
    }

    /// Returns whether the process may get requests.
    pub fn is_compatible(&self) -> bool {
        self.version.major == PodProtocolVersion::CURRENT.major
    }

    /// Returns whether the process is of the same version as this program and has all of its features.
    pub fn is_same_version(&self) -> bool {
        *self == PodPeer::from_hello(&hello())
    }

    /// Checks that the process may get a request that needs these features.
    ///
    /// # Errors
    /// The process has another major version, or lacks a feature.
    pub fn require(&self, needed: PodFeatureSet) -> Result<(), PodProtocolError> {
        if !self.is_compatible() {
            return Err(PodProtocolError::OtherMajor { peer: self.to_string() });
        }
        match needed.without(self.features).iter().next() {
            Some(feature) => Err(PodProtocolError::MissingFeature { feature, peer: self.to_string() }),
            None => Ok(()),
        }
    }
}

/// "version 0.1.0, protocol 1.1".
impl fmt::Display for PodPeer {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.program.as_deref() {
            Some("") => write!(out, "version unknown")?,
            Some(program) => write!(out, "version {program}")?,
            None => write!(out, "an early version")?,
        }
        write!(out, ", protocol {}", self.version)
    }
}

/// Returns the reply of this build to Hello.
pub fn hello() -> proto::HelloResponse {
    let PodProtocolVersion { major, minor } = PodProtocolVersion::CURRENT;
    proto::HelloResponse {
        major,
        minor,
        features: PodFeature::ALL.iter().map(|feature| feature.name().to_owned()).collect(),
        program_version: PROGRAM_VERSION.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(major: u32, minor: u32, features: &[&str]) -> PodPeer {
        let features = features.iter().map(|name| (*name).to_owned()).collect();
        PodPeer::from_hello(&proto::HelloResponse { major, minor, features, program_version: "9.8.7".into() })
    }

    #[test]
    fn a_process_of_this_build_has_everything() {
        let peer = PodPeer::from_hello(&hello());
        assert!(peer.is_same_version() && peer.is_compatible());
        assert_eq!(peer.require(PodFeature::ALL.into_iter().collect()), Ok(()));
        assert_eq!(peer.to_string(), format!("version {PROGRAM_VERSION}, protocol {}", PodProtocolVersion::CURRENT));
    }

    #[test]
    fn the_minor_version_is_that_of_the_latest_feature() {
        let latest = PodFeature::ALL.into_iter().map(PodFeature::since).max();
        assert_eq!(latest, Some(PodProtocolVersion::CURRENT.minor), "a new feature raises the minor version");
    }

    #[test]
    fn a_newer_minor_version_is_used_as_far_as_both_know() {
        let peer = said(1, 99, &["teleport", "socket-volumes", "anonymous-volumes-2"]);
        assert!(peer.is_compatible() && !peer.is_same_version());
        assert_eq!(peer.features, PodFeature::SocketVolumes.into());
        assert_eq!(peer.require(PodFeature::SocketVolumes.into()), Ok(()));
        let refused = peer.require(PodFeature::AnonymousVolumes.into()).unwrap_err();
        let text = refused.to_string();
        for part in ["anonymous-volumes", "9.8.7", "1.99", "replace the pod"] {
            assert!(text.contains(part), "{text}");
        }
        assert_eq!(refused.kind(), FailureKind::Conflict);
    }

    #[test]
    fn a_process_from_before_hello_has_only_what_was_recorded() {
        let mut peer = PodPeer::before_hello(PodFeatureSet::default());
        assert_eq!(peer.require(PodFeatureSet::default()), Ok(()));
        assert!(peer.require(PodFeature::SocketVolumes.into()).is_err());
        peer.add_recorded_features(PodFeature::SocketVolumes.into());
        assert_eq!(peer.require(PodFeature::SocketVolumes.into()), Ok(()));
        assert_eq!(peer.to_string(), "an early version, protocol 1.0");
        let mut newer = said(1, 1, &[]);
        newer.add_recorded_features(PodFeature::SocketVolumes.into());
        assert!(
            newer.require(PodFeature::SocketVolumes.into()).is_err(),
            "a record says nothing of a process that does"
        );
    }

    #[test]
    fn unknown_fields_of_a_newer_reply_are_ignored() {
        let mut bytes = prost::Message::encode_to_vec(&hello());
        // Field 15, three bytes; field 200, a number.
        bytes.extend([0x7a, 3, 1, 2, 3, 0xc0, 0x0c, 5]);
        let read = nacelle_proto::wire::decode::<proto::HelloResponse>(bytes.as_slice()).unwrap();
        assert!(PodPeer::from_hello(&read).is_same_version());
    }

    #[test]
    fn another_major_version_gets_no_request_whatever_it_claims() {
        let all: Vec<_> = PodFeature::ALL.iter().map(|feature| feature.name()).collect();
        for major in [0, 2, u32::MAX] {
            let peer = said(major, 1, &all);
            assert!(!peer.is_compatible());
            let text = peer.require(PodFeatureSet::default()).unwrap_err().to_string();
            assert!(text.contains(&format!("protocol {major}.1")) && text.contains("stopped and removed"), "{text}");
        }
    }

    #[test]
    fn what_a_process_says_is_bounded() {
        let many = vec!["x"; MAX_FEATURES].into_iter().chain(["socket-volumes"]).collect::<Vec<_>>();
        assert_eq!(said(1, 1, &many).features, PodFeatureSet::default());
        let long = proto::HelloResponse { program_version: "\u{1b}9".repeat(500), major: 1, ..Default::default() };
        assert!(PodPeer::from_hello(&long).to_string().chars().all(|c| !c.is_control()));
        assert!(PodPeer::from_hello(&long).to_string().len() < 100);
    }
}
