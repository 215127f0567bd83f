//! Lists the features that the protocol has gained since its version 1.0. A feature is never removed within a major version.

/// Something that requests may use and that processes of version 1.0 need not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PodFeature {
    /// Containers have the volumes that their image declares.
    AnonymousVolumes,
    /// Containers of engine `host` get the AppArmor profile that their OCI specification names.
    ApparmorProfiles,
    /// The running pod can be saved.
    Checkpoint,
    /// A command of Exec runs on when its client disconnects; no request needs this.
    DetachedExec,
    /// Commands run in the guest itself, for an operator.
    GuestShell,
    /// Files that kubelet makes for containers are copied in, and termination logs are returned.
    KubeletFiles,
    /// Containers connect to sockets of the node.
    SocketVolumes,
}

impl PodFeature {
    /// All features.
    pub const ALL: [PodFeature; 7] = [
        PodFeature::AnonymousVolumes,
        PodFeature::ApparmorProfiles,
        PodFeature::Checkpoint,
        PodFeature::DetachedExec,
        PodFeature::GuestShell,
        PodFeature::KubeletFiles,
        PodFeature::SocketVolumes,
    ];

    /// Returns the feature's name in the protocol.
    pub const fn name(self) -> &'static str {
        match self {
            PodFeature::AnonymousVolumes => "anonymous-volumes",
            PodFeature::ApparmorProfiles => "apparmor-profiles",
            PodFeature::Checkpoint => "checkpoint",
            PodFeature::DetachedExec => "detached-exec",
            PodFeature::GuestShell => "guest-shell",
            PodFeature::KubeletFiles => "kubelet-files",
            PodFeature::SocketVolumes => "socket-volumes",
        }
    }

    /// Returns what needs the feature, for messages: a plural.
    pub(crate) const fn purpose(self) -> &'static str {
        match self {
            PodFeature::AnonymousVolumes => "volumes that the image of a container declares",
            PodFeature::ApparmorProfiles => "AppArmor profiles of containers",
            PodFeature::Checkpoint => "checkpoints of a running pod",
            PodFeature::DetachedExec => "commands that outlive their client",
            PodFeature::GuestShell => "commands in the guest",
            PodFeature::KubeletFiles => "copies of files that kubelet makes for containers",
            PodFeature::SocketVolumes => "volumes of which a container sees the sockets",
        }
    }

    /// Returns the features that a process from before Hello may have.
    pub(crate) fn before_hello() -> impl Iterator<Item = PodFeature> {
        PodFeature::ALL.into_iter().filter(|feature| feature.since() == 1)
    }

    /// Returns the minor version that added the feature.
    pub(super) const fn since(self) -> u32 {
        match self {
            PodFeature::AnonymousVolumes
            | PodFeature::ApparmorProfiles
            | PodFeature::DetachedExec
            | PodFeature::SocketVolumes => 1,
            PodFeature::GuestShell => 2,
            PodFeature::Checkpoint => 3,
            PodFeature::KubeletFiles => 4,
        }
    }

    /// Returns the feature of this name, if this build knows it.
    pub(super) fn from_name(name: &str) -> Option<PodFeature> {
        PodFeature::ALL.into_iter().find(|feature| feature.name() == name)
    }
}

impl std::fmt::Display for PodFeature {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str(self.name())
    }
}

/// A set of features. The default is the empty set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PodFeatureSet(u32);

impl PodFeatureSet {
    /// The empty set: what every process of this major version has.
    pub const BASE: PodFeatureSet = PodFeatureSet(0);

    const fn bit(feature: PodFeature) -> u32 {
        1 << feature as u32
    }

    /// Returns the set of this feature alone.
    pub const fn only(feature: PodFeature) -> PodFeatureSet {
        PodFeatureSet(PodFeatureSet::bit(feature))
    }

    /// Returns whether the set contains the feature.
    pub const fn contains(self, feature: PodFeature) -> bool {
        self.0 & PodFeatureSet::bit(feature) != 0
    }

    /// Returns the features of either set.
    #[must_use]
    pub const fn union(self, other: PodFeatureSet) -> PodFeatureSet {
        PodFeatureSet(self.0 | other.0)
    }

    /// Returns the features that are not in the other set.
    #[must_use]
    pub const fn without(self, other: PodFeatureSet) -> PodFeatureSet {
        PodFeatureSet(self.0 & !other.0)
    }

    /// Returns the features in the order of [`PodFeature::ALL`].
    pub fn iter(self) -> impl Iterator<Item = PodFeature> {
        PodFeature::ALL.into_iter().filter(move |feature| self.contains(*feature))
    }
}

impl From<PodFeature> for PodFeatureSet {
    fn from(feature: PodFeature) -> Self {
        PodFeatureSet::only(feature)
    }
}

impl FromIterator<PodFeature> for PodFeatureSet {
    fn from_iter<I: IntoIterator<Item = PodFeature>>(features: I) -> Self {
        features.into_iter().fold(PodFeatureSet::default(), |set, feature| set.union(feature.into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_has_what_was_put_into_it() {
        let all: PodFeatureSet = PodFeature::ALL.into_iter().collect();
        assert_eq!(all.iter().collect::<Vec<_>>(), PodFeature::ALL);
        let rest = all.without(PodFeature::SocketVolumes.into());
        assert!(!rest.contains(PodFeature::SocketVolumes) && rest.contains(PodFeature::AnonymousVolumes));
        assert_eq!(rest.union(PodFeature::SocketVolumes.into()), all);
        for feature in PodFeature::ALL {
            assert_eq!(PodFeature::from_name(feature.name()), Some(feature));
        }
    }
}
