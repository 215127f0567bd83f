//! Defines seccomp profiles of the node (`Localhost`): what such a file may contain, and the filter that it amounts to for one
//! container. The format is that of Docker and Podman, of which OCI's LinuxSeccomp is a part. The daemon reads the files.

use crate::capability;
use nacelle_base::json;
use nacelle_base::{Classify, FailureKind};
use oci_spec::runtime::{Arch, LinuxSeccompAction, LinuxSeccompFilterFlag, LinuxSeccompOperator};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value, json};

/// The largest error number that a filter can return.
const MAX_ERRNO: u32 = 4095;
/// The largest index of an argument of a system call.
const MAX_ARGUMENT: u64 = 5;
/// The name of this architecture in the format, which uses Go's names here.
const ARCH: &str = "amd64";

/// A seccomp profile cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SeccompProfileError {
    /// The bytes are not the JSON of a profile.
    #[error("it is no profile")]
    Json(#[source] serde_json::Error),
    /// A value violates a rule of the format.
    #[error("{rule}")]
    Rule {
        /// The rule and the value.
        rule: String,
    },
    /// The profile needs a listener for notifications.
    #[error("it asks for {what}: no process in a pod's VM answers notifications; leave it out")]
    Notify {
        /// The feature.
        what: &'static str,
    },
}

impl Classify for SeccompProfileError {
    fn kind(&self) -> FailureKind {
        match self {
            SeccompProfileError::Notify { .. } => FailureKind::Unsupported,
            SeccompProfileError::Json(_) | SeccompProfileError::Rule { .. } => FailureKind::Invalid,
        }
    }
}

/// A profile as its file contains it. Fields of the format that have no effect on a filter are left out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SeccompProfile {
    default_action: LinuxSeccompAction,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    default_errno_ret: Option<u32>,
    #[serde(default, deserialize_with = "list", skip_serializing_if = "Vec::is_empty")]
    architectures: Vec<Arch>,
    #[serde(default, deserialize_with = "list", skip_serializing_if = "Vec::is_empty")]
    arch_map: Vec<ArchMap>,
    #[serde(default, deserialize_with = "list", skip_serializing_if = "Vec::is_empty")]
    flags: Vec<LinuxSeccompFilterFlag>,
    #[serde(default, deserialize_with = "list", skip_serializing_if = "Vec::is_empty")]
    syscalls: Vec<Syscall>,
    #[serde(default, skip_serializing)]
    listener_path: Option<String>,
}

/// Reads a list that may be null, which is how Go writes an empty one.
fn list<'de, D: Deserializer<'de>, T: Deserialize<'de>>(from: D) -> Result<Vec<T>, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or_default())
}

/// The architectures that an architecture includes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct ArchMap {
    architecture: Arch,
    #[serde(default, deserialize_with = "list", skip_serializing_if = "Vec::is_empty")]
    sub_architectures: Vec<Arch>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Syscall {
    #[serde(default, skip_serializing_if = "String::is_empty")]
    name: String,
    #[serde(default, deserialize_with = "list", skip_serializing_if = "Vec::is_empty")]
    names: Vec<String>,
    action: LinuxSeccompAction,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    errno_ret: Option<u32>,
    #[serde(default, deserialize_with = "list", skip_serializing_if = "Vec::is_empty")]
    args: Vec<Argument>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    includes: Option<Filter>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    excludes: Option<Filter>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Argument {
    #[serde(default)]
    index: u64,
    #[serde(default)]
    value: u64,
    #[serde(default)]
    value_two: u64,
    op: LinuxSeccompOperator,
}

/// The conditions under which a rule applies, or does not.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Filter {
    #[serde(default, deserialize_with = "list", skip_serializing_if = "Vec::is_empty")]
    caps: Vec<String>,
    #[serde(default, deserialize_with = "list", skip_serializing_if = "Vec::is_empty")]
    arches: Vec<String>,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    min_kernel: String,
}

