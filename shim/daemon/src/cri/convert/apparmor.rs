//! Converts the AppArmor profiles that pods and containers request.
//!
//! AppArmor confines containers of engine `host`. The guests' kernel has none, which satisfies RuntimeDefault and Unconfined.

use super::{FieldError, bad, not_yet};
use crate::apparmor::RequestedApparmor;
use nacelle_proto::cri;
use nacelle_proto::cri::security_profile::ProfileType;

/// The largest name of a profile in bytes.
const LONGEST: usize = 1024;

/// Returns the profile that a container requests. A privileged container has none but one of the node.
#[expect(deprecated, reason = "kubelets before 1.30 send the old field")]
pub fn requested_apparmor(config: Option<&cri::ContainerConfig>, guest: bool) -> Result<RequestedApparmor, FieldError> {
    let linux = config.and_then(|config| config.linux.as_ref());
    let Some(security) = linux.and_then(|linux| linux.security_context.as_ref()) else {
        return Ok(RequestedApparmor::Unset);
    };
    let field = match security.apparmor {
        Some(_) => "config.linux.security_context.apparmor.localhost_ref",
        None => "config.linux.security_context.apparmor_profile",
    };
    match requested(field, security.apparmor.as_ref(), &security.apparmor_profile)? {
        RequestedApparmor::Localhost(name) if guest => not_yet(
            field,
            name,
            "the guest's kernel has no AppArmor; leave it out, or run the pod by a handler whose engine is host",
        ),
        RequestedApparmor::Unset | RequestedApparmor::RuntimeDefault if security.privileged => {
            Ok(RequestedApparmor::Unconfined)
        }
        requested => Ok(requested),
    }
}

/// Checks the profile of a pod. It would apply to the pod's own process, and a pod of Nacelle has none.
pub(super) fn check_pod(security: &cri::LinuxSandboxSecurityContext) -> Result<(), FieldError> {
    let field = "config.linux.security_context.apparmor.localhost_ref";
    match requested(field, security.apparmor.as_ref(), "")? {
        RequestedApparmor::Localhost(name) => {
            not_yet(field, name, "a pod has no process of its own; set the profile on its containers")
        }
        RequestedApparmor::Unconfined | RequestedApparmor::Unset | RequestedApparmor::RuntimeDefault => Ok(()),
    }
}

/// Reads the profile in `field`: the new form, or the text of the deprecated one.
fn requested(
    field: &'static str,
    profile: Option<&cri::SecurityProfile>,
    old: &str,
) -> Result<RequestedApparmor, FieldError> {
    let name = match (profile, old) {
        (Some(profile), _) => match profile.profile_type() {
            ProfileType::RuntimeDefault => return Ok(RequestedApparmor::RuntimeDefault),
            ProfileType::Unconfined => return Ok(RequestedApparmor::Unconfined),
            ProfileType::Localhost => profile.localhost_ref.as_str(),
        },
        (None, "") => return Ok(RequestedApparmor::Unset),
        (None, "runtime/default") => return Ok(RequestedApparmor::RuntimeDefault),
        (None, "unconfined") => return Ok(RequestedApparmor::Unconfined),
        (None, name) => name,
    };
    // The prefix belongs to the deprecated field; some clients write it into the new field too.
    let plain = name.strip_prefix("localhost/").unwrap_or(name);
    if plain.is_empty() || plain.len() > LONGEST || plain.chars().any(char::is_control) {
        return bad(
            field,
            name,
            "the name of a profile of the node is needed: 1 to 1024 bytes without control characters",
        );
    }
    Ok(RequestedApparmor::Localhost(plain.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacelle_base::{Classify, FailureKind};

    type Change = fn(&mut cri::LinuxContainerSecurityContext);

    fn of(guest: bool, change: Change) -> Result<RequestedApparmor, FieldError> {
        let mut security = cri::LinuxContainerSecurityContext::default();
        change(&mut security);
        let linux = cri::LinuxContainerConfig { security_context: Some(security), ..Default::default() };
        requested_apparmor(Some(&cri::ContainerConfig { linux: Some(linux), ..Default::default() }), guest)
    }

    fn profile(kind: ProfileType, name: &str) -> Option<cri::SecurityProfile> {
        Some(cri::SecurityProfile { profile_type: kind.into(), localhost_ref: name.into() })
    }

    #[test]
    #[expect(deprecated, reason = "the old field is tested too")]
    fn profiles_of_both_fields_are_read() {
        use RequestedApparmor::{Localhost, RuntimeDefault, Unconfined, Unset};
        let cases: [(Change, RequestedApparmor); 10] = [
            (|_| (), Unset),
            (|s| s.privileged = true, Unconfined),
            (|s| s.apparmor = profile(ProfileType::RuntimeDefault, ""), RuntimeDefault),
            (|s| (s.privileged, s.apparmor) = (true, profile(ProfileType::RuntimeDefault, "")), Unconfined),
            (|s| s.apparmor = profile(ProfileType::Unconfined, ""), Unconfined),
            (|s| s.apparmor = profile(ProfileType::Localhost, "a b//c"), Localhost("a b//c".into())),
            (|s| s.apparmor = profile(ProfileType::Localhost, "localhost/p"), Localhost("p".into())),
            (|s| (s.privileged, s.apparmor) = (true, profile(ProfileType::Localhost, "p")), Localhost("p".into())),
            (|s| s.apparmor_profile = "localhost/p".into(), Localhost("p".into())),
            (|s| s.apparmor_profile = "runtime/default".into(), RuntimeDefault),
        ];
        for (index, (change, expected)) in cases.into_iter().enumerate() {
            assert_eq!(of(false, change), Ok(expected), "case {index}");
        }
        assert_eq!(requested_apparmor(None, false), Ok(Unset));
    }

    #[test]
    fn unusable_names_are_refused() {
        let names: [Change; 4] = [
            |s| s.apparmor = profile(ProfileType::Localhost, ""),
            |s| s.apparmor = profile(ProfileType::Localhost, "localhost/"),
            |s| s.apparmor = profile(ProfileType::Localhost, "p\nexec unconfined"),
            |s| s.apparmor = profile(ProfileType::Localhost, &"p".repeat(1025)),
        ];
        for (index, change) in names.into_iter().enumerate() {
            assert_eq!(of(false, change).unwrap_err().kind(), FailureKind::Invalid, "case {index}");
        }
    }

    #[test]
    #[expect(deprecated, reason = "the old field is tested too")]
    fn guests_and_pods_have_no_profile_of_the_node() {
        let local: Change = |s| s.apparmor = profile(ProfileType::Localhost, "p");
        let old: Change = |s| s.apparmor_profile = "localhost/p".into();
        for (change, field) in [(local, "apparmor.localhost_ref is"), (old, "apparmor_profile is")] {
            let error = of(true, change).unwrap_err();
            assert_eq!(error.kind(), FailureKind::Unsupported);
            assert!(error.to_string().contains(field), "{error}");
        }
        assert_eq!(
            of(true, |s| s.apparmor = profile(ProfileType::RuntimeDefault, "")),
            Ok(RequestedApparmor::RuntimeDefault)
        );
        let pod = |apparmor| cri::LinuxSandboxSecurityContext { apparmor, ..Default::default() };
        assert_eq!(check_pod(&pod(profile(ProfileType::RuntimeDefault, ""))), Ok(()));
        assert_eq!(check_pod(&pod(profile(ProfileType::Localhost, "p"))).unwrap_err().kind(), FailureKind::Unsupported);
    }
}
