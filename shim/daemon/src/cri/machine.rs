//! Owns: what becomes of a pod's annotations of machines: they are checked before anything exists, with the code of
//! `nacelle vm validate`, and what this version does not run is refused by name.

use super::convert::EMPTY_DIR_LIMITS;
use super::status::refuse;
use crate::nouns::Pairs;
use nacelle_base::Kind;
use nacelle_vmi::admit;
use nacelle_vmi::annotations::PREFIX;
use nacelle_vmi::preset::Catalogue;
use tonic::Status;

/// How much of what is wrong is told: gRPC has room for little more.
const TOLD: usize = 3500;
/// What others honour: docs/volumes.md.
const ELSEWHERE: [&str; 1] = [EMPTY_DIR_LIMITS];

/// Whether the pod can be without a machine of its own making.
pub(super) fn check(annotations: &Pairs) -> Result<(), Status> {
    let ours = annotations.iter().filter(|(key, _)| key.starts_with(PREFIX) && !ELSEWHERE.contains(&key.as_str()));
    let ours: Pairs = ours.map(|(key, value)| (key.clone(), value.clone())).collect();
    if ours.is_empty() {
        return Ok(());
    }
    if let Err(causes) = admit::pod(&ours, &Catalogue::default()) {
        return Err(refuse(Kind::Invalid, &format!("config.annotations: {}", causes.brief(TOLD))));
    }
    let keys: Vec<&str> = ours.keys().map(String::as_str).collect();
    let message = format!(
        "config.annotations has {}: what is said there is right, but this version of Nacelle does not shape or run machines \
         by annotations (docs/vm.md): take them out",
        keys.join(", ")
    );
    Err(refuse(Kind::Unsupported, &message))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tonic::Code;

    fn told(annotations: &[(&str, &str)]) -> Option<(Code, String)> {
        let pairs = annotations.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        check(&pairs).err().map(|status| (status.code(), status.message().to_owned()))
    }

    #[test]
    fn other_annotations_are_nobodys_business() {
        assert_eq!(told(&[("example.com/a", "b"), (EMPTY_DIR_LIMITS, "a=1Gi")]), None);
    }

    #[test]
    fn what_is_wrong_is_told_at_once_and_what_is_right_is_not_run_yet() {
        let spec = r#"{"domain": {"cpu": {"cores": 0}, "devices": {"disks": [{"name": "a", "disk": {"bus": "ide"}}, {"name": "a"}]}}}"#;
        let (code, message) = told(&[("vm.nacelle.dev/spec", spec)]).unwrap();
        assert_eq!(code, Code::InvalidArgument);
        for field in
            ["spec.domain.cpu.cores", "spec.domain.devices.disks[0].disk.bus", "spec.domain.devices.disks[1].name"]
        {
            assert!(message.contains(field), "{message}");
        }
        let (code, message) = told(&[("vm.nacelle.dev/cpus", "2"), ("vm.nacelle.dev/memory", "1Gi")]).unwrap();
        assert_eq!(code, Code::Unimplemented);
        assert!(message.contains("vm.nacelle.dev/cpus, vm.nacelle.dev/memory"), "{message}");
    }

    #[test]
    fn what_is_wrong_in_many_places_fits_into_a_status() {
        let disks: String = (0..30).map(|disk| format!("d{disk}=empty:1Gi,bus=ide,cache=some;")).collect();
        let (_, message) = told(&[("vm.nacelle.dev/disks", &disks)]).unwrap();
        assert!(message.len() < 4000 && message.ends_with("more: `nacelle vm validate` tells all"), "{message}");
    }
}