impl SeccompProfile {
    /// Parses and checks a profile.
    pub fn parse(bytes: &[u8]) -> Result<SeccompProfile, SeccompProfileError> {
        let mut profile: SeccompProfile = json::read(bytes).map_err(SeccompProfileError::Json)?;
        let notify = |what| Err(SeccompProfileError::Notify { what });
        let mut actions = profile.syscalls.iter().map(|call| call.action).chain([profile.default_action]);
        if actions.any(|action| action == LinuxSeccompAction::ScmpActNotify) {
            return notify("SCMP_ACT_NOTIFY");
        }
        if profile.listener_path.take().is_some_and(|path| !path.is_empty()) {
            return notify("listenerPath");
        }
        if profile.flags.contains(&LinuxSeccompFilterFlag::SeccompFilterFlagWaitKillableRecv) {
            return notify("SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV");
        }
        profile.check().map_err(|rule| SeccompProfileError::Rule { rule })?;
        Ok(profile)
    }

    /// Checks the rules that deserialization does not enforce.
    fn check(&self) -> Result<(), String> {
        if !self.architectures.is_empty() && !self.arch_map.is_empty() {
            return Err("it has both architectures and archMap; one of them is allowed".into());
        }
        let errno = |errno: Option<u32>| match errno.filter(|errno| *errno > MAX_ERRNO) {
            Some(errno) => Err(format!("{errno} is no error number: 0 to {MAX_ERRNO} are")),
            None => Ok(()),
        };
        errno(self.default_errno_ret)?;
        for call in self.syscalls.iter() {
            errno(call.errno_ret)?;
            if call.name.is_empty() == call.names.is_empty() {
                return Err("each rule needs either names or name".into());
            }
            if let Some(argument) = call.args.iter().find(|argument| argument.index > MAX_ARGUMENT) {
                return Err(format!("a system call has no argument {}: 0 to {MAX_ARGUMENT} are", argument.index));
            }
            for filter in call.includes.iter().chain(&call.excludes) {
                let unknown = |cap: &&String| !capability::is_known(&capability::normalize(cap));
                if let Some(cap) = filter.caps.iter().find(unknown) {
                    return Err(format!("{cap:?} is no capability of Linux"));
                }
                if !filter.min_kernel.is_empty() && version(&filter.min_kernel).is_none() {
                    return Err(format!("{:?} is no version of a kernel", filter.min_kernel));
                }
            }
        }
        Ok(())
    }

    /// Returns OCI's LinuxSeccomp for a container with these capabilities ("CAP_...") on a kernel of this release.
    pub fn resolve(&self, capabilities: &[String], kernel: &str) -> Value {
        let mut oci = Map::new();
        oci.insert("defaultAction".into(), json!(self.default_action));
        if let Some(errno) = self.default_errno_ret {
            oci.insert("defaultErrnoRet".into(), json!(errno));
        }
        let mapped = self.arch_map.iter().find(|map| map.architecture == Arch::ScmpArchX86_64);
        let mapped = mapped.into_iter().flat_map(|map| [&[map.architecture][..], &map.sub_architectures].concat());
        let architectures: Vec<Arch> = self.architectures.iter().copied().chain(mapped).collect();
        if !architectures.is_empty() {
            oci.insert("architectures".into(), json!(architectures));
        }
        if !self.flags.is_empty() {
            oci.insert("flags".into(), json!(self.flags));
        }
        let target = Target { capabilities, kernel: version(kernel) };
        let calls = self.syscalls.iter().filter(|call| target.applies(call));
        oci.insert("syscalls".into(), calls.map(Syscall::oci).collect());
        Value::Object(oci)
    }
}

impl Syscall {
    fn oci(&self) -> Value {
        let names = if self.name.is_empty() { json!(self.names) } else { json!([self.name]) };
        let mut rule = Map::from_iter([("names".into(), names), ("action".into(), json!(self.action))]);
        if let Some(errno) = self.errno_ret {
            rule.insert("errnoRet".into(), json!(errno));
        }
        // An empty list is no condition and is left out.
        if !self.args.is_empty() {
            rule.insert("args".into(), json!(self.args));
        }
        Value::Object(rule)
    }
}

/// The container and kernel for which a profile is resolved.
struct Target<'a> {
    capabilities: &'a [String],
    kernel: Option<(u32, u32)>,
}

