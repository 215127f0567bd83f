//! Computes the capabilities of a container.

use nacelle_model::capability;
use nacelle_model::container::ContainerConfig;

/// The default capabilities, the same as in other runtimes, so that images behave alike.
const DEFAULT: [&str; 14] = [
    "CHOWN",
    "DAC_OVERRIDE",
    "FSETID",
    "FOWNER",
    "MKNOD",
    "NET_RAW",
    "SETGID",
    "SETUID",
    "SETFCAP",
    "SETPCAP",
    "NET_BIND_SERVICE",
    "SYS_CHROOT",
    "KILL",
    "AUDIT_WRITE",
];

/// The capability sets of one container: names with "CAP_", in the kernel's order.
pub struct CapabilitySets {
    /// The bounding set, which is also the effective and permitted set.
    pub bounding: Vec<String>,
    /// The ambient set, which processes without root keep.
    pub ambient: Vec<String>,
}

/// Returns the sets: the default one, with "ALL" of add and drop applied first, then the single names; drop takes precedence over
/// add.
pub fn compute_sets(container: &ContainerConfig) -> CapabilitySets {
    let requested = &container.capabilities;
    let has = |list: &[String], name: &str| list.iter().any(|each| each == name);
    let base = |name: &str| {
        container.privileged || has(&requested.add, "ALL") || (DEFAULT.contains(&name) && !has(&requested.drop, "ALL"))
    };
    let given = |name: &str| {
        container.privileged
            || (!has(&requested.drop, name)
                && (base(name) || has(&requested.add, name) || has(&requested.ambient, name)))
    };
    let named = |keep: &dyn Fn(&str) -> bool| {
        capability::ALL.into_iter().filter(|name| keep(name)).map(|n| format!("CAP_{n}")).collect()
    };
    CapabilitySets { bounding: named(&given), ambient: named(&|name| given(name) && has(&requested.ambient, name)) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacelle_model::security::Capabilities;
    use nacelle_model::testing::container;

    fn sets(add: &[&str], drop: &[&str], ambient: &[&str]) -> CapabilitySets {
        let list = |list: &[&str]| list.iter().map(|name| (*name).to_owned()).collect();
        let mut config = (*container(1, 1).config).clone();
        config.capabilities = Capabilities { add: list(add), drop: list(drop), ambient: list(ambient) };
        compute_sets(&config)
    }

    #[test]
    fn add_and_drop_in_every_mixture() {
        assert_eq!(sets(&[], &[], &[]).bounding.len(), 14);
        assert!(sets(&[], &["ALL"], &[]).bounding.is_empty());
        assert_eq!(sets(&["NET_ADMIN"], &["ALL"], &[]).bounding, ["CAP_NET_ADMIN"]);
        assert_eq!(sets(&["ALL"], &[], &[]).bounding.len(), 41);
        assert_eq!(sets(&["ALL"], &["SYS_ADMIN"], &[]).bounding.len(), 40);
        assert_eq!(sets(&["SYS_TIME"], &["KILL"], &[]).bounding.len(), 14);
        let with = sets(&[], &["ALL"], &["NET_BIND_SERVICE"]);
        assert_eq!((with.bounding, with.ambient.len()), (vec!["CAP_NET_BIND_SERVICE".to_owned()], 1));
    }
}