impl Target<'_> {
    /// Returns whether the rule applies: all of its `includes` and none of its `excludes` match.
    fn applies(&self, call: &Syscall) -> bool {
        let cap = |name: &String| {
            let name = capability::normalize(name);
            self.capabilities.iter().any(|each| each.strip_prefix("CAP_") == Some(&name))
        };
        let arch = |name: &String| name == ARCH;
        // An unknown kernel counts as older than any.
        let new = |wanted: &str| self.kernel >= version(wanted);
        let included = call.includes.as_ref().is_none_or(|filter| {
            filter.caps.iter().all(cap)
                && (filter.arches.is_empty() || filter.arches.iter().any(arch))
                && (filter.min_kernel.is_empty() || new(&filter.min_kernel))
        });
        let excluded = call.excludes.as_ref().is_some_and(|filter| {
            filter.caps.iter().any(cap)
                || filter.arches.iter().any(arch)
                || (!filter.min_kernel.is_empty() && new(&filter.min_kernel))
        });
        included && !excluded
    }
}

/// Parses the first two numbers of a kernel's release: "6.12.9-x" gives 6 and 12.
fn version(text: &str) -> Option<(u32, u32)> {
    let mut numbers = text.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use oci_spec::runtime::LinuxSeccomp;
    use proptest::prelude::*;

    fn parsed(value: &Value) -> Result<SeccompProfile, SeccompProfileError> {
        SeccompProfile::parse(value.to_string().as_bytes())
    }

    fn names(profile: &Value) -> Vec<String> {
        let calls = profile["syscalls"].as_array().unwrap().iter();
        calls.flat_map(|call| call["names"].as_array().unwrap()).map(|name| name.as_str().unwrap().to_owned()).collect()
    }

    #[test]
    fn what_a_file_says_arrives_as_oci() {
        let profile = parsed(&json!({
            "defaultAction": "SCMP_ACT_ERRNO", "defaultErrnoRet": 38, "listenerPath": "", "comment": "ignored",
            "architectures": ["SCMP_ARCH_X86_64", "SCMP_ARCH_X86"], "flags": ["SECCOMP_FILTER_FLAG_LOG"],
            "syscalls": [
                { "names": ["read", "no_such_call"], "action": "SCMP_ACT_ALLOW", "args": null, "comment": "" },
                { "name": "mkdir", "action": "SCMP_ACT_ERRNO", "errnoRet": 95, "args": [] },
                { "names": ["clone"], "action": "SCMP_ACT_ALLOW", "args": [
                    { "index": 0, "value": 2_114_060_288_u64, "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ" },
                    { "index": 1, "value": u64::MAX, "op": "SCMP_CMP_NE" }] },
            ],
        }))
        .unwrap();
        let oci = profile.resolve(&[], "6.12.0");
        assert_eq!(oci["architectures"], json!(["SCMP_ARCH_X86_64", "SCMP_ARCH_X86"]));
        assert_eq!(oci["flags"], json!(["SECCOMP_FILTER_FLAG_LOG"]));
        assert_eq!(names(&oci), ["read", "no_such_call", "mkdir", "clone"]);
        assert_eq!(oci["syscalls"][1]["args"], Value::Null);
        let typed: LinuxSeccomp = serde_json::from_value(oci).unwrap();
        assert_eq!((typed.default_action(), typed.default_errno_ret()), (LinuxSeccompAction::ScmpActErrno, Some(38)));
        let calls = typed.syscalls().as_ref().unwrap();
        assert_eq!((calls[1].errno_ret(), calls[2].args().as_ref().unwrap()[1].value()), (Some(95), u64::MAX));
        // A profile that is stored with the container is read again unchanged.
        let kept = serde_json::to_vec(&profile).unwrap();
        assert_eq!(serde_json::from_slice::<SeccompProfile>(&kept).unwrap(), profile);
    }

    #[test]
    fn rules_hold_for_the_capabilities_the_architecture_and_the_kernel_they_name() {
        let rule =
            |name: &str, key: &str, filter: Value| json!({ "names": [name], "action": "SCMP_ACT_ALLOW", key: filter });
        let profile = parsed(&json!({
            "defaultAction": "SCMP_ACT_ERRNO",
            "archMap": [
                { "architecture": "SCMP_ARCH_AARCH64", "subArchitectures": ["SCMP_ARCH_ARM"] },
                { "architecture": "SCMP_ARCH_X86_64", "subArchitectures": ["SCMP_ARCH_X86", "SCMP_ARCH_X32"] },
            ],
            "syscalls": [
                rule("admin", "includes", json!({ "caps": ["CAP_SYS_ADMIN"] })),
                rule("both", "includes", json!({ "caps": ["CAP_SYS_ADMIN", "CAP_NET_ADMIN"] })),
                rule("without", "excludes", json!({ "caps": ["CAP_NET_ADMIN", "CAP_SYS_ADMIN"] })),
                rule("here", "includes", json!({ "arches": ["arm64", "amd64"] })),
                rule("elsewhere", "includes", json!({ "arches": ["arm64", "s390x"] })),
                rule("not_here", "excludes", json!({ "arches": ["amd64"] })),
                rule("new", "includes", json!({ "minKernel": "4.8" })),
                rule("newer", "includes", json!({ "minKernel": "6.13" })),
                rule("old", "excludes", json!({ "minKernel": "6.12" })),
                rule("always", "includes", json!({})),
            ],
        }))
        .unwrap();
        let admin = profile.resolve(&["CAP_SYS_ADMIN".into()], "6.12.9-nacelle");
        assert_eq!(admin["architectures"], json!(["SCMP_ARCH_X86_64", "SCMP_ARCH_X86", "SCMP_ARCH_X32"]));
        assert_eq!(names(&admin), ["admin", "here", "new", "always"]);
        let both = profile.resolve(&["CAP_SYS_ADMIN".into(), "CAP_NET_ADMIN".into()], "6.13.0");
        assert_eq!(names(&both), ["admin", "both", "here", "new", "newer", "always"]);
        assert_eq!(names(&profile.resolve(&[], "")), ["without", "here", "old", "always"]);
    }

    #[test]
    fn what_cannot_be_honoured_is_refused() {
        let with = |key: &str, value: Value| {
            let mut profile = json!({ "defaultAction": "SCMP_ACT_ALLOW" });
            profile[key] = value;
            profile
        };
        let call = |key: &str, value: Value| {
            let mut call = json!({ "names": ["read"], "action": "SCMP_ACT_ERRNO" });
            call[key] = value;
            with("syscalls", json!([call]))
        };
        let rows = [
            (json!({}), FailureKind::Invalid, "is no profile"),
            (json!([]), FailureKind::Invalid, "is no profile"),
            (with("defaultAction", json!("SCMP_ACT_FLY")), FailureKind::Invalid, "is no profile"),
            (with("defaultAction", json!("SCMP_ACT_NOTIFY")), FailureKind::Unsupported, "SCMP_ACT_NOTIFY"),
            (call("action", json!("SCMP_ACT_NOTIFY")), FailureKind::Unsupported, "SCMP_ACT_NOTIFY"),
            (with("listenerPath", json!("/run/x")), FailureKind::Unsupported, "listenerPath"),
            (with("flags", json!(["SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV"])), FailureKind::Unsupported, "KILLABLE"),
            (with("flags", json!(["FLAG"])), FailureKind::Invalid, "is no profile"),
            (with("architectures", json!(["SCMP_ARCH_PDP11"])), FailureKind::Invalid, "is no profile"),
            (with("defaultErrnoRet", json!(4096)), FailureKind::Invalid, "4096"),
            (call("errnoRet", json!(70_000)), FailureKind::Invalid, "70000"),
            (call("name", json!("write")), FailureKind::Invalid, "names or name"),
            (call("names", json!([])), FailureKind::Invalid, "names or name"),
            (call("args", json!([{ "index": 6, "op": "SCMP_CMP_EQ" }])), FailureKind::Invalid, "argument 6"),
            (call("args", json!([{ "index": 0, "op": "?" }])), FailureKind::Invalid, "is no profile"),
            (call("includes", json!({ "caps": ["CAP_FLY"] })), FailureKind::Invalid, "CAP_FLY"),
            (call("excludes", json!({ "minKernel": "new" })), FailureKind::Invalid, "\"new\""),
        ];
        for (value, kind, words) in rows {
            let error = parsed(&value).unwrap_err();
            assert_eq!(error.kind(), kind, "{error}");
            assert!(error.to_string().contains(words), "{error}");
        }
        let mut both = with("architectures", json!(["SCMP_ARCH_X86_64"]));
        both["archMap"] = json!([{ "architecture": "SCMP_ARCH_X86_64" }]);
        assert!(parsed(&both).unwrap_err().to_string().contains("archMap"));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn any_bytes_are_a_profile_or_an_error(bytes: Vec<u8>) {
            drop(SeccompProfile::parse(&bytes));
        }
    }
}
